"""
Is what stands in model.py and train.py still sound? Checks a small model of the config's own kind.

    python check.py config/llama_small.py
    python check.py --init_from=out
"""
import contextlib
import dataclasses
import functools
import math
import os
import sys
import tempfile
import time

from configurator import configure, show

init_from = 'scratch'             # scratch (random weights), or as in train.py
dataset = ''                      # its vocabulary is used
device = 'auto'                   # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
json: bool | str = False          # True: the numbers as a last line too; or the file to add that line to
config, model_args, words = configure(globals(), 'GPTConfig', words=1)[:3]

import numpy as np
import torch

import train
from bench import fields_asked, fill_zeros, print_json
from model import (
    GPT,
    ROPE_SCALINGS,
    BaseAttention,
    GPTConfig,
    GroupedLinear,
    LatentAttention,
)
from prepare import Bins

def update(model, forward, batch, optimizers, scaler, autocast, settings):
    """An update of the weights as train.py does it; returns the loss before it."""
    loss, expert_load, _ = train.gradients(forward, batch, iter(()), 1, autocast, scaler,
                                           settings['balance_loss'], settings['z_loss'])
    train.update(model, list(model.parameters()), optimizers, scaler, settings['grad_clip'], expert_load,
                 settings['balance_rate'])
    return loss


# checking ---------------------------------------------------------------------------------------------------

class CheckFailed(Exception):
    """What a check has found to be wrong, in one line."""


def tiny_config(config):
    """A config of the same kind with everything in it that can go wrong, but small: each kind of layer stands
    in it, and what is several stays several (heads of a group, groups of experts), for one has no order to
    be confused. Widths do not divide each other where they need not, so that a wrong one cannot fit by
    chance. Raises ValueError where that gives no model."""
    block_size, experts = 24, config.n_expert is not None

    def fewer(n, most):
        return None if n is None else min(n, most)

    changes = dict(block_size=block_size, vocab_size=61, n_embd=32, d_ff=40,
                   n_layer=layers_of_every_kind(config), n_dense_layer=min(1, config.n_dense_layer))
    if config.document_token is not None:
        changes.update(document_token=3)
    if config.embed_scale == config.n_embd ** 0.5:
        changes.update(embed_scale=32 ** 0.5)
    if config.window is not None:  # as much of the context as it was, and at least 3 tokens
        changes.update(window=max(3, round(config.window * block_size / config.block_size)))
    if config.kv_lora_rank is not None:
        changes.update(n_head=min(4, config.n_head), kv_lora_rank=16, qk_nope_head_dim=8, v_head_dim=12,
                       qk_rope_head_dim=min(4, config.qk_rope_head_dim),
                       q_lora_rank=fewer(config.q_lora_rank, 20))
    elif not config.has_attention:
        changes.update(n_head=4, n_kv_head=None, head_dim=None)
    else:
        # the smallest width of a head in which a whole number of pairs is rotated
        head_dim = next((d for d in range(8, 64, 2) if int(d * config.partial_rotary_factor) in (2, 4, 6, 8)),
                        config.head_dim)
        kv_heads = min(2, config.n_kv_head)
        changes.update(n_kv_head=kv_heads, n_head=kv_heads * min(4, config.n_head // config.n_kv_head),
                       head_dim=head_dim)
        if config.attn_scale is not None:
            changes.update(attn_scale=config.attn_scale * (config.head_dim / head_dim) ** 0.5)
    if config.linear_n_key_head is not None:
        keys = min(2, config.linear_n_key_head)
        values = keys * min(2, config.linear_n_value_head // config.linear_n_key_head)
        changes.update(linear_n_key_head=keys, linear_n_value_head=values, linear_key_head_dim=6,
                       linear_value_head_dim=10)
    if experts:
        groups = fewer(config.n_group, 4)
        n_expert = 2 * groups if groups else min(8, config.n_expert)
        chosen = max(1, config.topk_group * groups // config.n_group) if groups else None
        allowed = 2 * chosen if groups else max(2, n_expert // 2)
        changes.update(n_expert=n_expert, n_group=groups, topk_group=chosen, d_expert=24,
                       n_expert_active=min(config.n_expert_active, allowed),
                       n_shared_expert=fewer(config.n_shared_expert, 2))
    if config.rope_scaling:
        changes.update(rope_scaling=tiny_scaling(config, changes))
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as error:
        raise ValueError(f"check makes a small model of this kind, see tiny_config in bench.py, but: {error}"
                         ) from None


def tiny_scaling(config, changes):
    """rope_scaling for what `changes` makes of a config: the lengths in it as shares of the context, and as
    many factors as there are pairs."""
    scaling, share = dict(config.rope_scaling), changes['block_size'] / config.block_size
    if 'original_max_position_embeddings' in scaling:
        scaling['original_max_position_embeddings'] = max(
            8, round(scaling['original_max_position_embeddings'] * share))
    pairs = (changes.get('qk_rope_head_dim') or int(changes['head_dim'] * config.partial_rotary_factor)) // 2
    for name in ('short_factor', 'long_factor'):
        if name in scaling:
            scaling[name] = scaling[name][:pairs]
    return scaling


def layers_of_every_kind(config):
    """How many layers, at least two, it takes for each kind of layer that the config has to be there."""
    few = dataclasses.replace(config, n_dense_layer=min(1, config.n_dense_layer))
    kinds = [(few.mixer_of(i), few.window_of(i), few.has_experts(i),
              few.pos_pattern[i % len(few.pos_pattern)]) for i in range(config.n_layer)]
    return next(n for n in range(min(2, config.n_layer), config.n_layer + 1) if set(kinds[:n]) == set(kinds))


def randomized(config, dropout=0.0):
    """A model in evaluation mode whose every weight matters: nothing is left at zero or one, where much of it
    starts, for a branch that ends in zeros hides whatever is wrong in it."""
    model = GPT(dataclasses.replace(config, dropout=dropout))
    with torch.no_grad():
        for w in model.parameters():
            if w.ndim < 2:
                w += 0.2 * torch.randn_like(w)
            else:
                w.copy_(0.3 * torch.randn_like(w))
    return model.eval()


def random_tokens(config, *shape):
    """Token ids (shape); if the model knows where documents end, none of them is such an end."""
    idx = torch.randint(config.vocab_size, shape)
    return idx if config.document_token is None else idx.where(idx != config.document_token, 0)


class KeepsFloat64(torch.overrides.TorchFunctionMode):
    """Under it float64 stays float64 where a model asks for float32, as norms and routers do: differences
    of 1e-6 are then visible in a loss."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        wants_float32 = function is torch.Tensor.float or (
            function is torch.Tensor.to and torch.float32 in (*args[1:], *(kwargs or {}).values()))
        if wants_float32 and args[0].dtype is torch.float64:
            return args[0]
        return function(*args, **(kwargs or {}))


def to_float64(model):
    """The model in float64, to be used under KeepsFloat64; its mixers' states too, if they hold floats."""
    for block in model.h:
        block.attn.states = [(shape, None if dtype is None or dtype.is_floating_point else dtype)
                             for shape, dtype in block.attn.states]
    return model.double()


def require(holds, message):
    if not holds:
        raise CheckFailed(message)


def require_equal(found, expected, what, tolerance=1e-4):
    """Raises CheckFailed with the place where two tensors (rows, positions, ...) first differ by more,
    relative to the largest element."""
    difference = (found - expected).detach().abs().flatten(2).amax(2)
    wrong = ~(difference <= tolerance * max(1.0, float(expected.detach().abs().max())))  # nan is wrong
    if wrong.any():
        row, position = wrong.nonzero()[0].tolist()
        raise CheckFailed(f"{what}: first differs at row {row}, position {position} by "
                      f"{float(difference[row, position]):.2g}")


def check_parameters(config):
    model = GPT(config)
    for name, w in model.named_parameters():
        require(name in model.tags, f"{name} has no tag")
        torch.nn.init.constant_(w, math.nan)
    model.init_weights()
    unset = [name for name, w in model.named_parameters() if not w.isfinite().all()]
    require(not unset, f"{', '.join(unset[:5])} is not finite after init_weights")
    for kind in train.OPTIMIZERS:
        groups = [group for opt in train.make_optimizers(model, {**train.config, 'optimizer': kind})
                  for group in opt.param_groups]
        for name, w in model.named_parameters():
            times = sum(w is other for group in groups for other in group['params'])
            require(times == 1, f"{name} stands in {times} groups of --optimizer={kind}")
    return f"{len(model.tags)} parameters, {' and '.join(train.OPTIMIZERS)}"


def check_first_loss(config):
    model, expected = GPT(config), math.log(config.vocab_size)
    idx = random_tokens(config, 8, config.block_size + 1)
    loss, _ = model(idx[:, :-1], idx[:, 1:])
    require(abs(loss.item() - expected) < 0.3, f"{loss.item():.3f} instead of about {expected:.3f}")
    return f"{loss.item():.3f}, ln({config.vocab_size}) is {expected:.3f}"


def check_targets(config):
    model = randomized(config)
    with training_run(config) as run:
        inputs, targets, _ = next(run.read(0))
    for row, (x, y) in enumerate(zip(inputs.tolist(), targets.tolist())):
        starts = [i for i in range(len(run.tokens)) if run.tokens[i:i + len(x)].tolist() == x]
        require(starts and y in [run.tokens[i + 1:i + 1 + len(x)].tolist() for i in starts],
                f"row {row} of a batch has targets that do not follow its inputs")
    logits = model(inputs).double()
    by_hand = -logits.log_softmax(-1).gather(2, targets[..., None])[..., 0]
    some = targets.clone()
    some[:, ::3] = -1
    for y in (targets, some):
        loss, expected = model(inputs, y)[0].item(), by_hand[y != -1].mean().item()
        require(abs(loss - expected) < 1e-4 * expected,
                f"the loss is {loss:.5f}, the mean -log p(targets[t]) of the logits at t {expected:.5f}")


def changed_tokens(config):
    """(T + 1, T) token ids: rows that differ from the last one in one token, row t at position t."""
    T = config.block_size
    idx = random_tokens(config, 1, T).repeat(T + 1, 1)
    other = (idx[0] + 1) % config.vocab_size
    if config.document_token is not None:
        other = other.where(other != config.document_token, (other + 1) % config.vocab_size)
    idx[:T].diagonal().copy_(other)
    return idx


def check_causal(config):
    model, idx = randomized(config), changed_tokens(config)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            logits = model(idx)
        moved = (logits[:-1] - logits[-1:]).detach().abs().amax(-1)  # of the change at row, at position
        for t, at in (moved.tril(-1) > 1e-5 * logits.detach().abs().max()).nonzero().tolist():
            raise CheckFailed(f"{'in' if grad else 'without'} training, changing token {t} changes logits at "
                          f"position {at} by {moved[t, at]:.2g}")
        for t in (~(moved.diagonal() > 0)).nonzero().flatten().tolist():
            raise CheckFailed(f"changing token {t} does not change its own logits")


def check_windows(config):
    model, T, seen_in = to_float64(randomized(config)), config.block_size, {}
    x = torch.randn(1, T, config.n_embd).double().repeat(T + 1, 1, 1)
    x[range(T), range(T)] = torch.randn(T, config.n_embd).double()
    age = torch.arange(T) - torch.arange(T)[:, None]  # of the changed token in a row, at a position
    for grad in (True, False):
        with torch.set_grad_enabled(grad), KeepsFloat64():
            context = model.context(random_tokens(config, 1, T).repeat(len(x), 1))
            results = [block.attn(x, context) for block in model.h]
        for layer, (block, y) in enumerate(zip(model.h, results)):
            seen = (y[:-1] - y[-1:]).detach().abs().amax(-1) > 1e-9
            window, name = block.attn.window or T, type(block.attn).__name__
            # what has slots for its tokens sees all of them; a state may forget, and hand on what is older
            must = (age >= 0) & (age < window) if block.attn.slots else age == 0
            may = age >= 0 if block.attn.states else must
            wrong = seen & ~may | must & ~seen
            for s, t in wrong.nonzero().tolist():
                raise CheckFailed(f"layer {layer}, {name} with window {block.attn.window}: position {t} "
                              f"{'sees' if seen[s, t] else 'does not see'} position {s}")
            seen_in[name] = sorted({*seen_in.get(name, ()), window})
    return ', '.join(f"{name} {' and '.join('all' if w == T else str(w) for w in windows)}"
                     for name, windows in seen_in.items())


@contextlib.contextmanager
def recorded(model):
    """Within it each attention of the model appends (itself, q, k, v, result) of what it attends to."""
    calls, mixers = [], [block.attn for block in model.h if hasattr(block.attn, 'attend')]
    for mixer in mixers:
        def record(q, k, v, context, mixer=mixer, attend=mixer.attend):
            y = attend(q, k, v, context)
            calls.append((mixer, q, k, v, y))
            return y
        mixer.attend = record
    yield calls
    for mixer in mixers:
        del mixer.attend


def check_documents(config):
    starts, T = ((4, 5, 13), (10,)), config.block_size  # of a row's second document, its third...
    plain = GPT(dataclasses.replace(config, document_token=None)).eval()
    for block in plain.h:
        if not block.attn.documents:
            return f"{type(block.attn).__name__} does not keep them apart, and says so"
    packed = randomized(dataclasses.replace(config, document_token=3))
    plain.load_state_dict(packed.state_dict())
    idx = random_tokens(packed.config, len(starts), T)
    for row, later in zip(idx, starts):
        row[list(later)] = 3
    documents = [one for row, later in zip(idx, starts) for one in row.tensor_split(later)]
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            alone = torch.cat([y[:len(one)] for y, one in zip(plain(padded), documents)])
            require_equal(packed(idx), alone.unflatten(0, idx.shape),
                          f"{'in' if grad else 'without'} training, with documents that start at "
                          f"{' and at '.join(map(str, starts))}")
    return None


def check_rotation(config):
    model, T, remarks = to_float64(randomized(config)), config.block_size, []
    idx = random_tokens(config, 2, T)
    with KeepsFloat64(), torch.no_grad():
        context = model.context(idx)
        ropes = {kind: [part.double() for part in rope] for kind, rope in context.ropes.items() if rope}
        for kind, (cos, sin) in ropes.items():
            numbers = (config.rope_base, config.rope_dim, config.rope_scaling or ())
            base, width, scaling = numbers if kind == config.rope_kind else kind
            expected, factor = base ** (-torch.arange(0, width, 2).double() / width), 1.0
            if scaling:
                options = dict(scaling)
                expected, factor = ROPE_SCALINGS[options.pop('rope_type')](expected, base, T, **options)
            cos, sin = cos[0, 0], sin[0, 0]  # (T, pairs)
            angle = torch.atan2(sin[1], cos[1])  # of one position
            require(angle.shape == expected.shape and torch.allclose(angle, expected, rtol=1e-5),
                    f"a position turns pairs by {[round(a, 4) for a in angle.tolist()]}, not by "
                    f"{base}^(-2i/{width}){' scaled' if scaling else ''} = "
                    f"{[round(a, 4) for a in expected.tolist()]}")
            turned = torch.arange(T)[:, None] * expected
            require_equal(torch.stack((cos, sin)), factor * torch.stack((turned.cos(), turned.sin())),
                          'cosines (row 0) and sines (row 1) of the positions')
            remarks.append(f"{width} dimensions, base {base:,.0f}")
        contexts = [dataclasses.replace(context, ropes=dict.fromkeys(context.ropes)), context]
        for block in model.h:  # each on an input of its own, for what comes before it would differ too
            x = torch.randn(2, T, config.n_embd).double()
            with recorded(model) as calls:
                for each in contexts:
                    block.attn(x, each)
            for (mixer, *plain, _), (_, *found, _) in zip(calls, calls[len(calls) // 2:]):
                for name, a, b in zip(('queries', 'keys'), plain, found):
                    expected = a.clone()
                    if mixer.rope_kind is not None:
                        (cos, sin), width = ropes[mixer.rope_kind], mixer.rope_kind[1]
                        start = a.shape[-1] - width if isinstance(mixer, LatentAttention) else 0
                        expected[..., start:start + width] = rotated(a[..., start:start + width], cos, sin)
                    require_equal(b.transpose(1, 2), expected.transpose(1, 2),
                                  f"layer {mixer.layer}: {name} are not turned by their positions")
    return '; '.join(remarks) or 'no layer has a rotation'


def rotated(x, cos, sin):
    """x (..., pairs of a half-split layout), turned."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def alibi_by_the_paper(heads):
    """Slopes as the code of arXiv:2108.12409 has them."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return first if heads == power else first + alibi_by_the_paper(2 * power)[::2][:heads - power]


def check_attention(config):
    model, T = to_float64(randomized(config)), config.block_size
    idx, age = random_tokens(config, 2, T), torch.arange(T)[:, None] - torch.arange(T)
    compared = set()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), KeepsFloat64(), recorded(model) as calls:
            model(idx)
        for mixer, q, k, v, y in calls:
            if type(mixer).attend is not BaseAttention.attend:
                continue  # an attention of its own
            scale = mixer.scale if config.attn_scale or config.rope_scaling else q.shape[-1] ** -0.5
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
            score = torch.einsum('bhtd,bhsd->bhts', q, k) * scale
            if config.attn_softcap:
                score = config.attn_softcap * torch.tanh(score / config.attn_softcap)
            if config.pos == 'alibi' and mixer.pos:
                slopes = torch.tensor(alibi_by_the_paper(q.shape[1])).double() * config.alibi_scale
                score = score - slopes[:, None, None] * age
            weight = score.exp() * ((age >= 0) & (age < (mixer.window or T)))
            total = weight.sum(-1, keepdim=True)
            if mixer.sink is not None:
                total = total + mixer.sink.double().exp()[:, None, None]
            expected = (weight / total) @ v
            require_equal(y.transpose(1, 2), expected.transpose(1, 2), f"layer {mixer.layer}"
                          f"{' in training' if grad else ''}", tolerance=1e-6)
            compared.add(type(mixer).__name__)
    return ', '.join(sorted(compared)) or 'there is none that it could be compared with'


@torch.no_grad()
def check_cache(config):
    model, T, rows = randomized(config), config.block_size, torch.arange(3)
    idx = random_tokens(config, 3, T)
    if config.document_token is not None:
        idx[rows, 5 + 4 * rows] = config.document_token
    full = model(idx)

    def feed(cache, chunks, what):
        at = 0
        for n in chunks:
            require_equal(model(idx[:, at:at + n], cache=cache), full[:, at:at + n],
                          f"{what}, {n} after {at} tokens")
            at += n

    def step(cache, at, source, what, n=1):
        new = torch.stack([idx[row, a:a + n] for row, a in zip(source, at)])
        expected = torch.stack([full[row, a:a + n] for row, a in zip(source, at)])
        require_equal(model(new, cache=cache), expected, what)
        return [a + n for a in at]

    cache, odd = model.make_cache(3, T), [1, T // 4, 1, T // 3, 1]
    feed(cache, [*odd, T - sum(odd)], 'in odd chunks')
    feed(model.make_cache(3, T, static=True), [T - 3, 1, 2], 'in a static cache')
    cache, at = model.make_cache(3, T), [T // 2, T // 3, 2]
    last = model(idx[:, :T // 2], cache=cache, keep=1, lengths=torch.tensor(at))
    require_equal(last, full[rows, torch.tensor(at) - 1][:, None], 'the last of ragged rows')
    at = step(cache, step(cache, at, rows, 'ragged rows', 3), rows, 'ragged rows')
    cache.select([2, 0, 1, 2])
    source, at = [2, 0, 1, 2], [at[row] for row in (2, 0, 1, 2)]
    at = step(cache, at, source, 'after select')
    cache.reset(torch.tensor([False, True, False, True]))
    step(cache, [at[0], 0, at[2], 0], source, 'after reset of two rows')
    if any(block.attn.states for block in model.h):
        return 'chunks, reset, ragged rows, select; what keeps a state cannot rewind'
    cache, at = model.make_cache(3, T, max_rewind=4), T - 6
    model(idx[:, :at], cache=cache, keep=1)
    cache.rewind(torch.tensor([0, 4, 1]))
    step(cache, [at, at - 4, at - 1], rows, 'after rewind', 2)
    return 'chunks, reset, ragged rows, select, rewind'


@torch.no_grad()
def check_prompts(config):
    model, T = randomized(config), config.block_size
    first, second = random_tokens(config, 2, T), random_tokens(config, 2, T)
    alone = model(second)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    model(first)
    require_equal(model(second), alone, 'without a cache, after another prompt', tolerance=0)
    cache = model.make_cache(2, T)
    model(first, cache=cache)
    cache.reset()
    require_equal(model(second, cache=cache), alone, 'in a cache that was reset, after another prompt')
    model.train()
    with torch.enable_grad():
        model(first, first)
    changed = [name for name, w in model.state_dict().items() if not torch.equal(w, before[name])]
    require(not changed, f"a forward pass changes {', '.join(changed)}")


def objective(model, idx):
    """What train.gradients differentiates."""
    loss, aux = model(idx[:, :-1], idx[:, 1:])
    return loss + train.config['balance_loss'] * aux['balance'] if aux else loss


def check_gradients(config):
    model, step = to_float64(randomized(config)), 1e-6
    idx, worst = random_tokens(config, 2, config.block_size + 1), 0.0
    with KeepsFloat64():
        objective(model, idx).backward()
        with torch.no_grad():
            for name, w in model.named_parameters():
                require(w.grad is not None, f"{name} has no gradient")
                direction, kept, expected = torch.randn_like(w), w.clone(), 0.0
                for move in (step, -step):
                    w.copy_(kept + move * direction)
                    expected += float(objective(model, idx)) / (2 * move)
                w.copy_(kept)
                found = float((w.grad * direction).sum())
                error = abs(found - expected) / max(abs(expected), float(w.grad.norm()), 1e-3)
                require(error < 1e-4, f"{name}: {found:.6f} along a random direction, {expected:.6f} by "
                        "differences")
                worst = max(worst, error)
    return f"to {worst:.0e} of their size"


class TrainingRun:
    """A short run as train.py does one, on random tokens in a folder: its model, and what a step needs."""

    def __init__(self, config, folder, optimizer='adamw', model=None, **settings):
        self.tokens = np.fromfile(os.path.join(folder, 'train.bin'), dtype='<u2')
        self.bins = Bins(folder, 'train', dtype='uint16')
        self.settings = {**train.config, 'optimizer': optimizer, 'learning_rate': 1e-2, 'weight_decay': 0.0,
                         **settings}
        self.model, self.folder = (model or GPT(config)).train(), folder
        self.optimizers = train.make_optimizers(self.model, self.settings)
        self.scaler = torch.amp.GradScaler('cpu', enabled=False)
        self.progress = train.Progress()

    def read(self, first, iterations=1):
        return train.read_batches(self.bins, self.model.config.block_size, range(first, first + iterations),
                                  1, 4, 0, 'cpu')

    def step(self, batch):
        """An update; returns the loss before it."""
        train.seed_dropout(0, self.progress.iter_num, 0, 'cpu')
        loss = update(self.model, self.model, batch, self.optimizers, self.scaler, contextlib.nullcontext,
                      self.settings)
        self.progress.iter_num += 1
        return loss.item()

    def steps(self, count):
        for batch in self.read(self.progress.iter_num, count):
            self.step(batch)

    def save(self):
        path = os.path.join(self.folder, 'ckpt.pt')
        train.save(path, {'model_args': dataclasses.asdict(self.model.config), 'config': self.settings,
                          **train.snapshot(self.model, self.progress, self.optimizers, self.scaler)})
        return path


@contextlib.contextmanager
def training_run(config, **settings):
    """A TrainingRun in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = random_tokens(config, 40 * config.block_size + 1)
        tokens.numpy().astype('<u2').tofile(os.path.join(folder, 'train.bin'))
        yield TrainingRun(config, folder, **settings)


def check_training(config):
    for optimizer in train.OPTIMIZERS:
        with training_run(config, optimizer=optimizer) as run:
            before = {name: w.detach().clone() for name, w in run.model.named_parameters()}
            run.steps(4)  # where a branch starts at zero, what is in it learns from the second step on
            rows = {id(w): parts for w, parts in run.model.row_splits().items()}
            for name, w in run.model.named_parameters():
                moved = (w.detach() - before[name]).abs()
                parts = moved.split(rows[id(w)], dim=-2) if id(w) in rows else [moved]
                still = [i for i, part in enumerate(parts) if not part.any()]
                where = f", projection {still[0] + 1} of {len(parts)}" if still and len(parts) > 1 else ''
                require(not still, f"{name}{where} is where it was after 4 steps of --optimizer={optimizer}")
    return f"{' and '.join(train.OPTIMIZERS)}, 4 steps"


def check_sizes(config):
    model, seen = GPT(config), {}  # name -> what a module gave
    fill_zeros(model)

    def keep(name, module, inputs, output):
        output.retain_grad()
        seen[name] = output
    for layer, block in enumerate(model.h):
        block.register_forward_hook(functools.partial(keep, f"layer {layer}"))
        for module in (block.attn, block.mlp):
            module.register_forward_hook(functools.partial(keep, f"layer {layer}, {type(module).__name__}"))
    idx = random_tokens(config, 4, config.block_size + 1)
    model(idx[:, :-1], idx[:, 1:])[0].backward()
    streams = {name: float(x.detach().square().mean().sqrt()) for name, x in seen.items() if ',' not in name}
    # change of the loss for a relative change of what a module gives: of no unit, so that layers compare
    effects = {name: float(x.grad.norm() * x.detach().norm()) if x.grad is not None else 0.0
               for name, x in seen.items()}
    for what, values in (('activations go', streams), ('effects on the loss go', effects)):
        small, large = min(values, key=values.get), max(values, key=values.get)
        require(all(map(math.isfinite, values.values())) and values[large] < 100 * values[small],
                f"{what} from {values[small]:.2g} ({small}) to {values[large]:.2g} ({large})")
    return (f"{min(streams.values()):.2g} to {max(streams.values()):.2g}, effects on the loss "
            f"{min(effects.values()):.2g} to {max(effects.values()):.2g}")


def check_learning(config, steps=60):
    with training_run(config) as run:
        batch = next(run.read(0))
        losses = [run.step(batch) for _ in range(steps)]
    inputs = batch[0]
    with torch.no_grad():
        guessed = run.model.eval()(inputs)[:, :-1].argmax(-1)
    known = (guessed == inputs[:, 1:]).float().mean().item()
    require(losses[-1] < 0.5 * losses[0], f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f} only, in "
            f"{steps} steps")
    require(known > 0.5, f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}, but {known:.0%} of the "
            "next tokens are known: something else was learnt")
    return f"loss {losses[0]:.2f} to {losses[-1]:.2f} in {steps} steps, {known:.0%} of the next tokens known"


@torch.no_grad()
def check_dropout(config):
    model, idx = randomized(config, dropout=0.5), random_tokens(config, 2, config.block_size)
    plain = GPT(dataclasses.replace(config, dropout=0.0)).eval()
    plain.load_state_dict(model.state_dict())
    require_equal(model(idx), model(idx), 'two evaluations of the same tokens', tolerance=0)
    require_equal(model(idx), plain(idx), 'an evaluation of a model with dropout and of one without')
    model.train()
    require(model(idx, idx)[0] != model(idx, idx)[0],
            'two passes in training are equal: dropout=0.5 drops nothing')
    with training_run(config, model=model) as run:
        losses = [train.evaluate(model, model, run.bins, 2, 4, 'cpu', contextlib.nullcontext)[0]
                  for _ in range(2)]
        require(losses[0] == losses[1], f"train.evaluate gives {losses[0]} and then {losses[1]}")
        require(model.training, 'train.evaluate leaves the model in evaluation mode')


def check_head(config):
    with training_run(config) as run:
        run.steps(2)
    model, T = run.model.eval(), config.block_size
    idx = random_tokens(config, 2, T)
    idx[idx == 1] = 0
    with torch.no_grad():
        before = model(idx)
        model.wte.weight[1] += 1.0  # a token that is not in idx
        moved = (model(idx) - before).abs().amax((0, 1)) > 1e-6
    tied = config.tie_word_embeddings
    require(moved[1] == tied, f"tie_word_embeddings={tied}, but after training the logits of a token "
            f"{'do not move' if tied else 'move'} with its embedding")
    require(not moved[torch.arange(len(moved)) != 1].any(), "an embedding moves the logits of other tokens")
    return 'tied' if tied else 'not tied'


def check_saving(config):
    # a rate at which what follows the load moves far enough to matter
    with training_run(config, balance_rate=0.3) as run:
        run.steps(3)
        loaded, _ = GPT.from_checkpoint(run.save())
    idx = random_tokens(config, 3, config.block_size)
    require_equal(loaded.eval()(idx), run.model.eval()(idx), 'after GPT.from_checkpoint', tolerance=0)
    names = {name for name, _ in (*run.model.named_parameters(), *run.model.named_buffers())}
    lost = names - run.model.state_dict().keys()
    require(not lost, f"{', '.join(sorted(lost))} is in no checkpoint")


def check_resuming(config):
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # as train.py has it on a CPU
    try:
        for optimizer in train.OPTIMIZERS:
            with training_run(dataclasses.replace(config, dropout=0.1), optimizer=optimizer) as run:
                run.steps(2)
                path = run.save()
                run.steps(2)
                model, rest = GPT.from_checkpoint(path)
                again = TrainingRun(None, run.folder, optimizer, model)
                again.progress.iter_num = rest['iter_num']
                train.load_optimizers(again.optimizers, rest['optimizer'])
                again.steps(2)
            expected = run.model.state_dict()
            differ = [name for name, w in model.state_dict().items() if not torch.equal(w, expected[name])]
            require(not differ, f"2 steps, saved, 2 more are not 4 steps of --optimizer={optimizer}: "
                    f"{', '.join(differ[:3])} differ{'s' * (len(differ) == 1)}")
    finally:
        torch.use_deterministic_algorithms(deterministic)
    return ' and '.join(train.OPTIMIZERS)


def gather_experts(x, w, offsets):
    """What GroupedLinear.loop computes, as one graph."""
    expert = torch.searchsorted(offsets, torch.arange(len(x), device=x.device), right=True)
    return torch.einsum('nc,nwc->nw', x, w[expert])


def check_compiling(config):
    model = randomized(config).train()
    for module in model.modules():
        if isinstance(module, GroupedLinear):
            module.loop = gather_experts  # the loop is a break that is meant: see GroupedLinear
    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, dynamic=False, backend='aot_eager')
    for first_call in (True, False):
        idx, found = random_tokens(config, 2, config.block_size + 1), []
        with torch._dynamo.config.patch(error_on_recompile=not first_call):
            for f in (model, forward):
                loss, _ = f(idx[:, :-1], idx[:, 1:])
                loss.backward()
                found.append((loss.item(), {name: w.grad.clone() for name, w in model.named_parameters()}))
                model.zero_grad()
        (loss, grads), (compiled_loss, compiled_grads) = found
        require(abs(loss - compiled_loss) < 1e-4 * loss,
                f"the loss is {loss:.5f}, compiled {compiled_loss:.5f}")
        for name, grad in grads.items():
            error = float((grad - compiled_grads[name]).norm() / grad.norm().clamp(min=1e-3))
            require(error < 1e-3, f"compiled, the gradient of {name} differs by {error:.2g} of its size")
    return 'one graph, loss and gradients as without'


@torch.no_grad()
def check_weights(model):
    """Of a checkpoint itself: its numbers, and that it decodes as it predicts."""
    for name, w in model.state_dict().items():
        require(w.isfinite().all(), f"{name} is not finite")
    model.eval()
    T = min(64, model.config.block_size)
    idx, cache = random_tokens(model.config, 2, T), model.make_cache(2, T)
    full = model(idx)
    parts = [model(part, cache=cache) for part in idx.split([T // 2, T - 1 - T // 2, 1], dim=1)]
    require_equal(torch.cat(parts, dim=1), full, 'its cache does not equal no cache', tolerance=1e-3)
    return f"finite, and its cache equals no cache in {T} tokens"


def check_family(config):
    """Which published family computes the whole config, or why none does; that is no fault."""
    try:
        import hub
        return hub.config_to_hf(config)['model_type']
    except (ValueError, ImportError) as error:
        return str(error)


CHECKS = {  # what holds: (function of a small config -> a remark or None; raises CheckFailed, where to look)
    'parameters have an initial value and one optimizer': (
        check_parameters, 'parameter() and tag() where it is made, OPTIMIZERS in train.py'),
    'loss at the start near ln(vocabulary)': (
        check_first_loss, 'GPT.init_weights and what tags say, GPT.head'),
    'targets are the next tokens': (check_targets, 'Bins.batch in prepare.py, the loss in GPT.forward'),
    'causal at every position': (check_causal, 'GPT.mask, visible, and whatever else crosses positions'),
    'layers see their window, all of it': (
        check_windows, 'GPT.mask, visible, eager_attention; config.window_of, mask_kind of the mixer'),
    'queries and keys turn with their positions': (
        check_rotation, 'rope_table, rotate, GPT.context, rope_kind of the mixer, the calls of rotate in its '
        'forward'),
    'packed documents equal the same alone': (
        check_documents, 'document_starts in forward of the mixer, GPT.document_starts, GPT.mask'),
    'attention equals float64': (
        check_attention, 'attend, eager_attention, GPT.mask, alibi_slopes; expected, if this is your change'),
    'cache equals no cache': (
        check_cache, 'positions in GPT.context and GPT.mask, key_positions and write of FullSlots and '
        'WindowSlots, states of the mixer'),
    'nothing is left of the prompt before': (
        check_prompts, 'Cache.reset, what modules keep between calls: that is the cache\'s to keep'),
    'gradients equal float64 differences': (
        check_gradients, 'detach, no_grad, .data, in-place changes and backward functions on its way'),
    'every parameter is trained': (check_training, 'what of it the loss depends on, OPTIMIZERS in train.py'),
    'activations and gradients of healthy size': (
        check_sizes, 'Norm, NORM_PLACEMENTS, the init of what is named, residual_scale'),
    'one batch is learnt by heart': (check_learning, 'gradients and update in train.py, and the lines above'),
    'dropout in training only': (check_dropout, 'every use of dropout, self.training, evaluate in train.py'),
    'head and embedding tied as said': (check_head, 'GPT.head, lm_head in GPT.__init__'),
    'saved and loaded it is the same': (
        check_saving, 'register_buffer (persistent), GPT.from_checkpoint, snapshot in train.py'),
    'resumed equals unbroken': (check_resuming, 'snapshot and load_optimizers in train.py'),
    'compiles without a break': (
        check_compiling, 'changes in place, .item(), numbers that change with each call'),
}


def run_check(function, look_at, *args):
    """(whether it holds, a remark on it or None). A check that ends with an error does not hold."""
    torch.manual_seed(0)
    try:
        return True, function(*args)
    except CheckFailed as error:
        message = str(error)
    except Exception as error:  # whatever a changed model.py may raise
        message = f"{type(error).__name__}: {' '.join(str(error).split()):.250}"
    return False, f"{message}; look at {look_at}"


def check(config, model_args, words):
    """Whether what stands in model.py and train.py is sound, for a small model of the kind that is asked for
    (words: of a checkpoint or published model); a line for each check."""
    if words and config['init_from'] != 'scratch':
        raise ValueError(f"check reads {words[0]} or --init_from={config['init_from']}: give one")
    if config['device'] not in ('auto', 'cpu'):
        raise ValueError(f"device={config['device']}: check compares code paths of the CPU; leave it out")
    began, model, init_from = time.perf_counter(), None, words[0] if words else config['init_from']
    if init_from == 'scratch':
        whole = GPTConfig(**fields_asked(config, model_args))
    else:
        model, _, rest = train.load_to_train(init_from, 'out', model_args)
        whole = model.config
    small, failed = tiny_config(whole), []
    torch.set_num_threads(1)  # the second would only wait
    show('checked is a small model of this kind', {
        name: value for name, value in vars(small).items() if value != getattr(whole, name)})
    checks = [(name, *how, small) for name, how in CHECKS.items()]
    if model is not None:
        checks.append((f"weights of {rest['path']}", check_weights, 'log.csv of its run', model))
    for name, *how in checks:
        holds, remark = run_check(*how)
        failed += [] if holds else [name]
        print(f"{'ok  ' if holds else 'FAIL'} {name}{f': {remark}' if remark else ''}", flush=True)
    family = check_family(whole)
    print(f"     published family: {family}")
    return {'passed': len(checks) - len(failed), 'failed': failed, 'family': family,
            'seconds': round(time.perf_counter() - began, 1)}


if __name__ == '__main__':
    if dataset and (init_from != 'scratch' or words):
        raise ValueError(f"dataset={dataset!r}: the vocabulary is that of the model that is loaded")
    if dataset:
        Bins(train.data_folder(dataset), 'train')  # or say that it is missing
    numbers = check(config, model_args, words)
    print_json(json, what='check', **numbers)
    sys.exit(bool(numbers['failed']))

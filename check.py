"""
Is what stands in model.py and train.py still sound? Holds a small model of the config's own kind against
formulas of the papers, torch's optimizers, and itself on another path.

    python check.py config/llama_small.py
    python check.py --init_from=out           # and the weights of this checkpoint

A check is a function of a small config, which tests may call too. It returns None or a remark, for instance
that it has no formula for a part of yours, and raises CheckFailed. If a formula fails where you meant to
change it, all is well.
"""
import contextlib
import copy
import dataclasses
import functools
import math
import os
import sys
import tempfile
import traceback
from unittest import mock

from configurator import configure, effective, show

init_from = 'scratch'             # scratch (random weights), or as in sample.py: a file, folder or hub id
json: bool | str = False          # True: the numbers as a last line too; or the file to add that line to
settings = configure(globals(), 'GPTConfig', words=1)
config, _, words, *_ = settings

import torch
import torch.nn.functional as F

import hub
import train
from bench import print_json
from model import GPT, MIXERS, ROPE_SCALINGS, Attention, GPTConfig, unused

# a small model of the same kind -----------------------------------------------------------------------------

SHORT, LONG = 24, 136  # tokens; LONG is longer than the blocks of attention and of DeltaNet
SMALL = dict(  # sizes of whatever the config has; several of each, for one has no order to be confused
    n_embd=48, n_head=6, d_ff=40, window=5, kv_lora_rank=16, v_head_dim=12, qk_nope_head_dim=10,
    q_lora_rank=20, qk_rope_head_dim=8, linear_n_key_head=2, linear_n_value_head=4, linear_key_head_dim=6,
    linear_value_head_dim=10, n_dense_layer=1, n_expert=8, n_expert_active=3, n_shared_expert=2, d_expert=24,
    n_group=4,
    topk_group=2)


def tiny_config(config):
    """A config of the same kind, small, in which patterns have room; norm_eps is large enough to matter."""
    changes = {name: n for name, n in SMALL.items() if getattr(config, name)}
    patterns = [value for name, value in vars(config).items() if name.endswith('_pattern') and value]
    changes.update(n_layer=1 + math.lcm(*map(len, patterns)) + changes.get('n_dense_layer', 0),
                   block_size=LONG, vocab_size=61, norm_eps=0.01, dropout=0.25,
                   document_token=config.document_token and 3)
    if config.n_kv_head:
        changes.update(n_kv_head={config.n_head: 6, 1: 1}.get(config.n_kv_head, 2),
                       head_dim=math.ceil(8 / config.partial_rotary_factor))  # four pairs turn
    if config.linear_n_key_head and config.linear_n_key_head == config.linear_n_value_head:
        changes['linear_n_value_head'] = changes['linear_n_key_head']
    if config.query_scale:
        changes['query_scale'] = {**config.query_scale, 'length': 7}
    if config.rope_scaling:
        changes['rope_scaling'] = {name: value[:4] if isinstance(value, list) else value
                                   for name, value in config.rope_scaling.items()}
    return dataclasses.replace(config, **changes)


def letters(config, layer):
    """A layer's letters: of its mixer, window (L: none), MLP and positions."""
    patterns = config.mixer_pattern, config.window_pattern or 'L', config.expert_pattern, config.pos_pattern
    mixer, window, mlp, pos = (pattern[layer % len(pattern)] for pattern in patterns)
    is_dense = mlp == 'E' and (not config.n_expert or layer < config.n_dense_layer)
    return mixer, window, 'D' if is_dense else mlp, pos


def randomized(config, **changes):
    """A model in evaluation mode whose every weight and buffer matters: nothing is left at zero or one."""
    model = GPT(dataclasses.replace(config, **changes))
    for w in model.state_dict().values():
        w.copy_(w + 0.2 * torch.randn_like(w) if w.ndim < 2 else 0.3 * torch.randn_like(w))
    return model.eval()


def random_tokens(config, *shape):
    """Token ids, none of which ends a document in a tiny_config."""
    return torch.randint(4, config.vocab_size, shape)


# what a check finds -----------------------------------------------------------------------------------------

class CheckFailed(Exception):
    """What a check has found to be wrong, in one line."""


def require(holds, message):
    if not holds:
        raise CheckFailed(message)


def require_equal(found, expected, name, tolerance=1e-4, least=1.0):
    """Tensors (rows, positions, ...) or numbers, equal to within tolerance times the largest, or least."""
    found, expected = torch.as_tensor(found).detach(), torch.as_tensor(expected).detach()
    require(found.isfinite().all(), f"{name}: NaN or infinite")
    wrong = (found - expected).abs() > tolerance * expected.abs().max().clamp(min=least)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        require(False, f"{name}: {found[at]:.4g} instead of {expected[at]:.4g}, first at {list(at)}")


# modules by their formulas ----------------------------------------------------------------------------------

def norm_of(config, module, x):
    plain = F.layer_norm if config.norm == 'layernorm' else F.rms_norm
    y = plain(x, x.shape[-1:], module.weight, eps=config.norm_eps)
    return y if module.bias is None else y + module.bias


def capped(x, cap):
    return cap * torch.tanh(x / cap) if cap else x


def frequencies(config, local):
    """Of n pairs, base^(-i / n), and the factor on the rotation: YaRN's (arXiv:2309.00071, 3.2), or
    another kind's as ROPE_SCALINGS has them. local: whether a layer has a window."""
    own = vars(config) | (config.rope_local or {}) if local else vars(config)
    base, n = own['rope_base'], int(config.head_dim * own['partial_rotary_factor']) // 2
    pair, options = torch.arange(n), dict(own['rope_scaling'] or {})
    freq, kind = base ** (-pair / n), options.pop('rope_type', None)
    if kind == 'yarn' and not options.keys() - {'factor', 'original_max_position_embeddings'}:
        by, length = options['factor'], options['original_max_position_embeddings']
        low, high = (n * math.log(length / (2 * math.pi * turns), base) for turns in (32, 1))
        low, high = max(math.floor(low), 0), math.ceil(high)
        slowed = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
        return freq * (1 - slowed + slowed / by), 0.1 * math.log(by) + 1
    return ROPE_SCALINGS[kind](freq, base, LONG, **options) if kind else (freq, 1.0)


def attention(config, layer, module, x, table):
    _, window, _, pos = letters(config, layer)
    turns, position = config.pos == 'rope' and pos == 'P', torch.arange(x.shape[1])[:, None]
    q, k, v, *gate = module.c_attn(x)

    def heads(y, norm):
        """(B, T, heads * D) -> (B, heads, T, D), rotated, with the norm where qk_norm says."""
        y = norm_of(config, norm, y) if config.qk_norm == 'whole' else y
        y = y.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        y = norm_of(config, norm, y) if config.qk_norm is True else y
        if turns:
            freq, factor = frequencies(config, window != 'L')
            a, b, rest = y.tensor_split((len(freq), 2 * len(freq)), dim=-1)
            z = torch.complex(a, b) * factor * torch.exp(1j * position * freq)
            y = torch.cat((z.real, z.imag, rest), dim=-1)
        is_last = config.qk_norm == 'rotated' or config.qk_norm == 'unit' and turns
        return norm_of(config, norm, y) if is_last else y
    q, k = heads(q, module.q_norm), heads(k, module.k_norm)
    by = config.query_scale or {}
    if by and not (pos == 'P' and by.get('layers') == 'N'):
        q = q * (1 + by['beta'] * ((position + by.get('start', 0)) // by['length'] + 1).log())
    v = v.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
    k, v = (y.repeat_interleave(config.n_head // config.n_kv_head, dim=1) for y in (k, v))
    age, width = position - position.T, config.window or LONG
    within = {'L': True, 'S': age < width, 'C': position // width == position.T // width}
    score = capped(q @ k.mT * (config.attn_scale or config.head_dim ** -0.5), config.attn_softcap)
    if config.pos == 'alibi' and pos == 'P':  # as the code of arXiv:2108.12409 has it, for 6 heads
        score = score - config.alibi_scale * 0.5 ** torch.tensor([2, 4, 6, 8, 1, 3])[:, None, None] * age
    if config.pos == 't5' and pos == 'P':  # buckets of distances up to 16, then 16 in three doublings
        buckets = [min(n, 16 + int(16 * math.log2(max(n, 16) / 16) / 3), 31) for n in range(len(position))]
        score = score + table.weight[torch.tensor(buckets)[age.clamp(min=0)]].movedim(-1, 0)
    weight = score.exp() * (age >= 0) * within[window]
    total = weight.sum(-1, keepdim=True) + (module.sink.exp()[:, None, None] if config.attn_sink else 0)
    y = (weight / total @ v).transpose(1, 2)
    y = y * gate[0].view(*y.shape[:3], -1).sigmoid() if gate else y
    return module.c_proj(y.flatten(2))


gelu_tanh = functools.partial(F.gelu, approximate='tanh')
ACTIVATIONS = {
    'swiglu': F.silu, 'geglu': F.gelu, 'geglu_tanh': gelu_tanh,
    'gelu': F.gelu, 'gelu_tanh': gelu_tanh, 'relu2': lambda x: F.relu(x) ** 2}
SCORES = {'softmax': (functools.partial(torch.softmax, dim=-1), 1), 'sigmoid': (torch.sigmoid, 2)}
PLACEMENTS = {  # norms before and after the mixer, before and after the MLP, on the stream after each; 0: no
    'pre': '102000', 'post': '000012', 'output': '010200', 'sandwich': '123400', 'parallel': '101000',
    'parallel_2': '102000'}


def mlp(config, module, x):
    gate, *up = module.c_fc(x)
    return module.c_proj(math.prod(up, start=ACTIVATIONS[config.mlp](gate)))


def moe(config, module, x):
    """x (B, T, C), every expert on every token."""
    function, n_best = SCORES[config.router]  # a group scores as its n_best best experts
    scores = function(module.router(x))
    rank = scores + module.expert_bias if config.balance_bias else scores
    if config.n_group:
        groups = rank.unflatten(-1, (config.n_group, -1))
        best = groups.topk(n_best).values.sum(-1)
        kept = best >= best.topk(config.topk_group).values[..., -1:]
        rank = groups.where(kept[..., None], -math.inf).flatten(-2)
    weight = scores * (rank >= rank.topk(config.n_expert_active).values[..., -1:])
    weight = weight / weight.sum(-1, keepdim=True) if config.norm_topk_prob else weight
    weight, experts, y = weight * config.routed_scaling_factor, torch.arange(config.n_expert), 0
    for e, after in enumerate(weight.split(1, dim=-1)):
        before, after = (after, after > 0) if config.expert_input_scale else (1, after)
        ends = weight[..., e].numel() * (experts >= e)  # all tokens go to this expert
        y = y + module.experts((before * x).flatten(0, 1), ends.int()).view_as(x) * after
    if config.n_shared_expert:
        y = y + module.shared(x) * (module.shared_gate(x).sigmoid() if config.shared_gate else 1)
    return y


@torch.no_grad()
def check_formulas(config):
    """Each module of a tiny_config on what those before it gave: embedding, mixers, MLPs, blocks, head."""
    unknown = ({config.norm_placement, config.mlp, config.router}
               - PLACEMENTS.keys() - ACTIVATIONS.keys() - SCORES.keys())
    if unknown:
        return f"none for {' or '.join(unknown)}"
    model, idx, seen = randomized(config, document_token=None), random_tokens(config, 2, LONG), {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, args, y, name=name: seen.update({name: y}))

    def same(name, expected):
        require_equal(seen[name], expected, name or 'logits')
        return seen[name]
    with torch.enable_grad():
        model(idx)
    x = config.embed_scale * model.wte.weight[idx]
    if config.bigram_size:
        rows = 36313 * idx + 27191 * F.pad(idx[:, :-1], (1, 0))
        x = x + model.bigram.table.weight[rows % config.bigram_size]
    if config.pos == 'learned':
        x = x + model.wpe.weight[:LONG]
    if config.pos == 'sinusoidal':  # arXiv:1706.03762, 3.5
        angle = torch.arange(LONG)[:, None] / 10000 ** (torch.arange(0, config.n_embd, 2) / config.n_embd)
        x = x + torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
    x = first = norm_of(config, model.ln_embd, x) if config.embed_norm else x
    n = PLACEMENTS[config.norm_placement]
    for layer, block in enumerate(model.h):
        def norm(number, y, block=block):
            return y if number == '0' else norm_of(config, getattr(block, f'ln_{number}'), y)
        name, (letter, _, kind, _), scale = f'h.{layer}', letters(config, layer), config.residual_scale
        if config.residual_lambdas:
            x = model.resid_lambdas[layer] * x + model.x0_lambdas[layer] * first
        y = seen[f'{name}.attn']
        if MIXERS[letter] is Attention:
            y = same(f'{name}.attn', attention(config, layer, block.attn, norm(n[0], x), model.t5_bias))
        between = norm(n[4], x + norm(n[1], scale * y))
        if kind != 'N':
            z = norm(n[2], x if 'parallel' in config.norm_placement else between)
            z = same(f'{name}.mlp', (moe if kind == 'E' else mlp)(config, block.mlp, z))
            between = norm(n[5], between + norm(n[3], scale * z))
        x = same(name, between)
    x = x if config.norm_placement == 'post' else norm_of(config, model.ln_f, x)
    logits = x @ model.wte.weight.mT if config.tie_word_embeddings else model.lm_head(x)
    require_equal(model(idx), same('', capped(config.logit_scale * logits, config.logit_softcap)),
                  'logits where no gradient is asked for')
    others = [mixer.__name__ for mixer in config.mixers if mixer is not Attention]
    return f"none for {', '.join(others)}" if others else None


def check_start(config):
    loss, _ = GPT(config).eval()(*random_tokens(config, 2, 4, SHORT))
    require_equal(loss, math.log(config.vocab_size), 'the first loss, about ln(vocabulary),', 0.07)


# one path against another -----------------------------------------------------------------------------------

def check_documents(config):
    if not all(mixer.documents for mixer in config.mixers):
        return 'its mixers do not keep them apart, and say so'
    model, starts = randomized(config, document_token=3), (0, 64, 69, 70, 100)  # 64: of a block of DeltaNet
    idx = random_tokens(model.config, 1, LONG)
    idx[0, starts] = 3
    alone = torch.cat([model(document) for document in idx.tensor_split(starts[1:], dim=1)], dim=1)
    require_equal(model(idx), alone, f"documents that start at {starts}, and each alone")


@torch.no_grad()
def check_cache(config):
    model, T = randomized(config), SHORT
    idx = torch.randint(8, (3, T))  # a document_token too, if there is one
    full = model(idx)

    def feed(cache, name, chunks, at=(0, 0, 0), rows=(0, 1, 2)):
        for n in chunks:
            new, expected = (torch.stack([x[row, a:a + n] for row, a in zip(rows, at)]) for x in (idx, full))
            require_equal(model(new, cache=cache), expected, f"{name}, {n} tokens after {list(at)}")
            at = [a + n for a in at]

    cache = model.make_cache(3, T)
    feed(cache, 'in odd chunks', (6, 1, 1, 8, 1, 7))
    cache.reset()
    last = model(idx[:, :12], cache=cache, keep=1, lengths=torch.tensor([12, 8, 2]))
    require_equal(last, full[range(3), [11, 7, 1]][:, None], 'after reset, the last of rows of other lengths')
    feed(cache, 'rows of other lengths', (3, 1), (12, 8, 2))
    cache.select([2, 0, 1, 2])
    feed(cache, 'rows copied by select', (1, 2), (6, 16, 12, 6), (2, 0, 1, 2))
    feed(model.make_cache(3, T, static=True), 'in a static cache', (T - 3, 1, 2))
    if any(mixer.states for mixer in model.mixers):
        return 'a state cannot rewind'
    cache = model.make_cache(3, T, rolling=False)
    model(idx[:, :18], cache=cache)
    cache.rewind(torch.tensor([0, 4, 1]))
    feed(cache, 'after rewind', (2,), (18, 14, 17))


AUX_WEIGHTS = {'balance': 0.1, 'z': 0.01, 'mtp': 0.3}


def weighted(aux):
    return sum(weight * aux[name] for name, weight in AUX_WEIGHTS.items() if name in aux)


def check_gradients(config):
    """Along a random direction, in float64."""
    model, idx = randomized(config, dropout=0.0).double().train(), random_tokens(config, 2, SHORT)

    def objective():
        loss, aux = model(idx, idx.roll(-1, 1))
        return loss + weighted(aux)
    names, params = zip(*model.named_parameters())
    with mock.patch.object(torch.Tensor, 'float', torch.Tensor.double):
        grads = torch.autograd.grad(objective(), params, allow_unused=True, materialize_grads=True)
        for name, w, grad in reversed([*zip(names, params, grads)]):  # the first to fail is next to the fault
            start, along, values = w.data, torch.randn_like(w), []
            for step in (1e-6, -1e-6):
                w.data = start + step * along
                values.append(objective().item())
            w.data = start
            change, expected = (values[0] - values[1]) / 2e-6, (grad * along).sum()
            require(abs(change - expected) <= 1e-4 * abs(expected) + 1e-6,
                    f"{name} has another gradient than differences say; those after it are right")


@torch.no_grad()
def check_dropout(config):
    model, idx, found = randomized(config, dropout=0.25), random_tokens(config, 2, LONG), []
    model.h[0].register_forward_pre_hook(lambda block, args: found.append(args[0]))
    for key in (0, 0), (1, 1), (1, 1), (1, 2), (2, 1):
        train.seed_dropout(*key, 0, 'cpu')
        model.train(key != (0, 0))(idx)
    whole, one, same, *others = found
    require(same.equal(one) and not any(other.equal(one) for other in others),
            'the mask is no function of seed and iteration')
    require_equal((one / whole).mean(), 1.0, "the mean of dropout's factor on the embedding", 0.02)


def check_compiling(config):
    model = randomized(config, dropout=0.0).bfloat16().train()  # in which experts are one product
    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, dynamic=False, backend='eager')
    with torch._dynamo.config.patch(error_on_recompile=True):
        for idx in random_tokens(config, 2, 2, SHORT):
            require_equal(forward(idx, idx)[0], model(idx, idx)[0], 'the loss of the compiled model', 0.02)


# training ---------------------------------------------------------------------------------------------------

class Sequences:
    """Ten sequences with a target mask, the later the more targets; stands in for Bins."""
    masks = True

    def __init__(self, config):
        tokens = random_tokens(config, 10, LONG + 1)
        learnt = torch.rand(10, LONG) < torch.linspace(0.1, 1, 10)[:, None]
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:].where(learnt, -1)

    def n_sequences(self, block_size):
        return 10

    def batch(self, indices, block_size):
        return self.inputs[indices].numpy(), self.targets[indices].numpy()

    def read(self, first, last):
        """For each iteration from first to last two micro-batches of two sequences."""
        return train.read_batches(self, LONG, range(first, last), 2, 2, 7, 'cpu')


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def check_data(config):
    data, model = Sequences(config), randomized(config, dropout=0.5).train()

    def order(first, last):
        inputs = torch.cat([x for x, _, _ in data.read(first, last)])
        return (inputs[:, None] == data.inputs).all(-1).nonzero()[:, 1].tolist()
    found = order(0, 5)
    require(sorted(found[:10]) == sorted(found[10:]) == [*range(10)] and found[:10] != found[10:],
            f"two epochs take the sequences {found}: not each once, or in one order")
    train.sequence_order.cache_clear()
    require(order(3, 5) == found[12:], 'resumed at iteration 3 other sequences come')
    loss, _ = train.evaluate(model, model, data, 3, 4, 'cpu', contextlib.nullcontext)
    require(model.training, 'train.evaluate leaves the model in evaluation mode')
    require_equal(loss, cross_entropy(model.eval()(data.inputs), data.targets), 'the loss of train.evaluate')


def their_steps(model, kind):
    """The steps of torch's own optimizers for each parameter: Muon's by projection and expert."""
    for name, w in model.named_parameters():
        group, w.grad = model.tags[name].group, torch.zeros_like(w)
        if kind == 'muon' and group == 'matrix' and name.startswith(('h.', 'mtp.')):
            rows = getattr(model.get_submodule(name.rpartition('.')[0]), 'widths', w.shape[-2])
            parts, grads = ([part for one in x.view(-1, *w.shape[-2:]) for part in one.split(rows)]
                            for x in (w.detach(), w.grad))
            for part, grad in zip(parts, grads):
                part.grad = grad
            yield torch.optim.Muon(parts, 0.1, 0.5, 0.7, adjust_lr_fn='match_rms_adamw').step
        else:
            decay = 0.5 if w.ndim > 1 and group != 'vector' else 0
            yield torch.optim.AdamW([w], 0.1, (0.5, 0.99), weight_decay=decay).step


def reload(model, optimizers, scaler, settings, it):
    """The same as they come out of a checkpoint."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        path = os.path.join(folder, 'ckpt.pt')
        train.save(path, {'model_args': vars(model.config), 'config': settings,
                          **train.snapshot(model, train.Progress(iter_num=it), optimizers, scaler)})
        model, _, rest = hub.load(path)
        optimizers = train.make_optimizers(model, settings)
        return model.train(), optimizers, train.resume(rest, optimizers, scaler).iter_num


def check_updates(config, resumes=False):
    """An iteration that is clipped and one that is not, of two micro-batches, against the gradient of the
    mean over all targets and torch's own optimizers; then NaN."""
    data = Sequences(config)
    for kind in {'adamw', 'muon'} & train.OPTIMIZERS.keys():
        settings = {**train.config, 'learning_rate': 0.1, 'weight_decay': 0.5, 'beta1': 0.5, 'beta2': 0.99,
                    'momentum': 0.7, 'optimizer': kind,
                    **{f'{name}_loss': weight for name, weight in AUX_WEIGHTS.items()}}
        model, it = randomized(config, dropout=0.0).train(), 0
        other, optimizers = copy.deepcopy(model), train.make_optimizers(model, settings)
        steps, scaler = [*their_steps(other, kind)], torch.amp.GradScaler('cpu', init_scale=64.0)
        for clip in (0.5, 0):
            start, scale = copy.deepcopy(model.state_dict()), scaler.get_scale()
            other.load_state_dict(start)
            other.zero_grad(set_to_none=False)
            first, second = data.read(it, it + 1)
            aux = [other(x, y)[1] for x, y, _ in (first, second)]
            x, y = (torch.cat(both) for both in list(zip(first, second))[:2])
            expected = cross_entropy(other(x), y)
            (expected + sum(map(weighted, aux)) / 2).backward()
            size = torch.nn.utils.get_total_norm([w.grad for w in other.parameters()]).item()
            loss, load, _ = train.gradients(model, first, iter([second]), 2, contextlib.nullcontext, scaler,
                                            settings)
            require_equal(loss, expected, 'the loss reported')
            for (name, w), their, step in zip(model.named_parameters(), other.parameters(), steps):
                require_equal(w.grad / scale, their.grad, f"iteration {it}: the gradient of {name}", 1e-2,
                              1e-4 * size)
                their.grad.copy_(w.grad / scale * (clip or 1))
                step()
            if config.balance_bias:
                for bias, one in zip(other.buffers(), sum(each['load'] for each in aux)):
                    bias += 0.3 * (one.mean() - one).sign()
            params = [*model.parameters()]
            train.update(model, params, optimizers, scaler, clip * size, load, 0.3)
            for w in params:
                w.grad = torch.full_like(w, math.nan)
            train.update(model, params, optimizers, scaler, 0.0, load, 0.3)
            for (name, w), their in zip(model.state_dict().items(), other.state_dict().values()):
                require_equal(w - start[name], their - start[name],
                              f"iteration {it}, then NaN, by {kind}: the move of {name}", 0.1, 0.0)
            it += 1
            if resumes:
                model, optimizers, it = reload(model, optimizers, scaler, settings, it)
    return 'adamw and muon'


def check_resuming(config):
    check_updates(config, resumes=True)


def check_rates(config):
    halfway = {'cosine': 0.55, 'linear': 0.55, 'wsd': 1.0}
    for name in train.SCHEDULES:
        known = {0: 1 / 11, 4: 5 / 11, 10: 1.0, 60: halfway.get(name), 110: 0.1, 130: 0.1}
        for it, expected in known.items():
            config = {**train.config, 'learning_rate': 1.0, 'min_lr': 0.1, 'warmup_iters': 10,
                      'lr_decay_iters': 110, 'lr_schedule': name, 'cooldown': 0.4}
            found = train.lr_at(it, config)
            require_equal(found, expected or found, f"{name} from 1 to 0.1, from 10 to 110: the rate at {it}")


# report -----------------------------------------------------------------------------------------------------

CHECKS = {  # name: (function of a small config, where to look)
    'first loss near ln(vocabulary)': (check_start, 'parameter() and tag() where it is made, GPT.head'),
    'documents do not see each other': (check_documents, 'document_starts in the mixer, make_mask'),
    'modules equal their formulas': (check_formulas, 'its forward; expected, if this is your change'),
    'cache equals no cache, and no token sees later ones': (
        check_cache, 'make_mask, Cache, slots and states of the mixer'),
    'gradients equal differences': (check_gradients, 'detach, no_grad, in-place changes, backward functions'),
    'dropout in training only': (check_dropout, 'dropout, self.training, seed_dropout in train.py'),
    'data and evaluation': (check_data, 'sequence_order, read_batches, evaluate in train.py; Bins'),
    "updates equal torch's": (check_updates, 'gradients, update, OPTIMIZERS in train.py; tag()'),
    'learning rates equal their formulas': (check_rates, 'lr_at, SCHEDULES in train.py'),
    'resumed equals unbroken': (check_resuming, 'snapshot, resume in train.py, register_buffer'),
    'compiles as one graph': (check_compiling, '.item(), numbers that change with each call'),
}


def run_check(function, look_at, *args):
    """(whether it holds, a remark or None). A check that ends with an error does not hold."""
    torch.manual_seed(0)
    try:
        return True, function(*args)
    except CheckFailed as error:
        return False, f"{error}; look at {look_at}"
    except Exception as error:  # whatever a changed model.py may raise
        *_, frame = traceback.extract_tb(error.__traceback__)
        return False, (f"{type(error).__name__} in {os.path.basename(frame.filename)}, line {frame.lineno}: "
                       f"{' '.join(str(error).split()):.250}; look at {look_at}")


def check(config, init_from='scratch', **model_args):
    """Prints a line for each check of a small model of the kind that is asked for; returns the numbers."""
    checks, failed = dict(CHECKS), []
    if init_from == 'scratch':
        whole = GPTConfig(**model_args)
    else:
        model, _, rest = hub.load(init_from, **model_args)
        whole = model.config
        broken = [name for name, w in model.state_dict().items() if not w.isfinite().all()]
        checks[f"weights of {rest['path']}"] = (
            lambda _: require(not broken, f"{', '.join(broken[:3])}: NaN or infinite"), 'log.csv of its run')
    small = tiny_config(whole)
    torch.set_num_threads(1)  # the second would only wait
    torch.use_deterministic_algorithms(True)  # as train.py has it on a CPU
    show('checked is a small model of this kind', {
        name: value for name, value in vars(small).items() if value != getattr(whole, name)})
    for name, how in checks.items():
        holds, remark = run_check(*how, small)
        failed += [] if holds else [name]
        print(f"{'ok  ' if holds else 'FAIL'} {name}{f': {remark}' if remark else ''}", flush=True)
    try:
        family = hub.config_to_hf(whole)['model_type']
    except ValueError as error:  # no fault
        family = str(error)
    print(f"     published family: {family}")
    return {'passed': len(checks) - len(failed), 'failed': failed, 'family': family}


if __name__ == '__main__':
    numbers = check(config, *(words or [init_from]), **effective(settings, unused))
    print_json(json, what='check', **numbers)
    sys.exit(bool(numbers['failed']))

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
import io
import math
import os
import sys
import tempfile
import time
import traceback

from configurator import configure, show

init_from = 'scratch'             # scratch (random weights), or as in sample.py: a file, folder or hub id
json: bool | str = False          # True: the numbers as a last line too; or the file to add that line to
config, model_args, words, *_ = configure(globals(), 'GPTConfig', words=1)

import torch
import torch.nn.functional as F

import hub
import train
from bench import print_json
from model import GPT, MIXERS, ROPE_SCALINGS, Attention, GPTConfig, Norm
from prepare import Bins

# a small model of the same kind -----------------------------------------------------------------------------

SHORT = 24  # tokens in most checks; block_size is longer than the blocks of attention and of DeltaNet


def kind_of(config, layer):
    """By the config's letters: (mixer, window or None, whether it has experts, whether it has positions)."""
    def letter(name):
        pattern = getattr(config, name)
        return pattern[layer % len(pattern)]
    sparse = config.n_expert and layer >= config.n_dense_layer and letter('expert_pattern') == 'E'
    window = config.window if config.window and letter('window_pattern') == 'S' else None
    return letter('mixer_pattern'), window, bool(sparse), letter('pos_pattern') == 'P'


def tiny_config(config):
    """A config of the same kind, small, in which patterns have room. What is several stays several, for one
    has no order to be confused: heads of a group, rotary pairs (2 to 4), experts, groups of them."""
    most = dict(d_ff=40, n_dense_layer=1, document_token=3, window=5, n_expert=8, n_expert_active=3,
                n_shared_expert=2, d_expert=24, linear_n_key_head=2, linear_key_head_dim=6,
                linear_value_head_dim=10, q_lora_rank=20, kv_lora_rank=16, v_head_dim=12, qk_nope_head_dim=8,
                qk_rope_head_dim=6)
    changes = {name: min(n, getattr(config, name)) for name, n in most.items() if getattr(config, name)}
    patterns = [value for name, value in vars(config).items() if name.endswith('_pattern') and value]
    changes.update(n_layer=min(config.n_layer, max(2, *map(len, patterns)) + changes.get('n_dense_layer', 0)),
                   n_head=6, block_size=136, vocab_size=61, n_embd=48, dropout=0.0)
    width = changes.get('qk_rope_head_dim', 0)
    if config.head_dim:
        share = config.partial_rotary_factor
        changes['head_dim'] = 8 if share == 1 else 2 * math.ceil(2 / share)
        changes['n_kv_head'] = {config.n_head: 6, 1: 1}.get(config.n_kv_head, 2)
        width = int(changes['head_dim'] * share)
    if config.linear_n_key_head:
        groups = config.linear_n_value_head // config.linear_n_key_head
        changes['linear_n_value_head'] = changes['linear_n_key_head'] * min(2, groups)
    if config.n_group:
        changes.update(n_expert=8, n_group=4, topk_group=2)
    if config.embed_scale == config.n_embd ** 0.5:
        changes['embed_scale'] = 48 ** 0.5
    if config.rope_scaling:
        length = 136 * config.rope_scaling.get('original_max_position_embeddings', 136) // config.block_size
        if config.rope_scaling['rope_type'] == 'yarn':
            length = 4096  # in which the ramp is between its pairs
        changes['rope_scaling'] = {
            name: value[:width // 2] if isinstance(value, list)
            else length if name == 'original_max_position_embeddings' else value
            for name, value in config.rope_scaling.items()}
    return dataclasses.replace(config, **changes)


def randomized(config, **changes):
    """A model in evaluation mode whose every weight and buffer matters: nothing is left at zero or one."""
    model = GPT(dataclasses.replace(config, **changes))
    with torch.no_grad():
        for w in (*model.parameters(), *model.buffers()):
            w.copy_(w + 0.2 * torch.randn_like(w) if w.ndim < 2 else 0.3 * torch.randn_like(w))
    return model.eval()


def random_tokens(config, *shape):
    """Token ids; if the model knows where documents end, none of them is such an end."""
    idx = torch.randint(config.vocab_size, shape)
    return idx if config.document_token is None else idx.where(idx != config.document_token, 0)


class KeepsFloat64(torch.overrides.TorchFunctionMode):
    """Under it float64 stays float64 where a model asks for float32, as norms and routers do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if (args and function in (torch.Tensor.float, torch.Tensor.to) and args[0].dtype is torch.float64
                and (function is torch.Tensor.float or torch.float32 in args)):
            return args[0]
        return function(*args, **(kwargs or {}))


def float64_model(config, **changes):
    """A randomized model, to be used under KeepsFloat64."""
    model = randomized(config, **changes)
    for block in model.h:
        block.attn.states = [(shape, dtype and torch.float64) for shape, dtype in block.attn.states]
    return model.double()


# what a check finds -----------------------------------------------------------------------------------------

class CheckFailed(Exception):
    """What a check has found to be wrong, in one line."""


def require(holds, message):
    if not holds:
        raise CheckFailed(message)


def require_equal(found, expected, name, tolerance=1e-4):
    """Of tensors (rows, positions, ...), equal to within tolerance times the largest element, or times 1."""
    require(found.shape == expected.shape, f"{name}: {tuple(found.shape)} instead of {tuple(expected.shape)}")
    require(found.isfinite().all(), f"{name}: NaN or infinite")
    found, expected = found.detach(), expected.detach()
    difference = (found - expected).abs().flatten(2).amax(2)
    for row, position in (difference > tolerance * max(1.0, float(expected.abs().max()))).nonzero().tolist():
        require(False, f"{name}: first differs at row {row}, position {position} by "
                f"{difference[row, position]:.2g}")


def require_close(found, expected, name, tolerance=1e-4):
    require(abs(found - expected) <= tolerance * abs(expected), f"{name} is {found:.6g}, not {expected:.6g}")


# the forward pass by its formulas ---------------------------------------------------------------------------

def linear(module, x, expert=...):
    """expert: its number, where the weights of several are stacked."""
    return F.linear(x, module.weight[expert], None if module.bias is None else module.bias[expert])


def norm_of(config, module, x):
    if config.norm == 'layernorm':
        return F.layer_norm(x, x.shape[-1:], module.weight, module.bias, config.norm_eps)
    y = F.rms_norm(x, x.shape[-1:], module.weight, config.norm_eps)
    return y if module.bias is None else y + module.bias


def yarn_factor(by, weight):
    return 0.1 * weight * math.log(by) + 1


def frequencies(base, width, length, scaling):
    """base^(-2i / width) as YaRN has it (arXiv:2309.00071, 3.2), and the factor on the rotation, with
    DeepSeek's mscale; kinds other than linear as ROPE_SCALINGS has them."""
    pair, options = torch.arange(width // 2).double(), dict(scaling or {})
    freq, kind = base ** (-2 * pair / width), options.pop('rope_type', None)
    if kind != 'yarn' or {'truncate', 'attention_factor'} & options.keys():
        known = {None: (freq, 1.0), 'linear': (freq / options.get('factor', 1), 1.0)}
        return known.get(kind) or ROPE_SCALINGS[kind](freq, base, length, **options)
    once = options['original_max_position_embeddings'] / (2 * math.pi)
    low, high = (width * math.log(once / turns) / (2 * math.log(base))
                 for turns in (options.get('beta_fast', 32), options.get('beta_slow', 1)))
    low, high, by = max(math.floor(low), 0), min(math.ceil(high), width - 1), options['factor']
    slowed, all_dim = ((pair - low) / max(high - low, 0.001)).clamp(0, 1), options.get('mscale_all_dim') or 0
    factor = yarn_factor(by, options['mscale'] if all_dim else 1) / yarn_factor(by, all_dim)
    return slowed * freq / by + (1 - slowed) * freq, factor


def turned(config, layer, x, width):
    """x (B, heads, T, D), its first dimensions turned by the positions 0 to T - 1, if the layer has any."""
    if config.pos != 'rope' or not kind_of(config, layer)[3]:
        return x
    freq, factor = frequencies(config.rope_base, width, config.block_size, config.rope_scaling)
    angle, (a, b) = torch.arange(x.shape[2])[:, None] * freq, x[..., :width].chunk(2, dim=-1)
    rotated = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)
    return torch.cat((factor * rotated, x[..., width:]), dim=-1)


def softmax_attention(config, layer, mixer, q, k, v, scale):
    """q (B, H, T, D), k and v (B, K, T, ...) -> (B, T, H D')"""
    (_, window, _, positions), (H, T) = kind_of(config, layer), q.shape[1:3]
    k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    score, age = q @ k.mT * (config.attn_scale or scale), torch.arange(T)[:, None] - torch.arange(T)
    if config.attn_softcap:
        score = config.attn_softcap * torch.tanh(score / config.attn_softcap)
    if config.pos == 'alibi' and positions:  # as the code of arXiv:2108.12409 has it, for up to 6 heads
        score = score - config.alibi_scale * 0.5 ** torch.tensor([2, 4, 6, 8, 1, 3])[:H, None, None] * age
    weight = score.exp() * ((age >= 0) & (age < (window or T)))
    total = weight.sum(-1, keepdim=True) + (mixer.sink.exp()[:, None, None] if config.attn_sink else 0)
    return (weight / total @ v).transpose(1, 2).flatten(2)


def attention(config, layer, mixer, x):
    D, shared = config.head_dim, config.n_kv_head * config.head_dim
    q, k, v, *gate = linear(mixer.c_attn, x).split(
        [config.n_head * D, shared, shared] + [config.n_head * D] * config.attn_gate, dim=-1)
    if config.qk_norm:
        q, k = (norm_of(config, norm, y.unflatten(-1, (-1, len(norm.weight)))).flatten(2)
                for norm, y in ((mixer.q_norm, q), (mixer.k_norm, k)))
    q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))
    q, k = (turned(config, layer, y, int(D * config.partial_rotary_factor)) for y in (q, k))
    y = softmax_attention(config, layer, mixer, q, k, v, D ** -0.5)
    return linear(mixer.c_proj, y * gate[0].sigmoid() if gate else y)


gelu_tanh = functools.partial(F.gelu, approximate='tanh')
ACTIVATIONS = {
    'swiglu': F.silu, 'geglu': F.gelu, 'geglu_tanh': gelu_tanh, 'reglu': F.relu, 'glu': torch.sigmoid,
    'gelu': F.gelu, 'gelu_tanh': gelu_tanh, 'relu': F.relu, 'relu2': lambda x: F.relu(x) ** 2, 'silu': F.silu}


SCORES = {  # router: (scores of its logits, how many of the best make a group's)
    'softmax': (lambda logits: logits.softmax(-1), 1), 'sigmoid': (torch.sigmoid, 2)}


def mlp(config, module, x, expert=...):
    act, y = ACTIVATIONS[config.mlp], linear(module.c_fc, x, expert)
    gate, up = y.chunk(2, dim=-1)
    return linear(module.c_proj, act(gate) * up if 'glu' in config.mlp else act(y), expert)


def moe(config, module, x):
    """x (B, T, C), every expert on every token -> y; the balance and z losses and the load"""
    logits, k = linear(module.router, x), config.n_expert_active
    function, of_group = SCORES[config.router]
    scores = function(logits)
    rank = scores + module.expert_bias if config.balance_bias else scores
    if config.n_group:
        groups = rank.unflatten(-1, (config.n_group, -1))
        best = groups.topk(of_group).values.sum(-1).topk(config.topk_group).indices
        kept = torch.zeros_like(groups[..., 0]).scatter(-1, best, 1.0)
        rank = groups.masked_fill(kept[..., None] == 0, -math.inf).flatten(-2)
    used = torch.zeros_like(scores).scatter(-1, rank.topk(k).indices, 1.0)
    weight = scores * used / ((scores * used).sum(-1, keepdim=True) if config.norm_topk_prob else 1)
    y = sum(config.routed_scaling_factor * weight[..., e, None] * mlp(config, module.experts, x, e)
            for e in range(config.n_expert))
    if config.n_shared_expert:
        gate = linear(module.shared_gate, x).sigmoid() if config.shared_gate else 1
        y = y + gate * mlp(config, module.shared, x)
    mean = 1 if config.balance_per_sequence else (0, 1)
    share = (scores / scores.sum(-1, keepdim=True)).mean(mean)  # arXiv:2101.03961, equations 4 to 6
    balance = config.n_expert / k * (used.mean(mean) * share).sum(-1).mean()
    return y, balance, logits.logsumexp(-1).square().mean(), used.sum((0, 1))


PLACEMENTS = {  # norms before and after the mixer, before and after the MLP, on the stream after each; 0: no
    'pre': '102000', 'post': '000012', 'output': '010200', 'sandwich': '123400', 'parallel': '101000',
    'parallel_2': '102000'}


@torch.no_grad()
def check_formulas(config):
    """Every module on what the formulas gave before it, or what a module without formula has given."""
    chosen = (config.norm_placement, config.mlp, config.router)
    if not all(name in known for name, known in zip(chosen, (PLACEMENTS, ACTIVATIONS, SCORES))):
        return f"none for {' or '.join(chosen)}"
    model, idx, seen = float64_model(config, document_token=None), random_tokens(config, 2, 136), {}
    targets, losses = idx.clone(), []
    targets[0, ::3] = targets[1, :99] = -1  # rows with other numbers of targets
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, args, y, name=name: seen.update({name: y}))
    with KeepsFloat64():
        loss, aux = model(idx, targets)
        with torch.enable_grad():  # another path, which must give the same
            again = {**seen, '': model(idx)}
        model(idx)

    def same(name, expected):
        for found, how in (seen, ''), (again, ', with gradients'):
            require_equal(found[name], expected, f"{name or 'logits'}{how}")
        return expected
    x = config.embed_scale * model.wte.weight[idx]
    if config.pos == 'learned':
        x = x + model.wpe.weight[:136]
    if config.pos == 'sinusoidal':  # arXiv:1706.03762, 3.5
        angle = torch.arange(136)[:, None] / 10000 ** (torch.arange(0, config.n_embd, 2) / config.n_embd)
        x = x + torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)
    x = first = norm_of(config, model.ln_embd, x) if config.embed_norm else x
    for layer, block in enumerate(model.h):
        def norm(number, y, block=block):
            return y if number == '0' else norm_of(config, getattr(block, f'ln_{number}'), y)
        (letter, _, sparse, _), name = kind_of(config, layer), f'h.{layer}'
        n = PLACEMENTS[config.norm_placement]
        if config.residual_lambdas:
            x = model.resid_lambdas[layer] * x + model.x0_lambdas[layer] * first
        y = seen[f'{name}.attn']
        if MIXERS[letter] is Attention:
            y = same(f'{name}.attn', attention(config, layer, block.attn, norm(n[0], x)))
        between = norm(n[4], x + norm(n[1], config.residual_scale * y))
        z = norm(n[2], x if config.norm_placement.startswith('parallel') else between)
        z, *rest = moe(config, block.mlp, z) if sparse else [mlp(config, block.mlp, z)]
        losses += [rest] * sparse
        x = same(name, norm(n[5], between + norm(n[3], config.residual_scale * same(f'{name}.mlp', z))))
    x = x if config.norm_placement == 'post' else norm_of(config, model.ln_f, x)
    logits = x @ model.wte.weight.mT if config.tie_word_embeddings else linear(model.lm_head, x)
    logits = logits[..., :config.vocab_size]
    if config.logit_softcap:
        logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
    require_close(loss, cross_entropy(same('', logits), targets), 'the loss')
    for name, values in zip(('balance', 'z', 'load'), zip(*losses)):
        expected = torch.stack(values)
        expected = expected if name == 'load' else expected.mean()
        require_equal(aux[name].view(1, 1, -1), expected.view(1, 1, -1), name)
    others = {MIXERS[letter].__name__ for letter in config.mixer_pattern} - {'Attention'}
    return f"none for {', '.join(others)}" if others else None


def cross_entropy(logits, targets):
    """The mean over all targets that are not -1."""
    return -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0][targets != -1].mean()


def check_norms(config):
    for name, module in randomized(config).named_modules():
        for dtype, tolerance in (torch.float32, 1e-5), (torch.bfloat16, 1.05 * 2 ** -8):
            if type(module) is Norm:
                x = config.norm_eps ** 0.5 * torch.randn(2, 8, len(module.weight))  # so that eps matters
                x = x.to(dtype)
                expected = norm_of(config, copy.deepcopy(module).double(), x.double()).detach()
                error = ((module(x) - expected) / expected.abs().clamp(min=1e-2)).abs().max()
                require(error < tolerance, f"{name} in {dtype}, eps {config.norm_eps:g}: elements differ by "
                        f"{error:.2g}")


def check_start(config):
    idx, expected = random_tokens(config, 4, SHORT + 1), math.log(config.vocab_size)
    loss, _ = GPT(config)(idx[:, :-1], idx[:, 1:])
    require_close(loss, expected, 'the first loss, about ln(vocabulary),', 0.07)


# one path against another -----------------------------------------------------------------------------------

def check_causal(config):
    model, idx = randomized(config), random_tokens(config, 2, SHORT)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            full = model(idx)
            require_equal(model(idx[1:]), full[1:], 'a row alone')
            for n in range(1, SHORT):
                require_equal(model(idx[:, :n]), full[:, :n], f"{n} tokens without those that follow them")


def check_documents(config):
    if not all(MIXERS[letter].documents for letter in config.mixer_pattern):
        return 'its mixers do not keep them apart, and say so'
    packed = randomized(config, document_token=3)
    plain = GPT(dataclasses.replace(config, document_token=None)).eval()
    plain.load_state_dict(packed.state_dict())
    lengths = (64, 5, 1, 30, 36)  # one starts with a block of DeltaNet
    idx = random_tokens(packed.config, 1, sum(lengths))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            idx[0, [64, 69, 70, 100]] = 3
            alone = torch.cat([plain(document) for document in idx.split(lengths, dim=1)], dim=1)
            require_equal(packed(idx), alone, f"documents of {lengths} tokens")


@torch.no_grad()
def check_cache(config):
    model, T = randomized(config), SHORT
    idx = random_tokens(config, 3, T)
    if config.document_token is not None:
        idx[range(3), (5, 9, 13)] = config.document_token
    full = model(idx)

    def feed(cache, name, chunks, at=(0, 0, 0), rows=(0, 1, 2)):
        for n in chunks:
            new, expected = (torch.stack([x[row, a:a + n] for row, a in zip(rows, at)]) for x in (idx, full))
            require_equal(model(new, cache=cache), expected, f"{name}, {n} tokens after {list(at)}")
            at = [a + n for a in at]
        return at

    cache = model.make_cache(3, T)
    feed(cache, 'in odd chunks', (1, 6, 1, 8, 1, 7))
    cache.reset()
    feed(cache, 'after reset', (T - 2, 1, 1))
    feed(model.make_cache(3, T, static=True), 'in a static cache', (T - 3, 1, 2))
    cache, at = model.make_cache(3, T), [12, 8, 2]
    last = model(idx[:, :12], cache=cache, keep=1, lengths=torch.tensor(at))
    require_equal(last, full[range(3), [a - 1 for a in at]][:, None], 'the last of rows of other lengths')
    at = feed(cache, 'rows of other lengths', (3, 1), at)
    cache.select([2, 0, 1, 2])
    feed(cache, 'rows copied by select', (1, 2), [at[2], *at], (2, 0, 1, 2))
    require_equal(model(idx), full, 'without a cache, after other tokens')
    if any(block.attn.states for block in model.h):
        return 'a state cannot rewind'
    cache = model.make_cache(3, T, rolling=False)
    feed(cache, 'before rewind', (18,))
    cache.rewind(torch.tensor([0, 4, 1]))
    feed(cache, 'after rewind', (2,), [18, 14, 17])


def objective(model, x, y):
    loss, aux = model(x, y)
    return loss + 0.1 * aux['balance'] + 0.01 * aux['z'] if aux else loss


def check_gradients(config):
    model, idx = float64_model(config), random_tokens(config, 2, SHORT)
    with KeepsFloat64():
        objective(model, idx, idx.roll(-1, 1)).backward()
        with torch.no_grad():
            for name, w in reversed([*model.named_parameters()]):  # the first that fails is next to the fault
                require(w.grad is not None, f"{name} has no gradient")
                direction, kept, expected = torch.randn_like(w), w.clone(), 0.0
                for step in (1e-6, -1e-6):
                    w.copy_(kept + step * direction)
                    expected += objective(model, idx, idx.roll(-1, 1)) / (2 * step)
                w.copy_(kept)
                found, size = (w.grad * direction).sum(), max(abs(expected), w.grad.norm(), 1e-3)
                require(abs(found - expected) < 1e-4 * size, f"{name}: {found:.6f} along a random direction, "
                        f"{expected:.6f} by differences; those after it are right")


@torch.no_grad()
def check_dropout(config):
    plain, idx, found = randomized(config, document_token=None), random_tokens(config, 2, 136), []
    model = GPT(dataclasses.replace(plain.config, dropout=0.25)).eval()
    model.load_state_dict(plain.state_dict())
    require_equal(model(idx), plain(idx), 'evaluated with dropout and without')
    model.h[0].register_forward_pre_hook(lambda block, args: found.append(args[0]))
    for key in None, (1, 1, 0), (1, 1, 0), (1, 2, 0), (2, 1, 0):
        if key:
            train.seed_dropout(*key, 'cpu')
        model.train(bool(key))(idx)
    kept, one, same, *others = found
    different = not any(other.equal(one) for other in others)
    require(same.equal(one) and different, 'the mask is no function of seed and iteration')
    require_close((one == 0).float().mean(), 0.25, 'the share of the embedding that is dropped', 0.1)
    require_close((one / kept)[one != 0].mean(), 4 / 3, 'the factor on what is kept', 0.01)


def check_compiling(config):
    model = randomized(config).bfloat16().train()  # in which experts are one product, without a break
    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, dynamic=False, backend='eager')
    for again in (False, True):
        idx = random_tokens(config, 2, SHORT)
        with torch._dynamo.config.patch(error_on_recompile=again):
            require_close(forward(idx, idx)[0], model(idx, idx)[0], 'the loss of the compiled model', 0.02)


# training ---------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def training_data(config):
    """(tokens, targets, Bins) of ten sequences with a target mask, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):  # a notice
        tokens = random_tokens(config, 10 * config.block_size + 1)
        mask = torch.arange(len(tokens)) % 7 < torch.linspace(1, 7, len(tokens))  # the later the more
        for name, values, dtype in ('train', tokens, '<u2'), ('train.mask', mask, 'u1'):
            values.numpy().astype(dtype).tofile(os.path.join(folder, f'{name}.bin'))
        yield tokens, tokens.where(mask, -1), Bins(folder, 'train', dtype='uint16')


def read(bins, config, first, last):
    """Two micro-batches of two sequences for each of these iterations."""
    return train.read_batches(bins, config.block_size, range(first, last), 2, 2, 7, 'cpu')


def check_data(config):
    T, order = config.block_size, []
    with training_data(config) as (tokens, expected, bins):
        sequences = tokens[:-1].view(10, T)
        for x, y, _ in read(bins, config, 0, 5):
            for inputs, targets in zip(x, y):
                at = (sequences == inputs).all(1).nonzero().flatten().tolist()
                require(at, 'the inputs are no sequence of the data')
                following = expected[at[0] * T + 1:][:T]
                require(torch.equal(following, targets), 'targets do not follow their inputs')
                order += at
        require(sorted(order[:10]) == sorted(order[10:]) == list(range(10)) and order[:10] != order[10:],
                f"two epochs take the sequences {order}: not each once, or in one order")
        train.sequence_order.cache_clear()
        again = torch.cat([x for x, _, _ in read(bins, config, 3, 5)])
        require(torch.equal(again, sequences[order[12:]]), 'resumed at iteration 3 other sequences come')
        model = randomized(config, dropout=0.5).train()
        loss, _ = train.evaluate(model, model, bins, 3, 4, 'cpu', contextlib.nullcontext)
        require(model.training, 'train.evaluate leaves the model in evaluation mode')
        with torch.no_grad():
            logits = model.eval()(sequences)
        require_close(loss, cross_entropy(logits, expected[1:].view(10, T)), 'the loss of train.evaluate')


def check_update(config):
    """Two updates by SGD, of two micro-batches each, against the mean over all their targets."""
    with training_data(config) as (_, _, bins):
        model, batches = randomized(config).train(), read(bins, config, 0, 3)
        params, batch = list(model.parameters()), next(batches)
        sgd, scaler = torch.optim.SGD(params, lr=0.1), torch.amp.GradScaler('cpu', init_scale=64.0)
        for it in range(2):
            other, parts = copy.deepcopy(model), list(read(bins, config, it, it + 1))
            xs, ys, _ = zip(*parts)
            expected = cross_entropy(torch.cat([other(x) for x in xs]), torch.cat(ys))
            extra = sum(objective(other, x, y) - other(x, y)[0] for x, y in zip(xs, ys)) / 2  # of experts
            (expected + extra).backward()
            size = torch.nn.utils.get_total_norm([w.grad for w in other.parameters()])
            loss, load, batch = train.gradients(model, batch, batches, 2, contextlib.nullcontext, scaler,
                                                0.1, 0.01)
            norm, _ = train.update(model, params, [sgd], scaler, size.item() / 2, load, 0.3)
            require_close(loss, expected, 'the loss reported')
            require_close(norm, size, 'the norm of the gradient', 1e-3)
            for (name, w), old in zip(model.named_parameters(), other.parameters()):
                error = (w - old + 0.05 * old.grad).norm() / (0.05 * old.grad.norm()).clamp(min=1e-4 * size)
                require(error < 1e-2, f"update {it}: {name} is off the clipped mean gradient by {error:.2g}")
            if config.balance_bias:
                load = sum(other(x, y)[1]['load'] for x, y in zip(xs, ys))
                found, old = (torch.stack(list(each.buffers())) for each in (model, other))
                moved = 0.3 * (load.mean(1, keepdim=True) - load).sign()
                require_equal((found - old)[None], moved[None], 'the move of the biases that balance experts')


def check_optimizers(config):
    """Two steps against torch's own optimizers, and one of gradients that are NaN."""
    settings = {**train.config, 'weight_decay': 0.1, 'beta1': 0.5, 'beta2': 0.99, 'momentum': 0.7}
    scaler = torch.amp.GradScaler('cpu', enabled=False)
    load = torch.ones(config.n_layer, config.n_expert or 1)
    for kind in {'adamw', 'muon'} & train.OPTIMIZERS.keys():
        model = randomized(config)
        theirs, before, steps = copy.deepcopy(model), copy.deepcopy(model), {}
        optimizers = train.make_optimizers(model, {**settings, 'optimizer': kind})
        for group in [group for opt in optimizers for group in opt.param_groups]:
            group['lr'] = 0.1
        for name, w in theirs.named_parameters():
            group, w.grad = model.tags[name].group, torch.zeros_like(w)
            if kind == 'muon' and group == 'matrix' and name.startswith('h.'):
                rows = getattr(model.get_submodule(name.rpartition('.')[0]), 'widths', w.shape[-2])
                parts, grads = ([part for one in x.view(-1, *w.shape[-2:]) for part in one.split(rows)]
                                for x in (w.detach(), w.grad))  # projections and experts apart
                for part, grad in zip(parts, grads):
                    part.grad = grad
                steps[name] = torch.optim.Muon(parts, 0.1, 0.1, 0.7, adjust_lr_fn='match_rms_adamw').step
            else:
                decay = 0.1 if w.ndim > 1 and group != 'vector' else 0
                steps[name] = torch.optim.AdamW([w], 0.1, (0.5, 0.99), weight_decay=decay).step
        for scale in (1.0, 1.0, math.nan):
            for (name, w), their in zip(model.named_parameters(), theirs.parameters()):
                w.grad = scale * torch.randn_like(w)
                their.grad.copy_(w.grad)
                if scale == 1:
                    steps[name]()
            train.update(model, list(model.parameters()), optimizers, scaler, 0.0, load, 0.0)
        for (name, w), their, old in zip(model.named_parameters(), theirs.parameters(), before.parameters()):
            error = (w - their).norm() / (their - old).norm()
            most = 0.05 if 'Muon' in str(steps[name]) else 1e-3  # in bfloat16
            require(error < most, f"--optimizer={kind} moves {name} otherwise than torch's, by {error:.2g} "
                    "of the way, or NaN moves it")
    return None if len(train.OPTIMIZERS) == 2 else 'adamw and muon'


def check_rates(config):
    halfway = {'cosine': 0.55, 'linear': 0.55, 'wsd': 1.0}
    for name in train.SCHEDULES:
        known = {0: 1 / 11, 4: 5 / 11, 10: 1.0, 60: halfway.get(name), 110: 0.1, 130: 0.1}
        for it, expected in known.items():
            found = train.lr_at(it, 1.0, 0.1, 10, 110, name, 0.4)
            require_close(found, expected or found, f"{name} from 1 to 0.1, from 10 to 110: the rate at {it}")


def check_resuming(config):
    """Two updates, saved and loaded, and two more."""
    config, scaler = dataclasses.replace(config, dropout=0.1), torch.amp.GradScaler('cpu', enabled=False)

    def run(model, optimizers, first, bins):
        for it in (first, first + 1):
            train.seed_dropout(0, it, 0, 'cpu')
            batches = read(bins, config, it, it + 1)
            _, load, _ = train.gradients(model.train(), next(batches), batches, 2, contextlib.nullcontext,
                                         scaler, 0.1, 0.0)
            train.update(model, list(model.parameters()), optimizers, scaler, 1.0, load, 0.3)
    for kind in train.OPTIMIZERS:
        settings, model = {**train.config, 'learning_rate': 0.01, 'optimizer': kind}, GPT(config)
        with training_data(config) as (_, _, bins):
            path, optimizers = bins.name + '.pt', train.make_optimizers(model, settings)
            run(model, optimizers, 0, bins)
            state = train.snapshot(model, train.Progress(iter_num=2), optimizers, scaler)
            train.save(path, {'model_args': vars(config), 'config': settings, **state})
            run(model, optimizers, 2, bins)
            again, _, rest = hub.load(path)
            optimizers = train.make_optimizers(again, settings)
            run(again, optimizers, train.resume(rest, optimizers, scaler).iter_num, bins)
        others = dict([*again.named_parameters(), *again.named_buffers()])
        for name, w in (*model.named_parameters(), *model.named_buffers()):
            require(w.equal(others[name]), f"--optimizer={kind}: {name} is not as in an unbroken run")


# report -----------------------------------------------------------------------------------------------------

CHECKS = {  # name: (function of a small config, where to look)
    'first loss near ln(vocabulary)': (check_start, 'parameter() and tag() where it is made, GPT.head'),
    'tokens do not see what follows': (check_causal, 'GPT.mask, visible, all that crosses positions'),
    'documents do not see each other': (check_documents, 'document_starts in the mixer, GPT.mask'),
    'modules equal their formulas': (check_formulas, 'its forward; expected, if this is your change'),
    'norms equal their formulas': (check_norms, 'Norm, RMSNorm'),
    'cache equals no cache': (check_cache, 'GPT.context, Cache, FullSlots, WindowSlots, states of the mixer'),
    'gradients equal differences': (check_gradients, 'detach, no_grad, in-place changes, backward functions'),
    'dropout in training only': (check_dropout, 'dropout, self.training, seed_dropout in train.py'),
    'data and evaluation': (check_data, 'sequence_order, read_batches, evaluate in train.py; Bins'),
    'an update is a step on the mean gradient': (check_update, 'gradients, update, loss_weights in train.py'),
    "optimizers equal torch's": (check_optimizers, 'OPTIMIZERS, Muon in train.py, tag() where it is made'),
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
    began, checks, failed = time.perf_counter(), dict(CHECKS), []
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
    except (ValueError, ImportError) as error:  # no fault
        family = str(error)
    print(f"     published family: {family}")
    return {'passed': len(checks) - len(failed), 'failed': failed, 'family': family,
            'seconds': round(time.perf_counter() - began, 1)}


if __name__ == '__main__':
    numbers = check(config, *words, **model_args) if words else check(config, init_from, **model_args)
    print_json(json, what='check', **numbers)
    sys.exit(bool(numbers['failed']))

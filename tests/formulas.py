"""
Formulas of the papers in plain torch, for lab/check.py and tests. Rows are one document of LONG tokens,
without cache and dropout. A formula has the arguments config, module and those of the module's forward,
returns what forward should return, and calls the inner modules, which have their own formulas.
"""
import functools
import math
import types

import torch
import torch.nn.functional as F

import mixers
import model as flat

LONG = 136  # tokens, more than a block of attention or a chunk of DeltaNet


def letters(config, layer):
    """A layer's letters for mixer, window (L: none), MLP and positions."""
    patterns = config.mixer_pattern, config.window_pattern or 'L', config.expert_pattern, config.pos_pattern
    mixer, window, mlp, pos = (pattern[layer % len(pattern)] for pattern in patterns)
    is_dense = mlp == 'E' and (not config.n_expert or layer < config.n_dense_layer)
    return mixer, window, 'D' if is_dense else mlp, pos


def norm(config, module, x):
    is_latent = x.shape[-1] in (config.kv_lora_rank, config.q_lora_rank)
    eps = config.latent_norm_eps if is_latent else config.norm_eps
    plain = {'layernorm': F.layer_norm, 'rmsnorm': F.rms_norm}[config.norm]
    return plain(x, x.shape[-1:], module.weight, eps=eps) + (0 if module.bias is None else module.bias)


def capped(x, cap):
    return cap * torch.tanh(x / cap) if cap else x


def rotated(config, layer, y):
    """y (B, heads, T, width) with its first dimensions rotated, if the layer has rotations."""
    _, window, _, pos = letters(config, layer)
    if config.pos != 'rope' or pos != 'P':
        return y
    fields = vars(config) | (config.local or {} if window != 'L' else {})
    n = (config.qk_rope_head_dim or int(fields['head_dim'] * fields['partial_rotary_factor'])) // 2
    base, factor, options = fields['rope_base'], 1, dict(fields['rope_scaling'] or {})
    freq = base ** (-torch.arange(n) / n)
    if options:
        freq, factor = flat.ROPE_SCALINGS[options.pop('rope_type')](freq, base, LONG, **options)
    a, b, unrotated = y.tensor_split((n, 2 * n), -1)
    z = torch.complex(a, b) * factor * torch.exp(1j * torch.arange(LONG)[:, None] * freq)
    return torch.cat((z.real, z.imag, unrotated), -1)


def attend(config, module, q, k, v):
    """q, k, v (B, heads, T, width) -> (B, T, heads, width)"""
    _, window, _, pos = letters(config, module.layer)
    position, by = torch.arange(LONG)[:, None], config.query_scale
    if by and not (pos == 'P' and by.get('layers') == 'N'):
        q = q * (1 + by['beta'] * ((position + by.get('start', 0)) // by['length'] + 1).log())
    k, v = (y.repeat_interleave(config.n_head // y.shape[1], 1) for y in (k, v))
    age, width = position - position.T, config.window or LONG
    within = {'L': True, 'S': age < width, 'C': position // width == position.T // width}[window]
    score = capped(q @ k.mT * (config.attn_scale or q.shape[-1] ** -0.5), config.attn_softcap)
    if config.pos == 'alibi' and pos == 'P':  # slopes for 6 heads, by the code of arXiv:2108.12409
        score = score - config.alibi_scale * 0.5 ** torch.tensor([2, 4, 6, 8, 1, 3])[:, None, None] * age
    weight = score.double().exp() * (age >= 0) * within
    total = weight.sum(-1, keepdim=True) + (module.sink.exp()[:, None, None] if config.attn_sink else 0)
    return ((weight / total).type_as(v) @ v).transpose(1, 2)


def attention(config, module, x, context):
    fields = vars(config) | (config.local or {} if letters(config, module.layer)[1] != 'L' else {})
    (q, k, *others), kind, bound = module.c_attn(x), config.qk_norm, config.clip_qkv or math.inf
    v, *gate = [k] * fields['k_eq_v'] + others

    def heads(y, norm):
        y = norm(y) if kind == 'whole' else y
        y = y.unflatten(-1, (-1, fields['head_dim'])).transpose(1, 2)
        y = rotated(config, module.layer, (norm(y) if kind is True else y).clamp(-bound, bound))
        return norm(y) if kind in ('rotated', 'unit') else y
    v = v.unflatten(-1, (-1, fields['head_dim'])).transpose(1, 2).clamp(-bound, bound)
    v = norm(config, module.v_norm, v) if config.v_norm else v
    y = attend(config, module, heads(q, module.q_norm), heads(k, module.k_norm), v)
    return module.c_proj((y * gate[0].view(*y.shape[:3], -1).sigmoid() if gate else y).flatten(2))


gelu_tanh = functools.partial(F.gelu, approximate='tanh')
CURVES = {
    'swiglu': F.silu, 'geglu': F.gelu, 'geglu_tanh': gelu_tanh, 'reglu': F.relu, 'glu': torch.sigmoid,
    'gelu': F.gelu, 'gelu_tanh': gelu_tanh, 'relu': F.relu, 'relu2': lambda x: F.relu(x) ** 2, 'silu': F.silu,
    'swiglu_oai': lambda x: x * torch.sigmoid(1.702 * x)}
SCORES = {'softmax': (functools.partial(torch.softmax, dim=-1), 1), 'sigmoid': (torch.sigmoid, 2)}


def mlp(config, module, x, context=None):
    gate, *up = module.c_fc(x)
    if config.mlp == 'swiglu_oai':  # arXiv:2508.10925
        gate, up = gate.clamp(max=config.mlp_limit), [up[0].clamp(-config.mlp_limit, config.mlp_limit) + 1]
    act = module.act if config.mlp == 'xielu' else CURVES[config.mlp]
    return module.c_proj(math.prod(up, start=act(gate)))


def routed(config, module, x):
    """Weights (0 if not chosen) and scores of the experts, (B, T, E)."""
    function, n_best = SCORES[config.router]  # a group's score is the sum of its n_best best experts
    scores = function(module.router(x))
    rank = scores + module.expert_bias if config.balance_bias else scores
    if config.n_group:
        groups = rank.unflatten(-1, (config.n_group, -1))
        best = groups.topk(n_best).values.sum(-1)
        allowed = best >= best.topk(config.topk_group).values[..., -1:]
        rank = groups.where(allowed[..., None], -math.inf).flatten(-2)
    weight = scores * (rank >= rank.topk(config.n_expert_active).values[..., -1:])
    weight = weight / weight.sum(-1, keepdim=True) if config.norm_topk_prob else weight
    return weight * config.routed_scaling_factor, scores


def expert(module, e):
    """The e-th MLP of Experts."""
    def linear(part):
        bias = None if part.bias is None else part.bias[e]
        return lambda x: F.linear(x, part.weight[e], bias).split(part.widths, -1)
    c_fc, c_proj = linear(module.c_fc), linear(module.c_proj)
    return types.SimpleNamespace(act=module.act, c_fc=c_fc, c_proj=lambda x: c_proj(x)[0])


def moe(config, module, x, context):
    """Computes every expert on every token."""
    if config.expert_norms:  # Gemma 4: tests/test_hub.py
        raise KeyError('expert_norms')
    y = 0
    for e, after in enumerate(routed(config, module, x)[0].split(1, -1)):
        before, after = (after, after > 0) if config.expert_input_scale else (1, after)
        y = y + mlp(config, expert(module.experts, e), before * x) * after
    if config.n_shared_expert:
        y = y + module.shared(x) * (module.shared_gate(x).sigmoid() if config.shared_gate else 1)
    return y


def router_losses(config, module, x, targets):
    """Balance loss (arXiv:2101.03961, equations 4 to 6), z (arXiv:2202.08906), tokens per expert. Counts only
    tokens with a target."""
    learned = targets >= 0
    groups = [(x[i:i + 1, row], row.sum()) for i, row in enumerate(learned)]
    if not config.balance_per_sequence:
        groups = [(x[learned][None], learned.sum())]
    balance, total = 0, 0
    for tokens, n in groups:
        weight, scores = routed(config, module, tokens)
        chosen, share = (weight > 0).float(), scores / scores.sum(-1, keepdim=True)
        even = config.n_expert_active / config.n_expert
        balance += n * (chosen.mean(1) / even * share.mean(1)).sum()
        total = total + chosen.sum((0, 1))
    z = module.router(x[learned]).logsumexp(-1).square().mean()
    return balance / learned.sum(), z, total


def mean_losses(routing):
    """What router_losses returned for each layer -> what the model returns."""
    means = {}
    for name, values in zip(('balance', 'z', 'load'), zip(*routing)):
        means[name] = torch.stack(values) if name == 'load' else sum(values) / len(values)
    return means


def block(config, module, x, context):
    (_, _, kind, _), placement = letters(config, module.attn.layer), config.norm_placement

    def ln(number, x):
        return norm(config, getattr(module, f'ln_{number}'), x)

    def attn(x):
        return module.attn(x, context)

    def mlp(x):
        return module.mlp(x, context)

    def add(x, branch, number):
        r = config.residual_scale
        if placement == 'post':
            return ln(number, x + r * branch(x))
        if placement == 'output':
            return x + r * ln(number, branch(x))
        if placement == 'sandwich':
            return x + r * ln(2 * number, branch(ln(2 * number - 1, x)))
        if placement in ('pre', 'parallel', 'parallel_2'):
            return x + r * branch(ln(number, x))
        raise KeyError(placement)
    if placement.startswith('parallel') and kind != 'N':
        number = 2 if placement == 'parallel_2' else 1
        return add(x, attn, 1) + config.residual_scale * mlp(ln(number, x))
    x = add(x, attn, 1)
    x = x if kind == 'N' else add(x, mlp, 2)
    return x * module.scalar if config.layer_scalar else x


def prediction(config, module, x, x0, context):
    """arXiv:2412.19437, 2.2"""
    both = norm(config, module.ln_x, x), norm(config, module.ln_next, x0.roll(-1, 1))
    return module.block(module.c_in(torch.cat(both, -1)), context)


FORMULAS = {  # other mixers: tests/test_hub.py compares them with transformers
    flat.Norm: norm, flat.Attention: attention, mixers.VariantAttention: attention, flat.MLP: mlp,
    flat.MoE: moe, flat.Block: block, mixers.MultiTokenPrediction: prediction}
PARTS = {  # modules that the formulas call or compute
    flat.GPT, flat.Embedding, flat.Linear, flat.FusedLinear, flat.Experts, flat.GroupedLinear, mixers.XIELU,
    mixers.SwigluOAI}


def embedding(config, model, context):
    x = config.embed_scale * model.wte.weight[context.idx]
    if config.pos == 'learned':
        x = x + model.wpe.weight
    if config.pos == 'sinusoidal':  # arXiv:1706.03762, 3.5
        angle = torch.arange(LONG)[:, None] / 10000 ** (torch.arange(0, config.n_embd, 2) / config.n_embd)
        x = x + torch.stack((angle.sin(), angle.cos()), -1).flatten(1)
    return model.ln_embd(x)


def head(config, model, x):
    x = x if config.norm_placement == 'post' else norm(config, model.ln_f, x)
    logits = x @ model.wte.weight.mT if config.tie_word_embeddings else model.lm_head(x)
    return capped(config.logit_scale * logits, config.logit_softcap)[..., :config.vocab_size]


def decoder(config, model, idx):
    """Logits of the next token and, with mtp, of the token after it."""
    context = flat.make_context(model, idx)
    x = first = embedding(config, model, context)
    for layer, module in enumerate(model.h):
        if config.residual_lambdas:
            x = model.resid_lambdas[layer] * x + model.x0_lambdas[layer] * first
        x = module(x, context)
    return head(config, model, x), head(config, model, model.mtp(x, first, context)) if config.mtp else None


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=-1).flatten(), ignore_index=-1)


def later(targets):
    """The targets after the next token"""
    return torch.cat((targets[:, 1:], torch.full_like(targets[:, :1], -1)), 1)


def later_loss(logits, targets):
    """arXiv:2412.19437, equation 24: the sum of all targets but a row's first, over the number of targets"""
    share = (later(targets) >= 0).sum() / (targets >= 0).sum()
    return cross_entropy(logits, later(targets)) * share

"""
Formulas of the papers in plain torch, for lab/check.py and tests. Rows are one document of LONG tokens,
without cache and dropout. A formula has the arguments config, module and those of the module's forward,
returns what forward should return, and calls the inner modules, which have their own formulas.
"""
import functools
import itertools
import math
import types

import torch
import torch.nn.functional as F

import experts
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
    within = {'L': True, 'S': age < width, 'C': position // width == position.T // width,
              'G': (age < width) | (config.window_global > position.T)}[window]
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


def latent_attention(config, module, x, context):
    """arXiv:2405.04434, equations 9 to 19; YaRN's mscale_all_dim as in DeepSeek's code"""
    fields = vars(config) | (config.local or {} if letters(config, module.layer)[1] != 'L' else {})
    (q, latent, k_rope), scaling = module.c_attn(x), fields['rope_scaling'] or {}
    q = module.c_q(norm(config, module.q_norm, q)) if config.q_lora_rank else q
    kv = module.c_kv(norm(config, module.kv_norm, latent))
    (q, q_rope), (k, v) = (y.unflatten(-1, (config.n_head, -1)).transpose(1, 2).tensor_split(
        (config.qk_nope_head_dim,), -1) for y in (q, kv))
    q_rope, k_rope = (rotated(config, module.layer, y) for y in (q_rope, k_rope[:, None]))
    grown = 0.1 * scaling.get('mscale_all_dim', 0) * math.log(scaling.get('factor', 1)) + 1
    y = attend(config, module, torch.cat((q, q_rope), -1) * grown ** 2,
               torch.cat((k, k_rope.expand_as(q_rope)), -1), v)
    return module.c_proj(y.flatten(2))


def convolved(module, x, bias=None):
    """x (B, T, channels) -> the same shape"""
    taps = module.conv[:, None]
    return F.conv1d(F.pad(x.mT, (taps.shape[-1] - 1, 0)), taps, bias, groups=len(taps)).mT


def short_convolution(config, module, x, context):
    """arXiv:2511.23404"""
    before, after, x = module.c_attn(x)
    return module.c_proj(after * convolved(module, before * x))


def state_layer(config, module, x, context):
    """One token at a time. Gated DeltaNet: arXiv:2412.06464, equation 10; Kimi Delta Attention:
    arXiv:2510.26692; Mamba-2, which has no beta: arXiv:2405.21060, section 6."""
    q, k, v, gate, *beta, decay = module.c_attn(x)
    K, H, act = config.linear_n_key_head, config.linear_n_value_head, F.silu
    if isinstance(module, mixers.KimiDeltaAttention):
        gate, decay, act = module.c_gate(gate), module.c_decay(decay), torch.sigmoid
    x = F.silu(convolved(module, torch.cat((q, k, v), -1), module.conv_bias))
    q, k, v = (y.unflatten(-1, (n, 1, -1)).repeat_interleave(H // n, 2)  # (B, T, heads, 1, width)
               for y, n in zip(x.split(module.qkv, -1), (K, K, H)))
    step = F.softplus(decay + module.dt_bias).unflatten(-1, (H, 1, -1))
    decay, gate = (-module.A_log.exp()[:, None, None] * step).exp(), act(gate.view_as(v))
    if beta:
        q, k, step = F.normalize(q, dim=-1) * q.shape[-1] ** -0.5, F.normalize(k, dim=-1), beta[0].sigmoid()
        step = step[..., None, None]
    state, out = k.new_zeros(len(x), H, k.shape[-1], v.shape[-1]), []
    for q_t, k_t, v_t, decay_t, step_t in zip(*(y.unbind(1) for y in (q, k, v, decay, step))):
        state = decay_t.mT * state
        wrong = v_t - k_t @ state if beta else v_t
        state = state + (step_t * k_t).mT @ wrong
        out.append(q_t @ state)
    y = torch.stack(out, 1)
    if beta:
        y = F.rms_norm(y, y.shape[-1:], module.o_norm, config.norm_eps) * gate
    else:
        y = ((y + module.skip[:, None, None] * v) * gate).flatten(2).unflatten(-1, (K, -1))
        y = F.rms_norm(y, y.shape[-1:], eps=config.norm_eps).flatten(2) * module.o_norm
    return module.c_proj(y.flatten(2))


def xielu(config, module, x):
    """arXiv:2411.13010"""
    above, below = F.softplus(module.alpha_p), 0.5 + F.softplus(module.alpha_n)
    return torch.where(x > 0, above * x * x, below * (torch.expm1(x.clamp(max=0)) - x)) + x / 2


gelu_tanh = functools.partial(F.gelu, approximate='tanh')
ACTIVATIONS = {
    'swiglu': F.silu, 'geglu': F.gelu, 'geglu_tanh': gelu_tanh, 'reglu': F.relu, 'glu': torch.sigmoid,
    'gelu': F.gelu, 'gelu_tanh': gelu_tanh, 'relu': F.relu, 'relu2': lambda x: F.relu(x) ** 2, 'silu': F.silu,
    'swiglu_oai': lambda x: x * torch.sigmoid(1.702 * x)}
SCORES = {'softmax': (functools.partial(torch.softmax, dim=-1), 1), 'sigmoid': (torch.sigmoid, 2)}


def mlp(config, module, x, context=None):
    gate, *up = module.c_fc(x)
    if config.mlp == 'swiglu_oai':  # arXiv:2508.10925
        gate, up = gate.clamp(max=config.mlp_limit), [up[0].clamp(-config.mlp_limit, config.mlp_limit) + 1]
    act = module.act if config.mlp == 'xielu' else ACTIVATIONS[config.mlp]
    return module.c_proj(math.prod(up, start=act(gate)))


def around(config, module, name, x):
    """One of the norms of expert_norms (Gemma 4), if there are any."""
    return norm(config, getattr(module, name), x) if config.expert_norms else x


def router_logits(config, module, x):
    return module.router(around(config, module, 'ln_router', x)) * (
        config.n_embd ** -0.5 if config.expert_norms else 1)


def routed(config, module, x):
    """Weights (0 if not chosen) and scores of the experts, (B, T, E)."""
    function, n_best = SCORES[config.router]  # a group's score is the sum of its n_best best experts
    scores = function(router_logits(config, module, x))
    rank = scores + module.expert_bias if config.balance_bias else scores
    if config.n_group:
        groups = rank.unflatten(-1, (config.n_group, -1))
        best = groups.topk(n_best).values.sum(-1)
        allowed = best >= best.topk(config.topk_group).values[..., -1:]
        rank = groups.where(allowed[..., None], -math.inf).flatten(-2)
    weight = scores * (rank >= rank.topk(config.n_expert_active).values[..., -1:])
    weight = weight / weight.sum(-1, keepdim=True) if config.norm_topk_prob else weight
    weight = weight * module.expert_scale if config.expert_norms else weight
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
    y, each = 0, around(config, module, 'ln_in', x)
    for e, after in enumerate(routed(config, module, x)[0].split(1, -1)):
        before, after = (after, after > 0) if config.expert_input_scale else (1, after)
        y = y + mlp(config, expert(module.experts, e), before * each) * after
    y = around(config, module, 'ln_out', y)
    if config.n_shared_expert:
        shared = module.shared(around(config, module, 'ln_shared_in', x))
        shared = around(config, module, 'ln_shared_out', shared)
        y = y + shared * (module.shared_gate(x).sigmoid() if config.shared_gate else 1)
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
    z = router_logits(config, module, x[learned]).logsumexp(-1).square().mean()
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
        if number == 3 and kind == 'E' and config.expert_norms:  # MoE has its own norms
            return x
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


FORMULAS = {
    flat.Norm: norm, mixers.XIELU: xielu, flat.Attention: attention,
    mixers.VariantAttention: attention, mixers.LatentAttention: latent_attention,
    mixers.GatedDeltaNet: state_layer,
    mixers.KimiDeltaAttention: state_layer, mixers.Mamba2: state_layer,
    mixers.ShortConvolution: short_convolution, flat.MLP: mlp, experts.MoE: moe,
    flat.Block: block, mixers.MultiTokenPrediction: prediction}


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
    for layer, context.base in model.schedule:
        if config.residual_lambdas:
            x = model.resid_lambdas[layer] * x + model.x0_lambdas[layer] * first
        x = model.h[layer](x, context)
    later = head(config, model, model.mtp(x, first, context)) if config.mtp else None
    return head(config, model, x), later


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=-1).flatten(), ignore_index=-1)


def later_loss(later, targets):
    """arXiv:2412.19437, equation 24: the sum of all targets but a row's first, over the number of targets"""
    share = (targets[:, 1:] >= 0).sum() / (targets >= 0).sum()
    return cross_entropy(later[:, :-1], targets[:, 1:]) * share


# parameters and optimizers ----------------------------------------------------------------------------------

SHAPES = """
where   | parameters; a norm's have norm_weight, norm_bias | shape | if
model   | wte.weight | vocab_size, C |
model   | wpe.weight | block_size, C | pos == 'learned'
model   | norm ln_embd | C | embed_norm
model   | resid_lambdas x0_lambdas | n_layer | residual_lambdas
model   | norm ln_f | C | norm_placement != 'post'
model   | lm_head.weight | vocab_size, C | not tie_word_embeddings
model   | lm_head.bias | vocab_size | head_bias
model   | norm mtp.ln_x mtp.ln_next | C | mtp
model   | mtp.c_in.weight | C, 2 * C | mtp
block   | norm ln_1 | C |
block   | norm ln_2 | C | norms > 1
block   | norm ln_3 | C | norms > 2 and not (mlp_kind == 'experts' and expert_norms)
block   | norm ln_4 | C | norms > 3
A M     | attn.sink | H | attn_sink
A       | attn.c_attn.weight | H * D + K * D * (2 - k_eq_v) + gate, C |
A       | attn.c_attn.bias | H * D + K * D * (2 - k_eq_v) + gate | qkv_bias
A       | norm attn.q_norm | H * D if qk_norm == 'whole' else D | qk_norm not in (False, 'unit')
A       | norm attn.k_norm | K * D if qk_norm == 'whole' else D | qk_norm not in (False, 'unit')
A       | attn.c_proj.weight | C, H * D |
M       | attn.c_attn.weight | (q_lora_rank or q) + kv_lora_rank + qk_rope_head_dim, C |
M       | attn.c_attn.bias | (q_lora_rank or q) + kv_lora_rank + qk_rope_head_dim | qkv_bias
M       | norm attn.q_norm | q_lora_rank | q_lora_rank
M       | attn.c_q.weight | q, q_lora_rank | q_lora_rank
M       | norm attn.kv_norm | kv_lora_rank |
M       | attn.c_kv.weight | H * (qk_nope_head_dim + v_head_dim), kv_lora_rank |
M       | attn.c_proj.weight | C, H * v_head_dim |
A M     | attn.c_proj.bias | C | proj_bias
D       | attn.c_attn.weight | 2 * keys + 2 * values + 2 * n, C |
K       | attn.c_attn.weight | 2 * keys + values + value + n + key, C |
B       | attn.c_attn.weight | 2 * keys + 2 * values + n, C |
D K B   | attn.conv | 2 * keys + values, linear_conv_kernel_dim |
D B     | attn.dt_bias | n |
K       | attn.dt_bias | keys |
D K B   | attn.A_log | n |
D K     | attn.o_norm | value |
B       | attn.o_norm | values |
B       | attn.skip | n |
B       | attn.conv_bias | 2 * keys + values | linear_conv_bias
K       | attn.c_gate.weight | values, value |
K       | attn.c_decay.weight | keys, key |
D K B   | attn.c_proj.weight | C, values |
C       | attn.c_attn.weight | 3 * C, C |
C       | attn.conv | C, linear_conv_kernel_dim |
C       | attn.c_proj.weight | C, C |
dense   | mlp.c_fc.weight | up * d_ff, C |
dense   | mlp.c_fc.bias | up * d_ff | mlp_bias
dense   | mlp.c_proj.weight | C, d_ff |
dense   | mlp.c_proj.bias | C | mlp_bias
dense   | mlp.act.alpha_p mlp.act.alpha_n | 1 | mlp == 'xielu'
experts | mlp.router.weight | E, C |
experts | mlp.router.bias | E | mlp_bias
experts | mlp.experts.c_fc.weight | E, up * d_expert, C |
experts | mlp.experts.c_fc.bias | E, up * d_expert | mlp_bias
experts | mlp.experts.c_proj.weight | E, C, d_expert |
experts | mlp.experts.c_proj.bias | E, C | mlp_bias
experts | mlp.experts.act.alpha_p mlp.experts.act.alpha_n | 1 | mlp == 'xielu'
experts | mlp.shared.c_fc.weight | up * n_shared_expert * d_expert, C | n_shared_expert
experts | mlp.shared.c_fc.bias | up * n_shared_expert * d_expert | n_shared_expert and mlp_bias
experts | mlp.shared.c_proj.weight | C, n_shared_expert * d_expert | n_shared_expert
experts | mlp.shared.c_proj.bias | C | n_shared_expert and mlp_bias
experts | mlp.shared.act.alpha_p mlp.shared.act.alpha_n | 1 | n_shared_expert and mlp == 'xielu'
experts | mlp.shared_gate.weight | 1, C | shared_gate
experts | norm mlp.ln_router mlp.ln_in mlp.ln_out mlp.ln_shared_in mlp.ln_shared_out | C | expert_norms
experts | mlp.expert_scale | E | expert_norms
"""


def shapes(config):
    """{(name, *shape)} of all parameters, by the table SHAPES."""
    found = set()
    H, n, key, value = config.n_head, *(getattr(config, f'linear_{part}') or 0 for part in (
        'n_value_head', 'key_head_dim', 'value_head_dim'))
    names = dict(
        vars(config), C=config.n_embd, H=H, E=config.n_expert, n=n, key=key, value=value, values=n * value,
        keys=(config.linear_n_key_head or 0) * key, up=1 + ('glu' in config.mlp),
        q=H * ((config.qk_nope_head_dim or 0) + (config.qk_rope_head_dim or 0)))

    def add(places, prefix, **more):
        for row in SHAPES.splitlines()[2:]:
            place, parameters, shape, condition = map(str.strip, row.split('|'))
            if {*place.split()} & places and eval(condition or 'True', names, more):
                first, *others = parameters.split()
                ends = ('.weight', '.bias')[not config.norm_weight:1 + config.norm_bias]
                found.update((prefix + name + end, *eval(f'{shape},', names, more))
                             for name, end in (itertools.product(others, ends) if first == 'norm'
                                               else itertools.product([first, *others], [''])))
    add({'model'}, '')
    blocks = [(f'h.{layer}.', layer) for layer in range(config.n_layer)]
    for prefix, layer in blocks + [('mtp.block.', config.n_layer - 1)] * config.mtp:
        mixer, window, kind, _ = letters(config, layer)
        fields = vars(config) | (config.local or {} if window != 'L' else {})
        D, kind = fields['head_dim'], {'E': 'experts', 'D': 'dense', 'N': 'none'}[kind]
        add({'block', mixer, kind}, prefix, D=D, K=fields['n_kv_head'], k_eq_v=fields['k_eq_v'],
            mlp_kind=kind, gate={False: 0, True: H * (D or 0), 'head': H}[config.attn_gate],
            norms={'sandwich': 4, 'parallel': 1}.get(config.norm_placement, 2) // (1 + (kind == 'none')) or 1)
    return found


def initial_values(config):
    """Rows of (parts of names, group, mean, standard deviation; None: sqrt(1 / (3 columns))). The first row
    with a part of a parameter's name applies to it."""
    ends_in_norm = config.norm_placement in ('output', 'sandwich')
    return (
        ('wte wpe', 'embedding', 0, 0.02),
        ('lm_head.weight', 'head', 0, 0), ('shared_gate.weight', 'gate', 0, None),
        ('x0_lambdas', 'scalar', 0, 0), ('resid_lambdas', 'scalar', 1, 0),
        ('alpha_p', 'vector', math.log(math.expm1(0.8)), 0),
        ('alpha_n', 'vector', math.log(math.expm1(0.3)), 0),
        ('A_log', 'vector', math.log(16) - 1, 1), ('dt_bias', 'vector', math.log(0.01), 1.33),
        ('bias sink', 'vector', 0, 0), ('conv', 'vector', 0, None),
        ('norm ln_ skip expert_scale', 'vector', 1, 0), ('c_proj', 'matrix', 0, None if ends_in_norm else 0),
        ('c_ router', 'matrix', 0, None))


OPTIMIZERS = 'adamw', 'muon'  # in optimizer_step


def optimizer_step(model, name, kind, scales):
    """A copy of a parameter, and a function of the rate that updates it by torch's AdamW, or if it is a
    matrix by Muon on each projection and expert. The rate is scaled by group, a decay of 0.5 is not."""
    module, group = model.get_submodule(name.rpartition('.')[0]), model.tags[name].group
    copy, scale = model.get_parameter(name).detach().clone(), scales[group]
    decay = 0.5 * (group not in ('vector', 'scalar'))
    adamw = torch.optim.AdamW([copy], 0.0, (0.5, 0.99), weight_decay=decay / scale)

    def adamw_step(rate):
        adamw.param_groups[0]['lr'] = rate * scale
        adamw.step()
    if kind == 'adamw' or group != 'matrix':
        return copy, adamw_step

    def parts(x):
        rows = getattr(module, 'widths', x.shape[-2])
        return [part for matrix in x.view(-1, *x.shape[-2:]) for part in matrix.split(rows)]
    moves = [torch.zeros_like(part) for part in parts(copy)]
    muon = torch.optim.Muon(moves, 1.0, 0.0, 0.7, adjust_lr_fn='match_rms_adamw')

    def step(rate):
        for move, grad in zip(moves, parts(copy.grad)):
            move.grad = grad
        muon.step()
        for part, move in zip(parts(copy), moves):
            part.mul_(1 - decay * rate).add_(move, alpha=rate * scale)
            move.zero_()
    return copy, step


LONGROPE = dict(original_max_position_embeddings=64, short_factor=[1] * 4, long_factor=[1, 2, 3, 4])
EXAMPLES = (  # rotary scalings by 8 of the frequencies 1, 1/2, 1/4, 1/8 (base 16): name, length, options, and
    # by the papers' formulas the new frequencies and the factor on cos and sin
    ('linear', 15, {}, [0.125, 0.0625, 0.03125, 0.015625], 1),
    ('ntk', 15, {}, [1, 0.25, 0.0625, 0.015625], 1),
    ('dynamic', 15, dict(original_max_position_embeddings=8), [1, 0.25, 0.0625, 0.015625], 1),
    ('dynamic', 7, dict(original_max_position_embeddings=8), [1, 0.5, 0.25, 0.125], 1),
    ('yarn', 15, dict(original_max_position_embeddings=500, mscale=0.7, mscale_all_dim=0.4),
     [1, 0.5, 41 / 192, 17 / 192], (0.07 * math.log(8) + 1) / (0.04 * math.log(8) + 1)),
    ('yarn', 15, dict(original_max_position_embeddings=500, attention_factor=1.5),
     [1, 0.5, 41 / 192, 17 / 192], 1.5),
    ('llama3', 15, dict(original_max_position_embeddings=16 * math.pi, low_freq_factor=1, high_freq_factor=4),
     [1, 0.5, 5 / 48, 0.015625], 1),
    ('proportional', 15, dict(partial_rotary_factor=0.6), [0.125, 0.0625, 0, 0], 1),
    ('longrope', 65, LONGROPE, [1, 0.25, 1 / 12, 0.03125], 1.5 ** 0.5),
    ('longrope', 64, LONGROPE, [1, 0.5, 0.25, 0.125], 1.5 ** 0.5))

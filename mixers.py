"""
Further layers, which model.py imports if a config needs them. See model.py for the letters in shapes, and
ForwardContext for a mixer's contract.
"""
import functools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import (
    ACTIVATIONS,
    MIXERS,
    Attention,
    BaseAttention,
    FusedLinear,
    Linear,
    Mixer,
    Norm,
    branch_init,
    last_tokens,
    make_block,
    mixer_classes,
    parameter,
    rotate,
    yarn_mscale,
)

# attention --------------------------------------------------------------------------------------------------

class VariantAttention(Attention):
    """Attention with further options."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        is_unit = config.qk_norm == 'unit'
        has_norm = self.rope_kind if is_unit else config.qk_norm
        self.q_norm, self.k_norm = (
            Norm(self.head_widths[0] * (heads if config.qk_norm == 'whole' else 1), config, is_unit)
            if has_norm else nn.Identity() for heads in (config.n_head, config.n_kv_head))
        self.v_norm = Norm(self.head_widths[1], config, is_unit=True) if config.v_norm else nn.Identity()

    def projections(self, config):
        widths, _ = super().projections(config)
        gate = {False: (), 'head': (config.n_head,), True: widths[:1]}[config.attn_gate]
        if config.k_eq_v:
            return (*widths[:2], *gate), 'q k gate'
        return (*widths, *gate), 'q k v gate'

    def forward(self, x, context):
        q, k, *others = self.c_attn(x)
        v, *gate = [k, *others] if self.config.k_eq_v else others
        rope = context.ropes[self.rope_kind]
        q = self.rotated(q, self.q_norm, rope)
        k = self.rotated(k, self.k_norm, rope)
        v = self.v_norm(self.by_head(v))
        if context.cache is not None:
            k, v = context.cache.append(self, context, k, v)
        y = self.attend(q, k, v, context).transpose(1, 2)  # (B, T, H, D)
        if gate:
            y = y * gate[0].unflatten(-1, (self.n_head, -1)).sigmoid()
        return self.c_proj(y.flatten(2))

    def rotated(self, y, norm, rope):
        kind = self.config.qk_norm
        if kind == 'whole':
            y = norm(y)
        if kind is True:
            y = norm(y.unflatten(-1, (-1, self.head_widths[0]))).flatten(2)
        y = rotate(self.by_head(y), rope)
        return norm(y) if kind in ('rotated', 'unit') else y

    def by_head(self, y):
        """(B, T, heads * D) -> (B, heads, T, D), clipped if clip_qkv"""
        if clip := self.config.clip_qkv:
            y = y.clamp(-clip, clip)
        return y.unflatten(-1, (-1, self.head_widths[0])).transpose(1, 2)


class LatentAttention(BaseAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). Projects the keys and values
    of all heads from one latent per token; the cache keeps this latent and one rotary key. With a cache,
    forward projects queries and outputs instead of keys and values, if this is cheaper (section 2.1.2)."""

    @classmethod
    def defaults(cls, config):
        return dict(n_kv_head=None, head_dim=None, qk_norm=False, qk_nope_head_dim=128, qk_rope_head_dim=64,
                    v_head_dim=128, latent_norm_eps=config.norm_eps)

    @classmethod
    def check(cls, config):
        if config.kv_lora_rank is None:
            yield 'mixer_pattern kv_lora_rank', 'do not fit: M layers need kv_lora_rank'
        if any(issubclass(mixer, Attention) for mixer in mixer_classes(config)):
            yield 'mixer_pattern', 'mixes A with M layers, which need other rotations and scales'
        if config.attn_gate or config.clip_qkv or config.k_eq_v or config.v_norm:
            yield 'attn_gate clip_qkv k_eq_v v_norm', 'do not fit: M layers do not support them'

    def __init__(self, config, layer):
        super().__init__(config, layer)
        H = config.n_head
        C = config.n_embd
        rank = config.kv_lora_rank
        q_rank = config.q_lora_rank
        nope = config.qk_nope_head_dim
        rope = config.qk_rope_head_dim
        value = config.v_head_dim
        self.widths = rank, nope, rope, value
        scaling = config.rope_scaling or {}
        sharper = yarn_mscale(scaling.get('factor', 1.0), scaling.get('mscale_all_dim', 0.0))
        self.scale = config.attn_scale or (nope + rope) ** -0.5 * sharper ** 2  # YaRN as in DeepSeek
        q_width = H * (nope + rope)
        self.c_attn = FusedLinear(C, (q_rank or q_width, rank, rope), 'q latent k_rope', config.qkv_bias)
        self.q_norm = Norm(q_rank, config, eps=config.latent_norm_eps) if q_rank else nn.Identity()
        self.c_q = Linear(q_rank, q_width) if q_rank else nn.Identity()
        self.kv_norm = Norm(rank, config, eps=config.latent_norm_eps)
        self.c_kv = Linear(rank, H * (nope + value))  # per head: k, then v
        self.c_proj = Linear(H * value, C, bias=config.proj_bias, init=branch_init(config))
        self.slots = [(1, rank + rope)]
        self.head_widths = nope + rope, value

    def forward(self, x, context):
        q, latent, k_rope = self.c_attn(x)
        table = context.ropes[self.rope_kind]
        rank, nope, rope, value = self.widths
        q = self.c_q(self.q_norm(q)).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
        q, q_rope = q.split((nope, rope), dim=-1)
        latent = torch.cat((self.kv_norm(latent)[:, None], rotate(k_rope[:, None], table)), dim=-1)
        if context.cache is not None:
            latent, = context.cache.append(self, context, latent)  # (B, 1, S, rank + rope)
        w_k, w_v = self.c_kv.weight.view(self.n_head, -1, rank).split((nope, value), dim=1)
        T = q.shape[2]
        S = latent.shape[2]
        up = rank * (nope + value)
        absorb = (context.cache is not None  # and absorbing needs fewer multiplications per head
                  and T * (up + S * (2 * rank + rope)) < S * (up + T * sum(self.head_widths)))
        if absorb:
            q = q @ w_k
            k = latent
            v = latent[..., :rank]
        else:
            kv = self.c_kv(latent[:, 0, :, :rank]).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            k, v = kv.split((nope, value), dim=-1)
            k = torch.cat((k, latent[..., rank:].expand(-1, self.n_head, -1, -1)), dim=-1)
        y = self.attend(torch.cat((q, rotate(q_rope, table)), dim=-1), k, v, context)
        return self.c_proj((y @ w_v.mT if absorb else y).transpose(1, 2).flatten(2))


# layers with a state ----------------------------------------------------------------------------------------

def after_last(mixer, x, context):
    """x (B, T, ...) -> (B, n + T, ...): the n tokens before x (zeros at the start), then x.
    mixer.states[0], of shape (n, ...), keeps the last n tokens."""
    n = mixer.states[0][0][0]
    cache = context.cache
    lengths = context.lengths
    if cache is None:
        return torch.cat((x.new_zeros(len(x), n, *x.shape[2:]), x), dim=1)
    before = cache.states[mixer.number][0]
    x = torch.cat((before, x), dim=1)
    before.copy_(last_tokens(x, n, None if lengths is None else n + lengths))
    return x


def short_convolution(mixer, x, context):
    """Causal depthwise convolution within a document: y_t = sum over j of conv[:, -1 - j] x_{t - j}, for x
    (B, T, channels) and mixer.conv (channels, kernel)."""
    x = after_last(mixer, x, context)
    weight = mixer.conv.type_as(x)
    kernel = mixer.conv.shape[1]
    y = 0.0
    for j in range(kernel):
        tap = x[:, kernel - 1 - j:x.shape[1] - j] * weight[:, -1 - j]
        y = y + (tap if context.document_starts is None else tap * (context.position_ids >= j)[..., None])
    return y


def gated_delta_rule(q, k, v, decay, beta, state, is_start, corrects=True, chunk=64):
    """Linear attention with a state S (keys x values) that decays and is corrected:

        S_t = exp(decay_t) S_{t-1} + beta_t k_t (v_t - k_t^T exp(decay_t) S_{t-1})^T,    y_t = S_t^T q_t

    This is equation 10 of arXiv:2412.06464, computed in chunks (section 3.3). Everything is float32.

    q, k (B, heads, T, keys); v (B, heads, T, values); beta (B, heads, T, 1); state (B, heads, keys, values)
    decay: (B, heads, T, 1), or (B, heads, T, keys) if per channel; at most 0
    is_start: (B, T) bool, True at the start of a document
    corrects: False leaves out the subtracted term
    chunk: a power of two
    Returns y (B, heads, T, values) and the state."""
    T = q.shape[2]
    while chunk // 2 >= T:
        chunk //= 2

    def chunks(x, dim):  # padding leaves the state unchanged
        return F.pad(x, (0, 0) * (x.ndim - dim - 1) + (0, -T % chunk)).unflatten(dim, (-1, chunk))

    q, k, v, decay, beta = (chunks(x, 2) for x in (q, k, v, decay, beta))  # (B, heads, chunks, chunk, ...)
    total = decay.cumsum(-2)  # log of the decay since the start of the chunk
    hidden = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    carried = total.exp()
    left = (total[..., -1:, :] - total).exp()  # decay to the end of the chunk
    if is_start is not None:
        document = chunks(is_start.long(), 1)[:, None].cumsum(-1)  # 0: begun before this chunk
        hidden = hidden | (document[..., :, None] != document[..., None, :])
        carried = carried * (document == 0)[..., None]
        left = left * (document == document[..., -1:])[..., None]
    between = None  # (B, heads, chunks, chunk, chunk): decay from token j to i
    if decay.shape[-1] == 1:
        between = (total - total.mT).masked_fill(hidden, -math.inf).exp()

    def scores(x):
        return decayed_scores(x, k, total).masked_fill(hidden, 0.0) if between is None else x @ k.mT * between

    written = v * beta
    if corrects:
        k_beta = k * beta
        right = torch.cat((written, k_beta * carried), dim=-1)
        # the solver reads only below the diagonal
        right = torch.linalg.solve_triangular(scores(k_beta), right, upper=False, unitriangular=True)
        written, read = right.split((v.shape[-1], k.shape[-1]), dim=-1)
    writing = (k * left).mT
    kept = carried[..., -1, :, None]
    before = state[:, :, None]  # the state before each chunk
    if q.shape[2] > 1:
        # A chunk turns the state S into `keep @ S + add` (if corrects) or `keep * S + add`. The loop
        # computes only S, because torch.compile unrolls it.
        added = writing @ written
        keeps = kept * torch.eye(k.shape[-1], device=k.device) - writing @ read if corrects else kept
        states = [state]
        for keep, add in zip(keeps.unbind(2)[:-1], added.unbind(2)):
            states.append(add + (keep @ states[-1] if corrects else keep * states[-1]))
        before = torch.stack(states, dim=2)
    new = written - read @ before if corrects else written
    y = (q * carried) @ before + scores(q) @ new
    state = kept[:, :, -1] * before[:, :, -1] + writing[:, :, -1] @ new[:, :, -1]
    return y.flatten(2, 3)[:, :, :T], state


def decayed_scores(q, k, total):
    """(..., chunk, chunk): the sum over channels of q_i k_j exp(total_i - total_j), for i >= j. q, k and
    total are (..., chunk, channels); chunk is a power of two. A separate factor exp(-total_j) would overflow.
    Therefore, for each pair of adjacent blocks, keys decay to the end of the earlier block, and queries
    decay from there."""
    score = (q * k).sum(-1)[..., None, None]
    half = 1  # block length
    while half < q.shape[-2]:
        (_, late), (early, _), (before, after) = (  # (..., pairs of blocks, half, channels)
            x.unflatten(-2, (-1, 2, half)).unbind(-3) for x in (q, k, total))
        end = before[..., -1:, :]
        across = (late * (after - end).exp()) @ (early * (end - before).exp()).mT
        first, second = score.unflatten(-3, (-1, 2)).unbind(-3)
        score = torch.cat((F.pad(first, (0, half)), torch.cat((across, second), dim=-1)), dim=-2)
        half *= 2
    return score[..., 0, :, :]


def recur(mixer, q, k, v, decay, beta, context):
    """Calls mixer.rule, such as gated_delta_rule, with the state mixer.states[-1], and keeps the new state.
    q, k, v (B, heads, T, width), decay (B, T, heads, 1 or keys), beta (B, T, heads) -> (B, T, heads,
    values)"""
    is_token = context.is_token()
    if is_token is not None:
        beta = beta * is_token[..., None]
        decay = decay * is_token[..., None, None]
    state = (q.new_zeros(len(q), *mixer.states[-1][0]) if context.cache is None
             else context.cache.states[mixer.number][-1])
    is_start = None if context.document_starts is None else context.position_ids == 0
    with torch.autocast(q.device.type, enabled=False):
        y, after = mixer.rule(q, k, v, decay.transpose(1, 2), beta.mT[..., None], state, is_start)
    if context.cache is not None:
        state.copy_(after)
    return y.transpose(1, 2)


class GatedDeltaNet(Mixer):
    """Linear attention by gated_delta_rule, as in Qwen3-Next."""

    documents = corrects = True

    @classmethod
    def defaults(cls, config):
        heads = config.linear_n_key_head or config.n_head
        width = config.n_embd // config.n_head
        return dict(linear_n_key_head=heads, linear_n_value_head=heads, linear_key_head_dim=width,
                    linear_value_head_dim=config.linear_key_head_dim or width, linear_conv_kernel_dim=4)

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.n_key = config.linear_n_key_head
        self.n_value = config.linear_n_value_head
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        keys = self.n_key * self.key_dim
        values = self.n_value * self.value_dim
        kernel = config.linear_conv_kernel_dim
        self.qkv = keys, keys, values
        others, n_decay, n_normed = self.other_widths(keys, values)
        names = 'q k v gate beta decay' if self.corrects else 'q k v gate step'
        self.c_attn = FusedLinear(config.n_embd, (*self.qkv, *others), names)
        self.conv = parameter(sum(self.qkv), kernel, init=conv_init, group='vector')
        self.conv_bias = None
        self.dt_bias = parameter(n_decay, init=dt_init, group='vector')
        self.A_log = parameter(self.n_value, init=decay_init, group='vector')
        self.o_norm = parameter(n_normed, init=nn.init.ones_, group='vector')
        self.c_proj = Linear(values, config.n_embd, init=branch_init(config))
        self.eps = config.norm_eps
        self.rule = functools.partial(gated_delta_rule, corrects=self.corrects)
        self.states = [((kernel - 1, sum(self.qkv)), None),
                       ((self.n_value, self.key_dim, self.value_dim), torch.float32)]

    def other_widths(self, keys, values):
        """(widths of c_attn's outputs after q, k and v; width of dt_bias; width of o_norm)"""
        return (values, self.n_value, self.n_value), self.n_value, self.value_dim

    def flops(self, length):
        # writes and reads of the state, and the convolution
        return 6 * ((2 + self.corrects) * self.n_value * self.key_dim * self.value_dim + self.conv.numel())

    def forward(self, x, context):
        *qkv, gate, beta, decay = self.c_attn(x)
        return self.mix(qkv, gate, beta, decay, context, F.silu)

    def mix(self, qkv, gate, beta, decay, context, act):
        """beta (B, T, n_value), decay (B, T, n_value or keys) -> (B, T, C). act: the gate's activation"""
        q, k, v = self.convolved(qkv, context)
        q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
        decay = F.softplus(decay.float() + self.dt_bias.float()).unflatten(-1, (self.n_value, -1))
        decay = -self.A_log.float().exp()[:, None] * decay
        y = recur(self, q * self.key_dim ** -0.5, k, v, decay, beta.float().sigmoid(), context)
        y = F.rms_norm(y, (self.value_dim,), self.o_norm.float(), self.eps)
        y = y * act(gate.unflatten(-1, (self.n_value, -1)).float())
        return self.c_proj(y.type_as(gate).flatten(2))

    def convolved(self, qkv, context):
        """-> q, k, v, each (B, n_value, T, width) float32"""
        x = torch.cat(qkv, dim=-1)
        x = short_convolution(self, x, context)
        x = F.silu(x if self.conv_bias is None else x + self.conv_bias.type_as(x))
        return [y.unflatten(-1, (n, -1)).transpose(1, 2).float().repeat_interleave(self.n_value // n, dim=1)
                for y, n in zip(x.split(self.qkv, dim=-1), (self.n_key, self.n_key, self.n_value))]


def conv_init(w):
    """Uniform, as torch initialises convolutions."""
    bound = w.shape[1] ** -0.5
    nn.init.uniform_(w, -bound, bound)


def decay_init(w):
    """Log of a uniform number below 16, as in Mamba-2."""
    nn.init.uniform_(w, 1e-3, 16).log_()


def dt_init(w):
    """softplus(w) is log-uniform from 0.001 to 0.1."""
    step = nn.init.uniform_(w, math.log(0.001), math.log(0.1)).exp_()
    w.copy_(step + torch.log(-torch.expm1(-step)))


# short convolution, Mamba-2, Kimi Delta Attention -----------------------------------------------------------

class ShortConvolution(Mixer):
    """`after * conv(before * x)`; the input's projections are `before`, `after` and `x` (LFM2,
    arXiv:2511.23404)."""

    documents = True

    @classmethod
    def defaults(cls, config):
        return dict(linear_conv_kernel_dim=4)

    def __init__(self, config, layer):
        super().__init__(config, layer)
        C = config.n_embd
        kernel = config.linear_conv_kernel_dim
        self.c_attn = FusedLinear(C, (C, C, C), 'before after x')
        self.conv = parameter(C, kernel, init=conv_init, group='vector')
        self.c_proj = Linear(C, C, init=branch_init(config))
        self.states = [((kernel - 1, C), None)]

    def flops(self, length):
        return 6 * self.conv.numel()

    def forward(self, x, context):
        before, after, x = self.c_attn(x)
        return self.c_proj(after * short_convolution(self, before * x, context))


class Mamba2(GatedDeltaNet):
    """Mamba-2 as linear attention (arXiv:2405.21060, sections 5 and 6): its C, B and x are the query,
    key and value. The step size scales both the written value and the decay."""

    corrects = False

    @classmethod
    def defaults(cls, config):
        return dict(linear_n_key_head=1, linear_n_value_head=max(1, config.n_embd // 32),
                    linear_key_head_dim=64, linear_value_head_dim=64, linear_conv_kernel_dim=4,
                    linear_conv_bias=True)

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.skip = parameter(self.n_value, init=nn.init.ones_, group='vector')
        if config.linear_conv_bias:
            self.conv_bias = parameter(sum(self.qkv), init=nn.init.zeros_, group='vector')

    def other_widths(self, keys, values):
        return (values, self.n_value), self.n_value, values

    def forward(self, x, context):
        *qkv, gate, step = self.c_attn(x)
        q, k, v = self.convolved(qkv, context)
        step = F.softplus(step.float() + self.dt_bias.float())
        decay = -self.A_log.float().exp() * step
        y = recur(self, q, k, v, decay[..., None], step, context)
        y = (y + self.skip.float()[:, None] * v.transpose(1, 2)).flatten(2) * F.silu(gate.float())
        y = y.unflatten(-1, (self.n_key, -1))
        y = F.rms_norm(y, y.shape[-1:], eps=self.eps).flatten(2) * self.o_norm.float()
        return self.c_proj(y.type_as(gate))


class KimiDeltaAttention(GatedDeltaNet):
    """Gated DeltaNet with a decay per key channel. Decay and gate are low-rank projections
    (arXiv:2510.26692)."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.c_gate = Linear(self.value_dim, self.qkv[2])
        self.c_decay = Linear(self.key_dim, self.qkv[1])

    def other_widths(self, keys, values):
        return (self.value_dim, self.n_value, self.key_dim), keys, self.value_dim

    def forward(self, x, context):
        *qkv, gate, beta, decay = self.c_attn(x)
        return self.mix(qkv, self.c_gate(gate), beta, self.c_decay(decay), context, torch.sigmoid)


# multi-token prediction -------------------------------------------------------------------------------------

class MultiTokenPrediction(nn.Module):
    """A layer that predicts the token after the next one, from the last block's output and the next token's
    embedding (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""

    def __init__(self, config):
        super().__init__()
        self.ln_x = Norm(config.n_embd, config)
        self.ln_next = Norm(config.n_embd, config)
        self.c_in = Linear(2 * config.n_embd, config.n_embd)
        self.block = make_block(config, config.n_layer - 1)

    def forward(self, x, x0, context):
        """x, x0 (B, T, C) -> (B, T, C). x0: the first block's input"""
        both = torch.cat((self.ln_x(x), self.ln_next(x0.roll(-1, 1))), dim=-1)
        return self.block(self.c_in(both), context)

    def loss(self, model, x, x0, targets, context):
        """The predictions' summed cross entropy, divided by the number of targets: 0-d (arXiv:2412.19437,
        equation 24)."""
        later = F.pad(targets[:, 1:], (0, 1), value=-1)
        context.learned = later >= 0
        mean, _ = model.loss(self(x, x0, context), later)
        return mean * (later >= 0).sum() / (targets >= 0).sum().clamp(min=1)


# activations ------------------------------------------------------------------------------------------------

class SwigluOAI(nn.Module):
    """The activation of gpt-oss, arXiv:2508.10925."""

    def __init__(self, config):
        super().__init__()
        self.limit = config.mlp_limit

    def forward(self, gate, up):
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-self.limit, self.limit) + 1)


class XIELU(nn.Module):
    """A parabola above zero, an exponential below, each with a learned factor: arXiv:2411.13010 (Apertus)."""

    def __init__(self, config):
        super().__init__()
        self.alpha_p, self.alpha_n = (  # their softplus starts at 0.8 and 0.3
            parameter(1, init=functools.partial(nn.init.constant_, val=math.log(math.expm1(above))),
                      group='vector') for above in (0.8, 0.3))

    def forward(self, x):
        above = F.softplus(self.alpha_p)
        below = 0.5 + F.softplus(self.alpha_n)
        curve = torch.where(x > 0, above * x * x, below * (torch.expm1(x.clamp(max=-1e-6)) - x))
        return (curve + 0.5 * x).type_as(x)


ACTIVATIONS |= {'swiglu_oai': (SwigluOAI, True), 'xielu': (XIELU, False)}
# `| MIXERS`: letters of your own files take precedence
MIXERS |= {'M': LatentAttention, 'D': GatedDeltaNet, 'C': ShortConvolution, 'B': Mamba2,
           'K': KimiDeltaAttention} | MIXERS

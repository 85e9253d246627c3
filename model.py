"""
A modern decoder-only language model, in four parts.

    I    the decoder, a whole Qwen3: settings, layers, norm, rotation, attention, MLP, block, GPT
    II   cache, masks, attention kernels
    III  experts and variants
    IV   validation and accounting

    config = GPTConfig(n_layer=12, n_head=12, n_kv_head=4, n_embd=768)
    model = GPT(config)
    logits = model(idx)                          # (B, T) -> (B, T, vocab_size) float32
    loss, aux = model(idx, targets)              # mean cross entropy
    cache = model.make_cache(B, max_len)
    logits = model(idx, cache=cache, keep=1)     # logits of only the last token

Shapes in comments: B batch rows, T new tokens, S tokens to attend to, C = n_embd, H query heads,
K key/value heads, D = head_dim.
"""
import contextlib
import copy
import dataclasses
import functools
import inspect
import math
import typing
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

# I. the decoder =============================================================================================

@dataclasses.dataclass
class GPTConfig:
    """Everything that defines a model. A string in a field like window_pattern has one letter per
    layer, and repeats if it is shorter. If a field's annotation names a table, the table's keys are the
    choices. configurator.py explains the rules in brackets. Raises a ValueError that lists all problems."""
    # Qwen3's fields
    block_size: int = 1024           # maximum sequence length [changeable]
    vocab_size: int = 50304          # GPT-2's 50257, rounded up
    n_layer: int = 12                # blocks
    n_head: int = 12                 # query heads
    n_kv_head: int | None = None     # key/value heads (arXiv:2305.13245); None: n_head; 1: multi-query
    n_embd: int = 768                # width of the residual stream
    head_dim: int | None = None      # None: n_embd / n_head [if not kv_lora_rank]
    d_ff: int | None = None          # MLP width; None: 4 n_embd, or 8/3 n_embd rounded up if gated
    mlp: 'ACTIVATIONS' = 'swiglu'    # swiglu, geglu, gelu, relu2, ...: see ACTIVATIONS
    norm_eps: float = 1e-6           # added to the mean square
    rope_base: float = 10000.0       # pair i rotates by position * base^(-2i / dimensions) [if pos == 'rope']
    qk_norm: bool | Literal['whole', 'rotated', 'unit'] | None = None  # norm on queries and keys: True (per
                                     # head, Qwen3); whole (all heads at once, OLMo 2); rotated (after the
                                     # rotation, Hunyuan); unit (as rotated, but without weights,
                                     # Llama 4); None: True, or False in MLA [if mixer_pattern.strip('BCDK')]
    tie_word_embeddings: bool = True  # the head uses the embedding's weights (arXiv:1608.05859)
    dropout: float = 0.0             # on embedding, attention weights, residual branches
                                     # [< 1] [changeable] [random] [training]
    # positions
    pos: Literal['rope', 'alibi', 'learned', 'sinusoidal', 'none'] = 'rope'  # encoding:
                                     # rope (arXiv:2104.09864), alibi (arXiv:2108.12409),
                                     # learned (GPT-2), sinusoidal (arXiv:1706.03762)
    pos_pattern: Literal['P', 'N'] = 'P'  # P: with positions, N: without (SmolLM3: 'PPPN')
                                     # [if pos in ('rope', 'alibi')]
    rope_scaling: dict | None = None  # such as {'rope_type': 'yarn', 'factor': 4.0}
                                     # [changeable] [if pos == 'rope']
    partial_rotary_factor: float = 1.0  # share of a head that rotates (GPT-J) [if pos == 'rope']
    alibi_scale: float = 1.0         # factor on ALiBi's slopes (Falcon) [if pos == 'alibi']
    document_token: int | None = None  # starts a document; tokens see only their document [changeable]
                                     # [if (document_token or 0) < vocab_size]
    # mixers: layers that mix tokens
    mixer_pattern: 'MIXERS | None' = None  # A: attention, M: latent attention, D: Gated DeltaNet
                                     # (Qwen3-Next: 'DDDA'), C: short convolution, B: Mamba-2, K: Kimi Delta
                                     # Attention; None: A, or M with kv_lora_rank
    # windows of attention [if mixer_pattern.strip('BCDK')]
    window: int | None = None        # tokens in a sliding window, including the current token
                                     # [if window_pattern]
    window_pattern: Literal['S', 'L', 'C'] | None = None  # S: sliding window, L: all tokens (Gemma 2: 'SL'),
                                     # C: only the current chunk of `window` tokens (Llama 4)
    local: dict | None = None        # changes S and C layers: {'rope_base': 1e4, ...} [if window_pattern]
    # variants of attention [if mixer_pattern.strip('BCDK')]
    attn_scale: float | None = None  # scale of the scores; None: 1 / sqrt(width of a head)
    attn_softcap: float = 0.0        # c * tanh(scores / c) (Gemma 2); 0: off
    attn_sink: bool = False          # a learned logit per head in the softmax's denominator (gpt-oss)
    attn_gate: bool | Literal['head'] = False  # a sigmoid gate on the output (arXiv:2505.06708); True: per
                                     # element; head: per head
    clip_qkv: float = 0.0            # bound of queries, keys and values (OLMo 1.7); 0: off
    k_eq_v: bool = False             # values are the keys before norm and rotation (Gemma 4)
    v_norm: bool = False             # normalises values, without learned weights (Gemma 4)
    query_scale: dict | None = None  # queries grow with their position (Llama 4): see scale_queries
    # multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434)
    kv_lora_rank: int | None = None  # width of the latent; None: no MLA
    # further fields of MLA [if kv_lora_rank]
    q_lora_rank: int | None = None   # width of the compressed query; None: not compressed
    qk_nope_head_dim: int | None = None  # width of a head's unrotated part; None: 128
    qk_rope_head_dim: int | None = None  # width of a head's rotated part; None: 64
    v_head_dim: int | None = None    # width of a head's value; None: 128
    latent_norm_eps: float | None = None  # norm_eps of the latents; None: norm_eps
    # layers with a state, see mixers.py [if mixer_pattern.strip('AM')]
    linear_n_key_head: int | None = None  # query and key heads; None: n_head (Mamba-2: 1)
    linear_n_value_head: int | None = None  # multiple of linear_n_key_head; None: equal
                                     # (Mamba-2: n_embd / 32)
    linear_key_head_dim: int | None = None  # None: n_embd // n_head (Mamba-2: 64)
    linear_value_head_dim: int | None = None  # None: linear_key_head_dim (Mamba-2: 64)
    linear_conv_bias: bool | None = None  # bias of Mamba-2's short convolution; None: True
    linear_conv_kernel_dim: int | None = None  # tokens that the short convolution sees; None: 4
    # norms, residual stream
    norm: 'NORMS' = 'rmsnorm'        # rmsnorm, layernorm
    norm_bias: bool | None = None    # None: `bias` if layernorm, otherwise False
    norm_weight: bool = True         # False: norms without weights (OLMo)
    norm_placement: 'NORM_PLACEMENTS' = 'pre'  # pre, post, output, sandwich, parallel, parallel_2
    embed_norm: bool = False         # norm after the embedding (BLOOM)
    embed_scale: float | None = None  # factor on embeddings; None: 1, or sqrt(n_embd) if sinusoidal
    residual_scale: float = 1.0      # factor on the outputs of attention and MLP (Granite)
    residual_lambdas: bool = False   # each layer's input is a * x + b * embedding, with learned a and b
    layer_scalar: bool = False       # a constant factor on each block's output (Gemma 4)
    # MLP, biases
    mlp_limit: float = 7.0           # bound of gate and up [if mlp == 'swiglu_oai']
    bias: bool = False               # biases of linear layers and layernorm
    qkv_bias: bool | None = None     # bias of queries, keys, values (Qwen2); None: `bias`
    proj_bias: bool | None = None    # bias of attention's output; None: `bias`
    mlp_bias: bool | None = None     # bias of MLP, experts and router; None: `bias`
    # mixture of experts (arXiv:1701.06538)
    n_expert: int | None = None      # experts; None or 0: a dense model
    expert_pattern: 'MLPS' = 'E'     # E: experts, D: dense, N: no MLP (Nemotron-H)
    # further fields of experts [if n_expert]
    n_expert_active: int | None = None  # experts per token; None: 2
    n_shared_expert: int | None = None  # experts that all tokens use (arXiv:2401.06066)
    shared_gate: bool = False        # a sigmoid gate on shared experts [if n_shared_expert]
    d_expert: int | None = None      # width of an expert; None: d_ff
    n_dense_layer: int = 0           # layers at the start that have no experts (DeepSeek)
    expert_input_scale: bool = False  # routing weights multiply the experts' input (Llama 4)
    expert_norms: bool = False       # norms before router and experts, and after experts (Gemma 4)
    router: 'ROUTERS' = 'softmax'    # softmax (Mixtral), sigmoid (DeepSeek-V3)
    norm_topk_prob: bool = True      # active experts' weights sum to 1; use False if n_expert_active is 1
    routed_scaling_factor: float = 1.0  # factor on the routing weights
    n_group: int | None = None       # groups of experts (DeepSeek-V2)
    topk_group: int | None = None    # groups that a token may use [if n_group]
    balance_bias: bool = False       # a bias in choosing experts balances their load (arXiv:2408.15664)
    balance_per_sequence: bool = False  # balance loss per row of the batch [changeable]
                                     # [training]
    # head, training
    head_bias: bool = False          # bias of an untied head (GPT-J, Phi) [if not tie_word_embeddings]
    logit_scale: float = 1.0         # factor on the logits (Cohere, Granite)
    logit_softcap: float = 0.0       # c * tanh(logits / c) (Gemma 2); 0: off
    mtp: bool = False                # a further layer predicts the token after the next [training]

    def __post_init__(self):
        complete(self)

    def at(self, layer):
        """The config of a layer."""
        if not self.local or self.window_of(layer) is None:
            return self
        return dataclasses.replace(self, **self.local, local=None)

    def mixer_of(self, layer):
        return letter(self.mixer_pattern, layer)

    def window_of(self, layer):
        has_window = self.window_pattern and letter(self.window_pattern, layer) != 'L'
        return self.window if has_window and MIXERS[self.mixer_of(layer)].can_slide else None

    def mlp_of(self, layer):
        kind = letter(self.expert_pattern, layer)
        is_dense = self.n_expert is None or layer < self.n_dense_layer
        return 'D' if is_dense and issubclass(MLPS[kind] or MLP, MoE) else kind

    @property
    def rope_dim(self):
        return self.qk_rope_head_dim or int(self.head_dim * self.partial_rotary_factor)

    @property
    def rope_kind(self):
        """(base, dimensions that rotate, items of the scaling)"""
        items = tuple((name, tuple(value) if isinstance(value, list) else value)
                      for name, value in (self.rope_scaling or {}).items())
        return self.rope_base, self.rope_dim, items


def letter(pattern, layer):
    """A layer's letter in a pattern."""
    return pattern[layer % len(pattern)]


# parameters and linear layers -------------------------------------------------------------------------------

class Tag(typing.NamedTuple):
    """A parameter's initialization and optimizer group."""
    init: typing.Callable          # fills the parameter in place, as torch.nn.init does
    group: str                     # one of GROUPS
    rows: tuple | None = None      # row counts of fused projections; None: not fused


GROUPS = {  # group of parameters (a key in --lr_scales) -> whether it has weight decay
    'matrix': True,  # parameters that Muon may orthogonalise
    'embedding': True, 'head': True, 'gate': True, 'adapter': True,
    'vector': False, 'scalar': False,
}


def tag(w, init, group, rows=None):
    """Gives w a Tag."""
    w.tag = Tag(init, group, rows)
    return w


def parameter(*shape, init, group, rows=None):
    """A new parameter, which is NaN until init fills it."""
    return tag(nn.Parameter(torch.full(shape, math.nan)), init, group, rows)


def hidden_init(w):
    """Normal with std sqrt(1 / (3 columns))."""
    nn.init.normal_(w, std=(3 * w.shape[-1]) ** -0.5)


def branch_init(config, place='attn_out'):
    """The init of a branch's last projection: hidden_init if a norm follows at this place; otherwise
    zeros, so that the branch initially adds nothing."""
    return hidden_init if place in NORM_PLACEMENTS[config.norm_placement] else nn.init.zeros_


class Linear(nn.Linear):
    """nn.Linear with tags: x (..., n_in) -> (..., n_out)."""

    def __init__(self, n_in, n_out, bias=False, init=hidden_init, group='matrix', rows=None):
        super().__init__(n_in, n_out, bias=bias)
        tag(self.weight, init, group, rows)
        if bias:
            tag(self.bias, nn.init.zeros_, 'vector')

    def forward(self, x):
        return project(x, self.weight, self.bias)


class FusedLinear(Linear):
    """Several projections in one matrix: x (..., n_in) -> one tensor (..., width) per width in
    widths. bench.py prints the names, such as 'q k v'."""

    def __init__(self, n_in, widths, names, bias=False):
        super().__init__(n_in, sum(widths), bias, rows=widths)
        self.widths = widths
        self.names = names

    def forward(self, x):
        return super().forward(x).split(self.widths, dim=-1)


class Embedding(nn.Embedding):
    """nn.Embedding with a tag."""

    def __init__(self, rows, width, init):
        super().__init__(rows, width)
        tag(self.weight, init, 'embedding')

    def as_head(self, x):
        """x (..., width) -> logits (..., rows)"""
        return project(x, self.weight)

    def reset_parameters(self):
        if not self.weight.is_meta:  # on meta, normal_ imports the compiler, which costs seconds
            super().reset_parameters()


# norm and rotation ------------------------------------------------------------------------------------------

def rms_norm(x, weight, bias, eps):
    """arXiv:1910.07467."""
    y = F.rms_norm(x, x.shape[-1:], weight, eps)
    return y if bias is None else y + bias


class Norm(nn.Module):
    """Normalises the last dimension in float32."""

    def __init__(self, width, config, is_unit=False, eps=None):
        super().__init__()
        has_weight = config.norm_weight and not is_unit
        has_bias = config.norm_bias and not is_unit
        self.weight = parameter(width, init=nn.init.ones_, group='vector') if has_weight else None
        self.bias = parameter(width, init=nn.init.zeros_, group='vector') if has_bias else None
        self.function = NORMS[config.norm]
        self.eps = eps or config.norm_eps

    def forward(self, x):
        weight, bias = (None if w is None else w.float() for w in (self.weight, self.bias))
        return self.function(x.float(), weight, bias, self.eps).type_as(x)


def rope_table(kind, position_ids, length):
    """(cos, sin) at position_ids (1 or B, T), each (1 or B, 1, T, width / 2) float32. Position p rotates pair
    i by p * base^(-2i / width) (arXiv:2104.09864, equation 15)."""
    base, width, scaling = kind
    pair = torch.arange(0, width, 2, device=position_ids.device)
    freq = 1.0 / base ** (pair / width)
    factor = 1.0
    if scaling:
        options = dict(scaling)
        freq, factor = ROPE_SCALINGS[options.pop('rope_type')](freq, base, length, **options)
    angle = position_ids[:, None, :, None] * freq
    # one tensor, so that a compiled step computes the angles only once
    return torch.cat((angle.cos() * factor, angle.sin() * factor), dim=1).split(1, dim=1)


def rotate(x, rope):
    """Rotates the first dimensions of x (B, heads, T, D) by rope = (cos, sin), unless rope is None.
    Pair i is (x[i], x[i + pairs]), as in Hugging Face's Llama."""
    if rope is None:
        return x
    cos, sin = rope
    pairs = cos.shape[-1]
    a, b, unrotated = x.split((pairs, pairs, x.shape[-1] - 2 * pairs), dim=-1)
    a = a.float()
    b = b.float()
    return torch.cat(((a * cos - b * sin).type_as(x), (b * cos + a * sin).type_as(x), unrotated), dim=-1)


# attention --------------------------------------------------------------------------------------------------

class Mixer(nn.Module):
    """A layer that mixes the tokens of a row. The docstring of ForwardContext is its contract."""

    slots = None
    states = ()
    mask_kind = rope_kind = window = None
    documents = can_slide = False

    @classmethod
    def defaults(cls, config):
        """Name of a GPTConfig field -> the value that replaces None."""
        return {}

    @classmethod
    def check(cls, config):
        """Yields problems, as `impossible` does."""
        return ()

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer

    def flops(self, length):
        raise NotImplementedError(f"{type(self).__name__} has no flops: see ForwardContext")


class BaseAttention(Mixer):
    """A subclass sets `scale` and `head_widths`, the widths of a head's key and value."""

    documents = can_slide = True

    def __init__(self, config, layer):
        super().__init__(config, layer)
        has_pos = letter(config.pos_pattern, layer) == 'P'
        self.window = config.window_of(layer)
        self.in_chunks = self.window is not None and letter(config.window_pattern, layer) == 'C'
        self.has_alibi = config.pos == 'alibi' and has_pos
        self.rope_kind = config.rope_kind if config.pos == 'rope' and has_pos else None
        self.n_head = config.n_head
        self.config = config
        self.sink = parameter(self.n_head, init=nn.init.zeros_, group='vector') if config.attn_sink else None

    @property
    def mask_kind(self):
        return self.window, self.has_alibi, self.in_chunks

    def attend(self, q, k, v, context, bias=None):
        """q (B, H, T, D), k and v (B, K, S, D) -> (B, H, T, D). bias: added to the scores, see Mask.add"""
        if self.config.query_scale:
            q = scale_queries(self, q, context)
        mask = context.masks[self.mask_kind]
        if bias is not None:
            mask = mask.add(bias.type_as(q))
        return attend(self, q, k, v, context, mask)

    def n_keys(self, length):
        """Keys per query, including later keys, as in PaLM (arXiv:2204.02311, appendix B)."""
        return min(length, self.window or length)

    def flops(self, length):
        return 6 * self.n_head * sum(self.head_widths) * self.n_keys(length)


class Attention(BaseAttention):
    """Multi-head, grouped-query or multi-query attention."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        H = config.n_head
        K = config.n_kv_head
        D = config.head_dim
        self.c_attn = FusedLinear(config.n_embd, *self.projections(config), config.qkv_bias)
        self.c_proj = Linear(H * D, config.n_embd, config.proj_bias, init=branch_init(config))
        self.q_norm, self.k_norm = (Norm(D, config) if config.qk_norm else nn.Identity() for _ in range(2))
        self.scale = config.attn_scale or D ** -0.5
        self.head_widths = D, D
        self.slots = [(K, D), (K, D)]

    def projections(self, config):
        keys = config.n_kv_head * config.head_dim
        return (config.n_head * config.head_dim, keys, keys), 'q k v'

    def qkv(self, x, context):
        D = self.head_widths[0]
        q, k, v = self.c_attn(x)
        q = self.q_norm(q.unflatten(-1, (-1, D))).flatten(2)
        k = self.k_norm(k.unflatten(-1, (-1, D))).flatten(2)
        q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))     # (B, H or K, T, D)
        rope = context.ropes[self.rope_kind]
        return rotate(q, rope), rotate(k, rope), v

    def forward(self, x, context):
        q, k, v = self.qkv(x, context)
        if context.cache is not None:  # adds the cached tokens: k and v become (B, K, S, D)
            k, v = context.cache.append(self, context, k, v)
        y = self.attend(q, k, v, context)                                           # (B, H, T, D)
        return self.c_proj(y.transpose(1, 2).flatten(2))


MIXERS = {  # letter in mixer_pattern: class; mixers.py adds others
    'A': Attention,
}


# MLP and block ----------------------------------------------------------------------------------------------

class MLP(nn.Module):
    """x (..., C) -> (..., C): down(act(up(x))), or down(act(gate(x), up(x))) if gated."""

    causal = True  # whether the result for a token is independent of later tokens

    def __init__(self, config, layer, width=None):
        super().__init__()
        width = width or config.d_ff
        self.act, n = activation(config)
        self.c_fc = FusedLinear(config.n_embd, (width,) * n, 'gate up', config.mlp_bias)
        self.c_proj = Linear(width, config.n_embd, config.mlp_bias, init=branch_init(config, 'mlp_out'))

    def forward(self, x, context=None):
        return self.c_proj(self.act(*self.c_fc(x)))


class Block(nn.Module):
    """Two branches of the residual stream: a mixer, and an MLP or experts."""

    # whether a subclass with its own forward supports norm_placement, residual_scale, layer_scalar and layers
    # without an MLP
    supports_variants = False

    def __init__(self, config, layer):
        super().__init__()
        if type(self).forward is not Block.forward and not self.supports_variants:
            require_plain(self, config, layer)
        self.norms = NORM_PLACEMENTS[config.norm_placement]
        kind = MLPS[config.mlp_of(layer)]
        self.ln_1 = Norm(config.n_embd, config)
        self.attn = make_mixer(config, layer)
        for name in sorted({name for place, name in self.norms.items() if 'attn' in place or kind}):
            if name != 'ln_1':
                setattr(self, name, Norm(config.n_embd, config))
        self.mlp = kind and kind(config, layer)
        if isinstance(self.mlp, MoE) and config.expert_norms:
            setattr(self, self.norms['mlp_in'], nn.Identity())
        self.p = config.dropout
        self.scale = config.residual_scale
        self.register_buffer('scalar', torch.ones(1) if config.layer_scalar else None)

    def forward(self, x, context):
        """x (B, T, C) -> (B, T, C)"""
        y = self.attn(self.norm('attn_in', x), context)
        after = self.norm('attn_sum', x + self.branch(self.norm('attn_out', y)))
        if self.mlp is not None:
            y = self.norm('parallel_in', x) if 'parallel_in' in self.norms else self.norm('mlp_in', after)
            y = self.mlp(y, context)
            after = self.norm('mlp_sum', after + self.branch(self.norm('mlp_out', y)))
        return after if self.scalar is None else after * self.scalar

    def norm(self, place, x):
        return getattr(self, self.norms[place])(x) if place in self.norms else x

    def branch(self, y):
        y = F.dropout(y, self.p, self.training)
        return y if self.scale == 1 else y * self.scale


# the model --------------------------------------------------------------------------------------------------

class GPT(nn.Module):
    """The decoder."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        tied = config.tie_word_embeddings
        C = config.n_embd
        # if tied, a token's initial logit for itself, n_embd * std, must not exceed 4
        init = functools.partial(nn.init.normal_, std=min(0.02, 4 / C) if tied else 0.02)
        self.wte = Embedding(config.vocab_size, C, init)
        self.wpe = Embedding(config.block_size, C, init) if config.pos == 'learned' else None
        self.ln_embd = Norm(C, config) if config.embed_norm else nn.Identity()
        self.h = nn.ModuleList(make_block(config, layer) for layer in range(config.n_layer))
        self.mtp = None
        if config.mtp:
            from mixers import MultiTokenPrediction
            self.mtp = MultiTokenPrediction(config)
        if config.residual_lambdas:
            self.resid_lambdas = parameter(config.n_layer, init=nn.init.ones_, group='scalar')
            self.x0_lambdas = parameter(config.n_layer, init=nn.init.zeros_, group='scalar')
        self.ln_f = nn.Identity() if 'mlp_sum' in self.h[0].norms else Norm(C, config)
        self.lm_head = None if tied else Linear(
            C, config.vocab_size, config.head_bias, nn.init.zeros_, 'head')
        self.mixers = number_mixers(self)
        self.tags = collect_tags(self)
        init_weights(self)

    def forward(self, idx, targets=None, cache=None, keep=None, lengths=None, weights=None):
        """idx (B, T) int64 -> logits (B, T, vocab_size) float32, or with targets (B, T) -> (loss, aux).

        loss     mean cross entropy over the targets that are not negative
        aux      experts add 'balance' and 'z' (0-d, means over layers), and 'load' (layers, experts), which
                 counts how often each expert was chosen; in training, config.mtp adds 'mtp' (0-d)
        cache    idx continues the rows of this cache and is appended to it
        keep     returns the logits of only the last `keep` tokens of each row
        lengths  (B,), tokens per row of idx; padding follows them
        weights  a list to which layers append their attention weights (B, H, T, S)
        Raises ValueError if the tokens exceed block_size or the cache."""
        T = idx.shape[1]
        if self.config.block_size < T:
            raise ValueError(f"{T} tokens do not fit into block_size={self.config.block_size}")
        if self.compute_dtype() is torch.float16 and not torch.is_autocast_enabled(idx.device.type):
            with torch.autocast(idx.device.type, torch.float16):  # casts float32 activations for matmuls
                return self.forward(idx, targets, cache, keep, lengths, weights)
        context = make_context(self, idx, cache, lengths, weights)
        if targets is not None:
            context.routing, context.learned = [], targets >= 0
        x0 = self.embed(context)
        x = self.blocks(x0, context)                                                              # (B, T, C)
        if cache is not None:
            cache.advance(T, lengths)
        if targets is None:
            return self.head(last_tokens(x, keep, lengths))
        loss, aux = self.loss(x, targets)
        if self.mtp is not None and self.training:
            aux['mtp'] = self.mtp.loss(self, x, x0, targets, context)
        if context.routing:
            aux |= routing_losses(context.routing)
        return loss, aux

    def embed(self, context):
        """The input of the first block (B, T, C)"""
        config = self.config
        x = self.wte(context.idx)
        if config.embed_scale != 1:
            x = x * x.new_full((), config.embed_scale)  # rounds the factor to x's dtype, as Gemma does
        if self.wpe is not None:
            # positions of padding may exceed the table
            x = x + self.wpe(context.position_ids.clamp(max=config.block_size - 1))
        if config.pos == 'sinusoidal':
            x = x + sinusoid(context.position_ids, config.n_embd).type_as(x)
        x = self.ln_embd(x)
        if context.dtype is torch.bfloat16:
            x = x.bfloat16()
        elif x.dtype is torch.float16:  # the residual stream could overflow
            x = x.float()
        return F.dropout(x, config.dropout, self.training)

    def blocks(self, x0, context):
        """(B, T, C) -> (B, T, C)"""
        x = x0
        for i, block in enumerate(self.h):
            if self.config.residual_lambdas:
                x = self.resid_lambdas[i].type_as(x) * x + self.x0_lambdas[i].type_as(x) * x0
            x = block(x, context).type_as(x)
        return x

    def head(self, x):
        """Output of the last block (B, T, C) -> logits (B, T, vocab_size) float32"""
        x = self.ln_f(x)
        scale = self.config.logit_scale
        cap = self.config.logit_softcap
        logits = (self.lm_head or self.wte.as_head)(x)
        logits = logits.float() if scale == 1 else logits.float() * scale
        return cap * torch.tanh(logits / cap) if cap else logits

    def loss(self, x, targets):
        """Output of the last block -> mean cross entropy, 0-d, and aux. A sharded model compiles this method
        as one graph."""
        return cross_entropy(self.head(x), targets), {}

    def compute_dtype(self):
        w = self.wte.weight
        if torch.is_autocast_enabled(w.device.type):
            return torch.get_autocast_dtype(w.device.type)
        return getattr(self.wte, 'scale', w).dtype  # int8: the dtype of the scales

    def make_cache(self, batch_size, max_len, static=False, rolling=True):
        """static: for a compiled step. rolling: layers with a window keep only the tokens in it, which
        limits Cache.rewind."""
        return Cache(self, batch_size, max_len, static, rolling)


# II. cache, masks, kernels ==================================================================================

class ForwardContext:  # not a dataclass, which FSDP would copy for each block
    """What the layers of one forward pass share. This docstring is also the contract of a Mixer.

    For a new attention, derive from Attention and override attend(q, k, v, context): query head h uses key
    head h // (H / K), and super().attend accepts a bias on the scores. For any other mixer, derive from
    Mixer and write forward(x, context): (B, T, C) -> (B, T, C). No token may depend on later tokens. Give
    the class a letter in MIXERS. A mixer sets

    rope_kind   config.rope_kind or a tuple like it: pass context.ropes[self.rope_kind] to rotate(). None: no
                rotation
    mask_kind   the arguments (window, has_alibi, in_chunks) of make_mask, which creates
                context.masks[self.mask_kind]; None: no mask
    slots       what the cache keeps per token: a list of (heads, width), one per tensor. cache.append(self,
                context, k, v) stores new tensors, (B, heads, T, width), and returns tensors to
                attend to, (B, heads, S, width). []: the layer reads the tensors of another layer
    states      what the cache keeps per row: a list of (shape, dtype); dtype None is the compute
                dtype. cache.states[self.number] has the tensors (B, *shape), which are zero
                in a new row; write them with .copy_()
    window      how many tokens the slots hold; None: all
    can_slide   True if the layer can have a window, config.window_of(layer)
    documents   True if the layer keeps documents apart: see context.document_starts
    flops       flops(length): training FLOPs (3 x forward) per token, excluding products with weight matrices

    A layer may pass a tensor or a tuple of tensors to later layers: context.handed[self.layer] = value. If it
    passes keys and values, cache.append must have returned them, and the layers that attend to them need the
    same window and slots = []. If the value covers only the new tokens, later layers must cache it.

    Padding (see lengths) must not change a state. Make parameters with parameter(...) or
    tag(...), and name the last projection c_proj."""
    # idx              (B, T), ids of the new tokens
    # positions        (1 or B, T), positions in the rows
    # position_ids     (1 or B, T), positions in the documents
    # document_starts  (B, T), start of each token's document; None: 0
    # ropes            rope_kind -> (cos, sin), each (1 or B, 1, T, pairs), or None
    # masks            mask_kind -> Mask, or None
    # cache            a Cache or None
    # lengths          (B,), new tokens of each row, without padding; None: all T
    # eager            whether to use eager_attention; flex has priority
    # flex             whether to use flex_attention if a mask or a score needs it
    # dtype            dtype of matmuls
    # learned          (B, T) bool, whether a token has a target; None without targets
    # weights          None, or a list that collects attention weights
    # routing          None, or a list that collects (module, balance, z, load) of experts
    # handed           layer -> what it passes to later layers

    def __init__(self, **values):
        self.handed = {}
        for name, value in values.items():  # vars(self).update does not compile before torch 2.13
            setattr(self, name, value)

    def is_token(self):
        """(B, T) bool, False for padding; None if there is no padding."""
        if self.lengths is None:
            return None
        return torch.arange(self.positions.shape[1], device=self.lengths.device) < self.lengths[:, None]


def make_context(model, idx, cache=None, lengths=None, weights=None):
    """The ForwardContext of the new tokens idx (B, T)."""
    T = idx.shape[1]
    config = model.config
    positions = torch.arange(T, device=idx.device)[None] if cache is None else cache.positions(T, lengths)
    # unlike flex_attention, SDPA supports no softcap and no sinks. On a CPU with bfloat16 units,
    # eager_attention trains up to 3 times as fast as SDPA, but its memory grows with the square of T
    eager = bool(weights is not None or config.attn_softcap or config.attn_sink
                 or idx.is_cpu and torch.is_grad_enabled() and T <= 1024)
    flex = weights is None and cache is None and use_flex(model, idx)
    context = ForwardContext(idx=idx, positions=positions, position_ids=positions, document_starts=None,
                             ropes={}, masks={}, cache=cache, lengths=lengths, eager=eager, flex=flex,
                             dtype=model.compute_dtype(), weights=weights,
                             routing=None, learned=None)
    if config.document_token is not None:
        context.document_starts = track_starts(context, config.document_token)
        context.position_ids = positions - context.document_starts
    for kind in dict.fromkeys(mixer.rope_kind for mixer in model.mixers):
        context.ropes[kind] = kind and rope_table(kind, context.position_ids, config.block_size)
    for kind in dict.fromkeys(mixer.mask_kind for mixer in model.mixers):
        context.masks[kind] = kind and make_mask(model, context, *kind)
    return context


def track_starts(context, document_token):
    """(B, T): the position of the last document_token at or before each new token, or 0."""
    positions = context.positions
    cache = context.cache
    starts_here = context.idx == document_token
    if context.lengths is not None:
        starts_here = starts_here & context.is_token()
    start = torch.where(starts_here, positions, 0).cummax(dim=1).values
    if cache is not None:
        before = cache.starts.gather(1, (cache.length[:, None] - 1).clamp(min=0))  # (B, 1)
        start = torch.maximum(start, before)
        cache.starts.scatter_(1, positions.clamp(max=cache.max_len).expand_as(start), start)
    return start


def number_mixers(model):
    """Lists and numbers the mixers for the cache."""
    mixers = [part for part in model.h.modules() if isinstance(part, Mixer)]
    for number, mixer in enumerate(mixers):
        mixer.number = number
    return mixers


# cache ------------------------------------------------------------------------------------------------------

class Cache:
    """What layers keep of the tokens so far. For each of model.mixers, `slots` has its KV cache, a list of
    tensors (B, heads, number of slots + 1, width), and `states` has a list of tensors (B, ...). A
    token's slot is its position; in a rolling KV cache, it is the position modulo the number of slots:

        max_len 6, rows of 3 and 5 tokens      window 4, a row of 6 tokens
        slot   0  1  2  3  4  5 | 6            slot   0  1  2  3 | 4
        row 0  a  b  c  .  .  . |              row 0  e  f  c  d |
        row 1  a  b  c  d  e  . |

    The last slot is for padding. `length` (B,) counts the tokens of each row; `longest` is
    its maximum, as an int. If `static`, one compiled step serves every position: it attends
    to all slots and masks empty slots. `longest` is then max_len, and the caller must ensure
    that no row exceeds it."""

    def __init__(self, model, batch_size, max_len, static, rolling):
        config = model.config
        dtype = model.compute_dtype()
        if max_len > config.block_size:
            raise ValueError(f"max_len={max_len} is above block_size={config.block_size}")
        self.max_len = max_len
        self.static = static
        self.rolling = rolling
        self.longest, self.same_length = (max_len, False) if static else (0, True)
        zeros = functools.partial(torch.zeros, device=model.wte.weight.device)
        self.length = zeros(batch_size, dtype=torch.long)
        # the start of each position's document; the last column is for padding
        self.starts = zeros(batch_size, (max_len + 1) * (config.document_token is not None), dtype=torch.long)
        self.slots = [[zeros(batch_size, heads, self.n_slots(mixer.window) + 1, width, dtype=dtype)
                       for heads, width in mixer.slots or ()] for mixer in model.mixers]
        self.states = [[zeros(batch_size, *shape, dtype=state_dtype or dtype)
                        for shape, state_dtype in mixer.states] for mixer in model.mixers]
        for mixer in model.mixers:
            if mixer.slots is None and not mixer.states:
                raise ValueError(f"{type(mixer).__name__} of layer {mixer.layer} sets neither slots nor "
                                 "states, so that nothing of it can be cached: see ForwardContext")

    def n_slots(self, window):
        return min(window, self.max_len) if self.rolling and window else self.max_len

    def append(self, mixer, context, *new):
        """Stores tensors (B, heads, T, width). Returns tensors to attend to, (B, heads, S, width)."""
        slots = self.slots[mixer.number]
        T = new[0].shape[2]
        n_slots = slots[0].shape[2] - 1
        seen = None
        if T > 1 and n_slots < self.max_len:  # late tokens overwrite slots that early tokens see
            seen = [torch.cat((old[:, :, :min(self.longest, n_slots)], add), dim=2)
                    for old, add in zip(slots, new)]
        self.write(slots, new, context)
        return seen or [old[:, :, :min(self.longest + T, n_slots)] for old in slots]

    def write(self, slots, new, context):
        T = new[0].shape[2]
        n_slots = slots[0].shape[2] - 1
        start = self.longest % n_slots
        if self.same_length and context.lengths is None and start + T <= n_slots:
            for old, add in zip(slots, new):  # faster if slots are adjacent
                old[:, :, start:start + T] = add
            return
        column = torch.arange(T, device=self.length.device)
        row = torch.arange(len(self.length), device=self.length.device)
        end = T if context.lengths is None else context.lengths[:, None]
        is_stored = (column < end) & (column >= end - n_slots)
        slot = (context.positions % n_slots).where(is_stored, n_slots)
        for old, add in zip(slots, new):
            old[row[:, None], :, slot] = add.transpose(1, 2).to(old.dtype)

    def key_positions(self, window, positions):
        """Positions (1 or B, S) of the keys that `append` returns in a layer with this window. Empty
        slots of a rolling cache have -1."""
        n_slots = self.n_slots(window)
        T = positions.shape[1]
        slot = torch.arange(n_slots, device=positions.device)[None]
        if n_slots == self.max_len:
            return slot[:, :self.longest + T]
        last = positions[:, :1] - int(T > 1)  # if T > 1, `append` returns the old slots, then the new tokens
        held = (last - (last - slot) % n_slots).clamp(min=-1)
        if T == 1:
            return held[:, :self.longest + 1]
        return torch.cat((held[:, :self.longest], positions), dim=1)

    def positions(self, T, lengths):
        """Positions of the next T tokens, (1 or B, T)."""
        if lengths is not None or not self.static:
            longest = self.longest + T if lengths is None else int((self.length + lengths).max())
            if longest > self.max_len:
                raise ValueError(f"cache is full: {longest} tokens do not fit into {self.max_len} slots; "
                                 "call make_cache with a larger max_len")
        start = self.longest if self.same_length else self.length[:, None]
        return start + torch.arange(T, device=self.length.device)[None]

    def advance(self, T, lengths):
        self.length += T if lengths is None else lengths
        if lengths is not None:
            self._recount()
        elif not self.static:
            self.longest += T

    def rewind(self, n):
        """Removes the last n tokens; n: an int or (B,). Raises ValueError if a layer has a state,
        or has overwritten slots of a rolling KV cache."""
        n_kept = 0 if any(self.states) else min(layer[0].shape[2] for layer in self.slots if layer) - 1
        if ((n > 0) & (self.length > n_kept)).any():
            raise ValueError("cannot rewind so many tokens: a layer keeps only a state or a window (for a "
                             "window: rolling=False)")
        self.length -= n
        self._recount()

    def reset(self):
        for tensor in self.tensors():
            tensor.zero_()
        self._recount()

    def select(self, rows):
        """Keeps, reorders or copies rows. rows: row numbers, a list or (B',)."""
        vars(self).update(tree_map_only(torch.Tensor, lambda tensor: tensor[rows], vars(self)))
        self._recount()

    def like(self, batch_size):
        other = copy.copy(self)
        other.select([0] * batch_size)
        other.reset()
        return other

    def put(self, rows, other):
        """Replaces these rows by the rows of a cache with the same max_len."""
        for tensor, new in zip(self.tensors(), other.tensors()):
            tensor[rows] = new
        self._recount()

    def _recount(self):
        if not self.static:
            self.longest = int(self.length.max())
            self.same_length = int(self.length.min()) == self.longest

    def tensors(self):
        return [tensor for tensor in tree_leaves(vars(self)) if torch.is_tensor(tensor)]


def last_tokens(x, keep, lengths):
    """x (B, T, ...) -> (B, keep, ...): the last tokens of each row."""
    if keep is None:
        return x
    if lengths is None:
        return x[:, max(0, x.shape[1] - keep):]
    column = (lengths[:, None] - keep + torch.arange(keep, device=x.device)).clamp(min=0)
    return x[torch.arange(len(x), device=x.device)[:, None], column]


# masks ------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Mask:
    """Which keys each query sees, in layers with the same mask_kind."""
    bias: torch.Tensor | None     # (1 or B, 1 or H, T, S), added to scores; None: none, or use `part`
    is_causal: bool               # query t belongs to key S - T + t and sees no later keys
    flex: tuple | None = None     # what flex_mask returns; bias is then None
    part: typing.Callable | None = None  # for flex or eager blocks: (slice of queries, slice of keys) -> bias
    copies: dict = dataclasses.field(default_factory=dict)  # H / K -> bias for sdpa_plan's 'rows'

    def add(self, bias):
        """This Mask plus a bias (1 or B, 1 or H, T, S). -inf hides a key; each query
        must see at least one key."""
        own = self.part(slice(None), slice(None)) if self.part else self.bias
        if own is not None:
            bias = bias + own
        elif self.is_causal:  # with a bias, kernels ignore is_causal
            T, S = bias.shape[-2:]
            bias = bias.masked_fill(torch.ones_like(bias, dtype=torch.bool).triu(1 + S - T), -math.inf)
        return Mask(bias, self.is_causal)


def make_mask(model, context, window, has_alibi, in_chunks):
    """The Mask of a mask_kind. window: tokens that the layers' cache keeps. in_chunks: a query sees only its
    chunk of `window` tokens."""
    config = model.config
    positions = context.positions
    cache = context.cache
    is_causal = cache is None or cache.longest == 0
    starts = context.document_starts
    if not has_alibi and starts is None and needs_no_mask(context, is_causal, window, in_chunks):
        return Mask(None, is_causal or positions.shape[1] > 1)

    k_pos = positions if cache is None else cache.key_positions(window, positions)
    back = context.position_ids % window if in_chunks else (window or config.block_size) - 1
    first = (positions - back).clamp(min=0 if starts is None else starts)
    if cache is not None:  # padding that sees no key would become NaN
        first = first.clamp(max=cache.max_len - 1)
    slopes = alibi_slopes(config.n_head, positions.device) * config.alibi_scale if has_alibi else None

    def part(queries, keys):
        q_pos = positions[:, None, queries, None]
        keys = k_pos[:, None, None, keys]
        seen = (first[:, None, queries, None] <= keys) & (keys <= q_pos)  # (1 or B, 1, T, S)
        bias = torch.zeros((), dtype=context.dtype, device=positions.device)
        if has_alibi:
            bias = (-slopes[:, None, None] * (q_pos - keys)).to(context.dtype)
        return bias.where(seen, -math.inf)

    flex = flex_mask(first, slopes) if context.flex else None
    in_blocks = flex or positions.shape[1] > BLOCK and (
        context.eager or is_causal and window and positions.device.type == 'cpu')
    bias = None if in_blocks else part(slice(None), slice(None))
    return Mask(bias, is_causal, flex, part if in_blocks else None)


def needs_no_mask(context, is_causal, window, in_chunks):
    """Whether each token sees all keys, or all keys up to itself."""
    cache = context.cache
    T = context.positions.shape[1]
    sees_all = window is None or (cache.longest if cache else 0) + T <= window
    is_aligned = cache and cache.same_length and context.lengths is None  # keys end at the last query
    if T == 1 and is_aligned:
        return sees_all or cache.rolling and not in_chunks
    return sees_all and not context.eager and (is_causal or is_aligned and context.idx.is_cuda and T > BLOCK)


# kernels ----------------------------------------------------------------------------------------------------

def attend(mixer, q, k, v, context, mask):
    """softmax(scale q k^T + bias) v, with dropout on the weights, by the fastest path: q (B, H, T, D),
    k (B, K, S, D), v (B, K, S, D') -> (B, H, T, D')."""
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    bias = mask.bias
    group = H // K
    if mask.flex is not None:
        return flexible_attention(mixer, q, k, v, *mask.flex)
    if context.eager or mask.part:  # eager_attention skips keys outside a window
        return eager_attention(mixer, q, k, v, mask, context.weights)
    is_causal = bias is None and mask.is_causal and T > 1
    if (group * T <= FEW_QUERIES and torch.compiler.is_compiling()
            and (bias is not None or q.device.type == 'cpu' and not is_causal)):
        return eager_attention(mixer, q.float(), k.float(), v.float(), mask, few=True).type_as(v)
    sharing, use_cudnn = sdpa_plan(q.device.type, q.dtype, v.shape[-1] == D <= 256, is_causal)
    if sharing == 'rows':
        q = q.reshape(B, K, group * T, D)
        if bias is not None and group not in mask.copies:  # otherwise autograd keeps a copy per layer
            mask.copies[group] = bias.expand(-1, max(group, bias.shape[1]), -1, -1).reshape(
                len(bias), -1, group * T, S)
        bias = mask.copies.get(group)
    elif group > 1 and sharing == 'repeat':
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    if is_causal and T < S:
        from torch.nn.attention.bias import causal_lower_right  # imports the compiler
        bias, is_causal = causal_lower_right(T, S), False
    with contextlib.nullcontext() if use_cudnn else sdpa_kernel(ALL_BUT_CUDNN):
        y = F.scaled_dot_product_attention(q, k, v, bias, mixer.config.dropout * mixer.training, is_causal,
                                           scale=mixer.scale, enable_gqa=q.shape[1] > k.shape[1])
    return y.reshape(B, H, T, -1)  # view would fail: some kernels store (B, T, H, D')


BLOCK = 128       # queries per step of eager_attention
FEW_QUERIES = 16  # maximum queries per key head for few=True
ALL_BUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def sdpa_plan(device, dtype, fits_flash, is_causal):
    """How query heads share a key head in scaled_dot_product_attention, and whether to allow cuDNN.

    'rows': the heads become rows of one product. 'repeat': each head gets a copy of the keys. 'gqa': the
    kernel shares the keys. cuDNN is fastest in training, but it plans slowly for each new shape, and its
    results with masks were wrong (pytorch issues 196678, 193893)."""
    use_cudnn = device != 'cuda' or is_causal and torch.is_grad_enabled()
    if not is_causal:
        return 'rows', use_cudnn
    if device == 'mps' or device == 'cuda' and not (dtype is torch.bfloat16 and fits_flash):
        return 'repeat', use_cudnn
    return 'gqa', use_cudnn


def use_flex(model, idx):
    """Whether to use flex_attention, which must be compiled, needs head widths >= 16, and has no
    dropout."""
    return (idx.is_cuda and torch.compiler.is_compiling() and idx.shape[1] >= 128
            and model.compute_dtype() is torch.bfloat16 and not (model.training and model.config.dropout)
            and all(min(mixer.head_widths) >= 16 for mixer in model.mixers if mixer.mask_kind))


def flex_mask(first, slopes):
    """(block mask, slopes) for flexible_attention. first (1 or B, T): first key that each query sees."""
    from torch.nn.attention.flex_attention import create_block_mask
    rows, T = first.shape

    def is_seen(b, h, q, k):
        return (k <= q) & (k >= first[b % rows, q])

    return create_block_mask(is_seen, rows, None, T, T, device=first.device), slopes


def change_score(mixer, score):
    """Changes the scaled q k^T before eager_attention or flexible_attention adds a bias."""
    softcap = mixer.config.attn_softcap
    return softcap * torch.tanh(score / softcap) if softcap else score


def flexible_attention(mixer, q, k, v, block_mask, slopes):
    """`attend` by flex_attention (arXiv:2412.05496)."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def score_of(score, b, h, q, k):
        score = change_score(mixer, score)
        return score if slopes is None else score - slopes[h] * (q - k)

    options = dict(scale=mixer.scale, enable_gqa=q.shape[1] > k.shape[1])
    if mixer.sink is None:
        return flex_attention(q, k, v, score_of, block_mask, **options)
    y, aux = flex_attention(q, k, v, score_of, block_mask, **options, return_aux=AuxRequest(lse=True))
    # exp(aux.lse) is the denominator without the sink
    return y * torch.sigmoid(aux.lse - mixer.sink.float()[:, None])[..., None].type_as(y)


def eager_attention(mixer, q, k, v, mask, weights=None, few=False):
    """`attend` in plain torch, in blocks of queries. few: replaces matmuls by sums, for a compiled step
    of few queries."""
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    q = q * mixer.scale
    out = []
    block = T if few or weights is not None else BLOCK
    for start in range(0, T, block):
        end = min(start + block, T)
        seen = slice(0, S - T + end if mask.is_causal else S)
        if mask.is_causal and mixer.window:
            seen = slice(max(0, start + 1 - mixer.window), end)
        keys = k[:, :, seen]
        values = v[:, :, seen]
        n_keys = keys.shape[2]
        # (B, K, (H / K) t, D) @ (B, K, D, s) for t queries, s keys
        rows = q[:, :, start:end].reshape(B, K, -1, D)
        score = (rows[..., None, :] * keys[:, :, None]).sum(dim=-1) if few else rows @ keys.mT
        score = change_score(mixer, score.view(B, H, -1, n_keys))
        if mask.part:
            score = score + mask.part(slice(start, end), seen)
        elif mask.bias is not None:
            score = score + mask.bias[:, :, start:end, seen]
        if mixer.sink is not None:  # a sink has a weight but no value
            sink = mixer.sink.type_as(score)[:, None, None].expand_as(score[..., :1])
            score = torch.cat((score, sink), dim=-1)
        weight = score.softmax(dim=-1)[..., :n_keys]
        if weights is not None:
            weights.append(weight)
        weight = F.dropout(weight, mixer.config.dropout, mixer.training).reshape(B, K, -1, n_keys)
        y = (weight[..., None] * values[:, :, None]).sum(dim=-2) if few else weight @ values
        out.append(y.view(B, H, end - start, -1))
    return torch.cat(out, dim=2)


def project(x, w, bias=None):
    """x (..., n_in) @ w^T + bias"""
    if not (x.is_cpu and x.numel() == x.shape[-1] == w.shape[1] and x.dtype == w.dtype
            and torch.compiler.is_compiling() and not torch.is_grad_enabled()):
        return F.linear(x, w, bias)
    one = x.flatten().float()  # for one token, the compiler makes a loop that reads w once
    one = one.as_strided(one.shape, one.stride())  # otherwise, every row of w recomputes `one`
    y = (w.float() * one).sum(dim=-1)
    return (y if bias is None else y + bias.float()).to(x.dtype).view(*x.shape[:-1], -1)


MOST_LOGITS = 2**31 - 1  # per call: CUDA's kernel counts logits in 32 bits (pytorch issue 85786)


def cross_entropy(logits, targets):
    """Mean cross entropy, 0-d, of logits (B, T, vocab_size) over targets (B, T) that are not negative."""
    logits = logits.flatten(0, 1)
    targets = targets.flatten().clamp(min=-1)
    rows = MOST_LOGITS // logits.shape[-1]
    parts = [(logits, targets)]
    if rows < len(targets):  # split's gradient costs a copy
        parts = zip(logits.split(rows), targets.split(rows))
    loss = sum(F.cross_entropy(*part, ignore_index=-1, reduction='sum') for part in parts)
    return loss / (targets >= 0).sum().clamp(min=1)


# III. experts, variants =====================================================================================

def gated(act):
    """An entry of ACTIVATIONS: act(gate) * up, arXiv:2002.05202."""
    return lambda gate, up: act(gate) * up, True


gelu_tanh = functools.partial(F.gelu, approximate='tanh')
ACTIVATIONS = {
    # name: (function or module class, whether its arguments are gate and up)
    'swiglu': gated(F.silu),
    'geglu': gated(F.gelu),
    'geglu_tanh': gated(gelu_tanh),  # Gemma
    'reglu': gated(F.relu),
    'glu': gated(torch.sigmoid),
    'gelu': (F.gelu, False),  # exact, by erf
    'gelu_tanh': (gelu_tanh, False),  # OpenAI's GPT-2
    'relu': (F.relu, False),
    'relu2': (lambda x: F.relu(x).square(), False),  # Primer, arXiv:2109.08668
    'silu': (F.silu, False),
}


def activation(config):
    """-> (activation, number of its arguments)"""
    act, is_gated = ACTIVATIONS[config.mlp]
    return act(config) if isinstance(act, type) else act, 2 if is_gated else 1


# experts ----------------------------------------------------------------------------------------------------
# Shapes: E experts, n = B T tokens, k = n_expert_active

class GroupedLinear(nn.Module):
    """A FusedLinear per expert: x (n k, n_in), offsets (E,) int32 -> one tensor (n k, width) per width in
    widths. The rows of x are sorted by expert; offsets are the ends of the experts' rows."""

    names = 'gate up'

    def __init__(self, n_expert, n_in, widths, bias, init=hidden_init):
        super().__init__()
        self.widths = widths
        self.weight = parameter(n_expert, sum(widths), n_in, init=init, group='matrix', rows=widths)
        self.bias = parameter(n_expert, sum(widths), init=nn.init.zeros_, group='vector') if bias else None
        # not compiled, because row counts vary
        self.loop = torch.compiler.disable(loop_over_experts)

    def has_kernel(self, dtype, device):
        """Whether grouped_mm supports the weights: row and column sizes must be multiples of 16 bytes."""
        return (dtype is torch.bfloat16 and device != 'mps'
                and not any(n % 8 for n in self.weight.shape[1:]))

    def forward(self, x, offsets):
        y = self.product(x, offsets)
        if self.bias is not None:
            expert = torch.searchsorted(offsets, torch.arange(len(x), device=x.device), right=True)
            y = y + self.bias[expert].type_as(y)
        return y.split(self.widths, dim=-1)

    def product(self, x, offsets):
        w = self.weight.to(x.dtype)
        if self.has_kernel(x.dtype, x.device.type):
            if torch.is_grad_enabled():  # zeroes gradients of experts without rows: pytorch issue 172439
                w = w.where(offsets.diff(prepend=offsets.new_zeros(1))[:, None, None] > 0, 0)
            return F.grouped_mm(x, w.mT, offs=offsets)
        return self.loop(F.linear, x, offsets, w)


def loop_over_experts(product, x, offsets, *weights):
    """Calls product(rows, weights) for each expert that has rows."""
    segments = x.tensor_split(offsets[:-1].long().cpu())
    return torch.cat([product(rows, *each) for rows, *each in zip(segments, *weights) if len(rows)])


class Experts(nn.Module):
    """An MLP per expert: (n k, C) -> (n k, C)."""

    def __init__(self, config):
        super().__init__()
        self.act, n = activation(config)
        E = config.n_expert
        width = config.d_expert
        self.c_fc = GroupedLinear(E, config.n_embd, (width,) * n, config.mlp_bias)
        self.c_proj = GroupedLinear(E, width, (config.n_embd,), config.mlp_bias,
                                    init=branch_init(config, 'mlp_out'))

    def forward(self, x, offsets):
        y, = self.c_proj(self.act(*self.c_fc(x, offsets)), offsets)
        return y


ROUTERS = {
    # name: (logits -> log scores of the experts, scores in a group -> score of the group)
    'softmax': (lambda logits: logits.log_softmax(-1), lambda score: score.amax(-1)),  # Mixtral, DeepSeek-V2
    'sigmoid': (F.logsigmoid, lambda score: score.topk(2, -1).values.sum(-1)),         # DeepSeek-V3
}


class MoE(nn.Module):
    """Mixture of experts: each token passes through the n_expert_active experts with the highest router
    scores (arXiv:1701.06538) and through the shared experts (arXiv:2401.06066)."""

    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        self.router = Linear(config.n_embd, config.n_expert, config.mlp_bias)
        self.experts = Experts(config)
        self.shared = (MLP(config, layer, config.n_shared_expert * config.d_expert)
                       if config.n_shared_expert else None)
        self.shared_gate = Linear(config.n_embd, 1, group='gate') if config.shared_gate else None
        self.ln_router, self.ln_in, self.ln_out, self.ln_shared_in, self.ln_shared_out = (
            Norm(config.n_embd, config) if config.expert_norms else nn.Identity() for _ in range(5))
        self.expert_scale = (parameter(config.n_expert, init=nn.init.ones_, group='vector')
                             if config.expert_norms else None)
        self.register_buffer('expert_bias', torch.zeros(config.n_expert) if config.balance_bias else None)

    def forward(self, x, context):
        flat = x.flatten(0, 1)  # (B, T, C) -> (n, C)
        k = self.config.n_expert_active
        weight, chosen, logits, score = self.route(self.ln_router(flat))
        expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(self.config.n_expert, device=x.device), right=True,
                                  out_int32=True)
        each = self.ln_in(flat).to(context.dtype).repeat_interleave(k, dim=0)  # one row per choice
        if self.config.expert_input_scale:
            each = each * weight.view(-1, 1).type_as(each)
            weight = torch.ones_like(weight)
        # index_select, because plain indexing has a slow or nondeterministic gradient
        y = self.experts(each.index_select(0, order), ends)
        y = y.index_select(0, order.argsort()).unflatten(0, (-1, k))  # (n, k, C)
        y = self.ln_out((y * weight[..., None].type_as(y)).sum(1)).view_as(x)
        if context.learned is not None:
            context.routing.append((self, *self.statistics(chosen, logits, score, context.learned)))
        if self.shared is None:
            return y
        shared = self.ln_shared_out(self.shared(self.ln_shared_in(x)))
        return y + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())

    def route(self, x):
        """x (n, C) -> float32 weights (n, k), chosen experts (n, k), logits and log scores (n, E)"""
        config = self.config
        log, group_score = ROUTERS[config.router]
        with torch.autocast(x.device.type, enabled=False):
            bias = self.router.bias
            logits = F.linear(x.float(), self.router.weight.float(), bias if bias is None else bias.float())
        if config.expert_norms:
            logits = logits * config.n_embd ** -0.5
        score = log(logits)
        rank = score.detach().exp()
        if config.balance_bias:  # arXiv:2408.15664: changes the choice, not the weights
            rank = rank + self.expert_bias
        if config.n_group:
            groups = rank.unflatten(1, (config.n_group, -1))  # (n, groups, experts per group)
            of_group = group_score(groups)
            best = of_group.topk(config.topk_group).indices
            hidden = torch.ones_like(of_group, dtype=torch.bool).scatter(1, best, False)
            rank = groups.masked_fill(hidden[..., None], -math.inf).flatten(1)
        chosen = rank.topk(config.n_expert_active).indices
        weight = score.gather(1, chosen)
        # softmax normalises the chosen scores without underflow
        weight = weight.softmax(-1) if config.norm_topk_prob else weight.exp()
        if self.expert_scale is not None:
            weight = weight * self.expert_scale[chosen]
        return weight * config.routed_scaling_factor, chosen, logits, score

    def statistics(self, chosen, logits, score, learned):
        """Statistics over the tokens for which learned (B, T) is True:

        balance  0-d, 1 if experts are used evenly (Switch, arXiv:2101.03961, equations 4 to 6)
        z        0-d, z-loss (ST-MoE, arXiv:2202.08906)
        load     (E,), how often each expert was chosen"""
        E = self.config.n_expert
        rows = learned if self.config.balance_per_sequence else learned.view(1, -1)
        n = rows.sum(1, keepdim=True).clamp(min=1)
        picks = (chosen[..., None] == torch.arange(E, device=chosen.device)).sum(1)
        load, share = ((x.unflatten(0, rows.shape) * rows[..., None]).sum(1)  # (rows, E)
                       for x in (picks, score.softmax(-1)))
        total = learned.sum().clamp(min=1)
        balance = E / self.config.n_expert_active * (load * share / n).sum() / total
        z = (logits.logsumexp(-1).square() * learned.flatten()).sum() / total
        return balance, z, load.sum(0).float()

    def _apply(self, *args, **options):
        """Keeps buffers, such as expert biases, in float32."""
        buffers = dict(self.named_buffers(recurse=False))
        super()._apply(*args, **options)
        for name, exact in buffers.items():
            if not exact.is_meta:
                setattr(self, name, exact.to(getattr(self, name).device))
        return self


MLPS = {  # letter in expert_pattern: class of a block's MLP; None: no MLP
    'E': MoE,
    'D': MLP,
    'N': None,
}


def routing_losses(routing):
    """[(experts, balance, z, load)], one per call of MoE.forward -> entries of GPT.forward's aux"""
    _, balance, z, _ = zip(*routing)
    loads = {}
    for experts, _, _, load in routing:
        loads[experts] = loads.get(experts, 0) + load
    return {'balance': torch.stack(balance).mean(), 'z': torch.stack(z).mean(),
            'load': torch.stack([*loads.values()])}


@torch.no_grad()
def move_balance(model, loads, rate):
    """Moves the expert biases toward a balanced load (arXiv:2408.15664). loads: (layers with experts, E)."""
    experts = [part for part in model.modules() if hasattr(part, 'expert_bias')]
    for part, load in zip(experts, loads, strict=True):
        part.expert_bias += rate * (load.mean() - load).sign()


def layer_norm(x, weight, bias, eps):
    """arXiv:1607.06450."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


NORMS = {'rmsnorm': rms_norm, 'layernorm': layer_norm}


# rotary scalings, positions ---------------------------------------------------------------------------------

def yarn_mscale(factor, weight):
    """YaRN's scale of attention for a context `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def linear(freq, base, length, *, factor):
    """Divides every frequency by factor: Chen et al. 2023, arXiv:2306.15595."""
    return freq / factor, 1.0


def ntk(freq, base, length, *, factor):
    """Acts like a larger base: only the lowest frequency is divided by the full factor (bloc97)."""
    pairs = len(freq)
    return freq * factor ** (-torch.arange(pairs, device=freq.device) / max(1, pairs - 1)), 1.0


def dynamic(freq, base, length, *, factor, original_max_position_embeddings):
    """ntk with the factor that a context of this length needs (emozilla)."""
    return ntk(freq, base, length,
               factor=max(1.0, factor * length / original_max_position_embeddings - (factor - 1)))


def yarn(freq, base, length, *, factor, original_max_position_embeddings, beta_fast=32, beta_slow=1,
         attention_factor=None, mscale=None, mscale_all_dim=None, truncate=True):
    """Keeps the frequency of pairs that rotate more than beta_fast times in the original context. Below
    beta_slow rotations, divides the frequency by factor; in between, interpolates (arXiv:2309.00071,
    section 3.2)."""
    pairs = len(freq)
    low, high = (pairs * math.log(original_max_position_embeddings / (times * 2 * math.pi)) / math.log(base)
                 for times in (beta_fast, beta_slow))
    if truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, 2 * pairs - 1)
    ramp = (torch.arange(pairs, device=freq.device) - low) / (high - low or 0.001)
    if attention_factor is None:
        over, under = (mscale, mscale_all_dim) if mscale and mscale_all_dim else (1.0, 0.0)
        attention_factor = yarn_mscale(factor, over) / yarn_mscale(factor, under)
    return torch.lerp(freq, freq / factor, ramp.clamp(0, 1)), attention_factor


def llama3(freq, base, length, *, factor, low_freq_factor, high_freq_factor,
           original_max_position_embeddings):
    """Like yarn, but interpolates linearly in the number of rotations: Llama 3.1, arXiv:2407.21783."""
    times = original_max_position_embeddings * freq / (2 * math.pi)
    share = ((times - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return torch.lerp(freq / factor, freq, share), 1.0


def longrope(freq, base, length, *, short_factor, long_factor, original_max_position_embeddings, factor,
             attention_factor=None):
    """Divides each frequency by its own factor (arXiv:2402.13753)."""
    factors = long_factor if length > original_max_position_embeddings else short_factor
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original_max_position_embeddings))
    return freq / torch.stack([freq.new_full((), one) for one in factors]), attention_factor


def proportional(freq, base, length, *, partial_rotary_factor, factor=1.0):
    """Like linear, but rotates only the fastest partial_rotary_factor * n of n pairs (LFM3, Gemma 4)."""
    freq = freq / factor
    freq[int(partial_rotary_factor * len(freq)):] = 0
    return freq, 1.0


ROPE_SCALINGS = {
    # rope_type: function of frequencies, base, block_size and the other items of rope_scaling
    #            -> frequencies, factor on cos and sin
    'linear': linear,
    'ntk': ntk,
    'dynamic': dynamic,
    'yarn': yarn,
    'llama3': llama3,
    'longrope': longrope,
    'proportional': proportional,
}


def complete_scaling(scaling, length):
    """Adds the training length to a rope_scaling that needs it."""
    if not scaling:
        return scaling
    options = dict(scaling)
    kind = options.pop('type', None)  # an older name
    kind = options.pop('rope_type', kind)
    try:
        signature = inspect.signature(ROPE_SCALINGS[kind])
        if 'original_max_position_embeddings' in signature.parameters:
            options.setdefault('original_max_position_embeddings', length)
        signature.bind(0, 0, 0, **options)
    except (KeyError, TypeError) as error:
        raise ValueError(f"rope_scaling={scaling} needs a rope_type out of {', '.join(ROPE_SCALINGS)}, with "
                         f"its items ({error})") from None
    return {'rope_type': kind, **options}


def sinusoid(position_ids, width):
    """position_ids (1 or B, T) -> (1 or B, T, width): sines in even, cosines in odd dimensions
    (arXiv:1706.03762, section 3.5)."""
    cos, sin = rope_table((10000.0, width, ()), position_ids, None)
    return torch.stack((sin, cos), dim=-1).flatten(-2)[:, 0]


def scale_queries(mixer, q, context):
    """q (B, H, T, D) * (1 + beta log(1 + floor((position + start) / length))). beta, start,
    length and layers (letters of pos_pattern) are items of query_scale (Ministral 3, after arXiv:2501.19399).
    Llama 4: start=1, layers='N'."""
    options = {'start': 0, 'layers': 'PN'} | mixer.config.query_scale
    if letter(mixer.config.pos_pattern, mixer.layer) not in options['layers']:
        return q
    step = (context.position_ids + options['start']).div(options['length'], rounding_mode='floor')
    return q * (1 + options['beta'] * torch.log1p(step))[:, None, :, None].type_as(q)


def alibi_slopes(n_head, device):
    """(H,): 2^(-8i/n) if the number of heads n is a power of two; otherwise the slopes of the next smaller
    power, then every second slope of twice that power (arXiv:2108.12409)."""
    n = 2 ** int(math.log2(n_head))
    i = torch.arange(1, n_head + 1, device=device)
    return 2.0 ** torch.where(i <= n, -8 * i / n, -4 * (2 * (i - n) - 1) / n)


# other mixers, other blocks ---------------------------------------------------------------------------------

def make_mixer(config, layer):
    """A layer's mixer."""
    layer_config = config.at(layer)
    kind = MIXERS[config.mixer_of(layer)]
    if issubclass(kind, Attention) and (layer_config.attn_gate or layer_config.clip_qkv or layer_config.k_eq_v
                                        or layer_config.v_norm or isinstance(layer_config.qk_norm, str)):
        from mixers import VariantAttention
        if kind is Attention:
            kind = VariantAttention
        if not issubclass(kind, VariantAttention):
            raise ValueError(f"{kind.__name__} supports no attn_gate, clip_qkv, k_eq_v, v_norm or other "
                             "qk_norm: derive it from VariantAttention")
    return kind(layer_config, layer)


def make_block(config, layer):
    """Creates a layer's block. Config files that change the block replace this function."""
    return Block(config, layer)


def require_plain(block, config, layer):
    """Raises ValueError unless this layer is `x = x + branch(attn(ln_1(x)))`, then
    `x + branch(mlp(ln_2(x)))`."""
    if (config.norm_placement != 'pre' or config.residual_scale != 1 or config.layer_scalar
            or MLPS[config.mlp_of(layer)] is None):
        raise ValueError(f"{type(block).__name__} needs the default norm_placement, residual_scale, "
                         "layer_scalar and expert_pattern: see Block.supports_variants")


NORM_PLACEMENTS = {
    # name: {place in a block: name of its norm}. Places: before the mixer (attn_in), after it (attn_out),
    # after its sum with the residual stream (attn_sum), and likewise for the MLP. With parallel_in instead
    # of mlp_in, the MLP reads the input of the block
    'pre': {'attn_in': 'ln_1', 'mlp_in': 'ln_2'},                    # GPT-2, Llama
    'post': {'attn_sum': 'ln_1', 'mlp_sum': 'ln_2'},                 # the Transformer, arXiv:1706.03762
    'output': {'attn_out': 'ln_1', 'mlp_out': 'ln_2'},               # OLMo 2, arXiv:2501.00656
    'sandwich': {'attn_in': 'ln_1', 'attn_out': 'ln_2', 'mlp_in': 'ln_3', 'mlp_out': 'ln_4'},  # Gemma 2,
                                                                     # arXiv:2408.00118
    'parallel': {'attn_in': 'ln_1', 'parallel_in': 'ln_1'},          # GPT-J, Falcon-7B (arXiv:2311.16867)
    'parallel_2': {'attn_in': 'ln_1', 'parallel_in': 'ln_2'},        # GPT-NeoX, arXiv:2204.06745
}


# IV. validation, accounting =================================================================================

def complete(config):
    """Fills in the defaults and raises the errors of GPTConfig."""
    config.n_expert = config.n_expert or None
    config.mixer_pattern = config.mixer_pattern or ('A' if config.kv_lora_rank is None else 'M')
    if {*config.mixer_pattern} - MIXERS.keys() or config.mlp not in ACTIVATIONS:
        import mixers  # noqa: F401 (adds its letters and activations)
    if problems := [*wrong_values(config)] or [*fill_defaults(config)] or [*impossible(config)]:
        raise ValueError('invalid config: ' + '. '.join(
            ', '.join(f'{name}={getattr(config, name)!r}' for name in names.split()) + f' {problem}'
            for names, problem in problems))
    if config.local:  # completes rope_scaling in `local`, and raises errors of `local`
        layer = dataclasses.replace(config, **config.local, local=None)
        config.local = {name: getattr(layer, name) for name in config.local}


def mixer_classes(config):
    """The classes in mixer_pattern."""
    return [MIXERS[kind] for kind in dict.fromkeys(config.mixer_pattern)]


def fill_defaults(config):
    """Fills in defaults. Yields problems, as `impossible` does."""
    width, remainder = divmod(config.n_embd, config.n_head)
    defaults = dict(n_kv_head=config.n_head, head_dim=None if remainder else width, qk_norm=True,
                    qkv_bias=config.bias, proj_bias=config.bias, mlp_bias=config.bias,
                    norm_bias=config.bias and config.norm == 'layernorm',
                    embed_scale=config.n_embd ** 0.5 if config.pos == 'sinusoidal' else 1.0,
                    d_ff=round_up(8 * config.n_embd / 3) if ACTIVATIONS[config.mlp][1] else 4 * config.n_embd)
    if config.n_expert is not None:
        defaults |= dict(n_expert_active=min(2, config.n_expert), d_expert=config.d_ff or defaults['d_ff'])
    own = {}
    for mixer in mixer_classes(config):
        for name, value in mixer.defaults(config).items():
            if getattr(config, name) is None and own.setdefault(name, value) != value:
                yield 'mixer_pattern', f'needs a value of {name}: the defaults of these layers differ'
    for name, value in (defaults | own).items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    config.rope_scaling = complete_scaling(config.rope_scaling, config.block_size)


def round_up(n, multiple=64):
    """Rounds n up."""
    return math.ceil(n / multiple) * multiple


def choices(kind):
    """The texts and types that a field's annotation lists."""
    if isinstance(kind, str):
        return [*globals()[kind.partition(' |')[0]]]
    return [x for part in typing.get_args(kind) or [kind] for x in typing.get_args(part) or [part]]


MOST_LAYERS = 4096  # also limits n_expert: creating far more would take hours


def wrong_values(config):
    """Pairs (field, problem)."""
    for name, field in config.__dataclass_fields__.items():
        value = getattr(config, name)
        known = choices(field.type)
        values = value if name.endswith('_pattern') else [value]
        is_none = value is None and field.default is not None
        from_0 = field.default == 0 or name == 'document_token'
        if (is_none or isinstance(value, str)) and not (values and {*values} <= {*known}):
            hint = ', or name the config file that adds it' * isinstance(field.type, str)
            names = [getattr(one, '__name__', one) for one in known]
            yield name, f"is not supported; choose one of {', '.join(names)}{hint}"
        elif type(value) in (int, float) and value <= 0 and (value or not from_0):
            yield name, f"must be {'at least' if from_0 else 'above'} 0"
        elif name in ('n_layer', 'n_expert') and (value or 0) > MOST_LAYERS:
            yield name, f'must be at most {MOST_LAYERS}'


LOCAL = 'rope_base', 'rope_scaling', 'partial_rotary_factor', 'head_dim', 'n_kv_head', 'k_eq_v'


def impossible(config):  # noqa: C901
    """Fields that cannot be combined: pairs ('field other_field', problem)."""
    if any(issubclass(mixer, Attention) for mixer in mixer_classes(config)):
        if config.head_dim is None:
            yield 'n_embd n_head', 'do not fit: n_head must divide n_embd, or set head_dim'
        if config.n_head % config.n_kv_head:
            yield 'n_kv_head n_head', 'do not fit: n_kv_head must divide n_head'
    if (config.pos == 'rope' and (config.head_dim or config.qk_rope_head_dim)
            and (config.rope_dim % 2 or not config.rope_dim)):
        yield 'pos', f"needs heads with an even number of rotating dimensions, not {config.rope_dim}"
    if config.document_token is not None and not all(mixer.documents for mixer in mixer_classes(config)):
        yield 'document_token mixer_pattern', 'do not fit: a mixer does not keep documents apart'
    if {*config.mixer_pattern} != {*config.mixer_pattern[:config.n_layer]}:
        yield 'mixer_pattern n_layer', 'do not fit: each letter needs a layer'
    if (config.local or {}).keys() - {*LOCAL}:
        yield 'local', f"can only have {', '.join(LOCAL)}"
    share = config.topk_group / config.n_group if config.n_group else 1
    if config.n_expert and config.n_expert_active > config.n_expert * share:
        yield 'n_expert_active n_expert n_group topk_group', 'leave too few experts to choose from'
    for mixer in mixer_classes(config):
        yield from mixer.check(config)


def changed(config, longest=None, **changes):
    """A trained model's config with changes, but the same training length. longest: upper bound of
    block_size."""
    if longest:
        changes['block_size'] = min(longest, changes.get('block_size', config.block_size))
    length = (config.rope_scaling or {}).get('original_max_position_embeddings', config.block_size)
    if 'rope_scaling' in changes:
        changes['rope_scaling'] = complete_scaling(changes['rope_scaling'], length)
    return dataclasses.replace(config, **changes)


def try_tokens(model):
    """Runs a few tokens in several ways. Raises ArithmeticError if the results differ, the loss is
    not finite, or a parameter does not affect the loss."""
    config = model.config
    idx = torch.arange(min(6, config.block_size), device=model.wte.weight.device)[None] % config.vocab_size
    with torch.random.fork_rng(devices=[]):
        loss, aux = model(idx, idx)
        used = parameters_of([x for x in (loss, *aux.values()) if x.requires_grad])
        # zeros would hide what the layers compute
        weights = {name: torch.randn_like(w) / 8 for name, w in model.named_parameters() if not w.any()}
    if not loss.isfinite():
        raise ArithmeticError(f"the loss of the first tokens is {loss.item()}")
    if unused := [name for name, w in model.named_parameters() if w.requires_grad and w not in used]:
        raise ArithmeticError(f"the loss does not depend on {', '.join(unused)}")
    if not all(getattr(part, 'causal', True) for part in model.modules()):
        return
    training = model.training
    model.eval()
    if config.document_token is not None:
        idx[:, 5:] = config.document_token
    run = functools.partial(functional_call, model, weights)
    whole = run(idx)  # with gradients, as in training
    n = idx.shape[1] - 1
    cache = model.make_cache(1, n + 1)
    with torch.no_grad():
        ways = {'a cache holds the tokens before, and padding follows them': [
            run(idx, {'cache': cache, 'lengths': torch.full_like(cache.length, n)})[:, :n],
            run(idx[:, n:], {'cache': cache})]}
        if config.document_token is not None:
            ways['another document precedes'] = [run(part) for part in idx.split(5, dim=1)]
    for way, parts in ways.items():
        if (torch.cat(parts, dim=1) - whole).norm() > 0.01 * whole.norm():
            raise ArithmeticError(f"logits change when {way}: see ForwardContext")
    model.train(training)


def parameters_of(losses):
    """The parameters on which losses depend. Computes no gradients, which could exceed the memory."""
    nodes = {x.grad_fn for x in losses}
    new = nodes
    while new:
        new = {node for parent in new for node, _ in parent.next_functions if node} - nodes
        nodes |= new
    return {node.variable for node in nodes if hasattr(node, 'variable')}


def collect_tags(model):
    """Name -> Tag of every parameter. Raises ValueError for a missing or wrong tag, or an unsaved
    buffer."""
    tags = {}
    for name, w in model.named_parameters():
        found = tags[name] = getattr(w, 'tag', None)
        if found is None:
            raise ValueError(f"{name} has no tag: make it with parameter(...), or call tag(...) on it")
        if found.group == 'matrix' and (w.ndim < 2 or 1 in w.shape[-2:]):  # Muon would only normalise it
            raise ValueError(f"{name} is tagged as a matrix: use group='vector', or another of GROUPS")
    saved = model.state_dict()
    for name, _ in model.named_buffers():
        if name not in saved:  # loading does not compute buffers
            raise ValueError(f"a checkpoint would lose the buffer {name}: leave persistent=False out")
    return tags


@torch.no_grad()
def init_weights(model):
    """Fills every parameter with its tag's init."""
    for name, w in model.named_parameters():
        if not w.is_meta:
            model.tags[name].init(w)
            if w.isnan().any():
                raise ValueError(f"{name} holds NaN after its init, which must fill the tensor in place")


# accounting -------------------------------------------------------------------------------------------------

LOOKUP_GROUPS = {'embedding'}  # a token reads one row, which costs no FLOPs


def account(model):
    """Name of each parameter -> (elements, elements that a token uses, training FLOPs per token).
    'head' (if tied), 'mtp' and 'mixing' (see mixing_flops) have only FLOPs."""
    rows = {name: cost(model, name, w) for name, w in model.named_parameters()}
    head = next((model.lm_head or model.wte).parameters())
    if model.lm_head is None:
        rows['head'] = 0, 0, (6 if head.requires_grad else 4) * head.numel()
    if model.mtp is not None:
        rows['mtp'] = 0, 0, 6 * head.numel()
    return rows | {'mixing': (0, 0, mixing_flops(model, model.config.block_size))}


def mixing_flops(model, length):
    """Training FLOPs per token, excluding products with weight matrices."""
    return sum(part.flops(length) for part in model.modules() if hasattr(part, 'flops'))


def cost(model, name, w):
    """The row of `account` for a parameter w. A weight in a matmul costs 6 FLOPs, or 4 if frozen."""
    config = model.config
    active = w.numel()
    group = model.tags[name].group
    if 'experts.' in name:
        active = round(active * config.n_expert_active / config.n_expert)
    is_product = GROUPS[group] and group not in LOOKUP_GROUPS
    return w.numel(), active, (6 if w.requires_grad else 4) * active * is_product


def num_params(model, active=False):
    """The number of parameters. active: only those that a token uses."""
    return sum(row[active] for row in account(model).values())


def flops_per_token(model):
    """Training FLOPs per token at a length of block_size."""
    return sum(row[2] for row in account(model).values())


def row_splits(model):
    """Each parameter of group 'matrix' -> row counts of its fused projections."""
    return {w: model.tags[name].rows or (w.shape[-2],) for name, w in model.named_parameters()
            if model.tags[name].group == 'matrix'}

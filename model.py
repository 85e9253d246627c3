"""
The modern decoder-only language model, in four parts, to be read in this order; a part may call functions of
a later one, whose docstrings suffice there:

    I    the decoder: settings, linear layers, norm, rotation, attention, MLP, block, GPT: a whole Qwen3
    II   cache, masks, kernels
    III  variants: positions, scalings, activations, norm placements
    IV   validation, accounting

    config = GPTConfig(n_layer=12, n_head=12, n_kv_head=4, n_embd=768)
    model = GPT(config)
    logits = model(idx)                          # (B, T) -> (B, T, vocab_size) float32
    loss, aux = model(idx, targets)              # mean cross entropy over targets that are not negative
    cache = model.make_cache(B, max_len)         # the caller's object
    logits = model(idx, cache=cache, keep=1)     # appends; logits of the last new token only

Three files have further layers and are imported if a config names one: mixers.py (other attentions, layers
with a state, bigrams, the prediction layer), experts.py (mixtures of experts), zoo/weights.py (adapters, 8
bits). Shapes in comments: B batch rows, T new tokens, S tokens to attend to,
C = n_embd, H query heads, K key/value heads, D = head_dim.
"""
import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import math
import typing
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# I. the decoder =============================================================================================

@dataclasses.dataclass
class GPTConfig:
    """Everything that defines a model, as plain data. A field that is None follows from others. A pattern has
    one letter per layer and is repeated. An annotation may name a table, whose keys are the choices. Brackets
    are rules for flags: see configurator.py. Raises ValueError that names all problems."""
    # a Qwen3
    block_size: int = 1024           # context: the maximum sequence length [changeable]
    vocab_size: int = 50304          # GPT-2's 50257 rounded up, as in nanoGPT
    n_layer: int = 12                # blocks
    n_head: int = 12                 # query heads
    n_kv_head: int | None = None     # key/value heads; None: n_head, 1: multi-query (arXiv:1911.02150),
                                     # between: grouped-query (arXiv:2305.13245)
    n_embd: int = 768                # width of the residual stream
    head_dim: int | None = None      # None: n_embd / n_head [if not kv_lora_rank]
    d_ff: int | None = None          # MLP width; None: 4 n_embd; if gated 8/3 n_embd up to a multiple of 64
    mlp: 'ACTIVATIONS' = 'swiglu'    # swiglu, geglu, gelu, gelu_tanh, relu2, ...: see ACTIVATIONS
    norm_eps: float = 1e-6           # inside the root
    rope_base: float = 10000.0       # pair i turns by position * base^(-2i / dimensions) [if pos == 'rope']
    qk_norm: bool | Literal['whole', 'rotated', 'unit'] | None = None  # norm on queries and keys: True (each
                                     # head, Qwen3), False, whole (all heads at once, OLMo 2), rotated (after
                                     # the rotation, Hunyuan), unit (rotated, without weights, only in layers
                                     # with rotations, Llama 4); None: True, in MLA False
    tie_word_embeddings: bool = True  # the head reads the embedding's rows (arXiv:1608.05859)
    dropout: float = 0.0             # on embedding, attention weights, branches [< 1] [changeable] [random]
    # positions
    pos: Literal['rope', 'alibi', 'learned', 'sinusoidal', 'none'] = 'rope'  # arXiv:2104.09864, 2108.12409,
                                     # GPT-2, arXiv:1706.03762
    pos_pattern: Literal['P', 'N'] = 'P'  # [if pos in ('rope', 'alibi')] P: as pos says, N: none; 'PPPN'
                                     # (SmolLM3)
    rope_scaling: dict | None = None  # [changeable] [if pos == 'rope'] {'rope_type': 'yarn', 'factor': 4.0},
                                     # ...: see ROPE_SCALINGS
    partial_rotary_factor: float = 1.0  # share of each head that rotates (GPT-J) [if pos == 'rope']
    alibi_scale: float = 1.0         # scale of ALiBi's slopes (Falcon) [if pos == 'alibi']
    document_token: int | None = None  # starts a document: no token sees earlier ones [changeable]
    # mixers: what mixes tokens in a block
    mixer_pattern: 'MIXERS | None' = None  # A attention, M latent attention, D Gated DeltaNet, C short
                                     # convolution, B Mamba-2, K Kimi Delta Attention; 'DDDA' (Qwen3-Next);
                                     # None: A, or M with kv_lora_rank
    # windows of attention
    window: int | None = None        # tokens that an S layer sees, its own among them [if window_pattern]
    window_pattern: Literal['S', 'L', 'C', 'G'] | None = None  # S: sliding window, L: all tokens; 'S'
                                     # (Mistral), 'SL' (Gemma 2); C: chunks of `window` tokens, which do not
                                     # see other chunks (Llama 4); G: as S, and global tokens for all
                                     # (Longformer, arXiv:2004.05150)
    window_global: int = 1           # a document's first tokens, for G [if 'G' in (window_pattern or '')]
    local: dict | None = None        # fields that S, C and G layers have otherwise: LOCAL [if window_pattern]
    # variants of attention
    attn_scale: float | None = None  # scale of the scores; None: 1 / sqrt(a head's width)
    attn_softcap: float = 0.0        # c * tanh(scores / c) (Gemma 2); 0 is off
    attn_sink: bool = False          # a learned logit for each head in the softmax's denominator (gpt-oss)
    attn_gate: bool | Literal['head'] = False  # the output times a projection's sigmoid (arXiv:2505.06708):
                                     # True: for each element, head: for each head
    clip_qkv: float = 0.0            # bound of queries, keys and values (OLMo 1.7); 0 is off
    k_eq_v: bool = False             # values are the keys, without their norm and rotation (Gemma 4)
    v_norm: bool = False             # a norm without weights on values (Gemma 4)
    query_scale: dict | None = None  # queries grow with their position (Llama 4): see query_scale
    # multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434)
    kv_lora_rank: int | None = None  # width of the latent; None: no MLA
    # further fields of MLA [if kv_lora_rank]
    q_lora_rank: int | None = None   # width of the compressed query; None: not compressed
    qk_nope_head_dim: int | None = None  # part of a head without positions; None: 128
    qk_rope_head_dim: int | None = None  # part with positions, one key for all heads; None: 64
    v_head_dim: int | None = None    # width of a head's value; None: 128
    latent_norm_eps: float | None = None  # eps of the norms on latent and compressed query; None: norm_eps
    # layers with a state, see mixers.py [if mixer_pattern.strip('AM')]
    linear_n_key_head: int | None = None  # query and key heads; None: n_head, in B 1
    linear_n_value_head: int | None = None  # value heads, n times as many; None: as many, in B n_embd / 32
    linear_key_head_dim: int | None = None  # None: n_embd // n_head; in B, as the state's size, 64
    linear_value_head_dim: int | None = None  # None: linear_key_head_dim, in B 64
    linear_conv_bias: bool | None = None  # bias of B's short convolution; None: True
    linear_conv_kernel_dim: int | None = None  # tokens that the short convolution sees; None: 4
    # norms, residual stream
    norm: Literal['rmsnorm', 'layernorm'] = 'rmsnorm'  # arXiv:1910.07467, 1607.06450
    norm_bias: bool | None = None    # None: layernorm follows bias, rmsnorm has none
    norm_weight: bool = True         # False: norms without weights (OLMo)
    norm_placement: 'NORM_PLACEMENTS' = 'pre'  # pre, post, output, sandwich, parallel, parallel_2
    embed_norm: bool = False         # a norm after the embedding (BLOOM)
    embed_scale: float | None = None  # scale of the embedding (Gemma: sqrt(n_embd), also if sinusoidal)
    bigram_size: int | None = None   # rows of a second embedding, of pairs of tokens (modded-nanogpt)
    residual_scale: float = 1.0      # scale of what attention and MLP add (Granite)
    residual_lambdas: bool = False   # learned weights of stream and embedding in front of each layer
    layer_scalar: bool = False       # a number that is not learned multiplies what a block returns (Gemma 4)
    # MLP, biases
    mlp_limit: float = 7.0           # bound of gate and up [if mlp == 'swiglu_oai']
    bias: bool = False               # biases of the linear layers, and of layernorm
    qkv_bias: bool | None = None     # bias of queries, keys, values (Qwen2); None: as bias
    proj_bias: bool | None = None    # bias of attention's output; None: as bias
    mlp_bias: bool | None = None     # bias of MLP, experts and router; None: as bias
    # mixture of experts (arXiv:1701.06538)
    n_expert: int | None = None      # experts that replace the MLP; None or 0: a dense model
    expert_pattern: Literal['E', 'D', 'N'] = 'E'  # E: experts, D: dense, N: no MLP, only a mixer (Nemotron-H)
    # further fields of experts [if n_expert]
    n_expert_active: int | None = None  # experts per token; None: 2
    n_shared_expert: int | None = None  # experts that all tokens use (arXiv:2401.06066), as one MLP
    shared_gate: bool = False        # shared experts times a projection's sigmoid [if n_shared_expert]
    d_expert: int | None = None      # an expert's width; None: d_ff
    n_dense_layer: int = 0           # first layers that keep the MLP (DeepSeek)
    expert_input_scale: bool = False  # the chosen experts' weights multiply their input (Llama 4)
    expert_norms: bool = False       # norms before the router and around experts and shared ones (Gemma 4)
    router: str = 'softmax'          # softmax (Mixtral), sigmoid (DeepSeek-V3, arXiv:2412.19437): ROUTERS
    norm_topk_prob: bool = True      # the chosen experts' weights sum to 1; from a single expert, whose
                                     # weight is then always 1, the router learns nothing
    routed_scaling_factor: float = 1.0  # factor on the chosen experts' weights
    n_group: int | None = None       # groups of experts (DeepSeek-V2)
    topk_group: int | None = None    # groups that a token may use [if n_group]
    balance_bias: bool = False       # a bias in choosing that follows the load (arXiv:2408.15664)
    balance_per_sequence: bool = False  # balance loss for each row of the batch [changeable]
    # head, training
    head_bias: bool = False          # bias of an untied head (GPT-J, Phi) [if not tie_word_embeddings]
    logit_scale: float = 1.0         # scale of the logits (Cohere, Granite)
    logit_softcap: float = 0.0       # c * tanh(logits / c) (Gemma 2); 0 is off
    mtp: bool = False                # one more layer predicts the token after the next: MultiTokenPrediction

    def __post_init__(self):
        complete(self)  # each None becomes its default; part IV rejects what cannot be computed

    def at(self, layer):
        """The config as a layer has it, with the fields of `local` if it has a window."""
        if not self.local or self.window_of(layer) is None:
            return self
        own = copy.copy(self)
        vars(own).update(self.local)
        return own

    def mixer_of(self, layer):
        """The letter in MIXERS of a layer."""
        return letter(self.mixer_pattern, layer)

    @property
    def mixers(self):
        """The classes of its layers' mixers, each once."""
        return [MIXERS[kind] for kind in dict.fromkeys(self.mixer_pattern)]

    def window_of(self, layer):
        """The window of a layer; None: it sees all."""
        slides = self.window_pattern and letter(self.window_pattern, layer) != 'L'
        return self.window if slides and MIXERS[self.mixer_of(layer)].can_slide else None

    def mlp_of(self, layer):
        """E: experts, D: a dense MLP, N: none."""
        kind = letter(self.expert_pattern, layer)
        return 'D' if kind == 'E' and (self.n_expert is None or layer < self.n_dense_layer) else kind

    @property
    def rope_dim(self):
        """Dimensions of a head that rotate, if any do."""
        return self.qk_rope_head_dim or int(self.head_dim * self.partial_rotary_factor)

    @property
    def rope_kind(self):
        """(base, dimensions that rotate, items of the scaling); layers in which these are equal share cos and
        sin."""
        items = tuple((name, tuple(value) if isinstance(value, list) else value)
                      for name, value in (self.rope_scaling or {}).items())
        return self.rope_base, self.rope_dim, items


def letter(pattern, layer):
    """A layer's letter in a pattern."""
    return pattern[layer % len(pattern)]


# parameters and linear layers -------------------------------------------------------------------------------

class Tag(typing.NamedTuple):
    """What a parameter is, noted where it is made."""
    init: typing.Callable          # fills it with its initial value, in place, as torch.nn.init's do
    group: str                     # one of GROUPS
    rows: tuple | None = None      # of a matrix: row counts of the projections fused in it; None: it is one


GROUPS = {  # of parameters, each with settings of its own in the optimizer -> whether its weights decay
    'matrix': True,  # rows x columns, or a stack of such, which Muon may orthogonalise
    'embedding': True, 'bigram': True, 'head': True, 'gate': True, 'adapter': True,
    'vector': False, 'scalar': False,
}


def tag(w, init, group, rows=None):
    """Gives a parameter its Tag; returns the parameter."""
    w.tag = Tag(init, group, rows)
    return w


def parameter(*shape, init, group, rows=None):
    """A new parameter with its tag."""
    return tag(nn.Parameter(torch.full(shape, math.nan)), init, group, rows)  # NaN until init has filled it


def hidden_init(w):
    """Normal, std sqrt(1 / (3 columns)): 0.02 at 768 columns."""
    nn.init.normal_(w, std=(3 * w.shape[-1]) ** -0.5)


def branch_init(config):
    """The init of the output projection of attention or MLP: zeros, so that a block starts as the identity;
    hidden_init if a norm follows, whose gradient at zero is 1 / sqrt(eps)."""
    return hidden_init if NORM_PLACEMENTS[config.norm_placement][2] else nn.init.zeros_


class Linear(nn.Linear):
    """x (..., n_in) -> (..., n_out)"""

    def __init__(self, n_in, n_out, bias=False, init=hidden_init, group='matrix', rows=None):
        super().__init__(n_in, n_out, bias=bias)
        tag(self.weight, init, group, rows)
        if bias:
            tag(self.bias, nn.init.zeros_, 'vector')


class FusedLinear(Linear):
    """Several projections as one matrix, whose rows they are: x (..., n_in) -> a tensor (..., width) for each
    of widths. names: names of the projections, in one string, for bench.py's tables."""

    def __init__(self, n_in, widths, names, bias=False):
        super().__init__(n_in, sum(widths), bias, rows=widths)
        self.widths = widths
        self.names = names

    def forward(self, x):
        return super().forward(x).split(self.widths, dim=-1)


class Embedding(nn.Embedding):
    """idx (...) -> (..., width)"""

    def __init__(self, rows, width, init, group='embedding'):
        super().__init__(rows, width)
        tag(self.weight, init, group)

    def as_head(self, x):
        """x (..., width) -> logits (..., rows)"""
        return F.linear(x, self.weight)

    def reset_parameters(self):
        if not self.weight.is_meta:  # on meta normal_ would import the compiler, in a second or two
            super().reset_parameters()


# norm and rotation ------------------------------------------------------------------------------------------

class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, in float32; the result in x's dtype."""

    def __init__(self, width, config, is_unit=False, eps=None):
        super().__init__()
        has_weight = config.norm_weight and not is_unit
        has_bias = config.norm_bias and not is_unit
        self.weight = parameter(width, init=nn.init.ones_, group='vector') if has_weight else None
        self.bias = parameter(width, init=nn.init.zeros_, group='vector') if has_bias else None
        self.kind = config.norm
        self.eps = eps or config.norm_eps

    def forward(self, x):
        weight, bias = (None if w is None else w.float() for w in (self.weight, self.bias))
        if self.kind == 'layernorm':
            return F.layer_norm(x.float(), x.shape[-1:], weight, bias, self.eps).type_as(x)
        y = F.rms_norm(x.float(), x.shape[-1:], weight, self.eps)
        return (y if bias is None else y + bias).type_as(x)


def rope_table(kind, position_ids, length):
    """cos and sin, each (1 or B, 1, T, dimensions / 2) float32, of the angles at position_ids (1 or B, T):
    position p turns pair i by p * base^(-2i / dimensions), RoFormer, arXiv:2104.09864, equation 15. kind:
    (base, dimensions, items of a scaling); length: of the context, for scalings."""
    base, width, scaling = kind
    pair = torch.arange(0, width, 2, device=position_ids.device)
    freq = 1.0 / base ** (pair / width)
    factor = 1.0
    if scaling:
        options = dict(scaling)
        freq, factor = ROPE_SCALINGS[options.pop('rope_type')](freq, base, length, **options)
    angle = position_ids[:, None, :, None] * freq
    # one tensor first: a compiled step would compute angles again in each layer
    return torch.cat((angle.cos() * factor, angle.sin() * factor), dim=1).split(1, dim=1)


def rotate(x, rope):
    """x (B, heads, T, D) with its first dimensions rotated by rope = (cos, sin), each (1 or B, 1, T, pairs).
    Pair i is x[i], x[i + pairs], as in Llama; checkpoints in GPT-J's layout are permuted when read."""
    if rope is None:
        return x
    cos, sin = rope
    pairs = cos.shape[-1]
    a, b, rest = x.split((pairs, pairs, x.shape[-1] - 2 * pairs), dim=-1)
    a = a.float()
    b = b.float()
    return torch.cat(((a * cos - b * sin).type_as(x), (b * cos + a * sin).type_as(x), rest), dim=-1)


# attention --------------------------------------------------------------------------------------------------

class Mixer(nn.Module):
    """What mixes the tokens of a row in a block: attention, Gated DeltaNet, yours. Part II has the contract.
    forward(x, context): x (B, T, C), ForwardContext -> (B, T, C)."""

    slots = states = ()                       # what it caches for each token; what it caches for a row
    mask_kind = rope_kind = window = None     # which mask and rotation of the context it uses
    documents = can_slide = False             # it keeps documents apart; it can have a window

    @classmethod
    def defaults(cls, config):
        """Field of GPTConfig -> the value that None stands for in a model with such a layer."""
        return {}

    @classmethod
    def check(cls, config):
        """What it cannot compute: pairs ('field other_field', reason)."""
        return ()

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer  # make_schedule sets place, among its block's mixers

    def entry(self, context):
        """The number of its entry in a cache; a block that computes twice has two."""
        return context.base + self.place


class BaseAttention(Mixer):
    """What all kinds of attention share. head_widths: of a head's key and of its value, for flops."""

    documents = can_slide = True

    def __init__(self, config, layer):
        super().__init__(config, layer)
        pos = letter(config.pos_pattern, layer)
        window = config.window_of(layer)
        self.reach = letter(config.window_pattern, layer) if window else 'L'
        self.window = None if self.reach == 'G' else window  # G keeps all slots
        self.has_alibi = config.pos == 'alibi' and pos == 'P'
        self.rope_kind = config.rope_kind if config.pos == 'rope' and pos == 'P' else None
        self.n_head = config.n_head
        self.config = config
        self.sink = parameter(self.n_head, init=nn.init.zeros_, group='vector') if config.attn_sink else None

    @property
    def mask_kind(self):
        """The key of its mask in the context."""
        return self.window, self.has_alibi, self.reach

    def attend(self, q, k, v, context):
        """q (B, H, T, D), k, v (B, K, S, D) -> (B, H, T, D)"""
        if self.config.query_scale:
            q = scale_queries(self, q, context)
        p = self.config.dropout if self.training else 0.0
        return attend(q, k, v, context, context.masks[self.mask_kind], self.scale, p,
                      self.config.attn_softcap, self.sink)

    def flops(self, length):
        # the masked half is counted too: PaLM, arXiv:2204.02311, appendix B
        return 6 * self.n_head * sum(self.head_widths) * min(length, self.window or length)


class Attention(BaseAttention):
    """Multi-head, grouped-query or multi-query attention, by n_kv_head. mixers.py has one with options."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        C = config.n_embd
        H = config.n_head
        K = config.n_kv_head
        D = config.head_dim
        self.c_attn = FusedLinear(C, (H * D, K * D, K * D), 'q k v', config.qkv_bias)
        self.c_proj = Linear(H * D, C, config.proj_bias, init=branch_init(config))
        self.q_norm = Norm(D, config) if config.qk_norm else nn.Identity()
        self.k_norm = Norm(D, config) if config.qk_norm else nn.Identity()
        self.scale = config.attn_scale or D ** -0.5
        self.head_widths = D, D
        self.slots = [(K, D), (K, D)]

    def forward(self, x, context):
        D = self.head_widths[0]
        q, k, v = self.c_attn(x)
        q = self.q_norm(q.unflatten(-1, (-1, D))).flatten(2)                        # each head by itself
        k = self.k_norm(k.unflatten(-1, (-1, D))).flatten(2)
        q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))     # (B, H or K, T, D)
        rope = context.ropes[self.rope_kind]
        q = rotate(q, rope)
        k = rotate(k, rope)
        if context.cache is not None:  # all keys and values so far, (B, K, S, D)
            k, v = context.cache.append(self, context, k, v)
        y = self.attend(q, k, v, context)                                           # (B, H, T, D)
        return self.c_proj(y.transpose(1, 2).flatten(2))


MIXERS = {  # letter in mixer_pattern: class; others enter themselves below, and in mixers.py
    'A': Attention,
}


# MLP and block ----------------------------------------------------------------------------------------------

def gated(act):
    """An entry of ACTIVATIONS: act(gate) * up, arXiv:2002.05202."""
    return lambda gate, up: act(gate) * up, True


gelu_tanh = functools.partial(F.gelu, approximate='tanh')
ACTIVATIONS = {
    # name: (function, or class of a module, made with the config; whether it takes gate and up)
    'swiglu': gated(F.silu),
    'geglu': gated(F.gelu),
    'geglu_tanh': gated(gelu_tanh),  # Gemma's
    'reglu': gated(F.relu),
    'glu': gated(torch.sigmoid),
    'gelu': (F.gelu, False),  # the exact one, by erf
    'gelu_tanh': (gelu_tanh, False),  # OpenAI GPT-2's
    'relu': (F.relu, False),
    'relu2': (lambda x: F.relu(x).square(), False),  # Primer, arXiv:2109.08668
    'silu': (F.silu, False),
}


def activation(config):
    """-> (the activation of config.mlp, how many projections it takes). An entry that is a class is made."""
    act, is_gated = ACTIVATIONS[config.mlp]
    return act(config) if isinstance(act, type) else act, 2 if is_gated else 1


class MLP(nn.Module):
    """x (..., C) -> (..., C): down(act(up(x))), or gated: down(act(gate(x), up(x)))."""

    def __init__(self, config, width):
        super().__init__()
        self.act, n = activation(config)
        self.c_fc = FusedLinear(config.n_embd, (width,) * n, 'gate up', config.mlp_bias)
        self.c_proj = Linear(width, config.n_embd, config.mlp_bias, init=branch_init(config))

    def forward(self, x, context=None):
        return self.c_proj(self.act(*self.c_fc(x)))


class Block(nn.Module):
    """A mixer, then an MLP or experts, each behind a norm (GPT-2, Llama). VariantBlock adds options."""

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = Norm(config.n_embd, config)
        self.attn = make_mixer(config, layer)
        self.ln_2 = Norm(config.n_embd, config)
        self.mlp = make_mlp(config, layer)
        self.p = config.dropout

    def forward(self, x, context):
        """x (B, T, C) -> (B, T, C)"""
        x = x + self.branch(self.attn(self.ln_1(x), context))
        return x + self.branch(self.mlp(self.ln_2(x), context))

    def branch(self, y):
        return F.dropout(y, self.p) if self.training and self.p else y


# the model --------------------------------------------------------------------------------------------------

class GPT(nn.Module):
    """The decoder. Raises ValueError if a module of it has parameters without a tag."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        tied = config.tie_word_embeddings
        C = config.n_embd
        # with a tied head a token's logit for itself starts at n_embd * std
        init = functools.partial(nn.init.normal_, std=min(0.02, 4 / C) if tied else 0.02)
        self.wte = Embedding(config.vocab_size, C, init)
        self.wpe = Embedding(config.block_size, C, init) if config.pos == 'learned' else None
        self.bigram = further_layer('BigramEmbedding', config) if config.bigram_size else None
        self.ln_embd = Norm(C, config) if config.embed_norm else nn.Identity()
        self.h = nn.ModuleList(make_block(config, layer) for layer in range(config.n_layer))
        self.mtp = further_layer('MultiTokenPrediction', config) if config.mtp else None
        if config.residual_lambdas:
            self.resid_lambdas = parameter(config.n_layer, init=nn.init.ones_, group='scalar')
            self.x0_lambdas = parameter(config.n_layer, init=nn.init.zeros_, group='scalar')
        self.ln_f = nn.Identity() if config.norm_placement == 'post' else Norm(C, config)
        self.lm_head = None if tied else Linear(
            C, config.vocab_size, config.head_bias, nn.init.zeros_, 'head')
        # (block, number of its first mixer in a cache), in the order in which the blocks compute
        self.schedule, self.mixers = make_schedule(self, range(config.n_layer))
        self.tags = collect_tags(self)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Fills every parameter as its tag says: `python bench.py params` lists them."""
        for name, w in self.named_parameters():
            if not w.is_meta:
                self.tags[name].init(w)
                if w.isnan().any():
                    raise ValueError(f"{name} holds NaN after its init, which must fill the tensor in place")

    def forward(self, idx, targets=None, cache=None, keep=None, lengths=None, weights=None):
        """idx (B, T) int64 -> logits (B, T or keep, vocab_size) float32; with targets (B, T), ignored where
        negative, the mean cross entropy and aux, none of it in the loss: of experts 'balance' and 'z' (0-d,
        means over the layers) and 'load' (layers, experts), choices made; with mtp, in training, the extra
        layer's loss 'mtp' (0-d). A cache takes the tokens; lengths (B,): how many of the T are each row's
        own; padding follows. keep: logits of each row's last tokens only; with targets these are
        aux['logits']. weights: a list that takes each attention layer's, (B, H, T, S). Raises ValueError if
        the tokens do not fit into block_size or the cache."""
        T = idx.shape[1]
        if self.config.block_size < T:
            raise ValueError(f"{T} tokens do not fit into block_size={self.config.block_size}")
        # positions, rotations and masks, which the layers share: part II
        context = make_context(self, idx, cache, lengths, weights, routing=None if targets is None else [])
        x0 = self.embed(context)
        x = self.blocks(x0, context)                                                              # (B, T, C)
        if cache is not None:
            cache.advance(T, lengths)
        if targets is None:
            return self.head(last_tokens(x, keep, lengths))
        loss, last = self.loss(x, targets, keep, lengths)
        aux = {} if keep is None else {'logits': last}
        if context.routing:
            from experts import routing_losses
            aux |= routing_losses(context.routing)
        if self.mtp is not None and self.training:
            aux['mtp'] = self.mtp.loss(self, x, x0, targets, context)
        return loss, aux

    def embed(self, context):
        """-> (B, T, C), what the first block gets."""
        config = self.config
        x = self.wte(context.idx)
        if config.embed_scale != 1:
            x = x * config.embed_scale
        if self.bigram is not None:
            x = x + self.bigram(context)
        if self.wpe is not None:
            # padding may be beyond the last position
            x = x + self.wpe(context.position_ids.clamp(max=config.block_size - 1))
        if config.pos == 'sinusoidal':
            x = x + sinusoid(context.position_ids, config.n_embd).type_as(x)
        x = self.ln_embd(x)
        # under float16 the residual stream stays float32: no overflow
        x = x.bfloat16() if context.dtype is torch.bfloat16 else x
        return F.dropout(x, config.dropout, self.training)

    def blocks(self, x0, context):
        """x0 (B, T, C) through the blocks, (B, T, C)"""
        enter, leave = streams(self.config)
        x = enter(x0)
        for i, context.base in self.schedule:
            if self.config.residual_lambdas:
                x = self.resid_lambdas[i].type_as(x) * x + self.x0_lambdas[i].type_as(x) * x0
            x = self.h[i](x, context).type_as(x)
        return leave(x)

    def head(self, x):
        """x (B, T, C) from the last block -> logits (B, T, vocab_size) float32."""
        x = self.ln_f(x)
        head = self.lm_head or self.wte
        scale = self.config.logit_scale
        cap = self.config.logit_softcap
        if self.training and x.is_cuda and len(head.weight) % 64:
            logits = aligned_linear(x, head.weight, getattr(head, 'bias', None))
        else:
            logits = (self.lm_head or self.wte.as_head)(x)
        logits = logits.float() if scale == 1 else logits.float() * scale
        return cap * torch.tanh(logits / cap) if cap else logits

    def loss(self, x, targets, keep=None, lengths=None):
        """x as head takes it -> the mean cross entropy, 0-d, and with keep the logits of each row's last
        tokens. LOSSES of train.py has the losses that training adds. Each block of a sharded model is a
        compiled graph: this is another, and keeps its logits."""
        logits = self.head(x)
        return cross_entropy(logits, targets), None if keep is None else last_tokens(logits, keep, lengths)

    def compute_dtype(self):
        """The dtype that matmuls run in."""
        w = self.wte.weight
        if torch.is_autocast_enabled(w.device.type):
            return torch.get_autocast_dtype(w.device.type)
        return getattr(self.wte, 'scale', w).dtype  # in 8 bits the scales' dtype, see zoo/weights.py

    def make_cache(self, batch_size, max_len, static=False, rolling=True):
        """An empty Cache in the compute dtype. static: for a compiled step; rolling: layers with a window
        keep only that; False: all tokens, so that rewind can take any back."""
        return Cache(self, batch_size, max_len, static, rolling)


# II. cache, masks, kernels ==================================================================================

class ForwardContext:
    """What all layers of one forward pass share, and the contract of a Mixer.

    A mixer is a class with a letter in MIXERS; put the letter into the grid of test_model.py. For another
    attention the shortest way is a subclass of Attention that overrides attend(q, k, v, context), where query
    head h, of H, goes with key head h // (H / K), and head_widths if its products are wider.

    forward(x, context): x (B, T, C) -> (B, T, C). Tokens must not see later ones. From the context it takes
    - ropes[self.rope_kind], for rotate(). rope_kind is (base, dimensions that rotate, items of a scaling), or
      None; the config's own is config.rope_kind, and (500.0, config.rope_dim, ()) is one without scaling;
    - masks[self.mask_kind]; mask_kind is (window, whether ALiBi's bias is in it, a letter of window_pattern),
      or None;
    - cache, None in training. A mixer sets in __init__ what it keeps there: `slots`, (heads, width) of each
      tensor that has a slot for each token: cache.append(self, context, k, v) takes the new ones, (B, heads,
      T, width), and returns all to attend to; `states`, (shape, dtype or None for the compute dtype) of each
      tensor of fixed size that a row keeps: read cache.states[self.entry(context)], a list of (B, *shape),
      zero for a new row, and write with .copy_(), or call mixers.after_last for a few tokens back. A mixer
      that keeps nothing, because it reads another's, sets slots = None;
    - lengths, if padding follows rows: padding must not change a state;
    - document_starts: tokens must not see those of another document. A mixer that keeps documents apart sets
      `documents`; a document_token rejects others;
    - handed: what earlier layers hand on by context.hand_on(self.layer, value).

    flops(length): training FLOPs per token, 3 times the forward pass's, at a sequence length, without those
    of weights. Parameters are made by parameter(...) or tag(...); c_proj ends the branch. `window` is how
    many tokens the slots are for, None for all; a class that can have a window sets `can_slide`, and asks
    config.window_of(layer)."""
    idx: torch.Tensor             # (B, T), the new tokens' ids; any in padding
    positions: torch.Tensor       # (1 or B, T), in their rows: for masks and the cache
    position_ids: torch.Tensor    # the same, counted from each document's start: for rotations
    document_starts: torch.Tensor | None  # (B, T): where the tokens' documents start; None: 0
    ropes: dict                   # a mixer's rope_kind -> (cos, sin), each (1 or B, 1, T, pairs), or None
    masks: dict                   # a mixer's mask_kind -> Mask
    cache: 'Cache | None'
    lengths: torch.Tensor | None  # (B,): new tokens of each row, which padding follows; None: all T
    base: int                     # the number of the block's first mixer in a cache: see make_schedule
    eager: bool                   # attention is to be written out, not left to a kernel
    dtype: torch.dtype            # that matmuls run in
    weights: list | None          # takes each attention layer's weights, (B, H, T, S)
    routing: list | None          # takes number, balance, z and load of each layer with experts
    handed: dict                  # layer -> what it has handed on

    def __init__(self, **values):
        vars(self).update(values, handed={})  # no dataclass: FSDP would give each block its own copy

    def hand_on(self, layer, value):
        """Makes `value`, a tensor or a tuple of tensors, handed[layer] for the layers after it. With a cache,
        keys and values that others attend to are cache.append's results, of all tokens; the layers that read
        them have the same window, and slots = None. A value of only the new tokens is for layers that keep
        the earlier ones in slots or states of their own."""
        if layer in self.handed:
            raise ValueError(f"layer {layer} has handed on its value already: later layers may have read it")
        self.handed[layer] = value

    def is_token(self):
        """(B, T) bool: False for padding; None if there is none."""
        if self.lengths is None:
            return None
        return torch.arange(self.positions.shape[1], device=self.lengths.device) < self.lengths[:, None]


def make_context(model, idx, cache=None, lengths=None, weights=None, routing=None):
    """The ForwardContext of the new tokens idx (B, T): positions, rotations, masks."""
    T = idx.shape[1]
    config = model.config
    device = idx.device
    positions = torch.arange(T, device=device)[None] if cache is None else cache.positions(T, lengths)
    # on a CPU SDPA's backward takes 1.5 to 2 times as long, 3 times with dropout
    eager = bool(weights is not None or config.attn_softcap or config.attn_sink
                 or device.type == 'cpu' and torch.is_grad_enabled())
    context = ForwardContext(idx=idx, positions=positions, position_ids=positions, document_starts=None,
                             ropes={}, masks={}, cache=cache, lengths=lengths, base=0, eager=eager,
                             dtype=model.compute_dtype(), weights=weights, routing=routing)
    if config.document_token is not None:
        context.document_starts = find_starts(context, config.document_token)
        context.position_ids = positions - context.document_starts
    # of each kind that layers have, None among them
    for kind in dict.fromkeys(mixer.rope_kind for mixer in model.mixers):
        context.ropes[kind] = kind and rope_table(kind, context.position_ids, config.block_size)
    for kind in dict.fromkeys(mixer.mask_kind for mixer in model.mixers):
        context.masks[kind] = kind and make_mask(model, context, *kind)
    return context


def find_starts(context, document_token):
    """(B, T): the position where each new token's document starts: its last document_token, or 0."""
    positions = context.positions
    cache = context.cache
    starts_here = context.idx == document_token
    if context.lengths is not None:  # padding starts none: a state would forget its document
        starts_here = starts_here & context.is_token()
    start = torch.where(starts_here, positions, 0).cummax(dim=1).values
    if cache is not None:
        before = cache.starts.gather(1, (cache.length[:, None] - 1).clamp(min=0))  # (B, 1)
        start = torch.maximum(start, before)
        cache.starts.scatter_(1, positions.clamp(max=cache.max_len).expand_as(start), start)
    return start


def make_schedule(model, turns):
    """turns: numbers of blocks, in the order in which they compute. Returns for each turn (block, number of
    its first mixer in a cache), and the mixers in a cache's order, outside the blocks last; sets places."""
    schedule = []
    mixers = []

    def take(module, base):
        for part in module.modules():
            if isinstance(part, Mixer):
                part.place = len(mixers) - base
                mixers.append(part)

    for i in turns:
        schedule.append((i, len(mixers)))
        take(model.h[i], len(mixers))
    for part in model.children():
        if part not in (model.h, model.mtp):
            take(part, 0)
    return schedule, mixers


# cache ------------------------------------------------------------------------------------------------------

class Cache:
    """The tokens so far, as each layer keeps them. For each mixer in its turn `slots` has a list of tensors
    (B, heads, number of slots + 1, width), its KV cache, and `states` a list of tensors (B, ...). The slot of
    a token is its position. In a rolling KV cache, which holds only a window, it is its position modulo the
    number of slots:

        max_len 6, rows of 3 and 5 tokens      window 4, a row of 6 tokens
        slot   0  1  2  3  4  5 | 6            slot   0  1  2  3 | 4
        row 0  a  b  c  .  .  . |              row 0  e  f  c  d |
        row 1  a  b  c  d  e  . |

    The last slot takes padding; nothing reads it. `length` (B,) counts each row's tokens, `longest` is their
    maximum, on the host, and `same_length` says that all are alike. If `static`, only tensors change, so that
    one compiled step serves every position: the caller keeps count, `longest` is max_len, and each step
    attends to all slots, empty ones masked."""

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
        # the position where each position's document starts, and a last column for padding
        self.starts = zeros(batch_size, (max_len + 1) * (config.document_token is not None), dtype=torch.long)
        self.slots = [[zeros(batch_size, heads, self.n_slots(mixer.window) + 1, width, dtype=dtype)
                       for heads, width in mixer.slots or ()] for mixer in model.mixers]
        self.states = [[zeros(batch_size, *shape, dtype=own or dtype) for shape, own in mixer.states]
                       for mixer in model.mixers]
        for mixer in model.mixers:
            if not (mixer.slots or mixer.states or mixer.slots is None):
                raise ValueError(f"{type(mixer).__name__} of layer {mixer.layer} sets neither slots nor "
                                 "states, so that nothing of it can be cached: see ForwardContext")

    def n_slots(self, window):
        """The number of tokens that a layer with this window keeps."""
        return min(window, self.max_len) if self.rolling and window else self.max_len

    def append(self, mixer, context, *new):
        """Takes a mixer's new tensors (B, heads, T, width); returns all to attend to, (B, heads, S, ...),
        whose positions key_positions has."""
        slots = self.slots[mixer.entry(context)]
        T = new[0].shape[2]
        n_slots = slots[0].shape[2] - 1
        seen = None
        if T > 1 and n_slots < self.max_len:  # the first of the tokens sees what the last will overwrite
            seen = [torch.cat((old[:, :, :min(self.longest, n_slots)], add), dim=2)
                    for old, add in zip(slots, new)]
        self.write(slots, new, context)
        return seen or [old[:, :, :min(self.longest + T, n_slots)] for old in slots]

    def write(self, slots, new, context):
        """Puts the new tensors into their slots."""
        T = new[0].shape[2]
        n_slots = slots[0].shape[2] - 1
        start = self.longest % n_slots
        if self.same_length and context.lengths is None and start + T <= n_slots:
            for old, add in zip(slots, new):  # adjacent slots: saves a tenth of an eager step
                old[:, :, start:start + T] = add
            return
        column = torch.arange(T, device=self.length.device)
        row = torch.arange(len(self.length), device=self.length.device)
        end = T if context.lengths is None else context.lengths[:, None]
        kept = (column < end) & (column >= end - n_slots)  # no padding, and of a long text its end
        slot = (context.positions % n_slots).where(kept, n_slots)
        for old, add in zip(slots, new):
            old[row[:, None], :, slot] = add.transpose(1, 2).to(old.dtype)

    def key_positions(self, window, positions):
        """(1 or B, S): the positions of what append returns in a layer with this window; -1 for an empty
        slot. positions (1 or B, T): of the new tokens."""
        n_slots = self.n_slots(window)
        T = positions.shape[1]
        slot = torch.arange(n_slots, device=positions.device)[None]
        if n_slots == self.max_len:
            return slot[:, :self.longest + T]
        last = positions[:, :1] - int(T > 1)  # the last token in a slot: see append
        held = (last - (last - slot) % n_slots).clamp(min=-1)  # the last position that falls to each slot
        if T == 1:
            return held[:, :self.longest + 1]
        return torch.cat((held[:, :self.longest], positions), dim=1)

    def positions(self, T, lengths):
        """Positions of the next T tokens, (1 or B, T). Raises ValueError if they do not fit."""
        if lengths is not None or not self.static:
            longest = self.longest + T if lengths is None else int((self.length + lengths).max())
            if longest > self.max_len:
                raise ValueError(f"cache is full: {longest} tokens into {self.max_len} slots; "
                                 "make_cache with a larger max_len")
        start = self.longest if self.same_length else self.length[:, None]
        return start + torch.arange(T, device=self.length.device)[None]

    def advance(self, T, lengths):
        """Counts the tokens that have been appended."""
        self.length += T if lengths is None else lengths
        if lengths is not None:
            self._recount()
        elif not self.static:
            self.longest += T

    def rewind(self, n):
        """Takes the last n tokens back: an int for all rows, or (B,) one number per row. Raises ValueError
        for a layer that keeps no earlier tokens: with a state, or a rolling KV cache that has wrapped."""
        kept = 0 if any(self.states) else min(layer[0].shape[2] for layer in self.slots if layer) - 1
        if ((n > 0) & (self.length > kept)).any():
            raise ValueError(f"cannot rewind {n} of {self.length.tolist()} tokens: a layer keeps only a "
                             "state or a window (for a window: rolling=False)")
        self.length -= n
        self._recount()

    def reset(self):
        """Empties all rows."""
        for tensor in [self.length, *itertools.chain(*self.states)]:
            tensor.zero_()
        self._recount()

    def select(self, rows):
        """Keeps, reorders or copies rows: a list or (B',) of row numbers."""
        self.slots, self.states = ([[tensor[rows] for tensor in layer] for layer in layers]
                                   for layers in (self.slots, self.states))
        self.length = self.length[rows]
        self.starts = self.starts[rows]
        self._recount()

    def put(self, rows, other):
        """Replaces rows by those of another cache with as many slots."""
        for mine, theirs in zip(self.tensors(), other.tensors()):
            mine[rows] = theirs
        self._recount()

    def _recount(self):
        if not self.static:
            self.longest = int(self.length.max())
            self.same_length = int(self.length.min()) == self.longest

    def tensors(self):
        """All tensors that a step changes, for CUDA graphs."""
        return [self.length, self.starts, *itertools.chain(*self.slots, *self.states)]


def last_tokens(x, keep, lengths):
    """x (B, T, ...) -> (B, keep, ...): the last `keep` tokens of each row; None: all."""
    if keep is None:
        return x
    if lengths is None:
        return x[:, max(0, x.shape[1] - keep):]
    column = (lengths[:, None] - keep + torch.arange(keep, device=x.device)).clamp(min=0)
    return x[torch.arange(len(x), device=x.device)[:, None], column]


# masks ------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Mask:
    """Which keys each query sees, in the layers of one kind. A mixer that hides more calls add."""
    bias: torch.Tensor | None     # (1 or B, 1 or H, T, S), -inf where hidden, added to the scores; None: 0
    is_causal: bool               # the keys are the queries' own tokens, T == S; no query sees later ones
    window: int | None            # the most keys that a query sees; None: all
    # the same for flex_attention, see flex_mask; a copy with another bias has none
    flex: tuple | None = None

    def add(self, bias):
        """A Mask with another bias added, (1 or B, 1 or H, T, S): -inf hides a key; each query keeps one."""
        if self.bias is not None:
            bias = bias + self.bias
        elif self.is_causal:  # which a kernel then does not do
            bias = bias.masked_fill(torch.ones_like(bias, dtype=torch.bool).triu(1), -math.inf)
        return Mask(bias, self.is_causal, self.window)


def visible(q_pos, k_pos, first):
    """From absolute positions: q_pos (1 or B, T), k_pos (1 or B, S), -1 for an empty slot -> (1 or B, 1, T,
    S) bool. A token sees itself and what came before, from `first` (1 or B, T) on."""
    return ((k_pos[:, None] <= q_pos[:, :, None]) & (k_pos[:, None] >= first[:, :, None]))[:, None]


def make_mask(model, context, window, biased, reach):
    """The Mask of the layers with this window in the cache, None for all. biased: ALiBi's bias is in it;
    reach: a letter of window_pattern."""
    config = model.config
    positions = context.positions
    cache = context.cache
    is_causal = cache is None or cache.longest == 0  # nothing cached: the keys are the new tokens
    span = config.window if reach == 'G' else window  # the most tokens that a token sees, itself among them
    if not biased and context.document_starts is None and needs_no_mask(context, is_causal, span, reach):
        return Mask(None, is_causal, None)

    k_pos = positions if cache is None else cache.key_positions(window, positions)
    begin = torch.zeros_like(positions) if context.document_starts is None else context.document_starts
    # how much older than a token the first that it sees may be
    age = context.position_ids % window if reach == 'C' else (span or config.block_size) - 1
    first = (positions - age).clamp(min=begin)
    if cache is not None:  # padding beyond the cache sees its last slot: a row without keys is NaN
        first = first.clamp(max=cache.max_len - 1)
    seen = visible(positions, k_pos, first)
    if reach == 'G':
        is_global = k_pos[:, None, None] < begin[:, None, :, None] + config.window_global
        seen = seen | visible(positions, k_pos, begin) & is_global
    slopes = alibi_slopes(config.n_head, positions.device) * config.alibi_scale if biased else None
    bias = torch.zeros((), dtype=context.dtype, device=positions.device)
    if biased:
        distance = (positions[:, :, None] - k_pos[:, None])[:, None]  # (1 or B, 1, T, S)
        bias = (-slopes[:, None, None] * distance).to(context.dtype)
    flex = flex_mask(first, slopes) if reach != 'G' and use_flex(model, context) else None
    return Mask(bias.where(seen, -math.inf), is_causal, window, flex)


def needs_no_mask(context, is_causal, span, reach):
    """Whether each token sees all keys that it is given, or all up to itself, for which SDPA has a mask."""
    cache = context.cache
    T = context.positions.shape[1]
    sees_all = span is None or (0 if cache is None else cache.longest) + T <= span
    if T == 1 and cache and cache.same_length and context.lengths is None:
        return sees_all or cache.rolling and reach == 'S'
    return is_causal and sees_all and not context.eager


# kernels ----------------------------------------------------------------------------------------------------

def attend(q, k, v, context, mask, scale, p, softcap, sink):
    """softmax(scale q k^T + bias) v, with dropout p on the weights, by the first path that can compute it.
    q (B, H, T, D); k (B, K, S, D); v (B, K, S, D'), K dividing H -> (B, H, T, D')."""
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    bias = mask.bias
    group = H // K
    # with a window a block takes its part of the keys, a kernel all of them
    if context.eager or mask.is_causal and mask.window and q.device.type == 'cpu' and T > BLOCK:
        return eager_attention(q, k, v, mask, scale, p, softcap, sink, context.weights)
    if mask.flex is not None and min(D, v.shape[-1]) >= 16:  # it has no narrower heads
        from torch.nn.attention.flex_attention import flex_attention
        return flex_attention(q, k, v, *mask.flex, scale, enable_gqa=group > 1)
    is_causal = bias is None and mask.is_causal and T > 1
    if (group * T <= FEW_QUERIES and torch.compiler.is_compiling()
            and (bias is not None or q.device.type == 'cpu' and not is_causal)):
        return eager_attention(q.float(), k.float(), v.float(), mask, scale, p, few=True).type_as(v)
    sharing, use_cudnn = sdpa_plan(q.device.type, q.dtype, v.shape[-1] == D <= 256, is_causal)
    if group > 1 and sharing == 'rows':
        q = q.reshape(B, K, group * T, D)
        if bias is not None:  # (1 or B, 1 or K, H / K T, S)
            bias = bias.expand(-1, max(bias.shape[1], group), -1, -1).reshape(len(bias), -1, group * T, S)
    elif group > 1 and sharing == 'repeat':
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    with contextlib.nullcontext() if use_cudnn else sdpa_kernel(ALL_BUT_CUDNN):
        y = F.scaled_dot_product_attention(q, k, v, bias, p, is_causal, scale=scale,
                                           enable_gqa=q.shape[1] > k.shape[1])
    return y.reshape(B, H, T, -1)  # some kernels return the heads innermost but one


BLOCK = 128       # queries that eager_attention takes at once
FEW_QUERIES = 16  # of a head of keys, as in decoding; SDPA's kernels are made for long sequences


ALL_BUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def sdpa_plan(device, dtype, fits_flash, is_causal):
    """How scaled_dot_product_attention is called on a type of device. fits_flash: keys and values are of one
    width, at most 256; is_causal: of whole texts; else of one query a head, or with a bias. Returns

    - how the query heads of a group share a head of keys: 'rows', their queries are rows of one product;
      'repeat', each gets a copy; 'gqa', the kernel knows groups, on CUDA only flash attention and cuDNN;
    - whether cuDNN may: the fastest in training, but it plans for each new shape, in tenths of a second, and
      has been wrong with masks (pytorch issues 196678, 193893)."""
    use_cudnn = device != 'cuda' or is_causal and torch.is_grad_enabled()
    if not is_causal:
        return 'rows', use_cudnn
    if device == 'mps' or device == 'cuda' and not (dtype is torch.bfloat16 and fits_flash):
        return 'repeat', use_cudnn
    return 'gqa', use_cudnn


def use_flex(model, context):
    """Whether flex_attention, which skips what a mask hides, takes these tokens. It has to be compiled, and
    knows no dropout."""
    return (context.idx.is_cuda and context.dtype is torch.bfloat16 and context.idx.shape[1] >= 128
            and context.cache is None and not context.eager and torch.compiler.is_compiling()
            and not (model.training and model.config.dropout))


def flex_mask(first, slopes):
    """The mask of queries that see the keys from first (1 or B, T) on, with ALiBi's slopes (H,) or None, as
    flex_attention takes it: (function that changes scores or None, block mask)."""
    from torch.nn.attention.flex_attention import create_block_mask
    rows, T = first.shape
    device = first.device

    def is_seen(b, h, q, k):
        return (k <= q) & (k >= first[b % rows, q])

    def add_alibi(score, b, h, q, k):
        return score - slopes[h] * (q - k)

    return (None if slopes is None else add_alibi,
            create_block_mask(is_seen, rows, None, T, T, device=device))


def eager_attention(q, k, v, mask, scale, p, softcap=0.0, sink=None, weights=None, few=False):
    """attend, written out, in blocks of queries, which leave out keys that a causal mask hides from all of
    them. For what no kernel does; for training on CPUs, and windows there, where it takes half of SDPA's time
    at a window of a fourth of the tokens; and for few queries in a compiled step, by sums that become two
    loops: on a CPU SDPA takes ten times as long, and CUDA's kernels with a bias give a head to one
    multiprocessor."""
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    q = q * scale
    out = []
    block = T if few or weights is not None else BLOCK
    for start in range(0, T, block):
        end = min(start + block, T)
        first = max(0, start + 1 - mask.window) if mask.is_causal and mask.window else 0
        last = end if mask.is_causal else S
        keys = k[:, :, first:last]
        values = v[:, :, first:last]
        # a group's heads are rows of one product: (B, K, H / K t, D) @ (B, K, D, seen)
        rows = q[:, :, start:end].reshape(B, K, -1, D)
        score = (rows[..., None, :] * keys[:, :, None]).sum(dim=-1) if few else rows @ keys.mT
        score = score.view(B, H, -1, last - first)
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if mask.bias is not None:
            score = score + mask.bias[:, :, start:end, first:last]
        if sink is not None:  # has weight but no value
            score = torch.cat((score, sink.type_as(score)[:, None, None].expand_as(score[..., :1])), dim=-1)
        weight = score.softmax(dim=-1)[..., :last - first]
        if weights is not None:
            weights.append(weight)
        weight = F.dropout(weight, p).reshape(B, K, -1, last - first)
        y = (weight[..., None] * values[:, :, None]).sum(dim=-2) if few else weight @ values
        out.append(y.view(B, H, end - start, -1))
    return torch.cat(out, dim=2)


def aligned_linear(x, w, bias):
    """x @ w^T + bias, with w padded by rows of zeros to a multiple of 64: GPUs are slow with results whose
    rows are not aligned."""
    y = F.linear(x, F.pad(w, (0, 0, 0, -len(w) % 64)))[..., :len(w)]
    return y if bias is None else y + bias


MOST_LOGITS = 2**31 - 1  # at once: CUDA's kernel counts them in 32 bits (pytorch issue 85786)


def cross_entropy(logits, targets):
    """logits (B, T, vocab_size), targets (B, T), negative ones ignored -> the mean, 0-d; 0 if all are."""
    logits = logits.flatten(0, 1)
    targets = targets.flatten().clamp(min=-1)
    rows = MOST_LOGITS // logits.shape[-1]
    parts = [(logits, targets)]
    if rows < len(targets):  # else the gradient of split would be a copy
        parts = zip(logits.split(rows), targets.split(rows))
    loss = sum(F.cross_entropy(*part, ignore_index=-1, reduction='sum') for part in parts)
    return loss / (targets >= 0).sum().clamp(min=1)


# III. variants ==============================================================================================

def yarn_mscale(factor, weight):
    """How much YaRN sharpens attention in a context that is factor times longer."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def linear(freq, base, length, *, factor):
    """Every position divided by factor. Chen et al. 2023, arXiv:2306.15595."""
    return freq / factor, 1.0


def ntk(freq, base, length, *, factor):
    """The base times factor^(d / (d - 2)): the slowest pair slowed by factor, the fastest kept (bloc97)."""
    pairs = len(freq)
    return freq * factor ** (-torch.arange(pairs, device=freq.device) / max(1, pairs - 1)), 1.0


def dynamic(freq, base, length, *, factor, original_max_position_embeddings):
    """ntk by as much as a context of this length needs (emozilla)."""
    needed = factor * length / original_max_position_embeddings - (factor - 1)
    return ntk(freq, base, length, factor=max(1.0, needed))


def yarn(freq, base, length, *, factor, original_max_position_embeddings, beta_fast=32, beta_slow=1,
         attention_factor=None, mscale=None, mscale_all_dim=None, truncate=True):
    """Keeps pairs that turn more than beta_fast times in the original context, slows by factor the pairs that
    turn less than beta_slow times, with a ramp between: arXiv:2309.00071, 3.2."""
    pairs = len(freq)
    low, high = (pairs * math.log(original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(base)
                 for turns in (beta_fast, beta_slow))  # pairs that turn this often
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
    """As yarn, with the ramp over the turns in the original context, low_freq_factor to high_freq_factor, and
    nothing sharpened. Llama 3.1, arXiv:2407.21783."""
    turns = original_max_position_embeddings * freq / (2 * math.pi)
    keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return torch.lerp(freq / factor, freq, keep), 1.0


def longrope(freq, base, length, *, short_factor, long_factor, original_max_position_embeddings, factor,
             attention_factor=None):
    """A factor for each pair: from one list within the original context, another beyond. arXiv:2402.13753."""
    each = long_factor if length > original_max_position_embeddings else short_factor
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original_max_position_embeddings))
    # filled on the device: a tensor of a list would be copied there in each step
    return freq / torch.stack([freq.new_full((), one) for one in each]), attention_factor


def proportional(freq, base, length, *, partial_rotary_factor, factor=1.0):
    """As linear, and only this share of the pairs turns, the fastest ones: LFM3, Gemma 4."""
    freq = freq / factor
    freq[int(partial_rotary_factor * len(freq)):] = 0
    return freq, 1.0


ROPE_SCALINGS = {
    # name: function of frequencies, base, length and its options -> frequencies, factor on the rotation. The
    #       length is block_size, whatever is in the context: a token turns alike in each batch
    'linear': linear,
    'ntk': ntk,
    'dynamic': dynamic,
    'yarn': yarn,
    'llama3': llama3,
    'longrope': longrope,
    'proportional': proportional,
}


def complete_scaling(scaling, length):
    """A rope_scaling, or None, with the length that the model was trained at, where its kind needs that."""
    told = 'original_max_position_embeddings'
    kind = ROPE_SCALINGS.get(scaling.get('rope_type')) if scaling else None
    if kind and told in inspect.signature(kind).parameters:
        return {told: length} | scaling
    return scaling


def sinusoid(position_ids, width):
    """position_ids (1 or B, T) -> (1 or B, T, width): sines at even, cosines at odd dimensions
    (arXiv:1706.03762, 3.5)."""
    cos, sin = rope_table((10000.0, width, ()), position_ids, None)
    return torch.stack((sin, cos), dim=-1).flatten(-2)[:, 0]


def scale_queries(mixer, q, context):
    """q (B, H, T, D) times 1 + beta log(1 + floor((position + start) / length)), with the options in
    query_scale: Ministral 3; Llama 4 with start=1 and layers='N', those without positions (after
    arXiv:2501.19399)."""
    options = {'start': 0, 'layers': 'PN'} | mixer.config.query_scale
    if letter(mixer.config.pos_pattern, mixer.layer) not in options['layers']:
        return q
    step = (context.position_ids + options['start']).div(options['length'], rounding_mode='floor')
    return q * (1 + options['beta'] * torch.log1p(step))[:, None, :, None].type_as(q)


def alibi_slopes(n_head, device=None):
    """(H,): 2^(-8i/n) for n heads, a power of two; for other counts the slopes of the next smaller power,
    then every second of the doubled list (arXiv:2108.12409)."""
    n = 2 ** int(math.log2(n_head))
    i = torch.arange(1, n_head + 1, device=device)
    return 2.0 ** torch.where(i <= n, -8 * i / n, -4 * (2 * (i - n) - 1) / n)


# further layers, other blocks -------------------------------------------------------------------------------

def further_layer(name, *args):
    """A layer of mixers.py."""
    import mixers
    return getattr(mixers, name)(*args)


def make_mixer(config, layer):
    """A layer's mixer: an Attention with options is a VariantAttention. Raises ValueError if yours has no
    such options."""
    own = config.at(layer)
    kind = MIXERS[config.mixer_of(layer)]
    has_options = own.attn_gate or own.clip_qkv or own.k_eq_v or own.v_norm or isinstance(own.qk_norm, str)
    if kind is Attention and has_options:
        return further_layer('VariantAttention', own, layer)
    if issubclass(kind, Attention) and has_options and not hasattr(kind, 'by_head'):
        raise ValueError(f"{kind.__name__} has no gates or other norms: derive it from VariantAttention of "
                         "mixers.py")
    return kind(own, layer)


def make_mlp(config, layer):
    """A layer's MLP, experts, or None."""
    kind = config.mlp_of(layer)
    if kind == 'E':
        from experts import MoE
        return MoE(config, layer)
    return MLP(config, config.d_ff) if kind == 'D' else None


def make_block(config, layer):
    """A Block, or if it has options a VariantBlock."""
    is_plain = (config.norm_placement == 'pre' and config.residual_scale == 1 and not config.layer_scalar
                and config.mlp_of(layer) != 'N')
    return (Block if is_plain else VariantBlock)(config, layer)


class VariantBlock(Block):
    """A Block with norms where config.norm_placement says, with scales, or without an MLP."""

    def __init__(self, config, layer):
        nn.Module.__init__(self)
        kind = config.mlp_of(layer)
        self.placement, n_norm, _ = NORM_PLACEMENTS[config.norm_placement]
        if kind == 'N':
            self.placement = mixer_only
            n_norm = 1
        if isinstance(self.placement, type):
            self.placement = self.placement(config, layer)
        self.norms = [f'ln_{i + 1}' for i in range(n_norm)]
        self.ln_1 = Norm(config.n_embd, config)
        self.attn = make_mixer(config, layer)
        for name in self.norms[1:]:  # older files number optimizer states in this order
            setattr(self, name, Norm(config.n_embd, config))
        if kind == 'E' and config.expert_norms:  # its norms are within
            self.ln_3 = nn.Identity()
        self.mlp = make_mlp(config, layer)
        self.p = config.dropout
        self.scale = config.residual_scale
        self.register_buffer('scalar', torch.ones(1) if config.layer_scalar else None)

    def forward(self, x, context):
        x = self.placement(x, lambda y: self.branch(self.attn(y, context)),
                           lambda y: self.branch(self.mlp(y, context)),
                           *(getattr(self, name) for name in self.norms))
        return x if self.scalar is None else x * self.scalar

    def branch(self, y):
        y = super().branch(y)
        return y if self.scale == 1 else y * self.scale


def pre_norm(x, attn, mlp, ln_1, ln_2):
    """GPT-2, Llama."""
    x = x + attn(ln_1(x))
    return x + mlp(ln_2(x))


def post_norm(x, attn, mlp, ln_1, ln_2):
    """The Transformer, arXiv:1706.03762."""
    x = ln_1(x + attn(x))
    return ln_2(x + mlp(x))


def output_norm(x, attn, mlp, ln_1, ln_2):
    """OLMo 2, arXiv:2501.00656."""
    x = x + ln_1(attn(x))
    return x + ln_2(mlp(x))


def sandwich_norm(x, attn, mlp, ln_1, ln_2, ln_3, ln_4):
    """Gemma 2, arXiv:2408.00118."""
    x = x + ln_2(attn(ln_1(x)))
    return x + ln_4(mlp(ln_3(x)))


def parallel(x, attn, mlp, ln_1):
    """GPT-J, Falcon-7B (arXiv:2311.16867)."""
    y = ln_1(x)
    return x + attn(y) + mlp(y)


def parallel_2(x, attn, mlp, ln_1, ln_2):
    """GPT-NeoX, arXiv:2204.06745."""
    return x + attn(ln_1(x)) + mlp(ln_2(x))


def mixer_only(x, attn, mlp, ln_1):
    """A pre_norm layer without MLP."""
    return x + attn(ln_1(x))


NORM_PLACEMENTS = {  # name: (function of x, mixer, MLP and norms, or a class, see streams; how many norms;
    # whether a norm ends each branch, before it is added)
    'pre': (pre_norm, 2, False),
    'post': (post_norm, 2, False),
    'output': (output_norm, 2, True),
    'sandwich': (sandwich_norm, 4, True),
    'parallel': (parallel, 1, False),
    'parallel_2': (parallel_2, 2, False),
}


def streams(config):
    """(enter, leave): functions around the blocks, from the embedding (B, T, C) to what they hand each other,
    and back: the identity, unless norm_placement's entry is a class, a module that each block makes by
    (config, layer), with static methods enter and leave, as for hyper-connections (arXiv:2409.19606)."""
    placement = NORM_PLACEMENTS[config.norm_placement][0]
    return getattr(placement, 'enter', lambda x: x), getattr(placement, 'leave', lambda x: x)


# IV. validation, accounting =================================================================================

def complete(config):
    """Replaces each None by its default. Raises ValueError for a config that cannot be computed."""
    config.n_expert = config.n_expert or None  # so that a flag can say it: --n_expert=0
    config.mixer_pattern = config.mixer_pattern or ('A' if config.kv_lora_rank is None else 'M')
    if {*config.mixer_pattern} - MIXERS.keys() or config.mlp not in ACTIVATIONS:
        import mixers  # noqa: F401 (enters its letters and activations)
    problems = list(wrong_values(config))
    if not problems:  # combinations are checked only if each field by itself is sound
        fill_defaults(config)
        problems = list(impossible(config))
    if problems:
        raise ValueError('invalid config: ' + '; '.join(
            ', '.join(f'{name}={getattr(config, name)!r}' for name in names.split()) + f': {reason}'
            for names, reason in problems))


def fill_defaults(config):
    """Replaces each None by its default."""
    width, rest = divmod(config.n_embd, config.n_head)
    defaults = dict(n_kv_head=config.n_head, head_dim=None if rest else width, qk_norm=True,
                    qkv_bias=config.bias, proj_bias=config.bias, mlp_bias=config.bias,
                    norm_bias=config.bias and config.norm == 'layernorm',
                    embed_scale=config.n_embd ** 0.5 if config.pos == 'sinusoidal' else 1.0,
                    d_ff=round_up(8 * config.n_embd / 3) if ACTIVATIONS[config.mlp][1] else 4 * config.n_embd)
    if config.n_expert is not None:
        defaults |= dict(n_expert_active=min(2, config.n_expert), d_expert=config.d_ff or defaults['d_ff'])
    for mixer in config.mixers:
        defaults |= mixer.defaults(config)
    for name, value in defaults.items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    config.rope_scaling = complete_scaling(config.rope_scaling, config.block_size)
    if config.local:
        config.local = {name: complete_scaling(value, config.block_size) if name == 'rope_scaling' else value
                        for name, value in config.local.items()}


def round_up(n, multiple=64):
    """The next multiple."""
    return math.ceil(n / multiple) * multiple


def choices(kind):
    """The values that a field's annotation lists: a table's keys, or those of Literal and bool; else []."""
    if isinstance(kind, str):
        return [*globals()[kind.partition(' |')[0]]]
    if typing.get_origin(kind) is Literal:
        return [*typing.get_args(kind)]
    return [True, False] * (kind is bool) + [*itertools.chain(*map(choices, typing.get_args(kind)))]


def wrong_values(config):
    """Fields that are out of range or unknown: pairs (name, reason)."""
    for name, field in config.__dataclass_fields__.items():
        value = getattr(config, name)
        known = choices(field.type)
        values = value if name.endswith('_pattern') else [value]
        least_is_zero = field.default == 0 or name == 'document_token'
        if value is None:
            continue
        if any(isinstance(one, str) for one in known) and not (values and {*values} <= {*known}):
            yield name, f"choose from {', '.join(map(str, known))}"
        elif type(value) in (int, float) and (value < 0 or value == 0 and not least_is_zero):
            yield name, f"must be {'at least' if least_is_zero else 'above'} 0"


LOCAL = 'rope_base', 'rope_scaling', 'partial_rotary_factor', 'head_dim', 'n_kv_head', 'k_eq_v'  # in `local`


def impossible(config):  # noqa: C901
    """Fields that cannot be computed together: pairs ('field other_field', reason)."""
    layers = [config.at(i) for i in range(config.n_layer)]
    if any(issubclass(mixer, Attention) for mixer in config.mixers):
        if config.head_dim is None:
            yield 'n_embd n_head', 'n_head must divide n_embd, or set head_dim'
        if any(config.n_head % (layer.n_kv_head or 1) for layer in layers):
            yield 'n_kv_head n_head', 'n_kv_head must divide n_head'
    widths = {layer.rope_dim for layer in layers if layer.head_dim or layer.qk_rope_head_dim}
    if config.pos == 'rope' and any(width % 2 or not width for width in widths):
        yield 'pos', f"rope rotates pairs: an even number of a head's dimensions, not {min(widths)}"
    if config.document_token is not None and not all(mixer.documents for mixer in config.mixers):
        yield 'document_token mixer_pattern', 'needs mixers that all keep documents apart'
    if {*config.mixer_pattern} != {*config.mixer_pattern[:config.n_layer]}:
        yield 'mixer_pattern n_layer', 'needs a layer for each letter'
    if 'N' in config.expert_pattern and config.norm_placement != 'pre':
        yield 'norm_placement expert_pattern', 'a layer without MLP (N) has its norm in front'
    for scaling in {id(layer.rope_scaling): layer.rope_scaling or {} for layer in layers}.values():
        if scaling.get('rope_type', 'linear') not in ROPE_SCALINGS:
            yield 'rope_scaling', f"rope_type is one of {', '.join(ROPE_SCALINGS)}"
    if unknown := (config.local or {}).keys() - {*LOCAL}:
        yield 'local', f"{', '.join(unknown)}: only {', '.join(LOCAL)} may differ"
    share = config.topk_group / config.n_group if config.n_group else 1
    if config.n_expert and config.n_expert_active > config.n_expert * share:
        yield 'n_expert_active n_expert n_group topk_group', 'there are too few experts to choose from'
    for mixer in config.mixers:
        yield from mixer.check(config)


def changed(config, **changes):
    """A trained model's config with other fields; the length that it was trained at does not change. Raises
    ValueError for more positions than were learned."""
    if config.pos == 'learned' and changes.get('block_size', 0) > config.block_size:
        raise ValueError(f"block_size={changes['block_size']} is more than the {config.block_size} positions "
                         "that the model has learned")
    length = (config.rope_scaling or {}).get('original_max_position_embeddings', config.block_size)
    if 'rope_scaling' in changes:
        changes['rope_scaling'] = complete_scaling(changes['rope_scaling'], length)
    return dataclasses.replace(config, **changes)


def try_tokens(model):
    """Computes a loss. Raises what Python or torch does, and ArithmeticError if it is not finite."""
    idx = torch.zeros(1, min(2, model.config.block_size), dtype=torch.long, device=model.wte.weight.device)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():  # dropout draws; attention is written out
        loss, _ = model(idx, idx)
    if not loss.isfinite():
        raise ArithmeticError(f"the loss of the first tokens is {loss.item()}")


def collect_tags(model):
    """Name -> Tag of every parameter. Raises ValueError for one without a tag, or a false 'matrix'."""
    tags = {}
    for name, w in model.named_parameters():
        found = tags[name] = getattr(w, 'tag', None)
        if found is None:
            raise ValueError(f"{name} has no tag: make it with parameter(...), or call tag(...) on it")
        if found.group == 'matrix' and (w.ndim < 2 or 1 in w.shape[-2:]):  # Muon would only normalise it
            raise ValueError(f"{name} {tuple(w.shape)} is tagged as a matrix: use group='vector', or "
                             "another of GROUPS")
    kept = model.state_dict()
    for name, _ in model.named_buffers():
        if name not in kept:  # a model is loaded without data
            raise ValueError(f"a checkpoint would lose the buffer {name}: leave persistent=False out")
    return tags


# accounting -------------------------------------------------------------------------------------------------

LOOKED_UP = {'embedding', 'bigram'}  # groups of tables: a token takes a row, which costs no FLOPs


def account(model):
    """Name -> (elements, elements that a token uses, training FLOPs per token) of each parameter, of a tied
    'head', of 'mtp', and of 'mixing': the mixers' products without weights, at a length of block_size."""
    length = model.config.block_size
    rows = {name: cost(model, name, w) for name, w in model.named_parameters()}
    head = next((model.lm_head or model.wte).parameters())
    if model.lm_head is None:
        rows['head'] = 0, 0, (6 if head.requires_grad else 4) * head.numel()
    if model.mtp is not None:
        rows['mtp'] = 0, 0, model.mtp.block.attn.flops(length) + 6 * head.numel()
    return rows | {'mixing': (0, 0, sum(mixer.flops(length) for mixer in model.mixers))}


def cost(model, name, w):
    """(elements of the parameter w of this name, elements that a token uses, training FLOPs per token): 6 for
    a matmul weight, forward and backward, 4 if frozen, 0 for a looked-up table, times its block's turns."""
    config = model.config
    active = w.numel()
    group = model.tags[name].group
    if 'experts.' in name:
        active = round(active * config.n_expert_active / config.n_expert)
    is_product = GROUPS[group] and group not in LOOKED_UP
    turns = max(1, sum(name.startswith(f'h.{i}.') for i, _ in model.schedule))
    return w.numel(), active, (6 if w.requires_grad else 4) * active * is_product * turns


def num_params(model, active=False):
    """The number of parameters; active: of the parameters that a token uses."""
    return sum(row[active] for row in account(model).values())


def flops_per_token(model):
    """Training FLOPs per token at a length of block_size."""
    return sum(row[2] for row in account(model).values())


def row_splits(model):
    """Each 'matrix' parameter -> row counts of the projections fused in it."""
    return {w: model.tags[name].rows or (w.shape[-2],) for name, w in model.named_parameters()
            if model.tags[name].group == 'matrix'}

"""
The modern decoder-only language model, read from top to bottom: configuration, norm, positions, attention and
its cache, MLP and experts, block, GPT.

    config = GPTConfig(n_layer=12, n_head=12, n_kv_head=4, n_embd=768)
    model = GPT(config)
    logits = model(idx)                          # (B, T) -> (B, T, vocab_size) float32
    loss, aux = model(idx, targets)              # mean cross entropy over targets != -1
    cache = model.make_cache(B, max_len)         # the caller's object
    logits = model(idx, cache=cache, keep=1)     # appends; logits of the last new token only

Shapes in comments: B rows of a batch, T new tokens, S tokens to attend to, C = n_embd, H query heads, K
key/value heads, D = head_dim, E experts, V = vocab_size. This file prints nothing, picks no device, reads no
globals, downloads nothing.
"""
import contextlib
import dataclasses
import functools
import inspect
import json
import math
import mmap
import os
import pickle
import re
import types
import typing

import torch
import torch.nn as nn
import torch.nn.functional as F

# configuration ----------------------------------------------------------------------------------------------

ACTIVATIONS = {  # name: (function, gated); gated ones (Shazeer 2020, arXiv:2002.05202) take gate and up
    'swiglu': (lambda gate, up: F.silu(gate) * up, True),
    'geglu': (lambda gate, up: F.gelu(gate) * up, True),
    'geglu_tanh': (lambda gate, up: F.gelu(gate, approximate='tanh') * up, True),  # Gemma's
    'reglu': (lambda gate, up: F.relu(gate) * up, True),
    'glu': (lambda gate, up: torch.sigmoid(gate) * up, True),
    'swiglu_oai': (lambda gate, up: (g := gate.clamp(max=7)) * torch.sigmoid(1.702 * g)
                   * (up.clamp(-7, 7) + 1), True),
    'gelu': (F.gelu, False),                                        # the exact one, by erf
    'gelu_tanh': (lambda x: F.gelu(x, approximate='tanh'), False),  # OpenAI GPT-2's
    'relu': (F.relu, False),
    'relu2': (lambda x: F.relu(x).square(), False),                 # Primer, arXiv:2109.08668
    'silu': (F.silu, False),
}


@dataclasses.dataclass
class GPTConfig:
    """Everything that defines a model, as plain data. Impossible values raise a ValueError that names all.
    Patterns have a letter for each layer and are repeated: 'SSSL' is three S, then an L, and so on."""
    # size
    block_size: int = 1024           # context: the most tokens attended to at once
    vocab_size: int = 50304          # GPT-2's 50257 rounded up, as nanoGPT has it
    n_layer: int = 12                # blocks
    n_head: int = 12                 # query heads
    n_kv_head: int | None = None     # k/v heads; None: n_head (multi-head), 1: multi-query, between: grouped
    n_embd: int = 768                # width of the residual stream
    head_dim: int | None = None      # None: n_embd / n_head
    d_ff: int | None = None          # MLP width; None: 4 n_embd; if gated 8/3 n_embd up to a multiple of 64
    # positions
    pos: str = 'rope'                # rope, alibi, learned, sinusoidal, none
    alibi_scale: float = 1.0         # of ALiBi's slopes (Falcon)
    pos_pattern: str = 'P'           # P: as pos says, N: a layer without (rope and alibi only); 'PPPN'
    rope_base: float = 10000.0       # the slowest rotation's base (RoFormer, arXiv:2104.09864)
    rope_scaling: dict | None = None  # {'rope_type': 'yarn', 'factor': 4.0, ...}, see ROPE_SCALINGS
    partial_rotary_factor: float = 1.0  # share of each head that turns
    document_token: int | None = None  # end of text: nothing before the last one is seen, positions restart
    # attention
    window: int | None = None        # tokens that an S layer sees: its own and the window - 1 before it
    window_pattern: str | None = None  # S: sliding window, L: long, all tokens; 'S', 'SL', 'SSSL'
    kv_lora_rank: int | None = None  # multi-head latent attention (MLA): width of the latent
    q_lora_rank: int | None = None   # MLA: width of the compressed query; None: not compressed
    qk_nope_head_dim: int | None = None  # MLA: part of a head without positions; None: 128
    qk_rope_head_dim: int | None = None  # MLA: part with, its key shared by all heads; None: 64
    v_head_dim: int | None = None    # MLA: width of a head's value; None: 128
    qk_norm: bool | str | None = None  # norm on queries and keys: True (per head), False, whole
    attn_scale: float | None = None  # of the scores; None: 1 / sqrt(a head's width)
    attn_softcap: float = 0.0        # c * tanh(scores / c); 0 is off
    attn_sink: bool = False          # a learned logit for each head in the softmax's denominator
    # norm, wiring
    norm: str = 'rmsnorm'            # rmsnorm, layernorm
    norm_eps: float = 1e-6           # inside the root
    norm_bias: bool | None = None    # None: layernorm follows bias, rmsnorm has none
    wiring: str = 'pre'              # pre, post, output, sandwich, parallel, parallel_2; see WIRINGS
    embed_norm: bool = False         # a norm after the embedding
    embed_scale: float | None = None  # of the embedding; None: 1, or sqrt(n_embd) under sinusoidal positions
    residual_scale: float = 1.0      # of what attention and MLP add
    residual_lambdas: bool = False   # learned weights of stream and embedding before each layer, from 1 and 0
    # MLP, biases
    mlp: str = 'swiglu'              # swiglu, geglu, gelu, gelu_tanh, relu2, ...; see ACTIVATIONS
    bias: bool = False               # in the linear layers, and in layernorm
    qkv_bias: bool | None = None     # of queries, keys, values; None: as bias
    proj_bias: bool | None = None    # of attention's output; None: as bias
    mlp_bias: bool | None = None     # of MLP, experts and router; None: as bias
    # experts
    n_expert: int | None = None      # experts that replace the MLP; None: a dense model
    n_expert_active: int | None = None  # of them for each token; None: 2
    n_shared_expert: int | None = None  # experts that every token passes as well, as one MLP
    d_expert: int | None = None      # an expert's width; None: d_ff
    n_dense_layer: int = 0           # first layers that keep the MLP
    expert_pattern: str = 'E'        # E: experts, D: dense
    router: str = 'softmax'          # softmax, sigmoid
    norm_topk_prob: bool = True      # the chosen experts' weights sum to 1
    routed_scaling_factor: float = 1.0  # of these weights
    n_group: int | None = None       # groups of experts, of which each token uses
    topk_group: int | None = None    # so many
    balance_bias: bool = False       # a bias that follows the load, in choosing only; train.py moves it
    balance_per_sequence: bool = False  # balance loss for each row of the batch, not over all of it
    # head
    tie_word_embeddings: bool = True  # the head reads the embedding's rows
    head_bias: bool = False          # of an untied head
    logit_softcap: float = 0.0       # c * tanh(logits / c); 0 is off
    # training
    dropout: float = 0.0             # on embedding, attention weights and both residual branches

    def __post_init__(self):
        fields, given = dataclasses.fields(self), vars(self).copy()
        problems = [f"{f.name}={given[f.name]!r} is no {getattr(f.type, '__name__', f.type)}"
                    for f in fields if not _fits(given[f.name], f.type)]
        if problems:
            raise ValueError('impossible model: ' + '; '.join(problems))
        problems = [f"{f.name}={given[f.name]!r} must be a whole number above 0"
                    for f in fields if f.type in (int, int | None) and given[f.name] is not None
                    and given[f.name] < (f.name not in FROM_ZERO)]
        choices = dict(pos=('rope', 'alibi', 'learned', 'sinusoidal', 'none'), norm=('rmsnorm', 'layernorm'),
                       qk_norm=(True, False, 'whole', None), mlp=ACTIVATIONS, wiring=WIRINGS, router=ROUTERS)
        problems += [f"{name}={given[name]!r} is none of {', '.join(map(str, known))}"
                     for name, known in choices.items() if given[name] not in known]
        problems += [f"{name}={given[name]!r} is not made of {' and '.join(letters)}"
                     for name, letters in PATTERNS.items() if given[name] is not None
                     and (not given[name] or set(given[name]) - set(letters))]
        problems += [f"{f.name}={given[f.name]!r} needs {needed}"  # an option that does nothing is a mistake
                     for needed, names in NEEDS.items() for f in fields if f.name in names.split()
                     and given[needed] is None and given[f.name] != f.default]
        with contextlib.suppress(KeyError, TypeError, ZeroDivisionError):  # of what is named above
            self._resolve()
        for rule, reason in RULES.items():
            code, known = compile(rule, 'RULES', 'eval'), {**vars(self), 'rope_dim': self.rope_dim}
            with contextlib.suppress(KeyError, TypeError, ZeroDivisionError):
                if not eval(code, {**known, 'config': self, 'given': types.SimpleNamespace(**given)}):
                    known.update(given)
                    values = [f"{name}={known[name]!r}" for name in code.co_names
                              if known.get(name) is not None]
                    problems.append(f"{', '.join(values)}: {reason}")
        try:
            if self.rope_dim and self.rope_scaling:
                rope_table(self, torch.arange(2), self.block_size)
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError('impossible model: ' + '; '.join(problems))

    def _resolve(self):
        """Puts what a None stands for."""
        if self.kv_lora_rank is not None:
            self.qk_nope_head_dim, self.v_head_dim = self.qk_nope_head_dim or 128, self.v_head_dim or 128
            self.qk_rope_head_dim = self.qk_rope_head_dim or 64
        else:
            self.n_kv_head = self.n_kv_head or self.n_head
            self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.n_expert is not None:
            self.n_expert_active = self.n_expert_active or min(2, self.n_expert)
        if self.d_ff is None:
            self.d_ff = round_up(8 * self.n_embd / 3) if ACTIVATIONS[self.mlp][1] else 4 * self.n_embd
        self.d_expert = self.d_expert or (self.n_expert and self.d_ff)
        sinusoidal, layernorm = self.pos == 'sinusoidal', self.norm == 'layernorm'
        for name, value in dict(qkv_bias=self.bias, proj_bias=self.bias, mlp_bias=self.bias,
                                norm_bias=self.bias and layernorm, qk_norm=self.kv_lora_rank is None,
                                embed_scale=self.n_embd ** 0.5 if sinusoidal else 1.0).items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    @property
    def rope_dim(self):
        """Dimensions of a head that turn."""
        return self.qk_rope_head_dim or self.head_dim and int(self.head_dim * self.partial_rotary_factor)

    @property
    def scale(self):
        """What scores are multiplied by; in MLA YaRN's mscale_all_dim is squared in, as DeepSeek does."""
        if self.attn_scale is not None or self.kv_lora_rank is None:
            return self.attn_scale or self.head_dim ** -0.5
        factor, weight = ((self.rope_scaling or {}).get(key) for key in ('factor', 'mscale_all_dim'))
        grown = yarn_mscale(factor, weight) if weight else 1.0
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * grown ** 2

    def window_of(self, layer):
        """The window of a layer; None: it sees all."""
        return self.window if self.window and letter(self.window_pattern, layer) == 'S' else None

    def has_experts(self, layer):
        sparse = self.n_expert is not None and layer >= self.n_dense_layer
        return sparse and letter(self.expert_pattern, layer) == 'E'


FROM_ZERO = ('n_dense_layer', 'document_token')  # the other whole numbers count from 1
PATTERNS = {'pos_pattern': 'PN', 'window_pattern': 'SL', 'expert_pattern': 'ED'}
NEEDS = {  # field: those that do nothing without it
    'window': 'window_pattern', 'window_pattern': 'window', 'n_group': 'topk_group', 'topk_group': 'n_group',
    'kv_lora_rank': 'q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim',
    'n_expert': 'n_expert_active n_shared_expert d_expert n_dense_layer expert_pattern router norm_topk_prob '
                'routed_scaling_factor n_group topk_group balance_bias balance_per_sequence',
}
RULES = {  # what must hold: what to say if it does not
    'given.n_kv_head is None or kv_lora_rank is None': 'latent attention has no k/v heads to share',
    'given.head_dim is None or kv_lora_rank is None':
        'latent attention has qk_nope_head_dim, qk_rope_head_dim and v_head_dim',
    'not given.qk_norm or kv_lora_rank is None': 'latent attention normalises the latents instead',
    'partial_rotary_factor == 1 or kv_lora_rank is None and pos == "rope"':
        'only rope outside latent attention turns a share of a head',
    'given.head_dim or kv_lora_rank or n_embd % n_head == 0': 'n_head must divide n_embd, or set head_dim',
    'not n_kv_head or n_head % n_kv_head == 0': 'n_kv_head must divide n_head',
    'pos != "rope" or rope_dim > 0 and rope_dim % 2 == 0': 'rope turns pairs: its width must be even',
    'pos == "rope" or rope_base == 10000': 'only rope has a base',
    'rope_scaling is None or pos == "rope"': 'only rope can be scaled',
    '"N" not in pos_pattern or pos in ("rope", "alibi")': 'all layers share these positions',
    'pos != "sinusoidal" or n_embd % 2 == 0': 'sinusoidal positions are pairs',
    'window is None or "S" in window_pattern': 'no layer has a window',
    'wiring not in ("output", "sandwich") or residual_scale == 1': 'the norm after a branch undoes its scale',
    'pos in ("learned", "sinusoidal") or not embed_norm or embed_scale == 1':
        'the norm after the embedding undoes its scale',
    'n_expert is None or any(config.has_experts(layer) for layer in range(n_layer))': 'no layer has experts',
    'n_expert is None or n_expert_active > 1 or not norm_topk_prob':
        'the weight of one expert is always 1, so that its router learns nothing: norm_topk_prob=False',
    'n_expert_active <= n_expert': 'a token cannot use more experts than there are',
    'n_expert % n_group == 0': 'n_group must divide n_expert',
    'topk_group <= n_group': 'a token cannot use more groups than there are',
    'n_expert_active <= n_expert // n_group * topk_group': 'the groups of a token have fewer experts',
    'router != "sigmoid" or n_expert // n_group > 1': 'sigmoid ranks a group by its best two experts',
    'not head_bias or not tie_word_embeddings': 'only an untied head has a bias',
    'document_token is None or document_token < vocab_size': 'the vocabulary has no such token',
    '0 < partial_rotary_factor <= 1': 'must be in (0, 1]',
    '0 <= dropout < 1': 'must be in [0, 1)',
    **{f'{name} is None or {name} > 0': 'must be above 0' for name in (
        'rope_base', 'norm_eps', 'residual_scale', 'alibi_scale', 'routed_scaling_factor', 'embed_scale',
        'attn_scale')},
    **{f'{name} >= 0': 'must be 0 (off) or above' for name in ('attn_softcap', 'logit_softcap')},
}


def _fits(value, kind):
    """Whether value is of the declared type: whole numbers are floats too, bools are no numbers."""
    kinds = typing.get_args(kind) or (kind,)
    if type(value) in (int, float) and float in kinds:
        return math.isfinite(value)
    return type(value) in kinds


def letter(pattern, layer):
    return pattern[layer % len(pattern)]


def round_up(n, multiple=64):
    return math.ceil(n / multiple) * multiple


# norm, projections, dropout ---------------------------------------------------------------------------------

class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension; statistics in float32, the result in x's dtype."""

    def __init__(self, width, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if config.norm_bias else None
        self.kind, self.eps = config.norm, config.norm_eps

    def forward(self, x):
        weight, bias = self.weight.float(), None if self.bias is None else self.bias.float()
        if self.kind == 'layernorm':
            return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).type_as(x)
        y = F.rms_norm(x.float(), weight.shape, weight, self.eps)
        return (y if bias is None else y + bias).type_as(x)


class Fused(nn.Linear):
    """Several projections of one input as one matrix (one matmul); returns them apart. `parts`: their widths.
    Muon and the conversion of checkpoints look at the parts, rows of `weight` in this order."""

    def __init__(self, width, parts, bias):
        super().__init__(width, sum(parts), bias=bias)
        self.parts = parts

    def forward(self, x):
        return super().forward(x).split(self.parts, dim=-1)


def dropout(x, p):
    """Zeroes each number with probability p and scales the others by 1 / (1 - p)."""
    if not p or x.device.type != 'cpu':
        return F.dropout(x, p) if p else x
    # On CPUs random bits are what dropout costs: 16 a number, drawn 64 at a time, take a fifth of F.dropout.
    limit = max(1, round(p * 65536))
    bits = torch.randint(-2**63, 2**63 - 1,
                         ((x.numel() + 3) // 4,)).view(torch.int16)[:x.numel()].view(x.shape)
    return torch.where(bits >= limit - 32768, x * (65536 / (65536 - limit)), 0.0)


# positions --------------------------------------------------------------------------------------------------

def yarn_mscale(factor, weight=1.0):
    """How much YaRN sharpens attention in a context that is factor times longer."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def linear(freq, base, length, *, factor):
    """Every position divided by factor. Chen et al. 2023, arXiv:2306.15595."""
    return freq / factor, 1.0


def ntk(freq, base, length, *, factor):
    """The base times factor^(d / (d - 2)): the slowest pair slowed by factor, the fastest kept (bloc97)."""
    d = 2 * len(freq)
    return freq * factor ** (-torch.arange(0, d, 2, device=freq.device) / max(1, d - 2)), 1.0


def dynamic(freq, base, length, *, factor, original_max_position_embeddings):
    """ntk by as much as a context of this length needs (emozilla)."""
    needed = factor * length / original_max_position_embeddings - (factor - 1)
    return ntk(freq, base, length, factor=max(1.0, needed))


def yarn(freq, base, length, *, factor, original_max_position_embeddings, beta_fast=32, beta_slow=1,
         attention_factor=None, mscale=None, mscale_all_dim=None, truncate=True):
    """Pairs that turn more than beta_fast times in the original context are kept, those that turn less than
    beta_slow times are slowed by factor, with a ramp between. Peng et al. 2023, arXiv:2309.00071, 3.2."""
    pairs = len(freq)
    low, high = (pairs * math.log(original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(base)
                 for turns in (beta_fast, beta_slow))  # the pair that turns so often
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = (torch.arange(pairs, device=freq.device) - low) / (high - low or 0.001)
    if attention_factor is None:
        each = (mscale, mscale_all_dim) if mscale and mscale_all_dim else (1.0, 0.0)
        attention_factor = yarn_mscale(factor, each[0]) / yarn_mscale(factor, each[1])
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
    return freq / torch.tensor(each, device=freq.device), attention_factor


# name: function of (frequencies, base, context length, its options) -> (frequencies, factor on the rotation)
ROPE_SCALINGS = {f.__name__: f for f in (linear, ntk, dynamic, yarn, llama3, longrope)}


def rope_table(config, pos, length):
    """cos and sin of the rotation angles at pos (...), each (..., rope_dim / 2) float32: position p turns
    pair i by p * rope_base^(-2i / rope_dim). RoFormer, arXiv:2104.09864, equation 15. length: of the context,
    for scalings that depend on it. Raises ValueError if rope_scaling cannot be computed."""
    pair = torch.arange(0, config.rope_dim, 2, device=pos.device, dtype=torch.float32)
    freq, factor = 1.0 / config.rope_base ** (pair / config.rope_dim), 1.0
    if config.rope_scaling:
        options = dict(config.rope_scaling)
        kind = str(options.pop('rope_type', None))
        if kind not in ROPE_SCALINGS:
            raise ValueError(f"rope_scaling's rope_type={kind!r} is none of {', '.join(ROPE_SCALINGS)}")
        try:
            if not options.get('factor', 1.0) >= 1.0:
                raise ValueError('factor is below 1, which would speed rotations up')
            freq, factor = ROPE_SCALINGS[kind](freq, config.rope_base, length, **options)
        except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            takes = ', '.join(list(inspect.signature(ROPE_SCALINGS[kind]).parameters)[3:])
            raise ValueError(f"rope_scaling={config.rope_scaling}: {error}; {kind} takes {takes}") from None
    angle = pos[..., None] * freq
    return angle.cos() * factor, angle.sin() * factor


def rotate(x, rope):
    """x (B, heads, T, D) with its first dimensions turned by rope = (cos, sin), each (1 or B, 1, T, pairs).
    Pair i is x[i], x[i + pairs], the half-split layout of Llama and transformers; checkpoints in GPT-J's
    interleaved layout are permuted when read."""
    if rope is None:
        return x
    cos, sin = rope
    a, b, rest = x.split((cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), dim=-1)
    a, b = a.float(), b.float()
    return torch.cat(((a * cos - b * sin).type_as(x), (b * cos + a * sin).type_as(x), rest), dim=-1)


def sinusoid(pos, width):
    """pos (1 or B, T) -> (1 or B, T, width): sines at even, cosines at odd places (arXiv:1706.03762, 3.5)."""
    angle = pos[..., None] / 10000.0 ** (torch.arange(0, width, 2, device=pos.device) / width)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


def alibi_slopes(n_head, device=None):
    """(H,): 2^(-8i/n) for n heads, a power of two; for other counts those of the next smaller power, then
    every second one of the doubled list (Press et al. 2021, arXiv:2108.12409)."""
    n, i = 2 ** int(math.log2(n_head)), torch.arange(1, n_head + 1, device=device)
    return 2.0 ** torch.where(i <= n, -8 * i / n, -4 * (2 * (i - n) - 1) / n)


def visible(q_pos, k_pos, first=0):
    """Who sees whom, from absolute positions: q_pos (1 or B, T), k_pos (1 or B, S), -1 for an empty slot
    -> (1 or B, 1, T, S) bool. A token sees itself and what came before, from `first` (1 or B, T) on."""
    first = first[:, :, None] if torch.is_tensor(first) else first
    return ((k_pos[:, None] <= q_pos[:, :, None]) & (k_pos[:, None] >= first))[:, None]


# attention --------------------------------------------------------------------------------------------------

class Mask(typing.NamedTuple):
    """Who sees whom in the layers of one kind."""
    bias: torch.Tensor | None     # (1 or B, 1 or H, T, S), -inf where hidden, added to the scores; None: 0
    square: bool                  # the keys are the queries' own tokens, T == S: causal, also without a bias
    window: int | None            # and none sees more than the last so many


class Shared(typing.NamedTuple):
    """What all layers of one forward pass have in common, made once."""
    rope: tuple | None            # (cos, sin) at the new tokens' positions
    masks: dict                   # (window, alibi) of a layer -> Mask
    explicit: bool                # attention is to be written out, not left to a kernel
    weights: list | None          # takes each layer's attention weights, (B, H, T, S)
    routing: list | None          # takes each sparse layer's balance, z and load
    dtype: torch.dtype            # that matmuls run in


def attend(q, k, v, shared, mask, scale, p=0.0, softcap=0.0, sink=None):
    """softmax(scale q k^T + bias) v, with dropout p on the weights. The one entry point of attention.

    q (B, H, T, D); k (B, K, S, D); v (B, K, S, D'), K dividing H (arXiv:2305.13245) -> (B, H, T, D').
    - explicit: where the scores are capped, a sink takes its share or the weights are asked for, and to train
      on a CPU: the compiler fuses it and it skips what is masked (SDPA's backward takes 1.5 to 2 times as
      long there, 3 times with dropout);
    - shared keys, and one new token or a mask: a group's heads become the rows of one product, so that keys
      are read once a group, and by kernels that know no groups;
    - everything else: scaled_dot_product_attention, which picks its fastest kernel.
    """
    (B, H, T, D), (K, S), bias = q.shape, k.shape[1:3], mask.bias
    if shared.explicit:
        return attend_explicit(q, k, v, mask, scale, p, softcap, sink, shared.weights)
    fold = H > K and (T == 1 or bias is not None or q.device.type == 'mps')
    if fold:
        if bias is None and mask.square and T > 1:
            bias = q.new_full((T, S), -math.inf).triu(1)[None, None]
        if bias is not None:
            bias = bias.repeat(1, 1, H // K, 1) if bias.shape[1] == 1 else bias.view(-1, K, H // K * T, S)
        q = q.reshape(B, K, H // K * T, D)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p, scale=scale,
                                       is_causal=mask.square and T > 1 and bias is None,
                                       enable_gqa=H > K and not fold)
    return y.view(B, H, T, -1) if fold else y


def attend_explicit(q, k, v, mask, scale, p=0.0, softcap=0.0, sink=None, weights=None, block=128):
    """attend, written out, in blocks of queries; softmax statistics are float32 inside."""
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    q, out, seen_weights = q * scale, [], []
    for start in range(0, T, block):
        end = min(start + block, T)
        first = max(0, start + 1 - mask.window) if mask.square and mask.window else 0
        last = end if mask.square else S
        # a group's heads are rows of one product: (B, K, G t, D) @ (B, K, D, seen)
        score = q[:, :, start:end].reshape(B, K, -1, D) @ k[:, :, first:last].transpose(-2, -1)
        score = score.view(B, H, end - start, last - first)
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if mask.bias is not None:
            score = score + mask.bias[:, :, start:end, first:last]
        if sink is not None:  # takes its share and gives nothing
            score = torch.cat((score, sink.type_as(score)[:, None, None].expand_as(score[..., :1])), dim=-1)
        weight = score.softmax(dim=-1)[..., :last - first]
        if weights is not None:
            seen_weights.append(F.pad(weight, (first, S - last)))
        weight = dropout(weight, p).reshape(B, K, -1, last - first)
        out.append((weight @ v[:, :, first:last]).view(B, H, end - start, -1))
    if weights is not None:
        weights.append(torch.cat(seen_weights, dim=2))
    return torch.cat(out, dim=2)


class Cache:
    """What every layer keeps of the tokens so far. Made by GPT.make_cache, owned by the caller.

    Rows may stand at different places: `length` (B,) counts each row's tokens, `longest` their maximum, on
    the host (None when `static`, where only tensors may change so that one compiled step serves every
    position: then the caller keeps count, and each step attends over all slots, empty ones masked). The slot
    of a token is its position; in a layer with a window, which has slots for the window and for the longest
    rewind only, it is the position modulo the slots. What slots hold beyond a row's length is masked.
    """

    def __init__(self, layers, batch_size, max_len, device, dtype, static=False, max_rewind=0, starts=False):
        # layers: for each its window and the (heads, width) of each tensor it keeps
        self.max_len, self.static, self.max_rewind = max_len, static, max_rewind
        self.layers = [[torch.zeros(batch_size, heads, self.slots(window), width, device=device, dtype=dtype)
                        for heads, width in shapes] for window, shapes in layers]
        self.length = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.peak = self.length.clone()  # most tokens that a row has held since it was empty
        # for each position where its document starts; only if documents are masked
        self.starts = torch.zeros(batch_size, max_len * starts, dtype=torch.long, device=device)
        self.longest, self.even = (None, False) if static else (0, True)

    def slots(self, window):
        return self.max_len if window is None else min(self.max_len, window + self.max_rewind)

    def positions(self, T):
        """Positions of the next T tokens: (1, T) if all rows are alike, else (B, T)."""
        if not self.static and self.longest + T > self.max_len:
            raise ValueError(f"cache is full: {self.longest + T} tokens into {self.max_len} slots; "
                             "make_cache with a larger max_len")
        new = torch.arange(T, device=self.length.device)
        return self.longest + new[None] if self.even else self.length[:, None] + new

    def held(self, slots, T):
        """How many slots to attend to, besides the T new tokens if these do not go in first."""
        first = T if T == 1 or slots == self.max_len else 0
        return slots if self.static else min(self.longest + first, slots)

    def key_positions(self, window, pos):
        """(1 or B, S): positions of what append returns for new tokens at pos, -1: an empty slot."""
        slots, T = self.slots(window), pos.shape[1]
        slot = torch.arange(self.held(slots, T), device=pos.device)
        if slots == self.max_len:
            return slot[None]
        last = pos[:, :1] - int(T > 1)  # each slot holds the last position that falls to it
        old = (last - (last - slot) % slots).clamp(min=-1)
        return old if T == 1 else torch.cat((old, pos), dim=1)

    def append(self, layer, pos, *new):
        """Puts new tensors (B, heads, T, width) at pos; returns what to attend to, (B, heads, S, width)."""
        T, slots = pos.shape[1], self.layers[layer][0].shape[2]
        ring, held, kept = slots < self.max_len and T > 1, self.held(slots, T), min(T, slots)
        seen = [torch.cat((old[:, :, :held], add), dim=2)
                for old, add in zip(self.layers[layer], new)] if ring else None  # before any is written over
        at = (self.longest + T - kept) % slots if self.even else slots
        for old, add in zip(self.layers[layer], new):
            if at + kept <= slots:
                old[:, :, at:at + kept] = add[:, :, T - kept:]
            else:
                row = torch.arange(len(self.length), device=pos.device)[:, None]
                old[row, :, pos[:, T - kept:] % slots] = add[:, :, T - kept:].transpose(1, 2).to(old.dtype)
        return seen or [old[:, :, :held] for old in self.layers[layer]]

    def advance(self, T):
        self.length += T
        torch.maximum(self.peak, self.length, out=self.peak)
        if not self.static:
            self.longest += T

    def rewind(self, n):
        """Takes the last n tokens back: an int for all rows, or (B,) one number a row. Layers with a window
        allow max_rewind tokens, or all of them."""
        length = self.length - n
        if (length < 0).any() or (length > self.length).any():
            raise ValueError(f"cannot rewind {n} tokens: the cache holds {self.length.tolist()}")
        slots = min(old.shape[2] for layer in self.layers for old in layer)
        if slots < self.max_len and ((self.peak > slots) & (length > 0)
                                     & (self.peak - length > self.max_rewind)).any():
            raise ValueError(f"cannot rewind {n} tokens: the windows keep max_rewind={self.max_rewind} more "
                             "than they need; make_cache with a larger one")
        self.length.copy_(length)
        self.peak.masked_fill_(length == 0, 0)
        self._recount(even=self.even and not torch.is_tensor(n))

    def select(self, rows):
        """Keeps, reorders or copies rows: a list or (B',) of row numbers."""
        rows = torch.as_tensor(rows, device=self.length.device)
        self.layers = [[old[rows] for old in layer] for layer in self.layers]
        self.length, self.peak, self.starts = self.length[rows], self.peak[rows], self.starts[rows]
        self._recount(even=self.even)

    def _recount(self, even):
        if not self.static:
            low, high = int(self.length.min()), int(self.length.max())
            self.longest, self.even = high, even or low == high

    def tensors(self):
        return [self.length, self.peak, self.starts] + [old for layer in self.layers for old in layer]

    @property
    def nbytes(self):
        return sum(old.nbytes for layer in self.layers for old in layer)


class BaseAttention(nn.Module):
    """What both kinds of attention have: a place in the model, and scores that are scaled, capped, sunk."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.window = layer, config.window_of(layer)
        self.pos = letter(config.pos_pattern, layer) == 'P'
        self.kind = (self.window, config.pos == 'alibi' and self.pos)  # layers of a kind share their mask
        self.p, self.scale, self.softcap = config.dropout, config.scale, config.attn_softcap
        self.sink = nn.Parameter(torch.empty(config.n_head)) if config.attn_sink else None

    def attend(self, q, k, v, shared):
        return attend(q, k, v, shared, shared.masks[self.kind], self.scale, self.p if self.training else 0.0,
                      self.softcap, self.sink)


class Attention(BaseAttention):
    """Multi-head, grouped-query or multi-query attention, by n_kv_head."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        H, K, D, C = config.n_head, config.n_kv_head, config.head_dim, config.n_embd
        self.c_attn = Fused(C, (H * D, K * D, K * D), bias=config.qkv_bias)
        self.c_proj = nn.Linear(H * D, C, bias=config.proj_bias)
        # (heads, width) that a norm sees at once
        self.normed = [(1, n * D) if config.qk_norm == 'whole' else (n, D) for n in (H, K)]
        self.q_norm, self.k_norm = (Norm(width, config) if config.qk_norm else nn.Identity()
                                    for _, width in self.normed)
        self.head_dim, self.cache_shapes = D, [(K, D), (K, D)]

    def forward(self, x, shared, cache=None, pos=None):
        q, k, v = self.c_attn(x)
        q = self.q_norm(q.unflatten(-1, self.normed[0])).flatten(2)
        k = self.k_norm(k.unflatten(-1, self.normed[1])).flatten(2)
        # (B, heads, T, D)
        q, k, v = [y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (q, k, v)]
        if self.pos:
            q, k = rotate(q, shared.rope), rotate(k, shared.rope)
        if cache is not None:
            k, v = cache.append(self.layer, pos, k, v)
        return self.c_proj(self.attend(q, k, v, shared).transpose(1, 2).flatten(2))


class LatentAttention(BaseAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). Keys and values of all heads
    are projections of one latent a token, which is all that is cached, beside one rotary key that the heads
    share. Where it costs less, decoding does not project latents up but queries and outputs down ("absorbed",
    its section 2.1.2): then the latents are keys and values of multi-query attention."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        H, C, rank = config.n_head, config.n_embd, config.kv_lora_rank
        self.nope, self.rope, self.v = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
        q_width = H * (self.nope + self.rope)
        self.c_attn = Fused(C, (config.q_lora_rank or q_width, rank, self.rope), bias=config.qkv_bias)
        self.q_norm = Norm(config.q_lora_rank, config) if config.q_lora_rank else None
        self.c_q = nn.Linear(config.q_lora_rank, q_width, bias=False) if config.q_lora_rank else None
        self.kv_norm = Norm(rank, config)
        self.c_kv = nn.Linear(rank, H * (self.nope + self.v), bias=False)  # of each head its k, then its v
        self.c_proj = nn.Linear(H * self.v, C, bias=config.proj_bias)
        self.n_head, self.rank, self.cache_shapes = H, rank, [(1, rank + self.rope)]

    def forward(self, x, shared, cache=None, pos=None, absorb=None):
        q, latent, k_rope = self.c_attn(x)
        if self.c_q is not None:
            q = self.c_q(self.q_norm(q))
        q, rope = q.unflatten(-1, (self.n_head, -1)).transpose(1, 2), shared.rope if self.pos else None
        q, q_rope = q.split((self.nope, self.rope), dim=-1)
        q_rope = rotate(q_rope, rope)
        kept = torch.cat((self.kv_norm(latent)[:, None], rotate(k_rope[:, None], rope)), dim=-1)
        if cache is not None:
            kept, = cache.append(self.layer, pos, kept)
        w_k, w_v = self.c_kv.weight.view(self.n_head, -1, self.rank).split((self.nope, self.v), dim=1)
        T, S, up = q.shape[2], kept.shape[2], self.rank * (self.nope + self.v)
        if absorb is None:  # which is less work, a head
            absorb = (cache is not None and T * (up + S * (2 * self.rank + self.rope))
                      < S * (up + T * (self.nope + self.rope + self.v)))
        if absorb:
            q, k, v = q @ w_k, kept, kept[..., :self.rank]  # (B, H, T, rank); (B, 1, S, ...)
        else:
            kv = self.c_kv(kept[:, 0, :, :self.rank]).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            k, v = kv.split((self.nope, self.v), dim=-1)
            k = torch.cat((k, kept[..., self.rank:].expand(-1, self.n_head, -1, -1)), dim=-1)
        y = self.attend(torch.cat((q, q_rope), dim=-1), k, v, shared)
        return self.c_proj((y @ w_v.mT if absorb else y).transpose(1, 2).flatten(2))


# MLP and experts --------------------------------------------------------------------------------------------

class MLP(nn.Module):
    """down(f(up(x))), or gated: down(f(gate(x), up(x))). With n_expert as many of them, for rows sorted by
    expert, each expert's ending at `ends` (E,)."""

    def __init__(self, config, width, n_expert=None):
        super().__init__()
        self.act, gated = ACTIVATIONS[config.mlp]
        linear = functools.partial(Stack, n_expert) if n_expert else Fused
        self.c_fc = linear(config.n_embd, (width,) * (2 if gated else 1), bias=config.mlp_bias)
        self.c_proj = linear(width, (config.n_embd,), bias=config.mlp_bias)

    def forward(self, x, *ends):
        return self.c_proj(self.act(*self.c_fc(x, *ends)), *ends)[0]


class Stack(nn.Module):
    """A Fused for each expert: rows of x (n, width), sorted by expert, each through its expert's matrix."""

    def __init__(self, n_expert, width, parts, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_expert, sum(parts), width))
        self.bias = nn.Parameter(torch.empty(n_expert, sum(parts))) if bias else None
        self.parts = parts

    def forward(self, x, ends):
        """ends (E,) int32: where the rows of each expert end."""
        w = self.weight.to(x.dtype)
        # the fast kernels want bfloat16 and rows of whole 16 bytes
        fast = x.dtype == torch.bfloat16 and x.device.type != 'mps' and not any(n % 8 for n in w.shape[1:])
        y = F.grouped_mm(x, w.mT, offs=ends) if fast else segments(x, w, ends)
        if self.bias is not None:
            expert = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
            y = y + self.bias[expert].type_as(y)
        return y.split(self.parts, dim=-1)


@torch.compiler.disable  # segments of other lengths each time
def segments(x, w, ends):
    return torch.cat([F.linear(rows, one) for rows, one
                      in zip(x.tensor_split(ends[:-1].long().cpu()), w.unbind())])


class Move(torch.autograd.Function):
    """Rows of x to other places: x[source], zeros where source is len(x); back: where x's own rows went.
    The backward is a gather as well, where that of indexing is a scatter, slow or not deterministic."""

    @staticmethod
    def forward(ctx, x, source, back):
        ctx.save_for_backward(source, back)
        return _rows(x, source)

    @staticmethod
    def backward(ctx, grad):
        return _rows(grad, ctx.saved_tensors[1]), None, None


def _rows(x, source):
    return (F.pad(x, (0, 0, 0, 1)) if len(source) > len(x) else x)[source]


ROUTERS = {  # name: (logits -> logs of the experts' scores, scores of a group's experts -> what it is worth)
    'softmax': (lambda logits: logits.log_softmax(-1), lambda score: score.amax(-1)),  # Mixtral, DeepSeek-V2
    'sigmoid': (F.logsigmoid, lambda score: score.topk(2, -1).values.sum(-1)),  # DeepSeek-V3
}


class MoE(nn.Module):
    """Mixture of experts: each token passes through the n_expert_active experts that its router scores
    highest (Shazeer et al. 2017, arXiv:1701.06538), and through the shared ones (DeepSeekMoE,
    arXiv:2401.06066). No token is dropped."""

    def __init__(self, config):
        super().__init__()
        self.config, shared = config, (config.n_shared_expert or 0) * config.d_expert
        self.router = nn.Linear(config.n_embd, config.n_expert, bias=config.mlp_bias)
        self.experts = MLP(config, config.d_expert, config.n_expert)
        self.shared = MLP(config, shared) if shared else None
        if config.balance_bias:
            self.register_buffer('balance_bias', torch.zeros(config.n_expert))

    def route(self, x):
        """x (n, C) -> weights (n, k), experts (n, k), logits and log scores (n, E); all float32."""
        config, (log, worth) = self.config, ROUTERS[self.config.router]
        with torch.autocast(x.device.type, enabled=False):
            bias = self.router.bias if self.router.bias is None else self.router.bias.float()
            logits = F.linear(x.float(), self.router.weight.float(), bias)
        score = log(logits)
        rank = score.detach().exp()
        if config.balance_bias:  # arXiv:2408.15664: in choosing, not in weighing
            rank = rank + self.balance_bias
        if config.n_group:
            groups = rank.unflatten(1, (config.n_group, -1))  # (n, groups, experts of one)
            best = worth(groups).topk(config.topk_group).indices
            kept = (torch.arange(config.n_group, device=x.device)[:, None] == best[:, None]).any(-1)
            rank = groups.masked_fill(~kept[..., None], -math.inf).flatten(1)
        chosen = rank.topk(config.n_expert_active).indices
        weight = score.gather(1, chosen)
        # normalised among the chosen: the softmax of log scores, which no underflow can reach
        weight = weight.softmax(-1) if config.norm_topk_prob else weight.exp()
        return weight * config.routed_scaling_factor, chosen, logits, score

    def forward(self, x, shared):
        config, flat, k = self.config, x.flatten(0, 1), self.config.n_expert_active  # flat (n, C)
        weight, chosen, logits, score = self.route(flat)
        expert, order = chosen.flatten().sort(stable=True)  # (n k,): each choice, sorted by expert
        ends, n = self.ends(expert[None])[0], len(expert)
        # CPUs build a kernel for every new number of rows, in milliseconds: there each expert's rows are
        # filled up to a multiple of `block` with zeros, at most a sixteenth of all
        block = max(1, min(128, n // (16 * config.n_expert))) if x.device.type == 'cpu' else 1
        count = ends.diff(prepend=ends.new_zeros(1))
        filled = (count + block - 1) // block * block
        place = torch.arange(n, device=x.device) + ((filled - count).cumsum(0) - (filled - count))[expert]
        place, total = place[order.argsort()], round_up(n + config.n_expert * (block - 1), block)
        source = torch.full((total,), n, device=x.device).scatter(0, place, torch.arange(n, device=x.device))
        ends = filled.cumsum(0).int()
        ends[-1] = total
        each = flat.to(shared.dtype)[:, None].expand(-1, k, -1).flatten(0, 1)  # (n k, C), a row a choice
        y = self.experts(Move.apply(each, source, place), ends)
        y = Move.apply(y, place, source).unflatten(0, (-1, k))  # (n, k, C)
        y = (y * weight[..., None].type_as(y)).sum(1).view_as(x)
        if shared.routing is not None:
            rows = x.shape[0] if config.balance_per_sequence else 1
            load = self.ends(chosen.view(rows, -1).sort().values).diff(
                dim=1, prepend=torch.zeros(rows, 1, device=x.device, dtype=torch.long))
            share = score.softmax(-1).view(rows, -1, config.n_expert).mean(1)  # of the scores, (rows, E)
            balance = config.n_expert * (load / load[:1].sum() * share).sum(1).mean()  # 1 when uniform
            z = logits.logsumexp(-1).square().mean()  # ST-MoE, arXiv:2202.08906
            shared.routing.append((balance, z, load.sum(0).float()))
        return y if self.shared is None else y + self.shared(x)

    def ends(self, expert):
        """expert (rows, n), sorted -> (rows, E), where each expert's entries end."""
        every = torch.arange(self.config.n_expert, device=expert.device).expand(len(expert), -1).contiguous()
        return torch.searchsorted(expert, every, right=True)


# block ------------------------------------------------------------------------------------------------------

WIRINGS = {  # name: function of (x, attention, MLP, a norm for each further argument)
    'pre': lambda x, attn, mlp, ln_1, ln_2: (y := x + attn(ln_1(x))) + mlp(ln_2(y)),       # GPT-2, Llama
    'post': lambda x, attn, mlp, ln_1, ln_2: ln_2((y := ln_1(x + attn(x))) + mlp(y)),      # arXiv:1706.03762
    'output': lambda x, attn, mlp, ln_1, ln_2: (y := x + ln_1(attn(x))) + ln_2(mlp(y)),    # OLMo 2
    'sandwich': lambda x, attn, mlp, ln_1, ln_2, ln_3, ln_4:                               # Gemma 2
        (y := x + ln_2(attn(ln_1(x)))) + ln_4(mlp(ln_3(y))),
    'parallel': lambda x, attn, mlp, ln_1: x + attn(y := ln_1(x)) + mlp(y),                # GPT-J, Falcon-7B
    'parallel_2': lambda x, attn, mlp, ln_1, ln_2: x + attn(ln_1(x)) + mlp(ln_2(x)),       # GPT-NeoX
}


class Block(nn.Module):
    """Attention and MLP, wired as config.wiring says."""

    def __init__(self, config, layer):
        super().__init__()
        self.wire = WIRINGS[config.wiring]
        self.norms = list(inspect.signature(self.wire).parameters)[3:]
        self.ln_1 = Norm(config.n_embd, config)
        self.attn = (Attention if config.kv_lora_rank is None else LatentAttention)(config, layer)
        for name in self.norms[1:]:  # in this place, as nanoGPT's files have optimizer states by number
            setattr(self, name, Norm(config.n_embd, config))
        self.mlp = MoE(config) if config.has_experts(layer) else MLP(config, config.d_ff)
        self.p, self.scale, self.sparse = config.dropout, config.residual_scale, config.has_experts(layer)

    def forward(self, x, shared, cache=None, pos=None):
        def branch(y):
            y = dropout(y, self.p if self.training else 0.0)
            return y if self.scale == 1 else y * self.scale
        more = (shared,) if self.sparse else ()
        return self.wire(x, lambda y: branch(self.attn(y, shared, cache, pos)),
                         lambda y: branch(self.mlp(y, *more)), *[getattr(self, name) for name in self.norms])


# the model --------------------------------------------------------------------------------------------------

PARTS = {  # what a parameter's name contains: the part of the model that it is counted under
    'wte.': 'embedding', 'wpe.': 'embedding', 'lm_head.': 'head', 'router.': 'router', 'experts.': 'experts',
    'shared.': 'shared experts', 'mlp.': 'mlp', 'attn.': 'attention', '': 'norms',
}


class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        rows = round_up(config.vocab_size)  # padded for the kernels' sake; never counted, saved or returned
        self.wte = nn.Embedding(rows, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.pos == 'learned' else None
        self.ln_embd = Norm(config.n_embd, config) if config.embed_norm else nn.Identity()
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        if config.residual_lambdas:
            self.resid_lambdas, self.x0_lambdas = (nn.Parameter(torch.empty(config.n_layer)) for _ in 'ab')
        self.ln_f = nn.Identity() if config.wiring == 'post' else Norm(config.n_embd, config)
        self.lm_head = (None if config.tie_word_embeddings
                        else nn.Linear(config.n_embd, rows, bias=config.head_bias))
        self.rope = None
        self._make_rope()
        self.register_state_dict_post_hook(_trim_rows)
        self.register_load_state_dict_pre_hook(_pad_rows)
        self.init_weights()

    def _make_rope(self):
        device, scaling = self.wte.weight.device, self.config.rope_scaling or {}
        if self.config.pos == 'rope' and scaling.get('rope_type') not in ('dynamic', 'longrope'):
            length = self.config.block_size
            self.rope = rope_table(self.config, torch.arange(length, device=device), length)

    def _apply(self, fn, recurse=True):
        # The rotary tables are no buffers, as .to(bfloat16) must not round angles: made anew on a new device.
        # For the same reason balance biases stay float32.
        exact = [(m, m.balance_bias) for m in self.modules() if hasattr(m, 'balance_bias')]
        super()._apply(fn, recurse)
        for m, bias in exact:
            if not bias.is_meta:
                m.balance_bias = bias.to(m.balance_bias.device)
        if self.rope is not None and self.rope[0].device != self.wte.weight.device:
            self._make_rope()
        return self

    @torch.no_grad()
    def init_weights(self):
        """Every initial value, in one place:

        | tensor                      | value                                                              |
        |-----------------------------|--------------------------------------------------------------------|
        | wte, wpe                    | normal, std 0.02 (GPT-2), at most 4 / n_embd when tied             |
        | matrices of the blocks      | normal, std sqrt(1 / (3 columns)): 0.02 at 768, larger if narrower |
        | every c_proj                | 0: blocks start as the identity; as above where a norm follows it  |
        | lm_head, when untied        | 0: every token starts equally likely                               |
        | norm weights, resid_lambdas | 1                                                                  |
        | biases, sinks, x0_lambdas   | 0                                                                  |
        """
        if self.wte.weight.is_meta:
            return
        # With blocks that are the identity and the embedding as head, a token's own repetition has the logit
        # n_embd * std, which in wide models would be far above all others.
        embedding = min(0.02, 4 / self.config.n_embd) if self.lm_head is None else 0.02
        # The norm of a branch that is 0 would have a gradient of 1 / sqrt(eps).
        normed = self.config.wiring in ('output', 'sandwich')
        for name, w in self.named_parameters():
            if name.endswith(('bias', 'sink', 'x0_lambdas')) or name == 'lm_head.weight' \
                    or name.endswith('c_proj.weight') and not normed:
                w.zero_()
            elif w.ndim == 1:
                w.fill_(1.0)
            else:
                hidden = (1 / (3 * w.shape[-1])) ** 0.5
                w.normal_(std=embedding if name in ('wte.weight', 'wpe.weight') else hidden)
        self.wte.weight[self.config.vocab_size:] = 0.0

    def compute_dtype(self):
        """The dtype that matmuls run in: autocast's where it is on, else the weights'."""
        device = self.wte.weight.device.type
        return (torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device)
                else self.wte.weight.dtype)

    def forward(self, idx, targets=None, cache=None, keep=None, weights=None):
        """idx (B, T) int64 -> logits (B, T or keep, vocab_size) float32; with targets (B, T), -1 to be
        ignored, the mean cross entropy and aux: {} for a dense model, else 'balance' and 'z' (0-d, means over
        the sparse layers, not weighted, not in the loss) and 'load' (sparse layers, experts), choices made.
        With a cache the tokens are appended to it. weights: a list that takes the attention weights of each
        layer, (B, H, T, S). Raises ValueError if the tokens do not fit into block_size or the cache."""
        T, config = idx.shape[1], self.config
        if T > config.block_size:
            raise ValueError(f"{T} tokens do not fit into block_size={config.block_size}")
        if cache is not None and len(idx) != len(cache.length):
            raise ValueError(f"{len(idx)} rows of tokens for a cache of {len(cache.length)}")
        pos = torch.arange(T, device=idx.device)[None] if cache is None else cache.positions(T)  # (1 or B, T)
        start = None if config.document_token is None else self.document_starts(idx, pos, cache)
        place = pos if start is None else pos - start
        x = self.wte(idx)                                                                        # (B, T, C)
        if config.embed_scale != 1:
            x = x * config.embed_scale
        if self.wpe is not None:
            x = x + self.wpe(place)
        if config.pos == 'sinusoidal':
            x = x + sinusoid(place, config.n_embd).type_as(x)
        x = self.ln_embd(x)
        if self.compute_dtype() is torch.bfloat16:
            x = x.bfloat16()  # a bfloat16 residual stream; under float16 it stays float32: no overflow
        x = x0 = dropout(x, config.dropout if self.training else 0.0)
        shared = self.shared(x, pos, place, start, cache, weights, [] if targets is not None else None)
        for i, block in enumerate(self.h):
            if config.residual_lambdas:
                x = self.resid_lambdas[i].type_as(x) * x + self.x0_lambdas[i].type_as(x) * x0
            x = block(x, shared, cache, pos)
        if cache is not None:
            cache.advance(T)
        if keep is not None:
            x = x[:, max(0, T - keep):]
        x, head = self.ln_f(x), self.lm_head
        x = F.linear(x, self.wte.weight) if head is None else head(x)
        logits = x[..., :config.vocab_size].float()
        if config.logit_softcap:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction='sum')
        loss, aux = loss / (targets != -1).sum().clamp(min=1), {}
        if shared.routing:
            balance, z, load = map(torch.stack, zip(*shared.routing))
            aux = {'balance': balance.mean(), 'z': z.mean(), 'load': load}
        return loss, aux

    def document_starts(self, idx, pos, cache):
        """(B, T): the position where each new token's document starts: its last document_token, or 0."""
        start = torch.where(idx == self.config.document_token, pos, 0).cummax(dim=1).values
        if cache is not None:
            length = cache.length[:, None]
            before = torch.where(length > 0, cache.starts.gather(1, (length - 1).clamp(min=0)), 0)  # (B, 1)
            start = torch.maximum(start, before)
            cache.starts.scatter_(1, pos.expand_as(start), start)
        return start

    def shared(self, x, pos, place, start, cache, weights, routing):
        """Rotary factors and masks for new tokens at pos: what all layers use. place: pos in the document."""
        config, rope = self.config, self.rope
        if rope is not None:
            rope = tuple(table[place][:, None] for table in rope)  # (1 or B, 1, T, pairs) each
        elif config.pos == 'rope':  # a scaling that depends on the length
            rope = rope_table(config, place[:, None], x.shape[1] if cache is None else cache.max_len)
        explicit = bool(weights is not None or config.attn_softcap or config.attn_sink
                        or x.device.type == 'cpu' and torch.is_grad_enabled())
        masks = {kind: self.mask(x, pos, start, cache, *kind, explicit)
                 for kind in dict.fromkeys(block.attn.kind for block in self.h)}
        return Shared(rope, masks, explicit, weights, routing, self.compute_dtype())

    def mask(self, x, pos, start, cache, window, alibi, explicit):
        """The Mask of the layers with this window, None for all, and with or without ALiBi's bias."""
        T, longest = x.shape[1], 0 if cache is None else cache.longest
        square, near = longest == 0, window is None or longest is not None and longest + T <= window
        if start is None and not alibi:
            if square and near and T > 1 and not explicit:
                return Mask(None, True, None)  # the kernel knows
            if T == 1 and (cache is None or cache.even and (near or cache.slots(window) == window)):
                return Mask(None, square, None)  # all is seen
        k_pos = pos if cache is None else cache.key_positions(window, pos)
        first = 0 if start is None else start
        if window is not None:
            first = torch.maximum(pos - (window - 1), first if start is not None else torch.zeros_like(pos))
        bias = torch.zeros((), dtype=self.compute_dtype(), device=x.device)
        if alibi:
            slopes = alibi_slopes(self.config.n_head, x.device)[:, None, None] * self.config.alibi_scale
            bias = (-slopes * (pos[:, :, None] - k_pos[:, None])[:, None]).to(bias.dtype)
        return Mask(bias.where(visible(pos, k_pos, first), -math.inf), square, window)

    def make_cache(self, batch_size, max_len, static=False, max_rewind=0):
        """An empty Cache in the compute dtype. static: for a compiled step; max_rewind: see Cache."""
        if not (batch_size > 0 and 0 < max_len <= self.config.block_size and max_rewind >= 0):
            raise ValueError(f"batch_size={batch_size}, max_len={max_len}, max_rewind={max_rewind}: a cache "
                             f"has rows, and 1 to block_size={self.config.block_size} tokens")
        layers = [(block.attn.window, block.attn.cache_shapes) for block in self.h]
        return Cache(layers, batch_size, max_len, self.wte.weight.device, self.compute_dtype(), static,
                     max_rewind, self.config.document_token is not None)

    # accounting

    def account(self, block_size=None):
        """part -> (parameters, those that a token uses, training FLOPs a token). Tied weights count once,
        padding not at all. A multiply-add is two FLOPs; 6 a matmul weight, forward and backward; attention
        over block_size tokens or the window, the masked half counted too (PaLM, arXiv:2204.02311, B)."""
        config, table = self.config, {}
        used = (config.n_expert_active or 0) / (config.n_expert or 1)
        for name, w in self.named_parameters():
            part = next(part for pattern, part in PARTS.items() if pattern in name)
            n = (w[:config.vocab_size] if name in PADDED else w).numel()
            active = round(n * used) if part == 'experts' else n
            matmul = w.ndim > 1 and not name.endswith('bias') and part != 'embedding'
            table.setdefault(part, []).append((n, active, 6 * active * matmul))
        if self.lm_head is None:
            table['head'] = [(0, 0, 6 * config.vocab_size * config.n_embd)]
        length = block_size or config.block_size
        widths = 2 * config.head_dim if config.kv_lora_rank is None else (
            config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
        table['scores'] = [(0, 0, 6 * config.n_head * widths * min(length, block.attn.window or length))
                           for block in self.h]
        return {part: tuple(map(sum, zip(*rows))) for part, rows in table.items()}

    def num_params(self, active=False):
        return sum(row[active] for row in self.account().values())

    def flops_per_token(self, block_size=None):
        return sum(row[2] for row in self.account(block_size).values())

    def cache_numbers(self, length=1):
        """Numbers that a row's cache holds for so many tokens."""
        return sum(heads * width * min(length, block.attn.window or length)
                   for block in self.h for heads, width in block.attn.cache_shapes)

    def param_groups(self):
        """Every parameter once, by what an optimizer does with it: 'matrix' (inside the blocks), 'embedding'
        (wte, wpe, lm_head) and 'vector' (norms, biases, sinks, lambdas; not decayed)."""
        groups = {'matrix': [], 'embedding': [], 'vector': []}
        for name, w in self.named_parameters():
            vector = w.ndim < 2 or name.endswith('bias')
            groups['vector' if vector else 'matrix' if name.startswith('h.') else 'embedding'].append(w)
        return groups

    def parts(self):
        """Weight matrix -> row counts of the projections fused in it, for the matrices of the blocks."""
        return {m.weight: getattr(m, 'parts', (m.weight.shape[-2],))
                for m in self.h.modules() if isinstance(m, (nn.Linear, Stack))}

    row_splits, cache_elements = parts, cache_numbers

    @torch.no_grad()
    def move_balance(self, load, rate=0.001):
        """Moves each balance bias by rate towards even load (sparse layers, E), after a step: up for experts
        with less than the mean, down for those with more (Wang et al. 2024, arXiv:2408.15664)."""
        sparse = [block.mlp for block in self.h if isinstance(block.mlp, MoE)]
        for moe, one in zip(sparse, load):
            moe.balance_bias += rate * (one.mean() - one).sign()

    # checkpoints

    @classmethod
    def from_pretrained(cls, folder, dtype=None, device='cpu', **changes):
        """A folder with config.json and safetensors, as transformers writes them -> the model, in eval mode.
        dtype: of the weights; None: as they are stored. changes: config fields to set otherwise. Raises
        FileNotFoundError, or ValueError that names what is not supported or does not fit."""
        folder = os.fspath(folder)
        c = _read_json(os.path.join(folder, 'config.json'))
        try:
            config = dataclasses.replace(config_from_hf(c), **changes)
        except ValueError as error:
            raise ValueError(f"{folder}/config.json: {error}") from None
        tensors, family = SafeTensors(folder), FAMILIES[c['model_type']]
        with torch.device('meta'):
            model = cls(config).to(dtype or tensors.dtype())
        model = model.to_empty(device=device)
        with torch.no_grad():
            _load(model, tensors, folder, family)
        return model.eval()

    def save_pretrained(self, folder, **more):
        """Writes config.json, with `more` in it, and model.safetensors, which AutoModelForCausalLM opens, and
        each is renamed when it is complete, config.json last. Raises ValueError if no family of FAMILIES
        computes what this model does, or if the folder holds other weights."""
        c = {**config_to_hf(self.config), 'dtype': str(self.wte.weight.dtype)[6:], **more}
        if self.wte.weight.dtype not in SAFE_DTYPES.values():
            raise ValueError(f"weights in {c['dtype']} cannot be written: use float32, bfloat16 or float16")
        other = [name for name in (os.listdir(folder) if os.path.isdir(folder) else ())
                 if '.safetensors' in name and name != 'model.safetensors']
        if other:
            raise ValueError(f"{folder} holds other weights ({other[0]}): give an empty folder")
        os.makedirs(folder, exist_ok=True)
        with torch.no_grad():
            save_safetensors(lambda: _theirs(self, FAMILIES[c['model_type']]),
                             os.path.join(folder, 'model.safetensors'))
        path = os.path.join(folder, 'config.json')
        with open(path + '.tmp', 'w', encoding='utf-8') as f:
            json.dump(c, f, indent=2)
        os.replace(path + '.tmp', path)

    @classmethod
    def from_checkpoint(cls, path, **changes):
        """Reads a checkpoint of train.py, or of nanoGPT. Returns the model, on the CPU, in the dtype stored,
        and the rest of the file, a dict. changes: config fields to set otherwise (dropout, a smaller
        block_size). Raises FileNotFoundError, or ValueError for a file that is damaged or no checkpoint."""
        try:
            rest = torch.load(path, map_location='cpu', weights_only=True)
        except FileNotFoundError:
            raise FileNotFoundError(f"no checkpoint at {path}: train one with `python train.py`, "
                                    "or set --out_dir or --init_from") from None
        except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, OSError, KeyError, AttributeError,
                IndexError, TypeError) as error:  # what torch.load raises for damaged and foreign files
            raise ValueError(f"{path} cannot be read as a checkpoint: it is truncated, damaged or another "
                             "kind of file; use another one") from error
        if not isinstance(rest, dict) or not {'model', 'model_args'} <= rest.keys():
            keys = ', '.join(map(str, list(rest)[:5])) if isinstance(rest, dict) else type(rest).__name__
            raise ValueError(f"{path} is no checkpoint of train.py: it holds {keys}, "
                             "not model and model_args")
        state, args = rest.pop('model'), dict(rest['model_args'])
        state = {name.replace('_orig_mod.', '').replace('module.', ''): w for name, w in state.items()}
        if 'transformer.wte.weight' in state:  # nanoGPT: its names less a prefix, its head tied
            state = {name.removeprefix('transformer.'): w for name, w in state.items()
                     if name != 'lm_head.weight'}
            args = {**dict(pos='learned', norm='layernorm', norm_eps=1e-5, mlp='gelu', qk_norm=False), **args}
        fields = {f.name for f in dataclasses.fields(GPTConfig)}
        if unknown := args.keys() - fields:
            raise ValueError(f"{path} needs model options that this version lacks: "
                             f"{', '.join(sorted(unknown))}")
        trained = GPTConfig(**args)
        config = dataclasses.replace(trained, **changes)
        if 'wpe.weight' in state and config.block_size != trained.block_size:
            if config.block_size > trained.block_size:
                raise ValueError(f"block_size={config.block_size} is more than the {trained.block_size} "
                                 f"positions that {path} has learned")
            state['wpe.weight'] = state['wpe.weight'][:config.block_size]
        with torch.device('meta'):
            model = cls(config)
        model = model.to_empty(device='cpu')
        expected = {name: w.shape for name, w in model.state_dict().items()}
        wrong = [f"{name} missing" for name in expected.keys() - state.keys()]
        wrong += [f"{name} unexpected" for name in state.keys() - expected.keys()]
        wrong += [f"{name} {tuple(state[name].shape)} instead of {tuple(expected[name])}"
                  for name in expected.keys() & state.keys() if state[name].shape != expected[name]]
        if wrong:
            raise ValueError(f"{path} does not fit its own model_args: " + ', '.join(sorted(wrong)[:5])
                             + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else ''))
        model.load_state_dict(state)
        rest['model_args'] = dataclasses.asdict(config)
        return model, rest


PADDED = ('wte.weight', 'lm_head.weight', 'lm_head.bias')


def _trim_rows(model, state, prefix, metadata):
    for name in PADDED:
        if prefix + name in state:
            state[prefix + name] = state[prefix + name][:model.config.vocab_size]


def _pad_rows(model, state, prefix, *_):
    for name in PADDED:
        if prefix + name in state:
            w, rows = state[prefix + name], model.wte.num_embeddings
            if len(w) == model.config.vocab_size:  # any other size is for strict loading to refuse
                state[prefix + name] = F.pad(w, (0, 0) * (w.ndim - 1) + (0, rows - len(w)))


# Hugging Face checkpoints -----------------------------------------------------------------------------------

def _over(base, **more):
    """The family `base` with what is different: dicts are merged, the rest replaced."""
    return {**base, **{key: {**base.get(key, {}), **value} if isinstance(value, dict) else value
                       for key, value in more.items()}}


def _grouped(config):
    """Their rows: for each k/v head its queries, then its key, then its value."""
    K, D, G = config.n_kv_head, config.head_dim, config.n_head // config.n_kv_head
    rows = torch.arange(K * (G + 2) * D).view(K, G + 2, D)
    return torch.cat((rows[:, :G].flatten(), rows[:, G].flatten(), rows[:, G + 1].flatten()))


def _halves(heads, kept, turned):
    """Their rows: for each head `kept`, then `turned` in interleaved pairs, where ours have halves."""
    one = torch.cat((torch.arange(kept), kept + torch.arange(turned).view(-1, 2).T.flatten()))
    return (torch.arange(heads)[:, None] * (kept + turned) + one).flatten()


def _latent_q(config):
    return _halves(config.n_head, config.qk_nope_head_dim, config.qk_rope_head_dim)


def _latent_in(config):
    q = _latent_q(config) if config.q_lora_rank is None else torch.arange(config.q_lora_rank)
    return torch.cat((q, len(q) + _halves(1, config.kv_lora_rank, config.qk_rope_head_dim)))


def _alternating(config):
    """Their rows: a row of the gate, a row of up, and so on."""
    return torch.arange(2 * config.d_expert).view(-1, 2).T.flatten()


LLAMA = dict(
    arch='LlamaForCausalLM',
    fields=dict(  # ours: theirs in config.json, the first that is there
        vocab_size='vocab_size', block_size='max_position_embeddings', n_layer='num_hidden_layers',
        n_head='num_attention_heads', n_kv_head='num_key_value_heads', n_embd='hidden_size',
        head_dim='head_dim', d_ff='intermediate_size', norm_eps='rms_norm_eps', mlp='hidden_act',
        qkv_bias='attention_bias', proj_bias='attention_bias', mlp_bias='mlp_bias',
        tie_word_embeddings='tie_word_embeddings'),
    ours=dict(qk_norm=False, tie_word_embeddings=False),  # unless a field says otherwise
    theirs={},       # what their other fields must be, where they are there
    layer='model.layers.N.',
    names={          # our modules and tensors: theirs, one after the other
        'wte': 'model.embed_tokens', 'ln_f': 'model.norm', 'lm_head': 'lm_head',
        'ln_1': 'input_layernorm', 'ln_2': 'post_attention_layernorm',
        'attn.c_attn': 'self_attn.q_proj self_attn.k_proj self_attn.v_proj',
        'attn.q_norm': 'self_attn.q_norm', 'attn.k_norm': 'self_attn.k_norm',
        'attn.c_proj': 'self_attn.o_proj', 'mlp.c_fc': 'mlp.gate_proj mlp.up_proj',
        'mlp.c_proj': 'mlp.down_proj', 'mlp.router': 'mlp.gate',
        'mlp.experts.c_fc': 'mlp.experts.E.gate_proj mlp.experts.E.up_proj',
        'mlp.experts.c_proj': 'mlp.experts.E.down_proj', 'mlp.shared.c_proj': 'mlp.shared_experts.down_proj',
        'mlp.shared.c_fc': 'mlp.shared_experts.gate_proj mlp.shared_experts.up_proj'},
    rows={},         # our modules whose rows have another order there: config -> their rows in our order
    transposed=(),   # modules whose matrices are transposed there
    windows='',      # layers that slide, unless layer_types says; '': the family has none
)
MISTRAL = _over(LLAMA, arch='MistralForCausalLM', windows='S',
                fields=dict(qkv_bias=None, proj_bias=None, mlp_bias=None))
QWEN3 = _over(LLAMA, arch='Qwen3ForCausalLM', windows='S', fields=dict(mlp_bias=None),
              ours=dict(qk_norm=True))
EXPERTS = dict(n_expert=('num_local_experts', 'num_experts', 'n_routed_experts'),
               n_expert_active=('num_experts_per_tok', 'experts_per_token'))
DEEPSEEK_V3 = _over(
    LLAMA, arch='DeepseekV3ForCausalLM',
    fields=dict(n_kv_head=None, head_dim=None, mlp_bias=None, n_shared_expert='n_shared_experts',
                n_expert=('n_routed_experts', 'num_local_experts'), n_expert_active='num_experts_per_tok',
                d_expert='moe_intermediate_size', n_dense_layer='first_k_dense_replace',
                **{name: name for name in (
                    'kv_lora_rank', 'q_lora_rank', 'qk_nope_head_dim', 'qk_rope_head_dim', 'v_head_dim',
                    'norm_topk_prob', 'routed_scaling_factor', 'n_group', 'topk_group')}),
    ours=dict(qk_norm=None, router='sigmoid', balance_bias=True),
    theirs=dict(moe_layer_freq=1, topk_method='noaux_tc', scoring_func='sigmoid', rope_interleave=True),
    names={'attn.c_attn': 'self_attn.q_a_proj self_attn.kv_a_proj_with_mqa',
           'attn.q_norm': 'self_attn.q_a_layernorm', 'attn.c_q': 'self_attn.q_b_proj',
           'attn.kv_norm': 'self_attn.kv_a_layernorm', 'attn.c_kv': 'self_attn.kv_b_proj',
           'mlp.balance_bias': 'mlp.gate.e_score_correction_bias'},
    rows={'attn.c_attn': _latent_in, 'attn.c_q': _latent_q})
BLOOM = dict(
    arch='BloomForCausalLM', theirs=dict(apply_residual_connection_post_layernorm=False), windows='',
    transposed=(),
    fields=dict(vocab_size='vocab_size', block_size='seq_length', n_layer=('n_layer', 'num_hidden_layers'),
                n_head=('n_head', 'num_attention_heads'),
                n_embd=('hidden_size', 'n_embed'), norm_eps='layer_norm_epsilon',
                tie_word_embeddings='tie_word_embeddings'),
    ours=dict(block_size=2048, norm='layernorm', norm_eps=1e-5, bias=True, qk_norm=False, pos='alibi',
              mlp='gelu_tanh', embed_norm=True),
    layer='transformer.h.N.',
    names={'wte': 'transformer.word_embeddings', 'ln_embd': 'transformer.word_embeddings_layernorm',
           'ln_f': 'transformer.ln_f', 'lm_head': 'lm_head', 'ln_1': 'input_layernorm',
           'ln_2': 'post_attention_layernorm', 'attn.c_attn': 'self_attention.query_key_value',
           'attn.c_proj': 'self_attention.dense', 'mlp.c_fc': 'mlp.dense_h_to_4h',
           'mlp.c_proj': 'mlp.dense_4h_to_h'},
    rows={'attn.c_attn': _grouped})
FALCON = _over(
    BLOOM, arch='FalconForCausalLM', theirs=dict(
        apply_residual_connection_post_layernorm=False, ff_factor=4, **dict.fromkeys(  # None: any, read below
            ('alibi', 'multi_query', 'parallel_attn', 'new_decoder_architecture', 'num_ln_in_parallel_attn',
             'num_kv_heads', 'n_head_kv'))),
    fields=dict(block_size='max_position_embeddings', n_layer=('num_hidden_layers', 'n_layer'), bias='bias',
                n_head=('num_attention_heads', 'n_head'), n_embd='hidden_size', d_ff='ffn_hidden_size',
                mlp='activation'),
    ours=dict(bias=False, norm_bias=True, pos='rope', mlp='gelu', embed_norm=False))
NEOX = _over(
    BLOOM, arch='GPTNeoXForCausalLM', theirs={},
    fields={**LLAMA['fields'], 'n_kv_head': None, 'head_dim': None, 'mlp_bias': None,
            'norm_eps': 'layer_norm_eps'},
    ours=dict(pos='rope', mlp='gelu', embed_norm=False, tie_word_embeddings=False,
              partial_rotary_factor=0.25),
    layer='gpt_neox.layers.N.',
    names={'wte': 'gpt_neox.embed_in', 'ln_f': 'gpt_neox.final_layer_norm', 'lm_head': 'embed_out',
           'attn.c_attn': 'attention.query_key_value', 'attn.c_proj': 'attention.dense'})
FAMILIES = {
    'qwen3': QWEN3,
    'llama': LLAMA,
    'mistral': _over(MISTRAL),
    'qwen2': _over(MISTRAL, arch='Qwen2ForCausalLM', ours=dict(qkv_bias=True, proj_bias=False)),
    'mixtral': _over(
        MISTRAL, arch='MixtralForCausalLM', fields=dict(EXPERTS, d_expert='intermediate_size'),
        names={'mlp.router': 'block_sparse_moe.gate', 'mlp.experts.c_proj': 'block_sparse_moe.experts.E.w2',
               'mlp.experts.c_fc': 'block_sparse_moe.experts.E.w1 block_sparse_moe.experts.E.w3'}),
    'qwen3_moe': _over(QWEN3, arch='Qwen3MoeForCausalLM', ours=dict(norm_topk_prob=False), fields=dict(
        EXPERTS, d_expert='moe_intermediate_size', norm_topk_prob='norm_topk_prob')),
    'deepseek_v3': DEEPSEEK_V3,
    'deepseek_v2': _over(DEEPSEEK_V3, arch='DeepseekV2ForCausalLM', fields=dict(norm_topk_prob=None),
                         ours=dict(router='softmax', balance_bias=False, norm_topk_prob=False),
                         theirs=dict(topk_method=None, scoring_func='softmax', norm_topk_prob=False)),
    'bloom': BLOOM,
    'falcon': FALCON,
    'gpt_neox': NEOX,
    'gpt2': _over(
        BLOOM, arch='GPT2LMHeadModel', rows={'attn.c_attn': None}, ours=dict(pos='learned', embed_norm=False),
        theirs=dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
                    add_cross_attention=False),
        fields=dict(block_size=('n_positions', 'n_ctx'), n_embd='n_embd', d_ff='n_inner',
                    mlp='activation_function'),
        names={'wte': 'transformer.wte', 'wpe': 'transformer.wpe', 'ln_1': 'ln_1', 'ln_2': 'ln_2',
               **{name: name for name in ('attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj')}},
        transposed=('attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj')),
    'mpt': _over(
        BLOOM, arch='MptForCausalLM', rows={'attn.c_attn': None}, layer='transformer.blocks.N.',
        fields=dict(block_size='max_seq_len', n_layer='n_layers', n_head='n_heads', n_embd='d_model'),
        ours=dict(bias=False, mlp='gelu', embed_norm=False),
        theirs=dict(no_bias=True, logit_scale=None, embedding_fraction=1.0, expansion_ratio=4,
                    norm_type='low_precision_layernorm'),
        names={'wte': 'transformer.wte', 'ln_f': 'transformer.norm_f', 'ln_1': 'norm_1', 'ln_2': 'norm_2',
               'attn.c_attn': 'attn.Wqkv', 'attn.c_proj': 'attn.out_proj', 'mlp.c_fc': 'ffn.up_proj',
               'mlp.c_proj': 'ffn.down_proj'}),
    'olmo2': _over(LLAMA, arch='Olmo2ForCausalLM', fields=dict(mlp_bias=None, head_dim=None),
                   ours=dict(qk_norm='whole', wiring='output'),
                   names={'ln_1': 'post_attention_layernorm', 'ln_2': 'post_feedforward_layernorm'}),
    'gemma2': _over(
        LLAMA, arch='Gemma2ForCausalLM', windows='SL', plus_one=True,
        theirs=dict(use_bidirectional_attention=None),
        fields=dict(mlp=('hidden_activation', 'hidden_act'), mlp_bias=None,
                    attn_softcap='attn_logit_softcapping',
                    logit_softcap='final_logit_softcapping'),
        ours=dict(wiring='sandwich', tie_word_embeddings=True),
        names={'ln_2': 'post_attention_layernorm', 'ln_3': 'pre_feedforward_layernorm',
               'ln_4': 'post_feedforward_layernorm'}),
    'phi': _over(
        LLAMA, arch='PhiForCausalLM', theirs=dict(qk_layernorm=False),
        fields=dict(norm_eps='layer_norm_eps', qkv_bias=None, proj_bias=None, mlp_bias=None, head_dim=None),
        ours=dict(norm='layernorm', bias=True, head_bias=True, wiring='parallel', partial_rotary_factor=0.5),
        names={'ln_f': 'model.final_layernorm', 'attn.c_proj': 'self_attn.dense', 'mlp.c_fc': 'mlp.fc1',
               'mlp.c_proj': 'mlp.fc2'}),
    'smollm3': _over(LLAMA, arch='SmolLM3ForCausalLM', windows='S', ours=dict(tie_word_embeddings=True)),
    'gpt_oss': _over(
        LLAMA, arch='GptOssForCausalLM', windows='SL',
        theirs=dict(swiglu_limit=7.0, swiglu_alpha=1.702, hidden_act='silu'),
        fields=dict(EXPERTS, mlp=None, mlp_bias=None, d_expert='intermediate_size'),
        ours=dict(mlp='swiglu_oai', attn_sink=True, mlp_bias=True),
        names={'mlp.router': 'mlp.router', 'attn.sink': 'self_attn.sinks',
               **{f'mlp.experts.{ours}.{kind}': f'mlp.experts.{theirs}_proj{end}'
                  for ours, theirs in (('c_fc', 'gate_up'), ('c_proj', 'down'))
                  for kind, end in (('weight', ''), ('bias', '_bias'))}},
        rows={'mlp.experts.c_fc': _alternating}, transposed=('mlp.experts.c_fc', 'mlp.experts.c_proj')),
    'minimind': _over(LLAMA, arch='MiniMindForCausalLM', ours=dict(tie_word_embeddings=True), theirs=dict(
        use_moe=False, **dict.fromkeys(('n_routed_experts', 'n_shared_experts', 'norm_topk_prob',
                                        'num_experts_per_tok', 'scoring_func', 'num_experts')))),
}
GATED = {'silu': 'swiglu', 'gelu_pytorch_tanh': 'geglu_tanh', 'gelu': 'geglu', 'relu': 'reglu',
         'sigmoid': 'glu'}
PLAIN = {'gelu_new': 'gelu_tanh', 'gelu': 'gelu', 'relu': 'relu', 'relu2': 'relu2', 'silu': 'silu',
         'gelu_pytorch_tanh': 'gelu_tanh', 'gelu_fast': 'gelu_tanh'}
HARMLESS = re.compile(  # fields of config.json that change nothing that is computed here, or are read below
    r'_.*|architectures|model_type|(torch_)?dtype|transformers_version|.*cache.*|.*_token(_id)?|.*dropout.*|'
    r'.*_pdrop|initializer_range|output_(router_logits|attentions|hidden_states)|summary_.*|auto_map|'
    r'task_.*|.*aux_loss.*|.*loss_alpha|'
    r'pretraining_tp|seq_aux|n_ctx|slow_but_exact|ep_size|.*checkpointing|id2label|label2id|is_decoder|'
    r'init_(device|config|std)|name|verbose|language|classifier_.*|partial_rotary_factor|'
    r'rope_(parameters|scaling|theta|interleave)|rotary_(pct|emb_base)|'
    r'.*original_max_position_embeddings|.*sliding_window|max_window_layers|layer_types|no_rope_.*|'
    r'decoder_sparse_step|mlp_only_layers|attn_config|expansion_ratio|learned_pos_emb|'
    r'reorder_and_.*|use_parallel_residual|query_pre_attn_scalar|num_nextn_predict_layers|(qk_)?head_dim|'
    r'topk_method|hidden_size|num_key_value_heads|num_local_experts|intermediate_size|initial_context_length|'
    r'flash_attn|inference_rope_.*|router_jitter_noise|attn_implementation|max_sequence_length|'
    r'attention_softmax_in_fp32|masked_softmax_fusion|offset_alibi|skip_bias_add.*|tokenizer_name|'
    r'is_llama_config|transformers.js_config|bias_dropout_fusion|unk_token_id|hidden_act')


def _read_rope(c, args):
    rope = dict(c.get('rope_parameters') or {
        'rope_theta': c.get('rope_theta') or c.get('rotary_emb_base'), **(c.get('rope_scaling') or {})})
    kind, old = rope.pop('rope_type', None), rope.pop('type', None)
    args['rope_base'] = float(rope.pop('rope_theta', None) or 10000.0)
    share = rope.pop('partial_rotary_factor', None) or c.get('partial_rotary_factor') or c.get('rotary_pct')
    if 'partial_rotary_factor' in args:
        args['partial_rotary_factor'] = share or args['partial_rotary_factor']
    elif share and share != 1:
        raise ValueError(f"{c['model_type']} with partial_rotary_factor={share} is not supported")
    if (kind or old or 'default') != 'default':
        scaling = {'rope_type': kind or old,
                   **{key: value for key, value in rope.items() if value is not None}}
        length = c['max_position_embeddings']
        if scaling['rope_type'] not in ('linear', 'ntk'):
            scaling.setdefault('original_max_position_embeddings',
                               c.get('original_max_position_embeddings') or length)
        if scaling['rope_type'] == 'longrope':
            scaling.setdefault('factor', length / scaling['original_max_position_embeddings'])
        args['rope_scaling'] = scaling


def _write_rope(config, c):
    scaling = config.rope_scaling or {}
    length = scaling.get('original_max_position_embeddings')
    if {'ntk': True, 'dynamic': length != config.block_size}.get(scaling.get('rope_type')):
        raise ValueError('transformers has no such scaling')
    c['rope_parameters'] = {'rope_type': 'default', 'rope_theta': config.rope_base,
                            **(config.rope_scaling or {})}
    if 'partial_rotary_factor' in FAMILIES[c['model_type']]['ours']:
        c['rope_parameters']['partial_rotary_factor'] = config.partial_rotary_factor


SAME_WINDOWS = ('mistral', 'mixtral', 'qwen3_moe')  # transformers gives all of their layers the window


def _read_windows(c, args, default):
    size, n, start = c.get('sliding_window'), args['n_layer'], c.get('max_window_layers')
    letters = ''.join({'sliding_attention': 'S', 'full_attention': 'L'}.get(kind, '?')
                      for kind in c.get('layer_types') or ())
    if '?' in letters:
        raise ValueError(f"layer_types={sorted(set(c['layer_types']))} is not supported")
    qwen = c['model_type'] in ('qwen2', 'qwen3', 'qwen3_moe', 'smollm3')
    used = bool(size) and c.get('use_sliding_window', not qwen)
    if c['model_type'] in SAME_WINDOWS:
        letters = default
    elif not letters and c['model_type'] in ('qwen2', 'qwen3'):
        start = 28 if start is None else start
        letters = 'L' * min(n, start) + 'S' * (n - start)
    letters = letters or default
    if used and not default:
        raise ValueError(f"{c['model_type']} with sliding_window={size} is not supported")
    if used and 'S' in letters:
        args.update(window=size, window_pattern=letters)


def _write_windows(config, c, default):
    if not default:
        return
    letters = ['full_attention' if config.window_of(i) is None else 'sliding_attention'
               for i in range(config.n_layer)]
    c.update(sliding_window=config.window, use_sliding_window=config.window is not None, max_window_layers=0)
    if c['model_type'] not in SAME_WINDOWS:
        c['layer_types'] = letters
    if c['model_type'] == 'gpt_oss':
        c['sliding_window'] = config.window or config.block_size


def _read_falcon(c, args):
    new, heads = c.get('new_decoder_architecture'), c.get('num_kv_heads') or c.get('n_head_kv')
    args['n_kv_head'] = heads if new else 1 if c.get('multi_query', True) else None
    if new:
        args['wiring'] = 'parallel' if c.get('num_ln_in_parallel_attn') == 1 else 'parallel_2'
    else:
        args['wiring'] = 'parallel' if c.get('parallel_attn', True) else 'pre'
    if c.get('alibi'):  # Falcon scales the bias with the scores
        args.update(pos='alibi', alibi_scale=(args['n_embd'] // args['n_head']) ** -0.5)


def _write_falcon(config, c):
    new = config.wiring == 'parallel_2' or config.n_kv_head not in (1, config.n_head)
    c.update(new_decoder_architecture=new, num_kv_heads=config.n_kv_head, multi_query=config.n_kv_head == 1,
             parallel_attn=config.wiring != 'pre', alibi=config.pos == 'alibi',
             num_ln_in_parallel_attn=1 + (config.wiring == 'parallel_2') if new else None)


def _read_mpt(c, args):
    attn = c.get('attn_config') or {}
    for name, value in dict(alibi=True, alibi_bias_max=8, clip_qkv=None, qk_ln=False, prefix_lm=False,
                            attn_type='multihead_attention', attn_uses_sequence_id=False).items():
        if attn.get(name, value) != value:
            raise ValueError(f"attn_config has {name}={attn[name]!r}, which is not supported")
    args['attn_scale'] = attn.get('softmax_scale')


def _write_mpt(config, c):
    c['attn_config'] = dict(alibi=True, alibi_bias_max=8, softmax_scale=config.attn_scale)


def _read_deepseek(c, args):
    if args.get('qkv_bias') and not args.get('q_lora_rank'):
        raise ValueError('attention_bias without q_lora_rank is not supported')
    if (args.get('n_group') or 1) == 1 or c.get('topk_method') == 'greedy':
        args.update(n_group=None, topk_group=None)


def _write_deepseek(config, c):
    if not (config.n_expert and config.n_shared_expert):
        raise ValueError('DeepSeek has experts, and shared ones')
    c.update(n_group=config.n_group or 1, topk_group=config.topk_group or 1,
             num_key_value_heads=config.n_head, head_dim=config.qk_rope_head_dim, num_nextn_predict_layers=0)
    if c['model_type'] == 'deepseek_v2':
        c['topk_method'] = 'group_limited_greedy' if config.n_group else 'greedy'


def _read_qwen3_moe(c, args):
    step, dense = c.get('decoder_sparse_step', 1), c.get('mlp_only_layers') or ()
    args['expert_pattern'] = ''.join('D' if i in dense or (i + 1) % step else 'E'
                                     for i in range(args['n_layer']))


def _write_qwen3_moe(config, c):
    c.update(decoder_sparse_step=1,
             mlp_only_layers=[i for i in range(config.n_layer) if not config.has_experts(i)])


def _read_gemma2(c, args):
    args.update(embed_scale=args['n_embd'] ** 0.5, attn_scale=c['query_pre_attn_scalar'] ** -0.5,
                attn_softcap=c.get('attn_logit_softcapping', 50.0) or 0.0,
                logit_softcap=c.get('final_logit_softcapping', 30.0) or 0.0)


def _write_gemma2(config, c):
    c.update(query_pre_attn_scalar=round(config.scale ** -2),
             sliding_window=config.window or config.block_size,
             attn_logit_softcapping=config.attn_softcap or None,
             final_logit_softcapping=config.logit_softcap or None)


def _read_smollm3(c, args):
    every, n = c.get('no_rope_layer_interval', 4), args['n_layer']
    turns = c.get('no_rope_layers') or [int((i + 1) % every != 0) for i in range(n)]
    args['pos_pattern'] = ''.join('NP'[bool(turn)] for turn in turns)


def _write_smollm3(config, c):
    c['no_rope_layers'] = [int(letter(config.pos_pattern, i) == 'P') for i in range(config.n_layer)]


def _read_neox(c, args):
    args['wiring'] = 'parallel_2' if c.get('use_parallel_residual', True) else 'pre'


def _write_neox(config, c):
    c['use_parallel_residual'] = config.wiring == 'parallel_2'


SPECIAL = {  # families with fields that stand for something else: what reads them, what writes them
    'falcon': (_read_falcon, _write_falcon), 'mpt': (_read_mpt, _write_mpt),
    'deepseek_v2': (_read_deepseek, _write_deepseek), 'deepseek_v3': (_read_deepseek, _write_deepseek),
    'qwen3_moe': (_read_qwen3_moe, _write_qwen3_moe), 'gemma2': (_read_gemma2, _write_gemma2),
    'smollm3': (_read_smollm3, _write_smollm3), 'gpt_neox': (_read_neox, _write_neox)}


def config_from_hf(c):
    """A config.json, as a dict, in its old form or its new -> GPTConfig. Raises ValueError that names what is
    not supported."""
    try:
        return _read_config(c)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(f"{c.get('model_type')} with a missing or odd field ({error!r})") from None


def _read_config(c):
    kind = c.get('model_type')
    if kind not in FAMILIES:
        raise ValueError(f"model_type={kind!r} is not supported; these are: {', '.join(sorted(FAMILIES))}")
    if c.get('quantization_config'):
        raise ValueError(f"the weights are quantized ({c['quantization_config'].get('quant_method')}): use a "
                         "checkpoint in bfloat16 or float32")
    family, known = FAMILIES[kind], set()
    args = dict(family['ours'])
    for ours, theirs in family['fields'].items():
        names = theirs if isinstance(theirs, tuple) else (theirs,)
        known.update(names)
        args.update({ours: c[name] for name in names[::-1] if c.get(name) is not None})
    wrong = [f"{name}={c[name]!r}" for name, value in family['theirs'].items()
             if value is not None and c.get(name, value) != value]
    wrong += [f"{name}={value!r}" for name, value in c.items() if value and not HARMLESS.fullmatch(name)
              and name not in known and name not in family['theirs']]
    if family['fields'].get('mlp'):
        table = GATED if 'gate' in family['names']['mlp.c_fc'] else PLAIN
        wrong += [f"hidden_act={args['mlp']!r}"] * (args['mlp'] not in table)
        args['mlp'] = table.get(args['mlp'])
    if wrong:
        raise ValueError(f"{kind} with {', '.join(wrong)} is not supported")
    if args.get('pos', 'rope') == 'rope':
        _read_rope(c, args)
    _read_windows(c, args, family['windows'])
    SPECIAL.get(kind, (lambda c, args: None,))[0](c, args)
    return GPTConfig(**args)


def _essence(config):
    """What a config computes, apart from how it is written."""
    layers = range(config.n_layer)
    sparse = [config.has_experts(i) for i in layers]
    return {**vars(config), 'dropout': 0, 'bias': None, 'balance_per_sequence': None, 'n_dense_layer': sparse,
            'window_pattern': [config.window_of(i) for i in layers], 'expert_pattern': None, 'window': None,
            'pos_pattern': [letter(config.pos_pattern, i) for i in layers],
            'attn_scale': round(config.scale, 9), 'd_ff': None if all(sparse) else config.d_ff}


def config_to_hf(config):
    """GPTConfig -> config.json of a family that computes the same, as a dict: the family whose reading of
    what is written gives the same model back. Raises ValueError that names what the nearest family lacks."""
    nearest = None
    for kind, family in FAMILIES.items():
        c = {'model_type': kind, 'architectures': [family['arch']], 'pad_token_id': None,
             'bos_token_id': None, 'eos_token_id': None,
             **{name: value for name, value in family['theirs'].items() if value is not None}}
        for ours, theirs in family['fields'].items():
            if theirs is not None:
                c[theirs[0] if isinstance(theirs, tuple) else theirs] = getattr(config, ours)
        if family['fields'].get('mlp'):
            table = GATED if 'gate' in family['names']['mlp.c_fc'] else PLAIN
            field = family['fields']['mlp']
            c[field if isinstance(field, str) else field[0]] = next(
                (name for name, ours in table.items() if ours == config.mlp), None)
        _write_windows(config, c, family['windows'])
        try:
            if config.pos == 'rope' and family['ours'].get('pos', 'rope') == 'rope':
                _write_rope(config, c)
            SPECIAL.get(kind, (None, lambda config, c: None))[1](config, c)
            ours, read = _essence(config), _essence(config_from_hf(c))
        except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
            continue  # this family cannot even write it down
        lacks = [name for name in ours if ours[name] != read[name]]
        if not lacks:
            return c
        if nearest is None or len(lacks) < len(nearest[1]):
            nearest = kind, lacks
    raise ValueError("no published family computes this model" + (
        f"; the nearest, {nearest[0]}, has another "
        + ', '.join(f"{name} (here {getattr(config, name)!r})" for name in nearest[1]) if nearest
        else f", nor anything near it; rope_scaling={config.rope_scaling}"))


SAFE_DTYPES = {'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16}


class SafeTensors:
    """The tensors of a folder's *.safetensors, read by memory map: name -> tensor. The format is an 8-byte
    length, a JSON header and raw bytes. Raises FileNotFoundError, or ValueError for files that are damaged
    or lie."""

    def __init__(self, folder):
        self.where, self.maps = {}, {}  # name -> (file, dtype, shape, start, end)
        index = os.path.join(folder, 'model.safetensors.index.json')
        files = {'model.safetensors'}
        if os.path.exists(index) and not os.path.exists(os.path.join(folder, 'model.safetensors')):
            files = _read_json(index).get('weight_map')
            files = set(files.values()) if isinstance(files, dict) else {files}
        for file in sorted(files, key=str):
            path = os.path.join(folder, str(file))
            if type(file) is not str or os.path.basename(file) != file or not file.endswith('.safetensors'):
                raise ValueError(f"{index} names {file!r}, which is no safetensors file of its own folder")
            if not os.path.exists(path):
                raise FileNotFoundError(f"{folder} lacks {file}: download it again" + (
                    ' (other formats of weights are not read)' if len(files) == 1 else ''))
            self._read_header(path)

    def _read_header(self, path):
        size = os.path.getsize(path)
        with open(path, 'rb') as f:
            length = int.from_bytes(f.read(8), 'little')
            if not 2 <= length <= size - 8:
                raise ValueError(f"{path} is damaged or truncated: its header would take {length} "
                                 f"of {size} bytes")
            try:
                header = json.loads(f.read(length))
                tensors = {name: (path, str(entry['dtype']), tuple(entry['shape']), *entry['data_offsets'])
                           for name, entry in header.items() if name != '__metadata__'}
                if not all(type(n) is int and n >= 0 for _, _, shape, *ends in tensors.values()
                           for n in (*shape, *ends)):
                    raise ValueError('shapes and offsets must be whole numbers')
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{path} is damaged: its header cannot be read ({error})") from None
            self.maps[path] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY), 8 + length
        for name, (_, dtype, shape, start, end) in tensors.items():
            if dtype not in SAFE_DTYPES:
                raise ValueError(f"{path}: {name} has dtype {dtype}; {', '.join(SAFE_DTYPES)} are supported")
            if not (0 <= start <= end <= size - 8 - length
                    and end - start == math.prod(shape) * SAFE_DTYPES[dtype].itemsize):
                raise ValueError(f"{path} is damaged or truncated: {name} {shape} would be bytes {start} "
                                 f"to {end} of {size - 8 - length}")
        self.where.update(tensors)

    def shape(self, name):
        return self.where[name][2]

    def dtype(self):
        """That of the largest tensor."""
        return SAFE_DTYPES[max(self.where.values(), key=lambda entry: math.prod(entry[2]))[1]]

    def __getitem__(self, name):
        path, dtype, shape, start, end = self.where[name]
        memory, begin = self.maps[path]
        if start == end:
            return torch.empty(shape, dtype=SAFE_DTYPES[dtype])
        return torch.frombuffer(memory, dtype=SAFE_DTYPES[dtype], count=math.prod(shape),
                                offset=begin + start).view(shape)

    def forget(self, name):
        """Gives the pages of a tensor that has been copied back to the system."""
        path, _, _, start, end = self.where[name]
        memory, begin = self.maps[path]
        if hasattr(mmap, 'MADV_DONTNEED') and end > start:
            first = (begin + start) // mmap.PAGESIZE * mmap.PAGESIZE
            memory.madvise(mmap.MADV_DONTNEED, first, begin + end - first)


def _read_json(path):
    try:
        with open(path, encoding='utf-8') as f:
            found = json.load(f)
    except FileNotFoundError:
        raise FileNotFoundError(f"no {os.path.basename(path)} in {os.path.dirname(path)}: it holds no "
                                "checkpoint of transformers") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object")
    return found


def _places(name, family, config):
    """Our tensor's name -> the names of theirs that are its rows, one after the other."""
    layer, rest = re.fullmatch(r'(?:h\.(\d+)\.)?(.*)', name).groups()
    names, prefix = family['names'], '' if layer is None else family['layer'].replace('N', layer)
    if rest in names:
        return [prefix + names[rest]]
    module, kind = rest.rsplit('.', 1)
    if family['arch'] == 'FalconForCausalLM' and config.wiring == 'parallel_2':
        names = {**names, 'ln_1': 'ln_attn', 'ln_2': 'ln_mlp'}
    each = [f'{prefix}{part}.{kind}' for part in names[module].split()]
    if config.kv_lora_rank is not None and config.q_lora_rank is None:
        each = [part.replace('.q_a_proj.', '.q_proj.') for part in each]
    if '.E.' in each[0]:
        each = [part.replace('.E.', f'.{e}.') for e in range(config.n_expert) for part in each]
    return each


def _load(model, tensors, folder, family):
    """Fills the model, whose tensors are empty, from a folder's safetensors, one after the other. Raises
    ValueError that names all tensors that are missing, unexpected or of another shape."""
    config, state = model.config, model.state_dict()
    prefix = family['names']['wte'].split('.')[0] + '.'
    if prefix != 'lm_head.' and f"{family['names']['wte']}.weight" not in tensors.where:
        # GPT-2 and BLOOM as first published: the names lack the prefix
        tensors.where = {name if name.startswith(family['names']['lm_head']) else prefix + name: entry
                         for name, entry in tensors.where.items()}
    places = {name: _places(name, family, config) for name in state}
    used = {place for each in places.values() for place in each}
    extra = re.compile(r'.*\.(attn\.(masked_)?bias|(rotary_emb\.)?inv_freq|attention\.(masked_)?bias)'
                       + (f"|{family['names']['lm_head']}\\..*" if model.lm_head is None else '')
                       + (rf"|{re.escape(prefix)}layers\."
                          rf"({'|'.join(map(str, range(config.n_layer, config.n_layer + 9)))})\..*"
                          if family['arch'] == 'DeepseekV3ForCausalLM' else ''))  # the extra prediction layer
    if (place := f"{family['names'].get('wpe')}.weight") in tensors.where:  # a smaller context crops them
        path, stored, (rows, width), start, end = tensors.where[place]
        kept = min(rows, config.block_size)
        tensors.where[place] = path, stored, (kept, width), start, start + (end - start) // rows * kept
    wrong = [f"{place} is missing" for place in sorted(used - tensors.where.keys())]
    wrong += [f"{name} is unexpected" for name in sorted(tensors.where.keys() - used)
              if not extra.fullmatch(name)]
    for name, each in places.items():
        if all(place in tensors.where for place in each):
            shapes = [tensors.shape(place) for place in each]
            if _module(name) in family['transposed'] and not name.endswith('bias'):
                shapes = [(*shape[:-2], shape[-1], shape[-2]) for shape in shapes]
            whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
            w = state[name]
            fits = whole in (tuple(w.shape), (math.prod(w.shape[:-1]), *w.shape[-1:]) if w.ndim > 2 else ())
            if not fits or len({shape[1:] for shape in shapes}) > 1:
                wrong.append(f"{' + '.join(each[:3])} {', '.join(map(str, shapes[:3]))} "
                             f"instead of {tuple(w.shape)}")
    if wrong:
        raise ValueError(f"{folder} does not fit its config.json: " + '; '.join(wrong[:60])
                         + (f" and {len(wrong) - 60} more" if len(wrong) > 60 else ''))
    for name, w in state.items():
        module, rows = _module(name), w.flatten(0, 1) if w.ndim > 2 and len(places[name]) > 1 else w
        each = [tensors[place] for place in places[name]]
        if module in family['transposed'] and not name.endswith('bias'):
            each = [source.mT for source in each]
        if module in family['rows'] and family['rows'][module]:
            whole = each[0] if len(each) == 1 else torch.cat(each)
            each = [whole.index_select(int('experts' in module), family['rows'][module](config))]
        for part, source in zip(rows.split([len(source) for source in each]), each):
            part.copy_(source)
        for place in places[name]:
            tensors.forget(place)
    for head in filter(None, (model.wte, model.lm_head)):
        head.weight[config.vocab_size:] = 0
        if getattr(head, 'bias', None) is not None:
            head.bias[config.vocab_size:] = 0
    if family.get('plus_one'):
        for norm in (m for m in model.modules() if isinstance(m, Norm)):  # exact in float32 only
            norm.weight.data = norm.weight.float() + 1


def _module(name):
    """h.3.attn.c_attn.weight -> attn.c_attn"""
    return re.sub(r'^h\.\d+\.', '', name).rsplit('.', 1)[0]


def _theirs(model, family):
    """Yields (their name, tensor) for all of the model's tensors, in the family's layout."""
    config, modules = model.config, dict(model.named_modules())
    for name, w in model.state_dict().items():
        module, each = _module(name), _places(name, family, config)
        if family.get('plus_one') and isinstance(modules.get(name.rsplit('.', 1)[0]), Norm):
            w = w - 1
        if family['rows'].get(module):
            w = w.index_select(int('experts' in module), family['rows'][module](config).argsort())
        parts = getattr(modules[name.rsplit('.', 1)[0]], 'parts', (len(w),)) if len(each) > 1 else (len(w),)
        stack = 1
        if w.ndim > 2 and len(each) > 1:
            stack, w = len(w), w.flatten(0, 1)
        count = len(each) // stack
        sizes = [*parts[:count - 1], sum(parts[count - 1:])] * stack
        for place, part in zip(each, w.split(sizes)):
            yield place, part.mT if module in family['transposed'] and not name.endswith('bias') else part


def save_safetensors(tensors, path):
    """Writes the (name, tensor) pairs that tensors() yields, twice the same: only one is in memory at a time.
    To a temporary file first."""
    header, offset = {}, 0
    names = {dtype: name for name, dtype in SAFE_DTYPES.items()}
    for name, w in tensors():
        header[name] = {'dtype': names[w.dtype], 'shape': list(w.shape),
                        'data_offsets': [offset, offset + w.nbytes]}
        offset += w.nbytes
    head = json.dumps({'__metadata__': {'format': 'pt'}, **header}).encode()
    head += b' ' * (-len(head) % 8)
    with open(path + '.tmp', 'wb') as f:
        f.write(len(head).to_bytes(8, 'little') + head)
        for _, w in tensors():
            f.write(w.contiguous().flatten().view(torch.uint8).cpu().numpy())
    os.replace(path + '.tmp', path)

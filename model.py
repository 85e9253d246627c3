"""
The modern decoder-only language model, read from top to bottom: configuration, norm, positions, attention and
its cache, MLP, block, GPT.

    config = GPTConfig(n_layer=12, n_head=12, n_kv_head=4, n_embd=768)
    model = GPT(config)
    logits = model(idx)                          # (B, T) -> (B, T, vocab_size) float32
    loss, aux = model(idx, targets)              # mean cross entropy over targets != -1
    cache = model.make_cache(B, max_len)         # the caller's object
    logits = model(idx, cache=cache, keep=1)     # appends; logits of the last new token only

Shapes in comments: B rows of a batch, T new tokens, S tokens to attend to, C = n_embd, H query heads, K
key/value heads, D = head_dim, V = vocab_size. This file prints nothing, picks no device, reads no globals,
downloads nothing.
"""
import dataclasses
import math
import pickle
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

# configuration ----------------------------------------------------------------------------------------------

ACTIVATIONS = {  # name: (function, gated); gated ones (Shazeer 2020, arXiv:2002.05202) compute f(gate) * up
    'swiglu': (F.silu, True),
    'geglu': (F.gelu, True),
    'reglu': (F.relu, True),
    'glu': (torch.sigmoid, True),
    'gelu': (F.gelu, False),                                        # the exact one, by erf
    'gelu_tanh': (lambda x: F.gelu(x, approximate='tanh'), False),  # OpenAI GPT-2's
    'relu': (F.relu, False),
    'relu2': (lambda x: F.relu(x).square(), False),                 # Primer, arXiv:2109.08668
    'silu': (F.silu, False),
}


@dataclasses.dataclass
class GPTConfig:
    """Everything that defines a model, as plain data. Impossible values raise a ValueError that names all."""
    # size
    block_size: int = 1024           # context: the most tokens attended to at once
    vocab_size: int = 50304          # GPT-2's 50257 rounded up, as nanoGPT has it
    n_layer: int = 12                # blocks
    n_head: int = 12                 # query heads
    n_kv_head: int | None = None     # k/v heads; None: n_head (multi-head), 1: multi-query, between: grouped
    n_embd: int = 768                # width of the residual stream
    head_dim: int | None = None      # None: n_embd / n_head
    d_ff: int | None = None          # MLP width; None: 4 n_embd; if gated 8/3 n_embd up to a multiple of 64
    # choices
    pos: str = 'rope'                # positions: rope, learned, none
    rope_base: float = 10000.0       # the slowest rotation's base (RoFormer, arXiv:2104.09864)
    norm: str = 'rmsnorm'            # rmsnorm (arXiv:1910.07467) or layernorm
    norm_eps: float = 1e-6           # inside the root
    norm_bias: bool | None = None    # None: layernorm follows bias, rmsnorm has none
    qk_norm: bool = True             # normalise queries and keys, per head (arXiv:2302.05442)
    mlp: str = 'swiglu'              # swiglu, geglu, reglu, glu, gelu, gelu_tanh, relu, relu2, silu
    bias: bool = False               # in the linear layers, and in layernorm
    tie_word_embeddings: bool = True  # the head reads the embedding's rows
    logit_softcap: float = 0.0       # c * tanh(logits / c); 0 is off (Gemma 2, arXiv:2408.00118)
    # training
    dropout: float = 0.0             # on embedding, attention weights and both residual branches

    def __post_init__(self):
        sizes = ['block_size', 'vocab_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'head_dim', 'd_ff']
        problems = [f"{name}={getattr(self, name)!r} must be a whole number above 0" for name in sizes
                    if getattr(self, name) is not None
                    and not (_whole(getattr(self, name)) and getattr(self, name) > 0)]
        choices = {'pos': ('rope', 'learned', 'none'), 'norm': ('rmsnorm', 'layernorm'),
                   'mlp': tuple(ACTIVATIONS)}
        problems += [f"{name}={getattr(self, name)!r} is none of {', '.join(known)}"
                     for name, known in choices.items() if getattr(self, name) not in known]
        if problems:
            raise ValueError('impossible model: ' + '; '.join(problems))
        if self.head_dim is None and self.n_embd % self.n_head:
            problems.append(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head} "
                            "(or set head_dim)")
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        gated = ACTIVATIONS[self.mlp][1]
        self.d_ff = self.d_ff or (round_up(8 * self.n_embd / 3) if gated else 4 * self.n_embd)
        if self.norm_bias is None:
            self.norm_bias = self.bias and self.norm == 'layernorm'
        problems += [message for wrong, message in [
            (self.n_head % self.n_kv_head,
             f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}"),
            (self.pos == 'rope' and self.head_dim % 2, f"head_dim={self.head_dim} is odd, rope turns pairs"),
            (not 0 <= self.dropout < 1, f"dropout={self.dropout} is not in [0, 1)"),
            (not self.rope_base > 0, f"rope_base={self.rope_base} must be above 0"),
            (not self.norm_eps > 0, f"norm_eps={self.norm_eps} must be above 0"),
            (not self.logit_softcap >= 0, f"logit_softcap={self.logit_softcap} must be 0 (off) or above"),
        ] if wrong]
        if problems:
            raise ValueError('impossible model: ' + '; '.join(problems))


def _whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


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

def rope_table(config, device=None):
    """cos and sin of every position's rotation angles, each (block_size, head_dim / 2) float32: position p
    turns pair i by p * rope_base^(-2i / head_dim). RoFormer, arXiv:2104.09864, equation 15."""
    pair = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    angle = (torch.arange(config.block_size, device=device)[:, None]
             * config.rope_base ** (-pair / config.head_dim))
    return angle.cos(), angle.sin()


def rotate(x, rope):
    """x (B, heads, T, D) turned by rope = (cos, sin), each (1 or B, 1, T, D/2). Pair i is x[i], x[i + D/2],
    the half-split layout of Llama and transformers; checkpoints in GPT-J's interleaved layout are permuted
    when read."""
    if rope is None:
        return x
    (a, b), (cos, sin) = x.float().chunk(2, dim=-1), rope
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def visible(q_pos, k_pos):
    """Who sees whom, from absolute positions: q_pos (1 or B, T), k_pos (1 or B, S), -1 for an empty slot
    -> (1 or B, 1, T, S) bool. A token sees itself and what came before."""
    age = q_pos[:, :, None] - k_pos[:, None, :]
    return ((age >= 0) & (k_pos >= 0)[:, None, :])[:, None]


# attention --------------------------------------------------------------------------------------------------

class Shared(NamedTuple):
    """What all layers of one forward pass have in common, made once."""
    rope: tuple | None            # (cos, sin) at the new tokens' positions
    bias: torch.Tensor | None     # (1 or B, 1, T, S), 0 or -inf, added to the scores; None: all is seen
    causal: bool                  # bias is the plain triangle with T == S: kernels that know it need no bias


def attend(q, k, v, shared, p=0.0):
    """softmax(q k^T / sqrt(D) + bias) v, with dropout p on the weights. The one entry point of attention.

    q (B, H, T, D); k, v (B, K, S, D), K dividing H (arXiv:2305.13245) -> (B, H, T, D).
    - one new token: its heads of a group become the rows of one product, so keys are read once a group;
    - training on a CPU: explicit products in blocks of queries, which the compiler fuses and which skip the
      masked triangle (SDPA's backward takes 1.5 to 2 times as long there, 3 times with dropout);
    - everything else: scaled_dot_product_attention, which picks its fastest kernel.
    """
    (B, H, T, D), K = q.shape, k.shape[1]
    if T == 1:
        y = F.scaled_dot_product_attention(q.reshape(B, K, H // K, D), k, v, attn_mask=shared.bias,
                                           dropout_p=p)
        return y.reshape(B, H, 1, D)
    if explicit(q):
        return attend_explicit(q, k, v, shared, p)
    if H > K and q.device.type == 'mps':
        k, v, K = k.repeat_interleave(H // K, dim=1), v.repeat_interleave(H // K, dim=1), H
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None if shared.causal else shared.bias,
                                          dropout_p=p, is_causal=shared.causal, enable_gqa=H > K)


def explicit(x):
    """Whether attention at x's device takes the explicit path, which wants shared.bias even when causal."""
    return x.device.type == 'cpu' and torch.is_grad_enabled()


def attend_explicit(q, k, v, shared, p, block=128):
    """attend, written out, in blocks of queries; softmax statistics are float32 inside."""
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    q, out = q * D ** -0.5, []
    for start in range(0, T, block):
        end = min(start + block, T)
        seen = end if shared.causal else S
        # a group's heads are rows of one product: (B, K, G t, D) @ (B, K, D, seen)
        score = q[:, :, start:end].reshape(B, K, -1, D) @ k[:, :, :seen].transpose(-2, -1)
        score = score.view(B, H, end - start, seen) + shared.bias[:, :, start:end, :seen]
        weight = dropout(score.softmax(dim=-1), p).view(B, K, -1, seen)
        out.append((weight @ v[:, :, :seen]).view(B, H, end - start, D))
    return torch.cat(out, dim=2)


class Cache:
    """Keys and values of the tokens so far, for every layer. Made by GPT.make_cache, owned by the caller.

    Rows may stand at different places: `length` (B,) counts each row's tokens, `longest` their maximum, on
    the host (None when `static`, where only tensors may change so that one compiled step serves every
    position: then the caller keeps count, and each step attends over all max_len slots, empty ones masked).
    A slot's index is its position; slots past a row's length hold leftovers that causality hides.
    """

    def __init__(self, shapes, batch_size, max_len, device, dtype, static=False):
        # shapes: for each layer the (heads, width) of each tensor it keeps
        self.layers = [[torch.zeros(batch_size, heads, max_len, width, device=device, dtype=dtype)
                        for heads, width in layer] for layer in shapes]
        self.length = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.max_len, self.static = max_len, static
        self.longest, self.even = (None, False) if static else (0, True)

    def positions(self, T):
        """Positions of the next T tokens: (1, T) if all rows are alike, else (B, T)."""
        new = torch.arange(T, device=self.length.device)
        return self.longest + new[None] if self.even else self.length[:, None] + new

    def append(self, layer, pos, *new):
        """Puts new tensors (B, heads, T, width) at pos; returns what to attend to, (B, heads, S, width)."""
        T = pos.shape[1]
        S = self.max_len if self.static else self.longest + T
        if S > self.max_len:
            raise ValueError(f"cache is full: {S} tokens into {self.max_len} slots; "
                             "make_cache with a larger max_len")
        row = torch.arange(len(self.length), device=pos.device)[:, None]
        for old, add in zip(self.layers[layer], new):
            if self.even:
                old[:, :, self.longest:S] = add
            else:
                old[row, :, pos] = add.transpose(1, 2).to(old.dtype)
        return [old[:, :, :S] for old in self.layers[layer]]

    def advance(self, T):
        self.length += T
        if not self.static:
            self.longest += T

    def rewind(self, n):
        """Takes the last n tokens back: an int for all rows, or (B,) one number a row."""
        if ((self.length - n) < 0).any():
            raise ValueError(f"cannot rewind {n} tokens: the cache holds {self.length.tolist()}")
        self.length -= n
        self._recount(even=self.even and not torch.is_tensor(n))

    def select(self, rows):
        """Keeps, reorders or copies rows: a list or (B',) of row numbers."""
        rows = torch.as_tensor(rows, device=self.length.device)
        self.layers = [[old[rows] for old in layer] for layer in self.layers]
        self.length = self.length[rows]
        self._recount(even=self.even)

    def _recount(self, even):
        if not self.static:
            low, high = int(self.length.min()), int(self.length.max())
            self.longest, self.even = high, even or low == high

    @property
    def nbytes(self):
        return sum(old.nbytes for layer in self.layers for old in layer)


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention, by n_kv_head."""

    def __init__(self, config, layer):
        super().__init__()
        H, K, D, C = config.n_head, config.n_kv_head, config.head_dim, config.n_embd
        self.c_attn = Fused(C, (H * D, K * D, K * D), bias=config.bias)
        self.c_proj = nn.Linear(H * D, C, bias=config.bias)
        self.q_norm = Norm(D, config) if config.qk_norm else nn.Identity()
        self.k_norm = Norm(D, config) if config.qk_norm else nn.Identity()
        self.layer, self.head_dim, self.p = layer, D, config.dropout
        self.cache_shapes = [(K, D), (K, D)]

    def forward(self, x, shared, cache=None, pos=None):
        # (B, heads, T, D)
        q, k, v = [y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in self.c_attn(x)]
        q, k = rotate(self.q_norm(q), shared.rope), rotate(self.k_norm(k), shared.rope)
        if cache is not None:
            k, v = cache.append(self.layer, pos, k, v)
        y = attend(q, k, v, shared, self.p if self.training else 0.0)
        return self.c_proj(y.transpose(1, 2).flatten(2))


# MLP and block ----------------------------------------------------------------------------------------------

class MLP(nn.Module):
    """down(f(up(x))), or gated: down(f(gate(x)) * up(x))."""

    def __init__(self, config):
        super().__init__()
        self.act, self.gated = ACTIVATIONS[config.mlp]
        self.c_fc = Fused(config.n_embd, (config.d_ff,) * (2 if self.gated else 1), bias=config.bias)
        self.c_proj = nn.Linear(config.d_ff, config.n_embd, bias=config.bias)

    def forward(self, x):
        gate, *up = self.c_fc(x)
        return self.c_proj(self.act(gate) * up[0] if self.gated else self.act(gate))


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = Norm(config.n_embd, config)
        self.attn = Attention(config, layer)
        self.ln_2 = Norm(config.n_embd, config)
        self.mlp = MLP(config)
        self.p = config.dropout

    def forward(self, x, shared, cache=None, pos=None):
        p = self.p if self.training else 0.0
        x = x + dropout(self.attn(self.ln_1(x), shared, cache, pos), p)
        return x + dropout(self.mlp(self.ln_2(x)), p)


# the model --------------------------------------------------------------------------------------------------

class GPT(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = config
        rows = round_up(config.vocab_size)  # padded for the kernels' sake; never counted, saved or returned
        self.wte = nn.Embedding(rows, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.pos == 'learned' else None
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = Norm(config.n_embd, config)
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(config.n_embd, rows, bias=False)
        self.rope = rope_table(config, self.wte.weight.device) if config.pos == 'rope' else None
        self.register_state_dict_post_hook(_trim_rows)
        self.register_load_state_dict_pre_hook(_pad_rows)
        self.init_weights()

    def _apply(self, fn, recurse=True):
        # The rotary tables are no buffers, as .to(bfloat16) must not round angles: made anew on a new device.
        super()._apply(fn, recurse)
        if self.rope is not None and self.rope[0].device != self.wte.weight.device:
            self.rope = rope_table(self.config, self.wte.weight.device)
        return self

    @torch.no_grad()
    def init_weights(self):
        """Every initial value, in one place:

        | tensor                   | value                                                               |
        |--------------------------|---------------------------------------------------------------------|
        | wte, wpe                 | normal, std 0.02 (GPT-2), at most 4 / n_embd when tied              |
        | c_attn, c_fc             | normal, std sqrt(1 / (3 n_embd)): 0.02 at 768, larger when narrower |
        | both c_proj              | 0: every block starts as the identity                               |
        | lm_head, when untied     | 0: every token starts equally likely                                |
        | norm weights; all biases | 1; 0                                                                |
        """
        # With blocks that are the identity and the embedding as head, a token's own repetition has the logit
        # n_embd * std, which in wide models would be far above all others.
        embedding = min(0.02, 4 / self.config.n_embd) if self.lm_head is None else 0.02
        for name, w in self.named_parameters():
            if name.endswith('bias') or name.endswith('c_proj.weight') or name == 'lm_head.weight':
                w.zero_()
            elif w.ndim == 1:
                w.fill_(1.0)
            else:
                hidden = (1 / (3 * w.shape[1])) ** 0.5
                w.normal_(std=embedding if name in ('wte.weight', 'wpe.weight') else hidden)
        self.wte.weight[self.config.vocab_size:] = 0.0

    def compute_dtype(self):
        """The dtype that matmuls run in: autocast's where it is on, else the weights'."""
        device = self.wte.weight.device.type
        return (torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device)
                else self.wte.weight.dtype)

    def forward(self, idx, targets=None, cache=None, keep=None):
        """idx (B, T) int64 -> logits (B, T or keep, vocab_size) float32; with targets (B, T), -1 to be
        ignored, the mean cross entropy and aux, a dict, empty for a dense model. With a cache the tokens are
        appended to it. Raises ValueError if the tokens do not fit into block_size or the cache."""
        T, config = idx.shape[1], self.config
        if T > config.block_size:
            raise ValueError(f"{T} tokens do not fit into block_size={config.block_size}")
        pos = torch.arange(T, device=idx.device)[None] if cache is None else cache.positions(T)  # (1 or B, T)
        x = self.wte(idx)                                                                        # (B, T, C)
        if self.wpe is not None:
            x = x + self.wpe(pos)
        if self.compute_dtype() is torch.bfloat16:
            x = x.bfloat16()  # a bfloat16 residual stream; under float16 it stays float32: no overflow
        x = dropout(x, config.dropout if self.training else 0.0)
        shared = self.shared(x, pos, cache)
        for block in self.h:
            x = block(x, shared, cache, pos)
        if cache is not None:
            cache.advance(T)
        if keep is not None:
            x = x[:, max(0, T - keep):]
        x = F.linear(self.ln_f(x), (self.wte if self.lm_head is None else self.lm_head).weight)
        logits = x[..., :config.vocab_size].float()
        if config.logit_softcap:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction='sum')
        return loss / (targets != -1).sum().clamp(min=1), {}

    def shared(self, x, pos, cache):
        """Rotary factors and mask for new tokens at pos: what all layers use."""
        rope = self.rope and tuple(table[pos][:, None] for table in self.rope)  # (1 or B, 1, T, D/2) each
        T, longest = x.shape[1], 0 if cache is None else cache.longest
        causal = longest == 0
        if ((causal and not explicit(x) and T > 1)
                or (T == 1 and longest is not None and (cache is None or cache.even))):
            return Shared(rope, None, causal)  # the kernel knows, or all is seen
        S = cache.max_len if longest is None else longest + T
        seen = visible(pos, torch.arange(S, device=x.device)[None])
        bias = torch.zeros(seen.shape, dtype=self.compute_dtype(),
                           device=x.device).masked_fill(~seen, -math.inf)
        return Shared(rope, bias, causal)

    def make_cache(self, batch_size, max_len, static=False):
        """An empty Cache in the compute dtype. static: for a compiled step, see Cache."""
        if max_len > self.config.block_size:
            raise ValueError(f"max_len={max_len} is more than block_size={self.config.block_size}")
        shapes = [block.attn.cache_shapes for block in self.h]
        return Cache(shapes, batch_size, max_len, self.wte.weight.device, self.compute_dtype(), static)

    # accounting

    def num_params(self):
        """Parameters, tied ones once, padding not counted."""
        padding = (self.wte.num_embeddings - self.config.vocab_size) * self.config.n_embd
        return sum(w.numel() for w in self.parameters()) - padding * (1 if self.lm_head is None else 2)

    def flops_per_token(self, block_size=None):
        """Training FLOPs a token, a multiply-add being two: 6 a matmul weight, forward and backward, and
        12 n_layer n_head head_dim T for attention, the masked half counted too (PaLM, arXiv:2204.02311,
        appendix B)."""
        config = self.config
        matmul = sum(m.weight.numel() for block in self.h for m in block.modules()
                     if isinstance(m, nn.Linear))
        matmul += config.vocab_size * config.n_embd
        return (6 * matmul
                + 12 * config.n_layer * config.n_head * config.head_dim * (block_size or config.block_size))

    def param_groups(self):
        """Every parameter once, by what an optimizer does with it: 'matrix' (inside the blocks), 'embedding'
        (wte, wpe, lm_head) and 'vector' (norms and biases; not decayed)."""
        groups = {'matrix': [], 'embedding': [], 'vector': []}
        for name, w in self.named_parameters():
            groups['vector' if w.ndim < 2 else 'matrix' if name.startswith('h.') else 'embedding'].append(w)
        return groups

    def parts(self):
        """Weight matrix -> row counts of the projections fused in it, for the matrices of the blocks."""
        return {m.weight: getattr(m, 'parts', (m.out_features,))
                for m in self.h.modules() if isinstance(m, nn.Linear)}

    # checkpoints

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


def _trim_rows(model, state, prefix, metadata):
    for name in ('wte.weight', 'lm_head.weight'):
        if prefix + name in state:
            state[prefix + name] = state[prefix + name][:model.config.vocab_size]


def _pad_rows(model, state, prefix, *_):
    for name in ('wte.weight', 'lm_head.weight'):
        if prefix + name in state:
            w, rows = state[prefix + name], model.wte.num_embeddings
            if len(w) == model.config.vocab_size:  # any other size is for strict loading to refuse
                state[prefix + name] = F.pad(w, (0, 0, 0, rows - len(w)))

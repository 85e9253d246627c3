"""
Canon layers (arXiv:2512.17351, "Physics of Language Models: Part 4.1"): short causal convolutions with a
residual connection, which let neighbouring tokens exchange information inside a block.

    python train.py examples/canon.py
    python sample.py examples/canon.py --start=def

There are four in each block: A before attention; B on queries, keys and values; C before the MLP; D before
the activation of the MLP. Each is a Mixer inside a block. Its last inputs are its state in the cache.
"""
import torch

import model
from mixers import conv_init, short_convolution
from model import MLP, Attention, Block, Mixer, parameter, rotate

KERNEL = 4  # tokens that a convolution sees, including the current one


class Canon(Mixer):
    """x (B, T, channels) -> x + its convolution over the last tokens, per channel."""

    documents = True

    def __init__(self, config, layer, channels):
        super().__init__(config, layer)
        self.conv = parameter(channels, KERNEL, init=conv_init, group='vector')
        self.states = [((KERNEL - 1, channels), None)]

    def flops(self, length):
        return 6 * self.conv.numel()

    def forward(self, x, context):
        return x + short_convolution(self, x, context)


class CanonAttention(Attention):
    """Attention with Canon-B."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.canon = Canon(config, layer, sum(self.c_attn.widths))

    def qkv(self, x, context):
        x = self.canon(torch.cat(self.c_attn(x), dim=-1), context)
        q, k, v = (y.unflatten(-1, (-1, self.head_widths[0])) for y in x.split(self.c_attn.widths, dim=-1))
        q, k, v = (y.transpose(1, 2) for y in (self.q_norm(q), self.k_norm(k), v))  # (B, heads, T, D)
        rope = context.ropes[self.rope_kind]
        return rotate(q, rope), rotate(k, rope), v


class CanonMLP(MLP):
    """An MLP with Canon-D."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.canon = Canon(config, layer, sum(self.c_fc.widths))

    def forward(self, x, context):
        x = self.canon(torch.cat(self.c_fc(x), dim=-1), context)
        return self.c_proj(self.act(*x.split(self.c_fc.widths, dim=-1)))


class CanonBlock(Block):
    """A Block with Canon-A and Canon-C."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        if (type(self.attn), type(self.mlp)) != (Attention, MLP):
            raise ValueError('Canon layers replace only plain attention and dense MLPs')
        self.attn = CanonAttention(config, layer)
        self.mlp = CanonMLP(config, layer)
        self.canon_a, self.canon_c = (Canon(config, layer, config.n_embd) for _ in range(2))

    def forward(self, x, context):
        x = x + self.branch(self.attn(self.canon_a(self.ln_1(x), context), context))
        return x + self.branch(self.mlp(self.canon_c(self.ln_2(x), context), context))


model.make_block = CanonBlock

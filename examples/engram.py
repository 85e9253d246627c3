"""
Engram (arXiv:2601.07372, sections 2.2 and 2.3): a layer's memory of n-grams. A hash of the last tokens
selects rows of the memory, and the hidden state gates them.

    python train.py examples/engram.py
    python sample.py examples/engram.py --start=def

Engram is a Mixer inside a block: the cache keeps the ids of the last tokens as its state. The memory costs
parameters but nearly no time. Two parts of the paper are not here: the merging of similar tokens before the
hash, and the short convolution after the gate (see examples/canon.py). The authors' demo also takes a signed
square root of the gate's score before the sigmoid.
"""
import torch
from torch import nn

import model
from mixers import after_last
from model import Block, Embedding, Linear, Mixer, Norm, branch_init

LAYERS = {1}  # blocks with a memory
MULTIPLIERS = 1367130551, 1799430233, 2010234679  # odd numbers, one per token of an n-gram
PRIMES = (4093, 4091), (4079, 4073)  # rows per table: two tables for pairs of tokens, two for triples


class Engram(Mixer):
    """x (B, T, C) -> sigmoid(RMSNorm(x) RMSNorm(k)^T / sqrt(C)) v, with k and v from the memory."""

    documents = True

    def __init__(self, config, layer):
        super().__init__(config, layer)
        C = config.n_embd
        sizes = [rows for pair in PRIMES for rows in pair]
        self.table = Embedding(sum(sizes), C // len(sizes), nn.init.normal_)
        self.c_k = Linear(C // len(sizes) * len(sizes), C)
        self.c_proj = Linear(C // len(sizes) * len(sizes), C, init=branch_init(config))
        self.x_norm, self.k_norm = Norm(C, config), Norm(C, config)
        self.states = [((len(PRIMES),), torch.long)]  # the tokens before the new ones

    def flops(self, length):
        return 0  # model.cost counts the matrices; the gate's products are few

    def rows(self, context):
        """The row that a token reads in each table, (B, T, tables)."""
        T = context.idx.shape[1]
        ids = after_last(self, context.idx, context)           # (B, len(PRIMES) + T)
        mixed = 0
        found = []
        first = 0  # where a table starts in the joined tables
        for back, multiplier in enumerate(MULTIPLIERS):
            token = ids[:, len(PRIMES) - back:][:, :T] + 1     # the token `back` places earlier
            mixed = mixed ^ token.where(context.position_ids >= back, 0) * multiplier
            for prime in PRIMES[back - 1] if back else ():
                found.append(first + mixed % prime)
                first += prime
        return torch.stack(found, dim=-1)

    def forward(self, x, context):
        memory = self.table(self.rows(context)).flatten(2)     # (B, T, about C)
        score = (self.x_norm(x) * self.k_norm(self.c_k(memory))).sum(-1, keepdim=True) / x.shape[-1] ** 0.5
        return score.sigmoid() * self.c_proj(memory)


class EngramBlock(Block):
    """A Block that first adds its memory to the residual stream."""

    supports_variants = True

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.engram = Engram(config, layer) if layer in LAYERS else None

    def forward(self, x, context):
        if self.engram is not None:
            x = x + self.branch(self.engram(x, context))
        return super().forward(x, context)


model.make_block = EngramBlock

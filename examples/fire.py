"""
FIRE: a small network turns the distance of two tokens into a bias of their score (Functional
Interpolation for Relative Positions, arXiv:2310.04418). The model has no other positions. The bias
for a query at position i and a key at position j is

    b(i, j) = f(psi(i - j) / psi(max(L, i))),    psi(x) = log(c x + 1),

with learned c, L and f.

    python train.py examples/fire.py
    python sample.py examples/fire.py --start=def

The input of f is between 0 and 1 at any length. f has one hidden layer and one output per head.
Its last layer has no bias, because the softmax would cancel it. The example adds b to the
scores in Attention.attend. Positions come from `context` and its cache, and i counts from the
start of the document.
"""
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from model import MIXERS, Attention, hidden_init, parameter

HIDDEN = 32       # width of the hidden layer
START_C = 0.1     # initial c
START_L = 512.0   # initial L


def constant(value):
    """An init that fills a parameter with the value."""
    return functools.partial(nn.init.constant_, val=value)


class FireAttention(Attention):
    """Attention with the learned bias b(i, j)."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        uniform = functools.partial(nn.init.uniform_, a=-1.0, b=1.0)
        self.w_1 = parameter(HIDDEN, init=uniform, group='vector')
        self.b_1 = parameter(HIDDEN, init=uniform, group='vector')
        self.w_2 = parameter(config.n_head, HIDDEN, init=hidden_init, group='vector')
        self.log_c = parameter(1, init=constant(math.log(START_C)), group='scalar')
        self.log_L = parameter(1, init=constant(math.log(START_L)), group='scalar')

    def attend(self, q, k, v, context):
        return super().attend(q, k, v, context, self.bias(context))

    def bias(self, context):
        """b(i, j), (1 or B, H, T, S)"""
        cache = context.cache
        q_pos = context.positions                                                # (1 or B, T)
        k_pos = q_pos if cache is None else cache.key_positions(self.window, q_pos)
        distance = (q_pos[:, :, None] - k_pos[:, None]).clamp(min=0)             # (1 or B, T, S)
        largest = torch.maximum(context.position_ids, self.log_L.float().exp())  # (1 or B, T)
        x = self.psi(distance) / self.psi(largest)[:, :, None]
        hidden = F.relu(x[..., None] * self.w_1.float() + self.b_1.float())      # (..., HIDDEN)
        return (hidden @ self.w_2.float().mT).movedim(-1, 1)

    def psi(self, x):
        return torch.log1p(self.log_c.float().exp() * x)

    def flops(self, length):
        return super().flops(length) + 6 * self.n_head * HIDDEN * length


MIXERS['I'] = FireAttention
mixer_pattern = 'I'
pos = 'none'

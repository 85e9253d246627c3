"""
Differential attention: each head subtracts a second softmax from its first one, so that weights on
irrelevant tokens cancel (Differential Transformer, arXiv:2410.05258, equations 1 to 3).

    python train.py examples/differential_attention.py --n_head=4
    python sample.py examples/differential_attention.py --start=def

A differential head consists of two of the model's heads: head i of the first half has the first
softmax, and head i of the second half has the second softmax. Key heads form pairs in the same
way, and a pair shares values of twice the width. The example replaces Attention.attend, so that
the cache is unchanged. The paper does not normalise queries and keys; for that, use
--qk_norm=False.
"""
import functools
import math

import torch
from torch import nn

from model import MIXERS, Attention, Norm, parameter


class DifferentialAttention(Attention):
    """Attention with the weights softmax(q_1 k_1^T) - lambda softmax(q_2 k_2^T)."""

    @classmethod
    def check(cls, config):
        if config.n_head % 2 or config.n_kv_head % 2:
            yield 'n_head n_kv_head', 'must be even for differential attention'

    def __init__(self, config, layer):
        super().__init__(config, layer)
        D = config.head_dim
        init = functools.partial(nn.init.normal_, std=0.1)
        self.lambdas = parameter(4, D, init=init, group='vector')
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)  # the paper counts layers from 1
        self.head_norm = Norm(2 * D, config)
        self.head_widths = D, 2 * D  # widths of keys and values, for flops()

    def attend(self, q, k, v, context):
        v = torch.cat(v.chunk(2, dim=1), dim=-1)                  # (B, K / 2, S, 2 D)
        y = super().attend(q, k, v.repeat(1, 2, 1, 1), context)   # (B, H, T, 2 D)
        first, second = y.chunk(2, dim=1)
        y = first - self.factor().type_as(y) * second             # (B, H / 2, T, 2 D)
        return (1 - self.lambda_init) * self.head_norm(y)

    def factor(self):
        """lambda, which all heads of the layer share (0-d)."""
        q_1, k_1, q_2, k_2 = self.lambdas.float()
        return (q_1 @ k_1).exp() - (q_2 @ k_2).exp() + self.lambda_init


MIXERS['F'] = DifferentialAttention
mixer_pattern = 'F'

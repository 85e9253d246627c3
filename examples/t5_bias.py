"""
T5's relative position bias (arXiv:1910.10683, section 2.1): each head adds one of 32 learned numbers to the
score of a query and an earlier key. The bucket of their distance d selects the number. The model has no other
positions. In T5's decoder, the bucket is

    d                                                                if d < 16
    min(31, 16 + floor(16 log(d / 16) / log(128 / 16)))              otherwise

so that each distance below 16 has its own number, and all distances of 113 or more share the last one.

    python train.py examples/t5_bias.py
    python sample.py examples/t5_bias.py --start=def

T5 shares its table of numbers among all layers. Here each layer has its own table, which costs 32 numbers
per head and layer. The scores keep their scale of 1 / sqrt(head_dim), which T5 omits.
"""
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from model import MIXERS, Attention, parameter

BUCKETS = 32
MAX_DISTANCE = 128  # the logarithmic buckets end here


def bucket_of(distance):
    """A tensor of integer distances >= 0 -> buckets"""
    exact = BUCKETS // 2  # smaller distances have their own buckets
    ratio = torch.log(distance.clamp(min=exact) / exact) / math.log(MAX_DISTANCE / exact)  # 1 at MAX_DISTANCE
    far = exact + (ratio * (BUCKETS - exact)).long()
    return torch.where(distance < exact, distance, far.clamp(max=BUCKETS - 1))


class T5Attention(Attention):
    """Attention with a learned bias per head and bucket."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        init = functools.partial(nn.init.normal_, std=config.n_embd ** -0.5)  # as in T5
        self.table = parameter(BUCKETS, config.n_head, init=init, group='vector')

    def attend(self, q, k, v, context):
        return super().attend(q, k, v, context, self.bias(context))

    def bias(self, context):
        """(1 or B, H, T, S)"""
        cache = context.cache
        q_pos = context.positions                                                # (1 or B, T)
        k_pos = q_pos if cache is None else cache.key_positions(self.window, q_pos)
        distance = (q_pos[:, :, None] - k_pos[:, None]).clamp(min=0)             # (1 or B, T, S)
        return F.embedding(bucket_of(distance), self.table).movedim(-1, 1)


MIXERS['T'] = T5Attention
mixer_pattern = 'T'
pos = 'none'

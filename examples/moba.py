"""
Mixture of block attention (MoBA, arXiv:2502.13189, section 2.2): each query sees only its own
block of keys and the earlier blocks that fit it best.

    python train.py examples/moba.py
    python sample.py examples/moba.py --start=def

A block fits a query if the product of the query and the mean of the block's keys is large
(equations 5 and 6). Each head chooses its own blocks. The example overrides
Attention.attend and hides keys outside the chosen blocks by a bias of -inf. This gives the results
of MoBA but not its speed, which needs a kernel that skips hidden blocks. Blocks are counted from
the start of a document, and keys come from the cache, so that training and decoding choose the
same blocks.
"""
import math

import torch
import torch.nn.functional as F

from model import MIXERS, Attention

BLOCK = 16  # keys per block
TOP_K = 4   # blocks that a query sees, including its own


class BlockAttention(Attention):
    """Attention to the chosen blocks."""

    can_slide = False  # a window would cut the blocks

    def __init__(self, config, layer):
        super().__init__(config, layer)
        # keys from one mean to the next: 1 if documents and their blocks may start at any key
        self.stride = BLOCK if config.document_token is None else 1

    def attend(self, q, k, v, context):
        with torch.no_grad():
            seen = self.choose(q, k, context)
        return super().attend(q, k, v, context, torch.where(seen, 0.0, -math.inf))

    def choose(self, q, k, context):
        """q (B, H, T, D), k (B, K, S, D) -> (B, H, T, S) bool: which keys are in chosen blocks"""
        S = k.shape[2]
        block = torch.arange(math.ceil(S / BLOCK), device=q.device)
        start = (context.positions - context.position_ids)[:, None, :, None]  # (1 or B, 1, T, 1)
        last = context.positions[:, None, :, None].clamp(max=S - 1)  # padding may have larger positions
        own = (last - start) // BLOCK
        key = torch.arange(S, device=q.device) - start                        # (1 or B, 1, T, S)

        means = block_means(k, self.stride)[:, :, None]                       # (B, K, 1, means, D)
        fit = (q.unflatten(1, (k.shape[1], -1)) @ means.mT).flatten(1, 2)     # (B, H, T, means)
        if self.stride == 1:
            first = (start + BLOCK * block).clamp(max=S - 1)                  # (B, 1, T, blocks)
            fit = fit.gather(-1, first.expand(*fit.shape[:3], -1))
        fit = fit.masked_fill(block >= own, -math.inf)                        # (B, H, T, blocks)
        best = fit.topk(min(TOP_K - 1, len(block))).indices
        chosen = torch.zeros_like(fit, dtype=torch.bool).scatter(-1, best, True) | (block == own)
        return chosen.gather(-1, (key.clamp(min=0) // BLOCK).expand(*fit.shape[:3], -1))

    def flops(self, length):
        width = self.n_head * self.head_widths[0]
        return super().flops(length) + 6 * width * math.ceil(length / self.stride)


def block_means(k, stride):
    """k (B, K, S, D) -> (B, K, means, D): means of BLOCK adjacent keys, starting at every stride-th key"""
    k = F.pad(k, (0, 0, 0, BLOCK - 1))  # only the last block can be incomplete; its mean is unused
    return F.avg_pool1d(k.flatten(0, 1).mT, BLOCK, stride).mT.unflatten(0, k.shape[:2])


MIXERS['O'] = BlockAttention
mixer_pattern = 'O'
window = window_pattern = None  # because config/default.py has windows

"""
You Only Cache Once (YOCO, arXiv:2405.05254): the second half of the layers shares the keys and values of one
layer, so that the KV cache of long contexts is much smaller.

    python train.py examples/yoco.py
    python bench.py params examples/yoco.py --contexts=[32768]   # prints the size of the cache

The first half is the self-decoder (section 2.1): its layers attend to a sliding window. The second half is
the cross-decoder (section 2.2): its first layer computes keys and values from the output of the self-decoder
and hands them on, and each layer attends to them with its own queries. The paper's self-decoder may also
use gated retention, and its prefill skips the cross-decoder; neither is here.
"""
from torch import nn

from model import MIXERS, Attention, rotate

WINDOW = 16  # tokens that a layer of the self-decoder sees; enlarge it for longer contexts


class YOCO(Attention):
    """A layer of the self-decoder or of the cross-decoder."""

    can_slide = False  # window_pattern does not apply

    def __init__(self, config, layer):
        super().__init__(config, layer)
        if layer < self.source():
            self.window = WINDOW
        if layer > self.source():
            self.k_norm = nn.Identity()
            self.slots = []  # nothing of its own to cache

    def source(self):
        """The layer that computes the shared keys and values."""
        return self.config.n_layer // 2

    def projections(self, config):
        widths, names = super().projections(config)
        return (widths[:1], 'q') if self.layer > self.source() else (widths, names)

    def forward(self, x, context):
        if self.layer <= self.source():
            return super().forward(x, context)
        q, = self.c_attn(x)
        q = self.q_norm(q.unflatten(-1, (self.n_head, -1))).transpose(1, 2)         # (B, H, T, D)
        q = rotate(q, context.ropes[self.rope_kind])
        y = self.attend(q, *context.handed[self.source()], context)
        return self.c_proj(y.transpose(1, 2).flatten(2))

    def attend(self, q, k, v, context):
        if self.layer == self.source():  # k and v of all tokens so far, (B, K, S, D)
            context.handed[self.layer] = k, v
        return super().attend(q, k, v, context)


MIXERS['Y'] = YOCO
mixer_pattern = 'Y'
window = window_pattern = None  # because config/default.py has windows

"""
Value embeddings (modded-nanogpt; here as in nanochat, commit 92d63d4): in every second layer, each token adds
its row of the layer's table to the values. A gate per head reads the first channels of the layer's input.

    python train.py examples/value_embeddings.py
    python sample.py examples/value_embeddings.py --start=def

Each table has vocab_size rows of n_kv_head * head_dim, but costs nearly no time: a token reads one row.
"""
import functools

from torch import nn

from model import MIXERS, Attention, Embedding, Linear

GATED = 12  # channels that the gate reads


class ValueEmbedding(Attention):
    """Attention with values v + 3 sigmoid(W x[:GATED]) e, where e is the token's row of a table."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        init = functools.partial(nn.init.normal_, std=config.n_embd ** -0.5)
        self.table = Embedding(config.vocab_size, config.n_kv_head * config.head_dim, init)
        self.gate = Linear(min(GATED, config.n_embd), config.n_kv_head, init=nn.init.zeros_, group='gate')

    def qkv(self, x, context):
        q, k, v = super().qkv(x, context)                                             # (B, heads, T, D)
        gate = 3 * self.gate(x[..., :GATED]).float().sigmoid()                        # (B, T, heads)
        e = self.table(context.idx).unflatten(-1, (v.shape[1], -1)) * gate[..., None]
        return q, k, v + e.transpose(1, 2).type_as(v)


MIXERS['E'] = ValueEmbedding
mixer_pattern = 'AE'

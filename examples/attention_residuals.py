"""
Attention residuals (arXiv:2603.15031, section 3.1, equations 2 to 4). There is no residual stream:
the input of each attention and MLP is a softmax-weighted sum of the embedding and of the outputs
of all earlier attentions and MLPs.

    python train.py examples/attention_residuals.py
    python sample.py examples/attention_residuals.py --start=def

Each attention and MLP has a learned query. The keys are the normalised outputs of the same token,
so that the cache needs no further entries. The queries start at zero, which makes the initial
weights uniform (section 5). A last query selects the input of the output head. This is the paper's full
form, in which all outputs of a forward pass remain in memory.

Difference from the paper: the norm of the keys has no weights, because they would only multiply
the query.
"""
import torch
import torch.nn.functional as F
from torch import nn

import model
from model import GPT, Block, parameter


def source(value, eps):
    """An output (B, T, C) -> (key, value)"""
    return F.rms_norm(value.float(), value.shape[-1:], eps=eps).type_as(value), value


def mixed(query, sources):
    """The sum of all values, weighted by softmax(query . key), (B, T, C)"""
    keys, values = zip(*sources)
    scores = torch.stack([(key * query.type_as(key)).sum(-1) for key in keys])     # (sources, B, T)
    weights = scores.float().softmax(dim=0).type_as(scores)[..., None]
    return sum(weight * value for weight, value in zip(weights, values))


class DepthBlock(Block):
    """A block that appends its two outputs to the sources. The last block returns the mix of all sources."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.eps = config.norm_eps
        is_last = layer == config.n_layer - 1
        # the first attention needs no query, because its only source is the embedding
        self.attn_query, self.mlp_query, self.last_query = (
            parameter(config.n_embd, init=nn.init.zeros_, group='vector') if is_used else None
            for is_used in (layer > 0, True, is_last))

    def forward(self, sources, context):
        """sources: a list of (key, value), each (B, T, C)"""
        x = sources[0][1] if self.attn_query is None else mixed(self.attn_query, sources)
        y = self.branch(self.attn(self.ln_1(x), context))
        sources = [*sources, source(y.type_as(x), self.eps)]
        x = mixed(self.mlp_query, sources)
        y = self.branch(self.mlp(self.ln_2(x), context))
        sources = [*sources, source(y.type_as(x), self.eps)]
        return sources if self.last_query is None else mixed(self.last_query, sources)


def make_block(config, layer):
    """Raises ValueError for options that need a residual stream."""
    if config.mtp or config.residual_lambdas:
        raise ValueError("attention residuals need mtp=False and residual_lambdas=False")
    return DepthBlock(config, layer)


def blocks(self, x0, context):
    """x0 (B, T, C) -> the input of the output head, (B, T, C)"""
    x = [source(x0, self.config.norm_eps)]
    for block in self.h:
        x = block(x, context)
    return x


model.make_block = make_block
GPT.blocks = blocks
norm_eps = 1e-9  # tiny, because norms receive small means of many sources

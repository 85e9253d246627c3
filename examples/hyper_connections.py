"""
Hyper-connections (arXiv:2409.19606): several residual streams. Each attention and MLP T reads a
weighted sum of the streams H, adds its output to all streams with other weights, and mixes the
streams (equation 2): B^T T(H^T A_m)^T + A_r^T H.

    python train.py examples/hyper_connections.py
    python sample.py examples/hyper_connections.py --start=def

The weights depend on the token (dynamic hyper-connections, equations 10 to 13). At the start, A_m
selects one stream, B is 1, A_r is the identity, and no weight depends on the token (equation 14), so
that the model equals the usual pre-norm one. Tokens share no streams, so the cache needs no
further entries. examples/mhc.py constrains the weights.

Difference from the paper: the last projections of attention and MLP start at zero, as everywhere in
flatgpt, so the paper's factor on their initial values would change nothing.
"""
import functools

import torch
from torch import nn

import model
from model import GPT, Block, Linear, Norm, parameter

N = 4  # streams


class HyperConnection(nn.Module):
    """The connections of one attention or MLP, which initially reads only `stream`."""
    def __init__(self, config, stream):
        super().__init__()

        def static_init(w):
            eye = torch.eye(N)
            w.copy_(torch.cat((eye[:, [stream]], eye, torch.ones(N, 1)), dim=1))
        self.static = parameter(N, N + 2, init=static_init, group='vector')  # A_m, A_r, B
        self.norm = Norm(config.n_embd, config)
        self.dynamic = Linear(config.n_embd, N + 2, init=nn.init.zeros_, group='gate')
        scale_init = functools.partial(nn.init.constant_, val=0.01)
        self.scales = parameter(2, init=scale_init, group='scalar')          # s_alpha, s_beta

    def flops(self, length):
        # products with streams, and with `dynamic` for all streams but one, which model.cost counts
        return 6 * self.dynamic.in_features * (N * (N + 1) + (N - 1) * (N + 2))

    def forward(self, streams, function):
        """streams: (B, T, N, C), like the result; function: (B, T, C) -> (B, T, C)"""
        dynamic = self.dynamic(self.norm(streams)).tanh().split((N + 1, 1), dim=-1)
        static = self.static.split((N + 1, 1), dim=-1)
        alpha, beta = ((s * change + start).type_as(streams)                 # (B, T, N, N + 1), (B, T, N, 1)
                       for s, change, start in zip(self.scales, dynamic, static))
        x, mixed = (alpha.mT @ streams).split((1, N), dim=2)
        return mixed + beta * function(x[:, :, 0])[:, :, None]


class HyperBlock(Block):
    """A block on several streams."""
    def __init__(self, config, layer):
        super().__init__(config, layer)
        if config.mtp:
            raise ValueError("hyper-connections need mtp=False")
        self.hyper_attn = HyperConnection(config, 2 * layer % N)
        self.hyper_mlp = HyperConnection(config, (2 * layer + 1) % N)

    def forward(self, streams, context):
        streams = self.hyper_attn(streams, lambda x: self.branch(self.attn(self.ln_1(x), context)))
        return self.hyper_mlp(streams, lambda x: self.branch(self.mlp(self.ln_2(x), context)))


one_stream = GPT.blocks


def blocks(self, x0, context):
    """x0 (B, T, C) -> the sum of the streams, (B, T, C)"""
    return one_stream(self, x0[:, :, None].expand(-1, -1, N, -1), context).sum(dim=2)


model.make_block = HyperBlock
GPT.blocks = blocks

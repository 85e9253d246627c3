"""
Manifold-constrained hyper-connections, mHC (arXiv:2512.24880, section 4.2, equations 7 to 9):
several residual streams. Each attention and MLP F reads a weighted sum of the streams x, adds its
output to all streams with other weights, and mixes the streams (equation 3):

    H_res x + H_post^T F(H_pre x)

H_pre and H_post are positive. H_res is doubly stochastic, so that streams neither grow nor vanish.

    python train.py examples/mhc.py
    python sample.py examples/mhc.py --start=def

This file replaces the connections of examples/hyper_connections.py, which defines the streams and
the block. The weights depend on all streams of a single token, so the cache needs no further entries.
All streams are equal at the start, and H_post is 1: the model equals the usual pre-norm one.

The paper gives an initial value only for alpha. Here, phi starts at zero. The initial biases let each
attention and MLP read mainly one stream, and keep H_res close to the identity.
"""
import functools

import hyper_connections
import torch
from hyper_connections import N
from torch import nn

from model import Linear, Norm, parameter

ITERATIONS = 20  # rounds of Sinkhorn-Knopp


def sinkhorn_knopp(logits):
    """exp(logits) (..., N, N), with columns and rows normalised alternately"""
    m = (logits - logits.amax(dim=(-2, -1), keepdim=True)).exp()
    for _ in range(ITERATIONS):
        m = m / m.sum(dim=-2, keepdim=True)
        m = m / m.sum(dim=-1, keepdim=True)
    return m


class HyperConnection(nn.Module):
    """The connections of one attention or MLP, which initially reads mainly the given stream."""

    def __init__(self, config, stream):
        super().__init__()
        self.norm = Norm(N * config.n_embd, config, is_unit=True)
        self.phi = Linear(N * config.n_embd, 2 * N + N * N, init=nn.init.zeros_, group='gate')
        alpha_init = functools.partial(nn.init.constant_, val=0.01)
        self.alpha = parameter(3, init=alpha_init, group='scalar')

        def static_init(w):
            res = 6 * torch.eye(N).flatten()
            w.copy_(torch.cat((4 * torch.eye(N)[stream] - 2, torch.zeros(N), res)))
        self.static = parameter(2 * N + N * N, init=static_init, group='vector')   # the biases b

    def flops(self, length):
        return 6 * self.phi.in_features * (N + 1)  # without phi's matmul (see model.cost)

    def forward(self, streams, function):
        """streams: (B, T, N, C), like the result; function: (B, T, C) -> (B, T, C)"""
        sizes = N, N, N * N
        dynamic = self.phi(self.norm(streams.flatten(2))).float().split(sizes, dim=-1)
        static = self.static.float().split(sizes)
        pre, post, res = (a * change + b for a, change, b in zip(self.alpha, dynamic, static))
        pre = pre.sigmoid()[..., None, :].type_as(streams)                         # (B, T, 1, N)
        post = 2 * post.sigmoid()[..., None].type_as(streams)                      # (B, T, N, 1)
        res = sinkhorn_knopp(res.unflatten(-1, (N, N))).type_as(streams)           # (B, T, N, N)
        y = function((pre @ streams)[:, :, 0])                                     # (B, T, C)
        return res @ streams + post * y[:, :, None]


hyper_connections.HyperConnection = HyperConnection

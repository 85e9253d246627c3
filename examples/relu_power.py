"""
ReLU to a learned power: max(x, 0)^p, with one p per layer that starts at 2. The squared ReLU of
Primer (arXiv:2109.08668) has a fixed p = 2, and rectified power units (arXiv:1903.05858) have any
fixed whole p. Learning p is an experiment of our own.

    python train.py examples/relu_power.py
    python sample.py examples/relu_power.py --start=def

An entry of ACTIVATIONS is a function or, as here, a class with one instance per MLP. An
activation depends on no other token, so the cache needs no entries.
"""
import functools

import torch
from torch import nn

from model import ACTIVATIONS, parameter

SMALLEST = 1e-6  # smaller positive inputs count as this: if p < 1, the slope at 0 is infinite


class ReluPower(nn.Module):
    """x (..., d_ff) -> max(x, 0)^p."""

    def __init__(self, config):
        super().__init__()
        init = functools.partial(nn.init.constant_, val=2.0)
        self.power = parameter(1, init=init, group='scalar')

    def forward(self, x):
        log = x.float().clamp(min=SMALLEST).log()
        y = (self.power.float() * log).exp()  # faster than pow
        return torch.where(x > 0, y, 0.0).type_as(x)


ACTIVATIONS['relu_power'] = ReluPower, False  # False: it has no gate
mlp = 'relu_power'

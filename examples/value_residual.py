"""
Value residual: each layer mixes its values with those of the first layer (ResFormer, arXiv:2410.17897,
equation 5), with two learned factors per layer.

    python train.py examples/value_residual.py
    python sample.py examples/value_residual.py --start=def

The first layer hands on its values, but only those of new tokens; later layers find them in context.handed.
Therefore each layer caches its own mix.
"""
import functools

from torch import nn

from model import MIXERS, Attention, parameter


class ValueResidual(Attention):
    """Attention with values lambda_1 v_first + lambda_2 v."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        init = functools.partial(nn.init.constant_, val=0.5)
        self.first = config.mixer_pattern.find('V')  # the first layer of this kind
        self.lambdas = None if layer == self.first else parameter(2, init=init, group='scalar')

    def qkv(self, x, context):
        q, k, v = super().qkv(x, context)  # (B, heads, T, D)
        if self.lambdas is None:
            context.handed[self.layer] = v
            return q, k, v
        first, own = self.lambdas.type_as(v)
        return q, k, first * context.handed[self.first] + own * v


MIXERS['V'] = ValueResidual
mixer_pattern = 'V'

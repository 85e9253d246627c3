"""
A looped transformer (recurrent depth, arXiv:2502.05171, sections 3.1 and 3.2): the middle blocks
run several times. Each repetition starts with an adapter, whose input is the state and the output
of the first blocks.

    python train.py examples/looped.py --n_layer=8
    python sample.py examples/looped.py --start=def

The first quarter of the blocks is the paper's prelude, the last quarter its coda, the rest its
core: the large model of the paper has 2, 4 and 2 blocks. make_schedule repeats the core, so that
each repetition has its own cache entries. context.handed keeps the output of the prelude.

Differences from the paper: it samples the number of repetitions in training, and backpropagates
through only the last 8. Here the number is fixed, and backpropagation is complete. The paper's
first state is random; here it is zero, so that equal prompts have equal logits. The paper also
normalises the residual stream in each block and after the core; here norm_placement is free.
"""
import torch

import model
from model import Block, Linear

REPETITIONS = 4  # of the core


def core(n_layer):
    """The blocks that are repeated"""
    return range(n_layer // 4, n_layer - n_layer // 4)


class CoreStart(Block):
    """The first block of the core, which begins with the adapter."""

    supports_variants = True

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.c_adapter = Linear(2 * config.n_embd, config.n_embd)

    def forward(self, x, context):
        """x (B, T, C): at first the output of the prelude, later the state"""
        state = x
        if 'prelude' not in context.handed:
            context.hand_on('prelude', x)
            state = torch.zeros_like(x)
        both = torch.cat((state, context.handed['prelude']), dim=-1)                # (B, T, 2 C)
        return super().forward(self.c_adapter(both).type_as(x), context)


make_standard_block = model.make_block
make_standard_schedule = model.make_schedule


def make_block(config, layer):
    """The first block of the core has the adapter."""
    kind = CoreStart if layer == core(config.n_layer)[0] else make_standard_block
    return kind(config, layer)


def make_schedule(gpt, order):
    """The schedule of the model `gpt`, with a repeated core."""
    middle = core(len(order))
    order = [*order[:middle.start], *REPETITIONS * [*middle], *order[middle.stop:]]
    return make_standard_schedule(gpt, order)


model.make_block = make_block
model.make_schedule = make_schedule

"""
A looped transformer (recurrent depth, arXiv:2502.05171, sections 3.1 and 3.2): the middle blocks
run several times. Each repetition starts with an adapter for two inputs: the previous repetition's
output (the state) and the output of the first blocks.

    python train.py examples/looped.py --n_layer=8
    python sample.py examples/looped.py --start=def

The paper calls the first quarter of the blocks "prelude", the middle "core", and the last quarter
"coda"; its large model has 2, 4 and 2 blocks. Each repetition has its own cache entries.

Differences from the paper: it samples the number of repetitions in training, and backpropagates
through only the last 8. Here the number is fixed, and backpropagation is complete. The paper's
first state is random; here it is zero, so that equal prompts have equal logits. The paper also
normalises the residual stream in each block and after the core; here, norm_placement places the norms.
"""
import torch

import model
from model import GPT, Block, Linear, Mixer

REPETITIONS = 4  # runs of the core


def core(n_layer):
    """The blocks that are repeated"""
    return slice(n_layer // 4, n_layer - n_layer // 4)


class CoreBlock(Block):
    """A block that may belong to the core. The core's first block has the adapter."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.n_more = (REPETITIONS - 1) * (layer in range(config.n_layer)[core(config.n_layer)])
        if layer == core(config.n_layer).start:
            self.c_adapter = Linear(2 * config.n_embd, config.n_embd)
        self.n_weights = sum(w.numel() for w in self.parameters() if w.tag.group == 'matrix')

    def flops(self, length):
        """Training FLOPs of the further repetitions, per token"""
        return self.n_more * (6 * self.n_weights + sum(part.flops(length) for part in mixers(self)))


def mixers(block):
    """The mixers of a block"""
    return [part for part in block.modules() if isinstance(part, Mixer)]


def number_mixers(gpt, number_once=model.number_mixers):
    """The mixer of each cache entry. A mixer of the core has one entry per repetition."""
    found = number_once(gpt)
    for block in gpt.h[core(len(gpt.h))]:
        for mixer in mixers(block):
            mixer.entries = [mixer.number, *range(len(found), len(found) + REPETITIONS - 1)]
            found += [mixer] * (REPETITIONS - 1)
    return found


def blocks(self, x0, context):
    """x0 (B, T, C) -> the output of the last block, (B, T, C)"""
    middle = core(len(self.h))
    prelude = x0
    for block in self.h[:middle.start]:
        prelude = block(prelude, context).type_as(x0)
    x = torch.zeros_like(prelude)
    for i in range(REPETITIONS):
        x = self.h[middle.start].c_adapter(torch.cat((x, prelude), dim=-1)).type_as(x0)
        for block in self.h[middle]:
            for mixer in mixers(block):
                mixer.number = mixer.entries[i]
            x = block(x, context).type_as(x0)
    for block in self.h[middle.stop:]:
        x = block(x, context).type_as(x0)
    return x


model.make_block = CoreBlock
model.number_mixers = number_mixers
GPT.blocks = blocks

"""
What happens inside a trained model that reads a text, in numbers.

    python lab/inspect.py 'The cat sat on the mat.' --init_from=out
    python lab/inspect.py 'The cat sat on the mat.' --init_from=out --png=a.png --layer=3  # and a picture
    python lab/inspect.py --init_from=out --rope_scaling="{'rope_type': 'yarn', 'factor': 4.0}"

Prints for each head its entropy in nats, the mean distance of what it attends to in tokens, and its share on
the token itself and on the first token; by depth the size (root mean square) of the residual stream and of
the loss's gradient there; how many tokens a turn of each rotary pair takes; and the bytes of the attention
scores, which a fused kernel never stores.
"""
import os
import sys

if __name__ == '__main__':  # else Python would search lab/ first, and take this file for its own inspect
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import math

from configurator import configure, package

init_from = 'out'    # as in sample.py: a run's folder, a file, or hub id
layer = 0            # number of the layer in the picture
png = ''             # the picture of this layer's attention, head by head; '': none
_, model_args, words = configure(globals(), 'GPTConfig', words=1)[:3]

import torch

from bench import print_table
from model import rope_table
from sample import load


def head_numbers(weights):
    """Attention weights (H, T, T) -> (H, 4), means over the queries: entropy in nats, distance in tokens,
    shares of the token itself and of the first one."""
    position = torch.arange(weights.shape[-1])
    distance = position[:, None] - position
    return torch.stack((torch.special.entr(weights).sum(-1), (weights * distance).sum(-1),
                        weights.diagonal(0, 1, 2), weights[..., 0]), dim=-1).mean(1)


def look_inside(model, idx):
    """idx (1, T) -> {number of a layer with attention: its weights (H, T - 1, T - 1)}, and for each block the
    root mean squares of its output and of the loss's gradient there."""
    outputs = []
    weights = []
    for block in model.h:
        block.register_forward_hook(lambda *call: outputs.append(call[-1]))
    loss, _ = model(idx[:, :-1], idx[:, 1:], weights=weights)
    grads = torch.autograd.grad(loss, outputs)
    attends = [i for i, block in enumerate(model.h) if block.attn.mask_kind]
    sizes = [[x.square().mean().sqrt().item() for x in pair] for pair in zip(outputs, grads)]
    return {i: own[0].detach() for i, own in zip(attends, weights)}, sizes


def wavelengths(kind, length):
    """Tokens that a full turn of each rotary pair takes: (pairs,). kind: a mixer's rope_kind; length:
    block_size."""
    cos, sin = rope_table(kind, torch.ones(1, 1), length)
    return 2 * math.pi / torch.atan2(sin, cos).flatten()


def draw(weights, labels):
    """Writes a picture with a panel for each head, and a row for each token that attends."""
    side = 1.5 + len(labels) / 6  # inches
    figure = package('matplotlib.figure', 'pictures need', 'matplotlib').Figure((side * len(weights), side))
    for axes, weight in zip(figure.subplots(1, len(weights), squeeze=False)[0], weights):
        axes.imshow(weight)
        axes.set_xticks(range(len(labels)), labels, rotation=90, parse_math=False)
        axes.set_yticks(range(len(labels)), labels, parse_math=False)
    figure.savefig(png)


if __name__ == '__main__':
    model, tokenizer, _ = load(init_from, dtype=torch.float32, **model_args)
    length = model.config.block_size
    ids = tokenizer.encode(*words or ['The cat sat on the mat.'])
    weights, sizes = look_inside(model, torch.tensor([ids]))
    print_table('layer.head', ['entropy', 'distance', 'itself', 'first'], {
        f'{i}.{head}': [f'{n:.3f}' for n in row]
        for i, own in weights.items() for head, row in enumerate(head_numbers(own))})
    print_table('after layer', ['activations', 'gradients'], {
        f'{i}': [f'{n:.3g}' for n in row] for i, row in enumerate(sizes)})
    for kind in filter(None, dict.fromkeys(mixer.rope_kind for mixer in model.mixers)):
        turns = zip(wavelengths((*kind[:2], ()), length), wavelengths(kind, length))
        print_table(f'pair, base {kind[0]:g}', ['tokens per turn', 'with rope_scaling'], {
            f'{i}': [f'{n:,.1f}' for n in row] for i, row in enumerate(turns)})
    print_table('tokens', ['MB of scores per layer and row'], {
        f'{n:,}': [f'{model.config.n_head * n**2 * 4 / 1e6:,.1f}']
        for n in (length, 4 * length, 16 * length)})
    if png:
        draw(weights[layer], [repr(tokenizer.decode([i])) for i in ids[:-1]])

"""
Prints what happens inside a trained model when it reads a text.

    python sample.py examples/look_inside.py --init_from=out --start='The cat sat on the mat.' --dtype=float32

For each head: the entropy of the attention, the mean distance that the head looks back, and its weights
on the token itself and on the first token. For each layer: the root mean square (RMS) of the residual
stream and of its gradient. For each rotary pair: the wavelength without and with rope_scaling. For three
lengths: the memory of the attention scores.
"""
import math

import torch

from bench import print_table
from configurator import UserError
from model import rope_table


def head_numbers(weights):
    """Attention weights (H, T, T) -> (H, 4), means over queries: entropy in nats, distance in tokens, and
    weights on the token itself and on the first token."""
    position = torch.arange(weights.shape[-1], device=weights.device)
    distance = position[:, None] - position
    return torch.stack((torch.special.entr(weights).sum(-1), (weights * distance).sum(-1),
                        weights.diagonal(0, 1, 2), weights[..., 0]), dim=-1).mean(1)


def inside(model, idx):
    """idx (1, T) -> {layer with attention: weights (H, T - 1, T - 1)}, and for each layer the RMS of its
    output and of the loss's gradient there."""
    outputs = []
    weights = []
    hooks = [block.register_forward_hook(lambda *call: outputs.append(call[-1])) for block in model.h]
    loss, _ = model(idx[:, :-1], idx[:, 1:], weights=weights)
    grads = torch.autograd.grad(loss, outputs)
    for hook in hooks:
        hook.remove()
    with_attention = [i for i, block in enumerate(model.h) if block.attn.mask_kind]
    sizes = [[x.float().square().mean().sqrt().item() for x in pair] for pair in zip(outputs, grads)]
    return {i: weight[0].detach().float() for i, weight in zip(with_attention, weights)}, sizes


def wavelengths(kind, length):
    """Tokens per rotation of each rotary pair: (pairs,). kind: a mixer's rope_kind; length: block_size."""
    cos, sin = rope_table(kind, torch.ones(1, 1), length)
    return 2 * math.pi / torch.atan2(sin, cos).flatten()


def completions(model, tokenizer, prompts, *args, **options):
    """Replaces completions of sample.py: prints tables about the first prompt, without sampling."""
    if len(prompts[0]) < 2:
        raise UserError(f"the text has {len(prompts[0])} tokens, but needs 2: give a longer --start")
    length = model.config.block_size
    weights, sizes = inside(model, torch.tensor([prompts[0]], device=model.wte.weight.device))
    print_table('layer.head', ['entropy, nats', 'distance, tokens', 'on itself', 'on first token'], {
        f'{i}.{head}': [f'{n:.3f}' for n in row]
        for i, weight in weights.items() for head, row in enumerate(head_numbers(weight))})
    print_table('after layer', ['RMS of activations', 'RMS of gradients'], {
        f'{i}': [f'{n:.3g}' for n in row] for i, row in enumerate(sizes)})
    for kind in filter(None, dict.fromkeys(mixer.rope_kind for mixer in model.mixers)):
        both = zip(wavelengths((*kind[:2], ()), length), wavelengths(kind, length))
        print_table(f'rotary pair (base {kind[0]:g})', ['wavelength, tokens', 'with rope_scaling'], {
            f'{i}': [f'{n:,.1f}' for n in pair] for i, pair in enumerate(both)})
    print_table('tokens', ['MB of scores per layer and sequence'], {
        f'{n:,}': [f'{model.config.n_head * n**2 * 4 / 1e6:,.1f}']
        for n in (length, 4 * length, 16 * length)})
    return iter(())


def patch(script):
    """Replaces completions of sample.py."""
    script.completions = completions

"""
What parts cost: attention, caches, norms and MLPs, beside each other on this machine; about 3 minutes.

    python docs/cost.py
    python docs/cost.py --lengths=[256,1024] --dtype=bfloat16
"""
import dataclasses
import functools
import itertools
import math
import os
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from configurator import configure, runtime

lengths: list | None = None       # tokens, None: 256 to 4096
max_new_tokens = 200              # decoding without a cache: these and half of them
batch_size: int | None = None     # sequences; None: 8 or 12
n_layer = 6
n_head = 6
n_embd = 384
rounds = 5                        # turns
optimizer = 'adamw'               # adamw, muon
grad_clip = 1.0                   # 0: no clipping
device = 'auto'                   # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'                    # float32, bfloat16, float16; auto: what the hardware is fast at
compile: bool | str = 'auto'      # torch.compile; auto: train where it works, decode not
seed = 1337                       # of weights and tokens
config = configure(globals()).config

import numpy as np
import torch

import train
from bench import (
    cache_per_token,
    fill_zeros,
    our_step,
    print_table,
    seconds_each,
    take_turns,
    timed,
)
from model import GPT, GPTConfig, Mask, Norm, attend, eager_attention, gated_delta_rule, visible
from sample import generate

# what parts cost --------------------------------------------------------------------------------------------

COST_WINDOW = 256


def measure_cost(config):
    """What the parts of a decoder cost on this device, alternating: attention against length, a cache against
    none, what kinds of attention cache and how fast they decode, norms and MLPs alone and in a step. Nothing
    is trained, weights are random."""
    machine = runtime(config['device'], config['dtype'], config['seed'])
    lengths = config['lengths'] or [256, 512, 1024, 2048, 4096]
    size = {name: config[name] for name in ('n_layer', 'n_head', 'n_embd')} | {'vocab_size': 4096}
    shape = GPTConfig(**size)
    rows, rounds = config['batch_size'] or 8, config['rounds']
    print(f"{shape.n_layer} layers, {shape.n_embd} wide, {shape.n_head} heads of {shape.head_dim}; medians "
          f"of {rounds} turns")
    return {'device': machine.device, 'dtype': train.dtype_name(machine.dtype), 'lengths': lengths,
            'attention': cost_of_attention(shape, lengths, machine, rounds),
            'cache': cost_without_cache(size, machine, config['max_new_tokens'], rounds),
            'decode': cost_of_decoding(size, max(lengths), machine, rows, rounds),
            'norms': cost_of_norms(size, machine, rounds), 'steps': cost_of_steps(size, machine, config)}


def milliseconds(sides, rounds):
    """Name -> median of take_turns, of one call a turn."""
    times = take_turns({name: timed(f, 1) for name, f in sides.items()}, rounds)
    return {name: round(float(np.median(t)) * 1e3, 4) for name, t in times.items()}


def peak_bytes(f, device):
    """The most memory that a call holds at a time beyond what is there before: what torch's allocator gives
    out, not what a library may take for itself. None where nobody can tell."""
    if 'cuda' in device:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        f()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device != 'cpu':
        return None
    os.environ.setdefault('KINETO_LOG_LEVEL', '99')  # or it tells standard error when it starts
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as seen:
        f()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == '[memory]']
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes, initial=0))


def attention_paths(T, n_head, head_dim, device, dtype):
    """Ways to mix T tokens, one row: name -> function of q, k and v, (1, n_head, T, head_dim) each."""
    positions, scale = torch.arange(T, device=device)[None], head_dim ** -0.5
    full, first = torch.zeros((), dtype=dtype, device=device), (positions - (COST_WINDOW - 1)).clamp(min=0)
    causal = Mask(full.where(visible(positions, positions), -math.inf), True, None)
    window = Mask(full.where(visible(positions, positions, first), -math.inf), True, COST_WINDOW)
    context = types.SimpleNamespace(eager=False, weights=None)
    decay, beta = (torch.full((1, n_head, T), value, device=device) for value in (-0.1, 0.5))
    state = torch.zeros(1, n_head, head_dim, head_dim, device=device)
    return {
        'naive': lambda q, k, v: eager_attention(q, k, v, causal, scale, block=T),  # all T x T scores
        'eager': lambda q, k, v: eager_attention(q, k, v, causal, scale),  # in blocks; trains on CPUs
        'SDPA': lambda q, k, v: attend(q, k, v, context, Mask(None, True, None), scale),
        f'window {COST_WINDOW}': lambda q, k, v: eager_attention(q, k, v, window, scale),
        'linear': lambda q, k, v: gated_delta_rule(q.float() * scale, k.float(), v.float(), decay, beta,
                                                   state)[0],  # Gated DeltaNet's
    }


def cost_of_attention(shape, lengths, machine, rounds):
    """Milliseconds and bytes of mixing one row of tokens, without projections: what -> path -> list by
    length."""
    found, device, dtype = {}, machine.device, machine.dtype
    for T in lengths:
        qkv = [torch.randn(1, shape.n_head, T, shape.head_dim, device=device, dtype=dtype).requires_grad_()
               for _ in range(3)]
        paths = attention_paths(T, shape.n_head, shape.head_dim, device, dtype)
        forward = {name: torch.no_grad()(functools.partial(path, *qkv)) for name, path in paths.items()}
        both = {name: functools.partial(with_gradients, path, qkv) for name, path in paths.items()}
        peaks = {name: peak_bytes(f, device) for name, f in both.items()}
        for what, each in {'forward, ms': milliseconds(forward, rounds),
                           'forward and backward, ms': milliseconds(both, rounds),
                           'peak of both, bytes': peaks}.items():
            for name, value in each.items():
                found.setdefault(what, {}).setdefault(name, []).append(value)
    for what, table in found.items():
        in_mb = what.endswith('bytes')
        print_table(f"attention of a layer: {what.replace('bytes', 'MB')}", [f"{T:,}" for T in lengths], {
            name: ['n/a' if value is None else f"{value / 2**20:,.1f}" if in_mb else f"{value:,.2f}"
                   for value in values] for name, values in table.items()})
    return found


def with_gradients(f, inputs, weights=()):
    """f(*inputs), and the gradients of its sum."""
    torch.autograd.grad(f(*inputs).sum(), (*inputs, *weights))


def random_model(size, machine, **options):
    """A model whose every weight is random, see model_and_machine."""
    model = GPT(GPTConfig(**{**size, **options})).to(machine.device)
    fill_zeros(model)
    return model


@torch.no_grad()
def cost_without_cache(size, machine, most, rounds):
    """Seconds to generate half of `most` tokens, and all, greedily, with a cache and without: tokens
    -> numbers. Without a cache token n takes a pass over the n tokens before it, which are counted too."""
    model = random_model(size, machine, block_size=most + 1).to(machine.dtype).eval()

    def with_cache(count):
        return (token for _, token in generate(model, [[0]], count, temperature=0) if token is not None)

    def without(count):
        idx = torch.zeros(1, 1, dtype=torch.long, device=machine.device)
        for _ in range(count):
            idx = torch.cat((idx, model(idx, keep=1).argmax(-1)), dim=1)
            yield int(idx[0, -1])
    sides, times = {'cache': with_cache, 'none': without}, {'cache': [], 'none': []}
    for side in sides.values():
        seconds_each(side(min(10, most)))  # to warm up
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(seconds_each(side(most)).cumsum())
    found = {}
    for n in (most // 2, most):
        cache, none = (round(float(np.median([each[n - 1] for each in times[name]])), 5) for name in sides)
        found[n] = {'cache_s': cache, 'none_s': none, 'cache_tokens': n, 'none_tokens': n * (n + 1) // 2}
    print_table('generating after one token, of one row', ['with cache', 'without', 'ratio', 'by count'], {
        f"{n} tokens": [f"{each['cache_s']:.3f} s", f"{each['none_s']:.3f} s",
                        f"{each['none_s'] / each['cache_s']:.2f}", f"{each['none_tokens'] / n:.1f}"]
        for n, each in found.items()})
    return found


def kinds_of_attention(shape):
    """Name -> options of models of one width. Grouped: about 3 query heads to one of keys; latent: the widths
    of DeepSeek-V2 relative to a head's, 4 for the latent and half for the rotary key."""
    heads, width = shape.n_head, shape.head_dim
    grouped = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(1, heads // 3))
    return {'MHA': {'n_kv_head': heads}, f'GQA, {grouped} of {heads}': {'n_kv_head': grouped},
            'MQA': {'n_kv_head': 1},
            'MLA': dict(kv_lora_rank=4 * width, qk_rope_head_dim=width // 2, qk_nope_head_dim=width,
                        v_head_dim=width)}


@torch.no_grad()
def cost_of_decoding(size, length, machine, batch_size, rounds):
    """What each kind of attention caches, and how fast it makes a token after `length` cached ones: name ->
    numbers."""
    found, sides, shape = {}, {}, GPTConfig(**size)
    for name, options in kinds_of_attention(shape).items():
        model = random_model(size, machine, **options, block_size=length + 1).to(machine.dtype).eval()
        cache = model.make_cache(1, length + 1)
        model(torch.randint(shape.vocab_size, (1, length), device=machine.device), cache=cache, keep=1)
        cache.select([0] * batch_size)
        sides[name] = functools.partial(decode_one, model, cache)
        found[name] = {'params': model.num_params(),
                       'cache_bytes_per_token': cache_per_token(model, machine.dtype)}
    most = found['MHA']['cache_bytes_per_token']
    for name, ms in milliseconds(sides, 4 * rounds).items():
        found[name].update(ms=ms, tok_per_s=round(batch_size * 1e3 / ms, 2),
                           cache_share=round(found[name]['cache_bytes_per_token'] / most, 4))
    print_table(f"decoding after {length:,} tokens, {batch_size} rows",
                ['parameters', 'cache B/token', 'of MHA', 'ms a step', 'tok/s'],
                {name: [f"{each['params']:,}", f"{each['cache_bytes_per_token']:,}",
                        f"{each['cache_share']:.1%}", f"{each['ms']:.2f}", f"{each['tok_per_s']:,.1f}"]
                 for name, each in found.items()})
    return found


def decode_one(model, cache):
    """One more token for each row, and back."""
    token = torch.zeros(len(cache.length), 1, dtype=torch.long, device=cache.length.device)
    model(token, cache=cache, keep=1)
    cache.rewind(1)


def cost_of_choices(title, sides, rounds):
    """sides: name -> (function, how many parameters it has). Prints and returns their milliseconds."""
    ms = milliseconds({name: f for name, (f, _) in sides.items()}, rounds)
    found = {name: {'ms': ms[name], 'params': params} for name, (_, params) in sides.items()}
    first = next(iter(ms.values()))
    print_table(title, ['parameters', 'ms', 'of the first'], {
        name: [f"{each['params']:,}", f"{each['ms']:.3f}", f"{each['ms'] / first:.3f}"]
        for name, each in found.items()})
    return found


def cost_of_norms(size, machine, rounds):
    """What cost_of_choices gives of a norm alone, forward and backward."""
    config, sides = GPTConfig(**size), {}
    x = torch.randn(4096, config.n_embd, device=machine.device, dtype=machine.dtype).requires_grad_()
    for name in ('rmsnorm', 'layernorm'):
        norm = Norm(config.n_embd, dataclasses.replace(config, norm=name)).to(machine.device)
        weights = list(norm.parameters())
        for w in weights:
            torch.nn.init.ones_(w)
        sides[name] = functools.partial(with_gradients, norm, [x], weights), sum(w.numel() for w in weights)
    return cost_of_choices('a norm over 4,096 tokens, forward and backward', sides, 4 * rounds)


STEPS = {  # of training: name -> options; the MLPs have about the same parameters
    'rmsnorm, swiglu': {}, 'layernorm': {'norm': 'layernorm'}, 'gelu': {'mlp': 'gelu'},
    'geglu': {'mlp': 'geglu'}, 'relu': {'mlp': 'relu'},
}


def cost_of_steps(size, machine, config):
    """What cost_of_choices gives of training steps of models that differ in one choice. They are not compiled
    unless that is asked for, as it takes half a minute for each."""
    batch_size, sides = config['batch_size'] or 12, {}
    for name, options in STEPS.items():
        model = random_model(size, machine, **options, block_size=256)
        forward = train.compile_model(model, machine.device) if config['compile'] is True else model
        sides[name] = our_step(model, forward, machine, batch_size, config), model.num_params()
    compiled = ', compiled' if config['compile'] is True else ''
    return cost_of_choices(f"a training step of {batch_size} rows of 256 tokens{compiled}", sides,
                           config['rounds'])


if __name__ == '__main__':
    measure_cost(config)

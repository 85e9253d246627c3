"""
What parts cost: attention, norms and caches, beside each other on this machine; a few minutes. Models are
not trained or compiled, their weights are random.

    python docs/cost.py
    python docs/cost.py --lengths=[256,1024] --dtype=bfloat16
    python docs/cost.py --lengths=[32768] --rounds=1     # without the formula, whose scores would not fit
"""
import functools
import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from configurator import configure, runtime

lengths = [256, 512, 1024, 2048, 4096]  # tokens that attention sees; decoding the longest
n_layer = 6
n_head = 6
n_embd = 384
rounds = 5                        # turns
device = 'auto'                   # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'                    # float32, bfloat16, float16; auto: what the hardware is fast at
configure(globals())

os.environ.setdefault('KINETO_LOG_LEVEL', '99')  # or torch's profiler tells when it starts and stops
import numpy as np
import torch
import torch.nn.functional as F

import train
from bench import cache_per_token, fill_zeros, print_table, take_turns, timed
from model import GPT, GPTConfig


def compare(title, counted, sides, calls=1):
    """Prints the time of sides, name -> (what it has of what is counted, a function, its arguments), and both
    relative to the first side. calls: of each function in a turn."""
    times = take_turns({name: timed([functools.partial(*call)], calls) for name, (_, *call) in sides.items()},
                       rounds)
    ms, counts = [np.median(t) * 1e3 for t in times.values()], [count for count, *_ in sides.values()]
    print_table(title, [counted, 'of the first', 'ms', 'of the first', 'times as fast'], {
        name: [f"{count:,}", f"{count / max(1, counts[0]):.3f}", f"{t:,.3f}", f"{t / ms[0]:.3f}",
               f"{ms[0] / t:.2f}"] for name, count, t in zip(sides, counts, ms)})


def random_model(**options):
    model = GPT(GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd, vocab_size=4096, **options))
    fill_zeros(model)
    return model.to(machine.device)


# attention, norms -------------------------------------------------------------------------------------------

def written_out(hidden, q, k, v):
    """Attention by its formula, with all T x T scores. hidden: (T, T), -inf where a key is not seen."""
    return (q * q.shape[-1] ** -0.5 @ k.mT + hidden).softmax(-1) @ v


@torch.no_grad()
def forward(f, inputs):
    f(*inputs)


def forward_and_backward(f, inputs, weights=()):
    torch.autograd.grad(f(*inputs).sum(), (*inputs, *weights))


def peak_bytes(f, *args):
    """The most memory that a call holds at a time beyond what is there before: what torch's allocator gives
    out, not what a library may take for itself. 0 where torch does not tell."""
    f(*args)  # libraries take what they keep
    with torch.profiler.profile(profile_memory=True) as seen:
        f(*args)
    events = seen.profiler.kineto_results.events()  # in the order of time
    sizes = (event.nbytes() for event in events if event.name() == '[memory]')
    return max(itertools.accumulate(sizes, initial=0))


# decoding ---------------------------------------------------------------------------------------------------

def filled_cache(model, length):
    """A cache of 8 rows with `length` random tokens each, and room for one more."""
    cache = model.make_cache(1, length + 1)
    model(torch.randint(model.config.vocab_size, (1, length), device=machine.device), cache=cache, keep=1)
    cache.select([0] * 8)
    return cache


def decode_one(model, cache):
    """One more token for each row, and back."""
    model(torch.zeros_like(cache.length)[:, None], cache=cache, keep=1)
    cache.rewind(1)


# ------------------------------------------------------------------------------------------------------------

if __name__ == '__main__':
    machine, longest = runtime(device, dtype), max(lengths)
    randn = functools.partial(torch.randn, device=machine.device, dtype=machine.dtype, requires_grad=True)
    print(f"{n_layer} layers, {n_embd} wide, {n_head} heads; medians of {rounds} turns")

    for length in lengths:
        qkv = [randn(1, n_head, length, n_embd // n_head) for _ in range(3)]
        paths = {'SDPA': functools.partial(F.scaled_dot_product_attention, is_causal=True)}
        # with backward the formula holds scores, weights and gradients of both
        if 6 * n_head * length**2 * machine.dtype.itemsize < train.memory_at_hand(machine.device):
            hidden = qkv[0].new_full((length, length), float('-inf')).triu(1)
            paths = {'formula': functools.partial(written_out, hidden), **paths}
        for what, run in {'forward': forward, 'with backward': forward_and_backward}.items():
            compare(f"attention of a layer, {length:,} tokens, {what}", 'peak bytes', {
                name: (peak_bytes(run, path, qkv), run, path, qkv) for name, path in paths.items()})

    norms = {name: random_model(norm=name).ln_f for name in ('rmsnorm', 'layernorm')}
    x = randn(4096, n_embd)
    compare('a norm over 4,096 tokens, with backward', 'parameters', {
        name: (n_embd, forward_and_backward, norm, [x], [norm.weight])
        for name, norm in norms.items()}, calls=8)

    with torch.no_grad():
        models = {name: random_model(n_kv_head=n, block_size=longest + 1).to(machine.dtype).eval()
                  for name, n in {'MHA': n_head, 'GQA': n_head // 3, 'MQA': 1}.items()}
        compare(f"decoding 8 rows after {longest:,} tokens", 'cache bytes a token', {
            name: (cache_per_token(model, machine.dtype), decode_one, model, filled_cache(model, longest))
            for name, model in models.items()}, calls=4)

"""
Measures: how fast, how big, how much memory.

    python bench.py train config/shakespeare_char.py         # training steps on random tokens
    python bench.py params config/mixtral_8x7b.py            # parameters, FLOPs and cache, by part; any size
    python bench.py decode --prompt_len=32                   # a 124M model, random weights, token by token
    python bench.py decode --init_from=out/ckpt.pt --dtype=bfloat16 --compile=True
    python bench.py train --n_layer=4 --n_head=4 --n_embd=128 --block_size=64 --vs=../nanoGPT

--vs names a clone of nanoGPT: the same shape in its model.py, as it runs on this device, takes turns with
ours in the same process. The last line is JSON. Speeds are medians after a warm-up; the spread is between the
10th and 90th percentile. Shares compare with what this machine reaches on one large matmul, and on one large
sum, in the same run.
"""
import contextlib
import functools
import importlib.util
import json
import os
import sys
import time

import numpy as np
import torch

from configurator import configure, runtime
from model import GPT, GPTConfig
from prepare import find_checkpoint, foreign, read_meta
from sample import checkpoint_path, generate
from train import make_optimizers, peak_flops, resolve_compile

# what
init_from = 'scratch'             # decode: scratch (random weights), or a checkpoint or its folder
vs = ''                           # folder of a nanoGPT clone to take turns with
batch_size: int | None = None     # sequences; None: 12 to train, 1 to decode
dataset = ''                      # train: its vocabulary is used, unless vocab_size is given
prompt_len = 32                   # decode: tokens before
max_new_tokens = 200              # decode: tokens made
steps = 10                        # train: steps a turn; decode makes max_new_tokens a turn
rounds = 5                        # turns
# as in train.py
optimizer = 'adamw'               # adamw or muon
grad_clip = 1.0                   # 0: no clipping
device = 'auto'                   # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'                    # float32, bfloat16, float16; auto: what the hardware is fast at
compile: bool | str = 'auto'      # torch.compile; auto: train where it works, decode not
seed = 1337                       # of weights and tokens
_, model_args, words = configure(globals(), GPTConfig, words=1)


def synchronize(device):
    if 'cuda' in device:
        torch.cuda.synchronize(device)
    elif device == 'mps':
        torch.mps.synchronize()


def take_turns(sides, rounds, steps, device, warmup=3):
    """sides: name -> function; each does `steps` timed calls a round, round after round.
    Returns name -> (rounds, steps) seconds."""
    times = {name: [] for name in sides}
    for name, f in sides.items():
        for _ in range(warmup):
            f()
    for _ in range(rounds):
        for name, f in sides.items():
            f()  # the other side has left the caches cold
            synchronize(device)
            for _ in range(steps):
                begun = time.perf_counter()
                f()
                synchronize(device)
                times[name].append(time.perf_counter() - begun)
    return {name: np.array(t).reshape(rounds, steps) for name, t in times.items()}


def machine_peaks(device, dtype):
    """(FLOP/s of a large matmul in dtype, bytes/s of reading a large tensor), the best of several tries."""
    n = 8192 if 'cuda' in device else 2048
    a, b = torch.randn(n, n, device=device).to(dtype), torch.randn(n, n, device=device).to(dtype)
    big = torch.ones(2**26, device=device)  # 256 MB
    best = []
    for f, amount in ((lambda: a @ b, 2 * n**3), (lambda: big.sum(), big.nbytes)):
        seconds = take_turns({'it': f}, 1, 8, device)['it'].min()
        best.append(amount / seconds)
    return best


def peak_mb(device):
    """Most memory used so far: of the CUDA device, or of this process; None where nobody can tell."""
    if 'cuda' in device:
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == 'darwin' else 2**10)


def load_nanogpt(folder, config, device):
    """nanoGPT's model at our shape, from its clone."""
    path = os.path.join(folder, 'model.py')
    if not os.path.isfile(path):
        raise FileNotFoundError(f"vs={folder}: no model.py there; "
                                "git clone https://github.com/karpathy/nanoGPT")
    spec = importlib.util.spec_from_file_location('nanogpt_model', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.GPT(module.GPTConfig(n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd,
                                       bias=False, block_size=config.block_size,
                                       vocab_size=config.vocab_size, dropout=config.dropout)).to(device)


def train_step(forward, params, optimizers, batch, autocast, grad_clip, foreach):
    """One update as train.py does it, or nanoGPT: forward returns a loss among its results."""
    with autocast():
        results = forward(*batch)
        loss = next(part for part in results if torch.is_tensor(part) and part.ndim == 0)
        if isinstance(results[1], dict) and results[1]:  # experts
            loss = loss + 0.01 * results[1]['balance']
    loss.backward()
    if grad_clip:
        torch.nn.utils.clip_grad_norm_(params, grad_clip, foreach=foreach)
    for opt in optimizers:
        opt.step()
        opt.zero_grad(set_to_none=True)


def report(times, units, unit, numbers, baseline=None):
    """Prints the table and the JSON line. units: tokens a timed call makes."""
    for name, t in times.items():
        low, mid, high = np.percentile(t, [10, 50, 90]) * 1e3
        print(f"{name:<10} {mid:10.2f} ms {unit:<9} {low:9.2f} to {high:.2f}   "
              f"{units / mid * 1e3:12,.1f} tok/s")
    mine = np.median(times['flatgpt'])
    numbers = {'tok_per_s': round(units / mine, 2), 'ms': round(mine * 1e3, 4), **numbers}
    if baseline in times:
        ratios = np.median(times[baseline], axis=1) / np.median(times['flatgpt'], axis=1)
        numbers['times_faster'] = round(float(np.median(ratios)), 3)
        print(f"{numbers['times_faster']:.2f} times {baseline}'s speed (median of {len(ratios)} turns, "
              f"{ratios.min():.2f} to {ratios.max():.2f})")
    for name, value in numbers.items():
        if name.endswith('_share') and value is not None:
            print(f"{name.replace('_', ' ')}: {value:.1%}")
    print(f"peak memory: {numbers['peak_mb']:,.0f} MB" if numbers['peak_mb'] else 'peak memory: n/a')
    print(json.dumps(numbers))


def print_params(config, dtype):
    """The model's parts and their shares, counted without allocating them; the last line is JSON."""
    with torch.device('meta'):
        model = GPT(config)
    parts = model.account()
    total = [sum(row[i] for row in parts.values()) for i in range(3)]
    print(f"{'':<16}{'parameters':>19}{'':8}{'active':>17}{'':8}{'training FLOPs a token':>24}")
    for part, row in (*parts.items(), ('total', total)):
        print(f"{part:<16}" + ''.join(f"{n:>{width},}{n / all_ if all_ else 0:>8.1%}" for n, all_, width
                                      in zip(row, total, (19, 17, 24))))
    size, cache = dtype.itemsize, model.cache_numbers()
    full = model.cache_numbers(config.block_size)
    print(f"weights: {total[0] * size / 1e9:,.2f} GB; cache: {cache * size:,} bytes a token, "
          f"{full * size / 1e9:,.2f} GB at {config.block_size:,} tokens; in {str(dtype)[6:]}")
    print(json.dumps({'what': 'params', 'params': total[0], 'active_params': total[1],
                      'flops_per_token': total[2], 'cache_bytes_per_token': cache * size,
                      'cache_bytes': full * size, 'dtype': str(dtype)[6:]}))


if __name__ == '__main__':
    what = words[0] if words else ''
    if what not in ('train', 'decode', 'params'):
        raise ValueError(f"bench.py measures train, decode or params, not {what!r}: "
                         "python bench.py train config/small.py")
    if what == 'params':  # of the data type that weights and cache are published in, unless another is named
        dtypes = {name: getattr(torch, name) for name in ('bfloat16', 'float16', 'float32')}
        if dtype not in ('auto', *dtypes):
            raise ValueError(f"dtype={dtype!r} is none of auto, {', '.join(dtypes)}")
        print_params(GPTConfig(**model_args), dtypes.get(dtype, torch.bfloat16))
        raise SystemExit
    machine = runtime(device, dtype, seed)
    device = machine.device
    batch_size = batch_size or {'train': 12, 'decode': 1}[what]
    folder = os.path.join('data', dataset)
    if dataset and 'vocab_size' not in model_args and os.path.isdir(folder):
        model_args['vocab_size'] = read_meta(folder)['vocab_size']
    if init_from != 'scratch':
        model = (GPT.from_pretrained(find_checkpoint(init_from)) if foreign(init_from)
                 else GPT.from_checkpoint(checkpoint_path(init_from, init_from))[0])
        model.to(device)
    else:
        model = GPT(GPTConfig(**model_args)).to(device)
    config = model.config
    for w in model.parameters():  # zero-initialised projections would make some kernels' work too easy
        if w.ndim > 1 and not w.any():
            torch.nn.init.normal_(w, std=0.02)
    print(f"{config.n_layer} layers, {config.n_embd} wide, {model.num_params():,} parameters, context "
          f"{config.block_size}")
    matmul, bandwidth = machine_peaks(device, machine.dtype)
    print(f"this machine: {matmul / 1e9:,.0f} GFLOP/s in a large matmul, {bandwidth / 1e9:,.1f} GB/s reading")
    numbers = {'what': what, 'device': device, 'dtype': str(machine.dtype).removeprefix('torch.'),
               'params': model.num_params(), 'batch_size': batch_size}

    if what == 'train':
        forward = model
        if resolve_compile(compile, device, float('inf')):
            print('compiling: about half a minute')
            forward = torch.compile(model, dynamic=False,
                                    options=None if 'cuda' in device else {'fallback_random': True})
        tokens = torch.randint(config.vocab_size, (2, batch_size, config.block_size), device=device)
        optimizers = make_optimizers(model, optimizer, 1e-4, 0.1, (0.9, 0.95), 0.95, device)
        step = functools.partial(train_step, batch=tokens, grad_clip=grad_clip)
        sides = {'flatgpt': functools.partial(step, forward, list(model.parameters()), optimizers,
                                              autocast=machine.autocast, foreach=device != 'mps')}
        if vs:  # as its train.py runs it: on CPUs without autocast, at the default precision, uncompiled
            other = load_nanogpt(vs, config, device)
            cpu, precision = device == 'cpu', torch.get_float32_matmul_precision()
            theirs = functools.partial(step, other if cpu else torch.compile(other), list(other.parameters()),
                                       [other.configure_optimizers(0.1, 1e-4, (0.9, 0.95),
                                                                   machine.device_type)],
                                       autocast=contextlib.nullcontext if cpu else machine.autocast,
                                       foreach=None)

            def nanogpt_step():
                torch.set_float32_matmul_precision('highest' if cpu else 'high')
                theirs()
                torch.set_float32_matmul_precision(precision)
            sides['nanoGPT'] = nanogpt_step
        times = take_turns(sides, rounds, steps, device)
        n = batch_size * config.block_size
        flops = model.flops_per_token() * n / np.median(times['flatgpt'])
        peak = peak_flops(device, machine.dtype)
        numbers.update(mfu=round(flops / peak, 4) if peak else None, matmul_share=round(flops / matmul, 4),
                       peak_mb=peak_mb(device))
        report(times, n, 'a step', numbers, 'nanoGPT')

    if what == 'decode':
        other = load_nanogpt(vs, config, device).eval() if vs else None
        model.to(machine.dtype).eval()
        prompts = torch.randint(config.vocab_size, (batch_size, prompt_len)).tolist()
        compiled = compile is True

        def ours():
            stamps = [time.perf_counter()]
            for _ in generate(model, prompts, max_new_tokens, top_k=200, compile=compiled):
                stamps.append(time.perf_counter())
            return np.diff(stamps)
        ours()
        gaps, theirs = [], []
        for _ in range(rounds):
            gaps.append(ours())
            if other is not None:
                torch.set_float32_matmul_precision('highest' if device == 'cpu' else 'high')
                count = max(8, max_new_tokens // 10) if device == 'cpu' else max_new_tokens
                with torch.no_grad():  # it has no cache: a middle stretch stands for the whole
                    x = torch.randint(config.vocab_size,
                                      (batch_size, prompt_len + (max_new_tokens - count) // 2), device=device)
                    begun = time.perf_counter()
                    other.generate(x, count, top_k=200)
                    synchronize(device)
                    theirs.append((time.perf_counter() - begun) / count)
        gaps = np.array(gaps)  # (rounds, max_new_tokens); the first gap of each is the prompt's
        times = {'flatgpt': gaps[:, 1:]}
        if theirs:
            times['nanoGPT'] = np.array(theirs)[:, None]
        per_token = sum(w.nbytes for w in model.parameters()) + model.make_cache(
            batch_size, min(config.block_size, prompt_len + max_new_tokens // 2)).nbytes
        numbers.update(prefill_ms=round(float(np.median(gaps[:, 0])) * 1e3, 3), compile=compiled,
                       bandwidth_share=round(per_token / np.median(gaps[:, 1:]) / bandwidth, 4),
                       peak_mb=peak_mb(device))
        print(f"prompt of {prompt_len} tokens: {numbers['prefill_ms']:.2f} ms")
        report(times, batch_size, 'a token', numbers, 'nanoGPT')

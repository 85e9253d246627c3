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
import math
import os
import sys
import time

from configurator import configure, runtime

# what
init_from = 'scratch'             # scratch (random weights), or as in train.py; params: scratch
vs = ''                           # folder of a nanoGPT clone to take turns with
batch_size: int | None = None     # sequences; None: 12 to train, 1 to decode
dataset = ''                      # train: its vocabulary is used, unless vocab_size is given
prompt_len = 32                   # decode: tokens before
max_new_tokens = 200              # decode: tokens made
steps = 10                        # train: steps a turn; decode makes max_new_tokens a turn
rounds = 5                        # turns
# as in train.py
optimizer = 'adamw'               # adamw, muon
grad_clip = 1.0                   # 0: no clipping
device = 'auto'                   # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'                    # float32, bfloat16, float16; auto: what the hardware is fast at
compile: bool | str = 'auto'      # torch.compile; auto: train where it works, decode not
seed = 1337                       # of weights and tokens
config, model_args, plain = configure(globals(), 'GPTConfig', words=1)

import numpy as np
import torch

import train
from model import GPT, GPTConfig
from prepare import read_meta
from sample import generate


def synchronize(device):
    if 'cuda' in device:
        torch.cuda.synchronize(device)
    elif device == 'mps':
        torch.mps.synchronize()


def take_turns(sides, rounds, steps, device, warmup=3):
    """sides: name -> function; each does `steps` timed calls a round, round after round.
    Returns name -> (rounds, steps) seconds."""
    times = {name: [] for name in sides}
    for f in sides.values():
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
    times = take_turns({'matmul': functools.partial(torch.mm, a, b), 'sum': big.sum}, 1, 8, device)
    return 2 * n**3 / times['matmul'].min(), big.nbytes / times['sum'].min()


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


def our_step(model, forward, machine, config):
    """A function that does one update as train.py does it, on random tokens."""
    tokens = torch.randint(model.config.vocab_size, (2, config['batch_size'], model.config.block_size),
                           device=machine.device)
    settings = {**train.config, 'optimizer': config['optimizer'], 'learning_rate': 1e-4}
    optimizers, params = train.make_optimizers(model, settings), list(model.parameters())
    scaler = torch.amp.GradScaler(machine.device_type, enabled=False)

    def step():
        _, expert_load, _ = train.gradients(forward, (*tokens, None), iter(()), 1, machine.autocast, scaler,
                                            settings['balance_loss'], settings['z_loss'])
        train.update(model, params, optimizers, scaler, config['grad_clip'], expert_load,
                     settings['balance_rate'])
    return step


def their_step(model, machine, config):
    """The same for nanoGPT's model, as its train.py runs it: on CPUs without autocast, at the default
    precision, uncompiled."""
    cpu, precision = machine.device == 'cpu', torch.get_float32_matmul_precision()
    x, y = torch.randint(model.config.vocab_size, (2, config['batch_size'], model.config.block_size),
                         device=machine.device)
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), machine.device_type)
    params, forward = list(model.parameters()), model if cpu else torch.compile(model)
    autocast = contextlib.nullcontext if cpu else machine.autocast

    def step():
        torch.set_float32_matmul_precision('highest' if cpu else 'high')
        with autocast():
            _, loss = forward(x, y)
        loss.backward()
        if config['grad_clip']:
            torch.nn.utils.clip_grad_norm_(params, config['grad_clip'])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.set_float32_matmul_precision(precision)
    return step


def describe(model, machine, what, config):
    return {'what': what, 'device': machine.device, 'dtype': train.dtype_name(machine.dtype),
            'params': model.num_params(), 'batch_size': config['batch_size']}


def report(times, units, unit, numbers):
    """Prints the table and the JSON line. times: from take_turns, of 'flatgpt' and maybe of 'nanoGPT'.
    units: tokens that a timed call makes."""
    for name, t in times.items():
        low, mid, high = np.percentile(t, [10, 50, 90]) * 1e3
        print(f"{name:<10} {mid:10.2f} ms {unit:<9} {low:9.2f} to {high:.2f}   "
              f"{units / mid * 1e3:12,.1f} tok/s")
    ours = np.median(times['flatgpt'])
    numbers = {'tok_per_s': round(units / ours, 2), 'ms': round(ours * 1e3, 4), **numbers}
    if 'nanoGPT' in times:
        ratios = np.median(times['nanoGPT'], axis=1) / np.median(times['flatgpt'], axis=1)
        numbers['times_faster'] = round(float(np.median(ratios)), 3)
        print(f"{numbers['times_faster']:.2f} times nanoGPT's speed (median of {len(ratios)} turns, "
              f"{ratios.min():.2f} to {ratios.max():.2f})")
    for name, value in numbers.items():
        if name.endswith('_share') and value is not None:
            print(f"{name.replace('_', ' ')}: {value:.1%}")
    print(f"peak memory: {numbers['peak_mb']:,.0f} MB" if numbers['peak_mb'] else 'peak memory: n/a')
    print(json.dumps(numbers))


# what it measures -------------------------------------------------------------------------------------------

def measure_params(config, dtype):
    """The model's parts and their shares, counted without allocating them; the last line is JSON."""
    with torch.device('meta'):
        model = GPT(config)
    parts = model.account()
    total = [sum(row[i] for row in parts.values()) for i in range(3)]
    print(f"{'':<16}{'parameters':>19}{'':8}{'active':>17}{'':8}{'training FLOPs a token':>24}")
    for part, row in (*parts.items(), ('total', total)):
        columns = [f"{n:>{width},}{n / whole if whole else 0:>8.1%}"
                   for n, whole, width in zip(row, total, (19, 17, 24))]
        print(f"{part:<16}{''.join(columns)}")
    size, state = dtype.itemsize, model.cache_elements(0)
    cache, full = model.cache_elements(1) - state, model.cache_elements(config.block_size) - state
    states = sum(math.prod(shape) * (own or dtype).itemsize
                 for block in model.h for shape, own in block.attn.states)
    print(f"weights: {total[0] * size / 1e9:,.2f} GB; cache: {cache:,} elements or {cache * size:,} bytes a "
          f"token{f', {states:,} bytes a row' if states else ''}, {(full * size + states) / 1e9:,.2f} GB at "
          f"{config.block_size:,} tokens; in {train.dtype_name(dtype)}")
    print(json.dumps({'what': 'params', 'params': total[0], 'active_params': total[1],
                      'flops_per_token': total[2], 'cache_bytes_per_token': cache * size,
                      'cache_bytes': full * size + states, 'dtype': train.dtype_name(dtype)}))


def measure_training(model, machine, matmul, config):
    """Seconds a step in turns with nanoGPT, and what a step reaches of the machine."""
    forward = model
    if train.resolve_compile(config['compile'], machine.device, float('inf'), float('inf')):
        print('compiling: about half a minute')
        forward = train.compile_model(model, machine.device)
    sides = {'flatgpt': our_step(model, forward, machine, config)}
    if config['vs']:
        nanogpt = load_nanogpt(config['vs'], model.config, machine.device)
        sides['nanoGPT'] = their_step(nanogpt, machine, config)
    times = take_turns(sides, config['rounds'], config['steps'], machine.device)
    tokens = config['batch_size'] * model.config.block_size
    flops = model.flops_per_token() * tokens / np.median(times['flatgpt'])
    peak = train.peak_flops(machine.device, machine.dtype)
    report(times, tokens, 'a step', {**describe(model, machine, 'train', config),
                                     'mfu': round(flops / peak, 4) if peak else None,
                                     'matmul_share': round(flops / matmul, 4),
                                     'peak_mb': peak_mb(machine.device)})


def time_generation(model, prompts, max_new_tokens, compile):
    """Seconds that each token takes: (max_new_tokens,), the first of them with the prompt."""
    stamps = [time.perf_counter()]
    for _ in generate(model, prompts, max_new_tokens, top_k=200, compile=compile):
        stamps.append(time.perf_counter())
    return np.diff(stamps)


@torch.no_grad()
def time_nanogpt(model, batch_size, prompt_len, max_new_tokens, device):
    """Seconds a token of nanoGPT, which has no cache: on CPUs a middle stretch stands for the whole."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest' if device == 'cpu' else 'high')
    count = max(8, max_new_tokens // 10) if device == 'cpu' else max_new_tokens
    before = prompt_len + (max_new_tokens - count) // 2
    prompt = torch.randint(model.config.vocab_size, (batch_size, before), device=device)
    begun = time.perf_counter()
    model.generate(prompt, count, top_k=200)
    synchronize(device)
    torch.set_float32_matmul_precision(precision)
    return (time.perf_counter() - begun) / count


def measure_decoding(model, machine, bandwidth, config):
    """Seconds a token in turns with nanoGPT, and the share of the memory's bandwidth."""
    batch_size, new, compile = config['batch_size'], config['max_new_tokens'], config['compile'] is True
    nanogpt = load_nanogpt(config['vs'], model.config, machine.device).eval() if config['vs'] else None
    model.to(machine.dtype).eval()
    prompts = torch.randint(model.config.vocab_size, (batch_size, config['prompt_len'])).tolist()
    time_generation(model, prompts, new, compile)  # to warm up
    ours, theirs = [], []
    for _ in range(config['rounds']):
        ours.append(time_generation(model, prompts, new, compile))
        if nanogpt:
            theirs.append(time_nanogpt(nanogpt, batch_size, config['prompt_len'], new, machine.device))
    ours = np.array(ours)  # (rounds, max_new_tokens)
    times = {'flatgpt': ours[:, 1:]}
    if nanogpt:
        times['nanoGPT'] = np.array(theirs)[:, None]
    cache = model.make_cache(batch_size, min(model.config.block_size, config['prompt_len'] + new // 2))
    read = sum(w.nbytes for w in model.parameters()) + cache.nbytes  # bytes a token
    prefill_ms = round(float(np.median(ours[:, 0])) * 1e3, 3)
    print(f"prompt of {config['prompt_len']} tokens: {prefill_ms:.2f} ms")
    share = read / np.median(ours[:, 1:]) / bandwidth
    report(times, batch_size, 'a token', {**describe(model, machine, 'decode', config),
                                          'prefill_ms': prefill_ms, 'compile': compile,
                                          'bandwidth_share': round(share, 4),
                                          'peak_mb': peak_mb(machine.device)})


def check_settings(s):
    """Raises ValueError for the first setting that is no choice, or too low. s: this file's settings."""
    if s['optimizer'] not in train.OPTIMIZERS:
        raise ValueError(f"optimizer={s['optimizer']!r} is none of {', '.join(train.OPTIMIZERS)}")
    if s['compile'] not in (True, False, 'auto'):
        raise ValueError(f"compile={s['compile']!r} is none of True, False, auto")
    lowest = dict(batch_size=1, prompt_len=1, max_new_tokens=2, steps=1, rounds=1, grad_clip=0, seed=0)
    for name, low in lowest.items():
        if s[name] is not None and not s[name] >= low:  # nan is not
            raise ValueError(f"{name}={s[name]} must be at least {low}")
    if s['seed'] >= 2**63:
        raise ValueError(f"seed={s['seed']} must be below 2**63")


if __name__ == '__main__':
    check_settings(config)
    what = plain[0] if plain else ''
    if what not in ('train', 'decode', 'params'):
        raise ValueError(f"bench.py measures train, decode or params, not {what!r}: "
                         "python bench.py train config/small.py")
    folder = os.path.join('data', dataset)
    if dataset and os.path.isdir(folder) and init_from == 'scratch':
        model_args = {'vocab_size': read_meta(folder)['vocab_size'], **model_args}
    if what == 'params':
        if init_from != 'scratch':
            raise ValueError(f"params counts what the options give, not init_from={init_from}: leave it out")
        dtypes = {'auto': torch.bfloat16, 'bfloat16': torch.bfloat16, 'float16': torch.float16,
                  'float32': torch.float32}  # auto: what weights and caches are published in
        if dtype not in dtypes:
            raise ValueError(f"dtype={dtype!r} is none of {', '.join(dtypes)}")
        # where nothing names a vocabulary, GPT-2's: GPTConfig's is that and the rows that pad it
        measure_params(GPTConfig(**{'vocab_size': 50257, **model_args}), dtypes[dtype])
        raise SystemExit

    machine = runtime(device, dtype, seed)
    if batch_size is None:
        config['batch_size'] = {'train': 12, 'decode': 1}[what]
    if init_from == 'scratch':
        model = GPT(GPTConfig(**model_args)).to(machine.device)
    else:
        model, _, _ = train.load_to_train(init_from, 'out', model_args)
        model.to(machine.device)
    for w in model.parameters():  # zero-initialised projections would make some kernels' work too easy
        if w.ndim > 1 and not w.any():
            torch.nn.init.normal_(w, std=0.02)
    print(f"{model.config.n_layer} layers, {model.config.n_embd} wide, {model.num_params():,} parameters, "
          f"context {model.config.block_size}")
    matmul, bandwidth = machine_peaks(machine.device, machine.dtype)
    print(f"this machine: {matmul / 1e9:,.0f} GFLOP/s in a large matmul, {bandwidth / 1e9:,.1f} GB/s reading")
    if what == 'train':
        measure_training(model, machine, matmul, config)
    else:
        measure_decoding(model, machine, bandwidth, config)

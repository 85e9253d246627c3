"""
Measures: how fast, how big, how much memory, how good, which choice is better; checks whether it is right.

    python bench.py train config/shakespeare_char.py         # training steps on random tokens
    python bench.py params config/mixtral_8x7b.py            # parameters, FLOPs and cache, by part; any size
    python bench.py decode --prompt_len=32                   # a 124M model, random weights, token by token
    python bench.py decode --init_from=Qwen/Qwen3-0.6B --compile=True --vs=transformers --quantize=int8
    python bench.py decode config/gpt2.py --batch_size=8     # beside one row alone; or --speculate=8
    python bench.py check config/llama_small.py              # is the model.py that stands here still sound?
    python bench.py train --n_layer=4 --n_head=4 --n_embd=128 --block_size=64 --vs=../nanoGPT
    python bench.py cost                                     # what attention, cache, norm and MLP cost; 3 min
    python bench.py eval --init_from=out                     # loss and bits per byte of all of val.bin
    python bench.py eval my.txt --init_from=out --lengths=[1,2,4]  # of a text, at times the trained length
    python bench.py eval hellaswag_val.jsonl --init_from=gpt2

    python bench.py compare config/llama_small.py --variants="['', '--norm=layernorm', '--mlp=gelu']"
    python bench.py compare config/default.py --variants="['HEAD~1:', 'WORK:', 'WORK: --norm=layernorm']"
    python bench.py compare norms                            # a list of config/variants.py
    python bench.py plot out-a out-b --by=time               # the curves of any runs

compare trains variants of one run, each with the same seeds and data, by train.py, whose settings it takes
too. A variant is what is added to the command line, a git revision and a colon in front of it, or both; WORK
is the working tree as it stands, with new files if they are Python. A run that is finished is used again, so
a comparison can be stopped, and go on with more seeds or variants. The difference to the first variant is
paired by seed.

--vs names a clone of nanoGPT: the same shape in its model.py, as it runs on this device, takes turns with
ours in the same process; to decode, --vs=transformers its generate with the same weights. --json=True prints
all numbers as a last line. Speeds are medians after a warm-up; the spread is between the 10th and 90th
percentile. Shares compare with what this machine reaches on one large matmul, and on one large sum, in the
same run.
"""
import ast
import contextlib
import csv
import dataclasses
import functools
import hashlib
import importlib.util
import io
import itertools
import math
import os
import platform
import re
import runpy
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import types
import zipfile
from json import dumps, loads
from pathlib import Path

from configurator import configure, runtime, show

# what
init_from = 'scratch'             # scratch (random weights), or as in train.py
vs = ''                           # folder of a nanoGPT clone to take turns with; decode: or transformers
batch_size: int | None = None     # sequences; None: train 12, decode 1, eval 256 MB of logits, cost 8 or 12
dataset = ''                      # train: its vocabulary is used; eval: its val.bin, '': the checkpoint's own
lengths: list | None = None       # eval: contexts in times the trained one; cost: tokens, None: 256 to 4096
prompt_len = 32                   # decode: tokens before
max_new_tokens = 200              # decode: tokens made; cost: these and half of them
quantize = ''                     # decode, eval: int8, as in sample.py
speculate: int | None = None      # decode: tokens guessed at a time, of greedy text, as in sample.py
operators = False                 # decode: also which operators a step spends its time in
steps = 10                        # train: steps a turn; decode makes max_new_tokens a turn; cost: 1
rounds = 5                        # turns
variants: list | dict | None = None  # compare: what is added to the command line, or {name: that}
seeds = 3                         # compare: runs of each, by seed, seed + 1...
match: str | None = None          # compare: by d_ff params, active; by max_iters time; none; None: list's
by = 'iter'                       # compare, plot: iter, tokens, time
json: bool | str = False          # True: the numbers as a last line too; or the file to add that line to
# as in train.py
optimizer = 'adamw'               # adamw, muon
grad_clip = 1.0                   # 0: no clipping
device = 'auto'                   # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'                    # float32, bfloat16, float16; auto: what the hardware is fast at
compile: bool | str = 'auto'      # torch.compile; auto: train where it works, decode not
seed = 1337                       # of weights and tokens
config, model_args, words, _ = configure(globals(), 'GPTConfig', words=math.inf, also='train.py')

import numpy as np
import torch

import hub
import train
from model import (
    GPT,
    ROPE_SCALINGS,
    BaseAttention,
    GPTConfig,
    GroupedLinear,
    LatentAttention,
    Mask,
    Norm,
    attend,
    eager_attention,
    gated_delta_rule,
    quantize_weights,
    visible,
)
from prepare import Bins, ending, find_source, json_records, load_tokenizer, pieces, read_meta
from sample import Lookup, generate


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
    times = take_turns({'matmul': functools.partial(torch.mm, a, b)}, 1, 8, device)
    return 2 * n**3 / times['matmul'].min(), reading_speed(device)


def reading_speed(device):
    """Bytes/s of reading a large tensor, the best of several tries."""
    big = torch.ones(2**26, device=device)  # 256 MB
    return big.nbytes / take_turns({'sum': big.sum}, 1, 8, device)['sum'].min()


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


def our_step(model, forward, machine, batch_size, config):
    """A function that does one update as train.py does it, on random tokens."""
    tokens = torch.randint(model.config.vocab_size, (2, batch_size, model.config.block_size),
                           device=machine.device)
    settings = {**train.config, 'optimizer': config['optimizer'], 'grad_clip': config['grad_clip'],
                'learning_rate': 1e-4}
    scaler = torch.amp.GradScaler(machine.device_type, enabled=False)
    return functools.partial(update, model, forward, (*tokens, None), train.make_optimizers(model, settings),
                             scaler, machine.autocast, settings)


def update(model, forward, batch, optimizers, scaler, autocast, settings):
    """An update of the weights as train.py does it; returns the loss before it."""
    loss, expert_load, _ = train.gradients(forward, batch, iter(()), 1, autocast, scaler,
                                           settings['balance_loss'], settings['z_loss'])
    train.update(model, list(model.parameters()), optimizers, scaler, settings['grad_clip'], expert_load,
                 settings['balance_rate'])
    return loss


def their_step(model, machine, batch_size, grad_clip):
    """The same for nanoGPT's model, as its train.py runs it: on CPUs without autocast, at the default
    precision, uncompiled."""
    cpu, precision = machine.device == 'cpu', torch.get_float32_matmul_precision()
    x, y = torch.randint(model.config.vocab_size, (2, batch_size, model.config.block_size),
                         device=machine.device)
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), machine.device_type)
    params, forward = list(model.parameters()), model if cpu else torch.compile(model)
    autocast = contextlib.nullcontext if cpu else machine.autocast

    def step():
        torch.set_float32_matmul_precision('highest' if cpu else 'high')
        with autocast():
            _, loss = forward(x, y)
        loss.backward()
        if grad_clip:
            torch.nn.utils.clip_grad_norm_(params, grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.set_float32_matmul_precision(precision)
    return step


def report(model, machine, batch_size, times, unit, tokens, **numbers):
    """Prints speeds and `numbers`, and returns both. times: from take_turns, of 'flatgpt' and maybe others.
    unit: what a timed call is; tokens: that it makes, {name: number} or the same for all."""
    rows, tokens = {}, tokens if isinstance(tokens, dict) else dict.fromkeys(times, tokens)
    for name, t in times.items():
        low, mid, high = np.percentile(t, [10, 50, 90]) * 1e3
        rows[name] = [f"{mid:,.2f}", f"{low:,.2f} to {high:,.2f}", f"{tokens[name] / mid * 1e3:,.1f}"]
    print_table(unit, ['ms', '10th to 90th percentile', 'tok/s'], rows)
    ours = np.median(times['flatgpt'])
    numbers = {'tok_per_s': round(tokens['flatgpt'] / ours, 2), 'ms': round(ours * 1e3, 4),
               'device': machine.device, 'dtype': train.dtype_name(machine.dtype),
               'params': model.num_params(), 'batch_size': batch_size, **numbers, 'times_faster': {},
               'peak_mb': train.peak_mb(machine.device)}
    for name in list(times)[1:]:
        ratios = (np.median(times[name], axis=1) / np.median(times['flatgpt'], axis=1)
                  * tokens['flatgpt'] / tokens[name])
        numbers['times_faster'][name] = round(float(np.median(ratios)), 3)
        print(f"{np.median(ratios):.2f} times the speed of {name} (median of {len(ratios)} turns, "
              f"{ratios.min():.2f} to {ratios.max():.2f})")
    for name, value in numbers.items():
        if name.endswith('_share') and value is not None:
            print(f"{name.replace('_', ' ')}: {value:.1%}")
    print(f"peak memory: {numbers['peak_mb']:,.0f} MB" if numbers['peak_mb'] else 'peak memory: n/a')
    return numbers


def print_table(title, heads, rows):
    """rows: name -> texts, one below each of heads. Columns are as wide as what stands in them."""
    first = max(len(name) for name in (title, *rows))
    widths = [max(map(len, column)) for column in zip(heads, *rows.values())]
    print()
    for name, cells in ((title, heads), *rows.items()):
        print(f"{name:<{first}}" + ''.join(f"  {cell:>{width}}" for cell, width in zip(cells, widths)))


def fields_asked(config, model_args, **others):
    """The fields of GPTConfig for a new model: `others`, the vocabulary of config['dataset'] if it is
    prepared, and over both the fields given."""
    folder = train.data_folder(config['dataset'])
    if config['dataset'] and os.path.isdir(folder):
        others['vocab_size'] = read_meta(folder)['vocab_size']
    return {**others, **model_args}


def fill_zeros(model):
    """Gives matrices of zeros, with which branches start, random values, as if they had begun to learn: zeros
    make some kernels' work too easy, and hide what is wrong in a branch."""
    for w in model.parameters():
        if w.ndim > 1 and not w.any():
            torch.nn.init.normal_(w, std=(1 / (3 * w.shape[-1])) ** 0.5)


def cache_per_token(model):
    """Elements that each token adds to a row of the cache, besides states of fixed size."""
    return model.cache_elements(1) - model.cache_elements(0)


def model_and_machine(config, model_args, bound_by_memory=False):
    """The model that the settings name, random or from init_from, and what it runs on: (GPT, the machine as
    configurator.runtime has it, FLOP/s of a large matmul, bytes/s read)."""
    machine = runtime(config['device'], config['dtype'], config['seed'], bound_by_memory=bound_by_memory)
    if config['init_from'] == 'scratch':
        model = GPT(GPTConfig(**fields_asked(config, model_args)))
    else:
        model, _, _ = train.load_to_train(config['init_from'], 'out', model_args)
    model.to(machine.device)
    fill_zeros(model)
    print(f"{model.config.n_layer} layers, {model.config.n_embd} wide, {model.num_params():,} parameters, "
          f"context {model.config.block_size}")
    matmul, bandwidth = machine_peaks(machine.device, machine.dtype)
    print(f"this machine: {matmul / 1e9:,.0f} GFLOP/s in a large matmul, {bandwidth / 1e9:,.1f} GB/s reading")
    return model, machine, matmul, bandwidth


# size and speed ---------------------------------------------------------------------------------------------

def measure_params(config, model_args, words):
    """The model's parts and their shares, counted without allocating them, unless init_from names it."""
    dtypes = {'auto': torch.bfloat16, 'bfloat16': torch.bfloat16, 'float16': torch.float16,
              'float32': torch.float32}  # auto: what weights and caches are published in
    if config['dtype'] not in dtypes:
        raise ValueError(f"dtype={config['dtype']!r} is none of {', '.join(dtypes)}")
    dtype = dtypes[config['dtype']]
    if config['init_from'] != 'scratch':
        model, _, _ = train.load_to_train(config['init_from'], 'out', model_args)
    else:
        with torch.device('meta'):
            # where nothing names a vocabulary, GPT-2's: GPTConfig's is that and the rows that pad it
            model = GPT(GPTConfig(**fields_asked(config, model_args, vocab_size=50257)))
    parts = model.account()  # name -> (parameters, active ones, FLOPs)
    total = [sum(counts) for counts in zip(*parts.values())]
    rows = {part: [cell for n, whole in zip(counts, total)
                   for cell in (f"{n:,}", f"{n / whole if whole else 0:.1%}")]
            for part, counts in {**parts, 'total': total}.items()}
    print_table('', ['parameters', '', 'active', '', 'training FLOPs a token', ''], rows)
    layers = [print_layer(model, numbers) for numbers in kinds_of_layers(model)]
    size, block_size, cache = dtype.itemsize, model.config.block_size, cache_per_token(model)
    states = sum(math.prod(shape) * (own or dtype).itemsize
                 for block in model.h for shape, own in block.attn.states)
    cache_bytes = (model.cache_elements(block_size) - model.cache_elements(0)) * size + states
    print(f"\nweights: {total[0] * size / 1e9:,.2f} GB; cache: {cache:,} elements or {cache * size:,} bytes "
          f"a token{f', {states:,} bytes a row' if states else ''}, {cache_bytes / 1e9:,.2f} GB at "
          f"{block_size:,} tokens; in {train.dtype_name(dtype)}")
    return {'params': total[0], 'active_params': total[1], 'flops_per_token': total[2],
            'cache_bytes_per_token': cache * size, 'cache_bytes': cache_bytes,
            'dtype': train.dtype_name(dtype), 'layers': layers}


PROJECTIONS = {  # the end of a weight's name: what its module fuses, in order; others go by number
    'Attention': 'q k v gate', 'LatentAttention': 'q latent rope', 'GatedDeltaNet': 'q k v gate beta decay',
    'MLP': 'gate up', 'Experts': 'gate up',
}


def kinds_of_layers(model):
    """The numbers of the layers whose parameters have the same names and shapes, a list for each kind."""
    kinds = {}
    for number, block in enumerate(model.h):
        shapes = tuple((name, tuple(w.shape)) for name, w in block.named_parameters())
        kinds.setdefault(shapes, []).append(number)
    return list(kinds.values())


def projections(model, number):
    """Label -> shape of each tensor of a layer; those of fused projections apart, as they are marked."""
    shapes = {}
    for name, w in model.h[number].named_parameters():
        rows = model.marks[f'h.{number}.{name}'].rows
        if rows is None or len(rows) == 1:
            shapes[name.removesuffix('.weight')] = tuple(w.shape)
            continue
        parent, _, linear = name.removesuffix('.weight').rpartition('.')
        known = PROJECTIONS.get(type(model.h[number].get_submodule(parent)).__name__, '').split()
        for i, n in enumerate(rows):
            label = known[i] if i < len(known) else str(i + 1)
            shapes[f'{parent}.{linear} {label}'] = (*w.shape[:-2], n, w.shape[-1])
    return shapes


def print_layer(model, numbers):
    """Prints one layer of those with these numbers, by projection, with the sums of its mixer and of its MLP;
    returns it as a dict."""
    shapes = projections(model, numbers[0])
    counts = {label: math.prod(shape) for label, shape in shapes.items()}
    sums = {part: sum(n for label, n in counts.items() if label.startswith(f'{part}.'))
            for part in ('attn', 'mlp')}
    total = sum(counts.values())
    print_table(f"one layer of {len(numbers)}: {ranges(numbers)}", ['shape', 'parameters'], {
        label: [' x '.join(map(str, shapes.get(label, ()))), f"{n:,}"]
        for label, n in {**counts, **sums, 'layer': total}.items()})
    return {'layers': ranges(numbers), 'count': len(numbers), 'params': total, **sums, 'projections': counts}


def ranges(numbers):
    """[0, 1, 2, 5] -> '0-2, 5'"""
    found = []  # [first, last] of each
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ', '.join(str(first) if first == last else f'{first}-{last}' for first, last in found)


def measure_train(config, model_args, words):
    """Seconds a step in turns with nanoGPT, and what a step reaches of the machine."""
    model, machine, matmul, _ = model_and_machine(config, model_args)
    forward, batch_size = model, config['batch_size'] or 12
    compile = train.resolve_compile(config['compile'], machine.device, math.inf)
    if compile:
        print('compiling: about half a minute')
        forward = train.compile_model(model, machine.device)
    sides = {'flatgpt': our_step(model, forward, machine, batch_size, config)}
    if config['vs']:
        nanogpt = load_nanogpt(config['vs'], model.config, machine.device)
        sides['nanoGPT'] = their_step(nanogpt, machine, batch_size, config['grad_clip'])
    times = take_turns(sides, config['rounds'], config['steps'], machine.device)
    tokens = batch_size * model.config.block_size
    flops = model.flops_per_token() * tokens / np.median(times['flatgpt'])
    peak = train.peak_flops(machine.device, machine.dtype)
    return report(model, machine, batch_size, times, 'a step', tokens, compile=compile,
                  mfu=round(flops / peak, 4) if peak else None, matmul_share=round(flops / matmul, 4))


def first_sample(events):
    """The tokens of the first sample, of what generate yields."""
    return (token for sample, token in events if sample == 0 and token is not None)


def token_seconds(tokens):
    """Seconds that each token of a generator takes, (tokens,): the first of them with the prompt."""
    stamps = [time.perf_counter()]
    for _ in tokens:
        stamps.append(time.perf_counter())
    return np.diff(stamps)


@torch.no_grad()
def time_nanogpt(model, prompts, new):
    """Seconds a token of nanoGPT, which has no cache, (1,): on CPUs a middle stretch stands for the whole."""
    device, precision = model.transformer.wte.weight.device, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest' if device.type == 'cpu' else 'high')
    count = max(8, new // 10) if device.type == 'cpu' else new
    prompt = torch.tensor(prompts, device=device).repeat(1, 2 + new // len(prompts[0]))
    begun = time.perf_counter()
    model.generate(prompt[:, :len(prompts[0]) + (new - count) // 2], count, top_k=200)
    synchronize(str(device))
    torch.set_float32_matmul_precision(precision)
    return np.array([(time.perf_counter() - begun) / count])


def time_transformers(model, prompts, new, greedy):
    """Seconds of each step of transformers' generate but the first, (new - 1,)."""
    idx, stamps = torch.tensor(prompts, device=model.device), []

    def clock(ids, scores, **options):
        synchronize(str(model.device))
        stamps.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    choice = {'do_sample': False} if greedy else {'do_sample': True, 'temperature': 0.8, 'top_k': 200}
    model.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=new, min_new_tokens=new,
                   pad_token_id=0, stopping_criteria=[clock], **choice)
    return np.diff(stamps)


def in_transformers(model):
    """The same weights as transformers has them."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ImportError('vs=transformers: it is not installed: pip install "transformers>=5,<6"') from None
    with tempfile.TemporaryDirectory() as folder:
        hub.save_pretrained(model, None, folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=model.wte.weight.dtype).to(
            model.wte.weight.device)


def measure_decode(config, model_args, words):
    """Seconds a step, in turns with another implementation, with one row alone if there are several, and with
    no guesses if there are some; and the share of the memory's bandwidth."""
    model, machine, *_ = model_and_machine(config, model_args,
                                           config['compile'] is True or config['quantize'] == 'int8')
    model.to(machine.dtype).eval()
    if config['operators']:
        from torch._inductor import config as inductor
        inductor.cpp.enable_kernel_profile = True  # names the kernels
    batch_size, new, compile = config['batch_size'] or 1, config['max_new_tokens'], config['compile'] is True
    prompts = torch.randint(model.config.vocab_size, (batch_size, config['prompt_len'])).tolist()
    greedy, sides, tokens = bool(config['speculate']), {}, {'flatgpt': batch_size}
    if config['vs'] == 'transformers':
        other = in_transformers(model)
        sides['transformers'] = functools.partial(time_transformers, other, prompts, new, greedy)
    elif config['vs']:
        other = load_nanogpt(config['vs'], model.config, machine.device).eval()
        sides['nanoGPT'] = functools.partial(time_nanogpt, other, prompts, new)
    if config['quantize']:
        quantize_weights(model, machine.dtype)
    proposer = Lookup(config['speculate']) if greedy else None

    def ours(prompts, proposer=None):
        seconds = token_seconds(first_sample(generate(
            model, prompts, new, temperature=0.0 if greedy else 0.8, top_k=200, seed=config['seed'],
            compile=compile, proposer=proposer)))
        return seconds[1:].mean(keepdims=True) if greedy else seconds[1:]  # guesses come several at once
    sides = {'flatgpt': functools.partial(ours, prompts, proposer), **sides}
    if batch_size > 1:
        guesses = Lookup(config['speculate']) if greedy else None
        sides['one row'] = functools.partial(ours, prompts[:1], guesses)
    if greedy:
        sides['no guesses'] = functools.partial(ours, prompts)
    begun = time.perf_counter()
    for name, side in sides.items():
        side()  # to warm up
        if name == 'flatgpt' and compile:
            print(f"compiled, and a first sample made, in {time.perf_counter() - begun:.0f} s")
    times, bandwidths = {name: [] for name in sides}, []
    if greedy:
        proposer.kept = proposer.fed = 0
    for _ in range(config['rounds']):
        for name, side in sides.items():
            times[name].append(side())
        bandwidths.append(reading_speed(machine.device))  # a machine is not always as fast
    times = {name: np.array(t) for name, t in times.items()}  # (rounds, steps)
    cache = model.make_cache(batch_size, min(model.config.block_size, config['prompt_len'] + new // 2))
    read = sum(w.nbytes for w in (*model.parameters(), *model.buffers())) + cache.nbytes  # bytes a step
    tokens.update({name: 1 if name == 'one row' else batch_size for name in sides})
    prefill = take_turns({'': lambda: list(generate(model, prompts, 1))}, 1, 5, machine.device)['']
    numbers = {'prefill_ms': round(float(np.median(prefill)) * 1e3, 3)}
    print(f"{config['prompt_len']} tokens of prompt: {numbers['prefill_ms']:.2f} ms")
    if greedy:
        numbers['guesses_right'] = round(proposer.kept / max(1, proposer.fed), 4)
        print(f"{proposer.kept:,} of {proposer.fed:,} guesses right")
    else:
        shares = read / np.median(times['flatgpt'], axis=1) / bandwidths
        numbers['bandwidth_share'] = round(float(np.median(shares)), 4)
    if config['operators']:
        print_operators(functools.partial(ours, prompts, proposer), new, machine.device_type)
    return report(model, machine, batch_size, times, 'a step', tokens, compile=compile,
                  quantize=config['quantize'], **numbers)


def print_operators(generation, steps, device_type):
    """Prints the operators (kernels, if compiled) that take most of a step's time, on CUDA of the GPU's.
    generation: makes `steps` steps."""
    from torch.profiler import ProfilerActivity, profile
    gpu = device_type == 'cuda'
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * gpu]) as found:
        generation()
    events = found.key_averages()
    if gpu:  # kernels, and not the operators that call them, under which they are counted too
        events = [event for event in events if event.device_type is torch.autograd.DeviceType.CUDA]
    spent = {event.key: (event.self_device_time_total if gpu else event.self_cpu_time_total, event.count)
             for event in events}
    total = sum(time for time, _ in spent.values())
    most = sorted(spent, key=lambda name: -spent[name][0])[:15]
    print_table('operator', ['ms a step', 'share', 'calls a step'], {
        name[:60]: [f"{spent[name][0] / steps / 1e3:.3f}", f"{spent[name][0] / total:.1%}",
                    f"{spent[name][1] / steps:.1f}"] for name in most})


# evaluating -------------------------------------------------------------------------------------------------

def load_to_evaluate(config, model_args):
    """The model that init_from names, its tokenizer and the rest of its checkpoint, as sample.load returns
    them, and the length that `lengths` are times of: block_size if that is given, else the trained one.
    Raises ValueError where there are no positions for such lengths."""
    if config['init_from'] == 'scratch':
        raise ValueError("eval needs a trained model: --init_from=out, a checkpoint or a published model")
    # conversations that are packed into windows do not see each other, as in train.py
    folder = train.data_folder(config['dataset'])
    meta = read_meta(folder) if config['dataset'] and os.path.isdir(folder) else None
    read = functools.partial(train.load_to_train, config['init_from'], 'out', meta=meta)
    if not config['lengths']:
        model, tokenizer, rest = read(model_args)
        return model, tokenizer, rest, model.config.block_size
    model, _, rest = read({})
    trained, changes = model.config.block_size, dict(model_args)
    base = changes.get('block_size', trained)
    changes['block_size'] = base * max(config['lengths'])
    if changes['block_size'] > MOST_TOKENS:  # before so many positions are computed
        raise ValueError(f"lengths={config['lengths']}: a window of {changes['block_size']:,} tokens is more "
                         f"than the {MOST_TOKENS:,} that are tried: give shorter lengths")
    if model.config.pos == 'learned' and changes['block_size'] > trained:
        raise ValueError(f"lengths={config['lengths']}: {rest['path']} has learned {trained:,} positions "
                         "and knows none beyond; positions that can are computed, as rope's and alibi's")
    model, tokenizer, rest = read(changes)
    return model, tokenizer, rest, base


MOST_TOKENS = 2**22  # of a window that eval tries; their rotary angles alone take 2 GB


def prepared_tokens(folder, model, tokenizer, path):
    """All of folder's val: [(inputs, targets)], one for each file, -1 for a target that is not learnt; and
    the bytes of the text that the targets are, None where no tokenizer can tell. Raises ValueError if they
    are not the model's tokens."""
    bins, meta = Bins(folder, 'val'), read_meta(folder)
    if meta['block_size'] not in (None, model.config.block_size):
        raise ValueError(f"{folder} is packed for block_size={meta['block_size']}, but the model reads "
                         f"{model.config.block_size}: give --block_size={meta['block_size']}, no --lengths")
    bins.check_vocabulary(model.config.vocab_size, "prepare it with the model's own tokenizer: "
                          f"--tokenizer={path}")
    try:
        own = load_tokenizer(folder)
    except (OSError, ImportError, ValueError) as error:
        own = None
        print(f"no bits per byte: {error}")
    if own and tokenizer and own.tokens != tokenizer.tokens:
        raise ValueError(f"{folder} was prepared with another tokenizer than {path} has, so the same ids "
                         f"stand for different text: prepare it with --tokenizer={path}")
    pairs, n_bytes = [], 0
    for shard, mask in zip(bins.shards, bins.masks or [None] * len(bins.shards)):
        ids = np.fromfile(shard.path, shard.dtype, shard.n_tokens, offset=shard.offset)
        targets = ids[1:]
        if mask is not None:
            targets = np.where(np.fromfile(mask.path, bool)[1:], targets.astype(np.int64), -1)
        pairs.append((ids[:-1], targets))
        if own:  # a padded vocabulary has more ids than that
            counts = np.bincount(targets[targets != -1], minlength=own.n_vocab)[:own.n_vocab]
            n_bytes += int(counts @ own.sizes)
    return pairs, n_bytes if own else None


def text_tokens(path, tokenizer):
    """What prepared_tokens gives, of a text file's documents: end of text stands before each, so that its
    first token is a target too. Its bytes are those of the text in UTF-8."""
    found, parts, n_bytes = find_source(path), [], 0
    if found.chats:
        raise ValueError(f"{path} holds conversations: prepare them, then give --dataset")
    for document in found.documents():
        if tokenizer.eot is not None:
            parts.append([tokenizer.eot])
        elif parts:
            raise ValueError(f"{path} has several documents, and the tokenizer {tokenizer.name} no "
                             "end-of-text token to keep them apart: give one text")
        parts.append(np.array(tokenizer.bos, np.int64))
        for text, _ in pieces(document, tokenizer):
            parts.append(tokenizer.encode_array(text))
            n_bytes += len(text.encode())
    ids = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    if tokenizer.eot is None:
        n_bytes -= int(tokenizer.sizes[ids[:1]].sum())  # nothing stands before it
    return [(ids[:-1], ids[1:])], n_bytes


@torch.no_grad()
def row_losses(model, rows, machine, batch_size):
    """Yields (i, the loss of each target of rows[i], in nats, 0 where the target is -1), longest rows first:
    rows (inputs, targets) of arrays of one length, (T,) each -> (T,) float64. batch_size None: 256 MB of
    logits at a time. Says how long it will take, if that is long, and how to do with less memory, if a row
    takes much."""
    done, total, begun, said = 0, sum(len(inputs) for inputs, _ in rows), time.perf_counter(), False
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))  # alike in length, little padding
    logits_gb = 4e-9 * len(rows[order[0]][0]) * model.config.vocab_size
    if logits_gb > 4:
        print(f"a window has {logits_gb:.0f} GB of logits: --block_size=1024 takes less memory, sees less")
    while order:
        longest = len(rows[order[0]][0])
        n = batch_size or max(1, 2**26 // (model.config.vocab_size * longest))
        batch, order = order[:n], order[n:]
        x, y = np.zeros((2, len(batch), longest), np.int64)  # padding follows: nobody sees it
        for row, i in enumerate(batch):
            inputs, targets = rows[i]
            x[row, :len(inputs)], y[row, :len(targets)] = inputs, targets
            done += len(inputs)
        x, y = train.to_device((x, y), machine.device)
        with machine.autocast():
            logits = model(x)
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), ignore_index=-1,
                                                 reduction='none').view_as(y).double().cpu().numpy()
        for row, i in enumerate(batch):
            yield i, each[row, :len(rows[i][0])]
        spent = time.perf_counter() - begun
        left = spent * (total - done) / done
        if spent > 5 and left > 60 and not said:
            print(f"{total:,} tokens are read, in about {train.duration(left)}", flush=True)
            said = True


def by_position(rows, read):
    """Sums over rows (inputs, targets): (losses, targets), each (T,) float64 by position in the row."""
    longest = max(len(inputs) for inputs, _ in rows)
    sums, counts = np.zeros(longest), np.zeros(longest)
    for i, each in read(rows):
        sums[:len(each)] += each
        counts[:len(each)] += rows[i][1] != -1
    return sums, counts


def doubling(length):
    """Ranges of 1 to length, each to the next power of two: [(1, 1), (2, 2), (3, 4), (5, 8), ...]."""
    ends = [2**i for i in range((length - 1).bit_length())] + [length]
    return list(zip([1, *(end + 1 for end in ends)], ends))


def mean_losses(sums, counts, last=None):
    """What by_position gives -> 'targets', 'loss' and 'perplexity' of the last so many positions, None: of
    all; and 'by_tokens_seen', the loss of all positions by how many tokens are seen there."""
    def mean(part):
        return float(sums[part].sum() / max(counts[part].sum(), 1))

    chosen = slice(-last if last else None, None)
    loss, by = mean(chosen), {}
    for first, end in doubling(len(sums)):
        by[f"{first}-{end}" if first < end else str(end)] = round(mean(slice(first - 1, end)), 6)
    return {'targets': int(counts[chosen].sum()), 'loss': loss,
            'perplexity': math.exp(min(loss, 99)), 'by_tokens_seen': by}


def measure_eval(config, model_args, words):
    """How well a model predicts: what a text file holds, if words has one, HellaSwag's questions, if these
    are in it, else prepared data's val. A text whose name ends in .py is taken for a config file."""
    if words and config['dataset']:
        raise ValueError(f"eval reads {words[0]} or --dataset={config['dataset']}: give one")
    if words and not os.path.exists(words[0]):
        raise FileNotFoundError(f"{words[0]} is not there: name a text file, or prepared data by --dataset")
    choices = words and ending(words[0]) == '.jsonl' and is_multiple_choice(words[0])
    if choices and config['lengths']:
        raise ValueError(f"lengths={config['lengths']} is for texts, and {words[0]} has questions: "
                         "leave it out")
    model, tokenizer, rest, base = load_to_evaluate(config, model_args)
    path, dataset = rest['path'], config['dataset'] or rest.get('config', {}).get('dataset')
    if words and tokenizer is None:
        raise ValueError(rest['no_tokenizer'])
    if not words and not isinstance(dataset, str):
        raise ValueError(f"{path} does not say what it was trained on: give --dataset=NAME, or a text file")
    machine = runtime(config['device'], config['dtype'], config['seed'])
    model.to(machine.device).eval()
    if config['quantize']:  # under autocast, which leaves the residual stream of float16 in float32
        quantize_weights(model, torch.bfloat16 if machine.dtype is torch.bfloat16 else torch.float32)
    print(f"{path}: {model.num_params():,} parameters, context {base:,}")
    name = words[0] if words else train.data_folder(dataset)
    read = functools.partial(row_losses, model, machine=machine, batch_size=config['batch_size'])
    if choices:
        found = evaluate_choices(name, tokenizer, model.config.block_size, read)
    else:
        pairs, n_bytes = (text_tokens(name, tokenizer) if words
                          else prepared_tokens(name, model, tokenizer, path))
        if not any((targets != -1).any() for _, targets in pairs):
            raise ValueError(f"{name}: there is no token in it to predict from one before it")
        found = (evaluate_lengths(name, pairs, base, config['lengths'], read) if config['lengths']
                 else evaluate_text(name, pairs, n_bytes, base, read))
    return {'path': path, 'params': model.num_params(), 'data': name, 'device': machine.device,
            'dtype': train.dtype_name(machine.dtype), **found}


def evaluate_text(name, pairs, n_bytes, length, read):
    """Loss, perplexity and bits per byte of all of a text, as a dict, printed: each target once, in windows
    that do not overlap, of which the last may be shorter. Sums are in float64, so that the batch size changes
    nothing but the rounding inside the model. pairs: inputs and targets; read: losses of rows."""
    rows = [(inputs[i:i + length], targets[i:i + length])
            for inputs, targets in pairs for i in range(0, len(inputs), length)]
    found = mean_losses(*by_position(rows, read))
    bits = found['loss'] * found['targets'] / math.log(2) / n_bytes if n_bytes else None
    told = f"{n_bytes:,} bytes in " if n_bytes else ''
    print(f"{name}: {told}{found['targets']:,} targets, {len(rows):,} windows of {length:,}\n"
          f"loss {found['loss']:.4f}, perplexity {found['perplexity']:.3f}"
          f"{f', {bits:.4f} bits per byte' if bits else ''}")
    print_by_length({length: found})
    return {'bytes': n_bytes, 'bits_per_byte': bits, **found}


def evaluate_lengths(name, pairs, base, lengths, read):
    """Loss and perplexity at several lengths, in times of base, as a dict, printed. The targets are the same:
    each stretch of base tokens is predicted at the end of a window of every length, but for the first ones,
    which have no room for the longest. Beside it the losses at all positions of these windows."""
    found, longest = {}, base * max(lengths)
    for length in (times * base for times in lengths):
        rows = [(inputs[end - length:end], targets[end - length:end])
                for inputs, targets in pairs for end in range(longest, len(inputs) + 1, base)]
        if not rows:
            raise ValueError(f"lengths={lengths}: {name} is shorter than a window of {longest:,} tokens: "
                             "give a longer text, or shorter lengths")
        found[length] = mean_losses(*by_position(rows, read), base)
    targets = found[length]['targets']
    print(f"{name}: {targets:,} targets, in {len(rows):,} stretches of {base:,}, each of which ends a window "
          "of every length")
    print_by_length(found)
    return {'lengths': found}


def print_by_length(found):
    """found: window length -> what mean_losses gives; a column for each length."""
    names = dict.fromkeys(name for each in found.values() for name in each['by_tokens_seen'])
    rows = {'loss': [f"{each['loss']:.4f}" for each in found.values()],
            'perplexity': [f"{each['perplexity']:.3f}" for each in found.values()],
            'by tokens seen': [''] * len(found)}
    for name in names:
        each_loss = [each['by_tokens_seen'].get(name) for each in found.values()]
        rows[name] = ['' if loss is None else f"{loss:.4f}" for loss in each_loss]
    print_table('by length of the window', [f"{length:,}" for length in found], rows)


def is_multiple_choice(path):
    """Whether the first record of JSON lines has endings to choose from, as HellaSwag's have."""
    _, record = next(json_records(path, 'strict'), (None, {}))
    return 'endings' in record


def read_choice(place, record, tokenizer):
    """A record of HellaSwag -> (ids of the context, of each ending, label). place: what an error names."""
    context, endings = record.get('ctx'), record.get('endings')
    if context is None and isinstance(record.get('ctx_a'), str):
        context = f"{record['ctx_a']} {record.get('ctx_b', '')}".strip()
    if not (isinstance(context, str) and context and isinstance(endings, list)
            and all(isinstance(text, str) for text in endings)):
        raise ValueError(f"{place}: a question needs ctx (or ctx_a and ctx_b), a text, and endings, a list "
                         "of texts: mend or remove the line")
    label = str(record.get('label', ''))
    if not label.isdigit() or int(label) >= len(endings):
        raise ValueError(f"{place}: label={record.get('label')!r} is none of its {len(endings)} endings: "
                         "HellaSwag's test split has none, take its val split")
    return ([*tokenizer.bos, *tokenizer.encode_array(context).tolist()],
            [tokenizer.encode_array(f' {text}').tolist() for text in endings], int(label))


def evaluate_choices(path, tokenizer, block_size, read):
    """HellaSwag (arXiv:1905.07830) from its JSON lines: the ending that the model finds likeliest after the
    context, as a dict, printed. acc takes the largest sum of its tokens' log-probabilities, acc_norm the
    largest mean.

    GPT-2 124M has acc 0.2859 and acc_norm 0.2955 on the 10,042 questions of hellaswag_val.jsonl in
    github.com/karpathy/build-nanogpt, hellaswag.py, which this follows: the field ctx as it is, a space, the
    ending, in tokens. lm-evaluation-harness has acc 0.2892, acc_norm 0.3114 there: it puts activity_label in
    front, removes what is in brackets, and divides by bytes; so these are other numbers."""
    records = [read_choice(place, record, tokenizer) for place, record in json_records(path, 'strict')]
    rows = []  # one for each ending
    for context, endings, _ in records:
        for ids in endings:
            inputs, targets = (context + ids)[:-1], [-1] * (len(context) - 1) + ids
            # of what is too long, the end
            rows.append((np.array(inputs[-block_size:]), np.array(targets[-block_size:])))
    sums = np.zeros(len(rows))
    for i, each in read(rows):
        sums[i] = each.sum()
    means = sums / [(targets != -1).sum() for _, targets in rows]
    right, n, at = {'acc': 0, 'acc_norm': 0}, len(records), 0
    for _, endings, label in records:
        own = slice(at, at + len(endings))
        right['acc'] += int(sums[own].argmin() == label)
        right['acc_norm'] += int(means[own].argmin() == label)
        at += len(endings)
    print(f"{path}: {n:,} questions")
    for name, count in right.items():
        share = count / n
        print(f"{name:<9} {share:.4f} \u00b1 {math.sqrt(share * (1 - share) / n):.4f}, {count:,} right")
    return {'questions': n, **{name: count / n for name, count in right.items()}}


# what parts cost --------------------------------------------------------------------------------------------

COST_SIZE = dict(n_layer=6, n_head=6, n_embd=384, vocab_size=4096)  # what the flags do not say
COST_WINDOW = 256
COST_OWN = ('n_kv_head', 'kv_lora_rank', 'mixer_pattern', 'norm', 'mlp', 'block_size', 'window', 'pos',
            'attn_softcap', 'attn_sink')  # that it varies, or that its ways to attend do not have


def measure_cost(config, model_args, words):
    """What the parts of a decoder cost on this device, alternating: attention against length, a cache against
    none, what kinds of attention cache and how fast they decode, norms and MLPs alone and in a step. Nothing
    is trained, weights are random."""
    for name in COST_OWN:
        if name in model_args:
            raise ValueError(f"{name}={model_args[name]!r}: cost compares what it chooses itself; leave it "
                             "out")
    machine = runtime(config['device'], config['dtype'], config['seed'])
    lengths = config['lengths'] or [256, 512, 1024, 2048, 4096]
    size = fields_asked(config, model_args, **COST_SIZE)
    shape = GPTConfig(**size)
    rows, rounds = config['batch_size'] or 8, config['rounds']
    print(f"{shape.n_layer} layers, {shape.n_embd} wide, {shape.n_head} heads of {shape.head_dim}; medians "
          f"of {rounds} turns")
    return {'device': machine.device, 'dtype': train.dtype_name(machine.dtype), 'lengths': lengths,
            'attention': cost_of_attention(shape, lengths, machine, rounds),
            'cache': cost_without_cache(size, machine, config['max_new_tokens'], rounds),
            'decode': cost_of_decoding(size, max(lengths), machine, rows, rounds),
            'norms': cost_of_norms(size, machine, rounds), 'steps': cost_of_steps(size, machine, config)}


def milliseconds(sides, rounds, device):
    """Name -> median of take_turns, of one call a turn."""
    times = take_turns(sides, rounds, 1, device, warmup=1)
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
        for what, each in {'forward, ms': milliseconds(forward, rounds, device),
                           'forward and backward, ms': milliseconds(both, rounds, device),
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
    """Seconds of the likeliest tokens after one, half of `most` and all of them, with a cache and without:
    tokens -> numbers. Without, token n takes a pass over the n before it: so many tokens are counted."""
    model = random_model(size, machine, block_size=most + 1).to(machine.dtype).eval()

    def with_cache(count):
        return first_sample(generate(model, [[0]], count, temperature=0))

    def without(count):
        idx = torch.zeros(1, 1, dtype=torch.long, device=machine.device)
        for _ in range(count):
            idx = torch.cat((idx, model(idx, keep=1).argmax(-1)), dim=1)
            yield int(idx[0, -1])
    sides, times = {'cache': with_cache, 'none': without}, {'cache': [], 'none': []}
    for side in sides.values():
        token_seconds(side(min(10, most)))  # to warm up
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(token_seconds(side(most)).cumsum())
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
    found, sides = {}, {}
    for name, options in kinds_of_attention(GPTConfig(**size)).items():
        model = random_model(size, machine, **options, block_size=length + 1).to(machine.dtype).eval()
        cache = model.make_cache(batch_size, length + 1)
        for slots in cache.slots:
            for tensor in slots.tensors:
                tensor.normal_()
        cache.advance(length)  # of random content, as good as any to be read
        sides[name] = functools.partial(decode_one, model, cache)
        found[name] = {'params': model.num_params(),
                       'cache_bytes_per_token': cache_per_token(model) * machine.dtype.itemsize}
    most = found['MHA']['cache_bytes_per_token']
    for name, ms in milliseconds(sides, 4 * rounds, machine.device).items():
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


def cost_of_choices(title, sides, rounds, device):
    """sides: name -> (function, how many parameters it has). Prints and returns their milliseconds."""
    ms = milliseconds({name: f for name, (f, _) in sides.items()}, rounds, device)
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
    return cost_of_choices('a norm over 4,096 tokens, forward and backward', sides, 4 * rounds,
                           machine.device)


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
                           config['rounds'], machine.device)


# comparing --------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parent
RUNS = 'out-compare'  # has a folder for each run, named by what determines the run
OWN = ('variants', 'seeds', 'seed', 'match', 'by', 'json')  # flags that are compare's, not train.py's
# Student's t: 95% of its values are within +- these, for 1, 2, ... degrees of freedom
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
        2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
        2.045, 2.042)


@dataclasses.dataclass
class Variant:
    """One of the ways to run train.py that are compared."""
    name: str
    revision: str             # of the code; WORK: the working tree
    code: Path                # a copy of it
    args: list                # train.py's, but for seed and out_dir; config files as paths of copies
    data: str = ''            # folder
    init_from: str = 'scratch'
    params: int = 0
    cache: int | None = None  # bytes a token in bfloat16; None: its own code alone knows

    def command(self, folder, *more):
        return [sys.executable, str(self.code / 'train.py'), *self.args, f'--out_dir={folder}', *more]


def is_config(arg):
    return arg.endswith('.py') and not arg.startswith('-')


def flag_name(arg):
    """'--norm=layernorm' -> 'norm'"""
    return arg.removeprefix('--').partition('=')[0]


def parse_variant(text):
    """'HEAD~1: --norm=layernorm' -> ('HEAD~1', ['--norm=layernorm']); without a revision it is WORK."""
    found = re.fullmatch(r'(?s)\s*([^\s:-][^\s:]*):(?=\s|-|$)(.*)', text)
    revision, rest = found.groups() if found else ('WORK', text)
    if os.name == 'nt':  # where it is in paths
        rest = rest.replace('\\', '\\\\')
    return revision, shlex.split(rest)


def named_variants(variants):
    """The setting, a list or a dict -> {name: text}."""
    if isinstance(variants, list):
        names = [text.strip() or 'base' if isinstance(text, str) else text for text in variants]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"variants has {twice[0]!r} twice: the second would be the same run")
        variants = dict(zip(names, variants))
    if not variants or not all(isinstance(text, str) for pair in variants.items() for text in pair):
        raise ValueError(f"variants={variants!r} must be texts like '', '--norm=layernorm' or 'HEAD~1:', or "
                         "a list of config/variants.py: python bench.py compare norms")
    return variants


def read_list(name):
    """A list of config/variants.py: base, a command line of train.py, and variants; maybe match."""
    lists = runpy.run_path(str(ROOT / 'config' / 'variants.py'))['LISTS']
    if name not in lists:
        raise ValueError(f"config/variants.py has no list {name!r}, but {', '.join(lists)}")
    return lists[name]


def copy_code(revision, place):
    """Copies the code at a git revision, or WORK, the working tree as it stands, to a new folder in `place`:
    the original may be edited while the copy runs. Raises ValueError if there is no such revision."""
    def git(*args):
        return subprocess.run(['git', *args], cwd=ROOT, capture_output=True)
    folder, has_git = Path(tempfile.mkdtemp(dir=place)), shutil.which('git')
    if revision == 'WORK':
        def listed(*which):
            return os.fsdecode(git('ls-files', '-z', *which).stdout).split('\0') if has_git else []
        # what is new is code if it is Python; a file that this very output goes to is not
        new = listed('--others', '--exclude-standard')
        names = listed('--cached') + [name for name in new if name.endswith('.py')]
        if 'train.py' not in names:  # no clone of its own
            names = [path.relative_to(ROOT) for path in (*ROOT.glob('*.py'), *ROOT.glob('config/*.py'))]
        paths = [path for path in (ROOT / name for name in names) if path.is_file()]
        large = [path for path in paths if path.stat().st_size > 2**20]
        if large:
            print(f"not copied to train with, as code is smaller than 1 MB: {', '.join(map(str, large))}")
        for path in paths:
            if path not in large:
                copy = folder / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        return folder
    if not has_git:
        raise ValueError(f"{revision}: revisions need git, which is not installed")
    found = git('archive', '--format=zip', revision)
    if found.returncode:
        raise ValueError(f"{revision} is no revision of {ROOT}: {os.fsdecode(found.stderr).strip()}")
    with zipfile.ZipFile(io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder)
    if not (folder / 'train.py').is_file():
        raise ValueError(f"{revision} of {ROOT} has no train.py")
    return folder


def place_configs(args, code):
    """Command-line arguments with config files as paths in a copy of the code, where those that are not of it
    are copied too: a file may be edited while its runs go on."""
    placed = []
    for arg in args:
        path = Path(arg) if os.path.isfile(arg) else ROOT / arg
        ours = path.resolve()
        if is_config(arg) and ours.is_relative_to(ROOT) and (code / ours.relative_to(ROOT)).is_file():
            arg = str(code / ours.relative_to(ROOT))
        elif is_config(arg) and path.is_file():
            (code / 'config').mkdir(exist_ok=True)
            arg = shutil.copyfile(path, Path(tempfile.mkdtemp(dir=code / 'config'), path.name)).as_posix()
        placed.append(arg)
    return placed


@functools.cache
def bare_code(source):
    """A Python file's text without comments, docstrings and layout, which change no run."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        body = getattr(node, 'body', None)
        if (isinstance(body, list) and body and isinstance(body[0], ast.Expr)
                and isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str)):
            body[0].value.value = ''
    return ast.unparse(tree)


@functools.cache
def code_digest(code):
    """A hash of all files in a copy of the code but those that runs do not depend on: this file, tests, texts
    and what is hidden; nor config files, which count as settings."""
    digest = hashlib.sha256()
    for path in sorted(path for path in code.glob('**/*') if path.is_file()):
        name = path.relative_to(code).as_posix()
        if not (name.startswith(('config/', '.')) or name in ('bench.py', 'test_model.py')
                or path.suffix in ('.md', '.pyc')):
            content = path.read_bytes()
            if path.suffix == '.py':
                content = bare_code(content.decode()).encode()
            digest.update(f'{name}\0{len(content)}\0'.encode() + content)
    return digest.hexdigest()


def file_stamps(path):
    """Name, size and time of a file, or of those in a folder."""
    paths = [path] if os.path.isfile(path) else [entry.path for entry in os.scandir(path) if entry.is_file()]
    return [(os.path.basename(p), os.path.getsize(p), os.stat(p).st_mtime_ns) for p in sorted(paths)]


def run_folder(variant, seed, what='run'):
    """The folder in RUNS of a variant's run, named by a hash of code, settings, data and machine."""
    args = [bare_code(read_text(arg)) if is_config(arg) else arg for arg in variant.args]
    values = [variant.init_from, *(arg.partition('=')[2] for arg in args)]  # checkpoints, folders of data
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.node()
    identity = [what, code_digest(variant.code), args, seed,
                [file_stamps(value) for value in values if os.path.exists(value)],
                read_meta(variant.data).get('checksum') or file_stamps(variant.data),
                torch.__version__, torch.get_num_threads(), machine]
    digest = hashlib.sha256(dumps(identity).encode()).hexdigest()
    return os.path.join(RUNS, digest[:12])


def settings_of(args):
    """What train.py makes of a command line: its settings, the fields of GPTConfig that are given, and where
    each was given. Raises ValueError, as train.py would."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            settings, model_args, given = configure({**vars(train), '__name__': ''}, 'GPTConfig', argv=args,
                                                    default_file='config/default.py')
    except SystemExit:
        raise ValueError(said.getvalue().strip().removeprefix('bench.py: ')) from None
    train.check_settings(settings)
    train.share_batch(settings['gradient_accumulation_steps'], settings['batch_size'], 1)
    return settings, model_args, given


def settle(args):
    """The model that a command line of train.py trains from scratch, which takes no memory here, and the
    folder of its data. Raises ValueError or OSError, as train.py would."""
    settings, model_args, given = settings_of(args)
    folder = train.data_folder(settings['dataset'])
    bins, meta = [Bins(folder, split) for split in ('train', 'val')], read_meta(folder)
    with torch.device('meta'):
        model = GPT(GPTConfig(**{'vocab_size': meta['vocab_size'], **train.packed(meta), **model_args}))
    train.check_data(folder, meta, *bins, model.config, None)
    train.check_effect(given, {**settings, **vars(model.config)})
    return model, folder


def last_line(text):
    """The error at the end of what a script has printed."""
    lines = [line for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith('train.py: ')]
    return (ours or lines or ['it printed nothing'])[-1].removeprefix('train.py: ')


def make_variant(name, text, base, place, copies):
    """The Variant of a text, checked. copies: revision -> copy of its code in `place`, filled as needed.
    Raises ValueError, naming the variant, for what train.py would not run."""
    try:
        revision, args = parse_variant(text)
        args = [*base, *args]
        if not any(is_config(arg) or arg.startswith('--init_from=') for arg in args):
            args.insert(0, 'config/default.py')  # as train.py has it, but of this revision
        if revision not in copies:
            copies[revision] = copy_code(revision, place)
        variant = Variant(name, revision, copies[revision], place_configs(args, copies[revision]))
        settings = check_run(variant, base)
        variant.init_from = settings['init_from']
        if revision == 'WORK' and variant.init_from == 'scratch':
            model, variant.data = settle(variant.args)
            variant.params = model.num_params()
            variant.cache = 2 * cache_per_token(model)
        else:
            try_out(variant)
    except (ValueError, OSError) as error:
        raise ValueError(f"variant {name!r}: {error}") from None
    return variant


def check_run(variant, base):
    """The settings of a variant, as far as the working tree's train.py knows them. Raises ValueError for what
    makes no run of its own length, and for a seed that is not that of `base`, what all variants share."""
    given = {flag_name(arg) for arg in variant.args if arg.startswith('-')}
    try:
        settings, shared = settings_of(variant.args)[0], settings_of(base)[0]
    except ValueError:
        if variant.revision == 'WORK':
            raise
        settings = shared = {'init_from': 'scratch'}  # a revision may have others: see try_out
    wrong = [name for name in ('out_dir', 'seed') if name in given]
    wrong += ['seed'] if settings.get('seed') != shared.get('seed') else []
    wrong += [name for name in ('eval_only', 'time_limit') if settings.get(name)]
    wrong += [name for name in sorted(train.LENGTH) if settings.get(name) == 0]
    wrong += ['init_from'] if settings['init_from'] == 'resume' else []
    if wrong:
        raise ValueError(f"{wrong[0]}: leave it out, every run is a new one of its whole length, in a folder "
                         f"of {RUNS}/, and with each of the --seeds")
    return settings


def printed_number(pattern, text):
    """The whole number that a line of what train.py prints has there; None: there is no such line."""
    found = re.search(pattern, text, re.M)
    return int(found[1].replace(',', '')) if found else None


def try_out(variant):
    """Evaluates a batch with a variant's own code, for this process can only judge by the working tree's.
    Fills in what it says of model and data. Raises ValueError with the error it ends with."""
    done = subprocess.run(variant.command(RUNS, '--eval_only=True', '--eval_iters=1', '--compile=False'),
                          capture_output=True, encoding='utf-8', errors='replace')
    if done.returncode:
        raise ValueError(last_line(done.stderr))
    params = printed_number(r'^model: ([\d,]+) parameters', done.stdout)
    data = re.search(r'^data: (.*), [\d,]+ tokens to train', done.stdout, re.M)
    if not params or not data:
        raise ValueError("its train.py does not say what it trains in lines that begin with model: and data:")
    variant.params, variant.data = params, data[1]


def match_size(variant, target, active):
    """Adjusts d_ff, of a model with experts d_expert, so that the variant has `target` parameters, active or
    all, to within 1%. Returns what it became, None if nothing was to do. Raises ValueError if it cannot."""
    def size(*more):
        model, _ = settle([*variant.args, *more])
        return model, model.num_params(active)
    what = 'active parameters' if active else 'parameters'
    model, have = size()
    if abs(have / target - 1) <= 0.01:
        return None
    name = 'd_ff' if model.config.n_expert is None else 'd_expert'
    width = getattr(model.config, name)
    each = (size(f'--{name}={width + 64}')[1] - have) / 64
    wanted = width + (target - have) / each if each else 0
    for multiple in (64, 8, 2):  # 1 would be no matrix
        changed = f'{name}={max(1, round(wanted / multiple)) * multiple}'
        model, have = size(f'--{changed}')
        if abs(have / target - 1) <= 0.01:
            variant.args.append(f'--{changed}')
            variant.params = model.num_params()
            return f"{changed} (was {width}), {have:,} {what}"
    raise ValueError(f"variant {variant.name!r}: no {name} gives it the {target:,} {what} of the first to "
                     f"within 1%, {changed} gives {have:,}: change its width or depth")


def wait(process, watch=None):
    """Waits for a process, calling watch() meanwhile. Whatever ends the waiting, Ctrl-C or an error, asks the
    process to stop, whose end is awaited. A second Ctrl-C is passed on too, unless it comes within a second:
    `timeout` sends two at once."""
    try:
        while process.poll() is None:
            if watch:
                watch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
    finally:
        if process.poll() is None:
            asked_at = time.time()

            def ask(number=None, frame=None):
                # not SIGINT, which a job in the background ignores until train.py has begun; on Windows
                # the terminal's Ctrl-C has reached it
                if os.name == 'posix' and (number is None or time.time() - asked_at > 1):
                    process.terminate()
            before = {number: signal.signal(number, ask) for number in stop_signals()}
            ask()
            with contextlib.suppress(BrokenPipeError):  # of `| tee`, which Ctrl-C has ended, or `| head`
                print('stopping this run: it saves its state first', flush=True)
            process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)


def stop_signals():
    """Those that end this process, of what this system has; `nohup` has one ignored, and so it is here."""
    known = (getattr(signal, name, None) for name in ('SIGINT', 'SIGTERM', 'SIGHUP'))
    return [number for number in known if number and signal.getsignal(number) != signal.SIG_IGN]


def start_run(command, folder):
    """A process that does not get the terminal's Ctrl-C, but ours; what it prints goes to a file."""
    with open(os.path.join(folder, 'printed.txt'), 'w', encoding='utf-8') as f:
        return subprocess.Popen(command, stdout=f, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                start_new_session=True)


def read_text(path):
    """'' where there is no such file."""
    return Path(path).read_text(encoding='utf-8', errors='replace') if os.path.exists(path) else ''


def read_log(folder):
    """The rows of a run's log.csv. Raises OSError or ValueError if there is none."""
    path = folder if os.path.isfile(folder) else os.path.join(folder, 'log.csv')
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{folder}: no log.csv there; name the out_dir of a run")
    with open(path, encoding='utf-8', newline='') as f:
        rows = [row for row in csv.DictReader(f) if row.get('wall_s')]
    if not any(row.get('val_loss') for row in rows):
        raise ValueError(f"{path} has no val_loss yet")
    return rows


def step_ms(rows):
    """Median milliseconds of a step; the first rows may have the warm-up in them."""
    times = [float(row['ms_per_iter']) for row in rows if int(row['iter']) > max(train.EARLY)]
    return statistics.median(times or [float(row['ms_per_iter']) for row in rows])


def write_result(folder, result):
    """result.json of a finished run: it is there as a whole or not at all."""
    path = os.path.join(folder, 'result.json')
    Path(path + '.tmp').write_text(dumps(result), encoding='utf-8')
    os.replace(path + '.tmp', path)


def read_result(folder):
    """What write_result has written, or None."""
    text = read_text(os.path.join(folder, 'result.json'))
    return loads(text) if text else None


def train_variant(variant, seed, folder, watch):
    """Runs a variant with a seed, or goes on with a run of it that was stopped. Its folder has a result.json
    afterwards, unless it has failed in a way that may not come again; then the error is returned. Raises
    OSError or ValueError if it has no log."""
    os.makedirs(folder, exist_ok=True)
    command = variant.command(folder, f'--seed={seed}')
    if os.path.exists(os.path.join(folder, 'ckpt.pt')):  # the checkpoint holds all settings
        command = [*command[:2], f'--out_dir={folder}', '--init_from=resume']
    process = start_run(command, folder)
    wait(process, watch)
    text, ended = read_text(os.path.join(folder, 'printed.txt')), None
    if process.returncode:
        ended = f"signal {-process.returncode} ended it" if process.returncode < 0 else last_line(text)
        if 'the run diverged' not in ended:
            return ended
    else:
        read_log(folder)  # or it has not trained
    write_result(folder, {'error': ended, 'seed': seed, 'variant': variant.name,
                          'args': [arg.removeprefix(f'{variant.code}{os.sep}') for arg in variant.args],
                          'peak_mb': printed_number(r'^done: .* peak memory ([\d,]+) MB', text)})
    return None


def read_run(folder, column='val_loss'):
    """A finished run: {'error': None or its one line, 'rows' of the log, 'loss': the last of that column,
    'ms', 'peak_mb', 'iterations', 'seconds'}; None if it is not finished."""
    found = read_result(folder)
    if found and not found['error']:
        rows = read_log(folder)
        found |= {'rows': rows, 'loss': float(rows[-1][column]), 'ms': step_ms(rows),
                  'iterations': int(rows[-1]['iter']), 'seconds': float(rows[-1]['wall_s'])}
    return found


PRINTED_LENGTH = r'^run: ([\d,]+) iterations'
STRETCH = 20, 6.0  # match=time: steps, or seconds after the warm-up, that a variant is timed for


def time_steps(variant, seed, folder):
    """(milliseconds a step, iterations that the run would have) of a variant, from its first steps in a new
    folder."""
    os.makedirs(folder)
    process = start_run(variant.command(folder, f'--seed={seed}', '--log_interval=1'), folder)
    log, rows, begun = os.path.join(folder, 'log.csv'), [], None
    try:
        while process.poll() is None:
            rows = [row for row in csv.DictReader(read_text(log).splitlines()) if row.get('wall_s')]
            if len(rows) > max(train.EARLY):
                begun = begun or time.time()
                if len(rows) >= max(train.EARLY) + STRETCH[0] or time.time() - begun > STRETCH[1]:
                    break
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    text = read_text(os.path.join(folder, 'printed.txt'))
    iterations = printed_number(PRINTED_LENGTH, text)
    if not rows or not iterations:
        raise ValueError(f"variant {variant.name!r}: {last_line(text)}")
    return step_ms(rows), iterations


def match_time(first, variant, seed):
    """Gives a variant as many iterations as take the time of the first's, its schedule decaying within them.
    Both are timed by turns, twice, and the result kept. Returns the numbers."""
    folder = run_folder(variant, [seed, run_folder(first, seed)], 'match=time')
    found = read_result(folder)
    if not found:
        shutil.rmtree(folder, ignore_errors=True)
        times = [time_steps(each, seed, os.path.join(folder, str(i)))
                 for i, each in enumerate((first, variant) * 2)]
        first_ms, ms = (statistics.fmean(ms for ms, _ in times[i::2]) for i in (0, 1))
        found = {'first_ms': first_ms, 'ms': ms, 'iterations': times[0][1]}
        write_result(folder, found)
    found['chosen'] = max(1, round(found['iterations'] * found['first_ms'] / found['ms']))
    variant.args += [f"--max_iters={found['chosen']}", '--epochs=None', '--tokens_per_param=None',
                     '--lr_decay_iters=None']
    return found


def match_variants(first, others, match, seed):
    """Makes the others match the first in what `match` names, and says how. Raises ValueError where they
    cannot."""
    if match in ('params', 'active'):
        for variant in (first, *others):
            if variant.cache is None:
                raise ValueError(f"variant {variant.name!r}: match={match} counts by the working tree's "
                                 "model.py, from scratch: leave out revision and init_from, or match")
        target = settle(first.args)[0].num_params(match == 'active')
        for variant in others:
            changed = match_size(variant, target, match == 'active')
            if changed:
                print(f"{variant.name}: {changed}")
    elif match == 'time':
        for variant in others:
            found = match_time(first, variant, seed)
            print(f"{variant.name}: {found['chosen']:,} iterations of {found['ms']:.1f} ms take as long as "
                  f"{found['iterations']:,} of {found['first_ms']:.1f} ms")


def paired_difference(own, first):
    """Mean of the differences of losses, seed by seed, and the ends of its 95% confidence interval (Student's
    t); these are None for a single seed."""
    differences = [a - b for a, b in zip(own, first, strict=True)]
    n, mean = len(differences), statistics.fmean(differences)
    if n == 1:
        return mean, None, None
    t = T_95[n - 2] if n - 2 < len(T_95) else 1.96 + 2.4 / (n - 1)
    half = t * statistics.stdev(differences) / n ** 0.5
    return mean, mean - half, mean + half


def judge(low, high):
    """What an interval says of losses that are compared with the first's."""
    if low is None:
        return 'one seed'
    return 'better' if high < 0 else 'worse' if low > 0 else 'no difference seen'


def comparison(variants, runs, column):
    """Rows of the table, dicts, from runs[i][j], of variant i with the j-th seed: what read_run returns, or
    the text of an error that is not kept. column: which one of the logs is the loss."""
    rows = []
    for variant, own in zip(variants, runs):
        row = {'variant': variant.name, 'params': variant.params, 'cache_bytes_per_token': variant.cache}
        errors = [run if isinstance(run, str) else run['error'] for run in own]
        failed = [error for error in errors if error]
        if failed:
            row['error'] = f"{len(failed)} of {len(own)} runs failed: {failed[0]}"
        else:
            last, peaks = [run['loss'] for run in own], [run['peak_mb'] for run in own]
            row |= {'iterations': own[0]['iterations'], 'losses': last, 'loss': statistics.fmean(last),
                    'sd': statistics.stdev(last) if len(last) > 1 else None,
                    'best': float(curve([run['rows'] for run in own], 'iter', column)[1].min()),
                    'seconds': statistics.fmean(run['seconds'] for run in own),
                    'ms': statistics.median(run['ms'] for run in own),
                    'peak_mb': None if None in peaks else statistics.median(peaks)}
        rows.append(row)
    for row in rows[1:]:
        if 'losses' in row and 'losses' in rows[0]:
            mean, low, high = paired_difference(row['losses'], rows[0]['losses'])
            row |= {'difference': mean, 'low': low, 'high': high, 'verdict': judge(low, high)}
    return rows


def print_comparison(rows, column, n_seeds, match):
    """rows: see comparison. What is said below the table tells how it is to be read."""
    def cell(value, form):
        return '-' if value is None else format(value, form)

    good, table = [row for row in rows if 'error' not in row], {}
    for row in good:
        loss, difference = f"{row['loss']:.4f}", cell(row.get('difference'), '+.4f')
        if row['sd'] is not None:
            loss += f" ± {row['sd']:.4f}"
        if row.get('low') is not None:
            difference += f" [{row['low']:+.4f}, {row['high']:+.4f}]"
        table[row['variant']] = [loss, difference, row.get('verdict', ''), f"{row['ms']:.1f}",
                                 cell(row['peak_mb'], '.0f'), f"{row['params']:,}",
                                 cell(row['cache_bytes_per_token'], ',')]
    print_table('variant', ['val loss' if column == 'val_loss' else 'bits per byte',
                            'to the first, 95% confidence', 'verdict', 'ms/step', 'peak MB', 'parameters',
                            'cache B/token'], table)
    for row in rows:
        if 'error' in row:
            print(f"{row['variant']}   {row['error']}")
    print(f"± is the spread over {n_seeds} seeds, the difference is paired by seed" if n_seeds > 1
          else 'one seed tells nothing of the spread between seeds, so there is no confidence: --seeds=3')
    if match == 'time':
        seconds = [f"{row['variant']} {row['seconds']:.1f}" for row in good]
        print(f"seconds a run: {', '.join(seconds)}")
    if len(rows) > 2 and n_seeds > 1:
        print('each interval is at 95% by itself: of 20 variants equal to the first, one would seem not')
    if any(row['best'] < row['loss'] - 1e-3 for row in good):
        best = [f"{row['variant']} {row['best']:.4f}" for row in good]
        print(f"the lowest on the way: {', '.join(best)}")


def foretell(folder, runs):
    """A function that says once, when it can, how long so many runs will take, judged by what the one in
    this folder has printed so far."""
    said = []

    def watch():
        text = '' if said else read_text(os.path.join(folder, 'printed.txt'))
        iterations = printed_number(PRINTED_LENGTH, text)
        ms = re.search(rf'^iter {max(train.EARLY)}: .* ([\d.]+) ms', text, re.M)
        if iterations and ms:
            each = iterations * float(ms[1]) / 1e3
            said.append(f"{train.duration(each)} a run, {train.duration(each * runs)} for {runs}, besides "
                        "evaluations")
            print(*said, flush=True)
    return watch


def train_all(variants, seeds, folders, column):
    """Trains what is not finished, the variants by turns, and says how long it will take. folders[i][j] is
    that of variant i with the j-th seed. Returns what read_run has of each, or the text of an error."""
    done = {folder: read_run(folder, column) for own in folders for folder in own}
    todo = {}  # folder -> variant, seed; equal code has equal runs
    for seed, turn in zip(seeds, zip(*folders)):
        todo |= {folder: (variant, seed) for variant, folder in zip(variants, turn) if not done[folder]}
    times = [run['seconds'] for run in done.values() if run and not run['error']]
    before = len(done) - len(todo)
    print(f"{len(done)} runs, {before} of them finished before"
          f"{', whose ms/step are of then' if 0 < before < len(done) else ''}")
    if times and todo:
        print(f"about {train.duration(statistics.fmean(times) * len(todo))} to go", flush=True)
    for i, (folder, (variant, seed)) in enumerate(todo.items()):
        left = len(todo) - i - 1
        try:
            run = train_variant(variant, seed, folder, None if times else foretell(folder, left + 1))
            run = run or read_run(folder, column)
        except (ValueError, OSError) as error:
            run = str(error)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{before + i} of {len(done)} runs are finished; the same "
                                    "command goes on") from None
        done[folder] = run
        error = run if isinstance(run, str) else run['error']
        if error:
            print(f"{variant.name}, seed {seed}: failed: {error}", flush=True)
            continue
        times.append(run['seconds'])
        more = f"; about {train.duration(statistics.fmean(times) * left)} for {left} more" if left else ''
        print(f"{variant.name}, seed {seed}: loss {run['loss']:.4f}, {run['ms']:.1f} ms a step{more}",
              flush=True)
    return [[done[folder] for folder in own] for own in folders]


def compare(config, args, words):
    """Trains variants of one run with the same seeds and data, and says which is better, by how much and how
    sure that is. args: train.py's, and flags of OWN."""
    chosen = read_list(words[0]) if words else {}
    base = [arg for arg in args if flag_name(arg) not in OWN]
    if chosen and not any(map(is_config, base)):
        base = [*shlex.split(chosen['base']), *base]
    texts = named_variants(config['variants'] if config['variants'] is not None else chosen.get('variants'))
    seeds = range(config['seed'], config['seed'] + config['seeds'])
    match = config['match'] or chosen.get('match', 'none')
    for number in stop_signals():
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix='flatgpt-compare-') as place:
        copies = {}
        variants = [make_variant(name, text, base, place, copies) for name, text in texts.items()]
        first, *others = variants
        print(f"{len(variants)} variants of train.py {shlex.join(base)}", flush=True)
        match_variants(first, others, match, seeds[0])
        column = 'val_loss' if len({variant.data for variant in variants}) == 1 else 'val_bpb'
        for variant in variants:
            if column == 'val_bpb' and not read_meta(variant.data)['bytes_per_token']:
                raise ValueError(f"{variant.data} has no bytes_per_token, so its loss compares with no other")
        folders = [[run_folder(variant, seed) for seed in seeds] for variant in variants]
        runs = train_all(variants, seeds, folders, column)
    rows = comparison(variants, runs, column)
    print_comparison(rows, column, len(seeds), match)
    path, curves = None, {variant.name: [run['rows'] for run in own]
                          for variant, own, row in zip(variants, runs, rows) if 'error' not in row}
    if curves:
        try:
            path = draw(curves, config['by'], words[0] if words else 'compare', column)
        except ImportError as error:
            print(error)
    for row, own in zip(rows, folders):
        row['runs'] = own
    return {'seeds': list(seeds), 'match': match, 'plot': path, 'rows': rows,
            'failed': [row['variant'] for row in rows if 'error' in row]}


AXES = {'iter': ('iter', 'iterations'), 'tokens': ('tokens', 'tokens'), 'time': ('wall_s', 'seconds')}


def curve(logs, by, column='val_loss'):
    """Logs of runs that differ by seed -> where all of them were evaluated on the axis `by`, their mean loss
    and its spread, (evaluations,) each; the spread of one is 0."""
    points = [{int(row['iter']): (float(row[AXES[by][0]]), float(row[column])) for row in rows if row[column]}
              for rows in logs]
    shared = sorted(set.intersection(*map(set, points)))  # a run that was stopped was evaluated there too
    x, y = np.array([[run[it] for run in points] for it in shared]).transpose(2, 0, 1)  # (evaluations, runs)
    return x.mean(1), y.mean(1), y.std(1, ddof=1) if len(logs) > 1 else np.zeros(len(y))


def draw(curves, by, what, column='val_loss'):
    """Writes validation losses to a PNG in RUNS, named by `what` and what it shows, and returns its path.
    curves: name -> logs of runs that differ by seed, see read_log, shown by their mean and spread. by: the
    horizontal axis, see AXES. Raises ImportError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError('plots need matplotlib: pip install matplotlib') from None
    figure = Figure(figsize=(9, 5.5), layout='constrained')
    axes = figure.subplots()
    for i, (name, logs) in enumerate(curves.items()):
        x, loss, spread = curve(logs, by, column)
        style = dict(color=f'C{i % 10}', linestyle=('-', '--', ':')[i // 10 % 3])
        axes.plot(x, loss, marker='.', label=name, **style)
        if len(logs) > 1:
            axes.fill_between(x, loss - spread, loss + spread, color=style['color'], alpha=0.2, linewidth=0)
    axes.set(xlabel=AXES[by][1], ylabel='validation loss' if column == 'val_loss' else 'bits per byte')
    axes.grid(alpha=0.3)
    axes.legend(loc='upper right', fontsize='small')
    os.makedirs(RUNS, exist_ok=True)
    digest = hashlib.sha256(dumps([curves, by, column]).encode()).hexdigest()
    path = os.path.join(RUNS, f'{what}-{digest[:6]}.png')
    FigureCanvasAgg(figure).print_png(path)
    print(f"curves: {path}")
    return path


def plot(config, model_args, words):
    """Draws the validation loss of runs, given by their folders, to a PNG."""
    if not words:
        raise ValueError("plot takes folders of runs: python bench.py plot out-a out-b --by=time")
    logs = {word: read_log(word) for word in words}
    path = draw({name: [rows] for name, rows in logs.items()}, config['by'], 'plot')
    last = {name: [float(row['val_loss']) for row in rows if row['val_loss']][-1]
            for name, rows in logs.items()}
    for name, loss in last.items():
        print(f"{name}: val loss {loss:.4f} after {int(logs[name][-1]['iter']):,} iterations")
    return {'plot': path, 'by': config['by'], 'loss': last}


# checking ---------------------------------------------------------------------------------------------------

class Unsound(Exception):
    """What a check has found to be wrong, in one line."""


def shrunk(config):
    """A config of the same kind with everything in it that can go wrong, but small: each kind of layer stands
    in it, and what is several stays several (heads of a group, groups of experts), for one has no order to
    be confused. Widths do not divide each other where they need not, so that a wrong one cannot fit by
    chance. Raises ValueError where that gives no model."""
    block_size, experts = 24, config.n_expert is not None

    def fewer(n, most):
        return None if n is None else min(n, most)

    changes = dict(block_size=block_size, vocab_size=61, n_embd=32, d_ff=40,
                   n_layer=layers_of_every_kind(config), n_dense_layer=min(1, config.n_dense_layer))
    if config.document_token is not None:
        changes.update(document_token=3)
    if config.embed_scale == config.n_embd ** 0.5:
        changes.update(embed_scale=32 ** 0.5)
    if config.window is not None:  # as much of the context as it was, and at least 3 tokens
        changes.update(window=max(3, round(config.window * block_size / config.block_size)))
    if config.kv_lora_rank is not None:
        changes.update(n_head=min(4, config.n_head), kv_lora_rank=16, qk_nope_head_dim=8, v_head_dim=12,
                       qk_rope_head_dim=min(4, config.qk_rope_head_dim),
                       q_lora_rank=fewer(config.q_lora_rank, 20))
    elif not config.has_attention:
        changes.update(n_head=4, n_kv_head=None, head_dim=None)
    else:
        # the smallest width of a head in which a whole number of pairs is rotated
        head_dim = next((d for d in range(8, 64, 2) if int(d * config.partial_rotary_factor) in (2, 4, 6, 8)),
                        config.head_dim)
        kv_heads = min(2, config.n_kv_head)
        changes.update(n_kv_head=kv_heads, n_head=kv_heads * min(4, config.n_head // config.n_kv_head),
                       head_dim=head_dim)
        if config.attn_scale is not None:
            changes.update(attn_scale=config.attn_scale * (config.head_dim / head_dim) ** 0.5)
    if config.linear_n_key_head is not None:
        keys = min(2, config.linear_n_key_head)
        values = keys * min(2, config.linear_n_value_head // config.linear_n_key_head)
        changes.update(linear_n_key_head=keys, linear_n_value_head=values, linear_key_head_dim=6,
                       linear_value_head_dim=10)
    if experts:
        groups = fewer(config.n_group, 4)
        n_expert = 2 * groups if groups else min(8, config.n_expert)
        chosen = max(1, config.topk_group * groups // config.n_group) if groups else None
        allowed = 2 * chosen if groups else max(2, n_expert // 2)
        changes.update(n_expert=n_expert, n_group=groups, topk_group=chosen, d_expert=24,
                       n_expert_active=min(config.n_expert_active, allowed),
                       n_shared_expert=fewer(config.n_shared_expert, 2))
    if config.rope_scaling:
        changes.update(rope_scaling=shrunk_scaling(config, changes))
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as error:
        raise ValueError(f"check makes a small model of this kind, see shrunk in bench.py, but: {error}"
                         ) from None


def shrunk_scaling(config, changes):
    """rope_scaling for what `changes` makes of a config: the lengths in it as shares of the context, and as
    many factors as there are pairs."""
    scaling, share = dict(config.rope_scaling), changes['block_size'] / config.block_size
    if 'original_max_position_embeddings' in scaling:
        scaling['original_max_position_embeddings'] = max(
            8, round(scaling['original_max_position_embeddings'] * share))
    pairs = (changes.get('qk_rope_head_dim') or int(changes['head_dim'] * config.partial_rotary_factor)) // 2
    for name in ('short_factor', 'long_factor'):
        if name in scaling:
            scaling[name] = scaling[name][:pairs]
    return scaling


def layers_of_every_kind(config):
    """How many layers, at least two, it takes for each kind of layer that the config has to be there."""
    few = dataclasses.replace(config, n_dense_layer=min(1, config.n_dense_layer))
    kinds = [(few.mixer_of(i), few.window_of(i), few.has_experts(i),
              few.pos_pattern[i % len(few.pos_pattern)]) for i in range(config.n_layer)]
    return next(n for n in range(min(2, config.n_layer), config.n_layer + 1) if set(kinds[:n]) == set(kinds))


def shaken(config, dropout=0.0):
    """A model in evaluation mode whose every weight matters: nothing is left at zero or one, where much of it
    starts, for a branch that ends in zeros hides whatever is wrong in it."""
    model = GPT(dataclasses.replace(config, dropout=dropout))
    with torch.no_grad():
        for w in model.parameters():
            if w.ndim < 2:
                w += 0.2 * torch.randn_like(w)
            else:
                w.copy_(0.3 * torch.randn_like(w))
    return model.eval()


def random_tokens(config, *shape):
    """Token ids (shape); if the model knows where documents end, none of them is such an end."""
    idx = torch.randint(config.vocab_size, shape)
    return idx if config.document_token is None else idx.where(idx != config.document_token, 0)


class KeepsFloat64(torch.overrides.TorchFunctionMode):
    """Under it float64 stays float64 where a model asks for float32, as norms and routers do: differences
    of 1e-6 are then visible in a loss."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        wants_float32 = function is torch.Tensor.float or (
            function is torch.Tensor.to and torch.float32 in (*args[1:], *(kwargs or {}).values()))
        if wants_float32 and args[0].dtype is torch.float64:
            return args[0]
        return function(*args, **(kwargs or {}))


def to_float64(model):
    """The model in float64, to be used under KeepsFloat64; its mixers' states too, if they hold floats."""
    for block in model.h:
        block.attn.states = [(shape, None if dtype is None or dtype.is_floating_point else dtype)
                             for shape, dtype in block.attn.states]
    return model.double()


def require(holds, message):
    if not holds:
        raise Unsound(message)


def require_equal(found, expected, what, tolerance=1e-4):
    """Raises Unsound that says where two tensors (rows, positions, ...) first differ by more than rounding,
    relative to the largest element."""
    difference = (found - expected).detach().abs().flatten(2).amax(2)
    wrong = ~(difference <= tolerance * max(1.0, float(expected.detach().abs().max())))  # nan is wrong
    if wrong.any():
        row, position = wrong.nonzero()[0].tolist()
        raise Unsound(f"{what}: first differs at row {row}, position {position} by "
                      f"{float(difference[row, position]):.2g}")


def check_parameters(config):
    model = GPT(config)
    for name, w in model.named_parameters():
        require(name in model.marks, f"{name} has no mark")
        torch.nn.init.constant_(w, math.nan)
    model.init_weights()
    unset = [name for name, w in model.named_parameters() if not w.isfinite().all()]
    require(not unset, f"{', '.join(unset[:5])} is not finite after init_weights")
    for kind in train.OPTIMIZERS:
        groups = [group for opt in train.make_optimizers(model, {**train.config, 'optimizer': kind})
                  for group in opt.param_groups]
        for name, w in model.named_parameters():
            times = sum(w is other for group in groups for other in group['params'])
            require(times == 1, f"{name} stands in {times} groups of --optimizer={kind}")
    return f"{len(model.marks)} parameters, {' and '.join(train.OPTIMIZERS)}"


def check_first_loss(config):
    model, expected = GPT(config), math.log(config.vocab_size)
    idx = random_tokens(config, 8, config.block_size + 1)
    loss, _ = model(idx[:, :-1], idx[:, 1:])
    require(abs(loss.item() - expected) < 0.3, f"{loss.item():.3f} instead of about {expected:.3f}")
    return f"{loss.item():.3f}, ln({config.vocab_size}) is {expected:.3f}"


def check_targets(config):
    model = shaken(config)
    with training_run(config) as run:
        inputs, targets, _ = next(run.read(0))
    for row, (x, y) in enumerate(zip(inputs.tolist(), targets.tolist())):
        starts = [i for i in range(len(run.tokens)) if run.tokens[i:i + len(x)].tolist() == x]
        require(starts and y in [run.tokens[i + 1:i + 1 + len(x)].tolist() for i in starts],
                f"row {row} of a batch has targets that do not follow its inputs")
    logits = model(inputs).double()
    by_hand = -logits.log_softmax(-1).gather(2, targets[..., None])[..., 0]
    some = targets.clone()
    some[:, ::3] = -1
    for y in (targets, some):
        loss, expected = model(inputs, y)[0].item(), by_hand[y != -1].mean().item()
        require(abs(loss - expected) < 1e-4 * expected,
                f"the loss is {loss:.5f}, the mean -log p(targets[t]) of the logits at t {expected:.5f}")


def changed_tokens(config):
    """(T + 1, T) token ids: rows that differ from the last one in one token, row t at position t."""
    T = config.block_size
    idx = random_tokens(config, 1, T).repeat(T + 1, 1)
    other = (idx[0] + 1) % config.vocab_size
    if config.document_token is not None:
        other = other.where(other != config.document_token, (other + 1) % config.vocab_size)
    idx[:T].diagonal().copy_(other)
    return idx


def check_causal(config):
    model, idx = shaken(config), changed_tokens(config)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            logits = model(idx)
        moved = (logits[:-1] - logits[-1:]).detach().abs().amax(-1)  # of the change at row, at position
        for t, at in (moved.tril(-1) > 1e-5 * logits.detach().abs().max()).nonzero().tolist():
            raise Unsound(f"{'in' if grad else 'without'} training, changing token {t} changes the logits at "
                          f"position {at} by {moved[t, at]:.2g}")
        for t in (~(moved.diagonal() > 0)).nonzero().flatten().tolist():
            raise Unsound(f"changing token {t} does not change its own logits")


def check_windows(config):
    model, T, seen_in = to_float64(shaken(config)), config.block_size, {}
    x = torch.randn(1, T, config.n_embd).double().repeat(T + 1, 1, 1)
    x[range(T), range(T)] = torch.randn(T, config.n_embd).double()
    age = torch.arange(T) - torch.arange(T)[:, None]  # of the changed token in a row, at a position
    for grad in (True, False):
        with torch.set_grad_enabled(grad), KeepsFloat64():
            context = model.context(random_tokens(config, 1, T).repeat(len(x), 1))
            results = [block.attn(x, context) for block in model.h]
        for layer, (block, y) in enumerate(zip(model.h, results)):
            seen = (y[:-1] - y[-1:]).detach().abs().amax(-1) > 1e-9
            window, name = block.attn.window or T, type(block.attn).__name__
            # what has slots for its tokens sees all of them; a state may forget, and hand on what is older
            must = (age >= 0) & (age < window) if block.attn.slots else age == 0
            may = age >= 0 if block.attn.states else must
            wrong = seen & ~may | must & ~seen
            for s, t in wrong.nonzero().tolist():
                raise Unsound(f"layer {layer}, {name} with window {block.attn.window}: position {t} "
                              f"{'sees' if seen[s, t] else 'does not see'} position {s}")
            seen_in[name] = sorted({*seen_in.get(name, ()), window})
    return ', '.join(f"{name} {' and '.join('all' if w == T else str(w) for w in windows)}"
                     for name, windows in seen_in.items())


@contextlib.contextmanager
def recorded(model):
    """Within it each attention of the model appends (itself, q, k, v, result) of what it attends to."""
    calls, mixers = [], [block.attn for block in model.h if hasattr(block.attn, 'attend')]
    for mixer in mixers:
        def record(q, k, v, context, mixer=mixer, attend=mixer.attend):
            y = attend(q, k, v, context)
            calls.append((mixer, q, k, v, y))
            return y
        mixer.attend = record
    yield calls
    for mixer in mixers:
        del mixer.attend


def check_documents(config):
    starts, T = ((4, 5, 13), (10,)), config.block_size  # of a row's second document, its third...
    plain = GPT(dataclasses.replace(config, document_token=None)).eval()
    for block in plain.h:
        if not block.attn.documents:
            return f"{type(block.attn).__name__} does not keep them apart, and says so"
    packed = shaken(dataclasses.replace(config, document_token=3))
    plain.load_state_dict(packed.state_dict())
    idx = random_tokens(packed.config, len(starts), T)
    for row, later in zip(idx, starts):
        row[list(later)] = 3
    documents = [one for row, later in zip(idx, starts) for one in row.tensor_split(later)]
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            alone = torch.cat([y[:len(one)] for y, one in zip(plain(padded), documents)])
            require_equal(packed(idx), alone.unflatten(0, idx.shape),
                          f"{'in' if grad else 'without'} training, with documents that start at "
                          f"{' and at '.join(map(str, starts))}")
    return None


def check_rotation(config):
    model, T, remarks = to_float64(shaken(config)), config.block_size, []
    idx = random_tokens(config, 2, T)
    with KeepsFloat64(), torch.no_grad():
        context = model.context(idx)
        ropes = {kind: [part.double() for part in rope] for kind, rope in context.ropes.items() if rope}
        for kind, (cos, sin) in ropes.items():
            numbers = (config.rope_base, config.rope_dim, config.rope_scaling or ())
            base, width, scaling = numbers if kind == config.rope_kind else kind
            expected, factor = base ** (-torch.arange(0, width, 2).double() / width), 1.0
            if scaling:
                options = dict(scaling)
                expected, factor = ROPE_SCALINGS[options.pop('rope_type')](expected, base, T, **options)
            cos, sin = cos[0, 0], sin[0, 0]  # (T, pairs)
            angle = torch.atan2(sin[1], cos[1])  # of one position
            require(angle.shape == expected.shape and torch.allclose(angle, expected, rtol=1e-5),
                    f"a position turns pairs by {[round(a, 4) for a in angle.tolist()]}, not by "
                    f"{base}^(-2i/{width}){' scaled' if scaling else ''} = "
                    f"{[round(a, 4) for a in expected.tolist()]}")
            turned = torch.arange(T)[:, None] * expected
            require_equal(torch.stack((cos, sin)), factor * torch.stack((turned.cos(), turned.sin())),
                          'cosines (row 0) and sines (row 1) of the positions')
            remarks.append(f"{width} dimensions, base {base:,.0f}")
        contexts = [dataclasses.replace(context, ropes=dict.fromkeys(context.ropes)), context]
        for block in model.h:  # each on an input of its own, for what comes before it would differ too
            x = torch.randn(2, T, config.n_embd).double()
            with recorded(model) as calls:
                for each in contexts:
                    block.attn(x, each)
            for (mixer, *plain, _), (_, *found, _) in zip(calls, calls[len(calls) // 2:]):
                for name, a, b in zip(('queries', 'keys'), plain, found):
                    expected = a.clone()
                    if mixer.rope_kind is not None:
                        (cos, sin), width = ropes[mixer.rope_kind], mixer.rope_kind[1]
                        start = a.shape[-1] - width if isinstance(mixer, LatentAttention) else 0
                        expected[..., start:start + width] = rotated(a[..., start:start + width], cos, sin)
                    require_equal(b.transpose(1, 2), expected.transpose(1, 2),
                                  f"layer {mixer.layer}: {name} are not turned by their positions")
    return '; '.join(remarks) or 'no layer has a rotation'


def rotated(x, cos, sin):
    """x (..., pairs of a half-split layout), turned."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def alibi_by_the_paper(heads):
    """Slopes as the code of arXiv:2108.12409 has them."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return first if heads == power else first + alibi_by_the_paper(2 * power)[::2][:heads - power]


def check_attention(config):
    model, T = to_float64(shaken(config)), config.block_size
    idx, age = random_tokens(config, 2, T), torch.arange(T)[:, None] - torch.arange(T)
    compared = set()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), KeepsFloat64(), recorded(model) as calls:
            model(idx)
        for mixer, q, k, v, y in calls:
            if type(mixer).attend is not BaseAttention.attend:
                continue  # an attention of its own
            scale = mixer.scale if config.attn_scale or config.rope_scaling else q.shape[-1] ** -0.5
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
            score = torch.einsum('bhtd,bhsd->bhts', q, k) * scale
            if config.attn_softcap:
                score = config.attn_softcap * torch.tanh(score / config.attn_softcap)
            if config.pos == 'alibi' and mixer.pos:
                slopes = torch.tensor(alibi_by_the_paper(q.shape[1])).double() * config.alibi_scale
                score = score - slopes[:, None, None] * age
            weight = score.exp() * ((age >= 0) & (age < (mixer.window or T)))
            total = weight.sum(-1, keepdim=True)
            if mixer.sink is not None:
                total = total + mixer.sink.double().exp()[:, None, None]
            expected = (weight / total) @ v
            require_equal(y.transpose(1, 2), expected.transpose(1, 2), f"layer {mixer.layer}"
                          f"{' in training' if grad else ''}", tolerance=1e-6)
            compared.add(type(mixer).__name__)
    return ', '.join(sorted(compared)) or 'there is none that it could be compared with'


@torch.no_grad()
def check_cache(config):
    model, T, rows = shaken(config), config.block_size, torch.arange(3)
    idx = random_tokens(config, 3, T)
    if config.document_token is not None:
        idx[rows, 5 + 4 * rows] = config.document_token
    full = model(idx)

    def feed(cache, chunks, what):
        at = 0
        for n in chunks:
            require_equal(model(idx[:, at:at + n], cache=cache), full[:, at:at + n],
                          f"{what}, {n} after {at} tokens")
            at += n

    def step(cache, at, source, what, n=1):
        new = torch.stack([idx[row, a:a + n] for row, a in zip(source, at)])
        expected = torch.stack([full[row, a:a + n] for row, a in zip(source, at)])
        require_equal(model(new, cache=cache), expected, what)
        return [a + n for a in at]

    cache, odd = model.make_cache(3, T), [1, T // 4, 1, T // 3, 1]
    feed(cache, [*odd, T - sum(odd)], 'in odd chunks')
    feed(model.make_cache(3, T, static=True), [T - 3, 1, 2], 'in a static cache')
    cache, at = model.make_cache(3, T), [T // 2, T // 3, 2]
    last = model(idx[:, :T // 2], cache=cache, keep=1, lengths=torch.tensor(at))
    require_equal(last, full[rows, torch.tensor(at) - 1][:, None], 'the last of ragged rows')
    at = step(cache, step(cache, at, rows, 'ragged rows', 3), rows, 'ragged rows')
    cache.select([2, 0, 1, 2])
    source, at = [2, 0, 1, 2], [at[row] for row in (2, 0, 1, 2)]
    at = step(cache, at, source, 'after select')
    cache.reset(torch.tensor([False, True, False, True]))
    step(cache, [at[0], 0, at[2], 0], source, 'after reset of two rows')
    if any(block.attn.states for block in model.h):
        return 'chunks, reset, ragged rows, select; what keeps a state cannot rewind'
    cache, at = model.make_cache(3, T, max_rewind=4), T - 6
    model(idx[:, :at], cache=cache, keep=1)
    cache.rewind(torch.tensor([0, 4, 1]))
    step(cache, [at, at - 4, at - 1], rows, 'after rewind', 2)
    return 'chunks, reset, ragged rows, select, rewind'


@torch.no_grad()
def check_prompts(config):
    model, T = shaken(config), config.block_size
    first, second = random_tokens(config, 2, T), random_tokens(config, 2, T)
    alone = model(second)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    model(first)
    require_equal(model(second), alone, 'without a cache, after another prompt', tolerance=0)
    cache = model.make_cache(2, T)
    model(first, cache=cache)
    cache.reset()
    require_equal(model(second, cache=cache), alone, 'in a cache that was reset, after another prompt')
    model.train()
    with torch.enable_grad():
        model(first, first)
    changed = [name for name, w in model.state_dict().items() if not torch.equal(w, before[name])]
    require(not changed, f"a forward pass changes {', '.join(changed)}")


def objective(model, idx):
    """What train.gradients differentiates."""
    loss, aux = model(idx[:, :-1], idx[:, 1:])
    return loss + train.config['balance_loss'] * aux['balance'] if aux else loss


def check_gradients(config):
    model, step = to_float64(shaken(config)), 1e-6
    idx, worst = random_tokens(config, 2, config.block_size + 1), 0.0
    with KeepsFloat64():
        objective(model, idx).backward()
        with torch.no_grad():
            for name, w in model.named_parameters():
                require(w.grad is not None, f"{name} has no gradient")
                direction, kept, expected = torch.randn_like(w), w.clone(), 0.0
                for move in (step, -step):
                    w.copy_(kept + move * direction)
                    expected += float(objective(model, idx)) / (2 * move)
                w.copy_(kept)
                found = float((w.grad * direction).sum())
                error = abs(found - expected) / max(abs(expected), float(w.grad.norm()), 1e-3)
                require(error < 1e-4, f"{name}: {found:.6f} along a random direction, {expected:.6f} by "
                        "differences")
                worst = max(worst, error)
    return f"to {worst:.0e} of their size"


class TrainingRun:
    """A short run as train.py does one, on random tokens in a folder: its model, and what a step needs."""

    def __init__(self, config, folder, optimizer='adamw', model=None, **settings):
        self.tokens = np.fromfile(os.path.join(folder, 'train.bin'), dtype='<u2')
        self.bins = Bins(folder, 'train', dtype='uint16')
        self.settings = {**train.config, 'optimizer': optimizer, 'learning_rate': 1e-2, 'weight_decay': 0.0,
                         **settings}
        self.model, self.folder = (model or GPT(config)).train(), folder
        self.optimizers = train.make_optimizers(self.model, self.settings)
        self.scaler = torch.amp.GradScaler('cpu', enabled=False)
        self.progress = train.Progress()

    def read(self, first, iterations=1):
        return train.read_batches(self.bins, self.model.config.block_size, range(first, first + iterations),
                                  1, 4, 0, 'cpu')

    def step(self, batch):
        """An update; returns the loss before it."""
        train.seed_dropout(0, self.progress.iter_num, 0, 'cpu')
        loss = update(self.model, self.model, batch, self.optimizers, self.scaler, contextlib.nullcontext,
                      self.settings)
        self.progress.iter_num += 1
        return loss.item()

    def steps(self, count):
        for batch in self.read(self.progress.iter_num, count):
            self.step(batch)

    def save(self):
        path = os.path.join(self.folder, 'ckpt.pt')
        train.save(path, {'model_args': dataclasses.asdict(self.model.config), 'config': self.settings,
                          **train.snapshot(self.model, self.progress, self.optimizers, self.scaler)})
        return path


@contextlib.contextmanager
def training_run(config, **settings):
    """A TrainingRun in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = random_tokens(config, 40 * config.block_size + 1)
        tokens.numpy().astype('<u2').tofile(os.path.join(folder, 'train.bin'))
        yield TrainingRun(config, folder, **settings)


def check_training(config):
    for optimizer in train.OPTIMIZERS:
        with training_run(config, optimizer=optimizer) as run:
            before = {name: w.detach().clone() for name, w in run.model.named_parameters()}
            run.steps(4)  # where a branch starts at zero, what is in it learns from the second step on
            rows = {id(w): parts for w, parts in run.model.row_splits().items()}
            for name, w in run.model.named_parameters():
                moved = (w.detach() - before[name]).abs()
                parts = moved.split(rows[id(w)], dim=-2) if id(w) in rows else [moved]
                still = [i for i, part in enumerate(parts) if not part.any()]
                where = f", projection {still[0] + 1} of {len(parts)}" if still and len(parts) > 1 else ''
                require(not still, f"{name}{where} is where it was after 4 steps of --optimizer={optimizer}")
    return f"{' and '.join(train.OPTIMIZERS)}, 4 steps"


def check_sizes(config):
    model, seen = GPT(config), {}  # name -> what a module gave
    fill_zeros(model)

    def keep(name, module, inputs, output):
        output.retain_grad()
        seen[name] = output
    for layer, block in enumerate(model.h):
        block.register_forward_hook(functools.partial(keep, f"layer {layer}"))
        for module in (block.attn, block.mlp):
            module.register_forward_hook(functools.partial(keep, f"layer {layer}, {type(module).__name__}"))
    idx = random_tokens(config, 4, config.block_size + 1)
    model(idx[:, :-1], idx[:, 1:])[0].backward()
    streams = {name: float(x.detach().square().mean().sqrt()) for name, x in seen.items() if ',' not in name}
    # change of the loss for a relative change of what a module gives: of no unit, so that layers compare
    effects = {name: float(x.grad.norm() * x.detach().norm()) if x.grad is not None else 0.0
               for name, x in seen.items()}
    for what, values in (('activations go', streams), ('effects on the loss go', effects)):
        small, large = min(values, key=values.get), max(values, key=values.get)
        require(all(map(math.isfinite, values.values())) and values[large] < 100 * values[small],
                f"{what} from {values[small]:.2g} ({small}) to {values[large]:.2g} ({large})")
    return (f"{min(streams.values()):.2g} to {max(streams.values()):.2g}, effects on the loss "
            f"{min(effects.values()):.2g} to {max(effects.values()):.2g}")


def check_learning(config, steps=60):
    with training_run(config) as run:
        batch = next(run.read(0))
        losses = [run.step(batch) for _ in range(steps)]
    inputs = batch[0]
    with torch.no_grad():
        guessed = run.model.eval()(inputs)[:, :-1].argmax(-1)
    known = (guessed == inputs[:, 1:]).float().mean().item()
    require(losses[-1] < 0.5 * losses[0], f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f} only, in "
            f"{steps} steps")
    require(known > 0.5, f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}, but {known:.0%} of the "
            "next tokens are known: something else was learnt")
    return f"loss {losses[0]:.2f} to {losses[-1]:.2f} in {steps} steps, {known:.0%} of the next tokens known"


@torch.no_grad()
def check_dropout(config):
    model, idx = shaken(config, dropout=0.5), random_tokens(config, 2, config.block_size)
    plain = GPT(dataclasses.replace(config, dropout=0.0)).eval()
    plain.load_state_dict(model.state_dict())
    require_equal(model(idx), model(idx), 'two evaluations of the same tokens', tolerance=0)
    require_equal(model(idx), plain(idx), 'an evaluation of a model with dropout and of one without')
    model.train()
    require(model(idx, idx)[0] != model(idx, idx)[0],
            'two passes in training are equal: dropout=0.5 drops nothing')
    with training_run(config, model=model) as run:
        losses = [train.evaluate(model, model, run.bins, 2, 4, 'cpu', contextlib.nullcontext)[0]
                  for _ in range(2)]
        require(losses[0] == losses[1], f"train.evaluate gives {losses[0]} and then {losses[1]}")
        require(model.training, 'train.evaluate leaves the model in evaluation mode')


def check_head(config):
    with training_run(config) as run:
        run.steps(2)
    model, T = run.model.eval(), config.block_size
    idx = random_tokens(config, 2, T)
    idx[idx == 1] = 0
    with torch.no_grad():
        before = model(idx)
        model.wte.weight[1] += 1.0  # a token that is not in idx
        moved = (model(idx) - before).abs().amax((0, 1)) > 1e-6
    tied = config.tie_word_embeddings
    require(moved[1] == tied, f"tie_word_embeddings={tied}, but after training the logits of a token "
            f"{'do not move' if tied else 'move'} with its embedding")
    require(not moved[torch.arange(len(moved)) != 1].any(), "an embedding moves the logits of other tokens")
    return 'tied' if tied else 'not tied'


def check_saving(config):
    # a rate at which what follows the load moves far enough to matter
    with training_run(config, balance_rate=0.3) as run:
        run.steps(3)
        loaded, _ = GPT.from_checkpoint(run.save())
    idx = random_tokens(config, 3, config.block_size)
    require_equal(loaded.eval()(idx), run.model.eval()(idx), 'after GPT.from_checkpoint', tolerance=0)
    names = {name for name, _ in (*run.model.named_parameters(), *run.model.named_buffers())}
    lost = names - run.model.state_dict().keys()
    require(not lost, f"{', '.join(sorted(lost))} is in no checkpoint")


def check_resuming(config):
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # as train.py has it on a CPU
    try:
        for optimizer in train.OPTIMIZERS:
            with training_run(dataclasses.replace(config, dropout=0.1), optimizer=optimizer) as run:
                run.steps(2)
                path = run.save()
                run.steps(2)
                model, rest = GPT.from_checkpoint(path)
                again = TrainingRun(None, run.folder, optimizer, model)
                again.progress.iter_num = rest['iter_num']
                train.load_optimizers(again.optimizers, rest['optimizer'], path, rest['iter_num'])
                again.steps(2)
            expected = run.model.state_dict()
            differ = [name for name, w in model.state_dict().items() if not torch.equal(w, expected[name])]
            require(not differ, f"2 steps, saved, 2 more are not 4 steps of --optimizer={optimizer}: "
                    f"{', '.join(differ[:3])} differ{'s' * (len(differ) == 1)}")
    finally:
        torch.use_deterministic_algorithms(deterministic)
    return ' and '.join(train.OPTIMIZERS)


def gather_experts(x, w, offsets):
    """What GroupedLinear.loop computes, as one graph."""
    expert = torch.searchsorted(offsets, torch.arange(len(x), device=x.device), right=True)
    return torch.einsum('nc,nwc->nw', x, w[expert])


def check_compiling(config):
    model = shaken(config).train()
    for module in model.modules():
        if isinstance(module, GroupedLinear):
            module.loop = gather_experts  # the loop is a break that is meant: see GroupedLinear
    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, dynamic=False, backend='aot_eager')
    for first_call in (True, False):
        idx, found = random_tokens(config, 2, config.block_size + 1), []
        with torch._dynamo.config.patch(error_on_recompile=not first_call):
            for f in (model, forward):
                loss, _ = f(idx[:, :-1], idx[:, 1:])
                loss.backward()
                found.append((loss.item(), {name: w.grad.clone() for name, w in model.named_parameters()}))
                model.zero_grad()
        (loss, grads), (compiled_loss, compiled_grads) = found
        require(abs(loss - compiled_loss) < 1e-4 * loss,
                f"the loss is {loss:.5f}, compiled {compiled_loss:.5f}")
        for name, grad in grads.items():
            error = float((grad - compiled_grads[name]).norm() / grad.norm().clamp(min=1e-3))
            require(error < 1e-3, f"compiled, the gradient of {name} differs by {error:.2g} of its size")
    return 'one graph, loss and gradients as without'


@torch.no_grad()
def check_weights(model):
    """Of a checkpoint itself: its numbers, and that it decodes as it predicts."""
    for name, w in model.state_dict().items():
        require(w.isfinite().all(), f"{name} is not finite")
    model.eval()
    T = min(64, model.config.block_size)
    idx, cache = random_tokens(model.config, 2, T), model.make_cache(2, T)
    full = model(idx)
    parts = [model(part, cache=cache) for part in idx.split([T // 2, T - 1 - T // 2, 1], dim=1)]
    require_equal(torch.cat(parts, dim=1), full, 'its cache does not equal no cache', tolerance=1e-3)
    return f"finite, and its cache equals no cache in {T} tokens"


def check_family(config):
    """Which published family computes the whole config, or why none does; that is no fault."""
    try:
        import hub
        return hub.config_to_hf(config)['model_type']
    except (ValueError, ImportError) as error:
        return str(error)


CHECKS = {  # what holds: (function of a small config -> a remark or None; raises Unsound, where to look)
    'parameters have an initial value and one optimizer': (
        check_parameters, 'parameter() and mark() where it is made, OPTIMIZERS in train.py'),
    'loss at the start near ln(vocabulary)': (
        check_first_loss, 'GPT.init_weights and what marks say, GPT.head'),
    'targets are the next tokens': (check_targets, 'Bins.batch in prepare.py, the loss in GPT.forward'),
    'causal at every position': (check_causal, 'GPT.mask, visible, and whatever else crosses positions'),
    'layers see their window, all of it': (
        check_windows, 'GPT.mask, visible, eager_attention; config.window_of, mask_kind of the mixer'),
    'queries and keys turn with their positions': (
        check_rotation, 'rope_table, rotate, GPT.context, rope_kind of the mixer, the calls of rotate in its '
        'forward'),
    'packed documents equal the same alone': (
        check_documents, 'document_starts in forward of the mixer, GPT.document_starts, GPT.mask'),
    'attention equals float64': (
        check_attention, 'attend, eager_attention, GPT.mask, alibi_slopes; expected, if this is your change'),
    'cache equals no cache': (
        check_cache, 'positions in GPT.context and GPT.mask, key_positions and write of FullSlots and '
        'WindowSlots, states of the mixer'),
    'nothing is left of the prompt before': (
        check_prompts, 'Cache.reset, what modules keep between calls: that is the cache\'s to keep'),
    'gradients equal float64 differences': (
        check_gradients, 'detach, no_grad, .data, in-place changes and backward functions on its way'),
    'every parameter is trained': (check_training, 'what of it the loss depends on, OPTIMIZERS in train.py'),
    'activations and gradients of healthy size': (
        check_sizes, 'Norm, NORM_PLACEMENTS, the init of what is named, residual_scale'),
    'one batch is learnt by heart': (check_learning, 'gradients and update in train.py, and the lines above'),
    'dropout in training only': (check_dropout, 'every use of dropout, self.training, evaluate in train.py'),
    'head and embedding tied as said': (check_head, 'GPT.head, lm_head in GPT.__init__'),
    'saved and loaded it is the same': (
        check_saving, 'register_buffer (persistent), GPT.from_checkpoint, snapshot in train.py'),
    'resumed equals unbroken': (check_resuming, 'snapshot and load_optimizers in train.py'),
    'compiles without a break': (
        check_compiling, 'changes in place, .item(), numbers that change with each call'),
}


def run_check(function, look_at, *args):
    """(whether it holds, a remark on it or None). A check that ends with an error does not hold."""
    torch.manual_seed(0)
    try:
        return True, function(*args)
    except Unsound as error:
        message = str(error)
    except Exception as error:  # whatever a changed model.py may raise
        message = f"{type(error).__name__}: {' '.join(str(error).split()):.250}"
    return False, f"{message}; look at {look_at}"


def check(config, model_args, words):
    """Whether what stands in model.py and train.py is sound, for a small model of the kind that is asked for
    (words: of a checkpoint or published model); a line for each check."""
    if words and config['init_from'] != 'scratch':
        raise ValueError(f"check reads {words[0]} or --init_from={config['init_from']}: give one")
    if config['device'] not in ('auto', 'cpu'):
        raise ValueError(f"device={config['device']}: check compares code paths of the CPU; leave it out")
    began, model, init_from = time.perf_counter(), None, words[0] if words else config['init_from']
    if init_from == 'scratch':
        whole = GPTConfig(**fields_asked(config, model_args))
    else:
        model, _, rest = train.load_to_train(init_from, 'out', model_args)
        whole = model.config
    small, failed = shrunk(whole), []
    torch.set_num_threads(1)  # the second would only wait
    show('checked is a small model of this kind', {
        name: value for name, value in vars(small).items() if value != getattr(whole, name)})
    checks = [(name, *how, small) for name, how in CHECKS.items()]
    if model is not None:
        checks.append((f"weights of {rest['path']}", check_weights, 'log.csv of its run', model))
    for name, *how in checks:
        holds, remark = run_check(*how)
        failed += [] if holds else [name]
        print(f"{'ok  ' if holds else 'FAIL'} {name}{f': {remark}' if remark else ''}", flush=True)
    family = check_family(whole)
    print(f"     published family: {family}")
    return {'passed': len(checks) - len(failed), 'failed': failed, 'family': family,
            'seconds': round(time.perf_counter() - began, 1)}


STEP = 'GPTConfig dataset batch_size optimizer grad_clip rounds device dtype compile seed'  # for a timed one
INSTRUMENTS = {
    # first word of the command line: (function; how many words may follow; the settings it reads, GPTConfig
    # and train.py for all of theirs). The function takes this file's settings, the fields of GPTConfig that
    # are given (compare: the command line) and those words, and returns the numbers that --json asks for
    'train': (measure_train, 0, f'{STEP} init_from vs steps'),
    'decode': (measure_decode, 0, 'GPTConfig init_from vs dataset batch_size prompt_len max_new_tokens '
                                    'quantize speculate operators rounds device dtype compile seed'),
    'params': (measure_params, 0, 'GPTConfig init_from dataset dtype'),
    'eval': (measure_eval, 1, 'GPTConfig init_from dataset batch_size lengths quantize device dtype'),
    'cost': (measure_cost, 0, f'{STEP} lengths max_new_tokens'),
    'compare': (compare, 1, 'train.py GPTConfig variants seeds seed match by'),
    'plot': (plot, math.inf, 'by'),
    'check': (check, 1, 'GPTConfig init_from dataset device'),
}


def check_command(what, words, args):
    """Raises ValueError or OSError for words and flags that an instrument does not read. Config files serve
    several scripts and instruments, so what they set is not looked at."""
    if what not in INSTRUMENTS:
        raise ValueError(f"{what!r} is none of {', '.join(INSTRUMENTS)}: say first what to do, as in "
                         "python bench.py train config/small.py")
    _, most, reads = INSTRUMENTS[what]
    if len(words) > most:
        raise ValueError(f"{what} cannot use {words[most]!r}: settings are --key=value, config "
                         "files end in .py")
    known = {*reads.split(), 'json'}
    if 'GPTConfig' in known:
        known |= GPTConfig.__dataclass_fields__.keys()
    if 'train.py' in known:
        known |= train.config.keys()
    flags = {flag_name(arg): arg for arg in args if arg.startswith('-')}
    for name, arg in flags.items():
        if name not in known:
            raise ValueError(f"{arg}: {what} has no use for it; it reads {reads}")
    is_loaded = what in ('train', 'decode', 'params', 'check') and ('init_from' in flags or words)
    if 'dataset' in flags and is_loaded:
        raise ValueError(f"{flags['dataset']}: the vocabulary is that of the model that is loaded; leave it "
                         "out")
    if 'dataset' in flags and what != 'eval':
        Bins(train.data_folder(flags['dataset'].partition('=')[2]), 'train')  # or say that it is missing


def check_settings(s):
    """Raises ValueError for the first setting that is no choice, or too low. s: this file's settings."""
    if s['optimizer'] not in train.OPTIMIZERS:
        raise ValueError(f"optimizer={s['optimizer']!r} is none of {', '.join(train.OPTIMIZERS)}")
    if s['compile'] not in (True, False, 'auto'):
        raise ValueError(f"compile={s['compile']!r} is none of True, False, auto")
    if s['match'] not in (None, 'none', 'params', 'active', 'time'):
        raise ValueError(f"match={s['match']!r} is none of none, params, active, time")
    if s['quantize'] not in ('', 'int8'):
        raise ValueError(f"quantize={s['quantize']!r} must be int8 or ''")
    if s['by'] not in AXES:
        raise ValueError(f"by={s['by']!r} is none of {', '.join(AXES)}")
    lowest = dict(batch_size=1, prompt_len=1, max_new_tokens=2, speculate=1, steps=1, rounds=1, grad_clip=0,
                  seed=0, seeds=1)
    for name, low in lowest.items():
        if s[name] is not None and not s[name] >= low:  # nan is not
            raise ValueError(f"{name}={s[name]} must be at least {low}")
    if s['lengths'] is not None and not (s['lengths'] and all(
            type(length) is int and length > 0 for length in s['lengths'])):
        raise ValueError(f"lengths={s['lengths']} must be a list of whole numbers from 1 on")
    if s['seed'] >= 2**63:
        raise ValueError(f"seed={s['seed']} must be below 2**63")


if __name__ == '__main__':
    check_settings(config)
    what, more = words[0] if words else '', words[1:]
    args = [arg for arg in sys.argv[1:] if arg not in words]
    check_command(what, more, args)
    measure, _, reads = INSTRUMENTS[what]
    numbers = measure(config, args if 'train.py' in reads else model_args, more)
    line = dumps({'what': what, **numbers, 'torch': torch.__version__})
    if json is True:
        print(line)
    elif json:
        with open(json, 'a', encoding='utf-8') as f:
            print(line, file=f)
    if numbers.get('failed'):
        sys.exit(1)

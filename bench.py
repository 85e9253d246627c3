"""
Measures how fast a model is and how much memory it needs.

    python bench.py train config/gpt2.py --n_layer=4 --n_head=4 --n_embd=128 --vs=../nanoGPT
    python bench.py params config/qwen3_8b.py --contexts=[4096,131072]  # parameters, FLOPs, KV cache
    python bench.py decode --init_from=Qwen/Qwen3-0.6B --compile=True --vs=transformers --quantize=int8

--vs alternately runs flatgpt and another implementation: transformers (uncompiled, with the same weights),
or a clone of nanoGPT (with the same shape).
"""
import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import re
import runpy
import sys
import tempfile
import time
from json import dumps

from configurator import (
    UserError,
    check_effects,
    check_values,
    compile_model,
    configure,
    naming,
    package,
    peak_flops,
    peak_mb,
    plain,
    resolve_compile,
    runtime,
    torch_dtype,
    use_parts,
)

init_from = 'scratch'             # scratch (random weights), or as in sample.py
dataset = ''                      # sets a new model's vocabulary
json: bool | str = False          # True: also print JSON; a path: append to that file
dtype = 'auto'                    # float32, bfloat16, float16; auto: the fastest here (params: bfloat16)
# train and decode [if command in ('train', 'decode')]
device = 'auto'                   # as in train.py
batch_size: int | None = None     # sequences [>= 1]; None: 12 in train, 1 in decode. Only train uses a
                                  # config file's batch_size
vs = ''                           # transformers, or (only train) nanoGPT's folder
rounds = 5                        # how often each model is timed [>= 1]
compile: bool | str = 'auto'      # auto: only for train, if possible [in (True, False, 'auto')]
seed = 1337                       # seed of weights and tokens [< 2**63]
# train [if command == 'train']
steps = 10                        # steps per round [>= 1]
gradient_accumulation_steps = 1   # micro-batches per step [>= 1]
optimizer = 'adamw'               # adamw, muon [in train.OPTIMIZERS]
# decode [if command == 'decode']
prompt_len = 32                   # tokens of the prompt [>= 1]
max_new_tokens = 200              # tokens generated [>= 2]
quantize = ''                     # int8, as in sample.py [in ('', 'int8')]
# params [if command == 'params']
contexts: list[int] | None = None  # lengths of prompts, in tokens [>= 1]
settings = configure(globals(), 'GPTConfig', words=1, default_file='config/default.py')
config, model_args, words, given, *_ = settings

import numpy as np
import torch

import sample
import train
from model import (
    GPT,
    LOOKUP_GROUPS,
    GPTConfig,
    account,
    cost,
    flops_per_token,
    hidden_init,
    mixing_flops,
    num_params,
)
from prepare import Bins, data_folder, is_prepared, read_meta

# timing -----------------------------------------------------------------------------------------------------

def synchronize():
    """Waits for the accelerator, if any."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def seconds_each(items):
    """Seconds per item of an iterator: (items,)."""
    stamps = [time.perf_counter()]
    for _ in items:
        stamps.append(time.perf_counter())
    return np.diff(stamps)


def timed(calls, steps, counts=(1,)):
    """Returns a function -> (steps,) seconds: per step, the sum of the calls' times, weighted by `counts`."""
    def side():
        for f in calls:
            f()
        synchronize()
        return seconds_each((f(), synchronize()) for f in calls * steps).reshape(steps, -1) @ counts
    return side


def take_turns(sides, rounds):
    """Calls functions alternately. sides: {name: function that returns seconds} -> {name: (rounds, ...)}."""
    turns = [{name: side() for name, side in sides.items()} for _ in range(1 + rounds)]
    return {name: np.array([turn[name] for turn in turns[1:]]) for name in sides}  # turns[0] is a warm-up


def print_table(title, heads, rows):
    """rows: name -> one text per column."""
    rows = {title: heads} | rows
    name_width = max(map(len, rows))
    widths = [max(map(len, column)) for column in zip(*rows.values())]
    print()
    for name, cells in rows.items():
        print(f"{name:<{name_width}}" + ''.join(f"  {cell:>{n}}" for cell, n in zip(cells, widths)))


def report(model, machine, times, tokens):
    """Prints and returns speeds. times: name -> (rounds, steps) seconds; tokens: name -> tokens per step."""
    rows = {}
    times_faster = {}
    memory = peak_mb(machine.device)
    ours = np.median(times['flatgpt'], axis=1) / tokens['flatgpt']  # seconds per token
    for name, t in times.items():
        low, ms, high = np.percentile(t, [10, 50, 90]) * 1e3
        ratios = np.median(t, axis=1) / tokens[name] / ours
        times_faster[name] = np.median(ratios)
        rows[name] = [f"{ms:,.2f}", f"{low:,.2f} to {high:,.2f}", f"{tokens[name] / ms * 1e3:,.1f}",
                      f"{times_faster[name]:.2f} ({ratios.min():.2f} to {ratios.max():.2f})"]
    print_table('', ['median ms per step', '10th to 90th percentile', 'tokens/s',
                     'speed of flatgpt relative to this row (range)'], rows)
    print(f"peak memory: {f'{memory:,.0f} MB' if memory else 'n/a'}")
    ms = np.median(times['flatgpt']) * 1e3
    return {'tok_per_s': tokens['flatgpt'] / ms * 1e3, 'ms': ms, 'times_faster': times_faster,
            'device': machine.device, 'dtype': plain(machine.dtype),
            'params': num_params(model), 'peak_mb': memory}


def json_output(where):
    """Opens the output of --json (stdout or a file) before the measurement."""
    return sys.stdout if where is True else open(where, 'a', encoding='utf-8') if where else None


def print_json(file, **numbers):
    """Prints the numbers as JSON. file: from json_output."""
    if file:
        print(dumps({'command': sys.argv, **numbers, 'torch': torch.__version__}), file=file, flush=True)


# models -----------------------------------------------------------------------------------------------------

def named_model(config, model_args, device, dtype=torch.float32):
    """Loads a checkpoint to the CPU, or makes a model on the device."""
    if config['init_from'] != 'scratch':
        return train.load_to_train(config['init_from'], 'out', model_args, dtype=dtype)[0]
    folder = data_folder(config['dataset'])
    if is_prepared(folder):
        model_args = {'vocab_size': read_meta(folder)['vocab_size']} | model_args
    torch.set_default_dtype(dtype)
    with torch.device(device), naming(model_args):
        model = GPT(GPTConfig(**model_args))
    torch.set_default_dtype(torch.float32)
    return model


def cache_bytes(model, lengths, dtype):
    """{length: bytes of a sequence's KV cache and states}, excluding the slot for padding."""
    with torch.device('meta'):
        # a cache cannot be longer than block_size
        model = GPT(dataclasses.replace(model.config, block_size=max(lengths)))
    model.compute_dtype = lambda: dtype  # as under autocast, which a meta device lacks
    caches = {length: model.make_cache(1, length) for length in lengths}
    return {length: sum(x[:, :, :-1].nbytes for x in itertools.chain(*cache.slots)) +
            sum(x.nbytes for x in itertools.chain(*cache.states)) for length, cache in caches.items()}


def model_and_machine(config, model_args, to_train=True, bound_by_memory=False):
    """The settings' model and runtime. Weights have the compute dtype, or float32 if to_train."""
    machine = runtime(config['device'], config['dtype'], config['seed'], bound_by_memory=bound_by_memory)
    model = named_model(config, model_args, machine.device, torch.float32 if to_train else machine.dtype)
    model.to(machine.device)
    for w in model.parameters():
        if w.ndim > 1 and not w.any():
            hidden_init(w)
    print(f"{model.config.n_layer} layers, {model.config.n_embd} wide, {num_params(model):,} parameters, "
          f"context {model.config.block_size}")
    return model, machine


def load_other(vs, model):
    """{name: model to compare with}"""
    weight = model.wte.weight
    if vs == 'transformers':
        from zoo.hub import save_pretrained
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(model, None, folder)
            return {vs: package('transformers', '--vs needs', 'transformers').AutoModelForCausalLM
                    .from_pretrained(folder, dtype=weight.dtype).to(weight.device)}
    if vs:
        nanogpt = runpy.run_path(f'{vs}/model.py')
        shape = {name: getattr(model.config, name)
                 for name in ('n_layer', 'n_head', 'n_embd', 'block_size', 'vocab_size', 'dropout')}
        return {'nanoGPT': nanogpt['GPT'](nanogpt['GPTConfig'](bias=False, **shape)).to(weight.device)}
    return {}


@contextlib.contextmanager
def precision_of_others(device):
    """Computes float32 matmuls as nanoGPT does: with TF32 except on CPUs."""
    ours = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest' if device == 'cpu' else 'high')
    yield
    torch.set_float32_matmul_precision(ours)


# how large --------------------------------------------------------------------------------------------------

def measure_params(config, model_args):
    """Prints a model's parameters, FLOPs and cache size."""
    dtype = torch_dtype('bfloat16' if config['dtype'] == 'auto' else config['dtype'])
    model = named_model(config, model_args, 'meta')
    n_params, n_active, flops = print_counts(
        'module', ['parameters', 'active parameters', 'training FLOPs per token'], by_module(model), {})
    kinds = {}
    length = model.config.block_size
    for number, block in enumerate(model.h):
        kind = *((name, w.shape) for name, w in block.named_parameters()), block.attn.flops(length)
        kinds.setdefault(kind, []).append(number)
    for numbers in kinds.values():
        first = numbers[0]
        print_parameters(model, f"layer {first}, one of {len(numbers)} equal layers",
                         model.h[first].named_parameters(f'h.{first}'), model.h[first].attn)
    print_parameters(model, 'outside the layers', [
        (name, w) for name, w in model.named_parameters() if not name.startswith('h.')])
    contexts = config['contexts'] or []
    n_bytes = cache_bytes(model, [*contexts, length - 1, length], dtype)
    if contexts:
        mixing = mixing_flops(model, length)
        print_table('prompt tokens', ['TFLOPs with weights', 'TFLOPs of attention', 'KV cache, GB'], {
            f'{n:,}': [f"{count:,.4g}" for count in (
                (flops - mixing) / 3e12 * n, mixing_flops(model, n) / 3e12 * n,
                n_bytes[n] / 1e9)]
            for n in contexts})
    cache = n_bytes[length]
    per_token = cache - n_bytes[length - 1]
    print(f"\nin {plain(dtype)}: {n_params * dtype.itemsize / 1e9:,.2f} GB of weights; the KV cache needs "
          f"{per_token:,} bytes per token, {cache / 1e9:,.2f} GB at {length:,} tokens")
    inner = sum(w.numel() for name, w in model.named_parameters()
                if model.tags[name].group not in LOOKUP_GROUPS)
    return {'params': n_params, 'active_params': n_active, 'inner_params': inner, 'flops_per_token': flops,
            'cache_bytes_per_token': per_token, 'cache_bytes': cache, 'dtype': plain(dtype)}


def by_module(model):
    """Sums account(model) by module: h.3.attn.c_attn.weight counts for attn."""
    modules = collections.defaultdict(list)
    for name, row in account(model).items():
        module = re.match(r'(?:h\.\d+\.)?(.+?)(?:\.[^.]+){0,2}$', name)[1]
        modules['attn, without weights' if name == 'mixing' else module].append(row)
    return {module: tuple(map(sum, zip(*rows))) for module, rows in modules.items()}


def print_counts(title, heads, counts, texts):
    """Prints one row per name: its texts, counts and shares of the sum."""
    def total(pattern):
        return [sum(column) for column in zip(*(
            numbers for name, numbers in counts.items() if re.search(pattern, name)))]
    sums = total('')
    rows = counts | {'all attention': total('attn'), 'all MLP': total('mlp'),
                     'all norms': total('ln_|norm'), 'sum': sums}
    blank = [''] * (len(heads) - len(sums))
    print_table(title, heads, {
        name: texts.get(name, blank) + [f"{n:,} {n / (whole or 1):6.1%}" for n, whole in zip(numbers, sums)]
        for name, numbers in rows.items() if numbers})
    return sums


def print_parameters(model, title, params, mixer=None):
    """Prints one row per parameter (if fused, per projection) and per product without weights."""
    counts = {}
    texts = {}
    length = model.config.block_size
    for full_name, w in params:
        init, group, fused = model.tags[full_name]
        how = [getattr(init, 'func', init).__name__]  # init may be a functools.partial
        how += [f'{option}={value:.4g}' for option, value in getattr(init, 'keywords', {}).items()]
        n, _, flops = cost(model, full_name, w)
        name = re.sub(r'^h\.\d+\.', '', full_name)
        shapes = {name: w.shape}
        if fused and len(fused) > 1:
            names = model.get_submodule(full_name.rpartition('.')[0]).names.split()
            shapes = {f'{name} {part}': (*w.shape[:-2], rows, w.shape[-1])
                      for part, rows in zip(names, fused)}
        for label, shape in shapes.items():
            share = math.prod(shape) / w.numel()
            counts[label] = [round(x * share) for x in (n, flops // 3, flops)]
            texts[label] = [' x '.join(map(str, shape)), ' '.join(how), group]
    if hasattr(mixer, 'head_widths'):
        attended = mixer.n_head * mixer.n_keys(length)  # scores per token
        for name, width in zip(('attn scores', 'attn weighted sum'), mixer.head_widths):
            counts[name] = [0, 2 * attended * width, 6 * attended * width]
        counts['attn softmax'] = [0, 5 * attended, 0]
        if further := mixer.flops(length) - 6 * attended * sum(mixer.head_widths):
            counts['attn, further'] = [0, further // 3, further]
    elif mixer:
        counts['attn, without weights'] = [0, mixer.flops(length) // 3, mixer.flops(length)]
    elif model.lm_head is None:
        n = model.wte.weight.numel()
        counts['head (is wte.weight)'] = [0, 2 * n, 6 * n]
    print_counts(title, ['shape', 'initial value', 'optimizer group', 'parameters', 'forward FLOPs per token',
                         'training FLOPs per token'], counts, texts)


# how fast ---------------------------------------------------------------------------------------------------

def our_step(model, forward, batch, machine, config):
    """Two functions: one computes a micro-batch's gradients, the other updates weights."""
    run = train.Run(model, train.config | config, machine)
    run.forward = forward
    row = {}

    def gradients():
        row.update(train.gradients(run, [train.Batch(*batch)]))

    def update():
        train.update(run, row['load'])
    return gradients, update


def other_step(other, batch, machine):
    """The two functions of our_step, for transformers or nanoGPT."""
    x, y = batch
    is_nanogpt = hasattr(other, 'configure_optimizers')
    on_cpu = machine.device == 'cpu'
    if is_nanogpt:
        optimizer = other.configure_optimizers(0.1, 1e-4, (0.9, 0.95), machine.device_type)
        forward = other if on_cpu else torch.compile(other)
    else:
        optimizer = torch.optim.AdamW(other.parameters(), fused=True)
    autocast = contextlib.nullcontext if is_nanogpt and on_cpu else machine.autocast

    def gradients():
        with precision_of_others(machine.device):
            with autocast():
                loss = forward(x, y)[1] if is_nanogpt else other(input_ids=x, labels=x).loss
            loss.backward()

    def update():
        torch.nn.utils.clip_grad_norm_(other.parameters(), train.config['grad_clip'])
        optimizer.step()
        optimizer.zero_grad()
    return gradients, update


def measure_train(config, model_args):
    """Times training steps."""
    model, machine = model_and_machine(config, model_args)
    device = machine.device
    config = config | {'batch_size': config['batch_size'] or 12}
    batch = torch.randint(model.config.vocab_size, (2, config['batch_size'], model.config.block_size),
                          device=device)
    compile = resolve_compile(config['compile'], device, math.inf)
    forward = model
    if compile:
        print('compiling: about half a minute')
        forward = compile_model(model, device)
    steps = {'flatgpt': our_step(model, forward, batch, machine, config)}
    for name, other in load_other(config['vs'], model).items():
        steps[name] = other_step(other.train(), batch, machine)
    accumulation = config['gradient_accumulation_steps']
    # first and later micro-batches, which differ in time: only later ones add to existing gradients
    counts = [1, accumulation - 1][:accumulation]
    times = take_turns({name: timed([gradients] * len(counts) + [update], config['steps'], [*counts, 1])
                        for name, (gradients, update) in steps.items()}, config['rounds'])
    numbers = report(model, machine, times, dict.fromkeys(times, accumulation * batch[0].numel()))

    def only_forward():
        with machine.autocast():
            forward(*batch)
    # milliseconds of a step's parts, with one micro-batch
    parts = np.median(timed([only_forward, *steps['flatgpt']], config['steps'], np.eye(3))(), axis=0) * 1e3
    print(f"forward {parts[0]:,.2f} ms, backward {parts[1] - parts[0]:,.2f} ms, update {parts[2]:,.2f} ms")
    flops = flops_per_token(model) * numbers['tok_per_s']
    peak = peak_flops(device, machine.dtype)
    n = 1024
    seconds = 0.0
    while n < 8192 and seconds < 0.02:
        n *= 2
        square = torch.randn(n, n, device=device).to(machine.dtype)
        seconds = timed([lambda: square @ square], 5)().min()  # noqa: B023 (called at once)
    matmul = 2 * n**3 / seconds
    print(f"computing speed: {flops / 1e9:,.0f} GFLOP/s, {flops / matmul:.1%} of what a large matrix product "
          f"reaches here ({matmul / 1e9:,.0f})")
    return numbers | {'compile': compile, 'mfu': flops / peak if peak else None,
                      'matmul_share': flops / matmul}


@torch.no_grad()
def time_other(model, prompts, new):
    """Seconds of each step of transformers' generate, except the first."""
    idx = torch.tensor(prompts, device=model.device)
    stamps = []

    def clock(*_):
        synchronize()
        stamps.append(time.perf_counter())
    hook = model.register_forward_hook(clock)
    with precision_of_others(str(idx.device)):
        model.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=new, min_new_tokens=new,
                       do_sample=True, temperature=0.8, top_k=200, pad_token_id=0)
    hook.remove()
    return np.diff(stamps)


def measure_decode(config, model_args):
    """Times decoding steps."""
    compile = config['compile'] is True
    new = config['max_new_tokens']
    model, machine = model_and_machine(config, model_args, to_train=False,
                                       bound_by_memory=compile or config['quantize'])
    model.eval()
    batch_size = config['batch_size'] or 1
    if config['prompt_len'] + new > model.config.block_size:
        raise UserError(f"prompt_len={config['prompt_len']} and max_new_tokens={new} exceed "
                        f"block_size={model.config.block_size}: lower them")
    prompts = torch.randint(model.config.vocab_size, (batch_size, config['prompt_len'])).tolist()

    def ours(prompts):
        events = sample.generate(model, prompts, new, temperature=0.8, top_k=200, compile=compile)
        return seconds_each(token for one, token in events if one.number == 0 and token is not None)[1:]
    sides = {'flatgpt': lambda: ours(prompts)}
    for name, other in load_other(config['vs'], model).items():
        sides[name] = functools.partial(time_other, other.eval(), prompts, new)
    if batch_size > 1:
        sides['one sequence'] = lambda: ours(prompts[:1])
    if config['quantize']:
        from zoo.weights import quantize_weights
        quantize_weights(model, machine.dtype)
    if compile:
        print('compiling: a minute or more')
    times = take_turns(sides | {'prompt': timed([lambda: [*sample.generate(model, prompts, 1)]], 1)},
                       config['rounds'])
    prefill_ms = np.median(times.pop('prompt')) * 1e3
    print(f"prompt of {config['prompt_len']} tokens: {prefill_ms:.2f} ms")
    numbers = report(model, machine, times, dict.fromkeys(times, batch_size) | {'one sequence': 1})
    length = config['prompt_len'] + new // 2
    read = sum(w.nbytes for w in (*model.parameters(), *model.buffers()))
    read += batch_size * cache_bytes(model, [length], machine.dtype)[length]
    large = torch.ones(2**26, device=machine.device)
    bandwidth = large.nbytes / timed([large.sum], 40)().min()
    share = read * 1e3 / numbers['ms'] / bandwidth
    print(f"memory bandwidth: {share:.1%} of what the sum of a large tensor reaches here")
    return numbers | {'prefill_ms': prefill_ms, 'bandwidth_share': share}


# ------------------------------------------------------------------------------------------------------------

COMMANDS = {'train': measure_train, 'decode': measure_decode, 'params': measure_params}

if __name__ == '__main__':
    use_parts(settings, vars(train))
    command, = words or ['']
    if command not in COMMANDS:
        raise UserError(f"{command!r} is not a command: choose one of {', '.join(COMMANDS)}, as in "
                        "python bench.py train config/small.py")
    with naming(model_args):
        fields = vars(GPTConfig(**model_args)) if init_from == 'scratch' else {}
    check_values(settings, config, globals())
    check_effects(settings, fields | config, globals())
    if given.get('dataset') == 'flags':
        Bins(data_folder(dataset), 'val')  # raises FileNotFoundError if not prepared
    if command != 'train' and given.get('batch_size') != 'flags':
        config['batch_size'] = None
    print_json(json_output(json), **COMMANDS[command](config, model_args))

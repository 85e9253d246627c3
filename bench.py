"""
Measures: how fast, how big, how much memory, how good.

    python bench.py train config/shakespeare_char.py         # training steps on random tokens
    python bench.py params config/mixtral_8x7b.py            # parameters, FLOPs and cache, by part; any size
    python bench.py decode --prompt_len=32                   # a 124M model, random weights, token by token
    python bench.py decode --init_from=Qwen/Qwen3-0.6B --compile=True --vs=transformers --quantize=int8
    python bench.py decode config/gpt2.py --batch_size=8     # beside one row alone; or --speculate=8
    python bench.py train --n_layer=4 --n_head=4 --n_embd=128 --block_size=64 --vs=../nanoGPT
    python bench.py eval --init_from=out                     # loss and bits per byte of all of val.bin
    python bench.py eval my.txt --init_from=out --lengths=[1,2,4]  # of a text, at times the trained length
    python bench.py eval hellaswag_val.jsonl --init_from=gpt2

--vs names a clone of nanoGPT: the same shape in its model.py, as it runs on this device, takes turns with
ours in the same process; to decode, --vs=transformers its generate with the same weights. --json=True prints
all numbers as a last line. Speeds are medians after a warm-up; the spread is between the 10th and 90th
percentile. Shares compare with what this machine reaches on one large matmul, and on one large sum, in the
same run.
"""
import contextlib
import functools
import importlib.util
import math
import os
import sys
import tempfile
import time
from json import dumps

from configurator import configure, runtime

# what
init_from = 'scratch'             # scratch (random weights), or as in train.py
vs = ''                           # folder of a nanoGPT clone to take turns with; decode: or transformers
batch_size: int | None = None     # sequences; None: train 12, decode 1, eval 256 MB of logits
dataset = ''                      # train: its vocabulary is used; eval: its val.bin, '': the checkpoint's own
lengths: list | None = None       # eval: contexts in times the trained one
prompt_len = 32                   # decode: tokens before
max_new_tokens = 200              # decode: tokens made
quantize = ''                     # decode, eval: int8, as in sample.py
speculate: int | None = None      # decode: tokens guessed at a time, of greedy text, as in sample.py
operators = False                 # decode: also which operators a step spends its time in
steps = 10                        # train: steps a turn; decode makes max_new_tokens a turn
rounds = 5                        # turns
json: bool | str = False          # True: the numbers as a last line too; or the file to add that line to
# as in train.py
optimizer = 'adamw'               # adamw, muon
grad_clip = 1.0                   # 0: no clipping
device = 'auto'                   # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'                    # float32, bfloat16, float16; auto: what the hardware is fast at
compile: bool | str = 'auto'      # torch.compile; auto: train where it works, decode not
seed = 1337                       # of weights and tokens
config, model_args, words = configure(globals(), 'GPTConfig', words=2)[:3]

import numpy as np
import torch

import hub
import train
from model import (
    GPT,
    GPTConfig,
    quantize_weights,
)
from prepare import Bins, ending, find_source, json_records, load_tokenizer, read_meta
from sample import Lookup, generate, speculate  # noqa: F811 (the setting of this name is in config)
from tokenizer import pieces


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
        rows = model.tags[f'h.{number}.{name}'].rows
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
    drafter = Lookup(config['speculate']) if greedy else None

    def ours(prompts, drafter=None):
        options = dict(temperature=0.0 if greedy else 0.8, top_k=200, seed=config['seed'], compile=compile)
        seconds = token_seconds(first_sample(speculate(model, prompts[0], new, drafter, **options) if drafter
                                             else generate(model, prompts, new, **options)))
        return seconds[1:].mean(keepdims=True) if greedy else seconds[1:]  # guesses come several at once
    sides = {'flatgpt': functools.partial(ours, prompts, drafter), **sides}
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
        drafter.n_accepted = drafter.n_drafted = 0
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
        numbers['guesses_right'] = round(drafter.n_accepted / max(1, drafter.n_drafted), 4)
        print(f"{drafter.n_accepted:,} of {drafter.n_drafted:,} draft tokens accepted")
    else:
        shares = read / np.median(times['flatgpt'], axis=1) / bandwidths
        numbers['bandwidth_share'] = round(float(np.median(shares)), 4)
    if config['operators']:
        print_operators(functools.partial(ours, prompts, drafter), new, machine.device_type)
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
    """The model that init_from names, its tokenizer and the rest of its checkpoint, as hub.load returns
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


def print_json(where, **numbers):
    """Prints the numbers as a last line if where is True, or adds the line to that file."""
    line = dumps({**numbers, 'torch': torch.__version__})
    if where is True:
        print(line)
    elif where:
        with open(where, 'a', encoding='utf-8') as f:
            print(line, file=f)


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
}


MOVED = {'check': 'check.py', 'compare': 'compare.py', 'plot': 'compare.py plot', 'cost': 'docs/cost.py'}


def check_command(what, words, args):
    """Raises ValueError or OSError for words and flags that an instrument does not read. Config files serve
    several scripts and instruments, so what they set is not looked at."""
    if what in MOVED:
        raise ValueError(f"{what} is a script of its own now: python {MOVED[what]} ...")
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
    flags = {arg.removeprefix('--').partition('=')[0]: arg for arg in args if arg.startswith('-')}
    for name, arg in flags.items():
        if name not in known:
            raise ValueError(f"{arg}: {what} has no use for it; it reads {reads}")
    is_loaded = what in ('train', 'decode', 'params') and 'init_from' in flags
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
    if s['quantize'] not in ('', 'int8'):
        raise ValueError(f"quantize={s['quantize']!r} must be int8 or ''")
    lowest = dict(batch_size=1, prompt_len=1, max_new_tokens=2, speculate=1, steps=1, rounds=1, grad_clip=0,
                  seed=0)
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
    numbers = INSTRUMENTS[what][0](config, model_args, more)
    print_json(json, what=what, **numbers)

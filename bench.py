"""
Measures: how fast, how big, how much memory, how good.

    python bench.py train config/shakespeare_char.py         # training steps on random tokens
    python bench.py train config/gpt2.py --n_layer=4 --n_head=4 --n_embd=128 --vs=../nanoGPT
    python bench.py train config/small.py --parts=True       # the time of a step by part of the model
    python bench.py params config/mixtral_8x7b.py            # parameters, their initial values, FLOPs, cache
    python bench.py params config/qwen3_8b.py --contexts=[4096,131072]  # what grows with n, n^2
    python bench.py decode config/gpt2.py --prompt_len=32    # a 124M model, random weights, token by token
    python bench.py decode --init_from=Qwen/Qwen3-0.6B --compile=True --vs=transformers --quantize=int8
    python bench.py decode config/gpt2.py --batch_size=8     # beside one row alone; or --speculate=8
    python bench.py eval --init_from=out                     # loss and bits per byte of all of val.bin
    python bench.py eval my.txt --init_from=out --lengths=[1,2,4]  # of a text, at multiples of the context
    python bench.py eval texts.jsonl --init_from=out         # of each {"text": ...}, by itself

--vs names a clone of nanoGPT, whose model.py at the same shape takes turns with ours in one process, or
transformers, with the same weights, uncompiled. Speeds are medians after a warm-up, shares are of the speed
of a large matmul, or sum, in the same run. --json=True prints the numbers too.
"""
import collections
import contextlib
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
    check_effects,
    check_values,
    compile_model,
    configure,
    package,
    peak_flops,
    peak_mb,
    plain,
    resolve_compile,
    runtime,
)

init_from = 'scratch'             # scratch (random weights), or as in train.py
dataset = ''                      # its vocabulary; eval: its val.bin, '': the checkpoint's own
json: bool | str = False          # True: the numbers as a last line too; or a file to add that line to
device = 'auto'                   # as in train.py: cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'                    # float32, bfloat16, float16; auto: what the hardware is fast at
# all but params [if command != 'params']
batch_size: int | None = None     # sequences [>= 1]; None: train 12, decode 1, eval 256 MB of logits (CUDA
                                  # 2 GB). Only train uses a config file's batch_size
# train and decode [if command in ('train', 'decode')]
vs = ''                           # nanoGPT's folder, or transformers [if not parts]
rounds = 5                        # turns [>= 1] [if not parts]
compile: bool | str = 'auto'      # auto: in train, if it works [in (True, False, 'auto')]
seed = 1337                       # of weights and tokens
# train [if command == 'train']
parts = False                     # the time of an uncompiled step by part of the model
steps = 10                        # steps per turn [>= 1]
gradient_accumulation_steps = 1   # micro-batches per step; two are timed [>= 1] [if not parts]
optimizer = 'adamw'               # adamw, muon [in train.OPTIMIZERS]
# decode [if command == 'decode']
prompt_len = 32                   # tokens of the prompt [>= 1]
max_new_tokens = 200              # tokens generated [>= 1]
speculate: int | None = None      # draft tokens at a time, of greedy text, as in sample.py
# decode and eval [if command in ('decode', 'eval')]
quantize = ''                     # int8, as in sample.py [in ('', 'int8')]
# eval [if command == 'eval']
lengths: list | None = None       # contexts, multiples of the trained one
# params [if command == 'params']
contexts: list | None = None      # lengths of prompts, in tokens
settings = configure(globals(), 'GPTConfig', words=1 + ('eval' in sys.argv), default_file='config/default.py')
config, model_args, words, given, _ = settings

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

import sample
import train
from model import GPT, GPTConfig, account, cost, flops_per_token, hidden_init, num_params
from prepare import (
    FORMATS,
    Bins,
    data_folder,
    ending,
    find_source,
    is_prepared,
    load_tokenizer,
    read_meta,
)
from tokenizer import pieces

# timing -----------------------------------------------------------------------------------------------------

def synchronize():
    """Waits for the accelerator; a CPU has nothing to wait for."""
    torch.get_device_module().synchronize()


def seconds_each(items):
    """Seconds that each item of an iterator takes: (items,)."""
    stamps = [time.perf_counter()]
    for _ in items:
        stamps.append(time.perf_counter())
    return np.diff(stamps)


def timed(calls, steps, counts=(1,)):
    """A side of take_turns: the seconds of steps, (steps,), as if each did every call `counts` times."""
    def side():
        for f in calls:  # another side has left the caches cold
            f()
        synchronize()
        return seconds_each((f(), synchronize()) for f in calls * steps).reshape(steps, -1) @ counts
    return side


def take_turns(sides, rounds):
    """Calls sides, name -> a function that returns seconds, by turns -> name: (rounds, ...) seconds."""
    turns = [{name: side() for name, side in sides.items()} for _ in range(1 + rounds)]
    return {name: np.array([turn[name] for turn in turns[1:]]) for name in sides}  # the first warms up


def print_table(title, heads, rows):
    """rows: name -> texts, one below each of heads."""
    rows = {title: heads} | rows
    first = max(map(len, rows))
    widths = [max(map(len, column)) for column in zip(*rows.values())]
    print()
    for name, cells in rows.items():
        print(f"{name:<{first}}" + ''.join(f"  {cell:>{width}}" for cell, width in zip(cells, widths)))


def report(model, machine, times, tokens):
    """Prints and returns the speeds of steps. times: of take_turns, 'flatgpt' among them; tokens: name ->
    tokens a step."""
    rows = {}
    times_faster = {}
    memory = peak_mb(machine.device)
    ours = np.median(times['flatgpt'], axis=1) / tokens['flatgpt']  # a token, of each turn
    for name, t in times.items():
        low, ms, high = np.percentile(t, [10, 50, 90]) * 1e3
        ratios = np.median(t, axis=1) / tokens[name] / ours
        times_faster[name] = float(np.median(ratios))
        rows[name] = [f"{ms:,.2f}", f"{low:,.2f} to {high:,.2f}", f"{tokens[name] / ms * 1e3:,.1f}",
                      f"{times_faster[name]:.2f} ({ratios.min():.2f} to {ratios.max():.2f})"]
    print_table('a step', ['ms', '10th to 90th percentile', 'tok/s', 'our speed to its'], rows)
    print(f"peak memory: {f'{memory:,.0f} MB' if memory else 'n/a'}")
    ms = float(np.median(times['flatgpt'])) * 1e3
    return {'tok_per_s': tokens['flatgpt'] / ms * 1e3, 'ms': ms, 'times_faster': times_faster,
            'device': machine.device, 'dtype': plain(machine.dtype),
            'params': num_params(model), 'peak_mb': memory}


def print_json(where, **numbers):
    """Prints the numbers and their command as a line if where is True, or adds it to that file."""
    line = dumps({'command': sys.argv, **numbers, 'torch': torch.__version__})
    if where is True:
        print(line)
    elif where:
        with open(where, 'a', encoding='utf-8') as f:
            print(line, file=f)


# models -----------------------------------------------------------------------------------------------------

def named_model(config, model_args, device, dtype=torch.float32):
    """The model that the settings name, on the CPU; a new one on the device, with the vocabulary of
    config['dataset'] if that is prepared and model_args has no other."""
    if config['init_from'] != 'scratch':
        return train.load_to_train(config['init_from'], 'out', model_args, dtype=dtype)[0]
    folder = data_folder(config['dataset'])
    if is_prepared(folder):
        model_args = {'vocab_size': read_meta(folder)['vocab_size']} | model_args
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return GPT(GPTConfig(**model_args))
    finally:
        torch.set_default_dtype(torch.float32)


def cache_bytes(model, length, dtype):
    """Bytes that the cache of one row takes after `length` tokens."""
    slots = sum(heads * width * min(length, mixer.window or length)
                for mixer in model.mixers for heads, width in mixer.slots or ())
    return slots * dtype.itemsize + sum(math.prod(shape) * (own or dtype).itemsize
                                        for mixer in model.mixers for shape, own in mixer.states)


def cache_per_token(model, dtype):
    """Bytes that one more token adds to the cache of a row."""
    return cache_bytes(model, 1, dtype) - cache_bytes(model, 0, dtype)


def model_and_machine(config, model_args, to_train=True, bound_by_memory=False):
    """named_model and its machine: float32 to train, else made in the compute dtype."""
    machine = runtime(config['device'], config['dtype'], config['seed'], bound_by_memory=bound_by_memory)
    model = named_model(config, model_args, machine.device, torch.float32 if to_train else machine.dtype)
    model.to(machine.device)
    for w in model.parameters():  # branches start with zeros, which training leaves
        if w.ndim > 1 and not w.any():
            hidden_init(w)
    print(f"{model.config.n_layer} layers, {model.config.n_embd} wide, {num_params(model):,} parameters, "
          f"context {model.config.block_size}")
    return model, machine


def load_other(vs, model):
    """{name: model} of --vs: transformers' with our weights, or a nanoGPT clone's at our shape."""
    weight = model.wte.weight
    if vs == 'transformers':
        from zoo.hub import save_pretrained
        with tempfile.TemporaryDirectory() as folder:
            save_pretrained(model, None, folder)
            return {vs: package('transformers', '--vs needs', 'transformers').AutoModelForCausalLM
                    .from_pretrained(folder, dtype=weight.dtype).to(weight.device)}
    if vs:
        theirs = runpy.run_path(f'{vs}/model.py')
        shape = {name: getattr(model.config, name)
                 for name in ('n_layer', 'n_head', 'n_embd', 'block_size', 'vocab_size', 'dropout')}
        return {'nanoGPT': theirs['GPT'](theirs['GPTConfig'](bias=False, **shape)).to(weight.device)}
    return {}


@contextlib.contextmanager
def precision_of_others(device):
    """Float32 matmuls as others run them: by torch's default on CPUs, elsewhere by TF32, as in nanoGPT."""
    ours = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('highest' if device == 'cpu' else 'high')
    yield
    torch.set_float32_matmul_precision(ours)


# how big ----------------------------------------------------------------------------------------------------

def measure_params(config, model_args):
    """The model's parts and their shares, without allocating them."""
    # auto: the dtype that weights and caches are published in
    dtype = torch.bfloat16 if config['dtype'] == 'auto' else getattr(torch, config['dtype'])
    model = named_model(config, model_args, 'meta')
    n_params, n_active, flops = print_counts(
        '', ['parameters', 'active', 'training FLOPs a token'], by_part(model), {}, {})
    kinds = {}
    length = model.config.block_size
    for number, block in enumerate(model.h):  # alike: the same names, shapes and products
        kind = *((name, w.shape) for name, w in block.named_parameters()), block.attn.flops(length)
        kinds.setdefault(kind, []).append(number)
    for numbers in kinds.values():
        first = numbers[0]
        print_parameters(model, f"layer {first}, one of {len(numbers)} alike",
                         model.h[first].named_parameters(f'h.{first}'), model.h[first].attn)
    print_parameters(model, 'outside of layers', [
        (name, w) for name, w in model.named_parameters() if not name.startswith('h.')])
    if config['contexts']:
        print_contexts(model, config['contexts'], flops, dtype)
    each = cache_per_token(model, dtype)
    cache = cache_bytes(model, length, dtype)
    print(f"\nin {plain(dtype)}: {n_params * dtype.itemsize / 1e9:,.2f} GB of weights; the cache "
          f"takes {each:,} bytes a token, {cache / 1e9:,.2f} GB at {length:,} tokens")
    return {'params': n_params, 'active_params': n_active, 'flops_per_token': flops,
            'cache_bytes_per_token': each, 'cache_bytes': cache, 'dtype': plain(dtype)}


def by_part(model):
    """model.account's rows, added up by module; a layer's without its number."""
    parts = collections.defaultdict(list)
    for name, row in account(model).items():
        # attn of h.3.attn.c_attn.weight
        parts[re.match(r'(?:h\.\d+\.)?(.+?)(?:\.[^.]+){0,2}$', name)[1]].append(row)
    return {part: tuple(map(sum, zip(*rows))) for part, rows in parts.items()}


def print_counts(title, heads, counts, texts, groups):
    """Prints a row for each name of counts: its texts, if any, and its numbers, each with its share of the
    sum; then the sums, which it returns, and those of groups, {name: pattern of rows' names}."""
    def total(pattern):
        return [sum(column) for column in zip(*(
            numbers for name, numbers in counts.items() if re.search(pattern, name)))]
    sums = total('')
    rows = counts | {'sum': sums} | {f'of it {name}': total(pattern) for name, pattern in groups.items()}
    blank = [''] * (len(heads) - len(sums))
    print_table(title, heads, {
        name: texts.get(name, blank) + [f"{n:,} {n / (whole or 1):6.1%}" for n, whole in zip(numbers, sums)]
        for name, numbers in rows.items() if numbers})
    return sums


def print_parameters(model, title, params, mixer=None):
    """Prints shapes, tags, counts and FLOPs a token, forward and in training, of params, (name, parameter)
    each, a row for each projection and each product without weights."""
    counts = {}
    texts = {}
    length = model.config.block_size
    for full_name, w in params:
        init, group, fused = model.tags[full_name]
        shape = [*w.shape]
        names = ['']
        how = [getattr(init, 'func', init).__name__]  # of a partial function its options too
        how += [f'{option}={value:.4g}' for option, value in getattr(init, 'keywords', {}).items()]
        n, _, flops = cost(model, full_name, w)
        forward = flops // (3 if w.requires_grad else 2)
        name = re.sub(r'^h\.\d+\.', '', full_name)
        if fused and len(fused) > 1:
            names = model.get_submodule(full_name.rpartition('.')[0]).names.split()
        for part, rows in zip(names, fused or [1]):
            share = rows / sum(fused or [1])
            shape[-2:-1] = [rows] if part else shape[-2:-1]
            counts[f'{name} {part}'] = [round(x * share) for x in (n, forward, flops)]
            texts[f'{name} {part}'] = [' x '.join(map(str, shape)), ' '.join(how), group]
    if hasattr(mixer, 'head_widths'):
        seen = mixer.n_head * min(length, mixer.window or length)  # scores of a token
        for name, width in zip(('attn scores', 'attn weighted sum'), mixer.head_widths):
            counts[name] = [0, 2 * seen * width, 6 * seen * width]
        counts['attn softmax'] = [0, 5 * seen, 0]  # largest, difference, exponential, sum, division
    elif mixer:
        counts['attn mixing'] = [0, mixer.flops(length) // 3, mixer.flops(length)]
    elif model.lm_head is None:
        counts['head, wte.weight again'] = [0, 2 * model.wte.weight.numel(), account(model)['head'][2]]
    groups = {'attention': 'attn', 'MLP': 'mlp', 'norms': 'ln_|norm'} if mixer else {}
    print_counts(title, ['shape', 'initial value', 'group', 'parameters', 'forward FLOPs a token',
                         'training FLOPs a token'], counts, texts, groups)


def print_contexts(model, lengths, flops, dtype):
    """Prints what a prompt of each length takes: products with weights grow with it, attention with its
    square. flops: of training a token."""
    mixing = account(model)['mixing'][2]
    rows = {}
    for n in lengths:
        rows[f'{n:,}'] = [f"{count:,.4g}" for count in (
            (flops - mixing) / 3e12 * n, sum(mixer.flops(n) for mixer in model.mixers) / 3e12 * n,
            cache_bytes(model, n, dtype) / 1e9)]
    print_table('tokens', ['weights, TFLOP', 'without, TFLOP', 'cache, GB'], rows)


# how fast ---------------------------------------------------------------------------------------------------

def our_step(model, forward, batch, machine, config):
    """Two functions that do as train.py does: a micro-batch's gradients, an update."""
    run = train.Run(model, train.config | config, machine)
    load = None
    run.forward = forward

    def gradients():
        nonlocal load
        _, load = train.gradients(run, [(*batch, 1.0)])

    def update():
        train.update(run, load)
    return gradients, update


def their_step(other, batch, machine):
    """The same for transformers, or as nanoGPT's train.py does: on CPUs without autocast, uncompiled."""
    x, y = batch
    params = list(other.parameters())
    is_nanogpt = hasattr(other, 'configure_optimizers')
    on_cpu = machine.device == 'cpu'
    if is_nanogpt:
        optimizer = other.configure_optimizers(0.1, 1e-4, (0.9, 0.95), machine.device_type)
        forward = other if on_cpu else torch.compile(other)
    else:
        optimizer = torch.optim.AdamW(params, fused=True)
    autocast = contextlib.nullcontext if is_nanogpt and on_cpu else machine.autocast

    def gradients():
        with precision_of_others(machine.device):
            with autocast():
                loss = forward(x, y)[1] if is_nanogpt else other(input_ids=x, labels=x).loss
            loss.backward()

    def update():
        torch.nn.utils.clip_grad_norm_(params, train.config['grad_clip'])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return gradients, update


def measure_train(config, model_args):
    """The speed of training steps, in turns with others, and its share of a large matmul's."""
    model, machine = model_and_machine(config, model_args)
    device = machine.device
    batch_size = config['batch_size'] or 12
    batch = torch.randint(model.config.vocab_size, (2, batch_size, model.config.block_size), device=device)
    if config['parts']:
        return print_parts(model, *our_step(model, model, batch, machine, config), config)
    compile = resolve_compile(config['compile'], device, math.inf)
    forward = model
    if compile:
        print('compiling: about half a minute')
        forward = compile_model(model, device)
    steps = {'flatgpt': our_step(model, forward, batch, machine, config)}
    for name, other in load_other(config['vs'], model).items():
        steps[name] = their_step(other.train(), batch, machine)
    accumulation = config['gradient_accumulation_steps']
    # of the micro-batches that add to the gradients of the first, one is timed
    counts = [1, accumulation - 1][:accumulation]
    times = take_turns({name: timed([gradients] * len(counts) + [update], config['steps'], [*counts, 1])
                        for name, (gradients, update) in steps.items()}, config['rounds'])
    numbers = report(model, machine, times, dict.fromkeys(times, accumulation * batch[0].numel()))
    flops = flops_per_token(model) * numbers['tok_per_s']
    peak = peak_flops(device, machine.dtype)
    n = 8192 if 'cuda' in device else 2048
    square = torch.randn(n, n, device=device).to(machine.dtype)
    matmul = 2 * n**3 / timed([lambda: square @ square], 5)().min()
    print(f"matmul share: {flops / matmul:.1%}, {flops / 1e9:,.0f} of {matmul / 1e9:,.0f} GFLOP/s")
    return numbers | {'compile': compile, 'mfu': flops / peak if peak else None,
                      'matmul_share': flops / matmul}


PARTS = {  # of a step: pattern of modules' names; of an operator the innermost counts
    "attention's products": r'attn\.c_', 'norms': 'ln_|norm', 'MLP': 'mlp$', 'mixer, others': 'attn$',
    'embedding': '^w[pt]e$|^bigram$'}


def print_parts(model, gradients, update, config):
    """Prints the time of an uncompiled step by part. A backward operator counts for the part of its forward
    operator, whose number it has."""
    for name, module in model.named_modules():
        for part, pattern in PARTS.items():
            if re.search(pattern, name):
                scope = torch.profiler.record_function(part)
                module.register_forward_pre_hook(lambda *_, scope=scope: scope.__enter__() and None)
                module.register_forward_hook(lambda *_, scope=scope: scope.__exit__(None, None, None))
                break
    gradients()  # warms up
    with torch.profiler.profile() as profile:
        for _ in range(config['steps']):
            gradients()
            with torch.profiler.record_function('optimizer'):
                update()
    times = 'self_device_time_total' if model.wte.weight.is_cuda else 'self_cpu_time_total'  # us
    ms = collections.Counter()
    of_number = {}
    known = *PARTS, 'optimizer'
    products = itertools.cycle(['scores', 'weighted sum'])
    all_attend = all(hasattr(mixer, 'head_widths') for mixer in model.mixers)
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        above = event
        while above.cpu_parent and above.name not in known:
            above = above.cpu_parent
        part = above.name if above.name in known else 'head, loss, others'
        if part == 'mixer, others' and all_attend:
            if event.name in ('aten::bmm', 'aten::_softmax'):
                part = 'softmax' if 'softmax' in event.name else next(products)
            elif 'scaled_dot_product' in event.name:
                part = 'scores to weighted sum'
        if above.name.startswith('autograd'):
            part = of_number.get(above.sequence_nr, part)
        else:
            of_number[event.sequence_nr] = part
        ms[part] += getattr(event, times) / 1e3 / config['steps']
    print_table('a step', ['ms', ''], {
        part: [f"{n:,.1f}", f"{n / ms.total():.1%}"] for part, n in ms.most_common()})
    return {'parts_ms': ms}


@torch.no_grad()
def time_other(model, prompts, new):
    """Seconds of each step of another model's own generate, except the first."""
    idx = torch.tensor(prompts, device=next(model.parameters()).device)
    stamps = []

    def clock(*_):
        synchronize()
        stamps.append(time.perf_counter())
    hook = model.register_forward_hook(clock)
    with precision_of_others(str(idx.device)):
        if hasattr(model, 'configure_optimizers'):  # nanoGPT, without a cache: time a stretch in the middle
            count = max(8, new // 10)
            model.generate(F.pad(idx, (0, (new - count) // 2)), count, top_k=200)
        else:
            model.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=new, min_new_tokens=new,
                           do_sample=True, temperature=0.8, top_k=200, pad_token_id=0)
    hook.remove()
    return np.diff(stamps)


def measure_decode(config, model_args):
    """The speed of decoding steps, in turns with others, and its share of the memory's bandwidth."""
    compile = config['compile'] is True
    n_draft = config['speculate']
    new = config['max_new_tokens']
    model, machine = model_and_machine(config, model_args, to_train=False,
                                       bound_by_memory=compile or config['quantize'])
    model.eval()
    batch_size = 1 if n_draft else config['batch_size'] or 1
    drafter = n_draft and sample.Lookup(n_draft)
    prompts = torch.randint(model.config.vocab_size, (batch_size, config['prompt_len'])).tolist()

    def ours(prompts, drafter=None):
        events = sample.generate(model, prompts, new, temperature=0.0 if n_draft else 0.8, top_k=200,
                                 compile=compile, drafter=drafter)
        seconds = seconds_each(token for one, token in events if one.number == 0 and token is not None)[1:]
        return seconds.mean(keepdims=True) if n_draft else seconds  # accepted tokens come together
    sides = {'flatgpt': lambda: ours(prompts, drafter)}
    for name, other in load_other(config['vs'], model).items():
        sides[name] = functools.partial(time_other, other.eval(), prompts, new)
    if batch_size > 1:
        sides['one row'] = lambda: ours(prompts[:1])
    if n_draft:
        sides['no drafts'] = lambda: ours(prompts)
    if config['quantize']:
        from zoo.weights import quantize_weights
        quantize_weights(model, machine.dtype)
    if compile:
        print('compiling: a minute or two')
    times = take_turns(sides | {'prompt': timed([lambda: [*sample.generate(model, prompts, 1)]], 1)},
                       config['rounds'])
    numbers = {'prefill_ms': float(np.median(times.pop('prompt'))) * 1e3}
    print(f"{config['prompt_len']} tokens of prompt: {numbers['prefill_ms']:.2f} ms")
    numbers |= report(model, machine, times, {name: 1 if name == 'one row' else batch_size for name in times})
    if n_draft:
        share = numbers['accepted_share'] = drafter.n_accepted / max(1, drafter.n_drafted)
        print(f"accepted share: {share:.1%}")
    else:  # bytes that a step reads: all weights, and half of the cache
        length = min(model.config.block_size, config['prompt_len'] + new // 2)
        read = (sum(w.nbytes for w in (*model.parameters(), *model.buffers()))
                + batch_size * cache_bytes(model, length, machine.dtype))
        # sums of 256 MB; on CUDA, where that is too little to time, of 4 GB
        big = torch.ones(2**30 if 'cuda' in machine.device else 2**26, device=machine.device)
        bandwidth = big.nbytes / timed([big.sum], 40)().min()
        share = numbers['bandwidth_share'] = read * 1e3 / numbers['ms'] / bandwidth
        print(f"bandwidth share: {share:.1%}")
    return numbers


# how good ---------------------------------------------------------------------------------------------------

def measure_eval(config, model_args, path=None):
    """How well a model predicts a text, JSON lines of texts, or a val.bin."""
    dataset = config['dataset']
    lengths = config['lengths']
    # packed conversations do not see each other, as in train.py
    meta = read_meta(data_folder(dataset)) if dataset else None
    load = functools.partial(train.load_to_train, config['init_from'], 'out', meta=meta)
    model, tokenizer, rest = load(asked=model_args)
    base = model.config.block_size
    if lengths:
        model, *_ = load(asked=model_args | {'block_size': base * max(lengths)})
    machine = runtime(config['device'], config['dtype'], config['seed'])
    model.to(machine.device).eval()
    if config['quantize']:  # autocast leaves float16's residual stream in float32
        from zoo.weights import quantize_weights
        quantize_weights(model, torch.bfloat16 if machine.dtype is torch.bfloat16 else torch.float32)
    print(f"{rest['path']}: {num_params(model):,} parameters, context {base:,}")
    losses = functools.partial(row_losses, model, machine=machine, batch_size=config['batch_size'])
    if path and tokenizer is None:
        raise ValueError(rest['no_tokenizer'])
    name = path or data_folder(dataset or rest.get('config', {}).get('dataset'))
    if path:
        numbers = evaluate_text(name, *text_tokens(name, tokenizer), base, lengths, losses)
    else:  # a folder may say the length to which conversations are packed
        numbers = evaluate_text(name, *prepared_tokens(name, tokenizer, rest['path']),
                                read_meta(name)['block_size'] or base, lengths, losses)
    return {'path': rest['path'], 'params': num_params(model), 'data': name, 'device': machine.device,
            'dtype': plain(machine.dtype), **numbers}


def prepared_tokens(folder, tokenizer, path):
    """A prepared folder's val -> [(inputs, targets), (2, tokens)] of its files, masked targets -1; and the
    bytes of all targets, None without a tokenizer, which is that of the model at path."""
    bins = Bins(folder, 'val')
    if tokenizer and tokenizer.tokens != load_tokenizer(folder).tokens:
        raise ValueError(f"{folder} was prepared with another tokenizer than {path} has, so the same ids "
                         f"stand for different text: prepare it with --tokenizer={path}")
    documents = []
    for shard, mask in itertools.zip_longest(bins.shards, bins.masks):
        ids = shard.astype(np.int64)
        learned = True if mask is None else mask[1:]
        documents.append(np.stack([ids[:-1], np.where(learned, ids[1:], -1)]))
    targets = np.concatenate([targets for _, targets in documents])
    return documents, tokenizer and int(tokenizer.sizes[targets[targets != -1]].sum())


def text_tokens(path, tokenizer):
    """The same of text: one stream, of records one each. End of text stands before each document, so that its
    first token is a target too."""
    start = [*tokenizer.stop_tokens[:1], *tokenizer.bos]
    documents = []
    for document in find_source(path).documents():
        texts = [text for text, _ in pieces(document, tokenizer.can_cut)]
        documents.append(np.concatenate([start, *map(tokenizer.encode_array, texts)]).astype(np.int64))
    if ending(path) not in FORMATS:
        documents = [np.concatenate(documents)]
    n_bytes = sum(int(tokenizer.sizes[ids[1:]].sum()) for ids in documents)
    return [np.stack([ids[:-1], ids[1:]]) for ids in documents], n_bytes


@torch.no_grad()
def row_losses(model, rows, machine, batch_size):
    """Rows (inputs, targets) of up to T tokens -> two arrays (rows, T): the targets' losses in nats, float64,
    padded with 0, and which targets count, not -1."""
    x, y = (pad_sequence([*map(torch.as_tensor, side)], True, padding)
            for side, padding in zip(zip(*rows), (0, -1)))
    lengths = torch.tensor([len(inputs) for inputs, _ in rows])
    losses = torch.zeros(x.shape, dtype=torch.float64)
    at_once = 2**29 if 'cuda' in machine.device else 2**26
    n = batch_size or max(1, at_once // (model.config.vocab_size * x.shape[1]))
    for batch in lengths.argsort(descending=True).split(n):
        longest = lengths[batch[0]]
        inputs, targets = (side[batch, :longest].to(machine.device) for side in (x, y))
        with machine.autocast():
            logits = model(inputs).flatten(0, 1).float()
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction='none')
        losses[batch, :longest] = loss.view_as(targets).to(losses)
    return losses.numpy(), (y != -1).numpy()


def evaluate_text(name, documents, n_bytes, base, lengths, losses):
    """Prints and returns the loss, perplexity, mean losses from position 1, 2, 3, 5, 9... to the next, and
    bits per byte of documents (inputs, targets); of JSON lines returns the losses of each too. losses:
    row_losses of a model. Without lengths each target counts once, in rows of base tokens. Lengths are
    multiples of base: the last base tokens of each row count, the same ones at every length."""
    by_length = {}
    longest = base * max(lengths or [1])
    for length in (times * base for times in lengths or [1]):
        rows = [document[:, end - length:end] for document in documents
                for end in range(longest, document.shape[1] + (1 if lengths else base), base)]
        if not rows:
            raise ValueError(f"{name} has no text of {longest:,} tokens")
        by_row, is_target = losses(rows)
        sums = by_row.sum(0)
        counts = is_target.sum(0)
        n_targets = int(counts[-base:].sum())
        loss = float(sums[-base:].sum()) / n_targets
        starts = [0, *(2**i for i in range((len(sums) - 1).bit_length()))]
        by_position = np.add.reduceat(sums, starts) / np.add.reduceat(counts, starts).clip(1)
        by_length[str(length)] = {'loss': loss, 'perplexity': math.exp(min(loss, 99)), **{
            f'from token {start + 1} on': float(mean) for start, mean in zip(starts, by_position)}}
    print(f"{name}: {n_targets:,} targets in {len(rows):,} rows")
    print_table('tokens of context', [*by_length], {
        line: [f"{column[line]:.4f}" if line in column else '' for column in by_length.values()]
        for line in max(by_length.values(), key=len)})
    numbers = {'targets': n_targets, 'bytes': n_bytes}
    if lengths:
        return numbers | {'lengths': by_length}
    numbers |= by_length[str(base)]
    if n_bytes:
        bits = numbers['bits_per_byte'] = loss * n_targets / math.log(2) / n_bytes
        print(f"{bits:.4f} bits per byte, of {n_bytes:,}")
    if ending(name) == '.jsonl':
        texts = np.split(by_row[is_target], np.cumsum([document.shape[1] for document in documents])[:-1])
        numbers['each'] = [text.tolist() for text in texts]
    return numbers


# ------------------------------------------------------------------------------------------------------------

COMMANDS = {'train': measure_train, 'decode': measure_decode, 'params': measure_params, 'eval': measure_eval}

if __name__ == '__main__':
    command, *more = words or ['']
    if command not in COMMANDS:
        raise ValueError(f"{command!r} is none of {', '.join(COMMANDS)}: say first what to do, as in "
                         "python bench.py train config/small.py")
    fields = vars(GPTConfig(**model_args)) if init_from == 'scratch' else {}
    check_values(settings, config, globals())
    check_effects(settings, fields | config, globals())
    if command != 'train' and given.get('batch_size') != 'flags':
        config['batch_size'] = None
    if given.get('dataset') == 'flags':  # of a config file's, shapes suffice
        Bins(data_folder(dataset), 'val')  # raises FileNotFoundError unless it is prepared
    print_json(json, **COMMANDS[command](config, model_args, *more))

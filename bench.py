"""
Measures: how fast, how big, how much memory, and which choice is better.

    python bench.py train config/shakespeare_char.py         # training steps on random tokens
    python bench.py params config/mixtral_8x7b.py            # parameters, FLOPs and cache, by part; any size
    python bench.py decode --prompt_len=32                   # a 124M model, random weights, token by token
    python bench.py decode --init_from=out/ckpt.pt --dtype=bfloat16 --compile=True
    python bench.py train --n_layer=4 --n_head=4 --n_embd=128 --block_size=64 --vs=../nanoGPT

    python bench.py compare config/llama_small.py --variants="['', '--norm=layernorm', '--mlp=gelu']"
    python bench.py compare config/default.py --variants="['HEAD~1:', 'WORK:', 'WORK: --norm=layernorm']"
    python bench.py compare norms                            # a list of config/variants.py
    python bench.py plot out-a out-b --by=time               # the curves of any runs

compare trains variants of one run, each with the same seeds and data, by train.py, whose settings it takes
too. A variant is what is added to the command line, a git revision and a colon in front of it, or both; WORK
is the working tree as it stands. A run that is finished is used again, so a comparison can be stopped, and go
on with more seeds or variants. The difference to the first variant is paired by seed.

--vs names a clone of nanoGPT: the same shape in its model.py, as it runs on this device, takes turns with
ours in the same process. The last line is JSON. Speeds are medians after a warm-up; the spread is between the
10th and 90th percentile. Shares compare with what this machine reaches on one large matmul, and on one large
sum, in the same run.
"""
import ast
import contextlib
import csv
import dataclasses
import functools
import hashlib
import importlib.util
import io
import json
import math
import os
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
import zipfile
from pathlib import Path

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
variants: list | dict | None = None  # compare: what is added to the command line, or {name: that}
seeds: int | None = None          # compare: runs of each, by seed, seed + 1...; None: 3, or the list's
match: str | None = None          # compare: by d_ff params, active; by max_iters time; none; None: list's
by = 'iter'                       # compare, plot: iter, tokens, time
# as in train.py
optimizer = 'adamw'               # adamw, muon
grad_clip = 1.0                   # 0: no clipping
device = 'auto'                   # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'                    # float32, bfloat16, float16; auto: what the hardware is fast at
compile: bool | str = 'auto'      # torch.compile; auto: train where it works, decode not
seed = 1337                       # of weights and tokens
config, model_args, words, for_train = configure(globals(), 'GPTConfig', words=math.inf, also='train.py')

import numpy as np
import torch

import train
from model import GPT, GPTConfig
from prepare import Bins, read_meta
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


def known_vocabulary(config):
    """The vocabulary of config['dataset'], as model_args; {} where it is not prepared."""
    folder = train.data_folder(config['dataset'])
    if not config['dataset'] or not os.path.isdir(folder):
        return {}
    return {'vocab_size': read_meta(folder)['vocab_size']}


def model_and_machine(config, model_args):
    """The model that the settings name, random or from init_from, and what it runs on: (GPT, the machine as
    configurator.runtime has it, FLOP/s of a large matmul, bytes/s read)."""
    machine = runtime(config['device'], config['dtype'], config['seed'])
    if config['init_from'] == 'scratch':
        model = GPT(GPTConfig(**{**known_vocabulary(config), **model_args}))
    else:
        model, _, _ = train.load_to_train(config['init_from'], 'out', model_args)
    model.to(machine.device)
    for w in model.parameters():  # zero-initialised projections would make some kernels' work too easy
        if w.ndim > 1 and not w.any():
            torch.nn.init.normal_(w, std=0.02)
    print(f"{model.config.n_layer} layers, {model.config.n_embd} wide, {model.num_params():,} parameters, "
          f"context {model.config.block_size}")
    matmul, bandwidth = machine_peaks(machine.device, machine.dtype)
    print(f"this machine: {matmul / 1e9:,.0f} GFLOP/s in a large matmul, {bandwidth / 1e9:,.1f} GB/s reading")
    return model, machine, matmul, bandwidth


# size and speed ---------------------------------------------------------------------------------------------

def measure_params(config, model_args):
    """The model's parts and their shares, counted without allocating them; the last line is JSON."""
    if config['init_from'] != 'scratch':
        raise ValueError("params counts what the options give, not "
                         f"init_from={config['init_from']}: leave it out")
    dtypes = {'auto': torch.bfloat16, 'bfloat16': torch.bfloat16, 'float16': torch.float16,
              'float32': torch.float32}  # auto: what weights and caches are published in
    if config['dtype'] not in dtypes:
        raise ValueError(f"dtype={config['dtype']!r} is none of {', '.join(dtypes)}")
    dtype = dtypes[config['dtype']]
    # where nothing names a vocabulary, GPT-2's: GPTConfig's is that and the rows that pad it
    model_args = {'vocab_size': 50257, **known_vocabulary(config), **model_args}
    with torch.device('meta'):
        model = GPT(GPTConfig(**model_args))
    parts = model.account()
    total = [sum(row[i] for row in parts.values()) for i in range(3)]
    print(f"{'':<16}{'parameters':>19}{'':8}{'active':>17}{'':8}{'training FLOPs a token':>24}")
    for part, row in (*parts.items(), ('total', total)):
        columns = [f"{n:>{width},}{n / whole if whole else 0:>8.1%}"
                   for n, whole, width in zip(row, total, (19, 17, 24))]
        print(f"{part:<16}{''.join(columns)}")
    size, state = dtype.itemsize, model.cache_elements(0)
    block_size = model.config.block_size
    cache, full = model.cache_elements(1) - state, model.cache_elements(block_size) - state
    states = sum(math.prod(shape) * (own or dtype).itemsize
                 for block in model.h for shape, own in block.attn.states)
    print(f"weights: {total[0] * size / 1e9:,.2f} GB; cache: {cache:,} elements or {cache * size:,} bytes a "
          f"token{f', {states:,} bytes a row' if states else ''}, {(full * size + states) / 1e9:,.2f} GB at "
          f"{block_size:,} tokens; in {train.dtype_name(dtype)}")
    print(json.dumps({'what': 'params', 'params': total[0], 'active_params': total[1],
                      'flops_per_token': total[2], 'cache_bytes_per_token': cache * size,
                      'cache_bytes': full * size + states, 'dtype': train.dtype_name(dtype)}))


def measure_training(config, model_args):
    """Seconds a step in turns with nanoGPT, and what a step reaches of the machine."""
    model, machine, matmul, _ = model_and_machine(config, model_args)
    forward, config = model, {**config, 'batch_size': config['batch_size'] or 12}
    if train.resolve_compile(config['compile'], machine.device, float('inf')):
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


def measure_decoding(config, model_args):
    """Seconds a token in turns with nanoGPT, and the share of the memory's bandwidth."""
    model, machine, _, bandwidth = model_and_machine(config, model_args)
    config = {**config, 'batch_size': config['batch_size'] or 1}
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


# comparing --------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parent
RUNS = 'out-compare'  # has a folder for each run, named by what determines the run
OWN = ('variants', 'seeds', 'seed', 'match', 'by')  # flags that are compare's, not train.py's
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
    args: list                # train.py's, but for seed and out_dir
    data: str = ''            # folder
    params: int = 0
    cache: int | None = None  # bytes a token in bfloat16; None: its own code alone knows

    def command(self, folder, *more):
        return [sys.executable, str(self.code / 'train.py'), *place_configs(self.args, self.code),
                f'--out_dir={folder}', *more]


def parse_variant(text):
    """'HEAD~1: --norm=layernorm' -> ('HEAD~1', ['--norm=layernorm']); without a revision it is WORK."""
    found = re.fullmatch(r'(?s)\s*([^\s:-][^\s:]*):(?=\s|-|$)(.*)', text)
    revision, rest = found.groups() if found else ('WORK', text)
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
    """A list of config/variants.py: base, a command line of train.py, and variants; maybe seeds and match."""
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
        found = git('ls-files', '-z', '--cached', '--others', '--exclude-standard') if has_git else None
        names = os.fsdecode(found.stdout).split('\0') if found else []
        if 'train.py' not in names:  # no clone of its own
            names = [path.relative_to(ROOT) for path in (*ROOT.glob('*.py'), *ROOT.glob('config/*.py'))]
        for path in (ROOT / name for name in names):
            if path.is_file() and path.stat().st_size < 2**20:  # code is small
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
    """Command-line arguments with config files as paths: where they are ours, of that copy of the code."""
    placed = []
    for arg in args:
        if arg.endswith('.py') and not arg.startswith('-'):
            path = (Path(arg) if os.path.isfile(arg) else ROOT / arg).resolve()
            if path.is_relative_to(ROOT) and (code / path.relative_to(ROOT)).is_file():
                path = code / path.relative_to(ROOT)
            arg = str(path)
        placed.append(arg)
    return placed


def bare_code(path):
    """A Python file without comments, docstrings and layout, which change no run."""
    source = path.read_text(encoding='utf-8')
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
    """Of what runs depend on in a copy of the code: not bench.py and tests, and config files are settings."""
    digest = hashlib.sha256()
    for path in sorted(code.glob('**/*.py')):
        name = path.relative_to(code).as_posix()
        if not re.match(r'config/|bench|test', name):
            digest.update(f'{name}\0{bare_code(path)}\0'.encode())
    return digest.hexdigest()


def stamps(path):
    """Size and time of a file, or of those in a folder."""
    paths = [path] if os.path.isfile(path) else [entry.path for entry in os.scandir(path) if entry.is_file()]
    return [(os.path.basename(p), os.path.getsize(p), os.stat(p).st_mtime_ns) for p in sorted(paths)]


def run_folder(variant, seed, what='run'):
    """The folder in RUNS of a variant's run: by a hash of code, settings, data and machine."""
    args = [bare_code(Path(arg)) if arg.endswith('.py') and not arg.startswith('-') else arg
            for arg in place_configs(variant.args, variant.code)]
    values = [arg.partition('=')[2] for arg in variant.args]  # a checkpoint, a folder of data
    files = [stamps(value) for value in values if os.path.exists(value)]
    identity = [what, code_digest(variant.code), args, seed, files,
                read_meta(variant.data).get('checksum') or stamps(variant.data),
                torch.__version__, torch.get_num_threads(), torch.cuda.is_available()]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return os.path.join(RUNS, digest[:12])


def settings_of(args):
    """What train.py makes of a command line: its settings and the fields of GPTConfig that are given. Raises
    ValueError, as train.py would."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            settings, model_args, _ = configure({**vars(train), '__name__': ''}, 'GPTConfig', argv=args,
                                                default_file='config/default.py')
    except SystemExit:
        raise ValueError(said.getvalue().strip().removeprefix('bench.py: ')) from None
    train.check_settings(settings)
    train.share_batch(settings['gradient_accumulation_steps'], settings['batch_size'], 1)
    return settings, model_args


def settle(args):
    """The model that a command line of train.py trains from scratch, which takes no memory here, and the
    folder of its data. Raises ValueError or OSError, as train.py would."""
    settings, model_args = settings_of(args)
    folder = train.data_folder(settings['dataset'])
    bins, meta = [Bins(folder, split) for split in ('train', 'val')], read_meta(folder)
    with torch.device('meta'):
        model = GPT(GPTConfig(**{'vocab_size': meta['vocab_size'], **train.packed(meta), **model_args}))
    train.check_data(folder, meta, *bins, model.config, None)
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
        if not any(arg.endswith('.py') or arg.startswith('--init_from=') for arg in args):
            args.insert(0, 'config/default.py')  # as train.py has it, but of this revision
        for taken in ('out_dir', 'eval_only', 'init_from=resume'):
            if any(re.match(f'--{taken}(=|$)', arg) for arg in args):
                raise ValueError(f"--{taken}: leave it out, every run is a new one in a folder of {RUNS}/")
        if revision not in copies:
            copies[revision] = copy_code(revision, place)
        variant = Variant(name, revision, copies[revision], args)
        if revision == 'WORK' and settings_of(args)[0]['init_from'] == 'scratch':
            model, variant.data = settle(args)
            variant.params = model.num_params()
            variant.cache = 2 * (model.cache_elements(1) - model.cache_elements(0))
        else:
            try_out(variant)
    except (ValueError, OSError) as error:
        raise ValueError(f"variant {name!r}: {error}") from None
    return variant


def try_out(variant):
    """Evaluates a batch with a variant's own code, for this process can only judge by the working tree's.
    Fills in what it says of model and data. Raises ValueError with the error it ends with."""
    done = subprocess.run(variant.command(RUNS, '--eval_only=True', '--eval_iters=1', '--compile=False'),
                          capture_output=True, encoding='utf-8', errors='replace')
    if done.returncode:
        raise ValueError(last_line(done.stderr))
    params = re.search(r'^model: ([\d,]+) parameters', done.stdout, re.M)
    data = re.search(r'^data: (.*), [\d,]+ tokens to train', done.stdout, re.M)
    if not params or not data:
        raise ValueError("its train.py does not say what it trains in lines that begin with model: and data:")
    variant.params, variant.data = int(params[1].replace(',', '')), data[1]


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
    """Waits for a process, calling watch() meanwhile. Ctrl-C is handed on, and its end awaited. Returns the
    most memory it used, in MB, None where nobody can tell."""
    peak = None
    try:
        while process.returncode is None:
            if hasattr(os, 'wait4'):
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    peak = usage.ru_maxrss / (2**20 if sys.platform == 'darwin' else 2**10)
            else:
                process.poll()
            if watch:
                watch()
            if process.returncode is None:
                time.sleep(0.1)
    except KeyboardInterrupt:
        print('stopping this run: it saves its state first', flush=True)
        ask, asked_at = signal.SIGINT if os.name == 'posix' else signal.SIGTERM, time.time()
        process.send_signal(ask)
        while process.poll() is None:
            try:
                process.wait()
            except KeyboardInterrupt:
                if time.time() - asked_at > 1:  # a person again: it leaves at once; `timeout` signals twice
                    process.send_signal(ask)
        raise
    return peak


def start(command, printed):
    """A process that does not get the terminal's Ctrl-C, but ours; what it prints goes to a file."""
    with open(printed, 'w', encoding='utf-8') as f:
        return subprocess.Popen(command, stdout=f, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                start_new_session=True)


def read_text(path):
    if not os.path.exists(path):
        return ''
    with open(path, encoding='utf-8', errors='replace') as f:
        return f.read()


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


def train_variant(variant, seed, folder, watch):
    """Runs a variant with a seed, or goes on with a run of it that was stopped. Its folder has a result.json
    afterwards, unless it has failed in a way that may not come again; then the error is returned."""
    os.makedirs(folder, exist_ok=True)
    command = variant.command(folder, f'--seed={seed}')
    if os.path.exists(os.path.join(folder, 'ckpt.pt')):  # the checkpoint holds all settings
        command = [*variant.command(folder)[:2], f'--out_dir={folder}', '--init_from=resume']
    printed = os.path.join(folder, 'printed.txt')
    process = start(command, printed)
    peak, text = wait(process, watch), read_text(printed)
    if process.returncode:
        ended = f"signal {-process.returncode} ended it" if process.returncode < 0 else last_line(text)
        if 'the run diverged' not in ended:
            return ended
    on_gpu = re.search(r'^device cuda', text, re.M)  # whose memory the system does not count
    result = {'error': ended if process.returncode else None, 'seed': seed, 'variant': variant.name,
              'args': variant.args, 'peak_mb': None if on_gpu or peak is None else round(peak, 1)}
    path = os.path.join(folder, 'result.json')
    Path(path + '.tmp').write_text(json.dumps(result), encoding='utf-8')
    os.replace(path + '.tmp', path)
    return None


def read_run(folder, column='val_loss'):
    """A finished run: {'error': None or its one line, 'rows' of the log, 'loss' and 'best': the last and the
    lowest of that column, 'ms', 'peak_mb', 'iterations', 'seconds'}; None if it is not finished."""
    path = os.path.join(folder, 'result.json')
    if not os.path.exists(path):
        return None
    with open(path, encoding='utf-8') as f:
        found = json.load(f)
    if not found['error']:
        rows = read_log(folder)
        found |= {'rows': rows, 'loss': float(rows[-1][column]), 'ms': step_ms(rows),
                  'best': min(float(row[column]) for row in rows if row[column]),
                  'iterations': int(rows[-1]['iter']), 'seconds': float(rows[-1]['wall_s'])}
    return found


STRETCH = 20, 6.0  # match=time: steps, or seconds after the warm-up, that a variant is timed for


def time_steps(variant, seed, folder):
    """(milliseconds a step, iterations that the run would have) of a variant, from its first steps in a new
    folder."""
    os.makedirs(folder)
    process = start(variant.command(folder, f'--seed={seed}', '--log_interval=1'),
                    os.path.join(folder, 'printed.txt'))
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
    iterations = re.search(r'^run: ([\d,]+) iterations', text, re.M)
    if not rows or not iterations:
        raise ValueError(f"variant {variant.name!r}: {last_line(text)}")
    return step_ms(rows), int(iterations[1].replace(',', ''))


def match_time(first, variant, seed):
    """Gives a variant as many iterations as take the time of the first's, its schedule decaying within them.
    Both are timed by turns, twice, and the result kept. Returns the numbers."""
    folder = run_folder(variant, [seed, run_folder(first, seed)], 'match=time')
    path = os.path.join(folder, 'result.json')
    if not os.path.exists(path):
        shutil.rmtree(folder, ignore_errors=True)
        times = [time_steps(each, seed, os.path.join(folder, str(i)))
                 for i, each in enumerate((first, variant) * 2)]
        os.makedirs(folder, exist_ok=True)
        ms = [statistics.fmean(ms for ms, _ in times[i::2]) for i in (0, 1)]
        Path(path).write_text(json.dumps({'first_ms': ms[0], 'ms': ms[1], 'iterations': times[0][1]}),
                              encoding='utf-8')
    found = json.loads(Path(path).read_text(encoding='utf-8'))
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


def paired_difference(losses, first):
    """Mean of the differences seed by seed, and the ends of its 95% confidence interval (Student's t); these
    are None for a single seed."""
    differences = [a - b for a, b in zip(losses, first, strict=True)]
    n, mean = len(differences), statistics.fmean(differences)
    if n == 1:
        return mean, None, None
    t = T_95[n - 2] if n - 2 < len(T_95) else 1.96 + 2.4 / (n - 1)
    half = t * statistics.stdev(differences) / n ** 0.5
    return mean, mean - half, mean + half


def judge(low, high):
    if low is None:
        return 'one seed'
    return 'better' if high < 0 else 'worse' if low > 0 else 'no difference seen'


def summarise(variants, runs):
    """Rows of the table, dicts, from runs[i][j], of variant i with the j-th seed: see read_run; a text is an
    error that is not kept."""
    rows = []
    for variant, own in zip(variants, runs):
        row = {'variant': variant.name, 'params': variant.params, 'cache_bytes_per_token': variant.cache}
        errors = [run if isinstance(run, str) else run['error'] for run in own]
        failed = [error for error in errors if error]
        if failed:
            row['error'] = f"{len(failed)} of {len(own)} runs failed: {failed[0]}"
        else:
            losses, peaks = [run['loss'] for run in own], [run['peak_mb'] for run in own]
            row |= {'iterations': own[0]['iterations'], 'losses': losses, 'loss': statistics.fmean(losses),
                    'sd': statistics.stdev(losses) if len(losses) > 1 else None,
                    'best': statistics.fmean(run['best'] for run in own),
                    'ms': statistics.median(run['ms'] for run in own),
                    'peak_mb': None if None in peaks else statistics.median(peaks)}
        rows.append(row)
    for row in rows[1:]:
        if 'losses' in row and 'losses' in rows[0]:
            mean, low, high = paired_difference(row['losses'], rows[0]['losses'])
            row |= {'difference': mean, 'low': low, 'high': high, 'verdict': judge(low, high)}
    return rows


def print_comparison(rows, unit):
    def cell(value, form):
        return '-' if value is None else format(value, form)
    wide = max(len('variant'), *(len(row['variant']) for row in rows))
    print(f"\n{'variant':<{wide}}  {unit:>17}  {'to the first, 95% confidence':<30}{'verdict':<19}"
          f"{'ms/step':>8}{'peak MB':>9}{'parameters':>14}{'cache B/token':>15}")
    for row in rows:
        if 'error' in row:
            print(f"{row['variant']:<{wide}}  {row['error']}")
            continue
        loss = f"{row['loss']:.4f}" + (f" ± {row['sd']:.4f}" if row['sd'] is not None else '')
        difference = cell(row.get('difference'), '+.4f')
        if row.get('low') is not None:
            difference += f" [{row['low']:+.4f}, {row['high']:+.4f}]"
        print(f"{row['variant']:<{wide}}  {loss:>17}  {difference:<30}{row.get('verdict', ''):<19}"
              f"{row['ms']:>8.1f}{cell(row['peak_mb'], '.0f'):>9}{row['params']:>14,}"
              f"{cell(row['cache_bytes_per_token'], ','):>15}")


def forecast(printed, runs):
    """How long so many runs will take, judged by what the first has printed so far; None: too early."""
    text = read_text(printed)
    length = re.search(r'^run: ([\d,]+) iterations', text, re.M)
    early = re.search(rf'^iter {max(train.EARLY)}: .* ([\d.]+) ms', text, re.M)
    if not length or not early:
        return None
    each = int(length[1].replace(',', '')) * float(early[1]) / 1e3
    return f"{train.duration(each)} a run, {train.duration(each * runs)} for {runs}, besides evaluations"


def train_all(variants, seeds, folders, column):
    """Trains what is not finished, the variants by turns, and says how long it will take. folders[i][j] is
    that of variant i with the j-th seed. Returns what read_run has of each, or the text of an error."""
    done = {folder: read_run(folder, column) for own in folders for folder in own}
    todo = {}  # folder -> variant, seed; equal code has equal runs
    for seed, turn in zip(seeds, zip(*folders)):
        todo |= {folder: (variant, seed) for variant, folder in zip(variants, turn) if not done[folder]}
    times = [run['seconds'] for run in done.values() if run and not run['error']]
    print(f"{len(done)} runs, {len(done) - len(todo)} of them finished before")
    for i, (folder, (variant, seed)) in enumerate(todo.items()):
        said = []
        if times and not i:
            print(f"about {train.duration(statistics.fmean(times) * len(todo))} to go", flush=True)

        def watch(folder=folder, said=said):
            estimate = None if times or said else forecast(os.path.join(folder, 'printed.txt'), len(todo))
            if estimate:
                print(estimate, flush=True)
                said.append(estimate)
        try:
            run = train_variant(variant, seed, folder, watch) or read_run(folder, column)
        except (ValueError, OSError) as error:
            run = str(error)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{len(done) - len(todo) + i} of {len(done)} runs are finished; the same "
                                    "command goes on") from None
        done[folder], left = run, len(todo) - i - 1
        error = run if isinstance(run, str) else run['error']
        if error:
            print(f"{variant.name}, seed {seed}: failed: {error}", flush=True)
            continue
        times.append(run['seconds'])
        more = f"; about {train.duration(statistics.fmean(times) * left)} for {left} more" if left else ''
        print(f"{variant.name}, seed {seed}: loss {run['loss']:.4f}, {run['ms']:.1f} ms a step{more}",
              flush=True)
    return [[done[folder] for folder in own] for own in folders]


def compare(config, model_args, words):
    """Trains variants of one run with the same seeds and data, and says which is better, by how much and how
    sure that is. The last line is JSON. Exits with 1 if a run has failed."""
    if words[1:]:
        raise ValueError(f"compare takes one list of variants, not {' '.join(words)}")
    chosen = read_list(words[0]) if words else {}
    base = [arg for arg in sys.argv[1:] if arg not in ('compare', *words)
            and arg.removeprefix('--').partition('=')[0] not in OWN]
    if chosen and not any(arg.endswith('.py') and not arg.startswith('-') for arg in base):
        base = [*shlex.split(chosen['base']), *base]
    texts = named_variants(config['variants'] if config['variants'] is not None else chosen.get('variants'))
    seeds = range(config['seed'], config['seed'] + (config['seeds'] or chosen.get('seeds', 3)))
    match = config['match'] or chosen.get('match', 'none')
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
    rows = summarise(variants, runs)
    print_comparison(rows, 'val loss' if column == 'val_loss' else 'bits per byte')
    print(f"± is the spread over {len(seeds)} seeds, the difference is paired by seed" if len(seeds) > 1
          else 'one seed tells nothing of the spread between seeds, so there is no confidence: --seeds=3')
    if len(variants) > 2 and len(seeds) > 1:
        print('each interval is at 95% by itself: of 20 variants equal to the first, one would seem not')
    if any(row['best'] < row['loss'] - 1e-3 for row in rows if 'error' not in row):
        best = [f"{row['variant']} {row['best']:.4f}" for row in rows if 'error' not in row]
        print(f"the lowest on the way: {', '.join(best)}")
    path, curves = None, {variant.name: [run['rows'] for run in own]
                          for variant, own, row in zip(variants, runs, rows) if 'error' not in row}
    if curves:
        path = os.path.join(RUNS, f"{words[0] if words else 'compare'}.png")
        try:
            draw(curves, config['by'], path, column)
            print(f"curves: {path}")
        except ImportError as error:
            path = None
            print(error)
    for row, own in zip(rows, folders):
        row['runs'] = own
    print(json.dumps({'what': 'compare', 'seeds': list(seeds), 'match': match, 'plot': path, 'rows': rows}))
    if any('error' in row for row in rows):
        raise SystemExit(1)


AXES = {'iter': ('iter', 'iterations'), 'tokens': ('tokens', 'tokens'), 'time': ('wall_s', 'seconds')}


def curve(logs, by, column='val_loss'):
    """Logs of runs that differ by seed -> where all of them were evaluated on the axis `by`, their mean loss
    and its spread, (evaluations,) each; the spread of one is 0."""
    points = [{int(row['iter']): (float(row[AXES[by][0]]), float(row[column])) for row in rows if row[column]}
              for rows in logs]
    shared = sorted(set.intersection(*map(set, points)))  # a run that was stopped was evaluated there too
    x, y = np.array([[run[it] for run in points] for it in shared]).transpose(2, 0, 1)  # (evaluations, runs)
    return x.mean(1), y.mean(1), y.std(1, ddof=1) if len(logs) > 1 else np.zeros(len(y))


def draw(curves, by, path, column='val_loss'):
    """Writes a PNG of validation losses. curves: name -> logs of runs that differ by seed, see read_log;
    several are shown by their mean and spread. by: the horizontal axis, see AXES."""
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
    FigureCanvasAgg(figure).print_png(path)


def plot(config, model_args, words):
    """Draws the validation loss of runs, given by their folders, to plot.png. The last line is JSON."""
    if not words:
        raise ValueError("plot takes folders of runs: python bench.py plot out-a out-b --by=time")
    logs = {word: read_log(word) for word in words}
    draw({name: [rows] for name, rows in logs.items()}, config['by'], 'plot.png')
    last = {name: [float(row['val_loss']) for row in rows if row['val_loss']][-1]
            for name, rows in logs.items()}
    for name, loss in last.items():
        print(f"{name}: val loss {loss:.4f} after {int(logs[name][-1]['iter']):,} iterations")
    print('curves: plot.png')
    print(json.dumps({'what': 'plot', 'plot': 'plot.png', 'by': config['by'], 'loss': last}))


INSTRUMENTS = {  # first word of the command line -> function of this file's settings and GPTConfig's
    'train': measure_training,
    'decode': measure_decoding,
    'params': measure_params,
    'compare': compare,
    'plot': plot,
}
TAKE_WORDS = ('compare', 'plot')  # those of them that take the words after the first, too


def check_settings(s):
    """Raises ValueError for the first setting that is no choice, or too low. s: this file's settings."""
    if s['optimizer'] not in train.OPTIMIZERS:
        raise ValueError(f"optimizer={s['optimizer']!r} is none of {', '.join(train.OPTIMIZERS)}")
    if s['compile'] not in (True, False, 'auto'):
        raise ValueError(f"compile={s['compile']!r} is none of True, False, auto")
    if s['match'] not in (None, 'none', 'params', 'active', 'time'):
        raise ValueError(f"match={s['match']!r} is none of none, params, active, time")
    if s['by'] not in AXES:
        raise ValueError(f"by={s['by']!r} is none of {', '.join(AXES)}")
    lowest = dict(batch_size=1, prompt_len=1, max_new_tokens=2, steps=1, rounds=1, grad_clip=0, seed=0,
                  seeds=1)
    for name, low in lowest.items():
        if s[name] is not None and not s[name] >= low:  # nan is not
            raise ValueError(f"{name}={s[name]} must be at least {low}")
    if s['seed'] >= 2**63:
        raise ValueError(f"seed={s['seed']} must be below 2**63")


if __name__ == '__main__':
    check_settings(config)
    what, more = words[0] if words else '', words[1:]
    if what not in INSTRUMENTS:
        raise ValueError(f"bench.py measures {', '.join(INSTRUMENTS)}, not {what!r}: "
                         "python bench.py train config/small.py")
    if for_train and what != 'compare':
        raise ValueError(f"{for_train[0]} is a setting of train.py, which bench.py {what} has no use for")
    if what in TAKE_WORDS:
        INSTRUMENTS[what](config, model_args, more)
    elif more:
        raise ValueError(f"bench.py {what} cannot use {more!r}: settings are --key=value, config files end "
                         "in .py")
    else:
        INSTRUMENTS[what](config, model_args)

"""
Which choice is better, and by how much? Trains variants of a run with the same seeds and data.

    python lab/compare.py config/llama_small.py --variants="['', '--norm=layernorm', '--mlp=gelu']"
    python lab/compare.py config/default.py --variants="['HEAD~1:', 'WORK:', 'WORK: --mlp=gelu']"
    python lab/compare.py mlp --until=decided      # the list mlp of lab/variants.py

The first variant is the baseline. A variant is flags for train.py, or a git revision and a colon,
or both. The default revision, WORK, is the working tree. The script copies the code, so you may
edit it meanwhile. Flags of train.py apply to all variants.

Finished runs in out-compare/ are used again, so you can stop and continue. Delete the
folder if you change a checkpoint that a run starts from.
"""
import os
import sys

if __name__ == '__main__':  # import from the folder above
    sys.path[0] = os.path.abspath(__file__ + '/../..')

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import math
import re
import runpy
import shlex
import shutil
import signal
import statistics
import subprocess
import tempfile
from json import dumps, loads
from pathlib import Path

from configurator import (
    ROOT,
    check_values,
    configure,
    declared,
    duration,
    is_example,
    print0,
    read_flag,
    reading,
    run_file,
    use_parts,
)

variants: list | dict | None = None  # additions to the command line, or {name: addition}
seeds: int | None = None          # runs per variant; None: 3, or up to 20 with until=decided [>= 1]
seed = 1337                       # first seed [< 2**62]
until = ''                        # decided: add seeds until each verdict is clear [in ('', 'decided')]
margin = 0.02                     # until=decided: 'as good' means an interval within ± margin
match: str | None = None          # sets d_ff for equal sizes [in SIZES]
json: bool | str = False          # True: print JSON too; or a file to append to
OWN = declared(Path(__file__)).keys()
FLAGS = {f'--{name}' for file in ('train.py', 'model.py') for name in declared(ROOT / file).keys() - OWN}
ARGV = sys.argv[1:] if __name__ == '__main__' else []
ARGS = [arg for arg in ARGV if arg.partition('=')[0] in FLAGS or arg.endswith('.py')]
settings = configure(globals(), words=1, argv=[arg for arg in ARGV if arg not in ARGS])
config = settings.config

import numpy as np
import torch

import train
from bench import cache_per_token, json_output, named_model, print_json, print_table
from model import LOOKUP_GROUPS, num_params
from prepare import Bins, data_folder, identity

RUNS = 'out-compare'
SIZES = 'none', 'params', 'active', 'inner_params'  # inner: without embeddings

# variants ---------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Variant:
    """Code and arguments of train.py."""
    name: str
    code: Path         # folder
    digest: str        # hash of the code, then the data's meta.json and what line_settings returns
    args: list         # without seed and out_dir
    sizes: dict | None  # from measured_line; None: code of a revision, or a loaded model

    def folder(self, seed):
        """The folder of the run with this seed."""
        args = [arg.replace(str(self.code), '') for arg in self.args]
        digest = hashlib.sha256(dumps([self.digest, args, seed]).encode()).hexdigest()
        return f'{RUNS}/{digest[:12]}'


def is_config(arg):
    """Whether this is a config file."""
    return arg.endswith('.py') and not arg.startswith('-')


def git(*args, **variables):
    """The output of a git command. variables: for its environment. Raises ValueError."""
    done = subprocess.run(['git', *args], cwd=ROOT, encoding='utf-8', env=os.environ | variables,
                          capture_output=True)
    if done.returncode:
        raise ValueError(f"lab/compare.py copies code from a clone, but `git {args[0]}` fails: {done.stderr}")
    return done.stdout


@functools.cache
def copy_code(revision, folder):
    """Copies the Python files of a revision or of WORK to a new folder. Returns a hash of the files on
    which a run depends."""
    if revision == 'WORK':  # a separate index includes new files
        git('add', '*.py', GIT_INDEX_FILE=f'{folder}.index')
        revision = git('write-tree', GIT_INDEX_FILE=f'{folder}.index').strip()
    git('archive', f'--output={folder}.zip', revision, '*.py')
    shutil.unpack_archive(f'{folder}.zip', folder)
    others = {'config', 'docs', 'examples', 'tests', 'test_model.py', 'bench.py', 'lab'}
    return hashlib.sha256(b''.join(
        path.read_bytes() for path in sorted(folder.rglob('*.py')) if path.is_file()
        and path.relative_to(folder).parts[0] not in others)).hexdigest()


def parse_variant(text):
    """'HEAD~1: --norm=layernorm' -> ('HEAD~1', ['--norm=layernorm'])"""
    revision, flags = re.fullmatch(r'(?s)\s*(?:([^\s:-][^\s:]*):(?=\s|-|$))?(.*)', text).groups()
    return revision or 'WORK', shlex.split(flags)


def in_child(function, *args):
    """Calls a function in another process, because config files may change modules. Raises
    ValueError."""
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        try:
            return pool.submit(function, *args).result()
        except (ValueError, OSError) as error:
            raise ValueError(str(error)) from None


def line_settings(args, code):
    """dataset and init_from of a command line of train.py, and a text of all values, config files and modules
    that they import. code: its folder."""
    known = declared(code / 'model.py') | declared(code / 'train.py')
    settings = {name: setting.default for name, setting in known.items()}
    for arg in args:
        if arg.startswith(('--seed=', '--out_dir=')):
            raise ValueError(f"{arg} has no effect in a variant: use --seed and --seeds of lab/compare.py")
        settings |= run_file(arg, settings) if is_config(arg) else read_flag(arg, known)
    files = [path.read_text('utf-8', 'replace')
             for arg in map(Path, filter(is_config, args)) for path in sorted(arg.parent.glob('*.py'))
             if path.name == arg.name or path.stem in sys.modules]
    # config files may read other files or the environment
    values = {name: value for name, value in settings.items() if name[:2] != '__'}
    text = dumps([files, values], skipkeys=True, default=lambda value: type(value).__name__)
    return settings['dataset'], settings['init_from'], text.replace(str(code), '')


def make_variants(texts, base, place):
    """Makes Variants. texts: {name: additions to base}; base: a command line of train.py. Copies
    the code to the folder `place`. Raises ValueError or FileNotFoundError."""
    variants = []
    for name, text in texts.items():
        with reading(f'variant {text!r}'):
            revision, flags = parse_variant(text)
        code = place / revision.replace('/', '_')
        digest = copy_code(revision, code)
        args = [*base, *flags]
        is_bare = not any(is_config(arg) and not is_example(arg) for arg in args)
        if is_bare:
            args = ['config/default.py', *args]
        args = [str(code / arg) if is_config(arg) and (code / arg).is_file() else arg for arg in args]
        dataset, init_from, values = in_child(line_settings, args, code)
        if is_bare and init_from != 'scratch':
            del args[0]  # the checkpoint has these settings
        folder = data_folder(dataset)
        meta = identity(Bins(folder, 'train').meta)
        sizes = in_child(measured_line, args) if revision == 'WORK' else None
        variants.append(Variant(name, code, digest + dumps(meta) + values, args, sizes))
    return variants


def measured_line(args):
    """Sizes of the new model of a train.py command line; None if the line loads a model."""
    with contextlib.redirect_stdout(None):
        settings = configure({**vars(train), '__name__': ''}, 'GPTConfig', argv=args)
        config = settings.config
        use_parts(settings, vars(train))
    check_values(settings, config, vars(train))
    if config['init_from'] != 'scratch':
        return None
    model = named_model(config, settings.model_args, 'meta')
    name = 'd_ff' if model.config.n_expert is None else 'd_expert'
    return {'name': name, 'width': getattr(model.config, name), 'params': num_params(model),
            'active': num_params(model, active=True),
            'inner_params': sum(w.numel() for name, w in model.named_parameters()
                                if model.tags[name].group not in LOOKUP_GROUPS),
            'cache_bytes_per_token': cache_per_token(model, torch.bfloat16)}


def match_size(variant, target, kind):
    """Sets d_ff or d_expert so that the variant has `target` parameters within 1%. kind: 'params',
    'active' or 'inner_params', what to count. Raises ValueError if no width fits."""
    name = variant.sizes['name']
    was = variant.sizes['width']

    def excess(width):
        variant.sizes = in_child(measured_line, [*variant.args, f'--{name}={width}'])
        return variant.sizes[kind] - target

    slope = (excess(was + 64) - excess(was)) / 64 or math.inf
    exact = was - excess(was) / slope
    for width in was, *(n * max(1, round(exact / n)) for n in (64, 8, 2)):
        if abs(excess(width)) <= 0.01 * target:
            break
    else:
        raise ValueError(f"variant {variant.name!r}: no {name} gives {target:,} parameters, as the baseline "
                         "has: change width or depth, or use --match=none")
    if width != was:
        print(f"{variant.name}: {name}={width} (was {was})")
        variant.args.append(f'--{name}={width}')


# runs -------------------------------------------------------------------------------------------------------

def read_facts(folder):
    """A run's run.json, or {}."""
    path = Path(folder, 'run.json')
    with reading(path):
        return loads(path.read_text('utf-8')) if path.exists() else {}


def read_run(folder):
    """The facts of a run that ended, or None. They have 'rows' of log.csv, or an 'error' if it diverged."""
    facts = read_facts(folder)
    if facts.get('status') in ('done', 'time_limit'):
        path = f'{folder}/log.csv'
        with reading(path):
            rows = np.atleast_1d(np.genfromtxt(path, delimiter=',', names=True, encoding='utf-8'))
        return facts | {'rows': rows, 'error': None if len(rows) else f'{path} is empty: raise --max_iters'}
    return facts if facts.get('status') == 'diverged' else None


def stop_with_parent():
    """Makes this process stop if its parent is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def run_variant(variant, seed):
    """Starts or continues a run. Returns read_run's dict, or {'error': text} if it failed."""
    folder = Path(variant.folder(seed))
    args = [*variant.args, f'--seed={seed}']
    folder.mkdir(parents=True, exist_ok=True)
    printed = folder / 'printed.txt'
    if (folder / 'ckpt.pt').exists() and read_facts(folder)['config']['time_limit'] is None:
        args.append('--init_from=resume')  # last, because config files may define a mixer
    printed.unlink(missing_ok=True)  # a killed run may still print
    with open(printed, 'w', encoding='utf-8') as f:
        process = subprocess.Popen(
            [sys.executable, str(variant.code / 'train.py'), *args, f'--out_dir={folder}'], stdout=f,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=stop_with_parent if sys.platform == 'linux' else None)
    try:
        process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    last_line = printed.read_text('utf-8', errors='replace').strip().rpartition('\n')[2]
    return read_run(folder) or {'error': f"{last_line} (exit status {process.returncode})"}


def run_all(variants, seeds, until, margin):
    """Completes all runs, seed by seed. Returns {variant's name: run_variant's dicts}. A variant
    gets no further seed after a failure, or, if until='decided', after a clear verdict. Raises
    ValueError if the baseline fails."""
    runs = {variant.name: [] for variant in variants}
    remaining = [*variants]
    for seed in seeds:
        for variant in remaining:
            run = read_run(variant.folder(seed)) or run_variant(variant, seed)
            print0(f"{variant.name}, seed {seed}: {run['error'] or duration(run['rows']['wall_s'][-1])}")
            if run['error'] and variant is variants[0]:
                raise ValueError('a run of the baseline failed, so nothing can be compared with it')
            runs[variant.name].append(run)
        remaining = [variant for variant in remaining if not runs[variant.name][-1]['error']]
        if until:
            rows = comparison(variants, runs, until, margin)
            is_open = {row['variant']: row.get('verdict', OPEN[0]) in OPEN for row in rows}
            remaining = [variant for variant in remaining if is_open[variant.name]]
            if len(remaining) == 1:
                break
    return runs


# judging ----------------------------------------------------------------------------------------------------

# 95% of Student's t is within ± these values, by degrees of freedom
T_95 = 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262
OPEN = 'one seed', 'no difference seen'  # verdicts that more seeds may change


def lasting(n, alpha):
    """Half of a confidence interval for the mean of n normal differences, in standard deviations.
    The error probability is at most alpha even if you look after each n: the t statistic of
    arXiv:2310.03722, for a mixture of effects with a standard deviation of 5."""
    shrink = 5 ** -2 / (n + 5 ** -2)
    bound = (alpha * shrink ** 0.5) ** (-2 / n)
    ratio = (bound - 1) / (1 - bound * shrink) if bound * shrink < 1 else math.inf  # t^2 / (n - 1)
    return ((n - 1) * ratio / n) ** 0.5


def paired_difference(losses, baseline, alpha=None, margin=0.0):
    """The mean difference of losses with the same seed, half of its 95% confidence interval or None, and the
    verdict. alpha: for `lasting`; the verdict may then be 'as good'."""
    differences = np.subtract(losses, baseline[:len(losses)])
    n = len(differences)
    mean = differences.mean()
    df = n - 1
    if not df:
        return mean, None, 'one seed'
    t = T_95[df - 1] if df <= len(T_95) else 1.96 + 2.372 / df + 2.9 / df**2
    half = differences.std(ddof=1) * (lasting(n, alpha) if alpha else t / n ** 0.5)
    if not math.isfinite(half):
        return mean, None, 'no difference seen'
    if abs(mean) > half:
        return mean, half, 'better' if mean < 0 else 'worse'
    return mean, half, 'as good' if alpha and abs(mean) + half <= margin else 'no difference seen'


def comparison(variants, runs, until, margin):
    """The table's rows, without failed variants. If the data differ, it compares bits per byte. until:
    makes intervals hold for all variants together, at any number of seeds."""
    finished = [variant for variant in variants if not runs[variant.name][-1]['error']]
    data = {run['data'] for variant in finished for run in runs[variant.name]}
    column = 'val_loss' if len(data) == 1 else 'val_bpb'
    alpha = 0.05 / max(1, len(variants) - 1) if until else None
    rows = []
    for variant in finished:
        sizes = variant.sizes or dict.fromkeys(('inner_params', 'cache_bytes_per_token'))
        of_variant = runs[variant.name]
        losses = [run['rows'][column][-1] for run in of_variant]
        ms = np.concatenate([run['rows']['ms_per_iter'][len(run['rows']) > 1:] for run in of_variant])
        peaks = [run['peak_mb'] for run in of_variant]
        row = {'variant': variant.name, 'column': column, 'losses': losses,
               'loss': statistics.fmean(losses),
               'sd': statistics.stdev(losses) if len(losses) > 1 else None,
               'tokens': of_variant[0]['rows']['tokens'][-1],
               'inner_params': sizes['inner_params'],
               'ms': np.percentile(ms, [10, 50, 90]).tolist(),
               'cache_bytes_per_token': sizes['cache_bytes_per_token'],
               'peak_mb': None if None in peaks else statistics.median(peaks),
               'params': of_variant[0]['params']}
        if rows:
            row['difference'], row['half_interval'], row['verdict'] = paired_difference(
                losses, rows[0]['losses'], alpha, margin)
        rows.append(row)
    return rows


def print_comparison(rows, until):
    """Prints one row per variant."""
    table = {}
    for row in rows:
        mean, half = row.get('difference'), row.get('half_interval')
        low, ms, high = row['ms']
        table[row['variant']] = [
            f"{row['loss']:.4f}" + ('' if row['sd'] is None else f" ± {row['sd']:.4f}"),
            ('baseline' if mean is None else f"{mean:+.4f}") +
            ('' if half is None else f" [{mean - half:+.4f}, {mean + half:+.4f}]"),
            row.get('verdict', ''), f"{len(row['losses'])}", f"{ms:.1f} ({low:.1f} to {high:.1f})",
            *('n/a' if row[name] is None else f"{row[name]:,.0f}"
              for name in ('tokens', 'peak_mb', 'params', 'cache_bytes_per_token'))]
    column = rows[0]['column']
    print_table('variant', [
        f'{column} ± sd over seeds', 'difference from baseline, 95% interval', 'verdict', 'seeds',
        'median ms/step (10% to 90%)', 'tokens read', 'peak MB', 'parameters', 'cache bytes/token'], table)
    if column == 'val_bpb':
        print("warning: the data differ; bits per byte of different texts are compared")
    if until:
        print("the intervals hold for all variants together and at any number of seeds")


# ------------------------------------------------------------------------------------------------------------

def compare(config, args, name=None):
    """Trains variants, prints the comparison and returns its numbers. args: for train.py; name: a list of
    lab/variants.py, which config and args override."""
    lists = runpy.run_path(str(ROOT / 'lab/variants.py'))['LISTS']
    known = lists.get(name, {})
    texts = config['variants'] or known.get('variants')
    if not texts or name not in (None, *lists):
        raise ValueError("nothing to compare: add --variants=\"['', '--norm=layernorm']\" or the name of a "
                         f"list: {', '.join(lists)}")
    named = texts if isinstance(texts, dict) else {str(text).strip() or 'base': text for text in texts}
    if known and not any(map(is_config, args)):
        args = [*shlex.split(known['base']), *args]
    match = config['match'] or known.get('match')
    until = config['until']
    seeds = range(config['seed'], config['seed'] + (config['seeds'] or (20 if until else 3)))
    print0(f"{len(texts)} variants of train.py {shlex.join(args)}")
    with tempfile.TemporaryDirectory(prefix='flatgpt-compare-') as place:
        variants = make_variants(named, args, Path(place))
        if len({variant.folder(seed) for variant in variants}) < len(texts):
            raise ValueError("two variants are equal: remove one")
        if match not in (None, 'none'):
            if None in [variant.sizes for variant in variants]:
                raise ValueError("--match needs new models of the working tree: add --match=none")
            for variant in variants[1:]:
                match_size(variant, variants[0].sizes[match], match)
        with train.lock_folder(RUNS):
            runs = run_all(variants, seeds, until, config['margin'])
        folders = {variant.name: [variant.folder(seed) for seed, _ in zip(seeds, runs[variant.name])]
                   for variant in variants}
    rows = comparison(variants, runs, until, config['margin'])
    print_comparison(rows, until)
    failed = {name: of_variant[-1]['error'] for name, of_variant in runs.items() if of_variant[-1]['error']}
    return {'rows': rows, 'runs': folders, 'failed': failed}


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    check_values(settings, config, globals())
    output = json_output(json)
    numbers = compare(config, ARGS, *settings.words)
    print_json(output, **numbers)
    sys.exit(bool(numbers['failed']))

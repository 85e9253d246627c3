"""
Trains variants of a run with the same seeds and data, and compares them.

    python lab/compare.py config/llama_small.py --variants="['', '--norm=layernorm', '--mlp=gelu']"
    python lab/compare.py mlp --until=decided      # the list `mlp` in lab/variants.py
    git worktree add ../old HEAD~1                 # a folder with another commit's code
    python lab/compare.py config/default.py --variants="['../old:', '', '--mlp=gelu']"

The first variant is the baseline. A variant has flags for train.py, a code folder with a colon
('../old:'), or both. Flags of train.py outside --variants apply to all variants. Runs use a copy of the
code, so you may edit the code meanwhile.

You can stop and continue, because the script reuses finished runs in out-compare/. Delete this folder if
you change a checkpoint that runs start from.
"""
import os
import sys

if __name__ == '__main__':
    sys.path[0] = os.path.abspath(__file__ + '/../..')

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
import subprocess
import tempfile
from json import dumps, loads
from pathlib import Path

from configurator import (
    ROOT,
    UserError,
    check_values,
    configure,
    declared,
    duration,
    is_example,
    naming,
    print0,
    read_flag,
    reading,
    run_file,
)

variants: list | dict | None = None  # additions to the command line, or {name: addition}
seeds: int | None = None          # runs per variant; None: 3, or up to 20 with until=decided [>= 1]
seed = 1337                       # first seed [< 2**62]
until = ''                        # decided: add seeds until each verdict is clear [in ('', 'decided')]
margin = 0.02                     # until=decided: 'as good' means an interval within ± margin
match: str | None = None          # count to match, by setting d_ff or d_expert [in COUNTS]
json: bool | str = False          # True: also print JSON; a path: append to that file
OWN = declared(Path(__file__)).keys()
FLAGS = {f'--{name}' for file in ('train.py', 'model.py') for name in declared(ROOT / file).keys() - OWN}
ARGV = sys.argv[1:] if __name__ == '__main__' else []
ARGS = [arg for arg in ARGV if arg.partition('=')[0] in FLAGS or arg.endswith('.py')]
settings = configure(globals(), words=1, argv=[arg for arg in ARGV if arg not in ARGS])
config = settings.config

import numpy as np

from bench import json_output, print_json, print_table
from model import GPTConfig
from prepare import Bins, data_folder, identity
from train import UNFINISHED, lock_folder

RUNS = 'out-compare'
COUNTS = 'none', 'params', 'active_params', 'inner_params'  # counts that `bench.py params` prints

# variants ---------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Variant:
    """A code folder, and arguments for its train.py."""
    name: str
    code: Path      # folder
    args: list      # without seed and out_dir
    settings: dict  # all values of train.py, GPTConfig and config files
    inputs: list    # [the code's hash, the data's meta, the config files' texts]

    def folder(self, seed):
        text = dumps([self.inputs, self.settings, self.args, seed], skipkeys=True,
                     default=lambda value: type(value).__name__).replace(str(self.code), '')
        return f'{RUNS}/{hashlib.sha256(text.encode()).hexdigest()[:12]}'

    def measured(self, *flags):
        """The model's sizes from bench.py, or {'error': text}."""
        known = {*declared(self.code / 'model.py'), 'init_from', 'dataset'}
        words = [arg for arg in (*self.args, *flags)
                 if is_config(arg) or arg[2:].partition('=')[0] in known]
        done = subprocess.run([sys.executable, self.code / 'bench.py', 'params', *words, '--json=True'],
                              encoding='utf-8', capture_output=True)
        return {'error': last_line(done.stderr)} if done.returncode else loads(last_line(done.stdout))

    @functools.cached_property
    def sizes(self):
        return self.measured()

    def count(self, kind, *flags):
        sizes = self.measured(*flags)
        if kind not in sizes:
            raise UserError(f"variant {self.name!r}: bench.py does not count {kind}: "
                            f"{sizes.get('error', 'its code is too old: use --match=none')}")
        return sizes[kind]


def is_config(arg):
    """Whether this is a config file."""
    return arg.endswith('.py') and not arg.startswith('-')


def last_line(text):
    """The last line of a text."""
    return text.strip().rpartition('\n')[2]


@functools.cache
def copy_code(source, place):
    """Copies a folder's code. Returns the copy, and a hash of the files that a run needs."""
    code = Path(tempfile.mkdtemp(dir=place))
    digest = hashlib.sha256()
    for path in sorted([*source.glob('*.py'), *source.glob('*/*.py'), *source.glob('zoo/*.json')]):
        name = path.relative_to(source)
        (code / name).parent.mkdir(exist_ok=True)
        shutil.copy(path, code / name)
        # train.py reads default.py and finetune.py by itself
        if name.name in ('default.py', 'finetune.py') or name.parts[0] not in (
                'config', 'docs', 'examples', 'tests', 'test_model.py', 'bench.py', 'lab'):
            digest.update(path.read_bytes())
    return code, digest.hexdigest()


def add_texts(texts, path):
    """Adds the text of a config file, and of neighbouring files that it names. texts: {file: text}"""
    text = texts[str(path)] = path.read_text('utf-8', 'replace')
    for other in sorted(path.parent.glob('*.py')):
        if str(other) not in texts and re.search(rf'\b{re.escape(other.stem)}\b', text):
            add_texts(texts, other)


def make_variant(name, text, base, place):
    """Makes a Variant. text: arguments of train.py to add to base."""
    with reading(f'variant {text!r}'):
        words = shlex.split(text)
    source = Path(words.pop(0)[:-1]) if words and words[0].endswith(':') else ROOT
    if not source.is_dir():
        raise UserError(f"variant {text!r}: there is no folder {source}. For another commit, run "
                        f"`git worktree add --detach ../old {source}` and use '../old:'")
    known = declared(source / 'model.py') | declared(source / 'train.py')
    code, digest = copy_code(source, place)
    args = [*base, *words]
    if not any(is_config(arg) and not is_example(arg) or arg.startswith('--init_from=') for arg in args):
        args = ['config/default.py', *args]
    args = [str(code / arg) if is_config(arg) and (code / arg).is_file() else arg for arg in args]
    values = {name: setting.default for name, setting in known.items()}
    texts = {}
    for arg in args:
        if arg.startswith(('--seed=', '--out_dir=')):
            raise UserError(f"{arg} has no effect in a variant: use --seed and --seeds of lab/compare.py")
        if is_config(arg):
            values |= run_file(arg, values)
            add_texts(texts, Path(arg))
        else:
            values |= read_flag(arg, known)
    meta = Bins(data_folder(values['dataset']), 'train').meta
    if source == ROOT and values['init_from'] == 'scratch':
        fields = {field: values[field] for field, setting in declared(ROOT / 'model.py').items()
                  if values[field] != setting.default}
        with naming(fields):
            GPTConfig(**{'vocab_size': meta['vocab_size']} | fields)
    # all values, because config files may read other files or the environment
    settings = {setting: value for setting, value in values.items() if setting[:2] != '__'}
    return Variant(name, code, args, settings, [digest, identity(meta), texts])


def match_size(variant, target, kind):
    """Sets d_ff or d_expert to bring the variant's parameters within 1% of `target`."""
    if abs(variant.count(kind) - target) <= 0.01 * target:
        return
    name = 'd_ff' if variant.settings['n_expert'] is None else 'd_expert'
    at_64, at_128 = (variant.count(kind, f'--{name}={width}') for width in (64, 128))
    slope = (at_128 - at_64) / 64 or math.inf
    for unit in 64, 8, 2:
        width = unit * max(1, round((64 + (target - at_64) / slope) / unit))
        if abs(at_64 + (width - 64) * slope - target) <= 0.01 * target:
            print0(f"{variant.name}: {name}={width}")
            variant.args.append(f'--{name}={width}')
            return
    raise UserError(f"variant {variant.name!r}: no {name} gives {target:,} parameters, as the baseline has: "
                    "change width or depth, or use --match=none")


# runs -------------------------------------------------------------------------------------------------------

def read_run(folder):
    """An ended run's facts, with 'error' if it diverged, else with 'rows' of log.csv; None for other runs."""
    path = Path(folder, 'run.json')
    with reading(path):
        facts = loads(path.read_text('utf-8')) if path.exists() else {}
    if facts.get('status', 'running') in UNFINISHED:
        return None
    if not facts['error']:
        facts['rows'] = np.atleast_1d(np.genfromtxt(
            f'{folder}/log.csv', delimiter=',', names=True, encoding='utf-8'))
        if not facts['rows'].size:
            facts['error'] = f'{folder}/log.csv is empty: raise --max_iters'
    return facts | {'folder': folder}


def stop_with_parent():
    """Makes this process stop if its parent is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def run_variant(variant, seed):
    """Starts or continues a run. Returns read_run's dict, or {'error': text} if the run failed."""
    folder = variant.folder(seed)
    args = [*variant.args, f'--seed={seed}', f'--out_dir={folder}']
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(f'{folder}/ckpt.pt') and variant.settings['time_limit'] is None:
        args.append('--init_from=resume')  # config files stay, because they may define a mixer
    with open(f'{folder}/printed.txt', 'w+', encoding='utf-8', errors='replace') as f:
        process = subprocess.Popen([sys.executable, variant.code / 'train.py', *args], stdout=f,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   preexec_fn=stop_with_parent if sys.platform == 'linux' else None)
        try:
            process.wait()
        except KeyboardInterrupt:
            process.terminate()  # it saves a checkpoint
            process.wait()
            raise
        f.seek(0)
        error = f"{last_line(f.read())} (exit status {process.returncode})"
    return read_run(folder) or {'error': error}


def run_all(variants, seeds, until, margin):
    """Completes all runs, seed by seed. Returns {name: run_variant's dicts}. A variant
    gets no more seeds after a failure or, if until='decided', after a clear verdict."""
    runs = {variant.name: [] for variant in variants}
    remaining = [*variants]
    for seed in seeds:
        for variant in remaining:
            run = read_run(variant.folder(seed)) or run_variant(variant, seed)
            print0(f"{variant.name}, seed {seed}: {run['error'] or duration(run['rows']['wall_s'][-1])}")
            if run['error'] and variant is variants[0]:
                raise UserError('a run of the baseline failed, so nothing can be compared with it')
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
    """The half-width, in standard deviations, of a confidence interval for the mean of n normal differences.
    Its error probability is at most alpha, even if you check the mean at every n. The interval uses the
    t statistic of arXiv:2310.03722, for a mixture of effects with a standard deviation of 5."""
    shrink = 5 ** -2 / (n + 5 ** -2)
    bound = (alpha * shrink ** 0.5) ** (-2 / n)
    ratio = (bound - 1) / (1 - bound * shrink) if bound * shrink < 1 else math.inf  # t^2 / (n - 1)
    return ((n - 1) * ratio / n) ** 0.5


def paired_difference(losses, baseline, alpha=None, margin=0.0):
    """The mean difference of losses with the same seed, the half-width of its 95% confidence interval (or
    None), and the verdict."""
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
    """The table's rows, without failed variants."""
    finished = [variant for variant in variants if not runs[variant.name][-1]['error']]
    data = {run['data'] for variant in finished for run in runs[variant.name]}
    column = 'val_loss' if len(data) == 1 else 'val_bpb'
    alpha = 0.05 / max(1, len(variants) - 1) if until else None
    rows = []
    for variant in finished:
        of_variant = runs[variant.name]
        logs = [run['rows'] for run in of_variant]
        losses = [log[column][-1] for log in logs]
        row = {'variant': variant.name, 'column': column, 'losses': losses, 'loss': np.mean(losses),
               'sd': np.std(losses, ddof=1) if len(losses) > 1 else None,
               'runs': [run['folder'] for run in of_variant],
               'ms': np.median(np.concatenate([log['ms_per_iter'][len(log) > 1:] for log in logs])),
               'tokens': logs[0]['tokens'][-1],
               **{name: of_variant[0][name] for name in ('peak_mb', 'params')},
               'cache_bytes_per_token': variant.sizes.get('cache_bytes_per_token')}
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
        table[row['variant']] = [
            f"{row['loss']:.4f}" + ('' if row['sd'] is None else f" ± {row['sd']:.4f}"),
            ('baseline' if mean is None else f"{mean:+.4f}") +
            ('' if half is None else f" [{mean - half:+.4f}, {mean + half:+.4f}]"),
            row.get('verdict', ''), f"{len(row['losses'])}", f"{row['ms']:.1f}",
            *('n/a' if row[name] is None else f"{row[name]:,.0f}"
              for name in ('tokens', 'peak_mb', 'params', 'cache_bytes_per_token'))]
    column = rows[0]['column']
    print_table('variant', [
        f'{column} ± sd over seeds', 'difference from baseline, 95% interval', 'verdict', 'seeds',
        'median ms/step', 'tokens read', 'peak MB', 'parameters', 'cache bytes/token'], table)
    if column == 'val_bpb':
        print("warning: the data differ; bits per byte of different texts are compared")
    if until:
        print("the intervals hold for all variants together and at any number of seeds")


# ------------------------------------------------------------------------------------------------------------

def compare(config, args, name=''):
    """Trains variants, prints the comparison and returns its numbers. args: for train.py; name: a list in
    lab/variants.py, which config and args override."""
    lists = runpy.run_path(ROOT / 'lab/variants.py')['LISTS']
    known = lists.get(name, {})
    texts = config['variants'] or known.get('variants')
    if not texts or name and not known:
        raise UserError(f"lab/variants.py has no list {name!r}: name one of {', '.join(lists)}, or add "
                        "--variants=\"['', '--norm=layernorm']\"")
    named = texts if isinstance(texts, dict) else {text.strip() or 'base': text for text in texts}
    if known and not any(map(is_config, args)):
        args = [*shlex.split(known['base']), *args]
    match = config['match'] or known.get('match', 'none')
    until = config['until']
    seeds = range(config['seed'], config['seed'] + (config['seeds'] or (20 if until else 3)))
    with tempfile.TemporaryDirectory(prefix='flatgpt-compare-') as place:
        variants = [make_variant(name, text, args, place) for name, text in named.items()]
        if len({variant.folder(0) for variant in variants}) < len(texts):
            raise UserError("two variants are equal: remove one")
        if match != 'none':
            target = variants[0].count(match)
            for variant in variants[1:]:
                match_size(variant, target, match)
        with lock_folder(RUNS):
            runs = run_all(variants, seeds, until, config['margin'])
        rows = comparison(variants, runs, until, config['margin'])
    print_comparison(rows, until)
    failed = {name: of_variant[-1]['error'] for name, of_variant in runs.items() if of_variant[-1]['error']}
    return {'rows': rows, 'failed': failed}


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    check_values(settings, config, globals())
    output = json_output(json)
    numbers = compare(config, ARGS, *settings.words)
    print_json(output, **numbers)
    sys.exit(bool(numbers['failed']))

"""
Which choice is better, and by how much: trains variants of one run with the same seeds and data.

    python compare.py config/llama_small.py --variants="['', '--norm=layernorm', '--mlp=gelu']"
    python compare.py config/default.py --variants="['HEAD~1:', 'WORK:', 'WORK: --mlp=gelu']"
    python compare.py ladder --png=docs/ladder.png     # a list of lab/variants.py
    python compare.py mlp --until=decided              # seeds are added while a verdict is open
    python compare.py tricks_short --speedup=True      # how much longer would the first train for that loss
    python compare.py scaling                          # a law of sizes, and what it predicts
    python compare.py plot out-a out-b --by=time --y=loss,val_loss,lr  # the curves of any runs
    python compare.py plot lengths.jsonl               # of bench.py eval --lengths --json=lengths.jsonl
    python compare.py plot sizes.jsonl                 # of --speedup=True --json=sizes.jsonl at each size

Runs are train.py's, whose settings compare.py takes too. A variant is an addition to the command line, a git
revision and a colon in front of it, or both; WORK, the default, is the working tree with its new Python
files. All are copied first: the code may be edited meanwhile. Differences are paired by seed. Run check.py
first, and see that the variants are evaluated alike: docs/research.md.

out-compare/ has a folder for each run, named by a hash of code, arguments, seed and the data's meta.json. A
finished run is used again, so a comparison can be stopped, and go on with more seeds or variants; remove the
folder when a checkpoint that runs start from, or data without a meta.json, has changed.

At equal wall clock: --time_limit=5 --decay_lr=False, and more --max_iters than fit into these minutes.
"""
import ast
import collections
import contextlib
import dataclasses
import functools
import hashlib
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
from json import dumps, loads
from pathlib import Path

if __name__ == '__main__':  # else its folder is searched first
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from configurator import (
    check_values,
    configure,
    declared,
    duration,
    package,
    parse,
    print0,
    run_file,
)

variants: list | dict | None = None  # what is added to the command line, or {name: that}
seeds: int | None = None          # runs of each, by seed, seed + 1...; None: 3, until decided 20 [>= 1]
seed = 1337
until = ''                        # decided: seeds are added while a verdict is open [in ('', 'decided')]
margin = 0.02                     # until=decided: an interval around 0 within it, in the loss, is 'as good'
speedup = False                   # how much longer the first would train for a variant's loss
match: str | None = None          # sets d_ff; None: the list's [in ('none', 'params', 'active')]
by = 'iter'                       # axis of the curves: iter, tokens, time [in AXES]
y = 'val_loss'                    # plot: columns of log.csv: loss,lr
png = ''                          # the picture; '': in out-compare/
json: bool | str = False          # True: the numbers as a last line too; or the file to add that line to
settings = configure(globals(), 'GPTConfig', words=math.inf, also='train.py')
config = settings.config
words = settings.words

import numpy as np
import torch

import train
from bench import cache_per_token, named_model, print_json, print_table
from model import GPT, LOOKED_UP, num_params
from prepare import Bins, data_folder, read_meta

ROOT = Path(__file__).resolve().parent.parent
RUNS = 'out-compare'

# variants ---------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Variant:
    """A way to run train.py."""
    name: str
    code: Path         # a folder
    digest: str        # of the code, see copy_code, and the data
    args: list         # train.py's; seed and out_dir follow
    settings: dict     # of train.py, as args give them
    model: GPT | None  # without memory; None: the working tree's code does not know it

    def folder(self, seed):
        """The folder of the run with this seed."""
        args = [[path.read_text('utf-8') for path in sorted(Path(arg).parent.glob('*.py'))
                 if path.name == Path(arg).name or path.stem in sys.modules]  # which a config file imports
                if is_config(arg) else arg for arg in self.args]
        named = dumps([self.digest, args, self.settings, seed])  # settings: of files that a config file reads
        digest = hashlib.sha256(named.encode()).hexdigest()
        return f'{RUNS}/{digest[:12]}'


def is_config(arg):
    """Whether an argument is a config file."""
    return arg.endswith('.py') and not arg.startswith('-')


def git(*args, **variables):
    """The output of a git command, which says itself why it fails, with further variables of environment."""
    return subprocess.check_output(['git', *args], cwd=ROOT, encoding='utf-8', env=os.environ | variables)


@functools.cache
def copy_code(revision, folder):
    """Copies the Python files of a revision, or of the working tree (WORK), to a new folder. Returns a hash
    of the files that runs depend on; committing the working tree does not change it."""
    if revision == 'WORK':  # by an index of its own
        git('add', '*.py', GIT_INDEX_FILE=f'{folder}.index')
        revision = git('write-tree', GIT_INDEX_FILE=f'{folder}.index').strip()
    git('archive', f'--output={folder}.zip', revision, '*.py')
    shutil.unpack_archive(f'{folder}.zip', folder)
    others = {'config', 'docs', 'tests', 'test_model.py', 'bench.py', 'lab'}
    return hashlib.sha256(b''.join(
        path.read_bytes() for path in sorted(folder.rglob('*.py'))
        if path.relative_to(folder).parts[0] not in others)).hexdigest()


def parse_variant(text):
    """'HEAD~1: --norm=layernorm' -> ('HEAD~1', ['--norm=layernorm']); without a revision it is WORK."""
    revision, rest = re.fullmatch(r'(?s)\s*(?:([^\s:-][^\s:]*):(?=\s|-|$))?(.*)', text).groups()
    return revision or 'WORK', shlex.split(rest)


def line_settings(args, code):
    """The settings of a command line of train.py, of whatever revision, whose code is in a folder."""
    settings = {}  # which config files see
    for file in 'model.py', 'train.py':
        for name, setting in declared(code / file).items():
            with contextlib.suppress(ValueError):  # no literal: left out
                settings[name] = ast.literal_eval(setting.default)
    for arg in args:
        name, _, text = arg.removeprefix('--').partition('=')
        settings |= run_file(arg, settings) if is_config(arg) else {
            name: parse(text or True, ['bool', 'int', 'float', 'list', 'dict', 'NoneType', 'str'])}
    return settings


def make_variants(texts, base, place):
    """texts, name -> additions to base, a command line of train.py -> Variants, their code in folder `place`.
    Raises mistakes that the working tree's code can tell before any run."""
    variants = []
    for name, text in texts.items():
        revision, args = parse_variant(text)
        code = place / revision.replace('/', '_')
        args = [*base, *args]
        digest = copy_code(revision, code)
        bare = not any(map(is_config, args))
        if bare:
            args.insert(0, 'config/default.py')  # as train.py has it, but of this revision
        args = [str(code / arg) if is_config(arg) and (code / arg).is_file() else arg for arg in args]
        settings = line_settings(args, code)
        if bare and settings['init_from'] != 'scratch':
            del args[0]  # of which train.py leaves the model's fields out
        model = new_model(args) if revision == 'WORK' else None
        folder = data_folder(settings['dataset'])
        Bins(folder, 'train')  # raises FileNotFoundError unless it is prepared
        digest += dumps(read_meta(folder))
        variants.append(Variant(name, code, digest, args, settings, model))
    return variants


def new_model(args):
    """The model that a command line of train.py makes, without memory; None: it loads one."""
    with contextlib.redirect_stdout(None):
        settings = configure({**vars(train), '__name__': ''}, 'GPTConfig', argv=args)
        config = settings.config
    check_values(settings, config, vars(train))
    return named_model(config, settings.model_args, 'meta') if config['init_from'] == 'scratch' else None


def match_size(variant, target, active):
    """Sets d_ff, or experts' d_expert, so that the variant has `target` parameters, to 1%."""
    name = 'd_ff' if variant.model.config.n_expert is None else 'd_expert'
    was = getattr(variant.model.config, name)
    n_params = num_params(variant.model, active)
    wider = new_model([*variant.args, f'--{name}={was + 64}'])
    # parameters grow evenly with the width; without MLPs no width changes them
    slope = (num_params(wider, active) - n_params) / 64 or math.inf
    exact = was + (target - n_params) / slope
    for width in (was, *(n * max(1, round(exact / n)) for n in (64, 8, 2))):
        if abs(width - exact) * slope <= 0.01 * target:
            break
    else:
        raise ValueError(f"variant {variant.name!r}: no {name} gives it the {target:,} parameters of the "
                         "first, to within 1%: change its width or depth")
    if width != was:
        n_params += (width - was) * slope
        print(f"{variant.name}: {name}={width} (was {was}), {n_params:,.0f} parameters")
        variant.args.append(f'--{name}={width}')
        variant.model = new_model(variant.args)


# runs -------------------------------------------------------------------------------------------------------

def read_log(folder):
    """A run's log.csv as an array whose columns have names, NaN where nothing stands."""
    with open(Path(folder, 'log.csv'), encoding='utf-8') as f:
        return np.atleast_1d(np.genfromtxt(f, delimiter=',', names=True))


def read_facts(folder):
    """A run's run.json; before it is written {}."""
    path = Path(folder, 'run.json')
    return loads(path.read_text('utf-8')) if path.exists() else {}


def read_run(folder):
    """A run that is over, or None: what its run.json says ('error': why it would fail again), 'rows' of its
    log and its 'seconds'."""
    facts = read_facts(folder)
    if facts.get('status') not in ('done', 'time_limit'):
        return facts if facts.get('status') == 'diverged' else None
    rows = read_log(folder)
    return {**facts, 'rows': rows, 'seconds': rows['wall_s'][-1]}


def run_variant(variant, seed):
    """Runs a variant with a seed, or goes on with its stopped run. Ctrl-C has the run save its state. Returns
    read_run's dict; an error that may not come again is not kept."""
    folder = Path(variant.folder(seed))
    args = [*variant.args, f'--seed={seed}']
    folder.mkdir(parents=True, exist_ok=True)
    printed = folder / 'printed.txt'
    if (folder / 'ckpt.pt').exists() and read_facts(folder)['config']['time_limit'] is None:
        args.append('--init_from=resume')  # beside its config files, which may enter a mixer
    with open(printed, 'w', encoding='utf-8') as f:
        process = subprocess.Popen(  # in its own session: the terminal's Ctrl-C is ours alone
            [sys.executable, str(variant.code / 'train.py'), *args, f'--out_dir={folder}'], stdout=f,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    last = printed.read_text('utf-8', errors='replace').strip().rpartition('\n')[2]
    return read_run(folder) or {'error': f"{last} (exit status {process.returncode})"}


def run_all(variants, seeds, until='', margin=0.0):
    """variant's name -> read_run's dicts, by seed; runs that are not over are run, by turns. until='decided':
    of the first and the variants whose verdict is open. After a failed run a variant has no more of them."""
    n_runs = len(variants) * len(seeds)
    n_left = sum(not read_run(variant.folder(seed)) for seed in seeds for variant in variants)
    print0(f"at most {n_runs} runs, {n_runs - n_left} of them finished before, with that "
           "day's ms/step; Ctrl-C saves the state of a run, and the same command goes on")
    runs = {variant.name: [] for variant in variants}
    still = [*variants]
    for seed in seeds:
        for variant in still:
            run = read_run(variant.folder(seed))
            if not run:
                run = run_variant(variant, seed)
                n_left -= 1
                if not run['error']:
                    took = duration(run['seconds'])
                    print0(f"{variant.name}, seed {seed}: {took}, at most {n_left} to come")
            if run['error']:
                failed = f"{variant.name}, seed {seed}, failed: {run['error']}"
                if variant is variants[0]:
                    raise ValueError(f"{failed}: nothing can be compared with it")
                print0(failed)
            runs[variant.name].append(run)
        still = [variant for variant in still if not runs[variant.name][-1]['error']]
        if until:
            rows = {row['variant']: row for row in comparison(variants, runs, until, margin)}
            still = [variant for variant in still if rows[variant.name].get('verdict', OPEN[0]) in OPEN]
            if len(still) == 1:
                break
    return runs


LOSS_COLUMNS = {'val_loss': 'val loss', 'val_bpb': 'bits per byte'}  # columns of log.csv

# judging ----------------------------------------------------------------------------------------------------

# 95% of Student's t is within +- these, for 1, 2, ... degrees of freedom
T_95 = 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262


OPEN = 'one seed', 'no difference seen'  # verdicts


def lasting(n, alpha):
    """Half of a confidence interval, in standard deviations of n normal differences, that misses the mean at
    any n, however often one looks, with probability alpha at most: arXiv:2310.03722, where the t statistic's
    mixture over effects has a standard deviation of 5 here."""
    shrink = 5 ** -2 / (n + 5 ** -2)
    bound = (alpha * shrink ** 0.5) ** (-2 / n)
    ratio = (bound - 1) / (1 - bound * shrink) if bound * shrink < 1 else math.inf  # t^2 / (n - 1)
    return ((n - 1) * ratio / n) ** 0.5


def paired_difference(losses, first, alpha=None, margin=0.0):
    """Mean of the differences of losses, seed by seed, half of its 95% confidence interval, None for a single
    seed, and the verdict. alpha: the interval holds at any n (lasting), and 'as good' is a verdict too."""
    differences = np.subtract(losses, first[:len(losses)])
    n = len(differences)
    mean = differences.mean()
    df = n - 1
    if not df:
        return mean, None, 'one seed'
    t = T_95[df - 1] if df <= len(T_95) else 1.96 + 2.372 / df + 2.9 / df**2  # Cornish and Fisher's series
    half = differences.std(ddof=1) * (lasting(n, alpha) if alpha else t / n ** 0.5)
    if not math.isfinite(half):  # too few seeds
        return mean, None, 'no difference seen'
    if abs(mean) > half:
        return mean, half, 'better' if mean < 0 else 'worse'
    return mean, half, 'as good' if alpha and abs(mean) + half <= margin else 'no difference seen'


LENGTHS = {'half as long': 0.5, 'twice as long': 2.0}  # variants of the first, for speedups


def other_lengths(first):
    """The first variant at LENGTHS. Raises ValueError unless its length is max_iters."""
    for other in 'epochs', 'tokens_per_param', 'time_limit':
        if first.settings[other] is not None:
            raise ValueError(f"--speedup=True takes the length from max_iters: --{other}=None")
    max_iters = first.settings['max_iters']
    return [dataclasses.replace(first, name=name, args=[*first.args, f'--max_iters={max_iters * factor:.0f}'])
            for name, factor in LENGTHS.items()]


def add_speedups(rows):
    """To the rows of a comparison: how many times as long the first would train for that loss, and for the
    ends of the difference's interval. Its loss is taken to be linear in the logarithm of the length, also
    beyond LENGTHS; the error of that line is not counted."""
    found = {row['variant']: row['difference'] for row in rows[1:] if row['half_interval'] is not None}
    half, twice = (found.get(name, math.nan) for name in LENGTHS)
    if not half > 0 > twice:
        print('no speedups: they need two seeds, and a first that is better the longer it trains')
        return
    for row in rows[1:]:
        if row['half_interval'] is not None:
            gains = np.array([0, -1, 1]) * row['half_interval'] - row['difference']
            row['speedup'] = (2 ** (gains / np.where(gains < 0, half, -twice))).tolist()


def comparison(variants, runs, until, margin):
    """The table's rows, dicts, from run_all's runs, of variants without a run that failed. Losses on
    different data are compared as bits per byte. until: intervals hold for all variants and looks at once."""
    data = {run['data'] for own in runs.values() for run in own if 'data' in run}
    rows = []
    column = 'val_loss' if len(data) < 2 else 'val_bpb'
    alpha = 0.05 / max(1, len(variants) - 1) if until else None
    for variant in variants:
        own = runs[variant.name]
        if any(run['error'] for run in own):
            continue
        losses = [run['rows'][column][-1] for run in own]
        ms = np.concatenate([run['rows']['ms_per_iter'][1:] for run in own])  # the first is a warm-up
        row = {'variant': variant.name, 'column': column, 'losses': losses, 'loss': statistics.fmean(losses),
               'sd': statistics.stdev(losses) if len(losses) > 1 else None,
               'began': min((run['rows']['loss'][0] for run in own if run['rows']['iter'][0] == 1),
                            default=math.inf),
               'tokens': own[0]['rows']['tokens'][-1],
               'inner_params': variant.model and sum(
                   w.numel() for name, w in variant.model.named_parameters()
                   if variant.model.tags[name].group not in LOOKED_UP),
               'ms': np.percentile(ms, [10, 50, 90]).tolist(),
               'cache_bytes_per_token': variant.model and cache_per_token(variant.model, torch.bfloat16)}
        for name in ('peak_mb', 'params', 'seconds'):
            values = [run[name] for run in own]
            row[name] = None if None in values else statistics.median(values)
        if rows:
            row['difference'], row['half_interval'], row['verdict'] = paired_difference(
                losses, rows[0]['losses'], alpha, margin)
            untrained = math.log(read_meta(own[0]['data'])['vocab_size'])
            if row['began'] < 0.8 * min(rows[0]['began'], untrained):
                row['remark'] = ', trained before?'
        rows.append(row)
    return rows


def print_comparison(rows, until):
    """Prints a row for each variant: loss, difference, speed, sizes."""
    table = {}
    speedups = any('speedup' in row for row in rows)
    for row in rows:
        mean = row.get('difference')
        half = row.get('half_interval')
        low, ms, high = row['ms']
        sizes = [row[name] for name in ('tokens', 'peak_mb', 'params', 'cache_bytes_per_token')]
        verdict = row.get('verdict', '') + row.get('remark', '')
        table[row['variant']] = [
            f"{row['loss']:.4f}" + ('' if row['sd'] is None else f" ± {row['sd']:.4f}"),
            ('' if mean is None else f"{mean:+.4f}") +
            ('' if half is None else f" [{mean - half:+.4f}, {mean + half:+.4f}]"),
            f"{verdict} after {len(row['losses'])} seeds" if until and verdict else verdict,
            *(['{:.2f} [{:.2f}, {:.2f}]'.format(*row['speedup']) if 'speedup' in row else '']
              if speedups else []),
            f"{ms:.1f} ({low:.1f} to {high:.1f})",
            *('n/a' if size is None else f"{size:,.0f}" for size in sizes)]
    print_table('variant', [
        LOSS_COLUMNS[rows[0]['column']], 'to the first, 95% confidence', 'verdict',
        *['times as long for the first'] * speedups, 'ms/step', 'tokens', 'peak MB', 'parameters',
        'cache B/token'], table)
    if rows[0]['column'] == 'val_bpb':
        print("warning: the data differ; each variant is judged by bits per byte of its own val.bin")
    print("ms/step is a median, in brackets the 10th and 90th percentile")
    print("± is the spread over seeds, the difference is paired by seed, "
          f"{'all intervals together, at any number of seeds' if until else 'each interval by itself'}")


# scaling ----------------------------------------------------------------------------------------------------

def law_loss(law, n, d):
    """(E, A, a, B, b) -> E + A / n^a + B / d^b, of n parameters after d tokens (arXiv:2203.15556, eq. 10)."""
    E, A, a, B, b = law
    return E + A / n ** a + B / d ** b


def fit_law(n, d, losses):
    """The law nearest to losses (runs,): of a grid of exponents those with the best E, A, B by least squares,
    of which a negative one becomes zero."""
    grid = np.linspace(0.02, 1.2, 60)
    a, b = (exponents.reshape(-1, 1) for exponents in np.meshgrid(grid, grid))
    n_mean = n.mean()
    d_mean = d.mean()
    terms = np.stack([np.ones((len(a), len(n))), (n / n_mean) ** -a, (d / d_mean) ** -b], -1)
    found = (np.linalg.pinv(terms) @ losses).clip(0)  # (grid, 3)
    best = np.square((terms @ found[..., None])[..., 0] - losses).sum(-1).argmin()
    a = a[best, 0]
    b = b[best, 0]
    E, A, B = found[best]
    return np.array([E, A * n_mean ** a, a, B * d_mean ** b, b])


def print_law(rows, predicted):
    """Fits the law to a comparison's rows but for those named in `predicted`, prints it and what it says of
    all. Adds to rows 'law': its loss, and the ends of the interval that 95% of such rows are expected in.
    Returns curves to draw."""
    n, d, losses = np.array([[row['inner_params'], row['tokens'], row['loss']] for row in rows
                             if row['variant'] not in predicted]).T
    law = fit_law(n, d, losses)
    expected = law_loss(law, n, d)
    noise = (losses - expected) * (len(n) / (len(n) - len(law))) ** 0.5
    rng = np.random.default_rng(0)
    drawn = np.stack([fit_law(n, d, expected + rng.choice(noise, len(n)))  # bootstrap of residuals
                      for _ in range(200)], axis=1)
    ends = np.percentile(drawn, [2.5, 97.5], axis=1)
    print('L = E + A / N^a + B / D^b, 95% of a bootstrap: ' + ', '.join(
        f'{name} {value:.4g} [{low:.4g}, {high:.4g}]' for name, value, low, high in zip('EAaBb', law, *ends)))
    for row in rows:
        at = row['inner_params'], row['tokens']
        others = law_loss(drawn, *at) + rng.choice(noise, 200)
        row['law'] = [law_loss(law, *at), *np.percentile(others, [2.5, 97.5])]
    print_table('variant', ['N', 'D', 'seen', 'law, 95%', ''], {
        row['variant']: [f"{row['inner_params']:,}", f"{row['tokens']:,.0f}", f"{row['loss']:.4f}",
                         '{:.4f} [{:.4f}, {:.4f}]'.format(*row['law']),
                         'predicted' if row['variant'] in predicted else ''] for row in rows})
    points = []
    for row in rows:
        name = f"{row['tokens']:,.0f} tokens" + ', predicted' * (row['variant'] in predicted)
        points += [(name, (row['inner_params'], *[row['loss']] * 3)),
                   (f'the law, {name}', (row['inner_params'], *row['law']))]
    return curves_of(points)


# pictures ---------------------------------------------------------------------------------------------------

AXES = {'iter': 'iter', 'tokens': 'tokens', 'time': 'wall_s'}  # name: column of log.csv
SIZE = 'parameters besides the embedding'


def curve(logs, by, column='val_loss'):
    """Logs of runs that differ by seed -> where all were evaluated on the axis `by`, their mean loss, and
    the ends of its spread, (evaluations,) each."""
    logs = [rows[np.isfinite(rows[column])] for rows in logs]
    # a stopped run was evaluated there too
    shared = functools.reduce(np.intersect1d, [rows['iter'] for rows in logs])
    x, y = (np.stack([rows[name][np.isin(rows['iter'], shared)] for rows in logs])  # (runs, evaluations)
            for name in (AXES[by], column))
    mean = y.mean(0)
    spread = y.std(0, ddof=min(1, len(logs) - 1))  # 0 of a single run
    return x.mean(0), mean, mean - spread, mean + spread


def curves_of(points):
    """(name, (x, y, low, high)) pairs -> name: its x, y, low, high, sorted by x; of equal x the last."""
    curves = collections.defaultdict(dict)
    for name, point in points:
        curves[name][point[0]] = point
    return {name: np.array(sorted(own.values())).T for name, own in curves.items()}


def curves_over(setting, variants, rows):
    """Curves of the loss over a setting; a variant's curve has its name up to the last comma."""
    given = {variant.name: variant.settings[setting] for variant in variants}
    return curves_of((row['variant'].rpartition(', ')[0], (
        given[row['variant']], *row['loss'] + np.array([0, -1, 1]) * (row['sd'] or 0))) for row in rows)


def draw(path, panels, xlabel, rows=(), xscale='linear'):
    """Writes a PNG. panels: label of y -> curves, name -> x, y and the ends of y's interval; rows: of a
    comparison, whose losses stand beside, the first with its spread, the others with the intervals of their
    differences to it."""
    pictures = package('matplotlib.figure', 'pictures need', 'matplotlib')
    count = len(panels) + bool(rows)
    figure = pictures.Figure(figsize=(2 + 4 * count, 3.4), layout='constrained')
    every = figure.subplots(1, count, squeeze=False)[0]
    for axes, (ylabel, curves) in zip(every, panels.items()):
        for name, (x, y, low, high) in curves.items():
            axes.plot(x, y, marker='.', label=name)
            axes.fill_between(x, low, high, alpha=0.2)
        axes.set(xlabel=xlabel, ylabel=ylabel, xscale=xscale)
    figure.legend(*axes.get_legend_handles_labels(), loc='outside right upper', fontsize='small')
    if rows:
        for i, row in enumerate(rows):
            x = rows[0]['loss'] + row.get('difference', 0)  # of the same seeds
            every[-1].errorbar(x, i, xerr=row.get('half_interval', row['sd']), fmt='o', capsize=3)
        every[-1].set(xlabel=f'{ylabel}, spread of the first, 95% intervals', yticks=[])
        every[-1].invert_yaxis()
    for axes in every:
        axes.grid(alpha=0.3)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    print(f"picture: {path}")


def plot(names, by, columns, path):
    """Draws columns of runs' logs."""
    panels = {column: {name: curve([read_log(name)], by, column) for name in names} for column in columns}
    if not any(len(x) for curves in panels.values() for x, *_ in curves.values()):
        raise ValueError(f"{path} would be empty: the runs have no {' or '.join(columns)} yet")
    draw(path, panels, AXES[by])


def plot_lines(names, path):
    """Draws lines that --json has written: perplexity over contexts, of bench.py eval --lengths, or speedups
    over sizes, of compare.py."""
    lines = [loads(line) for name in names for line in Path(name).read_text('utf-8').splitlines()]
    if 'lengths' in lines[0]:
        points = [(line['path'], (int(length), *[each['perplexity']] * 3))
                  for line in lines for length, each in line['lengths'].items()]
        draw(path, {'perplexity': curves_of(points)}, 'context', xscale='log')
    else:
        points = [(row['variant'], (row['inner_params'], *row['speedup']))
                  for line in lines for row in line['rows']
                  if 'speedup' in row and row['inner_params'] and row['variant'] not in LENGTHS]
        draw(path, {'times as long the first would train': curves_of(points)}, SIZE, xscale='log')


# ------------------------------------------------------------------------------------------------------------

def chosen(config, args, name):
    """What is to be compared: name -> additions, train.py's args, how sizes are matched, and the list."""
    known = runpy.run_path(str(ROOT / 'lab/variants.py'))['LISTS'].get(name, {})
    texts = config['variants'] or known.get('variants')
    match = config['match'] or known.get('match')
    if not texts:
        raise ValueError("say what to compare: --variants=\"['', '--norm=layernorm']\", or a list of "
                         "lab/variants.py: python compare.py norms")
    if isinstance(texts, list):
        texts = {text.strip() or 'base': text for text in texts}
    if known and not any(map(is_config, args)):
        args = [*shlex.split(known['base']), *args]
    return texts, args, match, {} if config['variants'] else known


def compare(config, args, name='compare'):
    """Trains variants and prints the comparison. args: train.py's; name: of a list in lab/variants.py,
    unless config and args say otherwise."""
    texts, args, match, known = chosen(config, args, name)
    until = config['until']
    seeds = range(config['seed'], config['seed'] + (config['seeds'] or (20 if until else 3)))
    with tempfile.TemporaryDirectory(prefix='flatgpt-compare-') as place:
        variants = make_variants(texts, args, Path(place))
        by_default = [] if any(map(is_config, args)) else ['config/default.py']
        print0(f"{len(variants)} variants of train.py {shlex.join([*by_default, *args])}")
        if match in ('params', 'active'):
            if None in [variant.model for variant in variants]:
                raise ValueError(f"match={match} counts by the working tree's code, and from scratch")
            target = num_params(variants[0].model, match == 'active')
            for variant in variants[1:]:
                match_size(variant, target, match == 'active')
        if config['speedup']:
            variants[1:1] = other_lengths(variants[0])
        runs = run_all(variants, seeds, until, config['margin'])
        folders = {variant.name: [variant.folder(seed) for seed, _ in zip(seeds, runs[variant.name])]
                   for variant in variants}
    rows = comparison(variants, runs, until, config['margin'])
    if config['speedup']:
        add_speedups(rows)
    print_comparison(rows, until)
    failed = {name: own[-1]['error'] for name, own in runs.items() if own[-1]['error']}
    for name, error in failed.items():
        print(f"{name} has no row, because a run failed: {error}")
    label = rows[0]['column']
    path = config['png'] or f'{RUNS}/{name}.png'
    try:
        if 'predicted' in known:
            law = print_law(rows, known['predicted'])
            draw(path, {label: law}, SIZE, xscale='log')
        elif 'over' in known:
            draw(path, {label: curves_over(known['over'], variants, rows)}, known['over'], xscale='log')
        else:
            by = config['by']
            curves = {row['variant']: curve([run['rows'] for run in runs[row['variant']]], by, row['column'])
                      for row in rows}
            draw(path, {label: curves}, AXES[by], rows)
    except ImportError as error:
        print(error)
    return {'rows': rows, 'runs': folders, 'failed': failed}


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    check_values(settings, config, globals())
    name, *paths = words or ['compare']
    if name == 'plot':
        path = png or f'{RUNS}/plot.png'
        paths = paths or ['out']
        if paths[0].endswith('.jsonl'):
            plot_lines(paths, path)
        else:
            plot(paths, by, y.split(','), path)
    else:
        own = [f'--{name}' for name in config]
        args = [arg for arg in sys.argv[1:] if arg not in words and arg.partition('=')[0] not in own]
        numbers = compare(config, args, *words)
        print_json(json, **numbers)
        sys.exit(bool(numbers['failed']))

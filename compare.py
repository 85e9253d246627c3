"""
Which choice is better, and by how much: trains variants of one run with the same seeds and data.

    python compare.py config/llama_small.py --variants="['', '--norm=layernorm', '--mlp=gelu']"
    python compare.py config/default.py --variants="['HEAD~1:', 'WORK:', 'WORK: --mlp=gelu']"
    python compare.py ladder --png=docs/ladder.png     # a list of config/variants.py
    python compare.py plot out-a out-b --by=time       # the curves of any runs
    python compare.py plot lengths.jsonl               # of bench.py eval --lengths --json=lengths.jsonl

Runs are train.py's, whose settings compare.py takes too. A variant is an addition to the command line, a git
revision and a colon in front of it, or both; WORK, the default, is the working tree with its new Python
files. All are checked out first: the code may be edited meanwhile. Differences are paired by seed.

out-compare/ has a folder for each run, named by a hash of code, arguments, seed and the data's meta.json. A
finished run is used again, so a comparison can be stopped, and go on with more seeds or variants; remove the
folder when a checkpoint that runs start from, or data without a meta.json, has changed.

At equal wall clock: --time_limit=5 --decay_lr=False, and more --max_iters than fit into these minutes.
"""
import contextlib
import csv
import dataclasses
import hashlib
import io
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
from json import dumps, loads
from pathlib import Path

from configurator import check_settings, configure, effective, package, run_file

variants: list | dict | None = None  # what is added to the command line, or {name: that}
seeds = 3                         # runs of each, by seed, seed + 1...
seed = 1337
match: str | None = None          # d_ff is set for equal params, or active ones; none; None: the list's
by = 'iter'                       # axis of the curves: iter, tokens, time
png = ''                          # the picture; '': in out-compare/
json: bool | str = False          # True: the numbers as a last line too; or the file to add that line to
config, _, words = configure(globals(), 'GPTConfig', words=math.inf, also='train.py')[:3]

import numpy as np
import torch

import train
from bench import cache_per_token, named_model, print_json, print_table
from model import GPT, GPTConfig, num_params, unused
from prepare import Bins

ROOT = Path(__file__).resolve().parent
RUNS = 'out-compare'

# variants ---------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Variant:
    """A way to run train.py."""
    name: str
    code: Path         # a worktree
    digest: str        # of the code, see worktree, and the data
    args: list         # train.py's, but for seed and out_dir
    model: GPT | None  # without memory; None: the working tree's code does not know it

    def folder(self, seed):
        """Of the run with a seed."""
        args = [Path(arg).read_text('utf-8') if is_config(arg) else arg for arg in self.args]
        return os.path.join(RUNS, hashlib.sha256(dumps([self.digest, args, seed]).encode()).hexdigest()[:12])


def is_config(arg):
    return arg.endswith('.py') and not arg.startswith('-')


def git(*args, cwd=None):
    """The output of a git command. Raises ValueError with git's message."""
    done = subprocess.run(['git', *args], cwd=cwd or ROOT, capture_output=True, encoding='utf-8')
    if done.returncode:
        raise ValueError(f"git {shlex.join(args)}: {done.stderr.strip()}")
    return done.stdout


def worktree(revision, folder):
    """Checks out a revision, or WORK, to a new folder. Returns git's hashes of the Python files that runs
    depend on; a commit of the work does not change them."""
    is_work = revision == 'WORK'
    commit = git('stash', 'create').strip() or 'HEAD' if is_work else revision  # a commit that nothing names
    git('worktree', 'add', '--detach', str(folder), commit)
    if is_work:
        for name in git('ls-files', '-z', '--others', '--exclude-standard', '*.py').split('\0')[:-1]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git('add', '--all', cwd=folder)  # to the index of this worktree alone
    others = ('config', 'docs', 'tests', 'test_model.py', 'bench.py', 'check.py', 'compare.py')
    return git('ls-files', '--stage', '*.py', *(f':!{name}' for name in others), cwd=folder)


def parse_variant(text):
    """'HEAD~1: --norm=layernorm' -> ('HEAD~1', ['--norm=layernorm']); without a revision it is WORK."""
    found = re.fullmatch(r'(?s)\s*([^\s:-][^\s:]*):(?=\s|-|$)(.*)', text)
    revision, rest = found.groups() if found else ('WORK', text)
    return revision, shlex.split(rest)


def data_meta(args):
    """The meta.json, '' without one, of the data that a command line of train.py names. Raises
    FileNotFoundError unless it is prepared."""
    values = {**train.config, **dataclasses.asdict(GPTConfig())}  # which config files see
    for arg in args:
        if is_config(arg):
            values |= run_file(arg, ROOT, values)
        elif arg.startswith('--dataset='):
            values['dataset'] = arg.partition('=')[2]
    folder = train.data_folder(values['dataset'])
    Bins(folder, 'train')
    return read_text(os.path.join(folder, 'meta.json'))


def make_variants(texts, base, place):
    """texts, name -> additions to base, a command line of train.py -> Variants, their code in folder `place`.
    Raises mistakes that the working tree's code can tell before any run."""
    digests, found = {}, []
    for name, text in texts.items():
        revision, args = parse_variant(text)
        code, args = place / revision.replace('/', '_'), [*base, *args]
        if any(arg.startswith(('--out_dir=', '--seed=')) for arg in args):
            raise ValueError(f"variant {name!r}: leave out out_dir and seed: each run has its own folder, "
                             "and seeds go from compare.py's --seed on")
        if revision not in digests:
            digests[revision] = worktree(revision, code)
            if 'run.json' not in (code / 'train.py').read_text('utf-8'):
                raise ValueError(f"variant {name!r}: train.py of {revision} writes no run.json to compare by")
        if not any(is_config(arg) or arg.startswith('--init_from=') for arg in args):
            args.insert(0, 'config/default.py')  # as train.py has it, but of this revision
        args = [str(code / arg) if is_config(arg) and (code / arg).is_file() else arg for arg in args]
        model = new_model(args) if revision == 'WORK' else None
        found.append(Variant(name, code, digests[revision] + data_meta(args), args, model))
    return found


def new_model(args):
    """The model that a command line of train.py makes, without memory; None: it loads one."""
    with contextlib.redirect_stdout(io.StringIO()):
        settings = configure({**vars(train), '__name__': ''}, 'GPTConfig', argv=args)
        config, model_args = settings.config, effective(settings, unused)
    check_settings(config, train.CHOICES)
    with torch.device('meta'):
        return named_model(config, model_args) if config['init_from'] == 'scratch' else None


def match_size(variant, target, active):
    """Sets d_ff, or experts' d_expert, so that the variant has `target` parameters, to 1%."""
    name = 'd_ff' if variant.model.config.n_expert is None else 'd_expert'
    width, have = getattr(variant.model.config, name), num_params(variant.model, active)
    if abs(have / target - 1) <= 0.01:
        return
    each = (num_params(new_model([*variant.args, f'--{name}={width + 64}']), active) - have) / 64
    for multiple in (64, 8, 2):
        wanted = multiple * max(1, round((width + (target - have) / each) / multiple))
        model = new_model([*variant.args, f'--{name}={wanted}'])
        if abs(num_params(model, active) / target - 1) <= 0.01:
            print(f"{variant.name}: {name}={wanted} (was {width}), {num_params(model, active):,} parameters")
            variant.args.append(f'--{name}={wanted}')
            return
    raise ValueError(f"variant {variant.name!r}: no {name} gives it the {target:,} parameters of the first, "
                     "to within 1%: change its width or depth")


# runs -------------------------------------------------------------------------------------------------------

def read_text(path):
    """'' where there is no such file."""
    return Path(path).read_text('utf-8', errors='replace') if os.path.exists(path) else ''


def read_log(folder):
    """The rows of a run's log.csv."""
    with open(os.path.join(folder, 'log.csv'), encoding='utf-8', newline='') as f:
        return [row for row in csv.DictReader(f) if row['wall_s']]


def read_facts(folder):
    """A run's run.json; before it is written {}."""
    return loads(read_text(os.path.join(folder, 'run.json')) or '{}')


def read_run(folder):
    """A run that is over, or None: what its run.json says ('error': why it would fail again), 'rows' of its
    log, and numbers of these."""
    facts = read_facts(folder)
    if facts.get('status') not in ('done', 'time_limit'):
        return facts if facts.get('error') else None
    rows = read_log(folder)
    return {**facts, 'rows': rows, 'ms': [float(row['ms_per_iter']) for row in rows],
            'seconds': float(rows[-1]['wall_s'])}


def run_variant(variant, seed, runs_left):
    """Runs a variant with a seed, or goes on with its stopped run. Ctrl-C has the run save its state. Returns
    read_run's dict; an error that may not come again is not kept."""
    folder, told = variant.folder(seed), False
    os.makedirs(folder, exist_ok=True)
    printed, args = os.path.join(folder, 'printed.txt'), [*variant.args, f'--seed={seed}']
    saved = os.path.exists(os.path.join(folder, 'ckpt.pt'))
    if saved and read_facts(folder)['config']['time_limit'] is None:
        args = ['--init_from=resume']  # the checkpoint holds all settings
    with open(printed, 'w', encoding='utf-8') as f:
        process = subprocess.Popen(  # in its own session: the terminal's Ctrl-C is ours alone
            [sys.executable, str(variant.code / 'train.py'), *args, f'--out_dir={folder}'], stdout=f,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while process.poll() is None:
            time.sleep(0.1)
            with contextlib.suppress(FileNotFoundError):  # not written yet
                rows = [] if told else read_log(folder)
                if len(rows) > 1:  # the first has the warm-up
                    told, ms = True, float(rows[-1]['ms_per_iter'])
                    left = read_facts(folder)['config']['max_iters'] * ms / 1e3 * runs_left
                    print(f"{variant.name}, seed {seed}: {ms:.0f} ms a step, about {train.duration(left)} "
                          f"for all {runs_left} to come", flush=True)
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(BrokenPipeError):  # Ctrl-C has ended `| tee`
                print('stopping this run: it saves its state first; the same command goes on', flush=True)
            process.wait()
    last = read_text(printed).strip().rpartition('\n')[2]
    return read_run(folder) or {'error': f"{last} (exit status {process.returncode})"}


def run_all(variants, seeds):
    """read_run's dicts, [[of each seed] of each variant]; runs that are not over are run, by turns."""
    runs = {variant.folder(seed): (variant, seed) for seed in seeds for variant in variants}
    found = {folder: read_run(folder) for folder in runs}
    todo = [folder for folder, run in found.items() if not run]
    print(f"{len(runs)} runs, {len(runs) - len(todo)} of them finished before, with that day's ms/step")
    for i, folder in enumerate(todo):
        run = found[folder] = run_variant(*runs[folder], len(todo) - i)
        if run['error']:
            print(f"{runs[folder][0].name}, seed {runs[folder][1]}: failed: {run['error']}", flush=True)
    return [[found[variant.folder(seed)] for seed in seeds] for variant in variants]


LOSSES = {'val_loss': 'val loss', 'val_bpb': 'bits per byte'}  # columns of log.csv

# judging ----------------------------------------------------------------------------------------------------

# 95% of Student's t is within +- these, for 1, 2, ... degrees of freedom
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def paired_difference(own, first):
    """Mean of the differences of losses, seed by seed, and half of its 95% confidence interval, None for a
    single seed."""
    differences = [a - b for a, b in zip(own, first, strict=True)]
    mean, df = statistics.fmean(differences), len(differences) - 1
    if not df:
        return mean, None
    t = T_95[df - 1] if df <= len(T_95) else 1.96 + 2.372 / df + 2.9 / df**2  # Cornish and Fisher's series
    return mean, t * statistics.stdev(differences) / len(differences) ** 0.5


def judge(mean, half):
    """The verdict of an interval."""
    if half is None:
        return 'one seed'
    return 'no difference seen' if abs(mean) <= half else 'better' if mean < 0 else 'worse'


def comparison(variants, runs):
    """The table's rows, dicts, from run_all's runs. Losses on different data are compared as bits per
    byte."""
    data, rows = {run['data'] for own in runs for run in own if 'data' in run}, []
    column = 'val_loss' if len(data) < 2 else 'val_bpb'
    for variant, own in zip(variants, runs):
        row, errors = {'variant': variant.name}, [run['error'] for run in own if run['error']]
        rows.append(row)
        if errors:
            row['error'] = f"{len(errors)} of {len(own)} runs failed: {errors[0]}"
            continue
        losses = [float(run['rows'][-1][column]) for run in own]
        row |= {'column': column, 'losses': losses, 'loss': statistics.fmean(losses),
                'sd': statistics.stdev(losses) if len(losses) > 1 else None,
                'cache_bytes_per_token': variant.model and cache_per_token(variant.model, torch.bfloat16)}
        low, row['ms'], high = np.percentile([ms for run in own for ms in run['ms']], [10, 50, 90]).tolist()
        row['ms_range'] = low, high
        for name in ('peak_mb', 'params', 'seconds'):
            values = [run[name] for run in own]
            row[name] = None if None in values else statistics.median(values)
        if 'losses' in rows[0] and row is not rows[0]:
            mean, half = paired_difference(losses, rows[0]['losses'])
            row |= {'difference': mean, 'half_interval': half, 'verdict': judge(mean, half)}
    return rows


def print_comparison(rows, n_seeds):
    table, column = {}, 'val_loss'
    for row in rows:
        if 'error' in row:
            print(f"{row['variant']}: {row['error']}")
            continue
        column, loss, difference, verdict = row['column'], f"{row['loss']:.4f}", '', row.get('verdict', '')
        if row['sd'] is not None:
            loss += f" ± {row['sd']:.4f}"
        if verdict:
            mean, half = row['difference'], row['half_interval']
            interval = '' if half is None else f" [{mean - half:+.4f}, {mean + half:+.4f}]"
            difference = f"{mean:+.4f}{interval}"
        low, high = row['ms_range']
        sizes = [row[name] for name in ('peak_mb', 'params', 'cache_bytes_per_token')]
        table[row['variant']] = [loss, difference, verdict, f"{row['ms']:.1f} ({low:.1f} to {high:.1f})",
                                 *('n/a' if size is None else f"{size:,.0f}" for size in sizes)]
    heads = ['to the first, 95% confidence', 'verdict', 'ms/step', 'peak MB', 'parameters', 'cache B/token']
    print_table('variant', [LOSSES[column], *heads], table)
    print("ms/step is a median, in brackets the 10th and 90th percentile")
    print(f"± is the spread over {n_seeds} seeds, the difference is paired by seed, each interval by itself"
          if n_seeds > 1 else 'one seed tells nothing of the spread between seeds: --seeds=3')


# pictures ---------------------------------------------------------------------------------------------------

AXES = {  # name: (column of log.csv, label)
    'iter': ('iter', 'iterations'), 'tokens': ('tokens', 'tokens'), 'time': ('wall_s', 'seconds'),
}


def curve(logs, by, column='val_loss'):
    """Logs of runs that differ by seed -> where all were evaluated on the axis `by`, their mean loss and its
    spread, (evaluations,) each."""
    points = [{int(row['iter']): (float(row[AXES[by][0]]), float(row[column])) for row in rows if row[column]}
              for rows in logs]
    shared = sorted(set.intersection(*map(set, points)))  # a stopped run was evaluated there too
    x, y = np.array([[run[it] for run in points] for it in shared]).transpose(2, 0, 1)  # (evaluations, runs)
    return x.mean(1), y.mean(1), y.std(1, ddof=min(1, len(logs) - 1))  # 0 of a single run


def draw(path, curves, xlabel, ylabel, rows=()):
    """Writes a PNG. curves: name -> x, y and the spread of y; rows: of a comparison, whose losses stand
    beside, with the intervals of their differences to the first."""
    pictures = package('matplotlib.figure', 'pictures need', 'matplotlib')
    figure = pictures.Figure(figsize=(9 if rows else 6, 3.4), layout='constrained')
    axes, *beside = figure.subplots(1, 1 + bool(rows), squeeze=False)[0]
    for name, (x, y, spread) in curves.items():
        line, = axes.plot(x, y, marker='.', label=name)
        axes.fill_between(x, y - spread, y + spread, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    if not rows:  # which name the colours
        figure.legend(loc='outside right upper', fontsize='small')
    for axes in beside:
        for i, row in enumerate(rows):
            axes.errorbar(row['loss'], i, xerr=row.get('half_interval'), fmt='o', capsize=3)
        axes.set_yticks(range(len(rows)), [row['variant'] for row in rows])
        axes.set(xlabel=f'{ylabel}, 95% interval')
        axes.invert_yaxis()
        axes.grid(alpha=0.3)
    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    figure.savefig(path, dpi=80, pil_kwargs={'optimize': True})
    print(f"picture: {path}")


def plot(names, by, path):
    """Draws the validation loss of runs, given by folder; or perplexity, from .jsonl files of bench.py."""
    curves = {}
    for name in names:
        if name.endswith('.jsonl'):
            for line in map(loads, Path(name).read_text('utf-8').splitlines()):
                y = np.array([each['perplexity'] for each in line['lengths'].values()])
                curves[line['path']] = [int(length) for length in line['lengths']], y, 0 * y
        else:
            curves[name] = curve([read_log(name)], by)
            print(f"{name}: val loss {curves[name][1][-1]:.4f}")
    labels = ('context', 'perplexity') if names[0].endswith('.jsonl') else (AXES[by][1], LOSSES['val_loss'])
    draw(path, curves, *labels)
    return {'plot': path, 'last': {name: float(y[-1]) for name, (_, y, _) in curves.items()}}


# ------------------------------------------------------------------------------------------------------------

def compare(config, args, name='compare'):
    """Trains variants and prints the comparison. args: train.py's; name: of a list in config/variants.py,
    unless config and args say otherwise."""
    chosen = runpy.run_path(str(ROOT / 'config' / 'variants.py'))['LISTS'].get(name, {})
    texts, match = config['variants'] or chosen.get('variants'), config['match'] or chosen.get('match')
    if not texts:
        raise ValueError("say what to compare: --variants=\"['', '--norm=layernorm']\", or a list of "
                         "config/variants.py: python compare.py norms")
    if isinstance(texts, list):
        texts = {text.strip() or 'base': text for text in texts}
    if chosen and not any(map(is_config, args)):
        args = [*shlex.split(chosen['base']), *args]
    seeds = range(config['seed'], config['seed'] + config['seeds'])
    try:
        with tempfile.TemporaryDirectory(prefix='flatgpt-compare-') as place:
            variants = make_variants(texts, args, Path(place))
            print(f"{len(variants)} variants of train.py {shlex.join(args)}", flush=True)
            if match in ('params', 'active'):
                if None in [variant.model for variant in variants]:
                    raise ValueError(f"match={match} counts by the working tree's code, and from scratch")
                target = num_params(variants[0].model, match == 'active')
                for variant in variants[1:]:
                    match_size(variant, target, match == 'active')
            runs = run_all(variants, seeds)
            folders = {variant.name: [variant.folder(seed) for seed in seeds] for variant in variants}
    finally:
        git('worktree', 'prune')
    rows = comparison(variants, runs)
    print_comparison(rows, len(seeds))
    good = [row for row in rows if 'error' not in row]
    if not good:
        raise ValueError('no variant has a run of each seed to compare: see why above')
    curves = {row['variant']: curve([run['rows'] for run in own], config['by'], row['column'])
              for row, own in zip(rows, runs) if row in good}
    path = config['png'] or f'{RUNS}/{name}.png'
    try:
        draw(path, curves, AXES[config['by']][1], LOSSES[good[0]['column']], good)
    except ImportError as error:
        print(error)
    return {'match': match, 'plot': path, 'rows': rows, 'runs': folders}


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    check_settings(config, {'by': AXES})
    if words[:1] == ['plot']:
        numbers = plot(words[1:], by, png or f'{RUNS}/plot.png')
    else:
        own = tuple(f'--{name}=' for name in config)
        args = [arg for arg in sys.argv[1:] if arg not in words and not arg.startswith(own)]
        numbers = compare(config, args, *words)
    print_json(json, **numbers)

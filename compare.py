"""
Which choice is better, and by how much: trains variants of one run with the same seeds and data.

    python compare.py config/llama_small.py --variants="['', '--norm=layernorm', '--mlp=gelu']"
    python compare.py config/default.py --variants="['HEAD~1:', 'WORK:', 'WORK: --norm=layernorm']"
    python compare.py norms                            # a list of config/variants.py
    python compare.py plot out-a out-b --by=time       # the curves of any runs

Runs are made by train.py, whose settings it takes too. A variant is what is added to the command line, a git
revision and a colon in front of it, or both; WORK is the working tree as it stands, with new files if they
are Python. A run that is finished is used again, so a comparison can be stopped, and go on with more seeds or
variants. The difference to the first variant is paired by seed. --json=True prints all numbers as a last
line.
"""
import ast
import contextlib
import csv
import dataclasses
import functools
import hashlib
import io
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
import zipfile
from json import dumps, loads
from pathlib import Path

from configurator import configure

variants: list | dict | None = None  # what is added to the command line, or {name: that}
seeds = 3                         # runs of each, by seed, seed + 1...
seed = 1337
match: str | None = None          # by d_ff params, active; by max_iters time; none; None: list's
by = 'iter'                       # iter, tokens, time
json: bool | str = False          # True: the numbers as a last line too; or the file to add that line to
words = configure(globals(), 'GPTConfig', words=math.inf, also='train.py').words
config = {name: globals()[name] for name in ('variants', 'seeds', 'seed', 'match', 'by', 'json')}

import numpy as np
import torch

import train
from bench import cache_per_token, print_json, print_table
from model import GPT, GPTConfig
from prepare import Bins, read_meta

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
            settings, model_args, _, given = configure(
                {**vars(train), '__name__': ''}, 'GPTConfig', argv=args, default_file='config/default.py')
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
    train.check_data(folder, meta, *bins, model.config)
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


def check_settings(s):
    """Raises ValueError for the first setting that is no choice, or too low. s: this file's settings."""
    if s['match'] not in (None, 'none', 'params', 'active', 'time'):
        raise ValueError(f"match={s['match']!r} is none of none, params, active, time")
    if s['by'] not in AXES:
        raise ValueError(f"by={s['by']!r} is none of {', '.join(AXES)}")
    for name, low in {'seed': 0, 'seeds': 1}.items():
        if s[name] < low:
            raise ValueError(f"{name}={s[name]} must be at least {low}")


if __name__ == '__main__':
    check_settings(config)
    if words[:1] == ['plot']:
        numbers = plot(config, {}, words[1:])
    elif len(words) > 1:
        raise ValueError(f"cannot use {words[1]!r}: settings are --key=value, config files end in .py")
    else:
        numbers = compare(config, [arg for arg in sys.argv[1:] if arg not in words], words)
    print_json(json, what='plot' if words[:1] == ['plot'] else 'compare', **numbers)

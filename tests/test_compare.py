"""Tests of compare."""
import csv
import glob
import importlib.util
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from common import ROOT, TOY, log_rows, run, write_toy

import bench as flat_bench
import compare as flat_compare
import train as flat_train
from configurator import configure
from model import GPT, GPTConfig
from test_model import MLA

transformers = pytest.importorskip('transformers', reason='the oracle of the parity tests')


# comparing --------------------------------------------------------------------------------------------------
def interrupt_run():
    """Sends this process Ctrl-C as soon as a run of a comparison has written a checkpoint."""
    def poll():
        for _ in range(6000):
            if glob.glob('out-compare/*/ckpt.pt'):
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.01)
    threading.Thread(target=poll, daemon=True).start()


def test_compare_is_ordinary_runs_stopped_and_continued(folder, capsys, monkeypatch):
    """The loss is that of train.py alone, to the last digit, also where Ctrl-C came in between."""
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    torch.set_num_threads(1)
    run('train.py', *TOY, '--norm=layernorm', '--out_dir=out')
    monkeypatch.setattr(flat_compare, 'stop_signals', lambda: [signal.SIGINT])  # for the others are pytest's
    config = {**flat_compare.config, 'variants': {'b': '--norm=layernorm'}, 'seeds': 1}
    interrupt_run()
    with pytest.raises(KeyboardInterrupt, match='0 of 1 runs are finished; the same command goes on'):
        flat_compare.compare(config, TOY, [])
    stopped, = glob.glob('out-compare/*/')
    assert os.path.exists(stopped + 'ckpt.pt') and not os.path.exists(stopped + 'result.json')
    capsys.readouterr()
    numbers = flat_compare.compare(config, TOY, [])
    first = capsys.readouterr().out
    row, = numbers['rows']
    assert row['losses'] == [float(log_rows('out')[-1]['val_loss'])] and row['runs'] == [stopped[:-1]]
    assert (row['params'], row['cache_bytes_per_token'], row['iterations']) == (33728, 2 * 2 * 2 * 32, 20)
    rows = log_rows(stopped)
    # every iteration has a row: the first four have the warm-up in them
    assert row['ms'] == np.median([float(r['ms_per_iter']) for r in rows if int(r['iter']) > 4])
    assert 50 < row['peak_mb'] < 5000 and row['seconds'] == float(rows[-1]['wall_s'])
    again, second = flat_compare.compare(config, TOY, []), capsys.readouterr().out
    assert '1 runs, 1 of them finished before\n' in second and 'one seed tells nothing' in second
    assert again == numbers and second.partition('\nvariant')[2] == first.partition('\nvariant')[2]


def test_compare_says_which_is_better(folder, capsys, monkeypatch):
    """From runs whose losses are known: one is worse at each seed, one fails, one was evaluated once more."""
    found = {'a': [2.0, 2.1, 2.3], 'b': [2.25, 2.25, 2.5], 'c': None, 'd': [2.0, 2.1, 2.3]}
    trained = []

    def train_variant(variant, seed, folder, watch):
        trained.append((variant.name, seed))
        losses, error = found[variant.name], None if found[variant.name] else 'the run diverged: x'
        if losses:
            at_ctrl_c = {15: 1.0} if (variant.name, seed) == ('d', 8) else {}
            fake_log(Path(folder), {1: None, 10: 1.9 + seed / 10, **at_ctrl_c, 20: losses[seed - 7]}, 0.5)
        os.makedirs(folder, exist_ok=True)
        Path(folder, 'result.json').write_text(json.dumps({'error': error, 'peak_mb': 100}), encoding='utf-8')
    monkeypatch.setattr(flat_compare, 'train_variant', train_variant)
    monkeypatch.setattr(flat_compare, 'code_digest', lambda code: '')
    monkeypatch.setattr(flat_compare, 'stop_signals', list)
    variants = {'a': '', 'b': '--norm=layernorm', 'c': '--learning_rate=1e12', 'd': '--beta1=0.8'}
    config = {**flat_compare.config, 'variants': variants, 'seed': 7}
    numbers = flat_compare.compare(config, [*TOY, '--seed=7'], [])
    out = capsys.readouterr().out
    assert trained == [(name, seed) for seed in (7, 8, 9) for name in variants]
    a, b, c, d = numbers['rows']
    assert [a['losses'], b['losses']] == [found['a'], found['b']] and numbers['failed'] == ['c']
    assert a['loss'] == pytest.approx(np.mean(found['a'])) and a['seconds'] == 10 and a['peak_mb'] == 100
    assert a['sd'] == pytest.approx(np.std(found['a'], ddof=1)) and 'difference' not in a
    low, high = 0.2 - 4.3027 * 0.05 / 3 ** 0.5, 0.2 + 4.3027 * 0.05 / 3 ** 0.5  # of 0.25, 0.15, 0.2
    assert [b[k] for k in ('difference', 'low', 'high')] == pytest.approx([0.2, low, high], abs=5e-5)
    assert (b['verdict'], d['verdict']) == ('worse', 'no difference seen')
    assert re.search(r'^b .*\+0\.2000 \[\+0\.0758, \+0\.3242\] +worse', out, re.M)
    assert re.search(r'^c +3 of 3 runs failed: the run diverged: x$', out, re.M)
    assert a['best'] == d['best'] == pytest.approx(np.mean(found['a']))  # not what Ctrl-C has evaluated
    assert (numbers['plot'] is None) == (importlib.util.find_spec('matplotlib') is None)
    assert numbers['plot'] is None or Path(numbers['plot']).read_bytes().startswith(b'\x89PNG')
    # with a seed less, of runs that are there, and with a variant more
    variants['e'] = '--beta1=0.7'
    found['e'] = [3.0, 3.1, 3.3]
    trained.clear()
    again = flat_compare.compare({**config, 'seeds': 2}, TOY, [])
    assert trained == [('e', 7), ('e', 8)] and again['rows'][1]['losses'] == found['b'][:2]
    assert '10 runs, 8 of them finished before, whose ms/step are of then' in capsys.readouterr().out
    assert not again['plot'] or again['plot'] != numbers['plot']


def fake_variant(folder, code):
    """A variant whose train.py is these lines."""
    os.makedirs(folder / 'code')
    (folder / 'code' / 'train.py').write_text(code, encoding='utf-8')
    return flat_compare.Variant('x', 'WORK', folder / 'code', [])


@pytest.mark.parametrize('error', [KeyboardInterrupt, BrokenPipeError])
def test_no_run_goes_on_alone(tmp_path, monkeypatch, error):
    """Whatever ends a comparison, the run has saved its state first, also where nobody reads what is said."""
    monkeypatch.chdir(tmp_path)
    variant = fake_variant(tmp_path, """if True:
        import pathlib, signal, sys, time
        def save(number, frame):
            pathlib.Path('saved').touch()
            sys.exit(130)
        signal.signal(signal.SIGTERM, save)
        pathlib.Path('ready').touch()
        time.sleep(60)""")

    def watch():
        if os.path.exists('ready'):
            raise error

    def nobody_reads(*text, flush):
        raise BrokenPipeError
    monkeypatch.setattr(flat_bench, 'print', nobody_reads, raising=False)
    handler = signal.getsignal(signal.SIGINT)
    process = flat_compare.start_run(variant.command('run'), '.')
    with pytest.raises(error):
        flat_compare.wait(process, watch)
    assert process.returncode == 130 and os.path.exists('saved')
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize('system, sent', [('posix', ['terminate']), ('nt', [])])
def test_ctrl_c_reaches_a_run_once(monkeypatch, system, sent):
    """On Windows the terminal has sent it; elsewhere a run is in a session of its own."""
    asked = []
    process = types.SimpleNamespace(poll=lambda: None, wait=lambda: 130,
                                    terminate=lambda: asked.append('terminate'))

    def watch():
        raise KeyboardInterrupt
    monkeypatch.setattr(flat_bench, 'os', types.SimpleNamespace(name=system))
    with pytest.raises(KeyboardInterrupt):
        flat_compare.wait(process, watch)
    assert asked == sent


@pytest.mark.skipif(os.name != 'posix', reason='Windows has no such signal')
def test_a_hang_up_stops_a_comparison_unless_it_is_to_be_ignored():
    assert signal.SIGHUP in flat_compare.stop_signals()
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert signal.SIGHUP not in flat_compare.stop_signals()
    finally:
        signal.signal(signal.SIGHUP, handler)


LOGGED = "open(f'{folder}/log.csv', 'w').write('iter,ms_per_iter,val_loss,wall_s\\n9,5,2.5,3\\n')"


@pytest.mark.parametrize('code, error, result', [
    ('os.kill(os.getpid(), 9)', 'signal 9 ended it', None),
    ("sys.exit('train.py: no memory')", 'no memory', None),
    ("print('done: 3 iterations')", 'no log.csv there', None),
    ("sys.exit('train.py: the run diverged: x')", None, {'error': 'the run diverged: x', 'peak_mb': None}),
    (f"{LOGGED}\nprint('done: 9 iterations in 3 s, best val loss 2.5, peak memory 1,234 MB; next: x')", None,
     {'error': None, 'peak_mb': 1234})])
def test_compare_keeps_what_would_come_again(tmp_path, code, error, result):
    variant = fake_variant(tmp_path, f"import os, sys\nfolder = sys.argv[1].partition('=')[2]\n{code}")
    path = str(tmp_path / 'run')
    try:
        found = flat_compare.train_variant(variant, 1, path, None)
    except OSError as caught:
        found = str(caught)
    assert found is None if error is None else re.search(error, found)
    kept = flat_compare.read_run(path)
    assert (kept is None) == (result is None) and (not kept or result.items() <= kept.items())


def test_compare_says_early_how_long_it_takes(tmp_path, capsys):
    """Once, by what train.py itself prints."""
    watch, printed = flat_compare.foretell(tmp_path, 6), tmp_path / 'printed.txt'
    row = dict.fromkeys(flat_train.LOG_FIELDS, 0.5) | {'iter': 4, 'ms_per_iter': 90.0}
    for text in ('', 'run: 2,000 iterations of 64 tokens\n', flat_train.describe(row, 9), '\nmore\n'):
        with open(printed, 'a', encoding='utf-8') as f:
            f.write(text)
        watch()
    assert capsys.readouterr().out == '3:00 a run, 18:00 for 6, besides evaluations\n'  # 2,000 of 0.09 s


def test_compare_times_steps(folder, monkeypatch):
    monkeypatch.setattr(flat_compare, 'STRETCH', (5, 60.0))
    ms, iterations = flat_compare.time_steps(flat_variant('--max_iters=1000000'), 1, 'out')
    rows = [float(row['ms_per_iter']) for row in log_rows('out') if row['wall_s'] and int(row['iter']) > 4]
    assert iterations == 1_000_000 and min(rows) <= ms <= max(rows) and len(rows) >= 5


@pytest.mark.parametrize('args, message', [
    (["--variants=['', '--normm=x']"], "variant '--normm=x': .*unknown setting 'normm'; did you mean 'norm'"),
    (["--variants=['', '--n_head=3']"], "variant '--n_head=3': invalid config: .*n_head must divide"),
    (["--variants=['', '--optimizer=sgd']"], "variant '--optimizer=sgd': optimizer='sgd' is none of"),
    (["--variants=['', '--dataset=nowhere']"], "variant '--dataset=nowhere': data.nowhere is not prepared"),
    (["--variants=['', '--block_size=2000']"], "variant '--block_size=2000': .*needs block_size"),
    (["--variants=['', '--max_iters=x']"], "variant '--max_iters=x': .*max_iters must be int"),
    (["--variants=['', '--out_dir=x']"], "variant '--out_dir=x': out_dir: leave it out"),
    (["--variants=['', '--seed=1337']"], "variant '--seed=1337': seed: leave it out"),
    (["--variants=['', '--time_limit=1']"], "variant '--time_limit=1': time_limit: leave it out"),
    (['--max_iters=0', "--variants=['']"], "variant 'base': max_iters: leave it out"),
    (["--variants=['--init_from=resume']"], "variant '--init_from=resume': init_from: leave it out"),
    (["--variants=['', 'no-such-branch:']"], "variant 'no-such-branch:': no-such-branch is no revision"),
    (["--variants=['', '']"], "'base' twice"), (["--variants=[3]"], 'must be texts'), ([], 'must be texts'),
    (['no_list'], "no list 'no_list', but positions, "), (['norms', 'mlp'], "cannot use 'mlp'"),
    (["--variants=['', '--n_embd=512']", '--match=params'], "--n_embd=512': no d_ff gives it the 33,728"),
    (['--seeds=0'], 'seeds=0 must be at least 1'), (['--match=loss'], "match='loss' is none of"),
    (['--by=steps'], "by='steps' is none of iter, tokens, time")])
def test_compare_refuses_in_one_line_before_any_run(folder, args, message):
    with pytest.raises(ValueError, match=message) as error:
        run('compare.py', *TOY, *args)
    assert '\n' not in str(error.value) and not os.path.exists('out-compare')


def test_paired_confidence():
    """Quantiles against Student's density integrated, coverage and power by simulation."""
    for n in (*range(2, 33), 61, 200):
        differences = np.arange(n) - (n - 1) / 2 + 3
        mean, low, high = flat_compare.paired_difference(list(differences), [0.0] * n)
        t = (high - low) / 2 / (differences.std(ddof=1) / n ** 0.5)
        x, df = np.linspace(0, t, 20001), n - 1
        scale = math.gamma((df + 1) / 2) / math.gamma(df / 2) if df < 300 else 0
        density = scale / (df * math.pi) ** 0.5 * (1 + x * x / df) ** (-(df + 1) / 2)
        assert 2 * np.trapezoid(density, x) == pytest.approx(0.95, abs=3e-4), n
        assert mean == pytest.approx(3) and low + high == pytest.approx(6)
    rng = np.random.default_rng(0)

    def verdicts(n, shift, tries=2000):
        seeds = rng.normal(1.5, 0.05, (tries, n, 1))  # what both have of their seed, far more than the shift
        pairs = seeds + rng.normal(0, 0.004, (tries, n, 2)) + [0, shift]
        return [flat_compare.judge(*flat_compare.paired_difference(list(p[:, 1]), list(p[:, 0]))[1:])
                for p in pairs]
    for n in (2, 3, 5):
        found = verdicts(n, 0)
        assert found.count('no difference seen') / len(found) == pytest.approx(0.95, abs=0.02)
        assert found.count('better') / len(found) == pytest.approx(0.025, abs=0.012)
    assert verdicts(6, 0.015).count('worse') > 1900 and verdicts(6, -0.015).count('better') > 1900  # 1%
    assert flat_compare.paired_difference([2.0], [1.5]) == (0.5, None, None)
    with pytest.raises(ValueError):
        flat_compare.paired_difference([1.0, 2.0], [1.0])


def flat_variant(*args, name='x'):
    return flat_compare.Variant(name, 'WORK', ROOT, [*TOY, *args], data='data/toy', cache=0)


@pytest.mark.parametrize('match, given, options', [
    ('params', {}, dict(mlp='gelu')), ('active', {}, dict(norm='layernorm', bias=True, d_ff=40)),
    ('params', {}, dict(n_expert=4)), ('active', {}, dict(n_expert=4)), ('params', {}, dict(n_kv_head=1)),
    ('active', dict(n_expert=4), dict(mlp='gelu')), ('params', {}, dict(n_expert=4, d_expert=64)),
    ('active', {}, dict(MLA, n_expert=4, n_shared_expert=1, n_dense_layer=1)),
    ('params', {}, dict(norm_placement='sandwich', mixer_pattern='DA'))])
def test_compare_matches_parameters(folder, capsys, match, given, options):
    first = flat_variant('--n_embd=48', '--n_head=2', *(f'--{k}={v}' for k, v in given.items()), name='first')
    other = flat_variant('--n_embd=48', *(f'--{k}={v}' for k, v in options.items()))
    flat_compare.match_variants(first, [other], match, 1337)
    counts = []
    for variant in (first, other):
        args = configure({**vars(flat_train), '__name__': 'x'}, 'GPTConfig', argv=variant.args)[1]
        model = GPT(GPTConfig(**{'vocab_size': 23, **args}))
        experts = [w for name, w in model.named_parameters() if 'experts.' in name]
        idle = sum(w.numel() for w in experts) // 2 if match == 'active' else 0  # 2 of 4
        counts.append(sum(w.numel() for w in model.state_dict().values()) - idle)
        if variant is other:
            assert variant.params in (0, counts[1] + idle)  # 0: nothing was to do
    assert abs(counts[1] / counts[0] - 1) <= 0.01
    said = re.findall(r'x: (d_ff|d_expert)=(\d+) \(was \d+\)', capsys.readouterr().out)
    assert said == [tuple(arg[2:].split('=')) for arg in other.args[len(TOY) + 1 + len(options):]]


def test_compare_matches_only_what_it_can_count():
    other = flat_variant()
    other.cache = None
    with pytest.raises(ValueError, match="variant 'x': match=params counts by the working tree's model.py"):
        flat_compare.match_variants(flat_variant(), [other], 'params', 1337)


def test_compare_matches_wall_clock(folder, monkeypatch, capsys):
    """Steps are timed by turns, once; the iterations follow, whatever else has set the length."""
    times, order = {'first': iter([40.0, 44.0]), 'x': iter([30.0, 33.0])}, []

    def time_steps(variant, seed, folder):
        assert not os.path.exists(folder)
        os.makedirs(folder)
        order.append(variant.name)
        return next(times[variant.name]), 500
    monkeypatch.setattr(flat_compare, 'time_steps', time_steps)
    monkeypatch.setattr(flat_compare, 'code_digest', str)  # the folder may have much more in it
    for _ in range(2):
        first, other = flat_variant(name='first'), flat_variant('--mlp=gelu', '--lr_decay_iters=7')
        flat_compare.match_variants(first, [other], 'time', 1337)
        config = configure({**vars(flat_train), '__name__': 'x'}, 'GPTConfig', argv=other.args)[0]
        assert config['max_iters'] == round(500 * 42 / 31.5) == 667 and config['lr_decay_iters'] is None
    assert order == ['first', 'x', 'first', 'x'] and first.args == TOY
    assert 'x: 667 iterations of 31.5 ms take as long as 500 of 42.0 ms' in capsys.readouterr().out


def test_compare_runs_revisions(folder, monkeypatch, capsys):
    """A revision runs with its own code and config files; runs are told apart by code, not by comments."""
    if not shutil.which('git'):
        pytest.skip('needs git')
    repo = folder / 'repo'
    (repo / 'config').mkdir(parents=True)
    names = ['train.py', 'model.py', 'sample.py', 'prepare.py', 'configurator.py', 'config/default.py']
    for name in names:
        shutil.copyfile(ROOT / name, repo / name)

    def git(*args):
        subprocess.run(['git', '-c', 'user.name=x', '-c', 'user.email=x@x', *args], cwd=repo, check=True,
                       capture_output=True)

    def edit(name, old, new):
        text = (repo / name).read_text(encoding='utf-8')
        assert text.count(old) == 1
        (repo / name).write_text(text.replace(old, new), encoding='utf-8')
    git('init', '-q')
    edit('model.py', "round_up(8 * self.n_embd / 3)", "7 * self.n_embd")  # instead of 128
    git('add', '.')
    git('commit', '-qm', 'one')
    shutil.copyfile(ROOT / 'model.py', repo / 'model.py')
    git('commit', '-qam', 'two')
    monkeypatch.setattr(flat_compare, 'ROOT', repo)
    (folder / 'place').mkdir()
    old = flat_compare.make_variant('HEAD~1:', 'HEAD~1:', TOY, folder / 'place', {})
    assert old.params == 33728 + 2 * 3 * 32 * (7 * 32 - 128) and old.data == os.path.join('data', 'toy')

    def run_of(revision, *args):
        code = flat_compare.copy_code(revision, folder / 'place')
        variant = flat_compare.Variant('x', revision, code, data='data/toy', args=flat_compare.place_configs(
            ['config/default.py', *TOY, *args], code))
        assert variant.command('o')[1:3] == [str(code / 'train.py'), str(code / 'config' / 'default.py')]
        return flat_compare.run_folder(variant, 1)
    head = run_of('HEAD')
    assert run_of('HEAD~1') == flat_compare.run_folder(old, 1) != head == run_of('WORK')
    edit('model.py', 'class MLP(nn.Module):\n    """', 'class MLP(nn.Module):  # a comment\n    """An MLP: ')
    for name in ('bench.py', 'test_model.py', 'README.md', '.ci.toml', 'config/other.py'):
        (repo / name).write_text('x', encoding='utf-8')
    assert run_of('WORK') == head
    (repo / 'printed.log').write_text('what this comparison prints is no part of it', encoding='utf-8')
    assert run_of('WORK') == head
    for name in ('mixers.py', 'test_time_training.py', 'benchmark.py', 'table.json'):  # not committed
        (repo / name).write_text('new = 1', encoding='utf-8')
        if not name.endswith('.py'):
            git('add', name)
        assert run_of('WORK') not in (head, run_of('HEAD')), name
        os.remove(repo / name)
    git('reset', '-q')
    edit('config/default.py', 'n_embd = 192', 'n_embd = 128')
    assert run_of('WORK') != head
    (repo / 'large.bin').write_bytes(bytes(2**20 + 1))
    git('add', 'large.bin')
    capsys.readouterr()
    assert not (flat_compare.copy_code('WORK', folder / 'place') / 'large.bin').exists()
    assert re.search('not copied .*large.bin', capsys.readouterr().out)
    with pytest.raises(ValueError, match="variant 'old': .*max_iters must be int"):
        flat_compare.make_variant('old', 'WORK: --max_iters=x', TOY, folder / 'place', {})


def test_compare_depends_on_files_as_they_were(folder, monkeypatch):
    """A config file is read once; a checkpoint counts that a config file names."""
    monkeypatch.setattr(flat_compare, 'try_out', lambda variant: setattr(variant, 'data', 'data/toy'))
    monkeypatch.setattr(flat_compare, 'code_digest', lambda code: '')
    code = folder / 'code'
    code.mkdir()
    (folder / 'one.py').write_text("init_from = 'start.pt'\n", encoding='utf-8')
    (folder / 'start.pt').write_bytes(b'a')

    def variant():
        return flat_compare.make_variant('x', 'one.py', TOY, folder, {'WORK': code})
    first = variant()
    path = flat_compare.run_folder(first, 1)
    assert first.init_from == 'start.pt' and flat_compare.run_folder(variant(), 1) == path
    (folder / 'start.pt').write_bytes(b'other')
    assert flat_compare.run_folder(variant(), 1) != path
    (folder / 'one.py').write_text('eval_only = True\n', encoding='utf-8')
    assert first.args[:-1] == TOY and Path(first.args[-1]).read_text(encoding='utf-8').startswith('init')
    with pytest.raises(ValueError, match="variant 'x': eval_only: leave it out"):
        variant()
    (folder / 'one.py').write_text('seed = 3\n', encoding='utf-8')
    with pytest.raises(ValueError, match="variant 'x': seed: leave it out"):
        variant()
    # but it may be in a file that all share: compare has it from there
    assert flat_compare.make_variant('x', '--n_head=4', [*TOY, 'one.py'], folder, {'WORK': code}).args


@pytest.mark.parametrize('text, revision, args', [
    ('', 'WORK', []), ('WORK:', 'WORK', []), ('HEAD~1:', 'HEAD~1', []),
    ('--device=cuda:1', 'WORK', ['--device=cuda:1']),
    ("HEAD: --norm=layernorm --start='a b'", 'HEAD', ['--norm=layernorm', '--start=a b']),
    (' my/branch^2:--mlp=gelu', 'my/branch^2', ['--mlp=gelu']),
    ('c:/a.py --n=1', 'WORK', ['c:/a.py', '--n=1'])])
def test_compare_reads_variants(text, revision, args):
    assert flat_compare.parse_variant(text) == (revision, args)


def test_compare_reads_paths_of_windows(monkeypatch):
    monkeypatch.setattr(flat_bench, 'os', types.SimpleNamespace(name='nt'))
    assert flat_compare.parse_variant(r"c:\a.py --start='a b'") == ('WORK', [r'c:\a.py', '--start=a b'])


def test_every_list_of_variants_can_be_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('pystdlib_byte', 'shakespeare_char'):
        write_toy(tmp_path / 'data' / name, vocab_size=257)
    lists = runpy.run_path(str(ROOT / 'config' / 'variants.py'))['LISTS']
    for each in lists.values():
        known = {'base', 'match', 'variants'}
        assert each.keys() <= known and each.get('match') in (None, 'params', 'active', 'time')
        variants = []
        for name, text in flat_compare.named_variants(each['variants']).items():
            revision, args = flat_compare.parse_variant(text)
            args = [*shlex.split(each['base']), *args]
            assert revision == 'WORK' and flat_compare.settle(args)[0].num_params() > 1e5
            variants.append(flat_compare.Variant(name, revision, ROOT, args, cache=0))
        assert len({tuple(variant.args) for variant in variants}) == len(variants) > 1
        if each.get('match') in ('params', 'active'):
            flat_compare.match_variants(variants[0], variants[1:], each['match'], 1337)


def fake_log(path, losses, seconds):
    path.mkdir(parents=True)
    with open(path / 'log.csv', 'w', encoding='utf-8', newline='') as f:
        writer = csv.DictWriter(f, flat_train.LOG_FIELDS)
        writer.writeheader()
        for it, loss in losses.items():
            writer.writerow({'iter': it, 'tokens': it * 64, 'ms_per_iter': 5, 'wall_s': it * seconds,
                             'val_loss': '' if loss is None else loss})
    return flat_compare.read_log(str(path))


def test_curves_of_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one = fake_log(tmp_path / 'a', {1: None, 10: 3.0, 17: 2.5, 20: 2.0}, 0.5)  # was stopped at 17
    two = fake_log(tmp_path / 'b', {1: None, 10: 3.5, 20: 2.25}, 0.7)
    for by, x in ('iter', [10, 20]), ('tokens', [640, 1280]), ('time', [6, 12]):
        at, mean, spread = flat_compare.curve([one, two], by)
        assert (at == x).all() and (mean == [3.25, 2.125]).all()
        assert spread == pytest.approx([0.5 / 2 ** 0.5, 0.25 / 2 ** 0.5])
    with pytest.raises(FileNotFoundError, match='nowhere: no log.csv there'):
        run('compare.py', 'plot', 'a', 'nowhere')
    fake_log(tmp_path / 'c', {10: 1.0}, 1)
    (tmp_path / 'c' / 'log.csv').write_text('iter,val_loss,wall_s\n1,,3\n', encoding='utf-8')
    with pytest.raises(ValueError, match='log.csv has no val_loss yet'):
        run('compare.py', 'plot', 'c')
    with pytest.raises(ValueError, match='plot takes folders'):
        run('compare.py', 'plot')
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 'matplotlib', None)
        patch.setitem(sys.modules, 'matplotlib.figure', None)
        patch.setitem(sys.modules, 'matplotlib.backends.backend_agg', None)
        with pytest.raises(ImportError, match='pip install matplotlib'):
            run('compare.py', 'plot', 'a')
    pytest.importorskip('matplotlib')
    for _ in range(2):
        run('compare.py', 'plot', 'a', 'b', '--by=time', '--json=numbers.jsonl')
    assert 'a: val loss 2.0000 after 20 iterations\nb: val loss 2.2500' in capsys.readouterr().out
    one, two = map(json.loads, Path('numbers.jsonl').read_text(encoding='utf-8').splitlines())
    assert one == two and one['loss'] == {'a': 2.0, 'b': 2.25}
    assert Path(one['plot']).read_bytes().startswith(b'\x89PNG')
    run('compare.py', 'plot', 'b')
    assert len(glob.glob('out-compare/plot-*.png')) == 2


@pytest.mark.parametrize('args, message', [
    (['params', '--max_iters=3'], '--max_iters=3: params has no use for it; it reads GPTConfig'),
    (['params', '--init_from=out', '--dataset=x'], 'vocabulary is that of the model that is loaded'),
    (['train', '--prompt_len=3'], '--prompt_len=3: train has no use'),
    (['decode', '--optimizer=muon'], '--optimizer=muon: decode'),
    (['eval', '--seed=3'], '--seed=3: eval has'), (['cost', '--init_from=x'], ': cost has'),
    (['compare', '--vs=x'], '--vs=x: compare has'), (['plot', '--n_layer=3'], ': plot has no'),
    (['check', '--steps=3'], '--steps=3: check has'), (['decode', 'out'], "decode cannot use 'out'"),
    (['eval', 'a.txt', 'b.txt'], "eval cannot use 'b.txt'"), (['check', 'out', 'o'], "check cannot use 'o'"),
    (['params', '--dataset=typo'], 'typo is not prepared'),
    (['check', 'out', '--dataset=typo'], 'vocabulary is that of the model that is loaded'),
    (['train', '--init_from=out', '--dataset=typo'], '--dataset=typo: the vocabulary is that of the model'),
    (['tain'], "'tain' is none of train, .*: say first what to do"), ([], "'' is none of train")])
def test_bench_refuses_what_an_instrument_does_not_read(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run('bench.py', *args)


def test_bench_lets_config_files_have_what_others_read(tmp_path):
    (tmp_path / 'c.py').write_text("dataset = 'nowhere'\nsteps = 3\nn_layer = 1\n", encoding='utf-8')
    run('bench.py', 'params', str(tmp_path / 'c.py'))

"""Tests of compare.py: its runs are train.py's, its statistics those of textbooks."""
import contextlib
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
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from common import ROOT, TOY, log_rows, run, write_toy

import compare as flat_compare
import train as flat_train
from compare import Variant, curve, judge, make_variants, match_size, new_model, paired_difference
from model import num_params
from test_model import MLA


@pytest.fixture
def no_git(monkeypatch):
    """Variants run the code that stands here."""
    monkeypatch.setattr(flat_compare, 'worktree', lambda name, folder: folder.symlink_to(ROOT) or name)
    monkeypatch.setattr(flat_compare, 'git', lambda *args: None)


# runs -------------------------------------------------------------------------------------------------------
def interrupt_run():
    """Sends this process Ctrl-C as soon as a run of a comparison has written a checkpoint."""
    def poll():
        while not glob.glob('out-compare/*/ckpt.pt'):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=poll, daemon=True).start()


def test_runs_are_ordinary_stopped_and_continued(folder, no_git, monkeypatch):
    """The loss is that of train.py alone, to the last digit, also where Ctrl-C came in between."""
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    torch.set_num_threads(1)
    run('train.py', *TOY, '--norm=layernorm', '--out_dir=out')
    config = {**flat_compare.config, 'variants': {'b': '--norm=layernorm'}, 'seeds': 1}
    interrupt_run()
    with pytest.raises(KeyboardInterrupt):
        flat_compare.compare(config, TOY)
    stopped, = glob.glob('out-compare/*/')
    assert flat_compare.read_run(stopped) is None
    numbers = flat_compare.compare(config, TOY)
    row, = numbers['rows']
    assert row['losses'] == [float(log_rows('out')[-1]['val_loss'])]
    assert numbers['runs'] == {'b': [stopped[:-1]]}
    assert (row['params'], row['cache_bytes_per_token']) == (33728, 2 * 2 * 2 * 32)
    assert row['peak_mb'] > 50 and row['seconds'] == float(log_rows(stopped)[-1]['wall_s'])
    assert flat_compare.compare(config, TOY) == numbers


def write_run(folder, losses, seconds=0.5):
    """Writes what train.py leaves of a run that is over, by its functions. losses: iteration -> val loss."""
    os.makedirs(folder, exist_ok=True)
    log = os.path.join(folder, 'log.csv')
    flat_train.start_log(log, 0)
    for it, loss in losses.items():
        flat_train.log_row(log, None, {'iter': it, 'tokens': it * 64, 'ms_per_iter': it, 'val_loss': loss,
                                       'wall_s': it * seconds})
    flat_train.note(folder, status='done', error=None, params=1234, data='data/toy', peak_mb=None)


def test_what_is_kept_of_a_run(folder, monkeypatch):
    """A run that diverged is not trained again; a run of limited time, which its config file says, is over at
    its end, and begins anew after Ctrl-C, where others go on."""
    with pytest.raises(ValueError, match='diverged'):
        run('train.py', *TOY, '--learning_rate=1e18', '--out_dir=bad')
    assert 'the run diverged' in flat_compare.read_run('bad')['error']
    assert flat_compare.read_run('nowhere') is None

    def popen(command, **_):
        raise KeyboardInterrupt(command)
    Path('timed.py').write_text('time_limit = 1e-9', encoding='utf-8')
    for config, status, args in (['timed.py'], 'time_limit', ['timed.py', *TOY, '--seed=1']), (
            [], 'done', ['--init_from=resume']):
        variant = Variant('x', ROOT, '', [*config, *TOY], None)
        with contextlib.suppress(SystemExit):
            run('train.py', *variant.args, f'--out_dir={variant.folder(1)}')
        found = flat_compare.read_run(variant.folder(1))
        assert (found['status'], found['error'], bool(found['rows'][-1]['val_loss'])) == (status, None, True)
        flat_train.note(variant.folder(1), status='stopped')
        assert flat_compare.read_run(variant.folder(1)) is None
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as stopped:
            patch.setattr(subprocess, 'Popen', popen)
            flat_compare.run_variant(variant, 1, 1)
        assert stopped.value.args[0][2:] == [*args, f'--out_dir={variant.folder(1)}']


def test_runs_are_told_apart_by_code_and_arguments(folder, monkeypatch):
    """The same before and after a commit; texts, tests and other config files do not count."""
    if not shutil.which('git'):
        pytest.skip('needs git')
    repo = folder / 'repo'
    (repo / 'config').mkdir(parents=True)
    for name in ('train.py', 'model.py', 'config/default.py'):
        (repo / name).write_text('class GPTConfig: pass  # run.json\n', encoding='utf-8')
    monkeypatch.setattr(flat_compare, 'ROOT', repo)
    monkeypatch.setattr(flat_compare, 'new_model', lambda args: None)

    def git(*args):
        subprocess.run(['git', '-c', 'user.name=x', '-c', 'user.email=x@x', *args], cwd=repo, check=True)

    def run_of(text):
        variant, = make_variants({'x': text}, TOY, Path(tempfile.mkdtemp(dir=folder)))
        return variant.folder(1)
    git('init', '-q')
    git('add', '.')
    git('commit', '-qm', 'one')
    head = run_of('HEAD:')
    assert run_of('') == head != run_of('--mlp=gelu')
    for name in ('test_model.py', 'bench.py', 'README.md', 'config/other.py', 'notes.txt'):
        (repo / name).write_text('x', encoding='utf-8')
    assert run_of('') == head
    for name in ('model.py', 'config/default.py', 'my größe.py'):  # the last is new
        (repo / name).write_text('class GPTConfig: n_layer = 3\n', encoding='utf-8')
        work = run_of('')
        assert work not in (head, run_of('HEAD:'))
        git('add', name)
        git('commit', '-qm', name)
        assert run_of('') == work == run_of('HEAD:') and run_of('HEAD~1:') == head
        head = work
    shutil.copytree('data/toy', 'data/other')
    (repo / 'config' / 'other.py').write_text("dataset = 'other'\nn_layer *= 2\n", encoding='utf-8')
    texts = ('', 'HEAD:', 'config/other.py')
    before = [run_of(text) for text in texts]
    for name in ('toy', 'other'):
        Path('data', name, 'meta.json').write_text('{}', encoding='utf-8')
    assert before[:2] == [head, head] and not {*before} & {run_of(text) for text in texts}
    (repo / 'train.py').write_text('', encoding='utf-8')
    with pytest.raises(ValueError, match='train.py of WORK writes no run.json'):
        run_of('')


@pytest.mark.parametrize('text, revision, args', [
    ('', 'WORK', []), ('HEAD~1:', 'HEAD~1', []), ('--device=cuda:1', 'WORK', ['--device=cuda:1']),
    (' my/branch^2:--mlp=gelu', 'my/branch^2', ['--mlp=gelu'])])
def test_variants_are_read(text, revision, args):
    assert flat_compare.parse_variant(text) == (revision, args)


@pytest.mark.parametrize('args, message', [
    (["--variants=['', '--n_head=3']"], 'n_head must divide'),
    (["--variants=['', '--out_dir=x']"], "variant '--out_dir=x': leave out out_dir"),
    (["--variants=['', '--n_embd=512']", '--match=params'], "--n_embd=512': no d_ff gives it the 33,728"),
    (["--variants=['']", '--dataset=nowhere'], 'data/nowhere is not prepared'),
    ([], 'say what to compare'), (['--match=loss'], "match='loss' is none of")])
def test_mistakes_show_before_any_run(folder, args, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run('compare.py', *TOY, *args)
    assert not os.path.exists('out-compare')


# equal size -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('match, options', [
    ('params', dict(n_kv_head=1)), ('active', dict(n_expert=4)), ('params', dict(mixer_pattern='DA')),
    ('active', dict(MLA, n_expert=4, n_shared_expert=1, n_dense_layer=1))])
def test_match_gives_equal_parameters(folder, match, options):
    first = [*TOY, '--n_embd=48']
    other = [*first, *(f'--{name}={value}' for name, value in options.items())]
    variant = Variant('x', ROOT, '', [*other], new_model(other))
    match_size(variant, num_params(new_model(first), match == 'active'), match == 'active')
    counts = []
    for model in (new_model(first), new_model(variant.args)):
        experts = [w for name, w in model.named_parameters() if 'experts.' in name]
        idle = sum(w.numel() for w in experts) // 2 if match == 'active' else 0  # 2 of 4
        counts.append(sum(w.numel() for w in model.state_dict().values()) - idle)
    assert abs(counts[1] / counts[0] - 1) <= 0.01 and len(variant.args) > len(other)


def test_every_list_of_variants_can_be_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('pystdlib_byte', 'shakespeare_char'):
        write_toy(tmp_path / 'data' / name, vocab_size=257)
    for each in runpy.run_path(str(ROOT / 'config' / 'variants.py'))['LISTS'].values():
        commands = [[*shlex.split(each['base']), *shlex.split(text)] for text in each['variants'].values()]
        variants = [Variant('x', ROOT, '', args, new_model(args)) for args in commands]
        assert len(set(map(tuple, commands))) == len(commands) > 1
        for variant in variants[1:] if 'match' in each else ():
            active = each['match'] == 'active'
            match_size(variant, num_params(variants[0].model, active), active)


# judging ----------------------------------------------------------------------------------------------------
def test_paired_confidence():
    """Against Student's density, integrated."""
    for n in (*range(2, 14), 33, 200):
        differences = np.arange(n) - (n - 1) / 2 + 3
        mean, half = paired_difference(list(differences), [0.0] * n)
        t, df = half / (differences.std(ddof=1) / n ** 0.5), n - 1
        x = np.linspace(0, t, 20001)
        scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / (df * math.pi) ** 0.5
        inside = 2 * np.trapezoid(scale * (1 + x * x / df) ** (-(df + 1) / 2), x)
        assert (mean, inside) == (pytest.approx(3), pytest.approx(0.95, abs=3e-4)), n
    assert [judge(*pair) for pair in ((-0.2, 0.1), (0.2, 0.1), (-0.1, 0.2), (0.5, None))] == [
        'better', 'worse', 'no difference seen', 'one seed']


def test_compare_says_which_is_better(folder, no_git, capsys, monkeypatch):
    """From runs whose losses are known: one is worse at each seed, one fails, one was evaluated once more."""
    found = {'a': [2.0, 2.1, 2.3], 'b': [2.25, 2.25, 2.5], 'c': None, 'd': [2.0, 2.1, 2.3]}
    trained = []

    def run_variant(variant, seed, left):
        trained.append((variant.name, seed))
        if not found[variant.name]:
            return {'error': 'the run diverged: x'}
        at_ctrl_c = {15: 1.0} if (variant.name, seed) == ('d', 8) else {}
        write_run(variant.folder(seed), {1: None, 10: 1.9, **at_ctrl_c, 20: found[variant.name][seed - 7]})
        return flat_compare.read_run(variant.folder(seed))
    monkeypatch.setattr(flat_compare, 'run_variant', run_variant)
    variants = {'a': '', 'b': '--norm=layernorm', 'c': '--learning_rate=1e12',
                'd': 'HEAD: --beta1=0.8'}
    config = {**flat_compare.config, 'variants': variants, 'seed': 7}
    numbers = flat_compare.compare(config, TOY)
    assert trained == [(name, seed) for seed in (7, 8, 9) for name in variants]
    a, b, c, d = numbers['rows']
    assert [a['losses'], b['losses']] == [found['a'], found['b']] and 'difference' not in a
    assert a['sd'] == pytest.approx(np.std(found['a'], ddof=1))
    half = 4.3027 * 0.05 / 3 ** 0.5  # of 0.25, 0.15, 0.2
    assert [b['difference'], b['half_interval']] == pytest.approx([0.2, half], abs=5e-5)
    assert (b['verdict'], d['verdict']) == ('worse', 'no difference seen')
    out = capsys.readouterr().out
    assert 'c: 3 of 3 runs failed: the run diverged: x' in out
    assert re.search(r'^d .* 10.0 \(1.0 to 20.0\) +n/a +1,234 +n/a$', out, re.M)
    if importlib.util.find_spec('matplotlib'):
        assert Path(numbers['plot']).read_bytes().startswith(b'\x89PNG')
    variants['e'] = '--beta1=0.7'
    found['e'] = [3.0, 3.1, 3.3]
    trained.clear()
    again = flat_compare.compare({**config, 'seeds': 2}, TOY)['rows']  # a seed less, a variant more
    assert trained == [('c', 7), ('e', 7), ('c', 8), ('e', 8)] and again[1]['losses'] == found['b'][:2]


# pictures ---------------------------------------------------------------------------------------------------
def test_curves_of_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run('a', {1: None, 10: 3.0, 17: 2.5, 20: 2.0}, 0.5)  # was stopped at 17
    write_run('b', {1: None, 10: 3.5, 20: 2.25}, 0.7)
    logs = [flat_compare.read_log(name) for name in 'ab']
    for by, x in ('iter', [10, 20]), ('tokens', [640, 1280]), ('time', [6, 12]):
        at, mean, spread = curve(logs, by)
        assert (at == x).all() and (mean == [3.25, 2.125]).all()
        assert spread == pytest.approx([0.5 / 2 ** 0.5, 0.25 / 2 ** 0.5])
    pytest.importorskip('matplotlib')
    run('compare.py', 'plot', 'a', 'b', '--by=time', '--png=a.png', '--json=numbers.jsonl')
    assert json.loads(Path('numbers.jsonl').read_text('utf-8'))['last'] == {'a': 2.0, 'b': 2.25}
    lengths = {'path': 'x', 'lengths': {'8': {'perplexity': 3.0}, '16': {'perplexity': 4.0}}}
    Path('lengths.jsonl').write_text(json.dumps(lengths), encoding='utf-8')
    run('compare.py', 'plot', 'lengths.jsonl', '--png=docs/b.png')
    assert all(Path(name).read_bytes().startswith(b'\x89PNG') for name in ('a.png', 'docs/b.png'))

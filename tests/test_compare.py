"""Tests of lab/compare.py: its runs against train.py, its statistics against textbooks."""
import functools
import glob
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from common import ROOT, TOY, log_rows, run, write_toy
from test_scripts import read_config

import train as flat_train
from lab import compare as flat_compare
from lab.compare import (
    Variant,
    in_child,
    lasting,
    make_variants,
    match_size,
    measured_line,
    paired_difference,
)


@pytest.fixture
def no_git(monkeypatch):
    """Variants run this code, without a copy."""
    monkeypatch.setattr(flat_compare, 'copy_code', functools.cache(
        lambda revision, folder: folder.symlink_to(ROOT) or revision))


# runs -------------------------------------------------------------------------------------------------------
def test_runs_are_ordinary_stopped_and_continued(folder, no_git, monkeypatch):
    """The loss equals that of train.py to the last digit, also after Ctrl-C."""
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    torch.set_num_threads(1)
    config, args = {**flat_compare.config, 'variants': {'b': '--norm=layernorm'}, 'seeds': 1}, [
        *TOY, '--max_iters=200', '--sample_tokens=0']  # long after the first checkpoint
    run('train.py', *args, '--norm=layernorm', '--out_dir=out')

    def interrupt():
        while not glob.glob('out-compare/*/ckpt.pt'):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        flat_compare.compare(config, args)
    stopped, = glob.glob('out-compare/*/')
    assert flat_compare.read_run(stopped) is None
    numbers = flat_compare.compare(config, args)
    row, = numbers['rows']
    assert row['losses'] == [float(log_rows('out')[-1]['val_loss'])]
    assert numbers['runs'] == {'b': [stopped[:-1]]}
    # one of two layers has a window, so that a further token adds nothing to its cache
    assert (row['params'], row['cache_bytes_per_token']) == (33728, 2 * 2 * 32)
    assert row['peak_mb'] > 50
    assert flat_compare.compare(config, args) == numbers


def write_run(folder, losses):
    """Writes a finished run's files by functions of train.py. losses: iteration -> val loss."""
    os.makedirs(folder, exist_ok=True)
    log = os.path.join(folder, 'log.csv')
    flat_train.start_files(folder, 0, [], status='done', error=None, params=1234, data='data/toy',
                           peak_mb=None)
    for it, loss in losses.items():
        flat_train.log_row(log, None, {'iter': it, 'tokens': it * 64, 'ms_per_iter': it, 'val_loss': loss,
                                       'wall_s': it / 2, 'loss': 2.0})


@pytest.fixture
def known_losses(folder, no_git, monkeypatch):
    """A function that gives runs the losses of a function (variant's name, seed) -> iteration -> val loss, or
    an error if that is None."""
    def set_losses(losses):
        def run_variant(variant, seed):
            found = losses(variant.name, seed)
            if found is None:
                return {'error': 'the run diverged: x'}
            write_run(variant.folder(seed), found)
            return flat_compare.read_run(variant.folder(seed))
        monkeypatch.setattr(flat_compare, 'run_variant', run_variant)
    return set_losses


def test_which_runs_are_continued(folder, monkeypatch):
    """A run that diverged has ended. After Ctrl-C a run of limited time starts again, other runs continue."""
    with pytest.raises(ValueError, match='diverged'):
        run('train.py', *TOY, '--learning_rate=1e18', '--out_dir=bad')
    assert 'the run diverged' in flat_compare.read_run('bad')['error']
    write_run('none', {})  # max_iters=0
    assert flat_compare.read_run('none')['error'] == 'none/log.csv is empty: raise --max_iters'
    commands = []
    monkeypatch.setattr(subprocess, 'Popen', lambda command, **_: commands.append(command[2:-1]) or 1 / 0)
    for args, status, more in ([*TOY, '--time_limit=1e-9'], 'time_limit', []), (
            TOY, 'done', ['--init_from=resume']):
        variant = Variant('x', ROOT, '', args, None)
        out_dir = variant.folder(1)
        run('train.py', *variant.args, f'--out_dir={out_dir}')
        found = flat_compare.read_run(out_dir)
        assert (found['status'], found['rows']['val_loss'][-1] > 0) == (status, True)
        flat_train.note(out_dir, status='stopped')
        assert flat_compare.read_run(out_dir) is None
        with pytest.raises(ZeroDivisionError):
            flat_compare.run_variant(variant, 1)
        assert commands.pop() == [*args, '--seed=1', *more]


@pytest.mark.skipif(sys.platform != 'linux', reason='needs PR_SET_PDEATHSIG')
def test_a_killed_comparison_ends_its_run(folder):
    """Until then, a second comparison in this folder is an error."""
    args = [*TOY, '--max_iters=100000', "--variants=['']"]
    first = subprocess.Popen([sys.executable, str(ROOT / 'lab/compare.py'), *args])
    while not glob.glob('out-compare/*/ckpt.pt'):
        time.sleep(0.1)
    with pytest.raises(ValueError, match='out-compare/ is in use by another run'):
        run('lab/compare.py', *args)
    first.kill()
    first.wait()
    place, = glob.glob('out-compare/*/')
    while flat_compare.read_facts(place)['status'] != 'stopped':
        time.sleep(0.1)


def no_sizes(args):
    """Replaces measured_line."""


def test_runs_are_named_by_code_and_arguments(folder, monkeypatch):
    """A commit does not count, nor do texts, tests and other config files. The data count."""
    if not shutil.which('git'):
        pytest.skip('needs git')
    repo = folder / 'repo'
    monkeypatch.setattr(flat_compare, 'ROOT', repo)
    monkeypatch.setattr(flat_compare, 'measured_line', no_sizes)

    def write(name, text):
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(text, encoding='utf-8')

    def git(*args):
        subprocess.run(['git', '-c', 'user.name=x', '-c', 'user.email=x@x', *args], cwd=repo, check=True)

    def variant_of(text):
        return make_variants({'x': text}, ['--dataset=toy'], Path(tempfile.mkdtemp(dir=folder)))[0]

    def run_of(text):
        return variant_of(text).folder(1)
    for name in ('train.py', 'model.py', 'config/default.py'):
        write(name, 'init_from = "scratch"\ndataset = "toy"\nmax_iters = 1')
    git('init', '-q')
    git('add', '.')
    git('commit', '-qm', 'x')
    head = run_of('HEAD:')
    assert run_of('') == head != run_of('--max_iters=3')
    for name in ('test_model.py', 'tests/x.py', 'README.md', 'config/other.py'):
        write(name, "dataset = 'other'")
    assert run_of('') == head
    for name in ('model.py', 'config/default.py', 'my größe.py'):  # a new file
        write(name, 'class GPTConfig: n_layer = 3')
        work = run_of('')
        assert work not in (head, run_of('HEAD:'))
        git('add', '.')
        git('commit', '-qm', 'x')
        assert run_of('') == work == run_of('HEAD:') and run_of('HEAD~1:') == head
        head = work
    np.fromfile('data/toy/val.bin', '<u2')[::-1].tofile('data/toy/val.bin')  # of the same size
    assert run_of('') != head
    write('config/default.py', 'import mine\nmax_iters = 7')
    write('config/env.py', 'import os\nmax_iters = int(os.environ["N"])')
    for name in 'default', 'env':  # modules that are imported; values that come from elsewhere
        for number in 1, 2:
            write('config/mine.py', f'a = {number}')
            monkeypatch.setenv('N', str(number))
            head, before = run_of(f'config/{name}.py'), head
        assert head != before
    assert len(variant_of('--init_from=x').args) == 2  # train.py reads its default file itself


@pytest.mark.parametrize('text, revision, args', [
    ('', 'WORK', []), ('HEAD~1:', 'HEAD~1', []), ('--device=cuda:1', 'WORK', ['--device=cuda:1']),
    (' my/branch^2:--mlp=gelu', 'my/branch^2', ['--mlp=gelu'])])
def test_variants_are_read(text, revision, args):
    assert flat_compare.parse_variant(text) == (revision, args)


@pytest.mark.parametrize('args, message', [
    (["--variants=['', '--n_head=3']"], 'n_head must divide'),
    (["--variants=['', '--n_embd=512']", '--match=params'], "--n_embd=512': no d_ff gives"),
    (["--variants=['', '--expert_pattern=N']", '--match=params'], 'no d_ff gives'),
    (["--variants=['']", '--dataset=nowhere'], 'data/nowhere is not prepared'),
    ([], 'nothing to compare'), (['norm'], 'list: positions, norms'), (["--variants=['', ' ']"], 'are equal'),
    (["--variants=['', '--seed=1']"], '--seed=1 has no effect'),
    (["--variants=['nope:']"], 'object name: nope'),
    (["--variants=['--out_dir=\"x']"], 'No closing quotation'), (['--variants=[1]'], 'variant 1,'),
    (["--variants=['--n_head=1', 'HEAD:']", '--match=params'], '--match needs')])
def test_mistakes_show_before_any_run(folder, args, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run('lab/compare.py', *TOY, *args)
    assert not os.path.exists('out-compare')


# equal size -------------------------------------------------------------------------------------------------
def test_match_gives_equal_parameters(folder):
    """Of those that a token uses: half of the experts idle."""
    base = [*TOY, '--n_embd=48']
    other = [*base, '--n_expert=4', '--n_shared_expert=1', '--n_dense_layer=1']
    variant = Variant('x', ROOT, '', [*other], measured_line(other))
    match_size(variant, measured_line(base)['active'], 'active')
    counts = []
    for args in base, variant.args:
        _, model = read_config('--vocab_size=23', *args)
        idle = sum(w.numel() for name, w in model.named_parameters() if 'experts.' in name) // 2
        counts.append(sum(w.numel() for w in model.state_dict().values()) - idle)
    assert abs(counts[1] / counts[0] - 1) <= 0.01 and len(variant.args) > len(other)


def test_every_list_of_variants_can_be_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('pystdlib_byte', 'shakespeare_char'):
        write_toy(tmp_path / 'data' / name, vocab_size=257)
    for name, chosen in runpy.run_path(str(ROOT / 'lab' / 'variants.py'))['LISTS'].items():
        if name != 'examples':  # only these change model.py
            monkeypatch.setattr(flat_compare, 'in_child', lambda function, *args: function(*args))
        texts = {re.sub(r'--learning_rate=\S+', '', text) for text in chosen['variants'].values()}
        baseline = next(iter(chosen['variants'].values()))
        commands = [shlex.split(f"{chosen['base']} {text}") for text in (baseline, *texts - {baseline})]
        baseline, *others = [Variant('x', ROOT, '', args, flat_compare.in_child(measured_line, args))
                             for args in commands]
        for variant in others if 'match' in chosen else ():
            match_size(variant, baseline.sizes[chosen['match']], chosen['match'])
        monkeypatch.setattr(flat_compare, 'in_child', in_child)


# judging ----------------------------------------------------------------------------------------------------
def test_paired_confidence():
    """Against Student's density, integrated."""
    for n in (*range(2, 14), 33, 200):
        differences = np.arange(n) - (n - 1) / 2 + 3
        mean, half, _ = paired_difference(list(differences), [0.0] * n)
        t, df = half / (differences.std(ddof=1) / n ** 0.5), n - 1
        x = np.linspace(0, t, 20001)
        scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / (df * math.pi) ** 0.5
        inside = 2 * np.trapezoid(scale * (1 + x * x / df) ** (-(df + 1) / 2), x)
        assert (mean, inside) == (pytest.approx(3), pytest.approx(0.95, abs=3e-4)), n
    assert [paired_difference(losses, [2.0] * len(losses))[2] for losses in (
        [1.79, 1.8], [2.2, 2.21], [1.9, 1.92], [2])] == ['better', 'worse', 'no difference seen', 'one seed']


def mixture_ratio(x):
    """The likelihood of normal x (n,) divided by that for a mean of zero. Sums integrate over the deviation
    (weighted by its inverse) and over the effect (mean / deviation; a normal prior of deviation 5)."""
    effects, scales = np.linspace(-40, 40, 4001), np.exp(np.linspace(-5, 5, 2001))[:, None]

    def density(effect):
        squares = (x * x).sum() - 2 * effect * scales * x.sum() + x.size * (effect * scales) ** 2
        return np.exp(-squares / scales**2 / 2) / scales**x.size
    prior = np.exp(-effects**2 / 50) / (50 * math.pi) ** 0.5
    return (density(effects) * prior).sum() * (effects[1] - effects[0]) / density(np.zeros(1)).sum()


def test_lasting_intervals():
    """At their ends the mixture's ratio is 1 / alpha."""
    for n in (4, 9, 30):
        x = np.linspace(-1, 1, n) ** 3
        assert mixture_ratio(x / x.std(ddof=1) + lasting(n, 0.05)) == pytest.approx(20, rel=1e-3), n


def test_compare_says_which_is_better(known_losses, capsys):
    """One variant is worse at each seed, one fails, one was evaluated once more."""
    losses = {'a': [2.0, 2.1, 2.3], 'b': [2.25, 2.25, 2.5], 'd': [2.0, 2.1, 2.3]}

    def loss_of(name, seed):
        at_ctrl_c = {15: 1.0} if (name, seed) == ('d', 8) else {}
        return name != 'c' and {1: None, 10: 1.9, **at_ctrl_c, 20: losses[name][seed - 7]} or None
    known_losses(loss_of)
    variants = {'a': '', 'b': '--norm=layernorm', 'c': '--learning_rate=1e12', 'd': 'HEAD: --beta1=0.8'}
    numbers = flat_compare.compare({**flat_compare.config, 'variants': variants, 'seed': 7}, TOY)
    assert numbers['failed'] == {'c': 'the run diverged: x'}  # which is the script's status
    a, b, d = numbers['rows']
    assert [a['losses'], b['losses']] == [losses['a'], losses['b']] and 'difference' not in a
    assert a['sd'] == pytest.approx(np.std(losses['a'], ddof=1))
    half = 4.3027 * 0.05 / 3 ** 0.5  # of 0.25, 0.15, 0.2
    assert [b['difference'], b['half_interval']] == pytest.approx([0.2, half], abs=5e-5)
    assert (b['verdict'], d['verdict']) == ('worse', 'no difference seen')
    out = capsys.readouterr().out
    assert 'c, seed 7: the run diverged: x' in out and 'c, seed 8' not in out
    assert re.search(r'^d .* 15.0 \(10.0 to 20.0\) +1,280 +n/a +1,234 +n/a$', out, re.M)


def test_seeds_are_added_until_all_is_decided(known_losses):
    noise = np.random.default_rng(1).normal(scale=0.01, size=(4, 13))
    shift = {'a': 0, 'much worse': 1, 'better': -0.05, 'equal': 0}

    def loss_of(name, seed):
        return {1: None, 20: 2 + shift[name] + noise[[*shift].index(name), seed]}
    known_losses(loss_of)
    variants = {name: f'--beta1=0.{i + 5}' for i, name in enumerate(shift)}
    config = {**flat_compare.config, 'variants': variants, 'seed': 0, 'until': 'decided', 'seeds': 12}
    rows = {row['variant']: row for row in flat_compare.compare(config, TOY)['rows']}
    assert {name: row.get('verdict') for name, row in rows.items()} == {
        'a': None, 'much worse': 'worse', 'better': 'better', 'equal': 'as good'}
    counts = [len(row['losses']) for row in rows.values()]
    assert 3 <= counts[1] <= counts[2] < counts[3] == counts[0] < 12
    for name in 'much worse', 'better', 'equal':  # no seed after the verdict
        row, alpha = rows[name], 0.05 / 3
        for n in range(2, len(row['losses']) + 1):
            mean, half, verdict = paired_difference(row['losses'][:n], rows['a']['losses'], alpha, 0.02)
            assert (verdict == row['verdict']) == (n == len(row['losses']))

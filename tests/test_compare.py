"""Tests of lab/compare.py: its runs against train.py, its statistics against textbooks."""
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
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from common import ROOT, TOY, log_rows, run
from test_scripts import read_config

import train as flat_train
from configurator import UserError
from lab import compare as flat_compare
from lab.compare import Variant, lasting, make_variant, match_size, paired_difference, read_run, run_variant


def toy_variant(name='x', *args, **settings):
    """A variant of this code."""
    variant = Variant(name, ROOT, [*TOY, *args], {'time_limit': None, 'n_expert': None, **settings}, [])
    variant.sizes = {'cache_bytes_per_token': 64}
    return variant


# runs -------------------------------------------------------------------------------------------------------
def test_runs_are_ordinary_stopped_and_continued(folder, monkeypatch):
    """The loss equals that of train.py to the last digit, also after Ctrl-C."""
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    config, args = {**flat_compare.config, 'variants': {'b': '--norm=layernorm'}, 'seeds': 1}, [
        *TOY, '--max_iters=100', '--sample_tokens=0']  # long after the first checkpoint
    run('train.py', *args, '--norm=layernorm', '--out_dir=out')

    def interrupt():
        while not glob.glob('out-compare/*/ckpt.pt'):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        flat_compare.compare(config, args)
    stopped, = glob.glob('out-compare/*/')
    assert '"status": "stopped"' in Path(stopped, 'run.json').read_text()
    numbers = flat_compare.compare(config, args)
    row, = numbers['rows']
    assert row['losses'] == [float(log_rows('out')[-1]['val_loss'])] and row['runs'] == [stopped[:-1]]
    # one of two layers has a window, so that a further token adds nothing to its cache
    assert (row['params'], row['cache_bytes_per_token']) == (33728, 2 * 2 * 32)
    assert row['peak_mb'] > 50


def test_which_runs_have_ended(folder):
    """After Ctrl-C, a run of limited time starts again."""
    with pytest.raises(ValueError, match='diverged'):
        run('train.py', *TOY, '--learning_rate=1e18', '--out_dir=bad')
    assert 'the run diverged' in read_run('bad')['error']
    variant = toy_variant('x', '--time_limit=9', '--max_iters=1', time_limit=9)
    found = run_variant(variant, 1)
    assert (found['status'], found['rows']['val_loss'][-1] > 0) == ('done', True)
    flat_train.note(found['folder'], status='stopped')
    assert read_run(found['folder']) is None
    assert run_variant(variant, 1)['rows'].size == 1 and glob.glob('out-compare/*/ckpt.old-1.pt')
    write_run('empty', {})  # max_iters=0
    assert read_run('empty')['error'] == 'empty/log.csv is empty: raise --max_iters'
    Path('empty/run.json').write_text('{')
    with pytest.raises(UserError, match='cannot read empty/run.json'):
        read_run('empty')


@pytest.mark.skipif(sys.platform != 'linux', reason='needs PR_SET_PDEATHSIG')
def test_a_killed_comparison_ends_its_run(folder):
    """The run begins before the code, which lacks bench.py, counts parameters."""
    code, _ = flat_compare.copy_code(ROOT, folder)
    (code / 'bench.py').unlink()
    first = subprocess.Popen([sys.executable, str(ROOT / 'lab/compare.py'), *TOY, '--max_iters=100000',
                              f"--variants=['{code}:']"])
    while not glob.glob('out-compare/*/ckpt.pt') and first.poll() is None:
        time.sleep(0.1)
    first.kill()
    first.wait()
    path, = glob.glob('out-compare/*/run.json')
    while '"stopped"' not in Path(path).read_text():
        time.sleep(0.1)


def test_runs_are_named_by_code_and_arguments(folder, monkeypatch):
    """Texts, tests and other config files do not count. The data count."""
    repo = folder / 'repo'

    def write(name, text):
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(text, encoding='utf-8')

    def run_of(text):
        place = folder / 'place'
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        flat_compare.copy_code.cache_clear()
        return make_variant('x', f'repo: {text}', ['--dataset=toy'], place).folder(1)
    for name in ('train.py', 'model.py', 'config/default.py', 'config/env.py'):
        write(name, 'init_from = "scratch"\ndataset = "toy"\nmax_iters = 1')
    first = run_of('')
    for name in ('test_model.py', 'tests/x.py', 'README.md', 'config/other.py'):
        write(name, "dataset = 'other'")
    shutil.copytree('repo', 'moved')
    assert make_variant('y', 'moved:', ['--dataset=toy'], folder / 'place').folder(1) == run_of('') == first
    write('config/mine.py', 'import further')
    write('config/further.py', 'a = 1')
    found = {run_of(''), run_of('--max_iters=3')}
    for name, text in [('model.py', 'class GPTConfig: n_layer = 3'), ('my größe.py', 'a = 1'),
                       ('config/default.py', 'import mine'), ('config/further.py', 'a = 2')]:
        write(name, text)
        found.add(run_of(''))
    write('zoo/defaults.json', '{}')
    found.add(run_of(''))
    write('config/env.py', 'import os\n_A = X = float(os.environ["X"])\ndef f(): pass')
    for number in '1', '1', '2':  # values that come from elsewhere
        monkeypatch.setenv('X', number)
        found.add(run_of('config/env.py'))
    np.fromfile('data/toy/val.bin', '<u2')[::-1].tofile('data/toy/val.bin')  # of the same size
    found.add(run_of(''))
    assert len(found) == 10 and first in found


@pytest.mark.parametrize('args, message', [
    (["--variants=['', '--n_head=3']"], 'n_head must divide'), (["--variants=['', ' ']"], 'are equal'),
    (["--variants=['', '--seed=1']"], '--seed=1 has no effect'),
    (["--variants=['', '--out_dir=x']"], '--out_dir=x has no effect'),
    (["--variants=['\"x']"], 'No closing quotation'),
    (["--variants=['']", '--dataset=nowhere'], 'data/nowhere is not prepared'),
    ([], 'add --variants'), (['norm'], "no list 'norm': name one of positions, norms"),
    (["--variants=['HEAD~1:']"], r"worktree add --detach \.\./old HEAD~1` and use '\.\./old:'")])
def test_mistakes_show_before_any_run(folder, args, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run('lab/compare.py', *TOY, *args)
    assert not os.path.exists('out-compare')


# equal size -------------------------------------------------------------------------------------------------
def test_match_gives_equal_parameters(folder):
    """Of those that a token uses: half of the experts idle."""
    base, other = toy_variant('x', '--n_embd=48'), toy_variant(
        'y', '--n_embd=48', '--n_expert=4', '--n_shared_expert=1', '--n_dense_layer=1', n_expert=4)

    def count(variant):
        _, model = read_config('--vocab_size=23', *variant.args)
        idle = sum(w.numel() for name, w in model.named_parameters() if 'experts.' in name) // 2
        return sum(w.numel() for w in model.state_dict().values()) - idle
    match_size(other, count(base), 'active_params')
    assert abs(count(other) / count(base) - 1) <= 0.01 and 'd_expert' in other.args[-1]
    other.code = folder
    for name in 'model.py', 'bench.py':
        Path(name).write_text("print('{}')")
    with pytest.raises(UserError, match="does not count params: its code is too old"):
        match_size(other, 9, 'params')


def test_every_list_of_variants_has_valid_settings():
    for chosen in runpy.run_path(str(ROOT / 'lab' / 'variants.py'))['LISTS'].values():
        for text in chosen['variants'].values():
            if 'examples/' not in text:  # tests/test_examples.py tests these
                read_config('--vocab_size=257', *shlex.split(f"{chosen['base']} {text}"))


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


def write_run(folder, losses):
    """Writes the files of a run that ended for a reason that lab/compare.py does not name, or diverged.
    losses: iteration -> val loss, or None."""
    os.makedirs(folder)
    status, error = ('diverged', 'it diverged') if losses is None else ('a new reason', None)
    flat_train.start_files(folder, 0, [], status=status, error=error, params=1234, data='x', peak_mb=None)
    for it, loss in (losses or {}).items():
        flat_train.log_row(os.path.join(folder, 'log.csv'), None, {
            'iter': it, 'tokens': it * 64, 'ms_per_iter': it, 'val_loss': loss, 'wall_s': it / 2})


def test_compare_says_which_is_better(folder, capsys):
    """One variant is worse at each seed, one fails, one was evaluated once more."""
    losses = {'a': [2.0, 2.1, 2.3], 'b': [2.25, 2.25, 2.5], 'c': [None], 'd': [2.0, 2.1, 2.3]}
    variants = [toy_variant(name, name) for name in losses]
    for variant in variants:
        for seed, loss in enumerate(losses[variant.name], 7):
            at_ctrl_c = {15: 1.0} if (variant.name, seed) == ('d', 8) else {}
            write_run(variant.folder(seed), loss and {1: None, 10: 1.9, **at_ctrl_c, 20: loss})
    runs = flat_compare.run_all(variants, range(7, 10), '', 0.02)
    a, b, d = rows = flat_compare.comparison(variants, runs, '', 0.02)
    flat_compare.print_comparison(rows, '')
    assert [a['losses'], b['losses']] == [losses['a'], losses['b']] and 'difference' not in a
    assert a['sd'] == pytest.approx(0.1528, abs=5e-5)
    half = 4.3027 * 0.05 / 3 ** 0.5  # of 0.25, 0.15, 0.2
    assert [b['difference'], b['half_interval']] == pytest.approx([0.2, half], abs=5e-5)
    assert (b['verdict'], d['verdict']) == ('worse', 'no difference seen')
    out = capsys.readouterr().out
    assert 'c, seed 7: it diverged' in out and 'c, seed 8' not in out
    assert re.search(r'^d .* 15.0 +1,280 +n/a +1,234 +64$', out, re.M)


def test_seeds_are_added_until_all_is_decided(folder):
    noise = np.random.default_rng(1).normal(scale=0.01, size=(4, 13))
    shift = {'a': 0, 'much worse': 1, 'better': -0.05, 'equal': 0}
    variants = [toy_variant(name, name) for name in shift]
    for variant, draws in zip(variants, noise):
        for seed, draw in enumerate(draws):
            write_run(variant.folder(seed), {1: None, 20: 2 + shift[variant.name] + draw})
    runs = flat_compare.run_all(variants, range(12), 'decided', 0.02)
    rows = {row['variant']: row for row in flat_compare.comparison(variants, runs, 'decided', 0.02)}
    assert {name: row.get('verdict') for name, row in rows.items()} == {
        'a': None, 'much worse': 'worse', 'better': 'better', 'equal': 'as good'}
    counts = [len(row['losses']) for row in rows.values()]
    assert 3 <= counts[1] <= counts[2] < counts[3] == counts[0] < 12
    for name in 'much worse', 'better', 'equal':  # no seed after the verdict
        row, alpha = rows[name], 0.05 / 3
        for n in range(2, len(row['losses']) + 1):
            mean, half, verdict = paired_difference(row['losses'][:n], rows['a']['losses'], alpha, 0.02)
            assert (verdict == row['verdict']) == (n == len(row['losses']))

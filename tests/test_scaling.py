"""Tests of lab/scaling.py with a known law and known speedups."""
import json
from pathlib import Path

import numpy as np
import pytest
from common import run

from lab import scaling


def test_a_law_is_found_again():
    """Exactly, and from noisy runs: two runs that are not fitted are within the interval."""
    law = 1.5, 40.0, 0.34, 300.0, 0.4
    n, d = np.array([(n, d) for n in (2e5, 6e5, 1.5e6, 4e6) for d in (4e5, 8e5, 1.6e6)] + [(1.2e7, 1.6e6)]).T
    losses = law[0] + law[1] / n ** law[2] + law[3] / d ** law[4]
    assert scaling.fit_law(n, d, losses) == pytest.approx(law, rel=1e-6)
    between = scaling.law_loss((1.5, 40.0, 0.33, 300.0, 0.41), n, d)  # exponents between those of the grid
    assert scaling.law_loss(scaling.fit_law(n, d, between), n, d) == pytest.approx(between, abs=2e-3)
    noisy = losses + np.random.default_rng(0).normal(scale=0.01, size=(2, len(n)))
    rows = [{'variant': str(i), 'inner_params': int(n[i]), 'tokens': d[i], 'loss': noisy[:, i].mean()}
            for i in range(len(n))]
    *_, (name, size, loss, low, high) = scaling.print_law(rows, 1)
    assert (name, size, loss) == ('1,600,000 tokens', 1.2e7, rows[-1]['loss'])
    assert low < min(losses[-1], *noisy[:, -1]) < max(noisy[:, -1]) < high and high - low < 0.1


def rows(shift):
    """A comparison whose baseline has a loss of 3, 2 and 1.5 at half, once and twice the length."""
    names = {'a': 0, 'half as long': 1, 'twice as long': -0.5, 'b': 0.625 + shift, 'c': -0.25}
    return [{'variant': name, 'inner_params': 100 * (1 + shift), 'loss': 2 + more, 'difference': more,
             'half_interval': 0.25 * (name == 'b')} for name, more in names.items()]


def test_speedups():
    points = scaling.print_speedups(rows(0))
    assert [name for name, *_ in points] == ['b', 'c']
    assert points[0][1:] == pytest.approx((100, 2 ** -0.625, 2 ** -0.875, 2 ** -0.375))
    assert points[1][2:] == pytest.approx([2 ** 0.5] * 3)


def test_a_picture(folder, capsys):
    pytest.importorskip('matplotlib')
    lines = [json.dumps({'rows': rows(shift)}) for shift in (0, 1)]
    Path('sizes.jsonl').write_text('\n'.join(lines), encoding='utf-8')
    run('lab/scaling.py', 'sizes.jsonl', '--png=a.png')
    assert capsys.readouterr().out.count('c: the baseline needs 1.41 times its steps [1.41, 1.41]') == 2
    assert Path('a.png').read_bytes().startswith(b'\x89PNG')

"""
What comparisons at several sizes show, from the lines that lab/compare.py writes with --json=FILE: a law of
sizes, or how much longer the baseline would train for a variant's loss. Prints it and draws a picture.

    python lab/compare.py scaling --json=sizes.jsonl
    python lab/scaling.py sizes.jsonl --predicted=2         # predicts the loss of the 2 largest models
    python lab/compare.py tricks_short --json=tricks.jsonl  # its baseline trains half and twice as long too
    python lab/scaling.py tricks.jsonl

A file may have several lines, one per comparison.
"""
import os
import sys

if __name__ == '__main__':  # else Python would search lab/ first
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import fileinput
import json
import math

from configurator import configure, package

predicted = 0          # the law is fitted without this many of the largest models, and predicts their loss
png = 'scaling.png'    # the picture
words = configure(globals(), words=math.inf).words

import numpy as np

LENGTHS = 'half as long', 'twice as long'  # names of variants: the baseline with other max_iters


def law_loss(law, n, d):
    """(E, A, a, B, b) -> E + A / n^a + B / d^b, of n parameters after d tokens (arXiv:2203.15556, eq. 10)."""
    E, A, a, B, b = law
    return E + A / n ** a + B / d ** b


def fit_law(n, d, losses):
    """The law nearest to the losses (runs,): the exponents are from a grid; E, A and B are the best by least
    squares, and a negative one becomes zero."""
    grid = np.linspace(0.02, 1.2, 60)
    a, b = np.reshape(np.meshgrid(grid, grid), (2, -1, 1))
    terms = np.stack([np.ones((len(a), len(n))), (n / n.mean()) ** -a, (d / d.mean()) ** -b], -1)
    E, A, B = (np.linalg.pinv(terms) @ losses).clip(0).T[..., None]  # (grid, 1) each, as a and b
    laws = np.array([E, A * n.mean() ** a, a, B * d.mean() ** b, b])
    error = np.square(law_loss(laws, n, d) - losses).sum(-1)
    return laws[:, error.argmin(), 0]


def print_law(rows, predicted):
    """Fits the law to rows of compare.py, without those of the `predicted` largest models, and prints it.
    Returns points to draw: (name, parameters, y, low, high), here each row's loss, with the ends of the
    interval in which the law expects 95% of such losses."""
    rows = sorted(rows, key=lambda row: row['inner_params'])
    n, d, losses = np.array([[row['inner_params'], row['tokens'], row['loss']] for row in rows]).T
    k = len(rows) - predicted  # rows that are fitted
    law = fit_law(n[:k], d[:k], losses[:k])
    expected = law_loss(law, n, d)
    noise = (losses - expected)[:k] * (k / (k - len(law))) ** 0.5
    rng = np.random.default_rng(0)
    drawn = np.transpose([fit_law(n[:k], d[:k], expected[:k] + rng.choice(noise, k))
                          for _ in range(200)])  # bootstrap of residuals
    print('L = E + A / N^a + B / D^b, in brackets 95% of a bootstrap')
    for name, value, ends in zip('EAaBb', law, drawn):
        print('{} = {:.4g} [{:.4g}, {:.4g}]'.format(name, value, *np.percentile(ends, [2.5, 97.5])))
    points = []
    for row, N, D, loss, mean in zip(rows, n, d, losses, expected):
        low, high = np.percentile(law_loss(drawn, N, D) + rng.choice(noise, 200), [2.5, 97.5])
        print(f"{row['variant']}: loss {loss:.4f}, the law's {mean:.4f} [{low:.4f}, {high:.4f}]")
        points.append((f'{D:,.0f} tokens', N, loss, low, high))
    return points


def print_speedups(rows):
    """Prints how many times as long the baseline, the first row, would train for each variant's loss, and for
    the ends of the difference's interval. Needs two seeds. The baseline's loss is taken to be linear in the
    logarithm of the length, also beyond LENGTHS; the error of that line is not counted. Returns points to
    draw."""
    by_name = {row['variant']: row for row in rows[1:]}
    half, twice = (by_name.pop(name)['difference'] for name in LENGTHS)
    points = []
    for name, row in by_name.items():
        gains = np.array([0, -1, 1]) * row['half_interval'] - row['difference']
        speedup = 2 ** (gains / np.where(gains < 0, half, -twice))
        print('{}: {:.2f} [{:.2f}, {:.2f}] times as long'.format(name, *speedup))
        points.append((name, row['inner_params'], *speedup))
    return points


if __name__ == '__main__':
    with fileinput.input(words) as lines:
        comparisons = [json.loads(line)['rows'] for line in lines]
    if LENGTHS[0] in [row['variant'] for row in comparisons[0]]:
        points = sum(map(print_speedups, comparisons), [])
        ylabel = 'times as long'
    else:
        points = print_law(sum(comparisons, []), predicted)
        ylabel = 'loss'
    # the picture has a curve for each name
    axes = package('matplotlib.figure', 'pictures need', 'matplotlib').Figure().subplots()
    for name in dict.fromkeys(name for name, *_ in points):
        n, y, low, high = zip(*sorted(point for own, *point in points if own == name))
        axes.plot(n, y, marker='.', label=name)
        axes.fill_between(n, low, high, alpha=0.2)
    axes.set(xlabel='parameters besides the embedding', ylabel=ylabel, xscale='log')
    axes.legend()
    axes.figure.savefig(png)


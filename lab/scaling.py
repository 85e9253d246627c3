"""
Fits a scaling law to comparisons, or measures how much longer the baseline must train to reach a
variant's loss. Prints the result and draws a picture.

    python lab/compare.py scaling --json=sizes.jsonl
    python lab/scaling.py sizes.jsonl --predicted=2         # predicts the loss of the 2 largest models
    python lab/compare.py tricks_short --json=tricks.jsonl
    python lab/scaling.py tricks.jsonl
"""
import os
import sys

if __name__ == '__main__':  # import from the folder above
    sys.path[0] = os.path.abspath(__file__ + '/../..')

import fileinput
import json
import math

from configurator import configure, package

predicted = 0          # number of the largest models that are predicted, not fitted
png = 'scaling.png'    # the picture
words = configure(globals(), words=math.inf).words

import numpy as np

LENGTHS = 'half as long', 'twice as long'  # variants: the baseline with other max_iters


def law_loss(law, n, d):
    """E + A / n^a + B / d^b for n parameters and d tokens (arXiv:2203.15556, equation 10)."""
    E, A, a, B, b = law
    return E + A / n ** a + B / d ** b


def fit_law(n, d, losses):
    """The law nearest to the losses (runs,). The exponents come from a grid. E, A and B minimize
    the squared error, and are clipped at 0."""
    grid = np.linspace(0.02, 1.2, 60)
    a, b = np.reshape(np.meshgrid(grid, grid), (2, -1, 1))
    terms = np.stack([np.ones((len(a), len(n))), (n / n.mean()) ** -a, (d / d.mean()) ** -b], -1)
    E, A, B = (np.linalg.pinv(terms) @ losses).clip(0).T[..., None]  # (grid, 1)
    laws = np.array([E, A * n.mean() ** a, a, B * d.mean() ** b, b])
    error = np.square(law_loss(laws, n, d) - losses).sum(-1)
    return laws[:, error.argmin(), 0]


def print_law(rows, predicted):
    """Fits the law to rows of compare.py, without the `predicted` largest models, and prints it. Returns
    points (name, parameters, loss, low, high), with the law's 95% interval."""
    rows = sorted(rows, key=lambda row: row['inner_params'])
    n, d, losses = np.array([[row['inner_params'], row['tokens'], row['loss']] for row in rows]).T
    k = len(rows) - predicted
    law = fit_law(n[:k], d[:k], losses[:k])
    expected = law_loss(law, n, d)
    noise = (losses - expected)[:k] * (k / (k - len(law))) ** 0.5
    rng = np.random.default_rng(0)
    drawn = np.transpose([fit_law(n[:k], d[:k], expected[:k] + rng.choice(noise, k))
                          for _ in range(200)])  # bootstrap
    print('loss = E + A / N^a + B / D^b for N parameters and D tokens [95% interval]')
    for name, value, ends in zip('EAaBb', law, drawn):
        print('{} = {:.4g} [{:.4g}, {:.4g}]'.format(name, value, *np.percentile(ends, [2.5, 97.5])))
    points = []
    for row, N, D, loss, mean in zip(rows, n, d, losses, expected):
        low, high = np.percentile(law_loss(drawn, N, D) + rng.choice(noise, 200), [2.5, 97.5])
        print(f"{row['variant']}: loss {loss:.4f}, expected {mean:.4f} [{low:.4f}, {high:.4f}]")
        points.append((f'{D:,.0f} tokens', N, loss, low, high))
    return points


def print_speedups(rows):
    """Prints how much longer the baseline, the first row, must train to reach each variant's loss.
    Assumes that the baseline's loss is exactly linear in the logarithm of its steps. Needs two
    seeds. Returns points (name, parameters, factor, low, high)."""
    by_name = {row['variant']: row for row in rows[1:]}
    half, twice = (by_name.pop(name)['difference'] for name in LENGTHS)
    points = []
    for name, row in by_name.items():
        gains = np.array([0, -1, 1]) * row['half_interval'] - row['difference']
        speedup = 2 ** (gains / np.where(gains < 0, half, -twice))
        print('{}: the baseline needs {:.2f} times its steps [{:.2f}, {:.2f}] for this loss'.format(
            name, *speedup))
        points.append((name, row['inner_params'], *speedup))
    return points


if __name__ == '__main__':
    with fileinput.input(words) as lines:
        comparisons = [json.loads(line)['rows'] for line in lines]
    if LENGTHS[0] in [row['variant'] for row in comparisons[0]]:
        points = sum(map(print_speedups, comparisons), [])
        ylabel = 'steps of the baseline for the same loss, as a multiple'
    else:
        points = print_law(sum(comparisons, []), predicted)
        ylabel = 'loss'
    axes = package('matplotlib.figure', 'pictures need', 'matplotlib').Figure().subplots()
    for name in dict.fromkeys(name for name, *_ in points):
        n, y, low, high = zip(*sorted(point for other, *point in points if other == name))
        axes.plot(n, y, marker='.', label=name)
        axes.fill_between(n, low, high, alpha=0.2)
    axes.set(xlabel='parameters besides the embedding', ylabel=ylabel, xscale='log')
    axes.legend()
    axes.figure.savefig(png)


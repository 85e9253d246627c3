"""
An exponential mean of the weights ("temporal averaging" in Adam, arXiv:1412.6980, section 7.2).
Evaluations, samples and checkpoints use the mean instead of the last weights.

    python train.py examples/weight_mean.py --decay_lr=False
    python sample.py --start=def
    python train.py examples/weight_mean.py --init_from=resume --max_iters=4000

The mean after t iterations is the sum of DECAY^(t - i) * (1 - DECAY) * weights_i, divided by 1 - DECAY^t.
It is part of the optimizer's state, for any optimizer. In an evaluation and in a checkpoint, the weights
and the mean are swapped, so sample.py does not need this file. A resumed run swaps them back. If the
learning rate decays, the mean lags behind the weights.
"""
import contextlib

import torch

import train

update_weights, load_states = train.update, train.load_optimizers  # patch replaces both
DECAY = 0.98  # each iteration multiplies the share of older weights by this


@torch.no_grad()
def update(run, load):
    """Updates the weights, then their mean."""
    result = update_weights(run, load)
    step = run.iter_num + 1
    for opt in run.optimizers:
        for w, state in opt.state.items():
            mean = state.setdefault('mean', w.detach().clone())
            mean.lerp_(w, (1 - DECAY) / (1 - DECAY ** step))
    return result


@torch.no_grad()
def swap(model, optimizers):
    """Exchanges the weights and their mean."""
    for opt in optimizers:
        for w, state in opt.state.items():
            if 'mean' in state:
                weights = w.detach().clone()
                w.copy_(state['mean'])
                state['mean'].copy_(weights)
    for part in *model.h, model:
        if hasattr(part, 'reshard'):  # with shard, forward may otherwise use older weights
            part.reshard()


@contextlib.contextmanager
def mean_weights(run):
    """Inside of this context, the model has the mean of the weights."""
    swap(run.model, run.optimizers)
    try:
        yield
    finally:
        swap(run.model, run.optimizers)


def on_mean(function):
    """Wraps function(run, ...) to use the mean of the weights."""
    def with_mean(run, *args):
        with mean_weights(run):
            return function(run, *args)
    return with_mean


def load_optimizers(model, optimizers, states):
    """Loads the states of a checkpoint, and swaps the weights and their mean back."""
    load_states(model, optimizers, states)
    swap(model, optimizers)


def patch(script):
    """Replaces functions of train.py."""
    script.update = update
    script.evaluate = on_mean(train.evaluate)
    script.save = on_mean(train.save)
    script.print_sample = on_mean(train.print_sample)
    script.load_optimizers = load_optimizers

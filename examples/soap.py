"""
SOAP (arXiv:2409.11321, algorithms 3 and 4) for the matrices of blocks: Adam in the eigenbasis of Shampoo's
preconditioners. AdamW optimizes the other parameters.

    python train.py examples/soap.py
    python train.py config/llama_small.py examples/soap.py --learning_rate=3e-3

The optimizer is an entry of OPTIMIZERS. It preconditions each projection of a fused matrix separately. All
of its state exists from the start, because load_optimizers cannot infer shapes of preconditioners. As in the
authors' code, Adam's bias is corrected, and the first gradient only initializes preconditioners.
"""
import math

import torch

from configurator import UserError
from model import GROUPS, row_splits
from train import adamw, is_sharded, param_groups

BETA, EPSILON = 0.95, 1e-8  # BETA is for both moments and the preconditioners
FREQUENCY = 10   # steps between updates of the eigenvectors


class Soap(torch.optim.Optimizer):
    """Parameters are (..., rows, columns). row_splits: parameter -> rows per projection in a fused matrix."""

    def __init__(self, groups, lr, row_splits):
        super().__init__(groups, {'lr': lr})
        self.row_splits = row_splits
        for w in (w for group in self.param_groups for w in group['params']):
            zeros = torch.zeros_like(w)
            self.state[w].update(step=-1, exp_avg=zeros, exp_avg_sq=zeros.clone())
            for i, part in enumerate(zeros.split(row_splits[w], dim=-2)):
                left = part @ part.mT    # (..., m, m)
                right = part.mT @ part   # (..., n, n)
                self.state[w].update({f'left_{i}': left, f'left_basis_{i}': left.clone(),
                                      f'right_{i}': right, f'right_basis_{i}': right.clone()})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for w in group['params']:
                state = self.state[w]
                # skip the first gradients, which are zero as long as a later projection is zero
                if w.grad is not None and (state['step'] >= 0 or w.grad.any()):
                    state['step'] += 1
                    for i, part in enumerate(zip(*(tensor.split(self.row_splits[w], dim=-2) for tensor in (
                            w, w.grad, state['exp_avg'], state['exp_avg_sq'])))):
                        update_projection(*part, state, i, group['lr'], group['weight_decay'])


def update_projection(w, grad, m, v, state, i, lr, weight_decay):
    """A step for projection i of a parameter; all tensors are (..., m, n)."""
    step = state['step']
    left, right = state[f'left_basis_{i}'], state[f'right_basis_{i}']  # Q_L and Q_R of the paper
    if step:
        m.lerp_(grad, 1 - BETA)
        v.lerp_((left.mT @ grad @ right).square(), 1 - BETA)
        update = (left.mT @ m @ right) / (v.sqrt() + EPSILON)
        w.mul_(1 - lr * weight_decay)
        w.sub_(left @ update @ right.mT, alpha=lr * math.sqrt(1 - BETA ** step) / (1 - BETA ** step))
    for side, g, basis in ('left', grad, left), ('right', grad.mT, right):
        factor = state[f'{side}_{i}'].lerp_(g @ g.mT, 1 - BETA)
        if step == 0:
            basis.copy_(torch.linalg.eigh(factor)[1].flip(-1))  # the largest eigenvalue is first
        elif step % FREQUENCY == 0:
            basis.copy_(torch.linalg.qr(factor @ basis)[0])     # one step of power iteration


def soap(model, config):
    """SOAP for matrices of blocks, AdamW for other parameters."""
    others = adamw(model, config, GROUPS.keys() - {'matrix'})
    matrices = param_groups(model, config, ['matrix'])
    if any(map(is_sharded, model.parameters())):
        raise UserError("optimizer='soap' cannot be combined with shard=True: leave one out")
    return [Soap(matrices, config['learning_rate'], row_splits(model)), *others] if matrices else others


OPTIMIZERS = {'soap': soap}
optimizer = 'soap'

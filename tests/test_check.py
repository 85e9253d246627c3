"""Tests of lab/check.py: it finds planted mistakes, and passes correct models."""
import copy
import dataclasses
import math
import re
import types

import pytest
import torch
from common import ROOT, run
from test_train import new_run

import model as flat
import train as flat_train
from lab import check
from model import GPTConfig
from test_model import YARN

HYBRID = dict(mixer_pattern='DA', linear_n_key_head=2, linear_n_value_head=4)
MOE = dict(n_expert=4, router='sigmoid', balance_bias=True, d_expert=24)


def select_but_states(select):
    def forgetful(self, rows):
        select(self, rows)
        self.states = [[state.flip(0) for state in layer] for layer in self.states]
    return forgetful


def one_ahead(make_mask):
    def mistaken(*args):
        mask = make_mask(*args)
        return dataclasses.replace(mask, part=lambda *slices: mask.part(*slices).roll(1, -1))
    return mistaken


MISTAKES = [
    # mistake, the model's options, place, correct -> wrong, check, message
    ('a mask sees one token ahead', {}, flat, 'make_mask', one_ahead,
     check.check_formulas, r'h\.0\.attn: .*, first at \[0, 0, 0\]'),
    ('an option with hardly any effect', dict(residual_scale=0.5), flat.Block, 'branch',
     lambda f: lambda self, y: y * (1 + 1e-3 * self.scale), check.check_options,
     'residual_scale changes less than 1%'),
    ('queries that do not learn', {}, flat.BaseAttention, 'attend',
     lambda f: lambda self, q, *rest: f(self, q.detach(), *rest),
     check.check_gradients, r'h\.1\.attn\.\w+\.weight'),
    ('documents that see each other', dict(document_token=3), flat, 'track_starts',
     lambda f: lambda *args: 0 * f(*args), check.check_documents, r'first at \[0, 64, 0\]'),
    ('select that forgets states', HYBRID, flat.Cache, 'select', select_but_states,
     check.check_cache, 'copied by select'),
]


@pytest.mark.parametrize('options, place, name, change, function, message', [row[1:] for row in MISTAKES],
                         ids=[row[0] for row in MISTAKES])
def test_a_planted_mistake_is_found(options, place, name, change, function, message, monkeypatch):
    monkeypatch.setattr(place, name, change(getattr(place, name)))
    holds, remark = check.run_check(function, check.tiny_config(GPTConfig(**options)))
    assert not holds
    assert re.search(message, remark), remark


def test_a_correct_model_passes():
    small = check.tiny_config(GPTConfig(
        qk_norm='rotated', query_scale={'beta': 0.5, 'length': 64, 'start': 1}, window=5, bias=True,
        window_pattern='LC', local={'rope_base': 50.0, 'rope_scaling': YARN}, norm='layernorm', n_layer=27,
        expert_pattern='ED', document_token=3, expert_input_scale=True, **MOE))
    assert small.n_layer <= 3
    for function in check.CHECKS:
        if function is not check.check_compiling:  # takes seconds; below
            function(small)


@pytest.mark.parametrize('base', [flat.Attention, flat.MLP, flat.MoE, flat.Norm, flat.Linear])
def test_a_forks_class_has_no_formula(base, monkeypatch):
    """It would be compared with itself."""
    monkeypatch.setattr(flat, base.__name__, type('Own', (base,), {}))
    monkeypatch.setitem(flat.MIXERS, 'X', flat.Attention)
    monkeypatch.setitem(flat.MLPS, 'X', flat.MLP)
    monkeypatch.setitem(flat.MLPS, 'Y', flat.MoE)
    small = check.tiny_config(GPTConfig(mixer_pattern='XA', expert_pattern='XY', n_expert=4))
    assert check.check_formulas(small) == 'no formula for Own'


def test_a_forks_placement_has_no_formula_and_a_pooling_mlp_no_cache(monkeypatch):
    class Pooling(flat.MLP):
        causal = False

        def forward(self, x, context):
            return super().forward(x.mean(1, keepdim=True).expand_as(x))
    monkeypatch.setitem(flat.NORM_PLACEMENTS, 'own', flat.NORM_PLACEMENTS['sandwich'])
    monkeypatch.setitem(flat.MLPS, 'P', Pooling)
    small = check.tiny_config(GPTConfig(norm_placement='own', expert_pattern='DP'))
    assert check.check_formulas(small) == 'no formula for Pooling, own'
    assert check.check_cache(small) == 'not possible, because an MLP is not causal'


def test_a_forks_randomness_passes(monkeypatch):
    branch = flat.Block.branch

    def drop_path(self, y):
        return branch(self, y) * ((torch.rand(len(y), 1, 1) < 0.5) * 2 if self.training else 1)
    monkeypatch.setattr(flat.Block, 'branch', drop_path)
    small = check.tiny_config(GPTConfig(n_kv_head=2, mtp=True))
    check.check_formulas(small)
    check.check_gradients(small)


def projections(x, rows):
    """x (..., sum of rows, columns) -> its matrices; all of x if rows is None"""
    if rows is None:
        return [x]
    return [part for matrix in x.view(-1, *x.shape[-2:]) for part in matrix.split(rows)]


@pytest.mark.parametrize('kind', ['adamw', 'muon'])
def test_updates_equal_those_of_torchs_optimizers(kind, monkeypatch):
    """Muon's on each projection and expert. --lr_scales scales the rate, but not the decay."""
    monkeypatch.setattr(flat_train, 'rounded', torch.Tensor.bfloat16)  # as in torch's Muon
    model = check.randomized(check.tiny_config(GPTConfig(n_kv_head=2, n_expert=4, d_expert=24)))
    scales = {tag.group: 0.5 + len(tag.group) / 8 for tag in model.tags.values()}
    run = new_run(model, learning_rate=0.7, weight_decay=0.5, beta1=0.5, beta2=0.99, momentum=0.7,
                  warmup_iters=6, max_iters=20, optimizer=kind, lr_scales=scales)
    references = []
    for name, w in model.named_parameters():
        group = model.tags[name].group
        scale, decay = scales[group], 0.5 * flat.GROUPS[group]
        copied = w.detach().clone()
        if kind == 'muon' and group == 'matrix':
            rows = getattr(model.get_submodule(name.rpartition('.')[0]), 'widths', w.shape[-2:-1])
            opt = torch.optim.Muon(projections(copied, rows), 0.0, decay / scale, 0.7,
                                   adjust_lr_fn='match_rms_adamw')
        else:
            rows = None
            opt = torch.optim.AdamW([copied], 0.0, (0.5, 0.99), weight_decay=decay / scale)
        references.append((copied, rows, opt, scale))
    for it, rate, size in (0, 0.1, 1.0), (13, 0.385, 1e-3):
        before = [w.detach().clone() for w in run.params]
        for w in run.params:
            w.grad = size * torch.randn_like(w)
        norm = torch.stack([w.grad.norm() for w in run.params]).norm()
        for w, (_, rows, opt, scale) in zip(run.params, references):
            group, = opt.param_groups
            group['lr'] = rate * scale
            for part, grad in zip(group['params'], projections(w.grad / norm.clamp(min=1.0), rows)):
                part.grad = grad
            opt.step()
        flat_train.set_rates(run.optimizers, flat_train.lr_at(it, run.config))
        flat_train.update(run, None)
        for w, old, (copied, *_), name in zip(run.params, before, references, model.tags):
            assert (w - copied).norm() < 0.03 * (copied - old).norm(), name


def test_training_equals_single_batches():
    """Masked micro-batches with further losses, evaluation without dropout, and the order of sequences."""
    config = check.tiny_config(GPTConfig(mtp=True, **MOE))
    inputs = check.random_tokens(config, 9, 136)
    targets = inputs.roll(-1, 1).where(torch.rand(9, 136) < torch.rand(9, 1), -1)
    bins = types.SimpleNamespace(masks=True, meta={'bytes_per_token': None}, n_sequences=lambda size: 9,
                                 batch=lambda rows, size: (inputs.numpy()[rows], targets.numpy()[rows]))
    run = new_run(check.trainable(config), batch_size=3, gradient_accumulation_steps=3, max_iters=1,
                  balance_loss=0.1, z_loss=0.01)
    with_dropout = new_run(check.randomized(config).train(), batch_size=4)
    for n_batches, rows in (1, [0, 2, 4, 6]), (5, [*range(9)]):
        loss, *_ = flat_train.evaluate(with_dropout, bins, n_batches)
        expected, _ = with_dropout.model.eval()(inputs[rows], targets[rows])
        assert loss == pytest.approx(expected.item(), rel=1e-5)
    batch, = flat_train.read_batches(run, bins)
    read = torch.cat([micro.inputs for micro in batch]).tolist()
    assert sorted(read) == sorted(inputs.tolist()) and read != inputs.tolist()
    row = flat_train.gradients(run, batch)
    loss, aux = run.model(inputs, targets)
    assert row['loss'].item() == pytest.approx(loss.item(), rel=1e-5)
    assert torch.equal(row['load'], aux['load'])
    further = 3 * 0.3 * aux['mtp']  # over all targets; the others depend on the micro-batch
    for micro in batch:
        _, aux = run.model(micro.inputs, micro.targets)
        further = further + (0.1 * aux['balance'] + 0.01 * aux['z']) * micro.weight
    for w, grad in zip(run.params, torch.autograd.grad(loss + further / 3, run.params)):
        torch.testing.assert_close(w.grad, grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize('kind', flat_train.OPTIMIZERS)
def test_a_skipped_update_changes_nothing(kind):
    run = new_run(check.randomized(check.tiny_config(GPTConfig(**MOE))).train(), optimizer=kind)
    idx = torch.randint(61, (2, 16))
    flat_train.step(run, [flat_train.Batch(idx, idx)])
    before = copy.deepcopy(run.state())
    flat_train.step(run, [flat_train.Batch(idx, idx, math.nan)])
    for part in 'model', 'optimizer':
        torch.testing.assert_close(run.state()[part], before[part], atol=0, rtol=0)


SCHEDULES = {  # share of the iterations after the warm-up, cooldown -> share of the peak
    'cosine': lambda done, cooldown: (1 + math.cos(math.pi * done)) / 2,
    'linear': lambda done, cooldown: 1 - done,
    'wsd': lambda done, cooldown: min(1, (1 - done) / cooldown),
    '1-sqrt': lambda done, cooldown: 1 if done < 1 - cooldown else 1 - math.sqrt(
        (done - (1 - cooldown)) / cooldown)}  # arXiv:2405.18392, equation 2


def test_rates_equal_their_formulas(monkeypatch):
    """Warm-up over 10 iterations, then the schedule, down to a tenth. A new shape has a cooldown."""
    monkeypatch.setitem(flat_train.SCHEDULES, '1-sqrt', lambda done: 1 - math.sqrt(done))
    settings = flat_train.config | dict(learning_rate=1.0, warmup_iters=10, max_iters=110, cooldown=0.4)
    for name, share in SCHEDULES.items():
        for it in range(0, 140, 5):
            expected = 0.1 + 0.9 * share(min((it - 10) / 100, 1), 0.4) if it >= 10 else (it + 1) / 11
            assert flat_train.lr_at(it, settings | {'lr_schedule': name}) == pytest.approx(expected)


DEFAULTS = """
eval_interval=2000 eval_iters=200 gradient_accumulation_steps=40 batch_size=12 max_iters=600000 seed=1337
learning_rate=0.0006 weight_decay=0.1 beta1=0.9 beta2=0.95 grad_clip=1.0 warmup_iters=2000 decay_lr=True
momentum=0.95 mtp_loss=0.3 balance_loss=0.01 z_loss=0.0 balance_rate=0.001 lora_alpha=16.0
lr_schedule=cosine cooldown=0.4"""


def test_defaults_are_those_of_nanogpt_and_papers():
    for setting in DEFAULTS.split():
        name, value = setting.split('=')
        assert str(flat_train.config[name]) == value, name


def test_dropout_is_keyed_by_seed_iteration_and_rank():
    draws = []
    for key in (1, 1, 0), (1, 1, 0), (1, 2, 0), (2, 1, 0), (1, 1, 1):
        flat_train.seed_dropout(*key)
        draws.append(torch.rand(()).item())
    assert draws[0] == draws[1] and len({*draws}) == 4


def test_command(folder, capsys):
    with pytest.raises(SystemExit) as end:
        run('lab/check.py', str(ROOT / 'config' / 'qwen3_8b.py'))
    assert end.value.code == 0
    assert 'ok   check_formulas\n' in capsys.readouterr().out
    with pytest.raises(ValueError, match='--q_lora_rank has no effect'):
        run('lab/check.py', '--q_lora_rank=3')

"""Tests of lab/check.py: mistakes that it finds, and sound models in which it finds none."""
import functools
import math
import re
import types

import pytest
import torch
from common import ROOT, run, train

import experts
import model as flat
import train as flat_train
from lab import check
from model import GPTConfig
from test_model import MLA, YARN, SharedKeys

HYBRID = dict(mixer_pattern='DA', linear_n_key_head=2, linear_n_value_head=4)
MOE = dict(n_expert=4, router='sigmoid', balance_bias=True, d_expert=24)


def select_but_states(select):
    def forgetful(self, rows):
        select(self, rows)
        self.states = [[state.flip(0) for state in layer] for layer in self.states]
    return forgetful


def counting(forward):
    def count(self, x, context):
        self.calls = getattr(self, 'calls', 0) + 1
        return forward(self, x, context) + 0 * self.calls
    return count


MISTAKES = [
    # mistake, options of the model, where it is planted, correct -> wrong, the check, its message
    ('a mask sees one token ahead', {}, flat, 'visible', lambda f: lambda q, k, *first: f(q + 1, k, *first),
     check.check_formulas, r'h\.0\.attn: .*, first at \[0, 0, 0\]'),
    ("YaRN's turns the other way round", dict(rope_scaling=YARN), flat.ROPE_SCALINGS, 'yarn',
     lambda f: lambda *args, **rest: f(*args, **rest, beta_fast=1, beta_slow=32),
     check.check_scalings, 'yarn: frequencies'),
    ('an option that is lost', dict(attn_softcap=3.0), flat, 'eager_attention',
     lambda f: lambda *args: f(*args[:6], 0.0, *args[7:]), check.check_options,
     'attn_softcap=3.0 changes nothing'),
    ('a balance loss that is a sum', MOE, experts.MoE, 'statistics',
     lambda f: lambda *args: (2 * f(*args)[0], *f(*args)[1:]), check.check_formulas, r"aux\['balance'\]"),
    ('a lost bias', dict(bias=True), flat.MLP, '__init__', lambda f: lambda self, *args: (
        f(self, *args), setattr(self.c_proj, 'bias', None))[0], check.check_start, 'h.0.mlp.c_proj'),
    ("Muon's updates that are too small", {}, flat_train, 'orthogonalise', lambda f: lambda x: 0.9 * f(x),
     check.check_updates, 'iteration 0, then NaN, by muon: error of the move of h.0.attn'),
    ('a gate that is a matrix', {}, flat.Norm, '__init__', lambda f: lambda self, *args: (
        f(self, *args), flat.tag(self.weight, torch.nn.init.ones_, 'embedding'))[0],
     check.check_start, 'ln_1.weight is in the group embedding, not vector'),
    ('queries that do not learn', {}, flat.BaseAttention, 'attend',
     lambda f: lambda self, q, *rest: f(self, q.detach(), *rest),
     check.check_gradients, r'h\.1\.attn\.\w+\.weight'),
    ('branches without dropout', {}, flat.Block, 'branch', lambda f: lambda self, y: y,
     check.check_dropout, 'it misses embedding'),
    ('documents that see each other', dict(document_token=3), flat, 'find_starts',
     lambda f: lambda *args: 0 * f(*args), check.check_documents, r'first at \[0, 64, 0\]'),
    ('select forgets states', HYBRID, flat.Cache, 'select', select_but_states,
     check.check_cache, 'copied by select'),
    ('a block that counts its calls', {}, flat.Block, 'forward', counting,
     check.check_compiling, 'Recompile|calls'),
    ('warm-up from zero', {}, flat_train, 'lr_at', lambda f: lambda it, *rest: f(it - 1, *rest),
     check.check_rates, 'the rate at 0'),
    ('one order for all epochs', {}, flat_train, 'sequence_order', lambda f: functools.cache(
        lambda seed, epoch, n: f(seed, 0, n)), check.check_data, 'in one order'),
    ('the auxiliary losses twice', MOE, flat_train, 'gradients',
     lambda f: lambda run, batch: f(types.SimpleNamespace(**{
         **vars(run), 'config': {**run.config, 'balance_loss': 0.2}}), batch),
     check.check_updates, 'gradient'),
    ('norms that decay', {}, flat.GROUPS, 'vector', lambda f: True,
     check.check_updates, 'the move of h.0.ln_1.weight'),
    ('moments that are not restored', {}, flat_train, 'load_optimizers', lambda f: lambda *args: None,
     check.check_updates, 'iteration 2, then NaN, by adamw: error of the move of wte.weight'),
]


@pytest.mark.parametrize('options, place, name, change, function, message', [row[1:] for row in MISTAKES],
                         ids=[row[0] for row in MISTAKES])
def test_a_planted_mistake_is_found(options, place, name, change, function, message, monkeypatch):
    setter, old = (monkeypatch.setitem, place[name]) if isinstance(place, dict) else (
        monkeypatch.setattr, getattr(place, name))
    setter(place, name, change(old))
    holds, remark = check.run_check(function, 'the place', check.tiny_config(GPTConfig(**options)))
    assert not holds
    assert re.search(message, remark), remark
    assert remark.endswith('; look at the place') and '\n' not in remark


@pytest.mark.parametrize('options', [
    dict(n_dense_layer=1, n_group=2, topk_group=1, **MLA, **MOE),
    dict(HYBRID, n_layer=27, mixer_pattern='DDDADDDADDDADDDADDDADDDADDA', attn_gate=True, document_token=3),
    dict(norm='layernorm', bias=True, norm_placement='post', mlp='xielu', pos='learned', embed_norm=True),
    dict(qk_norm='rotated', query_scale={'beta': 0.5, 'length': 64, 'start': 1}, window=5,
         window_pattern='LC', local={'rope_base': 50.0, 'rope_scaling': YARN}, norm_weight=False,
         expert_pattern='NED', expert_input_scale=True, **MOE),
    dict(mixer_pattern='CBK', mtp=True, residual_lambdas=True, bigram_size=50)], ids=str)
def test_sound_models_pass(options):
    small = check.tiny_config(GPTConfig(**options))
    assert small.n_layer <= 7
    for function, look_at in check.CHECKS.values():
        if function is not check.check_compiling:  # takes seconds; below
            holds, remark = check.run_check(function, look_at, small)
            assert holds, remark


def test_a_small_model_of_each_kind_can_be_made():
    for letter in flat.MIXERS:
        check.tiny_config(GPTConfig(mixer_pattern=letter, **(MLA if letter == 'M' else {})))


def test_a_layer_of_ones_own_is_no_fault(monkeypatch):
    class Mean(flat.Attention):
        def attend(self, q, k, v, context):
            return (super().attend(q, k, v, context) + super().attend(q, 2 * k, v, context)) / 2
    monkeypatch.setitem(flat.MIXERS, 'X', Mean)
    monkeypatch.setitem(flat.NORM_PLACEMENTS, 'own', flat.NORM_PLACEMENTS['sandwich'])
    for name, options in ('Mean', {'mixer_pattern': 'XA'}), ('own', {'norm_placement': 'own'}):
        assert check.check_formulas(check.tiny_config(GPTConfig(**options))) == f'no formula for {name}'


def test_randomness_and_shared_keys_of_ones_own_are_no_fault(monkeypatch):
    branch = flat.Block.branch

    def drop_path(self, y):
        return branch(self, y) * ((torch.rand(len(y), 1, 1) < 0.5) * 2 if self.training else 1)
    monkeypatch.setattr(flat.Block, 'branch', drop_path)
    monkeypatch.setitem(flat.MIXERS, 'H', SharedKeys)
    small = check.tiny_config(GPTConfig(mixer_pattern='H', n_kv_head=2, mtp=True))
    for function in check.check_formulas, check.check_gradients, check.check_updates:
        holds, remark = check.run_check(function, '', small)
        assert holds, remark


def sgd(**changes):
    return lambda model, config: [torch.optim.SGD([
        group | changes for group in flat_train.param_groups(model, config, flat.GROUPS)])]


@pytest.mark.parametrize('table, function, own, holds, remark', [
    ('OPTIMIZERS', check.check_updates, sgd(), True, '^no formula for own$'),
    ('OPTIMIZERS', check.check_updates, sgd(lr_scale=1.0), False, 'own: lr_scale of each .*: 1 instead'),
    ('OPTIMIZERS', check.check_updates, sgd(weight_decay=0.1), False, 'own: a .* weight_decay as GROUPS'),
    ('OPTIMIZERS', check.check_updates, lambda *_: [], False, 'must take each parameter once'),
    ('SCHEDULES', check.check_rates, lambda done, _: 1 - done ** 2, True, '^no formula for own$'),
    ('SCHEDULES', check.check_rates, lambda *_: 7.0, False, 'own: its share of the peak at 0, 7.0, is not')])
def test_entries_of_ones_own_are_looked_at(table, function, own, holds, remark, monkeypatch):
    monkeypatch.setattr(flat_train, table, {'own': own})
    found = check.run_check(function, 'the place', check.tiny_config(GPTConfig()))
    assert found[0] == holds and re.search(remark, found[1]), found


def test_command(folder, capsys):
    with pytest.raises(SystemExit) as end:
        run('lab/check.py', str(ROOT / 'config' / 'qwen3_8b.py'), '--json=True')
    assert end.value.code == 0
    assert '"failed": []' in capsys.readouterr().out
    train('--out_dir=out', '--max_iters=1')
    saved = torch.load('out/ckpt.pt', weights_only=True)
    saved['model']['h.1.mlp.c_fc.weight'][0, 0] = math.nan
    torch.save(saved, 'out/ckpt.pt')
    assert len(check.check('out')) == 1 and 'h.1.mlp.c_fc.weight: NaN' in capsys.readouterr().out

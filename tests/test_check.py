"""Tests of check.py: mistakes that it finds, and sound models in which it finds none."""
import functools
import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from common import ROOT, run, train

import check
import mixers
import model as flat
import train as flat_train
from model import GPT, GPTConfig
from test_model import MLA, YARN

HYBRID = dict(mixer_pattern='DA', linear_n_key_head=2, linear_n_value_head=4)
MOE = dict(n_expert=4, router='sigmoid', balance_bias=True, d_expert=24)


def select_but_states(select):
    def forgetful(self, rows):
        select(self, rows)
        self.states = [[state.flip(0) for state in layer] for layer in self.states]
    return forgetful


def mean_of_rows(forward):
    def mean(self, idx, targets=None, **rest):
        if targets is None:
            return forward(self, idx, **rest)
        rows = [forward(self, *row)[0] for row in zip(idx.split(1), targets.split(1))]
        return sum(rows) / len(rows), forward(self, idx, targets)[1]
    return mean


def counting(forward):
    def count(self, x, context):
        self.calls = getattr(self, 'calls', 0) + 1
        return forward(self, x, context) + 0 * self.calls
    return count


MISTAKES = [
    # mistake, options of the model, where it is planted, correct -> wrong, the check, its message
    ('a mask sees one token ahead', {}, flat, 'visible', lambda f: lambda q, k, *first: f(q + 1, k, *first),
     check.check_formulas, r'h\.0\.attn: .*, first at \[0, 0, 0\]'),
    ('a window one too wide', dict(window=5, window_pattern='LS'), GPTConfig, 'window_of',
     lambda f: lambda self, layer: f(self, layer) and 6, check.check_formulas,
     r'h\.1\.attn: .*, first at \[0, 5, 0\]'),
    ("YaRN's turns the other way round", dict(rope_scaling=YARN), flat.ROPE_SCALINGS, 'yarn',
     lambda f: lambda *args, **rest: f(*args, **rest, beta_fast=1, beta_slow=32),
     check.check_scalings, 'yarn: frequencies'),
    ('a state that is never corrected', HYBRID, mixers, 'gated_delta_rule',
     lambda f: lambda *args: f(*args[:-1], False), check.check_formulas, r'h\.0\.attn'),
    ('keys of latents that are not rotated', MLA, flat, 'rotate',
     lambda f: lambda x, rope: x if x.shape[1] == 1 else f(x, rope), check.check_formulas, r'h\.0\.attn'),
    ('an option that is lost', dict(attn_softcap=3.0), flat, 'eager_attention',
     lambda f: lambda *args: f(*args[:6], 0.0, *args[7:]), check.check_options,
     'attn_softcap=3.0 changes nothing'),
    ('a balance loss that is a sum', MOE, flat.MoE, 'statistics',
     lambda f: lambda *args: (2 * f(*args)[0], *f(*args)[1:]), check.check_formulas, r"aux\['balance'\]"),
    ('a gate that is a matrix', {}, flat.Norm, '__init__', lambda f: lambda self, *args: (
        f(self, *args), flat.tag(self.weight, torch.nn.init.ones_, 'embedding'))[0],
     check.check_start, 'ln_1.weight is in the group embedding, not vector'),
    ('queries that do not learn', {}, flat.BaseAttention, 'attend',
     lambda f: lambda self, q, *rest: f(self, q.detach(), *rest),
     check.check_gradients, r'h\.1\.attn\.\w+\.weight'),
    ('documents that see each other', dict(document_token=3), flat, 'find_starts',
     lambda f: lambda *args: 0 * f(*args), check.check_documents, r'first at \[0, 64, 0\]'),
    ('a NaN', {}, flat.Norm, 'forward', lambda f: lambda self, x: f(self, x) * math.nan,
     check.check_cache, 'NaN'),
    ('the mean of rows for a loss', {}, GPT, 'forward', mean_of_rows, check.check_updates,
     'the loss reported'),
    ('dropout in evaluation', {}, flat.Block, 'branch',
     lambda f: lambda self, y: f(self, F.dropout(y, self.p)), check.check_cache, 'in odd chunks'),
    ('select forgets states', HYBRID, flat.Cache, 'select', select_but_states,
     check.check_cache, 'copied by select'),
    ('a block that counts its calls', {}, flat.Block, 'forward', counting,
     check.check_compiling, 'Recompile|calls'),
    ('embeddings that start too large', {}, GPT, 'init_weights', lambda f: lambda self: (
        f(self), self.wte.weight.data.mul_(50)), check.check_start, 'the first loss'),
    ('warm-up from zero', {}, flat_train, 'lr_at', lambda f: lambda it, *rest: f(it - 1, *rest),
     check.check_rates, 'the rate at 0'),
    ('one order for all epochs', {}, flat_train, 'sequence_order', lambda f: functools.cache(
        lambda seed, epoch, n: f(seed, 0, n)), check.check_data, 'in one order'),
    ('the auxiliary losses twice', MOE, flat_train, 'gradients',
     lambda f: lambda *args: f(*args[:-1], {**args[-1], 'balance_loss': 0.2}),
     check.check_updates, 'gradient'),
    ('norms that decay', {}, flat.GROUPS, 'vector', lambda f: True,
     check.check_updates, 'the move of h.0.ln_1.weight'),
    ('one rate for all groups', {}, flat_train, 'set_rates', lambda f: lambda optimizers, lr: [
        group.update(lr=lr) for opt in optimizers for group in opt.param_groups],
     check.check_updates, 'iteration 0, .* by adamw: error of the move'),
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
    dict(rope_scaling={**YARN, 'original_max_position_embeddings': 1000}),  # slows each pair otherwise
    dict(n_dense_layer=1, **MLA, **MOE),
    dict(HYBRID, attn_gate=True, head_dim=10, partial_rotary_factor=0.8, document_token=3, window=5,
         window_pattern='LS'),
    dict(pos='alibi', norm='layernorm', bias=True, norm_placement='post', mlp='gelu_tanh', embed_norm=True),
    dict(pos='t5', pos_pattern='NP', window=9, window_pattern='SL'),
    dict(norm_placement='sandwich', attn_softcap=3.0, logit_softcap=5.0, residual_lambdas=True,
         pos='sinusoidal', norm_bias=True),
    dict(norm_placement='parallel_2', residual_scale=0.7, embed_scale=3.0, pos='learned',
         tie_word_embeddings=False, bigram_size=50),
    dict(qk_norm='rotated', query_scale={'beta': 0.5, 'length': 64, 'start': 1}, window=5,
         window_pattern='LC', attn_gate='head',
         rope_local={'rope_base': 50.0, 'rope_scaling': YARN, 'partial_rotary_factor': 0.5},
         norm_weight=False, expert_pattern='NED', expert_input_scale=True, **MOE),
    dict(qk_norm='unit', query_scale={'beta': 0.5, 'length': 64, 'layers': 'N'}, pos_pattern='PN', mtp=True),
    dict(mixer_pattern='CBK', mtp=True, document_token=3, bigram_size=50)],
    ids=str)
def test_sound_models_pass(options):
    for function, look_at in check.CHECKS.values():
        if function is not check.check_compiling:  # takes seconds; below
            holds, remark = check.run_check(function, look_at, check.tiny_config(GPTConfig(**options)))
            assert holds, remark


def test_a_small_model_of_each_kind_can_be_made():
    for letter in flat.MIXERS:
        check.tiny_config(GPTConfig(mixer_pattern=letter, **(MLA if letter == 'M' else {})))


def test_a_layer_of_ones_own_is_no_fault(monkeypatch):
    class Mean(flat.Attention):
        def attend(self, q, k, v, context):
            return (super().attend(q, k, v, context) + super().attend(q, 2 * k, v, context)) / 2
    monkeypatch.setitem(flat.MIXERS, 'X', Mean)
    assert check.check_formulas(check.tiny_config(GPTConfig(mixer_pattern='XA'))) == 'none for Mean'


def test_command(folder, capsys):
    with pytest.raises(SystemExit) as end:
        run('check.py', str(ROOT / 'config' / 'qwen3_8b.py'), '--json=True')
    numbers = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert end.value.code == 0
    assert numbers['passed'] == len(check.CHECKS) and numbers['failed'] == [] and numbers['family'] == 'qwen3'
    train('--out_dir=out', '--max_iters=1')
    saved = torch.load('out/ckpt.pt', weights_only=True)
    saved['model']['h.1.mlp.c_fc.weight'][0, 0] = math.nan
    torch.save(saved, 'out/ckpt.pt')
    numbers = check.check(check.config, 'out')
    assert len(numbers['failed']) == 1 and 'h.1.mlp.c_fc.weight: NaN' in capsys.readouterr().out

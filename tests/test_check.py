"""Tests of check."""
import functools
import importlib.util
import math
import os
import re
import shutil
import sys

import pytest
import torch
from common import ROOT, bench, run, train

import bench as flat_bench
import check as flat_check
import compare as flat_compare
import configurator
import train as flat_train
from configurator import configure
from model import GPT, GPTConfig
from test_model import MLA, YARN

transformers = pytest.importorskip('transformers', reason='the oracle of the parity tests')


# checking ---------------------------------------------------------------------------------------------------
SMALL = dict(n_layer=2, n_head=4, n_kv_head=2, head_dim=8, n_embd=32, block_size=24, vocab_size=61, d_ff=40)


HYBRID = dict(n_kv_head=None, head_dim=None, mixer_pattern='DA', linear_n_key_head=2)


BIASED = dict(n_expert=4, router='sigmoid', balance_bias=True, d_expert=24)


NO_Q_NORM = {'if w.requires_grad:\n                groups': "if w.requires_grad and 'q_norm' not in name:\n"
                                                         "                groups"}


SAME_LABELS = {'prepare.py: inputs, targets = windows[:, :-1], windows[:, 1:]':
               'inputs, targets = windows[:, :-1], windows[:, :-1]'}


PLANTED = {
    # the mistake: ({text, in model.py unless a file is named: what then stands there}, options of the model,
    #               the check that catches it, what it says)
    'a mask off by one': (
        {'(k_pos[:, None] <= q_pos[:, :, None])': '(k_pos[:, None] <= q_pos[:, :, None] + 1)'}, {},
        'causal at every position', 'in training, changing token 1 changes the logits at position 0'),
    'a mask that hides the token itself': (
        {'(k_pos[:, None] <= q_pos[:, :, None])': '(k_pos[:, None] < q_pos[:, :, None].clamp(min=1))'}, {},
        'layers see their window, all of it', 'position 1 does not see position 1'),
    'is_causal with a cache': (
        {'is_causal = longest == 0 ': 'is_causal = True '}, {},
        'cache equals no cache', 'in odd chunks, 6 after 1 tokens: first differs at row 0, position'),
    'rotary off by one in decoding': (
        {'tuple(table[context.position_ids]':
         'tuple(table[context.position_ids - int(T == 1 and bool(cache and cache.longest))]'}, {},
        'cache equals no cache', 'in odd chunks, 1 after 7 tokens: first differs at row 0, position 0'),
    'rotary off by one for keys': (
        {'rotate(k, rope)\n': 'rotate(k, rope and [part.roll(1, 2) for part in rope])\n'},
        dict(qk_norm=False), 'queries and keys turn with their positions',
        'layer 0: keys are not turned by their positions'),
    'rotary off by one pair': (
        {'torch.arange(0, width, 2, device=device': 'torch.arange(2, width + 2, 2, device=device'}, {},
        'queries and keys turn with their positions', r'turns pairs by \[0.1, .*not by'),
    'a rotary base that is not the one asked for': (
        {'1.0 / base ** (': '1.0 / 500.0 ** ('}, dict(rope_scaling=YARN),
        'queries and keys turn with their positions', r'not by 10000.0\^\(-2i/8\) scaled = \[1.0, '),
    'a state that goes on into the next document': (
        {'state, context.document_starts,': 'state, None,'}, HYBRID,
        'packed documents equal the same alone', r'documents that start at .*: first differs at row 0, pos'),
    'a cache written with the wrong heads': (
        {'= add[:, :, T - kept:]\n': '= add[:, :, T - kept:].flip(1)\n'}, {},
        'cache equals no cache', 'in odd chunks, 1 after 0 tokens: first differs at row 0, position 0'),
    'a parameter no optimizer has': (
        NO_Q_NORM, {}, 'parameters have an initial value and one optimizer',
        'must take each parameter once.*q_norm'),
    'a parameter no optimizer has, unnoticed by train.py': (
        {**NO_Q_NORM, 'train.py: if wrong:\n        raise ValueError(f"optimizer=':
         'if []:\n        raise ValueError(f"optimizer='}, {},
        'parameters have an initial value and one optimizer', 'q_norm.weight stands in 0 groups of --optimi'),
    'a projection that does not learn': (
        {'self.q_norm(q.unflatten': 'self.q_norm(q.detach().unflatten'}, dict(norm='layernorm'),
        'every parameter is trained', 'h.0.attn.c_attn.weight, projection 1 of 3 is where it was'),
    'a large initial value': (
        {'std = min(0.02, 4 / config.n_embd)': 'std = min(2.0, 4 / config.n_embd) * 10'}, {},
        'loss at the start near', 'instead of about 4.111'),
    'a backward function without one of its terms': (
        {'torch.addcmul(direct, normed, inner, value=-1).mul_(scale)': 'direct.mul_(scale)'}, {},
        'gradients equal float64 differences', 'along a random direction, .* by differences'),
    'a norm that is no part of the gradient': (
        {'F.layer_norm(x.float(), weight': 'F.layer_norm(x.detach().float(), weight'}, dict(norm='layernorm'),
        'gradients equal float64 differences', 'along a random direction, .* by differences'),
    'a norm that kills gradients': (
        {'RMSNorm.apply(x, weight, self.eps)': 'RMSNorm.apply(x, weight, 1e6)'}, {},
        'activations and gradients of healthy size', 'effects on the loss go from'),
    'dropout in evaluation': (
        {'self.p if self.training else 0.0\n        return attend(': 'self.p\n        return attend('}, {},
        'dropout in training only', 'two evaluations of the same tokens: first differs at row 0'),
    'evaluation in training mode': (
        {'train.py: \n    model.eval()\n    totals': '\n    totals'}, {},
        'dropout in training only', 'train.evaluate gives'),
    'labels not shifted': (
        SAME_LABELS, {}, 'targets are the next tokens', 'row 0 of a batch has targets that do not follow'),
    'labels not shifted, by what is learnt': (
        SAME_LABELS, {}, 'one batch is learnt by heart', 'something else was learnt'),
    'labels shifted twice': (
        {'F.cross_entropy(logits.flatten(0, 1), targets.flatten(),':
         'F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(),'}, {},
        'targets are the next tokens', r'the mean -log p\(targets\[t\]\)'),
    'an expert bias that is not saved': (
        {'torch.zeros(config.n_expert))': 'torch.zeros(config.n_expert), persistent=False)'}, BIASED,
        'saved and loaded it is the same', 'after GPT.from_checkpoint: first differs|h.0.mlp.expert_bias'),
    'a head tied by copy': (
        {'None if tied else Linear(config.n_embd, rows, config.head_bias, nn.init.zeros_,':
         'Linear(config.n_embd, rows, config.head_bias, lambda w: w.copy_(self.wte.weight),'}, {},
        'head and embedding tied as said', 'do not move with its embedding'),
    'an in-place change that breaks compiling': (
        {'        norms = [getattr(self, name)':
         "        self.n = getattr(self, 'n', 0)\n        self.n += 1\n        norms = [getattr(self, name)"},
        {}, 'compiles without a break', r'RecompileError: .*\.n == 1'),
    'an in-place change that breaks the backward pass': (
        {'"""GPT-2, Llama."""\n    x = x + attn(ln_1(x))': '"""GPT-2, Llama."""\n    x += attn(ln_1(x))'},
        dict(norm='layernorm'),
        'gradients equal float64 differences', 'modified by an inplace operation'),
    'a window off by one': (
        {'positions - (window - 1)': 'positions - window'}, dict(window=5, window_pattern='SL'),
        'layers see their window, all of it', 'Attention with window 5: position 5 sees position 0'),
    'a state not reset between prompts': (
        {'state.masked_fill_(rows.view': 'state.masked_fill(rows.view'}, HYBRID,
        'nothing is left of the prompt before', 'in a cache that was reset, after another prompt: first'),
    'a state that a module keeps': (
        {'config, x = self.config, self.wte(idx)\n': "config, x = self.config, self.wte(idx) + getattr(self, "
                                                     "'kept', 0.0)\n        self.kept = x[:1, -1:]\n"},
        {}, 'nothing is left of the prompt before', 'without a cache, after another prompt: first differs'),
    "ALiBi's slopes with the other sign": (
        {'(-slopes[:, None, None] * distance)': '(slopes[:, None, None] * distance)'}, dict(pos='alibi'),
        'attention equals float64', 'layer 0 in training: first differs'),
    'moments that are not restored': (
        {"train.py: opt.load_state_dict({**state,": "opt.load_state_dict({**state, 'state': {},"}, {},
        'resumed equals unbroken', '2 more are not 4 steps of --optimizer=adamw: wte.weight'),
}


@functools.lru_cache
def settings_of(name, model_config):
    return REAL_SETTINGS(ROOT / name, model_config)


REAL_SETTINGS = configurator.Settings


@pytest.fixture
def changed_bench(tmp_path, monkeypatch):
    """A function: {text: what then stands there}, as in PLANTED -> bench.py of a copy that is so changed."""
    replaced = ['bench', 'train', 'sample', 'model', 'prepare']  # and what imports it
    modules = {name: sys.modules.get(name) for name in replaced}
    # reading the settings of a script is most of what importing it takes, and they stay
    monkeypatch.setattr(configurator, 'Settings', lambda path, fields=None: settings_of(path.name, fields))

    def change(changes):
        for name in replaced:
            shutil.copy2(ROOT / f'{name}.py', tmp_path)
        for old, new in changes.items():
            name, colon, text = old.partition('.py: ')
            path, text = (tmp_path / f'{name}.py', text) if colon else (tmp_path / 'model.py', old)
            source = path.read_text(encoding='utf-8')
            assert source.count(text) == 1, f"{path.name} has {source.count(text)} times {text!r}"
            path.write_text(source.replace(text, new), encoding='utf-8')
        if not any(old.startswith('prepare.py: ') for old in changes):
            replaced.remove('prepare')
        for name in replaced:
            sys.modules.pop(name, None)
        if (ROOT / '__pycache__').is_dir():  # what has not changed need not be compiled
            shutil.copytree(ROOT / '__pycache__', tmp_path / '__pycache__')
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module('bench')
    yield change
    for name, module in modules.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def check_one(bench, name, options):
    name, = (known for known in bench.CHECKS if known.startswith(name))
    torch.set_num_threads(1)
    return bench.run_check(*bench.CHECKS[name], bench.GPTConfig(**{**SMALL, **options}))


@pytest.mark.parametrize('changes, options, name, message', PLANTED.values(), ids=PLANTED)
def test_check_catches_a_planted_mistake(changes, options, name, message, changed_bench):
    bench = changed_bench(changes)
    assert bench.GPT is not GPT
    holds, remark = check_one(bench, name, options)
    assert not holds and re.search(message, remark) and '; look at ' in remark and '\n' not in remark, remark


@pytest.mark.parametrize('options', [
    dict(n_kv_head=None, head_dim=None, rope_scaling=YARN, n_dense_layer=1, **MLA, **BIASED),
    dict(HYBRID, attn_gate=True, document_token=3, window=5, window_pattern='LS')], ids=str)
def test_check_passes_what_is_sound(options):
    for name in flat_check.CHECKS:
        if not name.startswith('compiles'):  # takes seconds; see test_bench_check
            holds, remark = check_one(flat_bench, name, options)
            assert holds, f"{name}: {remark}"


@pytest.mark.parametrize('name, expected', [
    ('deepseek_v3', dict(n_layer=2, n_dense_layer=1, n_expert=8, n_group=4, topk_group=2, n_expert_active=4,
                         q_lora_rank=20, kv_lora_rank=16, balance_bias=True)),
    ('mixtral_8x7b', dict(n_layer=2, n_head=8, n_kv_head=2, n_expert=8, n_expert_active=2)),
    ('falcon_7b', dict(n_layer=2, n_head=4, n_kv_head=1, norm_placement='parallel')),
    ('qwen3_30b_a3b', dict(n_head=8, n_kv_head=2, n_expert=8, n_expert_active=4)),
    ('mistral_7b', dict(window=3, window_pattern='S', block_size=24, vocab_size=61)),
    ('hybrid_small', dict(n_layer=3, mixer_pattern='DDA', linear_n_key_head=2, linear_n_value_head=4,
                          partial_rotary_factor=0.25, head_dim=8))])
def test_a_small_model_of_the_same_kind(name, expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, args, *_ = configure({**vars(flat_train), '__name__': 'x'}, 'GPTConfig', argv=[f'config/{name}.py'])
    small = flat_check.tiny_config(GPTConfig(**args))
    assert {key: getattr(small, key) for key in expected} == expected
    assert GPT(small).num_params() < 100_000


def test_bench_check(folder, capsys, monkeypatch):
    out, numbers = bench(capsys, 'check', str(ROOT / 'config' / 'qwen3_8b.py'))
    found = [line for line in out.splitlines() if line.startswith(('ok ', 'FAIL'))]
    assert all(line.startswith('ok   ') for line in found)
    assert len(found) == numbers['passed'] == len(flat_check.CHECKS)
    assert numbers['failed'] == [] and numbers['family'] == 'qwen3'
    for args, message in ((['nowhere.pt'], 'no checkpoint at nowhere.pt'),
                          (['--device=cuda'], 'leave it out'), (['out', '--init_from=out'], 'give one')):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            run('check.py', *args)
    family = flat_check.check_family(GPTConfig(**SMALL, residual_lambdas=True))
    assert family.startswith('no published family')

    train('--out_dir=out', '--max_iters=1')
    some = ['causal at every position', 'targets are the next tokens']
    monkeypatch.setattr(flat_check, 'CHECKS', {name: flat_check.CHECKS[name] for name in some})
    flat_check.check(flat_compare.config, {}, ['out'])
    name = f"weights of {os.path.join('out', 'ckpt.pt')}"
    assert f"ok   {name}: finite, and its cache equals no cache in 16 tokens" in capsys.readouterr().out
    saved = torch.load('out/ckpt.pt', weights_only=True)
    saved['model']['h.1.mlp.c_fc.weight'][0, 0] = math.nan
    torch.save(saved, 'out/ckpt.pt')
    numbers = flat_check.check(flat_compare.config, {}, ['out'])
    *_, line, _ = capsys.readouterr().out.splitlines()
    assert numbers['failed'] == [name] and numbers['passed'] == 2
    assert line.startswith(f"FAIL {name}: h.1.mlp.c_fc.weight is not finite; look at ")

"""Tests of bench.py: its numbers against naive loops and published counts."""
import dataclasses
import itertools
import os
import re

import pytest
import torch
from common import EVAL, ROOT, bench, run

import bench as flat_bench
import model as flat
import train as flat_train
from model import GPT, flops_per_token, num_params
from test_model import MLA, tiny
from tokenizer import ByteTokenizer


# how large --------------------------------------------------------------------------------------------------
def test_params_of_published_shapes(capsys):
    """Qwen3-8B by layer, from its config."""
    out, numbers = bench(capsys, 'params', str(ROOT / 'config' / 'qwen3_8b.py'))
    assert numbers['params'] == 8_190_735_360 == 36 * 192_946_432 + 2 * 151936 * 4096 + 4096
    mixing = 12 * 32 * 128 * 40960
    flops = 6 * (192_946_432 - 2 * 4096 - 2 * 128) + mixing  # without norms
    for line in (r'layer 0, one of 36 equal layers .*', rf'sum +192,946,432 +100.0% .* +{flops:,} .*',
                 r'attn.c_attn.weight k +1024 x 4096 +hidden_init +matrix +4,194,304 +2.2% +8,388,608 +0.8% '
                 r'+25,165,824 +0.8%', rf'attn weighted sum +0 +0.0% +{mixing // 6:,} .* +{mixing // 2:,} .*',
                 rf'attn softmax +0 +0.0% +{5 * 32 * 40960:,} .*',
                 rf'all MLP +{3 * 4096 * 12288:,} .* +{18 * 4096 * 12288:,} .*'):
        assert re.search(f'^{line}$', out, re.M)


def test_params_counts_a_real_model(capsys):
    size = dict(n_layer=4, n_head=4, n_embd=32, block_size=24, vocab_size=61, mixer_pattern='DDA', n_expert=4,
                d_expert=8, n_dense_layer=1, mlp='gelu', window=8, window_pattern='SL')
    model = GPT(flat.GPTConfig(**size))
    out, numbers = bench(capsys, 'params', '--dtype=float32', *(f'--{k}={v}' for k, v in size.items()))
    assert re.search(r'^attn.c_proj.weight +32 x 32 +zeros_ +matrix +1,024 ', out, re.M)
    assert re.search(r'^wte.weight +61 x 32 +normal_ std=0.02 +embedding +1,952 ', out, re.M)
    assert numbers['params'] == sum(w.numel() for w in model.state_dict().values())
    assert numbers['active_params'] == num_params(model, active=True)
    assert numbers['flops_per_token'] == flops_per_token(model)
    counts = [int(n) for n in re.findall(r'one of (\d+) equal', out)] + [1]  # outside the layers
    # without the sum of all modules
    _, *sums = re.findall(r'^sum +(\S+) +\S+ +\S+ +\S+ +(\S+)', out.replace(',', ''), re.M)
    params, flops = (sum(n * int(value) for n, value in zip(counts, column)) for column in zip(*sums))
    assert numbers['params'] == params
    assert numbers['flops_per_token'] == flops
    assert re.search('^head .is wte.weight. .* 3,904 .* 11,712 ', out, re.M)
    # by hand: keys and values of 4 heads and 8 tokens; in 3 layers, 3 inputs of a convolution and a state
    assert flat_bench.cache_bytes(model, [24, 5], torch.bfloat16) == {
        n: 2 * 4 * 8 * min(n, 8) * 2 + 3 * (3 * 3 * 32 * 2 + 4 * 8 * 8 * 4) for n in (24, 5)}


@pytest.mark.parametrize('config, per_token', [  # in bfloat16
    ('deepseek_v3', 70_272),  # arXiv:2505.09343, table 1
    ('mistral_7b', 0),  # its window is shorter than block_size
    ('qwen3_8b', 36 * 2 * 8 * 128 * 2)])  # keys and values of 8 heads
def test_cache_of_published_shapes(capsys, config, per_token):
    out, numbers = bench(capsys, 'params', str(ROOT / f'config/{config}.py'), '--contexts=[200000]')
    assert numbers['cache_bytes_per_token'] == per_token
    n_bytes = per_token * 200_000 or 32 * 2 * 8 * 128 * 2 * 4096
    assert float(out.split('200,000')[1].split()[2]) == pytest.approx(n_bytes / 1e9, rel=1e-3)


@pytest.mark.parametrize('options, width, cached', [
    ({}, 16, 64), (MLA, 24, 20), (dict(mixer_pattern='D'), 0, 0)])
def test_params_of_a_loaded_model_at_other_lengths(folder, capsys, options, width, cached):
    """Counted by hand: 2 FLOPs per weight and token, and 2 per score and per product with a value."""
    model = save_model('out', ByteTokenizer(), **options)
    config = model.config
    out, _ = bench(capsys, 'params', '--init_from=out', '--contexts=[4,30]', '--dtype=float32')
    weights = sum(w.numel() for w in model.parameters() if w.ndim > 1)  # the embedding's as head
    for n in 4, 30:
        found = re.search(rf'^{n}  +(\S+)  +(\S+)  +(\S+)$', out, re.M).groups()
        if width:
            scores, cache = 2 * config.n_head * width * n**2, 4e3 * cached * n  # TFLOP and GB
            expected = 2 * weights * n, config.n_layer * scores, config.n_layer * cache
            assert [float(x) * 1e12 for x in found] == pytest.approx(expected, rel=1e-3)


# how fast ---------------------------------------------------------------------------------------------------
SMALL = ['--n_layer=1', '--n_head=2', '--n_embd=32', '--vocab_size=50', '--rounds=2', *EVAL]


def test_speeds_of_a_table_agree(capsys):
    pytest.importorskip('transformers')
    out, numbers = bench(capsys, 'decode', '--vs=transformers', '--batch_size=2', '--quantize=int8',
                         '--max_new_tokens=8', '--prompt_len=5', *SMALL)
    assert [*numbers['times_faster']] == ['flatgpt', 'transformers', 'one sequence']
    assert numbers['peak_mb'] > 0
    for name in numbers['times_faster']:
        ms, speed = re.search(rf'^{name} +(\S+) .* to \S+ +(\S+)', out.replace(',', ''), re.M).groups()
        tokens = 1 if name == 'one sequence' else 2
        assert float(speed) == pytest.approx(tokens * 1e3 / float(ms), rel=0.02)


def test_a_step_has_all_its_micro_batches_and_one_update(capsys, monkeypatch):
    """The clock counts 2 seconds per micro-batch, 5 per update, and 1 per reading. The config file has no
    batch_size: the default is 12."""
    clock, seconds = itertools.count(), {'gradients': 2, 'update': 5}
    for name, f in [(name, getattr(flat_train, name)) for name in seconds]:
        monkeypatch.setattr(flat_train, name, lambda *args, f=f, name=name: (
            [next(clock) for _ in range(seconds[name])], f(*args))[1])
    monkeypatch.setattr('time.perf_counter', lambda: next(clock))
    _, numbers = bench(capsys, 'train', 'config/gpt2.py', '--steps=2', '--compile=False',
                       '--gradient_accumulation_steps=4', '--block_size=16', *SMALL)
    assert numbers['ms'] == 1e3 * (4 * 3 + 6)
    assert numbers['tok_per_s'] == pytest.approx(4 * 12 * 16 / (4 * 3 + 6))


@pytest.mark.parametrize('args, message', [
    (['params', '--steps=3'], "--steps has no effect: it needs command == 'train'"),
    (['train', '--steps=0'], 'steps=0 is not'), (['decode', 'out'], "cannot use 'out'"),
    ([], 'is not a command'), (['decode', '--max_new_tokens=1'], 'must be >= 2'),
    (['params', '--json=no/x'], 'no/x'), (['params', '--dtype=half'], 'dtype=half'),
    (['decode', '--prompt_len=50', '--max_new_tokens=50', '--block_size=99'], 'exceed block_size=99'),
    (['train', '--dataset=typo'], 'data/typo is not prepared')])
def test_wrong_settings_are_refused(args, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run('bench.py', *args)


def save_model(path, tokenizer, **options):
    """Writes a checkpoint of a model of random weights; returns the model."""
    model = tiny(**{**dict(block_size=16, vocab_size=tokenizer.n_vocab), **options})
    os.makedirs(path)
    torch.save({'model': model.state_dict(), 'model_args': dataclasses.asdict(model.config),
                'tokenizer': tokenizer.state()}, os.path.join(path, 'ckpt.pt'))
    return model

"""Tests of bench.py: its numbers against naive loops, published counts and what train.py logs."""
import dataclasses
import itertools
import json
import math
import os
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from common import EVAL, ROOT, bench, log_rows, run, tok_oracles, train, write_packed

import bench as flat_bench
import model as flat
import train as flat_train
from model import GPT, flops_per_token, num_params
from prepare import read_meta
from sample import load
from test_model import MLA, tiny
from tokenizer import ByteTokenizer, CharTokenizer, make_tokenizer
from zoo.tokenizer_json import JsonTokenizer


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
    cache = model.bfloat16().make_cache(1, 24)
    n_bytes = sum(x.nbytes for x in itertools.chain(*cache.states))  # the last slot is for padding
    n_bytes += sum(x[:, :, 1:].nbytes for x in itertools.chain(*cache.slots))
    assert flat_bench.cache_bytes(model, 24, torch.bfloat16) == n_bytes


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
    (['eval', '--init_from=out', '--lengths=[0]'], 'must be >= 1'), (['params', '--json=no/x'], 'no/x'),
    (['params', '--dtype=half'], 'dtype=half'),
    (['train', '--dataset=typo'], 'data/typo is not prepared')])
def test_wrong_settings_are_refused(args, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run('bench.py', *args)


# how good ---------------------------------------------------------------------------------------------------
def save_model(path, tokenizer, **options):
    """Writes a checkpoint of a model of random weights; returns the model."""
    model = tiny(**{**dict(block_size=16, vocab_size=tokenizer.n_vocab), **options})
    os.makedirs(path)
    torch.save({'model': model.state_dict(), 'model_args': dataclasses.asdict(model.config),
                'tokenizer': tokenizer.state()}, os.path.join(path, 'ckpt.pt'))
    return model


def naive_losses(model, ids, end):
    """The losses of the last `end` tokens of ids, in float64."""
    torch.set_num_threads(1)
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0].double()
    chosen = logits.exp().sum(-1).log() - logits[torch.arange(len(ids) - 1), ids[1:]]
    return chosen[-end:].tolist()


def by_rows(model, ids):
    """The losses of ids in rows of 16; the last row is shorter."""
    return [loss for i in range(0, len(ids) - 1, 16) for loss in naive_losses(model, ids[i:i + 17], 16)]


def close(value):
    return pytest.approx(value, rel=1e-5)


def test_eval_counts_each_target_once(folder, capsys):
    """Some tokens are masked. The batch size changes nothing."""
    tok, rng = CharTokenizer([*'abcdefgh', 'é', 'ß', '中']), np.random.default_rng(0)
    model = save_model('out', tok)
    data, ids, mask = Path('data/odd'), rng.integers(11, size=16 * 6 + 6), rng.integers(2, size=16 * 6 + 6)
    data.mkdir()
    ids.astype('<u2').tofile(data / 'val.bin')
    mask.astype(np.uint8).tofile(data / 'val.mask.bin')
    meta = {'vocab_size': 11, 'dtype': 'uint16', 'bytes_per_token': 9.0, 'tokenizer': tok.state()}
    (data / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')
    is_target = mask[1:].astype(bool)
    losses = np.array(by_rows(model, ids.tolist()))[is_target]
    position = np.arange(len(is_target))[is_target] % 16
    n_bytes = sum(len(tok.chars[i].encode()) for i in ids[1:][is_target])
    for size in (1, 3, 8):
        _, numbers = bench(capsys, 'eval', '--init_from=out', '--dataset=odd', f'--batch_size={size}', *EVAL)
        assert numbers['targets'] == len(losses) and numbers['bytes'] == n_bytes
        assert numbers['loss'] == close(losses.mean())
        assert numbers['perplexity'] == close(math.exp(losses.mean()))
        assert numbers['bits_per_byte'] == close(losses.sum() / math.log(2) / n_bytes)
    for first, last in (1, 1), (3, 4), (9, 16):
        among = (position >= first - 1) & (position < last)
        assert numbers[f'loss at positions {first}-{last}'] == close(losses[among].mean())


def test_eval_of_texts_counts_their_bytes(folder, capsys):
    """End of text precedes a document, so that its first token is a target. Without it the first token is not
    predicted. The documents of a text follow each other; JSON lines are separate."""
    text = 'Größe: 中文 and more of it'
    model, tokens, n_bytes = save_model('out', ByteTokenizer()), [256, *text.encode()], len(text.encode())
    Path('two.txt').write_text(f'{text}<|endoftext|>{text}', encoding='utf-8')
    Path('lines.jsonl').write_text('\n'.join([json.dumps({'text': text})] * 3), encoding='utf-8')
    for name, streams in {'two.txt': [tokens * 2], 'lines.jsonl': [tokens] * 3}.items():
        _, numbers = bench(capsys, 'eval', name, '--init_from=out', *EVAL)
        losses = [by_rows(model, ids) for ids in streams]
        assert numbers['targets'] == sum(map(len, losses))
        assert numbers['bytes'] == n_bytes * sum(map(len, streams)) // len(tokens)
        assert numbers['bits_per_byte'] == close(sum(map(sum, losses)) / math.log(2) / numbers['bytes'])
    Path('empty.txt').touch()
    Path('chats.jsonl').write_text('{"messages": [{"role": "assistant", "content": "Hi"}]}', encoding='utf-8')
    for name, message in ('empty.txt', 'no text of 16'), ('chats.jsonl', 'has conversations'):
        with pytest.raises(ValueError, match=message):
            run('bench.py', 'eval', name, '--init_from=out', *EVAL)
    save_model('out-char', CharTokenizer(sorted(set(text))))
    Path('one.txt').write_text(text, encoding='utf-8')
    _, numbers = bench(capsys, 'eval', 'one.txt', '--init_from=out-char', *EVAL)
    assert (numbers['bytes'], numbers['targets']) == (n_bytes - 1, len(text) - 1)


def test_bits_per_byte_count_the_text_after_normalization(folder, capsys):
    """In a prepared folder and in a text, with a tokenizer that composes accents."""
    tok, text = JsonTokenizer(tok_oracles()['qwen'].to_str()), 'cafe\u0301 no\u0308, ' * 99
    save_model('out', tok)
    Path('text.txt').write_text(text, encoding='utf-8')
    run('prepare.py', 'text.txt', '--tokenizer=out', '--out=d')
    n_bytes, meta = len(unicodedata.normalize('NFC', text).encode()), read_meta('data/d')
    assert meta['train_bytes'] + meta['val_bytes'] == n_bytes < len(text.encode())
    _, numbers = bench(capsys, 'eval', '--init_from=out', '--dataset=d', *EVAL)
    first = len(tok.decode_bytes(np.fromfile('data/d/val.bin', '<u2')[:1]))
    assert numbers['bytes'] == meta['val_bytes'] - first
    _, numbers = bench(capsys, 'eval', 'text.txt', '--init_from=out', *EVAL)
    assert numbers['bytes'] == n_bytes


def test_eval_is_what_training_has_logged(folder, capsys):
    """The rows of the toy divide its text. The loss of int8 weights differs."""
    torch.set_num_threads(1)
    train('--out_dir=out', '--max_iters=10', '--eval_iters=99')
    exact, int8 = (bench(capsys, 'eval', '--init_from=out', *flags, *EVAL)[1] for flags in (
        [], ['--quantize=int8']))
    assert exact['loss'] == pytest.approx(float(log_rows('out')[-1]['val_loss']), abs=2e-6)
    assert exact['targets'] == exact['bytes'] == 800
    assert 0 < abs(int8['loss'] - exact['loss']) < 1e-2


def test_eval_keeps_conversations_apart(folder, capsys):
    """As in train.py, also for a model that was trained on text."""
    torch.set_num_threads(1)
    train('--out_dir=base', '--max_iters=1')
    saved = torch.load('base/ckpt.pt', weights_only=True)
    for w in saved['model'].values():
        w += 0.1 * torch.randn_like(w)  # so that it attends to something
    torch.save(saved, 'base/ckpt.pt')
    write_packed()
    capsys.readouterr()
    train('--out_dir=out', '--init_from=base', '--eval_only=True', '--eval_iters=99')
    expected = float(re.search(r'val loss ([\d.]+)', capsys.readouterr().out)[1])
    _, numbers = bench(capsys, 'eval', '--init_from=base', '--dataset=toy', *EVAL)
    assert numbers['loss'] == pytest.approx(expected, abs=1e-4)
    _, together = bench(capsys, 'eval', '--init_from=base', '--dataset=toy', '--document_token=None', *EVAL)
    assert abs(together['loss'] - expected) > 1e-3


def test_eval_at_times_the_length(folder, capsys):
    """The targets are the same at every length: they end a row of the longest."""
    save_model('out', make_tokenizer('byte'), block_size=8)
    text = ''.join(map(chr, np.random.default_rng(0).integers(32, 127, size=61)))
    Path('text.txt').write_text(text, encoding='utf-8')
    scaling = {'rope_type': 'yarn', 'factor': 4.0}
    _, numbers = bench(capsys, 'eval', 'text.txt', '--init_from=out', '--lengths=[1,2,4]',
                       f'--rope_scaling={scaling}', *EVAL)
    model, *_ = load('out/ckpt.pt', block_size=32,
                         rope_scaling={**scaling, 'original_max_position_embeddings': 8})
    ids, found = [256, *text.encode()], numbers['lengths']
    assert [*found] == ['8', '16', '32'] and numbers['targets'] == numbers['bytes'] == 32
    for length in (8, 16, 32):
        losses = [naive_losses(model, ids[end - length:end + 1], 8) for end in (32, 40, 48, 56)]
        assert found[str(length)]['loss'] == close(np.mean(losses))


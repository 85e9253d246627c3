"""Tests of bench.py: its numbers against naive loops, published counts and what train.py logs."""
import dataclasses
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from common import EVAL, ROOT, bench, log_rows, run, train, write_packed

import model as flat
import train as flat_train
from configurator import runtime
from model import GPT
from test_model import tiny
from tokenizer import CharTokenizer, make_tokenizer


# how big ----------------------------------------------------------------------------------------------------
def test_params_of_published_shapes(capsys):
    """Qwen3-8B by layer, from its config; a 463M model with latent attention, whose cache is a ninth of that
    of its expanded heads: the numbers that guides print."""
    out, numbers = bench(capsys, 'params', str(ROOT / 'config' / 'qwen3_8b.py'))
    layer, = numbers['layers']
    assert len(layer['numbers']) == 36 and layer['params'] == 192_946_432 == sum(layer['parts'].values())
    assert numbers['params'] == 8_190_735_360 == 36 * layer['params'] + 2 * 151936 * 4096 + 4096
    assert re.search(r'^attn.c_attn.weight +\(4096 \+ 1024 \+ 1024\) x 4096 +25,165,824 +13.0%  +150,994,944 '
                     r'+4.8%$', out, re.M)
    assert layer['flops']['mixing'] == 12 * 32 * 128 * 40960 and sum(layer['flops'].values()) == (
        6 * (192_946_432 - 2 * 4096 - 2 * 128) + layer['flops']['mixing'])  # but norms
    assert re.search(r'^mixing +0 +0.0%  +2,013,265,920 +63.5%$', out, re.M)
    shape = dict(n_embd=1024, n_layer=24, n_head=16, kv_lora_rank=512, qk_rope_head_dim=64, block_size=64,
                 qk_nope_head_dim=128, v_head_dim=128, d_ff=2816, vocab_size=32000, tie_word_embeddings=False)
    _, numbers = bench(capsys, 'params', *(f'--{name}={value}' for name, value in shape.items()))
    assert numbers['params'] == 463_533_056 and numbers['cache_bytes_per_token'] == 2 * 24 * (512 + 64)


def test_params_counts_a_real_model(capsys):
    size = dict(n_layer=4, n_head=4, n_embd=32, block_size=24, vocab_size=61, mixer_pattern='DDA', n_expert=4,
                d_expert=8, n_dense_layer=1, mlp='gelu', window=8, window_pattern='SL')
    model = GPT(flat.GPTConfig(**size))
    _, numbers = bench(capsys, 'params', '--dtype=float32', *(f'--{k}={v}' for k, v in size.items()))
    assert numbers['params'] == sum(w.numel() for w in model.state_dict().values())
    assert numbers['active_params'] == model.num_params(active=True)
    assert numbers['flops_per_token'] == model.flops_per_token()
    layers = sum(len(kind['numbers']) * kind['params'] for kind in numbers['layers'])
    assert numbers['params'] - layers == 61 * 32 + 32  # embedding, last norm
    flops = sum(len(kind['numbers']) * sum(kind['flops'].values()) for kind in numbers['layers'])
    assert numbers['flops_per_token'] - flops == 6 * 61 * 32  # the head
    # of three layers the convolution's inputs and the state, of one the window's keys and values
    assert numbers['cache_bytes'] == 4 * (3 * (3 * 96 + 4 * 8 * 8) + 8 * 2 * 32)


def test_params_forecasts_what_training_takes(capsys):
    args = ['params', '--n_layer=1', '--n_head=4', '--n_embd=64', '--block_size=128', '--vocab_size=9999',
            '--memory=4', '--optimizer=muon', *EVAL]
    out, numbers = bench(capsys, *args)
    largest = numbers['largest_batch_size']
    assert f'largest batch_size in 4.00 GB: {largest}' in out and sum(numbers['memory'].values()) < 4e9
    for n, fits in ((largest - 3, True), (largest + 3, False)):  # a sequence takes 15 MB, the process varies
        _, numbers = bench(capsys, *args, f'--batch_size={n}')
        assert (sum(numbers['memory'].values()) <= 4e9) == fits


# how fast ---------------------------------------------------------------------------------------------------
SMALL = ['--n_layer=1', '--n_head=2', '--n_embd=32', '--vocab_size=50', '--rounds=2', *EVAL]


@pytest.mark.parametrize('args, others', [
    (['train', '--steps=2', '--block_size=16', '--compile=False'], []),
    (['decode', '--vs=transformers', '--batch_size=2', '--quantize=int8'], ['transformers', 'one row']),
    (['decode', '--speculate=3', '--operators=True'], ['no drafts'])])
def test_speeds_of_a_table_agree(capsys, args, others):
    if 'transformers' in others:
        pytest.importorskip('transformers')
    if args[0] == 'decode':
        args = [*args, '--max_new_tokens=8', '--prompt_len=5']
    out, numbers = bench(capsys, *args, *SMALL)
    assert [*numbers['times_faster']] == ['flatgpt', *others] and numbers['peak_mb'] > 0
    for name in numbers['times_faster']:
        ms, speed = re.search(rf'^{name} +(\S+) .* to \S+ +(\S+)', out.replace(',', ''), re.M).groups()
        tokens = 12 * 16 if args[0] == 'train' else 2 if '--batch_size=2' in args and name != 'one row' else 1
        assert float(speed) == pytest.approx(tokens * 1e3 / float(ms), rel=0.02)
    if '--operators=True' in args:
        assert 0 <= numbers['accepted_share'] <= 1 and 'aten::' in out


def test_speeds_by_context(capsys):
    out, numbers = bench(capsys, 'train', '--lengths=[32,128]', '--batch_size=3', '--memory=0.02',
                         '--compile=False', *SMALL)
    assert [*numbers['lengths']] == ['32', '128']
    for length, (forward, backward, speed, peak) in numbers['lengths'].items():
        assert forward > 0 and speed == pytest.approx(3e3 * int(length) / (forward + backward))
        assert re.search(rf'^{length} +{forward:.1f} +{backward:.1f} +{speed:,.1f} +{peak:.1f}$', out, re.M)
    model, machine = tiny(n_layer=1, n_head=2, n_embd=32, vocab_size=50), runtime('cpu', 'float32')
    for times, fits in ((1, True), (2, False)):
        model.config.block_size = times * numbers['longest']
        parts, _ = flat_train.forecast(model, machine, flat_train.config, 3)
        assert (sum(parts.values()) - parts['process'] <= 2e7) == fits


def test_parts_at_lengths_whose_scores_do_not_fit(capsys, monkeypatch):
    """Timings aside, each length has SDPA, and the formula where there is room for its scores."""
    times = {'side': np.ones((1, 1))}
    monkeypatch.setattr('bench.take_turns', lambda sides, rounds: dict.fromkeys(sides, times['side']))
    monkeypatch.setattr(flat_train, 'memory_at_hand', lambda device: 6 * 3 * 64**2 * 4)
    run('docs/cost.py', '--lengths=[32,64]', '--n_layer=1', '--n_head=3', '--n_embd=12', *EVAL)
    out = capsys.readouterr().out
    for length, formulas in ((32, 1), (64, 0)):
        for what in ('forward', 'with backward'):
            table = out.partition(f'attention of a layer, {length} tokens, {what}')[2].partition('\n\n')[0]
            assert table.count('formula') == formulas and table.count('SDPA') == 1


@pytest.mark.parametrize('args, message', [
    (['params', '--steps=3'], 'has no use for --steps'), (['decode', 'out'], 'decode has no use for out'),
    (['train', '--optimizer=sgd'], "optimizer='sgd' is none of"), ([], 'say first what to do')])
def test_settings_without_effect_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        run('bench.py', *args)


# how good ---------------------------------------------------------------------------------------------------
def save_model(path, tokenizer, **options):
    """A checkpoint of a model of random weights with this tokenizer, in a folder; returns the model."""
    model = tiny(**{**dict(block_size=16, vocab_size=tokenizer.n_vocab), **options})
    os.makedirs(path)
    torch.save({'model': model.state_dict(), 'model_args': dataclasses.asdict(model.config),
                'tokenizer': tokenizer.state()}, os.path.join(path, 'ckpt.pt'))
    return model


def naive_losses(model, ids, end):
    """In float64: the loss of each token of ids after the first, that many of the end."""
    torch.set_num_threads(1)
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]))[0].double()
    chosen = logits.exp().sum(-1).log() - logits[torch.arange(len(ids) - 1), ids[1:]]
    return chosen[-end:].tolist()


def by_rows(model, ids):
    """The losses of ids in rows of 16 that do not overlap; the last one is shorter."""
    return [loss for i in range(0, len(ids) - 1, 16) for loss in naive_losses(model, ids[i:i + 17], 16)]


def close(value):
    return pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize('masked', [False, True])
def test_eval_counts_each_target_once(folder, capsys, masked):
    tok = CharTokenizer([*'abcdefgh', 'é', 'ß', '中'])
    model = save_model('out', tok)
    data, ids = Path('data/odd'), np.random.default_rng(0).integers(11, size=16 * 6 + 6)
    data.mkdir()
    ids.astype('<u2').tofile(data / 'val.bin')
    mask = np.random.default_rng(1).integers(not masked, 2, size=len(ids))
    if masked:
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
    for first, last in (1, 1), (2, 2), (3, 4), (9, 16):
        among = (position >= first - 1) & (position < last)
        assert numbers[f'from token {first} on'] == close(losses[among].mean())


def test_eval_of_texts_counts_their_bytes(folder, capsys):
    """End of text stands before a document, so that its first token is a target. Documents of a text follow
    each other, JSON lines stand alone; without an end of text the first token is not predicted."""
    tok, text = make_tokenizer('byte'), 'Größe: 中文 and more of it'
    model = save_model('out', tok)
    one, n_bytes = [256, *text.encode()], len(text.encode())
    Path('one.txt').write_text(text, encoding='utf-8')
    Path('two.txt').write_text(f'{text}<|endoftext|>{text}', encoding='utf-8')
    Path('lines.jsonl').write_text('\n'.join([json.dumps({'text': text})] * 3), encoding='utf-8')
    for name, streams in {'one.txt': [one], 'two.txt': [one * 2], 'lines.jsonl': [one] * 3}.items():
        _, numbers = bench(capsys, 'eval', name, '--init_from=out', *EVAL)
        each = [by_rows(model, ids) for ids in streams]
        assert numbers['targets'] == sum(map(len, each))
        assert numbers['bytes'] == n_bytes * sum(map(len, streams)) // len(one)
        assert numbers['bits_per_byte'] == close(sum(map(sum, each)) / math.log(2) / numbers['bytes'])
    for found, expected in zip(numbers['each'], each, strict=True):
        assert found == close(expected)
    save_model('out-char', CharTokenizer(sorted(set(text))))
    _, numbers = bench(capsys, 'eval', 'one.txt', '--init_from=out-char', *EVAL)
    assert (numbers['bytes'], numbers['targets']) == (n_bytes - 1, len(text) - 1)


def test_eval_is_what_training_has_logged(folder, capsys):
    """In rows that divide the text, as those of the toy do; in 8 bits it differs."""
    torch.set_num_threads(1)
    train('--out_dir=out', '--max_iters=10', '--eval_iters=99')
    exact, int8 = (bench(capsys, 'eval', '--init_from=out', *flags, *EVAL)[1] for flags in (
        [], ['--quantize=int8']))
    assert exact['loss'] == pytest.approx(float(log_rows('out')[-1]['val_loss']), abs=2e-6)
    assert exact['targets'] == exact['bytes'] == 800
    assert 0 < abs(int8['loss'] - exact['loss']) < 1e-2


def test_eval_keeps_conversations_apart(folder, capsys):
    """As train.py does, also for a model that was trained on text."""
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
    assert abs(together['loss'] - expected) > 1e-3  # or this could not fail


@pytest.mark.parametrize('scaling', [None, {'rope_type': 'yarn', 'factor': 4.0}])
def test_eval_at_times_the_length(folder, capsys, scaling):
    """The same targets at every length, those that end a row of the longest."""
    save_model('out', make_tokenizer('byte'), block_size=8)
    text = ''.join(map(chr, np.random.default_rng(0).integers(32, 127, size=61)))
    Path('text.txt').write_text(text, encoding='utf-8')
    flags = [f'--rope_scaling={scaling}'] if scaling else []
    _, numbers = bench(capsys, 'eval', 'text.txt', '--init_from=out', '--lengths=[1,2,4]', *flags, *EVAL)
    told = scaling and {**scaling, 'original_max_position_embeddings': 8}
    model, _ = GPT.from_checkpoint('out/ckpt.pt', block_size=32, rope_scaling=told)
    ids, found = [256, *text.encode()], numbers['lengths']
    assert [*found] == ['8', '16', '32'] and numbers['targets'] == 32
    for length in (8, 16, 32):
        rows = np.array([naive_losses(model, ids[end - length:end + 1], length) for end in (32, 40, 48, 56)])
        assert found[str(length)]['loss'] == close(rows[:, -8:].mean())
        assert found[str(length)]['from token 3 on'] == close(rows[:, 2:4].mean())
    assert found['32']['from token 17 on'] == close(rows[:, 16:].mean())


def test_eval_of_hellaswag(folder, capsys):
    """Against a loop over endings, of many lengths, so that the sum and the mean choose differently."""
    tok, rng = make_tokenizer('byte'), np.random.default_rng(0)
    model = save_model('out', tok, block_size=64)

    def text(n):
        return ''.join(map(chr, rng.integers(97, 123, size=n)))
    records = [{'ctx': text(80 if i == 0 else 9), 'endings': [text(n) for n in rng.integers(2, 30, size=4)],
                'label': int(rng.integers(4))} for i in range(15)]  # the first is too long: its end counts
    Path('h.jsonl').write_text('\n'.join(map(json.dumps, records)), encoding='utf-8')
    acc = acc_norm = 0
    for record in records:
        each = [naive_losses(model, [*f"{record['ctx']} {end}".encode()][-65:], len(end) + 1)
                for end in record['endings']]
        acc += np.argmin([sum(losses) for losses in each]) == record['label']
        acc_norm += np.argmin([np.mean(losses) for losses in each]) == record['label']
    assert acc != acc_norm
    for size in (1, 7):
        _, numbers = bench(capsys, 'eval', 'h.jsonl', '--init_from=out', f'--batch_size={size}', *EVAL)
        assert (numbers['questions'], numbers['acc'], numbers['acc_norm']) == (15, acc / 15, acc_norm / 15)


def test_eval_refuses_another_tokenizer(folder):
    save_model('out', make_tokenizer('byte'))
    with pytest.raises(ValueError, match='prepared with another tokenizer'):
        run('bench.py', 'eval', '--init_from=out', '--dataset=toy', *EVAL)

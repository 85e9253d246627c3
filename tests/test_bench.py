"""Tests of bench."""
import dataclasses
import functools
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from common import EVAL, ROOT, bench, dequantized, log_rows, run, train, write_packed, write_toy

import bench as flat_bench
import model as flat
import tokenizer as flat_tokenizer
from configurator import runtime
from model import GPT
from test_model import tiny
from tokenizer import make_tokenizer

transformers = pytest.importorskip('transformers', reason='the oracle of the parity tests')


# evaluating -------------------------------------------------------------------------------------------------
def test_bench_params_of_one_layer_by_projection(capsys, monkeypatch):
    """The numbers of one of Qwen3-8B's layers that guides print, from its published config."""
    monkeypatch.chdir(ROOT)
    out, numbers = bench(capsys, 'params', 'config/qwen3_8b.py')
    layer, = numbers['layers']
    assert (layer['layers'], layer['count'], layer['params']) == ('0-35', 36, 192_946_432)
    assert layer['attn'] == 2 * 16_777_216 + 2 * 4_194_304 + 2 * 128 and layer['mlp'] == 150_994_944
    counts = layer['projections']
    assert [counts[f'attn.{name}'] for name in ('c_attn q', 'c_attn k', 'c_attn v', 'c_proj')] == [
        4096 * 32 * 128, 4096 * 8 * 128, 4096 * 8 * 128, 32 * 128 * 4096]
    assert sum(counts.values()) == layer['params']
    assert numbers['params'] == 8_190_735_360 == 36 * layer['params'] + 2 * 151936 * 4096 + 4096
    assert re.search(r'^attn.c_attn k +1024 x 4096 +4,194,304$', out, re.M)


def test_bench_params_of_the_model_that_a_config_names(folder, capsys):
    train('--out_dir=base', '--max_iters=0')
    Path('chat.py').write_text("init_from = 'base'\ndataset = 'elsewhere'\nepochs = 6\n", encoding='utf-8')
    _, numbers = bench(capsys, 'params', 'chat.py')
    assert numbers['params'] == GPT.from_checkpoint('base/ckpt.pt')[0].num_params()


def test_bench_params_of_layers_that_differ(capsys):
    size = ['--n_layer=5', '--n_head=4', '--n_embd=32', '--block_size=24', '--vocab_size=61']
    out, numbers = bench(capsys, 'params', *size, '--mixer_pattern=DDA', '--n_expert=4', '--d_expert=8',
                         '--n_dense_layer=1', '--mlp=gelu', '--attn_gate=True')
    kinds = numbers['layers']
    assert [kind['layers'] for kind in kinds] == ['0', '1, 3-4', '2']
    assert sum(kind['count'] * kind['params'] for kind in kinds) + 61 * 32 + 32 == numbers['params']
    assert kinds[0]['mlp'] == 2 * 32 * 128 and kinds[0]['projections']['mlp.c_fc'] == 32 * 128
    assert kinds[2]['projections']['mlp.experts.c_fc'] == 4 * 8 * 32 and '4 x 8 x 32' in out
    assert kinds[1]['mlp'] == kinds[2]['mlp'] == 2 * 4 * 8 * 32 + 4 * 32
    assert kinds[2]['projections']['attn.c_attn gate'] == 32 * 32
    # queries, keys, values, gate, output, beta and decay, convolution, its norm, two vectors
    assert kinds[1]['attn'] == 5 * 32 * 32 + 2 * 4 * 32 + 3 * 32 * 4 + 8 + 2 * 4


def test_bench_params_of_latent_attention(capsys):
    """A 463M shape of guides: its cache is a ninth of that of its expanded heads."""
    shape = dict(n_embd=1024, n_layer=24, n_head=16, kv_lora_rank=512, qk_rope_head_dim=64,
                 qk_nope_head_dim=128, v_head_dim=128, d_ff=2816, vocab_size=32000, block_size=64,
                 tie_word_embeddings=False)
    _, numbers = bench(capsys, 'params', *(f'--{name}={value}' for name, value in shape.items()))
    assert numbers['params'] == 463_533_056
    assert numbers['cache_bytes_per_token'] == 2 * 13_824 == 2 * 24 * (512 + 64)
    heads = 2 * 24 * 16 * (128 + 64 + 128)  # bytes of their keys and values
    assert round(heads / numbers['cache_bytes_per_token'], 1) == 8.9


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


@pytest.mark.parametrize('masked', [False, True])
def test_bench_eval_scores_each_target_once(folder, capsys, masked):
    """Against a loop over windows; the last one is shorter. The tokens are of 1 to 3 bytes."""
    tok = flat_tokenizer.CharTokenizer([*'abcdefgh', 'é', 'ß', '中'])
    model = save_model('out', tok)
    data, ids = Path('data/odd'), np.random.default_rng(0).integers(11, size=16 * 6 + 6)
    data.mkdir()
    ids.astype('<u2').tofile(data / 'val.bin')
    mask = np.random.default_rng(1).integers(2, size=len(ids)) if masked else np.ones(len(ids), int)
    if masked:
        mask.astype(np.uint8).tofile(data / 'val.mask.bin')
    meta = {'vocab_size': 11, 'dtype': 'uint16', 'bytes_per_token': 9.0, 'tokenizer': tok.state()}
    (data / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')
    total, n, n_bytes, seen = 0.0, 0, 0, {}
    for start in range(0, len(ids) - 1, 16):
        window = ids[start:start + 17].tolist()
        for i, loss in enumerate(naive_losses(model, window, 16)):
            if mask[start + i + 1]:
                total, n = total + loss, n + 1
                n_bytes += len(tok.chars[window[i + 1]].encode())
                seen.setdefault(i + 1, []).append(loss)
    assert masked or n == len(ids) - 1
    found = []
    for size in (1, 3, 8):
        out, numbers = bench(capsys, 'eval', '--init_from=out', '--dataset=odd', f'--batch_size={size}',
                             *EVAL)
        found.append(numbers['loss'])
        assert numbers['targets'] == n and numbers['bytes'] == n_bytes
        assert numbers['loss'] == pytest.approx(total / n, rel=1e-6)
        assert numbers['perplexity'] == pytest.approx(math.exp(total / n), rel=1e-5)
        assert numbers['bits_per_byte'] == pytest.approx(total / math.log(2) / n_bytes, rel=1e-6)
    assert found == pytest.approx([found[0]] * 3, rel=1e-7)  # 1e-8 was seen
    by, seen_at = numbers['by_tokens_seen'], {'1': [1], '2': [2], '3-4': [3, 4], '9-16': range(9, 17)}
    assert list(by) == ['1', '2', '3-4', '5-8', '9-16']
    for name, positions in seen_at.items():
        each = [loss for i in positions for loss in seen[i]]
        assert by[name] == pytest.approx(sum(each) / len(each), abs=1e-5)
    assert f'{n_bytes:,} bytes in {n:,} targets, 7 windows of 16' in out


def test_bench_eval_of_a_text_counts_its_bytes(folder, capsys):
    tok = make_tokenizer('byte')
    model = save_model('out', tok)
    text = 'Größe: 中文 and more of it'
    (folder / 'one.txt').write_text(text, encoding='utf-8')
    (folder / 'two.txt').write_text(f'{text}<|endoftext|>{text}', encoding='utf-8')
    one = [256, *text.encode()]  # end of text before a document, so that its first token is a target
    for name, ids in ('one.txt', one), ('two.txt', one * 2):
        _, numbers = bench(capsys, 'eval', name, '--init_from=out', *EVAL)
        windows = [ids[i:i + 17] for i in range(0, len(ids) - 1, 16)]
        nats = sum(sum(naive_losses(model, window, 16)) for window in windows)
        n_bytes = len(text.encode()) * len(ids) // len(one)
        assert (numbers['bytes'], numbers['targets']) == (n_bytes, len(ids) - 1)
        assert numbers['bits_per_byte'] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-6)
    chars = flat_tokenizer.CharTokenizer(sorted(set(text)))  # without an end of text the first is not predicted
    save_model('out-char', chars)
    _, numbers = bench(capsys, 'eval', 'one.txt', '--init_from=out-char', *EVAL)
    assert (numbers['bytes'], numbers['targets']) == (len(text.encode()) - 1, len(text) - 1)


def test_bench_eval_takes_shards_of_any_length(folder, monkeypatch, capsys):
    """A batch is as wide as its longest row, whatever shard comes first, and as full as memory allows."""
    model = tiny(block_size=16, vocab_size=23).eval()
    rng, streams = np.random.default_rng(0), []
    for length in (3, 16, 16, 16, 5, 16, 16):
        ids = rng.integers(23, size=length + 1)
        streams.append((ids[:-1], ids[1:]))
    shapes = []
    model.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    machine = runtime('cpu', 'float32')
    found = {size: flat_bench.by_position(streams, functools.partial(
        flat_bench.row_losses, model, machine=machine, batch_size=size)) for size in (1, 2, 7)}
    assert shapes == [(1, 16)] * 5 + [(1, 5), (1, 3)] + [(2, 16), (2, 16), (2, 16), (1, 3)] + [(7, 16)]
    by_hand = np.zeros(16)
    for inputs, targets in streams:
        by_hand[:len(inputs)] += naive_losses(model, [*inputs.tolist(), int(targets[-1])], len(inputs))
    for sums, counts in found.values():
        assert sums == pytest.approx(by_hand, rel=1e-6)
        assert counts.tolist() == [7] * 3 + [6] * 2 + [5] * 11
    shapes.clear()
    monkeypatch.setattr(model.config, 'vocab_size', 2**26 // 40)  # of rows of 16 two fit, of 3 many
    capsys.readouterr()
    [*flat_bench.row_losses(model, streams, machine, None)]
    assert shapes == [(2, 16), (2, 16), (2, 16), (1, 3)] and not capsys.readouterr().out
    monkeypatch.setattr(model.config, 'vocab_size', 5 * 10**9 // 4 // 16)  # of floats, in a row of 16
    [*flat_bench.row_losses(model, streams, machine, None)]
    assert capsys.readouterr().out == ('a window has 5 GB of logits: --block_size=1024 takes less memory, '
                                       'sees less\n')


def test_bench_eval_is_what_training_has_logged(folder, capsys):
    """In windows that divide the text, as those of the toy do."""
    torch.set_num_threads(1)
    train('--out_dir=out', '--max_iters=10', '--eval_iters=99')
    _, numbers = bench(capsys, 'eval', '--init_from=out', *EVAL)
    row = log_rows('out')[-1]
    assert numbers['loss'] == pytest.approx(float(row['val_loss']), abs=2e-6)
    _, int8 = bench(capsys, 'eval', '--init_from=out', '--quantize=int8', *EVAL)
    (folder / 'plain').mkdir()
    model, rest = GPT.from_checkpoint('out/ckpt.pt')
    flat.quantize_weights(model, torch.float32)
    torch.save({**rest, 'model_args': dataclasses.asdict(model.config),
                'model': dequantized(model).state_dict()}, 'plain/ckpt.pt')
    _, plain = bench(capsys, 'eval', '--init_from=plain', *EVAL)
    assert int8['loss'] == pytest.approx(plain['loss'], abs=1e-6) != pytest.approx(numbers['loss'], abs=1e-6)
    # the toy's meta.json says 2 bytes a token, its tokens are of one
    assert numbers['bits_per_byte'] == pytest.approx(2 * float(row['val_bpb']), abs=4e-6)
    assert numbers['targets'] == numbers['bytes'] == 800 and numbers['data'] == os.path.join('data', 'toy')


def test_bench_eval_keeps_conversations_apart(folder, capsys):
    """As train.py does, also for a model that was trained on text; see test_packed_conversations_..."""
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
def test_bench_eval_at_times_the_length(folder, capsys, scaling):
    """The same targets at every length, those that end a window of the longest."""
    tok = make_tokenizer('byte')
    model = save_model('out', tok, block_size=8)
    text = ''.join(map(chr, np.random.default_rng(0).integers(32, 127, size=61)))
    (folder / 'text.txt').write_text(text, encoding='utf-8')
    flags = [f'--rope_scaling={scaling}'] if scaling else []
    out, numbers = bench(capsys, 'eval', 'text.txt', '--init_from=out', '--lengths=[1,2,4]', *flags, *EVAL)
    told = scaling and {**scaling, 'original_max_position_embeddings': 8}
    model, _ = GPT.from_checkpoint('out/ckpt.pt', block_size=32, rope_scaling=told)
    ids, found = [256, *text.encode()], numbers['lengths']
    assert [*found] == ['8', '16', '32'] and 'in 4 stretches of 8' in out
    for length in (8, 16, 32):
        rows = [naive_losses(model, ids[end - length:end + 1], length) for end in (32, 40, 48, 56)]
        last = np.array(rows)[:, -8:]
        assert found[str(length)]['targets'] == 32
        assert found[str(length)]['loss'] == pytest.approx(last.mean(), rel=1e-6)
        assert found[str(length)]['by_tokens_seen']['3-4'] == pytest.approx(np.array(rows)[:, 2:4].mean(),
                                                                            abs=1e-5)
    assert found['32']['by_tokens_seen']['17-32'] == pytest.approx(np.array(rows)[:, 16:].mean(), abs=1e-5)
    with torch.no_grad():  # or the test of the scaling could not fail
        assert abs(last.mean() - found['8']['loss']) > 1e-3


def test_bench_eval_refuses_in_one_line(folder, capsys):
    tok = make_tokenizer('byte')
    save_model('out', tok, pos='learned')
    save_model('out-rope', tok)
    (folder / 'text.txt').write_text('a text', encoding='utf-8')
    for flags, message in (
            (['text.txt', '--init_from=out', '--lengths=[1,2]'], 'learned 16 positions and knows none'),
            (['text.txt', '--init_from=out-rope', '--lengths=[1,2]'], 'text.txt is shorter than .* of 32 '),
            (['text.txt', '--init_from=out-rope', '--lengths=[0]'], r'lengths=\[0\] must be'),
            (['text.txt', '--init_from=out-rope', '--lengths=[1,1000000]'], 'a window of 16,000,000 tokens'),
            (['text.txt'], 'eval needs a trained model'),
            (['text.txt', '--init_from=out', '--n_layer=3'], 'n_layer=3 differs from'),
            (['text.txt', '--init_from=out', '--dataset=toy'], 'text.txt or --dataset=toy: give one'),
            (['--init_from=out'], 'does not say what it was trained on: give --dataset'),
            (['--init_from=out', '--dataset=toy'], 'prepared with another tokenizer than .*ckpt.pt')):
        with pytest.raises(ValueError, match=message) as error:
            run('bench.py', 'eval', *EVAL, *flags)
        assert '\n' not in str(error.value)
    with pytest.raises(FileNotFoundError, match='no.txt is not there: name a text file'):
        run('bench.py', 'eval', 'no.txt', '--init_from=out', *EVAL)
    (folder / 'empty.txt').touch()
    save_model('out-toy', flat_tokenizer.CharTokenizer([chr(97 + i) for i in range(23)]))
    write_toy(folder / 'data/big')
    with open('data/big/val.bin', 'r+b') as f:
        f.write(np.array([7, 60000], '<u2').tobytes())
    with pytest.raises(ValueError, match='val.bin: token 60000 is outside the vocabulary'):
        run('bench.py', 'eval', '--init_from=out-toy', '--dataset=big', *EVAL)
    np.zeros(801, np.uint8).tofile('data/toy/val.mask.bin')
    for args in (['empty.txt', '--init_from=out-rope'], ['--init_from=out-toy', '--dataset=toy']):
        with pytest.raises(ValueError, match='there is no token in it to predict'):
            run('bench.py', 'eval', *EVAL, *args)


def test_bench_eval_of_hellaswag(folder, capsys):
    """Against a loop over endings, of many lengths, so that the sum and the mean choose differently."""
    tok, rng = make_tokenizer('byte'), np.random.default_rng(0)
    model = save_model('out', tok, block_size=64)

    def text(n):
        return ''.join(map(chr, rng.integers(97, 123, size=n)))
    records = []
    for i in range(15):
        record = {'endings': [text(n) for n in rng.integers(2, 30, size=4)], 'label': int(rng.integers(4))}
        parts = {'ctx_a': text(5), 'ctx_b': text(3) if i % 3 else ''}
        context = ' '.join(filter(None, parts.values()))
        records.append((context, {**record, **(parts if i % 2 else {'ctx': context, 'ind': i})}))
    records[0] = ('x' * 80, {**records[0][1], 'ctx': 'x' * 80})  # too long: its end counts
    Path('h.jsonl').write_text('\n'.join(json.dumps(record) for _, record in records), encoding='utf-8')
    acc = acc_norm = 0
    for context, record in records:
        sums, means = [], []
        for end in record['endings']:
            ids = [*f'{context} {end}'.encode()][-65:]
            each = naive_losses(model, ids, len(end) + 1)
            sums.append(sum(each))
            means.append(sum(each) / len(each))
        acc += sums.index(min(sums)) == record['label']
        acc_norm += means.index(min(means)) == record['label']
    assert acc != acc_norm
    for size in (1, 7):
        out, numbers = bench(capsys, 'eval', 'h.jsonl', '--init_from=out', f'--batch_size={size}', *EVAL)
        assert (numbers['questions'], numbers['acc'], numbers['acc_norm']) == (15, acc / 15, acc_norm / 15)
    assert re.search(rf'^acc_norm +{acc_norm / 15:.4f} ± 0\.\d+, {acc_norm} right$', out, re.M)
    for change, message in (({'label': ''}, "line 2: label='' is none of its 4 endings"),
                            ({'label': 4}, 'label=4 is none'), ({'endings': 'a'}, 'a list of texts')):
        Path('bad.jsonl').write_text('\n'.join(map(json.dumps, (records[0][1], {**records[1][1], **change}))),
                                     encoding='utf-8')
        with pytest.raises(ValueError, match=message):
            run('bench.py', 'eval', 'bad.jsonl', '--init_from=out', *EVAL)
    with pytest.raises(ValueError, match='is for texts, and h.jsonl has questions'):
        run('bench.py', 'eval', 'h.jsonl', '--init_from=out', '--lengths=[2]', *EVAL)

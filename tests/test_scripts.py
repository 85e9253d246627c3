"""Tests of scripts."""
import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import (
    EVAL,
    ROOT,
    TOY,
    bench,
    by_hand,
    byte_chat_tokenizer,
    chat_model,
    dequantized,
    from_nothing,
    made,
    new_chat,
    run,
    train,
)

import hub
import model as flat
import sample as flat_sample
import train as flat_train
from configurator import configure
from model import GPT, GPTConfig
from test_model import MLA

transformers = pytest.importorskip('transformers', reason='the oracle of the parity tests')


# scripts as users run them ----------------------------------------------------------------------------------
def test_readme_lines_generate_from_python(folder):
    train('--out_dir=out', '--max_iters=1')
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    code = re.search(r'```python\n(.*?)```', readme, re.S)[1].replace("'def '", "'abc'")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    assert out.getvalue().strip() and set(out.getvalue().strip()) <= set('abcdefghijklmnopqrstuvw')


def test_answers_are_written_in_order_and_gone_on_with(folder, capsys):
    train('--out_dir=out', '--max_iters=10')
    prompts = ['ab', 'c', 'abcdefg', 'u']
    (folder / 'l.txt').write_text('\n'.join(prompts), encoding='utf-8')
    common = ['--out_dir=out', '--device=cpu', '--dtype=float32', '--max_new_tokens=8', '--start=LINES:l.txt',
              '--num_samples=2', '--stop=e']
    run('sample.py', *common, '--output=one.jsonl', '--batch_size=3')
    whole = (folder / 'one.jsonl').read_text(encoding='utf-8')
    records = [json.loads(line) for line in whole.splitlines()]
    assert [(r['prompt'], r['sample']) for r in records] == [(p, i) for p in prompts for i in range(2)]
    model, tokenizer, _ = hub.load('resume', 'out')
    ids = [tokenizer.encode(p) for p in prompts for _ in range(2)]
    texts, _ = flat_sample.complete(model.eval(), tokenizer, ids, 8, ('e',), top_k=200)
    assert [r['text'] for r in records] == texts and any(r['tokens'] < 8 for r in records)
    for kept in (len(whole) // 2, 3, len(whole)):  # in the middle of a line, of the first, and at the end
        (folder / 'two.jsonl').write_text(whole[:kept], encoding='utf-8')
        run('sample.py', *common, '--output=two.jsonl', '--batch_size=1')
        assert (folder / 'two.jsonl').read_text(encoding='utf-8') == whole
    capsys.readouterr()
    for name, text, flags, message in [
            ('one.jsonl', whole, ['--num_samples=3'], 'line 3 is no answer to these prompts'),
            ('one.jsonl', whole, ['--seed=3'], 'line 1 is an answer made with other settings'),
            ('one.jsonl', whole[:60], ['--seed=3'], None),  # nothing whole is there
            ('a.json', '{"a": 1}', [], 'a.json ends in what is no answer'),
            ('a.json', '{"prompt": "ab"}', [], 'ends in'), ('a.json', whole + 'x', [], 'ends in'),
            ('a.txt', 'ab\ncd', [], 'line 1 is no answer')]:
        (folder / name).write_text(text, encoding='utf-8')
        if message:
            with pytest.raises(ValueError, match=message):
                run('sample.py', *common, *flags, f'--output={name}')
            assert (folder / name).read_text(encoding='utf-8') == text
        else:
            run('sample.py', *common, *flags, f'--output={name}')
    with pytest.raises(ValueError, match='one.jsonl exists: name another'):
        run('sample.py', *common[:3], '--start=ab', '--score', '--output=one.jsonl')
    capsys.readouterr()
    # speculation, by the text so far and by the model itself, changes nothing
    for flags in (['--speculate=3'], ['--draft=out'], ['--draft=out', '--speculate=2']):
        run('sample.py', *common, *flags, '--output=three.jsonl')
        assert (folder / 'three.jsonl').read_text(encoding='utf-8') == whole
        assert re.search(r'tok/s, \d+ of \d+ guesses right$', capsys.readouterr().err.strip())
        os.remove('three.jsonl')
    # eight bits
    run('sample.py', *common, '--quantize=int8', '--speculate=2', '--output=eight.jsonl')
    model, _, _ = hub.load('resume', 'out', int8=True)
    texts, _ = flat_sample.complete(dequantized(model), tokenizer, ids, 8, ('e',), top_k=200)
    found = [json.loads(line)['text'] for line in (folder / 'eight.jsonl').read_text().splitlines()]
    assert found == texts


def test_scores_of_the_script(folder, capsys):
    train('--out_dir=out', '--max_iters=10')
    capsys.readouterr()
    common = ['--out_dir=out', '--device=cpu', '--dtype=float32', '--start=abcab', '--score']
    with pytest.raises(SystemExit, check=lambda e: e.code is None):
        run('sample.py', *common)
    printed = re.findall(r"^ +(-[\d.]+)  '(.)'$", capsys.readouterr().out, re.M)
    with pytest.raises(SystemExit, check=lambda e: e.code is None):
        run('sample.py', *common, '--output=scores.jsonl')
    record = json.loads((folder / 'scores.jsonl').read_text(encoding='utf-8'))
    assert ''.join(text for _, text in printed) == 'bcab' and record['prompt'] == 'abcab'
    model, rest = GPT.from_checkpoint('out/ckpt.pt')
    with torch.no_grad():
        logits = model.eval()(torch.tensor([record['ids']]))[0].double()
    expected = [-F.cross_entropy(logits[i], torch.tensor(token)).item()
                for i, token in enumerate(record['ids'][1:])]
    assert record['logprobs'][0] is None
    with pytest.raises(ValueError, match="start='a' is one token"):
        run('sample.py', *common[:3], '--start=a', '--score')
    np.testing.assert_allclose(record['logprobs'][1:], expected, atol=1e-9)
    np.testing.assert_allclose([float(value) for value, _ in printed], expected, atol=6e-5)


def test_sample_script(folder, capsys):
    train('--out_dir=out', '--max_iters=10')
    common = ['--out_dir=out', '--device=cpu', '--dtype=float32', '--max_new_tokens=8']
    (folder / 'p.txt').write_text('abc', encoding='utf-8')
    (folder / 'l.txt').write_text('ab\ncdefg\n', encoding='utf-8')
    capsys.readouterr()
    run('sample.py', *common, '--start=FILE:p.txt', '--num_samples=2', '--temperature=0')
    samples = re.findall(r'^abc(\w{8})$', capsys.readouterr().out, re.M)
    model, rest = GPT.from_checkpoint('out/ckpt.pt')
    greedy = made(model.eval(), [[0, 1, 2]], 8, temperature=0)[0]
    assert samples == [''.join(chr(97 + t) for t in greedy)] * 2
    run('sample.py', *common, '--start=LINES:l.txt', '--num_samples=1')
    out = capsys.readouterr().out
    assert re.search(r'^ab\w{8}$', out, re.M) and re.search(r'^cdefg\w{8}$', out, re.M)
    with pytest.raises(ValueError, match=r"'\?'.*char vocabulary of 23"):
        run('sample.py', *common, '--start=a?')
    for flag, message in (
            ('--top_p=2', 'top_p=2.0'), ('--stop=[1,2]', 'stop=.* must be text'),
            ('--start=', 'empty prompt'), ('--compile=yes', "compile='yes' must be True, False or auto"),
            ('--num_samples=99999999999', 'num_samples=99999999999 must be between 1 .*LINES:'),
            (f'--seed={2**63}', r'below 2\*\*63')):
        with pytest.raises(ValueError, match=message):
            run('sample.py', *common, flag)


def save_chat_model(path, **options):
    model = chat_model(**options)
    os.makedirs(os.path.dirname(path))
    torch.save({'model': model.state_dict(), 'model_args': dataclasses.asdict(model.config),
                'tokenizer': byte_chat_tokenizer().state()}, path)
    return model


def test_sample_script_chats(folder, capsys, monkeypatch):
    model = save_chat_model('out/ckpt.pt')
    common = ['--chat', '--device=cpu', '--dtype=float32', '--max_new_tokens=8', '--system=Be short.',
              '--temperature=0']
    monkeypatch.setattr(sys, 'stdin', io.StringIO('Hi\n/set temperature 0.7\nAnd?\n'))
    with pytest.raises(SystemExit) as done:
        run('sample.py', *common)
    out, chat = capsys.readouterr().out, new_chat(model)
    assert done.value.code is None and out.endswith('> \n')
    answer = from_nothing(chat, 'Hi')
    assert f'> {answer}\n' in out and 'temperature = 0.7' in out
    (folder / 'q.txt').write_text('Hi\nWhy so?\n', encoding='utf-8')
    run('sample.py', *common, '--start=LINES:q.txt')  # each alone
    out = capsys.readouterr().out
    assert f"> Hi\n{answer}\n---" in out and f"> Why so?\n{from_nothing(chat, 'Why so?')}\n---" in out
    saved = torch.load('out/ckpt.pt', weights_only=True)
    for masked in (True, False):  # whether answers were learnt, as train.py writes it
        torch.save({**saved, 'masked': masked}, 'out/ckpt.pt')
        run('sample.py', *common, '--start=Hi')
        assert ('was trained on text, not on conversations' in capsys.readouterr().out) != masked
    run('sample.py', *common, '--start=Why so?')
    assert f"> Why so?\n{from_nothing(chat, 'Why so?')}\n---" in capsys.readouterr().out
    with pytest.raises(ValueError, match='ask a shorter one'):
        run('sample.py', *common, '--start=' + 'a' * 600)
    train('--out_dir=out-base', '--max_iters=1')
    with pytest.raises(ValueError, match='out-base.*has no chat template.*leave out --chat') as error:
        run('sample.py', '--out_dir=out-base', *common)
    assert '\n' not in str(error.value)


def test_sampling_with_another_context(folder, capsys):
    save_chat_model('out/ckpt.pt', block_size=24)
    common = ['--device=cpu', '--dtype=float32', '--max_new_tokens=30', '--temperature=0', '--num_samples=1']
    scaling = {'rope_type': 'linear', 'factor': 2.0}
    run('sample.py', *common, '--start=abc', '--block_size=60', f'--rope_scaling={scaling}')
    model, _ = GPT.from_checkpoint('out/ckpt.pt', block_size=60, rope_scaling=scaling)
    ids = by_hand(model.eval(), [97, 98, 99], 30, temperature=0)
    ends = [i for i, token in enumerate(ids) if token in byte_chat_tokenizer().stop_tokens]
    text = byte_chat_tokenizer().decode(ids[:min(ends, default=30)])
    assert f"\nabc{text}\n---" in capsys.readouterr().out
    save_chat_model('out2/ckpt.pt', block_size=24, pos='learned')
    with pytest.raises(ValueError, match='block_size=60 is more than the 24 positions'):
        run('sample.py', '--out_dir=out2', *common, '--start=abc', '--block_size=60')


def test_printed_commands_can_be_pasted(folder, capsys):
    train('--out_dir=sp ace', '--max_iters=1')
    assert "python sample.py --out_dir='sp ace'" in capsys.readouterr().out


@pytest.mark.parametrize('what', ['train', 'decode'])
def test_bench_prints_a_table_and_json(folder, capsys, what):
    length = '--max_new_tokens=6' if what == 'decode' else '--steps=2'
    out, numbers = bench(capsys, what, '--n_layer=1', '--n_head=2', '--n_embd=32', '--block_size=64',
                         '--vocab_size=50', length, '--rounds=2', '--device=cpu', '--compile=False')
    ms, speed = re.search(r'^flatgpt +([\d.,]+) +[\d.,]+ to [\d.,]+ +([\d.,]+)$', out, re.M).groups()
    assert float(ms.replace(',', '')) == pytest.approx(numbers['ms'], abs=0.01)
    assert float(speed.replace(',', '')) == pytest.approx(numbers['tok_per_s'], abs=0.1)
    assert numbers['tok_per_s'] > 0 and numbers['ms'] > 0 and numbers['peak_mb'] > 0
    tokens_each = 1 if what == 'decode' else 12 * 64
    assert numbers['tok_per_s'] == pytest.approx(tokens_each * 1e3 / numbers['ms'], rel=0.01)


@pytest.mark.parametrize('flags, others', [
    (['--vs=transformers', '--batch_size=2', '--quantize=int8'], ['transformers', 'one row']),
    (['--speculate=3', '--operators=True'], ['no guesses'])])
def test_bench_decodes_in_turns_with_others(folder, capsys, flags, others):
    out, numbers = bench(capsys, 'decode', '--n_layer=1', '--n_head=2', '--n_embd=32', '--vocab_size=50',
                         '--max_new_tokens=12', '--rounds=2', '--prompt_len=5', *flags, *EVAL)
    assert list(numbers['times_faster']) == others
    assert numbers['quantize'] == ('int8' if '--quantize=int8' in flags else '')
    speeds = {name: float(speed) for name, speed in re.findall(
        r'^(flatgpt|transformers|one row|no guesses) .* ([\d.]+)$', out.replace(',', ''), re.M)}
    for name in others:
        assert min(speeds['flatgpt'], speeds[name], numbers['times_faster'][name]) > 0
        assert f"{numbers['times_faster'][name]:.2f} times the speed of {name}" in out
    if '--operators=True' in flags:
        assert 0 <= numbers['guesses_right'] <= 1 and 'bandwidth_share' not in numbers
        table = re.findall(r'^(aten::\S+) +[\d.]+ +([\d.]+)% +([\d.]+)$', out, re.M)
        assert len(table) > 5 and sum(float(share) for _, share, _ in table) <= 100.1


def test_bench_refuses_in_one_line_what_it_cannot_measure(folder):
    torch.set_num_threads(1)
    train('--out_dir=out', '--max_iters=1')
    for flag, message in (
            ('--rounds=0', 'rounds=0 must be at least 1'), ('--prompt_len=0', 'prompt_len=0 must be'),
            ('--max_new_tokens=1', 'max_new_tokens=1 must be at least 2'), ('--batch_size=0', 'batch_size=0'),
            ('--batch_size=-1', 'batch_size=-1'), ('--optimizer=foo', "optimizer='foo' is none of adamw"),
            ('--compile=blocks', "compile='blocks' is none of True"), (f'--seed={2**63}', 'must be below'),
            ('--n_layer=7', 'n_layer=7 differs from .*ckpt.pt, which has 2')):
        with pytest.raises(ValueError, match=message):
            run('bench.py', 'decode', '--init_from=out', '--device=cpu', flag)


@pytest.mark.parametrize('options', [{}, dict(n_kv_head=2, window=10, window_pattern='SL', pos='alibi'),
                                     dict(MLA, n_expert=4, n_shared_expert=1, n_dense_layer=1, d_expert=40),
                                     dict(tie_word_embeddings=False, pos='learned', bias=True),
                                     dict(mixer_pattern='DA')])
def test_bench_params_counts_what_is_there(capsys, options):
    size = dict(n_layer=3, n_head=4, n_embd=32, block_size=24, vocab_size=61)
    model = GPT(GPTConfig(**size, **options))
    out, numbers = bench(capsys, 'params', *(f'--{k}={v}' for k, v in (size | options).items()))
    rows = [line for line in out.splitlines() if '%' in line]
    assert numbers['params'] == model.num_params() == sum(w.numel() for w in model.state_dict().values())
    assert rows[-1].startswith('total') and all(f'{numbers[k]:,}' in rows[-1] for k in (
        'params', 'active_params', 'flops_per_token'))
    for column in (-6, -4, -2):
        counts = [int(line.split()[column].replace(',', '')) for line in rows]
        assert sum(counts[:-1]) == counts[-1]
    experts = [block.mlp.experts for block in model.h if isinstance(block.mlp, flat.MoE)]
    idle = sum(w.numel() for e in experts for w in e.parameters()) // 2  # 2 of 4 experts
    assert numbers['active_params'] == numbers['params'] - idle
    cache = model.make_cache(1, 24)
    # printed for bfloat16; not counting the slot for padding
    kept = sum(old[:, :, :slots.count].numel() for slots in cache.slots for old in slots.tensors)
    states = sum(state.numel() * (2 if state.ndim == 3 else 4) for each in cache.states for state in each)
    assert numbers['cache_bytes'] == 2 * kept + states
    if 'mixer_pattern' in options:
        assert model.cache_elements(7) == (3 * 96 + 4 * 8 * 8) * 2 + 7 * 64
        assert numbers['cache_bytes_per_token'] == 2 * 64 and states == (2 * 3 * 96 + 4 * 4 * 8 * 8) * 2
        return
    assert numbers['cache_bytes_per_token'] == 2 * model.cache_elements()
    # 6 FLOPs for each weight of a matrix that a token meets, and for both products of attention
    matrices = sum(w.numel() for name, w in model.named_parameters() if w.ndim > 1 and name.startswith('h.'))
    head = 61 * 32
    attended = [min(24, block.attn.window or 24) for block in model.h]
    width = 4 * (8 + 8 if 'kv_lora_rank' not in options else 8 + 4 + 12)
    assert numbers['flops_per_token'] == 6 * (matrices - idle + head + width * sum(attended))


@pytest.mark.parametrize('name, params, active', [
    ('gpt2', 124439808, None), ('llama2_7b', 6738415616, None), ('llama2_70b', 68976648192, None),
    ('llama3_8b', 8030261248, None), ('mistral_7b', 7241732096, None),
    ('mixtral_8x7b', 46702792704, 12879925248), ('qwen3_0.6b', 596049920, None),
    ('qwen3_8b', 8190735360, None), ('qwen3_30b_a3b', 30532122624, 3353032704),
    ('deepseek_v2_lite', 15706484224, 2661150208), ('deepseek_v3', 671026404352, 37552282624),
    ('bloom_560m', 559214592, None), ('falcon_7b', 6921720704, None), ('minimind', 25829888, None)])
def test_published_models_have_their_parameters(monkeypatch, name, params, active):
    monkeypatch.chdir(ROOT)
    _, args, *_ = configure({**vars(flat_train), '__name__': 'x'}, 'GPTConfig', argv=[f'config/{name}.py'])
    with torch.device('meta'):
        model = GPT(GPTConfig(**{'vocab_size': 50257, **args}))  # config/gpt2.py takes that of the data
    assert model.num_params() == params and model.num_params(active=True) == (active or params)
    said = re.search(r'([\d,]{9,}) ?parameters', (ROOT / f'config/{name}.py').read_text(encoding='utf-8'))
    assert said is None or int(said[1].replace(',', '')) == params


def test_every_config_builds_and_divides(monkeypatch):
    monkeypatch.chdir(ROOT)
    for path in sorted((ROOT / 'config').glob('*.py')):
        assert path.name == 'variants.py' or len(path.read_text(encoding='utf-8').splitlines()) <= 40, path
        namespace = {**vars(flat_train), '__name__': 'config'}
        config, args, *_ = configure(namespace, 'GPTConfig', argv=[str(path)])
        with torch.device('meta'):
            model = GPT(GPTConfig(**args))
        for ranks in (1, 2, 4, 8):
            flat_train.share_batch(config['gradient_accumulation_steps'], config['batch_size'], ranks)
        if path.name == 'small.py':
            assert 120e6 < model.num_params() < 130e6
    with torch.device('meta'):
        config, args, *_ = configure({**vars(flat_train), '__name__': 'x'}, 'GPTConfig',
                                 argv=['--n_layer=8', 'config/dial.py'])
    assert args['n_embd'] == 512 and args['n_layer'] == 8


@pytest.mark.parametrize('args, message', [
    (['--dataset=nowhere'], 'not prepared'),
    (['--block_size=5000'], 'train.bin .* needs block_size'),
    (['--block_size=1000'], 'val.bin .* needs block_size'),
    (['--vocab_size=20'], 'outside the vocabulary of 20'),
    (['--n_embd=33'], 'n_embd=33, n_head=2: n_head must divide'),
    (['--dtype=float16'], 'float16 needs CUDA'),
    (['--device=cuda'], 'device=cuda'),
    (['--init_from=missing.pt'], 'no checkpoint at missing.pt'),
    (['--lr_schedule=sine'], "lr_schedule='sine' is none of cosine"),
    (['--optimizer=sgd'], "optimizer='sgd' is none of adamw"),
    (['--log_interval=0'], 'log_interval=0 must be at least 1'),
    (['--learning_rate=-1'], 'learning_rate=-1.0 must be at least 0'),
    (['--beta2=1'], 'beta2=1.0 must be .* below 1'),
    (['--cooldown=0'], 'cooldown=0.0 must be above 0'),
    (['--optimizer=adamw', '--momentum=0.5'], '--momentum has no effect with optimizer=adamw'),
    (['--z_loss=0.1'], '--z_loss has no effect with n_expert=None'),
    (['--compile=perhaps'], "compile='perhaps' is none of"),
    ([f'--seed={10**26}'], r'seed=1000.* must be below 2\*\*63'),
    (['--out_dir=data/toy/meta.json'], 'meta.json is a file: name a folder'),
    (['--out_dir='], 'out_dir is empty: name a folder'),
    (['--grad_clip=-1'], 'grad_clip=-1.0 must be at least 0'),
    (['--max_iters=-5'], 'max_iters=-5 must be at least 0'),
    (['--epochs=-1'], 'epochs=-1.0 must be at least 0'),
    (['--tokens_per_param=1e999'], r'tokens_per_param=inf must be below 2\*\*63'),
    (['--warmup_iters=-1'], 'warmup_iters=-1 must be at least 0'),
    (['--min_lr=-1e-5'], 'min_lr=-1e-05 must be at least 0'),
    (['--eval_interval=0'], 'eval_interval=0 must be at least 1'),
    (['--eval_iters=0'], 'eval_iters=0 must be at least 1'),
    (['--batch_size=0'], 'batch_size=0 must be at least 1'),
    (['--batch_size=10000000'], 'an iteration takes 30,000,000 sequences, this text has 187: lower'),
    (['--momentum=1.5'], 'momentum=1.5 must be at least 0 and below 1'),
    (['--seed=-1'], 'seed=-1 must be at least 0'),
    (['--device=gpu'], 'device=gpu: use cpu, mps, cuda, cuda:1 or auto'),
    (['--device=cuda:x'], 'device=cuda:x: use cpu, mps'),
])
def test_bad_input_is_one_error_and_writes_nothing(folder, args, message):
    """Nor does it move the run that is there."""
    if args == ['--device=cuda'] and torch.cuda.is_available():
        pytest.skip('there is a CUDA device')
    os.mkdir('out')
    Path('out/ckpt.pt').write_bytes(b'a run')
    with pytest.raises(ValueError if 'nowhere' not in args[0] and 'missing' not in args[0]
                       else FileNotFoundError, match=message) as error:
        run('train.py', *TOY, '--out_dir=out', *args)
    assert '\n' not in str(error.value)
    assert os.listdir('out') == ['ckpt.pt'] and Path('out/ckpt.pt').read_bytes() == b'a run'


def test_errors_of_a_script_are_one_line_and_a_status(folder):
    done = subprocess.run([sys.executable, str(ROOT / 'train.py'), *TOY, '--dataset=nowhere'],
                          capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith('train.py: data') and done.stderr.count('\n') == 1


def test_files_are_opened_with_their_encoding():
    """On Windows the default is not UTF-8."""
    for path in ROOT.glob('*.py'):
        for call in re.findall(r'(?<![\w.])open\(.*', path.read_text(encoding='utf-8')):
            assert (re.search(r"encoding=|'[rwa]b'|buffering", call)
                    or path.name == 'test_model.py'), f'{path.name}: {call}'

"""Scripts as users start them: from text to a model, its samples and an export; configs; wrong input."""
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import ROOT, TOY, dequantized, made, run
from test_sample import by_hand, byte_chat_tokenizer, chat_model, from_nothing, new_chat

import sample as flat_sample
import train as flat_train
from configurator import configure
from model import GPT, GPTConfig, num_params
from sample import load

CPU = ['--device=cpu', '--dtype=float32']


SHORT = [*TOY[5:], '--max_iters=6']  # of any shape


def advised(text):
    """The commands in a script's output, each as [script, argument, ...]."""
    return [shlex.split(command)[1:] for command in re.findall(r'python [a-z]+\.py[^`\n(]*', str(text))]


def test_advice_leads_from_a_text_to_a_model_its_samples_and_an_export(tmp_path, monkeypatch, capsys):
    """Runs each command that a script prints, with further flags that make the run short."""
    monkeypatch.chdir(tmp_path)
    Path('my.txt').write_text('It was the best of times, it was the worst of times.\n' * 400, 'utf-8')

    def follow(said, *flags):
        for command in (commands := advised(said)):
            run(*command, *flags)
        assert commands
        return capsys.readouterr().out

    with pytest.raises(FileNotFoundError, match='data/my_byte is not prepared: .*`python prepare.py SOURCE`'):
        run('train.py', '--dataset=data/my_byte')
    run('prepare.py', 'my.txt')
    said = follow(capsys.readouterr().out, *TOY[1:], '--block_size=32', '--max_iters=60', '--out_dir=out dir')
    greedy = ['--start=It was', '--num_samples=1', '--max_new_tokens=12', '--temperature=0', *CPU]
    sampled = re.search(r'^It was.*$', follow(said, *greedy), re.M)[0]
    pytest.importorskip('safetensors')
    run('zoo/hub.py', 'export', 'out dir', 'mine')
    run('zoo/hub.py', 'mine')
    sample, prepare, train = advised(capsys.readouterr().out)
    run(*sample, *greedy)
    assert re.search(r'^It was.*$', capsys.readouterr().out, re.M)[0] == sampled != 'It was'
    run(*prepare)
    run(*train, *SHORT, '--out_dir=fine')


def test_advice_leads_from_conversations_to_a_tuned_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path('my.txt').write_text('It was the best of times, it was the worst of times.\n' * 400, 'utf-8')
    Path('chats.jsonl').write_text('\n'.join(json.dumps({'messages': [
        {'role': 'user', 'content': f'What is {n}?'}, {'role': 'assistant', 'content': f'{n}.<|im_end|>'}]})
        for n in range(30)), 'utf-8')
    run('prepare.py', 'my.txt', '--tokenizer=bpe:300')
    run('train.py', '--dataset=my_bpe300', *TOY[1:], '--block_size=128', '--max_iters=6', '--out_dir=base')
    run('prepare.py', 'chats.jsonl', '--tokenizer=base', '--block_size=128')
    *_, command = advised(capsys.readouterr().out)
    tuned = run(*command, '--init_from=base', *SHORT[1:], '--out_dir=fine')
    assert tuned['model'].config.document_token is not None and tuned['first_it'] == 0
    assert 'warning' not in capsys.readouterr().out  # the base has this tokenizer


def test_readme_lines_generate_from_python(base):
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    code = re.search(r'```python\n(.*?)```', readme, re.S)[1].replace("'def '", "'abc'")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    assert out.getvalue().strip() and set(out.getvalue().strip()) <= set('abcdefghijklmnopqrstuvw')


def test_answers_are_written_in_order_to_a_new_file(base):
    prompts = ['ab', 'c', 'abcdefg', 'u']
    Path('l.txt').write_text('\n'.join(prompts), encoding='utf-8')

    def answers(*flags):
        Path('out.jsonl').unlink(missing_ok=True)
        run('sample.py', *CPU, '--max_new_tokens=8', '--start=LINES:l.txt', '--num_samples=2', '--stop=e',
            '--output=out.jsonl', *flags)
        return Path('out.jsonl').read_text(encoding='utf-8')

    def expected(model):
        texts, _ = flat_sample.complete(model.eval(), tokenizer, ids, 8, ('e',), top_k=200)
        return [(p, i, texts.pop(0)) for p in prompts for i in range(2)]
    model, tokenizer, _ = load('resume', 'out')
    ids = [tokenizer.encode(p) for p in prompts for _ in range(2)]
    whole = answers('--batch_size=3')
    records = [json.loads(line) for line in whole.splitlines()]
    assert [(r['prompt'], r['sample'], r['text']) for r in records] == expected(model)
    assert any(r['tokens'] < 8 for r in records)
    assert answers('--speculate=3') == whole
    for flags, message in ((), 'out.jsonl exists already'), (['--chat'], 'questions that are typed'):
        with pytest.raises(ValueError, match=message):
            run('sample.py', '--output=out.jsonl', *flags)
    assert Path('out.jsonl').read_text(encoding='utf-8') == whole
    records = [json.loads(line) for line in answers('--quantize=int8').splitlines()]
    model, *_ = load('resume', 'out', int8=True)
    assert [(r['prompt'], r['sample'], r['text']) for r in records] == expected(dequantized(model))


def test_sample_script(base, capsys, monkeypatch):
    common, context = [*CPU, '--max_new_tokens=30', '--temperature=0'], dict(
        block_size=60, rope_scaling={'rope_type': 'linear', 'factor': 2.0})  # of 16 tokens, without
    Path('p.txt').write_text('abc', encoding='utf-8')
    run('sample.py', *common, '--start=FILE:p.txt', '--num_samples=2', '--stop=[1, 2]',
        *(f'--{name}={value}' for name, value in context.items()))
    model, *_ = load('out/ckpt.pt', **context)
    greedy = ''.join(chr(97 + t) for t in made(model.eval(), [[0, 1, 2]], 30, temperature=0)[0])
    assert capsys.readouterr().out.endswith(f"{'-' * 15}\nabc{greedy}\n{'-' * 15}\nabc{greedy}\n{'-' * 15}\n")
    for flag, message in (('--start=a?', r"'\?'.*char vocabulary of 23"), ('--start=', 'is empty'),
                          ('--start=FILE:out/ckpt.pt', 'damaged'), ('--top_p=0', 'top_p=0.0 must be'),
                          ('--top_k=3', '--top_k has no effect with temperature=0.0'),
                          ('--system=x', '--system has no effect with chat=False')):
        with pytest.raises(ValueError, match=message):
            run('sample.py', *common, flag)
    greedy = ''.join(chr(97 + t) for t in made(load('resume', 'out')[0].eval(), [[0, 1, 2]], 30,
                                               temperature=0)[0])
    for data, message in (b'\xef\xbb\xbfabc', ''), (b'ab\xffc', 'standard input is damaged'):
        monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(data)))
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            run('sample.py', *common, '--start=-')
    assert f'---\nabc{greedy}\n---' in capsys.readouterr().out
    Path('out/ckpt.pt').write_bytes(Path('out/ckpt.pt').read_bytes()[:9999])
    with pytest.raises(ValueError, match='out/ckpt.pt is .*damaged'):
        run('sample.py', *common)


def test_sample_script_chats(base, capsys, monkeypatch):
    model = chat_model()
    state = {'model': model.state_dict(), 'model_args': vars(model.config),
             'tokenizer': byte_chat_tokenizer().state()}
    torch.save(state, 'out/ckpt.pt')
    common = ['--chat', *CPU, '--max_new_tokens=8', '--system=Be short.', '--temperature=0']
    monkeypatch.setattr(sys, 'stdin', io.StringIO('Hi\n'))
    with contextlib.suppress(SystemExit):
        run('sample.py', *common)
    answers = {question: from_nothing(new_chat(model), question) for question in ('Hi', 'Why so?')}
    assert f"> {answers['Hi']}\n" in capsys.readouterr().out
    Path('q.txt').write_text('\n'.join(answers), encoding='utf-8')
    run('sample.py', *common, '--start=LINES:q.txt')  # each alone
    out = capsys.readouterr().out
    assert all(f"> {question}\n{answer}\n---" in out for question, answer in answers.items())
    torch.save({**state, 'masked': False}, 'out/ckpt.pt')  # as of a run on text, with the same tokenizer
    run('sample.py', *common, '--start=Hi', '--system=')
    tokenizer = byte_chat_tokenizer()
    text = tokenizer.decode(by_hand(model, tokenizer.encode('Hi'), 8, temperature=0))
    assert f"> Hi\n{text}\n---" in capsys.readouterr().out


@pytest.mark.parametrize('name, params, active', [
    ('gpt2', 124439808, None), ('llama2_70b', 68976648192, None), ('llama3_8b', 8030261248, None),
    ('mistral_7b', 7241732096, None), ('mixtral_8x7b', 46702792704, 12879925248),
    ('qwen3_0.6b', 596049920, None), ('qwen3_30b_a3b', 30532122624, 3353032704),
    ('deepseek_v2_lite', 15706484224, 2661150208), ('deepseek_v3', 671026404352, 37552282624),
    ('bloom_560m', 559214592, None), ('falcon_7b', 6921720704, None), ('minimind', 25829888, None),
    ('minimind_moe', 145029760, 91945600), ('minimind3', 63912192, None),
    ('minimind3_moe', 198416640, 63936768)])
def test_published_models_have_their_parameters(monkeypatch, name, params, active):
    monkeypatch.chdir(ROOT)
    _, args, *_ = configure({**vars(flat_train), '__name__': 'x'}, 'GPTConfig', argv=[f'config/{name}.py'])
    with torch.device('meta'):
        model = GPT(GPTConfig(**{'vocab_size': 50257, **args}))  # config/gpt2.py takes that of the data
    assert num_params(model) == params and num_params(model, active=True) == (active or params)


def test_the_sizes_in_the_remarks_of_the_dial(monkeypatch):
    monkeypatch.chdir(ROOT)
    sizes = re.findall(r'(\d+): ([\d.]+)M', Path('config/dial.py').read_text('utf-8'))
    assert len(sizes) == 5
    for n_layer, millions in sizes:
        _, args, *_ = configure({**vars(flat_train), '__name__': 'x'}, 'GPTConfig',
                                argv=[f'--n_layer={n_layer}', 'config/dial.py'])
        with torch.device('meta'):
            assert f"{num_params(GPT(GPTConfig(vocab_size=257, **args))) / 1e6:.1f}" == millions


def test_every_config_builds_and_divides(monkeypatch):
    monkeypatch.chdir(ROOT)
    for path in sorted((ROOT / 'config').glob('*.py')):
        settings = {**vars(flat_train), '__name__': 'config'}
        config, args, *_ = configure(settings, 'GPTConfig', argv=[str(path)])
        with torch.device('meta'):
            GPT(GPTConfig(**args))
        for ranks in (1, 2, 4, 8):
            flat_train.share_batch(config['gradient_accumulation_steps'], config['batch_size'], ranks)


@pytest.mark.parametrize('command', ['train.py', 'lab/check.py', 'bench.py params', 'bench.py decode'])
def test_every_script_begins_with_the_default_file(folder, command, capsys):
    first, n_embd = 'config/default.py: ', 192
    with pytest.raises(ValueError, match=f'n_embd={n_embd}, n_head=7: n_head must divide'):
        run(*command.split(), '--n_head=7')
    assert capsys.readouterr().out.startswith(first)
    with pytest.raises((ValueError, FileNotFoundError), match='nowhere'):
        run(*command.split(), '--n_head=7', '--init_from=nowhere.pt')
    assert command == 'train.py' or first not in capsys.readouterr().out


@pytest.mark.parametrize('args, message', [
    (['--dataset=nowhere'], 'not prepared'), (['--block_size=5000'], 'train.bin .* needs block_size'),
    (['--vocab_size=20'], 'outside the vocabulary of 20'), (['--n_embd=33'], 'n_head must divide'),
    (['--dtype=float16'], 'float16 needs CUDA'), (['--init_from=missing.pt'], 'no checkpoint at missing.pt'),
    (['--optimizer=sgd'], "optimizer='sgd' is none of adamw"),
    (['--optimizer=adamw', '--momentum=0.5'], '--momentum has no effect'),
    (['--min_lr=1'], 'min_lr=1.0 must be .* at most learning_rate'),
    (['--shard=True'], '--shard has no effect without torchrun'),
    (['--dataset=nowhere', '--mlp=swish'], "mlp='swish': none of"),  # the mistake before the missing data
    (['--dataset=nowhere', '--lr_schedule=wds'], "lr_schedule='wds' is none of"),
    (['--dropout=2'], 'dropout=2.0 must be'),
    (["--lr_scales={'embedding': 0}"], 'must have a number above 0'),
    (["--lr_scales={'matrix': 'x'}"], 'must have a number above 0'),
    (['--n_expert=6', '--n_group=3', '--topk_group=1', '--n_expert_active=3'], 'too few experts'),
    (['--n_expert=4', '--n_expert_active=5'], 'n_expert_active=5, .*too few experts'),
    (['--n_expert=4', '--expert_pattern='], "expert_pattern='': none of E, D, N"),
    *((flags.split(), f'these settings fails: .*{error}') for flags, error in (
        ('--n_expert=6 --n_group=4 --topk_group=2', 'n_group=4, topk_group=2; '),
        ('--partial_rotary_factor=2', 'partial_rotary_factor=2.0; '),
        ('--mixer_pattern=D --linear_n_value_head=3', 'linear_n_value_head=3; mixers.py'),
        ("--query_scale={'beta':1}", "missing 1 required positional argument: 'length'"))),
    *(([f"--rope_scaling={{'rope_type': 'linear'{more}}}"], f'settings fails: .*{error}') for more, error in (
        ('', 'missing 1'), (", 'factor': 0", 'the loss of the first tokens is nan'),
        (", 'factor': '4'", "'str'"), (", 'factor': 4, 'x': 1", 'unexpected keyword')))])
def test_bad_input_is_one_error_and_writes_nothing(folder, args, message):
    """Nor does it move the run that is there."""
    os.mkdir('out')
    Path('out/ckpt.pt').write_bytes(b'a run')
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        run('train.py', *TOY, '--out_dir=out', *args)
    assert '\n' not in str(error.value)
    assert os.listdir('out') == ['ckpt.pt'] and Path('out/ckpt.pt').read_bytes() == b'a run'


def test_errors_of_a_script_are_one_line_and_a_status(folder):
    done = subprocess.run([sys.executable, str(ROOT / 'train.py'), *TOY, '--dataset=nowhere'],
                          capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith('train.py: data') and done.stderr.count('\n') == 1

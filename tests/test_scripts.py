"""Scripts as users start them: from text to a model, its samples and an export; configs; wrong input."""
import contextlib
import dataclasses
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

import hub
import sample as flat_sample
import train as flat_train
from configurator import configure
from model import GPT, GPTConfig, num_params

CPU = ['--device=cpu', '--dtype=float32']


SHORT = [*TOY[5:], '--max_iters=6']  # of any shape


def advised(text):
    """[[script, argument, ...]] of the commands in what a script says."""
    return [shlex.split(command)[1:] for command in re.findall(r'python [a-z]+\.py[^`\n(]*', str(text))]


def test_advice_leads_from_a_text_to_a_model_its_samples_and_an_export(tmp_path, monkeypatch, capsys):
    """Each command that a script prints is run as it is, but for flags that make it short."""
    monkeypatch.chdir(tmp_path)
    Path('my.txt').write_text('It was the best of times, it was the worst of times.\n' * 400, 'utf-8')

    def follow(said, *flags):
        for command in (commands := advised(said)):
            run(*command, *flags)
        assert commands
        return capsys.readouterr().out

    with pytest.raises(FileNotFoundError, match='data/my_byte is not prepared') as error:
        run('train.py', '--dataset=data/my_byte')
    said = follow(follow(error.value), *TOY[1:], '--block_size=32', '--max_iters=60', '--out_dir=out dir')
    greedy = ['--start=It was', '--num_samples=1', '--max_new_tokens=12', '--temperature=0', *CPU]
    sampled = re.search(r'^It was.*$', follow(said, *greedy), re.M)[0]
    pytest.importorskip('safetensors')
    run('hub.py', 'export', 'out dir', 'mine')
    run('hub.py', 'mine')
    sample, prepare, train = advised(capsys.readouterr().out)
    run(*sample, *greedy)
    assert re.search(r'^It was.*$', capsys.readouterr().out, re.M)[0] == sampled != 'It was'
    run(*prepare)
    run(*train, *SHORT, '--out_dir=fine')
    with pytest.raises(FileNotFoundError, match='data/pystdlib_bpe4096 is not prepared.*`python prepare.py`'):
        run('prepare.py', 'look')


def test_advice_about_tokenizers_leads_to_conversations(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path('my.txt').write_text('It was the best of times, it was the worst of <|im_end|>.\n' * 400, 'utf-8')
    turns = [[('user', f'What is {n}?'), ('assistant', f'It is {n}.<|im_end|>')] for n in range(30)]
    Path('chats.jsonl').write_text('\n'.join(json.dumps({'messages': [
        {'role': role, 'content': content} for role, content in turn]}) for turn in turns), 'utf-8')

    def follow(*command, ways):
        """With each of the flags that the error names; conversations take the first."""
        with pytest.raises(ValueError, match='is a special token of the tokenizer') as error:
            run('prepare.py', *command)
        flags = re.findall(r'--special_tokens=\w+', str(error.value))
        assert len(flags) == 2
        for flag in flags[:ways]:
            run('prepare.py', *command, flag)

    follow('my.txt', '--tokenizer=bpe:300', ways=2)
    run('train.py', '--dataset=my_bpe300', *TOY[1:], '--block_size=128', '--max_iters=6', '--out_dir=base')
    follow('chats.jsonl', '--tokenizer=base', '--block_size=128', ways=1)
    *_, command = advised(capsys.readouterr().out)
    tuned = run(*command, *SHORT[1:], '--out_dir=fine')
    assert tuned['model'].config.document_token is not None and tuned['first_it'] == 0
    assert 'warning' not in capsys.readouterr().out  # the base has this tokenizer
    run('prepare.py', 'chats.jsonl', '--tokenizer=data/my_bpe300', '--block_size=128',
        '--special_tokens=tokens')
    said = capsys.readouterr().out
    assert advised(said)[-1] == [*command[:-1], '--init_from=RUN-WITH-THIS-TOKENIZER']

    run('prepare.py', 'my.txt', '--tokenizer=byte')
    eval_base = ['bench.py', 'eval', '--init_from=base', *CPU]
    with pytest.raises(ValueError, match='another tokenizer than base/ckpt.pt has') as error:
        run(*eval_base, '--dataset=my_byte')
    run('prepare.py', 'my.txt', re.search(r'--tokenizer=\S+', str(error.value))[0], '--out=again',
        '--special_tokens=text')
    run(*eval_base, '--dataset=again')


def test_a_damaged_file_is_named(base):
    pytest.importorskip('safetensors')
    run('hub.py', 'export', 'out', 'mine')
    Path('out/ckpt.pt').rename('mine/ckpt.pt')
    for path in sorted(Path('mine').iterdir()):
        whole, name = path.read_bytes(), path if path.suffix == '.pt' else 'mine'
        for size in {0, min(4097, len(whole) // 3), len(whole) // 2, len(whole) - 2}:
            path.unlink()  # it is mapped
            path.write_bytes(whole[:size])
            with pytest.raises(ValueError, match=f'{path} is .*damaged'):
                run('sample.py', f'--init_from={name}', *CPU)
        path.write_bytes(whole)


def test_texts_count_the_families(capsys):
    """As hub.py does."""
    run('hub.py', 'families')
    count = r'(\d+) (?:published )?families'
    found = re.search(count, capsys.readouterr().out)[1]
    for name in ('README.md', 'docs/architectures.md'):
        assert re.search(count, (ROOT / name).read_text(encoding='utf-8'))[1] == found, name


def test_readme_lines_generate_from_python(base):
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    code = re.search(r'```python\n(.*?)```', readme, re.S)[1].replace("'def '", "'abc'")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    assert out.getvalue().strip() and set(out.getvalue().strip()) <= set('abcdefghijklmnopqrstuvw')


def test_answers_are_written_in_order_and_gone_on_with(base):
    prompts = ['ab', 'c', 'abcdefg', 'u']
    Path('l.txt').write_text('\n'.join(prompts), encoding='utf-8')
    common = [*CPU, '--max_new_tokens=8', '--start=LINES:l.txt', '--num_samples=2', '--stop=e']
    run('sample.py', *common, '--output=one.jsonl', '--batch_size=3')
    whole = Path('one.jsonl').read_text(encoding='utf-8')
    records = [json.loads(line) for line in whole.splitlines()]
    assert [(r['prompt'], r['sample']) for r in records] == [(p, i) for p in prompts for i in range(2)]
    model, tokenizer, _ = hub.load('resume', 'out')
    ids = [tokenizer.encode(p) for p in prompts for _ in range(2)]
    texts, _ = flat_sample.complete(model.eval(), tokenizer, ids, 8, ('e',), top_k=200)
    assert [r['text'] for r in records] == texts and any(r['tokens'] < 8 for r in records)
    for kept in (len(whole) // 2, 3, len(whole)):  # in the middle of a line, of the first, and at the end
        Path('two.jsonl').write_text(whole[:kept], encoding='utf-8')
        run('sample.py', *common, '--output=two.jsonl', '--batch_size=1')
        assert Path('two.jsonl').read_text(encoding='utf-8') == whole
    other = whole.replace('"c"', '"d"')
    Path('other.jsonl').write_text(other, encoding='utf-8')
    with pytest.raises(ValueError, match='is no answer to these prompts'):
        run('sample.py', *common, '--output=other.jsonl')
    assert Path('other.jsonl').read_text(encoding='utf-8') == other
    for i, flags in enumerate((['--speculate=3'], ['--draft=out', '--speculate=2'])):  # which change nothing
        run('sample.py', *common, *flags, f'--output=drafts{i}.jsonl')
        assert Path(f'drafts{i}.jsonl').read_text(encoding='utf-8') == whole
    run('sample.py', *common, '--quantize=int8', '--output=eight.jsonl')
    model, _, _ = hub.load('resume', 'out', int8=True)
    texts, _ = flat_sample.complete(dequantized(model), tokenizer, ids, 8, ('e',), top_k=200)
    assert [json.loads(line)['text'] for line in Path('eight.jsonl').read_text().splitlines()] == texts


def test_sample_script(base, capsys):
    common = [*CPU, '--max_new_tokens=8', '--temperature=0']
    Path('p.txt').write_text('abc', encoding='utf-8')
    Path('none.txt').touch()
    run('sample.py', *common, '--start=FILE:p.txt', '--num_samples=2', '--stop=[1, 2]')
    model, *_ = hub.load('out/ckpt.pt')
    greedy = ''.join(chr(97 + t) for t in made(model.eval(), [[0, 1, 2]], 8, temperature=0)[0])
    assert capsys.readouterr().out.endswith(f"{'-' * 15}\nabc{greedy}\n{'-' * 15}\nabc{greedy}\n{'-' * 15}\n")
    for flag, message in (('--start=a?', r"'\?'.*char vocabulary of 23"), ('--start=', 'is empty'),
                          ('--start=LINES:none.txt', 'empty prompt'), ('--start=FILE:out/ckpt.pt', 'damaged'),
                          ('--top_p=0', 'top_p=0.0 must be at least 1e-06'),
                          ('--min_p=2', 'min_p=2.0 must be .* at most 1'),
                          ('--repetition_penalty=0', 'repetition_penalty=0.0 must be at least 1e-06'),
                          ('--speculate=-1', 'speculate=-1 must'), ('--seed=-1', 'seed=-1 must'),
                          ('--top_k=3', '--top_k has no effect with temperature=0.0'),
                          ('--system=x', '--system has no effect with chat=False'),
                          ('--compile=yes', "compile='yes' is none of")):
        with pytest.raises(ValueError, match=message):
            run('sample.py', *common, flag)


def save_chat_model(path, **options):
    model = chat_model(**options)
    os.makedirs(os.path.dirname(path))
    torch.save({'model': model.state_dict(), 'model_args': dataclasses.asdict(model.config),
                'tokenizer': byte_chat_tokenizer().state()}, path)
    return model


def test_sample_script_chats(base, capsys, monkeypatch):
    model = save_chat_model('chat/ckpt.pt')
    common = ['--chat', *CPU, '--max_new_tokens=8', '--system=Be short.', '--temperature=0']
    monkeypatch.setattr(sys, 'stdin', io.StringIO('Hi\n'))
    with contextlib.suppress(SystemExit):
        run('sample.py', '--out_dir=chat', *common)
    answers = {question: from_nothing(new_chat(model), question) for question in ('Hi', 'Why so?')}
    assert f"> {answers['Hi']}\n" in capsys.readouterr().out
    Path('q.txt').write_text('\n'.join(answers), encoding='utf-8')
    run('sample.py', '--out_dir=chat', *common, '--start=LINES:q.txt')  # each alone
    out = capsys.readouterr().out
    assert all(f"> {question}\n{answer}\n---" in out for question, answer in answers.items())
    state = {**torch.load('chat/ckpt.pt', weights_only=True), 'masked': False}
    torch.save(state, 'chat/ckpt.pt')  # as of a run on text, with the same tokenizer
    run('sample.py', '--out_dir=chat', *common, '--start=LINES:q.txt', '--system=')
    out, tokenizer = capsys.readouterr().out, byte_chat_tokenizer()
    assert out.count('was not trained on conversations: it continues the text') == 1
    for question in answers:
        ids = by_hand(model, tokenizer.encode(question), 8, temperature=0)
        assert not {*ids} & {*tokenizer.stop_tokens}
        assert f"> {question}\n{tokenizer.decode(ids)}\n---" in out


def test_sampling_with_another_context(folder, capsys):
    save_chat_model('out/ckpt.pt', block_size=24)
    scaling = {'rope_type': 'linear', 'factor': 2.0}
    run('sample.py', *CPU, '--max_new_tokens=30', '--temperature=0', '--num_samples=1', '--start=abc',
        '--block_size=60', f'--rope_scaling={scaling}')
    model, *_ = hub.load('out/ckpt.pt', block_size=60, rope_scaling=scaling)
    ids = by_hand(model.eval(), [97, 98, 99], 30, temperature=0)
    ends = [i for i, token in enumerate(ids) if token in byte_chat_tokenizer().stop_tokens]
    text = byte_chat_tokenizer().decode(ids[:min(ends, default=30)])
    assert f"\nabc{text}\n---" in capsys.readouterr().out


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
    assert num_params(model) == params and num_params(model, active=True) == (active or params)


def test_every_config_builds_and_divides(monkeypatch):
    monkeypatch.chdir(ROOT)
    for path in sorted((ROOT / 'config').glob('*.py')):
        settings = {**vars(flat_train), '__name__': 'config'}
        config, args, *_ = configure(settings, 'GPTConfig', argv=[str(path)])
        with torch.device('meta'):
            GPT(GPTConfig(**args))
        for ranks in (1, 2, 4, 8):
            flat_train.share_batch(config['gradient_accumulation_steps'], config['batch_size'], ranks)


@pytest.mark.parametrize('args, message', [
    (['--dataset=nowhere'], 'not prepared'), (['--block_size=5000'], 'train.bin .* needs block_size'),
    (['--vocab_size=20'], 'outside the vocabulary of 20'), (['--n_embd=33'], 'n_head must divide'),
    (['--dtype=float16'], 'float16 needs CUDA'), (['--init_from=missing.pt'], 'no checkpoint at missing.pt'),
    (['--optimizer=sgd'], "optimizer='sgd' is none of adamw"), (['--eval_interval=0'], 'must be at least 1'),
    (['--optimizer=adamw', '--momentum=0.5'], '--momentum has no effect'),
    (['--z_loss=0.1'], '--z_loss has no effect'), (['--dropout=1'], 'dropout=1.0 must be below 1'),
    (['--min_lr=1'], 'min_lr=1.0 must be .* at most learning_rate'),
    (['--batch_size=1000000000'], 'batch_size=1000000000 must be .* at most 1000000'),
    (['--checkpoint_activations=3'], 'no effect with n_layer=2'),
    (['--window=16', '--window_pattern=S'], '--window has no effect with block_size=16'),
    (['--shard=True'], '--shard has no effect without torchrun'),
    (['--beta2=1'], 'beta2=1.0 must be .* at most 0.999')])
def test_bad_input_is_one_error_and_writes_nothing(folder, args, message):
    """Nor does it move the run that is there."""
    os.mkdir('out')
    Path('out/ckpt.pt').write_bytes(b'a run')
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        run('train.py', *TOY, '--out_dir=out', *args)
    assert '\n' not in str(error.value)
    assert os.listdir('out') == ['ckpt.pt'] and Path('out/ckpt.pt').read_bytes() == b'a run'


def test_a_config_file_without_data_or_length_is_told(folder, capsys):
    Path('one.py').write_text('n_layer = 2', encoding='utf-8')
    with pytest.raises(FileNotFoundError, match='openwebtext is not prepared'):
        run('train.py', 'one.py')
    assert 'dataset=openwebtext and max_iters=600000 are' in capsys.readouterr().out


def test_errors_of_a_script_are_one_line_and_a_status(folder):
    done = subprocess.run([sys.executable, str(ROOT / 'train.py'), *TOY, '--dataset=nowhere'],
                          capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith('train.py: data') and done.stderr.count('\n') == 1

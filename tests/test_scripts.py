"""Scripts as users start them: from text to a model and its samples; configs; wrong input."""
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import EVAL, ROOT, TOY, dequantized, made, run, train
from test_examples import fresh_modules
from test_sample import by_hand, byte_chat_tokenizer, chat_model, from_nothing, new_chat

import sample as flat_sample
import train as flat_train
from configurator import configure
from model import GPT, GPTConfig, num_params
from sample import load


def copy_core(folder, *more):
    for name in ['model', 'train', 'sample', 'prepare', 'tokenizer', 'configurator', *more]:
        shutil.copy(ROOT / f'{name}.py', folder)
    shutil.copytree(ROOT / 'config', folder / 'config')


def test_the_core_works_in_an_empty_folder(tmp_path):
    """With device=auto. One process runs all commands, because importing torch takes long."""
    copy_core(tmp_path)
    (tmp_path / 'my.txt').write_text('It was the best of times, it was the worst of times.\n' * 400, 'utf-8')
    (tmp_path / 'chats.jsonl').write_text('\n'.join(json.dumps({'messages': [
        {'role': 'user', 'content': f'What is {n}?'}, {'role': 'assistant', 'content': f'{n}.'}]})
        for n in range(30)), 'utf-8')
    (tmp_path / 'q.txt').write_text('What is 3?\nWhat is 4?', 'utf-8')
    short = '--batch_size=4 --max_iters=4 --eval_iters=2 --compile=False'
    commands = [
        'prepare.py my.txt --tokenizer=bpe:300',
        f'train.py --dataset=my_bpe300 {short} --n_layer=2 --n_embd=48 --block_size=64 --out_dir=base',
        f'train.py --init_from=base --dataset=my_bpe300 {short} --out_dir=tuned',
        'prepare.py chats.jsonl --tokenizer=tuned --block_size=64 --out=talks',
        f'train.py config/chat.py --init_from=tuned --dataset=talks {short} --out_dir=chat',
        'sample.py --out_dir=chat --chat --start=LINES:q.txt --max_new_tokens=5']
    driver = """import runpy, sys
for command in sys.argv[1:]:
    sys.argv = command.split()
    runpy.run_path(sys.argv[0], run_name='__main__')"""
    done = subprocess.run([sys.executable, '-c', driver, *commands], cwd=tmp_path, capture_output=True,
                          text=True, env=os.environ | {'PYTHONPATH': ''})
    assert done.returncode == 0, done.stderr
    said = done.stdout.partition('chat/ckpt.pt: ')[2]
    assert '> What is 3?\n' in said and '> What is 4?\n' in said and 'not trained' not in said


def test_the_models_tests_run_in_a_fork_of_the_core(tmp_path):
    """They skip what needs lab/ and tests/. This runs those about caches."""
    copy_core(tmp_path, 'mixers', 'test_model')
    done = subprocess.run([sys.executable, '-m', 'pytest', '-q', '-rs', '-k', 'cache', 'test_model.py'],
                          cwd=tmp_path, capture_output=True, text=True, env=os.environ | {'PYTHONPATH': ''})
    assert done.returncode == 0, done.stdout
    passed, = re.findall(r'(\d+) passed, \d+ skipped', done.stdout)
    assert int(passed) > 5 and 'needs lab/check.py, tests/formulas.py' in done.stdout


def test_readme_lines_generate_from_python(base):
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    code = re.search(r'```python\n(import.*?)```', readme, re.S)[1].replace("'def '", "'abc'")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    assert out.getvalue().strip() and set(out.getvalue().strip()) <= set('abcdefghijklmnopqrstuvw')


def test_answers_are_written_in_order_to_a_new_file(base):
    prompts = ['ab', 'c', 'abcdefg', 'u']
    Path('l.txt').write_text('\n'.join(prompts), encoding='utf-8')

    model, tokenizer, _ = load('resume', 'out')
    ids = [tokenizer.encode(p) for p in prompts for _ in range(2)]
    speculation = str(ROOT / 'examples/speculation.py')
    for flag, same in (('--batch_size=3', model.eval()), (speculation, model),
                       ('--quantize=int8', dequantized(load('resume', 'out', int8=True)[0]))):
        Path('out.jsonl').unlink(missing_ok=True)
        command = ['sample.py', *EVAL, '--max_new_tokens=8', '--start=LINES:l.txt', '--num_samples=2',
                   '--stop=e', '--output=out.jsonl', flag]
        run(*command)
        found = Path('out.jsonl').read_text('utf-8')
        records = [json.loads(line) for line in found.splitlines()]
        texts, _ = flat_sample.complete(same, tokenizer, ids, 8, ('e',), top_k=200)
        assert [(r['prompt'], r['sample'], r['text']) for r in records] == [
            (p, i, texts.pop(0)) for p in prompts for i in range(2)]
        assert any(r['tokens'] < 8 for r in records)
    with pytest.raises(FileExistsError):
        run(*command)
    assert Path('out.jsonl').read_text('utf-8') == found


def test_sample_script(base, capsys):
    common, context = [*EVAL, '--max_new_tokens=30', '--temperature=0'], dict(
        block_size=60, rope_scaling={'rope_type': 'linear', 'factor': 2.0})  # 16 tokens in the checkpoint
    Path('p.txt').write_text('abc', encoding='utf-8')
    run('sample.py', *common, '--start=FILE:p.txt', '--num_samples=2', "--stop=['1', '2']",
        *(f'--{name}={value}' for name, value in context.items()))
    model, *_ = load('out/ckpt.pt', **context)
    greedy = ''.join(chr(97 + t) for t in made(model.eval(), [[0, 1, 2]], 30, temperature=0)[0])
    assert capsys.readouterr().out.endswith(f"{'-' * 15}\nabc{greedy}\n{'-' * 15}\nabc{greedy}\n{'-' * 15}\n")
    run('sample.py', *common, '--num_samples=1')  # the vocabulary has no newline, the default start
    greedy = ''.join(chr(97 + t) for t in made(load('out')[0].eval(), [[0]], 30, temperature=0)[0])
    assert capsys.readouterr().out.endswith(f"{'-' * 15}\na{greedy}\n{'-' * 15}\n")
    for flag, message in (('--start=a?', r"lacks \['\?'\]"), ('--start=', 'is empty'),
                          ('--stop=', '^stop must have .*Q'), ("--stop=['']", '^stop must have .*Q'),
                          ('--top_p=0', 'top_p=0.0 is not supported'),
                          ('--top_k=3', '--top_k has no effect: it needs temperature')):
        with pytest.raises(ValueError, match=message):
            run('sample.py', *common, flag)
    Path('out/ckpt.pt').write_bytes(Path('out/ckpt.pt').read_bytes()[:9999])
    with pytest.raises(ValueError, match='cannot read out/ckpt.pt'):
        run('sample.py', *common)


def test_sample_script_chats(base, capsys, monkeypatch):
    model = chat_model()
    state = {'model': model.state_dict(), 'model_args': vars(model.config),
             'tokenizer': byte_chat_tokenizer().state()}
    torch.save(state, 'out/ckpt.pt')
    common = ['--chat', *EVAL, '--max_new_tokens=8', '--system=Be short.', '--temperature=0']
    monkeypatch.setattr(sys, 'stdin', io.StringIO('Hi\n'))
    with contextlib.suppress(SystemExit):
        run('sample.py', *common)
    answers = {question: from_nothing(new_chat(model), question) for question in ('Hi', 'Why so?')}
    assert f"> {answers['Hi']}\n" in capsys.readouterr().out
    Path('q.txt').write_text('\n'.join(answers), encoding='utf-8')
    run('sample.py', *common, '--start=LINES:q.txt')  # each as its own conversation
    out = capsys.readouterr().out
    assert all(f"> {question}\n{answer}\n---" in out for question, answer in answers.items())
    torch.save({**state, 'masked': False}, 'out/ckpt.pt')  # a run on text with the same tokenizer
    with pytest.raises(ValueError, match='--system has no effect: it needs chat and chat_template'):
        run('sample.py', *common)
    common.remove('--system=Be short.')
    run('sample.py', *common, '--start=Hi ')  # the space counts
    text = byte_chat_tokenizer().decode(by_hand(model, [*b'Hi '], 8, temperature=0))
    assert f"> Hi \n{text}\n---" in capsys.readouterr().out


def test_a_base_model_continues_typed_texts(base, capsys, monkeypatch):
    model, tok, _ = load('out')
    assert '\n' not in tok.chars
    text = tok.chars[3]
    monkeypatch.setattr(sys, 'stdin', io.StringIO(f'{text}\n'))
    with contextlib.suppress(SystemExit):
        run('sample.py', '--chat', *EVAL, '--max_new_tokens=5', '--temperature=0')
    expected = tok.decode(by_hand(model, tok.encode(text), 5, temperature=0))
    assert f'> {expected}\n> ' in capsys.readouterr().out


def read_config(*argv):
    """train.py's settings for a command line, and the model on the meta device."""
    config, args, *_ = configure({**vars(flat_train), '__name__': 'x'}, 'GPTConfig', argv=argv)
    with torch.device('meta'):
        return config, GPT(GPTConfig(**{'vocab_size': 50257, **args}))  # gpt2.py leaves it to the data


@pytest.mark.parametrize('name, params, active', [
    ('gpt2', 124439808, None), ('llama2_70b', 68976648192, None), ('llama3_8b', 8030261248, None),
    ('mistral_7b', 7241732096, None), ('mixtral_8x7b', 46702792704, 12879925248),
    ('qwen3_0.6b', 596049920, None), ('qwen3_30b_a3b', 30532122624, 3353032704),
    ('deepseek_v2_lite', 15706484224, 2661150208), ('deepseek_v3', 671026404352, 37552282624),
    ('bloom_560m', 559214592, None), ('falcon_7b', 6921720704, None), ('minimind', 25829888, None),
    ('minimind_moe', 145029760, 91945600), ('minimind3', 63912192, None),
    ('minimind3_moe', 198416640, 63936768)])
def test_published_models_have_their_parameters(name, params, active):
    _, model = read_config(f'config/{name}.py')
    assert num_params(model) == params and num_params(model, active=True) == (active or params)


def test_the_sizes_in_the_remarks_of_the_dial():
    sizes = re.findall(r'(\d+): ([\d.]+)M', (ROOT / 'config/dial.py').read_text('utf-8'))
    assert len(sizes) == 5
    for n_layer, millions in sizes:
        _, model = read_config('--vocab_size=257', f'--n_layer={n_layer}', 'config/dial.py')
        assert f"{num_params(model) / 1e6:.1f}" == millions


def test_every_config_builds_and_divides():
    for path in sorted((ROOT / 'config').glob('*.py')):
        config, _ = read_config(str(path))
        for ranks in (1, 2, 4, 8):
            flat_train.share_batch(config['gradient_accumulation_steps'], config['batch_size'], ranks)


@pytest.mark.parametrize('args, command', [
    (['config/small.py'], 'fineweb_edu'), (['config/shakespeare_char.py'], 'shakespeare --tokenizer=char'),
    (['config/dial.py'], 'pystdlib --tokenizer=byte'), ([], 'pystdlib'), (['--dataset=nowhere'], 'SOURCE'),
    (['config/minimind.py'], 'minimind --tokenizer=bpe:6400'), (['--dataset=minimind_sft'], 'minimind_sft')])
def test_the_error_for_missing_data_has_the_command_that_prepares_them(args, command, folder):
    with pytest.raises(FileNotFoundError, match=re.escape(f'run `python prepare.py {command}`')):
        run('train.py', *(str(ROOT / arg) if arg.endswith('.py') else arg for arg in args))


@pytest.mark.parametrize('command', [
    'train.py --dataset=toy', 'lab/check.py', 'bench.py params', 'bench.py decode'])
def test_every_script_begins_with_the_default_file(folder, command, capsys):
    first, n_embd = 'config/default.py: ', 192
    with pytest.raises(ValueError, match=f'n_embd={n_embd}, n_head=7 do not fit: n_head must divide'):
        run(*command.split(), '--n_head=7')
    assert capsys.readouterr().out.startswith(first)
    with pytest.raises((ValueError, FileNotFoundError), match='nowhere'):
        run(*command.split(), '--n_head=7', '--init_from=nowhere.pt')
    assert 'train' in command or first not in capsys.readouterr().out


@pytest.mark.parametrize('args, message', [
    (['--dataset=nowhere'], 'not prepared'), (['--block_size=5000'], 'train.bin .* needs block_size'),
    (['--vocab_size=20'], 'outside the vocabulary of 20'), (['--dtype=float16'], 'float16 needs CUDA'),
    (['--init_from=missing.pt'], 'no checkpoint at missing.pt'),
    (['--optimizer=sgd'], "optimizer='sgd' is not supported: it must be one of adamw"),
    (['--optimizer=adamw', '--momentum=0.5'], '--momentum has no effect'),
    (['--shard=True'], '--shard has no effect: it needs TORCHRUN'),
    (['--mixer_pattern=DC', '--attn_softcap=5'], '--attn_softcap has no effect: it needs mixer_pattern'),
    (['--mixer_pattern=D', '--window=4', '--window_pattern=S'], '--window_pattern has no effect'),
    (['--mixer_pattern=C', '--qk_norm=False'], '--qk_norm has no effect'),
    (["--lr_scales={'embedding': 0}"], 'must have a number above 0'),
    (['--n_layer=4096', '--n_embd=16384'], "ten times this machine's memory"),
    (['--n_layer=1000000'], 'n_layer=1000000 must be at most 4096'), (['--wandb_log=True'], 'wandb'),
    (['--n_expert=6', '--n_group=3', '--topk_group=1', '--n_expert_active=3'], 'too few experts'),
    (['--n_expert=4', '--expert_pattern='], "expert_pattern='' is not supported; choose one of E, D, N"),
    (['--partial_rotary_factor=2'], 'these settings fails: .*partial_rotary_factor=2.0; '),
    (["--rope_scaling={'rope_type': 'linear'}"], 'missing a required')])
def test_bad_input_is_one_error_and_writes_nothing(folder, args, message, monkeypatch):
    """An existing run stays as it is."""
    os.mkdir('out')
    Path('out/ckpt.pt').write_bytes(b'a run')
    monkeypatch.setitem(sys.modules, 'wandb', None)
    with pytest.raises((ValueError, FileNotFoundError, ImportError), match=message) as error:
        run('train.py', *TOY, '--out_dir=out', *args)
    assert '\n' not in str(error.value)
    assert {*os.listdir('out')} <= {'ckpt.pt', 'lock'} and Path('out/ckpt.pt').read_bytes() == b'a run'


@pytest.mark.parametrize('args, message', [
    (['--chat', '--num_samples=5'], '--num_samples has no effect: it needs not chat'),
    (["--rope_scaling={'rope_type': 'linear', 'factor': 2}"], "has no effect: it needs pos == 'rope'"),
    ([str(ROOT / 'examples/speculation.py')], "does not support mixer_pattern='DA'")])
def test_what_sample_cannot_do_is_an_error(folder, args, message):
    train('--out_dir=out', '--max_iters=0', '--pos=learned', '--mixer_pattern=DA', '--linear_n_value_head=2')
    with pytest.raises(ValueError, match=message):
        run('sample.py', '--start=a', *args, *EVAL)


def test_errors_of_a_script_are_one_line_and_a_status(folder):
    """Slurm starts several tasks, but without torchrun."""
    done = subprocess.run([sys.executable, str(ROOT / 'train.py'), *TOY, '--dataset=nowhere'], text=True,
                          capture_output=True, env=os.environ | {'SLURM_NTASKS': '2'})
    assert done.returncode == 1 and done.stderr.startswith('train.py: data') and done.stderr.count('\n') == 1
    assert 'srun torchrun' in done.stdout


def test_the_documented_families_are_those_of_the_command(capsys):
    run('zoo/hub.py', 'families')
    text = (ROOT / 'docs' / 'architectures.md').read_text(encoding='utf-8')
    listed = re.search(r'<!-- families: begin -->\n```\n(.*?)```\n<!-- families: end -->', text, re.S)[1]
    assert listed.splitlines() == sorted(capsys.readouterr().out.splitlines())


def test_each_script_finds_its_device(folder, monkeypatch, capsys):
    """With device=auto; also on a CUDA build without a GPU, and in Jupyter, whose stdout is no file."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, 'stdout', SimpleNamespace(write=sys.stdout.write, flush=sys.stdout.flush))
        run('train.py', *TOY[:-3], '--compile=False', '--max_iters=2')  # without device and dtype
    run('bench.py', 'decode', '--init_from=out', '--max_new_tokens=3', '--prompt_len=2', '--rounds=1')
    assert capsys.readouterr().out.count('device ') == 2
    run('zoo/hub.py', 'export', 'out', 'export')


def documented_commands():
    """(script, arguments) in docstrings, comments and documents, without placeholders. test_extending.py
    runs those of docs/extending.md."""
    found = set()
    shell = '((?:python|torchrun) '
    for path in [*ROOT.glob('*.[mp][dy]'), *ROOT.glob('[!t]*/*.[mp][dy]')]:
        text = re.sub(r' *\\\n[\s#]*', ' ', path.read_text('utf-8')) if path.name != 'extending.md' else ''
        for line in re.findall(rf'^[\s#$]*{shell}.*)$|`{shell}[^`]+)`', text, re.M):
            for command in re.split(' && |  #|  \\(', ''.join(line).replace('\n', ' ')):
                match = re.fullmatch(r'(?:python|torchrun .*?) ?(\w\S+\.py)(.*)', command.strip())
                if match and not re.search(r'\.\.|[A-Z]{4}|[$]|{\w|pytest|sine|costs', command):
                    found.add((match[1], *shlex.split(match[2])))
    return sorted(found)


@pytest.mark.parametrize('command', documented_commands(), ids=' '.join)
def test_documented_commands_have_valid_settings(command, monkeypatch):
    """Runs a script until it has checked its settings."""
    def check(settings, values, tables):
        defaults = {name: one.default for name, one in settings.known.items()}
        for check in checks[:1 + (values.get('init_from', 'scratch') == 'scratch')]:
            check(settings, defaults | values | {'conversations': True, 'records': True}, tables)
        raise StopIteration
    assert (ROOT / command[0]).exists()
    with fresh_modules():  # examples change them
        import configurator
        checks = configurator.check_values, configurator.check_effects
        for function in checks:
            monkeypatch.setattr(configurator, function.__name__, check)
        with pytest.raises((StopIteration, FileNotFoundError)):  # some first load a checkpoint
            run(*command)

"""Tests of configurator."""
import ast
import dataclasses
import importlib.util
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig

import pytest
import torch
from common import ROOT

import configurator
from configurator import configure, one_line_errors, runtime
from model import GPTConfig

transformers = pytest.importorskip('transformers', reason='the oracle of the parity tests')


# configurator -----------------------------------------------------------------------------------------------
CFG_MODEL = '''
from dataclasses import dataclass
raise SystemExit('model.py was imported')

@dataclass
class GPTConfig:
    # sizes ------------------------------
    n_layer: int = 12               # blocks
    n_embd: int = 768
    # positions ---------------------------
    rope_scaling: dict | None = None  # {'type': 'yarn'}
    window: int | None = None
    dropout: 'float' = 0.0
    pattern: tuple[str, ...] = (
        'S',  # over
        'L')  # three lines

    def method(self):
        hidden = 3  # no field
'''


CFG_SCRIPT = '''
"""
A script, as ours are built.
    $ python script.py --batch_size=8
    # no heading
    example = 3
"""
import os
from configurator import configure

ROOT = os.sep
# files ------------------------------
out_dir = 'out'                     # checkpoints go here
start = '\\n'                        # text, FILE:name
# optimizer
learning_rate: float = 6e-4         # peak, after warm-up
min_lr: float | None = None         # None: a tenth
betas: tuple[float, float] = (0.9, 0.95)
max_iters = 100
compile: bool | str = 'auto'
decay_lr = True
stop: str | list | None = None
anything = None
config, model_args, words = configure(globals(), 'GPTConfig', words=1)[:3]
not_a_setting = 3
'''


def cfg_script(folder):
    (folder / 'config').mkdir(exist_ok=True)
    (folder / 'model.py').write_text(CFG_MODEL, encoding='utf-8')
    path = folder / 'script.py'
    path.write_text(CFG_SCRIPT, encoding='utf-8')
    return path


def cfg_run(folder, monkeypatch, *argv):
    """Runs the script as a user would -> its globals, where model_args and config are."""
    monkeypatch.setattr(sys, 'argv', ['script.py', *argv])
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    return runpy.run_path(str(cfg_script(folder)), run_name='__main__')


def cfg_error(folder, monkeypatch, capsys, *argv):
    """The one line on standard error of a command line that exits with code 2."""
    with pytest.raises(SystemExit) as e:
        cfg_run(folder, monkeypatch, *argv)
    out, error = capsys.readouterr()
    assert e.value.code == 2 and error.count('\n') == 1 and error.startswith('script.py: ') and not out
    return error.removeprefix('script.py: ').strip()


def cfg_configure(path, *argv, name='__main__', text='batch_size = 1\nconfigure(globals())', **options):
    """configure() of a script with this text, as if it was started with these arguments."""
    path.write_text(text, encoding='utf-8')
    settings = {'__name__': name, '__file__': str(path)}
    exec(text.partition('configure(')[0], settings)
    return configure(settings, argv=list(argv), **options)


@pytest.mark.parametrize('arg, value', [
    ('--learning_rate=1', 1.0), ('--learning_rate=3e-4', 3e-4), ('--max_iters=1e6', 1000000),
    ('--max_iters=10_000', 10000), ('--out_dir=123', '123'), ('--out_dir=None', 'None'),
    ('--out_dir=true', 'true'), ("--out_dir='a'", "'a'"), ('--out_dir=', ''),
    ('--start=a=b', 'a=b'), ('--start=FILE:x.py', 'FILE:x.py'), ('--start=-', '-'),
    ('--start=3 and 4', '3 and 4'), ('--min_lr=None', None), ('--min_lr=0', 0.0),
    ('--betas=(0.8, 0.9)', (0.8, 0.9)), ('--compile=False', False), ('--compile=None', 'None'),
    ('--compile=auto', 'auto'), ('--compile=max', 'max'), ('--compile', True),
    ('--decay_lr=False', False), ('--decay_lr=false', False), ('--decay_lr=0', False),
    ('--decay_lr=1', True), ('--decay_lr', True),
    ("--stop=['a', 'b']", ['a', 'b']), ('--stop=None', None), ('--stop=12', '12'), ('--stop="a"', '"a"'),
    ('--anything=3', 3), ('--anything=word', 'word'), ('--anything={1: 2}', {1: 2}),
    ('--start=' + '[' * 9999, '[' * 9999),
    ('--n_layer=4', 4), ('--dropout=0', 0.0), ("--rope_scaling={'type': 'yarn'}", {'type': 'yarn'}),
    ('--window=None', None), ("--pattern=('S',)", ('S',))])
def test_cfg_flags(arg, value, tmp_path, monkeypatch):
    name = arg.removeprefix('--').partition('=')[0]
    found = cfg_run(tmp_path, monkeypatch, arg)
    of_model = {'n_layer', 'dropout', 'rope_scaling', 'window', 'pattern'}
    where = found['model_args'] if name in of_model else found['config']
    assert where[name] == value and type(where[name]) is type(value)
    assert name in found['model_args'] or found[name] == value
    assert set(found['model_args']) <= {name} and not found.keys() & of_model


@pytest.mark.parametrize('arg, parts', [
    ('--learing_rate=1', ["--learing_rate=1: ", "'learing_rate'", "'learning_rate'?"]),
    ('--max-iters=1', ["'max-iters'", "'max_iters'?"]),
    ('-max_iters=1', ["'-max_iters'", "'max_iters'?"]),
    ('--n_layers=1', ["'n_layers'", "'n_layer'?"]),
    ('--zzz=1', ["'zzz'", "--help"]), ('--not_a_setting=1', ["'not_a_setting'"]), ('--os=1', ["'os'"]),
    ('--n_layer=2.5', ["--n_layer=2.5: ", "int, got '2.5'"]), ('--n_layer=True', ["int, got 'True'"]),
    ('--n_layer', ["--n_layer: n_layer", "int, got True"]), ('--n_layer=1e999', ["int, got '1e999'"]),
    ('--out_dir', ["str, got True"]), ('--decay_lr=flase', ["True or False, got 'flase'"]),
    ('--decay_lr=2', ["True or False, got '2'"]), ('--min_lr=none', ["float or None, got 'none'"]),
    ('--betas=[1, 2]', ["betas", "tuple, got '[1, 2]'"]), ('--learning_rate=nan', ["float, got 'nan'"]),
    ('--dropout=', ["float, got ''"]), ('nope.py', ["nope.py", "small.py"]),
    ('config/smal.py', ["config/smal.py", "small.py"])])
def test_cfg_errors(arg, parts, tmp_path, monkeypatch, capsys):
    cfg_script(tmp_path).parent.joinpath('config', 'small.py').write_text('max_iters = 1')
    message = cfg_error(tmp_path, monkeypatch, capsys, arg)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize('text, parts', [
    ('max_iters = 1\nlearing_rate = 1', ["'learing_rate'", "'learning_rate'?"]),
    ('max_iters = 2.5', ['max_iters', 'int, got 2.5']),
    ("decay_lr = 'x'", ["True or False, got 'x'"]),
    ('import numpy\nlearning_rate = numpy.float64(1)', ['learning_rate', 'float, got ']),
    ('max_iters = max_itres * 2', ['line 1', 'NameError', 'max_itres']),
    ('max_iters = 1\n\ndef f():\n    return 1 / 0\nf()', ['line 4', 'ZeroDivisionError']),
    ('max_iters = 1\nmax_iters = = 2', ['line 2', 'SyntaxError']),
    ('import no_such_module', ['line 1', 'no_such_module'])])
def test_cfg_file_errors(text, parts, tmp_path, monkeypatch, capsys):
    cfg_script(tmp_path).parent.joinpath('config', 'a.py').write_text(text)
    message = cfg_error(tmp_path, monkeypatch, capsys, 'config/a.py')
    assert message.startswith('config/a.py') and all(part in message for part in parts), message


def test_cfg_order_and_files(tmp_path, monkeypatch, capsys):
    """File over default, later over earlier; a file computes, sees the settings so far, may repeat them."""
    folder = cfg_script(tmp_path).parent / 'config'
    text = ("import math, time\nfrom os import path\n_half = 0.5\nN = 3\n"
            "def twice(x): return [x * _i for _i in (1, 2)][-1]\n"
            "max_iters = twice(max_iters)\nn_embd = 64 * n_layer\nwindow = None\n"
            "out_dir = 'é' + str(time.time() > 0)\nlearning_rate = _half / 1000\ndecay_lr = 0\n"
            "if False: dropout = 0.5\nfor i in range(3): pass\ndel i\n")
    (folder / 'a.py').write_text(text, encoding='utf-8')
    found = cfg_run(tmp_path, monkeypatch, '--max_iters=5', '--n_layer=2', 'config/a.py', '--learning_rate=2',
                    'look')
    assert found['max_iters'] == 10 and found['out_dir'] == 'éTrue' and found['decay_lr'] is False
    assert found['learning_rate'] == found['config']['learning_rate'] == 2.0 and found['words'] == ['look']
    assert found['model_args'] == {'n_layer': 2, 'n_embd': 128, 'window': None}
    found = cfg_run(tmp_path, monkeypatch, 'config/a.py', '--max_iters=5')
    assert found['max_iters'] == 5 and found['model_args']['n_embd'] == 64 * 12


def test_cfg_shows_what_was_set(tmp_path, monkeypatch, capsys):
    """Files by name, flags in a row together, every setting and its value, in lines that can be read."""
    names = [f'a_setting_{i}' for i in range(40)]
    text = ''.join(f'{name} = 0\n' for name in names) + 'configure(globals())'
    (tmp_path / 'a.py').write_text(''.join(f'{name} = {i + 1}\n' for i, name in enumerate(names)))
    (tmp_path / 'empty.py').write_text('')
    cfg_configure(tmp_path / 'x.py', '--a_setting_1=5', '--a_setting_2=6', str(tmp_path / 'a.py'),
                  str(tmp_path / 'empty.py'), '--a_setting_3=7', text=text)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100 < len(out)
    entries = re.split(r'\n(?! )', out.strip())
    assert len(entries) == 4
    assert str(tmp_path / 'a.py') in entries[1] and str(tmp_path / 'empty.py') in entries[2]
    found = [re.findall(r'(\w+) = (\d+)', entry) for entry in entries]
    assert found == [[('a_setting_1', '5'), ('a_setting_2', '6')],
                     [(name, str(i + 1)) for i, name in enumerate(names)], [], [('a_setting_3', '7')]]
    monkeypatch.setenv('RANK', '1')  # only rank 0 prints
    cfg_configure(tmp_path / 'x.py', '--a_setting_1=5', text=text)
    configurator.print0('text')
    assert capsys.readouterr().out == ''


def test_cfg_imported_script(tmp_path, monkeypatch, capsys):
    """Importing a script leaves the command line alone and prints nothing."""
    monkeypatch.setattr(sys, 'argv', ['pytest', '-q', '--max_iters=5', 'nope.py'])
    hook = sys.excepthook
    found = runpy.run_path(str(cfg_script(tmp_path)), run_name='script')
    assert found['max_iters'] == 100 and found['model_args'] == {} and found['words'] == []
    assert capsys.readouterr() == ('', '') and sys.excepthook is hook


def test_cfg_default_file(tmp_path, monkeypatch, capsys):
    """Is loaded first and named, from the script's folder, unless the command line names a file."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / 'scripts' / 'config'
    folder.mkdir(parents=True)
    (folder / 'default.py').write_text('max_iters = 7')
    (folder / 'other.py').write_text('')

    def run(*argv):
        return cfg_configure(folder.parent / 'x.py', *argv, default_file='config/default.py',
                             text="max_iters = 1\nstart = ''\nconfigure(globals())")[0]['max_iters']
    assert run() == 7 and 'config/default.py' in capsys.readouterr().out
    assert run('--start=a.py') == 7 and run('--max_iters=2') == 2 and run('config/other.py') == 1

    def given(*argv):
        config, _, names = cfg_configure(
            folder.parent / 'x.py', *argv, text="max_iters = 1\nstart = ''\nconfigure(globals())",
            default_file='config/default.py', unless='--start=again')
        return config['max_iters'], names
    flags, file = {'start': 'flags'}, {'max_iters': 'config/default.py'}
    assert given('--start=a') == (7, flags) and given('--start=again') == (1, flags)
    assert given('config/default.py', '--start=again') == (7, {**file, **flags}) and given() == (7, {})
    order = ['--start=a', '--max_iters=2', '--start=b']
    assert [*given(*order)[1]] == [*given('--max_iters=2', '--start=a')[1]] == ['max_iters', 'start']
    settings = {'max_iters': 1, '__name__': 'x', '__file__': str(folder.parent / 'x.py')}
    assert configure({**settings, 'start': ''}, default_file='config/default.py')[0]['max_iters'] == 1


def test_cfg_words(tmp_path, capsys):
    def run(words, *argv):
        return cfg_configure(tmp_path / 'x.py', *argv, name='x', words=words)
    assert run(2, 'train', '--batch_size=2', 'my.txt') == ({'batch_size': 2}, {}, ['train', 'my.txt'])
    assert run(1) == ({'batch_size': 1}, {}, []) and run(0) == ({'batch_size': 1}, {})
    for argv in (['train', 'look'], ['train', 'batch_size=2']):
        with pytest.raises(SystemExit) as e:
            run(1, *argv)
        assert e.value.code == 2 and repr(argv[1]) in capsys.readouterr().err


def test_cfg_names_of_other_scripts(tmp_path, monkeypatch, capsys):
    """One file serves all scripts: what another owns is ignored in a file, though not in a flag."""
    (tmp_path / 'train.py').write_text("eval_iters: int = 200 # batches\nnames = dict(a=1)\n"
                                       "config = configure(globals())\nghost = 1\n")
    (tmp_path / 'sample.py').write_text("top_k: int | None = 200\nconfigure(globals())\n"
                                        "def f():\n    probs = 1\n")
    (tmp_path / 'hub.py').write_text("weights = True\nconfigure(globals())\n")
    (tmp_path / 'model.py').write_text("import torch\nclass GPTConfig:\n    n_head: int = 12\n\n"
                                       "    def f(self):\n        local = 1\n")

    def run(*argv):
        return cfg_configure(tmp_path / 'x.py', *argv, text='max_iters = 1\nconfigure(globals())')
    (tmp_path / 'a.py').write_text('eval_iters = 3\nn_head = 4\ntop_k = None\nweights = False\nmax_iters = 9')
    assert run(str(tmp_path / 'a.py')) == ({'max_iters': 9}, {})
    assert re.findall(r'(\w+) =', capsys.readouterr().out) == ['max_iters']
    for name in ('ghost', 'local', 'eval_iter', 'probs'):
        (tmp_path / 'a.py').write_text(f'{name} = 3')
        for arg in (f'--{name}=3', str(tmp_path / 'a.py')):
            with pytest.raises(SystemExit):
                run(arg)
            assert f"{arg}: unknown setting '{name}'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run('--n_head=4')


def test_cfg_flags_of_another_script(tmp_path, capsys):
    """Are handed back as they are, in order; a name that is this script's own, or nobody's, is not."""
    (tmp_path / 'train.py').write_text("max_iters = 100\nlr = 5 * 8\nseed = 2\nconfigure(globals())\n")

    def run(*argv):
        return cfg_configure(tmp_path / 'x.py', *argv, text='seed = 1\nconfigure(globals())',
                             words=math.inf, also='train.py')
    assert run('--max_iters=x', 'a', '--seed=7', '--lr', 'b') == (
        {'seed': 7}, {}, ['a', 'b'], ['--max_iters=x', '--lr'])
    with pytest.raises(SystemExit):
        run('--max_iter=3')
    assert "unknown setting 'max_iter'; did you mean 'max_iters'?" in capsys.readouterr().err


def test_cfg_mistakes_in_a_script_are_named(tmp_path):
    (tmp_path / 'model.py').write_text('class Tiny:\n    n_layer: int = 2\n')
    with pytest.raises(AssertionError, match='n_layer'):
        cfg_configure(tmp_path / 'x.py', model_config='Tiny', text='n_layer = 3\nconfigure(globals())')
    with pytest.raises(TypeError, match='set'):
        cfg_configure(tmp_path / 'x.py', text='a: set = 3\nconfigure(globals())')
    (tmp_path / 'model.py').write_text("class Tiny:\n    n_layer: 'int | None' = 2\n")
    found = cfg_configure(tmp_path / 'x.py', '--n_layer=None', model_config='Tiny')
    assert found == ({'batch_size': 1}, {'n_layer': None})


@pytest.mark.parametrize('flag', ['--help', '-h'])
def test_cfg_help(flag, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as e:
        cfg_run(tmp_path, monkeypatch, '--max_iters=5', flag)
    out = capsys.readouterr().out
    assert e.value.code == 0 and '$ python script.py --batch_size=8' in out
    order = ["# files", "out_dir = 'out'                     # checkpoints go here", "# optimizer",
             "learning_rate: float = 6e-4         # peak", "betas: tuple", "anything = None", "# sizes",
             "n_layer: int = 12               # blocks", "# positions", "dropout: 'float' = 0.0",
             "# three lines"]
    at = [out.rindex(text) for text in order]
    assert at == sorted(at) and out.count('example') == 1
    assert not [name for name in ('not_a_setting', 'hidden', 'ROOT', 'import') if name in out]


CFG_NANOGPT = '''  # nanoGPT's train.py: names and values, without the sizes that GPTConfig owns
out_dir = 'out'; eval_interval = 2000; log_interval = 1; eval_iters = 200; eval_only = False
always_save_checkpoint = True; init_from = 'scratch'; wandb_log = False; wandb_project = 'owt'
wandb_run_name = 'gpt2'; dataset = 'openwebtext'; gradient_accumulation_steps = 5 * 8; batch_size = 12
learning_rate = 6e-4; max_iters = 600000; weight_decay = 1e-1; beta1 = 0.9; beta2 = 0.95; grad_clip = 1.0
decay_lr = True; warmup_iters = 2000; lr_decay_iters = 600000; min_lr = 6e-5; backend = 'nccl'
device = 'cuda'; dtype = 'bfloat16'; compile = True
configure(globals(), 'GPTConfig')
'''.lstrip()


@pytest.mark.parametrize('text, config, model', [
    ("import time\nout_dir = 'out-shakespeare'\nwandb_run_name = 'ft-' + str(time.time())\n"
     "init_from = 'gpt2-xl'\nalways_save_checkpoint = False\nlearning_rate = 3e-5\ndecay_lr = False\n",
     dict(learning_rate=3e-5, decay_lr=False), {}),
    ("wandb_run_name='gpt2-124M'\nblock_size = 1024\ngradient_accumulation_steps = 5 * 8\n"
     "weight_decay = 1e-1\n", dict(gradient_accumulation_steps=40), dict(block_size=1024)),
    ("n_layer = 6\nn_embd = 384 # baby\ndropout = 0.2\nwarmup_iters = 100\n",
     dict(warmup_iters=100), dict(n_layer=6, n_embd=384, dropout=0.2))])
def test_cfg_nanogpt_files(text, config, model, tmp_path):
    """Files as nanoGPT's config/ has them, with the fields that our model.py has."""
    (tmp_path / 'a.py').write_text(text)
    shutil.copy(ROOT / 'model.py', tmp_path)
    got, model_args = cfg_configure(tmp_path / 'x.py', str(tmp_path / 'a.py'), '--compile=False',
                                    text=CFG_NANOGPT, model_config='GPTConfig')
    assert config.items() <= got.items() and model_args == model and got['compile'] is False


def test_cfg_knows_the_fields_of_our_model(tmp_path):
    fields = {f.name: f.default for f in dataclasses.fields(GPTConfig)}
    read = configurator.Settings(ROOT / 'model.py', 'GPTConfig')
    assert {name: ast.literal_eval(node) for name, node in read.defaults.items()} == fields
    assert all(type(default) in read.kinds[name] for name, default in fields.items())


@pytest.mark.parametrize('error, line', [
    (ValueError('n_embd=7: take 8\n  and go on'), 'x.py: n_embd=7: take 8   and go on\n'),
    (FileNotFoundError('no data'), 'x.py: no data\n'), (ValueError(), 'x.py: ValueError\n'),
    (ImportError('pip install wandb'), 'x.py: pip install wandb\n'),
    (KeyboardInterrupt(), 'x.py: interrupted\n'),
    (TypeError('bug'), 'TypeError: bug\n'), (RuntimeError('bug'), 'RuntimeError: bug\n')])
def test_cfg_one_line_errors(error, line, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['/somewhere/x.py'])
    monkeypatch.delenv('FLATGPT_TRACE', raising=False)
    one_line_errors(type(error), error, None)
    assert capsys.readouterr().err.startswith(line)
    monkeypatch.setenv('FLATGPT_TRACE', '1')
    one_line_errors(type(error), error, None)
    assert capsys.readouterr().err.startswith(type(error).__name__)


@pytest.mark.parametrize('text', [
    '[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:27781',
    'NCCL error in: x.cpp:1, internal error\nremote process exited or there was a network error'])
def test_cfg_the_ranks_that_lose_one_say_so_in_a_line(text, monkeypatch, capsys):
    monkeypatch.delenv('FLATGPT_TRACE', raising=False)
    for rank in (None, '1'):
        if rank:
            monkeypatch.setenv('RANK', rank)
        one_line_errors(RuntimeError, RuntimeError(text), None)
        assert ('this rank ends because another one has' in capsys.readouterr().err) == bool(rank)
    download = ConnectionResetError('Connection reset by peer')
    one_line_errors(ConnectionResetError, download, None)
    assert capsys.readouterr().err.endswith(': Connection reset by peer\n')


@pytest.mark.parametrize('error', [
    MemoryError(), RuntimeError('CUDA out of memory. Tried'),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")])
def test_cfg_out_of_memory_names_settings_that_the_script_has(error, capsys):
    one_line_errors(type(error), error, None)
    assert '--' not in capsys.readouterr().err
    scripts = [script for script in configurator.SCRIPTS if (ROOT / script).exists()]
    for script in scripts:
        names = configurator.Settings(ROOT / script).kinds | configurator.Settings(
            ROOT / 'model.py', 'GPTConfig').kinds
        one_line_errors(type(error), error, None, configurator.Settings(ROOT / script).kinds)
        message = capsys.readouterr().err
        advised = re.findall(r'--(\w+)', message)
        assert message.count('\n') == 1 and set(advised) <= names.keys(), (script, message)
        assert advised or script == 'hub.py'
        assert ('gradient_accumulation_steps' in advised) == (script == 'train.py')


def test_cfg_subprocess(tmp_path):
    """As a user sees it: one line, no traceback, the exit code."""
    done = subprocess.run([sys.executable, str(cfg_script(tmp_path)), '--learing_rate=1'], text=True,
                          capture_output=True, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert done.returncode == 2 and done.stdout == '' and done.stderr.count('\n') == 1
    assert done.stderr.startswith('script.py: --learing_rate=1: ')


@pytest.mark.parametrize('script', configurator.SCRIPTS)
def test_cfg_help_and_typos_do_not_wait_for_torch(script, tmp_path):
    for name in ('torch', 'numpy', 'tokenizers', 'safetensors'):  # found first, and not importable
        (tmp_path / f'{name}.py').write_text(f'raise ImportError("{name} was imported")')
    env = {**os.environ, 'PYTHONPATH': str(tmp_path)}
    for arg, code in {'--help': 0, '--no_such_setting=1': 2}.items():
        done = subprocess.run([sys.executable, str(ROOT / script), arg], capture_output=True, text=True,
                              env=env)
        assert done.returncode == code and 'was imported' not in done.stderr, done.stderr


def test_cfg_closed_pipe():
    """`python sample.py | head` is quiet."""
    code = ("import sys, configurator; sys.excepthook = configurator.one_line_errors\n"
            "for i in range(10**6): print('a' * 99)")
    run = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           cwd=ROOT)
    run.stdout.readline()
    run.stdout.close()
    assert run.stderr.read() == b'' and run.wait() == 141
    run.stderr.close()


def test_cfg_runtime_without_cuda(monkeypatch, capsys):
    """device=cpu makes no CUDA call at all, not even to seed (nanoGPT #293, #708)."""
    def no_cuda(*args, **kwargs):
        raise RuntimeError('CUDA was called')
    for name, value in vars(torch.cuda).items():
        if (callable(value) and not isinstance(value, type)
                and getattr(value, '__module__', '').startswith('torch.cuda')):
            monkeypatch.setattr(torch.cuda, name, no_cuda)
    threads = torch.get_num_threads()
    for dtype in ('auto', 'float32', 'bfloat16'):
        run = runtime('cpu', dtype, seed=3)
        first = torch.rand(3)
        assert ((run.device, run.device_type, run.threads) == ('cpu', 'cpu', threads)
                and torch.get_num_threads() == threads)
        assert dtype == 'auto' or run.dtype == getattr(torch, dtype)
        out = capsys.readouterr().out
        assert all(part in out for part in ('cpu', f'{threads} threads', str(run.dtype)[6:]))
        for _ in range(2):  # the context can be had again
            with run.autocast():
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == run.dtype
    runtime('cpu', seed=3)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize('amx, bf16, vendor, dtype, precision', [
    (False, False, 'AuthenticAMD', 'float32', 'medium'), (False, True, 'AuthenticAMD', 'bfloat16', 'medium'),
    (False, False, 'GenuineIntel', 'float32', 'highest'), (True, True, 'GenuineIntel', 'bfloat16', 'highest'),
    (False, False, '', 'float32', 'highest')])
def test_cfg_runtime_cpu_dtype(amx, bf16, vendor, dtype, precision, monkeypatch):
    monkeypatch.setattr(torch.cpu, '_is_amx_tile_supported', lambda: amx)
    monkeypatch.setattr(torch.cpu, '_is_avx512_bf16_supported', lambda: bf16)
    monkeypatch.setattr(configurator, 'cpu_vendor', lambda: f'processor: 0\nvendor_id: {vendor}\n')
    assert runtime('cpu').dtype == getattr(torch, dtype) and torch.get_float32_matmul_precision() == precision
    assert runtime('cpu', bound_by_memory=True).dtype == torch.bfloat16
    assert runtime('cpu', 'float32', bound_by_memory=True).dtype == torch.float32


@pytest.mark.parametrize('capability, dtype', [
    ((9, 0), 'bfloat16'), ((8, 0), 'bfloat16'), ((7, 5), 'float16')])
def test_cfg_runtime_cuda(capability, dtype, monkeypatch, capsys):
    """What runtime asks of CUDA, with the answers of a machine of two GPUs."""
    chosen = []
    answers = dict(is_available=lambda: True, device_count=lambda: 2, set_device=chosen.append,
                   get_device_name=lambda i: 'a GPU', get_device_capability=lambda i: capability)
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.delenv('LOCAL_RANK', raising=False)
    run = runtime('cuda:1')
    assert ((run.device, run.device_type, run.dtype) == ('cuda:1', 'cuda', getattr(torch, dtype))
            and chosen == [1])
    out = capsys.readouterr().out
    assert all(part in out for part in ('cuda:1', 'a GPU', dtype))
    assert torch.get_float32_matmul_precision() == 'high'
    assert runtime('auto', 'float16').device == 'cuda:0' and runtime('cuda', 'float16').dtype == torch.float16
    monkeypatch.setenv('LOCAL_RANK', '1')
    assert runtime('auto').device == 'cuda:1'
    monkeypatch.setenv('LOCAL_RANK', '7')
    with pytest.raises(ValueError, match='^device=cuda:7: .* 2 CUDA'):
        runtime('auto')


def test_cfg_runtime_errors(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: False)
    for settings, parts in {
            ('cuda', 'auto'): ['device=cuda:0', 'no CUDA'], ('mps', 'auto'): ['device=mps', 'no MPS'],
            ('gpu', 'auto'): ['device=gpu'], ('cuda:x', 'auto'): ['device=cuda:x'],
            ('cpu', 'float16'): ['dtype=float16', 'bfloat16', 'CUDA'],
            ('cpu', 'half'): ['dtype=half', 'float32']}.items():
        with pytest.raises(ValueError) as e:
            runtime(*settings)
        assert all(part in str(e.value) for part in parts) and '\n' not in str(e.value)


def test_cfg_runtime_threads():
    assert runtime('cpu', threads=1).threads == torch.get_num_threads() == 1


@pytest.mark.parametrize('device, capability, lacking, line', [
    ('cpu', None, (), None), ('cpu', None, ('g++', 'clang++'), 'no compiler g.. or clang..: .* CXX'),
    ('cpu', None, ('Python.h',), 'no Python.h'), ('cuda:1', (9, 0), (), None),
    ('cuda:1', (9, 0), ('g++', 'clang++', 'gcc'), None), ('cuda:1', (9, 0), ('gcc', 'clang'), 'gcc or clang'),
    ('cuda:1', (9, 0), ('triton',), 'no Triton'), ('cuda:1', (9, 0), ('Python.h',), 'no Python.h'),
    ('cuda:1', (6, 1), (), 'too old'), ('cpu', None, ('ccache',), 'no compiler ccache')])
def test_cfg_what_the_compiler_lacks_is_one_line(device, capability, lacking, line, tmp_path, monkeypatch,
                                                 capsys):
    if 'Python.h' not in lacking:
        (tmp_path / 'Python.h').touch()
    monkeypatch.setattr(sysconfig, 'get_path', lambda *a: str(tmp_path))
    monkeypatch.setattr(shutil, 'which', lambda name: None if name in lacking else name)
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None if name in lacking else name)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda index: capability)
    monkeypatch.delenv('CC', raising=False)
    monkeypatch.setenv('CXX', 'ccache g++' if 'ccache' in lacking else '')
    monkeypatch.delenv('LOCAL_RANK', raising=False)
    assert configurator.can_compile(device) == (line is None)
    out = capsys.readouterr().out
    assert re.fullmatch(f'running eagerly, which is slower: .*{line}.*\n', out) if line else out == ''

"""
All tests: pytest -q -n auto, by pytest-xdist a worker for each core, or pytest -q. Numbers are compared with
an independent oracle: naive loops, float64, transformers, a paper's formula, torch's own optimizers, an
unbroken run. FLATGPT_DATA names a folder with tinyshakespeare.txt and tiktoken_cache/ for the tests of parity
with nanoGPT's data; without it they are skipped.
"""
import ast
import base64
import contextlib
import copy
import csv
import dataclasses
import errno
import functools
import gc
import glob
import gzip
import hashlib
import http.server
import importlib.util
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import types
import unicodedata
from pathlib import Path

if 'PYTEST_XDIST_WORKER' in os.environ:  # before torch: a thread for each worker, and for what it starts
    os.environ.setdefault('OMP_NUM_THREADS', '1')

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import bench as flat_bench
import configurator
import hub
import model as flat
import prepare
import sample as flat_sample
import train as flat_train
from configurator import configure, one_line_errors, runtime
from model import GPT, GPTConfig
from prepare import make_tokenizer
from sample import TextStream, generate, sample_token

transformers = pytest.importorskip('transformers', reason='the oracle of the parity tests')
ROOT = Path(flat.__file__).resolve().parent
# see test_loss_curve
RECORDED_LOSSES = [2.6980, 2.1581, 1.7870, 1.6431, 1.1573, 1.1623, 1.0397, 0.9056, 0.6555, 1.1280, 0.9401,
                   0.7939]


@pytest.fixture(autouse=True)
def same_machine_state():
    """Tests may set threads and the precision of matmuls, none sees what another has set. Signals do what
    they do in a terminal, for the processes that tests start too, also where pytest was started to ignore
    them, as by nohup or in a script's background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in {'SIGTERM', 'SIGHUP'} & vars(signal).keys():  # Windows has no SIGHUP
        signal.signal(vars(signal)[name], signal.SIG_DFL)
    threads, precision, state = (torch.get_num_threads(), torch.get_float32_matmul_precision(),
                                 torch.get_rng_state())
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.set_rng_state(state)


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
config, model_args, words = configure(globals(), 'GPTConfig', words=1)
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


# prepare ----------------------------------------------------------------------------------------------------

PREP_DIR = os.path.dirname(os.path.abspath(prepare.__file__))
PREP_DATA = os.environ.get('FLATGPT_DATA', '')
PREP_TEXT = os.path.join(PREP_DATA, 'tinyshakespeare.txt')
PREP_AWKWARD = ["  two  spaces ", "\n\n\n", "\r\n", "\t", " ", "12345678901", "it's", "IT'S", "don't", "x1y2",
                "...", "中文文本，没有空格。", "日本語\n", "한국어", "🙂🙃",
                "e\u0301", "नमस्ते", "\u00a0", "\u3000", "word",
                "Word", "WORD", "a\n", "9\n", "9 ", "z \n", "if x:\n        return y\n", "'", "'s",
                "/", "/\n", ")\n"]


def prep_awkward(n, seed=0):
    rng = random.Random(seed)
    return ''.join(rng.choice(PREP_AWKWARD) for _ in range(n))


def prep_gpt2(monkeypatch):
    pytest.importorskip('tiktoken')
    cache = os.path.join(PREP_DATA, 'tiktoken_cache')
    if 'TIKTOKEN_CACHE_DIR' not in os.environ and os.path.isdir(cache):
        monkeypatch.setenv('TIKTOKEN_CACHE_DIR', os.path.abspath(cache))
    try:
        return prepare.make_tokenizer('gpt2')
    except OSError as e:
        pytest.skip(f"GPT-2's table is not here: {e}")


PREP_WORDS = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def prep_toy_bpe(pattern=PREP_WORDS):
    """a BPE with a few merges, made here: no table has to be downloaded"""
    pytest.importorskip('tiktoken')
    tokens = [bytes([i]) for i in range(256)]
    tokens += [b' a', b'th', b'the', b' the', b'\n ', b'\n  ', b'12', b'  ', b'\n\n']
    ranks = ''.join(f'{base64.b64encode(token).decode()} {i}\n' for i, token in enumerate(tokens))
    return prepare.TiktokenTokenizer('toy', pattern, {'<|endoftext|>': len(tokens)}, ranks)


def prep_run(argv, monkeypatch, capsys):
    """prepare.py as a user runs it, in this process: (exit code, stdout, stderr)"""
    monkeypatch.setattr(sys, 'argv', ['prepare.py', *map(str, argv)])
    code = 0
    try:
        runpy.run_path(os.path.join(PREP_DIR, 'prepare.py'), run_name='__main__')
    except SystemExit as e:
        code = e.code or 0
    except (ValueError, OSError):
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.excepthook = sys.__excepthook__
    return code, *capsys.readouterr()


def prep_files(folder):
    paths = [os.path.join(where, name) for where, _, names in os.walk(folder) for name in names]
    return sorted(os.path.relpath(path, folder) for path in paths)


def prep_ids(folder, split, dtype='<u2'):
    return np.fromfile(os.path.join(folder, f'{split}.bin'), dtype)


def prep_source(*texts):
    """A Source of these documents; a single one is a text that is cut for train and val."""
    return prepare.Source('x', 'x', lambda: ([text] for text in texts))


def prep_texts(source, fraction=0.1):
    """(split, blocks, is a document) as prepare.py makes them of a source."""
    return prepare.planned_texts(source, prepare.plan_splits(source, prepare.scan(source), fraction))


# whole runs -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('tokenizer, n_train, n_val, vocab, name', [
    ('char', 1_003_854, 111_540, 65, 'shakespeare_char'), ('gpt2', 301_966, 36_059, 50257, 'shakespeare')])
def test_prepare_shakespeare_as_nanogpt(tokenizer, n_train, n_val, vocab, name, tmp_path, monkeypatch,
                                        capsys):
    if not os.path.exists(PREP_TEXT):
        pytest.skip(f'no {PREP_TEXT}: set FLATGPT_DATA to the folder with tinyshakespeare.txt')
    if tokenizer == 'gpt2':
        prep_gpt2(monkeypatch)
    with open(PREP_TEXT, encoding='utf-8', newline='') as f:
        text = f.read()
    monkeypatch.chdir(tmp_path)
    os.makedirs('data/shakespeare')
    with open('data/shakespeare/input.txt', 'w', encoding='utf-8', newline='') as f:
        f.write(text)
    code, stdout, _ = prep_run(['shakespeare', f'--tokenizer={tokenizer}'], monkeypatch, capsys)
    folder = f'data/{name}'
    meta = prepare.read_meta(folder)
    assert code == 0
    assert (meta['train_tokens'], meta['val_tokens'], meta['vocab_size']) == (n_train, n_val, vocab)
    assert stdout.rstrip().endswith(f'python train.py --dataset={name}') and f'{n_train:,}' in stdout
    cut = int(len(text) * 0.9)
    if tokenizer == 'char':                                      # nanoGPT's ids: characters in sorted order
        ids = {char: i for i, char in enumerate(sorted(set(text)))}
        assert prep_ids(folder, 'train').tolist() == [ids[c] for c in text[:cut]]
        assert prep_ids(folder, 'val').tolist() == [ids[c] for c in text[cut:]]
    else:
        import tiktoken
        assert prep_ids(folder, 'val').tolist() == tiktoken.get_encoding('gpt2').encode_ordinary(text[cut:])
    assert prepare.load_tokenizer(folder).decode(prep_ids(folder, 'val')) == text[cut:]
    for name, digest in meta['checksum'].items():
        with open(os.path.join(folder, name), 'rb') as f:
            assert hashlib.sha256(f.read()).hexdigest() == digest


def test_prepare_default_is_the_standard_library(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = prepare.find_source(prepare.source)
    assert prepare.output_folder(None, found, found.tokenizer) == prepare.FIRST_RUN
    default = runpy.run_path(os.path.join(PREP_DIR, 'config', 'default.py'))
    assert prepare.dataset_name(prepare.FIRST_RUN) == default['dataset']
    code, stdout, _ = prep_run(['--tokenizer=byte'], monkeypatch, capsys)  # quicker than bpe:4096
    meta = prepare.read_meta('data/pystdlib_byte')
    assert code == 0 and stdout.rstrip().endswith('next: python train.py --dataset=pystdlib_byte')
    assert 5e6 < meta['train_bytes'] < 3e7 and 0.1 < meta['val_bytes'] / meta['train_bytes'] < 0.13
    ids = np.concatenate([prep_ids('data/pystdlib_byte', split) for split in ('train', 'val')])
    read, root = [], sysconfig.get_paths()['stdlib']
    monkeypatch.setattr(prepare, 'read_text', lambda path, errors=None: read.append(path) or [])
    prepare.collections.deque(prepare.find_source('pystdlib').documents(), maxlen=0)
    read = read[len(read) // 2:]  # each is read before, to see whether it is UTF-8
    parts = [os.path.relpath(path, root).split(os.sep) for path in read]
    assert parts == sorted(parts) and len(set(map(tuple, parts))) == len(parts)
    assert not {'test', 'tests', 'idle_test', 'site-packages'} & {name for path in parts for name in path}
    full = [path for path in read if os.path.getsize(path)]
    assert ids.max() == 256 and (ids == 256).sum() == len(full)  # one end of text a document
    with open(os.path.join(root, 'dataclasses.py'), 'rb') as f:
        whole = f.read()
    both = [prep_ids('data/pystdlib_byte', split).astype(np.uint8).tobytes() for split in ('train', 'val')]
    assert sum(part.count(whole + b'\0') for part in both) == 1        # 256, end of text, as a byte


def test_prepare_folder_glob_and_split_by_document(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.makedirs('notes/deep')
    rng, texts = random.Random(1), {}
    for i in range(40):
        path = f'notes/deep/{i:02d}.md' if i % 2 else f'notes/{i:02d}.txt'
        texts[path] = f'note {i}: ' + 'é🙂 text\n' * rng.randrange(1, 60)
    texts['notes/empty.txt'] = ''
    for path, text in texts.items():
        with open(path, 'w', encoding='utf-8', newline='') as f:
            f.write(text)
    code, stdout, _ = prep_run(['notes', '--tokenizer=char'], monkeypatch, capsys)
    assert code == 0 and '40 documents' in stdout and '1 left out' in stdout
    tok = prepare.load_tokenizer('data/notes_char')
    chars = sorted(set(''.join(texts.values())))
    assert tok.n_vocab == len(chars) + 1 and tok.eot == len(chars)
    documents = {}
    for split in ('train', 'val'):
        parts = tok.decode(prep_ids('data/notes_char', split)).split('<|endoftext|>')
        assert parts[-1] == ''
        documents[split] = parts[:-1]
    order = [texts[path] for path in sorted(texts, key=lambda path: path.split('/')) if texts[path]]
    assert sorted(documents['train'] + documents['val']) == sorted(order)     # each exactly once, whole
    assert all(part == [text for text in order if text in part] for part in documents.values())  # in order
    sizes = {split: len(''.join(part).encode()) for split, part in documents.items()}
    assert abs(sizes['val'] / sum(sizes.values()) - 0.1) < 0.05
    meta = prepare.read_meta('data/notes_char')
    assert (meta['train_bytes'], meta['val_bytes']) == (sizes['train'], sizes['val'])
    code, stdout, _ = prep_run(['notes/**/*.md', '--out=md'], monkeypatch, capsys)
    assert code == 0 and '20 documents' in stdout and '--dataset=md' in stdout
    found = prepare.find_source('notes/**/*.md')
    assert prepare.output_folder(None, found, 'byte') == os.path.join('data', 'notes_byte')


@pytest.mark.parametrize('sizes', [
    [1, 1], [700, 35000], [35000, 700], [5] * 5, [1] * 1000, [10_000] + [10] * 99])
def test_prepare_split_never_starves_a_side(sizes):
    plan = prepare.split_documents(sizes, 0.1)
    val = sum(size for size, split in zip(sizes, plan) if split == 'val')
    assert 0 < val < sum(sizes) and len(plan) == len(sizes)
    assert plan == [split for split in prepare.split_documents([0, *sizes, 0], 0.1) if split]  # empty: None
    if max(sizes) <= 0.1 * sum(sizes):
        assert abs(val - 0.1 * sum(sizes)) <= max(sizes)
    else:
        assert val <= max(0.2 * sum(sizes), min(sizes))


def test_prepare_json_lines_are_documents(tmp_path, monkeypatch, capsys):
    """A record, a document: as if each was a file, whatever the field, mixed with text files or not."""
    monkeypatch.chdir(tmp_path)
    texts = [f'tale {i}\u2028 "é🙂" \\ \r\n' * (i % 7 + 1) for i in range(300)]
    os.makedirs('files')
    os.makedirs('both')
    for i, text in enumerate(texts):
        Path(f'files/{i:03d}.txt').write_text(text, encoding='utf-8', newline='')
    lines = [json.dumps({'id': i, 'story': text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    lines[5:5] = ['', '  ', json.dumps({'story': '', 'id': None})]
    Path('tales.jsonl').write_bytes('\ufeff'.encode() + '\r\n'.join(lines).encode())
    Path('both/0.JSONL').write_text('\n'.join(lines[:100]), encoding='utf-8')
    Path('both/1.txt').write_text('not json', encoding='utf-8')
    out = prep_run(['tales.jsonl', '--field=story', '--tokenizer=char'], monkeypatch, capsys)[1]
    assert '300 documents' in out and '1 left out' in out
    prep_run(['files', '--tokenizer=char'], monkeypatch, capsys)
    for split in ('train', 'val'):
        assert np.array_equal(prep_ids('data/tales_char', split), prep_ids('data/files_char', split))
    assert '98 documents' in prep_run(['both', '--field=story'], monkeypatch, capsys)[1]
    Path('one.jsonl').write_text('{"text": "the only document is cut"}')
    assert prep_run(['one.jsonl'], monkeypatch, capsys)[0] == 0
    whole = [*prep_ids('data/one_byte', 'train'), *prep_ids('data/one_byte', 'val')]
    assert bytes(whole) == b'the only document is cut'


def test_prepare_splits_text_at_marks_whatever_the_blocks():
    rng = random.Random(0)
    words = ['<|endoftext|>', '<|endoftext', '|>', ' ', '\n', '\n\n', 'a', 'tale', '<', 'é🙂', ' \u3000']
    for n in range(400):
        text = ''.join(rng.choice(words[n % 2:]) for _ in range(rng.randrange(40)))
        parts = re.split(r'\s*<\|endoftext\|>\s*', text)
        wanted = [text] if len(parts) == 1 else [part.rstrip() if i else part for i, part in enumerate(parts)
                                                 if part.strip()]
        if len(parts) > 1 and parts[-1].strip():
            assert wanted[-1] == parts[-1].rstrip()
        for size in (1, 3, 100):
            blocks = [text[i:i + size] for i in range(0, len(text), size)]
            assert [''.join(found) for found in prepare.split_at_marks(blocks, 'x')] == wanted, text


def test_prepare_marks_gz_and_standard_input(tmp_path, monkeypatch, capsys):
    """Marks, files of their own, JSON lines, each of these compressed, or through a pipe: the same tokens."""
    monkeypatch.chdir(tmp_path)
    texts = [f'tale {i} goes ' + 'on and é🙂 on ' * (i % 9 + 1) for i in range(60)]
    texts = [text.strip() for text in texts]
    marked = '\n<|endoftext|>\n\n'.join(texts) + '<|endoftext|>\n'
    lines = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
    os.makedirs('files')
    for i, text in enumerate(texts):
        Path(f'files/{i:02d}.txt').write_text(text, encoding='utf-8')
    Path('marks.txt').write_text(marked, encoding='utf-8', newline='')
    Path('marks.txt.gz').write_bytes(gzip.compress(marked.encode()))
    two = gzip.compress(lines[:999].encode()) + gzip.compress(lines[999:].encode())  # as `cat a.gz b.gz`
    Path('lines.jsonl.gz').write_bytes(two)
    made = {}
    for name, source, data in (('files', 'files', None), ('marks', 'marks.txt', None),
                               ('gz', 'marks.txt.gz', None), ('lines', 'lines.jsonl.gz', None),
                               ('pipe', '-', marked), ('json', '-', lines)):
        if data is not None:
            monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(data.encode())))
        code, stdout, _ = prep_run([source, f'--out={name}', '--tokenizer=char'], monkeypatch, capsys)
        assert code == 0 and '60 documents' in stdout
        assert stdout.count('split at 60 <|endoftext|> marks') == (name in ('marks', 'gz', 'pipe'))
        assert 'standard input: split' in stdout or name != 'pipe'  # and not the file that it is kept in
        made[name] = [prep_ids(f'data/{name}', split).tolist() for split in ('train', 'val')]
    assert len(set(map(str, made.values()))) == 1 and made['gz'][0].count(max(made['gz'][0])) > 50
    found = prepare.find_source('lines.jsonl.gz')
    assert prepare.output_folder(None, found, 'byte') == os.path.join('data', 'lines_byte')


def test_prepare_replaces_what_is_no_text_only_when_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path('latin.txt').write_bytes(b'caf\xe9 au lait, ' * 100 + b'\xf0\x9f')
    Path('latin.jsonl').write_bytes(b'{"text": "caf\xe9"}\n' * 3)
    for name in ('latin.txt', 'latin.jsonl'):
        assert 'latin' in prep_run([name], monkeypatch, capsys)[2]
        assert prep_run([name, '--errors=replace'], monkeypatch, capsys)[0] == 0
        ids = [*prep_ids('data/latin_byte', 'train'), *prep_ids('data/latin_byte', 'val')]
        assert prepare.ByteTokenizer().decode(ids).startswith('caf\ufffd')


def test_prepare_shards_are_downloaded_checked_and_read_in_place(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    gpt2 = prep_gpt2(monkeypatch)
    ids = [np.array([50256, *gpt2.encode(f'Shard number {i}. ' * 9)], '<u2') for i in range(4)]
    asked, broken = [], {}

    def shard(tokens, magic=20240520, version=1, n=None):
        head = np.zeros(256, '<i4')
        head[:3] = magic, version, len(tokens) if n is None else n
        return head.tobytes() + tokens.tobytes()

    def fetch_rest(url, part, size):
        asked.append(url)
        i = int(url[-10:-4])
        Path(part).write_bytes(broken.get(i, shard(ids[i])))
    monkeypatch.setattr(prepare, 'fetch_rest', fetch_rest)
    folder = os.path.join('data', 'fineweb_edu_gpt2')
    found = prepare.find_source('fineweb_edu')
    assert prepare.output_folder(None, found, found.tokenizer) == folder
    for bad, message in ((shard(ids[2], magic=20240801), '20240520'), (shard(ids[2], version=2), 'version 2'),
                         (shard(ids[2], n=10**8), 'bytes'), (b'<html>', 'shard'), (b'', 'shard')):
        broken[2] = bad
        with pytest.raises(ValueError, match=message) as e:
            prepare.fetch_shards(folder, found, 3)
        assert '000002.bin sent' in str(e.value) and '\n' not in str(e.value)
        assert sorted(os.listdir(folder)) == ['finewebedu_train_000001.bin', 'finewebedu_val_000000.bin']
    broken.clear()
    asked.clear()
    Path(folder, 'train.bin').write_bytes(b'xx')  # of an earlier run
    meta = prepare.fetch_shards(folder, found, 3)
    assert [url.rpartition('/')[2] for url in asked] == [f'finewebedu_train_00000{i}.bin' for i in (2, 3)]
    assert asked[0].startswith('https://huggingface.co/datasets/kjj0/finewebedu10B-gpt2/resolve/main/')
    train, val = (prepare.Bins(folder, split, vocab_size=50257) for split in ('train', 'val'))
    assert train.n_tokens == meta['train_tokens'] == sum(map(len, ids[1:])) and val.n_tokens == len(ids[0])
    assert np.array_equal(train.read([0], 8)[0], ids[1][:9])
    assert meta['bytes_per_token'] == len('Shard number 0. ' * 9) / len(ids[0])
    assert prepare.load_tokenizer(folder).decode(ids[0][1:]) == 'Shard number 0. ' * 9
    Path(folder, 'finewebedu_train_000003.bin').write_bytes(shard(ids[3], magic=1))
    with pytest.raises(ValueError, match='000003.bin.*20240520'):
        prepare.Bins(folder, 'train')
    prepare.fetch_shards(folder, found, 3)
    assert prepare.Bins(folder, 'train').n_tokens == train.n_tokens
    assert '1 more in' not in capsys.readouterr().out
    prepare.fetch_shards(folder, found, 2)
    assert '1 more in' in capsys.readouterr().out


def test_prepare_many_documents_in_bounded_memory_and_time(tmp_path):
    """100,000 records of JSON lines: their sizes are all that is kept."""
    pytest.importorskip('resource')
    with open(tmp_path / 'a.jsonl', 'w', encoding='utf-8') as f:
        for i in range(100_000):
            f.write(f'{{"text": "record {i}, and some text of its own"}}\n')
    code = ("import resource, sys; sys.argv = ['prepare.py']; import prepare\n"
            "used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "source = prepare.find_source('a.jsonl'); before = used()\n"
            "plan = prepare.plan_splits(source, prepare.scan(source), 0.1)\n"
            "texts = prepare.planned_texts(source, plan)\n"
            "meta = prepare.write_dataset('d', texts, prepare.make_tokenizer('byte'), 'x')\n"
            "print(used() - before, meta['train_tokens'] + meta['val_tokens'] - meta['train_bytes']"
            " - meta['val_bytes'])")
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([PREP_DIR, os.environ.get('PYTHONPATH', '')])}
    done = subprocess.run([sys.executable, '-c', code], env=env, check=True, capture_output=True, text=True,
                          cwd=tmp_path)
    grown, ends = map(int, done.stdout.split()[-2:])
    assert grown * (1 if sys.platform == 'darwin' else 1024) < 60 << 20 and ends == 100_000


def test_prepare_a_new_source_and_tokenizer_are_one_entry_each(tmp_path, monkeypatch, capsys):
    def tales():
        def documents():
            for i in range(20):
                yield [f'tale {i} ', 'goes on']
        return prepare.Source('tales', 'tales 1.0', documents)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(prepare.SOURCES, 'tales', tales)
    monkeypatch.setitem(prepare.MAKERS, 'reversed', lambda characters, **_:
                        prepare.CharTokenizer(characters[::-1], len(characters)))
    source = prepare.find_source('tales')
    seen = prepare.scan(source)
    assert seen.n_documents == 20 and seen.characters[:2] == ' 0' and seen.n_bytes == seen.n_characters
    tok = prepare.make_tokenizer('reversed', seen.characters, True)
    prepare.write_dataset('data/t', prep_texts(source), tok, source.label)
    text = prepare.load_tokenizer('data/t').decode(prep_ids('data/t', 'train'))
    assert text.startswith('tale 1 goes on' + prepare.EOT)
    assert prepare.read_meta('data/t')['source'] == 'tales 1.0'
    assert 'tales' in str(pytest.raises(OSError, prepare.find_source, 'none').value)


def test_prepare_shows_progress_while_it_scans_and_encodes(monkeypatch, capsys):
    clock = itertools.count(0, 6)
    monkeypatch.setattr(prepare.time, 'time', lambda: next(clock))
    source = prepare.Source('x', 'x', lambda: [['a' * 10**6] * 9])
    prepare.scan(source)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3 and '2.0 MB' in lines[0] and '9.0 MB' in lines[-1]
    prepare.scan(prep_source('quick'))
    assert capsys.readouterr().out == ''
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
    progress = prepare.Progress('work', total=10**7)
    for _ in range(10):
        progress.add(10**6)
    progress.close()
    out = capsys.readouterr().out
    assert out.count('\n') == 1 and out.count('\r') == 11 and ' 10.0 of 10.0 MB' in out


def test_prepare_bad_input_is_one_line_and_leaves_what_was_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path / 'nothing'))
    with open('latin.txt', 'wb') as f:
        f.write(b'x' * (1 << 20) + b'caf\xe9 au lait')
    for name, data in (('empty.txt', b''), ('short.txt', b'x'), ('cut.txt', 'abc🙂'.encode()[:-1]),
                       ('good.txt', b'some good text, enough for two parts'),
                       ('broken.jsonl', b'{"text": "a"}\n\n{"text": "b"\n'),
                       ('list.jsonl', b'{"text": "a"}\n["text"]\n'), ('deep.jsonl', b'[' * 200_000),
                       ('cut.txt.gz', gzip.compress(b'text' * 99)[:-9]), ('plain.txt.gz', b'text'),
                       ('latin.jsonl', b'{"text": "caf\xe9"}'), ('number.jsonl', b'{"text": 3}'),
                       ('half.jsonl', b'{"text": "a"}\n{"text": "\\ud800"}\n')):
        with open(name, 'wb') as f:
            f.write(data)
    os.mkdir('nofiles')
    assert prep_run(['good.txt', '--out=d'], monkeypatch, capsys)[0] == 0
    before = {name: Path('data/d', name).read_bytes() for name in prep_files('data/d')}
    table = [(['latin.txt'], ['latin.txt', '0xe9', f'offset {(1 << 20) + 3}']),
             (['cut.txt'], ['cut.txt', 'offset 3']),
             (['cut.txt.gz'], ['cut.txt.gz is damaged']), (['plain.txt.gz'], ['plain.txt.gz is damaged']),
             (['good.txt', 'cut.txt'], ["'cut.txt' is one source too many"]),
             (['good.txt', '--errors=ignore'], ["errors='ignore'", 'strict or replace']),
             (['good.txt', '--tokenizer=data/x'], ['python prepare.py my.txt --out=x']),
             (['fineweb', '--shards=104'], ['shards=104: fineweb has 1 to 103']),
             (['fineweb', '--tokenizer=byte'], ["tokenizer='byte'", "gpt2's"]),
             (['empty.txt'], ['empty.txt', 'empty']), (['short.txt'], ['short.txt', 'too few']),
             (['nofiles'], ['nofiles', 'no such']), (['none.txt'], ['none.txt', *prepare.SOURCES]),
             (['broken.jsonl'], ['broken.jsonl, line 3']), (['list.jsonl'], ['list.jsonl, line 2']),
             (['deep.jsonl'], ['deep.jsonl, line 1']),
             (['latin.jsonl'], ['latin.jsonl, line 1', '0xe9 at its offset 13', '--errors=replace']),
             (['number.jsonl'], ['number.jsonl, line 1']), (['half.jsonl'], ['half.jsonl, line 2']),
             (['broken.jsonl', '--field=story'], ["broken.jsonl, line 1", "'story'", '--field']),
             (['*.none'], ['*.none']), (['good.txt', '--procs=0'], ['procs=0']),
             (['good.txt', '--val_fraction=1.0'], ['val_fraction=1.0', 'between 0 and 1']),
             (['good.txt', '--tokenizer=gpt3'], ["'gpt3'", 'cl100k_base']),
             (['good.txt', '--tokenizer=no/such'], ['python hub.py no/such'])]
    for argv, parts in table:
        for where in ('d', 'fresh'):                 # over an earlier folder, and to a new one
            code, _, stderr = prep_run([*argv, f'--out={where}', '--overwrite=True'], monkeypatch, capsys)
            assert code == 1 and len(stderr.strip().splitlines()) == 1, (argv, code, stderr)
            assert all(part in stderr for part in parts), stderr
    Path('other.txt').write_text('another text, of two parts too')
    stderr = prep_run(['other.txt', '--out=d'], monkeypatch, capsys)[2]
    assert 'data/d holds data of good.txt, not of other.txt' in stderr and '--overwrite=True' in stderr
    assert os.listdir('data') == ['d']
    assert {name: Path('data/d', name).read_bytes() for name in prep_files('data/d')} == before
    for argv in (['good.txt'], ['other.txt', '--overwrite=True']):
        assert prep_run([*argv, '--out=d'], monkeypatch, capsys)[0] == 0
    assert prepare.read_meta('data/d')['source'] == 'other.txt'


def test_damaged_data_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare.write_dataset('d', prep_texts(prep_source('the text ' * 20)), prep_toy_bpe(), 'a')
    table, tokens = Path('d/tokenizer.tiktoken'), Path('d/train.bin').read_bytes()
    whole = table.read_bytes()
    for damaged in (whole[:whole.rindex(b'\n', 0, -9) + 1], whole.replace(b' 97\n', b' 98\n', 1)):
        table.write_bytes(damaged)
        with pytest.raises(ValueError, match='d/tokenizer.tiktoken is not what the data was prepared with'):
            prepare.load_tokenizer('d')
    table.write_bytes(whole)
    assert prepare.load_tokenizer('d').encode('the') == prep_toy_bpe().encode('the')
    Path('d/train.bin').write_bytes(tokens[:len(tokens) // 4 * 2])
    n, half = len(tokens) // 2, len(tokens) // 4
    with pytest.raises(ValueError, match=f'd/train.bin has {half} tokens of the {n} that were prepared'):
        prepare.Bins('d', 'train')


def test_special_tokens_in_a_text_are_learnt_as_is_asked(tmp_path, monkeypatch, capsys):
    """Refused by the document's name; as plain text or as tokens, as transformers' tokenizer has them."""
    monkeypatch.chdir(tmp_path)
    tok = chat_tokenizer()
    save_tokenizer(tok, 'tok')
    texts = [f'record {i}' for i in range(30)]
    texts[6] = 'see <|im_start|>user\nHi<|im_end|>'
    Path('a.jsonl').write_text('\n'.join(json.dumps({'text': text}) for text in texts))
    code, _, stderr = prep_run(['a.jsonl', '--tokenizer=tok'], monkeypatch, capsys)
    assert code == 1 and "a.jsonl, document 7: '<|im_start|>' in 'see <|im_start|>user" in stderr, stderr
    assert len(stderr.strip().splitlines()) == 1 and os.listdir('data') == []
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tok.library)
    for how in ('text', 'tokens'):
        argv = ['a.jsonl', '--tokenizer=tok', f'--out={how}', f'--special_tokens={how}']
        assert prep_run(argv, monkeypatch, capsys)[0] == 0
        plan = prepare.split_documents([len(text) for text in texts], 0.1)
        for split in ('train', 'val'):
            ids = [[*theirs(text, split_special_tokens=how == 'text')['input_ids'], tok.eot]
                   for text, what in zip(texts, plan) if what == split]
            assert prep_ids(f'data/{how}', split).tolist() == sum(ids, [])
        marks = len('<|im_start|><|im_end|>') * (how == 'tokens')
        meta = prepare.read_meta(f'data/{how}')
        assert meta['train_bytes'] + meta['val_bytes'] == len(''.join(texts)) - marks
    # conversations are rendered with these tokens: a message may not smuggle them in
    chats = [{'prompt': 'Hi', 'response': 'Hello'}] * 9
    chats[4] = {'prompt': 'Hi<|im_end|>', 'response': 'Hello'}
    Path('chats.jsonl').write_text('\n'.join(map(json.dumps, chats)))
    argv = ['chats.jsonl', '--tokenizer=tok', '--block_size=64']
    assert "chats.jsonl, line 5: '<|im_end|>'" in prep_run(argv, monkeypatch, capsys)[2]
    assert 'must be refuse or tokens' in prep_run([*argv, '--special_tokens=text'], monkeypatch, capsys)[2]
    assert prep_run([*argv, '--special_tokens=tokens'], monkeypatch, capsys)[0] == 0
    # between documents of a text the end of text is what it always was; a vocabulary is not learnt in vain
    Path('t.txt').write_text('one text<|endoftext|>\n' * 9)
    assert prep_run(['t.txt', '--tokenizer=tok'], monkeypatch, capsys)[0] == 0
    code, out, stderr = prep_run(['a.jsonl', '--tokenizer=bpe:300'], monkeypatch, capsys)
    assert code == 1 and 'document 7' in stderr and 'learnt' not in out


def test_special_tokens_are_found_across_blocks_and_cuts(tmp_path, monkeypatch):
    text = 'a short text <|endoftext|> and its end '
    for size in (1, 5, 17):
        blocks = [text[i:i + size] for i in range(0, len(text), size)]
        source = prepare.refusing(prepare.Source('x', 'x', lambda blocks=blocks: [blocks]), [prepare.EOT])
        with pytest.raises(ValueError, match='x, document 1: .*endoftext'):
            list(*source.documents())
    for tok in (prepare.ByteTokenizer(), prep_toy_bpe()):
        for chunk in range(14, 30):
            monkeypatch.setattr(prepare, 'CHUNK', chunk)
            texts = [(split, [text * 9], True) for split in ('train', 'val')]
            prepare.write_dataset(str(tmp_path / 'd'), texts, tok, 'x', as_tokens=True)
            assert prep_ids(tmp_path / 'd', 'val').tolist() == [*tok.encode(text * 9), tok.eot]


def test_documents_and_prompts_begin_with_the_bos_of_a_tokenizer(tmp_path, monkeypatch):
    """As transformers' tokenizer has texts, and chats, whose template writes a bos itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, 'CHUNK', 40)
    texts = [f'document {i} has a few words, ' * 4 for i in range(20)]
    for name, bos in (('mistral', [1]), ('gpt2', [])):
        library = tok_oracles()[name]
        tok = prepare.JsonTokenizer(library.to_str())
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library)
        prepare.write_dataset('d', prep_texts(prep_source(*texts)), tok, 'x')
        plan = prepare.split_documents([len(text) for text in texts], 0.1)
        tok = prepare.load_tokenizer('d')
        for split in ('train', 'val'):
            ids = [[*theirs(text)['input_ids'], tok.eot] for text, what in zip(texts, plan) if what == split]
            assert all(one[:len(bos)] == bos for one in ids)
            assert prep_ids('d', split).tolist() == sum(ids, [])
        again = prepare.tokenizer_from_state(tok.state())  # a checkpoint's, so its prompts are the same
        assert again.encode(texts[0]) == theirs(texts[0])['input_ids']
        Path('a.txt').write_text(texts[0])
        inputs, targets = flat_bench.text_tokens('a.txt', tok)[0][0]
        assert [inputs[0], *targets] == [tok.eot, *theirs(texts[0])['input_ids']]
    tok = prepare.JsonTokenizer(tok_oracles()['mistral'].to_str(), {
        'chat_template': CHAT_TEMPLATES['llama2'], 'bos_token': '<s>', 'eos_token': '</s>'})
    messages = prepare.make_messages(('Hi', 'Hello'))
    ids, _ = prepare.encode_conversation(tok, prepare.Conversation('x', messages))
    assert ids.tolist().count(1) == 1 == tok.chat(messages[:1]).count(1)


def test_prepare_failure_while_writing_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, 'CHUNK', 10)
    source = prep_source('one two three\n' * 20)
    tok = prepare.make_tokenizer('byte')
    monkeypatch.setattr(prepare, 'AROUND', 0)
    meta = prepare.write_dataset('data/a', prep_texts(source), tok, 'a')
    before = {name: Path('data/a', name).read_bytes() for name in os.listdir('data/a')}
    real, calls = tok.encode_array, []

    def full_disk(text):
        calls.append(text)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(text)
    tok.encode_array = full_disk
    for folder in ('data/a', 'data/b'):
        calls.clear()
        with pytest.raises(KeyboardInterrupt):
            prepare.write_dataset(folder, prep_texts(source), tok, 'a')
    tok.encode_array = real
    with pytest.raises(ValueError, match='changed'):
        prepare.write_dataset('data/b', prep_texts(source), tok, 'a', n_bytes=281)
    assert os.listdir('data') == ['a'] and meta['train_tokens'] == 252
    assert {name: Path('data/a', name).read_bytes() for name in os.listdir('data/a')} == before


def test_prepare_again_removes_what_belonged_to_earlier_tokens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = prep_source('the text ' * 20)
    prepare.write_dataset('data/a', prep_texts(source), prep_toy_bpe(), 'a')
    open('data/a/train.mask.bin', 'wb').close()
    assert 'tokenizer.tiktoken' in os.listdir('data/a')
    assert prepare.load_tokenizer('data/a').decode(prep_ids('data/a', 'train')) == ('the text ' * 20)[:162]
    prepare.write_dataset('data/a', prep_texts(source), prepare.make_tokenizer('byte'), 'a')
    assert sorted(os.listdir('data/a')) == ['meta.json', 'train.bin', 'val.bin']


def test_prepare_in_the_c_locale(tmp_path):
    text = 'Zoë 中文 🙂\r\n' * 30
    with open(tmp_path / 'ü.txt', 'w', encoding='utf-8', newline='') as f:
        f.write(text)
    env = {**os.environ, 'PYTHONUTF8': '0', 'LC_ALL': 'C', 'PYTHONCOERCECLOCALE': '0'}
    command = [sys.executable, os.path.join(PREP_DIR, 'prepare.py'), '*.txt', '--tokenizer=char', '--out=c']
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    folder = str(tmp_path / 'data' / 'c')
    tok = prepare.load_tokenizer(folder)
    assert tok.decode([*prep_ids(folder, 'train'), *prep_ids(folder, 'val')]) == text


# pieces and processes ---------------------------------------------------------------------------------------

def prep_patterns():
    openai_public = pytest.importorskip('tiktoken_ext.openai_public')
    with pytest.MonkeyPatch.context() as monkey:         # the patterns are in the package, the tables are not
        monkey.setattr(openai_public, 'load_tiktoken_bpe', lambda *a, **k: {})
        monkey.setattr(openai_public, 'data_gym_to_mergeable_bpe_ranks', lambda *a, **k: {})
        return {name: openai_public.ENCODING_CONSTRUCTORS[name]()['pat_str']
                for name in ('gpt2', 'cl100k_base', 'o200k_base')}


@pytest.mark.parametrize('name', ['gpt2', 'cl100k_base', 'o200k_base'])
def test_prepare_cuts_where_every_pattern_cuts(name):
    regex = pytest.importorskip('regex')
    words = regex.compile(prep_patterns()[name])
    for seed in range(20):
        text = prep_awkward(60, seed)
        cuts = [match.end() for match in prepare.CUT.finditer(text)]
        starts = {match.start() for match in words.finditer(text)}
        assert cuts and set(cuts) <= starts
        for cut in cuts:
            assert words.findall(text[:cut]) + words.findall(text[cut:]) == words.findall(text)


@pytest.mark.parametrize('name', ['byte', 'char', 'gpt2', 'cl100k_base', 'o200k_base'])
@pytest.mark.parametrize('chunk', [7, 100])
def test_prepare_in_pieces_is_as_in_one_piece(name, chunk, tmp_path, monkeypatch):
    text = prep_awkward(3000) + 'ＡＢＣ' * 2000 + '\n' + prep_awkward(200, 2)  # with one long word
    tok = prepare.make_tokenizer(name, ''.join(sorted(set(text)))) if name in ('byte', 'char') else \
        prep_toy_bpe(prep_patterns()[name])
    monkeypatch.setattr(prepare, 'CHUNK', chunk)
    monkeypatch.setattr(prepare, 'AROUND', 0)
    blocks = [text[i:i + 1000] for i in range(0, len(text), 1000)]
    parts, last = zip(*prepare.pieces(blocks, tok))
    assert ''.join(parts) == text and last == (*[False] * (len(last) - 1), True)
    assert len(parts) > len(text) / chunk / 60 and (max(map(len, parts)) == chunk or not tok.anywhere)
    source = prepare.Source('x', 'x', lambda: [iter(blocks)])
    prepare.write_dataset(str(tmp_path / 'd'), prep_texts(source), tok, 'a')
    cut = int(len(text) * 0.9)
    for split, part in (('train', text[:cut]), ('val', text[cut:])):
        assert prep_ids(tmp_path / 'd', split).tolist() == tok.encode(part, allow_special=False)


def test_prepare_two_processes_write_what_one_writes(tmp_path, monkeypatch):
    tok = prep_toy_bpe()
    source = prep_source(*[prep_awkward(300 + 50 * i, seed=i) + '<|endoftext|> the end'  # which is text here
                           for i in range(12)])
    plan = prepare.plan_splits(source, prepare.scan(source), 0.2)
    monkeypatch.setattr(prepare, 'CHUNK', 500)
    metas = [prepare.write_dataset(str(tmp_path / f'p{n}'), prep_texts(source, 0.2), tok, 'x', procs=n)
             for n in (1, 2)]
    assert metas[0] == metas[1] and metas[0]['train_tokens'] > 5000
    for split in ('train', 'val'):
        ids = prep_ids(tmp_path / 'p1', split)
        assert ids.tobytes() == prep_ids(tmp_path / 'p2', split).tobytes()
        assert (ids == tok.eot).sum() == plan.count(split)


def test_prepare_uses_processes_only_where_they_pay():
    byte, bpe = prepare.make_tokenizer('byte'), prep_toy_bpe()
    assert prepare.usable_procs(8, byte, 1 << 40) == 1 == prepare.usable_procs(8, bpe, 1000)
    assert prepare.usable_procs(8, bpe, 1 << 40) == 8 and 1 <= prepare.usable_procs(None, bpe, 1 << 40) <= 61


def test_prepare_encodes_in_bounded_memory(tmp_path):
    path = str(tmp_path / 'big.txt')
    with open(path, 'wb') as f:
        for _ in range(48):
            f.write(b'many words in a line, and many lines\n' * (1 << 15))       # 58 MB in all
    code = (f"import resource, prepare\nused = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            f"tok = prepare.make_tokenizer('byte'); before = used()\n"
            f"source = prepare.find_source({path!r}); seen = prepare.scan(source)\n"
            f"texts = prepare.planned_texts(source, prepare.plan_splits(source, seen, 0.1))\n"
            f"prepare.write_dataset({str(tmp_path / 'd')!r}, texts, tok, 'x', n_bytes=seen.n_bytes)\n"
            f"print(used() - before)")
    pytest.importorskip('resource')
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([PREP_DIR, os.environ.get('PYTHONPATH', '')])}
    done = subprocess.run([sys.executable, '-c', code], env=env, check=True, capture_output=True, text=True)
    grown = int(done.stdout.split()[-1]) * (1 if sys.platform == 'darwin' else 1024)
    assert grown < 40 << 20 and os.path.getsize(tmp_path / 'd' / 'train.bin') > 100e6


def test_prepare_on_a_full_disk_names_the_folder(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, 'write_bins', full)
    with pytest.raises(OSError, match='data/b cannot be written .*free some space.*--out'):
        prepare.write_dataset('data/b', [], prepare.make_tokenizer('byte'), 'a')
    assert os.listdir('data') == []
    monkeypatch.setattr(prepare, 'fetch_rest', full)
    with pytest.raises(OSError, match='data/x/y.part cannot be written .*: free some space, then run this'):
        prepare.fetch('http://host/y', 'data/x/y')
    monkeypatch.setattr(prepare.shutil, 'copyfileobj', full)
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(b'some text')))
    with pytest.raises(OSError, match='stdin.txt cannot be written .*: free some space, or set TMPDIR'):
        prepare.find_source('-')
    monkeypatch.setattr(sys, 'stdin', None)
    with pytest.raises(ValueError, match='standard input is closed'):
        prepare.find_source('-')


def test_prepare_that_is_terminated_removes_what_it_made(tmp_path):
    command = [sys.executable, os.path.join(PREP_DIR, 'prepare.py'), '-']
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, 'TMPDIR': str(tmp_path)},
                          stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdin.write('more is to come\n')
        process.stdin.flush()
        while not list(tmp_path.glob('*/stdin.txt')):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.stderr.read() == 'prepare.py: interrupted\n' and process.wait() != 0
    assert os.listdir(tmp_path) == []


def test_prepare_keeps_documents_apart_or_says_that_it_cannot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source, tok = prep_source(*['ab' * 9] * 9), prepare.make_tokenizer('char', 'ab')
    with pytest.raises(ValueError, match='tokenizer char has no end-of-text token to keep documents apart'):
        prepare.write_dataset('data/a', prep_texts(source), tok, 'a')
    assert os.listdir('data') == []
    meta = prepare.write_dataset('data/a', prep_texts(prep_source('ab' * 9)), tok, 'a')  # one that is cut
    assert meta['train_tokens'] == 16 and meta['eot'] is None


# tokenizers -------------------------------------------------------------------------------------------------

def prep_tokenizers():
    return [prepare.make_tokenizer('byte'), prepare.make_tokenizer('char', 'abc é🙂', True),
            prep_toy_bpe()]


def test_tokenizer_state_goes_through_a_checkpoint():
    for tok in prep_tokenizers():
        file = io.BytesIO()
        torch.save({'tokenizer': tok.state()}, file)
        file.seek(0)
        again = prepare.tokenizer_from_state(torch.load(file, weights_only=True)['tokenizer'])
        text = 'ab c é🙂<|endoftext|>ca'
        ids = tok.encode(text)
        assert again.encode(text) == ids and again.decode(ids) == text == tok.decode(ids)
        for what in ('name', 'n_vocab', 'eot', 'special'):
            assert getattr(again, what) == getattr(tok, what)
        assert ids.count(tok.eot) == 1 and all(type(i) is int and 0 <= i < tok.n_vocab for i in ids)
        assert again.state() == json.loads(json.dumps(tok.state())) == tok.state()
    for bad in ({'kind': 'nonsense'}, {}, {'kind': 'char'}, {'kind': 'byte', 'x': 1}, None, 'byte'):
        with pytest.raises(ValueError, match='newer version'):
            prepare.tokenizer_from_state(bad)
    state = {**prep_toy_bpe().state(), 'ranks': 'YQ=='}
    with pytest.raises(ValueError, match='run/ckpt.pt: .*not enough values to unpack'):
        prepare.find_tokenizer({'tokenizer': state}, 'run/ckpt.pt')


def test_tokenizer_special_tokens_and_odd_text():
    for tok in prep_tokenizers():
        assert tok.eot == tok.special['<|endoftext|>']
        assert tok.encode('') == [] and tok.encode('<|endoftext|>') == [tok.eot]
        assert tok.decode([tok.n_vocab + 5, *tok.encode('abc'), 10**6, tok.eot]) == 'abc<|endoftext|>'
        if tok.name != 'char':
            plain = tok.encode('<|endoftext|>', allow_special=False)
            assert tok.eot not in plain and tok.decode(plain) == '<|endoftext|>'
            assert tok.decode(tok.encode('a\ud800b')) == 'a\ufffdb'
            ids = tok.encode('🙂')
            assert tok.decode_bytes(ids) == '🙂'.encode() and tok.decode(ids[:2]) == '\ufffd'
    assert prepare.make_tokenizer('byte').encode('aé') == [97, 0xc3, 0xa9]
    char = prepare.make_tokenizer('char', ' dehlorw')
    assert char.eot is None and char.n_vocab == 8 and char.encode('hello') == [3, 2, 4, 4, 5]
    with pytest.raises(ValueError, match=r"prompt has '\?' \(not in this char vocabulary of"):
        char.encode('who?')


@pytest.mark.parametrize('name', ['byte', 'char', 'toy', 'gpt2', 'json'])
def test_decoded_is_what_was_encoded(name, monkeypatch):
    """Any text, whole and token by token, with the texts of special tokens as such or as plain text."""
    rng, marks = random.Random(0), [prepare.EOT, prepare.EOT[:5], '|>', ' ', '\n', 'ab']
    texts = [''.join(rng.choice([*marks, chr(rng.randrange(0xd800)), chr(rng.randrange(0xe000, 0x110000))])
                     for _ in range(rng.randrange(30))) for _ in range(200)]
    tok = {'byte': prepare.ByteTokenizer, 'toy': prep_toy_bpe, 'gpt2': lambda: prep_gpt2(monkeypatch),
           'char': lambda: prepare.make_tokenizer('char', sorted({*prepare.EOT, *''.join(texts)}), True),
           'json': lambda: prepare.JsonTokenizer(tok_oracles()['gpt2'].to_str())}[name]()
    for text in texts:
        for allow in (True, False):
            ids = tok.encode(text, allow_special=allow)
            assert tok.decode(ids) == text and max(ids, default=0) < tok.n_vocab
            assert b''.join(tok.decode_bytes([i]) for i in ids) == text.encode()
            assert ids.count(tok.eot) == text.count(prepare.EOT) * allow


def test_tokenizer_gpt2_is_tiktokens(monkeypatch):
    tok = prep_gpt2(monkeypatch)
    import tiktoken
    theirs = tiktoken.get_encoding('gpt2')
    again = prepare.tokenizer_from_state(tok.state())
    text = prep_awkward(2000) + '<|endoftext|>Hello'
    assert again.n_vocab == 50257 and again.eot == 50256
    assert tok.encode(text) == again.encode(text) == theirs.encode(text, allowed_special={'<|endoftext|>'})
    assert again.encode(text, allow_special=False) == theirs.encode_ordinary(text)
    assert again.decode(again.encode(text)) == text


def test_prepare_prints_commands_that_can_be_pasted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path('a.txt').write_text('some text\n' * 9)
    out = prep_run(['a.txt', "--out=sp ace; it's"], monkeypatch, capsys)[1]
    command = out.splitlines()[-1].removeprefix('next: ')
    assert shlex.split(command) == ['python', 'train.py', "--dataset=sp ace; it's"]
    with pytest.raises(OSError) as e:
        prepare.Bins('data/no $such', 'train')
    command = re.search('`(.*)`', str(e.value))[1]
    assert shlex.split(command) == ['python', 'prepare.py', 'my.txt', '--out=no $such']


def test_tokenizer_offline_names_the_address(tmp_path, monkeypatch):
    requests, tiktoken = pytest.importorskip('requests'), pytest.importorskip('tiktoken')
    monkeypatch.setenv('TIKTOKEN_CACHE_DIR', str(tmp_path))

    def offline(url, **_):
        raise requests.ConnectionError('offline', request=requests.Request('GET', url).prepare())
    monkeypatch.setattr(requests, 'get', offline)
    monkeypatch.setattr(tiktoken.registry, 'ENCODINGS', {})
    with pytest.raises(OSError, match=r'https://\S+p50k_base.tiktoken.*TIKTOKEN_CACHE_DIR') as e:
        prepare.make_tokenizer('p50k_base')
    assert '\n' not in str(e.value)


LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
                r"\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK_SPLIT = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                  r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@functools.lru_cache(maxsize=1)
def tok_texts():
    """Code, Chinese, emoji, digits, spaces, odd Unicode: something of everything, 400 KB."""
    rng = random.Random(0)
    code = ''.join((ROOT / name).read_text(encoding='utf-8')
                   for name in ('train.py', 'sample.py', 'bench.py'))
    chinese = '，'.join(''.join(chr(rng.randrange(0x4e00, 0x4f50)) for _ in range(7)) for _ in range(400))
    odd = ('\U0001f600👩\u200d👩\u200d👧🇩🇪 e\u0301 é ﬁ ½ ǅ \u200d \ufeff \u00a0\u3000 '
           '１２３ ⅷ ' * 40
           + "It's WE'LL they'Ve don't\u2019s " * 20 + '\n\n \n\t\t  \r\n' * 60)
    digits = ' '.join(str(rng.randrange(10**rng.randrange(1, 12))) for _ in range(2000))
    return [code, chinese, odd, digits, code.upper() + chinese + code.replace('\n', '\n\n') + odd + digits]


@functools.cache
def tok_oracles():
    """name -> a tokenizer of the tokenizers library, of each kind that is met on the hub."""
    tk = pytest.importorskip('tokenizers')
    pre, norm, dec = tk.pre_tokenizers, tk.normalizers, tk.decoders

    def level(prefix=False, regex=True):
        return pre.ByteLevel(add_prefix_space=prefix, use_regex=regex)

    def split(pattern):
        return pre.Split(tk.Regex(pattern), 'isolated')

    def trained(pretok, normalizer=None, decoder=None, size=1100, special=('<|endoftext|>',), **model):
        t = tk.Tokenizer(tk.models.BPE(**model))
        if pretok:
            t.pre_tokenizer = pretok
        if normalizer:
            t.normalizer = normalizer
        t.decoder = decoder or dec.ByteLevel()
        texts = [line for text in tok_texts()[:4]
                 for line in (text.splitlines() if pretok is None else [text])]
        alphabet = pre.ByteLevel.alphabet() if decoder is None else []
        t.train_from_iterator(texts, tk.trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False))
        return t

    found = {
        'gpt2': trained(level()), 'gpt2 prefix': trained(level(prefix=True)),
        'llama3': trained(pre.Sequence([split(LLAMA3_SPLIT), level(regex=False)]), ignore_merges=True),
        'qwen': trained(pre.Sequence([split(LLAMA3_SPLIT), level(regex=False)]), norm.NFC()),
        'deepseek': trained(pre.Sequence([split(r'\p{N}{1,3}'), split('[一-龥぀-ゟ゠-ヿ]+'),
                                          split(DEEPSEEK_SPLIT), level(regex=False)])),
        'falcon': trained(pre.Sequence([pre.Punctuation('contiguous'), level(), pre.Digits(False),
                                        split('[0-9][0-9][0-9]')])),
        'smollm': trained(pre.Sequence([pre.Digits(True), level()]))}
    pieces = dec.Sequence([dec.Replace('▁', ' '), dec.ByteFallback(), dec.Fuse(), dec.Strip(' ', 1, 0)])
    llama2 = json.loads(trained(
        None, norm.Sequence([norm.Prepend('▁'), norm.Replace(' ', '▁')]), pieces, 1300,
        ['<unk>', '<s>', '</s>', *(f'<0x{b:02X}>' for b in range(256))]).to_str())
    llama2['model'].update(byte_fallback=True, unk_token='<unk>', fuse_unk=True)
    llama2['added_tokens'] = [t for t in llama2['added_tokens'] if not t['content'].startswith('<0x')]
    start = {'SpecialToken': {'id': '<s>', 'type_id': 0}}
    texts = [{'Sequence': {'id': name, 'type_id': 0}} for name in 'AB']
    llama2['post_processor'] = {'type': 'TemplateProcessing', 'single': [start, texts[0]],
                                'pair': [start, texts[0], start, texts[1]],
                                'special_tokens': {'<s>': {'id': '<s>', 'ids': [1], 'tokens': ['<s>']}}}
    found['llama2'] = tk.Tokenizer.from_str(json.dumps(llama2))
    found['mistral'] = tk.Tokenizer.from_str(json.dumps({**llama2, 'normalizer': None, 'pre_tokenizer': {
        'type': 'Metaspace', 'replacement': '▁', 'prepend_scheme': 'first', 'split': False}}))
    added = tk.Tokenizer.from_str(found['gpt2'].to_str())
    added.add_tokens([tk.AddedToken('hello', normalized=True), tk.AddedToken('  ', normalized=False),
                      tk.AddedToken('word', single_word=True)])
    added.add_special_tokens([tk.AddedToken('<|x|>', lstrip=True), tk.AddedToken('<|y|>', rstrip=True)])
    found['added'] = added
    path = Path(os.environ.get('FLATGPT_DATA', 'nowhere')) / 'minimind_tokenizer/tokenizer.json'
    if path.exists():
        found['minimind'] = tk.Tokenizer.from_file(str(path))
    return found


@pytest.mark.parametrize('name', ['gpt2', 'gpt2 prefix', 'llama3', 'qwen', 'deepseek', 'falcon', 'smollm',
                                  'llama2', 'mistral', 'added', 'minimind'])
def test_tokenizer_json_gives_the_ids_of_transformers(name, tmp_path):
    """As text comes, with special tokens in it, and with these as plain text; and back, token by token."""
    if name not in tok_oracles():
        pytest.skip('its file is not at hand')
    library, rng, mixed = tok_oracles()[name], random.Random(1), ''.join(tok_texts())
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library)
    ours = prepare.tokenizer_from_state(prepare.JsonTokenizer(library.to_str()).state())
    assert ours.n_vocab == library.get_vocab_size() == len(theirs) and ours.to_json() == library.to_str()
    parts = [mixed[a:a + rng.randrange(1, 120)] for a in (rng.randrange(len(mixed)) for _ in range(300))]
    marks = [token.content for token in library.get_added_tokens_decoder().values()][:5]
    parts += [mark + part + marks[-1] + ' ' + mark for mark in marks for part in parts[:12]]
    parts += ['', ' ', '\n', 'a', ' a', '  a  ', 'hello  world <|x|> <|y|>  z word words', '<s> x </s>',
              mixed]
    for part in parts:
        assert ours.encode(part) == theirs(part)['input_ids'], repr(part[:80])
        plain = theirs(part, add_special_tokens=False, split_special_tokens=True)['input_ids']
        assert ours.encode_array(part).tolist() == plain, repr(part[:80])
        assert ours.encode_array(part).dtype == np.uint32
    assert not {*ours.special.values()} & {*ours.encode(''.join(ours.special), allow_special=False)} - {
        *ours.encode('')}
    assert ours.encode('a\ud800b') == ours.encode('a\ufffdb')
    for part in parts[:200]:  # and back; a prefix that encoding puts in front is text
        ids = ours.encode(part)
        assert b''.join(ours.decode_bytes([i]) for i in ids) == ours.decode_bytes(ids)
        back = ours.decode(ids).removeprefix('<s>')
        same = part if name != 'qwen' else unicodedata.normalize('NFC', part)
        assert back in (same, ' ' + same) or name == 'added', (part, back)


def test_tokenizer_json_of_other_kinds():
    """Unigram models, gaps in the ids, truncation and padding that are set in the file, special names."""
    tk = pytest.importorskip('tokenizers')
    pieces = [('<unk>', 0.0), ('▁', -2.0), ('▁a', -1.0), ('b', -1.5), ('▁ab', -1.2), ('<0x0A>', -9.0)]
    library = tk.Tokenizer(tk.models.Unigram(pieces, 0, True))
    library.pre_tokenizer, library.decoder = tk.pre_tokenizers.Metaspace(), tk.decoders.Metaspace()
    ours = prepare.JsonTokenizer(library.to_str())
    for text in ('ab a b', 'a\nb', ' ab'):
        assert ours.encode(text) == library.encode(text).ids
    assert ours.decode(ours.encode('ab b')) == ' ab b' and ours.eot is None
    spec = json.loads(tok_oracles()['gpt2'].to_str())
    spec['added_tokens'] += [{**spec['added_tokens'][0], 'id': 1101, 'content': '<|last|>'}]
    spec['model']['vocab']['zzzz'] = 3000
    spec['truncation'] = {'direction': 'Right', 'max_length': 3, 'strategy': 'LongestFirst', 'stride': 0}
    spec['padding'] = {'strategy': {'Fixed': 9}, 'direction': 'Right', 'pad_to_multiple_of': None,
                       'pad_id': 0, 'pad_type_id': 0, 'pad_token': '!'}
    ours = prepare.JsonTokenizer(json.dumps(spec), {'eos_token': {'content': '<|last|>'}})
    assert ours.n_vocab == 3001 > len(ours.tokens) and ours.eot == ours.special['<|last|>']
    text = 'more than three tokens, no padding'
    assert ours.encode(text) == tok_oracles()['gpt2'].encode(text).ids
    assert prepare.JsonTokenizer(json.dumps(spec)).eot == ours.special[prepare.EOT]


@pytest.mark.parametrize('name', ['llama2', 'mistral', 'gpt2', 'gpt2 prefix', 'qwen', 'deepseek', 'added',
                                  'minimind'])
def test_tokenizer_json_in_pieces_is_as_in_one_piece(name, monkeypatch):
    """Documents are cut only where the ids stay those of the whole; where none such is found, not at all."""
    if name not in tok_oracles():
        pytest.skip('its file is not at hand')
    ours = prepare.JsonTokenizer(tok_oracles()[name].to_str())
    monkeypatch.setattr(prepare, 'CHUNK', 500)
    for text in (tok_texts()[0][:9000], ' ' + tok_texts()[4][40_000:46_000], prep_awkward(900)):
        parts = [part for part, _ in prepare.pieces([text[:4000], text[4000:]], ours)]
        ids = np.concatenate([ours.encode_array(part) for part in parts])
        assert ''.join(parts) == text and ids.tolist() == ours.encode_array(text).tolist()
        assert len(parts) == 1 if name == 'llama2' else len(parts) > 3  # it puts a space before every text


def test_a_damaged_or_unsupported_tokenizer_is_one_line_that_names_the_file(tmp_path):
    spec = json.loads(tok_oracles()['gpt2'].to_str())
    model, words = spec['model'], {'type': 'WordPiece', 'unk_token': 'a', 'continuing_subword_prefix': '##',
                                   'max_input_chars_per_word': 100, 'vocab': {'a': 0}}
    split = {'type': 'Split', 'pattern': {'Regex': '('}, 'behavior': 'Isolated', 'invert': False}
    changes = [({'model': words}, 'WordPiece'), ({'model': {**model, 'dropout': 0.1}}, 'dropout'),
               ({'model': {**model, 'end_of_word_suffix': '</w>'}}, 'end_of_word_suffix'),
               ({'pre_tokenizer': split}, ''), ({'pre_tokenizer': {'type': 'Nonsense'}}, ''),
               ({'model': {**model, 'vocab': {}, 'merges': []}, 'added_tokens': []}, 'empty vocabulary')]
    damaged = ['{', '{}', '', '[]', '{"model": {}}', '[' * 200_000]
    path = tmp_path / 'tokenizer.json'
    for text, part in [*((json.dumps({**spec, **change}), part) for change, part in changes),
                       *((text, '') for text in damaged)]:
        path.write_text(text)
        for name in (str(tmp_path), str(path)):
            with pytest.raises(ValueError, match=re.escape(str(path))) as e:
                prepare.make_tokenizer(name)
            assert part in str(e.value) and '\n' not in str(e.value) and len(str(e.value)) < 600
            assert str(e.value).count('tokenizer.json') == 1
        with pytest.raises(ValueError):
            prepare.tokenizer_from_state({'kind': 'json', 'source': text, 'config': {}})
    path.write_text(json.dumps(spec))
    for text in ('{', '[]', '[' * 200_000):
        (tmp_path / 'tokenizer_config.json').write_text(text)
        with pytest.raises(ValueError, match='tokenizer_config.json') as e:
            prepare.json_tokenizer(str(tmp_path))
        assert '\n' not in str(e.value)
    (tmp_path / 'tokenizer_config.json').write_bytes(b'\xff')
    with pytest.raises(ValueError, match='tokenizer_config.json is not UTF-8') as e:
        prepare.json_tokenizer(str(tmp_path))
    assert str(e.value).count('tokenizer_config.json') == 1
    with pytest.raises(FileNotFoundError, match='none'):
        prepare.json_tokenizer(str(tmp_path / 'none'))


def test_without_the_tokenizers_library_one_line_says_what_to_install(monkeypatch):
    source = tok_oracles()['gpt2'].to_str()
    monkeypatch.setitem(sys.modules, 'tokenizers', None)
    with pytest.raises(ImportError, match='pip install tokenizers'):
        prepare.JsonTokenizer(source)


@pytest.mark.parametrize('name', ['byte', 'char', 'gpt2', 'toy', 'cl100k_base', 'o200k_base'])
def test_exported_tokenizers_encode_the_same(name, tmp_path, monkeypatch):
    tk = pytest.importorskip('tokenizers')
    if name == 'gpt2':
        prep_gpt2(monkeypatch)
    text = tok_texts()[0][:30000] + tok_texts()[2][:500]
    if name in ('toy', 'cl100k_base', 'o200k_base'):  # the last two are their patterns, with a few merges
        ours = prep_toy_bpe(prep_patterns().get(name, PREP_WORDS))
    else:
        ours = prepare.make_tokenizer(name, sorted(set(text)), True)
    theirs = tk.Tokenizer.from_str(ours.to_json())
    for part in (text, text[5000:6000], '12' * 50, 'a' + prepare.EOT + 'b' if name != 'toy' else 'abc'):
        part = part if name != 'char' else ''.join(c for c in part if c in ours.chars or c in prepare.EOT)
        assert theirs.encode(part).ids == ours.encode(part)
    assert theirs.decode(ours.encode(text[:500]), skip_special_tokens=False) == text[:500]
    if name == 'toy':  # a token that no merge of two makes, as some tables have
        ranks = ours.ranks + f'{base64.b64encode(b"xyz").decode()} {ours.n_vocab}\n'
        ours = prepare.TiktokenTokenizer('toy', ours.pattern, ours.special, ranks)
        assert ours.encode('xyz xyz') == [ours.n_vocab - 1, *b' xyz']
        assert tk.Tokenizer.from_str(ours.to_json()).encode('xyz xyz').ids == ours.encode('xyz xyz')


CHAT_TEMPLATES = {
    'chatml':
        "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' +"
        " '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    'qwen2.5':
        "{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] +"
        " '<|im_end|>\n' }}{%- else %}{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n'"
        " }}{%- endif %}{%- for m in messages %}{%- if m.role != 'system' %}{{- '<|im_start|>' + m.role +"
        " '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{-"
        " '<|im_start|>assistant\n' }}{%- endif %}",
    'qwen3':
        "{%- for m in messages %}{%- set content = m.content %}{%- if m.role == 'assistant' and"
        " '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%-"
        " endif %}{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endfor %}{%- if"
        " add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and"
        " enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}",
    'smollm':  # a system message of its own, where there is none
        "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nYou are a helpful AI assistant named"
        " SmolLM, trained by Hugging Face<|im_end|>\n' }}{%- endif %}{%- for m in messages %}{{-"
        " '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}{%- if"
        " add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
    'llama3':
        "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] +"
        " '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set"
        " content = '<|begin_of_text|>' + content %}{% endif %}{{ content }}{% endfor %}{% if"
        " add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    'llama2':
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system ="
        " messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system = false %}{%"
        " endif %}{% for m in loop_messages %}{% if loop.index0 == 0 and system %}{% set content ="
        " '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}{% else %}{% set content ="
        " m['content'] %}{% endif %}{% if m['role'] == 'user' %}{{ '<s>' + '[INST] ' + content.strip() +"
        " ' [/INST]' }}{% else %}{{ ' ' + content.strip() + ' ' + '</s>' }}{% endif %}{% endfor %}",
}


CHAT_TEMPLATES |= {
    'deepseek':
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{% for m in messages %}"
        "{{ '<' + m.role + '>' + m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' +"
        " ('<think>' if thinking else '</think>') }}{% endif %}",
    'everything':  # what transformers' environment has
        "{% for m in messages %}\n    {% if m.role == 'x' %}{% continue %}{% endif %}\n    {{ m | tojson }}"
        "{% generation %}\n{{ m.content | upper }}{% endgeneration %}\n{% endfor %}\n{{ bos_token }}"
        "{{ strftime_now('%Y') }}{{ tools | tojson(indent=2) }}{% set ns = namespace(n=1) %}"
        "{% set ns.n = 2 %}{{ ns.n }}{{ unknown }}{{ documents is none }}{{ dict(a=1) | tojson }}"
        "{% set named = namespace({'b': 2}, self=3) %}{{ named.b }}{{ named.self }}"
        "{{ dict.fromkeys('ab', 0) | tojson }}{{ dict([['a', 1]], b=2) | tojson }}"
        "{%- if enable_thinking is defined %}{{ enable_thinking }}{% endif %}",
}
CHATS = [[{'role': 'user', 'content': 'Hi, who are <you>?'}],
         [{'role': 'system', 'content': 'Be\nshort.'}, {'role': 'user', 'content': ' é🙂 '}],
         [{'role': 'user', 'content': 'Hi'},
          {'role': 'assistant', 'content': '<think>\nhm\n</think>\n\nA program.', 'tool_calls': None},
          {'role': 'user', 'content': 'And?'}]]
TOOLS = [{'type': 'function', 'function': {'name': 'now', 'description': 'the time', 'parameters': {
    'type': 'object', 'properties': {}, 'required': []}}}]


def chat_pair(folder, source, config):
    """Our tokenizer and transformers', of the same files."""
    (folder / 'tokenizer.json').write_text(source, encoding='utf-8')
    (folder / 'tokenizer_config.json').write_text(
        json.dumps({'tokenizer_class': 'PreTrainedTokenizerFast', **config}), encoding='utf-8')
    return (prepare.json_tokenizer(str(folder)),
            transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True))


@pytest.mark.parametrize('name', [*CHAT_TEMPLATES, 'named', 'file', 'minimind'])
@pytest.mark.parametrize('thinking', [True, False, None])
def test_chats_are_rendered_as_by_transformers(name, thinking, tmp_path):
    """The same text and ids, for templates in tokenizer_config.json, one of several there, or in a file."""
    source, config = tok_oracles()['llama2'].to_str(), {'bos_token': '<s>', 'eos_token': {
        '__type': 'AddedToken', 'content': '</s>', 'lstrip': False, 'rstrip': False, 'normalized': False,
        'single_word': False, 'special': True}}
    if name == 'minimind':
        if name not in tok_oracles():
            pytest.skip('its file is not at hand')
        folder = Path(os.environ['FLATGPT_DATA']) / 'minimind_tokenizer'
        source = tok_oracles()[name].to_str()
        config = json.loads((folder / 'tokenizer_config.json').read_text(encoding='utf-8'))
    elif name == 'named':
        config['chat_template'] = [{'name': 'default', 'template': CHAT_TEMPLATES['chatml']},
                                   {'name': 'tool_use', 'template': CHAT_TEMPLATES['everything']}]
    elif name == 'file':
        (tmp_path / 'chat_template.jinja').write_text(CHAT_TEMPLATES['qwen3'], encoding='utf-8')
    else:
        config['chat_template'] = CHAT_TEMPLATES[name]
    ours, theirs = chat_pair(tmp_path, source, config)
    ours = prepare.tokenizer_from_state(json.loads(json.dumps(ours.state())))
    switch = {'minimind': 'open_thinking', 'deepseek': 'thinking'}.get(name, 'enable_thinking')
    options = {} if thinking is None else {switch: thinking}
    if thinking is not None and name in ('minimind', 'deepseek', 'qwen3', 'everything'):
        assert ours.chat(CHATS[0], thinking) != ours.chat(CHATS[0], not thinking)
    for messages in CHATS:
        for tools in (None, TOOLS):
            expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True,
                                                  return_dict=False, **options)
            assert ours.chat(messages, thinking, tools) == expected
            text = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True,
                                              tokenize=False, **options)
            assert theirs(text, add_special_tokens=False)['input_ids'] == expected
    variables = {**options, 'bos_token': '<s>', 'eos_token': '</s>'}
    if name in CHAT_TEMPLATES:
        assert prepare.render_chat(CHAT_TEMPLATES[name], messages, tools, **variables) == text


def test_published_chat_templates_are_rendered_as_by_transformers(tmp_path):
    """Those in the folder chat_templates of FLATGPT_DATA, a file each, such as the package trl has."""
    folder = Path(os.environ.get('FLATGPT_DATA', 'nowhere'), 'chat_templates')
    files = sorted(folder.glob('*.jinja'))
    if not files:
        pytest.skip(f'no {folder}/*.jinja')
    for file in files:
        ours, theirs = chat_pair(tmp_path, chat_tokenizer().source, {
            'bos_token': '<s>', 'eos_token': '</s>', 'chat_template': file.read_text(encoding='utf-8')})
        for messages, tools, thinking, prompt in itertools.product(
                CHATS, (None, TOOLS), (None, True, False), (True, False)):
            switches = {} if thinking is None else dict.fromkeys(prepare.THINKING, thinking)
            try:
                expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt,
                                                      return_dict=False, **switches)
            except Exception:  # such as a template that wants no system message
                with pytest.raises(ValueError, match='chat template fails'):
                    ours.chat(messages, thinking, tools, prompt)
            else:
                assert ours.chat(messages, thinking, tools, prompt) == expected, file.name


@pytest.mark.parametrize('template', [
    '{% for %}', '{{ 1 / 0 }}', '{{ messages[7].content.x }}', "{{ raise_exception('it cannot be') }}",
    '{{ messages.append(1) }}', '{% for i in range(10**9) %}{% endfor %}', "{{ 'a' * 10**13 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", '{{ dict.mro() }}', "{% include 'pwned' %}",
    "{{ cycler.__init__.__globals__.os.mkdir('pwned') }}", '{{ dict.__base__.__subclasses__() }}',
    '{% set ns = namespace(__class__=1) %}', '{% set ns = namespace() %}{% set ns._a = 1 %}',
    "{{ namespace({'_a': 1}) }}",
    "{{ raise_exception.__globals__['os'].mkdir('pwned') }}", '{% generation %}', '{{ ' + '(' * 20_000, ''])
def test_a_chat_template_that_fails_is_one_line_and_runs_no_code(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tok = prepare.JsonTokenizer(tok_oracles()['gpt2'].to_str(), {'chat_template': template})
    with pytest.raises(ValueError) as e:
        print(tok.chat([{'role': 'user', 'content': 'hi'}]))
    assert 'template' in str(e.value) and '\n' not in str(e.value) and os.listdir() == []


@pytest.mark.parametrize('expression', [
    'messages.__class__', 'dict.__base__', 'dict.__call__', 'dict.update', 'namespace.mro',
    'strftime_now.__code__', "'{0.__class__}'.format(1)"])
def test_a_chat_template_sees_nothing_of_python(expression):
    assert prepare.render_chat('{{ ' + expression + ' }}', [{'role': 'user', 'content': 'hi'}]) == ''


def test_a_dataset_is_prepared_with_a_tokenizer_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.makedirs('qwen')
    Path('qwen/tokenizer.json').write_text(tok_oracles()['qwen'].to_str(), encoding='utf-8')
    Path('my.txt').write_text(tok_texts()[0], encoding='utf-8')
    prep_run(['my.txt', '--tokenizer=qwen'], monkeypatch, capsys)
    made = [np.fromfile(f'data/my_qwen/{split}.bin', '<u2').tolist() for split in ('train', 'val')]
    again = prepare.load_tokenizer('data/my_qwen')
    assert ''.join(map(again.decode, made)) == tok_texts()[0]
    assert all(tok_oracles()['qwen'].encode(again.decode(ids)).ids == ids for ids in made)
    assert again.encode('def x') == tok_oracles()['qwen'].encode('def x').ids


# conversations ----------------------------------------------------------------------------------------------

def chat_tokenizer(template='chatml'):
    """Bytes and ChatML's tokens, by the tokenizers library; its end of text is <|im_end|>, as MiniMind's."""
    pytest.importorskip('tokenizers')
    marks = {text: 256 + i for i, text in enumerate([prepare.EOT, '<|im_start|>', '<|im_end|>', '<s>', '</s>',
                                                     '<|eot_id|>', '<|begin_of_text|>',
                                                     '<|start_header_id|>', '<|end_header_id|>'])}
    source = prepare.bpe_json({char: b for b, char in prepare.byte_chars().items()}, [], None, marks)
    end = {'llama2': '</s>', 'llama3': '<|eot_id|>'}.get(template, '<|im_end|>')
    return prepare.JsonTokenizer(source, {'chat_template': CHAT_TEMPLATES[template], 'bos_token': '<s>',
                                          'eos_token': end})


def save_tokenizer(tok, folder):
    os.makedirs(folder)
    Path(folder, 'tokenizer.json').write_text(tok.source, encoding='utf-8')
    Path(folder, 'tokenizer_config.json').write_text(json.dumps(tok.config), encoding='utf-8')


def chat_of(rng, turns=2, system=False):
    def words():
        some = ['a', 'word', 'é🙂', 'def x():\n', '\n']
        return ' '.join([rng.choice(some) for _ in range(rng.randrange(9))] + ['end'])
    messages = [{'role': 'system', 'content': words()}] if system else []
    for _ in range(turns):
        messages += prepare.make_messages((words().strip(), words().strip()))
    return messages


def chat_prepare(chats, tok, block_size, folder):
    source = prepare.Source('x', 'x', lambda: [prepare.Conversation(f'chat {i}', messages)
                                               for i, messages in enumerate(chats)], chats=True)
    seen = prepare.scan(source)
    texts = prepare.planned_texts(source, prepare.plan_splits(source, seen, 0.1))
    return prepare.write_dataset(str(folder), texts, tok, 'x', 1, seen.n_bytes, block_size)


def chat_slots(folder, block_size):
    """[(ids, mask)] of the slots of both splits."""
    found = []
    for split in ('train', 'val'):
        ids, mask = prep_ids(folder, split), prep_ids(folder, f'{split}.mask', np.uint8)
        assert len(ids) == len(mask) and len(ids) % block_size == 1 and (ids[-1], mask[-1]) == (256, 0)
        found += zip(ids[:-1].reshape(-1, block_size), mask[:-1].reshape(-1, block_size))
    return found


@pytest.mark.parametrize('template', ['chatml', 'qwen3', 'smollm', 'llama3', 'llama2', 'minimind'])
def test_the_mask_is_what_the_assistant_writes(template, monkeypatch):
    """And its end mark; what stands before an answer is exactly what a model is prompted with."""
    if template == 'minimind':
        path = Path(os.environ.get('FLATGPT_DATA', ''), 'minimind_tokenizer', 'tokenizer_config.json')
        if not path.exists():
            pytest.skip('its file is not at hand')
        monkeypatch.setitem(CHAT_TEMPLATES, 'minimind', json.loads(path.read_text('utf-8'))['chat_template'])
    tok, rng = chat_tokenizer(template), random.Random(0)
    end = {'llama2': '</s>', 'llama3': '<|eot_id|>'}.get(template, '<|im_end|>')
    for turns in (1, 2, 3):
        messages = chat_of(rng, turns, system=turns == 2)
        ids, mask = prepare.encode_conversation(tok, prepare.Conversation('here', messages))
        assert ids.tolist() == tok.encode_chat(tok.render(messages, add_generation_prompt=False))
        runs = [(learnt, tok.decode([i for i, _ in run]))
                for learnt, run in itertools.groupby(zip(ids, mask), key=lambda pair: pair[1])]
        answers = [text for learnt, text in runs if learnt]
        wanted = [message['content'] for message in messages if message['role'] == 'assistant']
        assert len(answers) == turns
        for answer, content in zip(answers, wanted):
            assert answer.removesuffix(end).strip() == content and answer.endswith(end)
        first = 1 + (turns == 2)
        assert ids[:np.flatnonzero(mask)[0]].tolist() == tok.chat(messages[:first], thinking=None)


def test_an_answer_that_thinks_is_learnt_with_its_thoughts():
    tok = chat_tokenizer()
    messages = prepare.make_messages(('Hi', '<think>\nhm\n</think>\n\nHello.'))
    ids, mask = prepare.encode_conversation(tok, prepare.Conversation('here', messages))
    assert tok.decode(ids[mask == 1]) == '<think>\nhm\n</think>\n\nHello.<|im_end|>'
    plain = '{% for m in messages %}{{ m.content }}{% endfor %}'
    for template, part in (('{{ messages | length }}' + plain, 'another way'), (plain, 'ends this answer'),
                           ("{{ raise_exception('no') }}", 'template fails')):
        tok = prepare.JsonTokenizer(tok.source, {'chat_template': template})
        with pytest.raises(ValueError, match=f'^there: .*{part}') as e:
            prepare.encode_conversation(tok, prepare.Conversation('there', messages))
        assert '\n' not in str(e.value)


def test_a_slot_is_filled_and_what_is_longer_is_cut():
    slots = prepare.Slots(5, 9, np.dtype('<u2'))
    parts = [part for ids in ([11], [21, 22, 23], [31, 32, 33, 34], range(41, 51))
             for part in slots.add(np.array(ids, '<u2'), np.ones(len(ids), np.uint8))]
    ids, mask = map(np.concatenate, zip(*parts, *slots.close()))
    assert ids.tolist() == [
        9, 11, 9, 9, 9,  9, 21, 22, 23, 9,  9, 31, 32, 33, 34,
        9, 41, 42, 43, 44,  9, 45, 46, 47, 48,  9, 49, 50, 9, 9,  9]
    unknown = {45, 49}  # after a cut there is nothing before them that they could follow from
    assert mask.tolist() == [int(i != 9 and i not in unknown) for i in ids]
    assert (slots.n_cut, slots.n_tokens) == (1, len(ids) - np.count_nonzero(ids == 9) + 6)


@pytest.mark.parametrize('block_size', [64, 200, 1000])
def test_conversations_are_packed_whole_into_slots(block_size, tmp_path):
    tok, rng = chat_tokenizer(), random.Random(1)
    chats = [chat_of(rng, rng.choice([1, 1, 2])) for _ in range(100)]
    meta = chat_prepare(chats, tok, block_size, tmp_path / 'd')
    encoded = [prepare.encode_conversation(tok, prepare.Conversation('x', messages)) for messages in chats]
    long = [ids.tolist() for ids, _ in encoded if len(ids) >= block_size]
    found, learnt, pieces = [], 0, []
    for ids, mask in chat_slots(tmp_path / 'd', block_size):
        assert (ids[0], mask[0]) == (256, 0)
        starts = [*np.flatnonzero(ids == 256), block_size]
        for begin, end in zip(starts, starts[1:]):
            part = (ids[begin + 1:end].tolist(), mask[begin + 1:end].tolist())
            if part[0]:
                (found if any(part[0] == whole.tolist() for whole, _ in encoded) else pieces).append(part)
            learnt += sum(part[1])
        if not pieces:
            used = np.flatnonzero(ids != 256)[-1] + 1
            assert not mask[used:].any()
    wanted = sorted((ids.tolist(), mask.tolist()) for ids, mask in encoded if len(ids) < block_size)
    assert sorted(found) == wanted and meta['cut'] == len(long) and bool(pieces) == bool(long)
    assert [i for part, _ in pieces for i in part] == [i for ids in long for i in ids] or meta['cut'] > 1
    assert sum(len(part) for part, _ in pieces) == sum(map(len, long))
    assert learnt == meta['train_learnt'] + meta['val_learnt']
    assert meta['block_size'] == block_size and meta['eot'] == 256 and 0.3 < meta['filled'] <= 1
    answers = [m['content'] for messages in chats for m in messages if m['role'] == 'assistant']
    assert meta['train_bytes'] + meta['val_bytes'] == len(''.join(answers).encode())
    assert meta['checksum']['val.mask.bin']


def test_all_shapes_of_records_are_the_same_conversations(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tok = chat_tokenizer()
    save_tokenizer(tok, 'tok')
    pairs = [(f'What is {i}?\n\nAs a word', f'It is {i}.') for i in range(50)]
    shapes = {
        'messages': [{'messages': prepare.make_messages(pair)} for pair in pairs],
        'conversations': [{'conversations': prepare.make_messages(pair), 'text': None} for pair in pairs],
        'talk': [{'talk': prepare.make_messages(pair), 'text': 'x'} for pair in pairs],
        'prompt': [{'prompt': a, 'response': b} for a, b in pairs],
        'question': [{'question': a, 'answer': b, 'id': 3} for a, b in pairs],
        'sharegpt': [{'id': 'x', 'conversations': [{'from': 'human', 'value': a},
                                                   {'from': 'gpt', 'value': b}]} for a, b in pairs],
        'alpaca': [dict(zip(('instruction', 'input'), a.split('\n\n')), output=b) for a, b in pairs],
        'empty': [{'instruction': a, 'input': '', 'output': b} for a, b in pairs]}
    made = set()
    for name, records in shapes.items():
        Path(f'{name}.jsonl').write_text('\n'.join(map(json.dumps, records)), encoding='utf-8')
        argv = [f'{name}.jsonl', '--tokenizer=tok', f'--field={"talk" if name == "talk" else "text"}']
        code, stdout, stderr = prep_run(argv, monkeypatch, capsys)
        assert code == 0 and '50 conversations' in stdout and f'--dataset={name}' in stdout, stderr
        folder = os.path.join('data', name)
        assert sorted(os.listdir(folder)) == ['meta.json', 'tokenizer.json', 'train.bin', 'train.mask.bin',
                                              'val.bin', 'val.mask.bin']
        made.add(tuple(Path(folder, file).read_bytes() for file in sorted(os.listdir(folder))
                       if file.endswith('.bin')))
    assert len(made) == 1
    again = prep_run(['prompt.jsonl', '--tokenizer=data/talk', '--out=again'], monkeypatch, capsys)
    assert again[0] == 0 and Path('data/again/val.bin').read_bytes() == Path('data/talk/val.bin').read_bytes()
    assert prepare.load_tokenizer('data/again').chat_template == tok.chat_template
    assert prep_run(['talk.jsonl', '--out=talk'], monkeypatch, capsys)[0] == 0  # text: its masks are gone
    assert sorted(os.listdir('data/talk')) == ['meta.json', 'train.bin', 'val.bin']


def test_bad_conversations_are_named_by_file_and_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tok = chat_tokenizer()
    save_tokenizer(tok, 'tok')
    good = prepare.make_messages(('Hi', 'Hello'))
    user, answer = good
    table = [({'messages': [answer, user]}, 'take turns'),
             ({'messages': [user, answer, answer]}, 'take turns'),
             ({'messages': [user, {'role': 'system', 'content': 'x'}, answer]}, 'take turns'),
             ({'messages': [user]}, 'no message of the assistant'), ({'messages': []}, 'no conversation'),
             ({'messages': [user, {'role': 'assistant', 'content': ' '}]}, 'message 2: its content is'),
             ({'messages': [user, {'role': 'assistant', 'content': ''}]}, 'message 2: its content is empty'),
             ({'messages': [user, {'role': 'assistant'}]}, 'message 2: its content is empty'),
             ({'messages': [user, {**answer, 'content': [1]}]}, 'message 2: its content is no text: [1]'),
             ({'messages': [user, {**answer, 'content': [1], 'tool_calls': [1]}]}, 'content is no text: [1]'),
             ({'messages': [user, {'role': 'bot', 'content': 'x'}]}, "message 2: {'role': 'bot', 'content'"),
             ({'messages': [user, {'role': ['user'], 'content': 'x'}]}, 'needs a role, one of system, user'),
             ({'messages': [user, 'Hello']}, "message 2: 'Hello' needs a role"),
             ({'messages': [{'from': 'human', 'value': 'x'}, {'from': 'bing', 'value': 'x'}]}, "'bing'"),
             ({'messages': [{'from': 'human'}, answer]}, 'message 1: its content is empty'),
             ({'messages': good, 'tools': '[}'}, "tools must be a list of JSON schemas, not '[}'"),
             ({'prompt': 'a', 'response': '\ud800'}, 'half a character'),
             ({'text': 'a'}, 'no conversation, its fields are text')]
    for record, part in table:
        lines = [json.dumps({'messages': good}), '', json.dumps(record)]
        Path('chats.jsonl').write_text('\n'.join(lines), encoding='utf-8')
        code, _, stderr = prep_run(['chats.jsonl', '--tokenizer=tok'], monkeypatch, capsys)
        assert code == 1 and 'chats.jsonl, line 3' in stderr and part in stderr, stderr
        assert len(stderr.strip().splitlines()) == 1 and not os.path.exists('data')
    Path('chats.jsonl').write_text(lines[0] + '\n', encoding='utf-8')
    assert 'one conversation' in prep_run(['chats.jsonl', '--tokenizer=tok'], monkeypatch, capsys)[2]
    Path('chats.jsonl').write_text(f'{lines[0]}\n' * 9, encoding='utf-8')
    for flags, part in ((['--tokenizer=byte'], 'no chat template'), (['--block_size=1'], 'block_size=1'),
                        (['--block_size=2'], 'train has no token to learn: raise --block_size'),
                        ([], '`python prepare.py` does it'), (['--tokenizer=none'], 'none')):
        argv = ['chats.jsonl', *(['--tokenizer=tok'] if 'block_size' in str(flags) else []), *flags]
        code, _, stderr = prep_run(argv, monkeypatch, capsys)
        assert code == 1 and part in stderr and len(stderr.strip().splitlines()) == 1, stderr


def test_conversations_as_minimind_has_them(tmp_path, monkeypatch):
    """Tools stand in the system's message, and they and calls are JSON in JSON. And the file, by its name of
    today or, where there is none, by that of before."""
    monkeypatch.chdir(tmp_path)
    tools, calls = [{'name': 'translate'}], [{'name': 'translate', 'arguments': {'text': 'x'}}]
    record = {'conversations': [
        {'role': 'system', 'content': '# Tools', 'tools': json.dumps(tools)},
        {'role': 'user', 'content': 'Do'},
        {'role': 'assistant', 'content': '', 'tool_calls': json.dumps(calls)},
        {'role': 'tool', 'content': '{"text": "y"}'},
        {'role': 'assistant', 'content': 'y', 'tool_calls': ''}]}
    there = ['sft_mini_512.jsonl', 'sft_t2t_mini.jsonl']

    def fetch_rest(url, part, size):
        if url.rpartition('/')[2] not in there:
            raise FileNotFoundError(url)
        Path(part).write_text(json.dumps(record))
    monkeypatch.setattr(prepare, 'fetch_rest', fetch_rest)
    while there:
        found, = prepare.find_source('minimind_sft').documents()
        assert found.tools == tools and found.messages[2]['tool_calls'] == calls
        assert os.listdir('data/minimind_sft') == [there[-1]]
        os.remove(f'data/minimind_sft/{there.pop()}')
    with pytest.raises(FileNotFoundError, match='sft_mini_512'):
        prepare.find_source('minimind_sft').documents()


def test_calls_of_tools_are_learnt_and_tools_are_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    template = ("{% if tools %}<tools>{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>"
                "{{ m.role }}\n{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|im_end|>\n"
                "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    tok = prepare.JsonTokenizer(chat_tokenizer().source, {'chat_template': template})
    called = '[{"function": {"name": "now"}}]'
    call = {'role': 'assistant', 'content': None, 'tool_calls': json.loads(called)}
    user = {'role': 'user', 'content': 'When?'}
    messages = [user, call, {'role': 'tool', 'content': '12:00'}, {'role': 'assistant', 'content': 'Noon.'}]
    ids, mask = prepare.encode_conversation(tok, prepare.Conversation('here', messages, TOOLS))
    assert ids.tolist() == tok.chat(messages, tools=TOOLS, add_generation_prompt=False)
    assert tok.decode(ids).startswith(f'<tools>{json.dumps(TOOLS)}\n<|im_start|>user\nWhen?')
    runs = itertools.groupby(zip(ids, mask), key=lambda pair: pair[1])
    assert [tok.decode([i for i, _ in run]) for learnt, run in runs if learnt] == [
        f'{called}<|im_end|>', 'Noon.<|im_end|>']
    os.makedirs('tok')
    Path('tok/tokenizer.json').write_text(tok.source, encoding='utf-8')
    Path('tok/chat_template.jinja').write_text(template, encoding='utf-8')
    Path('calls.jsonl').write_text((json.dumps({'messages': [user, call], 'tools': TOOLS}) + '\n') * 9)
    code, out, err = prep_run(['calls.jsonl', '--tokenizer=tok'], monkeypatch, capsys)
    assert code == 0 and 'function' in prepare.load_tokenizer('data/calls').decode(
        prep_ids('data/calls', 'val')), err
    assert prepare.read_meta('data/calls')['bytes_per_token'] == len(called) / (len(called) + 1)


def test_two_processes_write_the_conversations_of_one(tmp_path, monkeypatch):
    rng, tok = random.Random(2), chat_tokenizer()
    chats = [prepare.Conversation('x', chat_of(rng)) for _ in range(60)]
    source = prepare.Source('x', 'x', lambda: chats, chats=True)
    monkeypatch.setattr(prepare, 'CHUNK', 500)
    metas = [prepare.write_dataset(str(tmp_path / f'p{n}'), prep_texts(source), tok, 'x', n, block_size=100)
             for n in (1, 2)]
    assert metas[0] == metas[1]
    for name in metas[0]['checksum']:
        assert (tmp_path / 'p1' / name).read_bytes() == (tmp_path / 'p2' / name).read_bytes()


def test_pydoc_chat_is_short_and_imports_nothing():
    chats = list(prepare.pydoc_chats())
    assert 3000 < len(chats) < 9000 and chats == list(prepare.pydoc_chats())
    said = {}
    for place, messages, _ in chats:
        prepare.check_messages(messages, place)
        asked = messages[::2], messages[1::2]
        said |= {question['content']: answer['content'] for question, answer in zip(*asked)}
        assert all(len(message['content']) < 200 and '\n' not in message['content'] for message in messages)
    assert said['What does os.path.join do?'].startswith('Join two or more pathname components')
    assert said['What arguments does os.path.join take?'] == 'os.path.join(a, *p)'
    assert said['Explain os.path.join.'] == said['What does os.path.join do?']
    assert {2, 4, 6} < {len(messages) for _, messages, _ in chats}
    assert any(question.startswith('Which function of itertools') for question in said)
    code = ("import sys; sys.argv = ['prepare.py']; import prepare; before = set(sys.modules)\n"
            "print(len(list(prepare.pydoc_chats())), sorted(set(sys.modules) - before))")
    done = subprocess.run([sys.executable, '-c', code], cwd=PREP_DIR, check=True, capture_output=True,
                          text=True)
    assert done.stdout.split(maxsplit=1)[0] == str(len(chats))
    assert set(re.findall(r"'(\w+)'", done.stdout)) <= set(prepare.IN_C)


def test_look_shows_what_a_folder_has(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(3)
    chat_prepare([chat_of(rng) for _ in range(30)], chat_tokenizer(), 300, 'data/chats')
    assert prep_run(['look', 'data/chats'], monkeypatch, capsys)[0] == 0
    prepare.look('chats')
    out = capsys.readouterr().out
    ids, mask = prep_ids('data/chats', 'train'), prep_ids('data/chats', 'train.mask', np.uint8)
    assert f'train: {len(ids):,} tokens' in out and f'{mask.mean():.1%} of them learnt' in out
    assert f'val: {len(prep_ids("data/chats", "val")):,} tokens' in out
    shown = out.split('learnt marked\n')[1]
    n = int(np.flatnonzero(ids[:300] != 256)[-1]) + 1
    text, learnt = map(chat_tokenizer().decode, (ids[:n], ids[:n][mask[:n] == 1]))
    assert shown.replace('[[', '').replace(']]', '') == text + '\n'
    assert ''.join(re.findall(r'\[\[(.*?)\]\]', shown, re.DOTALL)) == learnt
    np.arange(50, dtype=np.uint16).tofile('data/train.bin')
    source = prep_source(*[f'document {i} ' * (i + 1) for i in range(40)])
    prepare.write_dataset('data/d', prep_texts(source), prepare.make_tokenizer('byte'), 'some text')
    monkeypatch.setattr(prepare, 'LOOK', 100)
    prepare.look('data/d')
    out = capsys.readouterr().out
    assert 'some text' in out and '(of the first 100)' in out and '[[' not in out and "' '" in out
    monkeypatch.setattr(prepare, 'make_tokenizer', None)  # no table is read, or downloaded, in vain
    with pytest.raises(OSError, match='nothing is not prepared: no val.bin'):
        prepare.look('nothing')
    assert capsys.readouterr().out == ''
    open('data/d/val.bin', 'wb').close()
    with pytest.raises(ValueError, match='val.bin has 0 tokens of the 1,260 that were prepared'):
        prepare.look('d')


def test_look_at_folders_that_others_prepared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.makedirs('data/c')
    np.array([0, 1, 2, 1] * 30, np.uint16).tofile('data/c/train.bin')
    np.array([1, 0], np.uint16).tofile('data/c/val.bin')
    with open('data/c/meta.pkl', 'wb') as f:
        pickle.dump({'vocab_size': 3, 'itos': {0: 'a', 1: 'b', 2: '\n'}, 'stoi': {}}, f)
    prepare.look('data/c')
    out = capsys.readouterr().out
    assert 'val: 2 tokens, 1 document, 1.00 bytes a token\ntrain: 120 tokens, 1 document, ' in out
    assert "'b'        60 50.00%" in out and out.endswith('ab\nb' * 30 + '\n')
    os.remove('data/c/meta.pkl')
    monkeypatch.setattr(prepare, 'make_tokenizer', lambda name: prep_toy_bpe())
    for ids, part in (([50256] * 300, '0 document, 0.00 bytes a token'), ([60000] * 3, '3 tokens')):
        np.array(ids, np.uint16).tofile('data/c/train.bin')  # nothing but ends of text, ids of no token
        prepare.look('c')
        assert part in capsys.readouterr().out


# training a tokenizer ---------------------------------------------------------------------------------------

def naive_bpe(counts, n_merges):
    """(tokens, {word: its tokens}) of byte pair encoding as it is defined: count all, merge one, again."""
    tokens, words = [bytes([b]) for b in range(256)], {word: list(word.encode()) for word in counts}
    for _ in range(n_merges):
        pairs = {}
        for word, ids in words.items():
            for pair in zip(ids, ids[1:]):
                pairs[pair] = pairs.get(pair, 0) + counts[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)
        if best is None or pairs[best] < 2:
            break
        for ids in words.values():
            i = 0
            while i < len(ids) - 1:
                if (ids[i], ids[i + 1]) == best:
                    ids[i:i + 2] = [len(tokens)]
                i += 1
        tokens.append(tokens[best[0]] + tokens[best[1]])
    return tokens[256:], words


def bpe_of(text, size, **more):
    """A bpe:N tokenizer of one text, all of it for training."""
    def texts():
        yield 'train', [text], False
    return prepare.make_tokenizer(f'bpe:{size}', texts=texts, n_bytes=len(text.encode()), **more)


@pytest.mark.parametrize('alphabet', ['a', 'ab', 'abc é', 'é🙂\0中\u0301'])
def test_bpe_learns_what_a_naive_reference_learns(alphabet):
    """Few letters give many ties and pairs that overlap themselves; tiktoken then encodes as was trained."""
    import tiktoken
    for seed in range(60):
        rng = random.Random(seed)
        length, often, n = rng.choice([3, 12, 60]), rng.choice([1, 2, 9]), rng.randint(0, 40)
        counts = {''.join(rng.choices(alphabet, k=rng.randint(1, length))): rng.randint(1, often)
                  for _ in range(rng.randint(1, 12))}
        learnt, words = naive_bpe(counts, n)
        assert prepare.train_bpe(counts, n) == learnt and len({*learnt}) == len(learnt)
        ranks = {token: i for i, token in enumerate([*(bytes([b]) for b in range(256)), *learnt])}
        theirs = tiktoken.Encoding('x', pat_str=r'(?s:.+)', mergeable_ranks=ranks, special_tokens={})
        assert {word: theirs.encode_ordinary(word) for word in counts} == words
    assert prepare.train_bpe({}, 5) == prepare.train_bpe({'a': 7, 'xy': 1}, 5) == []


def test_bpe_of_a_text_is_that_of_its_words(monkeypatch):
    """Cut as GPT-4's encoding cuts, in pieces and processes as in one; special tokens come last."""
    regex = pytest.importorskip('regex')
    text = tok_texts()[0][:20_000] + prep_awkward(2000) + 'end'  # space at the end is cut otherwise there
    words = regex.findall(prep_patterns()['cl100k_base'], text)
    assert regex.findall(prepare.WORD_PATTERN, text) == words
    learnt, _ = naive_bpe({word: words.count(word) for word in words}, 36)
    tok = bpe_of(text, 300)
    assert list(tok.bpe._mergeable_ranks) == [*(bytes([b]) for b in range(256)), *learnt]
    assert tok.special == dict(zip(prepare.BPE_SPECIAL, range(292, 300))) and tok.n_vocab == 300
    assert [tok.decode([i]) for i in (292, 293, 294)] == ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
    assert tok.encode('<|im_end|>a') == [294, 97] and tok.encode_array('<|im_end|>').max() < 292
    monkeypatch.setattr(prepare, 'CHUNK', 3000)
    monkeypatch.setattr(prepare, 'POOL_BYTES', 0)
    for procs in (1, 2):
        assert bpe_of(text, 300, procs=procs).state() == tok.state()
    own = bpe_of(text, 300, pattern=r'\s+|\S+')
    words = regex.findall(own.pattern, text)
    assert own.ranks != tok.ranks and own.pattern == r'\s+|\S+'
    assert own.encode_array(text).tolist() == [i for word in words for i in own.bpe.encode_ordinary(word)]


def test_bpe_encodes_any_text_as_the_exported_tokenizer_does(tmp_path):
    tk = pytest.importorskip('tokenizers')
    tok = bpe_of(''.join(part[:20_000] for part in tok_texts()) + prep_awkward(3000), 1500)
    assert tok.n_vocab == 1500
    theirs = tk.Tokenizer.from_str(tok.to_json())
    rng = random.Random(1)
    texts = [prep_awkward(40, seed) for seed in range(100)] + [part[:3000] for part in tok_texts()]
    texts += [''.join(chr(rng.choice([rng.randrange(0xd800), rng.randrange(0xe000, 0x110000)]))
                      for _ in range(30)) for _ in range(100)] + ['', 'a<|im_start|>b<|reserved_0|>\n']
    for text in texts:
        ids = tok.encode(text)
        assert tok.decode(ids) == text and theirs.encode(text).ids == ids
        assert tok.decode(tok.encode(text, allow_special=False)) == text
    again = prepare.JsonTokenizer(tok.to_json())
    assert again.n_vocab == tok.n_vocab and again.special == tok.special and again.eot == tok.eot


def test_bpe_is_prepared_and_named_again_by_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path('my.txt').write_text(tok_texts()[0][:50_000], encoding='utf-8')
    code, out, err = prep_run(['my.txt', '--tokenizer=bpe:600'], monkeypatch, capsys)
    assert code == 0 and 'learnt 336 merges from 0.04 MB' in out and 'vocabulary 600' in out
    tok = prepare.load_tokenizer('data/my_bpe600')
    made = prep_files('data/my_bpe600')
    assert made == ['meta.json', 'tokenizer.tiktoken', 'train.bin', 'val.bin'] and tok.name == 'bpe:600'
    text = ''.join(tok.decode(prep_ids('data/my_bpe600', split)) for split in ('train', 'val'))
    assert text == tok_texts()[0][:50_000]
    assert tok.ranks == bpe_of(text[:45_000], 600).ranks  # of the part for training alone
    prep_run(['my.txt', '--tokenizer=data/my_bpe600'], monkeypatch, capsys)
    assert prepare.load_tokenizer('data/my_my_bpe600').state() == tok.state()
    assert (prep_ids('data/my_my_bpe600', 'val') == prep_ids('data/my_bpe600', 'val')).all()
    with pytest.raises(OSError, match='python prepare.py --tokenizer=bpe:600`'):
        prepare.Bins('data/pystdlib_bpe600', 'train')
    source = prepare.Source('x', 'x', lambda: [], tokenizer='bpe:600')  # a source may have its own default
    assert source.tokenizer == 'bpe:600' and prep_source('a').tokenizer == 'byte'


def test_bpe_of_a_small_text_has_a_smaller_vocabulary(tmp_path, monkeypatch, capsys):
    tok = bpe_of('abab ' * 9 + 'xyz', 5000)
    assert '(4,736 were wanted, but no other pair occurs twice)' in capsys.readouterr().out
    assert tok.n_vocab == 264 + len(prepare.train_bpe({'abab': 1, ' abab': 8}, 99)) == tok.special[
        '<|reserved_4|>'] + 1 and tok.name == f'bpe:{tok.n_vocab}'
    assert bpe_of('some text', 264).encode('some') == [*b'some']
    monkeypatch.chdir(tmp_path)
    Path('my.txt').write_text('some text\n' * 9)
    for flags, part in [(['--tokenizer=bpe:263'], '264 (256 bytes, 8 special tokens)'),
                        (['--tokenizer=bpe:'], 'like bpe:4096'), (['--tokenizer=bpe:many'], 'like bpe:4096'),
                        (['--tokenizer=bpe:2000000'], '1,048,576'), (['--tokenizer=bpe'], 'bpe:N'),
                        (['--tokenizer=byte:300'], 'none of byte, char'),
                        (['--pattern=x'], 'is for --tokenizer=bpe:4096'),
                        *((['--tokenizer=bpe:300', f'--pattern={pattern}'], part) for pattern, part in [
                            ('(', 'missing )'), ('(a)|.', '(?:...)'), (r'\w+', 'leaves out'),
                            ('a*', 'leaves out')])]:
        code, _, err = prep_run(['my.txt', *flags], monkeypatch, capsys)
        assert code == 1 and part in err and err.count('\n') == 1, err
        assert os.listdir() == ['my.txt']
    with pytest.raises(ValueError, match='a text to learn from'):
        prepare.make_tokenizer('bpe:300')


def test_bpe_of_text_without_spaces_and_of_much_text_is_bounded(monkeypatch, capsys):
    rng = random.Random(0)
    word = ''.join(rng.choices('acgt', k=200_000))
    begin = time.process_time()
    tok = bpe_of(word + 'a' * 100_000, 1000)
    assert tok.n_vocab == 1000 and time.process_time() - begin < 20
    monkeypatch.setattr(prepare, 'WORDS_BYTES', 40)
    assert prepare.train_bpe({'gh' * 9: 5, 'ef' * 9: 4, 'cd' * 9: 3, 'ab' * 99: 2}, 2) == [b'gh', b'ghgh']
    assert 'learning from the 3 commonest of 4' in capsys.readouterr().out
    monkeypatch.setattr(prepare, 'SAMPLE_BYTES', 5000)
    monkeypatch.setattr(prepare, 'CHUNK', 500)
    monkeypatch.setattr(prepare, 'WORDS_BYTES', 1 << 20)
    splitter = prepare.WordSplitter(prepare.WORD_PATTERN)
    texts = [('train', [''.join(f'{c}{i} ' for i in range(1000))], True) for c in 'abcdef']
    counts, n_read = prepare.count_words(splitter, texts, sum(len(blocks[0]) for _, blocks, _ in texts))
    assert 4500 < n_read < 6000  # of six times as much: some of all, not all of the first
    assert len({word.strip() for word in counts if word.strip().isalpha()}) > 4


def test_chats_of_a_trained_tokenizer_are_chatml(tmp_path):
    tok = bpe_of(tok_texts()[0][:5000], 300)
    tok = prepare.tokenizer_from_state(json.loads(json.dumps(tok.state())))
    for name, text in hub.tokenizer_files(tok, tiny()).items():
        (tmp_path / name).write_text(text, encoding='utf-8')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert tok.chat_template == theirs.chat_template == prepare.CHATML
    for messages in CHATS:
        for prompt in (True, False):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            assert tok.chat(messages, add_generation_prompt=prompt) == expected
            text = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
            assert tok.render(messages, add_generation_prompt=prompt) == text == ''.join(
                f'<|im_start|>{m["role"]}\n{m["content"]}<|im_end|>\n' for m in messages
            ) + '<|im_start|>assistant\n' * prompt
            assert prepare.render_chat(CHAT_TEMPLATES['chatml'], messages, None, prompt) == text
    assert tok.stop_tokens == (tok.eot, tok.special['<|im_end|>'])
    assert prepare.json_tokenizer(str(tmp_path)).stop_tokens == tok.stop_tokens
    hub.save_pretrained(tiny(vocab_size=300), tok, tmp_path / 'out')
    assert json.loads((tmp_path / 'out/config.json').read_text())['eos_token_id'] == [292, 294]


def test_stop_tokens_and_tokenizers_without_a_chat_template():
    for tok in prep_tokenizers():  # none of these has one, nor have states that were stored before there were
        assert tok.stop_tokens == (tok.eot,) and 'chat_template' not in tok.state()
        with pytest.raises(ValueError, match='no chat template: give a plain prompt') as e:
            tok.chat(CHATS[0])
        assert '\n' not in str(e.value)
    assert prepare.make_tokenizer('char', 'abc').stop_tokens == ()
    spec = json.loads(tok_oracles()['gpt2'].to_str())
    names = ['<|im_start|>', '<|im_end|>', '<|eot_id|>', '</s>']
    spec['added_tokens'] += [{**spec['added_tokens'][0], 'id': 1101 + i, 'content': name}
                             for i, name in enumerate(names)]
    for template, mark in [('chatml', '<|im_end|>'), ('qwen2.5', '<|im_end|>'), ('qwen3', '<|im_end|>'),
                           ('llama3', '<|eot_id|>'), ('llama2', '</s>'), ('everything', None)]:
        config = {'chat_template': CHAT_TEMPLATES[template], 'eos_token': '<|endoftext|>'}
        tok = prepare.JsonTokenizer(json.dumps(spec), config)
        ends = ['<|endoftext|>'] + [mark] * bool(mark)
        assert tok.stop_tokens == tuple(tok.special[end] for end in ends)
    config['chat_template'] = "{{ raise_exception('it cannot be') }}"
    assert prepare.JsonTokenizer(json.dumps(spec), config).stop_tokens == (tok.eot,)


# folders that others prepared -------------------------------------------------------------------------------

def test_meta_pkl_is_read_but_runs_no_code(tmp_path):
    chars = sorted(set('hello world\n'))
    stoi = {char: i for i, char in enumerate(chars)}
    meta = {'vocab_size': len(chars), 'itos': dict(enumerate(chars)), 'stoi': stoi}
    with open(tmp_path / 'meta.pkl', 'wb') as f:
        pickle.dump(meta, f)
    tok = prepare.load_tokenizer(str(tmp_path))
    assert prepare.read_meta(str(tmp_path))['vocab_size'] == tok.n_vocab == len(chars)
    assert tok.encode('hello') == [stoi[c] for c in 'hello'] and tok.decode(tok.encode('hello')) == 'hello'

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'pwned'),)
    for bad in (pickle.dumps({**meta, 'x': Evil()}), pickle.dumps(meta)[:-9], b'', pickle.dumps([1]),
                pickle.dumps({'vocab_size': np.int64(3)})):
        with open(tmp_path / 'meta.pkl', 'wb') as f:
            f.write(bad)
        with pytest.raises(ValueError, match='meta.pkl cannot be read'):
            prepare.read_meta(str(tmp_path))
    assert not (tmp_path / 'pwned').exists()
    with open(tmp_path / 'meta.json', 'w', encoding='utf-8', newline='') as f:
        f.write('{"vocab_size": 3')
    with pytest.raises(ValueError, match='meta.json cannot be read'):
        prepare.read_meta(str(tmp_path))
    good = {'vocab_size': 3, 'dtype': 'uint16', 'eot': None, 'bytes_per_token': 1.5,
            'tokenizer': {'kind': 'char', 'chars': ['a', 'b', 'c'], 'eot': None}}
    for change in ({}, {'vocab_size': '3'}, {'vocab_size': True}, {'dtype': 'int8'}, {'dtype': ['uint16']},
                   {'eot': 'a'}, {'bytes_per_token': '1'}, {'bytes_per_token': 0}, {'bytes_per_token': []},
                   {'tokenizer': 'char'}, {'tokenizer': ['char']}, {'tokenizer': {'kind': ['char']}},
                   {'tokenizer': {'chars': 'abc'}}, {'tokenizer': {**good['tokenizer'], 'chars': 3}}):
        (tmp_path / 'meta.json').write_text(json.dumps({**good, **change}))
        if not change:
            assert prepare.load_tokenizer(str(tmp_path)).encode('cab') == [2, 0, 1]
            continue
        with pytest.raises(ValueError) as e:
            prepare.load_tokenizer(str(tmp_path))
        assert str(tmp_path) in str(e.value) and '\n' not in str(e.value)
    for text in ('[]', '3', '[' * 200_000):
        (tmp_path / 'meta.json').write_text(text)
        with pytest.raises(ValueError, match='meta.json cannot be read'):
            prepare.read_meta(str(tmp_path))


def test_without_meta_gpt2_is_assumed_and_said_once(tmp_path, capsys):
    np.arange(50, dtype=np.uint16).tofile(tmp_path / 'train.bin')
    bins = prepare.Bins(str(tmp_path), 'train')
    meta = prepare.read_meta(str(tmp_path))
    assert (meta['vocab_size'], meta['dtype'], meta['tokenizer']) == (50304, 'uint16', None)
    assert bins.n_tokens == 50
    assert capsys.readouterr().out.count('GPT-2') == 1


def test_bins_reads_foreign_shards(tmp_path):
    rng, shards = np.random.default_rng(0), []
    for i, n in enumerate((101, 57, 3)):
        tokens = rng.integers(0, 50257, n, dtype=np.uint16)
        head = np.zeros(256, np.int32)
        head[:3] = 20240520, 1, n
        (tmp_path / f'fine_train_{i:06d}.bin').write_bytes(head.tobytes() + tokens.tobytes())
        shards.append(tokens)
    bins = prepare.Bins(str(tmp_path), 'train', vocab_size=50257)
    assert bins.n_tokens == 161 and bins.n_windows(10) == 10 + 5 + 0
    expected = [t[i * 10:i * 10 + 11] for t in shards for i in range((len(t) - 1) // 10)]
    assert np.array_equal(bins.read(range(15), 10), np.array(expected))
    with open(tmp_path / 'fine_train_000001.bin', 'r+b') as f:
        f.truncate(1024 + 100)
    with pytest.raises(ValueError, match='fine_train_000001.bin.*download it again'):
        prepare.Bins(str(tmp_path), 'train')


# reading tokens ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize('n_vocab, dtype', [(65536, 'uint16'), (65537, 'uint32'), (70000, 'uint32')])
def test_bins_dtype_follows_the_vocabulary(n_vocab, dtype, tmp_path):
    text = ''.join(chr(0x10000 + i) for i in range(n_vocab))
    tok = prepare.make_tokenizer('char', text)
    meta = prepare.write_dataset(str(tmp_path / 'd'), prep_texts(prep_source(text)), tok, 'a')
    assert meta['dtype'] == dtype and tok.n_vocab == n_vocab
    assert os.path.getsize(tmp_path / 'd' / 'val.bin') == meta['val_tokens'] * np.dtype(dtype).itemsize
    bins = prepare.Bins(str(tmp_path / 'd'), 'val', vocab_size=n_vocab)
    last = bins.read([bins.n_windows(1) - 1], 1)
    assert last.tolist() == [[n_vocab - 2, n_vocab - 1]] and last.dtype == np.int64


@pytest.mark.parametrize('n, block', [(11, 10), (20, 10), (21, 10), (22, 10), (2, 1), (1000, 7)])
def test_bins_windows_cover_the_file_once(n, block, tmp_path):
    tokens = np.arange(n, dtype=np.uint16)
    tokens.tofile(tmp_path / 'train.bin')
    bins = prepare.Bins(str(tmp_path), 'train', 'uint16')
    w = bins.read(np.arange(bins.n_windows(block)), block)
    x, y = w[:, :-1], w[:, 1:]
    assert np.array_equal(y, x + 1)                                  # shifted by one, here the ids say so
    assert np.array_equal(y.ravel(), tokens[1:1 + len(w) * block]) and n - 1 - y.size < block
    with pytest.raises(IndexError):
        bins.read([len(w)], block)


def test_bins_one_line_for_what_is_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, command in {'shakespeare_char': 'python prepare.py shakespeare --tokenizer=char',
                          'shakespeare': 'python prepare.py shakespeare --tokenizer=gpt2',
                          'pystdlib_bpe4096': 'python prepare.py',
                          'pystdlib_byte': 'python prepare.py --tokenizer=byte',
                          'pystdlib_cl100k_base': 'python prepare.py --tokenizer=cl100k_base',
                          'fineweb_edu_gpt2': 'python prepare.py fineweb_edu',
                          'fineweb_gpt2': 'python prepare.py fineweb',
                          'minimind_gpt2': 'python prepare.py minimind --tokenizer=gpt2',
                          'minimind_sft': 'python prepare.py minimind_sft',
                          'pydoc_chat': 'python prepare.py pydoc_chat',
                          'mydata': 'python prepare.py my.txt --out=mydata'}.items():
        with pytest.raises(FileNotFoundError) as e:
            prepare.Bins(os.path.join('data', name), 'train')
        assert f'is not prepared: no train.bin; run `{command}`' in str(e.value)
    os.makedirs('data/x')
    ids = np.zeros(300, np.uint16)
    ids[222] = 777
    ids.tofile('data/x/val.bin')
    bins = prepare.Bins('data/x', 'val', 'uint16', vocab_size=700)
    with pytest.raises(ValueError, match=r'has 300 tokens, .* block_size\+1 = 1025: lower --block_size'):
        bins.n_windows(1024)
    with pytest.raises(ValueError, match=r'val.bin has 300 tokens.*= 301'):
        bins.n_windows(300)
    assert bins.n_windows(299) == 1
    with pytest.raises(ValueError, match=r'val.bin: token 777 at position 222 is outside .* of 700'):
        bins.read([0, 1, 2], 99)
    assert bins.read([0, 1], 99).shape == (2, 100)
    with open('data/x/val.bin', 'ab') as f:
        f.write(b'x')
    with pytest.raises(ValueError, match='601 bytes are no whole number of uint16'):
        prepare.Bins('data/x', 'val', 'uint16')
    for n in (0, 1, 99):  # a split without a window, whether its windows are counted or read
        np.zeros(n, np.uint16).tofile('data/x/val.bin')
        bins = prepare.Bins('data/x', 'val', 'uint16')
        for use in (bins.n_windows, functools.partial(bins.read, [0]), functools.partial(bins.read, [])):
            with pytest.raises(ValueError, match=f'val.bin has {n} tokens.* block_size.1 = 100'):
                use(99)
    for name, message in {'val.mask.bin': 'val.mask.bin has 98 bytes, one for each of 99 tokens',
                          'fine_val_01.mask.bin': 'the mask of tokens that are not there'}.items():
        Path('data/x', name).write_bytes(b'\1' * 98)
        with pytest.raises(ValueError, match=message):
            prepare.Bins('data/x', 'val', 'uint16')
        os.remove(f'data/x/{name}')


def test_bins_targets_follow_the_mask(tmp_path):
    """Shards, each with its mask, against plain indexing."""
    rng = np.random.default_rng(0)
    sizes, expected = (45, 7, 71), []
    for i, n in enumerate(sizes):
        ids, mask = rng.integers(1000, size=n, dtype=np.uint16), rng.integers(2, size=n, dtype=np.uint8)
        ids.tofile(tmp_path / f'train_{i}.bin')
        mask.tofile(tmp_path / f'train_{i}.mask.bin')
        for at in range(0, n - 10, 10):  # a window of 11 tokens ends before n
            learnt = [int(ids[j]) if mask[j] else -1 for j in range(at + 1, at + 11)]
            expected.append((ids[at:at + 10].tolist(), learnt))
    bins = prepare.Bins(str(tmp_path), 'train', 'uint16')
    order = rng.permutation(len(expected))
    inputs, targets = bins.batch(order, 10)
    assert bins.n_windows(10) == len(expected) and inputs.dtype == targets.dtype == np.int64
    assert np.array_equal(inputs, [expected[i][0] for i in order])
    assert np.array_equal(targets, [expected[i][1] for i in order])
    assert bins.n_targets == sum(np.fromfile(path, np.uint8).sum() for path in tmp_path.glob('*.mask.bin'))
    with pytest.raises(ValueError, match=r'train_\d.bin: token \d+ at position \d+ is .* of 500: mend it'):
        bins.check_vocabulary(500, 'mend it')
    os.remove(tmp_path / 'train_1.mask.bin')
    with pytest.raises(ValueError, match='train_1.mask.bin has 0 bytes, one for each of 7 tokens'):
        prepare.Bins(str(tmp_path), 'train', 'uint16')
    for path in tmp_path.glob('*.mask.bin'):
        os.remove(path)
    bins = prepare.Bins(str(tmp_path), 'train', 'uint16')
    windows = bins.read(order, 10)
    assert all(map(np.array_equal, bins.batch(order, 10), (windows[:, :-1], windows[:, 1:])))


def prep_rss():
    try:
        with open('/proc/self/statm', encoding='utf-8', newline='') as f:
            return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
    except OSError:
        pytest.skip('this system has no /proc to read the memory in use from')


def test_bins_memory_stays_bounded(tmp_path):
    with open(tmp_path / 'train.bin', 'wb') as f:                             # 200 MB
        for i in range(13):
            f.write(np.full(8 << 20, i, np.uint16))
    bins = prepare.Bins(str(tmp_path), 'train', 'uint16')
    order = np.random.default_rng(0).permutation(bins.n_windows(1024))[:48 * 2000].reshape(2000, 48)
    bins.read(order[0], 1024)
    before, peak = prep_rss(), 0
    for batch in order:
        got = bins.read(batch, 1024)
        assert got[0, 0] == batch[0] * 1024 // (8 << 20)
        peak = max(peak, prep_rss())
    assert peak - before < 100 << 20


# downloads --------------------------------------------------------------------------------------------------

PREP_BODY = bytes(random.Random(3).randrange(256) for _ in range(200_000))


class PrepHandler(http.server.BaseHTTPRequestHandler):
    """/ok with ranges, /noranges without; /500x2 fails twice; /cut sends half, once; /lie always does"""
    seen = []

    def do_GET(self):
        start, path = self.headers.get('Range'), self.path
        self.seen.append((path, start))
        count = sum(p == path for p, _ in self.seen)
        status = {'/404': 404, '/always500': 503, '/429': 429 if count == 1 else 200}.get(path, 200)
        status = 500 if path == '/500x2' and count < 3 else status
        body, begin = PREP_BODY, 0
        if status == 200 and start and path != '/noranges':
            begin = int(start[6:-1])
            status = 206 if begin < len(body) else 416
        body = body[begin:] if status in (200, 206) else b'sorry'
        self.send_response(status)
        self.send_header('Content-Length', str(len(body)))
        if status in (206, 416):
            place = f'{begin}-{len(PREP_BODY) - 1}' if status == 206 else '*'
            self.send_header('Content-Range', f'bytes {place}/{len(PREP_BODY)}')
        self.end_headers()
        half = path == '/cut' and count == 1 or path == '/lie'
        self.wfile.write(body[:len(body) // 2] if half else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def prep_server(monkeypatch):
    pytest.importorskip('requests')
    monkeypatch.setattr(prepare, 'RETRY_WAITS', (0, 0, 0))
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    PrepHandler.seen = []
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), PrepHandler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f'http://127.0.0.1:{server.server_address[1]}'
    server.shutdown()
    server.server_close()


PREP_SUM = hashlib.sha256(PREP_BODY).hexdigest()


@pytest.mark.parametrize('path, have, requests_made', [
    ('/ok', 0, 1), ('/ok', 1000, 1), ('/noranges', 1000, 1), ('/500x2', 0, 3), ('/429', 0, 2), ('/cut', 0, 2),
    ('/ok', len(PREP_BODY), 2)])
@pytest.mark.parametrize('known', [True, False])
def test_fetch_brings_the_file(path, have, requests_made, known, prep_server, tmp_path, capsys):
    target = str(tmp_path / 'deep' / 'file')
    os.makedirs(os.path.dirname(target))
    with open(target + '.part', 'wb') as f:
        f.write(PREP_BODY[:have])
    checks = {'size': len(PREP_BODY), 'sha256': PREP_SUM} if known else {}
    assert prepare.fetch(prep_server + path, target, **checks) == target
    with open(target, 'rb') as f:
        assert f.read() == PREP_BODY
    assert os.listdir(os.path.dirname(target)) == ['file']
    made = requests_made if not (known and have == len(PREP_BODY)) else 0    # complete, only not renamed yet
    assert len(PrepHandler.seen) == made
    if have:
        assert all(start == f'bytes={have}-' for _, start in PrepHandler.seen[:1])
    prepare.fetch(prep_server + path, target, **checks)                          # it is there already
    assert len(PrepHandler.seen) == made


def test_fetch_says_what_is_wrong_in_one_line(prep_server, tmp_path):
    target = str(tmp_path / 'file')
    table = [('/404', {}, FileNotFoundError, ['404', 'check the address']),
             ('/always500', {}, OSError, ['503', target, 'or fly']),
             ('/lie', {}, OSError, ['broke off after', 'run this again', '/lie', target]),
             ('/ok', {'size': 5}, ValueError, ['200,000', '5 are expected']),
             ('/ok', {'sha256': '0' * 64}, ValueError, [PREP_SUM[:12], '000000000000'])]
    for path, checks, kind, parts in table:
        with pytest.raises(kind) as e:
            prepare.fetch(prep_server + path, target, instead=', or fly', **checks)
        assert all(part in str(e.value) for part in parts) and '\n' not in str(e.value), e.value
        assert not os.path.exists(target)
        if path != '/lie':
            assert not os.path.exists(target + '.part')
        else:                                                # what came is kept, and whole in front
            with open(target + '.part', 'rb') as f:
                assert PREP_BODY.startswith(f.read())
            os.remove(target + '.part')


def test_fetch_offline_names_the_way_out(tmp_path, monkeypatch, capsys):
    requests = pytest.importorskip('requests')
    monkeypatch.chdir(tmp_path)

    def offline(*_, **__):
        raise requests.ConnectionError('Failed to resolve host ' * 10)
    monkeypatch.setattr(requests, 'get', offline)
    monkeypatch.setattr('time.sleep', lambda _: None)
    code, _, stderr = prep_run(['shakespeare', '--tokenizer=char'], monkeypatch, capsys)
    assert code == 1 and len(stderr.strip().splitlines()) == 1
    assert 'cannot reach raw.githubusercontent.com' in stderr and 'python prepare.py my.txt' in stderr
    assert os.path.join('data', 'shakespeare', 'input.txt') in stderr and prep_files(tmp_path) == []


# model ------------------------------------------------------------------------------------------------------

MLA = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12)
YARN = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 12}
GPT2 = dict(pos='learned', norm='layernorm', norm_eps=1e-5, mlp='gelu_tanh', qk_norm=False, bias=True)
CHOICES = {  # the axes of the pairwise grid; None and {}: GPTConfig's defaults
    'attention': [{}, dict(n_kv_head=2), dict(n_kv_head=1, head_dim=10, qk_norm='whole'), MLA,
                  {**MLA, 'q_lora_rank': 12}, dict(n_kv_head=2, attn_sink=True, qk_norm=False)],
    'position': [{}, dict(rope_scaling=YARN), dict(pos_pattern='NP'), dict(pos='alibi'),
                 dict(pos='learned'), dict(pos='sinusoidal'), dict(pos='none'),
                 dict(pos='alibi', pos_pattern='PN')],
    'window': [{}, dict(window=5, window_pattern='S'), dict(window=5, window_pattern='SL')],
    'norm': [{}, dict(norm='layernorm', bias=True), dict(wiring='post'),
             dict(wiring='output', embed_norm=True),
             dict(wiring='sandwich', attn_softcap=3.0), dict(wiring='parallel', norm='layernorm'),
             dict(wiring='parallel_2', residual_scale=0.7), dict(residual_lambdas=True, norm_bias=True)],
    'mlp': [{}, dict(mlp='gelu_tanh'), dict(mlp='relu2', logit_softcap=5.0, tie_word_embeddings=False),
            dict(n_expert=4, n_shared_expert=1, d_expert=24),
            dict(n_expert=4, n_expert_active=3, router='sigmoid', balance_bias=True, n_dense_layer=1,
                 d_expert=20),
            dict(n_expert=6, n_group=3, topk_group=2, expert_pattern='DE', mlp='gelu', mlp_bias=True)],
    'documents': [{}, dict(document_token=3)],
    'mixer': [{}, dict(mixer_pattern='DA', linear_n_key_head=2, linear_n_value_head=4),
              dict(attn_gate=True), dict(mixer_pattern='MD'),
              dict(mixer_pattern='D', linear_key_head_dim=6, linear_value_head_dim=10,
                   linear_conv_kernel_dim=2)],
}


TINY = dict(n_layer=2, n_head=4, n_embd=32, block_size=24, vocab_size=61)


def combined(row):
    """The options of a row of the grid, {axis: number of its choice}."""
    return {key: value for name, i in row.items() for key, value in CHOICES[name][i].items()}


def is_valid(row):
    try:
        GPTConfig(**{**TINY, **combined(row)})
        return True
    except ValueError:
        return False


def pairwise(axes):
    """Few combinations in which every two choices of two axes meet that may, by a greedy search."""
    names, generator, nothing = list(axes), random.Random(0), dict.fromkeys(axes, 0)
    pairs = {((a, i), (b, j)) for a, b in itertools.combinations(names, 2)
             for i in range(len(axes[a])) for j in range(len(axes[b])) if is_valid({a: i, b: j})}
    rows = []
    while pairs:
        first = dict(min(pairs))
        tries = [row for row in ({name: generator.randrange(len(axes[name])) for name in names} | first
                                 for _ in range(60)) if is_valid(row)] or [nothing | first]
        covered = [(len(pairs & set(itertools.combinations(row.items(), 2))), list(row.items()))
                   for row in tries]
        rows.append(dict(max(covered)[1]))
        pairs -= set(itertools.combinations(rows[-1].items(), 2))
    return rows


def grid_name(options):
    return ' '.join(f'{k}={v}' for k, v in options.items() if k != 'rope_scaling')[:150] or 'default'


DYNAMIC = dict(rope_scaling={'rope_type': 'dynamic', 'factor': 4.0, 'original_max_position_embeddings': 12})
GRID = [*(combined(row) for row in pairwise(CHOICES)), DYNAMIC]


def tiny(**options):
    """A model whose every weight matters: nothing is left at zero or one."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**TINY, **options}))
    with torch.no_grad():
        for name, w in model.named_parameters():
            if model.marks[name].group == 'vector':
                w += torch.randn_like(w) * 0.2
            else:
                w.copy_(torch.randn_like(w) * 0.3)
        for w in model.buffers():
            w.copy_(torch.randn_like(w) * 0.2)
    return model.eval()


def bare_context(eager=True, routing=None):
    """For a module that needs no positions."""
    return flat.ForwardContext(*[None] * 4, {}, {}, None, None, eager, torch.float32, None, routing)


def tokens(model, *shape):
    """Random tokens; every few of them ends a document, if the model knows any."""
    idx = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    if model.config.document_token is not None:
        idx[idx % 7 == 0] = model.config.document_token
    return idx


def naive_attention(q, k, v, q_pos, k_pos, scale, window=None, slopes=None, softcap=0.0, sink=None):
    """Loops over rows, heads, queries and keys, in float64 -> outputs and weights."""
    q, k, v = q.double(), k.double(), v.double()
    (B, H, T, _), (K, S) = q.shape, k.shape[1:3]
    y, weights = torch.zeros(B, H, T, v.shape[-1]).double(), torch.zeros(B, H, T, S).double()
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        total, parts = math.exp(sink[h]) if sink is not None else 0.0, {}
        for s in range(S):
            age = q_pos[b][t] - k_pos[b][s]
            if k_pos[b][s] < 0 or not 0 <= age < (window or 10**9):
                continue
            score = float(q[b, h, t] @ k[b, h * K // H, s]) * scale
            score = softcap * math.tanh(score / softcap) if softcap else score
            parts[s] = math.exp(score - (slopes[h] * age if slopes else 0.0))
        for s, part in parts.items():
            weights[b, h, t, s] = part / (total + sum(parts.values()))
            y[b, h, t] += weights[b, h, t, s] * v[b, h * K // H, s]
    return y, weights


@pytest.mark.parametrize('K', [4, 2, 1])
@pytest.mark.parametrize('T, S, start', [(7, 7, 0), (1, 9, 8), (3, 9, 6)])
@pytest.mark.parametrize('window, alibi, softcap, sunk', [
    (None, False, 0.0, False), (3, False, 0.0, False), (None, True, 0.0, False), (4, True, 1.5, True)])
@pytest.mark.parametrize('grad', [True, False])
def test_attend_equals_naive_loops(K, T, S, start, window, alibi, softcap, sunk, grad):
    g = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(2, n, t, d, generator=g) for n, t, d in ((4, T, 6), (K, S, 6), (K, S, 10)))
    sink = torch.randn(4, generator=g) if sunk else None
    config = GPTConfig(n_head=4, n_embd=32, block_size=16, n_layer=1, vocab_size=9,
                       **(dict(window=window, window_pattern='S') if window else {}))
    model = GPT(config)
    q_pos, k_pos = torch.arange(start, start + T)[None], torch.arange(S)[None]
    cache = model.make_cache(2, 16, max_rewind=16) if start else None
    if cache is not None:
        cache.length += start
        cache.longest = start
    expected, weights = naive_attention(q, k, v, q_pos.expand(2, T).tolist(), k_pos.expand(2, S).tolist(),
                                        0.3, window, flat.alibi_slopes(4).tolist() if alibi else None,
                                        softcap, sink)
    with torch.set_grad_enabled(grad):
        context = model.context(torch.zeros(2, T, dtype=torch.long), cache)
        for context.eager in (False, True) if not (softcap or sunk) else (True,):
            mask = model.mask(context, window, alibi)
            y = flat.attend(q, k, v, context, mask, 0.3, 0.0, softcap, sink)
            torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-4)
        seen = []
        for block in (1, 2, 4):
            y = flat.eager_attention(q, k, v, mask, 0.3, 0.0, softcap, sink, seen, block=block)
            torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(seen[-1].double(), weights, atol=1e-5, rtol=1e-4)


def test_rows_at_different_places_equal_naive_loops():
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(3, n, t, 6, generator=g) for n, t in ((4, 2), (2, 9), (2, 9)))
    q_pos = torch.tensor([[3, 4], [7, 8], [0, 1]])
    k_pos = torch.arange(9).expand(3, 9)
    bias = torch.zeros(3, 1, 2, 9).masked_fill(~flat.visible(q_pos, k_pos), -math.inf)
    for eager in (True, False):
        y = flat.attend(q, k, v, bare_context(eager), flat.Mask(bias, False, None), 0.4)
        expected, _ = naive_attention(q, k, v, q_pos.tolist(), k_pos.tolist(), 0.4)
        torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize('device, dtype, T, fits_flash, has_bias, is_training, expected', [
    ('cpu', torch.float32, 7, True, False, True, ('gqa', True)),
    ('cpu', torch.bfloat16, 1, True, False, False, ('rows', True)),
    ('mps', torch.float32, 7, True, False, True, ('rows', True)),
    ('cuda', torch.bfloat16, 7, True, False, True, ('gqa', True)),       # training: the only cuDNN
    ('cuda', torch.bfloat16, 7, True, False, False, ('gqa', False)),     # prefill: a new shape each time
    ('cuda', torch.bfloat16, 1, True, False, False, ('rows', False)),    # decoding
    ('cuda', torch.bfloat16, 7, True, True, True, ('rows', False)),      # a mask
    ('cuda', torch.float32, 7, True, False, True, ('repeat', True)),     # no flash attention
    ('cuda', torch.float16, 7, True, False, False, ('repeat', False)),   # none before Ampere
    ('cuda', torch.bfloat16, 7, False, False, False, ('repeat', False))])
def test_which_kernel_attends(device, dtype, T, fits_flash, has_bias, is_training, expected):
    assert flat.sdpa_plan(device, dtype, T, fits_flash, has_bias, is_training) == expected


@pytest.fixture
def as_cuda(monkeypatch):
    """Attention as it would be called on CUDA."""
    plan = flat.sdpa_plan
    monkeypatch.setattr(flat, 'sdpa_plan', lambda device, *rest: plan('cuda', *rest))


@pytest.mark.parametrize('K, compiled', [(4, False), (2, False), (1, False), (2, True)])
def test_attention_as_called_on_cuda_equals_naive_loops(K, compiled, as_cuda, monkeypatch):
    cudnn, kernel = [], F.scaled_dot_product_attention

    def spy(*args, **kwargs):
        assert not kwargs['enable_gqa'] and args[0].shape[1] == args[1].shape[1]  # float32 kernels have none
        cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
        return kernel(*args, **kwargs)
    if not compiled:
        monkeypatch.setattr(F, 'scaled_dot_product_attention', spy)
    attend, context = flat.attend, bare_context(eager=False)
    if compiled:
        attend = torch.compile(attend, fullgraph=True, dynamic=False, backend='aot_eager')
    g = torch.Generator().manual_seed(0)
    for T, S, masked, grad in ((7, 7, False, True), (7, 7, False, False), (7, 7, True, True),
                               (1, 7, False, False)):
        q, k, v = (torch.randn(2, n, t, 6, generator=g) for n, t in ((4, T), (K, S), (K, S)))
        q_pos, k_pos = torch.arange(S - T, S)[None], torch.arange(S)[None]
        window, bias = (3, torch.zeros(())) if masked else (None, None)
        if masked:
            bias = bias.where(flat.visible(q_pos, k_pos, q_pos - 2), -math.inf)
        with torch.set_grad_enabled(grad):
            y = attend(q, k, v, context, flat.Mask(bias, T == S, window), 0.4)
        expected, _ = naive_attention(q, k, v, q_pos.expand(2, T).tolist(), k_pos.expand(2, S).tolist(), 0.4,
                                      window)
        torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-4)
    assert compiled or cudnn == [True, False, False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize('window, alibi, documents', [(9, False, False), (None, True, True)])
def test_flex_attention_equals_the_dense_mask(window, alibi, documents, monkeypatch):
    import torch.nn.attention.flex_attention as flex
    monkeypatch.setattr(flex, '_validate_device', lambda *tensors: None)  # it has a backward, but none to use
    T, g = 40, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, T, 16, generator=g).requires_grad_() for n in (4, 2, 2))
    starts = torch.tensor([0, 7, 30])[torch.tensor([[0] * 7 + [1] * 23 + [2] * 10, [0] * 30 + [2] * 10])]
    slopes = flat.alibi_slopes(4)

    def attend(q, k, v, starts, slopes, is_flex):
        positions = torch.arange(T)[None]
        first = torch.zeros_like(positions) if starts is None else starts
        bias = 0.0 if slopes is None else -slopes[:, None, None] * (positions[..., None] - positions)
        first = torch.maximum(first, positions - (window or T) + 1)
        bias = torch.as_tensor(bias).where(flat.visible(positions, positions, first), -math.inf)
        mask = flat.flex_mask(T, window, starts, slopes, q.device) if is_flex else None
        return flat.attend(q, k, v, bare_context(eager=False), flat.Mask(bias, True, window, mask), 0.4)
    given = (q, k, v, starts if documents else None, slopes if alibi else None)
    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend='aot_eager')
    dense, sparse = attend(*given, False), compiled(*given, True)
    torch.testing.assert_close(sparse, dense, atol=1e-5, rtol=1e-4)
    grads = [torch.autograd.grad(y.sin().sum(), (q, k, v)) for y in (dense, sparse)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


def test_masks_are_left_to_flex_attention_where_it_pays(monkeypatch):
    import torch.nn.attention.flex_attention as flex
    assert not flat.use_flex('cuda', torch.bfloat16, 1024, 0.0)  # not compiled
    monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: True)
    for change, expected in [({}, True), (dict(device='cpu'), False), (dict(dtype=torch.float32), False),
                             (dict(T=64), False), (dict(dropout=0.1), False)]:
        assert flat.use_flex(**{**dict(device='cuda', dtype=torch.bfloat16, T=1024, dropout=0.0),
                                **change}) == expected
    monkeypatch.undo()
    model = tiny(n_kv_head=2, head_dim=16, window=5, window_pattern='SL', pos='alibi', document_token=3)
    idx, calls, kernel = tokens(model, 2, 24), [], flex.flex_attention

    def spy(*args, **kwargs):
        calls.append(1)
        return kernel(*args, **kwargs)
    with torch.no_grad():
        expected = model(idx)
        monkeypatch.setattr(flat, 'use_flex', lambda *a: True)
        monkeypatch.setattr(flex, 'flex_attention', spy)
        y = torch.compile(model, fullgraph=True, dynamic=False, backend='aot_eager')(idx)
        torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
        assert len(calls) == 2
        model(idx, cache=model.make_cache(2, 24))
        assert len(calls) == 2


def feed(model, idx, chunks, cache):
    out, at = [], 0
    for n in chunks:
        out.append(model(idx[:, at:at + n], cache=cache))
        at += n
    return torch.cat(out, dim=1)


def memory_efficient_layout(*args, kernel=F.scaled_dot_product_attention, **kwargs):
    """SDPA, its result laid out as CUDA's memory-efficient kernel has it: (B, queries, heads, D)."""
    return kernel(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize('options', GRID, ids=grid_name)
@torch.no_grad()
def test_cached_equals_uncached(options, monkeypatch):
    torch.set_num_threads(1)  # small tensors: a second one only waits
    model = tiny(**options)
    idx = tokens(model, 3, 24)
    full = model(idx)
    assert full.std() > 0.1  # else equality would say little
    with torch.enable_grad():  # the path that trains
        torch.testing.assert_close(model(idx).detach(), full, atol=1e-4, rtol=1e-4)
    def close(a, b):
        return torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    for static, splits in ((False, ([24], [1] * 24, [3, 5, 4, 12])),
                           (True, ([23, 1], [4, 1, 1, 6, 9, 2, 1]))):
        if static:  # each kind of attention, by the kernel that a static cache gets on CUDA
            monkeypatch.setattr(F, 'scaled_dot_product_attention', memory_efficient_layout)
        for chunks in splits:
            close(feed(model, idx, chunks, model.make_cache(3, 24, static)), full)
        close(model(idx[:, :5], cache=model.make_cache(3, 8, static), keep=2), full[:, 3:5])
        for has_rewound in (False, True):  # rows of different lengths, by padding or by taking tokens back
            cache, at = model.make_cache(3, 24, static, max_rewind=5), [14, 11, 9]
            if not has_rewound:
                last = model(idx[:, :14], cache=cache, keep=2, lengths=torch.tensor(at))
                close(last, torch.stack([full[row, a - 2:a] for row, a in enumerate(at)]))
            elif any(cache.states):
                continue  # refused, see test_a_state_is_reset_and_never_rewound
            else:
                model(idx[:, :14], cache=cache, keep=0)
                cache.rewind(torch.tensor([0, 3, 5]))
            for n in (2, 1, 1, 4):
                new = torch.stack([idx[row, a:a + n] for row, a in enumerate(at)])
                close(model(new, cache=cache), torch.stack([full[row, a:a + n] for row, a in enumerate(at)]))
                at = [a + n for a in at]
            lengths = torch.tensor([1, 0, 2])  # two rows go on, by other numbers of tokens
            new = torch.stack([idx[row, a:a + 2] for row, a in enumerate(at)])
            last = model(new, cache=cache, keep=1, lengths=lengths)[[0, 2], 0]
            close(last, torch.stack((full[0, at[0]], full[2, at[2] + 1])))
            at = [at[0] + 1, at[1], at[2] + 2]
            cache.select([2, 0, 1, 2])
            new = torch.stack([idx[row, at[row]:at[row] + 1] for row in (2, 0, 1, 2)])
            close(model(new, cache=cache), torch.stack([full[row, at[row]:at[row] + 1]
                                                        for row in (2, 0, 1, 2)]))
            assert cache.length.tolist() == [at[2] + 1, at[0] + 1, at[1] + 1, at[2] + 1]
            cache.reset(torch.tensor([False, True, False, True]))  # two rows begin anew
            new, lengths = idx[[0, 1, 2, 0], :9], torch.tensor([0, 7, 0, 9])
            last = model(new, cache=cache, keep=1, lengths=lengths)[[1, 3], 0]
            close(last, torch.stack((full[1, 6], full[0, 8])))
            close(model(idx[[2, 1, 1, 0], [at[2] + 1, 7, at[1] + 1, 9]][:, None], cache=cache)[:, 0],
                  full[[2, 1, 1, 0], [at[2] + 1, 7, at[1] + 1, 9]])
        cache = model.make_cache(2, 24, static)  # a row that ends with the cache, beside a longer one
        model(idx[:2, :20], cache=cache, lengths=torch.tensor([20, 3]))
        new, lengths = torch.stack((idx[0, 4:24], idx[1, 3:23])), torch.tensor([4, 20])
        new[0, :4] = idx[0, 20:]
        last = model(new, cache=cache, keep=2, lengths=lengths)
        close(last, torch.stack((full[0, 22:24], full[1, 21:23])))


@pytest.mark.parametrize('options', GRID, ids=grid_name)
def test_every_parameter_learns(options):
    torch.set_num_threads(1)
    model = tiny(**options).train()
    idx = tokens(model, 3, 24)
    loss, aux = model(idx[:, :-1], idx[:, 1:])
    loss.backward()
    without = [name for name, w in model.named_parameters()
               if w.grad is None or not w.grad.abs().max() > 1e-7]
    # what all keys have in common cancels in the softmax, unless positions rotate it
    assert not [name for name in without if not name.endswith('k_norm.bias')]


@pytest.mark.parametrize('options', GRID, ids=grid_name)
def test_documents_are_as_if_alone_and_rotations_as_configured(options):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPTConfig(**{**TINY, **options})
    flat_bench.check_documents(config)
    flat_bench.check_rotation(config)


@pytest.mark.parametrize('options', GRID, ids=grid_name)
def test_no_token_sees_the_future_or_past_its_window(options):
    model = tiny(**options)
    idx = tokens(model, 1, 24)
    idx[idx == 3] = 4
    changed = idx.clone()
    changed[0, 7] = 5 if idx[0, 7] != 5 else 6
    # a window of 5 in 2 layers reaches 8 tokens back
    windowed = all(block.attn.window and not block.attn.states for block in model.h)
    end = 7 + 9 if windowed else 24
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            a, b = model(idx), model(changed)
        seen = (a - b).abs().amax(-1)[0] > 1e-5
        assert not seen[:7].any() and seen[7:end].float().mean() > 0.8 and not seen[end:].any()


@torch.no_grad()
def test_caches_refuse_what_does_not_fit_and_keep_to_their_size():
    model = tiny(n_kv_head=2)
    cache = model.make_cache(2, 8)
    # rows, slots and one for padding, k/v heads, width, layers, bytes
    assert cache.nbytes == 2 * (8 + 1) * (2 + 2) * 8 * 2 * 4
    assert cache.slots[0].tensors[0].shape == (2, 2, 9, 8)
    model(tokens(model, 2, 8), cache=cache)
    with pytest.raises(ValueError, match='cache is full: 9 tokens into 8 slots'):
        model(tokens(model, 2, 1), cache=cache)
    for n in (1, -1):
        with pytest.raises(ValueError, match='cannot rewind'):
            model.make_cache(1, 8).rewind(n)
    for options in ({}, dict(pos='learned'), dict(pos='alibi'), dict(document_token=3), MLA):
        other = tiny(**options)
        cache = other.make_cache(2, 24)
        other(tokens(other, 2, 24), cache=cache)
        with pytest.raises(ValueError, match='cache is full: 25 tokens into 24 slots'):
            other(tokens(other, 2, 1), cache=cache)
    with pytest.raises(ValueError, match='3 rows of tokens for a cache of 2'):
        model(tokens(model, 3, 1), cache=model.make_cache(2, 8))
    for rows, length, rewind in ((1, 25, 0), (1, 0, 0), (0, 4, 0), (1, 4, -1)):
        with pytest.raises(ValueError, match='block_size=24'):
            model.make_cache(rows, length, max_rewind=rewind)
    with pytest.raises(ValueError, match='25 tokens do not fit into block_size=24'):
        model(tokens(model, 1, 25))
    with torch.autocast('cpu', torch.bfloat16):
        assert model.make_cache(1, 4).slots[0].tensors[0].dtype == torch.bfloat16
    latent = tiny(**MLA)
    assert latent.make_cache(2, 8).nbytes == 2 * (8 + 1) * (16 + 4) * 2 * 4
    assert latent.cache_elements() == (16 + 4) * 2 and latent.cache_elements(8) == 8 * (16 + 4) * 2


@torch.no_grad()
def test_a_window_keeps_a_window_and_what_may_be_taken_back():
    model = tiny(window=5, window_pattern='SL', n_layer=3, block_size=80)
    for rewind in (0, 3):
        cache = model.make_cache(2, 80, max_rewind=rewind)
        assert [slots.count for slots in cache.slots] == [5 + rewind, 80, 5 + rewind]
        size, idx = cache.nbytes, tokens(model, 2, 80)
        full = model(idx)
        for at in range(0, 70, 7):
            torch.testing.assert_close(model(idx[:, at:at + 7], cache=cache), full[:, at:at + 7],
                                       atol=1e-4, rtol=1e-4)
        assert cache.nbytes == size
        if rewind:
            cache.rewind(2)
            cache.rewind(torch.tensor([1, 0]))  # together as far as is allowed
            new = torch.stack((idx[0, 67:70], idx[1, 68:71]))
            torch.testing.assert_close(model(new, cache=cache),
                                       torch.stack((full[0, 67:70], full[1, 68:71])), atol=1e-4, rtol=1e-4)
        with pytest.raises(ValueError, match=f'max_rewind={rewind}'):
            cache.rewind(rewind + 2)
        cache.rewind(cache.length.clone())  # all of it always may
        torch.testing.assert_close(feed(model, idx, [9, 1, 30], cache), full[:, :40], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('options', [{}, dict(q_lora_rank=12), dict(rope_scaling={**YARN, 'mscale': 0.7,
                                                                                 'mscale_all_dim': 0.9})])
@torch.no_grad()
def test_absorbed_latent_attention_equals_expanded(options):
    model = tiny(**MLA, **options)
    idx, attn = tokens(model, 2, 20), model.h[0].attn
    x, pos, context = torch.randn(2, 20, 32), torch.arange(20)[None], model.context(idx)
    expanded, absorbed = attn(x, context, absorb=False), attn(x, context, absorb=True)
    torch.testing.assert_close(absorbed, expanded, atol=1e-4, rtol=1e-4)
    # and both equal the paper's equations, head by head: arXiv:2405.04434, equations 9 to 19
    def norm(v, w):
        return v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w
    w = {name: v.double() for name, v in attn.state_dict().items()}
    q, latent, k_rope = (x.double() @ w['c_attn.weight'].T).split(attn.c_attn.widths, -1)
    if 'q_lora_rank' in options:
        q = norm(q, w['q_norm.weight']) @ w['c_q.weight'].T
    kv = norm(latent, w['kv_norm.weight']) @ w['c_kv.weight'].T
    scale = (8 + 4) ** -0.5 * ((0.1 * 0.9 * math.log(4) + 1) ** 2 if 'rope_scaling' in options else 1)
    def turn(v):
        return flat.rotate(v[:, None], tuple(r.double() for r in context.ropes[attn.rope_kind]))
    heads = []
    for h in range(4):
        q_h = torch.cat((q[..., 12 * h:12 * h + 8][:, None], turn(q[..., 12 * h + 8:12 * h + 12])), -1)
        k_h = torch.cat((kv[..., 20 * h:20 * h + 8][:, None], turn(k_rope)), -1)
        heads.append(naive_attention(q_h, k_h, kv[..., 20 * h + 8:20 * h + 20][:, None],
                                     *[pos.expand(2, 20).tolist()] * 2, scale)[0])
    y = torch.cat(heads, -1)[:, 0] @ w['c_proj.weight'].T
    torch.testing.assert_close(expanded.double(), y, atol=1e-4, rtol=1e-4)


def pretend_device(monkeypatch):
    """Fake tensors on 'meta' flow as on a GPU, without one: an operator refuses tensors of two devices, and
    nothing can wait for their values, but for int(...), which is 8."""
    importlib.import_module('torch._dynamo')  # which keeps what it finds, and is imported on the way
    monkeypatch.setattr(torch, 'is_autocast_enabled', lambda device: False)
    monkeypatch.setattr(torch, 'autocast', lambda device, **options: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, '__int__', lambda x: 8)
    return FakeTensorMode()


@pytest.mark.parametrize('options', [
    dict(window=5, window_pattern='SL', n_kv_head=2, residual_lambdas=True),
    dict(pos='alibi', document_token=3, n_kv_head=1, head_dim=10),
    dict(rope_scaling=YARN, window=5, window_pattern='S', **MLA),
    dict(n_expert=4, n_shared_expert=1, d_expert=24, router='sigmoid', balance_bias=True, mlp_bias=True),
    dict(mixer_pattern='DA', linear_n_key_head=2, document_token=3),
    dict(pos='learned', attn_sink=True, dropout=0.1, vocab_size=64)], ids=str)
def test_all_tensors_are_on_the_models_device(options, as_cuda, monkeypatch):
    config = GPTConfig(**{**TINY, **options})
    with pretend_device(monkeypatch):
        with torch.device('meta'):
            torch.set_default_dtype(torch.bfloat16)  # a model of fake tensors cannot be cast
            try:
                model = GPT(config)
            finally:
                torch.set_default_dtype(torch.float32)
            idx, u = torch.empty(3, 8, dtype=torch.long), torch.empty(3)
            lengths = idx[:, 0]
        loss, aux = model(idx, idx)
        (loss + sum(aux[name] for name in ('balance', 'z') if aux)).backward()
        if aux and config.balance_bias:
            model.move_balance(aux['load'])
        assert all(w.grad.device == w.device for w in model.parameters())
        with torch.no_grad():
            for static in (False, True):
                cache = model.make_cache(3, 24, static)
                logits = model(idx, cache=cache, keep=1, lengths=lengths if static else None)[:, -1]
                logits = flat_sample.penalise(logits, logits > 0, 1.2)
                token = sample_token(logits, u, top_k=5, top_p=0.9, min_p=0.1)
                assert model(token[:, None], cache=cache, keep=1).device == idx.device
                cache.reset(lengths > 0)


def test_a_tensor_on_another_device_is_noticed(as_cuda, monkeypatch):
    visible = flat.visible
    monkeypatch.setattr(flat, 'visible', lambda q_pos, k_pos, first: visible(
        q_pos, torch.arange(k_pos.shape[1])[None], first))
    with pytest.raises(RuntimeError, match='same device'):
        test_all_tensors_are_on_the_models_device(dict(window=5, window_pattern='S'), None, monkeypatch)


def naive_delta_rule(q, k, v, decay, beta, state, starts=None):
    """arXiv:2412.06464, equation 10, token by token, in float64."""
    out, state = [], state.double()
    q, k, v, decay, beta = (x.double() for x in (q, k, v, decay, beta))
    for t in range(q.shape[2]):
        if starts is not None:  # a document that starts here has seen nothing
            state = state * (starts[:, t] < t)[:, None, None, None] if t else state
        state = state * decay[:, :, t, None, None].exp()
        wrong = v[:, :, t] - (k[:, :, t, None] @ state)[:, :, 0]
        state = state + beta[:, :, t, None, None] * k[:, :, t, :, None] * wrong[:, :, None]
        out.append((q[:, :, t, None] @ state)[:, :, 0])
    return torch.stack(out, dim=2), state


@pytest.mark.parametrize('T', [1, 5, 64, 150])
@pytest.mark.parametrize('documents', [False, True])
def test_the_chunked_delta_rule_is_the_recurrence(T, documents):
    g = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(2, 3, T, width, generator=g) for width in (4, 4, 6))
    k = k / k.norm(dim=-1, keepdim=True)
    decay, beta = -torch.rand(2, 3, T, generator=g) * 2, torch.rand(2, 3, T, generator=g)
    state, starts, first = torch.randn(2, 3, 4, 6, generator=g), None, None
    if documents and T > 1:
        is_start = torch.rand(2, T, generator=g) < 0.1
        is_start[0, -1], is_start[1, 2:] = True, False
        starts = torch.where(is_start, torch.arange(T), 0).cummax(dim=1).values
        starts[:, :3] = torch.where(starts[:, :3] > 0, starts[:, :3], -5)  # one that goes on from before
        starts[starts == 0] = -5
        first = torch.tensor([[0]])
    inputs = [x.requires_grad_() for x in (q, k, v, decay, beta, state)]
    expected, last = naive_delta_rule(*inputs, starts)
    for chunk in (64, 7):
        y, after = flat.gated_delta_rule(*inputs, starts, first, chunk=chunk)
        torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(after.double(), last, atol=1e-4, rtol=1e-4)
    weight = torch.randn(y.shape, generator=g)
    got = torch.autograd.grad((y * weight).sum() + after.sum(), inputs)
    wanted = torch.autograd.grad((expected * weight).sum() + last.sum(), inputs)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_gated_deltanet_equals_transformers():
    modeling = transformers.models.qwen3_next.modeling_qwen3_next
    config = transformers.Qwen3NextConfig(hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4,
                                          linear_key_head_dim=6, linear_value_head_dim=10,
                                          linear_conv_kernel_dim=4, num_hidden_layers=4)
    other = modeling.Qwen3NextGatedDeltaNet(config, 0).float().eval()
    model = tiny(mixer_pattern='D', linear_n_key_head=2, linear_n_value_head=4, linear_key_head_dim=6,
                 linear_value_head_dim=10, block_size=150)
    mixer = model.h[0].attn
    q, k, v, z, b, a = mixer.c_attn.weight.split(mixer.c_attn.widths)
    by_key_head = [w.unflatten(0, (2, -1)) for w in (q, k, v, z)]
    state = {'conv1d.weight': mixer.conv[:, None], 'dt_bias': mixer.dt_bias, 'A_log': mixer.A_log,
             'norm.weight': mixer.o_norm, 'out_proj.weight': mixer.c_proj.weight,
             'in_proj_qkvz.weight': torch.cat(by_key_head, dim=1).flatten(0, 1),
             'in_proj_ba.weight': torch.cat([w.unflatten(0, (2, -1)) for w in (b, a)], dim=1).flatten(0, 1)}
    other.load_state_dict(state)
    x = torch.randn(2, 150, 32)
    y = mixer(x, model.context(torch.zeros(2, 150, dtype=torch.long)))
    assert y.std() > 0.1
    torch.testing.assert_close(y, other(x), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_state_is_reset_and_never_rewound():
    model = tiny(mixer_pattern='DA')
    idx = tokens(model, 2, 24)
    cache = model.make_cache(2, 24, max_rewind=5)
    assert [tuple(s.shape) for s in cache.states[0]] == [(2, 3, 96), (2, 4, 8, 8)] and not cache.states[1]
    assert cache.states[0][1].dtype == torch.float32
    assert model.cache_elements(10) == 3 * 96 + 4 * 8 * 8 + 10 * 64
    model(idx[:, :9], cache=cache)
    for n in (1, torch.tensor([0, 1]), cache.length.clone()):
        with pytest.raises(ValueError, match='layer 0 keeps a state'):
            cache.rewind(n)
    cache.rewind(0)
    cache.reset()
    torch.testing.assert_close(feed(model, idx, [20, 1, 3], cache), model(idx), atol=1e-4, rtol=1e-4)
    with torch.autocast('cpu', torch.bfloat16):
        cache = model.make_cache(2, 24)
        half = feed(model, idx, [7, 1, 16], cache)
    assert [s.dtype for s in cache.states[0]] == [torch.bfloat16, torch.float32]
    assert (half - model(idx)).abs().mean() < 0.1 * half.std()


def dense_experts(moe, x):
    """Every expert for every token, in float64, weighted by a loop that reads like the papers."""
    config, x = moe.config, x.double()
    logits = x @ moe.router.weight.double().T + (0 if moe.router.bias is None else moe.router.bias.double())
    score = logits.softmax(-1) if config.router == 'softmax' else logits.sigmoid()
    choice = score + (moe.expert_bias.double() if config.balance_bias else 0)
    y = torch.zeros_like(x)
    for t in range(len(x)):
        allowed = set(range(config.n_expert))
        if config.n_group:
            groups = choice[t].view(config.n_group, -1)
            group_score = groups.amax(1) if config.router == 'softmax' else groups.topk(2).values.sum(1)
            best = group_score.topk(config.topk_group).indices.tolist()
            allowed = {e for e in allowed if e // groups.shape[1] in best}
        chosen = sorted(allowed, key=lambda e: -choice[t, e])[:config.n_expert_active]
        total = sum(score[t, e] for e in chosen) if config.norm_topk_prob else 1.0
        for e in chosen:
            up = x[t] @ moe.experts.c_fc.weight[e].double().T
            if moe.experts.c_fc.bias is not None:
                up = up + moe.experts.c_fc.bias[e].double()
            up = moe.experts.act(*up.split(moe.experts.c_fc.widths))
            down = up @ moe.experts.c_proj.weight[e].double().T
            if moe.experts.c_proj.bias is not None:
                down = down + moe.experts.c_proj.bias[e].double()
            y[t] += down * score[t, e] / total * config.routed_scaling_factor
    if moe.shared is not None:
        gate, up = (x @ moe.shared.c_fc.weight.double().T).chunk(2, -1)
        more = (torch.nn.functional.silu(gate) * up) @ moe.shared.c_proj.weight.double().T
        if moe.shared_gate is not None:
            more = more * (x @ moe.shared_gate.weight.double().T).sigmoid()
        y = y + more
    return y


@pytest.mark.parametrize('options', [
    {}, dict(n_expert_active=1, norm_topk_prob=False), dict(router='sigmoid', norm_topk_prob=False),
    dict(d_expert=21),
    dict(n_shared_expert=2, routed_scaling_factor=2.5, router='sigmoid', balance_bias=True),
    dict(n_shared_expert=1, shared_gate=True),
    dict(n_expert=8, n_group=4, topk_group=2, n_expert_active=3, norm_topk_prob=False),
    dict(n_expert=8, n_group=2, topk_group=1, router='sigmoid', balance_bias=True, n_expert_active=4),
    dict(mlp='gelu', mlp_bias=True)])
@pytest.mark.parametrize('n', [1, 5, 300])  # 300: rows are filled up to blocks
def test_sorted_experts_equal_the_dense_sum(options, n):
    moe = tiny(**{**dict(n_expert=4, d_expert=24), **options}).h[0].mlp
    x = torch.randn(1, n, 32, requires_grad=True)
    y, expected = moe(x, bare_context()), dense_experts(moe, x[0])
    torch.testing.assert_close(y[0].double(), expected, atol=1e-4, rtol=1e-4)
    params, g = [x, *moe.parameters()], torch.randn(n, 32)
    for got, wanted in zip(torch.autograd.grad((y[0] * g).sum(), params),
                           torch.autograd.grad((expected * g).sum(), params)):
        torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    moe = tiny(n_expert=4, n_expert_active=1, norm_topk_prob=False, balance_bias=True, d_expert=24).h[0].mlp
    moe.expert_bias.copy_(torch.tensor([0.0, 0.0, 0.0, -9.0]))
    moe(torch.randn(1, 40, 32), bare_context()).square().sum().backward()
    for w in (moe.experts.c_fc.weight, moe.experts.c_proj.weight):
        assert not w.grad[3].any() and w.grad[0].any()


def moe_aux(model, idx):
    loss, aux = model(idx[:, :-1], idx[:, 1:])
    return loss, aux


@pytest.mark.parametrize('k', [1, 2, 4])
@pytest.mark.parametrize('router', ['softmax', 'sigmoid'])
@pytest.mark.parametrize('per_sequence', [False, True])
def test_uniform_routing_has_a_balance_loss_of_one(k, router, per_sequence):
    model = tiny(n_expert=8, n_expert_active=k, router=router, balance_per_sequence=per_sequence,
                 norm_topk_prob=False)
    idx = tokens(model, 3, 20)
    with torch.no_grad():
        for block in model.h:
            block.mlp.router.weight.zero_()  # every expert as likely: the scores are even, whoever is chosen
    loss, aux = moe_aux(model, idx)
    assert aux['balance'].item() == pytest.approx(1.0, abs=1e-5)
    assert aux['z'].item() == pytest.approx(math.log(8) ** 2, rel=1e-5)
    assert aux['load'].shape == (2, 8) and aux['load'].sum(1).tolist() == [3 * 19 * k] * 2
    for block in model.h:  # one expert takes all: as bad as it gets
        block.mlp.router.weight.data[0] = 0
    model.h[0].mlp.router.weight.data.normal_()
    model.h[1].mlp.router.weight.data.normal_()
    assert moe_aux(model, idx)[1]['balance'] > 1.0


def test_aux_losses_follow_their_formulas_and_train_the_router_alone():
    model = tiny(n_expert=4, n_dense_layer=1, balance_per_sequence=True)
    x, routing = torch.randn(3, 10, 32), []
    moe = model.h[1].mlp
    moe(x, bare_context(routing=routing))
    balance, z, load = routing[0]
    logits = x @ moe.router.weight.T
    each = []
    for row in logits:  # arXiv:2101.03961, equations 4 to 6, for k = 2 experts a token
        f = torch.bincount(row.topk(2).indices.flatten(), minlength=4) / 20
        each.append(4 * (f * row.softmax(-1).mean(0)).sum())
    torch.testing.assert_close(balance, torch.stack(each).mean())
    torch.testing.assert_close(z, logits.exp().sum(-1).log().square().mean())
    assert torch.equal(load, torch.bincount(logits.topk(2).indices.flatten(), minlength=4).float())
    idx = tokens(model, 2, 12)
    loss, aux = moe_aux(model, idx)
    grads = torch.autograd.grad(aux['balance'], [moe.router.weight, moe.experts.c_fc.weight],
                                allow_unused=True, retain_graph=True)
    assert grads[0].abs().sum() > 0 and grads[1] is None
    before, descent = aux['balance'].item(), torch.optim.SGD([moe.router.weight], lr=0.1)
    for _ in range(100):
        descent.zero_grad()
        aux['balance'].backward(retain_graph=True)
        descent.step()
        loss, aux = moe_aux(model, idx)
    assert aux['balance'] < 1.05 < 1.15 < before
    # a weight of 0 leaves the gradients of the cross entropy alone
    params = list(model.parameters())
    off = loss + 0.0 * aux['balance'] + 0.0 * aux['z']
    for a, b in zip(torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True),
                    torch.autograd.grad(off, params, allow_unused=True)):
        assert torch.equal(a, b)


def test_a_router_deep_in_underflow_still_weighs_to_one():
    moe = tiny(n_expert=4, router='sigmoid', mlp_bias=True).h[0].mlp
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.bias.copy_(torch.tensor([-60.0, -60.5, -61.0, -200.0]))
    routing = []
    weight, chosen, _, _ = moe.route(torch.randn(7, 32))
    moe(torch.randn(1, 7, 32), bare_context(routing=routing))
    torch.testing.assert_close(weight.sum(-1), torch.ones(7))
    assert set(chosen.flatten().tolist()) == {0, 1} and routing[0][0] >= 1


def test_the_balance_bias_moves_choices_not_weights_and_follows_the_load():
    model = tiny(n_expert=4, router='sigmoid', balance_bias=True)
    moe, x = model.h[0].mlp, torch.randn(50, 32)
    assert 'h.0.mlp.expert_bias' in model.state_dict() and model.num_params() == sum(
        w.numel() for w in model.parameters()) - 3 * 32
    moe.expert_bias.zero_()
    weight, chosen, _, score = moe.route(x)
    moe.expert_bias.copy_(torch.tensor([0.0, 0.0, 5.0, 0.0]))
    weight, now, _, _ = moe.route(x)
    assert (now == 2).any(1).all() and not (chosen == 2).any(1).all()
    s = score.exp().gather(1, now)
    torch.testing.assert_close(weight, s / s.sum(-1, keepdim=True))
    moe.expert_bias.zero_()
    model.move_balance(torch.tensor([[5.0, 1.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]), rate=0.5)
    assert moe.expert_bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    for to in (torch.bfloat16, torch.float64):
        assert model.to(to).h[0].mlp.expert_bias.dtype == torch.float32  # like angles, never rounded
    for _ in range(300):  # it balances a router that is not
        model.float().move_balance(torch.stack([torch.bincount(block.mlp.route(x)[1].flatten(), minlength=4)
                                                for block in model.h]).float(), rate=0.01)
    load = torch.bincount(moe.route(x)[1].flatten(), minlength=4)
    assert load.max() < 1.3 * load.float().mean()


def turns(config):
    """Angle of each pair at position 1 from the table, and the factor on the rotation."""
    cos, sin = flat.rope_table(config.rope_kind, torch.tensor([0, 1]), config.block_size)
    return torch.atan2(sin[1], cos[1]).tolist(), cos[0, 0].item()


def test_rotary_scalings_follow_their_papers():
    d, base, original, s = 16, 10000.0, 64, 8.0
    def rope(**scaling):
        return turns(GPTConfig(head_dim=d, block_size=512, rope_base=base,
                                                 rope_scaling=scaling or None))
    plain = [base ** (-2 * i / d) for i in range(d // 2)]
    assert rope() == (pytest.approx(plain, rel=1e-5), 1.0)
    assert rope(rope_type='linear', factor=s) == (pytest.approx([f / s for f in plain], rel=1e-5), 1.0)
    ntk = [(base * s ** (d / (d - 2))) ** (-2 * i / d) for i in range(d // 2)]
    assert rope(rope_type='ntk', factor=s)[0] == pytest.approx(ntk, rel=1e-5)
    assert ntk[-1] == pytest.approx(plain[-1] / s) and ntk[0] == plain[0]
    grown = s * 512 / original - (s - 1)
    assert rope(rope_type='dynamic', factor=s, original_max_position_embeddings=original)[0] == pytest.approx(
        [(base * grown ** (d / (d - 2))) ** (-2 * i / d) for i in range(d // 2)], rel=1e-5)
    # YaRN: where in the dimensions a pair turns 32 times, and once, over the original length
    def place(n):
        return d * math.log(original / (n * 2 * math.pi)) / (2 * math.log(base))
    low, high = max(math.floor(place(32)), 0), min(math.ceil(place(1)), d - 1)
    keep = [1 - min(1, max(0, (i - low) / (high - low))) for i in range(d // 2)]
    got, factor = rope(rope_type='yarn', factor=s, original_max_position_embeddings=original)
    assert got == pytest.approx([f * k + f / s * (1 - k) for f, k in zip(plain, keep)], rel=1e-5)
    assert got[0] == pytest.approx(plain[0]) and got[-1] == pytest.approx(plain[-1] / s, rel=1e-5)
    assert factor == pytest.approx(0.1 * math.log(s) + 1)
    yarn = dict(rope_type='yarn', factor=s, original_max_position_embeddings=original)
    assert rope(**yarn, attention_factor=1.5)[1] == 1.5
    assert rope(**yarn, mscale=0.7, mscale_all_dim=0.4)[1] == pytest.approx(
        (0.07 * math.log(s) + 1) / (0.04 * math.log(s) + 1))
    assert rope(**yarn, mscale=1.0, mscale_all_dim=1.0)[1] == 1.0
    # Llama 3: wavelengths beyond original / 1 are slowed, those below original / 4 kept
    smooth = [(original * f / (2 * math.pi) - 1) / (4 - 1) for f in plain]
    assert rope(rope_type='llama3', factor=s, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=original)[0] == pytest.approx(
        [f if x > 1 else f / s if x < 0 else (1 - x) * f / s + x * f for f, x in zip(plain, smooth)],
        rel=1e-5)
    long = dict(rope_type='longrope', short_factor=[1.0] * 8, long_factor=[2.0 + i for i in range(8)],
                factor=s)
    got, factor = rope(**long, original_max_position_embeddings=original)
    assert got == pytest.approx([f / (2 + i) for i, f in enumerate(plain)], rel=1e-5)
    assert factor == pytest.approx(math.sqrt(1 + math.log(s) / math.log(original)))
    assert rope(**long, original_max_position_embeddings=512)[0] == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize('kind', ['linear', 'dynamic', 'yarn', 'llama3', 'longrope'])
@pytest.mark.parametrize('factor', [1.0, 4.0])
@pytest.mark.parametrize('partial', [1.0, 0.5])
def test_rotary_scalings_equal_transformers(kind, factor, partial):
    pairs = int(32 * partial) // 2
    scaling = {'rope_type': kind, 'factor': factor}
    if kind != 'linear':
        scaling['original_max_position_embeddings'] = 64
    if kind == 'llama3':
        scaling |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
    if kind == 'longrope':
        scaling |= dict(short_factor=[1.0 + i / 9 for i in range(pairs)],
                        long_factor=[2.0 + i for i in range(pairs)])
    their = transformers.LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=256,
                                     rope_parameters={**scaling, 'rope_theta': 5000.0,
                                                      'partial_rotary_factor': partial})
    if kind == 'dynamic':
        their.max_position_embeddings = 64
    init = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
    freq, attention = init(their, 'cpu', seq_len=256)
    pos = torch.arange(256)
    config = GPTConfig(head_dim=32, block_size=256, rope_base=5000.0, rope_scaling=scaling,
                       partial_rotary_factor=partial)
    cos, sin = flat.rope_table(config.rope_kind, pos, 256)
    angle = pos[:, None] * freq
    torch.testing.assert_close(cos, angle.cos() * attention, atol=2e-5, rtol=0)
    torch.testing.assert_close(sin, angle.sin() * attention, atol=2e-5, rtol=0)


def test_a_scaling_is_told_the_trained_length(tmp_path):
    """A new model's is its block_size; one that is read with a longer context keeps its own."""
    short, told = {'rope_type': 'yarn', 'factor': 4.0}, {**YARN, 'original_max_position_embeddings': 16}
    assert tiny(block_size=16, rope_scaling=short).config.rope_scaling == told
    assert GPTConfig(rope_scaling={'rope_type': 'ntk', 'factor': 4.0}).rope_scaling == {
        'rope_type': 'ntk', 'factor': 4.0}
    path = tmp_path / 'ckpt.pt'
    for scaling in (None, short):  # trained plainly, and so
        model = tiny(block_size=16, rope_scaling=scaling)
        torch.save({'model': model.state_dict(), 'model_args': vars(model.config)}, path)
        longer = GPT.from_checkpoint(path, block_size=64, rope_scaling=short)[0]
        assert longer.config.rope_scaling == told
        kind = GPTConfig(**{**vars(longer.config), 'rope_scaling': told}).rope_kind
        expected = flat.rope_table(kind, torch.arange(64), 64)
        assert all(torch.equal(a, b) for a, b in zip(longer.ropes[kind], expected))
    hub.save_pretrained(model, None, tmp_path / 'published')
    assert hub.from_pretrained(tmp_path / 'published', block_size=64, rope_scaling={
        **short, 'beta_fast': 16}).config.rope_scaling == {**told, 'beta_fast': 16}


def test_scaling_by_one_changes_nothing_bit_for_bit():
    plain = tiny()
    idx, length = tokens(plain, 2, 24), dict(original_max_position_embeddings=24)
    for scaling in (dict(rope_type='linear'), dict(rope_type='ntk'), dict(rope_type='dynamic', **length),
                    dict(rope_type='yarn', **length),
                    dict(rope_type='llama3', low_freq_factor=1.0, high_freq_factor=4.0, **length)):
        assert torch.equal(tiny(rope_scaling={**scaling, 'factor': 1.0})(idx), plain(idx)), scaling
        if scaling['rope_type'] != 'dynamic':  # within the original length that changes nothing at any factor
            assert not torch.equal(tiny(rope_scaling={**scaling, 'factor': 2.0})(idx), plain(idx)), scaling


def plain_norm_rotate(q, k, q_weight, k_weight, eps, cos, sin):
    """NormRotate by its definition, position by position of a head's pairs."""
    turned = []
    for x, weight in (q, q_weight), (k, k_weight):
        x = x.unflatten(-1, (-1, len(weight)))
        x = (x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight).transpose(1, 2)
        pairs, parts = cos.shape[-1], list(x.unbind(-1))
        for i in range(pairs):
            a, b = x[..., i], x[..., i + pairs]
            parts[i] = a * cos[..., i] - b * sin[..., i]
            parts[i + pairs] = b * cos[..., i] + a * sin[..., i]
        turned.append(torch.stack(parts, -1))
    return turned


@pytest.mark.parametrize('rows', [1, 3])
@pytest.mark.parametrize('heads, pairs, dtype, tolerance', [
    ((4, 4), 4, torch.float32, 1e-5), ((4, 1), 3, torch.float32, 1e-5), ((6, 2), 4, torch.bfloat16, 2e-2)])
def test_written_backward_of_norms_and_rotations_is_autograds(heads, pairs, dtype, tolerance, rows):
    torch.manual_seed(0)
    (H, K), B, T, D, eps = heads, 3, 5, 8, 1e-2
    position_ids = torch.randint(0, 50, (rows, T))
    config = GPTConfig(n_layer=1, n_head=1, n_embd=2 * pairs, rope_scaling=dict(
        rope_type='yarn', factor=4.0, original_max_position_embeddings=16))  # whose cos^2 + sin^2 is not 1
    rope = flat.rope_table(config.rope_kind, position_ids[:, None], 64)
    inputs = [torch.randn(B, T, H * D).to(dtype), torch.randn(B, T, K * D).to(dtype),
              torch.rand(D) + 0.5, torch.rand(D) + 0.5]
    exact = [x.double().requires_grad_() for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    outputs = flat.NormRotate.apply(*inputs, eps, *rope)
    expected = plain_norm_rotate(*exact, eps, *(table.double() for table in rope))
    grads = [torch.randn_like(y) for y in outputs]
    torch.autograd.backward(outputs, grads)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    for y, wanted in zip(outputs, expected):
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), wanted, atol=tolerance, rtol=tolerance)
    for x, wanted in zip(inputs, exact):
        torch.testing.assert_close(x.grad.double(), wanted.grad, atol=5 * tolerance, rtol=tolerance)


@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_written_backward_of_rmsnorm_is_autograds(dtype, tolerance):
    torch.manual_seed(0)
    x, weight, grad = torch.randn(3, 5, 16).to(dtype), torch.rand(16) + 0.5, torch.randn(3, 5, 16).to(dtype)
    (a, v), (b, w) = ([y.clone().to(kind).requires_grad_() for y in (x, weight)]
                      for kind in (None, torch.float64))
    y, wanted = flat.RMSNorm.apply(a, v, 1e-2), b / (b.square().mean(-1, keepdim=True) + 1e-2).sqrt() * w
    torch.autograd.backward([y, wanted], [grad, grad.double()])
    for mine, exact in (y, wanted), (a.grad, b.grad), (v.grad, w.grad):
        torch.testing.assert_close(mine.double(), exact, atol=5 * tolerance, rtol=tolerance)


def test_written_backwards_refuse_what_they_cannot():
    model, idx = tiny().train(), torch.zeros(1, 4, dtype=torch.long)
    grad, = torch.autograd.grad(model(idx, idx)[0], [model.h[0].attn.c_attn.weight], create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match='setup_context'):
        torch.func.grad(lambda w: torch.func.functional_call(model, {'ln_f.weight': w}, (idx, idx))[0])(
            model.ln_f.weight.detach())


def test_rotation_depends_on_distance_alone():
    config = GPTConfig(head_dim=8, block_size=64, rope_base=100.0)
    cos, sin = flat.rope_table(config.rope_kind, torch.arange(64), 64)
    for p, i in itertools.product((0, 1, 63), range(4)):  # equation 15 of arXiv:2104.09864
        assert cos[p, i].item() == pytest.approx(math.cos(p * 100.0 ** (-2 * i / 8)), abs=1e-5)
        assert sin[p, i].item() == pytest.approx(math.sin(p * 100.0 ** (-2 * i / 8)), abs=1e-5)
    q, k = torch.randn(2, 1, 1, 1, 10)  # the last two of ten dimensions do not turn
    def turn(x, p):
        return flat.rotate(x, (cos[[p]][None, None], sin[[p]][None, None]))
    assert torch.equal(turn(q, 0), q) and torch.equal(turn(q, 9)[..., 8:], q[..., 8:])
    scores = [(turn(q, p + 5) * turn(k, p)).sum().item() for p in (0, 7, 50)]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-5)
    # GPT-J's interleaved pairs (0, 1), (2, 3), ... are this layout after a permutation
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    pairs = torch.view_as_complex(q[..., :8].reshape(1, 1, 1, 4, 2)) * torch.polar(
        torch.ones(4), 7 * 100.0 ** (-torch.arange(0, 8, 2) / 8))
    torch.testing.assert_close(turn(q[..., :8][..., order], 7),
                               torch.view_as_real(pairs).flatten(-2)[..., order], atol=1e-5, rtol=1e-5)


def test_positions_without_rotation_follow_their_papers():
    assert flat.alibi_slopes(8).tolist() == pytest.approx([2.0 ** -i for i in range(1, 9)])
    assert flat.alibi_slopes(12).tolist() == pytest.approx([2.0 ** -i for i in range(1, 9)]
                                                  + [2.0 ** -(i / 2) for i in (1, 3, 5, 7)])
    assert flat.alibi_slopes(6).tolist() == pytest.approx([2.0 ** -(2 * i) for i in range(1, 5)]
                                                 + [2.0 ** -1, 2.0 ** -3])
    for n in (*range(1, 72), 112):
        ours = flat.alibi_slopes(n).tolist()
        theirs = transformers.models.bloom.modeling_bloom.build_alibi_tensor(
            torch.ones(1, 2), n, torch.float32)[:, 0, 1]
        assert len(ours) == n and ours == pytest.approx(theirs.tolist())
    model = tiny(pos='alibi', n_head=6, head_dim=4)
    mask = model.context(torch.zeros(1, 12, dtype=torch.long)).masks[None, True].bias
    for h, i, j in itertools.product(range(6), range(12), range(12)):
        assert mask[0, h, i, j].item() == (pytest.approx(-flat.alibi_slopes(6)[h].item() * (i - j)) if j <= i
                                           else -math.inf)
    cache = model.make_cache(1, 12)
    cache.length += 11
    cache.longest = 11
    last = model.context(torch.zeros(1, 1, dtype=torch.long), cache).masks[None, True].bias
    assert torch.equal(last[0, :, 0], mask[0, :, 11])
    table = flat.sinusoid(torch.arange(9)[None], 6)[0]
    for p, i in itertools.product(range(9), range(3)):  # arXiv:1706.03762, section 3.5
        assert table[p, 2 * i].item() == pytest.approx(math.sin(p / 10000 ** (2 * i / 6)), abs=1e-6)
        assert table[p, 2 * i + 1].item() == pytest.approx(math.cos(p / 10000 ** (2 * i / 6)), abs=1e-6)


@pytest.mark.parametrize('options', [{}, dict(pos='learned'), dict(pos='alibi', n_kv_head=1), MLA,
                                     dict(window=4, window_pattern='S'), dict(mixer_pattern='DA')])
@torch.no_grad()
def test_documents_begin_again_where_a_cache_goes_on(options):
    model = tiny(document_token=3, **options)
    idx = torch.randint(4, 61, (2, 20), generator=torch.Generator().manual_seed(2))
    idx[0, [6, 7, 15]] = idx[1, 11] = 3
    logits = model(idx)
    cache = model.make_cache(2, 24, max_rewind=9)
    if 'mixer_pattern' in options:
        model(idx[:, :11], cache=cache, lengths=torch.tensor([7, 11]))
    else:
        model(idx[:, :16], cache=cache)
        cache.rewind(torch.tensor([9, 5]))  # before an end of text that had been seen
    new = torch.stack((idx[0, 7:12], idx[1, 11:16]))
    torch.testing.assert_close(model(new, cache=cache), torch.stack((logits[0, 7:12], logits[1, 11:16])),
                               atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_attention_weights_on_request():
    for options in (dict(n_kv_head=2), MLA, dict(window=3, window_pattern='SL'), dict(attn_sink=True)):
        model, weights = tiny(**options), []
        idx = tokens(model, 2, 12)
        torch.testing.assert_close(model(idx, weights=weights), model(idx), atol=1e-4, rtol=1e-4)
        assert [tuple(w.shape) for w in weights] == [(2, 4, 12, 12)] * 2
        for w in weights:
            assert (w.triu(1) == 0).all() and (w.sum(-1) < 1 + 1e-5).all()
            assert torch.allclose(w.sum(-1), torch.ones(())) == ('attn_sink' not in options)
        if 'window' in options:
            assert (weights[0].tril(-3) == 0).all() and (weights[1].tril(-3) > 0).any()


@pytest.mark.parametrize('wiring', flat.NORM_PLACEMENTS)
def test_norm_placements_follow_their_formulas(wiring):
    scale = 1.0 if wiring in ('output', 'sandwich') else 0.5
    model = tiny(wiring=wiring, residual_scale=scale, n_layer=1)
    block, x, context = model.h[0], torch.randn(2, 9, 32), model.context(tokens(model, 2, 9))

    def a(v):
        return scale * block.attn(v, context)

    def m(v):
        return scale * block.mlp(v)
    n = [getattr(block, name) for name in block.norms]
    if wiring == 'pre':
        y = x + a(n[0](x))
        y = y + m(n[1](y))
    elif wiring == 'post':
        y = n[0](x + a(x))
        y = n[1](y + m(y))
    elif wiring == 'output':
        y = x + n[0](a(x))
        y = y + n[1](m(y))
    elif wiring == 'sandwich':
        y = x + n[1](a(n[0](x)))
        y = y + n[3](m(n[2](y)))
    elif wiring == 'parallel':
        y = x + a(n[0](x)) + m(n[0](x))
    else:
        y = x + a(n[0](x)) + m(n[1](x))
    torch.testing.assert_close(block(x, context), y)
    assert isinstance(model.ln_f, torch.nn.Identity) == (wiring == 'post')


def test_embedding_scale_norm_and_lambdas():
    model = tiny(embed_scale=3.0, embed_norm=True, residual_lambdas=True, n_layer=2, head_bias=True,
                 tie_word_embeddings=False, pos='learned')
    idx, pos = tokens(model, 2, 9), torch.arange(9)[None]
    x = x0 = model.ln_embd(3.0 * model.wte(idx) + model.wpe(pos))
    context = model.context(idx)
    for i, block in enumerate(model.h):
        x = block(model.resid_lambdas[i] * x + model.x0_lambdas[i] * x0, context)
    logits = model.ln_f(x) @ model.lm_head.weight[:61].T + model.lm_head.bias[:61]
    torch.testing.assert_close(model(idx), logits, atol=1e-5, rtol=1e-5)
    assert model.state_dict()['lm_head.bias'].shape == (61,)
    fresh = GPT(model.config)
    assert (fresh.resid_lambdas == 1).all() and (fresh.x0_lambdas == 0).all()
    assert GPTConfig(pos='sinusoidal', n_embd=64, n_head=4).embed_scale == 8.0
    groups = model.param_groups()
    assert any(w is model.resid_lambdas for w in groups['vector'])


class XIELU(torch.nn.Module):
    """An activation with parameters, of no dimension: arXiv:2411.13010."""

    def __init__(self):
        super().__init__()
        self.alpha_p, self.alpha_n = (flat.parameter(init=torch.nn.init.ones_, group='vector')
                                      for _ in range(2))

    def forward(self, x):
        alpha_p, alpha_n = (torch.nn.functional.softplus(alpha) for alpha in (self.alpha_p, self.alpha_n))
        below = (0.5 + alpha_n) * (torch.expm1(x.clamp(max=-1e-6)) - x)
        return torch.where(x > 0, alpha_p * x * x, below) + 0.5 * x


class LeakyAverage(flat.Mixer):
    """A mixer with a state and a parameter of each kind: y_t = m y_{t-1} + x_t W."""

    documents = False

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.c_fc = flat.Linear(config.n_embd, 16)
        self.c_proj = flat.Linear(16, config.n_embd, init=flat.branch_init(config))
        self.leak = flat.parameter(1, 16, init=torch.nn.init.ones_, group='vector')
        self.states = [((16,), torch.float32)]

    def flops(self, length):
        return 6 * 16

    def forward(self, x, context):
        state = x.new_zeros(len(x), 16) if context.cache is None else context.cache.states[self.layer][0]
        y, last, is_token = [], state, context.is_token()
        for t, new in enumerate(self.c_fc(x).unbind(1)):
            now = last * self.leak.sigmoid() + new
            last = now if is_token is None else torch.where(is_token[:, t:t + 1], now, last)
            y.append(now)
        if context.cache is not None:
            state.copy_(last)
        return self.c_proj(torch.stack(y, dim=1))


def test_a_new_choice_is_one_entry(monkeypatch):
    """What a fork adds: an activation, a rotary scaling, a norm placement, a mixer, each in one place."""
    def halved(freq, base, length, *, factor):
        return freq / factor, 1.0

    def triple(x, attn, mlp, ln_1, ln_2, ln_3):
        x = x + attn(ln_1(x))
        return ln_3(x + mlp(ln_2(x)))
    monkeypatch.setitem(flat.ACTIVATIONS, 'xielu', (XIELU, False))
    monkeypatch.setitem(flat.ROPE_SCALINGS, 'halved', halved)
    monkeypatch.setitem(flat.NORM_PLACEMENTS, 'triple', (triple, 3))
    monkeypatch.setitem(flat.MIXERS, 'X', LeakyAverage)
    model = tiny(mlp='xielu', rope_scaling={'rope_type': 'halved', 'factor': 2.0}, wiring='triple',
                 mixer_pattern='XA')
    idx = tokens(model, 2, 12)
    torch.testing.assert_close(feed(model, idx, [5, 1, 6], model.make_cache(2, 12)), model(idx),
                               atol=1e-4, rtol=1e-4)
    cache = model.make_cache(2, 12)
    model(idx, cache=cache, keep=0, lengths=torch.tensor([12, 5]))
    cache.reset(torch.tensor([True, False]))
    new = torch.stack((idx[0, :3], idx[1, 5:8]))
    torch.testing.assert_close(model(new, cache=cache), torch.stack((model(idx)[0, :3], model(idx)[1, 5:8])),
                               atol=1e-4, rtol=1e-4)
    assert model.num_params() == sum(w.numel() for w in model.state_dict().values())
    groups = model.param_groups()
    assert {w.ndim for w in groups['vector']} == {0, 1, 2} and {w.ndim for w in groups['matrix']} == {2}
    assert model.flops_per_token(10) - model.flops_per_token(5) == 12 * 32 * 5  # the attention layer's
    with pytest.raises(ValueError, match="unexpected keyword argument 'speed'"):
        GPTConfig(rope_scaling={'rope_type': 'halved', 'speed': 3})


class WindowBase(flat.Attention):
    """A rotary base of its own in windowed layers, as in Gemma 3."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        if self.window:
            self.rope_kind = (50.0, *self.rope_kind[1:])


class ValueEmbedding(flat.Attention):
    """Attention whose values have an embedding of the tokens added (modded-nanogpt)."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.table = flat.Embedding(config.vocab_size, config.n_kv_head * config.head_dim,
                                    torch.nn.init.zeros_)

    def forward(self, x, context):
        q, k, v = self.c_attn(x)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for y in (q, k, v + self.table(context.idx)))
        q, k = (flat.rotate(norm(y), context.ropes[self.rope_kind])
                for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        if context.cache is not None:
            k, v = context.cache.append(self.layer, context, k, v)
        return self.c_proj(self.attend(q, k, v, context).transpose(1, 2).flatten(2))


class ShortConvolution(flat.Mixer):
    """LFM2's, arXiv:2511.23404: a gate before a short convolution and one after it."""

    documents = True

    def __init__(self, config, layer):
        super().__init__(config, layer)
        C = config.n_embd
        self.c_fc, self.c_proj = flat.FusedLinear(C, (C, C, C)), flat.Linear(C, C)
        self.conv = flat.parameter(C, 3, init=torch.nn.init.ones_, group='vector')
        self.states = [((2, C), None)]

    def flops(self, length):
        return 6 * self.conv.numel()

    def forward(self, x, context):
        before, after, x = self.c_fc(x)
        inputs = self.after_last(before * x, context)
        return self.c_proj(after * flat.short_convolution(inputs, self.conv, context))


class NgramEmbedding(LeakyAverage):
    """An embedding of each token and the one before it: a state that holds ids."""

    documents = True

    def __init__(self, config, layer):
        super().__init__(config, layer)
        del self.leak
        self.table, self.states = flat.Embedding(97, 16, torch.nn.init.zeros_), [((1,), torch.long)]

    def forward(self, x, context):
        ids = self.after_last(context.idx, context)
        pair = torch.where(context.position_ids > 0, ids[:, :-1] * 61, 0) + ids[:, 1:]
        return self.c_proj(self.c_fc(x) + self.table(pair % 97))


FORKS = dict(W=WindowBase, V=ValueEmbedding, C=ShortConvolution, N=NgramEmbedding)


@pytest.mark.parametrize('options', [
    dict(mixer_pattern='W', window=5, window_pattern='SL', n_kv_head=2),
    dict(mixer_pattern='CV', n_kv_head=1), dict(mixer_pattern='NW', document_token=3)], ids=str)
def test_what_a_fork_adds_is_held_by_the_grid_and_the_checks(options, monkeypatch):
    for kind, mixer in FORKS.items():
        monkeypatch.setitem(flat.MIXERS, kind, mixer)
    test_cached_equals_uncached(options, monkeypatch)
    for held in (test_every_parameter_learns, test_no_token_sees_the_future_or_past_its_window,
                 test_documents_are_as_if_alone_and_rotations_as_configured):
        held(options)
    small = flat_bench.shrunk(GPTConfig(**{**TINY, **options}))
    for check in (flat_bench.check_windows, flat_bench.check_rotation, flat_bench.check_attention):
        check(small)


@torch.no_grad()
def test_a_fork_computes_what_its_paper_says(monkeypatch):
    for kind, mixer in FORKS.items():
        monkeypatch.setitem(flat.MIXERS, kind, mixer)
    model = tiny(mixer_pattern='W', window=24, window_pattern='SL')
    idx, ropes = tokens(model, 2, 9), model.context(tokens(model, 2, 9)).ropes
    for kind, base in zip(ropes, (50.0, 10000.0)):
        angle = torch.arange(9.0)[:, None] * base ** (-torch.arange(0, 8, 2) / 8)
        torch.testing.assert_close(ropes[kind][0][0, 0], angle.cos(), atol=1e-5, rtol=1e-5)
    other = tiny(mixer_pattern='A', rope_base=50.0)
    other.load_state_dict(model.state_dict())
    x, context = torch.randn(2, 9, 32), model.context(idx)
    torch.testing.assert_close(model.h[0].attn(x, context), other.h[0].attn(x, other.context(idx)))
    assert not torch.allclose(model.h[1].attn(x, context), other.h[1].attn(x, other.context(idx)), atol=1e-3)
    model = tiny(mixer_pattern='C')
    mixer, (before, after, y) = model.h[0].attn, model.h[0].attn.c_fc(x)
    y = F.conv1d(F.pad((before * y).mT, (2, 0)), mixer.conv[:, None], groups=32).mT
    torch.testing.assert_close(mixer(x, model.context(idx)), mixer.c_proj(after * y), atol=1e-5, rtol=1e-5)


def test_only_products_are_counted_as_such(monkeypatch):
    monkeypatch.setitem(flat.MIXERS, 'V', ValueEmbedding)
    plain, looked_up = tiny(), tiny(mixer_pattern='V')
    assert looked_up.num_params() == plain.num_params() + 2 * 61 * 32
    assert looked_up.flops_per_token() == plain.flops_per_token()
    routed = dict(n_expert=4, n_shared_expert=1)
    assert (tiny(**routed, shared_gate=True).flops_per_token() - tiny(**routed).flops_per_token()
            == 6 * 2 * 32)


def test_options_that_no_layer_has_are_refused_by_any_letter(monkeypatch):
    monkeypatch.setattr(flat, 'MIXERS', {'X': LeakyAverage, 'G': flat.GatedDeltaNet, 'B': WindowBase})
    for options, message in ((dict(mixer_pattern='X', linear_conv_kernel_dim=3), 'only G layers have this'),
                             (dict(mixer_pattern='B', linear_n_key_head=2), 'only G layers have this'),
                             (dict(mixer_pattern='X', attn_sink=True), 'only B layers have this'),
                             (dict(mixer_pattern='XG', rope_base=5.0), 'only B layers have this'),
                             (dict(mixer_pattern='X', pos='alibi'), 'no layer has attention')):
        with pytest.raises(ValueError, match=message):
            GPTConfig(**options)
    monkeypatch.setattr(LeakyAverage, 'defaults', lambda config: dict(rope_base=1.0, linear_n_key_head=1))
    GPTConfig(mixer_pattern='X', rope_base=5.0, linear_n_key_head=3)  # its own now
    GPTConfig(mixer_pattern='GB', attn_sink=True, linear_conv_kernel_dim=3)


def test_what_a_fork_forgets_fails_loudly(monkeypatch):
    class Forgetful(LeakyAverage):
        def __init__(self, config, layer):
            super().__init__(config, layer)
            self.states = []
            if forgets == 'mark':
                self.scale = torch.nn.Parameter(torch.ones(3, 4))
            if forgets == 'group':
                self.scale = flat.parameter(3, init=torch.nn.init.ones_, group='matrix')
            if forgets == 'name':
                self.scale = flat.parameter(3, init=torch.nn.init.ones_, group='vectors')
            if forgets == 'init':
                self.scale = flat.parameter(3, init=torch.ones_like, group='vector')
            if forgets == 'column':
                self.scale = flat.parameter(3, 1, init=torch.nn.init.ones_, group='matrix')
            if forgets == 'row':
                self.scale = flat.Linear(config.n_embd, 1)
            if forgets == 'rows':
                self.scale = flat.parameter(3, 4, init=torch.nn.init.ones_, group='matrix', rows=(1, 1))
    monkeypatch.setitem(flat.MIXERS, 'X', Forgetful)
    for forgets, message in (  # noqa: B007 (Forgetful reads it)
            ('mark', r'h\.0\.attn\.scale \(3, 4\) has no mark: make it with parameter'),
            ('group', r'h\.0\.attn\.scale \(3,\) is marked as a matrix'), ('name', "group='vectors'"),
            ('rows', r'rows=\(1, 1\)'), ('init', 'scale holds NaN after its init'),
            ('column', r'scale \(3, 1\) is marked as a matrix'),
            ('row', r"scale\.weight \(1, 32\) is marked as a matrix: use group='vector', or 'embedding'")):
        with pytest.raises(ValueError, match=message):
            tiny(mixer_pattern='X')
    forgets = 'slots and states'
    with pytest.raises(ValueError, match='Forgetful of layer 0 says neither slots nor states'):
        tiny(mixer_pattern='X').make_cache(1, 5)
    with pytest.raises(ValueError, match='Forgetful does not keep documents apart'):
        tiny(mixer_pattern='X', document_token=3)
    monkeypatch.setitem(flat.ACTIVATIONS, 'shared', (XIELU(), False))
    with pytest.raises(ValueError, match="ACTIVATIONS\\['shared'\\] is a module"):
        tiny(mlp='shared')
    with pytest.raises(TypeError, match='flops'):
        type('WithoutFlops', (flat.Mixer,), {'forward': LeakyAverage.forward})(GPTConfig(), 0)


@torch.no_grad()
def test_bfloat16_is_near_float32():
    model = tiny()
    idx = tokens(model, 2, 12)
    full = model(idx).log_softmax(-1)
    with torch.autocast('cpu', torch.bfloat16):
        auto = model(idx).log_softmax(-1)
    cast = model.to(torch.bfloat16)(idx).log_softmax(-1)
    assert auto.dtype == cast.dtype == torch.float32
    assert (auto - full).abs().mean() < 0.05 * full.std() and (cast - full).abs().mean() < 0.05 * full.std()
    assert model.ropes[model.config.rope_kind][0].dtype == torch.float32  # angles are never rounded


def as_transformers(model, config, names):
    """A transformers model with our weights: names maps its names to ours, as (name, rows) or a name."""
    other = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').eval().float()
    ours = model.state_dict()
    theirs = {}
    for key, w in other.state_dict().items():
        layer = re.search(r'\.(\d+)\.', key)
        name, part = names[re.sub(r'\.\d+\.', '.N.', key)]
        v = ours[name.replace('N', layer[1]) if layer else name]
        v = v if part is None else v.split(part[0])[part[1]]
        theirs[key] = (v.T if v.shape != w.shape
                       or key.split('.')[-2] in ('c_attn', 'c_fc', 'c_proj') and v.ndim > 1 else v)
    other.load_state_dict(theirs)
    return other


def test_logits_equal_transformers_qwen3():
    model = tiny(n_kv_head=2, head_dim=10, rope_base=5000.0)
    config = transformers.Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=model.config.d_ff, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=10, max_position_embeddings=24,
        rope_parameters={'rope_type': 'default', 'rope_theta': 5000.0}, rms_norm_eps=1e-6,
        tie_word_embeddings=True)
    qkv, mlp = [40, 20, 20], [model.config.d_ff] * 2
    block = 'model.layers.N.'
    names = {
        'model.embed_tokens.weight': ('wte.weight', None), 'lm_head.weight': ('wte.weight', None),
        'model.norm.weight': ('ln_f.weight', None),
        block + 'input_layernorm.weight': ('h.N.ln_1.weight', None),
        block + 'post_attention_layernorm.weight': ('h.N.ln_2.weight', None),
        **{block + f'self_attn.{c}_proj.weight': ('h.N.attn.c_attn.weight', (qkv, i))
           for i, c in enumerate('qkv')},
        **{block + f'self_attn.{c}_norm.weight': (f'h.N.attn.{c}_norm.weight', None) for c in 'qk'},
        block + 'self_attn.o_proj.weight': ('h.N.attn.c_proj.weight', None),
        block + 'mlp.gate_proj.weight': ('h.N.mlp.c_fc.weight', (mlp, 0)),
        block + 'mlp.up_proj.weight': ('h.N.mlp.c_fc.weight', (mlp, 1)),
        block + 'mlp.down_proj.weight': ('h.N.mlp.c_proj.weight', None)}
    idx = tokens(model, 2, 24)
    with torch.no_grad():
        torch.testing.assert_close(model(idx), as_transformers(model, config, names)(idx).logits,
                                   atol=1e-4, rtol=1e-4)


def test_logits_and_loss_equal_transformers_gpt2():
    model = tiny(**GPT2)
    config = transformers.GPT2Config(vocab_size=61, n_positions=24, n_embd=32, n_layer=2, n_head=4)
    names = {key.replace('h.N', 'transformer.h.N'): (key, None) for key in (
        f'h.N.{part}.{kind}'
        for part in ('ln_1', 'ln_2', 'attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj')
        for kind in ('weight', 'bias'))}
    names |= {f'transformer.{key}': (key, None)
              for key in ('wte.weight', 'wpe.weight', 'ln_f.weight', 'ln_f.bias')}
    names['lm_head.weight'] = ('wte.weight', None)
    other, idx = as_transformers(model, config, names), tokens(model, 2, 24)
    with torch.no_grad():
        torch.testing.assert_close(model(idx), other(idx).logits, atol=1e-4, rtol=1e-4)
        loss, aux = model(idx[:, :-1], idx[:, 1:])
        torch.testing.assert_close(loss, other(idx, labels=idx).loss, atol=1e-5, rtol=1e-5)
    assert aux == {}


def test_loss_counts_only_targets():
    model = tiny()
    idx, targets = tokens(model, 2, 8), tokens(model, 2, 8)
    with pytest.raises(ValueError, match='targets hold -100'):
        model(idx, torch.full_like(targets, -100))
    targets[0, :5] = -1
    logp = model(idx).log_softmax(-1)
    kept = [-logp[b, t, targets[b, t]] for b in range(2) for t in range(8) if targets[b, t] >= 0]
    torch.testing.assert_close(model(idx, targets)[0], sum(kept) / len(kept))
    assert model(idx, torch.full_like(targets, -1))[0].item() == 0.0  # nothing to learn is no nan


def test_norms_activations_and_softcap_follow_their_formulas():
    x = torch.randn(5, 8, dtype=torch.float64) * 3
    config = GPTConfig(n_embd=24, norm_bias=True, norm_eps=0.1)
    rms, layer = flat.Norm(8, config), flat.Norm(8, dataclasses.replace(config, norm='layernorm'))
    for norm, y in ((rms, x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()),
                    (layer, (x - x.mean(-1, keepdim=True))
                     / (x.var(-1, keepdim=True, unbiased=False) + 0.1).sqrt())):
        for w in norm.parameters():
            torch.nn.init.normal_(w)
        torch.testing.assert_close(norm(x), y * norm.weight + norm.bias,
                                   atol=1e-5, rtol=1e-5, check_dtype=False)
    def phi(x):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    def tanh(x):
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    def sigmoid(x):
        return 1 / (1 + torch.exp(-x))
    silu, relu = lambda x: x * sigmoid(x), lambda x: x.clamp(min=0)
    gated = {'swiglu': silu, 'geglu': phi, 'geglu_tanh': tanh, 'reglu': relu, 'glu': sigmoid}
    plain = {'gelu': phi, 'gelu_tanh': tanh, 'relu': relu, 'relu2': lambda x: relu(x)**2, 'silu': silu}
    for name, f in {**gated, **plain}.items():
        mlp = flat.MLP(GPTConfig(n_embd=8, n_head=1, mlp=name), 24).double()
        up, down = mlp.c_fc.weight, mlp.c_proj.weight
        wide = f(x @ up[:24].T) * (x @ up[24:].T if name in gated else 1)
        torch.testing.assert_close(mlp(x), wide @ down.T)
    plain, capped = tiny(), tiny(logit_softcap=5.0)
    idx = tokens(plain, 1, 6)
    torch.testing.assert_close(capped(idx), 5 * torch.tanh(plain(idx) / 5))


@pytest.mark.parametrize('options', [
    dict(bias=True, pos='learned', attn_sink=True, residual_lambdas=True), dict(wiring='sandwich'),
    dict(mixer_pattern='DA', linear_n_value_head=64, attn_gate=True),
    dict(tie_word_embeddings=False, head_bias=True, n_expert=4, n_shared_expert=1, balance_bias=True,
         kv_lora_rank=96, q_lora_rank=96)])
def test_initial_weights_are_what_the_table_says(options):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=192, vocab_size=500, block_size=64, **options))
    for name, w in model.state_dict().items():
        if name.endswith('conv'):
            assert 0.4 < w.max() <= 4 ** -0.5 and -0.4 > w.min() >= -4 ** -0.5
        elif name.endswith('A_log'):
            assert 0 < w.exp().min() < 4 and 12 < w.exp().max() <= 16
        elif name.endswith('dt_bias'):
            step = torch.nn.functional.softplus(w)
            assert 0.0009 < step.min() < 0.003 and 0.03 < step.max() < 0.11
        elif (name.endswith(('bias', 'sink', 'x0_lambdas')) or name == 'lm_head.weight'
                or 'c_proj' in name and 'wiring' not in options):
            assert not w.any(), name
        elif w.ndim == 1:
            assert (w == 1).all(), name
        else:
            std = 0.02 if name in ('wte.weight', 'wpe.weight') else (1 / (3 * w.shape[-1])) ** 0.5
            assert w.std().item() == pytest.approx(std, rel=0.05) and abs(w.mean()) < 0.1 * std, name
    idx, targets = torch.randint(500, (2, 4, 64))
    tied = 'tie_word_embeddings' not in options
    assert model(idx, targets)[0].item() == pytest.approx(math.log(500), rel=0.2 if tied else 1e-4)


def test_a_wide_model_starts_at_the_loss_of_guessing():
    model = GPT(GPTConfig(n_layer=1, n_head=6, n_embd=768, vocab_size=5000, block_size=64))
    idx, targets = torch.randint(5000, (2, 4, 64))
    assert model(idx, targets)[0].item() == pytest.approx(math.log(5000), rel=0.02)


def test_padding_of_the_vocabulary_is_never_seen():
    model = tiny(vocab_size=61, tie_word_embeddings=False)
    assert model.wte.num_embeddings == 64 and model(tokens(model, 1, 3)).shape == (1, 3, 61)
    state = model.state_dict()
    assert state['wte.weight'].shape == state['lm_head.weight'].shape == (61, 32)
    assert model.num_params() == sum(w.numel() for w in state.values())
    other = tiny(vocab_size=61, tie_word_embeddings=False)
    torch.nn.init.zeros_(other.wte.weight)
    other.load_state_dict(state)
    assert torch.equal(model(tokens(model, 1, 3)), other(tokens(model, 1, 3)))
    loss, _ = model(tokens(model, 1, 8), tokens(model, 1, 8))
    loss.backward()
    assert not model.wte.weight.grad[61:].any() and not model.lm_head.weight.grad[61:].any()


@pytest.mark.parametrize('options', [{}, dict(logit_softcap=5.0), dict(tie_word_embeddings=False,
                                                                      head_bias=True)])
def test_loss_over_the_padding_too_is_the_same(options, monkeypatch):
    """GPUs compute it so, for the sake of alignment."""
    model, head, widths = tiny(**options), GPT.head, []
    with torch.no_grad():
        model.wte.weight[61:] = 1.0
    idx, targets = tokens(model, 2, 24), tokens(model, 2, 24).roll(-1, 1)

    def padded_head(self, x, is_padded):
        logits = head(self, x, is_padded=True)
        widths.append(logits.shape[-1])
        return logits
    results = []
    for head_used in (head, padded_head):
        monkeypatch.setattr(GPT, 'head', head_used)
        loss, _ = model(idx, targets)
        results.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    assert widths == [64]
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)


def test_counts_of_parameters_and_flops():
    with torch.device('meta'):
        gpt2 = GPT(GPTConfig(vocab_size=50257, n_layer=12, n_head=12, n_embd=768, pos='learned',
                             norm='layernorm', mlp='gelu_tanh', qk_norm=False, bias=True))
    assert gpt2.num_params() == 124_439_808
    # 12 layers of 12 C^2 weights and the head, 6 FLOPs each; 12 L H D T for attention
    assert gpt2.flops_per_token() == 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024
    model = tiny(n_kv_head=2, bias=True)
    groups = model.param_groups()
    assert sorted(map(id, sum(groups.values(), []))) == sorted(map(id, model.parameters()))
    assert (all(w.ndim < 2 for w in groups['vector'])
            and {id(w) for w in groups['embedding']} == {id(model.wte.weight)})
    assert model.row_splits()[model.h[0].attn.c_attn.weight] == (32, 16, 16)
    assert model.row_splits()[model.h[0].attn.c_proj.weight] == (32,)


def test_gqa_with_all_heads_is_mha():
    idx = tokens(tiny(), 1, 9)
    assert torch.equal(tiny()(idx), tiny(n_kv_head=4)(idx))


def test_dropout_drops_its_share_and_keeps_the_mean():
    torch.manual_seed(0)
    x = torch.ones(1000, 999)
    for p in (0.2, 0.5, 0.001):
        y = flat.dropout(x, p)
        assert (y == 0).float().mean().item() == pytest.approx(p, rel=0.05)
        assert y.mean().item() == pytest.approx(1.0, abs=0.01)
    assert flat.dropout(x, 0.0) is x
    model = tiny(dropout=0.3)
    assert torch.equal(model(tokens(model, 1, 5)), tiny()(tokens(model, 1, 5)))  # none when evaluating
    assert not torch.equal(model.train()(tokens(model, 1, 5)), tiny()(tokens(model, 1, 5)))


@pytest.mark.parametrize('options, parts', [
    (dict(n_embd=100, n_head=12, n_kv_head=5, dropout=1.5),
     ['n_embd=100, n_head=12: n_head must divide n_embd', 'n_kv_head=5, n_head=12', 'dropout=1.5']),
    (dict(mlp='swoglu', n_layer=0, wiring='serial', pos_pattern='PX'),
     ["mlp='swoglu' is none of swiglu", 'n_layer=0', "wiring='serial' is none of pre", "pos_pattern='PX'"]),
    (dict(head_dim=7), ['rope_dim=7: rope rotates pairs']),
    (dict(head_dim=8, partial_rotary_factor=0.4), ['rope_dim=3']),
    (dict(kv_lora_rank=8, n_kv_head=2, head_dim=64, qk_norm=True, qk_rope_head_dim=5),
     ['n_kv_head=2, kv_lora_rank=8', 'head_dim=64', 'qk_norm=True', 'rope_dim=5']),
    (dict(q_lora_rank=8, v_head_dim=4), ['q_lora_rank=8 needs kv_lora_rank', 'v_head_dim=4 needs']),
    (dict(pos='alibi', rope_scaling=YARN, partial_rotary_factor=0.5),
     ["'original_max_position_embeddings': 12}, pos='alibi': only rope can be scaled",
      'partial_rotary_factor=0.5']),
    (dict(pos='learned', pos_pattern='PN'), ["pos_pattern='PN', pos='learned'"]),
    (dict(rope_scaling={'rope_type': 'yarn', 'factor': 4.0, 'beta': 1}), ["keyword argument 'beta'"]),
    (dict(rope_scaling={'rope_type': 'warp', 'factor': 2.0}), ["rope_type='warp' is none of linear"]),
    (dict(rope_scaling={'rope_type': 'linear', 'factor': 0.5}), ["factor=0.5 is below 1"]),
    (dict(window=8), ['window=8 needs window_pattern']), (dict(window_pattern='S'), ['needs window']),
    (dict(n_expert=4, n_expert_active=5, n_group=3, topk_group=4, dropout=-1.0),
     ['n_expert_active=5, n_expert=4', 'n_group=3', 'topk_group=4, n_group=3', 'dropout=-1.0']),
    (dict(n_expert=8, n_group=8, topk_group=2, router='sigmoid'), ['best two']),
    (dict(n_expert=8, n_group=4, topk_group=1, n_expert_active=3), ['n_expert_active=3']),
    (dict(n_expert=8, n_group=4), ['n_group=4 needs topk_group']),
    (dict(n_shared_expert=1, router='sigmoid'),
     ['n_shared_expert=1 needs n_expert', "router='sigmoid' needs"]),
    (dict(head_bias=True), ['only an untied head']),
    (dict(document_token=99, vocab_size=99), ['no such token']),
    (dict(attn_scale=-1.0, logit_softcap=-1.0, norm_eps=0.0),
     ['attn_scale=-1.0', 'logit_softcap=-1.0', 'eps']),
    (dict(rope_scaling={'rope_type': 'linear', 'factor': '4'}), ["rope_scaling={'rope_type': 'linear'"]),
    (dict(rope_scaling={'rope_type': ['a']}), ["is none of linear"]),
    (dict(rope_scaling={**YARN, 'original_max_position_embeddings': 0}), ['rope_scaling=']),
    (dict(rope_scaling={**YARN, 'beta_fast': 0}), ['rope_scaling=']),
    (dict(rope_scaling={'rope_type': 'ntk', 'factor': math.nan}), ['factor=nan is below 1']),
    (dict(rope_scaling={'rope_type': 'longrope', 'short_factor': [1.0], 'long_factor': [1.0, 2.0],
                        'factor': 2.0, 'original_max_position_embeddings': 99}),
     ["rope_scaling={'rope_type': 'longrope'"]),
    (dict(rope_base=math.inf, head_dim='8', bias='no', dropout=None, mlp=['a'], norm_eps=True),
     ['rope_base=inf is not a float', "head_dim='8' is not an int or None", "bias='no' is not a bool",
      'dropout=None', "mlp=['a'] is not a str", 'norm_eps=True']),
    (dict(n_layer=99999999), ['n_layer=99999999 must be at most 10,000']),
    (dict(block_size=10**12), ['block_size=1000000000000 must be at most']),
    (dict(n_embd=2**24, n_head=2**10, n_layer=1000), ['more than can be built']),
    (dict(n_head=10**9, head_dim=64), ['more than can be built']),
    (dict(mixer_pattern='AX'), ["mixer_pattern='AX' must be made of"]),
    (dict(mixer_pattern='DM'), ["mixer_pattern='DM'", 'M layers need kv_lora_rank']),
    (dict(mixer_pattern='DA', **MLA), ['not both', 'no layer has latent attention']),
    (dict(linear_n_key_head=3, linear_n_value_head=4, mixer_pattern='DA'), ['key heads must divide']),
    (dict(linear_conv_kernel_dim=3), ['linear_conv_kernel_dim=3', 'only D layers']),
    (dict(mixer_pattern='D', attn_sink=True, n_kv_head=2, pos='alibi', qkv_bias=True),
     ["attn_sink=True, mixer_pattern='D': only A and M layers have this", 'n_kv_head=2', "pos='alibi'",
      'qkv_bias=True']),
    (dict(attn_gate=True, mixer_pattern='D'), ['no layer has an attention with a gate']),
    (dict(window=4, window_pattern='SL', mixer_pattern='DA'), ['no layer has a window']),
    (dict(mixer_pattern='DDDA', n_layer=3), ['fewer layers than letters']),
    (dict(shared_gate=True, n_expert=4), ['shared_gate=True needs n_shared_expert']),
    (dict(n_expert=4, n_dense_layer=12), ['no layer has experts']),
    (dict(n_expert=1, norm_topk_prob=False), ['n_expert=1: one expert is an MLP']),
    (dict(n_expert=4, expert_pattern='D'), ['no layer has experts']),
    (dict(window=4, window_pattern='L'), ['no layer has a window']),
    (dict(pos='alibi', rope_base=5e5), ['only rope has a base']),
    (dict(wiring='output', residual_scale=0.5), ['undoes']),
    (dict(embed_norm=True, embed_scale=2.0), ['undoes']),
    (dict(qk_norm='half'), ["qk_norm='half' is none of True, False, whole"]),
])
def test_an_invalid_config_names_every_problem(options, parts):
    with pytest.raises(ValueError) as error:
        GPTConfig(**options)
    message = str(error.value)
    assert all(part in message for part in parts), message
    assert '\n' not in message and message.startswith('invalid config: ')


LORA = {  # options of a model, and targets that each name something else in it
    'dense': (dict(bias=True, n_kv_head=2, attn_gate=True), ['c_attn', 'c_proj', 'c_fc']),
    'latent': (dict(kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
               ['attn.c_attn', 'c_q', 'c_kv', 'attn.c_proj']),  # c_kv's weight is read, never called
    'experts': (dict(n_expert=4, n_shared_expert=1, d_expert=8), ['router', 'shared.c_fc', 'c_attn']),
    'hybrid': (dict(mixer_pattern='DA'), ['c_attn', '1.attn.c_proj', 'c_proj']),
}


@pytest.mark.parametrize('options, targets', LORA.values(), ids=LORA)
def test_adapters_start_as_nothing_and_merge_into_the_weights(options, targets):
    model = tiny(**options)
    idx, before = tokens(model, 2, 16), {name: w.clone() for name, w in model.state_dict().items()}
    logits, n, flops = model(idx).detach(), model.num_params(), model.flops_per_token()
    flat.add_lora(model, 3, 6.0, targets)
    assert torch.equal(model(idx), logits)
    adapters = flat.lora_state(model)
    assert {name for name, w in model.named_parameters() if w.requires_grad} == set(adapters)
    assert model.num_params() == n + sum(w.numel() for w in adapters.values())
    assert 4 / 6 * flops < model.flops_per_token() < flops * 1.3
    opts = [make_optimizers(model, optimizer=name) for name in ('adamw', 'muon')]
    assert all(len(g['params']) in (0, len(adapters)) for one in opts for o in one for g in o.param_groups)
    for w in model.parameters():
        if w.requires_grad:
            w.data += torch.randn_like(w) * 0.1
    loss, _ = model(idx, idx)
    loss.backward()
    assert all((w.grad is not None and bool(w.grad.any())) == w.requires_grad for w in model.parameters())
    expected, effective = model(idx).detach(), dict(before)  # W + alpha / rank B A, by hand
    continued = made(model, [[1, 2, 3], [4]], 10, temperature=0)  # with a cache
    for name, a in adapters.items():
        if name.endswith('lora_a'):
            weight = name.removesuffix('lora_a') + 'weight'
            update = 6 / 3 * adapters[name[:-1] + 'b'].double() @ a.double()
            effective[weight] = (before[weight] + update).float()
    state = {name.replace('.base.', '.'): w for name, w in model.state_dict().items() if name not in adapters}
    assert same_weights(state, before)
    flat.merge_lora(model)
    assert model.state_dict().keys() == before.keys()
    assert all(w.requires_grad for w in model.parameters())
    for name, w in model.state_dict().items():
        torch.testing.assert_close(w, effective[name], atol=1e-6, rtol=1e-5, msg=name)
    assert (expected - logits).abs().max() > 0.01
    near(model(idx), expected, 2e-5)
    assert made(model, [[1, 2, 3], [4]], 10, temperature=0) == continued


def test_what_cannot_have_an_adapter_is_named():
    model = tiny(n_expert=4, n_shared_expert=1, d_expert=8)
    for target, message in {
            'c_fc': "h.0.mlp.experts.c_fc, a GroupedLinear; adapters are for attn.c_attn, attn.c_proj, ",
            'q_proj': "'q_proj' is the name of no layer", 'attn': "h.0.attn, a Attention",
            '': "'' is the name of no layer", 'lm_head': 'no layer'}.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            flat.add_lora(model, 2, 1, ['c_attn', target])
        assert all(w.requires_grad for w in model.parameters())
    with pytest.raises(ValueError, match='lora_rank=0 must be at least 1'):
        flat.add_lora(model, 0, 1, ['c_attn'])


def test_importing_and_building_a_model_leaves_the_compiler_alone():
    """It takes as long to import as all of torch."""
    code = ('import sys, torch, model\nwith torch.device("meta"): model.GPT(model.GPTConfig())\n'
            'print("torch._dynamo" in sys.modules)')
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout == 'False\n'


def test_what_none_stands_for():
    assert GPTConfig(n_embd=768).d_ff == 2048 and GPTConfig(n_embd=128, n_head=4).d_ff == 384
    assert GPTConfig(n_embd=128, n_head=4, mlp='gelu').d_ff == 512
    config = GPTConfig(n_embd=128, n_head=4, n_expert=4)
    assert (config.n_expert_active, config.d_expert, config.qk_norm) == (2, 384, True)
    assert GPTConfig(n_expert=0) == GPTConfig()  # as a flag can say it
    hybrid = GPTConfig(mixer_pattern='DDDA', linear_n_value_head=24)
    assert (hybrid.linear_n_key_head, hybrid.linear_key_head_dim) == (12, 64)
    assert hybrid.linear_value_head_dim == 64
    latent = GPTConfig(kv_lora_rank=64)
    assert (latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim) == (128, 64, 128)
    # what is stored is read as it was
    for c in (config, latent, hybrid, GPTConfig(mixer_pattern='D'), GPTConfig(bias=True, norm='layernorm')):
        assert GPTConfig(**dataclasses.asdict(c)) == c


# training ---------------------------------------------------------------------------------------------------

def synthetic(n, vocab_size=23, seed=0):
    """Tokens with something to learn: each determines the next, but for some noise."""
    rng, out = np.random.default_rng(seed), [1]
    noise, other = rng.random(n) < 0.15, rng.integers(vocab_size, size=n)
    for i in range(n - 1):
        out.append(int(other[i]) if noise[i] else (5 * out[-1] + 3) % vocab_size)
    return np.array(out)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a small prepared dataset, data/toy."""
    monkeypatch.chdir(tmp_path)
    write_toy(tmp_path / 'data' / 'toy')
    return tmp_path


def write_toy(path, n=3001, dtype='uint16', vocab_size=23):
    path.mkdir(parents=True)
    synthetic(n).astype('<u2').tofile(path / 'train.bin')
    synthetic(801, seed=1).astype('<u2').tofile(path / 'val.bin')
    meta = {'vocab_size': vocab_size, 'dtype': dtype, 'eot': None, 'bytes_per_token': 2.0,
            'tokenizer': {'kind': 'char', 'chars': [chr(97 + i) for i in range(vocab_size)], 'eot': None}}
    (path / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')


TOY = ['--dataset=toy', '--n_layer=2', '--n_head=2', '--n_embd=32', '--block_size=16', '--batch_size=4',
       '--gradient_accumulation_steps=3', '--max_iters=20', '--warmup_iters=3', '--learning_rate=5e-3',
       '--eval_interval=10', '--eval_iters=5', '--device=cpu', '--dtype=float32', '--compile=False']


def run(script, *args):
    """A script as users run it, in this process; returns its globals."""
    argv, sys.argv = sys.argv, [script, *args]
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    deterministic, hook = torch.are_deterministic_algorithms_enabled(), sys.excepthook
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        return runpy.run_path(str(ROOT / script), run_name='__main__')
    finally:
        sys.argv, sys.excepthook = argv, hook
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
        for n, handler in handlers.items():
            signal.signal(n, handler)


def train(*args):
    return run('train.py', str(ROOT / 'config' / 'gpt2.py'), '--vocab_size=23', '--pos=rope', *TOY, *args)


def log_rows(out_dir):
    with open(os.path.join(out_dir, 'log.csv'), encoding='utf-8', newline='') as f:
        return list(csv.DictReader(f))


def same_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_windows_are_each_seen_once_an_epoch():
    n, seed = 37, 5
    for epoch in range(3):
        assert sorted(flat_train.window_indices(epoch * n, n, n, seed)) == list(range(n))
    orders = [flat_train.window_indices(e * n, n, n, seed).tolist() for e in range(2)]
    assert orders[0] != orders[1] and orders[0] != list(range(n))
    whole = flat_train.window_indices(0, 80, n, seed).tolist()  # batches that cross an epoch's end
    assert sum((flat_train.window_indices(i, 7, n, seed).tolist() for i in range(0, 77, 7)), []) == whole[:77]


@pytest.mark.parametrize('accumulation, size, ranks, expected', [
    (40, 12, 1, (40, 12)), (40, 12, 8, (5, 12)), (1, 64, 2, (1, 32)), (1, 64, 4, (1, 16)),
    (40, 12, 3, (16, 10)), (3, 4, 2, (2, 3)), (40, 10**11 - 1, 8, (5, 10**11 - 1)),
    (10**11 - 1, 1, 1, (10**11 - 1, 1)), (3, 10**11, 2, (2, 75 * 10**9))])
def test_ranks_share_a_batch(accumulation, size, ranks, expected):
    assert flat_train.share_batch(accumulation, size, ranks) == expected
    micro, each = flat_train.share_batch(accumulation, size, ranks)
    assert micro * each * ranks == accumulation * size


def test_a_batch_that_ranks_do_not_divide_names_the_nearest():
    with pytest.raises(ValueError, match='64 windows, which 3 ranks do not divide; 63 or 66'):
        flat_train.share_batch(1, 64, 3)
    with pytest.raises(ValueError, match='at least 1'):
        flat_train.share_batch(0, 64, 1)


def test_learning_rate_schedules(monkeypatch):
    monkeypatch.setitem(flat_train.SCHEDULES, 'odd', lambda done, cooldown: 2 * done)
    with pytest.raises(ValueError, match="lr_schedule='odd' is at 1.5 of the way to the peak"):
        flat_train.lr_at(75, 1.0, 0.0, 0, 100, 'odd')
    lr = functools.partial(flat_train.lr_at, peak=1.0, floor=0.1, warmup=10, end=110)
    for it in (0, 4, 9):
        assert lr(it) == pytest.approx((it + 1) / 11)
    for it in (10, 35, 60, 110, 500):
        done = min(1, (it - 10) / 100)
        assert lr(it, schedule='cosine') == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        assert lr(it, schedule='linear') == pytest.approx(1.0 - 0.9 * done)
        assert lr(it, schedule='wsd', cooldown=0.4) == pytest.approx(
            1.0 if done <= 0.6 else 0.1 + 0.9 * (1 - done) / 0.4)
        assert lr(it, schedule=None) == 1.0


def test_muon_equals_torch():
    torch.manual_seed(0)
    shapes = [(8, 8), (8, 8), (16, 8), (8, 16)]
    ours = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
    theirs = [torch.nn.Parameter(w.detach().clone()) for w in ours]
    fused = torch.nn.Parameter(torch.cat([w.detach() for w in theirs[:2]]))  # two projections as one matrix
    stack = torch.nn.Parameter(torch.stack([w.detach() for w in theirs[:2]]))  # two experts
    row_splits = {**{w: (len(w),) for w in ours}, fused: (8, 8), stack: (8,)}
    mine = flat_train.Muon([*ours, fused, stack], 0.01, row_splits, 0.9, 0.2)
    other = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.2, momentum=0.9, adjust_lr_fn='match_rms_adamw')
    for _ in range(5):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        fused.grad = torch.cat([w.grad for w in theirs[:2]])
        stack.grad = torch.stack([w.grad for w in theirs[:2]])
        mine.step()
        other.step()
    for a, b in zip([*ours, *fused.split(8), *stack], [*theirs, *theirs[:2], *theirs[:2]]):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-2)  # bfloat16 inside, products in another order
    u = flat_train.orthogonalise(torch.randn(3, 20, 50)).float()
    values = torch.linalg.svdvals(u)
    assert values.min() > 0.5 and values.max() < 1.3


def make_optimizers(model, **settings):
    return flat_train.make_optimizers(model, {**flat_train.config, **settings})


@pytest.mark.parametrize('kind', flat_train.OPTIMIZERS)
def test_every_parameter_has_one_optimizer(kind):
    model = tiny(bias=True, pos='learned', n_expert=4)
    opts = make_optimizers(model, optimizer=kind)
    seen = [w for opt in opts for group in opt.param_groups for w in group['params']]
    assert sorted(map(id, seen)) == sorted(map(id, model.parameters()))
    matrices = [w for name, w in model.named_parameters() if name.endswith('weight') and w.ndim > 1]
    decayed = [w for opt in opts for g in opt.param_groups if g['weight_decay'] for w in g['params']]
    assert sorted(map(id, decayed)) == sorted(map(id, matrices))


def test_a_new_optimizer_is_one_entry_and_must_take_every_parameter(monkeypatch):
    model = tiny()

    def sgd(model, config):
        return [torch.optim.SGD(model.parameters(), lr=config['learning_rate'])]

    def forgetful(model, config):
        return [torch.optim.SGD(list(model.parameters())[1:], lr=config['learning_rate'])]
    monkeypatch.setitem(flat_train.OPTIMIZERS, 'sgd', sgd)
    monkeypatch.setitem(flat_train.OPTIMIZERS, 'forgetful', forgetful)
    flat_train.check_settings({**flat_train.config, 'optimizer': 'sgd'})
    opt, = make_optimizers(model, optimizer='sgd', learning_rate=0.5)
    assert opt.param_groups[0]['lr'] == 0.5
    with pytest.raises(ValueError, match="optimizer='forgetful' .* wte.weight"):
        make_optimizers(model, optimizer='forgetful')
    for name, wrong, message in (
            ('alone', lambda model, config: sgd(model, config)[0], 'must give a list of torch optimizers'),
            ('more', lambda model, config: [torch.optim.SGD([*model.parameters(), torch.ones(3)], lr=1.0)],
             'tensors that are no parameters')):
        monkeypatch.setitem(flat_train.OPTIMIZERS, name, wrong)
        with pytest.raises(ValueError, match=f"optimizer='{name}' .*{message}"):
            make_optimizers(model, optimizer=name)


@pytest.mark.parametrize('options', [
    ['--optimizer=adamw'], ['--optimizer=muon'],
    ['--optimizer=muon', '--n_expert=4', '--n_shared_expert=1', '--balance_bias=True', '--z_loss=0.001',
     '--document_token=3', '--window=6', '--window_pattern=SL', '--residual_lambdas=True']])
def test_resumed_equals_uninterrupted(folder, options):
    common = ['--dropout=0.2', '--log_interval=1', *options]
    whole = train('--out_dir=whole', *common)
    train('--out_dir=parts', *common, '--lr_decay_iters=20', '--max_iters=10')
    parts = run('train.py', '--out_dir=parts', '--init_from=resume', '--max_iters=20')
    a, b = (torch.load(f'{out}/ckpt.pt', weights_only=True) for out in ('whole', 'parts'))
    assert same_weights(a['model'], b['model']) and a['iter_num'] == b['iter_num'] == 20
    rows = [[(r['iter'], r['loss'], r['val_loss'], r['lr'], r['grad_norm']) for r in log_rows(out)]
            for out in ('whole', 'parts')]
    assert rows[0] == rows[1] and len(rows[0]) == 20
    assert same_weights(whole['model'].state_dict(), parts['model'].state_dict())
    for key in ('exp_avg', 'momentum_buffer'):
        states = [[s[key] for o in c['optimizer'] for s in o['state'].values() if key in s] for c in (a, b)]
        assert all(torch.equal(x, y) for x, y in zip(*states))


def test_training_computes_what_a_plain_loop_computes(folder):
    """AdamW, clipping, accumulation, schedule and data order, against torch's own pieces in a plain loop."""
    story = train('--out_dir=out', '--max_iters=6')
    torch.manual_seed(1337)
    model = GPT(GPTConfig(**vars(story['model'].config)))
    opt = torch.optim.AdamW([dict(params=[w for w in model.parameters() if w.ndim > 1], weight_decay=0.1),
                             dict(params=[w for w in model.parameters() if w.ndim < 2], weight_decay=0.0)],
                            betas=(0.9, 0.95))
    data = torch.from_numpy(np.fromfile('data/toy/train.bin', '<u2').astype(np.int64))
    n = 3000 // 16
    for it in range(6):
        order = flat_train.window_indices(it * 12, 12, n, 1337)
        x = torch.stack([data[i * 16:i * 16 + 16] for i in order])
        y = torch.stack([data[i * 16 + 1:i * 16 + 17] for i in order])
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in opt.param_groups:
            group['lr'] = flat_train.lr_at(it, 5e-3, 5e-4, 3, 6)
        opt.step()
    for (name, a), b in zip(story['model'].state_dict().items(), model.state_dict().values()):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4, msg=name)
    assert float(log_rows('out')[-1]['loss']) == pytest.approx(loss.item(), rel=1e-4)


def test_accumulation_and_one_large_batch_are_the_same(folder):
    model, losses = tiny().train(), []
    x, y = torch.randint(61, (2, 8, 16))
    for size in (8, 2):
        model.zero_grad()
        for i in range(0, 8, size):
            loss = model(x[i:i + size], y[i:i + size])[0] * size / 8
            loss.backward()
        losses.append([w.grad.clone() for w in model.parameters()])
    for a, b in zip(*losses):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)
    a = train('--out_dir=a', '--batch_size=2', '--gradient_accumulation_steps=4', '--max_iters=5',
              '--log_interval=1')
    b = train('--out_dir=b', '--batch_size=8', '--gradient_accumulation_steps=1', '--max_iters=5',
              '--log_interval=1')
    for x, y in zip(a['model'].parameters(), b['model'].parameters()):
        # AdamW divides small differences by small gradients
        torch.testing.assert_close(x, y, atol=2e-4, rtol=1e-3)
    for key in ('loss', 'grad_norm', 'lr'):
        assert [float(r[key]) for r in log_rows('a')] == pytest.approx([float(r[key]) for r in log_rows('b')],
                                                                       rel=1e-4)


def torchrun(count, *command, fails=False):
    """A script on `count` ranks of this machine: what it prints, or if it fails, the finished process."""
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={count}',
               *command]
    for last in (False, True):  # gloo has aborted a rank (exit code -6) in 2 of 60 runs, on one machine
        done = subprocess.run(command, capture_output=True, text=True, timeout=240,
                              env={**os.environ, 'OMP_NUM_THREADS': '1'})
        if last or 'exitcode: -6' not in done.stderr:
            break
    assert (done.returncode == 0) != fails, done.stderr[-3000:]
    return done if fails else done.stdout


def two_ranks(*args, fails=False):
    return torchrun(2, str(ROOT / 'train.py'), *args, fails=fails)


def on_ranks(count, *runs, patch=''):
    """train.py on `count` ranks, once for each list of arguments, all in the same processes, as starting them
    takes the longest. patch: Python that each runs first, with its rank. What they print; a ValueError or
    SystemExit is printed and not raised."""
    code = f'''import functools, os, runpy, sys
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
rank, init = int(os.environ['RANK']), dist.init_process_group
{patch}
for i, args in enumerate({[list(args) for args in runs]!r}):
    sys.argv = ['train.py', *args]
    if i:  # torchrun's own store still holds the addresses of the first
        store = dist.FileStore(f"store_{{os.environ['MASTER_PORT']}}_{{i}}", {count})
        dist.init_process_group = functools.partial(init, store=store, rank=rank, world_size={count})
    try:
        runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')
    except (ValueError, SystemExit) as error:
        print(f'rank {{rank}} raised: {{error}}', flush=True)
        if dist.is_initialized():
            dist.destroy_process_group()
'''
    Path('on_ranks.py').write_text(code, encoding='utf-8')
    return torchrun(count, 'on_ranks.py')


@pytest.mark.parametrize('options', [
    ['--optimizer=muon'],
    # so few tokens a rank that most of the experts get none
    ['--n_expert=16', '--n_expert_active=1', '--d_expert=16', '--batch_size=1', '--balance_bias=True',
     '--norm_topk_prob=False', '--router=sigmoid', '--balance_rate=0.05', '--block_size=8']],
    ids=['dense', 'experts'])
def test_two_ranks_equal_one(folder, options):
    # evaluations that fall between log lines once reduced on one rank alone
    args = [*TOY, '--log_interval=3', '--eval_interval=5', '--gradient_accumulation_steps=2',
            '--max_iters=10', '--sample_tokens=0', *options]
    torch.set_num_threads(1)  # another rounding might choose another expert
    one = run('train.py', '--out_dir=one', *args)
    assert two_ranks('--out_dir=two', *args).count('step 10: train loss') == 1  # one rank speaks
    two = torch.load('two/ckpt.pt', weights_only=True)['model']
    for name, w in one['model'].state_dict().items():
        torch.testing.assert_close(w, two[name], atol=1e-4, rtol=1e-3, msg=name)
    for a, b in zip(log_rows('one'), log_rows('two')):
        assert float(a['loss']) == pytest.approx(float(b['loss']), rel=1e-4)
        assert (not a['val_loss']) == (not b['val_loss'])
        assert not a['val_loss'] or float(a['val_loss']) == pytest.approx(float(b['val_loss']), rel=1e-4)


def test_without_memory_the_same_batch_in_smaller_parts_is_named(folder, monkeypatch, capsys):
    for accumulation, size, ranks in ((40, 12, 8), (1, 64, 4), (3, 4, 2), (1, 17, 1), (5, 1, 1)):
        micro, each = flat_train.share_batch(accumulation, size, ranks)
        plain = {'checkpoint_activations': False, 'shard': False, 'lora_rank': 0}
        advice = flat_train.smaller_batches(micro, each, ranks, plain)
        assert ('--shard' in advice) == (ranks > 1) and '--shard' not in flat_train.smaller_batches(
            micro, each, ranks, {**plain, 'lora_rank': 8})
        pairs = re.findall(r'--batch_size=(\d+) --gradient_accumulation_steps=(\d+)', advice)
        assert bool(pairs) == (each not in (1, 17)) and '--checkpoint_activations=True' in advice
        for smaller, steps in pairs:
            more, part = flat_train.share_batch(int(steps), int(smaller), ranks)
            assert part == int(smaller) < each and more * part * ranks == accumulation * size
    everything = {'checkpoint_activations': 2, 'shard': True, 'lora_rank': 0}
    assert flat_train.smaller_batches(4, 1, 2, everything) == 'a smaller model is needed'
    hooks = []

    def forward(self, *args):
        hooks.append(sys.excepthook)
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')
    monkeypatch.setattr(flat_train.GPT, 'forward', forward)
    with pytest.raises(torch.OutOfMemoryError) as error:
        train('--out_dir=out')
    hooks[0](error.type, error.value, None)
    assert capsys.readouterr().err.endswith(
        'out of memory; the same batch in smaller parts: --batch_size=2 --gradient_accumulation_steps=6 or '
        '--batch_size=1 --gradient_accumulation_steps=12; or --checkpoint_activations=True\n')


@pytest.mark.parametrize('options', [
    {}, dict(dropout=0.3, document_token=3, window=5, window_pattern='SL', residual_lambdas=True),
    dict(n_expert=4, n_shared_expert=1, dropout=0.2), dict(kv_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8)])
def test_activations_computed_twice_give_the_same_gradients_with_less_memory(options):
    def gradients(every):
        torch.manual_seed(0)
        model = tiny(n_layer=4, wiring='sandwich', **options).train()
        if every:
            flat_train.checkpoint_blocks(model, every)
        kept = []

        def keep(x):
            if not isinstance(x, torch.nn.Parameter):
                kept.append(x.untyped_storage())
            return x
        x, y = torch.randint(61, (2, 4, 16))
        with torch.autograd.graph.saved_tensors_hooks(keep, keep):
            loss, aux = model(x, y)
        size = sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())
        (loss + aux.get('balance', 0) + aux.get('z', 0)).backward()
        return [w.grad for w in model.parameters()], size
    (plain, size), (each, smallest), (second, between) = (gradients(every) for every in (0, 1, 2))
    assert all(map(torch.equal, plain, each)) and all(map(torch.equal, plain, second))
    assert smallest < between < size and smallest < size / 2
    with pytest.raises(ValueError, match='checkpoint_activations=3 names no block of 2: give True'):
        flat_train.checkpoint_blocks(tiny(n_layer=2), 3)


def test_what_a_block_hands_on_is_not_lost_in_silence(monkeypatch):
    @dataclasses.dataclass
    class Context(flat.ForwardContext):
        handed: torch.Tensor | None = None
    monkeypatch.setattr(flat, 'ForwardContext', Context)
    forward = flat.Block.forward

    def hands_on(self, x, context):
        context.handed = x
        return forward(self, x, context)
    monkeypatch.setattr(flat.Block, 'forward', hands_on)
    model = tiny(n_layer=2).train()
    model(torch.zeros(1, 4, dtype=torch.long))
    flat_train.checkpoint_blocks(model, 2)
    with pytest.raises(ValueError, match='checkpoint_activations would lose handed, which a block hands on'):
        model(torch.zeros(1, 4, dtype=torch.long))


def test_what_a_machine_has_is_named(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: True)
    with pytest.raises(ValueError, match='2 ranks on device=mps: .* start one process'):
        flat_train.start_ranks('auto', 'mps', 2)
    for name, tflops in {'Tesla V100-SXM2-16GB': 125, 'Tesla V100-PCIE-32GB': 112, 'Tesla T4': 65,
                         'NVIDIA H200': 989, 'NVIDIA H200 NVL': 835, 'NVIDIA L40S': 362, 'NVIDIA A10': 125,
                         'NVIDIA GeForce RTX 3090 Ti': 80, 'NVIDIA GeForce RTX 3090': 71,
                         'NVIDIA A100-SXM4-80GB': 312, 'NVIDIA GeForce RTX 3080 Ti': None,
                         'NVIDIA GeForce RTX 4090 Laptop GPU': None, 'NVIDIA GeForce GT 730': None}.items():
        monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device, name=name: name)
        assert flat_train.peak_flops('cuda:0', torch.bfloat16) == (tflops and tflops * 1e12), name
    assert flat_train.peak_flops('cuda:0', torch.float32) is flat_train.peak_flops('cpu', torch.bfloat16)

    gpu = types.SimpleNamespace(device_type='cuda', device='cuda:0', dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (7, 5))
    assert 'this GPU has no bfloat16 units' in flat_train.dtype_notice(gpu, {'dtype': 'bfloat16'})
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: (8, 0))
    assert flat_train.dtype_notice(gpu, {'dtype': 'bfloat16'}) is None
    assert flat_train.dtype_notice(gpu, {'dtype': 'float16'}) == 'resume: dtype was float16, is bfloat16'
    assert flat_train.dtype_notice(gpu, {}) is flat_train.dtype_notice(gpu, None) is None


def test_saving_that_takes_long_is_said():
    assert flat_train.saving_notice(0.9, 2.0, 10) is None
    assert flat_train.saving_notice(19.0, 1000.0, 10) is None
    assert (flat_train.saving_notice(30.0, 1000.0, 10) == 'saving took 30.0 s, 3% of the time since the last '
            'evaluation: a larger --eval_interval (now 10) loses less')


SHARES = {  # kind of model -> its options
    'dense': ['--optimizer=muon', '--n_kv_head=1', '--tie_word_embeddings=False', '--residual_lambdas=True'],
    # all experts: rounding must not choose another one
    'experts': ['--optimizer=muon', '--bias=True', '--n_expert=4', '--n_expert_active=4',
                '--balance_bias=True', '--always_save_checkpoint=False'],
}


def test_any_number_of_ranks_goes_on_where_another_stopped_sharded_or_not(folder):
    """One rank without a stop, against 2, then 4, then 1: replicated, sharded and back, or the reverse."""
    args = [*TOY, '--gradient_accumulation_steps=4', '--log_interval=1', '--eval_interval=3', '--max_iters=9',
            '--lr_decay_iters=9', '--sample_tokens=6', '--eval_iters=3']
    torch.set_num_threads(1)
    for kind, options in SHARES.items():
        run('train.py', f'--out_dir={kind}', *args, *options)

    def runs(first, count):
        return [[f'--out_dir={kind}_{shard}', *args, *options, f'--max_iters={3 * (count // 2)}',
                 f'--shard={shard != first}', f"--init_from={'scratch' if count == 2 else 'resume'}"]
                for kind, options in SHARES.items() for shard in (False, True)]
    step = [*args, '--wiring=sandwich', '--dropout=0.1', '--optimizer=adamw', '--max_iters=1']
    one_step = {'ddp': [], 'shard': ['--shard=True'], 'again': ['--checkpoint_activations=True'],
                'both': ['--shard=True', '--checkpoint_activations=2']}
    steps = [[f'--out_dir={out}', *step, *more] for out, more in one_step.items()]
    two = on_ranks(2, *runs(False, 2), *steps)
    gradients = {out: [s['exp_avg'] for s in torch.load(f'{out}/ckpt.pt')['optimizer'][0]['state'].values()]
                 for out in one_step}
    for mine in gradients.values():
        for a, b in zip(mine, gradients['ddp']):
            assert b.any() and (a - b).norm() <= 1e-5 * b.norm()
    four = on_ranks(4, *runs(True, 4))
    assert 'raised: ' not in two + four, two + four
    assert four.count(' sample:') == 4
    for kind, options in SHARES.items():
        plain = torch.load(f'{kind}/ckpt.pt', weights_only=True)
        for out in (f'{kind}_False', f'{kind}_True'):
            run('train.py', f'--out_dir={out}', *args, *options, '--init_from=resume')
            found, expected = log_rows(out), log_rows(kind)
            for key in ('loss', 'val_loss', 'grad_norm', 'update_ratio', 'load_max'):
                a, b = ([float(row[key] or 0) for row in rows] for rows in (found, expected))
                assert a == pytest.approx(b, rel=1e-4 if 'loss' in key else 1e-2), (out, key)
            mine = torch.load(f'{out}/ckpt.pt', weights_only=True)
            assert [list(state['state']) for state in mine['optimizer']] == [
                list(state['state']) for state in plain['optimizer']]
            for name, w in plain['model'].items():
                assert (mine['model'][name] - w).norm() <= 0.1 * w.norm(), name  # bfloat16 in Muon
            assert {name: type(value) for name, value in mine.items()} == {
                name: type(value) for name, value in plain.items()}


def test_sharded_blocks_are_compiled_between_their_hooks(tmp_path, monkeypatch):
    """On one rank, whose shards are whole: the gradients of three micro-batches, some blocks recomputed."""
    compile = torch.compile
    monkeypatch.setattr(torch, 'compile', lambda f, **_: compile(f, backend='aot_eager', dynamic=False))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = tiny(n_layer=3, residual_lambdas=True).train()
    model = tiny(n_layer=3, residual_lambdas=True).train()
    model.load_state_dict(plain.state_dict())
    machine = types.SimpleNamespace(device_type='cpu', dtype=torch.float32)
    scaler = torch.amp.GradScaler('cpu', enabled=False)
    found = []
    torch.distributed.init_process_group('gloo', rank=0, world_size=1, store=torch.distributed.FileStore(
        str(tmp_path / 'store'), 1))
    try:
        flat_train.checkpoint_blocks(model, 2)
        flat_train.shard_model(model, machine)
        for m, forward in (plain, plain), (model, flat_train.compile_model(model, 'cpu', by_block=True)):
            torch.manual_seed(0)
            batches = iter([(tokens(m, 2, 8), tokens(m, 2, 8), None) for _ in range(3)])
            loss, _, _ = flat_train.gradients(forward, next(batches), batches, 3, contextlib.nullcontext,
                                              scaler, 0.0, 0.0)
            found.append([loss, *(flat_train.whole(w.grad) for w in m.parameters())])
    finally:
        torch.distributed.destroy_process_group()
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    # blocks that are alike are one graph, those recomputed another, the loss a third
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 3


def test_one_rank_of_each_node_downloads(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(hub, 'fetch', fetched.append)
    torch.distributed.init_process_group('gloo', rank=0, world_size=1, store=torch.distributed.FileStore(
        str(tmp_path / 'store'), 1))
    try:
        for local_rank in '01':
            monkeypatch.setenv('LOCAL_RANK', local_rank)
            flat_train.fetch_once('an/id')
    finally:
        torch.distributed.destroy_process_group()
    assert fetched == ['an/id']


def test_two_ranks_stop_together_skip_together_and_read_the_same_files(folder):
    args = [*TOY, '--optimizer=muon', '--gradient_accumulation_steps=2']
    run('train.py', '--out_dir=out', *args, '--max_iters=1')
    write_toy(folder / 'node2' / 'data' / 'toy')
    shutil.copytree('out', 'node2/out')
    run('train.py', '--out_dir=out', *args, '--max_iters=2', '--init_from=resume')
    patch = '''
import signal, prepare
batch, calls = prepare.Bins.batch, []
def read(*args):
    calls.append(1)
    if rank == 1 and len(calls) == 5:  # while it computes its fourth
        os.kill(os.getpid(), signal.SIGTERM)
    if rank == 1 and len(calls) == 6:
        print('rank 1 goes on')
    return batch(*args)
prepare.Bins.batch = read
def elsewhere(name):
    return os.path.join('node2', name) if rank == 1 and name == 'out' else name
import model
path = model.checkpoint_path
import sample
sample.checkpoint_path = lambda name, best=True: path(elsewhere(name), best)
forward, steps = model.GPT.forward, []
def broken(self, idx, targets=None, **rest):
    found = forward(self, idx, targets, **rest)
    if self.training and '--out_dir=skips' in sys.argv:
        steps.append(1)
        if rank == 1 and len(steps) == 3:
            return found[0] + float('inf'), found[1]
    return found
model.GPT.forward = broken
'''
    many = ['--log_interval=1000', '--max_iters=1000', '--eval_interval=500']
    printed = on_ranks(2, ['--out_dir=both', *args, *many], ['--out_dir=out', *args, '--init_from=resume'],
                       ['--out_dir=skips', *args, '--max_iters=5'], patch=patch)
    assert torch.load('both/ckpt.pt', weights_only=True)['iter_num'] == 4
    assert 'rank 1 raised: 143' in printed and printed.count('all is saved; the error that torchrun') == 1
    assert all(f'rank {rank} raised: rank 1 has read iter_num=1, rank 0 2: all nodes need the same files'
               in printed for rank in (0, 1)), printed
    assert 'iter 4: a loss or gradient was not finite, 1 update skipped, 1 in all' in printed
    assert log_rows('skips')[-1]['skipped'] == '1'


def test_losses_of_experts_train_but_are_not_reported(folder):
    args = ['--n_expert=4', '--log_interval=1', '--max_iters=11']
    with pytest.raises(ValueError, match='its router learns nothing: --norm_topk_prob=False'):
        train('--out_dir=one', *args, '--n_expert_active=1')
    runs = {}
    for name, more in dict(plain=['--balance_loss=0'], pushed=['--balance_loss=3'], z=['--z_loss=0.5'],
                           bias=['--balance_loss=0', '--balance_bias=True', '--balance_rate=0.02']).items():
        story = train(f'--out_dir={name}', *args, *more)
        runs[name] = log_rows(name), story['model'].state_dict()
    first = {name: rows[0]['loss'] for name, (rows, _) in runs.items()}
    assert len(set(first.values())) == 1 and 2.9 < float(first['plain']) < 3.3  # ln 23 is 3.1
    assert len({rows[-1]['loss'] for rows, _ in runs.values()}) == 4
    assert all(1 <= float(row['load_max']) <= 4 for rows, _ in runs.values() for row in rows)
    bias, = (w for name, w in runs['bias'][1].items()
             if name.startswith('h.0.') and name.endswith('_bias'))
    steps = bias / 0.02  # a step of balance_rate an iteration, and 11 of them
    assert (steps - steps.round()).abs().max() < 1e-4 and bias.any() and steps.abs().max() < 11.1


def test_evaluation_is_the_mean_over_windows_and_disturbs_nothing(folder):
    story = train('--out_dir=out', '--max_iters=2', '--dropout=0.5', '--eval_iters=1000')
    model, bins = story['model'], story['val_bins']
    torch.manual_seed(3)
    state = torch.get_rng_state()
    args = (model, model, bins, 1000, 4, 'cpu', contextlib.nullcontext)
    loss, count = flat_train.evaluate(*args)
    assert (flat_train.evaluate(*args) == (loss, count) and torch.equal(state, torch.get_rng_state())
            and model.training)
    data = torch.from_numpy(np.fromfile('data/toy/val.bin', '<u2').astype(np.int64))
    model.eval()
    losses = [model(data[None, i:i + 16], data[None, i + 1:i + 17])[0].item() for i in range(0, 800, 16)]
    assert count == 16 * len(losses) == 800 and loss == pytest.approx(sum(losses) / 50, rel=1e-5)
    some, count = flat_train.evaluate(model, model, bins, 3, 4, 'cpu', contextlib.nullcontext)
    chosen = [losses[i * 50 // 12] for i in range(12)]
    assert count == 12 * 16 and some == pytest.approx(sum(chosen) / 12, rel=1e-5)
    row = log_rows('out')[-1]
    assert float(row['val_bpb']) == pytest.approx(float(row['val_loss']) / math.log(2) / 2.0, rel=1e-4)


def test_batches_for_a_gpu_are_pinned_whole(folder, monkeypatch):
    pinned, bins = [], prepare.Bins('data/toy', 'train')
    monkeypatch.setattr(torch.Tensor, 'pin_memory', lambda self: pinned.append(self) or self)
    monkeypatch.setattr(torch.Tensor, 'to', lambda self, *args, **kwargs: self)
    batch = flat_train.to_device(bins.batch(range(4), 16), 'cuda')
    assert len(pinned) == 2 and all(tensor.is_contiguous() for tensor in pinned)
    assert all(np.array_equal(a, b) for a, b in zip(batch, bins.batch(range(4), 16)))


def write_masks(path='data/toy', seed=0):
    """Uneven masks for a prepared folder: some windows are all targets, some have none. Returns train's."""
    masks = {}
    for split in ('val', 'train'):
        n, rng = os.path.getsize(f'{path}/{split}.bin') // 2, np.random.default_rng(seed)
        share = np.repeat(rng.choice([0, 0, 0.1, 0.5, 1], size=n // 16 + 1), 16)[:n]
        masks[split] = (rng.random(n) < share).astype(np.uint8)
        masks[split].tofile(f'{path}/{split}.mask.bin')
    return masks['train']


def masked_loss(model, bins, indices, block_size):
    """The mean over the targets of all those windows, in one batch, by torch's own function."""
    x, y = map(torch.from_numpy, bins.batch(indices, block_size))
    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1)


def test_targets_outside_the_mask_have_no_gradient(folder):
    write_masks()
    model, logits = tiny(vocab_size=23), []
    x, y = flat_train.to_device(prepare.Bins('data/toy', 'train').batch(range(40), 16), 'cpu')
    ids = np.fromfile('data/toy/train.bin', '<u2').astype(int)
    mask = np.fromfile('data/toy/train.mask.bin', np.uint8)
    assert 100 < mask[1:641].sum() < 600
    head = model.head

    def watched(x, is_padded):
        logits.append(head(x, is_padded))
        logits[0].retain_grad()
        return logits[0]
    model.head = watched
    model(x, y)[0].backward()
    moved = logits[0].grad.abs().sum(-1).flatten() > 0
    assert moved.tolist() == (mask[1:641] == 1).tolist()
    probs, at = logits[0].detach().softmax(-1).flatten(0, 1), torch.arange(640)
    probs[at, torch.from_numpy(ids[1:641])] -= 1
    expected = probs * torch.from_numpy(mask[1:641])[:, None] / mask[1:641].sum()
    torch.testing.assert_close(logits[0].grad.flatten(0, 1), expected, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize('accumulation, size', [(1, 12), (12, 1), (4, 3)])
def test_splitting_a_masked_batch_changes_nothing(folder, accumulation, size):
    write_masks()
    bins = prepare.Bins('data/toy', 'train')
    model = tiny(vocab_size=23).train()
    for it in range(3):
        batches = flat_train.read_batches(bins, 16, [it], accumulation, size, 1337, 'cpu')
        first = next(batches)
        assert first[2] is not None
        scaler = torch.amp.GradScaler('cpu', enabled=False)
        loss, _, after = flat_train.gradients(model, first, batches, accumulation, contextlib.nullcontext,
                                              scaler, 0.0, 0.0)
        found = [w.grad.clone() for w in model.parameters()]
        model.zero_grad()
        order = flat_train.window_indices(it * 12, 12, bins.n_windows(16), 1337)
        expected = masked_loss(model, bins, order, 16)
        expected.backward()
        assert after is None and loss.item() == pytest.approx(expected.item(), rel=1e-5)
        for a, w in zip(found, model.parameters()):
            torch.testing.assert_close(a, w.grad, atol=1e-6, rtol=1e-4)
        model.zero_grad()


def test_two_ranks_share_a_masked_batch(folder):
    """Losses and norms of gradients, for AdamW would hide a wrong factor, against a plain loop."""
    write_masks()
    args = [*TOY, '--max_iters=3', '--log_interval=1', '--grad_clip=0', '--batch_size=4', '--sample_tokens=0',
            '--gradient_accumulation_steps=4', '--optimizer=adamw', '--weight_decay=0.1']
    two_ranks('--out_dir=two', *args)
    story = run('train.py', '--out_dir=one', *args)
    torch.manual_seed(1337)
    model, bins = GPT(story['model'].config), story['train_bins']
    opt, = make_optimizers(model, learning_rate=5e-3)
    for it, (one, two) in enumerate(zip(log_rows('one'), log_rows('two'))):
        loss = masked_loss(model, bins, flat_train.window_indices(it * 16, 16, bins.n_windows(16), 1337), 16)
        loss.backward()
        norm = torch.stack([w.grad.norm() for w in model.parameters()]).norm()
        for row in (one, two):
            assert float(row['loss']) == pytest.approx(loss.item(), rel=1e-4)
            assert float(row['grad_norm']) == pytest.approx(norm.item(), rel=1e-3)
        flat_train.set_learning_rate([opt], flat_train.lr_at(it, 5e-3, 5e-4, 3, 3))
        opt.step()
        opt.zero_grad()
    a, b = (torch.load(f'{out}/ckpt.pt', weights_only=True)['model'] for out in ('one', 'two'))
    for name, w in model.state_dict().items():
        for other in (a, b):
            torch.testing.assert_close(other[name], w, atol=2e-4, rtol=1e-3, msg=name)
    losses = [float(log_rows(out)[-1]['val_loss']) for out in ('one', 'two')]
    bins, story = story['val_bins'], story['model'].eval()
    # TOY asks for 5 batches of 4 windows, evenly spread
    expected = masked_loss(story, bins, np.arange(20) * bins.n_windows(16) // 20, 16)
    assert losses == pytest.approx([expected.item()] * 2, rel=1e-4)


def write_packed(eot=22, block=16):
    """Makes data/toy a folder as prepare.py packs it, of conversations of which some share a window. Returns
    them: [(ids, the mask of each)]."""
    rng = np.random.default_rng(0)
    talks = [[eot, *rng.integers(22, size=n)] for n in (5, 8, 12, 3, 3, 3, 15, 7)]
    learnt = [[0] + [int(i % 7 > 2) for i in range(1, len(talk))] for talk in talks]
    ids, mask = [], []
    for talk, one in zip(talks, learnt):
        if len(ids) % block + len(talk) > block:  # it does not fit into the rest of the slot
            fill = -len(ids) % block
            ids, mask = ids + [eot] * fill, mask + [0] * fill
        ids, mask = ids + talk, mask + one
    fill = -len(ids) % block + 1
    ids, mask = np.array(ids + [eot] * fill, '<u2'), np.array(mask + [0] * fill, np.uint8)
    meta = json.loads(Path('data/toy/meta.json').read_text(encoding='utf-8'))
    Path('data/toy/meta.json').write_text(json.dumps({**meta, 'eot': eot, 'block_size': block}), 'utf-8')
    for split in ('train', 'val'):
        ids.tofile(f'data/toy/{split}.bin')
        mask.tofile(f'data/toy/{split}.mask.bin')
    return list(zip(talks, learnt))


@pytest.mark.parametrize('options', [
    [], ['--pos=alibi'], ['--pos=learned', '--window=4', '--window_pattern=SL'],
    ['--mixer_pattern=DA', '--linear_n_key_head=1', '--linear_n_value_head=2']])
def test_packed_conversations_are_learnt_as_if_each_were_alone(folder, options):
    """By a model that knew no documents: their loss is that of a plain loop over them."""
    assert train('--out_dir=base', '--max_iters=1', *options)['model'].config.document_token is None
    talks, total, count = write_packed(), 0, 0
    story = train('--out_dir=out', '--init_from=base', '--max_iters=2', '--eval_iters=100', '--lora_rank=2',
                  *options)
    model = story['model'].eval()
    assert model.config.document_token == 22  # unasked, for such a folder
    for talk, learnt in talks:
        idx = torch.tensor([talk])
        losses = torch.nn.functional.cross_entropy(model(idx)[0, :-1], idx[0, 1:], reduction='none')
        total, count = total + losses[torch.tensor(learnt[1:]) == 1].sum(), count + sum(learnt)
    loss, targets = flat_train.evaluate(model, model, story['val_bins'], 100, 4, 'cpu',
                                        contextlib.nullcontext)
    assert targets == count and loss == pytest.approx((total / count).item(), rel=1e-5)
    assert float(log_rows('out')[-1]['val_loss']) == pytest.approx(loss, abs=1e-6)
    assert [flat_sample.load(out)[2]['masked'] for out in ('base', 'out')] == [False, True]


def test_packed_data_has_its_block_size_and_its_document_token(folder):
    write_packed()
    for asked, token in ([], 22), (['--document_token=None'], None):
        assert train('--out_dir=out', '--max_iters=1', *asked)['model'].config.document_token == token
    with pytest.raises(ValueError, match='packed for block_size=16, .* has 8: give --block_size=16'):
        train('--out_dir=third', '--block_size=8')


def test_a_batch_without_targets_is_zero(folder):
    write_masks()
    np.zeros(3001, np.uint8).tofile('data/toy/train.mask.bin')
    with pytest.raises(ValueError, match='train.mask.bin leaves no target'):
        train('--out_dir=out')
    mask = np.zeros(3001, np.uint8)
    mask[-20:] = 1  # the last two windows alone
    mask.tofile('data/toy/train.mask.bin')
    story = train('--out_dir=out', '--epochs=1', '--log_interval=1')
    rows = log_rows('out')
    assert sum(float(row['loss']) > 0 for row in rows) in (1, 2)
    assert all((float(row['loss']) > 0) == (float(row['grad_norm']) > 0) for row in rows)
    assert all(w.isfinite().all() for w in story['model'].parameters())
    os.remove('data/toy/val.mask.bin')
    with pytest.raises(ValueError, match='a mask for only one of train and val'):
        train('--out_dir=out')


def test_loss_curve_is_the_recorded_one(folder):
    torch.set_num_threads(1)
    train('--out_dir=out', '--log_interval=4', '--learning_rate=1e-2', '--max_iters=40')
    losses = [float(row['loss']) for row in log_rows('out')]
    assert losses == pytest.approx(RECORDED_LOSSES, rel=2e-3), losses


def test_one_batch_is_learnt_by_heart():
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=61))
    x, y = torch.randint(61, (2, 4, 16))
    opts = make_optimizers(model, optimizer='muon', learning_rate=2e-2, weight_decay=0.0)
    for _ in range(100):
        loss, _ = model(x, y)
        loss.backward()
        for opt in opts:
            opt.step()
        model.zero_grad()
    assert loss.item() < 0.05


def test_horizon_by_epochs_and_by_tokens(folder):
    story = train('--out_dir=a', '--epochs=0.5')
    assert story['max_iters'] == math.ceil(0.5 * (3000 // 16) / 12) == story['progress'].iter_num
    story = train('--out_dir=b', '--tokens_per_param=0.1')
    assert story['max_iters'] == math.ceil(0.1 * story['model'].num_params() / (12 * 16))
    assert story['progress'].iter_num == story['max_iters']


def test_the_length_given_last_counts_and_the_rate_is_looked_at(folder, capsys):
    (folder / 'long.py').write_text('epochs = 6.0\nwarmup_iters = 20\n', encoding='utf-8')
    plan = ['--out_dir=out', '--eval_only']
    for flags, said in (
            (['long.py'], '94 iterations (epochs=6)'), (['long.py', '--max_iters=12'], '12 iterations (max_'),
            (['--max_iters=12', 'long.py'], '94 iterations (epochs=6)'),
            (['--max_iters=12', '--epochs=6', '--tokens_per_param=2', '--epochs=1'], '16 iterations (epo'),
            (['long.py', '--tokens_per_param=0.1', '--epochs=None'], '14 iterations (tokens_per_param=0.1')):
        story = train(*plan, *flags)
        assert f'\nrun: {said}' in capsys.readouterr().out
        assert sum(story['config'][name] is not None for name in ('epochs', 'tokens_per_param')) <= 1
    story = train('--out_dir=out', 'long.py', '--max_iters=2', '--min_lr=0.1')
    said = capsys.readouterr().out
    assert 'warmup_iters=20 goes on to the end: the learning rate comes to 10% of its peak' in said
    assert story['lr'] == pytest.approx(2 / 21 * story['learning_rate'])
    assert 'min_lr=0.1 is above learning_rate=0.005' in said


def test_flags_without_effect_are_refused_and_config_files_serve_many_runs():
    settings = {**flat_train.config, **vars(GPTConfig())}
    flat_train.check_effect(dict.fromkeys(flat_train.UNUSED, 'config/x.py'), settings)
    for name, (other, values) in flat_train.UNUSED.items():
        for value in values:
            with pytest.raises(ValueError, match=f'--{name} has no effect with {other}={value}'):
                flat_train.check_effect({name: 'flags'}, {**settings, other: value})
        flat_train.check_effect({name: 'flags'}, {**settings, other: 'one of a fork'})


@pytest.mark.parametrize('compile, device, seconds, expected', [
    ('auto', 'cpu', 119, False), ('auto', 'cpu', 121, True), ('auto', 'mps', 1e9, False),
    ('auto', 'cuda:0', 1, True), (True, 'cpu', 1, True), (False, 'cpu', 1e9, False)])
def test_runs_that_earn_it_are_compiled(compile, device, seconds, expected, monkeypatch):
    monkeypatch.setattr(flat_train, 'can_compile', lambda device: True)
    assert flat_train.resolve_compile(compile, device, seconds) is expected


def test_compiled_ranks_equal_eager_ones(folder):
    """Compiled training, cut where DDP sends gradients: in buckets of 25 MB, here of 10 KB."""
    patch = ('import torch\ndist._DEFAULT_FIRST_BUCKET_BYTES = 4096\n'
             'ddp = torch.nn.parallel.DistributedDataParallel\n'
             'ddp.__init__ = functools.partialmethod(ddp.__init__, bucket_cap_mb=0.01)')
    common = [*TOY, '--n_layer=1', '--max_iters=4', '--eval_interval=4', '--log_interval=1', '--dropout=0.2',
              '--gradient_accumulation_steps=4']
    kinds = {'dense': [], 'experts': ['--n_expert=4', '--d_expert=16', '--checkpoint_activations=True']}
    found = on_ranks(2, *([f'--out_dir={kind}_{compile}', *common, *options, f'--compile={compile}']
                          for kind, options in kinds.items() for compile in (False, True)), patch=patch)
    assert 'raised: ' not in found, found
    for kind in kinds:
        eager, compiled = (log_rows(f'{kind}_{compile}') for compile in (False, True))
        for key, error in ('loss', 1e-4), ('grad_norm', 1e-3):
            a, b = ([float(row[key]) for row in rows] for rows in (eager, compiled))
            assert len(a) == 4 and a == pytest.approx(b, rel=error)
        saved = torch.load(f'{kind}_True/ckpt.pt', weights_only=True)
        assert saved['config']['compile'] is True and not any('_orig_mod' in name for name in saved['model'])


# checkpoints ------------------------------------------------------------------------------------------------

def test_checkpoints_hold_plain_data_and_come_back(folder):
    story = train('--out_dir=out', '--always_save_checkpoint=False', '--max_iters=10')
    for name in ('ckpt.pt', 'best.pt'):
        model, rest = GPT.from_checkpoint(f'out/{name}')  # weights_only=True
        assert same_weights(model.state_dict(), story['model'].state_dict())
        idx = torch.arange(16)[None]
        assert torch.equal(model.eval()(idx), story['model'].eval()(idx))
        assert rest['tokenizer']['kind'] == 'char' and rest['model_args'] == vars(model.config)
    assert 'optimizer' not in torch.load('out/best.pt', weights_only=True)
    smaller, rest = GPT.from_checkpoint('out/ckpt.pt', block_size=8, dropout=0.1)
    assert smaller.config.block_size == 8 == rest['model_args']['block_size']


def test_foreign_prefixes_and_missing_or_unknown_options(folder):
    train('--out_dir=out', '--max_iters=10')
    saved = torch.load('out/ckpt.pt', weights_only=True)
    model, _ = GPT.from_checkpoint('out/ckpt.pt')
    for prefix in ('_orig_mod.', 'module.', 'module._orig_mod.', '_orig_mod.module.'):
        torch.save({**saved, 'model': {prefix + k: v for k, v in saved['model'].items()}}, 'x.pt')
        assert same_weights(GPT.from_checkpoint('x.pt')[0].state_dict(), model.state_dict())
    # written before there was one
    args = {k: v for k, v in saved['model_args'].items() if k != 'logit_softcap'}
    torch.save({**saved, 'model_args': args}, 'x.pt')
    assert GPT.from_checkpoint('x.pt')[0].config.logit_softcap == 0.0
    torch.save({**saved, 'model_args': {**args, 'flux': 1}}, 'x.pt')
    with pytest.raises(ValueError, match='flux'):
        GPT.from_checkpoint('x.pt')
    broken = dict(saved['model'])
    broken['extra'] = broken.pop('ln_f.weight')
    torch.save({**saved, 'model': broken}, 'x.pt')
    with pytest.raises(ValueError, match='extra unexpected, ln_f.weight missing'):
        GPT.from_checkpoint('x.pt')


def test_a_state_of_another_vocabulary_is_refused():
    model = tiny()
    for rows in (60, 62, 200):
        with pytest.raises(RuntimeError, match='size mismatch'):
            model.load_state_dict({**model.state_dict(), 'wte.weight': torch.zeros(rows, 32)})


def test_a_state_saved_unfused_is_put_where_a_fused_optimizer_wants_it():
    """Else its steps stay on the CPU, and fused AdamW crashes on CUDA. Here their dtype shows it."""
    w = torch.nn.Parameter(torch.ones(3))
    was = torch.optim.AdamW([w], lr=1.0, fused=False).state_dict()
    was['state'] = {0: {'step': torch.tensor(4.0, dtype=torch.float64), 'exp_avg': torch.zeros(3),
                        'exp_avg_sq': torch.ones(3)}}
    opt = torch.optim.AdamW([w], lr=0.5, fused=True)
    flat_train.load_optimizers([opt], [was], 'ckpt.pt', updates=4)
    assert opt.state[w]['step'].dtype == torch.float32 and opt.state[w]['step'] == 4
    assert opt.param_groups[0]['lr'] == 0.5 and opt.param_groups[0]['fused'] is True
    assert was['param_groups'][0]['fused'] is False


def test_sample_reads_best_only_where_it_is_kept(folder, capsys):
    common = ['--out_dir=out', '--max_iters=10']
    train(*common, '--always_save_checkpoint=False')
    assert flat_sample.load('resume', 'out')[2]['path'] == os.path.join('out', 'best.pt')
    assert flat_sample.load('out', best=False)[2]['path'] == os.path.join('out', 'ckpt.pt')
    train('--out_dir=out', '--max_iters=20', '--init_from=resume', '--always_save_checkpoint=True')
    assert flat_sample.load('out')[2]['path'] == os.path.join('out', 'ckpt.pt')
    assert 'out/best.pt is kept as best.old-1.pt' in capsys.readouterr().out
    os.remove('out/best.old-1.pt')
    train('--out_dir=out', '--max_iters=21', '--init_from=resume', '--always_save_checkpoint=False',
          '--learning_rate=0', '--min_lr=0')
    saved = torch.load('out/best.pt', weights_only=True)
    assert saved['iter_num'] == 20  # the best so far
    saved['model'] = {name: w + 1 for name, w in saved['model'].items()}
    torch.save(saved, 'out/best.pt')
    tuned = train('--out_dir=fine', '--init_from=out', '--max_iters=0')['model']  # as sample.py reads it
    assert same_weights(tuned.state_dict(), saved['model'])


def test_log_of_another_version_survives_a_resume(folder):
    train('--out_dir=out', '--max_iters=10', '--log_interval=1')
    with open('out/log.csv', encoding='utf-8') as f:
        lines = f.read().splitlines()
    with open('out/log.csv', 'w', encoding='utf-8') as f:
        f.write('\n'.join([lines[0] + ',extra'] + [line + ',1' for line in lines[1:]] + ['1']))
    train('--out_dir=out', '--init_from=resume', '--max_iters=12', '--log_interval=1')
    assert [int(row['iter']) for row in log_rows('out')] == list(range(1, 13))
    rows = [line.rpartition(',')[0] for line in Path('out/log.csv').read_text(encoding='utf-8').splitlines()]
    Path('out/log.csv').write_text('\n'.join(rows), encoding='utf-8')  # without wall_s
    train('--out_dir=out', '--init_from=resume', '--max_iters=13', '--log_interval=1')
    assert [bool(row['wall_s']) for row in log_rows('out')] == [False] * 12 + [True]


def test_unreadable_checkpoints_are_one_line(folder):
    train('--out_dir=out', '--max_iters=10')
    whole = Path('out/ckpt.pt').read_bytes()
    bad = {'truncated.pt': whole[:len(whole) // 2], 'empty.pt': b'', 'text.pt': b'hello',
           'cut.pt': whole[:-200]}
    for name, content in bad.items():
        Path(name).write_bytes(content)
        with pytest.raises(ValueError, match='cannot be read as a checkpoint') as error:
            GPT.from_checkpoint(name)
        assert '\n' not in str(error.value)
    for written, member in ((b'toy', 'data.pkl'), (None, 'data/')):  # a setting, and some weights
        at = whole.index(written) if written else whole.index(b'PK', len(whole) // 3) - 200
        Path('flipped.pt').write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        with pytest.raises(ValueError, match=f'flipped.pt is damaged, .*/{member}.* in it is not as'):
            GPT.from_checkpoint('flipped.pt')
    torch.save({'state_dict': {}}, 'other.pt')
    with pytest.raises(ValueError, match='holds state_dict, not model'):
        GPT.from_checkpoint('other.pt')
    Path('evil.pt').write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match='cannot be read'):
        GPT.from_checkpoint('evil.pt')
    assert not os.path.exists('evil_was_here')
    with pytest.raises(FileNotFoundError, match='no checkpoint at nowhere.pt'):
        GPT.from_checkpoint('nowhere.pt')
    with pytest.raises(FileNotFoundError, match='no checkpoint at nothing'):
        run('sample.py', '--out_dir=nothing')


RUNTIME = dict(device_type='cpu', ranks=1, threads=1, dtype='float32', compile=False)


def empty_state(states):
    return states


def state_without_step(states):
    return [{**state, 'state': {0: {'exp_avg': torch.zeros(2), 'exp_avg_sq': torch.zeros(2)}}}
            for state in states]


@pytest.mark.parametrize('damage, message', [
    (dict(iter_num='5'), "iter_num='5'"), (dict(best_val_loss=None), 'best_val_loss=None'),
    (dict(best_val_loss=torch.zeros(2)), 'best_val_loss='), (dict(config=None), 'config=None'),
    (dict(runtime=None), 'runtime=None'), (dict(runtime={'ranks': 1}), "runtime's device_type=None"),
    (dict(optimizer='adamw'), "optimizer='adamw'"), (dict(optimizer=['adamw']), 'no valid optimizer'),
    (dict(optimizer=[{'state': {0: {'a': 'text'}}, 'param_groups': [{'params': [0]}]}]), 'not all numbers'),
    (dict(optimizer=[{'state': {}, 'param_groups': [{'params': [0]}]}]), 'no optimizer state for this'),
    (dict(iter_num=-1), 'iter_num=-1'), (dict(optimizer=empty_state), 'an empty optimizer state after 1 upd'),
    (dict(optimizer=state_without_step), 'optimizer state 0 has no step'),
    (dict(runtime={**RUNTIME, 'threads': 0}), "runtime's threads=0"),
    (dict(optimizer=[]), 'no optimizer state for this'), (dict(iter_num=...), 'has no iter_num'),
    (dict(best_val_loss=..., optimizer=...), 'has no best_val_loss and no optimizer')])
def test_checkpoints_of_another_shape_are_one_line(folder, damage, message):
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=23))
    states = [opt.state_dict() for opt in make_optimizers(model)]
    whole = {'model': model.state_dict(), 'model_args': vars(model.config), 'iter_num': 1, 'config': {},
             'best_val_loss': 3.0, 'optimizer': states, **damage}
    if callable(whole['optimizer']):
        whole['optimizer'] = whole['optimizer'](states)
    os.mkdir('out')
    torch.save({name: value for name, value in whole.items() if value is not ...}, 'out/ckpt.pt')
    with pytest.raises(ValueError, match=message) as error:
        run('train.py', '--dataset=toy', '--out_dir=out', '--init_from=resume', '--device=cpu',
            '--optimizer=adamw')
    assert 'ckpt.pt' in str(error.value) and '\n' not in str(error.value)


def test_load_reads_whatever_init_from_names(folder, monkeypatch):
    train('--out_dir=out', '--max_iters=1')
    model, tokenizer, rest = flat_sample.load('out', dtype=torch.bfloat16, dropout=0.5)
    assert model.wte.weight.dtype == torch.bfloat16
    assert model.config.dropout == 0.5 == rest['model_args']['dropout']
    assert tokenizer.state() == rest['tokenizer'] and rest['iter_num'] == 1
    saved = torch.load('out/ckpt.pt', weights_only=True)
    torch.save({**saved, 'tokenizer': None, 'config': {}}, 'bare.pt')
    _, tokenizer, rest = flat_sample.load('bare.pt')
    assert tokenizer is None and 'no tokenizer' in rest['no_tokenizer']
    with pytest.raises(ValueError, match='bare.pt names no tokenizer'):
        run('sample.py', '--init_from=bare.pt', '--device=cpu')
    torch.save({**saved, 'tokenizer': {'kind': 'abacus'}}, 'bare.pt')
    assert flat_sample.load('bare.pt')[1] is None

    class Hub:  # the two functions of hub.py that load calls
        asked = []

        def fetch(name):
            Hub.asked.append(name)
            return 'fetched'

        def from_pretrained(name, dtype, device, int8, **changes):
            assert (name, dtype, device, int8) == ('fetched', None, 'cpu', False)
            return tiny(**changes)
    monkeypatch.setitem(sys.modules, 'hub', Hub)
    monkeypatch.setattr(flat_sample, 'json_tokenizer', lambda path: f'tokenizer of {path}')
    os.mkdir('theirs')
    Path('theirs/config.json').write_text('{}', encoding='utf-8')
    for name in ('theirs', 'someone/Some-Model-0.5B', 'gpt2', 'gpt2-xl'):
        model, tokenizer, rest = flat_sample.load(name, dropout=0.25)
        assert Hub.asked[-1] == name and tokenizer == 'tokenizer of fetched'
        assert rest == {'model_args': vars(model.config), 'path': 'fetched'} and model.config.dropout == 0.25
    for name in ('out/ckpt.pt', 'out', 'missing/best.pt', 'missing.pt'):
        assert not flat_sample.is_published(name)


def test_another_tokenizer_than_the_models_is_said(folder, capsys):
    train('--out_dir=out', '--max_iters=1', '--warmup_iters=0')
    assert 'warning' not in capsys.readouterr().out
    meta = json.loads(Path('data/toy/meta.json').read_text(encoding='utf-8'))
    meta['tokenizer']['chars'] = meta['tokenizer']['chars'][::-1]
    Path('data/toy/meta.json').write_text(json.dumps(meta), encoding='utf-8')
    train('--out_dir=fine', '--max_iters=1', '--init_from=out')
    assert 'warning: data/toy was prepared with another tokenizer' in capsys.readouterr().out
    with pytest.raises(ValueError, match='data/toy was prepared with another tokenizer .* resume on data of'):
        run('train.py', '--out_dir=out', '--init_from=resume', '--max_iters=2')
    write_packed(eot=22)
    meta = json.loads(Path('data/toy/meta.json').read_text(encoding='utf-8'))
    Path('data/toy/meta.json').write_text(json.dumps({**meta, 'eot': 4088}), encoding='utf-8')
    with pytest.raises(ValueError, match="init_from=out names a model with another tokenizer .* end of text, "
                                         "4088, it does not know"):
        run('train.py', '--out_dir=chat', '--init_from=out', '--dataset=toy', '--device=cpu')


class Evil:
    def __reduce__(self):
        return open, ('evil_was_here', 'w')


def test_a_full_disk_keeps_the_old_checkpoint(folder, monkeypatch):
    train('--out_dir=out', '--max_iters=10')
    before = Path('out/ckpt.pt').read_bytes()

    def full(state, path):
        Path(path).write_bytes(b'half')
        raise RuntimeError('PytorchStreamWriter failed writing file data/3: file write failed')
    monkeypatch.setattr(torch, 'save', full)
    with pytest.raises(OSError, match='cannot write .*ckpt.pt.*is the disk full.*is kept'):
        train('--out_dir=out', '--max_iters=20', '--init_from=resume')
    assert Path('out/ckpt.pt').read_bytes() == before
    assert sorted(os.listdir('out')) == ['ckpt.pt', 'lock', 'log.csv']


def test_a_diverged_run_stops_and_keeps_finite_weights(folder):
    train('--out_dir=out', '--max_iters=10')
    with pytest.raises(ValueError, match='diverged'):
        train('--out_dir=out', '--max_iters=40', '--init_from=resume', '--learning_rate=1e30',
              '--grad_clip=0')
    model, _ = GPT.from_checkpoint('out/ckpt.pt')
    assert all(w.isfinite().all() for w in model.parameters())


def test_runs_over_runs_are_all_kept(folder, capsys):
    """Each as a set of its own, from which sample.py reads."""
    weights = []
    for seed in 4, 5, 6:
        story = train('--out_dir=out', '--max_iters=2', f'--seed={seed}',
                      f'--always_save_checkpoint={seed > 4}')
        weights.append(story['model'].state_dict())
        said = capsys.readouterr().out
    assert 'this one will rename to ckpt.old-2.pt, log.old-2.csv\n' in said
    assert sorted(os.listdir('out')) == ['best.old-1.pt', 'ckpt.old-1.pt', 'ckpt.old-2.pt', 'ckpt.pt', 'lock',
                                         'log.csv', 'log.old-1.csv', 'log.old-2.csv']
    for name, expected in zip(('old-1.', 'old-2.', ''), weights):
        model, _, rest = flat_sample.load(f'out/ckpt.{name}pt')
        assert same_weights(model.state_dict(), expected)
        with open(f'out/log.{name}csv', encoding='utf-8') as f:
            *_, last = csv.DictReader(f)
        assert float(last['val_loss']) == pytest.approx(rest['best_val_loss'], abs=1e-6)


def test_a_run_without_a_checkpoint_leaves_the_one_before_as_it_was(folder):
    train('--out_dir=out', '--max_iters=2')
    before = {name: Path('out', name).read_bytes() for name in ('ckpt.pt', 'log.csv')}
    for _ in range(2):
        with pytest.raises(ValueError, match='diverged, .*, there is no checkpoint yet'):
            train('--out_dir=out', '--max_iters=40', '--eval_interval=40', '--learning_rate=1e30',
                  '--grad_clip=0')
        gc.collect()  # the process that failed would have ended, and let go of its lock
        assert sorted(os.listdir('out')) == ['ckpt.pt', 'lock', 'log.csv', 'log.new.csv']
        assert all(Path('out', name).read_bytes() == content for name, content in before.items())
    train('--out_dir=out', '--max_iters=5', '--eval_interval=3')
    assert sorted(os.listdir('out')) == ['ckpt.old-1.pt', 'ckpt.pt', 'lock', 'log.csv', 'log.old-1.csv']
    assert Path('out/log.old-1.csv').read_bytes() == before['log.csv']
    assert [row['iter'] for row in log_rows('out')] == ['1', '2', '3', '4', '5']
    os.remove('out/ckpt.pt')
    with pytest.raises(FileNotFoundError, match='no checkpoint at .*: beside it is out.ckpt.old-1.pt'):
        flat_sample.load('resume', 'out')


def test_a_resume_goes_on_with_the_settings_of_its_checkpoint(folder, capsys):
    train('--out_dir=out', '--tokens_per_param=0.05', '--eval_interval=3', '--weight_decay=0.3',
          '--optimizer=muon', '--log_interval=7', '--dropout=0.2')
    before = torch.load('out/ckpt.pt', weights_only=True)['config']
    assert capsys.readouterr().out.count('warning') == 0
    story = run('train.py', '--out_dir=out', '--init_from=resume', '--eval_only')
    said = capsys.readouterr().out
    assert 'default.py' not in said and "out/ckpt.pt: dataset = 'toy', eval_interval = 3," in said
    assert story['config'] == {**before, 'init_from': 'resume', 'eval_only': True}
    assert {name: story[name] for name in story['config']} == story['config']
    assert story['model'].config.dropout == 0.2
    stamp = os.stat('out/ckpt.pt').st_mtime_ns
    with pytest.raises(SystemExit, check=lambda e: e.code is None):
        run('train.py', '--out_dir=out', '--init_from=resume')
    said = capsys.readouterr().out
    assert 'resume: nothing is left to do, max_iters=7; ' in said and 'step 7' not in said
    assert os.stat('out/ckpt.pt').st_mtime_ns == stamp
    (folder / 'more.py').write_text('max_iters = 9\nbatch_size = 4\nn_layer = 2\n', encoding='utf-8')
    story = run('train.py', 'more.py', '--out_dir=out', '--init_from=resume', '--dropout=0.1', '--eval_only')
    said = capsys.readouterr().out
    assert re.findall('^resume: (.* was .*)', said, re.M) == ['dropout was 0.2, is 0.1',
                                                              'max_iters was 7, is 9']
    assert story['tokens_per_param'] is None and story['max_iters'] == 9 and story['weight_decay'] == 0.3
    assert story['model'].config.dropout == 0.1
    assert torch.load('out/ckpt.pt', weights_only=True)['config']['eval_only'] is False
    saved = torch.load('out/ckpt.pt', weights_only=True)
    torch.save({**saved, 'config': {**saved['config'], 'batch_size': 'four'}}, 'out/ckpt.pt')
    with pytest.raises(ValueError, match="ckpt.pt is damaged, .* it holds batch_size='four'$"):
        run('train.py', '--out_dir=out', '--init_from=resume')


def test_what_a_run_says_before_it_begins(folder, capsys):
    train('--out_dir=out', '--tokens_per_param=2', '--eval_only')
    assert 'warning: tokens_per_param=2 is 18 epochs of this text: prepare more' in capsys.readouterr().out
    train('--out_dir=out', '--max_iters=1000', '--gradient_accumulation_steps=47', '--eval_only')
    said = capsys.readouterr().out
    assert 'warning: an iteration takes 188 windows, and this text has 187: lower --batch_size' in said
    assert said.count('warning') == 1 and not os.path.exists('out')


def test_the_first_iterations_are_always_said(folder, capsys):
    train('--out_dir=out', '--log_interval=10', '--max_iters=12')
    lines = re.findall('^iter .*', capsys.readouterr().out, re.M)
    assert [line.partition(':')[0] for line in lines] == ['iter 1', 'iter 4', 'iter 10', 'iter 12']
    assert lines[0].endswith(' s with the warm-up') and all(line.endswith(' left') for line in lines[1:])
    assert [row['iter'] for row in log_rows('out')] == ['10', '12']


def test_evaluations_show_the_loss_of_both_splits(folder, capsys):
    story = train('--out_dir=out', '--max_iters=3', '--dropout=0.5', '--eval_iters=8')
    train_loss, val_loss = map(float, re.search(r'step 3: train loss (\S+), val loss (\S+?),',
                                                capsys.readouterr().out).groups())
    for bins, batches, printed in ((story['train_bins'], 2, train_loss), (story['val_bins'], 8, val_loss)):
        loss, _ = flat_train.evaluate(story['model'], story['model'], bins, batches, 4, 'cpu',
                                      contextlib.nullcontext)
        assert printed == pytest.approx(loss, abs=1e-4)


def test_wandb_gets_the_rows_of_the_log_in_one_run(folder, monkeypatch, capsys):
    class Run:
        def __init__(self, **options):
            self.options, self.id, self.rows = options, options['id'] or 'abc', []
            runs.append(self)

        def log(self, values, step):
            self.rows.append((step, values))
    runs = []
    monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(init=Run))
    train('--out_dir=out', '--max_iters=3', '--log_interval=1', '--wandb_log=True', '--wandb_project=mine')
    run('train.py', '--out_dir=out', '--init_from=resume', '--max_iters=5', '--eval_interval=2')
    assert [each.options['id'] for each in runs] == [None, 'abc']
    assert runs[1].options['project'] == 'mine' and runs[1].options['config']['n_layer'] == 2
    rows = runs[0].rows + runs[1].rows
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5]
    names = {'loss': 'train/loss', 'val_loss': 'val/loss'}
    for (_, values), row in zip(rows, log_rows('out')):
        expected = {names.get(name, name): float(value) for name, value in row.items() if value}
        assert values == pytest.approx(expected, rel=1e-2, abs=1e-2)
    monkeypatch.setitem(sys.modules, 'wandb', None)
    run('train.py', '--out_dir=out', '--init_from=resume', '--max_iters=6')
    assert 'no wandb logging, log.csv has everything' in capsys.readouterr().out
    assert torch.load('out/ckpt.pt', weights_only=True)['wandb_id'] == 'abc'


@pytest.mark.parametrize('kind', ['adamw', 'muon', 'neither'])
def test_an_update_that_is_not_finite_leaves_everything_as_it_was(kind, monkeypatch):
    """Wherever that is decided: on the device, by AdamW, or here, by an optimizer that cannot."""
    if kind == 'neither':
        monkeypatch.setattr(flat_train, 'takes_found_inf', lambda opt, w: False)
    torch.manual_seed(0)
    model, plain = tiny(n_expert=4, balance_bias=True), tiny(n_expert=4, balance_bias=True)
    plain.load_state_dict(model.state_dict())
    name = 'adamw' if kind == 'neither' else kind
    optimizers, unbroken = (make_optimizers(m, optimizer=name, learning_rate=1e-2) for m in (model, plain))
    scaler, x = torch.amp.GradScaler('cpu', enabled=False), torch.randint(61, (6, 2, 17))
    for it in range(6):
        bad = it in (2, 3)
        for m, opts in [(model, optimizers)] if bad else [(model, optimizers), (plain, unbroken)]:
            loss, aux = m(x[it][:, :-1], x[it][:, 1:])
            loss.backward()
            if bad:
                next(m.parameters()).grad.view(-1)[it] = (math.nan, math.inf)[it - 2]
            _, moved = flat_train.update(m, list(m.parameters()), opts, scaler, 1.0, aux['load'], 0.01)
            assert bool(moved) != bad
    assert same_weights(model.state_dict(), plain.state_dict())
    for a, b in zip(optimizers, unbroken):
        assert all(map(same_weights, a.state.values(), b.state.values()))


@pytest.mark.parametrize('options', [{}, dict(n_expert=4, balance_bias=True)], ids=['dense', 'experts'])
def test_an_iteration_waits_for_nothing_that_the_device_computes(options, monkeypatch):
    """A tensor without data raises where somebody asks for its value."""
    monkeypatch.setattr(GPT, 'init_weights', lambda self: None)
    # on CPUs alone the model looks at its targets
    monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: True)
    scaler, asks = torch.amp.GradScaler('cpu', enabled=False), []
    autocast = functools.partial(torch.autocast, 'cpu', torch.bfloat16)
    for kind in 'adamw', 'muon':
        with FakeTensorMode():
            model, idx = tiny(**options), torch.zeros(2, 16, dtype=torch.long)
            optimizers = make_optimizers(model, optimizer=kind)
            for _ in range(2):
                _, load, _ = flat_train.gradients(model, (idx, idx, None), iter([(idx, idx, None)]), 2,
                                                  autocast, scaler, 0.01, 0.0)
                try:
                    flat_train.update(model, list(model.parameters()), optimizers, scaler, 1.0, load, 0.01)
                except DataDependentOutputException:
                    asks.append(kind)
                    break
    assert asks == ['muon']  # which cannot leave an update out by itself


def test_skipped_updates_are_counted():
    moves = [torch.tensor(moved) for moved in (True, False, False, True, False)]
    assert flat_train.count_skipped(moves, 0) == (3, 1)
    assert flat_train.count_skipped(moves[1:3], 5) == (2, 7)
    good, bad = torch.tensor(True), torch.tensor(False)  # ten in a row, however they are counted
    assert flat_train.count_skipped([bad] * 5 + [good] * 5, flat_train.count_skipped(
        [good] + [bad] * 9, 0)[1]) == (5, 10)


def test_losses_that_are_not_finite_are_counted_said_and_end_the_run(folder, monkeypatch, capsys):
    forward, bad = GPT.forward, set()

    def broken(self, idx, targets=None, **rest):
        found = forward(self, idx, targets, **rest)
        if targets is None or not self.training:
            return found
        calls.append(1)
        return (found[0] * math.nan, found[1]) if (len(calls) - 1) // 3 in bad else found
    monkeypatch.setattr(flat_train.GPT, 'forward', broken)
    calls, bad = [], {3, 4}
    train('--out_dir=out', '--max_iters=10', '--log_interval=1')
    assert [row['skipped'] for row in log_rows('out')] == ['0'] * 3 + ['1'] + ['2'] * 6
    assert 'iter 5: a loss or gradient was not finite, 1 update skipped, 2 in all' in capsys.readouterr().out
    good = Path('out/ckpt.pt').read_bytes()
    assert torch.load('out/ckpt.pt', weights_only=True)['skipped'] == 2
    calls, bad = [], set(range(3, 99))
    path = re.escape(os.path.join('out', 'ckpt.pt'))
    with pytest.raises(ValueError, match=rf'10 losses or gradients in a row were not finite at iteration 23: '
                                         rf'.*the last good checkpoint is {path}; lower --learning_rate'):
        train('--out_dir=out', '--max_iters=40', '--init_from=resume', '--eval_interval=40')
    assert Path('out/ckpt.pt').read_bytes() == good
    state = torch.load('out/ckpt.pt', weights_only=True)
    state['model']['ln_f.weight'][0] = math.nan
    with pytest.raises(ValueError, match='ln_f.weight is not finite at iteration 10'):
        flat_train.save('out/ckpt.pt', state)
    assert Path('out/ckpt.pt').read_bytes() == good


def test_resuming_with_another_architecture_names_both_values(folder):
    train('--out_dir=out', '--max_iters=10')
    with pytest.raises(ValueError, match='n_layer=3 differs from .*which has 2'):
        train('--out_dir=out', '--init_from=resume', '--n_layer=3')
    weights = torch.load('out/ckpt.pt', weights_only=True)
    del weights['optimizer']
    torch.save(weights, 'out/ckpt.pt')
    with pytest.raises(ValueError, match='has no optimizer'):
        train('--out_dir=out', '--init_from=resume')
    fine = train('--out_dir=fine', '--init_from=out/ckpt.pt', '--max_iters=1', '--dropout=0.1')
    assert fine['first_it'] == 0 and fine['model'].config.dropout == 0.1
    with pytest.raises(ValueError, match='was trained by --optimizer=adamw, not muon'):
        train('--out_dir=fine', '--init_from=resume', '--optimizer=muon')


def test_ctrl_c_saves_and_resumes_exactly(folder):
    """Meanwhile nobody else may train in the folder."""
    train('--out_dir=whole')
    code = f'''import signal, sys, time, runpy, os
sys.path.insert(0, {str(ROOT)!r})
sys.argv = ['train.py', {str(ROOT / 'config' / 'gpt2.py')!r}, '--vocab_size=23', '--pos=rope', *{TOY!r},
            '--out_dir=cut', '--max_iters=1000000', '--lr_decay_iters=20']
import builtins
real_print = builtins.print
def watched(*a, **k):
    real_print(*a, **k)
    while str(a).startswith("('iter 5:") and not os.path.exists('go on'): time.sleep(0.02)
    if str(a).startswith("('iter 7:"): os.kill(os.getpid(), signal.SIGINT)
builtins.print = watched
runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')'''
    first = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True)
    try:
        for line in first.stdout:
            if line.startswith('iter 5:'):
                break
        with pytest.raises(ValueError, match=rf'out_dir=cut: another training \(process {first.pid} on .*\) '
                                             'writes there; give another --out_dir') as error:
            train('--out_dir=cut')
        assert '\n' not in str(error.value) and sorted(os.listdir('cut')) == ['lock', 'log.csv']
        two = two_ranks('--out_dir=cut', *TOY, '--gradient_accumulation_steps=2', fails=True).stderr
        said = re.findall(r'^\[rank.*', two, re.M)  # one line of each
        assert 'another training' in said[0] and 'this rank ends because another one has' in said[1], two
        assert len(said) == 2
        Path('go on').touch()
        out, error = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 130 and 'stopping after this iteration' in error, out + error
    stopped = torch.load('cut/ckpt.pt', weights_only=True)['iter_num']
    said = re.search('^stopped at ([78]) of 1,000,000; go on with: python [^ ]*train.py (.*)', out, re.M)
    assert stopped == int(said[1]) and 'done' not in out and 'sample.py' not in out
    run('train.py', *shlex.split(said[2]), '--max_iters=20')
    a, b = (torch.load(f'{out}/ckpt.pt', weights_only=True) for out in ('whole', 'cut'))
    assert same_weights(a['model'], b['model'])


def test_a_scheduler_that_ends_a_run_learns_so(folder, monkeypatch, capsys):
    real_print = print

    def watched(*values, **options):
        real_print(*values, **options)
        if str(values[0]).startswith('iter 3:'):
            os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr('builtins.print', watched)
    with pytest.raises(SystemExit) as end:
        train('--out_dir=sp ace', '--log_interval=1')
    assert end.value.code == 143
    assert (f"of 20; go on with: python {ROOT / 'train.py'} --out_dir='sp ace' --init_from=resume\n"
            in capsys.readouterr().out)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '4')
    here = 'torchrun --standalone --nproc_per_node=4 '
    for ranks, start in {1: 'python ', 4: here, 8: 'torchrun ... '}.items():
        assert flat_train.resume_command('out', ranks).startswith(start)


def test_killed_anywhere_it_resumes_exactly(folder):
    """kill -9, three times: right after the line that a checkpoint follows, so also while it is written."""
    args = [str(ROOT / 'config' / 'gpt2.py'), '--vocab_size=23', '--pos=rope', *TOY, '--eval_interval=2',
            '--log_interval=1', '--max_iters=20', '--optimizer=muon', '--dropout=0.1', '--keep=1']
    whole = run('train.py', *args, '--out_dir=whole')
    for n, delay in enumerate((0.001, 0.004, 0.02)):
        start = 'resume' if os.path.exists('cut/ckpt.pt') else 'scratch'
        process = subprocess.Popen([sys.executable, str(ROOT / 'train.py'), *args, '--out_dir=cut',
                                    f'--init_from={start}'], stdout=subprocess.PIPE, text=True)
        steps = (line for line in process.stdout if line.startswith('step '))
        for _ in range(n + 1):
            next(steps)
        time.sleep(delay)
        process.kill()
        process.communicate()
    cut = run('train.py', *args, '--out_dir=cut', '--init_from=resume')
    assert cut['first_it'] > 0 and same_weights(whole['model'].state_dict(), cut['model'].state_dict())
    assert [row['loss'] for row in log_rows('cut')] == [row['loss'] for row in log_rows('whole')]


def test_the_last_checkpoints_are_kept_and_time_ends_a_run(folder, monkeypatch):
    train('--out_dir=out', '--keep=2', '--eval_interval=5')
    names = ['ckpt-15.pt', 'ckpt-20.pt', 'ckpt.pt', 'log.csv']
    assert sorted(name for name in os.listdir('out') if name != 'lock') == names
    assert flat_sample.load('out/ckpt-15.pt')[2]['iter_num'] == 15
    assert Path('out/ckpt-20.pt').read_bytes() == Path('out/ckpt.pt').read_bytes()

    def refuse(*names):
        raise OSError('no links here')
    monkeypatch.setattr(os, 'link', refuse)
    train('--out_dir=out', '--keep=2', '--max_iters=21', '--init_from=resume')
    assert sorted(glob.glob('out/ckpt-*.pt')) == ['out/ckpt-20.pt', 'out/ckpt-21.pt']
    assert Path('out/ckpt-21.pt').read_bytes() == Path('out/ckpt.pt').read_bytes()
    train('--out_dir=out', '--max_iters=1')
    assert sorted(glob.glob('out/*.pt')) == ['out/ckpt-20.old-1.pt', 'out/ckpt-21.old-1.pt',
                                             'out/ckpt.old-1.pt', 'out/ckpt.pt']

    train('--out_dir=whole')
    with contextlib.suppress(SystemExit):  # with the status of a program that a signal has ended
        train('--out_dir=cut', '--max_iters=1000000', '--lr_decay_iters=20', '--time_limit=0')
    assert torch.load('cut/ckpt.pt', weights_only=True)['iter_num'] == 1
    train('--out_dir=cut', '--init_from=resume', '--time_limit=None')
    a, b = (torch.load(f'{out}/ckpt.pt', weights_only=True)['model'] for out in ('whole', 'cut'))
    assert same_weights(a, b)


def test_ids_that_the_model_does_not_know_are_refused_before_the_run(folder, capsys):
    train('--out_dir=out', '--max_iters=1')
    write_toy(folder / 'data' / 'other', vocab_size=26)
    train('--out_dir=fine', '--dataset=other', '--max_iters=1', '--init_from=out')
    assert (f"warning: {Path('data/other')} was prepared with another tokenizer than {Path('data/toy')}"
            in capsys.readouterr().out)  # but all its ids are below 23
    ids = np.fromfile('data/other/train.bin', '<u2')
    ids[2900] = 25
    ids.tofile('data/other/train.bin')
    with pytest.raises(ValueError, match=r'train.bin: token 25 at position 2900 is outside the vocabulary of '
                                         r"23: prepare it with the model's own .*--tokenizer=data.toy"):
        train('--out_dir=not', '--dataset=other', '--init_from=out')
    assert not os.path.exists('not')


# adapters ---------------------------------------------------------------------------------------------------

ADAPT = ['--init_from=out', '--lora_rank=2', '--lora_targets=c_attn,mlp.c_proj', '--log_interval=1']


@pytest.fixture
def base(folder):
    """A trained model in out/."""
    train('--out_dir=out', '--max_iters=10')
    return folder


def test_adapters_train_alone_and_resume_exactly(base):
    before = torch.load('out/ckpt.pt', weights_only=True)
    whole = train('--out_dir=whole', *ADAPT)
    train('--out_dir=parts', *ADAPT, '--lr_decay_iters=20', '--max_iters=10')
    train('--out_dir=parts', '--init_from=resume', '--log_interval=1')  # the adapters are the checkpoint's
    a, b = (torch.load(f'{out}/ckpt.pt', weights_only=True) for out in ('whole', 'parts'))
    assert same_weights(a['model'], b['model']) and a['iter_num'] == b['iter_num'] == 20
    rows = [[(r['iter'], r['loss'], r['val_loss'], r['grad_norm']) for r in log_rows(out)]
            for out in ('whole', 'parts')]
    assert rows[0] == rows[1] and len(rows[0]) == 20
    for x, y in zip(a['optimizer'][0]['state'].values(), b['optimizer'][0]['state'].values()):
        assert torch.equal(x['exp_avg'], y['exp_avg']) and torch.equal(x['exp_avg_sq'], y['exp_avg_sq'])
    frozen = {name.replace('.base.', '.'): w for name, w in whole['model'].state_dict().items()
              if name not in a['model']}
    assert same_weights(frozen, before['model'])
    assert len(a['model']) == 8 and all('.lora_' in name for name in a['model'])
    assert len(a['optimizer'][0]['state']) == 8
    model, tokenizer, rest = flat_sample.load('whole')
    assert tokenizer is not None and rest['iter_num'] == 20
    assert model.state_dict().keys() == before['model'].keys()
    x = tokens(model, 2, 16)
    with torch.no_grad():
        near(model.eval()(x), whole['model'].eval()(x), 1e-5)
    assert float(rows[0][-1][2]) < before['best_val_loss']
    first = train('--out_dir=zero', *ADAPT, '--eval_only=True')['val_loss']
    assert first == train('--out_dir=zero', '--init_from=out', '--eval_only=True')['val_loss']


def test_a_run_of_adapters_says_what_is_wrong(base, monkeypatch):
    train('--out_dir=lora', *ADAPT, '--max_iters=1')
    for args, message in [
            (['--out_dir=x', '--lora_rank=2'], 'lora_rank=2 needs a trained model: give --init_from'),
            (['--out_dir=x', '--init_from=lora', '--lora_rank=2'], 'is a run with adapters itself'),
            (['--out_dir=lora', '--init_from=resume', '--lora_rank=3'], "lora_rank=3, .*'rank': 2"),
            (['--out_dir=out', '--init_from=resume', '--lora_rank=3'], 'which has no adapters'),
            (['--out_dir=out', *ADAPT], r'out_dir=out holds out.ckpt.pt, which the adapters need'),
            (['--out_dir=x', *ADAPT, '--lora_alpha=0'], 'lora_alpha=0.0 must be above 0'),
            (['--out_dir=x', *ADAPT, '--lora_targets='], "'' is the name of no layer"),
            (['--out_dir=x', *ADAPT, '--lora_targets=c_attn, q'], "'q' is the name of no layer")]:
        with pytest.raises(ValueError, match=message) as error:
            train(*args)
        assert '\n' not in str(error.value)
    merged = train('--out_dir=merged', '--init_from=lora', '--max_iters=1')  # trains all weights
    assert merged['lora'] is None and len(torch.load('merged/ckpt.pt', weights_only=True)['model']) > 8
    os.makedirs('moved')
    shutil.move('out', 'moved/out')
    shutil.move('lora', 'moved/lora')
    flat_sample.load('moved/lora')  # both together
    shutil.copy('merged/ckpt.pt', 'moved/out/ckpt.pt')
    with pytest.raises(ValueError, match=r'holds adapters of moved.out.ckpt.pt, which is another model now'):
        flat_sample.load('moved/lora')
    os.remove('moved/out/ckpt.pt')
    with pytest.raises(FileNotFoundError, match='adapters of moved.out.ckpt.pt, which is not there'):
        flat_sample.load('moved/lora')
    saved = torch.load('moved/lora/ckpt.pt', weights_only=True)
    torch.save(saved, 'moved/out/ckpt.pt')  # where their base was
    with pytest.raises(ValueError, match=r'adapters of moved.out.ckpt.pt, which is another model now'):
        flat_sample.load('moved/out')
    torch.save({**saved, 'lora': {**saved['lora'], 'base': './../gone'}}, 'moved/lora/ckpt.pt')
    monkeypatch.setitem(sys.modules, 'hub', None)  # moved/gone looks like an id
    with pytest.raises(FileNotFoundError, match='adapters of moved.gone, which is not there'):
        flat_sample.load('moved/lora')
    torch.save({**saved, 'lora': {'rank': 'x'}}, 'moved/lora/ckpt.pt')
    with pytest.raises(ValueError, match="is damaged, .* it holds lora="):
        flat_sample.load('moved/lora')


def test_two_ranks_train_adapters_as_one(base):
    write_masks()
    args = [*TOY, *ADAPT, '--max_iters=4', '--gradient_accumulation_steps=4', '--optimizer=muon',
            '--grad_clip=0', '--sample_tokens=0']
    two_ranks('--out_dir=two', *args)
    run('train.py', '--out_dir=one', *args)
    a, b = (torch.load(f'{out}/ckpt.pt', weights_only=True) for out in ('one', 'two'))
    assert a['lora'] == b['lora'] and a['model'].keys() == b['model'].keys()
    for name, w in a['model'].items():
        assert w.any()
        torch.testing.assert_close(b['model'][name], w, atol=2e-4, rtol=1e-3, msg=name)
    for one, two in zip(log_rows('one'), log_rows('two')):
        assert float(two['loss']) == pytest.approx(float(one['loss']), rel=1e-4)
        assert float(two['grad_norm']) == pytest.approx(float(one['grad_norm']), rel=1e-3)


def test_compiled_adapters_equal_eager():
    model = tiny(n_layer=1, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
    flat.add_lora(model, 2, 4.0, ['c_kv', 'attn.c_proj', 'c_fc'])
    for w in flat.lora_state(model).values():
        w += torch.randn_like(w) * 0.1
    idx, found = tokens(model, 2, 16), []
    for forward in model, torch.compile(model, backend='aot_eager', fullgraph=True):
        loss, _ = forward(idx, idx)
        loss.backward()
        found.append([loss.detach()] + [w.grad for w in model.parameters() if w.requires_grad])
        model.zero_grad()
    assert len(found[0]) == 7
    for a, b in zip(*found):
        torch.testing.assert_close(a, b)


def test_experts_keep_their_bias_under_adapters(folder):
    options = ['--n_expert=4', '--balance_bias=True', '--optimizer=muon']
    before = train('--out_dir=out', '--max_iters=3', *options)['model'].state_dict()
    story = train('--out_dir=lora', '--init_from=out', '--lora_rank=2', '--lora_targets=c_attn,attn.c_proj',
                  '--max_iters=3', '--optimizer=muon')
    after = {name.replace('.base.', '.'): w for name, w in story['model'].state_dict().items()
             if '.lora_' not in name}
    assert same_weights(before, after)
    flat_sample.load('lora')


def test_adapters_of_a_published_model_are_exported_merged(folder):
    hf_model('qwen3', {**HF, 'vocab_size': 23, 'head_dim': 16}).to(torch.bfloat16).save_pretrained('theirs')
    Path('theirs/tokenizer.json').write_text(prepare.load_tokenizer('data/toy').to_json(), encoding='utf-8')
    story = run('train.py', '--init_from=theirs', '--dataset=toy', '--out_dir=out', '--block_size=16',
                '--max_iters=5', '--lora_rank=2', '--learning_rate=1e-2', '--batch_size=4', '--device=cpu',
                '--gradient_accumulation_steps=1', '--dtype=float32', '--compile=False', '--eval_iters=2')
    assert torch.load('out/ckpt.pt', weights_only=True)['lora']['base'] == './../theirs'
    idx = tokens(story['model'], 2, 16)
    with torch.no_grad():
        expected = story['model'].eval()(idx)
        near(flat_sample.load('out')[0].eval()(idx), expected)
        run('hub.py', 'export', 'out', 'exported')
        near(hf_opened('exported')(idx).logits, expected)
        near(hub.from_pretrained('exported')(idx), expected)
        assert (hub.from_pretrained('theirs', dtype=torch.float32)(idx) - expected).abs().max() > 0.01


# nanoGPT ----------------------------------------------------------------------------------------------------

def nanogpt_checkpoint(path, bias=False):
    """What nanoGPT's train.py writes: its names, its argument set, AdamW's state, best loss as tensor."""
    model = tiny(pos='learned', norm='layernorm', norm_eps=1e-5, mlp='gelu', qk_norm=False, bias=bias,
                 vocab_size=23, block_size=16)
    order = ['wte.weight', 'wpe.weight', *(
        f'h.{i}.{part}.{kind}' for i in range(2)
        for part in ('ln_1', 'attn.c_attn', 'attn.c_proj', 'ln_2', 'mlp.c_fc', 'mlp.c_proj')
        for kind in ('weight', 'bias')), 'ln_f.weight', 'ln_f.bias']  # nanoGPT's, as its optimizer counts
    ours = model.state_dict()
    state = {f'_orig_mod.transformer.{name}': ours[name] for name in order if name in ours}
    assert len(state) == len(ours)
    state['_orig_mod.lm_head.weight'] = state['_orig_mod.transformer.wte.weight']
    matrices = [w for w in state.values() if w.ndim > 1][:-1]
    vectors = [w for w in state.values() if w.ndim < 2]
    params = [torch.nn.Parameter(w.clone()) for w in matrices + vectors]
    opt = torch.optim.AdamW([dict(params=params[:len(matrices)], weight_decay=0.1),
                             dict(params=params[len(matrices):], weight_decay=0.0)],
                            lr=1e-3, betas=(0.9, 0.95))
    for w in params:
        w.grad = torch.randn_like(w)
    opt.step()
    args = dict(n_layer=2, n_head=4, n_embd=32, block_size=16, bias=bias, vocab_size=23, dropout=0.0)
    torch.save({'model': state, 'optimizer': opt.state_dict(), 'model_args': args, 'iter_num': 5,
                'best_val_loss': torch.tensor(2.5), 'config': {
                    'dataset': 'toy', 'learning_rate': 1e-3, 'batch_size': 8, 'max_iters': 5, 'n_layer': 2,
                    'gradient_accumulation_steps': 2, 'eval_interval': 250, 'device': 'cuda',
                    'dtype': 'float16', 'compile': True, 'backend': 'nccl'}},
               path)
    return model, opt


@pytest.mark.parametrize('bias', [False, True])
def test_nanogpt_checkpoints_load_sample_and_resume(folder, bias, capsys):
    os.mkdir('out')
    model, opt = nanogpt_checkpoint('out/ckpt.pt', bias)
    ours, rest = GPT.from_checkpoint('out/ckpt.pt')
    assert same_weights(ours.state_dict(), model.state_dict()) and rest['iter_num'] == 5
    run('sample.py', '--num_samples=1', '--max_new_tokens=5', '--start=abc', '--device=cpu',
        '--dtype=float32')
    assert '\nabc' in capsys.readouterr().out  # the tokenizer of the dataset that its config names
    story = run('train.py', '--device=cpu', '--init_from=resume', '--eval_only')
    assert story['progress'].iter_num == 5 == story['max_iters'] and story['learning_rate'] == 1e-3
    assert story['compile'] is False and story['config']['dtype'] == 'auto' and story['batch_size'] == 8
    mine = [s['exp_avg'] for s in story['optimizers'][0].state_dict()['state'].values()]
    theirs = [s['exp_avg'] for s in opt.state_dict()['state'].values()]
    assert len(mine) == len(theirs) and all(torch.equal(a[:len(b)], b) for a, b in zip(mine, theirs))


def test_a_nanogpt_checkpoint_takes_no_other_tokenizer_than_its_datasets(folder, monkeypatch):
    nanogpt_checkpoint('ckpt.pt')
    os.rename('data/toy', 'data/away')
    assert re.fullmatch('data/toy is not there, .*ckpt.pt needs: prepare it here',
                        flat_sample.load('ckpt.pt')[2]['no_tokenizer'])
    os.mkdir('data/toy')  # without meta: GPT-2's, which this model is too small for
    monkeypatch.setattr(prepare, 'make_tokenizer', lambda name: make_tokenizer('byte'))
    assert 'has a tokenizer of 257 tokens' in flat_sample.load('ckpt.pt')[2]['no_tokenizer']


def test_nanogpt_prepared_folders_train(folder):
    """Header-less uint16 bins with meta.pkl."""
    os.mkdir('data/nano')
    for name in ('train.bin', 'val.bin'):
        shutil.copy(f'data/toy/{name}', f'data/nano/{name}')
    chars = [chr(97 + i) for i in range(23)]
    with open('data/nano/meta.pkl', 'wb') as f:
        pickle.dump({'vocab_size': 23, 'itos': dict(enumerate(chars)),
                     'stoi': {c: i for i, c in enumerate(chars)}}, f)
    story = run('train.py', *TOY, '--dataset=nano', '--max_iters=2', '--out_dir=out')
    assert story['model'].config.vocab_size == 23
    assert torch.load('out/ckpt.pt', weights_only=True)['tokenizer']['chars'] == chars


# sampling ---------------------------------------------------------------------------------------------------

def draws(logits, n=4000, **options):
    u = (torch.arange(n) + 0.5) / n
    return torch.bincount(sample_token(logits.expand(n, -1), u, **options), minlength=logits.shape[-1]) / n


def test_sample_token_draws_from_the_distribution():
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])
    torch.testing.assert_close(draws(logits), logits.softmax(-1), atol=1e-3, rtol=0)
    torch.testing.assert_close(draws(logits, temperature=0.5), (logits / 0.5).softmax(-1), atol=1e-3, rtol=0)
    top = torch.tensor([0, 1, 0, 0, 1]).bool()
    torch.testing.assert_close(draws(logits, top_k=2), logits.masked_fill(~top, -math.inf).softmax(-1),
                               atol=1e-3, rtol=0)
    p = logits.softmax(-1)  # sorted: 0.470, 0.285, 0.173, 0.064, 0.009
    assert (draws(logits, top_p=0.46) > 0).tolist() == [False, True, False, False, False]
    assert (draws(logits, top_p=0.75) > 0).tolist() == [False, True, False, False, True]
    assert (draws(logits, top_p=1e-9) > 0).sum() == 1
    torch.testing.assert_close(draws(logits, top_p=1.0), p, atol=1e-3, rtol=0)
    assert (draws(logits, min_p=0.3) > 0).tolist() == (p >= 0.3 * p.max()).tolist()


def test_sample_token_at_the_edges():
    tied = torch.zeros(1, 5)
    assert len({sample_token(tied, torch.tensor([u]), top_k=1).item() for u in (0.0, 0.3, 0.999)}) == 1
    logits = torch.tensor([[0.0, 4.0, 1.0]])
    for options in (dict(top_k=1), dict(top_k=0), dict(top_p=0.1), dict(top_k=3, top_p=1.0), dict(min_p=0.5)):
        assert sample_token(logits, torch.tensor([0.999]), temperature=0, **options).item() == 1
    never = torch.tensor([[-math.inf, 1.0, -math.inf]])
    for u in (0.0, 1 - 2**-24):
        assert sample_token(never, torch.tensor([u])).item() == 1
    assert sample_token(torch.randn(3, 7), torch.rand(3), top_k=200).shape == (3,)


def test_repetition_penalty():
    logits, seen = torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[True, True, False]])
    assert flat_sample.penalise(logits, seen, 2.0).tolist() == [[1.0, -4.0, 1.0]]
    model = tiny()
    plain = made(model, [[1, 2]], 12, temperature=0)[0]
    never_twice = made(model, [[1, 2]], 12, temperature=0,
                       repetition_penalty=1e9)[0]
    assert len(set(never_twice + [1, 2])) == 14 and len(set(plain)) < 12


def made(model, prompts, n, **options):
    """The tokens that generate makes for each prompt; each ends once, with None."""
    found = [[] for _ in prompts]
    for sample, token in generate(model, prompts, n, **options):
        found[sample].append(token)
    assert all(tokens.index(None) == len(tokens) - 1 for tokens in found if tokens)
    return [tokens[:-1] if tokens else None for tokens in found]


def by_hand(model, prompt, n, sample=0, seed=7, **options):
    """Generation without cache or batch: what generate must equal."""
    context, out = list(prompt[-model.config.block_size:]), []
    for i in range(n):
        if len(context) > model.config.block_size:
            context = context[-(model.config.block_size // 2):]
        u = torch.tensor(flat_sample.uniforms(seed, sample, len(prompt) + i, 1), dtype=torch.float32)
        with torch.no_grad():
            out.append(sample_token(model(torch.tensor([context]))[:, -1], u, **options).item())
        context.append(out[-1])
    return out


@pytest.mark.parametrize('variant', [
    {}, dict(n_kv_head=2, pos='learned', norm='layernorm'), dict(n_kv_head=1, pos='none', head_dim=10), MLA,
    dict(window=4, window_pattern='SL'), dict(pos='alibi', document_token=3, window=6, window_pattern='S'),
    dict(rope_scaling=YARN, n_expert=4), dict(mixer_pattern='DA')])
def test_generate_equals_uncached_generation_for_ragged_batches(variant):
    model, options = tiny(**variant), dict(temperature=0.9, top_k=20)
    prompts = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 8, 7], list(range(30))]  # the last is longer than the context
    expected = [by_hand(model, prompt, 40, row, **options) for row, prompt in enumerate(prompts)]
    assert made(model, prompts, 40, seed=7, **options) == expected  # 40 more: the context fills repeatedly
    assert made(model, prompts[:1], 40, seed=7, **options) == expected[:1]  # alone, after other calls
    assert made(model, prompts, 40, seed=7, batch_size=2, **options) == expected
    assert made(model, prompts, 40, seed=7, first=2, **options) == [None, None, *expected[2:]]


def repeats_itself(**options):
    """A model whose greedy text runs in circles, so that prompt lookup has something to find."""
    model = tiny(**options)
    model.wte.weight.data *= 4
    return model


@pytest.mark.parametrize('variant', [
    {}, dict(n_kv_head=1, pos='learned', norm='layernorm'), MLA, dict(window=4, window_pattern='SL'),
    dict(pos='alibi', document_token=3, window=6, window_pattern='S'), dict(rope_scaling=YARN, n_expert=4)])
@pytest.mark.parametrize('options', [dict(temperature=0), dict(temperature=0.5, repetition_penalty=1.05)])
def test_speculation_changes_no_token(variant, options):
    model = repeats_itself(**variant)
    prompts = [[5], [1, 2, 3, 1, 2, 3, 1], [9, 8, 7], list(range(30)), [4, 4, 4]]
    plain = made(model, prompts, 40, seed=7, **options)
    draft = repeats_itself(**variant)
    for w in draft.parameters():
        w.data += 0.02 * torch.randn_like(w)
    for proposer in (flat_sample.Lookup(3), flat_sample.Draft(draft, 2), flat_sample.Draft(model, 4)):
        for batch_size in (2, 5):  # rows are replaced; rows are dropped
            found = made(model, prompts, 40, seed=7, batch_size=batch_size, proposer=proposer, **options)
            assert found == plain
        assert 0 < proposer.kept <= proposer.fed
        stop = plain[0][20]
        assert (made(model, prompts[:1], 40, seed=7, proposer=proposer, stop_tokens=(stop,), **options)
                == [plain[0][:plain[0].index(stop)]])


def test_speculation_needs_fewer_steps():
    model, prompt = repeats_itself(), [[5, 6, 5, 6]]
    draft, fed = copy.deepcopy(model), count_fed(model)  # which is always right
    plain = made(model, prompt, 20, temperature=0)
    assert fed == [4] + [1] * 19
    fed.clear()
    assert made(model, prompt, 20, temperature=0, proposer=flat_sample.Draft(draft, 4)) == plain
    assert fed == [4, 5, 5, 5, 5]


def test_prompt_lookup():
    def look_up(context, count):
        """By the definition, anew for each context."""
        for n in (3, 2, 1):
            for end in range(len(context) - 1, n - 1, -1):
                if context[end - n:end] == context[-n:]:
                    return [(context[end:] * count)[i] for i in range(count)]
        return []
    assert look_up([1, 2, 3, 9, 1, 2, 3, 8, 5, 1, 2, 3], 2) == [8, 5]  # the latest
    assert look_up([7, 2, 3, 4, 0, 5, 3, 9, 2, 3], 4) == [4, 0, 5, 3]  # two tokens, where three never were
    assert look_up([1, 2, 3], 4) == [] == look_up([1], 4)
    assert look_up([5, 4, 4], 3) == [4, 4, 4] and look_up([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    lookup, rng = flat_sample.Lookup(5), np.random.default_rng(0)
    rows = [flat_sample.Sample(number, [1], np.zeros(100), 100) for number in range(3)]
    for _ in range(200):  # contexts grow, and are cropped now and then
        for row in rows:
            row.context += rng.integers(4, size=rng.integers(1, 4)).tolist()
            if rng.random() < 0.1:
                row.context = row.context[-10:]
        assert lookup.propose(rows, 1000, None) == [look_up(row.context, 5) for row in rows]
    rows[1].ended = True
    assert lookup.propose(rows, 1000, None)[1] == []


def test_speculation_with_a_state_is_refused():
    with pytest.raises(ValueError, match='layer 0 of the draft, a GatedDeltaNet, keeps a state.*leave out'):
        flat_sample.Draft(tiny(mixer_pattern='DA'), 2)
    with pytest.raises(ValueError, match='layer 0 of the model, a GatedDeltaNet, keeps a state.*leave out'):
        made(tiny(mixer_pattern='DA'), [[1, 2, 1]], 9, proposer=flat_sample.Lookup(2), temperature=0)


@pytest.mark.parametrize('proposer', [None, 'lookup', 'draft'])
def test_the_second_token_is_distributed_as_the_model_says(proposer):
    """Chi-squared over 4,000 samples of a vocabulary of 4, of the second token, given the first."""
    model = tiny(vocab_size=4, n_layer=1, block_size=8)
    model.wte.weight.data *= 3
    chosen = {None: None, 'lookup': flat_sample.Lookup(2), 'draft': flat_sample.Draft(
        tiny(vocab_size=4, n_layer=1, block_size=8), 2)}[proposer]
    found = np.array(made(model, [[1, 2, 1, 2, 1]] * 4000, 3, temperature=1.3, proposer=chosen))
    idx = torch.tensor([[1, 2, 1, 2, 1, a, b] for a in range(4) for b in range(4)])
    with torch.no_grad():
        p = (model(idx).double() / 1.3).softmax(-1)
    expected = p[0, 4, :, None] * p[::4, 5]                                            # (first, second)
    seen = np.zeros((4, 4))
    np.add.at(seen, (found[:, 0], found[:, 1]), 1)
    assert chosen is None or chosen.kept > 1000
    chi2 = ((seen - 4000 * expected.numpy()) ** 2 / (4000 * expected.numpy())).sum()
    assert chi2 < 37.7  # 99.9% of 15 degrees of freedom
    third = torch.tensor([[1, 2, 1, 2, 1, *row] for row in found[:, :2].tolist()])
    with torch.no_grad():
        p = (model(third)[:, -1].double() / 1.3).softmax(-1)
    counts, mean = np.bincount(found[:, 2], minlength=4), p.sum(0).numpy()
    spread = (p * (1 - p)).sum(0).sqrt().numpy()
    assert (abs(counts - mean) < 4 * spread).all()


@pytest.mark.parametrize('options', [dict(temperature=0), {}, dict(top_k=3), dict(repetition_penalty=1.1)])
def test_logits_that_are_nan_are_refused(options):
    model = tiny()
    model.h[0].mlp.c_proj.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match='logits of token 1 of sample 0 are NaN.*float32'):
        made(model, [[1, 2]], 5, **options)


def test_what_is_read_late_is_the_same(monkeypatch):
    """As on a GPU, which is some steps ahead of what is read."""
    model, prompts = tiny(), [[5], [1, 2, 3, 4, 5, 6, 7], [9, 8, 7], list(range(30))]
    def enough_of_one(**options):
        found, enough = [], set()
        for sample, token in generate(model, prompts, 30, seed=2, enough=enough, **options):
            found.append((sample, token))
            if found.count((1, None)) == 0 and sum(s == 1 for s, _ in found) == 5:
                enough.add(1)
        return sorted(found, key=lambda pair: pair[0])
    plain = made(model, prompts, 30, seed=2)
    penalty = made(model, prompts, 30, seed=2, repetition_penalty=1.2, batch_size=3)
    few = enough_of_one(batch_size=2)
    assert sum(s == 1 for s, _ in few) == 6
    stop = plain[1][7]
    ended = made(model, prompts, 30, seed=2, stop_tokens=(stop,), batch_size=2)
    read = flat_sample.Batch.read
    monkeypatch.setattr(flat_sample.Batch, 'read', lambda self, lag, enough: read(
        self, 0 if self.is_full() or not self.rows else 3, enough))
    assert made(model, prompts, 30, seed=2) == plain
    assert made(model, prompts, 30, seed=2, stop_tokens=(stop,), batch_size=2) == ended
    assert made(model, prompts, 30, seed=2, repetition_penalty=1.2, batch_size=3) == penalty
    assert enough_of_one(batch_size=2) == few


@pytest.mark.parametrize('variant', [{}, dict(window=4, window_pattern='SL'), dict(mixer_pattern='DA')])
def test_long_prompts_are_fed_a_few_at_a_time(variant, monkeypatch):
    model, prompts = tiny(**variant), [[5], list(range(20)), [9, 8, 7], [4] * 19, [3, 2], [1] * 12]
    plain = made(model, prompts, 20, seed=2)
    monkeypatch.setattr(flat_sample, 'PREFILL', 24)
    fed = []
    model.register_forward_pre_hook(lambda module, args: fed.append(args[0].shape))
    assert made(model, prompts, 20, seed=2) == plain
    assert max(B * T for B, T in fed if T > 1) <= 24 and len({B for B, T in fed if T > 1}) > 1
    if 'mixer_pattern' not in variant:
        guessing = flat_sample.Draft(copy.deepcopy(model), 2)
        assert made(model, prompts, 20, seed=2, batch_size=3, proposer=guessing) == plain
        assert max(B * T for B, T in fed if T > 1) <= 24 and guessing.kept == guessing.fed > 0


def test_rows_end_at_stop_tokens_without_disturbing_others():
    model = tiny()
    prompts = [[1], [2], [3]]
    free = made(model, prompts, 15, seed=2)
    stop = free[1][4]
    for batch_size in (1, 2, 3):
        found = made(model, prompts, 15, seed=2, stop_tokens=(stop,), batch_size=batch_size)
        for whole, got in zip(free, found):
            assert got == (whole[:whole.index(stop)] if stop in whole else whole)


@pytest.mark.parametrize('penalty', [1.0, 1.3])
def test_a_step_is_fit_for_cuda_graphs(penalty, monkeypatch):
    """A stand-in for one: what it returned is overwritten by its next run, before that reads its inputs; and
    whatever it changes must be marked as static. Rows are replaced."""
    model, prompts = tiny(mixer_pattern='DA', document_token=3), [[5], [1, 2, 3, 4], [7] * 20, [9, 8]]
    options = dict(seed=3, top_k=10, repetition_penalty=penalty, batch_size=2)
    eager, replays = made(model, prompts, 30, **options), []

    def compiled(step, **settings):
        output = torch.zeros(2, 1, dtype=torch.long)

        def replay(version, model, token, cache, u, seen, sampling):
            output.fill_(60)
            given = [*cache.tensors(), *([] if seen is None else [seen])]
            versions = [tensor._version for tensor in given]
            output.copy_(step(version, model, token, cache, u, seen, sampling))
            changed = [tensor for tensor, version in zip(given, versions) if tensor._version != version]
            assert all(tensor._dynamo_static_input_type == 'unguarded' for tensor in changed)
            replays.append(len(changed))
            return output
        return replay
    monkeypatch.setattr(torch, 'compile', compiled)
    monkeypatch.setattr(flat_sample, 'FROZEN', ())
    assert made(model, prompts, 30, compile=True, **options) == eager
    assert set(replays) == {7}


@pytest.mark.parametrize('options, device, capability, dtype, whole', [
    ({}, 'cpu', (0, 0), torch.float32, True), ({}, 'cuda', (8, 0), torch.float32, True),
    (dict(n_expert=4, d_expert=24), 'cuda', (9, 0), torch.bfloat16, True),
    (dict(n_expert=4, d_expert=24), 'cuda', (10, 0), torch.bfloat16, True),
    (dict(n_expert=4, d_expert=24), 'cuda', (12, 0), torch.bfloat16, False),  # no kernel for these yet
    (dict(n_expert=4, d_expert=24), 'cuda', (8, 0), torch.bfloat16, False),
    (dict(n_expert=4, d_expert=24), 'cuda', (9, 0), torch.float32, False),
    (dict(n_expert=4, d_expert=24), 'cpu', (0, 0), torch.float32, False),
    (dict(n_expert=4, d_expert=20), 'cuda', (9, 0), torch.bfloat16, False)])  # rows are not whole 16 bytes
def test_experts_that_wait_for_the_host_are_in_no_cuda_graph(options, device, capability, dtype, whole,
                                                             monkeypatch):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
    model, graphs = tiny(**options).to(dtype), []
    assert flat_sample.is_one_graph(model, torch.device(device)) == whole
    monkeypatch.setattr(torch, 'compile', lambda step, options, **_: graphs.append(
        (options['triton.cudagraphs'], options['coordinate_descent_tuning'])) or step)
    flat_sample.compile_step(model, torch.device(device))
    flat.quantize_weights(model, dtype)
    flat_sample.compile_step(model, torch.device(device))
    assert graphs[0] == (whole and device == 'cuda', False) and graphs[1][1]
    assert flat_sample.is_one_graph(model, torch.device(device)) == (not options)


def test_many_steps_are_compiled(monkeypatch):
    monkeypatch.setattr(flat_sample, 'can_compile', lambda device: device != 'cuda:1')
    for settings, expected in [(('auto', 'cuda:0', 10_000), True), (('auto', 'cuda:0', 9999), False),
                               (('auto', 'cuda:1', 10_000), False), (('auto', 'cpu', 4000), True),
                               (('auto', 'cpu', 3999), False),
                               (('auto', 'mps', 5000), False), ((True, 'cpu', 1), True),
                               ((False, 'cuda:0', 5000), False)]:
        assert flat_sample.resolve_compile(*settings) is expected


QUICKLY = {'freezing': True, 'max_autotune': True, 'max_autotune_gemm_backends': 'CPP'}  # tries no others


def test_a_compiled_forward_is_causal():
    """Without a cache, on a CPU, where few queries are attended to in their own way."""
    idx = torch.tensor([[1, 2, 3, 4, 5, 6]])
    for variant in ({}, dict(n_kv_head=2), dict(pos='alibi'), dict(window=3, window_pattern='S'), MLA):
        model = tiny(**variant)
        with torch.no_grad():
            near(torch.compile(model, backend='eager')(idx), model(idx), 1e-5)


@pytest.mark.parametrize('options, penalty, int8', [
    (dict(n_kv_head=2), 1.1, True), (dict(mixer_pattern='D'), 1.0, False),
    (dict(window=5, window_pattern='S', n_expert=4, document_token=3, **MLA), 1.0, False)])
def test_compiled_generation_equals_eager(options, penalty, int8, monkeypatch):
    """With rows that are replaced."""
    model, prompts = tiny(n_layer=1, **options), [[5], [1, 2, 3, 4], [7, 7], list(range(20)), [9]]
    if int8:
        flat.quantize_weights(model, torch.float32)
    common = dict(seed=3, top_k=10, repetition_penalty=penalty)
    eager = made(model, prompts, 30, **common)
    templates = 'mixer_pattern' not in options  # in torch 2.11 there are none for products of a state
    monkeypatch.setattr(flat_sample, 'FREEZING', QUICKLY if templates else {'freezing': True})
    if 'n_expert' in options:  # which break it into many graphs, and are frozen in none
        compile = torch.compile
        monkeypatch.setattr(torch, 'compile', lambda f, **_: compile(f, backend='aot_eager', dynamic=False))
    before, began = flat_sample.compiling_seconds(), time.perf_counter()
    assert made(model, prompts, 30, compile=True, batch_size=2, **common) == eager
    spent, seconds = flat_sample.compiling_seconds() - before, time.perf_counter() - began
    assert 0.5 * seconds < spent < seconds  # which the speed that is printed leaves out
    assert not int8 or made(dequantized(model), prompts, 30, **common) == eager


def test_compiled_speculation_equals_eager(monkeypatch):
    model = repeats_itself(n_layer=1, n_kv_head=2, window=4, window_pattern='S')
    prompts, common = [[5], [1, 2, 1, 2], [7]], dict(seed=3, temperature=0.5)
    eager = made(model, prompts, 30, **common)
    monkeypatch.setattr(flat_sample, 'FREEZING', {'freezing': True})
    assert made(model, prompts, 30, compile=True, batch_size=2, proposer=flat_sample.Lookup(3),
                **common) == eager


class Logits:
    """In the place of a Sampling: a step then gives the logits."""

    def draw(self, logits, tokens, u, seen):
        return logits


def test_a_compiled_step_has_the_weights_of_its_model(tmp_path, monkeypatch):
    """They are its constants: of another model of the same shape, after a change to the weights, and again,
    when what was compiled is read from disk."""
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path))
    monkeypatch.setattr(flat_sample, 'FREEZING', QUICKLY)
    models, found = [tiny(n_layer=1, tie_word_embeddings=False) for _ in range(2)], []
    for model in models:
        for w in model.parameters():
            w.data += 0.1 * torch.randn_like(w)
        flat.quantize_weights(model.bfloat16(), torch.bfloat16)
    for i, model in enumerate([models[0], models[1], models[0], models[1]]):
        if i == 3:
            torch.compiler.reset()  # as in another process
        with torch.no_grad():
            if i == 2:
                model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
            cache = flat_sample.new_cache(model, 1, 20, static=True)
            step = flat_sample.compile_step(model, torch.device('cpu'))
            for tokens in ([3], [3, 3]):
                logits = step(model, torch.tensor([[3]]), cache, torch.zeros(1, 1), None, Logits())
                near(logits[:, -1], model(torch.tensor([tokens]))[:, -1], 0.03)
            found.append(float(logits[0, 0, 0]))
    assert found[1] == found[3] and len(set(found)) == 3


@pytest.mark.parametrize('variant', [{}, dict(window=4, window_pattern='SL'), MLA, dict(document_token=3)])
def test_scores_are_log_probabilities(variant):
    model = tiny(**variant).double()
    size = model.config.block_size
    ids = np.random.default_rng(0).integers(61, size=3 * size + 5).tolist()
    found = flat_sample.score_tokens(model, ids)
    assert len(found) == len(ids) - 1 and flat_sample.score_tokens(model, [4]).shape == (0,)
    with torch.no_grad():
        for i in (1, 2, size - 1, size, size + 1, 2 * size, len(ids) - 1):
            start = next(start for start in range(0, len(ids), (size + 1) // 2) if i <= start + size)
            p = model(torch.tensor([ids[start:i]]))[0, -1].softmax(-1)[ids[i]]
            assert math.isclose(found[i - 1], math.log(p), abs_tol=1e-5)
            assert i - start >= min(i, size // 2)
    for piece in (1, 7):
        np.testing.assert_allclose(flat_sample.score_tokens(model, ids, piece), found, atol=1e-6)
    with pytest.raises(ValueError, match='below vocab_size=61'):
        flat_sample.score_tokens(model, [1, 61])
    model.h[0].mlp.c_proj.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match='logits after token 1 are NaN'):
        flat_sample.score_tokens(model, ids)


def dequantized(model):
    """The same model with the weights that an int8 one stands for, in float32."""
    plain = GPT(model.config)
    weights = dict(model.state_dict())
    for name, module in model.named_modules():
        if hasattr(module, 'scale') and f'{name}.weight' in weights:
            rows = weights[f'{name}.weight']  # without those that pad the vocabulary
            weights[f'{name}.weight'] = rows * module.scale[:len(rows)].float()[..., None]
    plain.load_state_dict(weights)
    return plain.eval()


@pytest.mark.parametrize('variant', [
    {}, dict(tie_word_embeddings=False, bias=True, norm='layernorm', pos='learned', mlp='gelu'), MLA,
    dict(n_expert=4, n_shared_expert=1), dict(mixer_pattern='DA'), dict(embed_scale=2.0, attn_gate=True)])
def test_int8_is_the_model_of_its_dequantized_weights(variant):
    model = tiny(**variant)
    flat_bench.fill_zeros(model)
    before = model.state_dict()
    idx = torch.randint(61, (2, 20))
    exact = model(idx).detach()
    n = model.num_params()
    flat.quantize_weights(model, torch.float32)
    assert model.num_params() == n and sum(w.dtype is torch.int8 for w in model.parameters()) >= 9
    plain = dequantized(model)
    with torch.no_grad():
        near(model(idx), plain(idx), 1e-5)
        assert 1e-4 < (model(idx) - exact).abs().max() / exact.abs().max() < 0.2
    for name, w in plain.state_dict().items():  # within half of a 127th of the row's largest
        step = before[name].abs().amax(-1, keepdim=True) / 127 if w.ndim > 1 else torch.zeros(())
        assert ((w - before[name]).abs() <= step * 0.5001).all()
    prompts = [[5], [1, 2, 3, 1, 2, 3, 1], [9, 8, 7]]
    for options in (dict(temperature=0), dict(temperature=0.9, batch_size=2)):
        assert made(model, prompts, 20, **options) == made(plain, prompts, 20, **options)


def test_rows_in_eight_bits():
    w = torch.randn(5, 8, 33)
    w[2, 3] = 0
    w[1, 1] *= 1e-30
    for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        q, scale = flat.quantize_rows(w, dtype)
        assert q.dtype is torch.int8 and scale.dtype is dtype and scale.shape == (5, 8)
        expected = np.abs(w.numpy()).max(-1) / 127
        np.testing.assert_allclose(scale.float(), expected, rtol=error)
        step = scale.float()[..., None]
        assert ((q * step - w).abs() <= (0.5 + 127 * error) * step).all()
        assert not q[2, 3].any()


@pytest.mark.parametrize('rows', [1, 3, 40])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.bfloat16, 0.02),
                                              (torch.float16, 0.002)])
@pytest.mark.parametrize('width', [64, 36])
def test_int8_linear_is_a_product_with_what_the_weight_stands_for(rows, width, dtype, tolerance):
    x = 100 * torch.randn(rows, 5, width).to(dtype)[:, :2]  # not contiguous; too large a sum for float16
    q, scale = flat.quantize_rows(torch.randn(48, width), dtype)
    expected = x.double() @ (q.double() * scale.double()[:, None]).T
    found = flat.int8_linear(x, q, scale)
    assert found.dtype is dtype and found.shape == (rows, 2, 48)
    near(found.double(), expected, tolerance)


def test_bad_prompts_are_refused():
    model = tiny()
    for prompt in ([], [61], [-1]):
        with pytest.raises(ValueError, match='below vocab_size=61'):
            next(generate(model, [prompt], 1))


def test_streamed_text_is_the_whole_text():
    tok = make_tokenizer('byte')
    text = 'naïve 🙂 日本語\n'
    stream = TextStream(tok)
    pieces = [stream.feed(i) for i in tok.encode(text)] + [stream.finish()]
    assert ''.join(pieces) == text and '�' not in ''.join(pieces) and pieces.count('') > 5
    stream = TextStream(tok)
    assert ''.join(stream.feed(i) for i in '🙂'.encode()[:2]) == '' and stream.finish() == '�'
    stream = TextStream(tok, stop=['END', '\n\n'])
    out = [stream.feed(i) for i in tok.encode('a EN\nE\n\nrest')]
    assert ''.join(out) + stream.finish() == 'a EN\nE' and stream.ended
    assert TextStream(tok, stop=['xyz']).feed(ord('x')) == ''  # it may begin a stop text


# conversations ----------------------------------------------------------------------------------------------

QUESTIONS = ['Hi, who are you?', 'And <them>?\n', 'é🙂']
DELTA = dict(mixer_pattern='DA', linear_n_key_head=2, linear_n_value_head=4)
CHAT_SETTINGS = {**flat_sample.config, 'system': 'Be short.', 'max_new_tokens': 8, 'temperature': 0.0,
                 'compile': False}


@functools.cache
def byte_chat_tokenizer(template='chatml'):
    """Bytes, ChatML's two marks and a chat template, as a tokenizer.json."""
    library = pytest.importorskip('tokenizers').Tokenizer.from_str(make_tokenizer('byte').to_json())
    library.add_special_tokens(['<|im_start|>', '<|im_end|>'])
    return prepare.JsonTokenizer(library.to_str(), {'chat_template': CHAT_TEMPLATES[template]})


def chat_model(**options):
    return tiny(**{**dict(block_size=600, vocab_size=259), **options})


def new_chat(model, template='chatml', **settings):
    return flat_sample.Chat(model, byte_chat_tokenizer(template), {**CHAT_SETTINGS, **settings})


def count_fed(model):
    """A list that grows by the number of tokens of each forward pass."""
    fed = []
    model.register_forward_pre_hook(lambda module, args: fed.append(args[0].shape[1]))
    return fed


def from_nothing(chat, question, n=8):
    """The answer of a model that reads the whole conversation anew for each token."""
    ids, begin = flat_sample.chat_ids(chat.model, chat.tokenizer, [
        *chat.messages, {'role': 'user', 'content': question}], chat.settings['thinking'])
    ids = by_hand(chat.model, ids, n, temperature=0)
    ends = [i for i, token in enumerate(ids) if token in chat.tokenizer.stop_tokens]
    return begin + chat.tokenizer.decode(ids[:min(ends, default=n)])


@pytest.mark.parametrize('template, variant', [
    ('chatml', {}), ('chatml', dict(window=9, window_pattern='SL')), ('chatml', MLA),
    ('chatml', dict(window=30, window_pattern='S', pos='alibi')), ('chatml', dict(n_expert=4)),
    ('chatml', DELTA), ('chatml', dict(document_token=256, n_kv_head=2)), ('qwen3', {}), ('qwen3', DELTA),
    ('qwen3', dict(window=9, window_pattern='SL')), ('llama3', {}), ('minimind', {})])
def test_a_conversation_with_its_cache_is_each_turn_from_nothing(template, variant):
    if template == 'minimind':
        path = os.path.join(os.environ.get('FLATGPT_DATA', ''), 'minimind_tokenizer')
        if not os.path.isdir(path):
            pytest.skip('no minimind_tokenizer/ in FLATGPT_DATA')
        tokenizer = prepare.json_tokenizer(path)
        model = chat_model(vocab_size=tokenizer.n_vocab)
        chat = flat_sample.Chat(model, tokenizer, CHAT_SETTINGS)
    else:
        model = chat_model(**variant)
        chat = new_chat(model, template)
    fed, pieces, cached = count_fed(model), [], []
    for question in QUESTIONS:
        expected = from_nothing(chat, question)
        if template == 'qwen3' and len(chat.messages) > 1:  # which the template leaves out from now on
            chat.messages[-1]['content'] = '<think>\nhm\n</think>\n\n' + chat.messages[-1]['content']
        ids = chat.prompt(question)[1]
        same = len(os.path.commonprefix([ids[:-1], cached]))
        fed.clear()
        pieces.clear()
        assert chat.answer(question, pieces.append) in (
            None, '(cut at max_new_tokens=8: /set max_new_tokens 16 allows more)')
        assert chat.messages[-2:] == [{'role': 'user', 'content': question},
                                      {'role': 'assistant', 'content': expected}]
        assert ''.join(pieces) == expected
        if same == len(cached) or not any(chat.cache.states):  # else from the first token
            assert fed[0] == len(ids) - same and set(fed[1:]) <= {1}
        cached = chat.cached
        assert len(cached) == chat.cache.length and cached[:len(ids)] == ids
        assert (ids[0] == 256) == ('document_token' in variant)


@pytest.mark.parametrize('variant', [{}, dict(window=9, window_pattern='SL'), MLA])
def test_a_conversation_with_guesses_is_the_same(variant):
    model = chat_model(**variant)
    model.wte.weight.data *= 3  # it runs in circles
    plain, guessing = new_chat(model, stop='x'), new_chat(model, stop='x')
    guessing.proposer = flat_sample.Lookup(4)
    for question in (*QUESTIONS, 'tell it to the end', 'again'):
        for chat in (plain, guessing):
            chat.answer(question, lambda text: None)
        assert guessing.messages == plain.messages
        assert guessing.cached[:len(plain.cached)] == plain.cached
        assert len(guessing.cached) == guessing.cache.length
    assert guessing.proposer.kept > 0


@pytest.mark.parametrize('variant', [
    {}, dict(window=4, window_pattern='SL'), MLA, dict(pos='alibi', document_token=3), DELTA])
def test_generate_goes_on_from_a_cache_that_holds_the_beginning(variant):
    model = tiny(**variant)
    prompts, held = [[5, 6], [1, 2, 3, 4, 5, 6, 7], [9, 8, 3, 7]], [1, 3, 0]
    plain = made(model, prompts, 30, seed=3, temperature=0.9)  # the context of 24 is full once
    cache = model.make_cache(3, 24)
    with torch.no_grad():
        flat_sample.prefill(model, [p[:n] or [0] for p, n in zip(prompts, held)], cache)
    cache.reset(torch.tensor([False, False, True]))
    fed = count_fed(model)
    assert made(model, prompts, 30, seed=3, temperature=0.9, cache=cache) == plain
    assert fed[0] == 4  # the longest that was missing
    cache.reset()
    long = [list(range(30))]
    cropped = made(model, long, 8, seed=3)
    cache = model.make_cache(1, 24)
    with torch.no_grad():
        model(torch.tensor(long)[:, :20], cache=cache)
    assert made(model, long, 8, seed=3, cache=cache) == cropped


def test_a_compiled_conversation_is_compiled_once(monkeypatch):
    compile, graphs = torch.compile, []

    def watched(graph, inputs):
        graphs.append(graph)
        return graph
    monkeypatch.setattr(torch, 'compile', lambda f, **_: compile(f, backend=watched))
    torch._dynamo.reset()
    chat = new_chat(chat_model(n_layer=1, window=9, window_pattern='S'), compile=True)
    for question in QUESTIONS:
        expected = from_nothing(chat, question)
        chat.answer(question, str)
        assert chat.messages[-1]['content'] == expected
    assert len(graphs) == 1


def test_history_is_kept_within_the_context(capsys):
    chat = new_chat(chat_model(block_size=150))
    for i in range(5):
        question = f"question {i}"
        chat.answer(question, str)
        ids = flat_sample.chat_ids(chat.model, chat.tokenizer, chat.messages[:-1], 'show')[0]
        assert len(ids) + 8 <= 150 and len(chat.cached) <= 150
        roles = [message['role'] for message in chat.messages]
        assert roles == ['system', *['user', 'assistant'] * (len(roles) // 2)]
        answer = chat.messages[-1]['content']
        chat.messages = chat.messages[:-2]
        assert answer == from_nothing(chat, question)  # as if what is forgotten had never been
        chat.messages += [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]
    assert len(chat.messages) < 11 and chat.messages[0]['content'] == 'Be short.'
    assert capsys.readouterr().out.count('\n') == 1
    before = list(chat.messages)
    with pytest.raises(ValueError, match='the context has 150: ask a shorter one'):
        chat.answer('a' * 150, str)
    assert chat.messages == before
    chat.settings['max_new_tokens'] = 100
    assert chat.answer('b' * 70, str) in (None, '(cut: the context of 150 tokens is full)')
    assert [m['role'] for m in chat.messages] == ['system', 'user', 'assistant'] and len(chat.cached) <= 150
    chat.reset()
    assert chat.messages == [{'role': 'system', 'content': 'Be short.'}]
    assert new_chat(chat_model(), system='').messages == []


@pytest.mark.parametrize('variant', [{}, DELTA, dict(window=9, window_pattern='S')])
@pytest.mark.parametrize('calls', [1, 5])
def test_an_answer_may_be_interrupted_anywhere(variant, calls):
    """Between two layers of the first pass, or of a later one: the next answers are those from nothing."""
    model = chat_model(**variant)
    chat, passes = new_chat(model), []

    def interrupt(module, args):
        passes.append(1)
        if len(passes) == calls:
            signal.raise_signal(signal.SIGINT)
    for turn in range(2):
        handle = model.h[1].register_forward_pre_hook(interrupt)
        passes.clear()
        with pytest.raises(KeyboardInterrupt):
            chat.answer('Hi', str)
        handle.remove()
        assert [m['role'] for m in chat.messages[-2:]] == ['user', 'assistant'] and chat.cached == []
        expected = from_nothing(chat, f'Turn {turn}?')
        chat.answer(f'Turn {turn}?', str)
        assert chat.messages[-1]['content'] == expected


def typed(monkeypatch, *lines):
    """What a person types: text, or an exception for a key."""
    rest = iter(lines)

    def read(prompt=''):
        line = next(rest)
        if isinstance(line, BaseException):
            raise line
        return line
    monkeypatch.setattr('builtins.input', read)
    return rest


def test_commands_of_a_conversation(monkeypatch, capsys):
    chat = new_chat(chat_model())
    rest = typed(monkeypatch, '', 'Hi', KeyboardInterrupt(), '  /set temperature 0.5 ',
                 '/set temperature -1', '/set temperature abc', '/set device cuda', '/set thinking maybe',
                 '/set', '/nonsense', '/help', '/reset', '/etc/passwd is what?', 'x' * 600, '/exit', 'never')
    flat_sample.converse(chat)
    assert list(rest) == ['never'] and chat.settings['temperature'] == 0.5
    assert [m['content'] for m in chat.messages[:2]] == ['Be short.', '/etc/passwd is what?']
    out, err = capsys.readouterr()
    assert 'temperature=-1.0 must be at least 0\n' in out and 'temperature = 0.5, top_k' in out
    assert "thinking='maybe' must be show, hide, on or off" in out and '/set NAME VALUE takes' in out
    assert err.count('\n') == 1 and "temperature must be float, got 'abc'" in err
    assert out.count(flat_sample.COMMANDS) == 3 and 'ask a shorter one' in out
    assert out.count('there is no command /nonsense\n') == out.count('there is no command') == 1
    assert out.count('the conversation is forgotten\n') == 1
    rest = typed(monkeypatch, EOFError(), 'never')
    flat_sample.converse(chat)
    assert list(rest) == ['never']


def test_ctrl_c_stops_an_answer_and_not_the_program(monkeypatch, capsys):
    model = chat_model()
    chat, passes = new_chat(model), []

    def interrupt(module, args):
        passes.append(1)
        if len(passes) == 4:
            signal.raise_signal(signal.SIGINT)
    model.register_forward_pre_hook(interrupt)
    typed(monkeypatch, 'Hi', 'And?', '/exit')
    flat_sample.converse(chat)
    half, whole = chat.messages[2]['content'], chat.messages[4]['content']
    assert len(half) <= 3 and half + '\n' in capsys.readouterr().out
    chat.messages = chat.messages[:3]
    assert from_nothing(chat, 'And?') == whole


def test_thinking_is_shown_hidden_or_off(capsys):
    for text, visible in [('<think>\nhm <b>\n</think>\n\nyes', 'yes'), ('<think>\nhm', ''), ('<', '<'),
                          ('\n<think></think>a</think>', 'a</think>'), ('a <think>', 'a <think>'), ('', '')]:
        for size in (1, 3, 100):
            for hide, expected in (True, visible), (False, text):
                display, out = flat_sample.Display(hide), ''
                for i in range(0, len(text), size):
                    display(text[i:i + size])
                    out += capsys.readouterr().out
                    assert expected.startswith(out)
                display('', complete=True)
                assert out + capsys.readouterr().out == expected + '\n'
    model, tok, messages = chat_model(), byte_chat_tokenizer('qwen3'), [{'role': 'user', 'content': 'Hi'}]
    show, hide, on, off = (flat_sample.chat_ids(model, tok, messages, thinking)[0]
                           for thinking in ('show', 'hide', 'on', 'off'))
    assert show == hide == tok.chat(messages) == on != off == tok.chat(messages, thinking=False)
    asked = prepare.JsonTokenizer(tok.source, {'chat_template': CHAT_TEMPLATES['chatml']
                                               + '{% if open_thinking %}<think>\n{% endif %}'})
    show, on, off = (flat_sample.chat_ids(model, asked, messages, thinking)
                     for thinking in ('show', 'on', 'off'))
    assert show == off == (tok.chat(messages), '')
    assert on == (show[0] + asked.encode('<think>\n'), '<think>\n')
    opened = prepare.JsonTokenizer(tok.source, {'chat_template': CHAT_TEMPLATES['chatml'] + '<think>\n'})
    chat = flat_sample.Chat(model, opened, {**CHAT_SETTINGS, 'thinking': 'hide'})
    assert flat_sample.chat_ids(model, opened, messages, 'show')[1] == '<think>\n'
    display = flat_sample.Display(True)
    chat.answer('Hi', display)
    assert chat.messages[-1]['content'].startswith('<think>\n') and len(chat.messages[-1]['content']) > 8
    assert capsys.readouterr().out == ''


# hub --------------------------------------------------------------------------------------------------------

HF = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
          num_key_value_heads=2, max_position_embeddings=64)
HF_LATENT = dict(HF, num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
                 v_head_dim=12, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
                 moe_intermediate_size=24, first_k_dense_replace=1)


HF_HYBRID = dict(HF, head_dim=16, num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4,
                 linear_key_head_dim=6, linear_value_head_dim=10, linear_conv_kernel_dim=3,
                 layer_types=['linear_attention', 'full_attention'] * 2)
HF_SHARED = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
                 shared_expert_intermediate_size=24)


def hf_rope(kind, **options):
    length = {} if kind in ('linear', 'default') else {'original_max_position_embeddings': 16}
    return {'rope_parameters': {'rope_type': kind, 'rope_theta': 5000.0, **length, **options}}


HF_MODELS = [  # model_type and its configuration
    ('gpt2', dict(vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=64)),
    ('gpt2', dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=40,
                  activation_function='relu', tie_word_embeddings=False)),
    ('llama', HF),
    ('llama', dict(HF, head_dim=16, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    ('llama', dict(HF, **hf_rope('yarn', factor=4.0))),
    ('llama', dict(HF, **hf_rope('linear', factor=2.0))),
    ('llama', dict(HF, **hf_rope('llama3', factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0))),
    ('llama', dict(HF, num_key_value_heads=1, **hf_rope(
        'longrope', factor=4.0, short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 3.0, 4.0],
        original_max_position_embeddings=4))),  # a cache is for one list: transformers changes it on the way
    ('mistral', dict(HF, sliding_window=8)), ('mistral', dict(HF, sliding_window=None, head_dim=12)),
    ('mixtral', dict(HF, num_local_experts=4)),
    ('mixtral', dict(HF, num_local_experts=5, num_experts_per_tok=3, sliding_window=7)),
    ('qwen2', HF), ('qwen2', dict(HF, use_sliding_window=True, sliding_window=6, max_window_layers=1,
                                  tie_word_embeddings=True)),
    ('qwen3', dict(HF, head_dim=16)),
    ('qwen3', dict(HF, head_dim=12, attention_bias=True, tie_word_embeddings=True, use_sliding_window=True,
                   sliding_window=6, max_window_layers=2)),
    ('qwen3_moe', dict(HF, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)),
    ('qwen3_moe', dict(HF, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                       norm_topk_prob=True, mlp_only_layers=[1])),
    ('qwen3_moe', dict(HF, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                       decoder_sparse_step=2)),
    ('deepseek_v2', dict(HF_LATENT, q_lora_rank=None, n_group=1, topk_group=1, topk_method='greedy')),
    ('deepseek_v2', dict(HF_LATENT, q_lora_rank=12, n_group=4, topk_group=2,
                         topk_method='group_limited_greedy', routed_scaling_factor=2.0,
                         **hf_rope('yarn', factor=4.0, mscale=0.7, mscale_all_dim=0.9))),
    ('deepseek_v3', dict(HF_LATENT, q_lora_rank=12, n_group=2, topk_group=1)),
    ('deepseek_v3', dict(HF_LATENT, q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False,
                         n_shared_experts=2, first_k_dense_replace=2)),
    ('deepseek_v3', dict(HF_LATENT, q_lora_rank=12, n_group=1, topk_group=1, attention_bias=True)),
    ('bloom', dict(vocab_size=61, hidden_size=32, n_layer=3, n_head=4)),
    ('bloom', dict(vocab_size=61, hidden_size=36, n_layer=2, n_head=6)),
    ('falcon', dict(vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)),
    ('falcon', dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                    new_decoder_architecture=True, num_kv_heads=2)),
    ('falcon', dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                    new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1)),
    ('falcon', dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True,
                    multi_query=False, parallel_attn=False, bias=True)),
    ('mpt', dict(vocab_size=61, d_model=32, n_layers=2, n_heads=4)),
    ('mpt', dict(vocab_size=61, d_model=36, n_layers=2, n_heads=6)),
    ('gpt_neox', dict(HF, num_key_value_heads=4)),
    ('gpt_neox', dict(HF, use_parallel_residual=False, attention_bias=False,
                      **hf_rope('default', partial_rotary_factor=0.5))),
    ('olmo2', HF), ('gemma2', dict(HF, head_dim=16, sliding_window=6)),
    ('gemma2', dict(HF, head_dim=8, sliding_window=9, query_pre_attn_scalar=32, num_hidden_layers=2)),
    ('phi', HF), ('phi', dict(HF, **hf_rope('default', partial_rotary_factor=1.0))),
    ('smollm3', dict(HF, pad_token_id=0, num_hidden_layers=4)),
    ('smollm3', dict(HF, pad_token_id=0, tie_word_embeddings=False, no_rope_layers=[0, 1, 0])),
    ('qwen2_moe', dict(HF, **HF_SHARED, mlp_only_layers=[1])),
    ('qwen3_next', dict(HF_HYBRID, **HF_SHARED)),
    ('qwen3_next', dict(HF_HYBRID, **HF_SHARED, attention_bias=True, linear_num_key_heads=4,
                        norm_topk_prob=False, mlp_only_layers=[0], layer_types=None)),
    ('qwen3_5_text', HF_HYBRID),
    ('qwen3_5_text', dict(HF_HYBRID, tie_word_embeddings=True, layer_types=['full_attention'] * 4)),
    ('gpt_oss', dict(HF, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
                     **hf_rope('yarn', factor=4.0, truncate=False))),
]


@torch.no_grad()
def hf_model(kind, options, folder=None, **save):
    """A model of transformers whose every weight matters, saved to the folder. Falcon's ALiBi is added twice
    by the eager attention of transformers 5.23, which its sdpa has right."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **options)
    how = 'sdpa' if options.get('alibi') else 'eager'
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=how).float().eval()
    for name, w in itertools.chain(model.named_parameters(), model.named_buffers()):
        if w.is_floating_point() and 'inv_freq' not in name and 'embed_scale' not in name:
            less_one = kind in ('gemma2', 'qwen3_next', 'qwen3_5_text') and 'linear_attn' not in name
            one = w.ndim == 1 and 'norm' in name and not less_one and 'bias' not in name
            w.copy_(torch.randn_like(w) * (0.3 if w.ndim > 1 else 0.2) + one)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    if folder:
        model.save_pretrained(folder, **save)
    return model


def hf_opened(folder):
    c = json.loads((Path(folder) / 'config.json').read_text())
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation='sdpa' if c.get('alibi') else 'eager', dtype=torch.float32).eval()


def near(a, b, tolerance=1e-4):
    assert (a - b).abs().max() <= tolerance * b.abs().max(), ((a - b).abs().max(), b.abs().max())


@pytest.mark.parametrize('kind, options', HF_MODELS, ids=lambda v: v if isinstance(v, str) else '')
@torch.no_grad()
def test_hf_checkpoints_in_and_out(kind, options, tmp_path):
    theirs = hf_model(kind, options, tmp_path / 'in')
    context = {'block_size': 64} if 'longrope' in str(options) else {}
    ours, idx = hub.from_pretrained(tmp_path / 'in', **context), torch.randint(61, (2, 24))
    logits = theirs(idx).logits
    near(ours(idx), logits)
    start = idx[:1, :6]
    greedy = theirs.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=20, do_sample=False,
                             pad_token_id=0)[0, 6:].tolist()
    assert made(ours, [start[0].tolist()], 20, temperature=0)[0] == greedy
    hub.save_pretrained(ours, None, tmp_path / 'out')
    near(hf_opened(tmp_path / 'out')(idx).logits, logits)
    again = hub.from_pretrained(tmp_path / 'out', **context)
    assert torch.equal(again(idx), ours(idx))
    flat.quantize_weights(again, torch.float32)  # as a whole, and tensor by tensor as it is read
    assert torch.equal(hub.from_pretrained(tmp_path / 'in', int8=True, **context)(idx), again(idx))


@torch.no_grad()
def test_hf_longrope_reads_short_texts_and_by_a_larger_context_long_ones(tmp_path):
    theirs = hf_model('llama', dict(HF, **hf_rope(
        'longrope', factor=2.0, short_factor=[1.0, 1.5, 2.0, 2.5], long_factor=[1.0, 2.0, 3.0, 4.0],
        original_max_position_embeddings=32)), tmp_path)
    for n, changes in (24, {}), (40, {'block_size': 64}):
        idx, ours = torch.randint(61, (2, n)), hub.from_pretrained(tmp_path, **changes)
        assert ours.config.block_size == changes.get('block_size', 32)
        near(ours(idx), theirs(idx).logits)


@torch.no_grad()
def test_hf_old_configs_shards_dtypes_and_names_without_prefix(tmp_path):
    theirs = hf_model('llama', dict(HF, **hf_rope('yarn', factor=4.0)), tmp_path, max_shard_size='20KB')
    assert len(list(tmp_path.glob('model-*.safetensors'))) > 3
    idx = torch.randint(61, (2, 20))
    logits = theirs(idx).logits
    near(hub.from_pretrained(tmp_path)(idx), logits)
    c = json.loads((tmp_path / 'config.json').read_text())
    rope = c.pop('rope_parameters')
    c.update(rope_theta=rope.pop('rope_theta'), torch_dtype=c.pop('dtype'), rope_scaling={
        'type': rope.pop('rope_type'), **rope})
    (tmp_path / 'config.json').write_text(json.dumps(c))
    near(hub.from_pretrained(tmp_path)(idx), logits)
    half = hub.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.wte.weight.dtype == torch.bfloat16
    assert half.ropes[half.config.rope_kind][0].dtype == torch.float32
    for dtype in (torch.float16, torch.bfloat16):
        theirs.to(dtype).save_pretrained(tmp_path / str(dtype))
        ours = hub.from_pretrained(tmp_path / str(dtype))
        assert ours.wte.weight.dtype == dtype
        near(ours.float()(idx), hf_opened(tmp_path / str(dtype))(idx).logits)
    # GPT-2 as it was first published: no prefix, and buffers of masks
    import safetensors.torch as safetensors
    theirs = hf_model('gpt2', HF_MODELS[0][1], tmp_path / 'gpt2')
    path = tmp_path / 'gpt2/model.safetensors'
    state = {name.removeprefix('transformer.'): w for name, w in safetensors.load_file(path).items()}
    state |= {f'h.{i}.attn.bias': torch.ones(1, 1, 64, 64) for i in range(3)}
    safetensors.save_file(state, path)
    near(hub.from_pretrained(tmp_path / 'gpt2')(idx), theirs(idx).logits)


@pytest.mark.parametrize('kind, options, change', [
    ('qwen3', dict(head_dim=8), {}),  # version 3 as it is published
    ('qwen3', dict(head_dim=8), dict(model_type='minimind', use_moe=False)),
    ('qwen3_moe', dict(head_dim=8, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=24,
                       norm_topk_prob=True), dict(model_type='minimind', use_moe=True)),
    ('llama', {}, dict(model_type='minimind', use_moe=False, n_routed_experts=4, n_shared_experts=1,
                       scoring_func='softmax', aux_loss_alpha=0.01, seq_aux=True))])  # before version 3
@torch.no_grad()
def test_hf_minimind_of_both_shapes(kind, options, change, tmp_path):
    """Its config.json as its own class and its scripts/convert_model.py write it; the weights are those of
    Qwen3 or Llama by the same names."""
    options = dict(HF, tie_word_embeddings=True, rms_norm_eps=1e-5, **options)
    theirs = hf_model(kind, options, tmp_path)
    c = json.loads((tmp_path / 'config.json').read_text())
    c |= {'rope_theta': c.pop('rope_parameters')['rope_theta'], 'rope_scaling': None}
    if change:
        kept = (*HF, *options, 'rope_theta', 'rope_scaling', 'hidden_act', 'dtype')
        c = {name: c[name] for name in kept if name in c} | dict(
            num_experts=options.get('num_experts', 4), num_experts_per_tok=1, moe_intermediate_size=24,
            norm_topk_prob=True, router_aux_loss_coef=5e-4, flash_attn=True, inference_rope_scaling=False,
            dropout=0.0, architectures=['MiniMindForCausalLM']) | change
    (tmp_path / 'config.json').write_text(json.dumps(c))
    idx = torch.randint(61, (2, 20))
    near(hub.from_pretrained(tmp_path)(idx), theirs(idx).logits)


@torch.no_grad()
def test_hf_leaves_out_the_extra_prediction_layer(tmp_path):
    import safetensors.torch as safetensors
    theirs = hf_model('deepseek_v3', HF_MODELS[21][1], tmp_path)
    state = safetensors.load_file(tmp_path / 'model.safetensors')
    state |= {'model.layers.3.eh_proj.weight': torch.ones(32, 64),
              'model.layers.3.enorm.weight': torch.ones(32)}
    safetensors.save_file(state, tmp_path / 'model.safetensors')
    idx = torch.randint(61, (2, 12))
    near(hub.from_pretrained(tmp_path)(idx), theirs(idx).logits)
    state['model.layers.0.eh_proj.weight'] = state.pop('model.layers.3.eh_proj.weight')
    safetensors.save_file(state, tmp_path / 'model.safetensors')
    with pytest.raises(ValueError, match='model.layers.0.eh_proj.weight is unexpected'):
        hub.from_pretrained(tmp_path)


@pytest.mark.parametrize('change, message', [
    (dict(model_type='qwen3_5'), 'qwen3_5 has no text_config'),
    (dict(model_type='rwkv'), "model_type='rwkv' is unsupported; these are supported: .*llama"),
    (dict(quantization_config={'quant_method': 'fp8'}), 'quantized .fp8.'),
    (dict(hidden_act='swish9'), "hidden_act='swish9'"), (dict(use_magic=True), 'use_magic=True'),
    (dict(sliding_window=8), 'sliding_window=8'), (dict(num_key_value_heads=3), 'n_kv_head must divide'),
    (dict(num_hidden_layers=None), 'without num_hidden_layers'),
    (dict(quantization_config='fp8'), 'missing or malformed field'),
    (dict(hidden_act=['silu']), 'missing or malformed field .unhashable type'),
    (dict(num_hidden_layers=10**12), 'n_layer=1000000000000'),
    (dict(rope_parameters={'full_attention': {'rope_type': 'default'}}), 'rope_parameters for each type'),
    (dict(vocab_size=0), 'vocab_size=0'), (dict(vocab_size='61'), "vocab_size='61'"),
    (dict(layer_types=['chunked_attention']), "layer_types with 'chunked_attention'"),
    (dict(rope_scaling=5), 'missing or malformed field'),
    (dict(alibi=True), 'alibi=True'), (dict(rope_interleaved=True), 'rope_interleaved=True'),
    (dict(rope_parameters={'rope_type': 'mrope', 'rope_theta': 1e4}), "rope_type='mrope' is none of"),
    (dict(rope_parameters={'rope_type': 'default', 'partial_rotary_factor': 0.5}),
     'partial_rotary_factor=0.5'),
])
def test_hf_refuses_by_name_what_it_does_not_support(change, message, tmp_path):
    hf_model('llama', HF, tmp_path)
    path = tmp_path / 'config.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    os.remove(tmp_path / 'model.safetensors')  # it is the config that is refused, before weights are wanted
    with pytest.raises(ValueError, match=message) as error:
        hub.from_pretrained(tmp_path)
    assert '\n' not in str(error.value)


def test_hf_only_linear_layers_have_no_options_of_attention():
    c = transformers.Qwen3NextConfig(**HF_HYBRID, **HF_SHARED).to_diff_dict()
    config = hub.config_from_hf({**c, 'layer_types': ['linear_attention'] * 4})
    assert config.mixer_pattern == 'DDDD' and not config.attn_gate


@torch.no_grad()
def test_hf_text_models_inside_larger_ones(tmp_path):
    import safetensors.torch as safetensors
    theirs, idx = hf_model('qwen3_5_text', HF_HYBRID, tmp_path), torch.randint(61, (2, 12))
    c = json.loads((tmp_path / 'config.json').read_text())
    rope = {**c['rope_parameters'], 'mrope_section': [1, 1, 0], 'mrope_interleaved': True}
    (tmp_path / 'config.json').write_text(json.dumps({
        'model_type': 'qwen3_5', 'vision_config': {'depth': 1}, 'image_token_id': 60,
        'text_config': {**c, 'rope_parameters': rope, 'attn_output_gate': True, 'mtp_num_hidden_layers': 1}}))
    state = {name.replace('model.', 'model.language_model.', 1): w
             for name, w in safetensors.load_file(tmp_path / 'model.safetensors').items()}
    state |= {'model.visual.x.weight': torch.ones(2), 'mtp.fc.weight': torch.ones(2)}
    safetensors.save_file(state, tmp_path / 'model.safetensors')
    near(hub.from_pretrained(tmp_path)(idx), theirs(idx).logits)


def test_hf_rope_of_both_forms_is_what_transformers_applies():
    for more in (dict(rope_parameters={'rope_type': 'default', 'rope_theta': 5e5}),
                 dict(rope_theta=7e5), dict(rope_theta=7e5, rope_parameters={'rope_theta': 5e5})):
        scaling = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 16}
        c = {**HF, 'model_type': 'llama', 'hidden_act': 'silu', 'rope_scaling': scaling, **more}
        theirs, ours = transformers.LlamaConfig.from_dict(dict(c)).rope_parameters, hub.config_from_hf(c)
        assert ours.rope_base == theirs['rope_theta']
        assert ours.rope_scaling == {key: value for key, value in theirs.items() if key != 'rope_theta'}


def test_hf_names_every_tensor_that_does_not_fit(tmp_path):
    import safetensors.torch as safetensors
    hf_model('llama', HF, tmp_path)
    path = tmp_path / 'model.safetensors'
    state = safetensors.load_file(path)
    del state['model.norm.weight'], state['model.layers.1.mlp.up_proj.weight']
    state['model.layers.0.self_attn.o_proj.weight'] = torch.ones(8, 32)
    state['extra.weight'] = torch.ones(2)
    safetensors.save_file(state, path)
    with pytest.raises(ValueError) as error:
        hub.from_pretrained(tmp_path)
    for part in ('model.norm.weight is missing', 'model.layers.1.mlp.up_proj.weight is missing',
                 'extra.weight is unexpected', 'o_proj.weight (8, 32) instead of (32, 32)'):
        assert part in str(error.value)


def test_hf_damaged_files_are_one_line(tmp_path):
    hf_model('llama', HF, tmp_path)
    path, index = tmp_path / 'model.safetensors', tmp_path / 'model.safetensors.index.json'
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], 'little')
    header = whole[8:8 + length]

    def broken(data, message, error=ValueError):
        path.write_bytes(data)
        with pytest.raises(error, match=message) as caught:
            hub.from_pretrained(tmp_path)
        assert '\n' not in str(caught.value)

    broken(whole[:-1000], 'damaged or truncated')
    broken(whole[:4], 'damaged or truncated')
    broken(b'', 'damaged or truncated')
    broken((1 << 60).to_bytes(8, 'little') + whole[8:], 'damaged or truncated')
    broken((length - 7).to_bytes(8, 'little') + whole[8:], 'damaged')
    broken(whole[:8] + header.replace(b'"F32"', b'"I32"') + whole[8 + length:], 'dtype I32')
    broken(whole[:8] + header.replace(b'[61,32]', b'[71,32]') + whole[8 + length:], 'damaged or truncated')
    broken(whole[:8] + b'[' + header[1:-1] + b']' + whole[8 + length:], 'damaged')
    broken(whole[:8] + header.replace(b'[61,32]', b'[-1,32]') + whole[8 + length:], 'damaged')
    os.remove(path)
    for weight_map, message, error in (
            ({'lm_head.weight': 'model-2.safetensors'}, 'lacks model-2.safetensors', FileNotFoundError),
            ({'lm_head.weight': '../model.safetensors'}, 'no safetensors file of its own folder', ValueError),
            ({'lm_head.weight': 'pytorch_model.bin'}, 'no safetensors file of its own folder', ValueError),
            ({'lm_head.weight': 5}, 'no safetensors file', ValueError),
            ('x', 'no weight_map', ValueError), ([], 'no weight_map', ValueError)):
        index.write_text(json.dumps({'weight_map': weight_map}))
        with pytest.raises(error, match=message):
            hub.from_pretrained(tmp_path)
    os.remove(index)
    for text, message in (('{', 'is not valid JSON'), ('[' * 200000, 'is not valid JSON'),
                          ('[1]', 'holds a list'), ('\xff', 'is not valid JSON')):
        for name in ('model.safetensors.index.json', 'config.json'):
            kept = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else None
            (tmp_path / name).write_text(text, encoding='latin-1')
            with pytest.raises(ValueError, match=f'{name} {message}') as caught:
                hub.from_pretrained(tmp_path)
            assert '\n' not in str(caught.value)
            os.remove(tmp_path / name)
            if kept:
                (tmp_path / name).write_bytes(kept)
    os.remove(tmp_path / 'config.json')
    with pytest.raises(FileNotFoundError, match='no config.json'):
        hub.from_pretrained(tmp_path)


def test_hf_refuses_to_export_what_no_family_computes(tmp_path):
    for options, part in ((dict(residual_lambdas=True), 'residual_lambdas (here True)'),
                          (dict(n_expert=4, n_shared_expert=1), 'n_shared_expert'),
                          (dict(pos_pattern='PN', norm='layernorm'), 'norm')):
        with pytest.raises(ValueError, match='no published family') as error:
            hub.save_pretrained(tiny(**options), None, tmp_path / 'none')
        assert part in str(error.value) and not (tmp_path / 'none').exists()


@pytest.mark.parametrize('c, expected', [  # as they were published, before rope_parameters and dtype
    (dict(model_type='bloom', hidden_size=1024, n_layer=24, num_attention_heads=16, vocab_size=250880,
          attention_softmax_in_fp32=True, masked_softmax_fusion=True, offset_alibi=100, skip_bias_add=True,
          seq_length=2048, layer_norm_epsilon=1e-5), 'bloom_560m'),
    (dict(model_type='falcon', hidden_size=4544, n_layer=32, n_head=71, vocab_size=65024, multi_query=True,
          parallel_attn=True, alibi=False, bias=False, layer_norm_epsilon=1e-5,
          new_decoder_architecture=False, max_position_embeddings=2048), 'falcon_7b'),
    (dict(model_type='qwen3', hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, head_dim=128,
          num_key_value_heads=8, intermediate_size=12288, vocab_size=151936, hidden_act='silu',
          max_position_embeddings=40960, max_window_layers=36, rms_norm_eps=1e-6, rope_scaling=None,
          rope_theta=1000000, sliding_window=None, tie_word_embeddings=False, torch_dtype='bfloat16',
          use_sliding_window=False), 'qwen3_8b'),
    (dict(model_type='mistral', hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
          num_key_value_heads=8, intermediate_size=14336, vocab_size=32000, hidden_act='silu',
          max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=10000.0,
          sliding_window=4096), 'mistral_7b'),
    (dict(model_type='deepseek_v2', hidden_size=2048, num_hidden_layers=27, num_attention_heads=16,
          num_key_value_heads=16, intermediate_size=10944, vocab_size=102400, hidden_act='silu',
          kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
          n_routed_experts=64,
          num_experts_per_tok=6, n_shared_experts=2, moe_intermediate_size=1408, first_k_dense_replace=1,
          moe_layer_freq=1, n_group=1, topk_group=1, topk_method='greedy', scoring_func='softmax',
          norm_topk_prob=False, routed_scaling_factor=1.0, seq_aux=True, aux_loss_alpha=0.001, ep_size=1,
          max_position_embeddings=163840, rms_norm_eps=1e-6, rope_theta=10000, rope_scaling={
              'beta_fast': 32, 'beta_slow': 1, 'factor': 40, 'mscale': 0.707, 'mscale_all_dim': 0.707,
              'original_max_position_embeddings': 4096, 'type': 'yarn'}), 'deepseek_v2_lite'),
    (dict(model_type='minimind', hidden_size=512, num_hidden_layers=8, num_attention_heads=8,
          num_key_value_heads=2, intermediate_size=1408, vocab_size=6400, hidden_act='silu',
          max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=1e6, use_moe=False, n_routed_experts=4,
          num_experts_per_tok=2, n_shared_experts=1, scoring_func='softmax', norm_topk_prob=True,
          flash_attn=True),
     'minimind')])
def test_hf_published_configs_are_read_as_our_own(monkeypatch, c, expected):
    monkeypatch.chdir(ROOT)
    _, args = configure({**vars(flat_train), '__name__': 'x'}, 'GPTConfig', argv=[f'config/{expected}.py'])
    ours, read = hub.essence(GPTConfig(**args)), hub.essence(hub.config_from_hf(c))
    assert {name: value for name, value in read.items() if value != ours[name]} in (
        {}, {'rope_scaling': read['rope_scaling']})  # which names its defaults
    with torch.device('meta'):
        assert GPT(hub.config_from_hf(c)).num_params() == GPT(GPTConfig(**args)).num_params()


@torch.no_grad()
def test_hf_exports_open_where_transformers_wants_more_than_it_needs(tmp_path):
    gemma = dict(wiring='sandwich', qk_norm=False, mlp='geglu_tanh', embed_scale=32**0.5)
    for i, options in enumerate((gemma, dict(gemma, window=5, window_pattern='SL'),
                                 dict(gemma, attn_softcap=3.0))):
        model = tiny(**options)
        idx = tokens(model, 2, 20)
        hub.save_pretrained(model, None, tmp_path / str(i))
        near(hf_opened(tmp_path / str(i))(idx).logits, model(idx))
    for scaling in ({'rope_type': 'ntk', 'factor': 2.0},
                    {'rope_type': 'dynamic', 'factor': 2.0, 'original_max_position_embeddings': 12}):
        with pytest.raises(ValueError, match='no published family'):
            hub.save_pretrained(tiny(rope_scaling=scaling), None, tmp_path / 'none')
    with pytest.raises(ValueError, match='float64 cannot be written'):
        hub.save_pretrained(tiny().double(), None, tmp_path / 'none')
    assert not (tmp_path / 'none').exists()


def test_an_export_replaces_nothing_but_an_earlier_one(tmp_path):
    folder = tmp_path / 'out'
    hub.save_pretrained(tiny(), make_tokenizer('byte'), folder)
    model = tiny(n_layer=1)
    hub.save_pretrained(model, None, folder)  # whose tokenizer is gone with the model that it was for
    assert sorted(os.listdir(folder)) == ['config.json', 'model.safetensors']
    assert same_weights(hub.from_pretrained(folder).state_dict(), model.state_dict())
    (folder / 'chat_template.jinja').write_text('of a person')
    hf_model('llama', HF, tmp_path / 'theirs')
    (tmp_path / 'theirs/generation_config.json').unlink()  # the names that are left could be ours
    (tmp_path / 'texts').mkdir()
    (tmp_path / 'texts/tokenizer.json').write_text('{}')
    for name, part in (('out', 'chat_template.jinja'), ('theirs', 'config.json, model.safetensors'),
                       ('texts', 'tokenizer.json')):
        before = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        with pytest.raises(ValueError, match=f'{name} holds {part}, of no earlier export'):
            hub.save_pretrained(tiny(), None, tmp_path / name)
        assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} == before


@torch.no_grad()
def test_hf_learned_positions_are_cropped_and_dtypes_are_the_files(tmp_path):
    theirs = hf_model('gpt2', HF_MODELS[0][1], tmp_path)
    idx = torch.randint(61, (2, 16))
    near(hub.from_pretrained(tmp_path, block_size=16)(idx), theirs(idx).logits)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / 'half')
    c = json.loads((tmp_path / 'half/config.json').read_text())
    del c['dtype']
    (tmp_path / 'half/config.json').write_text(json.dumps(c))
    assert hub.from_pretrained(tmp_path / 'half').wte.weight.dtype == torch.bfloat16


class HubHandler(http.server.BaseHTTPRequestHandler):
    """A hub of one repository, a/b, from a folder, as huggingface_hub asks it. faults: {file: status}."""
    root, faults, asked = None, {}, []

    def do_GET(self):
        self.asked.append((self.path, self.headers.get('Authorization')))
        path = self.path.partition('?')[0]
        files = {file.name: file.read_bytes() for file in self.root.iterdir()}
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()  # of the commit
        name, headers, status = path.rpartition('/')[2], {}, 200
        if 401 in self.faults.values():
            status, body, headers = 401, b'no', {'X-Error-Code': 'GatedRepo'}
        elif path.startswith('/api/models/a/b/revision/'):
            body = json.dumps({'id': 'a/b', 'sha': sha}).encode()
        elif path.startswith('/api/models/a/b/tree/'):
            body = json.dumps([{'type': 'file', 'path': file, 'size': len(content), 'oid': 'b' * 40}
                               for file, content in files.items()]).encode()
        elif path.startswith('/a/b/resolve/') and name in files:
            body, status = files[name], self.faults.get(name, 200)
            headers = {'X-Repo-Commit': sha, 'ETag': f'"{hashlib.sha1(body).hexdigest()}"'}
        else:
            status, body, headers = 404, b'no', {'X-Error-Code': 'RepoNotFound'}
        self.send_response(status)
        for key, value in {**headers, 'Content-Length': str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def point_hub(monkeypatch, tmp_path, url):
    """Makes huggingface_hub, which reads its environment when it is imported, ask this address."""
    constants = pytest.importorskip('huggingface_hub').constants
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    monkeypatch.setenv('HF_TOKEN', 'secret')
    monkeypatch.setattr(constants, 'ENDPOINT', url)
    monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE',
                        url + '/{repo_id}/resolve/{revision}/{filename}')
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setattr(constants, 'HF_HUB_DISABLE_XET', True)
    return constants


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hf_model('llama', {**HF, 'vocab_size': 257}, tmp_path / 'repo', max_shard_size='60KB')
    Path('repo/tokenizer.json').write_text(make_tokenizer('byte').to_json(), encoding='utf-8')
    Path('repo/tokenizer_config.json').write_text(json.dumps({'chat_template': '{{ messages }}'}))
    Path('repo/evil.py').write_text('raise SystemExit')
    Path('repo/pytorch_model.bin').write_bytes(pickle.dumps(Evil()))
    HubHandler.root, HubHandler.faults, HubHandler.asked = tmp_path / 'repo', {}, []
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), HubHandler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    HubHandler.constants = point_hub(monkeypatch, tmp_path, f'http://127.0.0.1:{server.server_address[1]}')
    yield HubHandler
    server.shutdown()
    server.server_close()


def test_hub_ids_become_local_folders(local_hub, monkeypatch, capsys):
    run('hub.py', 'a/b')
    out = capsys.readouterr().out
    folder = re.search(r'folder: (.*)', out)[1]
    with torch.no_grad():
        count = GPT(hub.config_from_hf(json.loads(Path('repo/config.json').read_text()))).num_params()
    for part in ('llama', f'{count:,} parameters', 'context 64', 'vocabulary 257', 'with a chat template',
                 '--init_from=a/b', f'--tokenizer={folder}'):
        assert part in out
    got = set(os.listdir(folder))
    assert got >= {'config.json', 'tokenizer.json', 'model.safetensors.index.json'}
    assert len([name for name in got if name.endswith('.safetensors')]) > 1
    assert not got & {'evil.py', 'pytorch_model.bin', 'generation_config.json'}
    assert {who for path, who in local_hub.asked if 'a/b' in path} == {'Bearer secret'}
    for name in got:
        assert (Path(folder) / name).read_bytes() == (Path('repo') / name).read_bytes()
    files = [path.rpartition('/')[2] for path, _ in local_hub.asked]
    assert files.index('config.json') < min(i for i, name in enumerate(files) if '.safetensors' in name
                                            and 'index' not in name)
    monkeypatch.setattr(local_hub.constants, 'HF_HUB_OFFLINE', True)  # what has been fetched is there
    local_hub.asked.clear()
    assert hub.fetch('a/b') == folder and not local_hub.asked
    idx = torch.randint(257, (1, 12))
    with torch.no_grad():
        assert torch.equal(hub.from_pretrained('a/b')(idx), hub.from_pretrained('repo')(idx))


def test_hub_refuses_in_one_line_before_anything_large(local_hub, monkeypatch):
    def refused(kind, message, name='a/b'):
        shutil.rmtree('cache', ignore_errors=True)
        local_hub.asked.clear()
        with pytest.raises(kind, match=message) as error:
            hub.fetch(name)
        assert '\n' not in str(error.value)
        assert not [path for path, _ in local_hub.asked if path.endswith('.safetensors')]

    path = Path('repo/config.json')
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, 'model_type': 'rwkv'}))
    refused(ValueError, "a/b.config.json: model_type='rwkv' is unsupported")
    path.write_text(json.dumps({**config, 'quantization_config': {'quant_method': 'gptq'}}))
    refused(ValueError, 'quantized')
    path.write_text(json.dumps(config))
    refused(OSError, 'a/none is not a folder.*check the id, set HF_TOKEN', 'a/none')
    refused(ValueError, 'x/y/z is not a folder, checkpoint or id', 'x/y/z')
    local_hub.faults = {'config.json': 401}
    refused(OSError, 'gated.*set HF_TOKEN')
    local_hub.faults = {}
    for file in Path('repo').glob('*.safetensors*'):
        file.unlink()
    refused(OSError, 'a/b has no safetensors')
    monkeypatch.setattr(local_hub.constants, 'HF_HUB_OFFLINE', True)
    refused(OSError, 'HF_HUB_OFFLINE')


def test_without_a_network_or_a_library_one_line_says_what_to_do(tmp_path, monkeypatch):
    point_hub(monkeypatch, tmp_path, 'http://127.0.0.1:9')
    with pytest.raises(OSError, match='openai-community/gpt2 .*127.0.0.1:9 cannot.*go online') as error:
        hub.from_pretrained('gpt2')
    assert '\n' not in str(error.value)
    hf_model('llama', HF, tmp_path / 'in')
    for name in ('safetensors', 'huggingface_hub'):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(ImportError, match='pip install safetensors tokenizers huggingface_hub'):
                hub.from_pretrained(tmp_path / 'in' if name == 'safetensors' else 'a/b')


def test_hub_script_reads_the_environment(local_hub, tmp_path):
    env = {**os.environ, 'HF_ENDPOINT': local_hub.constants.ENDPOINT, 'HF_HOME': str(tmp_path / 'home')}
    done = subprocess.run([sys.executable, str(ROOT / 'hub.py'), 'a/b'], capture_output=True, text=True,
                          env=env)
    assert 'a/b: llama' in done.stdout and f'folder: {tmp_path}/home' in done.stdout
    (tmp_path / 'ckpt.pt').write_bytes(b'')
    with pytest.raises(ValueError, match='ckpt.pt is a file: .*python hub.py export .*ckpt.pt FOLDER'):
        run('hub.py', str(tmp_path / 'ckpt.pt'))
    for args in (['export', 'out'], []):
        with pytest.raises(ValueError, match='give an id on the hub or a folder'):
            run('hub.py', *args)


def test_export_writes_what_transformers_opens(folder, capsys):
    story = run('train.py', '--out_dir=out', *TOY, '--max_iters=3', '--n_kv_head=1')
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix('torch.')
        run('hub.py', 'export', 'out', name, f'--dtype={name}')
        model = story['model'].to(dtype).eval()
        assert {one.dtype for one in hub.read_headers(name).values()} == {dtype}
        assert json.loads(Path(name, 'config.json').read_text())['dtype'] == name
        assert same_weights(model.state_dict(), hub.from_pretrained(name).state_dict())
        idx = tokens(model, 2, 16)
        with torch.no_grad():
            near(hf_opened(name)(idx).logits, model.float()(idx))
        assert os.stat(Path(name, 'model.safetensors')).st_mode == os.stat(Path(name, 'config.json')).st_mode
    auto = transformers.AutoTokenizer.from_pretrained('float32')
    assert auto('abcd')['input_ids'] == prepare.load_tokenizer('data/toy').encode('abcd') == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="dtype='int8' is none of"):
        run('hub.py', 'export', 'out', 'other', '--dtype=int8')
    assert not os.path.exists('other')
    saved = torch.load('out/ckpt.pt', weights_only=True)
    torch.save({**saved, 'tokenizer': None, 'config': None}, 'bad.pt')
    with pytest.raises(ValueError, match='bad.pt is damaged.*config=None'):
        run('hub.py', 'export', 'bad.pt', 'other')
    torch.save({**saved, 'tokenizer': None, 'config': {}}, 'bare.pt')
    capsys.readouterr()
    run('hub.py', 'export', 'bare.pt', 'bare')
    assert 'no tokenizer is exported: bare.pt names no tokenizer' in capsys.readouterr().out
    assert sorted(os.listdir('bare')) == ['config.json', 'model.safetensors']


def test_export_to_a_full_disk_leaves_nothing(tmp_path):
    resource = pytest.importorskip('resource')
    model, before = tiny(), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = sum(w.nbytes for w in model.state_dict().values())
    hub.save_pretrained(tiny(n_layer=1), None, tmp_path / 'there')
    old = {path.name: path.read_bytes() for path in (tmp_path / 'there').iterdir()}
    try:
        for limit in (100, size // 2):  # the first file fails, the last one does
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            for name in ('new', 'there'):
                with pytest.raises(OSError, match=f'{name} cannot be written') as error:
                    hub.save_pretrained(model, make_tokenizer('byte'), tmp_path / name)
                assert '\n' not in str(error.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not (tmp_path / 'new').exists()
    assert {path.name: path.read_bytes() for path in (tmp_path / 'there').iterdir()} == old


def test_train_starts_from_published_weights(folder, capsys):
    hf_model('qwen3', {**HF, 'vocab_size': 23, 'head_dim': 16}, 'theirs')
    story = run('train.py', '--init_from=theirs', '--dataset=toy', '--out_dir=out', '--block_size=16',
                '--max_iters=2', '--batch_size=4', '--gradient_accumulation_steps=1', '--device=cpu',
                '--dtype=float32', '--compile=False', '--eval_iters=2')
    assert story['model'].config.head_dim == 16 and story['model'].config.block_size == 16
    said = capsys.readouterr().out
    assert 'n_layer' not in said and 'batch_size' in said  # of config/default.py what is in force
    assert 'warning: data' not in said  # the folder has no tokenizer that could be another
    assert 'the tokenizers of data/toy and theirs are not compared: ' in said
    Path('theirs/tokenizer.json').write_text(make_tokenizer('byte').to_json(), encoding='utf-8')
    with pytest.raises(ValueError, match='n_embd=64 differs'):
        run('train.py', '--init_from=theirs', '--dataset=toy', '--n_embd=64', '--device=cpu')
    run('train.py', '--init_from=theirs', '--dataset=toy', '--out_dir=other', '--block_size=16',
        '--max_iters=1', '--batch_size=4', '--gradient_accumulation_steps=1', '--device=cpu',
        '--compile=False', '--eval_iters=1')
    assert 'warning: data/toy was prepared with another tokenizer' in capsys.readouterr().out


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
    model, tokenizer, _ = flat_sample.load('resume', 'out')
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
    model, _, _ = flat_sample.load('resume', 'out', int8=True)
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


def bench(capsys, *args):
    """Runs bench.py; returns what it prints, and its numbers."""
    capsys.readouterr()
    torch.set_num_threads(1)  # beside other processes the second would mostly wait
    run('bench.py', *args, '--json=True')
    *lines, last = capsys.readouterr().out.splitlines()
    return '\n'.join(lines), json.loads(last)


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
    _, args = configure({**vars(flat_train), '__name__': 'x'}, 'GPTConfig', argv=[f'config/{name}.py'])
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
        config, args = configure(namespace, 'GPTConfig', argv=[str(path)])
        with torch.device('meta'):
            model = GPT(GPTConfig(**args))
        for ranks in (1, 2, 4, 8):
            flat_train.share_batch(config['gradient_accumulation_steps'], config['batch_size'], ranks)
        if path.name == 'small.py':
            assert 120e6 < model.num_params() < 130e6
    with torch.device('meta'):
        config, args = configure({**vars(flat_train), '__name__': 'x'}, 'GPTConfig',
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
    (['--batch_size=10000000'], 'an iteration takes 30,000,000 windows, and this text has 187: lower'),
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


EVAL = ['--device=cpu', '--dtype=float32']


@pytest.mark.parametrize('masked', [False, True])
def test_bench_eval_scores_each_target_once(folder, capsys, masked):
    """Against a loop over windows; the last one is shorter. The tokens are of 1 to 3 bytes."""
    tok = prepare.CharTokenizer([*'abcdefgh', 'é', 'ß', '中'])
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
    chars = prepare.CharTokenizer(sorted(set(text)))  # without an end of text the first is not predicted
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
    save_model('out-toy', prepare.CharTokenizer([chr(97 + i) for i in range(23)]))
    write_toy(folder / 'data/big')
    with open('data/big/val.bin', 'r+b') as f:
        f.write(np.array([7, 60000], '<u2').tobytes())
    with pytest.raises(ValueError, match='val.bin: token 60000 at position 1 is outside the vocabulary'):
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


def test_bench_cost_paths_are_attention():
    """The ways whose costs are compared compute the same, but for the linear one; all have gradients."""
    q, k, v = torch.randn(3, 1, 2, 300, 8)
    paths = flat_bench.attention_paths(300, 2, 8, 'cpu', torch.float32)
    for name, window in (('naive', None), ('eager', None), ('SDPA', None), ('window 256', 256)):
        score = q.double() @ k.double().mT * 8 ** -0.5
        age = torch.arange(300)[:, None] - torch.arange(300)
        score = score.masked_fill((age < 0) | (age >= (window or 300)), -math.inf)
        assert torch.allclose(paths[name](q, k, v), (score.softmax(-1) @ v.double()).float(), atol=1e-5), name
    assert paths['linear'](q, k, v).shape == v.shape


def test_bench_cost_counts_memory():
    """What is held at a time, not the sum: two of the three tensors, then two."""
    def call():
        a = torch.ones(2**20)
        b = a + 1
        del a
        return b * 2
    assert flat_bench.peak_bytes(call, 'cpu') == pytest.approx(2 * 4 * 2**20, rel=1e-3)
    q, k, v = torch.randn(3, 1, 2, 512, 8).requires_grad_()
    paths = flat_bench.attention_paths(512, 2, 8, 'cpu', torch.float32)
    peak = {name: flat_bench.peak_bytes(functools.partial(path, q, k, v), 'cpu')
            for name, path in paths.items()}
    scores = 2 * 512 * 512 * 4  # naive holds the scores and the weights, for all pairs
    assert peak['naive'] > 2 * scores and peak['SDPA'] < scores / 4


def test_bench_cost(folder, capsys):
    size = ['--n_layer=2', '--n_head=6', '--n_embd=48', '--vocab_size=50', '--dropout=0']
    out, numbers = bench(capsys, 'cost', *size, '--lengths=[16,32]', '--rounds=1', '--batch_size=2',
                         '--max_new_tokens=8', *EVAL)
    for what, paths in numbers['attention'].items():
        assert all(len(values) == 2 and min(values) > 0 for values in paths.values()), what
    for n, each in numbers['cache'].items():
        assert each['none_tokens'] == sum(range(1, int(n) + 1)) and each['cache_tokens'] == int(n)
    assert [*numbers['cache']] == ['4', '8'] and re.search(r'^4 tokens .* 2\.5$', out, re.M)
    found = numbers['decode']
    for name, cached in {'MHA': 2 * 48, 'GQA, 2 of 6': 2 * 16, 'MQA': 2 * 8, 'MLA': 4 * 8 + 4}.items():
        assert found[name]['cache_bytes_per_token'] == 2 * 4 * cached  # layers, bytes, elements
        assert found[name]['cache_share'] == pytest.approx(cached / 96, abs=1e-4)
        assert found[name]['tok_per_s'] == pytest.approx(2e3 / found[name]['ms'], rel=1e-3)
    q_and_o, mlp = 2 * 48 * 48, 3 * 48 * 128
    for name, kv in (('MHA', 2 * 48 * 48), ('GQA, 2 of 6', 2 * 48 * 16), ('MQA', 2 * 48 * 8)):
        norms = 2 * (2 * 48 + 2 * 8) + 48
        assert found[name]['params'] == 2 * (q_and_o + kv + mlp) + norms + 50 * 48
    assert numbers['norms'].keys() == {'rmsnorm', 'layernorm'}
    assert all(each['ms'] > 0 for each in numbers['steps'].values())
    with pytest.raises(ValueError, match="norm='layernorm': cost compares what it chooses itself"):
        run('bench.py', 'cost', '--norm=layernorm')


# comparing --------------------------------------------------------------------------------------------------

def interrupt_run():
    """Sends this process Ctrl-C as soon as a run of a comparison has written a checkpoint."""
    def poll():
        for _ in range(6000):
            if glob.glob('out-compare/*/ckpt.pt'):
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.01)
    threading.Thread(target=poll, daemon=True).start()


def test_compare_is_ordinary_runs_stopped_and_continued(folder, capsys, monkeypatch):
    """The loss is that of train.py alone, to the last digit, also where Ctrl-C came in between."""
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    torch.set_num_threads(1)
    run('train.py', *TOY, '--norm=layernorm', '--out_dir=out')
    monkeypatch.setattr(flat_bench, 'stop_signals', lambda: [signal.SIGINT])  # for the others are pytest's
    config = {**flat_bench.config, 'variants': {'b': '--norm=layernorm'}, 'seeds': 1}
    interrupt_run()
    with pytest.raises(KeyboardInterrupt, match='0 of 1 runs are finished; the same command goes on'):
        flat_bench.compare(config, TOY, [])
    stopped, = glob.glob('out-compare/*/')
    assert os.path.exists(stopped + 'ckpt.pt') and not os.path.exists(stopped + 'result.json')
    capsys.readouterr()
    numbers = flat_bench.compare(config, TOY, [])
    first = capsys.readouterr().out
    row, = numbers['rows']
    assert row['losses'] == [float(log_rows('out')[-1]['val_loss'])] and row['runs'] == [stopped[:-1]]
    assert (row['params'], row['cache_bytes_per_token'], row['iterations']) == (33728, 2 * 2 * 2 * 32, 20)
    rows = log_rows(stopped)
    # every iteration has a row: the first four have the warm-up in them
    assert row['ms'] == np.median([float(r['ms_per_iter']) for r in rows if int(r['iter']) > 4])
    assert 50 < row['peak_mb'] < 5000 and row['seconds'] == float(rows[-1]['wall_s'])
    again, second = flat_bench.compare(config, TOY, []), capsys.readouterr().out
    assert '1 runs, 1 of them finished before\n' in second and 'one seed tells nothing' in second
    assert again == numbers and second.partition('\nvariant')[2] == first.partition('\nvariant')[2]


def test_compare_says_which_is_better(folder, capsys, monkeypatch):
    """From runs whose losses are known: one is worse at each seed, one fails, one was evaluated once more."""
    found = {'a': [2.0, 2.1, 2.3], 'b': [2.25, 2.25, 2.5], 'c': None, 'd': [2.0, 2.1, 2.3]}
    trained = []

    def train_variant(variant, seed, folder, watch):
        trained.append((variant.name, seed))
        losses, error = found[variant.name], None if found[variant.name] else 'the run diverged: x'
        if losses:
            at_ctrl_c = {15: 1.0} if (variant.name, seed) == ('d', 8) else {}
            fake_log(Path(folder), {1: None, 10: 1.9 + seed / 10, **at_ctrl_c, 20: losses[seed - 7]}, 0.5)
        os.makedirs(folder, exist_ok=True)
        Path(folder, 'result.json').write_text(json.dumps({'error': error, 'peak_mb': 100}), encoding='utf-8')
    monkeypatch.setattr(flat_bench, 'train_variant', train_variant)
    monkeypatch.setattr(flat_bench, 'code_digest', lambda code: '')
    monkeypatch.setattr(flat_bench, 'stop_signals', list)
    variants = {'a': '', 'b': '--norm=layernorm', 'c': '--learning_rate=1e12', 'd': '--beta1=0.8'}
    config = {**flat_bench.config, 'variants': variants, 'seed': 7}
    numbers = flat_bench.compare(config, [*TOY, '--seed=7'], [])
    out = capsys.readouterr().out
    assert trained == [(name, seed) for seed in (7, 8, 9) for name in variants]
    a, b, c, d = numbers['rows']
    assert [a['losses'], b['losses']] == [found['a'], found['b']] and numbers['failed'] == ['c']
    assert a['loss'] == pytest.approx(np.mean(found['a'])) and a['seconds'] == 10 and a['peak_mb'] == 100
    assert a['sd'] == pytest.approx(np.std(found['a'], ddof=1)) and 'difference' not in a
    low, high = 0.2 - 4.3027 * 0.05 / 3 ** 0.5, 0.2 + 4.3027 * 0.05 / 3 ** 0.5  # of 0.25, 0.15, 0.2
    assert [b[k] for k in ('difference', 'low', 'high')] == pytest.approx([0.2, low, high], abs=5e-5)
    assert (b['verdict'], d['verdict']) == ('worse', 'no difference seen')
    assert re.search(r'^b .*\+0\.2000 \[\+0\.0758, \+0\.3242\] +worse', out, re.M)
    assert re.search(r'^c +3 of 3 runs failed: the run diverged: x$', out, re.M)
    assert a['best'] == d['best'] == pytest.approx(np.mean(found['a']))  # not what Ctrl-C has evaluated
    assert (numbers['plot'] is None) == (importlib.util.find_spec('matplotlib') is None)
    assert numbers['plot'] is None or Path(numbers['plot']).read_bytes().startswith(b'\x89PNG')
    # with a seed less, of runs that are there, and with a variant more
    variants['e'] = '--beta1=0.7'
    found['e'] = [3.0, 3.1, 3.3]
    trained.clear()
    again = flat_bench.compare({**config, 'seeds': 2}, TOY, [])
    assert trained == [('e', 7), ('e', 8)] and again['rows'][1]['losses'] == found['b'][:2]
    assert '10 runs, 8 of them finished before, whose ms/step are of then' in capsys.readouterr().out
    assert not again['plot'] or again['plot'] != numbers['plot']


def fake_variant(folder, code):
    """A variant whose train.py is these lines."""
    os.makedirs(folder / 'code')
    (folder / 'code' / 'train.py').write_text(code, encoding='utf-8')
    return flat_bench.Variant('x', 'WORK', folder / 'code', [])


@pytest.mark.parametrize('error', [KeyboardInterrupt, BrokenPipeError])
def test_no_run_goes_on_alone(tmp_path, monkeypatch, error):
    """Whatever ends a comparison, the run has saved its state first, also where nobody reads what is said."""
    monkeypatch.chdir(tmp_path)
    variant = fake_variant(tmp_path, """if True:
        import pathlib, signal, sys, time
        def save(number, frame):
            pathlib.Path('saved').touch()
            sys.exit(130)
        signal.signal(signal.SIGTERM, save)
        pathlib.Path('ready').touch()
        time.sleep(60)""")

    def watch():
        if os.path.exists('ready'):
            raise error

    def nobody_reads(*text, flush):
        raise BrokenPipeError
    monkeypatch.setattr(flat_bench, 'print', nobody_reads, raising=False)
    handler = signal.getsignal(signal.SIGINT)
    process = flat_bench.start_run(variant.command('run'), '.')
    with pytest.raises(error):
        flat_bench.wait(process, watch)
    assert process.returncode == 130 and os.path.exists('saved')
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize('system, sent', [('posix', ['terminate']), ('nt', [])])
def test_ctrl_c_reaches_a_run_once(monkeypatch, system, sent):
    """On Windows the terminal has sent it; elsewhere a run is in a session of its own."""
    asked = []
    process = types.SimpleNamespace(poll=lambda: None, wait=lambda: 130,
                                    terminate=lambda: asked.append('terminate'))

    def watch():
        raise KeyboardInterrupt
    monkeypatch.setattr(flat_bench, 'os', types.SimpleNamespace(name=system))
    with pytest.raises(KeyboardInterrupt):
        flat_bench.wait(process, watch)
    assert asked == sent


@pytest.mark.skipif(os.name != 'posix', reason='Windows has no such signal')
def test_a_hang_up_stops_a_comparison_unless_it_is_to_be_ignored():
    assert signal.SIGHUP in flat_bench.stop_signals()
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert signal.SIGHUP not in flat_bench.stop_signals()
    finally:
        signal.signal(signal.SIGHUP, handler)


LOGGED = "open(f'{folder}/log.csv', 'w').write('iter,ms_per_iter,val_loss,wall_s\\n9,5,2.5,3\\n')"


@pytest.mark.parametrize('code, error, result', [
    ('os.kill(os.getpid(), 9)', 'signal 9 ended it', None),
    ("sys.exit('train.py: no memory')", 'no memory', None),
    ("print('done: 3 iterations')", 'no log.csv there', None),
    ("sys.exit('train.py: the run diverged: x')", None, {'error': 'the run diverged: x', 'peak_mb': None}),
    (f"{LOGGED}\nprint('done: 9 iterations in 3 s, best val loss 2.5, peak memory 1,234 MB; next: x')", None,
     {'error': None, 'peak_mb': 1234})])
def test_compare_keeps_what_would_come_again(tmp_path, code, error, result):
    variant = fake_variant(tmp_path, f"import os, sys\nfolder = sys.argv[1].partition('=')[2]\n{code}")
    path = str(tmp_path / 'run')
    try:
        found = flat_bench.train_variant(variant, 1, path, None)
    except OSError as caught:
        found = str(caught)
    assert found is None if error is None else re.search(error, found)
    kept = flat_bench.read_run(path)
    assert (kept is None) == (result is None) and (not kept or result.items() <= kept.items())


def test_compare_says_early_how_long_it_takes(tmp_path, capsys):
    """Once, by what train.py itself prints."""
    watch, printed = flat_bench.foretell(tmp_path, 6), tmp_path / 'printed.txt'
    row = dict.fromkeys(flat_train.LOG_FIELDS, 0.5) | {'iter': 4, 'ms_per_iter': 90.0}
    for text in ('', 'run: 2,000 iterations of 64 tokens\n', flat_train.describe(row, 9), '\nmore\n'):
        with open(printed, 'a', encoding='utf-8') as f:
            f.write(text)
        watch()
    assert capsys.readouterr().out == '3:00 a run, 18:00 for 6, besides evaluations\n'  # 2,000 of 0.09 s


def test_compare_times_steps(folder, monkeypatch):
    monkeypatch.setattr(flat_bench, 'STRETCH', (5, 60.0))
    ms, iterations = flat_bench.time_steps(flat_variant('--max_iters=1000000'), 1, 'out')
    rows = [float(row['ms_per_iter']) for row in log_rows('out') if row['wall_s'] and int(row['iter']) > 4]
    assert iterations == 1_000_000 and min(rows) <= ms <= max(rows) and len(rows) >= 5


@pytest.mark.parametrize('args, message', [
    (["--variants=['', '--normm=x']"], "variant '--normm=x': .*unknown setting 'normm'; did you mean 'norm'"),
    (["--variants=['', '--n_head=3']"], "variant '--n_head=3': invalid config: .*n_head must divide"),
    (["--variants=['', '--optimizer=sgd']"], "variant '--optimizer=sgd': optimizer='sgd' is none of"),
    (["--variants=['', '--dataset=nowhere']"], "variant '--dataset=nowhere': data.nowhere is not prepared"),
    (["--variants=['', '--block_size=2000']"], "variant '--block_size=2000': .*needs block_size"),
    (["--variants=['', '--max_iters=x']"], "variant '--max_iters=x': .*max_iters must be int"),
    (["--variants=['', '--out_dir=x']"], "variant '--out_dir=x': out_dir: leave it out"),
    (["--variants=['', '--seed=1337']"], "variant '--seed=1337': seed: leave it out"),
    (["--variants=['', '--time_limit=1']"], "variant '--time_limit=1': time_limit: leave it out"),
    (['--max_iters=0', "--variants=['']"], "variant 'base': max_iters: leave it out"),
    (["--variants=['--init_from=resume']"], "variant '--init_from=resume': init_from: leave it out"),
    (["--variants=['', 'no-such-branch:']"], "variant 'no-such-branch:': no-such-branch is no revision"),
    (["--variants=['', '']"], "'base' twice"), (["--variants=[3]"], 'must be texts'), ([], 'must be texts'),
    (['no_list'], "no list 'no_list', but positions, "), (['norms', 'mlp'], "cannot use 'mlp'"),
    (["--variants=['', '--n_embd=512']", '--match=params'], "--n_embd=512': no d_ff gives it the 33,728"),
    (['--seeds=0'], 'seeds=0 must be at least 1'), (['--match=loss'], "match='loss' is none of"),
    (['--by=steps'], "by='steps' is none of iter, tokens, time")])
def test_compare_refuses_in_one_line_before_any_run(folder, args, message):
    with pytest.raises(ValueError, match=message) as error:
        run('bench.py', 'compare', *TOY, *args)
    assert '\n' not in str(error.value) and not os.path.exists('out-compare')


def test_paired_confidence():
    """Quantiles against Student's density integrated, coverage and power by simulation."""
    for n in (*range(2, 33), 61, 200):
        differences = np.arange(n) - (n - 1) / 2 + 3
        mean, low, high = flat_bench.paired_difference(list(differences), [0.0] * n)
        t = (high - low) / 2 / (differences.std(ddof=1) / n ** 0.5)
        x, df = np.linspace(0, t, 20001), n - 1
        scale = math.gamma((df + 1) / 2) / math.gamma(df / 2) if df < 300 else 0
        density = scale / (df * math.pi) ** 0.5 * (1 + x * x / df) ** (-(df + 1) / 2)
        assert 2 * np.trapezoid(density, x) == pytest.approx(0.95, abs=3e-4), n
        assert mean == pytest.approx(3) and low + high == pytest.approx(6)
    rng = np.random.default_rng(0)

    def verdicts(n, shift, tries=2000):
        seeds = rng.normal(1.5, 0.05, (tries, n, 1))  # what both have of their seed, far more than the shift
        pairs = seeds + rng.normal(0, 0.004, (tries, n, 2)) + [0, shift]
        return [flat_bench.judge(*flat_bench.paired_difference(list(p[:, 1]), list(p[:, 0]))[1:])
                for p in pairs]
    for n in (2, 3, 5):
        found = verdicts(n, 0)
        assert found.count('no difference seen') / len(found) == pytest.approx(0.95, abs=0.02)
        assert found.count('better') / len(found) == pytest.approx(0.025, abs=0.012)
    assert verdicts(6, 0.015).count('worse') > 1900 and verdicts(6, -0.015).count('better') > 1900  # 1%
    assert flat_bench.paired_difference([2.0], [1.5]) == (0.5, None, None)
    with pytest.raises(ValueError):
        flat_bench.paired_difference([1.0, 2.0], [1.0])


def flat_variant(*args, name='x'):
    return flat_bench.Variant(name, 'WORK', ROOT, [*TOY, *args], data='data/toy', cache=0)


@pytest.mark.parametrize('match, given, options', [
    ('params', {}, dict(mlp='gelu')), ('active', {}, dict(norm='layernorm', bias=True, d_ff=40)),
    ('params', {}, dict(n_expert=4)), ('active', {}, dict(n_expert=4)), ('params', {}, dict(n_kv_head=1)),
    ('active', dict(n_expert=4), dict(mlp='gelu')), ('params', {}, dict(n_expert=4, d_expert=64)),
    ('active', {}, dict(MLA, n_expert=4, n_shared_expert=1, n_dense_layer=1)),
    ('params', {}, dict(wiring='sandwich', mixer_pattern='DA'))])
def test_compare_matches_parameters(folder, capsys, match, given, options):
    first = flat_variant('--n_embd=48', '--n_head=2', *(f'--{k}={v}' for k, v in given.items()), name='first')
    other = flat_variant('--n_embd=48', *(f'--{k}={v}' for k, v in options.items()))
    flat_bench.match_variants(first, [other], match, 1337)
    counts = []
    for variant in (first, other):
        args = configure({**vars(flat_train), '__name__': 'x'}, 'GPTConfig', argv=variant.args)[1]
        model = GPT(GPTConfig(**{'vocab_size': 23, **args}))
        experts = [w for name, w in model.named_parameters() if 'experts.' in name]
        idle = sum(w.numel() for w in experts) // 2 if match == 'active' else 0  # 2 of 4
        counts.append(sum(w.numel() for w in model.state_dict().values()) - idle)
        if variant is other:
            assert variant.params in (0, counts[1] + idle)  # 0: nothing was to do
    assert abs(counts[1] / counts[0] - 1) <= 0.01
    said = re.findall(r'x: (d_ff|d_expert)=(\d+) \(was \d+\)', capsys.readouterr().out)
    assert said == [tuple(arg[2:].split('=')) for arg in other.args[len(TOY) + 1 + len(options):]]


def test_compare_matches_only_what_it_can_count():
    other = flat_variant()
    other.cache = None
    with pytest.raises(ValueError, match="variant 'x': match=params counts by the working tree's model.py"):
        flat_bench.match_variants(flat_variant(), [other], 'params', 1337)


def test_compare_matches_wall_clock(folder, monkeypatch, capsys):
    """Steps are timed by turns, once; the iterations follow, whatever else has set the length."""
    times, order = {'first': iter([40.0, 44.0]), 'x': iter([30.0, 33.0])}, []

    def time_steps(variant, seed, folder):
        assert not os.path.exists(folder)
        os.makedirs(folder)
        order.append(variant.name)
        return next(times[variant.name]), 500
    monkeypatch.setattr(flat_bench, 'time_steps', time_steps)
    monkeypatch.setattr(flat_bench, 'code_digest', str)  # the folder may have much more in it
    for _ in range(2):
        first, other = flat_variant(name='first'), flat_variant('--mlp=gelu', '--lr_decay_iters=7')
        flat_bench.match_variants(first, [other], 'time', 1337)
        config = configure({**vars(flat_train), '__name__': 'x'}, 'GPTConfig', argv=other.args)[0]
        assert config['max_iters'] == round(500 * 42 / 31.5) == 667 and config['lr_decay_iters'] is None
    assert order == ['first', 'x', 'first', 'x'] and first.args == TOY
    assert 'x: 667 iterations of 31.5 ms take as long as 500 of 42.0 ms' in capsys.readouterr().out


def test_compare_runs_revisions(folder, monkeypatch, capsys):
    """A revision runs with its own code and config files; runs are told apart by code, not by comments."""
    if not shutil.which('git'):
        pytest.skip('needs git')
    repo = folder / 'repo'
    (repo / 'config').mkdir(parents=True)
    names = ['train.py', 'model.py', 'sample.py', 'prepare.py', 'configurator.py', 'config/default.py']
    for name in names:
        shutil.copyfile(ROOT / name, repo / name)

    def git(*args):
        subprocess.run(['git', '-c', 'user.name=x', '-c', 'user.email=x@x', *args], cwd=repo, check=True,
                       capture_output=True)

    def edit(name, old, new):
        text = (repo / name).read_text(encoding='utf-8')
        assert text.count(old) == 1
        (repo / name).write_text(text.replace(old, new), encoding='utf-8')
    git('init', '-q')
    edit('model.py', "round_up(8 * self.n_embd / 3)", "7 * self.n_embd")  # instead of 128
    git('add', '.')
    git('commit', '-qm', 'one')
    shutil.copyfile(ROOT / 'model.py', repo / 'model.py')
    git('commit', '-qam', 'two')
    monkeypatch.setattr(flat_bench, 'ROOT', repo)
    (folder / 'place').mkdir()
    old = flat_bench.make_variant('HEAD~1:', 'HEAD~1:', TOY, folder / 'place', {})
    assert old.params == 33728 + 2 * 3 * 32 * (7 * 32 - 128) and old.data == os.path.join('data', 'toy')

    def run_of(revision, *args):
        code = flat_bench.copy_code(revision, folder / 'place')
        variant = flat_bench.Variant('x', revision, code, data='data/toy', args=flat_bench.place_configs(
            ['config/default.py', *TOY, *args], code))
        assert variant.command('o')[1:3] == [str(code / 'train.py'), str(code / 'config' / 'default.py')]
        return flat_bench.run_folder(variant, 1)
    head = run_of('HEAD')
    assert run_of('HEAD~1') == flat_bench.run_folder(old, 1) != head == run_of('WORK')
    edit('model.py', 'class MLP(nn.Module):\n    """', 'class MLP(nn.Module):  # a comment\n    """An MLP: ')
    for name in ('bench.py', 'test_model.py', 'README.md', '.ci.toml', 'config/other.py'):
        (repo / name).write_text('x', encoding='utf-8')
    assert run_of('WORK') == head
    (repo / 'printed.log').write_text('what this comparison prints is no part of it', encoding='utf-8')
    assert run_of('WORK') == head
    for name in ('mixers.py', 'test_time_training.py', 'benchmark.py', 'table.json'):  # not committed
        (repo / name).write_text('new = 1', encoding='utf-8')
        if not name.endswith('.py'):
            git('add', name)
        assert run_of('WORK') not in (head, run_of('HEAD')), name
        os.remove(repo / name)
    git('reset', '-q')
    edit('config/default.py', 'n_embd = 192', 'n_embd = 128')
    assert run_of('WORK') != head
    (repo / 'large.bin').write_bytes(bytes(2**20 + 1))
    git('add', 'large.bin')
    capsys.readouterr()
    assert not (flat_bench.copy_code('WORK', folder / 'place') / 'large.bin').exists()
    assert re.search('not copied .*large.bin', capsys.readouterr().out)
    with pytest.raises(ValueError, match="variant 'old': .*max_iters must be int"):
        flat_bench.make_variant('old', 'WORK: --max_iters=x', TOY, folder / 'place', {})


def test_compare_depends_on_files_as_they_were(folder, monkeypatch):
    """A config file is read once; a checkpoint counts that a config file names."""
    monkeypatch.setattr(flat_bench, 'try_out', lambda variant: setattr(variant, 'data', 'data/toy'))
    monkeypatch.setattr(flat_bench, 'code_digest', lambda code: '')
    code = folder / 'code'
    code.mkdir()
    (folder / 'one.py').write_text("init_from = 'start.pt'\n", encoding='utf-8')
    (folder / 'start.pt').write_bytes(b'a')

    def variant():
        return flat_bench.make_variant('x', 'one.py', TOY, folder, {'WORK': code})
    first = variant()
    path = flat_bench.run_folder(first, 1)
    assert first.init_from == 'start.pt' and flat_bench.run_folder(variant(), 1) == path
    (folder / 'start.pt').write_bytes(b'other')
    assert flat_bench.run_folder(variant(), 1) != path
    (folder / 'one.py').write_text('eval_only = True\n', encoding='utf-8')
    assert first.args[:-1] == TOY and Path(first.args[-1]).read_text(encoding='utf-8').startswith('init')
    with pytest.raises(ValueError, match="variant 'x': eval_only: leave it out"):
        variant()
    (folder / 'one.py').write_text('seed = 3\n', encoding='utf-8')
    with pytest.raises(ValueError, match="variant 'x': seed: leave it out"):
        variant()
    # but it may be in a file that all share: compare has it from there
    assert flat_bench.make_variant('x', '--n_head=4', [*TOY, 'one.py'], folder, {'WORK': code}).args


@pytest.mark.parametrize('text, revision, args', [
    ('', 'WORK', []), ('WORK:', 'WORK', []), ('HEAD~1:', 'HEAD~1', []),
    ('--device=cuda:1', 'WORK', ['--device=cuda:1']),
    ("HEAD: --norm=layernorm --start='a b'", 'HEAD', ['--norm=layernorm', '--start=a b']),
    (' my/branch^2:--mlp=gelu', 'my/branch^2', ['--mlp=gelu']),
    ('c:/a.py --n=1', 'WORK', ['c:/a.py', '--n=1'])])
def test_compare_reads_variants(text, revision, args):
    assert flat_bench.parse_variant(text) == (revision, args)


def test_compare_reads_paths_of_windows(monkeypatch):
    monkeypatch.setattr(flat_bench, 'os', types.SimpleNamespace(name='nt'))
    assert flat_bench.parse_variant(r"c:\a.py --start='a b'") == ('WORK', [r'c:\a.py', '--start=a b'])


def test_every_list_of_variants_can_be_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('pystdlib_byte', 'shakespeare_char'):
        write_toy(tmp_path / 'data' / name, vocab_size=257)
    lists = runpy.run_path(str(ROOT / 'config' / 'variants.py'))['LISTS']
    for each in lists.values():
        known = {'base', 'match', 'variants'}
        assert each.keys() <= known and each.get('match') in (None, 'params', 'active', 'time')
        variants = []
        for name, text in flat_bench.named_variants(each['variants']).items():
            revision, args = flat_bench.parse_variant(text)
            args = [*shlex.split(each['base']), *args]
            assert revision == 'WORK' and flat_bench.settle(args)[0].num_params() > 1e5
            variants.append(flat_bench.Variant(name, revision, ROOT, args, cache=0))
        assert len({tuple(variant.args) for variant in variants}) == len(variants) > 1
        if each.get('match') in ('params', 'active'):
            flat_bench.match_variants(variants[0], variants[1:], each['match'], 1337)


def fake_log(path, losses, seconds):
    path.mkdir(parents=True)
    with open(path / 'log.csv', 'w', encoding='utf-8', newline='') as f:
        writer = csv.DictWriter(f, flat_train.LOG_FIELDS)
        writer.writeheader()
        for it, loss in losses.items():
            writer.writerow({'iter': it, 'tokens': it * 64, 'ms_per_iter': 5, 'wall_s': it * seconds,
                             'val_loss': '' if loss is None else loss})
    return flat_bench.read_log(str(path))


def test_curves_of_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one = fake_log(tmp_path / 'a', {1: None, 10: 3.0, 17: 2.5, 20: 2.0}, 0.5)  # was stopped at 17
    two = fake_log(tmp_path / 'b', {1: None, 10: 3.5, 20: 2.25}, 0.7)
    for by, x in ('iter', [10, 20]), ('tokens', [640, 1280]), ('time', [6, 12]):
        at, mean, spread = flat_bench.curve([one, two], by)
        assert (at == x).all() and (mean == [3.25, 2.125]).all()
        assert spread == pytest.approx([0.5 / 2 ** 0.5, 0.25 / 2 ** 0.5])
    with pytest.raises(FileNotFoundError, match='nowhere: no log.csv there'):
        run('bench.py', 'plot', 'a', 'nowhere')
    fake_log(tmp_path / 'c', {10: 1.0}, 1)
    (tmp_path / 'c' / 'log.csv').write_text('iter,val_loss,wall_s\n1,,3\n', encoding='utf-8')
    with pytest.raises(ValueError, match='log.csv has no val_loss yet'):
        run('bench.py', 'plot', 'c')
    with pytest.raises(ValueError, match='plot takes folders'):
        run('bench.py', 'plot')
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 'matplotlib', None)
        patch.setitem(sys.modules, 'matplotlib.figure', None)
        patch.setitem(sys.modules, 'matplotlib.backends.backend_agg', None)
        with pytest.raises(ImportError, match='pip install matplotlib'):
            run('bench.py', 'plot', 'a')
    pytest.importorskip('matplotlib')
    for _ in range(2):
        run('bench.py', 'plot', 'a', 'b', '--by=time', '--json=numbers.jsonl')
    assert 'a: val loss 2.0000 after 20 iterations\nb: val loss 2.2500' in capsys.readouterr().out
    one, two = map(json.loads, Path('numbers.jsonl').read_text(encoding='utf-8').splitlines())
    assert one == two and one['loss'] == {'a': 2.0, 'b': 2.25}
    assert Path(one['plot']).read_bytes().startswith(b'\x89PNG')
    run('bench.py', 'plot', 'b')
    assert len(glob.glob('out-compare/plot-*.png')) == 2


@pytest.mark.parametrize('args, message', [
    (['params', '--max_iters=3'], '--max_iters=3: params has no use for it; it reads GPTConfig'),
    (['params', '--init_from=out', '--dataset=x'], 'vocabulary is that of the model that is loaded'),
    (['train', '--prompt_len=3'], '--prompt_len=3: train has no use'),
    (['decode', '--optimizer=muon'], '--optimizer=muon: decode'),
    (['eval', '--seed=3'], '--seed=3: eval has'), (['cost', '--init_from=x'], ': cost has'),
    (['compare', '--vs=x'], '--vs=x: compare has'), (['plot', '--n_layer=3'], ': plot has no'),
    (['check', '--steps=3'], '--steps=3: check has'), (['decode', 'out'], "decode cannot use 'out'"),
    (['eval', 'a.txt', 'b.txt'], "eval cannot use 'b.txt'"), (['check', 'out', 'o'], "check cannot use 'o'"),
    (['params', '--dataset=typo'], 'typo is not prepared'),
    (['check', 'out', '--dataset=typo'], 'vocabulary is that of the model that is loaded'),
    (['train', '--init_from=out', '--dataset=typo'], '--dataset=typo: the vocabulary is that of the model'),
    (['tain'], "'tain' is none of train, .*: say first what to do"), ([], "'' is none of train")])
def test_bench_refuses_what_an_instrument_does_not_read(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run('bench.py', *args)


def test_bench_lets_config_files_have_what_others_read(tmp_path):
    (tmp_path / 'c.py').write_text("dataset = 'nowhere'\nsteps = 3\nn_layer = 1\n", encoding='utf-8')
    run('bench.py', 'params', str(tmp_path / 'c.py'))


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
    for name in flat_bench.CHECKS:
        if not name.startswith('compiles'):  # takes seconds; see test_bench_check
            holds, remark = check_one(flat_bench, name, options)
            assert holds, f"{name}: {remark}"


@pytest.mark.parametrize('name, expected', [
    ('deepseek_v3', dict(n_layer=2, n_dense_layer=1, n_expert=8, n_group=4, topk_group=2, n_expert_active=4,
                         q_lora_rank=20, kv_lora_rank=16, balance_bias=True)),
    ('mixtral_8x7b', dict(n_layer=2, n_head=8, n_kv_head=2, n_expert=8, n_expert_active=2)),
    ('falcon_7b', dict(n_layer=2, n_head=4, n_kv_head=1, wiring='parallel')),
    ('qwen3_30b_a3b', dict(n_head=8, n_kv_head=2, n_expert=8, n_expert_active=4)),
    ('mistral_7b', dict(window=3, window_pattern='S', block_size=24, vocab_size=61)),
    ('hybrid_small', dict(n_layer=3, mixer_pattern='DDA', linear_n_key_head=2, linear_n_value_head=4,
                          partial_rotary_factor=0.25, head_dim=8))])
def test_a_small_model_of_the_same_kind(name, expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, args = configure({**vars(flat_train), '__name__': 'x'}, 'GPTConfig', argv=[f'config/{name}.py'])
    small = flat_bench.shrunk(GPTConfig(**args))
    assert {key: getattr(small, key) for key in expected} == expected
    assert GPT(small).num_params() < 100_000


def test_bench_check(folder, capsys, monkeypatch):
    out, numbers = bench(capsys, 'check', str(ROOT / 'config' / 'qwen3_8b.py'))
    found = [line for line in out.splitlines() if line.startswith(('ok ', 'FAIL'))]
    assert all(line.startswith('ok   ') for line in found)
    assert len(found) == numbers['passed'] == len(flat_bench.CHECKS)
    assert numbers['failed'] == [] and numbers['family'] == 'qwen3'
    for args, message in ((['nowhere.pt'], 'no checkpoint at nowhere.pt'),
                          (['--device=cuda'], 'leave it out'), (['out', '--init_from=out'], 'give one')):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            run('bench.py', 'check', *args)
    family = flat_bench.check_family(GPTConfig(**SMALL, residual_lambdas=True))
    assert family.startswith('no published family')

    train('--out_dir=out', '--max_iters=1')
    some = ['causal at every position', 'targets are the next tokens']
    monkeypatch.setattr(flat_bench, 'CHECKS', {name: flat_bench.CHECKS[name] for name in some})
    flat_bench.check(flat_bench.config, {}, ['out'])
    name = f"weights of {os.path.join('out', 'ckpt.pt')}"
    assert f"ok   {name}: finite, and its cache equals no cache in 16 tokens" in capsys.readouterr().out
    saved = torch.load('out/ckpt.pt', weights_only=True)
    saved['model']['h.1.mlp.c_fc.weight'][0, 0] = math.nan
    torch.save(saved, 'out/ckpt.pt')
    numbers = flat_bench.check(flat_bench.config, {}, ['out'])
    *_, line, _ = capsys.readouterr().out.splitlines()
    assert numbers['failed'] == [name] and numbers['passed'] == 2
    assert line.startswith(f"FAIL {name}: h.1.mlp.c_fc.weight is not finite; look at ")



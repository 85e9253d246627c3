"""Settings from files and flags, errors in one line, and the machine."""
import contextlib
import dataclasses
import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import common
import pytest
from common import ROOT

import configurator
import prepare
import train
from configurator import runtime
from model import MIXERS, BaseAttention, GPTConfig

MODEL = '''
raise SystemExit('model.py was imported')

class GPTConfig:
    n_layer: int = 12               # blocks
    n_embd: int = 768
    # positions ---------------------------
    rope_scaling: dict | None = None  # {'type': 'yarn'} [changeable]
    pattern: tuple[str, ...] = ('S', 'L')  # on one line
    # experts [if n_expert]
    n_expert: int | None = None     # number
    d_expert: int | None = None     # width
    # others
    kind: Literal['a', 'b'] = 'a'   # one of two
    table: 'TABLE | None' = None    # a key

    def method(self):
        hidden = 3  # no field
'''
SCRIPT = '''
"""
A script, as ours are built.
    $ python script.py --batch_size=8
    example = 3
"""
import os
from configurator import configure

ROOT = os.sep
# files ------------------------------
out_dir = 'out'                     # checkpoints go here [fixed]
init_from = 'scratch'
start = '\\n'                        # text, FILE:name
learning_rate: float = 6e-4         # peak, after warm-up
min_lr: float | None = None         # None: a tenth
max_iters = 100
share = 0.5                         # of all [> 0] [<= 1]
                                    # more words [if decay_lr]
below: float = -1.0                 # any
optimizer = 'adamw'                 # a key [in OPTIMIZERS]
compile: bool | str = 'auto'
decay_lr = True
stop: str | list[str] | None = None
sizes: list[int] | None = None      # several [>= 1]
settings = configure(globals(), 'GPTConfig', words=1, default_file='config/default.py',
                     tune_file='config/tune.py')
config, model_args, words, given, *_ = settings
not_a_setting = 3
'''


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A function: command line -> the globals of a script that is started with it in a new folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'config').mkdir()
    (tmp_path / 'examples').mkdir()
    (tmp_path / 'examples/b.py').write_text('n_layer = 5')
    (tmp_path / 'config/default.py').write_text('max_iters = 7\nn_embd = 8\n')
    (tmp_path / 'config/tune.py').write_text('max_iters = 2\n')
    (tmp_path / 'config/a.py').write_text(
        "import math\nfrom os import path\n_half = 0.5\nN = 3\n"
        "def twice(x): return [x * _i for _i in (1, 2)][-1]\n"
        "max_iters = twice(max_iters)\nn_embd = 64 * n_layer\nout_dir = 'é'\nlearning_rate = _half / 1000\n"
        "decay_lr = 0\nfor i in range(3): pass\ndel i\n", encoding='utf-8')
    (tmp_path / 'model.py').write_text(MODEL)
    (tmp_path / 'script.py').write_text(SCRIPT, encoding='utf-8')
    (tmp_path / 'train.py').write_text("eval_iters: int = 200\nconfigure(globals())\n")

    monkeypatch.setattr(configurator, 'ROOT', tmp_path)

    def start(*argv, name='__main__'):
        monkeypatch.setattr(sys, 'argv', ['script.py', *argv])
        monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
        return runpy.run_path('script.py', run_name=name)
    return start


@pytest.mark.parametrize('arg, value', [
    ('--learning_rate=1', 1.0), ('--max_iters=1e6', 1000000), ('--out_dir=None', 'None'),
    ('--start=a=b', 'a=b'), ('--min_lr=None', None), ('--compile=auto', 'auto'), ('--compile', True),
    ('--decay_lr=false', False), ("--stop=['a', 'b']", ['a', 'b']), ('--stop=12', '12'),
    ("--pattern=('S',)", ('S',)), ('--out_dir=~/x', os.path.expanduser('~/x')), ('--out_dir=a~', 'a~'),
    ('--sizes=[1.0, 2]', [1, 2]), ('--kind=b', 'b'), ('--table=None', None)])
def test_a_flag_has_the_type_of_its_setting(arg, value, script):
    name = arg.removeprefix('--').partition('=')[0]
    found = script('config/default.py', arg)
    where = 'config' if name in found else 'model_args'
    assert found[where][name] == value and type(found[where][name]) is type(value)
    assert found['given'][name] == 'flags'


@pytest.mark.parametrize('arg, message', [
    ('--learing_rate=1', "unknown setting 'learing_rate'; did you mean 'learning_rate'"),
    ('--max-iters=1', "did you mean 'max_iters'"), ('--learn=1', "did you mean 'learning_rate'"),
    ('--sizes=[1.5]', 'sizes must be a list of integers or None'),
    ('--out_dir', 'text, got True'), ('--min_lr=none', 'a number or None'),
    ('nope.py', 'there is no config file nope.py: neither here nor in '),
    ('config/type.py', 'config/type.py: max_iters must be an integer, got 2.5'),
    ('config/bad.py', 'SyntaxError: invalid syntax (bad.py, line 1)')])
def test_typos_and_wrong_types_are_one_error(arg, message, script, tmp_path):
    (tmp_path / 'config/type.py').write_text('max_iters = 2.5')
    (tmp_path / 'config/bad.py').write_text('max_iters = = 2')
    with pytest.raises(ValueError, match=re.escape(message)):
        script(arg)


def test_files_and_flags_override_from_left_to_right(script, capsys, monkeypatch):
    """A config file can compute, and can read earlier settings."""
    found = script('--max_iters=5', '--n_layer=2', 'config/a.py', '--learning_rate=2', 'look')
    assert found['max_iters'] == 10 and found['out_dir'] == 'é' and found['decay_lr'] is False
    assert found['learning_rate'] == found['config']['learning_rate'] == 2.0 and found['words'] == ['look']
    assert found['model_args'] == {'n_layer': 2, 'n_embd': 128}
    assert found['given']['n_embd'] == 'config/a.py' and found['given']['n_layer'] == 'flags'
    out = capsys.readouterr().out
    assert "config/a.py: max_iters = 10, n_embd = 128, out_dir = 'é'" in out and 'learning_rate = 2.0' in out
    monkeypatch.setenv('RANK', '1')  # only rank 0 prints
    assert script('config/a.py', '--max_iters=5')['max_iters'] == 5
    assert capsys.readouterr().out == ''


def test_the_default_file_comes_first_unless_a_file_is_named(script):
    """A trained model has its own file. A run that is resumed uses neither."""
    for found in script(), script('--init_from=auto'):
        assert found['max_iters'] == 7 and found['model_args'] == {'n_embd': 8}
    found = script('--init_from=gpt2', '--n_layer=3')
    assert found['max_iters'] == 2 and found['model_args'] == {'n_layer': 3}
    assert script('--init_from=resume')['max_iters'] == 100 and script('config/a.py')['max_iters'] == 200
    assert script('examples/b.py')['model_args'] == {'n_embd': 8, 'n_layer': 5}  # extends the default file
    hook, found = sys.excepthook, script('--max_iters=5', 'nope.py', name='script')  # imported
    assert found['max_iters'] == 100 and sys.excepthook is hook


@pytest.mark.parametrize('text, message', [
    ('eval_iters = 3', None), ('import time\n_x = 3\nX = 3\ndef f(): pass', None),
    ('ghost = 3', "unknown setting 'ghost'; see"), ('max_iter = 9', "'max_iter'; did you mean 'max_iters'"),
    ('eval_iter = 9', "'eval_iter'; did you mean 'eval_iters'"), ('eval_iters = ""', 'must be an integer'),
    ('other = 9', "unknown setting 'other'")])
def test_a_file_may_have_settings_of_train_and_helpers_but_no_others(text, message, script, tmp_path):
    (tmp_path / 'other.py').write_text('other = 3\nconfigure(globals())')
    (tmp_path / 'config/b.py').write_text(f'max_iters = 9\n{text}')
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        assert script('config/b.py')['given'] == {'max_iters': 'config/b.py'}


@pytest.mark.parametrize('line, rules', [
    ('count = 3 # it [< 9]', ['< 9', '>= 0']), ('count = 3# it [< 9]', ['< 9', '>= 0']),
    ('count = 3  # it\n # [< 9]', ['< 9', '>= 0']), ('# all [< 9]\ncount = 3', ['< 9', '>= 0']),
    ('count = [3,\n 4]', None), ('count = (\n    3)', None), ('count: Literal[3,\n  4] = 3', None),
    ('count =3', None), ('count = f(3)', None), ("count = 'a  # b'", None)])
def test_a_setting_is_read_or_named(line, rules, tmp_path):
    path = tmp_path / 'x.py'
    path.write_text(f'other = 1\n{line}\nconfigure(globals())')
    with pytest.raises(ValueError, match='x.py: write count in one line') if rules is None else (
            contextlib.nullcontext()):
        assert configurator.declared(path)['count'].rules == rules


def test_help_is_the_source(script, capsys):
    with pytest.raises(SystemExit) as e:
        script('--max_iters=5', '-h')
    out = capsys.readouterr().out
    at = [out.index(line) for line in (
        '$ python script.py --batch_size=8', '# files', "out_dir = 'out'                     # checkpoints",
        'n_layer: int = 12               # blocks', '# positions', '# on one line')]
    assert e.value.code == 0 and at == sorted(at) and 'not_a_setting' not in out and 'hidden' not in out


def test_the_fields_of_our_model_are_read_as_they_are():
    read = configurator.declared(ROOT / 'model.py')
    for field in dataclasses.fields(GPTConfig):
        assert read[field.name].default == field.default
        assert type(field.default).__name__.removesuffix('Type') in read[field.name].kinds


@pytest.mark.parametrize('arg, message', [
    ('--share=1', None), ('--share=1.01', 'share=1.01 is not supported: it must be <= 1'),
    ('--share=0', 'it must be > 0'), ('--max_iters=-1', 'it must be >= 0'), ('--below=-2', None),
    ('--optimizer=sgd', 'optimizer=.sgd. is not supported: it must be one of adamw, muon'),
    ('--n_expert=-1', '>= 0'), ('--sizes=[1, 0]', 'it must be >= 1'),
    ('--min_lr=None', None), ('--learning_rate=nan', 'a number, got')])
def test_values_must_fulfil_the_rules_of_their_line(arg, message, script):
    def check():
        found = script(arg)
        values = found['config'] | found['model_args']
        configurator.check_values(found['settings'], values, {'OPTIMIZERS': {'adamw': 1, 'muon': 2}})
    if message is None:
        return check()
    with pytest.raises(ValueError, match=message):
        check()


def test_flags_without_effect_are_rejected_and_config_files_serve_many_runs(script, tmp_path):
    (tmp_path / 'config/b.py').write_text('share = 0.4\nd_expert = 3')
    for args, message in ((['config/b.py', '--decay_lr=False'], None), (['--share=0.4'], None),
                          (['--share=0.4', '--decay_lr=False'], '--share has no effect: it needs decay_lr'),
                          (['--d_expert=3'], '--d_expert has no effect: it needs n_expert'),
                          (['--n_expert=2', '--d_expert=3', '--kind=b'], None)):
        found = script(*args)
        values = {'n_expert': None} | found['config'] | found['model_args']
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            configurator.check_effects(found['settings'], values, {})


def test_every_rule_of_ours_is_python():
    """Each rule can be evaluated with the default settings. Rules name the letters of layers that are no
    attention."""
    import mixers  # noqa: F401 (adds letters)
    assert {kind for kind, mixer in MIXERS.items() if not issubclass(mixer, BaseAttention)} == {*'BCDK'}
    for name in ('train', 'sample', 'prepare', 'bench', 'zoo/hub', 'lab/compare', 'lab/check'):
        path = ROOT / f'{name}.py'
        known = configurator.declared(path) | configurator.declared(ROOT / 'model.py')
        values = {name: setting.default for name, setting in known.items()} | {'mixer_pattern': 'A'}
        tables = vars(train) | {'SOURCES': prepare.SOURCES, 'train': train, 'command': 'train',
                                'conversations': True, 'records': True}
        settings = configurator.Configured({}, {}, [], known, known, [], [])
        configurator.check_values(settings, values, tables)
        for rule in itertools.chain(*(setting.rules for setting in known.values())):
            assert re.match('fixed$|length$|changeable$|random$|training$|if |in |[<>=!]|att', rule)
            configurator.unmet([rule], tables, values)


NANOGPT = '''  # its train.py, without the sizes that GPTConfig owns
out_dir = 'out'; eval_interval = 2000; log_interval = 1; eval_iters = 200; eval_only = False
always_save_checkpoint = True; init_from = 'scratch'; wandb_log = False; wandb_project = 'owt'
wandb_run_name = 'gpt2'; dataset = 'openwebtext'; gradient_accumulation_steps = 5 * 8; batch_size = 12
learning_rate = 6e-4; max_iters = 600000; weight_decay = 1e-1; beta1 = 0.9; beta2 = 0.95; grad_clip = 1.0
decay_lr = True; warmup_iters = 2000; lr_decay_iters = 600000; min_lr = 6e-5; backend = 'nccl'
device = 'cuda'; dtype = 'bfloat16'; compile = True
'''.lstrip()


def test_nanogpts_settings_have_their_names_and_values():
    expected = {}
    exec(NANOGPT, {}, expected)
    assert all(train.config[name] in (value, 'auto', None) for name, value in expected.items())


# errors -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('code, line', [
    ("raise OSError(28, 'No space left on device', '/tmp1')", "cannot read or write ([Errno 28] No "
     "space left on device: '/tmp1'): check the path, permissions and free space"),
    ("with configurator.reading('a.json'): {}['model']",
     "cannot read a.json, which is damaged or has another format: KeyError: 'model'"),
    ("with configurator.reading(pointer): {}['model']",
     "cannot read pointer, which is a pointer of git-lfs: run `git lfs pull`"),
    ("with configurator.naming({'n': 1}): raise ValueError('n is odd')", 'n is odd'),
    ('raise KeyboardInterrupt', 'interrupted'),
    ("raise RuntimeError('CUDA out of memory. Tried')", 'out of memory: lower --batch_size (train.py: '
     'and raise --gradient_accumulation_steps by as much), --max_new_tokens or --procs'),
    *((f"open({name!r}, 'w')", f"cannot read or write ([Errno {n}] {os.strerror(n)}: {name!r}): check "
       "the path, permissions and free space") for name, n in {'/': 21, 'no/a': 2}.items()),
    ("with configurator.reading('a'): raise RuntimeError('word ' * 25 + 'cause')",
     f"cannot read a, which is damaged or has another format: RuntimeError: {'word ' * 25}cause"),
    ("raise configurator.UserError('two\\nlines')", 'two lines'),
    ("configurator.package('nonesuch')",
     'published models need nonesuch: pip install safetensors tokenizers huggingface_hub'),
    ('import nonesuch', None), ("raise ValueError('of a fork')", None), ("assert 1 > 2", None)])
def test_errors_for_the_user_are_one_line_and_bugs_a_traceback(code, line, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path('pointer').write_text('version https://git-lfs.github.com/spec/v1')
    monkeypatch.setattr(sys, 'argv', ['/somewhere/x.py', '--start=no.txt'])
    try:
        exec(compile(code, '/elsewhere/x.py', 'exec'), {**globals(), 'pointer': 'pointer'})
    except BaseException as error:
        configurator.one_line_errors(type(error), error, error.__traceback__)
    printed = capsys.readouterr().err
    assert printed == f'x.py: {line}\n' if line else 'Traceback' in printed and '/elsewhere/x.py' in printed


@pytest.mark.parametrize('script', ['train', 'sample', 'prepare', 'bench', 'zoo/hub', 'lab/compare',
                                    'lab/check'])
def test_help_and_typos_do_not_wait_for_torch(script, tmp_path):
    for name in ('torch', 'numpy', 'tokenizers', 'safetensors'):  # found first, and not importable
        (tmp_path / f'{name}.py').write_text(f'raise ImportError("{name} was imported")')
    env = {**os.environ, 'PYTHONPATH': str(tmp_path)}
    done = subprocess.run([sys.executable, str(ROOT / f'{script}.py'), '--no_such_setting=1'],
                          capture_output=True, text=True, env=env)
    name = Path(script).name
    assert done.returncode and re.fullmatch(f'{name}.py: --no_such_setting=1: unknown.*\n', done.stderr)


@pytest.mark.parametrize('name, printed', [('print', b''), ('configurator.print0', b'on')])
def test_a_closed_pipe_is_quiet(name, printed):
    code = ("import sys, configurator; sys.excepthook = configurator.one_line_errors; "
            f"[{name}(*range(10**6)) for _ in range(2)]; sys.stderr.write('on')")
    done = subprocess.run(f'"{sys.executable}" -c "{code}" | head -c 1', shell=True, capture_output=True,
                          cwd=ROOT)
    assert done.stdout == b'0' and done.stderr == printed


# the machine ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name, tflops', [  # of data sheets
    ('NVIDIA H100 80GB HBM3', 989), ('NVIDIA H100 PCIe', 756), ('Tesla T4', 65), ('NVIDIA T400 4GB', None),
    ('NVIDIA GeForce RTX 4090', 165), ('NVIDIA GeForce RTX 4090 Laptop GPU', None)])
def test_peaks_of_gpus(name, tflops):
    assert configurator.peak_tflops(name) == tflops


@pytest.mark.parametrize('device, dtype, message', [
    ('gpu', 'auto', 'device=gpu is not available'),
    ('cpu', 'float16', 'float16 needs CUDA'),
    ('cpu', 'int8', 'dtype=int8 is not supported: choose float32, bfloat16, float16 or auto')])
def test_unavailable_devices_and_dtypes(device, dtype, message):
    with pytest.raises(ValueError, match=message):
        runtime(device, dtype)


def test_a_missing_compiler_is_reported_in_one_line(tmp_path):
    env = {**os.environ, 'CXX': 'nonesuch', 'TORCHINDUCTOR_CACHE_DIR': str(tmp_path)}
    code = "import configurator; assert not configurator.can_compile('cpu')"
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env=env, cwd=ROOT)
    assert re.fullmatch('running eagerly, .*C[+][+] compiler.*nonesuch.*\n', done.stdout), done.stderr


def test_a_config_file_replaces_functions_and_extends_tables(folder, capsys):
    """Nothing else: not by a function of the same name, which may be a helper."""
    (folder / 'mine.py').write_text('''
SCHEDULES = {'step': lambda done: float(done < 0.5)}
lr_schedule = 'step'
_half = learning_rate / 2  # a config file can read the values so far
def rounded(x): pass
def patch(script):
    script.why_stop = lambda signals, time_limit: 1
    script.generate = rounded  # of sample.py
''', 'utf-8')
    (folder / 'other.py').write_text("def patch(script): script.describe = lambda *args: 'a line'")
    args = ['--min_lr=0', '--warmup_iters=0']
    found = common.train('mine.py', 'other.py', *args)
    assert 'config files change SCHEDULES, why_stop, describe\n' in capsys.readouterr().out
    assert found['SCHEDULES'].keys() == {'cosine', 'linear', 'wsd', 'step'}
    assert found['rounded'].__module__ == '__main__' and common.log_rows('out')[-1]['iter'] == '1'
    common.train('other.py', 'mine.py', *args, '--init_from=resume')  # in any order
    assert common.log_rows('out')[-1]['iter'] == '2'
    (folder / 'mine.py').write_text('def patch(script): script.why_stopp = 3', 'utf-8')
    with pytest.raises(ValueError, match='patch replaces why_stopp, which no script has'):
        common.train('mine.py')

"""Settings from files and flags; device, dtype, threads and seed in one place.

    $ python train.py config/small.py --batch_size=8 --compile=False      # overrides, from left to right

A script's settings are the lower-case names that it assigns at the top level, above configure(...); the type
of one is its annotation, else its default's. Text stays text; 1e6 may be an int, an int a float, and true,
false, 1, 0 a bool. They are read from the script's source, and GPTConfig's fields from model.py's, so --help
and typos are answered before anything slow is imported.
"""
import ast
import builtins
import contextlib
import ctypes
import difflib
import functools
import importlib.util
import os
import platform
import re
import runpy
import shutil
import sys
import sysconfig
import traceback
import types
import typing
from pathlib import Path

SCRIPTS = ('train.py', 'sample.py', 'hub.py', 'bench.py', 'prepare.py')  # a config file serves them all
PLAIN = {kind.__name__: kind for kind in (bool, int, float, str, tuple, list, dict)} | {'None': type(None)}
USER_ERRORS = (ValueError, OSError, ImportError, KeyboardInterrupt)  # one line; anything else is a bug
# what gloo and NCCL tell the ranks that wait for one that has ended
LOST_RANK = r'(?s)Connection (closed|reset) by peer|gloo.*Broken pipe|NCCL.*remote process exited'
OUT_OF_MEMORY = {  # a setting that the script has: what lowers its use of memory
    'gradient_accumulation_steps': 'halve --batch_size and double --gradient_accumulation_steps',
    'num_samples': 'lower --batch_size or --max_new_tokens',
    'procs': 'lower --procs',
    'batch_size': 'lower --batch_size',
}


def print0(*values):
    """Print on rank 0 only, at once: under torchrun one process speaks for all."""
    if os.environ.get('RANK', '0') == '0':
        print(*values, flush=True)


def script_name():
    return Path(sys.argv[0]).name


def stop(message):
    """Print one line on standard error and exit with 2, as for any wrong command line."""
    print(f"{script_name()}: {' '.join(str(message).splitlines())}", file=sys.stderr)
    raise SystemExit(2)


# the settings of a script -----------------------------------------------------------------------------------

class Settings:
    """The settings that a source file assigns, read without running it.

    kinds: {name: the types it may have, None if it has no annotation}; defaults: {name: ast node};
    help: the lines of source that assign them, each with the comments that stand right above.
    """
    def __init__(self, path, class_name=None):
        """path: a script, whose settings end at configure(...); or the dataclass class_name in a file."""
        source = Path(path).read_text('utf-8')
        body = statements(source, str(path))
        if class_name:
            classes = {node.name: node.body for node in body if isinstance(node, ast.ClassDef)}
            body = classes[class_name]
        self.kinds, self.defaults, self.help = {}, {}, []
        lines = source.splitlines()
        for node in body:
            if calls_configure(node):
                break
            name = assigned_name(node)
            if name is None:
                continue
            annotation = getattr(node, 'annotation', None)
            if class_name and annotation is None:
                raise TypeError(f"{path}, line {node.lineno}: without a type {name} is no field of "
                                f"{class_name}")
            self.kinds[name] = None if annotation is None else annotated_types(annotation)
            self.defaults[name] = node.value
            first = node.lineno - 1
            while first and lines[first - 1].lstrip().startswith('#'):
                first -= 1
            self.help += lines[first:node.end_lineno]


@functools.lru_cache(maxsize=8)
def statements(source, path):
    """Of a source file at the top level; kept, as a process may read many command lines."""
    return ast.parse(source, path).body


def calls_configure(node):
    """Whether it does, in a statement at the top level: a function that calls it is not one."""
    return not isinstance(node, (ast.FunctionDef, ast.ClassDef)) and any(
        isinstance(call, ast.Call) and getattr(call.func, 'id', '') == 'configure' for call in ast.walk(node))


def assigned_name(node):
    """The setting that a statement assigns, or None."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        target = node.target
    else:
        return None
    return target.id if isinstance(target, ast.Name) and is_setting_name(target.id) else None


def is_setting_name(name):
    return name.islower() and not name.startswith('_')


def annotated_types(node):
    """bool | str -> [bool, str]; list[int] -> [list]; None -> [NoneType]; 'int' -> [int]."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode='eval').body
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return annotated_types(node.left) + annotated_types(node.right)
    name = ast.unparse(node.value if isinstance(node, ast.Subscript) else node)
    if name not in PLAIN:
        raise TypeError(f"line {node.lineno}: a setting's type is one of {', '.join(PLAIN)}, not {name}")
    return [PLAIN[name]]


# values -----------------------------------------------------------------------------------------------------

def fit(value, kinds):
    """Return value as one of the types `kinds`: itself, or an equal float, int or bool. Else ValueError.

    1 for 1.0, 1e6 for 1000000, 1 for True; but a bool is no number, and a numpy scalar nothing plain.
    """
    if type(value) in kinds:
        return value
    for kind in (float, int, bool):
        if kind in kinds and type(value) in (int, float) and kind(value) == value:
            return kind(value)
    raise ValueError(f'{value!r} does not fit')


def parse(text, kinds):
    """Return a flag's text as one of the types `kinds`: a literal (True, 3e-4, [1, 2]) before plain text."""
    literal = {'true': 'True', 'false': 'False'}.get(text, text)
    # what is no literal, or none of this type, is text; quotes around text are a part of it
    with contextlib.suppress(ValueError, SyntaxError, TypeError, OverflowError, MemoryError, RecursionError):
        return fit(ast.literal_eval(literal), [kind for kind in kinds if kind is not str])
    return fit(text, kinds)


def find_file(name, folder):
    """The path of a config file, here or beside the script."""
    for path in (Path(name), folder / name):
        if path.is_file():
            return path
    known = sorted(path.name for path in folder.glob('config/*.py'))
    stop(f"there is no config file {name}; config/ has {', '.join(known) or 'none'}")


def run_file(name, folder, values):
    """Run a config file, plain Python that sees the settings so far, and return what it assigned."""
    path = find_file(name, folder)
    try:
        # the settings so far come as builtins, so that the globals afterwards are what the file assigned
        found = runpy.run_path(str(path), {'__builtins__': {**vars(builtins), **values}})
    except Exception as error:
        if isinstance(error, SyntaxError) and error.filename == str(path):
            line, message = error.lineno, error.msg
        else:
            frames = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
            line, message = frames[-1] if frames else '?', error
        stop(f"{name}, line {line}: {type(error).__name__}: {message}")
    assigned = {key: value for key, value in found.items()
                if key in values or is_setting_name(key) and type(value) in PLAIN.values()}
    if not assigned.keys() <= values.keys():  # what other scripts have is theirs
        others = {key for script in SCRIPTS if (folder / script).exists()
                  for key in Settings(folder / script).kinds}
        if (folder / 'model.py').exists():
            others |= Settings(folder / 'model.py', 'GPTConfig').kinds.keys()
        assigned = {key: value for key, value in assigned.items() if key in values or key not in others}
    return assigned


def checked(arg, name, value, kinds):
    """Return the value of a setting, in its type; stop with one line if there is no such setting or type."""
    if name not in kinds:
        near = difflib.get_close_matches(name.strip('-').replace('-', '_').lower(), kinds)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see --help"
        stop(f"{arg}: unknown setting {name!r}; {hint}")
    try:
        from_flag = arg.startswith('-') and isinstance(value, str)
        return parse(value, kinds[name]) if from_flag else fit(value, kinds[name])
    except (ValueError, OverflowError):
        wanted = ['True or False' if kind is bool else 'None' if kind is type(None) else kind.__name__
                  for kind in kinds[name]]
        stop(f"{arg}: {name} must be {' or '.join(wanted)}, got {value!r}")


def show(label, values):
    """Print 'label: name = value, ...' in lines of up to 100 characters, broken between settings."""
    lines, items = [f"{label}:"], [f"{name} = {value!r}," for name, value in values.items()]
    for item in items or ['nothing for this script']:
        if len(lines[-1]) + len(item) >= 100:
            lines.append('   ')
        lines[-1] += f" {item}"
    print0('\n'.join(lines).rstrip(','))


# configure --------------------------------------------------------------------------------------------------

class Configured(typing.NamedTuple):
    """What configure has found."""
    config: dict      # all the script's settings
    model_args: dict  # fields of model_config that were given
    words: list       # plain words of the command line
    given: dict       # name -> 'flags' or its config file, of all that was set, the last one last
    others: list      # flags that are the other script's alone


def configure(settings, model_config=None, words=0, argv=None, default_file=None, unless=None, also=None):
    """Override a script's settings by config files and flags, and print which.

    settings: the script's globals(). model_config: the name of a dataclass in the model.py beside the script,
    whose fields are settings too. words: how many plain words the command line may have. argv: instead of the
    command line. default_file: a config file that is loaded unless the command line names one, or has the
    flag `unless`; fields of model_config are left out of it where --init_from names a model that has its own.
    also: another script beside this one, whose flags are let through, for this one to hand on.
    An imported script leaves the command line alone.
    """
    path = Path(settings['__file__'])
    launched = settings['__name__'] == '__main__'
    own = Settings(path)
    fields = Settings(path.with_name('model.py'), model_config) if model_config else None
    config = {name: settings[name] for name in own.kinds if type(settings[name]) in PLAIN.values()}
    model_args, values, kinds = {}, dict(config), {name: own.kinds[name] for name in config}
    if fields:
        twice = own.kinds.keys() & fields.kinds.keys()
        assert not twice, f"{path.name} and {model_config} both have {', '.join(twice)}"
        values |= {name: ast.literal_eval(node) for name, node in fields.defaults.items()}  # plain literals
        kinds |= fields.kinds
    for name, value in values.items():
        if kinds[name] is None:  # without annotation: the default's type; None alone may become anything
            kinds[name] = list(PLAIN.values()) if value is None else [type(value)]
    others = Settings(path.with_name(also)).kinds.keys() - kinds.keys() if also else set()
    kinds |= dict.fromkeys(others)  # so that typos of them are known as such

    by_default = default_file is not None
    if argv is None:
        argv = sys.argv[1:] if launched else []
        by_default = by_default and launched
    if launched:
        sys.excepthook = functools.partial(one_line_errors, settings=values)
        with contextlib.suppress(AttributeError):  # a terminal that is not UTF-8 gets ? for what it lacks
            sys.stdout.reconfigure(errors='replace')
    if '-h' in argv or '--help' in argv:
        print(settings['__doc__'], *own.help, '', *(fields.help if fields else []), sep='\n')
        raise SystemExit(0)

    plain = [arg for arg in argv if arg == '-' or not arg.startswith('-') and not arg.endswith('.py')]
    if len(plain) > words:
        stop(f"cannot use {plain[words]!r}: settings are --key=value, config files end in .py")
    overrides = [arg for arg in argv if arg not in plain]
    by_default = by_default and unless not in overrides and all(arg.startswith('-') for arg in overrides)
    if by_default:
        overrides.insert(0, default_file)

    loads = any(arg.startswith('--init_from=') and arg != '--init_from=scratch' for arg in overrides)
    shown, let_through = [], []  # (config file or 'flags', {name: value}); flags in a row are shown together
    given = {}
    for arg in overrides:
        if arg.startswith('-'):
            name, equals, text = arg.removeprefix('--').partition('=')
            if name in others:
                let_through.append(arg)
                continue
            found, label = {name: text if equals else True}, 'flags'
        else:
            found, label = run_file(arg, path.parent, values), arg
            if by_default and loads:
                found = {name: value for name, value in found.items() if name in config}
        found = {name: checked(arg, name, value, kinds) for name, value in found.items()}
        values |= found
        if label == 'flags' and shown and shown[-1][0] == 'flags':
            shown[-1][1].update(found)
        else:
            shown.append((label, found))
        for name, value in found.items():
            (config if name in config else model_args)[name] = value
            given.pop(name, None)
            given[name] = label
    for label, found in shown:
        show(label, found)
    settings.update(config)
    given = {name: label for name, label in given.items() if label == 'flags' or not by_default}
    return Configured(config, model_args, plain, given, let_through)


def one_line_errors(kind, error, trace, settings=(), memory=None):
    """The excepthook of a script: one line for what users can mend, a trace for bugs (or FLATGPT_TRACE=1).

    settings: the names of the script's, which decide what it can do about memory; memory: what it can do, if
    the script knows better.
    """
    if kind is BrokenPipeError:
        os._exit(141)  # `| head` has seen enough: not a word, not even from the flush at exit
    if issubclass(kind, MemoryError) or re.search("out of memory|can't allocate memory", str(error)):
        advice = [memory] if memory else [OUT_OF_MEMORY[name] for name in OUT_OF_MEMORY if name in settings]
        message = '; '.join(['out of memory', *advice[:1]])
    elif os.environ.get('FLATGPT_TRACE'):
        sys.__excepthook__(kind, error, trace)
        return
    elif 'RANK' in os.environ and issubclass(kind, RuntimeError) and re.search(LOST_RANK, str(error)):
        message = 'this rank ends because another one has, which says why'
    elif not issubclass(kind, USER_ERRORS):
        sys.__excepthook__(kind, error, trace)
        return
    else:
        message = str(error) or ('interrupted' if kind is KeyboardInterrupt else kind.__name__)
    print(f"{script_name()}: {' '.join(message.splitlines())}", file=sys.stderr)


# the machine ------------------------------------------------------------------------------------------------

def runtime(device='auto', dtype='auto', seed=1337, threads=None, bound_by_memory=False):
    """Settle device, dtype and threads, and seed torch.

    device: cpu, cuda, cuda:1, mps, or auto, the best there is; under torchrun each rank takes its own GPU.
    dtype: float32, bfloat16, float16 (CUDA only; needs a scaler), or auto, what the hardware is fast at.
    bound_by_memory: whether the weights are read by compiled steps, or in eight bits, to generate text.
    Returns device, device_type, dtype (torch's), threads, and autocast: `with run.autocast():`, reusable.
    ValueError: there is no such device, or it cannot compute in this dtype.
    """
    import torch
    kind, index = choose_device(device)
    device = f'cuda:{index}' if kind == 'cuda' else kind
    if threads:
        torch.set_num_threads(threads)
    if kind == 'cuda':
        torch.cuda.set_device(index)
    elif kind == 'cpu':
        keep_freed_memory()
    if dtype == 'auto':
        dtype = fastest_dtype(kind, index, bound_by_memory)
    if dtype not in ('float32', 'bfloat16') and (kind, dtype) != ('cuda', 'float16'):
        raise ValueError(f"dtype={dtype}: use --dtype=auto, float32 or bfloat16; float16 needs CUDA")
    torch.set_float32_matmul_precision(matmul_precision(kind))
    # torch.manual_seed asks CUDA as well, which device=cpu must not touch
    (torch.default_generator if kind == 'cpu' else torch).manual_seed(seed)
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name(index) if kind == 'cuda' else f'{threads} threads'
    print0(f"device {device} ({name}), dtype {dtype}")
    torch_dtype = getattr(torch, dtype)
    autocast = contextlib.nullcontext if dtype == 'float32' \
        else functools.partial(torch.autocast, kind, torch_dtype)
    return types.SimpleNamespace(device=device, device_type=kind, dtype=torch_dtype, autocast=autocast,
                                 threads=threads)


def choose_device(device):
    """'auto', 'cpu', 'cuda', 'cuda:1', 'mps' -> (type, index). ValueError: there is no such device here."""
    import torch
    kind, _, index = device.partition(':')
    if kind == 'auto' and torch.cuda.is_available():
        kind = 'cuda'
    elif kind == 'auto':
        kind = 'mps' if torch.backends.mps.is_available() else 'cpu'
    count = 0
    if kind == 'cpu':
        count = 1
    elif kind == 'mps':
        count = int(torch.backends.mps.is_available())
    elif kind == 'cuda':
        count = torch.cuda.device_count()
    try:
        index = int(os.environ.get('LOCAL_RANK', index or 0)) if kind == 'cuda' else 0
    except ValueError:
        kind = None
    if kind not in ('cpu', 'mps', 'cuda'):
        raise ValueError(f"device={device}: use cpu, mps, cuda, cuda:1 or auto")
    if not 0 <= index < count:
        name = f'cuda:{index}' if kind == 'cuda' else kind
        raise ValueError(f"device={name}: torch sees {count or 'no'} {kind.upper()}; use cpu or auto")
    return kind, index


def cpu_units():
    """Whether this CPU multiplies bfloat16 in hardware: (AMX tiles, AVX-512 BF16)."""
    import torch
    return (getattr(torch.cpu, '_is_amx_tile_supported', bool)(),
            getattr(torch.cpu, '_is_avx512_bf16_supported', bool)())


def fastest_dtype(kind, index, bound_by_memory=False):
    """bfloat16 where there are units for it, float16 on older GPUs, else float32.

    On a CPU without units products of many rows take twice as long in bfloat16, but a compiled step that
    generates is done when the weights are read, half as many bytes; and torch's kernel for eight bits is fast
    in bfloat16 alone. Shapes do not decide: with AMX products of 64 take longer in bfloat16 (65 against
    13 us), but models with none that are larger are over in minutes either way.
    """
    import torch
    if kind == 'cuda':
        return 'bfloat16' if torch.cuda.get_device_capability(index) >= (8, 0) else 'float16'
    return 'bfloat16' if kind == 'cpu' and (bound_by_memory or any(cpu_units())) else 'float32'


def matmul_precision(kind):
    """What torch may do to float32 matmuls: TF32 on CUDA; on AMD's CPUs 'medium', which is exact there.

    'medium' lets oneDNN choose its own kernels in the place of MKL's, which are slow on AMD: a product takes
    0.4 of the time there. On Intel's CPUs it takes 1.2 to 2 times as long, and with AMX it would round to
    bfloat16.
    """
    if kind == 'cpu' and 'AuthenticAMD' in cpu_vendor():
        return 'medium'
    return 'high' if kind == 'cuda' else 'highest'


def cpu_vendor():
    """A text that holds the vendor of this CPU, GenuineIntel or AuthenticAMD, where the system says it."""
    with contextlib.suppress(OSError):
        return Path('/proc/cpuinfo').read_text('utf-8')
    return platform.processor()


def can_compile(device):
    """Whether torch.compile has what it needs for a CPU or GPU; if not, a line says what is missing.

    For a GPU it writes Triton, which needs a C compiler, for a CPU C++; what both build includes Python.h.
    """
    import torch
    kind, index = choose_device(device)
    variable, known = ('CC', ['gcc', 'clang']) if kind == 'cuda' else ('CXX', ['g++', 'clang++'])
    named = os.environ.get(variable, '').split()[:1]
    if sys.platform == 'win32':
        lacks = 'torch.compile is not supported here on Windows'
    elif kind == 'cuda' and torch.cuda.get_device_capability(index) < (7, 0):
        lacks = 'this GPU is too old, Triton needs capability 7.0'
    elif kind == 'cuda' and importlib.util.find_spec('triton') is None:
        lacks = 'no Triton: pip install triton'
    elif not any(map(shutil.which, named or known)):
        lacks = f"no compiler {' or '.join(named or known)}: install one, or set {variable} to its name"
    elif not Path(sysconfig.get_path('include', 'posix_prefix'), 'Python.h').exists():
        lacks = 'no Python.h: install the package python3-dev'
    else:
        return True
    print0(f"running eagerly, which is slower: {lacks}")
    return False


def keep_freed_memory():
    """Have glibc keep what is freed: else each step on CPU maps its memory anew, in 1.25 times the time."""
    mmap_threshold, trim_threshold, top_pad = -3, -1, -2  # of malloc.h
    with contextlib.suppress(AttributeError, OSError, TypeError):  # glibc alone has mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(top_pad, 64 << 20)

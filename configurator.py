"""Settings from files and flags; device, dtype, threads and seed in one place.

    $ python train.py config/small.py --batch_size=8 --compile=False      # overrides, from left to right

A setting is a line above configure(...), or a field of GPTConfig in model.py:

    momentum = 0.95   # of Muon [< 1] [if optimizer != 'adamw']

Its type is that of its annotation, else of its default; 1e6 may be an int. Brackets in its remark are rules:
    [< 1]           what a value must fulfil, in Python; [in TABLE]: a key of a table in the script. Numbers
                    whose default is not negative must be at least 0, unless a rule begins with >
    [if condition]  in Python; unless it holds, a flag is rejected, because it would change nothing. In a
                    comment above, it is for all settings up to the next such comment
    [fixed]         a resumed run cannot change this setting
    [changeable]    a checkpoint can be loaded with another value of this field
    [random]        the field makes training random: lab/check.py switches it off
Settings are read from the source, so that --help and typos do not wait for slow imports.
"""
import ast
import builtins
import collections
import contextlib
import ctypes
import datetime
import difflib
import errno
import functools
import importlib
import itertools
import os
import re
import runpy
import sys
import textwrap
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PLAIN = bool, int, float, str, tuple, list, dict, type(None)  # types of settings
CANNOT_WRITE = errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG


def print0(*values):
    """Prints on rank 0 only, at once. If nobody reads on (`| tee log` after Ctrl-C), the work continues."""
    if os.environ.get('RANK', '0') == '0':
        try:
            print(*values, flush=True)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, 'w')  # noqa: SIM115


def duration(seconds):
    """3723 -> 1:02:03"""
    return str(datetime.timedelta(seconds=int(seconds)))


def package(name, need='published models need', install='safetensors tokenizers huggingface_hub'):
    """A module of a package that few need. Raises ImportError."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{need} {name}: pip install {install}") from None


# settings ---------------------------------------------------------------------------------------------------

# Of a script or of GPTConfig:
#     kinds    names of the types of its annotation, or the type of its default
#     default  its value
#     rules    the texts in brackets of its remark
#     source   the lines that assign it, with the comments above them
Setting = collections.namedtuple('Setting', 'kinds default rules source')
SETTING = re.compile(r' *([a-z]\w*)(?:: (.+?))? = (.+?)(?:  +#(.*))?$')  # name: kinds = default  # remark


@functools.cache
def declared(path):
    """{name: Setting} of a script, above configure(...), or of model.py's GPTConfig. Runs no code of it."""
    lines = path.read_text('utf-8').splitlines()
    body = ast.parse('\n'.join(lines)).body
    settings = {}
    before = 0
    group = []
    for node in next((node.body for node in body if getattr(node, 'name', '') == 'GPTConfig'), body):
        line = lines[node.lineno - 1]
        source = '\n'.join(lines[before:node.end_lineno]).strip('\n')
        before = node.end_lineno
        if 'configure(' in line:
            break
        if not (match := SETTING.match(line)):
            continue
        name, kinds, default, remark = match.groups()
        default = ast.literal_eval(default)
        # 'bool | list[int]' -> bool, list; Literals and the names of tables stand for texts
        kinds = re.sub(r"\[.*?\]|'", '', kinds or type(default).__name__)
        kinds = re.sub('Literal|[A-Z_]{3,}', 'str', kinds).split(' | ')
        if heading := re.findall(r'^ {,8}# .*', source.removesuffix(line), re.M):
            group = re.findall(r'\[(if .+?)\]', heading[-1])
        more = itertools.takewhile(lambda line: re.match(' {9,}#', line), lines[before:])  # of the remark
        rules = re.findall(r'\[(.+?)\]', '\n'.join([remark or '', *more])) + group
        if {'int', 'float'} & {*kinds} and (default or 0) >= 0 and '>' not in {rule[0] for rule in rules}:
            rules.append('>= 0')
        settings[name] = Setting(kinds, default, rules, source)
    return settings


def marked(path, mark):
    """The settings of a script, or GPTConfig's fields, with this mark."""
    return [name for name, setting in declared(path).items() if mark in setting.rules]


def fit(value, kinds):
    """The value as one of the types named in kinds: itself, or an equal float, int or bool. Else ValueError.
    """
    if type(value).__name__.removesuffix('Type') in kinds:  # of None, NoneType
        return value
    for kind in float, int, bool:
        if kind.__name__ in kinds and type(value) in (int, float) and kind(value) == value:
            return kind(value)
    raise ValueError(f'{value!r} does not fit')


def parse(text, kinds):
    """A flag's text, or True, as one of the types in kinds: a literal (3e-4, [1, 2]) before plain text."""
    literal = {'true': 'True', 'false': 'False'}.get(text, text)
    with contextlib.suppress(ValueError, SyntaxError, OverflowError):
        return fit(ast.literal_eval(literal), [kind for kind in kinds if kind != 'str'])
    return fit(text, kinds)


TYPES = {'int': 'an integer', 'float': 'a number', 'str': 'text', 'bool': 'True or False'}


def checked(arg, name, value, known):
    """The value of a setting in its type. Raises ValueError for an unknown name or a wrong type."""
    if name not in known:
        near = difflib.get_close_matches(name, known)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see --help"
        raise ValueError(f"{arg}: unknown setting {name!r}; {hint}")
    kinds = known[name].kinds
    try:
        return (parse if arg.startswith('-') else fit)(value, kinds)
    except ValueError:
        raise ValueError(f"{arg}: {name} must be {' or '.join(TYPES.get(kind, kind) for kind in kinds)}, got "
                         f"{value!r}") from None


def run_file(name, values):
    """What a config file, plain Python that sees `values`, assigns. It is looked for here, then next to this
    file."""
    path = Path(name) if Path(name).exists() else ROOT / name
    if not path.exists():
        raise ValueError(f"there is no config file {name}: neither here nor in {ROOT}")
    sys.path.append(str(path.resolve().parent))  # it may import a mixer in a file next to it
    # as builtins: the globals afterwards are what the file assigned
    assigned = runpy.run_path(str(path), {'__builtins__': vars(builtins) | values})
    return {key: value for key, value in assigned.items() if key in values or (
        key.islower() and not key.startswith('_') and type(value) in PLAIN)}


@functools.cache
def settings_of_scripts():
    """The names of all scripts' settings and of GPTConfig's fields: a config file serves them all."""
    paths = [*ROOT.glob('*.py'), *ROOT.glob('zoo/*.py'), *ROOT.glob('lab/*.py')]
    return {*declared(ROOT / 'model.py')} | {name for path in paths for name in re.findall(
        r'^([a-z]\w*)(?:: .+?)? = ', path.read_text('utf-8'), re.M)}


def show(label, values):
    """Prints settings, wrapped."""
    items = ', '.join(f"{name} = {value!r}" for name, value in values.items()) or 'nothing for this script'
    print0(textwrap.fill(f"{label}: {items}", 100, subsequent_indent='    ', break_on_hyphens=False))


# What configure has found:
#     config      all settings of the script
#     model_args  fields of GPTConfig that were given
#     words       plain words of the command line
#     given       name -> 'flags' or its config file, of all that was set, the last one last
#     known       name -> Setting, of all that can be set
Configured = collections.namedtuple('Configured', 'config model_args words given known')


def configure(settings, model_config=None, words=0, argv=None, default_file=None, tunes=False, texts=False):
    """Overrides a script's settings by config files and flags, and prints which.

    settings: the script's globals(). model_config: 'GPTConfig', if its fields in model.py are settings too.
    words: how many plain words there may be. argv: another command line; the script's own if it is started.
    default_file: for a command line without a config file, unless --init_from names a model. tunes: if it
    names a model to fine-tune, the default file still gives the script's own settings. texts: whether .py
    files are words, except in a folder named config. Raises ValueError for an unknown setting or file, or a
    wrong type.
    """
    launched = settings['__name__'] == '__main__'
    own = declared(Path(settings['__file__']))
    known = own | (declared(ROOT / 'model.py') if model_config else {})
    values = {name: settings.get(name, setting.default) for name, setting in known.items()}
    if argv is None:
        argv = sys.argv[1:] if launched else []
    if launched:
        sys.excepthook = one_line_errors
        sys.stdout.reconfigure(errors='replace')  # a terminal prints ? for a character that it lacks
    if {'-h', '--help'} & {*argv}:
        print(settings['__doc__'], *(setting.source for setting in known.values()), sep='\n')
        raise SystemExit(0)

    plain = [arg for arg in argv if arg == '-' or not arg.startswith('-') and (
        not arg.endswith('.py') or texts and Path(arg).parent.name != 'config')]
    if len(plain) > words:
        raise ValueError(f"cannot use {plain[words]!r}: settings are --key=value, config files end in .py")
    args = [arg for arg in argv if arg not in plain]
    start = ['scratch', *re.findall('--init_from=(.*)', '\n'.join(argv))][-1]
    if (launched and default_file and (start == 'scratch' or tunes and start != 'resume')
            and all(arg.startswith('-') for arg in args)):
        args.insert(0, default_file)
    given = {}
    for arg in args:
        label = 'flags' if arg.startswith('-') else arg
        assigned = read_flag(arg, known) if label == 'flags' else {
            name: checked(arg, name, value, known) for name, value in run_file(arg, values).items()
            if name in known or name not in settings_of_scripts()}
        if arg == default_file and start not in ('scratch', 'auto'):
            assigned = {name: assigned[name] for name in assigned if name in own}
        values |= assigned
        given = {name: given[name] for name in given if name not in assigned} | dict.fromkeys(assigned, label)
        if label != 'flags':
            show(label, assigned)
    if flags := {name: values[name] for name in given if given[name] == 'flags'}:
        show('flags', flags)
    config = {name: values[name] for name in own}
    settings.update(config)
    return Configured(config, {name: values[name] for name in given if name not in own}, plain, given, known)


def read_flag(arg, known):
    """'--name=text' -> {name: value}"""
    name, equals, text = arg.removeprefix('--').partition('=')
    text = text if not text.startswith('~/') else os.path.expanduser(text)
    return {name: checked(arg, name, text if equals else True, known)}


def unmet(rules, tables, values):
    """The first condition of these rules' [if ...] that does not hold, or None. A condition is Python in
    which `values` and `tables`, two dictionaries, have the names."""
    for rule in rules:
        if rule.startswith('if ') and not eval(rule[3:], tables, values):
            return rule[3:]
    return None


def check_values(settings, values, tables):
    """Raises ValueError for a given value that breaks a rule. settings: from configure; values: of settings,
    by name; tables: the script's globals()."""
    for name in settings.given.keys() & values.keys():
        for rule in settings.known[name].rules:
            is_condition = re.match('[<>=!]|in ', rule) and values[name] is not None
            if is_condition and not eval(f'{name} {rule}', tables, values):
                choices = eval(rule[3:], tables) if rule.startswith('in ') else ()
                limits = f"one of {', '.join(map(str, choices))}" if choices else rule
                raise ValueError(f"{name}={values[name]!r} is not supported: it must be {limits}")


def check_effects(settings, values, tables):
    """Raises ValueError for a flag that changes nothing with these values of settings, unless it restores a
    default. Config files serve many runs: their lines may have no effect."""
    for name in settings.given.keys() & values.keys():
        setting = settings.known[name]
        if settings.given[name] == 'flags' and values[name] != setting.default:
            condition = unmet(setting.rules, tables, values)
            if condition:
                raise ValueError(f"--{name} has no effect: it needs {condition}")


# errors -----------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def reading(path):
    """Raises ValueError, with the file's name, for errors of a library that reads it."""
    try:
        yield
    except Exception as error:
        if on_purpose(error) or getattr(error, 'filename', None):
            raise
        raise ValueError(f"{path} is damaged or not such a file: {type(error).__name__}: {error!s:.150}"
                         ) from error


@contextlib.contextmanager
def naming(fields):
    """Raises ValueError that names the given fields of GPTConfig if torch raises an error while the model is
    built or run."""
    try:
        yield
    except (TypeError, LookupError, RuntimeError, ArithmeticError) as error:
        given = ', '.join(f'{name}={value!r}' for name, value in fields.items())
        raise ValueError(f"a model with these settings fails: {given}; {error!r:.200}") from error


def is_ours(path):
    """Whether a file is one of this repository."""
    return Path(path).resolve().is_relative_to(ROOT)


def on_purpose(error):
    """Whether our own code raised this error for the user: the innermost frame is ours, at `raise`."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (isinstance(error, (ValueError, OSError, ImportError)) and frame.line.startswith('raise ')
            and is_ours(frame.filename))


def one_line_errors(kind, error, trace):
    """The excepthook of a script: one line for what users can mend, else the traceback."""
    message = str(error)
    if kind is BrokenPipeError:
        os._exit(141)  # of `| head`: no word, not even at exit
    elif kind is KeyboardInterrupt:
        message = 'interrupted'
    elif issubclass(kind, MemoryError) or re.search("out of memory|can't allocate memory", message):
        message = ('out of memory: lower --batch_size (train.py: and raise --gradient_accumulation_steps by '
                   'as much), --max_new_tokens or --procs')
    elif getattr(error, 'errno', None) in CANNOT_WRITE:
        message = f"cannot write ({message}): free some space, or write elsewhere"
    elif not on_purpose(error):
        return sys.__excepthook__(kind, error, trace)
    print(f"{Path(sys.argv[0]).name}: {' '.join(message.splitlines())}", file=sys.stderr)


# the machine ------------------------------------------------------------------------------------------------

def runtime(device='auto', dtype='auto', seed=1337, bound_by_memory=False):
    """Settles device and dtype, and seeds torch.

    device: see choose_device. dtype: float32, bfloat16, float16 (CUDA only; needs a scaler), or auto, see
    fastest_dtype. bound_by_memory: whether compiled steps, or weights in eight bits, generate text. Returns
    device, device_type, dtype (torch's) and autocast (`with run.autocast():`). Raises ValueError for a device
    that is not here or lacks the dtype.
    """
    import torch
    device = choose_device(device)
    kind = device.partition(':')[0]
    name = f'{torch.get_num_threads()} threads'
    if kind == 'cuda':
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name()
    elif kind == 'cpu':
        keep_freed_memory()
    if dtype == 'auto':
        dtype = fastest_dtype(kind, bound_by_memory)
    if dtype == 'float16' and kind != 'cuda':
        raise ValueError("dtype=float16 needs CUDA: use --dtype=auto, float32 or bfloat16")
    torch.set_float32_matmul_precision(matmul_precision(kind, dtype))
    # torch.manual_seed would ask CUDA as well
    (torch.default_generator if kind == 'cpu' else torch).manual_seed(seed)
    print0(f"device {device} ({name}), dtype {dtype}")
    compute = getattr(torch, dtype)
    autocast = (contextlib.nullcontext if dtype == 'float32' else
                functools.partial(torch.autocast, kind, compute))
    return types.SimpleNamespace(device=device, device_type=kind, dtype=compute, autocast=autocast)


def choose_device(device):
    """'auto' (the best), 'cpu', 'cuda', 'cuda:1', 'mps' -> the device's name; each rank of torchrun has a GPU
    of its own. Raises ValueError if there is none."""
    import torch
    if device == 'auto':
        device = str(torch.accelerator.current_accelerator() or 'cpu')
    if device.startswith('cuda') and 'LOCAL_RANK' in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"device={device} is not available: {error!s:.150}: use cpu, mps, cuda, cuda:1 or "
                         "auto") from None
    return device


def fastest_dtype(kind, bound_by_memory):
    """bfloat16 if there are units for it, float16 on older GPUs, else float32. A CPU without units takes
    twice as long in bfloat16 for many rows. But compiled steps that generate wait for weights, which have
    half the bytes in bfloat16, and torch's kernel for eight bits is fast only in bfloat16."""
    import torch
    if kind == 'cuda':
        return 'bfloat16' if torch.cuda.get_device_capability() >= (8, 0) else 'float16'
    return 'bfloat16' if kind == 'cpu' and (bound_by_memory or cpu_has_bfloat16()) else 'float32'


def cpu_has_bfloat16():
    """Whether the CPU has units for bfloat16, without which torch multiplies up to 30 times slower in it."""
    import torch
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def matmul_precision(kind, dtype):
    """How float32 matmuls may be computed. On CUDA by TF32 in a float32 run; beside 16 bits routers and
    states are float32 for a reason. On AMD's CPUs by oneDNN ('medium', exact there), in 0.4 of MKL's time; on
    Intel's it takes 1.2 to 2 times as long, and rounds to bfloat16 with AMX."""
    vendor = ''
    with contextlib.suppress(OSError):
        vendor = Path('/proc/cpuinfo').read_text('utf-8')
    if kind == 'cpu' and 'AuthenticAMD' in vendor:
        return 'medium'
    return 'high' if (kind, dtype) == ('cuda', 'float32') else 'highest'


def can_compile(device):
    """Whether torch.compile works here, by a trial; if not, prints why. The real one then takes less time."""
    import torch
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(1, device=device))
    except Exception as error:  # of torch, Triton, a compiler or the system
        print0("running eagerly, which is slower: torch.compile needs a C and a C++ compiler and Python.h "
               f"(Debian: build-essential, python3-dev), and says: {error!r:.200}")
        return False
    return True


def resolve_compile(compile, device, flops):
    """compile='auto' -> bool. flops: of this rank's run. Compiling takes about 40 seconds. Without it the
    FLOPs below take about two minutes on a GPU or on two CPU cores."""
    if compile != 'auto':
        return compile
    return device != 'mps' and flops > (4e15 if 'cuda' in device else 1.4e13) and can_compile(device)


def compile_model(model, device):
    """The model compiled, to be called as model(idx, targets) is; the model itself is not changed."""
    import torch
    # a CPU draws eager's random numbers, which is fast there
    return torch.compile(model, dynamic=False,
                         options=None if 'cuda' in device else {'fallback_random': True})


def keep_freed_memory(below=1 << 30):
    """Makes glibc keep freed blocks of less than `below` bytes: a training step on a CPU that maps its memory
    anew takes 1.25 times as long. The kept blocks leave gaps, a quarter to twice as much memory again."""
    with contextlib.suppress(AttributeError, TypeError):  # glibc alone has mallopt
        # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
        for option, value in (-3, below), (-1, 2**31 - 1), (-2, 64 << 20):
            ctypes.CDLL(None).mallopt(option, value)


PEAK_TFLOPS = {  # by part of the device's name: dense, 16 bits, sums in float32, from data sheets
    'H200': 989, 'H100 PCIe': 756, 'H100': 989, 'B200': 2250, 'A100': 312, 'L40S': 362, 'V100': 125, 'T4': 65,
    'RTX 4090': 165, 'RTX 3090': 71,
}


def peak_flops(device, dtype):
    """FLOP/s of the device at 16 bits, or None if unknown."""
    import torch
    if 'cuda' not in device or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)


def peak_mb(device):
    """Peak memory of the CUDA device, or of this process; None on Windows."""
    if 'cuda' in device:
        import torch
        return torch.cuda.max_memory_allocated(device) / 2**20
    if sys.platform == 'win32':
        return None
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == 'darwin' else 2**10)


def plain(dtype):
    """'bfloat16', without torch's prefix."""
    return str(dtype).removeprefix('torch.')

"""Settings from files and flags; device, dtype and seed.

    $ python train.py config/small.py --batch_size=8 --compile=False  # later arguments win

A setting is a line above configure(...), or a field of GPTConfig in model.py:

    momentum = 0.95   # Muon [< 1] [if optimizer == 'muon']

Its type is its annotation, or the type of its default. Brackets in its remark are rules:
    [< 1]           a condition for the value; [in TABLE] requires a key of the script's TABLE. Numbers must
                    be at least 0, unless the default is negative or a rule begins with >
    [if condition]  if false, the setting has no effect, so its flag raises an error. A rule in a comment
                    line applies to all settings up to the next comment line
    docs/design.md explains the marks [fixed], [length], [changeable], [random] and [training]
In a config file, helper variables begin with _ or are in upper case.
"""
import ast
import builtins
import collections
import contextlib
import ctypes
import datetime
import difflib
import functools
import importlib
import os
import re
import signal
import sys
import textwrap
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent


class UserError(ValueError):
    """An error that users can correct."""


def print0(*values):
    """Prints on rank 0, and ignores a closed pipe."""
    if os.environ.get('RANK', '0') == '0':
        try:
            print(*values, flush=True)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, 'w')  # noqa: SIM115


def duration(seconds):
    """3723 -> 1:02:03"""
    return str(datetime.timedelta(seconds=int(seconds)))


def package(name, need='published models need', install='safetensors tokenizers huggingface_hub'):
    """Imports a package. Raises ImportError with the pip command."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{need} {name}: pip install {install}") from None


# settings ---------------------------------------------------------------------------------------------------

# kinds    names of types
# rules    texts in brackets
# source   source text, with the comments above
Setting = collections.namedtuple('Setting', 'kinds default rules source')
SETTING = re.compile(r'''
    ((?: ^\#.*\n | ^\n )*)                  # comments above
    ^([a-z]\w*) (?:: \ (.+?))? \ =\ (.+?)   # name: kinds = default
    (?:\ *\#(.* (?:\n\ +\#.*)*))?$          # remark, which may continue on further lines
''', re.M | re.X)


def declared(path):
    """Returns {name: Setting} of a script or of GPTConfig."""
    text = re.sub(r'""".*?"""', '', path.read_text('utf-8'), flags=re.S)
    fields = text.partition('class GPTConfig:')[2].partition('\n    def ')[0]
    text = textwrap.dedent(fields) or re.split(r'^(?:.* = )?configure\(', text, flags=re.M)[0]
    settings = {}
    group = []
    for match in SETTING.finditer(text):
        above, name, kinds, default, remark = match.groups('')
        # 'bool | list[int]' -> bool, list[int]; Literals and names of tables become str
        with contextlib.suppress(SyntaxError, ValueError):
            default = ast.literal_eval(default)
            kinds = re.sub(r"(?<!list)\[.*?\]|'", '', kinds or type(default).__name__)
            kinds = re.sub('Literal|[A-Z_]{3,}', 'str', kinds).split(' | ')
            if headings := re.findall('^# .*', above, re.M):
                group = re.findall(r'\[(.+?)\]', headings[-1])
            rules = re.findall(r'\[(.+?)\]', remark) + group
            if {'int', 'float'} & {*kinds} and (default or 0) >= 0 and '>' not in {rule[0] for rule in rules}:
                rules.append('>= 0')
            settings[name] = Setting(kinds, default, rules, match[0].strip('\n'))
    if others := {*re.findall(r'^([a-z]\w*) *[:=]', text, re.M)} - settings.keys():
        raise UserError(f"{path}: write {', '.join(others)} in one line, as in `name = 3  # remark`")
    return settings


def marked(path, mark):
    """Names of the settings with this mark."""
    return [name for name, setting in declared(path).items() if mark in setting.rules]


def fit(value, kinds):
    """Converts a value, or the text of a literal, to a type in kinds; 1e6 can become an int."""
    if isinstance(value, str):
        spelled = {'true': 'True', 'false': 'False'}.get(value, value)
        with contextlib.suppress(ValueError, SyntaxError, OverflowError):
            return fit(ast.literal_eval(spelled), [kind for kind in kinds if kind != 'str'])
    if type(value).__name__.removesuffix('Type') in kinds:  # 'NoneType' -> 'None'
        return value
    for kind in kinds:
        if kind.startswith('list[') and isinstance(value, list):
            return [fit(item, [kind[5:-1]]) for item in value]
    for kind in float, int, bool:
        if kind.__name__ in kinds and type(value) in (int, float) and kind(value) == value:
            return kind(value)
    raise ValueError(f"{value!r} does not fit")


TYPES = {'int': 'an integer', 'float': 'a number', 'str': 'text', 'bool': 'True or False',
         'list[int]': 'a list of integers'}


def checked(origin, name, value, known):
    """Converts a setting's value. origin: file or flag."""
    if name not in known:
        near = [full for full in known if full.startswith(name)] or difflib.get_close_matches(name, known)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see --help"
        raise UserError(f"{origin}: unknown setting {name!r}; {hint}")
    kinds = known[name].kinds
    try:
        return fit(value, kinds)
    except ValueError:
        raise UserError(f"{origin}: {name} must be {' or '.join(TYPES.get(kind, kind) for kind in kinds)}, "
                        f"got {value!r}") from None


def read_flag(flag, known):
    """'--name=text' -> {name: value}"""
    name, equals, text = flag.removeprefix('--').partition('=')
    if text.startswith('~/'):
        text = os.path.expanduser(text)
    return {name: checked(flag, name, text if equals else True, known)}


def run_file(name, values):
    """Runs a config file, which can read `values`. Returns its variables."""
    path = Path(name) if Path(name).exists() else ROOT / name
    if not path.exists():
        raise UserError(f"there is no config file {name}: neither here nor in {ROOT}")
    sys.path.append(str(path.resolve().parent))  # for imports of files next to it
    name = f'config_{path.stem}'
    module = sys.modules[name] = types.ModuleType(name)  # torch.compile looks the module up
    # `values` act as builtins, so that the result does not contain them
    vars(module).update(__file__=str(path), __builtins__=vars(builtins) | values)
    with reading(path):
        code = compile(path.read_bytes(), path, 'exec')  # Python finds the encoding
    exec(code, vars(module))
    return vars(module)


def show(label, values):
    """Prints settings, if any."""
    items = ', '.join(f"{name} = {value!r}" for name, value in values.items())
    if items:
        print0(textwrap.fill(f"{label}: {items}", 100, subsequent_indent='    ', break_on_hyphens=False))


# model_args  the given fields of GPTConfig
# words       arguments that are neither flags nor config files
# given       name -> 'flags' or a config file, in the order given
# known       name -> Setting
# files       one {name: value} per config file
# replaced    what config files replaced in model.py, like 'model.make_block', 'GPT.loss'
Configured = collections.namedtuple('Configured', 'config model_args words given known files replaced')


def configure(settings, model_config=None, words=0, argv=None, default_file=None, tune_file=None,
              texts=False):
    """Overrides a script's settings with config files and flags, and prints the changes.

    settings: the script's globals(). model_config: 'GPTConfig' if its fields are settings too. words: the
    number of plain words allowed. default_file: used if the command names neither a model nor a config
    file outside of examples/. tune_file: used instead if --init_from names a model. texts: if True, .py
    files outside of config/ and examples/ are words. Raises UserError for unknown settings and wrong
    types."""
    launched = settings['__name__'] == '__main__'
    own = declared(Path(settings['__file__']))
    known = own | (declared(ROOT / 'model.py') if model_config else {})
    if argv is None:
        argv = sys.argv[1:] if launched else []
    if launched:
        sys.excepthook = one_line_errors
        if hasattr(sys.stdout, 'reconfigure'):  # not in Jupyter
            sys.stdout.reconfigure(errors='replace')  # prints ? for characters that the terminal lacks
    if {'-h', '--help'} & {*argv}:
        print(settings['__doc__'], *(setting.source for setting in known.values()), sep='\n')
        raise SystemExit(0)

    typed = [arg for arg in argv if arg == '-' or not arg.startswith('-') and (not arg.endswith('.py') or (
        texts and Path(arg).resolve().parent not in (ROOT / 'config', ROOT / 'examples')))]
    if len(typed) > words:
        raise UserError(f"cannot use {typed[words]!r}: settings are --key=value, config files end in .py")
    args = [arg for arg in argv if arg not in typed]
    init_from = ['scratch', *re.findall('--init_from=(.*)', '\n'.join(argv))][-1]
    base_file = {'scratch': default_file, 'auto': default_file, 'resume': None}.get(init_from, tune_file)
    if launched and base_file and all(arg.startswith('-') or is_example(arg) for arg in args):
        args.insert(0, base_file)
    values = {name: setting.default for name, setting in known.items()}
    given = {}
    files = []
    replaced = []
    # config files may have settings of other scripts
    shared = declared(ROOT / 'train.py') | declared(ROOT / 'model.py') | known
    for arg in args:
        if arg.startswith('-'):
            label = 'flags'
            assigned = read_flag(arg, known)
        else:
            label = arg
            files.append(run_file(arg, values))
            replaced += replaced_names(files[-1]['__name__'])
            assigned = {name: checked(arg, name, value, shared) for name, value in files[-1].items()
                        if name in shared or name.islower() and name[0] != '_'
                        and not callable(value) and not isinstance(value, types.ModuleType)}
            assigned = {name: value for name, value in assigned.items() if name in known}
            show(arg, assigned)
        values |= assigned
        for name in assigned:
            given.pop(name, None)
            given[name] = label
    show('flags', {name: values[name] for name in given if given[name] == 'flags'})
    config = {name: values[name] for name in own}
    settings.update(config)
    model_args = {name: values[name] for name in given if name not in own}
    return Configured(config, model_args, typed, given, known, files, replaced)


def is_example(arg):
    """Whether a config file is in examples/, and so extends the default file."""
    return Path(arg).resolve().parent.name == 'examples'


def replaced_names(file):
    """What a config file has replaced in model.py."""
    model = sys.modules.get('model')
    places = [model, model.GPT] if model else []
    return [f'{place.__name__}.{name}' for place in places for name, value in vars(place).items()
            if getattr(value, '__module__', None) == file]


def use_parts(settings, script):
    """Merges config files' tables (dicts in upper case) into the script's tables. If a config file defines
    patch(script), calls it with the script's module, in which patch may replace functions and classes.
    script: the script's globals(). Returns the changed names."""
    replaced = [*settings.replaced]
    tables = {}
    code = ''.join(path.read_text('utf-8') for path in ROOT.glob('*.py'))
    known = {*re.findall(r'^(?:def|class) (\w+)', code, re.M)}
    for found in settings.files:
        for name, value in found.items():
            table = script.get(name, value)
            if not name.isupper() or table is value:  # not the script's table, or only imported
                continue
            if not isinstance(table, dict):
                raise UserError(f"a config file sets {name}, which is no table: replace it in patch(script)")
            table |= value
            tables[name] = table
        before = {**script}
        if 'patch' in found:
            found['patch'](sys.modules[script['__name__']])
        replaced += [name for name in before if script[name] is not before[name]]
        if unknown := script.keys() - before.keys() - known:
            raise UserError(f"patch replaces {', '.join(unknown)}, which no script has")
    if twice := {name for name in replaced if replaced.count(name) > 1}:
        raise UserError(f"two config files replace {', '.join(twice)}: use one of them")
    names = [*tables, *replaced]
    if names:
        print0(f"config files change {', '.join(names)}")
    return names


def unmet(rules, tables, values):
    """The first false [if ...] condition, or None."""
    for rule in rules:
        if rule.startswith('if ') and not eval(rule[3:], tables, values):
            return rule[3:]
    return None


def check_values(settings, values, tables):
    """Raises UserError if a given value breaks a rule. tables: the script's globals()."""
    for name in filter(values.__contains__, reversed(settings.given)):  # later arguments first, usually flags
        for rule in settings.known[name].rules:
            given = values[name] if isinstance(values[name], list) else [values[name]]
            is_condition = re.match('[<>=!]|in ', rule) and values[name] is not None
            if is_condition and not all(eval(f'{name} {rule}', tables, values | {name: x}) for x in given):
                if rule.startswith('in '):
                    rule = f"one of {', '.join(filter(None, map(str, eval(rule[3:], tables))))}"
                raise UserError(f"{name}={values[name]!r} is not supported: it must be {rule}")


def check_effects(settings, values, tables):
    """Raises UserError if a flag has no effect, unless it gives the default."""
    for name in filter(values.__contains__, reversed(settings.given)):
        setting = settings.known[name]
        if settings.given[name] == 'flags' and values[name] != setting.default and (
                condition := unmet(setting.rules, tables, values)):
            raise UserError(f"--{name} has no effect: it needs {condition}")


# errors -----------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def reading(path):
    """Raises UserError, naming the file, if a library cannot read it."""
    try:
        yield
    except (UserError, ImportError, FileNotFoundError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename:  # its message names the file
            raise
        cause = f'{type(error).__name__}: {error}'
        if name := re.search(r'GLOBAL (\S+)', cause):  # torch.load's message is long
            cause = f'it contains {name[1]}, but only tensors and plain values can be read'
        cause = f'is damaged or has another format: {textwrap.shorten(cause, 300)}'
        if os.path.isfile(path) and open(path, 'rb').read(19) == b'version https://git':  # noqa: SIM115
            cause = 'is a pointer of git-lfs: run `git lfs pull`'
        raise UserError(f"cannot read {path}, which {cause}") from error


@contextlib.contextmanager
def naming(fields):
    """Converts a ValueError of model.py to UserError. If torch fails, the UserError lists
    `fields`, {field of GPTConfig: value}."""
    try:
        yield
    except ValueError as error:
        raise UserError(error) from error
    except (TypeError, LookupError, RuntimeError, ArithmeticError) as error:
        given = ', '.join(f'{name}={value!r}' for name, value in fields.items())
        raise UserError(f"a model with these settings fails: {given}; {error!r:.200}") from error


def one_line_errors(kind, error, trace):
    """An excepthook: prints one line for errors that users can fix."""
    message = str(error)
    if kind is BrokenPipeError:
        os._exit(141)  # `| head`: print nothing, not even at exit
    elif kind is KeyboardInterrupt:
        message = 'interrupted'
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would print a traceback at exit
    elif issubclass(kind, MemoryError) or re.search("out of memory|allocate memory", message):
        message = ('out of memory: lower --batch_size (train.py: and raise --gradient_accumulation_steps by '
                   'as much), --max_new_tokens or --procs')
    elif getattr(error, 'errno', None):
        message = f"cannot read or write ({message}): check the path, permissions and free space"
    elif not (isinstance(error, (UserError, OSError)) or isinstance(error, ImportError) and not error.name):
        return sys.__excepthook__(kind, error, trace)
    print(f"{Path(sys.argv[0]).name}: {' '.join(message.splitlines())}", file=sys.stderr)


# the machine ------------------------------------------------------------------------------------------------

def runtime(device, dtype, seed=1337, bound_by_memory=False):
    """Chooses device and dtype, and seeds torch. bound_by_memory: whether reading weights takes most
    of the time. Raises UserError if the device or dtype is unavailable."""
    import torch
    device = choose_device(device)
    kind = device.partition(':')[0]
    name = f'{torch.get_num_threads()} threads'
    fastest = 'float32'
    precision = 'highest'
    if kind == 'cuda':
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name()
        fastest = 'bfloat16' if torch.cuda.get_device_capability() >= (8, 0) else 'float16'
        precision = 'high'  # TF32: exact for 16-bit inputs; rounds others to 10 mantissa bits
    elif kind == 'cpu':
        keep_freed_memory()
        if bound_by_memory or cpu_has_bfloat16():
            fastest = 'bfloat16'
        # 'medium' uses oneDNN, which is 2.5 times as fast as MKL on AMD, but slower and inexact on Intel
        cpu = Path('/proc/cpuinfo')
        if cpu.exists() and 'AuthenticAMD' in cpu.read_text('utf-8'):
            precision = 'medium'
    if dtype == 'auto':
        dtype = fastest
    compute = torch_dtype(dtype)
    if dtype == 'float16' and kind != 'cuda':
        raise UserError("dtype=float16 needs CUDA: use --dtype=auto, float32 or bfloat16")
    torch.set_float32_matmul_precision(precision)
    torch.manual_seed(seed)
    print0(f"device {device} ({name}), dtype {dtype}")
    autocast = (contextlib.nullcontext if dtype == 'float32' else
                functools.partial(torch.autocast, kind, compute))
    return types.SimpleNamespace(device=device, device_type=kind, dtype=compute, autocast=autocast)


def torch_dtype(name):
    """torch's dtype for a setting."""
    import torch
    if name not in ('float32', 'bfloat16', 'float16'):
        raise UserError(f"dtype={name} is not supported: choose float32, bfloat16, float16 or auto")
    return getattr(torch, name)


def choose_device(device):
    """Resolves 'auto', and gives each rank of torchrun its own GPU."""
    import torch
    if device == 'auto':
        # without check_available, torch names the accelerator it was built for
        device = str(torch.accelerator.current_accelerator(check_available=True) or 'cpu')
    if device == 'cuda' or device.startswith('cuda') and 'LOCAL_RANK' in os.environ:
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # torch.cuda.set_device needs a number
    try:
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError) as error:
        raise UserError(f"device={device} is not available: {error!s:.150}: use --device=auto or cpu"
                        ) from None
    return device


def cpu_has_bfloat16():
    """Whether the CPU has bfloat16 units. Without them, bfloat16 is up to 30 times slower."""
    import torch
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def can_compile(device):
    """Whether torch.compile works here; if not, prints why."""
    import torch
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(1, device=device))
    except Exception as error:  # from torch, Triton or a compiler
        print0("running eagerly, which is slower: torch.compile needs a C and a C++ compiler and Python.h "
               f"(Debian: build-essential, python3-dev); it reports {error!r:.200}")
        return False
    return True


def resolve_compile(compile, device, flops):
    """Resolves 'auto': True only if eager training would take over two minutes on one GPU, or on two CPU
    cores. flops: this rank's training FLOPs."""
    if compile != 'auto':
        return compile
    return device != 'mps' and flops > (4e15 if 'cuda' in device else 1.4e13) and can_compile(device)


def compile_model(model, device):
    """Returns a compiled version of the model, without changing the model."""
    import torch
    # on a CPU, eager mode's random numbers are faster
    return torch.compile(model, dynamic=False,
                         options=None if 'cuda' in device else {'fallback_random': True})


def keep_freed_memory(below=1 << 30):
    """Makes glibc keep freed blocks of less than `below` bytes. CPU training becomes faster, but needs 25%
    to 100% more memory."""
    with contextlib.suppress(AttributeError, TypeError):  # only glibc has mallopt
        # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
        for option, value in (-3, below), (-1, 2**31 - 1), (-2, 64 << 20):
            ctypes.CDLL(None).mallopt(option, value)


# pattern of device names -> dense 16-bit TFLOP/s from the data sheet; the first match counts
PEAK_TFLOPS = {
    'GB300': 2500, 'B300': 2250, 'GB200': 2500, 'B200': 2250, 'H200 NVL': 835, 'G?H200': 989,
    'H100 NVL': 835, 'H100 PCIe': 756, 'H100': 989, 'A100': 312, 'L40S': 362, 'V100': 125, 'T4': 65,
    'RTX 4090(?! Laptop)': 165, 'RTX 3090': 71,
}


def peak_tflops(name):
    """The entry of PEAK_TFLOPS for a device."""
    return next((value for words, value in PEAK_TFLOPS.items() if re.search(rf'\b{words}\b', name)), None)


def peak_flops(device, dtype):
    """Peak 16-bit FLOP/s of the device, or None."""
    import torch
    if 'cuda' not in device or dtype == torch.float32:
        return None
    tflops = peak_tflops(torch.cuda.get_device_name(device))
    return tflops and tflops * 1e12


def peak_mb(device):
    """Peak memory in MiB: of the CUDA device, or else of this process (None on Windows)."""
    if 'cuda' in device:
        import torch
        return torch.cuda.max_memory_allocated(device) / 2**20
    if sys.platform == 'win32':
        return None
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == 'darwin' else 2**10)


def plain(dtype):
    """The dtype's name, like 'bfloat16'."""
    return str(dtype).removeprefix('torch.')

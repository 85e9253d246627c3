"""Settings from files and flags; device, dtype, threads and seed in one place.

    $ python train.py config/small.py --batch_size=8 --compile=False      # overrides, from left to right

A script's settings are the lower-case names that it assigns above configure(...), of the type of their
annotation, else of their default; 1e6 may be an int. They are read from the source, as GPTConfig's fields
are: --help and typos do not wait for slow imports.
"""
import ast
import builtins
import collections
import contextlib
import ctypes
import difflib
import functools
import importlib
import os
import platform
import re
import runpy
import sys
import textwrap
import time
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent
SCRIPTS = 'train', 'sample', 'prepare', 'bench', 'zoo/hub', 'lab/compare', 'lab/check'
PLAIN = bool, int, float, str, tuple, list, dict, type(None)  # types of settings
# texts of the system, of numpy and of torch.save
CANNOT_WRITE = (r'No space left|Read-only file|quota exceeded|File too large|requested and \d+ written|'
                r'unexpected pos \d+|PytorchStreamWriter failed')
# of gloo and NCCL, on ranks that wait for one that has ended
LOST_RANK = r'(?s)Connection (closed|reset) by peer|gloo.*Broken pipe|NCCL.*remote process exited'
RANGES = {  # (lowest, highest): settings of any script
    (1, 1_000_000): 'batch_size gradient_accumulation_steps',
    (1, 1e18): 'eval_interval eval_iters log_interval num_samples max_new_tokens steps rounds seeds shards '
               'procs prompt_len',
    (0, 1e18): 'max_iters epochs tokens_per_param time_limit learning_rate min_lr warmup_iters '
               'lr_decay_iters lora_rank weight_decay grad_clip mtp_loss balance_loss z_loss balance_rate '
               'keep sample_tokens checkpoint_activations seed temperature top_k speculate history',
    (1e-6, 1e18): 'lora_alpha repetition_penalty',
    (0, 1): 'min_p', (1e-6, 1): 'top_p cooldown', (0, 0.999999): 'beta1 beta2 momentum dropout',
    (1e-6, 0.5): 'val_fraction', (2, 1e18): 'block_size',
}
AT_MOST = {'min_lr': 'learning_rate', 'lora_rank': 'n_embd', 'prompt_len': 'block_size'}  # another setting
CHOICES = {  # of settings without a table of their values
    'compile': (True, False, 'auto'), 'quantize': ('', 'int8'), 'thinking': ('auto', 'on', 'off'),
    'errors': ('strict', 'replace', 'ignore'), 'special_tokens': ('text', 'tokens', 'refuse'),
    'match': (None, 'none', 'params', 'active'),
}
UNUSED = {  # a setting and its value: the flags without effect there
    'optimizer=adamw': 'momentum', 'decay_lr=False': 'lr_schedule cooldown min_lr lr_decay_iters',
    'lr_schedule=cosine': 'cooldown', 'lr_schedule=linear': 'cooldown', 'mtp=False': 'mtp_loss',
    'n_expert=None': 'balance_loss z_loss',
    'balance_bias=False': 'balance_rate', 'lora_rank=0': 'lora_alpha lora_targets',
    'chat=False': 'system history thinking', 'temperature=0.0': 'top_k top_p min_p',
}


def print0(*values):
    """Prints on rank 0 only, at once. Where nobody reads on, as Ctrl-C ends the tee of `| tee log` too, the
    work goes on."""
    if os.environ.get('RANK', '0') == '0':
        try:
            print(*values, flush=True)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, 'w')  # noqa: SIM115


def duration(seconds):
    """3723 -> 1:02:03"""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"


def package(name, need='published models need', install='safetensors tokenizers huggingface_hub'):
    """A module of a package that few need. Raises ImportError."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{need} {name}: pip install {install}") from None


# settings ---------------------------------------------------------------------------------------------------

# Of a script or of GPTConfig, as its source has it:
#     kinds    the types of its annotation, by name, or None
#     default  an ast.expr
#     source   the lines that assign it, with the comments above them
Setting = collections.namedtuple('Setting', 'kinds default source')


def declared(path):
    """{name: Setting} of a script, above configure(...), or of model.py's GPTConfig, which are not run."""
    source = path.read_text('utf-8')
    lines = source.splitlines()
    settings = {}
    body = ast.parse(source).body
    before = 0
    for node in next((node.body for node in body if getattr(node, 'name', '') == 'GPTConfig'), body):
        text = '\n'.join(lines[before:node.end_lineno])
        before = node.end_lineno
        if 'configure(' in lines[node.lineno - 1]:
            break
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, 'target', None)
        name = getattr(target, 'id', '')
        if not name.islower():
            continue
        kinds = None
        if isinstance(node, ast.AnnAssign):  # 'bool | list[int]' -> [bool, list]
            kinds = [kind.partition('[')[0] for kind in ast.unparse(node.annotation).split(' | ')]
        settings[name] = Setting(kinds, node.value, text.strip('\n'))
    return settings


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


def checked(arg, name, value, kinds):
    """The value of a setting in its type. Raises ValueError for an unknown name or a wrong type."""
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see --help"
        raise ValueError(f"{arg}: unknown setting {name!r}; {hint}")
    try:
        return (parse if arg.startswith('-') else fit)(value, kinds[name])
    except ValueError:
        raise ValueError(f"{arg}: {name} must be {' or '.join(kinds[name])}, got {value!r}") from None


@functools.cache  # parsing all scripts takes 0.2 s
def settings_of_scripts():
    """The names of all settings and of GPTConfig's fields."""
    paths = [ROOT / f'{name}.py' for name in (*SCRIPTS, 'model')]
    return {key for path in paths if path.exists() for key in declared(path)}


def run_file(name, values):
    """What a config file, plain Python that sees `values`, assigns, without other scripts' settings. It is
    looked for here, then beside this file."""
    path = Path(name) if Path(name).exists() else ROOT / name
    if not path.exists():
        raise ValueError(f"there is no config file {name}: neither here nor in {ROOT}")
    others = settings_of_scripts()
    sys.path.append(str(path.resolve().parent))  # it may import a mixer in a file beside it
    # as builtins: the globals afterwards are what the file assigned
    assigned = runpy.run_path(str(path), {'__builtins__': vars(builtins) | values})
    return {key: value for key, value in assigned.items() if key in values or (
        key.islower() and not key.startswith('_') and key not in others and type(value) in PLAIN)}


def show(label, values):
    """Prints settings, wrapped."""
    items = ', '.join(f"{name} = {value!r}" for name, value in values.items()) or 'nothing for this script'
    print0(textwrap.fill(f"{label}: {items}", 100, subsequent_indent='    ', break_on_hyphens=False))


# configure --------------------------------------------------------------------------------------------------

# What configure has found:
#     config      all settings of the script
#     model_args  fields of model_config that were given
#     words       plain words of the command line
#     given       name -> 'flags' or its config file, of all that was set, the last one last
#     file_args   model_args as the config files alone have them
Configured = collections.namedtuple('Configured', 'config model_args words given file_args')


def configure(settings, model_config=None, words=0, argv=None,  # noqa: C901
              default_file=None, tunes=False, also=None, texts=False):
    """Override a script's settings by config files and flags, and print which.

    settings: the script's globals(). model_config: 'GPTConfig', if its fields in model.py are settings too.
    words: how many plain words there may be. argv: the command line of an imported script. default_file: for
    a command line without a config file, unless --init_from names a model. tunes: if it names a model to
    fine-tune, the default file still gives the script's own settings. also: a script whose flags are let
    through. texts: whether .py files are words, but in a folder named config. Raises ValueError for an
    unknown setting or file, or a wrong type.
    """
    path = Path(settings['__file__'])
    launched = settings['__name__'] == '__main__'
    own = declared(path)
    fields = declared(ROOT / 'model.py') if model_config else {}
    known = own | fields
    values = {name: settings[name] for name in own}
    values |= {name: ast.literal_eval(field.default) for name, field in fields.items()}
    kinds = {name: setting.kinds or [type(values[name]).__name__] for name, setting in known.items()}
    others = declared(ROOT / also) if also else ()

    argv = sys.argv[1:] if launched else argv or []
    if launched:
        sys.excepthook = one_line_errors
        with contextlib.suppress(AttributeError):  # a notebook's; a terminal prints ? for what it lacks
            sys.stdout.reconfigure(errors='replace')
    if {'-h', '--help'} & {*argv}:
        print(settings['__doc__'], *(setting.source for setting in known.values()), sep='\n')
        raise SystemExit(0)

    plain = [arg for arg in argv if arg == '-' or not arg.startswith('-') and (
        not arg.endswith('.py') or texts and Path(arg).parent.name != 'config')]
    if len(plain) > words:
        raise ValueError(f"cannot use {plain[words]!r}: settings are --key=value, config files end in .py")
    overrides = [arg for arg in argv if arg not in plain]
    given = {}
    file_args = {}
    start = ['scratch', *re.findall('--init_from=(.*)', '\n'.join(argv))][-1]
    by_default = (launched and default_file and (start == 'scratch' or tunes and start != 'resume')
                  and all(arg.startswith('-') for arg in overrides))
    for arg in [default_file, *overrides] if by_default else overrides:
        if arg.startswith('-'):
            name, equals, text = arg.removeprefix('--').partition('=')
            if name not in ('start', 'stop', 'system'):  # a path may begin with ~
                text = os.path.expanduser(text)
            assigned = {name: text if equals else True}
            label = 'flags'
            if name in others and name not in kinds:
                continue
        else:
            assigned = run_file(arg, values)
            label = arg
            if by_default and start not in ('scratch', 'auto'):
                assigned = {name: value for name, value in assigned.items() if name in own}
        for name, value in assigned.items():
            assigned[name] = values[name] = value = checked(arg, name, value, kinds)
            if value == '' and label == 'flags' and settings.get(name):  # its default is not empty
                raise ValueError(f"{arg} is empty: give a value, or leave it out")
            given.pop(name, None)
            given[name] = label
        if label != 'flags':
            show(label, assigned)
            file_args |= {name: value for name, value in assigned.items() if name in fields}
    flags = {name: values[name] for name, label in given.items() if label == 'flags'}
    if flags:
        show('flags', flags)
    check_settings({name: values[name] for name in given})
    config = {name: values[name] for name in own}
    settings.update(config)
    if launched and config.get('device') in ('auto', 'cpu'):
        yield_cores()
    model_args = {name: values[name] for name in given if name in fields}
    return Configured(config, model_args, plain, given, file_args)


def check_settings(settings, choices=CHOICES):
    """Raises ValueError for settings out of RANGES, or none of choices, name -> values. None is in range."""
    wrong = [f"{name}={settings[name]!r} is none of {', '.join(str(one) or repr(one) for one in known)}"
             for name, known in choices.items() if name in settings and settings[name] not in known]
    wrong += [f"{name}={settings[name]} must be at least {low:g} and at most {AT_MOST.get(name, high)}"
              for (low, high), names in RANGES.items() for name in names.split()
              if settings.get(name) is not None
              and not low <= settings[name] <= settings.get(AT_MOST.get(name), high)]
    if wrong:
        raise ValueError('; '.join(wrong))


def check_effect(given, settings):
    """Raises ValueError for a flag that is UNUSED with these settings."""
    for name, value in settings.items():
        refuse_unused(given, UNUSED.get(f'{name}={value}', '').split(), f'with {name}={value}')


def refuse_unused(given, names, where):
    """Raises ValueError if one of the names is a flag; config files serve many runs."""
    for name in names:
        if given.get(name) == 'flags':
            raise ValueError(f"--{name} has no effect {where}: leave it out")


def effective(settings, unused):
    """model_args of Configured without those of config files that flags leave without effect. unused:
    model.unused."""
    args = settings.model_args
    of_files = unused(settings.file_args)
    lost = []
    while new := [name for name in unused(args) - of_files if settings.given[name] != 'flags']:
        lost += new  # without these, others may lose their effect
        args = {name: args[name] for name in args if name not in lost}
    if lost:
        print0(f"left out, without effect beside the flags: {', '.join(sorted(lost))}")
    return args


@contextlib.contextmanager
def reading(path):
    """Raises ValueError, with the file's name, for errors of a library that reads it."""
    try:
        yield
    except Exception as error:
        if on_purpose(error) or getattr(error, 'filename', None):
            raise
        raise ValueError(f"{path} is damaged or of another kind: {type(error).__name__}: "
                         f"{str(error).partition('. ')[0]:.150}") from error


@contextlib.contextmanager
def naming(fields):
    """Raises ValueError that names the given fields of GPTConfig if Python or torch raises an error while the
    model is built or run."""
    try:
        yield
    except Exception as error:
        if on_purpose(error) or isinstance(error, (NameError, AttributeError)):
            raise  # as an edit of model.py may raise
        given = ', '.join(f'{name}={value!r}' for name, value in fields.items())
        frame = [frame for frame in traceback.extract_tb(error.__traceback__) if is_ours(frame.filename)][-1]
        raise ValueError(f"a model with these settings fails: {given}; {Path(frame.filename).name}, line "
                         f"{frame.lineno}, raises {error!r:.200}") from error


def on_purpose(error):
    """Whether our own code raised this error for the user: the innermost frame is ours, at `raise`."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (isinstance(error, (ValueError, OSError, ImportError)) and frame.line.startswith('raise ')
            and is_ours(frame.filename))


def is_ours(path):
    """Whether a file is one of this repository."""
    return Path(path).resolve().is_relative_to(ROOT)


def refused_file(error):
    """Whether the system gave no permission, or refused a file that the command line names, or its folder."""
    name = str(getattr(error, 'filename', None) or '')
    return isinstance(error, PermissionError) or name and any(
        name in arg or name.startswith(arg.partition('=')[2] or arg) for arg in sys.argv[1:])


def one_line_errors(kind, error, trace):
    """The excepthook of a script: a line for what users can mend, else the traceback."""
    message = str(error)
    if kind is BrokenPipeError:
        os._exit(141)  # of `| head`: no word, not even at exit
    elif kind is KeyboardInterrupt:
        message = 'interrupted'
    elif issubclass(kind, MemoryError) or re.search("out of memory|can't allocate memory", message):
        message = ('out of memory: lower --batch_size (train.py: and raise --gradient_accumulation_steps by '
                   'as much), --max_new_tokens or --procs')
    elif re.search(LOST_RANK, message) and 'RANK' in os.environ:
        message = 'this rank ends because another one has, which says why'
    elif re.search(CANNOT_WRITE, message):
        message = f"cannot write ({message}): free some space, or write elsewhere"
    elif not (on_purpose(error) or refused_file(error)):
        return sys.__excepthook__(kind, error, trace)
    print(f"{Path(sys.argv[0]).name}: {' '.join(message.splitlines())}", file=sys.stderr)


# the machine ------------------------------------------------------------------------------------------------

def runtime(device='auto', dtype='auto', seed=1337, threads=None, bound_by_memory=False):
    """Settles device, dtype and threads, and seeds torch.

    device: see choose_device. dtype: float32, bfloat16, float16 (CUDA only; needs a scaler), or auto, see
    fastest_dtype. bound_by_memory: whether compiled steps, or weights in eight bits, generate text. Returns
    device, device_type, dtype (torch's), threads and autocast (`with run.autocast():`). Raises ValueError for
    a device that is not here or lacks the dtype.
    """
    import torch
    kind, index = choose_device(device)
    if threads:
        torch.set_num_threads(threads)
    threads = torch.get_num_threads()
    device = kind
    name = f'{threads} threads'
    if kind == 'cuda':
        torch.cuda.set_device(index)
        device = f'cuda:{index}'
        name = torch.cuda.get_device_name(index)
    elif kind == 'cpu':
        keep_freed_memory()
    if dtype == 'auto':
        dtype = fastest_dtype(kind, index, bound_by_memory)
    if dtype not in ('float32', 'bfloat16') and (kind, dtype) != ('cuda', 'float16'):
        raise ValueError(f"dtype={dtype}: use --dtype=auto, float32 or bfloat16; float16 needs CUDA")
    torch.set_float32_matmul_precision(matmul_precision(kind, dtype))
    # torch.manual_seed would ask CUDA as well
    (torch.default_generator if kind == 'cpu' else torch).manual_seed(seed)
    print0(f"device {device} ({name}), dtype {dtype}")
    compute = getattr(torch, dtype)
    autocast = (contextlib.nullcontext if dtype == 'float32' else
                functools.partial(torch.autocast, kind, compute))
    return types.SimpleNamespace(device=device, device_type=kind, dtype=compute, autocast=autocast,
                                 threads=threads)


def yield_cores():
    """Has OpenMP's threads wait asleep where other programs keep more than a third of the cores busy: two
    threads then take 0.3 to 0.6 of the time, alone 1.1 to 1.5 times as long (docs/evidence.md). OpenMP reads
    the environment when torch loads it; what a user has set counts."""
    decided = {'OMP_NUM_THREADS', 'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT'} & os.environ.keys()
    if decided or 'torch' in sys.modules or sys.platform != 'linux':
        return
    busy = busy_cores()
    cores = os.cpu_count()
    if busy > cores / 3:
        os.environ['OMP_WAIT_POLICY'] = 'passive'
        print0(f"other programs use about {busy:.1f} of {cores} cores: threads wait asleep")


def busy_cores():
    """How many cores other programs use on Linux, in a tenth of a second's sleep."""
    def used():  # hundredths of a second: user, nice, system
        return sum(map(int, Path('/proc/stat').read_text('utf-8').split()[1:4]))
    before = used()
    time.sleep(0.1)
    return (used() - before) / 10


def choose_device(device):
    """'auto' (the best), 'cpu', 'cuda', 'cuda:1', 'mps' -> (type, index); under torchrun each rank has its
    own GPU. Raises ValueError if it is not here."""
    import torch
    kind, _, index = device.partition(':')
    counts = {'cuda': torch.cuda.device_count, 'mps': torch.mps.device_count, 'cpu': lambda: 1}
    if kind == 'auto':
        kind = next(kind for kind in counts if counts[kind]())
    if kind not in counts:
        raise ValueError(f"device={device}: use cpu, mps, cuda, cuda:1 or auto")
    index = int(os.environ.get('LOCAL_RANK', index or 0)) if kind == 'cuda' else 0
    count = counts[kind]()
    if index >= count:
        raise ValueError(f"device={kind}:{index}: torch sees {count or 'no'} {kind.upper()}; use cpu or auto")
    return kind, index


def fastest_dtype(kind, index, bound_by_memory):
    """bfloat16 where there are units for it, float16 on older GPUs, else float32. A CPU without units takes
    twice as long in bfloat16 for many rows; but compiled steps that generate wait for weights, half the bytes
    here, and torch's kernel for eight bits is fast in bfloat16 alone."""
    import torch
    if kind == 'cuda':
        return 'bfloat16' if torch.cuda.get_device_capability(index) >= (8, 0) else 'float16'
    return 'bfloat16' if kind == 'cpu' and (bound_by_memory or cpu_has_bfloat16()) else 'float32'


def cpu_has_bfloat16():
    """Whether the CPU has units for bfloat16, without which torch multiplies up to 30 times slower in it."""
    import torch
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def matmul_precision(kind, dtype):
    """How float32 matmuls may be computed. On CUDA by TF32 in a float32 run; beside 16 bits routers and
    states are float32 for a reason. On AMD's CPUs by oneDNN ('medium', exact there), in 0.4 of MKL's time; on
    Intel's it takes 1.2 to 2 times as long, and rounds to bfloat16 with AMX."""
    vendor = platform.processor()  # Windows says it here
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
    'H200': 989, 'H100 PCIe': 756, 'H100': 989, 'B200': 2250, 'A100': 312, 'A10': 125, 'L40S': 362, 'L4': 121,
    'V100-PCIE': 112, 'V100': 125, 'T4': 65, 'RTX 5090': 210, 'RTX 4090': 165, 'RTX 3090': 71,
}


def peak_flops(device, dtype):
    """FLOP/s of the device at 16 bits, or None if unknown."""
    import torch
    if 'cuda' not in device or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items()  # a Ti is another card
                 if re.search(rf'\b{part}\b(?! (Ti|D|NVL|Laptop|Max-Q)\b)', name)), None)


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

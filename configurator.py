"""
Settings from config files and flags; device, dtype, threads and seed in one place.
    $ python train.py config/small.py --batch_size=8 --compile=False      # overrides, from left to right
A script's settings are the lower-case names with plain values above configure(...); the type of one is its
annotation, else its default's. Text stays text; 1e6 may be an int, an int a float, true, false, 1, 0 a bool.
"""
import ast, builtins, contextlib, ctypes, dataclasses, difflib, functools, inspect
import os, re, runpy, sys, traceback, types, typing
from pathlib import Path

SCRIPTS = [Path(__file__).with_name(f'{x}.py') for x in ('model', 'train', 'sample', 'bench', 'prepare')]
ONE_LINE = (ValueError, OSError, ImportError, KeyboardInterrupt) # what users can mend
PLAIN = [bool, int, float, str, tuple, list, dict, type(None)]
is_setting = lambda name, value: name.islower() and name[0] != '_' and type(value) in PLAIN

def stop(message, code):
    print(f"{Path(sys.argv[0]).name}: {' '.join(str(message).splitlines())}", file=sys.stderr)
    raise SystemExit(code)

def fit(value, kinds): # the value as one of these types; a bool is no number, a numpy scalar nothing plain
    if type(value) in kinds: return value
    for kind in (float, int, bool): # 1 for 1.0, 1e6 for 1000000, 1 for True: equal, but of another type
        if kind in kinds and type(value) in (int, float) and kind(value) == value: return kind(value)
    raise ValueError

def parse(text, kinds): # a flag: a literal (True, 3e-4, [1, 2]) where the setting takes one, else the text
    with contextlib.suppress(Exception): # six of them can mean no; without str, quotes stay part of the text
        return fit(ast.literal_eval({'true': 'True', 'false': 'False'}.get(text, text)), {*kinds} - {str})
    return fit(text, kinds)

def setting_lines(source): # of a script, or of GPTConfig: settings, and the comments that head their groups
    fields = source.partition('\nclass GPTConfig')[2]
    head = re.split(r'\n(?:.* = )?configure\(|\n    def ', fields or source)[0]
    return re.findall(rf"^{'    ' if fields else ''}(?:# ?\w|[a-z]\w* *(?::[^=\n]*)?=(?!=)).*", head, re.M)

def run_file(name, folder, seen): # what a config file assigns: Python that sees the settings so far
    path = Path(name) if Path(name).is_file() else folder / name
    if not path.is_file():
        stop(f"no config file {name}; config/ has {sorted(p.name for p in folder.glob('config/*.py'))}", 2)
    try: # the settings so far come as builtins, so that the globals afterwards are what the file assigned
        found = runpy.run_path(str(path), {'__builtins__': {**vars(builtins), **seen}})
    except Exception as e:
        line = re.findall(f'"{re.escape(str(path))}", line (\\d+)', traceback.format_exc())[-1:] or '?'
        stop(f"{name}, line {line[0]}: {type(e).__name__}: {getattr(e, 'msg', e)}", 2)
    sources = [script.read_text('utf-8') for script in SCRIPTS if script.exists()] # one file serves them all
    others = {re.split(r'\W', line.strip())[0] for source in sources for line in setting_lines(source)}
    return {k: v for k, v in found.items() if k in seen or is_setting(k, v) and k not in others}

def configure(settings, model_config=None, words=0, argv=None, default_file=None):
    """Overrides a script's settings, its globals(), by files and flags, and prints which. Returns all of them
    and the given fields of model_config, two dicts, and with words=n a list of up to n plain words. Without a
    file on the command line default_file is loaded. An imported script leaves the command line alone."""
    if isinstance(model_config, str):
        model_config = getattr(__import__('model'), model_config)
    config, model_args, kinds = {k: v for k, v in settings.items() if is_setting(k, v)}, {}, {}
    fields = {f.name: f.default for f in dataclasses.fields(model_config)} if model_config else {}
    assert not config.keys() & fields.keys(), f"owned twice: {config.keys() & fields.keys()}"
    values, folder = {**config, **fields}, Path(settings.get('__file__', __file__)).parent
    hints = dict(settings.get('__annotations__') or settings.get('__annotate__', lambda _: {})(1)) # in 3.14
    hints.update(typing.get_type_hints(model_config) if model_config else {})
    for name, value in values.items(): # bool | str -> [bool, str], list[int] -> [list]; None alone: anything
        hint = hints.get(name, type(value))
        each = hint.__args__ if isinstance(hint, types.UnionType) else PLAIN if hint is type(None) else [hint]
        kinds[name] = [typing.get_origin(part) or part for part in each]
    if argv is None:
        argv, default_file = (sys.argv[1:], default_file) if settings['__name__'] == '__main__' else ([], '')
    if settings.get('__name__') == '__main__':
        sys.excepthook = one_line_errors
        with contextlib.suppress(AttributeError): # what is not UTF-8 gets ? for what it lacks
            sys.stdout.reconfigure(errors='replace')
    if '-h' in argv or '--help' in argv:
        print(settings['__doc__'], *setting_lines(Path(settings['__file__']).read_text('utf-8')), sep='\n')
        print(*setting_lines(inspect.getsource(model_config)) if model_config else '', sep='\n')
        raise SystemExit(0)
    plain = [arg for arg in argv if not arg.startswith('-') and not arg.endswith('.py')]
    if plain[words:]:
        stop(f"cannot use {plain[words]!r}: settings are --key=value, config files end in .py", 2)
    overrides = [arg for arg in argv if arg not in plain]
    if default_file and all(arg.startswith('-') for arg in overrides): overrides.insert(0, default_file)
    for arg in overrides:
        flag, (name, equals, text) = arg.startswith('-'), arg.removeprefix('--').partition('=')
        found = {name: text if equals else True} if flag else run_file(arg, folder, values)
        for name, value in found.items():
            if name not in kinds:
                near = difflib.get_close_matches(name.strip('-').replace('-', '_').lower(), kinds)
                hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see --help"
                stop(f"{arg}: unknown setting {name!r}; {hint}", 2)
            try:
                values[name] = (parse if flag else fit)(value, kinds[name])
            except (ValueError, OverflowError):
                wanted = [{bool: 'True or False', type(None): 'None'}.get(k, k.__name__) for k in kinds[name]]
                stop(f"{arg}: {name} must be {' or '.join(wanted)}, got {value!r}", 2)
            (model_args if name in fields else config)[name] = values[name]
        if os.getenv('RANK', '0') == '0':
            print(f"{arg}: {', '.join(f'{name} = {values[name]!r}' for name in found) or 'nothing for us'}")
    settings.update(config)
    return (config, model_args, plain) if words else (config, model_args)

def runtime(device='auto', dtype='auto', seed=1337, threads=None):
    """Settles device and dtype, seeds torch. `with run.autocast():` is reusable; float16 needs a scaler."""
    import torch # not at the top: --help is quick
    kind, _, index = device.partition(':')
    if kind == 'auto':
        kind = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    index = int(os.getenv('LOCAL_RANK', index or 0)) if kind == 'cuda' else 0 # torchrun: a GPU for each rank
    count = {'cuda': torch.cuda.device_count, 'mps': torch.backends.mps.is_available, 'cpu': lambda: 1}
    count, device = count.get(kind, int)(), f'cuda:{index}' if kind == 'cuda' else kind
    if index >= count:
        raise ValueError(f"device={device}: torch sees {count or 'no'} {kind.upper()}; use cpu or auto")
    if threads: torch.set_num_threads(threads)
    threads, gpu, best, precision = torch.get_num_threads(), None, 'float32', 'highest'
    if kind == 'cuda':
        torch.cuda.set_device(index)
        gpu, precision = torch.cuda.get_device_name(index), 'high' # TF32
        best = 'bfloat16' if torch.cuda.get_device_capability(index) >= (8, 0) else 'float16'
    elif kind == 'cpu':
        amx, bf16 = (getattr(torch.cpu, f'_is_{x}_supported', bool)() for x in ('amx_tile', 'avx512_bf16'))
        exact = torch.backends.cpu.get_cpu_capability().startswith('AVX') and not amx # else it rounds
        best, precision = 'bfloat16' if amx or bf16 else 'float32', 'medium' if exact else 'highest' # 2.3x
        with contextlib.suppress(AttributeError, OSError, TypeError): # glibc alone has mallopt
            for option, value in ((-3, 1 << 30), (-1, 2**31 - 1), (-2, 64 << 20)): # mmap, trim and pad
                ctypes.CDLL(None).mallopt(option, value) # else each step maps its memory anew: 1.25x the time
    dtype = best if dtype == 'auto' else dtype
    if dtype not in ('float32', 'bfloat16') and (kind, dtype) != ('cuda', 'float16'):
        raise ValueError(f"dtype={dtype}: use --dtype=auto, float32 or bfloat16; float16 needs CUDA")
    torch.set_float32_matmul_precision(precision)
    (torch.default_generator if kind == 'cpu' else torch).manual_seed(seed) # torch's own asks CUDA as well
    if os.getenv('RANK', '0') == '0': print(f"device {device} ({gpu or f'{threads} threads'}), dtype {dtype}")
    ptype = getattr(torch, dtype)
    cast = functools.partial(torch.autocast, kind, ptype) if dtype != 'float32' else contextlib.nullcontext
    return types.SimpleNamespace(device=device, device_type=kind, dtype=ptype, autocast=cast, threads=threads)

def print0(text):
    """Prints at once, on rank 0 only."""
    if os.getenv('RANK', '0') == '0':
        print(text, flush=True)

def one_line_errors(kind, error, trace):
    """The excepthook of a script: one line for what users can mend, a trace for bugs (or FLATGPT_TRACE=1)."""
    if kind is BrokenPipeError:
        os._exit(141) # `| head` has seen enough: not a word, not even from the flush at exit
    message = str(error) or 'interrupted'
    if issubclass(kind, MemoryError) or re.search("out of memory|can't allocate memory", message):
        message = 'out of memory; try half --batch_size and double --gradient_accumulation_steps'
    elif os.getenv('FLATGPT_TRACE') or not issubclass(kind, ONE_LINE):
        return sys.__excepthook__(kind, error, trace)
    print(f"{Path(sys.argv[0]).name}: {' '.join(message.splitlines())}", file=sys.stderr)

"""
Models in and out: ours, nanoGPT's, and published ones of the Hugging Face hub.

    python hub.py Qwen/Qwen3-0.6B                         # fetches it, says what it is, and the next commands
    python hub.py folder                                  # the same for a folder with config.json
    python hub.py export out/ folder                      # a run of train.py -> a folder for transformers
    python hub.py export out/ folder --dtype=bfloat16
    python hub.py export out/ my.gguf --dtype=q8_0        # one file for llama.cpp and what is built on it
    python hub.py families                                # those of families.py that are read, and written

train.py, sample.py and bench.py read published models with --init_from=<id or folder>. HF_TOKEN, HF_HOME,
HF_ENDPOINT and HF_HUB_OFFLINE work as in huggingface_hub. Only safetensors are read, no pickles.
"""
import dataclasses
import fnmatch
import functools
import itertools
import json
import math
import os
import pathlib
import pickle
import re
import shlex
import shutil
import tempfile
import typing

from configurator import configure, package, plain, reading

dtype: str | None = None  # of exported weights: float32, bfloat16, float16, in .gguf q8_0; None: as stored
config, _, words, *_ = configure(globals(), words=3)

import torch

import mixers  # noqa: F401 (enters its layers)
from families import (
    FAMILIES,
    FUSED_EXPERTS,
    GGUF,
    GGUF_EXPERTS,
    GGUF_FIELDS,
    GGUF_PAIRED,
    PLUS_ONE,
    SAME,
    Layout,
    canonical,
    config_from_hf,
    config_to_hf,
    like,
    refuse,
    rows_interleaved,
    text_config,
)
from model import GPT, GPTConfig, complete_scaling, llama3, num_params
from prepare import load_tokenizer
from tokenizer import EOT, WORD_PATTERN, json_tokenizer, library_tokenizer, tokenizer_from_state
from weights import add_lora, fill_rows, merge_lora, quantize_weights

DTYPES = {'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16}  # as safetensors name them

# tensors ----------------------------------------------------------------------------------------------------

class Stored(typing.NamedTuple):
    """A tensor in a file."""
    path: str
    name: str
    shape: tuple
    dtype: torch.dtype


class Part(typing.NamedTuple):
    """Their tensor: these elements of one of ours, in this layout."""
    name: str
    index: tuple
    layout: Layout


def plan(model, family):
    """Our tensor, as state_dict() names it -> its Parts. Raises ValueError for one without a name."""
    found = {}
    for ours, w in model.state_dict().items():
        if ours.startswith('mtp.'):  # for training alone
            continue
        layer, name = re.fullmatch(r'(?:h\.(\d+)\.)?(.*)', ours).groups()
        before = family.layer
        if callable(before) and layer:
            before = before(model.config, int(layer), name)
        before = before.replace('N', layer) if layer else ''
        mixer = model.config.mixer_of(int(layer)) if layer else ''
        names, orders = of(mixer, family.names), of(mixer, family.rows)
        module, dot, kind = name.rpartition('.')
        key, after = (name, '') if name in names else (module, dot + kind)
        if key not in names:
            raise ValueError(f"{family.arch} has no name for {ours}: add it to its names in families.py")
        theirs = names[key](model.config) if callable(names[key]) else names[key]
        theirs = [before + one + after for one in theirs.split()]

        widths = getattr(model.get_submodule(ours.rpartition('.')[0]), 'widths', None) or [len(w)]
        if order := orders.get(name) or orders.get(module):
            rows = order(model.config, *torch.arange(sum(widths)).split(list(widths)))
        else:  # one after the other, the last takes the rest
            begins = [0, *itertools.accumulate(widths)][:len(theirs)]
            rows = list(map(slice, begins, [*begins[1:], None]))
        is_experts = module.startswith('mlp.experts')  # ours are one tensor, (expert, row, column)
        found[ours] = [
            Part(one.replace('.E.', f'.{e}.'), (e, row) if is_experts else (row,),
                 family.layouts.get(name, SAME))
            for e in (range(len(w)) if '.E.' in theirs[0] else [slice(None)])
            for one, row in zip(theirs, rows, strict=True)]
    return found


def of(mixer, table):
    """A family's table for layers with this mixer."""
    own = {name.removeprefix(f'{mixer}.'): one for name, one in table.items() if name.startswith(f'{mixer}.')}
    return {**table, **own}


def read_json(folder, name):
    path = os.path.join(folder, name)
    with reading(path), open(path, encoding='utf-8') as f:
        return json.load(f)


WEIGHTS, INDEX = 'model.safetensors', 'model.safetensors.index.json'


def weight_names(folder):
    """The names of a folder's safetensors."""
    if os.path.exists(os.path.join(folder, INDEX)):
        return sorted(set(read_json(folder, INDEX)['weight_map'].values()))
    return [WEIGHTS]


def read_headers(folder):
    """name -> Stored, of a folder's safetensors. Raises FileNotFoundError."""
    found = {}
    for path in [os.path.join(folder, name) for name in weight_names(folder)]:
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path} is missing; weights are read from safetensors alone")
        with reading(path), package('safetensors').safe_open(path, 'pt') as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                header = file.get_slice(name)
                found[name] = Stored(path, name, tuple(header.get_shape()), DTYPES[header.get_dtype()])
    return found


def stored_dtype(stored):
    """The dtype of the largest tensor."""
    return max(stored.values(), key=lambda one: math.prod(one.shape)).dtype


def by_family_names(stored, family):
    """stored with the family's names. Some files lack their prefix ('transformer.', GPT-2 and BLOOM as first
    published), others nest the text model in a larger one ('model.language_model.')."""
    first, head = f"{family.names['wte']}.weight", family.names['lm_head']
    prefix, _, rest = first.partition('.')
    for theirs, ours in family.aliases.items():
        stored = {name.replace(theirs, ours): one for name, one in stored.items()}
    theirs = min((name for name in stored if name.endswith(rest)), key=len, default=first).removesuffix(rest)
    return {f'{prefix}.{name.removeprefix(theirs)}' if name.startswith(theirs) and not name.startswith(head)
            else name.removeprefix(theirs.removesuffix(f'{prefix}.')): one for name, one in stored.items()}


IGNORED = ('*vision*', '*projector*', '*.attn.bias', '*.attn.masked_bias', '*.attention.bias',
           '*.attention.masked_bias', '*inv_freq')


def check(parts, stored, model, family, folder):
    """Raises ValueError that names all missing, unexpected or misshapen tensors."""
    ignored = [*IGNORED, *(one.replace('N', str(model.config.n_layer)) for one in family.ignored)]
    if model.lm_head is None:
        ignored.append(f"{family.names['lm_head']}.*")
    wanted = {name: tuple(w.shape) for name, w in their_tensors(model, parts, torch.float32).items()}
    found = {name: one.shape for name, one in stored.items()
             if name in wanted or not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)}
    found |= {part.name: wanted[part.name] for part in parts.get('wpe.weight', ())  # may be cropped
              if found.get(part.name, ()) >= wanted[part.name]}
    wrong = [f"{name} is {found.get(name, 'missing')}, not {wanted.get(name, 'expected')}"
             for name in sorted(wanted.keys() | found.keys()) if wanted.get(name) != found.get(name)]
    if wrong:
        raise ValueError(f"{folder} does not fit its config.json: {'; '.join(wrong[:60])}")


@torch.no_grad()
def fill(model, parts, stored):
    """Copies the files' tensors into the model."""
    for ours, w in model.state_dict().items():
        # each tensor maps its file anew: pages of a mapping that were read count as memory
        opened = functools.cache(functools.partial(package('safetensors').safe_open, framework='pt'))
        for part in parts[ours]:
            path, name, *_ = stored[part.name]
            theirs = part.layout.read(opened(path).get_tensor(name))
            fill_rows(model, ours, w, part.index, theirs[:len(w)] if ours == 'wpe.weight' else theirs)


def from_pretrained(folder_or_id, dtype=None, device='cpu', int8=False, **changes):
    """A folder with config.json and safetensors, or an id on the hub -> the model, in eval mode. dtype: of
    the weights; None: as stored. int8: quantizes the large ones as they are read. changes: config fields to
    set otherwise. Raises OSError for missing files, ValueError that names all that does not fit."""
    folder = fetch(folder_or_id)
    c = text_config(read_json(folder, 'config.json'))
    config = config_from_hf(c)
    if changes.get('block_size', 0) > c.get('index_topk', math.inf):
        refuse(c, block_size=changes['block_size'])
    if config.rope_scaling and config.rope_scaling['rope_type'] == 'longrope':
        # transformers' list for short texts; a larger block_size takes the other
        changes = {'block_size': config.rope_scaling['original_max_position_embeddings'], **changes}
    family, stored = FAMILIES[c['model_type']], read_headers(folder)
    dtype, stored = dtype or stored_dtype(stored), by_family_names(stored, family)
    with torch.device('meta'):
        model = GPT(changed_config(config, changes))
    if any(name.endswith(FUSED_EXPERTS['mlp.experts.c_proj.weight']) for name in stored):
        family = like(family, names=FUSED_EXPERTS)
    parts = plan(model, family)
    check(parts, stored, model, family, folder)
    for name, w in model.named_parameters():
        w.data = w.data.to(torch.float32 if parts[name][0].layout is PLUS_ONE else dtype)
    if int8:
        quantize_weights(model, dtype)
    model = model.to_empty(device=device)
    fill(model, parts, stored)
    return model.eval()


# export -----------------------------------------------------------------------------------------------------

@torch.no_grad()
def their_tensors(model, parts, dtype):
    """name -> tensor, in the family's layout: views of ours where layout and dtype agree. Buffers, the biases
    of experts, keep their dtype."""
    state, buffers = model.state_dict(), dict(model.named_buffers())
    return {part.name: part.layout.write(state[ours][part.index]).to(
                state[ours].dtype if ours in buffers else dtype).contiguous()
            for ours in parts for part in parts[ours]}


def tokenizer_files(tokenizer, model):
    """File name -> text, for AutoTokenizer."""
    eot = None if tokenizer.eot is None else tokenizer.decode([tokenizer.eot])
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': eot,
              'clean_up_tokenization_spaces': False, 'model_max_length': model.config.block_size,
              **getattr(tokenizer, 'config', {}), 'chat_template': tokenizer.chat_template}
    return {'tokenizer.json': tokenizer.to_json(), 'tokenizer_config.json': json.dumps(config, indent=2)}


EXPORTED = (WEIGHTS, 'tokenizer.json', 'tokenizer_config.json', 'config.json')


def save_pretrained(model, tokenizer, folder, dtype=None):
    """Writes a folder for AutoModelForCausalLM and AutoTokenizer. tokenizer: may be None; dtype: of the
    weights, None: the model's. Raises ValueError if no family computes the same or the folder holds other
    files, OSError or SafetensorError, with nothing changed, if it cannot be written."""
    safetensors, folder = package('safetensors'), pathlib.Path(folder).absolute()
    dtype = dtype or model.wte.weight.dtype
    if model.wte.weight.dtype not in DTYPES.values():
        raise ValueError(f"weights in {plain(model.wte.weight.dtype)} are not exported: use another dtype")
    c = {**config_to_hf(model.config), 'dtype': plain(dtype)}
    there = {path.name for path in folder.glob('*')}
    if WEIGHTS in there and 'exported_by' in (safetensors.safe_open(folder / WEIGHTS, 'pt').metadata() or {}):
        there -= {*EXPORTED}
    if there:
        raise ValueError(f"{folder} holds {', '.join(sorted(there)):.60}, of no earlier export: give another")
    texts = {}
    if tokenizer is not None:
        stops = list(tokenizer.stop_tokens)  # in a chat, an answer's end too
        c['eos_token_id'] = stops[0] if len(stops) == 1 else stops or None
        texts = tokenizer_files(tokenizer, model)
    texts['config.json'] = json.dumps(c, indent=2)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        temporary = pathlib.Path(temporary)
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding='utf-8', newline='')
        tensors = their_tensors(model, plan(model, FAMILIES[c['model_type']]), dtype)
        package('safetensors.torch').save_file(
            tensors, temporary / WEIGHTS, {'format': 'pt', 'exported_by': 'flatgpt'})
        shutil.copymode(temporary / 'config.json', temporary / WEIGHTS)  # else private to its owner
        folder.mkdir(exist_ok=True)
        for name in EXPORTED:
            if (temporary / name).exists():
                (temporary / name).replace(folder / name)
            else:  # the tokenizer of an earlier export
                (folder / name).unlink(missing_ok=True)


# llama.cpp --------------------------------------------------------------------------------------------------

GGUF_DTYPES = {'float32': 'F32', 'bfloat16': 'BF16', 'float16': 'F16', 'q8_0': 'Q8_0'}
GGUF_SPLITS = {  # what splits a text into words, in tokenizer.json: llama.cpp's name of it
    '': 'gpt-2', 'ByteLevel': 'gpt-2', WORD_PATTERN: 'llama-bpe', WORD_PATTERN.replace('{1,3}', ''): 'qwen2',
    # tiktoken's gpt2; cl100k_base, which differs where a text ends in line ends and spaces; o200k_base, which
    # differs in combining marks
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s": 'gpt-2',
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
    r"\s*[\r\n]|\s+(?!\S)|\s": 'llama-bpe',
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": 'gpt-4o'}


def gguf_tokenizer(tokenizer, n_vocab):
    """A tokenizer as llama.cpp's keys. Raises ValueError for all but byte-level BPE that it splits alike."""
    if tokenizer is None:
        raise ValueError("a GGUF file holds a tokenizer, and here is none")
    spec, stops = json.loads(library_tokenizer(tokenizer.to_json()).to_str()), tokenizer.stop_tokens
    step, merges = spec['pre_tokenizer'] or {'type': 'none'}, spec['model'].get('merges')
    steps = step.get('pretokenizers', [step])
    words = ' '.join(one.get('pattern', one).get('Regex', one['type']) for one in steps
                     if one.get('use_regex', True))
    if (words not in GGUF_SPLITS or merges and not words or not stops
            or any(one.get('add_prefix_space') for one in steps)
            or spec['normalizer'] not in (None, {'type': 'NFC'})):  # which it leaves out
        raise ValueError(f"llama.cpp has no such tokenizer as {tokenizer.name!r}: export a folder, and try "
                         "its own convert_hf_to_gguf.py")
    # 1: normal, 3: control, 4: user-defined, 5: unused
    tokens = {i: (text, 1) for text, i in spec['model']['vocab'].items()}
    tokens |= {one['id']: (one['content'], 3 if one['special'] else 4) for one in spec['added_tokens']}
    texts, kinds = zip(*(tokens.get(i, (f'[PAD{i}]', 5)) for i in range(n_vocab)))
    return {
        'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': GGUF_SPLITS[words],
        'tokenizer.ggml.tokens': [*texts], 'tokenizer.ggml.token_type': [*kinds],
        'tokenizer.ggml.merges': [*map(' '.join, merges)] or [f'{EOT} {EOT}'],  # none is not allowed
        'tokenizer.ggml.bos_token_id': [*tokenizer.bos, *stops][0], 'tokenizer.ggml.eos_token_id': stops[0],
        'tokenizer.ggml.eot_token_id': stops[-1], 'tokenizer.ggml.add_bos_token': bool(tokenizer.bos),
        'tokenizer.chat_template': tokenizer.chat_template}


def gguf_rope(config, arch):
    """A rope_scaling as llama.cpp's keys and tensors. Raises ValueError for one that it lacks."""
    options = dict(config.rope_scaling or {})
    kind = options.pop('rope_type', None)
    if kind == 'llama3' and arch == 'llama':
        freq = config.rope_base ** -(torch.arange(0, config.rope_dim, 2) / config.rope_dim)
        return {}, {'rope_freqs.weight': freq / llama3(freq, None, None, **options)[0]}
    keys = {'type': kind, 'factor': options.pop('factor', None),
            'original_context_length': options.pop('original_max_position_embeddings', None)}
    if kind not in (None, 'linear', 'yarn') or options:
        raise ValueError(f"llama.cpp's {arch} has no rope_scaling={config.rope_scaling}")
    return {f'rope.scaling.{key}': value for key, value in keys.items()}, {}


@torch.no_grad()
def save_gguf(model, tokenizer, path, dtype=None):
    """Writes one file for llama.cpp. dtype: of matrices, one of GGUF_DTYPES, None: the
    model's. Raises ValueError, with nothing written, for whatever llama.cpp lacks, or if the file exists."""
    gguf, config = package('gguf', 'files for llama.cpp need', 'gguf'), model.config
    path, kind = pathlib.Path(path), config_to_hf(config)['model_type']
    if path.exists():
        raise ValueError(f"{path} is there already: remove it, or give another name")
    if kind not in GGUF:
        raise ValueError(f"{kind} models are not written for llama.cpp, but {', '.join(GGUF)} are")
    family, (arch, fixed) = FAMILIES[kind], GGUF[kind]
    found, known = canonical(config), canonical(dataclasses.replace(config, **fixed))
    if wrong := [f"{name}={getattr(config, name)!r}" for name in fixed if found[name] != known[name]]:
        raise ValueError(f"llama.cpp's {arch} has no {', '.join(wrong)}")
    keys, tensors = gguf_rope(config, arch)
    keys |= {theirs: getattr(config, ours) for theirs, ours in GGUF_FIELDS.items()}
    keys['feed_forward_length'] = config.d_expert or config.d_ff
    if config.n_shared_expert:
        keys['expert_shared_feed_forward_length'] = config.n_shared_expert * config.d_expert
    about = gguf_tokenizer(tokenizer, config.vocab_size) | {f'{arch}.{key}': keys[key] for key in keys}
    writer, kinds = gguf.GGUFWriter(None, arch), gguf.GGUFValueType
    for key, value in about.items():
        if value is not None:  # llama.cpp's counts have no sign
            writer.add_key_value(key, value, kinds.UINT32 if type(value) is int else kinds.get_type(value))
    family = like(  # in our own layout, but for what rotates, with all experts in one tensor
        family, layouts=dict.fromkeys(family.layouts), names=GGUF_EXPERTS,
        rows={'attn.c_attn': rows_interleaved if arch in GGUF_PAIRED else None})
    names, state = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.n_layer), model.state_dict()
    tensors |= {part.name: state[ours][part.index]
                for ours, parts in plan(model, family).items() for part in parts}
    usual = GGUF_DTYPES[plain(dtype or model.wte.weight.dtype)]
    for name, w in tensors.items():
        module, _, what = name.rpartition('.')
        exact = w.ndim == 1 or module.endswith('gate') or usual == 'Q8_0' and w.shape[-1] % 32
        form = gguf.GGMLQuantizationType['F32' if exact else usual]
        writer.add_tensor(f'{names[module]}.{what}', gguf.quantize(w.float().numpy(), form), raw_dtype=form)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        whole = pathlib.Path(temporary, path.name)
        writer.write_header_to_file(whole)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        whole.replace(path)


# the hub ----------------------------------------------------------------------------------------------------

SMALL_FILES = ['config.json', 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja', INDEX]


def fetch(name):
    """A folder, or an id on the hub -> its folder, into which the tokenizer and, if config.json is supported,
    the safetensors are downloaded. Raises OSError."""
    if os.path.exists(name):
        return os.fspath(name)
    download = package('huggingface_hub').snapshot_download
    repo = name if '/' in name else f'openai-community/{name}'  # nanoGPT's names of GPT-2
    try:
        folder = download(repo, allow_patterns=SMALL_FILES)
        config_from_hf(read_json(folder, 'config.json'))
        return download(repo, revision=os.path.basename(folder), allow_patterns=weight_names(folder))
    except OSError as error:
        raise OSError(f"{repo} is not a folder here, and cannot be fetched: {' '.join(str(error).split())}"
                      ) from error


def describe(name, folder):
    """Prints what a published model is, and the next commands."""
    c = text_config(read_json(folder, 'config.json'))
    config = config_from_hf(c)
    with torch.device('meta'):
        model = GPT(config)
    active = f", {num_params(model, active=True):,} active" if config.n_expert else ''
    print(f"{name}: {c['model_type']}, {num_params(model):,} parameters{active}, "
          f"stored in {plain(stored_dtype(read_headers(folder)))}")
    print(f"context {config.block_size:,} tokens"
          f"{', where its indexer (left out) picks all' if 'index_topk' in c else ''}, "
          f"vocabulary {config.vocab_size:,}")
    try:
        tokenizer = json_tokenizer(folder)
        ends = [tokenizer.decode([i]) for i in tokenizer.stop_tokens]
        print(f"tokenizer: {tokenizer.n_vocab:,} tokens, texts end with {' or '.join(ends) or 'none'}, "
              f"{'with a' if tokenizer.chat_template else 'no'} chat template")
    except (OSError, ImportError, ValueError) as error:  # the model can be used without
        return print(f"tokenizer: none ({error})\nfolder: {folder}")
    name, shorter = shlex.quote(name), ' --block_size=1024' * (config.block_size > 1024)
    print(f"folder: {folder}\nnext:", f"sample.py --init_from={name} --start='Once upon a time'",
          f"prepare.py my.txt --tokenizer={shlex.quote(folder)} --out=mine",
          f"train.py --init_from={name} --dataset=mine{shorter}", sep='\n    python ')


def print_families():
    """Prints each family, whether it is written too, and what it sets that GPTConfig has otherwise; and how
    many there are."""
    for kind, family in FAMILIES.items():
        needs = [f'{name}={value}' for name, value in family.ours.items()
                 if value != getattr(GPTConfig, name)]
        letters = f"mixers {family.layer_types}, " if family.layer_types.strip('SL') else ''
        print(f"{kind:20} {'read, written' if family.exports else 'read':15} {letters}{', '.join(needs)}")
    print(f"{len(FAMILIES)} families")


# checkpoints of ours ----------------------------------------------------------------------------------------

# fields of GPTConfig that a checkpoint may be read with otherwise: they change no weights, but crop positions
CHANGEABLE = ('dropout', 'block_size', 'rope_scaling', 'balance_per_sequence', 'document_token')


def checkpoint_path(name, best=True):
    """name itself, or if it is a run's folder, its best.pt where wanted and there, else its ckpt.pt."""
    if not os.path.isdir(name):
        return name
    path = os.path.join(name, 'best.pt')
    return path if best and os.path.exists(path) else os.path.join(name, 'ckpt.pt')


def read_checkpoint(path):
    """The dict in a file of train.py's or nanoGPT's, its weights, 'model', and options, 'model_args', named
    as they are now; runs no code of it. Raises FileNotFoundError, or ValueError for another kind of file."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"no checkpoint at {path}: train one with `python train.py`, or set "
                                "--out_dir or --init_from")
    try:
        # mapped: a rank of a sharded model holds its part; Windows could not replace a file that is mapped
        found = torch.load(path, map_location='cpu', weights_only=True, mmap=os.name == 'posix')
        state, args = found['model'], found['model_args']
    except (RuntimeError, OSError, pickle.UnpicklingError, LookupError, TypeError, EOFError) as error:
        raise ValueError(f"{path} is no checkpoint of train.py, or is damaged: use another one") from error
    is_nanogpt = any('transformer.' in name for name in state)
    prefixes = re.compile(r'_orig_mod\.|module\.|transformer\.')  # of compiled models, of DDP, of nanoGPT
    state = {prefixes.sub('', name).replace('.mlp.balance_bias', '.mlp.expert_bias'): w
             for name, w in state.items()}
    args = {'norm_placement' if name == 'wiring' else name: value for name, value in args.items()}
    if is_nanogpt:
        state.pop('lm_head.weight', None)  # the same as wte's
        args = {**dict(pos='learned', norm='layernorm', norm_eps=1e-5, mlp='gelu', qk_norm=False), **args}
    return {**found, 'model': state, 'model_args': args}


def changed_config(trained, changes):
    """A trained model's config with other fields; the length that it was trained at does not change."""
    length = (trained.rope_scaling or {}).get('original_max_position_embeddings', trained.block_size)
    if 'rope_scaling' in changes:
        changes = {**changes, 'rope_scaling': complete_scaling(changes['rope_scaling'], length)}
    return dataclasses.replace(trained, **changes)


def from_state(state, model_args, **changes):
    """The model of a state dict and the fields of its config. changes: fields to set otherwise, of those
    in CHANGEABLE. Raises ValueError for more positions than were learned, RuntimeError for weights that
    are missing or of another shape."""
    trained = GPTConfig(**model_args)
    config = changed_config(trained, changes)
    if 'wpe.weight' in state:
        if config.block_size > trained.block_size:
            raise ValueError(f"block_size={config.block_size} is more than the {trained.block_size} "
                             "positions that the model has learned")
        state = {**state, 'wpe.weight': state['wpe.weight'][:config.block_size]}
    with torch.device('meta'):
        model = GPT(config)
    model = model.to_empty(device='cpu')
    model.load_state_dict(state)
    return model

# loading ----------------------------------------------------------------------------------------------------

def is_published(name):
    """Whether this is a folder with config.json, or looks like a hub id or one of nanoGPT's gpt2 names."""
    if os.path.exists(name):
        return os.path.exists(os.path.join(name, 'config.json'))
    hub_id = re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*|gpt2(-[a-z]+)?', name)
    return bool(hub_id) and not name.endswith('.pt')


def load(init_from, out_dir='out', device='cpu', dtype=None, best=True, merge=True, int8=False, **changes):
    """(model, tokenizer, rest): rest is what else its checkpoint holds.

    init_from: 'resume' (out_dir), a checkpoint of ours or nanoGPT's, the folder of a run, or a published
    model (see is_published). dtype: None: as stored. best: of a run's folder best.pt, if it is there, rather
    than ckpt.pt. merge: adds a LoRA run's adapters to the weights, else they stand beside them. int8:
    quantizes large weights. changes: fields of GPTConfig to set otherwise. The tokenizer is None where there
    is none, and rest['no_tokenizer'] says why; rest['path'] is the file or folder. Raises FileNotFoundError,
    or ValueError for any other file."""
    published = init_from != 'resume' and is_published(init_from)
    if published:
        path = fetch(init_from)
        model, rest = from_pretrained(path, dtype=dtype, device=device, int8=int8, **changes), {}
    else:
        path = checkpoint_path(out_dir if init_from == 'resume' else init_from, best)
        rest = read_checkpoint(path)
        state, args = rest.pop('model'), rest['model_args']
        if rest.get('lora'):
            model = adapted_model(path, rest, state, {**{
                name: args[name] for name in CHANGEABLE if name in args}, **changes})
            if merge:
                merge_lora(model)
        else:
            model = from_state(state, args, **changes)
        if int8:
            quantize_weights(model, dtype or torch.float32)
        model.to(device, dtype)
    rest.update(path=path, model_args=dataclasses.asdict(model.config))
    try:
        tokenizer = json_tokenizer(path) if published else find_tokenizer(rest, path)
    except (OSError, ImportError, ValueError) as error:  # it may still be trained, measured, exported
        tokenizer, rest['no_tokenizer'] = None, str(error)
    return model, tokenizer, rest


def adapted_model(path, rest, state, changes):
    """The base that a checkpoint of adapters names, with these beside its weights."""
    lora, base = rest['lora'], rest['lora']['base']
    if not (os.path.exists(base) or is_published(base)):
        raise FileNotFoundError(f"{path} holds adapters of {base}, which is not there: put it back")
    model, *_ = load(base, dtype=torch.float32, **changes)
    add_lora(model, lora['rank'], lora['alpha'], lora['targets'])
    kept = {name: w for name, w in model.state_dict().items() if '.lora_' not in name}
    model.load_state_dict({**kept, **state})
    return model


def find_tokenizer(rest, path):
    """A checkpoint's own tokenizer, without a chat template if it was trained on text alone; for one of
    nanoGPT's, its dataset's."""
    if rest.get('tokenizer'):
        tokenizer = tokenizer_from_state(rest['tokenizer'])
        if not rest.get('masked', True):
            tokenizer.chat_template = None
        return tokenizer
    dataset, n_vocab = rest.get('config', {}).get('dataset'), rest['model_args']['vocab_size']
    folder = os.path.join('data', str(dataset))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{path} names no tokenizer, and the data that it was trained on, {folder}, "
                                "is not here: prepare it")
    tokenizer = load_tokenizer(folder)
    if tokenizer.n_vocab > n_vocab:
        raise ValueError(f"{folder} has a tokenizer of {tokenizer.n_vocab:,} tokens, but {path} has "
                         f"vocab_size={n_vocab}: prepare the dataset that it was trained on here")
    return tokenizer


if __name__ == '__main__':
    if len(words) == 3 and words[0] == 'export':
        kinds = {plain(kind): kind for kind in DTYPES.values()}
        save, readers = save_pretrained, 'transformers and vLLM'
        if words[2].endswith('.gguf'):
            save, readers, kinds['q8_0'] = save_gguf, 'llama.cpp', 'q8_0'
        if dtype and dtype not in kinds:
            raise ValueError(f"dtype={dtype!r} is none of {', '.join(kinds)}")
        model, tokenizer, rest = load(words[1])
        if tokenizer is None:  # the weights can be used without
            print(f"no tokenizer is exported: {rest['no_tokenizer']}")
        if model.config.document_token is not None:  # transformers' models have no such thing
            print(f"document_token={model.config.document_token} is left out: it matters only where several "
                  "documents follow one another")
            model.config.document_token = None
        save(model, tokenizer, words[2], kinds.get(dtype))
        print(f"{rest['path']} is in {words[2]} for {readers}")
    elif words == ['families']:
        print_families()
    elif len(words) == 1 and words[0] != 'export':
        describe(words[0], fetch(words[0]))
    else:
        raise ValueError(f"got {' '.join(words)!r}: give an id on the hub or a folder, or "
                         "`export RUN FOLDER`; see --help")

"""
Models in and out: ours, nanoGPT's, and published ones of the Hugging Face hub.

    python hub.py Qwen/Qwen3-0.6B                         # fetches it, says what it is, and the next commands
    python hub.py folder                                  # the same for a folder with config.json
    python hub.py export out/ folder                      # a run of train.py -> a folder for transformers
    python hub.py export Qwen/Qwen3-0.6B my.gguf --dtype=q8_0  # one file, for llama.cpp
    python hub.py model.gguf                              # such a file, also quantized, is read too
    python hub.py families                                # those of families.py that are read, and written

train.py, sample.py and bench.py read published models with --init_from=<id, folder or .gguf>. HF_TOKEN,
HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE work as in huggingface_hub. No pickles are read.
"""
import collections
import dataclasses
import fnmatch
import functools
import itertools
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import sys
import tempfile
import types

if __name__ == '__main__':  # else its folder is searched first
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from configurator import configure, package, plain, reading

dtype: str | None = None  # of exported weights: float32, bfloat16, float16, in .gguf q8_0; None: as stored
config, _, words, *_ = configure(globals(), words=3)

import torch

from model import GPT, ROPE_SCALINGS, GPTConfig, changed, num_params
from tokenizer import EOT, WORD_PATTERN
from zoo.families import (
    FAMILIES,
    FUSED_EXPERTS,
    GGUF,
    GGUF_EXPERTS,
    GGUF_FIELDS,
    GGUF_OTHERS,
    GGUF_PAIRED,
    GGUF_SCALING,
    PLUS_ONE,
    SAME,
    canonical,
    config_from_hf,
    config_to_hf,
    like,
    refuse,
    rows_interleaved,
    text_config,
)
from zoo.tokenizer_json import JsonTokenizer, bpe_json, json_tokenizer, library_tokenizer
from zoo.weights import fill_rows, quantize_weights

DTYPES = {'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16}  # as safetensors name them

# tensors ----------------------------------------------------------------------------------------------------

Stored = collections.namedtuple('Stored', 'open name shape kind')  # in a file: open().get_tensor(name)
Part = collections.namedtuple('Part', 'name index layout')  # their tensor: these elements of one of ours


def plan(model, family, renamed=str):
    """Our tensor, as state_dict() names it -> its Parts; renamed: a function of the names that family gives
    them. Raises ValueError for one without a name."""
    plans = {}
    config = model.config
    for ours, w in model.state_dict().items():
        if ours.startswith('mtp.'):  # for training alone
            continue
        layer, name = re.fullmatch(r'(?:h\.(\d+)\.)?(.*)', ours).groups()
        before = mixer = ''
        if layer:
            before = family.layer
            mixer = config.mixer_of(int(layer))
            before = before(config, int(layer), name) if callable(before) else before.replace('N', layer)

        def of(table, key, mixer=mixer):
            return table.get(f'{mixer}.{key}', table.get(key))
        module, _, kind = name.rpartition('.')
        theirs = of(family.names, name)
        after = ''
        if theirs is None:
            theirs = of(family.names, module)
            after = f'.{kind}'
        if theirs is None:
            raise ValueError(f"{family.arch} has no name for {ours}: add it to its names in families.py")
        theirs = [before + one + after for one in (theirs(config) if callable(theirs) else theirs).split()]

        widths = getattr(model.get_submodule(ours.rpartition('.')[0]), 'widths', None) or [len(w)]
        if order := of(family.rows, name) or of(family.rows, module):
            rows = order(config, *torch.arange(sum(widths)).split(list(widths)))
        else:  # one after the other, the last takes the rest; keys may be the values too
            theirs = theirs[:len(widths)]
            begins = [*itertools.accumulate(widths, initial=0)][:len(theirs)]
            rows = [*map(slice, begins, [*begins[1:], None])]
        layout = family.layouts.get(name, SAME)
        is_experts = module.startswith('mlp.experts')
        experts = range(len(w)) if '.E.' in theirs[0] else [slice(None)]
        plans[ours] = [  # our experts are one tensor, (expert, row, column)
            Part(renamed(one.replace('.E.', f'.{e}.')), (e, row) if is_experts else (row,), layout)
            for e in experts for one, row in zip(theirs, rows, strict=True)]
    return plans


def read_json(folder, name):
    """The content of a JSON file. Raises ValueError if it is damaged."""
    path = f'{folder}/{name}'
    with reading(path), open(path, encoding='utf-8') as f:
        return json.load(f)


WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
ADAPTERS = 'adapter_config.json'


def weight_names(folder):
    """The names of a folder's safetensors: model.safetensors, or if it is missing the index's."""
    if os.path.exists(f'{folder}/{INDEX}') and not os.path.exists(f'{folder}/{WEIGHTS}'):
        return sorted(set(read_json(folder, INDEX)['weight_map'].values()))
    return [WEIGHTS]


def read_headers(folder):
    """name -> Stored, of a folder's safetensors. Raises FileNotFoundError."""
    stored = {}
    for path in [f'{folder}/{name}' for name in weight_names(folder)]:
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path} is missing; weights are read from safetensors alone")
        opened = functools.partial(package('safetensors').safe_open, path, 'pt')
        with reading(path), opened() as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                header = file.get_slice(name)
                stored[bare(name)] = Stored(opened, name, tuple(header.get_shape()), header.get_dtype())
    return stored


def bare(name):
    """A tensor's name without what only some files have: GPT-2 and BLOOM, as first published, lack
    'transformer.', larger models have 'model.language_model.', and Kimi Linear gives its MLPs either name."""
    name = re.sub(r'^((model|transformer|language_model|text_model|llm|thinker)\.)+', '', name)
    return name.replace('.block_sparse_moe.', '.mlp.')


IGNORED = ('*vision*', '*visual*', '*audio*', '*projector*', '*mtp*', '*.attn.bias', '*.attention.bias',
           '*.masked_bias', '*inv_freq', 'rope_freqs.weight')


def check(parts, stored, model, family, folder):
    """Raises ValueError that names all missing, unexpected or misshapen tensors."""
    ignored = [*IGNORED, f"{family.names['lm_head']}.weight",  # where it is tied
               *(bare(one).replace('N', str(model.config.n_layer)) for one in family.ignored)]
    wanted = {name: tuple(w.shape) for name, w in their_tensors(model, parts, torch.float32).items()}
    found = {name: one.shape for name, one in stored.items()
             if name in wanted or not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)}
    wrong = [f"{name} is {found.get(name, 'missing')}, not {wanted.get(name, 'expected')}"
             for name in sorted(wanted.keys() | found.keys()) if wanted.get(name) != found.get(name)]
    if wrong:
        raise ValueError(f"{folder} does not fit its config.json: {'; '.join(wrong[:60])}")


@torch.no_grad()
def fill(model, parts, stored):
    """Copies the files' tensors into the model."""
    for ours, w in model.state_dict().items():
        # each tensor maps its file anew: pages of a mapping that were read count as memory
        opened = functools.cache(lambda file: file())
        for part in parts[ours]:
            file, name, *_ = stored[part.name]
            theirs = part.layout.read(opened(file).get_tensor(name))
            fill_rows(model, ours, w, part.index, theirs[:len(w)] if ours == 'wpe.weight' else theirs)


def read_config(folder):
    """A folder's (config.json, GPTConfig). Raises ValueError if that is unsupported, or if there are adapters
    instead."""
    if os.path.exists(f'{folder}/{ADAPTERS}') and not os.path.exists(f'{folder}/config.json'):
        raise ValueError(f"{folder} has adapters of PEFT, not a model: merge them with its "
                         "merge_and_unload(), write that with save_pretrained(), and give the new folder")
    c = text_config(read_json(folder, 'config.json'))
    return c, config_from_hf(c)


def read_published(path):
    """A folder or GGUF file: (config.json, GPTConfig, Family and function of names for plan, name -> Stored).
    """
    if path.endswith('.gguf'):
        return read_gguf(path)
    c, config = read_config(path)
    family = FAMILIES[c['model_type']]
    stored = read_headers(path)
    if any(name.endswith(FUSED_EXPERTS['mlp.experts.c_proj.weight']) for name in stored):
        family = like(family, names=FUSED_EXPERTS)
    head, wte = (bare(f'{family.names[one]}.weight') for one in ('lm_head', 'wte'))
    if config.tie_word_embeddings and head in stored:  # files may have both, or only a head
        stored.setdefault(wte, stored[head])
        heads = [one.open().get_tensor(one.name) for one in (stored[head], stored[wte])]
        config = dataclasses.replace(config, tie_word_embeddings=torch.equal(*heads))
    return c, config, (family, bare), stored


def from_pretrained(folder_or_id, dtype=None, device='cpu', int8=False, **changes):
    """A folder with config.json and safetensors, a GGUF file or an id on the hub -> the model. dtype: of
    the weights, None: as stored; int8: of the large ones; changes: config fields. Raises OSError for missing
    files, ValueError that names all that does not fit."""
    folder = fetch(folder_or_id)
    c, config, (family, renamed), stored = read_published(folder)
    if changes.get('block_size', 0) > c.get('index_topk', math.inf):
        refuse(c, block_size=changes['block_size'])
    if config.rope_scaling and config.rope_scaling['rope_type'] == 'longrope':
        # transformers' list for short texts; a larger block_size takes the other
        changes = {'block_size': config.rope_scaling['original_max_position_embeddings']} | changes
    largest = max(stored.values(), key=lambda one: math.prod(one.shape))
    dtype = dtype or DTYPES.get(largest.kind, torch.float32)
    with torch.device('meta'):
        model = GPT(changed(config, **changes))
        as_stored = GPT(config)
    parts = plan(model, family, renamed)
    check(parts, stored, as_stored, family, folder)
    for name, w in model.named_parameters():
        is_exact = FAMILIES[c['model_type']].layouts.get(re.sub(r'^h\.\d+\.', '', name)) is PLUS_ONE
        w.data = w.data.to(torch.float32 if is_exact else dtype)
    if int8:
        quantize_weights(model, dtype)
    model = model.to_empty(device=device)
    fill(model, parts, stored)
    return model.eval()


# export -----------------------------------------------------------------------------------------------------

@torch.no_grad()
def their_tensors(model, parts, dtype):
    """name -> tensor in the family's layout. dtype: None: each its own, as buffers, the biases of experts,
    always have."""
    state = model.state_dict()
    buffers = dict(model.named_buffers())
    return {part.name: part.layout.write(state[ours][part.index]).to(
                None if ours in buffers else dtype).contiguous()
            for ours in parts for part in parts[ours]}


def tokenizer_files(tokenizer, model):
    """File name -> text, for AutoTokenizer."""
    config = {'tokenizer_class': 'PreTrainedTokenizerFast',
              'eos_token': None if tokenizer.eot is None else tokenizer.decode([tokenizer.eot]),
              'clean_up_tokenization_spaces': False, 'model_max_length': model.config.block_size,
              **tokenizer.chat_variables, 'chat_template': tokenizer.chat_template}
    return {'tokenizer.json': tokenizer.to_json(), 'tokenizer_config.json': json.dumps(config, indent=2)}


def save_pretrained(model, tokenizer, folder, dtype=None):
    """Writes a folder for AutoModelForCausalLM and AutoTokenizer. tokenizer: may be None; dtype: None: the
    model's. Raises, with nothing changed, ValueError if no family computes the same or the folder has files,
    OSError or SafetensorError if it cannot be written."""
    folder = pathlib.Path(folder).absolute()
    dtype = dtype or model.wte.weight.dtype
    c = config_to_hf(model.config) | {'dtype': plain(dtype)}
    if any(folder.glob('*')):
        raise ValueError(f"{folder} is not empty: remove it, or give another name")
    texts = {}
    if tokenizer is not None:
        stops = list(tokenizer.stop_tokens)  # in a chat, an answer's end too
        ends = {'eos_token_id': stops[0] if len(stops) == 1 else stops or None}
        c |= ends
        texts = tokenizer_files(tokenizer, model) | {'generation_config.json': json.dumps(ends)}
    texts['config.json'] = json.dumps(c, indent=2)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        temporary = pathlib.Path(temporary)
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding='utf-8', newline='')
        tensors = their_tensors(model, plan(model, FAMILIES[c['model_type']]), dtype)
        package('safetensors.torch').save_file(tensors, temporary / WEIGHTS, {'format': 'pt'})
        shutil.copymode(temporary / 'config.json', temporary / WEIGHTS)  # else private to its owner
        folder.mkdir(exist_ok=True)
        for path in temporary.iterdir():
            path.replace(folder / path.name)


# llama.cpp --------------------------------------------------------------------------------------------------

GGUF_NEED = 'files for llama.cpp need', 'gguf'
GGUF_DTYPES = {'float32': 'F32', 'bfloat16': 'BF16', 'float16': 'F16', 'q8_0': 'Q8_0'}
GGUF_ENDS = [f'tokenizer.ggml.{end}_token_id' for end in ('eos', 'eot', 'eom')]  # it stops at each of them
GGUF_PATTERNS = {  # llama.cpp's name of it: what splits a text into words; a further line splits the pieces
    'gpt-2': r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",  # tiktoken's
    **dict.fromkeys(('dbrx', 'smaug-bpe', 'llama-bpe'), WORD_PATTERN),  # the last is written
    **dict.fromkeys(('deepseek-r1-qwen', 'qwen2'), WORD_PATTERN.replace('{1,3}', '')),
    # digits one by one, then as GPT-2
    'smollm': r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?![^\s\p{N}])|\s",
    'default': r"""[\p{P}\$\+<=>\^~\|]+
's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)
\p{N}+
[0-9][0-9][0-9]""",
    'gpt-4o':  # o200k_base, which differs in combining marks
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"}
GGUF_SPLITS = {  # what tokenizer.json has: llama.cpp's name
    **{pattern: name for name, pattern in GGUF_PATTERNS.items()}, '': 'gpt-2', 'ByteLevel': 'gpt-2',
    # cl100k_base, which differs where a text ends in line ends and spaces
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
    r"\s*[\r\n]|\s+(?!\S)|\s": 'llama-bpe'}


def gguf_tokenizer(tokenizer, n_vocab):
    """A tokenizer as llama.cpp's keys. Raises ValueError for all but byte-level BPE that it splits alike."""
    if tokenizer is None:
        raise ValueError("a .gguf needs a tokenizer, which this model lacks: export a folder")
    spec = json.loads(library_tokenizer(tokenizer.to_json()).to_str())
    stops = tokenizer.stop_tokens
    step = spec['pre_tokenizer'] or {'type': 'none'}
    merges = spec['model'].get('merges')
    steps = step.get('pretokenizers', [step])
    words = '\n'.join(one.get('pattern', one).get('Regex', one['type']) for one in steps
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
    template = tokenizer.chat_template
    if isinstance(template, list):  # of several, with names
        template = {one['name']: one['template'] for one in template}.get('default')
    return {
        'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': GGUF_SPLITS[words],
        'tokenizer.ggml.tokens': [*texts], 'tokenizer.ggml.token_type': [*kinds],
        'tokenizer.ggml.merges': [*map(' '.join, merges)] or [f'{EOT} {EOT}'],  # none is not allowed
        'tokenizer.ggml.bos_token_id': [*tokenizer.bos, *stops][0], **dict(zip(GGUF_ENDS, stops)),
        'tokenizer.ggml.add_bos_token': bool(tokenizer.bos),
        'tokenizer.chat_template': template}


def gguf_rope(config, arch):
    """A rope_scaling as llama.cpp's keys and tensors. Raises ValueError for one that it lacks."""
    scaling = config.rope_scaling or {}
    if arch == 'llama' and scaling.get('rope_type') in ('llama3', 'longrope'):
        freq = config.rope_base ** -(torch.arange(0, config.rope_dim, 2) / config.rope_dim)
        options = dict(scaling)
        turned, weight = ROPE_SCALINGS[options.pop('rope_type')](freq, None, config.block_size, **options)
        if weight == 1:
            return {}, {'rope_freqs.weight': freq / turned}
    if scaling.get('rope_type') not in (None, 'linear', 'yarn') or scaling.keys() - GGUF_SCALING.values():
        raise ValueError(f"llama.cpp's {arch} has no rope_scaling={scaling}")
    return {theirs: scaling.get(ours) for theirs, ours in GGUF_SCALING.items()}, {}


def gguf_family(kind, n_layer):
    """(Family, function of its names that gives llama.cpp's): our own layout, but for rows that rotate."""
    import gguf
    arch = GGUF[kind][0]
    family = FAMILIES[kind]
    family = like(family, layouts=dict.fromkeys(family.layouts), names=GGUF_EXPERTS,
                  rows={'attn.c_attn': rows_interleaved if arch in GGUF_PAIRED else None})
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], n_layer)
    return family, functools.partial(names.get_name, try_suffixes=('.weight', '.bias'))


@torch.no_grad()
def save_gguf(model, tokenizer, path, dtype=None):
    """Writes one file for llama.cpp. dtype: of matrices, None: the model's. Raises ValueError, with nothing
    written, for whatever llama.cpp lacks, or if the file exists."""
    gguf = package('gguf', *GGUF_NEED)
    config = model.config
    path = pathlib.Path(path)
    kind = config_to_hf(config)['model_type']
    if path.exists():
        raise ValueError(f"{path} exists already: remove it, or give another name")
    if kind not in GGUF:
        raise ValueError(f"{kind} models are not written for llama.cpp, but {', '.join(GGUF)} are")
    arch, fixed = GGUF[kind]
    found = canonical(config)
    known = canonical(dataclasses.replace(config, **fixed))
    if wrong := [f"{name}={getattr(config, name)!r}" for name in fixed if found[name] != known[name]]:
        raise ValueError(f"llama.cpp's {arch} has no {', '.join(wrong)}")
    keys, tensors = gguf_rope(config, arch)
    keys |= {theirs: getattr(config, ours) for theirs, ours in GGUF_FIELDS.items()}
    keys['feed_forward_length'] = config.d_expert or config.d_ff
    shared = config.n_shared_expert
    keys['expert_shared_feed_forward_length'] = shared and shared * config.d_expert
    about = gguf_tokenizer(tokenizer, config.vocab_size) | {f'{arch}.{key}': keys[key] for key in keys}
    writer = gguf.GGUFWriter(None, arch)
    kinds = gguf.GGUFValueType
    for key, value in about.items():
        if value is not None:  # llama.cpp's counts have no sign
            writer.add_key_value(key, value, kinds.UINT32 if type(value) is int else kinds.get_type(value))
    tensors |= their_tensors(model, plan(model, *gguf_family(kind, config.n_layer)), None)
    usual = GGUF_DTYPES[plain(dtype or model.wte.weight.dtype)]
    for name, w in tensors.items():
        exact = w.ndim == 1 or 'gate_inp' in name or usual == 'Q8_0' and w.shape[-1] % 32
        form = gguf.GGMLQuantizationType['F32' if exact else usual]
        writer.add_tensor(name, gguf.quantize(w.float().numpy(), form), raw_dtype=form)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        whole = pathlib.Path(temporary, path.name)
        writer.write_header_to_file(whole)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        whole.replace(path)


@functools.lru_cache(maxsize=1)
def gguf_contents(path):
    """A file's (keys, name -> Stored), which takes seconds: kept for its tokenizer. Raises ValueError for a
    kind of tensor that the gguf package does not read."""
    gguf = package('gguf', *GGUF_NEED)
    with reading(path):
        reader = gguf.GGUFReader(path)
        tensors = {one.name: one for one in reader.tensors}
        for one in reader.tensors:
            gguf.dequantize(one.data[:1], one.tensor_type)

    def read(name):
        return torch.tensor(gguf.dequantize(tensors[name].data, tensors[name].tensor_type))
    file = types.SimpleNamespace(get_tensor=read)
    keys = {key: field.contents() for key, field in reader.fields.items()}
    if (n := keys.get('split.count', 1)) > 1:
        raise ValueError(f"{path} is one of {n} parts: join them by llama.cpp's gguf-split --merge")
    return keys, {
        name: Stored(lambda: file, name, tuple(map(int, one.shape[::-1])), one.tensor_type.name)
        for name, one in tensors.items()}


def read_gguf(path):
    """As read_published, by way of the family's config.json. Raises ValueError that names what is
    unsupported."""
    gguf_contents.cache_clear()  # the file may be another by now
    keys, stored = gguf_contents(path)
    arch = keys['general.architecture']
    kinds = {theirs: kind for kind, (theirs, _) in reversed(GGUF.items())}  # of several the first
    if arch not in kinds:
        raise ValueError(f"{path} is a {arch} model; supported are {', '.join(kinds)}")
    kind = 'mixtral' if keys.get('llama.expert_count') else kinds[arch]
    c = {'model_type': kind}
    fields = GGUF_OTHERS | FAMILIES[kind].fields
    for key, value in keys.items():
        if key.startswith(f'{arch}.'):
            name = key.removeprefix(f'{arch}.')
            c[fields.get(GGUF_FIELDS.get(name, name), name).split()[0]] = value
    scaling = {ours: c.pop(theirs, None) for theirs, ours in GGUF_SCALING.items()}
    if one := stored.get('rope_freqs.weight'):  # of Llama 3's scaling the divisors of its frequencies
        divisors = one.open().get_tensor(one.name).tolist()
        scaling = dict(rope_type='longrope', short_factor=divisors, long_factor=divisors, factor=1.0,
                       original_max_position_embeddings=c['max_position_embeddings'])
    c.update(rope_scaling=scaling, vocab_size=len(keys['tokenizer.ggml.tokens']),
             tie_word_embeddings='output.weight' not in stored, mlp_bias='blk.0.ffn_gate.bias' in stored,
             attention_bias={'blk.0.attn_q.bias', 'blk.0.attn_output.bias'} <= stored.keys())
    config = dataclasses.replace(config_from_hf(c), **GGUF[kind][1])
    return c, config, gguf_family(kind, config.n_layer), stored


def published_tokenizer(path):
    """The tokenizer of a folder or GGUF file. Raises ValueError for one that is not read."""
    if not path.endswith('.gguf'):
        return json_tokenizer(path)
    keys, _ = gguf_contents(path)
    model = keys['tokenizer.ggml.model']
    splits = keys.get('tokenizer.ggml.pre', 'default') if model == 'gpt2' else model
    if splits not in GGUF_PATTERNS:
        raise ValueError(f"{path} has a {splits} tokenizer; {', '.join(GGUF_PATTERNS)} are read")
    texts = keys['tokenizer.ggml.tokens']
    config = {name: texts[keys[key]] for name in ('bos_token', 'eos_token')
              if (key := f'tokenizer.ggml.{name}_id') in keys}
    ends = [keys[key] for key in GGUF_ENDS if key in keys]
    special = {*config.values(), *(texts[i] for i in ends)}
    kinds = keys.get('tokenizer.ggml.token_type') or [3 if text in special else 1 for text in texts]
    vocab = {text: i for i, text in enumerate(texts) if kinds[i] != 5}
    merges = [merge.split(' ') for merge in keys['tokenizer.ggml.merges'] if merge.replace(' ', '') in vocab]
    library = package('tokenizers')
    patterns = GGUF_PATTERNS[splits].split('\n')
    tokenizer = library.Tokenizer.from_str(bpe_json(vocab, merges, patterns, {}))
    tokenizer.add_tokens([library.AddedToken(text, normalized=False, special=kinds[i] == 3)
                          for text, i in vocab.items() if kinds[i] in (3, 4)])
    bos = config.get('bos_token')
    if bos and keys.get('tokenizer.ggml.add_bos_token', splits == 'llama-bpe'):
        tokenizer.post_processor = library.processors.TemplateProcessing(
            single=f'{bos} $A', special_tokens=[(bos, vocab[bos])])
    return JsonTokenizer(tokenizer.to_str(), {
        **config, 'eos_token_id': ends, 'chat_template': keys.get('tokenizer.chat_template')})


# the hub ----------------------------------------------------------------------------------------------------

SMALL_FILES = ['config.json', 'generation_config.json', 'tokenizer.json', 'tokenizer_config.json',
               'chat_template.jinja', ADAPTERS, INDEX]


def fetch(name):
    """A path, or an id on the hub -> the folder into which its files are downloaded, the safetensors if
    config.json is supported. Raises OSError."""
    if os.path.exists(name):
        return os.fspath(name)
    download = package('huggingface_hub').snapshot_download
    repo = name if '/' in name else f'openai-community/{name}'  # nanoGPT's names of GPT-2
    try:
        folder = download(repo, allow_patterns=SMALL_FILES)
        read_config(folder)
        return download(repo, revision=os.path.basename(folder),
                        allow_patterns=[WEIGHTS, *weight_names(folder)])
    except OSError as error:
        raise OSError(f"{repo} is not a folder here, and cannot be fetched: {' '.join(str(error).split())}"
                      ) from error


def describe(name, folder):
    """Prints what a published model is, and the next commands."""
    c, config, _, stored = read_published(folder)
    with torch.device('meta'):
        model = GPT(config)
    active = f", {num_params(model, active=True):,} active" if config.n_expert else ''
    print(f"{name}: {c['model_type']}, {num_params(model):,} parameters{active}, "
          f"stored in {', '.join(sorted({one.kind for one in stored.values()}))}")
    print(f"context {config.block_size:,} tokens, vocabulary {config.vocab_size:,}")
    try:
        tokenizer = published_tokenizer(folder)
        ends = [tokenizer.decode([i]) for i in tokenizer.stop_tokens]
        print(f"tokenizer: {tokenizer.n_vocab:,} tokens, texts end with {' or '.join(ends) or 'none'}, "
              f"{'with a' if tokenizer.chat_template else 'no'} chat template")
    except (OSError, ImportError, ValueError) as error:  # the model can be used without
        return print(f"tokenizer: none ({error})\nfolder: {folder}")
    name = shlex.quote(name)
    shorter = ' --block_size=1024' * (config.block_size > 1024)
    print(f"folder: {folder}\nnext:", f"sample.py --init_from={name} --start='Once upon a time'",
          f"prepare.py my.txt --tokenizer={shlex.quote(folder)} --out=mine",
          f"train.py --init_from={name} --dataset=mine{shorter}", sep='\n    python ')


def print_families():
    """Prints each family, whether it is written too, and what it sets that GPTConfig has otherwise."""
    for kind, family in FAMILIES.items():
        needs = [f'{name}={value}' for name, value in family.ours.items()
                 if value != getattr(GPTConfig, name)]
        letters = f"mixers {family.layers}, " if family.layers.strip('SL') else ''
        print(f"{kind:20} {'read, written' if family.exports else 'read':15} {letters}{', '.join(needs)}")
    print(f"{len(FAMILIES)} families")


def load_published(name, device, dtype, int8, changes):
    """sample.load of a published model."""
    path = fetch(name)
    model = from_pretrained(path, dtype=dtype, device=device, int8=int8, **changes)
    rest = {'path': path}
    tokenizer = None
    try:
        tokenizer = published_tokenizer(path)
    except (OSError, ImportError, ValueError) as error:  # it may still be trained, measured, exported
        rest['no_tokenizer'] = str(error)
    return model, tokenizer, rest

if __name__ == '__main__':
    from sample import load
    if len(words) == 3 and words[0] == 'export':
        save = save_pretrained
        readers = 'transformers and vLLM'
        kinds = map(plain, DTYPES.values())
        if words[2].endswith('.gguf'):
            save = save_gguf
            readers = 'llama.cpp'
            kinds = GGUF_DTYPES
        if dtype not in (kinds := [None, *kinds]):
            raise ValueError(f"dtype={dtype!r} is not supported: it must be one of {', '.join(kinds[1:])}")
        model, tokenizer, rest = load(words[1])
        if tokenizer is None:  # the weights can be used without
            print(f"no tokenizer is exported: {rest['no_tokenizer']}")
        if model.config.document_token is not None:  # transformers' models have no such thing
            print(f"document_token={model.config.document_token} is left out: it matters only where several "
                  "documents follow one another")
            model.config.document_token = None
        save(model, tokenizer, words[2], getattr(torch, str(dtype), dtype))  # q8_0 is a name
        print(f"{rest['path']} is in {words[2]} for {readers}")
    elif words == ['families']:
        print_families()
    elif len(words) == 1 and words[0] != 'export':
        describe(words[0], fetch(words[0]))
    else:
        raise ValueError(f"got {' '.join(words)!r}: give an id on the hub or a folder, or "
                         "`export RUN FOLDER`; see --help")

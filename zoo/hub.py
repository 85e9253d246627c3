"""
Reads and writes published models.

    python zoo/hub.py Qwen/Qwen3-0.6B      # describes a model; a folder or .gguf file also works
    python zoo/hub.py export out/ folder   # exports a run of train.py for transformers
    python zoo/hub.py export Qwen/Qwen3-0.6B my.gguf --dtype=q8_0  # exports for llama.cpp
    python zoo/hub.py families             # lists the supported families

huggingface_hub's environment variables, such as HF_TOKEN, apply. Never reads weights from pickles.
"""
import dataclasses
import functools
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

if __name__ == '__main__':
    sys.path[0] = os.path.abspath(__file__ + '/../..')

from configurator import UserError, check_values, configure, naming, package, plain, reading

dtype: str | None = None  # dtype of exported weights [in gguf.DTYPES]; q8_0: only for .gguf; None: as stored
family: str | None = None  # family of an export; None: the model's family, or the first that fits
settings = configure(globals(), words=3)
words = settings.words

import torch

from model import GPT, changed, num_params
from zoo import gguf
from zoo.families import (
    FAMILIES,
    FUSED_EXPERTS,
    PLUS_ONE,
    Stored,
    config_from_hf,
    config_to_hf,
    like,
    plan,
    refuse,
    text_config,
    their_tensors,
)
from zoo.tokenizer_json import FILES, json_object, json_tokenizer, to_json
from zoo.weights import fill_rows, quantize_weights

# import -----------------------------------------------------------------------------------------------------

FLOATS = {'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16}  # names in safetensors
INDEX = 'model.safetensors.index.json'  # lists the files of a model with several files


def files(folder, pattern):
    """Sorted paths in a folder."""
    found = sorted(pathlib.Path(folder).glob(pattern))
    if not found:
        raise FileNotFoundError(f"{folder}/{pattern} is missing: a model needs config.json, all its "
                                "safetensors and tokenizer.json; convert other formats, export runs and "
                                "merge PEFT's adapters into their base")
    return found


def read_json(folder, name):
    """The object in a JSON file."""
    return json_object(files(folder, name)[0])


def weight_names(folder):
    """Names or patterns of the files with weights. If model.safetensors exists, ignores the index, which an
    earlier save may have left."""
    if INDEX in (names := os.listdir(folder)) and 'model.safetensors' not in names:
        return sorted({*map(os.path.basename, read_json(folder, INDEX)['weight_map'].values())})
    return ['model*.safetensors']


def read_headers(folder):
    """The safetensors in a folder: {name: Stored}."""
    stored = {}
    for path in (path for name in weight_names(folder) for path in files(folder, name)):
        opened = functools.partial(package('safetensors').safe_open, path, 'pt')
        with reading(path), opened() as file:
            for name in file.keys():  # noqa: SIM118 (file is not a dict)
                header = file.get_slice(name)
                stored[bare(name)] = Stored(opened, name, tuple(header.get_shape()), header.get_dtype())
    for name, one in list(stored.items()):
        base = name.removesuffix('_blocks')
        for end, function in ('_scales', from_mxfp4), ('_scale_inv', from_fp8):
            if scales := stored.pop(base + end, None):
                del stored[name]
                shape = (one.shape[0], 32 * one.shape[2], one.shape[1]) if base != name else one.shape
                stored[base] = Stored(computed(function, one, scales), name, shape, 'BF16')
    return stored


def computed(function, *parts):
    """A Stored.open for a tensor that `function` computes from stored parts."""
    def read(name):
        return function(*(one.open().get_tensor(one.name) for one in parts))
    return lambda: types.SimpleNamespace(get_tensor=read)


def from_mxfp4(blocks, scales):
    """blocks (E, n_out, groups, 16): bytes of two numbers, the lower bits first; scales (E, n_out, groups):
    exponents of 2, plus 127 -> (E, n_in, n_out) bfloat16 (OCP Microscaling Formats 1.0)."""
    if blocks.ndim > 3:  # one expert at a time, because unpacking uses memory
        return torch.stack([from_mxfp4(*one) for one in zip(blocks, scales)])
    numbers = E2M1[torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).int()]
    return numbers.ldexp(scales.int()[..., None] - 127).flatten(-2).mT.bfloat16()


def from_fp8(w, scale):
    """w (..., n_out, n_in) float8; scale: one number, or one per block of 128 x 128 -> bfloat16."""
    for dim in (-2, -1) if scale.numel() > 1 else ():
        scale = scale.repeat_interleave(128, dim).narrow(dim, 0, w.shape[dim])
    return (w.float() * scale.float()).bfloat16()


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # magnitudes; the highest bit is the sign
E2M1 = torch.cat((E2M1, -E2M1))


def bare(name):
    """A tensor's name without the prefixes that only some files have."""
    name = re.sub(
        r'^((_orig_mod|module|model|transformer|language_model|text_model|llm|thinker)\.)+', '', name)
    return name.replace('.block_sparse_moe.', '.mlp.')


def check(parts, stored, model, family, folder):
    """Raises UserError for missing, unexpected, differently shaped or quantized tensors."""
    from sample import IGNORED
    wanted = {name: tuple(w.shape) for name, w in their_tensors(model, parts, torch.float32).items()}
    others = f"{family.names['lm_head']}.weight",  # redundant if tied
    extra = f'layers.{model.config.n_layer}.'
    if f'{extra}eh_proj.weight' in stored:  # an extra layer for multi-token prediction
        others += extra,
    found = {name: one for name, one in stored.items()
             if name in wanted or not (IGNORED.fullmatch(name) or name.startswith(others))}
    packed = {one.kind for one in found.values() if re.fullmatch(r'[IU]\d+|BOOL|F8.*', one.kind)}
    if packed:
        raise UserError(f"{folder} has quantized weights ({', '.join(packed)}), which are not "
                        "supported: use the original weights")
    found = {name: one.shape for name, one in found.items()}
    if wanted != found:
        lacks = sorted(wanted.items() - found.items())
        others = sorted(found.items() - wanted.items())
        raise UserError(f"{folder} does not fit its config.json: it lacks {lacks[:30]}, "
                        f"but has {others[:30]}")


@torch.no_grad()
def fill(model, parts, stored):
    """Copies stored tensors into the model."""
    for ours, w in model.state_dict().items():
        # reopen files for each tensor, so that the pages of mapped files do not fill memory
        opened = functools.cache(lambda file: file())
        for part in parts[ours]:
            file, name, *_ = stored[part.name]
            theirs = part.layout.read(opened(file).get_tensor(name))
            fill_rows(model, ours, w, part.index, theirs[:len(w)] if ours == 'wpe.weight' else theirs)


def read_published(path):
    """A folder or GGUF file -> config.json, GPTConfig, arguments of plan, {name: Stored}."""
    with reading(path):
        if path.endswith('.gguf'):
            return gguf.read_gguf(path)
        c = text_config(read_json(path, 'config.json'))
        config = config_from_hf(c)
        family = FAMILIES[c['model_type']]
        stored = read_headers(path)
        if any(name.endswith(FUSED_EXPERTS['mlp.experts.c_proj.weight']) for name in stored):
            family = like(family, names=FUSED_EXPERTS)
        head, wte = (bare(f'{family.names[one]}.weight') for one in ('lm_head', 'wte'))
        if config.tie_word_embeddings and head in stored:  # the file may lack wte
            stored.setdefault(wte, stored[head])
            heads = [one.open().get_tensor(one.name) for one in (stored[head], stored[wte])]
            config = dataclasses.replace(config, tie_word_embeddings=torch.equal(*heads))
        return c, config, (family, bare), stored


def from_pretrained(folder_or_id, dtype=None, device='cpu', int8=False, **changes):
    """A folder, GGUF file or hub id -> GPT. dtype: for the weights (None: as stored); int8: keep
    large weights in 8 bits; changes: fields of GPTConfig. Raises OSError for missing files, and a
    ValueError that names unsupported fields or wrong tensors."""
    folder = fetch(folder_or_id)
    c, config, (family, renamed), stored = read_published(folder)
    if changes.get('block_size', 0) > c.get('index_topk', math.inf):
        refuse(c, block_size=changes['block_size'])
    if config.rope_scaling and config.rope_scaling['rope_type'] == 'longrope':
        # unless block_size is given, choose longrope's factors for short texts
        changes = {'block_size': config.rope_scaling['original_max_position_embeddings']} | changes
    largest = max(stored.values(), key=lambda one: math.prod(one.shape))
    dtype = dtype or FLOATS.get(largest.kind, torch.float32)
    with torch.device('meta'), naming({'path': folder}):
        model = GPT(changed(config, **changes))
        as_stored = GPT(config)
    parts = plan(model, family, renamed)
    check(parts, stored, as_stored, family, folder)
    published = FAMILIES[c['model_type']]
    for name, w in model.named_parameters():
        is_exact = published.layouts.get(re.sub(r'^h\.\d+\.', '', name)) is PLUS_ONE
        w.data = w.data.to(torch.float32 if is_exact else dtype)
    if int8:
        quantize_weights(model, dtype)
    model = model.to_empty(device=device)
    with reading(folder):
        fill(model, parts, stored)
    model.family = c['model_type'] if published.exports else None
    return model.eval()


# export -----------------------------------------------------------------------------------------------------

def tokenizer_files(tokenizer, model):
    """{file name: text} for AutoTokenizer."""
    options = {'tokenizer_class': 'PreTrainedTokenizerFast',
               'eos_token': None if tokenizer.eot is None else tokenizer.decode([tokenizer.eot]),
               'clean_up_tokenization_spaces': False, 'model_max_length': model.config.block_size,
               **tokenizer.chat_variables, 'chat_template': tokenizer.chat_template}
    return {'tokenizer.json': to_json(tokenizer), 'tokenizer_config.json': json.dumps(options, indent=2)}


def save_pretrained(model, tokenizer, folder, dtype=None, family=None):
    """Writes a folder for transformers. tokenizer: may be None. dtype: if None, the model's. family: a
    key of FAMILIES; None: the model's, or the first that fits. Raises UserError if the family cannot
    represent the model or if the folder is not empty, and OSError or SafetensorError if writing fails.
    Errors leave the folder unchanged."""
    folder = pathlib.Path(folder).absolute()
    dtype = dtype or model.wte.weight.dtype
    family = family or getattr(model, 'family', None)
    c = config_to_hf(model.config, [family] if family else FAMILIES) | {'dtype': plain(dtype)}
    if any(folder.glob('*')):
        raise UserError(f"{folder} is not empty: remove it, or give another name")
    texts = {}
    if tokenizer is not None:
        stops = tokenizer.stop_tokens  # with the end-of-answer id
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
        package('safetensors.torch').save_file(tensors, temporary / 'model.safetensors', {'format': 'pt'})
        # save_file makes it private
        shutil.copymode(temporary / 'config.json', temporary / 'model.safetensors')
        folder.mkdir(exist_ok=True)
        for path in temporary.iterdir():
            path.replace(folder / path.name)


def published_tokenizer(path):
    """The tokenizer of a folder, tokenizer.json or GGUF file. Raises FileNotFoundError or UserError."""
    if path.endswith('.gguf'):
        with reading(path):
            return gguf.read_tokenizer(path)
    if not os.path.isfile(path):
        files(path, 'tokenizer.json')
    return json_tokenizer(path)


# the hub ----------------------------------------------------------------------------------------------------

REMEDIES = {  # error of huggingface_hub -> remedy
    'GatedRepoError': 'accept its licence on its page at huggingface.co, and set HF_TOKEN to your token',
    'RepositoryNotFoundError': 'correct the name, or set HF_TOKEN to your token if the repository is private'}


def fetch(name, weights=True):
    """A path or hub id -> a path. Downloads FILES, and the weights if `weights`
    is True and config.json is supported. Raises OSError."""
    if os.path.exists(name):
        return os.fspath(name)
    repo = name if '/' in name else f'openai-community/{name}'  # nanoGPT's names for GPT-2
    hub = package('huggingface_hub')

    def download(patterns, revision=None):
        try:
            return hub.snapshot_download(repo, revision=revision, allow_patterns=patterns)
        except Exception as error:  # also errors of httpx
            raise OSError(f"{name} is not a path here, and downloading it failed: "
                          f"{REMEDIES.get(type(error).__name__, error)}") from error

    folder = download(FILES + [INDEX] * weights)
    if weights:
        config_from_hf(read_json(folder, 'config.json'))
        download(weight_names(folder), os.path.basename(folder))
    return folder


def describe(name, folder):
    """Prints a model's summary and next commands."""
    c, config, _, stored = read_published(folder)
    with torch.device('meta'):
        model = GPT(config)
    active = f", {num_params(model, active=True):,} active" if config.n_expert else ''
    print(f"{name}: {c['model_type']}, {num_params(model):,} parameters{active}, "
          f"stored in {', '.join(sorted({one.kind for one in stored.values()}))}")
    print(f"context {config.block_size:,} tokens, vocabulary {config.vocab_size:,}")
    try:
        tokenizer = published_tokenizer(folder)
        ends = ' '.join(tokenizer.decode([i]) for i in tokenizer.stop_tokens)
        print(f"tokenizer: {tokenizer.n_vocab:,} tokens, end of text {ends or 'none'}, chat template "
              f"{'yes' if tokenizer.chat_template else 'no'}")
    except (OSError, ImportError, ValueError) as error:
        return print(f"tokenizer: none ({error})\nfolder: {folder}")
    start, data = "--start='Once upon a time'", 'my.txt'
    if tokenizer.chat_template:
        start, data = '--chat', f'chats.jsonl --block_size={min(config.block_size, 1024)}'
    name = shlex.quote(name if '/' in name else folder)  # prepare.py rejects names like gpt2-xl
    print(f"folder: {folder}\nnext:", f"sample.py --init_from={name} {start}",
          f"prepare.py {data} --tokenizer={name} --out=mine",
          f"train.py --init_from={name} --dataset=mine --out_dir=out-mine",
          f"sample.py --out_dir=out-mine {start}", sep='\n    python ')


if __name__ == '__main__':
    from sample import load
    check_values(settings, settings.config, globals())
    if len(words) == 3 and words[0] == 'export':
        is_gguf = words[2].endswith('.gguf')
        if dtype == 'q8_0' and not is_gguf:
            raise UserError("dtype='q8_0' is only supported in .gguf files")
        model, tokenizer, facts = load(words[1])
        if tokenizer is None:
            print(f"the export has no tokenizer: {facts['no_tokenizer']}")
        save = gguf.save_gguf if is_gguf else save_pretrained
        dtype = getattr(torch, str(dtype), dtype)
        save(model, tokenizer, words[2], dtype, family or facts.get('family'))
        print(f"exported {facts['path']} to {words[2]}")
    elif words == ['families']:
        for kind, one in FAMILIES.items():
            print(f"{kind:20} {one.arch:32} {'read, written' if one.exports else 'read'}")
    elif len(words) == 1 and words[0] != 'export':
        describe(words[0], fetch(words[0]))
    else:
        raise UserError(f"unknown command {' '.join(words)!r}: give an id on the hub or a folder, or "
                        "`export RUN FOLDER`; see --help")

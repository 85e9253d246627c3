"""Reads and writes GGUF, llama.cpp's format. Reading accepts quantized files."""
import dataclasses
import functools
import glob
import json
import pathlib
import tempfile
import types

import torch

from configurator import UserError, package, plain
from model import ROPE_SCALINGS
from tokenizer import EOT, WORD_PATTERN
from zoo.families import (
    FAMILIES,
    FUSED_EXPERTS,
    Stored,
    canonical,
    config_from_hf,
    config_to_hf,
    fields_of,
    like,
    plan,
    refuse,
    rows_interleaved,
    their_tensors,
)
from zoo.tokenizer_json import JsonTokenizer, bpe_json, library_tokenizer, to_json

SILU = dict(mlp='swiglu', window=None, window_pattern=None)
QWEN = dict(SILU, proj_bias=False)
GEMMA = dict(proj_bias=False, attn_scale=None)
ARCHITECTURES = {  # model_type: llama.cpp's name, values of fields that llama.cpp fixes
    'qwen3': ('qwen3', QWEN),
    'llama': ('llama', SILU),
    'mistral': ('llama', SILU),
    'qwen2': ('qwen2', dict(SILU, head_dim=None)),
    'mixtral': ('llama', SILU),
    'qwen3_moe': ('qwen3moe', dict(QWEN, expert_pattern='E', norm_topk_prob=True)),
    'smollm3': ('smollm3', dict(QWEN, mlp_bias=False, pos_pattern='PPPN')),
    'olmo2': ('olmo2', dict(QWEN, tie_word_embeddings=False)),
    'gpt2': ('gpt2', dict(mlp='gelu_tanh')),
    'gemma': ('gemma', GEMMA),
    'gemma2': ('gemma2', dict(GEMMA, window_pattern='SL', attn_softcap=50.0, logit_softcap=30.0)),
    'gemma3_text': ('gemma3', dict(GEMMA, window_pattern='SSSSSL',
                                   local={'rope_base': 1e4, 'rope_scaling': None}))}
KEYS = {  # llama.cpp's key: GPTConfig's field
    'context_length': 'block_size', 'block_count': 'n_layer', 'embedding_length': 'n_embd',
    'attention.head_count': 'n_head', 'attention.head_count_kv': 'n_kv_head',
    'attention.key_length': 'head_dim', 'attention.value_length': 'head_dim',
    'attention.layer_norm_epsilon': 'norm_eps', 'attention.layer_norm_rms_epsilon': 'norm_eps',
    'attention.sliding_window': 'window', 'attn_logit_softcapping': 'attn_softcap',
    'final_logit_softcapping': 'logit_softcap', 'rope.dimension_count': 'head_dim',
    'rope.freq_base': 'rope_base', 'expert_count': 'n_expert', 'expert_used_count': 'n_expert_active',
    'expert_feed_forward_length': 'd_expert', 'feed_forward_length': 'd_ff'}
SCALING = {'rope.scaling.type': 'rope_type', 'rope.scaling.factor': 'factor',
           'rope.scaling.original_context_length': 'original_max_position_embeddings'}
OTHERS = {  # config.json's names for fields that FIELDS lacks
    'rope_base': ['rope_theta'], 'window': ['sliding_window'],
    'rope.freq_base_swa': ['rope_local_base_freq']}
NEUTRAL = {  # further keys of llama.cpp (llama-model.cpp, load_hparams): the only supported values
    'attention.causal': True, 'attention.sliding_window_pattern': None, 'expert_group_count': 0,
    'nextn_predict_layers': 0, 'rope.scale_linear': 1.0, 'rope.scaling.attn_factor': 1.0}
# (kind, n_layer) of 27B models, whose attn_scale uses n_embd / n_head (load_arch_hparams)
BY_WIDTH = ('gemma2', 46), ('gemma3', 62)
PAIRED = 'llama', 'smollm3'  # llama.cpp stores the rows of a rotated pair next to each other
STACKED_EXPERTS = {
    **dict.fromkeys(FUSED_EXPERTS), 'mlp.experts.c_proj': 'mlp.experts.down_proj',
    'mlp.experts.c_fc': 'mlp.experts.gate_proj mlp.experts.up_proj'}
NEED = 'files for llama.cpp need', 'gguf'
DTYPES = {'float32': 'F32', 'bfloat16': 'BF16', 'float16': 'F16', 'q8_0': 'Q8_0'}


def names_for(kind, n_layer):
    """(Family in llama.cpp's layout, function that converts its names to llama.cpp's)."""
    import gguf
    arch, _ = ARCHITECTURES[kind]
    family = FAMILIES[kind]
    family = like(family, layouts=dict.fromkeys(family.layouts),
                  names=STACKED_EXPERTS, rows={'attn.c_attn': rows_interleaved if arch in PAIRED else None})
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], n_layer)
    return family, functools.partial(names.get_name, try_suffixes=('.weight', '.bias'))


def fixed_fields(kind, config):
    """The fields that llama.cpp fixes for a model."""
    arch, fixed = ARCHITECTURES[kind]
    if (arch, config.n_layer) in BY_WIDTH:
        fixed = fixed | {'attn_scale': (config.n_embd // config.n_head) ** -0.5}
    return fixed


# writing ----------------------------------------------------------------------------------------------------

def rope_keys(config, arch):
    """A rope_scaling as llama.cpp's (keys, tensors)."""
    scaling = config.rope_scaling or {}
    if arch == 'llama' and scaling.get('rope_type') in ('llama3', 'longrope'):
        freq = config.rope_base ** -(torch.arange(0, config.rope_dim, 2) / config.rope_dim)
        options = dict(scaling)
        scaled, weight = ROPE_SCALINGS[options.pop('rope_type')](freq, None, config.block_size, **options)
        if weight == 1:
            return {}, {'rope_freqs.weight': freq / scaled}
    if scaling.get('rope_type') not in (None, 'linear', 'yarn') or scaling.keys() - SCALING.values():
        raise UserError(f"llama.cpp's {arch} has no rope_scaling={scaling}")
    return {theirs: scaling.get(ours) for theirs, ours in SCALING.items()}, {}


@torch.no_grad()
def save_gguf(model, tokenizer, path, dtype=None, family=None):
    """Writes a file for llama.cpp. dtype: for matrices; None: the model's. family: a key of
    ARCHITECTURES; None: the model's, else the first that fits. Raises UserError and writes nothing
    if the file exists or llama.cpp does not support the model."""
    gguf = package('gguf', *NEED)
    config = model.config
    path = pathlib.Path(path)
    if path.exists():
        raise UserError(f"{path} exists already: remove it, or give another name")
    family = family or getattr(model, 'family', None)
    kind = config_to_hf(config, [family] if family in ARCHITECTURES else ARCHITECTURES)['model_type']
    arch, _ = ARCHITECTURES[kind]
    fixed = fixed_fields(kind, config)
    found = canonical(config)
    known = canonical(dataclasses.replace(config, **fixed))
    if wrong := [f"{name}={getattr(config, name)!r}" for name in fixed if found.get(name) != known.get(name)]:
        raise UserError(f"llama.cpp's {arch} has no {', '.join(wrong)}")
    keys, tensors = rope_keys(config, arch)
    keys |= {theirs: getattr(config, ours) for theirs, ours in KEYS.items()}
    keys['feed_forward_length'] = config.d_expert or config.d_ff
    about = tokenizer_keys(tokenizer, config.vocab_size) | {f'{arch}.{key}': keys[key] for key in keys}
    writer = gguf.GGUFWriter(None, arch)
    kinds = gguf.GGUFValueType
    for key, value in about.items():
        if value is not None:
            # llama.cpp's integers are unsigned
            writer.add_key_value(key, value, kinds.UINT32 if type(value) is int else kinds.get_type(value))
    tensors |= their_tensors(model, plan(model, *names_for(kind, config.n_layer)), None)
    usual = DTYPES[plain(dtype or model.wte.weight.dtype)]
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


# reading ----------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=1)
def contents(path):
    """A file's (keys, {name: Stored}). Cached, because reading takes seconds and the tokenizer needs
    the keys too."""
    gguf = package('gguf', *NEED)

    class Reader(gguf.GGUFReader):
        """Raises EOFError at the end of a damaged file."""
        def _get(self, offset, *args, **options):
            if offset >= len(self.data):
                raise EOFError
            return super()._get(offset, *args, **options)

    parts = glob.glob(glob.escape(path).replace('-00001-of-', '-*-of-'))
    readers = [*map(Reader, sorted(parts))]
    keys = {key: field.contents() for key, field in readers[0].fields.items()}
    if len(parts) < (n := keys.get('split.count', 1)):
        raise UserError(f"{path} is one of {n} parts: give the first, in a folder with the others")
    tensors = {one.name: one for reader in readers for one in reader.tensors}

    def read(name):
        return torch.tensor(gguf.dequantize(tensors[name].data, tensors[name].tensor_type))
    file = types.SimpleNamespace(get_tensor=read)
    return keys, {
        name: Stored(lambda: file, name, tuple(map(int, one.shape[::-1])), one.tensor_type.name)
        for name, one in tensors.items()}


def read_gguf(path):
    """Implements hub.read_published for a GGUF file."""
    keys, stored = contents(path)
    arch = keys['general.architecture']
    kinds = {theirs: kind for kind, (theirs, _) in reversed(ARCHITECTURES.items())}
    if arch not in kinds:
        raise UserError(f"{path} is a {arch} model; supported are {', '.join(kinds)}")
    kind = 'mixtral' if keys.get('llama.expert_count') else kinds[arch]
    fields = OTHERS | fields_of(FAMILIES[kind])
    c = {'model_type': kind, 'head_dim': None, 'num_key_value_heads': None, 'rope_theta': 1e4,
         'sliding_window': 4096 if arch == 'gemma2' else None}  # llama.cpp's defaults
    scaling = {'rope_type': 'linear'}
    for key, value in keys.items():
        name = key.removeprefix(f'{arch}.')
        ours = KEYS.get(name, name)
        if name in SCALING:
            scaling[SCALING[name]] = value
        elif ours in fields and ours not in ARCHITECTURES[kind][1]:
            c[fields[ours][0]] = value
    refuse(c, **{name: value for name, one in NEUTRAL.items()
                 if (value := keys.get(f'{arch}.{name}', one)) != one})
    if scaling['rope_type'] == 'none' or scaling.get('factor', 1) in (0, 1):
        scaling = None
    if one := stored.get('rope_freqs.weight'):
        divisors = one.open().get_tensor(one.name).tolist()
        scaling = dict(rope_type='longrope', short_factor=divisors, long_factor=divisors, factor=1.0,
                       original_max_position_embeddings=c['max_position_embeddings'])
    c.update(rope_scaling=scaling, vocab_size=stored['token_embd.weight'].shape[0],
             tie_word_embeddings='output.weight' not in stored, mlp_bias='blk.0.ffn_gate.bias' in stored,
             attention_bias={'blk.0.attn_q.bias', 'blk.0.attn_output.bias'} <= stored.keys())
    config = config_from_hf(c)
    config = dataclasses.replace(config, **fixed_fields(kind, config) | {'local': config.local})
    return c, config, names_for(kind, config.n_layer), stored


# tokenizers -------------------------------------------------------------------------------------------------

ENDS = [f'tokenizer.ggml.{end}_token_id' for end in ('eos', 'eot', 'eom')]
LLAMA_3 = 'falcon3', 'llama3', 'llama-v3', 'llama-bpe'  # llama.cpp's names for one pattern
PATTERNS = {  # llama.cpp's name: a pattern that finds words
    'gpt-2': r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",  # tiktoken's
    **dict.fromkeys(('dbrx', 'smaug-bpe', *LLAMA_3), WORD_PATTERN),  # exports use the last name
    **dict.fromkeys(('deepseek-r1-qwen', 'qwen2'), WORD_PATTERN.replace('{1,3}', '')),
    # splits numbers into digits
    'smollm': r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?![^\s\p{N}])|\s",
    'gpt-4o':
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"}
SPLITS = {  # pattern in tokenizer.json: llama.cpp's name
    **{pattern: name for name, pattern in PATTERNS.items()}, '': 'gpt-2', 'ByteLevel': 'gpt-2',
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"
    r"\s*[\r\n]|\s+(?!\S)|\s": 'llama-bpe'}


def tokenizer_keys(tokenizer, n_vocab):
    """A tokenizer as llama.cpp's keys."""
    if tokenizer is None:
        raise UserError("a .gguf file needs a tokenizer, and this model has none: export a folder instead")
    spec = json.loads(library_tokenizer(to_json(tokenizer)).to_str())
    stops = tokenizer.stop_tokens
    step = spec['pre_tokenizer'] or {'type': 'none'}
    merges = spec['model'].get('merges')
    steps = step.get('pretokenizers', [step])
    words = '\n'.join(one.get('pattern', one).get('Regex', one['type']) for one in steps
                     if one.get('use_regex', True))
    if (words not in SPLITS or merges and not words or not stops
            or any(one.get('add_prefix_space') for one in steps)
            or spec['normalizer'] not in (None, {'type': 'NFC'})):  # llama.cpp ignores NFC
        raise UserError(f"llama.cpp does not support the tokenizer {tokenizer.name!r}: export a folder and "
                        "try llama.cpp's convert_hf_to_gguf.py")
    # types: 1 normal, 3 control, 4 user-defined, 5 unused
    tokens = {i: (text, 1) for text, i in spec['model']['vocab'].items()}
    tokens |= {one['id']: (one['content'], 3 if one['special'] else 4) for one in spec['added_tokens']}
    texts, kinds = zip(*(tokens.get(i, (f'[PAD{i}]', 5)) for i in range(n_vocab)))
    return {
        'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.pre': SPLITS[words],
        'tokenizer.ggml.tokens': [*texts], 'tokenizer.ggml.token_type': [*kinds],
        'tokenizer.ggml.merges': [*map(' '.join, merges)] or [f'{EOT} {EOT}'],  # must not be empty
        'tokenizer.ggml.bos_token_id': [*tokenizer.bos, *stops][0], **dict(zip(ENDS, stops)),
        'tokenizer.ggml.add_bos_token': bool(tokenizer.bos),
        'tokenizer.chat_template': tokenizer.template_for(None)}


def read_tokenizer(path):
    """The tokenizer of a file."""
    keys, _ = contents(path)
    model = keys.get('tokenizer.ggml.model')
    splits = keys.get('tokenizer.ggml.pre', 'unnamed') if model == 'gpt2' else model
    if splits not in PATTERNS:
        raise UserError(f"{path} has a {splits} tokenizer; supported are {', '.join(PATTERNS)}")
    texts = keys['tokenizer.ggml.tokens']
    config = {name: texts[i] for name in ('bos_token', 'eos_token')
              if (i := keys.get(f'tokenizer.ggml.{name}_id', len(texts))) < len(texts)}
    ends = [keys[key] for key in ENDS if key in keys]
    kinds = keys['tokenizer.ggml.token_type']
    vocab = {text: i for i, text in enumerate(texts) if kinds[i] != 5}
    merges = [merge.split(' ') for merge in keys['tokenizer.ggml.merges'] if merge.replace(' ', '') in vocab]
    library = package('tokenizers')
    tokenizer = library.Tokenizer.from_str(bpe_json(vocab, merges, [PATTERNS[splits]], {}))
    tokenizer.add_tokens([library.AddedToken(text, normalized=False, special=kinds[i] == 3)
                          for text, i in vocab.items() if kinds[i] in (3, 4)])
    bos = config.get('bos_token')
    if bos and keys.get('tokenizer.ggml.add_bos_token', splits in LLAMA_3):
        tokenizer.post_processor = library.processors.TemplateProcessing(
            single=f'{bos} $A', special_tokens=[(bos, vocab[bos])])
    return JsonTokenizer(tokenizer.to_str(), {
        **config, 'eos_token_id': ends, 'chat_template': keys.get('tokenizer.chat_template')})



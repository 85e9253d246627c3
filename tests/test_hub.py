"""Tests of zoo/hub.py: adapters, nanoGPT's checkpoints, published families compared with transformers."""
import contextlib
import functools
import itertools
import json
import os
import random
import re
from pathlib import Path

import pytest
import torch
from common import EVAL, run, same_weights

from configurator import UserError
from sample import load
from test_model import near, tiny
from tokenizer import make_tokenizer
from zoo import gguf, hub, weights
from zoo.tokenizer_json import JsonTokenizer, to_json

safetensors = pytest.importorskip('safetensors.torch')
transformers = pytest.importorskip('transformers')
SafetensorError = pytest.importorskip('safetensors').SafetensorError

# nanoGPT ----------------------------------------------------------------------------------------------------

def test_nanogpt_checkpoints_load_sample_and_resume(folder, capsys):
    """A checkpoint with the names, arguments and optimizer state that nanoGPT's train.py writes."""
    model = tiny(pos='learned', norm='layernorm', norm_eps=1e-5, mlp='gelu', qk_norm=False, bias=True,
                 vocab_size=23, block_size=16, tie_word_embeddings=True)
    order = ['wte.weight', 'wpe.weight', *(
        f'h.{i}.{part}.{kind}' for i in range(2)
        for part in ('ln_1', 'attn.c_attn', 'attn.c_proj', 'ln_2', 'mlp.c_fc', 'mlp.c_proj')
        for kind in ('weight', 'bias')), 'ln_f.weight', 'ln_f.bias']  # the order of nanoGPT's optimizer
    weights = model.state_dict()
    state = {f'_orig_mod.transformer.{name}': weights[name] for name in order}
    params = [torch.nn.Parameter(w.clone()) for w in state.values()]
    for w in params:
        w.grad = torch.randn_like(w)
    opt = torch.optim.AdamW([{'params': [w for w in params if w.ndim > 1]},
                             {'params': [w for w in params if w.ndim < 2]}])
    opt.step()
    os.mkdir('out')
    torch.save({'model': {**state, '_orig_mod.lm_head.weight': weights['wte.weight'],
                          '_orig_mod.transformer.h.0.attn.bias': torch.ones(1, 1, 16, 16)},
                'optimizer': opt.state_dict(), 'iter_num': 5, 'best_val_loss': torch.tensor(2.5),
                'model_args': dict(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=23, dropout=0.0,
                                   bias=True),
                'config': {'dataset': 'toy', 'learning_rate': 1e-3, 'batch_size': 8, 'max_iters': 5,
                           'gradient_accumulation_steps': 2, 'dtype': 'float16', 'compile': True}},
               'out/ckpt.pt')
    assert same_weights(load('out/ckpt.pt')[0].state_dict(), weights)
    run('sample.py', '--num_samples=1', '--max_new_tokens=5', '--start=abc', *EVAL)
    assert '\nabc' in capsys.readouterr().out  # with the tokenizer of its dataset
    ended = run('train.py', '--device=cpu', '--init_from=resume', '--eval_only')
    assert ended['run'].iter_num == 5 == ended['max_iters'] and ended['learning_rate'] == 1e-3
    assert ended['compile'] is False and ended['config']['dtype'] == 'auto' and ended['batch_size'] == 8
    mine, theirs = ([state['exp_avg'] for state in one.state_dict()['state'].values()]
                    for one in (ended['run'].optimizers[0], opt))
    assert len(mine) == len(theirs) and all(torch.equal(a[:len(b)], b) for a, b in zip(mine, theirs))


# published families -----------------------------------------------------------------------------------------

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64)
SMALL = dict(  # a model_type uses the fields that its default configuration has
    SIZES, head_dim=12, sliding_window=6, pad_token_id=0, attention_bias=True, mlp_bias=True,
    n_embd=32, n_layer=2, n_head=4, n_positions=64, d_model=36, n_layers=2, n_heads=6,  # GPT-2's, MPT's
    ffn_dim=40, word_embed_proj_dim=32, rotary_dim=6,
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=6, moe_k=3,
    num_experts_per_tok=2, num_experts_per_token=2, moe_intermediate_size=12, n_shared_experts=1,
    num_shared_experts=1, shared_expert_intermediate_size=24, shared_intermediate_size=96,
    moe_shared_expert_intermediate_size=24, first_k_dense_replace=1, n_group=1, topk_group=1,
    kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12,
    index_topk=32, index_head_dim=8, index_n_heads=2,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=10,
    linear_conv_kernel_dim=3, linear_num_heads=3, linear_head_dim=6, conv_L_cache=4, block_multiple_of=6,
    mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=6, mamba_d_conv=3, mamba_num_heads=4, mamba_head_dim=6,
    n_groups=2, ssm_state_size=5, conv_kernel=3,
    embedding_multiplier=3.0, logits_scaling=4.0, attention_multiplier=0.2, residual_multiplier=0.3,
    query_pre_attn_scalar=20, logit_scale=0.3, swiglu_limit=0.5, attention_chunk_size=8, floor_scale=6,
    intermediate_size_mlp=40)
UNBIASED = dict(attention_bias=False, mlp_bias=False)
TIED, UNTIED = dict(tie_word_embeddings=True), dict(tie_word_embeddings=False)
LINEAR_FULL = ['linear_attention', 'full_attention', 'linear_attention']
CONV_FULL = dict(layer_types=['conv', 'full_attention', 'conv'])
FULL_SLIDING = dict(layer_types=['full_attention', 'sliding_attention', 'full_attention'])
SPARSE_DENSE = dict(mlp_layer_types=['sparse', 'dense', 'sparse'])
ROPE_BY_KIND = {'rope_parameters': {
    'full_attention': {'rope_type': 'linear', 'factor': 4.0, 'rope_theta': 5000.0},
    'sliding_attention': {'rope_type': 'default', 'rope_theta': 100.0}}}
LATENT = dict(UNBIASED, num_key_value_heads=4, head_dim=4)
HYBRID = dict(head_dim=16, num_hidden_layers=4, layer_types=['linear_attention', 'full_attention'] * 2)
GEMMA4 = dict(num_hidden_layers=6, global_head_dim=16, hidden_size_per_layer_input=0)
LLAMA4 = dict(head_dim=16, num_hidden_layers=5)


def hf_rope(kind, **options):
    length = {} if kind in ('linear', 'default') else {'original_max_position_embeddings': 16}
    return {'rope_parameters': {'rope_type': kind, 'rope_theta': 5000.0, **length, **options}}


LLAMA3 = hf_rope('llama3', factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
VARIANTS = {  # model_type: one dict of changes to SMALL per model; other families have no changes
    'gpt2': [{}, dict(UNTIED, n_inner=40, activation_function='relu')],
    'llama': [
        dict(TIED, head_dim=16, **hf_rope('linear', factor=2.0)),
        LLAMA3,
        dict(num_key_value_heads=1, head_dim=8, **hf_rope(  # factors for long texts only, because
            'longrope', factor=4.0, short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 3.0, 4.0],
            original_max_position_embeddings=4))],  # transformers switches while it decodes
    'qwen2': [dict(TIED, use_sliding_window=True, max_window_layers=1)],
    'qwen3': [dict(TIED, use_sliding_window=True, max_window_layers=2)],
    'qwen3_moe': [dict(norm_topk_prob=True, mlp_only_layers=[1])],
    'deepseek_v2': [
        dict(LATENT, q_lora_rank=None, topk_method='greedy'),
        dict(LATENT, n_group=2, topk_group=1, topk_method='group_limited_greedy', routed_scaling_factor=2.0,
             **hf_rope('yarn', factor=4.0, mscale=0.7, mscale_all_dim=0.9))],
    'deepseek_v3': [
        dict(LATENT, attention_bias=True, norm_topk_prob=False, n_shared_experts=2, first_k_dense_replace=2,
             n_group=2, rms_norm_eps=0.1)],
    'bloom': [dict(hidden_size=36, n_head=6)],  # ALiBi without a power of two
    'falcon': [
        {},
        dict(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
        dict(alibi=True, multi_query=False, parallel_attn=False, bias=True)],
    'gpt_neox': [{}, dict(use_parallel_residual=False, attention_bias=False,
                          **hf_rope('default', partial_rotary_factor=0.5))],
    'mpt': [dict(logit_scale=None)],
    'smollm3': [dict(UNTIED, no_rope_layers=[0, 1, 0])],
    'qwen2_moe': [dict(mlp_only_layers=[1])],
    'qwen3_next': [HYBRID, dict(HYBRID, linear_num_key_heads=4, norm_topk_prob=False,
                                mlp_only_layers=[0], layer_types=None)],
    'qwen3_5_text': [HYBRID],
    'qwen3_5_moe_text': [HYBRID],
    'gemma3_text': [dict(num_hidden_layers=6, final_logit_softcapping=9.0, **ROPE_BY_KIND)],
    'gemma4_text': [
        dict(GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=9.0),
        dict(GEMMA4, enable_moe_block=True, top_k_experts=2, num_experts=4, moe_intermediate_size=24)],
    'gemma4_unified_text': [dict(GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=4,
                                 layer_types=['sliding_attention'] * 6)],  # it removes the last window
    'olmo3': [dict(num_hidden_layers=4, rope_parameters={
        'full_attention': hf_rope('yarn', factor=4.0)['rope_parameters']})],
    'lfm2': [CONV_FULL],
    'lfm3': [dict(UNTIED, **UNBIASED, head_dim=16, num_hidden_layers=4, layer_types=[
        'conv', 'full_attention', 'sliding_attention', 'full_attention'], rope_parameters={
            'full_attention': {'rope_type': 'proportional', 'rope_theta': 50.0, 'partial_rotary_factor': 0.4},
            'sliding_attention': {'rope_type': 'default', 'rope_theta': 20.0}})],
    'lfm2_moe': [dict(CONV_FULL, **UNTIED, num_dense_layers=1, routed_scaling_factor=1.5)],
    'bamba': [dict(attn_layer_indices=[1])],
    'granitemoehybrid': [
        dict(layer_types=LINEAR_FULL),
        dict(mamba_n_heads=4, num_local_experts=0, mamba_conv_bias=False, shared_intermediate_size=40,
             position_embedding_type='rope', layer_types=LINEAR_FULL[1:] + LINEAR_FULL[1:2])],
    'nemotron_h': [
        dict(UNBIASED, sliding_window=None, layers_block_type=[
            'linear_attention', 'moe', *LINEAR_FULL[:2], 'mlp', 'linear_attention', 'moe']),
        dict(sliding_window=None, use_conv_bias=False, n_groups=1, layers_block_type=[
            'full_attention', 'mlp', 'linear_attention', 'linear_attention'])],
    'kimi_linear': [dict(LATENT, q_lora_rank=None, layer_types=LINEAR_FULL)],
    'gpt_oss': [dict(head_dim=16, **hf_rope('yarn', factor=4.0, truncate=False))],
    'phi3': [hf_rope('default', partial_rotary_factor=0.5), dict(
        original_max_position_embeddings=4, **hf_rope(
        'longrope', partial_rotary_factor=0.5, short_factor=[1.0] * 2, long_factor=[1.0, 2.0]))],
    'internlm3': [UNBIASED],
    'glm4': [dict(TIED, head_dim=16, attention_bias=False,
                  **hf_rope('yarn', factor=4.0, partial_rotary_factor=0.25))],
    'hyperclovax': [dict(residual_multiplier=1.0)],
    'cohere2': [dict(sliding_window_pattern=2)],
    'exaone4': [dict(num_hidden_layers=5)],
    'seed_oss': [dict(attention_bias=False, attention_out_bias=True)],
    'ministral': [FULL_SLIDING],
    'ministral3': [hf_rope('yarn', factor=4.0, original_max_position_embeddings=5, llama_4_scaling_beta=0.3)],
    'mistral4': [dict(num_key_value_heads=4, routed_scaling_factor=2.0, first_k_dense_replace=1, **hf_rope(
        'yarn', factor=4.0, original_max_position_embeddings=5, llama_4_scaling_beta=0.3, mscale=1.0,
        mscale_all_dim=1.0))],
    'youtu': [dict(LATENT, attention_bias=True), dict(LATENT, **UNTIED, q_lora_rank=None)],
    'mellum': [dict(FULL_SLIDING, **SPARSE_DENSE, **ROPE_BY_KIND)],
    'granite_swa': [dict(UNTIED, **FULL_SLIDING, layer_rope_theta=[500.0, 500.0, 0])],
    'granitemoe_swa': [dict(layer_rope_theta=[0, 100.0, 100.0])],
    'hunyuan_v1_dense': [hf_rope('dynamic', factor=1.0, alpha=50.0)],
    'opt': [dict(layer_norm_elementwise_affine=False, activation_function='gelu')],
    'glm4_moe': [dict(TIED, use_qk_norm=True, first_k_dense_replace=2, n_group=2)],
    'solar_open': [hf_rope('yarn', factor=4.0)],
    'exaone_moe': [dict(TIED, n_group=2, **FULL_SLIDING, **SPARSE_DENSE)],
    'afmoe': [dict(UNBIASED, mup_enabled=True, route_scale=2.0, global_attn_every_n_layers=2)],
    'hy_v3': [dict(mlp_bias=False, router_scaling_factor=2.0)],
    'minimax_m2': [dict(head_dim=16, rotary_dim=8, num_local_experts=5)],
    'glm4_moe_lite': [dict(LATENT, rms_norm_eps=1e-6, n_group=2, **SPARSE_DENSE)],
    'deepseek_v32': [dict(LATENT, n_group=2)],
    'glm_moe_dsa': [dict(LATENT, rms_norm_eps=1e-6, indexer_types=['full', 'shared', 'full'])],
    'hunyuan_v1_moe': [dict(moe_topk=[2] * 3, **hf_rope('dynamic', factor=1.0, alpha=50.0))],
    'olmoe': [dict(norm_topk_prob=True, clip_qkv=0.5)],
    'llama4_text': [dict(LLAMA4, no_rope_layer_interval=3),
                    dict(LLAMA4, **TIED, use_qk_norm=False, interleave_moe_layer_step=2)]}
HF_MODELS = [(kind, options) for kind in hub.FAMILIES if kind in transformers.CONFIG_MAPPING
             for options in VARIANTS.get(kind, [{}])]


HF_CONSTANT = ('inv_freq', 'embed_scale', 'embed_positions', 'act_fn.beta', 'act_fn.eps')


@torch.no_grad()
def hf_model(kind, options, folder=None, **save):
    """A random model of transformers, saved to the folder. Falcon uses sdpa, because its eager attention in
    transformers 5.23 adds ALiBi twice."""
    torch.manual_seed(0)
    theirs = transformers.AutoConfig.for_model(kind).to_dict()
    small = {name: value for name, value in SMALL.items() if name in theirs}
    config = transformers.AutoConfig.for_model(kind, **{**small, **options})
    how = 'sdpa' if options.get('alibi') else 'eager'
    one = getattr(transformers, hub.FAMILIES[kind].arch)
    model = one._from_config(config, attn_implementation=how).float().eval()
    for name, w in itertools.chain(model.named_parameters(), model.named_buffers()):
        if w.is_floating_point() and not any(part in name for part in HF_CONSTANT):
            less_one = hub.PLUS_ONE in hub.FAMILIES[kind].layouts.values() and 'linear_attn' not in name
            one = w.ndim == 1 and re.search('norm|scal', name) and not less_one and 'bias' not in name
            w.copy_(torch.randn_like(w) * (0.3 if w.ndim > 1 else 0.2) + bool(one))
    model.tie_weights()
    model.generation_config.eos_token_id = None
    if folder:
        model.save_pretrained(folder, **save)
    return model


def read_config(folder):
    return json.loads(Path(folder, 'config.json').read_text())


def hf_opened(folder):
    c = read_config(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation='sdpa' if c.get('alibi') else 'eager', dtype=torch.float32).eval()


@pytest.mark.parametrize('kind, options', HF_MODELS, ids=lambda v: v if isinstance(v, str) else '')
@torch.no_grad()
def test_hf_checkpoints_in_and_out(kind, options, tmp_path):
    theirs = hf_model(kind, options, tmp_path / 'in', max_shard_size='20KB')
    context = {'block_size': 64} if 'longrope' in str(options) else {}
    ours, idx = hub.from_pretrained(tmp_path / 'in', **context), torch.randint(61, (2, 24))
    logits = theirs(idx).logits
    near(ours(idx), logits)
    if hub.FAMILIES[kind].exports:
        hub.save_pretrained(ours, None, tmp_path / 'out')
        near(hf_opened(tmp_path / 'out')(idx).logits, logits)
        assert read_config(tmp_path / 'out')['model_type'] == kind
        assert torch.equal(hub.from_pretrained(tmp_path / 'out', **context)(idx), ours(idx))
        c = read_config(tmp_path / 'out')
        if c.pop('rope_parameters', None) and 'rope_theta' in c:  # the older fields mean the same
            (tmp_path / 'out/config.json').write_text(json.dumps(c))
            near(hf_opened(tmp_path / 'out')(idx).logits, logits)
            near(hub.from_pretrained(tmp_path / 'out', **context)(idx), ours(idx), 1e-6)
    weights.quantize_weights(ours, torch.float32)  # the whole model at once; int8=True converts each tensor
    assert torch.equal(hub.from_pretrained(tmp_path / 'in', int8=True, **context)(idx), ours(idx))


# published files that differ from transformers' current files: functions that edit config.json and tensors

def as_once_published(c, state):
    rope = c.pop('rope_parameters')
    c.update(rope_theta=rope.pop('rope_theta'), torch_dtype=c.pop('dtype'),
             rope_scaling={'type': rope.pop('rope_type'), **rope})


def with_fields_that_change_nothing(c, state):
    c |= json.loads('''{"unsloth_fixed": true, "unsloth_version": "2025.6.1", "torchscript": true,
        "num_labels": 3, "temperature": 0.6, "top_k": 20, "max_length": 20, "is_causal": true,
        "license": "mit", "eos_token_ids": [1], "attention_sinks": 4, "sliding_window": 8}''')


def nemotron3_as_published(c, state):
    words = {'linear_attention': 'mamba', 'full_attention': 'attention'}
    c.update(norm_eps=1e-5, num_hidden_layers=7, layers_block_type=[
        words.get(one, one) for one in c['layers_block_type']])


def kimi_as_published(c, state):
    kinds = {kind: [i for i, one in enumerate(c['layer_types'], 1) if one.startswith(kind)]
             for kind in ('full', 'linear')}
    c['linear_attn_config'] = dict(
        full_attn_layers=kinds['full'], kda_layers=kinds['linear'], num_heads=c.pop('linear_num_heads'),
        head_dim=c.pop('linear_head_dim'), short_conv_kernel_size=c.pop('linear_conv_kernel_dim'))
    del c['layer_types'], c['mlp_layer_types']
    c.update(first_k_dense_replace=1, mla_use_nope=True, use_grouped_topk=True,
             moe_router_activation_func='sigmoid')


def without_prefix(c, state):
    for name in list(state):
        state[name.removeprefix('transformer.')] = state.pop(name)
    state['h.0.attn.bias'] = torch.ones(1, 1, 64, 64)


def with_extra_layer(c, state):
    state['model.layers.3.eh_proj.weight'] = torch.ones(32, 64)
    state['model.layers.3.embed_tokens.weight'] = torch.ones(61, 32)


def in_a_larger_model(kind, prefix='language_model.model.'):
    """A text model of this type inside a model that also reads images."""
    def edit(c, state):
        text = {**c, 'model_type': kind}
        c.clear()
        c.update(model_type=kind.removesuffix('_text'), vision_config={'depth': 1}, text_config=text)
        for name in list(state):
            state[name.replace('model.', prefix, 1)] = state.pop(name)
        state |= {f'{name}.x.weight': torch.ones(2) for name in ('model.visual', 'vision_tower', 'mtp')}
    return edit


def qwen3_6_as_published(c, state):
    c.update(attn_output_gate=True, mtp_num_hidden_layers=1)
    c['rope_parameters'] |= {'mrope_section': [1, 1, 0], 'mrope_interleaved': True}
    in_a_larger_model('qwen3_5_text', 'model.language_model.')(c, state)


def granite4_as_published(c, state):
    words = {'linear_attention': 'mamba', 'full_attention': 'attention'}
    c.update(normalization_function='rmsnorm', layer_types=[words[one] for one in c['layer_types']])


def gemma4_as_published(c, state):
    del c['per_layer_config']
    c.update(global_head_dim=16, num_global_key_value_heads=1)
    in_a_larger_model('gemma4_text', 'model.language_model.')(c, state)


def with_fused_experts(c, state):
    for i in range(c['num_hidden_layers']):
        layer = f'model.layers.{i}.mlp.experts'
        gate, up, down = ([state.pop(f'{layer}.{e}.{name}_proj.weight') for e in range(c['num_experts'])]
                          for name in ('gate', 'up', 'down'))
        state[f'{layer}.gate_up_proj'] = torch.cat((torch.stack(gate), torch.stack(up)), dim=1)
        state[f'{layer}.down_proj'] = torch.stack(down)


def minimind(**change):
    """MiniMind's config.json; the tensors have the names of Qwen3 and Llama."""
    def edit(c, state):
        theta = c.pop('rope_parameters')['rope_theta']
        c.pop('decoder_sparse_step', None)
        c.update(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, model_type='minimind',
                 rope_theta=theta, rope_scaling=None, flash_attn=True,
                 norm_topk_prob=True, dropout=0.0)
        c.update(change)
    return edit


@pytest.mark.parametrize('kind, options, edit', [
    ('llama', hf_rope('yarn', factor=4.0), as_once_published),
    ('gemma4_text', VARIANTS['gemma4_text'][0], gemma4_as_published),
    ('granitemoehybrid', VARIANTS['granitemoehybrid'][0], granite4_as_published),
    ('kimi_linear', VARIANTS['kimi_linear'][0], kimi_as_published),
    ('gpt2', {}, without_prefix),
    ('llama', hf_rope('yarn', factor=4.0, finetuned=True), with_fields_that_change_nothing),
    ('nemotron_h', VARIANTS['nemotron_h'][0], nemotron3_as_published),
    ('deepseek_v3', dict(LATENT, n_group=2), with_extra_layer),
    ('qwen3_5_text', HYBRID, qwen3_6_as_published),
    ('qwen3_5_moe_text', HYBRID, with_fused_experts),
    ('deepseek_v3', dict(LATENT, n_group=2), in_a_larger_model('kimi_k2')),
    ('qwen3_moe', dict(TIED, head_dim=8, norm_topk_prob=True), minimind(use_moe=True)),
    ('llama', dict(TIED, **UNBIASED, head_dim=8), minimind(  # before version 3
        use_moe=False, n_routed_experts=4, n_shared_experts=1, scoring_func='softmax', seq_aux=True)),
], ids=lambda v: getattr(v, '__name__', v if isinstance(v, str) else ''))
@torch.no_grad()
def test_hf_files_in_other_forms(kind, options, edit, tmp_path):
    theirs, path = hf_model(kind, options, tmp_path), tmp_path / 'model.safetensors'
    c, state = read_config(tmp_path), safetensors.load_file(path)
    edit(c, state)
    (tmp_path / 'config.json').write_text(json.dumps(c))
    safetensors.save_file(state, path)
    (tmp_path / hub.INDEX).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')  # older
    idx = torch.randint(61, (2, 12))
    near(hub.from_pretrained(tmp_path)(idx), theirs(idx).logits)


@torch.no_grad()
def test_hf_heads_of_tied_models(tmp_path):
    """A file may have a head although its config.json ties it, or only a head."""
    hf_model('qwen3', TIED, tmp_path)
    path, idx = tmp_path / 'model.safetensors', torch.randint(61, (2, 12))
    state = safetensors.load_file(path)
    wte = {'model.embed_tokens.weight': state.pop('model.embed_tokens.weight')}
    w, = wte.values()
    for head, is_tied in (wte | {'lm_head.weight': w.flip(0)}, False), ({'lm_head.weight': w}, True):
        safetensors.save_file(state | head, path, {'format': 'pt'})
        ours = hub.from_pretrained(tmp_path)
        near(ours(idx), hf_opened(tmp_path)(idx).logits)
        assert (ours.lm_head is None) == is_tied

@torch.no_grad()
def test_hf_contexts_choose_factors(tmp_path):
    theirs = hf_model('llama', dict(head_dim=8, **hf_rope(  # the context decides about the factors
        'longrope', factor=2.0, short_factor=[1.0, 1.5, 2.0, 2.5], long_factor=[1.0, 2.0, 3.0, 4.0],
        original_max_position_embeddings=32)), tmp_path)
    for n, changes in (24, {}), (40, {'block_size': 64}):
        idx, ours = torch.randint(61, (2, n)), hub.from_pretrained(tmp_path, **changes)
        assert ours.config.block_size == changes.get('block_size', 32)
        near(ours(idx), theirs(idx).logits)


def test_hf_contexts_end_where_an_indexer_would_choose(tmp_path):
    theirs = hf_model('deepseek_v32', dict(LATENT, index_topk=16), tmp_path)
    ours, idx = hub.from_pretrained(tmp_path), torch.randint(61, (2, 16))
    with torch.no_grad():
        near(ours(idx), theirs(idx).logits)
    assert ours.config.block_size == 16
    with pytest.raises(ValueError, match='deepseek_v32 with block_size=17'):
        hub.from_pretrained(tmp_path, block_size=17)


@pytest.mark.parametrize('change, message', [
    (dict(model_type='rwkv2'), "model_type='rwkv2' is unsupported; these are supported: .*llama"),
    (dict(is_causal=False, quantization_config={'quant_method': 'awq'}),
     "llama with is_causal=False, quantization_config={'quant_method': 'awq'} is unsupported"),
    (dict(model_type='qwen3_moe', decoder_sparse_step=2), 'qwen3_moe with decoder_sparse_step=2'),
    (dict(num_hidden_layers=10**7, head_dim=1e12), 'llama with head_dim=1000.*, n_layer=10000000 is'),
    (dict(rms_norm_eps='1e-5x'), "config.json: norm_eps must be a number, got '1e-5x'"),
    (dict(rope_scaling={'type': 'longrope', 'factor': 4.0, 'original_max_position_embeddings': 4,
                        'short_factor': [1.0] * 3, 'long_factor': [1.0] * 4}), 'llama lacks .*tensor a'),
    (dict(num_hidden_layers=None), 'llama lacks a field .*n_layer')])
def test_hf_refuses_by_name_what_it_does_not_support(change, message):
    with pytest.raises(ValueError, match=message):
        hub.config_from_hf({**SIZES, 'model_type': 'llama', **change})


OUT = 'model.layers.0.self_attn.o_proj.weight'


@pytest.mark.parametrize('layers, tensors, message', [
    (2, {'model.norm.weight': None, OUT: torch.ones(8, 32), 'extra.weight': torch.ones(2)},
     "it lacks [('layers.0.self_attn.o_proj.weight', (32, 32)), ('norm.weight', (32,))], but has "
     "[('extra.weight', (2,)), ('layers.0.self_attn.o_proj.weight', (8, 32))]"),
    (1, {}, "it lacks [], but has [('layers.1."),
    (2, {OUT: torch.zeros(32, 16, dtype=torch.uint8), f'{OUT}_scale': torch.ones(32, 2)},  # NVIDIA's NVFP4
     'has quantized weights (U8), which are not supported'),
    (2, {OUT: torch.ones(32, 32, dtype=torch.int8)}, 'has quantized weights (I8)')])
def test_tensors_that_do_not_fit_are_named(layers, tensors, message, tmp_path):
    hub.save_pretrained(tiny(qk_norm=False), None, tmp_path)
    path = tmp_path / 'model.safetensors'
    state = safetensors.load_file(path) | tensors
    safetensors.save_file({name: w for name, w in state.items() if w is not None}, path)
    (tmp_path / 'config.json').write_text(json.dumps(read_config(tmp_path) | {'num_hidden_layers': layers}))
    with pytest.raises(ValueError, match=re.escape(message)):
        hub.from_pretrained(tmp_path)


# damaged files ----------------------------------------------------------------------------------------------

POINTER = b'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 999\n'


@pytest.fixture
def published(tmp_path):
    """A folder and a GGUF file with the same model."""
    model = tiny(n_layer=1, vocab_size=257)
    hub.save_pretrained(model, make_tokenizer('byte'), tmp_path / 'x')
    gguf.save_gguf(model, make_tokenizer('byte'), tmp_path / 'x.gguf')
    return tmp_path / 'x'


@pytest.mark.parametrize('name, damage, message', [
    ('model.safetensors', lambda whole: POINTER, 'cannot read .*/model.safetensors, .*git lfs pull'),
    ('model.safetensors.index.json', lambda whole: b'{"weight_map": {"a": "../../b"}}', 'x/b is missing'),
    ('tokenizer.json', lambda whole: whole.replace(b'"!": ', b'"!": 40000000'), 'token id 4000000033'),
    ('config.json', lambda whole: b'[1]', 'cannot read .*/config.json, .*list')])
def test_damaged_files_are_named(name, damage, message, published):
    path = published / name
    if name.endswith('index.json'):  # otherwise a single file counts
        os.remove(published / 'model.safetensors')
    path.write_bytes(damage(path.read_bytes() if path.exists() else b''))
    try:
        found = load(str(published))[2]['no_tokenizer']
    except (OSError, ValueError) as error:
        assert isinstance(error, (UserError, OSError))
        found = str(error)
    assert re.search(message, found)


def test_random_damage_is_reported_in_one_line(published):
    chance, loaded = random.Random(1), []
    for n, path in enumerate([*published.iterdir(), published.with_suffix('.gguf')] * 8):
        whole = path.read_bytes()
        is_gguf = path.suffix == '.gguf'
        path = published.with_name(f'{n}.gguf') if is_gguf else path
        damaged = bytearray(whole[:chance.randrange(len(whole))] if chance.random() < 0.3 else whole)
        for _ in range(3 if damaged == whole else 0):
            damaged[chance.randrange(min(len(whole), 2000))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            loaded.append(load(str(path if is_gguf else published)))
        except (OSError, ValueError) as error:
            assert isinstance(error, (UserError, OSError)), error
        path.write_bytes(whole)
    assert 0 < len(loaded) < n


# quantized files --------------------------------------------------------------------------------------------

def mxfp4(name, w):
    """Random tensors of gpt-oss as published. transformers decodes the same bytes."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    blocks = torch.randint(256, (*w.mT.shape[:2], w.shape[1] // 32, 16), dtype=torch.uint8)
    scales = torch.randint(118, 126, blocks.shape[:3], dtype=torch.uint8)
    w.copy_(convert_moe_packed_tensors(blocks, scales))
    return {f'{name}_blocks': blocks, f'{name}_scales': scales}


def fp8(name, w, block=128):
    """One scale per 128 x 128 weights, also at ragged ends (DeepSeek-V3), or per tensor (Ministral 3)."""
    eights = w.to(torch.float8_e4m3fn)
    scale = torch.rand([-(-n // block) for n in w.shape]) + 0.5
    whole = torch.kron(scale, torch.ones(block, block))[:w.shape[0], :w.shape[1]]
    w.copy_((eights.float() * whole).bfloat16())
    return {name: eights, f'{name}_scale_inv': scale}


@pytest.mark.parametrize('kind, encode, c', [
    ('gpt_oss', mxfp4, {'quant_method': 'mxfp4'}),
    ('qwen3', functools.partial(fp8, block=999), {'quant_method': 'fp8'}),
    ('qwen3', fp8, {'quant_method': 'fp8', 'weight_block_size': [128, 128]})])
@torch.no_grad()
def test_published_8_and_4_bits_are_read(kind, encode, c, tmp_path):
    theirs = hf_model(kind, dict(hidden_size=160, intermediate_size=288, head_dim=32), tmp_path)
    path, idx = tmp_path / 'model.safetensors', torch.randint(61, (2, 24))
    stored = safetensors.load_file(path)
    for name, w in theirs.named_parameters():
        if name.endswith(('proj', 'proj.weight')) and w.ndim == 2 + (kind == 'gpt_oss'):
            del stored[name]
            stored |= encode(name, w)
    safetensors.save_file(stored, path)
    (tmp_path / 'config.json').write_text(json.dumps(read_config(tmp_path) | {'quantization_config': c}))
    near(hub.from_pretrained(tmp_path, dtype=torch.float32)(idx), theirs(idx).logits)


# exports ----------------------------------------------------------------------------------------------------

def test_models_without_a_family_are_refused_by_name(tmp_path):
    for options, part in ((dict(residual_lambdas=True), 'qwen3, has no residual_lambdas=True'),
                          (dict(mlp='gelu', qk_norm='whole'), "arcee, has no qk_norm='whole'")):
        with pytest.raises(ValueError, match=f'the nearest published family, {part}'):
            hub.save_pretrained(tiny(**options), None, tmp_path / 'none')
    with pytest.raises(ValueError, match='nearest published family, kimi_linear'):
        hub.save_pretrained(tiny(), None, tmp_path / 'none', family='kimi_linear')
    assert not (tmp_path / 'none').exists()


def test_all_end_tokens_are_read_and_written(tmp_path):
    tokenizer = JsonTokenizer(to_json(make_tokenizer('byte')), {'eos_token_id': [256, 10]})
    hub.save_pretrained(tiny(vocab_size=257), tokenizer, tmp_path)
    assert list(load(str(tmp_path))[1].stop_tokens) == [256, 10]
    assert read_config(tmp_path)['eos_token_id'] == [256, 10]
    assert hf_opened(tmp_path).generation_config.eos_token_id == [256, 10]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextlib.contextmanager
def full_disk(size):
    """Limits the size of files."""
    resource = pytest.importorskip('resource')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_exports_replace_nothing_and_leave_nothing_half_written(tmp_path):
    with full_disk(40_000), pytest.raises((OSError, SafetensorError)):
        hub.save_pretrained(tiny(), None, tmp_path / 'new')
    assert not os.listdir(tmp_path)
    hub.save_pretrained(tiny(), make_tokenizer('byte'), tmp_path)
    before = contents(tmp_path)
    assert before.keys() == {'config.json', 'generation_config.json', 'model.safetensors', 'tokenizer.json',
                             'tokenizer_config.json'}
    with pytest.raises(ValueError, match=f'{tmp_path} is not empty'):
        hub.save_pretrained(tiny(n_layer=1), None, tmp_path)
    assert contents(tmp_path) == before

"""
Published models and ours: fetches one from the Hugging Face hub, or writes ours for transformers and vLLM.

    python hub.py Qwen/Qwen3-0.6B                         # fetches it, shows what it is and the next commands
    python hub.py folder                                  # the same for a folder with config.json
    python hub.py export out/ folder                      # a run of train.py -> a folder for transformers
    python hub.py export out/ folder --dtype=bfloat16

train.py, sample.py and bench.py read published models with --init_from=<id or folder>. HF_TOKEN, HF_HOME,
HF_ENDPOINT and HF_HUB_OFFLINE have the meaning that huggingface_hub gives them. Only safetensors are read, no
pickles. A new family is an entry of FAMILIES: see Family.
"""
import contextlib
import dataclasses
import fnmatch
import json
import math
import os
import re
import shlex
import shutil
import typing

from configurator import configure

dtype: str | None = None  # of exported weights: float32, bfloat16, float16; None: as they are stored
config, _, words, *_ = configure(globals(), words=3)

import torch

from model import (
    CHANGEABLE,
    GPT,
    Attention,
    GPTConfig,
    add_lora,
    changed_config,
    checkpoint_path,
    fill_rows,
    letter,
    merge_lora,
    quantize_weights,
    read_checkpoint,
)
from prepare import load_tokenizer
from tokenizer import json_tokenizer, tokenizer_from_state

INSTALL = 'pip install safetensors tokenizers huggingface_hub'
DTYPES = {'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16}  # as safetensors name them


def plain(dtype):
    """'bfloat16', without torch's prefix."""
    return str(dtype).removeprefix('torch.')


# families ---------------------------------------------------------------------------------------------------

def no_op(*_):
    """A function of a family that has nothing to add: it changes no field and no name."""
    return {}


@dataclasses.dataclass(frozen=True)
class Family:
    """How transformers writes the models of one model_type: their config.json and the names of their tensors.

    To add one, start from the nearest (`like`) and give what differs: the names of fields and tensors first;
    then, if its config.json has fields that no name carries over, a pair of functions `read` and `write`.
    A field, name or row order set to None is removed. What a table forgets is an error that names it: fields
    of config.json that are neither in the tables nor harmless are refused, and so are tensors without a name.
    Add a tiny model of it to HF_MODELS in test_model.py, which compares it with transformers, in and out.
    """
    arch: str                   # the class in transformers
    fields: dict                # field of GPTConfig: field of config.json; a tuple: the first that is there
    ours: dict                  # GPTConfig's fields that this family fixes, unless a field above is given
    names: dict                 # our module or tensor: theirs; several, of which ours is the rows, in order
    layer: str                  # what precedes the names inside block N; an expert's number is E
    theirs: dict = dataclasses.field(default_factory=dict)  # their fields that must have this value if given
    known: tuple = ()           # their fields that `read` reads, or that do not matter
    names_at: typing.Callable = no_op  # (config, layer) -> names that differ in this model or layer
    rows: dict = dataclasses.field(default_factory=dict)  # where the order of rows differs: our module:
    #                             (config, layer) -> for each of their tensors, its rows as indices of ours
    transposed: tuple = ()      # our modules whose matrices are transposed there
    convolution: tuple = ()     # our tensors (channels, kernel) that are (channels, 1, kernel) there
    plus_one: tuple = ()        # our norms whose weights are stored less 1
    ignored: tuple = ()         # patterns of tensors that are left out; N: the layer after the last
    windows: str = ''           # letters of the layers, as in window_pattern, unless layer_types is given
    windows_off: bool = False   # use_sliding_window is False unless given
    one_window: bool = False    # transformers does not look at layer_types: all layers have the window
    first_full: int | None = None  # max_window_layers, if not given: so many first layers have no window
    hybrid: bool = False        # layer_types may be linear_attention
    read: typing.Callable = no_op   # (config.json, GPTConfig's fields so far) -> None: sets the rest
    write: typing.Callable = no_op  # (GPTConfig, config.json so far) -> None: sets the rest


def like(base, **changes):
    """The family `base` with changes: dicts are merged, where None removes an entry; the rest is replaced."""
    for key, value in changes.items():
        if isinstance(value, dict):
            merged = {**getattr(base, key), **value}
            changes[key] = {name: one for name, one in merged.items() if one is not None}
    return dataclasses.replace(base, **changes)


# the order of rows

def shares(groups, *parts):
    """Rows of one of their tensors that is made of `groups` groups: each holds its share of each part, one
    after the other. parts: indices of our rows, (n,) each."""
    return torch.cat([part.view(groups, -1) for part in parts], dim=1).flatten()


def interleaved(rows):
    """Rows in two halves -> pairs of one of each half: how some families lay out the pairs that rotate."""
    return shares(len(rows) // 2, *rows.chunk(2))


def rows_by_kv_head(config, layer):
    """One tensor: for each k/v head its queries, its key, its value."""
    H, K, D = config.n_head, config.n_kv_head, config.head_dim
    return [shares(K, *torch.arange((H + 2 * K) * D).split((H * D, K * D, K * D)))]


def rotated_last(rows, heads, turned):
    """rows of `heads` heads, in each of which the last `turned` rows are interleaved pairs."""
    return torch.cat([torch.cat((head[:-turned], interleaved(head[-turned:])))
                      for head in rows.view(heads, -1)])


def rows_latent_query(config, layer):
    rows = torch.arange(config.n_head * (config.qk_nope_head_dim + config.qk_rope_head_dim))
    return [rotated_last(rows, config.n_head, config.qk_rope_head_dim)]


def rows_latent_in(config, layer):
    """Two tensors: the query, compressed or not; the latent with the rotary key."""
    query = (rows_latent_query(config, layer)[0] if config.q_lora_rank is None
             else torch.arange(config.q_lora_rank))
    latent = len(query) + torch.arange(config.kv_lora_rank + config.qk_rope_head_dim)
    return [query, rotated_last(latent, 1, config.qk_rope_head_dim)]


def rows_gate_up(config, layer):
    """One tensor: a row of the gate, a row of up, and so on."""
    return [interleaved(torch.arange(2 * config.d_expert))]


def rows_gated_attention(config):
    """Three tensors: for each head its query and its gate; the keys; the values."""
    H, K, D = config.n_head, config.n_kv_head, config.head_dim
    q, k, v, gate = torch.arange(2 * (H + K) * D).split((H * D, K * D, K * D, H * D))
    return [shares(H, q, gate), k, v]


def rows_delta_net(config):
    """Ours: queries, keys, values, gates z, betas b and decays a."""
    key = config.linear_n_key_head * config.linear_key_head_dim
    heads = config.linear_n_value_head
    value = heads * config.linear_value_head_dim
    return torch.arange(2 * (key + value + heads)).split((key, key, value, value, heads, heads))


def rows_qwen3_next(config, layer):
    """Gated attention; or two tensors: for each key head its q, k, v and z; for each its b and a."""
    if not is_linear(config, layer):
        return rows_gated_attention(config)
    q, k, v, z, b, a = rows_delta_net(config)
    groups = config.linear_n_key_head
    return [shares(groups, q, k, v, z), shares(groups, b, a)]


def rows_qwen3_5(config, layer):
    """Gated attention; or four tensors: q, k and v; z; b; a."""
    if not is_linear(config, layer):
        return rows_gated_attention(config)
    q, k, v, z, b, a = rows_delta_net(config)
    return [torch.cat((q, k, v)), z, b, a]


def is_linear(config, layer):
    return config.mixer_of(layer) == 'D'


# fields of config.json that no name carries over

def read_falcon(c, args):
    new, heads = c.get('new_decoder_architecture'), c.get('num_kv_heads') or c.get('n_head_kv')
    args['n_kv_head'] = heads if new else 1 if c.get('multi_query', True) else None
    if new:
        args['norm_placement'] = 'parallel' if c.get('num_ln_in_parallel_attn') == 1 else 'parallel_2'
    else:
        args['norm_placement'] = 'parallel' if c.get('parallel_attn', True) else 'pre'
    if c.get('alibi'):  # Falcon scales the bias with the scores
        args.update(pos='alibi', alibi_scale=(args['n_embd'] // args['n_head']) ** -0.5)


def write_falcon(config, c):
    new = config.norm_placement == 'parallel_2' or config.n_kv_head not in (1, config.n_head)
    c.update(new_decoder_architecture=new, num_kv_heads=config.n_kv_head, multi_query=config.n_kv_head == 1,
             parallel_attn=config.norm_placement != 'pre', alibi=config.pos == 'alibi',
             num_ln_in_parallel_attn=1 + (config.norm_placement == 'parallel_2') if new else None)


def names_falcon(config, layer):
    return {'ln_1': 'ln_attn', 'ln_2': 'ln_mlp'} if config.norm_placement == 'parallel_2' else {}


def read_mpt(c, args):
    attn = c.get('attn_config') or {}
    for name, value in dict(alibi=True, alibi_bias_max=8, clip_qkv=None, qk_ln=False, prefix_lm=False,
                            attn_type='multihead_attention', attn_uses_sequence_id=False).items():
        if attn.get(name, value) != value:
            raise ValueError(f"attn_config with {name}={attn[name]!r} is unsupported")
    args['attn_scale'] = attn.get('softmax_scale')


def write_mpt(config, c):
    c['attn_config'] = dict(alibi=True, alibi_bias_max=8, softmax_scale=config.attn_scale)


def read_deepseek(c, args):
    if args.get('qkv_bias') and not args.get('q_lora_rank'):
        raise ValueError('attention_bias without q_lora_rank is unsupported')
    if (args.get('n_group') or 1) == 1 or c.get('topk_method') == 'greedy':
        args.update(n_group=None, topk_group=None)


def write_deepseek(config, c):
    if not (config.n_expert and config.n_shared_expert):
        raise ValueError('DeepSeek has experts and shared experts')
    c.update(n_group=config.n_group or 1, topk_group=config.topk_group or 1,
             num_key_value_heads=config.n_head, head_dim=config.qk_rope_head_dim, num_nextn_predict_layers=0)


def write_deepseek_v2(config, c):
    write_deepseek(config, c)
    c['topk_method'] = 'group_limited_greedy' if config.n_group else 'greedy'


def names_deepseek(config, layer):
    whole = {'attn.c_attn': 'self_attn.q_proj self_attn.kv_a_proj_with_mqa'}
    return whole if config.q_lora_rank is None else {}


def read_sparse_layers(c, args):
    """Qwen's choice of the layers that have experts."""
    step, dense = c.get('decoder_sparse_step', 1), c.get('mlp_only_layers') or ()
    args['expert_pattern'] = ''.join('D' if i in dense or (i + 1) % step else 'E'
                                     for i in range(args['n_layer']))


def write_sparse_layers(config, c):
    c.update(decoder_sparse_step=1,
             mlp_only_layers=[i for i in range(config.n_layer) if not config.has_experts(i)])


def read_shared_expert(c, args):
    read_sparse_layers(c, args)
    shared, width = c['shared_expert_intermediate_size'], c['moe_intermediate_size']
    if shared % width:
        raise ValueError(f"shared_expert_intermediate_size={shared} is unsupported: it must be a multiple of "
                         f"moe_intermediate_size={width}")
    args['n_shared_expert'] = shared // width


def write_shared_expert(config, c):
    write_sparse_layers(config, c)
    c['shared_expert_intermediate_size'] = config.n_shared_expert * config.d_expert


def read_hybrid(c, args):
    """Which layers are linear attention."""
    n, every = args['n_layer'], c.get('full_attention_interval', 4)
    kinds = c.get('layer_types') or ['full_attention' if (i + 1) % every == 0 else 'linear_attention'
                                     for i in range(n)]
    args['mixer_pattern'] = ''.join('D' if kind == 'linear_attention' else 'A' for kind in kinds)
    if 'A' not in args['mixer_pattern']:
        for name in Attention.fields:
            args.pop(name, None)
    if 'D' not in args['mixer_pattern']:
        for name in LINEAR_FIELDS:  # theirs are written all the same
            args.pop(name, None)


def write_hybrid(config, c):
    layers = range(config.n_layer)
    c['layer_types'] = ['linear_attention' if is_linear(config, i) else 'full_attention' for i in layers]
    for name in LINEAR_FIELDS.values():
        if c[name] is None:  # without linear layers there is nothing to set
            del c[name]


def read_qwen3_next(c, args):
    read_shared_expert(c, args)
    read_hybrid(c, args)


def write_qwen3_next(config, c):
    write_shared_expert(config, c)
    write_hybrid(config, c)


def names_qwen3_next(config, layer):
    return LINEAR_NAMES if is_linear(config, layer) else {}


def names_qwen3_5(config, layer):
    projections = ' '.join(f'linear_attn.in_proj_{part}' for part in ('qkv', 'z', 'b', 'a'))
    return {**LINEAR_NAMES, 'attn.c_attn': projections} if is_linear(config, layer) else {}


def read_gemma2(c, args):
    args.update(embed_scale=args['n_embd'] ** 0.5, attn_scale=c['query_pre_attn_scalar'] ** -0.5,
                attn_softcap=c.get('attn_logit_softcapping', 50.0) or 0.0,
                logit_softcap=c.get('final_logit_softcapping', 30.0) or 0.0)


def write_gemma2(config, c):
    c.update(query_pre_attn_scalar=round(config.scale ** -2),
             sliding_window=config.window or config.block_size,
             attn_logit_softcapping=config.attn_softcap or None,
             final_logit_softcapping=config.logit_softcap or None)


def read_smollm3(c, args):
    every, n = c.get('no_rope_layer_interval', 4), args['n_layer']
    turns = c.get('no_rope_layers') or [int((i + 1) % every != 0) for i in range(n)]
    args['pos_pattern'] = ''.join('NP'[bool(turn)] for turn in turns)


def write_smollm3(config, c):
    c['no_rope_layers'] = [int(letter(config.pos_pattern, i) == 'P') for i in range(config.n_layer)]


def read_neox(c, args):
    args['norm_placement'] = 'parallel_2' if c.get('use_parallel_residual', True) else 'pre'


def write_neox(config, c):
    c['use_parallel_residual'] = config.norm_placement == 'parallel_2'


def read_minimind(c, args):
    """Of version 3 on, a Qwen3; before, with n_routed_experts in its config.json, a Llama."""
    args['qk_norm'] = 'n_routed_experts' not in c
    if not c.get('use_moe'):
        for name in QWEN_EXPERTS:  # theirs are written all the same
            args.pop(name, None)
    elif not args['qk_norm']:
        raise ValueError("minimind with use_moe=True and n_routed_experts is unsupported")


def write_gpt_oss(config, c):
    c['sliding_window'] = config.window or config.block_size


# the table

LLAMA = Family(
    arch='LlamaForCausalLM', layer='model.layers.N.',
    fields=dict(
        vocab_size='vocab_size', block_size='max_position_embeddings', n_layer='num_hidden_layers',
        n_head='num_attention_heads', n_kv_head='num_key_value_heads', n_embd='hidden_size',
        head_dim='head_dim', d_ff='intermediate_size', norm_eps='rms_norm_eps', mlp='hidden_act',
        qkv_bias='attention_bias', proj_bias='attention_bias', mlp_bias='mlp_bias',
        tie_word_embeddings='tie_word_embeddings'),
    ours=dict(qk_norm=False, tie_word_embeddings=False),
    names={
        'wte': 'model.embed_tokens', 'ln_f': 'model.norm', 'lm_head': 'lm_head',
        'ln_1': 'input_layernorm', 'ln_2': 'post_attention_layernorm',
        'attn.c_attn': 'self_attn.q_proj self_attn.k_proj self_attn.v_proj',
        'attn.q_norm': 'self_attn.q_norm', 'attn.k_norm': 'self_attn.k_norm',
        'attn.c_proj': 'self_attn.o_proj',
        'mlp.c_fc': 'mlp.gate_proj mlp.up_proj', 'mlp.c_proj': 'mlp.down_proj',
        'mlp.router': 'mlp.gate',
        'mlp.experts.c_fc': 'mlp.experts.E.gate_proj mlp.experts.E.up_proj',
        'mlp.experts.c_proj': 'mlp.experts.E.down_proj',
        'mlp.shared.c_fc': 'mlp.shared_experts.gate_proj mlp.shared_experts.up_proj',
        'mlp.shared.c_proj': 'mlp.shared_experts.down_proj'})
MISTRAL = like(LLAMA, arch='MistralForCausalLM', windows='S', one_window=True,
               fields=dict(qkv_bias=None, proj_bias=None, mlp_bias=None))
QWEN2 = like(MISTRAL, arch='Qwen2ForCausalLM', ours=dict(qkv_bias=True, proj_bias=False), one_window=False,
             windows_off=True, first_full=28)
QWEN3 = like(LLAMA, arch='Qwen3ForCausalLM', fields=dict(mlp_bias=None), ours=dict(qk_norm=True),
             windows='S', windows_off=True, first_full=28)
EXPERTS = dict(n_expert=('num_local_experts', 'num_experts', 'n_routed_experts'),
               n_expert_active=('num_experts_per_tok', 'experts_per_token'))
QWEN_EXPERTS = dict(
    n_expert=('num_experts', 'num_local_experts'), n_expert_active='num_experts_per_tok',
    d_expert='moe_intermediate_size', norm_topk_prob='norm_topk_prob')
QWEN3_MOE = like(
    QWEN3, arch='Qwen3MoeForCausalLM', one_window=True, first_full=None, ours=dict(norm_topk_prob=False),
    fields=QWEN_EXPERTS, known=('decoder_sparse_step', 'mlp_only_layers'),
    read=read_sparse_layers, write=write_sparse_layers)
SHARED_EXPERT = {
    'mlp.shared.c_fc': 'mlp.shared_expert.gate_proj mlp.shared_expert.up_proj',
    'mlp.shared.c_proj': 'mlp.shared_expert.down_proj', 'mlp.shared_gate': 'mlp.shared_expert_gate'}
LINEAR_FIELDS = dict(
    linear_n_key_head='linear_num_key_heads', linear_n_value_head='linear_num_value_heads',
    linear_key_head_dim='linear_key_head_dim', linear_value_head_dim='linear_value_head_dim',
    linear_conv_kernel_dim='linear_conv_kernel_dim')
LINEAR_NAMES = {
    'attn.c_attn': 'linear_attn.in_proj_qkvz linear_attn.in_proj_ba', 'attn.c_proj': 'linear_attn.out_proj',
    'attn.conv': 'linear_attn.conv1d.weight', 'attn.A_log': 'linear_attn.A_log',
    'attn.dt_bias': 'linear_attn.dt_bias', 'attn.o_norm': 'linear_attn.norm.weight'}
QWEN3_NEXT = like(
    QWEN3_MOE, arch='Qwen3NextForCausalLM', windows='', one_window=False, hybrid=True, fields=LINEAR_FIELDS,
    ours=dict(attn_gate=True, shared_gate=True, norm_topk_prob=True, partial_rotary_factor=0.25),
    theirs=dict(hidden_act='silu'),  # the convolution's activation as well
    known=('decoder_sparse_step', 'mlp_only_layers', 'shared_expert_intermediate_size',
           'full_attention_interval'),
    names=SHARED_EXPERT, names_at=names_qwen3_next, rows={'attn.c_attn': rows_qwen3_next},
    convolution=('attn.conv',), plus_one=('ln_1', 'ln_2', 'ln_f', 'attn.q_norm', 'attn.k_norm'),
    ignored=('mtp.*',), read=read_qwen3_next, write=write_qwen3_next)
QWEN3_5 = like(
    QWEN3_NEXT, arch='Qwen3_5ForCausalLM', ours=dict(shared_gate=None, norm_topk_prob=None),
    theirs=dict(attn_output_gate=True), known=('full_attention_interval', 'mlp_only_layers'),
    fields=dict(n_expert=None, n_expert_active=None, d_expert=None, norm_topk_prob=None),
    names_at=names_qwen3_5, rows={'attn.c_attn': rows_qwen3_5}, ignored=('mtp.*', 'model.visual.*'),
    read=read_hybrid, write=write_hybrid)
DEEPSEEK_V3 = like(
    LLAMA, arch='DeepseekV3ForCausalLM', ignored=('model.layers.N.*',),  # the extra prediction layer
    fields=dict(n_kv_head=None, head_dim=None, mlp_bias=None, n_shared_expert='n_shared_experts',
                n_expert=('n_routed_experts', 'num_local_experts'), n_expert_active='num_experts_per_tok',
                d_expert='moe_intermediate_size', n_dense_layer='first_k_dense_replace',
                **{name: name for name in (
                    'kv_lora_rank', 'q_lora_rank', 'qk_nope_head_dim', 'qk_rope_head_dim', 'v_head_dim',
                    'norm_topk_prob', 'routed_scaling_factor', 'n_group', 'topk_group')}),
    ours=dict(qk_norm=None, router='sigmoid', balance_bias=True),
    theirs=dict(moe_layer_freq=1, topk_method='noaux_tc', scoring_func='sigmoid', rope_interleave=True),
    known=('topk_method', 'num_nextn_predict_layers', 'seq_aux', 'ep_size', 'qk_head_dim'),
    names={'attn.c_attn': 'self_attn.q_a_proj self_attn.kv_a_proj_with_mqa',
           'attn.q_norm': 'self_attn.q_a_layernorm', 'attn.c_q': 'self_attn.q_b_proj',
           'attn.kv_norm': 'self_attn.kv_a_layernorm', 'attn.c_kv': 'self_attn.kv_b_proj',
           'mlp.expert_bias': 'mlp.gate.e_score_correction_bias'},
    names_at=names_deepseek, rows={'attn.c_attn': rows_latent_in, 'attn.c_q': rows_latent_query},
    read=read_deepseek, write=write_deepseek)
BLOOM = Family(
    arch='BloomForCausalLM', layer='transformer.h.N.',
    fields=dict(vocab_size='vocab_size', block_size='seq_length', n_layer=('n_layer', 'num_hidden_layers'),
                n_head=('n_head', 'num_attention_heads'), n_embd=('hidden_size', 'n_embed'),
                norm_eps='layer_norm_epsilon', tie_word_embeddings='tie_word_embeddings'),
    ours=dict(block_size=2048, norm='layernorm', norm_eps=1e-5, bias=True, qk_norm=False, pos='alibi',
              mlp='gelu_tanh', embed_norm=True),
    theirs=dict(apply_residual_connection_post_layernorm=False),
    names={'wte': 'transformer.word_embeddings', 'ln_embd': 'transformer.word_embeddings_layernorm',
           'ln_f': 'transformer.ln_f', 'lm_head': 'lm_head', 'ln_1': 'input_layernorm',
           'ln_2': 'post_attention_layernorm', 'attn.c_attn': 'self_attention.query_key_value',
           'attn.c_proj': 'self_attention.dense', 'mlp.c_fc': 'mlp.dense_h_to_4h',
           'mlp.c_proj': 'mlp.dense_4h_to_h'},
    rows={'attn.c_attn': rows_by_kv_head})
FALCON = like(
    BLOOM, arch='FalconForCausalLM', theirs=dict(ff_factor=4),
    fields=dict(block_size='max_position_embeddings', n_layer=('num_hidden_layers', 'n_layer'), bias='bias',
                n_head=('num_attention_heads', 'n_head'), n_embd='hidden_size', d_ff='ffn_hidden_size',
                mlp='activation'),
    ours=dict(bias=False, norm_bias=True, pos='rope', mlp='gelu', embed_norm=False),
    known=('alibi', 'multi_query', 'parallel_attn', 'new_decoder_architecture', 'num_ln_in_parallel_attn',
           'num_kv_heads', 'n_head_kv'),
    names_at=names_falcon, read=read_falcon, write=write_falcon)
NEOX = like(
    BLOOM, arch='GPTNeoXForCausalLM', layer='gpt_neox.layers.N.',
    theirs=dict(apply_residual_connection_post_layernorm=None),
    fields={**LLAMA.fields, 'n_kv_head': None, 'head_dim': None, 'mlp_bias': None,
            'norm_eps': 'layer_norm_eps'},
    ours=dict(pos='rope', mlp='gelu', embed_norm=False, tie_word_embeddings=False,
              partial_rotary_factor=0.25),
    known=('use_parallel_residual',),
    names={'wte': 'gpt_neox.embed_in', 'ln_f': 'gpt_neox.final_layer_norm', 'lm_head': 'embed_out',
           'attn.c_attn': 'attention.query_key_value', 'attn.c_proj': 'attention.dense'},
    read=read_neox, write=write_neox)
GPT2 = like(
    BLOOM, arch='GPT2LMHeadModel', rows={'attn.c_attn': None}, ours=dict(pos='learned', embed_norm=False),
    theirs=dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False),
    fields=dict(block_size=('n_positions', 'n_ctx'), n_embd='n_embd', d_ff='n_inner',
                mlp='activation_function'),
    names={'wte': 'transformer.wte', 'wpe': 'transformer.wpe', 'ln_1': 'ln_1', 'ln_2': 'ln_2',
           'attn.c_attn': 'attn.c_attn', 'attn.c_proj': 'attn.c_proj', 'mlp.c_fc': 'mlp.c_fc',
           'mlp.c_proj': 'mlp.c_proj'},
    transposed=('attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj'))
MPT = like(
    BLOOM, arch='MptForCausalLM', layer='transformer.blocks.N.', rows={'attn.c_attn': None},
    fields=dict(block_size='max_seq_len', n_layer='n_layers', n_head='n_heads', n_embd='d_model'),
    ours=dict(bias=False, mlp='gelu', embed_norm=False),
    theirs=dict(no_bias=True, embedding_fraction=1.0, expansion_ratio=4,
                norm_type='low_precision_layernorm'),
    known=('attn_config', 'init_config', 'init_device', 'name', 'verbose', 'learned_pos_emb',
           'tokenizer_name'),
    names={'wte': 'transformer.wte', 'ln_f': 'transformer.norm_f', 'ln_1': 'norm_1', 'ln_2': 'norm_2',
           'attn.c_attn': 'attn.Wqkv', 'attn.c_proj': 'attn.out_proj', 'mlp.c_fc': 'ffn.up_proj',
           'mlp.c_proj': 'ffn.down_proj'},
    read=read_mpt, write=write_mpt)
FAMILIES = {  # model_type: what is tried in this order when ours is written
    'qwen3': QWEN3,
    'llama': LLAMA,
    'mistral': MISTRAL,
    'qwen2': QWEN2,
    'mixtral': like(
        MISTRAL, arch='MixtralForCausalLM', fields=dict(EXPERTS, d_expert='intermediate_size'),
        ours=dict(rope_base=1e6),
        names={'mlp.router': 'block_sparse_moe.gate', 'mlp.experts.c_proj': 'block_sparse_moe.experts.E.w2',
               'mlp.experts.c_fc': 'block_sparse_moe.experts.E.w1 block_sparse_moe.experts.E.w3'}),
    'qwen3_moe': QWEN3_MOE,
    'deepseek_v3': DEEPSEEK_V3,
    'deepseek_v2': like(
        DEEPSEEK_V3, arch='DeepseekV2ForCausalLM', ignored=(), fields=dict(norm_topk_prob=None),
        ours=dict(router='softmax', balance_bias=None, norm_topk_prob=False),
        theirs=dict(topk_method=None, scoring_func='softmax', norm_topk_prob=False),
        write=write_deepseek_v2),
    'bloom': BLOOM,
    'falcon': FALCON,
    'gpt_neox': NEOX,
    'gpt2': GPT2,
    'mpt': MPT,
    'olmo2': like(
        LLAMA, arch='Olmo2ForCausalLM', fields=dict(mlp_bias=None, head_dim=None),
        ours=dict(qk_norm='whole', norm_placement='output'),
        names={'ln_1': 'post_attention_layernorm', 'ln_2': 'post_feedforward_layernorm'}),
    'gemma2': like(
        LLAMA, arch='Gemma2ForCausalLM', windows='SL', known=('query_pre_attn_scalar',),
        plus_one=('ln_1', 'ln_2', 'ln_3', 'ln_4', 'ln_f'),
        fields=dict(mlp=('hidden_activation', 'hidden_act'), mlp_bias=None,
                    attn_softcap='attn_logit_softcapping', logit_softcap='final_logit_softcapping'),
        ours=dict(norm_placement='sandwich', tie_word_embeddings=True),
        names={'ln_2': 'post_attention_layernorm', 'ln_3': 'pre_feedforward_layernorm',
               'ln_4': 'post_feedforward_layernorm'},
        read=read_gemma2, write=write_gemma2),
    'phi': like(
        LLAMA, arch='PhiForCausalLM', theirs=dict(qk_layernorm=False),
        fields=dict(norm_eps='layer_norm_eps', qkv_bias=None, proj_bias=None, mlp_bias=None, head_dim=None),
        ours=dict(norm='layernorm', bias=True, head_bias=True, norm_placement='parallel',
                  partial_rotary_factor=0.5),
        names={'ln_f': 'model.final_layernorm', 'attn.c_proj': 'self_attn.dense', 'mlp.c_fc': 'mlp.fc1',
               'mlp.c_proj': 'mlp.fc2'}),
    'smollm3': like(
        LLAMA, arch='SmolLM3ForCausalLM', windows='S', windows_off=True,
        ours=dict(tie_word_embeddings=True, rope_base=2e6),
        known=('no_rope_layers', 'no_rope_layer_interval'), read=read_smollm3, write=write_smollm3),
    'gpt_oss': like(
        LLAMA, arch='GptOssForCausalLM', windows='SL',
        theirs=dict(swiglu_limit=7.0, swiglu_alpha=1.702, hidden_act='silu'),
        fields=dict(EXPERTS, mlp=None, mlp_bias=None, d_expert='intermediate_size'),
        ours=dict(mlp='swiglu_oai', attn_sink=True, mlp_bias=True, rope_base=150000.0),
        names={'mlp.router': 'mlp.router', 'attn.sink': 'self_attn.sinks',
               'mlp.experts.c_fc.weight': 'mlp.experts.gate_up_proj',
               'mlp.experts.c_fc.bias': 'mlp.experts.gate_up_proj_bias',
               'mlp.experts.c_proj.weight': 'mlp.experts.down_proj',
               'mlp.experts.c_proj.bias': 'mlp.experts.down_proj_bias'},
        rows={'mlp.experts.c_fc': rows_gate_up}, transposed=('mlp.experts.c_fc', 'mlp.experts.c_proj'),
        write=write_gpt_oss),
    'minimind': like(
        LLAMA, arch='MiniMindForCausalLM', fields=QWEN_EXPERTS, read=read_minimind,
        ours=dict(tie_word_embeddings=True),
        known=('use_moe', 'n_routed_experts', 'n_shared_experts', 'scoring_func', 'seq_aux')),
    'qwen2_moe': like(
        QWEN2, arch='Qwen2MoeForCausalLM', windows='', first_full=None,
        fields=dict(QWEN_EXPERTS, qkv_bias='qkv_bias'),
        ours=dict(norm_topk_prob=False, shared_gate=True), names=SHARED_EXPERT,
        known=('decoder_sparse_step', 'mlp_only_layers', 'shared_expert_intermediate_size'),
        read=read_shared_expert, write=write_shared_expert),
    'qwen3_next': QWEN3_NEXT,
    'qwen3_5_text': QWEN3_5,
}
NESTED = ('qwen3_5',)  # model_types whose text_config is a family of this name with _text: vision is left out
GATED_ACTIVATIONS = {  # theirs: ours
    'silu': 'swiglu', 'gelu_pytorch_tanh': 'geglu_tanh', 'gelu': 'geglu', 'relu': 'reglu', 'sigmoid': 'glu'}
PLAIN_ACTIVATIONS = {
    'gelu_new': 'gelu_tanh', 'gelu': 'gelu', 'relu': 'relu', 'relu2': 'relu2', 'silu': 'silu',
    'gelu_pytorch_tanh': 'gelu_tanh', 'gelu_fast': 'gelu_tanh'}
HARMLESS = {  # fields of any config.json that change nothing that is computed here, or that are read below
    'architectures', 'attention_softmax_in_fp32', 'attn_implementation', 'auto_map', 'bias_dropout_fusion',
    'dtype', 'flash_attn', 'head_dim', 'hidden_act', 'hidden_size', 'id2label', 'init_std',
    'initial_context_length', 'initializer_range', 'intermediate_size', 'is_decoder', 'is_llama_config',
    'label2id', 'language', 'layer_types', 'mamba_ssm_dtype', 'masked_softmax_fusion', 'max_sequence_length',
    'max_window_layers', 'model_type', 'n_ctx', 'num_key_value_heads', 'num_local_experts', 'offset_alibi',
    'output_attentions', 'output_hidden_states', 'output_router_logits', 'partial_rotary_factor',
    'pretraining_tp', 'rope_interleave', 'rope_parameters', 'rope_scaling', 'rope_theta', 'rotary_emb_base',
    'rotary_pct', 'router_jitter_noise', 'slow_but_exact', 'tokenizer_name', 'torch_dtype',
    'transformers.js_config', 'transformers_version'}
HARMLESS_PATTERNS = (
    '_*', '*_pdrop', '*_token', '*_token_id', '*aux_loss*', '*cache*', '*checkpointing', '*dropout*',
    '*loss_alpha', '*original_max_position_embeddings', '*sliding_window', 'classifier_*', 'inference_rope_*',
    'mtp_*', 'reorder_and_*', 'skip_bias_add*', 'summary_*', 'task_*')


# config.json ------------------------------------------------------------------------------------------------

def config_from_hf(c):
    """config.json, as a dict, in transformers' old form or its new -> GPTConfig. Raises ValueError that names
    what is unsupported, missing or malformed."""
    kind = c.get('model_type')
    if kind in NESTED:
        if not isinstance(c.get('text_config'), dict):
            raise ValueError(f"{kind} has no text_config")
        outer = {name: c[name] for name in ('tie_word_embeddings', 'quantization_config') if name in c}
        c = {**outer, **c['text_config'], 'model_type': f'{kind}_text'}
    try:
        return read_config(c)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError, IndexError, OverflowError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{kind} with a missing or malformed field ({what})") from None


def read_config(c):
    kind = c.get('model_type')
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"model_type={kind!r} is unsupported; these are supported: "
                         f"{', '.join(sorted([*FAMILIES, *NESTED]))}")
    if c.get('quantization_config'):
        raise ValueError(f"the weights are quantized ({c['quantization_config'].get('quant_method')}): use a "
                         "checkpoint in bfloat16 or float32")
    family = FAMILIES[kind]
    args = dict(family.ours)
    for ours, theirs in family.fields.items():
        given = [c[name] for name in their_fields(theirs) if c.get(name) is not None]
        if given:
            args[ours] = activations_of(family).get(given[0]) if ours == 'mlp' else given[0]
    missing = [' or '.join(their_fields(family.fields[ours]))
               for ours in ('vocab_size', 'n_layer', 'n_head', 'n_embd') if ours not in args]
    if missing:
        raise ValueError(f"{kind} without {', '.join(missing)}")
    GPTConfig(n_layer=args['n_layer'])  # refuses an absurd count before lists of that length are made
    unsupported = [f"{name}={value!r}" for name, value in c.items() if not is_supported(name, value, family)]
    for name in their_fields(family.fields.get('mlp', ())):
        if c.get(name) is not None and c[name] not in activations_of(family):
            unsupported.append(f"{name}={c[name]!r}")
    if unsupported:
        raise ValueError(f"{kind} with {', '.join(unsupported)} is unsupported")
    if args.get('pos', 'rope') == 'rope':
        read_rope(c, args)
    read_windows(c, args, family)
    family.read(c, args)
    return GPTConfig(**args)


def their_fields(theirs):
    return theirs if isinstance(theirs, tuple) else (theirs,)


def is_supported(name, value, family):
    """Whether a field of config.json has a meaning here, or none that could matter."""
    if name in family.theirs:
        return value is None or value == family.theirs[name]
    if not value or name in HARMLESS or name in family.known:
        return True
    if any(name in their_fields(theirs) for theirs in family.fields.values()):
        return True
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in HARMLESS_PATTERNS)


def activations_of(family):
    return GATED_ACTIVATIONS if 'gate' in family.names['mlp.c_fc'] else PLAIN_ACTIVATIONS


def read_rope(c, args):
    """rope_parameters, or as once published rope_scaling, rope_theta and others -> our fields. If both are
    there, transformers takes rope_scaling alone (modeling_rope_utils, 5.23), and so do we."""
    rope = dict(c.get('rope_scaling') or c.get('rope_parameters') or {})
    for name in ('mrope_section', 'mrope_interleaved'):  # of images: for text all their positions are equal
        rope.pop(name, None)
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"{c['model_type']} with rope_parameters for each type of layer is unsupported")
    old_type = rope.pop('type', None)
    kind = rope.pop('rope_type', None) or old_type or 'default'
    base = rope.pop('rope_theta', None) or c.get('rope_theta') or c.get('rotary_emb_base')
    args['rope_base'] = float(base or args.get('rope_base', 10000.0))
    share = rope.pop('partial_rotary_factor', None) or c.get('partial_rotary_factor') or c.get('rotary_pct')
    if 'partial_rotary_factor' in args:
        args['partial_rotary_factor'] = share or args['partial_rotary_factor']
    elif share and share != 1:
        raise ValueError(f"{c['model_type']} with partial_rotary_factor={share} is unsupported")
    if kind == 'default':
        return
    scaling = {'rope_type': kind, **{name: value for name, value in rope.items() if value is not None}}
    length = c['max_position_embeddings']
    if kind not in ('linear', 'ntk'):
        scaling.setdefault('original_max_position_embeddings',
                           c.get('original_max_position_embeddings') or length)
    if kind == 'longrope':
        scaling.setdefault('factor', length / scaling['original_max_position_embeddings'])
    args['rope_scaling'] = scaling


THEIR_SCALINGS = ('default', 'linear', 'dynamic', 'yarn', 'llama3', 'longrope')  # transformers' rope_types


def write_rope(config, c):
    scaling = config.rope_scaling or {'rope_type': 'default'}
    kind, length = scaling['rope_type'], scaling.get('original_max_position_embeddings')
    if kind not in THEIR_SCALINGS or kind == 'dynamic' and length != config.block_size:
        raise ValueError('transformers has no such scaling')
    c['rope_parameters'] = {'rope_theta': config.rope_base, **scaling}
    if 'partial_rotary_factor' in FAMILIES[c['model_type']].ours:
        c['rope_parameters']['partial_rotary_factor'] = config.partial_rotary_factor


def read_windows(c, args, family):
    """sliding_window, layer_types, max_window_layers -> window and window_pattern."""
    size, n = c.get('sliding_window'), args['n_layer']
    used = bool(size) and c.get('use_sliding_window', not family.windows_off)
    if used and not family.windows:
        raise ValueError(f"{c['model_type']} with sliding_window={size} is unsupported")
    letters = {'sliding_attention': 'S', 'full_attention': 'L'}
    if family.hybrid:
        letters['linear_attention'] = 'L'
    kinds = c.get('layer_types') or ()
    unknown = sorted({kind for kind in kinds if kind not in letters}, key=str)
    if unknown:
        raise ValueError(f"layer_types with {', '.join(map(repr, unknown))} is unsupported")
    pattern = family.windows
    if kinds and not family.one_window:
        pattern = ''.join(letters[kind] for kind in kinds)
    elif family.first_full is not None:
        full = c.get('max_window_layers')
        full = min(n, family.first_full if full is None else full)
        pattern = 'L' * full + 'S' * (n - full)
    if used and 'S' in pattern:
        args.update(window=size, window_pattern=pattern)


def write_windows(config, c, family):
    if not family.windows:
        return
    c.update(sliding_window=config.window, use_sliding_window=config.window is not None, max_window_layers=0)
    if not family.one_window:
        c['layer_types'] = ['full_attention' if config.window_of(i) is None else 'sliding_attention'
                            for i in range(config.n_layer)]


def canonical(config):
    """What a config computes, apart from how it is written."""
    layers = range(config.n_layer)
    sparse = [config.has_experts(i) for i in layers]
    return {**vars(config), 'dropout': 0, 'bias': None, 'balance_per_sequence': None, 'n_dense_layer': sparse,
            'window_pattern': [config.window_of(i) for i in layers], 'expert_pattern': None, 'window': None,
            'pos_pattern': [letter(config.pos_pattern, i) for i in layers],
            'mixer_pattern': [config.mixer_of(i) for i in layers],
            'attn_scale': round(config.scale, 9), 'd_ff': None if all(sparse) else config.d_ff}


def write_config(config, kind):
    """config.json of a family as near as its fields allow. Raises ValueError and others if they do not."""
    family = FAMILIES[kind]
    c = {'model_type': kind, 'architectures': [family.arch], 'pad_token_id': None, 'bos_token_id': None,
         'eos_token_id': None, **family.theirs}
    for ours, theirs in family.fields.items():
        c[their_fields(theirs)[0]] = getattr(config, ours)
    if 'mlp' in family.fields:
        written = {ours: theirs for theirs, ours in reversed(activations_of(family).items())}
        c[their_fields(family.fields['mlp'])[0]] = written.get(config.mlp)
    write_windows(config, c, family)
    if config.pos == 'rope' and family.ours.get('pos', 'rope') == 'rope':
        write_rope(config, c)
    family.write(config, c)
    return c


def config_to_hf(config):
    """GPTConfig -> config.json of a family that computes the same, as a dict: the family whose reading of
    what is written gives the same model back. Raises ValueError that names what the nearest family lacks."""
    ours, nearest = canonical(config), None
    for kind in FAMILIES:
        try:
            c = write_config(config, kind)
            read = canonical(config_from_hf(c))
        except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
            continue  # this family cannot even write it down
        lacks = [name for name in ours if ours[name] != read[name]]
        if not lacks:
            return c
        if nearest is None or len(lacks) < len(nearest[1]):
            nearest = kind, lacks
    if nearest is None:
        raise ValueError("no published family computes this model, nor anything near it; "
                         f"rope_scaling={config.rope_scaling}")
    differs = ', '.join(f"{name} (here {getattr(config, name)!r})" for name in nearest[1])
    raise ValueError(f"no published family computes this model; the nearest, {nearest[0]}, differs in "
                     f"{differs}")


# tensors ----------------------------------------------------------------------------------------------------

class Stored(typing.NamedTuple):
    """A tensor in a file."""
    path: str
    name: str
    shape: tuple
    dtype: torch.dtype

    @property
    def nbytes(self):
        return math.prod(self.shape) * self.dtype.itemsize


class Part(typing.NamedTuple):
    """A tensor of theirs and where it stands in ours."""
    theirs: str
    ours: str          # our tensor, as state_dict() names it
    index: tuple       # ours[index] are the elements of theirs
    transposed: bool   # as matrices
    plus_one: bool     # ours is 1 more
    shape: tuple       # of theirs


def weight_files(folder):
    """The paths of a folder's safetensors. Raises FileNotFoundError, or ValueError for an invalid
    index."""
    index = os.path.join(folder, 'model.safetensors.index.json')
    files = {'model.safetensors'}
    if os.path.exists(index) and not os.path.exists(os.path.join(folder, 'model.safetensors')):
        weight_map = read_json(index).get('weight_map')
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map of tensor names and files: download it again")
        for file in weight_map.values():
            if not isinstance(file, str) or os.path.basename(file) != file \
                    or not file.endswith('.safetensors'):
                raise ValueError(f"{index} names {file!r}, which is no safetensors file of its own folder")
        files = set(weight_map.values())
    missing = sorted(file for file in files if not os.path.exists(os.path.join(folder, file)))
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: download it again (other formats of "
                                "weights are not read)")
    return [os.path.join(folder, file) for file in sorted(files)]


def open_safetensors(path):
    """A memory map of a safetensors file. Raises ImportError, or ValueError for a damaged file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError(f"published models need safetensors: {INSTALL}") from None
    try:
        return safe_open(path, 'pt')
    except (SafetensorError, ValueError, OSError) as error:
        raise ValueError(f"{path} is damaged or truncated ({error}): download it again") from None


def read_headers(folder):
    """name -> Stored, of all tensors in a folder's safetensors."""
    found = {}
    for path in weight_files(folder):
        with open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                header = file.get_slice(name)
                kind = header.get_dtype()
                if kind not in DTYPES:
                    raise ValueError(f"{path}: {name} has dtype {kind}; {', '.join(DTYPES)} are supported")
                found[name] = Stored(path, name, tuple(header.get_shape()), DTYPES[kind])
    if not found:
        raise ValueError(f"{folder} holds no tensors: download it again")
    return found


def largest(stored):
    return max(stored.values(), key=lambda one: one.nbytes)


def by_family_names(stored, family):
    """The same with the family's names: some files lack what all names begin with ('transformer.', GPT-2 and
    BLOOM as first published), others nest the text model in a larger one."""
    first, head = f"{family.names['wte']}.weight", family.names['lm_head']
    prefix = first.partition('.')[0] + '.'
    if first in stored:
        return stored
    if first.removeprefix(prefix) in stored:
        return {name if name.startswith(head) else prefix + name: one for name, one in stored.items()}
    nested = prefix + 'language_model.'
    return {prefix + name.removeprefix(nested) if name.startswith(nested) else name: one
            for name, one in stored.items()}


def names_of(ours, family, config):
    """Our tensor's name -> (module, layer, the names of theirs that are its rows, in order)."""
    layer, name = re.fullmatch(r'(?:h\.(\d+)\.)?(.*)', ours).groups()
    module, _, kind = name.rpartition('.')
    prefix, names = '', family.names
    if layer is not None:
        prefix = family.layer.replace('N', layer)
        names = {**names, **family.names_at(config, int(layer))}
    if name in names:
        theirs, ending = names[name], ''
    elif module in names:
        theirs, ending = names[module], '.' + kind
    else:
        raise ValueError(f"{family.arch} has no name for {ours}: add it to its names in hub.py")
    module = re.sub(r'\.(weight|bias)$', '', name)
    return module, int(layer or 0), [prefix + one + ending for one in theirs.split()]


def plan(model, family):
    """Which of their tensors are which elements of ours: a list of Part, one for each of theirs."""
    config, parts = model.config, []
    for ours, w in model.state_dict().items():
        module, layer, theirs = names_of(ours, family, config)
        if module in family.rows:
            rows = family.rows[module](config, layer)
        elif len(theirs) == 1:
            rows = [slice(None)]
        else:
            rows = consecutive(model.get_submodule(ours.rpartition('.')[0]).widths, len(theirs))
        transposed = module in family.transposed and not ours.endswith('bias')
        experts = range(config.n_expert) if '.E.' in theirs[0] else [None]
        for expert in experts:
            for name, one in zip(theirs, rows, strict=True):
                index = (one,)
                if expert is not None:
                    name, index = name.replace('.E.', f'.{expert}.'), (expert, one)
                elif module.startswith('mlp.experts'):  # all experts in one tensor
                    index = (slice(None), one)
                shape = w.to('meta')[index].shape
                if transposed:
                    shape = (*shape[:-2], shape[-1], shape[-2])
                elif module in family.convolution:
                    shape = (shape[0], 1, shape[1])
                parts.append(Part(name, ours, index, transposed, module in family.plus_one, tuple(shape)))
    return parts


def consecutive(widths, count):
    """Row counts of the projections fused in one of ours -> rows of `count` of theirs: the last takes the
    rest."""
    ends = [sum(widths[:i]) for i in range(count)] + [sum(widths)]
    return [slice(begin, end) for begin, end in zip(ends, ends[1:])]


def check(parts, stored, model, family, folder):
    """Raises ValueError that names all tensors that are missing, unexpected or of another shape."""
    used = {part.theirs for part in parts}
    ignored = ['*.attn.bias', '*.attn.masked_bias', '*.attention.bias', '*.attention.masked_bias',
               '*inv_freq', *(one.replace('N', str(model.config.n_layer)) for one in family.ignored)]
    if model.lm_head is None:
        ignored.append(f"{family.names['lm_head']}.*")
    wrong = [f"{name} is missing" for name in sorted(used - stored.keys())]
    wrong += [f"{name} is unexpected" for name in sorted(stored.keys() - used)
              if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)]
    for part in parts:
        if part.theirs in stored:
            shape = stored[part.theirs].shape
            if part.ours == 'wpe.weight' and len(shape) == 2 and shape[0] > part.shape[0]:
                shape = (part.shape[0], shape[1])  # a smaller context crops learned positions
            if shape != part.shape:
                wrong.append(f"{part.theirs} {shape} instead of {part.shape}")
    if wrong:
        raise ValueError(f"{folder} does not fit its config.json: " + '; '.join(wrong[:60])
                         + (f" and {len(wrong) - 60} more" if len(wrong) > 60 else ''))


@torch.no_grad()
def copy(parts, stored, model):
    """Fills the model from the files, one tensor at a time: a file is opened anew before it has brought more
    bytes into memory than its largest tensor."""
    state, limit = model.state_dict(), max(stored[part.theirs].nbytes for part in parts)
    file, path, read = None, None, 0
    for part in sorted(parts, key=lambda part: stored[part.theirs][:2]):  # file after file
        one, w = stored[part.theirs], state[part.ours]
        if path != one.path or read + one.nbytes > limit:
            source = file = None  # unmaps the old one
            file, path, read = open_safetensors(one.path), one.path, 0
        read += one.nbytes
        source = file.get_tensor(one.name)
        if part.ours == 'wpe.weight':
            source = source[:len(w)]
        if part.transposed:
            source = source.mT
        if part.plus_one:
            source = source.float() + 1
        if source.ndim > w.ndim:
            source = source.flatten(1)  # a convolution's
        fill_rows(model, part.ours, w, part.index, source)


def from_pretrained(folder_or_id, dtype=None, device='cpu', int8=False, **changes):
    """A folder with config.json and safetensors, as transformers writes them, or an id on the hub -> the
    model, in eval mode. dtype: of the weights; None: as they are stored. int8: the large ones are quantized
    as they are read, so that they are never there as a whole. changes: config fields to set otherwise. Raises
    OSError if something cannot be fetched or is missing, or ValueError that names what is unsupported or does
    not fit."""
    folder = fetch(folder_or_id)
    c = read_json(os.path.join(folder, 'config.json'))
    config = checked_config(c, folder)
    if config.rope_scaling and config.rope_scaling['rope_type'] == 'longrope':
        # the list for short texts, by which transformers reads them; a larger block_size takes the other
        changes = {'block_size': config.rope_scaling['original_max_position_embeddings'], **changes}
    config = changed_config(config, changes)
    family = FAMILIES[c['model_type'] + '_text' * (c['model_type'] in NESTED)]
    stored = read_headers(folder)
    dtype = dtype or largest(stored).dtype
    stored = by_family_names(stored, family)
    with torch.device('meta'):
        model = GPT(config)
    parts = plan(model, family)
    check(parts, stored, model, family, folder)
    exact = {part.ours for part in parts if part.plus_one}  # 1 + w is exact in float32 only
    for name, w in model.named_parameters():
        w.data = w.data.to(torch.float32 if name in exact else dtype)
    if int8:
        quantize_weights(model, dtype)
    model = model.to_empty(device=device)
    copy(parts, stored, model)
    return model.eval()


def checked_config(c, folder):
    try:
        return config_from_hf(c)
    except ValueError as error:
        raise ValueError(f"{os.path.join(folder, 'config.json')}: {error}") from None


def read_json(path):
    try:
        with open(path, encoding='utf-8') as f:
            found = json.load(f)
    except FileNotFoundError:
        raise FileNotFoundError(f"no {os.path.basename(path)} in {os.path.dirname(path)}: it holds no "
                                "checkpoint of transformers") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object")
    return found


# export -----------------------------------------------------------------------------------------------------

@torch.no_grad()
def their_tensors(model, family, dtype):
    """name -> tensor, in the family's layout: views of ours where layout and dtype agree. Buffers (the biases
    of experts) keep their own dtype, as in the model."""
    state, tensors, buffers = model.state_dict(), {}, dict(model.named_buffers())
    if torch.int8 in {w.dtype for w in state.values()}:
        raise ValueError("the model's weights are in 8 bits: export the one that it was made from")
    for part in plan(model, family):
        w = state[part.ours][part.index]
        if part.plus_one:
            w = w.float() - 1
        if part.ours not in buffers:
            w = w.to(dtype)
        if part.transposed:
            w = w.mT
        tensors[part.theirs] = w.reshape(part.shape).contiguous()
    return tensors


def tokenizer_files(tokenizer, model):
    """File name -> text, of what AutoTokenizer reads."""
    eot = None if tokenizer.eot is None else tokenizer.decode([tokenizer.eot])
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': eot,
              'clean_up_tokenization_spaces': False, 'model_max_length': model.config.block_size,
              **getattr(tokenizer, 'config', {})}  # what came with it: its own end of text, its chat template
    if tokenizer.chat_template:
        config['chat_template'] = tokenizer.chat_template
    return {'tokenizer.json': tokenizer.to_json(), 'tokenizer_config.json': json.dumps(config, indent=2)}


EXPORTED = ('model.safetensors', 'tokenizer.json', 'tokenizer_config.json', 'config.json')
EXPORTED_BY = {'exported_by': 'flatgpt'}  # in the header of the weights


def not_exported(folder):
    """The names in a folder that no earlier export has left there."""
    there, ours = os.listdir(folder) if os.path.isdir(folder) else [], False
    if EXPORTED[0] in there:
        with contextlib.suppress(ValueError), open_safetensors(os.path.join(folder, EXPORTED[0])) as file:
            ours = EXPORTED_BY.items() <= (file.metadata() or {}).items()
    return sorted(name for name in there if not (ours and name in EXPORTED))


def save_pretrained(model, tokenizer, folder, dtype=None):
    """Writes what AutoModelForCausalLM and AutoTokenizer open: config.json, model.safetensors, and with a
    tokenizer (None: without) tokenizer.json and tokenizer_config.json. dtype: of the weights; None: the
    model's. Files are renamed when all are complete, config.json last. Raises ValueError if no family
    computes what this model does or the folder holds something that was not written here, and OSError,
    leaving nothing behind, if they cannot be written."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        raise ImportError(f"published models need safetensors: {INSTALL}") from None
    dtype = dtype or model.wte.weight.dtype
    if dtype not in DTYPES.values():
        raise ValueError(f"weights in {plain(dtype)} cannot be written: use float32, bfloat16 or float16")
    c = {**config_to_hf(model.config), 'dtype': plain(dtype)}
    if other := not_exported(folder):
        raise ValueError(f"{folder} holds {', '.join(other):.60}, of no earlier export: give an empty folder")
    texts = {}
    if tokenizer is not None:
        stops = list(tokenizer.stop_tokens)  # of a chat, the end of an answer too
        c['eos_token_id'] = stops if len(stops) > 1 else tokenizer.eot
        texts.update(tokenizer_files(tokenizer, model))
    texts['config.json'] = json.dumps(c, indent=2)
    names = ['model.safetensors', *texts]
    temporary = {name: os.path.join(folder, name + '.tmp') for name in names}
    made = not os.path.isdir(folder)
    try:
        os.makedirs(folder, exist_ok=True)
        for name, text in texts.items():
            with open(temporary[name], 'w', encoding='utf-8', newline='') as f:
                f.write(text)
        tensors = their_tensors(model, FAMILIES[c['model_type']], dtype)
        save_file(tensors, temporary['model.safetensors'], metadata={'format': 'pt', **EXPORTED_BY})
        shutil.copymode(temporary['config.json'], temporary['model.safetensors'])  # else its owner's alone
        for name in names:
            os.replace(temporary[name], os.path.join(folder, name))
        for name in set(EXPORTED) - set(names):  # the tokenizer of an earlier export
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(folder, name))
        made = False
    except (SafetensorError, OSError) as error:
        raise OSError(f"{folder} cannot be written: {error}") from None
    finally:
        for path in temporary.values():
            with contextlib.suppress(OSError):  # there is none, or it has been renamed
                os.remove(path)
        if made:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


# the hub ----------------------------------------------------------------------------------------------------

GPT2_IDS = {name: f'openai-community/{name}' for name in ('gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl')}
SMALL_FILES = ['config.json', 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja',
               'model.safetensors.index.json']


def fetch(name, weights=True):
    """A folder, or an id on the hub -> the folder that holds it. What the cache of huggingface_hub lacks is
    downloaded: config.json and the tokenizer; then, if the config is supported here, the safetensors.
    Raises ImportError, ValueError, or OSError that says what to do."""
    if os.path.isfile(name):
        command = shlex.join(['python', 'hub.py', 'export', os.fspath(name), 'FOLDER'])
        raise ValueError(f"{name} is a file: name a folder with a config.json; a checkpoint of train.py "
                         f"becomes one by `{command}`")
    if os.path.exists(name):
        return os.fspath(name)
    repo = GPT2_IDS.get(name, name)
    folder = download(repo, SMALL_FILES)
    if not weights:
        return folder
    checked_config(read_json(os.path.join(folder, 'config.json')), repo)
    index = os.path.join(folder, 'model.safetensors.index.json')
    files = ['model.safetensors']
    if os.path.exists(index):
        weight_map = read_json(index).get('weight_map')
        files += list(weight_map.values()) if isinstance(weight_map, dict) else []
    files = sorted({file for file in files if isinstance(file, str) and file.endswith('.safetensors')})
    folder = download(repo, files, revision=os.path.basename(folder))  # of the same commit
    try:
        weight_files(folder)
    except FileNotFoundError:
        raise FileNotFoundError(f"{repo} has no safetensors, and other formats of weights are not read: "
                                "use another checkpoint") from None
    return folder


def download(repo, patterns, revision=None):
    """huggingface_hub's snapshot_download, its errors as one line."""
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError:
        raise ImportError(f"{repo} is not a folder; fetching it needs huggingface_hub: {INSTALL}") from None
    instead = f"name a folder with the config.json, tokenizer.json and safetensors of {repo}"
    try:
        return snapshot_download(repo, revision=revision, allow_patterns=patterns)
    except errors.HFValidationError:
        raise ValueError(f"{repo} is not a folder, checkpoint or id on the hub (owner/name)") from None
    except errors.GatedRepoError:
        raise OSError(f"{repo} is gated: accept its terms at {constants.ENDPOINT}/{repo}, then set HF_TOKEN, "
                      f"or {instead}") from None
    except errors.RepositoryNotFoundError:
        raise OSError(f"{repo} is not a folder; {constants.ENDPOINT} has no such model, or it is private: "
                      f"check the id, set HF_TOKEN, or {instead}") from None
    except errors.LocalEntryNotFoundError as error:
        reason = f"{constants.ENDPOINT} cannot be reached ({type(error.__cause__ or error).__name__})"
        if constants.HF_HUB_OFFLINE:
            reason = 'HF_HUB_OFFLINE is set'
        raise OSError(f"{repo} is not a folder and not in the cache, and {reason}: go online, or "
                      f"{instead}") from None
    except Exception as error:  # its HTTP library differs between versions, and so do the errors
        reason = ' '.join(str(error).split())[:200]
        raise OSError(f"{repo} cannot be fetched from {constants.ENDPOINT} "
                      f"({type(error).__name__}: {reason}): try again, or {instead}") from error


def describe(name, folder):
    """Prints what a published model is, and what can be done with it."""
    c = read_json(os.path.join(folder, 'config.json'))
    config = checked_config(c, folder)
    with torch.device('meta'):
        model = GPT(config)
    size = f"{model.num_params():,} parameters"
    if config.n_expert:
        size += f", {model.num_params(active=True):,} active"
    stored = largest(read_headers(folder)).dtype
    kind = c['model_type'] + ' (its text model)' * (c['model_type'] in NESTED)
    print(f"{name}: {kind}, {size}, stored in {plain(stored)}")
    print(f"context {config.block_size:,} tokens, vocabulary {config.vocab_size:,}")
    commands = []
    try:
        tokenizer = json_tokenizer(folder)
        commands += [f"sample.py --init_from={shlex.quote(name)} --start='Once upon a time'",
                     f"prepare.py my.txt --tokenizer={shlex.quote(folder)} --out=mine"]
        chat = 'with a chat template' if tokenizer.chat_template else 'no chat template'
        eot = 'no end-of-text token'
        if tokenizer.eot is not None:
            eot = f"end of text {tokenizer.decode([tokenizer.eot])!r}"
        print(f"tokenizer: {tokenizer.n_vocab:,} tokens, {eot}, {chat}")
    except (OSError, ImportError, ValueError) as error:  # the model can be used without
        print(f"tokenizer: none ({error})")
    print(f"folder: {folder}")
    shorter = ' --block_size=1024' if config.block_size > 1024 else ''
    commands.append(f"train.py --init_from={shlex.quote(name)} --dataset=mine{shorter}")
    print('next:', *[f"    python {command}" for command in commands], sep='\n')


# loading ----------------------------------------------------------------------------------------------------

CHECKPOINT = {  # what is read of a checkpoint besides the model; any of it may be missing
    'iter_num': int, 'best_val_loss': (int, float, torch.Tensor), 'optimizer': (list, dict), 'scaler': dict,
    'skipped': int, 'wall_s': (int, float), 'config': dict, 'tokenizer': (dict, type(None)), 'runtime': dict,
    'lora': (dict, type(None)), 'masked': bool, 'wandb_id': (str, type(None)),
}
RUNTIME = {'device_type': str, 'ranks': int, 'threads': int, 'dtype': str, 'compile': bool}
LOWEST = {'iter_num': 0, 'skipped': 0, "runtime's ranks": 1, "runtime's threads": 1}


def check_rest(rest, path):
    """Raises ValueError if parts of a checkpoint have other types than train.py writes, or are too low."""
    parts = [(name, rest[name], kind) for name, kind in CHECKPOINT.items() if name in rest]
    if isinstance(rest.get('runtime'), dict):
        parts += [(f"runtime's {name}", rest['runtime'].get(name), kind) for name, kind in RUNTIME.items()]
    wrong = [f"{name}={value!r:.40}" for name, value, kind in parts
             if not isinstance(value, kind) or torch.is_tensor(value) and value.numel() != 1
             or name in LOWEST and value < LOWEST[name]]
    if wrong:
        raise ValueError(f"{path} is damaged, or not written by train.py: it holds {', '.join(wrong)}")


def is_published(name):
    """Whether init_from is a published model: a folder with config.json, or what looks like an id on the hub,
    or like nanoGPT's names of GPT-2."""
    if os.path.exists(name):
        return os.path.exists(os.path.join(name, 'config.json'))
    hub_id = re.fullmatch(r'[\w-][\w.-]*/[\w-][\w.-]*|gpt2(-[a-z]+)?', name)
    return bool(hub_id) and not name.endswith('.pt')


def load(init_from, out_dir='out', device='cpu', dtype=None, best=True, merge=True, int8=False, **changes):
    """Reads a model, its tokenizer, and what else its checkpoint holds: (model, tokenizer, rest).

    init_from: 'resume' (out_dir), a checkpoint of ours or nanoGPT's, the folder of a run, or a published
    model: a folder with config.json, an id on the hub, nanoGPT's gpt2 names. dtype: None is the one stored.
    best: of a run's folder best.pt, if it is there, rather than ckpt.pt. merge: of a LoRA run whether the
    adapters are added to the weights, else they stand beside them. int8: whether large weights are quantized,
    a published model's as they are read. changes: fields of GPTConfig to set otherwise. The tokenizer is None
    where there is none, and rest['no_tokenizer'] says why; rest['path'] is what was read. Raises
    FileNotFoundError, or ValueError for what is no checkpoint."""
    published = init_from != 'resume' and is_published(init_from)
    if published:
        path = fetch(init_from)
        model = from_pretrained(path, dtype=dtype, device=device, int8=int8, **changes)
        rest = {'model_args': dataclasses.asdict(model.config)}
    else:
        path = checkpoint_path(out_dir if init_from == 'resume' else init_from, best)
        rest = read_checkpoint(path)
        check_rest(rest, path)
        state, args, lora = rest.pop('model'), rest['model_args'], rest.get('lora')
        if lora:
            base = lora['base']  # an id, or a path; in older files relative to the file, with a dot
            if base.startswith('.'):
                base = os.path.normpath(os.path.join(os.path.dirname(path), base))
            changes = {**{name: args[name] for name in CHANGEABLE if name in args}, **changes}
            model = load(base, dtype=torch.float32, **changes)[0]
            add_lora(model, lora['rank'], lora['alpha'], lora['targets'])
            model.load_state_dict(state, strict=False)
        else:
            model = GPT.from_state(state, args, **changes)
        rest['model_args'] = dataclasses.asdict(model.config)
        if merge and rest.get('lora'):
            merge_lora(model)
        if int8:
            quantize_weights(model, dtype or torch.float32)
        model.to(device, dtype)
    rest['path'] = path
    try:
        tokenizer = json_tokenizer(path) if published else find_tokenizer(rest, path)
    except (OSError, ImportError, ValueError) as error:  # it may still be trained, measured, exported
        tokenizer, rest['no_tokenizer'] = None, str(error)
    return model, tokenizer, rest


def find_tokenizer(rest, path):
    """The tokenizer of a checkpoint, given what it holds beside the weights: its own, or for nanoGPT's files
    that of the dataset they name. FileNotFoundError: that is not here. ValueError: there is none, it is
    damaged, or it has more tokens than the model."""
    if rest.get('tokenizer'):
        try:
            return tokenizer_from_state(rest['tokenizer'])
        except ValueError as e:
            raise ValueError(f'{path}: {e}') from e
    dataset = rest.get('config', {}).get('dataset')
    if not isinstance(dataset, str):
        raise ValueError(f"{path} names no tokenizer and no dataset: nothing can turn its tokens into text")
    folder, n_vocab = os.path.join('data', dataset), rest['model_args']['vocab_size']
    if not os.path.isdir(folder):
        raise FileNotFoundError(f'{folder} is not there, whose tokenizer {path} needs: prepare it here')
    tok = load_tokenizer(folder)
    if tok.n_vocab > -(-n_vocab // 64) * 64:  # padded, as GPT-2's 50257 tokens to 50304
        raise ValueError(f'{folder} has a tokenizer of {tok.n_vocab:,} tokens, but {path} has '
                         f'vocab_size={n_vocab}: prepare the dataset that it was trained on here')
    return tok


if __name__ == '__main__':
    if len(words) == 3 and words[0] == 'export':
        kinds = {None: None, **{plain(kind): kind for kind in DTYPES.values()}}
        if dtype not in kinds:
            raise ValueError(f"dtype={dtype!r} is none of {', '.join(map(plain, DTYPES.values()))}")
        path, folder = checkpoint_path(words[1]), words[2]
        model, tokenizer, rest = load(path)
        if tokenizer is None:  # the weights can be used without
            print(f"no tokenizer is exported: {rest['no_tokenizer']}")
        if model.config.document_token is not None:  # transformers' models have no such thing
            print(f"document_token={model.config.document_token} is left out, which a single document or "
                  "conversation does not miss")
            model.config.document_token = None
        save_pretrained(model, tokenizer, folder, kinds[dtype])
        print(f"{path} is in {folder} for transformers and vLLM: {', '.join(sorted(os.listdir(folder)))}")
    elif len(words) == 1 and words[0] != 'export':
        describe(words[0], fetch(words[0]))
    else:
        raise ValueError(f"got {' '.join(words)!r}: give an id on the hub or a folder, or "
                         "`export RUN FOLDER`; see --help")

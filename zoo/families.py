"""
The published model families; see `add`.
"""
import collections
import inspect
import itertools
import json
import re
import typing

import torch

from configurator import ROOT, UserError, checked, declared, unmet
from model import LOCAL, MOST_LAYERS, ROPE_SCALINGS, GPTConfig, letter, rope_table, round_up

# what a family is -------------------------------------------------------------------------------------------

class Family(typing.NamedTuple):
    """How transformers stores one model_type.

    To add a family, change a similar one: see `like`. If new names are not enough, use a Rule for a field,
    and `rows` or `layouts` for a tensor. A field of config.json that only transformers reads raises an
    error unless it has its default. After you add a family, run `python .ci/defaults.py` to record its
    defaults.
    """
    arch: str                   # the class in transformers
    fields: dict                # changes to FIELDS: {GPTConfig's field: names in config.json}; '': no name
    fixed: dict                 # values of GPTConfig's fields that config.json lacks
    names: dict                 # our module or tensor: transformers' names, or a function of the
    #                             config. Several tensors, joined in order, form ours. E is an expert's
    #                             number. 'D.attn.c_attn' is for layers of mixer D
    layer: str                  # prefix of names inside block N, or a function (config, N, our name)
    rules: dict = {}            # {config.json's fields: their Rule}
    rows: dict = {}             # our module or tensor: a function of config and each fused projection's
    #                             row numbers, which returns the row numbers of each stored tensor
    layouts: dict = {}          # our tensor: Layout
    layers: str = 'L'           # default layer_types of config.json: letters of LAYER_TYPES, repeated
    exports: bool = True        # False: cannot be written
    defaults: dict = {}         # {config.json's field that transformers reads: default}


class Rule(typing.NamedTuple):
    """Converts fields of config.json that need more than a name. A field without a value is None."""
    read: typing.Callable = lambda c, args: None  # (config.json, GPTConfig's fields): sets fields
    write: typing.Callable = lambda config, c: None  # (GPTConfig, config.json): sets config.json


class Layout(typing.NamedTuple):
    """Converts a tensor."""
    read: typing.Callable       # transformers' tensor -> ours
    write: typing.Callable      # ours -> transformers'


def like(base, arch=None, **changes):
    """The family `base` with changes. Dicts add entries; None removes an entry. Other values
    replace the base's."""
    for key, value in changes.items():
        if isinstance(value, dict):
            merged = getattr(base, key) | value
            changes[key] = {name: one for name, one in merged.items() if value.get(name, name) is not None}
    return base._replace(arch=arch or base.arch, **changes)


FAMILIES = {}  # model_type: Family. Exports use the first that fits
DEFAULTS = json.loads((ROOT / 'zoo/defaults.json').read_text())  # model_type: Family.defaults


def add(kind, base, arch=None, **changes):
    """base: a Family or its model_type. changes: as in `like`."""
    base = base if isinstance(base, Family) else FAMILIES[base]
    FAMILIES[kind] = like(base._replace(defaults=DEFAULTS.get(kind, base.defaults)), arch, **changes)


def same(names):
    """Fields with the same name in GPTConfig and config.json."""
    return {name: name for name in names.split()}


def renamed(kind, pattern, new):
    return {ours: re.sub(pattern, new, name) for ours, name in FAMILIES[kind].names.items()
            if isinstance(name, str)}


def refuse(c, **fields):
    if fields:
        given = ', '.join(f"{name}={value!r:.80}" for name, value in fields.items())
        raise UserError(f"{c['model_type']} with {given} is unsupported")


# the layout of tensors --------------------------------------------------------------------------------------

SAME = Layout(lambda w: w, lambda w: w)
TRANSPOSED = Layout(lambda w: w.mT, lambda w: w.mT)
PLUS_ONE = Layout(lambda w: w.float() + 1, lambda w: w.float() - 1)  # exact only in float32
ROW = Layout(lambda w: w[0], lambda w: w[None])  # stored (1, n)
AFTER_TWO = Layout(lambda w: w[2:], lambda w: torch.nn.functional.pad(w, (0, 0, 2, 0)))  # two unused rows
CONVOLUTION = Layout(lambda w: w.flatten(1), lambda w: w[:, None])  # stored (channels, 1, kernel)


def interleaved(rows):
    """(..., n) in two halves -> pairs with one row of each half."""
    return rows.unflatten(-1, (2, -1)).mT.flatten(-2)


def heads_interleaved(rows, width, begin, end):
    heads = rows.view(-1, width).clone()
    heads[:, begin:end] = interleaved(heads[:, begin:end])
    return heads.flatten()


def rows_interleaved(config, q, k, *others):
    return [*(heads_interleaved(rows, config.head_dim, 0, config.rope_dim) for rows in (q, k)), *others]


def rows_swapped(config, q, k, v):
    """Swaps the halves of each head, because nanochat rotates backwards."""
    return [*(rows.view(-1, 2, config.head_dim // 2).flip(1).flatten() for rows in (q, k)), v]


def ordered(ours, *stored, groups=None):
    """A function for Family.rows. ours: one letter per projection; stored: the letters in each stored tensor;
    groups: the field with the number of groups, if rows are stored group by group."""
    def rows(config, *parts):
        n = getattr(config, groups) if groups else 1
        named = {name: part.view(n, -1) for name, part in zip(ours, parts)}
        return [torch.cat([named[name] for name in names], dim=1).flatten() for names in stored]
    return rows


def rows_latent_query(config, query):
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    return [heads_interleaved(query, width, config.qk_nope_head_dim, width)]


def rows_latent_in(config, query, latent, key):
    if config.q_lora_rank is None:
        query, = rows_latent_query(config, query)
    return [query, torch.cat((latent, interleaved(key)))]


def rows_convolution(config, rows):
    keys = config.linear_n_key_head * config.linear_key_head_dim
    return rows.tensor_split([keys, 2 * keys])


def rows_mamba_convolution(config, rows):
    c, b, x = rows_convolution(config, rows)
    return [torch.cat((x, b, c))]


# rules ------------------------------------------------------------------------------------------------------

def converted(ours, theirs, read, write):
    """The rule for a field. read: (config.json's value, GPTConfig's fields) -> our value; write:
    GPTConfig -> config.json's value."""
    return {theirs: Rule(lambda c, args: c[theirs] is None or args.update({ours: read(c[theirs], args)}),
                         lambda config, c: c.update({theirs: write(config)}))}


def width_of_shared(config):
    return (config.n_shared_expert or 0) * (config.d_expert or 0)


def shared_width(theirs):
    """The rule for the total width of all shared experts."""
    return converted('n_shared_expert', theirs, lambda width, args: width and width // args['d_expert'],
                     width_of_shared)


def scale(config):
    return config.attn_scale or (config.head_dim or 1) ** -0.5


def letters(config, pattern):
    return [config.mlp_of(i) if pattern == 'expert_pattern' else letter(getattr(config, pattern), i)
            for i in range(config.n_layer)]


def worded(pattern, theirs, words):
    """The rule for a list with one word per layer. words: {our letter: word}."""
    ours = {word: one for one, word in words.items()}

    def read(given, args):
        return ''.join(ours.get(word, '?') for word in given) or args.get(pattern)

    def write(config):
        return [words.get(one) for one in letters(config, pattern)]
    return converted(pattern, theirs, read, write)


def listed(pattern, theirs, marked, others):
    """The rule for a list of the layers that have letter `marked`; other layers have letter `others`."""
    def read(given, args):
        return ''.join(marked if i in given else others for i in range(args['n_layer']))

    def write(config):
        return [i for i, one in enumerate(letters(config, pattern)) if one == marked]
    return converted(pattern, theirs, read, write)


def only(theirs, allowed):
    """The rule for a field with few supported values. allowed: GPTConfig's fields -> these values."""
    return {theirs: Rule(lambda c, args: c[theirs] in allowed(args) or refuse(c, **{theirs: c[theirs]}))}


def every(pattern, theirs, usual, other):
    """The rule for a field with a number n: every n-th layer has the letter `other`."""
    return {theirs: Rule(lambda c, args: args.update({pattern: usual * (c[theirs] - 1) + other}))}


def read_falcon(c, args):
    new = c['new_decoder_architecture']
    if not new:
        args['n_kv_head'] = 1 if c['multi_query'] else None
    args['norm_placement'] = 'parallel' if new or c['parallel_attn'] else 'pre'
    if new and c['num_ln_in_parallel_attn'] != 1:
        args['norm_placement'] = 'parallel_2'
    if c['alibi']:  # Falcon scales the bias together with the scores
        args.update(pos='alibi', alibi_scale=head_width(args) ** -0.5)


def write_falcon(config, c):
    new = config.norm_placement == 'parallel_2' or config.n_kv_head not in (1, config.n_head)
    c.update(new_decoder_architecture=new, multi_query=config.n_kv_head == 1,
             parallel_attn=config.norm_placement != 'pre', alibi=config.pos == 'alibi',
             num_ln_in_parallel_attn=1 + (config.norm_placement == 'parallel_2') if new else None)


def write_mpt(config, c):
    c['attn_config'] = {'softmax_scale': c.pop('softmax_scale')}


def write_latent(config, c):
    if config.qkv_bias and not config.q_lora_rank:
        raise UserError('DeepSeek has no bias on queries that are not compressed')
    c['num_key_value_heads'] = config.n_head


def write_deepseek_v2(config, c):
    c['topk_method'] = 'group_limited_greedy' if config.n_group else 'greedy'


def read_indexer(c, args):
    """Limits the context, because GPT lacks the indexer, which matters only above index_topk tokens."""
    args['block_size'] = min(args['block_size'], c['index_topk'])


def read_llama4(c, args):
    if not c['use_qk_norm']:
        args['qk_norm'] = False
    if c['attn_temperature_tuning']:
        args['query_scale'] = dict(beta=c['attn_scale'], length=c['floor_scale'], start=1, layers='N')
    chunks = args['pos_pattern'].replace('P', 'C').replace('N', 'L')
    args.update(window=c['attention_chunk_size'], window_pattern=chunks)


def read_lfm2(c, args):
    if c['block_auto_adjust_ff_dim']:
        adjusted = int(c['block_ffn_dim_multiplier'] * int(2 * args['d_ff'] / 3))
        args['d_ff'] = round_up(adjusted, c['block_multiple_of'])


def write_lfm2(config, c):
    c['block_auto_adjust_ff_dim'] = False


def read_kimi_linear(c, args):
    linear = c['linear_attn_config']  # published files count layers from 1
    if linear:
        pattern = ''.join('KM'[i + 1 in linear['full_attn_layers']] for i in range(args['n_layer']))
        args.update(mixer_pattern=pattern, linear_key_head_dim=linear['head_dim'],
                    linear_n_key_head=linear['num_heads'],
                    linear_conv_kernel_dim=linear['short_conv_kernel_size'])


def read_granite_hybrid(c, args):
    if c['position_embedding_type'] != 'rope':
        args['pos'] = 'none'
    if args['n_expert']:
        args['n_shared_expert'] = c['shared_intermediate_size'] // args['d_expert']
    else:  # without experts, the shared expert is the MLP
        args['d_ff'] = c['shared_intermediate_size']


def write_granite_hybrid(config, c):
    c.update(position_embedding_type='rope' if config.pos == 'rope' else None,
             num_local_experts=config.n_expert or 0,
             shared_intermediate_size=width_of_shared(config) or config.d_ff)


NEMOTRON_LAYERS = {  # word (older files: letter): our letter
    'M': 'B', '*': 'A', '-': 'D', 'E': 'E', 'mamba': 'B', 'attention': 'A', 'linear_attention': 'B',
    'full_attention': 'A', 'mlp': 'D', 'moe': 'E'}


def read_nemotron_h(c, args):
    """Two layers of Nemotron-H, a mixer and an MLP, become one block."""
    words = c['layers_block_type'] or c['layer_types'] or c['hybrid_override_pattern'] or 'ME*-'
    kinds = ''.join(NEMOTRON_LAYERS[one] for one in words)
    blocks = re.findall('([AB])([DE]?)', kinds)
    if 'E' not in kinds:
        args['n_expert'] = None
    args.update(n_layer=len(blocks), mixer_pattern=''.join(mixer for mixer, _ in blocks),
                expert_pattern=''.join(mlp or 'N' for _, mlp in blocks))


def write_nemotron_h(config, c):
    if config.n_expert and (config.mlp_bias or not config.n_shared_expert):
        raise UserError('the experts of Nemotron-H have no bias, and one shared expert')
    c['time_step_min'] = 0.0  # transformers applies it only in a prefill
    words = {ours: word for word, ours in NEMOTRON_LAYERS.items()}
    kinds = zip(letters(config, 'mixer_pattern'), letters(config, 'expert_pattern'))
    c['layers_block_type'] = [words.get(kind) for block in kinds for kind in block if kind != 'N']


def nemotron_layer(config, layer, name):
    """Nemotron-H numbers mixers and MLPs as separate layers."""
    at = layer + sum(config.mlp_of(i) != 'N' for i in range(layer)) + name.startswith(('ln_2', 'mlp'))
    return f'backbone.layers.{at}.'


def read_gemma(c, args):
    args['embed_scale'] = args['n_embd'] ** 0.5


def read_gemma4(c, args):
    """Layers without a window, such as the last layer, have their own head_dim and n_kv_head. An MLP next
    to experts becomes a shared expert."""
    if pattern := args.get('window_pattern'):
        args['window_pattern'] = (pattern * args['n_layer'])[:args['n_layer'] - 1] + 'L'
    full = dict(head_dim=c['global_head_dim'], num_key_value_heads=c['num_global_key_value_heads'])
    if c['per_layer_config']:
        full, *_ = c['per_layer_config'].values()
    args['local'] |= dict(head_dim=args['head_dim'], n_kv_head=args['n_kv_head'], k_eq_v=False)
    args['head_dim'] = full['head_dim']
    if args['k_eq_v']:
        args['n_kv_head'] = full.get('num_key_value_heads') or args['n_kv_head']
    if c['enable_moe_block']:
        args['n_shared_expert'] = args['d_ff'] // args['d_expert']
    else:
        args['n_expert'] = None


def write_gemma4(config, c):
    local = vars(config.at(0))
    c.update(global_head_dim=config.head_dim, num_global_key_value_heads=config.n_kv_head,
             head_dim=local['head_dim'], num_key_value_heads=local['n_kv_head'],
             enable_moe_block=bool(config.n_expert), hidden_size_per_layer_input=0)
    if config.n_expert:
        c['intermediate_size'] = width_of_shared(config)


def head_width(args):
    return args.get('head_dim') or args['n_embd'] // args['n_head']


def read_rope_where_short(c, args):
    if c['sliding_window']:  # only layers with a window use RoPE
        args['pos_pattern'] = args.get('window_pattern', 'L').replace('L', 'N').replace('S', 'P')


def write_rope_where_short(config, c):
    c['sliding_window'] = config.window


def read_ministral3(c, args):
    scaling = args['rope_scaling']
    args.pop('partial_rotary_factor', None)
    args['query_scale'] = dict(beta=c['rope_parameters']['llama_4_scaling_beta'],
                               length=scaling['original_max_position_embeddings'])


def write_ministral3(config, c):
    c['rope_parameters']['llama_4_scaling_beta'] = config.query_scale['beta']


def read_layer_rope(c, args):
    """Reads one base per layer: 0 for no rotation, or the common base."""
    bases = c['layer_rope_theta'] or [args['rope_base']]
    args['rope_base'], = {*bases} - {0} or {args['rope_base']}
    args['pos_pattern'] = ''.join('P' if base else 'N' for base in bases)


def write_layer_rope(config, c):
    c['layer_rope_theta'] = [config.rope_base * (kind == 'P') for kind in letters(config, 'pos_pattern')]


def read_hunyuan(c, args):
    """If a dynamic scaling has an alpha, replaces the scaling by a larger base."""
    width = head_width(args)
    alpha = c['rope_parameters'].get('alpha')
    if alpha and args['rope_scaling']['rope_type'] == 'dynamic':
        args['rope_base'] *= alpha ** (width / (width - 2))
        args['rope_scaling'] = None


def read_minimind(c, args):
    """With n_routed_experts in config.json: MiniMind 2, a Llama. Without: MiniMind 3, a Qwen3."""
    args['qk_norm'] = c['n_routed_experts'] is None
    if not c['use_moe']:
        args['n_expert'] = 0


UNUSED = Rule()  # fields that change no logits
NO_ROPE = (every('pos_pattern', 'no_rope_layer_interval', 'P', 'N')
           | worded('pos_pattern', 'no_rope_layers', dict(P=1, N=0)))
MLP_TYPES = worded('expert_pattern', 'mlp_layer_types', dict(D='dense', E='sparse'))
DENSE_LAYERS = listed('expert_pattern', 'mlp_only_layers', 'D', 'E')
LENGTH_SCALE = {'rope_parameters': Rule(read_ministral3, write_ministral3)}
SHARED_EXPERT = shared_width('shared_expert_intermediate_size')
LOCAL_ROPE = {'sliding_window': Rule(read_rope_where_short)}
ROPE_WHERE_SHORT = {'sliding_window': Rule(read_rope_where_short, write_rope_where_short)}


# the table --------------------------------------------------------------------------------------------------

FIELDS = dict(  # GPTConfig's field: names in config.json; only those in Family.defaults count
    same('vocab_size tie_word_embeddings head_dim mlp_bias norm_topk_prob routed_scaling_factor n_group '
         'topk_group kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim '
         'linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim'),
    block_size='max_position_embeddings n_positions max_seq_len',
    n_layer='num_hidden_layers n_layer n_layers', n_head='num_attention_heads n_head n_heads',
    n_kv_head='num_key_value_heads',
    n_embd='hidden_size n_embd d_model', d_ff='intermediate_size n_inner ffn_dim',
    norm_eps='rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon',
    mlp='hidden_act activation_function activation mlp_hidden_act', qkv_bias='attention_bias',
    proj_bias='attention_bias', n_expert='num_experts num_local_experts n_routed_experts moe_num_experts',
    n_expert_active='num_experts_per_tok num_experts_per_token top_k_experts moe_k moe_topk',
    d_expert='moe_intermediate_size', n_shared_expert='num_shared_experts n_shared_experts '
    'moe_num_shared_experts', n_dense_layer='first_k_dense_replace num_dense_layers moe_layer_start_index',
    attn_softcap='attn_logit_softcapping', logit_softcap='final_logit_softcapping',
    linear_n_key_head='linear_num_key_heads', linear_n_value_head='linear_num_value_heads')
BASE = Family(
    arch='LlamaForCausalLM', layer='model.layers.N.', fields={}, fixed=dict(qk_norm=False),
    names={
        'wte': 'model.embed_tokens', 'ln_f': 'model.norm', 'lm_head': 'lm_head',
        'ln_1': 'input_layernorm', 'ln_2': 'post_attention_layernorm',
        'attn.c_attn': 'self_attn.q_proj self_attn.k_proj self_attn.v_proj',
        'attn.q_norm': 'self_attn.q_norm', 'attn.k_norm': 'self_attn.k_norm',
        'attn.c_proj': 'self_attn.o_proj', 'attn.sink': 'self_attn.sinks',
        'mlp.c_fc': 'mlp.gate_proj mlp.up_proj', 'mlp.c_proj': 'mlp.down_proj',
        'mlp.router': 'mlp.gate', 'mlp.expert_bias': 'mlp.gate.e_score_correction_bias',
        'mlp.experts.c_fc': 'mlp.experts.E.gate_proj mlp.experts.E.up_proj',
        'mlp.experts.c_proj': 'mlp.experts.E.down_proj',
        'mlp.shared.c_fc': 'mlp.shared_experts.gate_proj mlp.shared_experts.up_proj',
        'mlp.shared.c_proj': 'mlp.shared_experts.down_proj'},
    layouts={'attn.conv': CONVOLUTION})
WITH_GATE = {'attn.c_attn': f"{BASE.names['attn.c_attn']} self_attn.gate_proj"}
add('llama', BASE)
add('mistral', BASE, 'MistralForCausalLM', layers='S')
add('qwen2', 'mistral', 'Qwen2ForCausalLM', fixed=dict(qkv_bias=True), layers='SL')
add('qwen3', BASE, 'Qwen3ForCausalLM', fixed=dict(qk_norm=True), layers='SL')
add(
    'olmo2', BASE, 'Olmo2ForCausalLM',
    fixed=dict(qk_norm='whole', norm_placement='output'),
    names={'ln_1': 'post_attention_layernorm', 'ln_2': 'post_feedforward_layernorm'})
EXPERTS = dict(d_expert='intermediate_size')  # if every MLP consists of experts
add(
    'mixtral', 'mistral', 'MixtralForCausalLM', fields=EXPERTS,
    names={'mlp.router': 'block_sparse_moe.gate', 'mlp.experts.c_proj': 'block_sparse_moe.experts.E.w2',
           'mlp.experts.c_fc': 'block_sparse_moe.experts.E.w1 block_sparse_moe.experts.E.w3'})
FUSED_EXPERTS = {'mlp.experts.c_fc.weight': 'mlp.experts.gate_up_proj',
                 'mlp.experts.c_proj.weight': 'mlp.experts.down_proj'}
TRANSPOSED_EXPERTS = dict.fromkeys(FUSED_EXPERTS, TRANSPOSED)
add('qwen3_moe', 'qwen3', 'Qwen3MoeForCausalLM', layers='S', rules=DENSE_LAYERS)
SHARED_NAMES = {
    'mlp.shared.c_fc': 'mlp.shared_expert.gate_proj mlp.shared_expert.up_proj',
    'mlp.shared.c_proj': 'mlp.shared_expert.down_proj', 'mlp.shared_gate': 'mlp.shared_expert_gate'}
SHARED_MLP = {'mlp.shared.c_fc': 'mlp.shared_mlp.gate_proj mlp.shared_mlp.up_proj',
              'mlp.shared.c_proj': 'mlp.shared_mlp.down_proj'}

PLUS_ONE_NORMS = {f'{norm}.weight': PLUS_ONE for norm in (
    'ln_1', 'ln_2', 'ln_3', 'ln_4', 'ln_f', 'attn.q_norm', 'attn.k_norm')}
add(
    'qwen3_next', 'qwen3_moe', 'Qwen3NextForCausalLM', layers='DDDL',
    fields=dict(mlp=''),  # hidden_act must be silu: convolutions use it too
    fixed=dict(attn_gate=True, shared_gate=True, partial_rotary_factor=0.25),
    names={**SHARED_NAMES, 'attn.A_log': 'linear_attn.A_log', 'attn.dt_bias': 'linear_attn.dt_bias',
           'attn.conv': 'linear_attn.conv1d.weight', 'attn.o_norm': 'linear_attn.norm.weight',
           'D.attn.c_attn': 'linear_attn.in_proj_qkvz linear_attn.in_proj_ba',
           'D.attn.c_proj': 'linear_attn.out_proj'},
    rows={'attn.c_attn': ordered('qkvg', 'qg', 'k', 'v', groups='n_head'),
          'D.attn.c_attn': ordered('qkvzba', 'qkvz', 'ba', groups='linear_n_key_head')},
    layouts=PLUS_ONE_NORMS, rules=SHARED_EXPERT)
add(
    'qwen3_5_moe_text', 'qwen3_next', 'Qwen3_5MoeForCausalLM',
    rules={'mlp_only_layers': None},
    names={'D.attn.c_attn': 'linear_attn.in_proj_qkv linear_attn.in_proj_z linear_attn.in_proj_b '
                            'linear_attn.in_proj_a'},
    rows={'D.attn.c_attn': ordered('qkvzba', 'qkv', 'z', 'b', 'a')})
DEEPSEEK_EXPERTS = like(  # only dense layers use transformers' mlp_bias
    BASE, fields=dict(mlp_bias=''), fixed=dict(router='sigmoid', balance_bias=True))
LATENT = dict(
    fixed=dict(latent_norm_eps=1e-6),
    fields=dict(n_kv_head='', head_dim=''),
    names={'attn.c_attn': lambda config: f"self_attn.q{'_a' if config.q_lora_rank else ''}_proj "
                                         "self_attn.kv_a_proj_with_mqa",
           'attn.q_norm': 'self_attn.q_a_layernorm', 'attn.c_q': 'self_attn.q_b_proj',
           'attn.kv_norm': 'self_attn.kv_a_layernorm', 'attn.c_kv': 'self_attn.kv_b_proj'},
    rows={'attn.c_attn': rows_latent_in, 'attn.c_q': rows_latent_query},
    rules={'num_key_value_heads head_dim': Rule(write=write_latent)})
add('deepseek_v3', like(DEEPSEEK_EXPERTS, **LATENT), 'DeepseekV3ForCausalLM')
add('youtu', like(BASE, **LATENT), 'YoutuForCausalLM')
add(
    'deepseek_v32', 'deepseek_v3', 'DeepseekV32ForCausalLM', exports=False,
    rules={**MLP_TYPES, 'index_topk': Rule(read_indexer),
           'index_head_dim index_n_heads index_skip_topk_offset index_topk_freq index_topk_pattern '
           'indexer_types': UNUSED})
BLOOM = Family(
    arch='BloomForCausalLM', layer='transformer.h.N.', fields={},
    fixed=dict(block_size=2048, norm='layernorm', bias=True, qk_norm=False, pos='alibi',
               mlp='gelu_tanh'),
    names={'wte': 'transformer.word_embeddings', 'ln_embd': 'transformer.word_embeddings_layernorm',
           'ln_f': 'transformer.ln_f', 'lm_head': 'lm_head', 'ln_1': 'input_layernorm',
           'ln_2': 'post_attention_layernorm', 'attn.c_attn': 'self_attention.query_key_value',
           'attn.c_proj': 'self_attention.dense', 'mlp.c_fc': 'mlp.dense_h_to_4h',
           'mlp.c_proj': 'mlp.dense_4h_to_h'},
    rows={'attn.c_attn': ordered('qkv', 'qkv', groups='n_kv_head')}, rules={'slow_but_exact': UNUSED})
add(
    'bloom', BLOOM, fields=dict(block_size='seq_length', n_embd='hidden_size n_embed'),
    fixed=dict(embed_norm=True))
add(
    'falcon', BLOOM, 'FalconForCausalLM',
    fields=dict(n_layer='num_hidden_layers n_layer', bias='bias', head_dim='',
                n_head='num_attention_heads n_head', n_kv_head='num_kv_heads n_head_kv',
                d_ff='ffn_hidden_size'),
    fixed=dict(norm_bias=True, pos='rope'),
    names={'ln_1': lambda config: 'ln_attn' if config.norm_placement == 'parallel_2' else 'input_layernorm',
           'ln_2': lambda config: ('ln_mlp' if config.norm_placement == 'parallel_2'
                                   else 'post_attention_layernorm')},
    rules={'alibi multi_query parallel_attn new_decoder_architecture num_ln_in_parallel_attn':
           Rule(read_falcon, write_falcon)})


add(
    'gpt2', BLOOM, 'GPT2LMHeadModel', rows={'attn.c_attn': None},
    fixed=dict(pos='learned'),
    names={'wte': 'transformer.wte', 'wpe': 'transformer.wpe', 'ln_1': 'ln_1', 'ln_2': 'ln_2',
           'attn.c_attn': 'attn.c_attn', 'attn.c_proj': 'attn.c_proj', 'mlp.c_fc': 'mlp.c_fc',
           'mlp.c_proj': 'mlp.c_proj'},
    layouts=dict.fromkeys(
        ('attn.c_attn.weight', 'attn.c_proj.weight', 'mlp.c_fc.weight', 'mlp.c_proj.weight'), TRANSPOSED),
    rules={'add_cross_attention attention_softmax_in_fp32 reorder_and_upcast_attn '
           'scale_attention_softmax_in_fp32': UNUSED})
add('gpt_bigcode', 'gpt2', 'GPTBigCodeForCausalLM', fixed=dict(n_kv_head=1),
    layouts=dict.fromkeys(FAMILIES['gpt2'].layouts))
add(
    'gemma2', BASE, 'Gemma2ForCausalLM', layers='SL',
    fields=dict(mlp=''),  # transformers ignores hidden_act
    fixed=dict(norm_placement='sandwich', mlp='geglu_tanh'),
    names={'ln_3': 'pre_feedforward_layernorm', 'ln_4': 'post_feedforward_layernorm'},
    layouts=PLUS_ONE_NORMS,
    rules={'hidden_size': Rule(read_gemma), **converted(
        'attn_scale', 'query_pre_attn_scalar', lambda given, args: given ** -0.5,
        lambda config: round(scale(config) ** -2))})
add(
    'gemma4_text', 'gemma2', 'Gemma4ForCausalLM', layers='SSSSSL', layouts=dict.fromkeys(PLUS_ONE_NORMS),
    fields=dict(k_eq_v='attention_k_eq_v'),
    fixed=dict(qk_norm=True, v_norm=True, attn_scale=1.0, local={}, layer_scalar=True,
               expert_norms=True),
    names={'scalar': 'layer_scalar', 'mlp.router': 'router.proj', 'mlp.ln_router.weight': 'router.scale',
           'mlp.expert_scale': 'router.per_expert_scale', 'mlp.ln_in': 'pre_feedforward_layernorm_2',
           'mlp.ln_out': 'post_feedforward_layernorm_2', 'mlp.ln_shared_in': 'pre_feedforward_layernorm',
           'mlp.ln_shared_out': 'post_feedforward_layernorm_1',
           'mlp.shared.c_fc': 'mlp.gate_proj mlp.up_proj', 'mlp.shared.c_proj': 'mlp.down_proj',
           'mlp.experts.c_fc.weight': 'experts.gate_up_proj',
           'mlp.experts.c_proj.weight': 'experts.down_proj'},
    rules={'query_pre_attn_scalar': None,
           **only('use_bidirectional_attention', lambda args: (None, 'vision')),
           **only('hidden_size_per_layer_input', lambda args: (None, 0)),
           # matter only with KV sharing or per-layer inputs
           'use_double_wide_mlp vocab_size_per_layer_input': UNUSED,
           'per_layer_config global_head_dim num_global_key_value_heads enable_moe_block':
           Rule(read_gemma4, write_gemma4)})
INTERLEAVED = {'attn.c_attn': rows_interleaved}
LAYERNORM = dict(norm='layernorm', norm_bias=True)

add(
    'glm', BASE, 'GlmForCausalLM', fields=dict(proj_bias=''), rows=INTERLEAVED,
    fixed=dict(partial_rotary_factor=0.5), names={'mlp.c_fc': 'mlp.gate_up_proj'})
add(
    'granite', 'llama', 'GraniteForCausalLM',
    fields=dict(embed_scale='embedding_multiplier', attn_scale='attention_multiplier',
                residual_scale='residual_multiplier'),
    rules=converted('logit_scale', 'logits_scaling', lambda given, args: 1 / given,
                    lambda config: 1 / config.logit_scale))
add(
    'granitemoe', 'granite', 'GraniteMoeForCausalLM', fields=EXPERTS,
    names={'mlp.router': 'block_sparse_moe.router.layer',
           'mlp.experts.c_fc.weight': 'block_sparse_moe.input_linear.weight',
           'mlp.experts.c_proj.weight': 'block_sparse_moe.output_linear.weight'})
GRANITE_SHARED = {'mlp.shared.c_fc': 'shared_mlp.input_linear',
                  'mlp.shared.c_proj': 'shared_mlp.output_linear'}
add(
    'hunyuan_v1_dense', BASE, 'HunYuanDenseV1ForCausalLM',
    fixed=dict(qk_norm='rotated'),
    names={'attn.q_norm': 'self_attn.query_layernorm', 'attn.k_norm': 'self_attn.key_layernorm'},
    rules={'rope_parameters': Rule(read_hunyuan)})
add(
    'cohere', BASE, 'CohereForCausalLM', fields=same('logit_scale'),
    rows=INTERLEAVED,
    fixed=dict(norm='layernorm', norm_placement='parallel'))
add('arcee', 'llama', 'ArceeForCausalLM', names={'mlp.c_fc': 'mlp.up_proj'})
LFM = like(
    BASE, layers='L' * 999 + 'C', fields=dict(linear_conv_kernel_dim='conv_L_cache'),
    fixed=dict(qk_norm=True),
    names={'ln_1': 'operator_norm', 'ln_2': 'ffn_norm', 'ln_f': 'model.embedding_norm',
           'attn.q_norm': 'self_attn.q_layernorm', 'attn.k_norm': 'self_attn.k_layernorm',
           'attn.c_proj': 'self_attn.out_proj', 'attn.conv': 'conv.conv.weight',
           'C.attn.c_attn': 'conv.in_proj', 'C.attn.c_proj': 'conv.out_proj',
           'mlp.c_fc': 'feed_forward.w1 feed_forward.w3',
           'mlp.c_proj': 'feed_forward.w2'})
add(
    'lfm2', LFM, 'Lfm2ForCausalLM', fields=dict(d_ff='block_ff_dim intermediate_size'),
    rules={'block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of':
           Rule(read_lfm2, write_lfm2), **listed('mixer_pattern', 'full_attn_idxs', 'A', 'C')})
MAMBA = dict(
    names={'attn.A_log': 'mamba.A_log', 'attn.dt_bias': 'mamba.dt_bias', 'attn.skip': 'mamba.D',
           'attn.conv': 'mamba.conv1d.weight', 'attn.conv_bias': 'mamba.conv1d.bias',
           'attn.o_norm': 'mamba.norm.weight', 'B.attn.c_attn': 'mamba.in_proj',
           'B.attn.c_proj': 'mamba.out_proj'},
    rows={'B.attn.c_attn': ordered('cbxzd', 'zxbcd'), 'attn.conv': rows_mamba_convolution,
          'attn.conv_bias': rows_mamba_convolution},
    fields=dict(linear_n_key_head='mamba_n_groups', linear_n_value_head='mamba_n_heads',
                linear_key_head_dim='mamba_d_state', linear_conv_kernel_dim='mamba_d_conv',
                linear_conv_bias='mamba_conv_bias'),
    rules={'mamba_d_head': UNUSED, **only('time_step_limit', lambda args: (
        None, [0, float('inf')], [0, 1e308], [0, {'__float__': 'Infinity'}])), **converted(
        'linear_value_head_dim', 'mamba_expand',
        lambda given, args: given * args['n_embd'] // args['linear_n_value_head'],
        lambda config: config.linear_n_value_head * config.linear_value_head_dim // config.n_embd)})
add(
    'bamba', like(FAMILIES['llama'], **MAMBA), 'BambaForCausalLM',
    fixed=dict(partial_rotary_factor=0.5, mixer_pattern='B'),
    names={**renamed('llama', 'mlp', 'feed_forward'), 'ln_2': 'pre_ff_layernorm',
           'ln_f': 'model.final_layernorm'},
    rules=listed('mixer_pattern', 'attn_layer_indices', 'A', 'B'))
add(
    'deepseek_v2', 'youtu', 'DeepseekV2ForCausalLM', fields=dict(mlp_bias='', norm_topk_prob=''),
    fixed=dict(norm_topk_prob=False),
    rules={'topk_method': Rule(write=write_deepseek_v2)})
add(
    'gpt_neox', BLOOM, 'GPTNeoXForCausalLM', layer='gpt_neox.layers.N.',
    fields=dict(head_dim=''),
    fixed=dict(pos='rope', partial_rotary_factor=0.25),
    names={'wte': 'gpt_neox.embed_in', 'ln_f': 'gpt_neox.final_layer_norm', 'lm_head': 'embed_out',
           'attn.c_attn': 'attention.query_key_value', 'attn.c_proj': 'attention.dense'},
    rules={**converted('norm_placement', 'use_parallel_residual',
                       lambda given, args: 'parallel_2' if given else 'pre',
                       lambda config: config.norm_placement == 'parallel_2'),
           'rotary_emb_base rotary_pct': Rule(write=lambda config, c: c.update(
               rotary_emb_base=config.rope_base, rotary_pct=config.partial_rotary_factor)),
           'head_dim is_decoder': UNUSED})
add(
    'mpt', BLOOM, 'MptForCausalLM', layer='transformer.blocks.N.', rows={'attn.c_attn': None},
    fields=dict(attn_scale='softmax_scale'),
    fixed=dict(bias=False, mlp='gelu'),
    names={'wte': 'transformer.wte', 'ln_f': 'transformer.norm_f', 'ln_1': 'norm_1', 'ln_2': 'norm_2',
           'attn.c_attn': 'attn.Wqkv', 'attn.c_proj': 'attn.out_proj', 'mlp.c_fc': 'ffn.up_proj',
           'mlp.c_proj': 'ffn.down_proj'},
    rules={'attn_config': Rule(write=write_mpt), 'init_device learned_pos_emb': UNUSED})
add('olmo3', 'olmo2', 'Olmo3ForCausalLM', layers='SSSL', fixed=dict(local={}))
add(
    'gemma3_text', 'gemma2', 'Gemma3ForCausalLM', layers='SSSSSL',
    fixed=dict(qk_norm=True, local={}))
add('gemma4_unified_text', 'gemma4_text', 'Gemma4UnifiedForCausalLM')
add(
    'lfm2_moe', LFM, 'Lfm2MoeForCausalLM', fields=dict(balance_bias='use_expert_bias'),
    fixed=dict(router='sigmoid'),
    names={'mlp.router': 'feed_forward.gate', 'mlp.expert_bias': 'feed_forward.expert_bias',
           'mlp.experts.c_fc': 'feed_forward.experts.E.w1 feed_forward.experts.E.w3',
           'mlp.experts.c_proj': 'feed_forward.experts.E.w2'})
add(
    'lfm3', LFM, 'Lfm3ForCausalLM', layers='C' + 'CLCS' * 99,
    fixed=dict(norm_placement='sandwich', attn_gate='head', local={}),
    fields=dict(qkv_bias='', proj_bias=''),
    names={**WITH_GATE, 'attn.q_norm': 'self_attn.q_norm', 'attn.k_norm': 'self_attn.k_norm',
           'attn.c_proj': 'self_attn.o_proj', 'ln_2': 'post_operator_norm', 'ln_3': 'ffn_norm',
           'ln_4': 'post_ffn_norm'})
add(
    'granitemoehybrid', like(FAMILIES['granitemoe'], **MAMBA), 'GraniteMoeHybridForCausalLM',
    layers='B' * 999 + 'L', fields=dict(mlp='', d_ff=''),
    names={**GRANITE_SHARED, 'mlp.c_fc': 'shared_mlp.input_linear',
           'mlp.c_proj': 'shared_mlp.output_linear'},
    rules={'position_embedding_type shared_intermediate_size':
           Rule(read_granite_hybrid, write_granite_hybrid)})
add(
    'nemotron_h', 'bamba', 'NemotronHForCausalLM', layer=nemotron_layer,
    fields=dict(tie_word_embeddings='', qkv_bias='', proj_bias='', n_shared_expert='',
                linear_n_key_head='n_groups', linear_n_value_head='mamba_num_heads',
                linear_key_head_dim='ssm_state_size',
                linear_value_head_dim='mamba_head_dim', linear_conv_kernel_dim='conv_kernel',
                linear_conv_bias='use_conv_bias'),
    fixed=dict(n_layer=0, pos='none', router='sigmoid', balance_bias=True, partial_rotary_factor=None,
               tie_word_embeddings=False),
    names={**renamed('bamba', 'mamba|self_attn|mlp|feed_forward', 'mixer'),
           'wte': 'backbone.embeddings', 'ln_f': 'backbone.norm_f', 'ln_1': 'norm', 'ln_2': 'norm',
           'mlp.c_fc': 'mixer.up_proj',
           'mlp.experts.c_fc': 'mixer.experts.E.up_proj',
           'mlp.shared.c_fc': 'mixer.shared_experts.up_proj'},
    rules={'attn_layer_indices': None, 'mamba_expand': None,
           'layers_block_type layer_types hybrid_override_pattern num_hidden_layers':
           Rule(read_nemotron_h, write_nemotron_h),
           **shared_width('moe_shared_expert_intermediate_size'),
           'attention_bias chunk_size expand mamba_ssm_cache_dtype moe_shared_expert_overlap '
           'n_shared_experts rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_max '
           'time_step_min use_mamba_kernels': UNUSED})
add(
    'kimi_linear', 'deepseek_v3', 'KimiLinearForCausalLM', layers='K' + 'KKKM' * 99,
    fields=dict(block_size='model_max_length max_position_embeddings', n_group='num_expert_group n_group',
                n_expert='num_experts num_local_experts',
                n_expert_active='num_experts_per_token num_experts_per_tok',
                n_shared_expert='num_shared_experts n_shared_experts',
                norm_topk_prob='moe_renormalize norm_topk_prob', linear_n_key_head='linear_num_heads',
                linear_key_head_dim='linear_head_dim'),
    fixed=dict(pos='none'),
    names={**renamed('deepseek_v3', 'mlp', 'block_sparse_moe'),
           'mlp.experts.c_fc': 'block_sparse_moe.experts.E.w1 block_sparse_moe.experts.E.w3',
           'mlp.experts.c_proj': 'block_sparse_moe.experts.E.w2',
           'K.attn.c_attn': 'self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.g_a_proj '
                            'self_attn.b_proj self_attn.f_a_proj',
           'attn.c_gate': 'self_attn.g_b_proj', 'attn.c_decay': 'self_attn.f_b_proj',
           'attn.A_log': 'self_attn.A_log', 'attn.dt_bias': 'self_attn.dt_bias',
           'attn.o_norm': 'self_attn.o_norm.weight', 'attn.conv':
           'self_attn.q_conv1d.weight self_attn.k_conv1d.weight self_attn.v_conv1d.weight'},
    rows={'attn.c_attn': None, 'attn.conv': rows_convolution},
    layouts={'attn.A_log': Layout(lambda w: w.flatten(), lambda w: w.view(1, 1, -1, 1))},
    rules={**MLP_TYPES, 'linear_attn_config': Rule(read_kimi_linear)})
add(
    'phi', BASE, 'PhiForCausalLM',
    fixed=dict(norm='layernorm', bias=True, head_bias=True, norm_placement='parallel',
               partial_rotary_factor=0.5),
    names={'ln_f': 'model.final_layernorm', 'attn.c_proj': 'self_attn.dense', 'mlp.c_fc': 'mlp.fc1',
           'mlp.c_proj': 'mlp.fc2'})
add('smollm3', 'llama', 'SmolLM3ForCausalLM', layers='SL', rules=NO_ROPE)
add(
    'gpt_oss', BASE, 'GptOssForCausalLM', layers='SL',
    fields=dict(EXPERTS, mlp='', mlp_limit='swiglu_limit'),
    fixed=dict(mlp='swiglu_oai', attn_sink=True, mlp_bias=True),
    names={**FUSED_EXPERTS, 'mlp.router': 'mlp.router',
           'mlp.experts.c_fc.bias': 'mlp.experts.gate_up_proj_bias',
           'mlp.experts.c_proj.bias': 'mlp.experts.down_proj_bias'},
    rows={'mlp.experts.c_fc': ordered('gu', 'gu', groups='d_expert')}, layouts=TRANSPOSED_EXPERTS)
add(
    'minimind', 'qwen3_moe', 'MiniMindForCausalLM', exports=False,  # transformers lacks it
    rules={'use_moe n_routed_experts': Rule(read_minimind)})
add(
    'qwen2_moe', 'qwen2', 'Qwen2MoeForCausalLM', layers='L',
    fields=same('qkv_bias'),
    fixed=dict(shared_gate=True), names=SHARED_NAMES,
    rules=DENSE_LAYERS | SHARED_EXPERT)
add('qwen3_5_text', 'qwen3_5_moe_text', 'Qwen3_5ForCausalLM', fixed=dict(shared_gate=None),
    rules=dict.fromkeys(SHARED_EXPERT))
add(
    'gemma', 'gemma2', 'GemmaForCausalLM', layers='L', fixed=dict(norm_placement='pre'),
    rules={'query_pre_attn_scalar': None,
           **only('hidden_act', lambda args: ('gelu', 'gelu_pytorch_tanh'))})  # synonyms in Gemma
add(
    'phi3', 'mistral', 'Phi3ForCausalLM', fixed=dict(partial_rotary_factor=1.0),
    names={'attn.c_attn': 'self_attn.qkv_proj', 'mlp.c_fc': 'mlp.gate_up_proj'})
add(
    'glm4', 'glm', 'Glm4ForCausalLM', fixed=dict(norm_placement='sandwich'),
    names={'ln_2': 'post_self_attn_layernorm', 'ln_3': 'post_attention_layernorm',
           'ln_4': 'post_mlp_layernorm'})
add(
    'hyperclovax', 'llama', 'HyperCLOVAXForCausalLM', fixed=dict(norm_placement='sandwich'),
    fields=dict(embed_scale='embedding_multiplier', attn_scale='attention_multiplier',
                logit_scale='logits_scaling'),
    names={'ln_2': 'post_norm1', 'ln_3': 'post_attention_layernorm', 'ln_4': 'post_norm2'})
add(
    'cohere2', 'cohere', 'Cohere2ForCausalLM', layers='SSSL',
    rules=ROPE_WHERE_SHORT)
add(
    'exaone4', 'olmo2', 'Exaone4ForCausalLM', layers='SSSL',
    fixed=dict(qk_norm=True), rules=ROPE_WHERE_SHORT)
add('ernie4_5', 'llama', 'Ernie4_5ForCausalLM', fields=dict(bias='use_bias'), rows=INTERLEAVED)
add('seed_oss', 'llama', 'SeedOssForCausalLM', fields=dict(proj_bias='attention_out_bias'))
add('internlm3', 'llama')
add('iquestcoder', 'llama', exports=False)  # AutoModelForCausalLM lacks it
add('ministral', 'mistral', 'MinistralForCausalLM', layers='S' * 999 + 'L')
add('ministral3', 'mistral', 'Ministral3ForCausalLM', rules=LENGTH_SCALE)
add(
    'mistral4', 'youtu', 'Mistral4ForCausalLM', exports=False,  # AutoModelForCausalLM lacks it
    fixed=dict(partial_rotary_factor=1.0),
    rules=LENGTH_SCALE)
add('mellum', 'qwen3', 'MellumForCausalLM', layers='L' * 999 + 'S', fixed=dict(local={}), rules=MLP_TYPES)
add(
    'granite_swa', 'granite', 'GraniteSWAForCausalLM', layers='LSSS', fixed=dict(attn_sink=True),
    rules={'layer_rope_theta': Rule(read_layer_rope, write_layer_rope)})
add(
    'granitemoe_swa', 'granite_swa', 'GraniteMoeSWAForCausalLM', fields=EXPERTS, names={
        **GRANITE_SHARED, 'mlp.router': 'block_sparse_moe.router',
        'mlp.experts.c_fc.weight': 'block_sparse_moe.experts.gate_up_proj',
        'mlp.experts.c_proj.weight': 'block_sparse_moe.experts.down_proj'},
    rules=shared_width('shared_intermediate_size'))
add(
    'starcoder2', 'mistral', 'Starcoder2ForCausalLM', fields=dict(bias='use_bias'),
    fixed=LAYERNORM,
    names={'mlp.c_fc': 'mlp.c_fc', 'mlp.c_proj': 'mlp.c_proj'})
add('jais2', 'arcee', 'Jais2ForCausalLM', fixed=LAYERNORM)
add(
    'apertus', 'arcee', 'ApertusForCausalLM',
    exports=False,
    fixed=dict(qk_norm=True),
    names={'ln_1': 'attention_layernorm', 'ln_2': 'feedforward_layernorm',
           'mlp.act.alpha_p': 'mlp.act_fn.alpha_p', 'mlp.act.alpha_n': 'mlp.act_fn.alpha_n'})
add(
    'nanochat', BASE, 'NanoChatForCausalLM',
    fixed=dict(qk_norm='rotated', norm_weight=False, embed_norm=True),
    names={'mlp.c_fc': 'mlp.fc1', 'mlp.c_proj': 'mlp.fc2'}, rows={'attn.c_attn': rows_swapped})
add(
    'opt', 'jais2', 'OPTForCausalLM', layer='model.decoder.layers.N.',
    fields=dict(bias='enable_bias', norm_weight='layer_norm_elementwise_affine',
                norm_bias='layer_norm_elementwise_affine'),
    fixed=dict(norm_eps=1e-5, pos='learned'),
    names={'wte': 'model.decoder.embed_tokens', 'wpe': 'model.decoder.embed_positions',
           'ln_f': 'model.decoder.final_layer_norm', 'ln_1': 'self_attn_layer_norm',
           'ln_2': 'final_layer_norm', 'attn.c_proj': 'self_attn.out_proj', 'mlp.c_fc': 'fc1',
           'mlp.c_proj': 'fc2'},
    layouts={'wpe.weight': AFTER_TWO},
    rules={**only('word_embed_proj_dim', lambda args: (None, args['n_embd'])),
           '_remove_final_layer_norm init_std layerdrop': UNUSED})
add(
    'glm4_moe', DEEPSEEK_EXPERTS, 'Glm4MoeForCausalLM', fields=dict(proj_bias='', qk_norm='use_qk_norm'),
    fixed=dict(partial_rotary_factor=0.5))
add('solar_open', DEEPSEEK_EXPERTS, 'SolarOpenForCausalLM', fields=dict(proj_bias=''))
add(
    'dots1', DEEPSEEK_EXPERTS, 'Dots1ForCausalLM', layers='SL',
    fixed=dict(qk_norm=True))
add(
    'exaone_moe', 'dots1', 'ExaoneMoeForCausalLM', layers='SSSL',
    names={'mlp.expert_bias': 'mlp.e_score_correction_bias'},
    rules=MLP_TYPES | LOCAL_ROPE)
add(
    'afmoe', DEEPSEEK_EXPERTS, 'AfmoeForCausalLM', layers='SSSL',
    fields=dict(routed_scaling_factor='route_scale', qkv_bias='', proj_bias=''),
    fixed=dict(qk_norm=True, attn_gate=True, norm_placement='sandwich'),
    names={**WITH_GATE, 'ln_3': 'pre_mlp_layernorm', 'ln_4': 'post_mlp_layernorm',
           'mlp.router': 'mlp.router.gate', 'mlp.expert_bias': 'mlp.expert_bias'},
    rules=LOCAL_ROPE | converted(
        'embed_scale', 'mup_enabled', lambda given, args: args['n_embd'] ** 0.5 if given else 1.0,
        lambda config: config.embed_scale != 1))
add(
    'hy_v3', DEEPSEEK_EXPERTS, 'HYV3ForCausalLM',
    fields=dict(routed_scaling_factor='router_scaling_factor', n_dense_layer='first_k_dense_replace'),
    fixed=dict(qk_norm=True, n_dense_layer=1),
    names={'mlp.router': 'mlp.router.gate', 'mlp.expert_bias': 'mlp.expert_bias', **SHARED_MLP},
    rules={**MLP_TYPES, 'enable_moe_fp32_combine': UNUSED})
add(
    'minimax_m2', 'mixtral', 'MiniMaxM2ForCausalLM', layers='L',
    fixed=dict(qk_norm='whole', router='sigmoid', balance_bias=True,
               partial_rotary_factor=1.0),
    names={'mlp.expert_bias': 'block_sparse_moe.e_score_correction_bias'},
    rules=converted('partial_rotary_factor', 'rotary_dim', lambda given, args: given / head_width(args),
                    lambda config: config.rope_dim))
add(
    'ernie4_5_moe', 'llama', 'Ernie4_5_MoeForCausalLM',
    fixed=dict(balance_bias=True),
    rules={**only('moe_layer_end_index', lambda args: (None, -1, args['n_layer'] - 1)),
           'moe_norm_min': UNUSED},
    names={'mlp.expert_bias': 'mlp.moe_statics.e_score_correction_bias'},
    rows=INTERLEAVED, layouts={'mlp.expert_bias': ROW})
add(
    'glm4_moe_lite', 'deepseek_v3', 'Glm4MoeLiteForCausalLM',
    fields=dict(qk_rope_head_dim='qk_rope_head_dim head_dim', n_dense_layer='first_k_dense_replace'),
    fixed=dict(n_dense_layer=1),
    rules=MLP_TYPES)
add('glm_moe_dsa', 'deepseek_v32', 'GlmMoeDsaForCausalLM')
add(
    'hunyuan_v1_moe', 'hunyuan_v1_dense', 'HunYuanMoEV1ForCausalLM', fixed=dict(n_shared_expert=1),
    names={'mlp.router': 'mlp.gate.wg', **SHARED_MLP})
add(
    'llama4_text', BASE, 'Llama4ForCausalLM', exports=False,
    fields=dict(EXPERTS, d_ff='intermediate_size_mlp'),
    fixed=dict(qk_norm='unit', n_shared_expert=1, router='sigmoid',
               norm_topk_prob=False, expert_input_scale=True),
    names={'mlp.c_fc': 'feed_forward.gate_proj feed_forward.up_proj',
           'mlp.c_proj': 'feed_forward.down_proj', 'mlp.router': 'feed_forward.router',
           'mlp.experts.c_fc.weight': 'feed_forward.experts.gate_up_proj',
           'mlp.experts.c_proj.weight': 'feed_forward.experts.down_proj',
           'mlp.shared.c_fc': 'feed_forward.shared_expert.gate_proj feed_forward.shared_expert.up_proj',
           'mlp.shared.c_proj': 'feed_forward.shared_expert.down_proj'},
    rows=INTERLEAVED,
    layouts=TRANSPOSED_EXPERTS,
    rules={**NO_ROPE, 'attention_chunk_size attn_temperature_tuning attn_scale floor_scale use_qk_norm':
           Rule(read_llama4), **every('expert_pattern', 'interleave_moe_layer_step', 'D', 'E'),
           **listed('expert_pattern', 'moe_layers', 'E', 'D')})
add('kimi_k2', 'deepseek_v3', exports=False,  # transformers lacks it
    defaults=dict(moe_layer_freq=1, scoring_func='sigmoid', topk_method='noaux_tc'))
add('olmoe', BASE, 'OlmoeForCausalLM', fields=dict(EXPERTS, clip_qkv='clip_qkv'), fixed=dict(qk_norm='whole'))
LAYER_TYPES = {  # our letter: transformers' word. Attention is S with a window, L without
    'L': 'full_attention', 'S': 'sliding_attention', 'D': 'linear_attention', 'K': 'linear_attention',
    'B': 'linear_attention', 'M': 'full_attention', 'C': 'conv'}
# GPTConfig's field: transformers' value if ours is None or 0
OFF = dict(n_group=1, topk_group=1, attn_softcap=None, logit_softcap=None, clip_qkv=None, q_lora_rank=None)
GATED_ACTIVATIONS = {  # transformers' name: ours
    'silu': 'swiglu', 'gelu_pytorch_tanh': 'geglu_tanh', 'gelu': 'geglu', 'relu': 'reglu', 'sigmoid': 'glu'}
PLAIN_ACTIVATIONS = {
    **same('gelu relu relu2 silu xielu'), 'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh',
    'gelu_fast': 'gelu_tanh'}
READ = '''
    attn_config full_attention_interval global_attn_every_n_layers layer_types layers_block_type
    max_window_layers original_max_position_embeddings partial_rotary_factor rope_local_base_freq
    rope_parameters rope_scaling rope_theta rotary_emb_base rotary_pct sliding_window sliding_window_pattern
    use_sliding_window
'''  # functions below read these


# config.json ------------------------------------------------------------------------------------------------

KNOWN = declared(ROOT / 'model.py')


def config_from_hf(c):
    """config.json -> GPTConfig. Raises UserError, naming everything unsupported."""
    try:
        config = GPTConfig(**{name: checked('config.json', name, value, KNOWN)
                              for name, value in read_config(c).items()})
        for i, length in itertools.product(range(config.n_layer), (1, config.block_size)):
            rope_table(config.at(i).rope_kind, torch.empty(1, 1), length)  # raises if rope_scaling is wrong
        return config
    except ValueError as error:
        raise UserError(error) from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise UserError(f"config.json of a {c.get('model_type')} lacks a field or has a value that does not "
                        f"fit: {error!r:.200}") from error


def read_config(c):
    c = text_config(c)
    family = family_of(c.get('model_type'))
    usual = family.defaults
    packed = c.get('quantization_config') or {}
    is_read = packed.get('quant_method') in ('mxfp4', 'fp8')
    if is_read and packed.get('weight_block_size') in (None, [128, 128]):
        c = c | {'quantization_config': None}  # zoo/hub.py reads such weights
    c = (c.get('attn_config') or {}) | c  # MPT nests these fields
    rules = ' '.join(family.rules).split()
    fields = fields_of(family)
    named = ['model_type', *rules, *itertools.chain(*fields.values())]
    c = {name: value for name, value in c.items()
         if (name in named or name in usual) and (name, value) != ('rope_parameters', None)}
    known = [*named, *READ.split()]
    refuse(c, **{name: value for name, value in c.items()
                 if name not in known and (value or None) != (usual.get(name) or None)})
    args = dict(family.fixed)
    for ours, names in fields.items():
        source = usual if c.keys().isdisjoint(names) else c
        value = next((source[name] for name in names if source.get(name) is not None), None)
        if value is None and names[0] in c and isinstance(usual.get(names[0]), bool):
            value = False
        if isinstance(value, list) and len({*value}) == 1:  # equal numbers for all layers
            value = value[0]
        if value is not None:
            args[ours] = activations_of(family).get(value, value) if ours == 'mlp' else value
    refuse(c, **{name: value for name, value in args.items() if isinstance(value, (int, float))
                 and value > (MOST_LAYERS if name == 'n_layer' else 10**8)})
    c = dict.fromkeys(rules) | usual | c
    read_layers(c, args, family)
    if args.get('pos', 'rope') == 'rope':
        read_rope(c, args)
    for rule in family.rules.values():
        rule.read(c, args)
    if args.get('n_group', 1) == 1:
        args.update(n_group=None, topk_group=None)
    if args.get('expert_pattern'):
        args.pop('n_dense_layer', None)
    return {name: value for name, value in args.items() if value is False or value not in (None, 0)}


def fields_of(family):
    """{GPTConfig's field: config.json's fields}. Writing uses the first name; reading uses the first name
    that config.json contains."""
    usual = {ours: [name for name in family.defaults if name in theirs.split()]
             for ours, theirs in FIELDS.items()}
    changed = {ours: theirs.split() for ours, theirs in family.fields.items()}
    return {ours: names for ours, names in (usual | changed).items() if names}


def family_of(kind):
    if kind not in FAMILIES:
        raise UserError(f"model_type={kind!r} is unsupported; these are supported: "
                        f"{', '.join(sorted(FAMILIES))}")
    return FAMILIES[kind]


def text_config(c):
    if 'text_config' not in c:
        return c
    outer = {name: c[name] for name in ('tie_word_embeddings', 'quantization_config') if name in c}
    return {**outer, 'model_type': f"{c['model_type']}_text", **c['text_config']}


def activations_of(family):
    return GATED_ACTIVATIONS if 'gate' in family.names['mlp.c_fc'] else PLAIN_ACTIVATIONS


def read_rope(c, args):
    """The older rope_scaling overrides rope_parameters, as in transformers 5.23."""
    given = c.get('rope_scaling') or c.get('rope_parameters') or {}
    local = args.pop('local', None)
    if local is None and 'full_attention' in given:
        refuse(c, rope_parameters=given)
    args.update(rope_fields(given.get('full_attention', given), c, args))
    if local is not None:
        base = c.get('rope_local_base_freq') or c['rope_theta']
        local = (c.get('rope_parameters') or given).get('sliding_attention') or {'rope_theta': base}
        args['local'] = rope_fields(local, c, args)
    c['rope_parameters'] = given


def rope_fields(given, c, args):
    """RoPE settings -> GPTConfig's fields. Drops options that ROPE_SCALINGS[kind] does not accept."""
    older = {'rope_theta': c.get('rotary_emb_base') or c.get('rope_theta'),
             'partial_rotary_factor': c.get('partial_rotary_factor') or c.get('rotary_pct')}
    rope = {name: value for name, value in (older | given).items() if value is not None}
    kind = rope.pop('rope_type', rope.pop('type', 'default'))
    kind = 'longrope' if 'short_factor' in rope else kind  # older files have other names
    found = {'rope_base': float(rope.pop('rope_theta', 10000.0)), 'rope_scaling': None}
    share = None if kind == 'proportional' else rope.pop('partial_rotary_factor', None)
    if 'partial_rotary_factor' in args:
        found['partial_rotary_factor'] = share or args['partial_rotary_factor']
    elif share not in (None, 1):
        refuse(c, partial_rotary_factor=share)
    if kind != 'default':
        length = args['block_size']
        trained = 'original_max_position_embeddings'
        if kind == 'dynamic':  # transformers uses max_position_embeddings
            rope.pop(trained, None)
        rope.setdefault(trained, c.get(trained) or length)
        if kind == 'longrope':
            rope.setdefault('factor', length / rope[trained])
        options = inspect.signature(ROPE_SCALINGS[kind]).parameters if kind in ROPE_SCALINGS else ()
        found['rope_scaling'] = {'rope_type': kind} | {
            name: value for name, value in rope.items() if name in options}
    return found


OLDER_LOCAL = 'gemma3_text', 'olmo3'  # they have two rotations in transformers 4


def write_rope(config, c):
    fixed = FAMILIES[c['model_type']].fixed
    both = {}
    for kind, local in ('full_attention', {}), ('sliding_attention', config.local or {}):
        fields = vars(config) | local
        both[kind] = rope = {'rope_theta': fields['rope_base'], 'rope_type': 'default',
                             **(fields['rope_scaling'] or {})}
        if rope['rope_type'] == 'ntk':
            raise UserError("transformers has no rope_scaling of rope_type 'ntk'")
        if rope['rope_type'] == 'dynamic':  # transformers uses max_position_embeddings
            del rope['original_max_position_embeddings']
        if 'partial_rotary_factor' in fixed:
            rope['partial_rotary_factor'] = fields['partial_rotary_factor']
    rope = both['full_attention']
    c['rope_parameters'] = both if 'local' in fixed else rope
    if 'local' not in fixed or c['model_type'] in OLDER_LOCAL:  # transformers 4 reads these fields
        c.update(rope_theta=config.rope_base, rope_scaling=rope if config.rope_scaling else None)
        outside = 'partial_rotary_factor', 'original_max_position_embeddings'
        c.update({name: rope[name] for name in outside if name in rope})
        if config.local:
            c['rope_local_base_freq'] = both['sliding_attention']['rope_theta']


def read_layers(c, args, family):
    size = c.get('sliding_window')
    layers = family.layers
    period = (c.get('sliding_window_pattern') or c.get('global_attn_every_n_layers')
              or c.get('full_attention_interval'))
    is_used = size and c.get('use_sliding_window', True)
    if is_used and 'S' not in layers:
        refuse(c, sliding_window=size)
    types = c.get('layer_types') or c.get('layers_block_type')
    if len({*layers}) > 1 and types:
        # mamba and attention: Granite 4
        words = {LAYER_TYPES.get(one): one for one in layers} | {'mamba': 'B', 'attention': 'L'}
        layers = ''.join(words.get(one, '?') for one in types)
    elif layers == 'SL' and 'max_window_layers' in c:  # the first layers have no window
        layers = 'L' * c['max_window_layers'] + 'S' * args['n_layer']
    elif isinstance(period, int):
        layers = layers[0] * (period - 1) + 'L'
    layers = layers[:args['n_layer']]
    if is_used:
        args.update(window=size, window_pattern=re.sub('[^S]', 'L', layers))
    if layers.strip('SL'):
        args['mixer_pattern'] = re.sub('[SL]', 'A', layers)


def write_layers(config, c, family):
    if 'S' in family.layers:
        size = config.window
        if size is None and 'L' in family.layers:  # transformers expects a number
            size = config.block_size
        c.update(sliding_window=size, use_sliding_window=config.window is not None, max_window_layers=0)
    if len({*family.layers}) > 1:
        c['layer_types'] = [LAYER_TYPES.get(config.mixer_of(i)) or
                            LAYER_TYPES['L' if config.window_of(i) is None else 'S']
                            for i in range(config.n_layer)]


def canonical(config):
    """{field: value}, to compare configs. Omits fields without effect on one document."""
    layers = range(config.n_layer)
    configs = [config.at(i) for i in layers]
    patterns = {name: letters(config, name) for name, value in vars(config).items()
                if name.endswith('_pattern') and value}
    values = {**vars(config), **patterns,
              'window_pattern': [config.window_of(i) and (config.window, letter(config.window_pattern, i))
                                 for i in layers],
              'local': [[getattr(own, name) for name in LOCAL] for own in configs],
              'attn_scale': [round(scale(own), 9) for own in configs],
              'logit_scale': round(config.logit_scale, 9),
              'd_ff': config.d_ff if 'D' in patterns['expert_pattern'] else None,
              'bias': None, 'n_dense_layer': None, 'window': None,  # other entries cover these
              'document_token': None}
    return {name: value for name, value in values.items()
            if 'training' not in KNOWN[name].rules and not unmet(KNOWN[name].rules, {}, vars(config))}


def write_config(config, kind):
    """The family's config.json that is nearest to config."""
    family = family_of(kind)
    if not family.exports:
        raise UserError(f"exporting {kind} models is not supported")
    c = {'model_type': kind, 'architectures': [family.arch], 'pad_token_id': None, 'bos_token_id': None,
         'eos_token_id': None}
    activations = {ours: theirs for theirs, ours in reversed(activations_of(family).items())}
    values = vars(config) | {'attn_scale': scale(config), 'mlp': activations.get(config.mlp)}
    for ours, names in fields_of(family).items():
        value = values[ours] or OFF.get(ours, values[ours])
        if value is not None or ours in OFF:
            c[names[0]] = value
    write_layers(config, c, family)
    if config.pos == 'rope' and family.fixed.get('pos', 'rope') == 'rope':
        write_rope(config, c)
    for rule in family.rules.values():
        rule.write(config, c)
    return c


def config_to_hf(config, kinds):
    """GPTConfig -> config.json of the first family that computes the same. Raises UserError, naming what
    the nearest family lacks."""
    ours = canonical(config)
    nearest = []
    for kind in kinds:
        try:
            c = write_config(config, kind)
            read = canonical(config_from_hf(c))
        except (LookupError, TypeError, ValueError) as error:
            if len(kinds) == 1:
                raise UserError(f"this model cannot be written as {kind}: {error}") from error
            continue
        lacks = [name for name in ours if ours[name] != read.get(name)]
        if not lacks:
            return c
        nearest.append((kind, lacks))
    kind, lacks = min(nearest, key=lambda one: len(one[1]))
    lacks = ', '.join(f"{name}={getattr(config, name)!r}" for name in lacks)
    raise UserError(f"the nearest published family, {kind}, has no {lacks}; choose one with --family=")


# tensors ----------------------------------------------------------------------------------------------------

Stored = collections.namedtuple('Stored', 'open name shape kind')  # open().get_tensor(name) reads it
Part = collections.namedtuple('Part', 'name index layout')  # stored name; index into our tensor


def plan(model, family, rename=str):
    """{name in state_dict(): [Part, ...]}. rename: converts the family's names."""
    config = model.config
    plans = {}
    for ours, w in model.state_dict().items():
        if ours.startswith('mtp.'):  # only training uses it
            continue
        layer, name = re.fullmatch(r'(?:h\.(\d+)\.)?(.*)', ours).groups()
        module, _, kind = name.rpartition('.')
        mixer = config.mixer_of(int(layer)) if layer else ''
        keys = f'{mixer}.{name}', name, f'{mixer}.{module}', module

        key = next((key for key in keys if key in family.names), None)
        if key is None:
            raise UserError(f"{family.arch} has no name for {ours}: add one to zoo/families.py")
        theirs = family.names[key]
        prefix = ''
        if layer:
            prefix = (family.layer(config, int(layer), name) if callable(family.layer)
                      else family.layer.replace('N', layer))
        suffix = '' if key.endswith(name) else f'.{kind}'
        theirs = [prefix + one + suffix for one in (theirs(config) if callable(theirs) else theirs).split()]

        widths = getattr(model.get_submodule(ours.rpartition('.')[0]), 'widths', None) or [len(w)]
        order = next((family.rows[key] for key in keys if key in family.rows), None)
        if order:
            rows = order(config, *torch.arange(sum(widths)).split(widths))
        else:  # one projection per name; the last name has the rest
            theirs = theirs[:len(widths)]  # Gemma 4 may have no v_proj
            ends = itertools.accumulate(widths[:len(theirs) - 1])
            rows = [slice(*both) for both in itertools.pairwise([0, *ends, None])]

        # an index is (expert, row) or (row,)
        layout = family.layouts.get(name, SAME)
        experts = range(len(w)) if '.E.' in theirs[0] else [slice(None)]
        is_experts = module.startswith('mlp.experts')
        plans[ours] = [
            Part(rename(one.replace('.E.', f'.{e}.')), (e, row) if is_experts else (row,), layout)
            for e in experts for one, row in zip(theirs, rows, strict=True)]
    return plans


@torch.no_grad()
def their_tensors(model, parts, dtype):
    """{name: tensor in the family's layout}. dtype: for parameters; None: unchanged."""
    state = model.state_dict()
    buffers = dict(model.named_buffers())
    return {part.name: part.layout.write(state[ours][part.index]).to(
                None if ours in buffers else dtype).contiguous()
            for ours in parts for part in parts[ours]}

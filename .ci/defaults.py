"""Writes zoo/defaults.json: {model_type: {field: default}} of the fields that transformers' configuration and
model read, without the harmless ones. `python .ci/defaults.py` needs transformers."""
import dataclasses
import fnmatch
import inspect
import json
import re
import sys
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zoo import families

HARMLESS = '''
    _* add_cross_attention name name_or_path architectures attention_softmax_in_fp32 *_attentions auto_map
    *aux_loss* bad_words_ids begin_suppress_tokens cache_implementation chunk_size diversity_penalty
    do_sample *dropout* dtype early_stopping encoder_no_repeat_ngram_size eos_token_ids
    exponential_decay_length_penalty forced_* *hidden_states id2label init_device init_std
    *initializer_range is_decoder label2id language layerdrop learned_pos_emb length_penalty logits_to_keep
    *loss_alpha *loss_coef* mamba_ssm_*dtype max_length max_sequence_length min_length mtp_*
    no_repeat_ngram_size output_router_logits output_scores *_pdrop prefix pretraining_tp problem_type
    remove_invalid_values reorder_and_* repetition_penalty rescale_prenorm_residual residual_in_fp32
    return_dict return_dict_in_generate router_jitter_noise *scale_attention_softmax_in_fp32 seq_aux
    slow_but_exact summary_* suppress_tokens task_* temperature tf_legacy_loss time_step_floor time_step_max
    time_step_min [!n]*_token *_token_id tokenizer_class top_k top_p torch_dtype torchscript
    transformers.js_config transformers_version typical_p num_beam_groups num_beams num_labels
    num_logits_to_keep num_mtp_* num_nextn_predict_layers num_return_sequences use_bfloat16 use_cache
    use_mamba_kernels z_loss_coefficient
'''  # these have no effect on logits
HARMLESS_IN = {  # model_type: further patterns
    'gemma4_text': 'use_double_wide_mlp vocab_size_per_layer_input',  # supported sizes have no such layers
    'gemma4_unified_text': 'use_double_wide_mlp', 'gpt_neox': 'head_dim', 'bamba': 'mamba_d_head',
    'granitemoehybrid': 'mamba_d_head', 'ernie4_5_moe': 'moe_norm_min', 'hy_v3': 'enable_moe_fp32_combine',
    'nemotron_h': 'attention_bias expand moe_shared_expert_overlap n_shared_experts'}
LATENT = 'head_dim num_key_value_heads index_[!t]* index_topk_* indexer_types'  # with kv_lora_rank
KIMI_K2 = dict(moe_layer_freq=1, scoring_func='sigmoid', topk_method='noaux_tc')  # the rest as DeepSeek-V3
SHARED = dict(is_causal=True, per_layer_config=None, quantization_config=None)
MINIMIND = SHARED | dict.fromkeys(('rope_scaling', 'rope_theta'))


def fields_of(cls):
    return {one.name: one.default for one in dataclasses.fields(cls)}


def defaults_of(kind):
    """{field: default} of what transformers' configuration and model of this model_type read, without
    harmless fields. None: an older name, or optional."""
    config = transformers.AutoConfig.for_model(kind)
    cls = type(config)
    found = fields_of(cls)
    if found.get('attn_config', 1) is None:  # MPT's
        found |= fields_of(type(config.attn_config))
    model = Path(inspect.getfile(cls).replace('configuration_', 'modeling_'))
    optional = [*cls.attribute_map, *cls.attribute_map.values(), *re.findall(
        r'attr\((?:self\.)?config, "(\w+)', model.read_text('utf-8') if model.exists() else '')]
    older = re.findall(r'kwargs\.(?:get|pop)\(\s*"(\w+)"(?:, ([\d.]+))?', inspect.getsource(cls))
    found = dict.fromkeys(optional) | {name: json.loads(value or 'null') for name, value in older} | found
    found |= {new: found[old] for old, new in cls.attribute_map.items() if found[new] is None}
    if 'rope_parameters' in found:
        found = dict.fromkeys(('partial_rotary_factor', 'rope_scaling')) | found
        base = cls.default_theta
        found['rope_theta'] = base = found.get('rope_theta') or base
        if isinstance(base, dict):
            found |= {'rope_theta': base['global'], 'rope_local_base_freq': base['local']}
        elif kind != 'apertus' and (  # published files of Apertus without rope_scaling have no scaling
                config.rope_parameters.keys() - {'rope_theta', 'rope_type', 'partial_rotary_factor'}):
            found['rope_parameters'] = config.rope_parameters
    unneeded = {*fields_of(transformers.PreTrainedConfig), *SHARED}
    ours = ' '.join(families.FAMILIES[kind].fields.values()).split()
    patterns = f"{HARMLESS} {HARMLESS_IN.get(kind, '')} {LATENT if 'kv_lora_rank' in ours else ''}".split()
    return SHARED | json.loads(json.dumps({
        name: value for name, value in found.items() if name not in unneeded and (
            name in ours or not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))}))


def all_defaults():
    found = {kind: defaults_of(kind) for kind in families.FAMILIES if kind not in ('kimi_k2', 'minimind')}
    return found | {'kimi_k2': found['deepseek_v3'] | KIMI_K2, 'minimind': MINIMIND}


if __name__ == '__main__':
    lines = [f'{json.dumps(kind)}: {json.dumps(found)}' for kind, found in all_defaults().items()]
    Path(families.__file__).with_name('defaults.json').write_text('{\n' + ',\n'.join(lines) + '\n}\n')

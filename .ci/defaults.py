"""Writes zoo/defaults.json: {model_type: {field: default}} of the fields that transformers' configuration and
model read. `python .ci/defaults.py` needs transformers."""
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
    _* *aux_loss* *dropout* *initializer_range *loss_coef* mtp_* num_logits_to_keep num_mtp_*
    num_nextn_predict_layers output_router_logits *_pdrop pretraining_tp router_jitter_noise summary_*
    *_token_id use_cache
'''  # only training, generation or classification use these. A family's own are UNUSED in its row
SHARED = dict(is_causal=True, per_layer_config=None, quantization_config=None)
ALWAYS = '''
    vocab_size tie_word_embeddings head_dim max_position_embeddings num_hidden_layers num_attention_heads
    num_key_value_heads hidden_size intermediate_size rms_norm_eps hidden_act attention_bias num_experts
    num_experts_per_tok moe_intermediate_size norm_topk_prob rope_scaling rope_theta
'''  # MiniMind's config.json has all fields of its class, which transformers lacks
MINIMIND = SHARED | dict.fromkeys(ALWAYS.split())


def fields_of(cls):
    return {one.name: one.default for one in dataclasses.fields(cls)}


def defaults_of(kind):
    """{field: default} of what transformers' configuration and model of this model_type read, without
    HARMLESS fields. None: an older name, or optional."""
    config = transformers.AutoConfig.for_model(kind)
    cls = type(config)
    found = fields_of(cls)
    if found.get('attn_config', 1) is None:  # MPT's
        found |= fields_of(type(config.attn_config))
    model = Path(inspect.getfile(cls).replace('configuration_', 'modeling_'))
    optional = [*cls.attribute_map, *cls.attribute_map.values(), *re.findall(
        r'attr\((?:self\.)?config, "(\w+)', model.read_text('utf-8') if model.exists() else '')]
    older = re.findall(r'kwargs\.(?:get|pop)\(\s*"(\w+)"(?:, ([\d.]+))?', inspect.getsource(cls))
    found |= {name: found.get(name, json.loads(value or 'null')) for name, value in older}
    found |= {name: found.get(name) for name in optional}  # last, because exports write the first name
    found |= {new: found[old] for old, new in cls.attribute_map.items() if found[new] is None}
    if 'rope_parameters' in found:
        found |= {name: found.get(name) for name in ('partial_rotary_factor', 'rope_scaling')}
        base = cls.default_theta
        found['rope_theta'] = base = found.get('rope_theta') or base
        if isinstance(base, dict):
            found |= {'rope_theta': base['global'], 'rope_local_base_freq': base['local']}
        elif kind != 'apertus' and (  # published files of Apertus without rope_scaling have no scaling
                config.rope_parameters.keys() - {'rope_theta', 'rope_type', 'partial_rotary_factor'}):
            found['rope_parameters'] = config.rope_parameters
    unneeded = {*fields_of(transformers.PreTrainedConfig), *SHARED}
    return SHARED | json.loads(json.dumps({
        name: value for name, value in found.items() if name not in unneeded
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in HARMLESS.split())}))


def all_defaults():
    """For the families that transformers has."""
    known = transformers.CONFIG_MAPPING
    return {kind: defaults_of(kind) for kind in families.FAMILIES if kind in known} | {'minimind': MINIMIND}


if __name__ == '__main__':
    lines = [f'{json.dumps(kind)}: {json.dumps(found)}' for kind, found in all_defaults().items()]
    Path(families.__file__).with_name('defaults.json').write_text('{\n' + ',\n'.join(lines) + '\n}\n')

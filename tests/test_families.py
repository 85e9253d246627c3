"""Tests of zoo/families.py: what a config.json means to transformers."""
import copy
import json
import runpy

import pytest
from test_hub import LLAMA3, SIZES, SMALL, VARIANTS

from configurator import ROOT
from model import GPTConfig
from zoo import families

transformers = pytest.importorskip('transformers', '5.24')
maker = runpy.run_path(ROOT / '.ci/defaults.py')


def test_defaults_are_those_of_transformers():
    assert maker['all_defaults']() == families.DEFAULTS


# fields without our default: transformers would scale the rotations of all published Apertus
NEEDED = {'apertus': LLAMA3}


def saved(c):
    """What transformers makes of a config.json."""
    config = transformers.AutoConfig.for_model(**copy.deepcopy(c))
    return json.loads(json.dumps(config.to_dict(), default=str))


@pytest.mark.parametrize('kind', sorted(families.FAMILIES.keys() & transformers.CONFIG_MAPPING.keys()))
def test_omitted_fields_have_the_defaults_of_transformers(kind):
    """config.json without any field, without each field, with null instead, and with other names."""
    cls = type(transformers.AutoConfig.for_model(kind))
    options = VARIANTS.get(kind, [{}])[0]
    small = {name: value for name, value in SMALL.items() if name in maker['fields_of'](cls)} | options
    small = {name: value for name, value in small.items() if name not in cls.attribute_map}
    needed = NEEDED.get(kind, {})
    files = [{}] * (not needed)
    small |= needed
    for name in small.keys() - needed:
        files += [{one: value for one, value in small.items() if one != name}, small | {name: None}]
    files += [{old if name == new else name: value for name, value in small.items()}
              for old, new in cls.attribute_map.items() if new in small]
    compared = 0
    for c in files:
        c = {'model_type': kind, **c}
        try:
            theirs = families.config_from_hf(saved(c))
        except Exception as error:  # sizes that do not fit, or null where transformers wants a number
            assert not isinstance(error, KeyError)
            continue
        assert families.canonical(families.config_from_hf(c)) == families.canonical(theirs), c
        compared += 1
    assert compared > 4


def test_an_export_names_a_field_unless_only_training_uses_it(monkeypatch):
    config = GPTConfig(dropout=0.1)
    assert families.config_to_hf(config, ['qwen3'])['model_type'] == 'qwen3'
    without_mark = families.KNOWN['dropout']._replace(rules=[])
    monkeypatch.setitem(families.KNOWN, 'dropout', without_mark)
    with pytest.raises(ValueError, match='dropout'):
        families.config_to_hf(config, ['qwen3'])


def test_the_readme_counts_the_families():
    numbers = len(families.FAMILIES), sum(family.exports for family in families.FAMILIES.values())
    text = ' '.join((ROOT / 'README.md').read_text('utf-8').split())
    compared = families.FAMILIES.keys() & transformers.CONFIG_MAPPING.keys()
    assert f'random models of {len(compared)} families' in text
    assert '[{} families](docs/architectures.md) that load; {} can be exported'.format(*numbers) in text


def test_a_family_adds_to_its_base(monkeypatch):
    """It has the base's rules and the fields that transformers reads, and exports try it."""
    monkeypatch.setattr(families, 'FAMILIES', dict(families.FAMILIES))
    families.add('mine', 'qwen3_moe', rules={'my_norm': families.Rule(
        lambda c, args: args.update(embed_norm=bool(c['my_norm'])),
        lambda config, c: c.update(my_norm=config.embed_norm))})
    c = dict(SIZES, model_type='mine', head_dim=8, num_experts=4, num_experts_per_tok=2, rope_theta=50.0,
             mlp_only_layers=[1], my_norm=1)
    config = families.config_from_hf(c)
    assert (config.rope_base, config.embed_norm, config.expert_pattern) == (50, True, 'EDE')
    assert families.config_to_hf(config, families.FAMILIES)['model_type'] == 'mine'
    with pytest.raises(ValueError, match='mine with decoder_sparse_step=2 is unsupported'):
        families.config_from_hf(c | {'decoder_sparse_step': 2})

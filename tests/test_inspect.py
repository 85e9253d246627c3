"""Tests of examples/look_inside.py against naive loops over attention weights of transformers."""
import math
import re

import pytest
import torch
from common import run
from test_bench import save_model
from test_examples import imported

from tokenizer import make_tokenizer
from zoo import hub

EXAMPLE = 'examples/look_inside.py'
TEXT = 'a $b$\né'


def naive_numbers(weight):
    """weight: a list of a query's weights, its own token last."""
    entropy = -sum(w * math.log(w) for w in weight)
    distance = sum(w * (len(weight) - 1 - i) for i, w in enumerate(weight))
    return entropy, distance, weight[-1], weight[0]


def test_numbers_are_those_of_transformers(folder, capsys):
    transformers = pytest.importorskip('transformers')
    tok = make_tokenizer('byte')
    model = save_model('out', tok, n_layer=3, n_head=6, n_kv_head=2, n_embd=48)
    hub.save_pretrained(model, tok, 'exported')
    other = transformers.AutoModelForCausalLM.from_pretrained('exported', attn_implementation='eager')
    idx = torch.tensor([[*TEXT.encode()]])
    found = other(idx[:, :-1], output_attentions=True, output_hidden_states=True)
    hidden = found.hidden_states[1:-1]  # without the last, which is normalised
    for x in hidden:
        x.retain_grad()
    torch.nn.functional.cross_entropy(found.logits[0], idx[0, 1:]).backward()
    run('sample.py', EXAMPLE, f'--start={TEXT}', '--init_from=out', '--dtype=float32')
    out = capsys.readouterr().out
    for layer, weights in enumerate(found.attentions):
        for head, weight in enumerate(weights[0]):
            each = [naive_numbers(row[:i + 1].tolist()) for i, row in enumerate(weight)]
            row = re.search(rf'^{layer}\.{head} +(.*)$', out, re.M)[1].split()
            assert [*map(float, row)] == pytest.approx([sum(n) / len(each) for n in zip(*each)], abs=6e-4)
    with imported('look_inside') as names:
        _, sizes = names['inside'](model, idx)
    for x, pair in zip(hidden, sizes[:-1], strict=True):
        rms = [sum(n * n for n in y.flatten().tolist()) / y.numel() for y in (x, x.grad)]
        assert pair == pytest.approx([n ** 0.5 for n in rms], rel=1e-4)
    assert re.search(rf'^64 +{6 * 64 * 64 * 4 / 1e6:.1f}$', out, re.M)
    with pytest.raises(ValueError, match='needs 2'):
        run('sample.py', EXAMPLE, '--start=a')


def test_wavelengths():
    """A worked example of YaRN, as in tests/formulas.py."""
    scaling = dict(rope_type='yarn', factor=8.0, original_max_position_embeddings=500)
    for items, freq in ((), [1, 0.5, 0.25, 0.125]), (scaling.items(), [1, 0.5, 41 / 192, 17 / 192]):
        with imported('look_inside') as names:
            found = names['wavelengths']((16.0, 8, tuple(items)), 15)
        assert found.tolist() == pytest.approx([2 * math.pi / one for one in freq])

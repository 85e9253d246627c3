"""Tests examples/look_inside.py against naive loops over attention weights of transformers."""
import math
import re

import pytest
import torch
from common import run
from test_bench import save_model
from test_examples import imported

from tokenizer import make_tokenizer
from zoo import hub

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
    run('sample.py', 'examples/look_inside.py', f'--start={TEXT}', '--init_from=out', '--dtype=float32')
    out = capsys.readouterr().out
    for layer, weights in enumerate(found.attentions):
        for head, weight in enumerate(weights[0].tolist()):
            each = zip(*(naive_numbers(row[:i + 1]) for i, row in enumerate(weight)))
            row = re.search(rf'^{layer}\.{head} +(.*)$', out, re.M)[1].split()
            assert [*map(float, row)] == pytest.approx([sum(n) / len(weight) for n in each], abs=6e-4)
    assert re.search(r'^0 +6\.3 +6\.3$', out, re.M)  # the wavelength of the fastest pair: 2 pi
    with imported('look_inside') as names:
        _, sizes = names['inside'](model, idx)
    for x, pair in zip(hidden, sizes[:-1], strict=True):
        rms = [math.hypot(*y.flatten().tolist()) / y.numel() ** 0.5 for y in (x, x.grad)]
        assert pair == pytest.approx(rms, rel=1e-4)

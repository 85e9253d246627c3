"""Tests of zoo/weights.py: adapters and int8 weights."""
import pytest
import torch

import model as flat
from model import flops_per_token
from test_model import MLA, feed, near, tiny, tokens
from zoo import weights


@pytest.mark.parametrize('options, targets', [
    (dict(bias=True, n_kv_head=2, attn_gate=True), ['c_attn', 'c_proj', 'c_fc']),
    ({**MLA, 'q_lora_rank': 8}, ['attn.c_attn', 'c_q', 'c_kv', 'attn.c_proj']),  # c_kv is read, never called
    (dict(n_expert=4, n_shared_expert=1, d_expert=8), ['router', 'shared.c_fc', 'c_attn']),
    (dict(mixer_pattern='DA'), ['c_attn', '1.attn.c_proj', 'c_proj'])], ids=str)
def test_adapters_start_as_nothing_and_merge_into_the_weights(options, targets):
    model = tiny(**options)
    idx = tokens(model, 2, 16)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    logits = model(idx).detach()
    flops = flops_per_token(model)
    with pytest.raises(ValueError, match="'q_proj' is not the name of linear layers.* attn.c_attn"):
        weights.add_lora(model, 3, 6.0, [*targets, 'q_proj'])
    weights.add_lora(model, 3, 6.0, targets)
    assert torch.equal(model(idx), logits) and flops_per_token(model) < flops
    adapters = {name: w for name, w in model.state_dict().items() if '.lora_' in name}
    assert {name for name, w in model.named_parameters() if w.requires_grad} == set(adapters)
    for w in adapters.values():
        w += torch.randn_like(w) * 0.1
    model(idx, idx)[0].backward()
    assert all((w.grad is not None and bool(w.grad.any())) == w.requires_grad for w in model.parameters())
    expected = model(idx).detach()
    near(feed(model, idx, [9, 1, 6], model.make_cache(2, 16)).detach(), expected, 2e-5)
    for name, a in adapters.items():
        if name.endswith('lora_a'):  # W + alpha / rank * B A
            before[name.removesuffix('lora_a') + 'weight'] += 6 / 3 * adapters[name[:-1] + 'b'] @ a
    weights.merge_lora(model)
    torch.testing.assert_close(dict(model.state_dict()), before, atol=1e-6, rtol=1e-5)
    assert (expected - logits).abs().max() > 0.01
    near(model(idx), expected, 2e-5)


@torch.no_grad()
def test_eight_bits_stand_for_their_weights():
    """In bfloat16; test_sample.py compares float32 with the dequantized weights."""
    model = tiny(n_kv_head=2, n_expert=4, n_shared_expert=1).bfloat16()
    idx = tokens(model, 2, 12)
    exact = model(idx)
    weights.quantize_weights(model, torch.bfloat16)
    assert 0 < (model(idx) - exact).norm() < 0.05 * exact.norm()


class Outward(flat.Attention):
    def forward(self, x, context):  # reads a weight
        return super().forward(x, context) + x @ self.c_proj.weight.type_as(x)


def test_a_mixer_that_reads_a_weight_fails_in_8_bits(monkeypatch):
    monkeypatch.setitem(flat.MIXERS, 'O', Outward)
    model = tiny(mixer_pattern='O')
    idx = tokens(model, 2, 12)
    model(idx)
    weights.quantize_weights(model, torch.float32)
    with pytest.raises(TypeError, match='int8: call its layer'):
        model(idx)

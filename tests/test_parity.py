"""Modules against transformers', where it is installed."""
import pytest
import torch

import model as flat
from model import GPTConfig
from test_model import tiny

transformers = pytest.importorskip('transformers', reason='the oracle')


@pytest.mark.parametrize('kind', ['linear', 'dynamic', 'yarn', 'llama3', 'longrope'])
@pytest.mark.parametrize('factor, partial', [(1.0, 0.5), (4.0, 1.0), (4.0, 0.5)])
def test_rotary_scalings(kind, factor, partial):
    pairs = int(32 * partial) // 2
    scaling = {'rope_type': kind, 'factor': factor}
    if kind != 'linear':
        scaling['original_max_position_embeddings'] = 64
    if kind == 'llama3':
        scaling |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
    if kind == 'longrope':
        scaling |= dict(short_factor=[1.0 + i / 9 for i in range(pairs)],
                        long_factor=[2.0 + i for i in range(pairs)])
    their = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=64 if kind == 'dynamic' else 256,
        rope_parameters={**scaling, 'rope_theta': 5000.0, 'partial_rotary_factor': partial})
    freq, attention = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](their, 'cpu', seq_len=256)
    position = torch.arange(256)
    config = GPTConfig(head_dim=32, block_size=256, rope_base=5000.0, rope_scaling=scaling,
                       partial_rotary_factor=partial)
    cos, sin = flat.rope_table(config.rope_kind, position, 256)
    torch.testing.assert_close(cos, (position[:, None] * freq).cos() * attention, atol=2e-5, rtol=0)
    torch.testing.assert_close(sin, (position[:, None] * freq).sin() * attention, atol=2e-5, rtol=0)


def test_alibi_slopes():
    for n in (*range(1, 72), 112):
        theirs = transformers.models.bloom.modeling_bloom.build_alibi_tensor(
            torch.ones(1, 2), n, torch.float32)[:, 0, 1]
        assert flat.alibi_slopes(n).tolist() == pytest.approx(theirs.tolist())


@torch.no_grad()
def test_gated_deltanet():
    modeling = transformers.models.qwen3_next.modeling_qwen3_next
    config = transformers.Qwen3NextConfig(hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4,
                                          linear_key_head_dim=6, linear_value_head_dim=10,
                                          linear_conv_kernel_dim=4, num_hidden_layers=4)
    other = modeling.Qwen3NextGatedDeltaNet(config, 0).float().eval()
    model = tiny(mixer_pattern='D', linear_n_key_head=2, linear_n_value_head=4, linear_key_head_dim=6,
                 linear_value_head_dim=10, block_size=150)
    mixer = model.h[0].attn
    q, k, v, z, b, a = mixer.c_attn.weight.split(mixer.c_attn.widths)
    by_key_head = [w.unflatten(0, (2, -1)) for w in (q, k, v, z)]
    state = {'conv1d.weight': mixer.conv[:, None], 'dt_bias': mixer.dt_bias, 'A_log': mixer.A_log,
             'norm.weight': mixer.o_norm, 'out_proj.weight': mixer.c_proj.weight,
             'in_proj_qkvz.weight': torch.cat(by_key_head, dim=1).flatten(0, 1),
             'in_proj_ba.weight': torch.cat([w.unflatten(0, (2, -1)) for w in (b, a)], dim=1).flatten(0, 1)}
    other.load_state_dict(state)
    x = torch.randn(2, 150, 32)
    y = mixer(x, model.context(torch.zeros(2, 150, dtype=torch.long)))
    assert y.std() > 0.1
    torch.testing.assert_close(y, other(x), atol=1e-4, rtol=1e-4)

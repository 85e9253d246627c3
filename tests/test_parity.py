"""A module that no family of hub.py has, against transformers', where it is installed."""
import pytest
import torch

from model import make_context
from test_model import tiny

transformers = pytest.importorskip('transformers', reason='the oracle')


@torch.no_grad()
def test_gated_deltanet():
    modeling = transformers.models.qwen3_next.modeling_qwen3_next
    config = transformers.Qwen3NextConfig(hidden_size=32, linear_num_key_heads=2, linear_num_value_heads=4,
                                          linear_key_head_dim=6, linear_value_head_dim=10,
                                          linear_conv_kernel_dim=4, num_hidden_layers=4)
    other = modeling.Qwen3NextGatedDeltaNet(config, 0).float().eval()
    model = tiny(mixer_pattern='D', linear_n_key_head=2, linear_n_value_head=4, linear_key_head_dim=6,
                 linear_value_head_dim=10, block_size=150, norm_eps=1e-6)
    mixer = model.h[0].attn
    q, k, v, z, b, a = mixer.c_attn.weight.split(mixer.c_attn.widths)
    by_key_head = [w.unflatten(0, (2, -1)) for w in (q, k, v, z)]
    state = {'conv1d.weight': mixer.conv[:, None], 'dt_bias': mixer.dt_bias, 'A_log': mixer.A_log,
             'norm.weight': mixer.o_norm, 'out_proj.weight': mixer.c_proj.weight,
             'in_proj_qkvz.weight': torch.cat(by_key_head, dim=1).flatten(0, 1),
             'in_proj_ba.weight': torch.cat([w.unflatten(0, (2, -1)) for w in (b, a)], dim=1).flatten(0, 1)}
    other.load_state_dict(state)
    x = torch.randn(2, 150, 32)
    y = mixer(x, make_context(model, torch.zeros(2, 150, dtype=torch.long)))
    assert y.std() > 0.1
    torch.testing.assert_close(y, other(x), atol=1e-4, rtol=1e-4)

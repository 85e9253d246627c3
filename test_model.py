"""Tests of model."""
import contextlib
import copy
import functools
import importlib
import itertools
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import experts
import mixers
import model as flat
from lab import check
from model import GPT, GPTConfig, flops_per_token, make_context
from sample import load

ROOT = Path(flat.__file__).resolve().parent
formulas = importlib.import_module('formulas')  # lab/check.py has added its folder to the path


def near(a, b, tolerance=1e-4):
    assert (a - b).abs().max() <= tolerance * b.abs().max(), ((a - b).abs().max(), b.abs().max())


MLA = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12)


STATES = dict(linear_n_key_head=2, linear_n_value_head=2, linear_key_head_dim=8, linear_value_head_dim=8)


YARN = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 12}


CHOICES = {  # axes of the pairwise grid; {}: GPTConfig's defaults
    'attention': [{}, dict(n_kv_head=2), dict(n_kv_head=1, head_dim=10, qk_norm='whole', attn_scale=0.2),
                  MLA, {**MLA, 'q_lora_rank': 12, 'latent_norm_eps': 0.1},
                  dict(n_kv_head=2, attn_sink=True, qk_norm=False, clip_qkv=0.3),
                  dict(qk_norm='rotated', query_scale={'beta': 0.5, 'length': 4, 'start': 1, 'layers': 'N'}),
                  dict(n_kv_head=2, k_eq_v=True, v_norm=True),
                  dict(n_kv_head=1, qk_norm='unit', query_scale={'beta': 0.5, 'length': 3, 'start': 1},
                       partial_rotary_factor=0.5)],
    'position': [{}, dict(rope_scaling={**YARN, 'mscale': 0.7, 'mscale_all_dim': 0.9}),
                 dict(pos_pattern='NP'), dict(pos='alibi'), dict(pos='learned'), dict(pos='sinusoidal'),
                 dict(pos='none'), dict(pos='alibi', pos_pattern='PN', alibi_scale=0.5)],
    'window': [{}, dict(window=5, window_pattern='S'), dict(window=5, window_pattern='SL'),
               dict(window=5, window_pattern='CL'), dict(window=4, window_pattern='GS', window_global=2),
               dict(window=5, window_pattern='LS', local={'rope_base': 20.0, 'rope_scaling': YARN}),
               dict(window=5, window_pattern='SL', local={'head_dim': 12, 'n_kv_head': 4, 'k_eq_v': False})],
    'norm': [{}, dict(norm='layernorm', bias=True), dict(norm_placement='post'),
             dict(norm_placement='output', embed_norm=True, residual_scale=0.6),
             dict(norm_placement='sandwich', attn_softcap=3.0, layer_scalar=True, residual_scale=1.5),
             dict(norm_placement='parallel', norm='layernorm'),
             dict(norm_placement='parallel_2', residual_scale=0.7),
             dict(residual_lambdas=True, norm_bias=True), dict(norm_weight=False)],
    'mlp': [{}, dict(mlp='gelu_tanh'),
            dict(mlp='relu2', logit_scale=0.6, logit_softcap=5.0, tie_word_embeddings=False, head_bias=True),
            dict(mlp='xielu', expert_pattern='DN'), dict(mlp='swiglu_oai', mlp_limit=1.0),
            dict(n_expert=4, n_shared_expert=1, shared_gate=True, d_expert=24, expert_input_scale=True),
            dict(n_expert=4, n_expert_active=3, router='sigmoid', balance_bias=True, n_dense_layer=1,
                 d_expert=20, norm_topk_prob=False, routed_scaling_factor=2.5),
            dict(n_expert=4, n_shared_expert=2, d_expert=20, expert_norms=True, norm_placement='sandwich'),
            dict(n_expert=6, n_group=3, topk_group=2, expert_pattern='DE', mlp='gelu', mlp_bias=True,
                 router='sigmoid', balance_per_sequence=True)],
    'documents': [{}, dict(document_token=3), dict(mtp=True), dict(embed_scale=3.0)],
    'mixer': [{}, dict(mixer_pattern='DA', linear_n_key_head=2, linear_n_value_head=4),
              dict(attn_gate=True), dict(attn_gate='head'), dict(mixer_pattern='MD'),
              dict(mixer_pattern='D', linear_key_head_dim=6, linear_value_head_dim=10,
                   linear_conv_kernel_dim=2),
              dict(mixer_pattern='CA'), dict(mixer_pattern='KA', linear_key_head_dim=6),
              dict(mixer_pattern='CB', linear_n_key_head=2, linear_n_value_head=4, linear_key_head_dim=6),
              dict(mixer_pattern='B', linear_conv_bias=False, linear_value_head_dim=5)],
}


TINY = dict(n_layer=2, n_head=4, n_embd=32, block_size=24, vocab_size=61, norm_eps=1e-3)


def combined(row):
    """The options of a row {axis: index of its choice}."""
    return {key: value for name, i in row.items() for key, value in CHOICES[name][i].items()}


def is_valid(row):
    try:
        GPTConfig(**{**TINY, **combined(row)})
        return True
    except ValueError:
        return False


def pairs(row):
    return set(itertools.combinations(row.items(), 2))


def pairwise(axes):
    """Few rows in which every valid pair of choices of two axes occurs, by a greedy search."""
    generator = random.Random(0)
    rows = []
    nothing = dict.fromkeys(axes, 0)
    choices = [(name, i) for name in axes for i in range(len(axes[name]))]
    left = {both for both in itertools.combinations(choices, 2) if both[0][0] != both[1][0]
            and is_valid(dict(both))}
    while left:
        first = dict(min(left))
        tries = [{name: generator.randrange(len(axes[name])) for name in axes} | first for _ in range(30)]
        rows.append(max([*filter(is_valid, tries), nothing | first], key=lambda row: len(pairs(row) & left)))
        left -= pairs(rows[-1])
    return rows


def grid_name(options):
    return ' '.join(f'{k}={v}' for k, v in options.items() if k != 'rope_scaling')[:150] or 'default'


GRID = [combined(row) for row in pairwise(CHOICES)]


def small(**options):
    """The config of lab/check.py's small model with these options."""
    return check.tiny_config(GPTConfig(**{**TINY, **options}))


@pytest.fixture(autouse=True)
def same_start():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tensors are small: a second thread only waits


def tiny(**options):
    """A model in which every weight matters, because none is zero or one."""
    torch.manual_seed(0)
    return check.randomized(GPTConfig(**{**TINY, **options}))


def tokens(model, *shape):
    """Random tokens. If the model has documents, some of the tokens start one."""
    idx = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    if model.config.document_token is not None:
        idx[idx % 7 == 0] = model.config.document_token
    return idx


@pytest.mark.parametrize('options', [*GRID, *(dict(mlp=name) for name in flat.ACTIVATIONS)], ids=grid_name)
def test_modules_equal_the_formulas_of_papers(options):
    config = small(**options)
    check.check_formulas(config)
    if config.document_token is not None:
        check.check_documents(config)


def as_on_cuda(monkeypatch):
    """Makes all caches static, as in compiled steps, and computes attention as on CUDA."""
    plan = flat.sdpa_plan
    make_cache = GPT.make_cache
    kernel = F.scaled_dot_product_attention

    def memory_efficient(*args, enable_gqa, **options):  # stores its result as (B, queries, heads, D)
        assert not enable_gqa  # this kernel does not support groups
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # cuDNN is only for training
        return kernel(*args, **options).transpose(1, 2).contiguous().transpose(1, 2)
    monkeypatch.setattr(F, 'scaled_dot_product_attention', memory_efficient)
    monkeypatch.setattr(flat, 'sdpa_plan', lambda device, *args: plan('cuda', *args))
    monkeypatch.setattr(GPT, 'make_cache', lambda *args, **options: make_cache(
        *args, **{**options, 'static': True}))


@pytest.mark.parametrize('options', GRID, ids=grid_name)
def test_cached_equals_uncached(options, monkeypatch):
    check.check_cache(small(**options))
    if options in GRID and options not in GRID[::3]:  # every third takes long enough
        return
    as_on_cuda(monkeypatch)
    check.check_cache(small(**options))


@pytest.mark.parametrize('options', GRID, ids=grid_name)
def test_every_parameter_learns(options):
    model = tiny(**options).train()
    idx = tokens(model, 3, 24)
    loss, aux = model(idx[:, :-1], idx[:, 1:])
    (loss + aux.get('mtp', 0)).backward()
    without = [name for name, w in model.named_parameters()
               if w.grad is None or not w.grad.abs().max() > 1e-7]
    # a bias of all keys cancels in the softmax, unless it is rotated
    assert not [name for name in without if not name.endswith('k_norm.bias')]


@pytest.mark.parametrize('options', [
    dict(n_kv_head=2, attn_sink=True, attn_softcap=3.0, attn_gate='head', norm_placement='sandwich'),
    dict(q_lora_rank=12, residual_lambdas=True, mtp=True, **MLA),
    dict(n_expert=6, n_group=3, topk_group=2, n_shared_expert=1, shared_gate=True, mlp_bias=True),
    dict(n_expert=4, router='sigmoid', expert_input_scale=True),
    dict(mixer_pattern='DABKC', n_layer=5, **STATES)], ids=grid_name)
def test_gradients_equal_differences(options):
    check.check_gradients(small(**options))


@pytest.mark.parametrize('name, length, options, freq, factor', formulas.EXAMPLES, ids=str)
def test_scalings_equal_worked_examples(name, length, options, freq, factor):
    found = flat.ROPE_SCALINGS[name](0.5 ** torch.arange(4), 16.0, length, factor=8.0, **options)
    torch.testing.assert_close(found, (torch.tensor(freq, dtype=torch.float), float(factor)))


@pytest.mark.parametrize('options', [
    dict(norm='layernorm', bias=True, norm_placement='output', attn_gate=True, residual_lambdas=True),
    dict(norm_placement='post', mixer_pattern='DA', n_expert=4, n_shared_expert=1, shared_gate=True),
    dict(embed_norm=True, attn_sink=True, **MLA)], ids=grid_name)
def test_dropout_is_where_it_should_be(options):
    check.check_dropout(small(**options))


@pytest.mark.parametrize('options, fields', [
    ({}, """block_size=1024 vocab_size=50304 n_layer=12 n_head=12 n_kv_head=12 n_embd=768 head_dim=64
     d_ff=2048 mlp=swiglu norm_eps=1e-06 rope_base=10000.0 qk_norm=True tie_word_embeddings=True dropout=0.0
     pos=rope pos_pattern=P rope_scaling=None partial_rotary_factor=1.0 alibi_scale=1.0 document_token=None
     mixer_pattern=A window=None window_pattern=None window_global=1 local=None attn_scale=None
     attn_softcap=0.0 attn_sink=False attn_gate=False clip_qkv=0.0 k_eq_v=False v_norm=False query_scale=None
     norm=rmsnorm norm_bias=False norm_weight=True norm_placement=pre embed_norm=False embed_scale=1.0
     residual_scale=1.0 residual_lambdas=False layer_scalar=False mlp_limit=7.0 bias=False qkv_bias=False
     proj_bias=False mlp_bias=False n_expert=None expert_pattern=E n_shared_expert=None shared_gate=False
     n_dense_layer=0 expert_input_scale=False expert_norms=False router=softmax norm_topk_prob=True
     routed_scaling_factor=1.0 n_group=None topk_group=None balance_bias=False balance_per_sequence=False
     head_bias=False logit_scale=1.0 logit_softcap=0.0 mtp=False"""),
    (dict(kv_lora_rank=512), """mixer_pattern=M qk_norm=False q_lora_rank=None qk_nope_head_dim=128
     qk_rope_head_dim=64 v_head_dim=128 latent_norm_eps=1e-06"""),
    (dict(mixer_pattern='D'), """linear_n_key_head=12 linear_n_value_head=12 linear_key_head_dim=64
     linear_value_head_dim=64 linear_conv_kernel_dim=4"""),
    (dict(mixer_pattern='B'), """linear_n_key_head=1 linear_n_value_head=24 linear_key_head_dim=64
     linear_value_head_dim=64 linear_conv_bias=True linear_conv_kernel_dim=4"""),
    (dict(mixer_pattern='C'), 'linear_conv_kernel_dim=4'), (dict(n_embd=100, n_head=5), 'd_ff=320'),
    (dict(mlp='gelu', n_embd=100, n_head=5), 'd_ff=400'),
    (dict(n_expert=8, d_ff=100), 'n_expert_active=2 d_expert=100'),
    (dict(bias=True), 'qkv_bias=True proj_bias=True mlp_bias=True norm_bias=False'),
    (dict(bias=True, norm='layernorm'), 'norm_bias=True'),
    (dict(pos='sinusoidal', n_embd=144), 'embed_scale=12.0')], ids=str)
def test_defaults(options, fields):
    config = GPTConfig(**options)
    for field in fields.split():
        name, value = field.split('=')
        assert str(getattr(config, name)) == value, name


@pytest.mark.parametrize('options', [
    dict(bias=True, pos='learned', attn_sink=True, residual_lambdas=True), dict(norm_placement='sandwich'),
    dict(mixer_pattern='DB', **{**STATES, 'linear_n_value_head': 64}),
    dict(tie_word_embeddings=False, head_bias=True, n_expert=4, n_shared_expert=1, balance_bias=True,
         shared_gate=True, kv_lora_rank=96, q_lora_rank=96)], ids=grid_name)
def test_groups_and_initial_values(options):
    check.check_start(GPTConfig(n_layer=2, n_head=4, n_embd=192, vocab_size=500, block_size=64, **options))


class OwnAlibi(flat.Attention):
    def attend(self, q, k, v, context):
        age = (context.positions[:, :, None] - torch.arange(k.shape[2]))[:, None]
        return super().attend(q, k, v, context, -flat.alibi_slopes(4)[:, None, None] * age)


@pytest.mark.parametrize('options', [{}, dict(window=5, window_pattern='SL', document_token=3, n_kv_head=2),
                                     dict(window=5, window_pattern='C'),
                                     dict(attn_softcap=0.5, attn_sink=True, n_kv_head=2)])
def test_flex_attention_equals_eager_attention(options, monkeypatch):
    import torch.nn.attention.flex_attention as flex
    calls = []
    kernel = flex.flex_attention
    monkeypatch.setattr(flex, 'flex_attention', lambda *args, **options: calls.append(1) or kernel(
        *args, **options))
    monkeypatch.setitem(flat.MIXERS, 'X', OwnAlibi)
    model = tiny(pos='alibi', head_dim=16, **options)
    biased = tiny(pos='none', mixer_pattern='X', head_dim=16, **options)
    idx = tokens(model, 2, 24)
    expected = model(idx)  # uses eager_attention, as gradients are on
    near(biased(idx), expected)
    with torch.no_grad():
        near(biased(idx), expected)
        monkeypatch.setattr(flat, 'use_flex', lambda *args: True)
        near(biased(idx), expected)
        assert not calls
        near(model(idx), expected)
    assert len(calls) == 2


@torch.no_grad()
def test_float16_weights_keep_a_float32_stream():
    """The sum of all branches, 180,000, exceeds the largest float16, 65,504."""
    model = tiny(n_layer=3, mlp_bias=True)
    for block in model.h:
        block.mlp.c_proj.bias += 60000 * torch.randn(len(block.mlp.c_proj.bias)).sign()
        block.mlp.c_proj.bias[0] = 60000
    idx = tokens(model, 2, 24)
    half = copy.deepcopy(model).half()
    expected = model(idx)
    near(half(idx), expected, 0.02)
    cache = half.make_cache(2, 24)
    near(half(idx[:, :20], cache=cache), expected[:, :20], 0.02)
    near(half(idx[:, 20:21], cache=cache), expected[:, 20:21], 0.02)


def feed(model, idx, chunks, cache):
    return torch.cat([model(part, cache=cache) for part in idx[:, :sum(chunks)].split(chunks, dim=1)], dim=1)


@pytest.mark.parametrize('options', [
    {}, MLA, dict(pos='none', mixer_pattern='X'), dict(window=9, window_pattern='LSC', n_layer=3)])
@torch.no_grad()
def test_chunks_on_cuda_need_no_mask(options, monkeypatch):
    monkeypatch.setitem(flat.MIXERS, 'X', OwnAlibi)
    model = tiny(**options)
    idx = tokens(model, 2, 24)
    expected = model(idx)
    monkeypatch.setattr(torch.Tensor, 'is_cuda', True)
    monkeypatch.setattr(flat, 'BLOCK', 4)
    near(feed(model, idx, [3, 5, 1, 15], model.make_cache(2, 24)), expected)


@torch.no_grad()
def test_padding_beyond_the_cache_leaves_states_finite():
    model = tiny(mixer_pattern='ADA', n_layer=3, window=3, window_pattern='S', attn_softcap=3.0, block_size=8)
    idx = tokens(model, 2, 6)
    cache = model.make_cache(2, 8, rolling=False)
    for lengths in ([6, 1], [1, 6]):
        model(idx, cache=cache, lengths=torch.tensor(lengths))
    assert all(state.isfinite().all() for layer in cache.states for state in layer)


@pytest.mark.parametrize('options, elements', [  # (slots and one for padding) times width
    (dict(window=5, window_pattern='SL', **MLA), (6 + 81) * (16 + 4)),
    (dict(mixer_pattern='DA'), 3 * 96 + 4 * 8 * 8 + 81 * 2 * 4 * 8)], ids=str)
@torch.no_grad()
def test_sizes_and_limits_of_caches(options, elements):
    model = tiny(block_size=80, **options)
    cache = model.make_cache(2, 80)
    idx = tokens(model, 2, 80)
    assert sum(t.nbytes for t in cache.tensors()[2:]) == 2 * 4 * elements
    full = model(idx)
    feed(model, idx, [4], cache)
    feed(model, idx[:, 4:], [7] * 10, cache)
    with pytest.raises(ValueError, match='cannot rewind .*rolling=False'):
        cache.rewind(torch.tensor([0, 1]))
    with torch.autocast('cpu', torch.bfloat16):
        cache = model.make_cache(2, 80)
        half = feed(model, idx, [7, 1, 72], cache)
    assert (half - full).abs().mean() < 0.1 * full.std()
    assert {tensor.dtype for layer in cache.slots for tensor in layer} == {torch.bfloat16}
    with pytest.raises(ValueError, match='cache is full'):
        model(idx[:, :1], cache=cache)


@pytest.mark.parametrize('options', [dict(window=4, window_pattern='SL'), dict(window=3, window_pattern='S')])
@torch.no_grad()
def test_a_rewound_cache_is_right_or_an_error(options):
    model = tiny(**options, block_size=10)
    idx = tokens(model, 1, 10)
    full, rewound = model(idx), []
    for length, n in itertools.combinations_with_replacement(range(1, 10), 2):
        cache = model.make_cache(1, 10)
        feed(model, idx, [1] * n, cache)
        with contextlib.suppress(ValueError):
            cache.rewind(n - length)
            near(model(idx[:, length:length + 1], cache=cache), full[:, length:length + 1])
            rewound.append((length, n))
    assert {(n, n) for n in range(1, 10)} | {(1, 2), (1, 3), (2, 3)} <= {*rewound}  # the window is not full


def pretend_device(monkeypatch):
    """Fake tensors on 'meta' behave as on a GPU: an operator rejects tensors of two devices, and values
    cannot be read, except by int(...), which returns 8."""
    importlib.import_module('torch._dynamo')  # keeps the functions that it finds when it is imported
    with torch.device('meta'):  # keeps the constructors that it finds at its first use
        torch.empty(0)
    monkeypatch.setattr(torch, 'is_autocast_enabled', lambda device: False)
    monkeypatch.setattr(torch, 'autocast', lambda device, **options: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, '__int__', lambda x: 8)
    monkeypatch.setattr(torch, 'tensor', None)  # would be copied from the host in each step
    return FakeTensorMode()


@pytest.mark.parametrize('options', [
    dict(window=5, window_pattern='SL', n_kv_head=2, residual_lambdas=True),
    dict(pos='alibi', document_token=3, n_kv_head=1, head_dim=10),
    dict(rope_scaling=YARN, window=5, window_pattern='S', **MLA),
    dict(rope_scaling=dict(rope_type='longrope', short_factor=[1.0] * 4, long_factor=[2.0] * 4, factor=2.0)),
    dict(n_expert=4, n_shared_expert=1, d_expert=24, router='sigmoid', balance_bias=True, mlp_bias=True),
    dict(mixer_pattern='DABKC', n_layer=5, **STATES, document_token=3),
    dict(pos='learned', attn_sink=True, dropout=0.1, vocab_size=64)], ids=str)
def test_all_tensors_are_on_the_models_device(options, monkeypatch):
    plan = flat.sdpa_plan
    monkeypatch.setattr(flat, 'sdpa_plan', lambda device, *args: plan('cuda', *args))
    config = GPTConfig(**{**TINY, **options})
    with pretend_device(monkeypatch):
        with torch.device('meta'):
            torch.set_default_dtype(torch.bfloat16)  # a model of fake tensors cannot be cast
            try:
                model = GPT(config)
            finally:
                torch.set_default_dtype(torch.float32)
            idx = torch.empty(3, 8, dtype=torch.long)
            lengths = idx[:, 0]
        loss, aux = model(idx, idx)
        (loss + sum(aux[name] for name in ('balance', 'z') if aux)).backward()
        if aux and config.balance_bias:
            experts.move_balance(model, aux['load'])
        assert all(w.grad.device == w.device for w in model.parameters())
        with torch.no_grad():
            for static in (False, True):
                cache = model.make_cache(3, 24, static)
                logits = model(idx, cache=cache, keep=1, lengths=lengths if static else None)[:, -1]
                token = logits.argmax(-1)
                assert model(token[:, None], cache=cache, keep=1).device == idx.device
                cache.reset()


@pytest.mark.parametrize('channels', [1, 4])
def test_the_chunked_delta_rule_is_the_recurrence(channels):
    """Also its gradients, with documents, and with decays that could overflow or vanish."""
    q, k, v = (torch.randn(2, 3, 150, width) for width in (4, 4, 6))
    decay = -torch.tensor([90.0, 1, 1e-3, 0]) * (torch.rand(2, 3, 150, 1) < 0.5)
    is_start = torch.rand(2, 150) < 0.03
    inputs = [x.requires_grad_() for x in (q, F.normalize(k, dim=-1), v, decay[..., :channels],
                                           torch.rand(2, 3, 150, 1), torch.randn(2, 3, 4, 6))]
    (y, state), (their_y, their_state) = (
        mixers.gated_delta_rule(*inputs, is_start, chunk=chunk) for chunk in (64, 1))
    near(y, their_y)
    near(state, their_state)
    for a, b in zip(*(torch.autograd.grad((out * v).sum() + last.sum(), inputs)
                      for out, last in ((y, state), (their_y, their_state)))):
        near(a, b, 1e-3)


def test_experts_without_rows_get_no_gradient_on_blackwell(monkeypatch):
    layer = experts.GroupedLinear(3, 16, (8,))
    offsets = torch.tensor([4, 4, 6], dtype=torch.int32)
    layer.weight.tag.init(layer.weight)
    kernel = F.grouped_mm
    x = torch.randn(6, 16)
    g = torch.randn(6, 8)

    def grouped_mm(x, w, offs):
        w = w.clone()
        w.register_hook(lambda grad: grad.index_fill(0, torch.tensor(1), math.nan))
        return kernel(x, w, offs=offs)
    monkeypatch.setattr(F, 'grouped_mm', grouped_mm)
    found, expected = (torch.autograd.grad((layer(x.to(dtype), offsets)[0] * g).sum(), layer.weight)[0]
                       for dtype in (torch.bfloat16, torch.float32))
    near(found, expected, 0.02)
    assert not found[1].any()


def test_router_weights_sum_to_one_despite_underflow():
    model = tiny(n_expert=4, router='sigmoid', mlp_bias=True)
    moe = model.h[0].mlp
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.bias.copy_(torch.tensor([-60.0, -60.5, -61.0, -200.0]))
    weight, chosen, _, _ = moe.route(torch.randn(7, 32))
    context = make_context(model, torch.zeros(1, 7))
    context.routing, context.learned = [], torch.ones(1, 7)
    moe(torch.randn(1, 7, 32), context)
    torch.testing.assert_close(weight.sum(-1), torch.ones(7))
    assert set(chosen.flatten().tolist()) == {0, 1} and context.routing[0][1] >= 1


def test_balance_biases_move_by_the_rate_and_are_never_rounded():
    model = tiny(n_expert=4, router='sigmoid', balance_bias=True, n_dense_layer=1).to(torch.bfloat16)
    bias = model.h[1].mlp.expert_bias
    expected = bias + torch.tensor([0.001, 0.001, -0.001, 0])
    experts.move_balance(model, torch.tensor([[1.0, 2, 6, 3]]))
    torch.testing.assert_close(bias, expected, atol=1e-6, rtol=0)


def test_a_scaling_gets_the_trained_length(tmp_path):
    """It is block_size in a new model; a loaded model with a longer context keeps its trained length."""
    short = {'rope_type': 'yarn', 'factor': 4.0}
    completed = {**YARN, 'original_max_position_embeddings': 16}
    for scaling in (None, short):  # trained without a scaling, and with one
        model = tiny(block_size=16, rope_scaling=scaling)
        torch.save({'model': model.state_dict(), 'model_args': vars(model.config)}, tmp_path / 'ckpt.pt')
        longer, _, checkpoint = load(tmp_path / 'ckpt.pt', block_size=64, rope_scaling=short)
        assert longer.config.rope_scaling == checkpoint['model_args']['rope_scaling'] == completed


def test_an_option_that_was_removed_does_no_harm_unless_it_was_used(tmp_path):
    model, path = tiny(local={'rope_base': 5.0}, norm_placement='post'), tmp_path / 'ckpt.pt'
    args = dict(vars(model.config))
    args = {'rope_local': args.pop('local'), 'wiring': args.pop('norm_placement'), **args}  # renamed since
    torch.save({'model': model.state_dict(), 'model_args': {**args, 'bigram_size': None}}, path)
    assert load(path)[0].config == model.config
    torch.save({'model': model.state_dict(), 'model_args': {**args, 'bigram_size': 40}}, path)
    with pytest.raises(ValueError, match="ckpt.pt: unknown setting 'bigram_size'"):
        load(path)


@torch.no_grad()
def test_attention_weights_on_request():
    for options in (dict(n_kv_head=2), MLA, dict(window=3, window_pattern='S')):
        model = tiny(**options)
        weights = []
        idx = tokens(model, 2, 12)
        torch.testing.assert_close(model(idx, weights=weights), model(idx), atol=1e-4, rtol=1e-4)
        for w in weights:
            torch.testing.assert_close(w.triu(1).sum(-1) + w.sum(-1), torch.ones(2, 4, 12))
    assert len(weights) == 2 and not weights[0].tril(-3).any()


def compute_blocks_twice(monkeypatch):
    make = flat.make_schedule
    monkeypatch.setattr(flat, 'make_schedule', lambda model, order: make(model, [*order, *order[::-1]]))


def test_blocks_that_compute_twice(monkeypatch):
    compute_blocks_twice(monkeypatch)
    options = dict(mixer_pattern='AD')
    test_modules_equal_the_formulas_of_papers(options)
    test_every_parameter_learns(options)
    test_cached_equals_uncached(options, monkeypatch)


@pytest.mark.parametrize('options', [
    dict(residual_lambdas=True), dict(n_kv_head=2, attn_gate=True, tie_word_embeddings=False),
    {**MLA, 'q_lora_rank': 12}, dict(window=23, window_pattern='G'),
    dict(n_expert=4, n_shared_expert=1, shared_gate=True, d_expert=24),
    *(dict(mixer_pattern=kind, linear_key_head_dim=6, linear_value_head_dim=8) for kind in 'DKBC')],
    ids=grid_name)
def test_flops_are_those_that_torch_counts(options, monkeypatch):
    """Of layers with a state, the formulas compute one token at a time."""
    if 'residual_lambdas' in options:
        compute_blocks_twice(monkeypatch)
    model = tiny(**options)
    for mixer in model.mixers if 'linear_key_head_dim' in options else ():
        formula = functools.partial(formulas.FORMULAS[type(mixer)], model.config, mixer)
        monkeypatch.setattr(mixer, 'forward', formula)
    with FlopCounterMode(display=False) as counter:  # only forward, with eager_attention, as in training
        model(tokens(model, 2, 24))
    assert 3 * counter.get_total_flops() == flops_per_token(model) * 48


ONES = dict(init=torch.nn.init.ones_)


class Forgetful(flat.Attention):
    pass


@pytest.mark.parametrize('new, message', [
    (lambda: torch.nn.Parameter(torch.ones(3)), r'h\.0\.attn\.new has no tag: make it with parameter'),
    (lambda: flat.parameter(3, **ONES, group='matrix'), r'new \(3,\) is tagged as a matrix'),
    (lambda: flat.parameter(3, 1, **ONES, group='matrix'), r'new \(3, 1\) is tagged as a matrix'),
    (lambda: flat.Linear(32, 1), r'new\.weight \(1, 32\) is tagged as a matrix'),
    (lambda: flat.parameter(3, init=torch.ones_like, group='vector'), 'new holds NaN after its init'),
    (lambda: None, 'Forgetful of layer 0 sets neither slots nor')])
def test_what_a_fork_forgets_fails_loudly(new, message, monkeypatch):
    def init(self, config, layer):
        flat.Attention.__init__(self, config, layer)
        self.slots = ()
        self.new = new()
    monkeypatch.setattr(Forgetful, '__init__', init)
    monkeypatch.setitem(flat.MIXERS, 'F', Forgetful)
    with pytest.raises(ValueError, match=message):
        tiny(mixer_pattern='F').make_cache(1, 5)


class OwnForward(flat.Block):
    def forward(self, x, context):
        return x + self.branch(self.attn(self.ln_1(x), context))


@pytest.mark.parametrize('options', [
    dict(norm_placement='output'), dict(residual_scale=0.5), dict(layer_scalar=True),
    dict(expert_pattern='N')], ids=grid_name)
def test_a_block_with_its_own_forward_rejects_variants(options, monkeypatch):
    monkeypatch.setattr(flat, 'make_block', OwnForward)
    tiny()
    with pytest.raises(ValueError, match='OwnForward needs the default .*: see Block.supports_variants'):
        tiny(**options)


def test_a_mixer_without_flops_is_reported(monkeypatch):
    class Costless(flat.Mixer):
        states = [((1,), None)]
    monkeypatch.setitem(flat.MIXERS, 'F', Costless)
    with pytest.raises(NotImplementedError, match='Costless has no flops'):
        flops_per_token(tiny(mixer_pattern='F'))


@torch.no_grad()
def test_bfloat16_is_near_float32():
    model = tiny()
    idx = tokens(model, 2, 12)
    full = model(idx).log_softmax(-1)
    with torch.autocast('cpu', torch.bfloat16):
        auto = model(idx).log_softmax(-1)
    cast = model.to(torch.bfloat16)(idx).log_softmax(-1)
    assert auto.dtype == cast.dtype == torch.float32
    assert (auto - full).abs().mean() < 0.05 * full.std() and (cast - full).abs().mean() < 0.05 * full.std()
    assert make_context(model, idx).ropes[model.config.rope_kind][0].dtype == torch.float32  # not rounded
    x, w, b = (torch.randn(*shape).bfloat16() for shape in ((1, 1, 64), (48, 64), (48,)))
    for bias in None, b:  # one token
        exact = F.linear(x.double(), w.double(), bias if bias is None else bias.double())
        torch.testing.assert_close(flat.project(x, w, bias).double(), exact, rtol=2**-8, atol=2**-8)


@torch.no_grad()
def test_norms_routers_and_states_are_float32(monkeypatch):
    """Their inputs are bfloat16, and float64 gives the same results, which norms round once."""
    route, rule = experts.MoE.route, mixers.gated_delta_rule

    def checked_route(self, x):
        found = route(self, x)
        near(found[2], F.linear(x.double(), self.router.weight.double(), self.router.bias.double()), 1e-5)
        return found

    def checked_rule(*args, **options):
        found = rule(*args, **options)
        exact = rule(*(x.double() if torch.is_tensor(x) else x for x in args), **options)
        for y, expected in zip(found, exact):
            near(y, expected, 1e-5)
        return found
    monkeypatch.setattr(experts.MoE, 'route', checked_route)
    monkeypatch.setattr(mixers, 'gated_delta_rule', checked_rule)
    model = tiny(n_expert=4, mlp_bias=True, mixer_pattern='DKB', n_layer=3, **STATES).bfloat16()
    norm, x = model.ln_f, torch.randn(9, 32).bfloat16()
    exact = F.rms_norm(x.double(), (32,), norm.weight.double(), 1e-3)
    torch.testing.assert_close(norm(x).double(), exact, rtol=2**-8, atol=0)
    cache = model.make_cache(2, 24)
    with torch.autocast('cpu', torch.bfloat16):
        feed(model, tokens(model, 2, 24), [9, 1, 14], cache)
    assert {layer[1].dtype for layer in cache.states} == {torch.float32}


def test_a_loss_in_parts_is_the_loss(monkeypatch):
    logits = torch.randn(2, 8, 61, requires_grad=True)
    targets = torch.randint(-1, 61, (2, 8))
    expected = check.cross_entropy(logits, targets)
    kernel = F.cross_entropy

    def limited(logits, *args, **options):
        assert logits.numel() <= 200  # the limit of CUDA's kernel
        return kernel(logits, *args, **options)
    monkeypatch.setattr(flat, 'MOST_LOGITS', 200)
    monkeypatch.setattr(F, 'cross_entropy', limited)
    loss = flat.cross_entropy(logits, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits)[0] for x in (loss, expected)))
    assert flat.cross_entropy(logits, torch.full((2, 8), -100)) == 0  # no targets: not NaN


def test_logits_stay_within_the_graph_of_the_loss():
    model = tiny().train()
    made = []
    for block in model.h:  # a sharded model breaks the graph at each block
        block.forward = torch.compiler.disable(block.forward)

    def backend(graph, inputs):
        def run(*inputs):
            made.append(graph(*inputs))
            return made[-1]
        return run
    idx = tokens(model, 2, 8)
    loss, _ = torch.compile(model, backend=backend, dynamic=False)(idx, idx)
    torch.testing.assert_close(made[-1][0], loss)
    assert all(x.shape[-1:] != (61,) for outputs in made for x in outputs)


@pytest.mark.parametrize('options, parts', [
    (dict(n_embd=100, n_head=12, n_kv_head=5),
     ['n_embd=100, n_head=12 do not fit: n_head must divide n_embd', 'n_kv_head=5, n_head=12 do not']),
    (dict(mlp='swoglu', n_layer=0, pos_pattern='PX', qk_norm='half'),
     ["mlp='swoglu' is not supported; choose one of swiglu", 'n_layer=0 must be above 0',
      "pos_pattern='PX' is not supported; choose one of P, N", "qk_norm='half' is not"]),
    (dict(local={'n_kv_head': 5, 'head_dim': 7}, window=4, window_pattern='S'),
     ['n_kv_head must divide', 'not 7']),
    (dict(mixer_pattern='DB'), ["mixer_pattern='DB' needs a value of linear_n_key_head"])])
def test_an_invalid_config_names_every_problem(options, parts):
    with pytest.raises(ValueError) as error:
        GPTConfig(**options)
    message = str(error.value)
    assert all(part in message for part in parts), message


def test_importing_and_building_a_model_leaves_the_compiler_alone():
    """It takes as long to import as all of torch."""
    code = ('import sys, torch, model\nwith torch.device("meta"): model.GPT(model.GPTConfig())\n'
            'print("torch._dynamo" in sys.modules)')
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout == 'False\n'



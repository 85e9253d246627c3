"""Tests of model."""
import contextlib
import copy
import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import mixers
import model as flat
from model import GPT, GPTConfig, flops_per_token, make_context
from sample import load

ROOT = Path(flat.__file__).resolve().parent
HELPERS = 'lab/check.py', 'tests/formulas.py'  # a fork of the core may lack them
check = None
if all((ROOT / name).exists() for name in HELPERS):
    from lab import check
needs_check = pytest.mark.skipif(not check, reason=f'needs {", ".join(HELPERS)}')


def near(a, b, tolerance=1e-4):
    assert (a - b).abs().max() <= tolerance * b.abs().max(), ((a - b).abs().max(), b.abs().max())


MLA = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12)


STATES = dict(linear_n_key_head=2, linear_n_value_head=2, linear_key_head_dim=8, linear_value_head_dim=8)


YARN = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 12}


CHOICES = {  # axes of the pairwise grid; {}: GPTConfig's defaults
    'attention': [{}, dict(n_kv_head=2), dict(n_kv_head=1, head_dim=10, qk_norm='whole', attn_scale=0.2),
                  {**MLA, 'q_lora_rank': 12, 'latent_norm_eps': 0.1},
                  dict(n_kv_head=2, attn_sink=True, qk_norm=False, clip_qkv=0.3),
                  dict(qk_norm='rotated', query_scale={'beta': 0.5, 'length': 4, 'start': 1, 'layers': 'N'}),
                  dict(n_kv_head=2, k_eq_v=True, v_norm=True),
                  dict(n_kv_head=1, qk_norm='unit', query_scale={'beta': 0.5, 'length': 3, 'start': 1},
                       partial_rotary_factor=0.5)],
    'position': [{}, dict(rope_scaling={**YARN, 'mscale': 0.7, 'mscale_all_dim': 0.9}),
                 dict(pos_pattern='NP'), dict(pos='alibi'), dict(pos='learned'), dict(pos='sinusoidal'),
                 dict(pos='none'), dict(pos='alibi', pos_pattern='PN', alibi_scale=0.5)],
    'window': [{}, dict(window=5, window_pattern='S'), dict(window=5, window_pattern='SL'),
               dict(window=5, window_pattern='CL'),
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
            dict(n_expert=6, n_group=3, topk_group=2, expert_pattern='DE', mlp='gelu', mlp_bias=True,
                 router='sigmoid', balance_per_sequence=True)],
    'documents': [{}, dict(document_token=3), dict(mtp=True), dict(embed_scale=3.0)],
    'mixer': [{}, dict(attn_gate=True), dict(attn_gate='head'), dict(mixer_pattern='MD'),
              dict(mixer_pattern='DA', linear_n_key_head=2, linear_n_value_head=4, linear_conv_kernel_dim=2),
              dict(mixer_pattern='KA', linear_key_head_dim=6),
              dict(mixer_pattern='CB', linear_n_key_head=2, linear_n_value_head=4, linear_conv_bias=False)],
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


def pairwise(axes, prime=11):
    """Rows with nearly every valid pair of choices of two axes. Axis i has the value (a + i b) mod prime; as
    this number is prime, two axes take all pairs. Invalid rows get defaults in one or two axes."""
    for a, b in itertools.product(range(prime), repeat=2):
        row = {name: (a + i * b) % prime % len(axes[name]) for i, name in enumerate(axes)}
        pairs = itertools.combinations_with_replacement(reversed(row), 2)
        yield next(filter(is_valid, [row, *({**row, first: 0, second: 0} for first, second in pairs)]))


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
    model = GPT(GPTConfig(**{**TINY, **options}))
    for w in model.state_dict().values():
        w.copy_(w + 0.2 * torch.randn_like(w) if w.ndim < 2 else 0.3 * torch.randn_like(w))
    return model.eval()


def tokens(model, *shape):
    """Random tokens. If the model has documents, some tokens start a document."""
    idx = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    if model.config.document_token is not None:
        idx[idx % 7 == 0] = model.config.document_token
    return idx


@needs_check
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


@needs_check
@pytest.mark.parametrize('options', GRID, ids=grid_name)
def test_cached_equals_uncached(options, monkeypatch):
    check.check_cache(small(**options))
    if options in GRID and options not in GRID[::3]:  # every third, to save time
        return
    as_on_cuda(monkeypatch)
    check.check_cache(small(**options))


@needs_check
@pytest.mark.parametrize('options', [
    dict(n_kv_head=2, attn_sink=True, attn_softcap=3.0, attn_gate='head', norm_placement='sandwich'),
    dict(q_lora_rank=12, residual_lambdas=True, mtp=True, **MLA),
    dict(n_expert=6, n_group=3, topk_group=2, n_shared_expert=1, shared_gate=True, mlp_bias=True),
    dict(n_expert=4, n_shared_expert=1, expert_norms=True, mlp='xielu', norm_placement='sandwich'),
    dict(norm='layernorm', bias=True, pos='learned', tie_word_embeddings=False, head_bias=True),
    dict(n_expert=4, router='sigmoid', expert_input_scale=True),
    dict(qk_norm='whole', clip_qkv=1.0, mlp='swiglu_oai', v_norm=True),
    dict(mixer_pattern='DABKC', n_layer=5, **STATES)], ids=grid_name)
def test_gradients_equal_differences(options):
    check.check_gradients(small(**options))


@pytest.mark.parametrize('name, length, options, freq, factor', [
    ('ntk', 15, {}, [1, 0.25, 0.0625, 0.015625], 1),
    ('dynamic', 7, dict(original_max_position_embeddings=8), [1, 0.5, 0.25, 0.125], 1),
    ('yarn', 15, dict(original_max_position_embeddings=500, attention_factor=1.5),
     [1, 0.5, 41 / 192, 17 / 192], 1.5),
    ('llama3', 15, dict(original_max_position_embeddings=16 * math.pi, low_freq_factor=1, high_freq_factor=4),
     [1, 0.5, 5 / 48, 0.015625], 1),
    ('proportional', 15, dict(partial_rotary_factor=0.6), [0.125, 0.0625, 0, 0], 1)], ids=str)
def test_scalings_equal_worked_examples(name, length, options, freq, factor):
    """The factor is 8 and the base is 16. tests/test_hub.py compares other cases with transformers."""
    found = flat.ROPE_SCALINGS[name](0.5 ** torch.arange(4), 16.0, length, factor=8.0, **options)
    torch.testing.assert_close(found, (torch.tensor(freq, dtype=torch.float), float(factor)))


@pytest.mark.parametrize('options', [
    dict(attn_gate=True), dict(mixer_pattern='DA'), MLA,
    dict(norm_placement='output', norm='layernorm', bias=True)], ids=grid_name)
def test_dropout_is_on_embedding_attention_and_branches(options, monkeypatch):
    """If all later dropouts return 0, only the embedding remains."""
    model = tiny(dropout=0.25, **options).train()
    context = make_context(model, tokens(model, 2, 9))
    mixed = []
    for mixer in model.mixers:
        if isinstance(mixer, flat.BaseAttention):
            mixer.c_proj.register_forward_pre_hook(lambda _, args: mixed.append(args[0]))
    left = [1.0]  # factors: the first dropout keeps its input

    def dropout(x, p, training=True):
        assert p == 0.25 and training
        return x * (left.pop() if left else 0.0)
    monkeypatch.setattr(F, 'dropout', dropout)
    found = model(context.idx)
    monkeypatch.undo()
    near(found, model.head(model.eval().embed(context)))
    assert mixed and not any(map(torch.any, mixed))


@pytest.mark.parametrize('options, fields', [
    ({}, """block_size=1024 vocab_size=50304 n_layer=12 n_head=12 n_kv_head=12 n_embd=768 head_dim=64
     d_ff=2048 mlp=swiglu norm_eps=1e-06 rope_base=10000.0 qk_norm=True tie_word_embeddings=True dropout=0.0
     pos=rope pos_pattern=P rope_scaling=None partial_rotary_factor=1.0 alibi_scale=1.0 document_token=None
     mixer_pattern=A window=None window_pattern=None local=None attn_scale=None
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


INITIAL = (  # parts of names -> group, mean, standard deviation (None: hidden_init's); the first match wins
    ('wte wpe', 'embedding', 0, 0.02), ('lm_head.weight', 'head', 0, 0), ('shared_gate', 'gate', 0, None),
    ('x0_lambdas', 'scalar', 0, 0), ('resid_lambdas', 'scalar', 1, 0),
    ('A_log', 'vector', math.log(16) - 1, 1), ('dt_bias', 'vector', math.log(0.01), 1.33),
    ('bias sink', 'vector', 0, 0), ('conv', 'vector', 0, None), ('norm ln_ skip', 'vector', 1, 0),
    ('c_proj', 'matrix', 0, 0), ('c_ router', 'matrix', 0, None))


@pytest.mark.parametrize('options', [
    dict(mixer_pattern='DB', residual_lambdas=True, **{**STATES, 'linear_n_value_head': 64}),
    dict(tie_word_embeddings=False, head_bias=True, n_expert=4, n_shared_expert=1, shared_gate=True,
         pos='learned', attn_sink=True, bias=True)], ids=grid_name)
def test_groups_and_initial_values(options):
    config = GPTConfig(n_layer=2, n_head=4, n_embd=192, vocab_size=500, block_size=64, **options)
    models = [GPT(config) for _ in range(16)]
    for name, tag in models[0].tags.items():
        w = torch.stack([model.get_parameter(name) for model in models]).detach()
        group, mean, std = next(row for parts, *row in INITIAL if any(part in name for part in parts.split()))
        std = (3 * w.shape[-1]) ** -0.5 if std is None else std
        error = max(abs(w.mean() - mean), abs(w.std(correction=0) - std))
        assert tag.group == group and error <= 6 * std * w.numel() ** -0.5 + 1e-6, name


class OwnAlibi(flat.Attention):
    def attend(self, q, k, v, context):
        age = (context.positions[:, :, None] - torch.arange(k.shape[2]))[:, None]
        return super().attend(q, k, v, context, -flat.alibi_slopes(4, 'cpu')[:, None, None] * age)


@pytest.mark.parametrize('options', [{}, dict(window=5, window_pattern='SL', document_token=3, n_kv_head=2),
                                     dict(window=5, window_pattern='C'),
                                     dict(attn_softcap=0.5, attn_sink=True, n_kv_head=2)])
def test_flex_attention_equals_eager_attention(options, monkeypatch):
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
        near(model(idx), expected)


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
    near(feed(half, idx, [20, 1], half.make_cache(2, 24)), expected[:, :21], 0.02)


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
    assert sum(t.nbytes for t in cache.tensors()[2:]) == 2 * 4 * elements
    idx = tokens(model, 2, 80)
    feed(model, idx, [10] * 8, cache)
    with pytest.raises(ValueError, match='cannot rewind .*rolling=False'):
        cache.rewind(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match='cache is full'):
        model(idx[:, :1], cache=cache)
    cache.scales = [torch.tensor([3, 4])]  # a fork's tensors
    other = cache.like(1)
    other.scales[0][:] = 5
    cache.put([0], other)
    cache.select([1, 0, 1])
    assert cache.scales[0].tolist() == [4, 5, 4] and len(cache.tensors()) == len(other.tensors())


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
    # rewinds that lose no keys
    assert {(n, n) for n in range(1, 10)} | {(1, 2), (1, 3), (2, 3)} <= {*rewound}


@pytest.mark.parametrize('channels', [1, 4])
def test_the_chunked_delta_rule_is_the_recurrence(channels):
    """With documents, and with decays that could overflow or vanish."""
    q, k, v, beta = (torch.randn(2, 3, 150, width) for width in (4, 4, 6, 1))
    k, beta = F.normalize(k, dim=-1), beta.sigmoid()
    decay = (-torch.tensor([90.0, 1, 1e-3, 0]) * (torch.rand(2, 3, 150, 1) < 0.5))[..., :channels]
    is_start = torch.rand(2, 150) < 0.03
    start = torch.randn(2, 3, 4, 6)
    state, out = start, []
    for t in range(150):  # arXiv:2412.06464, equation 10
        state = torch.where(is_start[:, t, None, None, None], 0, decay[:, :, t, :, None].exp() * state)
        wrong = v[:, :, t, None] - k[:, :, t, None] @ state
        state = state + beta[:, :, t, None] * k[:, :, t, :, None] @ wrong
        out.append(q[:, :, t, None] @ state)
    found, last = mixers.gated_delta_rule(q, k, v, decay, beta, start, is_start)
    near(found, torch.cat(out, 2))
    near(last, state)


def test_experts_without_rows_get_no_gradient_on_blackwell(monkeypatch):
    """Blackwell's kernel does not initialise the gradient of their weights."""
    layer = flat.GroupedLinear(3, 16, (8,), bias=False)
    layer.weight.tag.init(layer.weight)
    kernel = F.grouped_mm

    def grouped_mm(x, w, offs):
        w = w.clone()
        w.register_hook(lambda grad: grad.index_fill(0, torch.tensor(1), math.nan))
        return kernel(x, w, offs=offs)
    monkeypatch.setattr(F, 'grouped_mm', grouped_mm)
    y, = layer(torch.randn(6, 16).bfloat16(), torch.tensor([4, 4, 6], dtype=torch.int32))
    grad, = torch.autograd.grad(y.sum(), layer.weight)
    assert grad[0].any() and not grad[1].any()


def test_router_weights_sum_to_one_despite_underflow():
    moe = tiny(n_expert=4, router='sigmoid', mlp_bias=True).h[0].mlp
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.bias.copy_(torch.tensor([-60.0, -60.5, -61.0, -200.0]))
    weight, chosen, _, _ = moe.route(torch.randn(7, 32))
    torch.testing.assert_close(weight.sum(-1), torch.ones(7))
    assert set(chosen.flatten().tolist()) == {0, 1}


def test_balance_biases_move_by_the_rate_and_are_never_rounded():
    """Including the multi-token layer's biases (arXiv:2412.19437, section 2.1.2)."""
    model = tiny(n_expert=4, router='sigmoid', balance_bias=True, n_dense_layer=1, mtp=True).train()
    idx = tokens(model, 2, 24)
    _, aux = model(idx, idx)
    assert aux['load'].sum(1).tolist() == [2 * 2 * 24, 2 * 2 * 23]  # a row's last token has no later target
    model.bfloat16()
    biases = [part.mlp.expert_bias for part in (model.h[1], model.mtp.block)]
    expected = [bias + 0.001 * (load.mean() - load).sign() for bias, load in zip(biases, aux['load'])]
    flat.move_balance(model, aux['load'], 0.001)
    torch.testing.assert_close(biases, expected, atol=1e-6, rtol=0)


class MoreExperts(flat.MoE):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.register_buffer('more', torch.full((), 0.12346))


def test_another_kind_of_experts_needs_only_its_letter(monkeypatch):
    monkeypatch.setitem(flat.MLPS, 'X', MoreExperts)
    model = GPT(GPTConfig(**TINY, n_expert=4, expert_pattern='X', n_dense_layer=1)).bfloat16()
    assert [type(block.mlp) for block in model.h] == [flat.MLP, MoreExperts]
    assert model.h[1].mlp.more == torch.tensor(0.12346)
    assert [GPTConfig(expert_pattern='XDN').mlp_of(layer) for layer in range(3)] == ['D', 'D', 'N']


def test_a_scaling_gets_the_trained_length(tmp_path):
    """The length is block_size in a new model; a model loaded with a longer context keeps its length."""
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
    unused = {'bigram_size': None, 'window_global': 1}
    torch.save({'model': model.state_dict(), 'model_args': args | unused}, path)
    assert load(path)[0].config == model.config
    torch.save({'model': model.state_dict(), 'model_args': {**args, 'bigram_size': 40}}, path)
    with pytest.raises(ValueError, match="ckpt.pt: unknown setting 'bigram_size'"):
        load(path)


def test_training_on_long_sequences_equals_eager_attention():
    model = tiny(n_layer=1, n_kv_head=2, block_size=1100)
    idx = torch.randint(61, (1, 1100))
    logits = model(idx)
    near(logits, model(idx, weights=[]))
    grad, = torch.autograd.grad(logits.square().mean(), model.h[0].attn.c_attn.weight)
    expected, = torch.autograd.grad(model(idx, weights=[]).square().mean(), model.h[0].attn.c_attn.weight)
    near(grad, expected)


@torch.no_grad()
def test_attention_weights_on_request():
    model = tiny(window=3, window_pattern='S', n_kv_head=2)
    weights = []
    idx = tokens(model, 2, 12)
    near(model(idx, weights=weights), model(idx))
    for w in weights:
        assert w.shape == (2, 4, 12, 12) and not w.triu(1).any() and not w.tril(-3).any()
        near(w.sum(-1), torch.ones(2, 4, 12))


@pytest.mark.parametrize('options', [
    dict(residual_lambdas=True), dict(n_kv_head=2, attn_gate=True, tie_word_embeddings=False),
    {**MLA, 'q_lora_rank': 12},
    dict(n_expert=4, n_shared_expert=1, shared_gate=True, d_expert=24)], ids=grid_name)
def test_flops_are_those_that_torch_counts(options):
    model = tiny(**options)
    with FlopCounterMode(display=False) as counter:  # only forward, with eager_attention, as in training
        model(tokens(model, 2, 24))
    assert 3 * counter.get_total_flops() == flops_per_token(model) * 48


@pytest.mark.parametrize('options, flops', [
    (dict(mixer_pattern='D', **STATES), 3 * 2 * 8 * 8 + 48 * 4), (dict(mixer_pattern='C'), 32 * 4),
    (dict(mixer_pattern='B', **STATES), 2 * 2 * 8 * 8 + 48 * 4),
    (dict(window=5, window_pattern='S'), 4 * (8 + 8) * 5)], ids=str)
def test_flops_of_states_convolutions_and_windows(options, flops):
    """Both layers correct (except Mamba-2), write and read their state."""
    assert flat.mixing_flops(tiny(**options), 24) == 2 * 6 * flops


ONES = dict(init=torch.nn.init.ones_)


class Forgetful(flat.Attention):
    pass


@pytest.mark.parametrize('new, message', [
    (lambda: torch.nn.Parameter(torch.ones(3)), r'h\.0\.attn\.new has no tag: make it with parameter'),
    (lambda: flat.parameter(3, **ONES, group='matrix'), 'new is tagged as a matrix'),
    (lambda: flat.parameter(3, 1, **ONES, group='matrix'), 'new is tagged as a matrix'),
    (lambda: flat.Linear(32, 1), r'new\.weight is tagged as a matrix'),
    (lambda: flat.parameter(3, init=torch.ones_like, group='vector'), 'new holds NaN after its init'),
    (lambda: None, 'Forgetful of layer 0 sets neither slots nor')])
def test_what_a_fork_forgets_fails_loudly(new, message, monkeypatch):
    def init(self, config, layer):
        flat.Attention.__init__(self, config, layer)
        self.slots = None
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


MISTAKES = {  # mistake: (a fork's attend, the message)
    'reads later tokens': (lambda self, q, k, v, context: F.scaled_dot_product_attention(q, k, v), 'a cache'),
    'ignores the cache': (lambda self, q, k, v, context: F.scaled_dot_product_attention(
        q, *(x[:, :, -q.shape[2]:] for x in (k, v)), is_causal=True), 'a cache'),
    'ignores documents': (lambda self, q, k, v, context: F.scaled_dot_product_attention(
        q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])),
        'another document'),
    'changes one kernel': (lambda self, q, k, v, context: flat.BaseAttention.attend(
        self, q * (1 + context.eager), k, v, context), 'a cache'),
}


@pytest.mark.parametrize('mistake', MISTAKES)
def test_what_a_fork_forgets_is_found_before_training(mistake, monkeypatch):
    attend, message = MISTAKES[mistake]
    monkeypatch.setattr(Forgetful, 'attend', attend)
    monkeypatch.setitem(flat.MIXERS, 'F', Forgetful)
    with pytest.raises(ArithmeticError, match=f'logits change when {message}'):
        flat.try_tokens(GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=61, block_size=16,
                                      mixer_pattern='F', document_token=3)))


class KeepsPadding(flat.Mixer):
    """Adds the sum of all tokens so far."""
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.states = [((config.n_embd,), torch.float32)]

    def flops(self, length):
        return 0

    def forward(self, x, context):
        x = x.float() * 0.1
        if context.cache is None:
            return x.cumsum(1)
        state, = context.cache.states[self.number]
        sums = state[:, None] + x.cumsum(1)
        state.copy_(sums[:, -1])
        return sums


def test_padding_in_a_state_is_found_before_training(monkeypatch):
    monkeypatch.setitem(flat.MIXERS, 'F', KeepsPadding)
    with pytest.raises(ArithmeticError, match='logits change when .* padding follows'):
        flat.try_tokens(tiny(mixer_pattern='F'))


def test_a_parameter_that_forward_ignores_is_found_before_training(monkeypatch):
    places = flat.NORM_PLACEMENTS['pre'] | {'mlp_middle': 'ln_9'}
    monkeypatch.setitem(flat.NORM_PLACEMENTS, 'middle', places)
    with pytest.raises(ArithmeticError, match=r'does not depend on h.0.ln_9.weight, h.1.ln_9.weight'):
        flat.try_tokens(tiny(norm_placement='middle'))


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
        auto = model(idx)
    for logits in auto, model.bfloat16()(idx):
        assert logits.dtype == torch.float32
        assert (logits.log_softmax(-1) - full).abs().mean() < 0.05 * full.std()
    assert make_context(model, idx).ropes[model.config.rope_kind][0].dtype == torch.float32  # not rounded
    x, w, b = (torch.randn(*shape).bfloat16() for shape in ((1, 1, 64), (48, 64), (48,)))  # one token
    exact = F.linear(x.double(), w.double(), b.double())
    torch.testing.assert_close(flat.project(x, w, b).double(), exact, rtol=2**-8, atol=2**-8)


@torch.no_grad()
def test_the_scale_of_embeddings_is_rounded_as_in_gemma():
    """The square root of 40 is 0.2% more than its nearest bfloat16."""
    model = tiny(n_embd=40, embed_scale=40 ** 0.5).bfloat16()
    idx = tokens(model, 2, 24)
    expected = model.wte(idx) * torch.tensor(40 ** 0.5).bfloat16()
    assert torch.equal(model.embed(make_context(model, idx)), expected)


@torch.no_grad()
def test_norms_routers_and_states_are_float32():
    """Norms round only once."""
    model = tiny(n_expert=4, mlp_bias=True, mixer_pattern='DKB', n_layer=3, **STATES).bfloat16()
    x = torch.randn(9, 32).bfloat16()
    exact = F.rms_norm(x.double(), (32,), model.ln_f.weight.double(), 1e-3)
    torch.testing.assert_close(model.ln_f(x).double(), exact, rtol=2**-8, atol=0)
    moe, results = model.h[0].mlp, []
    for mixer in model.mixers:
        mixer.rule = lambda *args, rule=mixer.rule: results.append(rule(*args)) or results[-1]
    with torch.autocast('cpu', torch.bfloat16):
        _, _, logits, _ = moe.route(x)
        cache = model.make_cache(2, 24)
        feed(model, tokens(model, 2, 24), [9, 1, 14], cache)
    near(logits, F.linear(x.double(), moe.router.weight.double(), moe.router.bias.double()), 1e-5)
    assert {x.dtype for x in itertools.chain(*results)} == {layer[1].dtype for layer in cache.states} == {
        torch.float32}


def test_a_loss_in_parts_is_the_loss(monkeypatch):
    """CUDA's kernel limits the number of logits."""
    logits = torch.randn(2, 8, 61, requires_grad=True)
    targets = torch.randint(-1, 61, (2, 8))
    losses = [F.cross_entropy(logits.mT, targets, ignore_index=-1)]
    monkeypatch.setattr(flat, 'MOST_LOGITS', 200)
    kernel, sizes = F.cross_entropy, []
    monkeypatch.setattr(F, 'cross_entropy', lambda x, *args, **options: sizes.append(x.numel()) or kernel(
        x, *args, **options))
    losses.append(flat.cross_entropy(logits, targets))
    assert len(sizes) > 1 and max(sizes) <= 200
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in losses))
    assert flat.cross_entropy(logits, torch.full((2, 8), -100)) == 0  # no targets: not NaN


@pytest.mark.parametrize('options, parts', [
    (dict(n_embd=100, n_head=12, n_kv_head=5),
     ['n_embd=100, n_head=12 do not fit: n_head must divide n_embd', 'n_kv_head=5, n_head=12 do not']),
    (dict(mlp='swoglu', n_layer=0, pos_pattern='PX', qk_norm='half'),
     ["mlp='swoglu' is not supported; choose one of swiglu", 'n_layer=0 must be above 0',
      "pos_pattern='PX' is not supported; choose one of P, N", "qk_norm='half' is not"]),
    (dict(tie_word_embeddings='no', n_layer=None, router=None, pos_pattern=None, document_token=-1),
     ["tie_word_embeddings='no' is not supported; choose one of bool",
      'n_layer=None is not supported; choose one of int', 'router=None is not', 'pos_pattern=None is not',
      'document_token=-1 must be at least 0']),
    (dict(local={'n_kv_head': 5, 'head_dim': 7}, window=4, window_pattern='S'),
     ['n_kv_head must divide', 'not 7']),
    (dict(mixer_pattern='DB'), ["mixer_pattern='DB' needs a value of linear_n_key_head"])])
def test_an_invalid_config_names_every_problem(options, parts):
    with pytest.raises(ValueError) as error:
        GPTConfig(**options)
    message = str(error.value)
    assert all(part in message for part in parts), message


def test_importing_and_building_a_model_leaves_the_compiler_alone():
    """Importing the compiler takes as long as importing torch."""
    code = ('import sys, torch, model\nwith torch.device("meta"): model.GPT(model.GPTConfig())\n'
            'print("torch._dynamo" in sys.modules)')
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout == 'False\n'


@pytest.mark.parametrize('name', ['dropout', 'attn_softcap', 'n_dense_layer', 'document_token'])
def test_a_negative_field_is_named(name):
    with pytest.raises(ValueError, match=f'{name}=-1.* must be'):
        tiny(**{name: -1})

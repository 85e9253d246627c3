"""Tests of model."""
import contextlib
import dataclasses
import functools
import importlib.util
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

import hub
import mixers
import model as flat
import weights
from model import GPT, GPTConfig, flops_per_token, make_context, move_balance, num_params, row_splits

ROOT = Path(flat.__file__).resolve().parent


# model ------------------------------------------------------------------------------------------------------
def near(a, b, tolerance=1e-4):
    assert (a - b).abs().max() <= tolerance * b.abs().max(), ((a - b).abs().max(), b.abs().max())


MLA = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12)


YARN = {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 12}


GPT2 = dict(pos='learned', norm='layernorm', norm_eps=1e-5, mlp='gelu_tanh', qk_norm=False, bias=True)


CHOICES = {  # the axes of the pairwise grid, which another choice combines anew; {}: GPTConfig's defaults
    'attention': [{}, dict(n_kv_head=2), dict(n_kv_head=1, head_dim=10, qk_norm='whole'), MLA,
                  {**MLA, 'q_lora_rank': 12}, dict(n_kv_head=2, attn_sink=True, qk_norm=False),
                  dict(qk_norm='rotated', query_scale={'beta': 0.5, 'length': 4, 'start': 1, 'layers': 'N'}),
                  dict(n_kv_head=1, qk_norm='unit', query_scale={'beta': 0.5, 'length': 3})],
    'position': [{}, dict(rope_scaling=YARN), dict(pos_pattern='NP'), dict(pos='alibi'),
                 dict(pos='learned'), dict(pos='sinusoidal'), dict(pos='none'),
                 dict(pos='alibi', pos_pattern='PN'), dict(pos='t5', pos_pattern='NP')],
    'window': [{}, dict(window=5, window_pattern='S'), dict(window=5, window_pattern='SL'),
               dict(window=5, window_pattern='CL'),
               dict(window=5, window_pattern='LS', rope_local={'rope_base': 20.0, 'rope_scaling': YARN})],
    'norm': [{}, dict(norm='layernorm', bias=True), dict(norm_placement='post'),
             dict(norm_placement='output', embed_norm=True),
             dict(norm_placement='sandwich', attn_softcap=3.0),
             dict(norm_placement='parallel', norm='layernorm'),
             dict(norm_placement='parallel_2', residual_scale=0.7),
             dict(residual_lambdas=True, norm_bias=True), dict(norm_weight=False)],
    'mlp': [{}, dict(mlp='gelu_tanh'),
            dict(mlp='relu2', logit_scale=0.6, logit_softcap=5.0, tie_word_embeddings=False),
            dict(mlp='xielu', expert_pattern='DN'), dict(mlp='swiglu_oai', mlp_limit=1.0),
            dict(n_expert=4, n_shared_expert=1, d_expert=24, expert_input_scale=True),
            dict(n_expert=4, n_expert_active=3, router='sigmoid', balance_bias=True, n_dense_layer=1,
                 d_expert=20),
            dict(n_expert=6, n_group=3, topk_group=2, expert_pattern='DE', mlp='gelu', mlp_bias=True)],
    'documents': [{}, dict(document_token=3), dict(mtp=True), dict(bigram_size=50),
                  dict(bigram_size=50, document_token=3)],
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
    """The options of a row of the grid, {axis: number of its choice}."""
    return {key: value for name, i in row.items() for key, value in CHOICES[name][i].items()}


def is_valid(row):
    try:
        GPTConfig(**{**TINY, **combined(row)})
        return True
    except ValueError:
        return False


def pairwise(axes):
    """Few combinations in which every two choices of two axes meet that may, by a greedy search."""
    names, generator, nothing = list(axes), random.Random(0), dict.fromkeys(axes, 0)
    pairs = {((a, i), (b, j)) for a, b in itertools.combinations(names, 2)
             for i in range(len(axes[a])) for j in range(len(axes[b])) if is_valid({a: i, b: j})}
    rows = []
    while pairs:
        first = dict(min(pairs))
        tries = [row for row in ({name: generator.randrange(len(axes[name])) for name in names} | first
                                 for _ in range(60)) if is_valid(row)] or [nothing | first]
        covered = [(len(pairs & set(itertools.combinations(row.items(), 2))), list(row.items()))
                   for row in tries]
        rows.append(dict(max(covered)[1]))
        pairs -= set(itertools.combinations(rows[-1].items(), 2))
    return rows


def grid_name(options):
    return ' '.join(f'{k}={v}' for k, v in options.items() if k != 'rope_scaling')[:150] or 'default'


DYNAMIC = dict(rope_scaling={'rope_type': 'dynamic', 'factor': 4.0, 'original_max_position_embeddings': 12})


GRID = [*(combined(row) for row in pairwise(CHOICES)), DYNAMIC]


def tiny(turns=None, **options):
    """A model whose every weight matters: nothing is left at zero or one. turns: of its blocks, as a fork may
    have them."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**TINY, **options}))
    if turns:
        model.schedule, model.mixers = flat.make_schedule(model, turns)
    with torch.no_grad():
        for name, w in model.named_parameters():
            if model.tags[name].group in ('vector', 'scalar'):
                w += torch.randn_like(w) * 0.2
            else:
                w.copy_(torch.randn_like(w) * 0.3)
        for w in model.buffers():
            w.copy_(torch.randn_like(w) * 0.2)
    return model.eval()


def bare_context(eager=True, routing=None):
    """For a module that needs no positions."""
    return flat.ForwardContext(*[None] * 4, {}, {}, None, None, 0, eager, torch.float32, None, routing)


def tokens(model, *shape):
    """Random tokens; every few of them ends a document, if the model knows any."""
    idx = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    if model.config.document_token is not None:
        idx[idx % 7 == 0] = model.config.document_token
    return idx


def naive_attention(q, k, v, q_pos, k_pos, scale, window=None, slopes=None, softcap=0.0, sink=None):
    """Loops over rows, heads, queries and keys, in float64 -> outputs and weights. q_pos (B, T), k_pos (B,
    S): lists."""
    q, k, v = q.double(), k.double(), v.double()
    (B, H, T, _), (K, S) = q.shape, k.shape[1:3]
    weights = torch.zeros(B, H, T, S).double()
    for b, h, t, s in itertools.product(range(B), range(H), range(T), range(S)):
        age = q_pos[b][t] - k_pos[b][s]
        if k_pos[b][s] >= 0 and 0 <= age < (window or math.inf):
            score = float(q[b, h, t] @ k[b, h * K // H, s]) * scale
            score = softcap * math.tanh(score / softcap) if softcap else score
            weights[b, h, t, s] = math.exp(score - (slopes[h] * age if slopes else 0.0))
    total = weights.sum(-1) + (sink.double().exp()[:, None] if sink is not None else 0.0)
    weights /= total[..., None]
    return weights @ v.repeat_interleave(H // K, dim=1), weights


@pytest.fixture(params=['written out', 'blocks', 'few', 'cpu', 'cuda', 'mps'])
def attend(request, monkeypatch):
    """A path of attention: attend, called as on a device or in a compiled step."""
    path, plan, kernel = request.param, flat.sdpa_plan, F.scaled_dot_product_attention
    if path == 'blocks':
        monkeypatch.setattr(flat, 'eager_attention', functools.partial(flat.eager_attention, block=2))

    def run(q, k, v, mask, *rest):
        def sdpa(q, k, v, *args, enable_gqa, **kwargs):
            assert path in ('cpu', 'few') or not enable_gqa  # kernels of float32 on CUDA know no groups
            if path == 'cuda':  # cuDNN in training alone, and never with a mask
                assert torch.backends.cuda.cudnn_sdp_enabled() == (
                    torch.is_grad_enabled() and mask.is_causal and mask.bias is None)
            return kernel(q, k, v, *args, enable_gqa=enable_gqa, **kwargs)
        with monkeypatch.context() as patch:
            patch.setattr(F, 'scaled_dot_product_attention', sdpa)
            patch.setattr(torch.compiler, 'is_compiling', lambda: path == 'few')
            if path in ('cuda', 'mps'):
                patch.setattr(flat, 'sdpa_plan', lambda device, *rest: plan(path, *rest))
            return flat.attend(q, k, v, bare_context(path in ('written out', 'blocks')), mask, *rest)
    run.is_written_out = path in ('written out', 'blocks')
    return run


@pytest.mark.parametrize('window, alibi, softcap, sunk', [
    (None, False, 0.0, False), (3, False, 0.0, False), (None, True, 0.0, False), (4, True, 1.5, True)])
def test_every_path_of_attention_equals_naive_loops(window, alibi, softcap, sunk, attend):
    if (softcap or sunk) and not attend.is_written_out:
        pytest.skip('no kernel does this')
    g, slopes = torch.Generator().manual_seed(0), flat.alibi_slopes(4) if alibi else None
    sink = torch.randn(4, generator=g) if sunk else None
    shapes = [(7, 7, [6, 6]), (1, 9, [8, 8]), (3, 9, [8, 8]), (2, 9, [4, 8])]  # queries, keys, last positions
    for K, (T, S, last), grad in itertools.product([4, 2, 1], shapes, [True, False]):
        q, k, v = (torch.randn(2, n, t, d, generator=g) for n, t, d in ((4, T, 6), (K, S, 6), (K, S, 10)))
        q_pos, k_pos = torch.tensor(last)[:, None] - torch.arange(T).flip(0), torch.arange(S).expand(2, S)
        expected, weights = naive_attention(q, k, v, q_pos.tolist(), k_pos.tolist(), 0.3, window,
                                            slopes.tolist() if alibi else None, softcap, sink)
        age = (q_pos[:, :, None] - k_pos[:, None])[:, None]
        bias = torch.zeros(()) if slopes is None else -slopes[:, None, None] * age
        bias = bias.where((age >= 0) & (age < (window or S)), -math.inf)
        mask = flat.Mask(bias, T == S, window)
        if not (window or alibi) and (T == S and not attend.is_written_out or T == 1):
            mask = flat.Mask(None, T == S, None)
        with torch.set_grad_enabled(grad):
            y = attend(q, k, v, mask, 0.3, 0.0, softcap, sink)
        torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-4)
        if attend.is_written_out:
            seen = []
            flat.eager_attention(q, k, v, mask, 0.3, 0.0, softcap, sink, seen)
            torch.testing.assert_close(seen[0].double(), weights, atol=1e-5, rtol=1e-4)
    assert torch.backends.cuda.cudnn_sdp_enabled()


@torch.no_grad()
def test_windows_cost_a_cpu_their_part_of_the_keys(monkeypatch):
    model, sdpa = tiny(block_size=300, window=5, window_pattern='SC', document_token=3), []
    kernel, idx = F.scaled_dot_product_attention, tokens(model, 2, 300)
    monkeypatch.setattr(F, 'scaled_dot_product_attention',
                        lambda *args, **options: sdpa.append(1) or kernel(*args, **options))
    found, cached = model(idx), model(idx, cache=model.make_cache(2, 300))
    assert not sdpa
    monkeypatch.setattr(flat, 'BLOCK', 300)
    expected = model(idx)
    assert len(sdpa) == 2
    near(found, expected)
    near(cached, expected)


@pytest.mark.parametrize('dtype, T, fits_flash, is_training, expected', [
    (torch.bfloat16, 7, True, True, ('gqa', True)),       # training: the only cuDNN
    (torch.bfloat16, 7, True, False, ('gqa', False)),     # prefill: a new shape each time
    (torch.float16, 7, True, False, ('repeat', False)),   # no flash attention before Ampere
    (torch.bfloat16, 7, False, False, ('repeat', False))])
def test_kernels_of_half_precision_on_cuda(dtype, T, fits_flash, is_training, expected):
    assert flat.sdpa_plan('cuda', dtype, T, fits_flash, False, is_training) == expected


@pytest.fixture
def as_cuda(monkeypatch):
    """Attention as it would be called on CUDA."""
    plan = flat.sdpa_plan
    monkeypatch.setattr(flat, 'sdpa_plan', lambda device, *rest: plan('cuda', *rest))


@torch.no_grad()
def test_masks_are_left_to_flex_attention_where_it_pays(monkeypatch):
    import torch.nn.attention.flex_attention as flex
    assert not flat.use_flex('cuda', torch.bfloat16, 1024, 0.0)  # not compiled
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, 'is_compiling', lambda: True)
        assert flat.use_flex('cuda', torch.bfloat16, 1024, 0.0)
        for other in (('cpu', torch.bfloat16, 1024, 0.0), ('cuda', torch.float32, 1024, 0.0),
                      ('cuda', torch.bfloat16, 64, 0.0), ('cuda', torch.bfloat16, 1024, 0.1)):
            assert not flat.use_flex(*other)
    model = tiny(n_kv_head=2, head_dim=16, window=5, window_pattern='SL', pos='alibi', document_token=3)
    idx, calls, kernel = tokens(model, 2, 24), [], flex.flex_attention

    def spy(*args, **kwargs):
        calls.append(1)
        return kernel(*args, **kwargs)
    expected = model(idx)
    monkeypatch.setattr(flat, 'use_flex', lambda *a: True)
    monkeypatch.setattr(flex, 'flex_attention', spy)
    y = torch.compile(model, fullgraph=True, dynamic=False, backend='aot_eager')(idx)
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    model(idx, cache=model.make_cache(2, 24))
    assert len(calls) == 2  # a layer each, and none with a cache


class OwnAlibi(flat.Attention):
    def attend(self, q, k, v, context):
        age = (context.positions[:, :, None] - context.positions[:, None])[:, None]
        mask = context.masks[self.mask_kind].add(-flat.alibi_slopes(4)[:, None, None] * age)
        return super().attend(q, k, v, dataclasses.replace(context, masks={self.mask_kind: mask}))


@pytest.mark.parametrize('options', [{}, dict(window=5, window_pattern='SL', document_token=3)])
def test_a_mixer_may_add_a_bias_to_each_mask(options, monkeypatch):
    monkeypatch.setitem(flat.MIXERS, 'X', OwnAlibi)
    expected, model = tiny(pos='alibi', head_dim=16, **options), tiny(
        pos='none', mixer_pattern='X', head_dim=16, **options)
    idx = tokens(model, 2, 24)
    for grad, flex in ((True, False), (False, False), (False, True)):  # flex knows masks without the bias
        monkeypatch.setattr(flat, 'use_flex', lambda *a, flex=flex: flex)
        with torch.set_grad_enabled(grad):
            near(model(idx), expected(idx))


def feed(model, idx, chunks, cache):
    return torch.cat([model(part, cache=cache) for part in idx[:, :sum(chunks)].split(chunks, dim=1)], dim=1)


def memory_efficient_layout(*args, kernel=F.scaled_dot_product_attention, **kwargs):
    """SDPA, its result laid out as CUDA's memory-efficient kernel has it: (B, queries, heads, D)."""
    return kernel(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize('options', GRID, ids=grid_name)
@torch.no_grad()
def test_cached_equals_uncached(options, monkeypatch):
    torch.set_num_threads(1)  # small tensors: a second one only waits
    model = tiny(**options)
    idx = tokens(model, 3, 24)
    full, close = model(idx), functools.partial(torch.testing.assert_close, atol=2e-4, rtol=1e-4)
    assert full.std() > 0.1  # else equality would say little
    with torch.enable_grad():  # the path that trains
        close(model(idx).detach(), full)

    def at(source, rows, places, n):  # (rows, n, ...), from another place in each row
        return torch.stack([source[row, place:place + n] for row, place in zip(rows, places)])
    for static, splits in ((False, ([24], [1] * 24, [3, 5, 4, 12])),
                           (True, ([23, 1], [4, 1, 1, 6, 9, 2, 1]))):
        if static:  # each kind of attention, by the kernel that a static cache gets on CUDA
            monkeypatch.setattr(F, 'scaled_dot_product_attention', memory_efficient_layout)
        for chunks in splits:
            close(feed(model, idx, chunks, model.make_cache(3, 24, static)), full)
        rows, held, padded = [0, 1, 2], [14, 11, 9], idx[:, :14].clone()
        padded[1, 11:] = padded[2, 9:] = 3  # which may start a document
        for rolling in (True, False):  # rows of different lengths, by padding or by taking tokens back
            cache = model.make_cache(3, 24, static, rolling)
            if not rolling and any(cache.states):
                continue  # refused, see test_caches_refuse...
            if rolling:
                last = model(padded, cache=cache, keep=2, lengths=torch.tensor(held))
            else:
                last = model(idx[:, :14], cache=cache, keep=2)
                cache.rewind(torch.tensor([0, 3, 5]))
            close(last, at(full, rows, [a - 2 for a in (held if rolling else [14] * 3)], 2))
            now = held
            for n in (2, 1, 4):
                close(model(at(idx, rows, now, n), cache=cache), at(full, rows, now, n))
                now = [a + n for a in now]
            lengths = torch.tensor([1, 0, 2])  # two rows go on, by other numbers of tokens
            last = model(at(idx, rows, now, 2), cache=cache, keep=1, lengths=lengths)
            close(last[[0, 2]], at(full, [0, 2], [now[0], now[2] + 1], 1))
            now = [a + n for a, n in zip(now, (1, 0, 2))]
            mixed = [2, 0, 1, 2]
            cache.select(mixed)
            now = [now[row] for row in mixed]
            close(model(at(idx, mixed, now, 1), cache=cache), at(full, mixed, now, 1))
            assert cache.length.tolist() == [a + 1 for a in now]
            cache.reset()
            close(feed(model, idx[mixed], [9, 1], cache), full[mixed, :10])
        cache = model.make_cache(2, 24, static)  # a row that ends with the cache, beside a longer one
        model(idx[:2, :20], cache=cache, lengths=torch.tensor([20, 3]))
        new, lengths = F.pad(idx[:2], (0, 20)), torch.tensor([4, 20])
        last = model(at(new, [0, 1], [20, 3], 20), cache=cache, keep=2, lengths=lengths)
        close(last, at(full, [0, 1], [22, 21], 2))


@pytest.mark.parametrize('options', GRID, ids=grid_name)
def test_every_parameter_learns(options):
    torch.set_num_threads(1)
    model = tiny(**options).train()
    idx = tokens(model, 3, 24)
    loss, aux = model(idx[:, :-1], idx[:, 1:])
    (loss + aux.get('mtp', 0)).backward()
    without = [name for name, w in model.named_parameters()
               if w.grad is None or not w.grad.abs().max() > 1e-7]
    # what all keys have in common cancels in the softmax, unless positions rotate it
    assert not [name for name in without if not name.endswith('k_norm.bias')]


@pytest.mark.parametrize('options', GRID, ids=grid_name)
def test_no_token_sees_the_future_or_past_its_window(options):
    model = tiny(**options)
    idx = tokens(model, 1, 24)
    idx[idx == 3] = 4
    changed = idx.clone()
    changed[0, 7] = 5 if idx[0, 7] != 5 else 6
    # a window of 5 reaches 4 tokens back in each layer
    windowed = all(mixer.window and not mixer.states for mixer in model.mixers)
    end = 7 + 1 + 4 * model.config.n_layer if windowed else 24
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            a, b = model(idx), model(changed)
        seen = (a - b).abs().amax(-1)[0] > 1e-5
        assert not seen[:7].any() and seen[7:end].any() and not seen[end:].any()


@torch.no_grad()
def test_padding_beyond_the_cache_leaves_states_finite():
    model = tiny(mixer_pattern='ADA', n_layer=3, window=3, window_pattern='S', attn_softcap=3.0, block_size=8)
    idx, cache = tokens(model, 2, 6), model.make_cache(2, 8, rolling=False)
    for lengths in ([6, 1], [1, 6]):
        model(idx, cache=cache, lengths=torch.tensor(lengths))
    assert all(state.isfinite().all() for layer in cache.states for state in layer)


@pytest.mark.parametrize('options, slots, elements', [  # slots and one for padding, each of a width
    (dict(n_kv_head=2), [80, 80], 2 * 81 * 2 * 2 * 8),
    (dict(window=5, window_pattern='SL'), [5, 80], (6 + 81) * 2 * 4 * 8),
    (dict(window=5, window_pattern='SL', **MLA), [5, 80], (6 + 81) * (16 + 4)),
    (dict(mixer_pattern='DA'), [80, 80], 3 * 96 + 4 * 8 * 8 + 81 * 2 * 4 * 8)], ids=str)
@torch.no_grad()
def test_caches_keep_to_their_size_and_refuse_the_rest(options, slots, elements):
    model = tiny(block_size=80, **options)
    cache, idx = model.make_cache(2, 80), tokens(model, 2, 80)
    assert cache.nbytes == 2 * 4 * elements
    full, rolls = model(idx), slots[0] < 80
    torch.testing.assert_close(feed(model, idx, [7] * 10, cache), full[:, :70], atol=1e-4, rtol=1e-4)
    cache.rewind(0)
    if rolls or any(cache.states):
        with pytest.raises(ValueError, match='cannot rewind .*rolling=False'):
            cache.rewind(torch.tensor([0, 1]))
    cache.reset()
    model(idx[:, :5], cache=cache)
    if not any(cache.states):  # nor has a rolling cache wrapped
        cache.rewind(torch.tensor([2, 0]))
        new = torch.stack((idx[0, 3:6], idx[1, 5:8]))
        torch.testing.assert_close(model(new, cache=cache), torch.stack((full[0, 3:6], full[1, 5:8])),
                                   atol=1e-4, rtol=1e-4)
    with torch.autocast('cpu', torch.bfloat16):
        cache = model.make_cache(2, 80)
        half = feed(model, idx, [7, 1, 72], cache)
    assert (half - full).abs().mean() < 0.1 * full.std()
    assert {tensor.dtype for layer in cache.slots for tensor in layer} == {torch.bfloat16}
    with pytest.raises(ValueError, match='cache is full: 81 tokens into 80 slots'):
        model(idx[:, :1], cache=cache)
    with pytest.raises(ValueError, match='block_size=80'):
        model.make_cache(1, 81)


@pytest.mark.parametrize('options', [{}, dict(q_lora_rank=12), dict(rope_scaling={**YARN, 'mscale': 0.7,
                                                                                 'mscale_all_dim': 0.9})])
@torch.no_grad()
def test_latent_attention_absorbed_and_expanded_follows_the_paper(options):
    model = tiny(**MLA, **options)
    x, attn, pos = torch.randn(2, 20, 32), model.h[0].attn, [list(range(20))] * 2
    context = make_context(model, torch.zeros(2, 20, dtype=torch.long))
    # arXiv:2405.04434, equations 9 to 19
    def norm(v, w):
        return F.rms_norm(v, w.shape, w, 1e-3)
    def heads(y, width):
        return y.unflatten(-1, (4, width)).transpose(1, 2)
    def turn(y):
        return flat.rotate(y, [r.double() for r in context.ropes[attn.rope_kind]])
    w = {name: v.double() for name, v in attn.state_dict().items()}
    q, latent, k_rope = (x.double() @ w['c_attn.weight'].T).split(attn.c_attn.widths, -1)
    if 'q_lora_rank' in options:
        q = norm(q, w['q_norm.weight']) @ w['c_q.weight'].T
    q, kv = heads(q, 12), heads(norm(latent, w['kv_norm.weight']) @ w['c_kv.weight'].T, 20)
    q = torch.cat((q[..., :8], turn(q[..., 8:])), -1)
    k = torch.cat((kv[..., :8], turn(k_rope[:, None]).expand(-1, 4, -1, -1)), -1)
    grown = 0.1 * 0.9 * math.log(4) + 1 if 'rope_scaling' in options else 1
    y, _ = naive_attention(q, k, kv[..., 8:], pos, pos, 12 ** -0.5 * grown ** 2)
    y = y.transpose(1, 2).flatten(2) @ w['c_proj.weight'].T
    for absorb in (False, True):
        torch.testing.assert_close(attn(x, context, absorb).double(), y, atol=1e-4, rtol=1e-4)


def pretend_device(monkeypatch):
    """Fake tensors on 'meta' flow as on a GPU, without one: an operator refuses tensors of two devices, and
    nothing can wait for their values, but for int(...), which is 8."""
    importlib.import_module('torch._dynamo')  # which keeps what it finds, and is imported on the way
    monkeypatch.setattr(torch, 'is_autocast_enabled', lambda device: False)
    monkeypatch.setattr(torch, 'autocast', lambda device, **options: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, '__int__', lambda x: 8)
    monkeypatch.setattr(torch, 'tensor', None)  # is made on the host, which copies it in each step
    return FakeTensorMode()


@pytest.mark.parametrize('options', [
    dict(window=5, window_pattern='SL', n_kv_head=2, residual_lambdas=True),
    dict(pos='alibi', document_token=3, n_kv_head=1, head_dim=10),
    dict(rope_scaling=YARN, window=5, window_pattern='S', **MLA),
    dict(rope_scaling=dict(rope_type='longrope', short_factor=[1.0] * 4, long_factor=[2.0] * 4, factor=2.0)),
    dict(n_expert=4, n_shared_expert=1, d_expert=24, router='sigmoid', balance_bias=True, mlp_bias=True),
    dict(mixer_pattern='DABKC', n_layer=5, linear_n_key_head=2, linear_n_value_head=2, document_token=3),
    dict(pos='learned', attn_sink=True, dropout=0.1, vocab_size=64)], ids=str)
def test_all_tensors_are_on_the_models_device(options, as_cuda, monkeypatch):
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
            move_balance(model, aux['load'])
        assert all(w.grad.device == w.device for w in model.parameters())
        with torch.no_grad():
            for static in (False, True):
                cache = model.make_cache(3, 24, static)
                logits = model(idx, cache=cache, keep=1, lengths=lengths if static else None)[:, -1]
                token = logits.argmax(-1)
                assert model(token[:, None], cache=cache, keep=1).device == idx.device
                cache.reset()


def test_another_layer_predicts_the_token_after_the_next():
    model = tiny(mtp=True, window=5, window_pattern='LS', n_expert=4).train()
    idx, seen = tokens(model, 2, 13), []
    inputs, targets = idx[:, :-1], idx[:, 1:].clone()
    targets[0, 4] = -1
    handle = model.h[-1].register_forward_hook(lambda block, args, y: seen.append(y))
    loss, aux = model(inputs, targets)
    handle.remove()
    assert len(aux['load']) == 2  # of the blocks before it alone
    mtp = model.mtp
    both = torch.cat((mtp.ln_x(seen[0][:, :-1]), mtp.ln_next(model.wte(inputs[:, 1:]))), dim=-1)
    context = make_context(model, inputs[:, :-1])
    logits, after = model.head(mtp.block(mtp.c_in(both), context)), targets[:, 1:]
    kept = after != -1
    near(aux['mtp'], F.cross_entropy(logits[kept], after[kept]), 1e-5)
    assert 'mtp' not in model.eval()(inputs, targets)[1]
    before = model(idx)
    for w in mtp.parameters():
        w.data.zero_()
    assert torch.equal(model(idx), before)


def naive_delta_rule(q, k, v, decay, beta, state, is_start, corrects=True):
    """arXiv:2412.06464, equation 10 (2510.26692, 1; 2405.21060, 1), token by token, in float64."""
    out, state = [], state.double()
    q, k, v, decay, beta = (x.double() for x in (q, k, v, decay, beta))
    for t in range(q.shape[2]):
        state = state * decay[:, :, t, :, None].exp() * ~is_start[:, t, None, None, None]
        wrong = v[:, :, t] - (k[:, :, t, None] @ state)[:, :, 0] * corrects
        state = state + beta[:, :, t, :, None] * k[:, :, t, :, None] * wrong[:, :, None]
        out.append((q[:, :, t, None] @ state)[:, :, 0])
    return torch.stack(out, dim=2), state


@pytest.mark.parametrize('T', [1, 5, 150])
@pytest.mark.parametrize('documents', [False, True])
@pytest.mark.parametrize('channels, corrects, device', [
    (1, True, 'cpu'), (4, True, 'cpu'), (1, False, 'cpu'), (1, True, 'cuda'), (4, True, 'cuda')])
def test_the_chunked_delta_rule_is_the_recurrence(T, documents, channels, corrects, device, monkeypatch):
    if device == 'cuda':  # whose kernel raises where runs are to be equal
        def cumsum(x, *args, kernel=torch.Tensor.cumsum):
            assert not x.is_floating_point()
            return kernel(x, *args)
        has_cumsum = mixers.has_cumsum
        monkeypatch.setattr(mixers, 'has_cumsum', lambda device: has_cumsum('cuda'))
        monkeypatch.setattr(torch.Tensor, 'cumsum', cumsum)
        monkeypatch.setattr(torch, 'are_deterministic_algorithms_enabled', lambda: True)
    g = torch.Generator().manual_seed(T)
    q, k, v = (torch.randn(2, 3, T, width, generator=g) for width in (4, 4, 6))
    k = k / k.norm(dim=-1, keepdim=True)
    decay, beta = -torch.rand(2, 3, T, channels, generator=g) * 2, torch.rand(2, 3, T, 1, generator=g)
    is_start = torch.rand(2, T, generator=g) < 0.1 * documents
    is_start[0, -1] = documents
    inputs = [x.requires_grad_() for x in (q, k, v, decay, beta, torch.randn(2, 3, 4, 6, generator=g))]
    expected = naive_delta_rule(*inputs, is_start, corrects)
    for chunk in (64, 8):
        found = mixers.gated_delta_rule(*inputs, is_start if documents else None, corrects, chunk)
        for a, b in zip(found, expected):
            torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4)
    weight = torch.randn(found[0].shape, generator=g)
    for a, b in zip(*(torch.autograd.grad((y * weight).sum() + after.sum(), inputs)
                      for y, after in (found, expected))):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_strong_decays_of_channels_neither_overflow_nor_vanish():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 64, 4, generator=g) for _ in range(3))
    k, decay = k / k.norm(dim=-1, keepdim=True), torch.tensor([-90.0, -1.0, -1e-3, 0.0]).expand(1, 1, 64, 4)
    state, is_start = torch.zeros(1, 1, 4, 4), torch.zeros(1, 64, dtype=torch.bool)
    for a, b in zip(mixers.gated_delta_rule(q, k, v, decay, torch.ones(1, 1, 64, 1), state),
                    naive_delta_rule(q, k, v, decay, torch.ones(1, 1, 64, 1), state, is_start)):
        torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4)


def dense_experts(moe, x):
    """Every expert for every token, in float64, weighted as in the papers."""
    config, x = moe.config, x.double()
    w = {name: w.double() for name, w in moe.named_parameters()}

    def linear(x, name, e):
        return x @ w[f'{name}.weight'][e].T + (w[f'{name}.bias'][e] if f'{name}.bias' in w else 0)

    def mlp(name, e=...):  # one of the experts, or all that are shared
        up = linear(x, f'{name}.c_fc', e).chunk(len(moe.experts.c_fc.widths), -1)
        return linear(moe.experts.act(*up), f'{name}.c_proj', e)
    logits = x @ w['router.weight'].T + w.get('router.bias', 0)
    # a group scores as its best expert, or as its two best
    score, n_best = (logits.softmax(-1), 1) if config.router == 'softmax' else (logits.sigmoid(), 2)
    choice = score + (moe.expert_bias.double() if config.balance_bias else 0)
    if config.n_group:
        groups = choice.unflatten(-1, (config.n_group, -1))
        group_score = groups.topk(n_best).values.sum(-1)
        allowed = group_score >= group_score.topk(config.topk_group).values[:, -1:]
        choice = groups.where(allowed[..., None], -math.inf).flatten(1)
    weight = score * (choice >= choice.topk(config.n_expert_active).values[:, -1:])
    if config.norm_topk_prob:
        weight = weight / weight.sum(-1, keepdim=True)
    y = sum(mlp('experts', e) * weight[:, e, None] for e in range(config.n_expert))
    y = y * config.routed_scaling_factor
    if moe.shared is None:
        return y
    return y + mlp('shared') * ((x @ w['shared_gate.weight'].T).sigmoid() if config.shared_gate else 1)


@pytest.mark.parametrize('options', [
    {}, dict(n_expert_active=1, norm_topk_prob=False), dict(router='sigmoid', norm_topk_prob=False),
    dict(d_expert=21),
    dict(n_shared_expert=2, routed_scaling_factor=2.5, router='sigmoid', balance_bias=True),
    dict(n_shared_expert=1, shared_gate=True),
    dict(n_expert=8, n_group=4, topk_group=2, n_expert_active=3, norm_topk_prob=False),
    dict(n_expert=8, n_group=2, topk_group=1, router='sigmoid', balance_bias=True, n_expert_active=4),
    dict(mlp='gelu', mlp_bias=True)])
@pytest.mark.parametrize('n', [1, 5, 300])
def test_sorted_experts_equal_the_dense_sum(options, n):
    moe = tiny(**{**dict(n_expert=4, d_expert=24), **options}).h[0].mlp
    if n == 5 and moe.config.balance_bias:
        moe.expert_bias[0] = -9.0  # an expert without tokens
    x, g = torch.randn(1, n, 32, requires_grad=True), torch.randn(n, 32)
    y, expected, params = moe(x, bare_context()), dense_experts(moe, x[0]), [x, *moe.parameters()]
    torch.testing.assert_close(y[0].double(), expected, atol=1e-4, rtol=1e-4)
    for got, wanted in zip(torch.autograd.grad((y[0] * g).sum(), params),
                           torch.autograd.grad((expected * g).sum(), params)):
        torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)


def test_experts_without_rows_get_no_gradient_on_blackwell(monkeypatch):
    layer, offsets = flat.GroupedLinear(3, 16, (8,)), torch.tensor([4, 4, 6], dtype=torch.int32)
    layer.weight.tag.init(layer.weight)
    kernel, skips, x, g = F.grouped_mm, flat.skips_empty, torch.randn(6, 16), torch.randn(6, 8)

    def grouped_mm(x, w, offs):
        w = w.clone()
        w.register_hook(lambda grad: grad.index_fill(0, torch.tensor(1), math.nan))
        return kernel(x, w, offs=offs)
    monkeypatch.setattr(F, 'grouped_mm', grouped_mm)
    monkeypatch.setattr(flat, 'skips_empty', lambda device: skips('cuda'))
    found, expected = (torch.autograd.grad((layer(x.to(dtype), offsets)[0] * g).sum(), layer.weight)[0]
                       for dtype in (torch.bfloat16, torch.float32))
    near(found, expected, 0.02)
    assert not found[1].any()


@pytest.mark.parametrize('router, k', [('softmax', 1), ('softmax', 4), ('sigmoid', 2)])
@pytest.mark.parametrize('per_sequence', [False, True])
def test_aux_losses_follow_their_formulas(router, k, per_sequence):
    moe = tiny(n_expert=8, n_expert_active=k, router=router, balance_per_sequence=per_sequence).h[0].mlp
    x = torch.randn(3, 10, 32)

    def statistics():
        routing = []
        moe(x, bare_context(routing=routing))
        return routing[0][1:]
    balance, z, load = statistics()
    logits = (x @ moe.router.weight.T).view(3 if per_sequence else 1, -1, 8)
    score, each = logits.softmax(-1) if router == 'softmax' else logits.sigmoid(), []
    for row in score:  # arXiv:2101.03961, equations 4 to 6, for k experts a token
        f = torch.bincount(row.topk(k).indices.flatten(), minlength=8) / (len(row) * k)
        each.append(8 * (f * (row / row.sum(-1, keepdim=True)).mean(0)).sum())
    torch.testing.assert_close(balance, torch.stack(each).mean())
    torch.testing.assert_close(z, logits.exp().sum(-1).log().square().mean())
    assert torch.equal(load, torch.bincount(score.topk(k).indices.flatten(), minlength=8).float())
    grads = torch.autograd.grad(balance, [moe.router.weight, moe.experts.c_fc.weight], allow_unused=True)
    assert grads[0].abs().sum() > 0 and grads[1] is None
    with torch.no_grad():
        moe.router.weight.zero_()  # the scores are even, whoever is chosen
    balance, z, load = statistics()
    assert balance.item() == pytest.approx(1.0, abs=1e-5) and z.item() == pytest.approx(math.log(8) ** 2)
    assert load.sum() == 3 * 10 * k


def test_a_router_deep_in_underflow_still_weighs_to_one():
    moe, routing = tiny(n_expert=4, router='sigmoid', mlp_bias=True).h[0].mlp, []
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.bias.copy_(torch.tensor([-60.0, -60.5, -61.0, -200.0]))
    weight, chosen, _, _ = moe.route(torch.randn(7, 32))
    moe(torch.randn(1, 7, 32), bare_context(routing=routing))
    torch.testing.assert_close(weight.sum(-1), torch.ones(7))
    assert set(chosen.flatten().tolist()) == {0, 1} and routing[0][1] >= 1


def test_the_balance_bias_evens_the_load_and_is_never_rounded():
    model = tiny(n_expert=4, router='sigmoid', balance_bias=True)
    moe, x = model.h[0].mlp, torch.randn(50, 32)
    assert model.to(torch.bfloat16).h[0].mlp.expert_bias.dtype == torch.float32
    model.float()
    for _ in range(300):
        load = torch.bincount(moe.route(x)[1].flatten(), minlength=4)
        move_balance(model, load.expand(2, 4).float(), rate=0.01)
    assert load.max() < 1.3 * load.float().mean()


def test_rotary_scalings_follow_their_papers():
    d, base, original, s = 16, 10000.0, 64, 8.0
    def angles(base):
        return torch.tensor([base ** (-2 * i / d) for i in range(d // 2)])
    plain, told = angles(base), dict(original_max_position_embeddings=original)
    kept = ((original * plain / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)  # Llama 3: by turns
    yarn = dict(rope_type='yarn', factor=s, **told)
    lists = dict(short_factor=[1.0] * 8, long_factor=[2.0 + i for i in range(8)])
    for scaling, expected, factor in (
            ({}, plain, 1), (dict(rope_type='linear', factor=s), plain / s, 1),
            (dict(rope_type='ntk', factor=s), angles(base * s ** (d / (d - 2))), 1),
            (dict(rope_type='dynamic', factor=s, **told),
             angles(base * (s * 512 / original - (s - 1)) ** (d / (d - 2))), 1),
            # check.py holds YaRN's angles
            (dict(yarn, mscale=0.7, mscale_all_dim=0.4), None,
             (0.07 * math.log(s) + 1) / (0.04 * math.log(s) + 1)),
            (dict(yarn, attention_factor=1.5), None, 1.5),
            (dict(rope_type='llama3', factor=s, low_freq_factor=1.0, high_freq_factor=4.0, **told),
             plain * kept + plain / s * (1 - kept), 1),
            (dict(rope_type='longrope', factor=s, **lists, **told),
             plain / torch.tensor(lists['long_factor']),
             math.sqrt(1 + math.log(s) / math.log(original))),
            (dict(rope_type='longrope', factor=1.0, **lists, original_max_position_embeddings=512),
             plain, 1)):
        config = GPTConfig(head_dim=d, block_size=512, rope_base=base, rope_scaling=scaling or None)
        cos, sin = flat.rope_table(config.rope_kind(), torch.tensor([[0, 1]]), config.block_size)
        assert cos[0, 0, 0].tolist() == pytest.approx([factor] * 8)
        if expected is not None:
            torch.testing.assert_close(torch.atan2(sin, cos)[0, 0, 1], expected, rtol=1e-5, atol=0)


def test_a_scaling_is_told_the_trained_length(tmp_path):
    """A new model's is its block_size; one that is read with a longer context keeps its own."""
    short, told = {'rope_type': 'yarn', 'factor': 4.0}, {**YARN, 'original_max_position_embeddings': 16}
    for scaling in (None, short):  # trained plainly, and so
        model = tiny(block_size=16, rope_scaling=scaling)
        torch.save({'model': model.state_dict(), 'model_args': vars(model.config)}, tmp_path / 'ckpt.pt')
        longer, _, rest = hub.load(tmp_path / 'ckpt.pt', block_size=64, rope_scaling=short)
        assert longer.config.rope_scaling == rest['model_args']['rope_scaling'] == told


@torch.no_grad()
def test_attention_weights_on_request():
    for options in (dict(n_kv_head=2), MLA, dict(window=3, window_pattern='S')):
        model, weights = tiny(**options), []
        idx = tokens(model, 2, 12)
        torch.testing.assert_close(model(idx, weights=weights), model(idx), atol=1e-4, rtol=1e-4)
        for w in weights:
            torch.testing.assert_close(w.triu(1).sum(-1) + w.sum(-1), torch.ones(2, 4, 12))
    assert len(weights) == 2 and not weights[0].tril(-3).any()


class Swish(torch.nn.Module):
    """An activation with a parameter, of no dimension: arXiv:1710.05941."""

    def __init__(self):
        super().__init__()
        self.beta = flat.parameter(init=torch.nn.init.ones_, group='vector')

    def forward(self, x):
        return x * (self.beta * x).sigmoid()


class LeakyAverage(flat.Mixer):
    """A mixer with a state and a parameter of each kind: y_t = m y_{t-1} + x_t W."""

    documents = False

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.c_fc = flat.Linear(config.n_embd, 16)
        self.c_proj = flat.Linear(16, config.n_embd, init=flat.branch_init(config))
        self.leak = flat.parameter(1, 16, init=torch.nn.init.ones_, group='vector')
        self.states = [((16,), torch.float32)]

    def flops(self, length):
        return 6 * 16

    def forward(self, x, context):
        cache = context.cache
        state = x.new_zeros(len(x), 16) if cache is None else cache.states[self.entry(context)][0]
        y, last, is_token = [], state, context.is_token()
        for t, new in enumerate(self.c_fc(x).unbind(1)):
            now = last * self.leak.sigmoid() + new
            last = now if is_token is None else torch.where(is_token[:, t:t + 1], now, last)
            y.append(now)
        if cache is not None:
            state.copy_(last)
        return self.c_proj(torch.stack(y, dim=1))


class WindowBase(flat.Attention):
    """A rotary base of its own in windowed layers, as in Gemma 3."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        if self.window:
            self.rope_kind = (50.0, *self.rope_kind[1:])


class TokenTable(flat.Attention):
    """Attention to the stream with another embedding of the tokens added."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.table = flat.Embedding(config.vocab_size, config.n_embd, torch.nn.init.zeros_)

    def forward(self, x, context):
        return super().forward(x + self.table(context.idx), context)


class Canon(flat.Attention):
    """A short convolution before attention, a mixer inside a mixer: arXiv:2512.17351."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.canon = mixers.ShortConvolution(config, layer)

    def forward(self, x, context):
        return super().forward(x + self.canon(x, context), context)


class SharedKeys(flat.Attention):
    """Layers after the first attend to the keys and values of the first: arXiv:2405.05254."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        if layer:
            self.slots, self.k_norm = None, torch.nn.Identity()

    def forward(self, x, context):
        q, k, v, _ = self.project(x, context)
        if self.layer == 0:
            k, v = (k, v) if context.cache is None else context.cache.append(self, context, k, v)
            context.hand_on(0, (k, v))
        return self.c_proj(self.attend(q, *context.handed[0], context).transpose(1, 2).flatten(2))


class TwoStreams(torch.nn.Module):
    """A placement of norms with two streams, as hyper-connections have: arXiv:2409.19606."""

    def __init__(self, config, layer):
        super().__init__()
        self.share = flat.parameter(2, 1, 1, 1, init=torch.nn.init.ones_, group='scalar')

    @staticmethod
    def enter(x):
        return torch.stack((x, x))

    @staticmethod
    def leave(x):
        return x.sum(0)

    def forward(self, x, attn, mlp, ln_1, ln_2):
        x = x + self.share * attn(ln_1((self.share * x).sum(0)))
        return x + mlp(ln_2(x[0]))


def halved(freq, base, length, *, factor):
    return freq / factor, 1.0


def triple(x, attn, mlp, ln_1, ln_2, ln_3):
    x = x + attn(ln_1(x))
    return ln_3(x + mlp(ln_2(x)))


@pytest.fixture
def fork(monkeypatch):
    """What a fork adds: each choice is one entry in a table."""
    for table, name, entry in (
            (flat.ACTIVATIONS, 'swish', (Swish, False)), (flat.ROPE_SCALINGS, 'halved', halved),
            (flat.NORM_PLACEMENTS, 'triple', (triple, 3)), (flat.MIXERS, 'X', LeakyAverage),
            (flat.MIXERS, 'W', WindowBase), (flat.MIXERS, 'T', TokenTable), (flat.MIXERS, 'Y', Canon),
            (flat.MIXERS, 'H', SharedKeys), (flat.NORM_PLACEMENTS, 'streams', (TwoStreams, 2))):
        monkeypatch.setitem(table, name, entry)


@pytest.mark.parametrize('options', [
    dict(mlp='swish', rope_scaling={'rope_type': 'halved', 'factor': 2.0}, norm_placement='triple',
         mixer_pattern='XA'),
    dict(mixer_pattern='W', window=5, window_pattern='SL', n_kv_head=2),
    dict(mixer_pattern='T', n_kv_head=1, document_token=3),
    dict(mixer_pattern='YD', norm_placement='streams', linear_conv_kernel_dim=3, document_token=3),
    dict(mixer_pattern='H', n_kv_head=2), dict(turns=[0, 1, 1, 0], mixer_pattern='AD')], ids=grid_name)
def test_the_grid_holds_what_a_fork_adds(options, fork, monkeypatch):
    test_cached_equals_uncached(options, monkeypatch)
    for test in (test_every_parameter_learns, test_no_token_sees_the_future_or_past_its_window):
        test(options)


def test_only_products_are_counted_as_such(fork):
    plain, looked_up, leaky = tiny(), tiny(mixer_pattern='T'), tiny(mixer_pattern='XA')
    assert num_params(looked_up) == num_params(plain) + 2 * 61 * 32
    assert flops_per_token(looked_up) == flops_per_token(plain)
    assert flops_per_token(leaky, 10) - flops_per_token(leaky, 5) == 12 * 32 * 5  # the attention layer's
    routed = dict(n_expert=4, n_shared_expert=1)
    assert (flops_per_token(tiny(**routed, shared_gate=True)) - flops_per_token(tiny(**routed))
            == 6 * 2 * 32)


@pytest.mark.parametrize('options', [
    {}, dict(n_kv_head=2, attn_gate=True, tie_word_embeddings=False), {**MLA, 'q_lora_rank': 12},
    dict(turns=[0, 1, 0]), dict(n_expert=4, n_shared_expert=1, d_expert=24)], ids=grid_name)
def test_flops_are_those_that_torch_counts(options):
    model = tiny(**options)
    with FlopCounterMode(display=False) as counter:  # forward alone; attention written out, as in training
        model(tokens(model, 2, 24))
    assert 3 * counter.get_total_flops() == flops_per_token(model) * 48


def test_options_that_no_layer_has_are_refused_by_any_letter(monkeypatch):
    monkeypatch.setattr(flat, 'MIXERS', {'X': LeakyAverage, 'G': mixers.GatedDeltaNet, 'B': WindowBase})
    for options, message in ((dict(mixer_pattern='X', linear_conv_kernel_dim=3), 'only G layers have this'),
                             (dict(mixer_pattern='X', attn_sink=True), 'only B layers have this'),
                             (dict(mixer_pattern='XG', rope_base=5.0), 'only B layers have this'),
                             (dict(mixer_pattern='X', pos='alibi'), 'layer of attention that has positions')):
        with pytest.raises(ValueError, match=message):
            GPTConfig(**options)
    monkeypatch.setattr(LeakyAverage, 'fields', ('rope_base', 'linear_n_key_head'))
    GPTConfig(mixer_pattern='X', rope_base=5.0, linear_n_key_head=3)  # its own now


@pytest.mark.parametrize('forgotten, message', [
    ('tag', r'h\.0\.attn\.scale has no tag: make it with parameter'),
    ('group', r'h\.0\.attn\.scale \(3,\) is tagged as a matrix'), ('init', 'scale holds NaN after its init'),
    ('column', r'scale \(3, 1\) is tagged as a matrix'),
    ('row', r'scale\.weight \(1, 32\) is tagged as a matrix'),
    ('documents', 'needs mixers that all keep documents apart'),
    ('states', 'Forgetful of layer 0 says neither slots nor')])
def test_what_a_fork_forgets_fails_loudly(forgotten, message, monkeypatch):
    class Forgetful(LeakyAverage):
        def __init__(self, config, layer):
            super().__init__(config, layer)
            ones, init = dict(init=torch.nn.init.ones_), dict(init=torch.ones_like)
            self.states, self.scale = [], {
                'tag': lambda: torch.nn.Parameter(torch.ones(3, 4)),
                'group': lambda: flat.parameter(3, **ones, group='matrix'),
                'init': lambda: flat.parameter(3, **init, group='vector'),
                'column': lambda: flat.parameter(3, 1, **ones, group='matrix'),
                'row': lambda: flat.Linear(config.n_embd, 1)}.get(forgotten, lambda: None)()
    monkeypatch.setitem(flat.MIXERS, 'X', Forgetful)
    with pytest.raises(ValueError, match=message):
        tiny(mixer_pattern='X', document_token=3 if forgotten == 'documents' else None).make_cache(1, 5)


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
    assert make_context(model, idx).ropes[model.config.rope_kind()][0].dtype == torch.float32  # never rounded


def test_loss_counts_only_targets(monkeypatch):
    model, kernel = tiny(), F.cross_entropy

    def limited(logits, *args, **options):
        assert logits.numel() <= 200  # as CUDA's kernel has a limit
        return kernel(logits, *args, **options)
    model = tiny()
    idx, targets = tokens(model, 2, 8), tokens(model, 2, 8)
    targets[0, :5] = -1
    logits = model(idx)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    torch.testing.assert_close(model(idx, targets)[0], expected)
    with monkeypatch.context() as patch:
        patch.setattr(flat, 'MOST_LOGITS', 200)
        patch.setattr(F, 'cross_entropy', limited)
        loss, _ = model(idx, targets)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(*(torch.autograd.grad(x, model.wte.weight)[0] for x in (loss, expected)))
    targets[0, :3] = -100  # torch's
    loss, aux = model(idx, targets, keep=3)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(aux['logits'], logits[:, -3:])
    assert model(idx, torch.full_like(targets, -1))[0].item() == 0.0  # nothing to learn is no nan


def test_logits_stay_within_the_graph_of_the_loss():
    model, made = tiny().train(), []
    for block in model.h:  # as a sharded model's, which breaks the graph at each
        block.forward = torch.compiler.disable(block.forward)

    def backend(graph, inputs):
        def run(*inputs):
            made.append(graph(*inputs))
            return made[-1]
        return run
    idx = tokens(model, 2, 8)
    loss, _ = torch.compile(model, backend=backend)(idx, idx)
    torch.testing.assert_close(made[-1][0], loss)
    assert all(x.shape[-1:] != (61,) for outputs in made for x in outputs)


def test_activations_follow_their_formulas():
    x = torch.randn(5, 8, dtype=torch.float64) * 3
    def phi(x):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    def tanh(x):
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    def silu(x, steep=1.0):
        return x / (1 + torch.exp(-steep * x))
    for name, f in {'gelu': phi, 'gelu_tanh': tanh, 'relu2': lambda x: x.clamp(min=0)**2, 'silu': silu,
                    'swiglu': lambda x, up: silu(x) * up, 'geglu': lambda x, up: phi(x) * up,
                    'geglu_tanh': lambda x, up: tanh(x) * up,
                    'swiglu_oai': lambda x, up: silu(x.clamp(max=7), 1.702) * (up.clamp(-7, 7) + 1)}.items():
        mlp = flat.MLP(GPTConfig(n_embd=8, n_head=1, mlp=name), 24).double()
        torch.testing.assert_close(mlp(x), f(*(x @ mlp.c_fc.weight.T).split(24, -1)) @ mlp.c_proj.weight.T)


@pytest.mark.parametrize('options', [
    dict(bias=True, pos='learned', attn_sink=True, residual_lambdas=True), dict(norm_placement='sandwich'),
    dict(mixer_pattern='DA', linear_n_value_head=64, attn_gate=True),
    dict(tie_word_embeddings=False, head_bias=True, n_expert=4, n_shared_expert=1, balance_bias=True,
         kv_lora_rank=96, q_lora_rank=96)], ids=grid_name)
def test_initial_weights_are_what_the_table_says(options):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=192, vocab_size=500, block_size=64, **options))
    bounds = dict(conv=(-4 ** -0.5, 4 ** -0.5), A_log=(-7.0, math.log(16)),
                  dt_bias=(math.log(math.expm1(0.0009)), math.log(math.expm1(0.11))))
    for name, w in model.state_dict().items():
        part = name.rpartition('.')[2]
        if part in bounds:
            assert bounds[part][0] <= w.min() < w.max() <= bounds[part][1] and w.std() > 0.2, name
        elif (part in ('bias', 'expert_bias', 'sink', 'x0_lambdas') or name == 'lm_head.weight'
                or 'c_proj' in name and 'norm_placement' not in options):
            assert not w.any(), name
        elif w.ndim == 1:
            assert (w == 1).all(), name
        else:
            std = 0.02 if name in ('wte.weight', 'wpe.weight') else (1 / (3 * w.shape[-1])) ** 0.5
            assert w.std().item() == pytest.approx(std, rel=0.05) and abs(w.mean()) < 0.1 * std, name


@pytest.mark.parametrize('bias', [None, torch.randn(61)])
def test_the_padded_product_of_a_vocabulary_is_the_product(bias):
    x, w = torch.randn(2, 5, 32, requires_grad=True), torch.randn(61, 32, requires_grad=True)
    padded, plain = flat.aligned_linear(x, w, bias), F.linear(x, w, bias)
    torch.testing.assert_close(padded, plain)
    for a, b in zip(*(torch.autograd.grad(y.sin().sum(), (x, w)) for y in (padded, plain))):
        torch.testing.assert_close(a, b)


def test_counts_of_parameters_and_flops():
    with torch.device('meta'):
        gpt2 = GPT(GPTConfig(vocab_size=50257, n_layer=12, n_head=12, n_embd=768, pos='learned',
                             norm='layernorm', mlp='gelu_tanh', qk_norm=False, bias=True))
    assert num_params(gpt2) == 124_439_808
    # 12 layers of 12 C^2 weights and the head, 6 FLOPs each; 12 L H D T for attention
    assert flops_per_token(gpt2) == 6 * (12 * 12 * 768**2 + 50257 * 768) + 12 * 12 * 768 * 1024
    looked_up = tiny(bigram_size=50, residual_lambdas=True)  # or scaled: no products
    assert flops_per_token(looked_up) == flops_per_token(tiny())
    lambdas = flat.account(looked_up)
    assert lambdas['resid_lambdas'][0] == lambdas['x0_lambdas'][0] == 2
    model = tiny(n_kv_head=2, bias=True)
    groups = {name: tag.group for name, tag in model.tags.items()}
    assert groups.keys() == dict(model.named_parameters()).keys()
    assert all((groups[name] == 'vector') == (w.ndim < 2) for name, w in model.named_parameters())
    assert [name for name in groups if groups[name] == 'embedding'] == ['wte.weight']
    assert row_splits(model)[model.h[0].attn.c_attn.weight] == (32, 16, 16)
    assert row_splits(model)[model.h[0].attn.c_proj.weight] == (32,)


def test_dropout_drops_its_share_and_keeps_the_mean():
    torch.manual_seed(0)
    for p in (0.2, 0.5, 0.001):
        y = flat.dropout(torch.ones(1000, 999), p)
        assert (y == 0).float().mean().item() == pytest.approx(p, rel=0.05)
        assert y.mean().item() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize('options, parts', [
    (dict(n_embd=100, n_head=12, n_kv_head=5, head_bias=True),  # of three modules
     ['n_embd=100, n_head=12: n_head must divide n_embd', 'n_kv_head=5, n_head=12', 'head_bias=True: needs']),
    (dict(mlp='swoglu', n_layer=0, pos_pattern='PX', logit_softcap=-1.0),
     ["mlp='swoglu' is none of swiglu", 'n_layer=0 must be above 0', "pos_pattern='PX' must be made of P, N",
      'logit_softcap=-1.0 must be at least 0']),
    (dict(kv_lora_rank=8, n_kv_head=2, qk_norm=True, qk_rope_head_dim=5),
     ['n_kv_head=2', "qk_norm=True, mixer_pattern='M': only A", 'rope_dim=5']),
    (dict(pos='learned', pos_pattern='PN', alibi_scale=2.0), ["pos_pattern='PN': needs", 'alibi_scale=2.0']),
    (dict(rope_scaling={'rope_type': 'warp', 'factor': 2.0}), ["'warp'; rope_type is one of linear"]),
    (dict(rope_local={'rope_base': 5.0}), ["needs pos='rope', and layers with a window"]),
    (dict(window=5, window_pattern='SC', rope_local={'base': 5.0, 'rope_base': -5.0, 'rope_scaling': 'yarn'}),
     ['there is no base in it', "AttributeError 'str'"]),
    (dict(window=5, window_pattern='S', rope_local={'rope_base': -5.0}), ['rope_base must be above 0']),
    (dict(query_scale={'beta': 1.0}, qk_norm='unit', pos='alibi'),
     ["query_scale={'beta': 1.0}: TypeError", "qk_norm='unit': needs pos='rope'"]),
    (dict(query_scale={'beta': 1.0, 'length': 4, 'layers': 'N'}), ["pos_pattern='P': no layer"]),
    (dict(mlp_limit=2.0, expert_pattern='N', norm_placement='post'),
     ["mlp='swiglu_oai'", "needs norm_placement='pre'"]),
    (dict(mixer_pattern='K', linear_n_value_head=24), ['K layers have as many key heads']),
    (dict(window=8), ['window=8: needs window_pattern']), (dict(window_pattern='S'), ['needs window']),
    (dict(n_expert=4, n_expert_active=5, n_group=3, topk_group=4),
     ['n_expert_active=5, n_expert=4', 'n_group=3, topk_group=4']),
    (dict(n_shared_expert=1, router='sigmoid'), ['n_shared_expert=1: needs n_expert', "router='sigmoid'"]),
    (dict(document_token=99, vocab_size=99), ['no such token']),
    (dict(mixer_pattern='DA', **MLA), ['not both', 'kv_lora_rank=16']),
    (dict(mixer_pattern='DDDA', n_layer=3), ['a layer for each letter'])])
def test_an_invalid_config_names_every_problem(options, parts):
    with pytest.raises(ValueError) as error:
        GPTConfig(**options)
    message = str(error.value)
    assert all(part in message for part in parts), message
    assert '\n' not in message and message.startswith('invalid config: ')


@pytest.mark.parametrize('options, targets', [
    (dict(bias=True, n_kv_head=2, attn_gate=True), ['c_attn', 'c_proj', 'c_fc']),
    ({**MLA, 'q_lora_rank': 8}, ['attn.c_attn', 'c_q', 'c_kv', 'attn.c_proj']),  # c_kv is never called
    (dict(n_expert=4, n_shared_expert=1, d_expert=8), ['router', 'shared.c_fc', 'c_attn']),
    (dict(mixer_pattern='DA'), ['c_attn', '1.attn.c_proj', 'c_proj'])], ids=str)
def test_adapters_start_as_nothing_and_merge_into_the_weights(options, targets):
    model = tiny(**options)
    idx, before = tokens(model, 2, 16), {name: w.clone() for name, w in model.state_dict().items()}
    logits, n = model(idx).detach(), num_params(model)
    weights.add_lora(model, 3, 6.0, targets)
    assert torch.equal(model(idx), logits)
    adapters = weights.lora_state(model)
    assert {name for name, w in model.named_parameters() if w.requires_grad} == set(adapters)
    assert num_params(model) == n + sum(w.numel() for w in adapters.values())
    for w in adapters.values():
        w += torch.randn_like(w) * 0.1
    model(idx, idx)[0].backward()
    assert all((w.grad is not None and bool(w.grad.any())) == w.requires_grad for w in model.parameters())
    expected = model(idx).detach()
    near(feed(model, idx, [9, 1, 6], model.make_cache(2, 16)).detach(), expected, 2e-5)
    for name, a in adapters.items():
        if name.endswith('lora_a'):  # W + alpha / rank B A, by hand
            before[name.removesuffix('lora_a') + 'weight'] += 6 / 3 * adapters[name[:-1] + 'b'] @ a
    weights.merge_lora(model)
    torch.testing.assert_close(dict(model.state_dict()), before, atol=1e-6, rtol=1e-5)
    assert (expected - logits).abs().max() > 0.01
    near(model(idx), expected, 2e-5)


def test_what_cannot_have_an_adapter_is_named():
    model = tiny(n_expert=4, n_shared_expert=1, d_expert=8)
    for target in ('c_fc', 'q_proj', 'attn', '', 'lm_head'):
        with pytest.raises(ValueError, match=f'{target!r} is not the name of linear layers.* attn.c_attn, '):
            weights.add_lora(model, 2, 1, ['c_attn', target])
        assert all(w.requires_grad for w in model.parameters())


def test_importing_and_building_a_model_leaves_the_compiler_alone():
    """It takes as long to import as all of torch."""
    code = ('import sys, torch, model\nwith torch.device("meta"): model.GPT(model.GPTConfig())\n'
            'print("torch._dynamo" in sys.modules)')
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout == 'False\n'



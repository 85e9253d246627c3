"""Tests of sample."""
import copy
import math
import os
import signal
import time

import numpy as np
import pytest
import torch
from common import (
    CHAT_SETTINGS,
    CHAT_TEMPLATES,
    by_hand,
    byte_chat_tokenizer,
    chat_model,
    dequantized,
    from_nothing,
    made,
    new_chat,
)

import bench as flat_bench
import model as flat
import sample as flat_sample
import tokenizer as flat_tokenizer
from sample import TextStream, generate, sample_token
from test_model import MLA, YARN, near, tiny
from tokenizer import make_tokenizer

transformers = pytest.importorskip('transformers', reason='the oracle of the parity tests')


# sampling ---------------------------------------------------------------------------------------------------
def draws(logits, n=4000, **options):
    u = (torch.arange(n) + 0.5) / n
    return torch.bincount(sample_token(logits.expand(n, -1), u, **options), minlength=logits.shape[-1]) / n


def test_sample_token_draws_from_the_distribution():
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])
    torch.testing.assert_close(draws(logits), logits.softmax(-1), atol=1e-3, rtol=0)
    torch.testing.assert_close(draws(logits, temperature=0.5), (logits / 0.5).softmax(-1), atol=1e-3, rtol=0)
    top = torch.tensor([0, 1, 0, 0, 1]).bool()
    torch.testing.assert_close(draws(logits, top_k=2), logits.masked_fill(~top, -math.inf).softmax(-1),
                               atol=1e-3, rtol=0)
    p = logits.softmax(-1)  # sorted: 0.470, 0.285, 0.173, 0.064, 0.009
    assert (draws(logits, top_p=0.46) > 0).tolist() == [False, True, False, False, False]
    assert (draws(logits, top_p=0.75) > 0).tolist() == [False, True, False, False, True]
    assert (draws(logits, top_p=1e-9) > 0).sum() == 1
    torch.testing.assert_close(draws(logits, top_p=1.0), p, atol=1e-3, rtol=0)
    assert (draws(logits, min_p=0.3) > 0).tolist() == (p >= 0.3 * p.max()).tolist()


def test_sample_token_at_the_edges():
    tied = torch.zeros(1, 5)
    assert len({sample_token(tied, torch.tensor([u]), top_k=1).item() for u in (0.0, 0.3, 0.999)}) == 1
    logits = torch.tensor([[0.0, 4.0, 1.0]])
    for options in (dict(top_k=1), dict(top_k=0), dict(top_p=0.1), dict(top_k=3, top_p=1.0), dict(min_p=0.5)):
        assert sample_token(logits, torch.tensor([0.999]), temperature=0, **options).item() == 1
    never = torch.tensor([[-math.inf, 1.0, -math.inf]])
    for u in (0.0, 1 - 2**-24):
        assert sample_token(never, torch.tensor([u])).item() == 1
    assert sample_token(torch.randn(3, 7), torch.rand(3), top_k=200).shape == (3,)


def test_repetition_penalty():
    logits, seen = torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[True, True, False]])
    assert flat_sample.penalise(logits, seen, 2.0).tolist() == [[1.0, -4.0, 1.0]]
    model = tiny()
    plain = made(model, [[1, 2]], 12, temperature=0)[0]
    never_twice = made(model, [[1, 2]], 12, temperature=0,
                       repetition_penalty=1e9)[0]
    assert len(set(never_twice + [1, 2])) == 14 and len(set(plain)) < 12


@pytest.mark.parametrize('variant', [
    {}, dict(n_kv_head=2, pos='learned', norm='layernorm'), dict(n_kv_head=1, pos='none', head_dim=10), MLA,
    dict(window=4, window_pattern='SL'), dict(pos='alibi', document_token=3, window=6, window_pattern='S'),
    dict(rope_scaling=YARN, n_expert=4), dict(mixer_pattern='DA')])
def test_generate_equals_uncached_generation_for_ragged_batches(variant):
    model, options = tiny(**variant), dict(temperature=0.9, top_k=20)
    prompts = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 8, 7], list(range(30))]  # the last is longer than the context
    expected = [by_hand(model, prompt, 40, row, **options) for row, prompt in enumerate(prompts)]
    assert made(model, prompts, 40, seed=7, **options) == expected  # 40 more: the context fills repeatedly
    assert made(model, prompts[:1], 40, seed=7, **options) == expected[:1]  # alone, after other calls
    assert made(model, prompts, 40, seed=7, batch_size=2, **options) == expected
    assert made(model, prompts, 40, seed=7, first=2, **options) == [None, None, *expected[2:]]


def repeats_itself(**options):
    """A model whose greedy text runs in circles, so that prompt lookup has something to find."""
    model = tiny(**options)
    model.wte.weight.data *= 4
    return model


@pytest.mark.parametrize('variant', [
    {}, dict(n_kv_head=1, pos='learned', norm='layernorm'), MLA, dict(window=4, window_pattern='SL'),
    dict(pos='alibi', document_token=3, window=6, window_pattern='S'), dict(rope_scaling=YARN, n_expert=4)])
@pytest.mark.parametrize('options', [dict(temperature=0), dict(temperature=0.5, repetition_penalty=1.05)])
def test_speculation_changes_no_token(variant, options):
    model = repeats_itself(**variant)
    prompts = [[5], [1, 2, 3, 1, 2, 3, 1], [9, 8, 7], list(range(30)), [4, 4, 4]]
    plain = made(model, prompts, 40, seed=7, **options)
    draft = repeats_itself(**variant)
    for w in draft.parameters():
        w.data += 0.02 * torch.randn_like(w)
    for proposer in (flat_sample.Lookup(3), flat_sample.Draft(draft, 2), flat_sample.Draft(model, 4)):
        for batch_size in (2, 5):  # rows are replaced; rows are dropped
            found = made(model, prompts, 40, seed=7, batch_size=batch_size, proposer=proposer, **options)
            assert found == plain
        assert 0 < proposer.kept <= proposer.fed
        stop = plain[0][20]
        assert (made(model, prompts[:1], 40, seed=7, proposer=proposer, stop_tokens=(stop,), **options)
                == [plain[0][:plain[0].index(stop)]])


def test_speculation_needs_fewer_steps():
    model, prompt = repeats_itself(), [[5, 6, 5, 6]]
    draft, fed = copy.deepcopy(model), count_fed(model)  # which is always right
    plain = made(model, prompt, 20, temperature=0)
    assert fed == [4] + [1] * 19
    fed.clear()
    assert made(model, prompt, 20, temperature=0, proposer=flat_sample.Draft(draft, 4)) == plain
    assert fed == [4, 5, 5, 5, 5]


def test_prompt_lookup():
    def look_up(context, count):
        """By the definition, anew for each context."""
        for n in (3, 2, 1):
            for end in range(len(context) - 1, n - 1, -1):
                if context[end - n:end] == context[-n:]:
                    return [(context[end:] * count)[i] for i in range(count)]
        return []
    assert look_up([1, 2, 3, 9, 1, 2, 3, 8, 5, 1, 2, 3], 2) == [8, 5]  # the latest
    assert look_up([7, 2, 3, 4, 0, 5, 3, 9, 2, 3], 4) == [4, 0, 5, 3]  # two tokens, where three never were
    assert look_up([1, 2, 3], 4) == [] == look_up([1], 4)
    assert look_up([5, 4, 4], 3) == [4, 4, 4] and look_up([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    lookup, rng = flat_sample.Lookup(5), np.random.default_rng(0)
    rows = [flat_sample.Sample(number, [1], np.zeros(100), 100) for number in range(3)]
    for _ in range(200):  # contexts grow, and are cropped now and then
        for row in rows:
            row.context += rng.integers(4, size=rng.integers(1, 4)).tolist()
            if rng.random() < 0.1:
                row.context = row.context[-10:]
        assert lookup.propose(rows, 1000, None) == [look_up(row.context, 5) for row in rows]
    rows[1].ended = True
    assert lookup.propose(rows, 1000, None)[1] == []


def test_speculation_with_a_state_is_refused():
    with pytest.raises(ValueError, match='layer 0 of the draft, a GatedDeltaNet, keeps a state.*leave out'):
        flat_sample.Draft(tiny(mixer_pattern='DA'), 2)
    with pytest.raises(ValueError, match='layer 0 of the model, a GatedDeltaNet, keeps a state.*leave out'):
        made(tiny(mixer_pattern='DA'), [[1, 2, 1]], 9, proposer=flat_sample.Lookup(2), temperature=0)


@pytest.mark.parametrize('proposer', [None, 'lookup', 'draft'])
def test_the_second_token_is_distributed_as_the_model_says(proposer):
    """Chi-squared over 4,000 samples of a vocabulary of 4, of the second token, given the first."""
    model = tiny(vocab_size=4, n_layer=1, block_size=8)
    model.wte.weight.data *= 3
    chosen = {None: None, 'lookup': flat_sample.Lookup(2), 'draft': flat_sample.Draft(
        tiny(vocab_size=4, n_layer=1, block_size=8), 2)}[proposer]
    found = np.array(made(model, [[1, 2, 1, 2, 1]] * 4000, 3, temperature=1.3, proposer=chosen))
    idx = torch.tensor([[1, 2, 1, 2, 1, a, b] for a in range(4) for b in range(4)])
    with torch.no_grad():
        p = (model(idx).double() / 1.3).softmax(-1)
    expected = p[0, 4, :, None] * p[::4, 5]                                            # (first, second)
    seen = np.zeros((4, 4))
    np.add.at(seen, (found[:, 0], found[:, 1]), 1)
    assert chosen is None or chosen.kept > 1000
    chi2 = ((seen - 4000 * expected.numpy()) ** 2 / (4000 * expected.numpy())).sum()
    assert chi2 < 37.7  # 99.9% of 15 degrees of freedom
    third = torch.tensor([[1, 2, 1, 2, 1, *row] for row in found[:, :2].tolist()])
    with torch.no_grad():
        p = (model(third)[:, -1].double() / 1.3).softmax(-1)
    counts, mean = np.bincount(found[:, 2], minlength=4), p.sum(0).numpy()
    spread = (p * (1 - p)).sum(0).sqrt().numpy()
    assert (abs(counts - mean) < 4 * spread).all()


@pytest.mark.parametrize('options', [dict(temperature=0), {}, dict(top_k=3), dict(repetition_penalty=1.1)])
def test_logits_that_are_nan_are_refused(options):
    model = tiny()
    model.h[0].mlp.c_proj.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match='logits of token 1 of sample 0 are NaN.*float32'):
        made(model, [[1, 2]], 5, **options)


def test_what_is_read_late_is_the_same(monkeypatch):
    """As on a GPU, which is some steps ahead of what is read."""
    model, prompts = tiny(), [[5], [1, 2, 3, 4, 5, 6, 7], [9, 8, 7], list(range(30))]
    def enough_of_one(**options):
        found, enough = [], set()
        for sample, token in generate(model, prompts, 30, seed=2, enough=enough, **options):
            found.append((sample, token))
            if found.count((1, None)) == 0 and sum(s == 1 for s, _ in found) == 5:
                enough.add(1)
        return sorted(found, key=lambda pair: pair[0])
    plain = made(model, prompts, 30, seed=2)
    penalty = made(model, prompts, 30, seed=2, repetition_penalty=1.2, batch_size=3)
    few = enough_of_one(batch_size=2)
    assert sum(s == 1 for s, _ in few) == 6
    stop = plain[1][7]
    ended = made(model, prompts, 30, seed=2, stop_tokens=(stop,), batch_size=2)
    read = flat_sample.Batch.read
    monkeypatch.setattr(flat_sample.Batch, 'read', lambda self, lag, enough: read(
        self, 0 if self.is_full() or not self.rows else 3, enough))
    assert made(model, prompts, 30, seed=2) == plain
    assert made(model, prompts, 30, seed=2, stop_tokens=(stop,), batch_size=2) == ended
    assert made(model, prompts, 30, seed=2, repetition_penalty=1.2, batch_size=3) == penalty
    assert enough_of_one(batch_size=2) == few


@pytest.mark.parametrize('variant', [{}, dict(window=4, window_pattern='SL'), dict(mixer_pattern='DA')])
def test_long_prompts_are_fed_a_few_at_a_time(variant, monkeypatch):
    model, prompts = tiny(**variant), [[5], list(range(20)), [9, 8, 7], [4] * 19, [3, 2], [1] * 12]
    plain = made(model, prompts, 20, seed=2)
    monkeypatch.setattr(flat_sample, 'PREFILL', 24)
    fed = []
    model.register_forward_pre_hook(lambda module, args: fed.append(args[0].shape))
    assert made(model, prompts, 20, seed=2) == plain
    assert max(B * T for B, T in fed if T > 1) <= 24 and len({B for B, T in fed if T > 1}) > 1
    if 'mixer_pattern' not in variant:
        guessing = flat_sample.Draft(copy.deepcopy(model), 2)
        assert made(model, prompts, 20, seed=2, batch_size=3, proposer=guessing) == plain
        assert max(B * T for B, T in fed if T > 1) <= 24 and guessing.kept == guessing.fed > 0


def test_rows_end_at_stop_tokens_without_disturbing_others():
    model = tiny()
    prompts = [[1], [2], [3]]
    free = made(model, prompts, 15, seed=2)
    stop = free[1][4]
    for batch_size in (1, 2, 3):
        found = made(model, prompts, 15, seed=2, stop_tokens=(stop,), batch_size=batch_size)
        for whole, got in zip(free, found):
            assert got == (whole[:whole.index(stop)] if stop in whole else whole)


@pytest.mark.parametrize('penalty', [1.0, 1.3])
def test_a_step_is_fit_for_cuda_graphs(penalty, monkeypatch):
    """A stand-in for one: what it returned is overwritten by its next run, before that reads its inputs; and
    whatever it changes must be marked as static. Rows are replaced."""
    model, prompts = tiny(mixer_pattern='DA', document_token=3), [[5], [1, 2, 3, 4], [7] * 20, [9, 8]]
    options = dict(seed=3, top_k=10, repetition_penalty=penalty, batch_size=2)
    eager, replays = made(model, prompts, 30, **options), []

    def compiled(step, **settings):
        output = torch.zeros(2, 1, dtype=torch.long)

        def replay(version, model, token, cache, u, seen, sampling):
            output.fill_(60)
            given = [*cache.tensors(), *([] if seen is None else [seen])]
            versions = [tensor._version for tensor in given]
            output.copy_(step(version, model, token, cache, u, seen, sampling))
            changed = [tensor for tensor, version in zip(given, versions) if tensor._version != version]
            assert all(tensor._dynamo_static_input_type == 'unguarded' for tensor in changed)
            replays.append(len(changed))
            return output
        return replay
    monkeypatch.setattr(torch, 'compile', compiled)
    monkeypatch.setattr(flat_sample, 'FROZEN', ())
    assert made(model, prompts, 30, compile=True, **options) == eager
    assert set(replays) == {7}


@pytest.mark.parametrize('options, device, capability, dtype, whole', [
    ({}, 'cpu', (0, 0), torch.float32, True), ({}, 'cuda', (8, 0), torch.float32, True),
    (dict(n_expert=4, d_expert=24), 'cuda', (9, 0), torch.bfloat16, True),
    (dict(n_expert=4, d_expert=24), 'cuda', (10, 0), torch.bfloat16, True),
    (dict(n_expert=4, d_expert=24), 'cuda', (12, 0), torch.bfloat16, False),  # no kernel for these yet
    (dict(n_expert=4, d_expert=24), 'cuda', (8, 0), torch.bfloat16, False),
    (dict(n_expert=4, d_expert=24), 'cuda', (9, 0), torch.float32, False),
    (dict(n_expert=4, d_expert=24), 'cpu', (0, 0), torch.float32, False),
    (dict(n_expert=4, d_expert=20), 'cuda', (9, 0), torch.bfloat16, False)])  # rows are not whole 16 bytes
def test_experts_that_wait_for_the_host_are_in_no_cuda_graph(options, device, capability, dtype, whole,
                                                             monkeypatch):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: capability)
    model, graphs = tiny(**options).to(dtype), []
    assert flat_sample.is_one_graph(model, torch.device(device)) == whole
    monkeypatch.setattr(torch, 'compile', lambda step, options, **_: graphs.append(
        (options['triton.cudagraphs'], options['coordinate_descent_tuning'])) or step)
    flat_sample.compile_step(model, torch.device(device))
    flat.quantize_weights(model, dtype)
    flat_sample.compile_step(model, torch.device(device))
    assert graphs[0] == (whole and device == 'cuda', False) and graphs[1][1]
    assert flat_sample.is_one_graph(model, torch.device(device)) == (not options)


def test_many_steps_are_compiled(monkeypatch):
    monkeypatch.setattr(flat_sample, 'can_compile', lambda device: device != 'cuda:1')
    for settings, expected in [(('auto', 'cuda:0', 10_000), True), (('auto', 'cuda:0', 9999), False),
                               (('auto', 'cuda:1', 10_000), False), (('auto', 'cpu', 4000), True),
                               (('auto', 'cpu', 3999), False),
                               (('auto', 'mps', 5000), False), ((True, 'cpu', 1), True),
                               ((False, 'cuda:0', 5000), False)]:
        assert flat_sample.resolve_compile(*settings) is expected


QUICKLY = {'freezing': True, 'max_autotune': True, 'max_autotune_gemm_backends': 'CPP'}  # tries no others


def test_a_compiled_forward_is_causal():
    """Without a cache, on a CPU, where few queries are attended to in their own way."""
    idx = torch.tensor([[1, 2, 3, 4, 5, 6]])
    for variant in ({}, dict(n_kv_head=2), dict(pos='alibi'), dict(window=3, window_pattern='S'), MLA):
        model = tiny(**variant)
        with torch.no_grad():
            near(torch.compile(model, backend='eager')(idx), model(idx), 1e-5)


@pytest.mark.parametrize('options, penalty, int8', [
    (dict(n_kv_head=2), 1.1, True), (dict(mixer_pattern='D'), 1.0, False),
    (dict(window=5, window_pattern='S', n_expert=4, document_token=3, **MLA), 1.0, False)])
def test_compiled_generation_equals_eager(options, penalty, int8, monkeypatch):
    """With rows that are replaced."""
    model, prompts = tiny(n_layer=1, **options), [[5], [1, 2, 3, 4], [7, 7], list(range(20)), [9]]
    if int8:
        flat.quantize_weights(model, torch.float32)
    common = dict(seed=3, top_k=10, repetition_penalty=penalty)
    eager = made(model, prompts, 30, **common)
    templates = 'mixer_pattern' not in options  # in torch 2.11 there are none for products of a state
    monkeypatch.setattr(flat_sample, 'FREEZING', QUICKLY if templates else {'freezing': True})
    if 'n_expert' in options:  # which break it into many graphs, and are frozen in none
        compile = torch.compile
        monkeypatch.setattr(torch, 'compile', lambda f, **_: compile(f, backend='aot_eager', dynamic=False))
    before, began = flat_sample.compiling_seconds(), time.perf_counter()
    assert made(model, prompts, 30, compile=True, batch_size=2, **common) == eager
    spent, seconds = flat_sample.compiling_seconds() - before, time.perf_counter() - began
    assert 0.5 * seconds < spent < seconds  # which the speed that is printed leaves out
    assert not int8 or made(dequantized(model), prompts, 30, **common) == eager


def test_compiled_speculation_equals_eager(monkeypatch):
    model = repeats_itself(n_layer=1, n_kv_head=2, window=4, window_pattern='S')
    prompts, common = [[5], [1, 2, 1, 2], [7]], dict(seed=3, temperature=0.5)
    eager = made(model, prompts, 30, **common)
    monkeypatch.setattr(flat_sample, 'FREEZING', {'freezing': True})
    assert made(model, prompts, 30, compile=True, batch_size=2, proposer=flat_sample.Lookup(3),
                **common) == eager


class Logits:
    """In the place of a Sampling: a step then gives the logits."""

    def draw(self, logits, tokens, u, seen):
        return logits


def test_a_compiled_step_has_the_weights_of_its_model(tmp_path, monkeypatch):
    """They are its constants: of another model of the same shape, after a change to the weights, and again,
    when what was compiled is read from disk."""
    monkeypatch.setenv('TORCHINDUCTOR_CACHE_DIR', str(tmp_path))
    monkeypatch.setattr(flat_sample, 'FREEZING', QUICKLY)
    models, found = [tiny(n_layer=1, tie_word_embeddings=False) for _ in range(2)], []
    for model in models:
        for w in model.parameters():
            w.data += 0.1 * torch.randn_like(w)
        flat.quantize_weights(model.bfloat16(), torch.bfloat16)
    for i, model in enumerate([models[0], models[1], models[0], models[1]]):
        if i == 3:
            torch.compiler.reset()  # as in another process
        with torch.no_grad():
            if i == 2:
                model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
            cache = flat_sample.new_cache(model, 1, 20, static=True)
            step = flat_sample.compile_step(model, torch.device('cpu'))
            for tokens in ([3], [3, 3]):
                logits = step(model, torch.tensor([[3]]), cache, torch.zeros(1, 1), None, Logits())
                near(logits[:, -1], model(torch.tensor([tokens]))[:, -1], 0.03)
            found.append(float(logits[0, 0, 0]))
    assert found[1] == found[3] and len(set(found)) == 3


@pytest.mark.parametrize('variant', [{}, dict(window=4, window_pattern='SL'), MLA, dict(document_token=3)])
def test_scores_are_log_probabilities(variant):
    model = tiny(**variant).double()
    size = model.config.block_size
    ids = np.random.default_rng(0).integers(61, size=3 * size + 5).tolist()
    found = flat_sample.score_tokens(model, ids)
    assert len(found) == len(ids) - 1 and flat_sample.score_tokens(model, [4]).shape == (0,)
    with torch.no_grad():
        for i in (1, 2, size - 1, size, size + 1, 2 * size, len(ids) - 1):
            start = next(start for start in range(0, len(ids), (size + 1) // 2) if i <= start + size)
            p = model(torch.tensor([ids[start:i]]))[0, -1].softmax(-1)[ids[i]]
            assert math.isclose(found[i - 1], math.log(p), abs_tol=1e-5)
            assert i - start >= min(i, size // 2)
    for piece in (1, 7):
        np.testing.assert_allclose(flat_sample.score_tokens(model, ids, piece), found, atol=1e-6)
    with pytest.raises(ValueError, match='below vocab_size=61'):
        flat_sample.score_tokens(model, [1, 61])
    model.h[0].mlp.c_proj.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match='logits after token 1 are NaN'):
        flat_sample.score_tokens(model, ids)


@pytest.mark.parametrize('variant', [
    {}, dict(tie_word_embeddings=False, bias=True, norm='layernorm', pos='learned', mlp='gelu'), MLA,
    dict(n_expert=4, n_shared_expert=1), dict(mixer_pattern='DA'), dict(embed_scale=2.0, attn_gate=True)])
def test_int8_is_the_model_of_its_dequantized_weights(variant):
    model = tiny(**variant)
    flat_bench.fill_zeros(model)
    before = model.state_dict()
    idx = torch.randint(61, (2, 20))
    exact = model(idx).detach()
    n = model.num_params()
    flat.quantize_weights(model, torch.float32)
    assert model.num_params() == n and sum(w.dtype is torch.int8 for w in model.parameters()) >= 9
    plain = dequantized(model)
    with torch.no_grad():
        near(model(idx), plain(idx), 1e-5)
        assert 1e-4 < (model(idx) - exact).abs().max() / exact.abs().max() < 0.2
    for name, w in plain.state_dict().items():  # within half of a 127th of the row's largest
        step = before[name].abs().amax(-1, keepdim=True) / 127 if w.ndim > 1 else torch.zeros(())
        assert ((w - before[name]).abs() <= step * 0.5001).all()
    prompts = [[5], [1, 2, 3, 1, 2, 3, 1], [9, 8, 7]]
    for options in (dict(temperature=0), dict(temperature=0.9, batch_size=2)):
        assert made(model, prompts, 20, **options) == made(plain, prompts, 20, **options)


def test_rows_in_eight_bits():
    w = torch.randn(5, 8, 33)
    w[2, 3] = 0
    w[1, 1] *= 1e-30
    for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        q, scale = flat.quantize_rows(w, dtype)
        assert q.dtype is torch.int8 and scale.dtype is dtype and scale.shape == (5, 8)
        expected = np.abs(w.numpy()).max(-1) / 127
        np.testing.assert_allclose(scale.float(), expected, rtol=error)
        step = scale.float()[..., None]
        assert ((q * step - w).abs() <= (0.5 + 127 * error) * step).all()
        assert not q[2, 3].any()


@pytest.mark.parametrize('rows', [1, 3, 40])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-5), (torch.bfloat16, 0.02),
                                              (torch.float16, 0.002)])
@pytest.mark.parametrize('width', [64, 36])
def test_int8_linear_is_a_product_with_what_the_weight_stands_for(rows, width, dtype, tolerance):
    x = 100 * torch.randn(rows, 5, width).to(dtype)[:, :2]  # not contiguous; too large a sum for float16
    q, scale = flat.quantize_rows(torch.randn(48, width), dtype)
    expected = x.double() @ (q.double() * scale.double()[:, None]).T
    found = flat.int8_linear(x, q, scale)
    assert found.dtype is dtype and found.shape == (rows, 2, 48)
    near(found.double(), expected, tolerance)


def test_bad_prompts_are_refused():
    model = tiny()
    for prompt in ([], [61], [-1]):
        with pytest.raises(ValueError, match='below vocab_size=61'):
            next(generate(model, [prompt], 1))


def test_streamed_text_is_the_whole_text():
    tok = make_tokenizer('byte')
    text = 'naïve 🙂 日本語\n'
    stream = TextStream(tok)
    pieces = [stream.feed(i) for i in tok.encode(text)] + [stream.finish()]
    assert ''.join(pieces) == text and '�' not in ''.join(pieces) and pieces.count('') > 5
    stream = TextStream(tok)
    assert ''.join(stream.feed(i) for i in '🙂'.encode()[:2]) == '' and stream.finish() == '�'
    stream = TextStream(tok, stop=['END', '\n\n'])
    out = [stream.feed(i) for i in tok.encode('a EN\nE\n\nrest')]
    assert ''.join(out) + stream.finish() == 'a EN\nE' and stream.ended
    assert TextStream(tok, stop=['xyz']).feed(ord('x')) == ''  # it may begin a stop text


# conversations ----------------------------------------------------------------------------------------------
QUESTIONS = ['Hi, who are you?', 'And <them>?\n', 'é🙂']


DELTA = dict(mixer_pattern='DA', linear_n_key_head=2, linear_n_value_head=4)


def count_fed(model):
    """A list that grows by the number of tokens of each forward pass."""
    fed = []
    model.register_forward_pre_hook(lambda module, args: fed.append(args[0].shape[1]))
    return fed


@pytest.mark.parametrize('template, variant', [
    ('chatml', {}), ('chatml', dict(window=9, window_pattern='SL')), ('chatml', MLA),
    ('chatml', dict(window=30, window_pattern='S', pos='alibi')), ('chatml', dict(n_expert=4)),
    ('chatml', DELTA), ('chatml', dict(document_token=256, n_kv_head=2)), ('qwen3', {}), ('qwen3', DELTA),
    ('qwen3', dict(window=9, window_pattern='SL')), ('llama3', {}), ('minimind', {})])
def test_a_conversation_with_its_cache_is_each_turn_from_nothing(template, variant):
    if template == 'minimind':
        path = os.path.join(os.environ.get('FLATGPT_DATA', ''), 'minimind_tokenizer')
        if not os.path.isdir(path):
            pytest.skip('no minimind_tokenizer/ in FLATGPT_DATA')
        tokenizer = flat_tokenizer.json_tokenizer(path)
        model = chat_model(vocab_size=tokenizer.n_vocab)
        chat = flat_sample.Chat(model, tokenizer, CHAT_SETTINGS)
    else:
        model = chat_model(**variant)
        chat = new_chat(model, template)
    fed, pieces, cached = count_fed(model), [], []
    for question in QUESTIONS:
        expected = from_nothing(chat, question)
        if template == 'qwen3' and len(chat.messages) > 1:  # which the template leaves out from now on
            chat.messages[-1]['content'] = '<think>\nhm\n</think>\n\n' + chat.messages[-1]['content']
        ids = chat.prompt(question)[1]
        same = len(os.path.commonprefix([ids[:-1], cached]))
        fed.clear()
        pieces.clear()
        assert chat.answer(question, pieces.append) in (
            None, '(cut at max_new_tokens=8: /set max_new_tokens 16 allows more)')
        assert chat.messages[-2:] == [{'role': 'user', 'content': question},
                                      {'role': 'assistant', 'content': expected}]
        assert ''.join(pieces) == expected
        if same == len(cached) or not any(chat.cache.states):  # else from the first token
            assert fed[0] == len(ids) - same and set(fed[1:]) <= {1}
        cached = chat.cached
        assert len(cached) == chat.cache.length and cached[:len(ids)] == ids
        assert (ids[0] == 256) == ('document_token' in variant)


@pytest.mark.parametrize('variant', [{}, dict(window=9, window_pattern='SL'), MLA])
def test_a_conversation_with_guesses_is_the_same(variant):
    model = chat_model(**variant)
    model.wte.weight.data *= 3  # it runs in circles
    plain, guessing = new_chat(model, stop='x'), new_chat(model, stop='x')
    guessing.proposer = flat_sample.Lookup(4)
    for question in (*QUESTIONS, 'tell it to the end', 'again'):
        for chat in (plain, guessing):
            chat.answer(question, lambda text: None)
        assert guessing.messages == plain.messages
        assert guessing.cached[:len(plain.cached)] == plain.cached
        assert len(guessing.cached) == guessing.cache.length
    assert guessing.proposer.kept > 0


@pytest.mark.parametrize('variant', [
    {}, dict(window=4, window_pattern='SL'), MLA, dict(pos='alibi', document_token=3), DELTA])
def test_generate_goes_on_from_a_cache_that_holds_the_beginning(variant):
    model = tiny(**variant)
    prompts, held = [[5, 6], [1, 2, 3, 4, 5, 6, 7], [9, 8, 3, 7]], [1, 3, 0]
    plain = made(model, prompts, 30, seed=3, temperature=0.9)  # the context of 24 is full once
    cache = model.make_cache(3, 24)
    with torch.no_grad():
        flat_sample.prefill(model, [p[:n] or [0] for p, n in zip(prompts, held)], cache)
    cache.reset(torch.tensor([False, False, True]))
    fed = count_fed(model)
    assert made(model, prompts, 30, seed=3, temperature=0.9, cache=cache) == plain
    assert fed[0] == 4  # the longest that was missing
    cache.reset()
    long = [list(range(30))]
    cropped = made(model, long, 8, seed=3)
    cache = model.make_cache(1, 24)
    with torch.no_grad():
        model(torch.tensor(long)[:, :20], cache=cache)
    assert made(model, long, 8, seed=3, cache=cache) == cropped


def test_a_compiled_conversation_is_compiled_once(monkeypatch):
    compile, graphs = torch.compile, []

    def watched(graph, inputs):
        graphs.append(graph)
        return graph
    monkeypatch.setattr(torch, 'compile', lambda f, **_: compile(f, backend=watched))
    torch._dynamo.reset()
    chat = new_chat(chat_model(n_layer=1, window=9, window_pattern='S'), compile=True)
    for question in QUESTIONS:
        expected = from_nothing(chat, question)
        chat.answer(question, str)
        assert chat.messages[-1]['content'] == expected
    assert len(graphs) == 1


def test_history_is_kept_within_the_context(capsys):
    chat = new_chat(chat_model(block_size=150))
    for i in range(5):
        question = f"question {i}"
        chat.answer(question, str)
        ids = flat_sample.chat_ids(chat.model, chat.tokenizer, chat.messages[:-1], 'show')[0]
        assert len(ids) + 8 <= 150 and len(chat.cached) <= 150
        roles = [message['role'] for message in chat.messages]
        assert roles == ['system', *['user', 'assistant'] * (len(roles) // 2)]
        answer = chat.messages[-1]['content']
        chat.messages = chat.messages[:-2]
        assert answer == from_nothing(chat, question)  # as if what is forgotten had never been
        chat.messages += [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]
    assert len(chat.messages) < 11 and chat.messages[0]['content'] == 'Be short.'
    assert capsys.readouterr().out.count('\n') == 1
    before = list(chat.messages)
    with pytest.raises(ValueError, match='the context has 150: ask a shorter one'):
        chat.answer('a' * 150, str)
    assert chat.messages == before
    chat.settings['max_new_tokens'] = 100
    assert chat.answer('b' * 70, str) in (None, '(cut: the context of 150 tokens is full)')
    assert [m['role'] for m in chat.messages] == ['system', 'user', 'assistant'] and len(chat.cached) <= 150
    chat.reset()
    assert chat.messages == [{'role': 'system', 'content': 'Be short.'}]
    assert new_chat(chat_model(), system='').messages == []


@pytest.mark.parametrize('variant', [{}, DELTA, dict(window=9, window_pattern='S')])
@pytest.mark.parametrize('calls', [1, 5])
def test_an_answer_may_be_interrupted_anywhere(variant, calls):
    """Between two layers of the first pass, or of a later one: the next answers are those from nothing."""
    model = chat_model(**variant)
    chat, passes = new_chat(model), []

    def interrupt(module, args):
        passes.append(1)
        if len(passes) == calls:
            signal.raise_signal(signal.SIGINT)
    for turn in range(2):
        handle = model.h[1].register_forward_pre_hook(interrupt)
        passes.clear()
        with pytest.raises(KeyboardInterrupt):
            chat.answer('Hi', str)
        handle.remove()
        assert [m['role'] for m in chat.messages[-2:]] == ['user', 'assistant'] and chat.cached == []
        expected = from_nothing(chat, f'Turn {turn}?')
        chat.answer(f'Turn {turn}?', str)
        assert chat.messages[-1]['content'] == expected


def typed(monkeypatch, *lines):
    """What a person types: text, or an exception for a key."""
    rest = iter(lines)

    def read(prompt=''):
        line = next(rest)
        if isinstance(line, BaseException):
            raise line
        return line
    monkeypatch.setattr('builtins.input', read)
    return rest


def test_commands_of_a_conversation(monkeypatch, capsys):
    chat = new_chat(chat_model())
    rest = typed(monkeypatch, '', 'Hi', KeyboardInterrupt(), '  /set temperature 0.5 ',
                 '/set temperature -1', '/set temperature abc', '/set device cuda', '/set thinking maybe',
                 '/set', '/nonsense', '/help', '/reset', '/etc/passwd is what?', 'x' * 600, '/exit', 'never')
    flat_sample.converse(chat)
    assert list(rest) == ['never'] and chat.settings['temperature'] == 0.5
    assert [m['content'] for m in chat.messages[:2]] == ['Be short.', '/etc/passwd is what?']
    out, err = capsys.readouterr()
    assert 'temperature=-1.0 must be at least 0\n' in out and 'temperature = 0.5, top_k' in out
    assert "thinking='maybe' must be show, hide, on or off" in out and '/set NAME VALUE takes' in out
    assert err.count('\n') == 1 and "temperature must be float, got 'abc'" in err
    assert out.count(flat_sample.COMMANDS) == 3 and 'ask a shorter one' in out
    assert out.count('there is no command /nonsense\n') == out.count('there is no command') == 1
    assert out.count('the conversation is forgotten\n') == 1
    rest = typed(monkeypatch, EOFError(), 'never')
    flat_sample.converse(chat)
    assert list(rest) == ['never']


def test_ctrl_c_stops_an_answer_and_not_the_program(monkeypatch, capsys):
    model = chat_model()
    chat, passes = new_chat(model), []

    def interrupt(module, args):
        passes.append(1)
        if len(passes) == 4:
            signal.raise_signal(signal.SIGINT)
    model.register_forward_pre_hook(interrupt)
    typed(monkeypatch, 'Hi', 'And?', '/exit')
    flat_sample.converse(chat)
    half, whole = chat.messages[2]['content'], chat.messages[4]['content']
    assert len(half) <= 3 and half + '\n' in capsys.readouterr().out
    chat.messages = chat.messages[:3]
    assert from_nothing(chat, 'And?') == whole


def test_thinking_is_shown_hidden_or_off(capsys):
    for text, visible in [('<think>\nhm <b>\n</think>\n\nyes', 'yes'), ('<think>\nhm', ''), ('<', '<'),
                          ('\n<think></think>a</think>', 'a</think>'), ('a <think>', 'a <think>'), ('', '')]:
        for size in (1, 3, 100):
            for hide, expected in (True, visible), (False, text):
                display, out = flat_sample.Display(hide), ''
                for i in range(0, len(text), size):
                    display(text[i:i + size])
                    out += capsys.readouterr().out
                    assert expected.startswith(out)
                display('', complete=True)
                assert out + capsys.readouterr().out == expected + '\n'
    model, tok, messages = chat_model(), byte_chat_tokenizer('qwen3'), [{'role': 'user', 'content': 'Hi'}]
    show, hide, on, off = (flat_sample.chat_ids(model, tok, messages, thinking)[0]
                           for thinking in ('show', 'hide', 'on', 'off'))
    assert show == hide == tok.chat(messages) == on != off == tok.chat(messages, thinking=False)
    asked = flat_tokenizer.JsonTokenizer(tok.source, {'chat_template': CHAT_TEMPLATES['chatml']
                                               + '{% if open_thinking %}<think>\n{% endif %}'})
    show, on, off = (flat_sample.chat_ids(model, asked, messages, thinking)
                     for thinking in ('show', 'on', 'off'))
    assert show == off == (tok.chat(messages), '')
    assert on == (show[0] + asked.encode('<think>\n'), '<think>\n')
    opened = flat_tokenizer.JsonTokenizer(tok.source, {'chat_template': CHAT_TEMPLATES['chatml'] + '<think>\n'})
    chat = flat_sample.Chat(model, opened, {**CHAT_SETTINGS, 'thinking': 'hide'})
    assert flat_sample.chat_ids(model, opened, messages, 'show')[1] == '<think>\n'
    display = flat_sample.Display(True)
    chat.answer('Hi', display)
    assert chat.messages[-1]['content'].startswith('<think>\n') and len(chat.messages[-1]['content']) > 8
    assert capsys.readouterr().out == ''

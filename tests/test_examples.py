"""Runs every file of examples/ as its users do, and compares each idea with its formula."""
import contextlib
import dataclasses
import itertools
import json
import math
import re
import runpy
import shutil
import sys
import types
import xml.etree.ElementTree
from pathlib import Path

import common
import numpy as np
import pytest
import torch
import torch.nn.functional as F

FILES = {path.stem: str(path) for path in sorted((common.ROOT / 'examples').glob('*.py'))}
EXAMPLES = [name for name in FILES if name not in (  # for prepare.py, sample.py; scripts
    'pydoc_chat', 'beam_search', 'look_inside', 'speculation', 'typical_sampling', 'costs', 'plot',
    'intervals')]
STANDARD = 'growing_length', 'label_smoothing', 'soap', 'weight_mean'  # the trained model is a usual one
SMALL = [*common.TOY, '--n_layer=4', '--n_head=4', '--max_iters=10', '--eval_interval=5']
each_example = pytest.mark.parametrize('name', EXAMPLES)
OURS = {'zoo', 'lab', 'formulas', *FILES, *(path.stem for path in common.ROOT.glob('*.py'))}


@contextlib.contextmanager
def fresh_modules():
    """Our modules are imported again, because an example changes them."""
    def take():
        return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition('.')[0] in OURS}
    kept = take()
    try:
        yield
    finally:
        take()
        sys.modules.update(kept)


def run(script, *args):
    with fresh_modules():
        return common.run(script, *args)


def train(name, *args):
    run('train.py', FILES[name], *SMALL, *args)
    return torch.load('out/ckpt.pt', weights_only=True)


@contextlib.contextmanager
def imported(name):
    """Yields the example's names and its fields of GPTConfig, with our modules changed by it."""
    with fresh_modules():
        import configurator
        yield configurator.run_file(FILES[name], {})


def test_an_example_is_short():
    assert max(len(Path(path).read_text('utf-8').splitlines()) for path in FILES.values()) <= 80


@each_example
def test_an_example_trains_resumes_and_recomputes(name, folder):
    """A resumed run and one that recomputes its blocks have the numbers of an unbroken run. Without the
    example, a run is not resumed, and the checkpoint of a new architecture does not load."""
    whole = train(name, '--dropout=0.1')
    losses = [row['loss'] for row in common.log_rows('out')]
    assert float(losses[-1]) < 3.2
    shutil.rmtree('out')
    train(name, '--dropout=0.1', '--max_iters=5', '--lr_decay_iters=10')
    with pytest.raises(ValueError, match='name the same files|name that file|not supported'):
        run('train.py', '--init_from=resume', '--max_iters=10')
    resumed = train(name, '--init_from=resume', '--max_iters=10')
    assert [row['loss'] for row in common.log_rows('out')] == losses
    assert common.same_weights(resumed['model'], whole['model'])
    assert str(resumed['optimizer']) == str(whole['optimizer'])
    train(name, '--dropout=0.1', '--checkpoint_activations=True')
    assert [row['loss'] for row in common.log_rows('out')] == losses


@each_example
def test_an_example_passes_the_checks(name, folder, capsys):
    """lab/check.py: caches, ragged rows, documents, gradients, one compiled graph."""
    with pytest.raises(SystemExit) as end:
        run('lab/check.py', FILES[name], '--n_head=4')
    printed = capsys.readouterr().out
    assert not end.value.code, printed
    assert 'check_cache' in printed


@each_example
def test_an_examples_flops_are_counted_and_its_export_is_no_other_model(name, folder):
    """Next to torch's count of matrix products, 3 times the forward pass."""
    from torch.utils.flop_counter import FlopCounterMode
    train(name, '--max_iters=0', '--n_embd=128', '--block_size=64')
    with imported(name):
        import model as flat
        import sample
        model, _, _ = sample.load('out')
        length = model.config.block_size
        with FlopCounterMode(display=False) as counter:  # eager_attention, which torch counts
            model(torch.zeros(1, length, dtype=torch.long))
        ours = flat.flops_per_token(model) * length
        assert 3 * counter.get_total_flops() == pytest.approx(ours, rel=0.1)
    with contextlib.nullcontext() if name in STANDARD else pytest.raises(
            ValueError, match='mixer_pattern|mlp=|has no|parameter|tensor'):
        run('zoo/hub.py', FILES[name], 'export', 'out', 'mymodel')


@pytest.mark.parametrize('name, options, message', [
    ('canon', '--n_expert=4', 'replace'), ('canon', '--norm_placement=sandwich', 'need'),
    ('hyper_connections', '--mtp=True', 'need'), ('mhc', '--residual_scale=2.0', 'need'),
    ('attention_residuals', '--layer_scalar=True', 'need'), ('value_residual', '--attn_gate=True', 'derive'),
    ('canon', FILES['engram'], 'two config files replace model.make_block'),
    ('weight_mean', FILES['weight_mean'], 'two config files replace .*update')])
def test_what_does_not_fit_an_example_is_rejected(name, options, message, folder):
    with pytest.raises(ValueError, match=message):
        train(name, options)


# each idea next to its formula ------------------------------------------------------------------------------

def random_model(initial='none', **options):
    """A model with random parameters except those with `initial` in their names, and token ids (1, 15)."""
    import model as flat
    fields = dict(n_layer=4, n_head=4, n_kv_head=2, n_embd=32, vocab_size=61, block_size=32, norm_eps=1e-5)
    model = flat.GPT(flat.GPTConfig(**fields | options)).eval()
    for name, w in model.named_parameters():
        if initial not in name:
            torch.nn.init.normal_(w, std=0.5)
    return model, torch.randint(1, 60, (1, 15))


def inside(mixer, model, idx):
    """Runs a model -> queries, keys and values that a mixer got, and what its c_proj projects, (T, width)."""
    seen = []
    attend = mixer.attend
    mixer.attend = lambda q, k, v, context: (seen.extend((q, k, v)), attend(q, k, v, context))[1]
    mixer.c_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(idx)
    return [x[0].detach().double() for x in seen]


def attention(q, k, v, bias=0.0):
    """By its formula: q (H, T, D), k (K, T, D), v (K, T, D') -> (T, H D')."""
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
    weights = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).flatten(1)


def near(found, expected, tolerance=1e-4):
    torch.testing.assert_close(found.double(), expected.double(), atol=tolerance, rtol=tolerance)


@torch.no_grad()
def test_yoco():
    """Layer 1 has a window, and layer 3 has the keys and values of layer 2."""
    with imported('yoco') as found:
        found['WINDOW'] = 5
        model, idx = random_model(mixer_pattern='Y')
        first, source, shared = (inside(model.h[i].attn, model, idx) for i in (1, 2, 3))
    far = torch.ones(15, 15).tril(-5)
    near(first[3], attention(*first[:3], torch.where(far > 0, -math.inf, 0.0)))
    near(shared[3], attention(shared[0], *source[1:3]))


@torch.no_grad()
def test_canon():
    with imported('canon'):
        import model as flat
        model, idx = random_model()
        layer = model.h[1].canon_a
        x = torch.randn(1, 15, 32)
        y = torch.conv1d(F.pad(x.mT, (3, 0)), layer.conv[:, None], groups=32).mT
        near(layer(x, flat.make_context(model, idx)), x + y)


def test_relu_power():
    with imported('relu_power') as found:
        act = found['ReluPower'](None)
        torch.nn.init.constant_(act.power, 0.5)
        assert act(torch.tensor([-2.0, 0.0, 0.25, 4.0])).tolist() == pytest.approx([0, 0, 0.5, 2])


@torch.no_grad()
def test_differential_attention():
    with imported('differential_attention'):
        model, idx = random_model(mixer_pattern='F')
        mixer = model.h[1].attn
        q, k, v, y = inside(mixer, model, idx)
    a, b, c, d = mixer.lambdas.double()
    start = 0.8 - 0.6 * math.exp(-0.3)
    both = torch.cat([*v], dim=-1).expand(2, -1, -1)
    first, second = attention(q, k, both).unflatten(1, (2, 2, 16)).unbind(1)
    o = first - ((a * b).sum().exp() - (c * d).sum().exp() + start) * second
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.head_norm.weight * (1 - start)
    near(y, o.flatten(1))


@torch.no_grad()
@pytest.mark.parametrize('start', [0, 2])
def test_moba(start):
    with imported('moba') as found:
        found.update(BLOCK=3, TOP_K=2)
        model, idx = random_model(mixer_pattern='O', document_token=0 if start else None)
        idx[0, start] = 0
        q, k, v, y = inside(model.h[1].attn, model, idx)
    bias = torch.full((4, 15, 15), -math.inf)
    for h, i in itertools.product(range(4), range(start, 15)):
        blocks = [[*range(first, min(first + 3, i + 1))] for first in range(start, i + 1, 3)]
        best = sorted(blocks[:-1], key=lambda block: k[h // 2, block].mean(0) @ q[h, i])[-1:]
        bias[h, i, sum(best, blocks[-1])] = 0
    near(y[start:], attention(q, k, v, bias)[start:])


def test_moba_with_small_blocks_uses_caches():
    with imported('moba') as found:
        found.update(BLOCK=3, TOP_K=2)
        from lab import check
        config = check.tiny_config(check.GPTConfig(n_layer=2, n_kv_head=3, mixer_pattern='O'))
        check.check_cache(dataclasses.replace(config, document_token=3))


@torch.no_grad()
def test_fire():
    with imported('fire'):
        model, idx = random_model(mixer_pattern='I', pos='none')
        mixer = model.h[1].attn
        q, k, v, y = inside(mixer, model, idx)
    c, L = mixer.log_c.exp().item(), mixer.log_L.exp().item()
    i = torch.arange(15.0)
    x = (c * (i[:, None] - i).clamp(min=0) + 1).log() / (c * i.clamp(min=L) + 1).log()[:, None]
    hidden = (x[..., None] * mixer.w_1 + mixer.b_1).clamp(min=0)
    near(y, attention(q, k, v, torch.einsum('ijn,hn->hij', hidden, mixer.w_2)))


@torch.no_grad()
def test_t5_bias():
    """Next to transformers and a loop over distances."""
    theirs = pytest.importorskip('transformers.models.t5.modeling_t5').T5Attention._relative_position_bucket
    distances = torch.arange(300)
    with imported('t5_bias') as found:
        model, _ = random_model(mixer_pattern='T', pos='none', block_size=200)
        mixer = model.h[1].attn
        q, k, v, y = inside(mixer, model, torch.randint(1, 60, (1, 200)))
        buckets = found['bucket_of'](distances).tolist()
    assert buckets == theirs(-distances, bidirectional=False, num_buckets=32, max_distance=128).tolist()
    assert buckets == [d if d < 16 else min(31, 16 + math.floor(16 * math.log(d / 16) / math.log(128 / 16)))
                       for d in range(300)]
    bias = torch.zeros(4, 200, 200)
    for i, j in itertools.product(range(200), repeat=2):
        bias[:, i, j] = mixer.table[buckets[max(i - j, 0)]]
    near(y, attention(q, k, v, bias))


@torch.no_grad()
def test_value_residual():
    with imported('value_residual'):
        model, idx = random_model(mixer_pattern='V')
        first, last = (inside(model.h[i].attn, model, idx)[2] for i in (0, 3))
        xs = []
        mixer = model.h[3].attn
        mixer.register_forward_pre_hook(lambda _, args: xs.append(args[0]))
        model(idx)
    own = mixer.c_attn(xs[0])[2].view(15, 2, 8).transpose(0, 1)
    near(last, mixer.lambdas[0] * first + mixer.lambdas[1] * own)


@torch.no_grad()
def test_value_embeddings():
    """Next to nanochat's line, head by head."""
    with imported('value_embeddings'):
        assert random_model(mixer_pattern='E', n_embd=8)[0].h[0].attn.gate.in_features == 8
        model, idx = random_model(mixer_pattern='AE')
        mixer = model.h[1].attn
        xs = []
        mixer.register_forward_pre_hook(lambda _, args: xs.append(args[0]))
        _, _, v, _ = inside(mixer, model, idx)
        own = mixer.c_attn(xs[0])[2][0]                     # (T, heads D)
    rows = mixer.table.weight[idx[0]]
    for head, part in enumerate((slice(8), slice(8, 16))):
        gate = 3 * torch.sigmoid(xs[0][0, :, :12] @ mixer.gate.weight[head])
        near(v[head], own[:, part] + gate[:, None] * rows[:, part])


def test_label_smoothing():
    with imported('label_smoothing'):
        model, idx = random_model()
        logits = model(idx)[0]
        loss, _ = model.train()(idx, idx)
    z = logits.logsumexp(-1)
    near(loss, F.cross_entropy(logits, idx[0], label_smoothing=0.1) + 1e-4 * z.square().mean())


def test_soap():
    """Both projections of a fused matrix, next to algorithm 3 in NumPy."""
    grads = np.random.default_rng(0).normal(size=(6, 16, 8))
    w = torch.nn.Parameter(torch.ones(16, 8, dtype=torch.float64))
    with imported('soap') as found:
        found['FREQUENCY'] = 2
        soap = found['Soap']([{'params': [w], 'weight_decay': 0.5}], 0.1, {w: (8, 8)})
        for grad in grads:
            w.grad = torch.from_numpy(grad)
            soap.step()
    for half in slice(8), slice(8, 16):
        W, L, R, M, V, QL, QR = np.ones((8, 8)), 0, 0, 0, 0, 0, 0
        for t, G in enumerate(grads[:, half]):
            if t:
                M = 0.95 * M + 0.05 * G
                V = 0.95 * V + 0.05 * (QL.T @ G @ QR) ** 2
                corrected = QL.T @ M @ QR / (1 - 0.95 ** t) / np.sqrt(V / (1 - 0.95 ** t))
                W = 0.95 * W - 0.1 * (QL @ corrected @ QR.T)
            L, R = 0.95 * L + 0.05 * G @ G.T, 0.95 * R + 0.05 * G.T @ G
            if t == 0:
                QL, QR = (np.linalg.eigh(P)[1][:, ::-1] for P in (L, R))
            elif t % 2 == 0:
                QL, QR = np.linalg.qr(L @ QL)[0], np.linalg.qr(R @ QR)[0]
        np.testing.assert_allclose(w.detach()[half], W, rtol=1e-5)


def test_engram_reads_the_rows_of_the_last_tokens():
    """By Python's integers, for each token; a document starts at 0 and at 7."""
    with imported('engram') as found:
        import model as flat
        model, idx = random_model(document_token=60)
        idx[0, 7] = 60
        rows = model.h[1].engram.rows(flat.make_context(model, idx))
        a, b, c = found['MULTIPLIERS']
    for t in range(15):
        x, y, z = (int(idx[0, t - i]) + 1 if t - i >= 7 * (t >= 7) else 0 for i in range(3))
        pair, triple = x * a ^ y * b, x * a ^ y * b ^ z * c
        assert rows[0, t].tolist() == [pair % 4093, 4093 + pair % 4091, 8184 + triple % 4079,
                                       12263 + triple % 4073]


def test_weight_mean(folder):
    """A checkpoint has the mean of the weights of a usual run, and these weights in the optimizer's state."""
    usual = []
    for n in 1, 2, 3, 4:
        run('train.py', *SMALL, '--decay_lr=False', f'--max_iters={n}')
        usual.append(torch.load('out/ckpt.pt')['model'])
    found = train('weight_mean', '--decay_lr=False', '--max_iters=4')
    with imported('weight_mean') as names:
        shares = torch.tensor([names['DECAY'] ** (4 - i) for i in (1, 2, 3, 4)], dtype=torch.float64)
    for name, state in found['optimizer'].items():
        assert torch.equal(state['mean'], usual[-1][name])
        mean = (torch.stack([state[name] for state in usual], -1) * shares / shares.sum()).sum(-1)
        near(found['model'][name], mean)


def test_growing_length(folder):
    """Pieces have adjacent tokens, and an epoch has each position once."""
    np.arange(16 * 36 + 1).astype('<u2').tofile('data/toy/train.bin')
    with imported('growing_length') as found:
        import prepare
        config = {'seed': 0, 'batch_size': 3, 'gradient_accumulation_steps': 2, 'max_iters': 6,
                  'lr_decay_iters': None}
        run = types.SimpleNamespace(
            config=config, iter_num=0, machine=types.SimpleNamespace(device='cpu'),
            model=types.SimpleNamespace(config=types.SimpleNamespace(block_size=16)))
        batches = [*found['read_batches'](run, prepare.Bins('data/toy', 'train'))]
    for batch, pieces in zip(batches, [4, 4, 2, 2, 1, 1]):
        for micro in batch:
            assert torch.equal(micro.inputs, micro.inputs[:, :1] + torch.arange(16 // pieces))
            assert torch.equal(micro.targets, micro.inputs + 1)
    read = torch.cat([micro.inputs.flatten() for batch in batches for micro in batch])
    assert torch.equal(read.sort().values, torch.arange(16 * 36))


@torch.no_grad()
def test_attention_residuals():
    with imported('attention_residuals'):
        import model as flat
        model, idx = random_model()
        context = flat.make_context(model, idx)
        outputs = [model.embed(context)]

        def mixed(query):
            values = torch.stack(outputs)
            keys = values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            return ((keys @ query).softmax(0)[..., None] * values).sum(0)
        for block in model.h:
            x = outputs[0] if block is model.h[0] else mixed(block.attn_query)
            outputs.append(block.attn(block.ln_1(x), context))
            outputs.append(block.mlp(block.ln_2(mixed(block.mlp_query))))
        near(model(idx), model.head(mixed(model.h[-1].last_query)), 1e-3)


@torch.no_grad()
def test_looped():
    with imported('looped') as found:
        import model as flat
        model, idx = random_model()
        context = flat.make_context(model, idx)
        adapter = model.h[1].c_adapter.weight
        prelude = model.h[0](model.embed(context), context)
        x = torch.zeros_like(prelude)
        for _ in range(found['REPETITIONS']):
            x = x @ adapter[:, :32].mT + prelude @ adapter[:, 32:].mT
            x = model.h[2](type(model.h[1]).__base__.forward(model.h[1], x, context), context)
        near(model(idx), model.head(model.h[3](x, context)), 1e-3)


@torch.no_grad()
@pytest.mark.parametrize('name', ['hyper_connections', 'mhc'])
def test_streams(name):
    """One token, by the formulas of the papers; and at the start, a usual model."""
    with imported(name) as found:
        model, idx = random_model()
        N, part = found['N'], model.h[1].hyper_mlp
        H = torch.randn(N, 32)
        y = part(H[None, None], torch.square)[0, 0]
        if name == 'mhc':
            logits = part.phi.weight @ F.rms_norm(H.flatten(), (N * 32,), eps=1e-5)
            logits = logits * part.alpha.repeat_interleave(torch.tensor([N, N, N * N])) + part.static
            pre, post = torch.tensor([[1], [2]]) * logits[:2 * N].sigmoid().view(2, N)
            mix = logits[2 * N:].exp().view(N, N)
            for _ in range(found['ITERATIONS']):
                mix = mix / mix.sum(0)
                mix = mix / mix.sum(1)[:, None]
        else:
            change = (F.rms_norm(H, (32,), part.norm.weight, 1e-5) @ part.dynamic.weight.T).tanh()
            W = part.static + change * part.scales[[0] * (N + 1) + [1]]
            pre, post, mix = W[:, 0], W[:, -1], W[:, 1:-1].T
        near(y, mix @ H + post[:, None] * (pre @ H).square())
        model, idx = random_model('hyper', norm_eps=1e-12)
        logits = model(idx)
    usual, _ = random_model(norm_eps=1e-12)
    usual.load_state_dict({key: w for key, w in model.state_dict().items() if 'hyper' not in key})
    near(usual(idx), logits, 1e-2)


# sample.py --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('variant', [
    {}, dict(pos='learned'), dict(window=4, window_pattern='SL', document_token=3),
    dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)])
@pytest.mark.parametrize('options', [dict(temperature=0), dict(temperature=0.5, repetition_penalty=1.2)])
def test_speculation_changes_no_token(variant, options, monkeypatch):
    """Also with a stop token, and after the context is full."""
    with imported('speculation') as found:
        import sample
        model, _ = random_model(**variant)
        model.wte.weight.data *= 4  # the text repeats itself
        texts = []
        prompts = [[1, 2, 3, 1, 2, 3, 1], [*range(40)]]
        for generate in sample.generate, found['generate']:
            monkeypatch.setattr(common, 'generate', generate)
            texts.append(common.made(model, prompts, 60, batch_size=1, **options))
            texts.append(common.made(model, prompts, 60, stop_tokens=texts[0][0][20:21], **options))
        assert texts[:2] == texts[2:]


def test_typical_sampling():
    """How often tokens are drawn, next to a loop over the tokens nearest to the entropy."""
    u = (torch.arange(4000) + 0.5) / 4000
    with imported('typical_sampling') as found:
        found['MASS'] = 0.7
        for logits in torch.randn(8, 6) * 2:
            p = (logits / 0.8).softmax(-1)
            entropy = -(p * p.log()).sum()
            kept = []
            for token in sorted(range(6), key=lambda i: abs(entropy + p[i].log())):
                if p[kept].sum() < 0.7:
                    kept.append(token)
            share = torch.zeros(6)
            share[kept] = p[kept] / p[kept].sum()
            drawn = found['sample_token'](logits.expand(4000, 6), u, temperature=0.8)
            near(drawn.bincount(minlength=6) / 4000, share, 1e-3)


def test_a_replaced_sample_token_gets_all_flags(folder, capsys):
    common.run('train.py', *SMALL)
    capsys.readouterr()
    run('sample.py', FILES['typical_sampling'], '--top_k=1', '--max_new_tokens=8', '--num_samples=2')
    assert len({*capsys.readouterr().out.split('-' * 15)[1:3]}) == 1


@torch.no_grad()
@pytest.mark.parametrize('alpha', [0.6, 8.0])
def test_beam_search(alpha):
    """A wide beam, next to the scores of all continuations."""
    with imported('beam_search') as found:
        model, _ = random_model(vocab_size=5, block_size=12)
        scores = {}
        for tokens in itertools.product(range(5), repeat=4):
            end = next((i for i in range(4) if tokens[i] == 1), 3) + 1
            log_p = model(torch.tensor([[3, 0, *tokens]])).double().log_softmax(-1)[0, 1:-1]
            scores[tokens[:end]] = log_p[range(end), tokens[:end]].sum().item() / ((5 + end) / 6) ** alpha
        found.update(BEAMS=5 ** 3, ALPHA=alpha)
        score, tokens = found['search'](model, [3, 0], 4, [1])
        assert tuple(tokens) == max(scores, key=scores.get)
        assert score == pytest.approx(max(scores.values()), rel=1e-5)


@torch.no_grad()
def test_costs_compares_equal_results(capsys):
    """What it times computes the same in both ways, and it prints times and memory."""
    found = runpy.run_path(FILES['costs'])
    qkv = torch.randn(3, 1, 2, 5, 4)
    near(found['naive'](*qkv), F.scaled_dot_product_attention(*qkv, is_causal=True), 1e-5)
    near(found['KERNELS']['flash'](*qkv), found['naive'](*qkv), 1e-5)
    model, _ = random_model(block_size=256)
    assert torch.equal(*(found['draw'](model, 9, is_cached) for is_cached in (True, False)))
    with torch.enable_grad():
        found['attention']('naive', 64)
    assert re.fullmatch(r'naive attention, 64 tokens: \d+ ms, \d+ MB\n', capsys.readouterr().out)


# plot.py ----------------------------------------------------------------------------------------------------

def test_plot_draws_the_numbers_of_the_logs(folder):
    """Each curve, converted back from pixels by the labels of the axes, next to its column."""
    names = ['out', 'a & <b>']
    for seed, name in enumerate(names):
        run('train.py', *SMALL, f'--out_dir={name}', f'--seed={seed}', '--log_interval=1')
    run('examples/plot.py', *names)
    svg = '{http://www.w3.org/2000/svg}'
    root = xml.etree.ElementTree.parse('losses.svg').getroot()
    labels = {kind: [one for one in root.iter(f'{svg}text') if one.get('class') == kind] for kind in (
        'run', 'x', 'y')}
    assert [one.text for one in labels['run']] == names
    axes = [np.polyfit([float(one.get(axis)) for one in labels[axis]],
                       [float(one.text) for one in labels[axis]], 1) for axis in 'xy']
    axes[1][1] += 4 * axes[1][0]  # a label's baseline is 4 pixels below its value
    for column in 'loss', 'val_loss':
        curves = [one for one in root.iter(f'{svg}polyline') if one.get('class') == column]
        assert len({one.get('stroke') for one in curves}) == 2
        for name, curve in zip(names, curves, strict=True):
            pixels = np.array([point.split(',') for point in curve.get('points').split()], float)
            found = [np.polyval(axis, values) for axis, values in zip(axes, pixels.T)]
            rows = [row for row in common.log_rows(name) if row[column]]
            assert len(rows) == {'loss': 10, 'val_loss': 2}[column]
            assert found[0] * 1e6 == pytest.approx([int(row['tokens']) for row in rows], abs=1)
            assert found[1] == pytest.approx([float(row[column]) for row in rows], abs=1e-3)
    assert len([*root.iter(f'{svg}circle')]) == 4


def test_intervals_draws_the_numbers_of_a_comparison(folder):
    """A new picture and the picture in docs/ have the numbers of the table in docs/results.md, converted back
    from pixels by the labels of the axis."""
    text = (common.ROOT / 'docs/results.md').read_text('utf-8').replace('\N{MINUS SIGN}', '-')
    cells = re.findall(r'^\| (\S[^|]*?) \| [\d.]+ ± [\d.]+ \|(.*)\|$', text, re.M)
    table = {name: [*map(float, re.findall(r'[-+][\d.]+', cell))] for name, cell in cells}
    rows = [{'variant': name} | ({'difference': one[0], 'half_interval': one[2] - one[0]} if one else {})
            for name, one in table.items()]
    Path('ladder.json').write_text('{"rows": []}\n' + json.dumps({'rows': rows}))
    run('examples/intervals.py', 'ladder.json')
    for path in 'ladder.svg', common.ROOT / 'docs/ladder.svg':
        parts = [*xml.etree.ElementTree.parse(path).getroot()]
        labels, names, bars, dots = ([one for one in parts if kind in (one.get('class'), one.get('r'))]
                                     for kind in ('x', 'variant', 'interval', '5'))
        axis = np.polyfit(*zip(*[(float(one.get('x')), float(one.text)) for one in labels]), 1)
        assert len(names) == 7
        for name, dot, bar in zip(names, dots, bars, strict=True):
            found = np.polyval(axis, [float(dot.get('cx')), float(bar.get('x1')), float(bar.get('x2'))])
            assert found == pytest.approx(table[name.text] or [0] * 3, abs=2e-4)

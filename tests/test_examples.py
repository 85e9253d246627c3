"""Runs every file of examples/ as its users do, and compares each idea's formula with a naive loop."""
import contextlib
import dataclasses
import itertools
import math
import re
import shutil
import sys
import types

import common
import numpy as np
import pytest
import torch

EXAMPLES = {path.stem: str(path) for path in sorted((common.ROOT / 'examples').glob('*.py'))
            if path.stem not in ('pydoc_chat', 'look_inside')}  # for prepare.py, sample.py
SMALL = [*common.TOY, '--n_layer=4', '--n_head=4', '--max_iters=10', '--eval_interval=5']
each_example = pytest.mark.parametrize('name', EXAMPLES)
OURS = {'zoo', 'lab', 'formulas', *EXAMPLES, *(path.stem for path in common.ROOT.glob('*.py'))}


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


def run(script, name, *args):
    with fresh_modules():
        return common.run(script, EXAMPLES[name], *args)


def train(name, *args):
    run('train.py', name, *SMALL, *args)
    return torch.load('out/ckpt.pt', weights_only=True)


@contextlib.contextmanager
def imported(name):
    """Yields the example's names and its fields of GPTConfig, with our modules changed by it."""
    with fresh_modules():
        import configurator
        found = configurator.run_file(f'examples/{name}.py', {})
        yield found


@each_example
def test_an_example_is_short(name):
    with open(EXAMPLES[name], encoding='utf-8') as f:
        assert len(f.readlines()) <= 80


@each_example
def test_an_example_trains_resumes_and_recomputes(name, folder):
    """A resumed run and one that recomputes its blocks have the numbers of an unbroken run."""
    whole = train(name, '--dropout=0.1')
    losses = [row['loss'] for row in common.log_rows('out')]
    assert float(losses[-1]) < 3.2
    shutil.rmtree('out')
    train(name, '--dropout=0.1', '--max_iters=5', '--lr_decay_iters=10')
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
        run('lab/check.py', name, '--n_head=4')
    printed = capsys.readouterr().out
    assert not end.value.code, printed
    assert 'check_cache' in printed


@each_example
def test_an_examples_samples_do_not_depend_on_the_cache(name, folder):
    train(name)
    with imported(name):
        import sample
        model, _, _ = sample.load('out')
        model.eval()
        prompt = [1, 5, 9]
        drawn = [token for _, token in sample.generate(model, [prompt], 12, temperature=0)][:-1]
        for i, token in enumerate(drawn):
            logits = model(torch.tensor([prompt + drawn[:i]]))[0, -1]
            assert logits[token] > logits.max() - 1e-4


@each_example
def test_an_examples_flops_are_counted(name, folder):
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
        assert flat.num_params(model) == sum(w.numel() for w in model.parameters())
        ours = flat.flops_per_token(model) * length
        assert 3 * counter.get_total_flops() == pytest.approx(ours, rel=0.1)


# the trained model is a usual one
STANDARD = {'beam_search', 'growing_length', 'label_smoothing', 'soap', 'typical_sampling', 'weight_mean'}


@each_example
def test_an_example_is_not_exported_as_something_else(name, folder):
    train(name, '--max_iters=1', '--eval_interval=1')
    with pytest.raises(ValueError) if name not in STANDARD else contextlib.nullcontext() as error:
        run('zoo/hub.py', name, 'export', 'out', 'mymodel')
    assert not error or re.search('mixer_pattern|mlp=|has no|parameter|tensor', str(error.value))
    if error:  # without the example, the checkpoint does not load
        with fresh_modules(), pytest.raises(ValueError):
            import sample
            sample.load('out')


@pytest.mark.parametrize('name, options', [
    ('canon', '--n_expert=4'), ('canon', '--mixer_pattern=C'), ('canon', '--norm_placement=sandwich'),
    ('hyper_connections', '--mtp=True'), ('mhc', '--residual_scale=2.0'),
    ('attention_residuals', '--layer_scalar=True'), ('value_residual', '--attn_gate=True')])
def test_options_that_an_example_replaces_are_rejected(name, options, folder):
    with pytest.raises(ValueError, match='need|replace|derive'):
        train(name, options)


# each idea next to a naive computation ----------------------------------------------------------------------

def randomized(flat, **options):
    """A model, none of whose weights are zero or one, and token ids (2, 24)."""
    fields = dict(n_layer=4, n_head=4, n_kv_head=2, n_embd=32, vocab_size=61, block_size=32)
    net = flat.GPT(flat.GPTConfig(**fields | options)).eval()
    with torch.no_grad():
        for w in net.parameters():
            w.add_(torch.randn_like(w) * 0.1)
    return net, torch.randint(61, (2, 24))


def test_yoco_attends_to_the_middle_layers_keys(folder):
    """Each token's attention by a loop over heads, for layers 1 (window) and 3 (shared keys)."""
    with imported('yoco') as found, torch.no_grad():
        found['WINDOW'] = 5
        import model as flat
        net, idx = randomized(flat, mixer_pattern='Y')
        inputs = {}
        for layer, block in enumerate(net.h):
            block.attn.register_forward_hook(
                lambda _, args, y, layer=layer: inputs.update({layer: (args[0], y)}))
        net(idx)
        rope = flat.rope_table(net.config.rope_kind, torch.arange(24)[None], 32)
        for layer, source in (1, 1), (3, 2):
            x, y = inputs[layer]
            mixer, owner = net.h[layer].attn, net.h[source].attn
            q = flat.rotate(mixer.q_norm(mixer.c_attn(x)[0].view(2, 24, 4, 8)).transpose(1, 2), rope)
            k, v = (z.view(2, 24, 2, 8) for z in owner.c_attn(inputs[source][0])[1:])
            k, v = flat.rotate(owner.k_norm(k).transpose(1, 2), rope), v.transpose(1, 2)
            heads = torch.zeros(2, 4, 24, 8)
            for head in range(4):
                for t in range(24):
                    seen = slice(max(0, t - 4) if layer == 1 else 0, t + 1)
                    score = (k[:, head // 2, seen] @ q[:, head, t, :, None])[..., 0] / 8 ** 0.5
                    heads[:, head, t] = (score.softmax(-1)[..., None] * v[:, head // 2, seen]).sum(1)
            torch.testing.assert_close(mixer.c_proj(heads.transpose(1, 2).flatten(2)), y)
        import bench
        plain = flat.GPT(flat.GPTConfig(n_layer=4, n_head=4, n_kv_head=2, n_embd=32, vocab_size=61))
        sizes = [bench.cache_bytes(one, 32, torch.float32) for one in (plain, net)]
        assert sizes[1] / sizes[0] == (5 + 5 + 32) / (4 * 32)


def test_canon_is_a_convolution(folder):
    """torch.conv1d, and the places of all four."""
    with imported('canon'), torch.no_grad():
        import model as flat
        net, idx = randomized(flat)
        layer = net.h[1].canon_a
        x = torch.randn(2, 24, 32)
        padded = torch.nn.functional.pad(x.mT, (3, 0))
        y = x + torch.conv1d(padded, layer.conv[:, None], groups=32).mT
        torch.testing.assert_close(layer(x, flat.make_context(net, idx)), y)
        counts = [m.conv.shape[0] for m in net.h[1].modules() if hasattr(m, 'conv')]
        assert sorted(counts) == [32, 32, 64, 2 * net.config.d_ff]


def test_relu_power_equals_its_formula():
    with imported('relu_power') as found:
        act = found['ReluPower'](None)
        for power in 2.0, 0.5:
            torch.nn.init.constant_(act.power, power)
            x = torch.tensor([-2.0, 0.0, 0.3, 4.0], requires_grad=True)
            y = act(x)
            y.sum().backward()
            assert y.tolist() == pytest.approx([0, 0, 0.3 ** power, 4 ** power])
            slope = [0, 0, *(power * n ** (power - 1) for n in (0.3, 4))]
            assert x.grad.tolist() == pytest.approx(slope)
            assert act.power.grad.isfinite()


def layer(letter, idx, **options):
    """Runs a random model. Returns its last mixer, the queries, keys and values of the first row, each
    (heads, T, 8), and what c_proj projects, (T, 32)."""
    import model as flat
    model = flat.GPT(flat.GPTConfig(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, block_size=16, vocab_size=9,
                                    mixer_pattern=letter, **options)).eval()
    for w in model.parameters():
        torch.nn.init.normal_(w, std=0.5)
    mixer = model.h[1].attn
    seen = []
    mixer.register_forward_pre_hook(lambda _, args: seen.append(mixer.qkv(*args)))
    mixer.c_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(idx)
    (q, k, v), y = seen[:2]
    return mixer, *(part[0].double() for part in (q, k, v, y))


@torch.no_grad()
def test_differential_attention_equals_its_formula():
    with imported('differential_attention'):
        mixer, q, k, v, y = layer('F', torch.arange(9)[None])
    a, b, c, d = mixer.lambdas.double()
    start = 0.8 - 0.6 * math.exp(-0.3)
    factor = (a * b).sum().exp() - (c * d).sum().exp() + start
    for h in range(2):
        for i in range(9):
            first, second = (torch.softmax(k[j, :i + 1] @ q[h + 2 * j, i] / 8 ** 0.5, 0) for j in range(2))
            o = torch.cat([(first - factor * second) @ v[j, :i + 1] for j in range(2)])
            o = o / (o.square().mean() + 1e-6).sqrt() * mixer.head_norm.weight * (1 - start)
            assert torch.allclose(y[i, 16 * h:16 * h + 16], o, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize('start', [0, 2])
def test_moba_equals_its_formula(start):
    idx = torch.randint(1, 9, (1, 15))
    idx[0, start] = 0
    with imported('moba') as found:
        found.update(BLOCK=3, TOP_K=2)
        _, q, k, v, y = layer('O', idx, document_token=0 if start else None)
    for h in range(4):
        for i in range(start, 15):
            blocks = [[*range(first, min(first + 3, i + 1))] for first in range(start, i + 1, 3)]
            best = sorted(blocks[:-1], key=lambda block: k[h // 2, block].mean(0) @ q[h, i])[-1:]
            keys = sum(best, blocks[-1])
            o = torch.softmax(k[h // 2, keys] @ q[h, i] / 8 ** 0.5, 0) @ v[h // 2, keys]
            assert torch.allclose(y[i, 8 * h:8 * h + 8], o, atol=1e-4)


def test_moba_with_small_blocks_passes_the_checks():
    with imported('moba') as found:
        found.update(BLOCK=3, TOP_K=2)
        from lab import check
        config = check.tiny_config(check.GPTConfig(n_layer=2, n_kv_head=3, mixer_pattern='O'))
        check.check_cache(config)
        check.check_gradients(config)
        check.check_documents(config)
        check.check_cache(dataclasses.replace(config, document_token=3))


@torch.no_grad()
def test_fire_equals_its_formula():
    with imported('fire'):
        mixer, q, k, v, y = layer('I', torch.arange(9)[None], pos='none')
    c, L = mixer.log_c.exp().item(), mixer.log_L.exp().item()
    w_1, b_1, w_2 = (w.double() for w in (mixer.w_1, mixer.b_1, mixer.w_2))
    for h in range(4):
        for i in range(9):
            x = [math.log(c * (i - j) + 1) / math.log(c * max(L, i) + 1) for j in range(i + 1)]
            b = torch.stack([w_2[h] @ (n * w_1 + b_1).clamp(min=0) for n in x])
            o = torch.softmax(k[h // 2, :i + 1] @ q[h, i] / 8 ** 0.5 + b, 0) @ v[h // 2, :i + 1]
            assert torch.allclose(y[i, 8 * h:8 * h + 8], o, atol=1e-4)


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
                W = W - 0.1 * (QL @ corrected @ QR.T) - 0.1 * 0.5 * W
            L, R = 0.95 * L + 0.05 * G @ G.T, 0.95 * R + 0.05 * G.T @ G
            if t == 0:
                QL, QR = (np.linalg.eigh(P)[1][:, ::-1] for P in (L, R))
            elif t % 2 == 0:
                QL, QR = np.linalg.qr(L @ QL)[0], np.linalg.qr(R @ QR)[0]
        np.testing.assert_allclose(w.detach()[half], W, rtol=1e-5)


def test_engram_reads_the_rows_of_the_last_tokens(folder):
    """By Python's integers, for each token; a document starts at 0 and at 7."""
    with imported('engram') as found, torch.no_grad():
        import model as flat
        net, idx = randomized(flat, document_token=60)
        idx = idx.clamp(max=59)
        idx[:, 7] = 60
        layer = net.h[1].engram
        rows = layer.rows(flat.make_context(net, idx))
        a, b, c = found['MULTIPLIERS']
        for row in 0, 1:
            for t in range(24):
                start = 0 if t < 7 else 7
                x, y, z = (int(idx[row, t - i]) + 1 if t - i >= start else 0 for i in range(3))
                pair, triple = x * a ^ y * b, x * a ^ y * b ^ z * c
                assert rows[row, t].tolist() == [pair % 4093, 4093 + pair % 4091, 8184 + triple % 4079,
                                                 12263 + triple % 4073]
        x = torch.randn(2, 24, 32)
        memory = layer.table.weight[rows].flatten(2)
        k = torch.nn.functional.rms_norm(memory @ layer.c_k.weight.T, (32,), layer.k_norm.weight, 1e-6)
        h = torch.nn.functional.rms_norm(x, (32,), layer.x_norm.weight, 1e-6)
        gate = torch.sigmoid((h * k).sum(-1) / 32 ** 0.5)
        torch.testing.assert_close(layer(x, flat.make_context(net, idx)),
                                   gate[..., None] * (memory @ layer.c_proj.weight.T))


def test_weight_mean(folder):
    """A checkpoint has the mean of the weights of a usual run, and these weights in the optimizer's state."""
    usual = [train('typical_sampling', '--decay_lr=False', f'--max_iters={n}')['model'] for n in (1, 2, 3, 4)]
    found = train('weight_mean', '--decay_lr=False', '--max_iters=4')
    with imported('weight_mean') as names:
        shares = torch.tensor([names['DECAY'] ** (4 - i) for i in (1, 2, 3, 4)], dtype=torch.float64)
    for name, state in found['optimizer'].items():
        assert torch.equal(state['mean'], usual[-1][name])
        weights = torch.stack([state[name] for state in usual], -1).double()
        mean = (weights * shares / shares.sum()).sum(-1)
        torch.testing.assert_close(found['model'][name].double(), mean, rtol=1e-4, atol=1e-6)


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
        for inputs, targets, _ in batch:
            assert inputs.shape == targets.shape == (3 * pieces, 16 // pieces)
            assert torch.equal(inputs, inputs[:, :1] + torch.arange(16 // pieces))
            assert torch.equal(targets, inputs + 1)
    read = torch.cat([inputs.flatten() for batch in batches for inputs, *_ in batch])
    assert torch.equal(read.sort().values, torch.arange(16 * 36))


def test_typical_sampling():
    """How often tokens are drawn, next to a loop over the tokens nearest to the entropy."""
    u = (torch.arange(4000) + 0.5) / 4000
    with imported('typical_sampling') as found:
        found['MASS'] = 0.7
        for logits in torch.randn(8, 6) * 2:
            p = np.exp(logits.double().numpy() / 0.8)
            p /= p.sum()
            entropy = -sum(p * np.log(p))
            kept = []
            for token in sorted(range(6), key=lambda i: abs(entropy + np.log(p[i]))):
                if p[kept].sum() < 0.7:
                    kept.append(token)
            drawn = found['sample_token'](logits.expand(4000, 6), u, temperature=0.8)
            share = [p[i] / p[kept].sum() if i in kept else 0 for i in range(6)]
            np.testing.assert_allclose(drawn.bincount(minlength=6) / 4000, share, atol=1e-3)


@contextlib.contextmanager
def built(name, **fields):
    """Yields the example's names, and a model in float64 whose parameters are all random."""
    with imported(name) as found:
        import model as flat
        fields = {'n_embd': 16, 'n_head': 2, 'block_size': 8, 'vocab_size': 11} | fields
        model = flat.GPT(flat.GPTConfig(**fields)).eval().double()
        for w in model.parameters():
            torch.nn.init.normal_(w, std=0.5)
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(torch.Tensor, 'float', torch.Tensor.double)
            yield found, model, flat.make_context(model, torch.arange(8)[None])


def test_attention_residuals_are_softmax_weighted_sums_of_all_outputs():
    with built('attention_residuals', n_layer=3, norm_eps=1e-5) as (_, model, context):
        outputs = [model.embed(context)[0]]                                          # each (T, C)

        def mixed(query):
            mix = torch.zeros(8, 16).double()
            for t in range(8):
                keys = [v[t] / (v[t].square().mean() + 1e-5).sqrt() for v in outputs]
                weights = [(query @ key).exp() for key in keys]
                for weight, v in zip(weights, outputs):
                    mix[t] += weight / sum(weights) * v[t]
            return mix
        for block in model.h:
            x = outputs[0] if block is model.h[0] else mixed(block.attn_query)
            outputs.append(block.attn(block.ln_1(x)[None], context)[0])
            outputs.append(block.mlp(block.ln_2(mixed(block.mlp_query))))
        expected = model.head(mixed(model.h[-1].last_query)[None])
        torch.testing.assert_close(model(context.idx), expected)


def test_looped_repeats_the_core_with_the_preludes_output():
    with built('looped', n_layer=4) as (found, model, context):
        prelude, first, second, coda = ((lambda x, block=block: block(x, context)) for block in model.h)
        adapter = model.h[1].c_adapter.weight
        e = prelude(model.embed(context))
        state = torch.zeros_like(e)
        for _ in range(found['REPETITIONS']):
            state = second(first(state @ adapter[:, :16].mT + e @ adapter[:, 16:].mT))
        torch.testing.assert_close(model(context.idx), model.head(coda(state)))


@pytest.mark.parametrize('name', ['hyper_connections', 'mhc'])
def test_streams_are_read_written_and_mixed_by_the_papers_formulas(name):
    with built(name, n_layer=2, norm_eps=1e-5) as (found, model, context):
        N = found['N']
        streams = [[x] * N for x in model.embed(context)[0]]                         # T lists of N x (C,)

        def unit(x):
            return x / (x.square().mean() + 1e-5).sqrt()

        def weights_of_hc(part, H):
            A_m, A_r, B = torch.zeros(N, 1).double(), torch.zeros(N, N).double(), torch.zeros(N).double()
            s_alpha, s_beta = part.scales
            for i in range(N):
                change = (part.dynamic.weight @ (part.norm.weight * unit(H[i]))).tanh()
                A_m[i] = part.static[i, 0] + s_alpha * change[0]
                A_r[i] = part.static[i, 1:-1] + s_alpha * change[1:-1]
                B[i] = part.static[i, -1] + s_beta * change[-1]
            return A_m[:, 0], B, A_r.mT

        def weights_of_mhc(part, H):
            logits = part.phi.weight @ unit(torch.cat(H))
            logits = torch.cat([part.alpha[0] * logits[:N], part.alpha[1] * logits[N:2 * N],
                                part.alpha[2] * logits[2 * N:]]) + part.static
            res = logits[2 * N:].view(N, N).exp()
            for _ in range(found['ITERATIONS']):
                res = res / res.sum(0)
                res = res / res.sum(1)[:, None]
            return logits[:N].sigmoid(), 2 * logits[N:2 * N].sigmoid(), res

        for block in model.h:
            for part, norm, function in ((block.hyper_attn, block.ln_1, block.attn),
                                         (block.hyper_mlp, block.ln_2, block.mlp)):
                weights = [(weights_of_mhc if name == 'mhc' else weights_of_hc)(part, H) for H in streams]
                x = torch.stack([sum(pre[i] * H[i] for i in range(N))
                                 for (pre, _, _), H in zip(weights, streams)])
                y = function(norm(x)[None], context)[0]
                streams = [[post[i] * y[t] + sum(res[i, j] * H[j] for j in range(N)) for i in range(N)]
                           for t, ((_, post, res), H) in enumerate(zip(weights, streams))]
        expected = model.head(torch.stack([sum(H) for H in streams])[None])
        torch.testing.assert_close(model(context.idx), expected)


@pytest.mark.parametrize('name', ['hyper_connections', 'mhc'])
def test_streams_start_as_the_usual_network(name):
    fields = dict(n_layer=3, n_embd=16, n_head=2, block_size=8, vocab_size=11, norm_eps=1e-12)
    idx = torch.arange(8)[None]
    with imported(name):
        import model as flat
        model = flat.GPT(flat.GPTConfig(**fields)).double()
        for name, w in model.named_parameters():
            if 'hyper' not in name:
                torch.nn.init.normal_(w, std=0.5)
        logits = model(idx)
        state = {name: w for name, w in model.state_dict().items() if 'hyper' not in name}
    import model as flat
    usual = flat.GPT(flat.GPTConfig(**fields)).double()
    usual.load_state_dict(state)
    torch.testing.assert_close(usual(idx), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('alpha', [0.6, 8.0])
def test_beam_search(alpha):
    """A wide beam, next to the scores of all continuations; one beam, next to greedy decoding."""
    with imported('beam_search') as found:
        import sample
        from model import GPT, GPTConfig
        model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=5)).eval()
        for w in model.parameters():
            torch.nn.init.normal_(w, std=0.3)
        scores = {}
        for tokens in itertools.product(range(5), repeat=4):
            end = next((i for i in range(4) if tokens[i] == 1), 3) + 1
            log_p = model(torch.tensor([[3, 0, *tokens]])).double().log_softmax(-1)[0, 1:-1]
            total = sum(log_p[i, tokens[i]].item() for i in range(end))
            scores[tokens[:end]] = total / ((5 + end) / 6) ** alpha
        found.update(BEAMS=5 ** 3, ALPHA=alpha)
        score, tokens = found['search'](model, [3, 0], 4, [1])
        assert tuple(tokens) == max(scores, key=scores.get)
        assert score == pytest.approx(max(scores.values()), rel=1e-5)
        found['BEAMS'] = 1
        greedy = [token for _, token in sample.generate(model, [[3, 0]], 30, temperature=0)]
        assert [token for _, token in found['generate'](model, [[3, 0]], 30)] == greedy


@pytest.mark.parametrize('first, second, name', [
    ('canon', 'engram', 'model.make_block'), ('looped', 'canon', 'model.make_block'),
    ('weight_mean', 'weight_mean', 'update'), ('label_smoothing', 'label_smoothing', 'GPT.loss')])
def test_two_examples_do_not_replace_the_same_function(first, second, name, folder):
    with pytest.raises(ValueError, match=f'two config files replace .*{name}'):
        train(first, EXAMPLES[second])


@pytest.mark.parametrize('name', ['weight_mean', 'label_smoothing', 'soap'])
def test_a_run_is_resumed_only_with_its_example(name, folder):
    train(name)
    with pytest.raises(ValueError, match='trained with config files that change .*: name the same files'), \
            fresh_modules():
        common.run('train.py', '--init_from=resume', '--max_iters=12')

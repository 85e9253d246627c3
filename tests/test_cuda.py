"""Compares a GPU with the CPU in float32. Skipped without a GPU.

    python -m pytest tests/test_cuda.py
    FLATGPT_TEST_DEVICE=cpu python -m pytest tests/test_cuda.py  # tests this file, on the CPU
"""
import copy
import functools
import math
import os
import types

import pytest
import torch
import torch.nn.functional as F
from common import ROOT, TOY, dequantized, log_rows, made, run, same_weights, torchrun

import sample as flat_sample
import train as flat_train
from model import GPT, GPTConfig, cross_entropy
from zoo import weights

DEVICE = os.environ.get('FLATGPT_TEST_DEVICE', 'cuda')
IS_GPU = DEVICE.startswith('cuda')
if IS_GPU and not torch.cuda.is_available():
    pytest.skip('there is no CUDA device', allow_module_level=True)

# wide enough for flex_attention; training pads this vocabulary
SHAPE = dict(n_layer=1, n_head=4, n_embd=128, block_size=256, vocab_size=301)
KINDS = {
    'grouped queries': dict(n_kv_head=2),
    'window and documents': dict(n_layer=2, n_kv_head=2, window=100, window_pattern='SL', document_token=3),
    'latent attention': dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32),
    'experts, the first without tokens': dict(n_expert=4, d_expert=64, balance_bias=True),
    'alibi': dict(pos='alibi'),
    'softcap and sinks': dict(attn_softcap=20.0, attn_sink=True, n_kv_head=2),
    'states': dict(n_layer=5, mixer_pattern='DABKC', linear_n_key_head=2, linear_n_value_head=2,
                   linear_key_head_dim=16, linear_value_head_dim=16),
}
WAYS = {  # (dtype, compiled, largest difference of losses, smallest cosine of gradients)
    'float32': (torch.float32, False, 1e-4, 1 - 1e-6),
    'bfloat16': (torch.bfloat16, False, 2e-2, 0.99),
    'bfloat16 compiled': (torch.bfloat16, True, 2e-2, 0.99),
    'float16': (torch.float16, False, 2e-2, 0.99),
}


def new_model(**options):
    """A model without branches at zero, whose routers never choose the first expert."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SHAPE, **options}))
    with torch.no_grad():
        for w in model.parameters():
            if not w.any():
                w.normal_(std=0.02)
    for name, bias in model.named_buffers():
        if name.endswith('expert_bias'):
            bias[0] = -10
    return model


def new_batch(device):
    torch.manual_seed(1)
    tokens = torch.randint(301, (4, 257))
    tokens[:, [70, 200]] = 3
    return tokens[:, :-1].to(device), tokens[:, 1:].to(device), 1.0


def new_run(model, device, dtype=torch.float32, **settings):
    kind = torch.device(device).type
    autocast = functools.partial(torch.autocast, kind, dtype, enabled=dtype is not torch.float32)
    return flat_train.Run(model, {**flat_train.config, **settings}, types.SimpleNamespace(
        device=device, device_type=kind, dtype=dtype, autocast=autocast))


def one_iteration(model, device, dtype=torch.float32, compiled=False):
    """Returns the loss, the experts' load or None, and the gradients in float64 on the CPU."""
    torch.set_float32_matmul_precision('highest')
    run = new_run(model, device, dtype)
    run.scaler = torch.amp.GradScaler(run.machine.device_type, enabled=False)
    run.forward = flat_train.compile_model(model, device) if compiled else model
    loss, load = flat_train.gradients(run, [new_batch(device)])
    return loss.item(), load, {name: w.grad.double().cpu() for name, w in model.named_parameters()}


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('way', WAYS)
def test_losses_and_gradients_equal_the_cpus(kind, way):
    dtype, compiled, error, least = WAYS[way]
    expected, _, gradients = one_iteration(new_model(**KINDS[kind]).train(), 'cpu')
    model = new_model(**KINDS[kind]).train().to(DEVICE)
    loss, load, found = one_iteration(model, DEVICE, dtype, compiled)
    gpu, cpu = (torch.cat([grads[name].flatten() for name in gradients]) for grads in (found, gradients))
    assert abs(loss - expected) < error and F.cosine_similarity(gpu, cpu, dim=0) > least
    assert (gpu.norm() / cpu.norm()).item() == pytest.approx(1, rel=0.02)
    if 'experts' in kind:
        assert load[:, 0].tolist() == [0] and not any(
            grad[0].any() for name, grad in found.items() if '.experts.' in name)


@pytest.mark.parametrize('optimizer, dtype', [
    ('adamw', torch.float32), ('muon', torch.float32), ('muon', torch.float16)])
def test_updates_equal_the_cpus_and_the_host_does_not_wait(optimizer, dtype):
    """Except for float16's scaler. The last update is skipped, because a gradient is not finite."""
    found, watch = [], torch.cuda.set_sync_debug_mode if IS_GPU else print
    for device, dtype_there in ('cpu', torch.float32), (DEVICE, dtype):
        model = new_model(n_kv_head=2).train().to(device)
        run = new_run(model, device, dtype_there, optimizer=optimizer)
        params = run.params
        for i in range(4):
            before = [w.detach().clone() for w in params]
            flat_train.gradients(run, [new_batch(device)])
            if i == 3:
                params[0].grad[0] = math.nan
            watch('error' if i and device == DEVICE and not run.scaler.is_enabled() else 'default')
            _, moved = flat_train.update(run, None)
            watch('default')
            assert all(map(torch.equal, before, params)) == (i == 3) != moved.item()
        found.append([w.detach().cpu() for w in params])
    for (name, _), one, other in zip(model.named_parameters(), *found):
        assert (one - other).norm() <= 0.02 * one.norm(), name


# runs -------------------------------------------------------------------------------------------------------

RUN = [*TOY, f'--device={DEVICE}', '--block_size=128', '--n_embd=64', '--log_interval=1']


def train(out, *args):
    return run('train.py', *RUN, f'--out_dir={out}', *args)


def test_greedy_text_is_the_same_on_each_path(folder, monkeypatch):
    """Eager, compiled for one row and for three: all in float32, as on the CPU."""
    monkeypatch.setitem(flat_sample.FREEZING, 'max_autotune', False)  # saves time on CPUs
    model = train('out', '--max_iters=40', '--n_kv_head=1', '--dropout=0.1')['model'].eval()
    torch.set_float32_matmul_precision('highest')
    prompts = [[1, 8, 20], [4], [2, 13, 22, 21]]
    greedy = functools.partial(made, prompts=prompts, n=60, temperature=0)
    expected = greedy(copy.deepcopy(model).cpu())
    assert all(len(set(tokens)) > 5 for tokens in expected)
    for options in ({}, dict(compile=True, batch_size=1), dict(compile=True, batch_size=3)):
        for _ in range(2):  # with another cache
            assert greedy(model, **options) == expected, options
    monkeypatch.setattr(flat_sample, 'PREFILL', 2)
    monkeypatch.setattr('model.BLOCK', 1)
    assert greedy(model, batch_size=1) == expected  # causal masks aligned to the last key


@pytest.mark.parametrize('rows', [1, 2, 40])
def test_int8_weights_give_the_logits_of_dequantized_ones(rows):
    model, idx = new_model(n_kv_head=2).eval(), torch.randint(301, (1, rows))
    weights.quantize_weights(model, torch.bfloat16)
    with torch.no_grad():
        expected = dequantized(model)(idx)
        assert (model.to(DEVICE)(idx.to(DEVICE)).cpu() - expected).norm() <= 0.03 * expected.norm()


@pytest.mark.parametrize('options', [
    ['--compile=False', '--mixer_pattern=DABK', '--n_layer=4', '--linear_n_key_head=2',
     '--linear_n_value_head=2', '--document_token=3'],
    ['--compile=True', '--n_expert=4', '--d_expert=32', '--window=64', '--window_pattern=SL']],
    ids=['states', 'compiled experts'])
def test_deterministic_runs_are_resumed_bit_for_bit(folder, options):
    args = ['--deterministic=True', '--dtype=bfloat16', '--optimizer=muon', '--dropout=0.1', *options]
    whole = train('whole', *args)['model'].state_dict()
    train('parts', *args, '--max_iters=10', '--lr_decay_iters=20')
    parts = run('train.py', '--out_dir=parts', '--init_from=resume', '--max_iters=20')['model'].state_dict()
    assert same_weights(whole, parts) and all(w.isfinite().all() for w in whole.values())


@pytest.mark.parametrize('ranks', [1, 2])
def test_sharded_ranks_equal_one_process(folder, ranks):
    if IS_GPU and torch.cuda.device_count() < ranks:
        pytest.skip(f'NCCL needs a device for each of {ranks} ranks')
    # all experts are active: rounding must not choose others
    args = ['--n_expert=4', '--n_expert_active=4', '--d_expert=32', '--dtype=bfloat16', '--compile=True',
            '--gradient_accumulation_steps=4', '--max_iters=10']
    train('one', *args)
    torchrun(ranks, str(ROOT / 'train.py'), *RUN, *args, '--out_dir=ranks', *['--shard=True'] * (ranks > 1))
    for key, error in ('loss', 2e-2), ('val_loss', 2e-2), ('grad_norm', 0.1):
        one, found = ([float(row[key] or 0) for row in log_rows(out)] for out in ('one', 'ranks'))
        assert one == pytest.approx(found, rel=error), key


def test_more_logits_than_32_bits_can_number():
    """Compares the gradient of the last row. Without memory for so many rows it uses fewer."""
    width, room = 50304, IS_GPU and torch.cuda.mem_get_info()[0] > 64e9
    rows = 2**31 // width + 64 if room else 300
    logits = torch.zeros(1, rows, width, device=DEVICE, requires_grad=True)
    cross_entropy(logits, torch.full((1, rows), 7, device=DEVICE)).backward()
    expected = torch.full((width,), 1 / width / rows)
    expected[7] -= 1 / rows
    torch.testing.assert_close(logits.grad[0, -1].cpu(), expected, rtol=1e-3, atol=0)

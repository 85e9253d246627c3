"""Tests of train.py."""
import contextlib
import functools
import glob
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from common import (
    ROOT,
    TOY,
    log_rows,
    run,
    same_weights,
    torchrun,
    train,
    write_masks,
    write_packed,
)
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import model as flat
import train as flat_train
from model import GPT, GPTConfig, num_params
from sample import load
from test_model import tiny

CPU = types.SimpleNamespace(device='cpu', device_type='cpu', dtype=torch.float32,
                            autocast=contextlib.nullcontext)
RECORDED = json.loads(Path(__file__).with_name('losses.json').read_text('utf-8'))
GPT2 = [str(ROOT / 'config' / 'gpt2.py'), '--vocab_size=23', '--pos=rope', *TOY]


def new_run(model, machine=CPU, **settings):
    return flat_train.Run(model, {**flat_train.config, **settings}, machine)


def saved(out, name='ckpt.pt'):
    return torch.load(f'{out}/{name}', weights_only=True)


def notes(out):
    return json.loads(Path(out, 'run.json').read_text('utf-8'))


# data and schedules -----------------------------------------------------------------------------------------

def test_ranks_share_a_batch():
    for ranks, expected in (1, (40, 12)), (8, (5, 12)), (3, (16, 10)):
        assert flat_train.share_batch(40, 12, ranks) == expected
    with pytest.raises(ValueError, match='64 sequences, which 3 ranks do not divide'):
        flat_train.share_batch(1, 64, 3)


# optimizers; tests/test_check.py compares their updates with torch's ---------------------------------------

def test_a_new_optimizer_is_one_entry_and_must_have_every_parameter(monkeypatch):
    for name, first in (('sgd', 0), ('forgetful', 1)):
        monkeypatch.setitem(flat_train.OPTIMIZERS, name, lambda model, config, first=first: [
            torch.optim.SGD(list(model.parameters())[first:], lr=config['learning_rate'])])
    opt, = new_run(tiny(), optimizer='sgd', learning_rate=0.5).optimizers
    assert opt.param_groups[0]['lr'] == 0.5
    with pytest.raises(ValueError, match='wte.weight is assigned to no optimizer'):
        new_run(tiny(), optimizer='forgetful')
    with pytest.raises(ValueError, match="'wte': 3.0} .* embedding, matrix, vector"):
        new_run(tiny(), lr_scales={'wte': 3.0})


def test_a_loss_without_an_entry_names_itself(monkeypatch):
    monkeypatch.setattr(GPT, 'loss', lambda self, x, *args: (x.mean(), {'smooth': x.mean()}))
    with pytest.raises(KeyError, match='smooth'):
        flat_train.step(new_run(tiny()), [flat_train.Batch(*torch.randint(61, (2, 2, 8)))])


def test_every_number_of_a_run_is_resumed():
    run, other = new_run(tiny()), new_run(tiny())
    values = dict(iter_num=3, best_val_loss=2.0, best_iter=2, tokens=9, skipped=4, wall_s=5.0, wandb_id='x')
    vars(run).update(values)
    other.resume(run.state() | {'path': ''})
    assert all(getattr(other, name) == getattr(run, name) for name in flat_train.NUMBERS)
    assert values.keys() == flat_train.NUMBERS.keys()


def test_a_gradient_is_not_clipped_at_0():
    run, idx = new_run(tiny(), grad_clip=0.0), torch.randint(61, (2, 8))
    before = run.model.ln_f.weight.detach().clone()  # has no weight decay
    run.iter_num = 1
    flat_train.step(run, [flat_train.Batch(idx, idx)])
    assert not torch.equal(run.model.ln_f.weight, before)


def test_states_of_optimizers_follow_the_names_of_parameters():
    """Parameters and groups may have another order. Unknown names and other shapes are errors."""
    run = new_run(tiny(), optimizer='muon')
    idx = torch.randint(61, (2, 8))
    flat_train.step(run, [flat_train.Batch(idx, idx)])
    states = run.state()['optimizer']
    model = tiny()
    model.tags = dict(reversed(model.tags.items()))
    for module in model.modules():  # as if the lines of __init__ had another order
        module._parameters = dict(reversed(module._parameters.items()))
        module._modules = dict(reversed(module._modules.items()))
    other = new_run(model, optimizer='muon', lr_scales={'embedding': 3.0})
    flat_train.load_optimizers(model, other.optimizers, states)
    found = other.state()['optimizer']
    assert found.keys() == states.keys() == dict(model.named_parameters()).keys()
    assert all(same_weights(found[name], states[name]) for name in states)
    assert {group['lr_scale'] for opt in other.optimizers for group in opt.param_groups} == {1.0, 3.0}
    with pytest.raises(KeyError, match='h.9.extra'):
        flat_train.load_optimizers(model, other.optimizers, {**states, 'h.9.extra': {}})
    with pytest.raises(ValueError, match='does not fit a parameter'):
        flat_train.load_optimizers(model, other.optimizers, {'h.0.attn.c_attn.weight': states['wte.weight']})


def test_an_epoch_reads_each_sequence_once_in_near_blocks():
    """Each half of 1.1M sequences is from half of the blocks of 64 adjacent sequences."""
    for n in 1, 63, 4096, 1_100_000:
        first, other = (flat_train.sequence_order(7, epoch, n) for epoch in (0, 1))
        assert (np.sort([first, other]) == np.arange(n)).all() and (n == 1 or (first != other).any())
    for half in first[:n // 2 - 64], first[n // 2 + 64:]:
        assert len(np.unique(half // 64)) <= n // 128 + 1
        assert np.median(np.abs(np.diff(half))) > 64 * 1000  # neighbours are not read one after the other


@pytest.mark.parametrize('kind', [*flat_train.OPTIMIZERS, 'sgd'])
def test_an_iteration_waits_for_nothing_that_the_device_computes(kind, monkeypatch):
    """Fake tensors have no data, so they raise an error if their value is needed. Also with the optimizer of
    docs/extending.md."""
    recipes = (ROOT / 'docs/extending.md').read_text('utf-8')
    recipe = re.search(r'^\+def sgd.*?(?=^ )', recipes, re.M | re.S)[0]
    exec(recipe.replace('\n+', '\n')[1:], sgd := {**vars(flat_train)})
    monkeypatch.setitem(flat_train.OPTIMIZERS, 'sgd', sgd['sgd'])
    monkeypatch.setattr(flat, 'init_weights', lambda model: None)
    # on CPUs the model looks at its targets, unless it is being compiled
    monkeypatch.setattr(torch.compiler, 'is_compiling', lambda: True)
    machine = types.SimpleNamespace(**{**vars(CPU), 'autocast': functools.partial(
        torch.autocast, 'cpu', torch.bfloat16)})
    with FakeTensorMode():
        model = tiny(n_expert=4, n_dense_layer=1, balance_bias=True)
        run, idx = new_run(model, machine, optimizer=kind), torch.zeros(2, 16, dtype=torch.long)
        for _ in range(2):
            flat_train.step(run, [flat_train.Batch(idx, idx)] * 2)
        with pytest.raises(DataDependentOutputException):
            flat_train.count_skips(run)


# runs -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('kind', RECORDED['runs'])
def test_losses_are_the_recorded_ones(kind, folder):
    """losses.json names their machine and torch. Tests that compare two of today's runs would not notice if
    both drifted."""
    torch.set_num_threads(1)
    for args in RECORDED['runs'][kind]['commands']:
        run('train.py', *TOY, '--log_interval=1', '--learning_rate=1e-2', *args)
    rows = log_rows('out')
    losses, last = [float(row['loss']) for row in rows if row['loss']], rows[-1]
    assert losses == pytest.approx(RECORDED['runs'][kind]['losses'], rel=1e-4), losses
    assert float(last['val_bpb']) == pytest.approx(float(last['val_loss']) / math.log(2), rel=1e-4)


def test_the_length_given_last_counts(folder, capsys):
    Path('long.py').write_text('epochs = 6.0\nwarmup_iters = 20\n', encoding='utf-8')
    for n, *flags in ((math.ceil(6 * (3000 // 16) / 12), 'long.py'), (12, 'long.py', '--max_iters=12'),
                      (94, '--max_iters=12', 'long.py'),
                      (16, '--max_iters=12', '--epochs=6', '--tokens_per_param=2', '--epochs=1'),
                      (14, 'long.py', '--tokens_per_param=0.1', '--epochs=None')):
        main = train('--out_dir=out', '--eval_only', *flags)
        assert f'\nrun: {n} iterations' in capsys.readouterr().out and main['max_iters'] == n
    assert n == math.ceil(0.1 * num_params(main['model']) / (12 * 16)) and not os.path.exists('out')


def test_wandb_gets_the_rows_of_the_log_in_one_run(folder, monkeypatch):
    runs, rows = [], []

    def init(**options):
        runs.append(options)
        return types.SimpleNamespace(id='abc', log=lambda values, step: rows.append(values))
    monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(init=init))
    train('--out_dir=out', '--max_iters=3', '--log_interval=1', '--wandb_log=True', '--wandb_project=mine')
    run('train.py', '--out_dir=out', '--init_from=resume', '--max_iters=5', '--eval_interval=2')
    assert [options['id'] for options in runs] == [None, 'abc'] and runs[1]['project'] == 'mine'
    names = {'loss': 'train/loss', 'val_loss': 'val/loss'}
    for values, row in zip(rows, log_rows('out'), strict=True):
        expected = {names.get(name, name): float(value) for name, value in row.items() if value}
        assert values == pytest.approx(expected, rel=1e-2, abs=1e-2)


def test_losses_that_are_not_finite_are_counted_and_reported_and_end_the_run(folder, monkeypatch, capsys):
    forward, calls = GPT.forward, []

    def broken(self, idx, targets=None, **rest):
        if targets is None:
            return forward(self, idx, targets, **rest)
        loss, aux = forward(self, idx, targets, **rest)
        calls.extend([1] * (self.training and len(idx) > 1))  # not in try_tokens
        return (loss * math.nan if self.training and (len(calls) - 1) // 3 in bad else loss), aux
    monkeypatch.setattr(flat_train.GPT, 'forward', broken)
    bad = {3, 4}
    train('--out_dir=out', '--max_iters=10', '--log_interval=1', '--optimizer=muon')
    assert [row['skipped'] for row in log_rows('out')] == ['0'] * 3 + ['1'] + ['2'] * 6
    assert 'iter 5: a loss or gradient was not finite, updates skipped: 1, 2 ' in capsys.readouterr().out
    good = Path('out/ckpt.pt').read_bytes()
    assert saved('out')['skipped'] == 2
    bad = range(13, 99)
    with pytest.raises(ValueError, match='10 losses or gradients in a row were not finite at iteration 23: '):
        train('--out_dir=out', '--max_iters=40', '--init_from=resume', '--eval_interval=40')
    assert Path('out/ckpt.pt').read_bytes() == good
    assert notes('out')['status'] == 'diverged'


# memory and ranks -------------------------------------------------------------------------------------------

class Shares(flat.Attention):
    """Adds what earlier layers have handed on. Only even layers hand on: their output and their input."""

    def forward(self, x, context):
        y = super().forward(x, context)
        for a, b in [context.handed[layer] for layer in context.handed if layer < self.layer]:
            y = y + a.sin() * b
        if self.layer % 2 == 0:
            context.handed[self.layer] = y, x
        return y


@pytest.mark.parametrize('options', [
    dict(dropout=0.3, document_token=3, window=5, window_pattern='SL', residual_lambdas=True),
    dict(n_expert=4, n_shared_expert=1, dropout=0.2, mtp=True),
    dict(mixer_pattern='X', n_expert=4, mtp=True)], ids=str)
def test_activations_computed_twice_give_the_same_gradients_with_less_memory(options, monkeypatch):
    monkeypatch.setitem(flat.MIXERS, 'X', Shares)

    def gradients(every):
        torch.manual_seed(0)
        model, kept = tiny(n_layer=5, norm_placement='sandwich', **options).train(), {}
        for w in model.parameters():
            w.data.normal_(std=0.3)
        if every:
            flat_train.checkpoint_blocks(model, every)

        def keep(x):
            if not isinstance(x, torch.nn.Parameter):
                kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x
        with torch.autograd.graph.saved_tensors_hooks(keep, keep):
            loss, aux = model(*torch.randint(61, (2, 4, 16)))
        size = sum(storage.nbytes() for storage in kept.values())
        sum((aux[name] for name in ('balance', 'z', 'mtp') if name in aux), loss).backward()
        return [w.grad for w in model.parameters()], size
    (plain, size), (each, smallest), (second, between) = map(gradients, (0, 1, 2))
    assert all(map(torch.equal, plain, each)) and all(map(torch.equal, plain, second))
    assert smallest < between < size


def on_ranks(count, *runs, patch=''):
    """Runs train.py on `count` ranks, once per list of arguments, in the same processes, because they start
    slowly. patch: Python that each rank runs first. Returns what they print; prints ValueError and SystemExit
    instead of raising them."""
    code = f'''import functools, os, runpy, sys
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
rank = int(os.environ['RANK'])
{patch}
for i, args in enumerate({[list(args) for args in runs]!r}):
    sys.argv = ['train.py', *args]
    os.environ['TORCHELASTIC_RESTART_COUNT'] = str(i)  # another store for each run
    try:
        runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')
    except (ValueError, SystemExit) as error:
        print(f'rank {{rank}} raised: {{error}}', flush=True)
        if dist.is_initialized():
            dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # a normal exit lets gloo's threads abort the process while another rank still works
'''
    Path('on_ranks.py').write_text(code, encoding='utf-8')
    return torchrun(count, 'on_ranks.py')


def test_two_ranks_equal_one(folder, capsys):
    shutil.copytree('data/toy', 'data/masked')
    write_masks('data/masked')
    args = [*GPT2, '--log_interval=3', '--eval_interval=5', '--gradient_accumulation_steps=2',
            '--max_iters=10']
    kinds = {
        'plain': [], 'masked': ['--dataset=masked'],
        # so few tokens per rank that most experts get none
        'experts': ['--optimizer=muon', '--n_expert=16', '--n_expert_active=1', '--d_expert=16',
                    '--batch_size=1', '--balance_bias=True', '--norm_topk_prob=False', '--router=sigmoid',
                    '--balance_rate=0.05', '--block_size=8']}
    torch.set_num_threads(1)  # other rounding might choose other experts
    look = ['--out_dir=masked_2', '--init_from=resume', '--eval_only']
    printed = on_ranks(
        2, *([f'--out_dir={kind}_2', *args, *options] for kind, options in kinds.items()), look)
    assert printed.count('step 10: train loss') == 4  # only one rank prints
    capsys.readouterr()
    run('train.py', *look)
    one, two = ([float(loss) for loss in re.findall(r'^\d+ to \d+  (.+)$', text, re.M)]
                for text in (capsys.readouterr().out, printed))
    assert len(one) == 5 and one == pytest.approx(two, abs=2e-4)
    for kind, options in kinds.items():
        main = run('train.py', f'--out_dir={kind}', *args, *options)
        weights = main['model'].state_dict()
        for name, w in saved(f'{kind}_2')['model'].items():
            torch.testing.assert_close(w, weights[name], atol=1e-4, rtol=1e-3, msg=name)
        for key in ('loss', 'val_loss', 'grad_norm'):
            one, two = ([float(row[key] or 0) for row in log_rows(out)] for out in (kind, f'{kind}_2'))
            assert one == pytest.approx(two, rel=1e-3 if key == 'grad_norm' else 1e-4)


SHARES = {  # kind of model -> its options
    'dense': ['--optimizer=muon', '--n_kv_head=1', '--tie_word_embeddings=False', '--residual_lambdas=True'],
    # all experts are active: rounding must not choose another one
    'experts': ['--optimizer=muon', '--bias=True', '--n_expert=4', '--n_expert_active=4',
                '--balance_bias=True', '--z_loss=0.1', '--always_save_checkpoint=False'],
}


def test_a_run_may_continue_on_other_ranks_sharded_or_not(folder):
    """One rank without a stop equals 2, then 4, then 1 rank: replicated, sharded and back, or the reverse."""
    args = [*TOY, '--gradient_accumulation_steps=4', '--log_interval=1', '--eval_interval=3', '--max_iters=9',
            '--lr_decay_iters=9', '--sample_tokens=6', '--eval_iters=3',
            '--learning_rate=5e-4']  # a larger one amplifies the rounding of Muon's bfloat16
    torch.set_num_threads(1)
    for kind, options in SHARES.items():
        run('train.py', f'--out_dir={kind}', *args, *options)

    def runs(first, count):
        return [[f'--out_dir={kind}_{shard}', *args, *options, f'--max_iters={3 * (count // 2)}',
                 f'--shard={shard != first}', f"--init_from={'scratch' if count == 2 else 'resume'}",
                 f'--checkpoint_activations={count // 2}'] for kind, options in SHARES.items()
                for shard in (False, True)]
    printed = on_ranks(2, *runs(False, 2)) + on_ranks(4, *runs(True, 4))
    assert 'raised: ' not in printed and printed.count(' sample:') == 8, printed
    for kind in SHARES:
        plain = saved(kind)
        for out in (f'{kind}_False', f'{kind}_True'):
            run('train.py', f'--out_dir={out}', *args, *SHARES[kind], '--init_from=resume')
            for key, tolerance in dict(loss=3e-5, val_loss=3e-5, grad_norm=1e-3).items():
                a, b = ([float(row[key] or 0) for row in log_rows(name)] for name in (out, kind))
                assert a == pytest.approx(b, rel=tolerance), (out, key)
            mine = saved(out)
            assert [*mine['optimizer']] == [*plain['optimizer']]
            for name, w in plain['model'].items():
                assert (mine['model'][name] - w).norm() <= 0.05 * w.norm(), name
            assert {name: type(value) for name, value in mine.items()} == {
                name: type(value) for name, value in plain.items()}


def test_two_ranks_stop_together_and_skip_together(folder):
    patch = '''
import signal, prepare, model, torch
save = torch.save
def interrupted(*args):  # Slurm and torchrun both send signals
    for name in 'SIGTERM', 'SIGTERM', 'SIGHUP', 'SIGUSR1':
        os.kill(os.getpid(), getattr(signal, name))
    save(*args)
torch.save = interrupted
batch, calls = prepare.Bins.batch, []
def read(*args):
    calls.append(1)
    if rank == 1 and len(calls) == 5:  # during its fourth iteration
        os.kill(os.getpid(), signal.SIGTERM)
    return batch(*args)
prepare.Bins.batch = read
forward, steps = model.GPT.forward, []
def broken(self, idx, targets=None, **rest):
    found = forward(self, idx, targets, **rest)
    if self.training and '--out_dir=skips' in sys.argv:
        steps.append(1)
        if rank == 1 and len(steps) == 3:
            return found[0] + float('inf'), found[1]
    return found
model.GPT.forward = broken
'''
    args = [*TOY, '--optimizer=muon', '--gradient_accumulation_steps=2']
    printed = on_ranks(
        2, ['--out_dir=both', *args, '--log_interval=1000', '--max_iters=1000', '--eval_interval=500'],
        ['--out_dir=skips', *args, '--max_iters=5', '--shard=True'], patch=patch)
    assert saved('both')['iter_num'] == 4
    assert all(f'rank {rank} raised: 143' in printed for rank in (0, 1)), printed
    assert [row['skipped'] for row in log_rows('skips')][-1] == '1'


def test_compiled_ranks_equal_eager_ones(folder):
    """Compiled graphs are split where DDP sends gradients, here in buckets of 10 KB, and where FSDP gathers
    weights. FSDP gathers only matrices in bfloat16, but not those that the model reads in float32."""
    patch = '''
import model, torch
dist._DEFAULT_FIRST_BUCKET_BYTES = 4096
ddp = torch.nn.parallel.DistributedDataParallel
ddp.__init__ = functools.partialmethod(ddp.__init__, bucket_cap_mb=0.01)
forward = model.Block.forward
def show(self, x, context):
    if rank == 0 and '--dtype=bfloat16' in sys.argv:
        print(*(f'{name} {w.dtype}' for name, w in self.named_parameters()), sep='\\n', flush=True)
    return forward(self, x, context)
model.Block.forward = show
'''
    common = [*TOY, '--max_iters=3', '--eval_interval=3', '--log_interval=1', '--dropout=0.2',
              '--gradient_accumulation_steps=4', '--n_expert=4', '--d_expert=16', '--n_dense_layer=1',
              '--checkpoint_activations=2']
    kinds = {'eager': ['--compile=False'], 'ddp': ['--compile=True'],
             'shard': ['--compile=True', '--shard=True'],
             'bfloat16': ['--dtype=bfloat16', '--shard=True', '--max_iters=1', '--mixer_pattern=AD']}
    found = on_ranks(2, *([f'--out_dir={kind}', *common, *more] for kind, more in kinds.items()), patch=patch)
    assert 'raised: ' not in found, found
    for key, error in ('loss', 1e-4), ('grad_norm', 1e-3):
        eager, *compiled = ([float(row[key]) for row in log_rows(kind)] for kind in [*kinds][:3])
        assert len(eager) == 3 and all(each == pytest.approx(eager, rel=error) for each in compiled)
    assert not any('_orig_mod' in name for kind in kinds for name in saved(kind)['model'])
    dtypes = {dtype: {name for name, was in re.findall(r'^(\S+) torch\.(\w+)$', found, re.M) if was == dtype}
              for dtype in ('float32', 'bfloat16')}
    assert dtypes['bfloat16'] == {name for name in dtypes['bfloat16'] | dtypes['float32'] if re.search(
        r'(c_attn|c_proj|c_fc)\.weight', name)}, dtypes
    assert {'mlp.router.weight', 'attn.A_log', 'attn.dt_bias', 'ln_1.weight'} <= dtypes['float32']


# target masks and documents ---------------------------------------------------------------------------------

def test_fine_tuning_on_text_keeps_the_chat_template(folder):
    shutil.copytree('data/toy', 'data/text')
    write_packed()
    train('--out_dir=chat', '--max_iters=1')
    train('--out_dir=more', '--max_iters=1', '--dataset=text', '--init_from=chat')
    assert saved('more')['chats'] and load('more')[2]['chats']


def test_without_targets_there_is_no_loss_and_no_best(folder, capsys):
    write_masks()
    mask = np.zeros(3001, np.uint8)
    mask[:801].tofile('data/toy/val.mask.bin')
    mask[-20:] = 1  # only the last two sequences
    mask.tofile('data/toy/train.mask.bin')
    main = train('--out_dir=out', '--epochs=1', '--log_interval=1', '--always_save_checkpoint=False')
    rows = log_rows('out')
    assert sum(float(row['loss']) > 0 for row in rows) in (1, 2)
    assert all(math.isnan(float(row['loss'])) == (float(row['grad_norm']) == 0) for row in rows)
    assert all(w.isfinite().all() for w in main['model'].parameters())
    assert 'val loss nan' in capsys.readouterr().out and not any(row['val_loss'] for row in rows)
    assert saved('out')['best_val_loss'] == math.inf and not os.path.exists('out/best.pt')


def test_statistics_of_experts_leave_out_tokens_without_a_target(monkeypatch):
    """The oracle is transformers' loss with an attention mask; packed conversations have such tokens."""
    mixtral = pytest.importorskip('transformers.models.mixtral.modeling_mixtral')
    route, found = flat.MoE.route, []
    monkeypatch.setattr(flat.MoE, 'route', lambda *args: found.append(route(*args)) or found[-1])
    idx = torch.randint(61, (2, 4, 16))
    idx[1, 1, 5:], idx[1, 3] = -1, -100
    learned = idx[1] >= 0
    _, aux = tiny(n_expert=4)(*idx)
    balance = mixtral.load_balancing_loss_func
    expected = [balance((logits,), 4, 2, learned.long()) / 2 for *_, logits, _ in found]
    torch.testing.assert_close(aux['balance'], torch.stack(expected).mean())
    for counts, (_, chosen, *_) in zip(aux['load'], found, strict=True):
        assert counts.tolist() == chosen[learned.flatten()].flatten().bincount(minlength=4).tolist()


def test_the_log_has_the_evaluated_training_loss(folder):
    """eval_iters=5 evaluates one batch of evenly spread sequences to train on. An older log has no such
    column."""
    main = train('--out_dir=out', '--max_iters=10')
    ids = torch.from_numpy(np.fromfile('data/toy/train.bin', '<u2').astype(np.int64))
    idx = torch.stack([ids[16 * i:16 * i + 17] for i in (0, 187 // 4, 187 * 2 // 4, 187 * 3 // 4)])
    logits = main['model'].eval()(idx[:, :-1])
    losses = logits.logsumexp(-1) - logits.gather(-1, idx[:, 1:, None])[..., 0]
    before = log_rows('out')
    assert float(before[-1]['train_loss']) == pytest.approx(losses.mean().item(), rel=1e-5)
    assert [bool(row['train_loss']) for row in before] == [bool(row['val_loss']) for row in before]
    older = [[text for name, text in row.items() if name != 'train_loss'] for row in before]
    header = [name for name in before[0] if name != 'train_loss']
    Path('out/log.csv').write_text('\r\n'.join(map(','.join, [header, *older, ''])), 'utf-8')
    run('train.py', '--out_dir=out', '--init_from=resume', '--max_iters=20')
    after = log_rows('out')
    assert after[:len(before)] == [row | {'train_loss': ''} for row in before] and after[-1]['train_loss']


def test_tokens_are_counted_as_they_are_read(folder):
    train('--out_dir=out', '--max_iters=10')
    main = train('--out_dir=out', '--init_from=resume', '--block_size=8', '--epochs=2', '--log_interval=1')
    read = 10 * 12 * 16
    assert main['max_iters'] == 10 + math.ceil((2 * 3000 // 8 * 8 - read) / (12 * 8))
    rows = log_rows('out')
    assert [int(rows[i]['tokens']) for i in (-1, 0)] == [read + (main['max_iters'] - 10) * 12 * 8, 12 * 16]
    assert float(rows[-1]['epoch']) == pytest.approx(int(rows[-1]['tokens']) / 3000, rel=1e-3)


def test_eval_only_reads_any_length_and_prints_losses_by_position(folder, capsys):
    train('--out_dir=out', '--max_iters=3', '--learning_rate=0.01')
    write_masks()
    capsys.readouterr()
    main = train('--out_dir=new', '--init_from=out', '--eval_only', '--block_size=8', '--eval_iters=99')
    printed = capsys.readouterr().out
    ids = torch.from_numpy(np.fromfile('data/toy/val.bin', '<u2')[:801].astype(np.int64))
    is_target = torch.from_numpy(np.fromfile('data/toy/val.mask.bin', bool)[1:801]).view(-1, 8)
    logits = main['model'].eval()(ids[:-1].view(-1, 8)).double()
    losses = (logits.logsumexp(-1) - logits.gather(-1, ids[1:].view(-1, 8, 1))[..., 0]).where(is_target, 0)
    for first, last in (1, 1), (2, 2), (3, 4), (5, 8):
        columns = slice(first - 1, last)
        mean = losses[:, columns].sum() / is_target[:, columns].sum()
        assert f'{first} to {last}  {mean.item():.4f}\n' in printed
    assert f'val loss {losses.sum().item() / is_target.sum().item():.4f}' in printed
    assert not os.path.exists('new')


# checkpoints ------------------------------------------------------------------------------------------------

def test_resumed_equals_uninterrupted(folder):
    common = ['--dropout=0.2', '--log_interval=1', '--optimizer=muon', '--n_expert=4', '--n_shared_expert=1',
              '--balance_bias=True', '--z_loss=0.001', '--document_token=3', '--window=6',
              '--window_pattern=SL', '--residual_lambdas=True',
              "--lr_scales={'embedding': 3.0, 'vector': 2.0}"]
    train('--out_dir=whole', *common)
    train('--out_dir=parts', *common, '--lr_decay_iters=20', '--max_iters=10')
    with open('parts/log.csv', 'a', encoding='utf-8') as f:
        f.write('11,')  # an incomplete row
    run('train.py', '--out_dir=parts', '--init_from=resume', '--max_iters=20')
    a, b = map(saved, ('whole', 'parts'))
    assert same_weights(a['model'], b['model']) and a['iter_num'] == b['iter_num'] == 20
    rows = [[(r['iter'], r['loss'], r['val_loss'], r['lr'], r['grad_norm']) for r in log_rows(out)]
            for out in ('whole', 'parts')]
    assert rows[0] == rows[1] and len(rows[0]) == 20
    assert a['optimizer'].keys() == dict(GPT(GPTConfig(**a['model_args'])).named_parameters()).keys()
    assert all(same_weights(a['optimizer'][name], b['optimizer'][name]) for name in a['optimizer'])
    assert a['tokens'] == b['tokens'] == int(log_rows('parts')[-1]['tokens']) == 20 * 12 * 16


def test_adapters_are_resumed_exactly_and_their_base_is_kept(folder):
    train('--out_dir=base', '--max_iters=5', '--n_expert=4', '--balance_bias=True')
    args = ['--init_from=base', '--lora_rank=2', '--lora_targets=c_attn', '--dropout=0.1',
            '--lr_decay_iters=8']
    with pytest.raises(ValueError, match='out_dir=base holds .*ckpt.pt, the base of the adapters'):
        train('--out_dir=base', *args)
    ended = train('--out_dir=whole', *args, '--max_iters=8')
    bias = 'h.0.mlp.expert_bias'
    assert torch.equal(ended['model'].state_dict()[bias], saved('base')['model'][bias])
    train('--out_dir=parts', *args, '--max_iters=4')
    with pytest.raises(ValueError, match='can only be resumed with the same optimizer, adapters'):
        run('train.py', '--out_dir=parts', '--init_from=resume', '--lora_rank=3')
    run('train.py', '--out_dir=parts', '--init_from=resume', '--max_iters=8')
    assert same_weights(saved('whole')['model'], saved('parts')['model'])
    more = train('--out_dir=more', '--init_from=whole', '--lora_rank=1', '--lora_targets=c_attn',
                 '--max_iters=2')
    x = torch.arange(16)[None]  # new adapters for a model with merged ones
    torch.testing.assert_close(load('more')[0].eval()(x), more['model'].eval()(x))
    train('--out_dir=base', '--init_from=resume', '--max_iters=6', '--learning_rate=1e-5')
    with pytest.raises(ValueError, match='adapters in whole/ckpt.pt were trained on other weights'):
        load('whole')


def test_best_weights_are_kept_and_used(folder):
    train('--out_dir=out', '--max_iters=10', '--always_save_checkpoint=False')
    train('--out_dir=out', '--max_iters=11', '--init_from=resume', '--learning_rate=1')
    best, last = saved('out', 'best.pt'), saved('out')
    assert (best['iter_num'], last['iter_num']) == (10, 11)
    assert last.keys() - best.keys() == {'optimizer', 'scaler'}
    tuned = train('--out_dir=fine', '--init_from=out', '--max_iters=0')['model']
    assert same_weights(tuned.state_dict(), best['model'])
    train('--out_dir=out', '--max_iters=12', '--init_from=resume', '--always_save_checkpoint=True')
    assert load('out')[2]['iter_num'] == 10


def test_a_checkpoint_that_becomes_worse_is_kept_as_best(folder, capsys):
    train('--out_dir=out', '--max_iters=10')
    resume = ['--out_dir=out', '--init_from=resume', '--eval_interval=1']
    train(*resume, '--max_iters=12', '--learning_rate=1')
    printed = capsys.readouterr().out
    assert 'learning rate rises' in printed and 'last val loss is above the best' in printed
    assert load('out')[2]['iter_num'] == 10 and saved('out')['best_iter'] == 10
    run('train.py', *resume, '--max_iters=13')
    assert saved('out', 'best.pt')['iter_num'] == 10
    train(*resume, '--max_iters=150', '--learning_rate=2e-2', '--eval_interval=137')
    assert 'about four passes' in capsys.readouterr().out  # 150 * 192 of 2,992 tokens
    assert saved('out')['best_iter'] > 13 and (
        saved('out')['best_iter'] == 150) != os.path.exists('out/best.pt')


@pytest.mark.parametrize('key, value, message', [
    ('kept', ['x/../../victim'], 'cannot read out/ckpt.pt.*invalid literal'), ('config', 3, 'config is 3'),
    ('keep', 'x', 'out/ckpt.pt: keep must be an integer'), ('log_interval', 0, 'log_interval=0 is not'),
    ('n_layer', 10**7, 'n_layer=10000000 must be at most'), ('n_head', 'x', 'n_head must be an integer'),
    ('tokens', np.float64(3), r'it contains numpy\S*scalar, but only tensors'),
    ('optimizer', {}, ''), ('optimizer', None, '')])
def test_nothing_in_a_checkpoint_is_believed_unseen(key, value, message, folder, capsys):
    train('--out_dir=out', '--max_iters=2', '--keep=1')
    os.mkdir('out/ckpt-x')
    Path('victim.pt').touch()
    state = saved('out')
    next(place for place in (state, state['config'], state['model_args']) if key in place)[key] = value
    if value is None:  # as best.pt
        del state[key]
    torch.save(state, 'out/ckpt.pt')
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        run('train.py', '--out_dir=out', '--init_from=resume', '--max_iters=3')
    assert message or 'lacks states of optimizers' in capsys.readouterr().out
    assert os.path.exists('victim.pt')


def test_a_changed_byte_and_two_models_in_a_folder_are_errors(folder):
    train('--out_dir=out', '--max_iters=1')
    Path('out/config.json').touch()
    with pytest.raises(ValueError, match='out has a published model and ckpt.pt'):
        load('out')
    data = bytearray(Path('out/ckpt.pt').read_bytes())
    at = data.index(saved('out')['model']['wte.weight'].numpy().tobytes())
    data[at:at + 8] = bytes(8)
    Path('out/ckpt.pt').write_bytes(data)
    with pytest.raises(ValueError, match='out/ckpt.pt is damaged: .*differs from its checksum'):
        load('out/ckpt.pt')


def test_files_of_the_user_are_never_touched(folder, capsys):
    os.mkdir('out')
    mine = [Path('out', name) for name in ('lock', 'ckpt.tmp', 'run.tmp', 'log.csv.tmp')]
    for path in mine:
        path.write_text('mine', 'utf-8')
    train('--out_dir=out', '--max_iters=2')
    assert all(path.read_text('utf-8') == 'mine' for path in mine)
    flat_train.log_row('nowhere/log.csv', None, {'iter': 3})
    assert 'warning: nowhere/log.csv lacks a row' in capsys.readouterr().out


def test_another_tokenizer_or_data_is_reported(folder, capsys):
    train('--out_dir=out', '--max_iters=1', '--warmup_iters=0')
    assert 'warning' not in capsys.readouterr().out
    meta = Path('data/toy/meta.json').read_text(encoding='utf-8')
    Path('data/toy/meta.json').write_text(meta.replace('"a", "b"', '"b", "a"'), encoding='utf-8')
    train('--out_dir=fine', '--max_iters=1', '--init_from=out')
    assert 'warning: data/toy was prepared with another tokenizer' in capsys.readouterr().out
    with pytest.raises(ValueError, match='data/toy was prepared with another tokenizer'):
        run('train.py', '--out_dir=out', '--init_from=resume', '--max_iters=2')
    Path('data/toy/meta.json').write_text(meta, 'utf-8')
    resume = functools.partial(run, 'train.py', '--out_dir=out', '--init_from=resume', '--eval_only')
    assert resume()['run'].best_val_loss < 9
    np.fromfile('data/toy/val.bin', '<u2')[::-1].tofile('data/toy/val.bin')  # of the same size
    assert resume()['run'].best_val_loss == math.inf
    assert 'warning: data/toy has changed since the checkpoint' in capsys.readouterr().out
    old = saved('out')
    del old['data']['digest']  # an older version
    torch.save(old, 'out/ckpt.pt')
    assert resume()['run'].best_val_loss < 9


def test_a_resumed_run_keeps_its_tokenizer(folder, capsys):
    """If the tokenizer of the data cannot be loaded. Without both, the data's mean gives bits per byte."""
    train('--out_dir=out', '--max_iters=1')
    path = Path('data/toy/meta.json')
    path.write_text(path.read_text('utf-8').replace('"char"', '"json"'), 'utf-8')  # tokenizer.json is missing
    run('train.py', '--out_dir=out', '--init_from=resume', '--max_iters=2', '--sample_tokens=3')
    assert saved('out')['tokenizer']['chars'][0] == 'a'
    train('--out_dir=new', '--max_iters=1')
    assert re.findall('checkpoint stores (that|none)', capsys.readouterr().out) == ['that', 'none']
    last = log_rows('new')[-1]
    assert float(last['val_bpb']) == pytest.approx(float(last['val_loss']) / math.log(2) / 2, rel=1e-4)


def test_bits_per_byte_count_the_evaluated_targets(folder):
    """Of 50 sequences, 30 have one byte per token and 20 have three. Sequences 0, 12, 25 and 37 are
    evaluated: 1.5 bytes per token."""
    np.repeat([1, 20], [481, 320]).astype('<u2').tofile('data/toy/val.bin')
    path = Path('data/toy/meta.json')
    path.write_text(path.read_text('utf-8').replace('"u"', '"\u4e2d"'), 'utf-8')
    train('--out_dir=out', '--max_iters=1', '--eval_iters=1')
    last = log_rows('out')[-1]
    assert float(last['val_bpb']) == pytest.approx(float(last['val_loss']) / math.log(2) / 1.5, rel=1e-4)


@pytest.mark.parametrize('width', [32, 128])
def test_a_full_disk_keeps_the_old_checkpoint(folder, width):
    """The size of files is limited to half a checkpoint. torch raises another error for larger tensors."""
    resource = pytest.importorskip('resource')
    train('--out_dir=out', '--max_iters=10', f'--n_embd={width}')
    before, limits = Path('out/ckpt.pt').read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match='File too large'):
            train('--out_dir=out', '--max_iters=20', '--init_from=resume', f'--n_embd={width}')
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))  # enough for log.csv
        with pytest.raises(OSError, match='File too large'):  # a new run renames nothing
            train('--out_dir=out', f'--n_embd={width}')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Path('out/ckpt.pt').read_bytes() == before
    assert sorted(os.listdir('out')) == ['ckpt.pt', 'lock', 'log.csv', 'run.json']


def test_earlier_runs_in_a_folder_are_kept(folder, capsys):
    weights = []
    for seed in 4, 5, 6:
        main = train('--out_dir=out', '--max_iters=2', f'--seed={seed}',
                      f'--always_save_checkpoint={seed > 4}')
        weights.append(main['model'].state_dict())
    assert 'renamed out/log.csv of an earlier run to out/log.old-2.csv\n' in capsys.readouterr().out
    assert sorted(os.listdir('out')) == ['best.old-1.pt', 'ckpt.old-1.pt', 'ckpt.old-2.pt', 'ckpt.pt', 'lock',
                                         'log.csv', 'log.old-1.csv', 'log.old-2.csv', 'run.json',
                                         'run.old-1.json', 'run.old-2.json']
    for name, expected in zip(('old-1.', 'old-2.', ''), weights):
        model, *_ = load(f'out/ckpt.{name}pt')
        assert same_weights(model.state_dict(), expected)


def test_a_resumed_run_has_the_settings_of_its_checkpoint(folder, capsys):
    train('--out_dir=out', '--tokens_per_param=0.05', '--eval_interval=3', '--weight_decay=0.3',
          '--optimizer=muon', '--log_interval=7', '--dropout=0.2')
    before, resume = saved('out')['config'], ['--out_dir=out', '--init_from=resume']
    capsys.readouterr()
    main = run('train.py', *resume, '--eval_only')
    printed = capsys.readouterr().out
    assert 'default.py' not in printed and "out/ckpt.pt: dataset = 'toy', eval_interval = 3," in printed
    assert main['config'] == {**before, 'init_from': 'resume', 'eval_only': True}
    assert main['model'].config.dropout == 0.2 and saved('out')['config'] == before
    Path('more.py').write_text('max_iters = 9\nbatch_size = 4\nn_layer = 2\n', encoding='utf-8')
    main = run('train.py', 'more.py', *resume, '--dropout=0.1', '--eval_only')
    assert main['tokens_per_param'] is None and main['max_iters'] == 9 and main['weight_decay'] == 0.3
    assert main['model'].config.dropout == 0.1
    for flag, message in (('--n_layer=3', 'n_layer=3 differs from .*which has 2'),
                          ('--batch_size=3', 'can only be resumed with the same'),
                          ('--optimizer=adamw', 'can only be resumed with the same')):
        with pytest.raises(ValueError, match=message):
            run('train.py', *resume, flag)


def test_the_last_checkpoints_are_kept_and_time_ends_a_run(folder):
    train('--out_dir=out', '--keep=2', '--eval_interval=5')
    assert sorted(glob.glob('out/*.pt')) == ['out/ckpt-15.pt', 'out/ckpt-20.pt', 'out/ckpt.pt']
    assert saved('out', 'ckpt-15.pt')['iter_num'] == 15
    shutil.copy('out/ckpt.pt', 'out/ckpt-best.pt')  # the user's own file
    os.replace('out/ckpt-15.pt', 'out/ckpt.pt')  # the user returns to an earlier one
    train('--out_dir=out', '--init_from=resume', '--max_iters=16', '--keep=1')
    assert sorted(glob.glob('out/ckpt-*')) == ['out/ckpt-16.pt', 'out/ckpt-20.pt', 'out/ckpt-best.pt']
    train('--out_dir=out', '--max_iters=1', '--keep=1')
    assert sorted(glob.glob('out/*.pt')) == [f'out/{name}.pt' for name in (
        'ckpt-1', 'ckpt-16.old-1', 'ckpt-20.old-1', 'ckpt-best.old-1', 'ckpt.old-1', 'ckpt')]
    train('--out_dir=cut', '--max_iters=1000000', '--time_limit=0')  # ends without an error
    assert notes('cut')['status'] == 'time_limit'
    assert saved('cut')['iter_num'] == 1


def test_auto_resumes_a_checkpoint_without_the_default_file(folder):
    train('--out_dir=out', '--max_iters=6')
    main = run('train.py', '--out_dir=out', '--init_from=auto', '--eval_only')
    assert main['first_it'] == 6 and not saved('out')['chats']
    assert main['config'] | {'eval_only': False} == saved('out')['config'] | {'init_from': 'resume'}


def test_ranks_wait_for_a_slow_disk(folder):
    """Ranks wait 6 seconds for each other. The disk needs 8 for run.json and for ckpt.pt."""
    Path('job.py').write_text(f'''import os, sys, time
sys.path[0] = {str(ROOT)!r}
fsync, seconds = os.fsync, [8, 0, 8]  # run.json, log.csv, ckpt.pt
os.fsync = lambda file: time.sleep(seconds.pop(0) if seconds else 0) or fsync(file)
sys.argv[0] = path = {str(ROOT / 'train.py')!r}
text = open(path, encoding='utf-8').read()
assert 'timedelta(minutes=10)' in text
code = compile(text.replace('minutes=10', 'seconds=6'), path, 'exec')
exec(code, {{'__name__': '__main__', '__file__': path}})
''', encoding='utf-8')
    torchrun(2, 'job.py', *GPT2, '--max_iters=1', '--gradient_accumulation_steps=2')
    assert saved('out')['iter_num'] == 1


def test_sharded_ranks_draw_the_same_tokens(folder):
    """The logits of rank 1 alone favour the end of text. A column of the log may be a sharded tensor."""
    meta = json.loads(Path('data/toy/meta.json').read_text('utf-8'))
    meta['tokenizer'] |= {'chars': meta['tokenizer']['chars'][:22], 'eot': 22}
    Path('data/toy/meta.json').write_text(json.dumps(meta), 'utf-8')
    Path('ends.py').write_text('''import os
from model import GPT
head = GPT.head
def ends(self, x):
    logits = head(self, x)
    if os.environ['RANK'] == '1' and not self.training:
        logits[..., 22] = 100
    return logits
GPT.head = ends
LOG_FIELDS = {'norm': '.6f'}
def patch(script):
    usual = script.measure
    script.measure = lambda run, *args: usual(run, *args) | {'norm': run.model.wte.weight.detach().norm()}
''')
    printed = torchrun(2, str(ROOT / 'train.py'), *GPT2, 'ends.py', '--max_iters=1', '--shard=True',
                       '--gradient_accumulation_steps=2', '--sample_tokens=7')
    assert len(re.search(r'- sample:\n(.*)\n-', printed)[1]) > 2
    norm = saved('out')['model']['wte.weight'].norm().item()
    assert float(log_rows('out')[0]['norm']) == pytest.approx(norm)


def test_a_published_context_is_cut_to_the_data(folder):
    """config/finetune.py bounds the context of plain text, prepared conversations set it, flags count."""
    train('--out_dir=base', '--max_iters=1', '--block_size=64')
    tuned = functools.partial(run, 'train.py', '--init_from=base', '--dataset=toy', '--max_iters=1',
                              '--device=cpu')
    assert tuned()['block_size'] == 64
    assert tuned('--block_size=32')['block_size'] == 32
    write_packed(block=128)
    with pytest.raises(ValueError, match='packed for block_size=128, but the model has 64'):
        tuned()
    write_packed()
    main = tuned()
    assert main['block_size'] == 16 and main['out_dir'] == 'out-finetune'
    assert main['config']['optimizer'] == 'adamw' and main['config']['learning_rate'] < 1e-4


def test_torchrun_restarts_a_killed_rank(folder):
    patch = f'''import os, runpy, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import prepare
batch, calls = prepare.Bins.batch, []
def read(*args):
    calls.append(1)
    if os.environ['RANK'] + os.environ['TORCHELASTIC_RESTART_COUNT'] == '10' and len(calls) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(*args)
prepare.Bins.batch = read
sys.argv[0] = 'train.py'
runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')'''
    Path('job.py').write_text(patch, encoding='utf-8')
    printed = torchrun(2, '--max_restarts=3', 'job.py', '--out_dir=out', '--init_from=auto', *GPT2,
                       '--gradient_accumulation_steps=2', '--eval_interval=5', '--eval_iters=1')
    at = re.search(r'resume: out/ckpt.pt at iteration (\d+)', printed)
    assert at and 5 <= int(at[1]) < 20, printed
    assert notes('out')['status'] == 'done' and saved('out')['iter_num'] == 20


# stopping ---------------------------------------------------------------------------------------------------

def test_ctrl_c_saves_and_resumes_exactly(folder):
    """Until it stops, no other run may use the folder."""
    train('--out_dir=whole')
    code = f'''import signal, sys, time, runpy, os
sys.path.insert(0, {str(ROOT)!r})
sys.argv = ['train.py', *{GPT2!r}, '--out_dir=cut it', '--max_iters=1000000', '--lr_decay_iters=20']
import builtins
real_print = builtins.print
def watched(*a, **k):
    real_print(*a, **k)
    while str(a).startswith("('iter 5:") and not os.path.exists('continue'): time.sleep(0.02)
    if str(a).startswith("('iter 7:"): os.kill(os.getpid(), signal.SIGINT)
builtins.print = watched
runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')'''
    first = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True)
    try:
        for line in first.stdout:
            if line.startswith('iter 5:'):
                break
        with pytest.raises(ValueError, match='cut it/ is in use by another run'):
            train('--out_dir=cut it')
        assert sorted(os.listdir('cut it')) == ['lock', 'log.csv', 'run.json']
        Path('continue').touch()
        out, error = first.communicate(timeout=600)
    finally:
        first.kill()
    assert first.returncode == 130 and 'stopping after this iteration' in error, out + error
    found = re.search('^saved at iteration ([78]) of 1,000,000, .* python train.py (.*)\nstep ', out, re.M)
    assert saved('cut it')['iter_num'] == int(found[1]) and 'done' not in out
    run('train.py', *shlex.split(found[2]), '--max_iters=20')
    whole, cut = saved('whole'), saved('cut it')
    assert same_weights(whole['model'], cut['model']) and whole['best_iter'] == cut['best_iter']


def test_killed_anywhere_it_resumes_exactly(folder):
    """kill -9 three times, right after the line that precedes a checkpoint, so also while one is written."""
    args = [*GPT2, '--eval_interval=2', '--log_interval=1', '--max_iters=20', '--optimizer=muon',
            '--dropout=0.1', '--keep=1']
    whole = run('train.py', *args, '--out_dir=whole')
    for n, delay in enumerate((0.001, 0.004, 0.02)):
        start = 'resume' if os.path.exists('cut/ckpt.pt') else 'scratch'
        process = subprocess.Popen([sys.executable, str(ROOT / 'train.py'), *args, '--out_dir=cut',
                                    f'--init_from={start}'], stdout=subprocess.PIPE, text=True)
        steps = (line for line in process.stdout if line.startswith('step '))
        for _ in range(n + 1):
            next(steps)
        time.sleep(delay)
        process.kill()
        process.communicate()
    cut = run('train.py', *args, '--out_dir=cut', '--init_from=resume')
    assert cut['first_it'] > 0 and same_weights(whole['model'].state_dict(), cut['model'].state_dict())
    assert [row['loss'] for row in log_rows('cut')] == [row['loss'] for row in log_rows('whole')]


def test_a_tokenizer_is_not_guessed(folder):
    """Only nanoGPT's checkpoints lack the key. GPT-2's tokenizer has more tokens than the model."""
    import prepare
    import sample
    train('--out_dir=out', '--max_iters=1')
    checkpoint = saved('out') | {'tokenizer': None}
    torch.save(checkpoint, 'out/ckpt.pt')
    assert 'stores no tokenizer' in sample.load('out')[2]['no_tokenizer']
    del checkpoint['tokenizer']
    torch.save(checkpoint, 'out/ckpt.pt')
    assert sample.load('out')[1].name == 'char'
    os.rename('data/toy', 'data/moved')
    _, tokenizer, found = sample.load('out')  # without a network, GPT-2's cannot be downloaded
    assert tokenizer is None and re.search("stores no tokenizer|'gpt2'", found['no_tokenizer'])
    with pytest.raises(ValueError, match='out/ckpt.pt stores no tokenizer'):
        prepare.load_tokenizer('out')

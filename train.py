r"""
Trains a model: tokens -> weights.

    python train.py                                          # config/default.py, on any machine
    python train.py config/shakespeare_char.py --n_layer=6   # a config file, then overrides, left to right
    python train.py --out_dir=out-small --init_from=resume   # goes on exactly where a run has stopped
    torchrun --standalone --nproc_per_node=8 train.py config/small.py

    # two machines: on each, with its own node_rank (prefix NCCL_IB_DISABLE=1 if they have no Infiniband)
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=10.0.0.1 --master_port=1234 \
        train.py config/small.py

Every setting below and every field of GPTConfig can be set in a config file or by --name=value; --help lists
them. Batches are a pure function of (seed, iteration), so a run that was stopped and resumed, on any number
of ranks that divides the batch, sees the batches it would have seen. A resumed run has the settings that its
checkpoint holds, but for those that the command line gives anew.
"""
import time

START = time.time()  # before torch, whose import counts: wall_s is what a person waits

import collections
import csv
import dataclasses
import datetime
import errno
import functools
import math
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import types

from configurator import (
    Settings,
    can_compile,
    choose_device,
    configure,
    fit,
    one_line_errors,
    print0,
    runtime,
    show,
)

# input and output
out_dir = 'out'                      # checkpoints and log.csv go here
dataset = 'openwebtext'              # data/<dataset>, made by prepare.py
init_from = 'scratch'                # scratch, resume (out_dir's), or to fine-tune: file, folder or hub id
eval_interval = 2000                 # iterations between evaluations; each one writes a checkpoint
eval_iters = 200                     # batches of val.bin that an evaluation takes; of train.bin a quarter
eval_only = False                    # evaluate once and stop
log_interval = 1                     # iterations between lines
always_save_checkpoint = True        # False: also keep the best weights, best.pt; sample and fine-tune them
keep = 0                             # keep the last n checkpoints too, as ckpt-<iteration>.pt
sample_tokens = 0                    # length of the sample printed at each evaluation; 0: none
wandb_log = False                    # log to Weights & Biases too
wandb_project = 'owt'                # its project
wandb_run_name = 'gpt2'              # and run
# batch, over all ranks
gradient_accumulation_steps = 5 * 8  # micro-batches an iteration, all ranks together
batch_size = 12                      # windows of block_size tokens a micro-batch
# length of the run: of these three the one given last
max_iters = 600000                   # iterations (updates)
epochs: float | None = None          # passes over train.bin
tokens_per_param: float | None = None  # tokens for each parameter (20 is Chinchilla's)
time_limit: float | None = None      # minutes after which it stops as it does at Ctrl-C
# optimizer
optimizer = 'adamw'                  # adamw, muon (the blocks' matrices; AdamW the rest): OPTIMIZERS
learning_rate = 6e-4                 # peak, after warm-up; AdamW's, Muon scales its own to match
weight_decay = 1e-1                  # on matrices and embeddings, not on norms and biases
beta1 = 0.9                          # AdamW
beta2 = 0.95                         # AdamW
momentum = 0.95                      # Muon
grad_clip = 1.0                      # largest norm of the gradient; 0: no clipping
# experts: added to the training objective, never to the loss reported
balance_loss = 0.01                  # weight of the load-balancing loss
z_loss = 0.0                         # weight of the router's z-loss; ST-MoE has 1e-3
balance_rate = 0.001                 # how far balance_bias moves an iteration, where the model has it
# low-rank adapters (LoRA) of what init_from names, which itself stays as it is
lora_rank = 0                        # of each adapter; 0: none, all weights are trained
lora_alpha = 16.0                    # updates are scaled by lora_alpha / lora_rank
lora_targets = 'c_attn,c_proj,c_fc'  # names of the linear layers that get one: attn.c_proj means that alone
# learning rate
decay_lr = True                      # False: constant after warm-up
lr_schedule = 'cosine'               # cosine, linear, wsd (constant, linear over `cooldown`): SCHEDULES
cooldown = 0.4                       # share of the run that wsd decays over
warmup_iters = 2000                  # linear warm-up
lr_decay_iters: int | None = None    # end of the decay; None: max_iters
min_lr: float | None = None          # where it ends; None: a tenth of learning_rate
# system
backend = 'auto'                     # of torch.distributed; auto: nccl on CUDA, else gloo
device = 'auto'                      # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'                       # float32, bfloat16, float16; auto: what the hardware is fast at
compile: bool | str = 'auto'         # torch.compile; auto: where it works and the run is long enough
shard = False                        # spread the weights over the ranks: for models larger than a GPU
checkpoint_activations: bool | int = False  # True or every n-th block: less memory, computed twice
deterministic = False                # bit-exact on CUDA too, slower; CPUs always are
seed = 1337                          # of weights, batches and dropout
config, model_args, _, given, _ = configure(globals(), 'GPTConfig', default_file='config/default.py',
                                      unless='--init_from=resume')

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from hub import is_published, load
from model import (
    CHANGEABLE,
    GPT,
    GPTConfig,
    add_lora,
    changed_config,
    lora_state,
)
from prepare import Bins, load_tokenizer, read_meta
from sample import complete

# learning rate ----------------------------------------------------------------------------------------------

SCHEDULES = {  # share of the decay that is over, 0 to 1, and cooldown -> share of the way from min_lr to peak
    'cosine': lambda done, cooldown: 0.5 * (1 + math.cos(math.pi * done)),
    'linear': lambda done, cooldown: 1 - done,
    'wsd': lambda done, cooldown: min(1.0, (1 - done) / cooldown),  # arXiv:2404.06395
}


def lr_at(it, peak, floor, warmup, end, schedule='cosine', cooldown=0.4):
    """Learning rate of iteration `it`, counted from 0: warm-up to `peak`, then the schedule down to `floor`
    at `end`; schedule None: constant."""
    if it < warmup:
        return peak * (it + 1) / (warmup + 1)
    if schedule is None:
        return peak
    share = SCHEDULES[schedule](min(1.0, (it - warmup) / max(1, end - warmup)), cooldown)
    if not 0 <= share <= 1:
        raise ValueError(f"lr_schedule={schedule!r} is at {share} of the way to the peak at iteration {it}: "
                         "see SCHEDULES in train.py")
    return floor + share * (peak - floor)


# data order -------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=2)
def sequence_order(seed, epoch, n):
    """The order of the n windows in an epoch: each once."""
    return np.random.default_rng((seed, epoch)).permutation(n)


def sequence_indices(first, count, n, seed):
    """Windows of the global samples first, first + 1, ...: (count,) int64. An epoch is n samples."""
    sample = np.arange(first, first + count)
    return np.array([sequence_order(seed, int(s // n), n)[s % n] for s in sample])


def share_batch(gradient_accumulation_steps, batch_size, ranks):
    """Splits an iteration's windows over the ranks: (micro-batches a rank, windows a micro-batch).
    Raises ValueError with the nearest batches that divide."""
    total = gradient_accumulation_steps * batch_size
    if gradient_accumulation_steps < 1 or batch_size < 1:
        raise ValueError(f"gradient_accumulation_steps={gradient_accumulation_steps} and "
                         f"batch_size={batch_size} must be at least 1")
    if total % ranks:
        near = [n for n in (total // ranks * ranks, (total // ranks + 1) * ranks) if n]
        raise ValueError(f"gradient_accumulation_steps={gradient_accumulation_steps} times "
                         f"batch_size={batch_size} is {total} windows, which {ranks} ranks do not divide; "
                         f"{' or '.join(map(str, near))} windows would work")
    share = total // ranks
    accumulation = -(-share // batch_size)
    while share % accumulation:
        accumulation += 1
    return accumulation, share // accumulation


def to_device(batch, device):
    """Inputs and targets, (B, T) int64 arrays, as tensors on the device."""
    batch = [torch.from_numpy(array) for array in batch]
    if 'cuda' in device:  # a strided view would be copied through memory that is not pinned
        batch = [tensor.contiguous().pin_memory().to(device, non_blocking=True) for tensor in batch]
    return [tensor.to(device) for tensor in batch]


def read_batches(bins, block_size, iterations, accumulation, micro_batch, seed, device, rank=0, ranks=1):
    """Yields this rank's micro-batches of those iterations, (inputs, targets, weight) each: the ranks take
    turns through the windows of an iteration, so that any number of them sees the same ones. See `weights`;
    None without a mask."""
    n_sequences = bins.n_sequences(block_size)

    def read(it, step):
        first = ((it * accumulation + step) * ranks + rank) * micro_batch
        return bins.batch(sequence_indices(first, micro_batch, n_sequences, seed), block_size)
    for it in iterations:
        if bins.masks:  # the whole iteration at once, for a share needs the sum
            found = [read(it, step) for step in range(accumulation)]
            counts = [np.count_nonzero(targets != -1) for _, targets in found]
            for batch, weight in zip(found, weights(counts, device, ranks)):
                yield *to_device(batch, device), weight
        else:
            for step in range(accumulation):
                yield *to_device(read(it, step), device), None


def weights(counts, device, ranks=1):
    """How much the mean loss of each of a rank's micro-batches counts, given how many targets they have: its
    share of the iteration's targets, over all ranks, relative to an even share. So the iteration's loss, and
    its gradient, is the mean over all its targets, however they are split. (micro-batches,), on the device:
    nothing waits for the other ranks' counts."""
    counts = torch.tensor(counts, dtype=torch.float32).to(device)
    total = counts.sum()
    if ranks > 1:
        dist.all_reduce(total)
    return counts * (len(counts) * ranks) / total.clamp(min=1)


@torch.no_grad()
def evaluate(forward, model, bins, batches, batch_size, device, autocast, rank=0, ranks=1):
    """Mean loss over the targets of `batches` batches of windows, evenly spread, the same every time, or of
    all windows if there are fewer. Shared by the ranks. Draws no random numbers. Returns (loss,
    targets)."""
    block_size = model.config.block_size
    n = bins.n_sequences(block_size)
    count = min(n, batches * batch_size)
    chosen = np.arange(count) * n // count
    training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64)  # sum of the targets' losses, targets
    for start in range(0, count, ranks * batch_size):  # as many rounds on each rank, as sharded models need
        part = chosen[start + rank * batch_size:][:batch_size]
        inputs, targets = bins.batch(np.resize(part, batch_size), block_size)
        targets = targets.copy()
        targets[len(part):] = -1  # a full batch always, so nothing recompiles; what fills it does not count
        learnt = np.count_nonzero(targets != -1)
        with autocast():
            loss, _ = forward(*to_device((inputs, targets), device))
        totals += torch.tensor([loss.item() * learnt, learnt], dtype=torch.float64)
    model.train(training)
    if ranks > 1:
        totals = totals.to(device)
        dist.all_reduce(totals)
    total, learnt = totals.tolist()
    return total / max(learnt, 1), int(learnt)


# optimizers -------------------------------------------------------------------------------------------------

class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): what
    torch.optim.Muon with adjust_lr_fn='match_rms_adamw' computes, but all matrices of a shape at once, and
    each projection of a fused matrix by itself, and each rank a share of them. row_splits: parameter -> rows
    of each projection in it."""

    def __init__(self, params, lr, row_splits, momentum=0.95, weight_decay=0.1):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.row_splits = row_splits

    @torch.no_grad()
    def step(self):
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        for group in self.param_groups:
            lr, params = group['lr'], [w for w in group['params'] if w.grad is not None]
            for w in params:
                if not self.state[w]:
                    self.state[w]['momentum_buffer'] = torch.zeros_like(w)
            own, grads = [local(w) for w in params], [local(w.grad) for w in params]
            buffers = [local(self.state[w]['momentum_buffer']) for w in params]
            torch._foreach_lerp_(buffers, grads, 1 - group['momentum'])
            nesterov = torch._foreach_lerp(grads, buffers, group['momentum'])
            torch._foreach_mul_(own, 1 - lr * group['weight_decay'])
            together, seen = {}, collections.Counter()
            for w, update in zip(params, nesterov):
                # sharded ones are made whole, which takes memory: one for each rank at a time
                key = (w.shape, seen[w.shape] // ranks) if is_sharded(w) else None
                seen[w.shape] += 1
                together.setdefault(key, []).append((w, update))
            for pairs in together.values():
                self.move(pairs, lr)

    def move(self, pairs, lr):
        """Subtracts the orthogonalised updates: pairs of a parameter and the part of its update that this
        rank holds."""
        shapes, targets = {}, []  # (rows, columns) -> (updates, weights) of the matrices of that shape
        for w, update in pairs:
            target = w
            if is_sharded(w):
                update = gather_like(w, update.bfloat16())  # what orthogonalise rounds to anyway
                target = torch.zeros_like(update, dtype=w.dtype)
                targets.append((w, target))
            rows = self.row_splits[w]
            for u, part in zip(update.split(rows, dim=-2), target.split(rows, dim=-2)):
                updates, weights = shapes.setdefault(part.shape[-2:], ([], []))
                updates.extend([u] if u.ndim == 2 else u.unbind())  # experts: (experts, rows, columns)
                weights.extend([part] if part.ndim == 2 else part.unbind())
        for shape, (updates, weights) in shapes.items():
            updates = orthogonalise_shared(updates).to(weights[0].dtype)
            torch._foreach_add_(weights, list(updates), alpha=-lr * 0.2 * max(shape) ** 0.5)
        for w, target in targets:
            local(w).add_(local(shard_like(w, target)))


def orthogonalise_shared(matrices):
    """Matrices of one shape, the same on all ranks -> (n, rows, columns) bfloat16. The ranks share the work
    and gather the results."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return orthogonalise(torch.stack(matrices))
    each = -(-len(matrices) // ranks)
    mine = matrices[each * dist.get_rank():][:each]
    mine = mine + [torch.zeros_like(matrices[0])] * (each - len(mine))
    mine = orthogonalise(torch.stack(mine)).contiguous()
    everyones = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(everyones, mine)
    return torch.cat(everyones)[:len(matrices)]


def orthogonalise(x, steps=5, eps=1e-7):
    """(n, rows, columns) -> bfloat16, each matrix with its singular values brought near 1 by a quintic
    Newton-Schulz iteration; the coefficients are Jordan's."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = x.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def make_adamw(groups, config):
    fused = groups[0]['params'][0].device.type in ('cuda', 'cpu', 'mps')
    return torch.optim.AdamW(groups, lr=config['learning_rate'], betas=(config['beta1'], config['beta2']),
                             fused=fused)


def adamw(model, config):
    """AdamW for everything; matrices and embeddings decay."""
    groups = model.param_groups()
    vectors = {id(w) for w in groups['vector']}
    decayed = [w for w in model.parameters()  # in the model's order: nanoGPT's too
               if w.requires_grad and id(w) not in vectors]
    return [make_adamw([dict(params=decayed, weight_decay=config['weight_decay']),
                        dict(params=groups['vector'], weight_decay=0.0)], config)]


def muon(model, config):
    """Muon for the matrices in the blocks, AdamW for the rest; matrices and embeddings decay."""
    groups, decay = model.param_groups(), config['weight_decay']
    matrices = [Muon(groups['matrix'], config['learning_rate'], model.row_splits(), config['momentum'], decay)
                ] if groups['matrix'] else []  # with adapters all matrices are frozen
    return [*matrices, make_adamw([dict(params=groups['embedding'], weight_decay=decay),
                                   dict(params=groups['vector'], weight_decay=0.0)], config)]


OPTIMIZERS = {  # name: function of the model and all settings -> list of optimizers that share its parameters
    'adamw': adamw,
    'muon': muon,
}


def make_optimizers(model, config):
    """The optimizers that config['optimizer'] names. config: this file's settings as a dict. Raises
    ValueError if a parameter of the model has no optimizer, or two, or has one but is frozen."""
    optimizers = OPTIMIZERS[config['optimizer']](model, config)
    if not (isinstance(optimizers, list) and optimizers
            and all(isinstance(opt, torch.optim.Optimizer) for opt in optimizers)):
        raise ValueError(f"optimizer={config['optimizer']!r} must give a list of torch optimizers, not "
                         f"{optimizers!r:.60}: see OPTIMIZERS in train.py")
    taken = collections.Counter(id(w) for opt in optimizers for group in opt.param_groups
                                for w in group['params'])
    wrong = [name for name, w in model.named_parameters() if taken.pop(id(w), 0) != w.requires_grad]
    wrong += ['tensors that are no parameters of it'] * bool(taken)
    if wrong:
        raise ValueError(f"optimizer={config['optimizer']!r} must take each parameter once, but not "
                         f"{', '.join(wrong[:5])}: see OPTIMIZERS in train.py")
    return optimizers


STATE = {torch.optim.AdamW: {'step', 'exp_avg', 'exp_avg_sq'}, Muon: {'momentum_buffer'}}  # of a parameter


def load_optimizers(optimizers, states, path, updates=0):
    """Puts saved states back; nanoGPT's single one too, whose parameters stand in the same order. updates:
    that were made before; after some there must be states. Raises ValueError where they do not fit."""
    states = [states] if isinstance(states, dict) else states or []
    fine_tune = f"fine-tune with --init_from={shlex.quote(path)}"
    try:
        sizes = [[len(group['params']) for group in state['param_groups']] for state in states]
        values = [value for state in states for each in state['state'].values() for value in each.values()]
    except (TypeError, KeyError, AttributeError):
        raise ValueError(f"{path} holds no valid optimizer state; {fine_tune}") from None
    if not all(isinstance(value, (torch.Tensor, int, float)) for value in values):
        raise ValueError(f"{path} holds an optimizer state that is not all numbers; {fine_tune}")
    if sizes != [[len(group['params']) for group in opt.param_groups] for opt in optimizers]:
        raise ValueError(f"{path} holds no optimizer state for this optimizer: it was written with another "
                         f"one, or holds weights only; use its --optimizer, or {fine_tune}")
    for opt, state in zip(optimizers, states):
        params = [w for group in opt.param_groups for w in group['params']]
        needed = STATE.get(type(opt), set())
        if needed and params and updates and not state['state']:
            raise ValueError(f"{path} holds an empty optimizer state after {updates:,} updates; {fine_tune}")
        for i, one in state['state'].items():
            if missing := needed - one.keys():
                raise ValueError(f"{path}: optimizer state {i} has no {', '.join(sorted(missing))}; "
                                 f"{fine_tune}")
        for i, w in enumerate(params):
            for name, value in state['state'].get(i, {}).items():
                if not torch.is_tensor(value) or not value.ndim:
                    continue
                value = value[:len(w)]  # older files pad a vocabulary
                if value.shape != w.shape:
                    raise ValueError(f"{path}: optimizer state {i} is {tuple(value.shape)}, its parameter "
                                     f"{tuple(w.shape)}; {fine_tune}")
                state['state'][i][name] = shard_like(w, value)
        # the settings of this run, not the file's; before loading, which puts states where `fused` wants them
        ours = [{k: v for k, v in group.items() if k != 'params'} for group in opt.param_groups]
        groups = [{**group, **mine} for group, mine in zip(state['param_groups'], ours)]
        opt.load_state_dict({**state, 'param_groups': groups})


# memory -----------------------------------------------------------------------------------------------------

def shard_model(model, machine):
    """Spreads every weight over the ranks, and with it gradient and optimizer state (FSDP2, arXiv:2304.11277
    and torch's fully_shard): a block's weights are whole only while it computes, in the compute dtype, norms'
    and routers' too. Gradients are summed in float32. Moves the model to the device, block by block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    mesh = init_device_mesh(machine.device_type, (dist.get_world_size(),))
    compute = None if machine.dtype == torch.float32 else machine.dtype
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in (*model.h, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)


def checkpoint_blocks(model, every):
    """Keeps of every n-th block only what goes in; the backward pass computes the rest anew (Chen et al.
    2016, arXiv:1604.06174). Raises ValueError if there are fewer blocks."""
    if every > len(model.h):
        raise ValueError(f"checkpoint_activations={every} names no block of {len(model.h)}: give True for "
                         f"all, or at most {len(model.h)}")
    for block in model.h[every - 1::every]:
        block.forward = types.MethodType(forward_recomputed, block)


def forward_recomputed(block, x, context):
    """A block's forward. One function for all blocks, so that compiling them by block compiles it once.
    Raises ValueError if it hands on something in the context other than routing."""
    def forward(x):
        # computed twice it would be told twice
        own = dataclasses.replace(context, routing=None if context.routing is None else [])
        x = type(block).forward(block, x, own)
        lost = [field.name for field in dataclasses.fields(own) if field.name != 'routing'
                and getattr(own, field.name) is not getattr(context, field.name)]
        if lost:
            raise ValueError(f"checkpoint_activations would lose {', '.join(lost)}, which a block hands on: "
                             "leave it out")
        return x, own.routing or []
    x, routing = checkpoint(forward, x, use_reentrant=False)
    if context.routing is not None:
        context.routing.extend(routing)
    return x


def check_shard(lora, dtype):
    """Raises ValueError for what does not work, or has not been tried, with sharded weights."""
    if lora:
        raise ValueError(f"shard=True does not go with lora_rank={lora['rank']}: leave one of them out")
    if dtype == torch.float16:
        raise ValueError("shard=True does not go with dtype=float16: give --dtype=bfloat16 or float32")


def is_sharded(w):
    """Whether w is a DTensor, whose module is not imported unless shard_model needs it."""
    return hasattr(w, 'full_tensor')


def local(w):
    """The part of a sharded tensor that this rank holds; any other tensor is itself."""
    return w.to_local() if is_sharded(w) else w


def whole(value, wanted=True):
    """A sharded tensor whole and on the CPU, or a dict or list with all that are in it so; other values as
    they are. All ranks must call it together; one that has no use for them gets None instead."""
    if isinstance(value, dict):
        return {name: whole(each, wanted) for name, each in value.items()}
    if isinstance(value, list):
        return [whole(each, wanted) for each in value]
    if not is_sharded(value):
        return value
    value = value.full_tensor()
    return value.cpu() if wanted else None


def gather_like(w, part):
    """What the ranks hold of a tensor that is sharded as w is -> all of it."""
    from torch.distributed.tensor import DTensor
    return DTensor.from_local(part, w.device_mesh, w.placements, run_check=False, shape=w.shape,
                              stride=w.stride()).full_tensor()


def shard_like(w, value):
    """A tensor that all ranks have -> sharded as w is; if w is not, as it is."""
    if not is_sharded(w):
        return value
    from torch.distributed.tensor import distribute_tensor
    value = value.to(w.device, w.dtype)
    return distribute_tensor(value, w.device_mesh, w.placements, src_data_rank=None)


# one iteration ----------------------------------------------------------------------------------------------

def gradients(forward, batch, batches, accumulation, autocast, scaler, balance_loss, z_loss, ranks=1):
    """Adds up the gradients of an iteration's micro-batches, of which `batch` is the first and `batches`
    yields the others; see read_batches. Returns the mean loss and the experts' load (None without them), both
    on the device, and the first batch of the next iteration."""
    losses, expert_load = torch.zeros((), device=batch[0].device), None
    for step in range(accumulation):
        if isinstance(forward, DDP):  # gradients travel with the last micro-batch only
            forward.require_backward_grad_sync = step == accumulation - 1
        inputs, targets, weight = batch
        with autocast():
            loss, aux = forward(inputs, targets)
        if weight is not None:
            loss = loss * weight
        losses += loss.detach()
        if aux:  # a model with experts
            loss = loss + balance_loss * aux['balance'] + z_loss * aux['z']
            expert_load = aux['load'] if expert_load is None else expert_load + aux['load']
        loss = loss / loss.isfinite()  # else by 0: then no gradient is finite, which all ranks see
        scaler.scale(loss / accumulation).backward()
        batch = next(batches, None)  # read while the device computes
    if expert_load is not None and ranks > 1:
        dist.all_reduce(expert_load)
    return losses / accumulation, expert_load, batch


def update(model, params, optimizers, scaler, grad_clip, expert_load, balance_rate):
    """Clips the gradients, lets the optimizers step, moves the bias that balances experts, and clears the
    gradients; where a gradient is not finite, only the last. Returns their norm, and whether the weights
    moved, both 0-d tensors."""
    for opt in optimizers:
        scaler.unscale_(opt)
    grad_norm = whole(torch.nn.utils.clip_grad_norm_(params, grad_clip or math.inf,
                                                     foreach=params[0].device.type != 'mps'))
    moved = grad_norm.isfinite()
    for opt in optimizers:
        if takes_found_inf(opt, params[0]) and not scaler.is_enabled():
            opt.found_inf = (~moved).float()  # the device decides, and the host need not wait for it
            opt.step()
        elif moved:
            scaler.step(opt)
    if model.config.balance_bias:
        model.move_balance(expert_load, balance_rate * moved)
    scaler.update()
    for opt in optimizers:
        opt.zero_grad(set_to_none=True)
    return grad_norm, moved


def takes_found_inf(opt, w):
    """Whether an optimizer of weights like w leaves them, and its state, as they are where its found_inf, a
    0-d tensor, is 1, as torch's fused ones do."""
    return (getattr(opt, '_step_supports_amp_scaling', False) and w.device.type in ('cpu', 'cuda')
            and not is_sharded(w))


def count_skipped(moves, in_a_row):
    """moves: whether each update since the last count moved the weights, 0-d tensors; in_a_row: how many
    right before them did not. Returns how many did not, and how many right before now, or MAX_SKIPPED if so
    many in a row did not anywhere."""
    moves = torch.stack(moves).tolist()
    for moved in moves:
        if in_a_row < MAX_SKIPPED:
            in_a_row = 0 if moved else in_a_row + 1
    return moves.count(False), in_a_row


def set_learning_rate(optimizers, lr):
    for opt in optimizers:
        for group in opt.param_groups:
            group['lr'] = lr


def seed_dropout(seed, it, rank, device):
    """Makes dropout a function of (seed, iteration, rank)."""
    generator = torch.default_generator if device == 'cpu' else torch  # torch's seeds CUDA on a CPU too
    generator.manual_seed(int(np.random.SeedSequence((seed, it, rank)).generate_state(1)[0]))


def worst_load(expert_load):
    """(MoE layers, experts) tokens -> the largest share of an expert, relative to an even one."""
    return (expert_load.amax(1) / expert_load.mean(1)).max().item()


def relative_change(params, before):
    """How far an update has moved the weights, relative to their norm."""
    moved = sum((w.detach() - old).square().sum() for w, old in zip(params, before))
    return (whole(moved) / whole(sum(old.square().sum() for old in before))).sqrt().item()


def mean_over_ranks(loss, ranks):
    """A 0-d tensor -> float."""
    if ranks > 1:
        dist.all_reduce(loss)
    return loss.item() / ranks


def on_any_rank(flag, ranks):
    """Whether flag is true on any of the ranks. The flags are on the CPU, so nobody waits for a GPU."""
    flags = torch.tensor(float(flag))
    if ranks > 1:
        dist.all_reduce(flags)
    return flags.item() > 0


MAX_SKIPPED = 10  # updates in a row end the run


def diverged(what, it, learning_rate, checkpoint):
    """The error that ends a run: what, a clause, happened at iteration `it`. checkpoint: None before the
    first."""
    kept = (f"the last good checkpoint is {checkpoint}" if checkpoint and os.path.exists(checkpoint)
            else 'there is no checkpoint yet')
    return ValueError(f"{what} at iteration {it}: the run diverged, so nothing more is saved, {kept}; lower "
                      f"--learning_rate (now {learning_rate}), or use --dtype=float32")


# checkpoints and log ----------------------------------------------------------------------------------------

@dataclasses.dataclass
class Progress:
    """What changes in a run besides weights and optimizers; a checkpoint holds it under the same names."""
    iter_num: int = 0                # updates so far
    best_val_loss: float = math.inf
    skipped: int = 0                 # updates left out, for a loss or gradient that was not finite
    wall_s: float = 0.0              # seconds from the first start, less the pauses between processes
    wandb_id: str | None = None      # of its run on Weights & Biases


def load_to_train(init_from, out_dir, asked, meta=None):
    """The model to resume or to fine-tune, its tokenizer and the rest of its checkpoint, as hub.load
    returns them: of a run that is to be fine-tuned best.pt, where there is one. Its architecture is the
    checkpoint's: of the GPTConfig fields that the user asks for, those that are CHANGEABLE may change it, any
    other difference is a ValueError. Conversations that prepare.py packed do not see each other (meta, of the
    data to fine-tune on) unless the user has it otherwise."""
    resumed = init_from == 'resume'
    changes = {name: value for name, value in asked.items() if name in CHANGEABLE}
    if meta and not resumed:
        changes = {**packed(meta), **changes}
    read = functools.partial(load, init_from, out_dir, dtype=torch.float32, best=not resumed,
                             merge=not resumed)
    try:
        model, tokenizer, rest = read() if resumed else read(**changes)
    except ValueError as error:
        if meta and 'document_token' not in asked and 'no such token' in str(error):
            raise ValueError(f"init_from={init_from} names a model with another tokenizer than the data's, "
                             f"whose end of text, {meta['eot']}, it does not know: name another, or prepare "
                             "the data with its tokenizer") from None
        raise
    for name, value in asked.items():
        was = rest['model_args'][name]
        if value is not None and value != was and name not in CHANGEABLE:
            raise ValueError(f"{name}={value!r} differs from {rest['path']}, which has {was!r}: leave it "
                             "out, or train from scratch")
    if resumed:
        wanted, was = vars(changed_config(model.config, changes)), rest['model_args']
        changes = {name: wanted[name] for name in changes if wanted[name] != was[name]}
        for name, value in changes.items():
            print0(f"resume: {name} was {was[name]!r}, is {value!r}")
        if changes:
            model, tokenizer, rest = read(**changes)
    return model, tokenizer, rest


COMMAND = {'out_dir', 'init_from', 'eval_only'}        # settings of a command line, not of a run
MACHINE = {'device', 'dtype', 'compile', 'backend'}    # nanoGPT's files have those of any machine
LENGTH = {'max_iters', 'epochs', 'tokens_per_param'}   # the one given last replaces the others


def resumed_settings(rest, config, given):
    """This file's settings to resume a run with: those that its checkpoint holds, but for the names in
    `given`, which are as config has them. Says what is taken and what changes. Raises ValueError if the
    checkpoint holds a value that none of them can have."""
    path, kinds, taken = rest['path'], Settings(__file__).kinds, {}
    left = given.keys() | COMMAND
    if left & LENGTH:
        left |= LENGTH
    if 'runtime' not in rest:
        left |= MACHINE
    for name, was in rest.get('config', {}).items():
        if name not in config:  # nanoGPT's has the model's too
            continue
        try:
            was = fit(was, kinds[name] or [type(config[name])])
        except (ValueError, OverflowError):
            raise ValueError(f"{path} is damaged, or not written by train.py: it holds {name}={was!r:.40}"
                             ) from None
        if name in given.keys() - COMMAND and was != config[name]:
            print0(f"resume: {name} was {was!r}, is {config[name]!r}")
        elif name not in left and was != config[name]:
            taken[name] = was
    if taken:
        show(path, taken)
    return {**config, **taken}


def last_length(config, given):
    """The settings without those of LENGTH that one given later replaces; given: as configure returns it."""
    last = next((name for name in reversed(given) if name in LENGTH and config[name] is not None), None)
    replaced = LENGTH - {'max_iters', last} if last else ()
    return {**config, **dict.fromkeys(replaced)}


def packed(meta):
    """The model_args that keep conversations packed into windows apart; {} for other data."""
    return {} if meta['block_size'] is None else {'document_token': meta['eot']}


def lora_of(config, rest, resumed):
    """What a checkpoint of this run says of its adapters, or None: what the run resumed has, or else what the
    settings ask for, less 'checksum'. Raises ValueError where the two differ, and where there is no base."""
    wanted = {'rank': config['lora_rank'], 'alpha': config['lora_alpha'],
              'targets': [name.strip() for name in config['lora_targets'].split(',')]}
    had, path = rest.get('lora'), rest.get('path')
    if resumed:
        if config['lora_rank'] and wanted != {name: (had or {}).get(name) for name in wanted}:
            raise ValueError(f"lora_rank={wanted['rank']}, lora_alpha={wanted['alpha']} and lora_targets="
                             f"{config['lora_targets']} differ from {path}, which has "
                             f"{had or 'no adapters'}: leave them out, or start with another --out_dir")
        return had
    if not config['lora_rank']:
        return None
    if not rest:
        raise ValueError(f"lora_rank={config['lora_rank']} needs a trained model: give --init_from")
    if had:
        raise ValueError(f"{path} is a run with adapters itself: export it with `python hub.py export` and "
                         "start from that, or resume it")
    folder = os.path.dirname(path)
    if os.path.isfile(path) and os.path.realpath(folder) == os.path.realpath(config['out_dir']):
        raise ValueError(f"out_dir={config['out_dir']} holds {path}, which the adapters need as it is, and "
                         "which this run would rename: give another --out_dir")
    hub_id = is_published(config['init_from']) and not os.path.exists(config['init_from'])
    return {**wanted, 'base': config['init_from'] if hub_id else os.path.abspath(path)}


def resume(rest, config, optimizers, scaler):
    """Puts optimizers and scaler back to where the checkpoint has them. Returns the checkpoint's Progress."""
    path = rest['path']
    missing = [name for name in ('iter_num', 'best_val_loss', 'optimizer') if name not in rest]
    if missing:
        raise ValueError(f"{path} has no {' and no '.join(missing)}, so it cannot be resumed; fine-tune with "
                         f"--init_from={shlex.quote(path)}")
    was = rest.get('config', {}).get('optimizer', 'adamw')  # nanoGPT's
    if was != config['optimizer']:
        raise ValueError(f"{path} was trained by --optimizer={was}, not {config['optimizer']}: give that "
                         f"one, or fine-tune with --init_from={shlex.quote(path)}")
    load_optimizers(optimizers, rest['optimizer'], path, rest['iter_num'] - rest.get('skipped', 0))
    if rest.get('scaler'):  # none in files that were not written under float16
        scaler.load_state_dict(rest['scaler'])
    progress = Progress(**{field.name: rest.get(field.name, field.default)
                           for field in dataclasses.fields(Progress)})
    progress.best_val_loss = float(progress.best_val_loss)  # nanoGPT's is a tensor
    print0(f"resume: {path} at iteration {progress.iter_num:,}, best val loss {progress.best_val_loss:.4f}")
    return progress


def snapshot(model, progress, optimizers=(), scaler=None, wanted=True):
    """The part of a checkpoint that changes: weights (only the adapters, where there are any), Progress, and
    what resuming needs of the optimizers. A sharded model's is put together by all ranks, see whole."""
    state = {'model': lora_state(model) or model.state_dict(), **dataclasses.asdict(progress)}
    if optimizers:
        state.update(optimizer=[opt.state_dict() for opt in optimizers], scaler=scaler.state_dict())
    return whole(state, wanted)


def save(path, state, earlier=None):
    """Writes state to path: all of it or, with the old file kept, nothing. earlier: files of another run that
    are to make room for it, see prepare_out_dir; it is empty afterwards. Raises OSError with the reason, or
    ValueError for weights that are not finite."""
    folder = os.path.dirname(path)
    broken = [name for name, w in state['model'].items() if not w.isfinite().all()]
    if broken:
        raise diverged(f"{broken[0]} is not finite", state['iter_num'], state['config']['learning_rate'],
                       None if earlier else os.path.join(folder, 'ckpt.pt'))
    try:
        torch.save(state, path + '.tmp')
        if earlier:
            earlier[log_name(earlier)] = 'log.csv'
            # logs first: Windows renames none that another program holds open, and then nothing is renamed
            for name, new in sorted(earlier.items(), key=lambda names: not names[0].startswith('log')):
                os.replace(os.path.join(folder, name), os.path.join(folder, new))
            earlier.clear()
        os.replace(path + '.tmp', path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        if os.path.exists(path + '.tmp'):
            os.remove(path + '.tmp')
        kept = 'the checkpoint before it is kept' if os.path.exists(path) else 'there is none from before'
        raise OSError(f"cannot write {path} ({str(error).splitlines()[0][:100]}); is the disk full? "
                      f"{kept}") from None


def lock_folder(out_dir):
    """Takes out_dir for this process until it ends, however it ends. Returns the open file, which is to be
    kept. Raises ValueError if another training has taken it."""
    f = open(os.path.join(out_dir, 'lock'), 'a+', encoding='utf-8')  # noqa: SIM115
    try:
        if sys.platform == 'win32':
            import msvcrt
            os.lseek(f.fileno(), 1 << 30, os.SEEK_SET)  # nobody could read a byte that is locked
            msvcrt.locking(f.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            f.seek(0)
            raise ValueError(f"out_dir={out_dir}: another training ({f.read().strip()}) writes there; give "
                             "another --out_dir, or wait for its end") from None
        print0(f"{out_dir}/ cannot be locked ({error.strerror}): see that no other training writes there")
    f.seek(0)
    f.truncate()
    f.write(f"process {os.getpid()} on {platform.node()}\n")
    f.flush()
    return f


def old_names(out_dir, names):
    """Free names with one number for files of one run in out_dir: {'ckpt.pt': 'ckpt.old-3.pt'}."""
    taken = [int(n) for name in os.listdir(out_dir) for n in re.findall(r'[.]old-([0-9]+)[.]', name)]
    parts = {name: os.path.splitext(name) for name in names}
    return {name: f'{stem}.old-{max(taken, default=0) + 1}{ending}' for name, (stem, ending) in parts.items()}


def keep_last(out_dir, it, keep):
    """Keeps ckpt.pt, that of iteration `it`, as ckpt-<it>.pt too, for when it is written anew. Removes all
    but the last `keep` that were kept so."""
    path, kept = (os.path.join(out_dir, name) for name in ('ckpt.pt', f'ckpt-{it}.pt'))
    if os.path.exists(kept):
        os.remove(kept)
    try:
        os.link(path, kept)  # takes no space until ckpt.pt is another
    except OSError:  # a file system without links
        shutil.copyfile(path, kept)
    all_kept = [os.path.join(out_dir, name) for name in os.listdir(out_dir)
                if re.fullmatch(r'ckpt-[0-9]+[.]pt', name)]
    for name in sorted(all_kept, key=os.path.getmtime)[:-keep]:
        os.remove(name)


def prepare_out_dir(out_dir, resumed, keep_best):
    """Makes out_dir, which is locked, ready for a run. Returns the files of an earlier one that is there and
    not resumed, {name: the name it gets when this run has a checkpoint}. Resumed, best.pt stays only if it is
    to be kept."""
    path = functools.partial(os.path.join, out_dir)
    there = [name for name in sorted(os.listdir(out_dir))
             if re.fullmatch(r'best[.]pt|ckpt(-[0-9]+)?[.]pt|log[.]csv', name)]
    if there and not resumed:
        earlier = old_names(out_dir, there)
        print0(f"{out_dir}/ holds a run, which the first checkpoint of this one will rename to "
               f"{', '.join(earlier.values())}")
        return earlier
    if resumed and keep_best and 'best.pt' not in there:
        shutil.copyfile(path('ckpt.pt'), path('best.pt'))  # nanoGPT's ckpt.pt is its best
    elif resumed and not keep_best and 'best.pt' in there:
        kept = old_names(out_dir, ['best.pt'])['best.pt']
        os.replace(path('best.pt'), path(kept))  # else sample.py would go on reading it
        print0(f"{out_dir}/best.pt is kept as {kept}: always_save_checkpoint=True")
    return {}


LOG_FIELDS = {  # the columns of log.csv, and how each is written
    'iter': 'd', 'tokens': 'd', 'epoch': '.4f', 'loss': '.6f', 'val_loss': '.6f', 'val_bpb': '.6f',
    'lr': '.6e', 'grad_norm': '.5f', 'update_ratio': '.3e', 'ms_per_iter': '.3f', 'tok_per_s': '.0f',
    'mfu': '.4f', 'load_max': '.3f', 'skipped': 'd', 'wall_s': '.2f',
}


def log_name(earlier):
    """Where rows are written while the files of an earlier run still have their names."""
    return 'log.new.csv' if earlier else 'log.csv'


def start_log(path, after):
    """A log with its header; of one that is there the rows up to iteration `after` stay. The last may be cut,
    and another version may have other columns."""
    rows = []
    if after and os.path.exists(path):
        with open(path, encoding='utf-8', newline='') as f:
            rows = [row for row in csv.DictReader(f)
                    if None not in row.values() and int(row.get('iter') or after + 1) <= after]
    with open(path + '.tmp', 'w', encoding='utf-8', newline='') as f:
        writer = csv.DictWriter(f, LOG_FIELDS, extrasaction='ignore')
        writer.writeheader()
        writer.writerows(rows)
    os.replace(path + '.tmp', path)


def log_row(path, wandb, row):
    """Adds a row, a dict of numbers by LOG_FIELDS, to a log and to wandb's run, if there is one."""
    row = {name: value for name, value in row.items() if value is not None}
    with open(path, 'a', encoding='utf-8', newline='') as f:
        csv.DictWriter(f, LOG_FIELDS).writerow({name: format(value, LOG_FIELDS[name])
                                                for name, value in row.items()})
    if wandb:
        names = {'loss': 'train/loss', 'val_loss': 'val/loss'}  # as nanoGPT has them
        wandb.log({names.get(name, name): value for name, value in row.items()}, step=row['iter'])


def duration(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"


EARLY = (1, 4)  # iterations of a process that get a line in any case: it works, and how long it will take


def describe(row, seconds_left):
    """The line of an iteration. seconds_left: None for the first one, whose time is no measure of speed."""
    line = f"iter {row['iter']}: loss {row['loss']:.4f}, lr {row['lr']:.2e}, norm {row['grad_norm']:.2f}, "
    if seconds_left is None:
        return f"{line}{row['ms_per_iter'] / 1e3:.1f} s with the warm-up"
    mfu = f", mfu {row['mfu']:.1%}" if row['mfu'] else ''
    return (f"{line}{row['ms_per_iter']:.1f} ms, {row['tok_per_s']:,.0f} tok/s{mfu}, "
            f"{duration(seconds_left)} left")


def start_wandb(project, name, settings, run_id):
    """A run on Weights & Biases: a new one, or that of run_id, which goes on. None where wandb is missing or
    refuses: it must not cost the run."""
    try:
        import wandb
        return wandb.init(project=project, name=name, config=settings, id=run_id, resume='allow')
    except Exception as error:
        print0(f"no wandb logging, log.csv has everything ({type(error).__name__}: {error})")
        return None


# settings and machine ---------------------------------------------------------------------------------------

def check_settings(config):
    """Raises ValueError for the first setting that is no choice, or out of range."""
    for name, known in ('optimizer', OPTIMIZERS), ('lr_schedule', SCHEDULES):
        if config[name] not in known:
            raise ValueError(f"{name}={config[name]!r} is none of {', '.join(known)}")
    if config['compile'] not in (True, False, 'auto'):
        raise ValueError(f"compile={config['compile']!r} is none of True, False, auto")
    lowest = dict(eval_interval=1, eval_iters=1, log_interval=1, sample_tokens=0, max_iters=0, epochs=0,
                  tokens_per_param=0, learning_rate=0, min_lr=0, weight_decay=0, grad_clip=0, balance_loss=0,
                  z_loss=0, balance_rate=0, warmup_iters=0, lr_decay_iters=0, seed=0, lora_rank=0,
                  checkpoint_activations=0, keep=0, time_limit=0)
    for name, low in lowest.items():
        if config[name] is None:
            continue
        if not config[name] >= low:  # nan is not
            raise ValueError(f"{name}={config[name]} must be at least {low}")
        if config[name] == math.inf or isinstance(config[name], int) and config[name] >= 2**63:
            raise ValueError(f"{name}={config[name]} must be below 2**63")
    for name in ('beta1', 'beta2', 'momentum'):
        if not 0 <= config[name] < 1:
            raise ValueError(f"{name}={config[name]} must be at least 0 and below 1")
    if not 0 < config['lora_alpha'] < math.inf:
        raise ValueError(f"lora_alpha={config['lora_alpha']} must be above 0")
    if not 0 < config['cooldown'] <= 1:
        raise ValueError(f"cooldown={config['cooldown']} must be above 0 and at most 1")
    if not config['out_dir']:
        raise ValueError("out_dir is empty: name a folder")
    if os.path.exists(config['out_dir']) and not os.path.isdir(config['out_dir']):
        raise ValueError(f"out_dir={config['out_dir']} is a file: name a folder")


UNUSED = {  # flag: the setting, or field of GPTConfig, and its values, with which it has no effect
    'momentum': ('optimizer', ['adamw']),
    'lr_schedule': ('decay_lr', [False]), 'cooldown': ('lr_schedule', ['cosine', 'linear']),
    'balance_loss': ('n_expert', [None]), 'z_loss': ('n_expert', [None]),
    'balance_rate': ('balance_bias', [False]),
    'lora_alpha': ('lora_rank', [0]), 'lora_targets': ('lora_rank', [0]),
}


def check_effect(given, settings):
    """Raises ValueError for a flag that has no effect; config files serve many runs. given: as configure
    returns it; settings: this file's and the model's, {name: value}."""
    for name, (other, values) in UNUSED.items():
        if given.get(name) == 'flags' and settings[other] in values:
            raise ValueError(f"--{name} has no effect with {other}={settings[other]}: leave it out")


def smaller_batches(accumulation, micro_batch, ranks, config):
    """What to do when memory runs out, for a line: settings that leave the batch as it is and make smaller
    micro-batches of it, or keep less of them. accumulation, micro_batch: as share_batch has split it."""
    windows = accumulation * micro_batch * ranks
    sizes = [micro_batch // n for n in range(2, 17) if micro_batch % n == 0][:3]
    advice = [f"--batch_size={size} --gradient_accumulation_steps={windows // size}" for size in sizes]
    same = [f"the same batch in smaller parts: {' or '.join(advice)}"] if advice else []
    more = [] if config['checkpoint_activations'] else ['--checkpoint_activations=True']
    if ranks > 1 and not config['shard'] and not config['lora_rank']:
        more.append('--shard=True')
    return '; or '.join([*same, *([' or '.join(more)] if more else [])]) or 'a smaller model is needed'


def start_ranks(backend, device, ranks):
    """Lets the ranks know each other. Raises ValueError for a device that they cannot share."""
    kind, index = choose_device(device)
    if kind == 'mps':
        raise ValueError(f"{ranks} ranks on device=mps: torch joins no ranks there; start one process, or "
                         "give --device=cpu")
    if backend == 'auto':
        backend = 'nccl' if kind == 'cuda' else 'gloo'
    if backend == 'nccl' and kind != 'cuda':
        raise ValueError(f"backend=nccl needs CUDA, and the device is {kind}: leave it out")
    if kind == 'cuda':
        torch.cuda.set_device(index)
    hour = datetime.timedelta(hours=1)  # of silence, that is: saving and downloading may take minutes
    # what is on the CPU, as in on_any_rank, goes by gloo in any case
    dist.init_process_group('cpu:gloo,cuda:nccl' if backend == 'nccl' else backend, timeout=hour,
                            device_id=torch.device(kind, index) if backend == 'nccl' else None)


def fetch_once(name):
    """Downloads a published model on one rank of each node; the others find it in the cache then."""
    if os.environ.get('LOCAL_RANK', '0') == '0':
        import hub
        hub.fetch(name)
    dist.barrier()


def check_ranks_agree(facts):
    """facts: what this rank has read, name -> value. Raises ValueError, on every rank, if another rank has
    read something else: nodes may have folders of their own under the same name."""
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, facts)
    for other, theirs in enumerate(everyones):
        for name, value in theirs.items():
            if value != everyones[0][name]:
                raise ValueError(f"rank {other} has read {name}={value}, rank 0 {everyones[0][name]}: all "
                                 "nodes need the same files; share out_dir and data, or copy them")


def dtype_name(dtype):
    return str(dtype).removeprefix('torch.')


def resolve_runtime(device, dtype, seed, compile, ranks, was):
    """configurator.runtime, and compile. was: the runtime that a checkpoint records. On the same device and
    as many ranks 'auto' stands for what it stood for there: then a run resumes exactly."""
    machine = runtime(device, dtype, seed)
    if not was or (was['device_type'], was['ranks']) != (machine.device_type, ranks):
        return machine, compile
    if dtype == 'auto' and (was['threads'], was['dtype']) != (machine.threads, dtype_name(machine.dtype)):
        machine = runtime(device, was['dtype'], seed, threads=was['threads'])
    return machine, was['compile'] if compile == 'auto' else compile


def dtype_notice(machine, was):
    """What a person should know of the dtype that a run was resolved to, or None. was: see resolve_runtime;
    {} for a run that is not resumed."""
    dtype = dtype_name(machine.dtype)
    if (machine.device_type == 'cuda' and dtype == 'bfloat16'
            and torch.cuda.get_device_capability(machine.device) < (8, 0)):
        return ("this GPU has no bfloat16 units, so bfloat16 is emulated, which is slow; --dtype=float16 is "
                "fast, but resumes no longer exactly")
    if was and was['dtype'] != dtype:
        return f"resume: dtype was {was['dtype']}, is {dtype}"
    return None


def eager_seconds(steps, n_layer, flops):
    """About how long so many micro-batches of so many FLOPs take uncompiled on a CPU: forward and backward, a
    layer has some 300 operators of 5 us each, and two cores reached 1.2e11 FLOP/s, in the quick-start and the
    default shape alike."""
    return steps * (n_layer * 1.5e-3 + flops / 1.2e11)


def resolve_compile(compile, device, seconds):
    """compile='auto' -> bool, for a run that on a CPU takes so many seconds uncompiled: compiling takes some
    40 there and saves a third of them."""
    if compile != 'auto':
        return compile
    return ('cuda' in device or device == 'cpu' and seconds > 120) and can_compile(device)


def compile_model(model, device, by_block=False):
    """What computes model(idx, targets) compiled. by_block: each block and the loss by themselves, of which
    blocks that are alike are compiled once, and which does in evaluation what it does in training; the steps
    of two cores took a fifth longer so than those of a whole model. The model itself stays uncompiled."""
    # on CPUs eager's random numbers are the fast ones, and the same with and without compilation
    options = None if 'cuda' in device else {'fallback_random': True}
    compiled = functools.partial(torch.compile, dynamic=False, options=options)
    if not by_block:
        return compiled(model)
    blocks = [twin_of(block, forward=compiled(block.forward)) for block in model.h]
    modules = {**model._modules, 'h': torch.nn.ModuleList(blocks)}
    return twin_of(model, _modules=modules, loss=compiled(model.loss))


def twin_of(module, **attributes):
    """Another module with the same parameters and hooks, which gather what is sharded, and these attributes.
    copy.copy would ask a sharded one to make a new one."""
    twin = object.__new__(type(module))
    vars(twin).update(vars(module) | attributes)
    return twin


PEAK_TFLOPS = {  # dense, 16 bits, sums in float32: NVIDIA's data sheets, by what the device's name contains
    'H200 NVL': 835, 'H200': 989, 'H100 PCIe': 756, 'H100 NVL': 835, 'H100': 989, 'H800': 989, 'H20': 148,
    'GH200': 989, 'B200': 2250, 'A100': 312, 'A800': 312, 'A40': 150, 'A30': 165, 'A10': 125, 'A10G': 70,
    'L40S': 362, 'L40': 181, 'L4': 121, 'V100-PCIE': 112, 'V100S': 130, 'V100': 125, 'T4': 65,
    'RTX A6000': 155, 'RTX A5000': 111, 'RTX 6000 Ada': 364, 'Quadro RTX 6000': 131, 'Quadro RTX 8000': 131,
    'RTX 5090': 210, 'RTX 4090': 165, 'RTX 4080': 98, 'RTX 3090 Ti': 80, 'RTX 3090': 71, 'RTX 3080': 60,
    'RTX 3070': 41, 'RTX 2080 Ti': 54, 'TITAN RTX': 131,
}


def peak_flops(device, dtype):
    """FLOP/s of the device at 16 bits, or None if unknown: then there is no MFU."""
    if 'cuda' not in device or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items()  # a Ti or a SUPER is another card
                 if re.search(rf'\b{part}\b(?! (Ti|SUPER|D|Laptop|Max-Q)\b)', name, re.IGNORECASE)), None)


def peak_mb(device):
    """Most memory used so far: of the CUDA device, or of this process; None where nobody can tell."""
    if 'cuda' in device:
        return torch.cuda.max_memory_allocated(device) / 2**20
    if os.path.exists('/proc/self/status'):
        with open('/proc/self/status', encoding='utf-8', errors='replace') as f:
            kb = re.search(r'VmHWM:\s+(\d+)', f.read())
        if kb:  # getrusage begins with the peak of the process that has started this one
            return int(kb[1]) / 2**10
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == 'darwin' else 2**10)


def data_folder(dataset):
    """data/<dataset>, or dataset itself where that alone is a folder."""
    folder = os.path.join('data', dataset)
    return dataset if os.path.isdir(dataset) and not os.path.isdir(folder) else folder


def check_data(folder, meta, train_bins, val_bins, config, source):
    """Raises ValueError if a GPT of this config cannot train on a prepared folder. source: what --tokenizer
    is to name for data of the model's own tokenizer, or None for a model from scratch."""
    if meta['block_size'] not in (None, config.block_size):
        raise ValueError(f"{folder} is packed for block_size={meta['block_size']}, but the model has "
                         f"{config.block_size}: give --block_size={meta['block_size']}, or prepare it again "
                         f"with --block_size={config.block_size}")
    if bool(train_bins.masks) != bool(val_bins.masks):
        raise ValueError(f"{folder} has a mask for only one of train and val: prepare it again")
    for bins in (train_bins, val_bins):
        bins.n_sequences(config.block_size)  # an error, if there is none
        if not bins.n_targets:
            raise ValueError(f"{bins.masks[0].path} leaves no target: nothing would be learnt")
        if meta['vocab_size'] > config.vocab_size:
            advice = 'prepare it again, or raise --vocab_size'
            if source is not None:
                advice = f"prepare it with the model's own tokenizer: --tokenizer={shlex.quote(source)}"
            bins.check_vocabulary(config.vocab_size, advice)
        bins.vocab_size = config.vocab_size


def check_repetition(max_iters, sequences_per_iter, n_sequences, tokens_per_param):
    """Warns where the text is short for the planned run: a person who names epochs or max_iters may want
    repetition, but tokens_per_param is for text that does not come again. Raises ValueError for a batch of
    over 100 epochs, whose first iteration would seem to hang."""
    epochs = max_iters * sequences_per_iter / n_sequences
    if tokens_per_param is not None and epochs > 10:
        print0(f"warning: tokens_per_param={tokens_per_param:g} is {epochs:.0f} epochs of this text: prepare "
               "more, or give --epochs=3")
    if sequences_per_iter > 100 * n_sequences:
        raise ValueError(f"an iteration takes {sequences_per_iter:,} sequences, the text has {n_sequences:,}: "
                         "lower --batch_size or --gradient_accumulation_steps")
    if sequences_per_iter > n_sequences:
        print0(f"warning: an iteration takes {sequences_per_iter:,} sequences, the text has {n_sequences:,}: "
               "lower --batch_size or --gradient_accumulation_steps, or prepare more")


def warn_of_rates(config, max_iters):
    """Says so where the learning rate does not come to its peak, as in a run cut short, or ends above it."""
    warmup, peak, floor = (config[name] for name in ('warmup_iters', 'learning_rate', 'min_lr'))
    if 0 < max_iters <= warmup:
        print0(f"warning: warmup_iters={warmup} goes on to the end: the learning rate comes to "
               f"{max_iters / (warmup + 1):.0%} of its peak; lower --warmup_iters")
    if config['decay_lr'] and floor is not None and floor > peak:
        print0(f"warning: min_lr={floor:g} is above learning_rate={peak:g}, so that the rate rises: lower "
               "--min_lr")


def dataset_tokenizer(folder, source_tokenizer, source, path=None):
    """The tokenizer of a prepared folder, None if it cannot be had, which is said. Where the model that the
    run starts from has another, which prepare.py's --tokenizer=source gives, a warning, or if it is resumed,
    from path, a ValueError."""
    try:
        tokenizer = load_tokenizer(folder)
    except (OSError, ImportError) as error:
        print0(f"no tokenizer is stored with the checkpoint, so it cannot be sampled from: {error}")
        return None
    if source_tokenizer and source_tokenizer.tokens != tokenizer.tokens:
        differs = (f"{folder} was prepared with another tokenizer than {source} has, so the same ids stand "
                   "for different text")
        if path:
            raise ValueError(f"{differs}: resume on data of the same one, or fine-tune with "
                             f"--init_from={shlex.quote(path)}")
        print0(f"warning: {differs}: python prepare.py ... --tokenizer={shlex.quote(source)}")
    return tokenizer


def stop_on_signals(rank):
    """Ctrl-C and a scheduler's SIGTERM: the list that is returned is empty no more, which ends the run after
    the iteration that is under way. A second signal leaves at once."""
    stop = []

    def ask(number, frame):
        signal.signal(number, signal.default_int_handler)
        stop.append(number)
        if rank == 0:
            os.write(2, b'\nstopping after this iteration\n')  # print may be interrupted by this very handler
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    return stop


def resume_command(out_dir, ranks):
    """The command that goes on with this run."""
    start = 'python'
    if ranks > 1:
        here = os.environ.get('LOCAL_WORLD_SIZE')
        start = f'torchrun --standalone --nproc_per_node={here}' if here == str(ranks) else 'torchrun ...'
    return f"{start} {shlex.quote(sys.argv[0])} --out_dir={shlex.quote(out_dir)} --init_from=resume"


def saving_notice(saving, elapsed, eval_interval):
    """What to say of a checkpoint that took `saving` of the `elapsed` seconds since the one before, or None
    where that is at most 2%, or a second."""
    if saving <= max(1.0, 0.02 * elapsed):
        return None
    return (f"saving took {saving:.1f} s, {saving / elapsed:.0%} of the time since the last evaluation: a "
            f"larger --eval_interval (now {eval_interval}) loses less")


def tell(text, stop):
    """print0, but once a signal has come nobody needs to listen: Ctrl-C ends the `tee` of `| tee log` as
    well, and the run is to be saved."""
    try:
        print0(text)
    except BrokenPipeError:
        if not stop:
            raise


# main -------------------------------------------------------------------------------------------------------

if __name__ == '__main__':
    rank, ranks = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    model, source_tokenizer, rest, source, resumed = None, None, {}, None, init_from == 'resume'
    asked = {name: value for name, value in model_args.items() if name in given}
    if resumed:
        model, source_tokenizer, rest = load_to_train(init_from, out_dir, asked)
        config = resumed_settings(rest, config, given)
    config = last_length(config, given)
    globals().update(config)
    check_settings(config)
    accumulation, micro_batch = share_batch(gradient_accumulation_steps, batch_size, ranks)
    advice = smaller_batches(accumulation, micro_batch, ranks, config)
    sys.excepthook = functools.partial(one_line_errors, settings=config, memory=advice)
    checkpoint_file, best_file = (os.path.join(out_dir, name) for name in ('ckpt.pt', 'best.pt'))

    # data, what to start from, machine, ranks
    folder = data_folder(dataset)
    train_bins, val_bins, meta = Bins(folder, 'train'), Bins(folder, 'val'), read_meta(folder)
    if ranks > 1:
        start_ranks(backend, device, ranks)
    if init_from != 'scratch':
        if not resumed:
            if ranks > 1 and is_published(init_from):
                fetch_once(init_from)
            model, source_tokenizer, rest = load_to_train(init_from, out_dir, asked, meta)
        trained_on = rest.get('config', {}).get('dataset')
        source = data_folder(trained_on) if isinstance(trained_on, str) else rest['path']
    machine, compile = resolve_runtime(device, dtype, seed, compile, ranks, resumed and rest.get('runtime'))
    device = machine.device
    notice = dtype_notice(machine, resumed and rest.get('runtime'))
    if notice:
        print0(notice)
    torch.use_deterministic_algorithms(deterministic or device == 'cpu')
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid; costs an eighth of a step

    # model
    if 'no_tokenizer' in rest:
        print0(f"the tokenizers of {folder} and {rest['path']} are not compared: {rest['no_tokenizer']}")
    tokenizer = dataset_tokenizer(folder, source_tokenizer, source, rest['path'] if resumed else None)
    if ranks > 1:
        check_ranks_agree({'train tokens': train_bins.n_tokens, 'val tokens': val_bins.n_tokens,
                           'a tokenizer': tokenizer is not None, **{
                               name: rest.get(name) for name in ('iter_num', 'best_val_loss', 'wall_s')}})
    if model is None:
        model = GPT(GPTConfig(**{'vocab_size': meta['vocab_size'], **packed(meta), **model_args}))
        if model.config.n_expert_active == 1 and model.config.norm_topk_prob:  # published ones exist
            raise ValueError("n_expert_active=1: the weight of one expert is always 1, so that its router "
                             "learns nothing: --norm_topk_prob=False")
    check_data(folder, meta, train_bins, val_bins, model.config, source)
    check_effect(given, {**config, **vars(model.config)})
    lora = lora_of(config, rest, resumed)
    if lora and not resumed:
        add_lora(model, lora['rank'], lora['alpha'], lora['targets'])
    if checkpoint_activations:
        checkpoint_blocks(model, int(checkpoint_activations))
    if shard and ranks == 1:  # as when a run goes on here that began on several
        print0('shard=True has no effect on one rank: start several with torchrun')
        shard = False
    if shard:
        check_shard(lora, machine.dtype)
        shard_model(model, machine)
    model.to(device).train()
    block_size, params = model.config.block_size, [w for w in model.parameters() if w.requires_grad]
    n_sequences, n_params = train_bins.n_sequences(block_size), model.num_params()
    # batches of the training text to compare val's loss with, at a quarter of its cost
    quarter = max(1, min(eval_iters, val_bins.n_sequences(block_size) // batch_size) // 4)
    first_token = val_bins.read([0], block_size)[0, :1].tolist()  # samples go on from here

    # length
    sequences_per_iter = gradient_accumulation_steps * batch_size
    tokens_per_iter = sequences_per_iter * block_size
    length = f'max_iters={max_iters}'
    if epochs is not None:
        length, max_iters = f'epochs={epochs:g}', math.ceil(epochs * n_sequences / sequences_per_iter)
    if tokens_per_param is not None:
        length = f'tokens_per_param={tokens_per_param:g}'
        max_iters = math.ceil(tokens_per_param * n_params / tokens_per_iter)
    decay_end = max_iters if lr_decay_iters is None else lr_decay_iters
    floor = learning_rate / 10 if min_lr is None else min_lr
    flops_per_iter = model.flops_per_token() * tokens_per_iter
    compile = resolve_compile(compile, device, eager_seconds(max_iters * accumulation, model.config.n_layer,
                                                             flops_per_iter / (accumulation * ranks)))
    config['max_iters'] = max_iters
    print0(f"model: {n_params:,} parameters, {model.config.n_layer} layers, {model.config.n_embd} wide, "
           f"context {block_size}, vocabulary {model.config.vocab_size}")
    if lora:
        print0(f"adapters: {sum(w.numel() for w in params):,} parameters of rank {lora['rank']} are trained")
    print0(f"data: {folder}, {train_bins.n_tokens:,} tokens to train on, {val_bins.n_tokens:,} to validate")
    if train_bins.masks:
        print0(f"mask: {train_bins.n_targets:,} and {val_bins.n_targets:,} of them are targets; "
               f"document_token={model.config.document_token}")
    print0(f"run: {max_iters:,} iterations ({length}) of {tokens_per_iter:,} tokens ({accumulation} x "
           f"{micro_batch} windows on {ranks} rank{'s' * (ranks > 1)}), "
           f"{max_iters * sequences_per_iter / n_sequences:.2f} epochs, "
           f"{max_iters * tokens_per_iter / n_params:.1f} tokens a parameter; a checkpoint every "
           f"{eval_interval} iterations to {out_dir}/")
    check_repetition(max_iters, sequences_per_iter, n_sequences, tokens_per_param)
    if not eval_only:
        warn_of_rates(config, max_iters)

    # optimizers, compilation
    optimizers = make_optimizers(model, config)
    scaler = torch.amp.GradScaler(machine.device_type, enabled=machine.dtype == torch.float16)
    progress = resume(rest, config, optimizers, scaler) if resumed else Progress()
    if resumed and progress.iter_num >= max_iters and not eval_only:
        print0(f"resume: nothing is left to do, max_iters={max_iters:,}; to train on, give more --max_iters")
        if ranks > 1:
            dist.destroy_process_group()
        sys.exit()
    del rest, source_tokenizer  # their memory
    forward = evaluated = model
    if compile and not eval_only and progress.iter_num < max_iters:
        print0('compiling: the first iteration takes half a minute or more')
        forward = compile_model(model, device, by_block=shard)  # weights are gathered between sharded blocks
        if 'cuda' in device and not shard:  # on a CPU compiling again costs more than it gives
            evaluated = forward
    if ranks > 1 and not shard:
        forward = DDP(forward, device_ids=[device] if 'cuda' in device else None,
                      gradient_as_bucket_view=True)

    # files, signals
    lock, earlier, wandb, stop, saved = None, None, None, [], resumed
    if rank == 0 and not eval_only:
        os.makedirs(out_dir, exist_ok=True)
        lock = lock_folder(out_dir)
        earlier = prepare_out_dir(out_dir, resumed, keep_best=not always_save_checkpoint)
        start_log(os.path.join(out_dir, log_name(earlier)), progress.iter_num)
        if wandb_log:
            wandb = start_wandb(wandb_project, wandb_run_name,
                                {**config, **dataclasses.asdict(model.config)}, progress.wandb_id)
            progress.wandb_id = wandb.id if wandb else progress.wandb_id
    if not eval_only:
        stop = stop_on_signals(rank)
    constant = {'model_args': dataclasses.asdict(model.config), 'config': config, 'lora': lora,
                'tokenizer': tokenizer and tokenizer.state(), 'masked': bool(train_bins.masks),
                'runtime': dict(device_type=machine.device_type, ranks=ranks, threads=machine.threads,
                                compile=compile, dtype=dtype_name(machine.dtype))}

    # the loop: train up to the next evaluation, evaluate, save
    began, first_it, peak = START - progress.wall_s, progress.iter_num, peak_flops(device, machine.dtype)
    batches = read_batches(train_bins, block_size, range(first_it, max_iters), accumulation, micro_batch,
                           seed, device, rank, ranks)
    batch, row, stopping = next(batches, None), None, False
    moves, in_a_row, saved_at, noticed = [], 0, time.time(), False
    while True:
        goal = min(max_iters, (progress.iter_num // eval_interval + 1) * eval_interval)
        timed_it, timed_at = progress.iter_num, time.time()
        while progress.iter_num < goal and not stopping and not eval_only:
            lr = lr_at(progress.iter_num, learning_rate, floor, warmup_iters, decay_end,
                       lr_schedule if decay_lr else None, cooldown)
            set_learning_rate(optimizers, lr)
            seed_dropout(seed, progress.iter_num, rank, device)
            loss, expert_load, batch = gradients(forward, batch, batches, accumulation, machine.autocast,
                                                 scaler, balance_loss, z_loss, ranks)
            at_goal = progress.iter_num + 1 == goal
            before = [w.detach().clone() for w in params] if at_goal and (rank == 0 or shard) else None
            grad_norm, moved = update(model, params, optimizers, scaler, grad_clip, expert_load,
                                      0 if lora else balance_rate)
            progress.iter_num += 1
            moves.append(moved)
            if rank == 0 and time_limit is not None and time.time() - START >= 60 * time_limit and not stop:
                tell(f"time_limit={time_limit:g} minutes are over: stopping", stop)
                stop.append(signal.SIGTERM)

            it, stopping = progress.iter_num, on_any_rank(bool(stop), ranks)
            if stopping and not stop:  # all ranks end with the same status
                stop.append(signal.SIGTERM)
            logs, early = it % log_interval == 0 or at_goal, it - first_it in EARLY
            if logs or early or stopping or len(moves) == MAX_SKIPPED:
                skipped, in_a_row = count_skipped(moves, in_a_row)
                progress.skipped, moves = progress.skipped + skipped, []
                if skipped:
                    tell(f"iter {it}: a loss or gradient was not finite, {skipped} update"
                         f"{'s' * (skipped > 1)} skipped, {progress.skipped} in all", stop)
                if in_a_row >= MAX_SKIPPED:
                    raise diverged(f"{in_a_row} losses or gradients in a row were not finite", it,
                                   learning_rate, checkpoint_file if saved else None)
            if logs or early or stopping:
                seconds = (time.time() - timed_at) / (it - timed_it)
                timed_it, timed_at = it, time.time()
                progress.wall_s = time.time() - began
                row = {'iter': it, 'tokens': it * tokens_per_iter,
                       'epoch': it * sequences_per_iter / n_sequences,
                       'loss': mean_over_ranks(loss, ranks), 'lr': lr, 'grad_norm': float(grad_norm),
                       'update_ratio': relative_change(params, before) if before else None,
                       'ms_per_iter': seconds * 1e3, 'tok_per_s': tokens_per_iter / seconds,
                       'mfu': flops_per_iter / seconds / (peak * ranks) if peak else None,
                       'load_max': None if expert_load is None else worst_load(expert_load),
                       'skipped': progress.skipped, 'wall_s': progress.wall_s}
                tell(describe(row, None if it == first_it + 1 else (max_iters - it) * seconds), stop)
                if rank == 0 and logs and not at_goal and not stopping:  # else it waits for its val_loss
                    log_row(os.path.join(out_dir, log_name(earlier)), wandb, row)

        if stopping:  # first, for whoever sent the signal may not wait for an evaluation
            state = snapshot(model, progress, optimizers, scaler, wanted=rank == 0)
            if rank == 0:
                save(checkpoint_file, {**constant, **state}, earlier)
            saved = True
            del state
        val_loss, count = evaluate(evaluated, model, val_bins, eval_iters, batch_size, device,
                                   machine.autocast, rank, ranks)
        train_loss, _ = evaluate(evaluated, model, train_bins, quarter, batch_size, device,
                                 machine.autocast, rank, ranks)
        bpb = val_loss / math.log(2) / meta['bytes_per_token'] if meta['bytes_per_token'] else None
        bits = f", {bpb:.4f} bits per byte" if bpb else ''
        tell(f"step {progress.iter_num}: train loss {train_loss:.4f}, val loss {val_loss:.4f}{bits}, "
             f"perplexity {math.exp(min(val_loss, 99)):.2f} ({count:,} tokens)", stop)
        if not math.isfinite(val_loss):
            raise diverged(f"val loss is {val_loss}", progress.iter_num, learning_rate,
                           checkpoint_file if saved else None)
        if eval_only:
            break
        improved = val_loss < progress.best_val_loss
        progress.best_val_loss = min(val_loss, progress.best_val_loss)
        progress.wall_s, saving = time.time() - began, time.time()
        state = snapshot(model, progress, optimizers, scaler, wanted=rank == 0)
        if rank == 0:
            if row:  # before the checkpoint: a run that is killed in between writes it anew
                row.update(val_loss=val_loss, val_bpb=bpb, wall_s=progress.wall_s)
                log_row(os.path.join(out_dir, log_name(earlier)), wandb, row)
            if improved and not always_save_checkpoint:
                weights_only = {name: value for name, value in state.items()
                                if name not in ('optimizer', 'scaler')}
                save(best_file, {**constant, **weights_only}, earlier)
            save(checkpoint_file, {**constant, **state}, earlier)
            if keep:
                keep_last(out_dir, progress.iter_num, keep)
            saving, elapsed, saved_at = time.time() - saving, time.time() - saved_at, time.time()
            notice = None if noticed else saving_notice(saving, elapsed, eval_interval)
            if notice:
                tell(notice, stop)
                noticed = True
        saved = True
        del state
        if sample_tokens and tokenizer and (rank == 0 or shard):  # sharded, all ranks compute the same
            model.eval()
            with machine.autocast():
                text, _ = complete(model, tokenizer, [first_token], sample_tokens, seed=seed)
            model.train()
            tell(f"{'-' * 15} sample:\n{text[0]}\n{'-' * 15}", stop)
        if stopping or progress.iter_num >= max_iters:
            break

    stopped = stopping and progress.iter_num < max_iters
    if stopped:
        tell(f"stopped at {progress.iter_num:,} of {max_iters:,}; go on with: "
             f"{resume_command(out_dir, ranks)}", stop)
        if ranks > 1:
            tell('all is saved; the error that torchrun reports below is this exit status', stop)
    elif not eval_only:
        memory = peak_mb(device)
        tell(f"done: {progress.iter_num:,} iterations in {duration(time.time() - START)}, best val loss "
             f"{progress.best_val_loss:.4f}, peak memory {f'{memory:,.0f} MB' if memory else 'n/a'}; next: "
             f"python sample.py --out_dir={shlex.quote(out_dir)}", stop)
    if lock:
        lock.close()
    if ranks > 1:
        dist.destroy_process_group()
    if stopped and stop:
        sys.exit(128 + stop[0])  # as a shell reports a program that a signal has ended

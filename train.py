r"""
Trains a model: tokens -> weights.

    python train.py                                          # config/default.py, on any machine
    python train.py config/shakespeare_char.py --n_layer=6   # a config file, then overrides, left to right
    python train.py --out_dir=out-small --init_from=resume   # continues exactly where a run has stopped
    python train.py config/small.py --init_from=auto         # resumes if out_dir has a checkpoint
    torchrun --standalone --nproc_per_node=8 train.py config/small.py

    # two machines: on each, with its own node_rank (prefix NCCL_IB_DISABLE=1 if they have no Infiniband)
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=10.0.0.1 --master_port=1234 \
        train.py config/small.py

Every setting below and every field of GPTConfig can be set in a config file or by --name=value.

The main program is at the end of this file. It calls the functions above it in nearly the same order:
    settings      from files and flags; if you resume, the checkpoint's for all that you do not give
    ranks, data   batches are a pure function of (seed, iteration), on any number of ranks that divides them
    model         from scratch or loaded; with shard=True, fsdp.py spreads it over the ranks
    run           OPTIMIZERS, their states; length in iterations; compilation; DDP
    lock and log  only this run may write to out_dir; files of an earlier run become *.old-1.*
    loop          iterations up to the next evaluation; then best.pt and ckpt.pt, which replace the old files
    end           after max_iters, time_limit or a signal in STOP, such as Ctrl-C. The last two finish the
                  iteration, write ckpt.pt, evaluate and write it again. A second Ctrl-C ends it at once
--init_from=resume restores weights, optimizers, scaler and NUMBERS: the run continues bit for bit.
"""
import time

START = time.time()  # before torch, whose import wall_s counts

import collections
import contextlib
import copy
import csv
import dataclasses
import datetime
import functools
import json
import math
import os
import shlex
import signal
import sys
from pathlib import Path

from configurator import (
    check_effects,
    check_values,
    compile_model,
    configure,
    cpu_has_bfloat16,
    duration,
    keep_freed_memory,
    marked,
    naming,
    one_line_errors,
    peak_flops,
    peak_mb,
    print0,
    resolve_compile,
    runtime,
    show,
)

# input and output
out_dir = 'out'                      # of checkpoints, log.csv and run.json
dataset = 'openwebtext'              # data/<dataset>, made by prepare.py
init_from = 'scratch'                # scratch, resume (out_dir's), auto (resume if out_dir has ckpt.pt, else
                                     # scratch), or to fine-tune: file, folder or hub id
eval_interval = 2000                 # iterations between evaluations, each with a checkpoint [>= 1]
eval_iters = 200                     # evaluation batches of val.bin; of train.bin a quarter as many [>= 1]
eval_only = False                    # evaluate once and stop
log_interval = 1                     # iterations between log lines [>= 1]
always_save_checkpoint = True        # False: also keep best.pt, to sample from and fine-tune
keep = 0                             # keep the last n checkpoints too, as ckpt-<iteration>.pt
sample_tokens = 0                    # length of the sample printed at each evaluation; 0: none
wandb_log = False                    # log to Weights & Biases too
wandb_project = 'owt'                # its project
wandb_run_name = 'gpt2'              # and run
# batch, over all ranks
gradient_accumulation_steps = 40     # micro-batches per iteration, all ranks together [>= 1]
batch_size = 12                      # sequences of block_size tokens per micro-batch [>= 1]
# length of the run: the last given of these three settings decides
max_iters = 600000                   # iterations (updates)
epochs: float | None = None          # passes over train.bin
tokens_per_param: float | None = None  # tokens for each parameter (20 is Chinchilla's, arXiv:2203.15556)
time_limit: float | None = None      # minutes after which the run stops as at Ctrl-C
# optimizer
optimizer = 'adamw'                  # or muon (AdamW for all but blocks' matrices) [in OPTIMIZERS] [fixed]
learning_rate = 6e-4                 # peak, after warm-up; AdamW's, Muon scales its own to match
lr_scales = {}                       # of groups (GROUPS in model.py), relative to it: {'embedding': 12.0}
weight_decay = 1e-1                  # times learning_rate, on matrices, embeddings; not on norms and biases
beta1 = 0.9                          # of AdamW [< 1]
beta2 = 0.95                         # of AdamW [< 1]
momentum = 0.95                      # of Muon [< 1] [if optimizer == 'muon']
grad_clip = 1.0                      # largest norm of the gradient; 0: no clipping
# these losses join the objective, not the loss reported
mtp_loss = 0.3                       # weight of mtp's loss, as DeepSeek-V3 begins [if mtp]
# experts [if n_expert]
balance_loss = 0.01                  # weight of the load-balancing loss
z_loss = 0.0                         # weight of z-loss on the router's logits, not the head's; ST-MoE: 1e-3
balance_rate = 0.001                 # how far balance_bias moves per iteration [if balance_bias]
# low-rank adapters (LoRA) of the model that init_from names, whose own weights stay unchanged
lora_rank = 0                        # 0: none, all weights are trained [fixed]
# further settings of adapters [if lora_rank]
lora_alpha = 16.0                    # updates are scaled by lora_alpha / lora_rank [> 0] [fixed]
lora_targets = 'c_attn,c_proj,c_fc'  # names of linear layers, or of one, as attn.c_proj [fixed]
# learning rate
warmup_iters = 2000                  # linear warm-up
decay_lr = True                      # False: constant after warm-up
# the decay [if decay_lr]
lr_schedule = 'cosine'               # cosine, linear, wsd (constant, linear over cooldown) [in SCHEDULES]
cooldown = 0.4                       # wsd's share of the run [> 0] [<= 1] [if lr_schedule == 'wsd']
lr_decay_iters: int | None = None    # end of the decay; None: max_iters [>= 1]
min_lr: float | None = None          # where it ends; None: a tenth of the peak [<= learning_rate]
# system
backend = 'auto'                     # auto: nccl on CUDA, else gloo [if TORCHRUN]
device = 'auto'                      # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'                       # float32, bfloat16, float16; auto: what the hardware is fast at
compile: bool | str = 'auto'         # torch.compile; auto: if the run is long [in (True, False, 'auto')]
shard = False                        # spread weights over the ranks (FSDP) [if TORCHRUN]
checkpoint_activations: bool | int = False  # True or every n-th block: less memory, computed twice
deterministic = False                # bit-exact on CUDA too, slower; CPUs always are
seed = 1337                          # of weights, batches and dropout
settings = configure(globals(), 'GPTConfig', default_file='config/default.py', tunes=True)
config = settings.config
given = settings.given

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from model import (
    GPT,
    GROUPS,
    GPTConfig,
    flops_per_token,
    num_params,
    row_splits,
    try_tokens,
)
from prepare import Bins, data_folder, load_tokenizer, read_meta
from sample import CHANGEABLE, complete, load

# learning rate ----------------------------------------------------------------------------------------------

SCHEDULES = {  # (share of the decay done, cooldown) -> share of the way from min_lr to the peak
    'cosine': lambda done, cooldown: 0.5 * (1 + math.cos(math.pi * done)),
    'linear': lambda done, cooldown: 1 - done,
    'wsd': lambda done, cooldown: min(1.0, (1 - done) / cooldown),  # arXiv:2404.06395
}


def lr_at(it, config):
    """Learning rate of iteration `it`: warm-up, then the schedule down to min_lr."""
    peak = config['learning_rate']
    warmup = config['warmup_iters']
    if it < warmup:
        return peak * (it + 1) / (warmup + 1)
    if not config['decay_lr']:
        return peak
    end = config['lr_decay_iters'] or config['max_iters']
    done = min(1.0, (it - warmup) / max(1, end - warmup))
    floor = peak / 10 if config['min_lr'] is None else config['min_lr']
    return floor + SCHEDULES[config['lr_schedule']](done, config['cooldown']) * (peak - floor)


def set_rates(optimizers, lr):
    """Gives each group of parameters its learning rate."""
    for opt in optimizers:
        for group in opt.param_groups:
            group['lr'] = lr * group.get('lr_scale', 1.0)


# ranks ------------------------------------------------------------------------------------------------------

TORCHRUN = 'RANK' in os.environ  # has started this process
RANK = int(os.environ.get('RANK', 0))  # this process's, by torchrun
RANKS = int(os.environ['WORLD_SIZE']) if TORCHRUN else 1


def all_reduce(x, **op):
    """Sums a tensor over the ranks, or by another op, in place, and returns it."""
    if dist.is_initialized():
        dist.all_reduce(x, **op)
    return x


# data -------------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=2)
def sequence_order(seed, epoch, n):
    """A permutation of the n sequences for this epoch."""
    return np.random.default_rng((seed, epoch)).permutation(n)


def sequence_indices(first, count, n, seed):
    """(count,) indices of the sequences from place `first` of the run on; an epoch has n."""
    return np.array([sequence_order(seed, i // n, n)[i % n] for i in range(first, first + count)])


def share_batch(gradient_accumulation_steps, batch_size, ranks):
    """(micro-batches of a rank, sequences in each, at most batch_size)."""
    total = gradient_accumulation_steps * batch_size
    if total % ranks:
        raise ValueError(f"gradient_accumulation_steps={gradient_accumulation_steps} times "
                         f"batch_size={batch_size} is {total} sequences, which {ranks} ranks do not divide; "
                         f"{(total // ranks + 1) * ranks} would work")
    share = total // ranks
    accumulation = -(-share // batch_size)
    while share % accumulation:
        accumulation += 1
    return accumulation, share // accumulation


def to_device(batch, device):
    """(inputs, targets), (B, T) int64 arrays, as tensors on the device."""
    batch = map(torch.from_numpy, batch)
    if 'cuda' in device:  # contiguous first, or the copy is not from pinned memory
        return [tensor.contiguous().pin_memory().to(device, non_blocking=True) for tensor in batch]
    return [tensor.to(device) for tensor in batch]


def read_batches(bins, block_size, iterations, accumulation, micro_batch, seed, device):
    """Yields each iteration's batch: this rank's micro-batches, a list of (inputs, targets, weight), such
    that the mean of the weighted mean losses is the mean over all targets of the iteration."""
    n_sequences = bins.n_sequences(block_size)
    for it in iterations:
        firsts = [((it * accumulation + step) * RANKS + RANK) * micro_batch for step in range(accumulation)]
        arrays = [bins.batch(sequence_indices(first, micro_batch, n_sequences, seed), block_size)
                  for first in firsts]
        weights = [1.0] * accumulation
        if bins.masks:
            counts = [np.count_nonzero(targets != -1) for _, targets in arrays]
            counts = torch.tensor(counts, dtype=torch.float32).to(device)
            weights = counts * (accumulation * RANKS) / all_reduce(counts.sum()).clamp(min=1)
        yield [(*to_device(array, device), weight) for array, weight in zip(arrays, weights)]


@torch.no_grad()
def evaluate(model, bins, batches, batch_size, machine):
    """(mean loss, number of targets) over `batches` batches of evenly spread sequences, or all if fewer. The
    loss is nan if there are no targets."""
    block_size = model.config.block_size
    n = bins.n_sequences(block_size)
    count = min(n, batches * batch_size)
    totals = np.zeros(2)  # of losses, of targets
    model.eval()
    for start in range(0, count, RANKS * batch_size):  # as many on each rank: sharded models need it
        places = np.arange(batch_size) + start + RANK * batch_size
        # full, so that nothing recompiles; beyond the last come the first again, without targets
        inputs, targets = bins.batch(places % count * n // count, block_size)
        targets = np.where(places[:, None] < count, targets, -1)
        n_targets = np.count_nonzero(targets != -1)
        with machine.autocast():
            loss, _ = model(*to_device((inputs, targets), machine.device))
        totals += loss.item() * n_targets, n_targets
    model.train()
    total, n_targets = all_reduce(torch.from_numpy(totals)).tolist()
    return total / n_targets if n_targets else math.nan, int(n_targets)


def evaluate_splits(run, train_bins, val_bins, bytes_per_token):
    """Prints the losses of both splits. Returns those of val, columns of the log; {} without targets."""
    n = run.config['eval_iters']
    batch_size = run.config['batch_size']
    val_loss, count = evaluate(run.evaluated, val_bins, n, batch_size, run.machine)
    train_loss, _ = evaluate(run.evaluated, train_bins, max(1, n // 4), batch_size, run.machine)
    bpb = val_loss / math.log(2) / bytes_per_token if bytes_per_token else None
    bits = f", {bpb:.4f} bits per byte" if bpb else ''
    print0(f"step {run.iter_num}: train loss {train_loss:.4f}, val loss {val_loss:.4f}{bits}, "
           f"perplexity {math.exp(min(val_loss, 99)):.2f} ({count:,} tokens)")
    return {'val_loss': val_loss, 'val_bpb': bpb} if count else {}


def print_sample(run, tokenizer, bins):
    """Prints sample_tokens tokens after the first of val. All ranks of a sharded model compute the same."""
    prompts = bins.batch([0], 1)[0].tolist()
    run.model.eval()
    with run.machine.autocast():
        text, _ = complete(run.model, tokenizer, prompts, run.config['sample_tokens'],
                           seed=run.config['seed'])
    run.model.train()
    print0(f"{'-' * 15} sample:\n{text[0]}\n{'-' * 15}")


# optimizers -------------------------------------------------------------------------------------------------

class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum (https://kellerjordan.github.io/posts/muon), scaled to the RMS of
    AdamW's updates (arXiv:2502.16982): torch.optim.Muon with 'match_rms_adamw', each projection of a fused
    matrix by itself. row_splits: parameter -> rows of its projections."""

    _step_supports_amp_scaling = True  # as fused AdamW, which torch marks so
    found_inf = 0.0                    # or 0-d on the device; 1: the step changes nothing

    def __init__(self, params, lr, row_splits, momentum):
        super().__init__(params, {'lr': lr, 'momentum': momentum})
        self.row_splits = row_splits

    @torch.no_grad()
    def step(self):
        kept = 1 - self.found_inf
        for group in self.param_groups:
            lr = group['lr'] * kept
            moves = []
            for w in group['params']:
                if w.grad is None:
                    continue
                if w not in self.state:
                    self.state[w]['momentum_buffer'] = torch.zeros_like(w)
                momentum = self.state[w]['momentum_buffer']
                grad = w.grad
                if torch.is_tensor(kept):  # momentum that is its own gradient stays
                    grad = torch.where(kept > 0, grad, momentum)
                momentum.lerp_(grad, 1 - group['momentum'])
                w.mul_(1 - lr * group['weight_decay'])
                moves.append((w, grad.lerp(momentum, group['momentum']), self.row_splits[w]))
            sharded = [move for move in moves if is_sharded(move[0])]
            subtract_orthogonalised([move for move in moves if not is_sharded(move[0])], lr)
            if sharded:
                from fsdp import subtract_whole
                subtract_whole(subtract_orthogonalised, sharded, lr)


def subtract_orthogonalised(moves, lr):
    """Subtracts orthogonalised updates. moves: matrices, or stacks of them (experts, rows, columns), each
    with its update and the row counts of the projections that are fused in it."""
    batches = collections.defaultdict(list)  # shape of a projection -> pairs of it and its update
    for w, update, rows in moves:
        for pair in zip(w.split(rows, dim=-2), update.split(rows, dim=-2)):
            batches[pair[0].shape[-2:]].append(pair)
    for shape, pairs in batches.items():
        flat = torch.cat([rounded(update).reshape(-1, *shape) for _, update in pairs])
        changes = orthogonalise_shared(flat).float() * (lr * 0.2 * max(shape) ** 0.5)
        for (w, _), change in zip(pairs, changes.split([w.numel() // shape.numel() for w, _ in pairs])):
            w.sub_(change.view_as(w))


def orthogonalise_shared(x):
    """orthogonalise, of which each rank computes a share."""
    if RANKS == 1:
        return orthogonalise(x)
    share = slice(RANK * len(x) // RANKS, (RANK + 1) * len(x) // RANKS)
    found = torch.zeros_like(x)
    found[share] = orthogonalise(x[share])
    return all_reduce(found)


def rounded(x):
    """To bfloat16, unless that is slow here."""
    return x if x.device.type == 'cpu' and not cpu_has_bfloat16() else x.bfloat16()


def orthogonalise(x):
    """(n, rows, columns) -> the same with singular values near 1, by five steps of Jordan's Newton-Schulz."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


def param_groups(model, config, chosen):
    """An optimizer's groups of the parameters whose tag is of the chosen groups. Without lr_scales AdamW has
    nanoGPT's two, in its order: the parameters that weight decay is for, and the vectors."""
    groups = {(True, 1.0): [], (False, 1.0): []}
    for name, w in model.named_parameters():
        group = model.tags[name].group
        if w.requires_grad and group in chosen:
            groups.setdefault((GROUPS[group], config['lr_scales'].get(group, 1.0)), []).append(w)
    return [{'params': params, 'weight_decay': config['weight_decay'] * decays / scale, 'lr_scale': scale}
            for (decays, scale), params in groups.items()]


def adamw(model, config, chosen=GROUPS):
    """AdamW (arXiv:1711.05101)."""
    return [torch.optim.AdamW(param_groups(model, config, chosen), lr=config['learning_rate'],
                              betas=(config['beta1'], config['beta2']), fused=True)]


def muon(model, config):
    """Muon for the matrices in the blocks, AdamW for the rest."""
    matrices = [group for group in param_groups(model, config, ['matrix']) if group['params']]
    rest = adamw(model, config, GROUPS.keys() - {'matrix'})
    if not matrices:  # with adapters all are frozen
        return rest
    return [Muon(matrices, config['learning_rate'], row_splits(model), config['momentum']), *rest]


OPTIMIZERS = {  # name: function of model and settings -> optimizers, whose lr the loop sets, by lr_scale
    'adamw': adamw,
    'muon': muon,
}


def make_optimizers(model, config):
    """The optimizers of config['optimizer']. Raises ValueError unless each trained parameter is in one of
    them, and for lr_scales that this model cannot use."""
    known = {tag.group for tag in model.tags.values()}
    scales = config['lr_scales']
    if not (scales.keys() <= known and all(type(x) in (int, float) and x > 0 for x in scales.values())):
        raise ValueError(f"lr_scales={scales} must have a number above 0 for groups of this model's "
                         f"parameters: {', '.join(sorted(known))}")
    optimizers = OPTIMIZERS[config['optimizer']](model, config)
    taken = [id(w) for opt in optimizers for group in opt.param_groups for w in group['params']]
    for name, w in model.named_parameters():
        if taken.count(id(w)) != w.requires_grad:
            raise ValueError(f"parameter {name} is assigned to no optimizer, or to several: see OPTIMIZERS")
    return optimizers


def load_optimizers(model, optimizers, states):
    """Loads states by parameter name. States from nanoGPT and from earlier versions are matched by position.
    This run's groups of parameters are kept. Raises KeyError for a parameter that this model lacks, and
    ValueError for another shape."""
    params = [[w for group in opt.param_groups for w in group['params']] for opt in optimizers]
    if isinstance(states, dict) and 'param_groups' not in states:
        weights = dict(model.named_parameters())
        states = {weights[name]: state for name, state in states.items()}
    else:
        saved = states if isinstance(states, list) else [states]
        states = {ws[i]: state for ws, one in zip(params, saved, strict=True)
                  for i, state in one['state'].items()}
    for w, state in states.items():
        for key, value in state.items():
            if torch.is_tensor(value) and value.ndim == w.ndim:
                value = value[:len(w)]  # learned positions may be fewer now
                if value.shape != w.shape:
                    raise ValueError(f"the checkpoint's {key} {tuple(value.shape)} does not fit a parameter "
                                     f"{tuple(w.shape)}: resume with the code that trained it")
                if is_sharded(w):
                    from fsdp import split_like
                    value = split_like(w, value)
                state[key] = value
    for opt, ws in zip(optimizers, params):
        opt.load_state_dict({'state': {i: states[w] for i, w in enumerate(ws) if w in states},
                             'param_groups': opt.state_dict()['param_groups']})


# memory -----------------------------------------------------------------------------------------------------

def checkpoint_blocks(model, every):
    """Keeps only the inputs of every n-th block, which backward recomputes (arXiv:1604.06174)."""
    for block in model.h[every - 1::every]:
        block.forward = functools.partial(forward_recomputed, block)


def forward_recomputed(block, x, context):
    """The forward of a checkpointed block. Each of its two runs has its own copy of the context, as it was
    before the block: the second run is in backward, after later blocks have changed the context."""
    before = copy.copy(context)
    before.handed = {**context.handed}

    def forward(x):
        own = copy.copy(before)
        own.handed = {**before.handed}
        own.routing = []
        return type(block).forward(block, x, own), own.handed, own.routing

    x, context.handed, routing = checkpoint(forward, x, use_reentrant=False)
    if context.routing is not None:
        context.routing.extend(routing)
    return x


def shard_model(model, config, machine):
    """Leaves each rank its part of the model. Raises ValueError for settings that FSDP cannot have."""
    import fsdp
    if config['lora_rank'] or machine.dtype == torch.float16:
        raise ValueError("shard=True cannot be combined with lora_rank or dtype=float16: leave one out")
    fsdp.shard_model(model, machine)


def is_sharded(w):
    """Whether a rank holds only a part of w (as a DTensor, whose module is slow to import)."""
    return hasattr(w, 'full_tensor')


# one iteration ----------------------------------------------------------------------------------------------

LOSSES = {  # in addition to the reported loss: name -> (setting that is its weight, function);
    # function(logits (B, T, vocab_size), targets (B, T)) -> a mean; None: the model adds it to aux
    'balance': ('balance_loss', None),
    'z': ('z_loss', None),
    'mtp': ('mtp_loss', None),
}


NUMBERS = {  # of a run: attributes of Run, in a checkpoint by these names; immutable, as Runs share them
    'iter_num': 0,                   # updates so far
    'best_val_loss': math.inf,
    'tokens': 0,                     # tokens read so far, by all ranks
    'skipped': 0,                    # updates left out: a loss or gradient was not finite
    'wall_s': 0.0,                   # seconds that its processes have run
    'wandb_id': None,                # of its run on Weights & Biases
}


class Run:
    """A model in training, with all that updates change and checkpoints restore. Another number is an entry
    of NUMBERS; another tensor for each parameter, as a mean of weights, is a state of an optimizer."""

    def __init__(self, model, config, machine):
        self.model = self.forward = self.evaluated = model  # or compiled; on several ranks forward is DDP's
        self.config = config
        self.machine = machine
        self.params = [w for w in model.parameters() if w.requires_grad]
        self.sharded = any(map(is_sharded, self.params))
        self.optimizers = make_optimizers(model, config)
        self.scaler = torch.amp.GradScaler(machine.device_type, enabled=machine.dtype == torch.float16)
        self.tokens_per_update = (config['gradient_accumulation_steps'] * config['batch_size']
                                  * model.config.block_size)  # by all ranks
        vars(self).update(NUMBERS)
        self.skips = self.in_a_row = 0  # updates skipped since the last row, and in a row: on the device

    def snapshot(self, optimizers=True):
        """The part of a checkpoint that changes: weights (with adapters, only theirs), numbers, optimizers.
        All ranks call it; only rank 0 gets sharded tensors, whole and on the CPU."""
        weights = self.model.state_dict()
        names = {w: name for name, w in self.model.named_parameters()}
        states = {names[w]: values for opt in self.optimizers for w, values in opt.state.items()}
        adapters = {name: w for name, w in weights.items() if '.lora_' in name}
        state = {'model': adapters or weights, **{name: getattr(self, name) for name in NUMBERS}}
        if optimizers:
            state.update(optimizer=states, scaler=self.scaler.state_dict())
        if self.sharded:
            from fsdp import gather
            state = gather(state)
        return state

    def resume(self, rest):
        """Restores a checkpoint's state, except the weights."""
        load_optimizers(self.model, self.optimizers, rest['optimizer'])
        if rest.get('scaler'):  # of a run in float16
            self.scaler.load_state_dict(rest['scaler'])
        vars(self).update((name, rest[name]) for name in NUMBERS if name in rest)
        self.best_val_loss = float(self.best_val_loss)  # nanoGPT's is a tensor
        if 'tokens' not in rest:  # of nanoGPT
            self.tokens = self.iter_num * self.tokens_per_update
        print0(f"resume: {rest['path']} at iteration {self.iter_num:,}, best val loss "
               f"{self.best_val_loss:.4f}")


def step(run, batch):
    """An iteration. Returns its row of the log, without the columns that would wait for the device."""
    lr = lr_at(run.iter_num, run.config)
    set_rates(run.optimizers, lr)
    seed_dropout(run.config['seed'], run.iter_num, RANK)
    loss, load = gradients(run, batch)
    grad_norm, moved = update(run, load)
    run.iter_num += 1
    run.tokens += run.tokens_per_update
    run.skips = run.skips + ~moved
    run.in_a_row = (run.in_a_row + 1) * ~moved
    return {'iter': run.iter_num, 'loss': loss, 'weight': sum(weight for *_, weight in batch), 'lr': lr,
            'grad_norm': grad_norm,
            # the largest load of an expert, over an even share
            'load_max': None if load is None else (load.amax(1) / load.mean(1)).max()}


def gradients(run, batch):
    """Adds up the gradients of a batch by read_batches. Returns the mean loss and the experts' load, or
    None."""
    config = run.config
    losses = []
    loads = []
    of_logits = any(function and config[setting] for setting, function in LOSSES.values())
    for i, (inputs, targets, weight) in enumerate(batch, 1):
        if isinstance(run.forward, DDP):  # gradients travel with the last micro-batch only
            run.forward.require_backward_grad_sync = i == len(batch)
        with run.machine.autocast():
            loss, aux = run.forward(inputs, targets, keep=inputs.shape[1] if of_logits else None)
        loss = loss * weight
        losses.append(loss.detach())
        if 'mtp' in aux:  # normalized by the same number of targets as the loss
            aux['mtp'] = aux['mtp'] * weight
        for name, (setting, function) in LOSSES.items():
            if function and config[setting]:
                aux[name] = function(aux['logits'], targets) * weight
            if name in aux:
                loss = loss + config[setting] * aux[name]
        if 'load' in aux:  # a model with experts
            loads.append(aux['load'])
        # if the loss is not finite, no gradient is, on any rank
        loss = loss * torch.where(loss.isfinite(), 1.0, math.nan)
        run.scaler.scale(loss / len(batch)).backward()
    return sum(losses) / len(batch), all_reduce(sum(loads)) if loads else None


def update(run, load):
    """Clips the gradients and steps, unless one is not finite; clears them. load: the experts', or None.
    Returns (norm of the gradient, whether the weights moved), 0-d tensors."""
    config = run.config
    params = run.params
    for opt in run.optimizers:
        run.scaler.unscale_(opt)
    for w in params:
        if run.sharded and not is_sharded(w) and w.grad is not None:  # FSDP averages the others
            all_reduce(w.grad).div_(RANKS)
    grad_norm = clip_grad_norm_(params, config['grad_clip'] or math.inf)
    if run.sharded:
        grad_norm = grad_norm.full_tensor()
    moved = grad_norm.isfinite()
    for opt in run.optimizers:
        # fused: the device decides, the host does not wait
        if getattr(opt, '_step_supports_amp_scaling', False) and run.machine.device != 'mps':
            opt.found_inf = (~moved).float()
        elif not moved:
            continue
        opt.step()
    if run.model.config.balance_bias and not config['lora_rank']:  # only adapters are trained
        from experts import move_balance
        move_balance(run.model, load, config['balance_rate'] * moved)
    run.scaler.update()
    run.model.zero_grad()
    return grad_norm, moved


def seed_dropout(seed, it, rank):
    """Makes dropout a function of (seed, iteration, rank)."""
    torch.manual_seed(np.random.SeedSequence((seed, it, rank)).generate_state(1)[0])


MAX_SKIPPED = 10  # skipped updates in a row that end the run


def count_skips(run):
    """Reports the updates skipped since the last row, for which it waits. Raises ValueError if MAX_SKIPPED
    were in a row."""
    skips = int(run.skips)
    run.skips = 0
    run.skipped += skips
    if skips:
        print0(f"iter {run.iter_num}: a loss or gradient was not finite, updates skipped: {skips}, "
               f"{run.skipped} in all")
    if run.in_a_row >= MAX_SKIPPED:
        diverge(run, f"{int(run.in_a_row)} losses or gradients in a row were not finite")


def diverge(run, event):
    """Notes in run.json that another attempt would fail again. Raises ValueError."""
    out_dir = run.config['out_dir']
    error = (f"{event} at iteration {run.iter_num}: the run diverged; {out_dir}/ckpt.pt still holds the last "
             "good checkpoint; lower --learning_rate, or use --dtype=float32")
    note(out_dir, status='diverged', error=error)
    raise ValueError(error)


# continuing from a checkpoint -------------------------------------------------------------------------------

def where_to_begin(init_from, out_dir):
    """init_from of this process: with 'auto', and if torchrun restarts the run, a checkpoint is resumed."""
    # but not the checkpoint of an earlier run: a run that fails early does not rename it
    launch = os.environ.get('TORCHELASTIC_RUN_ID', 'none')  # none: plain torchrun's
    restarted = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') != '0'
    same_run = restarted and launch != 'none' and read_notes(out_dir).get('launch') == launch
    if os.path.exists(f'{out_dir}/ckpt.pt') and (same_run or init_from == 'auto'):
        return 'resume'
    return 'scratch' if init_from == 'auto' else init_from


def load_to_train(init_from, out_dir, asked, meta=None, dtype=torch.float32):
    """sample.load of the model to resume, or to fine-tune on data of this meta. Raises ValueError for another
    field than those CHANGEABLE."""
    tuned = init_from != 'resume'
    changes = packed(meta) | {name: asked[name] for name in asked if name in CHANGEABLE}
    model, tokenizer, rest = load(init_from, out_dir, dtype=dtype, best=tuned, merge=tuned, **changes)
    if changes:
        with naming(changes):
            try_tokens(model)
    now = vars(GPTConfig(**rest['model_args'] | asked))
    for name in asked:
        was = rest['model_args'][name]
        if name not in CHANGEABLE and now[name] != was:
            raise ValueError(f"{name}={now[name]!r} differs from {rest['path']}, which has {was!r}: leave it "
                             "out, or train from scratch")
    return model, tokenizer, rest


def packed(meta):
    """The model_args that keep packed conversations apart; {} for other data, or none."""
    return {'document_token': meta['eot']} if meta and meta['block_size'] else {}


LENGTH = {'max_iters', 'epochs', 'tokens_per_param'}  # the last given of them decides


def run_settings(config, given, rest):
    """config, with the values of a checkpoint to resume, `rest`, for all that is not `given`. Raises
    ValueError for a change that would not fit the checkpoint's state."""
    was = rest.get('config', {})
    ours = {'out_dir', 'init_from', *given}
    lengths = [name for name in given if name in LENGTH and config[name] is not None]
    if lengths:
        ours |= LENGTH
        config = config | dict.fromkeys(LENGTH - {'max_iters', lengths[-1]})
    taken = {name: was[name] for name in config if name in was.keys() - ours and was[name] != config[name]}
    if taken:
        show(rest['path'], taken)
    config = config | taken

    def kept(config):
        fixed = marked(Path(__file__), 'fixed')
        return [config['batch_size'] * config['gradient_accumulation_steps'], *map(config.get, fixed)]
    if kept(config) != kept(config | was):
        raise ValueError(f"{rest['path']} can only be resumed with the same optimizer, adapters and "
                         "batch_size * gradient_accumulation_steps: leave them out, or fine-tune it")
    return config


def start_lora(model, config, rest):
    """Gives a loaded model adapters; returns their part of a checkpoint."""
    from zoo.weights import start_lora
    return start_lora(model, config, rest)


# checkpoints and log ----------------------------------------------------------------------------------------

def save(run, name, constant):
    """Writes a checkpoint, best.pt without optimizers; the old file is kept until all of it is written."""
    state = run.snapshot(name != 'best.pt')
    path = Path(run.config['out_dir'], name)
    temp = path.with_suffix('.tmp')
    if RANK == 0:
        try:
            torch.save(constant | state, temp)
            with open(temp, 'rb+') as f:
                os.fsync(f.fileno())  # else it may be empty after a power failure
            temp.replace(path)
        except RuntimeError as error:  # of torch.save
            raise OSError(f"cannot write {temp}: {error}: free some space") from error
        finally:
            temp.unlink(missing_ok=True)  # of a full disk


def lock_folder(out_dir):
    """Makes out_dir, and locks it until the file it returns is closed."""
    os.makedirs(out_dir, exist_ok=True)
    f = open(f'{out_dir}/lock', 'w')  # noqa: SIM115
    try:
        import fcntl
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"out_dir={out_dir}: another training writes there; give another --out_dir, or wait "
                         "for its end") from None
    except (ImportError, OSError):  # Windows, or a file system without locks
        print0(f"{out_dir}/ cannot be locked: make sure that no other run uses this folder")
    return f


def set_aside(out_dir, *patterns):
    """Renames files of an earlier run, ckpt.pt to ckpt.old-3.pt."""
    folder = Path(out_dir)
    number = 1
    while any(folder.glob(f'*.old-{number}.*')):
        number += 1
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            if '.old-' not in path.name:
                new = path.rename(path.with_suffix(f'.old-{number}{path.suffix}'))
                print0(f"{path} of the run before is now {new}")


def read_notes(out_dir):
    """The facts of run.json, {} without one."""
    with contextlib.suppress(FileNotFoundError, ValueError):  # it may be empty after a power failure
        return json.loads(Path(out_dir, 'run.json').read_text('utf-8'))
    return {}


def note(out_dir, **facts):
    """Adds facts to run.json, from which other programs read what a run is and how it ended."""
    path = Path(out_dir, 'run.json')
    temp = path.with_suffix('.tmp')
    if RANK == 0:
        temp.write_text(json.dumps(read_notes(out_dir) | facts), 'utf-8')
        temp.replace(path)


def note_failure(out_dir, kind, error, trace):
    """The excepthook of a run that has begun."""
    if read_notes(out_dir).get('status') == 'running':  # else diverge has noted why
        note(out_dir, status='failed', error=str(error) or kind.__name__)
    one_line_errors(kind, error, trace)


LOG_FIELDS = {  # columns of log.csv and their formats
    'iter': 'd', 'tokens': 'd', 'epoch': '.4f', 'loss': '.6f', 'val_loss': '.6f', 'val_bpb': '.6f',
    'lr': '.6e', 'grad_norm': '.5f', 'ms_per_iter': '.3f', 'tok_per_s': '.0f',
    'mfu': '.4f', 'load_max': '.3f', 'skipped': 'd', 'wall_s': '.2f',
}


def start_log(path, after):
    """Writes a log's header. Keeps the complete rows of an existing log up to iteration `after`."""
    rows = []
    if os.path.exists(path):
        rows = [row for row in csv.DictReader(Path(path).read_text('utf-8').splitlines())
                if None not in row.values() and int(row['iter']) <= after]
    temp = f'{path}.tmp'
    with open(temp, 'w', encoding='utf-8', newline='') as f:
        writer = csv.DictWriter(f, LOG_FIELDS, extrasaction='ignore')
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temp, path)


def log_row(path, wandb_run, row):
    """Adds a row of rank 0, numbers or tensors by LOG_FIELDS, to a log and to wandb's run, if any."""
    texts = {name: format(value, LOG_FIELDS[name]) for name, value in row.items() if value is not None}
    if RANK == 0:
        with open(path, 'a', encoding='utf-8', newline='') as f:
            csv.DictWriter(f, LOG_FIELDS).writerow(texts)
    if wandb_run:
        names = {'loss': 'train/loss', 'val_loss': 'val/loss'}  # nanoGPT's names
        wandb_run.log({names.get(name, name): float(text) for name, text in texts.items()}, step=row['iter'])


def start_wandb(run):
    """A run on Weights & Biases, the same when resumed."""
    import wandb
    found = wandb.init(project=run.config['wandb_project'], name=run.config['wandb_run_name'],
                       id=run.wandb_id, resume='allow', config=run.config | vars(run.model.config))
    run.wandb_id = found.id
    return found


def measure(run, row, seconds, n_sequences):
    """Adds the columns that wait for the device to a row by `step`. seconds: of an iteration; n_sequences: of
    an epoch."""
    tokens = run.tokens_per_update
    peak = peak_flops(run.machine.device, run.machine.dtype)
    weight = torch.as_tensor(row.pop('weight')).to(row['loss'])
    loss, weight = all_reduce(torch.stack([row['loss'], weight])).tolist()
    return row | {
        'tokens': run.tokens, 'epoch': run.tokens / (n_sequences * run.model.config.block_size),
        'loss': loss / RANKS if weight else math.nan, 'ms_per_iter': seconds * 1e3,  # nan: no targets
        'tok_per_s': tokens / seconds, 'skipped': run.skipped, 'wall_s': run.wall_s,
        'mfu': flops_per_token(run.model) * tokens / seconds / (peak * RANKS) if peak else None}


def describe(row, seconds_left):
    """An iteration's line. seconds_left: None for the first, whose time measures no speed."""
    line = f"iter {row['iter']}: loss {row['loss']:.4f}, lr {row['lr']:.2e}, norm {row['grad_norm']:.2f}, "
    if seconds_left is None:
        return f"{line}{row['ms_per_iter'] / 1e3:.1f} s with the warm-up"
    mfu = f", mfu {row['mfu']:.1%}" if row['mfu'] else ''
    return (f"{line}{row['ms_per_iter']:.1f} ms, {row['tok_per_s']:,.0f} tok/s{mfu}, "
            f"{duration(seconds_left)} left")


# settings and machine ---------------------------------------------------------------------------------------

def start_ranks(backend, device_type):
    """Joins the ranks; tensors on the CPU always go through gloo."""
    if backend in ('auto', 'nccl'):
        backend = 'cpu:gloo,cuda:nccl' if device_type == 'cuda' else 'gloo'
    timeout = datetime.timedelta(hours=1)  # saving may take minutes
    store, rank, ranks = next(dist.rendezvous('env://', timeout=timeout))
    # torchrun keeps its store when it restarts ranks: they would find the addresses of those that ended
    store = dist.PrefixStore(os.environ.get('TORCHELASTIC_RESTART_COUNT', '0'), store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


def run_length(run, n_sequences):
    """max_iters of a run, by the length that is asked for; prints it. n_sequences: of an epoch."""
    config = run.config
    model = run.model
    n_params = num_params(model)
    tokens = run.tokens_per_update
    epoch = n_sequences * model.config.block_size
    max_iters = config['max_iters']
    for length, unit in (config['epochs'], epoch), (config['tokens_per_param'], n_params):
        if length is not None:
            max_iters = run.iter_num + max(0, math.ceil((length * unit - run.tokens) / tokens))
    total = run.tokens + (max_iters - run.iter_num) * tokens
    print0(f"model: {n_params:,} parameters, {model.config.n_layer} layers, {model.config.n_embd} wide, "
           f"context {model.config.block_size}, vocabulary {model.config.vocab_size}")
    print0(f"run: {max_iters:,} iterations of {tokens:,} tokens (ranks: {RANKS}), "
           f"{total / epoch:.2f} epochs, {total / n_params:.1f} tokens per parameter; checkpoints in "
           f"{config['out_dir']}/")
    if 0 < max_iters <= config['warmup_iters']:
        print0(f"warning: warmup_iters={config['warmup_iters']} does not end before the run: the learning "
               f"rate reaches {max_iters / (config['warmup_iters'] + 1):.0%} of its peak; lower it")
    return max_iters


def check_data(folder, meta, train_bins, val_bins, config):
    """Prints what the folder holds. Raises ValueError if a GPT of this config cannot train on it."""
    if meta['block_size'] not in (None, config.block_size):
        raise ValueError(f"{folder} is packed for block_size={meta['block_size']}, but the model has "
                         f"{config.block_size}: give --block_size={meta['block_size']}, or prepare it again "
                         f"with --block_size={config.block_size}")
    for bins in train_bins, val_bins:
        bins.n_sequences(config.block_size)  # raises if there is none
        bins.vocab_size = config.vocab_size
        if meta['vocab_size'] > config.vocab_size:
            bins.check_vocabulary()
    print0(f"data: {folder}, {train_bins.n_tokens:,} tokens to train on, {val_bins.n_tokens:,} to validate")


def dataset_tokenizer(folder, of_model, rest, resumed):
    """A prepared folder's tokenizer, or None if it cannot be loaded. If the model has another one, warns or,
    resumed, raises ValueError."""
    try:
        tokenizer = load_tokenizer(folder)
    except (OSError, ImportError) as error:
        return print0(f"no tokenizer is stored with the checkpoint, so it cannot be sampled from: {error}")
    if of_model and of_model.tokens != tokenizer.tokens:
        differs = (f"{folder} was prepared with another tokenizer than the model's, so that ids stand for "
                   f"other text: python prepare.py ... --tokenizer={shlex.quote(rest['path'])}")
        if resumed:
            raise ValueError(differs)
        print0(f"warning: {differs}")
    return tokenizer


STOP = 'SIGINT', 'SIGTERM', 'SIGHUP', 'SIGUSR1'  # Ctrl-C, and what clusters and closed terminals send
TIME_IS_OVER = 1


def stop_on_signals():
    """A list to which signals in STOP add exit statuses, so that the run ends after the iteration. A second
    Ctrl-C ends it at once. A second SIGTERM is ignored, because torchrun and Slurm both send one."""
    signals = []

    def ask(number, frame):
        status = 128 + number  # as shells report it
        if number == signal.SIGINT and status in signals:
            raise KeyboardInterrupt
        if RANK == 0 and not signals:
            os.write(2, b'\nstopping after this iteration\n')  # this handler may interrupt a print
        signals.append(status)
    for name in STOP:
        number = getattr(signal, name, None)  # Windows has only SIGINT and SIGTERM
        if number and signal.getsignal(number) != signal.SIG_IGN:  # as nohup ignores SIGHUP
            signal.signal(number, ask)
    return signals


def why_stop(signals, time_limit):
    """Why the run is to end after this iteration: the exit status for a signal that some rank received,
    TIME_IS_OVER, or 0."""
    late = time_limit is not None and time.time() - START >= 60 * time_limit
    return all_reduce(torch.tensor(max([*signals, TIME_IS_OVER * late])), op=dist.ReduceOp.MAX).item()


def finish(run, reason):
    """Notes how the run ended. reason: by why_stop."""
    memory = peak_mb(run.machine.device)
    out_dir = run.config['out_dir']
    status = 'stopped' if reason > TIME_IS_OVER else 'time_limit' if reason else 'done'
    note(out_dir, status=status, peak_mb=memory)
    if not reason:
        print0(f"done: {run.iter_num:,} iterations in {duration(time.time() - START)}, best val loss "
               f"{run.best_val_loss:.4f}, peak memory {f'{memory:,.0f} MB' if memory else 'n/a'}; next: "
               f"python sample.py --out_dir={shlex.quote(out_dir)}")


# main -------------------------------------------------------------------------------------------------------

if __name__ == '__main__':
    # settings; a checkpoint to continue from, or to fine-tune
    model_args = settings.model_args
    check_values(settings, config | model_args, globals())
    init_from = config['init_from'] = where_to_begin(init_from, out_dir)
    resumed = init_from == 'resume'
    if resumed:  # by auto; the checkpoint has what the default file set
        given = {name: label for name, label in given.items() if label != 'config/default.py'}
        model_args = {name: model_args[name] for name in model_args if name in given}
    model = source_tokenizer = None
    rest = {}
    if init_from == 'scratch':  # before the data, which may be missing
        with naming(model_args):
            GPTConfig(**{'vocab_size': 2**31, **model_args})
    else:
        model, source_tokenizer, rest = load_to_train(init_from, out_dir, model_args,
                                                      None if resumed else read_meta(data_folder(dataset)))
    config = run_settings(config, given, rest if resumed else {})
    globals().update(config)

    # machine, ranks
    machine = runtime(device, dtype, seed)
    device = machine.device
    if TORCHRUN:  # after the choice of a GPU: else NCCL may take the first for all ranks, and hang
        start_ranks(backend, machine.device_type)
    torch.use_deterministic_algorithms(deterministic or device == 'cpu')
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs an eighth of a step

    # data
    folder = data_folder(dataset)
    train_bins = Bins(folder, 'train')
    val_bins = Bins(folder, 'val')
    meta = train_bins.meta
    tokenizer = dataset_tokenizer(folder, source_tokenizer, rest, resumed)

    # model
    if model is None:
        with naming(model_args):
            model = GPT(GPTConfig(**{'vocab_size': meta['vocab_size'], **packed(meta), **model_args}))
            try_tokens(model)
    check_effects(settings, config | vars(model.config), globals())
    check_data(folder, meta, train_bins, val_bins, model.config)
    lora = rest.get('lora') if resumed else start_lora(model, config, rest) if lora_rank else None
    if checkpoint_activations:
        checkpoint_blocks(model, checkpoint_activations)
    if checkpoint_activations or shard or num_params(model) > 1e8:  # short of memory
        keep_freed_memory(below=2**20)
    shard = shard and RANKS > 1  # a run that several ranks began may continue on one
    if shard:
        shard_model(model, config, machine)
    model.to(device).train()

    # the run: optimizers, length
    run = Run(model, config, machine)
    if resumed:
        run.resume(rest)
        if rest.get('data', meta) != meta:  # the best loss was on other data
            print0(f"warning: {folder} has changed since the checkpoint was written")
            run.best_val_loss = math.inf
    first_it = run.iter_num
    if all_reduce(torch.tensor(first_it), op=dist.ReduceOp.MAX) != first_it:
        raise ValueError(f"out_dir={out_dir} is not the same on all machines: let them share the folder")
    n_sequences = train_bins.n_sequences(model.config.block_size)
    max_iters = config['max_iters'] = run_length(run, n_sequences)
    accumulation, micro_batch = share_batch(gradient_accumulation_steps, batch_size, RANKS)

    # compilation, ranks
    tokens = max_iters * run.tokens_per_update / RANKS  # this rank's
    compile = resolve_compile(compile, device, flops_per_token(model) * tokens)
    if compile and not eval_only:
        print0("compiling: the first iteration takes half a minute or more")
        run.forward = compile_model(model, device)
        if 'cuda' in device:  # on CPUs compiling again costs more than it gives
            run.evaluated = run.forward
    if RANKS > 1 and not shard:
        run.forward = DDP(run.forward, gradient_as_bucket_view=True)

    # lock, log, and what is the same in all checkpoints
    constant = {
        'model_args': dataclasses.asdict(model.config), 'config': config, 'lora': lora,
        'tokenizer': tokenizer and tokenizer.state(),
        # sampling knows conversations from this data, or from the model that the run began with
        'masked': bool(train_bins.masks) or rest.get('masked', init_from != 'scratch'), 'data': meta,
        'kept': rest.get('kept', []) if resumed else [],
        'family': rest.get('family')}  # of published models, for exports
    log_file = f'{out_dir}/log.csv'
    lock = wandb_run = None
    signals = [] if eval_only else stop_on_signals()
    if RANK == 0 and not eval_only:
        lock = lock_folder(out_dir)
        if not resumed:
            set_aside(out_dir, '*.pt', 'log.csv', 'run.json')
        elif always_save_checkpoint:  # best.pt would grow old
            set_aside(out_dir, 'best.pt')
        start_log(log_file, first_it)
        note(out_dir, status='running', error=None, config=config, params=num_params(model), data=folder,
             launch=os.environ.get('TORCHELASTIC_RUN_ID'))
        sys.excepthook = functools.partial(note_failure, out_dir)
        if wandb_log:
            wandb_run = start_wandb(run)

    # the loop: train up to the next evaluation, evaluate, save
    batches = read_batches(train_bins, model.config.block_size, range(first_it, max_iters), accumulation,
                           micro_batch, seed, device)
    batch = next(batches, None)
    began = START - run.wall_s
    row = None
    reason = 0
    while True:
        goal = min(max_iters, (run.iter_num // eval_interval + 1) * eval_interval)
        timed_it = run.iter_num
        timed_at = time.time()
        while run.iter_num < goal and not (reason or eval_only):
            row = step(run, batch)
            batch = next(batches, None)  # read while the device computes
            it = run.iter_num
            if it < max_iters:
                reason = why_stop(signals, time_limit)
            # the first and the fourth show at once that it works, and how fast
            if reason or it == goal or it % log_interval == 0 or it - first_it in (1, 4):
                count_skips(run)
                now = time.time()
                seconds = (now - timed_at) / (it - timed_it)
                timed_it = it
                timed_at = now
                run.wall_s = now - began
                row = measure(run, row, seconds, n_sequences)
                print0(describe(row, None if it == first_it + 1 else (max_iters - it) * seconds))
                if (it == 1 or it % log_interval == 0) and it < goal and not reason:  # 1: where it began
                    log_row(log_file, wandb_run, row)

        if reason:  # the user, or a cluster, may not wait for an evaluation
            save(run, 'ckpt.pt', constant)
            print0(f"saved at {run.iter_num:,} of {max_iters:,}, an evaluation follows; to go on: "
                   f"--out_dir={shlex.quote(out_dir)} --init_from=resume")
        columns = evaluate_splits(run, train_bins, val_bins, meta['bytes_per_token'])
        if eval_only:
            break
        val_loss = columns.get('val_loss', math.nan)
        if columns and not math.isfinite(val_loss):
            diverge(run, f"val loss is {val_loss}")
        improved = val_loss < run.best_val_loss
        if improved:
            run.best_val_loss = val_loss
        run.wall_s = time.time() - began
        if row:  # before the checkpoint: a run killed in between writes it again
            log_row(log_file, wandb_run, row | columns | {'wall_s': run.wall_s})
        if improved and not always_save_checkpoint:
            save(run, 'best.pt', constant)
        if keep:
            save(run, f'ckpt-{run.iter_num}.pt', constant)
            kept = [*dict.fromkeys([*constant['kept'], run.iter_num])]  # not the user's own files
            constant['kept'] = kept[-keep:]
            for old in kept[:-keep] if RANK == 0 else ():
                Path(out_dir, f'ckpt-{old}.pt').unlink(missing_ok=True)
        save(run, 'ckpt.pt', constant)
        if sample_tokens and tokenizer and (RANK == 0 or shard):
            print_sample(run, tokenizer, val_bins)
        if reason or run.iter_num >= max_iters:
            break

    # the end
    if not eval_only:
        finish(run, reason)
    if lock:
        lock.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if reason > TIME_IS_OVER:
        sys.exit(reason)

r"""
Trains a model: tokens -> weights.

    python train.py                                          # config/default.py, on any machine
    python train.py config/shakespeare_char.py --n_layer=6   # a config file, then overrides, left to right
    python train.py --out_dir=out-small --init_from=resume   # goes on exactly where a run has stopped
    torchrun --standalone --nproc_per_node=8 train.py config/small.py

    # two machines: on each, with its own node_rank (prefix NCCL_IB_DISABLE=1 if they have no Infiniband)
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=10.0.0.1 --master_port=1234 \
        train.py config/small.py

Every setting below and every field of GPTConfig can be set in a config file or by --name=value. Batches are
a pure function of (seed, iteration): a resumed run, on any number of ranks that divides the batch, sees the
batches it would have seen.
"""
import time

START = time.time()  # before torch, whose import counts: wall_s is what a person waits

import collections
import csv
import dataclasses
import datetime
import functools
import math
import os
import re
import shlex
import shutil
import signal
import sys
import types
from pathlib import Path

from configurator import can_compile, choose_device, configure, print0, runtime, show

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
batch_size = 12                      # sequences of block_size tokens a micro-batch
# length of the run: of these three the one given last
max_iters = 600000                   # iterations (updates)
epochs: float | None = None          # passes over train.bin
tokens_per_param: float | None = None  # tokens for each parameter (20 is Chinchilla's, arXiv:2203.15556)
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
settings = configure(globals(), 'GPTConfig', default_file='config/default.py')
config, given = settings.config, settings.given

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from hub import load
from model import CHANGEABLE, GPT, GPTConfig, add_lora, lora_state
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
    done = min(1.0, (it - warmup) / max(1, end - warmup))
    return floor + SCHEDULES[schedule](done, cooldown) * (peak - floor)


# ranks ------------------------------------------------------------------------------------------------------

def world():
    """(this process's rank, number of ranks)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def all_reduce(x):
    """Sums a tensor over the ranks, in place, and returns it."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


# data -------------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=2)
def sequence_order(seed, epoch, n):
    """The order of the n sequences in an epoch: each once."""
    return np.random.default_rng((seed, epoch)).permutation(n)


def sequence_indices(first, count, n, seed):
    """Sequences of the global samples first, first + 1, ...: (count,) int64. An epoch is n samples."""
    sample = np.arange(first, first + count)
    return np.array([sequence_order(seed, int(s // n), n)[s % n] for s in sample])


def share_batch(gradient_accumulation_steps, batch_size, ranks):
    """Splits an iteration's sequences over the ranks: (micro-batches a rank, sequences a micro-batch, at most
    batch_size). Raises ValueError if the ranks do not divide it."""
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
    """Inputs and targets, (B, T) int64 arrays, as tensors on the device."""
    batch = [torch.from_numpy(array) for array in batch]
    if 'cuda' in device:  # a strided view would be copied through memory that is not pinned
        return [tensor.contiguous().pin_memory().to(device, non_blocking=True) for tensor in batch]
    return [tensor.to(device) for tensor in batch]


def read_batches(bins, block_size, iterations, accumulation, micro_batch, seed, device):
    """Yields this rank's micro-batches of these iterations: (inputs, targets, weight), where weight, see
    loss_weights, is None without a target mask. Any number of ranks shares the same sequences."""
    n_sequences, (rank, ranks) = bins.n_sequences(block_size), world()

    def read(it, step):
        first = ((it * accumulation + step) * ranks + rank) * micro_batch
        return bins.batch(sequence_indices(first, micro_batch, n_sequences, seed), block_size)
    for it in iterations:
        batches, weights = (read(it, step) for step in range(accumulation)), [None] * accumulation
        if bins.masks:  # all of them at once, for a weight needs the sum
            batches = list(batches)
            weights = loss_weights([np.count_nonzero(targets != -1) for _, targets in batches], device)
        for batch, weight in zip(batches, weights):
            yield *to_device(batch, device), weight


def loss_weights(counts, device):
    """Weights of a rank's micro-batches, given their numbers of targets, with which mean losses add up to the
    mean over all targets of the iteration. (micro-batches,)."""
    counts = torch.tensor(counts, dtype=torch.float32).to(device)
    total = all_reduce(counts.sum())
    return counts * (len(counts) * world()[1]) / total.clamp(min=1)


@torch.no_grad()
def evaluate(forward, model, bins, batches, batch_size, device, autocast):
    """Mean loss over the targets of `batches` batches of sequences, evenly spread, the same every time, or of
    all sequences if there are fewer; shared by the ranks. Returns (loss, number of targets)."""
    block_size, training, (rank, ranks) = model.config.block_size, model.training, world()
    n = bins.n_sequences(block_size)
    count = min(n, batches * batch_size)
    chosen = np.arange(count) * n // count
    total = total_targets = 0
    model.eval()
    for start in range(0, count, ranks * batch_size):  # as many rounds on each rank, as sharded models need
        part = chosen[start + rank * batch_size:][:batch_size]
        inputs, targets = bins.batch(np.resize(part, batch_size), block_size)  # full, so nothing recompiles
        targets = np.where(np.arange(batch_size)[:, None] < len(part), targets, -1)
        n_targets = np.count_nonzero(targets != -1)
        with autocast():
            loss, _ = forward(*to_device((inputs, targets), device))
        total += loss.item() * n_targets
        total_targets += n_targets
    model.train(training)
    total, total_targets = all_reduce(torch.tensor([total, total_targets], dtype=torch.float64)).tolist()
    return total / max(total_targets, 1), int(total_targets)


# optimizers -------------------------------------------------------------------------------------------------

class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), and
    scaled to the RMS of AdamW's updates (arXiv:2502.16982, section 2.2), as torch.optim.Muon with
    'match_rms_adamw', but for each projection of a fused matrix by itself, and all matrices of a shape at
    once. row_splits: parameter -> rows of each projection in it."""

    def __init__(self, params, lr, row_splits, momentum=0.95, weight_decay=0.1):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.row_splits = row_splits

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [w for w in group['params'] if w.grad is not None]
            for w in params:
                if not self.state[w]:
                    self.state[w]['momentum_buffer'] = torch.zeros_like(w)
            grads, buffers = [w.grad for w in params], [self.state[w]['momentum_buffer'] for w in params]
            torch._foreach_lerp_(buffers, grads, 1 - group['momentum'])
            updates = torch._foreach_lerp(grads, buffers, group['momentum'])
            torch._foreach_mul_(params, 1 - group['lr'] * group['weight_decay'])
            together, seen = collections.defaultdict(list), collections.Counter()
            for w, update in zip(params, updates):
                # sharded ones are gathered, which takes memory: one for each rank at a time
                together[is_sharded(w) and (w.shape, seen[w.shape] // world()[1])].append((w, update))
                seen[w.shape] += 1
            for pairs in together.values():
                self.move(pairs, group['lr'])

    def move(self, pairs, lr):
        """Subtracts the orthogonalised updates: pairs of a parameter and its update."""
        shapes, changes = collections.defaultdict(list), []  # (rows, columns) -> pairs of such matrices
        for w, update in pairs:
            target = w
            if is_sharded(w):
                update = update.bfloat16().full_tensor()  # orthogonalise rounds to it anyway
                target = torch.zeros_like(update, dtype=w.dtype)
                changes.append((w, target))
            rows = self.row_splits[w]
            for u, part in zip(update.split(rows, dim=-2), target.split(rows, dim=-2)):
                # experts: (experts, rows, columns)
                shapes[part.shape[-2:]].extend([(part, u)] if u.ndim == 2 else zip(part, u))
        for shape, matrices in shapes.items():
            weights, updates = zip(*matrices)
            updates = orthogonalise_shared(updates).to(weights[0].dtype)
            torch._foreach_add_(weights, list(updates), alpha=-lr * 0.2 * max(shape) ** 0.5)
        for w, change in changes:
            w.add_(shard_like(w, change))


def orthogonalise_shared(matrices):
    """Matrices of one shape, the same on all ranks -> (n, rows, columns) bfloat16. Each rank computes a share
    of them."""
    rank, ranks = world()
    if ranks == 1:
        return orthogonalise(torch.stack(matrices))
    each = -(-len(matrices) // ranks)
    mine = matrices[each * rank:][:each]
    mine += (torch.zeros_like(matrices[0]),) * (each - len(mine))
    mine = orthogonalise(torch.stack(mine)).contiguous()
    gathered = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(gathered, mine)
    return torch.cat(gathered)[:len(matrices)]


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


def make_adamw(decayed, plain, config):
    """AdamW (arXiv:1711.05101) with two groups of parameters, of which the first decays."""
    groups = [dict(params=decayed, weight_decay=config['weight_decay']), dict(params=plain, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=config['learning_rate'], betas=(config['beta1'], config['beta2']),
                             fused=True)


def adamw(model, config):
    """AdamW for everything; matrices and embeddings decay."""
    vectors = model.param_groups()['vector']
    others = {id(w) for w in vectors}
    matrices = [w for w in model.parameters() if w.requires_grad and id(w) not in others]  # nanoGPT's order
    return [make_adamw(matrices, vectors, config)]


def muon(model, config):
    """Muon for the matrices in the blocks, AdamW for the rest; matrices and embeddings decay."""
    groups = model.param_groups()
    rest = make_adamw(groups['embedding'], groups['vector'], config)
    if not groups['matrix']:  # with adapters all matrices are frozen
        return [rest]
    return [Muon(groups['matrix'], config['learning_rate'], model.row_splits(), config['momentum'],
                 config['weight_decay']), rest]


OPTIMIZERS = {  # name: function of the model and all settings -> list of optimizers that share its parameters
    'adamw': adamw,
    'muon': muon,
}


def make_optimizers(model, config):
    """The optimizers that config['optimizer'] names. config: this file's settings. Raises ValueError if a
    parameter of the model has no optimizer, or two, or has one but is frozen."""
    optimizers = OPTIMIZERS[config['optimizer']](model, config)
    taken = [id(w) for opt in optimizers for group in opt.param_groups for w in group['params']]
    wrong = [name for name, w in model.named_parameters() if taken.count(id(w)) != w.requires_grad]
    if wrong:
        raise ValueError(f"optimizer={config['optimizer']!r} must take each parameter once, but not "
                         f"{', '.join(wrong[:5])}: see OPTIMIZERS in train.py")
    return optimizers


def load_optimizers(optimizers, states):
    """Puts saved states back, of nanoGPT's single optimizer too, whose parameters stand in the same order."""
    for opt, state in zip(optimizers, [states] if isinstance(states, dict) else states, strict=True):
        params = [w for group in opt.param_groups for w in group['params']]
        for i, values in state['state'].items():
            for name, value in values.items():
                if value.ndim:
                    w = params[i]
                    values[name] = shard_like(w, value[:len(w)])  # older files pad the vocabulary
        # with this run's settings, of which `fused` decides where the states are put
        opt.load_state_dict({'state': state['state'], 'param_groups': opt.state_dict()['param_groups']})


# memory -----------------------------------------------------------------------------------------------------

def shard_model(model, machine):
    """Spreads weights, gradients and optimizer states over the ranks (FSDP2's fully_shard, arXiv:2304.11277):
    a block's weights are gathered, in the compute dtype, only while it computes. Moves the model
    to the device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    mesh = init_device_mesh(machine.device_type, (dist.get_world_size(),))
    compute = None if machine.dtype == torch.float32 else machine.dtype
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in (*model.h, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)


def checkpoint_blocks(model, every):
    """Keeps of every n-th block only its inputs; backward computes the rest anew (arXiv:1604.06174)."""
    for block in model.h[every - 1::every]:
        block.forward = types.MethodType(forward_recomputed, block)


def forward_recomputed(block, x, context):
    """A block's forward; one function for all blocks, so that they are compiled once. Raises ValueError for
    anything that the block hands on in the context but routing."""
    def forward(x):
        own = dataclasses.replace(context, routing=None if context.routing is None else [])
        x = type(block).forward(block, x, own)
        for field in dataclasses.fields(own):
            if field.name != 'routing' and getattr(own, field.name) is not getattr(context, field.name):
                raise ValueError(f"checkpoint_activations would lose {field.name}, which a block hands on")
        return x, own.routing
    x, routing = checkpoint(forward, x, use_reentrant=False)
    if context.routing is not None:
        context.routing.extend(routing)
    return x


def is_sharded(w):
    """Whether w is a DTensor (whose module is slow to import)."""
    return hasattr(w, 'full_tensor')


def gather(value, wanted=True):
    """Sharded tensors in a dict or list gathered, on the CPU; other values as they are. All ranks call it
    together; those without a use for the result (wanted=False) get None for each."""
    if isinstance(value, dict):
        return {name: gather(each, wanted) for name, each in value.items()}
    if isinstance(value, list):
        return [gather(each, wanted) for each in value]
    if not is_sharded(value):
        return value
    value = value.full_tensor()
    return value.cpu() if wanted else None


def shard_like(w, value):
    """A tensor that all ranks have, sharded as w is; if w is not, as it is."""
    if not is_sharded(w):
        return value
    from torch.distributed.tensor import distribute_tensor
    value = value.to(w.device, w.dtype)
    return distribute_tensor(value, w.device_mesh, w.placements, src_data_rank=None)


# one iteration ----------------------------------------------------------------------------------------------

def gradients(forward, batch, batches, accumulation, autocast, scaler, balance_loss, z_loss):
    """Adds up the gradients of an iteration's micro-batches: `batch`, and others that `batches` yields.
    Returns the mean loss, the experts' load (None without experts), and the next iteration's first batch."""
    losses, loads = torch.zeros((), device=batch[0].device), []
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
            loads.append(aux['load'])
        loss = loss / loss.isfinite()  # else by 0: then no gradient is finite, which all ranks see
        scaler.scale(loss / accumulation).backward()
        batch = next(batches, None)  # read while the device computes
    return losses / accumulation, all_reduce(sum(loads)) if loads else None, batch


def update(model, params, optimizers, scaler, grad_clip, expert_load, balance_rate):
    """Clips the gradients, steps, moves the bias that balances experts; where a gradient is not finite, none
    of it. Clears the gradients. Returns their norm and whether the weights moved, 0-d tensors."""
    for opt in optimizers:
        scaler.unscale_(opt)
    grad_norm = gather(torch.nn.utils.clip_grad_norm_(params, grad_clip or math.inf,
                                                      foreach=params[0].device.type != 'mps'))
    moved = grad_norm.isfinite()
    for opt in optimizers:
        if takes_found_inf(opt, params[0]) and not scaler.is_enabled():
            opt.found_inf = (~moved).float()  # the device decides, the host does not wait
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
    """Whether opt, of weights like w, skips a step by itself where its found_inf, 0-d, is 1."""
    return (getattr(opt, '_step_supports_amp_scaling', False) and w.device.type in ('cpu', 'cuda')
            and not is_sharded(w))


def seed_dropout(seed, it, rank, device):
    """Makes dropout a function of (seed, iteration, rank)."""
    generator = torch.default_generator if device == 'cpu' else torch  # torch's seeds CUDA on a CPU too
    generator.manual_seed(int(np.random.SeedSequence((seed, it, rank)).generate_state(1)[0]))


def relative_change(params, before):
    """The norm of an update relative to that of the weights before it. Overwrites `before`."""
    norm = torch.nn.utils.get_total_norm
    size = norm(before)
    torch._foreach_sub_(before, [w.detach() for w in params])
    return (gather(norm(before)) / gather(size)).item()


MAX_SKIPPED = 10  # updates in a row end the run


def diverge(event, it, out_dir):
    """Ends a run by a ValueError. event: a clause."""
    raise ValueError(f"{event} at iteration {it}: the run diverged; {out_dir}/ keeps the checkpoint before; "
                     "lower --learning_rate, or use --dtype=float32")


# going on from a checkpoint ---------------------------------------------------------------------------------

def load_to_train(init_from, out_dir, asked, meta=None):
    """hub.load of the model to resume, with its adapters, or to fine-tune on data of this meta, in float32.
    Of the GPTConfig fields asked for, only those that are CHANGEABLE may differ: else ValueError."""
    resumed = init_from == 'resume'
    changes = {name: value for name, value in asked.items() if name in CHANGEABLE}
    if meta and not resumed:
        changes = {**packed(meta), **changes}
    model, tokenizer, rest = load(init_from, out_dir, dtype=torch.float32, best=not resumed,
                                  merge=not resumed, **changes)
    for name, value in asked.items():
        was = rest['model_args'][name]
        if name not in CHANGEABLE and value not in (None, was):
            raise ValueError(f"{name}={value!r} differs from {rest['path']}, which has {was!r}: leave it "
                             "out, or train from scratch")
    return model, tokenizer, rest


def packed(meta):
    """The model_args that keep conversations packed into sequences apart; {} for other data."""
    return {} if meta['block_size'] is None else {'document_token': meta['eot']}


LENGTH = {'max_iters', 'epochs', 'tokens_per_param'}   # the one given last replaces the others
COMMAND = {'out_dir', 'init_from', 'eval_only'}        # settings of a command line, not of a run
MACHINE = {'device', 'dtype', 'compile', 'backend'}    # nanoGPT's files have those of any machine
FIXED = {'optimizer', 'lora_rank', 'lora_alpha', 'lora_targets'}  # a checkpoint holds their states


def run_settings(config, given, rest):
    """config, with of LENGTH the one given last; if the run is resumed (rest: its checkpoint), with the
    checkpoint's values of the names that are not in `given`. Raises ValueError if one of FIXED differs."""
    last = next((name for name in reversed(given) if name in LENGTH and config[name] is not None), None)
    if last:
        config = {**config, **dict.fromkeys(LENGTH - {'max_iters', last})}
    was = rest and {'optimizer': 'adamw', 'lora_rank': 0, **rest.get('config', {})}  # nanoGPT's lacks these
    changed = {name: was[name] for name in config if was.get(name, config[name]) != config[name]}
    for name in FIXED & changed.keys() & given.keys():
        raise ValueError(f"{name}={config[name]!r} differs from {rest['path']}, which has {was[name]!r}: "
                         f"leave it out, or fine-tune with --init_from={shlex.quote(rest['path'])}")
    ours = given.keys() | COMMAND | (LENGTH if last else set()) | (set() if 'runtime' in rest else MACHINE)
    taken = {name: value for name, value in changed.items() if name not in ours}
    if taken:
        show(rest['path'], taken)
    return {**config, **taken}


def start_lora(model, config, rest):
    """Gives a trained model adapters, and returns their part of a checkpoint. rest: as load returns it.
    Raises ValueError if the model will not stay where it is."""
    path = rest.get('path')
    if path is None or rest.get('lora'):
        raise ValueError(f"lora_rank={config['lora_rank']} needs a trained model without adapters: give "
                         "--init_from; of a run with adapters `python hub.py export` makes one")
    if os.path.realpath(os.path.dirname(path)) == os.path.realpath(config['out_dir']):
        raise ValueError(f"out_dir={config['out_dir']} holds {path}, which the adapters need as it is: give "
                         "another --out_dir")
    lora = {'rank': config['lora_rank'], 'alpha': config['lora_alpha'],
            'targets': [name.strip() for name in config['lora_targets'].split(',')],
            'base': os.path.abspath(path) if os.path.exists(config['init_from']) else config['init_from']}
    add_lora(model, lora['rank'], lora['alpha'], lora['targets'])
    return lora


@dataclasses.dataclass
class Progress:
    """What changes in a run besides weights and optimizers; a checkpoint holds it under the same names."""
    iter_num: int = 0                # updates so far
    best_val_loss: float = math.inf
    skipped: int = 0                 # updates left out, for a loss or gradient that was not finite
    wall_s: float = 0.0              # seconds from the first start, less the pauses between processes
    wandb_id: str | None = None      # of its run on Weights & Biases


def resume(rest, optimizers, scaler):
    """Puts optimizers and scaler back to where the checkpoint has them. Returns the checkpoint's Progress."""
    if not rest.get('optimizer'):
        raise ValueError(f"{rest['path']} has no optimizer state, so it cannot be resumed: fine-tune with "
                         f"--init_from={shlex.quote(rest['path'])}")
    load_optimizers(optimizers, rest['optimizer'])
    if rest.get('scaler'):  # none in files that were not written under float16
        scaler.load_state_dict(rest['scaler'])
    progress = Progress(**{name: rest[name] for name in vars(Progress()) if name in rest})
    progress.best_val_loss = float(progress.best_val_loss)  # nanoGPT's is a tensor
    print0(f"resume: {rest['path']} at iteration {progress.iter_num:,}, best val loss "
           f"{progress.best_val_loss:.4f}")
    return progress


# checkpoints and log ----------------------------------------------------------------------------------------

def snapshot(model, progress, optimizers=(), scaler=None, wanted=True):
    """The changing part of a checkpoint: weights (of adapters, where there are any), Progress, optimizers.
    All ranks must call it together."""
    state = {'model': lora_state(model) or model.state_dict(), **dataclasses.asdict(progress)}
    if optimizers:
        state.update(optimizer=[opt.state_dict() for opt in optimizers], scaler=scaler.state_dict())
    return gather(state, wanted)


def save_run(out_dir, name, constant, *changing):
    """Writes a checkpoint on rank 0: its constant part, and a snapshot of the changing one."""
    rank, _ = world()
    state = snapshot(*changing, wanted=rank == 0)
    if rank == 0:
        save(os.path.join(out_dir, name), {**constant, **state})


def save(path, state):
    """Writes all of a checkpoint, or nothing, with the old file kept. Raises OSError with the reason."""
    try:
        torch.save(state, path + '.tmp')
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        Path(path + '.tmp').unlink(missing_ok=True)
        raise OSError(f"cannot write {path}, what was there is kept; is the disk full? "
                      f"({str(error).splitlines()[0][:100]})") from None
    os.replace(path + '.tmp', path)


def keep_last(out_dir, it, keep):
    """Keeps a copy of ckpt.pt, that of iteration `it`, and removes all but the last `keep` copies."""
    shutil.copyfile(Path(out_dir, 'ckpt.pt'), Path(out_dir, f'ckpt-{it}.pt'))
    copies = [path for path in Path(out_dir).glob('ckpt-*.pt') if '.old-' not in path.name]
    for path in sorted(copies, key=os.path.getmtime)[:-keep]:
        path.unlink()


def lock_folder(out_dir):
    """Takes out_dir for this process until it ends. Returns the open file, to be kept. Raises ValueError if
    another training has taken it."""
    f = open(os.path.join(out_dir, 'lock'), 'w')  # noqa: SIM115
    try:
        import fcntl
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"out_dir={out_dir}: another training writes there; give another --out_dir, or wait "
                         "for its end") from None
    except (ImportError, OSError):  # Windows, or a file system without locks
        print0(f"{out_dir}/ cannot be locked: see that no other training writes there")
    return f


def prepare_out_dir(out_dir, resumed, keep_best):
    """Renames the files of an earlier run in out_dir, ckpt.pt to ckpt.old-3.pt; of a resumed run only a
    best.pt that is no longer kept, which sample.py would go on reading."""
    names = r'best\.pt' if resumed else r'(best|ckpt|ckpt-\d+)\.pt|log\.csv'
    earlier = [path for path in sorted(Path(out_dir).iterdir()) if re.fullmatch(names, path.name)]
    if resumed and keep_best:
        if not earlier:  # nanoGPT's ckpt.pt is its best
            shutil.copyfile(Path(out_dir, 'ckpt.pt'), Path(out_dir, 'best.pt'))
        return
    number = 1
    while any(Path(out_dir).glob(f'*.old-{number}.*')):
        number += 1
    for path in earlier:
        new = path.rename(path.with_name(f'{path.stem}.old-{number}{path.suffix}'))
        print0(f"{path} of the run before is now {new}")


LOG_FIELDS = {  # the columns of log.csv, and how each is written
    'iter': 'd', 'tokens': 'd', 'epoch': '.4f', 'loss': '.6f', 'val_loss': '.6f', 'val_bpb': '.6f',
    'lr': '.6e', 'grad_norm': '.5f', 'update_ratio': '.3e', 'ms_per_iter': '.3f', 'tok_per_s': '.0f',
    'mfu': '.4f', 'load_max': '.3f', 'skipped': 'd', 'wall_s': '.2f',
}


def start_log(path, after):
    """A log with its header, and of one that is there, cut or with other columns, the rows up to `after`."""
    rows = []
    if after and os.path.exists(path):
        with open(path, encoding='utf-8', newline='') as f:
            rows = [row for row in csv.DictReader(f)
                    if None not in row.values() and int(row['iter']) <= after]
    with open(path + '.tmp', 'w', encoding='utf-8', newline='') as f:
        writer = csv.DictWriter(f, LOG_FIELDS, extrasaction='ignore')
        writer.writeheader()
        writer.writerows(rows)
    os.replace(path + '.tmp', path)


def log_row(path, wandb, row):
    """Adds a row, a dict of numbers by LOG_FIELDS, to a log and to wandb's run, if there is one."""
    row = {name: value for name, value in row.items() if value is not None}
    with open(path, 'a', encoding='utf-8', newline='') as f:
        csv.writer(f).writerow(format(row[name], kind) if name in row else ''
                               for name, kind in LOG_FIELDS.items())
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
    """A run on Weights & Biases, or run_id's, continued. None where wandb is missing or refuses: it must not
    cost the run."""
    try:
        import wandb
        return wandb.init(project=project, name=name, config=settings, id=run_id, resume='allow')
    except Exception as error:
        print0(f"no wandb logging, log.csv has everything ({type(error).__name__}: {error})")
        return None


# settings and machine ---------------------------------------------------------------------------------------

CHOICES = {'optimizer': OPTIMIZERS, 'lr_schedule': SCHEDULES, 'compile': (True, False, 'auto')}
LIMITS = {  # (lowest, highest): the settings that must be between
    (1, 1e18): 'batch_size gradient_accumulation_steps eval_interval eval_iters log_interval',
    (0, 1e18): 'max_iters epochs tokens_per_param time_limit learning_rate min_lr warmup_iters keep seed '
               'lr_decay_iters weight_decay grad_clip balance_loss z_loss balance_rate lora_rank '
               'sample_tokens checkpoint_activations',
    (0, 0.999999): 'beta1 beta2 momentum', (1e-9, 1): 'cooldown', (1e-9, 1e18): 'lora_alpha',
}
UNUSED = {  # flag: the setting, or field of GPTConfig, and its values, with which it has no effect
    'momentum': ('optimizer', ['adamw']),
    'lr_schedule': ('decay_lr', [False]), 'cooldown': ('lr_schedule', ['cosine', 'linear']),
    'balance_loss': ('n_expert', [None]), 'z_loss': ('n_expert', [None]),
    'balance_rate': ('balance_bias', [False]),
    'lora_alpha': ('lora_rank', [0]), 'lora_targets': ('lora_rank', [0]),
}


def check_settings(config):
    """Raises ValueError for settings that are no choice, or out of their limits."""
    wrong = [f"{name}={config[name]!r} is none of {', '.join(map(str, known))}"
             for name, known in CHOICES.items() if config[name] not in known]
    wrong += [f"{name}={config[name]} must be at least {low:g} and at most {high:g}"
              for (low, high), names in LIMITS.items() for name in names.split()
              if config[name] is not None and not low <= config[name] <= high]
    if wrong:
        raise ValueError('; '.join(wrong))


def check_effect(given, settings):
    """Raises ValueError for a flag without effect; config files serve many runs. given: as configure returns
    it; settings: this file's and the model's."""
    for name, (other, values) in UNUSED.items():
        if given.get(name) == 'flags' and settings[other] in values:
            raise ValueError(f"--{name} has no effect with {other}={settings[other]}: leave it out")


def start_ranks(backend, device):
    """Joins the ranks; tensors on the CPU go by gloo in any case."""
    kind, index = choose_device(device)
    if kind == 'cuda':
        torch.cuda.set_device(index)
    if backend in ('auto', 'nccl'):
        backend = 'cpu:gloo,cuda:nccl' if kind == 'cuda' else 'gloo'
    dist.init_process_group(backend, timeout=datetime.timedelta(hours=1),  # saving may take minutes
                            device_id=torch.device(kind, index) if 'nccl' in backend else None)


def dtype_name(dtype):
    return str(dtype).removeprefix('torch.')


def resolve_runtime(device, dtype, seed, compile, was):
    """configurator.runtime, and compile. was: the runtime in a checkpoint, or None: on the same device and as
    many ranks 'auto' means what it meant there, so that a run resumes exactly."""
    if not was or (was['device_type'], was['ranks']) != (choose_device(device)[0], world()[1]):
        return runtime(device, dtype, seed), compile
    dtype = was['dtype'] if dtype == 'auto' else dtype
    return (runtime(device, dtype, seed, threads=was['threads']),
            was['compile'] if compile == 'auto' else compile)


def eager_seconds(steps, n_layer, flops):
    """About how long so many micro-batches take uncompiled: a layer has some 300 operators of 5 us, and two
    cores reached 1.2e11 FLOP/s."""
    return steps * (n_layer * 1.5e-3 + flops / 1.2e11)


def resolve_compile(compile, device, seconds):
    """compile='auto' -> bool. seconds: of the run, uncompiled on a CPU, where compiling takes some 40 and
    saves a third."""
    if compile != 'auto':
        return compile
    return ('cuda' in device or device == 'cpu' and seconds > 120) and can_compile(device)


def compile_model(model, device):
    """Returns what computes model(idx, targets) compiled; the model stays as it is. torch compiles a sharded
    one by block."""
    # on CPUs eager's random numbers are the fast ones, and the same with and without compilation
    options = None if 'cuda' in device else {'fallback_random': True}
    return torch.compile(model, dynamic=False, options=options)


PEAK_TFLOPS = {  # dense, 16 bits, sums in float32: NVIDIA's data sheets, by what the device's name contains
    'H200': 989, 'H100 PCIe': 756, 'H100': 989, 'B200': 2250, 'A100': 312, 'A10': 125, 'L40S': 362, 'L4': 121,
    'V100-PCIE': 112, 'V100': 125, 'T4': 65, 'RTX 5090': 210, 'RTX 4090': 165, 'RTX 3090': 71,
}


def peak_flops(device, dtype):
    """FLOP/s of the device at 16 bits, or None if unknown: then there is no MFU."""
    if 'cuda' not in device or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items()  # a Ti is another card
                 if re.search(rf'\b{part}\b(?! (Ti|D|NVL|Laptop|Max-Q)\b)', name)), None)


def peak_mb(device):
    """Most memory used so far: of the CUDA device, or of this process; None on Windows."""
    if 'cuda' in device:
        return torch.cuda.max_memory_allocated(device) / 2**20
    if sys.platform == 'win32':
        return None
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == 'darwin' else 2**10)


def data_folder(dataset):
    """data/<dataset>, or dataset itself where that alone is a folder."""
    folder = os.path.join('data', dataset)
    return dataset if os.path.isdir(dataset) and not os.path.isdir(folder) else folder


def check_data(folder, meta, train_bins, val_bins, config):
    """Raises ValueError if a GPT of this config cannot train on a prepared folder."""
    if meta['block_size'] not in (None, config.block_size):
        raise ValueError(f"{folder} is packed for block_size={meta['block_size']}, but the model has "
                         f"{config.block_size}: give --block_size={meta['block_size']}, or prepare it again "
                         f"with --block_size={config.block_size}")
    for bins in (train_bins, val_bins):
        bins.n_sequences(config.block_size)  # an error, if there is none
        if meta['vocab_size'] > config.vocab_size:
            bins.check_vocabulary(config.vocab_size, 'prepare it with the tokenizer of the model, or give a '
                                                     'model from scratch a larger --vocab_size')
        bins.vocab_size = config.vocab_size


def dataset_tokenizer(folder, source_tokenizer, rest, resumed):
    """A prepared folder's tokenizer, or None. Where the model to start from (rest) has another: a warning, or
    if it is resumed a ValueError."""
    try:
        tokenizer = load_tokenizer(folder)
    except (OSError, ImportError) as error:
        print0(f"no tokenizer is stored with the checkpoint, so it cannot be sampled from: {error}")
        return None
    if source_tokenizer and source_tokenizer.tokens != tokenizer.tokens:
        source = data_folder(rest['config']['dataset']) if 'config' in rest else rest['path']
        differs = (f"{folder} was prepared with another tokenizer than the model's, so that ids stand for "
                   f"other text: python prepare.py ... --tokenizer={shlex.quote(source)}")
        if resumed:
            raise ValueError(differs)
        print0(f"warning: {differs}")
    return tokenizer


def stop_on_signals(rank):
    """Ctrl-C and SIGTERM fill the list that is returned, which ends the run after the current iteration; a
    second signal leaves at once."""
    stop = []

    def ask(number, frame):
        signal.signal(number, signal.default_int_handler)
        stop.append(number)
        if rank == 0:
            os.write(2, b'\nstopping after this iteration\n')  # print may be interrupted by this very handler
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    return stop


# main -------------------------------------------------------------------------------------------------------

if __name__ == '__main__':
    # where to start from, and settings, which a resumed run takes from its checkpoint
    check_settings(config)
    model, source_tokenizer, rest, resumed = None, None, {}, init_from == 'resume'
    if init_from != 'scratch':
        model, source_tokenizer, rest = load_to_train(init_from, out_dir, settings.model_args,
                                                      None if resumed else read_meta(data_folder(dataset)))
    config = run_settings(config, given, rest if resumed else {})
    globals().update(config)
    if 'RANK' in os.environ:  # of torchrun
        start_ranks(backend, device)
    rank, ranks = world()
    accumulation, micro_batch = share_batch(gradient_accumulation_steps, batch_size, ranks)
    folder = data_folder(dataset)
    train_bins, val_bins, meta = Bins(folder, 'train'), Bins(folder, 'val'), read_meta(folder)
    tokenizer = dataset_tokenizer(folder, source_tokenizer, rest, resumed)
    facts = torch.tensor([train_bins.n_tokens, val_bins.n_tokens, rest.get('iter_num', 0)])
    if (all_reduce(facts.clone()) != ranks * facts).any():
        raise ValueError(f"rank {rank} has read other files than another, {facts.tolist()} train tokens, val "
                         "tokens and iterations: share out_dir and data between the nodes, or copy them")

    # machine
    machine, compile = resolve_runtime(device, dtype, seed, compile, resumed and rest.get('runtime'))
    device = machine.device
    torch.use_deterministic_algorithms(deterministic or device == 'cpu')
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid; costs an eighth of a step

    # model
    if model is None:
        model = GPT(GPTConfig(**{'vocab_size': meta['vocab_size'], **packed(meta), **settings.model_args}))
        if model.config.n_expert_active == 1 and model.config.norm_topk_prob:  # published ones exist
            raise ValueError("n_expert_active=1: the weight of one expert is always 1, so that its router "
                             "learns nothing: --norm_topk_prob=False")
    check_data(folder, meta, train_bins, val_bins, model.config)
    check_effect(given, {**config, **vars(model.config)})
    lora = rest.get('lora') if resumed else start_lora(model, config, rest) if lora_rank else None
    if checkpoint_activations:
        checkpoint_blocks(model, int(checkpoint_activations))
    shard = shard and ranks > 1  # a run may go on here that began on several
    if shard:
        if lora or machine.dtype == torch.float16:
            raise ValueError("shard=True goes with neither lora_rank nor dtype=float16: leave one out")
        shard_model(model, machine)
    model.to(device).train()
    block_size, params = model.config.block_size, [w for w in model.parameters() if w.requires_grad]
    n_sequences, n_params = train_bins.n_sequences(block_size), model.num_params()

    # length
    sequences_per_iter = gradient_accumulation_steps * batch_size
    tokens_per_iter = sequences_per_iter * block_size
    length = f'max_iters={max_iters}'
    if epochs is not None:
        length, max_iters = f'epochs={epochs:g}', math.ceil(epochs * n_sequences / sequences_per_iter)
    if tokens_per_param is not None:
        length = f'tokens_per_param={tokens_per_param:g}'
        max_iters = math.ceil(tokens_per_param * n_params / tokens_per_iter)
    config['max_iters'] = max_iters
    decay_end = max_iters if lr_decay_iters is None else lr_decay_iters
    floor = learning_rate / 10 if min_lr is None else min_lr
    flops_per_iter = model.flops_per_token() * tokens_per_iter
    print0(f"model: {n_params:,} parameters, {model.config.n_layer} layers, {model.config.n_embd} wide, "
           f"context {block_size}, vocabulary {model.config.vocab_size}")
    if lora:
        print0(f"adapters: {sum(w.numel() for w in params):,} parameters of rank {lora['rank']} are trained")
    print0(f"data: {folder}, {train_bins.n_tokens:,} tokens to train on, {val_bins.n_tokens:,} to validate")
    if train_bins.masks:
        print0(f"target mask: {train_bins.n_targets:,} and {val_bins.n_targets:,} of them are learnt; "
               f"document_token={model.config.document_token}")
    print0(f"run: {max_iters:,} iterations ({length}) of {tokens_per_iter:,} tokens ({accumulation} x "
           f"{micro_batch} sequences on {ranks} rank{'s' * (ranks > 1)}), "
           f"{max_iters * sequences_per_iter / n_sequences:.2f} epochs, "
           f"{max_iters * tokens_per_iter / n_params:.1f} tokens a parameter; a checkpoint every "
           f"{eval_interval} iterations to {out_dir}/")
    if 0 < max_iters <= warmup_iters:
        print0(f"warning: warmup_iters={warmup_iters} goes on to the end: the learning rate comes to "
               f"{max_iters / (warmup_iters + 1):.0%} of its peak; lower --warmup_iters")

    # optimizers, compilation, ranks
    optimizers = make_optimizers(model, config)
    scaler = torch.amp.GradScaler(machine.device_type, enabled=machine.dtype == torch.float16)
    progress = resume(rest, optimizers, scaler) if resumed else Progress()
    del rest, source_tokenizer  # their memory
    compile = resolve_compile(compile, device, eager_seconds(max_iters * accumulation, model.config.n_layer,
                                                             flops_per_iter / (accumulation * ranks)))
    forward = evaluated = model
    if compile and not eval_only:
        print0('compiling: the first iteration takes half a minute or more')
        forward = compile_model(model, device)
        if 'cuda' in device:  # on a CPU compiling again costs more than it gives
            evaluated = forward
    if ranks > 1 and not shard:
        forward = DDP(forward, device_ids=[device] if 'cuda' in device else None,
                      gradient_as_bucket_view=True)

    # files, signals
    log_file = os.path.join(out_dir, 'log.csv')
    lock, wandb, stop = None, None, []
    if rank == 0 and not eval_only:
        os.makedirs(out_dir, exist_ok=True)
        lock = lock_folder(out_dir)
        prepare_out_dir(out_dir, resumed, keep_best=not always_save_checkpoint)
        start_log(log_file, progress.iter_num)
        if wandb_log:
            wandb = start_wandb(wandb_project, wandb_run_name,
                                {**config, **dataclasses.asdict(model.config)}, progress.wandb_id)
        if wandb:
            progress.wandb_id = wandb.id
    if not eval_only:
        stop = stop_on_signals(rank)
    constant = {'model_args': dataclasses.asdict(model.config), 'config': config, 'lora': lora,
                'tokenizer': tokenizer and tokenizer.state(), 'masked': bool(train_bins.masks),
                'runtime': dict(device_type=machine.device_type, ranks=ranks, threads=machine.threads,
                                compile=compile, dtype=dtype_name(machine.dtype))}

    # the loop: train up to the next evaluation, evaluate, save
    began, first_it, peak = START - progress.wall_s, progress.iter_num, peak_flops(device, machine.dtype)
    batches = read_batches(train_bins, block_size, range(first_it, max_iters), accumulation, micro_batch,
                           seed, device)
    batch, row, stopping, skipped, in_a_row = next(batches, None), None, False, progress.skipped, 0
    while True:
        goal = min(max_iters, (progress.iter_num // eval_interval + 1) * eval_interval)
        timed_it, timed_at = progress.iter_num, time.time()
        while progress.iter_num < goal and not stopping and not eval_only:
            lr = lr_at(progress.iter_num, learning_rate, floor, warmup_iters, decay_end,
                       lr_schedule if decay_lr else None, cooldown)
            for group in [group for opt in optimizers for group in opt.param_groups]:
                group['lr'] = lr
            seed_dropout(seed, progress.iter_num, rank, device)
            loss, expert_load, batch = gradients(forward, batch, batches, accumulation, machine.autocast,
                                                 scaler, balance_loss, z_loss)
            at_goal = progress.iter_num + 1 == goal
            before = [w.detach().clone() for w in params] if at_goal else None
            grad_norm, moved = update(model, params, optimizers, scaler, grad_clip, expert_load,
                                      0 if lora else balance_rate)
            progress.iter_num += 1
            skipped, in_a_row = skipped + ~moved, (in_a_row + 1) * ~moved  # on the device: nobody waits

            it = progress.iter_num
            if time_limit is not None and time.time() - START >= 60 * time_limit and not stop:
                print0(f"time_limit={time_limit:g} minutes are over: stopping")
                stop.append(signal.SIGTERM)
            stopping = all_reduce(torch.tensor(float(bool(stop)))).item() > 0  # on any rank
            logs, early = it % log_interval == 0 or at_goal, it - first_it in EARLY
            if logs or early or stopping:
                if skipped > progress.skipped:
                    print0(f"iter {it}: a loss or gradient was not finite, updates skipped: "
                           f"{skipped - progress.skipped}, {skipped} in all")
                progress.skipped = int(skipped)
                if in_a_row >= MAX_SKIPPED:
                    diverge(f"{in_a_row} losses or gradients in a row were not finite", it, out_dir)
                seconds = (time.time() - timed_at) / (it - timed_it)
                timed_it, timed_at = it, time.time()
                row = {'iter': it, 'tokens': it * tokens_per_iter,
                       'epoch': it * sequences_per_iter / n_sequences,
                       'loss': all_reduce(loss).item() / ranks, 'lr': lr, 'grad_norm': float(grad_norm),
                       'update_ratio': relative_change(params, before) if before else None,
                       'ms_per_iter': seconds * 1e3, 'tok_per_s': tokens_per_iter / seconds,
                       'mfu': flops_per_iter / seconds / (peak * ranks) if peak else None,
                       'load_max': None if expert_load is None else  # the largest, in even shares
                       (expert_load.amax(1) / expert_load.mean(1)).max().item(),
                       'skipped': progress.skipped, 'wall_s': time.time() - began}
                if not stop:  # Ctrl-C ends the `tee` of `| tee log` too: save before printing
                    print0(describe(row, None if it == first_it + 1 else (max_iters - it) * seconds))
                if rank == 0 and logs and not at_goal and not stopping:  # else it waits for its val_loss
                    log_row(log_file, wandb, row)

        if stopping:  # saved first, for whoever sent the signal may not wait for an evaluation
            progress.wall_s = time.time() - began
            save_run(out_dir, 'ckpt.pt', constant, model, progress, optimizers, scaler)
        val_loss, count = evaluate(evaluated, model, val_bins, eval_iters, batch_size, device,
                                   machine.autocast)
        # of the training text a quarter as many, to compare with
        quarter = max(1, min(eval_iters, val_bins.n_sequences(block_size) // batch_size) // 4)
        train_loss, _ = evaluate(evaluated, model, train_bins, quarter, batch_size, device,
                                 machine.autocast)
        bpb = val_loss / math.log(2) / meta['bytes_per_token'] if meta['bytes_per_token'] else None
        bits = f", {bpb:.4f} bits per byte" if bpb else ''
        print0(f"step {progress.iter_num}: train loss {train_loss:.4f}, val loss {val_loss:.4f}{bits}, "
             f"perplexity {math.exp(min(val_loss, 99)):.2f} ({count:,} tokens)")
        if not math.isfinite(val_loss):
            diverge(f"val loss is {val_loss}", progress.iter_num, out_dir)
        if eval_only:
            break
        improved = val_loss < progress.best_val_loss
        progress.best_val_loss, progress.wall_s = min(val_loss, progress.best_val_loss), time.time() - began
        if rank == 0 and row:  # before the checkpoint: a run that is killed in between writes it anew
            log_row(log_file, wandb, {**row, 'val_loss': val_loss, 'val_bpb': bpb, 'wall_s': progress.wall_s})
        if improved and not always_save_checkpoint:
            save_run(out_dir, 'best.pt', constant, model, progress)
        save_run(out_dir, 'ckpt.pt', constant, model, progress, optimizers, scaler)
        if keep and rank == 0:
            keep_last(out_dir, progress.iter_num, keep)
        if sample_tokens and tokenizer and (rank == 0 or shard):  # sharded, all ranks compute the same
            model.eval()
            first_token = val_bins.read([0], block_size)[0, :1].tolist()
            with machine.autocast():
                text, _ = complete(model, tokenizer, [first_token], sample_tokens, seed=seed)
            model.train()
            print0(f"{'-' * 15} sample:\n{text[0]}\n{'-' * 15}")
        if stopping or progress.iter_num >= max_iters:
            break

    stopped = stopping and progress.iter_num < max_iters
    if stopped:
        print0(f"saved and stopped at {progress.iter_num:,} of {max_iters:,}; go on with: "
             f"{'torchrun ...' if ranks > 1 else 'python'} {shlex.quote(sys.argv[0])} "
             f"--out_dir={shlex.quote(out_dir)} --init_from=resume")
    elif not eval_only:
        memory = peak_mb(device)
        print0(f"done: {progress.iter_num:,} iterations in {duration(time.time() - START)}, best val loss "
             f"{progress.best_val_loss:.4f}, peak memory {f'{memory:,.0f} MB' if memory else 'n/a'}; next: "
             f"python sample.py --out_dir={shlex.quote(out_dir)}")
    if lock:
        lock.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if stopped:  # as a shell reports a program that a signal has ended
        sys.exit(128 + (stop or [signal.SIGTERM])[0])

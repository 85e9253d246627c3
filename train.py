"""
Trains a model on a folder of tokens.

    python train.py                                          # uses config/default.py; runs on any machine
    python train.py config/shakespeare_char.py --n_layer=6   # a config file, then overrides
    python train.py --out_dir=out-small --init_from=resume   # continues a run
    python train.py --init_from=Qwen/Qwen3-0.6B --dataset=mine  # uses config/finetune.py
    python train.py config/small.py --init_from=auto         # resumes if out_dir has a checkpoint
    torchrun --standalone --nproc_per_node=8 train.py config/small.py

Config files and --name=value set the settings below and the fields of GPTConfig.

The main program is at the end. A new run renames an earlier run's files in out_dir. On Ctrl-C,
SIGTERM or time_limit, a run saves ckpt.pt, then evaluates; --init_from=resume continues it bit for bit.
"""
import time

START = time.time()  # before slow imports

import collections
import contextlib
import copy
import csv
import dataclasses
import datetime
import functools
import gc
import json
import math
import os
import shlex
import signal
import sys
from pathlib import Path

from configurator import (
    UserError,
    check_effects,
    check_values,
    checked,
    compile_model,
    configure,
    cpu_has_bfloat16,
    duration,
    keep_freed_memory,
    marked,
    naming,
    package,
    peak_flops,
    peak_mb,
    print0,
    reading,
    resolve_compile,
    runtime,
    show,
    use_parts,
)

# input and output
out_dir = 'out'                      # folder of the run's files
dataset = 'openwebtext'              # data/<dataset>, made by prepare.py
init_from = 'scratch'                # scratch, resume (from out_dir), auto (resume if out_dir has ckpt.pt),
                                     # or a model to fine-tune (file, folder, hub id)
eval_interval = 2000                 # iterations per evaluation and checkpoint [>= 1]
eval_iters = 200                     # batches of val.bin to evaluate; a quarter as many of train.bin [>= 1]
eval_only = False                    # evaluate and stop
log_interval = 1                     # iterations per log line [>= 1]
always_save_checkpoint = True        # True: if an earlier ckpt.pt was better, best.pt keeps it;
                                     # False: best.pt has the best weights, without optimizers
keep = 0                             # ckpt-<iteration>.pt files to keep
sample_tokens = 0                    # tokens to sample after each evaluation; 0: none
wandb_log = False                    # also log to Weights & Biases
wandb_project = 'owt'
wandb_run_name = 'gpt2'
# batch
gradient_accumulation_steps = 40     # micro-batches per iteration, over all ranks [>= 1] [<= 1000000]
batch_size = 12                      # sequences of block_size tokens per micro-batch [>= 1] [<= 1000000]
# length of the run: max_iters, epochs or tokens_per_param, whichever is given last
max_iters = 600000                   # updates [length]
epochs: float | None = None          # passes over train.bin [length]
tokens_per_param: float | None = None  # training tokens; Chinchilla uses 20 (arXiv:2203.15556) [length]
time_limit: float | None = None      # minutes until the run saves and stops
# optimizer
optimizer = 'adamw'                  # adamw, muon (only for matrices in blocks) [in OPTIMIZERS] [fixed]
learning_rate = 6e-4                 # peak, for AdamW and Muon
lr_scales = {}                       # factors for parameter groups (model.GROUPS): {'embedding': 12.0}
weight_decay = 1e-1                  # decays matrices and embeddings by learning_rate * weight_decay
beta1 = 0.9                          # AdamW [< 1]
beta2 = 0.95                         # AdamW [< 1]
momentum = 0.95                      # Muon [< 1] [if optimizer == 'muon']
grad_clip = 1.0                      # largest gradient norm; 0: no clipping
# further losses, which are not reported
mtp_loss = 0.3                       # weight of multi-token prediction [if mtp]
# experts [if n_expert]
balance_loss = 0.01                  # weight of the load-balancing loss
z_loss = 0.0                         # weight of the z-loss on router logits; ST-MoE uses 1e-3
balance_rate = 0.001                 # change of expert biases per iteration [if balance_bias]
# low-rank adapters (LoRA)
lora_rank = 0                        # 0: no adapters [fixed]
# adapters [if lora_rank]
lora_alpha = 16.0                    # scales outputs by lora_alpha / lora_rank [> 0] [fixed]
lora_targets = 'c_attn,c_proj,c_fc'  # linear layers to adapt [fixed]
# learning rate
warmup_iters = 2000                  # linear warm-up
decay_lr = True                      # False: constant after warm-up
# the decay [if decay_lr]
lr_schedule = 'cosine'               # cosine, linear, wsd (constant, then linear) [in SCHEDULES]
lr_decay_iters: int | None = None    # end of the decay; None: max_iters [>= 1]
min_lr: float | None = None          # final rate; None: a tenth of the peak [<= learning_rate]
# a cooldown [if lr_schedule not in WITHOUT_COOLDOWN]
cooldown = 0.4                       # share of the iterations after the warm-up [> 0] [<= 1]
# system
backend = 'auto'                     # auto: nccl on CUDA, otherwise gloo [if TORCHRUN]
device = 'auto'                      # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'                       # auto, float32, bfloat16, float16
compile: bool | str = 'auto'         # torch.compile; auto: for long runs [in (True, False, 'auto')]
shard = False                        # spread weights over the ranks (FSDP) [if TORCHRUN]
checkpoint_activations: bool | int = False  # n: backward recomputes every n-th block
deterministic = False                # bit-exact on CUDA too, but slower
seed = 1337                          # seed of weights, batches, dropout [< 2**64]
settings = configure(globals(), 'GPTConfig', default_file='config/default.py', tune_file='config/finetune.py')
config = settings.config
given = settings.given
os.environ.setdefault('PYTORCH_ALLOC_CONF', os.environ.get(
    'PYTORCH_CUDA_ALLOC_CONF', 'expandable_segments:True'))  # reduces fragmentation of CUDA memory
os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # torch < 2.13 needs it for deterministic matmul

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from model import (
    GPT,
    GROUPS,
    GPTConfig,
    flops_per_token,
    make_block,
    move_balance,
    num_params,
    row_splits,
    try_tokens,
)
from prepare import Bins, count_bytes, data_folder, identity, load_tokenizer, read_meta

# learning rate ----------------------------------------------------------------------------------------------

SCHEDULES = {  # completed share of the decay -> rate, from 1 (peak) to 0 (min_lr)
    'cosine': lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    'linear': lambda done: 1 - done,
    'wsd': lambda done: 1 - done,  # warm-up, stable, decay: arXiv:2404.06395
}
WITHOUT_COOLDOWN = 'cosine', 'linear'  # others stay constant until their cooldown


def lr_at(it, config):
    """The learning rate of iteration `it`."""
    peak = config['learning_rate']
    warmup = config['warmup_iters']
    if it < warmup:
        return peak * (it + 1) / (warmup + 1)
    if not config['decay_lr']:
        return peak
    share = 1.0 if config['lr_schedule'] in WITHOUT_COOLDOWN else config['cooldown']
    end = config['lr_decay_iters'] or config['max_iters']
    left = (end - it) / max(1, end - warmup)
    done = 1 - min(1.0, max(0.0, left) / share)
    floor = peak / 10 if config['min_lr'] is None else config['min_lr']
    return floor + SCHEDULES[config['lr_schedule']](done) * (peak - floor)


def set_rates(optimizers, lr):
    """Sets learning rates."""
    for opt in optimizers:
        for group in opt.param_groups:
            group['lr'] = lr * group.get('lr_scale', 1.0)


# ranks ------------------------------------------------------------------------------------------------------

TORCHRUN = 'RANK' in os.environ
RANK = int(os.environ.get('RANK', 0))
RANKS = int(os.environ.get('WORLD_SIZE', 1))


def all_reduce(x, **op):
    """Sums a tensor over ranks in place, or applies another op."""
    if dist.is_initialized():
        dist.all_reduce(x, **op)
    return x


# data -------------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=2)
def sequence_order(seed, epoch, n):
    """A permutation of n sequences. If n > 2**20, it has parts of equal size. Each part contains all
    sequences of random blocks (64 adjacent sequences), shuffled, so that the disk reads whole blocks."""
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(n)
    n_blocks = -(-n // 64)
    parts = -(-n // 2**20)
    part = (rng.permutation(n_blocks) * parts // n_blocks).astype(np.uint16)
    return order[np.argsort(part[order // 64], kind='stable')]


def sequence_indices(first, count, n, seed):
    """Indices (count,) of the sequences that the run reads after `first` sequences."""
    return np.array([sequence_order(seed, i // n, n)[i % n] for i in range(first, first + count)])


def share_batch(gradient_accumulation_steps, batch_size, ranks):
    """Returns micro-batches per rank and sequences per micro-batch."""
    total = gradient_accumulation_steps * batch_size
    if total % ranks:
        raise UserError(f"gradient_accumulation_steps={gradient_accumulation_steps} times "
                        f"batch_size={batch_size} is {total} sequences, which {ranks} ranks do not divide; "
                        "change one of them")
    share = total // ranks
    accumulation = -(-share // batch_size)
    while share % accumulation:
        accumulation += 1
    return accumulation, share // accumulation


def to_device(arrays, device):
    """Arrays as tensors on the device."""
    batch = map(torch.from_numpy, arrays)
    if 'cuda' in device:  # without contiguous(), pinning is lost
        return [tensor.contiguous().pin_memory().to(device, non_blocking=True) for tensor in batch]
    return [tensor.to(device) for tensor in batch]


@dataclasses.dataclass
class Batch:
    """A micro-batch. The mean of weight * loss over all ranks' micro-batches is the mean loss per target."""
    inputs: torch.Tensor   # (B, T)
    targets: torch.Tensor  # (B, T), -1: no target
    weight: torch.Tensor | float = 1.0  # 0-d


def read_batches(run, bins):
    """Yields [Batch], this rank's micro-batches, for each iteration."""
    config = run.config
    device = run.machine.device
    block_size = run.model.config.block_size
    n_sequences = bins.n_sequences(block_size)
    accumulation, micro_batch = share_batch(config['gradient_accumulation_steps'], config['batch_size'],
                                            RANKS)
    for it in range(run.iter_num, config['max_iters']):
        firsts = [((it * accumulation + step) * RANKS + RANK) * micro_batch for step in range(accumulation)]
        arrays = [bins.batch(sequence_indices(first, micro_batch, n_sequences, config['seed']), block_size)
                  for first in firsts]
        counts, = to_device([np.float32([np.count_nonzero(targets != -1) for _, targets in arrays])], device)
        weights = counts * (accumulation * RANKS) / all_reduce(counts.sum()).clamp(min=1)
        yield [Batch(*to_device(array, device), weight) for array, weight in zip(arrays, weights)]


def evaluation_batches(run, bins, batches):
    """Spreads at most `batches` batches evenly over the data. Yields this rank's share, (inputs, targets)."""
    batch_size = run.config['batch_size']
    n = bins.n_sequences(run.model.config.block_size)
    count = min(n, batches * batch_size)
    for start in range(0, count, RANKS * batch_size):  # sharding needs equally many forward calls per rank
        places = np.arange(batch_size) + start + RANK * batch_size
        # fill the last batch: a rank may have no sequences left
        inputs, targets = bins.batch(places % count * n // count, run.model.config.block_size)
        yield inputs, np.where(places[:, None] < count, targets, -1)


@contextlib.contextmanager
def evaluating(run):
    """A context with the model in evaluation mode and with autocast."""
    run.model.eval()
    with run.machine.autocast():
        yield
    run.model.train()


@torch.no_grad()
def evaluate(run, bins, batches, tokenizer=None):
    """Returns the mean loss (nan without targets), the target count and the targets' byte count."""
    totals = np.zeros(3)
    with evaluating(run):
        for inputs, targets in evaluation_batches(run, bins, batches):
            n_targets = np.count_nonzero(targets != -1)
            loss, _ = run.model(*to_device((inputs, targets), run.machine.device))
            n_bytes = count_bytes(targets, tokenizer) if tokenizer else (
                n_targets * (bins.meta['bytes_per_token'] or 0))
            totals += loss.item() * n_targets, n_targets, n_bytes
    total, n_targets, n_bytes = all_reduce(torch.from_numpy(totals)).tolist()
    return total / n_targets if n_targets else math.nan, int(n_targets), n_bytes


@torch.no_grad()
def print_by_position(run, bins, batches):
    """Prints the mean loss at positions 1, 2, 3 to 4, 5 to 8 ... of sequences."""
    block_size = run.model.config.block_size
    sums = torch.zeros(2, block_size, dtype=torch.float64)  # losses, targets
    with evaluating(run):
        for arrays in evaluation_batches(run, bins, batches):
            inputs, targets = to_device(arrays, run.machine.device)
            losses = F.cross_entropy(run.model(inputs).mT, targets, ignore_index=-1, reduction='none')
            sums += torch.stack([losses, targets != -1]).sum(1).cpu()
    all_reduce(sums)
    print0('positions  loss')
    ends = [2**i for i in range((block_size - 1).bit_length())] + [block_size]
    for start, end in zip([0, *ends], ends):
        total, count = sums[:, start:end].sum(1).tolist()
        print0(f"{start + 1:,} to {end:,}  {total / count if count else math.nan:.4f}")


def evaluate_splits(run, train_bins, val_bins, tokenizer):
    """Prints train and val loss. Returns log columns."""
    n = run.config['eval_iters']
    val_loss, count, n_bytes = evaluate(run, val_bins, n, tokenizer)
    train_loss, *_ = evaluate(run, train_bins, max(1, n // 4))
    bpb = val_loss * count / math.log(2) / n_bytes if n_bytes else None
    bits = f", {bpb:.4f} bits per byte" if bpb else ''
    print0(f"step {run.iter_num}: train loss {train_loss:.4f}, val loss {val_loss:.4f}{bits}, "
           f"perplexity {math.exp(min(val_loss, 99)):.2f} ({count:,} tokens)")
    return {'train_loss': train_loss, 'val_loss': val_loss, 'val_bpb': bpb} if count else {}


# optimizers -------------------------------------------------------------------------------------------------

class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum (https://kellerjordan.github.io/posts/muon), scaled to the RMS of
    AdamW's updates (arXiv:2502.16982). row_splits: parameter -> rows per projection in a fused matrix."""
    _step_supports_amp_scaling = True  # step() reads found_inf
    found_inf = 0.0                    # may be a 0-d tensor; 1: change nothing

    def __init__(self, params, lr, row_splits, momentum):
        super().__init__(params, {'lr': lr, 'momentum': momentum})
        self.row_splits = row_splits

    @torch.no_grad()
    def step(self):
        valid = 1 - self.found_inf
        for group in self.param_groups:
            lr = group['lr'] * valid
            moves = []
            for w in group['params']:
                if w.grad is None:
                    continue
                if w not in self.state:
                    self.state[w]['momentum_buffer'] = torch.zeros_like(w)
                momentum = self.state[w]['momentum_buffer']
                grad = w.grad
                if torch.is_tensor(valid):  # an invalid step leaves momentum unchanged
                    grad = torch.where(valid > 0, grad, momentum)
                momentum.lerp_(grad, 1 - group['momentum'])
                w.mul_(1 - lr * group['weight_decay'])
                moves.append((w, grad.lerp(momentum, group['momentum']), self.row_splits[w]))
            subtract_orthogonalised([move for move in moves if not is_sharded(move[0])], lr)
            subtract_whole([move for move in moves if is_sharded(move[0])], lr)


def subtract_orthogonalised(moves, lr):
    """moves: [(weight (..., rows, columns), its update, rows per projection)]"""
    batches = collections.defaultdict(list)  # shape of a projection -> [(projection, its update)]
    for w, update, rows in moves:
        for pair in zip(w.split(rows, dim=-2), update.split(rows, dim=-2)):
            batches[pair[0].shape[-2:]].append(pair)
    for shape, pairs in batches.items():
        updates = torch.cat([rounded(update).reshape(-1, *shape) for _, update in pairs])
        changes = orthogonalise_shared(updates).float() * (lr * 0.2 * max(shape) ** 0.5)
        for (w, _), change in zip(pairs, changes.split([w.numel() // shape.numel() for w, _ in pairs])):
            w.sub_(change.view_as(w))


def orthogonalise_shared(x):
    """Returns orthogonalise(x); each rank computes some matrices."""
    share = slice(RANK * len(x) // RANKS, (RANK + 1) * len(x) // RANKS)
    found = torch.zeros_like(x)
    found[share] = orthogonalise(x[share])
    return all_reduce(found)


def rounded(x):
    """x in bfloat16, unless that is slow on this CPU."""
    return x if x.device.type == 'cpu' and not cpu_has_bfloat16() else x.bfloat16()


def orthogonalise(x):
    """Brings singular values of x (n, rows, columns) near 1 with Keller Jordan's five Newton-Schulz steps."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


def param_groups(model, config, chosen):
    """An optimizer's param_groups, for parameters whose tag.group is in `chosen`. Without lr_scales,
    parameters with weight decay are first, as in nanoGPT."""
    groups = {(True, 1.0): [], (False, 1.0): []}
    for name, w in model.named_parameters():
        group = model.tags[name].group
        if w.requires_grad and group in chosen:
            groups.setdefault((GROUPS[group], config['lr_scales'].get(group, 1.0)), []).append(w)
    return [{'params': params, 'weight_decay': config['weight_decay'] * decays / scale, 'lr_scale': scale}
            for (decays, scale), params in groups.items() if params]


def adamw(model, config, chosen=GROUPS):
    """AdamW (arXiv:1711.05101)."""
    return [torch.optim.AdamW(param_groups(model, config, chosen), lr=config['learning_rate'],
                              betas=(config['beta1'], config['beta2']), fused=True)]


def muon(model, config):
    """Muon for matrices in blocks, AdamW for other parameters."""
    others = adamw(model, config, GROUPS.keys() - {'matrix'})
    matrices = param_groups(model, config, ['matrix'])
    if not matrices:  # LoRA freezes them
        return others
    return [Muon(matrices, config['learning_rate'], row_splits(model), config['momentum']), *others]


OPTIMIZERS = {  # name -> function(model, settings) that returns a list of optimizers
    'adamw': adamw,
    'muon': muon,
}


def make_optimizers(model, config):
    """Raises UserError unless lr_scales are valid and each trained parameter has exactly one optimizer."""
    groups = {tag.group for tag in model.tags.values()}
    scales = config['lr_scales']
    if not (scales.keys() <= groups and all(type(x) in (int, float) and x > 0 for x in scales.values())):
        raise UserError(f"lr_scales={scales} must have a number above 0 for groups of this model's "
                        f"parameters: {', '.join(sorted(groups))}")
    optimizers = OPTIMIZERS[config['optimizer']](model, config)
    optimized = [id(w) for opt in optimizers for group in opt.param_groups for w in group['params']]
    for name, w in model.named_parameters():
        if optimized.count(id(w)) != w.requires_grad:
            raise UserError(f"parameter {name} is assigned to no optimizer, or to several: see OPTIMIZERS")
    return optimizers


def load_optimizers(model, optimizers, states):
    """Loads states by parameter name (nanoGPT: by position)."""
    owners = {w: opt for opt in optimizers for group in opt.param_groups for w in group['params']}
    weights = dict(model.named_parameters())
    if 'param_groups' in states:
        weights = dict(enumerate(owners))
        states = states['state']
    for key, state in states.items():
        w = weights[key]
        for name, value in state.items():
            if torch.is_tensor(value) and value.ndim:
                like = owners[w].state[w].get(name, w)  # states not yet created have w's shape
                value = value[:len(like)]  # a smaller block_size has fewer position embeddings
                if value.shape != like.shape:
                    raise UserError(f"the checkpoint's {name} {tuple(value.shape)} does not fit a parameter "
                                    f"{tuple(w.shape)}: resume with the code that trained it")
                if is_sharded(w):
                    value = split_like(w, value)
            owners[w].state[w][name] = value.to(w.device) if torch.is_tensor(value) else value


# memory -----------------------------------------------------------------------------------------------------

def check_memory(config):
    """Raises UserError if the blocks' weights exceed ten times this machine's memory."""
    with torch.device('meta'):
        block = make_block(config, config.n_layer - 1)
    if os.name == 'posix' and config.n_layer * sum(w.nbytes for w in block.parameters()) > 10 * os.sysconf(
            'SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'):
        raise UserError("the model needs more than ten times this machine's memory: lower n_layer or n_embd")


def checkpoint_blocks(model, every):
    """Backward recomputes every n-th block (arXiv:1604.06174)."""
    for block in model.h[every - 1::every]:
        block.forward = functools.partial(forward_recomputed, block)


def forward_recomputed(block, x, context):
    """Copies the context for backward, because later blocks change it."""
    before = copy.copy(context)

    def forward(x):
        context = copy.copy(before)
        context.handed = {**before.handed}
        context.routing = []
        return type(block).forward(block, x, context), context.handed, context.routing

    x, context.handed, routing = checkpoint(forward, x, use_reentrant=False)
    if context.routing is not None:
        context.routing.extend(routing)
    return x


# sharding (FSDP2, arXiv:2304.11277) -------------------------------------------------------------------------
# Code that changes weights outside an optimizer's step must reshard() the model and each block, or forward
# may use old weights. Only sharded runs execute the imports, which are slow.

def shard_model(model, machine):
    """Splits matrices, which the forward pass gathers block by block in the compute dtype. Vectors and
    routers stay whole and in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    if machine.dtype == torch.float16 or not all(w.requires_grad for w in model.parameters()):
        raise UserError("shard=True cannot be combined with dtype=float16 or lora_rank: leave one out")
    mesh = dist.init_device_mesh(machine.device_type, (RANKS,))
    policy = MixedPrecisionPolicy(machine.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    whole = {w for name, w in model.named_parameters()
             if not GROUPS[model.tags[name].group] or 'router.' in name}
    for part in *model.h, model:
        fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=whole)


def split_like(w, value):
    """This rank's part of a whole tensor, split like w."""
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(value.to(w.device), w.device_mesh, w.placements, src_data_rank=None)


def gather(state):
    """The state, but split tensors become whole on rank 0's CPU and None on other ranks. All ranks must call
    this function."""
    from torch.distributed.tensor import DTensor
    from torch.utils._pytree import tree_map_only

    def whole(x):
        x = x.full_tensor()
        return x.cpu() if RANK == 0 else None
    return tree_map_only(DTensor, whole, state)


def subtract_whole(moves, lr):
    """subtract_orthogonalised for split matrices. Gathers RANKS matrices at a time."""
    moves.sort(key=lambda move: move[0].shape)
    while moves:
        some = moves[:RANKS]
        del moves[:RANKS]
        whole = [(torch.zeros(w.shape, device=w.device), update.full_tensor(), rows)
                 for w, update, rows in some]
        subtract_orthogonalised(whole, lr)
        for (w, *_), (change, *_) in zip(some, whole):
            w += split_like(w, change)


def is_sharded(w):
    """Whether w is a DTensor."""
    return hasattr(w, 'full_tensor')


# one iteration ----------------------------------------------------------------------------------------------

NUMBERS = {  # Run's attributes in checkpoints, with immutable initial values
    'iter_num': 0,
    'best_val_loss': math.inf,
    'best_iter': None,
    'tokens': 0,                     # tokens read by all ranks
    'skipped': 0,                    # skipped updates, which were not finite
    'wall_s': 0.0,                   # seconds, including those before resuming
    'wandb_id': None,
}


class Run:
    """A model in training."""

    def __init__(self, model, config, machine):
        self.model = self.forward = model  # forward may later be compiled, or wrapped in DDP
        self.config = config
        self.machine = machine
        self.params = [w for w in model.parameters() if w.requires_grad]
        self.sharded = any(map(is_sharded, self.params))
        self.mixed = contextlib.nullcontext  # context for mixing split and whole tensors
        if self.sharded:
            from torch.distributed.tensor.experimental import implicit_replication
            self.mixed = implicit_replication
        self.optimizers = make_optimizers(model, config)
        self.scaler = torch.amp.GradScaler(machine.device_type, enabled=machine.dtype == torch.float16)
        self.tokens_per_update = (config['gradient_accumulation_steps'] * config['batch_size']
                                  * model.config.block_size)  # on all ranks
        vars(self).update(NUMBERS)
        self.skips = 0  # skipped updates since the last report
        self.in_a_row = 0  # consecutive skipped updates
        self.saved = None  # iteration of ckpt.pt
        self.patient = None  # process group of wait_for_rank_0

    def wait_for_rank_0(self):
        """Uses `patient`: writing a large checkpoint can exceed the timeout of other process groups."""
        if self.patient:
            dist.barrier(self.patient)

    def state(self, optimizers=True):
        """A checkpoint's changing part. All ranks must call state(); only rank 0 gets gathered tensors."""
        weights = self.model.state_dict()
        names = {w: name for name, w in self.model.named_parameters()}
        states = {names[w]: values for opt in self.optimizers for w, values in opt.state.items()}
        adapters = {name: w for name, w in weights.items() if '.lora_' in name}
        state = {'model': adapters or weights, **{name: getattr(self, name) for name in NUMBERS}}
        if optimizers:
            state.update(optimizer=states, scaler=self.scaler.state_dict())
        if self.sharded:
            state = gather(state)
        return state

    def resume(self, source):
        load_optimizers(self.model, self.optimizers, source.get('optimizer', {}))
        if source.get('scaler'):  # only for float16
            self.scaler.load_state_dict(source['scaler'])
        vars(self).update((name, source[name]) for name in NUMBERS if name in source)
        self.best_val_loss = float(self.best_val_loss)  # nanoGPT stores a tensor
        if 'tokens' not in source:  # nanoGPT lacks it
            self.tokens = self.iter_num * self.tokens_per_update
        self.saved = self.iter_num
        if self.iter_num and sum(len(opt.state) for opt in self.optimizers) < len(self.params):
            print0('warning: the checkpoint lacks states of optimizers, so the run will not continue exactly')
        print0(f"resume: {source['path']} at iteration {self.iter_num:,}, best val loss "
               f"{self.best_val_loss:.4f}")


def step(run, batch):
    """Runs an iteration. Returns its log row, which may have tensors on the device."""
    lr = lr_at(run.iter_num, run.config)
    set_rates(run.optimizers, lr)
    seed_dropout(run.config['seed'], run.iter_num, RANK)
    row = gradients(run, batch)
    load = row.pop('load')
    grad_norm, moved = update(run, load)
    run.iter_num += 1
    run.tokens += run.tokens_per_update
    run.skips = run.skips + ~moved
    run.in_a_row = (run.in_a_row + 1) * ~moved
    if load is not None:
        row['load_max'] = (load.amax(1) / load.mean(1)).max()
    return row | {'iter': run.iter_num, 'lr': lr, 'grad_norm': grad_norm}


def gradients(run, batch):
    """Adds up gradients of micro-batches. batch: [Batch]. Returns this rank's 'loss' and 'weight', and all
    ranks' 'load'."""
    losses = []
    loads = []
    for i, micro in enumerate(batch, 1):
        if isinstance(run.forward, DDP):  # exchange gradients once per iteration
            run.forward.require_backward_grad_sync = i == len(batch)
        with run.machine.autocast():
            loss, aux = run.forward(micro.inputs, micro.targets)
        losses.append(loss.detach() * micro.weight)
        further = sum(run.config[f'{name}_loss'] * x for name, x in aux.items() if x.requires_grad)
        loss = (loss + further) * micro.weight
        if 'load' in aux:
            loads.append(aux['load'])
        # if a loss is not finite, nan gradients make all ranks skip the update
        loss = loss * torch.where(loss.isfinite(), 1.0, math.nan)
        run.scaler.scale(loss / len(batch)).backward()
    return {'loss': sum(losses) / len(batch), 'weight': sum(micro.weight for micro in batch),
            'load': all_reduce(sum(loads)) if loads else None}  # (layers, experts)


def update(run, load):
    """Clips gradients. If all are finite, updates weights. Returns 0-d tensors: the gradient norm, and
    whether weights changed."""
    config = run.config
    params = run.params
    for opt in run.optimizers:
        run.scaler.unscale_(opt)
    for w in params:
        if run.sharded and not is_sharded(w) and w.grad is not None:  # FSDP averages only sharded gradients
            all_reduce(w.grad).div_(RANKS)
    with run.mixed():
        grad_norm = clip_grad_norm_(params, config['grad_clip'] or math.inf)
        if run.sharded:
            grad_norm = grad_norm.full_tensor()
        moved = grad_norm.isfinite()
        for opt in run.optimizers:
            # fused optimizers can skip a step without waiting for the device
            if getattr(opt, '_step_supports_amp_scaling', False) and run.machine.device != 'mps':
                opt.found_inf = (~moved).float()
            elif not moved:
                continue
            opt.step()
    if run.model.config.balance_bias and not config['lora_rank']:  # LoRA trains only adapters
        move_balance(run.model, load, config['balance_rate'] * moved)
    run.scaler.update()
    run.model.zero_grad()
    return grad_norm, moved


def seed_dropout(seed, it, rank):
    """Makes dropout a function of (seed, iteration, rank)."""
    torch.manual_seed(np.random.SeedSequence((seed, it, rank)).generate_state(1)[0])


MAX_SKIPPED = 10  # skipped updates in a row


def count_skips(run):
    """Reports skipped updates. Raises UserError after MAX_SKIPPED."""
    skips, in_a_row = torch.stack([run.skips, run.in_a_row]).tolist()
    run.skips = 0
    run.skipped += skips
    if skips:
        print0(f"iter {run.iter_num}: a loss or gradient was not finite, updates skipped: {skips}, "
               f"{run.skipped} in all")
    if in_a_row >= MAX_SKIPPED:
        diverge(run, f"{in_a_row} losses or gradients in a row were not finite")


def diverge(run, event):
    """Notes the divergence in run.json. Raises UserError."""
    out_dir = run.config['out_dir']
    error = (f"{event} at iteration {run.iter_num}: the run diverged; {out_dir}/ckpt.pt, if it exists, is "
             "the last good checkpoint; lower --learning_rate, or use --dtype=float32")
    note(out_dir, status='diverged', error=error)
    raise UserError(error)


# continuing from a checkpoint -------------------------------------------------------------------------------

def load_to_train(init_from, out_dir, asked, meta=None, dtype=torch.float32, longest=None):
    """Calls sample.load to resume, or to fine-tune on data with this meta. asked: GPTConfig's fields that
    the user set; longest: see model.changed. Raises UserError if a field outside CHANGEABLE changes."""
    from sample import CHANGEABLE, load
    tuned = init_from != 'resume'
    changes = document_args(meta) | {name: asked[name] for name in asked if name in CHANGEABLE}
    model, tokenizer, source = load(init_from, out_dir, dtype=dtype, best=tuned, merge=tuned, longest=longest,
                                    **changes)
    if changes:
        with naming(changes):
            try_tokens(model)
    with naming(asked):
        now = vars(GPTConfig(**source['model_args'] | asked))
    for name in asked:
        was = source['model_args'][name]
        if name not in CHANGEABLE and now[name] != was:
            raise UserError(f"{name}={now[name]!r} differs from {source['path']}, which has {was!r}: "
                            "leave it out, or train from scratch")
    return model, tokenizer, source


def document_args(meta):
    """Fields of GPTConfig that keep packed conversations apart; {} for other data."""
    return {'document_token': meta['eot']} if meta and meta['packed'] else {}


def run_settings(config, given, source):
    """Returns config, with the checkpoint's values for settings not given. source: a resumed checkpoint,
    or {}."""
    was = source.get('config', {})
    ours = {'out_dir', 'init_from', *given}
    length = {*marked(Path(__file__), 'length')}
    lengths = [name for name in given if name in length and config[name] is not None]
    if lengths:
        ours |= length
        config = config | dict.fromkeys(length - {'max_iters', lengths[-1]})
    restored = {name: checked(source['path'], name, was[name], settings.known) for name in config
                if name in was.keys() - ours and was[name] != config[name]}
    if restored:
        show(source['path'], restored)
        check_values(settings._replace(given=restored), restored, globals())
    config = config | restored

    def fixed(config):
        names = marked(Path(__file__), 'fixed')
        return [config['batch_size'] * config['gradient_accumulation_steps'], *map(config.get, names)]
    if fixed(config) != fixed(config | was):
        raise UserError(f"{source['path']} can only be resumed with the same optimizer, adapters and "
                        "batch_size * gradient_accumulation_steps: leave them out, or fine-tune it")
    return config


# checkpoints and log ----------------------------------------------------------------------------------------

@contextlib.contextmanager
def replacing(path):
    """Opens a file that, once complete and on the disk, replaces `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have renamed the folder
    temp = path.with_name(f'.{path.name}.tmp')
    try:
        with open(temp, 'wb') as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)  # exists if the disk was full


def save(run, name, constant):
    """Writes a checkpoint. Keeps the earlier ckpt.pt as best.pt if it was the best."""
    state = run.state(name != 'best.pt')
    path = Path(run.config['out_dir'], name)
    if name == 'ckpt.pt':
        if RANK == 0 and run.saved == run.best_iter != run.iter_num:
            with contextlib.suppress(OSError):  # best.pt exists, or the disk supports no links
                os.link(path, path.with_name('best.pt'))
        run.saved = run.iter_num
    if RANK == 0:
        try:
            with replacing(path) as f:
                torch.save(constant | state, f)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch.save hides it
                raise error.__context__ from None
            raise
    run.wait_for_rank_0()


def lock_folder(out_dir):
    """Locks out_dir until the returned file is closed."""
    os.makedirs(out_dir, exist_ok=True)
    f = open(f'{out_dir}/lock', 'a')  # noqa: SIM115 ('a' keeps a user's file intact)
    try:
        import fcntl
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{out_dir}/ is in use by another run: wait until that run ends, or use another "
                        "folder") from None
    except (ImportError, OSError):
        print0(f"{out_dir}/ cannot be locked: make sure that no other run uses this folder")
    return f


def set_aside(out_dir, *patterns):
    """Renames an earlier run's files, as in ckpt.pt -> ckpt.old-3.pt."""
    folder = Path(out_dir)
    number = 1
    while any(folder.glob(f'*.old-{number}.*')):
        number += 1
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            if '.old-' not in path.name:
                new = path.rename(path.with_suffix(f'.old-{number}{path.suffix}'))
                print0(f"renamed {path} of an earlier run to {new}")


def note(out_dir, **facts):
    """Adds facts to run.json."""
    if RANK == 0:
        path = Path(out_dir, 'run.json')
        facts = (json.loads(path.read_bytes()) if path.exists() else {}) | facts
        with replacing(path) as f:
            f.write(json.dumps(facts).encode())


LOG_FIELDS = {
    'iter': 'd', 'tokens': 'd', 'epoch': '.4f', 'loss': '.6f', 'train_loss': '.6f', 'val_loss': '.6f',
    'val_bpb': '.6f', 'lr': '.6e', 'grad_norm': '.5f', 'ms_per_iter': '.3f', 'tok_per_s': '.0f',
    'mfu': '.4f', 'load_max': '.3f', 'skipped': 'd', 'wall_s': '.2f',
}


def start_files(out_dir, after, old, **facts):
    """Starts run.json and log.csv. log.csv keeps its complete rows up to iteration `after`. Once both
    are written, renames an earlier run's files."""
    log = Path(out_dir, 'log.csv')
    lines = [LOG_FIELDS]
    with reading(log):
        for row in csv.DictReader(log.read_text('utf-8').splitlines() if log.exists() else ()):
            if None not in row.values() and int(row['iter']) <= after:
                lines.append([row.get(name, '') for name in LOG_FIELDS])
    with replacing(log) as f, replacing(Path(out_dir, 'run.json')) as g:
        f.write(''.join(','.join(line) + '\r\n' for line in lines).encode())
        g.write(json.dumps(facts).encode())
        f.flush()
        g.flush()
        set_aside(out_dir, *old)


def number(x):
    """A number or 0-d tensor -> number. All ranks must call number(): a tensor may be sharded."""
    x = x.full_tensor() if is_sharded(x) else x
    return x.item() if torch.is_tensor(x) else x


def log_row(path, wandb_run, row):
    """Adds a row to the log and to wandb's run, if any."""
    texts = {name: format(number(x), LOG_FIELDS[name]) for name, x in row.items() if x is not None}
    if RANK == 0:
        try:
            with open(path, 'a', encoding='utf-8', newline='') as f:
                csv.DictWriter(f, LOG_FIELDS).writerow(texts)
        except OSError as error:
            print0(f"warning: {path} lacks a row, which could not be written: {error}")
    if wandb_run:
        names = {'loss': 'train/loss', 'val_loss': 'val/loss'}  # nanoGPT's names
        wandb_run.log({names.get(name, name): float(text) for name, text in texts.items()}, step=row['iter'])


def measure(run, row, seconds, epoch):
    """Completes the row of `step`; waits for the device. seconds: time per iteration;
    epoch: tokens per epoch."""
    tokens = run.tokens_per_update
    peak = peak_flops(run.machine.device, run.machine.dtype)
    shared = torch.stack([row['loss'], row['loss'].new_zeros(()) + row.pop('weight')])
    loss, weight = all_reduce(shared).tolist()
    return {name: number(value) for name, value in row.items()} | {
        'tokens': run.tokens, 'epoch': run.tokens / epoch,
        'loss': loss / RANKS if weight else math.nan, 'ms_per_iter': seconds * 1e3,  # nan: no targets
        'tok_per_s': tokens / seconds, 'skipped': run.skipped, 'wall_s': run.wall_s,
        'mfu': flops_per_token(run.model) * tokens / seconds / (peak * RANKS) if peak else None}


def describe(row, seconds_left):
    """The line to print."""
    line = f"iter {row['iter']}: loss {row['loss']:.4f}, lr {row['lr']:.2e}, norm {row['grad_norm']:.2f}, "
    if seconds_left is None:
        return f"{line}{row['ms_per_iter'] / 1e3:.1f} s including warm-up"
    mfu = f", mfu {row['mfu']:.1%}" if row['mfu'] else ''
    return (f"{line}{row['ms_per_iter']:.1f} ms, {row['tok_per_s']:,.0f} tok/s{mfu}, "
            f"{duration(seconds_left)} left")


# signals ----------------------------------------------------------------------------------------------------

STOP = 'SIGINT', 'SIGTERM', 'SIGHUP', 'SIGUSR1'
TIME_IS_OVER = 1
UNFINISHED = 'running', 'stopped'  # run.json's status if a run should be resumed


def stop_on_signals():
    """Returns a list to which signals add exit statuses. A second Ctrl-C ends the run at once. A second
    SIGTERM has no effect, because torchrun may repeat SIGTERM."""
    signals = []

    def stop(number, frame):
        status = 128 + number
        if number == signal.SIGINT and status in signals:
            raise KeyboardInterrupt
        if RANK == 0 and not signals:
            os.write(2, b'\nstopping after this iteration\n')  # print() can fail inside another print()
        signals.append(status)
    for name in STOP:
        number = getattr(signal, name, None)  # Windows lacks some signals
        if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    return signals


def why_stop(signals, time_limit):
    """The exit status if any rank got a signal, TIME_IS_OVER if late, else 0."""
    late = time_limit is not None and time.time() - START >= 60 * time_limit
    return all_reduce(torch.tensor(max([*signals, TIME_IS_OVER * late])), op=dist.ReduceOp.MAX).item()


def stop_reason(run, val_loss):
    """The status for run.json if the run ends after this evaluation, else ''. All ranks must agree."""
    return 'done' if run.iter_num >= run.config['max_iters'] else ''


def print_sample(run, tokenizer, prompts):
    """Prints a sample. prompts: [ids]."""
    from sample import complete
    hook = contextlib.nullcontext()
    if run.sharded:  # ranks that draw different tokens would stop at different steps, and wait forever
        hook = run.model.register_forward_hook(lambda model, inputs, logits: dist.broadcast(logits, 0))
    with hook, evaluating(run):
        (text,), _ = complete(run.model, tokenizer, prompts, run.config['sample_tokens'],
                              seed=run.config['seed'])
    print0(f"{'-' * 15} sample:\n{text}\n{'-' * 15}")


def start_lora(model, config, source):
    """See zoo/weights.py, which is needed only for adapters."""
    from zoo.weights import start_lora
    return start_lora(model, config, source)


# main program -----------------------------------------------------------------------------------------------

if __name__ == '__main__':
    # settings, checkpoint
    model_args = settings.model_args
    parts = use_parts(settings, globals())
    check_values(settings, config | model_args, globals())
    if init_from == 'auto':
        init_from = config['init_from'] = 'resume' if Path(out_dir, 'ckpt.pt').exists() else 'scratch'
    resumed = init_from == 'resume'
    if resumed:
        given = {name: label for name, label in given.items()
                 if label != 'config/default.py' or label in sys.argv}
        model_args = {name: model_args[name] for name in model_args if name in given}
    model = source_tokenizer = None
    source = {}  # or a checkpoint without its weights
    if init_from != 'scratch':
        meta = None if resumed else read_meta(data_folder(dataset))
        longest = None
        if not resumed and given.get('block_size', 'config/finetune.py') == 'config/finetune.py':
            usual = model_args.pop('block_size', None)
            longest = meta['packed'] or usual
        model, source_tokenizer, source = load_to_train(init_from, out_dir, model_args, meta, longest=longest)
    if resumed and sorted(was := source.get('parts', [])) != sorted(parts):
        raise UserError(f"{source['path']} was trained with config files that change {was or 'nothing'}; "
                        f"those of this command change {parts or 'nothing'}: name the same files, or "
                        "fine-tune the checkpoint")
    config = run_settings(config, given, source if resumed else {})
    globals().update(config)

    # machine, ranks
    machine = runtime(device, dtype, seed)
    device = machine.device
    if not TORCHRUN and int(os.environ.get('SLURM_NTASKS', 1)) > 1:
        print0("warning: Slurm has several tasks for this job, but this run uses only one: use `srun "
               "torchrun ... train.py`, as in docs/gpu.md")
    if TORCHRUN:  # runtime() must run first, or NCCL may use GPU 0
        if backend in ('auto', 'nccl'):  # CPU tensors need gloo
            backend = 'cpu:gloo,cuda:nccl' if machine.device_type == 'cuda' else 'gloo'
        # a hanging rank should not block the others for long
        timeout = datetime.timedelta(minutes=10)
        store, *_ = next(dist.rendezvous('env://', timeout=timeout))
        # torchrun reuses its store after a restart
        store = dist.PrefixStore(os.environ.get('TORCHELASTIC_RESTART_COUNT', '0'), store)
        dist.init_process_group(backend, store=store, rank=RANK, world_size=RANKS, timeout=timeout)
    torch.use_deterministic_algorithms(deterministic or device == 'cpu')
    torch.utils.deterministic.fill_uninitialized_memory = False

    # data
    folder = data_folder(dataset)
    train_bins = Bins(folder, 'train')
    val_bins = Bins(folder, 'val')
    meta = train_bins.meta
    state = source.get('tokenizer')
    try:
        tokenizer = load_tokenizer(folder)
        state = tokenizer.state()
    except (OSError, ImportError) as error:
        tokenizer = source_tokenizer
        print0(f"cannot load the tokenizer of {folder} ({error}): the checkpoint stores "
               f"{'that of ' + source['path'] if state else 'none, so it cannot be sampled from'}")
    if tokenizer and source_tokenizer and source_tokenizer.tokens != tokenizer.tokens:
        differs = (f"{folder} was prepared with another tokenizer than the model's, so its ids mean other "
                   f"text: run python prepare.py ... --tokenizer={shlex.quote(source['path'])}")
        if resumed:
            raise UserError(differs)
        print0(f"warning: {differs}")

    # model
    if model is None:
        with naming(model_args):
            data_args = {'vocab_size': meta['vocab_size']} | document_args(meta)
            model_config = GPTConfig(**data_args | model_args)
            check_memory(model_config)
            model = GPT(model_config)
            try_tokens(model)
    check_effects(settings, config | vars(model.config), globals())
    block_size = model.config.block_size
    if meta['packed'] not in (None, block_size):
        raise UserError(f"{folder} is packed for block_size={meta['packed']}, but the model has "
                        f"{block_size}: give --block_size={meta['packed']}, or prepare it again with "
                        f"--block_size={block_size}")
    for bins in train_bins, val_bins:
        bins.n_sequences(block_size)  # raises UserError if the data is too short
        bins.vocab_size = model.config.vocab_size
        if meta['vocab_size'] > bins.vocab_size:
            bins.check_vocabulary()
    print0(f"data: {folder}, {train_bins.n_tokens:,} tokens to train on, {val_bins.n_tokens:,} to validate")
    lora = source.get('lora') if resumed else None
    if lora_rank and not resumed:
        lora = start_lora(model, config, source)
    n_params = num_params(model)
    if checkpoint_activations:
        checkpoint_blocks(model, checkpoint_activations)
    if checkpoint_activations or shard or n_params > 1e8:  # memory is short
        keep_freed_memory(below=2**20)
    shard = shard and RANKS > 1  # a run may resume on one rank
    if shard:
        shard_model(model, machine)
    model.to(device).train()

    # optimizers, length
    run = Run(model, config, machine)
    if TORCHRUN:
        run.patient = dist.new_group(backend='gloo', timeout=datetime.timedelta(days=1))
    if resumed:
        run.resume(source)
    first_it = run.iter_num
    # older versions stored fewer fields
    changed = resumed and not identity(source.get('data', {})).items() <= identity(meta).items()
    latest, changed = all_reduce(torch.tensor([first_it, changed]), op=dist.ReduceOp.MAX).tolist()
    if latest != first_it:
        raise UserError(f"out_dir={out_dir} is not the same on all machines: let them share the folder")
    if changed:
        print0(f"warning: {folder} has changed since the checkpoint was written")
        run.best_val_loss = math.inf
    tokens = run.tokens_per_update
    epoch = train_bins.n_sequences(block_size) * block_size  # tokens
    for length, unit in (epochs, epoch), (tokens_per_param, n_params):
        if length is not None:
            max_iters = first_it + max(0, math.ceil((length * unit - run.tokens) / tokens))
    config['max_iters'] = max_iters
    total = run.tokens + (max_iters - first_it) * tokens
    print0(f"model: {n_params:,} parameters, {model.config.n_layer} layers, {model.config.n_embd} wide, "
           f"context {block_size}, vocabulary {model.config.vocab_size}")
    print0(f"run: {max_iters:,} iterations of {tokens:,} tokens (ranks: {RANKS}), "
           f"{total / epoch:.2f} epochs, {total / n_params:.1f} tokens per parameter; checkpoints in "
           f"{out_dir}/")
    if total > 4.5 * epoch and not eval_only:
        print0('warning: after about four passes over a text, a model gains little and may learn it by heart '
               '(arXiv:2305.16264): see whether val loss still falls, or set --epochs=4')
    if resumed and lr_at(first_it, config) > 1.1 * lr_at(first_it, config | source.get('config', {})):
        print0('warning: the learning rate rises, because this command changes its schedule: to keep a decay '
               'that has ended, set --lr_decay_iters to the earlier max_iters')
    if 0 < max_iters <= warmup_iters:
        print0(f"warning: warmup_iters={warmup_iters} does not end before the run: the learning rate reaches "
               f"{max_iters / (warmup_iters + 1):.0%} of its peak; lower it")
    batches = read_batches(run, train_bins)
    batch = next(batches, None)

    if eval_only:
        evaluate_splits(run, train_bins, val_bins, tokenizer)
        print_by_position(run, val_bins, eval_iters)

    # compilation, ranks
    compile = resolve_compile(compile, device, flops_per_token(model) * max_iters * tokens / RANKS)
    if compile and not eval_only:
        print0("compiling: the first iteration takes half a minute or more")
        run.forward = compile_model(model, device)  # for training only: evaluation would compile again
    if RANKS > 1 and not shard:
        run.forward = DDP(run.forward, gradient_as_bucket_view=True)

    # files
    constant = {
        'model_args': dataclasses.asdict(model.config), 'config': config, 'parts': parts, 'lora': lora,
        'tokenizer': state,
        'chats': meta['chats'] or source.get('chats', init_from != 'scratch'), 'data': meta,
        'kept': source.get('kept', []) if resumed else [],
        'family': source.get('family')}
    log_file = f'{out_dir}/log.csv'
    lock = wandb_run = None
    signals = [] if eval_only else stop_on_signals()
    if RANK == 0 and not eval_only:
        lock = lock_folder(out_dir)
        if wandb_log:
            wandb = package('wandb', 'wandb_log=True needs', 'wandb')
            wandb_run = wandb.init(project=wandb_project, name=wandb_run_name, id=run.wandb_id,
                                   resume='allow', config=config | vars(model.config))
            run.wandb_id = wandb_run.id
        best = Path(out_dir, 'best.pt')
        old = ['*.pt', 'log.csv', 'run.json']
        if resumed:  # best.pt is outdated if ckpt.pt has become better
            old = ['best.pt'] * (always_save_checkpoint and run.best_iter in (None, first_it))
        start_files(out_dir, first_it, old, status='running', error=None, config=config, params=n_params,
                    data=folder, data_identity=identity(meta))
    run.wait_for_rank_0()

    # the loop
    files = []
    if parts:  # config files may set another init_from
        files = [*(arg for arg in sys.argv[1:] if arg.endswith('.py')), '--init_from=resume']
    began = START - run.wall_s
    row = None
    interrupted = 0
    status = ''
    while not (status or eval_only):
        goal = min(max_iters, (run.iter_num // eval_interval + 1) * eval_interval)
        timed_it = run.iter_num
        timed_at = time.time()
        while run.iter_num < goal and not interrupted:
            row = step(run, batch)
            batch = next(batches, None)  # while the device computes
            it = run.iter_num
            if it == first_it + 1:
                gc.freeze()  # later collections skip existing objects; checking them would pause all ranks
            if it < max_iters:
                interrupted = why_stop(signals, time_limit)
            # the first and fourth iterations show the speed early
            if interrupted or it == goal or it % log_interval == 0 or it - first_it in (1, 4):
                count_skips(run)
                now = time.time()
                seconds = (now - timed_at) / (it - timed_it)
                timed_it = it
                timed_at = now
                run.wall_s = now - began
                row = measure(run, row, seconds, epoch)
                print0(describe(row, None if it == first_it + 1 else (max_iters - it) * seconds))
                if (it == 1 or it % log_interval == 0) and it < goal and not interrupted:
                    log_row(log_file, wandb_run, row)  # at goal, the evaluation comes first

        if interrupted:  # save first: a cluster may not wait
            save(run, 'ckpt.pt', constant)
            print0(f"saved at iteration {run.iter_num:,} of {max_iters:,}, now evaluating; to continue: "
                   f"python train.py {shlex.join(sys.argv[1:] if parts else [f'--out_dir={out_dir}'])} "
                   "--init_from=resume")
        columns = evaluate_splits(run, train_bins, val_bins, tokenizer)
        val_loss = columns.get('val_loss', math.nan)
        if columns and not math.isfinite(val_loss):
            diverge(run, f"val loss is {val_loss}")
        # evaluations due to signals should not choose the continued run's best checkpoint
        improved = val_loss < run.best_val_loss and interrupted <= TIME_IS_OVER
        if improved:
            run.best_val_loss = val_loss
            run.best_iter = run.iter_num
        if interrupted:
            status = 'time_limit' if interrupted == TIME_IS_OVER else 'stopped'
        else:
            status = stop_reason(run, val_loss)
        run.wall_s = time.time() - began
        if row:  # before saving, so that crashes lose no row
            log_row(log_file, wandb_run, row | columns | {'wall_s': run.wall_s})
        if improved and not always_save_checkpoint:
            save(run, 'best.pt', constant)
        if keep:
            save(run, f'ckpt-{run.iter_num}.pt', constant)
            kept = [*dict.fromkeys([*constant['kept'], run.iter_num])]  # only the run's own files
            constant['kept'] = kept[-keep:]
            for old in kept[:-keep] if RANK == 0 else ():
                Path(out_dir, f'ckpt-{old}.pt').unlink(missing_ok=True)
        save(run, 'ckpt.pt', constant)
        if improved and always_save_checkpoint and RANK == 0:
            best.unlink(missing_ok=True)
        if sample_tokens and tokenizer and (RANK == 0 or shard):
            print_sample(run, tokenizer, val_bins.batch([0], 1)[0].tolist())
        run.wait_for_rank_0()

    # the end
    if status:
        memory = peak_mb(device)
        note(out_dir, status=status, peak_mb=memory)
        if run.best_iter not in (None, run.iter_num):
            print0(f"warning: the last val loss is {'above' if val_loss > run.best_val_loss else 'below'} "
                   'the best of the regular evaluations; sample.py uses the weights of that one, best.pt')
    if status and not interrupted:
        print0(f"{status}: {run.iter_num:,} iterations in {duration(time.time() - START)}, best val loss "
               f"{run.best_val_loss:.4f}, peak memory {f'{memory:,.0f} MB' if memory else 'n/a'}; next: "
               f"python sample.py {shlex.join([*files, f'--out_dir={out_dir}'])}")
    if lock:
        lock.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if interrupted > TIME_IS_OVER:
        sys.exit(interrupted)

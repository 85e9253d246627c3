r"""
Trains a model: tokens -> weights.

    python train.py                                          # config/default.py, on any machine
    python train.py config/shakespeare_char.py --n_layer=6   # a config file, then overrides, left to right
    python train.py config/small.py --init_from=resume       # goes on exactly where out_dir/ckpt.pt stands
    torchrun --standalone --nproc_per_node=8 train.py config/small.py

    # two machines: on each, with its own node_rank (prefix NCCL_IB_DISABLE=1 if they have no Infiniband)
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=8 --master_addr=10.0.0.1 --master_port=1234 \
        train.py config/small.py

Every setting below and every field of GPTConfig can be set in a config file or by --name=value; --help lists
them. Batches are a pure function of (seed, iteration), so a run that was stopped and resumed, on any number
of ranks that divides the batch, sees the batches it would have seen.
"""
import time
START = time.time()  # before torch, whose import counts: wall_s is what a person waits

import csv
import functools
import importlib.util
import math
import os
import re
import shutil
import signal
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from configurator import configure, runtime
from model import GPT, GPTConfig
from prepare import Bins, find_checkpoint, foreign, json_tokenizer, load_tokenizer, read_meta
from sample import complete

# input and output
out_dir = 'out'                      # checkpoints and log.csv go here
dataset = 'openwebtext'              # data/<dataset>, made by prepare.py
init_from = 'scratch'                # scratch, resume (out_dir's), or to fine-tune: file, folder or hub id
eval_interval = 2000                 # iterations between evaluations; each one writes a checkpoint
eval_iters = 200                     # batches an evaluation, spread over val.bin; all of it if that is less
eval_only = False                    # evaluate once and stop
log_interval = 1                     # iterations between lines
always_save_checkpoint = True        # False: also keep the best weights, best.pt, and sample from those
sample_tokens = 0                    # length of the sample printed at each evaluation; 0: none
wandb_log = False                    # log to Weights & Biases too
wandb_project = 'owt'                # its project
wandb_run_name = 'gpt2'              # and run
# batch, over all ranks
gradient_accumulation_steps = 5 * 8  # micro-batches an iteration, all ranks together
batch_size = 12                      # windows of block_size tokens a micro-batch
# length of the run
max_iters = 600000                   # iterations (updates)
epochs: float | None = None          # instead: passes over train.bin
tokens_per_param: float | None = None  # instead: tokens for each parameter (20 is Chinchilla's)
# optimizer
optimizer = 'adamw'                  # adamw, or muon (matrices of the blocks; the rest by AdamW)
learning_rate = 6e-4                 # peak, after warm-up; AdamW's, Muon scales its own to match
weight_decay = 1e-1                  # on matrices and embeddings, not on norms and biases
beta1 = 0.9                          # AdamW
beta2 = 0.95                         # AdamW
momentum = 0.95                      # Muon
grad_clip = 1.0                      # largest norm of the gradient; 0: no clipping
# experts: added to what is minimised, never to the loss reported
balance_loss = 0.01                  # weight of the load-balancing loss
z_loss = 0.0                         # weight of the router's z-loss; ST-MoE has 1e-3
balance_rate = 0.001                 # how far balance_bias moves an iteration, where the model has it
# learning rate
decay_lr = True                      # False: constant after warm-up
lr_schedule = 'cosine'               # cosine, linear, or wsd (constant, then linear over the last `cooldown`)
cooldown = 0.4                       # share of the run that wsd decays over
warmup_iters = 2000                  # linear warm-up
lr_decay_iters: int | None = None    # end of the decay; None: max_iters
min_lr: float | None = None          # where it ends; None: a tenth of learning_rate
# system
backend = 'auto'                     # of torch.distributed; auto: nccl on CUDA, else gloo
device = 'auto'                      # cpu, cuda, cuda:1, mps; auto: cuda, else mps, else cpu
dtype = 'auto'                       # float32, bfloat16, float16; auto: what the hardware is fast at
compile: bool | str = 'auto'         # torch.compile; auto: where it works and a long run earns it back
deterministic = False                # bit-exact on CUDA too, slower; CPUs always are
seed = 1337                          # of weights, batches and dropout
config, model_args = configure(globals(), GPTConfig, default_file='config/default.py')


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


# data order -------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=2)
def window_order(seed, epoch, n):
    """The order of the n windows in an epoch: each once."""
    return np.random.default_rng((seed, epoch)).permutation(n)


def window_indices(first, count, n, seed):
    """Windows of the global samples first, first + 1, ...: (count,) int64. An epoch is n samples."""
    sample = np.arange(first, first + count)
    return np.array([window_order(seed, int(s // n), n)[s % n] for s in sample])


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
    micro = max(n for n in range(1, min(batch_size, share) + 1) if share % n == 0)
    return share // micro, micro


def to_device(windows, device):
    """(B, T + 1) int64 array -> inputs and targets (B, T) on the device."""
    windows = torch.from_numpy(windows)
    if 'cuda' in device:
        windows = windows.pin_memory().to(device, non_blocking=True)
    return windows[:, :-1].to(device), windows[:, 1:].to(device)


@torch.no_grad()
def evaluate(forward, model, bins, batches, batch_size, device, autocast, rank=0, ranks=1):
    """Mean loss over `batches` batches of val windows, evenly spread, the same every time, or over all
    windows if there are fewer. Shared by the ranks. Draws no random numbers. Returns (loss, windows)."""
    block_size = model.config.block_size
    n = bins.n_windows(block_size)
    count = min(n, batches * batch_size)
    chosen = np.arange(count) * n // count
    training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    for start in range(rank * batch_size, count, ranks * batch_size):
        part = chosen[start:start + batch_size]
        x, y = to_device(bins.read(np.resize(part, batch_size), block_size), device)
        y = y.clone()
        y[len(part):] = -1  # a full batch always, so that nothing recompiles; what fills it does not count
        with autocast():
            loss, _ = forward(x, y)
        total += loss.cpu().double() * len(part)  # MPS has no float64
    model.train(training)
    if ranks > 1:
        total = total.to(device)
        dist.all_reduce(total)
    return total.item() / count, count


# Muon -------------------------------------------------------------------------------------------------------

class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): what
    torch.optim.Muon with adjust_lr_fn='match_rms_adamw' computes, but all matrices of a shape at once, and
    each projection of a fused matrix by itself. `parts`: parameter -> rows of each projection in it."""

    def __init__(self, params, lr, parts, momentum=0.95, weight_decay=0.1):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.parts = parts

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, params = group['lr'], [w for w in group['params'] if w.grad is not None]
            grads = [w.grad for w in params]
            for w in params:
                if not self.state[w]:
                    self.state[w]['momentum_buffer'] = torch.zeros_like(w)
            buffers = [self.state[w]['momentum_buffer'] for w in params]
            torch._foreach_lerp_(buffers, grads, 1 - group['momentum'])
            nesterov = torch._foreach_lerp(grads, buffers, group['momentum'])
            torch._foreach_mul_(params, 1 - lr * group['weight_decay'])
            shapes = {}  # (rows, columns) -> the update and the weights of each matrix of that shape
            for update, w in zip(nesterov, params):  # experts are stacked: (experts, rows, columns)
                for u, part in zip(*(x.split(self.parts[w], dim=-2) for x in (update, w))):
                    matrices = [(u, part)] if w.ndim == 2 else zip(u.unbind(), part.unbind())
                    shapes.setdefault(part.shape[-2:], []).extend(matrices)
            for shape, pairs in shapes.items():
                updates, weights = zip(*pairs)
                updates = orthogonalise(torch.stack(updates)).to(weights[0].dtype)
                torch._foreach_add_(weights, list(updates), alpha=-lr * 0.2 * max(shape) ** 0.5)


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


def make_optimizers(model, kind, learning_rate, weight_decay, betas, momentum, device):
    """A list of one or two optimizers that cover every parameter once. Matrices and embeddings decay."""
    groups = model.param_groups()
    fused = torch.device(device).type in ('cuda', 'cpu')
    plain = dict(lr=learning_rate, betas=betas, fused=fused)
    if kind == 'adamw':
        both = {id(w) for w in groups['matrix'] + groups['embedding']}
        decayed = [w for w in model.parameters() if id(w) in both]  # in the model's order, which is nanoGPT's
        return [torch.optim.AdamW([dict(params=decayed, weight_decay=weight_decay),
                                   dict(params=groups['vector'], weight_decay=0.0)], **plain)]
    if kind == 'muon':
        return [Muon(groups['matrix'], learning_rate, model.parts(), momentum, weight_decay),
                torch.optim.AdamW([dict(params=groups['embedding'], weight_decay=weight_decay),
                                   dict(params=groups['vector'], weight_decay=0.0)], **plain)]
    raise ValueError(f"optimizer={kind!r} is none of adamw, muon")


def load_optimizers(optimizers, states, path):
    """Puts saved states back; nanoGPT's single one too, whose parameters stand in the same order."""
    states = [states] if isinstance(states, dict) else states
    sizes = [[len(g['params']) for g in s['param_groups']] for s in states or []]
    if sizes != [[len(g['params']) for g in o.param_groups] for o in optimizers]:
        raise ValueError(f"{path} holds no optimizer state for this optimizer: it was written with another "
                         "one, or holds weights only; use its --optimizer, or fine-tune with --init_from="
                         + str(path))
    for opt, state in zip(optimizers, states):
        params = [w for group in opt.param_groups for w in group['params']]
        for i, w in enumerate(params):
            for name, value in state['state'].get(i, {}).items():
                if not value.ndim or value.shape == w.shape:
                    continue
                if w.ndim != 2 or value.shape[1:] != w.shape[1:] or not 0 < len(w) - len(value) < 64:
                    raise ValueError(f"{path}: optimizer state {i} is {tuple(value.shape)}, its parameter "
                                     f"{tuple(w.shape)}; fine-tune instead, with --init_from={path}")
                # rows that pad the vocabulary are not in nanoGPT's files
                state['state'][i][name] = torch.zeros_like(w, device='cpu').index_copy_(
                    0, torch.arange(len(value)), value.to(w.dtype))
        ours = [{k: v for k, v in group.items() if k != 'params'} for group in opt.param_groups]
        opt.load_state_dict(state)
        for group, mine in zip(opt.param_groups, ours):
            group.update(mine)  # the settings of this run, not the file's


# checkpoints and log ----------------------------------------------------------------------------------------

def save(path, state):
    """Writes state to path: all of it or, with the old file kept, nothing. Raises OSError with the reason."""
    try:
        torch.save(state, path + '.tmp')
        os.replace(path + '.tmp', path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        if os.path.exists(path + '.tmp'):
            os.remove(path + '.tmp')
        kept = 'the checkpoint before it is kept' if os.path.exists(path) else 'there is none from before'
        raise OSError(f"cannot write {path} ({str(error).splitlines()[0][:100]}); is the disk full? "
                      f"{kept}") from None


LOG_FIELDS = ['iter', 'tokens', 'epoch', 'loss', 'val_loss', 'val_bpb', 'lr', 'grad_norm', 'update_ratio',
              'ms_per_iter', 'tok_per_s', 'mfu', 'load_max', 'skipped', 'wall_s']


def open_log(path, after):
    """log.csv for appending, rows beyond iteration `after` dropped. Returns the file and its writer."""
    rows = []
    if after and os.path.exists(path):
        with open(path, encoding='utf-8', newline='') as f:
            rows = [row for row in csv.DictReader(f)
                    if row['wall_s'] and int(row['iter']) <= after]
    with open(path + '.tmp', 'w', encoding='utf-8', newline='') as f:
        writer = csv.DictWriter(f, LOG_FIELDS, extrasaction='ignore')
        writer.writeheader()
        writer.writerows(rows)
    os.replace(path + '.tmp', path)
    f = open(path, 'a', encoding='utf-8', newline='')
    return f, csv.DictWriter(f, LOG_FIELDS)


# machine ----------------------------------------------------------------------------------------------------

PEAK_TFLOPS = {  # dense bfloat16 peaks from NVIDIA's data sheets, by what the device's name contains
    'H200': 989, 'H100 PCIe': 756, 'H100 NVL': 835, 'H100': 989, 'GH200': 989, 'B200': 2250, 'A100': 312,
    'A800': 312, 'L40S': 362, 'A10G': 70, 'L4': 121, 'RTX 4090': 165, 'RTX 3090': 71,
}


def peak_flops(device, dtype):
    """FLOP/s of the device at 16 bits, or None where nobody has published it: then there is no MFU."""
    if 'cuda' not in device or dtype == torch.float32:
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items()
                 if re.search(rf'\b{part}\b', name) and 'Laptop' not in name), None)


def resolve_compile(compile, device, flops):
    """compile='auto' -> bool. On a CPU compiling takes half a minute, which runs below 4e13 FLOPs never earn
    back."""
    if compile not in (True, False, 'auto'):
        raise ValueError(f"compile={compile!r} is none of True, False, auto")
    if compile != 'auto':
        return compile
    if sys.platform == 'win32':
        return False
    if 'cuda' in device:
        return (importlib.util.find_spec('triton') is not None
                and torch.cuda.get_device_capability(device) >= (7, 0))
    return (device == 'cpu' and flops > 4e13
            and any(map(shutil.which, (os.environ.get('CXX', 'c++'), 'g++', 'clang++'))))


def duration(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"


if __name__ == '__main__':
    # ranks and machine --------------------------------------------------------------------------------------
    rank, ranks = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    stop = []  # signals that asked to stop

    def say(text):
        try:
            if rank == 0:
                print(text, flush=True)
        except BrokenPipeError:  # Ctrl-C ends `| tee log` before us: nobody listens, but a run is to be saved
            if not stop:
                raise

    for key, known in dict(lr_schedule=SCHEDULES, optimizer=('adamw', 'muon')).items():
        if config[key] not in known:
            raise ValueError(f"{key}={config[key]!r} is none of {', '.join(known)}")
    for key in ('eval_interval', 'eval_iters', 'log_interval'):
        if config[key] < 1:
            raise ValueError(f"{key}={config[key]} must be at least 1")
    if epochs is not None and tokens_per_param is not None:
        raise ValueError(f"epochs={epochs} and tokens_per_param={tokens_per_param} both set the length: "
                         "give one")
    accumulation, micro_batch = share_batch(gradient_accumulation_steps, batch_size, ranks)
    checkpoint_file, best_file = (os.path.join(out_dir, name) for name in ('ckpt.pt', 'best.pt'))

    # checkpoint ---------------------------------------------------------------------------------------------
    path, rest, model = None, {}, None
    if init_from == 'resume':
        path = checkpoint_file
    elif init_from != 'scratch':
        path = os.path.join(init_from, 'ckpt.pt') if os.path.isdir(init_from) else init_from
    if path:
        if not any(arg.endswith('.py') for arg in sys.argv[1:]):  # config/default.py asks for no architecture
            model_args = {key: value for key, value in model_args.items()
                          if any(arg.startswith(f'--{key}=') for arg in sys.argv)}
        changes = {key: value for key, value in model_args.items()
                   if key in ('dropout', 'block_size', 'rope_scaling', 'balance_per_sequence')}
        if init_from != 'resume' and foreign(init_from):
            path = find_checkpoint(init_from)
            model = GPT.from_pretrained(path, torch.float32, **changes)
            rest = {'model_args': vars(model.config).copy()}
        else:
            model, rest = GPT.from_checkpoint(path, **changes)
        for key, value in model_args.items():
            if value is not None and value != rest['model_args'][key]:
                raise ValueError(f"{key}={value!r} differs from {path}, which has "
                                 f"{rest['model_args'][key]!r}: leave it out, or train from scratch")
    resumed = rest if init_from == 'resume' else {}
    machine = runtime(device, dtype, seed)
    was = resumed.get('runtime', {})  # what 'auto' was resolved to is kept: a resumed run is the same run
    if (was.get('device_type'), was.get('ranks')) != (machine.device_type, ranks):
        was = {}
    elif (was['threads'], was['dtype']) != (machine.threads, str(machine.dtype)[6:]) and dtype == 'auto':
        machine = runtime(device, was['dtype'], seed, threads=was['threads'])
    device = machine.device
    if compile == 'auto':
        compile = was.get('compile', compile)
    if ranks > 1:
        dist.init_process_group(backend if backend != 'auto' else 'nccl' if 'cuda' in device else 'gloo')
    torch.use_deterministic_algorithms(deterministic or device == 'cpu')
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid; costs an eighth of a step

    # data ---------------------------------------------------------------------------------------------------
    folder = dataset if os.path.isdir(dataset) and not os.path.isdir(os.path.join('data', dataset)) \
        else os.path.join('data', dataset)
    train_bins, val_bins = Bins(folder, 'train'), Bins(folder, 'val')
    meta = read_meta(folder)
    bytes_per_token = meta['bytes_per_token']
    try:
        words = load_tokenizer(folder)
    except (OSError, ImportError, ValueError) as error:
        say(f"no tokenizer is stored with the checkpoint, so it cannot be sampled from: {error}")
        words = None
    if path and words and not resumed and os.path.exists(os.path.join(path, 'tokenizer.json')) \
            and json_tokenizer(path).to_json() != words.to_json():
        say(f"warning: {folder} was prepared with another tokenizer than {path} has, so its ids mean other "
            f"text: python prepare.py ... --tokenizer={path}")

    # model --------------------------------------------------------------------------------------------------
    if model is None:
        model = GPT(GPTConfig(**{'vocab_size': meta['vocab_size'], **model_args}))
    for bins in (train_bins, val_bins):
        bins.vocab_size = model.config.vocab_size
    model.to(device).train()
    block_size, n_params = model.config.block_size, model.num_params()
    n_windows = train_bins.n_windows(block_size)
    first_token = val_bins.read([0], block_size)[0, :1].tolist()  # samples go on from here
    windows_per_iter = gradient_accumulation_steps * batch_size
    tokens_per_iter = windows_per_iter * block_size
    if epochs is not None:
        max_iters = math.ceil(epochs * n_windows / windows_per_iter)
    if tokens_per_param is not None:
        max_iters = math.ceil(tokens_per_param * n_params / tokens_per_iter)
    decay_end = max_iters if lr_decay_iters is None else lr_decay_iters
    floor = learning_rate / 10 if min_lr is None else min_lr
    flops_per_iter = model.flops_per_token() * tokens_per_iter
    compile = resolve_compile(compile, device, flops_per_iter * max_iters)
    config.update(max_iters=max_iters, compile=compile)
    say(f"model: {n_params:,} parameters, {model.config.n_layer} layers, {model.config.n_embd} wide, context "
        f"{block_size}, vocabulary {model.config.vocab_size}")
    say(f"data: {folder}, {train_bins.n_tokens:,} tokens to train on, {val_bins.n_tokens:,} to validate")
    say(f"run: {max_iters:,} iterations of {tokens_per_iter:,} tokens ({accumulation} x {micro_batch} "
        f"windows on {ranks} rank{'s' * (ranks > 1)}), {max_iters * windows_per_iter / n_windows:.2f} "
        f"epochs, {max_iters * tokens_per_iter / n_params:.1f} tokens a parameter; a checkpoint every "
        f"{eval_interval} iterations to {out_dir}/")

    # optimizer, compilation, ranks --------------------------------------------------------------------------
    params = list(model.parameters())
    optimizers = make_optimizers(model, optimizer, learning_rate, weight_decay, (beta1, beta2), momentum,
                                 device)
    scaler = torch.amp.GradScaler(machine.device_type, enabled=machine.dtype == torch.float16)
    it, best_val_loss, skipped, wall_before = 0, math.inf, 0, 0.0
    if resumed:
        load_optimizers(optimizers, rest.get('optimizer'), path)
        if rest.get('scaler'):  # none in files that were not written under float16
            scaler.load_state_dict(rest['scaler'])
        it, best_val_loss = rest['iter_num'], float(rest['best_val_loss'])
        skipped, wall_before = rest.get('skipped', 0), rest.get('wall_s', 0.0)
        for key in ('dataset', 'batch_size', 'gradient_accumulation_steps', 'seed', 'learning_rate',
                    'max_iters'):
            if key in rest.get('config', {}) and rest['config'][key] != config[key]:
                say(f"resume: {key} was {rest['config'][key]!r}, is {config[key]!r}")
        say(f"resume: {path} at iteration {it:,}, best val loss {best_val_loss:.4f}")
    first_it = it
    del rest, resumed
    forward = model
    if compile:
        say('compiling: the first iteration takes about half a minute')
        # on CPUs eager's random numbers are the fast ones, and the same with and without compilation
        forward = torch.compile(model, dynamic=False,
                                options=None if 'cuda' in device else {'fallback_random': True})
    evaluated = forward if 'cuda' in device else model  # on a CPU compiling again costs more than it gives
    if ranks > 1:
        forward = DDP(forward, device_ids=[device] if 'cuda' in device else None,
                      gradient_as_bucket_view=True)

    # files --------------------------------------------------------------------------------------------------
    log_file = wandb = None
    if rank == 0 and not eval_only:
        os.makedirs(out_dir, exist_ok=True)
        old = [name for name in ('ckpt.pt', 'best.pt', 'log.csv')
               if os.path.exists(os.path.join(out_dir, name))]
        if old and init_from != 'resume':
            for name in old:
                os.replace(os.path.join(out_dir, name), os.path.join(out_dir, name + '.old'))
            say(f"{out_dir}/ held a run: {', '.join(old)} renamed to *.old")
        if init_from == 'resume' and always_save_checkpoint and os.path.exists(best_file):
            os.replace(best_file, best_file + '.old')  # else sample.py would go on reading it
        elif init_from == 'resume' and not always_save_checkpoint and not os.path.exists(best_file):
            shutil.copyfile(checkpoint_file, best_file)  # nanoGPT's ckpt.pt is its best
        log_file, log = open_log(os.path.join(out_dir, 'log.csv'), first_it)
        if wandb_log:
            try:
                import wandb
                wandb.init(project=wandb_project, name=wandb_run_name, config={**config, **model_args})
            except Exception as error:  # whatever it is, it must not cost the run
                say(f"no wandb logging, log.csv has everything ({type(error).__name__}: {error})")
                wandb = None

    def checkpoint(**more):
        return {'model': model.state_dict(), 'model_args': vars(model.config).copy(), 'iter_num': it,
                'best_val_loss': best_val_loss, 'config': config, 'tokenizer': words and words.state(),
                **more}

    def save_last():
        used = dict(device_type=machine.device_type, ranks=ranks, threads=machine.threads, compile=compile,
                    dtype=str(machine.dtype)[6:])
        save(checkpoint_file, checkpoint(optimizer=[o.state_dict() for o in optimizers],
                                         scaler=scaler.state_dict(), tokens=it * tokens_per_iter,
                                         skipped=skipped, runtime=used,
                                         wall_s=wall_before + time.time() - START))

    def read_batch(it, step):
        """Micro-batch `step` of this rank: the ranks take turns through the iteration's windows."""
        first = it * windows_per_iter + (step * ranks + rank) * micro_batch
        return to_device(train_bins.read(window_indices(first, micro_batch, n_windows, seed), block_size),
                         device)

    # Ctrl-C and a scheduler's SIGTERM: finish the iteration, save, leave. A second one leaves at once.
    def ask_to_stop(number, frame):
        signal.signal(number, signal.default_int_handler)
        stop.append(number)
        if rank == 0:
            os.write(2, b'\nstopping after this iteration\n')  # print may be interrupted by this very handler
    if not eval_only:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, ask_to_stop)

    # the loop: max_iters updates, and a last turn to judge the last weights ---------------------------------
    peak = peak_flops(device, machine.dtype)
    stopping, mean_loss, lr_now, row = False, 0.0, 0.0, {}
    timed_it, timed_at, batch = it, time.time(), read_batch(it, 0)
    while True:
        last = it >= max_iters or stopping or eval_only
        if last or (it % eval_interval == 0 and it > first_it):
            pause = time.time()
            if stopping and rank == 0:  # first, for whoever sent the signal may not wait for an evaluation
                save_last()
            val_loss, count = evaluate(evaluated, model, val_bins, eval_iters, batch_size, device,
                                       machine.autocast, rank, ranks)
            bpb = val_loss / math.log(2) / bytes_per_token if bytes_per_token else None
            say(f"step {it}: val loss {val_loss:.4f}" + (f", {bpb:.4f} bits per byte" if bpb else '')
                + f", perplexity {math.exp(min(val_loss, 99)):.2f} ({count * block_size:,} tokens)")
            if not math.isfinite(val_loss):
                raise ValueError(f"val loss is {val_loss} at iteration {it}: the run diverged, nothing "
                                 f"is saved; lower --learning_rate (now {learning_rate}), or use "
                                 "--dtype=float32")
            if eval_only:
                break
            if rank == 0:
                improved, best_val_loss = val_loss < best_val_loss, min(val_loss, best_val_loss)
                if improved and not always_save_checkpoint:
                    save(best_file, checkpoint())
                save_last()
                now = wall_before + time.time() - START
                if it > first_it:
                    log.writerow({**row, 'iter': it, 'tokens': it * tokens_per_iter,
                                  'val_loss': f"{val_loss:.6f}", 'val_bpb': f"{bpb:.6f}" if bpb else '',
                                  'wall_s': f"{now:.2f}"})
                    log_file.flush()
                if wandb:
                    wandb.log({'iter': it, 'val/loss': val_loss, 'lr': lr_now})
                if sample_tokens and words:
                    model.eval()
                    with machine.autocast():
                        text, _ = complete(model, words, [first_token], sample_tokens, seed=seed)
                    model.train()
                    say(f"{'-' * 15} sample:\n{text[0]}\n{'-' * 15}")
            timed_at += time.time() - pause
        if last:
            break

        lr_now = lr_at(it, learning_rate, floor, warmup_iters, decay_end, lr_schedule if decay_lr else None,
                       cooldown)
        for opt in optimizers:
            for group in opt.param_groups:
                group['lr'] = lr_now
        # dropout is a function of (seed, iteration, rank); torch.manual_seed would call CUDA on a CPU too
        generator = torch.default_generator if device == 'cpu' else torch
        generator.manual_seed(int(np.random.SeedSequence((seed, it, rank)).generate_state(1)[0]))
        losses, load = torch.zeros((), device=device), None
        for step in range(accumulation):
            if ranks > 1:  # gradients travel with the last micro-batch only
                forward.require_backward_grad_sync = step == accumulation - 1
            with machine.autocast():
                loss, aux = forward(*batch)
            losses += loss.detach()
            if aux:  # a model with experts
                loss = loss + balance_loss * aux['balance'] + z_loss * aux['z']
                load = aux['load'] if load is None else load + aux['load']
            scaler.scale(loss / accumulation).backward()
            if step < accumulation - 1 or it + 1 < max_iters:  # read while the device computes
                batch = read_batch(it, step + 1) if step < accumulation - 1 else read_batch(it + 1, 0)
        for opt in optimizers:
            scaler.unscale_(opt)
        if load is not None and ranks > 1:
            dist.all_reduce(load)
        grad_norm = torch.nn.utils.clip_grad_norm_(params, grad_clip or math.inf, foreach=device != 'mps')
        measured = (it + 1) % eval_interval == 0  # how far an update moves the weights, now and then
        before = [w.detach().clone() for w in params] if measured and rank == 0 else None
        if not scaler.is_enabled() or grad_norm.isfinite():  # else no optimizer steps, the scale goes down
            for opt in optimizers:
                scaler.step(opt)
            if model.config.balance_bias:
                model.move_balance(load, balance_rate)
        else:
            skipped += 1
        scaler.update()
        for opt in optimizers:
            opt.zero_grad(set_to_none=True)
        it += 1

        stopping = bool(stop) and ranks == 1
        if it % log_interval == 0 or it == max_iters or stopping or measured:
            news = torch.stack([losses / accumulation, torch.tensor(float(bool(stop)), device=device)])
            if ranks > 1:
                dist.all_reduce(news)
            mean_loss, stopping = news[0].item() / ranks, news[1].item() > 0  # all ranks stop together
            if not math.isfinite(mean_loss):
                raise ValueError(f"loss is {mean_loss} at iteration {it}: the run diverged; "
                                 f"{checkpoint_file} holds the last evaluated state; lower "
                                 f"--learning_rate (now {learning_rate}), or use --dtype=float32")
            seconds = (time.time() - timed_at) / (it - timed_it)
            timed_it, timed_at = it, time.time()
            mfu = flops_per_iter / seconds / (peak * ranks) if peak else None
            say(f"iter {it}: loss {mean_loss:.4f}, lr {lr_now:.2e}, norm {grad_norm:.2f}, "
                f"{seconds * 1e3:.1f} ms, {tokens_per_iter / seconds:,.0f} tok/s"
                + (f", mfu {mfu:.1%}" if mfu else '') + f", {duration((max_iters - it) * seconds)} left")
            if rank == 0:
                ratio = (sum((w - old).square().sum() for w, old in zip(params, before))
                         / sum(old.square().sum() for old in before)).sqrt().item() if before else ''
                row = {'iter': it, 'tokens': it * tokens_per_iter,
                       'epoch': f"{it * windows_per_iter / n_windows:.4f}", 'loss': f"{mean_loss:.6f}",
                       'lr': f"{lr_now:.6e}", 'grad_norm': f"{float(grad_norm):.5f}",
                       'update_ratio': ratio and f"{ratio:.3e}", 'ms_per_iter': f"{seconds * 1e3:.3f}",
                       'tok_per_s': f"{tokens_per_iter / seconds:.0f}", 'mfu': f"{mfu:.4f}" if mfu else '',
                       'load_max': '' if load is None else f"{(load.amax(1) / load.mean(1)).max():.3f}",
                       'skipped': skipped,
                       'wall_s': f"{wall_before + time.time() - START:.2f}"}
                if it % eval_interval and it < max_iters and not stopping:  # else the evaluation writes it
                    log.writerow(row)
                if wandb:
                    wandb.log({'iter': it, 'train/loss': mean_loss, 'lr': lr_now})
        elif it == first_it + 1:  # compilation and warm-up are no measure of speed
            timed_it, timed_at = it, time.time()

    if not eval_only:
        say(f"done: {it:,} iterations in {duration(time.time() - START)}, best val loss {best_val_loss:.4f}; "
            f"next: python sample.py --out_dir={out_dir}")
    if log_file:
        log_file.close()
    if ranks > 1:
        dist.destroy_process_group()

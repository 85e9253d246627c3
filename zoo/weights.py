"""
Replaces linear layers by low-rank adapters (LoRA), to train few parameters, or by 8-bit weights, to save
memory.
"""
import contextlib
import os
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import UserError, print0
from model import Embedding, FusedLinear, GroupedLinear, Linear, hidden_init, parameter

# low-rank adapters ------------------------------------------------------------------------------------------

class LoRALinear(nn.Module):
    """A frozen linear layer with a trained update of its weight, scale * lora_b @ lora_a
    (arXiv:2106.09685). lora_a (rank, n_in) starts random, and lora_b (n_out, rank) starts at zero.
    The projections of a FusedLinear share lora_a."""

    def __init__(self, base, rank, scale):
        super().__init__()
        self.base = base
        self.scale = scale
        self.lora_a = parameter(rank, base.in_features, init=hidden_init, group='adapter')
        self.lora_b = parameter(base.out_features, rank, init=nn.init.zeros_, group='adapter')

    @property
    def weight(self):
        return self.base.weight + self.scale * (self.lora_b @ self.lora_a).to(self.base.weight.dtype)

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        y = F.linear(x, self.base.weight, self.base.bias)
        y = y + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)
        return y.split(self.base.widths, dim=-1) if isinstance(self.base, FusedLinear) else y


@torch.no_grad()
def add_lora(model, rank, alpha, targets):
    """Freezes a GPT and replaces linear layers in its blocks by LoRALinear, with scale alpha / rank. targets:
    ends of layer names, such as 'mlp.c_proj'."""
    modules = dict(model.h.named_modules())
    chosen = set()
    plain = {name for name, module in modules.items() if type(module) in (Linear, FusedLinear)}
    for target in targets:
        named = {name for name in modules if f'.{name}'.endswith(f'.{target}')}
        if not named or not named <= plain:
            raise UserError(f"lora_targets: {target!r} is not the name of linear layers; choose from "
                            f"{', '.join(sorted({name.partition('.')[2] for name in plain}))}")
        chosen |= named
    model.requires_grad_(False)
    for name in sorted(chosen):
        base = modules[name]
        lora = LoRALinear(base, rank, alpha / rank)
        for part, w in lora.named_parameters(prefix=f'h.{name}'):
            model.tags[part] = model.tags.get(part.replace('.base.', '.')) or w.tag
        for w in lora.lora_a, lora.lora_b:
            w.tag.init(w)
        model.h.set_submodule(name, lora.to(base.weight.device, base.weight.dtype))


@torch.no_grad()
def merge_lora(model):
    """Adds each update to its weight and removes the adapters."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            module.base.weight.copy_(module.weight)
            model.set_submodule(name, module.base)
    model.requires_grad_(True)


def start_lora(model, config, loaded):
    """Adds adapters to a model. config: train.py's settings; loaded: sample.load's third result, or {}.
    Returns the 'lora' entry of a checkpoint."""
    if not loaded:
        raise UserError(f"lora_rank={config['lora_rank']} needs a trained model: give --init_from")
    path = loaded['path']
    if Path(path).parent.resolve() == Path(config['out_dir']).resolve():
        raise UserError(f"out_dir={config['out_dir']} holds {path}, the base of the adapters: give another "
                        "--out_dir")
    lora = {'rank': config['lora_rank'], 'alpha': config['lora_alpha'],
            'targets': config['lora_targets'].replace(',', ' ').split()}
    base = os.path.abspath(path) if os.path.exists(config['init_from']) else config['init_from']
    facts = {'base': base, 'folder': os.path.abspath(config['out_dir']),
             'checksum': checksum(path, model)}
    add_lora(model, **lora)
    n_params = sum(w.numel() for w in model.parameters() if w.requires_grad)
    print0(f"adapters: training {n_params:,} parameters")
    return lora | facts


def checksum(path, model):
    """Sums the weights' bit patterns in a checkpoint, or in a published model loaded in float32."""
    from sample import is_published, read_checkpoint
    weights = read_checkpoint(path)['model'] if not is_published(path) else {
        name: w for name, w in model.state_dict().items() if name != 'wpe.weight'}  # block_size crops wpe
    return sum(w.float().view(torch.int32).sum().item() for w in weights.values())


def adapted_model(checkpoint, state, merge, changes):
    """Loads the base model of a checkpoint, and adds the adapters in `state`. The base is at its old path, at
    the same path relative to the adapters, at `base` in their folder, or on the hub."""
    from sample import CHANGEABLE, is_published, load
    lora = checkpoint['lora']
    trained = {name: value for name, value in checkpoint['model_args'].items() if name in CHANGEABLE}
    folder = Path(checkpoint['path']).parent
    places = [lora['base'], os.path.realpath(folder / 'base')]
    with contextlib.suppress(ValueError, KeyError):  # different Windows drives; older checkpoints
        places.append(folder / os.path.relpath(lora['base'], lora['folder']))
    found = next(filter(os.path.exists, places), lora['base'])
    try:
        model, _, base = load(found, dtype=torch.float32, **trained | changes)
    except OSError as error:
        raise FileNotFoundError(
            f"{checkpoint['path']} has adapters for {lora['base']}, which is missing ({error!s:.200}): put "
            f"the base model, or a link to it, at {folder / 'base'}") from error
    # an older version summed only the blocks of a published base
    older = None if is_published(base['path']) else lora.get('base_checksum')
    if lora.get('checksum', older) not in (None, checksum(base['path'], model)):
        raise UserError(f"the adapters in {checkpoint['path']} were trained on other weights than those in "
                        f"{base['path']}: restore the base model, or train the adapters again")
    add_lora(model, lora['rank'], lora['alpha'], lora['targets'])
    model.load_state_dict(model.state_dict() | state)
    if merge:
        merge_lora(model)
    return model


# eight bits -------------------------------------------------------------------------------------------------

def quantize_rows(w, dtype):
    """w (..., n_in) -> int8 of the same shape, and scales (...) of `dtype`, one per row. Their product
    differs from w by at most half a scale ("vector-wise", arXiv:2208.07339)."""
    scale = (w.abs().amax(dim=-1).float() / 127).to(dtype)
    steps = w / scale.float().masked_fill(scale == 0, 1.0)[..., None]
    return steps.round_().clamp_(-127, 127).to(torch.int8), scale


def int8_linear(x, w, scale, bias=None):
    """x (..., n_in); w (n_out, n_in) int8; scale, bias (n_out,) -> x @ (w scale)^T + bias, (..., n_out)."""
    rows = x.numel() // x.shape[-1]
    x = x.half() if scale.dtype is torch.float16 else x  # x may be the float32 residual stream
    scale = scale.to(x.dtype)
    few = x.device.type == 'cpu' and rows <= INT8_ROWS
    if few and x.dtype is torch.bfloat16 and x.shape[-1] % 16 == 0:  # this kernel is slow for other widths
        y = torch._weight_int8pack_mm(x.reshape(rows, -1).contiguous(), w, scale).view(*x.shape[:-1], -1)
    elif few and torch.compiler.is_compiling():  # compiles to one loop without a float32 copy of w
        y = (x[..., None, :] * w).sum(dim=-1) * scale
    elif x.dtype is torch.float16:  # the product without scale may overflow
        y = F.linear(x, w.to(x.dtype) * scale[:, None])
    else:  # convert w in parts that fit a CPU's cache
        parts = w.split(max(1, 2**18 // x.shape[-1])) if few else [w]
        y = torch.cat([F.linear(x, part.to(x.dtype)) for part in parts], dim=-1) * scale
    return y if bias is None else y + bias.type_as(y)


INT8_ROWS = 16  # with more rows, converting w first is faster


class Int8Linear(nn.Module):
    """A Linear or FusedLinear with an int8 weight and one scale of `dtype` per row."""

    def __init__(self, base, dtype):
        super().__init__()
        weight, scale = quantize_rows(base.weight, dtype)
        self._parameters['weight'] = nn.Parameter(weight, requires_grad=False)
        self.register_buffer('scale', scale, persistent=False)
        for name in 'bias', 'widths', 'loop':
            setattr(self, name, getattr(base, name, None))

    @property
    def weight(self):
        raise TypeError('this weight is int8: call its layer, or exclude the layer in quantize_weights')

    def forward(self, x):
        y = int8_linear(x, self._parameters['weight'], self.scale, self.bias)
        return y if self.widths is None else y.split(self.widths, dim=-1)


class Int8Embedding(Int8Linear):
    """An Embedding with an int8 weight."""

    weight = property(lambda self: self._parameters['weight'])  # GPT reads its device
    as_head = Int8Linear.forward

    def forward(self, idx):
        return F.embedding(idx, self.weight).to(self.scale.dtype) * self.scale[idx][..., None]


class Int8Experts(Int8Linear):
    """A GroupedLinear with int8 weights."""

    forward = GroupedLinear.forward

    def has_kernel(self, dtype, device):
        return False

    def product(self, x, offsets):
        return self.loop(int8_linear, x, offsets, self._parameters['weight'], self.scale)


IN_8_BITS = {Linear: Int8Linear, FusedLinear: Int8Linear, Embedding: Int8Embedding,
             GroupedLinear: Int8Experts}


@torch.no_grad()
def quantize_weights(model, dtype):
    """Converts a model's large weights to int8 with scales of `dtype`. The model cannot be trained
    afterwards. Skips c_kv, because the mixer reads its weight."""
    for name, module in list(model.named_modules()):
        is_large = name.rpartition('.')[2] not in ('c_kv', 'wpe', 'router', 'shared_gate')
        if is_large and type(module) in IN_8_BITS:
            model.set_submodule(name, IN_8_BITS[type(module)](module, dtype))


def fill_rows(model, name, w, index, values):
    """Copies values to w[index], quantized if w is int8. w: the tensor `name` in state_dict()."""
    module = model.get_submodule(name.rpartition('.')[0])
    if w.dtype is torch.int8:
        values, scale = quantize_rows(values.to(w.device), module.scale.dtype)
        module.scale[index] = scale
    w[index] = values.to(w.device, w.dtype)

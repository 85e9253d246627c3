"""
What is done to finished weights: low-rank adapters (LoRA), which train few parameters beside frozen ones, and
8 bits, which generate from less memory. Both are modules that take the place of a linear layer.
"""
import os
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from configurator import print0
from experts import GroupedLinear
from model import Embedding, FusedLinear, Linear, hidden_init, parameter

# low-rank adapters ------------------------------------------------------------------------------------------

class LoRALinear(nn.Module):
    """A frozen linear layer with a trained low-rank update of its weight, scale * lora_b @ lora_a (Hu et al.
    2021, arXiv:2106.09685). It starts at zero: lora_a (rank, n_in) random, lora_b (n_out,
    rank) zeros. The projections of a FusedLinear share lora_a. AdamW takes both."""

    def __init__(self, base, rank, scale):
        super().__init__()
        self.base = base
        self.scale = scale
        self.lora_a = parameter(rank, base.in_features, init=hidden_init, group='adapter')
        self.lora_b = parameter(base.out_features, rank, init=nn.init.zeros_, group='adapter')

    @property
    def weight(self):
        """The weight with its update, for those who read it themselves, and for merging."""
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
    """Freezes a GPT, and puts a LoRALinear of scale alpha / rank in the place of each linear layer of its
    blocks whose name is one of targets or ends in it, as 'c_attn' or 'mlp.c_proj' do. Raises ValueError for a
    target that names no layer, or one that is not plain, as the experts' are."""
    modules = dict(model.h.named_modules())
    chosen = set()
    plain = {name for name, module in modules.items() if type(module) in (Linear, FusedLinear)}
    for target in targets:
        named = {name for name in modules if f'.{name}'.endswith(f'.{target}')}
        if not named or not named <= plain:
            raise ValueError(f"lora_targets: {target!r} is not the name of linear layers alone; adapters are "
                             f"for {', '.join(sorted({name.partition('.')[2] for name in plain}))}")
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
    """Adds each update to its weight and takes the adapters away; every parameter can be trained again."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            module.base.weight.copy_(module.weight)
            model.set_submodule(name, module.base)
    model.requires_grad_(True)


def start_lora(model, config, rest):
    """Gives a loaded model the adapters of train.py's settings. Returns their part of a checkpoint. rest: see
    sample.load. Raises ValueError without one, or if it is in out_dir, whose files a new run renames."""
    from sample import checksum
    if not rest:
        raise ValueError(f"lora_rank={config['lora_rank']} needs a trained model: give --init_from")
    path = rest['path']
    if Path(path).parent.resolve() == Path(config['out_dir']).resolve():
        raise ValueError(f"out_dir={config['out_dir']} holds {path}, the base of the adapters: give "
                         "another --out_dir")
    lora = {'rank': config['lora_rank'], 'alpha': config['lora_alpha'],
            'targets': config['lora_targets'].replace(',', ' ').split()}
    add_lora(model, **lora)
    n_params = sum(w.numel() for w in model.parameters() if w.requires_grad)
    print0(f"adapters: {n_params:,} parameters are trained")
    base = os.path.abspath(path) if os.path.exists(config['init_from']) else config['init_from']
    return lora | {'base': base, 'base_checksum': checksum(path)}


def adapted_model(rest, state, merge, changes):
    """Loads the base that a checkpoint of adapters names, and puts its adapters, `state`, next to the base's
    weights, or if `merge` adds them. Raises ValueError if the base was trained again."""
    from sample import CHANGEABLE, checksum, load
    lora = rest['lora']
    trained = {name: value for name, value in rest['model_args'].items() if name in CHANGEABLE}
    model, *_ = load(lora['base'], dtype=torch.float32, **trained | changes)
    if lora.get('base_checksum') not in (None, checksum(lora['base'])):
        raise ValueError(f"{rest['path']} has adapters for the weights that {lora['base']} had before it was "
                         "trained again: train the adapters again too")
    add_lora(model, lora['rank'], lora['alpha'], lora['targets'])
    model.load_state_dict(model.state_dict() | state)
    if merge:
        merge_lora(model)
    return model


# eight bits -------------------------------------------------------------------------------------------------

def quantize_rows(w, dtype):
    """w (..., n_in) -> int8 of the same shape and a scale for each row, (...) of dtype, whose product is w to
    within half a scale: the largest value of a row becomes 127 ("vector-wise" in arXiv:2208.07339)."""
    scale = (w.abs().amax(dim=-1).float() / 127).to(dtype)
    steps = w / scale.float().masked_fill(scale == 0, 1.0)[..., None]
    return steps.round_().clamp_(-127, 127).to(torch.int8), scale


def int8_linear(x, w, scale, bias=None):
    """x (..., n_in), w (n_out, n_in) int8, scale, bias (n_out,) -> x @ (w scale)^T + bias, (..., n_out)."""
    rows = x.numel() // x.shape[-1]
    scale = scale.to(x.dtype)
    few = x.device.type == 'cpu' and rows <= INT8_ROWS
    if few and x.dtype is torch.bfloat16 and x.shape[-1] % 16 == 0:  # torch's kernel is slow otherwise
        y = torch._weight_int8pack_mm(x.reshape(rows, -1).contiguous(), w, scale).view(*x.shape[:-1], -1)
    elif few and torch.compiler.is_compiling():  # one loop; a cast of its own would be kept, in 32 bits
        y = (x[..., None, :] * w).sum(dim=-1) * scale
    elif x.dtype is torch.float16:  # where the product may overflow before it is scaled
        y = F.linear(x, w.to(x.dtype) * scale[:, None])
    else:  # few rows in parts, whose copies stay in a CPU's cache; a GPU writes a copy of all in each step
        parts = w.split(max(1, 2**18 // x.shape[-1])) if few else [w]
        y = torch.cat([F.linear(x, part.to(x.dtype)) for part in parts], dim=-1) * scale
    return y if bias is None else y + bias.type_as(y)


INT8_ROWS = 16  # more are multiplied faster by the weight in their own dtype


class Int8Linear(nn.Module):
    """A Linear or FusedLinear whose weight has 8 bits, and a scale of `dtype` for each row."""

    def __init__(self, base, dtype):
        super().__init__()
        weight, scale = quantize_rows(base.weight, dtype)
        self._parameters['weight'] = nn.Parameter(weight, requires_grad=False)
        self.register_buffer('scale', scale, persistent=False)
        for name in 'bias', 'widths', 'num_embeddings', 'loop':  # as far as the layer has them
            setattr(self, name, getattr(base, name, None))

    @property
    def weight(self):
        raise TypeError('this weight is in 8 bits: call its layer, or except the layer in quantize_weights')

    def forward(self, x):
        y = int8_linear(x, self._parameters['weight'], self.scale, self.bias)
        return y if self.widths is None else y.split(self.widths, dim=-1)


class Int8Embedding(Int8Linear):
    """An Embedding, likewise."""

    weight = property(lambda self: self._parameters['weight'])  # whose device is the model's
    as_head = Int8Linear.forward

    def forward(self, idx):
        return F.embedding(idx, self.weight).to(self.scale.dtype) * self.scale[idx][..., None]


class Int8Experts(Int8Linear):
    """A GroupedLinear, likewise; only experts that have rows are read."""

    forward = GroupedLinear.forward  # with another product

    def has_kernel(self, dtype, device):
        return False

    def product(self, x, offsets):
        return self.loop(int8_linear, x, offsets, self._parameters['weight'], self.scale)


IN_8_BITS = {Linear: Int8Linear, FusedLinear: Int8Linear, Embedding: Int8Embedding,
             GroupedLinear: Int8Experts}


@torch.no_grad()
def quantize_weights(model, dtype):
    """Puts the large weights of a model into 8 bits, with scales of dtype; it cannot be trained any more.
    Norms, biases, learned positions, routers and gates of one element stay, and so does c_kv, which its mixer
    multiplies by itself. On the meta device it prepares for fill_rows."""
    for name, module in list(model.named_modules()):
        is_large = name.rpartition('.')[2] not in ('c_kv', 'wpe', 'router', 'shared_gate')
        if is_large and type(module) in IN_8_BITS:
            model.set_submodule(name, IN_8_BITS[type(module)](module, dtype))


def fill_rows(model, name, w, index, values):
    """Copies values to w[index] in whatever form they are kept there; w is the tensor that state_dict() has
    by this name."""
    module = model.get_submodule(name.rpartition('.')[0])
    if w.dtype is torch.int8:
        values, scale = quantize_rows(values.to(w.device), module.scale.dtype)
        module.scale[index] = scale
    w[index] = values.to(w.device, w.dtype)

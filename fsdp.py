"""Spreads a model over the ranks by FSDP2 (arXiv:2304.11277). Code that changes weights outside an
optimizer's step must call reshard() of the model and of each block: otherwise forward may use old weights.
"""
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from model import GROUPS


def shard_model(model, machine):
    """Splits the matrices, which forward gathers per block in the compute dtype. Vectors and routers, used in
    float32, stay whole. Raises ValueError for float16 and LoRA."""
    if machine.dtype == torch.float16 or not all(w.requires_grad for w in model.parameters()):
        raise ValueError("shard=True cannot be combined with dtype=float16 or lora_rank: leave one out")
    mesh = dist.init_device_mesh(machine.device_type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(machine.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    whole = {w for name, w in model.named_parameters()
             if not GROUPS[model.tags[name].group] or 'router.' in name}
    for part in *model.h, model:
        fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=whole)


def split_like(w, value):
    """This rank's part of a whole tensor, split like w."""
    return distribute_tensor(value.to(w.device), w.device_mesh, w.placements, src_data_rank=None)


def gather(state):
    """A state with whole tensors on rank 0's CPU, None elsewhere. All ranks must call it."""
    def whole(x):
        x = x.full_tensor()
        return x.cpu() if dist.get_rank() == 0 else None
    return tree_map_only(DTensor, whole, state)


def subtract_whole(subtract, moves, lr):
    """Muon's subtract(moves, lr) for split matrices. Gathers as many at once as
    there are ranks."""
    moves.sort(key=lambda move: move[0].shape)
    while moves:
        some = moves[:dist.get_world_size()]
        del moves[:len(some)]
        whole = [(torch.zeros(w.shape, device=w.device), update.full_tensor(), rows)
                 for w, update, rows in some]
        subtract(whole, lr)
        for (w, *_), (change, *_) in zip(some, whole):
            w += split_like(w, change)

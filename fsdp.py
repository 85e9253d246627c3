"""Spreads a model over the ranks by FSDP2 (arXiv:2304.11277), for models larger than a GPU. train.py imports
this file with shard=True. If you change weights other than by an optimizer's step, call model.reshard() and
block.reshard() for each block: the next forward pass may otherwise use weights that were gathered before."""
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._pytree import tree_map_only

from model import GROUPS

MIXED = implicit_replication()  # torch's functions accept whole and split weights together
MIXED.__enter__()


def shard_model(model, machine):
    """Gives each rank its part of a model that all ranks have. A block's weights are gathered in the compute
    dtype while it computes. Small weights, which the model reads in float32, stay whole on each rank."""
    mesh = dist.init_device_mesh(machine.device_type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(machine.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    whole = {w for name, w in model.named_parameters()
             if not GROUPS[model.tags[name].group] or 'router.' in name}
    for part in *model.h, model:
        fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=whole)


def split_like(w, value):
    """This rank's part of a tensor that all ranks have, split as w is."""
    return distribute_tensor(value.to(w.device), w.device_mesh, w.placements, src_data_rank=None)


def gather(state):
    """A state with whole tensors on rank 0's CPU. All ranks call it; others get None for a tensor."""
    def whole(x):
        x = x.full_tensor()
        return x.cpu() if dist.get_rank() == 0 else None
    return tree_map_only(DTensor, whole, state)


def subtract_whole(subtract, moves, lr):
    """Muon's subtract(moves, lr) for split matrices. As many are whole at once as ranks share the work."""
    moves.sort(key=lambda move: move[0].shape)
    while moves:
        some = moves[:dist.get_world_size()]
        del moves[:len(some)]
        whole = [(torch.zeros(w.shape, device=w.device), update.full_tensor(), rows)
                 for w, update, rows in some]
        subtract(whole, lr)
        for (w, *_), (change, *_) in zip(some, whole):
            w += split_like(w, change)

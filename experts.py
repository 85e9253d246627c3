"""
Mixture of experts, which replaces the MLP of a block. Shapes use the letters of model.py, and E
experts, n = B T tokens, k = n_expert_active.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import MLP, Linear, Norm, activation, branch_init, hidden_init, parameter


class GroupedLinear(nn.Module):
    """A FusedLinear per expert: x (n, n_in), with rows sorted by expert, and offsets (E,) int32,
    the end of each expert's rows -> one tensor (n, width) per width in widths."""

    names = 'gate up'

    def __init__(self, n_expert, n_in, widths, bias=False, init=hidden_init):
        super().__init__()
        self.widths = widths
        self.weight = parameter(n_expert, sum(widths), n_in, init=init, group='matrix', rows=widths)
        self.bias = parameter(n_expert, sum(widths), init=nn.init.zeros_, group='vector') if bias else None
        # not compiled, because numbers of rows vary
        self.loop = torch.compiler.disable(loop_over_experts)

    def has_kernel(self, dtype, device):
        """Whether grouped_mm supports the weights: rows must be multiples of 16 bytes."""
        return (dtype is torch.bfloat16 and device != 'mps'
                and not any(n % 8 for n in self.weight.shape[1:]))

    def forward(self, x, offsets):
        y = self.product(x, offsets)
        if self.bias is not None:
            expert = torch.searchsorted(offsets, torch.arange(len(x), device=x.device), right=True)
            y = y + self.bias[expert].type_as(y)
        return y.split(self.widths, dim=-1)

    def product(self, x, offsets):
        w = self.weight.to(x.dtype)
        if self.has_kernel(x.dtype, x.device.type):
            if torch.is_grad_enabled():  # zeros for experts without rows: pytorch issue 172439
                w = w.where(offsets.diff(prepend=offsets.new_zeros(1))[:, None, None] > 0, 0)
            return F.grouped_mm(x, w.mT, offs=offsets)
        return self.loop(F.linear, x, offsets, w)


def loop_over_experts(product, x, offsets, *weights):
    """Calls product(rows, weights) for each expert with rows."""
    segments = x.tensor_split(offsets[:-1].long().cpu())
    return torch.cat([product(rows, *each) for rows, *each in zip(segments, *weights) if len(rows)])


class Experts(nn.Module):
    """An MLP per expert: (n, C) -> (n, C), with x and offsets as in GroupedLinear."""

    def __init__(self, config):
        super().__init__()
        self.act, n = activation(config)
        E = config.n_expert
        width = config.d_expert
        self.c_fc = GroupedLinear(E, config.n_embd, (width,) * n, config.mlp_bias)
        self.c_proj = GroupedLinear(E, width, (config.n_embd,), config.mlp_bias,
                                    init=branch_init(config, 'mlp_out'))

    def forward(self, x, offsets):
        y, = self.c_proj(self.act(*self.c_fc(x, offsets)), offsets)
        return y


ROUTERS = {
    # name: (logits -> log scores of the experts, scores in a group -> score of the group)
    'softmax': (lambda logits: logits.log_softmax(-1), lambda score: score.amax(-1)),  # Mixtral, DeepSeek-V2
    'sigmoid': (F.logsigmoid, lambda score: score.topk(2, -1).values.sum(-1)),         # DeepSeek-V3
}


class MoE(nn.Module):
    """Mixture of experts: each token passes through the n_expert_active experts with the highest router
    scores (arXiv:1701.06538) and through the shared experts (arXiv:2401.06066)."""

    def __init__(self, config, layer):
        super().__init__()
        if config.router not in ROUTERS:
            raise ValueError(f"router={config.router!r} is not supported; choose one of {', '.join(ROUTERS)}")
        self.config = config
        self.layer = layer
        self.router = Linear(config.n_embd, config.n_expert, config.mlp_bias)
        self.experts = Experts(config)
        n_shared = config.n_shared_expert
        self.shared = MLP(config, n_shared * config.d_expert) if n_shared else None
        self.shared_gate = Linear(config.n_embd, 1, group='gate') if config.shared_gate else None
        self.ln_router, self.ln_in, self.ln_out, self.ln_shared_in, self.ln_shared_out = (
            Norm(config.n_embd, config) if config.expert_norms else nn.Identity() for _ in range(5))
        self.expert_scale = (parameter(config.n_expert, init=nn.init.ones_, group='vector')
                             if config.expert_norms else None)
        self.register_buffer('expert_bias', torch.zeros(config.n_expert) if config.balance_bias else None)

    def forward(self, x, context):
        """x (B, T, C) -> (B, T, C)"""
        flat = x.flatten(0, 1)  # (n, C)
        E = self.config.n_expert
        k = self.config.n_expert_active
        weight, chosen, logits, score = self.route(self.ln_router(flat))
        expert, order = chosen.flatten().sort(stable=True)  # choices sorted by expert
        ends = torch.searchsorted(expert, torch.arange(E, device=x.device), right=True, out_int32=True)
        each = self.ln_in(flat).to(context.dtype).repeat_interleave(k, dim=0)  # one row per choice
        if self.config.expert_input_scale:
            each = each * weight.view(-1, 1).type_as(each)
            weight = torch.ones_like(weight)
        # index_select, because plain indexing has a slow or nondeterministic gradient
        y = self.experts(each.index_select(0, order), ends)
        y = y.index_select(0, order.argsort()).unflatten(0, (-1, k))  # (n, k, C)
        y = self.ln_out((y * weight[..., None].type_as(y)).sum(1)).view_as(x)
        if context.learned is not None:
            context.routing.append((self.layer, *self.statistics(chosen, logits, score, context.learned)))
        if self.shared is None:
            return y
        shared = self.ln_shared_out(self.shared(self.ln_shared_in(x)))
        return y + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())

    def route(self, x):
        """x (n, C) -> float32 weights (n, k), chosen experts (n, k), logits and log scores (n, E)"""
        config = self.config
        log, group_score = ROUTERS[config.router]
        with torch.autocast(x.device.type, enabled=False):
            bias = self.router.bias
            logits = F.linear(x.float(), self.router.weight.float(), bias if bias is None else bias.float())
        if config.expert_norms:
            logits = logits * config.n_embd ** -0.5
        score = log(logits)
        rank = score.detach().exp()
        if config.balance_bias:  # arXiv:2408.15664: changes the choice, not the weights
            rank = rank + self.expert_bias
        if config.n_group:
            groups = rank.unflatten(1, (config.n_group, -1))  # (n, groups, experts per group)
            of_group = group_score(groups)
            best = of_group.topk(config.topk_group).indices
            hidden = torch.ones_like(of_group, dtype=torch.bool).scatter(1, best, False)
            rank = groups.masked_fill(hidden[..., None], -math.inf).flatten(1)
        chosen = rank.topk(config.n_expert_active).indices
        weight = score.gather(1, chosen)
        # softmax normalises the chosen scores without underflow
        weight = weight.softmax(-1) if config.norm_topk_prob else weight.exp()
        if self.expert_scale is not None:
            weight = weight * self.expert_scale[chosen]
        return weight * config.routed_scaling_factor, chosen, logits, score

    def statistics(self, chosen, logits, score, learned):
        """learned (B, T) bool: the tokens that count -> balance, 0-d, 1 if experts are used evenly (Switch,
        arXiv:2101.03961, equations 4 to 6); z, 0-d (ST-MoE, arXiv:2202.08906); load (E,), how often each
        expert was chosen"""
        E = self.config.n_expert
        rows = learned if self.config.balance_per_sequence else learned.view(1, -1)
        n = rows.sum(1, keepdim=True).clamp(min=1)
        picks = (chosen[..., None] == torch.arange(E, device=chosen.device)).sum(1)
        load, share = ((x.unflatten(0, rows.shape) * rows[..., None]).sum(1)  # (rows, E)
                       for x in (picks, score.softmax(-1)))
        total = learned.sum().clamp(min=1)
        balance = E / self.config.n_expert_active * (load * share / n).sum() / total
        z = (logits.logsumexp(-1).square() * learned.flatten()).sum() / total
        return balance, z, load.sum(0).float()

    def _apply(self, *args, **options):
        """Keeps the expert biases in float32."""
        exact = self.expert_bias
        super()._apply(*args, **options)
        if exact is not None and not exact.is_meta:
            self.expert_bias = exact.to(self.expert_bias.device)
        return self


def routing_losses(routing):
    """[(layer, balance, z, load)], one per call of MoE.forward -> entries of GPT.forward's aux"""
    layers, balance, z, _ = zip(*routing)
    loads = [sum(row[3] for row in routing if row[0] == layer) for layer in sorted({*layers})]
    return {'balance': torch.stack(balance).mean(), 'z': torch.stack(z).mean(), 'load': torch.stack(loads)}


@torch.no_grad()
def move_balance(model, load, rate=0.001):
    """Updates the expert biases by the load (layers with experts, E): adds rate for experts below the mean
    load, subtracts rate for others (arXiv:2408.15664)."""
    for block, one in zip((block for block in model.h if isinstance(block.mlp, MoE)), load, strict=True):
        block.mlp.expert_bias += rate * (one.mean() - one).sign()

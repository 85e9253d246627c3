"""
Is what stands in model.py, mixers.py and train.py still sound? Holds a small model of the config's own kind
against formulas of the papers (tests/formulas.py), torch's optimizers, and itself on another path.

    python check.py config/llama_small.py
    python check.py --init_from=out           # and the weights of this checkpoint

A check is a function of a small config, which tests may call too. It returns None or a remark, for instance
that it has no formula for a part of yours, and raises CheckFailed. If a formula fails where you meant to
change it, change it in tests/formulas.py too.
"""
import contextlib
import copy
import dataclasses
import functools
import math
import os
import sys
import traceback
import types
from unittest import mock

if __name__ == '__main__':  # else its folder is searched first
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from configurator import ROOT, configure, is_ours, naming, show

init_from = 'scratch'             # scratch (random weights), or as in sample.py: a file, folder or hub id
json: bool | str = False          # True: the numbers as a last line too; or the file to add that line to
settings = configure(globals(), 'GPTConfig', default_file='config/default.py')

import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

import model as flat
import train
from bench import print_json
from model import GPT, GPTConfig
from sample import load

sys.path.append(f'{ROOT}/tests')
from formulas import (
    BIASES,
    DECAYS,
    EXAMPLES,
    FORMULAS,
    LONG,
    OPTIMIZERS,
    SCHEDULES,
    cross_entropy,
    decoder,
    initial_values,
    moe,
    optimizer_step,
    router_losses,
)

# a small model of the same kind -----------------------------------------------------------------------------

SHORT = 24  # tokens
SMALL = dict(  # sizes of whatever the config has, hardly two alike, and several of each: an order shows
    n_embd=24, n_head=6, d_ff=44, window=5, kv_lora_rank=16, v_head_dim=12, qk_nope_head_dim=10,
    q_lora_rank=20, qk_rope_head_dim=8, linear_n_key_head=2, linear_n_value_head=4, linear_key_head_dim=6,
    linear_value_head_dim=9, n_dense_layer=1, n_expert=8, n_expert_active=3, n_shared_expert=2, d_expert=32,
    n_group=4, topk_group=2, bigram_size=50, document_token=3)


def tiny_config(config):
    """A config of the same kind, small: it has each kind of layer, and options have an effect."""
    # a fork's own among them
    changes = {name: SMALL.get(name, min(4, n)) for name, n in vars(config).items() if type(n) is int and n}
    patterns = {name: value for name, value in vars(config).items() if name.endswith('_pattern') and value}
    layers = dict.fromkeys(tuple(flat.letter(pattern, layer) for pattern in patterns.values())
                           for layer in range(config.n_layer))  # each kind once
    for name, letters in zip(patterns, zip(*layers)):
        changes[name] = ''.join(letters if len({*letters}) > 1 else letters[:1])
    changes.update(n_layer=1 + len(layers) + changes.get('n_dense_layer', 0), block_size=LONG, vocab_size=61,
                   norm_eps=0.01, dropout=0.25)
    if config.n_kv_head:
        has_heads = config.head_dim is not None
        changes.update(n_kv_head={config.n_head: 6, 1: 1}.get(config.n_kv_head, 2),  # four pairs turn
                       head_dim=math.ceil(8 / config.partial_rotary_factor) if has_heads else None)
    if config.linear_n_key_head == config.linear_n_value_head:
        changes['linear_n_value_head'] = changes.get('linear_n_key_head')
    if config.local:
        own = {'head_dim': 12, 'n_kv_head': 3}
        changes['local'] = {name: own.get(name, value) for name, value in config.local.items()}
    for name in 'query_scale', 'rope_scaling':
        if options := getattr(config, name):
            changes[name] = {key: {'length': 7, 'original_max_position_embeddings': 100}.get(
                key, value[:4] if isinstance(value, list) else value) for key, value in options.items()}
    return dataclasses.replace(config, **changes)


def randomized(config, **changes):
    """A model in evaluation mode whose every weight and buffer matters: nothing is left at zero or one."""
    model = GPT(dataclasses.replace(config, **changes))
    for w in model.state_dict().values():
        w.copy_(w + 0.2 * torch.randn_like(w) if w.ndim < 2 else 0.3 * torch.randn_like(w))
    return model.eval()


def without_noise(config, **changes):
    """A randomized model that trains, for mtp's loss, while its parts evaluate and draw no random numbers."""
    model = randomized(config, dropout=0.0, **changes)
    model.training = True
    return model


def random_tokens(config, *shape):
    """Token ids, none of which ends a document in a tiny_config."""
    return torch.randint(4, config.vocab_size, shape)


# what a check finds -----------------------------------------------------------------------------------------

class CheckFailed(Exception):
    """What a check has found to be wrong, in one line."""


def unknown(names):
    """A remark on parts that have no formula, or None."""
    return f"no formula for {', '.join(sorted(names))}" if names else None


def require(holds, message):
    """Raises CheckFailed unless it holds."""
    if not holds:
        raise CheckFailed(message)


def require_equal(found, expected, name, tolerance=1e-4, least=1.0):
    """Tensors (rows, positions, ...) or numbers, equal to within tolerance times the largest, or least."""
    found = torch.as_tensor(found)
    expected = torch.as_tensor(expected)
    require(found.isfinite().all(), f"{name}: NaN or infinite")
    wrong = (found - expected).abs() > tolerance * expected.abs().max().clamp(min=least)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        require(False, f"{name}: {found[at]:.4g} instead of {expected[at]:.4g}, first at {list(at)}")


# modules ----------------------------------------------------------------------------------------------------

def hand_on_again(context, layer, value):
    """ForwardContext.hand_on, of a layer that computes again."""
    context.handed[layer] = value


@torch.no_grad()
@mock.patch.object(flat.ForwardContext, 'hand_on', hand_on_again)
def check_formulas(config):
    """Each module of a tiny_config, inner ones first, then the whole."""
    model = without_noise(config, document_token=None)
    calls = []
    others = set()
    routing = []
    idx, targets = random_tokens(config, 2, 2, LONG)
    targets[0, 5:9] = -1
    targets[1, 3] = -100
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *call, name=name: calls.append((name, *call)))
    with torch.enable_grad():
        loss, aux = model(idx, targets, keep=LONG)
    for name, module, args, y in [*calls]:
        try:
            if formula := FORMULAS.get(type(module)):
                require_equal(y, formula(config, module, *args), name)
            elif isinstance(module, flat.Mixer):
                others.add(type(module).__name__)
            if formula is moe and 'mtp' not in name:
                routing.append(router_losses(config, module, args[0]))
        except KeyError as error:  # the tables above do not have it
            others.add(*error.args)
    logits, later = decoder(config, model, idx)
    require_equal(aux['logits'], logits, 'logits')
    require_equal(loss, cross_entropy(logits, targets), 'the loss')
    if config.mtp:
        share = (targets[:, 1:] >= 0).sum() / (targets >= 0).sum()
        require_equal(aux['mtp'], cross_entropy(later[:, :-1], targets[:, 1:]) * share, "aux['mtp']")
    for name, expected in zip(('balance', 'z', 'load'), zip(*routing)):
        expected = torch.stack(expected)
        require_equal(aux[name], expected if name == 'load' else expected.mean(), f"aux['{name}']")
    require_equal(model.eval()(idx), logits, 'logits where no gradient is asked for')
    return unknown(others)


def check_scalings(config):
    """Worked examples of the papers."""
    for name, length, options, *expected in EXAMPLES:
        found = flat.ROPE_SCALINGS[name](0.5 ** torch.arange(4), 16.0, length, factor=8.0, **options)
        for y, its in zip(found, expected):
            require_equal(y, its, f"{name}: frequencies, factor", 1e-4, 0.1)


@torch.no_grad()
def check_start(config):
    """The first loss; by names, groups and initial values, of many models."""
    models = [GPT(config).eval() for _ in range(16)]
    loss, _ = models[0](*random_tokens(config, 2, 4, SHORT))
    require_equal(loss, math.log(config.vocab_size), 'the first loss, about ln(vocabulary),', 0.07)
    for name, module in models[0].named_modules():
        for part, field in BIASES.get(type(module), {}).items():
            has_bias = getattr(module, part).bias is not None
            require(has_bias == getattr(config, field), f"{name}.{part} does not have {field}={not has_bias}")
    for name, tag in models[0].tags.items():
        w = torch.stack([model.get_parameter(name) for model in models])
        rows = [row for parts, *row in initial_values(config) if any(part in name for part in parts.split())]
        for group, mean, std in rows[:1]:
            std = (3 * w.shape[-1]) ** -0.5 if std is None else std
            require(tag.group == group, f"{name} is in the group {tag.group}, not {group}")
            off = (w.mean() - mean) / (std + 1e-6), (w.std(correction=0) - std) / (std + 1e-6)
            require_equal(off, [0, 0], f"mean and deviation of {name}, in deviations", 6 * w.numel() ** -0.5)


def check_options(config):
    """Each field, if it has its default or is turned round, changes shapes or the loss."""
    def outcome(config):
        torch.manual_seed(0)
        model = randomized(config).train()
        idx = torch.randint(8, (2, SHORT))
        loss, aux = model(idx, idx)
        return [w.shape for w in model.state_dict().values()], (loss + weighted(aux)).item()
    found = outcome(config)
    for field in dataclasses.fields(config):
        if field.name not in ('block_size', 'vocab_size', 'n_embd', 'n_layer', 'd_ff', 'bias'):
            with contextlib.suppress(ValueError, TypeError, RuntimeError):  # others need it
                value = getattr(config, field.name)
                other = dataclasses.replace(config, **{
                    field.name: not value if isinstance(value, bool) else field.default})
                require(other == config or outcome(other) != found, f"{field.name}={value!r} changes nothing")


# one path against another -----------------------------------------------------------------------------------

def check_documents(config):
    """Packed documents, and each alone in a model that knows none."""
    if not all(mixer.documents for mixer in config.mixers):
        return 'its mixers do not keep them apart, and say so'
    model = randomized(config, document_token=3)
    plain = randomized(config, document_token=None)
    plain.load_state_dict(model.state_dict())
    idx = random_tokens(config, 1, LONG)
    starts = 0, 64, 69, 70, 100  # 64: of a block of DeltaNet
    idx[0, starts] = 3
    for grad in True, False:
        with torch.set_grad_enabled(grad):
            alone = torch.cat([*map(plain, idx.tensor_split(starts[1:], 1))], 1)
            require_equal(model(idx), alone, f"documents that start at {starts}, and each alone")


@torch.no_grad()
def check_cache(config):
    """Chunks, ragged rows, copied rows, static and full caches, rewinding, against one pass."""
    model = randomized(config)
    idx = torch.randint(8, (3, SHORT))  # a document_token too, if there is one
    full = model(idx)

    def feed(cache, name, counts, at=(0, 0, 0), rows=(0, 1, 2)):
        """counts: of the next tokens of all rows, or a list, of each, which padding follows."""
        for n in counts:
            each = n if isinstance(n, list) else [n] * len(rows)
            new = pad_sequence([idx[row, a:a + m] for row, a, m in zip(rows, at, each)], True, 3)
            at = [a + m for a, m in zip(at, each)]
            keep = min(each)
            found = model(new, cache=cache, keep=keep, lengths=torch.tensor(n) if n is each else None)
            require_equal(found, torch.stack([full[row, a - keep:a] for row, a in zip(rows, at)]),
                          f"{name}, {n} tokens up to {at}")
    cache = model.make_cache(3, SHORT)
    feed(cache, 'in odd chunks', (6, 1, 1, 8, 1, 7))
    cache.reset()
    feed(cache, 'rows of other lengths', ([12, 8, 2], 3, [1, 2, 3], 1))
    cache.select([2, 0, 1, 2])
    feed(cache, 'rows copied by select', (1, 2, [3, 4, 1, 12]), (9, 17, 14, 9), (2, 0, 1, 2))
    with mock.patch.object(torch.compiler, 'is_compiling', lambda: True):  # has a path for few queries
        feed(model.make_cache(3, SHORT, static=True), 'in a static cache', (SHORT - 3, 1, 2))
    cache = model.make_cache(3, SHORT, rolling=False)
    feed(cache, 'in a cache that does not roll', (16, 1, 1))
    if any(cache.states):
        return 'a state cannot rewind'
    cache.rewind(torch.tensor([0, 4, 1]))
    feed(cache, 'after rewind', (2,), (18, 14, 17))


def weighted(aux):
    """The sum of the auxiliary losses, with the weights that check_updates trains with."""
    return 0.1 * aux.get('balance', 0) + 0.01 * aux.get('z', 0) + 0.3 * aux.get('mtp', 0)


def check_gradients(config):
    """Along a direction of each parameter, in float64. Steps are small, as one must not cross a kink, as of a
    clamp."""
    model = without_noise(config).double()
    idx = random_tokens(config, 2, SHORT)

    def objective(name, w):
        loss, aux = functional_call(model, {name: w}, (idx, idx.roll(-1, 1)))
        return loss + weighted(aux)
    with mock.patch.object(torch.Tensor, 'float', torch.Tensor.double):
        for name, w in reversed([*model.named_parameters()]):  # the first to fail is next to the fault
            is_right = any(gradcheck(functools.partial(objective, name), w, eps=step, atol=1e-8, rtol=1e-4,
                                     fast_mode=True, raise_exception=False) for step in (1e-7, 1e-6))
            require(is_right, f"{name} has another gradient than differences; those after it are right")


def check_dropout(config):
    """Keyed by seed, iteration and rank; everywhere in training, nowhere else."""
    draws = []
    for key in (1, 1, 0), (1, 1, 0), (1, 2, 0), (2, 1, 0), (1, 1, 1):
        train.seed_dropout(*key)
        draws.append(torch.rand(()).item())
    require(draws[0] == draws[1] and len({*draws}) == 4, 'it is no function of seed, iteration and rank')
    for p in config.dropout, 0.0:
        model = randomized(config).train(p > 0)
        with mock.patch.object(F, 'dropout', wraps=F.dropout) as dropout:
            model(random_tokens(config, 1, SHORT))
        require({math.prod(call.args[1:]) for call in dropout.mock_calls} == {p}, f"it is not {p} everywhere")
        places = 1 + sum(1 + (block.mlp is not None) + isinstance(block.attn, flat.BaseAttention)
                         for block in model.h)
        require(not p or dropout.call_count >= places, 'it misses embedding, attention weights or a branch')


def check_compiling(config):
    """In bfloat16, for two batches."""
    model = without_noise(config).bfloat16()  # in which experts are one product
    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, dynamic=False, backend='eager')
    with torch._dynamo.config.patch(error_on_recompile=True):
        for idx in random_tokens(config, 2, 2, SHORT):
            require_equal(forward(idx, idx)[0], model(idx, idx)[0], 'the loss of the compiled model', 0.02)


# training ---------------------------------------------------------------------------------------------------

def sequences(config):
    """Ten with a target mask, the later the more targets, in place of Bins. The first token is the number."""
    tokens = random_tokens(config, 10, SHORT + 1)
    tokens[:, 0] = torch.arange(10)
    learnt = torch.rand(10, SHORT) < torch.linspace(0.1, 1, 10)[:, None]
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:].where(learnt, -1)
    return types.SimpleNamespace(
        inputs=inputs, targets=targets, masks=True, n_sequences=lambda block_size: 10,
        batch=lambda indices, block_size: (inputs[indices].numpy(), targets[indices].numpy()))


def read(data, first, last, micro_batch=2):
    """For each iteration from first to last two micro-batches."""
    return train.read_batches(data, SHORT, range(first, last), 2, micro_batch, 7, 'cpu')


CPU = types.SimpleNamespace(device='cpu', device_type='cpu', dtype=None, autocast=contextlib.nullcontext)


def check_data(config):
    """Order, resuming, ranks; evaluation over all sequences."""
    data = sequences(config)
    model = randomized(config, dropout=0.5).train()
    shares = []

    def order(*args):
        return [n for batch in read(data, *args) for inputs, *_ in batch for n in inputs[:, 0].tolist()]
    found = order(0, 5)
    require(sorted(found[:10]) == sorted(found[10:]) == [*range(10)] and found[:10] != found[10:],
            f"two epochs take the sequences {found}: not each once, or in one order")
    train.sequence_order.cache_clear()
    require(order(3, 5) == found[12:], 'resumed at iteration 3 other sequences come')
    for rank in 0, 1:
        with mock.patch.multiple(train, RANK=rank, RANKS=2):
            shares += order(0, 5, 1)
    require(sorted(shares) == sorted(found), f"two ranks take the sequences {shares}: not each once")
    loss, _ = train.evaluate(model, data, 3, 4, CPU)
    require(model.training, 'train.evaluate leaves the model in evaluation mode')
    require_equal(loss, cross_entropy(model.eval()(data.inputs), data.targets), 'the loss of train.evaluate')


def require_groups(optimizers, kind, scales):
    """Each parameter has its group's learning rate and decay; train.make_optimizers sees that it is taken."""
    for opt in optimizers:
        for settings in opt.param_groups:
            for group in {w.tag.group for w in settings['params']}:
                require_equal(settings.get('lr_scale', 1), scales[group], f"{kind}: lr_scale of each {group}")
                require((settings.get('weight_decay', 0) > 0) == DECAYS[group],
                        f"{kind}: a {group} does not have weight_decay as GROUPS says")


@mock.patch.object(train, 'rounded', torch.Tensor.bfloat16)  # as torch's Muon, on every machine
def check_updates(config):
    """Iterations of two micro-batches, clipped, not clipped, and resumed, against the gradient of the mean
    over all targets and torch's own optimizers; after each one of NaN. Of other optimizers the groups."""
    data = sequences(config)
    for kind in train.OPTIMIZERS:
        model = without_noise(config)
        scales = {tag.group: 0.5 + len(tag.group) / 8 for tag in model.tags.values()}
        settings = train.config | {setting: 0.0 for setting, _ in train.LOSSES.values()} | {
            'learning_rate': 0.7, 'weight_decay': 0.5, 'beta1': 0.5, 'beta2': 0.99, 'momentum': 0.7,
            'optimizer': kind, 'lr_scales': scales, 'balance_rate': 0.3, 'balance_loss': 0.1, 'z_loss': 0.01,
            'mtp_loss': 0.3}
        machine = copy.copy(CPU)
        machine.dtype = torch.float16 if kind == 'muon' else None  # with a scaler
        run = train.Run(model, settings, machine)
        if kind not in OPTIMIZERS:
            require_groups(run.optimizers, kind, scales)
            continue
        theirs = [optimizer_step(model, name, kind, scales) for name in model.tags]
        for it, clip in enumerate((0.5, 0, 0.5)):
            if it == 2:
                with contextlib.redirect_stdout(None):
                    state = run.snapshot()
                    model = without_noise(model.config)
                    model.load_state_dict(state['model'])
                    run = train.Run(model, settings, machine)
                    run.resume(state | {'path': ''})
            batch, = read(data, it, it + 1)
            x, y, _ = map(torch.stack, zip(*batch))
            whole = model(x.flatten(0, 1), y.flatten(0, 1))[1]
            aux = [model(*pair)[1] | {'mtp': whole.get('mtp', 0)} for pair in zip(x, y)]
            expected = cross_entropy(model(x.flatten(0, 1)), y)
            grads = torch.autograd.grad(expected + sum(map(weighted, aux)) / 2, run.params)
            size = torch.nn.utils.get_total_norm(grads).item()
            loss, load = train.gradients(run, batch)
            require_equal(loss, expected, 'the loss reported')
            start = copy.deepcopy(model.state_dict())
            scale = run.scaler.get_scale()
            for (name, w), grad, (their, step) in zip(model.named_parameters(), grads, theirs):
                require_equal(w.grad / scale, grad, f"iteration {it}: the gradient of {name}", 1e-2,
                              1e-4 * size)
                their.grad = w.grad / scale * (clip or 1)
                step()
            train.set_rates(run.optimizers, 0.1)
            settings['grad_clip'] = clip * size
            norm, _ = train.update(run, load)
            require_equal(norm, size, 'the norm of the gradient', 1e-2)
            for w in run.params:
                w.grad = torch.full_like(w, math.nan)
            train.update(run, load)
            for (name, w), (their, _) in zip(model.named_parameters(), theirs):
                size = (their - start[name]).norm().clamp(min=1e-12)  # an expert without tokens stays
                error = (w - their).norm() / size
                require_equal(error, 0.0, f"iteration {it}, then NaN, by {kind}: error of the move of {name}",
                              0.03)
            if config.balance_bias:
                biases = [name for name in start if name.endswith('expert_bias')]
                for name, n in zip(biases, aux[0]['load'] + aux[1]['load']):
                    require_equal(model.get_buffer(name), start[name] + 0.3 * (n.mean() - n).sign(), name)
    return unknown(train.OPTIMIZERS.keys() - OPTIMIZERS)


def check_rates(config):
    """Of each schedule, warm-up among it."""
    settings = train.config | {'learning_rate': 1.0, 'warmup_iters': 10, 'max_iters': 110, 'cooldown': 0.4}
    for name, own in train.SCHEDULES.items():
        share = SCHEDULES.get(name, own)
        for it in range(0, 140, 5):
            part = share(min(max(0, it - 10) / 100, 1), 0.4)
            require(0 <= part <= 1, f"{name}: its share of the peak at {it}, {part}, is not from 0 to 1")
            expected = 0.1 + 0.9 * part if it >= 10 else (it + 1) / 11
            require_equal(train.lr_at(it, settings | {'lr_schedule': name}), expected,
                          f"{name} from 10 to 110: the rate at {it}")
    return unknown(train.SCHEDULES.keys() - SCHEDULES.keys())


# report -----------------------------------------------------------------------------------------------------

CHECKS = {  # name: (function of a small config, where to look)
    'modules equal their formulas': (check_formulas, 'its forward; expected, if this is your change'),
    'rotary scalings equal their formulas': (check_scalings, 'ROPE_SCALINGS'),
    'groups and initial values': (check_start, 'parameter() and tag() where it is made, GPT.head'),
    'options have an effect': (check_options, 'what reads this field of the config'),
    'documents do not see each other': (check_documents, 'document_starts in the mixer, make_mask'),
    'cache equals no cache, and no token sees later ones': (
        check_cache, 'make_mask, Cache, slots and states of the mixer'),
    'gradients equal differences': (check_gradients, 'detach, no_grad, in-place changes, backward functions'),
    'dropout in training only': (check_dropout, 'dropout, self.training, seed_dropout in train.py'),
    'data and evaluation': (check_data, 'sequence_order, read_batches, evaluate in train.py; Bins'),
    "updates equal torch's, resumed too": (
        check_updates, 'gradients, update, OPTIMIZERS, snapshot, resume in train.py; tag(), register_buffer'),
    'learning rates equal their formulas': (check_rates, 'lr_at, SCHEDULES in train.py'),
    'compiles as one graph': (check_compiling, '.item(), numbers that change with each call'),
}


def run_check(function, look_at, *args):
    """(whether it holds, a remark or None). A check that ends with an error does not hold."""
    torch.manual_seed(0)
    try:
        return True, function(*args)
    except CheckFailed as error:
        return False, f"{error}; look at {look_at}"
    except Exception as error:  # whatever a changed model.py may raise
        frame = [one for one in traceback.extract_tb(error.__traceback__) if is_ours(one.filename)][-1]
        return False, (f"{type(error).__name__} in {os.path.basename(frame.filename)}, line {frame.lineno}: "
                       f"{' '.join(str(error).split()):.250}; look at {look_at}")


def check(init_from='scratch', **model_args):
    """Prints a line for each check of a small model of the kind that is asked for. Returns the names of the
    checks that failed."""
    checks = dict(CHECKS)
    failed = []
    if init_from == 'scratch':
        whole = GPTConfig(**model_args)
    else:
        model, _, rest = load(init_from, **model_args)
        whole = model.config

        def check_weights(_):
            for name, w in model.state_dict().items():
                require(w.isfinite().all(), f"{name}: NaN or infinite")
        checks[f"weights of {rest['path']}"] = check_weights, 'log.csv of its run'
    small = tiny_config(whole)
    with naming(model_args):
        flat.try_tokens(GPT(small))
    torch.set_num_threads(1)  # the second would only wait
    torch.use_deterministic_algorithms(True)  # as train.py has it on a CPU
    show('checked is a small model of this kind', {
        name: value for name, value in vars(small).items() if value != getattr(whole, name)})
    for name, how in checks.items():
        holds, remark = run_check(*how, small)
        failed += [] if holds else [name]
        print(f"{'ok  ' if holds else 'FAIL'} {name}{f': {remark}' if remark else ''}", flush=True)
    return failed


if __name__ == '__main__':
    failed = check(init_from, **settings.model_args)
    print_json(json, failed=failed)
    sys.exit(bool(failed))

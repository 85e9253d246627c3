"""
Is the code of the model and of an optimizer step still right? Compares a small model of the
config's kind with formulas of papers (tests/formulas.py), torch's optimizers, and other ways to
compute the same results. tests/test_check.py checks the other parts of train.py.

    python lab/check.py config/llama_small.py
    python lab/check.py --init_from=out       # a small model of the checkpoint's kind

A check is a function of a small config. It raises AssertionError, or returns None or a remark.
"""
import os
import sys

if __name__ == '__main__':  # import from the folder above
    sys.path[0] = os.path.abspath(__file__ + '/../..')

import contextlib
import copy
import dataclasses
import functools
import math
import traceback
import types
from unittest import mock

from configurator import ROOT, check_effects, configure, marked, show, use_parts

init_from = 'scratch'             # scratch, or a checkpoint as in sample.py
json: bool | str = False          # True: print JSON too; or a file to append to
settings = configure(globals(), 'GPTConfig', default_file='config/default.py')

import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

import model as flat
import train
from bench import json_output, print_json
from model import GPT, GPTConfig
from sample import load

sys.path.append(f'{ROOT}/tests')
from formulas import (
    FORMULAS,
    LONG,
    OPTIMIZERS,
    cross_entropy,
    decoder,
    initial_values,
    later_loss,
    mean_losses,
    moe,
    optimizer_step,
    router_losses,
    shapes,
)

# a small model of the same kind -----------------------------------------------------------------------------

SHORT = 24  # tokens
RANDOM = marked(ROOT / 'model.py', 'random')
SMALL = dict(  # different sizes, to find mixed-up dimensions
    n_embd=24, n_head=6, d_ff=44, window=5, kv_lora_rank=16, v_head_dim=12, qk_nope_head_dim=10,
    q_lora_rank=20, qk_rope_head_dim=8, linear_n_key_head=2, linear_n_value_head=4, linear_key_head_dim=6,
    linear_value_head_dim=9, n_dense_layer=1, n_expert=8, n_expert_active=3, n_shared_expert=2, d_expert=32,
    n_group=4, topk_group=2, document_token=3, window_global=3)


def tiny_config(config):
    """A small config with each kind of layer, in which all options have an effect."""
    changes = {name: SMALL.get(name, min(4, n)) for name, n in vars(config).items() if type(n) is int and n}
    patterns = {name: value for name, value in vars(config).items() if name.endswith('_pattern') and value}
    layers = dict.fromkeys(tuple(flat.letter(pattern, layer) for pattern in patterns.values())
                           for layer in range(config.n_layer))
    for name, letters in zip(patterns, zip(*layers)):
        changes[name] = ''.join(letters if len({*letters}) > 1 else letters[:1])
    depth = 4 if any(mixer not in FORMULAS for mixer in config.mixers) else 1 + len(layers)
    changes.update(n_layer=depth + changes.get('n_dense_layer', 0), block_size=LONG, vocab_size=61,
                   norm_eps=0.01, dropout=0.25)
    if config.n_kv_head:
        has_heads = config.head_dim is not None
        changes.update(n_kv_head={config.n_head: 6, 1: 1}.get(config.n_kv_head, 2),  # 4 rotary pairs
                       head_dim=math.ceil(8 / config.partial_rotary_factor) if has_heads else None)
    if config.linear_n_key_head == config.linear_n_value_head:
        changes['linear_n_value_head'] = changes.get('linear_n_key_head')
    if config.local:
        sizes = {'head_dim': 12, 'n_kv_head': 3}
        changes['local'] = {name: sizes.get(name, value) for name, value in config.local.items()}
    for name in 'query_scale', 'rope_scaling':
        if options := getattr(config, name):
            changes[name] = {key: {'length': 7, 'original_max_position_embeddings': 100}.get(
                key, value[:4] if isinstance(value, list) else value) for key, value in options.items()}
    return dataclasses.replace(config, **changes)


def randomized(config):
    """A model in evaluation mode. No weights or buffers are zero or one, so all have an effect."""
    model = GPT(config)
    for w in model.state_dict().values():
        w.copy_(w + 0.2 * torch.randn_like(w) if w.ndim < 2 else 0.3 * torch.randn_like(w))
    return model.eval()


def trainable(config):
    """A randomized model with all losses, without dropout: only its outermost module is training."""
    model = randomized(dataclasses.replace(config, **dict.fromkeys(RANDOM, 0.0)))
    model.training = True
    return model


def random_tokens(config, *shape):
    """Token ids, none of which starts a document in a tiny_config."""
    return torch.randint(4, config.vocab_size, shape)


# what a check reports --------------------------------------------------------------------------------------

def unknown(names):
    """A remark on parts without a formula, or None."""
    return f"no formula for {', '.join(sorted(names))}" if names else None


def require_equal(found, expected, name, tolerance=1e-4, least=1.0):
    """Raises AssertionError unless all numbers agree within tolerance * max(expected, least)."""
    found = torch.as_tensor(found)
    expected = torch.as_tensor(expected)
    is_close = (found - expected).abs() <= tolerance * expected.abs().max().clamp(min=least)  # False for NaN
    if not is_close.all():
        at = tuple(is_close.logical_not().nonzero()[0].tolist())
        raise AssertionError(f"{name}: {found[at]:.4g} instead of {expected[at]:.4g}, first at {list(at)}")


# modules ----------------------------------------------------------------------------------------------------

@torch.no_grad()
def check_formulas(config):
    """Compares each module with its formula, then the whole model."""
    model = trainable(dataclasses.replace(config, document_token=None))
    calls = []
    others = {f'GPT.{name}' for name, part in vars(GPT).items()
              if getattr(part, '__module__', flat.__name__) != flat.__name__}  # replaced by a config file
    is_known = not others
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
            elif isinstance(module, (flat.Mixer, flat.Block)):
                others.add(type(module).__name__)
            if formula is moe and 'mtp' not in name:
                routing.append(router_losses(config, module, args[0], targets))
        except KeyError as error:  # missing from formulas.py
            others.add(*error.args)
    logits, later = decoder(config, model, idx) if is_known else (aux['logits'], None)
    require_equal(aux['logits'], logits, 'logits')
    if is_known:
        require_equal(loss, cross_entropy(logits, targets), 'the loss')
    if config.mtp and is_known:
        require_equal(aux['mtp'], later_loss(later, targets), "aux['mtp']")
    for name, expected in mean_losses(routing).items():
        require_equal(aux[name], expected, f"aux['{name}']")
    with mock.patch.object(flat, 'BLOCK', 6):  # one more than the window
        require_equal(model.eval()(idx), logits, 'logits without gradients, in blocks of queries')
    if not others:
        wrong = {(name, *w.shape) for name, w in model.named_parameters()} ^ shapes(config)
        assert not wrong, f"parameters are not those of formulas.shapes: {sorted(wrong)}"
    return unknown(others)


@torch.no_grad()
def check_start(config):
    """Checks the first loss, and the groups and initial values of parameters."""
    models = [GPT(config).eval() for _ in range(16)]
    loss, _ = models[0](*random_tokens(config, 2, 4, SHORT))
    require_equal(loss, math.log(config.vocab_size), 'the first loss, about ln(vocab_size),', 0.07)
    for name, tag in models[0].tags.items():
        w = torch.stack([model.get_parameter(name) for model in models])
        rows = [row for parts, *row in initial_values(config) if any(part in name for part in parts.split())]
        for group, mean, std in rows[:1]:
            std = (3 * w.shape[-1]) ** -0.5 if std is None else std
            assert tag.group == group, f"{name} is in the group {tag.group}, not {group}"
            off = (w.mean() - mean) / (std + 1e-6), (w.std(correction=0) - std) / (std + 1e-6)
            require_equal(off, [0, 0], f"mean and deviation of {name}, in deviations", 6 * w.numel() ** -0.5)


SIZES = (  # may have no effect
    'block_size', 'vocab_size', 'n_head', 'n_kv_head', 'head_dim', 'd_ff', 'bias', 'window_global')


def check_options(config):
    """Checks that each field not at its default has an effect."""
    def outcome(config):
        torch.manual_seed(0)
        model = randomized(config).train()
        loss, aux = model(*torch.randint(8, (2, 2, LONG)))  # includes a document_token
        return [w.shape for w in model.state_dict().values()], (loss + weighted(aux)).item()
    found = outcome(config)
    for field in dataclasses.fields(config):
        with contextlib.suppress(ValueError, TypeError, RuntimeError):  # another field needs it
            other = dataclasses.replace(config, **{field.name: field.default})
            same = outcome(other) == found and other != config and field.name not in SIZES
            assert not same, f"{field.name} changes nothing"


# one path against another -----------------------------------------------------------------------------------

def check_documents(config):
    """Compares packed documents with separate ones. If it fails, look at make_mask and document_starts."""
    if not all(mixer.documents for mixer in config.mixers):
        return 'not supported by its mixers'
    model = randomized(dataclasses.replace(config, document_token=3))
    idx = random_tokens(config, 1, LONG)
    starts = 0, 64, 69, 70, 100  # DeltaNet's blocks have 64 tokens
    idx[0, starts] = 3
    for grad in True, False:
        with torch.set_grad_enabled(grad):
            with mock.patch.object(model.config, 'document_token', None):
                alone = torch.cat([*map(model, idx.tensor_split(starts[1:], 1))], 1)
            require_equal(model(idx), alone, f"documents that start at {starts}")


@torch.no_grad()
def check_cache(config):
    """Compares one pass with many ways to use caches, and so checks that no token sees a later
    token. If it fails, look at make_mask, Cache, slots and states."""
    model = randomized(config)
    idx = torch.randint(8, (3, LONG))  # includes a document_token
    full = model(idx)

    def feed(cache, name, counts, at=(0, 0, 0), rows=(0, 1, 2)):
        """Appends tokens, one count after another. A list has one count per row."""
        for n in counts:
            each = n if isinstance(n, list) else [n] * len(rows)
            new = pad_sequence([idx[row, a:a + m] for row, a, m in zip(rows, at, each)], True, 3)
            at = [a + m for a, m in zip(at, each)]
            keep = min(each)
            found = model(new, cache=cache, keep=keep, lengths=torch.tensor(n) if n is each else None)
            require_equal(found, torch.stack([full[row, a - keep:a] for row, a in zip(rows, at)]),
                          f"{name}, {n} tokens up to {at}")
    cache = model.make_cache(3, LONG)
    feed(cache, 'in odd chunks', (6, 1, 1, 8, 1, 51, 67, 1))
    cache.reset()
    feed(cache, 'rows of other lengths', ([12, 8, 2], 3, [1, 2, 3], 1))
    cache.select([2, 0, 1, 2])
    feed(cache, 'rows copied by select', (1, 2, [3, 4, 1, 12]), (9, 17, 14, 9), (2, 0, 1, 2))
    other = model.make_cache(4, LONG)
    other.put([1, 0, 2, 3], cache)
    feed(other, 'rows copied by put', (2,), (24, 15, 18, 24), (0, 2, 1, 2))
    with mock.patch.object(torch.compiler, 'is_compiling', lambda: True):
        feed(model.make_cache(3, SHORT, static=True), 'in a static cache', (SHORT - 3, 1, 2))
    cache = model.make_cache(3, SHORT, rolling=False)
    feed(cache, 'in a cache that does not roll', (16, 1, 1))
    if any(cache.states):
        return 'without rewind, because the model has states'
    cache.rewind(torch.tensor([0, 4, 1]))
    feed(cache, 'after rewind', (2,), (18, 14, 17))


def weighted(aux):
    """A weighted sum of the auxiliary losses."""
    return 0.1 * aux.get('balance', 0) + 0.01 * aux.get('z', 0) + 0.3 * aux.get('mtp', 0)


def check_gradients(config):
    """Compares gradients with finite differences in float64. If it fails, look for detach, no_grad and
    changes in place."""
    model = trainable(config).double()
    idx = random_tokens(config, 2, SHORT)

    def objective(name, w):
        loss, aux = functional_call(model, {name: w}, (idx, idx.roll(-1, 1)))
        return loss + weighted(aux)
    with mock.patch.object(torch.Tensor, 'float', torch.Tensor.double):
        for name, w in reversed([*model.named_parameters()]):  # the first failure is next to the mistake
            is_right = any(gradcheck(functools.partial(objective, name), w, eps=step, atol=1e-8, rtol=1e-4,
                                     fast_mode=True, raise_exception=False) for step in (1e-7, 1e-6))
            assert is_right, f"the gradient of {name} is wrong, those of later parameters are right"
            assert torch.autograd.grad(objective(name, w), w)[0].any(), f"the loss does not depend on {name}"


def check_dropout(config):
    """Checks where dropout is, with a dropout that zeroes all but the embedding."""
    model = randomized(dataclasses.replace(config, proj_bias=True, mlp_bias=True)).train()
    idx = random_tokens(config, 1, SHORT)
    calls, mixed = [], []

    def dropout(x, p, training=True):
        calls.append((x, p * training))
        return x if len(calls) == 1 else 0 * x
    for part in model.mixers:
        if isinstance(part, flat.BaseAttention):
            part.c_proj.register_forward_pre_hook(lambda _, args: mixed.append(args[0]))
    with mock.patch.object(F, 'dropout', dropout):
        found = model(idx)
    assert {p for _, p in calls} == {config.dropout}, f"it is not {config.dropout} everywhere"
    assert not any(map(torch.any, mixed)), 'it is not on all attention weights'
    require_equal(calls[0][0], model.eval().embed(flat.make_context(model, idx)), 'what dropout gets first')
    placement = flat.NORM_PLACEMENTS[config.norm_placement]
    ends = 'c_proj', '_out.', *(f'{norm}.' for place, norm in placement.items() if '_out' in place)
    for name, w in model.state_dict().items():
        if any(end in name for end in ends):
            w.zero_()
    require_equal(found, model(idx), 'logits if dropout leaves only the embedding')


def check_compiling(config):
    """Compiles one graph for two batches. If it fails, look for .item() and varying Python
    numbers."""
    model = trainable(config).bfloat16()
    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, dynamic=False, backend='eager')
    with torch._dynamo.config.patch(error_on_recompile=True):
        for idx in random_tokens(config, 2, 2, SHORT):
            require_equal(forward(idx, idx)[0], model(idx, idx)[0], 'the loss of the compiled model', 0.02)


@mock.patch.object(train, 'rounded', torch.Tensor.bfloat16)  # as in torch's Muon
def check_updates(config):
    """Compares two updates with torch's optimizers. If it fails, look at lr_at, update, OPTIMIZERS and
    tags."""
    machine = types.SimpleNamespace(device='cpu', device_type='cpu', dtype=None)
    config = dataclasses.replace(config, balance_bias=False)
    for kind in OPTIMIZERS:
        model = randomized(config)
        scales = {tag.group: 0.5 + len(tag.group) / 8 for tag in model.tags.values()}
        run = train.Run(model, train.config | {
            'learning_rate': 0.7, 'weight_decay': 0.5, 'beta1': 0.5, 'beta2': 0.99, 'momentum': 0.7,
            'warmup_iters': 6, 'max_iters': 20, 'optimizer': kind, 'lr_scales': scales}, machine)
        references, steps = zip(*(optimizer_step(model, name, kind, scales) for name in model.tags))
        for it, rate, size in (0, 0.1, 1.0), (13, 0.385, 1e-3):
            start = copy.deepcopy(model.state_dict())
            for w, reference in zip(run.params, references):
                w.grad = size * torch.randn_like(w)
                reference.grad = w.grad.clone()
            torch.nn.utils.clip_grad_norm_(references, 1.0)  # does not change the second gradients
            for step in steps:
                step(rate)
            train.set_rates(run.optimizers, train.lr_at(it, run.config))
            train.update(run, None)
            for (name, w), reference in zip(model.named_parameters(), references):
                error = (w - reference).norm() / (reference - start[name]).norm()
                require_equal(error, 0.0, f"{kind}: relative error of the update of {name}", 0.03)
    return unknown(train.OPTIMIZERS.keys() - OPTIMIZERS)


# report -----------------------------------------------------------------------------------------------------

CHECKS = (check_formulas, check_start, check_options, check_documents, check_cache, check_gradients,
          check_dropout, check_updates, check_compiling)


def run_check(function, config):
    """Returns whether the check passes, and a remark or None."""
    torch.manual_seed(0)
    try:
        return True, function(config)
    except AssertionError as error:
        return False, str(error)
    except Exception as error:
        traceback.print_exc()
        return False, f"{error!r:.250}"


if __name__ == '__main__':
    use_parts(settings, vars(train))
    if init_from == 'scratch':
        whole = GPTConfig(**settings.model_args)
        check_effects(settings, vars(whole), globals())
    else:
        whole = load(init_from, **settings.model_args)[0].config
    output = json_output(json)
    small = tiny_config(whole)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    show('checking a small model of the same kind', {
        name: value for name, value in vars(small).items() if value != getattr(whole, name)})
    failed = []
    for function in CHECKS:
        name = function.__name__
        passes, remark = run_check(function, small)
        failed += [] if passes else [name]
        verdict = 'FAIL' if not passes else 'part' if remark else 'ok  '
        print(f"{verdict} {name}{f': {remark}' if remark else ''}", flush=True)
    print_json(output, failed=failed)
    sys.exit(bool(failed))

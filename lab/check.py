"""
Compares a small model of the config's kind with formulas from papers (tests/formulas.py) and with other ways
to compute the same results.

    python lab/check.py config/llama_small.py
    python lab/check.py --init_from=out       # a small model of the checkpoint's kind

A check is a function of a small config. It raises AssertionError, or else returns a remark or None.
"""
import os
import sys

if __name__ == '__main__':
    sys.path[0] = os.path.abspath(__file__ + '/../..')

import contextlib
import dataclasses
import functools
import math
from unittest import mock

from configurator import ROOT, check_effects, configure, marked, naming, show, use_parts

init_from = 'scratch'             # scratch, or a checkpoint as in sample.py
settings = configure(globals(), 'GPTConfig', default_file='config/default.py')

import torch
from torch.autograd import gradcheck
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

import model as flat
import train
from model import GPT, GPTConfig
from sample import load

sys.path.append(f'{ROOT}/tests')
from formulas import (
    FORMULAS,
    LONG,
    PARTS,
    cross_entropy,
    decoder,
    later,
    later_loss,
    mean_losses,
    moe,
    router_losses,
)

# a small model of the same kind -----------------------------------------------------------------------------

SHORT = 24  # tokens
RANDOM = marked(ROOT / 'model.py', 'random')
SMALL = dict(  # different sizes, to find mixed-up dimensions
    n_embd=24, n_head=6, d_ff=44, window=5, kv_lora_rank=16, v_head_dim=12, qk_nope_head_dim=10,
    q_lora_rank=20, qk_rope_head_dim=8, linear_n_key_head=2, linear_n_value_head=4, linear_key_head_dim=6,
    linear_value_head_dim=9, n_dense_layer=1, n_expert=8, n_expert_active=3, n_shared_expert=2, d_expert=32,
    n_group=4, topk_group=2, document_token=3)


def tiny_config(config):
    """Shrinks a config, but keeps each kind of layer and the effect of all options."""
    changes = {name: SMALL.get(name, min(4, n)) for name, n in vars(config).items() if type(n) is int and n}
    patterns = {name: value for name, value in vars(config).items() if name.endswith('_pattern') and value}
    layers = dict.fromkeys(tuple(flat.letter(pattern, layer) for pattern in patterns.values())
                           for layer in range(config.n_layer))
    for name, letters in zip(patterns, zip(*layers)):
        changes[name] = ''.join(letters if len({*letters}) > 1 else letters[:1])
    is_known = all(mixer in FORMULAS for mixer in flat.mixer_classes(config))
    depth = max(1 if is_known else 3, len(layers)) + 1
    changes.update(n_layer=depth + changes.get('n_dense_layer', 0), block_size=LONG, vocab_size=61,
                   norm_eps=0.1, dropout=0.25)
    if config.n_kv_head:
        has_heads = config.head_dim is not None
        # head_dim: 4 rotary pairs
        changes.update(n_kv_head={config.n_head: 6, 1: 1}.get(config.n_kv_head, 2),
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
    """A randomized model without dropout. Only its outermost module is in training mode, to return all
    losses."""
    model = randomized(dataclasses.replace(config, **dict.fromkeys(RANDOM, 0.0)))
    model.training = True
    return model


def random_tokens(config, *shape):
    """Token ids, none of which starts a document in a tiny_config."""
    return torch.randint(4, config.vocab_size, shape)


def require_equal(found, expected, name, tolerance=1e-4):
    """Raises AssertionError unless all numbers agree within tolerance * max(|expected|, 1)."""
    is_close = (found - expected).abs() <= tolerance * expected.abs().max().clamp(min=1)  # False for NaN
    if not is_close.all():
        at = tuple(is_close.logical_not().nonzero()[0].tolist())
        raise AssertionError(f"{name}: {found[at]:.4g} instead of {expected[at]:.4g}, first at {list(at)}")


# modules ----------------------------------------------------------------------------------------------------

@torch.no_grad()
def check_formulas(config):
    """Compares each module, and then the whole model, with a formula."""
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
        # outer formulas call inner modules, so a module without a formula is compared only with itself
        if type(module) not in {*FORMULAS, *PARTS} and not type(module).__module__.startswith('torch.'):
            others.add(type(module).__name__)
        module.register_forward_hook(lambda *call, name=name: calls.append((name, *call)))
    with torch.enable_grad():
        loss, aux = model(idx, targets)
    for name, module, args, y in [*calls]:
        try:
            if formula := FORMULAS.get(type(module)):
                require_equal(y, formula(config, module, *args), name)
            if formula is moe:
                learned = later(targets) if 'mtp' in name else targets
                routing.append(router_losses(config, module, args[0], learned))
        except KeyError as error:  # missing from formulas.py
            others.add(*error.args)
    logits = model.eval()(idx)
    if is_known:
        expected, after_next = decoder(config, model, idx)
        require_equal(logits, expected, 'logits')
        require_equal(loss, cross_entropy(expected, targets), 'the loss')
        if config.mtp:
            require_equal(aux['mtp'], later_loss(after_next, targets), "aux['mtp']")
    for name, expected in mean_losses(routing).items():
        require_equal(aux[name], expected, f"aux['{name}']")
    with mock.patch.object(flat, 'BLOCK', 6):  # one more than the window
        require_equal(model(idx), logits, 'logits without gradients, in blocks of queries')
    return f"no formula for {', '.join(sorted(others))}" if others else None


SMALL_EFFECT = (  # or no effect
    'block_size', 'vocab_size', 'n_head', 'n_kv_head', 'head_dim', 'd_ff', 'bias', 'balance_per_sequence')


@torch.no_grad()
def check_options(config):
    """Checks that resetting each field to its default changes a weight's shape, or an output (logits, losses)
    by at least 1%."""
    def outcome(config):
        torch.manual_seed(0)
        model = randomized(config).train()
        idx, targets = torch.randint(8, (2, 2, LONG))  # includes a document_token
        loss, aux = model(idx, targets)
        return [w.shape for w in model.state_dict().values()], [model(idx), loss, *aux.values()]
    shapes, found = outcome(config)
    for field in dataclasses.fields(config):
        with contextlib.suppress(ValueError, TypeError, RuntimeError):  # another field may need this one
            other = dataclasses.replace(config, **{field.name: field.default})
            if other != config and field.name not in SMALL_EFFECT:
                others, values = outcome(other)
                differ = ((a - b).norm() > 0.01 * b.norm() for a, b in zip(values, found))
                assert others != shapes or any(differ), f"{field.name} changes less than 1%"


# one path against another -----------------------------------------------------------------------------------

def check_documents(config):
    """Compares packed documents with separate ones. If it fails, look at make_mask and track_starts."""
    if not all(mixer.documents for mixer in flat.mixer_classes(config)):
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
    """Compares one full pass with many ways to use caches. This also shows that no token sees later
    tokens. If it fails, look at make_mask, Cache, `slots` and `states`."""
    model = randomized(config)
    if not all(getattr(part, 'causal', True) for part in model.modules()):
        return 'not possible, because an MLP is not causal'
    idx = torch.randint(8, (3, LONG))  # includes a document_token
    full = model(idx)

    def feed(cache, name, counts, at=(0, 0, 0), rows=(0, 1, 2)):
        """For each n in counts, appends n tokens per row, or n[i] tokens to row i."""
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


def check_gradients(config):
    """Compares gradients with finite differences in float64. If it fails, look for detach, no_grad and
    in-place changes."""
    model = trainable(config).double()
    idx = random_tokens(config, 2, SHORT)

    def objective(name, w):
        loss, aux = functional_call(model, {name: w}, (idx, idx.roll(-1, 1)))
        return loss + 0.1 * sum(value for value in aux.values() if value.requires_grad)
    with mock.patch.object(torch.Tensor, 'float', torch.Tensor.double):
        for name, w in reversed([*model.named_parameters()]):  # the first failure is next to the mistake
            is_right = any(gradcheck(functools.partial(objective, name), w, eps=step, atol=1e-8, rtol=1e-4,
                                     fast_mode=True, raise_exception=False) for step in (1e-7, 1e-6))
            assert is_right, f"the gradient of {name} is wrong, those of later parameters are right"
            assert torch.autograd.grad(objective(name, w), w)[0].any(), f"the loss does not depend on {name}"


def check_compiling(config):
    """Compiles one graph for two batches. If it fails, look for .item() and varying Python
    numbers."""
    model = trainable(config).bfloat16()
    torch._dynamo.reset()
    forward = torch.compile(model, fullgraph=True, dynamic=False, backend='eager')
    with torch._dynamo.config.patch(error_on_recompile=True):
        for idx in random_tokens(config, 2, 2, SHORT):
            require_equal(forward(idx, idx)[0], model(idx, idx)[0], 'the loss of the compiled model', 0.02)


# report -----------------------------------------------------------------------------------------------------

CHECKS = check_formulas, check_options, check_documents, check_cache, check_gradients, check_compiling


def run_check(function, config):
    """Returns whether the check passes, and a remark or None."""
    torch.manual_seed(0)
    try:
        return True, function(config)
    except AssertionError as error:
        return False, str(error)


if __name__ == '__main__':
    use_parts(settings, vars(train))
    if init_from == 'scratch':
        with naming(settings.model_args):
            whole = GPTConfig(**settings.model_args)
        check_effects(settings, vars(whole), globals())
    else:
        whole = load(init_from, **settings.model_args)[0].config
    small = tiny_config(whole)
    torch.set_num_threads(1)
    show('checking a small model of the same kind', {
        name: value for name, value in vars(small).items() if value != getattr(whole, name)})
    failed = False
    for function in CHECKS:
        name = function.__name__
        passes, remark = run_check(function, small)
        failed |= not passes
        verdict = 'FAIL' if not passes else 'part' if remark else 'ok  '
        print(f"{verdict} {name}{f': {remark}' if remark else ''}", flush=True)
    sys.exit(failed)

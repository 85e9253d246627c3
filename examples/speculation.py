"""
Speculative decoding (arXiv:2211.17192) without a second model: prompt lookup (arXiv:2304.04487) finds draft
tokens in earlier text, and one forward pass checks them all.

    python sample.py examples/speculation.py --start='def '

The text is the same as without this file, because the noise of a token depends only on the seed, the sample
and the position: a draft token is accepted if it is the token that the model would have drawn. Text that
repeats itself needs fewer passes; on a CPU, a pass for 9 tokens takes longer than a pass for one. Samples
are drawn one at a time, and --batch_size has no effect. Layers with a state (letters B, C, D and K of
mixer_pattern) raise an error, because they cannot forget rejected tokens.
"""
import os

import numpy as np
import torch

from configurator import UserError
from model import round_up
from sample import Sample, compile_step, prefill, step, uniforms

DRAFT = 8  # draft tokens per pass


def lookup(context):
    """Finds the latest earlier occurrence of the last 3 tokens, else of the last 2, else of the last token.
    Returns the DRAFT tokens after it (if fewer remain, they repeat), or [] if there is none."""
    ends = [i for i in range(1, len(context)) if context[i - 1] == context[-1]]
    if not ends:
        return []
    end = max(ends, key=lambda i: (context[i - 3:i] == context[-3:], context[i - 2:i] == context[-2:], i))
    return np.resize(context[end:], DRAFT).tolist()


@torch.no_grad()
def generate(model, prompts, max_new_tokens, seed=1337, stop_tokens=(), compile=False, cache=None,
             batch_size=None, **sampling):
    """Yields (Sample, token) and (Sample, None), as generate of sample.py does."""
    if model.config.mixer_pattern.strip('AM'):
        raise UserError(f"speculation does not support mixer_pattern={model.config.mixer_pattern!r}")
    device = model.wte.weight.device
    sampling_device = 'cpu' if device.type == 'mps' else device  # as in sample.py
    if cache is None:
        size = min(round_up(max(map(len, prompts)) + max_new_tokens + DRAFT), model.config.block_size)
        cache = model.make_cache(1, size, compile, rolling=False)
    run_step = compile_step(model, cache) if compile else step
    for number, prompt in enumerate(prompts):
        noise = uniforms(seed, number, len(prompt), max_new_tokens + 1 + DRAFT).to(sampling_device)
        sample = Sample(number, [*prompt], max_new_tokens, max(0, len(prompt) - cache.max_len), noise)
        if number:
            cache.reset()
        while sample.n_left:
            if len(sample.tokens) - sample.first > cache.max_len:  # keep the last half, as sample.py does
                sample.first = len(sample.tokens) - max(1, cache.max_len // 2)
                cache.reset()
            prefill(model, [sample.tokens[sample.first:-1]], cache, [0])  # what the cache lacks
            context = sample.tokens[sample.first:]
            draft = lookup(context) if len(context) + DRAFT <= cache.max_len else []
            seen = torch.zeros(1, 1, model.config.vocab_size, dtype=torch.bool, device=sampling_device)
            seen[..., sample.tokens] = True  # includes draft tokens, copies of earlier tokens
            done = max_new_tokens - sample.n_left
            drawn = run_step(model, torch.tensor([sample.tokens[-1:] + draft], device=device), cache,
                             noise[None, done:done + 1 + len(draft)], seen, sampling)[0].tolist()
            accepted = len(os.path.commonprefix([drawn, draft]))
            cache.rewind(len(draft) - accepted)
            for token in drawn[:accepted + 1]:
                if token < 0:
                    raise UserError("the logits are NaN: use --dtype=float32")
                if sample.n_left and token not in stop_tokens:
                    sample.n_left -= 1
                    sample.tokens.append(token)
                    yield sample, token
                else:
                    sample.n_left = 0
        yield sample, None


def patch(script):
    """Replaces generate of sample.py."""
    script.generate = generate

"""
Beam search, with the length normalisation of Google's translation system (arXiv:1609.08144, equation 14,
without the coverage penalty).

    python sample.py examples/beam_search.py --start='import os' --max_new_tokens=100

The likeliest text soon repeats itself. After an open start like `def`, it repeats itself at once. A beam ends
at a stop token, which counts in its score. The search stops when no other beam can exceed the best
score of an ended beam. The options of sampling have no effect. The KV cache has a row per beam: cache.select
copies the rows of the beams that continue.
"""
import math

import torch

from sample import Sample, prefill

BEAMS = 4
ALPHA = 0.6  # 0: the score is the total log probability
num_samples = 1  # further samples would be identical


def score(log_p, length):
    """The normalised log probability of `length` tokens."""
    return log_p / ((5 + length) / (5 + 1)) ** ALPHA


def next_log_p(model, contexts, cache):
    """Log probabilities (beams, V) of the next token. The cache may hold the first tokens of the contexts."""
    prefill(model, [context[:-1] for context in contexts], cache, range(len(contexts)))
    last = torch.tensor([context[-1:] for context in contexts], device=cache.length.device)
    return model(last, cache=cache)[:, -1].cpu().double().log_softmax(-1)


@torch.no_grad()
def search(model, prompt, max_new_tokens, stop_tokens=()):
    """Token ids -> the best beam's score and new tokens, which may end with a stop token."""
    size = min(len(prompt) + max_new_tokens, model.config.block_size)
    cache = model.make_cache(1, size)
    start = max(0, len(prompt) - size)  # the context is tokens[start:]
    beams = [(0.0, prompt)]             # total log probability, all tokens
    best = -math.inf, []
    for n in range(1, max_new_tokens + 1):
        if (length := len(prompt) + n - 1) - start > size:  # keep the last half, as sample.py does
            start = length - max(1, size // 2)
            cache.reset()
        before = torch.tensor([[total] for total, _ in beams], dtype=torch.double)
        totals = before + next_log_p(model, [tokens[start:] for _, tokens in beams], cache)  # (beams, V)
        found = totals.flatten().topk(min(totals.numel(), BEAMS * (1 + len(stop_tokens))))
        parents, live = [], []
        for total, i in zip(found.values.tolist(), found.indices.tolist()):
            parent, token = divmod(i, totals.shape[1])
            tokens = [*beams[parent][1], token]
            if token in stop_tokens or n == max_new_tokens:
                best = max(best, (score(total, n), tokens[len(prompt):]))
            elif len(live) < BEAMS:
                parents.append(parent)
                live.append((total, tokens))
        if not live or best[0] >= score(live[0][0], max_new_tokens):
            break
        cache.select(parents)
        beams = live
    return best


def generate(model, prompts, max_new_tokens, stop_tokens=(), **options):
    """Yields the tokens that `search` finds, as generate of sample.py does."""
    for number, prompt in enumerate(prompts):
        sample = Sample(number, [*prompt], max_new_tokens, 0, None)
        for token in search(model, prompt, max_new_tokens, stop_tokens)[1]:
            if sample.n_left and token not in stop_tokens:
                sample.n_left -= 1
                sample.tokens.append(token)
                yield sample, token
        yield sample, None


def patch(script):
    """Replaces generate of sample.py."""
    script.generate = generate

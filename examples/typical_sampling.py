"""
Locally typical sampling (arXiv:2202.00666, equation 10). It keeps the tokens whose information
-log p is nearest to the entropy of the distribution, just enough for a total probability of MASS.

    python sample.py examples/typical_sampling.py --top_k=None --temperature=1 --start=def

It uses the probabilities after the temperature; top_k, top_p, min_p and the repetition penalty apply
afterwards. Greedy sampling is unchanged.
"""
from sample import sample_token as draw_token

MASS = 0.95  # tau of the paper


def typical_logits(logits):
    """Logits (..., V), with -inf for tokens outside of the typical set."""
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).nan_to_num().sum(-1, keepdim=True)  # 0 * -inf counts as 0
    order = (entropy + log_p).abs().argsort(-1)                # nearest first
    p = p.gather(-1, order)
    is_outside = p.cumsum(-1) - p >= MASS                      # MASS is reached before this token
    return logits.masked_fill(is_outside.gather(-1, order.argsort(-1)), -float('inf'))


def sample_token(logits, u, temperature=0.8, **options):
    """Draws a token as sample_token of sample.py does, but from the typical set of logits (..., V)."""
    if temperature == 0:
        return draw_token(logits, u, temperature=0, **options)
    logits = typical_logits(logits.to(u.device).float() / temperature)
    return draw_token(logits, u, temperature=1, **options)


def patch(script):
    """Replaces sample_token of sample.py."""
    script.sample_token = sample_token

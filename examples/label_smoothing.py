"""
Label smoothing (arXiv:1512.00567, section 7) and a z-loss on the logits (PaLM, arXiv:2204.02311, section 5).

    python train.py examples/label_smoothing.py

The change is in GPT.loss, and only in training: the validation loss remains the cross entropy. The training
loss in the log includes both terms.
"""
import torch

from model import GPT

SMOOTHING = 0.1  # probability that the target spreads evenly over all tokens
Z_LOSS = 1e-4    # weight of the squared logarithm of the softmax's denominator

cross_entropy_loss = GPT.loss


def loss(self, x, targets):
    """Output of the last block (B, T, C) -> mean loss, and no further losses."""
    if not self.training:
        return cross_entropy_loss(self, x, targets)
    logits = self.head(x)
    z = logits.logsumexp(-1)                                                            # (B, T)
    target = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = (1 - SMOOTHING) * target + SMOOTHING * logits.mean(-1)  # mean logit under the smoothed target
    per_token = z - expected + Z_LOSS * z ** 2
    is_target = targets >= 0
    mean = torch.where(is_target, per_token, 0.0).sum() / is_target.sum().clamp(min=1)
    return mean, {}


GPT.loss = loss

"""
Prints what choices cost on this machine: naive and flash attention, RMSNorm and LayerNorm, and generating
with and without a KV cache. The script needs Linux and about two minutes: python examples/costs.py
"""
import math
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]
import torch
import torch.nn.functional as F

from model import GPT, GPTConfig


def milliseconds(run, *args, times=3):
    """The median time of a call, after a warm-up call."""
    run(*args)
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run(*args)
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def with_backward(run, *args):
    """Runs forward and backward."""
    run(*args).sum().backward()


def naive(q, k, v):
    """Causal attention that stores all scores, (B, H, T, T)."""
    is_later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(is_later, -math.inf).softmax(-1) @ v


KERNELS = {'naive': naive, 'flash': lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True)}


def attention(name, length):
    """Prints milliseconds and added MB of forward and backward, with 8 heads of 64."""
    qkv = [torch.randn(1, 8, length, 64, requires_grad=True) for _ in range(3)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ms = milliseconds(with_backward, KERNELS[name], *qkv)
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f'{name} attention, {length:,} tokens: {ms:,.0f} ms, {added:,.0f} MB')


@torch.no_grad()
def draw(gpt, new, is_cached):
    """Draws tokens one by one."""
    cache = gpt.make_cache(1, 256) if is_cached else None
    ids = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(new):
        logits = gpt(ids[:, -1:] if is_cached else ids, cache=cache, keep=1)
        ids = torch.cat((ids, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return ids


if __name__ == '__main__':
    if sys.argv[1:]:
        sys.exit(attention(sys.argv[1], int(sys.argv[2])))
    for length in 512, 2048, 8192:
        for name in KERNELS:  # each in a new process, to measure its memory
            subprocess.run([sys.executable, __file__, name, str(length)], check=True)
    x, w = torch.randn(8192, 768, requires_grad=True), torch.ones(768, requires_grad=True)
    for norm in F.rms_norm, F.layer_norm:
        print(f'{norm.__name__}, 8,192 rows of 768: forward {milliseconds(norm, x, (768,), w):.1f} ms, '
              f'with backward {milliseconds(with_backward, norm, x, (768,), w):.1f} ms')
    gpt = GPT(GPTConfig(n_layer=6, n_head=6, n_embd=384, vocab_size=4096, block_size=256)).eval()
    for new in 100, 200:
        cached, whole = (milliseconds(draw, gpt, new, is_cached) for is_cached in (True, False))
        print(f'{new} tokens: {cached:,.0f} ms with a KV cache, {whole:,.0f} ms without, '
              f'{whole / cached:.1f} times')

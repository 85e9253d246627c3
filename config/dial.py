# n_layer sets the size: width, heads, batch, sequence length, learning rate and weight decay follow from it.
# Put --n_layer first, because flags and files apply from left to right:
#   python train.py --n_layer=8 config/dial.py
# Parameters by n_layer, with a byte vocabulary: 4: 3.3M, 8: 25.8M, 12: 85.2M, 16: 202.7M, 24: 680.0M.
dataset = 'pystdlib_byte'
out_dir = f"out-dial-{n_layer}"

n_embd = 64 * n_layer
n_head = max(1, n_embd // 128)
head_dim = 128
block_size = 1024 if n_layer >= 8 else 256

batch_size = 16
# the best batch (524,288 tokens at 12 layers) grows as D^0.383 for D training tokens (arXiv:2505.13738); D
# grows as n_layer^3
gradient_accumulation_steps = 8 * max(1, round(2**16 * (n_layer / 12) ** 1.149 / (batch_size * block_size)))
tokens_per_param = 20
optimizer = 'muon'
learning_rate = 1.0 / n_embd        # best for widths of 64 to 512: docs/results.md
lr_scales = {'embedding': 12.0}
weight_decay = 0.1 * (768 / n_embd) ** 2      # as in nanochat
warmup_iters = 50
lr_schedule = 'wsd'
min_lr = 0.0

eval_interval = 250
eval_iters = 40
log_interval = 10

# One number sets the size: width, heads, batch, length and learning rate follow from n_layer. The flag
# comes first, because overrides go from left to right:
#   python train.py --n_layer=8 config/dial.py
# 4: 2M parameters, 8: 19M, 12: 94M, 16: 270M, 24: 950M (with a byte vocabulary).
dataset = 'pystdlib_byte'
out_dir = f"out-dial-{n_layer}"

n_embd = 64 * n_layer
n_head = max(1, n_embd // 128)
head_dim = 128
block_size = 1024 if n_layer >= 8 else 256

batch_size = 16
gradient_accumulation_steps = 8 * max(1, n_layer // 4)
tokens_per_param = 20
optimizer = 'muon'
learning_rate = 2e-3 * (768 / n_embd) ** 0.5  # the wider, the smaller
warmup_iters = 50
lr_schedule = 'wsd'
min_lr = 0.0

eval_interval = 250
eval_iters = 40
log_interval = 10

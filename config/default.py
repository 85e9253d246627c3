# The first run, on any machine: `python prepare.py && python train.py && python sample.py`.
# A small model learns, byte by byte, to write Python from Python's own library: minutes on 2 CPU cores.
dataset = 'pystdlib_byte'

n_layer = 4
n_head = 4
n_embd = 192
block_size = 256

batch_size = 16
gradient_accumulation_steps = 1
max_iters = 1000
optimizer = 'muon'      # about half the tokens that AdamW needs
learning_rate = 6e-3
weight_decay = 0.0      # less than one epoch: nothing to regularise
warmup_iters = 20
lr_schedule = 'wsd'
cooldown = 0.6
min_lr = 0.0

eval_interval = 250
eval_iters = 20
log_interval = 25
sample_tokens = 200

# sample.py
num_samples = 3

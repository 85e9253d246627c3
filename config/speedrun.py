# The lowest loss for five minutes of two CPU cores, or for other minutes on any machine: `python bench.py train
# config/speedrun.py` says how long a step takes, and --max_iters=... how many there are to be.
#   python prepare.py && python train.py config/speedrun.py
# It is the first run, config/default.py, with all that docs/evidence.md found to pay by the clock. No published
# family computes this model, so that it cannot be exported; python sample.py --out_dir=out-speedrun writes with it.
dataset = 'pystdlib_bpe4096'
out_dir = 'out-speedrun'

n_layer = 4
n_head = 3
n_embd = 192
block_size = 256
mixer_pattern = 'CA'      # every other layer mixes a token with the three before it alone: better, and a fast step
bigram_size = 20480       # most of what so short a training can learn is which token follows which two
residual_lambdas = True   # each layer sees the embedding again

batch_size = 16
gradient_accumulation_steps = 1
max_iters = 750
optimizer = 'normuon'
learning_rate = 6e-3
lr_scales = {'embedding': 12.0, 'scalar': 5.0}
weight_decay = 0.0
warmup_iters = 20
lr_schedule = 'wsd'
cooldown = 0.6
min_lr = 0.0

eval_interval = 250
eval_iters = 20
log_interval = 25

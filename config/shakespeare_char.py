# The fastest way to a good character model of Shakespeare on 2 CPU cores: python prepare.py shakespeare --tokenizer=char
# Everything is chosen for loss by wall clock from a cold start.
dataset = 'shakespeare_char'
out_dir = 'out-shakespeare-char'

n_layer = 4
n_head = 4
n_embd = 128
block_size = 128
norm = 'layernorm'      # one fused kernel where rmsnorm is six in eager mode on a CPU

batch_size = 24
gradient_accumulation_steps = 1
max_iters = 700
optimizer = 'muon'
learning_rate = 6e-3
weight_decay = 0.0
warmup_iters = 20
lr_schedule = 'wsd'
cooldown = 0.6
min_lr = 0.0
compile = False         # compiling takes a quarter of this run and would not earn it back

eval_interval = 100
eval_iters = 200        # all of val.bin
log_interval = 20

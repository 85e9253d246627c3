# A small Qwen3-Next: two layers of Gated DeltaNet (cache of fixed size), then one of gated attention.
#   python prepare.py --tokenizer=byte && python train.py config/hybrid_small.py
dataset = 'pystdlib_byte'
out_dir = 'out-hybrid_small'

n_layer = 6
n_head = 4
n_embd = 256
block_size = 256
n_kv_head = 2
mixer_pattern = 'DDA'   # Qwen3-Next repeats 'DDDA' over 48 layers
linear_n_key_head = 2
linear_n_value_head = 4
attn_gate = True
partial_rotary_factor = 0.25

batch_size = 16
gradient_accumulation_steps = 1
max_iters = 1000
optimizer = 'muon'
learning_rate = 4e-3
weight_decay = 0.0
warmup_iters = 40
lr_schedule = 'wsd'
min_lr = 0.0

eval_interval = 250
eval_iters = 20
log_interval = 10

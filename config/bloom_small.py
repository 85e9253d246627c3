# A small BLOOM: ALiBi, LayerNorm, GELU, multi-head attention, a norm after the embedding.
#   python prepare.py --tokenizer=byte && python train.py config/bloom_small.py
dataset = 'pystdlib_byte'
out_dir = 'out-bloom_small'

n_layer = 6
n_head = 4
n_embd = 256
block_size = 256
pos = 'alibi'
norm = 'layernorm'
norm_eps = 1e-5
embed_norm = True
mlp = 'gelu_tanh'
bias = True
qk_norm = False

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

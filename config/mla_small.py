# DeepSeek-V2's latent attention. It caches 80 numbers per token and layer; multi-head attention caches 512.
#   python prepare.py --tokenizer=byte && python train.py config/mla_small.py
dataset = 'pystdlib_byte'
out_dir = 'out-mla_small'

n_layer = 6
n_head = 4
n_embd = 256
block_size = 256
kv_lora_rank = 64
qk_nope_head_dim = 48
qk_rope_head_dim = 16
v_head_dim = 64

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

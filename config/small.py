# A 124M decoder with Qwen3's architecture, for GPUs:
#   python prepare.py fineweb_edu --shards=25         (5 GB; for your own text, train with --dataset=...)
#   torchrun --standalone --nproc_per_node=8 train.py config/small.py
dataset = 'fineweb_edu_gpt2'
out_dir = 'out-small'

n_layer = 12
n_head = 6              # heads of 128, the fastest width for attention kernels
n_kv_head = 2
n_embd = 768
d_ff = 2432             # gives 124.7M parameters
block_size = 1024

batch_size = 16         # fits 24 GB; on larger cards try 32, with gradient_accumulation_steps = 16
gradient_accumulation_steps = 32  # 524,288 tokens per iteration
tokens_per_param = 20   # Chinchilla's rule, 2.5B tokens; for a small dataset set --epochs=3
optimizer = 'muon'
learning_rate = 1.3e-3  # 1 / n_embd, as in config/dial.py; not measured at this size
lr_scales = {'embedding': 12.0}   # as in config/default.py; not measured at this size
warmup_iters = 250
lr_schedule = 'wsd'
min_lr = 0.0

eval_interval = 250
eval_iters = 40
log_interval = 10

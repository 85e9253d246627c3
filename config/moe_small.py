# A mixture of 4 routed experts (2 active per token) and 1 shared expert. The active experts together are
# about as wide as a dense MLP. The router is DeepSeek-V3's, which balances the load with a bias. The model is
# a small GLM 4.5 and can be exported.
#   python prepare.py --tokenizer=byte && python train.py config/moe_small.py
dataset = 'pystdlib_byte'
out_dir = 'out-moe_small'

n_layer = 6
n_head = 4
n_embd = 256
block_size = 256
n_kv_head = 2
n_expert = 4
n_expert_active = 2
n_shared_expert = 1
router = 'sigmoid'
balance_bias = True
d_expert = 232          # active: 3 x 232 = 696; a dense SwiGLU would have 704

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

# MiniMind 2's mixture of experts, 145,029,760 parameters: 4 experts, of which a token takes 2, and one that
# all tokens take. The data and the commands are those of config/minimind.py.
dataset = 'minimind_bpe6400'
out_dir = 'out-minimind_moe'

n_layer = 8
n_head = 8
n_kv_head = 2
n_embd = 640
vocab_size = 6400
rope_base = 1e6
norm_eps = 1e-5
qk_norm = False
tie_word_embeddings = True
n_expert = 4
n_expert_active = 2
n_shared_expert = 1
block_size = 512

batch_size = 32
gradient_accumulation_steps = 8
epochs = 1.0
learning_rate = 5e-4
min_lr = 5e-5
warmup_iters = 0
weight_decay = 0.01     # AdamW's own default, which it keeps
beta2 = 0.999
balance_loss = 0.08     # 0.01 in each of 8 layers, which it adds up; here their mean counts
balance_per_sequence = True

eval_interval = 100
eval_iters = 20
log_interval = 10

# Qwen3 0.6B (arXiv:2505.09388). 596,049,920 parameters:
#   python bench.py params config/qwen3_0.6b.py
block_size = 40960
vocab_size = 151936
n_layer = 28
n_head = 16
n_kv_head = 8
n_embd = 1024
head_dim = 128
d_ff = 3072
rope_base = 1e6         # and no rope_scaling, as in training

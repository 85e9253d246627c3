# Llama 2 70B (arXiv:2307.09288). 68,976,648,192 parameters:
#   python bench.py params config/llama2_70b.py
import math

block_size = 4096
vocab_size = 32000
n_layer = 80
n_head = 64
n_kv_head = 8
n_embd = 8192
d_ff = 4096 * math.ceil(1.3 * 8 * n_embd / 3 / 4096)  # 28672: ffn_dim_multiplier=1.3, multiple_of=4096
norm_eps = 1e-5
qk_norm = False
tie_word_embeddings = False

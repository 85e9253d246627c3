# Llama 3 8B (arXiv:2407.21783). 8,030,261,248 parameters:
#   python bench.py params config/llama3_8b.py
import math

block_size = 8192
vocab_size = 128256
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096
d_ff = 1024 * math.ceil(1.3 * 8 * n_embd / 3 / 1024)  # 14336: ffn_dim_multiplier=1.3, multiple_of=1024
rope_base = 500000.0
norm_eps = 1e-5
qk_norm = False
tie_word_embeddings = False

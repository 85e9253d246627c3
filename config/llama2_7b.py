# Llama 2 7B (arXiv:2307.09288): multi-head attention; only the 70B model has grouped queries.
# 6,738,415,616 parameters:
#   python bench.py params config/llama2_7b.py
import math

block_size = 4096
vocab_size = 32000
n_layer = 32
n_head = 32
n_embd = 4096
d_ff = 256 * math.ceil(8 * n_embd / 3 / 256)  # 11008: Llama's multiple_of=256
norm_eps = 1e-5
qk_norm = False
tie_word_embeddings = False

# Qwen3 8B (arXiv:2505.09388). 8,190,735,360 parameters:
#   python bench.py params config/qwen3_8b.py
block_size = 40960
vocab_size = 151936
n_layer = 36
n_head = 32
n_kv_head = 8
n_embd = 4096
d_ff = 12288
rope_base = 1e6
tie_word_embeddings = False

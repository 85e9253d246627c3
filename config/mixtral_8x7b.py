# Mixtral 8x7B (arXiv:2401.04088). 46,702,792,704 parameters:
#   python bench.py params config/mixtral_8x7b.py
block_size = 32768
vocab_size = 32000
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096
d_expert = 14336
n_expert = 8
n_expert_active = 2
rope_base = 1e6
norm_eps = 1e-5
qk_norm = False
tie_word_embeddings = False

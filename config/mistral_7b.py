# Mistral 7B v0.1 (arXiv:2310.06825): every layer sees 4,096 tokens. 7,241,732,096 parameters:
#   python bench.py params config/mistral_7b.py
block_size = 32768
vocab_size = 32000
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096
d_ff = 14336
window = 4096
window_pattern = 'S'
norm_eps = 1e-5
qk_norm = False
tie_word_embeddings = False

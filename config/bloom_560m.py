# BLOOM 560M (arXiv:2211.05100): ALiBi, a norm after the embedding, sequential blocks. 559,214,592 parameters:
#   python bench.py params config/bloom_560m.py
block_size = 2048
vocab_size = 250880
n_layer = 24
n_head = 16
n_embd = 1024
pos = 'alibi'
norm = 'layernorm'
norm_eps = 1e-5
embed_norm = True
mlp = 'gelu_tanh'
bias = True
qk_norm = False

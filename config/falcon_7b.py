# Falcon 7B (arXiv:2311.16867): rotary multi-query attention in parallel with the MLP, after one norm.
# 6,921,720,704 parameters:
#   python bench.py params config/falcon_7b.py
block_size = 2048
vocab_size = 65024
n_layer = 32
n_head = 71
n_kv_head = 1
n_embd = 4544
norm = 'layernorm'
norm_eps = 1e-5
norm_bias = True
norm_placement = 'parallel'
mlp = 'gelu'
qk_norm = False

# Qwen3 30B-A3B (arXiv:2505.09388): 128 experts, 8 active per token. 30,532,122,624 parameters:
#   python bench.py params config/qwen3_30b_a3b.py
block_size = 40960
vocab_size = 151936
n_layer = 48
n_head = 32
n_kv_head = 4
n_embd = 2048
head_dim = 128
d_expert = 768
n_expert = 128
n_expert_active = 8
rope_base = 1e6
tie_word_embeddings = False

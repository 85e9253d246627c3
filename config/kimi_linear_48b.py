# Kimi Linear 48B (arXiv:2510.26692): Kimi Delta Attention. Every fourth layer and the last have
# latent attention without positions. 49,122,675,072 parameters, 3.5B of them active:
#   python bench.py params config/kimi_linear_48b.py
block_size = 1048576
vocab_size = 163840
n_layer = 27
n_head = 32
n_embd = 2304
d_ff = 9216
pos = 'none'
mixer_pattern = 'KKKMKKKMKKKMKKKMKKKMKKKMKKM'
linear_n_key_head = 32
linear_key_head_dim = 128
kv_lora_rank = 512
latent_norm_eps = 1e-6
n_expert = 256
n_expert_active = 8
n_shared_expert = 1
d_expert = 1024
n_dense_layer = 1
router = 'sigmoid'
balance_bias = True
routed_scaling_factor = 2.446
norm_eps = 1e-5
tie_word_embeddings = False

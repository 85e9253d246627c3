# DeepSeek-V2-Lite (arXiv:2405.04434): latent attention, 64 routed experts (6 active per token), 2 shared.
# 15,706,484,224 parameters:
#   python bench.py params config/deepseek_v2_lite.py
block_size = 163840
vocab_size = 102400
n_layer = 27
n_head = 16
n_embd = 2048
d_ff = 10944            # width of the first layer's dense MLP
kv_lora_rank = 512
qk_nope_head_dim = 128
qk_rope_head_dim = 64
v_head_dim = 128
n_expert = 64
n_expert_active = 6
n_shared_expert = 2
d_expert = 1408
n_dense_layer = 1
norm_topk_prob = False
rope_scaling = {'rope_type': 'yarn', 'factor': 40.0, 'original_max_position_embeddings': 4096,
                'mscale': 0.707, 'mscale_all_dim': 0.707}
tie_word_embeddings = False

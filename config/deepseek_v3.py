# DeepSeek-V3 (arXiv:2412.19437), without its extra prediction layer. 671,026,404,352 parameters:
#   python bench.py params config/deepseek_v3.py
block_size = 163840
vocab_size = 129280
n_layer = 61
n_head = 128
n_embd = 7168
d_ff = 18432            # width of the first three layers' dense MLPs
q_lora_rank = 1536
kv_lora_rank = 512
qk_nope_head_dim = 128
qk_rope_head_dim = 64
v_head_dim = 128
n_expert = 256
n_expert_active = 8
n_shared_expert = 1
d_expert = 2048
n_dense_layer = 3
router = 'sigmoid'
routed_scaling_factor = 2.5
n_group = 8
topk_group = 4
balance_bias = True
balance_per_sequence = True
rope_scaling = {'rope_type': 'yarn', 'factor': 40.0, 'original_max_position_embeddings': 4096,
                'mscale': 1.0, 'mscale_all_dim': 1.0}
tie_word_embeddings = False

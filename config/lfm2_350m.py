# LFM2 350M (arXiv:2511.23404): short convolutions, and attention in 6 of 16 layers. 354,483,968 parameters:
#   python bench.py params config/lfm2_350m.py
block_size = 128000
vocab_size = 65536
n_layer = 16
n_head = 16
n_kv_head = 8
n_embd = 1024
d_ff = 4608
mixer_pattern = 'CCACCACCACACACAC'
linear_conv_kernel_dim = 3
rope_base = 1e6
norm_eps = 1e-5

# GPT-2 (124M), with the vocabulary of the dataset. With --vocab_size=50257, it has 124,439,808 parameters.
# Put this file before one of nanoGPT's config files to get nanoGPT's model:
#   python train.py config/gpt2.py ../nanoGPT/config/train_shakespeare_char.py
pos = 'learned'
norm = 'layernorm'
norm_eps = 1e-5
mlp = 'gelu_tanh'
qk_norm = False
tie_word_embeddings = True
bias = True             # as in GPT-2; nanoGPT trains with --bias=False
block_size = 1024
n_layer = 12
n_head = 12
n_embd = 768

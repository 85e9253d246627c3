# The fastest way that we know to a good character model of Shakespeare on 2 CPU cores:
#   python prepare.py shakespeare --tokenizer=char && python train.py config/shakespeare_char.py
# The settings minimize the loss at a given wall-clock time from a cold start: val loss is 1.86 after 10
# seconds and 1.50 after 50 seconds.
# To export the model with zoo/hub.py, train with --norm=rmsnorm: no family combines this architecture
# with a layernorm without biases.
dataset = 'shakespeare_char'
out_dir = 'out-shakespeare-char'

n_layer = 4
n_head = 2              # 2 heads of 64 learn faster here than 4 of 32, and cost less
n_embd = 128
block_size = 128
norm = 'layernorm'      # one fused kernel on a CPU in eager mode; rmsnorm needs six
tie_word_embeddings = False

batch_size = 16         # small, for many updates: early in training, the loss depends on their number
gradient_accumulation_steps = 1
max_iters = 960
optimizer = 'muon'
momentum = 0.85         # 0.95 forgets the first gradients too slowly for a short run
learning_rate = 6e-3
weight_decay = 0.0      # under two epochs: nothing to regularise
warmup_iters = 5
lr_schedule = 'wsd'
cooldown = 0.6
min_lr = 0.0
compile = False         # compiling takes a quarter of this run and saves less time

eval_interval = 160
eval_iters = 200        # all of val.bin
log_interval = 20

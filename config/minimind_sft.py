# MiniMind's instruction tuning (trainer/train_full_sft.py) of the model in out-minimind3/. The commands are
# in config/minimind3.py and, for version 2, in config/minimind.py.
init_from = 'out-minimind3'
out_dir = 'out-minimind-sft'
dataset = 'minimind_sft'

block_size = 768
batch_size = 16
gradient_accumulation_steps = 1
epochs = 2.0
learning_rate = 1e-5
min_lr = 1e-6
warmup_iters = 0
weight_decay = 0.01
beta2 = 0.999

eval_interval = 1000
eval_iters = 20
log_interval = 10

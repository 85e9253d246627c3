# MiniMind 3 (github.com/jingyaogong/minimind, d65ef2c), a Qwen3 of 63,912,192 parameters, and its recipe:
#   python prepare.py minimind --tokenizer=bpe:6400 && python train.py config/minimind3.py
#   python prepare.py minimind_sft --tokenizer=data/minimind_bpe6400 --block_size=768
#   python train.py config/minimind_sft.py
# MiniMind cuts or pads each text to 340 tokens; here, texts are packed.
dataset = 'minimind_bpe6400'
out_dir = 'out-minimind3'

n_layer = 8
n_head = 8
n_kv_head = 4
n_embd = 768
d_ff = 2432             # pi times n_embd, rounded up to a multiple of 64
vocab_size = 6400
rope_base = 1e6
block_size = 340

batch_size = 32
gradient_accumulation_steps = 8
epochs = 2.0
learning_rate = 5e-4
min_lr = 5e-5
warmup_iters = 0
weight_decay = 0.01     # the default of torch's AdamW, as in MiniMind
beta2 = 0.999

eval_interval = 100
eval_iters = 20
log_interval = 10

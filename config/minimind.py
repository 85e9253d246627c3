# MiniMind 2 small (github.com/jingyaogong/minimind; 25,829,888 parameters) and its recipe, but with
# the text of MiniMind 3:
#   python prepare.py minimind --tokenizer=bpe:6400 && python train.py config/minimind.py
#   python prepare.py minimind_sft --tokenizer=data/minimind_bpe6400 --block_size=512
#   python train.py config/minimind_sft.py --init_from=out-minimind --block_size=512 --learning_rate=1e-6 \
#       --min_lr=1e-7
# The text of version 2, pretrain_hq, needs prepare.py --special_tokens=tokens. Its documents begin with
# <|im_start|>, so prompts for a model trained on it must, too: sample.py --start='<|im_start|>...'
# Without a download: python prepare.py --tokenizer=byte, then train.py --dataset=pystdlib_byte.
dataset = 'minimind_bpe6400'
out_dir = 'out-minimind'

n_layer = 8
n_head = 8
n_kv_head = 2
n_embd = 512
vocab_size = 6400
rope_base = 1e6
norm_eps = 1e-5
qk_norm = False
tie_word_embeddings = True
block_size = 512
document_token = 6392   # <|endoftext|> of bpe:6400, between documents; MiniMind has one document per row.
                        # With MiniMind's own tokenizer, set --document_token=2, which is <|im_end|>

batch_size = 32
gradient_accumulation_steps = 8
epochs = 1.0
learning_rate = 5e-4
min_lr = 5e-5
warmup_iters = 0
weight_decay = 0.01     # the default of torch's AdamW, as in MiniMind
beta2 = 0.999

eval_interval = 100
eval_iters = 20
log_interval = 10

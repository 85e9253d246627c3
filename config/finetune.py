# Fine-tuning of a trained model on your data. train.py loads this file if --init_from names a model and the
# command has no config file:
#   python prepare.py chats.jsonl --tokenizer=Qwen/Qwen3-0.6B --out=mine --block_size=1024
#   python train.py --init_from=Qwen/Qwen3-0.6B --dataset=mine
#   python sample.py --out_dir=out-finetune --chat
# For adapters, add --lora_rank=8 --learning_rate=1e-3. Training all weights needs 16 bytes per parameter for
# weights, gradients and AdamW in float32: 16 GB for 1B parameters, 128 GB for 8B. Adapters need a quarter. If
# memory is short, use adapters, --shard=True on several GPUs, --checkpoint_activations=True, or
# --batch_size=1 with more --gradient_accumulation_steps. From 1B parameters on, use --learning_rate=1e-5.
# For more than 10M tokens, use larger batches.
out_dir = 'out-finetune'

block_size = 1024       # upper limit; conversations keep the --block_size of prepare.py
batch_size = 4
gradient_accumulation_steps = 2
epochs = 1.0            # further passes learn the data by heart
# Losses of SmolLM2-135M before and after 24 updates of 1,024 tokens, by learning rate:
#                                     before    3e-5  1e-4  3e-4    adapters: 3e-4  1e-3
#   trained on conversations            3.83    2.77  2.52  2.45              3.02  2.66
#     then evaluated on Shakespeare     3.84    3.82  3.82  3.94
#   trained on plain text               2.63    2.44  2.33  2.27              2.50  2.38
#     then evaluated on Shakespeare     3.84    3.79  3.77  3.85
# The 3.94 shows forgetting at the highest rate. Adapters trained on conversations forget nothing.
learning_rate = 3e-5
weight_decay = 0.0
warmup_iters = 5
lr_schedule = 'linear'
min_lr = 0.0

eval_interval = 200
eval_iters = 20
log_interval = 10

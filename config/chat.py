# Instruction tuning: questions and answers about Python's own library, from the base model in out/:
#   python prepare.py && python train.py
#   python prepare.py pydoc_chat && python train.py config/chat.py
#   python sample.py --out_dir=out-chat --chat
# The architecture is the base model's. All weights take the loss on answers to 0.69. From an earlier base
# model they took it to 0.64; adapters alone, --lora_rank=8 --learning_rate=1e-2, to 2.87: facts need room.
init_from = 'out'
out_dir = 'out-chat'
dataset = 'pydoc_chat'

batch_size = 16
gradient_accumulation_steps = 1
epochs = 6              # these answers are to be known by heart; conversations in general: 1 to 3
optimizer = 'muon'      # as the base model was trained
learning_rate = 5e-3    # nearly the base model's: it is small and learns all of this anew; else a tenth of it
weight_decay = 0.0
warmup_iters = 20
lr_schedule = 'linear'
min_lr = 0.0

eval_interval = 100
eval_iters = 20
log_interval = 25

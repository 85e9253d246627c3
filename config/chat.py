# Instruction tuning of the base model in out/ on questions and answers about Python's own library:
#   python prepare.py && python train.py
#   python prepare.py examples/pydoc_chat.py && python train.py config/chat.py
#   python sample.py --out_dir=out-chat --chat
# The architecture is the base model's. Training all weights reaches a loss of 0.69 on the answers. From an
# earlier base model, training all weights reached 0.64, but training adapters (--lora_rank=8
# --learning_rate=1e-2) reached 2.87, because adapters hold few facts.
init_from = 'out'
out_dir = 'out-chat'
dataset = 'pydoc_chat'

batch_size = 16
gradient_accumulation_steps = 1
epochs = 6              # the model must know these answers by heart; use 1 to 3 for other conversations
optimizer = 'muon'      # the base model's optimizer
learning_rate = 5e-3    # close to the base model's; larger models need a tenth of this rate
weight_decay = 0.0
warmup_iters = 20
lr_schedule = 'linear'
min_lr = 0.0

eval_interval = 100
eval_iters = 20
log_interval = 25

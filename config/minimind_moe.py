# MiniMind 2's mixture of experts: config/minimind.py, wider, with 4 experts, of which a token takes 2, and
# one that all tokens take; 145,029,760 parameters.
from minimind import *  # noqa: F403

out_dir = 'out-minimind_moe'
n_embd = 640
n_expert = 4
n_expert_active = 2
n_shared_expert = 1
balance_loss = 0.08     # 0.01 in each of 8 layers, which it adds up; here their mean counts
balance_per_sequence = True

# MiniMind 2's mixture of experts: config/minimind.py, but wider, with 4 routed experts (2 active per
# token) and one shared expert. It has 145,029,760 parameters.
from minimind import *  # noqa: F403

out_dir = 'out-minimind_moe'
n_embd = 640
n_expert = 4
n_expert_active = 2
n_shared_expert = 1
balance_loss = 0.08     # 8 x MiniMind's 0.01: MiniMind adds the losses of 8 layers; here they are averaged
balance_per_sequence = True

# MiniMind 3's mixture of experts: config/minimind3.py with 4 experts, 1 of them active per token. It has
# 198,416,640 parameters, of which 63,936,768 are active.
from minimind3 import *  # noqa: F403

out_dir = 'out-minimind3_moe'
n_expert = 4
n_expert_active = 1
norm_topk_prob = False  # with MiniMind's True, the one active expert always has weight 1, so
#                         only the balance loss trains the router
balance_loss = 0.004    # 8 x MiniMind's 5e-4: MiniMind adds the losses of 8 layers; here they are averaged

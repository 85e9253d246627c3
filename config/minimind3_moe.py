# MiniMind 3's mixture of experts: config/minimind3.py with 4 experts, of which a token takes 1; 198,416,640
# parameters, 63,936,768 of them active.
from minimind3 import *  # noqa: F403

out_dir = 'out-minimind3_moe'
n_expert = 4
n_expert_active = 1
norm_topk_prob = False  # its own is True: the weight of a single expert is then always 1, and its router
#                         learns from the balance loss alone
balance_loss = 0.004    # 5e-4 in each of 8 layers, which it adds up; here their mean counts

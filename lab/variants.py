# Lists for `python lab/compare.py NAME`. Most lists need less than 20 minutes on 2 CPU cores; `examples`,
# `tricks`, `tricks_short`, `first_run` and `few_data` need an hour or more.
# Data: `python prepare.py --tokenizer=byte`. Exceptions:
#   few_data                                   python prepare.py few.txt --tokenizer=char
#                                              (few.txt: the first 200,000 bytes of Shakespeare)
#   tricks, tricks_short, first_run            python prepare.py
QUICK = ('config/llama_small.py --n_layer=4 --n_embd=128 --block_size=128 --rope_base=10000 --max_iters=300 '
         '--warmup_iters=20 --eval_interval=100 --eval_iters=40 --compile=False')
GPT2 = QUICK.replace('config/llama_small.py', 'config/llama_small.py config/gpt2.py --n_head=4 --n_kv_head=4')
LLAMA = '--bias=False --pos=rope --norm=rmsnorm --mlp=swiglu --n_kv_head=2'

RECIPE = ('config/default.py --window=None --window_pattern=None --n_head=4 --n_embd=128 --max_iters=400 '
          '--eval_interval=100 --eval_iters=40 --compile=False --sample_tokens=0')
WINDOWS = '--window=2 --window_pattern=SL'
TRICKS = {
    'base': '', 'windows of 2': WINDOWS, 'one learning rate': '--lr_scales={}',
    'short convolution, every other layer': '--mixer_pattern=CA',
    'scalars': '''--residual_lambdas=True --lr_scales="{'embedding': 12.0, 'scalar': 5.0}"'''}

LISTS = {
    'positions': dict(base=QUICK, variants={
        'rope': '', 'rope, a quarter': '--partial_rotary_factor=0.25', 'rope, 4th none': '--pos_pattern=PPPN',
        'alibi': '--pos=alibi', 'learned': '--pos=learned', 'sinusoidal': '--pos=sinusoidal',
        'none': '--pos=none'}),
    'norms': dict(base=QUICK, variants={
        'rmsnorm': '', 'layernorm': '--norm=layernorm',
        'layernorm, bias': '--norm=layernorm --norm_bias=True', 'qk_norm': '--qk_norm=True',
        'embed_norm': '--embed_norm=True'}),
    'mlp': dict(base=QUICK, match='params', variants={
        'swiglu': '', 'geglu': '--mlp=geglu', 'reglu': '--mlp=reglu', 'gelu': '--mlp=gelu',
        'relu': '--mlp=relu', 'relu2': '--mlp=relu2'}),
    'attention': dict(base=f'{QUICK} --n_kv_head=4', match='params', variants={
        'multi-head': '', 'grouped, 2 of 4': '--n_kv_head=2', 'multi-query': '--n_kv_head=1',
        'latent, 32': '--n_kv_head=None --kv_lora_rank=32 --qk_nope_head_dim=24 --qk_rope_head_dim=8 '
                      '--v_head_dim=32',
        'window 32, SSSL': '--window=32 --window_pattern=SSSL'}),
    'placement': dict(base=QUICK, variants={
        'pre': '', 'post': '--norm_placement=post', 'output': '--norm_placement=output',
        'sandwich': '--norm_placement=sandwich',
        'parallel': '--norm_placement=parallel', 'parallel, 2 norms': '--norm_placement=parallel_2'}),
    'experts': dict(base=QUICK, match='active_params', variants={
        'dense': '', '4 experts, 2 active': '--n_expert=4', '8 experts, 2 active': '--n_expert=8',
        '4 experts, 2 and a shared': '--n_expert=4 --n_shared_expert=1'}),
    'optimizer': dict(base=QUICK, variants={
        'muon 4e-3': '', 'muon 2e-3': '--learning_rate=2e-3', 'muon 8e-3': '--learning_rate=8e-3',
        'adamw 4e-3': '--optimizer=adamw', 'adamw 2e-3': '--optimizer=adamw --learning_rate=2e-3',
        'adamw 8e-3': '--optimizer=adamw --learning_rate=8e-3',
        'adamw 1e-3': '--optimizer=adamw --learning_rate=1e-3'}),
    'tricks': dict(base=RECIPE, variants=TRICKS),
    'tricks_short': dict(base=f'{RECIPE} --max_iters=200', variants={
        'base': '', 'half as long': '--max_iters=100', 'twice as long': '--max_iters=400'} | TRICKS),
    'first_run': dict(base='config/default.py --sample_tokens=0', variants={
        'no windows': '--window=None --window_pattern=None', 'default': ''}),
    'ladder': dict(base=GPT2, match='params', variants={
        'GPT-2': '', 'without biases': '--bias=False', 'RoPE': '--bias=False --pos=rope',
        'RMSNorm': '--bias=False --pos=rope --norm=rmsnorm',
        'SwiGLU': '--bias=False --pos=rope --norm=rmsnorm --mlp=swiglu', 'GQA, as Llama': LLAMA,
        'QK-norm, as Qwen3': f'{LLAMA} --qk_norm=True'}),
    'few_data': dict(base=f'{QUICK} --dataset=few_char --epochs=8', variants={
        '8 epochs': '', '4 epochs': '--epochs=4', 'decay 1': '--weight_decay=1',
        'decay 2': '--weight_decay=2'}),
    # inner_params excludes embeddings, such as those of engram.py
    'examples': dict(base=QUICK, match='inner_params', variants={
        'base': '', 'half as long': '--max_iters=150', 'twice as long': '--max_iters=600',
        'soap': 'examples/soap.py --learning_rate=3e-3', 'constant rate': '--decay_lr=False',
        'weight_mean, constant rate': 'examples/weight_mean.py --decay_lr=False',
        **{name: f'examples/{name}.py' for name in (
            'attention_residuals', 'canon', 'differential_attention', 'engram', 'fire', 'growing_length',
            'hyper_connections', 'label_smoothing', 'looped', 'mhc', 'moba', 'relu_power', 'value_residual',
            'weight_mean', 'yoco')}}),
}

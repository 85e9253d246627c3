#!/usr/bin/env bash
# Prints every figure that the README and docs/ call "not measured", on one CUDA device, in about 45 minutes:
#   bash docs/gpu.sh | tee gpu.txt
# Flags are added to each command, so that the script can be tried anywhere:
#   bash docs/gpu.sh --n_layer=3 --n_embd=192 --d_ff=64 --block_size=128 --vocab_size=512   # but for float16
cd "$(dirname "$0")/.." || exit
out=$(mktemp -d)
trap 'rm -r "$out"' EXIT

title() { printf '\n# %s\n' "$*"; }
run() {  # prints the command, and the end of what it prints
    printf '\n$ %s\n' "$*"
    "$@" 2>&1 | tail -n 14
}

title machine
python -c "import torch; print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version())"
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader

title is it right
run python -m pytest -q test_model.py
run python check.py config/small.py "$@"

title a training step of config/small.py, 500,000 tokens a second on an H200 is the aim
for rows in 16 32 64; do run python bench.py train config/small.py --batch_size=$rows --rounds=3 "$@"; done
run python bench.py train config/small.py --batch_size=32 --rounds=3 --optimizer=muon "$@"
run python bench.py train config/small.py --batch_size=16 --rounds=3 --compile=False "$@"

title the run itself, stopped and resumed
[ -d data/pystdlib_byte ] || run python prepare.py --tokenizer=byte
small=(config/small.py --dataset=pystdlib_byte --vocab_size=50304 --out_dir="$out/small" --tokens_per_param=None
       --max_iters=60 --eval_interval=60 --eval_iters=2 --warmup_iters=5 --batch_size=32
       --gradient_accumulation_steps=16)
run torchrun --standalone train.py "${small[@]}" "$@"
run torchrun --standalone train.py --out_dir="$out/small" --init_from=resume --max_iters=65
run python bench.py eval --init_from="$out/small" --dtype=bfloat16
run python bench.py eval --init_from="$out/small" --dtype=bfloat16 --quantize=int8

title every kind of model, 20 iterations
for config in moe_small hybrid_small mla_small llama_small bloom_small falcon_small; do
    run python train.py config/$config.py --out_dir="$out/$config" --max_iters=20 --eval_iters=2 "$@"
done
for flags in '--window=64 --window_pattern=SL' --document_token=10 --checkpoint_activations=True --dtype=float16 \
             --dtype=float32 --deterministic=True; do
    # shellcheck disable=SC2086  # two flags are two words
    run python train.py config/llama_small.py --out_dir="$out/flags" --max_iters=20 --eval_iters=2 $flags "$@"
done

title decoding: 124M, 1B, 8B
for flags in --compile=False --compile=True '--compile=True --quantize=int8' '--compile=True --prompt_len=900'; do
    # shellcheck disable=SC2086
    run python bench.py decode config/small.py --rounds=3 $flags "$@"
done
billion=(--n_layer=16 --n_head=32 --n_kv_head=8 --n_embd=2048 --d_ff=8192 --vocab_size=128256 --block_size=4096)
for flags in '' --quantize=int8 --prompt_len=3000; do
    # shellcheck disable=SC2086
    run python bench.py decode "${billion[@]}" --compile=True --rounds=3 $flags "$@"
    # shellcheck disable=SC2086
    run python bench.py decode config/qwen3_8b.py --block_size=4096 --compile=True --rounds=3 $flags "$@"
done

title mixers, and what parts cost
for mixer in D B K C; do
    run python bench.py train --n_layer=4 --n_head=8 --n_embd=512 --block_size=2048 --mixer_pattern=$mixer "$@"
done
run python docs/cost.py

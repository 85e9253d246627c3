#!/usr/bin/env bash
# Checks and measures flatgpt on CUDA devices, in sections of less than nine minutes, the most important first:
#   bash docs/gpu.sh right          # or paths, train, profile, run, decode, 1b, 8b, kinds, kinds2, flags, mixers
# docs/gpu.md explains the sections. The folder $OUT (default: out-gpu) receives all output in <section>.txt. Its file
# gpu.json has, per command, the exit code, the seconds, and the numbers or last lines. Exit codes 124 and 137 mean
# that a command hung and was ended at its limit.
# Further flags are added to each command, so that you can try the script without a GPU:
#   bash docs/gpu.sh train --n_layer=3 --n_embd=192 --block_size=128 --vocab_size=512 --compile=False --device=cpu
cd "$(dirname "$0")/.." || exit
out=${OUT:-out-gpu} section=$1 fresh=1 failed=0
shift
mkdir -p "$out" || exit
export PYTHONUNBUFFERED=1  # otherwise output is lost when a command is ended
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')

run() {  # limit in seconds, command; prints the end of its output
    local limit=$1 left=$((530 - SECONDS)) began=$SECONDS code
    shift
    ((limit < left)) || limit=$((left > 1 ? left : 1))
    printf '\n$ %s\n' "${*%%$'\n'*}" | tee -a "$out/$section.txt"
    timeout -k 10 "$limit" "$@" </dev/null >"$work/output" 2>&1
    code=$?
    tail -n 14 "$work/output"
    cat "$work/output" >>"$out/$section.txt"
    ((code == 0)) || { failed=$((failed + 1)); echo "exit code $code after $((SECONDS - began)) s"; }
    python - "$out/gpu.json" "$section" $fresh $code $((SECONDS - began)) "$work/output" "${*%%$'\n'*}" <<'PYTHON'
import json, os, sys
path, section, fresh, code, seconds, output, command = sys.argv[1:]
found = json.load(open(path)) if os.path.exists(path) else {}
lines = open(output, errors='replace').read().splitlines() or ['']
try:
    numbers = dict(json.loads(lines[-1]))
except (ValueError, TypeError):
    numbers = None
row = {'command': command, 'exit': int(code), 'seconds': int(seconds), 'numbers': numbers}
found[section] = ([] if fresh == '1' else found[section]) + [row if numbers else {**row, 'end': lines[-30:]}]
with open(path + '.tmp', 'w') as f:
    json.dump(found, f, indent=1)
os.replace(path + '.tmp', path)
PYTHON
    fresh=0
}

text() {  # prepares Python's own library as bytes
    [ -d data/pystdlib_byte ] || run 60 python prepare.py --tokenizer=byte
}

short() {  # seconds, folder, config, flags: 20 iterations
    run "$1" python train.py "config/$3.py" --out_dir="$work/$2" --max_iters=20 --warmup_iters=5 --eval_iters=2 \
        --log_interval=1 "${@:4}"
}

kinds() {  # trains configs on the GPU, compiled in bfloat16, and on the CPU in float32
    text
    for config in "$@"; do
        short 100 "$config" "$config" --compile=True "${flags[@]}"
        short 70 "$config-cpu" "$config" --compile=False --dtype=float32 "${flags[@]}" --device=cpu
        run 10 python -c "$beside" "$work/$config" "$work/$config-cpu"
    done
}

beside='import csv, json, sys  # the losses of two runs
losses = [[float(row["loss"]) for row in csv.DictReader(open(f"{out}/log.csv"))] for out in sys.argv[1:]]
print(json.dumps({"losses": losses, "largest difference": max(abs(a - b) for a, b in zip(*losses))}))'

profile='import json, sys, warnings  # time of a step by kernel, its memory, waits of the host
import torch
import train
from configurator import runtime
from model import GPT, GPTConfig
shape = dict(n_layer=12, n_head=6, n_kv_head=2, n_embd=768, d_ff=2432, block_size=1024, vocab_size=50304)
given = dict(flag.strip("-").split("=") for flag in sys.argv[1:])
rows, device = int(given.pop("batch_size", 32)), given.pop("device", "auto")
compiled = given.pop("compile", "True") == "True"
machine = runtime(device, "auto")
model = GPT(GPTConfig(**shape | {name: int(value) for name, value in given.items()})).to(machine.device).train()
settings = {**train.config, "optimizer": "muon"}
run = train.Run(model, settings, machine)
x = torch.randint(model.config.vocab_size, (rows, model.config.block_size), device=machine.device)
run.forward = train.compile_model(model, machine.device) if compiled else model
def step():
    train.gradients(run, [(x, x, 1.0)])
    train.update(run, None)
for _ in range(3):
    step()
on_gpu = machine.device_type == "cuda"
with torch.profiler.profile() as found:
    for _ in range(5):
        step()
    if on_gpu:
        torch.cuda.synchronize()
print(found.key_averages().table(sort_by=f"self_{machine.device_type}_time_total", row_limit=40, max_name_column_width=90))
with warnings.catch_warnings(record=True) as waits:
    warnings.simplefilter("always")
    if on_gpu:
        torch.cuda.set_sync_debug_mode("warn")
    step()
numbers = {"peak GB": (train.peak_mb(machine.device) or 0) * 2**20 / 1e9,
           "waits a step": len(waits) if on_gpu else None}
print(*(str(wait.message) for wait in waits), sep="\n")
print(json.dumps(numbers))'

flags=("$@")
machine='import json, platform, torch
cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"torch": torch.__version__, "python": platform.python_version(), "cuda": torch.version.cuda, "cards": cards,
                  "cudnn": torch.backends.cudnn.version()}))'
run 60 python -c "$machine"

case $section in
right)  # losses and gradients compared with the CPU, updates, int8
    run 100 python -m pytest -v -s tests/test_cuda.py -k 'losses and not compiled'
    run 80 python -m pytest -v -s tests/test_cuda.py -k 'updates or weights or logits'
    run 260 python -m pytest -v -s tests/test_cuda.py -k 'losses and compiled and not states'
    run 300 python -m pytest -v -s tests/test_cuda.py -k 'losses and compiled and states'
    ;;
paths)  # equal text on each path, deterministic runs, ranks
    run 200 python -m pytest -v -s tests/test_cuda.py -k greedy
    run 160 python -m pytest -v -s tests/test_cuda.py -k deterministic
    run 160 python -m pytest -v -s tests/test_cuda.py -k ranks
    ;;
train)
    for rows in 16 32 64; do
        run 110 python bench.py train config/small.py --json=True --batch_size=$rows --rounds=3 "$@"
    done
    run 100 python bench.py train config/small.py --json=True --batch_size=32 --rounds=3 --optimizer=adamw "$@"
    run 60 python bench.py train config/small.py --json=True --batch_size=16 --rounds=3 --compile=False "$@"
    ;;
profile)
    run 150 python -c "$profile" --batch_size=32 "$@"
    for variable in TORCHINDUCTOR_COORDINATE_DESCENT_TUNING TORCHINDUCTOR_MAX_AUTOTUNE_GEMM; do
        run 180 env $variable=1 python bench.py train config/small.py --json=True --batch_size=32 --rounds=3 "$@"
    done
    ;;
run)  # 60 iterations of config/small.py, resumed
    text
    run 240 torchrun --standalone train.py config/small.py --dataset=pystdlib_byte --vocab_size=50304 \
        --out_dir="$work/small" --tokens_per_param=None --max_iters=60 --eval_interval=60 --eval_iters=2 \
        --warmup_iters=5 --batch_size=32 --gradient_accumulation_steps=16 --compile=True "$@"
    run 150 torchrun --standalone train.py --out_dir="$work/small" --init_from=resume --max_iters=65
    run 60 python train.py --init_from="$work/small" --dataset=pystdlib_byte --eval_only
    ;;
decode)
    for more in --compile=False --compile=True '--compile=True --quantize=int8' '--compile=True --prompt_len=900' \
                '--compile=True --batch_size=64'; do
        # shellcheck disable=SC2086  # two flags are two words
        run 110 python bench.py decode config/small.py --json=True --rounds=2 $more "$@"
    done
    ;;
1b)
    for more in --compile=False --compile=True '--compile=True --quantize=int8' '--compile=True --prompt_len=3000'; do
        # shellcheck disable=SC2086
        run 130 python bench.py decode --n_layer=16 --n_head=32 --n_kv_head=8 --n_embd=2048 --d_ff=8192 \
            --window=None --window_pattern=None --vocab_size=128256 --block_size=4096 --json=True --rounds=2 $more "$@"
    done
    ;;
8b)
    for more in '' --quantize=int8; do
        # shellcheck disable=SC2086
        run 260 python bench.py decode config/qwen3_8b.py --block_size=4096 --compile=True --json=True --rounds=2 $more "$@"
    done
    ;;
kinds)
    kinds moe_small hybrid_small mla_small
    ;;
kinds2)
    kinds llama_small bloom_small falcon_small
    ;;
flags)
    text
    for more in '--window=64 --window_pattern=SL' --document_token=10 '--checkpoint_activations=True --dropout=0.1' \
                '--checkpoint_activations=True --dropout=0.1 --compile=True' --dtype=float16 \
                --dtype=float32 --deterministic=True; do
        # shellcheck disable=SC2086
        short 70 flags llama_small $more "$@"
    done
    ((gpus < 2)) || run 90 torchrun --standalone --nproc_per_node="$gpus" train.py config/llama_small.py --max_iters=20 \
        --out_dir="$work/shard" --shard=True --compile=True "$@"
    ;;
mixers)
    for mixer in A D B K C; do
        run 75 python bench.py train --n_layer=4 --n_head=8 --n_embd=512 --block_size=2048 --mixer_pattern=$mixer --rounds=2 \
            --window=None --window_pattern=None --optimizer=adamw --batch_size=12 --json=True "$@"
    done
    ;;
*)
    echo "unknown section $section: see the top of docs/gpu.sh"
    exit 2
    ;;
esac
echo
echo "$failed commands failed; see $out/$section.txt and $out/gpu.json"
exit $((failed > 0))

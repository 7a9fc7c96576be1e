#!/usr/bin/env bash
# From an autoregressive checkpoint to a reinforced diffusion model on one GPU: docs/real.md.
#
#   make speedrun                            Qwen2.5-Coder-0.5B-Instruct and GSM8K, from the hub
#   make speedrun MODEL=DIR OUT=runs/mine TRAIN=train.jsonl TEST=test.jsonl BLOCK=8 GPUS=2
#
# Prints each command before it runs it. Called again, it continues where it stopped.
set -euo pipefail
cd "$(dirname "$0")"
MODEL=${MODEL:-Qwen/Qwen2.5-Coder-0.5B-Instruct} # directory or hub id: Qwen2, Qwen3 or Llama
OUT=${OUT:-runs/speedrun}
TRAIN=${TRAIN:-openai/gsm8k} TEST=${TEST:-openai/gsm8k} # files or hub ids
BLOCK=${BLOCK:-4} GPUS=${GPUS:-1} PYTHON=${PYTHON:-python}
LAUNCH="$PYTHON -m torch.distributed.run --standalone --nproc-per-node"
((384 % GPUS == 0)) || { echo "GPUS=$GPUS does not divide the 384 rows of a step" && exit 1; }
SECONDS=0
mkdir -p "$OUT"
settings="$MODEL $TRAIN $TEST $BLOCK"
[ "$(cat "$OUT/settings" 2>/dev/null || echo "$settings")" = "$settings" ] ||
    { echo "$OUT was begun with $(cat "$OUT/settings"): give another OUT" && exit 1; }
echo "$settings" >"$OUT/settings"

show() {
    printf '\n[%d s] %s\n' $SECONDS "$*"
    "$@"
}
evaluate() { # NAME RANKS FLAG...: an evaluation in $OUT/NAME
    local out=$OUT/$1 ranks=$2
    shift 2
    if [ -e "$out/table.md" ]; then return; fi
    if [ -e "$out/config.json" ]; then set -- --resume "$out"; else set -- "$@" --out "$out"; fi
    show $LAUNCH "$ranks" evals/run.py --tasks gsm8k --batch-size 256 "$@"
}
train() { # NAME STEPS SCRIPT FLAG...: a run in $OUT/NAME; $OUT/NAME/final is a link to its last weights
    local out=$OUT/$1 steps=$2 script=$3 last=checkpoints/step-$(printf %06d "$2") old
    shift 3
    if [ -e "$out/final" ]; then return; fi
    if ! ls -d "$out"/*/$last >/dev/null 2>&1; then
        old=$(ls -d "$out"/*/resume/step-* 2>/dev/null | tail -1 || true)
        if [ "$old" ]; then set -- --resume "${old%/resume/*}"; else set -- "$@" --out "$out"; fi
        show $LAUNCH "$GPUS" "$script" --task gsm8k --lora-rank 0 --keep-saves 1 --max-steps "$steps" "$@"
    fi
    ln -sfn "$(cd "$out" && ls -d */$last | tail -1)" "$out/final"
}

# 1. The model's own answers to the training questions: right ones, and half as many wrong ones.
# lmdeploy's engine is bound by Python: six of them share a large GPU, two a small one.
memory=$($PYTHON -c "import torch
print(torch.cuda.get_device_properties().total_memory >> 30 if torch.cuda.is_available() else 0)")
if ((memory == 0)); then echo "torch sees no GPU: on a CPU this is far too slow"; fi
if $PYTHON -c "import lmdeploy" 2>/dev/null; then
    ENGINES=${ENGINES:-$((GPUS * (memory < 40 ? 2 : 6)))}
elif [ ! -e "$OUT/samples/table.md" ]; then
    echo "Without lmdeploy this stage is slow; the times in docs/real.md are with it. To install it:" \
        "$PYTHON -m pip install -r requirements-gpu.txt; then begin again with another OUT"
fi
ENGINES=${ENGINES:-$GPUS}
evaluate teacher $ENGINES --model "$MODEL" --data "$TEST"
evaluate samples $ENGINES --model "$MODEL" --data "$TRAIN" --split train --samples 3 \
    --temperature 0.8 --top-p 0.95 --gen-length 512
if [ ! -e "$OUT/rows.jsonl" ]; then
    show $PYTHON data/own_samples.py --samples "$OUT/samples" --mixed "$OUT/problems.jsonl" \
        --out "$OUT/part.jsonl" --wrong 0.5
    mv "$OUT/part.jsonl" "$OUT/rows.jsonl"
fi

# 2. A mask token and block-causal attention.
[ -e "$OUT/converted" ] ||
    show $PYTHON models/from_ar.py --model "$MODEL" --block-length "$BLOCK" --out "$OUT/converted"

# 3. Fine-tune all weights on these rows.
train sft 150 algos/sft.py --model "$OUT/converted" --data "$OUT/rows.jsonl" --eval-data "$TEST" \
    --learning-rate 1e-4 --warmup-steps 10 --lr-schedule cosine --save-every 50 \
    --batch-size 384 --pack-length 2048 --max-length 640 --gen-length 512
evaluate sft-scores "$GPUS" --model "$OUT/sft/final" --data "$TEST" --gen-length 512

# 4. Reinforce, on the problems that the first model solved sometimes; 32, or 33 on three GPUs.
train rl 40 algos/justgrpo.py --model "$OUT/sft/final" --data "$OUT/problems.jsonl" \
    --eval-data "$TEST" --gen-length 512 --prompts-per-step $(((31 / GPUS + 1) * GPUS)) --save-every 20
evaluate rl-scores "$GPUS" --model "$OUT/rl/final" --data "$TEST" --gen-length 512

printf '\nGSM8K, test, greedy; %d s of this call\n' $SECONDS
for name in teacher sft-scores rl-scores; do
    $PYTHON -c 'import json, sys
result = json.load(open(sys.argv[2]))
print("{:12} {accuracy:.1%} +- {stderr:.1%} (n = {n})".format(sys.argv[1], **result))' \
        $name "$OUT/$name/result.json"
done
printf 'Reports, for any browser:\n'
realpath "$OUT"/{sft,rl}/final/../../report.html "$OUT/rl-scores/report.html"

#!/usr/bin/env bash
# From an autoregressive checkpoint to a reinforced diffusion model on one GPU: docs/real.md.
#
#   make speedrun                            Qwen2.5-Coder-0.5B-Instruct and GSM8K, from the hub
#   make speedrun MODEL=DIR OUT=runs/mine TRAIN=train.jsonl TEST=test.jsonl BLOCK=8 GPUS=2
#
# Prints each command before it runs it. Called again, it continues where it stopped.
set -euo pipefail
cd "$(dirname "$0")"
MODEL=${MODEL:-Qwen/Qwen2.5-Coder-0.5B-Instruct} # directory or hub id; Qwen2, Qwen3 or Llama
OUT=${OUT:-runs/speedrun}
TRAIN=${TRAIN:-openai/gsm8k} TEST=${TEST:-openai/gsm8k} # files or hub ids
BLOCK=${BLOCK:-4} GPUS=${GPUS:-1} PYTHON=${PYTHON:-python}
SECONDS=0
mkdir -p "$OUT"

show() {
    printf '\n[%d s] %s\n' $SECONDS "$*"
    "$@"
}
evaluate() { # NAME FLAG...: the directory $OUT/NAME
    local out=$OUT/$1
    shift
    if [ -e "$out/table.md" ]; then return; fi
    if [ -e "$out/config.json" ]; then set -- --resume "$out"; else set -- "$@" --out "$out"; fi
    show $RUN evals/run.py --tasks gsm8k "$@"
}
train() { # NAME SCRIPT FLAG...: a run directory below $OUT/NAME, whose last weights are $OUT/NAME/final
    local out=$OUT/$1 script=$2 old
    shift 2
    if [ -e "$out/final" ]; then return; fi
    old=$(ls -d "$out"/*/resume 2>/dev/null | tail -1 || true)
    if [ "$old" ]; then set -- --resume "${old%/resume}"; else set -- "$@" --out "$out"; fi
    show $RUN "$script" "$@"
    ln -sfn "$(cd "$out" && ls -d */checkpoints/step-* | tail -1)" "$out/final"
}

RUN="$PYTHON -m torch.distributed.run --standalone --nproc-per-node $GPUS"

# 1. The model's own answers to training questions: eight each, right ones and as many wrong ones.
evaluate teacher --model "$MODEL" --data "$TEST"
evaluate samples --model "$MODEL" --data "$TRAIN" --split train --repeats 8 --temperature 0.8
[ -e "$OUT/rows.jsonl" ] || show $PYTHON data/own_samples.py --samples "$OUT/samples" --out "$OUT/rows.jsonl"

# 2. Convert: the mask token, block-causal attention.
[ -e "$OUT/converted" ] || show $PYTHON models/from_ar.py --model "$MODEL" --block-length "$BLOCK" --out "$OUT/converted"

# 3. Fine-tune all weights on those rows, then reinforce.
train sft algos/sft.py --model "$OUT/converted" --data "$OUT/rows.jsonl" --eval-data "$TEST" \
    --lora-rank 0 --learning-rate 1e-4 --warmup-steps 10 --lr-schedule cosine \
    --batch-size 512 --pack-length 2048 --max-length 640 --max-steps 150 --eval-every 50 --save-every 50 --keep-saves 1
evaluate sft-gsm8k --model "$OUT/sft/final" --data "$TEST" --gen-length 512
train rl algos/cj_grpo.py --model "$OUT/sft/final" --data "$TRAIN" --eval-data "$TEST" \
    --lora-rank 0 --learning-rate 2e-6 --beta 0 --num-iterations 1 \
    --prompts-per-step 32 --num-generations 8 --max-steps 150 --eval-every 50 --save-every 50 --keep-saves 1
evaluate rl-gsm8k --model "$OUT/rl/final" --data "$TEST" --gen-length 512

printf '\nGSM8K, all test problems, greedy; %d s\n' $SECONDS
for name in teacher sft-gsm8k rl-gsm8k; do
    $PYTHON -c 'import json, sys; r = json.load(open(sys.argv[2])); print("{} {accuracy:.1%} +- {stderr:.1%} (n = {n})".format(sys.argv[1], **r))' $name "$OUT/$name/result.json"
done

#!/usr/bin/env bash
# From a fresh clone to a trained EAGLE head and its measured gain. Safe to kill and to run again at any point: each
# program goes on where it was stopped and skips what is finished.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

config=configs/eagle_quickstart.yaml
run=runs/quickstart # train.output_dir of that config
prompts=runs/quickstart_data/held_out_prompts.jsonl # in its data.work_dir

number=0
stage() {
  number=$((number + 1))
  printf '\n=== %d/5 %s (%d:%02d since the start)\n' "$number" "$1" $((SECONDS / 60)) $((SECONDS % 60))
}

stage "environment"
source scripts/env.sh default

stage "target model"
python scripts/prepare_target.py

stage "conversations"
python scripts/make_conversations.py --config "$config"

stage "training"
# Every value that accelerate would otherwise guess and warn about. Without a thread count it allows one thread only.
threads=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) # nproc heeds OMP_NUM_THREADS
accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
  --num_cpu_threads_per_process "$threads" train/eagle.py --config "$config"

stage "decoding with the head and without it"
if [[ $run/eval.json -nt $run/best/model.safetensors ]]; then
  echo "measured before, with these weights: see $run/eval.json, or delete it to measure again"
else
  python infer/generate.py --head "$run/best" --eval "$prompts" --limit 8 \
    --max-new-tokens 128 --json "$run/eval.json"
fi
printf '\n=== finished (%d:%02d since the start)\n' $((SECONDS / 60)) $((SECONDS % 60))

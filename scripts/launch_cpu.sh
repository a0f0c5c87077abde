#!/usr/bin/env bash
# N processes of a training entry on the cores of this machine: bash scripts/launch_cpu.sh N train/eagle.py --config ...
set -euo pipefail
if [[ ! ${1:-} =~ ^[1-9][0-9]*$ || $# -lt 2 ]]; then
  echo "usage: bash scripts/launch_cpu.sh N train/eagle.py --config FILE [...]" >&2
  exit 2
fi
processes=$1
shift
# One thread each until the program gives every process its share of the cores (train.threads).
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" exec python -m torch.distributed.run --standalone --nproc_per_node "$processes" "$@"

#!/usr/bin/env bash
# The tests that need a GPU, and the decoder's benchmark there, in a few minutes. Wants torch with CUDA, transformers and
# pytest installed already.
#   bash scripts/gpu_check.sh [HEAD_DIR PROMPTS.jsonl [TARGET]]     without a head: the tests alone
set -euo pipefail
cd "$(dirname "$0")/.."
python -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.cuda.get_device_name())'
python -m pytest -q -m gpu tests
if [ $# -ge 2 ]; then
    python scripts/benchmark.py decode --head "$1" --prompts "$2" ${3:+--target "$3"} --device cuda --dtype bfloat16 \
        --rows 1,4,16 --tokens 64 --repeats 5 --compile
fi

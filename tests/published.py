"""A head on disk as training leaves it, with everything that must not be published, for tests of publishing."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from heads.base import DraftHead
from heads.checkpoint import save_head
from infer.metrics import DecodeStats
from infer.report import PromptRun, build_report, write_json
from tests.tiny import tiny_head, tiny_target

BASE = "org/Base-1B"
SECRET = "/srv/alice/secret project/models/base"  # a place of this machine, with a blank in it
HOST = "trainer07.example.org"

PROVENANCE: dict[str, Any] = {
    "command": f"eagle.py --config configs/eagle_smollm2.yaml --set 'target.path={SECRET}' "
    f"--set data.endpoint=http://{HOST}:8000/v1 --set train.output_dir=../alice/runs/x",
    "commit": "c0ffee" * 6 + "abcd",
    "python": "3.11.7",
    "packages": {"torch": "2.13.0", "peft": None},
    "machine": {"processor": "x86_64", "threads": 2, "cuda": None},
    "data": {
        "key": {
            "schema": 2,
            "target.path": SECRET,
            "data.answers": "regenerate",
            "data.endpoint": f"http://{HOST}:8000/v1",
            "data.sources": [
                {"path": "HuggingFaceH4/ultrachat_200k", "sha256": None},
                {"path": "/data/alice/rows.jsonl", "sha256": "ab" * 32},
            ],
        },
        "train_rows": 1234,
        "supervised_tokens": 98765,
        "held_out_rows": 12,
    },
    "step": 303,
    "epochs": 1.5,
    "seconds": 1802.2,
    "supervised_tokens_seen": 91104,
    "evaluation": {"accept_length": 1.3443, "accuracy": [0.28, 0.22]},
    "target_dtype": "torch.bfloat16",
    "target_drift": None,
    "target_adapter_sha256": None,
}
RUN_YAML = f"""target: {{path: '{SECRET}', revision: null}}
data: {{work_dir: /scratch/alice/data, max_length: 512}}
loss: {{unroll_steps: 4, divergence: soft_ce}}
optim: {{lr: 0.001}}
train: {{output_dir: runs/x, tokens_per_batch: 512, seed: 7}}
"""


@cache
def _head(kind: str) -> DraftHead:
    return tiny_head(tiny_target("llama"), kind=kind)


def make_head(folder: Path, kind: str = "eagle3", provenance: dict[str, Any] | None = None, **config: Any) -> Path:
    """A run's directory with best/. config: changes of the head's config."""
    head, files = _head(kind), {"run.yaml": RUN_YAML, "provenance.json": json.dumps(PROVENANCE | (provenance or {}))}
    own = head.config
    try:
        head.config = replace(own, **{"target": SECRET, **config})
        best = save_head(head, folder / "best", files)
    finally:
        head.config = own
    (best / "optimizer.pt").write_bytes(b"state")
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


def make_report(head: Path, path: Path, **meta: Any) -> Path:
    """An evaluation of the head: 3 prompts, tau 3, twice as fast as plain decoding."""
    runs = []
    for number, accepted in enumerate([[3, 3], [1, 1, 1, 1], [3, 3]]):
        tokens = 1 + len(accepted) + sum(accepted)
        sides = {
            "plain": DecodeStats(4, tokens, tokens - 1, seconds={"target": 8.0}),
            "spec": DecodeStats(4, tokens, len(accepted), accepted, [3] * len(accepted), [], {"target": 4.0}),
        }
        runs.append(PromptRun(f"p{number}", "chat", sides, number, {"spec": None}))
    facts = {
        "head": str(head.resolve()),
        "head_sha256": hashlib.sha256((head / "model.safetensors").read_bytes()).hexdigest(),
        "target": SECRET,
        "prompts": "spec_bench.jsonl",
        "max_new_tokens": 64,
        "tree": {"width": 4, "depth": 3, "total": 8},
        "sampling": "greedy",
        "lossy": None,
        "batch": 1,
        "dtype": "float32",
        "hardware": "Some CPU, 2 cores",
        "threads": 2,
        "torch": "2.13.0",
        "transformers": "5.24.0",
        "command": f"infer/generate.py --head '{SECRET}/best' --eval /data/alice/spec_bench.jsonl",
        "commit": "beef" * 10,
    }
    write_json(path, build_report(runs, facts | meta))
    return path

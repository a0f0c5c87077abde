"""Training runs on a tiny target with real files, for tests of the loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.tiny import tiny_model, tiny_tokenizer


def make_place(folder: Path) -> Path:
    """A tiny target with tokenizer, conversations, and a config."""
    tiny_model("llama").save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(24):
        letters = torch.randint(97, 123, (40,), generator=generator).tolist()
        text = "".join(map(chr, letters))
        turns = [{"role": "user", "content": f"{i} {text[:9]}"}, {"role": "assistant", "content": text}]
        rows.append({"messages": turns})
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def run_config(place: Path, out: Path, **train: Any) -> dict[str, Any]:
    """Of an EAGLE head, a few steps."""
    return {
        "target": {"path": str(place / "target"), "device": "cpu"},
        "head": {"draft_vocab": 256},
        "data": {"path": str(place / "rows.jsonl"), "work_dir": str(out / "data"), "held_out": 0.2, "max_length": 200},
        "loss": {"token_weight": 1.0},
        "optim": {"lr": 0.003},
        "train": {
            "output_dir": str(out / "run"),
            "max_steps": 12,
            "tokens_per_batch": 256,
            "mixed_precision": "no",
            "log_every": 2,
            "eval_every": 4,
            "save_every": 4,
            "threads": 1,
            **train,
        },
        "eval": {"depth": 3},
    }


def run_entry(main: Callable[[list[str]], int], config: dict[str, Any], out: Path, *extra: str) -> int:
    """The exit code of a training entry on this config."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "config.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return main(["--config", str(path), *extra])


def metrics_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]


def same_weights(left: Path, right: Path, step: int, tolerance: float = 0.0) -> bool:
    """Whether the heads in two runs' checkpoints are equal, up to a largest difference."""
    a, b = (load_file(out / f"run/checkpoints/step-{step:08d}/model.safetensors") for out in (left, right))
    return all(float((a[name].double() - b[name].double()).abs().max()) <= tolerance for name in a)

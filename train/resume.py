"""Training state on disk: checkpoints that are whole or absent, and the output directory's own rules."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from train.config import RunConfig, load_config
from train.files import differences, write_text
from train.typed_yaml import to_dict

_STATE = "progress.json"
RUN_YAML = "run.yaml"
# What a resumed run may change: its length and its bookkeeping, nothing that the weights depend on.
_FREE = {f"train.{name}" for name in ("max_steps", "epochs", "max_minutes", "log_every", "eval_every", "save_every")}
_FREE |= {"train.patience", "train.compile", "train.gradient_checkpointing", "eval.check_prompts"}
_FREE |= {"train.keep_checkpoints", "train.resume", "train.threads", "train.output_dir"}
_FREE |= {"data.processes", "data.work_dir", "target.cache_dir"}


@dataclass
class Progress:
    """Where a run stands. `batches`: micro-batches consumed, all ranks; `seconds`: wall clock over all sessions."""

    step: int = 0
    batches: int = 0
    epochs: float = 0.0
    seconds: float = 0.0
    supervised: int = 0
    best_accept_length: float = 0.0
    best_step: int = -1
    finished: bool = False
    joint: bool = False  # target and heads are trained together by now


def save_state(accelerator: Accelerator, folder: Path, progress: Progress, keep: int) -> None:
    """Writes checkpoints/step-N under a temporary name, renames it, and drops all but the newest `keep`."""
    accelerator.wait_for_everyone()
    out = folder / f"step-{progress.step:08d}"
    if (out / _STATE).is_file():  # just saved: only the record can have changed
        if accelerator.is_main_process:
            write_text(out / _STATE, json.dumps(asdict(progress)))
        accelerator.wait_for_everyone()
        return
    tmp = folder / "writing.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(tmp))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (tmp / _STATE).write_text(json.dumps(asdict(progress)))
        shutil.rmtree(out, ignore_errors=True)
        os.replace(tmp, out)
        for old in _checkpoints(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()


def load_state(accelerator: Accelerator, folder: Path) -> Progress | None:
    """Restores the newest checkpoint, or returns None where there is none."""
    checkpoints = _checkpoints(folder)
    if not checkpoints:
        return None
    accelerator.load_state(str(checkpoints[-1]))
    return Progress(**json.loads((checkpoints[-1] / _STATE).read_text()))


def read_progress(folder: Path) -> Progress | None:
    """The newest checkpoint's progress, without loading anything else."""
    checkpoints = _checkpoints(folder)
    return Progress(**json.loads((checkpoints[-1] / _STATE).read_text())) if checkpoints else None


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / _STATE).is_file())


def check_output(config: RunConfig) -> None:
    """Applies train.resume to the output directory.

    Raises:
        ValueError: resume "never" with a run there, "must" without one, a run made with other settings, or a
            directory that is not ours.
    """
    out = Path(config.train.output_dir)
    run = out / RUN_YAML
    if not run.is_file():
        if out.is_dir() and any(out.iterdir()):
            raise ValueError(f"train.output_dir: {out} is not empty and holds no {RUN_YAML}; choose another directory")
        if config.train.resume == "must":
            raise ValueError(f'train.resume is "must", but {out} holds no run to resume')
        return
    if config.train.resume == "never":
        raise ValueError(f'train.resume is "never", but {out} holds a run; choose another train.output_dir')
    old, new = _flat(to_dict(load_config(run))), _flat(to_dict(config))
    wrong = differences(old, {k: v for k, v in new.items() if k not in _FREE})
    if wrong:
        raise ValueError(f"train.output_dir: {out} holds a run with other settings ({wrong}); choose another directory")


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out

"""Metrics: as JSON lines always, and to the trackers that accelerate knows."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from train.resume import Progress


def available_trackers(names: Sequence[str]) -> list[str]:
    """The names, checked: accelerate leaves out what is not installed without a word.

    Raises:
        ValueError: an unknown one, or one that is not installed.
    """
    installed = [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(
                f"train.trackers: {name!r} is unknown, expected some of {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}"
            )
        if name not in installed:
            raise ValueError(f"train.trackers: {name} is not installed; install it, or take it out of the list")
    return list(names)


class Metrics:
    """Appends one JSON object per call to a file, and logs its numbers to the trackers; on the main process only.

    A resumed run goes back to its checkpoint's step, so lines of later steps are dropped first.
    """

    def __init__(self, path: Path, step: int, accelerator: Accelerator) -> None:
        self.path, self.enabled, self._accelerator = path, accelerator.is_main_process, accelerator
        enabled = self.enabled
        if enabled and path.is_file():
            lines = [line for line in path.read_text().splitlines(keepends=True) if _step(line) <= step]
            tmp = path.with_name(f"{path.name}.tmp-{os.getpid()}")
            tmp.write_text("".join(lines))
            os.replace(tmp, path)

    def write(self, progress: Progress, values: dict[str, Any]) -> None:
        if self.enabled:
            row = {
                "step": progress.step,
                "seconds": round(progress.seconds, 2),
                "supervised": progress.supervised,
                **values,
            }
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            if self._accelerator.trackers:
                self._accelerator.log(_numbers(row), step=progress.step)


def peak_mib(device: torch.device) -> float:
    """The most memory so far, in MiB: what torch allocated on a GPU, else what the process had of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """What trackers can draw: lists become one number per index."""
    out: dict[str, float] = {}
    for name, value in row.items():
        parts = {f"{name}/{i}": part for i, part in enumerate(value)} if isinstance(value, list) else {name: value}
        out |= {k: float(v) for k, v in parts.items() if isinstance(v, (int, float))}
    return out


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError):
        return float("inf")  # a line cut by a kill

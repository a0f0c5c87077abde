"""Metrics as JSON lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from train.resume import Progress


class MetricsFile:
    """Appends one JSON object per call, on the main process only.

    A resumed run goes back to its checkpoint's step, so lines of later steps are dropped first.
    """

    def __init__(self, path: Path, step: int, enabled: bool) -> None:
        self.path, self.enabled = path, enabled
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


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError):
        return float("inf")  # a line cut by a kill

"""JSON files that we know again as our own: written in one step, never over anything else."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MarkedFile:
    """A kind of file. mark: its first key, whose value is the schema. name: what to call it in errors."""

    mark: str
    schema: int
    name: str

    def read(self, path: Path) -> dict[str, Any] | None:
        """What it holds, or None: unreadable, not JSON, or without the mark. The schema may be another one."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError):
            return None
        return found if isinstance(found, dict) and self.mark in found else None

    def check_writable(self, path: Path) -> None:
        """Raises ValueError if `path` holds something that we did not write."""
        if path.exists() and self.read(path) is None:
            raise ValueError(f"{path} exists and is not a Draftsmith {self.name}, so it is not overwritten; move it")

    def write(self, path: Path, data: Mapping[str, Any]) -> None:
        """Under a temporary name, then renamed. Raises: see `check_writable`."""
        self.check_writable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(_lines({self.mark: self.schema, **data}) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)  # gone already if the rename succeeded


def _lines(value: Any, indent: str = "") -> str:
    """JSON with a line for every entry of an object, and lists on one line."""
    if not isinstance(value, Mapping) or not value:
        return json.dumps(value, allow_nan=False)
    deeper = indent + "  "
    entries = [f"{deeper}{json.dumps(str(key))}: {_lines(one, deeper)}" for key, one in value.items()]
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"

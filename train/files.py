"""Small files written whole, and records compared."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes under a temporary name and renames: the file is whole or as it was."""
    tmp = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    tmp.write_text(text)
    os.replace(tmp, path)


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Names every entry of `new` that `old` does not have, with both values; empty where there is none."""
    return "; ".join(f"{k}: there {old.get(k)!r}, asked {v!r}" for k, v in new.items() if old.get(k) != v)


def check_manifest(path: Path, key: dict[str, Any], field: str, what: str) -> None:
    """Writes `key` to `path`, or compares it with what is there.

    Raises:
        ValueError: they differ; names `field`, the directory and each difference.
    """
    if not path.is_file():
        write_text(path, json.dumps(key, indent=2) + "\n")
        return
    wrong = differences(json.loads(path.read_text()), key)
    if wrong:
        raise ValueError(
            f"{field}: {path.parent} holds {what} made with other settings ({wrong}); "
            f"choose another {field} or remove it"
        )

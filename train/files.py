"""Small files written whole, and records compared."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any


def temporary(path: Path) -> Path:
    """The name beside `path` under which this process writes it; `remove_leftovers` knows it again."""
    return path.with_name(f"{path.name}.tmp-{socket.gethostname()}-{os.getpid()}")


def remove_leftovers(folder: Path) -> None:
    """Removes temporary files of processes of this machine that are gone, and of any machine after a day."""
    for path in folder.glob("*.tmp-*"):
        host, _, process = path.name.rpartition(".tmp-")[2].rpartition("-")
        dead = host == socket.gethostname() and not _is_another_alive(int(process))
        with suppress(FileNotFoundError):  # a living one has just renamed it
            if dead or time.time() - path.stat().st_mtime > 86400:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_another_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process != os.getpid()


def write_text(path: Path, text: str) -> None:
    """Writes under a temporary name and renames: the file is whole or as it was."""
    tmp = temporary(path)
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

"""Where a head came from: enough to make it again."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "tokenizers")


def provenance(**facts: Any) -> dict[str, Any]:
    """Versions, command, commit and machine kind, plus the caller's facts. No environment, no secrets."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads(), "cuda": _cuda()},
        **facts,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cuda() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _commit() -> str | None:
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # no git here: an installed copy
    return run.stdout.strip() or None

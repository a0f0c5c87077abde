"""Where a head came from: enough to make it again."""

from __future__ import annotations

import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from infer.machine import commit_id

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "tokenizers", "peft", "datasets")


def provenance(**facts: Any) -> dict[str, Any]:
    """Versions, command, commit and machine kind, plus the caller's facts. No environment, no secrets."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit_id(),
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

"""What a measurement ran on: the machine, the libraries, the checkout; and waiting for an accelerator."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch
import transformers


def machine_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's and its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = f"{platform.machine()} CPU"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass  # not Linux
    return f"{name}, {os.cpu_count()} cores"


def library_versions() -> dict[str, str]:
    """Of the libraries that decide how fast a pass is."""
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def commit_id() -> str | None:
    """The checkout's commit, with "+changes" if it differs; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None  # no git here: an installed copy
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def wait(device: torch.device) -> None:
    """Until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

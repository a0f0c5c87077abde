"""Programs of their own, for tests, and their peak memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_STATUS = Path("/proc/self/status")
needs_proc = pytest.mark.skipif(not _STATUS.exists(), reason="the peak is read from /proc")


def peak() -> float:
    """MiB, of this program: getrusage also counts what the process held before it became this program."""
    return int(_STATUS.read_text().partition("VmHWM:")[2].split()[0]) / 1024


def run_apart(program: str, *args: str, **variables: str) -> str:
    """The standard output of a Python program that can import from the repository."""
    root = Path(__file__).resolve().parents[1]
    env = {**os.environ, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-c", program, *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout

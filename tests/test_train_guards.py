"""Long runs: checkpoints that are damaged or cannot be written, signals, gradients that are not finite, memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.checkpoint import save_head
from tests.tiny_run import make_place, metrics_of, run_config, run_entry, same_weights
from train import loop
from train.eagle import main
from train.evaluate import evaluate
from train.guards import StopRequest
from train.resume import read_progress, save_state


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole")
    assert run(place, out) == 0
    return out


def run(place: Path, out: Path, **train: Any) -> int:
    config = run_config(place, out, **train)
    config["eval"]["check_prompts"] = 0
    with pytest.MonkeyPatch.context() as patch:  # tested elsewhere, and most of the time
        patch.setattr(loop, "write_report", lambda out: None)
        return run_entry(main, config, out)


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "run/checkpoints").iterdir())


# ---- checkpoints -------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("harm", "file", "said"),
    [
        (flip, "model.safetensors", "model.safetensors was changed"),
        (cut, "optimizer.safetensors", "optimizer.safetensors was changed"),
        (Path.unlink, "random_0.safetensors", "random_0.safetensors is missing"),
        (cut, "progress.json", "its records cannot be read"),
        (Path.unlink, "checksums.json", "its records cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    place: Path,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    harm: Callable[[Path], None],
    file: str,
    said: str,
) -> None:
    assert run(place, tmp_path, max_steps=8) == 0
    harm(tmp_path / "run/checkpoints/step-00000008" / file)
    capsys.readouterr()
    assert run(place, tmp_path) == 0
    out = capsys.readouterr().out
    assert said in out and "step-00000008 is damaged" in out and "going on at step 4" in out
    assert checkpoints(tmp_path) == ["damaged-step-00000008", "step-00000008", "step-00000012"]
    # the schedule of the first 8 steps was a shorter run's, so only the steps that were taken are compared
    assert [line["step"] for line in metrics_of(tmp_path) if "loss" in line] == [2, 4, 6, 8, 10, 12]


def test_no_whole_checkpoint_is_an_error(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(place, tmp_path, max_steps=8) == 0
    for path in (tmp_path / "run/checkpoints").iterdir():
        flip(path / "model.safetensors")
    assert run(place, tmp_path) == 1
    assert "no checkpoint in" in capsys.readouterr().err
    assert checkpoints(tmp_path) == ["damaged-step-00000004", "damaged-step-00000008"]


@contextmanager
def full_disk(free: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: writes fail as they do on a full disk, with another errno."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("free", [0, 200_000])
def test_a_full_disk_loses_one_checkpoint_and_nothing_else(
    place: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    free: int,
) -> None:
    real = save_state

    def at_step_8(accelerator: Any, strategy: Any, folder: Path, progress: Any, keep: int) -> str | None:
        if progress.step != 8:
            return real(accelerator, strategy, folder, progress, keep)
        with full_disk(free):
            problem = real(accelerator, strategy, folder, progress, keep)
        assert problem is not None
        assert checkpoints(tmp_path) == ["step-00000004"]
        return problem

    monkeypatch.setattr(loop, "save_state", at_step_8)
    assert run(place, tmp_path) == 0
    assert "warning: step 8 could not be saved" in capsys.readouterr().out
    assert checkpoints(tmp_path) == ["step-00000004", "step-00000012"]
    assert same_weights(whole, tmp_path, 12)


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = save_state

    def at_the_end(accelerator: Any, strategy: Any, folder: Path, progress: Any, keep: int) -> str | None:
        with full_disk(1000 if progress.finished else 1 << 40):
            return real(accelerator, strategy, folder, progress, keep)

    monkeypatch.setattr(loop, "save_state", at_the_end)
    assert run(place, tmp_path, save_every=5) == 1
    assert "train.output_dir: step 12 could not be saved" in capsys.readouterr().err
    assert checkpoints(tmp_path) == ["step-00000005", "step-00000010"]


def test_a_best_head_that_cannot_be_written_stays_the_one_before(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = iter([1.5, 1.6, 1.4])
    monkeypatch.setattr(loop, "evaluate", lambda *args: replace(evaluate(*args), accept_length=next(lengths)))

    def full_the_second_time(*args: Any) -> Path:
        with full_disk(1000 if (tmp_path / "run/best").is_dir() else 1 << 40):
            return save_head(*args)

    monkeypatch.setattr(loop, "save_head", full_the_second_time)
    assert run(place, tmp_path) == 0
    assert "warning: the best head could not be saved" in capsys.readouterr().out
    assert json.loads((tmp_path / "run/best/provenance.json").read_text())["step"] == 4
    progress = read_progress(tmp_path / "run/checkpoints")
    assert progress is not None and (progress.best_step, progress.best_accept_length) == (4, 1.5)


def test_an_output_directory_that_cannot_be_written_is_refused_first(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(place, tmp_path, output_dir="/proc/self/run") == 1
    assert "train.output_dir: /proc/self cannot be written to" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


# ---- signals -----------------------------------------------------------------------------------------------


@pytest.fixture
def usual_handlers() -> Iterator[None]:
    """As a shell leaves them for a program in the foreground."""
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    assert {number: signal.signal(number, handler) for number, handler in before.items()} == usual


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("_step", signal.SIGINT),
        ("evaluate", signal.SIGTERM),
        ("save_state", signal.SIGTERM),
        ("_save_best", signal.SIGINT),
    ],
)
@pytest.mark.usefixtures("usual_handlers")
def test_a_signal_saves_and_ends(
    place: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    number: signal.Signals,
) -> None:
    """In the middle of a step, an evaluation or a save; the same command then ends with the same weights."""
    real, calls = getattr(loop, where), []

    def signalled(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), number)
        return real(*args)

    monkeypatch.setattr(loop, where, signalled)
    with pytest.raises(SystemExit) as ended:
        run(place, tmp_path)
    assert ended.value.code == 128 + number
    said = capsys.readouterr().out
    stopped_at = 2 if where == "_step" else 8
    assert f"stopped by {number.name} after step {stopped_at}, which is saved" in said
    assert checkpoints(tmp_path)[-1] == f"step-{stopped_at:08d}"
    monkeypatch.setattr(loop, where, real)
    assert run(place, tmp_path) == 0
    assert same_weights(whole, tmp_path, 12)


@pytest.mark.usefixtures("usual_handlers")
def test_ctrl_c_a_second_time_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """But one that a launcher passes on at once does."""
    with StopRequest() as stop:
        assert stop.signal == 0
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 3)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


# ---- gradients and memory ----------------------------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Features of these steps are not finite."""
    real = loop._batches

    def poisoned(session: Any, picked: Any, micro: Any, step: int, unroll: int) -> Any:
        batches = real(session, picked, micro, step, unroll)
        return [replace(b, feature_BTH=b.feature_BTH * float("nan")) for b in batches] if step in steps else batches

    monkeypatch.setattr(loop, "_batches", poisoned)


def test_a_step_without_a_finite_gradient_is_skipped(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, {1, 5, 6})
    assert run(place, tmp_path) == 0
    out = capsys.readouterr().out
    assert "warning: step 5 skipped (loss nan, gradient norm nan)" in out
    skipped = [json.loads(line) for line in (tmp_path / "run/skipped_steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in skipped] == [1, 5, 6]
    assert all(row["id"] and row["input_ids"] and row["spans"] for line in skipped for row in line["rows"])
    tensors = load_file(tmp_path / "run/best/model.safetensors")
    assert all(bool(t.isfinite().all()) for t in tensors.values() if t.is_floating_point())
    losses = [line["loss"] for line in metrics_of(tmp_path) if "loss" in line]
    assert len(losses) == 6 and losses[-1] < losses[0]


def test_too_many_such_steps_in_a_row_end_the_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, {1, 3, 5, 6, 7, 8})
    assert run(place, tmp_path, max_skipped=2) == 1
    error = capsys.readouterr().err
    assert "no finite gradient in 3 steps in a row, the last at step 7 (train.max_skipped is 2)" in error
    assert checkpoints(tmp_path) == ["step-00000004"]


def test_too_little_memory_says_what_to_lower(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "_step", lambda *args: torch.empty(1 << 55))
    assert run(place, tmp_path) == 1
    assert "lower train.tokens_per_batch (now 256" in capsys.readouterr().err

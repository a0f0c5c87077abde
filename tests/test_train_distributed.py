"""Real launchers with two CPU processes: the same training as one, and what happens when processes die or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scripts.make_conversations import main as make_conversations
from tests.launched import COMBINATIONS, HAS_DEEPSPEED, ROOT, environment, run
from tests.tiny_run import make_place, metrics_of, run_config, run_entry, same_weights
from train.eagle import main

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
MARK = "DRAFTSMITH_TEST_RUN"
KILLS = int(os.environ.get("DRAFTSMITH_KILLS", "1"))

needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="finds its processes in /proc")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))


def prepared(place: Path, out: Path, launched: str = "cpu2", check: int = 0, **train: Any) -> list[str]:
    """The data of a run of two processes, and its command. check: prompts decoded at the end."""
    out.mkdir()
    config = run_config(place, out, **train)
    config["eval"]["check_prompts"] = check
    (out / "config.yaml").write_text(json.dumps(config))
    arguments = ["--config", str(out / "config.yaml")]
    assert make_conversations(arguments) == 0
    return [*LAUNCH, str(ROOT / f"configs/accelerate/{launched}.yaml"), str(ROOT / "train/eagle.py"), *arguments]


@contextmanager
def started(command: list[str], out: Path) -> Iterator[subprocess.Popen[str]]:
    """Runs in the background, its output in a file; killed at the end with all that it started."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the same python for launch_cpu.sh
    env = environment(HAS_DEEPSPEED, PATH=path, **{MARK: str(out)})
    with (out / "said.txt").open("a") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, text=True, env=env)
    try:
        yield process
    finally:
        kill_all(out)
        process.wait()


def family(out: Path) -> list[tuple[int, dict[str, str]]]:
    """Process ids and environments of the launcher and its workers, however deep."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            variables = dict(entry.split("=", 1) for entry in entries if "=" in entry)
            if variables.get(MARK) == str(out):
                found.append((int(folder.name), variables))
    return found


def kill_all(out: Path) -> None:
    while members := family(out):
        for member, _ in members:
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        time.sleep(0.05)


def worker(out: Path, rank: int) -> int:
    return next(member for member, variables in family(out) if variables.get("RANK") == str(rank))


def wait_for(what: Callable[[], Any], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def steps_done(out: Path) -> int:
    path = out / "run/metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


@pytest.fixture(scope="module")
def alone(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process with two micro-batches in a step."""
    out = tmp_path_factory.mktemp("alone")
    assert run_entry(main, run_config(place, out, max_steps=4, grad_accumulation=2), out) == 0
    return out


@pytest.mark.parametrize(
    ("launched", "strategy", "divided"),
    [
        ("cpu2", "ddp", False),
        ("fsdp2", "fsdp2", True),
        pytest.param("deepspeed_zero2", "zero2", False, marks=needs_deepspeed),
        pytest.param("deepspeed_zero3", "zero3", True, marks=needs_deepspeed),
    ],
)
def test_two_processes_train_as_one(
    place: Path, alone: Path, tmp_path: Path, launched: str, strategy: str, divided: bool
) -> None:
    """Two ranks with one micro-batch each take the same steps as one process with two, by every shipped config."""
    out = tmp_path / "two"
    command = prepared(place, out, launched, check=1, max_steps=4)
    variables = environment(deepspeed=strategy.startswith("zero"))
    done = run(command, variables)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"2 process(es) ({strategy}, gloo)" in done.stdout
    assert "check: accept length of the best head" in done.stdout  # decoded by one process, divided target or not
    assert ("layers divided among 2 processes" in done.stdout) == divided
    # the same sums in another order; Adam's first steps amplify rounding where a gradient is tiny
    assert same_weights(alone, out, 4, tolerance=2e-3)
    for name in ("loss", "eval/accept_length"):
        curve, other = ([m[name] for m in metrics_of(folder) if name in m] for folder in (alone, out))
        assert curve == pytest.approx(other, rel=1e-3)
    # the best head is whole
    one, two = (load_file(folder / "run/best/model.safetensors") for folder in (alone, out))
    assert all(two[name].shape == tensor.shape for name, tensor in one.items())
    # and one process goes on from the checkpoint of the two
    assert run_entry(main, run_config(place, out, max_steps=5), out) == 0
    assert [m["step"] for m in metrics_of(out) if "eval/accept_length" in m] == [4, 5]


@pytest.mark.parametrize(
    "launched", ["cpu2", *(["fsdp2", *(["deepspeed_zero3"] if HAS_DEEPSPEED else [])] if COMBINATIONS else [])]
)
def test_kills_at_any_moment_change_nothing(place: Path, tmp_path: Path, launched: str) -> None:
    """DRAFTSMITH_KILLS of them (default 1), at random, in one run, which then ends as one that nobody disturbed."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    command = prepared(place, whole, launched, save_every=2, log_every=1)
    began = time.monotonic()
    assert run(command, environment(HAS_DEEPSPEED)).returncode == 0
    usual = time.monotonic() - began
    command = prepared(place, cut, launched, save_every=2, log_every=1)
    for share in torch.rand(KILLS, generator=torch.Generator().manual_seed(0)).tolist():
        with started(command, cut) as process:
            try:
                process.wait((0.3 + 0.7 * share) * usual)
            except subprocess.TimeoutExpired:
                kill_all(cut)
    done = run(command, environment(HAS_DEEPSPEED))
    assert done.returncode == 0, done.stderr[-3000:]
    assert same_weights(whole, cut, 12)
    assert [m["step"] for m in metrics_of(cut) if "loss" in m] == list(range(1, 13))


def test_a_killed_rank_ends_the_others(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = prepared(place, out, max_steps=100_000, eval_every=100_000, save_every=2)
    with started(command, out) as process:
        wait_for(lambda: steps_done(out) > 1)
        os.kill(worker(out, 1), signal.SIGKILL)
        assert process.wait(120) != 0
    assert "a collective failed at step" in (out / "said.txt").read_text()


def test_a_rank_that_hangs_is_named(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = prepared(place, out, max_steps=100_000, eval_every=100_000, save_every=100_000, timeout_minutes=0.25)
    with started(command, out):
        wait_for(lambda: steps_done(out) > 1)
        os.kill(worker(out, 1), signal.SIGSTOP)
        wait_for(lambda: "rank 1 was last heard of" in (out / "said.txt").read_text(), 120)


def test_sigterm_to_the_launcher_saves(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = prepared(place, out, max_steps=100_000, eval_every=100_000, save_every=100_000)
    command[: len(LAUNCH) + 1] = ["bash", str(ROOT / "scripts/launch_cpu.sh"), "2"]
    with started(command, out) as process:
        wait_for(lambda: steps_done(out) > 1)
        process.terminate()
        process.wait(120)
        wait_for(lambda: "stopped by SIGTERM after step" in (out / "said.txt").read_text(), 30)
    (kept,) = (out / "run/checkpoints").glob("step-*")
    assert (kept / "progress.json").is_file()

"""What a launcher was asked for is what runs, or an error; trackers, too, are there or an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import make_place, metrics_of, run_config, run_entry
from train.eagle import main
from train.launch import Launch, asked_processes, take_launch

ROOT = Path(__file__).resolve().parents[1]
CPU2 = str(ROOT / "configs/accelerate/cpu2.yaml")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (["python", "/bin/accelerate", "launch", "--cpu", "--num_processes", "2", "train/eagle.py"], 2),
        (["python", "/bin/accelerate", "launch", "--num-processes=3", "train/eagle.py"], 3),
        (["python", "-m", "accelerate.commands.launch", "--config_file", CPU2, "train/eagle.py"], 2),
        (["python", "/bin/accelerate", "launch", "--config_file", CPU2, "train/eagle.py"], 2),
        (["python", "/bin/accelerate", "launch", "--config_file", CPU2, "--num_processes", "4", "train/eagle.py"], 4),
        (["python", "/bin/accelerate", "launch", "--config_file", "nowhere.yaml", "train/eagle.py"], None),
        (["python", "/bin/accelerate", "launch", "train/eagle.py", "--num_processes", "2"], None),
        (["bash"], None),
        ([], None),
    ],
)
def test_what_was_asked_for(command: list[str], number: int | None) -> None:
    assert asked_processes(command) == number


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}


def asked(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], world: int = 2) -> Launch:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return take_launch(world)


@pytest.mark.parametrize(("variables", "name"), [({}, "ddp"), (FSDP, "fsdp2"), (ZERO, "zero3")])
def test_a_strategy_is_taken_from_the_launcher(
    variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(monkeypatch, variables).strategy == name
    assert not [key for key in os.environ if key.startswith("ACCELERATE_USE_")]  # accelerate sees nothing of it


@pytest.mark.parametrize(
    ("variables", "world", "words"),
    [
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, 2, "asked for Megatron-LM"),
        (FSDP, 1, "nothing to divide"),
        (FSDP | {"FSDP_VERSION": "1"}, 2, "fsdp_version is 1, expected 2"),
        (FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}, 2, "fsdp_offload_params is true"),
        (FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, 2, "set train.gradient_checkpointing"),
        (ZERO, 1, "nothing to divide"),
        (ZERO | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, 2, "zero_stage is 1, expected 2 or 3"),
        (ZERO | {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, 2, "offload_optimizer_device is 'cpu'"),
        (ZERO | {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, 2, "train.grad_accumulation decides"),
        (ZERO | {"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, 2, "optim.clip_norm decides"),
        (ZERO | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "nowhere.json"}, 2, "nowhere.json cannot be read"),
    ],
)
def test_what_would_have_no_effect_is_an_error(
    variables: dict[str, str], world: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=words):
        asked(monkeypatch, variables, world)


@pytest.mark.parametrize(
    ("settings", "words"), [({"bf16": {"enabled": True}}, "sets bf16"), ({"optimizer": {"type": "Adam"}}, "optimizer")]
)
def test_settings_of_deepspeed_that_a_config_of_ours_decides(
    settings: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "deepspeed.json"
    known = {"zero_optimization": {"stage": 2}, "fp16": {"enabled": False}}
    file.write_text(json.dumps(known))
    variables = ZERO | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    assert asked(monkeypatch, variables) == Launch("zero2", known)
    file.write_text(json.dumps(known | settings))
    with pytest.raises(ValueError, match=words):
        asked(monkeypatch, variables)


@pytest.mark.parametrize("name", ["fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_shipped_configs_ask_for_several_processes(name: str) -> None:
    command = ["python", "/bin/accelerate", "launch", "--config_file", str(ROOT / f"configs/accelerate/{name}.yaml")]
    assert asked_processes([*command, "train/eagle.py"]) == 2


def test_processes_that_were_not_started_are_an_error(place: Path, tmp_path: Path) -> None:
    """accelerate runs a single process here, without a word."""
    (tmp_path / "config.yaml").write_text(json.dumps(run_config(place, tmp_path)))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    command += [str(ROOT / "train/eagle.py"), "--config", str(tmp_path / "config.yaml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode != 0
    assert "the launcher was asked for 2 processes, but 1 was started" in run.stderr
    assert not (tmp_path / "run").exists()


def test_trackers_get_the_numbers_of_the_file(place: Path, tmp_path: Path) -> None:
    assert run_entry(main, run_config(place, tmp_path, trackers=["tensorboard"], max_steps=4), tmp_path) == 0
    logged = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("events.out.tfevents*"))
    numbers = {name for line in metrics_of(tmp_path) for name, value in line.items() if isinstance(value, (int, float))}
    assert {"loss", "tokens_per_second", "supervised_per_second", "peak_mib", "eval/accept_length"} <= numbers
    assert all(name.encode() in logged for name in numbers)
    assert b"eval/accuracy/0" in logged


@pytest.mark.parametrize(("name", "words"), [("tensorbored", "is unknown"), ("wandb", "is not installed")])
def test_trackers_that_are_not_there_are_an_error(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    assert run_entry(main, run_config(place, tmp_path, trackers=[name]), tmp_path) == 1
    assert "train.trackers: " in (error := capsys.readouterr().err) and words in error
    assert not (tmp_path / "data").exists()

"""FSDP2, ZeRO-2 and ZeRO-3 in two processes train as one process does, and their checkpoints are the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh

from heads.divided import divide
from scripts.make_conversations import main as make_conversations
from tests import strategy_program as program
from tests.launched import COMBINATIONS, HAS_DEEPSPEED, environment, run, torchrun
from tests.tiny import tiny_head, tiny_target
from tests.tiny_run import make_place, run_config
from train.config import RunConfig
from train.launch import Launch
from train.strategies import build_strategy
from train.typed_yaml import from_dict

STRATEGIES = ["ddp", "fsdp2", *(["zero2", "zero3"] if HAS_DEEPSPEED else [])]
# The others are tried by test_train_distributed; each takes seconds.
TRIED = [name for name in STRATEGIES if COMBINATIONS or name in ("fsdp2", "zero3")]


def config_of(place: Path, out: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    data = run_config(place, out, tokens_per_batch=256)
    data["head"] = {"kind": "eagle3", "draft_vocab": 256, "taps": [0, 1, 2]}
    for name, section in sections.items():
        data[name] = data.get(name, {}) | section
    return data


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one process with four micro-batches in a step, and of two with two each."""
    out = tmp_path_factory.mktemp("strategies")
    place = make_place(out)
    one = config_of(place, out, train={"grad_accumulation": 4})
    (out / "two.json").write_text(json.dumps(config_of(place, out, train={"grad_accumulation": 2})))
    assert make_conversations(["--config", str(out / "two.json")]) == 0
    alone = program.run(from_dict(RunConfig, one), out / "one")
    launch_two(out, out / "two.json", TRIED)
    return {"one": alone, "out": out}


def launch_two(out: Path, config: Path, names: list[str]) -> None:
    command = torchrun("-m", "tests.strategy_program", str(out), str(config), *names)
    done = run(command, environment(HAS_DEEPSPEED))
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.parametrize("name", TRIED)
def test_a_strategy_is_one_process(found: dict[str, Any], name: str) -> None:
    alone, folder = found["one"], found["out"] / name
    facts = json.loads((folder / "found.json").read_text())
    assert facts["strategy"] == name
    for step, (mine, theirs) in enumerate(zip(alone.steps, facts["steps"], strict=True)):
        if step == program.SPOILT:
            assert not all(map(torch.isfinite, map(torch.tensor, (mine[2], theirs[2]))))
        else:
            assert theirs == pytest.approx(mine, rel=1e-4), step
    assert facts["accept_length"] == pytest.approx(alone.accept_length, rel=1e-3)
    weights, moments = (load_file(folder / f"{part}.safetensors") for part in ("weights", "moments"))
    assert weights.keys() == alone.weights.keys() and moments.keys() == alone.moments.keys()
    for key, value in alone.moments.items():
        assert (moments[key] - value).abs().max() <= 1e-3 * value.abs().max(), key
        if key.endswith("/step"):
            assert value == program.STEPS - 1  # one was skipped
    for key, value in alone.weights.items():
        # sums in another order; Adam's first steps amplify rounding where a gradient is tiny
        assert (weights[key].double() - value.double()).abs().mean() < 1e-5, key


@pytest.mark.parametrize("name", program.TARGETS)
def test_a_divided_target_is_the_same(found: dict[str, Any], name: str) -> None:
    for rank in range(2):
        facts = json.loads((found["out"] / f"targets_{rank}.json").read_text())[name]
        assert facts == {"features": True, "layers divided": True, "readable": True, "rest whole": True}


def test_a_quantised_target_is_not_divided() -> None:
    target, nowhere = tiny_target("llama"), cast(DeviceMesh, None)
    target.model.is_quantized = True
    with pytest.raises(ValueError, match=r"target\.divide: 'llama' is quantised"):
        divide(target, nowhere)


def test_target_and_heads_are_trained_together_by_ddp_alone() -> None:
    head, nothing = tiny_head(tiny_target("llama"), kind="medusa"), cast(Accelerator, None)
    config = from_dict(RunConfig, {"head": {"kind": "medusa"}, "joint": {"start": 0.5}, "train": {"max_steps": 1}})
    with pytest.raises(ValueError, match=r"joint\.start is 0\.5, but .* by ddp only, not by fsdp2"):
        build_strategy(Launch("fsdp2"), head, config, nothing, torch.float32)

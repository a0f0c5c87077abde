"""Every strategy with bf16, recomputing, compiled losses, adapters, other heads and features on the fly; and its plan.

Minutes of CPU time, so only with DRAFTSMITH_COMBINATIONS=1.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from heads.adapter import CONFIG
from scripts.make_conversations import main as make_conversations
from tests.adapters import save_adapter
from tests.launched import COMBINATIONS, HAS_DEEPSPEED, environment, run, torchrun
from tests.plans import middle_model, plan_on_cpu
from tests.strategy_program import SPOILT
from tests.test_train_strategies import STRATEGIES, config_of, launch_two
from tests.tiny_run import make_place
from train.plan import Case

pytestmark = pytest.mark.skipif(not COMBINATIONS, reason="minutes: set DRAFTSMITH_COMBINATIONS=1")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))


Change = Callable[[Path], dict[str, Any]]


def with_adapter(place: Path) -> dict[str, Any]:
    folder = place / "lora"
    if not (folder / CONFIG).is_file():
        save_adapter(folder)
    return {"target": {"adapter": str(folder)}}


CHANGES: dict[str, Change] = {
    "bf16, compiled": lambda place: {"train": {"mixed_precision": "bf16", "compile": True}},
    "recomputing": lambda place: {"train": {"gradient_checkpointing": True}},
    "adapter, features on the fly": lambda place: with_adapter(place) | {"cache": {"mode": "online"}},
    "eagle, recomputing": lambda place: {
        "head": {"kind": "eagle", "taps": None},
        "train": {"gradient_checkpointing": True},
    },
    "medusa": lambda place: {
        "head": {"kind": "medusa", "heads": 2, "blocks": 1, "projection": "own", "taps": None},
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_strategies_agree_with_ddp(place: Path, tmp_path: Path, change: str) -> None:
    sections = CHANGES[change](place)
    train = {"grad_accumulation": 2, **sections.pop("train", {})}
    data = config_of(place, tmp_path, train=train, **sections)
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert make_conversations(["--config", str(tmp_path / "config.json")]) == 0
    launch_two(tmp_path, tmp_path / "config.json", STRATEGIES)
    found = {name: json.loads((tmp_path / name / "found.json").read_text())["steps"] for name in STRATEGIES}
    weights = {name: load_file(tmp_path / name / "weights.safetensors") for name in STRATEGIES}
    tolerance = 1e-3 if "bf16" in change else 1e-4
    for name in STRATEGIES[1:]:
        for step, (mine, theirs) in enumerate(zip(found["ddp"], found[name], strict=True)):
            assert step == SPOILT or theirs == pytest.approx(mine, rel=tolerance), (name, step)
        for key, value in weights["ddp"].items():
            assert (weights[name][key].double() - value.double()).abs().mean() < 10 * tolerance * 1e-2, (name, key)


def test_plans_of_strategies_are_what_really_happens(tmp_path: Path) -> None:
    command = torchrun("-m", "tests.plan_program", str(tmp_path), *STRATEGIES)
    done = run(command, environment(HAS_DEEPSPEED))
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    plan = plan_on_cpu(tmp_path / "target", middle_model(), train={"tokens_per_batch": 128})
    whole = 4 * plan.trained
    for name, bytes_of in found.items():
        parts = plan.memory(Case(plan.config, 2, name))["training"]
        planned = sum(size for part, size in parts.items() if part != "target")
        assert 0.75 < planned / bytes_of["peak"] < 1.5, name
    # sent in one step with one micro-batch, inputs and outputs together, in numbers of weights; norms are a rest
    sent = {name: {k: v / whole for k, v in bytes_of["sent"].items()} for name, bytes_of in found.items()}
    gathered = scattered = 1.5
    expected: dict[str, dict[str, float]] = {
        "ddp": {"allreduce": 1.0},
        "fsdp2": {"allgather_base": gathered, "reduce_scatter_base": scattered},
        "zero2": {"allreduce": 1.0, "allgather_base": gathered},
        "zero3": {"allgather_base": gathered, "reduce_scatter_base": scattered},
    }
    for name, counts in sent.items():
        large = {k: v for k, v in counts.items() if v > 0.1}
        assert large == pytest.approx(expected[name], rel=0.05), name

"""What a plan suggests and prints, and the option --plan of both training commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plans import LLAMA_8B, big_plan
from tests.tiny import CONFIGS
from train import eagle, medusa
from train.plan import GIB, Case, Hardware, Plan
from train.plan_cli import STRATEGIES
from train.plan_report import report

# --- what would fit -------------------------------------------------------------------------------------------


def _with(plan: Plan, gib: float) -> Plan:
    plan.hardware = Hardware(memory=gib * GIB)
    return plan


def test_settings_change_before_anything_is_rented() -> None:
    plan = _with(big_plan("8B"), 30)
    other = plan.smallest_change(Case(plan.config, 1, "ddp"))
    assert other is not None and plan.fits(other) and (other.devices, other.strategy) == (1, "ddp")
    config = other.config
    assert (
        config.data.batch_size < 128 and config.train.tokens_per_batch == 2048 and config.train.grad_accumulation == 2
    )
    assert not config.train.gradient_checkpointing
    for undone in (
        replace(config, train=plan.config.train),
        replace(config, data=replace(config.data, batch_size=2 * config.data.batch_size)),
    ):
        assert not plan.fits(Case(undone, 1, "ddp"))
    plan.hardware = Hardware()


def test_then_recomputing_then_division_then_more_devices() -> None:
    plan = _with(big_plan("8B"), 28)
    recomputed = plan.smallest_change(Case(plan.config, 1, "ddp"))
    assert recomputed is not None and recomputed.config.train.gradient_checkpointing and recomputed.devices == 1
    plan = _with(big_plan("8B"), 17)
    divided = plan.smallest_change(Case(plan.config, 4, "ddp"))
    assert divided is not None and plan.fits(divided) and (divided.devices, divided.strategy) == (4, "fsdp2")
    more = plan.smallest_change(Case(plan.config, 1, "ddp"))
    assert more is not None and plan.fits(more) and (more.devices, more.strategy) == (4, "fsdp2")
    least = replace(recomputed.config, data=replace(plan.config.data, batch_size=1))
    assert not any(plan.fits(Case(least, 2, name)) for name in STRATEGIES)
    plan = _with(big_plan("8B"), 1)
    assert plan.smallest_change(Case(plan.config, 1, "ddp")) is None
    assert "nothing on up to 4096 devices makes it fit" in report(plan, [1], "ddp")
    plan.hardware = Hardware()


def test_the_report_has_a_line_per_device_count_and_a_command_that_fits() -> None:
    plan = big_plan("70B")
    text = report(plan, [1, 8, 64], "fsdp2")
    assert "70,553,706,496 parameters, 131.4 GiB in bfloat16" in text
    assert "1,403,027,456 trained parameters, 3 draft steps, draft vocabulary of 32,000" in text
    lines = text.splitlines()
    table = next(i for i, line in enumerate(lines) if line.startswith("devices"))
    assert [line.split()[0] for line in lines[table + 1 : table + 4]] == ["1", "8", "64"]
    assert [("NO" in line) for line in lines[table + 1 : table + 4]] == [True, False, False]
    assert text.count("smallest change that fits") == 1 and "--devices 4\n" in text
    assert "80 GiB, 90% of it usable" in text and "40% of each is reached" in text


# --- the command ----------------------------------------------------------------------------------------------


def _run(main: Any, folder: Path, config: dict[str, Any], *extra: str) -> int:
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return main(["--config", str(path), *extra])


def _command_config(folder: Path, kind: str) -> dict[str, Any]:
    target = folder / "target"
    if not target.is_dir():
        CONFIGS["llama"].save_pretrained(target)
    return {
        "target": {"path": str(target)},
        "head": {"kind": kind, "draft_vocab": 256},
        "data": {"work_dir": str(folder / "data"), "max_length": 200},
        "train": {"output_dir": str(folder / "run"), "max_steps": 5},
    }


@pytest.mark.parametrize(("main", "kind"), [(eagle.main, "eagle"), (eagle.main, "eagle3"), (medusa.main, "hydra")])
def test_both_commands_plan_and_write_nothing(
    main: Any, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = _command_config(tmp_path, kind)
    before = sorted(tmp_path.rglob("*"))
    assert (
        _run(main, tmp_path, config, "--plan", "--devices", "2,4", "--strategy", "zero2", "--device-memory", "2") == 0
    )
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "config.yaml"])
    printed = capsys.readouterr().out
    assert f"head: {kind}, " in printed and "strategy zero2:" in printed and "devices of 2 GiB" in printed
    assert "\n2 devices, GiB on each:" in printed and "\n4 devices, GiB on each:" in printed


def test_options_reach_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "8B.json"
    file.write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": 2}))
    options = ["--tflops", "989", "--bandwidth", "3350", "--link", "450", "--share", "0.5", "--tokens", "123456"]
    config = _command_config(tmp_path, "medusa") | {"data": {"path": "rows.jsonl", "max_length": 200}}
    assert _run(medusa.main, tmp_path, config, "--plan", "--target-config", str(file), *options) == 0
    printed = capsys.readouterr().out
    assert "989 TFLOP/s, 3350 GB/s, 450 GB/s between them; 50% of each" in printed and "123,456 tokens" in printed
    assert "answers: " not in printed  # given answers are kept
    assert _run(medusa.main, tmp_path, config, "--plan") == 0
    assert "how many are in data.path is not known: give --tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--devices", "8"], "--devices is an option of --plan; add --plan or remove it"),
        (["--plan", "--devices", "0"], "--devices is '0', expected numbers from 1 on, separated by commas"),
        (["--plan", "--devices", "1,x"], "--devices is '1,x', expected numbers from 1 on, separated by commas"),
        (["--plan", "--strategy", "zero1"], "--strategy is 'zero1', expected one of ddp, fsdp2, zero2, zero3"),
        (["--plan", "--share", "1.5"], "--share is 1.5, expected above 0, at most 1"),
        (["--plan", "--device-memory", "-1"], "--device-memory is -1.0, expected a positive number"),
        (["--plan", "--tflops", "nan"], "--tflops is nan, expected a positive number"),
        (["--plan", "--tokens", "0"], "--tokens is 0, expected a positive number"),
    ],
)
def test_bad_options_are_one_line(
    extra: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        _run(eagle.main, tmp_path, _command_config(tmp_path, "eagle"), *extra)
    assert stop.value.code == 2 and capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--set", "target.path=no/such/place"], "target.path: cannot read the config of a causal LM from"),
        (["--target-config", "no/such.json"], "--target-config is 'no/such.json', expected a config.json"),
        (["--target-config", "broken.json"], "--target-config: cannot read the config of a causal LM from"),
        (["--target-config", "t5.json"], "--target-config: cannot read the config of a causal LM from"),
        (["--set", "data.max_length=4000"], "data.max_length = 4000 tokens, but the target has 256 positions"),
        (["--set", "head.draft_vocab=1000"], "head.draft_vocab is 1000, expected at most 512"),
        (["--set", "target.path=embedded", "--set", "target.cache_dir=nowhere"], "target.path: the embedded target is"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    extra: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "t5.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    assert _run(eagle.main, tmp_path, _command_config(tmp_path, "eagle"), "--plan", *extra) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: {message}")
    assert not (tmp_path / "nowhere").exists()


def test_a_target_that_is_trained_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _command_config(tmp_path, "medusa") | {"joint": {"start": 0.5}}
    assert _run(medusa.main, tmp_path, config, "--plan") == 1
    assert "joint.start is 0.5, but only frozen targets are planned for" in capsys.readouterr().err

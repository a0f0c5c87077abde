"""Training end to end on a tiny target: real files, real entry, one real launcher."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.base import LossSpec, TreePolicy
from heads.checkpoint import load_head, read_config, save_head
from infer.baseline import decode_plain
from infer.engine import decode_speculative
from infer.generate import main as generate
from infer.stopping import StopRule
from scripts.export import main as export
from tests.adapters import adapted, change_config, save_adapter
from tests.tiny import ARCHITECTURES, library_greedy, prompt_ids, tiny_head, tiny_model, tiny_target, tiny_tokenizer
from tests.tiny_run import dealt_rows, make_place, metrics_of, run_config, run_entry, same_weights
from train import loop, served, session
from train.batching import make_batch
from train.config import RunConfig
from train.conversations import TokenRow, read_rows
from train.eagle import main
from train.evaluate import evaluate
from train.launch import Launch
from train.resume import read_progress
from train.session import build_accelerator, load_sources, prepare
from train.typed_yaml import from_dict

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("tiny"))


def _run(config: dict[str, Any], out: Path, *extra: str) -> int:
    return run_entry(main, config, out, *extra)


def test_a_run_leaves_a_head_that_decodes(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(run_config(place, tmp_path), tmp_path) == 0
    best = tmp_path / "run/best"
    assert {p.name for p in best.iterdir()} == {"config.json", "model.safetensors", "run.yaml", "provenance.json"}
    tensors = load_file(best / "model.safetensors")
    assert not any("embed" in name or "lm_head" in name for name in tensors)
    assert tensors["draft_token_ids"].dtype == torch.int64 and len(tensors["draft_token_ids"].unique()) == 256
    record = json.loads((best / "provenance.json").read_text())
    assert record["step"] in (4, 8, 12) and record["evaluation"]["roots"] > 0 and record["packages"]["torch"]
    lines = metrics_of(tmp_path)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert [line["step"] for line in lines if "eval/accept_length" in line] == [4, 8, 12]
    target = tiny_target("llama")
    head = load_head(best)
    prompt = tiny_tokenizer()("<|user|>1 abc<|end|><|assistant|>")["input_ids"]
    stop = StopRule(frozenset(), 20)
    policy = TreePolicy(width=3, depth=3, total=8)
    assert decode_speculative(target, head, prompt, policy, stop)[0] == decode_plain(target, prompt, stop)[0]
    # once more: nothing to do, nothing changed
    before = (best / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert _run(run_config(place, tmp_path), tmp_path) == 0
    assert "is finished" in capsys.readouterr().out
    assert (best / "model.safetensors").read_bytes() == before


def test_a_killed_run_goes_on_to_thesame_weights(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert _run(run_config(place, whole), whole) == 0
    real = loop._step

    def dies(session: Any, micro: Any, step: int, lr: float, unroll: int) -> Any:
        if step == 7:
            raise KeyboardInterrupt
        return real(session, micro, step, lr, unroll)

    monkeypatch.setattr(loop, "_step", dies)
    with pytest.raises(KeyboardInterrupt):
        _run(run_config(place, cut), cut)
    assert read_progress(cut / "run/checkpoints").step == 4  # type: ignore[union-attr]
    monkeypatch.setattr(loop, "_step", real)
    assert _run(run_config(place, cut), cut) == 0
    assert same_weights(whole, cut, 12)
    steps = [line["step"] for line in metrics_of(cut) if "loss" in line]
    assert steps == [2, 4, 6, 8, 10, 12]


def test_several_processes_need_data_that_is_there(place: Path, tmp_path: Path) -> None:
    config = from_dict(RunConfig, run_config(place, tmp_path))
    two: Any = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"make_conversations\.py first"):
        load_sources(config, two, print, Launch())


def test_a_target_that_is_placed_by_device_map(place: Path, tmp_path: Path) -> None:
    """One process trains on it as on any other; several would each want all devices."""
    mapped = ["--set", "target.device_map=auto", "--set", "train.max_steps=4"]
    for name, extra in (("whole", mapped[2:]), ("mapped", mapped)):
        out = tmp_path / name
        assert _run(run_config(place, out), out, *extra) == 0
    assert same_weights(tmp_path / "whole", tmp_path / "mapped", 4)
    config = from_dict(RunConfig, run_config(place, tmp_path / "mapped"))
    config = replace(config, target=replace(config.target, device_map="auto"))
    two: Any = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"target\.device_map is 'auto', .* but 2 run here; set it to null"):
        load_sources(config, two, print, Launch())


def test_a_head_of_another_target_is_refused_before_anything_is_loaded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_head(tiny_head(tiny_target(ARCHITECTURES["opt"])), tmp_path / "head")
    config = run_config(place, tmp_path / "out")
    config["head"]["init_from"] = str(tmp_path / "head")
    for name in ("prepare_rows", "load_target", "open_head"):
        monkeypatch.setattr(session, name, lambda *args, name=name: pytest.fail(f"{name} was called"))
    assert _run(config, tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert (
        "head.init_from" in error and "has hidden_size 48, expected 64" in error and not (tmp_path / "out/run").exists()
    )


def test_accumulation_is_one_big_batch(place: Path, tmp_path: Path) -> None:
    """The loss is divided by the global number of supervised roots, so only rounding differs."""
    weights = []
    for name, micro in (("one", [[0, 1, 2, 3]]), ("two", [[0, 1], [2, 3]]), ("four", [[0], [1], [2], [3]])):
        data = run_config(place, tmp_path / name)
        data["loss"]["noise"] = 0.0
        config = from_dict(RunConfig, data)
        session = prepare(config, build_accelerator(config), lambda text: None)
        loss, weight, _, norm = loop._step(session, dealt_rows(session, micro), 0, 1e-3, 2)
        weights.append((loss, weight, norm, [p.detach().clone() for p in session.bare_head.parameters()]))
    for other in weights[1:]:
        assert other[1] == weights[0][1]
        assert other[0] == pytest.approx(weights[0][0], rel=1e-5)
        assert other[2] == pytest.approx(weights[0][2], rel=1e-4)
        # Adam's first step is lr * sign(gradient) where the gradient is not tiny: compare up to rounding there
        for a, b in zip(weights[0][3], other[3], strict=True):
            assert (a - b).abs().mean() < 1e-5


def test_evaluation_restores_training_mode(place: Path, tmp_path: Path) -> None:
    config = from_dict(RunConfig, run_config(place, tmp_path))
    session = prepare(config, build_accelerator(config), lambda text: None)
    session.bare_head.train()
    from train.evaluate import evaluate

    result = evaluate(
        session.bare_head, session.rows.held_out, session.held_features, 3, 256, session.accelerator, torch.float32
    )
    assert session.bare_head.training
    assert 1.0 <= result.accept_length <= 4.0 and len(result.accuracy) == len(result.conditional) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {"max_length": 300}}, "256 positions"),
        ({"head": {"draft_vocab": 5000}}, "head.draft_vocab"),
        ({"data": {"path": "nowhere.jsonl"}}, "nowhere.jsonl"),
        ({"target": {"path": "no/such/model"}}, "no/such/model"),
    ],
)
def test_errors_are_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: str
) -> None:
    data = run_config(place, tmp_path)
    for section, values in change.items():
        data[section] |= values
    assert _run(data, tmp_path) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and words in error
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_a_data_set_without_answers_stops_before_training(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    data = run_config(place, tmp_path)
    data["data"]["path"] = str(prompts)
    assert _run(data, tmp_path) == 1
    assert "data.answers" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_other_settings_do_not_overwrite_a_run(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(run_config(place, tmp_path), tmp_path) == 0
    before = (tmp_path / "run/best/model.safetensors").read_bytes()
    assert _run(run_config(place, tmp_path), tmp_path, "--set", "loss.noise=0.3") == 1
    assert "loss.noise" in capsys.readouterr().err
    assert _run(run_config(place, tmp_path), tmp_path, "--set", "data.max_length=190") == 1
    assert "data.max_length" in capsys.readouterr().err
    assert _run(run_config(place, tmp_path, resume="never"), tmp_path) == 1
    assert (tmp_path / "run/best/model.safetensors").read_bytes() == before
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    assert _run(run_config(place, tmp_path / "x", output_dir=str(foreign)), tmp_path / "x") == 1
    assert [p.name for p in foreign.iterdir()] == ["thesis.txt"]


def test_a_damaged_feature_shard_is_named_and_made_anew(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(run_config(place, tmp_path), tmp_path) == 0
    shard = tmp_path / "data/features_train/shard-00000.safetensors"
    before = shard.read_bytes()
    shard.write_bytes(before[:-100])
    capsys.readouterr()
    assert _run(run_config(place, tmp_path, max_steps=14), tmp_path) == 0
    assert f"features: {shard} is damaged ({len(before) - 100} bytes" in capsys.readouterr().out
    assert shard.read_bytes() == before


def test_a_head_for_a_target_with_an_adapter(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Features, loss and decoding are the adapted target's; the head says which, and is decoded with it again."""
    lora = save_adapter(tmp_path / "lora")
    change_config(lora, base_model_name_or_path=str(place / "target"))
    data = run_config(place, tmp_path, max_steps=4)
    data["target"]["adapter"] = str(lora)
    assert _run(data, tmp_path) == 0
    best, features = tmp_path / "run/best", tmp_path / "data/features_train"
    assert read_config(best).target_adapter == str(lora)
    record = json.loads((best / "provenance.json").read_text())
    digest = hashlib.sha256((lora / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert (record["target_adapter"], record["target_adapter_sha256"]) == (str(lora), digest)
    assert record["packages"]["peft"] and record["data"]["key"]["target.adapter_sha256"] == digest
    manifest = json.loads((features / "manifest.json").read_text())
    assert (manifest["adapter"], manifest["adapter_sha256"]) == (str(lora), digest)
    row = read_rows(tmp_path / "data/rows_train.jsonl")[0]
    wrapped = adapted(tiny_model("llama"))
    with torch.inference_mode():
        hidden = wrapped(torch.tensor([row.input_ids]), output_hidden_states=True).hidden_states[-1][0]
    stored = load_file(features / "shard-00000.safetensors")["features"][: len(row.input_ids)]
    torch.testing.assert_close(stored, hidden, atol=1e-3, rtol=1e-3)
    capsys.readouterr()
    ids = tiny_tokenizer()("<|user|>1 abc<|end|><|assistant|>")["input_ids"]
    options = ["--head", str(best), "--max-new-tokens", "16", "--ids", ",".join(map(str, ids))]
    assert generate(options) == 0
    shown = capsys.readouterr()
    out = wrapped.generate(input_ids=torch.tensor([ids]), max_new_tokens=16, do_sample=False, pad_token_id=0)
    want = tiny_tokenizer().decode(out[0, len(ids) :], skip_special_tokens=True)
    assert shown.out.startswith(want + "\n[accept length") and "warning" not in shown.err
    # Nothing made with this adapter is taken for the base's, or for another adapter's.
    assert _run(data, tmp_path, "--set", "target.adapter=null") == 1
    assert f"target.adapter: there '{lora}', asked None" in capsys.readouterr().err
    assert _run(data, tmp_path, "--set", "target.adapter=null", "--set", f"train.output_dir={tmp_path / 'other'}") == 1
    assert "data.work_dir" in capsys.readouterr().err
    save_adapter(lora, seed=8)
    assert _run(data, tmp_path, "--set", "train.max_steps=5") == 1
    assert f"target.adapter_sha256: there '{digest}'" in capsys.readouterr().err
    # The first run's head is a start for the base's, or for another adapter's.
    base = run_config(place, tmp_path / "base", max_steps=1)
    base["head"]["init_from"] = str(best)
    assert _run(base, tmp_path / "base") == 0
    assert read_config(tmp_path / "base/run/best").target_adapter is None


@pytest.mark.parametrize("launcher", [["-m", "accelerate.commands.launch", "--num_processes", "1"], []])
def test_real_launcher(place: Path, tmp_path: Path, launcher: list[str]) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps(run_config(place, tmp_path, max_steps=4)))
    command = [sys.executable, *launcher, str(ROOT / "train/eagle.py"), "--config", str(tmp_path / "config.yaml")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert (tmp_path / "run/best/model.safetensors").is_file()
    assert "left" in run.stdout and "tokens/s" in run.stdout


# ---- EAGLE-3, and what every run does at its end -------------------------------------------------------------


def eagle3_config(place: Path, out: Path, **train: Any) -> dict[str, Any]:
    config = run_config(place, out, **train)
    return config | {"head": {"kind": "eagle3", "draft_vocab": 256}, "loss": {"unroll_steps": 2}}


def test_eagle3_trains_decodes_and_goes_on_from_itself(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warm start on other data keeps the draft vocabulary, byte for byte, also from an engine's layout."""
    first, exported = tmp_path / "first", tmp_path / "exported"
    assert _run(eagle3_config(place, first), first) == 0
    said = capsys.readouterr().out
    assert "starts as the target's last one" in said and "check: accept length of the best head" in said
    assert "memory: about" in said and "tokens: at most 256 per step, 2 draft steps each" in said
    losses = [line["loss"] for line in metrics_of(first) if "loss" in line]
    assert losses[-1] < losses[0]
    lines = (place / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:8]))
    assert export(["--head", str(first / "run/best"), "--to", "vllm", "--out", str(exported)]) == 0
    for start, name in ((first / "run/best", "second"), (exported, "third")):
        config = eagle3_config(place, tmp_path / name)
        config["head"]["init_from"] = str(start)
        config["data"]["path"] = str(tmp_path / "few.jsonl")
        assert _run(config, tmp_path / name) == 0
    one, other, third = (
        load_file(tmp_path / name / "run/best/model.safetensors") for name in ("first", "second", "third")
    )
    assert torch.equal(one["d2t"], other["d2t"]) and torch.equal(one["t2d"], other["t2d"])
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    assert all(torch.equal(tensor, third[name]) for name, tensor in other.items())


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_checkpointing_changes_memory_alone(kind: str, place: Path, tmp_path: Path) -> None:
    for name, on in (("kept", False), ("again", True)):
        config = eagle3_config(place, tmp_path / name, gradient_checkpointing=on, max_steps=4)
        if kind == "eagle":
            config |= {"head": {"draft_vocab": 256}, "loss": {"unroll_steps": 2, "token_weight": 1.0}}
        assert _run(config, tmp_path / name) == 0
    assert same_weights(tmp_path / "kept", tmp_path / "again", 4)


def test_checkpointing_is_refused_for_heads_side_by_side(place: Path, tmp_path: Path) -> None:
    config = run_config(place, tmp_path, gradient_checkpointing=True) | {"head": {"kind": "medusa"}, "loss": {}}
    with pytest.raises(ValueError, match=r"train\.gradient_checkpointing is True, expected false"):
        from_dict(RunConfig, config)


def test_patience_ends_a_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluations at 2, 4, 6, .. of which the second is the best: with a patience of 2 the run ends at 8."""
    real, lengths = evaluate, iter([1.2, 1.5, 1.4, 1.5, 1.6])
    monkeypatch.setattr(loop, "evaluate", lambda *args: replace(real(*args), accept_length=next(lengths)))
    config = eagle3_config(place, tmp_path, eval_every=2, patience=2, max_steps=20)
    assert _run(config, tmp_path) == 0
    lines = metrics_of(tmp_path)
    assert lines[-1]["step"] == 8 and any(line.get("early_stop") for line in lines)
    assert json.loads((tmp_path / "run/best/provenance.json").read_text())["step"] == 4
    capsys.readouterr()
    assert _run(config, tmp_path) == 0
    assert "is finished" in capsys.readouterr().out


def test_a_report_is_left(place: Path, tmp_path: Path) -> None:
    assert _run(eagle3_config(place, tmp_path), tmp_path) == 0
    assert (tmp_path / "run/report.png").read_bytes()[:4] == b"\x89PNG"
    assert "eagle3" in (tmp_path / "run/report.html").read_text()
    lines = metrics_of(tmp_path)
    seen = [line["supervised"] for line in lines]
    assert seen == sorted(seen) and seen[-1] > seen[0] > 0
    last = next(line for line in reversed(lines) if "served/real" in line)
    assert last["served/real"] >= 0.9 * last["served/simulated"]


def test_a_head_that_decodes_worse_than_it_trained_fails_loudly(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The decoder's positions off by one, say: nothing is lost, but the exit code is not 0."""
    monkeypatch.setattr(served, "measure_served", lambda *args: served.Served(1.0, 1.2, 50))
    assert _run(eagle3_config(place, tmp_path), tmp_path) == 1
    assert "is not what training measured: decoding 1.000, simulated on the same texts 1.200" in capsys.readouterr().err
    assert (tmp_path / "run/best/model.safetensors").is_file()


def test_rows_of_further_directories_are_mixed_in(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, mixed = tmp_path / "alone", tmp_path / "mixed"
    assert _run(eagle3_config(place, alone), alone) == 0
    lines = (place / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:9]))
    config = eagle3_config(place, mixed)
    config["data"] |= {"path": str(tmp_path / "few.jsonl"), "also": [str(alone / "data")]}
    assert _run(config, mixed) == 0
    few, all_rows = (len(read_rows(out / "data/rows_train.jsonl")) for out in (mixed, alone))
    assert f"data: {few + all_rows} training and" in capsys.readouterr().out
    record = json.loads((mixed / "run/best/provenance.json").read_text())
    assert [source["train_rows"] for source in record["data"]["sources"]] == [few, all_rows]
    config["data"]["also"] = [str(tmp_path / "nowhere")]
    config["train"]["output_dir"] = str(mixed / "other")
    assert _run(config, mixed) == 1
    assert "data.also: " in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "hydra"])
def test_real_accept_length_is_the_simulated_one(kind: str) -> None:
    """Of heads with random weights, trained a little: the same rounds, counted in two ways."""
    target = tiny_target("llama")
    head = tiny_head(target, kind=kind)
    head.init_from_target()
    target.tap(head.needs.taps)
    prompts = [prompt_ids(9, seed) for seed in range(6)]
    rows = []
    for number, prompt in enumerate(prompts):
        ids = (*prompt, *library_greedy(tiny_model("llama"), prompt, 40))
        rows.append(TokenRow(str(number), ids, ((9, len(ids)),), "t"))
    ones = torch.ones(1, 49, dtype=torch.bool)
    features = [target.features(torch.tensor([r.input_ids]), ones, head.needs.taps)[0].clone() for r in rows]
    batch = make_batch(rows, features, head.max_depth or 3, head.needs, packed=64)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        head(batch, LossSpec(0.0, 1.0, 0.8)).loss_sum.backward()
        optimizer.step()
    found = served.measure_served(target, head, rows, 3)
    assert found is not None and found.simulated > 1.2  # else nothing was compared
    assert found.real == pytest.approx(found.simulated, abs=0.05)  # rounding can move a near-tie

"""Training Medusa and Hydra heads, alone and together with the target (Medusa-2), from end to end."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from heads.base import TreePolicy
from heads.checkpoint import load_head, read_config
from infer.baseline import decode_plain
from infer.cli import run as generate
from infer.engine import decode_speculative
from infer.stopping import StopRule
from scripts.make_conversations import main as make_conversations
from tests.launched import ROOT, environment, run, torchrun
from tests.tiny import tiny_model, tiny_target, tiny_tokenizer
from tests.tiny_run import dealt_rows, make_place, metrics_of, run_config, run_entry, same_weights
from train import loop
from train.config import RunConfig
from train.eagle import main as train_eagle
from train.medusa import main
from train.session import build_accelerator, prepare
from train.typed_yaml import from_dict

PROMPT = "<|user|>1 abc<|end|><|assistant|>"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("tiny"))


def config_of(place: Path, out: Path, kind: str = "medusa", **train: Any) -> dict[str, Any]:
    data = run_config(place, out, **train)
    data["head"] |= {"kind": kind, "heads": 3}
    return data


def joint_config(place: Path, out: Path, **train: Any) -> dict[str, Any]:
    return config_of(place, out, **train) | {"joint": {"start": 0.5, "lr": 0.003, "rank": 4}}


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()}


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("projection", ["shared", "own"])
def test_a_run_leaves_a_head_that_decodes(place: Path, tmp_path: Path, kind: str, projection: str) -> None:
    data = config_of(place, tmp_path, kind)
    data["head"]["projection"] = projection
    before = digest(place / "target")
    assert run_entry(main, data, tmp_path) == 0
    assert digest(place / "target") == before
    best = tmp_path / "run/best"
    lines = metrics_of(tmp_path)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert all(len(line["eval/accuracy"]) == 3 for line in lines if "eval/accuracy" in line)
    assert any(name.startswith("lm_heads") for name in load_file(best / "model.safetensors")) == (projection == "own")
    head = load_head(best)
    target, stop = tiny_target("llama"), StopRule(frozenset(), 20)
    prompt = tiny_tokenizer()(PROMPT)["input_ids"]
    policy = TreePolicy(width=3, depth=3, total=8)
    assert decode_speculative(target, head, prompt, policy, stop)[0] == decode_plain(target, prompt, stop)[0]


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_accumulation_is_one_big_batch(place: Path, tmp_path: Path, kind: str) -> None:
    """1x4, 2x2 and 4x1 rows: one loss, one gradient, also when target and heads are trained together."""
    found = []
    for name, micro in (("one", [[0, 1, 2, 3]]), ("two", [[0, 1], [2, 3]]), ("four", [[0], [1], [2], [3]])):
        data = config_of(place, tmp_path / name, kind) | {"joint": {"start": 0.0, "rank": 4}}
        config = from_dict(RunConfig, data)
        session = prepare(config, build_accelerator(config), lambda text: None)
        assert session.joint is not None
        session.joint.active = True
        loss, weight, _, norm = loop._step(session, dealt_rows(session, micro), 0, 1e-3, 3)
        parameters = [*session.bare_head.parameters(), *session.joint.lora.parameters()]
        found.append((loss, weight, norm, [p.detach().clone() for p in parameters]))
    for other in found[1:]:
        assert other[1] == found[0][1]
        assert other[0] == pytest.approx(found[0][0], rel=1e-5)
        assert other[2] == pytest.approx(found[0][2], rel=1e-4)
        for a, b in zip(found[0][3], other[3], strict=True):
            assert (a - b).abs().mean() < 1e-5  # see test_train_loop


def test_two_processes_train_target_and_heads_as_one(place: Path, tmp_path: Path) -> None:
    """The LoRA's gradients are averaged over the ranks as those of the heads are."""
    one, two = tmp_path / "one", tmp_path / "two"
    joint = {"start": 0.0, "lr": 0.003, "rank": 4}
    data = config_of(place, one, max_steps=4, grad_accumulation=2, eval_every=4) | {"joint": joint}
    assert run_entry(main, data, one) == 0
    two.mkdir()
    data = config_of(place, two, max_steps=4, eval_every=4) | {"joint": joint}
    (two / "config.yaml").write_text(json.dumps(data))
    arguments = ["--config", str(two / "config.yaml")]
    assert make_conversations(arguments) == 0
    done = run(torchrun(str(ROOT / "train/medusa.py"), *arguments), environment())
    assert done.returncode == 0, done.stderr[-3000:]
    # the same sums in another order; Adam's first steps amplify rounding where a gradient is tiny
    assert same_weights(one, two, 4, tolerance=5e-3)
    a, b = (load_file(out / "run/best/adapter/adapter_model.safetensors") for out in (one, two))
    assert all(float((tensor - b[name]).abs().mean()) < 2e-4 for name, tensor in a.items())
    left, right = ([m["target_kl"] for m in metrics_of(out) if "target_kl" in m] for out in (one, two))
    assert left and left == pytest.approx(right, rel=1e-2, abs=1e-5)


def test_joint_training_saves_the_adapter_and_decodes_with_it(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digest(place / "target")
    assert run_entry(main, joint_config(place, tmp_path), tmp_path) == 0
    assert digest(place / "target") == before
    best = tmp_path / "run/best"
    config = read_config(best)
    assert config.target_adapter == "adapter" and config.trained_with_target
    lines = metrics_of(tmp_path)
    assert all(("target_kl" in line) == (line["step"] > 6) for line in lines if "loss" in line)
    drift = json.loads((best / "provenance.json").read_text())["target_drift"]
    assert drift["positions"] > 0 and drift["kl"] > 0 and drift["perplexity"] != drift["base_perplexity"]
    # Decoding loads the adapter by itself, and is exact towards the adapted target, as it says.
    prompt = tiny_tokenizer()(PROMPT)["input_ids"]
    capsys.readouterr()
    options = ["--head", str(best), "--max-new-tokens", "20", "--ids", ",".join(map(str, prompt)), "--tree-depth", "3"]
    assert generate(options) == 0
    shown = capsys.readouterr()
    assert "not lossless towards the original target" in shown.err
    wrapped = PeftModel.from_pretrained(tiny_model("llama"), str(best / "adapter")).eval()
    with torch.inference_mode():
        out = wrapped.generate(input_ids=torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    want = tiny_tokenizer().decode(out[0, len(prompt) :], skip_special_tokens=True)
    assert shown.out.startswith(want + "\n[accept length")


def test_a_killed_joint_run_goes_on_to_the_same_weights(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run_entry(main, joint_config(place, whole), whole) == 0
    real = loop._step

    def dies(session: Any, micro: Any, step: int, lr: float, unroll: int) -> Any:
        if step == 10:
            raise KeyboardInterrupt
        return real(session, micro, step, lr, unroll)

    monkeypatch.setattr(loop, "_step", dies)
    with pytest.raises(KeyboardInterrupt):
        run_entry(main, joint_config(place, cut), cut)
    monkeypatch.setattr(loop, "_step", real)
    assert run_entry(main, joint_config(place, cut), cut) == 0
    assert same_weights(whole, cut, 12)
    a, b = (load_file(out / "run/best/adapter/adapter_model.safetensors") for out in (whole, cut))
    assert a and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_heads_start_from_trained_ones(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_entry(main, config_of(place, first, max_steps=8), first) == 0
    data = config_of(place, second, max_steps=4)
    data["head"]["init_from"] = str(first / "run/best")
    assert run_entry(main, data, second) == 0
    fresh, warm = (next(m["loss"] for m in metrics_of(out) if "loss" in m) for out in (first, second))
    assert warm < fresh
    ids = [load_head(out / "run/best").draft_token_ids for out in (first, second)]
    assert torch.equal(*ids)
    data["head"]["heads"] = 2
    data["train"]["output_dir"] = str(second / "other")
    assert run_entry(main, data, second) == 1
    assert "num_draft_heads" in capsys.readouterr().err


def test_entries_and_settings_that_do_not_fit_are_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for entry, data, words in (
        (train_eagle, config_of(place, tmp_path), "train/medusa.py trains"),
        (main, run_config(place, tmp_path), "train/eagle.py trains"),
        (main, config_of(place, tmp_path, "medusae"), "medusae"),
        (main, config_of(place, tmp_path) | {"loss": {"unroll_steps": 3}}, "loss.unroll_steps"),
        (main, config_of(place, tmp_path) | {"loss": {"hard_weight": 1.5}}, "loss.hard_weight"),
        (train_eagle, run_config(place, tmp_path) | {"joint": {"start": 0.5}}, "joint.start"),
        (main, joint_config(place, tmp_path) | {"target": {"path": "a", "adapter": "b"}}, "joint.start"),
    ):
        with pytest.raises(SystemExit) as stopped:
            run_entry(entry, data, tmp_path)
        assert stopped.value.code == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

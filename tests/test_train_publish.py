"""The folder that is published, and its card: what is told, where it comes from, and what must not be in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants

from heads.adapter import find_adapter
from heads.checkpoint import load_head, read_config
from heads.formats.opening import known_target, open_head
from heads.formats.registry import LAYOUTS
from infer.report import is_report
from scripts.publish import main
from tests.adapters import save_adapter
from tests.published import BASE, HOST, PROVENANCE, SECRET, make_head, make_report
from tests.tiny import tiny_model
from train.publish_card import metadata_yaml
from train.publish_facts import naming_advice
from train.publish_folder import CARD

REPO = "me/my-eagle3-head"
PRIVATE = (SECRET, "alice", "secret project", HOST, "trainer07", "optimizer.pt", "/scratch", "/srv", "hf_")


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_head(tmp_path / "run")


def publish(run: Path, *extra: str, licence: str | None = "apache-2.0", base: str | None = BASE) -> int:
    given = [] if licence is None else ["--license", licence]
    given += [] if base is None else ["--base-model", base]
    return main(["--head", str(run), "--repo", REPO, *given, *extra])


def texts(folder: Path) -> str:
    return "\n".join(p.read_text() for p in folder.rglob("*") if p.suffix in (".md", ".json", ".yaml"))


def card(folder: Path) -> tuple[dict[str, Any], str]:
    content = ModelCard.load(folder / CARD)
    return dict(content.data.to_dict()), content.text


# ---- the folder --------------------------------------------------------------------------------------------


def test_the_folder_is_the_head_and_what_is_told_of_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert publish(run) == 0
    out = run / "best_hub"
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert found == {"README.md", "config.json", "model.safetensors", "provenance.json", "run.yaml"}
    mine, theirs = load_head(run / "best"), load_head(out)
    assert theirs.config.target == BASE
    assert all(torch.equal(t, theirs.state_dict()[name]) for name, t in mine.state_dict().items())
    shown = capsys.readouterr()
    assert (out / CARD).read_text() in shown.out
    size = (out / "model.safetensors").stat().st_size
    assert f"model.safetensors  {size:,}" in shown.out
    assert "dry run, nothing was sent" in shown.err and REPO in shown.err


def test_nothing_of_this_machine_is_published(run: Path, tmp_path: Path) -> None:
    make_report(run / "best", tmp_path / "speed.json")
    assert publish(run, "--report", str(tmp_path / "speed.json")) == 0
    out = texts(run / "best_hub")
    assert [word for word in PRIVATE if word in out] == []
    assert "ultrachat_200k" in out and "rows.jsonl" in out  # what is told instead
    yaml.safe_load((run / "best_hub/run.yaml").read_text())


def test_the_same_folder_again(run: Path) -> None:
    assert publish(run) == 0
    first = {path.name: path.read_bytes() for path in (run / "best_hub").iterdir()}
    assert publish(run) == 0
    assert {path.name: path.read_bytes() for path in (run / "best_hub").iterdir()} == first
    assert sorted(path.name for path in run.iterdir()) == ["best", "best_hub", "metrics.jsonl"]


def test_a_folder_of_others_stays(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/README.md").write_text("# My notes\n")
    assert publish(run, "--out", str(tmp_path / "mine")) == 1
    assert "is not a folder that publish.py wrote" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["README.md"]


# ---- the card ----------------------------------------------------------------------------------------------


def test_metadata(run: Path) -> None:
    assert publish(run) == 0
    data, text = card(run / "best_hub")
    assert data == {
        "base_model": BASE,
        "base_model_relation": "adapter",
        "datasets": ["HuggingFaceH4/ultrachat_200k"],
        "library_name": "draftsmith",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "eagle3"],
    }
    for told in (
        "303 steps, 1.50 epochs, 91,104 supervised tokens, 1802 s",
        "1,234 conversations, 98,765 supervised tokens, 12 held out",
        "train/eagle.py --config configs/eagle_smollm2.yaml --set target.path=org/Base-1B",
        "torch 2.13.0",
        PROVENANCE["commit"],
        "accept length 1.34 tokens",
        "No evaluation of this head was at hand, so no speed is claimed.",
    ):
        assert told in text, told
    assert "vllm serve" not in text  # there is no layout that it loads


def test_figures_come_from_the_evaluation(run: Path) -> None:
    make_report(run / "best", run / "speed.json")  # found beside the head
    make_report(run / "best", run / "other.json", head_sha256="0" * 64)
    assert publish(run) == 0
    _, text = card(run / "best_hub")
    for told in (
        "**spec_bench.jsonl**, 3 prompts",
        "Some CPU, 2 cores",
        "**3.00**",
        "| plain decoding | 1.1 | 24 | 2.00x |",
        "| with this head | 2.2 | 8 |  |",
        "| accepted, if the one before was | 100.0% | 50.0% | 100.0% |",
        "greedy, float32",
        "Texts equal to plain decoding's, token for token: 100% of the prompts.",
        "infer/generate.py --head best --eval spec_bench.jsonl",
    ):
        assert told in text, told
    assert "no speed is claimed" not in text
    assert is_report(run / "best_hub/evaluation/speed.json")
    assert not (run / "best_hub/evaluation/other.json").exists()


def test_a_lossy_evaluation_says_so(run: Path) -> None:
    make_report(run / "best", run / "speed.json", lossy="rule 'typical' does not follow the target's distribution")
    assert publish(run) == 0
    assert "Lossy: rule 'typical'" in card(run / "best_hub")[1]


@pytest.mark.parametrize("kind", ["eagle", "medusa", "hydra"])
def test_other_kinds(tmp_path: Path, kind: str) -> None:
    run = make_head(tmp_path / "run", kind)
    assert publish(run) == 0
    data, text = card(run / "best_hub")
    assert kind in data["tags"]
    assert "not lossless towards" not in text and "LoRA" not in text


# ---- layouts ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("alice") / "target"
    tiny_model("llama").save_pretrained(folder)
    return str(folder)


def test_engines_find_their_layout_at_the_root(tmp_path: Path, target: str) -> None:
    run = make_head(tmp_path / "run", target=target)
    assert publish(run) == 0
    out = run / "best_hub"
    data, text = card(out)
    assert data["tags"][3:] == ["vllm", "sglang"]
    serve = {"method": "eagle3", "model": REPO, "num_speculative_tokens": 4}
    assert f"vllm serve {BASE} --speculative-config '{json.dumps(serve)}'" in text
    assert f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {REPO}" in text
    assert f"generate.py --head {REPO} " in text
    assert not (out / "sglang").exists() and json.loads((out / "config.json").read_text())["model_type"] == "llama"
    assert (out / "run.yaml").is_file() and (out / "provenance.json").is_file()
    mine, opened = load_head(run / "best"), open_head(str(out), known_target(tiny_model("llama").config, target))
    theirs = opened.build()
    assert opened.config.target == BASE and theirs.state_dict().keys() == mine.state_dict().keys()
    assert all(torch.equal(t, theirs.state_dict()[name]) for name, t in mine.state_dict().items())
    assert target not in texts(out) and "alice" not in texts(out)


def test_layouts_that_differ_lie_in_directories(tmp_path: Path, target: str) -> None:
    run = make_head(tmp_path / "run", "eagle", target=target)
    assert publish(run) == 0
    out = run / "best_hub"
    _, text = card(out)
    assert f"hf download {REPO} --include 'sglang/*' --local-dir my-eagle3-head" in text
    assert "--speculative-draft-model-path my-eagle3-head/sglang" in text
    known = known_target(tiny_model("llama").config, target)
    for folder in (out, out / "sglang"):
        assert open_head(str(folder), known).config.kind == "eagle"
    assert publish(run, "--to", "sglang,eagle") == 0
    assert not (out / "sglang").exists() and (out / "eagle").is_dir()
    assert f"--speculative-draft-model-path {REPO}" in card(out)[1]


def test_no_layout_but_ours(tmp_path: Path, target: str) -> None:
    run = make_head(tmp_path / "run", target=target)
    assert publish(run, "--to", "native") == 0
    assert load_head(run / "best_hub").config.kind == "eagle3"
    assert "which other engines do not load" in card(run / "best_hub")[1]


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_every_layout_has_its_commands(tmp_path: Path, target: str, name: str) -> None:
    kind = next(kind for kind in ("eagle", "eagle3", "medusa", "hydra") if kind in LAYOUTS[name].kinds)
    run = make_head(tmp_path / "run", kind, target=target)
    assert publish(run, "--to", name) == 0
    data, text = card(run / "best_hub")
    assert name in data["tags"] and text.count("### ") == 2
    assert target not in texts(run / "best_hub")


def test_layouts_that_cannot_hold_the_head(tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_head(tmp_path / "run", norm_output=True, target=target)
    assert publish(run, "--to", "sglang") == 1
    assert "norm_output" in capsys.readouterr().err and not (run / "best_hub").exists()
    assert publish(run) == 0  # chosen by us: told, and left out
    assert "left out: layout sglang" in capsys.readouterr().err
    assert publish(run, "--to", "medusa") == 1
    assert "--to medusa" in capsys.readouterr().err
    assert publish(run, "--to", "other") == 1
    assert "--to is 'other', expected one of" in capsys.readouterr().err


# ---- adapters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
def test_the_adapter_of_the_target_is_published(tmp_path: Path, inside: bool) -> None:
    folder = save_adapter(tmp_path / "alice's lora")
    known = {"target_adapter_sha256": find_adapter(str(folder)).sha256}
    run = make_head(tmp_path / "run", provenance=known, target_adapter="adapter" if inside else str(folder))
    if inside:
        shutil.move(folder, run / "best/adapter")
        folder = run / "best/adapter"
    assert publish(run) == 0
    out = run / "best_hub"
    assert (out / "adapter/adapter_model.safetensors").read_bytes() == (
        folder / "adapter_model.safetensors"
    ).read_bytes()
    assert json.loads((out / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == BASE
    assert not (out / "adapter/README.md").exists()
    assert read_config(out).target_adapter == "adapter"
    data, text = card(out)
    assert "lora" in data["tags"]
    assert "trained for the target with a peft adapter, which is in this repository" in text
    assert "PeftModel.from_pretrained(base" in text and "alice" not in texts(out)


def test_engines_are_given_the_adapted_target(tmp_path: Path, target: str) -> None:
    run = make_head(tmp_path / "run", target=target, target_adapter="adapter")
    save_adapter(run / "best/adapter")
    assert publish(run) == 0
    text = card(run / "best_hub")[1]
    assert "vllm serve adapted --speculative-config" in text and f'"{REPO}", subfolder="adapter")' in text
    assert {path.name for path in (run / "best_hub/adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    known = known_target(tiny_model("llama").config, target)
    assert open_head(str(run / "best_hub"), known).config.target_adapter == "adapter"


def test_a_changed_adapter_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_adapter(tmp_path / "lora")
    run = make_head(tmp_path / "run", provenance={"target_adapter_sha256": "ab" * 32}, target_adapter=str(folder))
    assert publish(run) == 1
    assert "is not the one that the head was trained for" in capsys.readouterr().err
    shutil.rmtree(folder)
    assert publish(run) == 1
    assert "must be published with it but is not here" in capsys.readouterr().err
    assert not (run / "best_hub").exists()


def test_medusa_2_says_that_the_target_has_changed(tmp_path: Path) -> None:
    drift = {"kl": 0.0048, "base_perplexity": 2.016, "perplexity": 2.027, "argmax_changed": 0.031}
    changes: dict[str, Any] = {"target_adapter": "adapter", "trained_with_target": True}
    run = make_head(tmp_path / "run", "medusa", {"target_drift": drift}, **changes)
    save_adapter(run / "best/adapter")
    assert publish(run) == 0
    _, text = card(run / "best_hub")
    assert "**not lossless towards the original model**" in text
    assert "KL 0.0048 nats per token, perplexity 2.016 before and 2.027 after, another argmax at 3.1%" in text
    assert "Greedy output is the target's own" not in text


# ---- licences ----------------------------------------------------------------------------------------------


def target_card(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "README.md").write_text(f"---\n{text}---\n# Base\n")
    (folder / "LICENSE").write_text("The terms.\n")
    return folder


def test_the_licence_is_the_targets(tmp_path: Path) -> None:
    target = target_card(tmp_path / "t", "license: other\nlicense_name: base-terms\nlicense_link: LICENSE\n")
    run = make_head(tmp_path / "run", target=str(target))
    assert publish(run, licence=None) == 0
    data, text = card(run / "best_hub")
    assert data["license"] == "other" and data["license_name"] == "base-terms"
    assert data["license_link"] == f"https://huggingface.co/{BASE}/blob/main/LICENSE"
    assert "that of the base model" in text
    assert (run / "best_hub/LICENSE").read_text() == "The terms.\n"


def test_the_licence_is_found_in_the_hubs_cache(run: Path, tmp_path: Path) -> None:
    commit = "a" * 40
    repo = tmp_path / "cache" / f"models--{BASE.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text(commit)
    (repo / "snapshots").mkdir()
    target_card(repo / "snapshots" / commit, "license: llama3.2\n")
    assert publish(run, licence=None) == 0
    assert card(run / "best_hub")[0]["license"] == "llama3.2"


def test_the_embedded_target_is_known(tmp_path: Path) -> None:
    run = make_head(tmp_path / "run", target="embedded")
    assert publish(run, licence=None, base=None) == 0
    data, _ = card(run / "best_hub")
    assert (data["license"], data["base_model"]) == ("apache-2.0", "HuggingFaceTB/SmolLM2-135M-Instruct")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("language: en\n", "the licence of org/Base-1B is not known here"),
        ("license: unknown\n", "the licence of org/Base-1B is not known here"),
        ("license: other\n", "without a license_name"),
        ("license: [mit, gpl]\n", "expected one identifier"),
        ("license: [unclosed\n", "cannot be read"),
    ],
)
def test_without_a_licence_nothing_is_written(
    tmp_path: Path, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_head(tmp_path / "run", target=str(target_card(tmp_path / "t", text)))
    assert publish(run, licence=None) == 1
    err = capsys.readouterr().err
    assert told in err and "--license" in err
    assert not (run / "best_hub").exists()


# ---- errors before anything is written ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (["--license", "apache2"], "--license is 'apache2', which is no identifier of the hub"),
        (["--license", "other"], "--license other needs --license-name"),
        (["--license", "mit", "--license-name", "x"], "belong to --license other"),
        (["--license", "other", "--license-name", "x", "--license-link", "LICENSE"], "begins with https://"),
        (["--repo", "my-head"], "expected namespace/name"),
        (["--repo", "me/bad name"], "--repo is 'me/bad name'"),
        (["--repo", "me/a--b"], "--repo is 'me/a--b'"),
        (["--base-model", "/models/x"], "--base-model is '/models/x', expected"),
        (["--report", "nowhere.json"], "--report: nowhere.json is no report"),
        (["--head", "nowhere"], "--head: nowhere holds no head"),
    ],
)
def test_bad_options(run: Path, extra: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert publish(run, *extra) == 1
    assert told in capsys.readouterr().err
    assert not (run / "best_hub").exists()


def test_a_local_target_needs_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_head(tmp_path / "run", target=str(tmp_path))
    assert publish(run, base=None) == 1
    assert "give --base-model namespace/name" in capsys.readouterr().err


def test_a_report_of_another_head_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_report(run / "best", tmp_path / "speed.json", head_sha256="0" * 64)
    assert publish(run, "--report", str(tmp_path / "speed.json")) == 1
    assert "is of another head" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["cut", "not finite"])
def test_a_damaged_head_is_refused(run: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "best/model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-10] if damage == "cut" else data[:-4] + b"\x00\x00\xc0\x7f")  # a NaN
    assert publish(run) == 1
    assert ("cannot be read" if damage == "cut" else "not finite") in capsys.readouterr().err
    assert not (run / "best_hub").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"license": None},
        {"license": "other"},
        {"base_model": "/models/x"},
        {"datasets": ["rows.jsonl"]},
        {"tags": ["a\nb"]},
        {"tags": []},
        {"library_name": "other"},
    ],
)
def test_wrong_metadata_is_refused(change: dict[str, Any]) -> None:
    good = {
        "base_model": BASE,
        "base_model_relation": "adapter",
        "library_name": "draftsmith",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["a"],
    }
    assert yaml.safe_load(metadata_yaml(good)) == good
    with pytest.raises(ValueError):
        metadata_yaml(good | change)


@pytest.mark.parametrize(
    ("repo", "kind", "told"),
    [
        ("me/x-eagle3", "eagle3", None),
        ("me/EAGLE3-Llama", "eagle3", None),
        ("me/eagle-x", "eagle", None),
        ("me/x", "medusa", None),
        ("me/x", "eagle3", '"eagle3" in its name'),
        ("me/x", "eagle", '"eagle-" in its name'),
        ("me/x-eagle3", "eagle", "for eagle3; this head is eagle"),
        ("me/eagle-eagle3", "eagle3", "for eagle; this head is eagle3"),
        ("me/medusa-eagle-x", "medusa", "for eagle; this head is medusa"),
        ("me/dflash-x", "medusa", "for dflash; this head is medusa"),
    ],
)
def test_names_that_engines_guess_from(repo: str, kind: str, told: str | None) -> None:
    found = naming_advice(repo, kind)
    assert found is None if told is None else found is not None and told in found

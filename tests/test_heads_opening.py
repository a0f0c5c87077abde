"""Heads of any layout are recognised and opened; what is damaged, foreign or hostile is refused in one sentence."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file

from heads.adapter import adapter_in
from heads.base import DraftHead
from heads.checkpoint import load_head, save_head
from heads.fingerprint import differences, fingerprint, weight_digest
from heads.formats.files import head_digest, head_folder
from heads.formats.opening import NATIVE, open_head
from heads.target import TargetAdapter
from tests.layouts import a_head, even_target, exported, facts, fields_of, tensors_of

EVERY = [
    ("vllm", "eagle"),
    ("vllm", "eagle3"),
    ("vllm", "medusa"),
    ("sglang", "eagle"),
    ("sglang", "eagle3"),
    ("eagle", "eagle"),
    ("eagle", "eagle3"),
    ("medusa", "medusa"),
    ("hydra", "hydra"),
    ("speculators", "eagle3"),
    ("trtllm", "eagle3"),
    ("trtllm", "medusa"),
]


@pytest.fixture(scope="module")
def target() -> TargetAdapter:
    return even_target()


def quiet(_: str) -> None:
    pass


def pickled(folder: Path, name: str = "pytorch_model.bin") -> Path:
    """The folder's tensors in a pickle instead, as older heads are published."""
    torch.save(tensors_of(folder), folder / name)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    return folder


@pytest.mark.parametrize(("to", "kind"), EVERY)
def test_every_layout_is_recognised(target: TargetAdapter, tmp_path: Path, to: str, kind: str) -> None:
    head = a_head(target, kind, vocab=kind == "eagle3")
    told: list[str] = []
    opened = open_head(str(exported(target, head, to, tmp_path)), facts(target), announce=told.append)
    assert opened.config.kind == kind and opened.config.target == head.config.target
    assert len(told) == 1 and kind in told[0]
    assert opened.config.taps == head.config.taps
    same = opened.for_target(target)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 5, 64 * (3 if kind == "eagle3" else 1), generator=generator)
    assert torch.equal(_logits(same, features), _logits(head, features))


def _logits(head: DraftHead, features: torch.Tensor) -> torch.Tensor:
    tokens = torch.arange(5)[None]
    if head.config.kind in ("eagle", "eagle3"):
        state: Any = head.start(16)
        head.commit(state, features, tokens)
        return head.step_logits(0, state.last_B1H)
    return head.step_logits(0, head.run(0, features, [tokens]))  # type: ignore[operator]  # Medusa's own


def test_native_heads_are_opened_too(target: TargetAdapter, tmp_path: Path) -> None:
    head = a_head(target, "eagle")
    opened = open_head(str(save_head(head, tmp_path / "head")))
    assert (opened.layout, opened.config) == (NATIVE, head.config)
    assert torch.equal(opened.build().state_dict()["fc.weight"], head.state_dict()["fc.weight"])


@pytest.mark.parametrize(
    ("to", "kind", "file"), [("eagle", "eagle", "pytorch_model.bin"), ("medusa", "medusa", "medusa_lm_head.pt")]
)
def test_pickles_of_tensors_are_read(target: TargetAdapter, tmp_path: Path, to: str, kind: str, file: str) -> None:
    head = a_head(target, kind)
    out = pickled(exported(target, head, to, tmp_path), file)
    opened = open_head(str(out), facts(target), announce=quiet)
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in opened.build().state_dict().items())


def test_heads_by_others(tmp_path: Path) -> None:
    """A bias of fc, biases in attention, a prefix, a copy of the embedding: as published heads have them."""
    target = even_target()
    head = a_head(target, "eagle")
    config = replace(head.config, fc_bias=True, attention_bias=True)
    theirs = type(head)(config)
    for parameter in theirs.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    out = exported(target, head, "eagle", tmp_path)
    (out / "draftsmith.json").unlink()
    named = {f"model.{name}": value for name, value in theirs.state_dict().items()}
    save_file({**named, "model.embed_tokens.weight": target.embedding.weight.detach()}, out / "model.safetensors")
    opened = open_head(str(out), facts(target), announce=quiet)
    assert (opened.config.fc_bias, opened.config.attention_bias) == (True, True)
    theirs.eval().bind(target)
    features = torch.randn(1, 5, 64)
    assert torch.equal(_logits(opened.for_target(target), features), _logits(theirs, features))
    save_file({**named, "model.embed_tokens.weight": torch.zeros(512, 64)}, out / "model.safetensors")
    with pytest.raises(ValueError, match="another target, or embeddings of the head's own"):
        open_head(str(out), facts(target), announce=quiet).for_target(target)


def test_what_has_no_place_is_named(target: TargetAdapter, tmp_path: Path) -> None:
    out = exported(target, a_head(target, "eagle3", vocab=True), "vllm", tmp_path)
    tensors = tensors_of(out)
    save_file({**tensors, "input_norm.weight": torch.ones(3 * 64)}, out / "model.safetensors")
    with pytest.raises(ValueError, match=r"has input_norm.weight, for which there is no place"):
        open_head(str(out), facts(target), announce=quiet).build()
    save_file({n: v for n, v in tensors.items() if n != "norm.weight"}, out / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks norm.weight"):
        open_head(str(out), facts(target), announce=quiet).build()
    save_file({**tensors, "d2t": tensors["d2t"] + torch.arange(100)}, out / "model.safetensors")
    with pytest.raises(ValueError, match=r"d2t is target ids.*doctor"):
        open_head(str(out), facts(target), announce=quiet)
    save_file({"something": torch.ones(1)}, out / "model.safetensors")
    with pytest.raises(ValueError, match=r"something.* no draft head"):
        open_head(str(out), facts(target), announce=quiet)


def test_the_target_is_asked_for_where_it_decides(target: TargetAdapter, tmp_path: Path) -> None:
    for kind, to, words in (("eagle3", "vllm", "--target is needed"), ("medusa", "medusa", "give --target")):
        out = exported(target, a_head(target, kind), to, tmp_path)
        (out / "draftsmith.json").unlink()
        fields = fields_of(out)
        fields.pop("base_model_name_or_path", None)
        (out / "config.json").write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=words):
            open_head(str(out), announce=quiet)


# ---- damage and attacks ------------------------------------------------------------------------------------


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _payload(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Payload(folder / "ran")}))


def _zipped_payload(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Payload(folder / "ran")}, folder / "pytorch_model.bin")


def _list(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save([torch.zeros(1)], folder / "pytorch_model.bin")


def _cut_pickle(folder: Path) -> None:
    pickled(folder)
    data = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(data[: len(data) // 2])


def _cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def _random(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 9)


def _random_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(bytes(reversed(range(256))) * 9)


def _index(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))

    return write


def _link(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere.safetensors")


def _two(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"x": torch.zeros(1)}, folder / "b.safetensors")


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (_payload, "holds more than tensors"),
    (_zipped_payload, "holds more than tensors"),
    (_list, "does not hold tensors by name"),
    (_cut_pickle, "pytorch_model.bin"),
    (_cut, r"model.safetensors cannot be read"),
    (_random, r"model.safetensors cannot be read"),
    (_random_pickle, r"pytorch_model.bin"),
    (_index("../elsewhere.safetensors"), "outside of itself"),
    (_index("/etc/hostname"), "outside of itself"),
    (_index("missing.safetensors"), "lacks missing.safetensors"),
    (_link, "outside of itself"),
    (_two, "a.safetensors, b.safetensors; expected one"),
    (lambda folder: (folder / "model.safetensors").unlink(), r"holds no model.safetensors"),
    (lambda folder: (folder / "config.json").unlink(), r"holds no config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
    (lambda folder: (folder / "config.json").write_text("[]"), "holds a list"),
    (lambda folder: (folder / "config.json").write_text('{"hidden_size": [1]}'), "no eagle head in the layout"),
    (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "is not JSON"),
]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_damage_and_attacks_are_refused(
    target: TargetAdapter, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    out = exported(target, a_head(target, "eagle"), "vllm", tmp_path)
    damage(out)
    with pytest.raises(ValueError, match=words) as caught:
        open_head(str(out), facts(target), announce=quiet)
    assert str(caught.value).startswith("--head:") and not (out / "ran").exists()


def test_an_adapter_stays_in_the_head_or_is_named_in_full(tmp_path: Path) -> None:
    (tmp_path / "head/adapter").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    head = str(tmp_path / "head")
    assert adapter_in(head, "adapter") == str(tmp_path / "head/adapter")
    assert adapter_in(head, "../other") == "../other"
    assert adapter_in(head, "org/adapter") == "org/adapter"
    assert adapter_in(head, None) is None


# ---- the hub -----------------------------------------------------------------------------------------------


def test_heads_from_the_hub(target: TargetAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache holds links; without a connection what is there is used, and the rest is an error in a sentence."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    out = exported(target, a_head(target, "eagle"), "vllm", tmp_path)
    repository = tmp_path / "hub/models--org--head"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("a" * 40)
    for path in out.iterdir():
        path.rename(repository / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert head_folder("org/head") == snapshot
    assert open_head("org/head", facts(target), announce=quiet).config.kind == "eagle"
    for name in ("org/nothing", "nothing", "a/../b", "/nowhere"):
        with pytest.raises(ValueError, match=r"is not a directory|is no directory here"):
            head_folder(name)


# ---- the target that a head was made for -------------------------------------------------------------------


def test_another_target_is_told(target: TargetAdapter, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    head = a_head(target, "eagle")
    head.config = replace(head.config, **fingerprint(target), trained_length=99)
    folder = save_head(head, tmp_path / "head")
    config = load_head(folder).config
    assert config == head.config and config.lm_head_sha256 and config.embedding_sha256 != config.lm_head_sha256
    assert differences(config, fingerprint(target), "t") == []
    other = even_target()
    other.lm_head.weight.data[0, 0] += 1
    found = fingerprint(other)
    (told,) = differences(config, found, other.name)
    assert "LM head" in told and config.lm_head_sha256[:16] in told and str(found["lm_head_sha256"])[:16] in told
    capfd.readouterr()
    open_head(str(folder)).for_target(other)
    assert told in capfd.readouterr().err
    open_head(str(folder)).for_target(target)
    assert capfd.readouterr().err == ""
    opened = open_head(str(exported(target, head, "vllm", tmp_path)), facts(target), announce=quiet)
    assert opened.config.lm_head_sha256 == config.lm_head_sha256 and opened.config.trained_length == 99


def test_digests_do_not_depend_on_the_precision(tmp_path: Path) -> None:
    weight = torch.randn(70_000, 3).bfloat16()
    assert weight_digest(weight) == weight_digest(weight.float())
    assert weight_digest(weight) != weight_digest(weight.view(-1, 1)) and weight_digest(weight.to(torch.int8)) is None
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    before = head_digest(tmp_path)
    save_file({"x": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert head_digest(tmp_path) != before

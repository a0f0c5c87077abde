"""Trained, exported, opened again, decoded: the same tokens and the same acceptance; and the doctor's opinion."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.base import DraftHead, LossSpec, TreePolicy
from heads.checkpoint import save_head
from heads.formats.doctor import examine, write_mended
from heads.formats.files import read_folder
from heads.formats.opening import open_head
from heads.target import TargetAdapter
from infer import generate
from infer.doctor import accept_length, verdict
from infer.engine import decode_speculative
from infer.stopping import StopRule
from scripts import doctor, export
from tests.layouts import a_head, even_target, exported, facts, fields_of, tensors_of
from tests.tiny import library_greedy, prompt_ids, tiny_head, tiny_model, tiny_tokenizer
from train.batching import make_batch
from train.conversations import TokenRow

PROMPT = prompt_ids(8)
LAYOUTS_OF = {
    "eagle": ["vllm", "sglang", "eagle"],
    "eagle3": ["vllm", "sglang", "eagle", "speculators", "trtllm"],
    "medusa": ["vllm", "medusa", "trtllm"],
    "hydra": ["hydra"],
}


@pytest.fixture(scope="module")
def target() -> TargetAdapter:
    return even_target()


def trained(target: TargetAdapter, kind: str, steps: int = 25) -> DraftHead:
    """On the target's answer to PROMPT, which it then drafts in good part."""
    options: dict[str, Any] = {"heads": 3, "projection": "own"} if kind in ("medusa", "hydra") else {}
    head = tiny_head(target, kind=kind, **options)
    head.init_from_target()
    ids = PROMPT + library_greedy(target.model, PROMPT, 24)
    row = TokenRow("r", tuple(ids), ((len(PROMPT), len(ids)),), "t")
    target.tap(head.needs.taps)
    columns = target.features(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool), head.needs.taps).clone()
    batch = make_batch([row], [columns[0]], 3, head.needs)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        out = head(batch, LossSpec(1.0 if kind == "eagle" else 0.0, 1.0, 0.8))
        (out.loss_sum / out.weight_sum).backward()
        optimizer.step()
    return head.eval()


@pytest.mark.parametrize("kind", list(LAYOUTS_OF))
def test_round_trip_decodes_alike(target: TargetAdapter, tmp_path: Path, kind: str) -> None:
    head = trained(target, kind)
    policy, stop = TreePolicy(3, 3, 10), StopRule(frozenset(), 25)
    expected, stats = decode_speculative(target, head, PROMPT, policy, stop)
    assert stats.tau is not None and stats.tau > 1.3  # something was learnt
    for to in LAYOUTS_OF[kind]:
        opened = open_head(str(exported(target, head, to, tmp_path)), facts(target), announce=lambda _: None)
        ids, again = decode_speculative(target, opened.for_target(target), PROMPT, policy, stop)
        assert ids == expected and again.accepted_per_round == stats.accepted_per_round, to


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with its tokenizer, and an EAGLE head for it, both on disk."""
    folder = tmp_path_factory.mktemp("place")
    tiny_model("llama").save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    target = TargetAdapter(tiny_model("llama"), name=str(folder / "target"))
    save_head(tiny_head(target), folder / "head")
    return folder


def test_commands(place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """export.py writes what generate.py decodes with, as with the head itself."""
    out = tmp_path / "served"
    assert export.main(["--head", str(place / "head"), "--to", "sglang", "--out", str(out)]) == 0
    assert "checked" in capfd.readouterr().err
    told = []
    for head in (place / "head", out):
        code = generate.main(["--head", str(head), "--ids", "5,6,7", "--max-new-tokens", "12", "--colour", "never"])
        assert code == 0
        captured = capfd.readouterr()
        told.append(captured.out.rsplit("tokens ·", 1)[0])
        assert ("in the layout of SGLang" in captured.err) == (head == out)
    assert told[0] == told[1]
    again = ["--head", str(out), "--to", "vllm", "--out", str(tmp_path / "v")]  # from one layout to another
    assert export.main(again) == 0 and "fc.bias" not in tensors_of(tmp_path / "v")
    assert export.main([*again[:3], "trtllm", *again[4:]]) == 1
    assert "kind 'eagle'" in capfd.readouterr().err
    assert doctor.main([str(out)]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["engines"]["SGLang"] == "loads"


def test_an_adapter_goes_along_and_is_told(place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    head = open_head(str(place / "head")).build()
    head.config = replace(head.config, target_adapter="adapter", trained_with_target=True)

    def add(folder: Path) -> None:
        (folder / "adapter").mkdir()
        (folder / "adapter/adapter_config.json").write_text("{}")

    save_head(head, tmp_path / "joint", write=add)
    arguments = ["--head", str(tmp_path / "joint"), "--to", "vllm", "--out", str(tmp_path / "out")]
    assert export.main(arguments) == 0
    assert (tmp_path / "out/adapter/adapter_config.json").is_file()
    assert "trained together" in capfd.readouterr().err
    opened = open_head(str(tmp_path / "out"), announce=lambda _: None)
    assert opened.config.trained_with_target and opened.config.target_adapter == "adapter"


# ---- doctor ------------------------------------------------------------------------------------------------


def test_a_sound_head(target: TargetAdapter, tmp_path: Path) -> None:
    found = examine(str(exported(target, a_head(target, "eagle3", vocab=True), "vllm", tmp_path)), facts(target))
    assert found.wrong == []
    assert [name for name, why in found.engines.items() if not why] == [
        "vLLM",
        "SGLang",
        "the EAGLE repository",
        "TensorRT-LLM",
    ]
    assert "config is not of that library" in found.engines["speculators and vLLM"]
    native = examine(str(save_head(a_head(target, "medusa"), tmp_path / "native")), facts(target))
    assert native.layout == "native" and "--to vllm writes it" in native.engines["vLLM"]
    assert "no Medusa" in native.engines["SGLang"]


def _unsorted(c: dict[str, Any], t: dict[str, torch.Tensor]) -> None:
    ids = t["d2t"] + torch.arange(100)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    t["d2t"], t["lm_head.weight"] = ids[order] - torch.arange(100), t["lm_head.weight"][order]


Damage = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]
DAMAGE: list[tuple[Damage, str]] = [
    (lambda c, t: t.update(d2t=t["d2t"] + torch.arange(100)), "absolute target ids"),
    (_unsorted, "unsorted"),
    (lambda c, t: t.update(d2t=t["d2t"].int()), "torch.int32"),
    (lambda c, t: t["t2d"].logical_not_(), "t2d is another set of tokens"),
    (lambda c, t: t.update(stray=torch.ones(3)), "stray is there"),
    (lambda c, t: c.update(tie_word_embeddings=True), "tie_word_embeddings is True"),
    (lambda c, t: c.pop("draft_vocab_size"), "draft_vocab_size is missing"),
    (lambda c, t: c.update(max_position_embeddings=64), "max_position_embeddings is 64"),
    (lambda c, t: c.pop("rope_parameters"), "rope_parameters is missing"),
    (lambda c, t: t.update({"norm.weight": t["norm.weight"].bfloat16().float().half()}), "dtype is"),
    (lambda c, t: c.update(torch_dtype="float16", dtype="float16"), "expected torch.float16"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[row[1] for row in DAMAGE])
def test_the_doctor_says_what_is_wrong_and_mends_it(
    target: TargetAdapter, tmp_path: Path, damage: Damage, words: str
) -> None:
    out = exported(target, a_head(target, "eagle3", vocab=True), "vllm", tmp_path)
    good, fields, tensors = tensors_of(out), fields_of(out), load_file(out / "model.safetensors")
    damage(fields, tensors)
    (out / "config.json").write_text(json.dumps(fields))
    save_file(tensors, out / "model.safetensors")
    found = examine(str(out), facts(target))
    assert words in "; ".join(str(problem) for problem, _ in found.wrong)
    write_mended(found, facts(target), tmp_path / "mended")
    mended = read_folder(tmp_path / "mended")
    assert mended.tensors.keys() == good.keys() and examine(str(tmp_path / "mended"), facts(target)).wrong == []
    assert all(torch.allclose(value.float(), mended.tensors[name].float(), atol=1e-2) for name, value in good.items())
    with pytest.raises(ValueError, match="is there already"):
        write_mended(found, facts(target), tmp_path / "mended")


def test_the_doctor_fills_in_a_missing_lm_head(target: TargetAdapter, tmp_path: Path) -> None:
    out = exported(target, a_head(target, "eagle3", projection="shared", vocab=True), "vllm", tmp_path)
    tensors = tensors_of(out)
    save_file({n: v for n, v in tensors.items() if n != "lm_head.weight"}, out / "model.safetensors")
    alone = examine(str(out))
    assert next(problem.where for problem, mendable in alone.wrong if not mendable) == "lm_head.weight"
    assert any("give --target" in note for note in alone.notes)  # its target is in memory only
    write_mended(examine(str(out), facts(target)), facts(target), tmp_path / "mended")
    assert torch.equal(tensors_of(tmp_path / "mended")["lm_head.weight"], tensors["lm_head.weight"])


def test_the_doctor_on_layer_ids_and_biases(target: TargetAdapter, tmp_path: Path) -> None:
    """Ids of outputs alone: right for SGLang, off by one in vLLM, which reads them as hidden states."""
    out = exported(target, a_head(target, "eagle3", taps=(0, 3, 5)), "sglang", tmp_path)
    fields = fields_of(out)
    del fields["eagle_aux_hidden_state_layer_ids"]
    (out / "config.json").write_text(json.dumps(fields))
    found = examine(str(out), facts(target))
    assert found.engines["SGLang"] == "" and "read as hidden states [0, 3, 5]" in found.engines["vLLM"]
    biased = exported(target, a_head(target, "eagle"), "sglang", tmp_path)
    engines = examine(str(biased), facts(target)).engines
    assert engines["SGLang"] == "" and "fc.bias is there" in engines["vLLM"]


def test_off_by_one_layers_show_in_a_decoding_round(target: TargetAdapter) -> None:
    head = trained(target, "eagle3", 40)
    own = accept_length(target, head, [PROMPT], 25, 3)
    other = type(head)(replace(head.config, taps=tuple(k + 1 for k in head.config.taps or ())))
    other.load_state_dict(head.state_dict())
    other.eval().bind(target)
    target.tap(other.needs.taps)
    off = accept_length(target, other, [PROMPT], 25, 3)
    assert own > 1.15 * off
    lines, good = verdict({"as it is": off, "layers [1, 3, 4]": own})
    assert not good and "off by one" in lines[-1]
    assert verdict({"as it is": 1.05})[1] is False and verdict({"as it is": 1.6, "layers [0]": 1.5})[1] is True

"""Heads side by side: figures against decoding each one alone, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heads.checkpoint import save_head
from heads.static import StaticTree
from infer.engine import DecodeOptions, RowRequest, decode
from infer.prompts import encode_prompt, read_prompts
from infer.stopping import StopRule
from infer.trees import TREE_NAME, policy_of, write_tree
from scripts.compare_heads import main
from tests.tiny import tiny_head, tiny_model, tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, two heads for it (one with a tree of its own), and three prompts."""
    folder = tmp_path_factory.mktemp("compare")
    tiny_model("llama").save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    target = tiny_target("llama")
    for kind in ("eagle", "medusa"):
        head = tiny_head(target, kind=kind)
        head.config = replace(head.config, target=str(folder / "target"))
        record = {"provenance.json": json.dumps({"seconds": 90.0})} if kind == "medusa" else {}
        save_head(head, folder / kind, record)
    write_tree(folder / "medusa" / TREE_NAME, StaticTree(((0,), (0, 0), (1,))), {})
    rows = [{"prompt": text} for text in ("abc", "what is it", "xyz")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(place: Path, *more: str) -> int:
    given = ["--head", str(place / "eagle"), "--with", str(place / "medusa"), "--prompts", str(place / "prompts.jsonl")]
    return main([*given, "--device", "cpu", "--tokens", "12", *more])


def test_rows_are_what_each_head_does_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(place) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    found = json.loads(lines[-1])
    assert [row["kind"] for row in found["rows"]] == [None, "eagle", "medusa"]
    assert [row["training_minutes"] for row in found["rows"]] == [None, None, 1.5]
    assert found["rows"][2]["tree"] == "static, depth 2, 4 nodes" and found["prompts"] == 3
    target, tokenizer = tiny_target("llama"), tiny_tokenizer()
    prompts = [encode_prompt(tokenizer, p, False, {}) for p in read_prompts(str(place / "prompts.jsonl"), "--prompts")]
    for row, kind in zip(found["rows"], (None, "eagle", "medusa"), strict=True):
        head: Any = None if kind is None else tiny_head(target, kind=kind)
        options = DecodeOptions() if head is None else DecodeOptions(policy_of(None, head, place / str(kind), "top_k"))
        stop = StopRule(target.eos_ids, 12)
        stats = [decode(target, head, [RowRequest(ids, stop)], options)[0].stats for ids in prompts]
        assert row["passes"] == sum(one.target_passes for one in stats)
        assert row["tokens"] == sum(one.new_tokens for one in stats)
        assert row["accept_length"] == pytest.approx((row["tokens"] - 3) / row["passes"])
        assert row["parameters"] == (0 if head is None else sum(p.numel() for p in head.parameters()))
    assert "plain decoding" in lines[1] and "1.00x" in lines[1]


def test_what_does_not_fit_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(place, "--tree", str(place / "medusa" / TREE_NAME)) == 1
    assert "--tree is given 1 times for 2 heads" in capsys.readouterr().err
    other = tiny_head(tiny_target("llama"))
    save_head(other, place / "foreign")
    assert run(place, "--with", str(place / "foreign")) == 1
    assert "its target is 'llama'" in capsys.readouterr().err

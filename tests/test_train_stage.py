"""The data stage on a tiny tokenizer: what it writes, counts and refuses, and its memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.apart import needs_proc, run_apart
from tests.tiny import tiny_tokenizer
from train import stage
from train.config import DataConfig, RunConfig, SourceConfig, TargetConfig, TrainConfig
from train.conversations import Conversation, TokenRow
from train.stage import _prompt_only, prepare_rows, stage_key


def quiet(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def pair(question: str, answer: str = "an answer") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(target: str, work_dir: Path, **data: Any) -> RunConfig:
    return RunConfig(
        target=TargetConfig(path=target),
        data=DataConfig(**{"work_dir": str(work_dir), "held_out": 0.3, **data}),
        train=TrainConfig(max_steps=1),
    )


def ids(rows: Any) -> set[str]:
    return {row.id for row in rows}


def test_rows_and_their_record(target: str, tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", [pair(f"question {i}") for i in range(20)] + [{"x": 1}, pair("q", "")])
    more = [{"prompt": f"p{i}", "completion": "yes"} for i in range(20)] + [{"prompt": "only"}, pair("question 3")]
    two = lines(tmp_path / "two.jsonl", more)
    tests = lines(tmp_path / "tests.jsonl", [{"turns": ["Question 4?", "x"]}])
    data: dict[str, Any] = {"sources": (SourceConfig(one), SourceConfig(two)), "exclude": (tests,)}
    said: list[str] = []
    rows = prepare_rows(config(target, tmp_path / "d", **data), "cpu", said.append)
    record = json.loads((tmp_path / "d/stage.json").read_text())
    dropped = {
        "no known layout": 1,
        "empty content": 1,
        "no supervised token": 1,
        "duplicate": 1,
        "overlaps data.exclude: the same first turn": 1,
    }
    assert record["rows_in"] == 44 and record["dropped"] == dropped
    assert len(rows.train) + len(rows.held_out) == 39 == record["train_rows"] + record["held_out_rows"]
    assert [source["layouts"] for source in record["sources"]] == [
        {"messages": 20},
        {"prompt_completion": 20, "prompts": 1, "messages": 1},
    ]
    assert sum(source["rows_out"] for source in record["sources"]) == 40
    assert any("39 of 44 rows kept, 1 dropped" in text for text in said)
    assert record["supervised_tokens"] == sum(row.supervised for row in rows.train)
    assert {path.name for path in (tmp_path / "d").iterdir()} == {
        "rows_train.jsonl", "rows_held_out.jsonl", "held_out_prompts.jsonl", "stage.json",
    }  # fmt: skip
    again = prepare_rows(config(target, tmp_path / "d", **data), "cpu", quiet)
    assert [list(again.train), list(again.held_out), again.record] == [list(rows.train), list(rows.held_out), record]
    texts = {tiny_tokenizer().decode(row.input_ids) for row in (*rows.train, *rows.held_out)}
    assert {
        "<|user|>question 3<|end|><|assistant|>an answer<|end|>",
        "<|user|>p0<|end|><|assistant|>yes<|end|>",
    } <= texts


@pytest.mark.parametrize(
    "change",
    [
        {"exclude": ()},
        {"duplicates": "keep"},
        {"layout": "messages"},
        {"split": "test"},
        {"max_rows": 5},
        {"max_length": 200},
    ],
)
def test_rows_of_other_input_are_refused(target: str, tmp_path: Path, change: dict[str, Any]) -> None:
    data: dict[str, Any] = {
        "path": lines(tmp_path / "one.jsonl", [pair(f"question {i}") for i in range(9)]),
        "exclude": (lines(tmp_path / "tests.jsonl", ["x"]),),
    }
    prepare_rows(config(target, tmp_path / "d", **data), "cpu", quiet)
    with pytest.raises(ValueError, match=r"data\.work_dir: .* made from other settings \(data\."):
        prepare_rows(config(target, tmp_path / "d", **{**data, **change}), "cpu", quiet)
    key = stage_key(config(target, tmp_path / "d", **data))
    lines(tmp_path / "tests.jsonl", ["y"])
    assert stage_key(config(target, tmp_path / "d", **data)) != key
    lines(tmp_path / "tests.jsonl", ["x"])
    lines(tmp_path / "one.jsonl", [pair("other")])
    assert stage_key(config(target, tmp_path / "d", **data))["data.sources"] != key["data.sources"]


def test_rows_of_another_template_are_refused(target: str, tmp_path: Path) -> None:
    """Edited in the target's own folder, where no name changes."""
    changed = tmp_path / "target"
    shutil.copytree(target, changed)
    settings = config(
        str(changed), tmp_path / "d", path=lines(tmp_path / "one.jsonl", [pair(f"q {i}") for i in range(9)])
    )
    prepare_rows(settings, "cpu", quiet)
    tokenizer = AutoTokenizer.from_pretrained(changed)
    tokenizer.chat_template = "!" + tokenizer.chat_template
    tokenizer.save_pretrained(changed)
    with pytest.raises(ValueError, match=r"data\.work_dir: .* made from other settings \(target\.template_sha256"):
        prepare_rows(settings, "cpu", quiet)


def test_added_rows_move_no_other(target: str, tmp_path: Path) -> None:
    rows = [{**pair(f"question {i}"), "id": str(i)} for i in range(60)]
    few = prepare_rows(config(target, tmp_path / "a", path=lines(tmp_path / "a.jsonl", rows[20:40])), "cpu", quiet)
    all_ = prepare_rows(config(target, tmp_path / "b", path=lines(tmp_path / "b.jsonl", rows)), "cpu", quiet)
    known = ids(few.train) | ids(few.held_out)
    assert len(known) == 20 and ids(few.train) == ids(all_.train) & known
    assert ids(few.held_out) == ids(all_.held_out) & known != set()


def test_neither_side_stays_empty(target: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [pair("one"), pair("two")])
    rows = prepare_rows(config(target, tmp_path / "d", path=path, held_out=1e-6), "cpu", quiet)
    assert len(rows.train) == len(rows.held_out) == 1
    with pytest.raises(ValueError, match=r"gave 1 usable rows \(1 of 1 rows kept\); expected at least 2"):
        prepare_rows(config(target, tmp_path / "e", path=lines(tmp_path / "b.jsonl", [pair("one")])), "cpu", quiet)
    prompts = lines(tmp_path / "p.jsonl", ["one", "two"])
    with pytest.raises(ValueError, match=r"data\.answers: .*prompts only; set data\.answers: regenerate"):
        prepare_rows(config(target, tmp_path / "f", path=prompts), "cpu", quiet)
    assert list((tmp_path / "f").iterdir()) == []


def test_a_stopped_stage_leaves_no_rows(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lines(tmp_path / "a.jsonl", [pair(f"question {i}") for i in range(9)])

    def stopping(*args: Any, **options: Any) -> Iterator[TokenRow]:
        yield TokenRow("a", (1, 2, 3), ((1, 3),), "s")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage, "encode_each", stopping)
        with pytest.raises(KeyboardInterrupt):
            prepare_rows(config(target, tmp_path / "d", path=path), "cpu", quiet)
    assert list((tmp_path / "d").iterdir()) == []
    assert len(prepare_rows(config(target, tmp_path / "d", path=path), "cpu", quiet).train) > 0


def test_prompts_of_conversations() -> None:
    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    said = {"role": "assistant", "content": "x"}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    system, result = {"role": "system", "content": "s"}, {"role": "tool", "content": "1"}
    tools = ({"name": "f"},)
    whole = Conversation("i", "s", (system, user("a"), said, user("b"), called, result, said, user("c")), tools)
    assert _prompt_only(whole) == Conversation("i", "s", (system, user("a"), user("b")), tools)
    assert _prompt_only(Conversation("i", "s", (user("a"), said))).messages == (user("a"),)


PROGRAM = """
import sys
from tests.apart import peak
from tests.test_train_stage import config
from train.stage import prepare_rows

target, out, few, many = sys.argv[1:]
prepare_rows(config(target, out + "/few", path=few), "cpu", lambda text: None)
before = peak()
rows = prepare_rows(config(target, out + "/many", path=many), "cpu", lambda text: None)
print(len(rows.train) + len(rows.held_out), rows.record["tokens"], round(before), round(peak() - before))
"""


@needs_proc
@pytest.mark.slow
def test_the_stage_needs_little_memory_for_many_rows(target: str, tmp_path: Path) -> None:
    """Rows through parsing, template, tokenizer and split; then they stay, with 4 bytes a token.

    DRAFTSMITH_ROWS=50000 takes a minute or more.
    """
    number = int(os.environ.get("DRAFTSMITH_ROWS", "10000"))
    few = lines(tmp_path / "few.jsonl", [pair(f"question {i}", f"{i} " * 60) for i in range(500)])
    many = lines(tmp_path / "many.jsonl", [pair(f"question {i}", f"{i} " * 60) for i in range(number)])
    count, tokens, before, growth = map(int, run_apart(PROGRAM, target, str(tmp_path), few, many).split())
    print(f"peak {before + growth} MiB, {growth} MiB more for {number} rows ({tokens} tokens) than for 500")
    assert count == number and tokens > 200 * number
    assert growth < 25 + 0.0035 * number  # as Python objects the tokens alone are over 0.008 MiB a row

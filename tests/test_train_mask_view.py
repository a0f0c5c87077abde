"""Rows shown with their mask, and the data stage's settings about masks, on a tiny target with real files."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.show_mask import main
from tests.tiny import tiny_tokenizer
from tests.tiny_run import make_place, run_config
from train import stage
from train.chat_mask import describe_row
from train.config import RunConfig
from train.conversations import DropCounts, TokenRow
from train.mask_view import Shown, as_html, as_text, shown_rows
from train.regenerate import load_tokenizer
from train.stage import prepare_rows, read_stage
from train.typed_yaml import from_dict

TURNS = ["hi\x1b[2J", "yo <&> é", "and?", "no\n\nend"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))


def write_talks(path: Path, *talks: list[str]) -> Path:
    roles = ("user", "assistant")
    rows = [{"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(t)]} for t in talks]
    path.write_text("".join(json.dumps({"id": f"r{i}", **row}) + "\n" for i, row in enumerate(rows)))
    return path


def config(place: Path, out: Path, **data: Any) -> RunConfig:
    settings = run_config(place, out)
    settings["data"] |= data
    return from_dict(RunConfig, settings)


def test_text_plain_and_coloured() -> None:
    rows = [Shown("r: 2 of 4", (("<|user|>a\n\x1b[2J<|end|>", False), (" b\n\nc<|end|>", True), ("\n", False)))]
    assert as_text(rows, colour=False) == "--- r: 2 of 4\n<|user|>a\n\\x1b[2J<|end|>⟦ b\n\nc<|end|>⟧\n\n\n"
    coloured = as_text(rows, colour=True)
    green = "".join(re.findall("\x1b\\[30;42m(.*?)\x1b\\[0m", coloured))
    assert green == " b↵↵c<|end|>"
    bare = re.sub("\x1b\\[[0-9;]*m", "", coloured)
    assert bare == as_text(rows, colour=False).replace("⟦ b\n\nc<|end|>⟧", " b↵\n↵\nc<|end|>")
    assert all(line.count("\x1b[30") == line.count("\x1b[0m") for line in coloured.split("\n"))


def test_html_holds_the_row_and_marks_what_is_supervised() -> None:
    runs = (("<|user|>a & \x00<|end|>", False), ("<b>\n", True), ("tail", False))
    page = as_html("2 < 3", [Shown("r & s", runs)])
    assert "<p>2 &lt; 3. " in page and "<h2>r &amp; s</h2>" in page
    body = re.search(r"<pre>(.*?)</pre>", page, re.S)
    assert body is not None
    assert re.findall(r"<mark>(.*?)</mark>", body[1], re.S) == ["&lt;b&gt;↵\n"]
    assert html.unescape(re.sub(r"</?mark>", "", body[1])) == "<|user|>a & \\x00<|end|><b>↵\ntail"


def test_rows_of_a_file_and_those_it_does_not_give(place: Path, tmp_path: Path) -> None:
    file = write_talks(tmp_path / "talks.jsonl", TURNS, ["a question"], ["x" * 300, "too long"], ["one", "two"])
    settings = config(place, tmp_path)
    where, rows = shown_rows(settings, 3, str(file))
    assert where == f"the first 3 conversations of {file}"
    assert rows[0].runs == (
        ("<|user|>hi\x1b[2J<|end|><|assistant|>", False),
        ("yo <&> é<|end|>", True),
        ("<|user|>and?<|end|><|assistant|>", False),
        ("no\n\nend<|end|>", True),
    )
    assert [row.title for row in rows[1:]] == [
        "r1: gives no row: no supervised token",
        "r2: gives no row: prompt longer than data.max_length",
    ]
    last = shown_rows(config(place, tmp_path, supervise="last"), 1, str(file))[1][0]
    assert [text for text, supervised in last.runs if supervised] == ["no\n\nend<|end|>"]


def test_prepared_rows_are_shown_as_they_are_trained_on(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(place, tmp_path)
    before, _ = shown_rows(settings, 2)
    assert before == f"the first 2 conversations of {settings.data.path}"
    done = prepare_rows(settings, "cpu", log=lambda line: None)
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(run_config(place, tmp_path)))
    page = tmp_path / "page.html"
    capsys.readouterr()
    assert main(["--config", str(path), "--rows", "2", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"2 of {len(done.train)} training rows in {settings.data.work_dir}\n")
    tokenizer = load_tokenizer(settings.target)
    for row in done.train[:2]:
        assert f"--- {row.id}: {row.supervised} of {len(row.input_ids)} tokens supervised" in out
        assert describe_row(tokenizer, row) in out
        assert html.escape(str(tokenizer.decode(list(row.input_ids[slice(*row.spans[0])])))) in page.read_text()
    assert "\x1b" not in out  # no terminal
    assert main(["--config", str(path), "--html", str(tmp_path / "none/page.html")]) == 1
    assert "--html: " in capsys.readouterr().err


def test_nothing_to_show(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"holds no prepared rows; run scripts/make_conversations\.py"):
        shown_rows(config(place, tmp_path, answers="regenerate"), 1)
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps(run_config(place, tmp_path)))
    with pytest.raises(SystemExit, match="2"):
        main(["--config", str(path), "--rows", "0"])
    assert "--rows is 0, expected 1 or more" in capsys.readouterr().err
    assert main(["--config", str(path), "--data", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl' cannot be read" in capsys.readouterr().err


# --- the stage ----------------------------------------------------------------------------------------------


def test_settings_about_masks_are_in_the_stages_key(place: Path, tmp_path: Path) -> None:
    prepare_rows(config(place, tmp_path), "cpu", log=lambda line: None)
    with pytest.raises(ValueError, match=r"data\.supervise: there 'all', asked 'last'"):
        read_stage(config(place, tmp_path, supervise="last"))
    with pytest.raises(ValueError, match=r"data\.template_kwargs: there {}, asked {'enable_thinking': False}"):
        read_stage(config(place, tmp_path, template_kwargs={"enable_thinking": False}))


def test_cut_answers_are_counted(place: Path, tmp_path: Path) -> None:
    file = write_talks(tmp_path / "talks.jsonl", *([f"q{i}", "a" * 30, "more", "b" * i] for i in range(1, 60)))
    lines: list[str] = []
    settings = config(place, tmp_path, path=str(file), max_length=75, prompt_tokens=20)
    done = prepare_rows(settings, "cpu", log=lines.append)
    rows = [*done.train, *done.held_out]
    short = [row for row in rows if len(row.spans) == 1]
    assert 0 < len(short) < len(rows) and all(row.truncated == (row in short) for row in rows)
    assert all(row.spans[-1][1] == len(row.input_ids) for row in rows)
    assert done.record["truncated_rows"] == len(short)
    assert any(f"; {len(short)} lost answers to their length" in line for line in lines)


def test_the_last_answer_of_regenerated_rows(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [TokenRow(f"r{i}", (i, *range(9)), ((1, 4), (6, 9)), "t") for i in range(5)]
    monkeypatch.setattr(stage, "make_rows", lambda *args, **kwargs: (made, DropCounts(24, 5, {"x": 19})))
    done = prepare_rows(config(place, tmp_path, answers="regenerate", supervise="last"), "cpu", log=lambda line: None)
    rows = [*done.train, *done.held_out]
    assert len(rows) == 5 and all(row.spans == ((6, 9),) for row in rows)


def test_too_little_supervised_after_filtering_stops_the_stage(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever made the rows."""
    made = [TokenRow(f"r{i}", (i, *range(999)), ((500, 502),), "t") for i in range(3)]
    monkeypatch.setattr(stage, "make_rows", lambda *args, **kwargs: (made, DropCounts(24, 3, {"x": 21})))
    with pytest.raises(ValueError, match=r"6 of 3000 tokens are supervised .*expected 1 % or more"):
        prepare_rows(config(place, tmp_path, answers="regenerate"), "cpu", log=lambda line: None)
    made[:] = [TokenRow("r", (1, 2, 3), ((2, 3),), "t")]
    monkeypatch.setattr(stage, "make_rows", lambda *args, **kwargs: (made, DropCounts(24, 1, {"x": 23})))
    with pytest.raises(ValueError, match=r"nothing to train on in .*1 dropped \(answers of one token\)"):
        prepare_rows(config(place, tmp_path, answers="regenerate"), "cpu", log=lambda line: None)
    assert not (tmp_path / "data/stage.json").exists()


def test_template_arguments_reach_rows_and_held_out_prompts(place: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    for old, new in (
        ("<|{{ m['role'] }}|>", "<|{{ m['role'] }}|>{{ '#' if m['role'] == 'assistant' and not thinking }}"),
        ("%}<|assistant|>{%", "%}<|assistant|>{{ '#' if not thinking }}{%"),
    ):
        assert old in tokenizer.chat_template
        tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    tokenizer.save_pretrained(tmp_path / "target")
    raw = run_config(place, tmp_path)
    raw["target"]["path"] = str(tmp_path / "target")
    for thinking, supplied in ((True, ""), (False, "#")):
        raw["data"] |= {"work_dir": str(tmp_path / supplied / "rows"), "template_kwargs": {"thinking": thinking}}
        settings = from_dict(RunConfig, raw)
        done = prepare_rows(settings, "cpu", log=lambda line: None)
        for row in done.train:
            start, stop = row.spans[0]
            assert str(tokenizer.decode(list(row.input_ids[:start]))).endswith(f"<|assistant|>{supplied}")
            assert "#" not in str(tokenizer.decode(list(row.input_ids[start:stop])))
        prompts = (Path(settings.data.work_dir) / "held_out_prompts.jsonl").read_text().splitlines()
        assert len(prompts) == len(done.held_out) > 0

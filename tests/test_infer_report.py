"""The report's figures, its text and its file."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from infer.metrics import DecodeStats
from infer.report import PairedRun, build_report, first_divergence, format_report, pair, write_json


def plain(tokens: int, seconds: float) -> DecodeStats:
    return DecodeStats(4, tokens, tokens - 1, seconds={"prefill": 1.0, "target": seconds - 1.0})


def spec(accepted: list[int], seconds: float) -> DecodeStats:
    split = {"prefill": 1.0, "draft": 0.25 * (seconds - 1), "target": 0.5 * (seconds - 1)}
    split["rest"] = 0.25 * (seconds - 1)
    tokens = 1 + len(accepted) + sum(accepted)
    return DecodeStats(4, tokens, len(accepted), accepted, [3] * len(accepted), split)


def runs() -> list[PairedRun]:
    return [
        PairedRun("a", "math", plain(9, 9.0), spec([3, 3], 5.0), None),
        PairedRun("b", "chat", plain(9, 9.0), spec([1] * 4, 9.0), 3),
        PairedRun("c", "math", plain(9, 9.0), spec([3, 3], 5.0), None),
    ]


def test_figures() -> None:
    report = build_report(runs(), {"hardware": "two cores"})
    overall, math = report["overall"], report["categories"]["math"]
    assert report["draftsmith_report"] == 1 and report["meta"] == {"hardware": "two cores"}
    assert overall["prompts"] == 3 and math["prompts"] == 2
    assert overall["tau"] == pytest.approx(24 / 8) and math["tau"] == 4.0
    assert overall["tokens_per_second_plain"] == pytest.approx(27 / 27)
    assert overall["speedup"] == pytest.approx(27 / 19) and math["speedup"] == pytest.approx(1.8)
    assert math["speedup_decode"] == pytest.approx(2.0)
    assert overall["passes_saved"] == pytest.approx(1 - 8 / 24)
    assert overall["identical_share"] == pytest.approx(2 / 3) and math["identical_share"] == 1.0
    assert list(report["categories"]) == ["math", "chat"]
    assert report["acceptance"]["unconditional_per_position"] == [1.0, 0.5, 0.5]
    assert report["ms_per_round"]["spec"]["target"] == pytest.approx(1000.0)
    assert [row["first_divergence"] for row in report["prompts"]] == [None, 3, None]
    json.dumps(report, allow_nan=False)
    with pytest.raises(ValueError, match="got 0 prompts"):
        build_report([])


def test_text() -> None:
    text = format_report(build_report(runs()))
    lines = text.splitlines()
    assert re.split(r"\s{2,}", lines[0])[:3] == ["category", "prompts", "tau"]
    cells = re.split(r"\s{2,}", next(line for line in lines if line.startswith("overall")))
    assert cells == ["overall", "3", "3.00", "1.0", "1.4", "1.42x", "1.50x", "67 %", "66.7 %"]
    assert len({len(line) for line in lines[:4]}) == 1  # aligned
    assert "95 % interval" in text and "ms per round" in text
    assert all(len(line) <= 110 for line in lines)


def test_text_where_nothing_could_be_measured() -> None:
    stats = DecodeStats(4, 1, 0, seconds={"prefill": 1.0})
    text = format_report(build_report([PairedRun("a", "chat", stats, stats, None)]))
    assert "no drafts were offered" in text and " - " in text


def test_divergence_and_the_one_counter() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 9, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == 2 and first_divergence([], [1]) == 0
    run = pair("a", "chat", ([1, 2, 3], plain(3, 2.0)), ([1, 2, 4], spec([1], 2.0)))
    assert run.first_divergence == 2
    with pytest.raises(AssertionError, match="plain run counts 3 tokens, emitted 2"):
        pair("a", "chat", ([1, 2], plain(3, 2.0)), ([1, 2, 4], spec([1], 2.0)))


def test_file_round_trip_and_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.json"
    report = build_report(runs())
    write_json(path, report)
    assert json.loads(path.read_text()) == report
    write_json(path, build_report(runs()[:1]))  # our own file: replaced
    assert json.loads(path.read_text())["overall"]["prompts"] == 1
    assert [p.name for p in path.parent.iterdir()] == ["report.json"]  # nothing temporary is left


@pytest.mark.parametrize("content", [b"", b"notes", b"[1]", b'{"a": 1}', b"\xff\xfe"])
def test_foreign_files_are_not_overwritten(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a Draftsmith report"):
        write_json(path, build_report(runs()))
    assert path.read_bytes() == content
    with pytest.raises(ValueError, match="not a Draftsmith report"):
        write_json(tmp_path, build_report(runs()))


def test_a_failed_write_leaves_the_old_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, build_report(runs()))
    before = path.read_text()
    broken: dict[str, Any] = {**build_report(runs()), "meta": {"x": float("nan")}}
    with pytest.raises(ValueError):
        write_json(path, broken)
    assert path.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["report.json"]
    with pytest.raises(ValueError, match="without the key"):
        write_json(path, {"overall": 1})

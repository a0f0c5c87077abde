"""The report's figures, its text and its file."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from infer.metrics import DecodeStats
from infer.report import (
    Parting,
    PromptRun,
    Results,
    build_report,
    first_divergence,
    format_report,
    open_results,
    write_json,
)


def plain(tokens: int, seconds: float, prefill: float = 1.0) -> DecodeStats:
    return DecodeStats(4, tokens, tokens - 1, seconds={"prefill": prefill, "target": seconds - prefill})


def spec(accepted: list[int], seconds: float) -> DecodeStats:
    split = {"prefill": 1.0, "draft": 0.25 * (seconds - 1), "target": 0.5 * (seconds - 1)}
    split["verify"], split["rest"] = 0.0625 * (seconds - 1), 0.1875 * (seconds - 1)
    tokens = 1 + len(accepted) + sum(accepted)
    ranks = [index % 2 for index in range(sum(accepted))]
    return DecodeStats(4, tokens, len(accepted), accepted, [3] * len(accepted), ranks, split)


def run(
    name: str, category: str, accepted: list[int], seconds: float, where: Parting | None = None, **more: Any
) -> PromptRun:
    """Plain and library take 9 tokens each; the library 12 s of them (2 s to the first), plain 9 s (1 s)."""
    sides = {"library": plain(9, 12.0, 2.0), "plain": plain(9, 9.0), "spec": spec(accepted, seconds)}
    return PromptRun(name, category, sides, **{"batch": ord(name), "parted": {"spec": where, "library": None}, **more})


def runs() -> list[PromptRun]:
    return [
        run("a", "math", [3, 3], 5.0),
        run("b", "chat", [1] * 4, 9.0, Parting(3, 0.25)),
        run("c", "math", [3, 3], 5.0),
    ]


def test_figures() -> None:
    report = build_report(runs(), {"hardware": "two cores"})
    overall, math = report["overall"], report["categories"]["math"]
    assert report["draftsmith_report"] == 2 and report["meta"] == {"hardware": "two cores"}
    assert overall["prompts"] == 3 and math["prompts"] == 2
    assert overall["tau"] == pytest.approx(24 / 8) and math["tau"] == 4.0
    assert overall["tokens_per_second_plain"] == pytest.approx(27 / 27)
    assert overall["tokens_per_second_library"] == pytest.approx(27 / 36)
    assert overall["tokens_per_second_spec"] == pytest.approx(27 / 19)
    assert overall["tokens_per_second_decode_library"] == pytest.approx(24 / 30)
    assert overall["tokens_per_second_decode_plain"] == pytest.approx(24 / 24)
    assert overall["speedup_plain"] == pytest.approx(27 / 19) and overall["speedup_library"] == pytest.approx(36 / 19)
    assert overall["speedup_decode_library"] == pytest.approx(30 / 16)
    assert overall["passes_saved"] == pytest.approx(1 - 8 / 24)
    assert overall["identical_share"] == pytest.approx(2 / 3) and math["identical_share"] == 1.0
    assert overall["lossy"] is None
    assert list(report["categories"]) == ["math", "chat"]
    assert report["acceptance"]["unconditional_per_position"] == [1.0, 0.5, 0.5]
    assert report["acceptance"]["accepted_ranks"] == [8, 8]
    assert report["ms_per_round"]["spec"]["target"] == pytest.approx(1000.0)
    assert report["ms_per_round"]["spec"]["verify"] == pytest.approx(125.0)
    assert report["ms_prefill"] == {"library": 2000.0, "plain": 1000.0, "spec": 1000.0}
    assert [row["first_divergence"] for row in report["prompts"]] == [None, 3, None]
    assert report["prompts"][1]["parted"] == {"spec": {"at": 3, "gap": 0.25}, "library": None}
    json.dumps(report, allow_nan=False)
    with pytest.raises(ValueError, match="got 0 prompts"):
        build_report([])


def test_the_headline_is_against_the_faster_baseline() -> None:
    """Also where that is another one with and without the prefill."""
    overall = build_report(runs())["overall"]
    assert overall["fastest_baseline"] == overall["fastest_baseline_decode"] == "plain"
    assert overall["speedup"] == overall["speedup_plain"] < overall["speedup_library"]
    sides = {"library": plain(9, 8.0, 7.0), "plain": plain(9, 9.0), "compiled": plain(9, 7.0), "spec": spec([3, 3], 5)}
    overall = build_report([PromptRun("a", "math", sides, 0)])["overall"]
    assert (overall["fastest_baseline"], overall["speedup"]) == ("compiled", pytest.approx(7 / 5))
    assert (overall["fastest_baseline_decode"], overall["speedup_decode"]) == ("library", pytest.approx(1 / 4))
    assert overall["identical_share"] is None  # nothing was compared


def test_prompts_of_a_batch_share_its_clock() -> None:
    """Two rows of 9 tokens in one batch: 18 tokens in the longer one's seconds."""
    rows = [run("a", "math", [3, 3], 5.0, batch=0), run("b", "math", [3, 3], 3.0, batch=0)]
    overall = build_report(rows)["overall"]
    assert overall["tokens_per_second_spec"] == pytest.approx(18 / 5)
    assert overall["tokens_per_second_plain"] == pytest.approx(18 / 9)
    mixed = build_report([*rows, run("c", "chat", [3, 3], 5.0, batch=1), run("d", "math", [3, 3], 5.0, batch=1)])
    assert mixed["overall"]["tokens_per_second_spec"] == pytest.approx(36 / 10)
    for row in mixed["categories"].values():  # one batch holds both, so neither has a clock of its own
        assert row["tokens_per_second_spec"] is None and row["speedup"] is None and row["tau"] == 4.0
    assert " - " in format_report(mixed)


def test_text() -> None:
    text = format_report(build_report(runs(), {"dtype": "bfloat16", "tree": {"width": 3}}))
    lines = text.splitlines()
    assert re.split(r"\s{2,}", lines[0])[:3] == ["category", "prompts", "tau"]
    cells = re.split(r"\s{2,}", next(line for line in lines if line.startswith("overall")))
    assert cells == ["overall", "3", "3.00", "1.4", "1.42x", "1.50x", "67 %", "66.7 %"]
    assert len({len(line) for line in lines[:4]}) == 1  # aligned
    sides = [re.split(r"\s{2,}", line) for line in lines if re.match("(library|plain|spec) +27 ", line)]
    assert sides == [
        ["library", "27", "24", "0.8", "1.89x", "0.8", "1.88x"],
        ["plain", "27", "24", "1.0", "1.42x", "1.0", "1.50x"],
        ["spec", "27", "8", "1.4", "-", "1.5", "-"],
    ]
    assert "speed-up against the fastest baseline (plain): 1.42x; without the prefill (plain): 1.50x" in lines
    assert "accepted tokens by rank among their siblings: 1: 50.0 %, 2: 50.0 %" in lines
    assert "95 % interval" in text and "ms per round" in text
    assert "with the head: 1 of 3 prompts differ from plain decoding in bfloat16; top-2 gap" in text
    assert "library: every prompt's tokens are those of plain decoding (3 compared)" in lines
    assert 'tree: {"width": 3}' in text and "LOSSY" not in text
    assert all(len(line) <= 110 for line in lines)


def test_a_lossy_rule_is_told_with_every_result() -> None:
    report = build_report(runs(), {"lossy": "rule 'guess'"})
    lines = format_report(report).splitlines()
    assert lines[0] == "LOSSY: rule 'guess'" and lines.count("LOSSY: rule 'guess'") == 2
    assert report["overall"]["lossy"] == "rule 'guess'"


def test_text_where_nothing_could_be_measured() -> None:
    stats = DecodeStats(4, 1, 0, seconds={"prefill": 1.0})
    text = format_report(build_report([PromptRun("a", "chat", {"plain": stats, "spec": stats}, 0)]))
    assert "no drafts were offered" in text and " - " in text and "tokens were not compared" in text


def test_divergence() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 9, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == 2 and first_divergence([], [1]) == 0


def test_gaps_are_counted_against_twice_the_noise() -> None:
    """Noise 0.1 and 0.2: tolerance 0.4. Gaps 0.3 (within) and 0.5 (beyond)."""
    rows = [
        run("a", "x", [1], 2.0, noise=0.1, parted={"spec": Parting(2, 0.3), "control": None}),
        run("b", "x", [1], 2.0, noise=0.2, parted={"spec": Parting(5, 0.5), "control": Parting(4, 0.05)}),
        run("c", "x", [1], 2.0, parted={"spec": None}),
    ]
    found = build_report(rows, {"dtype": "bfloat16"})
    divergence = found["divergence"]
    assert divergence["noise"] == 0.2 and divergence["tolerance"] == 0.4 and divergence["control_prompts"] == 2
    assert (divergence["compared"], divergence["prompts"], divergence["unexplained"]) == (3, 2, 1)
    assert (divergence["gap_smallest"], divergence["gap_largest"]) == (0.3, 0.5)
    assert divergence["control"] == {
        "compared": 2,
        "prompts": 1,
        "gap_smallest": 0.05,
        "gap_largest": 0.05,
        "unexplained": 0,
    }
    text = " ".join(format_report(found).split())
    assert "0.3 .. 0.5; beyond the tolerance: 1" in text and "control (no drafts" in text
    assert "differ by up to 0.2 (2 prompts); tolerance for gaps: 0.4" in text
    without = build_report(runs())["divergence"]
    assert without["tolerance"] is None and without["unexplained"] is None and without["prompts"] == 1
    drawn = build_report([run("a", "x", [1], 2.0, noise=0.1, parted={"spec": Parting(2)})])["divergence"]
    assert drawn["unexplained"] is None and drawn["gap_largest"] is None  # no gap to judge by


def test_results_survive_a_kill(tmp_path: Path) -> None:
    """Batches come back as they went in, up to a line that was cut off; other settings start anew."""
    said: list[str] = []
    results = open_results(str(tmp_path / "deep" / "r.json"))
    assert isinstance(results, Results) and open_results(None) is None
    assert results.resume({"tree": 1}, said.append) == {} and not said
    rows = runs()
    results.append(1, rows[:2])
    results.append(0, rows[2:])
    with open(results.partial, "a") as file:
        file.write(results.partial.read_text().splitlines()[-1][:30])
    again = open_results(str(results.path))
    assert again is not None and again.resume({"tree": 1}, said.append) == {1: rows[:2], 0: rows[2:]}
    assert again.resume({"tree": 1}, said.append).keys() == {0, 1} and not said  # the cut-off line is gone
    assert again.resume({"tree": 2, "x": 3}, said.append) == {} and "other settings (tree, x)" in said[0]
    again.write(build_report(rows))
    assert [path.name for path in again.path.parent.iterdir()] == ["r.json"]


@pytest.mark.parametrize("content", ["{}", '{"draftsmith_partial": 1, "settings": {}}', "notes", "[1]"])
def test_foreign_and_old_partial_files_are_refused(tmp_path: Path, content: str) -> None:
    partial = tmp_path / "r.json.partial.jsonl"
    partial.write_text(content + "\n")
    with pytest.raises(ValueError, match="remove it"):
        open_results(str(tmp_path / "r.json"))
    assert partial.read_text() == content + "\n"


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

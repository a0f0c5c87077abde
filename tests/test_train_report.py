"""The report of a run: what the page and the charts say is what the files say."""

from __future__ import annotations

import base64
import json
import math
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from scripts.report import main
from train.report import log_fit, read_run, write_report

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "head:\n  kind: eagle\ntarget:\n  path: some/target\n"
MADE = {
    "command": "eagle.py --config configs/x.yaml",
    "commit": "abc123",
    "python": "3.11.7",
    "packages": {"torch": "2.13.0", "peft": None},
    "machine": {"processor": "x86_64", "threads": 2, "cuda": None},
    "step": 40,
    "supervised_tokens_seen": 4100,
}


def log(step: int, seconds: float, **more: Any) -> dict[str, Any]:
    line = {"loss": 9.0 - step / 10, "tokens_per_second": 200.0 + step, "supervised_per_second": 100.0}
    return {"step": step, "seconds": seconds, **line, "epochs": step / 20, **more}


def evaluation(step: int, seconds: float, length: float, **more: Any) -> dict[str, Any]:
    shares = {"eval/accept_length": length, "eval/accuracy": [length / 4, length / 8]}
    return {"step": step, "seconds": seconds, **shares, "eval/conditional": [0.5, 0.5], **more}


def write_run(
    folder: Path, lines: list[dict[str, Any]], config: str = CONFIG, made: dict[str, Any] | None = None, tail: str = ""
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    if made is not None:
        (folder / "best").mkdir(exist_ok=True)
        (folder / "best/provenance.json").write_text(json.dumps(made))
    return folder


def whole_run(evaluations: int = 4) -> list[dict[str, Any]]:
    """10 steps and 10 seconds between lines, 100 supervised tokens per second; the third evaluation is the best."""
    lines = []
    for i in range(1, evaluations + 1):
        lines += [log(10 * i, 10.0 * i), evaluation(10 * i, 10.0 * i, [1.5, 1.625, 1.875, 1.75][(i - 1) % 4])]
    return lines


class Page(HTMLParser):
    """Tables as lists of rows of cells, paragraphs, the preformatted text, pictures, and every tag."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.paragraphs: list[str] = []
        self.pre = self.text = ""
        self.sources: list[str] = []
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.text = ""
        self.sources += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.rows[-1].append(self.text)
        elif tag == "caption":
            self.rows = self.tables[self.text] = []
        elif tag == "p":
            self.paragraphs.append(self.text)
        elif tag == "pre":
            self.pre = self.text

    @property
    def summary(self) -> dict[str, str]:
        return {row[0]: row[1] for row in self.tables["Summary"]}

    @property
    def evaluations(self) -> list[list[str]]:
        return self.tables["Evaluations on held-out rows"]


def png_size(data: bytes) -> tuple[int, int]:
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


# --- the numbers --------------------------------------------------------------------------------------------


def test_summary(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", whole_run(), made=MADE)
    page = Page(write_report(run))
    assert page.summary == {
        "Head": "eagle",
        "Target": "some/target",
        "Steps": "40",
        "Minutes": "0.7",
        "Epochs": "2.0",
        "Supervised tokens seen": "4,000 (estimated: supervised tokens per second times seconds)",
        "Best simulated accept length": "1.875 at step 30",
        "Head in best/": "of step 40, after 4,100 supervised tokens",
        "Tokens per second, median": "225.0, supervised 100.0",
        "Machine": "processor x86_64, threads 2",
        "Versions": "torch 2.13.0",
        "Python": "3.11.7",
        "Commit": "abc123",
        "Command": "eagle.py --config configs/x.yaml",
    }
    assert page.pre == CONFIG


def test_table_of_evaluations(tmp_path: Path) -> None:
    page = Page(write_report(write_run(tmp_path / "run", whole_run())))
    head = ["Step", "Minutes", "Supervised tokens", "Accept length", "Accuracy at depth 1", "Accuracy at depth 2"]
    assert page.evaluations == [
        head,
        ["10", "0.2", "1,000", "1.500", "0.375", "0.188"],
        ["20", "0.3", "2,000", "1.625", "0.406", "0.203"],
        ["30", "0.5", "3,000", "1.875", "0.469", "0.234"],
        ["40", "0.7", "4,000", "1.750", "0.438", "0.219"],
    ]


def test_the_page_stands_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", whole_run(), made=MADE)
    page = Page(write_report(run))
    (source,) = page.sources  # the picture; no style sheet, no link
    kind, _, data = source.partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data) == (run / "report.png").read_bytes()
    assert page.tags.isdisjoint({"script", "link", "iframe"})
    width, height = png_size((run / "report.png").read_bytes())
    assert 1000 <= width <= 3000 and 1000 <= height <= 3000


def test_only_the_two_files_are_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", whole_run(), made=MADE)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    write_report(run)
    write_report(run)
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after.keys() - before.keys() == {run / "report.png", run / "report.html"}
    assert {path: after[path] for path in before} == before


def test_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: dict[str, Any] = {}
    labels: dict[str, tuple[str, str]] = {}
    plot = Axes.plot

    def record(ax: Axes, xs: Any, ys: Any, **style: Any) -> Any:
        drawn[f"{ax.get_title()}: {style['label']}"] = list(xs), list(ys)
        labels[ax.get_title()] = ax.get_xlabel(), ax.get_ylabel()
        return plot(ax, xs, ys, **style)

    monkeypatch.setattr(Axes, "plot", record)
    write_report(write_run(tmp_path / "run", whole_run()))
    steps, tokens, lengths = [10, 20, 30, 40], [1000, 2000, 3000, 4000], [1.5, 1.625, 1.875, 1.75]
    (extrapolated,) = (key for key in drawn if "extrapolated" in key)
    slope = (1.75 - 1.875) / math.log(4 / 3)
    at_ten = 1.75 + slope * math.log(10)
    assert extrapolated.endswith(f"to ten times the tokens: {at_ten:.2f}")
    assert drawn.pop(extrapolated) == (pytest.approx([4000, 40000]), pytest.approx([1.75, at_ten]))
    line = drawn.pop("Accept length over tokens: straight line through the last half of them")
    assert line == (pytest.approx([3000, 4000]), pytest.approx([1.875, 1.75]))
    assert drawn == {
        "Training loss: log lines": (steps, [8, 7, 6, 5]),
        "Training loss: median of 3 log lines": (steps, [8, 7, 6, 5]),
        "Accuracy per depth, held-out rows: depth 1": (steps, [one / 4 for one in lengths]),
        "Accuracy per depth, held-out rows: depth 2": (steps, [one / 8 for one in lengths]),
        "Simulated accept length, held-out rows: evaluations": (steps, lengths),
        "Simulated accept length, held-out rows: best: 1.875 at step 30": ([30], [1.875]),
        "Training speed: all tokens": (steps, [210, 220, 230, 240]),
        "Training speed: supervised tokens": (steps, [100] * 4),
        "Accept length over tokens: evaluations": (tokens, lengths),
    }
    assert all(x and y for x, y in labels.values())


def test_the_smoothed_loss_drops_outliers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    drawn: dict[str, list[float]] = {}
    plot = Axes.plot

    def record(ax: Axes, xs: Any, ys: Any, **style: Any) -> Any:
        drawn[style["label"]] = list(ys)
        return plot(ax, xs, ys, **style)

    monkeypatch.setattr(Axes, "plot", record)
    lines = [log(i, float(i)) | {"loss": loss} for i, loss in enumerate([4.0, 4.0, 90.0, 4.0, 7.0, 7.0, 7.0], 1)]
    write_report(write_run(tmp_path / "run", lines))
    assert drawn["log lines"] == [4, 4, 90, 4, 7, 7, 7]
    assert drawn["median of 3 log lines"] == [4, 4, 4, 7, 7, 7, 7]


# --- supervised tokens --------------------------------------------------------------------------------------


def test_counted_tokens_come_before_estimates(tmp_path: Path) -> None:
    lines = [log(10, 10.0, supervised=700), evaluation(10, 10.0, 1.5, supervised=700), log(20, 20.0, supervised=1300)]
    page = Page(write_report(write_run(tmp_path / "run", lines)))
    assert page.summary["Supervised tokens seen"] == "1,300"
    assert page.evaluations[1][2] == "700"


def test_estimates_go_on_from_the_last_count(tmp_path: Path) -> None:
    lines = [log(10, 10.0, supervised=700), log(20, 20.0)]
    assert [row["supervised"] for row in read_run(write_run(tmp_path / "run", lines)).rows] == [700, 1700]


def test_the_time_of_evaluations_is_not_trained_in(tmp_path: Path) -> None:
    lines = [log(10, 10.0), log(20, 20.0), evaluation(20, 20.0, 1.5), log(30, 80.0), evaluation(30, 80.0, 1.6)]
    lines += [log(40, 140.0), evaluation(40, 140.0, 1.7), log(50, 200.0)]
    rows = read_run(write_run(tmp_path / "run", lines)).rows
    assert [row["supervised"] for row in rows] == [1000, 2000, 3000, 4000, 5000]  # not 8000 and so on


def test_evaluations_between_log_lines(tmp_path: Path) -> None:
    lines = [evaluation(5, 5.0, 1.5), log(10, 10.0), evaluation(12, 12.0, 1.6)]
    rows = read_run(write_run(tmp_path / "run", lines)).rows
    assert [row["supervised"] for row in rows] == pytest.approx([500, 1000, 1200])


# --- the line through accept length over tokens -------------------------------------------------------------


def test_fit_recovers_a_line() -> None:
    tokens = [1e3, 2e3, 5e3, 1e4, 3e4, 5e4, 2e5]
    lengths = [9.0, 0.0, 7.0, *(1.25 + 0.25 * math.log(t) for t in tokens[3:])]  # the first half is not used
    assert log_fit(tokens, lengths) == pytest.approx((0.25, 1.25))


@pytest.mark.parametrize("tokens", [[1.0, 2.0, 3.0], [5.0] * 4, [math.nan] * 4, [0.0] * 4])
def test_no_fit(tokens: list[float]) -> None:
    assert log_fit(tokens, [1.0, 1.5, 2.0, 2.5][: len(tokens)]) is None


def test_the_extrapolation_in_words(tmp_path: Path) -> None:
    lines = []
    for step in range(10, 70, 10):
        length = 1.0 + 0.3 * math.log10(step)
        lines += [log(step, float(step)), evaluation(step, float(step), length)]
    (words,) = Page(write_report(write_run(tmp_path / "run", lines))).paragraphs
    expected = 1.0 + 0.3 * math.log10(600)
    assert f"accept length of {expected:.2f} for 60,000 supervised tokens, ten times those seen" in words
    assert "extrapolation, not a measurement" in words
    assert "learning-rate schedule bends" in words
    assert "A chain of 2 drafts, as evaluated here, cannot exceed 3." in words


@pytest.mark.parametrize("evaluations", [1, 3])
def test_few_evaluations_give_no_line(tmp_path: Path, evaluations: int) -> None:
    page = Page(write_report(write_run(tmp_path / "run", whole_run(evaluations))))
    assert page.paragraphs == [
        "No line is fitted to the accept length over tokens: there are fewer than 4 evaluations."
    ]
    assert len(page.evaluations) == 1 + evaluations


def test_evaluations_without_known_tokens_give_no_line(tmp_path: Path) -> None:
    lines = [evaluation(i, float(i), 1.0 + i / 10) for i in range(1, 7)]
    page = Page(write_report(write_run(tmp_path / "run", lines)))
    assert page.paragraphs == ["No line is fitted to the accept length over tokens: the tokens seen are not known."]
    assert page.evaluations[1][2] == "not known"


# --- runs that are not whole --------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [[log(10, 10.0)], [log(i, float(i)) for i in range(1, 5)]])
def test_no_evaluation_yet(tmp_path: Path, lines: list[dict[str, Any]], recwarn: pytest.WarningsRecorder) -> None:
    run = write_run(tmp_path / "run", lines)
    page = Page(write_report(run))
    assert page.summary["Best simulated accept length"] == page.summary["Command"] == "not known"
    assert len(page.evaluations) == 1  # the head of the table
    png_size((run / "report.png").read_bytes())
    assert [str(warning.message) for warning in recwarn if warning.category is UserWarning] == []  # e.g. empty legend


def test_a_cut_last_line_is_left_out_and_counted(tmp_path: Path) -> None:
    whole = Page(write_report(write_run(tmp_path / "whole", whole_run())))
    cut = Page(write_report(write_run(tmp_path / "cut", whole_run(), tail='{"step": 50, "seconds": 61.2, "lo')))
    assert cut.summary["Lines left out"] == "1 of metrics.jsonl, cut or without a step"
    assert "Lines left out" not in whole.summary
    assert cut.evaluations == whole.evaluations
    assert cut.summary["Steps"] == "40"


@pytest.mark.parametrize("line", ["[1]", "3", '"x"', "{}", '{"step": "ten", "seconds": 1}', "\x00\ufffd"])
def test_lines_of_another_kind_are_left_out(tmp_path: Path, line: str) -> None:
    assert read_run(write_run(tmp_path / "run", whole_run(), tail=line + "\n")).skipped == 1


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    """A session that ended in step 22, at second 22, and one that went on at its checkpoint of step 20."""
    first, second = whole_run(2), [log(30, 30.5), evaluation(30, 30.5, 1.9), log(40, 120.5)]
    page = Page(write_report(write_run(tmp_path / "run", first + second)))
    assert [row[0] for row in page.evaluations[1:]] == ["10", "20", "30"]
    assert page.summary["Minutes"] == "2.0"
    assert page.summary["Best simulated accept length"] == "1.900 at step 30"


def test_unreadable_settings_and_provenance_do_not_stop_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", whole_run(), config="head: [", made={"packages": 3, "machine": "a"})
    page = Page(write_report(run))
    assert page.summary["Head"] == page.summary["Versions"] == page.summary["Machine"] == "not known"
    (run / "best/provenance.json").write_text('{"command": "ea')
    assert Page(write_report(run)).summary["Command"] == "not known"


# --- optional values ----------------------------------------------------------------------------------------


def test_joint_training(tmp_path: Path) -> None:
    """Evaluations before the target was trained are of another target: the best one is among the rest."""
    lines = [log(10, 10.0), evaluation(10, 10.0, 2.5), log(20, 20.0, target_kl=0.125), evaluation(20, 20.0, 1.5)]
    lines += [{"step": 20, "seconds": 20.0, "drift/kl": 0.25, "drift/perplexity": 2.5}]
    page = Page(write_report(write_run(tmp_path / "run", lines)))
    assert page.summary["Best simulated accept length"] == "1.500 at step 20"
    assert page.summary["KL to the original target, last log line"] == "0.125"
    assert [row[-2:] for row in page.evaluations] == [
        ["drift/kl", "drift/perplexity"],
        ["not known", "not known"],
        ["0.2500", "2.5000"],
    ]


def test_early_stop(tmp_path: Path) -> None:
    lines = [*whole_run(), {"step": 40, "seconds": 40.0, "early_stop": "no better for 3 evaluations"}]
    page = Page(write_report(write_run(tmp_path / "run", lines)))
    assert page.summary["Early stop"] == "no better for 3 evaluations"


def test_markup_is_text(tmp_path: Path) -> None:
    bad = '<script>alert("1")</script> & <b>'
    config = f"head:\n  kind: '{bad}'\n"
    run = write_run(tmp_path / "<i>a & b", whole_run(), config=config, made={**MADE, "command": bad})
    page = Page(write_report(run))
    assert page.tags.isdisjoint({"script", "b", "i"})
    assert page.summary["Head"] == page.summary["Command"] == bad
    assert page.pre == config


@pytest.mark.parametrize("name", ["a $b^{$ c", "gr\u00f6\u00dfe", "\udcff\udcfe"])
def test_any_name_can_be_drawn(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / name, whole_run())
    page = Page(write_report(run))
    assert page.evaluations
    png_size((run / "report.png").read_bytes())


# --- errors and the script ----------------------------------------------------------------------------------


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        write_report(tmp_path)
    assert str(error.value) == f"{tmp_path} holds no run: there is no run.yaml"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [None, "", '{"step": 1'])
def test_no_metrics_yet(tmp_path: Path, text: str | None) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError) as error:
        write_report(tmp_path)
    assert str(error.value).startswith(f"{tmp_path} has no metrics lines yet: ")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "report.html").exists()


def test_a_failed_write_leaves_the_report_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", whole_run(3))
    write_report(run)
    before = {path: path.read_bytes() for path in run.iterdir()}
    write_run(run, whole_run(4))
    before[run / "metrics.jsonl"] = (run / "metrics.jsonl").read_bytes()

    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(run)
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_who_has_the_old_page_open_reads_it_whole(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", whole_run(3)))
    before = page.read_bytes()
    with page.open("rb") as reader:
        write_report(write_run(tmp_path / "run", whole_run(4)))
        assert reader.read() == before
    assert page.read_bytes() != before


def test_script_writes_every_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, whole_run()) for name in ("a", "b")]
    assert main([str(run) for run in runs]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"report: {run / 'report.html'}, {run / 'report.png'}" for run in runs]
    assert all((run / "report.html").is_file() and (run / "report.png").is_file() for run in runs)


def test_script_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'nothing'} holds no run: there is no run.yaml\n"
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2


def test_importing_it_is_cheap_and_pyplot_stays_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", whole_run())
    code = """import pathlib, sys, train.report as report
loaded = lambda *names: [name for name in names if name in sys.modules]
print(loaded("matplotlib", "torch"))
report.write_report(pathlib.Path(sys.argv[1]))
print(loaded("matplotlib", "matplotlib.pyplot"))"""
    command = [sys.executable, "-c", code, str(run)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n['matplotlib']\n"


def test_a_users_own_style_changes_nothing(tmp_path: Path) -> None:
    import matplotlib

    run = write_run(tmp_path / "run", whole_run())
    write_report(run)
    plain = (run / "report.png").read_bytes()
    with matplotlib.rc_context({"figure.facecolor": "black", "text.usetex": True, "savefig.dpi": 20}):
        write_report(run)
        assert matplotlib.rcParams["savefig.dpi"] == 20  # and is put back
    assert (run / "report.png").read_bytes() == plain

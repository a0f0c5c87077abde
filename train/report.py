"""The report of a training run: charts as PNG, and one HTML page with them inside that needs no network."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from train.typed_yaml import parse_yaml

PNG, HTML = "report.png", "report.html"
_TOKENS, _RATE, _ACCEPT, _ACCURACY = "supervised", "supervised_per_second", "eval/accept_length", "eval/accuracy"
_TARGET = ("target_kl", "drift/kl", "drift/perplexity", "drift/argmax_changed")  # of joint training
_BLUE, _ORANGE = "#0072b2", "#d55e00"  # told apart with any colour vision
_STYLE: dict[Any, Any] = {
    "font.size": 12,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
}
_STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "legend.fontsize": 11, "legend.framealpha": 0.6}
_CSS = """:root { color-scheme: light dark } body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem;
margin: 2rem auto; padding: 0 1rem } img { max-width: 100%; height: auto; background: #fff; border-radius: 6px }
table { border-collapse: collapse } caption { text-align: left; font-weight: bold; font-size: 1.3em; padding: 1rem 0 0 }
th, td { border-bottom: 1px solid #8886; padding: .25rem 1rem .25rem 0; text-align: left; vertical-align: top }
td { overflow-wrap: anywhere } pre { padding: 1rem; background: #8882 } div, pre { overflow-x: auto }"""

Row = dict[str, Any]
Curve = tuple[Sequence[float], Sequence[float], dict[str, Any]]  # x, y, style


@dataclass(frozen=True)
class Run:
    """What the files of a run say."""

    name: str
    config: str
    provenance: Row  # empty before the first evaluation
    rows: list[Row]  # one per step: what the lines of that step say, and _TOKENS in any case
    skipped: int  # lines of the metrics file that were cut by a kill
    estimated: bool  # whether the last _TOKENS is an estimate

    @cached_property
    def evals(self) -> list[Row]:
        return [row for row in self.rows if math.isfinite(_number(row.get(_ACCEPT)))]

    @cached_property
    def rivals(self) -> list[Row]:
        """Evaluations that compete for the best head: once the target is trained too, only those from then on."""
        start = next((row["step"] for row in self.rows if any(key in row for key in _TARGET)), 0)
        return [row for row in self.evals if row["step"] >= start]

    @cached_property
    def best(self) -> Row | None:
        return max(self.rivals, key=lambda row: _number(row[_ACCEPT]), default=None)


def write_report(run: Path) -> Path:
    """Writes report.png and report.html into the directory of a run, finished or not, and returns the page's path.

    Each file is whole or as it was, and no other file is touched.

    Raises:
        ValueError: no run there, or no metrics lines yet; one line.
        OSError: the directory cannot be read or written, for example because the disk is full.
        ImportError: matplotlib is not installed.
    """
    record = read_run(run)
    png = _charts(record)
    for path, data in ((run / PNG, png), (run / HTML, _page(record, png).encode("utf-8", "replace"))):
        tmp = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        try:
            tmp.write_bytes(data)
            os.replace(tmp, path)
        finally:
            tmp.unlink(missing_ok=True)
    return run / HTML


# --- reading ------------------------------------------------------------------------------------------------


def read_run(run: Path) -> Run:
    """Raises ValueError where there is no run, or none with metrics yet."""
    config, metrics, best = run / "run.yaml", run / "metrics.jsonl", run / "best/provenance.json"
    if not config.is_file():
        raise ValueError(f"{run} holds no run: there is no {config.name}")
    parsed = [_object(line) for line in metrics.read_bytes().splitlines()] if metrics.is_file() else []
    lines = [row for row in parsed if math.isfinite(_number(row.get("step")) + _number(row.get("seconds")))]
    if not lines:
        raise ValueError(f"{run} has no metrics lines yet: {metrics.name} gets one every train.log_every steps")
    by_step: dict[float, Row] = {}
    for row in lines:
        by_step.setdefault(row["step"], {}).update(row)
    rows = [by_step[step] for step in sorted(by_step)]
    estimated = _TOKENS not in rows[-1]
    _count_tokens(rows)
    name = os.fsencode(run.resolve().name).decode("utf-8", "replace")  # a path may hold bytes that are no UTF-8
    provenance = _object(best.read_bytes()) if best.is_file() else {}
    return Run(name, config.read_text("utf-8", "replace"), provenance, rows, len(parsed) - len(lines), estimated)


def _object(text: bytes) -> Row:
    """A JSON object; empty for anything else, such as a line that was cut."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _count_tokens(rows: list[Row]) -> None:
    """Gives every row that lacks it an estimate of the supervised tokens seen: rate times seconds, added up.

    Rates leave the time of evaluations out, `seconds` does not: after one, the usual time of a step stands in.
    """
    spans: list[tuple[Row, float, float, bool]] = []
    step, seconds, held_up = 0.0, 0.0, False
    for row in rows:
        if _RATE in row:
            spans.append((row, row["step"] - step, row["seconds"] - seconds, held_up))
            step, seconds, held_up = row["step"], row["seconds"], False
        held_up |= _ACCEPT in row
    usual = statistics.median([passed / n for _, n, passed, held_up in spans if n and not held_up] or [math.inf])
    tokens, known = 0.0, {0.0: 0.0}
    for row, steps, passed, held_up in spans:
        tokens += _number(row[_RATE]) * (min(passed, usual * steps) if held_up else passed)
        tokens = known[row["step"]] = _number(row.get(_TOKENS, tokens))
    known |= {row["step"]: _number(row[_TOKENS]) for row in rows if _TOKENS in row}
    last, end = max(known), rows[-1]["step"]
    known.setdefault(end, known[last] * end / last if last else math.nan)  # on at the mean rate
    xs = sorted(known)
    counts = np.interp(_series(rows, "step"), xs, [known[x] for x in xs])
    for row, count in zip(rows, counts.tolist(), strict=True):
        row.setdefault(_TOKENS, count)


def _number(value: object) -> float:
    """NaN for what is no number."""
    return float(value) if isinstance(value, int | float) else math.nan


def _series(rows: Sequence[Row], key: str) -> list[float]:
    return [_number(row.get(key)) for row in rows]


def _accuracies(rows: Sequence[Row]) -> list[list[float]]:
    """Per depth, one list per row, all of the same length."""
    lists = [row[_ACCURACY] if isinstance(row.get(_ACCURACY), list) else [] for row in rows]
    depth = max(map(len, lists), default=0)
    return [[*map(_number, values), *[math.nan] * (depth - len(values))] for values in lists]


def log_fit(tokens: Sequence[float], lengths: Sequence[float]) -> tuple[float, float] | None:
    """(slope, intercept) of length over ln(tokens): least squares through the last half of the evaluations.

    None for fewer than 4, and where tokens are unknown or all the same.
    """
    last = list(zip(tokens, lengths, strict=True))[len(tokens) // 2 :]
    if len(tokens) < 4 or not all(t > 0 and math.isfinite(t + a) for t, a in last) or len({t for t, _ in last}) < 2:
        return None
    line = statistics.linear_regression([math.log(t) for t, _ in last], [a for _, a in last])
    return line.slope, line.intercept


def _fitted(run: Run) -> list[tuple[float, float]]:
    """(tokens, length) on the line: where it starts, where the run stands, at ten times that; empty without a line."""
    rows = run.rivals
    line = log_fit(_series(rows, _TOKENS), _series(rows, _ACCEPT))
    if line is None:
        return []
    first, last = rows[len(rows) // 2][_TOKENS], rows[-1][_TOKENS]
    return [(x, line[1] + line[0] * math.log(x)) for x in (first, last, 10 * last)]


# --- charts -------------------------------------------------------------------------------------------------


def _charts(run: Run) -> bytes:
    """All charts as one PNG, drawn without pyplot: no display, and no state that outlives the call."""
    import matplotlib  # here, because it takes a while and only a report needs it
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    depths = list(zip(*_accuracies(run.evals), strict=True))
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.88, max(len(depths), 1)))  # its end is too light on white
    accuracy: list[Curve] = []
    for k, shares in enumerate(depths):
        style = {"color": shades[k], "marker": "osD^v<>"[k % 7], "label": f"depth {k + 1}"}
        accuracy.append((_series(run.evals, "step"), shares, style))
    speed = [_curve(run.rows, "tokens_per_second", color=_BLUE, label="all tokens")]
    speed += [_curve(run.rows, _RATE, color=_ORANGE, label="supervised tokens")]
    length = "accept length (tokens per target pass)"
    charts = [
        ("Training loss", "step", "loss per supervised token", _loss_curves(run)),
        ("Accuracy per depth, held-out rows", "step", "share equal to the target's argmax", accuracy),
        ("Simulated accept length, held-out rows", "step", length, _accept_curves(run)),
        ("Training speed", "step", "tokens per second", speed),
        ("Accept length over tokens", "supervised tokens seen (log axis)", length, _scaling_curves(run)),
    ]
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not the user's style: it may be dark, or need LaTeX
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(14, 15), dpi=100)
        FigureCanvasAgg(figure)
        figure.suptitle(f"Training run {run.name}", fontsize=17, y=0.975).set_parse_math(False)
        grid = figure.add_gridspec(3, 2, left=0.075, right=0.97, bottom=0.05, top=0.93, hspace=0.32, wspace=0.2)
        for i, (title, x, y, curves) in enumerate(charts):
            ax = figure.add_subplot(grid[2, :] if i == 4 else grid[i // 2, i % 2])
            ax.set(title=title, xlabel=x, ylabel=y, xscale="log" if i == 4 else "linear")
            for xs, ys, style in curves:
                ax.plot(xs, ys, **style)
            if x == "step":
                ax.locator_params(axis="x", integer=True)
            if y == "tokens per second":
                ax.set_ylim(bottom=0)
            if any(len(xs) for xs, _, _ in curves):
                ax.legend()
            else:
                ax.tick_params(which="both", labelbottom=False, labelleft=False)
                ax.text(0.5, 0.5, "nothing measured yet", transform=ax.transAxes, ha="center")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _curve(rows: Sequence[Row], key: str, x: str = "step", **style: Any) -> Curve:
    known = [row for row in rows if math.isfinite(_number(row.get(key)) + _number(row[x]))]
    return _series(known, x), _series(known, key), style


def _loss_curves(run: Run) -> list[Curve]:
    steps, loss, style = _curve(run.rows, "loss", color=_BLUE, alpha=0.3, linewidth=1, label="log lines")
    width = min(max(len(loss) // 50, 1), 50) * 2 + 1
    if len(loss) < width:
        return [(steps, loss, style)]
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(loss, width // 2, "edge"), width)
    smooth = np.median(windows, axis=1).tolist()  # unlike a mean, it keeps the edge where more steps are unrolled
    return [(steps, loss, style), (steps, smooth, {"color": _BLUE, "label": f"median of {width} log lines"})]


def _accept_curves(run: Run) -> list[Curve]:
    curves = [_curve(run.evals, _ACCEPT, color=_BLUE, marker="o", label="evaluations")]
    if run.best is not None:
        label = f"best: {run.best[_ACCEPT]:.3f} at step {run.best['step']}"
        style = {"color": _ORANGE, "marker": "*", "markersize": 18, "linestyle": "none", "label": label}
        curves.append(([run.best["step"]], [run.best[_ACCEPT]], style))
    return curves


def _scaling_curves(run: Run) -> list[Curve]:
    points = _fitted(run)
    label = "evaluations" if points else "evaluations (no line through them, see the page)"
    curves = [_curve(run.evals, _ACCEPT, _TOKENS, color=_BLUE, marker="o", linestyle="none", label=label)]
    if points:
        xs, ys = zip(*points, strict=True)
        curves.append((xs[:2], ys[:2], {"color": _ORANGE, "label": "straight line through the last half of them"}))
        label = f"extrapolated to ten times the tokens: {ys[2]:.2f}"
        style = {"color": _ORANGE, "linestyle": "--", "marker": "D", "markevery": [1], "label": label}
        curves.append((xs[1:], ys[1:], style))
    return curves


# --- page ---------------------------------------------------------------------------------------------------


def _page(run: Run, png: bytes) -> str:
    accuracies = _accuracies(run.evals)
    drift = [key for key in _TARGET if key.startswith("drift/") and any(key in row for row in run.evals)]
    depths = [f"Accuracy at depth {k + 1}" for k in range(len(accuracies[0]) if accuracies else 0)]
    table = [["Step", "Minutes", "Supervised tokens", "Accept length", *depths, *drift]]
    for row, shares in zip(run.evals, accuracies, strict=True):
        cells = [f"{row['step']}", f"{row['seconds'] / 60:.1f}", _shown(row[_TOKENS]), f"{row[_ACCEPT]:.3f}"]
        table.append(cells + [_shown(one, 3) for one in shares] + [_shown(row.get(key), 4) for key in drift])
    picture = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Training run {escape(run.name)}</title><style>{_CSS}</style></head>
<body><h1>Training run {escape(run.name)}</h1>
{_table("Summary", _summary(run))}
<h2>Charts</h2>
<img alt="Loss, accuracy per depth, accept length, speed; the numbers are in the tables" src="{picture}">
<p>{escape(_outlook(run))}</p>
{_table("Evaluations on held-out rows", table)}
<h2>Settings</h2><pre>{escape(run.config)}</pre></body></html>
"""


def _table(caption: str, rows: Sequence[Sequence[str]]) -> str:
    """The first cell of each row is its header, and so is the whole first row of a table with more than two columns."""
    lines = []
    for i, row in enumerate(rows):
        top = i == 0 and len(row) > 2
        tags = ["th" if top or k == 0 else "td" for k in range(len(row))]
        lines.append("".join(f"<{tag}>{escape(cell)}</{tag}>" for tag, cell in zip(tags, row, strict=True)))
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return f"<div><table><caption>{escape(caption)}</caption>\n{body}</table></div>"


def _summary(run: Run) -> list[tuple[str, str]]:
    try:
        config = parse_yaml(run.config)
    except ValueError:
        config = None  # the page shows its text anyway
    made, last, best = run.provenance, run.rows[-1], run.best
    speed, supervised = (
        statistics.median(_curve(run.rows, key)[1] or [math.nan]) for key in ("tokens_per_second", _RATE)
    )
    newest = {key: value for row in run.rows for key, value in row.items()}
    seen = _shown(last[_TOKENS]) + (" (estimated: supervised tokens per second times seconds)" if run.estimated else "")
    saved = f"of step {made.get('step')}, after {_shown(made.get('supervised_tokens_seen'))} supervised tokens"
    rows: dict[str, Any] = {
        "Head": _at(config, "head", "kind"),
        "Target": _at(config, "target", "path"),
        "Steps": last["step"],
        "Minutes": f"{last['seconds'] / 60:.1f}",
        "Epochs": newest.get("epochs"),
        "Supervised tokens seen": seen,
        "Best simulated accept length": None if best is None else f"{best[_ACCEPT]:.3f} at step {best['step']}",
        "Head in best/": saved if made else None,
        "Tokens per second, median": f"{speed:,.1f}, supervised {supervised:,.1f}",
        "Machine": _listed(made.get("machine")),
        "Versions": _listed(made.get("packages")),
        "Python": made.get("python"),
        "Commit": made.get("commit"),
        "Command": made.get("command"),
    }
    if "early_stop" in newest:
        rows["Early stop"] = newest["early_stop"]
    if "target_kl" in newest:
        rows["KL to the original target, last log line"] = newest["target_kl"]
    if run.skipped:
        rows["Lines left out"] = f"{run.skipped} of metrics.jsonl, cut or without a step"
    return [(name, "not known" if value in (None, "") else str(value)) for name, value in rows.items()]


def _shown(value: object, digits: int = 0) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, int | float) and math.isfinite(value) else "not known"


def _at(data: Any, *keys: str) -> Any:
    """A value inside sections; None where there is none."""
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _listed(data: Any) -> str:
    return ", ".join(f"{key} {value}" for key, value in data.items() if value) if isinstance(data, dict) else ""


def _outlook(run: Run) -> str:
    """What the line through accept length over tokens says, in words."""
    points = _fitted(run)
    if not points:
        why = "there are fewer than 4 evaluations" if len(run.rivals) < 4 else "the tokens seen are not known"
        return f"No line is fitted to the accept length over tokens: {why}."
    (tokens, length), depth = points[-1], len(_accuracies(run.evals)[0])
    limit = f" A chain of {depth} drafts, as evaluated here, cannot exceed {depth + 1}." if depth else ""
    return (
        "A straight line in log(tokens) through the last half of the evaluations gives an accept length of "
        f"{length:.2f} for {tokens:,.0f} supervised tokens, ten times those seen. This is an extrapolation, not a "
        "measurement. The learning-rate schedule bends the curve: the falling rate lifts the last evaluations of a "
        "run, and one of ten times the tokens has that at its own end only. So does a change among these evaluations, "
        f"such as more unrolled steps from loss.unroll_from on.{limit}"
    )

"""The report of a prompt set decoded in several ways in the same run: with a draft head, and by the baselines.

All sides are counted by one counter, the emitted token ids, and timed by one clock, so that a speed-up never comes from
counting differently. Sides: "spec" (with the head) and the baselines "library" (transformers' own `generate`), "plain"
(our decoder without a head) and "compiled" (that one, compiled; not in every run).
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infer.metrics import Aggregate, BatchTime, DecodeStats, batch_time, merge

MARK = "draftsmith_report"  # top-level key by which we know our own files; its value is the schema version
SCHEMA = 2
_PARTIAL = "draftsmith_partial"  # key of the first line of a partial file; its value is the schema version
_PARTIAL_SCHEMA = 2
BASELINES = ("library", "plain", "compiled")
_WIDTH = 110  # characters of a line of text


@dataclass(frozen=True)
class Parting:
    """Where a side's tokens first differ from plain decoding's.

    at: index of the token. gap: difference of the two largest processed scores there (None where tokens are drawn).
    """

    at: int
    gap: float | None = None


@dataclass(frozen=True)
class PromptRun:
    """One prompt decoded by every side.

    sides: counts per side, "spec" and "plain" always among them.
    batch: prompts with the same number were decoded together; the seconds of their stats are the batch's.
    parted: sides whose tokens were compared with plain decoding's; None: equal. "control" is decoding without drafts in
        passes as wide as a tree's.
    noise: largest difference of the scores between passes of one token and of a tree's width; None: not measured.
    """

    prompt_id: str
    category: str
    sides: Mapping[str, DecodeStats]
    batch: int
    parted: Mapping[str, Parting | None] = field(default_factory=dict)
    noise: float | None = None


def first_divergence(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first differing token (the shorter length if one is a prefix); None if equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def build_report(runs: Sequence[PromptRun], meta: Mapping[str, Any] | None = None, seed: int = 0) -> dict[str, Any]:
    """JSON-able report: overall, per category, acceptance, time split per round, equality, and each prompt.

    meta: what makes the figures repeatable (hardware, dtype, command, commit, ...); stored as given, must be
    JSON-able; "lossy", if set, is shown with every result. seed: of the bootstrap interval. Raises ValueError if there
    is no run.

    Speed-ups are ratios of tokens per second (sum of tokens / sum of wall clock): `speedup_SIDE` with the prefill and
    `speedup_decode_SIDE` without it; `speedup` and `speedup_decode` are against the fastest baseline of that row.
    A category whose prompts shared batches with others has no speeds.
    """
    if not runs:
        raise ValueError("got 0 prompts to report on, expected at least 1; check the file given as --eval")
    meta = dict(meta or {})
    categories: dict[str, list[PromptRun]] = {}
    for run in runs:
        categories.setdefault(run.category, []).append(run)
    sides = aggregates(runs, seed=seed)
    spec = sides["spec"]
    rows = {name: _row(part, _category_sides(part, runs, seed)) for name, part in categories.items()}
    return {
        MARK: SCHEMA,
        "meta": meta,
        "overall": {**_row(runs, sides), "lossy": meta.get("lossy")},
        "categories": rows,
        "acceptance": {
            "conditional_per_depth": spec.conditional_per_depth,
            "conditional_trials": spec.conditional_trials,
            "unconditional_per_position": spec.unconditional_per_position,
            "accepted_ranks": spec.accepted_ranks,
        },
        "ms_per_round": {name: side.ms_per_round for name, side in sides.items()},
        "ms_prefill": {name: side.ms_prefill for name, side in sides.items()},
        "divergence": divergence(runs),
        "prompts": [_prompt_row(run) for run in runs],
    }


def aggregates(
    runs: Sequence[PromptRun], *, seed: int = 0, resamples: int = 2000, timed: bool = True
) -> dict[str, Aggregate]:
    """Each side added up, "spec" last. timed: False where the runs are not whole batches."""
    names = [name for name in (*BASELINES, "spec") if name in runs[0].sides]
    return {
        name: merge([run.sides[name] for run in runs], seed, resamples, _times(runs, name) if timed else [])
        for name in names
    }


def _times(runs: Sequence[PromptRun], side: str) -> list[BatchTime]:
    batches: dict[int, list[DecodeStats]] = {}
    for run in runs:
        batches.setdefault(run.batch, []).append(run.sides[side])
    return [batch_time(rows) for rows in batches.values()]


def _category_sides(part: Sequence[PromptRun], runs: Sequence[PromptRun], seed: int) -> dict[str, Aggregate]:
    batches, mine = {run.batch for run in part}, {id(run) for run in part}
    whole = all(id(run) in mine for run in runs if run.batch in batches)
    return aggregates(part, seed=seed, timed=whole)


def _row(runs: Sequence[PromptRun], sides: Mapping[str, Aggregate]) -> dict[str, Any]:
    spec = sides["spec"]
    compared = [run.parted["spec"] is None for run in runs if "spec" in run.parted]
    return {
        "prompts": len(runs),
        "tau": spec.tau,
        "tau_low": spec.tau_low,
        "tau_high": spec.tau_high,
        **_speeds(sides, ""),
        **_speeds(sides, "_decode"),
        "passes_saved": spec.passes_saved,
        "identical_share": sum(compared) / len(compared) if compared else None,
        **{f"new_tokens_{name}": side.new_tokens for name, side in sides.items()},
        **{f"target_passes_{name}": side.target_passes for name, side in sides.items()},
    }


def _speeds(sides: Mapping[str, Aggregate], kind: str) -> dict[str, Any]:
    """kind: "" with the prefill, "_decode" without it."""
    speed: dict[str, float | None] = {name: getattr(side, "tokens_per_second" + kind) for name, side in sides.items()}
    known = {name: value for name, value in speed.items() if name != "spec" and value is not None}
    fastest = max(known, key=lambda name: known[name], default=None)
    return {
        **{f"tokens_per_second{kind}_{name}": value for name, value in speed.items()},
        **{f"speedup{kind}_{name}": _quotient(speed["spec"], speed[name]) for name in sides if name != "spec"},
        f"fastest_baseline{kind}": fastest,
        f"speedup{kind}": None if fastest is None else _quotient(speed["spec"], known[fastest]),
    }


def divergence(runs: Sequence[PromptRun]) -> dict[str, Any]:
    """How often each side's tokens part from plain decoding's, and the gaps where they do.

    Widths round differently, so in half precision near-ties fall either way. If no score differs by more than e, two
    argmaxes can differ only where the top-2 gap is at most 2 e: tolerance = 2 * (largest noise of this run). The
    control says how often the width alone parts the texts. Keys of the side with the head lie at the top.
    """
    noise = max((run.noise for run in runs if run.noise is not None), default=None)
    tolerance = None if noise is None else 2 * noise
    names = sorted({name for run in runs for name in run.parted} - {"spec"})
    return {
        "noise": noise,
        "tolerance": tolerance,
        "control_prompts": sum(run.noise is not None for run in runs),
        **_partings(runs, "spec", tolerance),
        **{name: _partings(runs, name, tolerance) for name in names},
    }


def _partings(runs: Sequence[PromptRun], side: str, tolerance: float | None) -> dict[str, Any]:
    """compared, prompts that parted, gaps, and how many partings the tolerance does not explain (None: unknown)."""
    compared = [run.parted[side] for run in runs if side in run.parted]
    parted = [where for where in compared if where is not None]
    gaps = [where.gap for where in parted if where.gap is not None]
    known = tolerance is not None and len(gaps) == len(parted)
    return {
        "compared": len(compared),
        "prompts": len(parted),
        "gap_smallest": min(gaps, default=None),
        "gap_largest": max(gaps, default=None),
        "unexplained": sum(gap > tolerance for gap in gaps) if known and tolerance is not None else None,
    }


def _prompt_row(run: PromptRun) -> dict[str, Any]:
    spec, where = run.sides["spec"], run.parted.get("spec")
    return {
        "prompt_id": run.prompt_id,
        "category": run.category,
        "batch": run.batch,
        "prompt_tokens": spec.prompt_tokens,
        "first_divergence": None if where is None else where.at,
        "parted": {name: None if at is None else {"at": at.at, "gap": at.gap} for name, at in run.parted.items()},
        "noise": run.noise,
        "tau": spec.tau,
        **{f"new_tokens_{name}": side.new_tokens for name, side in run.sides.items()},
        "target_passes_spec": spec.target_passes,
        **{f"seconds_{name}": dict(side.seconds) for name, side in run.sides.items()},
        "accepted_per_round": list(spec.accepted_per_round),
        "offered_depth_per_round": list(spec.offered_depth_per_round),
        "accepted_ranks": list(spec.accepted_ranks),
    }


def _quotient(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


# ---- as text -----------------------------------------------------------------------------------------------


def format_report(report: Mapping[str, Any]) -> str:
    """The report as text: categories, sides, acceptance, the time of a round, equality, settings."""
    overall = report["overall"]
    lossy = [f"LOSSY: {overall['lossy']}"] if overall["lossy"] else []
    lines = [*lossy, *_category_table(report)]
    if overall["tau_low"] is not None:
        low, high = overall["tau_low"], overall["tau_high"]
        lines.append(f"tau, 95 % interval over prompts: {low:.2f} .. {high:.2f}")
    lines += ["", *_side_table(overall), *_headline(overall), ""]
    lines += _acceptance_table(report["acceptance"])
    lines += [*_time_table(report), "", *_divergence_lines(report), *lossy]
    if report["meta"]:
        lines += ["", *_settings(report["meta"])]
    return "\n".join(lines)


def _category_table(report: Mapping[str, Any]) -> list[str]:
    columns: list[tuple[str, str, Callable[[Any], str]]] = [
        ("prompts", "prompts", str),
        ("tau", "tau", lambda v: f"{v:.2f}"),
        ("tok/s", "tokens_per_second_spec", lambda v: f"{v:.1f}"),
        ("speed-up", "speedup", _times_faster),
        ("no prefill", "speedup_decode", _times_faster),
        ("passes saved", "passes_saved", lambda v: f"{100 * v:.0f} %"),
        ("identical", "identical_share", lambda v: f"{100 * v:.1f} %"),
    ]
    rows = [["category", *(title for title, _, _ in columns)]]
    for name, row in [*report["categories"].items(), ("overall", report["overall"])]:
        rows.append([name, *(_shown(row[key], show) for _, key, show in columns)])
    return aligned(rows)


def _side_table(overall: Mapping[str, Any]) -> list[str]:
    rows = [["side", "tokens", "passes", "tok/s", "speed-up over it", "tok/s, no prefill", "speed-up over it"]]
    for side in (*BASELINES, "spec"):
        if f"new_tokens_{side}" not in overall:
            continue
        cells = [side, str(overall[f"new_tokens_{side}"]), str(overall[f"target_passes_{side}"])]
        for kind in ("", "_decode"):
            cells.append(_shown(overall[f"tokens_per_second{kind}_{side}"], lambda v: f"{v:.1f}"))
            cells.append(_shown(overall.get(f"speedup{kind}_{side}"), _times_faster))
        rows.append(cells)
    return aligned(rows)


def _headline(overall: Mapping[str, Any]) -> list[str]:
    if overall["speedup"] is None:
        return []
    text = f"speed-up against the fastest baseline ({overall['fastest_baseline']}): {_times_faster(overall['speedup'])}"
    if overall["speedup_decode"] is not None:
        other = overall["fastest_baseline_decode"]
        text += f"; without the prefill ({other}): {_times_faster(overall['speedup_decode'])}"
    return [text]


def _acceptance_table(acceptance: Mapping[str, Any]) -> list[str]:
    if not acceptance["conditional_per_depth"]:
        return ["no drafts were offered", ""]
    rows = [["depth", "accepted if the one before was", "tried", "accepted, of all rounds"]]
    for index, rate in enumerate(acceptance["conditional_per_depth"]):
        trials = acceptance["conditional_trials"][index]
        share = acceptance["unconditional_per_position"][index]
        rows.append([str(index + 1), _shown(rate, _percent), str(trials), _percent(share)])
    lines = aligned(rows)
    ranks = acceptance["accepted_ranks"]
    if ranks:
        shares = ", ".join(f"{rank + 1}: {_percent(count / sum(ranks))}" for rank, count in enumerate(ranks))
        lines += textwrap.wrap(f"accepted tokens by rank among their siblings: {shares}", _WIDTH)
    return [*lines, ""]


def _time_table(report: Mapping[str, Any]) -> list[str]:
    phases = ("draft", "target", "verify", "rest")
    rows = [["ms per round", *phases, "sum", "prefill (per batch)"]]
    for side, split in report["ms_per_round"].items():
        cells = [split[name] for name in phases]
        total = None if None in cells else sum(cells)
        if side == "library":  # `generate` is one piece
            cells = [None] * len(phases)
        rows.append([side, *(_shown(v, lambda ms: f"{ms:.2f}") for v in [*cells, total, report["ms_prefill"][side]])])
    return aligned(rows)


def _divergence_lines(report: Mapping[str, Any]) -> list[str]:
    found, dtype = report["divergence"], report["meta"].get("dtype", "this dtype")
    if not found["compared"]:
        return ["drafted and plain texts are drawn independently, so tokens were not compared (see the audit)"]
    lines = [_parting_line("with the head", found, dtype)]
    lines += [_parting_line(name, found[name], dtype) for name in BASELINES if name in found]
    if "control" in found:
        lines.append(_parting_line("control (no drafts, passes as wide as the tree)", found["control"], dtype))
    if found["tolerance"] is not None:
        lines.append(
            f"scores of one-token and tree-wide passes differ by up to {found['noise']:.3g} "
            f"({found['control_prompts']} prompts); tolerance for gaps: {found['tolerance']:.3g}"
        )
    return [part for line in lines for part in textwrap.wrap(line, _WIDTH)]


def _parting_line(name: str, found: Mapping[str, Any], dtype: str) -> str:
    if not found["prompts"]:
        return f"{name}: every prompt's tokens are those of plain decoding ({found['compared']} compared)"
    text = f"{name}: {found['prompts']} of {found['compared']} prompts differ from plain decoding in {dtype}"
    if found["gap_largest"] is not None:
        text += f"; top-2 gap at the first difference: {found['gap_smallest']:.3g} .. {found['gap_largest']:.3g}"
    if found["unexplained"] is not None:
        text += f"; beyond the tolerance: {found['unexplained']}"
    return text


def _settings(meta: Mapping[str, Any]) -> list[str]:
    shown = [f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in meta.items()]
    return textwrap.wrap("settings: " + "; ".join(shown), _WIDTH, break_on_hyphens=False)


def _times_faster(value: float) -> str:
    return f"{value:.2f}x"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _shown(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Text lines with the first column left-aligned and the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


# ---- as files ----------------------------------------------------------------------------------------------


def write_json(path: str | os.PathLike[str], report: Mapping[str, Any]) -> None:
    """Write a report in one step: a temporary file beside it, then a rename; parent folders are made.

    Raises ValueError if `report` is not one of our reports, or if `path` holds something else than one: we
    never overwrite what we did not write.
    """
    target = Path(path)
    if MARK not in report:
        raise ValueError(f"got a dict without the key {MARK!r}, expected the result of build_report; pass that instead")
    if target.exists() and not is_report(target):
        raise ValueError(f"{target} exists and is not a Draftsmith report, so it is not overwritten; give another path")
    text = json.dumps(report, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)  # gone already if the rename succeeded


def is_report(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError):
        return False
    return isinstance(found, dict) and MARK in found


# ---- results that survive a kill ---------------------------------------------------------------------------


@dataclass
class Results:
    """Where the report goes: `path`, and beside it the finished batches so far."""

    path: Path
    partial: Path

    def resume(self, fingerprint: dict[str, Any], say: Callable[[str], None]) -> dict[int, list[PromptRun]]:
        """Finished batches by number from an earlier run with the same settings; else starts the file anew."""
        text = self.partial.read_text(encoding="utf-8") if self.partial.exists() else ""
        lines = text.splitlines()
        header = json.loads(lines[0])["settings"] if lines else fingerprint
        done: dict[int, list[PromptRun]] = {}
        if header == fingerprint:
            for line in lines[1:]:
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:  # cut off by the kill
                    break
                done[row["batch"]] = [_run_from(run) for run in row["runs"]]
        else:
            differs = sorted(k for k in {*header, *fingerprint} if header.get(k) != fingerprint.get(k))
            say(f"{self.partial} was made with other settings ({', '.join(differs)}): starting over")
        self._rewrite(fingerprint, done)
        return done

    def _rewrite(self, fingerprint: dict[str, Any], done: dict[int, list[PromptRun]]) -> None:
        temporary = self.partial.with_name(f".{self.partial.name}.{os.getpid()}.tmp")
        rows = [{_PARTIAL: _PARTIAL_SCHEMA, "settings": fingerprint}]
        rows += [_batch_row(batch, runs) for batch, runs in done.items()]
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.replace(temporary, self.partial)

    def append(self, batch: int, runs: Sequence[PromptRun]) -> None:
        with open(self.partial, "a", encoding="utf-8") as file:
            file.write(json.dumps(_batch_row(batch, runs)) + "\n")

    def write(self, report: dict[str, Any]) -> None:
        write_json(self.path, report)
        self.partial.unlink(missing_ok=True)


def open_results(path: str | None) -> Results | None:
    """Makes sure, before any work, that the report can be written; None without a path.

    Raises:
        ValueError: the path or its partial file is taken by something that we did not write, or is not
            writable.
    """
    if path is None:
        return None
    out = Path(path)
    partial = out.with_name(out.name + ".partial.jsonl")
    if out.exists() and not is_report(out):
        raise ValueError(f"--json: {out} exists and is not a Draftsmith report, so it is not overwritten")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "a+", encoding="utf-8") as file:
            file.seek(0)
            first = file.readline()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--json: cannot write beside {out}: {error}") from error
    if not first:
        partial.unlink()  # only tried
    elif not _is_header(first):
        raise ValueError(f"--json: {partial} exists and is not a Draftsmith partial result; remove it")
    return Results(out, partial)


def _is_header(line: str) -> bool:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return False
    return isinstance(row, dict) and row.get(_PARTIAL) == _PARTIAL_SCHEMA and isinstance(row.get("settings"), dict)


def _batch_row(batch: int, runs: Sequence[PromptRun]) -> dict[str, Any]:
    return {"batch": batch, "runs": [asdict(run) for run in runs]}


def _run_from(row: dict[str, Any]) -> PromptRun:
    sides = {name: DecodeStats(**side) for name, side in row["sides"].items()}
    parted = {name: None if where is None else Parting(**where) for name, where in row["parted"].items()}
    return PromptRun(**{**row, "sides": sides, "parted": parted})

"""The report of a prompt set decoded twice: plainly and with a draft head, in the same run.

Both sides are counted by one counter, the emitted token ids, so that a speed-up never comes from counting
differently.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.metrics import Aggregate, DecodeStats, merge

MARK = "draftsmith_report"  # top-level key by which we know our own files; its value is the schema version
SCHEMA = 1


@dataclass(frozen=True)
class PairedRun:
    """One prompt decoded both ways. first_divergence: index of the first differing token, None if equal."""

    prompt_id: str
    category: str
    plain: DecodeStats
    spec: DecodeStats
    first_divergence: int | None


def first_divergence(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first differing token (the shorter length if one is a prefix); None if equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def pair(
    prompt_id: str,
    category: str,
    plain: tuple[Sequence[int], DecodeStats],
    spec: tuple[Sequence[int], DecodeStats],
) -> PairedRun:
    """Join the two runs of a prompt, each (emitted token ids, stats).

    Raises AssertionError if a side's `new_tokens` is not the number of ids it emitted.
    """
    for name, (ids, stats) in (("plain", plain), ("spec", spec)):
        assert stats.new_tokens == len(ids), f"{name} run counts {stats.new_tokens} tokens, emitted {len(ids)}"
    return PairedRun(prompt_id, category, plain[1], spec[1], first_divergence(plain[0], spec[0]))


def build_report(runs: Sequence[PairedRun], meta: Mapping[str, Any] | None = None, seed: int = 0) -> dict[str, Any]:
    """JSON-able report: overall, per category, acceptance per depth, time split per round, and each prompt.

    meta: what makes the figures repeatable (hardware, dtype, command, commit, ...); stored as given, must be
    JSON-able. seed: of the bootstrap interval. Raises ValueError if there is no run.

    Speed-ups are ratios of tokens per second (sum of tokens / sum of seconds), `speedup` with the prefill and
    `speedup_decode` without it.
    """
    if not runs:
        raise ValueError("got 0 prompts to report on, expected at least 1; check the file given as --eval")
    plain = merge([run.plain for run in runs], seed)
    spec = merge([run.spec for run in runs], seed)
    categories: dict[str, list[PairedRun]] = {}
    for run in runs:
        categories.setdefault(run.category, []).append(run)
    return {
        MARK: SCHEMA,
        "meta": dict(meta or {}),
        "overall": _row(runs, plain, spec),
        "categories": {name: _category_row(part, seed) for name, part in categories.items()},
        "acceptance": {
            "conditional_per_depth": spec.conditional_per_depth,
            "conditional_trials": spec.conditional_trials,
            "unconditional_per_position": spec.unconditional_per_position,
        },
        "ms_per_round": {"plain": plain.ms_per_round, "spec": spec.ms_per_round},
        "ms_prefill": {"plain": plain.ms_prefill, "spec": spec.ms_prefill},
        "prompts": [_prompt_row(run) for run in runs],
    }


def _category_row(runs: Sequence[PairedRun], seed: int) -> dict[str, Any]:
    return _row(runs, merge([run.plain for run in runs], seed), merge([run.spec for run in runs], seed))


def _row(runs: Sequence[PairedRun], plain: Aggregate, spec: Aggregate) -> dict[str, Any]:
    return {
        "prompts": len(runs),
        "tau": spec.tau,
        "tau_low": spec.tau_low,
        "tau_high": spec.tau_high,
        "tokens_per_second_plain": plain.tokens_per_second,
        "tokens_per_second_spec": spec.tokens_per_second,
        "speedup": _quotient(spec.tokens_per_second, plain.tokens_per_second),
        "tokens_per_second_decode_plain": plain.tokens_per_second_decode,
        "tokens_per_second_decode_spec": spec.tokens_per_second_decode,
        "speedup_decode": _quotient(spec.tokens_per_second_decode, plain.tokens_per_second_decode),
        "passes_saved": spec.passes_saved,
        "identical_share": sum(run.first_divergence is None for run in runs) / len(runs),
        "new_tokens_plain": plain.new_tokens,
        "new_tokens_spec": spec.new_tokens,
        "target_passes_plain": plain.target_passes,
        "target_passes_spec": spec.target_passes,
    }


def _prompt_row(run: PairedRun) -> dict[str, Any]:
    return {
        "prompt_id": run.prompt_id,
        "category": run.category,
        "prompt_tokens": run.spec.prompt_tokens,
        "first_divergence": run.first_divergence,
        "new_tokens_plain": run.plain.new_tokens,
        "new_tokens_spec": run.spec.new_tokens,
        "target_passes_spec": run.spec.target_passes,
        "tau": run.spec.tau,
        "seconds_plain": dict(run.plain.seconds),
        "seconds_spec": dict(run.spec.seconds),
        "accepted_per_round": list(run.spec.accepted_per_round),
        "offered_depth_per_round": list(run.spec.offered_depth_per_round),
    }


def _quotient(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def format_report(report: Mapping[str, Any]) -> str:
    """The report as text: a line per category and overall, acceptance per depth, the time of a round."""
    overall = report["overall"]
    lines = _category_table(report)
    if overall["tau_low"] is not None:
        low, high = overall["tau_low"], overall["tau_high"]
        lines.append(f"tau, 95 % interval over prompts: {low:.2f} .. {high:.2f}")
    lines.append("")
    lines += _acceptance_table(report["acceptance"])
    lines += _time_table(report)
    return "\n".join(lines)


def _category_table(report: Mapping[str, Any]) -> list[str]:
    columns: list[tuple[str, str, Callable[[Any], str]]] = [
        ("prompts", "prompts", str),
        ("tau", "tau", lambda v: f"{v:.2f}"),
        ("tok/s plain", "tokens_per_second_plain", lambda v: f"{v:.1f}"),
        ("tok/s spec", "tokens_per_second_spec", lambda v: f"{v:.1f}"),
        ("speed-up", "speedup", lambda v: f"{v:.2f}x"),
        ("no prefill", "speedup_decode", lambda v: f"{v:.2f}x"),
        ("passes saved", "passes_saved", lambda v: f"{100 * v:.0f} %"),
        ("identical", "identical_share", lambda v: f"{100 * v:.1f} %"),
    ]
    rows = [["category", *(title for title, _, _ in columns)]]
    for name, row in [*report["categories"].items(), ("overall", report["overall"])]:
        rows.append([name, *(_shown(row[key], show) for _, key, show in columns)])
    return _aligned(rows)


def _acceptance_table(acceptance: Mapping[str, Any]) -> list[str]:
    if not acceptance["conditional_per_depth"]:
        return ["no drafts were offered", ""]
    rows = [["depth", "accepted if the one before was", "tried", "accepted, of all rounds"]]
    for index, rate in enumerate(acceptance["conditional_per_depth"]):
        trials = acceptance["conditional_trials"][index]
        share = acceptance["unconditional_per_position"][index]
        rows.append([str(index + 1), _shown(rate, _percent), str(trials), _percent(share)])
    return [*_aligned(rows), ""]


def _time_table(report: Mapping[str, Any]) -> list[str]:
    rows = [["ms per round", "draft", "target", "rest", "sum", "prefill (per prompt)"]]
    for side in ("plain", "spec"):
        split = report["ms_per_round"][side]
        cells = [split[name] for name in ("draft", "target", "rest")]
        total = None if None in cells else sum(cells)
        rows.append([side, *(_shown(v, lambda ms: f"{ms:.2f}") for v in [*cells, total, report["ms_prefill"][side]])])
    return _aligned(rows)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _shown(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Text lines with the first column left-aligned and the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


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

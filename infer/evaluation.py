"""A prompt set decoded plainly and with the head, interleaved in one process, and the report of it.

Interleaving lets both sides see the same machine: what else runs on it slows down both. Which side goes first
alternates, and both are run once untimed before.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from heads.base import DraftHead, TreePolicy
from heads.checkpoint import WEIGHTS
from heads.target import TargetAdapter
from infer.baseline import decode_plain
from infer.engine import decode_speculative
from infer.metrics import DecodeStats, merge
from infer.prefill import check_request, prefill
from infer.prompts import Prompt
from infer.report import PairedRun, build_report, format_report, is_report, pair, write_json
from infer.stopping import StopRule

_PARTIAL = "draftsmith_partial"  # key of the first line of a partial file; its value is the schema version
_SCHEMA = 1
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class EvalRequest:
    """What is evaluated. prompt_ids: rendered prompts; settings: further options that decide the result."""

    target: TargetAdapter
    head: DraftHead
    policy: TreePolicy
    max_new_tokens: int
    prompts: Sequence[Prompt]
    prompt_ids: Sequence[list[int]]
    head_dir: str
    eval_file: str
    settings: dict[str, Any]
    argv: list[str]

    def fingerprint(self) -> dict[str, Any]:
        """Everything that must agree for two runs' prompts to go into one report."""
        return {
            **self.settings,
            "head": str(Path(self.head_dir).resolve()),
            "head_sha256": _sha256(Path(self.head_dir) / WEIGHTS),
            "target": self.target.name,
            "target_revision": self.target.revision,
            "prompts": Path(self.eval_file).name,
            "prompts_sha256": _sha256(Path(self.eval_file)),
            "max_new_tokens": self.max_new_tokens,
            "tree": asdict(self.policy),
            "sampling": "greedy",
            "batch": 1,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "hardware": _hardware(self.target.device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _commit() -> str | None:
    """The checkout's commit, with "+changes" if it differs; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


@dataclass(frozen=True)
class Record:
    """One prompt's outcome. gap: the target's top-2 logit gap where the sides first differ, None if equal."""

    run: PairedRun
    gap: float | None


# ---- results that survive a kill ---------------------------------------------------------------------------


@dataclass
class Results:
    """Where the report goes: `path`, and beside it the finished prompts so far."""

    path: Path
    partial: Path

    def resume(self, fingerprint: dict[str, Any], say: Callable[[str], None]) -> dict[int, Record]:
        """Finished prompts by index from an earlier run with the same settings; else starts the file anew."""
        text = self.partial.read_text(encoding="utf-8") if self.partial.exists() else ""
        lines = text.splitlines()
        header = json.loads(lines[0])["settings"] if lines else fingerprint
        done: dict[int, Record] = {}
        if header == fingerprint:
            for line in lines[1:]:
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:  # cut off by the kill
                    break
                done[row["index"]] = _record_from(row)
        else:
            differs = sorted(k for k in {*header, *fingerprint} if header.get(k) != fingerprint.get(k))
            say(f"{self.partial} was made with other settings ({', '.join(differs)}): starting over")
        self._rewrite(fingerprint, done)
        return done

    def _rewrite(self, fingerprint: dict[str, Any], done: dict[int, Record]) -> None:
        temporary = self.partial.with_name(f".{self.partial.name}.{os.getpid()}.tmp")
        rows = [{_PARTIAL: _SCHEMA, "settings": fingerprint}]
        rows += [_record_row(index, record) for index, record in done.items()]
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        os.replace(temporary, self.partial)

    def append(self, index: int, record: Record) -> None:
        with open(self.partial, "a", encoding="utf-8") as file:
            file.write(json.dumps(_record_row(index, record)) + "\n")

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
    return isinstance(row, dict) and row.get(_PARTIAL) == _SCHEMA and isinstance(row.get("settings"), dict)


def _record_row(index: int, record: Record) -> dict[str, Any]:
    return {"index": index, "gap": record.gap, "run": asdict(record.run)}


def _record_from(row: dict[str, Any]) -> Record:
    run = dict(row["run"])
    for side in ("plain", "spec"):
        run[side] = DecodeStats(**run[side])
    return Record(PairedRun(**run), row["gap"])


# ---- the run -----------------------------------------------------------------------------------------------


def evaluate(request: EvalRequest, results: Results | None, say: Callable[[str], None]) -> int:
    """Decodes every prompt both ways, prints the table and a last line of JSON to stdout, writes the report.

    Args:
        results: from `open_results`; None: nothing is written.
        say: takes progress, a line at a time.

    Returns:
        The exit code: 1 if a prompt came out differently in full precision, where that is an error.

    Raises:
        ValueError: a prompt that cannot be decoded, before the first is.
    """
    stop = StopRule(request.target.eos_ids, request.max_new_tokens)
    for prompt, ids in zip(request.prompts, request.prompt_ids, strict=True):
        try:
            check_request(request.target, ids, stop)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id}: {error}") from error
    fingerprint = request.fingerprint()
    done = results.resume(fingerprint, say) if results else {}
    if done:
        say(f"going on after {len(done)} finished prompts")
    for index, record in _decode_all(request, stop, done, say):
        done[index] = record
        if results:
            results.append(index, record)
    records = [done[index] for index in range(len(request.prompts))]
    meta = {**fingerprint, "commit": _commit(), "command": shlex.join(["infer/generate.py", *request.argv])}
    report = build_report([record.run for record in records], meta)
    report["divergence"] = divergence = _divergence(records)
    print(format_report(report))
    print(_divergence_line(divergence, fingerprint["dtype"]))
    if results:
        results.write(report)
        say(f"wrote {results.path}")
    print(json.dumps(report["overall"]), flush=True)
    exact = request.target.dtype in (torch.float32, torch.float64)
    if exact and divergence["prompts"]:
        say(f"error: {divergence['prompts']} prompts differ from plain decoding in {fingerprint['dtype']}")
        return 1
    return 0


def _decode_all(
    request: EvalRequest, stop: StopRule, done: dict[int, Record], say: Callable[[str], None]
) -> Iterable[tuple[int, Record]]:
    todo = [index for index in range(len(request.prompts)) if index not in done]
    records = list(done.values())
    if todo:
        warm_up = StopRule(stop.eos_ids, min(_WARM_UP_TOKENS, stop.max_new_tokens))
        for plain_first in (True, False):
            _decode_both(request, todo[0], warm_up, plain_first)
    started = time.perf_counter()
    for count, index in enumerate(todo, 1):
        record = _decode_both(request, index, stop, plain_first=index % 2 == 0)
        records.append(record)
        yield index, record
        each = (time.perf_counter() - started) / count
        say(
            f"{len(records)}/{len(request.prompts)} prompts, {each:.1f} s each, "
            f"{each * (len(todo) - count):.0f} s left; so far {_so_far(records)}"
        )


def _so_far(records: Sequence[Record]) -> str:
    spec = merge([record.run.spec for record in records], resamples=1)
    plain = merge([record.run.plain for record in records], resamples=1)
    tau = "-" if spec.tau is None else f"{spec.tau:.2f}"
    if not spec.tokens_per_second or not plain.tokens_per_second:
        return f"accept length {tau}"
    return f"accept length {tau}, speed-up {spec.tokens_per_second / plain.tokens_per_second:.2f}x"


def _decode_both(request: EvalRequest, index: int, stop: StopRule, plain_first: bool) -> Record:
    prompt, ids = request.prompts[index], request.prompt_ids[index]
    outcome = {}
    for side in ("plain", "spec") if plain_first else ("spec", "plain"):
        if side == "plain":
            outcome[side] = decode_plain(request.target, ids, stop)
        else:
            outcome[side] = decode_speculative(request.target, request.head, ids, request.policy, stop)
    run = pair(prompt.id, prompt.category, outcome["plain"], outcome["spec"])
    gap = None
    if run.first_divergence is not None:
        gap = top2_gap(request.target, [*ids, *outcome["plain"][0][: run.first_divergence]])
    return Record(run, gap)


@torch.inference_mode()
def top2_gap(target: TargetAdapter, ids: Sequence[int]) -> float:
    """Difference of the two largest logits after `ids`, from one plain pass in the target's dtype."""
    logits_V = prefill(target, ids, target.new_cache(len(ids))).logits_BNV[0, -1].float()
    best = logits_V.topk(2).values.tolist()
    return float(best[0] - best[1])


def _divergence(records: Sequence[Record]) -> dict[str, Any]:
    gaps = [record.gap for record in records if record.gap is not None]
    return {
        "prompts": len(gaps),
        "gap_smallest": min(gaps, default=None),
        "gap_largest": max(gaps, default=None),
    }


def _divergence_line(divergence: dict[str, Any], dtype: str) -> str:
    if not divergence["prompts"]:
        return "every prompt's tokens are those of plain decoding"
    return (
        f"{divergence['prompts']} prompts differ from plain decoding in {dtype}; top-2 gap of the target's "
        "logits at "
        f"the first difference: {divergence['gap_smallest']:.3g} .. {divergence['gap_largest']:.3g}"
    )

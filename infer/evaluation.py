"""A prompt set decoded by every side, interleaved in one process, and the report of it.

Sides: transformers' own `generate`, our plain decoder, that one compiled (if given), and decoding with the head. They
take turns batch by batch, so that all see the same machine: what else runs on it slows down all. Which one goes first
rotates, and each is run once untimed before. One clock times all, from prompt ids on the host to new ids on the host.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LogitsProcessorList, MaxLengthCriteria

from heads.base import DraftHead
from heads.compiled import StaticPasses
from heads.formats.files import head_digest
from heads.target import TargetAdapter
from infer.audit import Chooser, replay
from infer.baseline import decode_plain
from infer.engine import DecodeOptions, RowRequest, RowResult, decode
from infer.library import Decoded, generate_batch, library_attention, timed
from infer.machine import commit_id, machine_name
from infer.prefill import check_request
from infer.prompts import Prompt
from infer.report import (
    Parting,
    PromptRun,
    Results,
    aggregates,
    build_report,
    first_divergence,
    format_report,
    open_results,
)
from infer.stopping import StopRule

__all__ = ["EvalRequest", "Results", "evaluate", "open_results"]

_WARM_UP_TOKENS = 8

# A batch of requests to its results, in their order.
PlainDecoder = Callable[[Sequence[RowRequest]], list[RowResult]]
Processors = Callable[[Sequence[int]], LogitsProcessorList | None]


@dataclass(frozen=True)
class EvalRequest:
    """What is evaluated.

    options: how the side with the head decodes; plain decoding samples, if that does, by rule "match".
    prompt_ids: rendered prompts. settings: further options that decide the result. sampling: the generation settings,
        for the record (empty: greedy).
    processors: a prompt's ids to its processors; None: none. seed: prompt i draws with seed + i.
    plain_compiled: the compiled plain decoder, if there is one. library_kwargs: of `model.generate`, which takes
        nothing from the model's own generation config (default: greedy).
    changed: that the target is not the original one (`infer.loading.Loaded`); told with every result.
    rows: prompts decoded together. control_prompts: on how many the effect of the passes' width is measured.
    """

    target: TargetAdapter
    head: DraftHead
    options: DecodeOptions
    max_new_tokens: int
    prompts: Sequence[Prompt]
    prompt_ids: Sequence[list[int]]
    head_dir: str
    eval_file: str
    settings: dict[str, Any]
    argv: list[str]
    sampling: dict[str, Any] = field(default_factory=dict)
    processors: Processors | None = None
    seed: int = 0
    plain_compiled: PlainDecoder | None = None
    library_kwargs: dict[str, Any] = field(default_factory=dict)
    rows: int = 1
    control_prompts: int = 4
    changed: str | None = None

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows is {self.rows}, expected 1 or more")
        if self.control_prompts < 0:
            raise ValueError(f"control_prompts is {self.control_prompts}, expected 0 or more")

    @property
    def greedy(self) -> bool:
        return self.options.rule == "greedy"

    @property
    def comparable(self) -> bool:
        """Drafts change no token, up to rounding: the texts of the sides with and without head can be compared."""
        return self.options.rule in ("greedy", "match")

    @property
    def exact(self) -> bool:
        return self.target.dtype in (torch.float32, torch.float64)

    @property
    def lossy(self) -> str | None:
        if self.options.verifier.lossless:
            return self.changed
        return f"rule {self.options.rule!r} does not follow the target's distribution"

    def fingerprint(self) -> dict[str, Any]:
        """Everything that must agree for two runs' prompts to go into one report; as JSON gives it back."""
        target = self.target
        raw = {
            **self.settings,
            "head": str(Path(self.head_dir).resolve()),
            "head_sha256": head_digest(Path(self.head_dir)),
            "target": target.name,
            "target_revision": target.revision,
            "prompts": Path(self.eval_file).name,
            "prompts_sha256": _sha256(Path(self.eval_file)),
            "max_new_tokens": self.max_new_tokens,
            "tree": asdict(self.options.policy),
            "rule": self.options.rule,
            "proposal": self.options.proposal,
            "lossy": self.lossy,
            "sampling": self.sampling or "greedy",
            "seed": self.seed,
            "batch": self.rows,
            "baselines": ["library", "plain", *(["compiled"] if self.plain_compiled else [])],
            "library_kwargs": self.library_kwargs,
            "library_attention": library_attention(target),
            "attention": target.config._attn_implementation,
            "control_prompts": self.control_prompts,
            "exact_clock": self.options.exact_clock,
            "compiled": self.options.compiled,
            "dtype": str(target.dtype).removeprefix("torch."),
            "hardware": machine_name(target.device),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        return dict(json.loads(json.dumps(raw, default=str)))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- the run -----------------------------------------------------------------------------------------------


def evaluate(request: EvalRequest, results: Results | None, say: Callable[[str], None]) -> int:
    """Decodes every prompt by every side, prints the tables and a last line of JSON to stdout, writes the report.

    Args:
        results: from `open_results`; None: nothing is written.
        say: takes progress, a line at a time.

    Returns:
        The exit code: 1 if texts differ in full precision, where that is an error.

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
        say(f"going on after {sum(map(len, done.values()))} finished prompts")
    for batch, runs in _decode_all(request, stop, done, say):
        done[batch] = runs
        if results:
            results.append(batch, runs)
    ordered = [run for batch in sorted(done) for run in done[batch]]
    meta = {**fingerprint, "commit": commit_id(), "command": shlex.join(["infer/generate.py", *request.argv])}
    report = build_report(ordered, meta)
    print(format_report(report))
    if results:
        results.write(report)
        say(f"wrote {results.path}")
    print(json.dumps(report["overall"]), flush=True)
    errors = _errors(request, ordered, report["divergence"])
    for text in errors:
        say(f"error: {text}")
    return 1 if errors else 0


def _errors(request: EvalRequest, runs: Sequence[PromptRun], found: dict[str, Any]) -> list[str]:
    """What must not be in full precision. Elsewhere, and where tokens are drawn freely, nothing is an error here.

    A baseline that is not our plain decoder computes in another order, so its near-ties, within the tolerance, may fall
    the other way. Drawn tokens (rule "match") may differ where a uniform number falls on a rounding error: about once
    in 1e6 tokens, so one prompt in a hundred (and one in any case) is let pass.
    """
    if not request.exact or not request.comparable:
        return []
    dtype = str(request.target.dtype).removeprefix("torch.")
    errors = []
    allowed = 0 if request.greedy else max(1, len(runs) // 100)
    if found["prompts"] > allowed:
        errors.append(f"{found['prompts']} prompts differ from plain decoding in {dtype}")
    for name in ("library", "compiled"):
        side = found.get(name)
        count = 0 if side is None else side["prompts"] if side["unexplained"] is None else side["unexplained"]
        if request.greedy and count:
            errors.append(f"{count} prompts of side {name!r} differ from our plain decoding in {dtype}")
    return errors


def _batches(request: EvalRequest) -> list[range]:
    count = len(request.prompts)
    return [range(first, min(first + request.rows, count)) for first in range(0, count, request.rows)]


def _decode_all(
    request: EvalRequest, stop: StopRule, done: dict[int, list[PromptRun]], say: Callable[[str], None]
) -> Iterable[tuple[int, list[PromptRun]]]:
    batches = _batches(request)
    todo = [batch for batch in range(len(batches)) if batch not in done]
    runs = [run for part in done.values() for run in part]
    if todo:
        for indices in _shapes(request, [batches[batch] for batch in todo]):
            _decode_sides(request, indices, stop, 0, warm_up=True)
    started = time.perf_counter()
    for count, batch in enumerate(todo, 1):
        outcome = _decode_sides(request, batches[batch], stop, batch)
        part = _compare(request, batch, batches[batch], outcome)
        runs += part
        yield batch, part
        each = (time.perf_counter() - started) / count
        say(
            f"{len(runs)}/{len(request.prompts)} prompts, {each:.1f} s a batch, "
            f"{each * (len(todo) - count):.0f} s left; so far {_so_far(request, runs)}"
        )


def _shapes(request: EvalRequest, batches: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The first batch of each shape that compiled passes know; the first of all if nothing is compiled."""
    if not request.options.compiled and request.plain_compiled is None:
        return list(batches[:1])
    found: dict[Any, Sequence[int]] = {}
    for indices in batches:
        slots = max(len(request.prompt_ids[index]) for index in indices) + request.max_new_tokens
        sizes = (slots + 1, slots + request.options.policy.room)  # without drafts, and with
        found.setdefault((len(indices), *map(StaticPasses.capacity, sizes)), indices)
    return list(found.values())


def _so_far(request: EvalRequest, runs: Sequence[PromptRun]) -> str:
    sides = aggregates(runs, resamples=1)
    tau = sides["spec"].tau
    text = f"accept length {'-' if tau is None else f'{tau:.2f}'}"
    speed = {name: side.tokens_per_second for name, side in sides.items()}
    best = max((value for name, value in speed.items() if name != "spec" and value), default=None)
    if best and speed["spec"]:
        text += f", speed-up {speed['spec'] / best:.2f}x"
    return f"LOSSY: {text}" if request.lossy else text


# ---- the sides ---------------------------------------------------------------------------------------------


def _decode_sides(
    request: EvalRequest, indices: Sequence[int], stop: StopRule, turn: int, warm_up: bool = False
) -> dict[str, list[Decoded]]:
    """One batch by every side, each in its turn; `turn` rotates which is the first. A warm-up ends after a few tokens,
    with memory and shapes as for all of them."""
    rows = [_row_request(request, index, stop, warm_up) for index in indices]
    sides: dict[str, Callable[[], list[Decoded]]] = {
        "library": lambda: _library(request, rows, _WARM_UP_TOKENS if warm_up else stop.max_new_tokens),
        "plain": lambda: _plain(request, rows),
        "compiled": lambda: _ours(request, rows, request.plain_compiled),
        "spec": lambda: _ours(request, rows, _with_head(request)),
    }
    if request.plain_compiled is None:
        del sides["compiled"]
    names = list(sides)
    first = turn % len(names)
    return {name: sides[name]() for name in [*names[first:], *names[:first]]}


def _row_request(request: EvalRequest, index: int, stop: StopRule, warm_up: bool = False) -> RowRequest:
    ids = request.prompt_ids[index]
    processors = request.processors(ids) if request.processors else None
    if warm_up:
        stop = replace(stop, criteria=[MaxLengthCriteria(len(ids) + _WARM_UP_TOKENS)])
    return RowRequest(ids, stop, processors=processors, seed=request.seed + index)


def _with_head(request: EvalRequest) -> PlainDecoder:
    return lambda rows: decode(request.target, request.head, rows, request.options)


def _plain(request: EvalRequest, rows: Sequence[RowRequest]) -> list[Decoded]:
    if request.greedy and len(rows) == 1 and not rows[0].processors:
        seconds, alone = timed(request.target, lambda: decode_plain(request.target, rows[0].prompt_ids, rows[0].stop))
        return _booked([alone], seconds)
    # Without drafts "top_k" and "sampled" are one law, which "match" draws from too.
    rule = "greedy" if request.greedy else "match"
    options = replace(request.options, rule=rule, proposal="top_k", compiled=False)
    return _ours(request, rows, lambda rows: decode(request.target, None, rows, options))


def _ours(request: EvalRequest, rows: Sequence[RowRequest], decoder: PlainDecoder | None) -> list[Decoded]:
    assert decoder is not None
    seconds, found = timed(request.target, lambda: decoder(rows))
    return _booked([(row.ids, row.stats) for row in found], seconds)


def _booked(rows: list[Decoded], seconds: float) -> list[Decoded]:
    """Books what the decoder's own clock has not seen of the batch's seconds (set-up, checks) as "rest"."""
    unseen = seconds - max(stats.total_seconds for _, stats in rows)
    for ids, stats in rows:
        assert stats.new_tokens == len(ids), f"a row counts {stats.new_tokens} tokens, emitted {len(ids)}"
        stats.seconds["rest"] = stats.seconds.get("rest", 0.0) + max(unseen, 0.0)
    return rows


def _library(request: EvalRequest, rows: Sequence[RowRequest], max_new_tokens: int) -> list[Decoded]:
    stop = replace(rows[0].stop, max_new_tokens=max_new_tokens, criteria=())
    settings: dict[str, Any] = {"do_sample": False, **request.library_kwargs}
    if settings["do_sample"]:
        settings = {"top_k": 0, **settings}  # the library's own default is 50
    return generate_batch(request.target, [row.prompt_ids for row in rows], stop, settings, rows[0].seed)


# ---- equality ----------------------------------------------------------------------------------------------


def _compare(
    request: EvalRequest, batch: int, indices: Sequence[int], outcome: dict[str, list[Decoded]]
) -> list[PromptRun]:
    """The batch's runs, each side's text compared with plain decoding's where that has a meaning."""
    runs = []
    for place, index in enumerate(indices):
        prompt, plain = request.prompts[index], outcome["plain"][place][0]
        names = [name for name in ("library", "compiled", "spec") if name in outcome] if request.greedy else ["spec"]
        places = {name: first_divergence(plain, outcome[name][place][0]) for name in names if request.comparable}
        noise = None
        if request.comparable and index < request.control_prompts:
            chooser = _chooser(request, index)
            control = replay(
                request.target, request.prompt_ids[index], plain, request.options.policy.total, chooser, request.rows
            )
            noise, places["control"] = control.noise, control.parts_at
        sides = {name: rows[place][1] for name, rows in outcome.items()}
        parted = _partings(request, index, plain, places)
        runs.append(PromptRun(prompt.id, prompt.category, sides, batch, parted, noise))
    return runs


def _chooser(request: EvalRequest, index: int) -> Chooser:
    processors = request.processors(request.prompt_ids[index]) if request.processors else None
    return Chooser(processors, None if request.greedy else request.seed + index)


def _partings(
    request: EvalRequest, index: int, plain: Sequence[int], places: dict[str, int | None]
) -> dict[str, Parting | None]:
    """With the gap of plain decoding's scores at each place, from its passes made again."""
    last = max((at for at in places.values() if at is not None), default=None)
    gaps: list[float] = []
    if last is not None and request.greedy:
        chooser = _chooser(request, index)
        gaps = replay(request.target, request.prompt_ids[index], plain[: last + 1], chooser=chooser).gaps
    return {
        name: None if at is None else Parting(at, gaps[at] if at < len(gaps) else None) for name, at in places.items()
    }

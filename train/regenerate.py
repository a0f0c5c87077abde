"""Answers by the target, and prompts too: the stage that turns prompts (or nothing) into token rows.

Work is cut into waves of `data.batch_size` rows. A wave depends on the seed, its number and its prompts only, is
decoded by one single-threaded process, and is written whole or not at all; a killed run goes on with the missing
waves, and the result does not depend on how many processes made it.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from heads.adapter import adapter_digest
from heads.embedded import resolve_target
from heads.target import TargetAdapter
from infer.prefill import check_length
from train.answering import Answerer, Wave
from train.config import DataConfig, TargetConfig
from train.conversations import Conversation, DropCounts, TokenRow
from train.files import check_manifest, write_text

_PROGRESS_SECONDS = 15.0


_worker: Answerer
_counter: Any = None


def _start_worker(target: TargetConfig, data: DataConfig, device: str, counter: Any) -> None:
    global _worker, _counter
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    _counter = counter
    adapter, tokenizer = load_target(target, device)
    check_length(adapter, data.max_length, "data.max_length")
    _worker = Answerer(adapter, tokenizer, data)


def _run_wave(wave: Wave, path: Path) -> dict[str, Any]:
    def count(tokens: int) -> None:
        with _counter.get_lock():
            _counter.value += tokens

    started = time.perf_counter()
    result = _worker.run(wave, count)
    result["seconds"] = round(time.perf_counter() - started, 2)
    write_text(path, json.dumps(result))
    return result


def load_target(target: TargetConfig, device: str) -> tuple[TargetAdapter, PreTrainedTokenizerBase]:
    """The adapter and tokenizer that a target config names."""
    adapter = TargetAdapter.load(
        target.path,
        dtype=target.dtype,
        device=device,
        revision=target.revision,
        trust_remote_code=target.trust_remote_code,
        cache_dir=target.cache_dir,
        adapter=target.adapter,
    )
    return adapter, load_tokenizer(target)


def load_tokenizer(target: TargetConfig) -> PreTrainedTokenizerBase:
    path = resolve_target(target.path, target.cache_dir)
    try:
        return AutoTokenizer.from_pretrained(path, revision=target.revision, trust_remote_code=target.trust_remote_code)
    except OSError as error:
        raise ValueError(f"target.path: cannot load a tokenizer from {path!r}: {error}") from error


# ---- all waves, in the main process --------------------------------------------------------------------------


def make_rows(
    target: TargetConfig,
    data: DataConfig,
    conversations: Sequence[Conversation] | None,
    *,
    device: str = "cpu",
    log: Callable[[str], None] = print,
) -> tuple[list[TokenRow], DropCounts]:
    """Answers `conversations`, or invents and answers prompts until `data.tokens` answer tokens are there.

    Finished waves under data.work_dir/waves are reused. Rows come in the order of their waves, duplicates (same
    prompt) dropped.

    Raises:
        ValueError: data.work_dir holds waves made with other settings (each difference is named), or the target
            makes nothing usable.
    """
    folder = Path(data.work_dir) / "waves"
    folder.mkdir(parents=True, exist_ok=True)
    key = wave_key(target, data, conversations)
    check_manifest(Path(data.work_dir) / "waves.json", key, "data.work_dir", "answers")
    budget = data.tokens if conversations is None else None
    results = _run_waves(target, data, list(_waves(data, conversations)), folder, budget, device, log)
    rows: list[TokenRow] = []
    counts, seen, total = DropCounts(), set(), 0
    for result in results:
        counts.rows_in += result["counts"]["rows_in"]
        for reason, number in result["counts"]["reasons"].items():
            counts.reasons[reason] = counts.reasons.get(reason, 0) + number
        for raw in result["rows"]:
            row = TokenRow(
                raw["id"],
                tuple(raw["input_ids"]),
                tuple((a, b) for a, b in raw["spans"]),
                raw["source"],
                raw["truncated"],
            )
            if conversations is None and row.split_key in seen:
                counts.add("duplicate prompt")
            elif data.max_rows is not None and len(rows) >= data.max_rows:
                counts.add("beyond data.max_rows")
            else:
                seen.add(row.split_key)
                rows.append(row)
        total += result["tokens"]
    counts.rows_out = len(rows)
    counts.check()
    if not rows:
        raise ValueError(f"target.path: {target.path} made no usable row ({counts}); give conversations in data.path")
    return rows, counts


def _waves(data: DataConfig, conversations: Sequence[Conversation] | None) -> Iterator[Wave]:
    if conversations is None:
        # Enough if a twentieth of what could be decoded is kept; a target that keeps nothing is given up on before.
        for index in range(20 + 20 * data.tokens // (data.batch_size * data.answer_tokens)):
            yield Wave(index, data.batch_size, None)
    else:
        # Rows of similar length share a wave, so that little is padding. The order is fixed by the rows alone.
        by_length = sorted(conversations, key=lambda c: (sum(len(m["content"]) for m in c.messages), c.content_key))
        for index, start in enumerate(range(0, len(by_length), data.batch_size)):
            prompts = tuple(by_length[start : start + data.batch_size])
            yield Wave(index, len(prompts), prompts)


def _run_waves(
    target: TargetConfig,
    data: DataConfig,
    waves: Sequence[Wave],
    folder: Path,
    budget: int | None,
    device: str,
    log: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Results of the first waves that reach the budget (or of all), running what is missing."""
    path = {wave.index: folder / f"{wave.index:06d}.json" for wave in waves}
    results: dict[int, dict[str, Any]] = {}
    for wave in waves:
        if path[wave.index].is_file():
            results[wave.index] = json.loads(path[wave.index].read_text())
    if results:
        log(f"data: {len(results)} finished waves found in {folder}")
    missing = iter([wave for wave in waves if wave.index not in results])

    def enough() -> int | None:
        """How many leading waves suffice, or None."""
        tokens = 0
        for number, wave in enumerate(waves):
            if wave.index not in results:
                return None
            tokens += results[wave.index]["tokens"]
            if budget is not None and tokens >= budget:
                return number + 1
        return len(waves)

    if (number := enough()) is not None:
        return [results[wave.index] for wave in waves[:number]]
    processes = data.processes or (usable_cores() if device == "cpu" else 1)
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    progress = _Progress(counter, data, waves, budget, len(results))
    pool = ProcessPoolExecutor(processes, context, _start_worker, (target, data, device, counter))
    try:
        running: dict[Future[dict[str, Any]], Wave] = {}
        while (number := enough()) is None:
            while len(running) < processes and (todo := next(missing, None)) is not None:
                running[pool.submit(_run_wave, todo, path[todo.index])] = todo
            finished, _ = wait(running, timeout=_PROGRESS_SECONDS, return_when=FIRST_COMPLETED)
            for future in finished:
                results[running.pop(future).index] = future.result()
            _give_up_on_nothing(results)
            log(progress.line(results))
    finally:
        for process in list((pool._processes or {}).values()):  # surplus waves: their results are not needed
            process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)
    return [results[wave.index] for wave in waves[:number]]


def _give_up_on_nothing(results: dict[int, dict[str, Any]], after: int = 4) -> None:
    """Raises ValueError, with the reasons, when the first waves together kept no row."""
    if len(results) < after or any(result["rows"] for result in results.values()):
        return
    reasons: dict[str, int] = {}
    for result in results.values():
        for reason, number in result["counts"]["reasons"].items():
            reasons[reason] = reasons.get(reason, 0) + number
    raise ValueError(f"target.path: no usable row in {len(results)} waves ({reasons}); give conversations in data.path")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Progress:
    """Rate over everything decoded (prompts and answers), and the time left."""

    def __init__(self, counter: Any, data: DataConfig, waves: Sequence[Wave], budget: int | None, before: int) -> None:
        self.counter, self.budget, self.waves = counter, budget, len(waves)
        self.started, self.before = time.perf_counter(), before
        # Until a wave is finished, guess: 1.75 decoded tokens per kept answer token, or answers of half the limit.
        rows = sum(wave.rows for wave in waves)
        self.expected = 1.75 * budget if budget is not None else 0.5 * rows * data.answer_tokens

    def line(self, results: dict[int, dict[str, Any]]) -> str:
        seconds = max(time.perf_counter() - self.started, 1e-9)
        answers = sum(r["tokens"] for r in results.values())
        share = min(1.0, answers / self.budget if self.budget else len(results) / self.waves)
        rate = self.counter.value / seconds
        done = len(results) - self.before
        if done > 0 and share > 0:
            left = (len(results) / share - len(results)) * seconds / done
        else:
            left = max(0.0, self.expected * (1 - share) - self.counter.value) / max(rate, 1e-9)
        return (
            f"data: {len(results)} waves, {answers} answer tokens kept ({share:.0%}), "
            f"{rate:.0f} tokens/s decoded, left about {left / 60:.1f} min"
        )


def wave_key(target: TargetConfig, data: DataConfig, conversations: Sequence[Conversation] | None) -> dict[str, Any]:
    """Everything that a wave's content depends on."""
    template = getattr(load_tokenizer(target), "chat_template", None) or ""
    prompts = None
    if conversations is not None:
        prompts = hashlib.sha256("".join(c.content_key for c in conversations).encode()).hexdigest()[:16]
    fields = ("seed", "max_length", "prompt_tokens", "answer_tokens", "prompt_temperature", "answer_temperature")
    return {
        "target": target.path,
        "revision": target.revision,
        "dtype": target.dtype,
        "adapter": target.adapter,
        "adapter_sha256": adapter_digest(target.adapter),
        "template": hashlib.sha256(str(template).encode()).hexdigest()[:16],
        "prompts": prompts,
        **{f"data.{name}": getattr(data, name) for name in (*fields, "greedy_fraction", "top_k", "batch_size")},
    }

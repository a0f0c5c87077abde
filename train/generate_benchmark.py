"""The benchmark of generation: continuous batches (`infer.batched`) against the library's batched `generate`, in turn.

Both answer the same prompts with the same model, on the same cores, at most `rows` at a time in a process, by the same
law, until the end of turn or the limit. Ours does so as the data stage does: in one process per core, of one thread
each. The library has one process with all threads, as it is used, or as many as ours (`--library-processes`). It gets
its batches sorted by length, so that little is padding; it goes on until a batch's last row has ended. Tokens are those
up to the end of turn. A figure is the median over the repeats.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any, TypeVar

import torch

from heads.target import TargetAdapter, pick_device
from infer.batched import BatchedDecoder, Program, Request
from infer.library import generate_batch
from infer.machine import commit_id, library_versions, machine_name
from infer.prompts import Prompt, encode_prompt, read_prompts, spread
from infer.report import aligned
from infer.stopping import StopRule
from train.chat_mask import end_of_turn_ids
from train.config import TargetConfig
from train.regenerate import load_tokenizer, usable_cores

T = TypeVar("T")

# What is asked without --prompts: every task about every topic, answers of all lengths.
_TASKS = (
    "What is {}? Answer in one sentence.",
    "Explain {} to a child.",
    "List five facts about {}.",
    "Write a short poem about {}.",
    "Is {} important? Answer yes or no.",
    "Write a paragraph on the history of {}.",
    "Give me a title for an essay about {}.",
    "Compare {} with something similar, and say which of the two you would rather study and why.",
)
_TOPICS = (
    "photosynthesis",
    "the steam engine",
    "prime numbers",
    "bread",
    "the French Revolution",
    "sorting algorithms",
    "volcanoes",
    "chess",
    "the human heart",
    "inflation",
    "bees",
    "jazz",
)


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    """Options of `scripts/benchmark.py generate`."""
    add = parser.add_argument
    add("--target", default="embedded", help='hub id, directory, or "embedded" (default)')
    add("--cache-dir", metavar="DIR", help="where the embedded target is kept")
    add("--device", default="auto", help="auto (default): cuda if there is one, else cpu")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="auto", help="auto (default): as stored, or float32 on a CPU that lacks it")
    add("--prompts", metavar="FILE", help="JSONL, as for generate.py --eval; default: built-in questions")
    add("--count", type=int, default=64, metavar="N", help="prompts; default: 64")
    add("--rows", type=int, default=32, metavar="N", help="rows side by side in a process; default: 32")
    add("--tokens", type=int, default=128, metavar="N", help="most new tokens of a prompt; default: 128")
    add("--temperature", default="0", metavar="LIST", help="one run for each; 0 (default): greedy")
    add("--top-k", type=int, default=100, metavar="N", help="where it is not greedy; default: 100")
    add("--repeats", type=int, default=5, metavar="N", help="each figure is a median of N; default: 5")
    add("--threads", type=int, metavar="N", help="CPU threads of a side; default: torch's choice")
    add(
        "--processes",
        type=int,
        metavar="N",
        help="of ours, that share the threads; default: one per thread, or per GPU",
    )
    add("--library-processes", type=int, default=1, metavar="N", help="of the library's; default: 1")


def run_generate(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measures, prints a table, and a last line of JSON.

    Raises:
        ValueError: bad values or files, or a target that cannot be loaded.
    """
    for name in ("count", "rows", "tokens", "top_k", "repeats", "threads", "processes", "library_processes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected 1 or more")
    temperatures = _temperatures(args.temperature)
    prompts = _prompts(args.prompts, args.count)
    device = torch.device(pick_device(args.device))
    threads = args.threads or min(torch.get_num_threads(), usable_cores())
    ours = args.processes or (threads if device.type == "cpu" else 1)
    tokenizer = load_tokenizer(TargetConfig(path=args.target, cache_dir=args.cache_dir))
    ids = sorted((encode_prompt(tokenizer, prompt, False, {}) for prompt in prompts), key=len)
    capacity, prefix = max(map(len, ids)) + args.tokens, _common(ids)
    if args.count < max(ours, args.library_processes):
        raise ValueError(f"--count is {args.count}, expected a prompt for every process")
    task = _Task(args.target, args.cache_dir, args.dtype, str(device), args.rows, capacity, args.top_k, tuple(prefix))
    runs = []
    with _Side(task, ours, threads) as mine, _Side(task, args.library_processes, threads) as theirs:
        for temperature in temperatures:
            runs.append(_measure(mine, theirs, ids, args.tokens, temperature, args.repeats))
            print(f"\n{len(ids)} prompts, {args.rows} rows, at most {args.tokens} tokens, temperature {temperature:g}:")
            print("\n".join(_table(runs[-1])), flush=True)
    result = {
        "hardware": machine_name(device),
        "threads": threads,
        "processes": {"ours": ours, "library": args.library_processes},
        "dtype": mine.dtype,
        "versions": library_versions(),
        "target": args.target,
        "prompts": args.prompts or "built in",
        "count": len(ids),
        "rows": args.rows,
        "tokens": args.tokens,
        "top_k": args.top_k,
        "repeats": args.repeats,
        "runs": runs,
        "commit": commit_id(),
        "command": shlex.join(["scripts/benchmark.py", *argv]),
    }
    print(json.dumps(result), flush=True)


def _temperatures(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--temperature is {text!r}, expected numbers separated by commas") from error
    if not all(0 <= one < float("inf") for one in found):
        raise ValueError(f"--temperature is {text!r}, expected 0 (greedy) or more")
    return found


def _prompts(path: str | None, count: int) -> list[Prompt]:
    if path is None:
        texts = [task.format(topic) for topic in _TOPICS for task in _TASKS]
        found = [Prompt(str(number), "built in", text) for number, text in enumerate(texts)]
    else:
        found = read_prompts(path, "--prompts")
    if len(found) < count:
        raise ValueError(f"--count is {count}, but there are {len(found)} prompts; lower it, or give more by --prompts")
    return spread(found, count) if path is not None else found[:count]


# ---- a process of a side -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """What a process loads. rows, capacity, prefix: of its decoder."""

    target: str
    cache_dir: str | None
    dtype: str
    device: str
    rows: int
    capacity: int
    top_k: int
    prefix: tuple[int, ...]


@dataclass(frozen=True)
class _Loaded:
    task: _Task
    target: TargetAdapter
    stops: frozenset[int]


_barrier: Barrier  # the parts of a side begin together, each in a process of its own
_loaded: _Loaded
_decoder: BatchedDecoder


def _enter(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _load(task: _Task, threads: int) -> str:
    """Returns the precision."""
    global _loaded
    _barrier.wait()
    torch.set_num_threads(threads)
    if task.device == "cpu":
        torch.set_flush_denormal(True)  # as in the stage
    target = TargetAdapter.load(task.target, dtype=task.dtype, device=task.device, cache_dir=task.cache_dir)
    tokenizer = load_tokenizer(TargetConfig(path=task.target, cache_dir=task.cache_dir))
    _loaded = _Loaded(task, target, end_of_turn_ids(tokenizer, sorted(target.eos_ids)))
    return str(target.dtype).removeprefix("torch.")


def _start() -> tuple[float, bool]:
    """Makes the decoder. Seconds, and whether it is exact."""
    global _decoder
    _barrier.wait()
    began, task = time.perf_counter(), _loaded.task
    _decoder = BatchedDecoder(_loaded.target, task.rows, task.capacity, task.top_k, _loaded.stops, task.prefix)
    return time.perf_counter() - began, _decoder.exact


def _ours(ids: Sequence[list[int]], tokens: int, temperature: float, seed: int) -> list[list[int]]:
    found: dict[int, list[int]] = {}

    def program(index: int) -> Program[tuple[int, list[int]]]:
        return index, (yield Request(ids[index], tokens, temperature, seed + index))

    _barrier.wait()
    # The longest prompts first, as in the stage.
    _decoder.run(map(program, reversed(range(len(ids)))), lambda result: found.update([result]))
    return [found[index] for index in range(len(ids))]


def _library(ids: Sequence[list[int]], tokens: int, temperature: float, seed: int) -> list[list[int]]:
    law: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        law = {"do_sample": True, "temperature": temperature, "top_k": _loaded.task.top_k}
    stop, found, rows = StopRule(_loaded.stops, tokens), [], _loaded.task.rows
    _barrier.wait()
    for start in range(0, len(ids), rows):
        found += generate_batch(_loaded.target, ids[start : start + rows], stop, law, seed + start)
    return [text for text, _ in found]


# ---- the main process --------------------------------------------------------------------------------------------


class _Side:
    """Processes that load the target once; each gets its share of the prompts of every repeat."""

    def __init__(self, task: _Task, processes: int, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, context, _enter, (context.Barrier(processes),))
        self._task, self._threads, self.processes = task, max(1, threads // processes), processes

    def __enter__(self) -> _Side:
        self.dtype = self._everywhere(_load, self._task, self._threads)[0]
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _everywhere(self, work: Callable[..., T], *args: Any) -> list[T]:
        return [future.result() for future in [self._pool.submit(work, *args) for _ in range(self.processes)]]

    def start(self) -> tuple[float, bool]:
        """Makes the decoders. Seconds of the slowest, and whether all are exact."""
        found = self._everywhere(_start)
        return max(seconds for seconds, _ in found), all(exact for _, exact in found)

    def answer(self, how: Callable[..., list[list[int]]], ids: Sequence[list[int]], *law: Any) -> list[list[int]]:
        """New tokens of each prompt. Every process has prompts of all lengths."""
        n, texts = self.processes, [list[int]() for _ in ids]
        shares = [self._pool.submit(how, ids[i::n], *law) for i in range(n)]
        for i, share in enumerate(shares):
            texts[i::n] = share.result()
        return texts


@dataclass
class _Found:
    """Of one way to generate: seconds and tokens of each repeat, texts of the first."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    def add(self, side: _Side, how: Callable[..., list[list[int]]], ids: Sequence[list[int]], *law: Any) -> None:
        began = time.perf_counter()
        texts = side.answer(how, ids, *law)
        self.seconds.append(time.perf_counter() - began)
        self.tokens.append(sum(map(len, texts)))
        self.texts = self.texts or texts

    @property
    def rates(self) -> list[float]:
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens_per_second": statistics.median(self.rates),
            "seconds": self.seconds,
            "tokens": self.tokens,
            "mean_tokens_per_prompt": statistics.mean(self.tokens) / len(self.texts),
        }


def _measure(
    mine: _Side, theirs: _Side, ids: Sequence[list[int]], tokens: int, temperature: float, repeats: int
) -> dict[str, Any]:
    start, exact = mine.start()
    ours, library = _Found(), _Found()
    for repeat in range(repeats):
        law = (tokens, temperature, repeat * len(ids))
        ours.add(mine, _ours, ids, *law)
        library.add(theirs, _library, ids, *law)
        print(
            f"{repeat + 1}/{repeats} repeats: ours {ours.rates[-1]:.1f}, library {library.rates[-1]:.1f} tokens/s",
            file=sys.stderr,
            flush=True,
        )
    ratios = [a / b for a, b in zip(ours.rates, library.rates, strict=True)]
    same = sum(a == b for a, b in zip(ours.texts, library.texts, strict=True))
    return {
        "temperature": temperature,
        "ours": ours.to_dict() | {"seconds_to_start": start, "exact": exact},
        "library": library.to_dict(),
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "same_texts": same if temperature == 0 else None,
    }


def _common(ids: Sequence[list[int]]) -> list[int]:
    """What all prompts begin with: the template, and its system prompt."""
    first, last = min(ids), max(ids)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(map(len, ids)))
    return first[: min(length, min(map(len, ids)) - 1)]


def _table(run: dict[str, Any]) -> list[str]:
    rows = [["", "tokens/s", "seconds", "tokens per prompt"]]
    for name in ("ours", "library"):
        one = run[name]
        seconds = statistics.median(one["seconds"])
        rows.append([name, f"{one['tokens_per_second']:.1f}", f"{seconds:.1f}", f"{one['mean_tokens_per_prompt']:.1f}"])
    table = aligned(rows)
    same = "" if run["same_texts"] is None else f", {run['same_texts']} texts the same"
    table.append(f"ours over the library: {run['speedup']:.2f}x{same}")
    return table

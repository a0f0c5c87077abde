"""The decoder's benchmark: cost of passes, host overhead, and tokens per second of every way to decode, interleaved.

All ways decode the same prompts to the same number of tokens (no end of sequence), in turn, `repeats` times; a figure
is the median over the repeats. Beside the times stand counters that no machine changes: passes, rounds, tokens.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from heads.base import TreePolicy
from heads.target import TargetAdapter
from infer.baseline import decode_plain
from infer.calibration import describe
from infer.costs import CalibrationRequest, measure_costs
from infer.engine import DecodeOptions, RowRequest, decode
from infer.library import library_greedy
from infer.loading import Loaded, add_model_options, load_models
from infer.machine import commit_id, machine_name, wait
from infer.metrics import DecodeStats
from infer.prompts import add_prompt_options, encode_prompt, read_prompts, spread
from infer.report import aligned
from infer.stopping import StopRule
from infer.trees import read_tree, tree_beside

TREES = (TreePolicy(1, 4, 5), TreePolicy(4, 3, 8), TreePolicy(6, 4, 16), TreePolicy(8, 5, 32), TreePolicy(10, 6, 60))

# One way to decode a batch of prompts: their stats; `seconds` of the first are the whole batch's.
_Way = Callable[[Sequence[Sequence[int]]], list[DecodeStats]]


def add_decode_options(parser: argparse.ArgumentParser) -> None:
    """Options of `scripts/benchmark.py decode`."""
    add_model_options(parser)
    add = parser.add_argument_group("benchmark").add_argument
    add("--prompts", metavar="FILE", required=True, help="JSONL, as for generate.py --eval")
    add("--rows", default="1,4,16", metavar="LIST", help="batch sizes; default: 1,4,16")
    add("--tokens", type=int, default=64, metavar="N", help="new tokens per prompt; default: 64")
    add("--repeats", type=int, default=5, metavar="N", help="each figure is a median of N; default: 5")
    add("--compile", action="store_true", help="also compiled plain decoding and compiled trees, for one row")
    add_prompt_options(parser)


def run_decode(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measures, prints tables, and a last line of JSON.

    Raises:
        ValueError: bad values or files.
    """
    sizes = _sizes(args.rows)
    if args.tokens < 2 or args.repeats < 1:
        raise ValueError(f"--tokens is {args.tokens}, --repeats {args.repeats}, expected 2 and 1 or more")
    prompts = spread(read_prompts(args.prompts, "--prompts"), max(sizes))
    if len(prompts) < max(sizes):
        raise ValueError(f"--rows asks for {max(sizes)} prompts, {args.prompts} has {len(prompts)}; lower --rows")
    loaded = load_models(args)
    ids = [encode_prompt(loaded.tokenizer, prompt, args.raw, args.template_kwargs) for prompt in prompts]
    assert loaded.head is not None, "load_models leaves the head out only if asked to"
    costs = measure_costs(loaded.target, loaded.head, CalibrationRequest(args.head, repeats=args.repeats), _say)
    target = loaded.target
    result: dict[str, Any] = {
        "hardware": machine_name(target.device),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": target.name,
        "head": args.head,
        "tokens": args.tokens,
        "repeats": args.repeats,
        "weights_bytes": _weight_bytes(target),
        "read_ms": _read_ms(target, args.repeats),
        "target_ms": costs.target_ms,
        "commit_ms": costs.commit_ms,
        "level_ms": costs.level_ms,
    }
    one, sixteen = costs.target_ms[1], costs.target_ms[16]
    print(f"reading all weights once: {result['read_ms']:.1f} ms ({result['weights_bytes'] / 1e6:.0f} MB)")
    print(f"target pass, ms by tokens: {', '.join(f'{n}: {ms:.1f}' for n, ms in costs.target_ms.items())}")
    print(f"pass of 16 over pass of 1: {sixteen / one:.2f}")
    for rows in sizes:
        ways = _ways(loaded, args, rows)
        result[f"rows_{rows}"] = table = _measure(ways, ids[:rows], args.repeats, f"{rows} rows")
        print(f"\n{rows} rows, {args.tokens} tokens each:")
        print("\n".join(_table(table)))
    result |= {"commit": commit_id(), "command": shlex.join(["scripts/benchmark.py", *argv])}
    print(json.dumps(result), flush=True)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--rows is {text!r}, expected batch sizes separated by commas") from error
    if min(sizes) < 1:
        raise ValueError(f"--rows is {text!r}, expected 1 or more each")
    return sizes


def _weight_bytes(target: TargetAdapter) -> int:
    """Bytes that a pass reads: all weights but the embedding's (of which it reads a row), unless the LM head is it."""
    embedding, head = target.embedding.weight, target.lm_head.weight
    total = sum(p.numel() * p.element_size() for p in target.model.parameters())
    return total if embedding is head else total - embedding.numel() * embedding.element_size()


def _read_ms(target: TargetAdapter, repeats: int) -> float:
    """Time of the matrix-vector products alone, every weight matrix once: the bound that memory sets a plain pass."""
    matrices = [m for m in target.model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {m.in_features: torch.randn(1, m.in_features, device=target.device).to(target.dtype) for m in matrices}
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            wait(target.device)
            started = time.perf_counter()
            for matrix in matrices:
                matrix(inputs[matrix.in_features])
            wait(target.device)
            times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[1:])


def _ways(loaded: Loaded, args: argparse.Namespace, rows: int) -> dict[str, _Way]:
    target, head = loaded.target, loaded.head
    stop = StopRule(frozenset(), args.tokens)

    def ours(options: DecodeOptions, drafted: bool) -> _Way:
        def way(prompts: Sequence[Sequence[int]]) -> list[DecodeStats]:
            requests = [RowRequest(ids, stop) for ids in prompts]
            return [result.stats for result in decode(target, head if drafted else None, requests, options)]

        return way

    ways: dict[str, _Way] = {"library generate": lambda prompts: library_greedy(target, prompts, args.tokens)}
    if rows == 1:
        ways["plain"] = lambda prompts: [decode_plain(target, prompts[0], stop)[1]]
    else:
        ways["plain"] = ours(DecodeOptions(), False)
    assert head is not None
    trees = [policy.limited(head.max_depth) for policy in TREES]
    fitted = tree_beside(args.head)
    few = trees[1:3]  # also compiled
    if fitted is not None:
        trees.append(TreePolicy.of(read_tree(fitted)))
        few.append(trees[-1])
    ways |= {describe(policy): ours(DecodeOptions(policy), True) for policy in trees}
    if args.compile and rows == 1:
        ways["plain, compiled"] = ours(DecodeOptions(compiled=True), False)
        ways |= {f"{describe(p)}, compiled": ours(DecodeOptions(p, compiled=True), True) for p in few}
    return ways


def _measure(
    ways: dict[str, _Way], prompts: Sequence[Sequence[int]], repeats: int, what: str
) -> dict[str, dict[str, Any]]:
    found: dict[str, list[list[DecodeStats]]] = {name: [] for name in ways}
    started = time.perf_counter()
    for repeat in range(repeats + 1):  # the first one warms up
        names = list(ways)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            found[name].append(ways[name](prompts))
        spent = time.perf_counter() - started
        _say(f"{what}: {repeat}/{repeats} repeats, {spent / (repeat + 1) * (repeats - repeat):.0f} s left")
    return {name: _figures(runs[1:]) for name, runs in found.items()}


def _figures(runs: Sequence[Sequence[DecodeStats]]) -> dict[str, Any]:
    """Medians over the repeats, of the whole batch: its time is that of the row that ended last."""
    longest = [max(stats, key=lambda one: one.total_seconds) for stats in runs]
    passes = max(one.target_passes for one in runs[0])
    tokens = sum(one.new_tokens for one in runs[0])

    def middle(value: Callable[[DecodeStats], float]) -> float:
        return statistics.median(value(one) for one in longest)

    round_ms = {name: middle(lambda s, n=name: 1000 * s.seconds[n] / max(passes, 1)) for name in _PARTS}  # type: ignore[misc]
    whole = sum(round_ms.values())
    return {
        "tokens_per_second": tokens / middle(lambda s: s.total_seconds),
        "tokens_per_second_decode": (tokens - len(runs[0])) / middle(lambda s: s.decode_seconds),
        "tau": sum(s.round_tokens for s in runs[0]) / sum(s.target_passes for s in runs[0]),
        "passes": passes,
        "round_ms": round_ms,
        "host_share": (round_ms["verify"] + round_ms["rest"]) / whole if round_ms["target"] else None,
    }


_PARTS = ("draft", "target", "verify", "rest")


def _table(found: dict[str, dict[str, Any]]) -> list[str]:
    baselines = [found[name] for name in ("library generate", "plain", "plain, compiled") if name in found]
    fastest = max(one["tokens_per_second_decode"] for one in baselines)
    rows = [["", "tokens/s", "decode", "over the faster baseline", "tau", "ms per round", *_PARTS, "host share"]]
    for name, one in found.items():
        ms = one["round_ms"]
        cells = [f"{one['tokens_per_second']:.1f}", f"{one['tokens_per_second_decode']:.1f}"]
        cells += [f"{one['tokens_per_second_decode'] / fastest:.2f}x", f"{one['tau']:.2f}", f"{sum(ms.values()):.1f}"]
        cells += [f"{ms[part]:.1f}" for part in _PARTS]
        rows.append([name, *cells, "-" if one["host_share"] is None else f"{100 * one['host_share']:.1f} %"])
    return aligned(rows)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

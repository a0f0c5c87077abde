"""Several heads for one target side by side: size, training time, accept length, tokens per second, interleaved."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heads.base import DraftHead, TreePolicy, trainable_parameters
from heads.formats.opening import open_head
from infer.calibration import describe
from infer.costs import Say
from infer.engine import DecodeOptions, RowRequest, decode
from infer.loading import add_model_options, load_models
from infer.machine import commit_id, library_versions, machine_name
from infer.metrics import DecodeStats
from infer.prompts import add_prompt_options, encode_prompt, read_prompts, spread
from infer.report import aligned
from infer.stopping import StopRule
from infer.trees import policy_of


@dataclass(frozen=True)
class Contestant:
    """A head, bound to the target, with the tree that it drafts; head None: plain decoding."""

    name: str
    head: DraftHead | None
    policy: TreePolicy
    minutes: float | None = None  # of training


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    """Options of `scripts/compare_heads.py`."""
    add_model_options(parser)
    add = parser.add_argument_group("comparison").add_argument
    add("--with", dest="others", action="append", default=[], metavar="DIR", help="a further head for the same target")
    add("--prompts", metavar="FILE", required=True, help="JSONL, as for generate.py --eval")
    add("--limit", type=int, default=13, metavar="N", help="only N prompts, spread over the categories; default: 13")
    add("--tokens", type=int, default=128, metavar="N", help="new tokens per prompt at most; default: 128")
    add("--tree", action="append", metavar="FILE", help="a static tree per head, in the order of the heads")
    add_prompt_options(parser)


def run_compare(args: argparse.Namespace, argv: Sequence[str], say: Say) -> None:
    """Decodes every prompt greedily in every way, in turn; prints a table and a last line of JSON.

    A head drafts the tree given for it, else the one in its directory (`tree.json`), else the default dynamic tree.

    Raises:
        ValueError: bad values or files, or heads that are not for the same target.
    """
    folders = [args.head, *args.others]
    if args.tree is not None and len(args.tree) != len(folders):
        raise ValueError(
            f"--tree is given {len(args.tree)} times for {len(folders)} heads; expected one per head, or none"
        )
    if args.tokens < 2:
        raise ValueError(f"--tokens is {args.tokens}, expected 2 or more")
    opened = [open_head(folder, args.target, cache_dir=args.cache_dir) for folder in folders]
    first = opened[0].config
    for folder, other in zip(args.others, (one.config for one in opened[1:]), strict=True):
        if other.trained_with_target:
            raise ValueError(f"--with {folder}: it was trained together with a target of its own; leave it out")
        for name in ("target", "target_revision", "target_adapter"):
            mine, theirs = getattr(first, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(
                    f"--with {folder}: its {name} is {theirs!r}, that of {args.head} {mine!r}; give one target"
                )
    prompts = spread(read_prompts(args.prompts, "--prompts"), args.limit)
    loaded = load_models(args)
    assert loaded.head is not None, "load_models leaves the head out only if asked to"
    ids = [encode_prompt(loaded.tokenizer, prompt, args.raw, args.template_kwargs) for prompt in prompts]
    ways = [Contestant("plain decoding", None, TreePolicy())]
    for number, folder in enumerate(folders):
        head = loaded.head if number == 0 else opened[number].for_target(loaded.target)
        tree = None if args.tree is None else args.tree[number]
        ways.append(Contestant(folder, head, policy_of(tree, head, folder, "top_k"), _minutes(folder)))
    stop = StopRule(loaded.target.eos_ids, args.tokens)
    decode(loaded.target, None, [RowRequest(ids[0], StopRule(frozenset(), 2))])  # warm
    found: dict[str, list[DecodeStats]] = {way.name: [] for way in ways}
    for done, prompt in enumerate(ids):
        for way in ways[done % len(ways) :] + ways[: done % len(ways)]:  # no way is always first
            options = DecodeOptions(policy=way.policy)
            found[way.name].append(decode(loaded.target, way.head, [RowRequest(prompt, stop)], options)[0].stats)
        say(f"{done + 1}/{len(ids)} prompts")
    rows = [_row(way, found[way.name], found[ways[0].name]) for way in ways]
    size = sum(parameter.numel() for parameter in loaded.target.model.parameters())
    print("\n".join(aligned([_HEADER, *(_cells(row, size) for row in rows)])))
    summary = {
        "hardware": machine_name(loaded.target.device),
        "threads": torch.get_num_threads(),
        "dtype": str(loaded.target.dtype).removeprefix("torch."),
        "target": loaded.target.name,
        "target_parameters": size,
        "prompts": len(ids),
        "rows": rows,
        "changed": loaded.changed,
        "commit": commit_id(),
        "versions": library_versions(),
        "command": shlex.join(["scripts/compare_heads.py", *argv]),
    }
    print(json.dumps(summary), flush=True)


def _minutes(folder: str) -> float | None:
    """Of training, by the head's provenance."""
    path = Path(folder) / "provenance.json"
    try:
        seconds = json.loads(path.read_text()).get("seconds")
    except (OSError, ValueError):
        return None
    return None if seconds is None else seconds / 60


def _row(way: Contestant, stats: Sequence[DecodeStats], plain: Sequence[DecodeStats]) -> dict[str, Any]:
    """Sums over the prompts, prefill included; the speed-up also as the median of the prompts'."""
    speeds = [sum(one.new_tokens for one in side) / sum(one.total_seconds for one in side) for side in (stats, plain)]
    ratios = [
        a.new_tokens / a.total_seconds / (b.new_tokens / b.total_seconds) for a, b in zip(stats, plain, strict=True)
    ]
    passes = sum(one.target_passes for one in stats)
    emitted = sum(one.new_tokens - 1 for one in stats)  # the prefill gives the first one
    return {
        "head": way.name,
        "kind": None if way.head is None else way.head.config.kind,
        "parameters": 0 if way.head is None else trainable_parameters(way.head),
        "training_minutes": way.minutes,
        "tree": None if way.head is None else describe(way.policy),
        "accept_length": emitted / passes,
        "tokens": sum(one.new_tokens for one in stats),
        "passes": passes,
        "tokens_per_second": speeds[0],
        "speedup": speeds[0] / speeds[1],
        "speedup_median": statistics.median(ratios),
        "draft_ms": 1000 * sum(one.seconds.get("draft", 0.0) for one in stats) / passes,
        "target_ms": 1000 * sum(one.seconds.get("target", 0.0) for one in stats) / passes,
    }


_HEADER = ("head", "parameters", "minutes", "tree", "accept length", "tokens/s", "speed-up", "median", "draft ms")


def _cells(row: dict[str, Any], target_size: int) -> list[str]:
    minutes = row["training_minutes"]
    return [
        row["head"],
        f"{row['parameters'] / 1e6:.2f} M ({row['parameters'] / target_size:.1%})" if row["parameters"] else "-",
        "-" if minutes is None else f"{minutes:.0f}",
        row["tree"] or "-",
        f"{row['accept_length']:.2f}",
        f"{row['tokens_per_second']:.1f}",
        f"{row['speedup']:.2f}x",
        f"{row['speedup_median']:.2f}x",
        f"{row['draft_ms']:.1f}",
    ]

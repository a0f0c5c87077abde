"""The command line of `infer/calibrate.py`: options, and what it prints."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from heads.base import TreePolicy, candidates
from infer.acceptance import Acceptance
from infer.calibration import CALIBRATION, NODES, Choice, calibrate, choose, describe
from infer.costs import CalibrationRequest, Costs
from infer.loading import add_model_options, load_models
from infer.prompts import add_prompt_options, counts_by_category, encode_prompt, read_prompts, spread

_BEST = 10  # trees in the table


def build_parser() -> argparse.ArgumentParser:
    """All options of `infer/calibrate.py`."""
    default = CalibrationRequest("")
    parser = argparse.ArgumentParser(
        prog="calibrate.py",
        description="Measures what target passes and draft levels cost on this machine and what the head's drafts "
        "are worth on some prompts, and chooses the draft tree of most tokens per second, or none. The result is "
        "kept in the cache directory and measured anew when anything that decides it has changed.",
    )
    add_model_options(parser)
    add = parser.add_argument_group("what is measured").add_argument
    add("--prompts", metavar="FILE", required=True, help="JSONL, as for generate.py --eval")
    add("--limit", type=int, default=16, metavar="N", help="only N prompts, spread over the categories; default: 16")
    add_prompt_options(parser)
    add("--tokens", type=int, default=default.tokens, metavar="N", help=f"per prompt; default: {default.tokens}")
    add("--rows", type=int, default=default.rows, metavar="N", help=f"batch size; default: {default.rows}")
    add(
        "--context",
        type=int,
        default=default.context,
        metavar="N",
        help=f"tokens before a timed pass; default: {default.context}",
    )
    add(
        "--repeats",
        type=int,
        default=default.repeats,
        metavar="N",
        help=f"each cost is a median of N; default: {default.repeats}",
    )
    add("--compile", action="store_true", help="of compiled passes and drafts, for generate.py --compile: some minutes")
    add("--json", metavar="FILE", help="write costs, acceptance and the choice here")
    return parser


def run(argv: Sequence[str] | None = None) -> int:
    """Calibrates, prints, and returns the exit code.

    Raises:
        ValueError: anything wrong with the files or values given (argparse ends with code 2 by itself).
    """
    args = build_parser().parse_args(argv)
    if args.json is not None:
        CALIBRATION.check_writable(Path(args.json))  # before minutes of work
    request = CalibrationRequest(args.head, args.rows, args.context, args.tokens, args.repeats, compiled=args.compile)
    prompts = spread(read_prompts(args.prompts, "--prompts"), args.limit)
    _say(f"{len(prompts)} prompts: {counts_by_category(prompts)}")
    loaded = load_models(args)
    assert loaded.head is not None, "load_models leaves the head out only if asked to"
    request = replace(request, head_dir=args.head)  # a hub id is a directory now
    ids = [encode_prompt(loaded.tokenizer, prompt, args.raw, args.template_kwargs) for prompt in prompts]
    found = calibrate(loaded.target, loaded.head, request, ids, _say, args.cache_dir)
    choice = choose(found.costs, found.acceptance)
    lines = [*_cost_lines(found.costs), "", *_acceptance_lines(found.acceptance), "", *_choice_lines(choice)]
    print("\n".join(lines))
    summary: dict[str, Any] = {"key": found.key, **choice.to_dict()}
    if args.json is not None:
        given = list(sys.argv[1:] if argv is None else argv)
        whole = {**found.to_dict(), "choice": choice.to_dict(len(choice.table))}
        whole["command"] = shlex.join(["infer/calibrate.py", *given])
        CALIBRATION.write(Path(args.json), whole)
        _say(f"wrote {args.json}")
    print(json.dumps(summary), flush=True)
    return 0


def _cost_lines(costs: Costs) -> list[str]:
    """The cost curve; the last column is what a token costs beside that of plain decoding's pass."""
    one = costs.target_ms[1]
    lines = [
        f"{costs.device}, {costs.threads} threads, {costs.dtype}, {costs.rows} rows, {costs.context} tokens of context"
        f"{', compiled' if costs.compiled else ''}",
        "tokens per row   target pass, ms   of one token's",
    ]
    lines += [f"{n:14d}   {ms:15.2f}   {ms / one:13.2f}x" for n, ms in sorted(costs.target_ms.items())]
    lines.append(f"head's commit {costs.commit_ms:.2f} ms; first level and each further one, by width:")
    lines += [f"  width {w}: {costs.first_ms[w]:.2f} and {costs.level_ms[w]:.2f} ms" for w in sorted(costs.level_ms)]
    lines.append(f"rest of a round: {costs.overhead_ms:.2f} ms with drafts, {costs.plain_overhead_ms:.2f} ms without")
    return lines


def _acceptance_lines(acceptance: Acceptance) -> list[str]:
    """Accept lengths by width and depth: chains, and trees of the largest size."""
    depths = range(1, acceptance.depth + 1)
    lines = ["accept length by depth" + "".join(f"{depth:7d}" for depth in depths)]
    for width in sorted(acceptance.ranks):
        largest = [min(NODES[-1], candidates(width, depth)) for depth in depths]
        taus = [acceptance.tau(TreePolicy(width, depth, n)) for depth, n in zip(depths, largest, strict=True)]
        name = "chain" if width == 1 else f"width {width}, {NODES[-1]} nodes"
        lines.append(f"{name:22s}" + "".join(f"{tau:7.2f}" for tau in taus))
    return lines


def _choice_lines(choice: Choice) -> list[str]:
    lines = [
        f"{'tree':28s}  accept length  pays above  ms per round  tokens/s",
        f"{'plain decoding':28s}  {1:13.2f}  {'':10s}  {'':12s}  {choice.plain_tokens_per_second:8.1f}",
    ]
    lines += [
        f"{describe(offer.policy):28s}  {offer.tau:13.2f}  {offer.break_even_tau:10.2f}  {offer.round_ms:12.2f}  "
        f"{offer.tokens_per_second:8.1f}"
        for offer in choice.table[:_BEST]
    ]
    return [*lines, "", f"chosen: {choice.reason}"]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

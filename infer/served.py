"""Is a head worth in a serving engine what it is worth here? The same prompts, the same chain, both sides' counts.

The engine decodes plainly and with the head; both texts must be the same. What it counts must be what our own chain of
as many drafts counts: every round that begins before the answer's end, with all its accepted drafts, also those beyond
the end. In float32 the counts are usually equal to the last one; a wrong layer, shift, norm or vocabulary map leaves
the texts alone and makes acceptance collapse.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heads.base import DraftHead, TreePolicy
from heads.embedded import resolve_target
from heads.formats.export import ExportRequest, run_export, without_draft_vocab
from heads.formats.opening import open_head
from heads.registry import build_head
from heads.target import TargetAdapter
from infer.costs import Say
from infer.engine import DecodeOptions, RowRequest, decode
from infer.loading import Loaded, add_model_options, load_models
from infer.machine import commit_id, library_versions, machine_name
from infer.prompts import Prompt, add_prompt_options, encode_prompt, read_prompts, spread
from infer.report import aligned
from infer.served_engine import PINS, Answer, Served, ensure_environment, run_engine
from infer.stopping import StopRule

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Explain the difference between a list and a tuple in Python.",
    "A train travels 60 miles in 1.5 hours. What is its average speed?",
    "Write a short story about a lighthouse keeper.",
    "Give me three tips for learning a new language.",
    "Summarise in one sentence why the sky is blue.",
    "Translate into French: Where is the nearest train station?",
)
TOLERANCE = 0.05  # of the accept length
_TELLING = 1.1  # an accept length below says nothing: a broken head has it, too
_MARGIN = 16  # tokens of the engine's context beyond the answer: drafts, and what it looks ahead


@dataclass(frozen=True)
class Counts:
    """What a chain of k yielded over all prompts.

    accepted_per_position: [i] = share of the rounds that accepted draft i + 1.
    """

    rounds: int
    accepted_per_position: list[float]

    @property
    def accept_length(self) -> float:
        """Tokens per round, the target's own included."""
        return 1 + sum(self.accepted_per_position)

    @classmethod
    def of(cls, rounds: int, accepted: Sequence[int]) -> Counts:
        """accepted: [i] = rounds that accepted draft i + 1."""
        return cls(rounds, [count / rounds for count in accepted])


def add_served_options(parser: argparse.ArgumentParser) -> None:
    """Options of `scripts/check_served.py`."""
    add_model_options(parser)
    parser.set_defaults(dtype="float32")
    add = parser.add_argument_group("engine").add_argument
    add("--engine", choices=("vllm",), default="vllm", help="default: vllm")
    add(
        "--env",
        metavar="DIR",
        help=f"an environment with the engine; default: one with {PINS[0]} in the cache directory, made once (4 GB)",
    )
    add("--prompts", metavar="FILE", help=f"JSONL, as for generate.py --eval; default: {len(PROMPTS)} of our own")
    add("--limit", type=int, default=8, metavar="N", help="only N of them, spread over the categories; default: 8")
    add_prompt_options(parser)
    add(
        "--whole-vocabulary",
        action="store_true",
        help="on both sides, for heads with a draft vocabulary that the engine has no place for; see export.py",
    )
    add("--k", type=int, default=3, metavar="N", help="drafts per round, on both sides; default: 3")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="per prompt; default: 64")


def run_served(args: argparse.Namespace, argv: Sequence[str], say: Say) -> None:
    """Compares, prints a table and a last line of JSON.

    Raises:
        ValueError: bad values or files, an engine that cannot be installed or fails, or sides that differ (both
            figures are told).
    """
    for name in ("k", "limit", "max_new_tokens"):
        least = 2 if name == "max_new_tokens" else 1  # the first token comes without a round
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected {least} or more")
    given = [Prompt(str(i), "all", text) for i, text in enumerate(PROMPTS)]
    if args.prompts is not None:
        given = read_prompts(args.prompts, "--prompts")
    prompts = spread(given, args.limit)
    where: dict[str, Any] = {"trust_remote_code": args.trust_remote_code, "cache_dir": args.cache_dir}
    config = open_head(args.head, args.target, **where, announce=lambda text: None).config
    if config.target_adapter is not None and args.adapter != "none":
        raise ValueError(
            f"--head {args.head} is for a target with adapter {config.target_adapter}, which the engine would have to "
            "load merged: merge it into a target of its own, and give that as --target with --adapter none"
        )
    if config.num_draft_heads is not None and args.k > config.num_draft_heads:
        raise ValueError(f"--k is {args.k}, but the head drafts {config.num_draft_heads} tokens at most; lower --k")
    loaded = load_models(args)
    assert loaded.head is not None, "load_models leaves the head out only if asked to"
    ids = [encode_prompt(loaded.tokenizer, prompt, args.raw, args.template_kwargs) for prompt in prompts]
    request = _request(args, loaded, ids)
    with tempfile.TemporaryDirectory(prefix="draftsmith-served-") as folder:
        speculative = _export(args, config.kind, folder)
        python = ensure_environment(args.env, args.cache_dir, say)
        plain = run_engine(python, {**request, "speculative": None}, "plain", args.threads, say)
        drafted = run_engine(python, {**request, "speculative": speculative}, "with the head", args.threads, say)
    if args.whole_vocabulary:
        loaded = replace(loaded, head=_whole_vocabulary(loaded.head, loaded.target))
    ours, texts = count_ours(loaded, ids, args.k, args.max_new_tokens, say)
    report = compare(plain, drafted, ours, texts, args.k)
    print("\n".join(_lines(report)))
    summary = {
        **report,
        "head": args.head,
        "kind": config.kind,
        "target": loaded.target.name,
        "dtype": request["dtype"],
        "max_new_tokens": args.max_new_tokens,
        "hardware": machine_name(loaded.target.device),
        "commit": commit_id(),
        "versions": library_versions(),
        "command": shlex.join(["scripts/check_served.py", *argv]),
    }
    print(json.dumps(summary), flush=True)
    _judge(report)


def _request(args: argparse.Namespace, loaded: Loaded, ids: Sequence[Sequence[int]]) -> dict[str, Any]:
    """All that the engine is told of the target and the prompts; see `infer.served_driver`."""
    path = resolve_target(args.target or loaded.target.name, args.cache_dir)
    longest, limit = max(map(len, ids)), loaded.target.max_positions
    length = longest + args.max_new_tokens + args.k + _MARGIN
    if limit is not None and length > limit:
        raise ValueError(
            f"a prompt of {longest} tokens and --max-new-tokens {args.max_new_tokens} need {length} positions, and the "
            f"target has {limit}; lower --max-new-tokens, or give other --prompts"
        )
    return {
        "target": str(Path(path).absolute()) if Path(path).is_dir() else path,
        "revision": loaded.target.revision,
        "dtype": str(loaded.target.dtype).removeprefix("torch."),
        "trust_remote_code": args.trust_remote_code,
        "max_model_len": length,
        "prompts": [list(prompt) for prompt in ids],
        "max_new_tokens": args.max_new_tokens,
        "stop_ids": sorted(loaded.target.eos_ids),
    }


def _export(args: argparse.Namespace, kind: str, folder: str) -> dict[str, Any]:
    """Writes the head as `scripts/export.py` does; returns what the engine is told of it."""
    out = run_export(
        ExportRequest(
            head=args.head,
            to=args.engine,
            out=str(Path(folder) / "head"),
            target=args.target,
            whole_vocabulary=args.whole_vocabulary,
            cache_dir=args.cache_dir,
            trust_remote_code=args.trust_remote_code,
        )
    )
    return {"method": kind, "model": str(out), "num_speculative_tokens": args.k}  # its methods are named like our kinds


def _whole_vocabulary(head: DraftHead, target: TargetAdapter) -> DraftHead:
    """The head as it is exported with --whole-vocabulary."""
    config, state = without_draft_vocab(head.config, head.state_dict())
    other = build_head(config)
    other.load_state_dict(state)
    other.to(device=target.head_device, dtype=target.dtype).eval().bind(target)
    return other


# ---- our side ----------------------------------------------------------------------------------------------


def count_ours(
    loaded: Loaded, prompts: Sequence[Sequence[int]], k: int, max_new_tokens: int, say: Say
) -> tuple[Counts, list[list[int]]]:
    """Our own greedy chain of k drafts, counted as engines count: see `rounds_before`. Returns the texts, too.

    Raises:
        ValueError: a prompt that cannot be decoded, or answers that all end with their first token.
    """
    options = DecodeOptions(TreePolicy(width=1, depth=k, total=k + 1))
    # Decoded past the end, so that no round that counts is cut.
    stop = StopRule(frozenset(), max_new_tokens + k)
    rounds: list[int] = []
    texts = []
    for done, prompt in enumerate(prompts, 1):
        result = decode(loaded.target, loaded.head, [RowRequest(prompt, stop)], options)[0]
        ends = (at + 1 for at, token in enumerate(result.ids) if token in loaded.target.eos_ids)
        length = min(next(ends, max_new_tokens), max_new_tokens)
        texts.append(result.ids[:length])
        rounds += rounds_before(result.stats.accepted_per_round, length)
        say(f"our chain: {done}/{len(prompts)} prompts")
    if not rounds:
        raise ValueError("--prompts: every answer ends with its first token; give other prompts")
    return Counts.of(len(rounds), [sum(accepted > i for accepted in rounds) for i in range(k)]), texts


def rounds_before(accepted_per_round: Sequence[int], length: int) -> list[int]:
    """The rounds that begin while a text has fewer than `length` tokens. The first token comes without a round."""
    begun, emitted = 0, 1
    while begun < len(accepted_per_round) and emitted < length:
        emitted += accepted_per_round[begun] + 1
        begun += 1
    return list(accepted_per_round[:begun])


# ---- the comparison ----------------------------------------------------------------------------------------


def compare(plain: Served, drafted: Served, ours: Counts, texts: Sequence[Sequence[int]], k: int) -> dict[str, Any]:
    """Both sides' figures, JSON-able.

    Raises:
        ValueError: the engine verified no drafts.
    """
    rounds = sum(answer.rounds for answer in drafted.answers)
    if not rounds:
        raise ValueError(f"{drafted.engine} verified no drafts at all: it did not use the head")
    accepted = [sum(answer.accepted_per_position[i] for answer in drafted.answers) for i in range(k)]
    theirs = Counts.of(rounds, accepted)
    pairs = list(zip(plain.answers, drafted.answers, texts, strict=True))
    return {
        "engine": drafted.engine,
        "k": k,
        "prompts": len(pairs),
        "tokens": sum(len(answer.ids) for answer in plain.answers),
        "same_text": sum(a.ids == b.ids for a, b, _ in pairs),
        "same_text_as_ours": sum(a.ids == list(text) for a, _, text in pairs),
        "difference": theirs.accept_length / ours.accept_length - 1,
        "sides": {
            "engine": {**_figures(theirs), "tokens_per_second": _speed(drafted.answers)},
            "engine, plain": {"tokens_per_second": _speed(plain.answers)},
            "ours": _figures(ours),
        },
    }


def _figures(counts: Counts) -> dict[str, Any]:
    return {
        "accept_length": counts.accept_length,
        "accepted_per_position": counts.accepted_per_position,
        "rounds": counts.rounds,
    }


def _speed(answers: Sequence[Answer]) -> float:
    return sum(len(answer.ids) for answer in answers) / sum(answer.seconds for answer in answers)


def _lines(report: dict[str, Any]) -> list[str]:
    sides = {name: report["sides"][key] for name, key in ((report["engine"], "engine"), ("our chain", "ours"))}
    header = ["", "accept length", "rounds", *(f"draft {i + 1}" for i in range(report["k"]))]
    rows = [
        [
            name,
            f"{side['accept_length']:.3f}",
            str(side["rounds"]),
            *(f"{x:.1%}" for x in side["accepted_per_position"]),
        ]
        for name, side in sides.items()
    ]
    speeds = [report["sides"][name]["tokens_per_second"] for name in ("engine, plain", "engine")]
    count = report["prompts"]
    lines = [
        *aligned([header, *rows]),
        f"accept length: {report['difference']:+.1%} against ours ({TOLERANCE:.0%} allowed)",
        f"the engine's text with the head is its plain text: {report['same_text']} of {count} prompts, "
        f"{report['tokens']} tokens (plain text the same as ours: {report['same_text_as_ours']})",
        f"tokens per second of the engine: {speeds[0]:.1f} plain, {speeds[1]:.1f} with the head",
    ]
    if report["sides"]["ours"]["accept_length"] < _TELLING:
        lines.append("note: so few drafts are accepted here that a broken head would look the same; train it longer")
    return lines


def _judge(report: dict[str, Any]) -> None:
    """Raises ValueError if the sides differ."""
    parted = report["prompts"] - report["same_text"]
    if parted:
        raise ValueError(
            f"with the head the engine's text is another than its plain text on {parted} of {report['prompts']} prompts"
            " (in half precision near ties may fall the other way: compare with --dtype float32)"
        )
    if abs(report["difference"]) > TOLERANCE:
        engine, ours = (report["sides"][name]["accept_length"] for name in ("engine", "ours"))
        raise ValueError(
            f"accept length {engine:.3f} in {report['engine']}, {ours:.3f} here: {report['difference']:+.1%}, expected "
            f"within {TOLERANCE:.0%}; the exported head is not what was trained"
        )

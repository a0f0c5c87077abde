"""`scripts/doctor.py`: what a head's files say, then, with the target at hand, a decoding round."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from heads.base import DraftHead, TreePolicy
from heads.config import HeadConfig
from heads.formats.doctor import examine, write_mended
from heads.formats.export import target_of
from heads.registry import build_head
from heads.target import TargetAdapter
from infer.costs import Say
from infer.engine import DecodeOptions, RowRequest, decode
from infer.loading import add_model_options, load_models
from infer.prompts import Prompt, encode_prompt
from infer.stopping import StopRule

_TEXTS = (
    "What is a haiku?",
    "Write a Python function that adds two numbers.",
    "Name three animals and say where they live.",
    "Explain in two sentences why the sky is blue.",
)
_PLAUSIBLE = 1.3  # accept length of a chain that a trained head reaches on almost any text
_CLEARLY = 1.15  # so many times as long an accept length is no accident of a few prompts


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Options of `scripts/doctor.py`."""
    add_model_options(parser, "head")
    add = parser.add_argument_group("doctor").add_argument
    add("--fix", metavar="DIR", help="write the mended head into this new directory (needs --target)")
    add("--tokens", type=int, default=48, metavar="N", help="of each prompt in the decoding round; default: 48")
    add("--chain", type=int, default=4, metavar="K", help="drafts per round; default: 4")


def run_doctor(args: argparse.Namespace, say: Say) -> int:
    """Prints what is found, and a last line of JSON; 1 if something is wrong, else 0.

    Raises:
        ValueError: nothing that can be read, or it cannot be mended.
    """
    for name in ("tokens", "chain"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}, expected 1 or more")
    if args.fix is not None and args.target is None:
        raise ValueError("--fix needs --target: what is missing in a head is the target's")
    where: dict[str, Any] = {"trust_remote_code": args.trust_remote_code, "cache_dir": args.cache_dir}
    target = None if args.target is None else target_of(args.target, **where)
    found = examine(args.head, target)
    print("\n".join(found.lines()), flush=True)
    result = found.to_dict()
    if args.fix is not None and target is not None:
        result["fixed"] = args.fix
        write_mended(found, target, Path(args.fix))
        say(f"wrote {args.fix}, mended and checked")
        args.head = args.fix
    bad = bool(found.wrong) and args.fix is None
    if target is not None and not bad:
        drafted = decoding_round(args, say)
        lines, good = verdict(drafted)
        result["accept_length"], bad = drafted, not good
        print("\n".join(lines))
    print(json.dumps(result), flush=True)
    return int(bad)


# ---- decoding ----------------------------------------------------------------------------------------------


def decoding_round(args: argparse.Namespace, say: Say) -> dict[str, float]:
    """Accept lengths of a chain on a few prompts; of EAGLE-3 also with the layers before and behind its own."""
    loaded = load_models(args)
    assert loaded.head is not None, "load_models leaves the head out only if asked to"
    raw = getattr(loaded.tokenizer, "chat_template", None) is None
    ids = [encode_prompt(loaded.tokenizer, Prompt(text, "all", text), raw, {}) for text in _TEXTS]
    lengths = {"as it is": accept_length(loaded.target, loaded.head, ids, args.tokens, args.chain)}
    config = loaded.head.config
    for shift in (-1, 1) if config.taps else ():
        taps = tuple(k + shift for k in config.taps or ())
        if taps[0] < 0 or taps[-1] >= loaded.target.num_layers:
            continue
        say(f"again with layers {list(taps)}")
        head = _with_taps(replace(config, taps=taps), loaded.head)
        head.bind(loaded.target)
        loaded.target.tap(head.needs.taps)
        lengths[f"layers {list(taps)}"] = accept_length(loaded.target, head, ids, args.tokens, args.chain)
    return lengths


def _with_taps(config: HeadConfig, head: DraftHead) -> DraftHead:
    """The same weights, reading other layers."""
    other = build_head(config)
    other.load_state_dict(head.state_dict())
    weight = next(head.parameters())
    return other.to(device=weight.device, dtype=weight.dtype).eval()


def accept_length(
    target: TargetAdapter, head: DraftHead, prompts: Sequence[list[int]], tokens: int, chain: int
) -> float:
    """Tokens per verification pass, greedy, with a chain of drafts; 1.0 where nothing was drafted."""
    depth = min(chain, head.max_depth or chain)
    options = DecodeOptions(TreePolicy(1, depth, depth + 1))
    stop = StopRule(target.eos_ids, tokens)
    stats = [decode(target, head, [RowRequest(ids, stop)], options)[0].stats for ids in prompts]
    passes = sum(one.target_passes for one in stats)
    return sum(one.round_tokens for one in stats) / passes if passes else 1.0


def verdict(lengths: dict[str, float]) -> tuple[list[str], bool]:
    """What the accept lengths say, and whether they are those of a head that is read right."""
    own, best = lengths["as it is"], max(lengths, key=lambda name: lengths[name])
    lines = [f"decoding: accept length {value:.2f} {name}" for name, value in lengths.items()]
    problem = None
    if best != "as it is" and lengths[best] > _CLEARLY * own:
        problem = f"the layers are off by one: {best} accept {lengths[best] / own:.2f} times as much"
    elif own < _PLAUSIBLE:
        problem = f"{own:.2f} is no accept length of a trained head, expected {_PLAUSIBLE} or more"
    return [*lines, "decoding: plausible" if problem is None else f"wrong: {problem}"], problem is None

"""The command line of `scripts/fit_tree.py`: ranks on held-out rows, the best trees, what they cost, the file."""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.base import DraftHead, TreePolicy
from heads.formats.files import head_digest
from heads.target import TargetAdapter
from infer.calibration import NODES
from infer.costs import CalibrationRequest, Costs, measure_tree_costs
from infer.engine import DecodeOptions, RowRequest, decode
from infer.fitting import UNKNOWN, Accuracy, Fit, fit, priced
from infer.loading import Loaded, add_model_options, load_models
from infer.machine import commit_id, library_versions, machine_name
from infer.prompts import add_prompt_options, encode_prompt, read_prompts, spread
from infer.report import aligned
from infer.stopping import StopRule
from infer.trees import TREE_FILE, TREE_NAME, write_tree
from train.config import load_config
from train.feature_cache import build_feature_cache, cache_key
from train.features import FeatureSource
from train.files import differences
from train.ranks import Ranks, measure_ranks
from train.resume import RUN_YAML
from train.stage import read_held_out

_DEPTH = 6  # of the deepest trees, where the head has no limit of its own
_CHECK_PROMPTS, _CHECK_TOKENS = 8, 128


def build_parser() -> argparse.ArgumentParser:
    """All options of `scripts/fit_tree.py`."""
    default = CalibrationRequest("")
    parser = argparse.ArgumentParser(
        prog="fit_tree.py",
        description="Measures on held-out rows which rank the head's drafts give to the target's own token, and writes "
        "the static tree with the longest expected accept length, or of most expected tokens per second: tree.json in "
        "the head's directory, which infer/generate.py then takes by itself.",
    )
    add_model_options(parser)
    add = parser.add_argument_group("tree").add_argument
    add("--data", metavar="DIR", help="data.work_dir with the held-out rows; default: that of the head's training run")
    add("--limit", type=int, metavar="N", help="only N held-out rows; default: eval.max_rows of the training run")
    add(
        "--nodes",
        default="auto",
        metavar="N",
        help="nodes of the tree, root included; auto (default): of most tokens per second, by costs measured here",
    )
    add("--max-rank", type=int, default=10, metavar="N", help="how many children of a node to consider; default: 10")
    add("--depth", type=int, metavar="N", help=f"levels to consider; default: the head's, at most {_DEPTH}")
    add("--out", metavar="FILE", help=f"default: {TREE_NAME} in the head's directory")
    add = parser.add_argument_group("costs, with --nodes auto").add_argument
    add("--rows", type=int, default=default.rows, metavar="N", help=f"batch size; default: {default.rows}")
    add("--context", type=int, default=default.context, metavar="N", help=f"tokens; default: {default.context}")
    add("--repeats", type=int, default=default.repeats, metavar="N", help=f"default: {default.repeats}")
    add = parser.add_argument_group("check").add_argument
    add("--check", metavar="FILE", help="decode prompts of this file (JSONL) greedily with the tree: its accept length")
    add(
        "--check-limit",
        type=int,
        default=_CHECK_PROMPTS,
        metavar="N",
        help=f"only N prompts, spread over the categories; default: {_CHECK_PROMPTS}",
    )
    add("--tokens", type=int, default=_CHECK_TOKENS, metavar="N", help=f"per prompt; default: {_CHECK_TOKENS}")
    add_prompt_options(parser)
    return parser


def run(argv: Sequence[str] | None = None) -> None:
    """Fits, prints a table and a last line of JSON, and writes the tree.

    Raises:
        ValueError: anything wrong with the files or values given (argparse ends with code 2 by itself).
    """
    args = build_parser().parse_args(argv)
    if args.out is None and not Path(args.head).is_dir():
        raise ValueError(f"--head is {args.head!r}, which is no directory here: give --out for its tree")
    out = Path(args.out) if args.out is not None else Path(args.head) / TREE_NAME
    TREE_FILE.check_writable(out)  # before minutes of work
    _check_values(args)
    prompts = [] if args.check is None else spread(read_prompts(args.check, "--check"), args.check_limit)
    loaded = load_models(args)
    head = loaded.head
    assert head is not None, "load_models leaves the head out only if asked to"
    found = _measure(args, loaded, head)
    fits = fit(found.ranks.rank_RK, found.ranks.row_R, args.max_rank, NODES if args.nodes == "auto" else [args.nodes])
    costs = None
    if args.nodes == "auto":
        request = CalibrationRequest(args.head, rows=args.rows, context=args.context, repeats=args.repeats)
        costs, draft_ms = measure_tree_costs(loaded.target, head, request, [one.tree for one in fits], _say)
        fits = priced(fits, costs, draft_ms)
    best = max(fits, key=lambda one: one.tokens_per_second or 0.0)
    measured = _measured_tau(args, loaded, best, prompts) if prompts else None
    note = _note(best, costs)
    summary: dict[str, Any] = {
        "nodes": best.tree.nodes,
        "depth": best.tree.depth,
        "expected_accept_length": best.expected,
        "replayed_accept_length": best.replayed,
        "measured_accept_length": measured,
        "tokens_per_second": best.tokens_per_second,
        "plain_tokens_per_second": None if costs is None else 1000 * costs.rows / costs.plain_ms,
        "note": note,
    }
    source = {**found.facts, **summary, "sizes": [_row_of(one) for one in fits]}
    source["costs"] = None if costs is None else costs.to_dict()
    given = list(sys.argv[1:] if argv is None else argv)
    source |= _circumstances(loaded.target, given)
    write_tree(out, best.tree, source)
    print("\n".join([*_accuracy_lines(found), "", *_table(fits, costs, best, measured)]))
    print(f"\n{note}" if note else "")
    _say(f"wrote {out}")
    print(json.dumps({"tree": str(out), **summary}), flush=True)


def _check_values(args: argparse.Namespace) -> None:
    if args.nodes != "auto":
        try:
            args.nodes = int(args.nodes)
        except ValueError as error:
            raise ValueError(f"--nodes is {args.nodes!r}, expected a number or auto") from error
    least = {"limit": 1, "max_rank": 1, "depth": 1, "check_limit": 1, "tokens": 2}
    least |= {"nodes": 2} if args.nodes != "auto" else {}
    for name, bound in least.items():
        value = getattr(args, name)
        if value is not None and value < bound:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected {bound} or more")


# ---- measuring ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """Ranks and accuracy, and what they were measured on, JSON-able."""

    ranks: Ranks
    accuracy: Accuracy
    facts: dict[str, Any]


def _measure(args: argparse.Namespace, loaded: Loaded, head: DraftHead) -> _Found:
    target = loaded.target
    steps = args.depth or min(_DEPTH, head.max_depth or _DEPTH)
    if head.max_depth is not None and steps > head.max_depth:
        raise ValueError(f"--depth is {steps}, head {head.config.kind!r} drafts at most {head.max_depth} tokens")
    widest = len(head.draft_ids) if head.draft_ids is not None else target.vocab_size
    if args.max_rank > widest:
        raise ValueError(f"--max-rank is {args.max_rank}, the draft vocabulary {widest}: lower it")
    run_yaml = Path(args.head) / RUN_YAML
    if not run_yaml.is_file() and (args.data is None or args.limit is None):
        raise ValueError(f"{args.head} holds no {RUN_YAML} of a training run: give --data and --limit")
    config = load_config(run_yaml) if run_yaml.is_file() else None
    data = Path(args.data if args.data is not None or config is None else config.data.work_dir)
    held_out = read_held_out(data, target.name)
    evaluated = 0 if config is None else config.eval.max_rows
    limit = args.limit or evaluated
    rows, cached = held_out[:limit], held_out[: max(limit, evaluated)]  # fewer rows than training has need no new cache
    source = FeatureSource(target, head.needs.taps, loaded.tokenizer)
    features = build_feature_cache(source, cached, _features_folder(data, cache_key(source, cached)), log=_say)
    ranks = measure_ranks(head, rows, features, steps, args.max_rank, _say)
    if not len(ranks.rank_RK):
        raise ValueError(f"--data: the {len(rows)} held-out rows of {data} have no supervised place; give other rows")
    accuracy = Accuracy.of(ranks.rank_RK, args.max_rank)
    unknown = (ranks.rank_RK == UNKNOWN).sum(0).tolist()
    facts = {
        "head": args.head,
        "head_kind": head.config.kind,
        "head_sha256": head_digest(Path(args.head)),
        "target": target.name,
        "target_revision": target.revision,
        "target_adapter": target.adapter,
        "dtype": str(target.dtype).removeprefix("torch."),
        "data": str(data),
        "rows": len(rows),
        "roots": len(ranks.rank_RK),
        "max_rank": args.max_rank,
        "fitted_on": "all rows; replayed_accept_length: the tree of the even rows, on the odd ones",
        "mean_over": "places of the held-out text, not rounds of decoding",
        "accuracy_by_depth_and_rank": {
            depth: [round(share, 5) for share in shares] for depth, shares in enumerate(accuracy.share, 1)
        },
        "places_by_depth": list(accuracy.tried),
        "unknown_by_depth": unknown,
    }
    return _Found(ranks, accuracy, facts)


def _features_folder(data: Path, key: dict[str, Any]) -> Path:
    """Where training keeps these features; a folder beside it where that holds those of another target.

    So it is if an adapter of the target was trained together with the head.
    """
    usual = data / f"features_held_out_{key['rows']}"
    manifest = usual / "manifest.json"
    if not manifest.is_file() or not differences(json.loads(manifest.read_text()), key):
        return usual
    return usual.with_name(f"{usual.name}_{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}")


def _measured_tau(args: argparse.Namespace, loaded: Loaded, best: Fit, prompts: Sequence[Any]) -> float | None:
    """Accept length of decoding these prompts with the tree, by the engine; None: no round was needed."""
    options = DecodeOptions(TreePolicy.of(best.tree))
    stop = StopRule(loaded.target.eos_ids, args.tokens)
    tokens = passes = 0
    for done, prompt in enumerate(prompts, 1):
        ids = encode_prompt(loaded.tokenizer, prompt, args.raw, args.template_kwargs)
        stats = decode(loaded.target, loaded.head, [RowRequest(ids, stop)], options)[0].stats
        tokens, passes = tokens + stats.round_tokens, passes + stats.target_passes
        _say(f"check: {done} of {len(prompts)} prompts")
    return tokens / passes if passes else None


def _circumstances(target: TargetAdapter, argv: Sequence[str]) -> dict[str, Any]:
    return {
        "command": shlex.join(["scripts/fit_tree.py", *argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine_name(target.device),
        "versions": library_versions(),
        "commit": commit_id(),
    }


# ---- showing -----------------------------------------------------------------------------------------------


def _note(best: Fit, costs: Costs | None) -> str | None:
    if costs is None or best.tokens_per_second is None:
        return None
    plain = 1000 * costs.rows / costs.plain_ms
    if best.tokens_per_second > plain:
        return None
    return (
        f"plain decoding is faster here: {plain:.1f} tokens/s, {best.tokens_per_second:.1f} with the best tree, which "
        "is written all the same"
    )


def _row_of(one: Fit) -> dict[str, Any]:
    return {
        "nodes": one.tree.nodes,
        "depth": one.tree.depth,
        "expected": one.expected,
        "replayed": one.replayed,
        "round_ms": one.round_ms,
        "tokens_per_second": one.tokens_per_second,
    }


def _accuracy_lines(found: _Found) -> list[str]:
    """Shares of the first ranks per depth, and of all together."""
    shown = min(5, len(found.accuracy.share[0]))
    rows = [["depth", "places", *(f"rank {rank}" for rank in range(shown)), "any rank"]]
    for depth, (tried, shares) in enumerate(zip(found.accuracy.tried, found.accuracy.share, strict=True), 1):
        cells = [f"{100 * share:.1f} %" for share in [*shares[:shown], sum(shares)]]
        rows.append([str(depth), str(tried), *cells])
    facts = found.facts
    head = (
        f"{facts['rows']} rows, {facts['roots']} places of {facts['data']}; rank of the target's token in the drafts:"
    )
    return [head, *aligned(rows)]


def _table(fits: Sequence[Fit], costs: Costs | None, best: Fit, measured: float | None) -> list[str]:
    rows = [["tree", "expected", "replayed on the other half", "measured", "ms per round", "tokens/s"]]
    if costs is not None:
        plain = 1000 * costs.rows / costs.plain_ms
        rows.append(["plain decoding", "1.00", "", "", f"{costs.plain_ms:.2f}", f"{plain:.1f}"])
    for one in fits:
        mark = " *" if one is best and len(fits) > 1 else ""
        rows.append(
            [
                f"{one.tree.nodes} nodes, depth {one.tree.depth}{mark}",
                f"{one.expected:.2f}",
                _number(one.replayed),
                _number(measured if one is best else None),
                _number(one.round_ms),
                _number(one.tokens_per_second, 1),
            ]
        )
    notes = "accept lengths; expected and replayed: mean over places of the text, measured: over rounds of decoding"
    return [*aligned(rows), notes + ("; * chosen" if len(fits) > 1 else "")]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

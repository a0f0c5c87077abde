"""The command line of `infer/generate.py`: options, loading, and the two things it does."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer

from heads.base import DraftHead, TreePolicy
from heads.checkpoint import load_head, read_config
from heads.embedded import resolve_target
from heads.target import TargetAdapter, pick_device
from infer.engine import decode_speculative
from infer.evaluation import EvalRequest, evaluate, open_results
from infer.probe import require_tree
from infer.prompts import Prompt, counts_by_category, encode_prompt, read_prompts, spread
from infer.stopping import StopRule
from infer.streaming import TextStream

_DTYPES = ("auto", "float32", "bfloat16")


def build_parser() -> argparse.ArgumentParser:
    """All options of `infer/generate.py`."""
    tree = TreePolicy()
    parser = argparse.ArgumentParser(
        prog="generate.py",
        description="Greedy decoding with a draft head. --prompt streams the answer; --eval decodes a prompt "
        "set with and without the head, interleaved, and prints accept length, acceptance and speed-up.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="answer this prompt")
    what.add_argument(
        "--eval",
        metavar="FILE",
        help="JSONL; rows have `turns` (Spec-Bench), `messages`, `conversations` or `prompt`; only the first "
        "user turn is used (with the system message before it); `category` groups the table",
    )
    add = parser.add_argument_group("model").add_argument
    add("--head", metavar="DIR", required=True, help="a head written by training")
    add("--target", help='hub id, directory or "embedded"; default: the one the head was trained for')
    add("--cache-dir", metavar="DIR", help="where the embedded target is kept")
    add("--dtype", choices=_DTYPES, default="auto", help="auto: as the target is stored (default)")
    add("--device", default="auto", help="auto (default): cuda if there is one, else cpu")
    add("--threads", type=int, metavar="N", help="CPU threads; default: torch's choice")
    add("--trust-remote-code", action="store_true", help="run model code from the hub")
    add = parser.add_argument_group("prompt and length").add_argument
    add("--raw", action="store_true", help="no chat template: decode from the bare text")
    add("--system", metavar="TEXT", help="system message before the prompt")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    add = parser.add_argument_group("draft tree").add_argument
    add("--tree-width", type=int, metavar="N", help=f"nodes kept per level; default: {tree.width}")
    add("--tree-depth", type=int, metavar="N", help=f"levels; default: {tree.depth}")
    add("--tree-nodes", type=int, metavar="N", help=f"all nodes, root included; default: {tree.total}")
    add("--chain", type=int, metavar="K", help="a chain of K drafts instead of a tree")
    add = parser.add_argument_group("with --eval").add_argument
    add("--limit", type=int, metavar="N", help="only N prompts, spread evenly over the categories")
    add(
        "--json",
        metavar="FILE",
        help="write the report here; finished prompts are kept in FILE.partial.jsonl, and the same command "
        "goes on from there after a kill",
    )
    return parser


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, TreePolicy]:
    parser = build_parser()
    args = parser.parse_args(argv)
    tree = {"width": args.tree_width, "depth": args.tree_depth, "total": args.tree_nodes}
    given = {name: value for name, value in tree.items() if value is not None}
    if args.chain is not None and given:
        parser.error("--chain is a tree of width 1: leave out --tree-width, --tree-depth and --tree-nodes")
    if args.raw and args.system is not None:
        parser.error("--system needs a chat template: leave out --raw")
    for name in ("limit", "json"):
        if args.eval is None and getattr(args, name) is not None:
            parser.error(f"--{name} needs --eval")
    if args.chain is not None:
        if args.chain < 1:
            parser.error(f"--chain is {args.chain}, expected 1 or more")
        return args, TreePolicy(width=1, depth=args.chain, total=args.chain + 1)
    return args, TreePolicy(**given)


@dataclass(frozen=True)
class Loaded:
    """A target that passed the probe, the head bound to it, and the target's tokenizer."""

    target: TargetAdapter
    head: DraftHead
    tokenizer: Any


def _load(args: argparse.Namespace) -> Loaded:
    config = read_config(args.head)
    path = args.target or config.target
    try:
        device = torch.device(pick_device(args.device))
    except RuntimeError as error:
        raise ValueError(f"--device: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device is {device}, but torch sees no CUDA device; use --device cpu")
    head = load_head(args.head)
    revision = config.target_revision if path == config.target else None
    target = TargetAdapter.load(
        path,
        dtype=args.dtype,
        device=device,
        revision=revision,
        trust_remote_code=args.trust_remote_code,
        cache_dir=args.cache_dir,
        taps=head.needs.taps,
    )
    head = head.to(device=target.device, dtype=target.dtype).eval()
    head.bind(target)
    require_tree(target)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            resolve_target(path, args.cache_dir), revision=revision, trust_remote_code=args.trust_remote_code
        )
    except OSError as error:
        raise ValueError(f"--target: {path!r} has no tokenizer: {error}") from error
    return Loaded(target, head, tokenizer)


def run(argv: Sequence[str] | None = None) -> int:
    """Parses the options and does the work; returns the exit code.

    Raises:
        ValueError: anything wrong with the files or values given (argparse ends with code 2 by itself).
    """
    args, policy = _parse(argv)
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads is {args.threads}, expected 1 or more")
        torch.set_num_threads(args.threads)
    StopRule(frozenset(), args.max_new_tokens)  # a bad limit is told before anything is loaded
    if args.eval is not None:
        return _run_eval(args, policy, list(sys.argv[1:] if argv is None else argv))
    return _run_prompt(args, policy)


def _run_prompt(args: argparse.Namespace, policy: TreePolicy) -> int:
    loaded = _load(args)
    ids = encode_prompt(loaded.tokenizer, Prompt("prompt", "all", args.prompt, args.system), args.raw)

    def write(text: str) -> None:
        print(text, end="", flush=True)

    stream = TextStream(loaded.tokenizer, write)
    stop = StopRule(loaded.target.eos_ids, args.max_new_tokens)
    new_ids, stats = decode_speculative(loaded.target, loaded.head, ids, policy, stop, stream.push)
    stream.finish()
    tau = "-" if stats.tau is None else f"{stats.tau:.2f}"
    print(
        f"\n[accept length {tau} tokens per target pass · {len(new_ids)} tokens · "
        f"{len(new_ids) / stats.total_seconds:.1f} tokens/s]"
    )
    return 0


def _run_eval(args: argparse.Namespace, policy: TreePolicy, argv: list[str]) -> int:
    everything = read_prompts(args.eval)
    prompts = spread(everything, args.limit)
    _say(f"{len(prompts)} of {len(everything)} prompts: {counts_by_category(prompts)}")
    if args.limit is not None:
        _say(f"chosen: {' '.join(prompt.id for prompt in prompts)}")
    if args.system is not None:
        prompts = [Prompt(p.id, p.category, p.text, args.system) for p in prompts]
    read_config(args.head)
    results = open_results(args.json)
    started = time.perf_counter()
    loaded = _load(args)
    _say(f"loaded in {time.perf_counter() - started:.1f} s")
    request = EvalRequest(
        target=loaded.target,
        head=loaded.head,
        policy=policy,
        max_new_tokens=args.max_new_tokens,
        prompts=prompts,
        prompt_ids=[encode_prompt(loaded.tokenizer, prompt, args.raw) for prompt in prompts],
        head_dir=args.head,
        eval_file=args.eval,
        settings={"raw": args.raw, "system": args.system, "limit": args.limit},
        argv=argv,
    )
    return evaluate(request, results, _say)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

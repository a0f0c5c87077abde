"""The command line of `infer/generate.py`: options, and the things it does with them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import LogitsProcessorList

from heads.base import TreePolicy
from heads.formats.files import head_folder
from heads.formats.opening import is_native
from heads.tree import Proposal
from infer.audit import audit, format_audit
from infer.calibration import calibrate, choose, describe
from infer.costs import CalibrationRequest
from infer.engine import DecodeOptions, RowRequest, RowResult, decode
from infer.evaluation import EvalRequest, evaluate, open_results
from infer.library import decode_library
from infer.loading import Loaded, add_model_options, load_models
from infer.prompts import (
    Prompt,
    add_prompt_options,
    counts_by_category,
    encode_messages,
    encode_prompt,
    read_prompts,
    spread,
)
from infer.sampling import build_processors
from infer.stopping import StopRule
from infer.streaming import ColourWriter, TextStream, TokenKind
from infer.trees import read_tree, tree_beside
from infer.verify import RULES

_LOSSY = "LOSSY: typical acceptance does not follow the target's distribution"


def build_parser() -> argparse.ArgumentParser:
    """All options of `infer/generate.py`."""
    parser = argparse.ArgumentParser(
        prog="generate.py",
        description="Decoding with a draft head. --prompt, --ids and --chat stream answers; --answer decodes a file; "
        "--eval decodes a prompt set with and without the head, interleaved, and prints accept length, acceptance and "
        "speed-up; --audit proves on this target and head that nothing is lost.",
    )
    what = parser.add_mutually_exclusive_group(required=True).add_argument
    what("--prompt", metavar="TEXT", help="answer this prompt")
    what("--ids", metavar="IDS", help="go on after these token ids, separated by commas")
    what("--chat", action="store_true", help="a conversation: one user turn per line of the standard input")
    what("--answer", metavar="FILE", help="answer every prompt of a JSONL file; one JSON line each on stdout")
    what(
        "--eval",
        metavar="FILE",
        help="JSONL; rows have `turns` (Spec-Bench), `messages`, `conversations` or `prompt`; only the first "
        "user turn is used (with the system message before it); `category` groups the table",
    )
    what("--audit", metavar="FILE", help="lossless proof on the prompts of a JSONL file")
    add_model_options(parser)
    group = parser.add_argument_group("prompt and length")
    add_prompt_options(group)
    add = group.add_argument
    add("--system", metavar="TEXT", help="system message before the prompt")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    add("--min-new-tokens", type=int, default=0, metavar="N", help="no end of sequence before")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text (may be given again)")
    add("--colour", choices=("auto", "always", "never"), default="auto", help="accepted green, corrected yellow")
    _add_sampling(parser)
    _add_tree(parser)
    add = parser.add_argument_group("with --answer, --eval and --audit").add_argument
    add("--limit", type=int, metavar="N", help="only N prompts, spread evenly over the categories")
    add("--rows", type=int, metavar="N", help="prompts decoded together (--answer, --eval); default: 1")
    add(
        "--json",
        metavar="FILE",
        help="with --eval: write the report here; finished prompts are kept in FILE.partial.jsonl, and the same "
        "command goes on from there after a kill",
    )
    add("--draws", type=int, metavar="N", help="with --audit: sampled outputs per rule; default: 2000")
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default): greedy")
    add("--top-k", type=int, default=0, metavar="K", help="0 (default): off")
    add("--top-p", type=float, default=1.0, metavar="P", help="1 (default): off")
    add("--min-p", type=float, default=0.0, metavar="P", help="0 (default): off")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="1 (default): off")
    add("--presence-penalty", type=float, default=0.0, metavar="X", help="0 (default): off")
    add("--seed", type=int, default=0, metavar="N", help="default: 0; row i draws with seed N + i")
    lossless = [name for name, rule in RULES.items() if rule.lossless and name != "greedy"]
    add("--rule", choices=lossless, help="how drafts are verified when sampling; all of these are exact")
    add("--lossy-typical", action="store_true", help="Medusa's typical acceptance: NOT the target's distribution")
    add("--proposal", choices=("top_k", "sampled"), help="draft the likeliest children (default), or draw them")


def _add_tree(parser: argparse.ArgumentParser) -> None:
    tree = TreePolicy()
    add = parser.add_argument_group("draft tree").add_argument
    add(
        "--tree",
        metavar="auto|FILE|dynamic",
        help="auto: the best tree, or none, by infer/calibrate.py's measurement; FILE: a tree of scripts/fit_tree.py; "
        "dynamic: chosen anew for every tree by the draft's scores. Default: tree.json in the head's directory if it "
        "is there and no other option tells the tree, else dynamic",
    )
    add("--tree-width", type=int, metavar="N", help=f"nodes kept per level; default: {tree.width}")
    add("--tree-depth", type=int, metavar="N", help=f"levels; default: {tree.depth}")
    add("--tree-nodes", type=int, metavar="N", help=f"all nodes, root included; default: {tree.total}")
    add("--chain", type=int, metavar="K", help="a chain of K drafts instead of a tree")
    add("--plain", action="store_true", help="without drafts (also for targets that cannot verify trees)")
    add("--compile", action="store_true", help="compile passes and drafts: static shapes, slow first rounds")


@dataclass(frozen=True)
class _Job:
    """Parsed options, and what they mean for decoding. options None: decode plainly."""

    args: argparse.Namespace
    argv: list[str]
    policy: TreePolicy
    rule: str
    proposal: Proposal
    break_even: float | None = None

    @property
    def options(self) -> DecodeOptions:
        compiled = self.args.compile
        return DecodeOptions(self.policy, self.rule, self.proposal, compiled=compiled, break_even=self.break_even)

    def sampling(self) -> dict[str, Any]:
        """The settings of `build_processors` that are not at their defaults; empty: greedy without penalties."""
        args = self.args
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
        chosen = {name: getattr(args, name) for name, value in off.items() if getattr(args, name) != value}
        if args.temperature:
            chosen["temperature"] = args.temperature
        if args.min_new_tokens:
            chosen["min_new_tokens"] = args.min_new_tokens
        return chosen

    def processors(self, loaded: Loaded) -> Callable[[Sequence[int]], LogitsProcessorList | None]:
        settings = {"do_sample": self.args.temperature > 0, **self.sampling()}

        def build(prompt_ids: Sequence[int]) -> LogitsProcessorList | None:
            device = loaded.target.head_device
            eos = sorted(loaded.target.eos_ids)
            built = build_processors(**settings, eos_ids=eos, prompt_length=len(prompt_ids), device=device)
            return built or None

        return build

    def stop(self, loaded: Loaded) -> StopRule:
        args = self.args
        return StopRule(loaded.target.eos_ids, args.max_new_tokens, tuple(args.stop), loaded.tokenizer)


def _parse(argv: Sequence[str] | None) -> _Job:
    parser = build_parser()
    args = parser.parse_args(argv)
    given = {"width": args.tree_width, "depth": args.tree_depth, "total": args.tree_nodes}
    tree = {name: value for name, value in given.items() if value is not None}
    if args.chain is not None and tree:
        parser.error("--chain is a tree of width 1: leave out --tree-width, --tree-depth and --tree-nodes")
    if args.tree and args.plain:
        parser.error("--plain drafts nothing: leave out --tree")
    if args.tree not in (None, "dynamic") and (tree or args.chain is not None):
        parser.error(f"--tree {args.tree} tells the whole tree: leave out --tree-width, -depth, -nodes and --chain")
    if (args.raw or args.ids is not None) and args.system is not None:
        parser.error("--system needs a chat template: leave out --raw and --ids")
    if args.raw and args.chat:
        parser.error("--chat needs a chat template: leave out --raw")
    file = next((name for name in ("answer", "eval", "audit") if getattr(args, name) is not None), None)
    for name, wanted in (
        ("limit", ("answer", "eval", "audit")),
        ("rows", ("answer", "eval")),
        ("json", ("eval",)),
        ("draws", ("audit",)),
    ):
        if getattr(args, name) is not None and file not in wanted:
            parser.error(f"--{name} needs --{' or --'.join(wanted)}")
    if args.plain and file in ("eval", "audit"):
        parser.error(f"--{file} compares with plain decoding: leave out --plain")
    if (args.rule or args.lossy_typical) and not args.temperature:
        parser.error("--rule and --lossy-typical are for sampling: give a --temperature above 0")
    if args.rule and args.lossy_typical:
        parser.error("--lossy-typical is a rule of its own: leave out --rule")
    if args.chain is not None and args.chain < 1:
        parser.error(f"--chain is {args.chain}, expected 1 or more")
    proposal: Proposal = args.proposal or "top_k"
    rule = args.rule or ("sampled" if proposal == "sampled" else "match")
    rule = "typical_lossy" if args.lossy_typical else rule if args.temperature else "greedy"
    job = _Job(args, list(sys.argv[1:] if argv is None else argv), _policy(args, tree, proposal), rule, proposal)
    # Bad values are told before anything is loaded.
    assert job.options
    StopRule(frozenset(), args.max_new_tokens)
    build_processors(do_sample=args.temperature > 0, **job.sampling(), prompt_length=1)
    return job


def _policy(args: argparse.Namespace, shape: dict[str, Any], proposal: Proposal) -> TreePolicy:
    """The tree that the options tell; without any the one beside the head, if its children are not to be drawn."""
    if args.tree not in (None, "auto", "dynamic"):
        return TreePolicy.of(read_tree(args.tree))
    if args.chain is not None:
        return TreePolicy(1, args.chain, args.chain + 1)
    file = tree_beside(args.head)
    if shape or args.tree or args.plain or file is None:
        return TreePolicy(**shape)
    if proposal != "top_k":
        _say(f"tree: dynamic, since the children of {file} are not drawn")
        return TreePolicy()
    policy = TreePolicy.of(read_tree(file))
    _say(f"tree: {file}, {describe(policy)}")
    return policy


def run(argv: Sequence[str] | None = None) -> int:
    """Parses the options and does the work; returns the exit code.

    Raises:
        ValueError: anything wrong with the files or values given (argparse ends with code 2 by itself).
    """
    job = _parse(argv)
    if not job.options.verifier.lossless:
        _say(_LOSSY)
    args = job.args
    if args.eval is not None:
        return _run_eval(job)
    if args.audit is not None:
        return _run_audit(job)
    if args.answer is not None:
        return _run_answer(job)
    loaded, job = _load(job)
    if args.chat:
        return _run_chat(loaded, job)
    if args.ids is not None:
        ids = _parse_ids(args.ids)
    else:
        ids = encode_prompt(
            loaded.tokenizer, Prompt("prompt", "all", args.prompt, args.system), args.raw, args.template_kwargs
        )
    _stream(loaded, job, ids, sys.stdout.write)
    return 0


def _load(job: _Job) -> tuple[Loaded, _Job]:
    """The models, and the job with the tree that is right for them (its head may be dropped: plain decoding)."""
    args = job.args
    started = time.perf_counter()
    loaded = load_models(args, plain=args.plain)
    if loaded.head is not None and args.tree_depth is None and args.chain is None and job.policy.static is None:
        job = replace(job, policy=job.policy.limited(loaded.head.max_depth))
    if args.tree == "auto" and loaded.head is not None:
        request = CalibrationRequest(args.head, rows=args.rows or 1, compiled=args.compile)
        found = calibrate(loaded.target, loaded.head, request, None, _say, args.cache_dir)
        choice = choose(found.costs, found.acceptance)
        _say(f"--tree auto: {choice.reason}")
        if choice.policy is None:
            loaded = replace(loaded, head=None)
        else:
            job = replace(job, policy=choice.policy, break_even=choice.break_even_tau)
    if args.compile:
        _say("--compile: the first pass and draft of each shape are compiled, which takes a while")
    _say(f"loaded in {time.perf_counter() - started:.1f} s")
    return loaded, job


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise ValueError(f"--ids is {text!r}, expected token ids separated by commas") from error


def _stream(loaded: Loaded, job: _Job, ids: list[int], write: Callable[[str], object]) -> str:
    """Decodes one prompt and writes the text while it is decided, then a line about it. Returns the text."""
    pieces: list[str] = []
    colour = job.args.colour == "always" or (job.args.colour == "auto" and sys.stdout.isatty())

    def emit(text: str) -> None:
        write(text)
        sys.stdout.flush()

    writer = ColourWriter(emit) if colour else emit
    stream = TextStream(loaded.tokenizer, writer, job.args.stop, ids)
    plain_text = TextStream(loaded.tokenizer, pieces.append, job.args.stop, ids)

    def on_block(emitted: list[int], accepted: int) -> None:
        kinds: list[TokenKind] = ["accepted" if i < accepted else "corrected" for i in range(len(emitted))]
        stream.push(emitted, kinds if loaded.head is not None else None)
        plain_text.push(emitted)

    row = RowRequest(ids, job.stop(loaded), job.processors(loaded)(ids), seed=job.args.seed, on_block=on_block)
    result = _decode(loaded, job, [row])[0]
    stream.finish(result.reason)
    plain_text.finish(result.reason)
    if isinstance(writer, ColourWriter):
        writer.close()
    emit(f"\n[{_summary(result, loaded)}]\n")
    return "".join(pieces)


def _decode(loaded: Loaded, job: _Job, rows: Sequence[RowRequest]) -> list[RowResult]:
    if not loaded.fit:
        return decode_library(loaded.target, rows, job.args.temperature > 0)
    return decode(loaded.target, loaded.head, rows, _options(loaded, job))


def _options(loaded: Loaded, job: _Job) -> DecodeOptions:
    """Without a head nothing is drawn as a draft: sampling is by rule "match"."""
    if loaded.head is not None:
        return job.options
    return DecodeOptions(rule="match" if job.args.temperature else "greedy", compiled=job.args.compile)


def _summary(result: RowResult, loaded: Loaded) -> str:
    stats = result.stats
    tau = "-" if stats.tau is None else f"{stats.tau:.2f}"
    drafts = f"accept length {tau} tokens per target pass" if loaded.head is not None else "plain decoding"
    return f"{drafts} · {len(result.ids)} tokens · {len(result.ids) / stats.total_seconds:.1f} tokens/s"


def _run_chat(loaded: Loaded, job: _Job) -> int:
    """Turns from the standard input until it ends; each answer goes into the context of the next turn."""
    messages: list[dict[str, str]] = []
    if job.args.system is not None:
        messages.append({"role": "system", "content": job.args.system})
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        print(prompt, end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return 0
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        ids = encode_messages(loaded.tokenizer, messages, f"turn {len(messages)}", job.args.template_kwargs)
        messages.append({"role": "assistant", "content": _stream(loaded, job, ids, sys.stdout.write)})


def _prompts(job: _Job, file: str, option: str) -> list[Prompt]:
    everything = read_prompts(file, option)
    prompts = spread(everything, job.args.limit)
    _say(f"{len(prompts)} of {len(everything)} prompts: {counts_by_category(prompts)}")
    if job.args.limit is not None:
        _say(f"chosen: {' '.join(prompt.id for prompt in prompts)}")
    if job.args.system is not None:
        prompts = [Prompt(p.id, p.category, p.text, job.args.system) for p in prompts]
    is_native(head_folder(job.args.head))  # that there is one, before long work
    return prompts


def _run_answer(job: _Job) -> int:
    """One JSON line per prompt, in the file's order, `--rows` prompts decoded together."""
    prompts = _prompts(job, job.args.answer, "--answer")
    loaded, job = _load(job)
    ids = [encode_prompt(loaded.tokenizer, prompt, job.args.raw, job.args.template_kwargs) for prompt in prompts]
    build, stop, rows = job.processors(loaded), job.stop(loaded), job.args.rows or 1
    started, made = time.perf_counter(), 0
    for first in range(0, len(prompts), rows):
        chosen = range(first, min(first + rows, len(prompts)))
        requests = [RowRequest(ids[i], stop, build(ids[i]), seed=job.args.seed + i) for i in chosen]
        for i, result in zip(chosen, _decode(loaded, job, requests), strict=True):
            pieces: list[str] = []
            stream = TextStream(loaded.tokenizer, pieces.append, job.args.stop, ids[i])
            stream.push(result.ids)
            stream.finish(result.reason)
            line: dict[str, Any] = {
                "id": prompts[i].id,
                "text": "".join(pieces),
                "ids": result.ids,
                "ended": result.reason,
            }
            line |= {"accept_length": result.stats.tau, "target_passes": result.stats.target_passes}
            if not job.options.verifier.lossless:
                line["lossy"] = _LOSSY
            print(json.dumps(line, ensure_ascii=False), flush=True)
            made += len(result.ids)
        seconds, done = time.perf_counter() - started, chosen[-1] + 1
        left = seconds / done * (len(prompts) - done)
        _say(f"{done}/{len(prompts)} prompts, {made / seconds:.1f} tokens/s, {left:.0f} s left")
    return 0


def _run_eval(job: _Job) -> int:
    args = job.args
    prompts = _prompts(job, args.eval, "--eval")
    results = open_results(args.json)
    loaded, job = _load(job)
    if loaded.head is None:
        raise ValueError("--tree auto chose plain decoding: there is nothing to evaluate; give a tree")
    request = EvalRequest(
        target=loaded.target,
        head=loaded.head,
        options=job.options,
        max_new_tokens=args.max_new_tokens,
        prompts=prompts,
        prompt_ids=[encode_prompt(loaded.tokenizer, prompt, args.raw, args.template_kwargs) for prompt in prompts],
        head_dir=args.head,
        eval_file=args.eval,
        changed=loaded.changed,
        settings={
            "raw": args.raw,
            "template_kwargs": args.template_kwargs,
            "system": args.system,
            "limit": args.limit,
            "compile": args.compile,
        },
        argv=job.argv,
        sampling=job.sampling(),
        processors=job.processors(loaded),
        seed=args.seed,
        plain_compiled=_plain_compiled(loaded, job) if args.compile else None,
        library_kwargs={"do_sample": args.temperature > 0, **_library_settings(job)},
        rows=args.rows or 1,
    )
    return evaluate(request, results, _say)


def _plain_compiled(loaded: Loaded, job: _Job) -> Callable[[Sequence[RowRequest]], list[RowResult]]:
    options = _options(Loaded(loaded.target, None, loaded.tokenizer), job)
    return lambda rows: decode(loaded.target, None, rows, options)


def _library_settings(job: _Job) -> dict[str, Any]:
    """The same settings for `model.generate`. It has no presence penalty."""
    settings = job.sampling()
    if settings.pop("presence_penalty", None) is not None:
        raise ValueError("--presence-penalty is not known to the library's generate; leave it out with --eval")
    return settings


def _run_audit(job: _Job) -> int:
    args = job.args
    prompts = _prompts(job, args.audit, "--audit")
    loaded, job = _load(job)
    if loaded.head is None:
        raise ValueError("--tree auto chose plain decoding: there is nothing to audit; give a tree")
    ids = [encode_prompt(loaded.tokenizer, prompt, args.raw, args.template_kwargs) for prompt in prompts]
    draws = {} if args.draws is None else {"draws": args.draws}
    found = audit(
        loaded.target,
        loaded.head,
        ids,
        policy=job.policy,
        max_new_tokens=args.max_new_tokens,
        seed=args.seed,
        say=_say,
        **draws,
    )
    print(format_audit(found))
    print(json.dumps(found), flush=True)
    return 0 if found["passed"] else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

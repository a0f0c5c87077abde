"""Is decoding with drafts lossless? Proved on the user's own target and head, and the measurements that this takes.

Greedy texts must be those of plain decoding: token by token in fp32 and fp64. In half precision passes of another width
round differently; there a first difference is explained if the target's top-2 gap is within twice the noise measured
between one-token and tree-wide passes. Sampled texts must follow the target's law, which for a few tokens can be
enumerated; a G-test compares.

Shapes: B rows, N tree nodes, V vocabulary, R prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from heads.base import DraftHead, TreePolicy
from heads.cache import SlotCache
from heads.target import TargetAdapter
from heads.topk import argmax_of
from heads.tree import Proposal, ancestor_mask, tree_positions
from infer.baseline import decode_plain
from infer.engine import DecodeOptions, RowRequest, decode
from infer.prefill import TreeMasks, prefill
from infer.report import first_divergence
from infer.sampling import Processing, RowRandom, build_processors, draw, softmax_of
from infer.stopping import StopRule

MARK = "draftsmith_audit"  # key by which a result is known; its value is the schema version
SCHEMA = 1
P_THRESHOLD = 1e-4  # of a G-test: the chance that a right decoder fails it
_LEAST_EXPECTED = 5.0  # draws of a cell; below, the chi-square tail is not trusted (Cochran, 1954)
_SAMPLED_TOKENS, _SAMPLED_TOP_K = 3, 4  # at most 4 ** 3 outcomes
_LAW_PROMPT = 16  # prompt tokens of the sampled checks: a law is a law after any prefix, and short ones are cheap
_LAW_CANDIDATES = 4  # prompts among which the half-precision check chooses
_NOISE_PROMPTS = 4
_MOST_ROWS, _LOGITS = 256, 2**25  # of a batch of draws: rows, and fp32 logits of a pass
_GREEDY_ROWS = 32
_RULES: tuple[tuple[str, Proposal], ...] = (("match", "top_k"), ("top_k", "top_k"), ("sampled", "sampled"))

Outcome = tuple[int, ...]


# ---- one-token and tree-wide passes over the same tokens ---------------------------------------------------


@dataclass(frozen=True)
class Replay:
    """Plain decoding's tokens, fed again.

    gaps: [i] = difference of the two largest processed scores that token i was chosen from, in one-token passes.
    noise: largest difference of these scores to those of passes padded to the tree's width. parts_at: first token that
        decoding in such passes would choose otherwise; None: none. (Both None and 0.0 without a width.)
    """

    gaps: list[float]
    noise: float
    parts_at: int | None


@dataclass(frozen=True)
class Chooser:
    """How plain decoding turns scores into a token: the argmax, or (rule "match") a draw by the row's numbers."""

    processors: LogitsProcessorList | None = None
    seed: int | None = None


@torch.inference_mode()
def replay(
    target: TargetAdapter,
    prompt_ids: Sequence[int],
    new_ids: Sequence[int],
    nodes: int | None = None,
    chooser: Chooser | None = None,
    rows: int = 1,
) -> Replay:
    """Feeds `new_ids`, which plain decoding emitted, to one-token passes, and beside them to passes of `nodes` tokens.

    The wide passes are plain decoding without speculation: each holds the token and nodes - 1 copies of it that the
    token does not see and that are dropped after the pass; both ways keep a cache of their own. Up to the first other
    choice, such decoding emits the same tokens, so `parts_at` is where its text would part.

    rows: copies of the prompt in the batch, so that passes have the shapes of a batched run.
    """
    chooser = chooser or Chooser()
    slots = len(prompt_ids) + len(new_ids)
    thin = _Feeder(target, prompt_ids, slots, 1, rows)
    wide = _Feeder(target, prompt_ids, slots, nodes, rows) if nodes is not None else None
    processing = Processing([chooser.processors], [prompt_ids], target.head_device)
    uniform_T = None if chooser.seed is None else RowRandom([chooser.seed], target.head_device).uniform(len(new_ids))[0]
    gaps, noise, parts_at = [], 0.0, None
    for place, token in enumerate(new_ids):
        # The prefill is one pass for both, so the first token says nothing about widths.
        scores_1V = processing.scores(thin.logits_1V, [0])
        gaps.append(_gap(scores_1V[0]))
        if wide is not None:
            other_1V = processing.scores(wide.logits_1V, [0])
            noise = max(noise, _largest_difference(scores_1V, other_1V))
            if parts_at is None and _choose(other_1V, uniform_T, place) != _choose(scores_1V, uniform_T, place):
                parts_at = place
        if place + 1 < len(new_ids):
            processing.append(0, [token])
            for feeder in (thin, wide):
                if feeder is not None:
                    feeder.feed(token)
    return Replay(gaps, noise, parts_at)


def _choose(scores_1V: Tensor, uniform_T: Tensor | None, place: int) -> int:
    if uniform_T is None:
        return int(argmax_of(scores_1V)[0])
    return int(draw(softmax_of(scores_1V), uniform_T[place : place + 1])[0])


def _gap(scores_V: Tensor) -> float:
    best, second = scores_V.float().topk(2).values.tolist()
    return min(best - second, torch.finfo(torch.float32).max)  # a lone token: as JSON has no infinity


def _largest_difference(left: Tensor, right: Tensor) -> float:
    both = left.isfinite() & right.isfinite()  # a cut-off may fall differently; that is no noise of the scores
    return float((left - right)[both].abs().max()) if bool(both.any()) else 0.0


class _Feeder:
    """A prompt in `rows` equal rows, continued token by token in passes of `width` tokens."""

    def __init__(self, target: TargetAdapter, prompt_ids: Sequence[int], slots: int, width: int, rows: int) -> None:
        self._target, self._width, device = target, width, target.device
        self._cache: SlotCache = target.new_cache(slots + width, rows)
        logits_BV, _ = prefill(target, [prompt_ids] * rows, self._cache)
        self.logits_1V = logits_BV[:1]
        self._masks = TreeMasks(target, width, [len(prompt_ids)] * rows, slots + width)
        parent_BN = torch.zeros(rows, width, dtype=torch.long, device=device)  # all others are the token's children
        parent_BN[:, 0] = -1
        self._ancestors_BNN = ancestor_mask(parent_BN)
        self._depth_BN = parent_BN + 1
        self._depth_BN[:, 0] = 0

    def feed(self, token: int) -> None:
        lengths = list(self._cache.lengths)
        length_B = torch.tensor(lengths, device=self._target.device)
        position_BN = tree_positions(self._depth_BN, length_B)
        if self._target.max_positions is not None:
            position_BN = position_BN.clamp_max(self._target.max_positions - 1)
        end = self._cache.length + self._width
        mask = self._masks.tree(self._ancestors_BNN, self._depth_BN, length_B, end)
        out = self._target.forward(torch.full_like(self._depth_BN, token), position_BN, mask, self._cache)
        self._cache.commit(lengths, [[0]] * len(lengths))
        self.logits_1V = out.logits_BNV[:1, 0]


# ---- the audit ---------------------------------------------------------------------------------------------


def audit(
    target: TargetAdapter,
    head: DraftHead,
    prompts_ids: Sequence[Sequence[int]],
    *,
    policy: TreePolicy | None = None,
    max_new_tokens: int = 64,
    draws: int = 2000,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Checks that this target with this head emits what the target alone would; JSON-able, see `format_audit`.

    Greedy: every prompt one by one, and all in ragged batches, against plain decoding. Sampled: `draws` texts of up to
    three tokens at temperature 1 and top-k 4, for each lossless rule that the head and the tree go with, against the
    enumerated law of a prompt (its last 16 tokens). Each sampled check fails a right decoder with a chance of about
    1e-4.

    "passed" needs a "pass" of every check; "undecided" (half precision only) means that the prompts have a top-k cut
    within the noise, so that the law itself is not sharp: give other prompts.

    Raises ValueError: no prompt, or one that cannot be decoded.
    """
    if not prompts_ids:
        raise ValueError("got 0 prompts to audit, expected at least 1; give some")
    policy = policy or TreePolicy().limited(head.max_depth)
    rules = [pair for pair in _RULES if pair[1] in head.proposals and pair[1] in policy.proposals]
    for rule, proposal in _RULES:
        if (rule, proposal) not in rules:
            say(f"rule {rule} is left out: this head with this tree has no drafts of proposal {proposal!r}")
    stop = StopRule(target.eos_ids, max_new_tokens)
    plain = []
    for index, ids in enumerate(prompts_ids):
        plain.append(decode_plain(target, ids, stop)[0])
        say(f"plain decoding: {index + 1}/{len(prompts_ids)} prompts")
    exact = target.dtype in (torch.float32, torch.float64)
    noise = 0.0
    if not exact:
        pairs = list(zip(prompts_ids, plain, strict=True))[:_NOISE_PROMPTS]
        noise = max(replay(target, ids, new, policy.total).noise for ids, new in pairs)
    checks = []
    for rows, name in ((1, "greedy, one by one"), (_GREEDY_ROWS, "greedy, in ragged batches")):
        found = _decode_rows(target, head, prompts_ids, stop, DecodeOptions(policy=policy), rows)
        checks.append(_greedy_check(target, name, prompts_ids, plain, found, None if exact else 2 * noise))
        say(f"{name}: {checks[-1]['verdict']}")
    law = _choose_law(target, prompts_ids, exact)
    generator = torch.Generator().manual_seed(seed)
    for rule, proposal in rules:
        seeds = torch.randint(2**31, (draws,), generator=generator).tolist()
        options = DecodeOptions(policy=policy, rule=rule, proposal=proposal)
        counts = _draw(target, head, law, options, seeds)
        checks.append(_law_check(f"sampled, rule {rule}", law, counts, None if exact else 2 * noise))
        say(f"{checks[-1]['name']}: {checks[-1]['verdict']}")
    return {
        MARK: SCHEMA,
        "passed": all(check["verdict"] == "pass" for check in checks),
        "checks": checks,
        "false_failure_rate": len(rules) * P_THRESHOLD,
        "settings": {
            "target": target.name,
            "dtype": str(target.dtype).removeprefix("torch."),
            "prompts": len(prompts_ids),
            "max_new_tokens": max_new_tokens,
            "tree": asdict(policy),
            "draws": draws,
            "seed": seed,
            "sampled_tokens": _SAMPLED_TOKENS,
            "sampled_top_k": _SAMPLED_TOP_K,
            "noise": None if exact else noise,
        },
    }


def format_audit(result: Mapping[str, Any]) -> str:
    """The audit as text: a line per check, then the verdict."""
    settings = result["settings"]
    lines = [f"{settings['target']} in {settings['dtype']}, {settings['prompts']} prompts, tree {settings['tree']}"]
    for check in result["checks"]:
        if "p" in check:
            detail = (
                f"{check['draws']} draws, {check['cells']} cells, G = {check['g']:.1f}, p = {check['p']:.2g} "
                f"(fails below {P_THRESHOLD:g}), {check['off_support']} impossible"
            )
        else:
            detail = f"{check['parted']} of {check['prompts']} prompts differ ({check['tokens']} tokens)"
            if check["tolerance"] is not None:
                detail += f", {check['unexplained']} beyond the tolerance {check['tolerance']:.3g}"
        lines.append(f"{check['verdict'].upper():9} {check['name']}: {detail}")
    rate = result["false_failure_rate"]
    verdict = "LOSSLESS" if result["passed"] else "NOT PROVED LOSSLESS"
    lines.append(f"{verdict} (a right decoder fails this audit with a chance of about {rate:g})")
    return "\n".join(lines)


# ---- greedy ------------------------------------------------------------------------------------------------


def _decode_rows(
    target: TargetAdapter,
    head: DraftHead,
    prompts_ids: Sequence[Sequence[int]],
    stop: StopRule,
    options: DecodeOptions,
    rows: int,
) -> list[list[int]]:
    found: list[list[int]] = []
    for start in range(0, len(prompts_ids), rows):
        part = [RowRequest(ids, stop) for ids in prompts_ids[start : start + rows]]
        found += [result.ids for result in decode(target, head, part, options)]
    return found


def _greedy_check(
    target: TargetAdapter,
    name: str,
    prompts_ids: Sequence[Sequence[int]],
    plain: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    tolerance: float | None,
) -> dict[str, Any]:
    """tolerance: of the top-2 gap where a text first differs; None: no difference is right."""
    gaps = []
    for ids, right, other in zip(prompts_ids, plain, found, strict=True):
        at = first_divergence(right, other)
        if at is not None:
            gaps.append(replay(target, ids, right[: at + 1]).gaps[-1])
    unexplained = sum(tolerance is None or gap > tolerance for gap in gaps)
    return {
        "name": name,
        "verdict": "fail" if unexplained else "pass",
        "prompts": len(plain),
        "tokens": sum(len(ids) for ids in plain),
        "parted": len(gaps),
        "unexplained": unexplained,
        "gap_largest": max(gaps, default=None),
        "tolerance": tolerance,
    }


# ---- sampled -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Law:
    """What the target alone emits after a prompt: the probability of every outcome.

    cut_gap: smallest difference between the last score that top-k keeps and the first that it drops, over all
    prefixes; below the noise of the scores, which tokens are possible is not sharp.
    """

    prompt_ids: list[int]
    probability: dict[Outcome, float]
    cut_gap: float


def enumerate_law(target: TargetAdapter, prompt_ids: Sequence[int]) -> Law:
    """The law of the first three new tokens at temperature 1 and top-k 4; an end-of-sequence token ends an outcome.

        P(x1 x2 x3) = p(x1 | prompt) p(x2 | prompt x1) p(x3 | prompt x1 x2)

    By the model's own calls, without cache, masks, positions or anything else of ours but the processors.
    """
    processors: Any = _processors()
    eos = target.eos_ids
    done: dict[Outcome, float] = {}
    open_ends: dict[Outcome, float] = {(): 1.0}
    cut_gap = math.inf
    for _ in range(_SAMPLED_TOKENS):
        if not open_ends:
            break
        prefixes = list(open_ends)
        ids_RL = torch.tensor([[*prompt_ids, *prefix] for prefix in prefixes], device=target.device)
        with torch.inference_mode():
            logits_RV = target.model(input_ids=ids_RL, use_cache=False).logits[:, -1].float()
        scores_RV = processors(ids_RL, logits_RV.clone())
        dropped_R = logits_RV.masked_fill(scores_RV.isfinite(), -math.inf).amax(-1)
        kept_R = logits_RV.masked_fill(~scores_RV.isfinite(), math.inf).amin(-1)
        cut_gap = min(cut_gap, float((kept_R - dropped_R).min()))
        p_RV = scores_RV.double().softmax(-1)
        longer: dict[Outcome, float] = {}
        for row, prefix in enumerate(prefixes):
            for token in p_RV[row].nonzero()[:, 0].tolist():
                ends = done if token in eos or len(prefix) + 1 == _SAMPLED_TOKENS else longer
                ends[(*prefix, token)] = open_ends[prefix] * float(p_RV[row, token])
        open_ends = longer
    return Law(list(prompt_ids), done, cut_gap)


def _processors() -> LogitsProcessorList:
    return build_processors(do_sample=True, top_k=_SAMPLED_TOP_K)


def _choose_law(target: TargetAdapter, prompts_ids: Sequence[Sequence[int]], exact: bool) -> Law:
    """Of the first prompt; in half precision of that among a few whose top-k cut is the sharpest."""
    candidates = prompts_ids[: 1 if exact else _LAW_CANDIDATES]
    laws = [enumerate_law(target, ids[-_LAW_PROMPT:]) for ids in candidates]
    return max(laws, key=lambda law: law.cut_gap)


def _draw(
    target: TargetAdapter, head: DraftHead, law: Law, options: DecodeOptions, seeds: Sequence[int]
) -> dict[Outcome, int]:
    """How often each outcome came out of decoding with drafts, one text per seed."""
    rows = max(1, min(_MOST_ROWS, _LOGITS // (options.policy.total * target.vocab_size)))
    stop, processors = StopRule(target.eos_ids, _SAMPLED_TOKENS), _processors()
    counts: dict[Outcome, int] = {}
    for start in range(0, len(seeds), rows):
        part = [RowRequest(law.prompt_ids, stop, processors, seed=seed) for seed in seeds[start : start + rows]]
        for result in decode(target, head, part, options):
            outcome = tuple(result.ids)
            counts[outcome] = counts.get(outcome, 0) + 1
    return counts


def _law_check(name: str, law: Law, counts: Mapping[Outcome, int], tolerance: float | None) -> dict[str, Any]:
    """tolerance: of the law's top-k cut (half precision); None: the law is sharp."""
    draws, off_support = sum(counts.values()), sum(n for outcome, n in counts.items() if outcome not in law.probability)
    expected = [draws * p for p in law.probability.values()]
    g, cells, p_value = g_test([counts.get(outcome, 0) for outcome in law.probability], expected)
    verdict = "pass" if p_value >= P_THRESHOLD and not off_support else "fail"
    if tolerance is not None and law.cut_gap <= tolerance:
        verdict = "undecided"
    return {
        "name": name,
        "verdict": verdict,
        "draws": draws,
        "outcomes": len(law.probability),
        "cells": cells,
        "g": g,
        "p": p_value,
        "p_threshold": P_THRESHOLD,
        "off_support": off_support,
    }


def g_test(observed: Sequence[int], expected: Sequence[float]) -> tuple[float, int, float]:
    """(G, cells, p-value) of counts against expected counts.

        G = 2 * sum of O ln(O / E), about chi-square with cells - 1 degrees of freedom

    (Sokal & Rohlf, "Biometry", section 17.2.) Cells that expect fewer than 5 are merged, smallest first, until none
    does. With one cell nothing can be told: p = 1.
    """
    cells = sorted(zip(expected, observed, strict=True))
    while len(cells) > 1 and cells[0][0] < _LEAST_EXPECTED:
        (e1, o1), (e2, o2) = cells[:2]
        cells = sorted([(e1 + e2, o1 + o2), *cells[2:]])
    g = 2 * sum(o * math.log(o / e) for e, o in cells if o)
    if len(cells) < 2:
        return g, len(cells), 1.0
    half = torch.tensor([(len(cells) - 1) / 2, max(g, 0.0) / 2], dtype=torch.float64)
    return g, len(cells), float(torch.special.gammaincc(half[0], half[1]))

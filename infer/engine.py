"""Speculative decoding of a batch: draft trees, score them in one pass, keep each row's longest right path.

Conventions, per row. Token n, the last decided one, is the root of the tree; its keys are not in the target's cache
yet, which holds tokens 0 .. n-1. The head's state holds the inputs (feature p, token p+1) for p = 0 .. n-1.
One round:

    draft     tree below token n                                   head, from its committed state
    target    features and logits of all nodes, in one pass        node of depth d: position n + d
    verify    path root = x0, x1 .. xa, and the bonus after xa     by the rule; one host synchronisation
    commit    cache keeps the path's slots; head gets (feature of x_i, token after x_i) for i = 0 .. a

Drafted keys of the head are thrown away: after each round its state comes from true target features alone.
Without a head every tree is its root alone, and the loop is plain decoding.

Rows are independent: each has its own offsets, stop rule, processors and random numbers, and what it emits does not
depend on its companions (in fp32; passes of another shape round differently).

Shapes: B rows, N tree nodes, A path nodes (a + 1), D depth, V vocabulary, T tokens of a row's random stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from heads.base import DraftHead, TreePolicy
from heads.target import TargetAdapter, TargetOutput
from heads.topk import argmax_of
from heads.tree import DraftTree, Proposal, ancestor_mask, chain, sibling_rank, tree_positions
from infer.metrics import DecodeStats
from infer.prefill import Clock, OnBlock, TreeMasks, check_memory, check_request, head_features, prefill
from infer.sampling import Processing, RowRandom, draw, draw_without_replacement, softmax_of
from infer.stopping import RowStop, StopReason, StopRule
from infer.verify import RULES, Rule, Verdict, real_token, verify_greedy, walk

_SAME_OUTPUT = ("greedy", "match")  # rules with which drafts, right or wrong, change nothing
_WATCHED = 24  # rounds


@dataclass(frozen=True)
class RowRequest:
    """One row of a batch.

    processors: transformers' logits processors, applied to target and draft alike; None: none.
    prefix_ids: what processors and stopping criteria see before the new tokens; None: the prompt.
    seed: of the row's random numbers, if the rule draws any.
    on_block: called with what the prefill and then each round emitted.
    """

    prompt_ids: Sequence[int]
    stop: StopRule
    processors: LogitsProcessorList | None = None
    prefix_ids: Sequence[int] | None = None
    seed: int = 0
    on_block: OnBlock | None = None


@dataclass(frozen=True)
class DecodeOptions:
    """How a batch is drafted and verified.

    policy: shape of the drafted trees. rule: a name in `infer.verify.RULES`; "greedy" takes the argmax, "match" is the
    default for sampling. proposal: "top_k" drafts the likeliest children, "sampled" draws them. exact_clock:
    synchronise the accelerator at every phase, for a time split. compiled: see `heads.compiled`.
    break_even: the accept length from which drafts pay (`infer.calibration`); a batch whose last rounds stay below it
    goes on without drafts. Only where drafts change no output (rules "greedy" and "match").

    Raises ValueError for an unknown rule, or one that does not go with the proposal.
    """

    policy: TreePolicy = field(default_factory=TreePolicy)
    rule: str = "greedy"
    proposal: Proposal = "top_k"
    exact_clock: bool = False
    compiled: bool = False
    break_even: float | None = None

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule is {self.rule!r}, expected one of {', '.join(RULES)}")
        if self.proposal not in self.verifier.proposals:
            raise ValueError(
                f"rule {self.rule!r} does not verify children of proposal {self.proposal!r}, only of "
                f"{' or '.join(self.verifier.proposals)}; change proposal or rule"
            )

    @property
    def verifier(self) -> Rule:
        return RULES[self.rule]


@dataclass(frozen=True)
class RowResult:
    """New ids of a row (EOS included, never more than its stop rule allows), why it ended, and the counts.

    `stats.seconds` is the wall clock of the whole batch until this row ended.
    """

    ids: list[int]
    reason: StopReason
    stats: DecodeStats


def decode_speculative(
    target: TargetAdapter,
    head: DraftHead,
    prompt_ids: Sequence[int],
    policy: TreePolicy,
    stop: StopRule,
    on_block: OnBlock | None = None,
) -> tuple[list[int], DecodeStats]:
    """Greedy decoding of one prompt with drafts; emits the target's own greedy tokens.

    Every token is the argmax of target logits given the tokens before it. Passes of different width round differently,
    so in half precision a near-tie may fall the other way than in plain decoding.

    Returns the new ids and the counts. Raises ValueError: see `decode`.
    """
    row = RowRequest(prompt_ids, stop, on_block=on_block)
    result = decode(target, head, [row], DecodeOptions(policy=policy))[0]
    return result.ids, result.stats


@torch.inference_mode()
def decode(
    target: TargetAdapter, head: DraftHead | None, rows: Sequence[RowRequest], options: DecodeOptions | None = None
) -> list[RowResult]:
    """Decodes a batch of rows, with the head's drafts or (head None) plainly.

    Raises:
        ValueError: see `check_request`; a generation that does not fit into memory; a head made for another target,
            or in another dtype.
    """
    options = options or DecodeOptions()
    assert rows, "a batch has at least one row"
    for row in rows:
        check_request(target, row.prompt_ids, row.stop, 1 if head is None else options.policy.total)
    if head is not None:
        _check_head(target, head, options)
    drafts = nullcontext() if head is None else head.compiled_drafts(options.compiled)
    with target.static_passes(options.compiled), drafts:
        batch = _Batch(target, head, rows, options)
        batch.start()
        while batch.active:
            batch.round()
    assert all(result is not None for result in batch.results)
    return [result for result in batch.results if result is not None]


def _check_head(target: TargetAdapter, head: DraftHead, options: DecodeOptions) -> None:
    policy, kind = options.policy, head.config.kind
    head.bind(target)  # refuses another width or vocabulary
    weight = next(head.parameters(), None)
    if weight is not None and (weight.dtype != target.dtype or weight.device != target.head_device):
        raise ValueError(
            f"the head is {weight.dtype} on {weight.device}, the target {target.dtype} on {target.head_device}; "
            "load the head with the target's dtype and device"
        )
    missing = [k for k in head.needs.taps if k not in target.tap_layers]
    if missing:
        raise ValueError(
            f"the head reads the outputs of layers {list(head.needs.taps)}, the target was loaded without "
            f"{missing}; pass taps=head.needs.taps to TargetAdapter.load"
        )
    if policy.width > target.vocab_size:
        raise ValueError(f"tree width is {policy.width}, the vocabulary {target.vocab_size}: lower --tree-width")
    if head.max_depth is not None and policy.depth > head.max_depth:
        change = "lower --tree-depth" if policy.static is None else "give a tree that was fitted for this head"
        raise ValueError(
            f"tree depth is {policy.depth}, head {kind!r} drafts at most {head.max_depth} tokens: {change}"
        )
    if options.proposal not in head.proposals:
        known = " or ".join(map(repr, head.proposals))
        raise ValueError(
            f"proposal is {options.proposal!r}, head {kind!r} knows only {known}: its tokens are not drafted given "
            "those before them; change --proposal"
        )
    if options.proposal not in policy.proposals:
        raise ValueError(
            f"proposal is {options.proposal!r}, a static tree drafts the likeliest children: leave out --proposal, or "
            "give --tree dynamic"
        )


def _repeats(root_B: Tensor, nodes: int) -> DraftTree:
    """A tree that only guesses that the root's token comes again: the size of a compiled pass without a draft.

    A smaller pass would have to be compiled first, which takes longer than it saves.
    """
    depth_BN = torch.ones(len(root_B), nodes, dtype=torch.long, device=root_B.device)
    depth_BN[:, 0] = 0
    token_BN = root_B[:, None].expand(-1, nodes)
    return DraftTree(token_BN, depth_BN - 1, depth_BN, torch.zeros_like(token_BN, dtype=torch.float32))


@dataclass(frozen=True)
class _Outcome:
    """A verified round, on the device as tensors and on the host as lists (paths, ranks and blocks without padding)."""

    path_BA: Tensor
    decided_BA: Tensor
    offered: list[int]
    paths: list[list[int]]
    ranks: list[list[int]]
    blocks: list[list[int]]


class _Batch:
    """The mutable part of a generation: target cache, head state, masks, random streams, and the rows still going."""

    def __init__(
        self, target: TargetAdapter, head: DraftHead | None, rows: Sequence[RowRequest], options: DecodeOptions
    ) -> None:
        self.target, self.head, self.options, self.requests = target, head, options, rows
        self.results: list[RowResult | None] = [None] * len(rows)
        self.active = list(range(len(rows)))  # request of each row of the tensors
        prefixes = [row.prompt_ids if row.prefix_ids is None else row.prefix_ids for row in rows]
        device = target.head_device
        self.stops = [RowStop(row.stop, ids, device) for row, ids in zip(rows, prefixes, strict=True)]
        self.stats = [DecodeStats(prompt_tokens=len(row.prompt_ids)) for row in rows]
        self.shared = DecodeStats()  # seconds of the batch
        self.clock = Clock(self.shared, target.device, options.exact_clock)
        self.nodes = options.policy.total if head is not None else 1
        self.room = options.policy.room if head is not None else 1
        self.depth = min(options.policy.depth, self.nodes - 1)
        self.children = options.policy.width if head is not None else 0
        self.drafting = head is not None
        self.recent: deque[float] = deque(maxlen=_WATCHED)  # tokens per row of the last rounds
        self.slots = max(len(row.prompt_ids) + row.stop.max_new_tokens for row in rows)
        longest = max(len(row.prompt_ids) for row in rows)
        check_memory(target, len(rows), self.slots + self.room, self.nodes, longest)
        self.processing = Processing([row.processors for row in rows], prefixes, target.head_device)
        self.random = RowRandom([row.seed for row in rows], target.head_device)
        # Rule "match" takes its numbers by the place of the token in the text, so that drafts, right or wrong, change
        # nothing: the same seed gives the same text as plain decoding.
        self.stream_BT: Tensor | None = None
        if options.rule == "match":
            self.stream_BT = self.random.uniform(max(row.stop.max_new_tokens for row in rows) + self.depth + 1)

    # ---- prefill -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The prompts' pass, each row's first token, and the head's first commit."""
        prompts = [row.prompt_ids for row in self.requests]
        device, rows = self.target.head_device, len(prompts)
        self.cache = self.target.new_cache(self.slots + self.room, rows)
        logits_BV, features = prefill(self.target, prompts, self.cache, self.head.needs if self.head else None)
        self.root_B = self._first_tokens(logits_BV)
        first = self.root_B.tolist()
        self.lengths = [len(p) for p in prompts]
        self.length_B = torch.tensor(self.lengths, device=device)
        self.masks = TreeMasks(self.target, self.nodes, self.lengths, self.cache.capacity)
        self.state: Any = None
        if self.head is not None and features is not None:
            longest = max(self.lengths)
            after = [[*p[1:], token, *[0] * (longest - len(p))] for p, token in zip(prompts, first, strict=True)]
            self.state = self.head.start(self.cache.capacity, rows)
            self.head.commit(self.state, features, torch.tensor(after, device=device), self.lengths)
        self.clock.lap("prefill")
        nothing: list[list[int]] = [[] for _ in first]
        blocks = [[token] for token in first]
        going = self._emit(_Outcome(self.root_B, self.root_B, [0] * rows, nothing, nothing, blocks))
        if going and len(going) < rows:
            self._keep(going)

    def _first_tokens(self, logits_BV: Tensor) -> Tensor:
        if self.options.rule == "greedy" and self.processing.plain:
            return argmax_of(logits_BV)
        scores_BV = self.processing.scores(logits_BV, range(len(logits_BV)), None)
        if self.options.rule == "greedy":
            return scores_BV.argmax(-1)
        u_B = self.random.uniform(1)[:, 0] if self.stream_BT is None else self.stream_BT[:, 0]
        return draw(softmax_of(scores_BV), u_B)

    # ---- rounds --------------------------------------------------------------------------------------------

    def round(self) -> None:
        """Drafts, scores, verifies, emits and commits once for all rows that are still going."""
        tree = self._draft()
        self.clock.lap("draft")
        ancestors_BNN = ancestor_mask(tree.parent_BN)
        # A node whose tokens can only be cut off may lie beyond a table of absolute positions: any row of it will do.
        position_BN = tree_positions(tree.depth_BN, self.length_B)
        if self.target.max_positions is not None:
            position_BN = position_BN.clamp_max(self.target.max_positions - 1)
        end = self.target.mask_width(tree.nodes, self.cache)
        mask = self.masks.tree(ancestors_BNN, tree.depth_BN, self.length_B, end)
        self.clock.lap("rest")
        out = self.target.forward(tree.token_BN, position_BN, mask, self.cache)
        self.clock.lap("target")
        outcome = self._to_host(tree, self._verify(tree, ancestors_BNN, out))
        self.clock.lap("verify")
        for row in self.active:
            self.stats[row].target_passes += 1
        self._watch(outcome)
        going = self._emit(outcome)
        if going:
            self._commit(out, outcome)
            if len(going) < len(self.active):
                self._keep(going)
            self.clock.lap("rest")

    def _draft(self) -> DraftTree:
        remaining = max(self.requests[row].stop.max_new_tokens - len(self.stops[row].new_ids) for row in self.active)
        depth = self.depth
        if self.options.rule in _SAME_OUTPUT and not self.options.compiled:
            # What a row emits does not depend on its trees, so they end where nothing could be emitted any more.
            # (Compiled passes keep their size: another one would be compiled for the last round.)
            depth = min(depth, remaining - 1)
        if self.head is not None and not self.drafting and self.options.compiled:
            return _repeats(self.root_B, self.nodes)
        if self.head is None or not self.drafting or depth < 1:
            nothing = self.root_B.new_empty(len(self.active), 0)
            return chain(nothing, nothing.float(), self.root_B, proposal=self.options.proposal)
        policy = replace(self.options.policy, depth=depth)
        sampler = self._sample_children if self.options.proposal == "sampled" else None
        tree = self.head.draft(self.state, self.root_B, policy, sampler)
        shape = (tree.rows, tree.nodes)
        assert shape[0] == len(self.active) and shape[1] <= self.nodes, f"drafted {shape}, room for {self.nodes} nodes"
        return tree

    def _sample_children(self, logits_BFV: Tensor, path_BFD: Tensor, children: int) -> tuple[Tensor, Tensor]:
        """`ChildSampler`: from the draft's distribution, after the same processors as the target's."""
        assert self.head is not None
        rows, expanded, _ = logits_BFV.shape
        logits_RV = logits_BFV.flatten(0, 1).float()
        if self.head.draft_ids is not None:
            whole = logits_RV.new_full((len(logits_RV), self.target.vocab_size), float("-inf"))
            logits_RV = whole.index_copy_(1, self.head.draft_ids, logits_RV)
        row_R = [row for row in range(rows) for _ in range(expanded)]
        scores_RV = self.processing.scores(logits_RV, row_R, path_BFD.flatten(0, 1))
        q_RV = softmax_of(scores_RV)  # zeros, where nothing in the draft vocabulary is allowed: no child then
        noise_RV = self.random.noise((expanded, q_RV.shape[1])).flatten(0, 1)
        token_RK = draw_without_replacement(q_RV, children, noise_RV)
        return token_RK.view(rows, expanded, children), q_RV.view(rows, expanded, -1)

    def _verify(self, tree: DraftTree, ancestors_BNN: Tensor, out: TargetOutput) -> Verdict:
        rows, nodes = tree.token_BN.shape
        rule = self.options.rule
        if rule == "greedy" and self.processing.plain:
            choice_BN = argmax_of(out.logits_BNV.flatten(0, 1)).view(rows, nodes)
            return verify_greedy(tree, choice_BN, ancestors_BNN)
        row_B = torch.arange(rows, device=tree.token_BN.device)

        def law(node_B: Tensor, path_BD: Tensor) -> Tensor:
            return self.processing.scores(out.logits_BNV[row_B, node_B], range(rows), path_BD)

        steps = self.depth + 1
        if self.stream_BT is not None:
            emitted = torch.tensor([len(self.stops[row].new_ids) for row in self.active], device=row_B.device)
            at_BD = emitted[:, None] + torch.arange(steps, device=row_B.device)
            uniform_BDU = self.stream_BT.gather(1, at_BD)[:, :, None]
            uniform_BDU = uniform_BDU.expand(rows, steps, self.children + 1)
        elif rule == "greedy":
            uniform_BDU = torch.zeros(rows, steps, self.children + 1, device=row_B.device)
        else:
            # Always as many numbers, whatever the tree: what a row draws later does not depend on it.
            uniform_BDU = self.random.uniform(steps * (self.children + 1)).view(rows, steps, self.children + 1)
        return walk(tree, self.options.verifier, law, uniform_BDU, depth=self.depth, width=self.children)

    def _to_host(self, tree: DraftTree, verdict: Verdict) -> _Outcome:
        """What the host needs to know of a round, in its one transfer."""
        steps = min(self.depth + 1, tree.nodes)
        path_BA = verdict.path_BA[:, :steps].clamp_min(0)
        # Decided: accepted tokens, then the bonus (the last column is always overwritten or behind it).
        decided_BA = tree.token_BN.gather(1, path_BA).roll(-1, 1)
        decided_BA.scatter_(1, verdict.accepted_B[:, None], verdict.bonus_B[:, None])
        rank_BA = sibling_rank(tree.parent_BN).gather(1, path_BA)
        summary_B2 = torch.stack([verdict.accepted_B, tree.depth_BN.amax(1)], 1)
        packed = torch.cat([summary_B2, path_BA, rank_BA, decided_BA], 1).tolist()
        return _Outcome(
            path_BA=path_BA,
            decided_BA=decided_BA,
            offered=[row[1] for row in packed],
            paths=[row[2 : 3 + row[0]] for row in packed],
            ranks=[row[3 + steps : 3 + steps + row[0]] for row in packed],
            blocks=[row[2 + 2 * steps : 3 + 2 * steps + row[0]] for row in packed],
        )

    def _emit(self, outcome: _Outcome) -> list[int]:
        """Hands each row its block; rows that end get their result. Returns which rows (of the tensors) go on."""
        going = []
        for index, row in enumerate(self.active):
            block, request, stats = outcome.blocks[index], self.requests[row], self.stats[row]
            real_token(min(block), row)
            emitted, reason = self.stops[row].push(block)
            accepted = min(len(block) - 1, len(emitted))
            if stats.target_passes:  # every block but the prefill's: the accepted drafts, then the bonus
                stats.accepted_per_round.append(accepted)
                stats.accepted_ranks += outcome.ranks[index][:accepted]
                stats.offered_depth_per_round.append(outcome.offered[index])
            if request.on_block is not None:
                request.on_block(emitted, accepted)
            if reason is None:
                going.append(index)
                self.processing.append(index, emitted)
                continue
            self.clock.lap("rest" if stats.target_passes else "prefill")
            stats.new_tokens = len(self.stops[row].new_ids)
            stats.seconds = dict(self.shared.seconds)
            self.results[row] = RowResult(self.stops[row].new_ids, reason, stats.check())
        if not going:
            self.active = []
        return going

    def _watch(self, outcome: _Outcome) -> None:
        """Stops drafting where it does not pay. Its head's state ends there: it is not taken up again."""
        even = self.options.break_even
        if even is None or not self.drafting or self.options.rule not in _SAME_OUTPUT:
            return
        self.recent.append(sum(len(block) for block in outcome.blocks) / len(outcome.blocks))
        if len(self.recent) == _WATCHED and sum(self.recent) / _WATCHED < even:
            self.drafting = False

    def _commit(self, out: TargetOutput, outcome: _Outcome) -> None:
        """Applies a pass: its paths stay in the cache, the head gets features and next tokens."""
        counts = [len(path) for path in outcome.paths]
        longest = max(counts)
        self.cache.commit(self.lengths, outcome.paths)
        row_B1 = torch.arange(len(counts), device=out.logits_BNV.device)[:, None]
        path_BA, decided_BA = outcome.path_BA[:, :longest], outcome.decided_BA[:, :longest]
        if self.head is not None and self.drafting:
            features_BAF = head_features(self.head.needs, out)[row_B1, path_BA]
            self.clock.lap("rest")
            self.head.commit(self.state, features_BAF, decided_BA, counts)
            self.clock.lap("draft")
        last_B1 = torch.tensor(counts, device=decided_BA.device)[:, None] - 1
        self.root_B = decided_BA.gather(1, last_B1)[:, 0]
        self.lengths = self.cache.lengths
        self.length_B = torch.tensor(self.lengths, device=decided_BA.device)

    def _keep(self, going: list[int]) -> None:
        """Drops the rows that have ended from every tensor."""
        rows = torch.tensor(going, device=self.root_B.device)
        self.active = [self.active[index] for index in going]
        self.cache.keep_rows(rows)
        self.masks.keep_rows(rows)
        self.lengths, self.length_B, self.root_B = self.cache.lengths, self.length_B[rows], self.root_B[rows]
        self.processing.keep_rows(going)
        self.random.keep_rows(going)
        if self.stream_BT is not None:
            self.stream_BT = self.stream_BT[rows]
        if self.head is not None:
            self.head.keep_rows(self.state, rows)

"""Speculative decoding, greedy and exact: draft a tree, score it in one pass, keep the longest right path.

Conventions. Token n, the last decided one, is the root of the tree; its keys are not in the target's cache
yet, which holds tokens 0 .. n-1. The head's state holds the inputs (feature p, token p+1) for p = 0 .. n-1.
One round:

    draft     tree below token n                                   head, from its committed state
    target    features and logits of all nodes, in one pass        node of depth d: position n + d
    verify    path root = x0, x1 .. xa, and the bonus after xa     the target's argmax after every node
    commit    cache keeps the path's slots; head gets (feature of x_i, token after x_i) for i = 0 .. a

Drafted keys of the head are thrown away: after each round its state comes from true target features alone.

Shapes: N tree nodes, A path nodes (a + 1), H hidden size, V vocabulary. A batch of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from heads.base import DraftHead, TreePolicy
from heads.cache import SlotCache
from heads.target import TargetAdapter, TargetOutput
from heads.topk import argmax_of
from heads.tree import DraftTree, ancestor_mask, chain, tree_positions
from infer.baseline import OnTokens
from infer.metrics import DecodeStats
from infer.prefill import Clock, MaskBuffer, check_request, prefill
from infer.stopping import StopRule
from infer.verify import verify_greedy


@torch.inference_mode()
def decode_speculative(
    target: TargetAdapter,
    head: DraftHead,
    prompt_ids: Sequence[int],
    policy: TreePolicy,
    stop: StopRule,
    on_tokens: OnTokens | None = None,
) -> tuple[list[int], DecodeStats]:
    """Greedy decoding of one prompt with drafts; emits the target's own greedy tokens.

    Exact in the sense that every token is the argmax of target logits given the tokens before it. Passes of
    different width round differently, so in half precision a near-tie may fall the other way than in plain
    decoding.

    Args:
        policy: shape of the drafted trees; near the token limit they are made shallower.
        on_tokens: called with the ids that the prefill and then each round emitted.

    Returns:
        The new ids (EOS included, never more than the stop rule allows) and the counts.

    Raises:
        ValueError: see `check_request`; a head made for another target, or in another dtype.
    """
    check_request(target, prompt_ids, stop)
    _check_head(target, head, policy)
    stats = DecodeStats(prompt_tokens=len(prompt_ids))
    clock = Clock(stats, target.device)
    run = _Generation(target, head, prompt_ids, policy, stop, clock)
    block = [run.first_token()]
    clock.lap("prefill")
    new_ids: list[int] = []
    while True:
        emitted, reason = stop.cut(block, len(new_ids))
        if stats.target_passes:  # every block but the prefill's: the accepted drafts, then the bonus
            stats.accepted_per_round.append(min(len(block) - 1, len(emitted)))
        new_ids += emitted
        if on_tokens is not None:
            on_tokens(emitted)
        if reason is not None:
            break
        run.commit(block)
        clock.lap("rest" if stats.target_passes else "prefill")
        block, offered = run.round(remaining=stop.max_new_tokens - len(new_ids))
        stats.target_passes += 1
        stats.offered_depth_per_round.append(offered)
    stats.new_tokens = len(new_ids)
    clock.lap("rest")
    return new_ids, stats.check()


def _check_head(target: TargetAdapter, head: DraftHead, policy: TreePolicy) -> None:
    head.bind(target)  # refuses another width or vocabulary
    weight = next(head.parameters(), None)
    if weight is not None and (weight.dtype != target.dtype or weight.device != target.device):
        raise ValueError(
            f"the head is {weight.dtype} on {weight.device}, the target {target.dtype} on {target.device}; "
            "load the head with the target's dtype and device"
        )
    missing = [k for k in head.needs.taps if k not in target.tap_layers]
    if missing:
        raise ValueError(
            f"the head reads the outputs of layers {list(head.needs.taps)}, the target was loaded without "
            f"{missing}; "
            "pass taps=head.needs.taps to TargetAdapter.load"
        )
    if policy.width > target.vocab_size:
        raise ValueError(f"tree width is {policy.width}, the vocabulary {target.vocab_size}: lower --tree-width")


def head_features(head: DraftHead, out: TargetOutput) -> Tensor:
    """What the head takes from a target pass, [1, N, F]: features after the final norm, then its taps."""
    parts = [out.hidden_BNH] if head.needs.features else []
    parts += [out.taps[k] for k in head.needs.taps]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class _Generation:
    """The mutable part of one generation: target cache, head state, mask memory, the pass to be committed."""

    def __init__(
        self,
        target: TargetAdapter,
        head: DraftHead,
        prompt_ids: Sequence[int],
        policy: TreePolicy,
        stop: StopRule,
        clock: Clock,
    ) -> None:
        self.target, self.head, self.policy, self.clock = target, head, policy, clock
        self.prompt_ids = prompt_ids
        tokens = len(prompt_ids) + stop.max_new_tokens
        self.nodes = policy.total
        self.cache: SlotCache = target.new_cache(tokens + self.nodes)
        self.state: Any = head.start(tokens + policy.width * policy.depth)
        self.masks = MaskBuffer(self.nodes, tokens + self.nodes, target.dtype, target.device)
        self.base = 0  # committed slots of the cache
        self.path: list[int] = []  # slots after `base` that the next commit keeps
        self.features_1NF: Tensor  # of the last pass

    def first_token(self) -> int:
        out = prefill(self.target, self.prompt_ids, self.cache)
        self.features_1NF = head_features(self.head, out)
        self.path = list(range(len(self.prompt_ids)))
        return int(argmax_of(out.logits_BNV[:, -1])[0])

    def commit(self, block: list[int]) -> None:
        """Applies the last pass: its path stays in the cache, the head gets features and next tokens.

        block: the tokens that the pass decided. After the prefill that is one, behind the prompt's own.
        """
        after = [*self.prompt_ids[1:], *block] if self.base == 0 else block
        contiguous = self.path == list(range(len(self.path)))
        features = self.features_1NF[:, : len(self.path)] if contiguous else self.features_1NF[:, self.path]
        self.cache.commit(self.base, self.path)
        self.head.commit(self.state, features, torch.tensor([after], device=self.target.device))
        self.base += len(self.path)
        self.root = block[-1]

    def round(self, remaining: int) -> tuple[list[int], int]:
        """Drafts, scores and verifies once; nothing is committed.

        Args:
            remaining: tokens that may still be emitted, at least 1. A node of depth d >= remaining can only
                confirm what is cut off, so trees end above it; this also keeps every position below
                prompt + max_new_tokens - 1, which matters for a table of absolute positions.

        Returns:
            The decided tokens (accepted drafts, then the bonus) and the depth of the offered tree.
        """
        tree = self._draft(min(self.policy.depth, remaining - 1))
        self.clock.lap("draft")
        ancestors_1NN = ancestor_mask(tree.parent_BN)
        length_1 = torch.full((1,), self.base, device=self.target.device)
        positions_1N = tree_positions(tree.depth_BN, length_1)
        mask = self.masks.tree(ancestors_1NN, self.base)
        self.clock.lap("rest")
        out = self.target.forward(tree.token_BN, positions_1N, mask, self.cache)
        self.clock.lap("target")
        choice_1N = argmax_of(out.logits_BNV[0])[None]
        verdict = verify_greedy(tree, choice_1N, ancestors_1NN)
        self.path, _ = verdict.host_rows()[0]
        *choices, offered = torch.cat([choice_1N[0], tree.depth_BN.amax(1)]).tolist()
        self.features_1NF = head_features(self.head, out)
        # An accepted draft is by definition the target's choice at its parent, and the bonus the one at the
        # end.
        return [choices[node] for node in self.path], offered

    def _draft(self, depth: int) -> DraftTree:
        if depth < 1:  # one token left: any pass yields it
            nothing = torch.empty(1, 0, dtype=torch.long, device=self.target.device)
            return chain(nothing, nothing.float(), torch.tensor([self.root], device=self.target.device))
        tree = self.head.draft(self.state, self.root, replace(self.policy, depth=depth))
        assert tree.rows == 1 and tree.nodes <= self.nodes, f"drafted {tree.rows} x {tree.nodes}, room for {self.nodes}"
        return tree

"""Drafters for tests: one that knows the target's text, right to a chosen depth, and one of limited depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from heads.base import ChildSampler, DraftHead, HeadBatch, HeadOutput, LossSpec, Needs, TreePolicy
from heads.config import HeadConfig
from heads.eagle import EagleHead
from heads.target import TargetAdapter
from heads.tree import DraftTree, Proposal, rerank
from tests.tiny import tiny_head


@dataclass
class Seen:
    """A row of the oracle's state: the features and tokens it was given, and its rounds."""

    row: int
    features: list[Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rounds: int = 0


class OracleHead(DraftHead):
    """Drafts rows' known greedy texts right to a depth that changes from round to round and from row to row.

    Beside the right branch it grows wrong ones, in some rounds before it, so that accepted slots have gaps. It asserts
    that what it is given is the text.
    """

    needs = Needs(features=True, taps=(1,))

    def __init__(self, target: TargetAdapter, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> None:
        super().__init__(HeadConfig.derive("eagle", target.config, target.vocab_size, target.name))
        self.known = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
        self.seen: list[Seen] = []

    def forward(self, batch: HeadBatch, loss: LossSpec, measure: bool = False) -> HeadOutput:
        raise AssertionError("an oracle is not trained")

    def start(self, capacity: int, rows: int = 1) -> list[Seen]:
        self.seen = [Seen(row) for row in range(rows)]
        return list(self.seen)

    def commit(
        self, state: list[Seen], feature_BAF: Tensor, next_token_BA: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        assert feature_BAF.shape[:2] == next_token_BA.shape and len(state) == len(next_token_BA)
        for index, seen in enumerate(state):
            count = next_token_BA.shape[1] if counts is None else counts[index]
            seen.features.append(feature_BAF[index, :count])
            seen.tokens += next_token_BA[index, :count].tolist()

    def draft(
        self, state: list[Seen], root_B: Tensor, policy: TreePolicy, sampler: ChildSampler | None = None
    ) -> DraftTree:
        rows = [self._row(seen, int(root), policy) for seen, root in zip(state, root_B, strict=True)]
        token, parent, depth, score = (torch.cat(columns) for columns in zip(*rows, strict=True))
        return rerank(token, parent, depth, score, policy.total)

    def keep_rows(self, state: list[Seen], rows: Tensor) -> None:
        state[:] = [state[row] for row in rows.tolist()]

    def _row(self, seen: Seen, root: int, policy: TreePolicy) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        known = self.known[seen.row]
        assert [known[0], *seen.tokens] == known[: len(seen.tokens) + 1], "committed tokens are not the text"
        assert root == seen.tokens[-1]
        right = (known[len(seen.tokens) + 1 :] + [0] * policy.depth)[: policy.depth]
        good = (seen.rounds + seen.row) % (policy.depth + 1)
        seen.rounds += 1
        token, parent, depth, score = [root], [-1], [0], [0.0]
        above = 0
        for level, truth in enumerate(right, 1):
            wrong = [(truth + 1 + i) % 512 for i in range(policy.width - 1)]
            best = -0.5 * level - 0.1 * (seen.rounds % 2)  # on every other round the wrong siblings come first
            for value in [*wrong, truth if level <= good else (truth + 7) % 512]:
                token.append(value)
                parent.append(above)
                depth.append(level)
                score.append(best if value not in wrong else -0.5 * level - 0.05)
            above = len(token) - 1
        return torch.tensor([token]), torch.tensor([parent]), torch.tensor([depth]), torch.tensor([score])


class LimitedHead(EagleHead):
    """As Medusa: at most three tokens deep, and nothing that is drawn."""

    proposals: tuple[Proposal, ...] = ("top_k",)

    @property
    def max_depth(self) -> int:
        return 3


def limited_head(target: TargetAdapter) -> DraftHead:
    head = tiny_head(target)
    head.__class__ = LimitedHead
    return head

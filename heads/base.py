"""What a draft head is, and the structures that cross the borders between packages.

Shape letters, used everywhere: B rows, T positions of a row (roots), K draft steps, A accepted or committed tokens,
N tree nodes, W frontier width, S key slots, H target hidden size, V vocabulary.

p is the target, q the draft. "Feature" is the target's hidden state after its final norm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from heads.compiled import static
from heads.config import HeadConfig
from heads.losses import Projection, best_token
from heads.static import StaticPlan, StaticTree, plan_of
from heads.target import TargetAdapter
from heads.tree import DraftTree, Proposal
from heads.unrolled import Document


@dataclass(frozen=True)
class Needs:
    """Which target tensors a head consumes: features after the final norm, and outputs of these layers."""

    features: bool = True
    taps: tuple[int, ...] = ()


@dataclass(frozen=True)
class LossSpec:
    """The training loss: weights of its parts, step k counting step_decay ** k; see `heads.training`.

    compiled: see `heads.losses.distil`.
    """

    feature_weight: float
    token_weight: float
    step_decay: float
    hard_weight: float = 0.0
    divergence: str = "soft_ce"
    compiled: bool = False


@dataclass(frozen=True)
class HeadBatch:
    """A training batch, every shift already made (`train/batching.py` draws the rows).

    documents: the (row, first position, position behind the last) of every text in it; nothing attends across them.
    feature_BTH: input feature of root p (with taps, those columns too). token_KBT[k]: the token that step k reads; it
    has K + 1 entries, and entry k + 1 is what the text has where step k predicts. teacher[k], [B, T, H]: the target's
    feature where step k's prediction is checked. weight_KBT[k]: bool, supervised.
    valid_BT: not padding. noise_BTH: added to the input features, or None.
    """

    feature_BTH: Tensor
    token_KBT: Tensor
    teacher: tuple[Tensor, ...]
    weight_KBT: Tensor
    valid_BT: Tensor
    documents: tuple[Document, ...]
    noise_BTH: Tensor | None = None

    @property
    def steps(self) -> int:
        return len(self.teacher)

    @property
    def position_BT(self) -> Tensor:
        """Of every root in its document."""
        position_BT = torch.zeros_like(self.valid_BT, dtype=torch.long)
        for row, start, end in self.documents:
            position_BT[row, start:end] = torch.arange(end - start, device=position_BT.device)
        return position_BT


@dataclass(frozen=True)
class HeadOutput:
    """Sums, not means: ranks and micro-batches are added up and divided once.

    loss_sum: differentiable. weight_sum: supervised roots. counts: named sums for metrics.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    counts: dict[str, Tensor] = field(default_factory=dict)


class StepCounts:
    """Named sums of an evaluation: what agrees with the target, step by step.

    For every step k: positions, match (its first proposal is the target's argmax), tried (supervised, and all steps
    before agreed), prefix (it agreed, too), and the summed losses. `finish` adds rounds and emitted: the chain of all
    steps, replayed over every answer as decoding goes through it.
    """

    def __init__(self, weight_KBT: Tensor) -> None:
        self.named: dict[str, Tensor] = {}
        self._weight_KBT = weight_KBT
        self._prefix_BT = weight_KBT[0]  # roots whose steps so far all agree with the target
        self._accepted_BT = torch.zeros_like(self._prefix_BT, dtype=torch.long)

    def add(self, step: int, match_R: Tensor, feature_loss: Tensor, token_loss: Tensor) -> None:
        """match_R: of the supervised roots in the batch's order. Steps come in order."""
        weight_BT = self._weight_KBT[step]
        hit_BT = torch.zeros_like(weight_BT)
        hit_BT[weight_BT] = match_R
        tried = (self._prefix_BT & weight_BT).sum()
        self._prefix_BT = self._prefix_BT & hit_BT
        self._accepted_BT += self._prefix_BT
        self.named |= {
            f"tried/{step}": tried,
            f"feature_loss/{step}": feature_loss,
            f"token_loss/{step}": token_loss,
            f"positions/{step}": weight_BT.sum(),
            f"match/{step}": match_R.sum(),
            f"prefix/{step}": self._prefix_BT.sum(),
        }

    def finish(self) -> dict[str, Tensor]:
        rounds, emitted = replay(self._weight_KBT[0], self._accepted_BT)
        device = self._weight_KBT.device
        self.named |= {"rounds": torch.tensor(rounds, device=device), "emitted": torch.tensor(emitted, device=device)}
        return self.named


def replay(root_BT: Tensor, accepted_BT: Tensor) -> tuple[int, int]:
    """(verification passes, tokens they emit) of decoding the answers again with these drafts.

    A run of roots is an answer (a document ends with two positions that are none): the first pass drafts below its
    first root, accepts as many drafts as agree there, and emits the bonus token; the next one drafts behind that.
    """
    rounds = emitted = 0
    for root_T, accepted_T in zip(root_BT.tolist(), accepted_BT.tolist(), strict=True):
        p = 0
        while p < len(root_T):
            if not root_T[p]:
                p += 1
                continue
            end = next((q for q in range(p, len(root_T)) if not root_T[q]), len(root_T))
            while p < end:
                taken = min(1 + accepted_T[p], end - p)
                rounds, emitted, p = rounds + 1, emitted + taken, p + taken
    return rounds, emitted


def candidates(width: int, depth: int) -> int:
    """Nodes that a dynamic tree can have at most, root included: every level expands `width` nodes."""
    return 1 + width + (depth - 1) * width * width


@dataclass(frozen=True)
class TreePolicy:
    """Shape of a draft tree: `width` children kept per level, `depth` levels, `total` nodes with the root.

    A chain is width 1 (total is then depth + 1). Which nodes are drafted is decided anew for every tree, by the draft's
    own scores (EAGLE-2). With `static` they are always that tree's, without its levels beyond `depth`, and the other
    numbers follow from it; make such a policy with `TreePolicy.of`.
    """

    width: int = 6
    depth: int = 4
    total: int = 16
    static: StaticTree | None = None

    def __post_init__(self) -> None:
        for name, least, option in (("width", 1, "width"), ("depth", 1, "depth"), ("total", 2, "nodes")):
            if getattr(self, name) < least:
                raise ValueError(
                    f"tree {name} is {getattr(self, name)}, expected {least} or more: change --tree-{option}"
                )
        if self.static is not None:
            static = self.static.cut(self.depth)
            own = {"width": static.width, "depth": static.depth, "total": static.nodes, "static": static}
            for name, value in own.items():
                object.__setattr__(self, name, value)

    @classmethod
    def of(cls, static: StaticTree) -> TreePolicy:
        return cls(static.width, static.depth, static.nodes, static)

    @property
    def proposals(self) -> tuple[Proposal, ...]:
        """How its children may be chosen: those of a static tree are the likeliest."""
        return ("top_k", "sampled") if self.static is None else ("top_k",)

    @property
    def drafted_slots(self) -> int:
        """How many drafted nodes a head expands at most for one tree."""
        return self.width * (self.depth - 1) if self.static is None else self.static.expanded

    @property
    def room(self) -> int:
        """Slots that a round needs behind the decided tokens, in the target's cache and in the head's state."""
        return max(self.total, self.drafted_slots)

    def plan(self, device: torch.device) -> StaticPlan | None:
        """How its static tree is grown; None if it has none."""
        return None if self.static is None else plan_of(self.static, device)

    def limited(self, depth: int | None) -> TreePolicy:
        """No deeper than that (None: as it is), with no more nodes than then fit."""
        if depth is None or self.depth <= depth:
            return self
        return replace(self, depth=depth, total=min(self.total, candidates(self.width, depth)))


# Draws children for nodes of a tree: (draft logits [B, F, Vd], path tokens [B, F, D] below the root, children K)
# -> tokens [B, F, K] in the order drawn, and q [B, F, V], the whole distribution they were drawn from.
ChildSampler = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


class DraftHead(nn.Module, ABC):
    """A trainable drafter for one target.

    Decoding keeps a state per batch of generations: `start` makes it, `commit` feeds it true target features of
    decided tokens, `draft` proposes a tree per row below its last decided token without changing what is committed.
    Rows may commit different numbers of tokens; a row's drafts do not depend on the others.

    proposals: how the children in its trees may be chosen; see `DraftTree`.
    """

    config: HeadConfig
    needs: Needs
    proposals: tuple[Proposal, ...] = ("top_k", "sampled")
    draft_token_ids: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self._bound: list[TargetAdapter] = []  # a list, so that the target is no submodule and is never saved
        self._draft_logits: Callable[[Tensor], Tensor] | None = None
        self._static_draft: Callable[..., DraftTree] | None = None  # made once
        self._compiled: Callable[..., DraftTree] | None = None  # the same, where drafts are to be compiled now
        if config.draft_vocab_size is not None:
            self._make_draft_vocab(config.draft_vocab_size)

    def _make_draft_vocab(self, size: int) -> None:
        """Buffers for the draft vocabulary; stored with the weights, never rebuilt."""
        self.register_buffer("draft_token_ids", torch.zeros(size, dtype=torch.long))

    def set_draft_vocab(self, ids: Tensor) -> None:
        """Target ids of the draft vocabulary, ascending: before `bind`."""
        self.draft_token_ids.copy_(ids)

    def bind(self, target: TargetAdapter) -> None:
        """Takes embedding and LM head of the target by reference.

        Raises:
            ValueError: the target's width or vocabulary is not the one the head was made for.
        """
        for name, mine, theirs in (
            ("hidden_size", self.config.hidden_size, target.hidden_size),
            ("vocab_size", self.config.vocab_size, target.vocab_size),
        ):
            if mine != theirs:
                raise ValueError(
                    f"head.{name} is {mine}, but target {target.name!r} has {theirs}: the head was trained for "
                    f"{self.config.target!r}; pass that target"
                )
        if self._bound != [target]:
            self._bound = [target]
            ids = self.draft_ids
            self._draft_logits = target.logits if ids is None else target.logits_of_tokens(ids)

    @property
    def draft_ids(self) -> Tensor | None:
        """Target ids of the draft vocabulary, [Vd] ascending, or None where that is the whole vocabulary."""
        return self.draft_token_ids if self.config.draft_vocab_size is not None else None

    def draft_index(self, token_R: Tensor) -> Tensor:
        """Indices of target ids in the draft vocabulary, [R]; -1 for tokens outside."""
        ids = self.draft_ids
        if ids is None:
            return token_R
        index_R = torch.searchsorted(ids, token_R).clamp_max(len(ids) - 1)
        return index_R.where(ids[index_R] == token_R, -1)

    def draft_logits(self, feature: Tensor) -> Tensor:
        """The target's logits [..., Vd] of features (its own, or drafted ones), limited to the draft vocabulary."""
        assert self._draft_logits is not None, "bind(target) comes first"
        return self._draft_logits(feature)

    @property
    def target(self) -> TargetAdapter:
        assert len(self._bound) == 1, "bind(target) comes first"
        return self._bound[0]

    @property
    def max_depth(self) -> int | None:
        """How many tokens the head drafts one after the other at most; None: any number."""
        return None

    def projection(self, step: int) -> Projection:
        """From outputs of training step `step`, as `normed` leaves them, to logits over the draft vocabulary."""
        return Projection(self.draft_logits)

    def projections(self, steps: int) -> list[Projection]:
        """Of all steps; one and the same object where it is the same for all."""
        return [self.projection(0)] * steps

    def normed(self, output: Tensor) -> Tensor:
        """What a head does to its outputs before they are projected."""
        return output

    def step_logits(self, step: int, output: Tensor) -> Tensor:
        """Logits over the draft vocabulary of the output of training step `step`."""
        return self.projection(step)(self.normed(output))

    def best_draft(self, output_RH: Tensor, step: int = 0) -> Tensor:
        """Target id of the first proposal per position, [R], from outputs of training step `step`."""
        best = best_token(output_RH, lambda x: self.step_logits(step, x))
        return best if self.draft_ids is None else self.draft_ids[best]

    def init_from_target(self) -> str:
        """Copies what a new head takes over from the bound target, and says what that was.

        Raises ValueError where something cannot be had that it must have.
        """
        return ""

    @torch.no_grad()
    def _start_projections(self, weights: Iterable[Tensor]) -> None:
        """Copies the target's rows of the draft vocabulary into projections of the head's own."""
        rows = self.target.lm_head_rows(self.draft_ids)
        if rows is None or rows[1] is not None:
            raise ValueError(
                f'head.projection is "own", but the LM head of {self.target.name!r} is quantised, offloaded or has a '
                'bias, so that there are no rows to start from; use "shared"'
            )
        for weight in weights:
            weight.copy_(rows[0])

    def unroll(self, batch: HeadBatch) -> Iterator[Tensor]:
        """Output of every training step, [B, T, H] each, for `step_logits`; step k reads true tokens up to its own."""
        raise TypeError(f"{type(self).__name__} drafts without training, so it has no training steps")

    @abstractmethod
    def forward(self, batch: HeadBatch, loss: LossSpec, measure: bool = False) -> HeadOutput:
        """Loss over all steps of the batch (`heads.training`); with `measure` also `StepCounts`."""

    @abstractmethod
    def start(self, capacity: int, rows: int = 1) -> Any:
        """A decoding state for `rows` rows; `capacity` slots per row hold committed tokens and drafts together."""

    @abstractmethod
    def commit(
        self, state: Any, feature_BAF: Tensor, next_token_BA: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        """Appends decided tokens: feature of token i with token i + 1.

        counts: how many of the A positions belong to each row (at least 1; the rest is padding). None: all.
        """

    @abstractmethod
    def draft(self, state: Any, root_B: Tensor, policy: TreePolicy, sampler: ChildSampler | None = None) -> DraftTree:
        """Trees of proposals below the last committed tokens (`root_B`).

        Without a sampler children are the likeliest tokens (proposal "top_k"), else drawn by it ("sampled").
        """

    def _draft(self, *args: Any, **kwargs: Any) -> DraftTree:
        """`draft` of the state's tensors, the roots, the policy and its plan alone: what `compiled_drafts` compiles."""
        raise TypeError(f"{type(self).__name__} has no drafts that can be compiled")

    @contextmanager
    def compiled_drafts(self, on: bool = True) -> Iterator[None]:
        """Within it, trees of likeliest children are drafted by compiled code, anew for every capacity of a state."""
        if on and self._static_draft is None:
            self._static_draft = static(self._draft)
        before, self._compiled = self._compiled, self._static_draft if on else None
        try:
            yield
        finally:
            self._compiled = before

    @abstractmethod
    def keep_rows(self, state: Any, rows: Tensor) -> None:
        """Keeps only these rows of the state, in this order."""


def trainable_parameters(head: nn.Module) -> int:
    return sum(p.numel() for p in head.parameters() if p.requires_grad)


def head_dtype(head: nn.Module) -> torch.dtype:
    return next(head.parameters()).dtype

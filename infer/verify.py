"""Verification: which drafted path the target confirms. Pure; the engine applies the verdict.

`verify_greedy` judges all nodes at once. `walk` goes down from the root, asks for the target's law only where it
stands, and decides by a rule: Greedy, TopK, Sampled and Match emit exactly what the target alone would (TopK, Sampled
and Match in law); TypicalLossy does not. p is the target's law after all processing, q what children were drawn from.

Why a walk is exact: suppose that a step at any node, whatever happened before, emits a token with law p given the
node's path, and stands on the child that holds it or ends. Then the first emitted token has law p(. | root); given it,
the second (where there is one) has law p(. | root, x1), by fresh uniforms; and so on. A row that ends goes on in the
next round from the same law. So each rule below has to show one step only.

Shape legend: B rows · N tree nodes, root included · A path slots (A = N: nothing is read back to size it) · W child
slots of a node · D levels below the root · V vocabulary · U = W + 1 uniforms of a level.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.topk import argmax_of
from heads.tree import DraftTree, Proposal, ancestor_mask
from infer.sampling import draw, softmax_of

# (node of each row [B], tokens below the root on its path [B, D]) -> processed fp32 scores of the target there [B, V]
Law = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Verdict:
    """What one round decided, per row.

    path_BA     int64  node indices of the accepted path, root first, increasing; unused slots hold -1. A = N.
    accepted_B  int64  accepted drafted tokens a (0 if only the root stands); the path has a + 1 nodes
    bonus_B     int64  the token the target emits after the last accepted node; the next round's root. -1: there
                       is none, its scores are all -inf or NaN

    A row emits the tokens of path[1 : a + 1], then the bonus.
    """

    path_BA: Tensor
    accepted_B: Tensor
    bonus_B: Tensor

    def host_rows(self) -> list[tuple[list[int], int]]:
        """(path without padding, bonus) per row as Python values, in one transfer: one host sync.

        Raises ValueError where a row has no bonus.
        """
        packed = torch.cat([self.accepted_B[:, None], self.bonus_B[:, None], self.path_BA], dim=1).tolist()
        return [(row[2 : 3 + row[0]], real_token(row[1], index)) for index, row in enumerate(packed)]

    def host_blocks(self, tree: DraftTree) -> list[tuple[list[int], list[int]]]:
        """(path without padding, emitted tokens with the bonus last) per row, in one transfer: one host sync.

        Raises ValueError where a row has no bonus.
        """
        token_BA = tree.token_BN.gather(1, self.path_BA.clamp(min=0))
        columns = [self.accepted_B[:, None], self.bonus_B[:, None], self.path_BA, token_BA]
        blocks = []
        for index, (accepted, bonus, *rest) in enumerate(torch.cat(columns, dim=1).tolist()):
            path, tokens = rest[: len(rest) // 2], rest[len(rest) // 2 :]
            blocks.append((path[: accepted + 1], [*tokens[1 : accepted + 1], real_token(bonus, index)]))
        return blocks


def real_token(bonus: int, row: int) -> int:
    """The token as it is. Raises ValueError where there is none (-1)."""
    if bonus < 0:
        raise ValueError(
            f"row {row} of the batch has no next token: the target's processed scores are all -inf or NaN, expected "
            "at least one finite one; change what rules tokens out (suppress, bad_words, custom processors), or the "
            "dtype if its logits overflow"
        )
    return bonus


def verify_greedy(tree: DraftTree, target_token_BN: Tensor, ancestors_BNN: Tensor | None = None) -> Verdict:
    """Greedy tree verification: the longest path whose every draft is the target's argmax at its parent.

        match[n] = token[n] == target[parent[n]]       (root: True)
        alive[n] = AND of match over n and its ancestors
        accepted path = root .. the deepest alive node; bonus = target[that node]

    Among equally deep alive nodes (only possible below siblings that hold the same token) the lowest index
    wins. Exact iff target_token_BN is the argmax of the *processed* target logits given each node's own path.
    Deviation from a first-match walk: duplicate siblings are all followed, so the result is never shorter.

    tree: B rows of N nodes; target_token_BN int64; ancestors_BNN bool: `ancestor_mask(tree.parent_BN)` if the
    caller has it already. No host sync. Raises ValueError for a tree whose proposal is not "top_k".

    Source: Stern et al., "Blockwise Parallel Decoding" (2018), section 3 (exact match); Miao et al.,
    "SpecInfer" (2024), section 4.3 (on a tree).
    """
    if tree.proposal != "top_k":
        raise ValueError(
            f"greedy verification got a tree with proposal {tree.proposal!r}, expected 'top_k'; draft with "
            "proposal='top_k', or verify sampled drafts with the sampling rule"
        )
    rows, nodes = tree.token_BN.shape
    assert target_token_BN.shape == (rows, nodes), f"target {tuple(target_token_BN.shape)}, tree {(rows, nodes)}"
    if ancestors_BNN is None:
        ancestors_BNN = ancestor_mask(tree.parent_BN)

    is_root_BN = tree.parent_BN < 0
    expected_BN = target_token_BN.gather(1, tree.parent_BN.clamp(min=0))
    match_BN = (tree.token_BN == expected_BN) | is_root_BN
    alive_BN = ~(ancestors_BNN & ~match_BN[:, None, :]).any(dim=2)

    # One integer orders by (depth, lowest index): argmax itself promises nothing about ties.
    index_N = torch.arange(nodes, device=tree.token_BN.device)
    key_BN = (tree.depth_BN * nodes + (nodes - 1 - index_N)).masked_fill(~alive_BN, -1)
    last_B1 = key_BN.argmax(dim=1, keepdim=True)

    # Each path node goes to the slot of its depth; the others to a spill slot that is cut off.
    on_path_BN = ancestors_BNN.gather(1, last_B1[:, :, None].expand(rows, 1, nodes))[:, 0]
    slot_BN = tree.depth_BN.masked_fill(~on_path_BN, nodes)
    path_BA = torch.full((rows, nodes + 1), -1, dtype=torch.int64, device=tree.token_BN.device)
    path_BA = path_BA.scatter(1, slot_BN, index_N.expand(rows, nodes))[:, :nodes]
    return Verdict(
        path_BA=path_BA,
        accepted_B=tree.depth_BN.gather(1, last_B1)[:, 0],
        bonus_B=target_token_BN.gather(1, last_B1)[:, 0],
    )


@dataclass(frozen=True, eq=False)
class Children:
    """The children of each row's node in W slots, in the order they were proposed.

    token_BW int64; present_BW bool, present slots first; q_BV fp32, what they were drawn from (top_k trees: None).
    """

    token_BW: Tensor
    present_BW: Tensor
    q_BV: Tensor | None

    @property
    def width(self) -> int:
        return self.token_BW.shape[1]


@dataclass(frozen=True, eq=False)
class Step:
    """What a rule decided at each row's node: slot_B int64 the accepted child, none: -1. Where none is, the bonus:
    bonus_B itself, or a draw from rest_BV (float64, need not be normalised) with uniform 0.
    """

    slot_B: Tensor
    bonus_B: Tensor | None = None
    rest_BV: Tensor | None = None


class Rule(ABC):
    """How one node is decided. `uniform_BU` holds float64 uniforms: 0 for the bonus, 1 + j for child slot j."""

    name: ClassVar[str]
    proposals: ClassVar[tuple[Proposal, ...]] = ("top_k",)
    lossless: ClassVar[bool] = True

    @abstractmethod
    def step(self, scores_BV: Tensor, children: Children, uniform_BU: Tensor) -> Step:
        """Decides; what it computes for a row depends on that row alone."""

    def check(self, tree: DraftTree) -> None:
        """Raises ValueError for a kind of tree that the rule is not made for."""
        if tree.proposal not in self.proposals:
            wanted = " or ".join(repr(proposal) for proposal in self.proposals)
            raise ValueError(
                f"rule {self.name!r} got a tree with proposal {tree.proposal!r}, expected {wanted}; draft with that "
                "proposal, or choose another rule"
            )


@dataclass(frozen=True)
class Greedy(Rule):
    """Follow the child that holds the argmax of the scores; the bonus is the argmax.

    Exact: each emitted token is the argmax at its own prefix, accepted or not. Of equal scores the lowest token
    wins, of siblings with the same token the first (`verify_greedy` follows all of them). Stern et al. (2018).
    """

    name = "greedy"

    def step(self, scores_BV: Tensor, children: Children, uniform_BU: Tensor) -> Step:
        best_B = argmax_of(scores_BV.contiguous())
        finite_B = scores_BV.gather(1, best_B[:, None])[:, 0] > -torch.inf  # NaN is not
        hit_BW = children.present_BW & (children.token_BW == best_B[:, None]) & finite_B[:, None]
        return Step(_first_slot(hit_BW), bonus_B=best_B.where(finite_B, -1))


@dataclass(frozen=True)
class TopK(Rule):
    """Deterministic children: accept x_j with chance r(x_j), else take it out of r; the bonus from what is left.

        r_1 = p;    accept x_j if u < r_j(x_j);    else r_(j+1) = r_j without x_j, renormalised

    This is `Sampled` with q_j = all mass on x_j: min(1, r/q) = r(x_j), and max(r - q_j, 0) = r without x_j.
    Exact: r_j(x_j) is p(x_j) / p(not x_1 .. x_(j-1)), so x_j is emitted with chance
    p(x_j) / p(not earlier) * p(not earlier) = p(x_j); any other token t with
    p(not x_1 .. x_W) * p(t) / p(not x_1 .. x_W) = p(t). It holds for every fixed tree, so for every tree that was made
    without looking at these uniforms. A second sibling with the same token has r = 0.

    Leviathan et al. (arXiv 2211.17192), appendix A.1, with one-hot q; on a tree Miao et al. (arXiv 2305.09781).
    """

    name = "top_k"

    def step(self, scores_BV: Tensor, children: Children, uniform_BU: Tensor) -> Step:
        p_BV = _distribution(softmax_of(scores_BV))
        token_BW, present_BW = children.token_BW, children.present_BW
        vocab, width = p_BV.shape[1], children.width
        older_WW = torch.ones(width, width, dtype=torch.bool, device=p_BV.device).tril(-1)
        same_BWW = (token_BW[:, :, None] == token_BW[:, None, :]) & older_WW  # absent slots come last: no matter
        p_BW = p_BV.gather(1, token_BW).masked_fill(~present_BW | same_BWW.any(2), 0.0)
        taken_BW = token_BW.masked_fill(~present_BW, vocab)  # a spare column
        rest_BV = F.pad(p_BV, (0, 1)).scatter(1, taken_BW, 0.0)[:, :vocab]
        outside_B1 = rest_BV.sum(1, keepdim=True)
        # Mass that is left before slot j, summed and not subtracted: right also where it is tiny.
        left_BW = outside_B1 + p_BW.flip(1).cumsum(1).flip(1)
        accept_BW = uniform_BU[:, 1 : 1 + width] * left_BW < p_BW
        # No mass outside: only rounding can reject the last child. Then any token of p will do.
        return Step(_first_slot(accept_BW), rest_BV=torch.where(outside_B1 > 0, rest_BV, p_BV))


@dataclass(frozen=True)
class Sampled(Rule):
    """Children drawn from q without replacement: recursive rejection.

        r_1 = p;    q_j = q without x_1 .. x_(j-1), renormalised
        accept x_j if u < r_j(x_j) / q_j(x_j);    else r_(j+1) = norm(max(r_j - q_j, 0));    the bonus from the last r

    Exact: given its elder siblings x_j has law q_j. So with r = r_j, q = q_j, t is emitted at slot j with chance
    q(t) min(1, r(t)/q(t)) = min(q, r)(t), and x_j is rejected with chance 1 - sum min(q, r) = sum max(r - q, 0). If
    what follows emits t with law r_(j+1), the sum is min(q, r)(t) + max(r - q, 0)(t) = r(t). The bonus has the law of
    the last r; by induction from there slot 1 emits p.

    A child with q_j = 0 (fewer tokens with q > 0 than children, or a token already proposed) is skipped, as if it were
    not there: it is known before any uniform is looked at. So siblings drawn *with* replacement are fine too: one that
    is no repetition has law q_j. Not exact: children that were reordered, or dropped, by looking at their tokens.

    Jeon et al., "Recursive speculative decoding" (arXiv 2402.14160); Chen et al., "Sequoia" (arXiv 2402.12374).
    """

    name = "sampled"
    proposals = ("sampled",)

    def step(self, scores_BV: Tensor, children: Children, uniform_BU: Tensor) -> Step:
        r_BV = _distribution(softmax_of(scores_BV))
        slot_B = _none(r_BV)
        if children.q_BV is None:
            return Step(slot_B, rest_BV=r_BV)
        left_BV = children.q_BV.double()  # q without elder siblings
        for j in range(children.width):
            open_B = children.present_BW[:, j] & (slot_B < 0)
            if not _may_be_any(open_B):
                break
            token_B1 = children.token_BW[:, j : j + 1]
            q_BV = _distribution(left_BV)
            q_B, r_B = q_BV.gather(1, token_B1)[:, 0], r_BV.gather(1, token_B1)[:, 0]
            offered_B = open_B & (q_B > 0)  # NaN is not
            accept_B = offered_B & (uniform_BU[:, 1 + j] * q_B < r_B)
            slot_B = slot_B.masked_fill(accept_B, j)
            residual_BV = (r_BV - q_BV).clamp_(min=0)
            # No mass: r <= q_j everywhere, so r = q_j and only rounding rejected. Then r itself will do.
            use_B1 = (offered_B & ~accept_B)[:, None] & (residual_BV.sum(1, keepdim=True) > 0)
            r_BV = torch.where(use_B1, _distribution(residual_BV), r_BV)
            left_BV = left_BV.scatter(1, token_B1, 0.0)
        return Step(slot_B, rest_BV=r_BV)


@dataclass(frozen=True)
class Match(Rule):
    """Draw y from p; follow the first child that holds y, else y is the bonus.

    Exact: the emitted token is y, drawn from p by a uniform that no draft has seen. The children only say how far one
    can go on without another target pass. So it needs no q and is exact for sampled trees as well as for top_k ones,
    even for sampled trees whose children were reordered or pruned by their tokens. On a top_k tree it accepts as often
    as `TopK`; on a sampled chain less often than `Sampled`: sum p q against sum min(p, q).

    "Sample and match"; Miao et al. (arXiv 2305.09781) call it naive sampling.
    """

    name = "match"
    proposals = ("top_k", "sampled")

    def step(self, scores_BV: Tensor, children: Children, uniform_BU: Tensor) -> Step:
        y_B = draw(softmax_of(scores_BV), uniform_BU[:, 0])
        return Step(_first_slot(children.present_BW & (children.token_BW == y_B[:, None])), bonus_B=y_B)


@dataclass(frozen=True)
class TypicalLossy(Rule):
    """Medusa's typical acceptance. LOSSY: the emitted tokens do not have the target's law.

        accept x if p(x) > min(epsilon, delta * exp(-H(p))),    H(p) = -sum p log(p + 1e-5), in nats

    Of several such children the likeliest is followed; the bonus is drawn from p. Deviations from Medusa: it looks at
    all paths and takes the longest, and its bonus is the argmax by default. Cai et al. (arXiv 2401.10774), "Typical
    acceptance".
    """

    epsilon: float = 0.09
    delta: float = 0.3

    name = "typical_lossy"
    lossless = False

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if not 0 < value <= 1:
                raise ValueError(f"typical {name} is {value}, expected above 0, at most 1: change {name}")

    def step(self, scores_BV: Tensor, children: Children, uniform_BU: Tensor) -> Step:
        p_BV = softmax_of(scores_BV)
        entropy_B1 = -(p_BV * (p_BV + 1e-5).log()).sum(1, keepdim=True)
        floor_B1 = (self.delta * (-entropy_B1).exp()).clamp(max=self.epsilon)
        p_BW = p_BV.gather(1, children.token_BW)
        passing_BW = p_BW.where(children.present_BW & (p_BW > floor_B1), -1.0)
        if not children.width:
            return Step(_none(p_BV), rest_BV=p_BV)
        best_B1 = passing_BW.amax(1, keepdim=True)
        return Step(_first_slot((passing_BW == best_B1) & (best_B1 > 0)), rest_BV=p_BV)


RULES: dict[str, Rule] = {rule.name: rule for rule in (Greedy(), TopK(), Sampled(), Match(), TypicalLossy())}


def walk(
    tree: DraftTree, rule: Rule, law: Law, uniform_BDU: Tensor, *, depth: int, width: int | None = None
) -> Verdict:
    """Verifies trees from the root down: at each level the rule accepts a child of every row's node, or ends the row.

    No host sync on an accelerator. On a CPU, where reading back is free, it stops with the last row.

    Args:
        law: called once per level with each row's node and the tokens on its path. Rows that have ended stay at their
            node; for them the path is only filled up, and the result is not used.
        uniform_BDU: float64 in (0, 1), [B, depth + 1, W + 1] or more. What a row consumes is fixed by level and slot,
            so it depends neither on other rows nor on how far this one came.
        depth: bound on the depth of the trees. Nodes below it are not offered.
        width: bound on the children of a node (default: nodes - 1). Children beyond it are not offered.

    Raises:
        ValueError: the tree's proposal is not one that the rule is made for.
    """
    rule.check(tree)
    rows, nodes = tree.token_BN.shape
    levels = min(depth, nodes - 1)
    slots = nodes - 1 if width is None else min(width, nodes - 1)
    enough = uniform_BDU.shape[0] == rows and uniform_BDU.shape[1] > levels and uniform_BDU.shape[2] > slots
    assert enough, f"uniforms {tuple(uniform_BDU.shape)} for {rows} rows, {levels} levels, {slots} children"

    node_B = tree.token_BN.new_zeros(rows)
    going_B = torch.ones(rows, dtype=torch.bool, device=node_B.device)
    accepted_B, bonus_B = torch.zeros_like(node_B), torch.full_like(node_B, -1)
    path_BA = torch.full_like(tree.token_BN, -1)
    path_BA[:, 0] = 0
    path_BD = tree.token_BN[:, :0]
    for level in range(levels + 1):
        child_BW, children = _children(tree, node_B, slots if level < levels else 0)
        step = rule.step(law(node_B, path_BD), children, uniform_BDU[:, level])
        ends_B = going_B & (step.slot_B < 0)
        if _may_be_any(ends_B):
            bonus_B = torch.where(ends_B, _bonus(step, uniform_BDU[:, level, 0]), bonus_B)
        going_B = going_B & ~ends_B
        if level == levels or not _may_be_any(going_B):
            break
        chosen_B = child_BW.gather(1, step.slot_B.clamp(min=0)[:, None])[:, 0]
        node_B = torch.where(going_B, chosen_B, node_B)
        path_BA[:, level + 1] = node_B.where(going_B, -1)
        accepted_B = accepted_B + going_B
        path_BD = torch.cat([path_BD, tree.token_BN.gather(1, node_B[:, None])], 1)
    return Verdict(path_BA=path_BA, accepted_B=accepted_B, bonus_B=bonus_B)


def _children(tree: DraftTree, node_B: Tensor, width: int) -> tuple[Tensor, Children]:
    """Node indices [B, W] and the children of each row's node, in index order."""
    rows, nodes = tree.token_BN.shape
    index_N = torch.arange(nodes, device=node_B.device)
    child_BW = index_N.where(tree.parent_BN == node_B[:, None], nodes).sort(1).values[:, :width]
    present_BW = child_BW < nodes
    child_BW = child_BW.clamp(max=nodes - 1)
    q_BV = None
    if width and tree.q_BMV is not None and tree.q_row_BN is not None:
        q_row_B1 = tree.q_row_BN.gather(1, node_B[:, None])
        q_BV = tree.q_BMV[torch.arange(rows, device=node_B.device), q_row_B1[:, 0].clamp(min=0)]
        present_BW = present_BW & (q_row_B1 >= 0)
    return child_BW, Children(tree.token_BN.gather(1, child_BW), present_BW, q_BV)


def _bonus(step: Step, uniform_B: Tensor) -> Tensor:
    if step.bonus_B is not None:
        return step.bonus_B
    assert step.rest_BV is not None, "a step gives the bonus or its law"
    return draw(step.rest_BV, uniform_B)


def _distribution(mass_BV: Tensor) -> Tensor:
    """float64, each row divided by its sum; zeros stay zeros."""
    mass_BV = mass_BV.double()
    return mass_BV / mass_BV.sum(1, keepdim=True).clamp_(min=torch.finfo(torch.float64).tiny)


def _first_slot(hit_BW: Tensor) -> Tensor:
    """The lowest slot that is True, [B] int64; none: -1."""
    width = hit_BW.shape[1]
    if width == 0:
        return _none(hit_BW)
    slot_B = torch.arange(width, device=hit_BW.device).where(hit_BW, width).amin(1)
    return slot_B.masked_fill(slot_B == width, -1)


def _none(like_BX: Tensor) -> Tensor:
    return torch.full((len(like_BX),), -1, dtype=torch.long, device=like_BX.device)


def _may_be_any(mask_B: Tensor) -> bool:
    """Whether any is True, read back only where that costs nothing; elsewhere "maybe"."""
    return mask_B.device.type != "cpu" or bool(mask_B.any())

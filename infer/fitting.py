"""The best static tree for what a head gets right.

Measured is, at many places of the target's own text, the rank that the draft of each depth gives to the target's token.
With a_k(r), the share of depth k's drafts whose rank is r among those where all depths before had a rank at all:

    value(r_1 .. r_d) = a_1(r_1) a_2(r_2) .. a_d(r_d)        E[accept length] = 1 + sum of the values of a tree's nodes

(the bonus token is the 1; Medusa, arXiv 2401.10774, section 2.3.3). No child has more value than its parent, so the n
best nodes are a tree, and the best one of n nodes. The model takes ranks of different depths as independent; `replay`
does without that.

Places are not rounds: decoding drafts where the round before has ended, not everywhere. So both figures can differ from
the accept length of decoding, which `scripts/fit_tree.py --check` measures.

Shapes: R places (roots), K depths.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.base import TreePolicy
from heads.static import StaticTree
from infer.costs import Costs

# Instead of a rank: the target's token is not among the ranks that are looked at, or not in the draft vocabulary.
MISS = -1
# Nothing can be said: the text does not go on as the target would, or ends. So are all depths below.
UNKNOWN = -2


@dataclass(frozen=True)
class Accuracy:
    """share[k][r] = a_{k+1}(r), r below the largest rank looked at. tried[k]: places it was measured at."""

    share: tuple[tuple[float, ...], ...]
    tried: tuple[int, ...]

    @classmethod
    def of(cls, rank_RK: Tensor, ranks: int) -> Accuracy:
        """From ranks [R, K], below `ranks` or `MISS` or `UNKNOWN`."""
        share, tried = [], []
        reached_R = torch.ones(len(rank_RK), dtype=torch.bool)
        for rank_R in rank_RK.unbind(1):
            known_R = rank_R[reached_R & (rank_R != UNKNOWN)]
            counts = torch.bincount(known_R[known_R >= 0], minlength=ranks).tolist()
            share.append(tuple(count / max(1, len(known_R)) for count in counts))
            tried.append(len(known_R))
            reached_R = reached_R & (rank_R >= 0)
        return cls(tuple(share), tuple(tried))


def best_nodes(accuracy: Accuracy, count: int) -> list[tuple[tuple[int, ...], float]]:
    """The `count` drafted nodes of most value with their values, best first: each prefix of the list is a tree.

    Equal values: shallower first, then the lower ranks. Nodes without value are left out.
    """
    found: list[tuple[tuple[int, ...], float]] = []
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, 0, ())]
    while heap and len(found) <= count:
        minus, depth, path = heapq.heappop(heap)
        found.append((path, -minus))
        if depth < len(accuracy.share):
            for rank, share in enumerate(accuracy.share[depth]):
                if share > 0:
                    heapq.heappush(heap, (minus * share, depth + 1, (*path, rank)))
    return found[1:]  # without the root


def best_tree(accuracy: Accuracy, nodes: int) -> tuple[StaticTree, float]:
    """The tree of at most `nodes` nodes (root included) with the longest expected accept length, and that length.

    Raises ValueError: fewer than 2 nodes, or no draft was ever right.
    """
    if nodes < 2:
        raise ValueError(f"nodes is {nodes}, expected 2 or more (the root counts): change --nodes")
    best = best_nodes(accuracy, nodes - 1)
    if not best:
        raise ValueError(
            f"none of {accuracy.tried[0]} drafts is right: there is no tree to fit; train the head longer, or raise "
            "--max-rank"
        )
    return StaticTree(tuple(path for path, _ in best)), 1 + sum(value for _, value in best)


def replay(rank_RK: Tensor, tree: StaticTree) -> float:
    """Mean accept length of the tree at these places, by what was measured at each: 1 + mean accepted depth.

    Where the text leaves the target's way, how deep a tree would have been accepted is not known. Such places count as
    far as they are known (Kaplan & Meier, 1958): of those whose first d - 1 tokens are in the tree and whose d-th is
    known, the share s_d goes on, and E[accept length] = 1 + s_1 + s_1 s_2 + ..; with nothing unknown it is the mean.
    """
    paths = set(tree.paths)
    total, going_on = 1.0, 1.0
    alive = rank_RK.tolist()
    for depth in range(1, min(tree.depth, rank_RK.shape[1]) + 1):
        known = [ranks for ranks in alive if ranks[depth - 1] != UNKNOWN]
        alive = [ranks for ranks in known if tuple(ranks[:depth]) in paths]
        going_on *= len(alive) / max(1, len(known))
        total += going_on
    return total


@dataclass(frozen=True)
class Fit:
    """A tree and what is expected of it.

    expected: accept length by the model. replayed: that of the tree of as many nodes fitted on one half of the rows,
    replayed on the other; None: there is one row only. ms and tokens per second (all rows together) need costs.
    """

    tree: StaticTree
    expected: float
    replayed: float | None = None
    round_ms: float | None = None
    tokens_per_second: float | None = None


def fit(rank_RK: Tensor, row_R: Tensor, ranks: int, sizes: Sequence[int]) -> list[Fit]:
    """The best tree of each size, fitted on all rows; those that would be another's equal are left out.

    row_R: number of the row that each place is in; even ones are the half that `Fit.replayed` is fitted on.

    Raises ValueError: see `best_tree`.
    """
    whole = Accuracy.of(rank_RK, ranks)
    even_R = row_R % 2 == 0
    half, other_RK = Accuracy.of(rank_RK[even_R], ranks), rank_RK[~even_R]
    fits: list[Fit] = []
    for size in sizes:
        tree, expected = best_tree(whole, size)
        replayed = None
        if len(other_RK) and best_nodes(half, 1):
            replayed = replay(other_RK, best_tree(half, size)[0])
        if not fits or fits[-1].tree != tree:
            fits.append(Fit(tree, expected, replayed))
    return fits


def priced(fits: Sequence[Fit], costs: Costs, draft_ms: Sequence[float]) -> list[Fit]:
    """The same with ms per round and tokens per second: 1000 rows E[accept length] / round(n), see `infer.costs`."""
    found = []
    for one, ms in zip(fits, draft_ms, strict=True):
        round_ms = costs.round_ms(TreePolicy.of(one.tree), ms)
        speed = 1000 * costs.rows * one.expected / round_ms
        found.append(Fit(one.tree, one.expected, one.replayed, round_ms, speed))
    return found

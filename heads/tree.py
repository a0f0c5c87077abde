"""Draft trees and the pure functions on them.

A draft tree holds the proposals of one round. Node 0 is the root: the last decided token, whose keys and
values are not in the target's cache yet. Every other node is a drafted token that continues its parent. A
chain is a tree with one child per node, so all drafters share one scoring pass, one verification and one
commit.

Shape legend: B rows (one tree each) · N nodes, root included · C candidate nodes before reranking, root
included · D draft levels of a chain · S slots of the target's cache (the prefix).

Sources: token trees and their mask, Miao et al., "SpecInfer" (2024), section 4, and Cai et al., "Medusa"
(2024), section 2.1.2; expansion and reranking, Li et al., "EAGLE-2" (2024), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Proposal = Literal["top_k", "sampled"]


@dataclass(frozen=True, eq=False)  # eq=False: comparing tensors field by field has no single truth value
class DraftTree:
    """One draft tree per row, nodes in topological order (parent index < child index).

    token_BN   int64    token ids; node 0 is the root
    parent_BN  int64    index of the parent node; root: -1
    depth_BN   int64    edges from the root; root: 0
    score_BN   float32  cumulative draft log-probability in nats along the path from the root; root: 0.0
    proposal            how children were chosen: "top_k" (deterministic) or "sampled". The exact verification
                        rule differs between the two; verifiers refuse the kind they are not made for.
    q_BMV      float32  over the target's whole vocabulary: what the children of an expanded node were drawn from,
                        before any sibling was taken out; M expanded nodes. A row of zeros offers nothing.
    q_row_BN   int64    row of q_BMV for the children of node n; none: -1

    A sampled tree has both of the last two, a top_k tree neither. Siblings were proposed in the order of their
    indices; which of the drawn children a sampled tree holds must not depend on the tokens that were drawn.
    """

    token_BN: Tensor
    parent_BN: Tensor
    depth_BN: Tensor
    score_BN: Tensor
    proposal: Proposal = "top_k"
    q_BMV: Tensor | None = None
    q_row_BN: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of rows B."""
        return self.token_BN.shape[0]

    @property
    def nodes(self) -> int:
        """Number of nodes N, root included."""
        return self.token_BN.shape[1]

    def validate(self) -> DraftTree:
        """Check every invariant of the class and return self. Reads the tensors back: one or more host syncs.

        Raises AssertionError: a broken tree is our bug, not the user's.
        """
        shape = self.token_BN.shape
        assert len(shape) == 2 and shape[1] >= 1, f"tree tensors must be [B,N] with N >= 1, got {tuple(shape)}"
        for name in ("token_BN", "parent_BN", "depth_BN"):
            field = getattr(self, name)
            assert field.shape == shape, f"{name} has shape {tuple(field.shape)}, token_BN {tuple(shape)}"
            assert field.dtype == torch.int64, f"{name} must be int64, got {field.dtype}"
        assert self.score_BN.shape == shape, f"score_BN has shape {tuple(self.score_BN.shape)}, not {tuple(shape)}"
        assert self.score_BN.dtype == torch.float32, f"score_BN must be float32, got {self.score_BN.dtype}"
        assert self.proposal in ("top_k", "sampled"), f"unknown proposal {self.proposal!r}"
        assert bool((self.parent_BN[:, 0] == -1).all()), "the root's parent must be -1"
        assert bool((self.depth_BN[:, 0] == 0).all()), "the root's depth must be 0"
        assert bool((self.score_BN[:, 0] == 0).all()), "the root's score must be 0.0"
        parent_BM = self.parent_BN[:, 1:]  # M = N - 1 drafted nodes
        index_M = torch.arange(1, shape[1], device=self.parent_BN.device)
        ordered = (parent_BM >= 0) & (parent_BM < index_M)
        assert bool(ordered.all()), "nodes must be in topological order: 0 <= parent index < child index"
        one_deeper = self.depth_BN[:, 1:] == self.depth_BN.gather(1, parent_BM) + 1
        assert bool(one_deeper.all()), "a node's depth must be its parent's depth + 1"
        no_better = self.score_BN[:, 1:] <= self.score_BN.gather(1, parent_BM)
        assert bool(no_better.all()), "a node's cumulative score must not exceed its parent's (nor be NaN)"
        self._validate_q(parent_BM)
        return self

    def _validate_q(self, parent_BM: Tensor) -> None:
        q_BMV, q_row_BN = self.q_BMV, self.q_row_BN
        if self.proposal == "top_k":
            assert q_BMV is None and q_row_BN is None, "a top_k tree has no q: its children were not drawn"
            return
        assert q_BMV is not None and q_row_BN is not None, "a sampled tree needs q_BMV and q_row_BN"
        assert q_BMV.dim() == 3 and q_BMV.shape[0] == self.rows, f"q_BMV is {tuple(q_BMV.shape)}, {self.rows} rows"
        assert q_BMV.dtype == torch.float32, f"q_BMV must be float32, got {q_BMV.dtype}"
        assert q_row_BN.shape == self.token_BN.shape, f"q_row_BN is {tuple(q_row_BN.shape)}"
        assert q_row_BN.dtype == torch.int64, f"q_row_BN must be int64, got {q_row_BN.dtype}"
        in_range = (q_row_BN >= -1) & (q_row_BN < q_BMV.shape[1])
        assert bool(in_range.all()), f"q_row_BN must be -1 .. {q_BMV.shape[1] - 1}"
        assert bool((q_row_BN.gather(1, parent_BM) >= 0).all()), "a node with children must have a row of q_BMV"
        mass_BM = q_BMV.sum(-1)
        sound = (q_BMV >= 0).all() & (((mass_BM - 1).abs() < 1e-3) | (mass_BM == 0)).all()  # fp32 sums over V terms
        assert bool(sound), "every row of q_BMV must be non-negative and sum to 1, or to 0 where it offers nothing"


def ancestor_mask(parent_BN: Tensor) -> Tensor:
    """[B,N] int64 parents -> [B,N,N] bool; [b,n,m] is True iff m is n itself or an ancestor of n.

    Pointer doubling: after k steps row n holds n and its 2^k - 1 nearest ancestors, and `jump` points 2^k
    levels up (saturating at the root). ceil(log2 N) steps cover any depth, so nothing is read back to the
    host.
    """
    rows, nodes = parent_BN.shape
    row_B1 = torch.arange(rows, device=parent_BN.device)[:, None]
    jump_BN = parent_BN.clamp(min=0)  # the root jumps to itself
    mask_BNN = torch.eye(nodes, dtype=torch.bool, device=parent_BN.device).expand(rows, nodes, nodes)
    for _ in range((nodes - 1).bit_length()):
        mask_BNN = mask_BNN | mask_BNN[row_B1, jump_BN]
        jump_BN = jump_BN.gather(1, jump_BN)
    return mask_BNN.clone() if nodes == 1 else mask_BNN  # never hand out the expanded view


def sibling_rank(parent_BN: Tensor) -> Tensor:
    """How many siblings come before each node, [B,N] int64; the root's is 0."""
    index_N = torch.arange(parent_BN.shape[1], device=parent_BN.device)
    older_NN = index_N[None, :] < index_N[:, None]  # [n,m]: m < n
    return ((parent_BN[:, :, None] == parent_BN[:, None, :]) & older_NN).sum(2)


def tree_positions(depth_BN: Tensor, length_B: Tensor) -> Tensor:
    """Position ids [B,N] int64 of the nodes: length + depth.

    depth_BN int64; length_B int64: number of decided tokens before the root, which is the root's own
    position. It counts tokens, not cache slots (the two differ once rows of a batch commit different
    lengths).
    """
    assert length_B.shape == depth_BN.shape[:1], f"length_B {tuple(length_B.shape)}, depth {tuple(depth_BN.shape)}"
    return length_B[:, None] + depth_BN


def additive_mask(visible_BNS: Tensor, dtype: torch.dtype) -> Tensor:
    """bool [B,N,S] -> attention mask [B,1,N,S] of `dtype`: 0 where visible, finfo(dtype).min elsewhere.

    Float and not bool: eager attention *adds* the mask, so a bool mask is silently wrong there (+1 / +0),
    while the additive form is right under both eager and sdpa. finfo.min and not -inf: a row that sees
    nothing stays finite.
    """
    assert visible_BNS.dtype == torch.bool, f"visibility must be bool, got {visible_BNS.dtype}"
    assert dtype.is_floating_point, f"an additive mask needs a floating dtype, got {dtype}"
    mask_BNS = torch.zeros(visible_BNS.shape, dtype=dtype, device=visible_BNS.device)
    return mask_BNS.masked_fill_(~visible_BNS, torch.finfo(dtype).min)[:, None]


def paths(parent: Tensor | Sequence[int]) -> list[list[int]]:
    """Node indices from the root to each node of one tree (parents [N]). Slow oracle, for tests."""
    parents = parent.tolist() if isinstance(parent, Tensor) else list(parent)
    found: list[list[int]] = []
    for node, above in enumerate(parents):
        assert -1 <= above < node, f"node {node} has parent {above}: not in topological order"
        found.append([node] if above < 0 else [*found[above], node])
    return found


def rerank(
    token_BC: Tensor,
    parent_BC: Tensor,
    depth_BC: Tensor,
    score_BC: Tensor,
    keep: int,
    *,
    proposal: Proposal = "top_k",
    check: bool = True,
) -> DraftTree:
    """EAGLE-2 reranking: of all candidates keep the root and the best keep - 1 by cumulative score.

    All inputs [B,C], the root included at index 0 (parent -1, depth 0, score 0.0); parent indices point into
    the same C candidates, parent index < child index. `keep` counts the root; with fewer candidates all are
    kept. Returns a tree of N = min(keep, C) nodes.

    Ties go to the shallower node, then to the lower index, in fp32. A child never scores above its parent, so
    the kept set is connected even among ties (half precision would create many: -3.5 + -1e-4 rounds to -3.5).

    Order of the nodes: depth-first, best child first. The accepted path is then usually a contiguous run of
    nodes after the root, whose cache slots need no copy at commit. The order is computed with [N,N] tensor
    operations, so on an accelerator nothing waits for the host, except for `check`, which asserts the
    connectivity and costs one sync there; a loop that counts its syncs may pass check=False.

    Source: Li et al., "EAGLE-2" (2024), section 4.2. Raises ValueError if keep < 1.
    """
    if keep < 1:
        raise ValueError(f"tree size is {keep}, expected at least 1 (it counts the root); raise the tree size")
    rows, candidates = token_BC.shape
    nodes = min(keep, candidates)
    score_BC = score_BC.float()

    # Stable sorts, least significant key first: index (as given), then depth, then score.
    by_depth_BC = depth_BC.argsort(dim=1, stable=True)
    by_score_BC = score_BC.gather(1, by_depth_BC).argsort(dim=1, descending=True, stable=True)
    kept_BN = by_depth_BC.gather(1, by_score_BC)[:, :nodes]  # candidate index of each kept node, best first

    # Rank = place in kept_BN. Ranks are a topological order too, since a parent precedes its children.
    arange_N = torch.arange(nodes, device=token_BC.device)
    rank_BC = torch.full_like(parent_BC, -1).scatter(1, kept_BN, arange_N.expand(rows, nodes))
    parent_cand_BN = parent_BC.gather(1, kept_BN)
    parent_rank_BN = rank_BC.gather(1, parent_cand_BN.clamp(min=0)).masked_fill(parent_cand_BN < 0, -1)
    if check:
        connected = (parent_rank_BN[:, 1:] >= 0) & (parent_rank_BN[:, 1:] < arange_N[1:])
        whole = (kept_BN[:, 0] == 0).all() & connected.all()
        assert bool(whole), "reranked nodes are not connected: a candidate scores above its parent, or is NaN"

    slot_BN = _depth_first_slots(parent_rank_BN)
    order_BN = torch.empty_like(slot_BN).scatter(1, slot_BN, arange_N.expand(rows, nodes))  # slot -> rank
    from_BN = kept_BN.gather(1, order_BN)  # slot -> candidate
    above_BN = parent_rank_BN.gather(1, order_BN)  # slot -> parent's rank
    return DraftTree(
        token_BN=token_BC.gather(1, from_BN),
        parent_BN=slot_BN.gather(1, above_BN.clamp(min=0)).masked_fill(above_BN < 0, -1),
        depth_BN=depth_BC.gather(1, from_BN),
        score_BN=score_BC.gather(1, from_BN),
        proposal=proposal,
    )


def _depth_first_slots(parent_BN: Tensor) -> Tensor:
    """Pre-order number [B,N] of each node, siblings in index order; parents [B,N] in topological order.

    A node comes 1 + (sizes of its earlier siblings' subtrees) after its parent; summed along its ancestors.
    """
    nodes = parent_BN.shape[1]
    ancestors_BNN = ancestor_mask(parent_BN)
    size_BN = ancestors_BNN.sum(dim=1)  # nodes in the subtree of each node, itself included
    index_N = torch.arange(nodes, device=parent_BN.device)
    earlier_NN = index_N[None, :] < index_N[:, None]  # [n,m]: m < n
    older_sibling_BNN = (parent_BN[:, :, None] == parent_BN[:, None, :]) & earlier_NN
    step_BN = 1 + (older_sibling_BNN * size_BN[:, None, :]).sum(dim=2)
    step_BN = step_BN.masked_fill(parent_BN < 0, 0)
    return (ancestors_BNN * step_BN[:, None, :]).sum(dim=2)


def chain(tokens_BD: Tensor, scores_BD: Tensor, root_B: Tensor, *, proposal: Proposal = "top_k") -> DraftTree:
    """A chain as a tree of N = D + 1 nodes: root, then each drafted token below the one before it.

    tokens_BD int64 drafted tokens in order (D may be 0); scores_BD cumulative log-probabilities in nats, as
    in `DraftTree.score_BN`; root_B int64 the last decided token of each row.
    """
    rows, levels = tokens_BD.shape
    assert scores_BD.shape == tokens_BD.shape, f"scores {tuple(scores_BD.shape)}, tokens {tuple(tokens_BD.shape)}"
    assert root_B.shape == (rows,), f"root has shape {tuple(root_B.shape)}, expected {(rows,)}"
    depth_BN = torch.arange(levels + 1, device=tokens_BD.device).expand(rows, levels + 1).contiguous()
    scores_BD = scores_BD.float()
    return DraftTree(
        token_BN=torch.cat([root_B[:, None], tokens_BD], dim=1),
        parent_BN=depth_BN - 1,
        depth_BN=depth_BN,
        score_BN=torch.cat([scores_BD.new_zeros(rows, 1), scores_BD], dim=1),
        proposal=proposal,
    )

"""Verification: which drafted path the target confirms. Pure; the engine applies the verdict.

Shape legend: B rows · N tree nodes, root included · A path slots (A = N: nothing is read back to size it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heads.tree import DraftTree, ancestor_mask


@dataclass(frozen=True, eq=False)
class Verdict:
    """What one round decided, per row.

    path_BA     int64  node indices of the accepted path, root first, increasing; unused slots hold -1. A = N.
    accepted_B  int64  accepted drafted tokens a (0 if only the root stands); the path has a + 1 nodes
    bonus_B     int64  the token the target emits after the last accepted node; the next round's root

    A row emits the tokens of path[1 : a + 1], then the bonus.
    """

    path_BA: Tensor
    accepted_B: Tensor
    bonus_B: Tensor

    def host_rows(self) -> list[tuple[list[int], int]]:
        """(path without padding, bonus) per row as Python values, in one transfer: one host sync."""
        packed = torch.cat([self.accepted_B[:, None], self.bonus_B[:, None], self.path_BA], dim=1).tolist()
        return [(row[2 : 3 + row[0]], row[1]) for row in packed]


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

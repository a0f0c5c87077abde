"""Growth of draft trees, shared by the hidden-state drafters (EAGLE-2, arXiv 2406.16858, section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from heads.base import ChildSampler, TreePolicy
from heads.topk import top_k_of
from heads.tree import DraftTree, rerank

# (features of the parents [B, W, H], tokens [B, W], level, visible drafted slots [B, W, slots]) -> outputs [B, W, H]
Expand = Callable[[Tensor, Tensor, int, Tensor], Tensor]


def grow_tree(
    root_B: Tensor,
    root_output_B1H: Tensor,
    policy: TreePolicy,
    expand: Expand,
    logits_of: Callable[[Tensor], Tensor],
    draft_ids: Tensor | None = None,
) -> DraftTree:
    """Expands the `width` best nodes of each level, then keeps the `total` best nodes of all levels.

    A node's score is the sum of the draft's log-probabilities on its path (fp32), EAGLE-2's estimate of its chance
    to be accepted. Children are the draft's top `width` tokens (deterministic: proposal "top_k"). The drafted keys of
    level d are written behind those of level d - 1; a node sees its own ancestors among them and itself.

    Args:
        logits_of: outputs [.., H] to logits over the draft vocabulary; the target ids of its columns are
            `draft_ids` (None: the columns are the ids).
    """
    if draft_ids is not None and policy.width > len(draft_ids):
        raise ValueError(f"tree width is {policy.width}, the draft vocabulary {len(draft_ids)}: lower --tree-width")
    rows, device, width = len(root_B), root_output_B1H.device, policy.width
    score_B1W, token_B1W = _best_children(logits_of(root_output_B1H), width, draft_ids)
    frontier_score, frontier_token = score_B1W[:, 0], token_B1W[:, 0]  # [B, W]
    tokens, scores = [root_B[:, None], frontier_token], [frontier_score.new_zeros(rows, 1), frontier_score]
    parents = [root_B.new_full((rows, 1), -1), root_B.new_zeros(rows, width)]
    frontier_index = torch.arange(1, width + 1, device=device).expand(rows, width)  # candidate index of each node
    feature_BWH = root_output_B1H.expand(rows, width, -1)
    own_BWW = torch.eye(width, dtype=torch.bool, device=device).expand(rows, width, width)
    seen_BWS = own_BWW
    count = width + 1
    for level in range(1, policy.depth):
        out_BWH = expand(feature_BWH, frontier_token, level, seen_BWS)
        child_score, child_token = _best_children(logits_of(out_BWH), width, draft_ids)  # [B, W, W]
        child_score = (child_score + frontier_score[:, :, None]).flatten(1)
        child_token = child_token.flatten(1)
        tokens.append(child_token)
        scores.append(child_score)
        parents.append(frontier_index.repeat_interleave(width, dim=1))
        frontier_score, best_BW = child_score.topk(width)
        frontier_token = child_token.gather(1, best_BW)
        frontier_index = count + best_BW
        count += width * width
        parent_BW = best_BW // width
        feature_BWH = _take(out_BWH, parent_BW)
        seen_BWS = torch.cat([_take(seen_BWS, parent_BW), own_BWW], -1)
    depths = [torch.full_like(t, level) for level, t in enumerate(tokens)]
    return rerank(
        torch.cat(tokens, 1),
        torch.cat(parents, 1),
        torch.cat(depths, 1),
        torch.cat(scores, 1),
        policy.total,
        check=False,
    )


def sampled_levels(policy: TreePolicy) -> list[tuple[int, int]]:
    """(nodes to expand, children of each) per level of a sampled tree of at most `total` nodes.

    It depends on the policy alone: which of its drawn nodes a tree keeps must not depend on what was drawn, or the
    verified law would no longer be the target's. (Which node gets children may: a node without any is still kept.)
    """
    drafted = policy.total - 1
    depth = min(policy.depth, drafted)
    first = max(1, min(policy.width, drafted - (depth - 1)))
    plan, left = [(1, first)], drafted - first
    for level in range(1, depth):
        budget = left // (depth - level)
        expanded = max(1, min(plan[-1][0] * plan[-1][1], policy.width, math.isqrt(budget)))
        plan.append((expanded, max(1, min(policy.width, budget // expanded))))
        left -= plan[-1][0] * plan[-1][1]
    return plan


def grow_sampled_tree(
    root_B: Tensor,
    root_output_B1H: Tensor,
    policy: TreePolicy,
    expand: Expand,
    logits_of: Callable[[Tensor], Tensor],
    sampler: ChildSampler,
) -> DraftTree:
    """A tree whose children are drawn from the draft without replacement; all that is drawn is kept.

    Each level expands its likeliest nodes (`sampled_levels`); nodes lie level by level, siblings in the order drawn.
    The distributions drawn from go with the tree, as verification needs them.
    """
    rows, device = len(root_B), root_output_B1H.device
    tokens, parents = [root_B[:, None]], [root_B.new_full((rows, 1), -1)]
    scores = [torch.zeros(rows, 1, device=device)]
    q_rows = [root_B.new_full((rows, 1), -1)]
    distributions: list[Tensor] = []
    chosen_BF = root_B.new_zeros(rows, 1)  # nodes to expand, as indices into the level before
    first = 0  # index of that level's first node
    path_BFD = root_B.new_zeros(rows, 1, 0)
    feature_BFH, out_BFH = root_output_B1H, root_output_B1H
    seen_BFS = torch.zeros(rows, 1, 0, dtype=torch.bool, device=device)
    made = 0  # distributions so far
    siblings = 1  # children per expanded node of the level before
    for level, (expanded, children) in enumerate(sampled_levels(policy)):
        if level:
            chosen_BF = scores[-1].topk(expanded).indices
            parent_BF = chosen_BF // siblings
            token_BF = tokens[-1].gather(1, chosen_BF)
            path_BFD = torch.cat([_take(path_BFD, parent_BF), token_BF[:, :, None]], -1)
            feature_BFH = _take(out_BFH, parent_BF)
            own_BFF = torch.eye(expanded, dtype=torch.bool, device=device).expand(rows, expanded, expanded)
            seen_BFS = torch.cat([_take(seen_BFS, parent_BF), own_BFF], -1)
            out_BFH = expand(feature_BFH, token_BF, level, seen_BFS)
        token_BFK, q_BFV = sampler(logits_of(out_BFH), path_BFD, children)
        q_rows[-1] = q_rows[-1].scatter(
            1, chosen_BF, torch.arange(made, made + expanded, device=device).expand(rows, -1)
        )
        log_q_BFK = q_BFV.gather(2, token_BFK).clamp_min(1e-30).log()
        above_BF1 = scores[-1].gather(1, chosen_BF)[:, :, None]
        tokens.append(token_BFK.flatten(1))
        scores.append((above_BF1 + log_q_BFK).flatten(1))
        parents.append((first + chosen_BF).repeat_interleave(children, dim=1))
        q_rows.append(torch.full_like(tokens[-1], -1))
        distributions.append(q_BFV)
        first += scores[-2].shape[1]
        made += expanded
        siblings = children
    return DraftTree(
        token_BN=torch.cat(tokens, 1),
        parent_BN=torch.cat(parents, 1),
        depth_BN=torch.cat([torch.full_like(t, level) for level, t in enumerate(tokens)], 1),
        score_BN=torch.cat(scores, 1),
        proposal="sampled",
        q_BMV=torch.cat(distributions, 1),
        q_row_BN=torch.cat(q_rows, 1),
    )


def _take(x_BW: Tensor, index_BF: Tensor) -> Tensor:
    """Per row, these entries of dimension 1: [B, W, ..] -> [B, F, ..]."""
    return x_BW[torch.arange(len(index_BF), device=index_BF.device)[:, None], index_BF]


def _best_children(logits_BWV: Tensor, k: int, draft_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities (fp32) and target ids of the k best tokens per node, [B, W, k] each."""
    shape = (*logits_BWV.shape[:2], k)
    logits = logits_BWV.flatten(0, 1).float()
    value, index = top_k_of(logits, k)
    # exp below -87 is denormal, where a CPU is some 50x slower; at -80 a term no longer counts in fp32.
    rest = (logits - value[:, :1]).clamp_min_(-80.0).exp_().sum(-1, keepdim=True).log_()
    token = index if draft_ids is None else draft_ids[index]
    return (value - value[:, :1] - rest).view(shape), token.view(shape)

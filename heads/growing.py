"""Growth of draft trees, shared by all heads: dynamic (EAGLE-2, arXiv 2406.16858, section 4), static, sampled.

Shapes: F expanded nodes of a level (dynamic: W, the width), X whatever a head's outputs are made of, D drafted tokens
on a path, S drafted slots so far, C children of a level.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from heads.base import ChildSampler, TreePolicy
from heads.static import StaticPlan
from heads.topk import top_k_of
from heads.tree import DraftTree, rerank

# (outputs of the parents [B, F, X], tokens drafted from level 1 down to each expanded node [B, F, D], visible drafted
# slots [B, F, S]) -> outputs [B, F, X], or [B, 1, X] where they do not depend on the node. D is the level.
Expand = Callable[[Tensor, Tensor, Tensor], Tensor]


def grow(
    root_B: Tensor,
    root_output_B1X: Tensor,
    policy: TreePolicy,
    expand: Expand,
    logits_of: Callable[[Tensor], Tensor],
    draft_ids: Tensor | None = None,
    sampler: ChildSampler | None = None,
    plan: StaticPlan | None = None,
) -> DraftTree:
    """A tree of the policy's shape, or with a sampler one whose children are drawn.

    A node's score is the sum of the draft's log-probabilities on its path (fp32). The drafted keys of a level are
    written behind those of the levels before; a node sees its own ancestors among them and itself.

    Args:
        root_output_B1X: the head's output at the root.
        logits_of: outputs [.., X] to logits over the draft vocabulary; the target ids of its columns are
            `draft_ids` (None: the columns are the ids).
        plan: `policy.plan`, where this is compiled code, which cannot make it.

    Raises:
        ValueError: the tree is wider than the draft vocabulary.
    """
    if sampler is not None:
        assert policy.static is None, "children of a static tree are not drawn"
        return _grow_sampled(root_B, root_output_B1X, policy, expand, logits_of, sampler)
    if draft_ids is not None and policy.width > len(draft_ids):
        change = "lower --tree-width" if policy.static is None else "give another tree"
        raise ValueError(f"tree width is {policy.width}, the draft vocabulary {len(draft_ids)}: {change}")
    if policy.static is not None:
        plan = plan or policy.plan(root_B.device)
        assert plan is not None
        return _grow_static(root_B, root_output_B1X, plan, expand, logits_of, draft_ids)
    return _grow_dynamic(root_B, root_output_B1X, policy, expand, logits_of, draft_ids)


def _grow_dynamic(
    root_B: Tensor,
    root_output_B1X: Tensor,
    policy: TreePolicy,
    expand: Expand,
    logits_of: Callable[[Tensor], Tensor],
    draft_ids: Tensor | None,
) -> DraftTree:
    """Expands the `width` best nodes of each level, then keeps the `total` best nodes of all levels.

    The score is EAGLE-2's estimate of a node's chance to be accepted. Children are the draft's top `width` tokens
    (deterministic: proposal "top_k").
    """
    rows, device, width = len(root_B), root_output_B1X.device, policy.width
    score_B1W, token_B1W = _best_children(logits_of(root_output_B1X), width, draft_ids)
    frontier_score, frontier_token = score_B1W[:, 0], token_B1W[:, 0]  # [B, W]
    tokens, scores = [root_B[:, None], frontier_token], [frontier_score.new_zeros(rows, 1), frontier_score]
    parents = [root_B.new_full((rows, 1), -1), root_B.new_zeros(rows, width)]
    frontier_index = torch.arange(1, width + 1, device=device).expand(rows, width)  # candidate index of each node
    output_BWX = root_output_B1X.expand(rows, width, -1)
    path_BWD = frontier_token[:, :, None]
    own_BWW = torch.eye(width, dtype=torch.bool, device=device).expand(rows, width, width)
    seen_BWS = own_BWW
    count = width + 1
    for level in range(1, policy.depth):
        out = expand(output_BWX, path_BWD, seen_BWS)
        child_score, child_token = _best_children(logits_of(out), width, draft_ids)  # [B, W or 1, W]
        child_score = (child_score + frontier_score[:, :, None]).flatten(1)
        child_token = child_token.expand(rows, width, width).flatten(1)
        tokens.append(child_token)
        scores.append(child_score)
        parents.append(frontier_index.repeat_interleave(width, dim=1))
        if level + 1 == policy.depth:
            break
        frontier_score, best_BW = child_score.topk(width)
        frontier_token = child_token.gather(1, best_BW)
        frontier_index = count + best_BW
        count += width * width
        parent_BW = best_BW // width
        output_BWX = _take(out, parent_BW)
        path_BWD = torch.cat([_take(path_BWD, parent_BW), frontier_token[:, :, None]], -1)
        seen_BWS = torch.cat([_take(seen_BWS, parent_BW), own_BWW], -1)
    depths = [torch.full_like(tokens[level], level) for level in range(len(tokens))]
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


def _grow_static(
    root_B: Tensor,
    root_output_B1X: Tensor,
    plan: StaticPlan,
    expand: Expand,
    logits_of: Callable[[Tensor], Tensor],
    draft_ids: Tensor | None,
) -> DraftTree:
    """Exactly the plan's nodes, each with the token of its rank: level by level, only what has children is expanded."""
    rows = len(root_B)
    tokens, scores = [root_B[:, None]], [torch.zeros(rows, 1, device=root_B.device)]
    path_BFD = root_B.new_zeros(rows, 1, 0)
    out = root_output_B1X
    for depth, level in enumerate(plan.levels):
        expanded = len(level.token_F)
        if depth:
            token_BF1 = tokens[-1].index_select(1, level.token_F)[:, :, None]
            path_BFD = torch.cat([path_BFD.index_select(1, level.parent_F), token_BF1], -1)
            one = out.shape[1] == 1
            output_BFX = out.expand(rows, expanded, -1) if one else out.index_select(1, level.parent_F)
            out = expand(output_BFX, path_BFD, level.seen_FS.expand(rows, -1, -1))
        score_BFK, token_BFK = _best_children(logits_of(out), level.ranks, draft_ids)  # or [B, 1, K]
        above_BF1 = scores[-1].index_select(1, level.token_F)[:, :, None]
        scores.append((above_BF1 + score_BFK).flatten(1).index_select(1, level.child_C))
        tokens.append(token_BFK.expand(rows, expanded, -1).flatten(1).index_select(1, level.child_C))
    return DraftTree(
        token_BN=torch.cat(tokens, 1).index_select(1, plan.order_N),
        parent_BN=plan.parent_N.repeat(rows, 1),
        depth_BN=plan.depth_N.repeat(rows, 1),
        score_BN=torch.cat(scores, 1).index_select(1, plan.order_N),
    )


def _grow_sampled(
    root_B: Tensor,
    root_output_B1X: Tensor,
    policy: TreePolicy,
    expand: Expand,
    logits_of: Callable[[Tensor], Tensor],
    sampler: ChildSampler,
) -> DraftTree:
    """A tree whose children are drawn from the draft without replacement; all that is drawn is kept.

    Each level expands its likeliest nodes (`sampled_levels`); nodes lie level by level, siblings in the order drawn.
    The distributions drawn from go with the tree, as verification needs them.
    """
    rows, device = len(root_B), root_output_B1X.device
    tokens, parents = [root_B[:, None]], [root_B.new_full((rows, 1), -1)]
    scores = [torch.zeros(rows, 1, device=device)]
    q_rows = [root_B.new_full((rows, 1), -1)]
    distributions: list[Tensor] = []
    chosen_BF = root_B.new_zeros(rows, 1)  # nodes to expand, as indices into the level before
    first = 0  # index of that level's first node
    path_BFD = root_B.new_zeros(rows, 1, 0)
    out_BFX = root_output_B1X
    seen_BFS = torch.zeros(rows, 1, 0, dtype=torch.bool, device=device)
    made = 0  # distributions so far
    siblings = 1  # children per expanded node of the level before
    for level, (expanded, children) in enumerate(sampled_levels(policy)):
        if level:
            chosen_BF = scores[-1].topk(expanded).indices
            parent_BF = chosen_BF // siblings
            token_BF = tokens[-1].gather(1, chosen_BF)
            path_BFD = torch.cat([_take(path_BFD, parent_BF), token_BF[:, :, None]], -1)
            own_BFF = torch.eye(expanded, dtype=torch.bool, device=device).expand(rows, expanded, expanded)
            seen_BFS = torch.cat([_take(seen_BFS, parent_BF), own_BFF], -1)
            out_BFX = expand(_take(out_BFX, parent_BF), path_BFD, seen_BFS)
        logits_BFV = logits_of(out_BFX).expand(rows, expanded, -1)
        token_BFK, q_BFV = sampler(logits_BFV, path_BFD, children)
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
    """Per row, these entries of dimension 1: [B, W, ..] -> [B, F, ..]; of one entry, all F are that one."""
    if x_BW.shape[1] == 1:
        return x_BW.expand(-1, index_BF.shape[1], *[-1] * (x_BW.dim() - 2))
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

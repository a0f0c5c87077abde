"""Growth of a dynamic draft tree, shared by the hidden-state drafters (EAGLE-2, arXiv 2406.16858, section 4)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heads.base import TreePolicy
from heads.topk import top_k_of
from heads.tree import DraftTree, rerank

# (features of the parents [1, W, H], tokens [1, W], level, visible drafted slots [W, slots]) -> outputs [1, W, H]
Expand = Callable[[Tensor, Tensor, int, Tensor], Tensor]


def grow_tree(
    root_token: int,
    root_output_11H: Tensor,
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
    device = root_output_11H.device
    width = policy.width
    score, token = _best_children(logits_of(root_output_11H)[0], width, draft_ids)  # [1, W]
    tokens, scores = [torch.tensor([root_token], device=device), token[0]], [score.new_zeros(1), score[0]]
    parents = [torch.tensor([-1], device=device), torch.zeros(width, dtype=torch.long, device=device)]
    frontier_index = torch.arange(1, width + 1, device=device)  # candidate index of each frontier node
    frontier_score, frontier_token = score[0], token[0]
    feature_1WH = root_output_11H.expand(1, width, -1)
    seen_WS = torch.eye(width, dtype=torch.bool, device=device)
    count = width + 1
    for level in range(1, policy.depth):
        out_1WH = expand(feature_1WH, frontier_token[None], level, seen_WS)
        child_score, child_token = _best_children(logits_of(out_1WH)[0], width, draft_ids)  # [W, W]
        child_score = child_score + frontier_score[:, None]
        tokens.append(child_token.flatten())
        scores.append(child_score.flatten())
        parents.append(frontier_index.repeat_interleave(width))
        frontier_score, best = child_score.flatten().topk(width)
        frontier_token = child_token.flatten()[best]
        frontier_index = count + best
        count += width * width
        parent_row = best // width
        feature_1WH = out_1WH[:, parent_row]
        seen_WS = torch.cat([seen_WS[parent_row], torch.eye(width, dtype=torch.bool, device=device)], -1)
    depth = [torch.zeros(1, dtype=torch.long, device=device)]
    depth += [torch.full_like(t, level) for level, t in enumerate(tokens[1:], 1)]
    return rerank(
        torch.cat(tokens)[None],
        torch.cat(parents)[None],
        torch.cat(depth)[None],
        torch.cat(scores)[None],
        policy.total,
        check=False,
    )


def _best_children(logits_WV: Tensor, k: int, draft_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities (fp32) and target ids of the k best tokens per row, [W, k] each."""
    logits = logits_WV.float()
    value, index = top_k_of(logits, k)
    # exp below -87 is denormal, where a CPU is some 50x slower; at -80 a term no longer counts in fp32.
    rest = (logits - value[:, :1]).clamp_min_(-80.0).exp_().sum(-1, keepdim=True).log_()
    return value - value[:, :1] - rest, index if draft_ids is None else draft_ids[index]

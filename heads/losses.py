"""Per-position losses, summed over supervised positions. Means are taken once, by whoever knows the global count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.topk import argmax_of

_CHUNK_ROWS = 256  # supervised positions whose logits exist at the same time


def feature_loss_sum(feature_RH: Tensor, teacher_RH: Tensor) -> Tensor:
    """Smooth L1 (beta 1) between drafted and true features, mean over H, summed over R positions.

    EAGLE (arXiv 2401.15077, section 3.2): L_reg = SmoothL1(f_{i+1}, Draft(...)).
    """
    return F.smooth_l1_loss(_wide(feature_RH), _wide(teacher_RH), reduction="none").mean(-1).sum()


def soft_ce_sum(
    feature_RH: Tensor,
    teacher_RH: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    draft_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Soft cross-entropy of the draft's token distribution against the target's, summed over R positions (nats).

    EAGLE (arXiv 2401.15077, section 3.2): L_cls = CE(softmax(LMHead(f)), softmax(LMHead(f_draft))), that is
    -sum_v p_v log q_v. `logits_of` maps features [r, H] to logits [r, V] and has no trainable parameters: the
    gradient with respect to the features is made in the forward pass, chunk by chunk, so logits of more than
    a few hundred positions never exist together.

    Returns:
        (loss sum, match_R bool): match is whether the draft's best token (of `draft_ids`, if given) is the target's.
    """
    loss, match = _SoftCE.apply(feature_RH, teacher_RH, logits_of, draft_ids)
    return loss, match


def _wide(x: Tensor) -> Tensor:
    """fp32, or fp64 where the input has it."""
    return x if x.dtype == torch.float64 else x.float()


class _SoftCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        feature_RH: Tensor,
        teacher_RH: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        draft_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        needs_grad = feature_RH.requires_grad
        total = _wide(feature_RH.new_zeros(()))
        grads, matches = [], []
        for feature, teacher in zip(feature_RH.split(_CHUNK_ROWS), teacher_RH.split(_CHUNK_ROWS), strict=True):
            with torch.no_grad():
                p_logits = logits_of(teacher)
                best = argmax_of(p_logits)
                p = torch.softmax(_wide(p_logits), -1)
            with torch.enable_grad():
                leaf = feature.detach().requires_grad_(needs_grad)
                q_logits = logits_of(leaf)
            with torch.no_grad():
                q = q_logits.detach()
                match = q.gather(1, best[:, None])[:, 0] >= (q if draft_ids is None else q[:, draft_ids]).amax(-1)
                matches.append(match if draft_ids is None else match & torch.isin(best, draft_ids))
                log_q = torch.log_softmax(_wide(q), -1)
                total = total - (p * log_q).sum()
                if needs_grad:
                    slope = log_q.exp_().sub_(p).to(q_logits.dtype)  # d loss / d logits, since p sums to 1
                    grads.append(torch.autograd.grad(q_logits, leaf, slope)[0])
        ctx.save_for_backward(torch.cat(grads) if grads else None)
        match = torch.cat(matches) if matches else torch.zeros(0, dtype=torch.bool, device=feature_RH.device)
        ctx.mark_non_differentiable(match)
        return total, match

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return (None if grad is None else grad * slopes[0].to(grad.dtype)), None, None, None

"""Per-position losses, summed over supervised positions. Means are taken once, by whoever knows the global count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.topk import argmax_of

_CHUNK_ELEMENTS = 1 << 23  # logits that exist at the same time: rows times vocabulary
_MEASURE_ROWS = 256


def feature_loss_sum(feature_RH: Tensor, teacher_RH: Tensor) -> Tensor:
    """Smooth L1 (beta 1) between drafted and true features, mean over H, summed over R positions.

    EAGLE (arXiv 2401.15077, section 3.2): L_reg = SmoothL1(f_{i+1}, Draft(...)).
    """
    return F.smooth_l1_loss(_wide(feature_RH), _wide(teacher_RH), reduction="none").mean(-1).sum()


def soft_ce_sum(feature_RH: Tensor, teacher_RH: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Soft cross-entropy of the draft's token distribution against the target's, summed over R positions (nats).

    EAGLE (arXiv 2401.15077, section 3.2): L_cls = CE(softmax(LMHead(f)), softmax(LMHead(f_draft))), that is
    -sum_v p_v log q_v. `logits_of` maps features [r, H] to logits [r, V] and has no trainable parameters: the
    gradient with respect to the features is made in the forward pass, chunk by chunk, so logits of the whole batch
    never exist together. With a reduced draft vocabulary V is that one, and p is normalised over it, as in EAGLE-3.
    """
    return _SoftCE.apply(feature_RH, teacher_RH, logits_of)


def best_token(feature_RH: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Index of the largest logit per position, [R], without keeping the logits."""
    best = [argmax_of(logits_of(chunk)) for chunk in feature_RH.split(_MEASURE_ROWS)]
    return torch.cat(best) if best else torch.zeros(0, dtype=torch.long, device=feature_RH.device)


def _wide(x: Tensor) -> Tensor:
    """fp32, or fp64 where the input has it."""
    return x if x.dtype == torch.float64 else x.float()


def _chunks(x_RH: Tensor, rows: int) -> list[Tensor]:
    """Chunks of exactly `rows` rows; the rest is padded with zeros to a multiple of a quarter of that.

    A CPU's matrix kernels are built anew for every new shape, and the number of supervised positions never repeats.
    """
    out = list(x_RH.split(rows)) if len(x_RH) else []
    if out and len(out[-1]) < rows:
        unit = max(1, rows // 4)
        out[-1] = F.pad(out[-1], (0, 0, 0, -len(out[-1]) % unit))
    return out


class _SoftCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, feature_RH: Tensor, teacher_RH: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
        needs_grad = feature_RH.requires_grad
        total = _wide(feature_RH.new_zeros(()))
        grads = []
        left = len(feature_RH)
        vocab = logits_of(teacher_RH[:1]).shape[-1] if left else 1
        rows = max(4, _CHUNK_ELEMENTS // vocab)
        for feature, teacher in zip(_chunks(feature_RH, rows), _chunks(teacher_RH, rows), strict=True):
            real = min(left, len(feature))  # the rest of the chunk is padding
            left -= real
            with torch.no_grad():
                p = torch.softmax(_wide(logits_of(teacher)), -1)
            with torch.enable_grad():
                leaf = feature.detach().requires_grad_(needs_grad)
                q_logits = logits_of(leaf)
            with torch.no_grad():
                log_q = torch.log_softmax(_wide(q_logits.detach()), -1)
                total = total - torch.dot(p[:real].flatten(), log_q[:real].flatten())
                if needs_grad:
                    slope = log_q.exp_().sub_(p).to(q_logits.dtype)  # d loss / d logits, since p sums to 1
                    grads.append(torch.autograd.grad(q_logits, leaf, slope)[0][:real])
        ctx.save_for_backward(torch.cat(grads) if grads else None)
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, None, None]:
        (grad,) = ctx.saved_tensors
        return (None if grad is None else grad * slopes[0].to(grad.dtype)), None, None

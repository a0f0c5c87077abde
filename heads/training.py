"""The training loss that all heads share: distillation of every draft step against one teacher per position."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from heads.aligned import Aligned
from heads.base import DraftHead, HeadBatch, HeadOutput, LossSpec, StepCounts
from heads.losses import Teacher, best_token, distil, feature_loss_sum


def distilled(
    head: DraftHead,
    batch: HeadBatch,
    rows: Aligned,
    outputs: Sequence[Tensor],
    loss: LossSpec,
    measure: bool = False,
) -> HeadOutput:
    """Loss of the outputs [R, H] of every step, at the batch's aligned rows.

    L = sum_k decay^k sum_r w_kr (token_weight D(p_r, q_kr) + feature_weight SmoothL1(output_kr, f_r)), with the
    divergence D between the target's and the draft's distribution over the draft vocabulary.
    """
    teacher = Teacher(rows.teacher_RH, head.draft_logits, head.draft_index(rows.label_R), loss.hard_weight)
    decay_K = rows.weight_KR.new_tensor([loss.step_decay**k for k in range(batch.steps)])
    token = distil(
        [head.normed(output) for output in outputs],
        rows.weight_KR,
        teacher,
        head.projections(batch.steps),
        decay_K,
        loss.divergence,
        loss.compiled,
    )
    total = loss.token_weight * token.total
    counts = StepCounts(batch.weight_KBT)
    best_R = best_token(rows.teacher_RH, head.target.logits) if measure else None
    for k, output_RH in enumerate(outputs):
        if not loss.feature_weight and best_R is None:
            break
        seen_R = rows.weight_KR[k] > 0
        feature_sum = feature_loss_sum(output_RH[seen_R], rows.teacher_RH[seen_R])
        total = total + loss.feature_weight * loss.step_decay**k * feature_sum
        if best_R is not None:
            match = head.best_draft(output_RH[seen_R], k) == best_R[seen_R]
            counts.add(k, match, feature_sum.detach(), token.sums_K[k])
    return HeadOutput(total, batch.weight_KBT[0].sum(), counts.finish() if measure else {})

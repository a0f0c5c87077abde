"""The training step of both EAGLE kinds written down plainly: the oracle of the fast one, and its "before".

Nothing is left out and nothing is shared: every position goes through the layer at every step, the keys of all steps so
far lie behind one another under one boolean mask, the scores are a matrix, and the logits of draft and teacher exist
for the whole batch at once, at every step. Memory therefore grows with the square of the length, and with V.

It uses the head's modules (their weights and wiring) and none of `heads.unrolled`, `heads.aligned`, `heads.losses`.

Shapes as in `heads.base`; S = (k + 1) T keys at step k, Vd the draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.base import HeadBatch, LossSpec
from heads.drafter import HiddenStateDrafter


def dense_loss(head: HiddenStateDrafter, batch: HeadBatch, loss: LossSpec) -> Tensor:
    """What `head(batch, loss).loss_sum` is: the summed loss (nats, and feature units) of all steps, a scalar.

    Raises:
        ValueError: a divergence other than soft_ce.
    """
    if loss.divergence != "soft_ce":
        raise ValueError(f"loss.divergence is {loss.divergence!r}, but the dense step knows soft_ce only")
    feature = batch.feature_BTH if batch.noise_BTH is None else batch.feature_BTH + batch.noise_BTH
    hidden = head.read(feature)
    position_BT, document_BT = _places(batch)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    for k in range(batch.steps):
        x, residual = head.join(batch.token_KBT[k], hidden)
        q, key, value = head.layer.qkv(x, head.rope(x, position_BT + k))
        keys.append(key)
        values.append(value)
        attended = _attend(q, torch.cat(keys, 2), torch.cat(values, 2), _visible(document_BT, k))
        output = head.layer.finish(residual, attended)
        total = total + loss.step_decay**k * _step_loss(head, batch, loss, k, output)
        hidden = head.hand_on(output)
        hidden = hidden.detach() if head.detaches else hidden
    return total


def _places(batch: HeadBatch) -> tuple[Tensor, Tensor]:
    """Of every position [B, T]: its position in its document, and the document's number (-1: in none)."""
    position_BT = torch.zeros_like(batch.valid_BT, dtype=torch.long)
    document_BT = torch.full_like(position_BT, -1)
    for number, (row, start, end) in enumerate(batch.documents):
        position_BT[row, start:end] = torch.arange(end - start, device=position_BT.device)
        document_BT[row, start:end] = number
    return position_BT, document_BT


def _visible(document_BT: Tensor, step: int) -> Tensor:
    """[B, 1, T, S] bool: the earlier positions of the own document at step 0, and of later steps the root itself."""
    rows, length = document_BT.shape
    same_BTT = (document_BT[:, :, None] == document_BT[:, None, :]) & (document_BT >= 0)[:, :, None]
    first_BTT = same_BTT & torch.ones(length, length, dtype=torch.bool, device=document_BT.device).tril()
    own_BTT = torch.eye(length, dtype=torch.bool, device=document_BT.device).expand(rows, -1, -1)
    return torch.cat([first_BTT, *[own_BTT] * step], -1)[:, None]


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """softmax(q k' / sqrt(hd)) v; q [B, heads, T, hd], k and v [B, kv_heads, S, hd], every key repeated per group."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    score = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    score = score.masked_fill(~visible, torch.finfo(score.dtype).min)  # not -inf: a row outside all documents sees none
    return torch.softmax(score, -1).to(v.dtype) @ v


def _step_loss(head: HiddenStateDrafter, batch: HeadBatch, loss: LossSpec, step: int, output_BTH: Tensor) -> Tensor:
    """token_weight * CE(p', q) + feature_weight * SmoothL1, of every position, then summed over the supervised ones."""
    weight_BT, teacher_BTH = batch.weight_KBT[step], batch.teacher[step]
    with torch.no_grad():
        p_BTV = torch.softmax(_wide(head.draft_logits(teacher_BTH)), -1)
        if loss.hard_weight:
            label_BT = head.draft_index(batch.token_KBT[step + 1])
            hard_BTV = F.one_hot(label_BT.clamp_min(0), p_BTV.shape[-1]).to(p_BTV.dtype)
            mixed_BTV = (1 - loss.hard_weight) * p_BTV + loss.hard_weight * hard_BTV
            p_BTV = torch.where((label_BT >= 0)[..., None], mixed_BTV, p_BTV)
    projection = head.projection(step)
    logits_BTV = projection.logits_of(head.normed(output_BTH), *projection.parameters)
    token_BT = -(p_BTV * F.log_softmax(_wide(logits_BTV), -1)).sum(-1)
    feature_BT = F.smooth_l1_loss(_wide(output_BTH), _wide(teacher_BTH), reduction="none").mean(-1)
    return (loss.token_weight * token_BT + loss.feature_weight * feature_BT)[weight_BT].sum()


def _wide(x: Tensor) -> Tensor:
    """fp32, or fp64 where the input has it."""
    return x if x.dtype == torch.float64 else x.float()

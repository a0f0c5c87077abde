"""Per-position losses, summed over supervised positions. Means are taken once, by whoever knows the global count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.topk import argmax_of

LogitsOf = Callable[[Tensor], Tensor]  # features [r, H] to logits [r, V]

# Logits that exist at the same time: rows times vocabulary. In fp32 they stay in a CPU's caches, and in memory that the
# allocator keeps: four times as many cost 2 to 4 times as much each.
_CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 25}
_MEASURE_ROWS = 256


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """How many rows of logits exist at the same time."""
    return max(4, _CHUNK_ELEMENTS.get(device.type, 1 << 23) // vocab_size)


def feature_loss_sum(feature_RH: Tensor, teacher_RH: Tensor) -> Tensor:
    """Smooth L1 (beta 1) between drafted and true features, mean over H, summed over R positions.

    EAGLE (arXiv 2401.15077, section 3.2): L_reg = SmoothL1(f_{i+1}, Draft(...)).
    """
    return F.smooth_l1_loss(_wide(feature_RH), _wide(teacher_RH), reduction="none").mean(-1).sum()


def soft_ce_sum(feature_RH: Tensor, teacher_RH: Tensor, logits_of: LogitsOf) -> Tensor:
    """Soft cross-entropy of the draft's token distribution against the target's, summed over R positions (nats).

    EAGLE (arXiv 2401.15077, section 3.2): L_cls = CE(softmax(LMHead(f)), softmax(LMHead(f_draft))), that is
    -sum_v p_v log q_v; both through the same frozen LM head. See `distil_sums`.
    """
    weight_1R = _wide(feature_RH.detach()).new_ones(1, len(feature_RH))
    return distil_sums([feature_RH], weight_1R, Teacher(teacher_RH, logits_of), [Projection(logits_of)])[0]


@dataclass(frozen=True)
class Teacher:
    """What drafts are checked against at R positions.

    feature_RH: the target's features. logits_of: to logits over the draft vocabulary. label_R: index in it of the token
    that the text has there (-1: it is not in it), with a share of `hard_weight` in the distribution to be learnt:

        p' = (1 - hard_weight) p + hard_weight onehot(label)
    """

    feature_RH: Tensor
    logits_of: LogitsOf
    label_R: Tensor | None = None
    hard_weight: float = 0.0


@dataclass(frozen=True)
class Projection:
    """From a draft head's features to its logits; `parameters` are those inside that are trained."""

    logits_of: LogitsOf
    parameters: tuple[Tensor, ...] = ()


def distil_sums(
    features: Sequence[Tensor], weight_KR: Tensor, teacher: Teacher, projections: Sequence[Projection]
) -> Tensor:
    """Cross-entropy of K heads against the same R teacher positions, summed with weights over R: [K] nats.

        L_k = sum_r weight_kr (-sum_v p'_rv log q_krv)

    Args:
        features: of head k, [R, H], at the row of the position that it drafts.
        weight_KR: 0 where head k drafts nothing there.

    The teacher's distribution is made once for all heads. Gradients are made in the forward pass, chunk by chunk and
    head by head, so logits of the whole batch, or of all heads, never exist together. With a reduced draft vocabulary
    V is that one, and p is normalised over it, as in EAGLE-3.
    """
    tensors = [*features, *(parameter for projection in projections for parameter in projection.parameters)]
    return _Distil.apply(torch.is_grad_enabled(), weight_KR, teacher, tuple(projections), *tensors)


def best_token(feature_RH: Tensor, logits_of: LogitsOf) -> Tensor:
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


class _Distil(torch.autograd.Function):
    """`tensors`: K features, then all parameters of the K projections in order."""

    @staticmethod
    def forward(
        ctx: Any,
        learns: bool,
        weight_KR: Tensor,
        teacher: Teacher,
        projections: tuple[Projection, ...],
        *tensors: Tensor,
    ) -> Tensor:
        heads, left = weight_KR.shape
        sums_K = weight_KR.new_zeros(heads)
        wanted = [learns and t.requires_grad for t in tensors]
        pieces: list[list[Tensor]] = [[] for _ in range(heads)]  # of the features' gradients
        sums = {i: torch.zeros_like(tensors[i], dtype=_wide(tensors[i]).dtype) for i in range(heads, len(tensors))}
        ends = [heads + sum(len(p.parameters) for p in projections[: k + 1]) for k in range(heads)]
        vocab = teacher.logits_of(teacher.feature_RH[:1]).shape[-1] if left else 1
        rows = chunk_rows(vocab, weight_KR.device)
        chunks = [_chunks(x, rows) for x in (teacher.feature_RH, *tensors[:heads])]
        for at, (teacher_rH, *features) in enumerate(zip(*chunks, strict=True)):
            real = slice(at * rows, min(left, at * rows + len(teacher_rH)))  # the rest of the chunk is padding
            p_rV = _teacher_chunk(teacher, teacher_rH, real)
            for k, projection in enumerate(projections):
                weight_r = F.pad(weight_KR[k, real], (0, len(teacher_rH) - (real.stop - real.start)))
                leaf = features[k].detach().requires_grad_(wanted[k])
                with torch.enable_grad():
                    logits_rV = projection.logits_of(leaf)
                log_q_rV = torch.log_softmax(_wide(logits_rV.detach()), -1)
                sums_K[k] -= (weight_r * (p_rV * log_q_rV).sum(-1)).sum()
                first = ends[k] - len(projection.parameters)
                inputs = {k: leaf} | {first + i: t for i, t in enumerate(projection.parameters)}
                inputs = {i: t for i, t in inputs.items() if wanted[i]}
                if not inputs:
                    continue
                slope_rV = log_q_rV.exp_().sub_(p_rV).mul_(weight_r[:, None])  # since p sums to 1
                grads = torch.autograd.grad(logits_rV, list(inputs.values()), slope_rV.to(logits_rV.dtype))
                for i, grad in zip(inputs, grads, strict=True):
                    if i == k:
                        pieces[k].append(grad[: real.stop - real.start])
                    else:
                        sums[i] += grad
        ctx.head_of = [*range(heads), *(k for k, p in enumerate(projections) for _ in p.parameters)]
        ctx.save_for_backward(*(torch.cat(found) if found else None for found in pieces), *sums.values())
        return sums_K

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        grads = (
            None if grad is None else grad * slopes[0][k].to(grad.dtype)
            for k, grad in zip(ctx.head_of, ctx.saved_tensors, strict=True)
        )
        return None, None, None, None, *grads


def _teacher_chunk(teacher: Teacher, feature_rH: Tensor, real: slice) -> Tensor:
    """The distribution to be learnt, [r, V]; rows of padding hold anything."""
    p_rV = torch.softmax(_wide(teacher.logits_of(feature_rH)), -1)
    if teacher.hard_weight and teacher.label_R is not None:
        label_r = teacher.label_R[real]
        known_r = (label_r >= 0).nonzero()[:, 0]
        p_rV[known_r] *= 1 - teacher.hard_weight
        p_rV[known_r, label_r[known_r]] += teacher.hard_weight
    return p_rV

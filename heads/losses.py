"""Per-position losses, summed over supervised positions. Means are taken once, by whoever knows the global count."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from heads.divergences import DIVERGENCES
from heads.topk import argmax_of

LogitsOf = Callable[[Tensor], Tensor]  # features [r, H] to logits [r, V]

# Logits that exist at the same time: rows times vocabulary. In fp32 they stay in a CPU's caches, and in memory that the
# allocator keeps: four times as many cost 2 to 4 times as much each.
_CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 25}
_BLOCK_ELEMENTS = 1 << 16  # per thread: a block's few fp32 tensors fit a core's own cache together
_SUM_ROWS = 256
_MEASURE_ROWS = 256


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """How many rows of logits exist at the same time: a multiple of 4."""
    return max(4, _CHUNK_ELEMENTS.get(device.type, 1 << 23) // vocab_size // 4 * 4)


def _block_rows(vocab_size: int, device: torch.device) -> int:
    """How many rows of a chunk go through the elementwise part of the loss together."""
    if device.type != "cpu":
        return chunk_rows(vocab_size, device)
    return max(1, _BLOCK_ELEMENTS * torch.get_num_threads() // vocab_size)


def feature_loss_sum(feature_RH: Tensor, teacher_RH: Tensor) -> Tensor:
    """Smooth L1 (beta 1) between drafted and true features, mean over H, summed over R positions.

    EAGLE (arXiv 2401.15077, section 3.2): L_reg = SmoothL1(f_{i+1}, Draft(...)).
    """
    return F.smooth_l1_loss(_wide(feature_RH), _wide(teacher_RH), reduction="none").mean(-1).sum()


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
    """From a draft head's outputs to its logits: `logits_of(x, *parameters)`; the parameters are trained, too."""

    logits_of: Callable[..., Tensor]
    parameters: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        return self.logits_of(x, *self.parameters)


@dataclass(frozen=True)
class Distilled:
    """total: sum_k factor_k sum_r w_kr D(p'_r, q_kr), differentiable. sums_K: the inner sums, for metrics."""

    total: Tensor
    sums_K: Tensor


def distil(
    features: Sequence[Tensor],
    weight_KR: Tensor,
    teacher: Teacher,
    projections: Sequence[Projection],
    factor_K: Tensor | None = None,
    divergence: str = "soft_ce",
    compiled: bool = False,
) -> Distilled:
    """Divergence D (`heads.divergences`) between K draft steps and the teacher at the same R positions.

    Args:
        features: of step k, [R, H], at the row of the position that it drafts.
        weight_KR: 0 where step k drafts nothing there.
        projections: one object several times where steps share it: their rows then go through it together.
        factor_K: weights of the K sums in the total; None: 1.
        compiled: compile what is done to each logit, which saves most passes over them. Raises ValueError without a
            C++ compiler.

    The teacher's distribution is made once for all steps. Gradients are made in the forward pass, chunk by chunk, so
    logits of the whole batch never exist; they are right for `total` alone. With a reduced draft vocabulary V is that
    one, and p is normalised over it, as in EAGLE-3.
    """
    factor_K = weight_KR.new_ones(len(features)) if factor_K is None else factor_K.to(weight_KR.dtype)
    core = _compiled_core(divergence) if compiled else _core(divergence)
    distinct = list({id(t): t for projection in projections for t in projection.parameters}.values())
    request = _Request(torch.is_grad_enabled(), teacher, tuple(projections), core, compiled, distinct)
    total, sums_K = _Distil.apply(request, weight_KR, factor_K, *features, *distinct)
    return Distilled(total, sums_K)


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


# (p [r, V], logits [r, V], weight [r], where to put the slope [r, V]: None if nowhere) -> losses [r]
_Core = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class _Request:
    learns: bool
    teacher: Teacher
    projections: tuple[Projection, ...]
    core: _Core
    compiled: bool
    parameters: list[Tensor]  # each once

    def groups(self) -> list[range]:
        """Consecutive steps with one projection."""
        found: list[range] = []
        for k, projection in enumerate(self.projections):
            if found and projection is self.projections[found[-1].start]:
                found[-1] = range(found[-1].start, k + 1)
            else:
                found.append(range(k, k + 1))
        return found


def _core(divergence: str) -> _Core:
    """Losses of the rows; the slope, times the weights, comes in the dtype of its place."""
    function = DIVERGENCES[divergence]

    def core(p_rV: Tensor, logits_rV: Tensor, weight_r: Tensor, out_rV: Tensor | None) -> Tensor:
        loss_r, slope_rV = function(p_rV, torch.log_softmax(_wide(logits_rV), -1))
        if out_rV is not None:
            out_rV.copy_(slope_rV.mul_(weight_r[:, None]))
        return loss_r

    return core


@functools.cache
def _compiled_core(divergence: str) -> _Core:
    core = torch.compile(_core(divergence), dynamic=False)

    def explained(p_rV: Tensor, logits_rV: Tensor, weight_r: Tensor, out_rV: Tensor | None) -> Tensor:
        try:
            return core(p_rV, logits_rV, weight_r, out_rV)
        except TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"train.compile is true, but compiling the loss failed: {reason}; set it to false"
            ) from error

    return explained


def _by_block(
    core: _Core, block: int, p_rV: Tensor, logits_NV: Tensor, weight_N: Tensor, out_NV: Tensor | None
) -> Tensor:
    """`core` of N rows of logits, which are the same r positions several times over: losses [N]."""
    losses = []
    for start in range(0, len(logits_NV), len(p_rV)):
        for first in range(0, len(p_rV), block):
            end = min(len(p_rV), first + block)
            rows = slice(start + first, start + end)
            out_bV = None if out_NV is None else out_NV[rows]
            losses.append(core(p_rV[first:end], logits_NV[rows], weight_N[rows], out_bV))
    return torch.cat(losses)


class _Distil(torch.autograd.Function):
    """`tensors`: K features, then the parameters of the projections, each once."""

    @staticmethod
    def forward(
        ctx: Any, request: _Request, weight_KR: Tensor, factor_K: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        steps, left = weight_KR.shape
        teacher, sums_K = request.teacher, weight_KR.new_zeros(steps)
        learns = [request.learns and t.requires_grad for t in tensors]
        grads = [torch.zeros_like(t) if wanted else None for t, wanted in zip(tensors, learns, strict=True)]
        parameters = _Parameters(tensors[steps:], grads[steps:], weight_KR.device)
        vocab = teacher.logits_of(teacher.feature_RH[:1]).shape[-1] if left else 1
        rows = chunk_rows(vocab, weight_KR.device)
        block = rows // 4 if request.compiled else _block_rows(vocab, weight_KR.device)
        chunks = [_chunks(x, rows) for x in (teacher.feature_RH, *tensors[:steps])]
        for at, (teacher_rH, *features) in enumerate(zip(*chunks, strict=True)):
            real = slice(at * rows, min(left, at * rows + len(teacher_rH)))  # the rest of the chunk is padding
            count = real.stop - real.start
            weight_Kr = F.pad(weight_KR[:, real], (0, len(teacher_rH) - count))
            p_rV = _teacher_chunk(teacher, teacher_rH, real)
            for group in request.groups():
                projection, some = request.projections[group.start], [features[k].detach() for k in group]
                leaf = torch.cat(some).requires_grad_(any(learns[k] for k in group))
                inner = parameters.of(projection)
                inputs = [t for t in (leaf, *inner) if t.requires_grad]
                with torch.set_grad_enabled(bool(inputs)):
                    logits = projection.logits_of(leaf, *inner)
                slope = torch.empty_like(logits, requires_grad=False) if inputs else None
                weight_Gr = weight_Kr[group.start : group.stop]
                scale_N = (weight_Gr * factor_K[group.start : group.stop, None]).flatten()
                loss_N = _by_block(request.core, block, p_rV, logits.detach(), scale_N, slope)
                sums_K[group.start : group.stop] += (weight_Gr * loss_N.view_as(weight_Gr)).sum(-1)
                if slope is not None:
                    found = list(torch.autograd.grad(logits, inputs, slope))
                    if leaf.requires_grad:
                        for k, part in zip(group, found.pop(0).chunk(len(group)), strict=True):
                            if learns[k]:
                                grads[k][real] = part[:count]  # type: ignore[index]
                    parameters.add(projection, found)
                del logits, slope  # before the next ones are made
            del p_rV
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(sums_K)
        return (factor_K * sums_K).sum(), sums_K

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Tensor | None, ...]:
        grads = (None if grad is None else grad * slopes[0].to(grad.dtype) for grad in ctx.saved_tensors)
        return None, None, None, *grads


class _Parameters:
    """The projections' parameters, cast once (autocast would do it for every chunk), and their summed gradients."""

    def __init__(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], device: torch.device) -> None:
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        self._cast: dict[int, Tensor] = {}
        self._grad: dict[int, Tensor | None] = {}
        for tensor, grad in zip(tensors, grads, strict=True):
            self._cast[id(tensor)] = tensor.detach().to(dtype or tensor.dtype).requires_grad_(grad is not None)
            self._grad[id(tensor)] = grad

    def of(self, projection: Projection) -> list[Tensor]:
        return [self._cast[id(tensor)] for tensor in projection.parameters]

    def add(self, projection: Projection, found: Sequence[Tensor]) -> None:
        """found: of those that are trained, in order."""
        sums = [self._grad[id(tensor)] for tensor in projection.parameters]
        for total, grad in zip([s for s in sums if s is not None], found, strict=True):
            parts = (torch.atleast_1d(x).split(_SUM_ROWS) for x in (total, grad))  # adding bf16 copies it to fp32 first
            for part, more in zip(*parts, strict=True):
                part += more


def _teacher_chunk(teacher: Teacher, feature_rH: Tensor, real: slice) -> Tensor:
    """The distribution to be learnt, [r, V]; rows of padding hold anything."""
    p_rV = torch.softmax(_wide(teacher.logits_of(feature_rH)), -1)
    if teacher.hard_weight and teacher.label_R is not None:
        label_r = F.pad(teacher.label_R[real], (0, len(p_rV) - (real.stop - real.start)), value=-1)
        share_r1 = (label_r >= 0).to(p_rV.dtype).mul_(teacher.hard_weight)[:, None]
        p_rV.mul_(1 - share_r1).scatter_add_(1, label_r.clamp_min(0)[:, None], share_r1)
    return p_rV

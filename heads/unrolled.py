"""Attention of unrolled draft steps over packed documents, in memory that grows linearly with their length.

Root p at step s is the s-th draft below position p. When decoding it would see the true keys of its document up to p,
and the s keys drafted on its own path: for every step i <= s, the key that step i made *at the same root*. So it
attends to a causal block (the keys of step 0) and to a diagonal of s further keys: a softmax over both, of which
neither a mask nor the scores ever exist as a matrix.

With o_0 and l_0 the causal block's own output and log-sum-exp, and s_i = q . k_i / sqrt(hd) of the diagonal:

    l = log(exp(l_0) + sum_i exp(s_i));   o = exp(l_0 - l) o_0 + sum_i exp(s_i - l) v_i

Given o and l of the whole, the gradient of either part is that of ordinary attention (as in ring attention, arXiv
2310.01889), so the block's backward kernel is called with them.

Shapes: B rows, T positions, hd head dimension, G query heads per key head, L positions of a document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Document = tuple[int, int, int]  # row, first position, position behind the last one
_BLOCK = 512  # query positions whose scores exist at the same time, where there is no kernel


def attend_unrolled(
    q: Tensor, k0: Tensor, v0: Tensor, chain: Sequence[tuple[Tensor, Tensor]], documents: Sequence[Document]
) -> Tensor:
    """Attention of unroll step s = len(chain); positions outside all documents give 0.

    Args:
        q: [B, heads, T, hd]; k0, v0: [B, kv_heads, T, hd] of step 0; chain: (k_i, v_i) of steps 1..s.

    Returns [B, heads, T, hd].
    """
    return _Unrolled.apply(tuple(documents), q, k0, v0, *(k for k, _ in chain), *(v for _, v in chain))


class _Unrolled(torch.autograd.Function):
    """`rest`: keys of steps 1..s, then their values."""

    @staticmethod
    def forward(ctx: Any, documents: tuple[Document, ...], q: Tensor, k0: Tensor, v0: Tensor, *rest: Tensor) -> Tensor:
        block, _ = _kernels(q)
        out = torch.zeros_like(q)
        # Outside all documents so large that nothing else counts, neither here nor in the gradient.
        log_sum = torch.full(q.shape[:3], 1e30, dtype=_wide(q), device=q.device)
        for row, start, end in documents:
            o, l0 = block(*(_grouped(x[row, :, start:end], k0.shape[1]) for x in (q, k0, v0)))
            out[row, :, start:end] = o.transpose(0, 1).flatten(0, 1)
            log_sum[row, :, start:end] = l0.transpose(0, 1).flatten(0, 1)
        if rest:
            keys, values = rest[: len(rest) // 2], rest[len(rest) // 2 :]
            scores = [_dot(q, k) for k in keys]
            total = torch.logsumexp(torch.stack([log_sum, *scores]), 0)
            mixed = out * (log_sum - total).exp_()[..., None]
            for score, v in zip(scores, values, strict=True):
                mixed += _times((score - total).exp_(), v)
            out, log_sum = mixed.to(q.dtype), total
        ctx.documents = documents
        ctx.save_for_backward(q, k0, v0, out, log_sum, *rest)
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[Any, ...]:
        q, k0, v0, out, log_sum, *rest = ctx.saved_tensors
        slope = slopes[0]
        _, block = _kernels(q)
        kv_heads = k0.shape[1]
        grads = [torch.zeros_like(x) for x in (q, k0, v0)]
        for row, start, end in ctx.documents:
            parts = (_grouped(x[row, :, start:end], kv_heads) for x in (slope, q, k0, v0, out, log_sum))
            dq, dk, dv = block(*parts)
            grads[0][row, :, start:end] = dq.transpose(0, 1).flatten(0, 1)
            grads[1][row, :, start:end] = dk.sum(0)  # over the query heads that share a key
            grads[2][row, :, start:end] = dv.sum(0)
        keys, values = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        d_keys, d_values = [], []
        if keys:
            delta = (slope.to(_wide(q)) * out).sum(-1)
            d_query = grads[0].to(_wide(q))
            for k, v in zip(keys, values, strict=True):
                weight = (_dot(q, k) - log_sum).exp_()
                d_score = weight * (_dot(slope, v, 1.0) - delta) * q.shape[-1] ** -0.5
                d_query += _times(d_score, k)
                d_keys.append(_over_group(d_score, q, kv_heads))
                d_values.append(_over_group(weight, slope, kv_heads))
            grads[0] = d_query.to(q.dtype)
        return None, *grads, *d_keys, *d_values


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """One document's [heads, L, ..] as [G, kv_heads, L, ..], or its [kv_heads, L, ..] as [1, ..]: views, no copies."""
    return x.unflatten(0, (kv_heads, -1)).transpose(0, 1)


def _dot(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """q . k / sqrt(hd) per position, [B, heads, T], of keys [B, kv_heads, T, hd]."""
    qg = q.unflatten(1, (k.shape[1], -1)).to(_wide(q))
    return (qg * k[:, :, None]).sum(-1).flatten(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)


def _times(weight: Tensor, v: Tensor) -> Tensor:
    """weight [B, heads, T] times values [B, kv_heads, T, hd]: [B, heads, T, hd]."""
    return (weight.unflatten(1, (v.shape[1], -1))[..., None] * v[:, :, None]).flatten(1, 2)


def _over_group(weight: Tensor, x: Tensor, kv_heads: int) -> Tensor:
    """weight [B, heads, T] times x [B, heads, T, hd], summed over the heads of a group: [B, kv_heads, T, hd]."""
    return (weight[..., None] * x).unflatten(1, (kv_heads, -1)).sum(2).to(x.dtype)


# ---- the causal block: forward (q, k, v) -> (o, l), backward (do, q, k, v, o, l) -> (dq, dk, dv) ---------------
# q [G, kv_heads, L, hd]; k, v [1, kv_heads, L, hd]; l [G, kv_heads, L].

_Block = Callable[..., tuple[Tensor, ...]]


def _kernels(q: Tensor) -> tuple[_Block, _Block]:
    return (_cpu_forward, _cpu_backward) if q.device.type == "cpu" else (_block_forward, _block_backward)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """torch's own kernel for CPUs, which also gives the log-sum-exp; keys of a group are one memory (stride 0)."""
    groups = len(q)
    k, v = k.expand(groups, -1, -1, -1), v.expand(groups, -1, -1, -1)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)


def _cpu_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, log_sum: Tensor) -> tuple[Tensor, ...]:
    groups = len(q)
    k, v = k.expand(groups, -1, -1, -1), v.expand(groups, -1, -1, -1)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(do, q, k, v, o, log_sum, 0.0, True)


def _block_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    outputs, sums = [], []
    for start in range(0, q.shape[2], _BLOCK):
        score = _scores(q, k, start)
        log_sum = torch.logsumexp(score, -1)
        outputs.append((score - log_sum[..., None]).exp_().to(q.dtype) @ v[:, :, : score.shape[-1]])
        sums.append(log_sum)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def _block_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, log_sum: Tensor) -> tuple[Tensor, ...]:
    dq, scale = [], q.shape[-1] ** -0.5
    dk = torch.zeros(*q.shape, dtype=_wide(q), device=q.device)
    dv = torch.zeros_like(dk)
    for start in range(0, q.shape[2], _BLOCK):
        part = slice(start, start + _BLOCK)
        weight = (_scores(q, k, start) - log_sum[:, :, part, None]).exp_()
        seen = weight.shape[-1]
        slope = do[:, :, part]
        dv[:, :, :seen] += weight.to(q.dtype).transpose(-1, -2) @ slope
        delta = (slope.to(_wide(q)) * o[:, :, part]).sum(-1, keepdim=True)
        d_score = weight.mul_((slope @ v[:, :, :seen].transpose(-1, -2)).sub(delta)).mul_(scale).to(q.dtype)
        dq.append(d_score @ k[:, :, :seen])
        dk[:, :, :seen] += d_score.transpose(-1, -2) @ q[:, :, part]
    return torch.cat(dq, 2), dk.to(q.dtype), dv.to(q.dtype)


def _scores(q: Tensor, k: Tensor, start: int) -> Tensor:
    """Scaled scores of one block of queries with the keys up to it; -inf where a key comes later."""
    queries = q[:, :, start : start + _BLOCK]
    end = start + queries.shape[2]
    score = (queries @ k[:, :, :end].transpose(-1, -2)).to(_wide(q)) * q.shape[-1] ** -0.5
    own = torch.arange(start, end, device=q.device)
    return score.masked_fill_(torch.arange(end, device=q.device) > own[:, None], float("-inf"))

"""Attention of unrolled steps against an explicit mask over all keys, in fp64; memory grows linearly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads import unrolled
from heads.unrolled import Document, attend_unrolled


def dense(q: Tensor, k0: Tensor, v0: Tensor, chain: list[tuple[Tensor, Tensor]], documents: list[Document]) -> Tensor:
    """One softmax over [(s + 1) * T] keys with an explicit boolean mask."""
    rows, heads, length, dim = q.shape
    repeat = heads // k0.shape[1]
    keys = torch.cat([k0, *(k for k, _ in chain)], 2).repeat_interleave(repeat, 1)
    values = torch.cat([v0, *(v for _, v in chain)], 2).repeat_interleave(repeat, 1)
    mask = torch.zeros(rows, length, (1 + len(chain)) * length, dtype=torch.bool)
    for row, start, end in documents:
        for p in range(start, end):
            mask[row, p, start : p + 1] = True
            for step in range(1, len(chain) + 1):
                mask[row, p, step * length + p] = True
    scores = (q @ keys.transpose(-1, -2)) / dim**0.5
    weights = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
    return weights @ values


def inputs(steps: int, rows: int = 2, length: int = 23, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(steps)
    shapes = [(rows, 6, length, 8), *[(rows, 2, length, 8)] * (2 + 2 * steps)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def split(tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    q, k0, v0, *rest = tensors
    return q, k0, v0, list(zip(rest[::2], rest[1::2], strict=True))


PACKED = [(0, 0, 9), (0, 9, 10), (0, 10, 20), (1, 0, 23)]


@pytest.mark.parametrize("kernel", ["cpu", "blocks"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_equals_the_explicit_mask_with_gradients(steps: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "blocks":  # what other devices use, with several blocks per document
        monkeypatch.setattr(unrolled, "_BLOCK", 4)
        monkeypatch.setattr(unrolled, "_kernels", lambda q: (unrolled._block_forward, unrolled._block_backward))
    mine, theirs = inputs(steps), inputs(steps)
    real = torch.zeros(2, 1, 23, 1, dtype=torch.float64)
    for row, start, end in PACKED:
        real[row, :, start:end] = 1  # the oracle's gradient is nan where nothing is seen
    out, expected = attend_unrolled(*split(mine), PACKED), dense(*split(theirs), PACKED)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    assert not out[0, :, 20:].any()
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64) * real
    out.backward(slope)
    theirs[0].register_hook(lambda grad: grad.nan_to_num(0.0))
    expected.backward(slope)
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad.nan_to_num(0.0), rtol=1e-10, atol=1e-10)


def test_documents_packed_in_one_row_are_as_alone() -> None:
    q, k0, v0, chain = split([x.detach() for x in inputs(2)])
    packed = attend_unrolled(q, k0, v0, chain, PACKED)
    for row, start, end in PACKED:
        one = [x[row : row + 1, :, start:end] for x in (q, k0, v0)]
        pairs = [(k[row : row + 1, :, start:end], v[row : row + 1, :, start:end]) for k, v in chain]
        alone = attend_unrolled(one[0], one[1], one[2], pairs, [(0, 0, end - start)])
        torch.testing.assert_close(packed[row : row + 1, :, start:end], alone, rtol=1e-12, atol=1e-12)


def test_half_precision_is_near_the_exact_one() -> None:
    exact = [x.detach().bfloat16().double() for x in inputs(2)]
    half = [x.bfloat16().requires_grad_() for x in exact]
    exact = [x.requires_grad_() for x in exact]
    out = attend_unrolled(*split(half), [(0, 0, 23), (1, 0, 23)])
    expected = attend_unrolled(*split(exact), [(0, 0, 23), (1, 0, 23)])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)  # bf16 keeps 8 bits
    out.sum().backward()
    expected.sum().backward()
    for a, b in zip(half, exact, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=0.05, atol=0.05)

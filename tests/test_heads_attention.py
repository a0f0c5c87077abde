"""Grouped attention against products and a softmax with every key repeated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads.attention import grouped_attention
from heads.tree import additive_mask


def repeated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = scale * q @ k.transpose(2, 3)
    return (scores if mask is None else scores + mask).softmax(-1) @ v


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("count", [1, 2, 16, 64, 65])
@pytest.mark.parametrize(("heads", "keys"), [(6, 2), (4, 1), (3, 3)])
def test_against_repeated_keys(heads: int, keys: int, count: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(count)

    def noise(heads: int, length: int) -> Tensor:
        return torch.randn(2, length, heads, 8, generator=generator, dtype=torch.float64).transpose(1, 2)

    q, k, v = noise(heads, count), noise(keys, 70), noise(keys, 70)
    mask = None
    if masked:
        visible = torch.rand(2, count, 70, generator=generator) < 0.5
        visible[:, :, 0] = True
        mask = additive_mask(visible, torch.float64)
    out = grouped_attention(q, k, v, mask, scale=0.3)
    assert out.shape == q.shape
    torch.testing.assert_close(out, repeated(q, k, v, mask, 0.3), atol=1e-12, rtol=1e-12)

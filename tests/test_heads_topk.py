"""The two-stage selection gives what torch's own gives."""

from __future__ import annotations

import pytest
import torch

from heads.topk import argmax_of, top_k_of

# 49152 and 4096 take the two-stage way (for small k), 1000 and 512 the direct one.
VOCABS = [512, 1000, 4096, 49152]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("k", [1, 2, 8, 15, 40])
def test_top_k(vocab: int, k: int) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(k))
    values, indices = top_k_of(logits, k)
    want = torch.topk(logits, k)
    assert torch.equal(values, want.values) and torch.equal(indices, want.indices)  # random: no ties


def test_top_k_within_one_chunk_and_at_its_borders() -> None:
    logits = torch.zeros(1, 49152)
    places = [127, 128, 256, 300, 301, 302, 49151]
    logits[0, places] = torch.arange(7.0, 0.0, -1.0)
    values, indices = top_k_of(logits, 7)
    assert indices[0].tolist() == places and values[0].tolist() == [7, 6, 5, 4, 3, 2, 1]


def test_top_k_with_ties_and_minus_infinity() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 4, (3, 4096), generator=generator).float()
    logits[1, 10:] = -torch.inf
    values, indices = top_k_of(logits, 12)
    assert torch.equal(values, torch.topk(logits, 12).values)
    assert torch.equal(logits.gather(1, indices), values)
    assert all(len(set(row)) == 12 for row in indices.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", VOCABS)
def test_argmax_is_the_lowest_index_among_equals(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(3)).to(dtype)
    logits = logits.clamp_max(2.0)  # many equals at the top
    want = [(row == row.max()).nonzero()[0].item() for row in logits]
    assert argmax_of(logits).tolist() == want
    assert argmax_of(logits).tolist() == logits.argmax(-1).tolist()  # the library's greedy choice


def test_argmax_of_a_non_contiguous_view() -> None:
    logits = torch.randn(4, 6, 512)[:, -1]
    assert torch.equal(argmax_of(logits), logits.argmax(-1))

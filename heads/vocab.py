"""A reduced draft vocabulary: the head proposes only tokens that the target's answers really use.

With a large vocabulary the LM head is most of a draft's cost, and most of its rows are never proposed. Keeping the
frequent ones changes nothing about correctness (the target verifies with all of its rows); a token outside is simply
never drafted. (FR-Spec, arXiv 2502.14856.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def token_counts(sequences: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """Occurrences of every token, [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for ids in sequences:
        counts += torch.bincount(torch.tensor(list(ids), dtype=torch.long), minlength=vocab_size)
    return counts


def frequent_tokens(counts_V: Tensor, size: int) -> Tensor:
    """The `size` most frequent ids in ascending order, [size] int64; ties and unused ids by lowest id.

    Raises:
        ValueError: more tokens asked for than the vocabulary has.
    """
    if not 1 <= size <= len(counts_V):
        raise ValueError(f"head.draft_vocab is {size}, expected 1 .. {len(counts_V)} (the target's vocabulary)")
    order = torch.sort(counts_V, descending=True, stable=True).indices
    return order[:size].sort().values


def coverage(counts_V: Tensor, ids: Tensor) -> float:
    """Share of all counted occurrences that the ids account for."""
    return float(counts_V[ids].sum() / counts_V.sum().clamp_min(1))

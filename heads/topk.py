"""Exact top-k and argmax over vocabulary-sized rows by a two-stage selection.

A full-width `topk` on a CPU costs as much as the LM head. The k best entries of a row lie in the k chunks with the
largest maxima, and chunk maxima vectorise well, so only k * 128 entries per row are looked at twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 128


def top_k_of(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values and their indices, [R, k] each, in descending order.

    Equal values come in any order, as with `torch.topk`.
    """
    rows, vocab = logits_RV.shape
    if vocab <= 2 * k * _CHUNK or vocab % _CHUNK:
        return torch.topk(logits_RV, k, dim=-1)
    chunks = logits_RV.view(rows, vocab // _CHUNK, _CHUNK)
    chosen_RK = chunks.amax(-1).topk(k, dim=-1, sorted=False).indices
    candidates = chunks.gather(1, chosen_RK[..., None].expand(-1, -1, _CHUNK)).view(rows, -1)
    values, where = candidates.topk(k, dim=-1)
    return values, chosen_RK.gather(1, where // _CHUNK) * _CHUNK + where % _CHUNK


def argmax_of(logits_RV: Tensor) -> Tensor:
    """Index of the largest value per row, [R]; the lowest index among equals, as `torch.argmax` on a CPU."""
    rows, vocab = logits_RV.shape
    if vocab % _CHUNK:
        return logits_RV.argmax(-1)
    chunks = logits_RV.view(rows, vocab // _CHUNK, _CHUNK)
    chunk_R = chunks.amax(-1).argmax(-1)
    best = chunks[torch.arange(rows, device=logits_RV.device), chunk_R]
    return chunk_R * _CHUNK + best.argmax(-1)

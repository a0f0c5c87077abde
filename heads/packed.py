"""One pass over pieces of many rows, packed one behind the other: no padding, whatever the rows' lengths.

The model sees a single text of T tokens with explicit positions. What makes it many rows is the cache, which writes
each piece's keys behind its own row, and the attention, which goes piece by piece over that row's keys alone. So
nothing is computed on padding, and beside the matrix products nothing of a row touches another one's.

That costs a call per piece and layer, which is cheap on a CPU and dear on an accelerator.

Shapes: T tokens of the pass, R rows of the cache, Q query heads, Hkv key heads, G = Q / Hkv, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from heads.cache import SlotCache
from heads.target import GQA_SDPA, TargetAdapter, gqa_sdpa

_NAME = "draftsmith_packed_sdpa"


@dataclass(frozen=True)
class Piece:
    """Tokens `ids` of a row, at its slots start .. start + len(ids). wanted: the logits after the last one are."""

    row: int
    start: int
    ids: Sequence[int]
    wanted: bool = True


@dataclass(frozen=True)
class _Plan:
    """Of the running pass. masks: per piece one for each kind of layer; None where a piece sees all its keys."""

    pieces: Sequence[Piece]
    masks: Sequence[Sequence[Tensor] | None] = field(default=())


_plan: _Plan | None = None


def _packed_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    if _plan is None:
        return gqa_sdpa(module, query, key, value, attention_mask, **kwargs)
    assert attention_mask is not None, "the mask of a packed pass says which kind of layer this is"
    kind = int(attention_mask.flatten()[0])
    _, heads, tokens, size = query.shape
    keys, scale = key.shape[1], kwargs.get("scaling")
    # The heads that share a key head are queries of one token: the kernel reads their keys once.
    query_TGHD = query[0].transpose(0, 1).reshape(tokens, keys, heads // keys, size)
    out_TQD = query.new_zeros(tokens, heads, value.shape[-1])
    begin = 0
    for piece, masks in zip(_plan.pieces, _plan.masks, strict=True):
        row, count = slice(piece.row, piece.row + 1), len(piece.ids)
        end, seen = begin + count, piece.start + count
        mask = None if masks is None else masks[kind]
        if count == 1:
            one = F.scaled_dot_product_attention(
                query_TGHD[begin:end], key[row, :, :seen], value[row, :, :seen], attn_mask=mask, scale=scale
            )
            out_TQD[begin] = one.view(heads, -1)
        else:
            several = F.scaled_dot_product_attention(
                query[:, :, begin:end],
                key[row, :, :seen],
                value[row, :, :seen],
                attn_mask=mask,
                scale=scale,
                enable_gqa=True,
            )
            out_TQD[begin:end] = several[0].transpose(0, 1)
        begin = end
    return out_TQD[None], None


AttentionInterface.register(_NAME, _packed_sdpa)
AttentionMaskInterface.register(_NAME, sdpa_mask)


class PackedCache(SlotCache):
    """Keys and values of `rows` rows, written piece by piece. Its last row takes what pads a pass."""

    def __init__(self, num_layers: int, capacity: int, rows: int) -> None:
        super().__init__(num_layers, capacity, rows + 1)
        self.where: tuple[Tensor, Tensor] | None = None  # row and slot of every token of the pass, [T] each

    def buffer(self, like: Tensor) -> Tensor:
        return super().buffer(like.expand(len(self.lengths), -1, -1, -1)[:, :, :1])

    def write(self, memory: Tensor, new: Tensor) -> Tensor:
        """Writes [1, Hkv, T, D] where the tokens belong; returns all rows' memory, [R, Hkv, capacity, D]."""
        assert self.where is not None, "packed_pass says where the tokens belong"
        row_T, slot_T = self.where
        memory[row_T, :, slot_T] = new[0].transpose(0, 1)
        return memory


def can_pack(target: TargetAdapter) -> bool:
    """Whether attention goes through our function, and position is all that a token's place means to the target."""
    return (
        target.device.type == "cpu"
        and str(target.config._attn_implementation) in ("sdpa", GQA_SDPA)
        and bool(getattr(target.model, "_supports_attention_backend", False))
        and getattr(target.config, "attn_logit_softcapping", None) is None
        and target.exact_limit is None
        and not target.masks.foreign
    )


@contextmanager
def packed_attention(target: TargetAdapter) -> Iterator[None]:
    """Within it, `packed_pass` works; other passes do as before."""
    before = str(target.config._attn_implementation)
    target.model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        target.model.set_attn_implementation(before)


def packed_pass(target: TargetAdapter, cache: PackedCache, pieces: Sequence[Piece], tokens: int, logits: int) -> Tensor:
    """Runs the pieces. Logits [W, V] of the W wanted ones, in order.

    Args:
        tokens, logits: sizes of the pass and of its product with the LM head; what is missing is padded.
    """
    global _plan
    ids = [token for piece in pieces for token in piece.ids]
    slots = [piece.start + i for piece in pieces for i in range(len(piece.ids))]
    rows = [piece.row for piece in pieces for _ in piece.ids]
    padding = tokens - len(ids)
    assert padding >= 0, f"{len(ids)} tokens in a pass of {tokens}"
    ids, slots, rows = ids + [0] * padding, slots + [0] * padding, rows + [len(cache.lengths) - 1] * padding
    keep, end = [], 0
    for piece in pieces:
        end += len(piece.ids)
        if piece.wanted:
            keep.append(end - 1)
    kept = keep + [0] * (logits - len(keep))
    slot_T = torch.tensor(slots)
    cache.where = (torch.tensor(rows), slot_T)
    _plan = _Plan(pieces, [_masks(target, piece) for piece in pieces])
    kinds = list(target.masks.sizes)
    marks = [torch.full((1, 1, 1, tokens), float(number), dtype=target.dtype) for number in range(len(kinds))]
    try:
        cache.set_lengths([0] * len(cache.lengths))
        mask = marks[0] if len(kinds) == 1 else dict(zip(kinds, marks, strict=True))
        out = target.forward(torch.tensor([ids]), slot_T[None], mask, cache, keep=kept)
    finally:
        _plan = None
    return out.logits_BNV[0, : len(keep)]


def _masks(target: TargetAdapter, piece: Piece) -> list[Tensor] | None:
    count, seen = len(piece.ids), piece.start + len(piece.ids)
    if count == 1 and target.masks.plain:
        return None
    query_1N, key_1S = torch.arange(piece.start, seen)[None], torch.arange(seen)[None]
    masks = target.masks.build(key_1S[:, None] <= query_1N[:, :, None], query_1N, key_1S, target.dtype)
    return list(masks.values()) if isinstance(masks, dict) else [masks]

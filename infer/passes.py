"""Passes over pieces of many rows: packed where the target allows it, padded elsewhere; and which sizes are exact.

A pass is exact if what it gives for a row does not depend on the other rows in it, not even in the last bit. Attention
goes row by row in packed passes; the matrix products do not, and a library may sum in another order for another number
of rows. So sizes are tried out: kernels are chosen by shape, not by value, and where random rows in random company
give the same bits, other rows do, too.

Shapes: B rows, N tokens, S slots, V vocabulary, W wanted pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from heads.packed import PackedCache, Piece, can_pack, packed_attention, packed_pass
from heads.target import TargetAdapter

PIECE_TOKENS = 64  # longest piece
_PATTERNS = 8  # different rows in the passes that are tried out
_FEW = 8  # below, other kernels multiply; from there on they should be alike
MOST_NEW = 2 * PIECE_TOKENS  # tokens of prompts in a pass, beside a token of every row


class Passes(Protocol):
    """exact: as far as was tried. tokens: most in a pass."""

    exact: bool
    tokens: int

    def within(self) -> AbstractContextManager[None]:
        """Around all calls of `run`."""

    def run(self, pieces: Sequence[Piece]) -> Tensor:
        """Logits [W, V] after the last tokens of the wanted pieces, in order. At most one piece of a row."""

    def copy_row(self, row: int, to: int, count: int) -> None:
        """Copies what the cache holds of a row's first tokens."""


def make_passes(target: TargetAdapter, rows: int, capacity: int) -> Passes:
    """Packed passes if the target allows them and they agree with padded ones, else padded ones."""
    if can_pack(target) and _agree(target):
        return PackedPasses(target, rows, capacity)
    return PaddedPasses(target, rows, capacity)


def _agree(target: TargetAdapter) -> bool:
    """Whether packed passes give what padded ones give, up to rounding: on two rows, of which one goes on."""
    packed, padded = PackedPasses(target, 2, 16, try_out=False), PaddedPasses(target, 2, 16, try_out=False)
    ids = torch.randint(0, target.vocab_size, (14,), generator=torch.Generator().manual_seed(1)).tolist()
    steps = [[Piece(0, 0, ids[:5]), Piece(1, 0, ids[5:8])], [Piece(1, 3, ids[8:9]), Piece(0, 5, ids[9:])]]
    found = []
    for passes in (packed, padded):
        with torch.inference_mode(), passes.within():
            found.append(torch.cat([passes.run(step) for step in steps]))
    error = (found[0].float() - found[1].float()).norm() / found[1].float().norm()
    return bool(error <= torch.finfo(target.dtype).eps ** 0.5)  # many roundings; another law is farther off


def _patterns(vocab: int, capacity: int, count: int) -> list[tuple[int, int]]:
    """Token and slot of each pattern."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (count,), generator=generator).tolist()
    return [(token, min(1 + 5 * pattern, capacity - 1)) for pattern, token in enumerate(ids)]


def _fill(memories: Sequence[Tensor], patterns: Sequence[tuple[int, int]]) -> None:
    """Random keys and values: row r has those of pattern r modulo their number, up to the pattern's slot."""
    generator = torch.Generator().manual_seed(0)
    for memory in memories:
        parts, _, heads, _, size = memory.shape
        for number, (_, slot) in enumerate(patterns):
            noise = torch.randn(parts, 1, heads, slot, size, generator=generator)
            memory[:, number :: len(patterns), :, :slot] = noise.to(memory)


class PackedPasses:
    """All pieces in one pass, without padding (`heads.packed`).

    Attributes:
        sizes: numbers of tokens (and of logits) that were tried and are exact, ascending. If all that were tried from
            `least` on are, then any number from there on is used, else these only.
    """

    def __init__(self, target: TargetAdapter, rows: int, capacity: int, try_out: bool = True) -> None:
        self._target, self.tokens = target, rows + MOST_NEW
        self._cache = PackedCache(target.num_layers, capacity, rows)
        self.exact, self.sizes, self.least = True, [self.tokens], 1
        if try_out:
            with torch.inference_mode(), self.within():
                self._try_out(rows, capacity)

    def within(self) -> AbstractContextManager[None]:
        return packed_attention(self._target)

    def copy_row(self, row: int, to: int, count: int) -> None:
        self._cache.copy_row(row, to, count)

    def run(self, pieces: Sequence[Piece]) -> Tensor:
        tokens, wanted = sum(len(piece.ids) for piece in pieces), sum(piece.wanted for piece in pieces)
        return packed_pass(self._target, self._cache, pieces, self._size(tokens), self._size(wanted))

    def _size(self, count: int) -> int:
        if self.least:
            return max(count, self.least)
        return next(size for size in self.sizes if size >= count)

    def _try_out(self, rows: int, capacity: int) -> None:
        patterns = _patterns(self._target.vocab_size, capacity, min(_PATTERNS, rows))
        packed_pass(self._target, self._cache, [Piece(0, 0, [0])], 1, 1)  # allocates
        _fill(self._cache.memories, patterns)

        def logits(first: int, size: int) -> tuple[list[int], Tensor]:
            """Of single tokens of `size` rows from `first` on, round and round; the rest of the pass is padding."""
            chosen = [(first + i) % rows for i in range(min(size, rows))]
            numbers = [row % len(patterns) for row in chosen]
            pieces = [
                Piece(row, patterns[number][1], [patterns[number][0]])
                for row, number in zip(chosen, numbers, strict=True)
            ]
            return numbers, packed_pass(self._target, self._cache, pieces, size, size)

        numbers, found = logits(0, self.tokens)
        reference = found[: len(patterns)].clone()

        def same(first: int, size: int) -> bool:
            numbers, found = logits(first, size)
            return torch.equal(found, reference[numbers])

        self.exact = torch.equal(found, reference[numbers]) and same(3, self.tokens)
        tried, size = list(range(1, min(_FEW, self.tokens))), _FEW
        while size < self.tokens:
            tried.append(size)
            size *= 2
        good = [size for size in tried if same(1, size)] if self.exact else []
        self.sizes = [*good, self.tokens]
        if self.exact:  # else nothing is lost by any size
            last = max(set(tried) - set(good), default=0)
            self.least = last + 1 if last < _FEW else 0


class PaddedPasses:
    """One token of every row at once, masked to the longest; longer pieces row by row. For any target and device.

    Passes over single tokens always have all rows, so that their size never changes; idle rows have a token, too.
    """

    def __init__(self, target: TargetAdapter, rows: int, capacity: int, try_out: bool = True) -> None:
        self._target, self.tokens = target, rows + MOST_NEW
        self._cache = target.new_cache(capacity, rows)
        self._rows = rows
        self._ends = [0] * rows  # slots in use
        self._capacity = capacity
        self.exact = True
        zero_B1 = torch.zeros(rows, 1, dtype=torch.long, device=target.device)
        masks = target.masks.build(zero_B1[:, None] == 0, zero_B1, zero_B1, target.dtype)
        target.forward(zero_B1, zero_B1, masks, self._cache, keep=[0])  # allocates
        if try_out:
            with torch.inference_mode():
                self.exact = self._try_out(capacity)

    def within(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy_row(self, row: int, to: int, count: int) -> None:
        self._cache.copy_row(row, to, count)
        self._ends[to] = count

    def run(self, pieces: Sequence[Piece]) -> Tensor:
        found: dict[int, Tensor] = {}
        single = [piece for piece in pieces if len(piece.ids) == 1]
        if single:
            # An idle row's token goes behind what the row has, where its next one will overwrite it.
            ids, lengths = [0] * self._rows, [min(end, self._capacity - 1) for end in self._ends]
            for piece in single:
                ids[piece.row], lengths[piece.row] = piece.ids[0], piece.start
            logits_BV = self._step(ids, lengths)
            found |= {piece.row: logits_BV[piece.row] for piece in single}
        found |= {piece.row: self._extend(piece) for piece in pieces if len(piece.ids) > 1}
        for piece in pieces:
            self._ends[piece.row] = piece.start + len(piece.ids)
        wanted = [found[piece.row] for piece in pieces if piece.wanted]
        return torch.stack(wanted) if wanted else torch.empty(0, self._target.vocab_size)

    def _step(self, ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """One token of each row behind this many slots. Logits [B, V]."""
        target = self._target
        self._cache.set_lengths(lengths)
        position_B1 = torch.tensor(lengths, device=target.device)[:, None]
        key_1S = torch.arange(max(lengths) + 1, device=target.device)[None]
        masks = target.masks.build(key_1S[:, None] <= position_B1[:, :, None], position_B1, key_1S, target.dtype)
        ids_B1 = torch.tensor(ids, device=target.device)[:, None]
        return target.forward(ids_B1, position_B1, masks, self._cache).logits_BNV[:, 0]

    def _extend(self, piece: Piece) -> Tensor:
        """A causal pass over one row's next tokens. Logits [V] after the last."""
        target, row = self._target, self._cache.view(piece.row, piece.row + 1)
        row.set_lengths([piece.start])
        end = piece.start + len(piece.ids)
        position_1N = torch.arange(piece.start, end, device=target.device)[None]
        key_1S = torch.arange(end, device=target.device)[None]
        masks = target.masks.build(key_1S[:, None] <= position_1N[:, :, None], position_1N, key_1S, target.dtype)
        ids_1N = torch.tensor([list(piece.ids)], device=target.device)
        return target.forward(ids_1N, position_1N, masks, row, keep=[len(piece.ids) - 1]).logits_BNV[0, 0]

    def _try_out(self, capacity: int) -> bool:
        """Whether rows give the same bits in other places, and beside shorter rows."""
        patterns = _patterns(self._target.vocab_size, capacity, min(_PATTERNS, self._rows))
        count = len(patterns)
        _fill(self._cache.memories, patterns)
        numbers = [row % count for row in range(self._rows)]
        first = self._step([patterns[n][0] for n in numbers], [patterns[n][1] for n in numbers])
        # A pass beside shorter rows: the longer half is cut to nothing, which is the last that is done with its keys.
        kept = [row for row, n in enumerate(numbers) if n < (count + 1) // 2]
        seen = [patterns[n][1] if row in set(kept) else 0 for row, n in enumerate(numbers)]
        second = self._step([patterns[n][0] for n in numbers], seen)
        expected = first[numbers]  # pattern n lies in row n first
        return torch.equal(first, expected) and torch.equal(second[kept], expected[kept])

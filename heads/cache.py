"""A key/value cache that writes in place, at each row's own offset, and keeps an accepted tree path.

transformers' own DynamicCache concatenates on every step, which copies the whole cache. Here all layers of one shape
share one buffer of fixed capacity; a pass writes its keys behind what each row has committed, attention sees a view of
the filled part, and a commit moves the accepted slots of all layers at once.

Slots are positions: row b's token p lies in slot p. A batch has no holes, whatever each row accepted.

Shapes: B rows, N tokens of a pass, S slots, A slots of an accepted path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: [B, Hkv, capacity, hd], views of the buffer its cache owns."""

    is_croppable = True
    is_sliding = False
    is_compileable = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.keys = self._cache.buffer(key_states)
        self.values = self._cache.buffer(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        return self._cache.write(self.keys, key_states), self._cache.write(self.values, value_states)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self._cache.length + int(query_length), 0

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        return self._cache.capacity

    def get_max_cache_shape(self) -> int:  # the name of get_max_length in older releases
        return self._cache.capacity


class SlotCache(Cache):
    """One `SlotLayer` per target layer; passed to the model as its cache.

    A pass writes at `lengths`; `advance` after it (the target adapter does that) makes its tokens part of the rows;
    `commit` takes back what was not accepted.

    Args:
        rows: batch size B, fixed until `keep_rows`.
    """

    def __init__(self, num_layers: int, capacity: int, rows: int = 1) -> None:
        self.capacity = capacity
        self.lengths = [0] * rows  # slots filled, per row
        self._buffers: dict[Any, list[Tensor]] = {}  # (shape, dtype, device) of a layer's keys -> [part, B, Hkv, S, hd]
        self._parts: dict[Any, int] = {}
        self._slot_BN: Tensor | None = None  # where a static pass writes
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])

    @property
    def length(self) -> int:
        """Filled slots of the longest row."""
        return max(self.lengths)

    def buffer(self, like: Tensor) -> Tensor:
        """Zeroed memory for one layer's keys or values. Zeroed, because hidden slots are still multiplied (by 0)."""
        rows, heads, _, dim = like.shape
        assert rows == len(self.lengths), f"cache of {len(self.lengths)} rows got {rows}"
        key = (heads, dim, like.dtype, like.device)
        buffers, part = self._buffers.setdefault(key, []), self._parts.get(key, 0)
        group = 2 * len(self.layers)
        if part % group == 0:
            shape = (group, rows, heads, self.capacity, dim)
            buffers.append(torch.zeros(shape, dtype=like.dtype, device=like.device))
        self._parts[key] = part + 1
        return buffers[-1][part % group]

    @property
    def memories(self) -> list[Tensor]:
        """All that is allocated: keys and values of layers of one shape, [part, B, Hkv, capacity, hd]."""
        return [memory for buffers in self._buffers.values() for memory in buffers]

    @property
    def bytes(self) -> int:
        """Memory that is allocated."""
        return sum(memory.numel() * memory.element_size() for memory in self.memories)

    def place(self, slot_BN: Tensor) -> None:
        """Makes the next pass a static one: it writes by index, and attention sees the whole capacity, so that no shape
        or constant changes from pass to pass."""
        self._slot_BN = slot_BN

    def write(self, memory: Tensor, new: Tensor) -> Tensor:
        """Writes [B, Hkv, N, hd] behind every row's tokens; returns what attention sees, [B, Hkv, S, hd]."""
        slot_BN = self._slot_BN
        if slot_BN is None:
            write_slots(memory, new, self.lengths)
            return memory[:, :, : self.length + new.shape[2]]
        write_at(memory, new, slot_BN)
        return memory

    def advance(self, count: int) -> None:
        """The pass of `count` tokens is over: they belong to the rows until a commit says otherwise."""
        self.lengths = [length + count for length in self.lengths]
        self._slot_BN = None

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Drops everything behind these lengths, per row (after a prefill of padded rows)."""
        assert len(lengths) == len(self.lengths), f"{len(lengths)} lengths for {len(self.lengths)} rows"
        self.lengths = list(lengths)

    def commit(self, bases: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keeps the slots base + path[i] (increasing) as slots base .. base + len(path) and drops what follows.

        Per row: `base` is the length before the tree was scored, `path` the accepted node indices within the tree.
        """
        for row, (base, path) in enumerate(zip(bases, paths, strict=True)):
            gap = _gap(path)  # slots before the first gap are in place already
            if gap < len(path):
                self._move(row, base, gap, path[gap:])
        self.set_lengths([base + len(path) for base, path in zip(bases, paths, strict=True)])

    def _move(self, row: int, base: int, to: int, nodes: Sequence[int]) -> None:
        """In all layers at once, the row's slots base + nodes[i] become its slots base + to + i."""
        for (*_, device), buffers in self._buffers.items():
            index = torch.tensor(nodes, device=device) + base
            for memory in buffers:
                # index_select copies first, so overlapping source and destination are safe
                memory[:, row, :, base + to : base + to + len(nodes)] = memory[:, row].index_select(2, index)

    def write_rows(self, start: int, part: SlotCache) -> None:
        """Copies the filled slots of `part`, and its lengths, into rows start .. start + its rows."""
        rows, end = len(self.lengths), start + len(part.lengths)
        for mine, theirs in zip(self.layers, part.layers, strict=True):
            if not (isinstance(mine, SlotLayer) and isinstance(theirs, SlotLayer) and theirs.is_initialized):
                continue
            assert theirs.keys is not None and theirs.values is not None
            if not mine.is_initialized:
                mine.lazy_initialization(
                    theirs.keys[:1].expand(rows, -1, -1, -1), theirs.values[:1].expand(rows, -1, -1, -1)
                )
            assert mine.keys is not None and mine.values is not None
            mine.keys[start:end, :, : part.length] = theirs.keys[:, :, : part.length]
            mine.values[start:end, :, : part.length] = theirs.values[:, :, : part.length]
        self.lengths[start:end] = part.lengths

    def view(self, start: int, stop: int) -> SlotCache:
        """Rows start .. stop as a cache over the same memory, with lengths of its own; for after the first pass."""
        part = SlotCache(len(self.layers), self.capacity, stop - start)
        part.set_lengths(self.lengths[start:stop])
        for mine, its in zip(self.layers, part.layers, strict=True):
            assert isinstance(mine, SlotLayer) and isinstance(its, SlotLayer)
            if mine.keys is not None and mine.values is not None:
                its.keys, its.values, its.device = mine.keys[start:stop], mine.values[start:stop], mine.device
                its.is_initialized = True
        return part

    def copy_row(self, row: int, to: int, count: int) -> None:
        """Copies the first `count` slots of a row into another one, in all layers."""
        for memory in self.memories:
            memory[:, to, :, :count] = memory[:, row, :, :count]

    def _slots(self) -> list[SlotLayer]:
        # Layers that share another layer's keys are never written and have nothing to move.
        return [layer for layer in self.layers if isinstance(layer, SlotLayer) and layer.is_initialized]

    def keep_rows(self, rows: Tensor) -> None:
        """Keeps only these batch rows, in this order; only filled slots are copied."""
        filled, kept = self.length, rows.tolist()
        old, self._buffers, self._parts = self._slots(), {}, {}
        self.lengths = [self.lengths[row] for row in kept]
        for layer in old:
            for name in ("keys", "values"):
                memory: Tensor = getattr(layer, name)
                fresh = self.buffer(memory[:1].expand(len(kept), -1, -1, -1))
                fresh[:, :, :filled] = memory[:, :, :filled].index_select(0, rows.to(memory.device))
                setattr(layer, name, fresh)


def visible_slots(block_BNM: Tensor, length_B: Tensor, end: int) -> Tensor:
    """Which of `end` slots each of N tokens may see, bool [B, N, end]: all committed ones, then its block's.

    block_BNM: bool, visibility among the M slots behind row b's `length_B[b]` committed ones.
    """
    rows, count, block = block_BNM.shape
    behind_BS = torch.arange(end, device=length_B.device) - length_B[:, None]
    index_BNS = behind_BS.clamp(0, block - 1)[:, None].expand(rows, count, end)
    in_block_BNS = block_BNM.gather(2, index_BNS) & (behind_BS < block)[:, None]
    return torch.where((behind_BS < 0)[:, None], True, in_block_BNS)


def write_slots(memory: Tensor, new: Tensor, lengths: Sequence[int]) -> None:
    """Writes [B, Hkv, N, hd] into slots lengths[b] .. of every row b of `memory` [B, Hkv, S, hd]."""
    count, low, high = new.shape[2], min(lengths), max(lengths)
    assert high + count <= memory.shape[2], f"cache of {memory.shape[2]} slots asked for {high + count}; size it first"
    if low == high:
        memory[:, :, low : low + count] = new
        return
    start_B1 = torch.tensor(lengths, device=memory.device)[:, None]
    write_at(memory, new, start_B1 + torch.arange(count, device=memory.device))


def write_at(memory: Tensor, new: Tensor, slot_BN: Tensor) -> None:
    """Writes [B, Hkv, N, hd] into these slots of `memory` [B, Hkv, S, hd]."""
    if slot_BN.shape[0] == 1:
        memory.index_copy_(2, slot_BN[0], new)
        return
    row_B1 = torch.arange(slot_BN.shape[0], device=memory.device)[:, None]
    memory[row_B1, :, slot_BN] = new.transpose(1, 2)


def _gap(path: Sequence[int]) -> int:
    """Index of the first entry that is not already in its place."""
    return next((i for i, node in enumerate(path) if node != i), len(path))

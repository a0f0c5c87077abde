"""A key/value cache that writes in place and keeps an accepted tree path.

transformers' own DynamicCache concatenates on every step, which copies the whole cache. Here every layer owns one
buffer of fixed capacity; new keys go to the next free slots, and attention sees a view of the filled part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: [B, Hkv, capacity, hd], the first `length` slots filled."""

    is_croppable = True
    is_sliding = False
    is_compileable = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, like: Tensor) -> Tensor:
        batch, heads, _, dim = like.shape
        return torch.empty(batch, heads, self.capacity, dim, dtype=like.dtype, device=like.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[-2]
        assert end <= self.capacity, f"cache of {self.capacity} slots asked for {end}; size it at the start"
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.length + int(query_length), 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity

    def get_max_cache_shape(self) -> int:  # the name of get_max_length in older releases
        return self.capacity

    def crop(self, tokens_to_remove: int) -> None:
        assert tokens_to_remove <= 0, "crop takes the number of slots to drop, as a negative count"
        self.length += tokens_to_remove


class SlotCache(Cache):
    """One `SlotLayer` per target layer; passed to the model as its cache."""

    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__(layers=[SlotLayer(capacity) for _ in range(num_layers)])
        self.capacity = capacity

    def _slots(self) -> list[SlotLayer]:
        # Layers that share another layer's keys are never written and have nothing to move.
        return [layer for layer in self.layers if isinstance(layer, SlotLayer) and layer.is_initialized]

    @property
    def length(self) -> int:
        """Filled slots (the same in every layer)."""
        slots = self._slots()
        return slots[0].length if slots else 0

    def commit(self, base: int, path: list[int]) -> None:
        """Keeps the slots base + path[i] (increasing) as slots base .. base + len(path) and drops what follows.

        `base` is the length before the tree was scored; `path` are node indices within the tree. Batch of any size,
        the same path for every row.
        """
        contiguous = path == list(range(len(path)))
        for layer in self._slots():
            if not contiguous:
                assert layer.keys is not None and layer.values is not None
                index = torch.tensor(path, device=layer.keys.device) + base
                for buffer in (layer.keys, layer.values):
                    # index_select copies first, so overlapping source and destination are safe
                    buffer[:, :, base : base + len(path)] = buffer.index_select(2, index)
            layer.length = base + len(path)

    def write_rows(self, start: int, batch: int, part: SlotCache) -> None:
        """Copies the filled slots of `part` into rows start .. start + rows of this cache of `batch` rows."""
        for mine, theirs in zip(self.layers, part.layers, strict=True):
            if not (isinstance(mine, SlotLayer) and isinstance(theirs, SlotLayer) and theirs.is_initialized):
                continue
            assert theirs.keys is not None and theirs.values is not None
            if not mine.is_initialized:
                mine.lazy_initialization(
                    theirs.keys[:1].expand(batch, -1, -1, -1), theirs.values[:1].expand(batch, -1, -1, -1)
                )
            assert mine.keys is not None and mine.values is not None
            end = start + theirs.keys.shape[0]
            mine.keys[start:end, :, : theirs.length] = theirs.keys[:, :, : theirs.length]
            mine.values[start:end, :, : theirs.length] = theirs.values[:, :, : theirs.length]
            mine.length = theirs.length

    def keep_rows(self, rows: Tensor) -> None:
        """Keeps only these batch rows, in this order."""
        for layer in self._slots():
            assert layer.keys is not None and layer.values is not None
            layer.keys = _rows(layer.keys, rows, layer.length)
            layer.values = _rows(layer.values, rows, layer.length)


def _rows(buffer: Tensor, rows: Tensor, length: int) -> Tensor:
    """New buffer with the chosen rows; only the filled slots are copied."""
    out = torch.empty(len(rows), *buffer.shape[1:], dtype=buffer.dtype, device=buffer.device)
    torch.index_select(buffer[:, :, :length], 0, rows, out=out[:, :, :length])
    return out

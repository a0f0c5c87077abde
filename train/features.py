"""Where training gets the target's features of its rows from, whatever way they are kept."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from heads.fingerprint import tokenizer_digest
from heads.target import TargetAdapter
from train.batching import padded_width
from train.conversations import TokenRow
from train.digests import template_digest, weights_digest

PASS_TOKENS = 1024  # padded tokens per forward pass: small passes keep a CPU's activations near its caches


class Features(ABC):
    """Rows' features by row index: [length of the row, W], the target's feature first, then the tapped layers.

    readable_ahead: whether `read` may run in another thread, beside training.
    """

    readable_ahead = True

    @abstractmethod
    def read(self, indices: Sequence[int]) -> list[Tensor]: ...

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Tensor:
        return self.read([index])[0]


class JoinedFeatures(Features):
    """Several as one: the rows of the first, then those of the next."""

    def __init__(self, parts: Sequence[Features]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def read(self, indices: Sequence[int]) -> list[Tensor]:
        out = []
        for index in indices:
            number = bisect_right(self._ends, index)
            out.append(self._parts[number][index - (self._ends[number - 1] if number else 0)])
        return out

    def __len__(self) -> int:
        return self._ends[-1]


@dataclass(frozen=True)
class FeatureSource:
    """What makes features: the target, and which of its layers are read behind its last hidden state.

    tokenizer: the one that made the rows' ids; None where ids are all there is.
    """

    target: TargetAdapter
    taps: tuple[int, ...] = ()
    tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the columns."""
        return (self.target.hidden_size, *(self.target.config.hidden_size for _ in self.taps))

    @functools.cached_property
    def identity(self) -> dict[str, object]:
        """What tells sources apart, JSON-able. Reads all weights, once."""
        target, tokenizer = self.target, self.tokenizer
        return {
            "target": target.name,
            "revision": target.revision,
            "adapter": target.adapter,
            "adapter_sha256": target.adapter_sha256,
            "weights_sha256": weights_digest(target.model) if target.peers is None else target.peers.weights_sha256,
            "tokenizer_sha256": None if tokenizer is None else tokenizer_digest(tokenizer),
            "template_sha256": None if tokenizer is None else template_digest(tokenizer),
            "dtype": str(target.dtype),
            "hidden_size": target.hidden_size,
            "columns": ["hidden_postnorm", *(f"tap_after_layer={k}" for k in self.taps)],
        }

    def compute(self, rows: Sequence[TokenRow]) -> list[Tensor]:
        """Features of rows in one pass, on the target's `head_device`.

        Raises:
            ValueError: they are not finite.
        """
        ids, valid = padded_rows(rows)
        hidden = self.target.features(ids.to(self.target.device), valid.to(self.target.device), self.taps)
        features = [hidden[i, : len(row.input_ids)].clone() for i, row in enumerate(rows)]
        if not all(bool(torch.isfinite(f).all()) for f in features):
            raise ValueError(
                f"target.dtype: the target's features are not finite in {self.target.dtype}; load it in bfloat16 or "
                "float32"
            )
        return features


class OnlineFeatures(Features):
    """Computed whenever they are read: nothing on disk, and a pass of the target with every step."""

    readable_ahead = False  # the target runs one pass at a time

    def __init__(self, source: FeatureSource, rows: Sequence[TokenRow]) -> None:
        self._source, self._rows = source, rows

    def read(self, indices: Sequence[int]) -> list[Tensor]:
        lengths = {i: len(self._rows[i].input_ids) for i in indices}
        found: dict[int, Tensor] = {}
        for batch in passes(lengths):
            found |= zip(batch, self._source.compute([self._rows[i] for i in batch]), strict=True)
        return [found[i] for i in indices]

    def __len__(self) -> int:
        return len(self._rows)


def padded_rows(rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
    """ids [B, T], padded on the right with zeros, and what of them is real."""
    width = padded_width(max(len(row.input_ids) for row in rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row.input_ids)] = torch.tensor(row.input_ids)
        valid[i, : len(row.input_ids)] = True
    return ids, valid


def passes(lengths: dict[int, int]) -> list[list[int]]:
    """Row indices by length (index -> tokens), cut so that a pass stays within a number of padded tokens."""
    out: list[list[int]] = [[]]
    for index in sorted(lengths, key=lambda i: lengths[i]):
        if out[-1] and (len(out[-1]) + 1) * padded_width(lengths[index]) > PASS_TOKENS:
            out.append([])
        out[-1].append(index)
    return out


@dataclass(frozen=True)
class Dealt:
    """A micro-batch: the epochs finished after it, row indices, and features of these rows."""

    epochs: float
    indices: list[int]
    features: list[Tensor]


def read_ahead(batches: Iterable[tuple[float, list[int]]], features: Features, depth: int) -> Iterator[Dealt]:
    """(epochs, row indices) with the rows' features, which a thread reads up to `depth` batches ahead."""
    if not depth or not features.readable_ahead:
        for epochs, indices in batches:
            yield Dealt(epochs, indices, features.read(indices))
        return
    with ThreadPoolExecutor(1, "features") as pool:
        waiting: deque[tuple[float, list[int], Future[list[Tensor]]]] = deque()
        for epochs, indices in batches:
            waiting.append((epochs, indices, pool.submit(features.read, indices)))
            if len(waiting) > depth:
                first = waiting.popleft()
                yield Dealt(first[0], first[1], first[2].result())
        for epochs, indices, future in waiting:
            yield Dealt(epochs, indices, future.result())

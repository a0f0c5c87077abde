"""The target's features of every row, on disk: what the head trains on.

A directory with manifest.json and shards. A shard is a safetensors file with the features of consecutive rows,
concatenated: [tokens, H] after the final norm, then H columns for each tapped layer, in the target's dtype. Shards are
written under a temporary name and renamed; a killed run goes on with the missing ones.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.target import TargetAdapter
from train.batching import padded_width
from train.conversations import TokenRow
from train.files import check_manifest

_MANIFEST = "manifest.json"
_SHARD_TOKENS = 65_536
_BATCH_TOKENS = 1024  # padded tokens per forward pass: small passes keep a CPU's activations near its caches
_PROGRESS_SECONDS = 15.0


class FeatureCache:
    """Rows' features by row index: `cache[i]` is [length of row i, columns]."""

    def __init__(self, folder: Path, rows: Sequence[TokenRow], shards: list[list[int]]) -> None:
        self._where: dict[int, tuple[int, int, int]] = {}
        self._tensors: list[Tensor] = []
        for number, indices in enumerate(shards):
            path = _shard(folder, number)
            try:
                features = load_file(path)["features"]  # mapped, read when used
            except (OSError, SafetensorError, KeyError) as error:
                raise ValueError(f"feature cache: {path} is damaged ({error}); remove it and run again") from error
            start = 0
            for index in indices:
                end = start + len(rows[index].input_ids)
                self._where[index] = (number, start, end)
                start = end
            if start != features.shape[0]:
                raise ValueError(f"feature cache: {path} holds {features.shape[0]} tokens, expected {start}; remove it")
            self._tensors.append(features)

    def __getitem__(self, index: int) -> Tensor:
        number, start, end = self._where[index]
        return self._tensors[number][start:end]

    def __len__(self) -> int:
        return len(self._where)


class JoinedFeatures:
    """Several caches as one: the rows of the first, then those of the next."""

    def __init__(self, parts: Sequence[FeatureCache]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __getitem__(self, index: int) -> Tensor:
        number = bisect_right(self._ends, index)
        return self._parts[number][index - (self._ends[number - 1] if number else 0)]

    def __len__(self) -> int:
        return self._ends[-1]


Features = FeatureCache | JoinedFeatures


def cache_key(target: TargetAdapter, rows: Sequence[TokenRow], taps: Sequence[int]) -> dict[str, Any]:
    """What the features depend on: the target (name, weights' fingerprint, dtype) and the rows' ids."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.asarray(row.input_ids, dtype=np.int64).tobytes())
    weights = hashlib.sha256()  # of a sample of every tensor: a merged adapter changes some of them
    for parameter in target.model.parameters():
        flat = parameter.detach().flatten()
        weights.update(flat[:: max(1, flat.numel() // 64)].float().cpu().numpy().tobytes())
    return {
        "schema": 1,
        "target": target.name,
        "revision": target.revision,
        "adapter": target.adapter,
        "adapter_sha256": target.adapter_sha256,
        "weights_sample_sha256": weights.hexdigest(),
        "dtype": str(target.dtype),
        "hidden_size": target.hidden_size,
        "columns": ["hidden_postnorm", *(f"tap_after_layer={k}" for k in taps)],
        "rows": len(rows),
        "rows_sha256": digest.hexdigest(),
    }


def build_feature_cache(
    target: TargetAdapter,
    rows: Sequence[TokenRow],
    folder: str | os.PathLike[str],
    taps: Sequence[int] = (),
    log: Callable[[str], None] = print,
) -> FeatureCache:
    """Writes what is missing and opens the cache. taps: layers whose outputs are stored behind the features.

    Raises:
        ValueError: the folder holds features of another target or of other rows, or the disk has no room.
    """
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    check_manifest(out / _MANIFEST, cache_key(target, rows, taps), "data.work_dir", "features")
    shards = _plan(rows)
    missing = [number for number in range(len(shards)) if not _shard(out, number).is_file()]
    total = sum(len(rows[i].input_ids) for number in missing for i in shards[number])
    if missing:
        size = total * target.hidden_size * (1 + len(taps)) * torch.finfo(target.dtype).bits // 8
        free = shutil.disk_usage(out).free
        log(f"features: {total} tokens of {len(rows)} rows to {out}, {size / 2**20:.0f} MiB")
        if size > 0.95 * free:
            raise ValueError(
                f"data.work_dir: the feature cache needs {size / 2**20:.0f} MiB in {out}, where "
                f"{free / 2**20:.0f} MiB are free; choose another data.work_dir or fewer data.tokens"
            )
    started = shown = time.perf_counter()
    done = 0
    for number in missing:
        parts: dict[int, Tensor] = {}
        for batch in _batches(rows, shards[number]):
            for index, features in zip(batch, _features(target, [rows[i] for i in batch], taps), strict=True):
                parts[index] = features
                done += features.shape[0]
            now = time.perf_counter()
            if now - shown > _PROGRESS_SECONDS:
                shown, rate = now, done / (now - started)
                log(f"features: {done}/{total} tokens, {rate:.0f} tokens/s, left {(total - done) / rate / 60:.1f} min")
        path = _shard(out, number)
        tmp = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        save_file({"features": torch.cat([parts[i] for i in shards[number]])}, tmp)
        os.replace(tmp, path)
    return FeatureCache(out, rows, shards)


def padded_rows(rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
    """ids [B, T], padded on the right with zeros, and what of them is real."""
    width = padded_width(max(len(row.input_ids) for row in rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row.input_ids)] = torch.tensor(row.input_ids)
        valid[i, : len(row.input_ids)] = True
    return ids, valid


def feature_batches(rows: Sequence[TokenRow]) -> list[list[int]]:
    """The rows that share a pass when their features are cached: in another company a feature can round differently."""
    return [batch for shard in _plan(rows) for batch in _batches(rows, shard)]


def _features(target: TargetAdapter, rows: Sequence[TokenRow], taps: Sequence[int]) -> list[Tensor]:
    ids, valid = padded_rows(rows)
    hidden = target.features(ids.to(target.device), valid.to(target.device), taps).cpu()
    features = [hidden[i, : len(row.input_ids)].clone() for i, row in enumerate(rows)]
    if not all(bool(torch.isfinite(f).all()) for f in features):
        raise ValueError(
            f"target.dtype: the target's features are not finite in {target.dtype}; load it in bfloat16 or float32"
        )
    return features


def _plan(rows: Sequence[TokenRow]) -> list[list[int]]:
    """Consecutive row indices per shard."""
    shards: list[list[int]] = [[]]
    tokens = 0
    for index, row in enumerate(rows):
        if shards[-1] and tokens + len(row.input_ids) > _SHARD_TOKENS:
            shards.append([])
            tokens = 0
        shards[-1].append(index)
        tokens += len(row.input_ids)
    return shards


def _batches(rows: Sequence[TokenRow], indices: Sequence[int]) -> list[list[int]]:
    """Row indices by length, cut so that padded tokens stay within the limit."""
    out: list[list[int]] = [[]]
    for index in sorted(indices, key=lambda i: len(rows[i].input_ids)):
        if out[-1] and (len(out[-1]) + 1) * padded_width(len(rows[index].input_ids)) > _BATCH_TOKENS:
            out.append([])
        out[-1].append(index)
    return out


def _shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"

"""The target's features of every row, on disk: what the head trains on.

A directory with manifest.json and shards (`train.shards`). The manifest says what the features depend on, from the
start, and lists every shard with its size and SHA-256 once all are there. Shards can be written by several processes,
each by one of them, whole or not at all: after a kill the missing ones are made, and the directory ends up the same,
byte for byte. Damaged ones are named and made anew.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from heads.divided import settle
from train.conversations import TokenRow
from train.digests import ids_digest
from train.features import Features, FeatureSource, passes
from train.files import differences, remove_leftovers, write_text
from train.shards import Form, Layout, Record, ShardReader, find_fault, record_path, shard_path, write_shard

T = TypeVar("T")
Log = Callable[[str], None]
Stored = Literal["auto", "int8"]

MANIFEST = "manifest.json"
_SCHEMA = 2
_SHARD_TOKENS = 65_536
_PROGRESS_SECONDS = 15.0


class FeatureCache(Features):
    """An opened cache. In memory are the rows' offsets alone; rows are read from the files when asked for."""

    def __init__(self, folder: Path, layout: Layout, form: Form) -> None:
        self._folder, self._layout, self._form = folder, layout, form
        self._readers: dict[int, ShardReader] = {}

    def read(self, indices: Sequence[int]) -> list[Tensor]:
        out = []
        for index in indices:
            number, start, end = self._layout.place(index)
            if number not in self._readers:
                path = shard_path(self._folder, number)
                self._readers[number] = ShardReader(path, self._form, self._layout.tokens(number))
            out.append(self._readers[number].read(start, end))
        return out

    def __len__(self) -> int:
        return self._layout.count


def cache_key(source: FeatureSource, rows: Sequence[TokenRow], stored: Stored = "auto") -> dict[str, Any]:
    """What the files depend on: the source, the rows' ids, and how rows are put into passes and shards."""
    return {
        "schema": _SCHEMA,
        **source.identity,
        "stored": "int8, a float32 scale per token and column" if stored == "int8" else str(source.target.dtype),
        "shard_tokens": _SHARD_TOKENS,
        "rows": len(rows),
        "rows_sha256": ids_digest(row.input_ids for row in rows),
    }


def form_of(source: FeatureSource, stored: Stored) -> Form:
    return Form(source.widths, source.target.dtype, stored == "int8")


def layout_of(rows: Sequence[TokenRow]) -> Layout:
    return Layout([len(row.input_ids) for row in rows], _SHARD_TOKENS)


def feature_batches(rows: Sequence[TokenRow]) -> list[list[int]]:
    """The rows that share a pass when their features are cached: in another company a feature can round differently."""
    layout = layout_of(rows)
    return [batch for shard in range(len(layout)) for batch in _passes(rows, layout, shard)]


def build_feature_cache(
    source: FeatureSource,
    rows: Sequence[TokenRow],
    folder: str | os.PathLike[str],
    *,
    stored: Stored = "auto",
    checksums: bool = True,
    log: Log = print,
) -> FeatureCache:
    """Writes what is missing or damaged, and opens the cache.

    With `torch.distributed` every process must call this; they share the work, and the folder.

    Args:
        checksums: read all shards that are there and compare their SHA-256; else their sizes and headers alone.

    Raises:
        ValueError: the folder holds something else, or the disk has no room.
    """
    out, form, layout = Path(folder), form_of(source, stored), layout_of(rows)
    rank, size = (dist.get_rank(), dist.get_world_size()) if _distributed() else (0, 1)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        remove_leftovers(out)
        _check_manifest(out, cache_key(source, rows, stored))
    _everyone([])
    missing = sorted(_everyone(faults_of(out, form, layout, range(rank, len(layout), size), checksums, log)))
    if missing:
        if rank == 0:
            _announce(out, form, layout, missing, log)
        _everyone([])
        _write(source, rows, out, form, layout, [number for number, _ in missing[rank::size]], size, log)
        _everyone([])
    if rank == 0:
        _complete(out, layout)
    _everyone([])
    return FeatureCache(out, layout, form)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a cache.

    Raises:
        ValueError: there is none, it cannot be read, or it is of another version.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text())
        schema = found["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"data.work_dir: {path} is not the manifest of a feature cache ({error}); remove {folder}"
        ) from error
    if schema != _SCHEMA:
        raise ValueError(
            f"data.work_dir: {folder} holds features of another version (schema {schema!r}, expected {_SCHEMA}); "
            "remove it, and they are made again"
        )
    return dict(found)


def compare_manifest(folder: Path, key: dict[str, Any]) -> None:
    """Raises ValueError naming each entry in which the cache there is not the one of this key."""
    wrong = differences(read_manifest(folder), key)
    if wrong:
        raise ValueError(
            f"data.work_dir: {folder} holds features made with other settings ({wrong}); choose another data.work_dir "
            "or remove it"
        )


def records_of(folder: Path, shards: int) -> dict[int, Record]:
    """Records of shards by number: those in the manifest, and newer ones in files of their own."""
    found = {}
    listed = read_manifest(folder).get("shards", [])
    for number in range(shards):
        path = record_path(folder, number)
        try:
            entry = json.loads(path.read_text()) if path.is_file() else listed[number]
            found[number] = Record(int(entry["bytes"]), str(entry["sha256"]))
        except (OSError, ValueError, TypeError, KeyError, IndexError):
            continue  # none, or damaged: its shard is made anew
    return found


def _check_manifest(folder: Path, key: dict[str, Any]) -> None:
    """Compares the manifest, or writes the first one."""
    if (folder / MANIFEST).exists():
        compare_manifest(folder, key)
    elif any(folder.glob("shard-*")):
        raise ValueError(f"data.work_dir: {folder} holds shards without a {MANIFEST}, so of unknown origin; remove it")
    else:
        write_text(folder / MANIFEST, json.dumps(key, indent=2) + "\n")


def faults_of(
    folder: Path, form: Form, layout: Layout, numbers: Sequence[int], checksums: bool, log: Log
) -> list[tuple[int, str]]:
    """(shard, what is wrong with it) of those among `numbers` that must be made."""
    records = records_of(folder, len(layout))
    progress = _Progress("checked", "bytes", sum(r.bytes for n, r in records.items() if n in numbers), log)
    found = []
    for number in numbers:
        fault = find_fault(folder, number, form, layout.tokens(number), records.get(number), checksums)
        if fault is not None:
            found.append((number, fault))
        if number in records:
            progress.add(records[number].bytes)
    return found


def _announce(folder: Path, form: Form, layout: Layout, missing: Sequence[tuple[int, str]], log: Log) -> None:
    """Says what is going to be written, and refuses if it has no room."""
    for number, fault in missing:
        if fault != "missing":
            log(f"features: {shard_path(folder, number)} is damaged ({fault}): it is made anew")
    tokens = sum(layout.tokens(number) for number, _ in missing)
    size, free = tokens * form.bytes_per_token, shutil.disk_usage(folder).free
    log(
        f"features: {len(missing)} of {len(layout)} shards to write to {folder}: {tokens} tokens, "
        f"{size / 2**20:.0f} MiB ({form.bytes_per_token} bytes per token; {free / 2**20:.0f} MiB are free)"
    )
    if size > 0.95 * free:
        raise ValueError(
            f"data.work_dir: the feature cache needs {size / 2**20:.0f} MiB in {folder}, where "
            f"{free / 2**20:.0f} MiB are free; choose another data.work_dir, fewer data.tokens, cache.dtype: int8, or "
            "cache.mode: online"
        )


def _write(
    source: FeatureSource,
    rows: Sequence[TokenRow],
    folder: Path,
    form: Form,
    layout: Layout,
    numbers: Sequence[int],
    writers: int,
    log: Log,
) -> None:
    total = sum(layout.tokens(number) for number in numbers)
    share = f" by each of {writers} processes" if writers > 1 else ""
    progress = _Progress(f"computed{share}", "tokens", total, log, early=True)
    for number in numbers:
        tokens = layout.tokens(number)
        shard = {name: torch.empty(tokens, width, dtype=dtype) for name, (dtype, width) in form.parts.items()}
        for batch in _passes(rows, layout, number):
            found = source.compute([rows[i] for i in batch])
            for index, row_LW in zip(batch, found, strict=True):
                _, start, end = layout.place(index)
                for name, part in form.encode(row_LW).items():
                    shard[name][start:end] = part
            progress.add(sum(map(len, found)))
        write_shard(folder, number, shard)
    settle(source.target)


def _complete(folder: Path, layout: Layout) -> None:
    """Lists all shards in the manifest and removes their own records."""
    manifest, records = read_manifest(folder), records_of(folder, len(layout))
    listed = [
        {
            "file": shard_path(folder, number).name,
            "rows": len(layout.rows(number)),
            "tokens": layout.tokens(number),
            **asdict(records[number]),
        }
        for number in range(len(layout))
    ]
    if manifest.get("shards") != listed:
        write_text(folder / MANIFEST, json.dumps(manifest | {"shards": listed}, indent=2) + "\n")
    for number in range(len(layout)):
        record_path(folder, number).unlink(missing_ok=True)


def _passes(rows: Sequence[TokenRow], layout: Layout, shard: int) -> list[list[int]]:
    return passes({i: len(rows[i].input_ids) for i in layout.rows(shard)})


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _everyone(mine: list[T]) -> list[T]:
    """The lists of all processes as one; nobody goes on before all are here."""
    if not _distributed():
        return mine
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return [one for part in parts for one in part]


class _Progress:
    """Says now and then how much is done, at what rate, and how long the rest will take.

    early: also after the second pass, before the first shard is written.
    """

    def __init__(self, done: str, unit: str, total: int, log: Log, early: bool = False) -> None:
        self._words, self._total, self._log = (done, unit), total, log
        self._done, self._first, self._calls = 0, 2 if early else 0, 0
        self._started = self._shown = time.perf_counter()

    def add(self, amount: int) -> None:
        self._done += amount
        self._calls += 1
        now = time.perf_counter()
        if now - self._shown > _PROGRESS_SECONDS or self._calls == self._first:
            self._shown, rate = now, self._done / max(now - self._started, 1e-9)
            left = (self._total - self._done) / rate / 60
            done, unit = self._words
            self._log(f"features: {self._done}/{self._total} {unit} {done}, {rate:.0f} {unit}/s, left {left:.1f} min")

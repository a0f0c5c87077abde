"""Whether a feature cache is what the target computes: its manifest, its shards, and rows computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from train.conversations import TokenRow
from train.feature_cache import (
    FeatureCache,
    Stored,
    cache_key,
    compare_manifest,
    faults_of,
    form_of,
    layout_of,
)
from train.features import FeatureSource
from train.shards import shard_path

# Largest difference between a row computed alone and as it was cached, among others: |a - b| / |b| over its tokens, in
# any column. Sums in another order move fp32 by some 1e-6 and 16-bit features by 0.01 or so; those of another row or
# of another target differ by about 1.
_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 0.1


@dataclass(frozen=True)
class Verified:
    """What was looked at. largest: of the differences of the rows computed again (see `_TOLERANCE`)."""

    shards: int
    tokens: int
    rows: int
    identical: int
    largest: float

    def __str__(self) -> str:
        return (
            f"{self.shards} shards ({self.tokens} tokens) are as they were written; {self.rows} rows computed again, "
            f"{self.identical} of them identical, the largest difference {self.largest:.1e}"
        )


def verify_feature_cache(
    source: FeatureSource,
    rows: Sequence[TokenRow],
    folder: Path,
    *,
    stored: Stored = "auto",
    sample: int = 16,
    seed: int = 0,
    log: Callable[[str], None] = print,
) -> Verified:
    """Checks a finished cache: every shard's SHA-256, and `sample` rows, drawn by `seed`, against the target.

    Raises:
        ValueError: it is of something else, shards are missing or damaged (all of them are named), or rows are not what
            the target computes.
    """
    compare_manifest(folder, cache_key(source, rows, stored))
    form, layout = form_of(source, stored), layout_of(rows)
    faults = faults_of(folder, form, layout, range(len(layout)), True, log)
    if faults:
        named = ", ".join(f"{shard_path(folder, number).name} ({fault})" for number, fault in faults)
        raise ValueError(
            f"data.work_dir: {len(faults)} of {len(layout)} shards in {folder} are missing or damaged: {named}; "
            "run scripts/feature_cache.py build, which makes them anew"
        )
    cache = FeatureCache(folder, layout, form)
    picked = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:sample].tolist()
    tolerance = _TOLERANCE.get(form.dtype, _HALF_TOLERANCE)
    if form.int8:  # values near the middle between two steps go either way
        tolerance = _HALF_TOLERANCE
    identical, largest, wrong = 0, 0.0, []
    for index in picked:
        [fresh_LW] = source.compute([rows[index]])
        fresh_LW, found_LW = form.decode(form.encode(fresh_LW.cpu())), cache[index]
        identical += int(torch.equal(fresh_LW, found_LW))
        pairs = zip(found_LW.double().split(form.widths, -1), fresh_LW.double().split(form.widths, -1), strict=True)
        difference = max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)
        largest = max(largest, difference)
        if not difference <= tolerance:
            wrong.append(f"{rows[index].id!r} ({difference:.2g})")
    if wrong:
        raise ValueError(
            f"data.work_dir: {len(wrong)} of {len(picked)} rows in {folder} are not what {source.target.name!r} "
            f"computes (relative difference, expected {tolerance:g} or less): {', '.join(wrong[:8])}; remove the "
            "directory and build it again"
        )
    return Verified(len(layout), sum(map(layout.tokens, range(len(layout)))), len(picked), identical, largest)

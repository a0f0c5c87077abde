"""The features of a run: on disk, one cache per source of rows and side, or computed in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from train.config import RunConfig
from train.conversations import TokenRow
from train.feature_cache import Stored, build_feature_cache
from train.features import Features, FeatureSource, JoinedFeatures, OnlineFeatures
from train.stage import Rows


@dataclass(frozen=True)
class Place:
    """A cache of a run: its rows, its folder, and how they are stored."""

    rows: Sequence[TokenRow]
    folder: Path
    stored: Stored


def places(config: RunConfig, taps: Sequence[int], sources: Sequence[Rows]) -> list[Place]:
    """Of every source the training rows, then the held-out rows.

    Held-out rows are always stored as the target computes them: accept lengths of heads that were trained from int8
    features compare with those of others.
    """
    kind = "".join(f"_{k}" for k in ("taps", *taps)) if taps else ""  # heads that read other layers have their own
    stored = config.cache.dtype
    found = []
    for source, name in zip(sources, (config.data.work_dir, *config.data.also), strict=True):
        folder = Path(name)
        found.append(Place(source.train, folder / f"features_train{kind}{'_int8' if stored == 'int8' else ''}", stored))
        held_out = folder / f"features_held_out_{len(source.held_out)}{kind}"
        found.append(Place(source.held_out, held_out, "auto"))
    return found


def open_features(
    config: RunConfig, source: FeatureSource, sources: Sequence[Rows], log: Callable[[str], None]
) -> tuple[Features, Features]:
    """Features of the training rows and of the held-out rows of all sources; every process must call this.

    Raises:
        ValueError: a folder holds something else, or the disk has no room.
    """
    if config.cache.mode == "online":
        log("features: computed in every step (cache.mode: online), nothing is written")
        train = [row for rows in sources for row in rows.train]
        held_out = [row for rows in sources for row in rows.held_out]
        return OnlineFeatures(source, train), OnlineFeatures(source, held_out)
    parts = [
        build_feature_cache(
            source, place.rows, place.folder, stored=place.stored, checksums=config.cache.checksums, log=log
        )
        for place in places(config, source.taps, sources)
    ]
    if len(parts) == 2:
        return parts[0], parts[1]
    return JoinedFeatures(parts[::2]), JoinedFeatures(parts[1::2])

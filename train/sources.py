"""The configured conversations in one pass: sources mixed, parsed, deduplicated, kept apart from evaluation files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from train.config import DataConfig, SourceConfig
from train.conversations import Conversation, DropCounts
from train.layouts import Unusable, parse_row
from train.overlap import Overlap
from train.raw_rows import raw_rows

_PROGRESS_SECONDS = 15.0


@dataclass
class _Source:
    """One source while it is read."""

    config: SourceConfig
    name_in_config: str
    counts: DropCounts = field(default_factory=DropCounts)
    layouts: dict[str, int] = field(default_factory=dict)
    share: float | None = 0.0
    ended: bool = False

    @property
    def name(self) -> str:
        path = Path(self.config.path)
        return path.stem if path.exists() else self.config.path

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {count}" for name, count in self.layouts.items())
        how = "detected row by row" if self.config.layout == "auto" else "as configured"
        return f"{self.config.path}: layout {shown or 'unknown'} ({how}); {self.counts}"

    def record(self) -> dict[str, Any]:
        return {
            "path": self.config.path,
            "layouts": self.layouts,
            "rows_in": self.counts.rows_in,
            "rows_out": self.counts.rows_out,
            "dropped": self.counts.reasons,
            "read_whole": self.ended,
        }


class Conversations:
    """Iterate once; `counts` and `record` are then those of the whole pass.

    Sources take turns, each row to the source that is furthest behind its weight. With weights reading stops where the
    first source ends, so the shares are those asked for; without, it goes on with the others. It also stops at
    `data.max_rows`. What was not read is not counted. Of equal conversations the first stays.
    """

    def __init__(
        self,
        data: DataConfig,
        log: Callable[[str], None] = print,
        prepare: Callable[[Conversation], Conversation] | None = None,
    ) -> None:
        """`prepare` changes each conversation before it is compared; it may raise Unusable."""
        named = "data.path" if data.path is not None else "data.sources[{}].path"
        self._sources = [_Source(source, named.format(i)) for i, source in enumerate(data.inputs)]
        self._data, self._log, self._prepare = data, log, prepare
        self._overlap = Overlap(data.exclude, log) if data.exclude else None
        self._seen: set[str] = set()

    @property
    def counts(self) -> DropCounts:
        total = DropCounts()
        for source in self._sources:
            total.rows_in += source.counts.rows_in
            total.rows_out += source.counts.rows_out
            for reason, number in source.counts.reasons.items():
                total.reasons[reason] = total.reasons.get(reason, 0) + number
        return total

    @property
    def record(self) -> list[dict[str, Any]]:
        return [source.record() for source in self._sources]

    def __iter__(self) -> Iterator[Conversation]:
        """Raises ValueError for a source that cannot be read, and where no row was usable (with the counts)."""
        limit, started, shown = self._data.max_rows, time.perf_counter(), time.perf_counter()
        for number, conversation in enumerate(self._mixed(), 1):
            yield conversation
            if number == limit:
                break
            if (now := time.perf_counter()) - shown > _PROGRESS_SECONDS:
                shown = now
                self._log(self._progress(number, now - started))
        for source in self._sources:
            source.counts.check()
            self._log(f"data: {source}" + ("" if source.ended else "; not read to its end"))
        if not self.counts.rows_out:
            names = ", ".join(source.config.path for source in self._sources)
            raise ValueError(
                f"{names}: no usable conversation: {self.counts}; expected rows in one of the layouts of "
                "train/layouts.py; change data.path or data.layout"
            )

    def _mixed(self) -> Iterator[Conversation]:
        weighted = self._sources[0].config.weight is not None
        active = [(source, self._usable(source), source.config.weight or 1.0) for source in self._sources]
        while active:
            turn = min(active, key=lambda part: (part[0].counts.rows_out + 1) / part[2])
            conversation = next(turn[1], None)
            if conversation is not None:
                yield conversation
            elif weighted:
                return
            else:
                active.remove(turn)

    def _usable(self, source: _Source) -> Iterator[Conversation]:
        counts = source.counts
        for row, share in raw_rows(source.config, source.name_in_config):
            source.share = share
            counts.rows_in += 1
            try:
                conversation = self._conversation(row, source)
            except Unusable as reason:
                counts.add(str(reason))
                continue
            counts.rows_out += 1
            yield conversation
        source.ended = True

    def _conversation(self, row: Any, source: _Source) -> Conversation:
        layout, messages, tools = parse_row(row, source.config.layout)
        if not source.layouts and source.config.layout == "auto":
            self._log(f"data: {source.config.path}: layout {layout}, by its first usable row")
        source.layouts[layout] = source.layouts.get(layout, 0) + 1
        given = row if isinstance(row, dict) else {}
        conversation = Conversation("", str(given.get("source") or source.name), messages, tools)
        if self._prepare is not None:
            conversation = self._prepare(conversation)
        key = conversation.content_key
        if self._data.duplicates == "drop":
            if key in self._seen:
                raise Unusable("duplicate")
            self._seen.add(key)
        if self._overlap is not None and (reason := self._overlap.reason(conversation)):
            raise Unusable(reason)
        name = next((given[n] for n in ("id", "question_id", "prompt_id") if given.get(n) is not None), key[:16])
        return replace(conversation, id=str(name))

    def _progress(self, number: int, seconds: float) -> str:
        text = f"data: {number} conversations, {number / seconds:.0f} a second"
        shares = [source.share for source in self._sources if not source.ended]
        done = 0.0 if any(share is None for share in shares) else min(share or 0.0 for share in shares)
        if self._data.max_rows is not None:
            done = max(done, number / self._data.max_rows)
        return text + (f", left about {seconds * (1 - done) / done / 60:.1f} min" if done > 0 else "")

"""Finished answers on disk, row by row: what a killed run leaves is what the next one starts from.

Every writer appends whole lines to a file of its own, so that a kill can tear no line but the last of a file, which is
then not counted. Rows are found by key, wherever they lie and whoever wrote them; of two equal keys the first counts.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from train.answering import Answer


@dataclass(frozen=True)
class Place:
    """Where a row lies, and what is needed without reading it again."""

    path: Path
    offset: int
    tokens: int
    reason: str | None
    reencoded: bool


class AnswerWriter:
    """Appends answers to a new file in `folder`."""

    def __init__(self, folder: Path) -> None:
        name = f"part-{time.time_ns():020d}-{os.getpid()}.jsonl"
        self._file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def write(self, answer: Answer) -> None:
        """One line in one write: it is in the file when this returns, whatever happens to the process."""
        row: dict[str, Any] = {"key": answer.key, "tokens": answer.tokens, "reason": answer.reason}
        if answer.reason is None:
            row |= {name: asdict(answer)[name] for name in ("input_ids", "spans", "truncated", "reencoded")}
        line = (json.dumps(row, separators=(",", ":")) + "\n").encode()
        written = os.write(self._file, line)
        if written != len(line):
            raise OSError(f"wrote {written} of {len(line)} bytes of an answer: is the disk full?")

    def close(self) -> None:
        os.close(self._file)


class AnswerStore:
    """All answers in a folder. `places` holds a small record per row; rows themselves stay on disk."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.places: dict[str, Place] = {}
        self._read: dict[Path, int] = {}  # bytes of each file that are known
        self.poll()

    def poll(self) -> None:
        """Takes notice of lines that were written since.

        Raises:
            ValueError: a line that is not the torn last one is no answer.
        """
        for path in sorted(self.folder.glob("part-*.jsonl")):
            known = self._read.get(path, 0)
            if path.stat().st_size == known:
                continue
            with path.open("rb") as file:
                file.seek(known)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    row = _parse(line, path, known)
                    self.places.setdefault(row["key"], _place(path, known, row))
                    known += len(line)
            self._read[path] = known

    def read(self, key: str) -> Answer:
        """The row, from disk."""
        place = self.places[key]
        with place.path.open("rb") as file:
            file.seek(place.offset)
            row = _parse(file.readline(), place.path, place.offset)
        if place.reason is not None:
            return Answer(key, place.reason)
        spans = tuple((start, stop) for start, stop in row["spans"])
        return Answer(key, None, tuple(row["input_ids"]), spans, row["truncated"], row["reencoded"])


def _place(path: Path, offset: int, row: dict[str, Any]) -> Place:
    return Place(path, offset, row["tokens"], row["reason"], row.get("reencoded", False))


def _parse(line: bytes, path: Path, offset: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if not isinstance(row, dict) or not {"key", "tokens", "reason"} <= row.keys():
            raise ValueError("not an answer")
    except ValueError as error:
        raise ValueError(
            f"{path}, byte {offset}: {error}; the file is damaged: delete it, and its answers are made again"
        ) from error
    return row

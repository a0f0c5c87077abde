"""Conversations and token rows: the row types of the data stages, split, and token rows on disk."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

from train.files import temporary

# {"role": "system" | "user" | "assistant" | "tool", "content": text}; an assistant's may have tool_calls (in OpenAI's
# form, the arguments an object) and reasoning_content, reasoning or thinking; a tool's name and tool_call_id.
Message = dict[str, Any]


def _digest(value: object) -> str:
    """32 hex digits of a JSON-able value, the same in every process and on every machine."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


@dataclass
class DropCounts:
    """What a stage did with its rows: rows in = rows out + dropped, by reason."""

    rows_in: int = 0
    rows_out: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str) -> None:
        """Count one dropped row."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    @property
    def dropped(self) -> int:
        return sum(self.reasons.values())

    def check(self) -> None:
        """Our own invariant: no row is lost uncounted."""
        assert self.rows_in == self.rows_out + self.dropped, f"rows do not add up: {self}"

    def __str__(self) -> str:
        text = f"{self.rows_out} of {self.rows_in} rows kept"
        ranked = sorted(self.reasons.items(), key=lambda item: (-item[1], item[0]))
        return text + "".join(f", {count} dropped ({reason})" for reason, count in ranked)


@dataclass(frozen=True)
class Conversation:
    """One checked conversation: an optional system message, then turns from the user on.

    Either user and assistant alternate (with tool results between an assistant's call and its next turn), or (prompts
    still to be answered) every turn is the user's. `tools`: JSON schemas that the template renders.
    """

    id: str
    source: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def content_key(self) -> str:
        """Hash of all that the template can render, the same whatever id or source the row has."""
        parts: list[object] = []
        for message in self.messages:
            more = {key: value for key, value in message.items() if key not in ("role", "content")}
            parts.append([message["role"], message["content"], *([more] if more else [])])
        return _digest([*parts, *self.tools])

    @property
    def split_key(self) -> str:
        """Hash of the first user turn: rows that share it share a side, and new answers do not move a row."""
        first = next((message["content"] for message in self.messages if message["role"] == "user"), "")
        return _digest(first)

    @property
    def is_prompt(self) -> bool:
        """Whether no assistant turn is there yet."""
        return all(message["role"] != "assistant" for message in self.messages)


@dataclass(frozen=True)
class TokenRow:
    """One training row. `spans`: half-open intervals of `input_ids` that the assistant produced, in order.

    Raises ValueError where spans are empty, unordered, overlapping or outside the row.
    """

    id: str
    input_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    source: str
    truncated: bool = False

    def __post_init__(self) -> None:
        end = 0
        for start, stop in self.spans:
            if not end <= start < stop <= len(self.input_ids):
                raise ValueError(
                    f"row {self.id!r}: span ({start}, {stop}) of {self.spans}, expected ordered, non-empty "
                    f"intervals inside 0..{len(self.input_ids)}"
                )
            end = stop

    @property
    def loss_mask(self) -> list[bool]:
        """Per token: whether the assistant produced it. Same length as `input_ids`."""
        mask = [False] * len(self.input_ids)
        for start, stop in self.spans:
            mask[start:stop] = [True] * (stop - start)
        return mask

    @property
    def supervised(self) -> int:
        """Number of tokens that the assistant produced."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def split_key(self) -> str:
        """Hash of the ids before the first answer: rows with one prompt share a side, whatever follows."""
        return _digest(self.input_ids[: self.spans[0][0]] if self.spans else self.input_ids)


# --- split --------------------------------------------------------------------------------------------------


class _HasSplitKey(Protocol):
    @property
    def split_key(self) -> str: ...


R = TypeVar("R", bound=_HasSplitKey)


def _draw(key: str, seed: int) -> float:
    """A number in [0, 1) that depends on the key and the seed only."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:6], "big") / 2**48


def is_held_out(key: str, fraction: float, seed: int) -> bool:
    """Whether the row with this key (use `split_key`) is held out, whatever other rows are there."""
    return _draw(key, seed) < fraction


def split_rows(rows: Sequence[R], fraction: float, seed: int) -> tuple[list[R], list[R]]:
    """(training rows, held-out rows), each in the given order; rows with one `split_key` stay together.

    With two rows or more neither side is empty: if the draw left one so, the rows with the most extreme draw
    move over (a single row, where all rows share one prompt). Split one kind of row only: the keys of a
    `Conversation` and of its `TokenRow` differ.
    """
    draws = [_draw(row.split_key, seed) for row in rows]
    held = [draw < fraction for draw in draws]
    if len(rows) >= 2 and len(set(held)) == 1:
        move = max(draws) if held[0] else min(draws)
        index = draws.index(move)
        together = len(set(draws)) > 1
        held = [
            not h if (draw == move and together) or i == index else h
            for i, (draw, h) in enumerate(zip(draws, held, strict=True))
        ]
    pairs = list(zip(rows, held, strict=True))
    return [row for row, h in pairs if not h], [row for row, h in pairs if h]


# --- token rows on disk -------------------------------------------------------------------------------------


class TokenRows(Sequence[TokenRow]):
    """Rows held compactly: 4 bytes a token instead of some 36. A row is put together when it is asked for."""

    def __init__(self, rows: Iterable[TokenRow] = ()) -> None:
        self._ids, self._ends = array("i"), array("q", [0])
        self._spans, self._span_ends = array("i"), array("q", [0])
        self._names: list[tuple[str, str]] = []
        self._truncated = bytearray()
        self._sources: dict[str, str] = {}  # each name once
        for row in rows:
            self.append(row)

    def append(self, row: TokenRow) -> None:
        self._ids.extend(row.input_ids)
        self._ends.append(len(self._ids))
        for span in row.spans:
            self._spans.extend(span)
        self._span_ends.append(len(self._spans))
        self._names.append((row.id, self._sources.setdefault(row.source, row.source)))
        self._truncated.append(row.truncated)

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...
    @overload
    def __getitem__(self, index: slice) -> TokenRows: ...
    def __getitem__(self, index: int | slice) -> TokenRow | TokenRows:
        if isinstance(index, slice):
            return TokenRows(self[i] for i in range(*index.indices(len(self))))
        i = range(len(self))[index]  # IndexError outside, and counts from the end
        ids = tuple(self._ids[self._ends[i] : self._ends[i + 1]])
        ends = iter(self._spans[self._span_ends[i] : self._span_ends[i + 1]])
        name, source = self._names[i]
        return TokenRow(name, ids, tuple(zip(ends, ends, strict=True)), source, bool(self._truncated[i]))


@contextmanager
def row_writer(path: str | Path) -> Iterator[Callable[[TokenRow], None]]:
    """Gives a function that writes a row as JSONL, under a temporary name beside `path`.

    At the end the file is renamed: it is whole or not there.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = temporary(path)
    try:
        with unfinished.open("w", encoding="utf-8", newline="\n") as file:

            def write(row: TokenRow) -> None:
                file.write(json.dumps(vars(row), separators=(",", ":")) + "\n")

            yield write
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_rows(path: str | Path, rows: Iterable[TokenRow]) -> None:
    """Writes all `rows` with `row_writer`."""
    with row_writer(path) as write:
        for row in rows:
            write(row)


def read_rows(path: str | Path) -> TokenRows:
    """Read what `write_rows` wrote. Raises ValueError naming the file and line of a malformed row."""
    rows = TokenRows()
    with Path(path).open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            try:
                rows.append(_row_from_dict(json.loads(line)))
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise ValueError(
                    f"{path}, line {number}: not a token row ({type(error).__name__}: {error}); delete the "
                    "file and make it again"
                ) from error
    return rows


def _row_from_dict(data: Any) -> TokenRow:
    if not isinstance(data, dict):
        raise ValueError(f"{type(data).__name__}, expected one JSON object a line")
    if unknown := set(data) - {"id", "input_ids", "spans", "source", "truncated"}:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    ids, spans, truncated = data["input_ids"], data["spans"], data["truncated"]
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError("input_ids is not a list of token ids")
    if not isinstance(spans, list) or not all(
        isinstance(span, list) and len(span) == 2 and all(type(end) is int for end in span) for span in spans
    ):
        raise ValueError("spans is not a list of [start, stop]")
    if not isinstance(truncated, bool) or not isinstance(data["id"], str) or not isinstance(data["source"], str):
        raise ValueError("id and source must be strings, truncated true or false")
    return TokenRow(data["id"], tuple(ids), tuple((a, b) for a, b in spans), data["source"], truncated)

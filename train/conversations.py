"""Conversations and token rows: the row types of the data stages, read, checked, deduplicated, split."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}

_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}


def _digest(value: object) -> str:
    """32 hex digits of a JSON-able value, the same in every process and on every machine."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
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

    Either user and assistant alternate, or (prompts still to be answered) every turn is the user's.
    """

    id: str
    source: str
    messages: tuple[Message, ...]

    @property
    def content_key(self) -> str:
        """Hash of the roles and texts, the same whatever id or source the row has."""
        return _digest([[message["role"], message["content"]] for message in self.messages])

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


# --- reading ------------------------------------------------------------------------------------------------


def _text(content: object) -> str | None:
    """Content as text: a string, or OpenAI text parts joined. None where it is something else."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    return None


def _raw_turns(row: Mapping[str, Any]) -> list[tuple[object, object]] | str:
    """(role, content) pairs as the row has them, or the reason to drop the row."""
    for key, role_key, content_key in (("messages", "role", "content"), ("conversations", "from", "value")):
        turns = row.get(key)
        if turns is None:
            continue
        if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
            return f"{key} is not a list of turns"
        pairs: list[tuple[object, object]] = [(turn.get(role_key), turn.get(content_key)) for turn in turns]
        if row.get("user_turns") is None:
            return pairs
        if any(_ROLES.get(str(role)) == "assistant" for role, _ in pairs):
            return pairs  # answers are there already: user_turns only repeats the questions
        system = [pair for pair in pairs if pair[0] == "system"]
        return system + _user_turns(row["user_turns"])
    for key in ("user_turns", "turns"):
        if row.get(key) is not None:
            return _user_turns(row[key])
    return "none of messages, conversations, user_turns, turns"


def _user_turns(turns: object) -> list[tuple[object, object]]:
    return [("user", turn) for turn in turns] if isinstance(turns, list) else [("user", turns)]


def _checked(row: Mapping[str, Any]) -> tuple[Message, ...] | str:
    """The row's messages in canonical form, or the reason to drop the row."""
    raw = _raw_turns(row)
    if isinstance(raw, str):
        return raw
    if not raw:
        return "empty"
    messages: list[Message] = []
    for role, content in raw:
        name = _ROLES.get(role) if isinstance(role, str) else None
        if name is None:
            return "unknown role"
        if content is None:
            return "null content"
        text = _text(content)
        if text is None or any("\ud800" <= char <= "\udfff" for char in text):  # half a character: no UTF-8
            return "content is not text"
        if not text.strip():
            return "empty content"
        messages.append({"role": name, "content": text})
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if not turns:
        return "no user turn"
    if turns[0] == "assistant":
        return "assistant first"
    alternating = ["user", "assistant"] * len(turns)
    if turns != alternating[: len(turns)] and turns != ["user"] * len(turns):
        return "not alternating"
    return tuple(messages)


def read_conversations(path: str | Path) -> tuple[list[Conversation], DropCounts]:
    """Read JSONL: OpenAI `messages`, ShareGPT `conversations`, prompts (`user_turns`, `turns`, user turns).

    Rows keep their order; of equal rows the first stays. Blank lines are no rows. Raises ValueError where the
    file cannot be read, a line is not a JSON object (with its number), or no row is left (with the counts).
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} cannot be read as UTF-8 text ({error}); change data.path") from error
    kept: list[Conversation] = []
    counts = DropCounts()
    seen: set[str] = set()
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: U+2028 may stand inside a JSON string
        if not line.strip():
            continue
        counts.rows_in += 1
        row = _json_object(line, path, number)
        messages = _checked(row)
        if isinstance(messages, str):
            counts.add(messages)
            continue
        conversation = Conversation("", str(row.get("source") or Path(path).stem), messages)
        key = conversation.content_key
        if key in seen:
            counts.add("duplicate")
            continue
        seen.add(key)
        given = next((row[name] for name in ("id", "question_id") if row.get(name) is not None), key[:16])
        kept.append(Conversation(str(given), conversation.source, messages))
    counts.rows_out = len(kept)
    counts.check()
    if not kept:
        raise ValueError(
            f"{str(path)!r} has no usable conversation: {counts}; expected JSONL rows with messages, "
            "conversations, user_turns or turns; change data.path"
        )
    return kept, counts


def _json_object(line: str, path: str | Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not valid JSON ({error}); expected one JSON object a line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}, line {number}: {type(row).__name__}, expected one JSON object a line")
    return row


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


def write_rows(path: str | Path, rows: Iterable[TokenRow]) -> None:
    """Write JSONL under a temporary name beside `path`, then rename: the file is whole or not there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            for row in rows:
                file.write(json.dumps(asdict(row), separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_rows(path: str | Path) -> list[TokenRow]:
    """Read what `write_rows` wrote. Raises ValueError naming the file and line of a malformed row."""
    rows = []
    with Path(path).open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            data = _json_object(line, path, number)
            try:
                rows.append(_row_from_dict(data))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number}: not a token row ({type(error).__name__}: {error}); delete the "
                    "file and make it again"
                ) from error
    return rows


def _row_from_dict(data: Mapping[str, Any]) -> TokenRow:
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

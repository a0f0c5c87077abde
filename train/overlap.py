"""What evaluation files share with training conversations.

A conversation overlaps if its first user turn equals that of an evaluation row, or if any of its user turns shares
8 consecutive words with any of theirs. Words are compared in lower case and without punctuation; a Chinese or Japanese
character is a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from train.config import SourceConfig
from train.conversations import Conversation, Message
from train.layouts import Unusable, parse_row
from train.raw_rows import raw_rows

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
_GRAM = 8

SAME = "overlaps data.exclude: the same first turn"
SHARED = f"overlaps data.exclude: {_GRAM} words in a row"


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _grams(words: Sequence[str]) -> Iterator[str]:
    return (" ".join(words[i : i + _GRAM]) for i in range(len(words) - _GRAM + 1))


def _user_words(messages: Sequence[Message]) -> list[list[str]]:
    return [_words(message["content"]) for message in messages if message["role"] == "user"]


class Overlap:
    """The first turns and word sequences of evaluation files, which are held in memory."""

    def __init__(self, paths: Sequence[str], log: Callable[[str], None]) -> None:
        """Raises ValueError for a file that cannot be read or has no usable row."""
        self._first: set[str] = set()
        self._grams: set[str] = set()
        for number, path in enumerate(paths):
            field, usable, other = f"data.exclude[{number}]", 0, 0
            for row, _ in raw_rows(SourceConfig(path), field):
                try:
                    turns = _user_words(parse_row(row)[1])
                except Unusable:
                    other += 1
                    continue
                usable += 1
                self._learn(turns)
            if not usable:
                raise ValueError(f"{field}: {path} has no usable row of {other}; expected prompts or conversations")
            log(f"data: {path}: {usable} rows to be left out of training, {other} unusable")

    def _learn(self, turns: Sequence[Sequence[str]]) -> None:
        """Words of the user turns of one row."""
        self._first.add(" ".join(turns[0]))
        self._grams.update(gram for words in turns for gram in _grams(words))

    def reason(self, conversation: Conversation) -> str | None:
        """Why the conversation must be left out, or None."""
        turns = _user_words(conversation.messages)
        if " ".join(turns[0]) in self._first:
            return SAME
        return SHARED if any(gram in self._grams for words in turns for gram in _grams(words)) else None

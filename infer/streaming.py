"""Text out of token ids while they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class TextStream:
    """Writes text as soon as it is certain: never half a UTF-8 character, never text that a later token
    changes.

    Only a window of the last tokens is decoded again. It starts at tokens already written, because a token's
    text may depend on the one before it (a leading space, say). Special tokens are left out.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._ids: list[int] = []
        self._start = 0  # of the window
        self._written = 0  # tokens whose text is written

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def push(self, ids: Sequence[int]) -> None:
        """Takes the next tokens and writes what they complete."""
        self._ids += ids
        self._emit(complete=False)

    def finish(self) -> None:
        """Writes what is held back; an unfinished character comes out as U+FFFD."""
        self._emit(complete=True)

    def _emit(self, complete: bool) -> None:
        before = self._decode(self._ids[self._start : self._written])
        now = self._decode(self._ids[self._start :])
        if len(now) <= len(before) or (now.endswith("\N{REPLACEMENT CHARACTER}") and not complete):
            return
        self._write(now[len(before) :])
        self._start, self._written = self._written, len(self._ids)

"""Text out of token ids while they are decoded."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

from infer.stopping import (
    REPLACEMENT,
    Place,
    StopMatcher,
    StopReason,
    TokenBytes,
    check_stop_strings,
    decode_text,
    fallback_byte,
    text_before,
)

TokenKind = Literal["accepted", "corrected", "plain"]

_COLOURS: dict[TokenKind, str] = {"accepted": "\033[32m", "corrected": "\033[33m", "plain": ""}  # green, yellow
_RESET = "\033[0m"


class ColourWriter:
    """Writes text in the colour of its kind: accepted drafts green, the target's corrections yellow, the rest as is.

    Every coloured piece ends with a reset, and `close` writes one more, for a piece that was cut short.
    """

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def __call__(self, text: str, kind: TokenKind = "plain") -> None:
        colour = _COLOURS[kind]
        self._write(f"{colour}{text}{_RESET}" if colour else text)

    def close(self) -> None:
        self._write(_RESET)


class TextStream:
    """Writes text as soon as it is certain: whole characters, never text that a later token changes, nothing of a
    stop string.

    All that is written in the end is the tokenizer's own text of all ids, without special tokens, up to the first
    stop string. Only a window of the last tokens is decoded again. It starts at tokens already written, because a
    token's text may depend on the one before it (a leading space, say).

    Held back are: an unfinished character; a run of byte-fallback tokens, of which one bad byte spoils the whole; and
    text that may become a stop string. After a stop string nothing more is written (`stopped`).

    Args:
        write: called with each piece of text; a `ColourWriter` is told its kind too.
        stop_strings, prompt_ids: those of the row's `RowStop`; a stop string may begin in the prompt.

    Raises:
        ValueError: a stop string is empty or has no UTF-8 form.
    """

    def __init__(
        self,
        tokenizer: Any,
        write: Callable[[str], object] | ColourWriter,
        stop_strings: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
    ) -> None:
        check_stop_strings(stop_strings)
        self._tokenizer, self._write = tokenizer, write
        self._token_bytes = TokenBytes(tokenizer)
        self._matcher = StopMatcher(stop_strings, self._token_bytes, prompt_ids) if stop_strings else None
        self.stopped = False
        self._ids: list[int] = []
        self._byte_run: int | None = None  # where the byte-fallback tokens at the end begin
        self._id_kinds: list[TokenKind] = []
        self._start = 0  # of the window, in tokens
        self._done = 0  # tokens whose text is all written; those from the window's start on are its context
        self._text = ""  # of the window
        self._context = 0  # its characters that come from its context
        self._written = 0  # its characters that are written

    def push(self, ids: Sequence[int], kinds: Sequence[TokenKind] | None = None) -> None:
        """Takes the next tokens and writes what they complete.

        kinds: of each id, for a `ColourWriter`; None: all plain. A character takes the kind of the last token that
        has a part in it. Raises ValueError if the lengths differ.
        """
        if kinds is not None and len(kinds) != len(ids):
            raise ValueError(f"kinds has {len(kinds)} entries, expected {len(ids)}; give one per id")
        if self.stopped or not ids:
            return
        place = None
        plain: Sequence[TokenKind] = ["plain"] * len(ids)
        for token, kind in zip(ids, plain if kinds is None else kinds, strict=True):
            self._add(token, kind)
            place = None if self._matcher is None else self._matcher.push(token)
            if place is not None:
                break
        self._text = decode_text(self._tokenizer, self._ids[self._start :])
        if place is not None:
            self._write_until(self._characters_before(place))
            self.stopped = True
            return
        pending = None if self._matcher is None else self._matcher.pending()
        limit = self._settled()
        self._write_until(limit if pending is None else min(limit, self._characters_before(pending)))
        self._move_window(len(self._ids) if pending is None else max(0, pending[0]))

    def finish(self, reason: StopReason | None = None) -> None:
        """Writes what is held back; an unfinished character comes out as U+FFFD.

        reason: the row's. Raises ValueError if that is "string" and this stream saw no stop string.
        """
        if reason == "string" and not self.stopped:
            raise ValueError("the row ended at a stop string that the stream does not know; give it the stop_strings")
        if not self.stopped:
            self._write_until(len(self._text))
        if isinstance(self._write, ColourWriter):
            self._write.close()

    def _add(self, token: int, kind: TokenKind) -> None:
        if fallback_byte(self._tokenizer, token) is not None:
            self._byte_run = len(self._ids) if self._byte_run is None else self._byte_run
        # A special token does not end the run: it is taken out before bytes are joined.
        elif self._byte_run is not None and decode_text(self._tokenizer, [token]):
            self._byte_run = None
        self._ids.append(token)
        self._id_kinds.append(kind)

    def _settled(self) -> int:
        """Characters of the window that no later token changes."""
        if self._byte_run is not None:
            return len(decode_text(self._tokenizer, self._ids[self._start : self._byte_run]))
        # At most 3 bytes wait for a fourth: more replacement characters than that stand for bytes that never fit.
        return max(len(self._text.rstrip(REPLACEMENT)), len(self._text) - 3)

    def _characters_before(self, place: Place) -> int:
        token, offset = place
        # A place in the prompt, or the first tokens: nothing is written yet, and the window has not moved.
        assert token >= self._start or self._start == 0, f"token {token} is before the window at {self._start}"
        return text_before(self._tokenizer, self._token_bytes, self._ids[self._start :], (token - self._start, offset))

    def _write_until(self, limit: int) -> None:
        piece = self._text[self._written : limit]
        if not piece:
            return
        if isinstance(self._write, ColourWriter):
            kinds = self._character_kinds()[self._written : limit]
            for kind, group in groupby(zip(piece, kinds, strict=True), key=itemgetter(1)):
                self._write("".join(character for character, _ in group), kind)
        else:
            self._write(piece)
        self._written = limit

    def _character_kinds(self) -> list[TokenKind]:
        """The kind of each character of the window: that of the token with its last byte.

        Only how many U+FFFD a broken run of byte-fallback tokens makes is not known here: those may be off.
        """
        kinds = list[TokenKind]()
        start, in_bytes = self._start, False
        for place in range(self._start, len(self._ids) + 1):
            if place < len(self._ids):
                is_byte = fallback_byte(self._tokenizer, self._ids[place]) is not None
                if is_byte == in_bytes or self._token_bytes.special(self._ids[place]):
                    continue
            else:
                is_byte = in_bytes
            length = len(decode_text(self._tokenizer, self._ids[self._start : place])) - len(kinds)
            found = self._kinds_of(start, place)
            if in_bytes:
                kinds += [*found, *found[-1:] * (length - len(found))][:length]
            else:  # decoders differ from the bytes at the start of a text: a space less, or the "##" of a word piece
                missing = length - len(found)
                kinds += [self._id_kinds[start]] * missing + found[max(0, -missing) :]
            start, in_bytes = place, is_byte
        return kinds

    def _kinds_of(self, start: int, stop: int) -> list[TokenKind]:
        """The kinds of the characters that these tokens' bytes make."""
        if start == stop:
            return []
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        kinds, before = list[TokenKind](), self._id_kinds[start]
        for token, kind in zip(self._ids[start:stop], self._id_kinds[start:stop], strict=True):
            for byte in b"" if self._token_bytes.special(token) else self._token_bytes(token):
                # With a byte that ends no character come at most the broken ones before it.
                ended = len(decoder.decode(bytes([byte])))
                own = int(ended > 0 and not decoder.getstate()[0])
                kinds += [before] * (ended - own) + [kind] * own
                before = kind
        return kinds + [before] * len(decoder.decode(b"", final=True))

    def _move_window(self, pending: int) -> None:
        """Tokens whose text has been written become the context of the next ones, and the old context is left.

        pending: the token in which a stop string may have begun; else the number of tokens.
        """
        if self._byte_run is not None:
            pending = min(pending, self._byte_run)
        elif self._text.endswith(REPLACEMENT):
            pending = min(pending, max(self._done, len(self._ids) - 4))
        before = decode_text(self._tokenizer, self._ids[self._start : pending])
        # Only where the text can be parted: not inside a character, nor so that the context has no text.
        if not self._context < len(before) <= self._written or not self._text.startswith(before):
            return
        self._start, self._done = self._done, pending
        self._text = decode_text(self._tokenizer, self._ids[self._start :])
        self._context = len(decode_text(self._tokenizer, self._ids[self._start : pending]))
        self._written += self._context - len(before)

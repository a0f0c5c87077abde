"""When a generation ends, exact to the token even in the middle of an accepted block.

`StopRule` says what ends a generation, `RowStop` applies it to one row. Stop strings are looked for in bytes: every
token has the bytes it adds in the middle of a text, so half a character is no special case and nothing is decoded
twice. Special tokens take part with their own text, so "<|im_end|>" can be a stop string.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from transformers import StoppingCriteria

StopReason = Literal["eos", "length", "string", "criteria"]
# A place in a text of tokens: (token, byte inside it). Token 0 is the first new one, the prompt's last is -1.
Place = tuple[int, int]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Characters that byte-level vocabularies write for bytes: printable ones for themselves, others from U+0100."""
    printable = {chr(byte): byte for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
    others = [byte for byte in range(256) if chr(byte) not in printable]
    return printable | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


def decode_text(tokenizer: Any, ids: Sequence[int], special: bool = False) -> str:
    """The text of the ids as the tokenizer gives it, with or without its special tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def fallback_byte(tokenizer: Any, token: int) -> int | None:
    """The byte of a byte-fallback token ("<0xE2>"), None for any other token."""
    name = tokenizer.convert_ids_to_tokens(token)
    match = _BYTE_TOKEN.fullmatch(name) if isinstance(name, str) else None
    return int(match[1], 16) if match else None


class TokenBytes:
    """The bytes that each token adds to a text it is not the first token of; b"" for an id the tokenizer lacks."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._special: dict[int, bool] = {}

    def __call__(self, token: int) -> bytes:
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def special(self, token: int) -> bool:
        """Whether the token has bytes to match and yet no text."""
        if token not in self._special:
            shown, all_text = (decode_text(self._tokenizer, [token], special) for special in (False, True))
            self._special[token] = bool(all_text) and not shown
        return self._special[token]

    def _find(self, token: int) -> bytes:
        once = decode_text(self._tokenizer, [token], special=True)
        if REPLACEMENT in once:  # part of a character: only the vocabulary says which bytes
            name = self._tokenizer.convert_ids_to_tokens(token)
            if isinstance(name, bytes):
                return name
            byte = fallback_byte(self._tokenizer, token)
            if byte is not None:
                return bytes([byte])
            if all(char in _BYTE_LEVEL for char in name):
                return bytes(_BYTE_LEVEL[char] for char in name)
        # Behind itself the token keeps the leading space that a decoder may drop at the start of a text.
        return decode_text(self._tokenizer, [token, token], special=True)[len(once) :].encode()


class StopMatcher:
    """Finds stop strings in a growing text of tokens, looking at no more than their length.

    A string counts if its end lies in a new token. It may begin in the prompt, as in transformers 5.24
    (`StopStringCriteria` sees prompt and new tokens alike); one that lies in the prompt as a whole does not count.
    """

    def __init__(self, stop_strings: Sequence[str], token_bytes: TokenBytes, prompt_ids: Sequence[int] = ()) -> None:
        self._stops = [string.encode() for string in stop_strings]
        self._token_bytes = token_bytes
        self._keep = max(map(len, self._stops)) - 1  # bytes: what an unfinished stop string can have at most
        self._tail, self._places = b"", list[Place]()  # the last bytes, and where each one is
        self._tokens = 0
        first = len(prompt_ids)
        while first and len(self._tail) < self._keep:
            first -= 1
            piece = token_bytes(prompt_ids[first])
            self._tail = piece + self._tail
            self._places = [(first - len(prompt_ids), at) for at in range(len(piece))] + self._places
        self._trim()

    def push(self, token: int) -> Place | None:
        """Takes the next token; returns where the first of the stop strings begins that it completes."""
        piece, before = self._token_bytes(token), len(self._tail)
        self._tail += piece
        self._places += [(self._tokens, at) for at in range(len(piece))]
        self._tokens += 1
        starts = [self._tail.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops]
        first = min((start for start in starts if start >= 0), default=None)
        found = None if first is None else self._places[first]
        self._trim()
        return found

    def pending(self) -> Place | None:
        """Where the text begins that could still become a stop string."""
        for at in range(len(self._tail)):
            rest = self._tail[at:]
            if any(stop.startswith(rest) for stop in self._stops):
                return self._places[at]
        return None

    def _trim(self) -> None:
        drop = max(0, len(self._tail) - self._keep)
        self._tail, self._places = self._tail[drop:], self._places[drop:]


def text_before(tokenizer: Any, token_bytes: TokenBytes, ids: Sequence[int], place: Place) -> int:
    """Characters that the text of `ids` (special tokens left out) has before a place in it."""
    token, offset = place
    if token < 0:
        return 0
    before = len(decode_text(tokenizer, ids[:token]))
    if not offset:
        return before
    behind = token_bytes(ids[token])[offset:].decode(errors="replace")
    # The maximum is for a special token, which has bytes to match and no text.
    return max(before, len(decode_text(tokenizer, ids[: token + 1])) - len(behind))


@dataclass(frozen=True)
class StopRule:
    """Ends at the first of: an end-of-sequence token, a stop string, a criterion, `max_new_tokens` emitted tokens.

    The token that ends the generation is emitted, and nothing after it.

    eos_ids: every id that ends a turn (may be empty); max_new_tokens: tokens, at least 1, EOS included;
    stop_strings: texts that end it as soon as a token completes one, at its end or in the middle; tokenizer: needed
    with stop strings; criteria: any transformers `StoppingCriteria`, asked after every emitted token.
    Raises ValueError if max_new_tokens < 1, a stop string is empty or has no UTF-8 form, or the tokenizer is missing.
    """

    eos_ids: frozenset[int]
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()
    tokenizer: Any = field(default=None, repr=False, compare=False)
    criteria: Sequence[StoppingCriteria] = ()
    # Shared by all rows.
    token_bytes: TokenBytes | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A list or set given by a caller is fine, and so is one string.
        object.__setattr__(self, "eos_ids", frozenset(self.eos_ids))
        strings = self.stop_strings
        object.__setattr__(self, "stop_strings", (strings,) if isinstance(strings, str) else tuple(strings))
        object.__setattr__(self, "criteria", tuple(self.criteria))
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, expected at least 1; raise max_new_tokens")
        check_stop_strings(self.stop_strings)
        if self.stop_strings:
            if self.tokenizer is None:
                raise ValueError(f"stop_strings is {self.stop_strings}, which needs the tokenizer; set tokenizer")
            object.__setattr__(self, "token_bytes", TokenBytes(self.tokenizer))

    def cut(self, new_tokens: Sequence[int], already_emitted: int) -> tuple[list[int], StopReason | None]:
        """What of a decided block is emitted, and why the generation ends there (None: it goes on).

        For rules of EOS and length alone, which need no memory; `RowStop` applies every rule.

        new_tokens: the block in order; already_emitted: tokens emitted before it, the prefill's included. EOS
        comes out as the last token and nothing after it; the limit is exact; if both fall on one token the
        reason is "eos". Raises ValueError if the rule has stop strings or criteria.
        """
        if self.stop_strings or self.criteria:
            raise ValueError("StopRule.cut knows no stop strings and no criteria, and this rule has some; use RowStop")
        assert already_emitted >= 0, f"already_emitted is {already_emitted}"
        budget = max(self.max_new_tokens - already_emitted, 0)
        emitted = list(new_tokens[:budget])
        for index, token in enumerate(emitted):
            if token in self.eos_ids:
                return emitted[: index + 1], "eos"
        return emitted, "length" if len(emitted) == budget else None


def check_stop_strings(strings: Sequence[str]) -> None:
    """Raises ValueError for a stop string that is empty or cannot be written as UTF-8."""
    for string in strings:
        if not string:
            raise ValueError(f"stop_strings is {tuple(strings)!r}, expected no empty string; leave it out")
        try:
            string.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"stop_strings has {string!r}, which has no UTF-8 form; leave it out") from error


class RowStop:
    """One row's progress under a `StopRule`: what it emitted, and why it ended.

    new_ids: the tokens emitted so far; reason: None while the row goes on. If several rules end the row at the same
    token, the reason is the first of "eos", "string", "criteria", "length".
    text_cut: set when the row's last token completes a stop string (whatever the reason): the characters of
    `decode_text(tokenizer, new_ids)` before that string, 0 if it begins in the prompt; of several strings completed
    at once, the one that begins first counts.

    Args:
        prompt_ids: the row's prompt, without padding.
        device: of the `input_ids` that criteria are given; default: the CPU.
    """

    def __init__(self, rule: StopRule, prompt_ids: Sequence[int], device: torch.device | str | None = None) -> None:
        self.rule = rule
        self.new_ids: list[int] = []
        self.reason: StopReason | None = None
        self.text_cut: int | None = None
        self._matcher: StopMatcher | None = None
        if rule.token_bytes is not None:
            self._matcher = StopMatcher(rule.stop_strings, rule.token_bytes, prompt_ids)
        self._prompt_tokens = len(prompt_ids)
        if rule.criteria:  # room for the whole row, so that a token costs one write
            self._ids_1S = torch.zeros(1, len(prompt_ids) + rule.max_new_tokens, dtype=torch.long, device=device)
            self._ids_1S[0, : len(prompt_ids)] = torch.tensor(list(prompt_ids), dtype=torch.long, device=device)

    def push(self, block: Sequence[int]) -> tuple[list[int], StopReason | None]:
        """What of the next decided block is emitted, and why the row ends there (None: it goes on).

        A row that has ended emits nothing more and repeats its reason.
        """
        before = len(self.new_ids)
        if self.reason is None:
            for token in block:
                self.new_ids.append(token)
                self.reason = self._reason_after(token)
                if self.reason is not None:
                    break
        return self.new_ids[before:], self.reason

    def _reason_after(self, token: int) -> StopReason | None:
        place = None if self._matcher is None else self._matcher.push(token)
        if place is not None:
            assert self.rule.token_bytes is not None, "a matcher without token bytes"
            self.text_cut = text_before(self.rule.tokenizer, self.rule.token_bytes, self.new_ids, place)
        met = bool(self.rule.criteria) and self._criteria_met(token)
        if token in self.rule.eos_ids:
            return "eos"
        if place is not None:
            return "string"
        if met:
            return "criteria"
        return "length" if len(self.new_ids) >= self.rule.max_new_tokens else None

    def _criteria_met(self, token: int) -> bool:
        length = self._prompt_tokens + len(self.new_ids)
        self._ids_1S[0, length - 1] = token
        # All are asked, as in transformers: a criterion may count its calls.
        answers = [bool(criterion(self._ids_1S[:, :length], None)) for criterion in self.rule.criteria]
        return any(answers)

"""When a generation ends, exact to the token even in the middle of an accepted block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

StopReason = Literal["eos", "length"]


@dataclass(frozen=True)
class StopRule:
    """Ends at the first end-of-sequence token (which is emitted) or after `max_new_tokens` emitted tokens.

    eos_ids: every id that ends a turn (may be empty); max_new_tokens: tokens, at least 1, EOS included.
    Raises ValueError if max_new_tokens < 1.
    """

    eos_ids: frozenset[int]
    max_new_tokens: int

    def __post_init__(self) -> None:
        # A list or set given by a caller is fine.
        object.__setattr__(self, "eos_ids", frozenset(self.eos_ids))
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, expected at least 1; raise max_new_tokens")

    def cut(self, new_tokens: Sequence[int], already_emitted: int) -> tuple[list[int], StopReason | None]:
        """What of a decided block is emitted, and why the generation ends there (None: it goes on).

        new_tokens: the block in order; already_emitted: tokens emitted before it, the prefill's included. EOS
        comes out as the last token and nothing after it; the limit is exact; if both fall on one token the
        reason is "eos".
        """
        assert already_emitted >= 0, f"already_emitted is {already_emitted}"
        budget = max(self.max_new_tokens - already_emitted, 0)
        emitted = list(new_tokens[:budget])
        for index, token in enumerate(emitted):
            if token in self.eos_ids:
                return emitted[: index + 1], "eos"
        return emitted, "length" if len(emitted) == budget else None

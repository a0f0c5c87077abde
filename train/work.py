"""Rows that are still to be made, handed out to processes or threads, each once."""

from __future__ import annotations

import multiprocessing.context
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from train.conversations import Conversation


@dataclass(frozen=True)
class Task:
    """A row: what to answer, or None for one that is invented."""

    key: str
    conversation: Conversation | None


class Work:
    """A queue shared by processes (passed to them when they start) or threads; iterating takes rows from it.

    Args:
        tasks: the rows, or None for `total` invented ones with the keys of `invented_key`.
        done: keys to leave out.
    """

    def __init__(
        self,
        context: multiprocessing.context.SpawnContext,
        tasks: Sequence[Task] | None,
        total: int,
        done: Collection[str],
    ) -> None:
        self._tasks = None if tasks is None else [task for task in tasks if task.key not in done]
        self._done = frozenset(done) if tasks is None else frozenset()
        self._total = total if self._tasks is None else len(self._tasks)
        self._next = context.Value("q", 0)
        self._allowed = context.Value("q", 0 if self.invents else self._total)
        self._tokens = context.Value("q", 0)
        self._inexact = context.Value("b", 0)

    @property
    def invents(self) -> bool:
        return self._tasks is None

    @property
    def missing(self) -> int:
        """Rows to make, at most."""
        return self._total - len(self._done)

    @property
    def tokens(self) -> int:
        """Tokens made so far, of whatever became of them."""
        return int(self._tokens.value)

    def count(self, tokens: int) -> None:
        with self._tokens.get_lock():
            self._tokens.value += tokens

    @property
    def exact(self) -> bool:
        """Whether rows did not depend on each other's company, as far as anybody said."""
        return not self._inexact.value

    @exact.setter
    def exact(self, value: bool) -> None:
        self._inexact.value = not value

    def allow(self, rows: int) -> None:
        """Rows from number `rows` on are held back for now."""
        self._allowed.value = min(self._total, max(rows, self._allowed.value))

    def __iter__(self) -> Iterator[Task | None]:
        """Rows until there are no more; None: none at the moment."""
        while True:
            with self._next.get_lock():
                number = self._next.value
                if number >= self._total:
                    return
                free = number < self._allowed.value
                self._next.value += free
            if not free:
                yield None
            elif self._tasks is not None:
                yield self._tasks[number]
            elif (key := invented_key(number)) not in self._done:
                yield Task(key, None)


def invented_key(number: int) -> str:
    """Of the invented row with this number."""
    return f"self-{number}"

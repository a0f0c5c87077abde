"""Maps of a reduced draft vocabulary: d2t, offsets of draft ids, and t2d, the mask of target ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """where: the field or tensor. found, expected: both sides, as text."""

    where: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.where} is {self.found}, expected {self.expected}"


def d2t_problems(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> Iterator[Problem]:
    """What is wrong with a map of the draft vocabulary, offsets [Vd], beside the mask t2d [V]."""
    ids = d2t.long() + torch.arange(len(d2t))
    if is_absolute(d2t, t2d, vocab_size):
        yield Problem("d2t", "target ids", "offsets: draft id + d2t is a target id")
        return
    if len(d2t) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        found = f"mapping to ids {int(ids.min())} .. {int(ids.max())}"
        yield Problem("d2t", found, f"offsets: draft id + d2t is a target id, 0 .. {vocab_size - 1}")
        return
    if not bool((ids.diff() > 0).all()):
        yield Problem("d2t", "not ascending", "draft ids in the order of their target ids, each once")
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids.sort().values):
        yield Problem("t2d", "another set than d2t", "true for the target ids of d2t alone")


def is_absolute(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> bool:
    """Whether a map holds target ids instead of offsets: as t2d says, or since they are no offsets.

    Target ids that would do as offsets, too, and have no t2d beside them, are taken for offsets.
    """
    ids, values = d2t.long() + torch.arange(len(d2t)), d2t.long().sort().values
    if t2d is not None:
        kept = t2d.bool().nonzero()[:, 0]
        return torch.equal(kept, values) and not torch.equal(kept, ids.sort().values)
    fits = len(d2t) > 1 and bool((values.diff() > 0).all()) and int(values[0]) >= 0 and int(values[-1]) < vocab_size
    return fits and int(ids.max()) >= vocab_size

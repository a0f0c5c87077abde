"""Head kinds by name. A new head is a new file and one line here."""

from __future__ import annotations

from heads.base import DraftHead
from heads.config import HeadConfig
from heads.eagle import EagleHead

HEADS: dict[str, type[DraftHead]] = {"eagle": EagleHead}


def head_class(kind: str) -> type[DraftHead]:
    """Raises ValueError for an unknown kind, listing those there are."""
    if kind not in HEADS:
        raise ValueError(f"head.kind is {kind!r}, expected one of {', '.join(sorted(HEADS))}")
    return HEADS[kind]


def build_head(config: HeadConfig) -> DraftHead:
    return head_class(config.kind)(config)

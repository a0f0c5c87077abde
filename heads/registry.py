"""Head classes by kind. A new head is a new file, one line here, and an entry in `heads.kinds`."""

from __future__ import annotations

from heads.base import DraftHead
from heads.config import HeadConfig
from heads.eagle import EagleHead
from heads.eagle3 import Eagle3Head
from heads.kinds import kind_of
from heads.medusa import HydraHead, MedusaHead

HEADS: dict[str, type[DraftHead]] = {
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "medusa": MedusaHead,
    "hydra": HydraHead,
}


def build_head(config: HeadConfig) -> DraftHead:
    """Raises ValueError for an unknown kind, listing those there are."""
    kind_of(config.kind)
    return HEADS[config.kind](config)

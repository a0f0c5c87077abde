"""The layouts by name."""

from __future__ import annotations

from heads.formats import for_eagle, for_hydra, for_medusa, for_sglang, for_speculators, for_trtllm, for_vllm
from heads.formats.layout import Layout

_MODULES = (for_vllm, for_sglang, for_eagle, for_medusa, for_hydra, for_speculators, for_trtllm)
LAYOUTS: dict[str, Layout] = {module.LAYOUT.name: module.LAYOUT for module in _MODULES}


def layout_of(name: str) -> Layout:
    """Raises ValueError for an unknown name, listing those there are."""
    if name not in LAYOUTS:
        raise ValueError(f"--to is {name!r}, expected one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]

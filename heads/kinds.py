"""Head kinds by name, and what a training config may ask of each. Imports nothing heavy: config checks use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """What a kind of head can be asked for, with its defaults; everything else is an error, not ignored.

    entry: the training command. options: fields of `head` beside those of every kind. loss: fields of `loss`.
    joint: whether the target can be trained together with it (Medusa-2).
    """

    entry: str
    options: Mapping[str, Any]
    loss: Mapping[str, Any]
    joint: bool = False


# What `loss.divergence` can be (`heads.divergences` has the formulas).
DIVERGENCES = (
    "soft_ce",
    "forward_kl",
    "reverse_kl",
    "total_variation",
    "top_k_ce",
    "acceptance",
    "log_acceptance",
)

_MEDUSA = Kind(
    entry="train/medusa.py",
    options={"heads": 4, "blocks": 1, "projection": "shared"},
    loss={"token_weight": 1.0, "divergence": "soft_ce", "hard_weight": 0.0, "step_decay": 0.8},
    joint=True,
)

KINDS: dict[str, Kind] = {
    "eagle": Kind(
        entry="train/eagle.py",
        options={},
        loss={
            "feature_weight": 1.0,
            "token_weight": 0.1,
            "divergence": "soft_ce",
            "noise": 0.1,
            "unroll_steps": 1,
            "unroll_from": 0.0,
            "step_decay": 0.8,
        },
    ),
    "eagle3": Kind(
        entry="train/eagle.py",
        options={
            "projection": "own",
            "taps": None,
            "fc_norm": False,
            "norm_output": False,
            "norm_before_residual": False,
        },
        loss={
            "token_weight": 1.0,
            "divergence": "soft_ce",
            "hard_weight": 0.0,
            "noise": 0.0,
            "unroll_steps": 3,
            "unroll_from": 0.0,
            "step_decay": 0.8,
        },
    ),
    "medusa": _MEDUSA,
    "hydra": _MEDUSA,
}


def kind_of(name: str) -> Kind:
    """Raises ValueError for an unknown kind, listing those there are."""
    if name not in KINDS:
        raise ValueError(f"head.kind is {name!r}, expected one of {', '.join(sorted(KINDS))}")
    return KINDS[name]

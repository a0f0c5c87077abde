"""Held-out evaluation, teacher-forced on the target's own answers: accuracy per depth, simulated accept length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator

from heads.base import DraftHead, LossSpec
from heads.divided import settle
from train.batching import make_batch, plan_batches
from train.conversations import TokenRow
from train.features import Features
from train.strategies import computing_in


@dataclass(frozen=True)
class Evaluation:
    """Figures over the supervised roots of the held-out rows.

    accept_length: simulated tau of a chain of drafts: the answers are decoded again with it, round by round, a draft
        being accepted if it is the target's argmax there (`heads.base.replay`). That is the decoder's own tau on such a
        text; the mean over all roots would count easy stretches, through which decoding takes few rounds, too often.
    accuracy[k]: share of supervised positions of step k that agree, whatever happened before.
    conditional[k]: the same among roots whose steps before k all agreed.
    """

    accept_length: float
    accuracy: list[float]
    conditional: list[float]
    feature_loss: float
    token_loss: float
    roots: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(counts: dict[str, float], steps: int) -> Evaluation:
    """From the summed counts of `DraftHead.forward(measure=True)`."""
    roots = counts["positions/0"]
    prefix = [counts[f"prefix/{k}"] for k in range(steps)]
    tried = [counts[f"tried/{k}"] for k in range(steps)]
    return Evaluation(
        accept_length=counts["emitted"] / max(counts["rounds"], 1.0),
        accuracy=[counts[f"match/{k}"] / max(counts[f"positions/{k}"], 1.0) for k in range(steps)],
        conditional=[a / max(b, 1.0) for a, b in zip(prefix, tried, strict=True)],
        feature_loss=counts["feature_loss/0"] / max(roots, 1.0),
        token_loss=counts["token_loss/0"] / max(roots, 1.0),
        roots=int(roots),
    )


@torch.no_grad()
def evaluate(
    head: DraftHead,
    rows: Sequence[TokenRow],
    features: Features | Sequence[torch.Tensor],
    depth: int,
    tokens_per_batch: int,
    accelerator: Accelerator,
    dtype: torch.dtype,
) -> Evaluation:
    """Runs `depth` unrolled steps of the (whole) head on every row, its mode as before. Ranks share the batches."""
    was_training, device = head.training, head.target.head_device
    head.eval()
    totals: dict[str, torch.Tensor] = {}
    batches = plan_batches([len(r.input_ids) for r in rows], tokens_per_batch, 0, 0, packed=True)
    loss = LossSpec(1.0, 1.0, 1.0)
    names = ["rounds", "emitted"]
    for k in range(depth):
        names += [f"{n}/{k}" for n in ("feature_loss", "token_loss", "positions", "match", "tried", "prefix")]
    for indices in batches[accelerator.process_index :: accelerator.num_processes]:
        batch = make_batch(
            [rows[i] for i in indices],
            features.read(indices) if isinstance(features, Features) else [features[i] for i in indices],
            depth,
            head.needs,
            packed=tokens_per_batch,
            dtype=dtype,
            device=device,
        )
        with computing_in(dtype, device):
            out = head(batch, loss, measure=True)
        for name in names:
            totals[name] = totals.get(name, torch.zeros((), device=device)) + out.counts[name]
    settle(head.target)
    vector = torch.stack([totals.get(name, torch.zeros((), device=device)).double() for name in names])
    vector = accelerator.reduce(vector, "sum")
    head.train(was_training)
    return summarise(dict(zip(names, vector.tolist(), strict=True)), depth)

"""What joint training (Medusa-2) adds to a step of the loop: a live target, its loss, its drift.

From `joint.start` of the run on, heads read the features of the target with its LoRA, and

    loss = KL(original || adapted), mean over the answers' positions + head_weight * the heads' loss

where the original is the same target with the LoRA off (self-distillation): its features are those in the cache, so
that no second pass is needed. It is also the heads' teacher.

Sources: Cai et al., "Medusa" (arXiv 2401.10774), sections 2.2.2 and 2.3.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor

from heads.base import HeadBatch
from heads.target import TargetAdapter
from train.config import JointConfig
from train.conversations import TokenRow
from train.features import Features, padded_rows
from train.joint import (
    LoraTarget,
    TargetDrift,
    adapted_features,
    add_lora,
    answer_mask,
    target_drift,
    target_loss_sum,
)


@dataclass
class Together:
    """The trainable target of a run. active: both are being trained; before, the heads alone."""

    config: JointConfig
    lora: LoraTarget
    active: bool = False
    drift: TargetDrift | None = None  # as last measured
    _window: list[float] = field(default_factory=lambda: [0.0, 0.0])  # KL and positions since the last log line

    @classmethod
    def build(cls, config: JointConfig, target: TargetAdapter, seed: int) -> Together:
        """Puts the LoRA into the target; features of the original must have been cached before."""
        lora = add_lora(target, config.rank, config.alpha, config.dropout, config.modules, seed)
        return cls(config, lora)

    def due(self, share: float) -> bool:
        """Whether joint training starts at that share of the run."""
        return not self.active and self.config.start is not None and share >= self.config.start

    def live(self, rows: Sequence[TokenRow], batch: HeadBatch) -> tuple[HeadBatch, Tensor]:
        """The batch with features of the adapted target, with gradient, and its hidden states [B, T, H]."""
        ids, valid = padded_rows(rows)
        device = self.lora.target.device
        hidden_BTH = self.lora.hidden_states(ids.to(device), valid.to(device))
        assert hidden_BTH.shape[:2] == batch.valid_BT.shape, "one rule of padding"
        return dataclasses.replace(batch, feature_BTH=hidden_BTH.to(batch.feature_BTH.dtype)), hidden_BTH

    def target_loss(self, rows: Sequence[TokenRow], features: Sequence[Tensor], hidden_BTH: Tensor) -> Tensor:
        """KL(original || adapted), summed over the answers' positions."""
        mask = answer_mask(rows, hidden_BTH.shape[1])
        teacher_RH = torch.cat([f[mask[i, : len(f)], : hidden_BTH.shape[2]] for i, f in enumerate(features)])
        mine_RH = hidden_BTH[mask.to(hidden_BTH.device)]
        return target_loss_sum(mine_RH, teacher_RH.to(mine_RH.device), self.lora.target.logits)

    @staticmethod
    def positions(rows: Sequence[TokenRow]) -> int:
        """How many positions `target_loss` sums over."""
        return sum(int(answer_mask([row], len(row.input_ids)).sum()) for row in rows)

    def share_gradients(self, accelerator: Accelerator) -> None:
        """Averages the LoRA's gradients over the ranks, as DDP does those of the heads."""
        if accelerator.num_processes == 1:
            return
        for parameter in self.lora.parameters():
            if parameter.grad is None:  # no supervised position on this rank
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = accelerator.reduce(parameter.grad, "mean")

    def log(self, kl_sum: float, positions: float) -> None:
        self._window[0] += kl_sum
        self._window[1] += positions

    def take(self) -> dict[str, float]:
        """For the log line: mean KL since the last one."""
        if not self.active:
            return {}
        kl, positions = self._window
        self._window = [0.0, 0.0]
        return {"target_kl": round(kl / max(positions, 1.0), 6)}

    def measure(self, rows: Sequence[TokenRow], base: Features) -> list[Tensor]:
        """Measures the drift and returns the adapted target's features of every row, which heads are evaluated on."""
        features = adapted_features(self.lora, rows)
        self.drift = target_drift(self.lora.target, rows, base, features)
        return features

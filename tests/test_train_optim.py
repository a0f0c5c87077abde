"""Schedule and optimizer."""

from __future__ import annotations

import pytest
import torch

from heads.base import trainable_parameters
from tests.tiny import tiny_head, tiny_target
from train.config import OptimConfig, TrainConfig
from train.optim import build_optimizer, learning_rate, progress_of


def test_schedule_by_hand() -> None:
    config = OptimConfig(lr=1.0, warmup_ratio=0.1, min_lr_ratio=0.2)
    assert learning_rate(0.0, config) == 0.0
    assert learning_rate(0.05, config) == pytest.approx(0.5)
    assert learning_rate(0.1, config) == pytest.approx(1.0)
    assert learning_rate(0.55, config) == pytest.approx(0.6)  # half-way down from 1 to 0.2
    assert learning_rate(1.0, config) == learning_rate(1.5, config) == pytest.approx(0.2)
    assert learning_rate(0.0, OptimConfig(lr=1.0, warmup_ratio=0.0)) == 1.0


def test_the_closest_limit_counts() -> None:
    assert progress_of(TrainConfig(max_steps=10), 5, 99.0, 1e9) == 0.5
    assert progress_of(TrainConfig(max_minutes=2), 5, 0.0, 60.0) == 0.5
    both = TrainConfig(max_steps=100, epochs=2, max_minutes=10)
    assert progress_of(both, 10, 1.5, 60.0) == 0.75


def test_optimizer_holds_the_head_and_nothing_of_the_target() -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    optimizer = build_optimizer(head.parameters(), OptimConfig(weight_decay=0.1))
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in held) == trainable_parameters(head)
    assert not {id(p) for p in held} & {id(p) for p in target.model.parameters()}
    for group in optimizer.param_groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] > 0) for p in group["params"])
    assert isinstance(optimizer, torch.optim.AdamW)

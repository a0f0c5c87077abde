"""Optimizer and schedule. The learning rate follows progress through the run, whatever limits it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from train.config import OptimConfig, TrainConfig


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters only; norms and other vectors are not decayed."""
    trainable = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, fused=True)


def add_group(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], lr_scale: float) -> None:
    """Further parameters, whose learning rate is always `lr_scale` times the others'; they are not decayed."""
    optimizer.add_param_group({"params": list(parameters), "weight_decay": 0.0, "lr_scale": lr_scale})


def learning_rate(progress: float, config: OptimConfig) -> float:
    """Linear warm-up over the first `warmup_ratio` of the run, then a cosine to lr * min_lr_ratio. progress: 0..1."""
    if progress < config.warmup_ratio:
        return config.lr * progress / config.warmup_ratio
    rest = min(1.0, (progress - config.warmup_ratio) / max(1e-9, 1.0 - config.warmup_ratio))
    cosine = 0.5 * (1.0 + math.cos(math.pi * rest))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


def progress_of(config: TrainConfig, step: int, epochs: float, seconds: float) -> float:
    """Share of the run that is done, by whichever limit is closest; 1 or more means finished."""
    shares = [
        done / limit
        for done, limit in (
            (step, config.max_steps),
            (epochs, config.epochs),
            (seconds / 60, config.max_minutes),
        )
        if limit is not None
    ]
    return max(shares)

"""Tiny heads written in the layouts of engines, for tests."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.base import DraftHead
from heads.checkpoint import save_head
from heads.formats.export import export_head
from heads.formats.files import read_folder
from heads.formats.layout import Target
from heads.formats.opening import NATIVE, OpenedHead
from heads.formats.registry import LAYOUTS
from heads.target import TargetAdapter
from tests.tiny import CONFIGS, tiny_head, tiny_target

H, V, LAYERS = 64, 512, 8  # width, vocabulary and layers of the target
IDS = torch.arange(5, 5 + 3 * 100, 3)  # a draft vocabulary


def odd_target() -> TargetAdapter:
    """With enough layers for the engines' default ones."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.num_hidden_layers, config.head_dim = LAYERS, 24  # not hidden_size / heads
    config.rope_parameters = {"rope_type": "default", "rope_theta": 777.0}
    return tiny_target(config)


def even_target() -> TargetAdapter:
    """With head_dim = hidden_size / heads, as the EAGLE repository needs it."""
    config = copy.deepcopy(CONFIGS["llama"])
    config.num_hidden_layers = LAYERS
    return tiny_target(config)


def facts(target: TargetAdapter) -> Target:
    def rows(ids: Tensor | None) -> Tensor:
        found = target.lm_head_rows(ids)
        assert found is not None
        return found[0]

    return Target(target.config, rows, "org/target")


def a_head(target: TargetAdapter, kind: str, vocab: bool = False, scale: float = 1.0, **options: Any) -> DraftHead:
    head = tiny_head(target, kind=kind, **options)
    if not vocab and scale == 1.0:
        return head
    config = replace(head.config, draft_vocab_size=len(IDS) if vocab else None, embedding_scale=scale)
    other = type(head)(config)
    if vocab:
        other.set_draft_vocab(IDS)
    for name, parameter in other.named_parameters():
        parameter.data = 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
        parameter.data += 1.0 if "norm" in name else 0.0
    other.eval().bind(target)
    return other


def exported(target: TargetAdapter, head: DraftHead, to: str, folder: Path, **more: Any) -> Path:
    opened = OpenedHead(save_head(head, folder / "head"), NATIVE, head.config)
    return export_head(opened, LAYOUTS[to], facts(target), folder / to, **more)


def fields_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return read_folder(folder).tensors


def shapes(folder: Path) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in tensors_of(folder).items()}


def with_token_map(folder: Path, ids: Tensor = IDS) -> Path:
    """A Medusa head in vLLM's layout as others write it for a draft vocabulary."""
    tensors = tensors_of(folder)
    tensors |= {"lm_heads.0.weight": tensors["lm_heads.0.weight"][ids].clone(), "token_map": ids}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields_of(folder) | {"truncated_vocab_size": len(ids)}))
    return folder

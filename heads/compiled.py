"""Compiled passes of a target and drafts of a head: static shapes, so that one compilation serves all rounds of all
generations.

A pass is padded to one of a few sizes, keys are written by index, and attention sees the whole capacity of the cache
behind a mask. The logits are those of the eager pass (other kernels round differently).

Shapes: B rows, N tokens of a pass, M tokens after padding, S slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo import config as dynamo_config

from heads.cache import SlotCache

SIZES = (1, 4, 8, 16, 32, 64)  # tokens of a compiled pass; each size met is compiled once
CAPACITY_STEP = 256  # slots: caches are rounded up to it, so that generations share their shapes
_Result = TypeVar("_Result")
_SHAPES = 1 << 16  # by default torch compiles 8 shapes of a function and runs all others eagerly


def static(function: Callable[..., _Result], mode: str = "default") -> Callable[..., _Result]:
    """The function compiled for every shape it meets, each once."""
    run = torch.compile(function, dynamic=False, mode=mode)

    def call(*args: Any) -> _Result:
        with dynamo_config.patch(recompile_limit=_SHAPES, accumulated_recompile_limit=_SHAPES):
            return run(*args)

    return call


class StaticPasses:
    """Runs a model's passes compiled. torch.compile on a CPU; with CUDA graphs ("reduce-overhead") on a GPU."""

    def __init__(self, model: Any, cache_name: str) -> None:
        self._model, self._cache_name = model, cache_name
        mode = "reduce-overhead" if model.device.type == "cuda" else "default"
        self._run = static(self._forward, mode)

    def fits(self, tokens: int) -> bool:
        return tokens <= SIZES[-1]

    @staticmethod
    def capacity(slots: int) -> int:
        """Slots of a cache for `slots` tokens and the padding of a pass behind them."""
        return -(-(slots + SIZES[-1]) // CAPACITY_STEP) * CAPACITY_STEP

    def __call__(
        self, ids_BN: Tensor, position_BN: Tensor, masks: Tensor | dict[str, Tensor], cache: SlotCache
    ) -> Tensor:
        """Logits [B, N, V] of a pass. Hooks on the model see M >= N tokens."""
        tokens = ids_BN.shape[1]
        padding = next(size for size in SIZES if size >= tokens) - tokens
        if padding:
            ids_BN = F.pad(ids_BN, (0, padding))
            # Any position will do, but one within the model's range; the mask hides all from padding, harmlessly.
            position_BN = torch.cat([position_BN, position_BN[:, :1].expand(-1, padding)], 1)
        masks = {k: _whole(m, padding) for k, m in masks.items()} if isinstance(masks, dict) else _whole(masks, padding)
        start_B1 = torch.tensor(cache.lengths, device=ids_BN.device)[:, None]
        cache.place(start_B1 + torch.arange(tokens + padding, device=ids_BN.device))
        # Contiguous: another stride would be compiled for anew.
        logits_BMV = self._run(ids_BN.contiguous(), position_BN.contiguous(), masks, cache)
        return logits_BMV[:, :tokens] if padding else logits_BMV

    def _forward(self, ids: Tensor, position: Tensor, masks: Any, cache: SlotCache) -> Tensor:
        kwargs = {self._cache_name: cache}
        out = self._model(input_ids=ids, position_ids=position, attention_mask=masks, use_cache=True, **kwargs)
        logits: Tensor = out.logits
        return logits


def _whole(mask_B1NS: Tensor, padding: int) -> Tensor:
    """With rows for the padding, in memory of its own: a view into wider memory would have another stride each time."""
    if padding:
        return F.pad(mask_B1NS, (0, 0, 0, padding), value=torch.finfo(mask_B1NS.dtype).min)
    return mask_B1NS.contiguous()

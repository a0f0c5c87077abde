"""Attention masks per kind of layer: full, sliding window, or chunks.

A window or a chunk is a rule about positions. Tree nodes lie in cache slots that are not their positions, so the
model's own rule, which counts slots, would hide the wrong keys; here the rule is part of the mask.

Shapes: B rows, N query tokens, S key slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.tree import additive_mask

Masks = Tensor | dict[str, Tensor]  # one for all layers, or one per kind of layer

# kind of layer -> the config field with its size in tokens
_SIZES = {"full_attention": None, "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_WITHOUT_ATTENTION = ("moe", "mlp")


class LayerMasks:
    """Which kinds of layers a model has, and a mask for each.

    Args:
        config: the (text) config. Without `layer_types`, a window or chunk size in it holds for every layer, as in
            transformers' own caches.

    Raises:
        ValueError: layers with a window or chunks, but no size for them.
    """

    def __init__(self, config: Any) -> None:
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            kinds = [next((kind for kind, field in _SIZES.items() if field and _size(config, field)), "full_attention")]
        else:
            kinds = kinds[: config.num_hidden_layers]
        found = sorted(set(kinds) - set(_WITHOUT_ATTENTION))
        self.foreign: tuple[str, ...] = tuple(kind for kind in found if kind not in _SIZES)
        """Kinds of layers that no mask of ours describes (recurrent, convolution, sparse index)."""
        self.sizes: dict[str, int | None] = {}
        """Kind of layer -> tokens of its window or chunk; None: unlimited."""
        for kind in found:
            if kind in _SIZES:
                field = _SIZES[kind]
                self.sizes[kind] = size = _size(config, field) if field else None
                if field and not size:
                    raise ValueError(
                        f"config.{field} is {getattr(config, field, None)!r}, expected a number of tokens: "
                        f"config.layer_types has {kind}"
                    )

    @property
    def plain(self) -> bool:
        """Only full attention: one mask, which no position changes."""
        return all(size is None for size in self.sizes.values())

    def build(
        self, visible_BNS: Tensor, query_position_BN: Tensor, key_position_BS: Tensor, dtype: torch.dtype
    ) -> Masks:
        """Additive masks [B, 1, N, S]: 0 where visible and within reach, finfo(dtype).min elsewhere.

        Args:
            visible_BNS: bool, what each query may see with unlimited reach (the past, its ancestors, no padding).
            query_position_BN, key_position_BS: positions of the queries and of the tokens in the slots; 1 row serves
                for all. What an invisible slot has there does not matter.
        """
        query, key = query_position_BN[:, :, None], key_position_BS[:, None, :]
        masks: dict[str, Tensor] = {}
        for kind, size in self.sizes.items():
            near = visible_BNS
            if size is not None:
                chunked = kind == "chunked_attention"
                near = visible_BNS & (key // size == query // size if chunked else key > query - size)
            masks[kind] = additive_mask(near, dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _size(config: Any, field: str) -> int | None:
    value = getattr(config, field, None)
    return value if isinstance(value, int) and value > 0 else None

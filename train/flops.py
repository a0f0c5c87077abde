"""The arithmetic that a training step and a pass of the target need: FLOPs of matrix products, from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from heads.base import DraftHead
from heads.drafter import HiddenStateDrafter
from heads.target import TargetAdapter


@dataclass(frozen=True)
class Product:
    """`count` products of [rows, inner] with [inner, outer], gradients included (they have the same FLOPs)."""

    rows: int
    inner: int
    outer: int
    count: int

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.outer * self.count


@dataclass(frozen=True)
class StepSize:
    """positions: of the batch. roots: those that are drafted from. checked: those that any step drafts."""

    steps: int
    positions: int
    roots: int
    checked: int


def step_products(head: DraftHead, size: StepSize, dense: bool = False) -> list[Product]:
    """All matrix products of a training step but those of attention: 3 per trained matrix, less what nothing needs.

    No gradient flows to a constant input (features, EAGLE-1's detached states), nor to a frozen LM head; the teacher
    goes forward only. Ours runs the supervised roots after step 0's queries, keys and values; dense (`train/dense.py`)
    is given as many roots as positions, and makes the teacher's logits for every step.
    """
    config = head.config
    width, vocab = config.hidden_size, config.draft_vocab_size or config.vocab_size
    found = _drafting(head, size) if isinstance(head, HiddenStateDrafter) else _side_by_side(head, size)
    found.append(Product(size.checked, width, vocab, (3 if config.own_projection else 2) * size.steps))
    found.append(Product(size.checked, width, vocab, size.steps if dense else 1))  # the teacher
    return found


def _drafting(head: HiddenStateDrafter, size: StepSize) -> list[Product]:
    config, attention, mlp = head.config, head.layer.self_attn, head.layer.mlp
    found = []
    for k in range(size.steps):
        rows = size.roots if k else size.positions
        if k == 0 or config.kind == "eagle":  # EAGLE-1 joins by its matrix at every step, EAGLE-3 reads by it once
            found.append(_product(rows, cast(Any, head.fc).weight, 3 if config.fc_norm else 2))
        found += [_product(rows, one.weight, 3) for one in (attention.q_proj, attention.k_proj, attention.v_proj)]
        rest = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        found += [_product(size.roots, one.weight, 3) for one in rest]
    return found


def _side_by_side(head: DraftHead, size: StepSize) -> list[Product]:
    """Medusa, Hydra: the first block of each head reads constants."""
    found = []
    for blocks in list(cast(Any, head.blocks))[: size.steps]:
        found += [_product(size.checked, layer.weight, 3 if m else 2) for m, layer in enumerate(blocks.layers)]
    return found


def _product(rows: int, weight: Tensor, count: int) -> Product:
    return Product(rows, weight.shape[1], weight.shape[0], count)


def draft_attention_flops(head: DraftHead, steps: int, pairs: float) -> float:
    """Of the head's own attention; pairs: of a query and a key it sees (backward 2.5 times the forward)."""
    config = head.config
    if not isinstance(head, HiddenStateDrafter):
        return 0.0
    return 3.5 * 4 * config.num_attention_heads * config.head_dim * pairs * steps


def target_flops_per_token(target: TargetAdapter) -> int:
    """Of the target's layers, forward, without attention's scores and mixtures and without the LM head.

    Experts (matrices side by side in one tensor) count as many times as one token uses them.
    """
    chosen = getattr(target.config, "num_experts_per_tok", None)
    outside = {id(p) for module in target.model.modules() if _embeds(module) for p in module.parameters(recurse=False)}
    outside |= {id(p) for p in target.lm_head.parameters()}
    total = 0
    for parameter in target.model.parameters():
        if parameter.ndim >= 2 and id(parameter) not in outside:
            used = chosen if chosen and parameter.ndim == 3 else 1
            total += 2 * parameter.numel() * used // (len(parameter) if parameter.ndim == 3 else 1)
    return total


def _embeds(module: Any) -> bool:
    return "Embedding" in type(module).__name__


def target_attention_flops(target: TargetAdapter, pairs: float) -> float:
    """Of scores and mixtures in all layers, forward; pairs: of a query and a key, hidden ones included."""
    config = target.config
    heads = config.num_attention_heads
    keys = values = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "qk_rope_head_dim", None):  # latent attention
        keys, values = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    return 2 * heads * (keys + values) * pairs * target.num_layers

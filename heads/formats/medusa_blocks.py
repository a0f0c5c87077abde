"""What the Medusa layouts share: residual blocks and LM heads under different names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.config import HeadConfig
from heads.formats.layout import State, Table, Target


def medusa_table(config: HeadConfig) -> Table:
    """Names and shapes of Medusa's parameters in our own form: K heads of M blocks, and an LM head for each if own."""
    hidden = config.hidden_size
    table: Table = {}
    for k in range(config.num_draft_heads or 0):
        for m in range(config.num_blocks or 0):
            table[f"blocks.{k}.layers.{m}.weight"] = (hidden, hidden)
            table[f"blocks.{k}.layers.{m}.bias"] = (hidden,)
    if config.own_projection:
        for k in range(config.num_draft_heads or 0):
            table[f"lm_heads.{k}.weight"] = (config.draft_vocab_size or config.vocab_size, hidden)
    return table


def shared_lm_head(state: State, config: HeadConfig, target: Target) -> Tensor:
    """The target's LM head, of the draft vocabulary, in the head's dtype: [V or Vd, H]."""
    ids = None if config.draft_vocab_size is None else state["draft_token_ids"]
    return target.lm_head(ids).to(state["blocks.0.layers.0.weight"].dtype)


def own_lm_heads(state: State, config: HeadConfig, target: Target) -> list[Tensor]:
    """An LM head [V, H] for each head: its own, or the target's again and again."""
    heads = config.num_draft_heads or 0
    if config.own_projection:
        return [state[f"lm_heads.{k}.weight"] for k in range(heads)]
    return [shared_lm_head(state, config, target)] * heads


def with_biases(blocks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our blocks have biases: zeros where a layout has none."""
    missing = {
        name.removesuffix("weight") + "bias": weight.new_zeros(len(weight))
        for name, weight in blocks.items()
        if name.startswith("blocks.") and name.endswith(".weight")
    }
    return missing | blocks


def has_biases(state: State) -> bool:
    """Whether any block's bias is not 0: without them heads are smaller, and older loaders take them."""
    return any(bool(state[name].any()) for name in state if name.startswith("blocks.") and name.endswith(".bias"))


def medusa_config(
    tensors: State,
    vocab_size: int,
    target: Target | None,
    own: bool,
    draft_vocab: int | None = None,
    kind: str = "medusa",
) -> HeadConfig:
    """A Medusa (or Hydra) head's config from its tensors in our names. What only decoder layers need is filled in."""
    heads = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    blocks = 1 + max(int(name.split(".")[3]) for name in tensors if name.startswith("blocks."))
    hidden = len(tensors["blocks.0.layers.0.bias"])
    options: dict[str, Any] = {"heads": heads, "blocks": blocks, "projection": "own" if own else "shared"}
    if target is not None:
        return HeadConfig.derive(kind, target.config, vocab_size, "", None, draft_vocab, options=options)
    return HeadConfig(
        kind=kind,
        target="",
        target_revision=None,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=hidden,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=2048,
        draft_vocab_size=draft_vocab,
        num_draft_heads=heads,
        num_blocks=blocks,
        own_projection=own,
    )


def ascending(ids: Tensor, heads: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A draft vocabulary's ids in ascending order, and the LM heads' rows in that order."""
    order = torch.argsort(ids)
    return ids[order].long(), {name: weight[order] for name, weight in heads.items()}

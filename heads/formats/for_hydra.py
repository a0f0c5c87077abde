"""The original Hydra repository (zankner): its `HydraMLP` with grounded heads, `hydra_lm_head.pt`.

Its first block reads the feature and the embeddings side by side and has a linear map in place of the residual; ours
takes the feature itself, which is the map [identity, 0, ..]. Its LM heads are its own, with a bias.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from heads.config import HeadConfig
from heads.formats.layout import Files, Form, Layout, State, Table, Target, refuse
from heads.formats.llama import scaled_columns
from heads.formats.medusa_blocks import medusa_config, own_lm_heads

_NAME = "hydra"
WEIGHTS = "hydra_lm_head.pt"  # the only name that its loader reads; a dictionary of tensors
_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.(weight|bias)")
_LM_HEAD = re.compile(r"hydra_lm_head\.(\d+)\.weight")


def write_hydra(state: State, config: HeadConfig, target: Target) -> Files:
    """Embedding scales go into the first blocks; every head gets an LM head, its own or the target's.

    Raises:
        ValueError: a draft vocabulary; or more than two blocks (the repository repeats one block behind the first).
    """
    refuse(_NAME, config, "draft_vocab_size", None, "it drafts from the whole vocabulary (--whole-vocabulary)")
    if target.scales_embeddings:
        raise ValueError(
            f"--to {_NAME}: the target ({target.config.model_type!r}) scales its embeddings, Hydra does not"
        )
    heads, blocks, hidden = config.num_draft_heads or 0, config.num_blocks or 0, config.hidden_size
    if blocks > 2:
        raise ValueError(
            f"--to {_NAME}: the head's num_blocks is {blocks}, expected 1 or 2: behind its first block the repository "
            "repeats one and the same"
        )
    tensors: dict[str, Tensor] = {}
    lm_heads = own_lm_heads(state, config, target)
    for k in range(heads):
        for m in range(blocks):
            for part in ("weight", "bias"):
                tensors[f"hydra_mlp.{k}.{m}.linear.{part}"] = state[f"blocks.{k}.layers.{m}.{part}"]
        first = state[f"blocks.{k}.layers.0.weight"]
        tensors[f"hydra_mlp.{k}.0.linear.weight"] = scaled_columns(
            first, hidden, first.shape[1], config.embedding_scale
        )
        tensors[f"hydra_mlp.{k}.0.res_connection.weight"] = _identity(first)
        tensors[f"hydra_mlp.{k}.0.res_connection.bias"] = first.new_zeros(hidden)
        tensors[f"hydra_lm_head.{k}.weight"] = lm_heads[k]
        tensors[f"hydra_lm_head.{k}.bias"] = first.new_zeros(len(lm_heads[k]))
    fields = {
        "hydra_num_heads": heads,
        "hydra_num_layers": blocks,
        "hydra_head_arch": "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": target.name,
    }
    return Files(fields, tensors, WEIGHTS)


def _identity(weight: Tensor) -> Tensor:
    """The map [H, (k + 2) H] that takes the feature and leaves the rest."""
    return torch.eye(len(weight), weight.shape[1], dtype=weight.dtype)


def read_hydra(files: Files, target: Target | None) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Heads whose residual is the feature itself.

    Raises:
        ValueError: another residual, a bias of an LM head, or another head than grounded MLPs.
    """
    fields = files.config
    if fields.get("hydra_head_arch", "mlp") != "mlp" or not fields.get("grounded_heads", False):
        raise ValueError(
            f"config.json: hydra_head_arch is {fields.get('hydra_head_arch')!r} with grounded_heads "
            f"{fields.get('grounded_heads')!r}, expected 'mlp' and true: Draftsmith has no other Hydra heads"
        )
    state: dict[str, Tensor] = {}
    for name, value in files.tensors.items():
        if found := _BLOCK.fullmatch(name):
            state["blocks.{}.layers.{}.{}".format(*found.groups())] = value
        elif found := _LM_HEAD.fullmatch(name):
            state[f"lm_heads.{found[1]}.weight"] = value
        elif name.endswith("res_connection.weight"):
            if not torch.equal(value, _identity(value)):
                raise ValueError(f"{name} is a trained map; a residual other than the feature itself has no place here")
        elif not name.endswith(".bias") or bool(value.any()):
            raise ValueError(f"the Hydra head's {name} has no place in ours")
    vocab = len(state["lm_heads.0.weight"])
    return medusa_config(state, vocab, target, True, kind="hydra"), state


def hydra_names(config: HeadConfig, fields: Any) -> Table:
    hidden, vocab = config.hidden_size, config.vocab_size
    table: Table = {}
    for k in range(config.num_draft_heads or 0):
        for m in range(config.num_blocks or 0):
            width = (k + 2) * hidden if m == 0 else hidden
            table |= {f"hydra_mlp.{k}.{m}.linear.weight": (hidden, width), f"hydra_mlp.{k}.{m}.linear.bias": (hidden,)}
        table[f"hydra_mlp.{k}.0.res_connection.weight"] = (hidden, (k + 2) * hidden)
        table[f"hydra_mlp.{k}.0.res_connection.bias"] = (hidden,)
        table |= {f"hydra_lm_head.{k}.weight": (vocab, hidden), f"hydra_lm_head.{k}.bias": (vocab,)}
    return table


LAYOUT = Layout(
    name=_NAME,
    engine="the Hydra repository",
    kinds={"hydra": Form(write_hydra, read_hydra, hydra_names)},
    missing={
        "medusa": "its heads read the tokens drafted before (--to medusa)",
        "eagle": "it has no EAGLE",
        "eagle3": "it has no EAGLE",
    },
)

"""The original Medusa repository (FasterDecoding) and text-generation-inference: `medusa_lm_head.safetensors`.

Version 1 has an LM head for each head; version 2 uses the target's for all, and has one block per head. The
repository's own loader builds one block per head and repeats it, so that it is right for one block only; TGI builds
them all.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from heads.config import HeadConfig
from heads.formats.layout import Files, Form, Layout, State, Target, refuse
from heads.formats.medusa_blocks import medusa_config, own_lm_heads, with_biases

_NAME = "medusa"
WEIGHTS = "medusa_lm_head.safetensors"
_BLOCK = re.compile(r"(?:medusa_heads\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
_LM_HEAD = re.compile(r"(?:medusa_heads\.)?(\d+)\.(\d+)\.weight")


def write_medusa(state: State, config: HeadConfig, target: Target) -> Files:
    """Version 2 for heads of one block that share the target's LM head, else version 1, where each has one stored."""
    refuse(_NAME, config, "draft_vocab_size", None, "it drafts from the whole vocabulary (--whole-vocabulary)")
    heads, blocks = config.num_draft_heads or 0, config.num_blocks or 0
    tensors: dict[str, Tensor] = {}
    for k in range(heads):
        for m in range(blocks):
            for part in ("weight", "bias"):
                tensors[f"{k}.{m}.linear.{part}"] = state[f"blocks.{k}.layers.{m}.{part}"]
    shared = not config.own_projection and blocks == 1
    if not shared:
        tensors |= {f"{k}.{blocks}.weight": weight for k, weight in enumerate(own_lm_heads(state, config, target))}
    fields = {
        "medusa_num_heads": heads,
        "medusa_num_layers": blocks,
        "base_model_name_or_path": target.name,
        "version": "2" if shared else "1",
    }
    return Files(fields, tensors, WEIGHTS)


def read_medusa(files: Files, target: Target | None) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Also ModelOpt's prefix `medusa_heads.`.

    Raises:
        ValueError: a tensor of another name; or LM heads are missing and the target, which decides the vocabulary, too.
    """
    blocks: dict[str, Tensor] = {}
    heads: dict[str, Tensor] = {}
    for name, value in files.tensors.items():
        if found := _BLOCK.fullmatch(name):
            blocks["blocks.{}.layers.{}.{}".format(*found.groups())] = value
        elif found := _LM_HEAD.fullmatch(name):
            heads[f"lm_heads.{found[1]}.weight"] = value
        else:
            raise ValueError(f"the Medusa head has a tensor {name!r}, expected HEAD.BLOCK.linear.weight and the like")
    state = with_biases(blocks)
    if heads:
        vocab = len(next(iter(heads.values())))
    elif target is not None:
        vocab = int(target.config.vocab_size)
    else:
        raise ValueError("the Medusa head shares the target's LM head, so its vocabulary is needed: give --target")
    return medusa_config(state, vocab, target, bool(heads)), state | heads


def medusa_names(config: HeadConfig, fields: Any) -> dict[str, tuple[int, ...]]:
    hidden, blocks = config.hidden_size, config.num_blocks or 0
    table: dict[str, tuple[int, ...]] = {}
    for k in range(config.num_draft_heads or 0):
        for m in range(blocks):
            table |= {f"{k}.{m}.linear.weight": (hidden, hidden), f"{k}.{m}.linear.bias": (hidden,)}
        if fields.get("version") != "2":
            table[f"{k}.{blocks}.weight"] = (config.vocab_size, hidden)
    return table


LAYOUT = Layout(
    name=_NAME,
    engine="the Medusa repository and TGI",
    kinds={"medusa": Form(write_medusa, read_medusa, medusa_names)},
    missing={
        "hydra": "its heads do not read the tokens drafted before",
        "eagle": "it has no EAGLE",
        "eagle3": "it has no EAGLE",
    },
)

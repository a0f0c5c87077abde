"""TensorRT-LLM: Medusa under ModelOpt's names, EAGLE-3 as ModelOpt exports it (`layers.0`, no t2d)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from heads.config import HeadConfig
from heads.formats.layout import Files, Form, Layout, State, Table, Target, dtype_name, refuse
from heads.formats.llama import (
    check_layer,
    check_taps,
    eagle3_table,
    eagle3_tensors,
    llama_fields,
    read_eagle3,
    sglang_hidden_ids,
    tap_fields,
)
from heads.formats.medusa_blocks import medusa_config, own_lm_heads, with_biases

_NAME = "trtllm"
_BLOCK = re.compile(r"medusa_heads\.(\d+)\.medusa_layers\.(\d+)\.linear\.(weight|bias)")
_LM_HEAD = re.compile(r"medusa_heads\.(\d+)\.lm_head\.weight")


def write_eagle3(state: State, config: HeadConfig, target: Target) -> Files:
    """draft_vocab_size is what it knows EAGLE-3 by. The residual is the raw hidden state there."""
    check_layer(_NAME, config)
    check_taps(_NAME, config)
    refuse(_NAME, config, "norm_before_residual", False, "TensorRT-LLM's layer has the other wiring only")
    tensors = eagle3_tensors(state, config, _NAME, target, "layers.0")
    tensors.pop("t2d", None)
    fields = llama_fields(config, target, tensors, "LlamaForCausalLMEagle3")
    fields |= {"draft_vocab_size": config.draft_vocab_size or config.vocab_size, **tap_fields(config, target)}
    return Files(fields | {name: getattr(config, name) for name in ("norm_output", "fc_norm")}, tensors)


def write_medusa(state: State, config: HeadConfig, target: Target) -> Files:
    """Biases and an LM head for each head in any case."""
    refuse(_NAME, config, "draft_vocab_size", None, "it drafts from the whole vocabulary (--whole-vocabulary)")
    heads, blocks = config.num_draft_heads or 0, config.num_blocks or 0
    tensors: dict[str, Tensor] = {}
    for k, lm_head in enumerate(own_lm_heads(state, config, target)):
        for m in range(blocks):
            for part in ("weight", "bias"):
                tensors[f"medusa_heads.{k}.medusa_layers.{m}.linear.{part}"] = state[f"blocks.{k}.layers.{m}.{part}"]
        tensors[f"medusa_heads.{k}.lm_head.weight"] = lm_head
    fields = {
        "architectures": ["MedusaForCausalLM"],
        "medusa_num_heads": heads,
        "medusa_num_layers": blocks,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "base_model_name_or_path": target.name,
        "torch_dtype": dtype_name(tensors),
    }
    return Files(fields, tensors)


def read_medusa(files: Files, target: Target | None) -> tuple[HeadConfig, dict[str, Tensor]]:
    state: dict[str, Tensor] = {}
    for name, value in files.tensors.items():
        if found := _BLOCK.fullmatch(name):
            state["blocks.{}.layers.{}.{}".format(*found.groups())] = value
        elif found := _LM_HEAD.fullmatch(name):
            state[f"lm_heads.{found[1]}.weight"] = value
        else:
            raise ValueError(
                f"the Medusa head has a tensor {name!r}, expected medusa_heads.K.medusa_layers and lm_head"
            )
    state = with_biases(state)
    return medusa_config(state, len(state["lm_heads.0.weight"]), target, True), state


def medusa_names(config: HeadConfig, fields: Mapping[str, Any]) -> Table:
    hidden = config.hidden_size
    table: Table = {}
    for k in range(config.num_draft_heads or 0):
        for m in range(config.num_blocks or 0):
            prefix = f"medusa_heads.{k}.medusa_layers.{m}.linear"
            table |= {f"{prefix}.weight": (hidden, hidden), f"{prefix}.bias": (hidden,)}
        table[f"medusa_heads.{k}.lm_head.weight"] = (config.vocab_size, hidden)
    return table


def eagle3_names(config: HeadConfig, fields: Mapping[str, Any]) -> Table:
    return {name: shape for name, shape in eagle3_table(config, "layers.0").items() if name != "t2d"}


LAYOUT = Layout(
    name=_NAME,
    engine="TensorRT-LLM",
    kinds={
        "eagle3": Form(write_eagle3, read_eagle3, eagle3_names, sglang_hidden_ids),
        "medusa": Form(write_medusa, read_medusa, medusa_names),
    },
    missing={"eagle": "its EAGLE-1 is a converted engine, not a folder", "hydra": "it has no Hydra"},
)

"""vLLM: Medusa, EAGLE-1 and EAGLE-3, as its classes Medusa, EagleLlamaForCausalLM and Eagle3LlamaForCausalLM load them.

Checked against the source of 0.32. Chains only: a tree is drafted by no head there.
"""

from __future__ import annotations

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
    eagle_table,
    eagle_tensors,
    llama_fields,
    read_eagle,
    read_eagle3,
    tap_fields,
    vllm_hidden_ids,
)
from heads.formats.medusa_blocks import (
    ascending,
    has_biases,
    medusa_config,
    medusa_table,
    shared_lm_head,
    with_biases,
)

_NAME = "vllm"
_NO_TOKEN_MAP = (
    "vLLM 0.32 stops at a token_map, which its loader takes for a weight that was not loaded; --whole-vocabulary "
    "exports the head without"
)
_NO_VOCAB = "vLLM drafts EAGLE-1 from the whole vocabulary; --whole-vocabulary exports the head for that"


def write_eagle(state: State, config: HeadConfig, target: Target) -> Files:
    """No bias of fc (the loader has no place for one), no embedding (shared with the target), no LM head."""
    check_layer(_NAME, config)
    refuse(_NAME, config, "draft_vocab_size", None, _NO_VOCAB)
    refuse(_NAME, config, "fc_bias", False, "vLLM's fc has no bias")
    tensors = eagle_tensors(state, config, _NAME, target)
    return Files(llama_fields(config, target, tensors, "LlamaForCausalLM"), tensors)


def write_eagle3(state: State, config: HeadConfig, target: Target) -> Files:
    """With an LM head; d2t and t2d only if the draft vocabulary is smaller (a full one has no place for d2t)."""
    check_layer(_NAME, config)
    check_taps(_NAME, config)
    tensors = eagle3_tensors(state, config, _NAME, target)
    fields = llama_fields(config, target, tensors, "LlamaForCausalLMEagle3")
    fields |= {"draft_vocab_size": config.draft_vocab_size or config.vocab_size, **tap_fields(config, target)}
    fields |= {name: getattr(config, name) for name in ("norm_before_residual", "norm_output", "fc_norm")}
    return Files(fields, tensors)


def write_medusa(state: State, config: HeadConfig, target: Target) -> Files:
    """Exactly these fields: the loader takes any name with "num" and "heads" for the number of heads.

    A shared LM head is the target's, stored once.
    """
    own = "vLLM stores LM heads of their own for the whole vocabulary only"
    refuse(_NAME, config, "draft_vocab_size", None, own if config.own_projection else _NO_TOKEN_MAP)
    bias = has_biases(state)
    tensors = {name: state[name] for name in medusa_table(config) if bias or not name.endswith(".bias")}
    if not config.own_projection:
        tensors["lm_heads.0.weight"] = shared_lm_head(state, config, target)
    fields: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.num_draft_heads,
        "num_hidden_layers": config.num_blocks,
        "original_lm_head": not config.own_projection,
        "medusa_fc_bias": bias,
    }
    return Files(fields | {name: dtype_name(tensors) for name in ("torch_dtype", "dtype")}, tensors)


def read_medusa(files: Files, target: Target | None) -> tuple[HeadConfig, dict[str, Tensor]]:
    """Also heads with a `medusa_heads.` prefix, a shared LM head called `lm_head.weight`, or a draft vocabulary: only
    those rows of the LM head, and `token_map`, their ids.
    """
    tensors = {name.removeprefix("medusa_heads."): value for name, value in files.tensors.items()}
    shared = bool(files.config.get("original_lm_head", False))
    ids = tensors.pop("token_map", None)
    heads = {name: tensors.pop(name) for name in list(tensors) if name.startswith(("lm_head.", "lm_heads."))}
    if not heads:
        raise ValueError("the Medusa head has no lm_heads.0.weight, which vLLM's layout must have")
    vocab = int(files.config.get("vocab_size") or len(next(iter(heads.values()))))
    if ids is not None:
        ids, heads = ascending(ids, heads)
    state = with_biases(tensors)
    draft_vocab = None if ids is None else len(ids)
    config = medusa_config(state, vocab, target, not shared, draft_vocab)
    if not shared:
        state |= heads
    if ids is not None:
        state["draft_token_ids"] = ids
    return config, state


def medusa_names(config: HeadConfig, fields: Mapping[str, Any]) -> Table:
    """The layout's table: without biases where the config says so, with the one LM head where it is shared."""
    table = {k: v for k, v in medusa_table(config).items() if fields["medusa_fc_bias"] or not k.endswith(".bias")}
    if not config.own_projection:
        table["lm_heads.0.weight"] = (config.draft_vocab_size or config.vocab_size, config.hidden_size)
    return table | ({} if config.draft_vocab_size is None else {"token_map": (config.draft_vocab_size,)})


LAYOUT = Layout(
    name=_NAME,
    engine="vLLM",
    kinds={
        "eagle": Form(write_eagle, read_eagle, lambda config, _: eagle_table(config)),
        "eagle3": Form(write_eagle3, read_eagle3, lambda config, _: eagle3_table(config), vllm_hidden_ids),
        "medusa": Form(write_medusa, read_medusa, medusa_names),
    },
    missing={"hydra": "it has no heads that read the tokens drafted before"},
)

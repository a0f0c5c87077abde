"""The original EAGLE repository (SafeAILab): EAGLE-1/2 and EAGLE-3, as its `EaModel` loads them.

Its layer knows no head_dim of its own, no rotary scaling but linear and dynamic, and reads fixed layers of the target.
"""

from __future__ import annotations

from heads.config import HeadConfig
from heads.formats.layout import Files, Form, Layout, State, Target, refuse
from heads.formats.llama import (
    check_layer,
    check_plain_norms,
    default_taps,
    eagle3_table,
    eagle3_tensors,
    eagle_table,
    eagle_tensors,
    llama_fields,
    read_eagle,
    read_eagle3,
)

_NAME = "eagle"
_NO_VOCAB = "it drafts EAGLE-1 from the whole vocabulary; --whole-vocabulary exports the head for that"


def _check(config: HeadConfig) -> None:
    check_layer(_NAME, config)
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ValueError(
            f"--to {_NAME}: the head's head_dim is {config.head_dim}, expected hidden_size / num_attention_heads = "
            f"{config.hidden_size} / {config.num_attention_heads}: the repository's layer knows no other"
        )
    kind = config.rope_parameters.get("rope_type", "default")
    if kind not in ("default", "linear", "dynamic"):
        raise ValueError(f"--to {_NAME}: the head's rope_type is {kind!r}, expected 'default', 'linear' or 'dynamic'")


def write_eagle(state: State, config: HeadConfig, target: Target) -> Files:
    """`bias` tells whether fc has one (its default is that it does)."""
    _check(config)
    refuse(_NAME, config, "draft_vocab_size", None, _NO_VOCAB)
    tensors = eagle_tensors(state, config, _NAME, target)
    fields = llama_fields(config, target, tensors, "LlamaForCausalLM")
    return Files(fields | {"bias": config.fc_bias}, tensors)


def write_eagle3(state: State, config: HeadConfig, target: Target) -> Files:
    _check(config)
    check_plain_norms(_NAME, config)
    if tuple(config.taps or ()) != default_taps(target.layers):
        raise ValueError(
            f"--to {_NAME}: the head's taps are {list(config.taps or ())}, expected "
            f"{list(default_taps(target.layers))}: the repository reads no others of {target.layers} layers"
        )
    tensors = eagle3_tensors(state, config, _NAME, target)
    fields = llama_fields(config, target, tensors, "LlamaForCausalLM")
    return Files(fields | {"draft_vocab_size": config.draft_vocab_size or config.vocab_size}, tensors)


LAYOUT = Layout(
    name=_NAME,
    engine="the EAGLE repository",
    kinds={
        "eagle": Form(write_eagle, read_eagle, lambda config, _: eagle_table(config)),
        "eagle3": Form(
            write_eagle3,
            read_eagle3,
            lambda config, _: eagle3_table(config),
            lambda _, layers: (2, layers // 2, layers - 3),
        ),
    },
    missing={"medusa": "it has no Medusa", "hydra": "it has no Hydra"},
)

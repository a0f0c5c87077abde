"""The speculators library: EAGLE-3 with the verifier named in the config, so that `vllm serve DIR` is enough."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from heads.config import HeadConfig
from heads.formats.layout import Files, Form, Layout, State, Target
from heads.formats.llama import (
    check_layer,
    check_taps,
    eagle3_table,
    eagle3_tensors,
    llama_fields,
    read_eagle3,
    vllm_hidden_ids,
)

_NAME = "speculators"
_VERSION = "0.3.0"  # of the library whose fields these are
_TOKENS = 3  # drafted per round unless the server is told otherwise
_OPTIONS = ("norm_before_residual", "norm_output", "fc_norm")


def write_eagle3(state: State, config: HeadConfig, target: Target) -> Files:
    """`norm_before_residual` in any case: where it is missing, vLLM takes it for true."""
    check_layer(_NAME, config)
    check_taps(_NAME, config)
    tensors = eagle3_tensors(state, config, _NAME, target, "layers.0")
    layer = llama_fields(config, target, tensors, "LlamaForCausalLM")
    fields: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": _TOKENS,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "name_or_path": target.name,
                "architectures": list(getattr(target.config, "architectures", None) or []),
            },
        },
        "transformer_layer_config": {name: value for name, value in layer.items() if name != "architectures"},
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "norm_before_fc": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [k + 1 for k in config.taps or ()],
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": layer["torch_dtype"],
    }
    return Files(fields | {name: getattr(config, name) for name in _OPTIONS}, tensors)


def as_vllm_reads(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The flat config that vLLM makes of it; its default for norm_before_residual is true.

    Raises:
        ValueError: not an EAGLE-3 head, or no layer config.
    """
    kind = fields.get("speculators_model_type")
    if kind != "eagle3":
        raise ValueError(f"config.json: speculators_model_type is {kind!r}, expected 'eagle3'")
    layer = fields.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError("config.json: transformer_layer_config is missing, expected the draft layer's config")
    flat = {**layer, "norm_before_residual": fields.get("norm_before_residual", True)}
    names = ("draft_vocab_size", "norm_output", "fc_norm", "norm_before_fc", "eagle_aux_hidden_state_layer_ids")
    return flat | {name: fields[name] for name in names if fields.get(name) is not None}


def read(files: Files, target: Target | None) -> tuple[HeadConfig, dict[str, Tensor]]:
    return read_eagle3(Files(as_vllm_reads(files.config), files.tensors), target)


LAYOUT = Layout(
    name=_NAME,
    engine="speculators and vLLM",
    kinds={
        "eagle3": Form(
            write_eagle3, read, lambda config, _: eagle3_table(config, "layers.0"), vllm_hidden_ids, as_vllm_reads
        )
    },
    missing={
        "eagle": "its EAGLE-1 format is an old one; vLLM reads --to vllm",
        "medusa": "it has no Medusa",
        "hydra": "it has no Hydra",
    },
)

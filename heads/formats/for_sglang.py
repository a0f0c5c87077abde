"""SGLang: EAGLE-1/2 and EAGLE-3, as its classes LlamaForCausalLMEagle and LlamaForCausalLMEagle3 load them.

Names that the loader does not know are skipped without a word there, and what it misses stays random.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from heads.config import HeadConfig
from heads.formats.layout import Files, Form, Layout, State, Target
from heads.formats.llama import (
    check_layer,
    check_plain_norms,
    eagle3_table,
    eagle3_tensors,
    eagle_table,
    eagle_tensors,
    llama_fields,
    read_eagle,
    read_eagle3,
    sglang_hidden_ids,
    tap_fields,
)

_NAME = "sglang"
TOKEN_MAP = "draft_tokens.pt"  # for --speculative-token-map


def write_eagle(state: State, config: HeadConfig, target: Target) -> Files:
    """With a bias of fc, zeros if there is none: the loader's fc has one, and would leave it random.

    A draft vocabulary is a file of its own there, which a flag of the server names.
    """
    check_layer(_NAME, config)
    tensors = eagle_tensors(state, config, _NAME, target)
    weight = tensors["fc.weight"]
    tensors.setdefault("fc.bias", weight.new_zeros(len(weight)))
    fields = llama_fields(config, target, tensors, "LlamaForCausalLMEagle")
    ids = {} if config.draft_vocab_size is None else {TOKEN_MAP: state["draft_token_ids"]}
    return Files(fields, tensors, extra=dict(ids))


def write_eagle3(state: State, config: HeadConfig, target: Target) -> Files:
    """The raw format, draft_vocab_size in any case; without the options that SGLang's layer does not have."""
    check_layer(_NAME, config)
    check_plain_norms(_NAME, config)
    tensors = eagle3_tensors(state, config, _NAME, target)
    fields = llama_fields(config, target, tensors, "LlamaForCausalLMEagle3")
    fields |= {"draft_vocab_size": config.draft_vocab_size or config.vocab_size, **tap_fields(config, target)}
    return Files(fields, tensors)


def read_eagle_sglang(files: Files, target: Target | None) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """EAGLE-1, with the draft vocabulary that lies beside it."""
    config, tensors = read_eagle(files, target)
    ids = files.extra.get(TOKEN_MAP)
    if ids is None:
        return config, tensors
    values = torch.as_tensor(ids, dtype=torch.long).sort().values
    return replace(config, draft_vocab_size=len(values)), tensors | {"draft_token_ids": values}


LAYOUT = Layout(
    name=_NAME,
    engine="SGLang",
    kinds={
        "eagle": Form(
            write_eagle,
            read_eagle_sglang,
            lambda config, _: eagle_table(config) | {"fc.bias": (config.hidden_size,)},
        ),
        "eagle3": Form(write_eagle3, read_eagle3, lambda config, _: eagle3_table(config), sglang_hidden_ids),
    },
    missing={"medusa": "it has no Medusa", "hydra": "it has no Hydra"},
)

"""Which target a head was trained for, by content: hashes of its embedding, its LM head and its tokenizer.

Weights are hashed as bf16, so that a target is the same in whatever precision it is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from heads.config import HeadConfig
from heads.target import TargetAdapter

_NAMES = {"embedding_sha256": "embedding", "lm_head_sha256": "LM head", "tokenizer_sha256": "tokenizer"}


def weight_digest(weight: Any) -> str | None:
    """SHA-256 of a matrix's shape and its values rounded to bf16; None where they are quantised or not in memory."""
    if not isinstance(weight, Tensor) or weight.is_meta or weight.dtype.itemsize < 2 or not weight.is_floating_point():
        return None
    digest = hashlib.sha256(str(list(weight.shape)).encode())
    for rows in weight.detach().split(1 << 16):
        digest.update(rows.to("cpu", torch.bfloat16).contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of everything that turns text into ids; padding and truncation are a caller's, and left out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        facts: Any = {"vocab": tokenizer.get_vocab(), "special": tokenizer.all_special_tokens}
    else:
        facts = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("padding", "truncation")}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def fingerprint(target: TargetAdapter) -> dict[str, Any]:
    """The fields of `HeadConfig` that say for which weights a head is made."""
    embedding, lm_head = target.embedding.weight, target.lm_head.weight
    first = weight_digest(embedding)
    return {
        "embedding_sha256": first,
        "lm_head_sha256": first if lm_head is embedding else weight_digest(lm_head),
    }


def differences(config: HeadConfig, found: Mapping[str, str | None], name: str) -> list[str]:
    """A sentence for each part of target `name` (fields of the config) that the head was not trained for."""
    return [
        f"the head was trained for a target whose {_NAMES[part]} has sha256 {wanted[:16]}, that of {name!r} is "
        f"{value[:16]}: output stays exact, but fewer drafts may be accepted"
        for part, value in found.items()
        if (wanted := getattr(config, part)) and value and wanted != value
    ]

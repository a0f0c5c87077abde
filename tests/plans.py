"""Plans for Llama 3.1, whose configs are public facts, and for models that are small enough to run."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig

from heads.base import DraftHead, HeadBatch
from train.batching import make_batch
from train.config import RunConfig
from train.conversations import TokenRow
from train.plan import Hardware, Plan
from train.typed_yaml import from_dict

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
SIZES = {"8B": LLAMA_8B, "70B": LLAMA_70B}


def plan_config(**sections: dict[str, Any]) -> RunConfig:
    """EAGLE-3 with a draft vocabulary of 32,000, on rows of 2,048 tokens."""
    base: dict[str, dict[str, Any]] = {
        "head": {"kind": "eagle3", "draft_vocab": 32_000},
        "data": {"max_length": 2048, "tokens": 50_000_000},
        "train": {"epochs": 2},
    }
    return from_dict(RunConfig, {key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}})


@functools.cache
def big_plan(size: str) -> Plan:
    """Of "8B" or "70B", from its config alone."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{size}.json"
        file.write_text(json.dumps(SIZES[size]))
        return Plan(plan_config(), Hardware(), str(file))


def middle_model(width: int = 256) -> LlamaConfig:
    """Large enough that activations of the layers, not what surrounds them, are most of it."""
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )


def plan_on_cpu(folder: Path, config: PreTrainedConfig, **sections: dict[str, Any]) -> Plan:
    """A plan for a CPU in fp32; writes the target's config.json, and nothing else, to the folder."""
    config.save_pretrained(folder)
    target = {"path": str(folder), "device": "cpu", "dtype": "float32"}
    base: dict[str, dict[str, Any]] = {
        "head": {"kind": "eagle3"},
        "data": {"max_length": 128, "prompt_tokens": 16, "batch_size": 8},
        "train": {"max_steps": 10},
    }
    filled: dict[str, Any] = {key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}}
    filled["train"] |= {"mixed_precision": "no"}
    return Plan(from_dict(RunConfig, {"target": target, **filled}), Hardware())


def random_batch(head: DraftHead, length: int, steps: int) -> HeadBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, head.config.vocab_size, (length,), generator=generator).tolist()
    feature = torch.randn(length, head.config.hidden_size * (1 + len(head.needs.taps)), generator=generator)
    row = TokenRow("r", tuple(ids), ((1, length),), "t")
    return make_batch([row], [feature], steps, head.needs, packed=length)

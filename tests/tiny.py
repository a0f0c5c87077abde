"""Tiny random models, heads and a tokenizer for tests: fp32, a second or less to build and run."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from heads.base import DraftHead
from heads.config import HeadConfig
from heads.registry import build_head
from heads.target import TargetAdapter

VOCAB = 512
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# With the usual 0.02 a random model repeats one token for ever; with this its greedy text varies (tested).
_RANGE = 0.35

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": _RANGE,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GATED: dict[str, Any] = {**_COMMON, "intermediate_size": 96, "num_key_value_heads": 2}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_GATED, tie_word_embeddings=False),
    "llama_tied": LlamaConfig(**_GATED, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_GATED, tie_word_embeddings=False),
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=64,
        initializer_range=_RANGE,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    ),
}


def tiny_model(config: str | PreTrainedConfig, seed: int = 0) -> Any:
    """A random fp32 model in eval mode; norm weights are random too, so that a skipped norm shows."""
    chosen = copy.deepcopy(CONFIGS[config] if isinstance(config, str) else config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(chosen, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


def tiny_target(config: str | PreTrainedConfig, seed: int = 0, taps: tuple[int, ...] = ()) -> TargetAdapter:
    return TargetAdapter(tiny_model(config, seed), taps, name=config if isinstance(config, str) else "tiny")


def tiny_head(target: TargetAdapter, seed: int = 1, kind: str = "eagle") -> DraftHead:
    """A head with random weights, bound to the target."""
    config = HeadConfig.derive(kind, target.config, target.vocab_size, target.name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = build_head(config)
        for parameter in head.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    head.eval().bind(target)
    return head


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def library_greedy(model: Any, ids: list[int], max_new_tokens: int, eos: int | None = None) -> list[int]:
    """New tokens of transformers' own greedy `generate`."""
    out = model.generate(
        torch.tensor([ids]), max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=eos, pad_token_id=0
    )
    return out[0, len(ids) :].tolist()


def tiny_tokenizer(chat: bool = True) -> Any:
    """Byte-level, 256 bytes and a few special tokens: any text, any UTF-8, no training."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", additional_special_tokens=special[1:]
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer

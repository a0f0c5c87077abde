"""Tiny random models, heads and a tokenizer for tests: fp32, a second or less to build and run."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from heads.base import DraftHead
from heads.config import HeadConfig
from heads.kinds import kind_of
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

_WINDOW = 16
_MIXED: dict[str, Any] = {
    "sliding_window": _WINDOW,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

# name -> (model type, what differs from _GATED). The name is the model type where there is one of it.
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3_mixed": ("qwen3", {"head_dim": 24, "use_sliding_window": True, **_MIXED}),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "head_dim": 24}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mistral": ("mistral", {"sliding_window": _WINDOW}),
    "ministral": ("ministral", {"head_dim": 24, **_MIXED}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 9.0,
            "tie_word_embeddings": False,  # tied, and with Gemma's scaled embeddings, it repeats one token
            **_MIXED,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {"head_dim": 24, "query_pre_attn_scalar": 24, "tie_word_embeddings": False, **_MIXED},
    ),
    "phi3": ("phi3", {"sliding_window": _WINDOW}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 48, "init_std": _RANGE}),
    "falcon": ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon_mqa": ("falcon", {"multi_query": True}),
    "falcon_alibi": ("falcon", {"alibi": True, "multi_query": False}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "cohere2": ("cohere2", {"logit_scale": 0.25, **_MIXED}),
    "glm4": ("glm4", {"head_dim": 16}),
    "smollm3": ("smollm3", {"use_sliding_window": True, "no_rope_layer_interval": 2, **_MIXED}),
    "starcoder2": ("starcoder2", {"sliding_window": _WINDOW}),
    "stablelm": ("stablelm", {}),
    "exaone4": ("exaone4", _MIXED),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 16,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            **_MIXED,
        },
    ),
    "llama4_text": (
        "llama4_text",
        {
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_hidden_layers": 4,
            "attention_chunk_size": _WINDOW,
            "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
        },
    ),
}


def _config(kind: str, changes: dict[str, Any]) -> PreTrainedConfig:
    """Only fields that the architecture has: a stray one, such as a window, would mean something to the adapter."""
    config_class = CONFIG_MAPPING[kind]
    known = {k: v for k, v in _GATED.items() if hasattr(config_class, k) or k in config_class.attribute_map}
    return config_class(**known | changes)


ARCHITECTURES: dict[str, PreTrainedConfig] = {
    name: _config(kind, changes) for name, (kind, changes) in _ARCHITECTURES.items()
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


def tiny_head(target: TargetAdapter, seed: int = 1, kind: str = "eagle", **options: Any) -> DraftHead:
    """A head with random weights, bound to the target. options: those of the kind that are not at their defaults."""
    config = HeadConfig.derive(
        kind, target.config, target.vocab_size, target.name, options={**kind_of(kind).options, **options}
    )
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
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),  # else it is guessed from where id 0 is
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
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

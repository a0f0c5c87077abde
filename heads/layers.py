"""The Llama-style decoder layer that draft heads are made of, with parameter names as serving engines expect them.

Split into `qkv` and `finish`, with attention between them, because training unrolls and tree drafting attend in ways
that one `forward(mask)` cannot express cheaply. With a causal mask it equals transformers' `LlamaDecoderLayer`
(tested).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    rotate_half,
)

from heads.config import HeadConfig


class Attention(nn.Module):
    """Projections of grouped-query attention; queries, keys and values have biases if the config says so."""

    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(input_size, self.heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)


class MLP(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One decoder layer. `input_norm=False` leaves out the norm before attention, as EAGLE's layer does."""

    def __init__(self, config: HeadConfig, input_norm: bool, attention_input: int | None = None) -> None:
        super().__init__()
        self.self_attn = Attention(config, attention_input or config.hidden_size)
        self.mlp = MLP(config)
        self.input_norm = input_norm
        if input_norm:
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def qkv(self, x_BTI: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, heads, T, hd], rotated keys and values [B, kv_heads, T, hd]."""
        x_BTI = self.normed(x_BTI)
        attn = self.self_attn
        q, k = apply_rotary_pos_emb(self._split(attn.q_proj(x_BTI)), self._split(attn.k_proj(x_BTI)), *rope)
        return q, k, self._split(attn.v_proj(x_BTI))

    def query(self, x_BTI: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """The queries of `qkv` alone."""
        return _rotate(self._split(self.self_attn.q_proj(self.normed(x_BTI))), rope)

    def keys_values(self, x_BTI: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The keys and values of `qkv` alone."""
        x_BTI = self.normed(x_BTI)
        keys = _rotate(self._split(self.self_attn.k_proj(x_BTI)), rope)
        return keys, self._split(self.self_attn.v_proj(x_BTI))

    def normed(self, x_BTI: Tensor) -> Tensor:
        return self.input_layernorm(x_BTI) if self.input_norm else x_BTI

    def _split(self, x: Tensor) -> Tensor:
        size = self.self_attn.head_dim
        return x.view(*x.shape[:-1], x.shape[-1] // size, size).transpose(1, 2)  # -1 fails without positions

    def finish(self, residual_BTH: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residual and MLP. attended: [B, heads, T, hd]."""
        flat = attended.transpose(1, 2).flatten(2)
        x = residual_BTH + self.self_attn.o_proj(flat)
        return x + self.mlp(self.post_attention_layernorm(x))


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


class Rotary(LlamaRotaryEmbedding):
    """transformers' own rotary embedding, whose frequencies stay fp32 when the head is cast.

    Rounded to bf16 they would turn positions a few hundred tokens apart by a good part of a radian.
    """

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = self._buffers[name]
            self._buffers[name] = buffer.to(moved.device if moved is not None else buffer.device)
        return self


def rotary(config: HeadConfig) -> Rotary:
    """With the target's RoPE settings: call it with (x, positions)."""
    return Rotary(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
    )

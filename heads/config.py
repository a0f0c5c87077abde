"""HeadConfig: the head's own architecture, derived from its target and stored as config.json."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, fields
from typing import Any

FORMAT_VERSION = 1


@dataclass(frozen=True)
class HeadConfig:
    """Everything needed to build the head again. Names follow transformers' Llama config where they can."""

    kind: str
    target: str  # hub id or directory the head was trained for
    target_revision: str | None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    hidden_act: str = "silu"
    draft_vocab_size: int | None = None  # proposals are limited to that many frequent tokens
    embedding_scale: float = 1.0  # embeddings are multiplied by this before they meet the features
    format_version: int = FORMAT_VERSION

    @classmethod
    def derive(
        cls,
        kind: str,
        config: Any,
        vocab_size: int,
        target: str,
        revision: str | None = None,
        draft_vocab_size: int | None = None,
        embedding_scale: float = 1.0,
    ) -> HeadConfig:
        """From a transformers (text) config. Absolute-position targets such as GPT-2 get default RoPE in the head."""
        heads = config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        if rope and "rope_type" not in rope:  # one entry per layer type: the head has full attention
            rope = rope.get("full_attention") or next(iter(rope.values()))
        rope = {key: value for key, value in rope.items() if value is not None}
        return cls(
            kind=kind,
            target=target,
            target_revision=revision,
            vocab_size=vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=_first(config, "intermediate_size", "n_inner", "ffn_dim") or 4 * config.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rms_norm_eps=float(_first(config, "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps") or 1e-5),
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **rope},
            max_position_embeddings=config.max_position_embeddings,
            draft_vocab_size=draft_vocab_size,
            embedding_scale=embedding_scale,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HeadConfig:
        """Strict: unknown and missing fields are errors.

        Raises:
            ValueError: naming the field (and its nearest match), or an unsupported format version.
        """
        known = [f.name for f in fields(cls)]
        for key in data:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                raise ValueError(
                    f"head config: unknown field {key!r}" + (f", did you mean {near[0]!r}?" if near else "")
                )
        missing = [name for name in known if name not in data]
        if missing:
            raise ValueError(f"head config: missing {', '.join(missing)}; this is not a Draftsmith head")
        if data["format_version"] != FORMAT_VERSION:
            raise ValueError(f"head config: format_version {data['format_version']}, expected {FORMAT_VERSION}")
        return cls(**data)


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

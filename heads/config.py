"""HeadConfig: the head's own architecture, derived from its target and stored as config.json."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FORMAT_VERSION = 1
CIRCUMSTANCES = ("embedding_sha256", "lm_head_sha256", "tokenizer_sha256", "trained_length")  # no part of its form


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
    num_draft_heads: int | None = None  # Medusa, Hydra: tokens drafted side by side
    num_blocks: int | None = None  # Medusa, Hydra: residual blocks of each of them
    own_projection: bool = False  # an LM head of the head's own (Medusa, Hydra: one for each) instead of the target's
    taps: tuple[int, ...] | None = None  # EAGLE-3: layers whose outputs are read, 0-based, ascending
    fc_norm: bool = False  # EAGLE-3: each of them is normed
    norm_output: bool = False  # EAGLE-3: the next draft starts from the normed output
    norm_before_residual: bool = False  # EAGLE-3: the residual is the normed hidden state
    fc_bias: bool = False  # EAGLE: published heads have one; ours are trained without
    attention_bias: bool = False  # of queries, keys and values, likewise
    target_adapter: str | None = None  # hub id or directory (also one inside the head's own) that the target carried
    trained_with_target: bool = False  # Medusa-2: that adapter was trained together with the head
    embedding_sha256: str | None = None  # of the target (`heads.fingerprint`)
    lm_head_sha256: str | None = None
    tokenizer_sha256: str | None = None
    trained_length: int | None = None  # tokens of the longest row in training
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
        options: Mapping[str, Any] | None = None,
    ) -> HeadConfig:
        """From a transformers (text) config, whatever its attention, positions and norms are.

        The head is always a Llama-style layer: full attention, rotary positions over the whole head dimension, and
        heads as many as the target's.

        Args:
            options: those of the kind (`heads.kinds`), by name.
        """
        options = options or {}
        # The features' width: what the LM head reads, which a model may project its hidden states to (OPT).
        width = getattr(config, "word_embed_proj_dim", None) or config.hidden_size
        heads = config.num_attention_heads
        kv_heads = _first(config, "num_key_value_heads", "num_kv_heads") or heads
        head_dim = getattr(config, "head_dim", None)
        if not head_dim or getattr(config, "qk_rope_head_dim", None):  # latent attention: that is only the rotary part
            head_dim = width // heads
        head_dim += head_dim % 2  # rotary embedding turns pairs
        return cls(
            kind=kind,
            target=target,
            target_revision=revision,
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=_first(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * width,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads if heads % kv_heads == 0 else heads,
            head_dim=head_dim,
            rms_norm_eps=float(_first(config, *_EPS) or 1e-5),
            rope_parameters=_rope(config, head_dim),
            max_position_embeddings=_first(config, "max_position_embeddings", "n_positions", "max_seq_len") or 2048,
            draft_vocab_size=draft_vocab_size,
            embedding_scale=embedding_scale,
            num_draft_heads=options.get("heads"),
            num_blocks=options.get("blocks"),
            own_projection=options.get("projection") == "own",
            taps=_taps(options, config.num_hidden_layers),
            fc_norm=options.get("fc_norm", False),
            norm_output=options.get("norm_output", False),
            norm_before_residual=options.get("norm_before_residual", False),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HeadConfig:
        """Strict: unknown fields are errors, and missing ones that have no default.

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
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in data]
        if missing:
            raise ValueError(f"head config: missing {', '.join(missing)}; this is not a Draftsmith head")
        if data.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"head config: format_version {data.get('format_version')}, expected {FORMAT_VERSION}")
        return cls(**data | {"taps": None if data.get("taps") is None else tuple(data["taps"])})


def _taps(options: Mapping[str, Any], layers: int) -> tuple[int, ...] | None:
    """The chosen layers, or EAGLE-3's own choice: near the start, in the middle, near the end.

    As indices of outputs those are 1, n // 2 - 1, n - 4, which engines take by default, too.

    Raises:
        ValueError: layers that the target does not have, or not ascending.
    """
    if "taps" not in options:
        return None
    taps = options["taps"]
    if taps is None:
        taps = (1, layers // 2 - 1, layers - 4) if layers >= 7 else sorted({0, (layers - 1) // 2, layers - 1})
    if not taps or list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < layers:
        raise ValueError(f"head.taps is {list(taps)}, expected ascending layers of the target, 0 .. {layers - 1}")
    return tuple(taps)


_EPS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _rope(config: Any, head_dim: int) -> dict[str, Any]:
    """The target's rotary settings, over the whole head; the default ones where it has none, or none that fit."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope and all(isinstance(value, dict) for value in rope.values()):  # one entry per layer type
        rope = rope.get("full_attention") or next(iter(rope.values()))
    rope = {"rope_type": "default", "rope_theta": 10000.0, **{k: v for k, v in rope.items() if v is not None}}
    rope.pop("partial_rotary_factor", None)
    pairs = {len(rope[name]) for name in ("short_factor", "long_factor") if name in rope}  # a factor per pair
    if rope["rope_type"] not in ROPE_INIT_FUNCTIONS or pairs - {head_dim // 2}:
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return rope

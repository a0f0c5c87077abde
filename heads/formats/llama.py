"""What the EAGLE layouts share: one Llama-style layer, its config, rotary settings, layer ids, draft vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from heads.config import HeadConfig
from heads.formats.draft_vocab import d2t_problems
from heads.formats.layout import Files, State, Table, Target, dtype_name, refuse

_LAYER = "midlayer"  # of EAGLE-3, in our names


def layer_table(config: HeadConfig, prefix: str, inputs: int) -> Table:
    """Names and shapes of a layer whose attention reads `inputs` columns; norms are the kinds' own."""
    c, hidden = config, config.hidden_size
    rows = {"q": c.num_attention_heads, "k": c.num_key_value_heads, "v": c.num_key_value_heads}
    table: Table = {}
    for name, heads in rows.items():
        table[f"{prefix}.self_attn.{name}_proj.weight"] = (heads * c.head_dim, inputs)
        if c.attention_bias:
            table[f"{prefix}.self_attn.{name}_proj.bias"] = (heads * c.head_dim,)
    table[f"{prefix}.self_attn.o_proj.weight"] = (hidden, c.num_attention_heads * c.head_dim)
    for name in ("gate", "up"):
        table[f"{prefix}.mlp.{name}_proj.weight"] = (c.intermediate_size, hidden)
    table[f"{prefix}.mlp.down_proj.weight"] = (hidden, c.intermediate_size)
    table[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    return table


def eagle_table(config: HeadConfig) -> Table:
    """EAGLE-1 as published: fc reads [embedding, feature]; layer 0 has no input norm; no final norm; no LM head."""
    hidden = config.hidden_size
    table: Table = {"fc.weight": (hidden, 2 * hidden)}
    if config.fc_bias:
        table["fc.bias"] = (hidden,)
    return table | layer_table(config, "layers.0", hidden)


def eagle3_table(config: HeadConfig, layer: str = _LAYER) -> Table:
    """EAGLE-3 as published; engines also want `lm_head.weight`, and d2t and t2d with a draft vocabulary."""
    hidden = config.hidden_size
    table: Table = {"fc.weight": (hidden, len(config.taps or ()) * hidden)}
    table |= layer_table(config, layer, 2 * hidden)
    table |= {f"{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")}
    table["norm.weight"] = (hidden,)
    if config.fc_norm:
        table |= {f"fc_norm.{i}.weight": (hidden,) for i in range(len(config.taps or ()))}
    table["lm_head.weight"] = (config.draft_vocab_size or config.vocab_size, hidden)
    if config.draft_vocab_size is not None:
        table |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    return table


# ---- config.json -------------------------------------------------------------------------------------------


def llama_fields(config: HeadConfig, target: Target, state: State, architecture: str) -> dict[str, Any]:
    """A Llama config that engines build the draft layer from, of any target."""
    dtype = dtype_name(state)
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        **rope_fields(config.rope_parameters),
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "bias": False,
        **{name: getattr(target.config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "torch_dtype": dtype,  # read by transformers 4, `dtype` by 5
        "dtype": dtype,
    }


def rope_fields(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings in the spelling before transformers 5 (rope_theta, rope_scaling) and in that since."""
    kind = rope.get("rope_type", "default")
    scaling = None
    if kind != "default":
        scaling = {**{k: v for k, v in rope.items() if k != "rope_theta"}, "rope_type": kind, "type": kind}
    return {"rope_theta": rope["rope_theta"], "rope_scaling": scaling, "rope_parameters": dict(rope)}


def default_taps(layers: int) -> tuple[int, ...]:
    """The outputs that engines read where no ids are given: hidden states 2, n // 2, n - 3."""
    return (1, layers // 2 - 1, layers - 4)


def tap_fields(config: HeadConfig, target: Target) -> dict[str, Any]:
    """Layer ids, nested as outputs (SGLang, TensorRT-LLM) and on top as hidden states (vLLM, where top wins).

    Left out where they are the engines' default, so that none can read them in the wrong convention.
    """
    taps = config.taps or ()
    if tuple(taps) == default_taps(target.layers):
        return {}
    nested = {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True}
    return {"eagle_config": nested, "eagle_aux_hidden_state_layer_ids": [k + 1 for k in taps]}


def vllm_hidden_ids(fields: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """vLLM's rule: the ids on top, else the nested ones, as they are; else its default."""
    nested = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(fields.get("eagle_aux_hidden_state_layer_ids") or nested or (2, layers // 2, layers - 3))


def sglang_hidden_ids(fields: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """SGLang's rule (and that of ModelOpt's exports): the nested ids, which are outputs; else its default."""
    nested = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(k + 1 for k in nested) if nested else (2, layers // 2, layers - 3)


# ---- what no engine has ------------------------------------------------------------------------------------


def check_layer(layout: str, config: HeadConfig) -> None:
    refuse(layout, config, "hidden_act", "silu", "the engines' draft layer has no other activation")
    refuse(layout, config, "attention_bias", False, "engines do not agree on which projections have one")


def check_plain_norms(layout: str, config: HeadConfig) -> None:
    """EAGLE-3 as in its paper: three layers, and none of the later options."""
    check_taps(layout, config)
    for name in ("norm_before_residual", "norm_output", "fc_norm"):
        refuse(layout, config, name, False, "its layer does not have this option")


def check_taps(layout: str, config: HeadConfig) -> None:
    if len(config.taps or ()) != 3:
        raise ValueError(
            f"--to {layout}: the head's taps are {list(config.taps or ())}, expected three layers of the target"
        )


# ---- tensors -----------------------------------------------------------------------------------------------


def eagle_tensors(state: State, config: HeadConfig, layout: str, target: Target) -> dict[str, Tensor]:
    """EAGLE-1 in its published form: our embedding scale is multiplied into the half of fc that reads embeddings.

    Raises:
        ValueError: the target's embedding module scales what it looks up, which engines' shared embedding does not.
    """
    if target.scales_embeddings:
        raise ValueError(
            f"--to {layout}: the target is of type {target.config.model_type!r}, whose embeddings are scaled outside "
            "of the weights that engines share with the draft; an EAGLE-1 head cannot be moved there"
        )
    tensors = {name: state[name] for name in eagle_table(config)}
    tensors["fc.weight"] = scaled_columns(state["fc.weight"], 0, config.hidden_size, config.embedding_scale)
    return tensors


def scaled_columns(weight: Tensor, start: int, end: int, factor: float) -> Tensor:
    """The weight with these columns times the factor, in its own dtype; the same tensor where that is 1."""
    if factor == 1.0:
        return weight
    wide = weight.double()
    wide[:, start:end] *= factor
    return wide.to(weight.dtype)


def eagle3_tensors(
    state: State, config: HeadConfig, layout: str, target: Target, layer: str = _LAYER
) -> dict[str, Tensor]:
    """EAGLE-3 with the layer under this name, and an LM head: the head's own, or the target's rows."""
    if int(target.config.hidden_size) != config.hidden_size:
        raise ValueError(
            f"--to {layout}: the head is {config.hidden_size} wide, the target {target.config.hidden_size}; give the "
            "target that it was trained for"
        )
    tensors = {rename_layer(name, _LAYER, layer): value for name, value in state.items()}
    lm_head = state.get("lm_head.weight")
    if lm_head is None:
        ids = None if config.draft_vocab_size is None else state["d2t"] + torch.arange(len(state["d2t"]))
        lm_head = target.lm_head(ids).to(state["fc.weight"].dtype)
    return tensors | {"lm_head.weight": lm_head}


def rename_layer(name: str, old: str, new: str) -> str:
    return new + name[len(old) :] if name.startswith(f"{old}.") else name


# ---- reading -----------------------------------------------------------------------------------------------


def read_rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings of a config in either spelling; the new one counts where both are there."""
    rope = dict(fields.get("rope_parameters") or {})
    if not rope:
        scaling = dict(fields.get("rope_scaling") or {})
        kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
        scaling.pop("type", None)
        rope = {"rope_type": kind, **scaling}
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", fields.get("rope_theta") or 10000.0)
    return {name: value for name, value in rope.items() if name not in ("mrope_section", "mrope_interleaved")}


def read_llama(kind: str, fields: dict[str, Any], tensors: State, **more: Any) -> HeadConfig:
    """A head's config from a Llama config.

    Raises:
        ValueError: more than one layer, or a field is missing.
    """
    layers = fields.get("num_hidden_layers", 1)
    if layers != 1 and any(".1." in name for name in tensors if name.startswith("layers.")):
        raise ValueError(f"config.json: num_hidden_layers is {layers}, expected a draft of one layer")
    try:
        hidden, heads = int(fields["hidden_size"]), int(fields["num_attention_heads"])
        return HeadConfig(
            kind=kind,
            target="",
            target_revision=None,
            vocab_size=int(fields["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(fields["intermediate_size"]),
            num_attention_heads=heads,
            num_key_value_heads=int(fields.get("num_key_value_heads") or heads),
            head_dim=int(fields.get("head_dim") or hidden // heads),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            rope_parameters=read_rope(fields),
            max_position_embeddings=int(fields.get("max_position_embeddings", 2048)),
            hidden_act=fields.get("hidden_act", "silu"),
            attention_bias=any(name.endswith("self_attn.q_proj.bias") for name in tensors),
            **more,
        )
    except KeyError as error:
        raise ValueError(f"config.json: {error.args[0]} is missing; expected a draft head's Llama config") from error


_IGNORED = ("embed_tokens.weight", "t2d")  # the target's own, and what follows from d2t


def taps_of(fields: dict[str, Any], target: Target | None, hidden_ids: bool) -> tuple[int, ...]:
    """The outputs that a config means: with `hidden_ids` the field on top, hidden states, counts before the nested.

    Raises:
        ValueError: there is none, and no target whose default would count.
    """
    top = fields.get("eagle_aux_hidden_state_layer_ids") if hidden_ids else None
    nested = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if top:
        return tuple(k - 1 for k in top)
    if nested:
        return tuple(nested)
    if target is None:
        raise ValueError("config.json names no layers of the target, so --target is needed: their number decides")
    return default_taps(target.layers)


def read_eagle(files: Files, target: Target | None) -> tuple[HeadConfig, dict[str, Tensor]]:
    """EAGLE-1 in any of its layouts; a bias of zeros, which SGLang needs, is left out again."""
    tensors = {name.removeprefix("model."): value for name, value in files.tensors.items()}
    tensors = {name: value for name, value in tensors.items() if name not in _IGNORED and "lm_head" not in name}
    bias = tensors.get("fc.bias")
    if bias is not None and not bool(bias.any()):
        del tensors["fc.bias"]
    return read_llama("eagle", files.config, tensors, fc_bias="fc.bias" in tensors), tensors


def read_eagle3(files: Files, target: Target | None, hidden_ids: bool = True) -> tuple[HeadConfig, dict[str, Tensor]]:
    """EAGLE-3 in any of its layouts: the layer is `midlayer` or `layers.0`."""
    fields = files.config
    tensors = {name.removeprefix("model."): value for name, value in files.tensors.items()}
    t2d = tensors.get("t2d")
    tensors = {rename_layer(name, "layers.0", _LAYER): v for name, v in tensors.items() if name not in _IGNORED}
    config = read_llama(
        "eagle3",
        fields,
        tensors,
        taps=taps_of(fields, target, hidden_ids),
        draft_vocab_size=len(tensors["d2t"]) if "d2t" in tensors else None,
        own_projection="lm_head.weight" in tensors,
        fc_norm="fc_norm.0.weight" in tensors,
        norm_output=bool(fields.get("norm_output", False)),
        norm_before_residual=bool(fields.get("norm_before_residual", False)),
    )
    if "d2t" in tensors:
        for problem in d2t_problems(tensors["d2t"], t2d, config.vocab_size):
            raise ValueError(f"{problem}; scripts/doctor.py mends that")
        ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return config, tensors

"""What must hold of a head's files for an engine to draft with it as it was trained: checked on what is on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from heads.config import HeadConfig
from heads.formats.draft_vocab import Problem, d2t_problems
from heads.formats.layout import Files, Form, State, Target
from heads.formats.llama import read_rope

_INTEGERS = {"d2t": torch.int64, "t2d": torch.bool, "token_map": torch.int64}


def problems(files: Files, form: Form, config: HeadConfig, target: Target | None) -> Iterator[Problem]:
    """Everything that is wrong with a head of this config in this form; none: the engine loads and reads it right."""
    fields = form.flat(files.config)
    yield from _tensor_problems(files, form, config)
    yield from _vocabulary_problems(files.tensors, fields, config)
    if files.config.get("model_type") == "medusa":
        yield from _medusa_problems(files)
    if config.kind in ("eagle", "eagle3"):
        yield from _llama_problems(fields)
        yield from _rope_problems(fields, config)
    if target is not None:
        yield from _target_problems(fields, form, config, target)


def _tensor_problems(files: Files, form: Form, config: HeadConfig) -> Iterator[Problem]:
    table, tensors = form.tensors(config, files.config), files.tensors
    for name in sorted(table.keys() - tensors.keys()):
        yield Problem(name, "missing", str(list(table[name])))
    for name in sorted(tensors.keys() - table.keys()):
        yield Problem(name, "there", "no tensor of that name")
    declared = files.config.get("torch_dtype") or files.config.get("dtype")
    for name in sorted(tensors.keys() & table.keys()):
        value = tensors[name]
        if tuple(value.shape) != table[name]:
            yield Problem(name, f"of shape {list(value.shape)}", str(list(table[name])))
        wanted = _INTEGERS.get(name)
        if wanted is None and declared is not None:
            wanted = getattr(torch, declared)
        if wanted is not None and value.dtype != wanted:
            yield Problem(name, str(value.dtype), str(wanted))
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            yield Problem(name, "not finite", "numbers")


def _vocabulary_problems(tensors: State, fields: Mapping[str, Any], config: HeadConfig) -> Iterator[Problem]:
    """d2t: offsets to ascending target ids; t2d marks just these."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if config.kind == "eagle3" and "draft_vocab_size" not in fields:
        yield Problem("draft_vocab_size", "missing", "a number: SGLang reads it in any case")
    size = fields.get("draft_vocab_size")
    if d2t is None:
        if config.kind == "eagle3" and size is not None and size != config.vocab_size:
            yield Problem("d2t", "missing", f"{size} offsets: without them the first ids would be meant")
        return
    if size is not None and len(d2t) != size:
        yield Problem("draft_vocab_size", str(size), f"{len(d2t)}, the length of d2t")
    yield from d2t_problems(d2t, t2d, config.vocab_size)


def _medusa_problems(files: Files) -> Iterator[Problem]:
    """MedusaConfig takes any field with "num" and "heads" (or "layers") in its name for these two."""
    for word, name in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
        taken = [key for key in files.config if "num" in key and word in key]
        if taken != [name]:
            yield Problem("config.json", f"with {', '.join(taken) or 'no count of ' + word}", f"{name} alone")
    if "token_map" in files.tensors:
        yield Problem("token_map", "there", "the whole vocabulary: vLLM 0.32 takes it for a weight that was not loaded")


def _llama_problems(fields: Mapping[str, Any]) -> Iterator[Problem]:
    if fields.get("tie_word_embeddings", True) is not False:
        found = str(fields.get("tie_word_embeddings", "missing"))
        yield Problem("tie_word_embeddings", found, "false: else the embedding becomes the LM head")
    if fields.get("num_hidden_layers") != 1:
        yield Problem("num_hidden_layers", str(fields.get("num_hidden_layers")), "1")
    if "quantization_config" in fields:
        yield Problem("quantization_config", "there", "none: it is the target's")


def _rope_problems(fields: Mapping[str, Any], config: HeadConfig) -> Iterator[Problem]:
    """Both spellings must turn positions as the head was trained, or older or newer engines turn them otherwise."""
    old = {name: value for name, value in fields.items() if name in ("rope_theta", "rope_scaling")}
    new = {name: value for name, value in fields.items() if name == "rope_parameters"}
    for where, part in (("rope_theta, rope_scaling", old), ("rope_parameters", new)):
        if not part or part == {"rope_scaling": None}:
            yield Problem(where, "missing", "both spellings, of transformers before and since 5")
        elif not _same_turns(read_rope(dict(part)), config):
            yield Problem(where, str(read_rope(dict(part))), str(config.rope_parameters))


def _same_turns(rope: dict[str, Any], config: HeadConfig) -> bool:
    if rope.get("rope_type") not in ROPE_INIT_FUNCTIONS | {"default": None}:
        return False
    mine, theirs = frequencies(config.rope_parameters, config), frequencies(rope, config)
    return torch.equal(mine[0], theirs[0]) and mine[1] == theirs[1]


def frequencies(rope: dict[str, Any], config: HeadConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [hd / 2] and the factor on cosine and sine, of rotary settings on this head's layer."""
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(rope),
        )
    )
    return rotary.get_buffer("inv_freq"), float(rotary.attention_scaling)


def _target_problems(fields: Mapping[str, Any], form: Form, config: HeadConfig, target: Target) -> Iterator[Problem]:
    longest = getattr(target.config, "max_position_embeddings", None)
    mine = fields.get("max_position_embeddings")
    if mine is not None and longest is not None and mine != longest:
        yield Problem("max_position_embeddings", str(mine), f"{longest}, the target's: engines size their tables by it")
    if form.hidden_ids is not None and config.taps is not None:
        read = form.hidden_ids(fields, target.layers)
        wanted = tuple(k + 1 for k in config.taps)
        if read != wanted:
            yield Problem("eagle_aux_hidden_state_layer_ids", f"read as hidden states {list(read)}", str(list(wanted)))

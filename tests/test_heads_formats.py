"""Heads in the layouts of engines: names, shapes, config and conventions as the formats define them, both ways."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from heads.formats.contract import problems
from heads.formats.draft_vocab import d2t_problems, is_absolute
from heads.formats.files import read_folder
from heads.formats.registry import LAYOUTS
from heads.target import TargetAdapter
from tests.layouts import (
    IDS,
    LAYERS,
    H,
    V,
    a_head,
    even_target,
    exported,
    facts,
    fields_of,
    odd_target,
    shapes,
    tensors_of,
    with_token_map,
)


@pytest.fixture(scope="module")
def target() -> TargetAdapter:
    return odd_target()


@pytest.fixture(scope="module")
def plain_target() -> TargetAdapter:
    return even_target()


# ---- names and shapes, written out from the formats --------------------------------------------------------

Q, KV, MLP_ROWS = 4 * 24, 2 * 24, 96
MLP = {
    "mlp.gate_proj.weight": [MLP_ROWS, H],
    "mlp.up_proj.weight": [MLP_ROWS, H],
    "mlp.down_proj.weight": [H, MLP_ROWS],
}


def layer_keys(prefix: str, inputs: int, norms: list[str]) -> dict[str, list[int]]:
    keys = {
        "self_attn.q_proj.weight": [Q, inputs],
        "self_attn.k_proj.weight": [KV, inputs],
        "self_attn.v_proj.weight": [KV, inputs],
        "self_attn.o_proj.weight": [H, Q],
        **MLP,
        **{f"{norm}.weight": [H] for norm in norms},
    }
    return {f"{prefix}.{name}": shape for name, shape in keys.items()}


EAGLE = {"fc.weight": [H, 2 * H], **layer_keys("layers.0", H, ["post_attention_layernorm"])}
NORMS3 = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]


def eagle3_keys(layer: str, rows: int, *more: str) -> dict[str, list[int]]:
    own = {"d2t": [rows], "t2d": [V]}
    return {
        "fc.weight": [H, 3 * H],
        **layer_keys(layer, 2 * H, NORMS3),
        "norm.weight": [H],
        "lm_head.weight": [rows, H],
        **{name: own[name] for name in more},
    }


def head_keys(heads: int, blocks: int, block: str, lm_head: str | None) -> dict[str, list[int]]:
    keys: dict[str, list[int]] = {}
    for k in range(heads):
        for m in range(blocks):
            keys |= {block.format(k, m) + "weight": [H, H], block.format(k, m) + "bias": [H]}
        if lm_head is not None:
            keys[lm_head.format(k)] = [V, H]
    return keys


KEYS: list[tuple[str, str, dict[str, Any], dict[str, list[int]]]] = [
    ("vllm", "eagle", {}, EAGLE),
    ("sglang", "eagle", {}, EAGLE | {"fc.bias": [H]}),
    ("vllm", "eagle3", {"vocab": True}, eagle3_keys("midlayer", 100, "d2t", "t2d")),
    ("vllm", "eagle3", {}, eagle3_keys("midlayer", V)),
    ("vllm", "eagle3", {"projection": "shared", "vocab": True}, eagle3_keys("midlayer", 100, "d2t", "t2d")),
    (
        "vllm",
        "eagle3",
        {"fc_norm": True},
        eagle3_keys("midlayer", V) | {f"fc_norm.{i}.weight": [H] for i in range(3)},
    ),
    ("sglang", "eagle3", {"vocab": True}, eagle3_keys("midlayer", 100, "d2t", "t2d")),
    ("sglang", "eagle3", {}, eagle3_keys("midlayer", V)),
    ("speculators", "eagle3", {"vocab": True}, eagle3_keys("layers.0", 100, "d2t", "t2d")),
    ("trtllm", "eagle3", {"vocab": True}, eagle3_keys("layers.0", 100, "d2t")),
    ("vllm", "medusa", {"heads": 2}, head_keys(2, 1, "blocks.{}.layers.{}.", None) | {"lm_heads.0.weight": [V, H]}),
    (
        "vllm",
        "medusa",
        {"heads": 2, "blocks": 2, "projection": "own"},
        head_keys(2, 2, "blocks.{}.layers.{}.", "lm_heads.{}.weight"),
    ),
    ("medusa", "medusa", {"heads": 3}, head_keys(3, 1, "{}.{}.linear.", None)),
    ("medusa", "medusa", {"heads": 2, "projection": "own"}, head_keys(2, 1, "{}.{}.linear.", "{}.1.weight")),
    ("medusa", "medusa", {"heads": 2, "blocks": 2}, head_keys(2, 2, "{}.{}.linear.", "{}.2.weight")),
    (
        "trtllm",
        "medusa",
        {"heads": 2},
        head_keys(2, 1, "medusa_heads.{}.medusa_layers.{}.linear.", "medusa_heads.{}.lm_head.weight"),
    ),
    (
        "hydra",
        "hydra",
        {"heads": 1, "blocks": 2},
        {
            "hydra_mlp.0.0.linear.weight": [H, 2 * H],
            "hydra_mlp.0.0.linear.bias": [H],
            "hydra_mlp.0.0.res_connection.weight": [H, 2 * H],
            "hydra_mlp.0.0.res_connection.bias": [H],
            "hydra_mlp.0.1.linear.weight": [H, H],
            "hydra_mlp.0.1.linear.bias": [H],
            "hydra_lm_head.0.weight": [V, H],
            "hydra_lm_head.0.bias": [V],
        },
    ),
]


@pytest.mark.parametrize(("to", "kind", "options", "keys"), KEYS)
def test_names_shapes_and_back(
    target: TargetAdapter, tmp_path: Path, to: str, kind: str, options: dict[str, Any], keys: dict[str, list[int]]
) -> None:
    """The names are the format's; what is read is the head; written again it is the same file."""
    head = a_head(target, kind, **options)
    out = exported(target, head, to, tmp_path)
    assert shapes(out) == keys
    files, form = read_folder(out), LAYOUTS[to].kinds[kind]
    floats = {value.dtype for value in files.tensors.values() if value.is_floating_point()}
    assert floats == {torch.float32} and all(value.isfinite().all() for value in files.tensors.values())
    config, state = form.read(files, facts(target))
    again = form.write(state, config, facts(target))
    assert again.config == files.config
    assert again.tensors.keys() == files.tensors.keys()
    assert all(torch.equal(value, files.tensors[name]) for name, value in again.tensors.items())
    stored = to in ("hydra", "trtllm") or kind == "eagle3" or (to == "medusa" and options.get("blocks") == 2)
    if stored and options.get("projection") != "own":  # the target's LM head came along
        head = a_head(target, kind, **{**options, "projection": "own"}) if kind == "eagle3" else head
        assert {name: state[name].shape for name in head.state_dict() if name != "lm_head.weight"} == {
            name: value.shape for name, value in head.state_dict().items() if name != "lm_head.weight"
        }
        return
    assert config == replace(head.config, target="")
    assert state.keys() == head.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in head.state_dict().items())


def test_the_eagle_repository(plain_target: TargetAdapter, tmp_path: Path) -> None:
    out = exported(plain_target, a_head(plain_target, "eagle"), "eagle", tmp_path)
    assert fields_of(out)["bias"] is False and "fc.bias" not in tensors_of(out)  # its default would be a bias
    out = exported(plain_target, a_head(plain_target, "eagle3", vocab=True), "eagle", tmp_path)
    assert {"midlayer.hidden_norm.weight", "d2t", "t2d", "lm_head.weight"} <= shapes(out).keys()
    assert fields_of(out)["draft_vocab_size"] == 100


# ---- traps -------------------------------------------------------------------------------------------------


def engine_reads(fields: dict[str, Any], engine: str) -> list[int]:
    """Hidden states (0: the embeddings) that an engine captures, by its own rule."""
    nested = fields.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    default = [2, LAYERS // 2, LAYERS - 3]
    if engine == "vllm":
        return fields.get("eagle_aux_hidden_state_layer_ids") or nested or default
    return [k + 1 for k in nested] if nested else default


@pytest.mark.parametrize("to", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("taps", [None, (1, 3, 4), (0, 3, 6), (2, 4, 5)])
def test_layer_ids_mean_the_same_in_both_conventions(
    target: TargetAdapter, tmp_path: Path, to: str, taps: tuple[int, ...] | None
) -> None:
    out = exported(target, a_head(target, "eagle3", taps=taps), to, tmp_path)
    fields = fields_of(out)
    wanted = [k + 1 for k in taps or (1, 3, 4)]
    assert engine_reads(fields, "vllm") == engine_reads(fields, "sglang") == wanted
    if wanted == [2, 4, 5]:  # the default: named nowhere
        assert not fields.keys() & {"eagle_config", "eagle_aux_hidden_state_layer_ids"}
    config, _ = LAYOUTS[to].kinds["eagle3"].read(read_folder(out), facts(target))
    assert config.taps == tuple(taps or (1, 3, 4))


def test_speculators_config(target: TargetAdapter, tmp_path: Path) -> None:
    out = exported(target, a_head(target, "eagle3", vocab=True), "speculators", tmp_path)
    fields = fields_of(out)
    assert fields["norm_before_residual"] is False  # vLLM takes a missing one for true
    assert fields["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # hidden states
    assert fields["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
    assert fields["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert isinstance(fields["transformer_layer_config"], dict)
    del fields["norm_before_residual"]
    (out / "config.json").write_text(json.dumps(fields))
    assert LAYOUTS["speculators"].kinds["eagle3"].read(read_folder(out), None)[0].norm_before_residual


@pytest.mark.parametrize(
    ("kind", "to"), [("eagle", "vllm"), ("eagle", "sglang"), ("eagle3", "vllm"), ("eagle3", "sglang")]
)
def test_llama_config(target: TargetAdapter, tmp_path: Path, kind: str, to: str) -> None:
    head = a_head(target, kind)
    head.config = replace(head.config, trained_length=77)
    fields = fields_of(exported(target, head, to, tmp_path))
    architectures = {
        ("eagle", "vllm"): "LlamaForCausalLM",
        ("eagle", "sglang"): "LlamaForCausalLMEagle",
        ("eagle3", "vllm"): "LlamaForCausalLMEagle3",
        ("eagle3", "sglang"): "LlamaForCausalLMEagle3",
    }
    assert fields["architectures"] == [architectures[kind, to]] and fields["model_type"] == "llama"
    assert fields["tie_word_embeddings"] is False and fields["bias"] is False and fields["attention_bias"] is False
    assert fields["max_position_embeddings"] == 256  # the target's, not what it was trained on
    assert (fields["num_hidden_layers"], fields["head_dim"], fields["num_key_value_heads"]) == (1, 24, 2)
    assert fields["torch_dtype"] == fields["dtype"] == "float32"
    assert "quantization_config" not in fields
    assert ("draft_vocab_size" in fields) == (kind == "eagle3")
    loaded: Any = LlamaConfig(**fields)  # transformers 5 reads it
    assert loaded.rope_parameters["rope_theta"] == 777.0 and loaded.max_position_embeddings == 256


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_in_both_spellings_turns_as_the_head_does(
    target: TargetAdapter, tmp_path: Path, rope: dict[str, Any]
) -> None:
    head = a_head(target, "eagle")
    config = replace(head.config, rope_parameters=rope)
    moved = type(head)(config)
    moved.load_state_dict(head.state_dict())
    fields = fields_of(exported(target, moved, "vllm", tmp_path))
    old = {name: value for name, value in fields.items() if name != "rope_parameters"}
    new = {name: value for name, value in fields.items() if name not in ("rope_theta", "rope_scaling")}
    for spelling in (old, new, fields):
        rotary = LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(spelling)))
        assert torch.equal(rotary.get_buffer("inv_freq"), moved.get_buffer("rope.inv_freq"))


def test_medusa_config_has_no_stray_count(target: TargetAdapter, tmp_path: Path) -> None:
    """vLLM's loader renames every field with "num" and "heads", or "num" and "layers"."""
    fields = fields_of(exported(target, a_head(target, "medusa", heads=3, blocks=2), "vllm", tmp_path))
    counts = {"heads": 0, "layers": 0}
    for key in list(fields):
        if "num" in key:
            for word, name in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
                if word in key:
                    fields[name] = fields.pop(key)
                    counts[word] += 1
                    break
    assert counts == {"heads": 1, "layers": 1}
    assert (fields["num_heads"], fields["num_hidden_layers"]) == (3, 2)
    assert fields["truncated_vocab_size"] == fields["vocab_size"] == V and fields["original_lm_head"] is True


def test_d2t_is_offsets(target: TargetAdapter, tmp_path: Path) -> None:
    d2t = tensors_of(exported(target, a_head(target, "eagle3", vocab=True), "vllm", tmp_path))["d2t"]
    assert d2t.dtype == torch.int64 and torch.equal(d2t + torch.arange(len(d2t)), IDS)


@pytest.mark.parametrize("order", [IDS, IDS.flip(0)])
def test_a_token_map_is_read_but_not_written(target: TargetAdapter, tmp_path: Path, order: Tensor) -> None:
    """vLLM 0.32 fails on it: 'weights were not initialized from checkpoint: token_map'."""
    with pytest.raises(ValueError, match=r"stops at a token_map.*--whole-vocabulary"):
        exported(target, a_head(target, "medusa", vocab=True), "vllm", tmp_path)
    head = a_head(target, "medusa")
    out = with_token_map(exported(target, head, "vllm", tmp_path), order)
    form, files = LAYOUTS["vllm"].kinds["medusa"], read_folder(out)
    config, state = form.read(files, facts(target))
    assert config.draft_vocab_size == len(IDS) and torch.equal(state["draft_token_ids"], IDS)
    assert all(torch.equal(value, state[name]) for name, value in head.state_dict().items())
    assert [problem.where for problem in problems(files, form, config, facts(target))] == ["token_map"]


def test_fc_bias_policy(target: TargetAdapter, tmp_path: Path) -> None:
    head = a_head(target, "eagle")
    assert "fc.bias" not in tensors_of(exported(target, head, "vllm", tmp_path))
    assert not tensors_of(exported(target, head, "sglang", tmp_path))["fc.bias"].any()
    biased = type(head)(replace(head.config, fc_bias=True))
    with pytest.raises(ValueError, match="fc_bias is True"):
        exported(target, biased, "vllm", tmp_path)
    assert tensors_of(exported(target, biased, "sglang", tmp_path))["fc.bias"].any()


def test_sglang_takes_a_draft_vocabulary_as_a_file(target: TargetAdapter, tmp_path: Path) -> None:
    head = a_head(target, "eagle", vocab=True)
    out = exported(target, head, "sglang", tmp_path)
    assert torch.equal(torch.load(out / "draft_tokens.pt", weights_only=True), IDS)
    config, state = LAYOUTS["sglang"].kinds["eagle"].read(read_folder(out), None)
    assert config.draft_vocab_size == len(IDS) and torch.equal(state["draft_token_ids"], IDS)


def test_small_files(target: TargetAdapter, tmp_path: Path) -> None:
    """No copy of an embedding, and an LM head only where the loader must have one."""
    for kind, to in (("eagle", "vllm"), ("eagle", "sglang"), ("eagle3", "vllm"), ("medusa", "medusa")):
        names = shapes(exported(target, a_head(target, kind), to, tmp_path))
        assert not any("embed" in name for name in names)
        assert ("lm_head.weight" in names) == (kind == "eagle3")


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("vllm", "eagle", {"vocab": True}, "draft_vocab_size is 100, expected None"),
    ("vllm", "hydra", {}, "cannot serve a head of kind 'hydra'"),
    ("vllm", "medusa", {"projection": "own", "vocab": True}, "draft_vocab_size is 100"),
    ("vllm", "eagle3", {"taps": (1, 3)}, "taps are .1, 3., expected three"),
    ("sglang", "medusa", {}, "SGLang cannot serve a head of kind 'medusa'"),
    ("sglang", "eagle3", {"norm_before_residual": True}, "norm_before_residual is True, expected False"),
    ("sglang", "eagle3", {"norm_output": True}, "norm_output is True"),
    ("sglang", "eagle3", {"fc_norm": True}, "fc_norm is True"),
    ("trtllm", "eagle3", {"norm_before_residual": True}, "norm_before_residual is True"),
    ("eagle", "eagle", {}, "head_dim is 24"),
    ("medusa", "medusa", {"vocab": True}, "draft_vocab_size is 100"),
    ("medusa", "hydra", {}, "do not read the tokens"),
    ("hydra", "hydra", {"blocks": 3}, "num_blocks is 3, expected 1 or 2"),
    ("hydra", "medusa", {}, "--to medusa"),
    ("speculators", "eagle", {}, "kind 'eagle'"),
    ("trtllm", "hydra", {}, "no Hydra"),
]


@pytest.mark.parametrize(("to", "kind", "options", "words"), REFUSED)
def test_what_a_layout_cannot_express_is_refused(
    target: TargetAdapter, tmp_path: Path, to: str, kind: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        exported(target, a_head(target, kind, **options), to, tmp_path)
    assert not (tmp_path / to).exists()


def test_more_refusals(plain_target: TargetAdapter, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"taps are .0, 3, 6., expected .1, 3, 4."):
        exported(plain_target, a_head(plain_target, "eagle3", taps=(0, 3, 6)), "eagle", tmp_path)
    own = a_head(plain_target, "medusa", projection="own", vocab=True)
    with pytest.raises(ValueError, match="100 of 512 tokens only"):
        exported(plain_target, own, "medusa", tmp_path, whole_vocabulary=True)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an export of Draftsmith"):
        exported(plain_target, a_head(plain_target, "eagle"), "vllm", tmp_path)
    assert [path.name for path in (tmp_path / "vllm").iterdir()] == ["notes.txt"]


def test_whole_vocabulary(target: TargetAdapter, tmp_path: Path) -> None:
    head = a_head(target, "eagle", vocab=True)
    out = exported(target, head, "vllm", tmp_path, whole_vocabulary=True)
    assert shapes(out) == EAGLE
    assert LAYOUTS["vllm"].kinds["eagle"].read(read_folder(out), None)[0].draft_vocab_size is None


TAMPER: list[tuple[str, str, Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = [
    ("eagle3", "vllm", lambda c, t: c.update(tie_word_embeddings=True), "tie_word_embeddings is True"),
    ("eagle3", "sglang", lambda c, t: c.pop("draft_vocab_size"), "draft_vocab_size is missing"),
    ("eagle3", "vllm", lambda c, t: t.pop("lm_head.weight"), "lm_head.weight"),
    ("eagle3", "vllm", lambda c, t: t.update(extra=torch.zeros(2)), "extra is there"),
    ("eagle3", "vllm", lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), "hidden states .1, 3, 4."),
    (
        "eagle3",
        "vllm",
        lambda c, t: c.update(max_position_embeddings=64),
        "max_position_embeddings is 64",
    ),
    ("eagle3", "vllm", lambda c, t: c.update(rope_theta=1.0), "rope_theta, rope_scaling"),
    ("eagle3", "vllm", lambda c, t: c.pop("rope_parameters"), "rope_parameters is missing"),
    ("eagle3", "vllm", lambda c, t: t.update(d2t=t["d2t"].int()), "d2t is torch.int32"),
    ("eagle3", "vllm", lambda c, t: t.update(d2t=t["d2t"].flip(0)), "d2t is"),
    ("eagle3", "vllm", lambda c, t: t["t2d"].logical_not_(), "t2d is another set"),
    ("eagle3", "vllm", lambda c, t: c.update(torch_dtype="bfloat16"), "expected torch.bfloat16"),
    ("eagle3", "vllm", lambda c, t: c.update(quantization_config={}), "quantization_config"),
    ("eagle", "vllm", lambda c, t: t["fc.weight"].fill_(float("nan")), "fc.weight is not finite"),
    ("eagle", "sglang", lambda c, t: t.pop("fc.bias"), "fc.bias is missing"),
    ("eagle", "vllm", lambda c, t: t.update({"fc.bias": torch.zeros(H)}), "fc.bias is there"),
    ("medusa", "vllm", lambda c, t: c.update(num_attention_heads=4), "num_heads, num_attention_heads"),
]


@pytest.mark.parametrize(("kind", "to", "tamper", "words"), TAMPER, ids=[row[3] for row in TAMPER])
def test_the_check_sees(
    target: TargetAdapter, tmp_path: Path, kind: str, to: str, tamper: Callable[..., Any], words: str
) -> None:
    head = a_head(target, kind, vocab=kind == "eagle3")
    out = exported(target, head, to, tmp_path)
    fields, tensors = fields_of(out), load_file(out / "model.safetensors")
    form = LAYOUTS[to].kinds[kind]
    assert list(problems(read_folder(out), form, head.config, facts(target))) == []
    tamper(fields, tensors)
    (out / "config.json").write_text(json.dumps(fields))
    save_file(tensors, out / "model.safetensors")
    found = "; ".join(map(str, problems(read_folder(out), form, head.config, facts(target))))
    assert re.search(words, found), found


# ---- d2t and t2d -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 199), min_size=2, max_size=150))
def test_draft_vocabulary_maps(kept: set[int]) -> None:
    ids = torch.tensor(sorted(kept))
    d2t = ids - torch.arange(len(ids))
    t2d = torch.zeros(200, dtype=torch.bool).index_fill_(0, ids, True)
    assert list(d2t_problems(d2t, t2d, 200)) == [] and (d2t.diff() >= 0).all()
    wrong = t2d.clone()
    wrong[ids[0]] = False
    assert [p.where for p in d2t_problems(d2t, wrong, 200)] == ["t2d"]
    assert is_absolute(ids, t2d, 200) and not is_absolute(d2t, t2d, 200)
    swapped = ids.flip(0) - torch.arange(len(ids))
    assert any(p.found == "not ascending" for p in d2t_problems(swapped, None, 200))
    assert [p.found for p in d2t_problems(ids, t2d, 200)] == ["target ids"]


def test_d2t_of_the_published_example() -> None:
    ids = torch.tensor([0, 3, 7, 8, 100])
    assert (ids - torch.arange(5)).tolist() == [0, 2, 5, 5, 96]
    assert [p.found for p in d2t_problems(torch.tensor([0, 3, 7, 8, 100]), None, 101)] == ["target ids"]

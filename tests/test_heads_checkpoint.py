"""Native checkpoints and head configs: round trips, and one clear error for each kind of damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from heads.checkpoint import load_head, read_config, recover, save_head
from heads.config import HeadConfig
from heads.registry import build_head
from tests.tiny import tiny_head, tiny_target


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_head(tiny_head(tiny_target("llama")), tmp_path / "head", {"run.yaml": "a: 1\n"})


def test_round_trip(saved: Path) -> None:
    head = tiny_head(tiny_target("llama"))
    loaded = load_head(saved)
    assert loaded.config == head.config and not loaded.training
    assert loaded.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in head.state_dict().items())
    assert (saved / "run.yaml").read_text() == "a: 1\n"


def test_stored_precision_leaves_integers_alone(tmp_path: Path) -> None:
    config = HeadConfig.derive("eagle", LlamaConfig(hidden_size=64, num_attention_heads=4), 40000, "t", None, 300)
    head = build_head(config)
    ids = torch.arange(39700, 40000)  # bf16 cannot hold these
    head.draft_token_ids.copy_(ids)
    loaded = load_head(save_head(head, tmp_path / "head", dtype=torch.bfloat16))
    assert torch.equal(loaded.draft_token_ids, ids)
    assert next(loaded.parameters()).dtype == torch.bfloat16
    assert torch.equal(loaded.get_buffer("rope.inv_freq"), head.get_buffer("rope.inv_freq"))  # positions stay exact
    assert torch.equal(loaded.bfloat16().get_buffer("rope.inv_freq"), head.get_buffer("rope.inv_freq"))
    assert load_head(tmp_path / "head", dtype=torch.float32).draft_token_ids.dtype == torch.int64


def test_a_head_is_replaced_whole_and_nothing_else_is(saved: Path, tmp_path: Path) -> None:
    save_head(tiny_head(tiny_target("llama"), seed=9), saved)
    assert not (saved / "run.yaml").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head"]
    foreign = tmp_path / "mine"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match="not a Draftsmith head"):
        save_head(tiny_head(tiny_target("llama")), foreign)
    assert (foreign / "notes.txt").read_text() == "x"


def test_what_a_kill_left_is_cleared(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "head.tmp-1").mkdir()
    saved.rename(tmp_path / "head.old-1")  # killed between setting the old head aside and moving the new one in
    recover(saved)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head"]
    load_head(saved)


def test_damage_is_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json"):
        load_head(tmp_path / "nothing")
    weights = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(weights[:-50])
    with pytest.raises(ValueError, match=r"model.safetensors"):
        load_head(saved)
    (saved / "model.safetensors").write_bytes(b"\x80\x04 a pickle is not read")
    with pytest.raises(ValueError, match=r"model.safetensors"):
        load_head(saved)
    (saved / "model.safetensors").write_bytes(weights)
    config = json.loads((saved / "config.json").read_text())
    for change, words in (
        ({"intermediate_size": 100}, "does not fit"),
        ({"kind": "eagel"}, "eagel"),
        ({"hiden_size": 64}, "hidden_size"),
        ({"format_version": 99}, "99"),
    ):
        (saved / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match=words):
            load_head(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_config(saved)


def test_config_follows_the_target() -> None:
    llama = LlamaConfig(
        hidden_size=48,
        intermediate_size=100,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=3e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 777.0},
    )
    mine = HeadConfig.derive("eagle", llama, 1000, "t", "r")
    assert (mine.hidden_size, mine.intermediate_size, mine.head_dim) == (48, 100, 8)
    assert (mine.num_attention_heads, mine.num_key_value_heads) == (6, 2)
    assert mine.rms_norm_eps == 3e-6 and mine.rope_parameters["rope_theta"] == 777.0
    assert HeadConfig.from_dict(mine.to_dict()) == mine
    gpt2 = HeadConfig.derive("eagle", GPT2Config(n_embd=64, n_head=4), 1000, "t")
    assert (gpt2.intermediate_size, gpt2.num_key_value_heads, gpt2.rms_norm_eps) == (256, 4, 1e-5)
    with pytest.raises(ValueError, match="missing"):
        HeadConfig.from_dict({"kind": "eagle"})
    old = mine.to_dict()  # written before these fields were there
    del old["target_adapter"], old["embedding_scale"]
    assert HeadConfig.from_dict(old) == mine
    with pytest.raises(ValueError, match="format_version None"):
        HeadConfig.from_dict({name: value for name, value in old.items() if name != "format_version"})

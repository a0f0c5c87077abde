"""A target with a peft adapter in its weights is the adapted model: its logits, its greedy text, or an error."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftModel, PromptTuningConfig
from safetensors.torch import load_file, save_file
from torch import nn

from heads.adapter import find_adapter, merge_adapter
from heads.base import TreePolicy
from heads.target import TargetAdapter
from infer.engine import DecodeOptions, RowRequest, decode
from infer.stopping import StopRule
from tests.adapters import IDS, adapted, change_config, logits, save_adapter
from tests.tiny import ARCHITECTURES, CONFIGS, prompt_ids, tiny_head, tiny_model

ROOT = Path(__file__).resolve().parents[1]


def lora(modules: Any, **more: Any) -> LoraConfig:
    return LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "target_modules": modules, **more})


# name -> (model, adapter)
KINDS: dict[str, tuple[str, Any]] = {
    "all linear": ("llama", lora("all-linear")),
    "scaled": ("llama", lora(["q_proj", "down_proj"], use_rslora=True, lora_alpha=3)),
    "dora": ("llama", lora("all-linear", use_dora=True)),
    "biases": ("qwen2", lora(["q_proj"], bias="all")),
    "transposed": ("gpt2", lora(["c_attn", "c_fc"], fan_in_fan_out=True)),
    "experts": ("qwen3_moe", lora(["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])),
    "loha": ("llama", LoHaConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])),
    "ia3": (
        "llama",
        IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "lm head, tied": ("llama_tied", lora(["v_proj", "lm_head"])),
    "embeddings, tied": ("llama_tied", lora(["embed_tokens"])),
    "both, tied": ("llama_tied", lora(["embed_tokens", "lm_head"])),
    "both as one, tied": ("llama_tied", lora(["embed_tokens", "lm_head"], ensure_weight_tying=True)),
    "whole lm head, tied": ("llama_tied", lora(["q_proj"], modules_to_save=["lm_head"])),
    "both whole": ("llama", lora(["q_proj"], modules_to_save=["embed_tokens", "lm_head"])),
    "some tokens, tied": ("llama_tied", lora(["q_proj"], trainable_token_indices=[3, 7, int(IDS[0, 2])])),
}


def model_of(name: str) -> Any:
    return tiny_model(CONFIGS[name] if name in CONFIGS else ARCHITECTURES[name])


@pytest.fixture(scope="module", name="place")
def make_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the base (tiny llama) and an adapter for it."""
    place = tmp_path_factory.mktemp("adapter")
    tiny_model("llama").save_pretrained(place / "base")
    save_adapter(place / "lora")
    return place


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, torch.float32) for kind in KINDS]
    + [(kind, torch.float64) for kind in KINDS if kind != "experts"],  # the library's kernel for them has no fp64
)
def test_merged_logits_are_the_unmerged_ones(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """(W + BA) x against Wx + B(Ax): one function with sums in another order, so up to rounding in three layers."""
    name, config = KINDS[kind]
    model_of(name).save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "lora", model_of(name), config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = model_of(name).to(dtype)
        want = logits(PeftModel.from_pretrained(base, str(tmp_path / "lora"), torch_device="cpu").eval())
    target = TargetAdapter.load(str(tmp_path / "base"), dtype=dtype, adapter=str(tmp_path / "lora"))
    # 0.0001 is 100 times what was seen; in fp64 nothing else may be left of it.
    tolerance = 1e-4 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(logits(target.model), want, atol=tolerance, rtol=tolerance)
    assert (want - logits(model_of(name).to(dtype))).abs().max() > 0.1, "the adapter does nothing: nothing is shown"
    assert not any("lora" in key or "base_layer" in key for key in target.model.state_dict())
    assert type(target.model) is type(model_of(name))
    target.check_head_path()


def test_an_adapted_lm_head_leaves_tied_embeddings_alone(tmp_path: Path) -> None:
    """Merged by peft alone both would change, since they are one tensor."""
    save_adapter(tmp_path, "llama_tied", lora(["lm_head"]))
    base, model = tiny_model("llama_tied"), tiny_model("llama_tied")
    merged = merge_adapter(model, find_adapter(str(tmp_path)), ["base"])
    assert torch.equal(merged.model.embed_tokens.weight, base.model.embed_tokens.weight)
    assert not torch.equal(merged.lm_head.weight, base.lm_head.weight)
    assert not merged.config.tie_word_embeddings
    merged.save_pretrained(tmp_path / "merged")
    again = type(merged).from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(again), logits(merged))


def test_tied_embeddings_stay_tied_where_nothing_touches_them(tmp_path: Path) -> None:
    save_adapter(tmp_path, "llama_tied")
    merged = merge_adapter(tiny_model("llama_tied"), find_adapter(str(tmp_path)), ["base"])
    assert merged.lm_head.weight is merged.model.embed_tokens.weight and merged.config.tie_word_embeddings


def test_what_is_on_disk_stays(place: Path) -> None:
    def digests() -> dict[str, str]:
        files = [path for path in sorted(place.rglob("*")) if path.is_file()]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = digests()
    target = TargetAdapter.load(str(place / "base"), adapter=str(place / "lora"))
    assert digests() == before
    assert target.adapter == str(place / "lora") and target.name == f"{place / 'base'} with {place / 'lora'}"
    assert target.adapter_sha256 == before[str(place / "lora" / "adapter_model.safetensors")]
    plain = TargetAdapter.load(str(place / "base"))
    assert plain.adapter is None and plain.adapter_sha256 is None and plain.name == str(place / "base")


def test_an_adapter_switched_off_is_the_base() -> None:
    wrapped = adapted(tiny_model("llama"))
    on = logits(wrapped)
    with wrapped.disable_adapter():
        assert torch.equal(logits(wrapped), logits(tiny_model("llama")))
    assert torch.equal(logits(wrapped), on) and not torch.equal(on, logits(tiny_model("llama")))


@pytest.mark.parametrize("lengths", [[9], [7, 3, 12]])
def test_greedy_text_is_that_of_peft(place: Path, lengths: list[int]) -> None:
    """Alone, and in a ragged batch, with an EAGLE head on the adapted target."""
    prompts = [prompt_ids(length, seed=length) for length in lengths]
    wrapped = adapted(tiny_model("llama"))
    want = []
    for ids in prompts:
        settings: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
        want.append(wrapped.generate(input_ids=torch.tensor([ids]), **settings)[0, len(ids) :].tolist())
    target = TargetAdapter.load(str(place / "base"), adapter=str(place / "lora"))
    rows = [RowRequest(ids, StopRule(frozenset(), 30)) for ids in prompts]
    found = decode(target, tiny_head(target), rows, DecodeOptions(policy=TreePolicy(width=3, depth=3, total=8)))
    assert [row.ids for row in found] == want
    assert len(set(want[0])) > 5, "one token for ever: nothing is shown"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(place: Path, dtype: torch.dtype) -> None:
    """W' is the nearest to the exact sum, but for ties within fp32's own rounding; peft alone rounds twice."""
    target = TargetAdapter.load(str(place / "base"), dtype=dtype, adapter=str(place / "lora"))
    base = tiny_model("llama").to(dtype)
    wrapped: Any = PeftModel.from_pretrained(tiny_model("llama").to(dtype), str(place / "lora"), torch_device="cpu")
    exact = {}
    for name, layer in wrapped.base_model.model.named_modules():
        if hasattr(layer, "lora_A"):
            a, b = layer.lora_A["default"].weight.double(), layer.lora_B["default"].weight.double()
            exact[name] = base.get_submodule(name).weight.double() + b @ a * layer.scaling["default"]
    theirs = wrapped.merge_and_unload(safe_merge=True)
    total = sum(weight.numel() for weight in exact.values())

    def wrong(model: Any) -> float:
        pairs = ((model.get_submodule(name).weight, weight.to(dtype)) for name, weight in exact.items())
        return sum(int((mine != nearest).sum()) for mine, nearest in pairs) / total

    assert wrong(target.model) < 2e-4 < 1e-2 < wrong(theirs)
    assert {p.dtype for p in target.model.parameters()} == {dtype}


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_a_device_map_changes_nothing(place: Path, device_map: Any) -> None:
    kwargs: dict[str, Any] = {"adapter": str(place / "lora"), "dtype": torch.float32}
    target = TargetAdapter.load(str(place / "base"), device_map=device_map, **kwargs)
    assert torch.equal(logits(target.model), logits(TargetAdapter.load(str(place / "base"), **kwargs).model))


def test_an_adapter_of_another_base_is_told(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_adapter(tmp_path / "lora")
    for made_for, told in (("org/other-model", True), ("elsewhere/base", False), ("ORG/Base", False), (None, False)):
        change_config(tmp_path / "lora", base_model_name_or_path=made_for)
        TargetAdapter.load(str(place / "base"), adapter=str(tmp_path / "lora"))
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: target.adapter")]
        assert len(lines) == told and all(str(made_for) in line and str(place / "base") in line for line in lines)


# ---- errors ------------------------------------------------------------------------------------------------


def spoil(folder: Path, how: str) -> None:
    weights = folder / "adapter_model.safetensors"
    if how == "pickle only":
        torch.save(load_file(weights), folder / "adapter_model.bin")
        weights.unlink()
    elif how == "no config":
        (folder / "adapter_config.json").unlink()
    elif how == "damaged":
        weights.write_bytes(weights.read_bytes()[:-50])
    elif how == "not JSON":
        (folder / "adapter_config.json").write_text("{")
    elif how == "no type":
        (folder / "adapter_config.json").write_text("{}")
    elif how == "unknown type":
        change_config(folder, peft_type="LAURA")
    elif how == "no such modules":
        change_config(folder, target_modules=["wqkv"])
    else:
        tensors = load_file(weights)
        first = sorted(tensors)[0]
        if how == "not finite":
            tensors[first][0, 0] = float("nan")
        elif how == "fewer":
            del tensors[first]
        elif how == "more":
            tensors[first.replace("layers.0", "layers.7")] = tensors[first].clone()
        elif how == "too large":
            tensors = {name: tensor * 1e4 for name, tensor in tensors.items()}
        save_file(tensors, weights)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("pickle only", r"has no adapter_model\.safetensors; an adapter_model\.bin, a pickle, is not read"),
        ("no config", r"has no adapter_config\.json; expected the directory or hub id of a peft adapter"),
        ("damaged", r"adapter_model\.safetensors cannot be read"),
        ("not JSON", r"adapter_config\.json is not a peft config"),
        ("unknown type", r"adapter_config\.json is not a peft config .*LAURA"),
        ("no type", r"adapter_config\.json has no peft_type"),
        ("no such modules", r"does not fit LlamaForCausalLM: .*wqkv"),
        ("not finite", r"holds values in .*lora_A.* that are not finite"),
        ("fewer", r"lacks weights in the target: .*lora_A"),
        ("more", r"has weights without a place in the target: .*layers\.7"),
        ("too large", r"too large for torch\.float16; load the target in float32"),
    ],
)
def test_damage_is_named(place: Path, tmp_path: Path, how: str, words: str) -> None:
    save_adapter(tmp_path / "lora")
    spoil(tmp_path / "lora", how)
    with pytest.raises(ValueError, match=rf"(?s)^target\.adapter: .*{words}"):
        TargetAdapter.load(str(place / "base"), dtype=torch.float16, adapter=str(tmp_path / "lora"))


def test_nothing_there(place: Path, tmp_path: Path) -> None:
    for name in (str(tmp_path / "nowhere"), "./no/such/directory"):
        with pytest.raises(ValueError, match=r"target\.adapter: .*has no adapter_config\.json"):
            TargetAdapter.load(str(place / "base"), adapter=name)


def test_an_adapter_is_no_target(place: Path) -> None:
    with pytest.raises(ValueError, match=r"target\.path: .*is an adapter; give its base here"):
        TargetAdapter.load(str(place / "lora"))


def test_a_base_with_an_adapter_beside_it(place: Path, tmp_path: Path) -> None:
    """The library puts it in, not merged; a second one on top is refused."""
    tiny_model("llama").save_pretrained(tmp_path)
    change_config(save_adapter(tmp_path), base_model_name_or_path=str(place / "base"))
    target = TargetAdapter.load(str(tmp_path))
    assert torch.equal(logits(target.model), logits(adapted(tiny_model("llama"))))
    with pytest.raises(ValueError, match=r"target\.adapter: .* has an adapter already"):
        TargetAdapter.load(str(tmp_path), adapter=str(place / "lora"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "of type PROMPT_TUNING, which adds"),
        (lora(["q_proj"], alora_invocation_tokens=[3, 4]), "cannot be merged into the weights.*aLoRA"),
    ],
)
def test_what_is_no_change_of_weights_is_refused(place: Path, tmp_path: Path, config: Any, words: str) -> None:
    save_adapter(tmp_path, config=config)
    with pytest.raises(ValueError, match=rf"target\.adapter: .*{words}"):
        TargetAdapter.load(str(place / "base"), adapter=str(tmp_path))


def test_another_width_is_refused(place: Path, tmp_path: Path) -> None:
    config = type(CONFIGS["llama"])(**{**CONFIGS["llama"].to_dict(), "hidden_size": 32})
    save_adapter(tmp_path, tiny_model(config))
    with pytest.raises(ValueError, match=r"(?s)target\.adapter: .*does not fit the target: .*size mismatch"):
        TargetAdapter.load(str(place / "base"), adapter=str(tmp_path))


class Packed(nn.Module):
    """A quantised layer that peft does not know."""


def test_weights_that_cannot_take_it_are_refused(place: Path) -> None:
    files = find_adapter(str(place / "lora"))
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj = Packed()
    with pytest.raises(ValueError, match=r"(?s)target\.adapter: .*does not fit LlamaForCausalLM: .*Packed"):
        merge_adapter(model, files, ["base"])
    offloaded = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    with pytest.raises(ValueError, match=r"target\.adapter: .*offloaded weights; choose a device_map"):
        TargetAdapter.load(
            str(place / "base"), adapter=str(place / "lora"), device_map={**offloaded, "lm_head": "disk"}
        )


def test_layers_that_cannot_merge_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer

    monkeypatch.setattr(Linear, "merge", BaseTunerLayer.merge)  # as those of most quantised formats
    with pytest.raises(ValueError, match=r"cannot be merged into the weights of LlamaForCausalLM"):
        TargetAdapter.load(str(place / "base"), adapter=str(place / "lora"))


def test_peft_is_imported_only_where_it_is_used() -> None:
    """It takes seconds, which every command would pay."""
    code = "import sys, heads.target, infer.cli, train.joint, train.loop; assert 'peft' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

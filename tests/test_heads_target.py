"""The adapter's hooks, head path and attention are the library's own."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from heads.masks import Masks
from heads.target import GQA_SDPA, TargetAdapter
from heads.tree import additive_mask
from tests.tiny import _GATED, CONFIGS, prompt_ids, tiny_model, tiny_target

IDS = prompt_ids(10)


def causal(length: int) -> torch.Tensor:
    return additive_mask(torch.ones(1, length, length, dtype=torch.bool).tril(), torch.float32)


def run(target: TargetAdapter, mask: Masks | None = None, keep: Sequence[int] | None = None) -> Any:
    count = len(IDS)
    positions = torch.arange(count)[None]
    mask = causal(count) if mask is None else mask
    return target.forward(torch.tensor([IDS]), positions, mask, target.new_cache(count), keep)


@pytest.mark.parametrize("name", CONFIGS)
def test_taps_and_features_are_the_hidden_states(name: str) -> None:
    target = tiny_target(name, taps=(0, 1))
    out = run(target)
    want = tiny_model(name)(torch.tensor([IDS]), output_hidden_states=True)
    for k in (0, 1):
        torch.testing.assert_close(out.taps[k], want.hidden_states[k + 1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.hidden_BNH, want.hidden_states[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.logits_BNV, want.logits, atol=1e-4, rtol=1e-4)
    some = run(target, keep=[2, 7, 9])
    torch.testing.assert_close(some.logits_BNV, want.logits[:, [2, 7, 9]], atol=1e-4, rtol=1e-4)
    assert some.hidden_BNH.shape[1] == len(IDS)


def test_the_mask_given_is_the_mask_used() -> None:
    target = tiny_target("llama")
    hidden = causal(len(IDS))
    hidden[..., 5:, 2] = torch.finfo(torch.float32).min
    plain, masked = run(target).logits_BNV, run(target, hidden).logits_BNV
    torch.testing.assert_close(plain[:, :5], masked[:, :5])
    assert (plain[:, 5:] - masked[:, 5:]).abs().amax(-1).min() > 1e-2


def test_boolean_masks_are_refused() -> None:
    boolean = torch.ones(1, 1, len(IDS), len(IDS), dtype=torch.bool)
    with pytest.raises(AssertionError, match="mask"):
        run(tiny_target("llama"), boolean)
    with pytest.raises(AssertionError, match="mask"):
        run(tiny_target("llama"), {"full_attention": boolean})


def test_a_layer_that_is_not_there_cannot_be_tapped() -> None:
    with pytest.raises(ValueError, match="no decoder layer 3: LlamaForCausalLM has 3"):
        tiny_target("llama", taps=(3,))


def test_hidden_states_of_padded_rows() -> None:
    target = tiny_target("llama")
    rows = [IDS, IDS[3:]]
    ids = torch.zeros(2, len(IDS), dtype=torch.long)
    valid = torch.zeros(2, len(IDS), dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)], valid[i, : len(row)] = torch.tensor(row), True
    hidden = target.hidden_states(ids, valid)
    for i, row in enumerate(rows):
        want = tiny_model("llama")(torch.tensor([row]), output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(hidden[i, : len(row)], want[0], atol=1e-4, rtol=1e-4)


def scaled_config(name: str) -> Any:
    """Tiny configs of models that scale or cap their logits outside the LM head."""
    kinds: dict[str, tuple[str, str, dict[str, Any]]] = {
        "granite": ("granite", "GraniteConfig", {"logits_scaling": 3.0}),
        "cohere2": ("cohere2", "Cohere2Config", {"logit_scale": 0.25}),
        "gemma2": ("gemma2", "Gemma2Config", {"final_logit_softcapping": 5.0, "head_dim": 16}),
    }
    module, config, extra = kinds[name]
    try:
        found = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    except ImportError:
        pytest.skip(f"this transformers has no {name}")
    return getattr(found, config)(**_GATED, **extra)


@pytest.mark.parametrize("name", [*CONFIGS, "granite", "cohere2", "gemma2"])
def test_logits_from_features(name: str) -> None:
    target = tiny_target(name if name in CONFIGS else scaled_config(name))
    target.check_head_path()
    out = run(target)
    torch.testing.assert_close(target.logits(out.hidden_BNH), out.logits_BNV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["granite", "cohere2", "gemma2"])
def test_scaled_logits_matter(name: str) -> None:
    target = tiny_target(scaled_config(name))
    out = run(target)
    assert (target.lm_head(out.hidden_BNH) - out.logits_BNV).abs().max() > 0.1


def test_an_altered_head_path_is_refused() -> None:
    model = tiny_model("llama")
    whole = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = whole(*args, **kwargs)
        out.logits = out.logits * 1.01
        return out

    target = TargetAdapter(model)
    model.forward = forward
    with pytest.raises(ValueError, match="known scale or cap"):
        target.check_head_path()


@pytest.mark.parametrize("reference", ["sdpa", "eager"])
def test_grouped_attention_equals_the_librarys(reference: str) -> None:
    """On a masked tree-like pass and on the unmasked causal one. Gradients are not needed: inference only."""
    target = tiny_target("llama")
    assert target.config._attn_implementation == GQA_SDPA
    mask = causal(len(IDS))
    mask[..., 6:, 3:5] = torch.finfo(torch.float32).min
    other = tiny_model("llama")
    other.set_attn_implementation(reference)
    positions = torch.arange(len(IDS))[None]
    want = other(torch.tensor([IDS]), position_ids=positions, attention_mask=mask).logits
    torch.testing.assert_close(run(target, mask).logits_BNV, want, atol=1e-4, rtol=1e-4)
    want = other(torch.tensor([IDS])).logits
    got = target.model(torch.tensor([IDS])).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_grouped_attention_refuses_what_it_would_ignore() -> None:
    attention = AttentionInterface()[GQA_SDPA]
    q, kv = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="eager"):
        attention(torch.nn.Module(), q, kv, kv, None, softcap=30.0)


def test_end_of_sequence_ids() -> None:
    target = tiny_target("llama")
    for given, expected in ((None, set()), (7, {7}), ([7, 9], {7, 9})):
        target.model.generation_config.eos_token_id = given
        assert target.eos_ids == frozenset(expected)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(path)
    return str(path)


OFFLOADED = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


@pytest.mark.parametrize("device_map", [None, "auto", OFFLOADED], ids=["none", "auto", "offloaded"])
def test_where_the_weights_are_changes_nothing(stored: str, device_map: Any) -> None:
    target = TargetAdapter.load(stored, device_map=device_map, dtype=torch.float32, taps=(1,))
    assert (target.lm_head.weight.device.type == "meta") == (device_map is OFFLOADED)
    assert target.device == target.head_device == torch.device("cpu") and target.dtype == torch.float32
    out, want = run(target), run(tiny_target("llama", taps=(1,)))
    torch.testing.assert_close(out.logits_BNV, want.logits_BNV, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.taps[1], want.taps[1], atol=1e-4, rtol=1e-4)
    target.check_head_path()
    few = torch.tensor([3, 500])
    torch.testing.assert_close(target.logits_of_tokens(few)(out.hidden_BNH), target.logits(out.hidden_BNH)[..., few])


class Hook:
    """What accelerate leaves on a module that computes elsewhere than its weights lie."""

    def __init__(self, device: str) -> None:
        self.execution_device = device


def test_devices_of_a_spread_model() -> None:
    """With "meta" in place of a second device: what heads read must come out where the LM head computes."""
    target = tiny_target("llama", taps=(0,))
    target.lm_head._hf_hook = Hook("meta")
    assert target.device.type == "cpu" and target.head_device.type == "meta"
    out = run(target)
    assert out.logits_BNV.device.type == out.hidden_BNH.device.type == out.taps[0].device.type == "meta"
    valid = torch.ones(1, len(IDS), dtype=torch.bool)
    assert target.features(torch.tensor([IDS]), valid, taps=(0,)).device.type == "meta"
    assert target.embed(torch.tensor([IDS])).device.type == "meta"


def test_quantising_while_loading(stored: str) -> None:
    with pytest.raises(ValueError, match=r"target\.quantize is '3bit', expected 4bit, 8bit"):
        TargetAdapter.load(stored, quantize="3bit")
    if importlib.util.find_spec("bitsandbytes") is None:
        with pytest.raises(ValueError, match=r"target\.path.*bitsandbytes"):
            TargetAdapter.load(stored, quantize="8bit")
    else:
        target = TargetAdapter.load(stored, quantize="8bit", dtype=torch.bfloat16)
        assert target.vocab_size == 512 and target.hidden_size == 64 and target.dtype == torch.bfloat16
        target.check_head_path()


def test_a_quantised_lm_head_gives_logits_of_tokens_too() -> None:
    """Its weight is packed: another shape and dtype, so sizes come from the module and no row can be copied."""
    model = tiny_model("llama")
    head = model.lm_head
    want = tiny_target("llama").logits(hidden := torch.randn(2, 64, generator=torch.Generator().manual_seed(0)))
    dense = head.weight.detach().clone()
    head.weight = torch.nn.Parameter(torch.zeros(64 * 256, 1, dtype=torch.uint8), requires_grad=False)
    head.forward = lambda x: torch.nn.functional.linear(x, dense)
    target = TargetAdapter(model)
    assert target.vocab_size == 512 and target.hidden_size == 64
    torch.testing.assert_close(target.logits(hidden), want)
    torch.testing.assert_close(target.logits_of_tokens(torch.tensor([5, 9]))(hidden), want[..., [5, 9]])


def test_a_missing_target_is_told() -> None:
    with pytest.raises(ValueError, match=r"target\.path"):
        TargetAdapter.load("./no/such/directory")


@pytest.mark.parametrize("native", [torch.float32, torch.bfloat16])
def test_auto_avoids_what_a_cpu_would_emulate(
    native: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama").bfloat16().save_pretrained(tmp_path)
    monkeypatch.setattr("heads.target.fast_dtype", lambda device: native)
    assert TargetAdapter.load(str(tmp_path)).dtype == native
    assert TargetAdapter.load(str(tmp_path), dtype="bfloat16").dtype == torch.bfloat16

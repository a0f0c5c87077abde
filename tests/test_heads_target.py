"""The adapter's hooks, head path and attention are the library's own."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from heads.target import _GQA_SDPA, TargetAdapter
from heads.tree import additive_mask
from tests.tiny import _GATED, CONFIGS, prompt_ids, tiny_model, tiny_target

IDS = prompt_ids(10)


def causal(length: int) -> torch.Tensor:
    return additive_mask(torch.ones(1, length, length, dtype=torch.bool).tril(), torch.float32)


def run(target: TargetAdapter, mask: torch.Tensor | None = None, keep_last: int = 0) -> Any:
    count = len(IDS)
    positions = torch.arange(count)[None]
    mask = causal(count) if mask is None else mask
    return target.forward(torch.tensor([IDS]), positions, mask, target.new_cache(count), keep_last)


@pytest.mark.parametrize("name", CONFIGS)
def test_taps_and_features_are_the_hidden_states(name: str) -> None:
    target = tiny_target(name, taps=(0, 1))
    out = run(target)
    want = tiny_model(name)(torch.tensor([IDS]), output_hidden_states=True)
    for k in (0, 1):
        torch.testing.assert_close(out.taps[k], want.hidden_states[k + 1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.hidden_BNH, want.hidden_states[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.logits_BNV, want.logits, atol=1e-4, rtol=1e-4)
    last = run(target, keep_last=3)
    torch.testing.assert_close(last.logits_BNV, want.logits[:, -3:], atol=1e-4, rtol=1e-4)
    assert last.hidden_BNH.shape[1] == len(IDS)


def test_the_mask_given_is_the_mask_used() -> None:
    target = tiny_target("llama")
    hidden = causal(len(IDS))
    hidden[..., 5:, 2] = torch.finfo(torch.float32).min
    plain, masked = run(target).logits_BNV, run(target, hidden).logits_BNV
    torch.testing.assert_close(plain[:, :5], masked[:, :5])
    assert (plain[:, 5:] - masked[:, 5:]).abs().amax(-1).min() > 1e-2


def test_boolean_masks_are_refused() -> None:
    with pytest.raises(AssertionError, match="mask"):
        run(tiny_target("llama"), torch.ones(1, 1, len(IDS), len(IDS), dtype=torch.bool))


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
    assert target.config._attn_implementation == _GQA_SDPA
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
    attention = AttentionInterface()[_GQA_SDPA]
    q, kv = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="eager"):
        attention(torch.nn.Module(), q, kv, kv, None, softcap=30.0)


def test_end_of_sequence_ids() -> None:
    target = tiny_target("llama")
    for given, expected in ((None, set()), (7, {7}), ([7, 9], {7, 9})):
        target.model.generation_config.eos_token_id = given
        assert target.eos_ids == frozenset(expected)


def test_a_missing_target_is_told() -> None:
    with pytest.raises(ValueError, match=r"target\.path"):
        TargetAdapter.load("./no/such/directory")

"""Training's view of the EAGLE head against independent forwards, and against what decoding does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from heads.base import HeadBatch, LossSpec, Needs, StepCounts
from heads.eagle import EagleHead
from tests.tiny import prompt_ids, tiny_head, tiny_target
from tests.tiny_run import check_overfitting
from train.batching import make_batch
from train.conversations import TokenRow


def _batch(target: Any, lengths: list[int], steps: int, dtype: torch.dtype) -> HeadBatch:
    generator = torch.Generator().manual_seed(5)
    rows, features = [], []
    for number, length in enumerate(lengths):
        rows.append(TokenRow(str(number), tuple(prompt_ids(length, number)), ((2, length),), "t"))
        features.append(torch.randn(length, target.hidden_size, generator=generator, dtype=dtype))
    return make_batch(rows, features, steps, Needs())


def _library_layer(head: Any) -> tuple[Any, Any]:
    """transformers' own Llama layer with the head's weights and no norm before attention."""
    c = head.config
    config = LlamaConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters=dict(c.rope_parameters),
    )
    config._attn_implementation = "eager"
    layer: Any = LlamaDecoderLayer(config, 0).double()
    result = layer.load_state_dict(head.layer.state_dict(), strict=False)
    assert result.missing_keys == ["input_layernorm.weight"] and not result.unexpected_keys
    layer.input_layernorm = torch.nn.Identity()
    return layer, LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_unroll_equals_a_chain_drafted_from_every_root(name: str) -> None:
    """Oracle: for each root alone, a growing causal sequence [true inputs up to the root, own drafts]."""
    target = tiny_target(name)
    target.model.double()
    head = tiny_head(target).double()
    assert isinstance(head, EagleHead)
    layer, rope = _library_layer(head)
    steps, lengths = 4, [9, 6]
    batch = _batch(target, lengths, steps, torch.float64)
    with torch.no_grad():
        unrolled = list(head.unroll(batch))
        for row, length in enumerate(lengths):
            for root in range(1, length - steps - 1):  # the first one is not supervised, so nothing is made there
                inputs = head.join(batch.token_KBT[0, row, : root + 1], batch.feature_BTH[row, : root + 1])[0]
                for k in range(steps):
                    size = inputs.shape[0]
                    mask = torch.full((size, size), -torch.inf, dtype=torch.float64).triu(1)[None, None]
                    position = rope(inputs[None], torch.arange(size)[None])
                    out = layer(inputs[None], attention_mask=mask, position_embeddings=position)[0, -1]
                    # fp64, but the library's norms round to fp32 inside, and the chain amplifies that
                    torch.testing.assert_close(unrolled[k][row, root], out, rtol=1e-3, atol=1e-4)
                    token = batch.token_KBT[min(k + 1, steps - 1), row, root]
                    inputs = torch.cat([inputs, head.join(token[None], out[None])[0]])


def test_padding_changes_nothing() -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    spec = LossSpec(1.0, 0.1, 0.8)
    both = head(_batch(target, [12, 7], 3, torch.float32), spec, measure=True)
    generator_rows = _batch(target, [12, 7], 3, torch.float32)
    alone = []
    for row, length in enumerate([12, 7]):
        cut = HeadBatch(
            generator_rows.feature_BTH[row : row + 1, :length],
            generator_rows.token_KBT[:, row : row + 1, :length],
            tuple(t[row : row + 1, :length] for t in generator_rows.teacher),
            generator_rows.weight_KBT[:, row : row + 1, :length],
            generator_rows.valid_BT[row : row + 1, :length],
            ((0, 0, length),),
        )
        alone.append(head(cut, spec, measure=True))
    torch.testing.assert_close(both.loss_sum, alone[0].loss_sum + alone[1].loss_sum)
    for name, value in both.counts.items():
        torch.testing.assert_close(value, alone[0].counts[name] + alone[1].counts[name])


def test_only_the_head_is_trained_and_saved() -> None:
    target = tiny_target("llama_tied")
    head = tiny_head(target)
    head(_batch(target, [10], 2, torch.float32), LossSpec(1.0, 0.1, 0.8)).loss_sum.backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in head.parameters())
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())
    assert not any("embed" in name or "lm_head" in name for name in head.state_dict())


def test_prefix_counts_are_products_along_the_root() -> None:
    weight_KBT = torch.zeros(3, 1, 9, dtype=torch.bool)
    weight_KBT[0, 0, 1:7] = weight_KBT[1, 0, 1:6] = weight_KBT[2, 0, 1:5] = True
    counts = StepCounts(weight_KBT)
    zero = torch.zeros(())
    hits = ([1, 1, 0, 1, 0, 1], [1, 0, 1, 1, 1], [1, 1, 1, 0])  # of roots 1..6, 1..5, 1..4
    for step, hit in enumerate(hits):
        counts.add(step, torch.tensor(hit, dtype=torch.bool), zero, zero)
    named = {name: int(value) for name, value in counts.finish().items()}
    assert [named[f"match/{k}"] for k in range(3)] == [4, 4, 3]
    assert [named[f"prefix/{k}"] for k in range(3)] == [4, 2, 1]
    assert [named[f"tried/{k}"] for k in range(3)] == [6, 3, 2]
    # Root 1 accepts 3 and a bonus token: the next one is 5, which accepts none, then 6, where only the last is left.
    assert (named["rounds"], named["emitted"]) == (3, 6)


@pytest.mark.parametrize(("name", "unroll"), [("llama", 1), ("llama", 3), ("gpt2", 1)])
def test_overfitted_conversation_is_accepted_nearly_whole(name: str, unroll: int) -> None:
    """Trained on one conversation, the head must reach near the maximal accept length when decoding it.

    This fails for any shift error between batching, head and engine, which equality with plain decoding hides.
    """
    target = tiny_target(name)
    check_overfitting(name, target, tiny_head(target), LossSpec(1.0, 1.0, 0.8), draft_steps=unroll, lr=3e-3, steps=400)


@pytest.mark.parametrize(("options", "steps"), [({}, 250), ({"fc_norm": True, "norm_output": True}, 400)])
def test_eagle3_overfits_too(options: dict[str, Any], steps: int) -> None:
    target = tiny_target("llama")
    head = tiny_head(target, kind="eagle3", **options)
    head.init_from_target()
    check_overfitting("llama", target, head, LossSpec(0.0, 1.0, 0.8), draft_steps=4, lr=3e-3, steps=steps)

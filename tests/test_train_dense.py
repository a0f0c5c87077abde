"""The training step of the EAGLE kinds against the plain one, in fp64: losses, gradients, packing, what must not count.

Norms are computed in fp64 here: the library's rounds to fp32 inside, and turns a last bit into a thousandth of one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from heads.base import DraftHead, HeadBatch, LossSpec, Needs
from heads.config import HeadConfig
from heads.drafter import HiddenStateDrafter
from heads.kinds import kind_of
from heads.registry import build_head
from tests.tiny import VOCAB, prompt_ids, tiny_target
from train.batching import make_batch
from train.conversations import TokenRow
from train.dense import dense_loss
from train.evaluate import evaluate

SPEC = LossSpec(feature_weight=0.7, token_weight=1.3, step_decay=0.8)
HARD = replace(SPEC, hard_weight=0.2)
LENGTHS = [21, 9, 14]
HEADS: dict[str, tuple[str, dict[str, Any], int | None]] = {  # kind, its options, draft vocabulary
    "eagle": ("eagle", {}, None),
    "eagle-reduced": ("eagle", {}, 100),
    "eagle3": ("eagle3", {}, None),
    "eagle3-reduced": ("eagle3", {}, 100),
    "eagle3-shared": ("eagle3", {"projection": "shared"}, 100),
    "eagle3-fc_norm": ("eagle3", {"fc_norm": True}, 100),
    "eagle3-norm_output": ("eagle3", {"norm_output": True}, 100),
    "eagle3-norm_before_residual": ("eagle3", {"norm_before_residual": True}, 100),
    "eagle3-all": (
        "eagle3",
        {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "projection": "shared"},
        None,
    ),
}
BOTH = ("eagle-reduced", "eagle3-reduced")


@pytest.fixture(autouse=True)
def _norms_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        wide = x.double()
        rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (wide * rms).to(x.dtype)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


def _head(name: str) -> HiddenStateDrafter:
    """fp64, random, training."""
    kind, options, size = HEADS[name]
    target = tiny_target("llama")
    target.model.double()
    config = HeadConfig.derive(
        kind,
        target.config,
        target.vocab_size,
        target.name,
        draft_vocab_size=size,
        options={**kind_of(kind).options, **options},
    )
    generator = torch.Generator().manual_seed(1)
    head = build_head(config).double()
    for parameter in head.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.ndim == 1:  # norms stay near 1
            parameter.data.add_(0.1 * noise)
        else:
            parameter.data.copy_(0.1 * noise)
    if size is not None:
        head.set_draft_vocab(torch.randperm(VOCAB, generator=generator)[:size].sort().values)
    head.bind(target)
    head.train()
    assert isinstance(head, HiddenStateDrafter)
    return head


def _texts(head: DraftHead, lengths: list[int]) -> tuple[list[TokenRow], list[Tensor]]:
    """Random texts of two turns each, with random features of all columns."""
    generator = torch.Generator().manual_seed(5)
    columns = head.config.hidden_size * (1 + len(head.needs.taps))
    rows, features = [], []
    for number, length in enumerate(lengths):
        spans = ((3, length // 2), (length // 2 + 1, length))
        rows.append(TokenRow(str(number), tuple(prompt_ids(length, number)), spans, "t"))
        features.append(torch.randn(length, columns, generator=generator, dtype=torch.float64))
    return rows, features


def _batch(head: DraftHead, steps: int, packed: bool, lengths: list[int] = LENGTHS, noise: float = 0.0) -> HeadBatch:
    rows, features = _texts(head, lengths)
    generator = torch.Generator().manual_seed(6)
    return make_batch(rows, features, steps, head.needs, packed=1 if packed else None, noise=noise, generator=generator)


def _gradients(head: HiddenStateDrafter, batch: HeadBatch, loss: LossSpec, dense: bool) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradient of every parameter)."""
    total = dense_loss(head, batch, loss) if dense else head(batch, loss).loss_sum
    head.zero_grad(set_to_none=True)
    total.backward()
    return total.detach(), [p.grad.clone() for p in head.parameters() if p.grad is not None]


def _assert_equal(head: HiddenStateDrafter, left: HeadBatch, right: HeadBatch, loss: LossSpec, dense: bool) -> None:
    """Of `head` on `left`, and of the dense step (or the head) on `right`: 1e-10 of the largest entry."""
    a, a_grads = _gradients(head, left, loss, False)
    b, b_grads = _gradients(head, right, loss, dense)
    assert float(a) > 1
    torch.testing.assert_close(a, b, rtol=1e-10, atol=0)
    assert len(a_grads) == len(b_grads) == len(list(head.parameters()))
    for one, other in zip(a_grads, b_grads, strict=True):
        assert float(other.abs().max()) > 0
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10 * float(other.abs().max()))


# --- equality with the dense step -----------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", HEADS)
def test_loss_and_gradients_equal_the_dense_ones(name: str, steps: int, packed: bool) -> None:
    head = _head(name)
    batch = _batch(head, steps, packed)
    _assert_equal(head, batch, batch, SPEC, dense=True)


@pytest.mark.parametrize("name", BOTH)
def test_noise_labels_and_recomputation_agree_with_the_dense_step_too(name: str) -> None:
    head = _head(name)
    batch = _batch(head, 3, True, noise=0.1)
    assert batch.noise_BTH is not None
    _assert_equal(head, batch, batch, HARD, dense=True)
    head.checkpointing = True
    _assert_equal(head, batch, batch, HARD, dense=True)


def test_the_dense_step_knows_one_divergence() -> None:
    head = _head("eagle")
    with pytest.raises(ValueError) as error:
        dense_loss(head, _batch(head, 1, True), replace(SPEC, divergence="reverse_kl"))
    assert "loss.divergence is 'reverse_kl'" in str(error.value)


# --- packing, padding, order ----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", BOTH)
def test_packing_changes_neither_loss_nor_gradients(name: str, steps: int) -> None:
    head = _head(name)
    _assert_equal(head, _batch(head, steps, True), _batch(head, steps, False), HARD, dense=False)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", BOTH)
def test_what_padding_holds_changes_nothing(name: str, packed: bool) -> None:
    """Padding is where no shifted view of a text reaches: a text's last views run up to K positions over its end."""
    head = _head(name)
    batch = _batch(head, 3, packed)
    outside = ~batch.valid_BT
    assert int(outside.sum()) > 10
    feature, teacher = batch.feature_BTH.clone(), [t.clone() for t in batch.teacher]
    token = batch.token_KBT.clone()
    feature[outside] = 77.0
    token[:, outside] = 3
    for one in teacher:
        one[outside] = -55.0
    other = replace(batch, feature_BTH=feature, token_KBT=token, teacher=tuple(teacher))
    _assert_equal(head, batch, other, SPEC, dense=False)
    _assert_equal(head, batch, other, SPEC, dense=True)


@pytest.mark.parametrize("name", BOTH)
def test_step_k_reads_the_texts_own_token_and_no_earlier_step_does(name: str) -> None:
    head, steps = _head(name), 3
    batch = _batch(head, steps, True)
    with torch.no_grad():
        before = list(head.unroll(batch))
        for k in range(steps):
            token = batch.token_KBT.clone()
            token[k] = (token[k] + 1) % VOCAB
            after = list(head.unroll(replace(batch, token_KBT=token)))
            same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
            assert same == [i < k for i in range(steps)]
        token = batch.token_KBT.clone()
        token[steps] = 0  # what the last step predicts is read by none
        after = list(head.unroll(replace(batch, token_KBT=token)))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dense", [False, True], ids=["fast", "dense"])
@pytest.mark.parametrize("name", BOTH)
def test_a_chain_shifted_by_one_shows_in_the_loss(name: str, dense: bool) -> None:
    """Negative control: each of the errors that equality with a same-minded oracle would hide."""
    head = _head(name)
    batch = _batch(head, 3, True)
    token, weight = batch.token_KBT.clone(), batch.weight_KBT.clone()
    token[1] = token[1].roll(1, -1)
    weight[1] = weight[1].roll(1, -1) & weight[0]
    wrong = {
        "tokens of step 1": replace(batch, token_KBT=token),
        "features": replace(batch, feature_BTH=batch.feature_BTH.roll(1, 1)),
        "teacher": replace(batch, teacher=tuple(t.roll(1, 1) for t in batch.teacher)),
        "supervision": replace(batch, weight_KBT=weight),
        "documents": replace(batch, documents=((0, 0, batch.valid_BT.shape[1]),)),
    }

    def loss(some: HeadBatch) -> float:
        with torch.no_grad():
            return float(dense_loss(head, some, SPEC) if dense else head(some, SPEC).loss_sum)

    right = loss(batch)
    for what, some in wrong.items():
        assert abs(loss(some) / right - 1) > 1e-5, what


@pytest.mark.parametrize("name", BOTH)
def test_the_gradient_goes_through_the_chain_only_where_the_kind_says_so(name: str) -> None:
    """EAGLE-1 hands on a constant, EAGLE-3 does not: the dense step must see the difference."""
    head = _head(name)
    batch = _batch(head, 3, True)
    _, right = _gradients(head, batch, SPEC, True)
    head.detaches = not head.detaches
    _, other = _gradients(head, batch, SPEC, True)
    assert max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(right, other, strict=True)) > 1e-3
    _assert_equal(head, batch, batch, SPEC, dense=True)


# --- the head's mode ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_restores_the_mode_and_leaves_no_gradients(training: bool) -> None:
    head = _head("eagle-reduced")
    head.train(training)
    seen = []
    head.register_forward_pre_hook(lambda module, args: seen.append(module.training))
    rows, features = _texts(head, LENGTHS)
    result = evaluate(head, rows, features, 3, 64, Accelerator(cpu=True), torch.float64)
    assert seen and not any(seen)
    assert {module.training for module in head.modules()} == {training}
    assert all(p.grad is None for p in head.parameters())
    batch = make_batch(rows, features, 3, Needs())
    assert result.roots == int(batch.weight_KBT[0].sum()) > 0

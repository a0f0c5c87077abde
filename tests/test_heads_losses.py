"""Losses against their dense definitions, in fp64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from heads import losses
from heads.losses import best_token, feature_loss_sum, soft_ce_sum


def _case(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    feature = torch.randn(rows, 8, dtype=torch.float64, generator=generator)
    teacher = torch.randn(rows, 8, dtype=torch.float64, generator=generator)
    head = torch.randn(37, 8, dtype=torch.float64, generator=generator)
    return feature, teacher, head


def test_soft_ce_equals_the_dense_loss_and_gradient(monkeypatch) -> None:
    monkeypatch.setitem(losses._CHUNK_ELEMENTS, "cpu", 4 * 37)  # 11 rows: two chunks of 4 and a padded rest
    feature, teacher, head = _case(11)

    def logits_of(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ head.T / 5) * 5  # a capped head, as some targets have

    dense = feature.clone().requires_grad_()
    expected = F.cross_entropy(logits_of(dense), logits_of(teacher).softmax(-1), reduction="sum")
    expected.backward()
    mine = feature.clone().requires_grad_()
    loss = soft_ce_sum(mine, teacher, logits_of)
    (3 * loss).backward()
    assert torch.allclose(loss, expected, rtol=1e-12)
    assert mine.grad is not None and dense.grad is not None
    assert torch.allclose(mine.grad, 3 * dense.grad, rtol=1e-10, atol=1e-12)
    assert torch.equal(best_token(feature, logits_of), logits_of(feature).argmax(-1))


def test_soft_ce_gradcheck() -> None:
    feature, teacher, head = _case(3)
    assert torch.autograd.gradcheck(
        lambda x: soft_ce_sum(x, teacher, lambda y: y @ head.T), (feature.requires_grad_(),)
    )


def test_soft_ce_is_least_at_the_teacher() -> None:
    _, teacher, head = _case(5)
    at = soft_ce_sum(teacher, teacher, lambda y: y @ head.T)
    p = (teacher @ head.T).softmax(-1)
    assert torch.allclose(at, -(p * p.log()).sum(), rtol=1e-12)  # the entropy


def test_empty_batch_is_zero_with_zero_gradient() -> None:
    head = torch.randn(5, 8)
    feature = torch.zeros(0, 8, requires_grad=True)
    loss = soft_ce_sum(feature, torch.zeros(0, 8), lambda y: y @ head.T)
    total = loss + feature_loss_sum(feature, torch.zeros(0, 8))
    total.backward()
    assert total == 0 and best_token(feature, lambda y: y @ head.T).shape == (0,)
    assert feature.grad is not None and feature.grad.shape == (0, 8)


def test_feature_loss_by_hand() -> None:
    """Smooth L1 with beta 1: 0.5 d^2 below 1, |d| - 0.5 above; mean over H, sum over rows."""
    feature = torch.tensor([[0.5, 3.0], [0.0, 0.0]])
    expected = (0.125 + 2.5) / 2
    assert torch.isclose(feature_loss_sum(feature, torch.zeros(2, 2)), torch.tensor(expected))

"""Losses against their dense definitions, in fp64."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from heads import losses
from heads.losses import Projection, Teacher, best_token, distil, feature_loss_sum
from tests.test_heads_divergences import plain


def _case(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    feature = torch.randn(rows, 8, dtype=torch.float64, generator=generator)
    teacher = torch.randn(rows, 8, dtype=torch.float64, generator=generator)
    head = torch.randn(37, 8, dtype=torch.float64, generator=generator)
    return feature, teacher, head


def soft_ce_sum(
    feature_RH: torch.Tensor, teacher_RH: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """One step, weights of 1."""
    weight_1R = feature_RH.new_ones(1, len(feature_RH))
    return distil([feature_RH], weight_1R, Teacher(teacher_RH, logits_of), [Projection(logits_of)]).total


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


# ---- several steps, projections that are trained ------------------------------------------------------------


def _steps(which: str) -> tuple[list[torch.Tensor], torch.Tensor, Teacher, list[Projection], list[torch.Tensor]]:
    """Features, weights, teacher, projections and what is trained beside the features; 3 steps, 11 rows, 37 tokens."""
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    features = [draw(11, 8).requires_grad_() for _ in range(3)]
    weight_KR = (torch.rand(3, 11, generator=generator) > 0.3).double()
    head = draw(37, 8)
    teacher = Teacher(draw(11, 8), lambda x: x @ head.T, torch.tensor([-1, *range(10)]), 0.25)
    if which == "frozen":
        return features, weight_KR, teacher, [Projection(lambda x: x @ head.T)] * 3, []
    trained = [draw(37, 8).requires_grad_() for _ in range(1 if which == "shared" else 3)]
    found = [Projection(lambda x, w: torch.tanh(x @ w.T / 5) * 5, (weight,)) for weight in trained]
    return features, weight_KR, teacher, found * (3 // len(found)), trained


def _dense(name: str, case: Any, factor_K: torch.Tensor) -> torch.Tensor:
    features, weight_KR, teacher, projections, _ = case
    p = teacher.logits_of(teacher.feature_RH).softmax(-1)
    known = teacher.label_R >= 0
    hard = F.one_hot(teacher.label_R.clamp_min(0), 37).double()
    p = torch.where(known[:, None], 0.75 * p + 0.25 * hard, p)
    total = torch.zeros((), dtype=torch.float64)
    for k, (feature, projection) in enumerate(zip(features, projections, strict=True)):
        total = total + factor_K[k] * (weight_KR[k] * plain(name, p, projection(feature).softmax(-1))).sum()
    return total


@pytest.mark.parametrize("name", ["soft_ce", "reverse_kl", "log_acceptance"])
@pytest.mark.parametrize("which", ["frozen", "shared", "own"])
@pytest.mark.parametrize("rows", [4, 8, 100])
def test_chunks_equal_the_dense_loss(which: str, name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses._CHUNK_ELEMENTS, "cpu", rows * 37)
    factor_K = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    mine, theirs = _steps(which), _steps(which)
    found = distil(*mine[:4], factor_K, name)
    (2 * found.total).backward()
    want = _dense(name, theirs, factor_K)
    (2 * want).backward()
    torch.testing.assert_close(found.total, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((factor_K * found.sums_K).sum(), want.detach(), rtol=1e-12, atol=1e-12)
    for a, b in zip([*mine[0], *mine[4]], [*theirs[0], *theirs[4]], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


def test_distil_gradcheck() -> None:
    features, weight_KR, teacher, projections, trained = _steps("shared")
    assert torch.autograd.gradcheck(
        lambda *xs: distil(xs[:3], weight_KR, teacher, [Projection(projections[0].logits_of, xs[3:])] * 3).total,
        (*features, *trained),
        fast_mode=True,  # along random directions instead of one number at a time
    )


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("which", ["shared", "own"])
def test_one_chunk_of_logits_is_alive(which: str, learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever new logits are made, of the teacher or of a projection, those before are gone."""
    monkeypatch.setitem(losses._CHUNK_ELEMENTS, "cpu", 4 * 37)
    features, weight_KR, teacher, projections, _ = _steps(which)
    alive: list[weakref.ref[torch.Tensor]] = []

    def counted(logits_of: Any) -> Any:
        def wrapped(*inputs: torch.Tensor) -> torch.Tensor:
            assert all(one() is None for one in alive)
            logits: torch.Tensor = logits_of(*inputs)
            alive.append(weakref.ref(logits))
            return logits

        return wrapped

    watched = {id(p): Projection(counted(p.logits_of), p.parameters) for p in projections}
    teacher = Teacher(teacher.feature_RH, counted(teacher.logits_of))
    with torch.set_grad_enabled(learns):
        distil(features, weight_KR, teacher, [watched[id(p)] for p in projections])
    assert len(alive) == 1 + 3 * (1 + len(watched))  # one row to learn the vocabulary's size, then three chunks


def test_without_gradients_nothing_is_kept() -> None:
    case = _steps("shared")
    with torch.no_grad():
        found = distil(*case[:4])
    assert not found.total.requires_grad
    torch.testing.assert_close(found.total, _dense("soft_ce", case, torch.ones(3)).detach())


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
def test_compiled_equals_eager() -> None:
    mine, theirs = _steps("shared"), _steps("shared")
    distil(*mine[:4], compiled=True).total.backward()
    distil(*theirs[:4]).total.backward()
    for a, b in zip([*mine[0], *mine[4]], [*theirs[0], *theirs[4]], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)


def test_blocks_equal_whole_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses._CHUNK_ELEMENTS, "cpu", 8 * 37)
    found = []
    for elements in (37, 3 * 37, 1 << 20):  # blocks of 1 row, of 3 (which do not divide a chunk), and whole chunks
        monkeypatch.setattr(losses, "_BLOCK_ELEMENTS", elements)
        case = _steps("shared")
        distil(*case[:4]).total.backward()
        found.append([t.grad for t in (*case[0], *case[4])])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-14)


def test_compiled_code_meets_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses._CHUNK_ELEMENTS, "cpu", 43 * 37)  # not a multiple of 4
    shapes = set()

    def recorded(p: torch.Tensor, logits: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        shapes.add((p.shape, logits.shape, weight.shape, None if out is None else out.shape))
        return losses._core("soft_ce")(p, logits, weight, out)

    monkeypatch.setattr(losses, "_compiled_core", lambda name: recorded)
    head = torch.randn(37, 8)
    for rows in (1, 10, 40, 77, 131):
        feature = torch.randn(rows, 8, requires_grad=True)
        teacher = Teacher(torch.randn(rows, 8), lambda x: x @ head.T)
        distil([feature] * 2, torch.ones(2, rows), teacher, [Projection(lambda x: x @ head.T)] * 2, compiled=True)
    assert len(shapes) == 1


def test_a_step_of_factor_zero_is_still_measured() -> None:
    case = _steps("shared")
    found = distil(*case[:4], torch.tensor([1.0, 0.0, 0.5]))
    torch.testing.assert_close(found.sums_K, distil(*case[:4]).sums_K)
    found.total.backward()
    grads = [feature.grad for feature in case[0]]
    assert grads[1] is not None and not grads[1].any() and grads[2] is not None and grads[2].any()


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_some_features_want_gradients(frozen: int) -> None:
    whole, some = _steps("frozen"), _steps("frozen")
    some[0][frozen].requires_grad_(False)
    for case in (whole, some):
        distil(*case[:4]).total.backward()
    for k in range(3):
        if k == frozen:
            assert some[0][k].grad is None
        else:
            torch.testing.assert_close(some[0][k].grad, whole[0][k].grad)


def test_a_trained_number() -> None:
    """A parameter without dimensions, such as a temperature."""
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    features, weight_KR, teacher, projections, _ = _steps("frozen")
    base = projections[0].logits_of

    def total(scale: torch.Tensor) -> torch.Tensor:
        return distil(features, weight_KR, teacher, [Projection(lambda x, t: base(x) * t, (scale,))] * 3).total

    assert torch.autograd.gradcheck(total, (scale,))

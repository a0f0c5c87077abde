"""The divergences and their slopes against plain definitions and autograd, in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heads.divergences import DIVERGENCES
from heads.kinds import DIVERGENCES as NAMES


def plain(name: str, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """By the book, on probabilities."""
    top = p.topk(min(10, p.shape[-1]), -1).values[..., -1:]
    return {
        "soft_ce": lambda: -(p * q.log()).sum(-1),
        "forward_kl": lambda: (p * (p / q).log()).sum(-1),
        "reverse_kl": lambda: (q * (q / p).log()).sum(-1),
        "total_variation": lambda: (p - q).abs().sum(-1) / 2,
        "top_k_ce": lambda: -(torch.where(p >= top, p, 0.0) * q.log()).sum(-1),
        "acceptance": lambda: 1 - torch.minimum(p, q).sum(-1),
        "log_acceptance": lambda: -torch.minimum(p, q).sum(-1).log(),
    }[name]()


def case(seed: int, rows: int = 5, vocab: int = 37) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p = (2 * torch.randn(rows, vocab, dtype=torch.float64, generator=generator)).softmax(-1)
    return p, 2 * torch.randn(rows, vocab, dtype=torch.float64, generator=generator)


def test_config_knows_them_all() -> None:
    assert tuple(DIVERGENCES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_value_and_slope(name: str) -> None:
    p, z = case(1)
    z.requires_grad_()
    want = plain(name, p, z.softmax(-1))
    want.sum().backward()
    loss, slope = DIVERGENCES[name](p, z.detach().log_softmax(-1))
    torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slope, z.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@given(st.integers(0, 10_000))
def test_slopes_sum_to_zero_and_distances_are_least_at_the_target(name: str, seed: int) -> None:
    p, z = case(seed)
    loss, slope = DIVERGENCES[name](p, z.log_softmax(-1))
    at, flat = DIVERGENCES[name](p, p.log())
    assert slope.sum(-1).abs().max() < 1e-12  # logits may be shifted
    if name == "top_k_ce":  # least at the target's likeliest tokens alone
        return
    assert bool((loss > at).all())
    if name in ("soft_ce", "forward_kl", "reverse_kl"):  # the others have a kink there
        assert flat.abs().max() < 1e-12
    if name != "soft_ce":
        assert at.abs().max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_a_target_that_is_certain(name: str) -> None:
    p = torch.zeros(1, 12)
    p[0, 3] = 1.0
    loss, slope = DIVERGENCES[name](p, torch.randn(1, 12, generator=torch.Generator().manual_seed(0)).log_softmax(-1))
    assert loss.isfinite().all() and slope.isfinite().all() and slope[0, 3] < 0


@pytest.mark.parametrize("gap", [0.0, 8.0, 18.0, 60.0])
@pytest.mark.parametrize("name", NAMES)
def test_single_precision_far_from_the_target(name: str, gap: float) -> None:
    """Draft and target sure of different tokens: what is left of min(p, q) must not cancel."""
    p, z = case(2)
    p = (p.log() + gap * torch.eye(1, 37, dtype=p.dtype)).softmax(-1)
    z[:, 1] += gap
    want, slope = DIVERGENCES[name](p, z.log_softmax(-1))
    loss, found = DIVERGENCES[name](p.float(), z.float().log_softmax(-1))
    torch.testing.assert_close(loss, want.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, slope.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_target_is_left_alone(name: str) -> None:
    p, z = case(3)
    before = p.clone()
    DIVERGENCES[name](p, z.log_softmax(-1))
    assert torch.equal(p, before)

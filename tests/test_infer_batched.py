"""Batched decoding of ragged prompts: greedy as the library's, sampled by the law it states."""

from __future__ import annotations

import math

import pytest
import torch

from infer.batched import decode_batch, sample_rows
from tests.tiny import CONFIGS, library_greedy, prompt_ids, tiny_model, tiny_target

PROMPTS = [prompt_ids(length, seed=length) for length in (7, 1, 12, 4, 7, 9)]
NEW = 14


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_rows_are_the_librarys(name: str) -> None:
    model = tiny_model(name)
    target = tiny_target(name)
    got = decode_batch(target, PROMPTS, [0.0] * len(PROMPTS), 8, NEW, generator(), stop_ids=frozenset())
    assert got == [library_greedy(model, prompt, NEW) for prompt in PROMPTS]


def test_rows_end_at_their_stop_and_do_not_change_others() -> None:
    """Each row's own 1st, 2nd, ... token ends it, so rows are dropped from the cache one after the other."""
    model, target = tiny_model("llama"), tiny_target("llama")
    whole = [library_greedy(model, prompt, NEW) for prompt in PROMPTS]
    stops = frozenset(text[i] for i, text in enumerate(whole))
    want = [text[: 1 + next(i for i, t in enumerate(text) if t in stops)] for text in whole]
    assert len({len(text) for text in want}) > 2
    counted: list[int] = []
    got = decode_batch(target, PROMPTS, [0.0] * 6, 8, NEW, generator(), stops, counted.append)
    assert got == want
    assert sum(counted) == sum(map(len, want))


def test_prefill_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    whole = decode_batch(target, PROMPTS, [0.0] * 6, 8, NEW, generator(), frozenset())
    monkeypatch.setattr("infer.batched._PREFILL_TOKENS", 2 * max(map(len, PROMPTS)))
    assert decode_batch(target, PROMPTS, [0.0] * 6, 8, NEW, generator(), frozenset()) == whole


def test_sampling_repeats_for_a_seed() -> None:
    target = tiny_target("llama")
    one, two, other = (
        decode_batch(target, PROMPTS, [1.0] * 6, 8, NEW, generator(seed), frozenset()) for seed in (1, 1, 2)
    )
    assert one == two != other


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with this many degrees of freedom > statistic)."""
    return 1 - torch.special.gammainc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0)).item()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_sampled_frequencies(temperature: float) -> None:
    """Chi-square of 40000 draws against softmax over the top 5; false-failure rate 1e-4 per temperature."""
    draws, k = 40_000, 5
    logits = torch.tensor([2.0, 0.3, -1.0, 1.1, 0.0, 0.9, -0.4, 1.6])
    top = logits.topk(k)
    law = (top.values / temperature).softmax(-1)
    token = sample_rows(logits.expand(draws, -1).contiguous(), torch.full((draws,), temperature), k, generator(7))
    counts = torch.bincount(token, minlength=len(logits)).float()
    assert counts[top.indices].sum() == draws  # nothing outside the top k
    expected = law * draws
    statistic = ((counts[top.indices] - expected) ** 2 / expected).sum().item()
    assert chi_square_tail(statistic, k - 1) > 1e-4
    wrong = (top.values / (1.1 * temperature)).softmax(-1) * draws  # the test can tell 10 % of temperature
    assert chi_square_tail(((counts[top.indices] - wrong) ** 2 / wrong).sum().item(), k - 1) < 1e-4


def test_tail_formula() -> None:
    assert chi_square_tail(2.0, 2) == pytest.approx(math.exp(-1))


def test_temperatures_are_per_row() -> None:
    logits = torch.randn(300, 64, generator=generator(1))
    temperature = torch.tensor([0.0, 5.0]).repeat(150)
    token = sample_rows(logits, temperature, 8, generator(2))
    best = logits.argmax(-1)
    assert torch.equal(token[::2], best[::2])
    assert (token[1::2] != best[1::2]).float().mean() > 0.5

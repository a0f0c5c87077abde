"""Counts and ratios, by hand and on generated decodes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.metrics import BatchTime, DecodeStats, batch_time, merge
from infer.stopping import StopRule


def decode(
    accepted: list[int], offered: list[int], cut: bool = False, seconds: dict[str, float] | None = None
) -> DecodeStats:
    """Stats as a loop fills them: a prefill token, then a + 1 per round, the last without bonus if cut."""
    return DecodeStats(
        prompt_tokens=5,
        new_tokens=1 + sum(accepted) + len(accepted) - cut,
        target_passes=len(accepted),
        accepted_per_round=accepted,
        offered_depth_per_round=offered,
        seconds=seconds or {"prefill": 0.5, "draft": 1.0, "target": 2.0, "verify": 0.25, "rest": 0.75},
    ).check()


def test_one_generation() -> None:
    stats = decode([2, 0, 3], [3, 3, 3])
    assert stats.new_tokens == 9 and stats.round_tokens == 8
    assert stats.tau == pytest.approx(8 / 3)
    assert stats.total_seconds == 4.5 and stats.decode_seconds == 4.0
    assert not stats.last_round_cut and decode([2, 3], [3, 3], cut=True).last_round_cut


def test_a_generation_that_ends_in_the_prefill_has_no_rounds() -> None:
    stats = DecodeStats(prompt_tokens=3, new_tokens=1, seconds={"prefill": 0.25}).check()
    assert stats.tau is None
    total = merge([stats])
    assert total.tau is None and total.passes_saved is None and total.tokens_per_second_decode is None
    assert total.tokens_per_second == 4.0 and total.ms_prefill == 250.0
    assert total.ms_per_round == {"draft": None, "target": None, "verify": None, "rest": None}
    assert total.conditional_per_depth == [] and total.unconditional_per_position == []


def test_tau_is_a_micro_average() -> None:
    total = merge([decode([3], [3]), decode([0, 0, 0], [3, 3, 3])])
    assert total.tau == pytest.approx(7 / 4)  # not (4 + 1) / 2
    assert total.passes_saved == pytest.approx(1 - 4 / 7)
    assert total.prompts == 2 and total.new_tokens == 9 and total.target_passes == 4


def test_acceptance_by_hand() -> None:
    """Rounds (a, offered): (2,3) (0,3) (3,3) (1,1). Depth 1: 3 of 4; 2: 2 of 2; 3: 1 of 2."""
    total = merge([decode([2, 0], [3, 3]), decode([3, 1], [3, 1])])
    assert total.conditional_trials == [4, 2, 2]
    assert total.conditional_per_depth == [0.75, 1.0, 0.5]
    assert total.unconditional_per_position == [0.75, 0.5, 0.25]
    assert total.tau == pytest.approx(1 + 0.75 + 0.5 + 0.25)


def test_a_cut_round_is_no_evidence_against_deeper_drafts() -> None:
    total = merge([decode([2], [4], cut=True)])
    assert total.conditional_per_depth == [1.0, 1.0, None, None] and total.conditional_trials == [1, 1, 0, 0]
    assert total.tau == 2.0


def test_speed_and_time_split() -> None:
    total = merge([decode([2, 0], [3, 3]), decode([3, 1], [3, 3])])
    assert total.tokens_per_second == pytest.approx(12 / 9)
    assert total.tokens_per_second_decode == pytest.approx(10 / 8)
    assert total.ms_per_round == {"draft": 500.0, "target": 1000.0, "verify": 125.0, "rest": 375.0}
    assert total.ms_prefill == 500.0


def test_a_batch_has_one_clock() -> None:
    """Rows of one batch, whose seconds run together: its longest row's clock counts, once."""
    short, long = decode([0], [3], seconds={"prefill": 1.0, "target": 1.0}), decode([0, 0], [3, 3])
    long.seconds = {"prefill": 1.0, "target": 3.0}
    time = batch_time([short, long])
    assert time == BatchTime({"prefill": 1.0, "target": 3.0}, 2)
    total = merge([short, long], times=[time])
    assert total.tokens_per_second == pytest.approx(5 / 4) and total.tokens_per_second_decode == pytest.approx(3 / 3)
    assert total.ms_per_round["target"] == 1500.0 and total.ms_prefill == 1000.0  # two rounds of the batch
    assert total.tau == 1.0 and total.target_passes == 3  # of its rows
    unknown = merge([short, long], times=[])
    assert unknown.tokens_per_second is unknown.tokens_per_second_decode is unknown.ms_prefill is None
    assert unknown.tau == 1.0 and unknown.ms_per_round["target"] is None


def test_accepted_ranks_are_counted() -> None:
    one, other = decode([2, 1], [3, 3]), decode([1], [3])
    one.accepted_ranks, other.accepted_ranks = [0, 3, 0], [1]
    assert merge([one, other]).accepted_ranks == [2, 1, 0, 1]
    assert merge([decode([1], [3])]).accepted_ranks == []  # not recorded
    one.accepted_ranks = [0]
    with pytest.raises(AssertionError, match="one rank per accepted token"):
        merge([one])


def test_plain_decoding_needs_no_lists() -> None:
    total = merge([DecodeStats(4, 9, 8, seconds={"prefill": 1.0, "target": 4.0})])
    assert total.tau == 1.0 and total.passes_saved == 0.0
    assert total.tokens_per_second_decode == 2.0


def test_interval_covers_repeats_and_needs_two_prompts() -> None:
    one, other = decode([3, 3], [3, 3]), decode([0, 0], [3, 3])
    assert merge([one]).tau_low is None
    same = merge([one] * 5)
    assert same.tau_low == same.tau_high == same.tau == 4.0
    mixed = merge([one, other] * 10, seed=3)
    assert mixed.tau_low is not None and mixed.tau is not None and mixed.tau_high is not None
    assert 1.0 < mixed.tau_low < mixed.tau == 2.5 < mixed.tau_high < 4.0
    assert mixed == merge([one, other] * 10, seed=3)
    # Normal approximation of the mean of 20 prompts at 1 or 4: 2.5 +- 1.96 * 1.5 / sqrt(20) = 2.5 +- 0.66.
    assert mixed.tau_high - mixed.tau_low == pytest.approx(2 * 0.66, abs=0.25)


def test_counts_that_do_not_fit_are_refused() -> None:
    for broken in (
        DecodeStats(1, 9, 2, [1, 1], [3, 3]),  # too many tokens
        DecodeStats(1, 3, 2, [1, 1], [3, 3]),  # two bonuses missing
        DecodeStats(1, 3, 2, [1, 0], [3, 3]),  # a round without any token
        DecodeStats(1, 5, 2, [1, 1], [3, 0]),  # accepted more than offered
        DecodeStats(1, 5, 3, [1, 1], [3, 3]),  # rounds and passes differ
        DecodeStats(1, 5, 2, [1, 1], [3]),
        DecodeStats(1, 1, seconds={"warmup": 1.0}),
    ):
        with pytest.raises(AssertionError):
            merge([broken])
    with pytest.raises(ValueError, match="got 0 generations"):
        merge([])


@given(
    st.lists(st.integers(0, 4).flatmap(lambda d: st.tuples(st.integers(0, d), st.just(d))), min_size=1),
    st.integers(1, 60),
)
def test_stats_of_a_stopped_decode_add_up(rounds: list[tuple[int, int]], limit: int) -> None:
    """Any limit, applied by the stop rule, leaves counts that fit; uncut, 1 + sum of unconditional = tau."""
    rule, stats = StopRule(frozenset(), limit), DecodeStats(new_tokens=1)
    for accepted, offered in rounds:
        if stats.new_tokens >= limit:
            break
        part, _ = rule.cut([0] * (accepted + 1), stats.new_tokens)
        stats.new_tokens += len(part)
        stats.target_passes += 1
        stats.accepted_per_round.append(min(accepted, len(part)))
        stats.offered_depth_per_round.append(offered)
    total = merge([stats])
    json.dumps(total.to_dict(), allow_nan=False)
    if stats.target_passes:
        missing = stats.last_round_cut / stats.target_passes
        assert total.tau == pytest.approx(1 + sum(total.unconditional_per_position) - missing)

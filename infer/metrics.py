"""What one generation cost and yielded, and how many of them add up.

Definitions, used everywhere:
- The prefill pass emits the first token; it is not a round. Every later token comes from a round: one draft
  (none in plain decoding), one target verification pass, one commit. So new_tokens - 1 = sum over rounds of
  emitted tokens.
- A round emits a + 1 tokens (a accepted drafts and the bonus), unless a stop rule cuts it.
- Accept length tau = tokens emitted by rounds / target verification passes, as a micro average (all rounds of
  all prompts weigh the same). Bonus included, as in the EAGLE papers; plain decoding has tau = 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

PHASES = ("prefill", "draft", "target", "verify", "rest")


@dataclass
class DecodeStats:
    """One generation, plain or speculative. Filled by the decoding loop.

    prompt_tokens             tokens of the prompt
    new_tokens                emitted token ids, EOS and the prefill's token included
    target_passes             verification passes of the target (rounds); the prefill is not counted
    accepted_per_round        drafted tokens accepted *and emitted* in each round (after the stop's cut)
    offered_depth_per_round   depth of the tree offered in each round
    accepted_ranks            which of its siblings (0: the first) each accepted and emitted token was
    seconds                   wall clock per phase: prefill (prompt to first token, draft head's prefill
                              included), draft, target, verify, rest (masks, commit, stop, streaming)

    Plain decoding may leave the lists empty.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    target_passes: int = 0
    accepted_per_round: list[int] = field(default_factory=list)
    offered_depth_per_round: list[int] = field(default_factory=list)
    accepted_ranks: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def round_tokens(self) -> int:
        """Tokens emitted by rounds: all but the prefill's."""
        return max(self.new_tokens - 1, 0)

    @property
    def tau(self) -> float | None:
        """Accept length in tokens per target pass; None without a round."""
        return self.round_tokens / self.target_passes if self.target_passes else None

    @property
    def total_seconds(self) -> float:
        """All phases."""
        return sum(self.seconds.values())

    @property
    def decode_seconds(self) -> float:
        """All phases but the prefill."""
        return sum(value for name, value in self.seconds.items() if name != "prefill")

    @property
    def last_round_cut(self) -> bool:
        """True if a stop cut the last round before its bonus.

        What the target said about deeper drafts of that round is then unknown.
        """
        return bool(self.accepted_per_round) and self._missing_bonuses() == 1

    def _missing_bonuses(self) -> int:
        return sum(self.accepted_per_round) + self.target_passes - self.round_tokens

    def check(self) -> DecodeStats:
        """Assert that the counts fit together, and return self. Raises AssertionError (the loop's bug)."""
        unknown = sorted(set(self.seconds) - set(PHASES))
        assert not unknown, f"unknown phases {unknown}, expected {PHASES}"
        rounds = len(self.accepted_per_round)
        assert rounds == len(self.offered_depth_per_round), "one offered depth per round"
        assert rounds in (0, self.target_passes), f"{rounds} rounds recorded, {self.target_passes} target passes"
        pairs = zip(self.accepted_per_round, self.offered_depth_per_round, strict=True)
        assert all(0 <= a <= depth for a, depth in pairs), "accepted more than was offered"
        if self.accepted_ranks:
            assert len(self.accepted_ranks) == sum(self.accepted_per_round), "one rank per accepted token"
        missing = self._missing_bonuses()
        may_cut = bool(self.accepted_per_round) and self.accepted_per_round[-1] > 0
        assert missing == 0 or (missing == 1 and may_cut), (
            f"{self.new_tokens} new tokens do not fit {sum(self.accepted_per_round)} accepted in "
            f"{self.target_passes} passes: only the last round may lack its bonus"
        )
        return self


@dataclass(frozen=True)
class BatchTime:
    """Wall clock of a batch: seconds per phase, and its rounds (those of its longest row)."""

    seconds: Mapping[str, float]
    rounds: int

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


def batch_time(rows: Sequence[DecodeStats]) -> BatchTime:
    """Of the rows of one batch, whose clocks all started with it: the clock of the row that ended last."""
    last = max(rows, key=lambda one: one.total_seconds)
    return BatchTime(dict(last.seconds), max(one.target_passes for one in rows))


@dataclass(frozen=True)
class Aggregate:
    """Several generations added up. None where a denominator is zero.

    tau, tau_low, tau_high      accept length and its 95 % interval over prompts (None with fewer than two)
    conditional_per_depth       [d-1] = P(depth d accepted | depth d-1 accepted, tree reached depth d). A
                                round cut by a stop counts only up to its cut. "Tree reached depth d" is about
                                the whole tree: an accepted leaf counts as a miss if the tree went deeper
                                elsewhere.
    conditional_trials          [d-1] = the denominators of it
    unconditional_per_position  [d-1] = rounds with d or more accepted / all rounds. 1 + its sum = tau, but
                                for cut rounds.
    accepted_ranks              [r] = accepted tokens that were sibling r of their parent's children (0: the first)
    passes_saved                1 - target passes / tokens emitted in rounds (plain decoding: 0)
    tokens_per_second           new tokens / all wall clock of the batches
    tokens_per_second_decode    tokens emitted in rounds / that without the prefill
    ms_per_round                draft, target, verify, rest: milliseconds per round of a batch
    ms_prefill                  milliseconds per batch
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int
    target_passes: int
    tau: float | None
    tau_low: float | None
    tau_high: float | None
    conditional_per_depth: list[float | None]
    conditional_trials: list[int]
    unconditional_per_position: list[float]
    accepted_ranks: list[int]
    passes_saved: float | None
    tokens_per_second: float | None
    tokens_per_second_decode: float | None
    ms_per_round: dict[str, float | None]
    ms_prefill: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able copy."""
        return asdict(self)


def merge(
    stats: Sequence[DecodeStats], seed: int = 0, resamples: int = 2000, times: Sequence[BatchTime] | None = None
) -> Aggregate:
    """Add up generations; ratios are ratios of sums.

    seed, resamples: of the interval of tau. times: wall clock of the batches that the generations were decoded in
    (None: each alone, by its own clock; empty: not known, so no speeds).

    Raises ValueError for an empty list, AssertionError for counts that do not fit together.
    """
    if not stats:
        raise ValueError("got 0 generations to add up, expected at least 1; check that the prompt set is not empty")
    for one in stats:
        one.check()
    if times is None:
        times = [batch_time([one]) for one in stats]
    passes = sum(one.target_passes for one in stats)
    round_tokens = sum(one.round_tokens for one in stats)
    new_tokens = sum(one.new_tokens for one in stats)
    low, high = _tau_interval(stats, seed, resamples)
    conditional, trials = _conditional_per_depth(stats)
    phase = {name: sum(one.seconds.get(name, 0.0) for one in times) for name in PHASES}
    rounds = sum(one.rounds for one in times)
    decoding = sum(seconds for name, seconds in phase.items() if name != "prefill")
    return Aggregate(
        prompts=len(stats),
        prompt_tokens=sum(one.prompt_tokens for one in stats),
        new_tokens=new_tokens,
        target_passes=passes,
        tau=_ratio(round_tokens, passes),
        tau_low=low,
        tau_high=high,
        conditional_per_depth=conditional,
        conditional_trials=trials,
        unconditional_per_position=_unconditional_per_position(stats),
        accepted_ranks=_rank_counts(stats),
        passes_saved=None if round_tokens == 0 else 1 - passes / round_tokens,
        tokens_per_second=_ratio(new_tokens, phase["prefill"] + decoding),
        tokens_per_second_decode=_ratio(round_tokens, decoding),
        ms_per_round={name: _ratio(1000 * phase[name], rounds) for name in PHASES if name != "prefill"},
        ms_prefill=_ratio(1000 * phase["prefill"], len(times)),
    )


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


def _tau_interval(stats: Sequence[DecodeStats], seed: int, resamples: int) -> tuple[float | None, float | None]:
    """95 % percentile bootstrap over prompts: rounds of one prompt are correlated, prompts are not.

    Efron & Tibshirani, "An Introduction to the Bootstrap" (1993), section 13.3. A percentile interval is
    somewhat too narrow below about 20 prompts. The seed is given, so the same counts give the same interval.
    """
    counts = [(one.round_tokens, one.target_passes) for one in stats if one.target_passes]
    if len(counts) < 2:
        return None, None
    tokens_P, passes_P = torch.tensor(counts, dtype=torch.float64).unbind(1)  # P prompts with a round
    generator = torch.Generator().manual_seed(seed)
    pick_RP = torch.randint(len(counts), (resamples, len(counts)), generator=generator)
    tau_R = tokens_P[pick_RP].sum(1) / passes_P[pick_RP].sum(1)
    low, high = torch.quantile(tau_R, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _max_depth(stats: Sequence[DecodeStats]) -> int:
    return max((depth for one in stats for depth in one.offered_depth_per_round), default=0)


def _conditional_per_depth(stats: Sequence[DecodeStats]) -> tuple[list[float | None], list[int]]:
    """(rate, trials) per depth from 1; see `Aggregate.conditional_per_depth`."""
    hits = [0] * _max_depth(stats)
    trials = [0] * len(hits)
    for one in stats:
        rounds = list(zip(one.accepted_per_round, one.offered_depth_per_round, strict=True))
        for index, (accepted, offered) in enumerate(rounds):
            cut = one.last_round_cut and index == len(rounds) - 1
            # Tried: every accepted depth, and the one after it if it was offered and its outcome is known.
            tried = accepted if cut else min(accepted + 1, offered)
            for depth in range(tried):
                trials[depth] += 1
                hits[depth] += depth < accepted
    return [_ratio(hit, trial) for hit, trial in zip(hits, trials, strict=True)], trials


def _unconditional_per_position(stats: Sequence[DecodeStats]) -> list[float]:
    """Share of all rounds with at least d accepted, d from 1; see `Aggregate.unconditional_per_position`."""
    accepted = [a for one in stats for a in one.accepted_per_round]
    return [sum(a >= depth for a in accepted) / len(accepted) for depth in range(1, _max_depth(stats) + 1)]


def _rank_counts(stats: Sequence[DecodeStats]) -> list[int]:
    """Accepted tokens per sibling rank; see `Aggregate.accepted_ranks`."""
    ranks = [rank for one in stats for rank in one.accepted_ranks]
    return [ranks.count(rank) for rank in range(max(ranks, default=-1) + 1)]

"""Rows of a batch are independent: each comes out as if it were alone, greedy or sampled."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from heads.base import TreePolicy
from heads.target import TargetAdapter
from infer import prefill
from infer.engine import DecodeOptions, RowRequest, RowResult, decode
from infer.stopping import StopRule
from tests.oracle import OracleHead
from tests.tiny import CONFIGS, library_greedy, prompt_ids, tiny_head, tiny_model, tiny_target

MODELS = ["llama", "gpt2", "qwen2"]
PROMPTS = [prompt_ids(length, seed=length) for length in (7, 1, 12, 4, 9)]
LIMITS = [20, 24, 9, 1, 16]
POLICY = TreePolicy(width=3, depth=3, total=9)
RULES = [("match", "top_k"), ("match", "sampled"), ("top_k", "top_k"), ("sampled", "sampled")]


@functools.cache
def library_texts(name: str) -> list[list[int]]:
    model = tiny_model(name)
    return [library_greedy(model, prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]


def rows(eos: frozenset[int] = frozenset(), **more: Any) -> list[RowRequest]:
    return [
        RowRequest(prompt, StopRule(eos, limit), seed=index, **more)
        for index, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))
    ]


def ids_of(results: list[RowResult]) -> list[list[int]]:
    return [result.ids for result in results]


@pytest.mark.parametrize("policy", [POLICY, TreePolicy(1, 4, 5), TreePolicy(4, 2, 21)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_rows_are_the_librarys(name: str, policy: TreePolicy) -> None:
    target = tiny_target(name, taps=(1,))
    for head in (tiny_head(target), OracleHead(target, PROMPTS, library_texts(name)), None):
        results = decode(target, head, rows(), DecodeOptions(policy=policy))
        assert ids_of(results) == library_texts(name)
        assert [result.reason for result in results] == ["length"] * 5
        for result in results:
            result.stats.check()


def test_rows_accept_different_lengths() -> None:
    """The oracle's rows commit 1 to 4 tokens in the same round: the batch above is really ragged."""
    target = tiny_target("llama", taps=(1,))
    results = decode(target, OracleHead(target, PROMPTS, library_texts("llama")), rows(), DecodeOptions(policy=POLICY))
    per_round = zip(results[0].stats.accepted_per_round, results[1].stats.accepted_per_round, strict=False)
    assert len({a - b for a, b in per_round}) > 2
    assert {rank for result in results for rank in result.stats.accepted_ranks} == {0, 2}


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_end_early_leave_the_others_alone(name: str) -> None:
    texts = library_texts(name)
    target = tiny_target(name, taps=(1,))
    for eos in {texts[0][5], texts[1][11], texts[4][0]}:
        want = [text[: text.index(eos) + 1] if eos in text else text for text in texts]
        for head in (OracleHead(target, PROMPTS, texts), tiny_head(target), None):
            results = decode(target, head, rows(frozenset({eos})), DecodeOptions(policy=POLICY))
            assert ids_of(results) == want
            assert [r.reason for r in results] == ["eos" if eos in t else "length" for t in texts]


def test_head_gets_each_rows_true_features() -> None:
    target = tiny_target("llama", taps=(1,))
    head = OracleHead(target, PROMPTS, library_texts("llama"))
    decode(target, head, rows(), DecodeOptions(policy=POLICY))
    model = tiny_model("llama")
    for seen, prompt, text in zip(head.seen, PROMPTS, library_texts("llama"), strict=True):
        got = torch.cat(seen.features)
        out = model(torch.tensor([[*prompt, *text][: len(got)]]), output_hidden_states=True)
        want = torch.cat([out.hidden_states[-1], out.hidden_states[2]], -1)[0]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)  # summation order


def test_prefill_in_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_PREFILL_TOKENS", 24)  # two rows at a time
    target = tiny_target("llama")
    assert ids_of(decode(target, tiny_head(target), rows(), DecodeOptions(policy=POLICY))) == library_texts("llama")


def sampled(target: TargetAdapter, head: Any, rule: str, proposal: Any, chosen: list[RowRequest]) -> list[list[int]]:
    return ids_of(decode(target, head, chosen, DecodeOptions(policy=POLICY, rule=rule, proposal=proposal)))


def warm() -> LogitsProcessorList:
    # Random models are nearly uniform over 512 tokens; at this temperature drafts are accepted now and then.
    return LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(0.15)])


@pytest.mark.parametrize(("rule", "proposal"), RULES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sampled_rows_do_not_depend_on_companions(name: str, rule: str, proposal: str) -> None:
    target = tiny_target(name)
    head = tiny_head(target)
    chosen = rows(processors=warm())
    together = sampled(target, head, rule, proposal, chosen)
    assert together == sampled(target, head, rule, proposal, chosen[::-1])[::-1]
    for index, row in enumerate(chosen):
        assert sampled(target, head, rule, proposal, [row]) == [together[index]]
    assert together != library_texts(name)
    assert len({tuple(ids[:1]) for ids in together}) > 1


@pytest.mark.parametrize("proposal", ["top_k", "sampled"])
def test_matching_gives_the_text_of_plain_sampling(proposal: Any) -> None:
    """Rule "match" takes its numbers by place: drafts change nothing, so losslessness shows token for token."""
    target = tiny_target("llama", taps=(1,))
    chosen = rows(processors=warm())
    plain = sampled(target, None, "match", "top_k", chosen)
    head = OracleHead(target, PROMPTS, plain)
    assert sampled(target, tiny_head(target), "match", proposal, chosen) == plain
    results = decode(target, head, chosen, DecodeOptions(policy=POLICY, rule="match"))
    assert ids_of(results) == plain
    assert sum(sum(result.stats.accepted_per_round) for result in results) > 20  # and they were really accepted


@pytest.mark.parametrize("proposal", ["top_k", "sampled"])
def test_a_reduced_draft_vocabulary_limits_drafts_and_not_the_text(proposal: Any) -> None:
    target = tiny_target("llama")
    whole = tiny_head(target)
    few = torch.arange(0, target.vocab_size, 3)
    head = type(whole)(dataclasses.replace(whole.config, draft_vocab_size=len(few))).eval()
    head.load_state_dict({**whole.state_dict(), "draft_token_ids": few})
    chosen = rows(processors=warm())
    plain = sampled(target, None, "match", "top_k", chosen)
    assert sampled(target, head, "match", proposal, chosen) == plain
    assert any(token % 3 for ids in plain for token in ids)
    if proposal == "sampled":
        assert sampled(target, head, "sampled", proposal, chosen) == sampled(target, head, "sampled", proposal, chosen)


def test_seeds_decide() -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    same = [RowRequest(PROMPTS[0], StopRule(frozenset(), 12), seed=seed) for seed in (5, 5, 6)]
    first, second, third = sampled(target, head, "match", "top_k", same)
    assert first == second != third


def test_greedy_with_processors_is_the_librarys() -> None:
    model = tiny_model("llama")
    target = tiny_target("llama")
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])
    for prompt in PROMPTS:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, repetition_penalty=1.7, pad_token_id=0
        )
        row = RowRequest(prompt, StopRule(frozenset(), 20), processors=processors)
        assert (
            ids_of(decode(target, tiny_head(target), [row], DecodeOptions(policy=POLICY)))[0]
            == out[0, len(prompt) :].tolist()
        )


class Reads(TorchDispatchMode):
    """Counts what would wait for an accelerator: single values read by Python, indices found by value."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        self.count += name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [1, 3])
def test_one_host_synchronisation_per_round(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    lists = []
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        lists.append(tensor.shape)
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    chosen = [RowRequest(prompt, StopRule(frozenset(), 12)) for prompt in PROMPTS[:count]]
    with Reads() as reads:
        results = decode(target, head, chosen, DecodeOptions(policy=POLICY))
    rounds = max(result.stats.target_passes for result in results)
    ends = len({result.stats.target_passes for result in results}) - 1  # dropping rows reads which
    assert reads.count == 0
    assert len(lists) <= 1 + rounds + 2 * ends


@pytest.mark.parametrize("rule", ["greedy", "match"])
def test_drafts_that_do_not_pay_are_given_up(rule: str) -> None:
    """Below the break-even accept length drafting ends after the watched rounds; the text is the same."""
    target = tiny_target("llama")
    row = RowRequest(PROMPTS[0], StopRule(frozenset(), 60))
    wanted = decode(target, None, [row], DecodeOptions(rule=rule))[0].ids
    for even, drafted in ((None, 60), (1.0, 60), (3.5, 24)):
        options = DecodeOptions(policy=POLICY, rule=rule, break_even=even)
        result = decode(target, tiny_head(target), [row], options)[0]
        assert result.ids == wanted
        offered = [depth > 0 for depth in result.stats.offered_depth_per_round]
        assert all(offered[: min(drafted, len(offered) - 3)]) and (even != 3.5 or not any(offered[24:]))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    with pytest.raises(ValueError, match="rule is 'exact'"):
        DecodeOptions(rule="exact")
    with pytest.raises(ValueError, match="proposal"):
        DecodeOptions(rule="sampled")
    with pytest.raises(ValueError, match="proposal"):
        DecodeOptions(rule="greedy", proposal="sampled")
    with pytest.raises(ValueError, match="256 positions"):
        decode(target, head, [*rows(), RowRequest([1], StopRule(frozenset(), 256))])
    monkeypatch.setattr(prefill, "available_bytes", lambda device: 10_000)
    with pytest.raises(ValueError, match="GiB are free"):
        decode(target, head, rows())


def test_memory_is_estimated_from_what_is_allocated() -> None:
    """The cache part of the estimate is exactly what a cache of that size takes."""
    for name in CONFIGS:
        target = tiny_target(name)
        cache = target.new_cache(40, rows=3)
        with torch.inference_mode():
            prefill.prefill(target, [[1, 2], [3], [4, 5, 6]], cache)
        assert cache.bytes == 3 * 40 * target.cache_bytes_per_slot
        one, two = (prefill.required_bytes(target, 3, slots, 1, 1) for slots in (40, 41))
        assert two - one == 3 * (target.cache_bytes_per_slot + target.dtype.itemsize)

"""Greedy speculative decoding equals the library's own generate, token for token, in fp32."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from heads.base import DraftHead, TreePolicy
from heads.target import TargetAdapter
from infer.baseline import decode_plain
from infer.engine import decode_speculative
from infer.metrics import PHASES, DecodeStats
from infer.stopping import StopRule
from tests.oracle import OracleHead
from tests.tiny import CONFIGS, library_greedy, prompt_ids, tiny_head, tiny_model, tiny_target

MODELS = list(CONFIGS)
POLICIES = {
    "tree": TreePolicy(width=3, depth=3, total=9),
    "wide": TreePolicy(width=4, depth=2, total=21),
    "chain": TreePolicy(width=1, depth=4, total=5),
    "one draft": TreePolicy(width=1, depth=1, total=2),
}
PROMPT = prompt_ids(9)
NEW = 32


def oracle(target: TargetAdapter, prompt: list[int], text: list[int]) -> OracleHead:
    return OracleHead(target, [prompt], [text])


@functools.cache
def library_text(name: str, new: int = NEW) -> list[int]:
    """What the library's own `generate` makes of PROMPT, with its own attention and cache."""
    return library_greedy(tiny_model(name), PROMPT, new)


def decode(target: TargetAdapter, head: DraftHead, policy: TreePolicy, **stop: Any) -> Any:
    rule = StopRule(stop.get("eos_ids", frozenset()), stop.get("max_new_tokens", NEW))
    return decode_speculative(target, head, stop.get("prompt", PROMPT), policy, rule)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_of_the_tiny_models_varies(name: str) -> None:
    text = library_text(name)
    assert len(set(text)) > NEW // 3  # else the tests below would pass with a drafter that repeats a token


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_random_head(name: str, policy: str) -> None:
    expected = library_text(name)
    target = tiny_target(name)
    new_ids, stats = decode(target, tiny_head(target), POLICIES[policy])
    assert new_ids == expected
    assert stats.new_tokens == NEW and stats.prompt_tokens == len(PROMPT)
    plain, plain_stats = decode_plain(target, PROMPT, StopRule(frozenset(), NEW))
    assert plain == expected
    assert plain_stats.check().target_passes == NEW - 1


@pytest.mark.parametrize("policy", ["tree", "wide", "chain"])
@pytest.mark.parametrize("name", MODELS)
def test_oracle_head_accepts_every_length(name: str, policy: str) -> None:
    expected = library_text(name)
    target = tiny_target(name, taps=(1,))
    head = oracle(target, PROMPT, expected)
    new_ids, stats = decode(target, head, POLICIES[policy])
    assert new_ids == expected
    assert set(stats.accepted_per_round) == set(range(POLICIES[policy].depth + 1))
    assert stats.target_passes < NEW - 1


@pytest.mark.parametrize("name", MODELS)
def test_head_gets_the_true_features(name: str) -> None:
    """Features committed over many rounds are those of one plain pass over the whole text."""
    expected = library_text(name)
    target = tiny_target(name, taps=(1,))
    head = oracle(target, PROMPT, expected)
    decode(target, head, POLICIES["tree"])
    got = torch.cat(head.seen[0].features)[None]
    known = [*PROMPT, *expected]
    out = tiny_model(name)(torch.tensor([known[: got.shape[1]]]), output_hidden_states=True)
    want = torch.cat([out.hidden_states[-1], out.hidden_states[2]], -1)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)  # summation order over 60 positions
    assert head.seen[0].tokens == known[1 : got.shape[1] + 1]


@pytest.mark.parametrize("drafter", ["oracle", "random"])
@pytest.mark.parametrize("name", MODELS)
def test_eos_at_every_offset(name: str, drafter: str) -> None:
    """Any token that the greedy run emits is declared to be EOS: the end falls on every offset of a block."""
    text = library_text(name, 24)
    target = tiny_target(name, taps=(1,))
    offsets = set()
    for eos in dict.fromkeys(text):
        head = oracle(target, PROMPT, text) if drafter == "oracle" else tiny_head(target)
        new_ids, stats = decode(target, head, POLICIES["tree"], eos_ids=frozenset({eos}), max_new_tokens=24)
        assert new_ids == text[: text.index(eos) + 1]
        if stats.target_passes:
            offsets.add((stats.accepted_per_round[-1], stats.last_round_cut))
    if drafter == "oracle":  # EOS as an accepted draft at each depth, and as a bonus
        assert {depth for depth, cut in offsets if cut} == {1, 2, 3}
        assert any(not cut for _, cut in offsets)


@pytest.mark.parametrize("policy", ["tree", "chain"])
@pytest.mark.parametrize("name", MODELS)
def test_every_limit(name: str, policy: str) -> None:
    text = library_text(name, 16)
    target = tiny_target(name, taps=(1,))
    for limit in range(1, 14):
        for head in (oracle(target, PROMPT, text), tiny_head(target)):
            new_ids, stats = decode(target, head, POLICIES[policy], max_new_tokens=limit)
            assert new_ids == text[:limit]
            assert stats.new_tokens == limit


@pytest.mark.parametrize("policy", ["tree", "chain", "one draft"])
@pytest.mark.parametrize("length", [1, 20, 63])
def test_gpt2_up_to_its_last_position(length: int, policy: str) -> None:
    """Absolute positions end at 64: drafts near the limit must not reach beyond."""
    prompt = prompt_ids(length, seed=3)
    room = 64 - length
    text = library_greedy(tiny_model("gpt2"), prompt, room)
    target = tiny_target("gpt2", taps=(1,))
    for head in (oracle(target, prompt, text), tiny_head(target)):
        new_ids, _ = decode(target, head, POLICIES[policy], prompt=prompt, max_new_tokens=room)
        assert new_ids == text
    with pytest.raises(ValueError) as error:
        decode(target, tiny_head(target), POLICIES[policy], prompt=prompt, max_new_tokens=room + 1)
    assert "64 positions" in str(error.value)


def test_streamed_blocks_add_up() -> None:
    target = tiny_target("llama", taps=(1,))
    text = library_text("llama")
    blocks: list[list[int]] = []
    head = oracle(target, PROMPT, text)
    rule = StopRule(frozenset(), NEW)
    new_ids, stats = decode_speculative(target, head, PROMPT, POLICIES["tree"], rule, lambda ids, _: blocks.append(ids))
    assert [token for block in blocks for token in block] == new_ids
    assert len(blocks) == stats.target_passes + 1 and max(map(len, blocks)) == 4


def test_time_is_split_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The phases add up to the whole call, by a clock that ticks once per reading."""
    ticks = iter(range(10**6))
    monkeypatch.setattr("infer.prefill.time.perf_counter", lambda: float(next(ticks)))
    target = tiny_target("llama")
    stats: DecodeStats = decode(target, tiny_head(target), POLICIES["tree"], max_new_tokens=8)[1]
    assert all(stats.seconds[phase] > 0 for phase in PHASES)
    assert stats.total_seconds == next(ticks) - 1  # every reading but the first ends a lap


def test_refusals() -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    tree = POLICIES["tree"]
    with pytest.raises(ValueError, match="0 tokens"):
        decode(target, head, tree, prompt=[])
    with pytest.raises(ValueError, match="0 tokens"):
        decode_plain(target, [], StopRule(frozenset(), 4))
    with pytest.raises(ValueError, match="token ids"):
        decode(target, head, tree, prompt=[5, 512])
    with pytest.raises(ValueError, match="256 positions"):
        decode(target, head, tree, max_new_tokens=256 - len(PROMPT) + 1)
    other = type(head)(replace(head.config, hidden_size=32, head_dim=8))
    with pytest.raises(ValueError, match="hidden_size"):
        decode(target, other, tree)
    with pytest.raises(ValueError, match="bfloat16"):
        decode(target, tiny_head(target).to(torch.bfloat16), tree)
    with pytest.raises(ValueError, match="layers"):
        decode(target, oracle(target, PROMPT, []), tree)
    with pytest.raises(ValueError, match="--tree-width"):
        decode(target, head, TreePolicy(width=513, depth=1, total=4))

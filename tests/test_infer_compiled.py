"""Compiled passes give what eager ones give, and are compiled once for all generations."""

from __future__ import annotations

import functools
import shutil
from typing import Any

import pytest
import torch

from heads.base import TreePolicy
from heads.compiled import StaticPasses
from heads.static import StaticTree
from heads.tree import DraftTree
from infer.engine import DecodeOptions, RowRequest, decode
from infer.stopping import StopRule
from tests.oracle import OracleHead
from tests.tiny import library_greedy, prompt_ids, tiny_head, tiny_model, tiny_target

PROMPT, NEW = prompt_ids(7), 20
POLICY = TreePolicy(width=3, depth=3, total=8)  # a size of its own: nothing is padded


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")


@needs_compiler
def test_greedy_text_is_the_librarys_and_nothing_is_compiled_twice() -> None:
    expected = library_greedy(tiny_model("llama"), PROMPT, NEW)
    target = tiny_target("llama", taps=(1,))
    rows = [RowRequest(PROMPT, StopRule(frozenset(), NEW))]
    options = DecodeOptions(POLICY, compiled=True)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    for head in (tiny_head(target), OracleHead(target, [PROMPT], [expected]), None):
        result = decode(target, head, rows, options)[0]
        assert result.ids == expected
    shorter = RowRequest(PROMPT[:3], StopRule(frozenset(), 9))
    want = library_greedy(tiny_model("llama"), PROMPT[:3], 9)
    assert decode(target, tiny_head(target), [shorter], options)[0].ids == want
    given_up = DecodeOptions(POLICY, compiled=True, break_even=3.5)
    longer = library_greedy(tiny_model("llama"), PROMPT, 60)
    row = RowRequest(PROMPT, StopRule(frozenset(), 60))
    result = decode(target, tiny_head(target), [row], given_up)[0]
    assert result.ids == longer and result.stats.offered_depth_per_round[-1] == 1
    assert counters["unique_graphs"] - before == 3  # passes of one token and of eight, and the head's drafts


@needs_compiler
def test_every_capacity_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: torch has a limit, behind which it would run eagerly without a word."""
    monkeypatch.setattr("heads.compiled.CAPACITY_STEP", 16)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    target = tiny_target("llama")
    with torch._dynamo.config.patch(recompile_limit=1):
        for length in (3, 3 + 16, 3 + 32):
            row = RowRequest(prompt_ids(length), StopRule(frozenset(), 4))
            expected = library_greedy(tiny_model("llama"), prompt_ids(length), 4)
            assert decode(target, None, [row], DecodeOptions(compiled=True))[0].ids == expected
    assert counters["unique_graphs"] - before == 3


DRAFTS = {
    "dynamic": POLICY,
    "static": TreePolicy.of(StaticTree(((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 1)))),
    "chain": TreePolicy(1, 3, 4),
}


@pytest.mark.parametrize("tree", DRAFTS)
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "hydra"])
def test_compiled_drafts_are_the_eager_ones(kind: str, tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ragged rows, after which they go on, with one graph for all rounds. (The graph is captured as always, but
    run by torch's own kernels, which takes a second instead of many.)"""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    options: dict[str, Any] = {"taps": (0, 2)} if kind == "eagle3" else {}
    head: Any = tiny_head(tiny_target("llama"), kind=kind, **options)
    width = 64 * max(1, len(head.needs.taps))
    features = torch.randn(3, 12, width, generator=torch.Generator().manual_seed(5))
    tokens = torch.tensor([prompt_ids(13, seed) for seed in range(3)])

    def rounds() -> list[DraftTree]:
        state, found = head.start(32, rows=3), []
        counts, filled = [9, 5, 7], [0, 0, 0]
        for _ in range(3):
            index_BA = torch.tensor([[min(done + i, 11) for i in range(max(counts))] for done in filled])
            row_B1 = torch.arange(3)[:, None]
            head.commit(state, features[row_B1, index_BA], tokens[row_B1, index_BA + 1], counts)
            filled = [done + count for done, count in zip(filled, counts, strict=True)]
            found.append(head.draft(state, tokens[torch.arange(3), torch.tensor(filled)], DRAFTS[tree]).validate())
            counts = [1, 3, 2]
        return found

    eager = rounds()
    with head.compiled_drafts():
        compiled = rounds()
    for one, other in zip(eager, compiled, strict=True):
        for name in ("token_BN", "parent_BN", "depth_BN"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        torch.testing.assert_close(one.score_BN, other.score_BN, atol=1e-5, rtol=1e-5)
    assert counters["unique_graphs"] - before == 1


def test_capacity_is_rounded_up() -> None:
    assert StaticPasses.capacity(1) == 256
    assert StaticPasses.capacity(192) == 256
    assert StaticPasses.capacity(193) == 512

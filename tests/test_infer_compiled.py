"""Compiled passes give what eager ones give, and are compiled once for all generations."""

from __future__ import annotations

import shutil

import pytest
import torch

from heads.base import TreePolicy
from heads.compiled import StaticPasses
from infer.engine import DecodeOptions, RowRequest, decode
from infer.stopping import StopRule
from tests.oracle import OracleHead
from tests.tiny import library_greedy, prompt_ids, tiny_head, tiny_model, tiny_target

PROMPT, NEW = prompt_ids(7), 20
POLICY = TreePolicy(width=3, depth=3, total=8)  # a size of its own: nothing is padded


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")


@needs_compiler
def test_greedy_text_is_the_librarys_and_two_sizes_are_compiled() -> None:
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
    assert counters["unique_graphs"] - before == 2  # passes of one token, and of eight


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


def test_capacity_is_rounded_up() -> None:
    assert StaticPasses.capacity(1) == 256
    assert StaticPasses.capacity(192) == 256
    assert StaticPasses.capacity(193) == 512

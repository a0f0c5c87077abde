"""Greedy speculative decoding of every architecture equals the library's generate, alone and in a ragged batch."""

from __future__ import annotations

import pytest

from heads.base import TreePolicy
from infer.batched import Request, decode_all
from infer.engine import DecodeOptions, RowRequest, decode
from infer.stopping import StopRule
from tests.oracle import OracleHead
from tests.tiny import ARCHITECTURES, library_greedy, prompt_ids, tiny_head, tiny_model, tiny_target

PROMPTS = [prompt_ids(length, seed=length) for length in (20, 3, 14, 1, 9)]  # windows are 16 tokens
NEW = 14
FIT = [name for name in ARCHITECTURES if name != "falcon_alibi"]


@pytest.mark.parametrize("name", FIT)
def test_greedy_rows_are_the_librarys(name: str) -> None:
    model = tiny_model(ARCHITECTURES[name])
    expected = [library_greedy(model, prompt, NEW) for prompt in PROMPTS]
    target = tiny_target(ARCHITECTURES[name], taps=(1,))
    rows = [RowRequest(prompt, StopRule(frozenset(), NEW)) for prompt in PROMPTS]
    options = DecodeOptions(TreePolicy(width=3, depth=3, total=9))
    for head in (tiny_head(target), OracleHead(target, PROMPTS, expected)):
        assert [result.ids for result in decode(target, head, rows, options)] == expected
    single = OracleHead(target, PROMPTS[:1], expected[:1])
    assert decode(target, single, rows[:1], options)[0].ids == expected[0]


@pytest.mark.parametrize("name", FIT)
def test_training_answers_are_the_librarys(name: str) -> None:
    """Rows that take the places of others; windows that are crossed."""
    model = tiny_model(ARCHITECTURES[name])
    expected = [library_greedy(model, prompt, NEW) for prompt in PROMPTS]
    target = tiny_target(ARCHITECTURES[name])
    requests = [Request(prompt, NEW) for prompt in PROMPTS]
    assert decode_all(target, requests, 10, frozenset(), rows=2) == expected

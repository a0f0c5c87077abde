"""Stops are exact at every offset of a block."""

import pytest

from infer.stopping import StopRule

EOS, OTHER_EOS = 2, 7
BLOCK = [10, 11, 12, 13, 14]


@pytest.mark.parametrize("offset", range(len(BLOCK)))
@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_eos_at_every_offset(offset: int, eos: int) -> None:
    rule = StopRule(frozenset({EOS, OTHER_EOS}), max_new_tokens=100)
    block = [*BLOCK[:offset], eos, *BLOCK[offset + 1 :]]
    assert rule.cut(block, already_emitted=3) == ([*BLOCK[:offset], eos], "eos")


@pytest.mark.parametrize("limit", range(1, len(BLOCK) + 3))
@pytest.mark.parametrize("already", [0, 1, 40])
def test_limit_at_every_offset(limit: int, already: int) -> None:
    rule = StopRule(frozenset({EOS}), max_new_tokens=already + limit)
    reason = "length" if limit <= len(BLOCK) else None
    assert rule.cut(BLOCK, already) == (BLOCK[:limit], reason)


@pytest.mark.parametrize("limit", range(1, 6))
@pytest.mark.parametrize("offset", range(5))
def test_the_earlier_stop_wins_and_eos_on_a_tie(limit: int, offset: int) -> None:
    rule = StopRule(frozenset({EOS}), max_new_tokens=limit)
    block = [*BLOCK[:offset], EOS, *BLOCK[offset + 1 :]]
    want = (block[: offset + 1], "eos") if offset + 1 <= limit else (block[:limit], "length")
    assert rule.cut(block, 0) == want


@pytest.mark.parametrize("size", range(1, 7))
def test_block_size_does_not_change_the_output(size: int) -> None:
    """Fed in blocks of any size, the same tokens come out as one by one."""
    stream = [10, 11, 12, 13, EOS, 14, 15]
    for limit in range(1, 8):
        rule, out, reason = StopRule(frozenset({EOS}), limit), list[int](), None
        for start in range(0, len(stream), size):
            part, reason = rule.cut(stream[start : start + size], len(out))
            out += part
            if reason:
                break
        assert out == stream[: min(limit, 5)] and reason == ("eos" if limit >= 5 else "length")


def test_edges() -> None:
    rule = StopRule(frozenset(), max_new_tokens=3)
    assert rule.cut([EOS], 0) == ([EOS], None)  # no id ends the turn
    assert rule.cut([], 0) == ([], None)
    assert rule.cut([1], 3) == ([], "length")  # nothing after the limit, even if asked again
    assert StopRule([EOS, 3], 1).eos_ids == frozenset({EOS, 3})  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match=f"max_new_tokens is {limit}, expected at least 1"):
        StopRule(frozenset(), limit)

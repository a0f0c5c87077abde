"""Keys, splits and storage of conversations and token rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.conversations import (
    Conversation,
    DropCounts,
    Message,
    TokenRow,
    TokenRows,
    is_held_out,
    read_rows,
    split_rows,
    write_rows,
)


def test_counts_must_reconcile() -> None:
    with pytest.raises(AssertionError, match="do not add up"):
        DropCounts(rows_in=3, rows_out=1, reasons={"empty": 1}).check()


# --- split -------------------------------------------------------------------------------------------------


def prompt(text: str, answer: str = "") -> Conversation:
    turns = [{"role": "user", "content": text}] + ([{"role": "assistant", "content": answer}] if answer else [])
    return Conversation(text, "test", tuple(turns))


def test_split_is_stable_and_near_its_fraction() -> None:
    rows = [prompt(f"question {i}") for i in range(2000)]
    train, held = split_rows(rows, 0.1, seed=0)
    assert train + held != rows and len(train) + len(held) == 2000
    assert 140 < len(held) < 260  # mean 200, sigma 13.4: beyond 4 sigma once in 15,000 seeds, and the seed is fixed
    assert [row.id for row in held] == [row.id for row in rows if is_held_out(row.split_key, 0.1, 0)]
    half_train, half_held = split_rows(rows[::-1][:1000], 0.1, seed=0)
    assert {row.id for row in half_held} <= {row.id for row in held}
    assert {row.id for row in half_train} <= {row.id for row in train}
    assert {row.id for row in split_rows(rows, 0.1, seed=1)[1]} != {row.id for row in held}


def test_split_known_values() -> None:
    """Written out, so that a change of the hash, which would move rows between the sides, is noticed."""
    assert prompt("hi").split_key == "b49177e05868b7af8e82a644c1ce20e5"
    assert TokenRow("1", (1, 2, 3), ((2, 3),), "s").split_key == "49a64717d5d4cb19952e6eac2946415c"
    sides = [is_held_out(f"key{i}", 0.5, 0) for i in range(8)]
    assert sides == [False, True, True, False, True, True, False, True]


def test_content_keys() -> None:
    """Known for plain texts; calls, reasoning and tools count, the order of an object's keys does not."""
    user: Message = {"role": "user", "content": "hi"}
    assert Conversation("1", "s", (user,)).content_key == "897be8e1f0370e7f41788b5b5337627e"
    assert Conversation("2", "t", (user,)).content_key == Conversation("1", "s", (user,)).content_key

    def call(**arguments: int) -> Conversation:
        function = {"name": "f", "arguments": arguments}
        return Conversation(
            "", "", (user, {"role": "assistant", "content": "", "tool_calls": [{"function": function}]})
        )

    assert call(a=1, b=2).content_key == call(b=2, a=1).content_key
    different = [
        call(a=1),
        call(a=2),
        Conversation("", "", (user,), ({"name": "f"},)),
        Conversation("", "", (user, {"role": "assistant", "content": "x"})),
        Conversation("", "", (user, {"role": "assistant", "content": "x", "reasoning_content": "y"})),
    ]
    assert len({conversation.content_key for conversation in different}) == 5


@given(
    texts=st.lists(st.text(max_size=3), max_size=30, unique=True),
    more=st.lists(st.text(min_size=4, max_size=5), max_size=30, unique=True),
    seed=st.integers(min_value=0, max_value=99),
)
def test_added_rows_move_no_other(texts: list[str], more: list[str], seed: int) -> None:
    before, after = (
        split_rows([prompt(t) for t in texts], 0.5, seed),
        split_rows([prompt(t) for t in more + texts], 0.5, seed),
    )
    drawn = [{is_held_out(prompt(t).split_key, 0.5, seed) for t in some} for some in (texts, more + texts)]
    if all(len(sides) == 2 for sides in drawn):  # else a row had to move so that no side is empty
        assert [{row.id for row in side} & set(texts) for side in after] == [
            {row.id for row in side} for side in before
        ]


def test_rows_with_one_prompt_stay_together() -> None:
    assert prompt("a", "x").split_key == prompt("a", "y").split_key == prompt("a").split_key
    one = TokenRow("1", (1, 2, 3, 4), ((2, 4),), "s")
    two = TokenRow("2", (1, 2, 9), ((2, 3),), "s")
    assert one.split_key == two.split_key != TokenRow("3", (1, 3, 9), ((2, 3),), "s").split_key


@given(
    texts=st.lists(st.sampled_from("abcdef"), min_size=2, max_size=8),
    fraction=st.floats(min_value=0, max_value=1),
    seed=st.integers(min_value=0, max_value=99),
)
def test_neither_side_is_empty(texts: list[str], fraction: float, seed: int) -> None:
    rows = [prompt(text, f"answer {i}") for i, text in enumerate(texts)]
    train, held = split_rows(rows, fraction, seed)
    assert train and held and len(train) + len(held) == len(rows)
    assert {row.content_key for row in train + held} == {row.content_key for row in rows}
    if len(set(texts)) > 1:
        assert not {row.split_key for row in train} & {row.split_key for row in held}


def test_split_of_few_rows() -> None:
    empty: list[Conversation] = []
    assert split_rows(empty, 0.5, 0) == ([], [])
    row = prompt("a")
    assert split_rows([row], 0.0, 0) == ([row], []) and split_rows([row], 1.0, 0) == ([], [row])


# --- token rows --------------------------------------------------------------------------------------------


def test_loss_mask() -> None:
    row = TokenRow("r", (5, 6, 7, 8, 9, 10), ((1, 2), (3, 5)), "s")
    assert row.loss_mask == [False, True, False, True, True, False]
    assert row.supervised == 3


@pytest.mark.parametrize("spans", [((0, 0),), ((2, 1),), ((0, 4),), ((-1, 1),), ((1, 2), (0, 1)), ((0, 2), (1, 3))])
def test_bad_spans(spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="row 'r': span"):
        TokenRow("r", (1, 2, 3), spans, "s")


def test_rows_round_trip(tmp_path: Path) -> None:
    rows = [
        TokenRow("é\u2028\n", (1, 0, 3), ((1, 3),), "s", truncated=True),
        TokenRow("b", (4, 5, 6, 7), ((0, 1), (2, 4)), "t"),
    ]
    path = tmp_path / "deep" / "rows.jsonl"
    write_rows(path, rows)
    assert list(read_rows(path)) == rows
    write_rows(path, [])
    assert list(read_rows(path)) == []
    assert [file.name for file in path.parent.iterdir()] == ["rows.jsonl"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = TokenRow("a", (1, 2), ((1, 2),), "s")
    write_rows(path, [row])

    def failing() -> Any:
        yield TokenRow("b", (1, 2), ((1, 2),), "s")
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_rows(path, failing())
    assert list(read_rows(path)) == [row]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


token_rows = st.builds(
    lambda name, ids, cuts, truncated: TokenRow(
        name,
        tuple(ids),
        tuple((a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if b <= len(ids)),
        "s" + name[:1],
        truncated,
    ),
    st.text(max_size=3),
    st.lists(st.integers(0, 2**31 - 1), max_size=9),
    st.lists(st.integers(0, 9), unique=True, max_size=6).map(sorted),
    st.booleans(),
)


@given(rows=st.lists(token_rows, max_size=6), cut=st.slices(6))
def test_compact_rows_are_the_rows(rows: list[TokenRow], cut: slice) -> None:
    compact = TokenRows(rows)
    assert len(compact) == len(rows) and list(compact) == rows
    assert list(compact[cut]) == rows[cut]
    assert rows == [] or compact[-1] == rows[-1]
    with pytest.raises(IndexError):
        compact[len(rows)]


GOOD_ROW = {"id": "a", "input_ids": [1, 2], "spans": [[1, 2]], "source": "s", "truncated": False}


@pytest.mark.parametrize(
    "line",
    [
        '{"id": "a", "input_ids": [1',
        "[]",
        "",
        json.dumps({key: value for key, value in GOOD_ROW.items() if key != "spans"}),
        *[
            json.dumps(GOOD_ROW | change)
            for change in (
                {"spans": [[1, 3]]},
                {"spans": [[1]]},
                {"spans": [1]},
                {"input_ids": [1, 2.0]},
                {"input_ids": "12"},
                {"input_ids": [1, -2]},
                {"input_ids": [1, 2**31]},
                {"truncated": 0},
                {"id": 3},
                {"extra": 1},
            )
        ],
    ],
)
def test_malformed_row_names_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD_ROW) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: "):
        read_rows(path)

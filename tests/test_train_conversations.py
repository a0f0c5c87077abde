"""Reading, checking, splitting and storing conversations and token rows."""

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
    TokenRow,
    is_held_out,
    read_conversations,
    read_rows,
    split_rows,
    write_rows,
)

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be kind"}


def write(tmp_path: Path, rows: list[Any]) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def contents(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"messages": [SYSTEM, USER, ASSISTANT]},
            [("system", "be kind"), ("user", "hi"), ("assistant", "hello")],
        ),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
            [("user", "hi"), ("assistant", "hello")],
        ),
        ({"messages": [USER]}, [("user", "hi")]),
        ({"messages": [USER], "user_turns": ["hi", "more"]}, [("user", "hi"), ("user", "more")]),
        ({"messages": [SYSTEM, USER], "user_turns": ["hi"]}, [("system", "be kind"), ("user", "hi")]),
        ({"messages": [USER, ASSISTANT], "user_turns": ["hi"]}, [("user", "hi"), ("assistant", "hello")]),
        ({"question_id": 3, "turns": ["a", "b"]}, [("user", "a"), ("user", "b")]),
        ({"messages": [USER, ASSISTANT, USER]}, [("user", "hi"), ("assistant", "hello"), ("user", "hi")]),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    }
                ]
            },
            [("user", "ab")],
        ),
    ],
)
def test_layouts(tmp_path: Path, row: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    rows, counts = read_conversations(write(tmp_path, [row]))
    assert contents(rows[0]) == expected
    assert rows[0].is_prompt == all(role != "assistant" for role, _ in expected)
    assert (counts.rows_in, counts.rows_out, counts.reasons) == (1, 1, {})


def test_ids_and_sources(tmp_path: Path) -> None:
    rows, _ = read_conversations(
        write(
            tmp_path,
            [{"question_id": 81, "turns": ["a"]}, {"id": 0, "turns": ["b"], "source": "s"}, {"turns": ["c"]}],
        )
    )
    assert [(row.id, row.source) for row in rows[:2]] == [("81", "set"), ("0", "s")]
    assert rows[2].id == rows[2].content_key[:16]


def test_bad_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    good = {"messages": [USER, ASSISTANT]}
    bad: dict[str, list[dict[str, Any]]] = {
        "empty": [{"messages": []}],
        "assistant first": [{"messages": [ASSISTANT]}, {"messages": [SYSTEM, ASSISTANT, USER]}],
        "no user turn": [{"messages": [SYSTEM]}],
        "null content": [{"messages": [USER, {"role": "assistant", "content": None}]}, {"turns": [None]}],
        "empty content": [{"messages": [USER, {"role": "assistant", "content": " \n"}]}],
        "content is not text": [
            {"turns": [3]},
            {"turns": ["\ud800"]},
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        ],
        "not alternating": [
            {"messages": [USER, USER, ASSISTANT]},
            {"messages": [USER, ASSISTANT, ASSISTANT]},
            {"messages": [USER, SYSTEM, ASSISTANT]},
        ],
        "unknown role": [{"messages": [{"role": "bot", "content": "x"}]}, {"messages": [{"content": "x"}]}],
        "messages is not a list of turns": [{"messages": "hi"}, {"messages": ["hi"]}],
        "none of messages, conversations, user_turns, turns": [{"text": "hi"}, {"messages": None}],
        "duplicate": [{"id": "other", "messages": [USER, ASSISTANT]}],
    }
    everything = [good] + [row for rows in bad.values() for row in rows]
    rows, counts = read_conversations(write(tmp_path, everything))
    assert len(rows) == counts.rows_out == 1
    assert counts.rows_in == len(everything)
    assert counts.reasons == {reason: len(rows) for reason, rows in bad.items()}
    assert "1 of 21 rows kept, 3 dropped (content is not text), 3 dropped (not alternating)" in str(counts)


def test_counts_must_reconcile() -> None:
    with pytest.raises(AssertionError, match="do not add up"):
        DropCounts(rows_in=3, rows_out=1, reasons={"empty": 1}).check()


@pytest.mark.parametrize(
    ("line", "part"),
    [("{oops", "not valid JSON"), ("[]", "list, expected one JSON object"), ("3", "int, expected")],
)
def test_bad_json_names_the_line(tmp_path: Path, line: str, part: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"turns": ["a"]}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"set\.jsonl, line 3: {part}"):
        read_conversations(path)


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0 of 1 rows kept, 1 dropped \(none of messages.*data\.path"):
        read_conversations(write(tmp_path, [{"instruction": "x"}]))
    with pytest.raises(ValueError, match=r"cannot be read.*data\.path"):
        read_conversations(tmp_path / "none.jsonl")


def test_line_separators_inside_strings(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"turns": ["a\u2028b\x85c"]}\n{"turns": ["d"]}\n', encoding="utf-8")
    rows, counts = read_conversations(path)
    assert contents(rows[0]) == [("user", "a\u2028b\x85c")] and counts.rows_in == 2


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
    assert read_rows(path) == rows
    write_rows(path, [])
    assert read_rows(path) == []
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
    assert read_rows(path) == [row]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


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

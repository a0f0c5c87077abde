"""Finished answers on disk: torn lines, later lines, damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.answer_store import AnswerStore, AnswerWriter
from train.answering import Answer

ANSWERS = [
    Answer("a", None, (1, 2, 3, 4), ((1, 2), (3, 4)), True, True),
    Answer("b", "empty answer"),
    Answer("c é\u2028\n", None, (70_000, 5), ((1, 2),)),
]


def _write(folder: Path, *answers: Answer) -> Path:
    writer = AnswerWriter(folder)
    for answer in answers:
        writer.write(answer)
    writer.close()
    return max(folder.iterdir())


def test_what_was_written_is_read(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path / "answers")
    _write(store.folder, *ANSWERS[:2])
    store.poll()
    _write(store.folder, ANSWERS[2])
    assert store.places.keys() == {"a", "b"}  # until it is looked at again
    store.poll()
    for some in (store, AnswerStore(store.folder)):
        assert [some.read(answer.key) for answer in ANSWERS] == ANSWERS
        assert [some.places[a.key].tokens for a in ANSWERS] == [2, 0, 1]
        assert [some.places[a.key].reason for a in ANSWERS] == [None, "empty answer", None]
        assert [some.places[a.key].reencoded for a in ANSWERS] == [True, False, False]


def test_a_torn_line_is_not_counted_until_it_is_whole(tmp_path: Path) -> None:
    path = _write(tmp_path, *ANSWERS)
    whole = path.read_bytes()
    starts = [0, whole.index(b"\n") + 1, whole.rindex(b"\n", 0, -1) + 1, len(whole)]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        store = AnswerStore(tmp_path)
        assert len(store.places) == sum(length >= end for end in starts[1:])
        path.write_bytes(whole)
        store.poll()
        assert [store.read(answer.key) for answer in ANSWERS] == ANSWERS


def test_of_two_rows_with_one_key_the_first_counts(tmp_path: Path) -> None:
    first, second = ANSWERS[0], Answer("a", None, (9, 9), ((0, 2),))
    _write(tmp_path, first)
    _write(tmp_path, second)
    assert AnswerStore(tmp_path).read("a") == first


@pytest.mark.parametrize("damage", [b'{"key": "x"}\n', b"[1]\n", b'{"key": "x", "tok\n', b"\xff\n"])
def test_damage_is_named(tmp_path: Path, damage: bytes) -> None:
    path = _write(tmp_path, ANSWERS[1])
    start = path.stat().st_size
    path.write_bytes(path.read_bytes() + damage)
    with pytest.raises(ValueError, match=rf"{path.name}, byte {start}: .*damaged: delete it"):
        AnswerStore(tmp_path)

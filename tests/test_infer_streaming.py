"""Streamed text is final, whole, free of stop strings, and the same with colours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.stopping import REPLACEMENT, RowStop, StopRule, TokenBytes, decode_text
from infer.streaming import ColourWriter, TextStream, TokenKind
from tests.test_infer_stopping import CHARACTERS, LEADS, SIZES, TOKENIZERS, cases, feed, flat, ids_of
from tests.tiny import tiny_tokenizer

ANSI = re.compile(r"\033\[[0-9;]*m")
KINDS = ("accepted", "corrected", "plain")


def streamed(stream: TextStream, written: list[str], blocks: Sequence[Sequence[int]], final: str) -> None:
    """Pushes the blocks; what is written must be a beginning of the final text at all times."""
    for block in blocks:
        stream.push(block)
        assert final.startswith("".join(written))


def blocks_of(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    out, at = list[Sequence[int]](), 0
    while at < len(ids):
        out.append(ids[at : at + sizes[len(out) % len(sizes)]])
        at += len(out[-1])
    return out


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_stream_writes_whole_characters(size: int) -> None:
    tokenizer = tiny_tokenizer()
    text = "Grüße, 世界 🙂 end"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())  # a token per byte, so characters are split
    written: list[str] = []
    stream = TextStream(tokenizer, written.append)
    for start in range(0, len(ids), size):
        stream.push(ids[start : start + size])
        assert "".join(written) == text.encode()[: start + size].decode(errors="ignore")  # and at once
    stream.finish()
    assert "".join(written) == text
    unfinished = TextStream(tokenizer, written.append)
    unfinished.push(tokenizer("🙂", add_special_tokens=False)["input_ids"][:2])
    assert "".join(written) == text
    unfinished.finish()
    assert "".join(written) == text + REPLACEMENT  # nothing is lost without a trace


def any_ids(name: str) -> st.SearchStrategy[list[int]]:
    """Any tokens: broken characters, special tokens and an id that the tokenizer lacks among them."""
    tokenizer = TOKENIZERS[name]
    pool = [*flat(CHARACTERS[name]), *tokenizer.all_special_ids, 5000]
    return st.lists(st.sampled_from(pool), max_size=24)


@settings(max_examples=150, deadline=None)
@given(st.data(), SIZES)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_streamed_text_is_the_decoded_text(name: str, data: st.DataObject, sizes: list[int]) -> None:
    tokenizer, ids = TOKENIZERS[name], data.draw(any_ids(name))
    final, written = decode_text(tokenizer, ids), list[str]()
    stream = TextStream(tokenizer, written.append)
    streamed(stream, written, blocks_of(ids, sizes), final)
    stream.finish("length")
    assert "".join(written) == final


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_next_token_changes_what_is_written(name: str, data: st.DataObject) -> None:
    """Every token of the toy vocabulary, alone and twice, is tried as the continuation."""
    tokenizer, ids = TOKENIZERS[name], data.draw(any_ids(name))
    written = list[str]()
    stream = TextStream(tokenizer, written.append)
    candidates = sorted(set(flat(CHARACTERS[name])))
    for count in range(1, len(ids) + 1):
        stream.push(ids[count - 1 : count])
        text = "".join(written)
        for token in candidates if count % 3 == 0 or count == len(ids) else ():
            for more in ([token], [token, token]):
                assert decode_text(tokenizer, ids[:count] + more).startswith(text)


@settings(max_examples=150, deadline=None)
@given(cases(), SIZES)
def test_stop_strings_are_left_out(case: tuple[str, list[int], list[int], list[str]], sizes: list[int]) -> None:
    """The text that is written is the row's text up to `text_cut`."""
    name, prompt, new, strings = case
    tokenizer = TOKENIZERS[name]
    row = RowStop(StopRule(frozenset(), 1000, tuple(strings), tokenizer), prompt)
    emitted, reason = feed(row, new, [1])
    final, written = decode_text(tokenizer, emitted)[: row.text_cut], list[str]()
    stream = TextStream(tokenizer, written.append, strings, prompt)
    streamed(stream, written, blocks_of(emitted, sizes), final)
    assert stream.stopped == (reason == "string")
    stream.finish(reason)
    assert "".join(written) == final


@settings(max_examples=150, deadline=None)
@given(st.data(), SIZES)
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_stop_strings_among_broken_text_and_special_tokens(name: str, data: st.DataObject, sizes: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    prompt, new = data.draw(any_ids(name)), data.draw(any_ids(name))
    some = ["a", "ab", "aab", "a<|x|>b", "<|x|>", "b<|", ">a", ">ab", "é", "aé", " a", "\n\n"]
    strings = tuple(data.draw(st.lists(st.sampled_from(some), min_size=1, max_size=3)))
    row = RowStop(StopRule(frozenset(), 1000, strings, tokenizer), prompt)
    emitted, reason = feed(row, new, [1])
    final, written = decode_text(tokenizer, emitted)[: row.text_cut], list[str]()
    stream = TextStream(tokenizer, written.append, strings, prompt)
    streamed(stream, written, blocks_of(emitted, sizes), final)
    stream.finish(reason)
    assert "".join(written) == final


@settings(max_examples=150, deadline=None)
@given(cases(["byte_level", "word_piece"]))
def test_no_more_is_held_back_than_could_become_a_stop_string(
    case: tuple[str, list[int], list[int], list[str]],
) -> None:
    name, prompt, new, strings = case
    tokenizer, written = TOKENIZERS[name], list[str]()
    stream = TextStream(tokenizer, written.append, strings, prompt)
    for count in range(1, len(new) + 1):
        stream.push(new[count - 1 : count])
        if stream.stopped:
            break
        text = decode_text(tokenizer, LEADS[name] + prompt + new[:count])
        own = decode_text(tokenizer, new[:count])
        if text.endswith(REPLACEMENT):
            continue
        held = [size for string in strings for size in range(1, len(string)) if text.endswith(string[:size])]
        assert "".join(written) == own[: max(0, len(own) - max(held, default=0))]


@pytest.mark.parametrize("reason", ["eos", "length", "criteria"])
def test_finish_writes_what_was_held_back(reason: Any) -> None:
    tokenizer, written = TOKENIZERS["byte_level"], list[str]()
    stream = TextStream(tokenizer, written.append, ["abcab"])
    stream.push(ids_of(tokenizer, ["c", "ab", "c"]))
    assert "".join(written) == "c"
    stream.finish(reason)
    assert "".join(written) == "cabc"
    stream.finish(reason)
    assert "".join(written) == "cabc"


def test_nothing_comes_after_a_stop_string() -> None:
    tokenizer, written = TOKENIZERS["byte_level"], list[str]()
    stream = TextStream(tokenizer, written.append, ["bc", "b"])
    stream.push(ids_of(tokenizer, ["c", "ab", "c"]))
    stream.push(ids_of(tokenizer, ["c"]))
    stream.finish("string")
    assert "".join(written) == "ca"


def test_text_before_a_bad_character_is_not_held_back() -> None:
    tokenizer, written = TOKENIZERS["byte_level"], list[str]()
    stream = TextStream(tokenizer, written.append)
    stream.push(ids_of(tokenizer, ["aÃ"]))
    assert "".join(written) == "a"
    stream.push(ids_of(tokenizer, ["©"] * 9))
    assert "".join(written) == "aé" + REPLACEMENT * 5


@pytest.mark.parametrize(
    ("name", "group"),
    [("byte_fallback", None), ("byte_level", ["a"]), ("byte_level", ["©"]), ("byte_level", ["<|x|>", "Ġa"])],
)
def test_the_window_stays_small(name: str, group: list[str] | None) -> None:
    """Also where a beginning of a stop string, or an unfinished character, is always at the end."""
    tokenizer, lengths = TOKENIZERS[name], list[int]()

    class Counting:
        def decode(self, ids: list[int], **options: Any) -> str:
            lengths.append(len(ids))
            return str(tokenizer.decode(ids, **options))

        def convert_ids_to_tokens(self, token: int) -> Any:
            return tokenizer.convert_ids_to_tokens(token)

    stream = TextStream(Counting(), lambda _: None, ["aab\n", "a\n\n"])
    ids = flat(CHARACTERS[name]) if group is None else ids_of(tokenizer, group)
    for token in ids * 20:
        stream.push([token])
    assert max(lengths) <= 10


def test_wrong_use_is_told() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    with pytest.raises(ValueError, match="expected no empty string"):
        TextStream(tokenizer, print, [""])
    stream = TextStream(tokenizer, print)
    with pytest.raises(ValueError, match="kinds has 1 entries, expected 2"):
        stream.push([1, 2], ["plain"])
    with pytest.raises(ValueError, match="give it the stop_strings"):
        stream.finish("string")


# Colours.


def coloured(tokenizer: Any, blocks: Sequence[tuple[Sequence[int], Sequence[TokenKind]]], **options: Any) -> str:
    out: list[str] = []
    stream = TextStream(tokenizer, ColourWriter(out.append), **options)
    for ids, kinds in blocks:
        stream.push(ids, kinds)
        assert "".join(out).count("\033[0m") == len(ANSI.findall("".join(out))) / 2  # every piece is reset
    stream.finish()
    assert out[-1] == "\033[0m"
    return "".join(out)


def kinds_of(text: str) -> tuple[str, list[str]]:
    """Text without codes, and the kind of each of its characters."""
    names = {"": "plain", "\033[0m": "plain", "\033[32m": "accepted", "\033[33m": "corrected"}
    plain, kinds, now = "", list[str](), "plain"
    for part in re.split(f"({ANSI.pattern})", text):
        if part in names and part:
            now = names[part]
        else:
            plain, kinds = plain + part, kinds + [now] * len(part)
    return plain, kinds


@settings(max_examples=150, deadline=None)
@given(cases(), SIZES, st.data())
def test_only_colours_differ(
    case: tuple[str, list[int], list[int], list[str]], sizes: list[int], data: st.DataObject
) -> None:
    """Same text as without colours; each character has the kind of the last token with a byte in it."""
    name, prompt, new, strings = case
    tokenizer = TOKENIZERS[name]
    options: dict[str, Any] = {"stop_strings": strings, "prompt_ids": prompt} if data.draw(st.booleans()) else {}
    kinds: list[Any] = data.draw(st.lists(st.sampled_from(KINDS), min_size=len(new), max_size=len(new)))
    ids_blocks, at, pairs = blocks_of(new, sizes), 0, list[tuple[Sequence[int], list[Any]]]()
    for block in ids_blocks:
        pairs.append((block, kinds[at : at + len(block)]))
        at += len(block)
    text, got = kinds_of(coloured(tokenizer, pairs, **options))
    written: list[str] = []
    plain = TextStream(tokenizer, written.append, **options)
    for block in ids_blocks:
        plain.push(block)
    plain.finish()
    assert text == "".join(written)

    token_bytes = TokenBytes(tokenizer)
    owners = [kind for token, kind in zip(new, kinds, strict=True) for _ in token_bytes(token)]
    whole = b"".join(map(token_bytes, new))
    # What a decoder drops at the start of a text (a space, or word pieces' "##" that it keeps) shifts the bytes.
    shift = len(whole) - len(decode_text(tokenizer, new).encode())
    if shift < 0:
        return
    want, position = list[str](), shift
    for character in text:
        position += len(character.encode())
        want.append(owners[position - 1])
    assert got == want


def test_a_broken_run_of_bytes_leaves_the_colours_before_it() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = ids_of(tokenizer, ["a", "b", "<0xC3>", "<0xA9>", "<0xC3>", "<0xA9>"])
    kinds: list[Any] = ["accepted", "corrected", "accepted", "accepted", "plain", "corrected"]
    for cut in range(1, 6):  # in the first piece the run is whole, or ends inside a character
        text = coloured(tokenizer, [(ids[:cut], kinds[:cut]), (ids[cut:], kinds[cut:])])
        assert kinds_of(text) == ("abéé", ["accepted", "corrected", "accepted", "corrected"])


def test_a_character_of_two_kinds_takes_the_later_one() -> None:
    runs = (
        ("byte_level", ["a", "ð", "Ł", "Ļ", "Ĥ", "b"]),
        ("byte_fallback", ["a", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "b"]),
    )
    for name, tokens in runs:
        tokenizer = TOKENIZERS[name]
        for corrected in range(1, 5):
            kinds: list[Any] = ["accepted"] * corrected + ["corrected"] * (5 - corrected) + ["plain"]
            text = coloured(tokenizer, [(ids_of(tokenizer, tokens), kinds)])
            assert kinds_of(text) == ("a🙂b", ["accepted", "corrected", "plain"])
    tokenizer = TOKENIZERS["byte_level"]
    broken = coloured(
        tokenizer, [(ids_of(tokenizer, ["a", "ð", "Ł", "b"]), ["plain", "corrected", "accepted", "plain"])]
    )
    assert kinds_of(broken) == (f"a{REPLACEMENT}b", ["plain", "accepted", "plain"])
    twice = coloured(tokenizer, [(ids_of(tokenizer, ["ð", "Ã", "©"]), ["accepted", "corrected", "plain"])])
    assert kinds_of(twice) == (f"{REPLACEMENT}é", ["accepted", "plain"])


def test_a_special_token_takes_no_colour() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = ids_of(tokenizer, ["a", "b", "<|x|>", "c", "<|x|>"])
    got = coloured(tokenizer, [(ids, ["accepted", "accepted", "corrected", "plain", "corrected"])])
    assert kinds_of(got) == ("abc", ["accepted", "accepted", "plain"])


def test_a_stop_string_may_begin_in_a_token_that_ends_a_character() -> None:
    tokenizer, written = TOKENIZERS["byte_level"], list[str]()
    stream = TextStream(tokenizer, written.append, ["bx"])
    for token in ids_of(tokenizer, ["c", "aÃ", "©b", "Ã", "©b", "c", "b"]):
        stream.push([token])
    stream.finish("length")
    assert "".join(written) == "caébébcb"


def test_a_writer_of_colours_takes_plain_text() -> None:
    out: list[str] = []
    writer = ColourWriter(out.append)
    TextStream(TOKENIZERS["byte_level"], writer).finish("length")
    assert out == ["\033[0m"]
    out.clear()
    writer("a")
    writer("b", "accepted")
    writer("c", "corrected")
    writer.close()
    assert out == ["a", "\033[32mb\033[0m", "\033[33mc\033[0m", "\033[0m"]

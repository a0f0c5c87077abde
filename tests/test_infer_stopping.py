"""Stops are exact at every offset of a block, whatever ends the row."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from infer.stopping import RowStop, StopReason, StopRule, TokenBytes, decode_text
from tests.tiny import CONFIGS, prompt_ids, tiny_model, tiny_tokenizer

EOS, OTHER_EOS = 2, 7
BLOCK = [10, 11, 12, 13, 14]


# Tokenizers with the few tokens that make stop strings cross borders often. Only ids are drawn, nothing is merged.


def _wrap(backend: Tokenizer, name: str) -> Any:
    backend.add_special_tokens([AddedToken("<|x|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|x|>", name_or_path=name)


def byte_level() -> Any:
    """Byte-level BPE with longer tokens and parts of characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    longer = ["ab", "aab", "ba", "bc", "Ġa", "ĊĊ", "Ã©", "aÃ", "©b", "ðŁ", "ĻĤa", "ðŁĻĤ"]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet + longer)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend, "byte_level")


def byte_fallback() -> Any:
    """As Llama 2's: "▁" for a space, dropped at the start of a text, and byte tokens for rare characters."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdef▁\n"]
    tokens += ["ab", "aab", "ba", "bc", "▁a", "▁ab", "▁▁", "\n\n", "é"]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return _wrap(backend, "byte_fallback")


def word_piece() -> Any:
    """A space before every token but the first and those that begin with "##"."""
    tokens = ["[UNK]", "a", "b", "##a", "##b", "##ab", "aab", "abc", ".", "abcdef"]
    backend = Tokenizer(models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return _wrap(backend, "word_piece")


TOKENIZERS: dict[str, Any] = {make.__name__: make() for make in (byte_level, byte_fallback, word_piece)}


def ids_of(tokenizer: Any, names: Sequence[str]) -> list[int]:
    ids = tokenizer.convert_tokens_to_ids(list(names))
    assert tokenizer.convert_ids_to_tokens(ids) == list(names)
    return list(ids)


# What is drawn: tokens, of which some come in runs that make whole characters.
_CHARACTERS = {
    "byte_level": [*"abc.ĠĊ", "ab", "aab", "ba", "bc", "Ġa", "ĊĊ", "Ã©", "aÃ ©", "aÃ ©b", "Ã ©b", "ðŁ ĻĤa", "ð Ł Ļ Ĥ"],
    "byte_fallback": [*"abc▁", "ab", "aab", "ba", "▁a", "▁ab", "\n\n", "é", "<0xC3> <0xA9>", "<0x62>"],
    "word_piece": ["a", "b", "##a", "##b", "##ab", "aab", "abc", "."],
}
_STRINGS = [
    "a",
    "ab",
    "aab",
    "aaab",
    "ba",
    "abc",
    "bcab",
    " a",
    "a b",
    " ",
    "é",
    "aé",
    "éb",
    "🙂",
    "🙂a",
    "\n\n",
    "\na",
    "b.",
]
CHARACTERS: dict[str, list[list[int]]] = {
    name: [ids_of(TOKENIZERS[name], group.split(" ")) for group in groups] for name, groups in _CHARACTERS.items()
}


# A token in no stop string: behind it a prompt keeps its leading space when the oracle decodes it.
LEADS = {name: ids_of(TOKENIZERS[name], ["abcdef" if name == "word_piece" else "f"]) for name in TOKENIZERS}


def flat(groups: Sequence[list[int]]) -> list[int]:
    return [token for group in groups for token in group]


@st.composite
def cases(draw: st.DrawFn, names: Sequence[str] = tuple(TOKENIZERS)) -> tuple[str, list[int], list[int], list[str]]:
    """Tokenizer, prompt, new tokens, stop strings: texts of valid UTF-8, though cut anywhere."""
    name = draw(st.sampled_from(list(names)))
    groups = st.lists(st.sampled_from(CHARACTERS[name]), min_size=1, max_size=14)
    prompt, new = flat(draw(groups)), flat(draw(groups))
    if name == "word_piece":
        new = [*ids_of(TOKENIZERS[name], ["b"]), *new]  # a text that begins with "##" keeps that
    # Parts of the text itself, also across the prompt's end, and ends of them: several strings end at one token.
    text, border = decode_text(TOKENIZERS[name], prompt + new), len(decode_text(TOKENIZERS[name], prompt))
    start = draw(st.integers(max(0, border - 4), len(text) - 1))
    part = text[start : start + draw(st.integers(1, 6))]
    some = [string for string in (part, part[1:], part[2:]) if string and "\N{REPLACEMENT CHARACTER}" not in string]
    strings = draw(st.lists(st.sampled_from([*_STRINGS, *some * 6]), min_size=1, max_size=3))
    return name, prompt, new, strings


def feed(row: RowStop, tokens: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], StopReason | None]:
    """Pushes the tokens in blocks of these sizes, over and over; returns what came out, and the reason."""
    out, at, turn = list[int](), 0, 0
    while at < len(tokens):
        size = sizes[turn % len(sizes)]
        part, reason = row.push(tokens[at : at + size])
        out += part
        if reason is not None:
            return out, reason
        at, turn = at + size, turn + 1
    return out, None


SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


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


# Stop strings.


def brute_force(name: str, prompt: list[int], new: list[int], strings: list[str]) -> tuple[int | None, int]:
    """Decodes the whole text again after every token: tokens emitted at the stop, characters left of the new text."""
    tokenizer = TOKENIZERS[name]
    prompt = [*LEADS[name], *prompt]
    in_prompt = len(decode_text(tokenizer, prompt).rstrip("\N{REPLACEMENT CHARACTER}"))
    for count in range(1, len(new) + 1):
        text = decode_text(tokenizer, prompt + new[:count])
        starts = [
            at
            for string in strings
            for at in range(len(text))
            if text.startswith(string, at) and at + len(string) > in_prompt
        ]
        if starts:
            behind = len(text) - min(starts)
            return count, max(0, len(decode_text(tokenizer, new[:count])) - behind)
    return None, 0


@settings(max_examples=250, deadline=None)
@given(cases(), SIZES)
def test_stop_strings_as_by_decoding_everything_again(
    case: tuple[str, list[int], list[int], list[str]], sizes: list[int]
) -> None:
    name, prompt, new, strings = case
    count, characters = brute_force(name, prompt, new, strings)
    row = RowStop(StopRule(frozenset(), 1000, tuple(strings), TOKENIZERS[name]), prompt)
    out, reason = feed(row, new, sizes)
    assert out == row.new_ids == new[:count]
    assert reason == (None if count is None else "string")
    assert row.text_cut == (None if count is None else characters)
    if count is not None:
        text = decode_text(TOKENIZERS[name], out)[: row.text_cut]
        assert not any(string in text for string in strings)


@settings(max_examples=150, deadline=None)
@given(st.data(), SIZES)
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_stop_strings_as_in_transformers(name: str, data: st.DataObject, sizes: list[int]) -> None:
    """Any tokens, broken characters and special tokens among them, against `StopStringCriteria` token by token."""
    tokenizer = TOKENIZERS[name]
    any_ids = st.lists(st.sampled_from([*flat(CHARACTERS[name]), *tokenizer.all_special_ids]), max_size=20)
    prompt, new = data.draw(any_ids), data.draw(any_ids)
    strings = data.draw(st.lists(st.sampled_from([*_STRINGS[:-1], "<|x|>", "a<|", ">a"]), min_size=1, max_size=3))
    if name == "byte_fallback":
        strings = [string for string in strings if "🙂" not in string] or ["a"]  # no token of that toy ends it
    theirs = StopStringCriteria(tokenizer, strings)
    stops = (n + 1 for n in range(len(new)) if bool(theirs(torch.tensor([prompt + new[: n + 1]]), None)))
    count = next(stops, None)
    for rule in (
        StopRule(frozenset(), 1000, tuple(strings), tokenizer),
        StopRule(frozenset(), 1000, criteria=[theirs]),
    ):
        out, reason = feed(RowStop(rule, prompt), new, sizes)
        assert out == new[:count]
        assert (reason is None) == (count is None)


@pytest.mark.parametrize("before", range(6))
@pytest.mark.parametrize("size", range(1, 9))
def test_a_stop_string_at_every_offset_of_a_block(before: int, size: int) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    new = ids_of(tokenizer, [*"c" * before, "a", "aab", *"ccc"])
    row = RowStop(StopRule(frozenset(), 50, ("aab",), tokenizer), ids_of(tokenizer, "c"))
    out, reason = feed(row, new, [size])  # "aab" in "aaab"
    assert (out, reason, row.text_cut) == (new[: before + 2], "string", before + 1)
    assert row.push([1, 2]) == ([], "string")


def test_a_string_that_begins_in_the_prompt() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    rule = StopRule(frozenset(), 50, ("ab",), tokenizer)
    wholly = RowStop(rule, ids_of(tokenizer, ["ab"]))
    assert wholly.push(ids_of(tokenizer, "ccc")) == (ids_of(tokenizer, "ccc"), None)
    partly = RowStop(rule, ids_of(tokenizer, "ca"))
    assert partly.push(ids_of(tokenizer, "bcc")) == (ids_of(tokenizer, "b"), "string")
    assert partly.text_cut == 0
    later = RowStop(StopRule(frozenset(), 50, ("abcc",), tokenizer), ids_of(tokenizer, "ca"))
    assert later.push(ids_of(tokenizer, "bccc")) == (ids_of(tokenizer, "bcc"), "string")
    assert later.text_cut == 0


def test_special_tokens_have_bytes_to_match_and_no_text() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    for string, cut in (("<|x|>", 2), ("a<|x", 1), ("|>b", 2), ("x|>bc", 2), ("bc", 2), ("ab", None)):
        row = RowStop(StopRule(frozenset(), 50, (string,), tokenizer), ids_of(tokenizer, "a"))
        row.push(ids_of(tokenizer, ["c", "a", "<|x|>", "b", "c"]))
        assert row.text_cut == cut


def test_of_strings_completed_at_once_the_one_that_begins_first_is_cut() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    for strings in (("b", "aab", "ab"), ("aab", "b")):
        row = RowStop(StopRule(frozenset(), 50, strings, tokenizer), ids_of(tokenizer, "c"))
        assert row.push(ids_of(tokenizer, ["c", "aab", "c"])) == (ids_of(tokenizer, ["c", "aab"]), "string")
        assert row.text_cut == 1


def test_ids_that_the_tokenizer_lacks_have_no_text() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    a, b = ids_of(tokenizer, "ab")
    row = RowStop(StopRule(frozenset(), 50, ("ab",), tokenizer), [a, 5000])
    assert row.push([5000, 5001, a, 5000, b, a]) == ([5000, 5001, a, 5000, b], "string")
    assert row.text_cut == 0


def test_bytes_of_tokens() -> None:
    """Against the text that tokens make together; alone, parts of characters have none."""
    for name, groups in CHARACTERS.items():
        token_bytes = TokenBytes(TOKENIZERS[name])
        for first in groups:
            for group in groups:
                alone = decode_text(TOKENIZERS[name], first)
                both = decode_text(TOKENIZERS[name], first + group)
                assert b"".join(map(token_bytes, group)).decode() == both[len(alone) :]


def test_stop_strings_as_generate() -> None:
    """The tokens of transformers' own greedy `generate` with `stop_strings` taken from its own text."""
    tokenizer = TOKENIZERS["byte_level"]
    config = copy.deepcopy(CONFIGS["llama"])
    config.vocab_size = len(tokenizer)
    model = tiny_model(config)
    # Only the toy's usual tokens: else most of a random model's text is broken characters.
    allowed = sorted(set(flat(CHARACTERS["byte_level"])))
    suppressed = [token for token in range(len(tokenizer)) if token not in allowed]
    lengths = []
    for seed in range(3):
        prompt = [allowed[i % len(allowed)] for i in prompt_ids(7, seed)]

        def generate(prompt: list[int] = prompt, **options: Any) -> list[int]:
            options |= {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "suppress_tokens": suppressed}
            out = model.generate(torch.tensor([prompt]), max_new_tokens=32, **options)
            return list(out[0, len(prompt) :].tolist())

        plain = generate()
        text, start = decode_text(tokenizer, prompt + plain), len(decode_text(tokenizer, prompt))
        parts = [text[start + at : start + at + n] for at, n in ((-1, 2), (-2, 4), (3, 1), (6, 4), (9, 3), (18, 9))]
        usable = [part for part in parts if "\N{REPLACEMENT CHARACTER}" not in part]
        for strings in ([part] for part in usable) if seed else (usable[-2:], ["zzz"]):
            want = generate(stop_strings=strings, tokenizer=tokenizer)
            lengths.append(len(want))
            for size in (1, 3, 7):
                row = RowStop(StopRule(frozenset(), 32, tuple(strings), tokenizer), prompt)
                assert feed(row, plain, [size]) == (want, "string" if len(want) < 32 else "length")
    assert len(set(lengths)) > 4 and lengths.count(32) == 1, lengths  # the oracle did stop, in many places


# Criteria.


class AfterNew(StoppingCriteria):
    """Stops at the n-th new token and keeps what it was shown."""

    def __init__(self, prompt: int, new: int) -> None:
        self.length, self.seen = prompt + new, list[list[int]]()

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        assert scores is None
        self.seen.append(input_ids[0].tolist())
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("new", range(1, 8))
@pytest.mark.parametrize("size", range(1, 8))
def test_a_criterion_in_the_middle_of_a_block(new: int, size: int) -> None:
    prompt, tokens = [90, 91, 92], [10, 11, 12, 13, 14, 15, 16]
    counting, never = AfterNew(3, new), AfterNew(3, 99)
    row = RowStop(StopRule(frozenset({EOS}), 50, criteria=StoppingCriteriaList([counting, never])), prompt)
    assert feed(row, tokens, [size]) == (tokens[:new], "criteria")
    want = [prompt + tokens[: n + 1] for n in range(new)]
    assert counting.seen == never.seen == want  # asked once per emitted token, and never after the end
    assert row.push([1]) == ([], "criteria")


def test_a_criterion_ends_where_generate_ends() -> None:
    class Even(StoppingCriteria):
        """Three even ids among the last six: of every window that plain decoding shows."""

        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return (input_ids[:, -6:] % 2 == 0).sum(-1) >= 5

    model, prompt = tiny_model("llama"), prompt_ids(6)

    def generate(**options: Any) -> list[int]:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0, **options)
        return list(out[0, 6:].tolist())

    plain, want = generate(), generate(stopping_criteria=StoppingCriteriaList([Even()]))
    assert 1 < len(want) < len(plain) == 40
    for size in (1, 2, 5, 40):
        row = RowStop(StopRule(frozenset(), 40, criteria=[Even()]), prompt)
        assert feed(row, plain, [size]) == (want, "criteria")


def test_criteria_of_transformers_and_plain_answers() -> None:
    class Plain(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:
            return bool(input_ids[0, -1] == 13)

    prompt, block = [1, 2], [10, 11, 12, 13, 14]
    for criterion, want in (
        (MaxLengthCriteria(4), block[:2]),
        (EosTokenCriteria([12, 99]), block[:3]),
        (Plain(), block[:4]),
    ):
        assert RowStop(StopRule(frozenset(), 50, criteria=[criterion]), prompt).push(block) == (want, "criteria")


# All rules together.


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(ids_of(TOKENIZERS["byte_level"], [*"abc", "ab", "<|x|>"])), min_size=1, max_size=12),
    st.integers(1, 13),
    st.integers(1, 13),
    SIZES,
)
def test_the_earliest_rule_wins(new: list[int], limit: int, counted: int, sizes: list[int]) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    (eos,) = ids_of(tokenizer, ["<|x|>"])
    prompt = ids_of(tokenizer, "ca")
    first: dict[str, int | None] = {
        "eos": new.index(eos) + 1 if eos in new else None,
        "string": brute_force("byte_level", prompt, new, ["ab", "cc"])[0] if eos not in new else None,
        "criteria": counted,
        "length": limit,
    }
    if eos in new:  # decoding would join what the special token parts
        first["string"] = brute_force("byte_level", prompt, new[: new.index(eos)], ["ab", "cc"])[0]
    at = {name: count for name, count in first.items() if count is not None and count <= len(new)}
    end = min(at.values(), default=None)
    reason = None if end is None else next(name for name in first if at.get(name) == end)
    rule = StopRule(frozenset({eos}), limit, ("ab", "cc"), tokenizer, [AfterNew(2, counted)])
    row = RowStop(rule, prompt)
    assert feed(row, new, sizes) == (new[:end], reason)
    assert row.reason == reason
    assert (row.text_cut is not None) == (end is not None and end == first["string"])


@pytest.mark.parametrize("limit", range(1, 8))
@pytest.mark.parametrize("size", range(1, 8))
def test_without_strings_and_criteria_a_row_is_cut_as_by_the_rule(limit: int, size: int) -> None:
    for stream in ([10, 11, 12, EOS, 14, 15, 16], [10, 11, 12, 13, 14, 15, 16]):
        rule, out = StopRule(frozenset({EOS}), limit), list[int]()
        row = RowStop(rule, [1])
        for start in range(0, 7, size):
            want = rule.cut(stream[start : start + size], len(out))
            assert row.push(stream[start : start + size]) == want
            out += want[0]
            assert row.new_ids == out and row.reason == want[1]
            if row.reason:
                break
        assert row.text_cut is None
        assert not hasattr(row, "_ids_1S")  # no tensor for nothing


def test_a_row_begins_open() -> None:
    row = RowStop(StopRule(frozenset(), 2), [])
    assert row.push([]) == ([], None)
    assert row.push([5, 6, 7]) == ([5, 6], "length")
    assert row.push([8]) == ([], "length")


def test_rules_with_strings_are_checked() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match="needs the tokenizer; set tokenizer"):
        StopRule(frozenset(), 5, ("ab",))
    with pytest.raises(ValueError, match="expected no empty string"):
        StopRule(frozenset(), 5, ("ab", ""), tokenizer)
    with pytest.raises(ValueError, match="no UTF-8 form"):
        StopRule(frozenset(), 5, ("\udc80",), tokenizer)
    one = StopRule(frozenset(), 5, "ab", tokenizer)  # type: ignore[arg-type]
    assert one.stop_strings == ("ab",) and one == StopRule([], 5, ["ab"], tokenizer)  # type: ignore[arg-type]
    assert hash(one) == hash(StopRule(frozenset(), 5, ("ab",), tiny_tokenizer()))
    for rule in (one, StopRule(frozenset(), 5, criteria=[MaxLengthCriteria(3)])):
        with pytest.raises(ValueError, match="use RowStop"):
            rule.cut([1], 0)

"""Which tokens are supervised: by hand, and for the chat templates of three families."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.chat_templates import CHATML, LLAMA3, MARKED, byte_tokenizer, ids_of, talk
from train.chat_mask import Dropped, describe_row, encode_conversation, encode_each, end_of_turn_ids
from train.conversations import Conversation, DropCounts, TokenRow

# Gemma's turns (answers by "model", no system role), answers marked, the newline inside the mark
GEMMA_MARKED = (
    "<bos>{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if m['role'] == 'assistant' %}<start_of_turn>model\n"
    "{% generation %}{{ m['content'] }}<end_of_turn>\n{% endgeneration %}"
    "{% else %}<start_of_turn>user\n{{ m['content'] }}<end_of_turn>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "gemma": (GEMMA_MARKED, "<end_of_turn>"),
}


def encode(
    tokenizer: PreTrainedTokenizerFast,
    conversation: Conversation,
    eos: str,
    limit: int = 10_000,
    **kwargs: Any,
) -> TokenRow:
    row = encode_conversation(tokenizer, conversation, limit, eos_ids=ids_of(tokenizer, eos), **kwargs)
    assert isinstance(row, TokenRow), row
    return row


def encode_all(
    tokenizer: PreTrainedTokenizerFast,
    conversations: list[Conversation],
    limit: int,
    ends: Collection[int],
    data_name: str = "the data",
) -> tuple[list[TokenRow], DropCounts]:
    counts = DropCounts()
    return list(encode_each(tokenizer, conversations, limit, ends, counts, data_name=data_name)), counts


def supervised_texts(tokenizer: PreTrainedTokenizerFast, row: TokenRow) -> list[str]:
    return [str(tokenizer.decode(list(row.input_ids[a:b]))) for a, b in row.spans]


def test_ten_tokens_by_hand() -> None:
    """Prompt at 0-4, answer at 5-9 where 9 is the end of turn: exactly 5-9 are the assistant's."""
    words = ["<end>", "user:", "assistant:", "how", "are", "you", "very", "well", "thank"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} "
        "{% if m['role'] == 'assistant' %}<end> {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    row = encode_conversation(tokenizer, talk("how are you", "very well thank you"), 100, eos_ids={0})
    #                                user: how are you assistant: | very well thank you <end>
    assert row == TokenRow("row", (1, 3, 4, 5, 2, 6, 7, 8, 5, 0), ((5, 10),), "test", truncated=False)
    assert row.loss_mask == [False] * 5 + [True] * 5


@pytest.mark.parametrize("name", TEMPLATES)
def test_single_and_multi_turn(name: str) -> None:
    template, end = TEMPLATES[name]
    tokenizer = byte_tokenizer(template)
    assert supervised_texts(tokenizer, encode(tokenizer, talk("hi", "hello"), end)) == [f"hello{end}"]
    row = encode(tokenizer, talk("hi", "hello", "more?", "no"), end)
    assert supervised_texts(tokenizer, row) == [f"hello{end}", f"no{end}"]
    rendered = tokenizer.apply_chat_template(list(talk("hi", "hello", "more?", "no").messages), tokenize=False)
    assert tokenizer.decode(list(row.input_ids)) == rendered
    assert not row.truncated


def test_written_out_positions() -> None:
    """Byte positions by hand, one template each."""
    chatml = byte_tokenizer(CHATML)
    # <|im_start|> user\n hi <|im_end|> \n = 1+5+2+1+1; <|im_start|> assistant\n = 1+10; then ok <|im_end|> \n
    row = encode(chatml, talk("hi", "ok"), "<|im_end|>")
    assert row.spans == ((21, 24),) and len(row.input_ids) == 25
    llama = byte_tokenizer(LLAMA3)
    # begin; header user end-of-header \n\n hi <|eot_id|> = 1+4+1+2+2+1; header = 1+9+1+2; ok <|eot_id|>
    row = encode(llama, talk("hi", "ok"), "<|eot_id|>")
    assert row.spans == ((25, 28),) and len(row.input_ids) == 28
    gemma = byte_tokenizer(GEMMA_MARKED)
    # <bos>; start user\n hi end \n = 1+5+2+1+1; start model\n = 1+6; ok end and \n
    row = encode(gemma, talk("hi", "ok"), "<end_of_turn>")
    assert row.spans == ((18, 21),) and len(row.input_ids) == 22


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_system_prompt_is_not_supervised(name: str) -> None:
    template, end = TEMPLATES[name]
    tokenizer = byte_tokenizer(template)
    row = encode(tokenizer, talk("hi", "hello", system="be kind"), end)
    assert supervised_texts(tokenizer, row) == [f"hello{end}"]
    assert "be kind" in describe_row(tokenizer, row).split("⟦")[0]


def test_marked_and_unmarked_templates_agree() -> None:
    bare = GEMMA_MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    conversation = talk("hi", "hello", "and", "so on")
    one = encode(byte_tokenizer(GEMMA_MARKED), conversation, "<end_of_turn>")
    assert encode(byte_tokenizer(bare), conversation, "<end_of_turn>") == one
    empty = talk("hi", "", "and", "so on")
    assert encode(byte_tokenizer(bare), empty, "<end_of_turn>") == encode(
        byte_tokenizer(GEMMA_MARKED), empty, "<end_of_turn>"
    )
    # a mark that leaves the end of turn out, or has the generation prompt inside, gives the same
    late = GEMMA_MARKED.replace("<end_of_turn>\n{% endgeneration %}", "{% endgeneration %}<end_of_turn>\n")
    early = GEMMA_MARKED.replace("<start_of_turn>model\n{% generation %}", "{% generation %}<start_of_turn>model\n")
    assert late != GEMMA_MARKED != early
    assert encode(byte_tokenizer(late), conversation, "<end_of_turn>") == one
    assert encode(byte_tokenizer(early), conversation, "<end_of_turn>") == one


@pytest.mark.parametrize("marked", [False, True])
def test_what_the_generation_prompt_supplies_is_not_supervised(marked: bool) -> None:
    """An empty thought that the prompt already holds, inside the template's own mark or not."""
    thought = "<|im_start|>assistant\n<think></think>"
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}"
        f"{begin}{thought}{{{{ m['content'] }}}}<|im_end|>\n{end}"
        "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{thought}{{% endif %}}"
    )
    tokenizer = byte_tokenizer(template)
    row = encode(tokenizer, talk("hi", "hello", "more", "no"), "<|im_end|>")
    assert supervised_texts(tokenizer, row) == ["hello<|im_end|>", "no<|im_end|>"]


def test_template_arguments_reach_every_rendering() -> None:
    template = CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n{{ extra }}{% endif")
    tokenizer = byte_tokenizer(template)
    assert encode(tokenizer, talk("hi", "hello"), "<|im_end|>", extra="")
    row = encode(tokenizer, talk("hi", "yes, hello"), "<|im_end|>", extra="yes, ")
    assert supervised_texts(tokenizer, row) == ["hello<|im_end|>"]


def test_without_an_end_token_the_whole_turn_is_kept() -> None:
    tokenizer = byte_tokenizer(CHATML)
    row = encode(tokenizer, talk("hi", "hello"), "<eos>")
    assert supervised_texts(tokenizer, row) == ["hello<|im_end|>\n"]


def test_messages_after_the_last_answer_are_left_out() -> None:
    tokenizer = byte_tokenizer(CHATML)
    assert encode(tokenizer, talk("hi", "hello", "bye"), "<|im_end|>") == encode(
        tokenizer, talk("hi", "hello"), "<|im_end|>"
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_truncation_keeps_whole_answers_where_it_can(name: str) -> None:
    template, end = TEMPLATES[name]
    tokenizer = byte_tokenizer(template)
    conversation = talk("hi", "hello", "more", "no", "and?", "\U0001f642")
    whole = encode(tokenizer, conversation, end)
    first, second, third = whole.spans
    for limit in range(1, len(whole.input_ids) + 2):
        row = encode_conversation(tokenizer, conversation, limit, eos_ids=ids_of(tokenizer, end))
        if limit <= first[0]:
            assert row == Dropped("prompt longer than data.max_length")
            continue
        assert isinstance(row, TokenRow)
        if limit < first[1]:
            assert (row.spans, len(row.input_ids)) == (((first[0], limit),), limit)
        elif limit < second[1]:
            assert row.spans == (first,)
        elif limit < third[1]:
            assert row.spans == (first, second)
        else:
            assert row.spans == whole.spans
        assert row.input_ids == whole.input_ids[: len(row.input_ids)] and len(row.input_ids) <= limit
        assert len(row.input_ids) in (limit, len(whole.input_ids), row.spans[-1][1])
        assert row.truncated == (limit < third[1]) == ("[cut" in describe_row(tokenizer, row))


def test_the_last_answer_alone() -> None:
    tokenizer = byte_tokenizer(CHATML)
    conversation = talk("hi", "hello", "more", "no", "bye")
    whole = encode(tokenizer, conversation, "<|im_end|>")
    row = encode(tokenizer, conversation, "<|im_end|>", supervise="last")
    assert (row.input_ids, row.spans) == (whole.input_ids, whole.spans[1:])
    start, stop = row.spans[0]
    for limit in (start + 1, stop - 1):  # no earlier answer takes its place
        assert encode(tokenizer, conversation, "<|im_end|>", limit, supervise="last").spans == ((start, limit),)
    cut = encode_conversation(tokenizer, conversation, start, supervise="last")
    assert cut == Dropped("prompt longer than data.max_length")


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokenizers_own_length_is_not_trusted(name: str) -> None:
    template, end = TEMPLATES[name]
    tokenizer, conversation = byte_tokenizer(template), talk("hi", "hello " * 30, "more", "no")
    whole = encode(tokenizer, conversation, end)
    tokenizer.model_max_length = 8
    tokenizer.backend_tokenizer.enable_truncation(8)  # as some tokenizer.json files are saved
    assert encode(tokenizer, conversation, end) == whole and len(whole.input_ids) > 180
    assert len(encode(tokenizer, conversation, end, 150).input_ids) == 150


def test_rows_without_supervised_tokens_are_counted() -> None:
    tokenizer = byte_tokenizer(CHATML)
    rows, counts = encode_all(
        tokenizer,
        [talk("hi", "hello"), talk("only a question"), talk("long " * 20, "cut off"), talk("hi", "yes")],
        60,
        ids_of(tokenizer, "<|im_end|>"),
    )
    assert [supervised_texts(tokenizer, row) for row in rows] == [["hello<|im_end|>"], ["yes<|im_end|>"]]
    reasons = {"no supervised token": 1, "prompt longer than data.max_length": 1}
    assert (counts.rows_in, counts.rows_out, counts.reasons) == (4, 2, reasons)


def test_nothing_to_train_on_is_an_error() -> None:
    tokenizer = byte_tokenizer(CHATML)
    with pytest.raises(ValueError, match=r"in my\.jsonl, .*: 0 of 2 rows kept, 2 dropped \(no supervised token\)"):
        encode_all(tokenizer, [talk("a"), talk("b")], 60, set(), data_name="my.jsonl")
    with pytest.raises(ValueError, match="0 of 0 rows kept"):
        encode_all(tokenizer, [], 60, set())
    silent = byte_tokenizer(CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}")
    with pytest.raises(ValueError, match="no supervised token"):  # a mark that marks nothing
        encode_all(silent, [talk("a", "b")], 60, set())
    with pytest.raises(ValueError, match=r"3 of 1\d\d\d tokens are supervised .*expected 1 % or more"):
        encode_all(tokenizer, [talk("x" * 1000, "ok")], 2000, ids_of(tokenizer, "<|im_end|>"))


def test_rows_that_the_template_refuses_are_dropped() -> None:
    tokenizer = byte_tokenizer(GEMMA_MARKED)
    rows, counts = encode_all(tokenizer, [talk("a", "b", system="s"), talk("a", "b")], 60, set())
    assert len(rows) == 1
    assert counts.reasons == {"the chat template refuses the row: no system role": 1}


def test_messages_that_the_template_cannot_render_are_dropped() -> None:
    """Missing contents and contents of another type: errors of Jinja, and of Python inside it."""
    tokenizer = byte_tokenizer(CHATML)
    for content in (None, [{"type": "text"}]):
        messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": content})
        row = encode_conversation(tokenizer, Conversation("x", "test", messages), 60)
        assert isinstance(row, Dropped) and row.reason.startswith("the chat template refuses the row: ")


def test_a_broken_template_is_an_error() -> None:
    tokenizer = byte_tokenizer(CHATML.replace("{% endfor %}", ""))
    with pytest.raises(ValueError, match=r"is not valid Jinja .*change target\.path"):
        encode_conversation(tokenizer, talk("a", "b"), 60)


def test_tools_of_the_conversation_reach_the_template() -> None:
    tokenizer = byte_tokenizer("{{ tools | tojson if tools }}" + CHATML)
    tool = {"type": "function", "function": {"name": "f"}}
    bare = encode(tokenizer, talk("a", "b"), "<|im_end|>")
    row = encode(tokenizer, talk("a", "b"), "<|im_end|>", tools=[tool])
    assert describe_row(tokenizer, row) == json.dumps([tool]) + describe_row(tokenizer, bare)


UNSTABLE = {
    # the last answer gets a thought that the generation prompt lacks before it
    "the prompt changes": CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{{ '#' if loop.last and m.role == 'assistant' }}",
    ),
    # answers lose their first letter once a later turn is there
    "the turn changes": CHATML.replace("m.content", "(m.content if loop.last or m.role == 'user' else m.content[1:])"),
}


@pytest.mark.parametrize("what", UNSTABLE)
def test_unstable_templates_are_refused_by_name(what: str) -> None:
    tokenizer = byte_tokenizer(UNSTABLE[what])
    with pytest.raises(ValueError, match=rf"not prefix-stable: row 'row', message 1: {what}"):
        encode_conversation(tokenizer, talk("hi", "hello", "more", "no"), 1000)


def test_answers_that_merge_with_the_prompt_are_tokenised_apart() -> None:
    """As decoding would see them: the prompt's ids, then the answer's."""
    plain, merging = byte_tokenizer(CHATML), byte_tokenizer(CHATML, merges=(("Ċ", "Ċ"),))  # two newlines, one token
    conversation = talk("hi\n\n", "\nhello", "and", "\n\n", "so", "on")
    row, bare = (encode(tokenizer, conversation, "<|im_end|>") for tokenizer in (merging, plain))
    assert supervised_texts(merging, row) == ["\nhello<|im_end|>", "\n\n<|im_end|>", "on<|im_end|>"]
    assert describe_row(merging, row) == describe_row(plain, bare)
    (newline,), (pair,) = ids_of(merging, "Ċ"), ids_of(merging, "ĊĊ")
    assert row.input_ids.count(pair) == 2 and row.input_ids[slice(*row.spans[1])][0] == pair
    assert row.input_ids[row.spans[0][0] - 1 : row.spans[0][0] + 1] == (newline, newline)
    last = encode(merging, conversation, "<|im_end|>", supervise="last")
    assert last.input_ids == tuple(merging(describe_row(plain, bare).translate({0x27E6: "", 0x27E7: ""}))["input_ids"])


def test_answers_that_merge_and_cannot_be_told_apart_are_dropped() -> None:
    dropped = Dropped("tokens merge across the border of an answer")
    for template, ends in ((MARKED, {"<|im_end|>"}), (CHATML, set())):  # the library's marks; no end of turn
        tokenizer = byte_tokenizer(template, merges=(("Ċ", "Ċ"),))
        ids = ids_of(tokenizer, *ends)
        assert encode_conversation(tokenizer, talk("hi", "\nhello"), 60, eos_ids=ids) == dropped
        assert isinstance(encode_conversation(tokenizer, talk("hi", "hello\n\n"), 60, eos_ids=ids), TokenRow)
    spaced = byte_tokenizer(CHATML, merges=(("Ċ", "Ċ"),))
    spaced.backend_tokenizer.normalizer = normalizers.Prepend("_")
    assert encode_conversation(spaced, talk("hi", "\nhello"), 60, eos_ids=ids_of(spaced, "<|im_end|>")) == dropped


def test_tokenizer_without_template() -> None:
    with pytest.raises(ValueError, match=r"has no chat template.*change target\.path"):
        encode_conversation(byte_tokenizer(None), talk("hi", "hello"), 60)


def test_assistant_first_is_dropped() -> None:
    first = Conversation("x", "test", ({"role": "assistant", "content": "hello"},))
    assert encode_conversation(byte_tokenizer(CHATML), first, 60) == Dropped("assistant first")


@pytest.mark.parametrize("name", TEMPLATES)
def test_end_of_turn_ids(name: str) -> None:
    template, end = TEMPLATES[name]
    tokenizer = byte_tokenizer(template)
    (eos,) = ids_of(tokenizer, "<eos>")
    assert end_of_turn_ids(tokenizer, eos) == ids_of(tokenizer, "<eos>", end)
    assert end_of_turn_ids(tokenizer, [eos, 0]) == ids_of(tokenizer, "<eos>", end) | {0}
    assert end_of_turn_ids(tokenizer, None) == ids_of(tokenizer, end)


def test_describe_row() -> None:
    tokenizer = byte_tokenizer(LLAMA3)
    assert describe_row(tokenizer, encode(tokenizer, talk("hi", "né"), "<|eot_id|>")) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦né<|eot_id|>⟧"
    )

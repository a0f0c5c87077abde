"""Which tokens are supervised: by hand, and for the chat templates of three families."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from train.chat_mask import Dropped, describe_row, encode_all, encode_conversation, end_of_turn_ids
from train.conversations import Conversation, TokenRow

# The end-of-turn token and the newline after it are outside what the first two supply before an answer.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin|>{% for m in messages %}<|header|>{{ m['role'] }}<|/header|>\n\n{{ m['content'] }}<|eot|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
# Gemma's turns (answers by "model", no system role), answers marked, the newline inside the mark
GEMMA_MARKED = (
    "<bos>{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if m['role'] == 'assistant' %}<turn>model\n"
    "{% generation %}{{ m['content'] }}<end_of_turn>\n{% endgeneration %}"
    "{% else %}<turn>user\n{{ m['content'] }}<end_of_turn>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot|>"),
    "gemma": (GEMMA_MARKED, "<end_of_turn>"),
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|/header|>", "<|eot|>"]
SPECIAL += ["<bos>", "<turn>", "<end_of_turn>", "<eos>"]


def wrap(inner: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = template
    return tokenizer


def byte_tokenizer(template: str | None, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    """One token a byte and the special tokens above: text and ids correspond exactly."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    inner = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return wrap(inner, template)


def ids_of(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> set[int]:
    vocabulary = tokenizer.get_vocab()
    return {vocabulary[token] for token in tokens}


def talk(*texts: str, system: str | None = None) -> Conversation:
    """User and assistant in turn, user first."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return Conversation("row", "test", tuple(([{"role": "system", "content": system}] if system else []) + turns))


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


def supervised_texts(tokenizer: PreTrainedTokenizerFast, row: TokenRow) -> list[str]:
    return [str(tokenizer.decode(list(row.input_ids[a:b]))) for a, b in row.spans]


def test_ten_tokens_by_hand() -> None:
    """Prompt at 0-4, answer at 5-9 where 9 is the end of turn: exactly 5-9 are the assistant's."""
    words = ["<end>", "user:", "assistant:", "how", "are", "you", "very", "well", "thank"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = wrap(
        inner,
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} "
        "{% if m['role'] == 'assistant' %}<end> {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
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
    row = encode(tokenizer, talk("hi", "hello", "more?", "no\n"), end)
    assert supervised_texts(tokenizer, row) == [f"hello{end}", f"no\n{end}"]
    rendered = tokenizer.apply_chat_template(list(talk("hi", "hello", "more?", "no\n").messages), tokenize=False)
    assert tokenizer.decode(list(row.input_ids)) == rendered
    assert not row.truncated


def test_written_out_positions() -> None:
    """Byte positions by hand, one template each."""
    chatml = byte_tokenizer(CHATML)
    # <|im_start|> user\n hi <|im_end|> \n = 1+5+2+1+1; <|im_start|> assistant\n = 1+10; then ok <|im_end|> \n
    row = encode(chatml, talk("hi", "ok"), "<|im_end|>")
    assert row.spans == ((21, 24),) and len(row.input_ids) == 25
    llama = byte_tokenizer(LLAMA3)
    # <|begin|>; <|header|> user <|/header|> \n\n hi <|eot|> = 1+4+1+2+2+1; header = 1+9+1+2; ok <|eot|>
    row = encode(llama, talk("hi", "ok"), "<|eot|>")
    assert row.spans == ((25, 28),) and len(row.input_ids) == 28
    gemma = byte_tokenizer(GEMMA_MARKED)
    # <bos>; <turn> user\n hi <end_of_turn> \n = 1+5+2+1+1; <turn> model\n = 1+6; ok <end_of_turn> and \n
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
    # a mark that leaves the end of turn out, or has the generation prompt inside, gives the same
    late = GEMMA_MARKED.replace("<end_of_turn>\n{% endgeneration %}", "{% endgeneration %}<end_of_turn>\n")
    early = GEMMA_MARKED.replace("<turn>model\n{% generation %}", "{% generation %}<turn>model\n")
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
def test_truncation_cuts_ids_and_spans_together(name: str) -> None:
    template, end = TEMPLATES[name]
    tokenizer = byte_tokenizer(template)
    conversation = talk("hi", "hello", "more", "no")
    whole = encode(tokenizer, conversation, end)
    for limit in range(1, len(whole.input_ids) + 2):
        row = encode_conversation(tokenizer, conversation, limit, eos_ids=ids_of(tokenizer, end))
        if limit <= whole.spans[0][0]:
            assert row == Dropped("no supervised token")
            continue
        assert isinstance(row, TokenRow)
        assert row.input_ids == whole.input_ids[:limit]
        assert row.loss_mask == whole.loss_mask[:limit]
        assert row.truncated == (limit < len(whole.input_ids))
        assert row.truncated == ("[cut" in describe_row(tokenizer, row))


def test_rows_without_supervised_tokens_are_counted() -> None:
    tokenizer = byte_tokenizer(CHATML)
    rows, counts = encode_all(
        tokenizer,
        [talk("hi", "hello"), talk("only a question"), talk("long " * 20, "cut off"), talk("hi", "yes")],
        60,
        ids_of(tokenizer, "<|im_end|>"),
    )
    assert [supervised_texts(tokenizer, row) for row in rows] == [["hello<|im_end|>"], ["yes<|im_end|>"]]
    assert (counts.rows_in, counts.rows_out, counts.reasons) == (4, 2, {"no supervised token": 2})


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


UNSTABLE = {
    # the last answer gets a thought that the generation prompt lacks before it
    "the prompt changes": CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{{ '#' if loop.last and m['role'] == 'assistant' }}",
    ),
    # answers lose their first letter once a later turn is there
    "the turn changes": CHATML.replace(
        "m['content'] }}", "m['content'] if loop.last or m['role'] == 'user' else m['content'][1:] }}"
    ),
}


@pytest.mark.parametrize("what", UNSTABLE)
def test_unstable_templates_are_refused_by_name(what: str) -> None:
    tokenizer = byte_tokenizer(UNSTABLE[what])
    with pytest.raises(ValueError, match=rf"not prefix-stable: row 'row', message 1: {what}"):
        encode_conversation(tokenizer, talk("hi", "hello", "more", "no"), 1000)


def test_answers_that_merge_with_the_prompt_are_dropped() -> None:
    tokenizer = byte_tokenizer(CHATML, merges=(("Ċ", "Ċ"),))  # two newlines make one token
    rows, counts = encode_all(tokenizer, [talk("hi", "\nhello"), talk("hi", "hello\n\n")], 60, set())
    assert len(rows) == 1 and counts.reasons == {"tokens merge across the border of an answer": 1}


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
    assert describe_row(tokenizer, encode(tokenizer, talk("hi", "né"), "<|eot|>")) == (
        "<|begin|><|header|>user<|/header|>\n\nhi<|eot|><|header|>assistant<|/header|>\n\n⟦né<|eot|>⟧"
    )


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), min_size=1, max_size=12)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_masked_text_is_the_assistants(name: str, turns: list[tuple[str, str]]) -> None:
    template, end = TEMPLATES[name]
    tokenizer = byte_tokenizer(template)
    row = encode(tokenizer, talk(*(text for pair in turns for text in pair)), end)
    assert supervised_texts(tokenizer, row) == [answer + end for _, answer in turns]

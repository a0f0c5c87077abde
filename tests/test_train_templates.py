"""Ids and masks for the chat templates of model families: written out by hand, and for random conversations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from tests.chat_templates import SPECIAL, TEMPLATES, bpe_tokenizer, byte_tokenizer, expected_ids, ids_of, talk
from train.chat_mask import MERGED, Dropped, describe_row, encode_conversation, end_of_turn_ids
from train.conversations import Conversation, TokenRow

NO_THOUGHT: dict[str, Any] = {"enable_thinking": False}


def chat(*messages: Mapping[str, Any]) -> Conversation:
    return Conversation("row", "test", tuple(dict(m) for m in messages))


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(city: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


ODD = talk(" a\tb ", "\u00e9 \U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467", "\n\nc", "  two\n\n  lines  ")
TWICE = talk("hi", "yo", "and?", "no")
EMPTY = talk("hi", "", "and?", "no")
CALLS = chat(user("Rome?"), assistant("", tool_calls=[call("Rome")]), tool("12"), tool("dry"), assistant("Mild."))
THOUGHTS = chat(
    user("hi"), assistant("yo", reasoning_content="greet"), user("and?"), assistant("no", reasoning_content="2")
)
THINKING_CALLS = chat(
    user("Rome?"),
    assistant("Let me see.", reasoning_content="look", tool_calls=[call("Rome"), call("Oslo")]),
    tool("12"),
    assistant("Mild.", reasoning_content="say"),
)

# template, conversation, options, the rendering with what is supervised between ⟦ and ⟧
GOLDEN: list[tuple[str, Conversation, dict[str, Any], str]] = [
    (
        "chatml",
        talk("hi", "yo", "and?", "no", system="S"),
        {},
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yo<|im_end|>⟧\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n",
    ),
    (
        "chatml",
        TWICE,
        {"supervise": "last"},
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n",
    ),
    (
        "chatml",
        EMPTY,
        {},
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>⟧\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n",
    ),
    (
        "smollm2",
        ODD,
        {},
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n a\tb <|im_end|>\n<|im_start|>assistant\n"
        "⟦\u00e9 \U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467<|im_end|>⟧\n"
        "<|im_start|>user\n\n\nc<|im_end|>\n<|im_start|>assistant\n⟦  two\n\n  lines  <|im_end|>⟧\n",
    ),
    (
        "llama3",
        ODD,
        {},
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\na\tb<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        "⟦\u00e9 \U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦two\n\n  lines<|eot_id|>⟧",
    ),
    (
        "llama31",
        CALLS,
        {"date_string": "1 May 2025"},
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 1 May 2025\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nRome?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        '⟦{"name": "weather", "parameters": {"city": "Rome"}}<|eot_id|>⟧'
        "<|start_header_id|>ipython<|end_header_id|>\n\n12<|eot_id|>"
        "<|start_header_id|>ipython<|end_header_id|>\n\ndry<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Mild.<|eot_id|>⟧",
    ),
    (
        "qwen25",
        CALLS,
        {},
        "<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\nRome?<|im_end|>\n<|im_start|>assistant\n"
        '⟦<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\n12\n</tool_response>\n<tool_response>\ndry\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦Mild.<|im_end|>⟧\n",
    ),
    (
        "qwen3",
        chat(user("hi"), assistant("yo", reasoning_content="greet")),
        {},
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<think>\ngreet\n</think>\n\nyo<|im_end|>⟧\n",
    ),
    (
        "qwen3",
        chat(user("hi"), assistant("<think>\ngreet\n</think>\n\nyo")),  # the same answer as one text
        {},
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<think>\ngreet\n</think>\n\nyo<|im_end|>⟧\n",
    ),
    (
        "qwen3",
        talk("hi", "yo"),
        NO_THOUGHT,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦yo<|im_end|>⟧\n",
    ),
    (
        "qwen3",
        THOUGHTS,
        {"supervise": "last"},
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n⟦<think>\n2\n</think>\n\nno<|im_end|>⟧\n",
    ),
    (
        "qwen3",
        TWICE,
        {"supervise": "last", **NO_THOUGHT},
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦no<|im_end|>⟧\n",
    ),
    (
        "qwen3",
        THINKING_CALLS,
        {},
        "<|im_start|>user\nRome?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nlook\n</think>\n\nLet me see.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nsay\n</think>\n\nMild.<|im_end|>⟧\n",
    ),
    (
        "gemma",
        ODD,
        {},
        "<bos><start_of_turn>user\na\tb<end_of_turn>\n<start_of_turn>model\n"
        "⟦\u00e9 \U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467<end_of_turn>⟧\n"
        "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n⟦two\n\n  lines<end_of_turn>⟧\n",
    ),
    (
        "mistral",
        EMPTY,
        {},
        "<s>[INST] hi [/INST]⟦</s>⟧[INST] and? [/INST]⟦no</s>⟧",
    ),
    (
        "mistral_v3",
        TWICE,
        {},
        "<s>[INST]hi[/INST]⟦ yo</s>⟧[INST]and?[/INST]⟦ no</s>⟧",
    ),
    (
        "phi3",
        talk("hi", "yo", "and?", "no", system="S"),
        {},
        "<|system|>\nS<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\n⟦yo<|end|>⟧\n"
        "<|user|>\nand?<|end|>\n<|assistant|>\n⟦no<|end|>⟧\n<|endoftext|>",
    ),
    (
        "phi4",
        ODD,
        {},
        "<|im_start|>user<|im_sep|> a\tb <|im_end|><|im_start|>assistant<|im_sep|>"
        "⟦\u00e9 \U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467<|im_end|>⟧"
        "<|im_start|>user<|im_sep|>\n\nc<|im_end|><|im_start|>assistant<|im_sep|>⟦  two\n\n  lines  <|im_end|>⟧",
    ),
    (
        "zephyr",
        talk("hi", "yo", "and?", "no", system="S"),
        {},
        "<|system|>\nS</s>\n<|user|>\nhi</s>\n<|assistant|>\n⟦yo</s>⟧\n<|user|>\nand?</s>\n<|assistant|>\n⟦no</s>⟧\n",
    ),
    (
        "marked",
        EMPTY,
        {},
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>⟧\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n",
    ),
    (
        "marked",
        ODD,
        {"supervise": "last"},
        "<|im_start|>user\n a\tb <|im_end|>\n<|im_start|>assistant\n"
        "\u00e9 \U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467<|im_end|>\n"
        "<|im_start|>user\n\n\nc<|im_end|>\n<|im_start|>assistant\n⟦  two\n\n  lines  <|im_end|>⟧\n",
    ),
]


@pytest.mark.parametrize(("name", "conversation", "options", "golden"), GOLDEN)
def test_golden(name: str, conversation: Conversation, options: dict[str, Any], golden: str) -> None:
    template, end = TEMPLATES[name]
    tokenizer = byte_tokenizer(template)
    row = encode_conversation(tokenizer, conversation, 10_000, eos_ids=ids_of(tokenizer, end), **options)
    assert isinstance(row, TokenRow), row
    ids: list[int] = []
    mask: list[bool] = []
    for part in re.findall(r"⟦.*?⟧|[^⟦]+", golden, re.S):
        more = expected_ids(part.strip("⟦⟧"))
        ids += more
        mask += [part.startswith("⟦")] * len(more)
    assert list(row.input_ids) == ids
    assert row.loss_mask == mask
    assert not row.truncated and describe_row(tokenizer, row) == golden


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_turn_is_found_in_the_template(name: str) -> None:
    template, end = TEMPLATES[name]
    tokenizer = byte_tokenizer(template)
    assert end_of_turn_ids(tokenizer, None) == ids_of(tokenizer, end)


UNSTABLE = [
    ("qwen3", THOUGHTS, {}, "message 1: the turn changes once a later turn is there.*set data.supervise: last"),
    ("qwen3", TWICE, NO_THOUGHT, "message 1: the turn changes once a later turn is there"),
    ("qwen3", CALLS, {}, "message 1: the turn changes"),  # a call without a thought gets an empty one while it is last
    ("mistral_v3", talk("hi", "yo", system="S"), {}, "message 2: the prompt changes once the answer is there"),
    ("deepseek", talk("hi", "yo"), {"supervise": "last"}, "message 1: the prompt changes"),
]


@pytest.mark.parametrize(("name", "conversation", "options", "what"), UNSTABLE)
def test_unstable_prefixes_are_refused(
    name: str, conversation: Conversation, options: dict[str, Any], what: str
) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[name][0])
    with pytest.raises(ValueError, match=f"not prefix-stable: row 'row', {what}"):
        encode_conversation(tokenizer, conversation, 10_000, eos_ids=ids_of(tokenizer, TEMPLATES[name][1]), **options)


def test_marks_on_an_unstable_template() -> None:
    """Qwen3's with marks around whole turns: the earlier answer stays supervised as it is rendered, the empty thought
    and what else the prompt supplies do not."""
    marked = TEMPLATES["qwen3"][0].replace("{%- set content =", "{% generation %}{%- set content =", 1)
    marked = marked.replace("{{- '<|im_end|>\n' }}", "{{- '<|im_end|>\n' }}{% endgeneration %}", 1)
    tokenizer = byte_tokenizer(marked)
    ends = ids_of(tokenizer, "<|im_end|>")
    row = encode_conversation(tokenizer, TWICE, 10_000, eos_ids=ends, **NO_THOUGHT)
    assert isinstance(row, TokenRow)
    assert describe_row(tokenizer, row) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yo<|im_end|>⟧\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦no<|im_end|>⟧\n"
    )
    last = encode_conversation(tokenizer, TWICE, 10_000, eos_ids=ends, supervise="last", **NO_THOUGHT)
    assert isinstance(last, TokenRow) and last.spans == row.spans[-1:]


def test_marks_without_a_stable_prompt_cannot_give_the_last_turn() -> None:
    template = TEMPLATES["deepseek"][0].replace("{{ '<|assistant|>' + m", "<|assistant|>{% generation %}{{ m")
    template = template.replace("+ '<eos>' }}", "+ '<eos>' }}{% endgeneration %}")
    tokenizer = byte_tokenizer(template)
    ends = ids_of(tokenizer, "<eos>")
    row = encode_conversation(tokenizer, TWICE, 10_000, eos_ids=ends)
    assert isinstance(row, TokenRow)
    assert describe_row(tokenizer, row) == "<s><|user|>hi<|assistant|>⟦yo<eos>⟧<|user|>and?<|assistant|>⟦no<eos>⟧"
    with pytest.raises(ValueError, match=r"message 3: the prompt changes .* set data\.supervise: all"):
        encode_conversation(tokenizer, TWICE, 10_000, eos_ids=ends, supervise="last")


# --- random conversations -----------------------------------------------------------------------------------

texts = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from(list(" \n\t<|>/[]🙂é\u200d\u2028")), max_size=12
).filter(lambda text: not any(token in text for token in SPECIAL))


def _last_thought(texts: Sequence[str], end: str) -> list[str]:
    return [texts[-1].lstrip("\n") + end]


def _each(change: Callable[[str], str]) -> Callable[[Sequence[str], str], list[str]]:
    return lambda texts, end: [change(text) + end for text in texts]


# template -> what of the answers the model wrote, as the template renders it; options
WRITTEN: dict[str, tuple[Callable[[Sequence[str], str], list[str]], dict[str, Any]]] = {
    **{
        name: (_each(str), {})
        for name in ("chatml", "smollm2", "qwen25", "mistral", "phi3", "phi4", "zephyr", "marked")
    },
    **{name: (_each(str.strip), {}) for name in ("llama3", "llama31", "gemma")},
    "mistral_v3": (_each(lambda text: " " + text), {}),
    "qwen3": (_last_thought, {"supervise": "last", **NO_THOUGHT}),
}


def _library_ids(
    tokenizer: PreTrainedTokenizerFast, conversation: Conversation, options: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    """The library's ids of the whole conversation, and those of its parts before, between and from the answers on."""
    kwargs = {key: value for key, value in options.items() if key != "supervise"}
    messages = list(conversation.messages)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def render(count: int, prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt, **kwargs)
        )

    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prompts = [render(i, True) for i in (turns[-1:] if options.get("supervise") == "last" else turns)]
    whole = render(len(messages), False)
    parts = [whole[a:b] for a, b in pairwise([0, *map(len, prompts), len(whole)])]
    return ids(whole), [token for part in parts for token in ids(part)]


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=40, deadline=None, derandomize=True)
@example(turns=[("hi", "\n\nyo"), ("\nand?\n", "no")], part=0.5)
@given(turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=4), part=st.floats(0, 1))
def test_masked_text_is_the_assistants(name: str, turns: list[tuple[str, str]], part: float) -> None:
    """Whatever white space they begin with; cut to a random length: whole answers, or the beginning of the first."""
    end, (written, options) = TEMPLATES[name][1], WRITTEN[name]
    tokenizer = bpe_tokenizers[name]
    conversation = talk(*(text for pair in turns for text in pair))
    expected = written([answer for _, answer in turns], end)
    ends = ids_of(tokenizer, end)
    row = encode_conversation(tokenizer, conversation, 10_000, eos_ids=ends, **options)
    if isinstance(row, Dropped):
        assert row == Dropped(MERGED) and name == "marked" and any(answer[:1].isspace() for _, answer in turns)
        return
    assert [decoded(tokenizer, row, span) for span in row.spans] == expected
    whole, apart = _library_ids(tokenizer, conversation, options)
    assert list(row.input_ids) in (whole, apart)
    if all(not answer[:1].isspace() for _, answer in turns):
        assert list(row.input_ids) == whole

    limit = 1 + int(part * (len(row.input_ids) - 1))
    cut = encode_conversation(tokenizer, conversation, limit, eos_ids=ends, **options)
    fitting = [span for span in row.spans if span[1] <= limit]
    if not fitting and row.spans[0][0] >= limit:
        assert cut == Dropped("prompt longer than data.max_length")
        return
    assert isinstance(cut, TokenRow)
    assert list(cut.spans) == (fitting or [(row.spans[0][0], limit)])
    assert len(cut.input_ids) <= limit and cut.input_ids == row.input_ids[: len(cut.input_ids)]
    assert cut.truncated == (cut.spans != row.spans)


bpe_tokenizers = {name: bpe_tokenizer(TEMPLATES[name][0]) for name in WRITTEN}


def decoded(tokenizer: PreTrainedTokenizerFast, row: TokenRow, span: tuple[int, int]) -> str:
    return str(tokenizer.decode(list(row.input_ids[slice(*span)]), skip_special_tokens=False))

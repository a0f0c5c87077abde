"""Rows of every layout as conversations, and what is dropped why."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import tiny_tokenizer
from train.chat_mask import encode_conversation
from train.conversations import Conversation, TokenRow
from train.layouts import Layout, Unusable, detect_layout, parse_row

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}
SYSTEM = {"role": "system", "content": "be kind"}
CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "c1"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]
HI = [("user", "hi"), ("assistant", "hello")]


def calling(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def contents(row: object, layout: Layout = "auto") -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in parse_row(row, layout)[1]]


def reason(row: object, layout: Layout = "auto") -> str:
    with pytest.raises(Unusable) as caught:
        parse_row(row, layout)
    return str(caught.value)


def shared(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


ROWS: list[tuple[Layout, object, list[tuple[str, str]]]] = [
    ("messages", {"messages": [SYSTEM, USER, ASSISTANT]}, [("system", "be kind"), *HI]),
    ("messages", {"conversations": [USER, ASSISTANT], "text": "x", "prompt": "y"}, HI),
    ("messages", {"messages": [USER]}, HI[:1]),
    ("messages", {"messages": [USER], "user_turns": ["hi", "more"]}, [HI[0], ("user", "more")]),
    ("messages", {"messages": [SYSTEM, USER], "user_turns": ["hi"]}, [("system", "be kind"), HI[0]]),
    ("messages", {"messages": [USER, ASSISTANT], "user_turns": ["hi"]}, HI),
    ("messages", {"messages": [USER, ASSISTANT, USER]}, [*HI, HI[0]]),
    ("messages", {"messages": [USER, ASSISTANT], "system": "be kind"}, [("system", "be kind"), *HI]),
    ("messages", {"messages": [SYSTEM, USER], "system": "another"}, [("system", "be kind"), HI[0]]),
    ("messages", {"messages": [{"role": "developer", "content": "x"}, USER]}, [("system", "x"), HI[0]]),
    ("messages", {"messages": [{**USER, "content": [{"type": "text", "text": t} for t in "hi"]}]}, HI[:1]),
    ("sharegpt", shared(("human", "hi"), ("gpt", "hello")), HI),
    ("sharegpt", shared(("system", "be kind"), ("user", "hi"), ("chatgpt", "hello")), [("system", "be kind"), *HI]),
    ("alpaca", {"instruction": "hi", "input": "", "output": "hello"}, HI),
    ("alpaca", {"instruction": "sum", "input": "1 2", "output": "3"}, [("user", "sum\n\n1 2"), ("assistant", "3")]),
    ("alpaca", {"instruction": "sum", "context": "1 2", "response": "3"}, [("user", "sum\n\n1 2"), ("assistant", "3")]),
    ("alpaca", {"instruction": "", "input": "hi", "output": "hello"}, HI),
    ("alpaca", {"instruction": "hi", "output": ""}, HI[:1]),
    ("alpaca", {"instruction": "hi", "output": "hello", "history": [["hi", "hello"]]}, [*HI, *HI]),
    ("alpaca", {"instruction": "hi", "output": "hello", "history": None, "text": "### ..."}, HI),
    ("prompt_completion", {"prompt": "hi", "completion": "hello"}, HI),
    ("prompt_completion", {"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}, [("system", "be kind"), *HI]),
    (
        "prompt_completion",
        {"system_prompt": "be kind", "question": "hi", "response": "hello"},
        [("system", "be kind"), *HI],
    ),
    ("turns", {"question_id": 3, "turns": ["a", "b"]}, [("user", "a"), ("user", "b")]),
    ("turns", {"user_turns": "a", "messages": None}, [("user", "a")]),
    ("prompts", {"prompt": "hi"}, HI[:1]),
    ("prompts", {"prompt": [SYSTEM, USER], "completion": None}, [("system", "be kind"), HI[0]]),
    ("prompts", "hi", HI[:1]),
    ("prompts", {"text": "no speaker: here"}, [("user", "no speaker: here")]),
    ("text", {"text": "User: hi\n\nAssistant: hello"}, HI),
    ("text", "SYSTEM: be kind\n\nUSER: hi\n\nASSISTANT: hello\n", [("system", "be kind"), *HI]),
    ("text", "User: hi\nAssistant: hello", HI),
    ("text", "User: a\nUser: b\n\nAssistant: c\n\n\nd", [("user", "a\nUser: b"), ("assistant", "c\n\n\nd")]),
    ("text", {"text": "### Human: hi### Assistant: hello"}, HI),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "row", "expected"), ROWS)
def test_layouts(layout: Layout, row: object, expected: list[tuple[str, str]]) -> None:
    assert detect_layout(row) == layout
    assert parse_row(row)[0] == layout and contents(row) == expected
    assert contents(row, layout) == expected
    assert json.loads(json.dumps(parse_row(row)[1])) == list(parse_row(row)[1])


def test_every_layout_is_tested() -> None:
    assert {layout for layout, _, _ in ROWS} == set(get_args(Layout)) - {"auto"}


def test_the_layout_can_be_forced() -> None:
    row = {"messages": [USER, ASSISTANT], "prompt": "other", "text": "User: x", "turns": ["t"], "instruction": "i"}
    assert contents(row) == HI
    assert contents(row, "prompts") == [("user", "other")]
    assert contents(row, "text") == [("user", "x")]
    assert contents(row, "turns") == [("user", "t")]
    assert contents(row, "alpaca") == [("user", "i")]
    assert contents("User: x", "prompts") == [("user", "User: x")]
    assert reason(row, "sharegpt") == "unknown role"
    assert reason("hi", "messages") == "a string, not columns"
    assert reason("hi", "text") == "text without speakers"
    assert reason({"prompt": "x"}, "text") == "null content"


BAD: list[tuple[str, object]] = [
    ("empty", {"messages": []}),
    ("empty", {"turns": []}),
    ("assistant first", {"messages": [ASSISTANT]}),
    ("assistant first", {"messages": [SYSTEM, ASSISTANT, USER]}),
    ("no user turn", {"messages": [SYSTEM]}),
    ("null content", {"messages": [USER, {"role": "assistant", "content": None}]}),
    ("null content", {"turns": [None]}),
    ("null content", {"messages": [USER, {"role": "assistant", "content": None, "reasoning_content": "so"}]}),
    ("empty content", {"messages": [USER, {"role": "assistant", "content": " \n"}]}),
    ("empty content", {"prompt": "hi", "completion": ""}),
    ("empty content", {"instruction": "", "input": "", "output": "x"}),
    ("empty content", "User: \n\nAssistant: x"),
    ("content is not text", {"turns": [3]}),
    ("content is not text", {"turns": ["\ud800"]}),
    ("content is not text", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("content is not text", {"messages": [USER, {**ASSISTANT, "reasoning_content": 3}]}),
    ("content is not text", {"instruction": {"a": 1}}),
    ("not alternating", {"messages": [USER, USER, ASSISTANT]}),
    ("not alternating", {"messages": [USER, ASSISTANT, ASSISTANT]}),
    ("not alternating", {"messages": [USER, SYSTEM, ASSISTANT]}),
    ("not alternating", {"messages": [USER, CALLING, USER]}),
    ("not alternating", {"messages": [USER, CALLING, RESULT, USER]}),
    ("tool result without a call", {"messages": [USER, RESULT]}),
    ("tool result without a call", {"messages": [USER, ASSISTANT, RESULT]}),
    ("tool result without a call", {"messages": [USER, CALLING, {**RESULT, "tool_call_id": "c2"}, ASSISTANT]}),
    ("tool calls outside an assistant turn", {"messages": [{**USER, "tool_calls": [CALL]}, ASSISTANT]}),
    ("tool_calls is not a list", {"messages": [USER, {**ASSISTANT, "tool_calls": "f()"}]}),
    ("tool call without a name", {"messages": [USER, {**ASSISTANT, "tool_calls": [{"function": {}}]}]}),
    ("tool call without a name", {"messages": [USER, {**ASSISTANT, "tool_calls": ["f"]}]}),
    ("tool call arguments are not an object", {"messages": [USER, calling("[1]")]}),
    ("tool call is not JSON", {"messages": [USER, calling("{")]}),
    ("tool call is not JSON", shared(("human", "hi"), ("function_call", "add(1)"))),
    ("tools is not a list of objects", {"messages": [USER], "tools": {"name": "f"}}),
    ("tools is not JSON", {"messages": [USER], "tools": "add"}),
    ("unknown role", {"messages": [{"role": "bot", "content": "x"}]}),
    ("unknown role", {"messages": [{"content": "x"}]}),
    ("unknown role", {"messages": [{"role": ["user"], "content": "x"}]}),
    ("messages is not a list of turns", {"messages": "hi"}),
    ("messages is not a list of turns", {"messages": ["hi"]}),
    ("completion is not a list of turns", {"prompt": "hi", "completion": ["x"]}),
    ("history is not a list of pairs", {"instruction": "x", "history": [["a"]]}),
    ("history is not a list of pairs", {"instruction": "x", "history": "a"}),
    ("no known layout", {"content": "hi"}),
    ("no known layout", {"messages": None, "text": None}),
    ("no known layout", ["hi"]),
]  # fmt: skip


@pytest.mark.parametrize(("expected", "row"), BAD)
def test_bad_rows(expected: str, row: object) -> None:
    assert reason(row) == expected


def test_tool_calls_and_reasoning_stay() -> None:
    """In the form that templates take: arguments as an object, whatever the row wrote; schema nulls are no keys."""
    last = {**ASSISTANT, "reasoning_content": "add them"}
    _, messages, tools = parse_row({"messages": [USER, CALLING, RESULT, last], "tools": json.dumps(TOOLS)})
    assert list(messages) == [USER, CALLING, RESULT, last] and list(tools) == TOOLS
    written = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}
    same = {"role": "assistant", "content": None, "tool_calls": [written], "reasoning_content": None, "weight": 1}
    assert list(parse_row({"messages": [USER, same, RESULT, last]})[1]) == [USER, CALLING, RESULT, last]
    old = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}}
    _, messages, _ = parse_row({"messages": [USER, old, {"role": "function", "name": "add", "content": "2"}]})
    assert messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    assert messages[2] == {"role": "tool", "name": "add", "content": "2"}
    several = {**CALLING, "tool_calls": [CALL, {**CALL, "id": "c2"}]}
    results = [RESULT, {**RESULT, "tool_call_id": "c2", "content": ""}]
    assert len(parse_row({"messages": [USER, several, *results, CALLING, RESULT, ASSISTANT]})[1]) == 7
    thought = {"messages": [USER, {"role": "assistant", "content": "<think>\nwell\n</think>\n\nhello"}]}
    assert contents(thought)[1][1] == "<think>\nwell\n</think>\n\nhello"


def test_sharegpt_tools() -> None:
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    row = shared(("human", "hi"), ("function_call", call), ("observation", "1"), ("gpt", "one"))
    _, messages, tools = parse_row({**row, "tools": json.dumps(TOOLS), "system": "be kind"})
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[2]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    assert list(tools) == TOOLS


def test_the_template_renders_what_is_kept() -> None:
    """Calls and reasoning are the assistant's, so supervised; tools and results are not."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
        "{% for c in m.tool_calls %}!{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    last = {**ASSISTANT, "reasoning_content": "so"}
    _, messages, tools = parse_row({"messages": [USER, CALLING, RESULT, last], "tools": TOOLS})
    row = encode_conversation(tokenizer, Conversation("r", "s", messages, tools), 500, eos_ids={tokenizer.eos_token_id})
    assert isinstance(row, TokenRow)
    said = [tokenizer.decode(row.input_ids[a:b]) for a, b in row.spans]
    assert said == ['!add{"a": 1, "b": null}<|end|>', "(so)hello<|end|>"]
    everything = tokenizer.decode(row.input_ids)
    assert everything.startswith(f"[{json.dumps(TOOLS)}]<|user|>hi") and "<|tool|>2<|end|>" in everything


names = st.sampled_from(["role", "content", "from", "value", "tool_calls", "function", "name"])
json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(["user", "tool", "{}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=12,
)
columns = st.sampled_from(
    """messages conversations user_turns turns instruction input output history prompt completion text system
    tools""".split()  # noqa: SIM905
)


@given(row=json_like | st.dictionaries(columns, json_like, max_size=4), layout=st.sampled_from(get_args(Layout)))
def test_any_json_is_a_conversation_or_unusable(row: object, layout: Layout) -> None:
    try:
        _, messages, tools = parse_row(row, layout)
    except Unusable:
        return
    roles = [message["role"] for message in messages]
    assert roles[0] in ("system", "user") and "user" in roles and "system" not in roles[1:]
    assert all(isinstance(message["content"], str) for message in messages)
    json.dumps([*messages, *tools])

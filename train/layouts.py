"""Rows of data sets as conversations: every usual layout, checked strictly.

    messages           messages | conversations | conversation: turns with role and content (OpenAI); `tools`
    sharegpt           the same columns: turns with from and value; `tools`
    alpaca             instruction, input | context, output | response, history of [question, answer] pairs
    prompt_completion  prompt | question | query and completion | response | answer: strings, or lists of messages
    turns              user_turns | turns (Spec-Bench): the user's texts in order
    prompts            a string, or prompt | question | query | text: one user turn, or a list of messages
    text               a string, or text: a transcript with `User:` and `Assistant:` (or `### Human:`) before its turns

Any may have a `system` (or `system_prompt`). Tool calls, tool results and reasoning stay in the messages, so that the
target's own template renders them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from train.conversations import Message

Layout = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "turns", "prompts", "text"]

_TURN_COLUMNS = ("messages", "conversations", "conversation")
_PROMPT = ("prompt", "question", "query")
_COMPLETION = ("completion", "response", "answer")
_INPUT = ("input", "context")
_OUTPUT = ("output", "response")
_SYSTEM = ("system", "system_prompt")

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),  # an assistant's turn whose content is the call
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
}
_REASONING = ("reasoning_content", "reasoning", "thinking")

_LABEL = r"(System|SYSTEM|User|USER|Human|HUMAN|Assistant|ASSISTANT):[ \t]*"
_STARTS = re.compile(r"\s*(?:### ?)?(?:System|SYSTEM|User|USER|Human|HUMAN):")
_BETWEEN = (  # the first of these that finds more than one speaker divides a transcript
    re.compile(rf"(?:\A|\n*)### ?{_LABEL}"),
    re.compile(rf"(?:\A|\n[ \t]*\n\s*){_LABEL}"),
    re.compile(rf"(?:\A|\n){_LABEL}"),
)


class Unusable(Exception):
    """A row that gives no conversation; the text is the reason that is counted."""


# --- which layout -------------------------------------------------------------------------------------------


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The first of these columns that is there and not null (files with a schema have null for absent)."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def is_transcript(text: object) -> bool:
    return isinstance(text, str) and bool(_STARTS.match(text))


def detect_layout(row: object) -> Layout | None:
    """The layout that a row's columns show, or None."""
    if isinstance(row, str):
        return "text" if is_transcript(row) else "prompts"
    if not isinstance(row, Mapping):
        return None
    if (turns := _first(row, _TURN_COLUMNS)) is not None:
        first = turns[0] if isinstance(turns, list) and turns else None
        return "sharegpt" if isinstance(first, Mapping) and "from" in first and "role" not in first else "messages"
    if _first(row, ("user_turns", "turns")) is not None:
        return "turns"
    if row.get("instruction") is not None:
        return "alpaca"
    if _first(row, _PROMPT) is not None:
        return "prompts" if _first(row, _COMPLETION) is None else "prompt_completion"
    if row.get("text") is not None:
        return "text" if is_transcript(row["text"]) else "prompts"
    return None


# --- the turns of each layout, as they stand ----------------------------------------------------------------


def _listed(turns: object, name: str) -> list[Mapping[str, Any]]:
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise Unusable(f"{name} is not a list of turns")
    return turns


def _role(turn: Mapping[str, Any]) -> str | None:
    role = turn.get("role")
    return _ROLES.get(role) if isinstance(role, str) else None


def _user(turns: object) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": turn} for turn in (turns if isinstance(turns, list) else [turns])]


def _answered(completion: object) -> list[Mapping[str, Any]]:
    if isinstance(completion, list):
        return _listed(completion, "completion")
    return [] if completion is None else [{"role": "assistant", "content": completion}]


def _asked(prompt: object) -> list[Mapping[str, Any]]:
    return _listed(prompt, "prompt") if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


def _from_messages(row: Any) -> list[Mapping[str, Any]]:
    turns = _listed(_first(row, _TURN_COLUMNS), "messages")
    if row.get("user_turns") is None or any(_role(turn) == "assistant" for turn in turns):
        return turns  # with answers there, user_turns only repeats the questions
    return [turn for turn in turns if _role(turn) == "system"] + _user(row["user_turns"])


def _from_sharegpt(row: Any) -> list[Mapping[str, Any]]:
    turns = _listed(_first(row, _TURN_COLUMNS), "conversations")
    return [{**turn, "role": turn.get("from"), "content": turn.get("value")} for turn in turns]


def _from_alpaca(row: Any) -> list[Mapping[str, Any]]:
    asked, more = row.get("instruction"), _first(row, _INPUT)
    if isinstance(asked, str) and isinstance(more, str) and more.strip():
        asked = f"{asked}\n\n{more}" if asked.strip() else more
    turns: list[Mapping[str, Any]] = []
    history = row.get("history") or []
    if not isinstance(history, list):
        raise Unusable("history is not a list of pairs")
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise Unusable("history is not a list of pairs")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    answer = _first(row, _OUTPUT)
    return [*turns, {"role": "user", "content": asked}, *_answered(None if answer == "" else answer)]


def _from_prompt_completion(row: Any) -> list[Mapping[str, Any]]:
    return [*_asked(_first(row, _PROMPT)), *_answered(_first(row, _COMPLETION))]


def _from_turns(row: Any) -> list[Mapping[str, Any]]:
    return _user(_first(row, ("user_turns", "turns")))


def _from_prompts(row: Any) -> list[Mapping[str, Any]]:
    return _asked(row if isinstance(row, str) else _first(row, (*_PROMPT, "text")))


def _from_text(row: Any) -> list[Mapping[str, Any]]:
    text = row if isinstance(row, str) else row.get("text")
    if not isinstance(text, str):
        raise Unusable("null content" if text is None else "content is not text")
    if not is_transcript(text):
        raise Unusable("text without speakers")
    divided = [pattern.split(text.strip()) for pattern in _BETWEEN]
    _, *parts = next((parts for parts in divided if len(parts) > 3), divided[-1])
    return [{"role": role.lower(), "content": said} for role, said in zip(parts[::2], parts[1::2], strict=True)]


_TURNS_OF: dict[str, Callable[[Any], list[Mapping[str, Any]]]] = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "prompt_completion": _from_prompt_completion,
    "turns": _from_turns,
    "prompts": _from_prompts,
    "text": _from_text,
}
assert set(_TURNS_OF) == set(get_args(Layout)) - {"auto"}


# --- one row ------------------------------------------------------------------------------------------------


def parse_row(row: object, layout: Layout = "auto") -> tuple[Layout, tuple[Message, ...], tuple[dict[str, Any], ...]]:
    """The row's layout, its messages in canonical form, and the tools that were offered.

    Raises Unusable, with the reason, where it is no conversation: an optional system turn, then the user's, then in
    turn; or the user's turns alone. A tool result follows the assistant's call.
    """
    found = detect_layout(row) if layout == "auto" else layout
    if found is None or not isinstance(row, (str, Mapping)):
        raise Unusable("no known layout")
    if isinstance(row, str) and found not in ("text", "prompts"):
        raise Unusable("a string, not columns")
    turns = _TURNS_OF[found](row)
    fields: Mapping[str, Any] = {} if isinstance(row, str) else row
    system = _first(fields, _SYSTEM)
    if isinstance(system, str) and system.strip() and not any(_role(turn) == "system" for turn in turns):
        turns = [{"role": "system", "content": system}, *turns]
    if not turns:
        raise Unusable("empty")
    messages = tuple(_message(turn) for turn in turns)
    _check_order(messages)
    return found, messages, _tools(fields.get("tools"))


def _message(turn: Mapping[str, Any]) -> Message:
    name = _role(turn)
    if name is None:
        raise Unusable("unknown role")
    content = turn.get("content")
    if name == "call":
        return {"role": "assistant", "content": "", "tool_calls": [_call(_loaded(content, "tool call"))]}
    message: Message = {"role": name, "content": content}
    if name == "assistant":
        for key in _REASONING:
            if turn.get(key):
                message[key] = _plain(turn[key])
        calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else [])
        if calls:
            message["tool_calls"] = read_calls(calls)
            message["content"] = "" if content is None else content
    elif turn.get("tool_calls"):
        raise Unusable("tool calls outside an assistant turn")
    elif name == "tool":
        message |= {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}
    if message["content"] is None:
        raise Unusable("null content")
    message["content"] = text = _plain(message["content"])
    if not text.strip() and name != "tool" and "tool_calls" not in message:
        raise Unusable("empty content")
    return message


def _plain(content: object) -> str:
    """Content as text: a string, or OpenAI text parts joined."""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Unusable("content is not text")
    try:
        content.encode()
    except UnicodeEncodeError:  # half a character
        raise Unusable("content is not text") from None
    return content


def _loaded(value: object, what: str) -> Any:
    """JSON that is written as a string inside a row."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        raise Unusable(f"{what} is not JSON") from None


def read_calls(calls: object) -> list[dict[str, Any]]:
    """An assistant's tool calls in canonical form. Raises Unusable."""
    if not isinstance(calls, list):
        raise Unusable("tool_calls is not a list")
    return [_call(call) for call in calls]


def _call(call: object) -> dict[str, Any]:
    """One tool call in OpenAI's form, its arguments as an object: templates write them as JSON themselves."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Unusable("tool call without a name")
    assert isinstance(call, Mapping)
    arguments = _loaded(function.get("arguments") or {}, "tool call")
    if not isinstance(arguments, Mapping):
        raise Unusable("tool call arguments are not an object")
    out: dict[str, Any] = {"type": "function"}
    if isinstance(call.get("id"), str):
        out["id"] = call["id"]
    return out | {"function": {"name": function["name"], "arguments": dict(arguments)}}


def _tools(value: object) -> tuple[dict[str, Any], ...]:
    tools = _loaded(value, "tools") if value else []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise Unusable("tools is not a list of objects")
    return tuple(dict(tool) for tool in tools)


_NEXT = {"": "user", "user": "assistant", "assistant": "user", "calls": "tool", "tool": "tool assistant"}


def _check_order(messages: Sequence[Message]) -> None:
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    if not turns:
        raise Unusable("no user turn")
    if turns[0]["role"] == "assistant":
        raise Unusable("assistant first")
    if all(message["role"] == "user" for message in turns):
        return
    before, ids = "", set()
    for message in turns:
        role = message["role"]
        if role not in _NEXT[before].split():
            raise Unusable("tool result without a call" if role == "tool" else "not alternating")
        before = role
        if message.get("tool_calls"):
            before = "calls"
            ids = {call["id"] for call in message["tool_calls"] if "id" in call}
        elif role == "tool" and ids and message.get("tool_call_id", next(iter(ids))) not in ids:
            raise Unusable("tool result without a call")

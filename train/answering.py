"""Answers and invented prompts: what becomes of one conversation, as a program of requests for tokens.

Whoever answers the requests (`infer.batched` in this process, or a server) is not known here. What a row draws depends
on `data.seed` and on the row's key alone: a hash of its content, not its place in the file.

Self-synthesis (no data set): the target reads its own chat template up to the start of a user turn and invents the
prompt, then answers it (the idea of Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from infer.batched import Program, Request
from train.chat_mask import Dropped, encode_conversation
from train.config import DataConfig
from train.conversations import Conversation, Message

_MARK = "\u2402draftsmith\u2403"  # stands for a message's text while the template is taken apart
_LEAST_ROOM = 8  # tokens that an answer must have room for

OTHER_ROLES = "turns of other roles than system, user and assistant cannot be answered anew"
TOO_LONG = "prompt longer than data.max_length"
EMPTY = "empty answer"
REPEATS = "answer repeats itself"
REFUSED = "refused by the server"


@dataclass(frozen=True)
class Answer:
    """What became of the row with this key: ids with the spans that the target wrote, or the reason for having none."""

    key: str
    reason: str | None = None
    input_ids: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    truncated: bool = False
    reencoded: bool = False  # made from text, so that its ids may differ from those that were generated

    @property
    def tokens(self) -> int:
        """Number of tokens that the target wrote."""
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True)
class Reply:
    """A server's answer as text. cut: it reached the limit of tokens."""

    message: Message
    cut: bool


Tools = Sequence[dict[str, Any]]
Chat = Callable[[Sequence[Message], Tools, int, float, int], Reply | None]
"""Asks a server: messages, offered tools, most tokens, temperature, seed. None: it refuses this request."""


@dataclass(frozen=True)
class TemplateParts:
    """The chat template taken apart, as text.

    before_user: everything up to the first user text; after_user: from there to where the answer starts.
    """

    before_user: str
    after_user: str


def template_parts(tokenizer: PreTrainedTokenizerBase, **template_kwargs: Any) -> TemplateParts:
    """Takes the template apart by rendering a marked message. `template_kwargs`: its extra arguments.

    Raises:
        ValueError: the template changes or drops message texts, so it cannot be taken apart.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("target.path: the tokenizer has no chat template; choose a chat model or give data.path")
    parts = _render(tokenizer, [{"role": "user", "content": _MARK}], template_kwargs).split(_MARK)
    if len(parts) != 2:
        raise ValueError("target.path: its chat template alters or drops message texts; give data.path instead")
    return TemplateParts(*parts)


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], template_kwargs: dict[str, Any]) -> str:
    out = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **template_kwargs)
    return str(out)


def row_keys(conversations: Iterable[Conversation]) -> Iterator[str]:
    """A key per conversation: its content's hash, and a count where there are several of one content."""
    seen: dict[str, int] = {}
    for conversation in conversations:
        key = conversation.content_key
        seen[key] = seen.get(key, 0) + 1
        yield key if seen[key] == 1 else f"{key}-{seen[key]}"


class Answerer:
    """Programs for rows of one target and config.

    Args:
        stops: ids that end a turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Collection[int], data: DataConfig) -> None:
        self.tokenizer, self.stops, self.data = tokenizer, frozenset(stops), data

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _rendered(self, messages: Sequence[Message], tools: Tools) -> str:
        offered = {"tools": list(tools)} if tools else {}
        return _render(self.tokenizer, messages, self.data.template_kwargs | offered)

    def prefix(self) -> list[int]:
        """What conversations without a system prompt of their own begin with."""
        return self.ids(template_parts(self.tokenizer, **self.data.template_kwargs).before_user)

    def _number(self, key: str, what: str) -> int:
        """52 random bits, the same in every process."""
        digest = hashlib.sha256(f"{self.data.seed}:{key}:{what}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 12

    def temperature(self, key: str) -> float:
        """Greedy, or data.answer_temperature, for the whole row."""
        greedy = self._number(key, "greedy") < self.data.greedy_fraction * 2**52
        return 0.0 if greedy else self.data.answer_temperature

    def program(self, key: str, conversation: Conversation | None) -> Program[Answer]:
        """Of a conversation, or of one that is invented."""
        return self.invent(key) if conversation is None else self.answer(key, conversation.messages, conversation.tools)

    def invent(self, key: str) -> Program[Answer]:
        """The target writes the user turn, and then the answer to it."""
        ids = self.prefix()
        seed = self._number(key, "prompt")
        new = yield Request(ids, self.data.prompt_tokens, self.data.prompt_temperature, seed)
        finished = bool(new) and new[-1] in self.stops
        words = new[:-1] if finished else new
        text = str(self.tokenizer.decode(words, skip_special_tokens=False, clean_up_tokenization_spaces=False)).strip()
        reason = None
        if not finished:
            reason = "invented prompt not finished"
        elif len(new) < 4 or not text:
            reason = "invented prompt too short"
        elif any(token in text for token in self.tokenizer.all_special_tokens):
            reason = "invented prompt holds special tokens"
        elif is_degenerate(new):
            reason = "invented prompt repeats itself"
        if reason is not None:
            return Answer(key, reason)
        return (yield from self.answer(key, [{"role": "user", "content": text}]))

    def answer(self, key: str, messages: Sequence[Message], tools: Tools = ()) -> Program[Answer]:
        """Answers every user turn, one after the other; answers that are there already are left out.

        The ids trained on are the rendered prompt followed by the raw generated ids, never a decoded and re-encoded
        text. A conversation ends early at an answer that was cut or at `data.max_length`.
        """
        turns = _turns(messages)
        if turns is None:
            return Answer(key, OTHER_ROLES)
        seen, ids, temperature = list(turns[0]), self.ids(self._rendered(turns[0], tools)), self.temperature(key)
        spans: list[tuple[int, int]] = []
        for number, turn in enumerate(turns):
            if number:
                seen += [{"role": "assistant", "content": _MARK}, *turn]
                between = self.ids(self._after_answer(seen, tools))
                # The answer brought its own end of turn.
                between = between[1:] if between[0] in self.stops else between
                if len(ids) + len(between) + _LEAST_ROOM > self.data.max_length:
                    break
                ids += between
            elif len(ids) + _LEAST_ROOM > self.data.max_length:
                return Answer(key, TOO_LONG)
            room = min(self.data.answer_tokens, self.data.max_length - len(ids))
            new = yield Request(tuple(ids), room, temperature, self._number(key, f"answer {number}"))
            spans.append((len(ids), len(ids) + len(new)))
            ids += new
            if not new or new[-1] not in self.stops:
                break
        return self._checked(key, ids, spans)

    def _after_answer(self, messages: Sequence[Message], tools: Tools) -> str:
        """What the template puts between the (marked) last answer and the next one."""
        _, mark, after = self._rendered(messages, tools).rpartition(_MARK)
        if not mark:
            raise ValueError(
                "target.path: its chat template alters or drops earlier answers, so no later turn can follow them; "
                "expected conversations of one user turn in data.path"
            )
        return after

    def _checked(self, key: str, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Answer:
        spans = [span for span in spans if span[1] > span[0]]
        if all(stop - start < 2 for start, stop in spans):
            return Answer(key, EMPTY)
        if any(is_degenerate(ids[start:stop]) for start, stop in spans):
            return Answer(key, REPEATS)
        end = spans[-1][1]
        return Answer(key, None, tuple(ids[:end]), tuple(spans), ids[end - 1] not in self.stops)

    def answer_by_text(self, key: str, conversation: Conversation, chat: Chat) -> Answer:
        """The same through a server that gives text only: the finished conversation is encoded by the template.

        An answer that was cut has no end of turn to learn.
        """
        turns, tools = _turns(conversation.messages), conversation.tools
        if turns is None:
            return Answer(key, OTHER_ROLES)
        if len(self.ids(self._rendered(turns[0], tools))) + _LEAST_ROOM > self.data.max_length:
            return Answer(key, TOO_LONG)
        messages: list[Message] = []
        cut, temperature = False, self.temperature(key)
        for number, turn in enumerate(turns):
            asked = [*messages, *turn]
            if number and len(self.ids(self._rendered(asked, tools))) + _LEAST_ROOM > self.data.max_length:
                break
            seed = self._number(key, f"answer {number}") % 2**31  # servers take 32 bits
            reply = chat(asked, tools, self.data.answer_tokens, temperature, seed)
            if reply is None:
                return Answer(key, REFUSED)
            calls = "tool_calls" in reply.message
            if not calls and not reply.message["content"].strip():
                break
            messages, cut = [*asked, reply.message], reply.cut
            if cut or calls:  # nobody is there to run the tools
                break
        if not messages:
            return Answer(key, EMPTY)
        answered = Conversation(conversation.id, conversation.source, tuple(messages), tools)
        row = encode_conversation(
            self.tokenizer, answered, self.data.max_length, eos_ids=self.stops, **self.data.template_kwargs
        )
        if isinstance(row, Dropped):
            return Answer(key, row.reason)
        ids, spans = list(row.input_ids), list(row.spans)
        if cut and not row.truncated:
            start, stop = spans[-1]
            while stop > start and ids[stop - 1] in self.stops:
                stop -= 1
            spans[-1] = (start, stop)
        answer = self._checked(key, ids, spans)
        return answer if answer.reason else replace(answer, truncated=cut or row.truncated, reencoded=True)


def drive(program: Program[Answer], complete: Callable[[Request], list[int] | None]) -> Answer | None:
    """Runs a program against a function that completes requests. None: it refused one."""
    try:
        request = next(program)
        while (new := complete(request)) is not None:
            request = program.send(new)
    except StopIteration as stop:
        result: Any = stop.value
        assert isinstance(result, Answer)
        return result
    return None


def _turns(messages: Sequence[Message]) -> list[list[Message]] | None:
    """The messages up to each user turn, without answers. None where there are other roles."""
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            continue
        if message["role"] not in ("system", "user"):
            return None
        turns[-1].append(message)
        if message["role"] == "user":
            turns.append([])
    return turns[:-1] or None


def is_degenerate(ids: Sequence[int], gram: int = 4, least: float = 0.35) -> bool:
    """True for a text stuck in a loop: under 35 % of its 4-grams are distinct (texts of 48 tokens and more)."""
    if len(ids) < 48:
        return False
    grams = [tuple(ids[i : i + gram]) for i in range(len(ids) - gram + 1)]
    return len(set(grams)) < least * len(grams)

"""Token ids and the assistant's spans, derived from the chat template itself.

For each assistant turn i the template renders `messages[:i]` with the generation prompt and `messages[:i+1]`
without: what the second adds is what the model wrote, and both must begin the whole rendering, as token ids. No
separator string is searched for. A template with `{% generation %}` marks its answers itself; prefixes then only
take off what the generation prompt supplies.

A message is any mapping with a `role`; the rest (`content`, `tool_calls`, `reasoning_content`) is for the template.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Literal

import jinja2

from train.conversations import Conversation, DropCounts, TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # half-open interval of token indices
Supervise = Literal["all", "last"]  # every assistant turn, or the last one only

NO_SUPERVISED = "no supervised token"
TOO_LONG = "prompt longer than data.max_length"
MERGED = "tokens merge across the border of an answer"
_MARK_IT = "mark the answers with {% generation %} in the template, or leave such rows out"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Dropped:
    """A conversation that gives no training row, and why."""

    reason: str


class _RefusedError(Exception):
    """The template raised an error for these messages."""


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template, expected one "
            "(chat_template.jinja, or in tokenizer_config.json); change target.path to a chat model"
        )
    return str(tokenizer.get_chat_template())


def _apply(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
    """`apply_chat_template`; raises _RefusedError for a row that the template cannot render."""
    try:
        return tokenizer.apply_chat_template([dict(message) for message in messages], **kwargs)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} is not valid Jinja ({error}); mend it, or change "
            "target.path"
        ) from error
    except (jinja2.TemplateError, TypeError) as error:  # TypeError: `'\n' + content` where the content is a list, say
        raise _RefusedError(" ".join(str(error).split())[:120]) from error


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], prompt: bool, kwargs: dict[str, Any]
) -> str:
    text = _apply(tokenizer, messages, tokenize=False, return_dict=False, add_generation_prompt=prompt, **kwargs)
    assert isinstance(text, str), f"rendering without tokenising gave {type(text).__name__}"
    return text


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # The template writes its own special tokens, so the tokenizer must add none. Nor may it cut: its model_max_length
    # is often wrong, and rows are cut later.
    return list(tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])


@dataclass(frozen=True)
class _Rendered:
    """A conversation up to its last answer, as the template renders it whole."""

    tokenizer: PreTrainedTokenizerBase
    conversation: Conversation
    kwargs: dict[str, Any]
    eos_ids: Collection[int]
    text: str
    ids: list[int]

    def prefix(self, length: int, prompt: bool) -> tuple[str, list[int]]:
        """Text and ids of the first `length` messages."""
        text = _render(self.tokenizer, self.conversation.messages[:length], prompt, self.kwargs)
        return text, _tokenise(self.tokenizer, text)

    def unstable(self, turn: int, what: str, advice: str) -> ValueError:
        return ValueError(
            f"the chat template is not prefix-stable: row {self.conversation.id!r}, message {turn}: {what}. Expected "
            f"each prompt to be the beginning of the longer rendering; {advice}"
        )

    def end_of_turn(self, ids: Sequence[int], start: int, stop: int) -> int:
        """The end of the turn at `start`: after its first end-of-turn token, which the model wrote. The template wrote
        what follows."""
        return next((i + 1 for i in range(start, stop) if ids[i] in self.eos_ids), stop)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many ids both begin with."""
    return next((k for k, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _prefix_spans(row: _Rendered, turns: Sequence[int]) -> tuple[list[int], list[Span]] | Dropped:
    """The row's ids and one span per assistant turn, from the renderings of prefixes.

    Raises ValueError where the template is not prefix-stable.
    """
    spans: list[Span] = []
    prompts, merged = [], False
    for i in turns:
        prompt, prompt_ids = row.prefix(i, True)
        whole = i + 1 == len(row.conversation.messages)
        answered, answered_ids = (row.text, row.ids) if whole else row.prefix(i + 1, False)
        if not answered.startswith(prompt):
            raise row.unstable(i, "the prompt changes once the answer is there", _MARK_IT)
        # Only up to the end of turn: some templates (Phi-3's) close the whole conversation with one more token.
        stop = row.end_of_turn(answered_ids, len(prompt_ids), len(answered_ids))
        if row.ids[:stop] != answered_ids[:stop]:
            if row.text.startswith(answered):
                return Dropped(MERGED)
            raise row.unstable(
                i, "the turn changes once a later turn is there", f"set data.supervise: last, or {_MARK_IT}"
            )
        merged |= answered_ids[: len(prompt_ids)] != prompt_ids
        prompts.append(prompt)
        spans.append((len(prompt_ids), stop))
    return _apart(row, prompts) if merged else (row.ids, spans)


def _apart(row: _Rendered, prompts: Sequence[str]) -> tuple[list[int], list[Span]] | Dropped:
    """Ids and spans where an answer's first characters merge with the prompt's last (a line break after another, say).

    Decoding sees the prompt's ids, then the answer's, so each answer is tokenised apart from what is before it. Dropped
    where that is not the same text (a tokenizer that begins every text with a space), or an answer has no end-of-turn
    token. `prompts`: the texts up to each answer.
    """
    ids: list[int] = []
    spans: list[Span] = []
    borders = [0, *map(len, prompts), len(row.text)]
    for begin, end in pairwise(borders):
        start = len(ids)
        ids += _tokenise(row.tokenizer, row.text[begin:end])
        if begin:
            spans.append((start, row.end_of_turn(ids, start, len(ids))))
    ended = all(ids[stop - 1] in row.eos_ids for _, stop in spans)
    same = decode_row(row.tokenizer, ids) == decode_row(row.tokenizer, row.ids)
    return (ids, spans) if ended and same else Dropped(MERGED)


def _marked_spans(row: _Rendered, turns: Sequence[int]) -> tuple[list[int], list[Span]] | Dropped:
    """The row's ids and the spans marked with `{% generation %}`, made to follow our rule at both ends.

    Raises ValueError where `turns` leaves an answer out and its prompt is not prefix-stable.
    """
    messages, ids = row.conversation.messages, row.ids
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    out = _apply(row.tokenizer, messages, tokenizer_kwargs={"verbose": False}, **options, **row.kwargs)
    assert list(out["input_ids"]) == ids, "the template renders the same conversation to different ids"
    mask = [bool(flag) for flag in out["assistant_masks"]]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    first = turns[0] if turns != answers else None  # the answers before this one are not wanted
    for i in range(1, len(ids)):  # a template may leave the end-of-turn token outside its mark; the model writes it
        if mask[i - 1] and not mask[i] and ids[i] in row.eos_ids and ids[i - 1] not in row.eos_ids:
            mask[i] = True
    for i in answers:  # ... or have what the generation prompt supplies inside
        (_, before), (text, prompt) = row.prefix(i, False), row.prefix(i, True)
        supplied = slice(_common(before, prompt), _common(prompt, ids))
        mask[supplied] = [False] * len(mask[supplied])
        if supplied.stop == len(prompt):
            if len(prompt) < len(ids) and ids[len(prompt)] in row.eos_ids:  # an empty answer: nothing was marked
                mask[len(prompt)] = True
        elif row.text.startswith(text):
            return Dropped(MERGED)
        elif i == first:
            raise row.unstable(i, "the prompt changes once the answer is there", "set data.supervise: all")
        if i == first:
            mask[: len(prompt)] = [False] * len(prompt)
    spans = []
    for flag, group in groupby(range(len(ids)), key=mask.__getitem__):
        if flag:
            indices = list(group)
            spans.append((indices[0], row.end_of_turn(ids, indices[0], indices[-1] + 1)))
    return ids, spans


def _fit(spans: Sequence[Span], length: int, max_length: int) -> tuple[int, tuple[Span, ...]]:
    """The length of the row and the spans that stay.

    Where the row is too long it ends with the last answer that fits whole. Where none does, the first one is cut.
    """
    if length <= max_length:
        return length, tuple(spans)
    whole = tuple(span for span in spans if span[1] <= max_length)
    if whole:
        return whole[-1][1], whole
    start = spans[0][0]
    return max_length, ((start, max_length),) if start < max_length else ()


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    max_length: int,
    *,
    eos_ids: Collection[int] = (),
    supervise: Supervise = "all",
    **template_kwargs: Any,
) -> TokenRow | Dropped:
    """Token ids of the rendered conversation and the spans that the assistant produced.

    Supervised: an answer's tokens and its end-of-turn token (the first of `eos_ids` in the turn; with none
    there, the whole turn). Not supervised: what the generation prompt supplies, what the template adds after
    the end of turn ("\\n"), and with `supervise="last"` every answer but the last.
    The ids are those of the whole text, except where an answer merges with the prompt's end: see `_apart`.
    Messages after the last answer are left out. A row of more than `max_length` tokens ends with the last answer that
    fits whole; where none does, the first one is cut. It is `truncated` if that costs any supervised token.
    `template_kwargs` go to every rendering alike (`enable_thinking=False`).

    Raises ValueError where the tokenizer has no chat template, the template is not valid Jinja, or it is not
    prefix-stable.
    """
    template = _template(tokenizer)
    answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if not answers:
        return Dropped(NO_SUPERVISED)
    if answers[0] == 0:
        return Dropped("assistant first")
    conversation = replace(conversation, messages=conversation.messages[: answers[-1] + 1])
    if conversation.tools:
        template_kwargs["tools"] = list(conversation.tools)
    spans_of = _prefix_spans
    if tokenizer.is_fast and _GENERATION_TAG.search(template):  # the marks need character offsets
        spans_of = _marked_spans
    try:
        text = _render(tokenizer, conversation.messages, False, template_kwargs)
        row = _Rendered(tokenizer, conversation, template_kwargs, eos_ids, text, _tokenise(tokenizer, text))
        found = spans_of(row, answers if supervise == "all" else answers[-1:])
    except _RefusedError as error:
        return Dropped(f"the chat template refuses the row: {error}")
    if isinstance(found, Dropped):
        return found
    ids, spans = found
    if not spans:
        return Dropped(NO_SUPERVISED)
    length, kept = _fit(spans, len(ids), max_length)
    if not kept:
        return Dropped(TOO_LONG)
    return TokenRow(conversation.id, tuple(ids[:length]), kept, conversation.source, kept != tuple(spans))


def encode_each(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterable[Conversation],
    max_length: int,
    eos_ids: Collection[int],
    counts: DropCounts,
    *,
    data_name: str = "the data",
    supervise: Supervise = "all",
    **template_kwargs: Any,
) -> Iterator[TokenRow]:
    """Encode one conversation after the other; what gives no row is dropped. `counts` is filled in on the way.

    Raises ValueError, after the last, where no row is left or under 1 % of the tokens are supervised; `data_name` is
    for these messages.
    """
    total = supervised = 0
    for conversation in conversations:
        counts.rows_in += 1
        row = encode_conversation(
            tokenizer, conversation, max_length, eos_ids=eos_ids, supervise=supervise, **template_kwargs
        )
        if isinstance(row, Dropped):
            counts.add(row.reason)
            continue
        counts.rows_out += 1
        total, supervised = total + len(row.input_ids), supervised + row.supervised
        yield row
    counts.check()
    where = f"{data_name}, with the chat template of {tokenizer.name_or_path!r} and data.max_length {max_length}"
    check_supervised(supervised, total, counts, where)


def check_supervised(supervised: int, total: int, counts: DropCounts, where: str) -> None:
    """Raises ValueError where no token, or under 1 % of the `total`, is supervised. `where`, `counts`: for messages."""
    if not supervised:
        raise ValueError(f"nothing to train on in {where}: {counts}; change data.path or data.max_length")
    if supervised < 0.01 * total:
        raise ValueError(
            f"{supervised} of {total} tokens are supervised in {where}, expected 1 % or more ({counts}); "
            "look at the rows with scripts/show_mask.py, then change data.path or data.max_length"
        )


def end_of_turn_ids(
    tokenizer: PreTrainedTokenizerBase, eos_token_id: int | Sequence[int] | None, **template_kwargs: Any
) -> frozenset[int]:
    """The ids that end a turn: the generation config's `eos_token_id`, and the special token after an answer.

    They differ on some models (Gemma ends a turn with <end_of_turn> and a text with <eos>).
    """
    given = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    answer = "draftsmithprobe"
    _template(tokenizer)
    probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    try:
        rendered = _render(tokenizer, probe, False, template_kwargs)
    except _RefusedError:  # a template that wants a system message, say: its rows are counted one by one
        return frozenset(given)
    after = rendered.rpartition(answer)[2] if answer in rendered else ""
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    first = [token for token in _tokenise(tokenizer, after.lstrip())[:1] if token in special]
    return frozenset([*given, *first])


def decode_row(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of `ids` with special tokens, exactly."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def pieces(tokenizer: PreTrainedTokenizerBase, row: TokenRow) -> list[tuple[str, bool]]:
    """The row as text, special tokens included: runs of (text, supervised) in order."""
    runs: list[tuple[str, bool]] = []
    before, mask = "", row.loss_mask
    for stop in range(1, len(mask) + 1):
        if stop < len(mask) and mask[stop] == mask[stop - 1]:
            continue
        # from the start: some tokenizers drop the first space of what they decode
        text = decode_row(tokenizer, row.input_ids[:stop])
        runs.append((text[len(before) :], mask[stop - 1]))
        before = text
    return runs


def describe_row(tokenizer: PreTrainedTokenizerBase, row: TokenRow) -> str:
    """The row as text, special tokens included, with the supervised parts between ⟦ and ⟧."""
    parts = [f"⟦{text}⟧" if supervised else text for text, supervised in pieces(tokenizer, row)]
    return "".join(parts) + (" [cut at the maximal length]" if row.truncated else "")

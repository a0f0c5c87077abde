"""Token ids and the assistant's spans, derived from the chat template itself.

For each assistant turn i the template renders `messages[:i]` with the generation prompt and `messages[:i+1]`
without: what the second adds is what the model wrote. No separator string is searched for. A template with
`{% generation %}` marks its answers itself; prefixes then only take off what the generation prompt supplies.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import jinja2

from train.conversations import Conversation, DropCounts, Message, TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # half-open interval of token indices

NO_SUPERVISED = "no supervised token"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Dropped:
    """A conversation that gives no training row, and why."""

    reason: str


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template, expected one "
            "(chat_template.jinja, or in tokenizer_config.json); change target.path to a chat model"
        )
    return str(tokenizer.get_chat_template())


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], prompt: bool, kwargs: dict[str, Any]
) -> str:
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, return_dict=False, add_generation_prompt=prompt, **kwargs
    )
    assert isinstance(text, str), f"rendering without tokenising gave {type(text).__name__}"
    return text


def _tokenise(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # the template writes its own special tokens, so the tokenizer must add none; rows are cut later
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _unstable(conversation: Conversation, turn: int, what: str) -> ValueError:
    return ValueError(
        f"the chat template is not prefix-stable: row {conversation.id!r}, message {turn}: {what}. "
        "Expected each prompt to be the beginning of the longer rendering; mark the answers with "
        "{% generation %} in the template, or use conversations with one answer each"
    )


def _prefix_spans(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    full: str,
    ids: list[int],
    kwargs: dict[str, Any],
) -> list[Span] | Dropped:
    """One span per assistant turn, from the renderings of prefixes. `full`, `ids`: the whole conversation.

    Raises ValueError where the template is not prefix-stable.
    """
    messages = conversation.messages
    spans: list[Span] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(tokenizer, messages[:i], True, kwargs)
        answered = _render(tokenizer, messages[: i + 1], False, kwargs)
        if not answered.startswith(prompt):
            raise _unstable(conversation, i, "the prompt changes once the answer is there")
        if not full.startswith(answered):
            raise _unstable(conversation, i, "the turn changes once a later turn is there")
        prompt_ids, answered_ids = _tokenise(tokenizer, prompt), _tokenise(tokenizer, answered)
        # Text that is stable, ids that are not: the answer's first characters merge with the prompt's last, a
        # property of this row (an answer starting with a newline, say). Decoding would never see these ids.
        if answered_ids[: len(prompt_ids)] != prompt_ids or ids[: len(answered_ids)] != answered_ids:
            return Dropped("tokens merge across the border of an answer")
        spans.append((len(prompt_ids), len(answered_ids)))
    return spans


def _marked_spans(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    ids: list[int],
    eos_ids: Collection[int],
    kwargs: dict[str, Any],
) -> list[Span]:
    """Spans that the template marks with `{% generation %}`, made to follow our rule at both ends."""
    messages = conversation.messages
    out: Any = tokenizer.apply_chat_template(
        list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **kwargs
    )
    assert list(out["input_ids"]) == ids, "the template renders the same conversation to different ids"
    mask = [bool(flag) for flag in out["assistant_masks"]]
    if not any(mask):  # the template marks nothing at all, or the mask was lost on the way
        return []
    for i in range(1, len(ids)):  # a template may leave the end-of-turn token outside its mark; the model writes it
        if mask[i - 1] and not mask[i] and ids[i] in eos_ids and ids[i - 1] not in eos_ids:
            mask[i] = True
    for i, message in enumerate(messages):  # ... or have what the generation prompt supplies inside
        if message["role"] == "assistant":
            before = _tokenise(tokenizer, _render(tokenizer, messages[:i], False, kwargs))
            prompt = _tokenise(tokenizer, _render(tokenizer, messages[:i], True, kwargs))
            if ids[: len(prompt)] == prompt and prompt[: len(before)] == before:
                mask[len(before) : len(prompt)] = [False] * (len(prompt) - len(before))
    spans = []
    for flag, group in groupby(range(len(ids)), key=mask.__getitem__):
        if flag:
            indices = list(group)
            spans.append((indices[0], indices[-1] + 1))
    return spans


def _end_at_eos(span: Span, ids: Sequence[int], eos_ids: Collection[int]) -> Span:
    """The span up to its first end-of-turn token, which the model wrote; the template wrote what follows."""
    start, stop = span
    return start, next((i + 1 for i in range(start, stop) if ids[i] in eos_ids), stop)


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    max_length: int,
    *,
    eos_ids: Collection[int] = (),
    **template_kwargs: Any,
) -> TokenRow | Dropped:
    """Token ids of the rendered conversation and the spans that the assistant produced.

    Supervised: an answer's tokens and its end-of-turn token (the first of `eos_ids` in the turn; with none
    there, the whole turn). Not supervised: what the generation prompt supplies, what the template adds after
    the end of turn ("\\n").
    Messages after the last answer are left out. `max_length` (tokens) cuts ids and spans together.
    `template_kwargs` go to every rendering alike (`enable_thinking=False`).

    Raises ValueError where the tokenizer has no chat template, or the template is not prefix-stable.
    """
    template = _template(tokenizer)
    roles = [message["role"] for message in conversation.messages]
    if "assistant" not in roles:
        return Dropped(NO_SUPERVISED)
    if roles[0] == "assistant":
        return Dropped("assistant first")
    last = len(roles) - roles[::-1].index("assistant")
    conversation = Conversation(conversation.id, conversation.source, conversation.messages[:last])
    marked = bool(tokenizer.is_fast and _GENERATION_TAG.search(template))  # the mark needs character offsets
    try:
        full = _render(tokenizer, conversation.messages, False, template_kwargs)
        ids = _tokenise(tokenizer, full)
        if marked:
            spans: list[Span] | Dropped = _marked_spans(tokenizer, conversation, ids, eos_ids, template_kwargs)
        else:
            spans = _prefix_spans(tokenizer, conversation, full, ids, template_kwargs)
    except jinja2.TemplateSyntaxError:
        raise  # a broken template, not a row that it refuses
    except jinja2.TemplateError as error:
        return Dropped(f"the chat template refuses the row: {error}")
    if isinstance(spans, Dropped):
        return spans
    spans = [_end_at_eos(span, ids, eos_ids) for span in spans]
    kept = tuple((start, min(stop, max_length)) for start, stop in spans if start < min(stop, max_length))
    if not kept:
        return Dropped(NO_SUPERVISED)
    return TokenRow(conversation.id, tuple(ids[:max_length]), kept, conversation.source, len(ids) > max_length)


def encode_all(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterable[Conversation],
    max_length: int,
    eos_ids: Collection[int],
    *,
    data_name: str = "the data",
    **template_kwargs: Any,
) -> tuple[list[TokenRow], DropCounts]:
    """Encode every conversation; what gives no row is dropped and counted. `data_name` is for messages.

    Raises ValueError, before any training, where no row is left or under 1 % of the tokens are supervised.
    """
    rows: list[TokenRow] = []
    counts = DropCounts()
    for conversation in conversations:
        counts.rows_in += 1
        row = encode_conversation(tokenizer, conversation, max_length, eos_ids=eos_ids, **template_kwargs)
        if isinstance(row, Dropped):
            counts.add(row.reason)
        else:
            rows.append(row)
    counts.rows_out = len(rows)
    counts.check()
    where = f"{data_name}, with the chat template of {tokenizer.name_or_path!r} and data.max_length {max_length}"
    if not rows:
        raise ValueError(f"nothing to train on in {where}: {counts}; change data.path or data.max_length")
    total, supervised = sum(len(row.input_ids) for row in rows), sum(row.supervised for row in rows)
    if supervised < 0.01 * total:
        raise ValueError(
            f"{supervised} of {total} tokens are supervised in {where}, expected 1 % or more ({counts}); "
            "look at a row with describe_row, then change data.path or data.max_length"
        )
    return rows, counts


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase, eos_token_id: int | Sequence[int] | None) -> frozenset[int]:
    """The ids that end a turn: the generation config's `eos_token_id`, and the special token after an answer.

    They differ on some models (Gemma ends a turn with <end_of_turn> and a text with <eos>).
    """
    given = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    answer = "draftsmithprobe"
    _template(tokenizer)
    probe: list[Message] = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    rendered = _render(tokenizer, probe, False, {})
    after = rendered.rpartition(answer)[2] if answer in rendered else ""
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    first = [token for token in _tokenise(tokenizer, after.lstrip())[:1] if token in special]
    return frozenset([*given, *first])


def describe_row(tokenizer: PreTrainedTokenizerBase, row: TokenRow) -> str:
    """The row as text, special tokens included, with the supervised parts between ⟦ and ⟧."""
    parts: list[str] = []
    for supervised, group in groupby(range(len(row.input_ids)), key=row.loss_mask.__getitem__):
        ids = [row.input_ids[i] for i in group]
        text = str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        parts.append(f"⟦{text}⟧" if supervised else text)
    return "".join(parts) + (" [cut at the maximal length]" if row.truncated else "")

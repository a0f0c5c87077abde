"""Rows shown with their supervised tokens marked: what scripts/show_mask.py prints and writes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from html import escape
from itertools import islice

from transformers import PreTrainedTokenizerBase

from train.chat_mask import Dropped, encode_conversation, pieces
from train.config import RunConfig
from train.conversations import Conversation, TokenRow
from train.regenerate import load_tokenizer, stop_ids
from train.sources import Conversations
from train.stage import read_stage

_GREEN, _RESET = "\033[30;42m", "\033[0m"  # the background, so that spaces show
_NEWLINE = "↵"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline: a text must not steer the terminal

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Supervised tokens</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #8886; padding: .7rem; }}
mark {{ background: #7d78; color: inherit; }}
</style>
<h1>Supervised tokens</h1>
<p>{where}. What is trained on is <mark>marked</mark>; {newline} is a line break in it.</p>
{rows}
</html>
"""


@dataclass(frozen=True)
class Shown:
    """One row for the eye. `runs`: text and whether it is supervised, in order."""

    title: str
    runs: tuple[tuple[str, bool], ...]


def shown_rows(config: RunConfig, number: int, file: str | None = None) -> tuple[str, list[Shown]]:
    """Where the rows come from, and the first `number` of them.

    They are the prepared training rows of data.work_dir; where there are none, or with a `file` of conversations, they
    are rendered now, and conversations that give no row are shown with the reason.

    Raises ValueError where there is nothing to show: no prepared rows, and answers that are still to be made.
    """
    data = config.data
    tokenizer = load_tokenizer(config.target)
    if file is None and (stage := read_stage(config)) is not None:
        rows = [_shown(tokenizer, row) for row in islice(stage.train, number)]
        return f"{len(rows)} of {len(stage.train)} training rows in {data.work_dir}", rows
    if file is not None:
        shown = replace(data, path=file, layout="auto", split="train", subset=None, sources=(), answers="keep")
        config = replace(config, data=shown)
    elif not data.inputs or data.answers == "regenerate":
        raise ValueError(
            f"data.work_dir: {data.work_dir} holds no prepared rows; run scripts/make_conversations.py first, or give "
            "a file of answered conversations with --data"
        )
    conversations = Conversations(config.data, lambda text: print(text, file=sys.stderr))
    rows = list(_rendered(config, tokenizer, islice(conversations, number)))
    return f"the first {len(rows)} conversations of {', '.join(s.path for s in config.data.inputs)}", rows


def _rendered(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, conversations: Iterable[Conversation]
) -> Iterator[Shown]:
    data = config.data
    ends = stop_ids(config.target, data, tokenizer)
    for conversation in conversations:
        row = encode_conversation(
            tokenizer,
            conversation,
            data.max_length,
            eos_ids=ends,
            supervise=data.supervise,
            **data.template_kwargs,
        )
        if isinstance(row, Dropped):
            yield Shown(f"{conversation.id}: gives no row: {row.reason}", ())
        else:
            yield _shown(tokenizer, row)


def _shown(tokenizer: PreTrainedTokenizerBase, row: TokenRow) -> Shown:
    tokens = len(row.input_ids)
    spans = ", ".join(f"{start} to {stop - 1}" for start, stop in row.spans)
    title = f"{row.id}: {row.supervised} of {tokens} tokens supervised ({row.supervised / tokens:.0%}): {spans}"
    if row.truncated:
        title += "; answers lost to the length"
    return Shown(title, tuple(pieces(tokenizer, row)))


def _visible(text: str) -> str:
    """Control characters as escapes, but for tab and newline."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def as_text(rows: Iterable[Shown], colour: bool) -> str:
    """Supervised text on green; without colour, between ⟦ and ⟧."""
    out = []
    for row in rows:
        out.append(f"--- {_visible(row.title)}\n")
        for text, supervised in row.runs:
            text = _visible(text)
            if supervised and colour:  # line by line, or the terminal fills whole lines
                lines = text.replace("\n", f"{_NEWLINE}\n").split("\n")
                text = "\n".join(f"{_GREEN}{line}{_RESET}" if line else "" for line in lines)
            elif supervised:
                text = f"⟦{text}⟧"
            out.append(text)
        out.append("\n\n" if row.runs else "\n")
    return "".join(out)


def as_html(where: str, rows: Iterable[Shown]) -> str:
    """A page that needs nothing else."""
    sections = []
    for row in rows:
        parts = []
        for text, supervised in row.runs:
            text = escape(_visible(text))
            parts.append("<mark>" + text.replace("\n", f"{_NEWLINE}\n") + "</mark>" if supervised else text)
        body = f"\n<pre>{''.join(parts)}</pre>" if parts else ""
        sections.append(f"<h2>{escape(_visible(row.title))}</h2>{body}")
    return _PAGE.format(where=escape(where), newline=_NEWLINE, rows="\n".join(sections))

"""The data stage: from the config's data section to token rows on disk, split once.

Writes to data.work_dir: rows_train.jsonl, rows_held_out.jsonl, held_out_prompts.jsonl (first user turns, for
`infer/generate.py --eval`) and stage.json, last, which says what they were made from. Finished, it is not redone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from heads.adapter import adapter_digest
from heads.fingerprint import tokenizer_digest
from train.answering import template_parts
from train.chat_mask import check_supervised, describe_row, encode_each
from train.config import DataConfig, RunConfig, SourceConfig
from train.conversations import (
    Conversation,
    DropCounts,
    TokenRow,
    TokenRows,
    is_held_out,
    read_rows,
    row_writer,
    split_rows,
    write_rows,
)
from train.digests import template_digest
from train.files import differences, remove_leftovers, write_text
from train.raw_rows import fingerprint
from train.regenerate import answers_record, load_tokenizer, make_rows, stop_ids
from train.sources import Conversations

_TRAIN, _HELD_OUT, _PROMPTS, _STAGE = "rows_train.jsonl", "rows_held_out.jsonl", "held_out_prompts.jsonl", "stage.json"


@dataclass(frozen=True)
class Rows:
    """Rows of both sides and the stage's own record."""

    train: Sequence[TokenRow]
    held_out: Sequence[TokenRow]
    record: dict[str, Any]


def stage_key(config: RunConfig) -> dict[str, Any]:
    """Everything the rows depend on, and nothing else."""
    data = config.data
    used = ["max_length", "supervise", "template_kwargs", "max_rows", "held_out", "seed"]
    if not data.inputs or data.answers == "regenerate":
        used += ["answers", "answer_tokens", "answer_temperature", "greedy_fraction", "top_k", "batch_size"]
        used += ["endpoint", "endpoint_model"]
    if not data.inputs:
        used += ["tokens", "prompt_tokens", "prompt_temperature"]
    key: dict[str, Any] = {"schema": 3}
    key |= {f"target.{name}": getattr(config.target, name) for name in ("path", "revision", "dtype", "adapter")}
    key["target.adapter_sha256"] = adapter_digest(config.target.adapter)
    tokenizer = load_tokenizer(config.target)
    key["target.tokenizer_sha256"] = tokenizer_digest(tokenizer)
    key["target.template_sha256"] = template_digest(tokenizer)
    key |= {f"data.{name}": getattr(data, name) for name in used}
    if data.inputs:
        key["data.sources"] = [asdict(source) | {"sha256": fingerprint(source)} for source in data.inputs]
        key["data.exclude"] = [[path, fingerprint(SourceConfig(path))] for path in data.exclude]
        key["data.duplicates"] = data.duplicates
    return key


def read_stage(config: RunConfig) -> Rows | None:
    """The finished stage, or None.

    Raises:
        ValueError: the directory holds a finished stage made from other settings (each difference is named).
    """
    folder = Path(config.data.work_dir)
    if not (folder / _STAGE).is_file():
        return None
    record = json.loads((folder / _STAGE).read_text())
    wrong = differences(record["key"], stage_key(config))
    if wrong:
        raise ValueError(
            f"data.work_dir: {folder} holds rows made from other settings ({wrong}); "
            "choose another data.work_dir or remove it"
        )
    return Rows(read_rows(folder / _TRAIN), read_rows(folder / _HELD_OUT), record)


def read_further(config: RunConfig) -> list[Rows]:
    """The finished stages in data.also.

    Raises:
        ValueError: one is not finished, or was made by another target.
    """
    found = []
    key = stage_key(config)
    for folder in config.data.also:
        path = Path(folder) / _STAGE
        if not path.is_file():
            raise ValueError(f"data.also: {folder} holds no {_STAGE}; expected a data.work_dir with finished rows")
        record = json.loads(path.read_text())
        wanted = {name: value for name, value in key.items() if name.startswith("target.")}
        wrong = differences({name: record["key"].get(name) for name in wanted}, wanted)
        if wrong:
            raise ValueError(f"data.also: {folder} holds rows of another target ({wrong}); leave it out")
        found.append(Rows(read_rows(Path(folder) / _TRAIN), read_rows(Path(folder) / _HELD_OUT), record))
    return found


def read_held_out(work_dir: str | Path, target: str) -> Sequence[TokenRow]:
    """The held-out rows of a finished stage for this target, whatever its other settings were.

    Raises:
        ValueError: no finished stage there, or one of another target.
    """
    folder = Path(work_dir)
    if not (folder / _STAGE).is_file():
        raise ValueError(f"--data: {folder} holds no {_STAGE}; expected a data.work_dir with finished rows")
    made_for = json.loads((folder / _STAGE).read_text())["key"]["target.path"]
    if made_for != target:
        raise ValueError(f"--data: {folder} holds rows of target {made_for!r}, expected those of {target!r}")
    return read_rows(folder / _HELD_OUT)


def prepare_rows(config: RunConfig, device: str, log: Callable[[str], None] = print) -> Rows:
    """Runs what is missing of the stage and returns its rows.

    Raises:
        ValueError: bad data or settings, before any long work where they can be seen.
    """
    done = read_stage(config)
    if done is not None:
        log(f"data: {len(done.train)} training and {len(done.held_out)} held-out rows found in {config.data.work_dir}")
        return done
    folder = Path(config.data.work_dir)
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    tokenizer = load_tokenizer(config.target)
    made = _Made()
    train, held_out = _split_to_disk(config, _usable(_make(config, tokenizer, device, log, made), made))
    counts, rows = made.counts, [train, held_out]
    cut = sum(row.truncated for side in rows for row in side)
    log(f"data: {counts}" + (f"; {cut} lost answers to their length" if cut else ""))
    total = sum(len(row.input_ids) for side in rows for row in side)
    check_supervised(sum(row.supervised for side in rows for row in side), total, counts, _names(config.data))
    if not train or not held_out:
        raise ValueError(
            f"data.path: {_names(config.data)} gave {counts.rows_out} usable rows ({counts}); "
            "expected at least 2 with different prompts, one to train on and one held out"
        )
    _write_prompts(folder / _PROMPTS, held_out, tokenizer, log, config.data.template_kwargs)
    record = {
        "key": stage_key(config),
        "rows_in": counts.rows_in,
        "dropped": counts.reasons,
        "sources": made.sources,
        "train_rows": len(train),
        "held_out_rows": len(held_out),
        "supervised_tokens": sum(r.supervised for r in train),
        "tokens": sum(len(r.input_ids) for r in train),
        "truncated_rows": cut,
        "answers": answers_record(folder),
    }
    write_text(folder / _STAGE, json.dumps(record, indent=2) + "\n")
    log(f"data: {len(train)} training rows ({record['supervised_tokens']} answer tokens), {len(held_out)} held out")
    log(
        "data: a row as it is trained on, supervised text between ⟦ and ⟧:\n" + describe_row(tokenizer, train[0])[:1200]
    )
    return Rows(train, held_out, record)


@dataclass
class _Made:
    """What became of the rows: complete when the last row is there."""

    counts: DropCounts = field(default_factory=DropCounts)
    sources: list[dict[str, Any]] = field(default_factory=list)


def _usable(rows: Iterable[TokenRow], made: _Made) -> Iterator[TokenRow]:
    """The first token of an answer comes from the target's prefill: an answer of one token trains nothing."""
    short = 0
    for row in rows:
        if any(end - start >= 2 for start, end in row.spans):
            yield row
        else:
            short += 1
    made.counts.rows_out -= short
    if short:
        made.counts.reasons["answers of one token"] = short
    made.counts.check()


def _split_to_disk(config: RunConfig, rows: Iterable[TokenRow]) -> tuple[TokenRows, TokenRows]:
    """Writes each row to its side as it comes. A side that stays empty gets rows as in `split_rows`."""
    data, folder = config.data, Path(config.data.work_dir)
    with row_writer(folder / _TRAIN) as train, row_writer(folder / _HELD_OUT) as held_out:
        for row in rows:
            (held_out if is_held_out(row.split_key, data.held_out, data.seed) else train)(row)
    sides = read_rows(folder / _TRAIN), read_rows(folder / _HELD_OUT)
    if all(sides):
        return sides
    for name, side in zip((_TRAIN, _HELD_OUT), split_rows(sides[0] or sides[1], data.held_out, data.seed), strict=True):
        write_rows(folder / name, side)
    return read_rows(folder / _TRAIN), read_rows(folder / _HELD_OUT)


def _names(data: DataConfig) -> str:
    return ", ".join(source.path for source in data.inputs) or "self-synthesis"


def _make(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, device: str, log: Callable[[str], None], made: _Made
) -> Iterator[TokenRow]:
    data = config.data
    if not data.inputs:
        log(f"data: self-synthesis until {data.tokens} answer tokens are there")
        rows, made.counts = make_rows(config.target, data, None, device=device, log=log)
        yield from rows
        return
    if data.answers == "regenerate":
        conversations = Conversations(data, log, _prompt_only)
        rows, counts = make_rows(config.target, data, list(conversations), device=device, log=log)
        yield from (replace(row, spans=row.spans[-1:]) for row in rows) if data.supervise == "last" else rows
    else:
        conversations, counts = Conversations(data, log), DropCounts()
        ends, answered = stop_ids(config.target, data, tokenizer), _with_answers(conversations, data)
        options = {"data_name": _names(data), "supervise": data.supervise, **data.template_kwargs}
        yield from encode_each(tokenizer, answered, data.max_length, ends, counts, **options)
    made.counts, made.sources = _joined(conversations.counts, counts), conversations.record


def _with_answers(conversations: Conversations, data: DataConfig) -> Iterator[Conversation]:
    """Raises ValueError, after the last, where none has an answer."""
    answered = False
    for conversation in conversations:
        answered = answered or not conversation.is_prompt
        yield conversation
    if not answered:
        raise ValueError(f"data.answers: {_names(data)} holds prompts only; set data.answers: regenerate")


def _joined(read: DropCounts, made: DropCounts) -> DropCounts:
    """Both steps as one: rows read in, rows made out."""
    reasons = dict(read.reasons)
    for reason, number in made.reasons.items():
        reasons[reason] = reasons.get(reason, 0) + number
    return DropCounts(read.rows_in, made.rows_out, reasons)


def _prompt_only(conversation: Conversation) -> Conversation:
    """The turns to be answered. Results of tools cannot be made anew, so it ends before the first call."""
    calls = [i for i, message in enumerate(conversation.messages) if "tool_calls" in message]
    kept = conversation.messages[: calls[0] if calls else None]
    return replace(conversation, messages=tuple(message for message in kept if message["role"] != "assistant"))


def _write_prompts(
    path: Path,
    rows: Sequence[TokenRow],
    tokenizer: PreTrainedTokenizerBase,
    log: Callable[[str], None],
    template_kwargs: dict[str, Any],
) -> None:
    """First user turns as text, of the rows whose prompt is the template around one user message."""
    try:
        parts = template_parts(tokenizer, **template_kwargs)
    except ValueError as error:
        log(f"data: {path.name} stays empty: {error}")
        write_text(path, "")
        return
    out = []
    for row in rows:
        ids = list(row.input_ids[: row.spans[0][0]])
        text = str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if text.startswith(parts.before_user) and text.endswith(parts.after_user):
            content = text[len(parts.before_user) : len(text) - len(parts.after_user)]
            out.append({"id": row.id, "category": row.source, "messages": [{"role": "user", "content": content}]})
    write_text(path, "".join(json.dumps(p) + "\n" for p in out))

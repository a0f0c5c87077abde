"""The data stage: from the config's data section to token rows on disk, split once.

Writes to data.work_dir: rows_train.jsonl, rows_held_out.jsonl, held_out_prompts.jsonl (first user turns, for
`infer/generate.py --eval`) and stage.json, last, which says what they were made from. Finished, it is not redone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from heads.adapter import adapter_digest
from heads.embedded import resolve_target
from train.answering import template_parts
from train.chat_mask import describe_row, encode_all, end_of_turn_ids
from train.config import RunConfig
from train.conversations import (
    Conversation,
    DropCounts,
    TokenRow,
    read_conversations,
    read_rows,
    split_rows,
    write_rows,
)
from train.files import differences, write_text
from train.regenerate import load_tokenizer, make_rows

_TRAIN, _HELD_OUT, _PROMPTS, _STAGE = "rows_train.jsonl", "rows_held_out.jsonl", "held_out_prompts.jsonl", "stage.json"


@dataclass(frozen=True)
class Rows:
    """Rows of both sides and the stage's own record."""

    train: list[TokenRow]
    held_out: list[TokenRow]
    record: dict[str, Any]


def stage_key(config: RunConfig) -> dict[str, Any]:
    """Everything the rows depend on, and nothing else."""
    data = config.data
    used = ["path", "max_length", "max_rows", "held_out", "seed"]
    if data.path is None or data.answers == "regenerate":
        used += ["answers", "answer_tokens", "answer_temperature", "greedy_fraction", "top_k", "batch_size"]
    if data.path is None:
        used += ["tokens", "prompt_tokens", "prompt_temperature"]
    key: dict[str, Any] = {"schema": 1}
    key |= {f"target.{name}": getattr(config.target, name) for name in ("path", "revision", "dtype", "adapter")}
    key["target.adapter_sha256"] = adapter_digest(config.target.adapter)
    key |= {f"data.{name}": getattr(data, name) for name in used}
    if data.path is not None:
        key["data.sha256"] = hashlib.sha256(_existing(data.path).read_bytes()).hexdigest()
    return key


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise ValueError(f"data.path: {path} is not a file; expected JSONL of conversations or prompts")
    return Path(path)


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


def read_held_out(work_dir: str | Path, target: str) -> list[TokenRow]:
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
    tokenizer = load_tokenizer(config.target)
    made, counts = _make(config, tokenizer, device, log)
    # The first token of an answer comes from the target's prefill: an answer of one token trains nothing.
    rows = [row for row in made if any(end - start >= 2 for start, end in row.spans)]
    for _ in range(len(made) - len(rows)):
        counts.add("answers of one token")
    counts.rows_out = len(rows)
    counts.check()
    log(f"data: {counts}")
    train, held_out = split_rows(rows, config.data.held_out, config.data.seed)
    if not train or not held_out:
        raise ValueError(
            f"data.path: {config.data.path or 'self-synthesis'} gave {len(rows)} usable rows ({counts}); "
            "expected at least 2 with different prompts, one to train on and one held out"
        )
    write_rows(folder / _TRAIN, train)
    write_rows(folder / _HELD_OUT, held_out)
    _write_prompts(folder / _PROMPTS, held_out, tokenizer, log)
    record = {
        "key": stage_key(config),
        "rows_in": counts.rows_in,
        "dropped": counts.reasons,
        "train_rows": len(train),
        "held_out_rows": len(held_out),
        "supervised_tokens": sum(r.supervised for r in train),
        "tokens": sum(len(r.input_ids) for r in train),
        "truncated_rows": sum(r.truncated for r in rows),
    }
    write_text(folder / _STAGE, json.dumps(record, indent=2) + "\n")
    log(f"data: {len(train)} training rows ({record['supervised_tokens']} answer tokens), {len(held_out)} held out")
    log(
        "data: a row as it is trained on, supervised text between ⟦ and ⟧:\n" + describe_row(tokenizer, train[0])[:1200]
    )
    return Rows(train, held_out, record)


def _make(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, device: str, log: Callable[[str], None]
) -> tuple[list[TokenRow], DropCounts]:
    data = config.data
    if data.path is None:
        log(f"data: self-synthesis until {data.tokens} answer tokens are there")
        return make_rows(config.target, data, None, device=device, log=log)
    conversations, counts = read_conversations(_existing(data.path))
    log(f"data: {data.path}: {counts}")
    if data.max_rows is not None:
        conversations = conversations[: data.max_rows]
    if data.answers == "regenerate":
        prompts = [_prompt_only(c) for c in conversations]
        rows, made = make_rows(config.target, data, prompts, device=device, log=log)
        return rows, _joined(counts, len(prompts), made)
    if all(c.is_prompt for c in conversations):
        raise ValueError(f"data.answers: {data.path} holds prompts only; set data.answers: regenerate")

    eos = None
    try:
        path = resolve_target(config.target.path, config.target.cache_dir)
        eos = GenerationConfig.from_pretrained(path, revision=config.target.revision or "main").eos_token_id
    except OSError:
        eos = tokenizer.eos_token_id  # no generation config: the template's own terminator is added below
    ends = end_of_turn_ids(tokenizer, eos)
    rows, made = encode_all(tokenizer, conversations, data.max_length, ends, data_name=data.path)
    return rows, _joined(counts, len(conversations), made)


def _joined(read: DropCounts, used: int, made: DropCounts) -> DropCounts:
    """Both steps as one: rows of the file in, rows made out."""
    reasons = dict(read.reasons)
    if used < read.rows_out:
        reasons["beyond data.max_rows"] = read.rows_out - used
    for reason, number in made.reasons.items():
        reasons[reason] = reasons.get(reason, 0) + number
    return DropCounts(read.rows_in, made.rows_out, reasons)


def _prompt_only(conversation: Conversation) -> Conversation:
    kept = tuple(m for m in conversation.messages if m["role"] != "assistant")
    return Conversation(conversation.id, conversation.source, kept)


def _write_prompts(
    path: Path, rows: Sequence[TokenRow], tokenizer: PreTrainedTokenizerBase, log: Callable[[str], None]
) -> None:
    """First user turns as text, of the rows whose prompt is the template around one user message."""
    try:
        parts = template_parts(tokenizer)
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

"""Prompt sets: reading them, choosing an even part of one, and rendering a prompt to token ids."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2


@dataclass(frozen=True)
class Prompt:
    """One user turn to be answered. system: text of a system turn before it, or None."""

    id: str
    category: str
    text: str
    system: str | None = None


def read_prompts(path: str | os.PathLike[str], option: str = "--eval") -> list[Prompt]:
    """Reads JSON lines that have `turns` (Spec-Bench), `messages`, `conversations` (ShareGPT) or `prompt`.

    Only the first user turn of a row is used, with the system turn before it if there is one. `category` and
    an id (`question_id`, `id`) are taken where they are; else the category is "all" and the id the line
    number. Errors name the command line's `option`.

    Raises:
        ValueError: no such file, not JSON lines, a row of another form, or no row at all.
    """
    prompts: list[Prompt] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    prompts.append(_read_row(line, number, f"{option} {path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option}: cannot read {path}: {error}") from error
    if not prompts:
        raise ValueError(f"{option}: {path} holds no prompt, expected JSON lines; give another file")
    return prompts


def _read_row(line: str, number: int, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a {type(row).__name__}, expected an object")
    text, system = _first_user_turn(row)
    if not isinstance(text, str) or not text:
        raise ValueError(
            f"{where}: no user text found among the keys {sorted(row)}; expected `turns` (texts), "
            "`messages` (role, "
            "content), `conversations` (from, value) or `prompt` (text)"
        )
    name = row.get("question_id", row.get("id", number))
    return Prompt(str(name), str(row.get("category") or "all"), text, system)


def _first_user_turn(row: dict[str, Any]) -> tuple[Any, str | None]:
    if isinstance(row.get("turns"), list) and row["turns"]:
        return row["turns"][0], None
    for key, role_key, text_key in (("messages", "role", "content"), ("conversations", "from", "value")):
        turns = row.get(key)
        if not isinstance(turns, list):
            continue
        system: str | None = None
        for turn in turns:
            if not isinstance(turn, dict):
                return None, None
            role, text = turn.get(role_key), turn.get(text_key)
            if role == "system" and isinstance(text, str):
                system = text
            if role in ("user", "human"):
                return text, system
    return row.get("prompt"), None


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """`limit` prompts spread evenly over categories and within each; always the same ones, in file order.

    Categories with fewer prompts than their share give all; the others take over the rest, a prompt each in
    turn.

    Raises:
        ValueError: limit < 1.
    """
    if limit is None:
        return list(prompts)
    if limit < 1:
        raise ValueError(f"--limit is {limit}, expected 1 or more")
    places: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        places.setdefault(prompt.category, []).append(index)
    share = dict.fromkeys(places, 0)
    left = min(limit, len(prompts))
    while left:
        for name in [name for name in places if share[name] < len(places[name])][:left]:
            share[name] += 1
            left -= 1
    chosen = [where[i * len(where) // share[name]] for name, where in places.items() for i in range(share[name])]
    return [prompts[index] for index in sorted(chosen)]


def counts_by_category(prompts: Sequence[Prompt]) -> str:
    """For example "writing 7, math 6"."""
    counts: dict[str, int] = {}
    for prompt in prompts:
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def add_prompt_options(parser: argparse._ActionsContainer) -> None:
    """How prompts become token ids: --raw and --template-kwargs."""
    parser.add_argument("--raw", action="store_true", help="no chat template: decode from the bare text")
    parser.add_argument(
        "--template-kwargs",
        type=_read_kwargs,
        default={},
        metavar="JSON",
        help="arguments for the chat template, as in the head's data.template_kwargs: '{\"enable_thinking\": false}'",
    )


def _read_kwargs(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a JSON object")
    return found


def encode_prompt(tokenizer: Any, prompt: Prompt, raw: bool, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Token ids of the prompt: through the chat template up to the start of the answer, or `raw`.

    The template writes its own special tokens; raw text gets those that the tokenizer adds by itself.

    Raises:
        ValueError: the tokenizer has no chat template, the template refuses the prompt, or there are arguments for
            it, but it is not used.
    """
    if raw:
        if template_kwargs:
            raise ValueError("--template-kwargs are for the chat template, which --raw leaves out: give one of them")
        return list(tokenizer(prompt.text, verbose=False)["input_ids"])
    messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    return encode_messages(
        tokenizer, [*messages, {"role": "user", "content": prompt.text}], f"prompt {prompt.id}", template_kwargs
    )


def encode_messages(
    tokenizer: Any, messages: Sequence[dict[str, str]], what: str, template_kwargs: Mapping[str, Any]
) -> list[int]:
    """Token ids of a conversation through the chat template, up to the start of the next answer.

    template_kwargs: extra arguments of the template.

    Raises:
        ValueError: the tokenizer has no chat template, or the template refuses the conversation (`what` names it).
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; use --raw to decode from the bare text"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **template_kwargs
        )
    except (jinja2.TemplateError, TypeError) as error:  # TypeError: an argument that the library gives itself
        raise ValueError(f"{what}: the chat template refuses it: {error}") from error
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

"""Answers and invented prompts: what one process makes of one wave of work.

Self-synthesis (no data set): the target reads its own chat template up to the start of a user turn and invents the
prompt, then answers it (the idea of Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from heads.target import TargetAdapter
from infer.batched import decode_batch
from train.chat_mask import end_of_turn_ids
from train.config import DataConfig
from train.conversations import Conversation, DropCounts, TokenRow

_MARK = "\u2402draftsmith\u2403"  # stands for a message's text while the template is taken apart


@dataclass(frozen=True)
class Wave:
    """One unit of work. `prompts`: conversations to answer, or None to invent `rows` prompts."""

    index: int
    rows: int
    prompts: tuple[Conversation, ...] | None


@dataclass(frozen=True)
class TemplateParts:
    """The chat template taken apart, as text.

    before_user: everything up to the first user text; after_user: from there to where the answer starts;
    between: from the end of an answer to the start of the next user text (end-of-turn token included).
    """

    before_user: str
    after_user: str
    between: str


def template_parts(tokenizer: PreTrainedTokenizerBase) -> TemplateParts:
    """Takes the template apart by rendering marked messages.

    Raises:
        ValueError: the template changes or drops message texts, so it cannot be taken apart.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("target.path: the tokenizer has no chat template; choose a chat model or give data.path")

    def render(*texts: str) -> list[str]:
        roles = ["user", "assistant"] * len(texts)
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        out = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return str(out).split(_MARK)

    one, three = render(_MARK), render(_MARK, _MARK, _MARK)
    if len(one) != 2 or len(three) != 4:
        raise ValueError("target.path: its chat template alters or drops message texts; give data.path instead")
    return TemplateParts(one[0], one[1], three[2])


class Answerer:
    """A loaded target with its template, answering waves. One per worker process."""

    def __init__(self, target: TargetAdapter, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
        self.target, self.tokenizer, self.data = target, tokenizer, data
        self.parts = template_parts(tokenizer)
        self.stops = end_of_turn_ids(tokenizer, sorted(target.eos_ids))

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def run(self, wave: Wave, on_tokens: Callable[[int], None] | None = None) -> dict[str, Any]:
        """Decodes one wave. Returns {"rows": [...], "counts": {...}, "tokens": answer tokens made}."""
        generator = torch.Generator().manual_seed(self.data.seed * 1_000_003 + wave.index)
        counts = DropCounts(rows_in=wave.rows)
        prompts = wave.prompts if wave.prompts is not None else self.invent(wave, generator, counts, on_tokens)
        rows = self.answer(prompts, generator, counts, on_tokens) if prompts else []
        counts.rows_out = len(rows)
        counts.check()
        return {
            "wave": wave.index,
            "tokens": sum(row.supervised for row in rows),
            "counts": {"rows_in": counts.rows_in, "rows_out": counts.rows_out, "reasons": counts.reasons},
            "rows": [asdict(row) for row in rows],
        }

    def invent(
        self,
        wave: Wave,
        generator: torch.Generator,
        counts: DropCounts,
        on_tokens: Callable[[int], None] | None,
    ) -> tuple[Conversation, ...]:
        """Lets the target write user turns."""
        prefix = self.ids(self.parts.before_user)
        made = decode_batch(
            self.target,
            [prefix] * wave.rows,
            [self.data.prompt_temperature] * wave.rows,
            self.data.top_k,
            self.data.prompt_tokens,
            generator,
            self.stops,
            on_tokens,
        )
        prompts = []
        for row, ids in enumerate(made):
            finished = ids[-1] in self.stops
            words = ids[:-1] if finished else ids
            text = str(
                self.tokenizer.decode(words, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            ).strip()
            if not finished:
                counts.add("invented prompt not finished")
            elif len(ids) < 4 or not text:
                counts.add("invented prompt too short")
            elif any(token in text for token in self.tokenizer.all_special_tokens):
                counts.add("invented prompt holds special tokens")
            elif is_degenerate(ids):
                counts.add("invented prompt repeats itself")
            else:
                message = {"role": "user", "content": text}
                prompts.append(Conversation(f"self-{wave.index}-{row}", "self-synthesis", (message,)))
        return tuple(prompts)

    def answer(
        self,
        prompts: Sequence[Conversation],
        generator: torch.Generator,
        counts: DropCounts,
        on_tokens: Callable[[int], None] | None,
    ) -> list[TokenRow]:
        """Answers every user turn of every prompt, turn by turn.

        The ids trained on are the rendered prompt followed by the raw generated ids, never a decoded and
        re-encoded text. A conversation ends early at an answer that was cut or at `data.max_length`.
        """
        users = [[m["content"] for m in prompt.messages if m["role"] == "user"] for prompt in prompts]
        ids: list[list[int]] = []
        for prompt, turns in zip(prompts, users, strict=True):
            system = [m for m in prompt.messages if m["role"] == "system"]
            first = [*system, {"role": "user", "content": turns[0]}]
            text = self.tokenizer.apply_chat_template(first, tokenize=False, add_generation_prompt=True)
            ids.append(self.ids(str(text)))
        spans: list[list[tuple[int, int]]] = [[] for _ in prompts]
        open_rows = []
        for row, row_ids in enumerate(ids):
            if len(row_ids) + 8 > self.data.max_length:
                counts.add("prompt longer than data.max_length")
            else:
                open_rows.append(row)
        kept = set(open_rows)
        coin = torch.rand(len(prompts), generator=generator)
        temperatures = [0.0 if c < self.data.greedy_fraction else self.data.answer_temperature for c in coin.tolist()]
        for turn in range(max((len(u) for u in users), default=0)):
            if not open_rows:
                break
            room = self.data.max_length - min(len(ids[row]) for row in open_rows)
            new = decode_batch(
                self.target,
                [ids[row] for row in open_rows],
                [temperatures[row] for row in open_rows],
                self.data.top_k,
                min(self.data.answer_tokens, room),
                generator,
                self.stops,
                on_tokens,
            )
            still_open = []
            for row, tokens in zip(open_rows, new, strict=True):
                tokens = tokens[: self.data.max_length - len(ids[row])]
                start = len(ids[row])
                ids[row] += tokens
                spans[row].append((start, len(ids[row])))
                if turn + 1 < len(users[row]) and tokens[-1] in self.stops:
                    glue = self.ids(self.parts.between + users[row][turn + 1] + self.parts.after_user)
                    glue = glue[1:] if glue[0] in self.stops else glue  # the answer brought its own end of turn
                    if len(ids[row]) + len(glue) + 8 <= self.data.max_length:
                        ids[row] += glue
                        still_open.append(row)
            open_rows = still_open
        made = [self._row(prompts[k], ids[k], spans[k], counts) for k in sorted(kept)]
        return [row for row in made if row is not None]

    def _row(
        self, prompt: Conversation, ids: list[int], spans: list[tuple[int, int]], counts: DropCounts
    ) -> TokenRow | None:
        if all(end - start < 2 for start, end in spans):
            counts.add("empty answer")
            return None
        if any(is_degenerate(ids[a:b]) for a, b in spans):
            counts.add("answer repeats itself")
            return None
        end = spans[-1][1]
        return TokenRow(prompt.id, tuple(ids[:end]), tuple(spans), prompt.source, ids[end - 1] not in self.stops)


def is_degenerate(ids: Sequence[int], gram: int = 4, least: float = 0.35) -> bool:
    """True for a text stuck in a loop: under 35 % of its 4-grams are distinct (texts of 48 tokens and more)."""
    if len(ids) < 48:
        return False
    grams = [tuple(ids[i : i + gram]) for i in range(len(ids) - gram + 1)]
    return len(set(grams)) < least * len(grams)

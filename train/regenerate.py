"""Answers by the target, and prompts too: the stage that turns prompts (or nothing) into token rows.

Work is cut into waves of `data.batch_size` rows. A wave depends on the seed, its number and its prompts only, is
decoded by one single-threaded process, and is written whole or not at all; a killed run goes on with the missing
waves, and the result does not depend on how many processes made it.

Self-synthesis (no data set): the target reads its own chat template up to the start of a user turn and invents the
prompt, then answers it (the idea of Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from heads.embedded import resolve_target
from heads.target import TargetAdapter
from infer.batched import decode_batch
from train.chat_mask import end_of_turn_ids
from train.config import DataConfig, TargetConfig
from train.conversations import Conversation, DropCounts, TokenRow

_MARK = "\u2402draftsmith\u2403"  # stands for a message's text while the template is taken apart
_PROGRESS_SECONDS = 15.0


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


# ---- one wave, in a worker process ---------------------------------------------------------------------------


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
            text = str(self.tokenizer.decode(ids[:-1] if finished else ids, skip_special_tokens=False)).strip()
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
        if len(spans) == 1 and spans[0][1] - spans[0][0] < 2:
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


_worker: Answerer
_counter: Any = None


def _start_worker(target: TargetConfig, data: DataConfig, device: str, counter: Any) -> None:
    global _worker, _counter
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    _counter = counter
    adapter, tokenizer = load_target(target, device)
    _worker = Answerer(adapter, tokenizer, data)


def _run_wave(wave: Wave, path: Path) -> dict[str, Any]:
    def count(tokens: int) -> None:
        with _counter.get_lock():
            _counter.value += tokens

    started = time.perf_counter()
    result = _worker.run(wave, count)
    result["seconds"] = round(time.perf_counter() - started, 2)
    tmp = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    tmp.write_text(json.dumps(result))
    os.replace(tmp, path)
    return result


def load_target(target: TargetConfig, device: str) -> tuple[TargetAdapter, PreTrainedTokenizerBase]:
    """The adapter and tokenizer that a target config names."""
    adapter = TargetAdapter.load(
        target.path,
        dtype=target.dtype,
        device=device,
        revision=target.revision,
        trust_remote_code=target.trust_remote_code,
        cache_dir=target.cache_dir,
    )
    return adapter, load_tokenizer(target)


def load_tokenizer(target: TargetConfig) -> PreTrainedTokenizerBase:
    path = resolve_target(target.path, target.cache_dir)
    try:
        return AutoTokenizer.from_pretrained(path, revision=target.revision, trust_remote_code=target.trust_remote_code)
    except OSError as error:
        raise ValueError(f"target.path: cannot load a tokenizer from {path!r}: {error}") from error


# ---- all waves, in the main process --------------------------------------------------------------------------


def make_rows(
    target: TargetConfig,
    data: DataConfig,
    conversations: Sequence[Conversation] | None,
    *,
    device: str = "cpu",
    log: Callable[[str], None] = print,
) -> tuple[list[TokenRow], DropCounts]:
    """Answers `conversations`, or invents and answers prompts until `data.tokens` answer tokens are there.

    Finished waves under data.work_dir/waves are reused. Rows come in the order of their waves, duplicates (same
    prompt) dropped.

    Raises:
        ValueError: data.work_dir holds waves made with other settings (each difference is named), or the target
            makes nothing usable.
    """
    folder = Path(data.work_dir) / "waves"
    folder.mkdir(parents=True, exist_ok=True)
    _check_manifest(Path(data.work_dir) / "waves.json", wave_key(target, data, conversations))
    budget = data.tokens if conversations is None else None
    results = _run_waves(target, data, list(_waves(data, conversations)), folder, budget, device, log)
    rows: list[TokenRow] = []
    counts, seen, total = DropCounts(), set(), 0
    for result in results:
        counts.rows_in += result["counts"]["rows_in"]
        for reason, number in result["counts"]["reasons"].items():
            counts.reasons[reason] = counts.reasons.get(reason, 0) + number
        for raw in result["rows"]:
            row = TokenRow(
                raw["id"],
                tuple(raw["input_ids"]),
                tuple((a, b) for a, b in raw["spans"]),
                raw["source"],
                raw["truncated"],
            )
            if row.split_key in seen:
                counts.add("duplicate prompt")
            elif data.max_rows is not None and len(rows) >= data.max_rows:
                counts.add("beyond data.max_rows")
            else:
                seen.add(row.split_key)
                rows.append(row)
        total += result["tokens"]
    counts.rows_out = len(rows)
    counts.check()
    if not rows:
        raise ValueError(f"target.path: {target.path} made no usable row ({counts}); give conversations in data.path")
    return rows, counts


def _waves(data: DataConfig, conversations: Sequence[Conversation] | None) -> Iterator[Wave]:
    if conversations is None:
        for index in range(1_000_000):  # cut by the token budget
            yield Wave(index, data.batch_size, None)
            if index > 20 + 20 * data.tokens // data.batch_size:
                return
    else:
        # Rows of similar length share a wave, so that little is padding. The order is fixed by the rows alone.
        by_length = sorted(conversations, key=lambda c: (sum(len(m["content"]) for m in c.messages), c.content_key))
        for index, start in enumerate(range(0, len(by_length), data.batch_size)):
            prompts = tuple(by_length[start : start + data.batch_size])
            yield Wave(index, len(prompts), prompts)


def _run_waves(
    target: TargetConfig,
    data: DataConfig,
    waves: Sequence[Wave],
    folder: Path,
    budget: int | None,
    device: str,
    log: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Results of the first waves that reach the budget (or of all), running what is missing."""
    path = {wave.index: folder / f"{wave.index:06d}.json" for wave in waves}
    results: dict[int, dict[str, Any]] = {}
    for wave in waves:
        if path[wave.index].is_file():
            results[wave.index] = json.loads(path[wave.index].read_text())
    if results:
        log(f"data: {len(results)} finished waves found in {folder}")
    missing = iter([wave for wave in waves if wave.index not in results])

    def enough() -> int | None:
        """How many leading waves suffice, or None."""
        tokens = 0
        for number, wave in enumerate(waves):
            if wave.index not in results:
                return None
            tokens += results[wave.index]["tokens"]
            if budget is not None and tokens >= budget:
                return number + 1
        return len(waves)

    if (number := enough()) is not None:
        return [results[wave.index] for wave in waves[:number]]
    processes = data.processes or (os.cpu_count() or 1 if device == "cpu" else 1)
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    progress = _Progress(counter, budget, len(waves), log)
    pool = ProcessPoolExecutor(processes, context, _start_worker, (target, data, device, counter))
    try:
        running: dict[Future[dict[str, Any]], Wave] = {}
        while (number := enough()) is None:
            while len(running) < processes and (todo := next(missing, None)) is not None:
                running[pool.submit(_run_wave, todo, path[todo.index])] = todo
            finished, _ = wait(running, timeout=_PROGRESS_SECONDS, return_when=FIRST_COMPLETED)
            for future in finished:
                results[running.pop(future).index] = future.result()
            progress.show(results)
    finally:
        for process in list((pool._processes or {}).values()):  # surplus waves: their results are not needed
            process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)
    return [results[wave.index] for wave in waves[:number]]


class _Progress:
    """Rate over everything decoded (prompts and answers), and the time left by the stage's own measure."""

    def __init__(self, counter: Any, budget: int | None, waves: int, log: Callable[[str], None]) -> None:
        self.counter, self.budget, self.waves, self.log = counter, budget, waves, log
        self.started, self.before = time.perf_counter(), -1

    def show(self, results: dict[int, dict[str, Any]]) -> None:
        if self.before < 0:
            self.before = len(results)
        seconds = time.perf_counter() - self.started
        answers = sum(r["tokens"] for r in results.values())
        share = answers / self.budget if self.budget else len(results) / self.waves
        done = len(results) - self.before
        eta = "?"
        if done > 0 and share < 1:
            per_wave = seconds / done
            left = (len(results) / share - len(results)) if share else self.waves
            eta = f"{left * per_wave / 60:.1f} min"
        self.log(
            f"data: {len(results)} waves, {answers} answer tokens kept ({min(share, 1):.0%}), "
            f"{self.counter.value / max(seconds, 1e-9):.0f} tokens/s decoded, left {eta}"
        )
        sys.stdout.flush()


def wave_key(target: TargetConfig, data: DataConfig, conversations: Sequence[Conversation] | None) -> dict[str, Any]:
    """Everything that a wave's content depends on."""
    template = getattr(load_tokenizer(target), "chat_template", None) or ""
    prompts = None
    if conversations is not None:
        prompts = hashlib.sha256("".join(c.content_key for c in conversations).encode()).hexdigest()[:16]
    fields = ("seed", "max_length", "prompt_tokens", "answer_tokens", "prompt_temperature", "answer_temperature")
    return {
        "target": target.path,
        "revision": target.revision,
        "dtype": target.dtype,
        "template": hashlib.sha256(str(template).encode()).hexdigest()[:16],
        "prompts": prompts,
        **{f"data.{name}": getattr(data, name) for name in (*fields, "greedy_fraction", "top_k", "batch_size")},
    }


def _check_manifest(path: Path, key: dict[str, Any]) -> None:
    if path.is_file():
        old = json.loads(path.read_text())
        wrong = [
            f"{name}: there {old.get(name)!r}, asked {value!r}" for name, value in key.items() if old.get(name) != value
        ]
        if wrong:
            raise ValueError(
                f"data.work_dir: {path.parent} holds data made with other settings ({'; '.join(wrong)}); "
                "choose another data.work_dir or remove it"
            )
        return
    tmp = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    tmp.write_text(json.dumps(key, indent=2) + "\n")
    os.replace(tmp, path)

"""Answers by the target, and prompts too: the stage that turns prompts (or nothing) into token rows.

Rows are answered by one single-threaded process per core, or by threads that ask a server. Whoever has a free place
takes the next row, longest prompts first. A finished row is a line in `data.work_dir`/answers (`train.answer_store`),
so a run that was killed goes on with the rows that are missing. What a row becomes depends on its content and the
settings only (`train.answering`, `infer.batched`), and rows are given in the order of the conversations: neither a kill
nor the number of processes changes a byte.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from heads.adapter import adapter_digest
from heads.embedded import resolve_target
from heads.target import TargetAdapter
from infer.batched import BatchedDecoder, Program
from infer.prefill import available_bytes, check_length
from train.answer_store import AnswerStore, AnswerWriter
from train.answering import Answer, Answerer, row_keys
from train.chat_mask import end_of_turn_ids
from train.config import DataConfig, TargetConfig
from train.conversations import Conversation, DropCounts, TokenRow
from train.endpoint import Clients
from train.files import check_manifest, write_text
from train.work import Task, Work, invented_key

_PROGRESS_SECONDS = 15.0
_POLL_SECONDS = 0.5
_RECORD = "answers_made.json"
_GUESS = 0.4  # share of data.answer_tokens that an invented row brings, before there are any


def load_target(
    target: TargetConfig, device: str, to_divide: bool = False
) -> tuple[TargetAdapter, PreTrainedTokenizerBase]:
    """The adapter and tokenizer that a target config names. to_divide: it stays on the CPU, for `heads.divided`."""
    adapter = TargetAdapter.load(
        target.path,
        dtype=target.dtype,
        device=device,
        device_map={"": "cpu"} if to_divide else target.device_map,
        revision=target.revision,
        trust_remote_code=target.trust_remote_code,
        cache_dir=target.cache_dir,
        adapter=target.adapter,
    )
    return adapter, load_tokenizer(target)


def load_tokenizer(target: TargetConfig) -> PreTrainedTokenizerBase:
    path = resolve_target(target.path, target.cache_dir)
    try:
        return AutoTokenizer.from_pretrained(path, revision=target.revision, trust_remote_code=target.trust_remote_code)
    except OSError as error:
        raise ValueError(f"target.path: cannot load a tokenizer from {path!r}: {error}") from error


def stop_ids(target: TargetConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end a turn of the target, whose weights are not loaded."""
    try:
        path = resolve_target(target.path, target.cache_dir)
        eos = GenerationConfig.from_pretrained(path, revision=target.revision or "main").eos_token_id
    except OSError:
        eos = tokenizer.eos_token_id  # no generation config: the template's own terminator is added below
    return end_of_turn_ids(tokenizer, eos, **data.template_kwargs)


# ---- a process ---------------------------------------------------------------------------------------------------

_work: Work


def _start_process(work: Work) -> None:
    global _work
    _work = work  # can be handed over at the start of a process only
    disable_progress_bar()  # one per process tells nothing, and its lock would be left behind when the process is ended
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def _run_process(target: TargetConfig, data: DataConfig, folder: Path, device: str, limit: int, parent: int) -> None:
    """Answers rows until there are no more."""
    adapter, tokenizer = load_target(target, device)
    check_length(adapter, data.max_length, "data.max_length")
    answerer = Answerer(tokenizer, end_of_turn_ids(tokenizer, sorted(adapter.eos_ids), **data.template_kwargs), data)
    _check_memory(adapter, data)
    decoder = BatchedDecoder(adapter, data.batch_size, data.max_length, data.top_k, answerer.stops, answerer.prefix())
    if not decoder.exact:
        _work.exact = False
    writer = AnswerWriter(folder)

    def count(tokens: int) -> None:
        if os.getppid() != parent:
            os._exit(1)  # the main process was killed: nobody waits for this one
        _work.count(tokens)

    programs: Iterator[Program[Answer] | None] = (
        None if task is None else answerer.program(task.key, task.conversation) for task in _work
    )
    decoder.run(programs, writer.write, limit=limit, on_tokens=count)
    writer.close()


def _check_memory(target: TargetAdapter, data: DataConfig) -> None:
    wanted = (data.batch_size + 1) * data.max_length * target.cache_bytes_per_slot
    free = available_bytes(target.device)
    if free is not None and wanted > free:
        raise ValueError(
            f"data.batch_size is {data.batch_size}: the keys and values of as many rows of data.max_length "
            f"{data.max_length} need {wanted / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free on {target.device}; "
            "lower one of them, or data.processes"
        )


class _Team(Protocol):
    """Who makes answers."""

    def wait(self, seconds: float) -> bool:
        """Waits for at most so long; whether all work is done."""

    def close(self) -> None:
        """Ends it, whatever is still running."""


class _Processes:
    """Processes that answer rows themselves."""

    def __init__(self, target: TargetConfig, data: DataConfig, work: Work, folder: Path, device: str) -> None:
        count = data.processes or (usable_cores() if device == "cpu" else 1)
        # A pool for each: a pool of several may not notice that the last process it started was killed, because it
        # waits for those that were there when it began to wait.
        self._pools = [ProcessPoolExecutor(1, _CONTEXT, _start_process, (work,)) for _ in range(count)]
        limit = max(1, -(-work.missing // count))  # so that none starves while another is full
        arguments = (target, data, folder, device, limit, os.getpid())
        self._futures: list[Future[None]] = [pool.submit(_run_process, *arguments) for pool in self._pools]

    def wait(self, seconds: float) -> bool:
        finished, running = wait(self._futures, seconds, FIRST_EXCEPTION)
        try:
            for future in finished:
                future.result()
        except BrokenProcessPool as error:
            raise ValueError(
                "data.processes: a process that made answers was killed, perhaps for its memory; finished rows are "
                "kept: lower data.batch_size or data.processes and run again"
            ) from error
        return not running

    def close(self) -> None:
        for pool in self._pools:
            for process in list((pool._processes or {}).values()):  # surplus rows: they are not needed
                process.terminate()
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)


_CONTEXT = multiprocessing.get_context("spawn")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- the main process --------------------------------------------------------------------------------------------


def make_rows(
    target: TargetConfig,
    data: DataConfig,
    conversations: Sequence[Conversation] | None,
    *,
    device: str = "cpu",
    log: Callable[[str], None] = print,
) -> tuple[Iterator[TokenRow], DropCounts]:
    """Answers `conversations`, or invents and answers prompts until `data.tokens` answer tokens are there.

    Answers in data.work_dir/answers are reused, whatever conversations they were made for.

    Returns:
        The rows, read from disk one at a time, in the order of the conversations; of invented ones, duplicates (same
        prompt) are dropped. And the counts, which are complete when the last row was taken.

    Raises:
        ValueError: data.work_dir holds answers made with other settings (each difference is named), the target makes
            nothing usable, or the server does not answer.
    """
    folder = Path(data.work_dir)
    store = AnswerStore(folder / "answers")
    key = answers_key(target, data, conversations)
    check_manifest(folder / "answers.json", key, "data.work_dir", "answers")
    if store.places:
        log(f"data: {len(store.places)} finished answers found in {store.folder}")
    tasks = None if conversations is None else list(map(Task, row_keys(conversations), conversations))
    goal = _Budget(data, store) if tasks is None else _Given(tasks, store)
    record = (answers_record(folder) or {}) | {"by": data.endpoint or "this program"}
    record |= _answer_missing(target, data, tasks, goal, store, device, log)
    counts = DropCounts()
    return _rows(target, data, goal.tasks(), store, counts, record, log), counts


def answers_record(work_dir: str | Path) -> dict[str, Any] | None:
    """Who made the answers in data.work_dir and how, for the record of the stage; None where none were made."""
    path = Path(work_dir) / _RECORD
    return json.loads(path.read_text()) if path.is_file() else None


def _rows(
    target: TargetConfig,
    data: DataConfig,
    tasks: Iterable[Task],
    store: AnswerStore,
    counts: DropCounts,
    record: dict[str, Any],
    log: Callable[[str], None],
) -> Iterator[TokenRow]:
    """Usable rows in order; the others are counted. Then the record is written."""
    seen: set[str] = set()
    reencoded = 0
    for task in tasks:
        counts.rows_in += 1
        answer = store.read(task.key)
        if answer.reason is not None:
            counts.add(answer.reason)
            continue
        asked = task.conversation
        name, source = (task.key, "self-synthesis") if asked is None else (asked.id, asked.source)
        row = TokenRow(name, answer.input_ids, answer.spans, source, answer.truncated)
        if asked is None and row.split_key in seen:
            counts.add("duplicate prompt")
        elif data.max_rows is not None and counts.rows_out >= data.max_rows:
            counts.add("beyond data.max_rows")
        else:
            if asked is None:
                seen.add(row.split_key)
            counts.rows_out += 1
            reencoded += answer.reencoded
            yield row
    counts.check()
    if not counts.rows_out:
        raise ValueError(f"target.path: {target.path} made no usable row ({counts}); give conversations in data.path")
    if reencoded:
        log(
            f"data: {reencoded} of {counts.rows_out} rows came as text and were encoded anew with the chat template: "
            "their ids are not always those that were generated"
        )
    record |= {"rows": counts.rows_out, "reencoded_rows": reencoded}
    write_text(Path(data.work_dir) / _RECORD, json.dumps(record, indent=2) + "\n")


class _Given:
    """The goal of answering all of some conversations."""

    def __init__(self, tasks: Sequence[Task], store: AnswerStore) -> None:
        self._tasks, self._store = tasks, store
        self._keys = {task.key for task in tasks}

    def reached(self) -> bool:
        return self._keys <= self._store.places.keys()

    def tasks(self) -> Iterable[Task]:
        return self._tasks

    @property
    def total(self) -> int:
        return len(self._tasks)

    rows_needed = total

    @property
    def share(self) -> float:
        return len(self._keys & self._store.places.keys()) / self.total


class _Budget:
    """The goal of `data.tokens` answer tokens from the first rows that the target invents."""

    def __init__(self, data: DataConfig, store: AnswerStore) -> None:
        self._data, self._store = data, store
        # Enough if a twentieth of what could be decoded is kept.
        self.total = data.batch_size * (20 + 20 * data.tokens // (data.batch_size * data.answer_tokens))
        self._rows = self._tokens = 0  # of the first rows, without a gap

    def reached(self) -> bool:
        """Counts on; rows behind a gap do not count, so that timing does not decide which rows are taken."""
        while self._tokens < self._data.tokens and self._rows < self.total:
            place = self._store.places.get(invented_key(self._rows))
            if place is None:
                return False
            self._rows, self._tokens = self._rows + 1, self._tokens + place.tokens
        return True

    def tasks(self) -> Iterable[Task]:
        return (Task(invented_key(number), None) for number in range(self._rows))

    @property
    def rows_needed(self) -> int:
        """A guess, a little high."""
        mean = self._tokens / self._rows if self._rows >= 16 else _GUESS * self._data.answer_tokens
        left = (self._data.tokens - self._tokens) / max(mean, 1.0)
        return self._rows + 1 + int(1.05 * left)

    @property
    def share(self) -> float:
        return min(1.0, self._tokens / self._data.tokens)


def _answer_missing(
    target: TargetConfig,
    data: DataConfig,
    tasks: Sequence[Task] | None,
    goal: _Given | _Budget,
    store: AnswerStore,
    device: str,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Lets processes or a server work until the goal is reached. Returns what is to be recorded of them."""
    if goal.reached():
        return {}
    if tasks is not None:  # the longest first: what does not fit shows at once, and the end is short
        tasks = sorted(tasks, key=lambda task: (-_length(task), task.key))
    work = Work(_CONTEXT, tasks, goal.total, store.places.keys())
    work.allow(goal.rows_needed)
    log(f"data: answers go to {store.folder}")
    team: _Team
    if data.endpoint is not None:
        tokenizer = load_tokenizer(target)
        team = Clients(data, tokenizer, sorted(stop_ids(target, data, tokenizer)), work, store.folder, log)
    else:
        team = _Processes(target, data, work, store.folder, device)
    progress = _Progress(work, goal, log)
    try:
        over = False
        while not goal.reached():
            assert not over, "all work is done, but answers are missing"
            over = team.wait(_POLL_SECONDS)
            store.poll()
            _give_up_on_nothing(data, store)
            progress.show()
            work.allow(goal.rows_needed)
        progress.show(last=True)
    finally:
        team.close()
    if isinstance(team, Clients):
        return {"model": team.server.model}
    if not work.exact:
        log("data: a row's rounding depends on the rows beside it here: near-ties may fall otherwise in another run")
    return {"exact": work.exact}


def _length(task: Task) -> int:
    assert task.conversation is not None
    return sum(len(str(message["content"])) for message in task.conversation.messages)


def _give_up_on_nothing(data: DataConfig, store: AnswerStore) -> None:
    """Raises ValueError, with the reasons, when the first rows together gave nothing."""
    places = store.places.values()
    if len(places) < 4 * data.batch_size or any(place.reason is None for place in places):
        return
    counts = DropCounts(len(places))
    for place in places:
        counts.add(str(place.reason))
    raise ValueError(f"target.path: no usable row ({counts}); give conversations in data.path")


class _Progress:
    """The rate of everything decoded, prompts and answers, and the time left."""

    def __init__(self, work: Work, goal: _Given | _Budget, log: Callable[[str], None]) -> None:
        self._work, self._goal, self._log = work, goal, log
        self._started = self._shown = time.perf_counter()
        self._before = goal.share

    def show(self, last: bool = False) -> None:
        now, share = time.perf_counter(), self._goal.share
        if not last and now - self._shown < _PROGRESS_SECONDS:
            return
        self._shown, seconds, gained = now, now - self._started, share - self._before
        left = f"about {(1 - share) * seconds / gained / 60:.1f} min left" if gained > 0 else "no row finished yet"
        self._log(f"data: {share:.0%} answered, {self._work.tokens / seconds:.0f} tokens/s decoded, {left}")


def answers_key(target: TargetConfig, data: DataConfig, conversations: Sequence[Conversation] | None) -> dict[str, Any]:
    """Everything that an answer depends on, besides its own conversation."""
    template = getattr(load_tokenizer(target), "chat_template", None) or ""
    fields = [
        "seed",
        "max_length",
        "template_kwargs",
        "answer_tokens",
        "answer_temperature",
        "greedy_fraction",
        "top_k",
    ]
    fields += ["prompt_tokens", "prompt_temperature"] if conversations is None else []
    fields += ["endpoint", "endpoint_model"] if data.endpoint is not None else ["batch_size"]
    return {
        "target": target.path,
        "revision": target.revision,
        "dtype": target.dtype,
        "adapter": target.adapter,
        "adapter_sha256": adapter_digest(target.adapter),
        "template": hashlib.sha256(str(template).encode()).hexdigest()[:16],
        "invented": conversations is None,
        **{f"data.{name}": getattr(data, name) for name in fields},
    }

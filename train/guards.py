"""What a long run is guarded against: signals, gradients that are not finite, too little memory, ranks that hang."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object

from train.config import TrainConfig
from train.conversations import TokenRow
from train.resume import Progress

_AGAIN_SECONDS = 2.0  # launchers pass Ctrl-C on to processes that had it from the terminal already


class StopRequest:
    """While it is entered, SIGTERM and SIGINT only ask: `signal` is then the number of the one that came, else 0.

    Whoever presses Ctrl-C again, seconds later, is not made to wait.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as a shell does for jobs in the background
                    self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT and time.monotonic() - self._since > _AGAIN_SECONDS:
            raise KeyboardInterrupt
        if not self.signal:
            self.signal, self._since = number, time.monotonic()


def record_skipped(path: Path, step: int, loss: float, norm: float, rows: Sequence[TokenRow], main: bool) -> None:
    """Appends the rows of a step without a finite gradient, those of all ranks, as a JSON line; all ranks call it."""
    mine = [{"id": row.id, "source": row.source, "input_ids": row.input_ids, "spans": row.spans} for row in rows]
    everyone = gather_object(mine)
    if main:
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "loss": str(loss), "grad_norm": str(norm), "rows": everyone}) + "\n")


@contextmanager
def explained_memory(step: int, config: TrainConfig) -> Iterator[None]:
    """Turns an allocation that fails into a ValueError that says what to lower."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one, and a CPU's allocator raises it plain
        text = str(error).splitlines()[0]
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in text:
            raise
        lower = f"train.tokens_per_batch (now {config.tokens_per_batch}; train.grad_accumulation makes up for it)"
        if not config.gradient_checkpointing:
            lower += ", set train.gradient_checkpointing: true (EAGLE)"
        raise ValueError(f"out of memory at step {step}: {text}; lower {lower}, or lower head.draft_vocab") from error


class Heartbeat:
    """Every rank's last step in the store that the launcher keeps, to say which rank a failed collective waited for."""

    def __init__(self, progress: Progress) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._store = dist.distributed_c10d._get_default_store() if several else None
        self._progress = progress

    def beat(self) -> None:
        if self._store is not None:
            self._store.set(_key(dist.get_rank()), f"{self._progress.step} {time.time():.0f}")

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Turns the failure of a collective inside into a ValueError that names the ranks that are behind.

        Only errors that torch.distributed raises are taken for such: everything else passes.
        """
        try:
            yield
        except RuntimeError as error:
            if self._store is None or not _of_a_collective(error):
                raise
            step = self._progress.step
            raise ValueError(
                f"a collective failed at step {step} on rank {dist.get_rank()}: {self._behind(step)} "
                f"({str(error).splitlines()[0][:200]}); run the same command again to go on from the last checkpoint"
            ) from error

    def _behind(self, step: int) -> str:
        assert self._store is not None
        late = []
        for rank in range(dist.get_world_size()):
            try:
                known = self._store.check([_key(rank)])
                at, seen = self._store.get(_key(rank)).split() if known else (b"-1", b"0")
            except RuntimeError:
                return "the launcher's store is gone, and with it what the other ranks were doing"
            if rank != dist.get_rank() and int(at) <= step:
                late.append((int(at), float(seen), rank))
        if not late:
            return "no other rank was heard of"
        last = min(at for at, _, _ in late)
        return ", ".join(
            f"rank {rank} was last heard of {time.time() - seen:.0f} s ago, at step {at}"
            for at, seen, rank in sorted(late)
            if at == last
        )


def _key(rank: int) -> str:
    return f"draftsmith/step/{rank}"


def _of_a_collective(error: RuntimeError) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return any(
        word in str(error).lower() for word in ("gloo", "timed out waiting", "connection closed by peer", "nccl")
    )

"""Transformers' own `generate`, in two uses: a baseline for speed and text, and plain decoding for unfit targets.

`generate_batch` decodes a batch under one clock: what a user of the library has without us. `decode_library` serves
targets whose cache or attention ours cannot drive: models with recurrent state or ALiBi cannot verify trees, but they
can be decoded, a row and a token at a time. In both the model runs `as_loaded`, and draws come from the seed alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from heads.target import TargetAdapter
from infer.engine import RowRequest, RowResult
from infer.machine import wait
from infer.metrics import DecodeStats
from infer.stopping import RowStop, StopRule

_T = TypeVar("_T")

# New ids and counts of a row.
Decoded = tuple[list[int], DecodeStats]


# ---- what both uses share ----------------------------------------------------------------------------------


def library_attention(target: TargetAdapter) -> str:
    """The attention that the library chose at load, before the adapter put its own in place."""
    name = str(target.config._attn_implementation)
    return "sdpa" if name.startswith("draftsmith") else name


@contextlib.contextmanager
def as_loaded(target: TargetAdapter) -> Iterator[None]:
    """The model as a user of the library has it: its own attention, and no generation settings but those given."""
    model, ours = target.model, target.config._attn_implementation
    library = library_attention(target)
    config = model.generation_config
    model.generation_config = GenerationConfig()  # `generate` fills up from here, also a config that it is given
    if library != ours:
        model.set_attn_implementation(library)
    try:
        yield
    finally:
        model.generation_config = config
        if library != ours:
            model.set_attn_implementation(ours)


@contextlib.contextmanager
def _seeded(target: TargetAdapter, seed: int) -> Iterator[None]:
    """`generate` takes no generator: it draws from torch's global one, which is put back afterwards."""
    with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _count(prompt_ids: Sequence[int], new_ids: Sequence[int], prefill: float, rest: float) -> DecodeStats:
    stats = DecodeStats(len(prompt_ids), len(new_ids), len(new_ids) - 1)
    stats.seconds |= {"prefill": prefill, "rest": rest}
    return stats


def timed(target: TargetAdapter, work: Callable[[], _T]) -> tuple[float, _T]:
    """Seconds of wall clock until the device is done, and the result."""
    wait(target.device)
    started = time.perf_counter()
    result = work()
    wait(target.device)
    return time.perf_counter() - started, result


# ---- a baseline --------------------------------------------------------------------------------------------


class _FirstToken(StoppingCriteria):
    """Notes when `generate` had its first token; stops nothing."""

    def __init__(self, now: Callable[[], None]) -> None:
        self._now: Callable[[], None] | None = now

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        if self._now is not None:
            self._now()
            self._now = None
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def library_greedy(target: TargetAdapter, prompts: Sequence[Sequence[int]], tokens: int) -> list[DecodeStats]:
    """Counts of the library's greedy `generate` on a batch, `tokens` each; no token ends a text."""
    rows = generate_batch(target, prompts, StopRule(frozenset(), tokens), {"do_sample": False}, 0)
    return [stats for _, stats in rows]


def generate_batch(
    target: TargetAdapter, prompts: Sequence[Sequence[int]], stop: StopRule, settings: dict[str, Any], seed: int
) -> list[Decoded]:
    """`generate` on the left-padded batch.

    The seconds until the first token are "prefill", all others "rest".

    Args:
        stop: its end-of-sequence ids and limit count; stop strings and criteria are not looked at.
        settings: further arguments of `generate`. seed: of all the batch's draws.
    """
    device, longest, eos = target.device, max(map(len, prompts)), sorted(stop.eos_ids)
    stamps: list[float] = []

    def stamp() -> None:
        wait(device)
        stamps.append(time.perf_counter())

    def generate() -> list[list[int]]:
        stamps.append(time.perf_counter())
        padded = [[0] * (longest - len(ids)) + list(ids) for ids in prompts]
        real = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        out: Tensor = target.model.generate(
            torch.tensor(padded, device=device),
            attention_mask=torch.tensor(real, device=device),
            max_new_tokens=stop.max_new_tokens,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
            use_cache=True,
            stopping_criteria=StoppingCriteriaList([_FirstToken(stamp)]),
            **settings,
        )
        return out[:, longest:].tolist()

    with as_loaded(target), _seeded(target, seed):
        seconds, found = timed(target, generate)
    prefill = stamps[1] - stamps[0]
    texts = [_until_eos(tokens, stop.eos_ids) for tokens in found]
    rest = max(seconds - prefill, 0.0)
    return [(ids, _count(prompt, ids, prefill, rest)) for prompt, ids in zip(prompts, texts, strict=True)]


def _until_eos(tokens: Sequence[int], eos_ids: frozenset[int]) -> list[int]:
    """The first end-of-sequence token included; what follows is padding."""
    end = next((index + 1 for index, token in enumerate(tokens) if token in eos_ids), len(tokens))
    return list(tokens[:end])


# ---- unfit targets -----------------------------------------------------------------------------------------


class _Follow(StoppingCriteria):
    """Hands every new token on, and stops when the row's rule says so."""

    def __init__(self, request: RowRequest, device: torch.device) -> None:
        self.request = request
        self.row = RowStop(request.stop, request.prompt_ids, device)
        self.first_at = 0.0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.first_at = self.first_at or time.perf_counter()
        emitted, reason = self.row.push([int(input_ids[0, -1])])
        if self.request.on_block is not None:
            self.request.on_block(emitted, 0)
        return torch.tensor([reason is not None], device=input_ids.device)


@torch.inference_mode()
def decode_library(target: TargetAdapter, rows: Sequence[RowRequest], do_sample: bool) -> list[RowResult]:
    """Decodes the rows one after the other; sampling draws from torch's global generator, seeded per row."""
    with as_loaded(target):
        return [_decode_row(target, row, do_sample) for row in rows]


def _decode_row(target: TargetAdapter, request: RowRequest, do_sample: bool) -> RowResult:
    follow = _Follow(request, target.device)
    # What else is asked for is in the processors and the stop rule; the library's own default of top_k is 50.
    config = GenerationConfig(max_new_tokens=request.stop.max_new_tokens, do_sample=do_sample, top_k=0, pad_token_id=0)
    started = time.perf_counter()
    with _seeded(target, request.seed):
        target.model.generate(
            torch.tensor([list(request.prompt_ids)], device=target.device),
            generation_config=config,
            logits_processor=request.processors or LogitsProcessorList(),
            stopping_criteria=StoppingCriteriaList([follow]),
        )
    ended = time.perf_counter()
    row = follow.row
    assert row.reason is not None, "generate ended before the stop rule"
    stats = _count(request.prompt_ids, row.new_ids, follow.first_at - started, ended - follow.first_at)
    return RowResult(row.new_ids, row.reason, stats)

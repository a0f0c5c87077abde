"""Continuous batched decoding of many rows: what writes training answers.

A row is a program: a generator that asks for new tokens behind its ids so far, gets them, and may ask again (the next
turn of a conversation). A batch has a fixed number of places. When a row ends, the next one takes its place, so that
the matrix products stay large. A pass takes one token of every row that decodes, and pieces of the prompts of new ones;
nothing is computed twice for a further turn, and on a CPU nothing on padding (`infer.passes`).

What a row gets depends on its own program only. Its draws come from a seed of its own. Its rounding is its own, too,
wherever `exact` is true: then its logits have proved to be the same bits whatever rows are beside it. So it does not
matter which rows were decoded together, in how many processes, or whether a run was interrupted.

Shapes: B rows, W rows that get a token in a pass, K candidates, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from heads.packed import Piece
from heads.target import TargetAdapter
from heads.topk import argmax_of, top_k_of
from infer.passes import PIECE_TOKENS, make_passes
from infer.sampling import draw

T = TypeVar("T")

_WAIT_SECONDS = 0.05


@dataclass(frozen=True)
class Request:
    """Asks for new tokens until a stop id (which is kept) or a number of them.

    ids: the row so far, prompt and all. temperature: 0 is greedy. seed: of this request's draws.
    """

    ids: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


Program = Generator[Request, list[int], T]
"""A row: yields requests, is sent the new tokens of each, returns its result."""


@dataclass
class _Place:
    """A row in the batch.

    cached: ids whose keys are in the cache. ahead: ids to go through next. new: tokens of the request so far.
    """

    program: Program[Any]
    request: Request = field(init=False)
    cached: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    uniforms: list[float] = field(default_factory=list)


def sample_rows(logits_BV: Tensor, temperatures: Sequence[float], uniforms: Sequence[float], top_k: int) -> list[int]:
    """One token per row: argmax where the temperature is 0, else a draw from softmax(logits / temperature) of top k.

    The draw inverts the cumulative distribution, likeliest token first, at the row's uniform number.
    """
    tokens: list[int] = argmax_of(logits_BV).tolist()
    drawn = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if drawn:
        device = logits_BV.device
        logits = logits_BV if len(drawn) == len(tokens) else logits_BV[torch.tensor(drawn, device=device)]
        values_BK, index_BK = top_k_of(logits, min(top_k, logits.shape[-1]))
        heat_B = torch.tensor([temperatures[row] for row in drawn], device=device)
        uniform_B = torch.tensor([uniforms[row] for row in drawn], dtype=torch.float64, device=device)
        which_B = draw((values_BK.float() / heat_B[:, None]).softmax(-1), uniform_B)
        for row, token in zip(drawn, index_BK.gather(1, which_B[:, None])[:, 0].tolist(), strict=True):
            tokens[row] = token
    return tokens


class BatchedDecoder:
    """Decodes programs on `rows` places of `capacity` cache slots each.

    Args:
        top_k: candidates of a sampled token.
        stop_ids: tokens that end a request; default: the target's end-of-sequence ids.
        prefix: ids that most rows begin with (a system prompt): computed once.
    """

    def __init__(
        self,
        target: TargetAdapter,
        rows: int,
        capacity: int,
        top_k: int,
        stop_ids: Collection[int] | None = None,
        prefix: Sequence[int] = (),
    ) -> None:
        self.rows, self.capacity, self.top_k = rows, capacity, top_k
        self.stop_ids = frozenset(target.eos_ids if stop_ids is None else stop_ids)
        self.passes = make_passes(target, rows + 1, capacity)  # the last row holds the prefix
        self._places: list[_Place | None] = [None] * rows
        self._prefix = list(prefix)
        with torch.inference_mode(), self.passes.within():
            for start in range(0, len(self._prefix), PIECE_TOKENS):
                self.passes.run([Piece(rows, start, self._prefix[start : start + PIECE_TOKENS])])

    @property
    def exact(self) -> bool:
        """Whether a row's logits proved to be the same, bit by bit, whatever rows are beside it."""
        return self.passes.exact

    def run(
        self,
        programs: Iterable[Program[T] | None],
        on_result: Callable[[T], None],
        *,
        limit: int | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        """Decodes all programs; each one's result is handed over when it is there.

        Args:
            programs: asked for the next one whenever a place is free; None says "not now, ask again".
            limit: rows at a time, if fewer than there are places.
            on_tokens: called with the number of tokens made since the last call, for progress and for aborting.
        """
        source, most = iter(programs), min(self.rows, limit or self.rows)
        with torch.inference_mode(), self.passes.within():
            while True:
                while self._live < most and (program := next(source, _END)) is not None:
                    if isinstance(program, _End):
                        most = 0  # ask no more
                    else:
                        self._start(self._places.index(None), program, on_result)
                made = 0
                if self._live:
                    made = self._step(on_result)
                elif most == 0:
                    return
                else:
                    time.sleep(_WAIT_SECONDS)
                if on_tokens is not None:
                    on_tokens(made)

    @property
    def _live(self) -> int:
        return sum(place is not None for place in self._places)

    def _start(self, index: int, program: Program[T], on_result: Callable[[T], None]) -> None:
        """Puts a program in a free place, unless it asks for nothing."""
        try:
            request = next(program)
        except StopIteration as stop:
            on_result(stop.value)
            return
        place = _Place(program)
        count = len(self._prefix)
        if count and len(request.ids) > count and list(request.ids[:count]) == self._prefix:
            self.passes.copy_row(self.rows, index, count)
            place.cached = list(self._prefix)
        self._begin(place, request)
        self._places[index] = place

    def _begin(self, place: _Place, request: Request) -> None:
        """What the cache has of the request's ids, the program's earlier requests included, is not computed again."""
        ids = list(request.ids)
        if not ids or request.max_new_tokens < 1 or len(ids) + request.max_new_tokens > self.capacity:
            raise ValueError(
                f"{len(ids)} ids and {request.max_new_tokens} new tokens asked for, expected at least one of each, and "
                f"at most {self.capacity} together"
            )
        known = next((i for i, (a, b) in enumerate(zip(ids, place.cached, strict=False)) if a != b), len(place.cached))
        known = min(known, len(ids) - 1)
        place.cached, place.ahead = ids[:known], ids[known:]
        place.request, place.new, place.uniforms = request, [], []
        if request.temperature > 0:
            generator = torch.Generator().manual_seed(request.seed)
            place.uniforms = torch.rand(request.max_new_tokens, generator=generator, dtype=torch.float64).tolist()

    def _step(self, on_result: Callable[[T], None]) -> int:
        """One pass: a token of every row that decodes, and pieces of prompts. Returns how many tokens it made."""
        pieces, room = [], self.passes.tokens
        waiting = [(index, place) for index, place in enumerate(self._places) if place is not None]
        for index, place in sorted(waiting, key=lambda item: len(item[1].ahead) > 1):
            # Where a prompt is cut depends on the prompt alone, so that what a row gets does, too.
            ids = place.ahead[:PIECE_TOKENS]
            if len(ids) <= room:
                pieces.append(Piece(index, len(place.cached), ids, len(ids) == len(place.ahead)))
                room -= len(ids)
        logits_WV = self.passes.run(pieces)
        ready = []
        at = dict(waiting)
        for piece in pieces:
            place = at[piece.row]
            place.cached += piece.ids
            place.ahead = place.ahead[len(piece.ids) :]
            if piece.wanted:
                ready.append((piece.row, place))
        temperatures = [place.request.temperature for _, place in ready]
        uniforms = [place.uniforms[len(place.new)] if place.uniforms else 0.0 for _, place in ready]
        tokens = sample_rows(logits_WV, temperatures, uniforms, self.top_k) if ready else []
        for (index, place), token in zip(ready, tokens, strict=True):
            place.new.append(token)
            place.ahead = [token]
            if token in self.stop_ids or len(place.new) == place.request.max_new_tokens:
                try:
                    self._begin(place, place.program.send(place.new))
                except StopIteration as stop:
                    self._places[index] = None
                    on_result(stop.value)
        return len(ready)


class _End:
    pass


_END = _End()


def decode_all(
    target: TargetAdapter,
    requests: Sequence[Request],
    top_k: int = 100,
    stop_ids: Collection[int] | None = None,
    *,
    rows: int | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """New tokens of each request, at most `rows` of them at a time (None: all)."""
    results: dict[int, list[int]] = {}

    def program(index: int) -> Program[tuple[int, list[int]]]:
        return index, (yield requests[index])

    capacity = max(len(request.ids) + request.max_new_tokens for request in requests)
    decoder = BatchedDecoder(target, rows or len(requests), capacity, top_k, stop_ids)
    decoder.run(map(program, range(len(requests))), lambda found: results.update([found]), on_tokens=on_tokens)
    return [results[index] for index in range(len(requests))]

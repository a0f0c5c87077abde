"""What plain and speculative decoding share: the request's checks, the prefill pass, mask memory, the clock.

Shapes: N query tokens, S key slots, H hidden size, V vocabulary. Everything here is for a batch of one row.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from heads.cache import SlotCache
from heads.target import TargetAdapter, TargetOutput
from heads.tree import additive_mask
from infer.metrics import DecodeStats
from infer.stopping import StopRule


def check_request(target: TargetAdapter, prompt_ids: Sequence[int], stop: StopRule) -> None:
    """Refuses what cannot be decoded exactly.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, prompt + max_new_tokens beyond the
            model's positions, or beyond the sliding window of a model that has one.
    """
    if not prompt_ids:
        raise ValueError("the prompt has 0 tokens, expected at least 1; give some text, or a chat template (no --raw)")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < target.vocab_size:
        raise ValueError(
            f"the prompt has token ids {min(prompt_ids)} .. {max(prompt_ids)}, expected 0 .. "
            f"{target.vocab_size - 1}; "
            "the tokenizer is not the one of this target"
        )
    wanted = len(prompt_ids) + stop.max_new_tokens
    check_length(target, wanted, f"{len(prompt_ids)} prompt tokens + --max-new-tokens {stop.max_new_tokens}")


def check_length(target: TargetAdapter, tokens: int, what: str) -> None:
    """Refuses rows that the target cannot represent, or that full-attention masks would get wrong.

    Raises:
        ValueError: more tokens than the model has positions, or than its sliding window holds; `what` names them.
    """
    limit = getattr(target.config, "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise ValueError(f"{what} = {tokens} tokens, but the target has {limit} positions; lower that")
    window = _sliding_window(target)
    if window is not None and tokens > window:
        # Masks here are full attention: beyond the window they would differ from the model's own, silently.
        raise ValueError(
            f"{what} = {tokens} tokens, beyond the target's sliding window of {window} tokens, which is not "
            "supported; lower that"
        )


def _sliding_window(target: TargetAdapter) -> int | None:
    """The window if any layer slides, else None. Without layer types a window in the config counts."""
    kinds = getattr(target.config, "layer_types", None)
    if kinds is not None and not any("sliding" in kind or "chunked" in kind for kind in kinds):
        return None
    for name in ("sliding_window", "attention_chunk_size"):
        value = getattr(target.config, name, None)
        if isinstance(value, int):
            return value
    return None


def prefill(target: TargetAdapter, prompt_ids: Sequence[int], cache: SlotCache) -> TargetOutput:
    """One causal pass over the prompt into an empty cache; logits [1, 1, V] of the last token only."""
    count = len(prompt_ids)
    ids_1N = torch.tensor([list(prompt_ids)], device=target.device)
    positions_1N = torch.arange(count, device=target.device)[None]
    causal = torch.ones(1, count, count, dtype=torch.bool, device=target.device).tril()
    return target.forward(ids_1N, positions_1N, additive_mask(causal, target.dtype), cache, keep_last=1)


class MaskBuffer:
    """Memory for additive masks [1, 1, N, S], allocated once per generation.

    Masks are handed out as contiguous views that share the memory: only the last one given is valid.
    """

    def __init__(self, nodes: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.zeros(nodes * slots, dtype=dtype, device=device)
        self._hidden = torch.finfo(dtype).min

    def tree(self, ancestors_1NN: Tensor, prefix: int) -> Tensor:
        """Each of N nodes sees `prefix` slots, its ancestors and itself: [1, 1, N, prefix + N]."""
        nodes = ancestors_1NN.shape[1]
        size = nodes * (prefix + nodes)
        assert size <= self._memory.numel(), f"mask of {size} entries, room for {self._memory.numel()}"
        mask = self._memory[:size].zero_().view(1, 1, nodes, prefix + nodes)
        mask[0, 0, :, prefix:].masked_fill_(~ancestors_1NN[0], self._hidden)
        return mask


class Clock:
    """Wall clock that books the time since the last lap to a phase of `stats.seconds`."""

    def __init__(self, stats: DecodeStats, device: torch.device) -> None:
        self._seconds = stats.seconds
        self._device = device
        self._last = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # work is queued: without this it is booked to a later phase
        return time.perf_counter()

    def lap(self, phase: str) -> None:
        now = self._now()
        self._seconds[phase] += now - self._last
        self._last = now

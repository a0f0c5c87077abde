"""What plain and speculative decoding share: the request's checks, memory, the prefill pass, masks, the clock.

Shapes: B rows, L longest prompt, N tree nodes, S key slots, F head features, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from heads.base import Needs
from heads.cache import SlotCache
from heads.target import TargetAdapter, TargetOutput
from infer.metrics import DecodeStats
from infer.stopping import StopRule

OnBlock = Callable[[list[int], int], None]  # emitted ids, and how many of them, from the first, are accepted drafts

_PREFILL_TOKENS = 4096  # padded prompt tokens per prefill pass: bounds its activations and masks


def check_request(target: TargetAdapter, prompt_ids: Sequence[int], stop: StopRule, nodes: int = 1) -> None:
    """Refuses what cannot be decoded exactly. nodes: tokens of a verification pass.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, prompt + max_new_tokens beyond the model's
            positions, or beyond a length where its attention no longer goes by positions.
    """
    if not prompt_ids:
        raise ValueError("the prompt has 0 tokens, expected at least 1; give some text, or a chat template (no --raw)")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < target.vocab_size:
        raise ValueError(
            f"the prompt has token ids {min(prompt_ids)} .. {max(prompt_ids)}, expected 0 .. "
            f"{target.vocab_size - 1}; the tokenizer is not the one of this target"
        )
    wanted = len(prompt_ids) + stop.max_new_tokens
    what = f"{len(prompt_ids)} prompt tokens + --max-new-tokens {stop.max_new_tokens}"
    check_length(target, wanted, what)
    limit = target.exact_limit
    if limit is not None and nodes > 1 and wanted + nodes > limit.slots:
        raise ValueError(
            f"{what} + {nodes} tree nodes = {wanted + nodes} slots, but drafts are exact up to {limit.slots} on this "
            f"target: {limit.reason}; lower that, or decode with --plain"
        )


def check_length(target: TargetAdapter, tokens: int, what: str) -> None:
    """Raises ValueError for more tokens than the model has positions; `what` names them."""
    limit = target.max_positions
    if limit is not None and tokens > limit:
        raise ValueError(f"{what} = {tokens} tokens, but the target has {limit} positions; lower that")


def required_bytes(target: TargetAdapter, rows: int, slots: int, nodes: int, longest_prompt: int) -> int:
    """Estimated memory of a generation beside the weights: cache, masks, and the logits of a pass.

    slots: cache slots per row; nodes: tokens per row in a verification pass.
    """
    width = target.dtype.itemsize
    cache = rows * slots * target.cache_bytes_per_slot
    masks = rows * (nodes * slots + longest_prompt * longest_prompt) * width
    logits = rows * nodes * target.vocab_size * (width + 4)  # as computed, and a copy in fp32
    return cache + masks + logits


def available_bytes(device: torch.device) -> int | None:
    """Memory that may still be used on the device; None where that cannot be told."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def check_memory(target: TargetAdapter, rows: int, slots: int, nodes: int, longest_prompt: int) -> None:
    """Raises ValueError, before anything is allocated, if the generation cannot fit."""
    wanted = required_bytes(target, rows, slots, nodes, longest_prompt)
    free = available_bytes(target.device)
    if free is not None and wanted > free:
        raise ValueError(
            f"{rows} rows of {slots} slots (prompt + --max-new-tokens + tree) need about {wanted / 2**30:.2f} GiB "
            f"beside the weights, but {free / 2**30:.2f} GiB are free on {target.device}; lower --max-new-tokens, the "
            "number of rows or --tree-nodes"
        )


def head_features(needs: Needs, out: TargetOutput) -> Tensor:
    """What a head takes from a target pass, [B, N, F]: features after the final norm, then its taps."""
    parts = [out.hidden_BNH] if needs.features else []
    parts += [out.taps[k] for k in needs.taps]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def prefill(
    target: TargetAdapter, prompts: Sequence[Sequence[int]], cache: SlotCache, needs: Needs | None = None
) -> tuple[Tensor, Tensor | None]:
    """Causal passes over the prompts into an empty cache of as many rows.

    Shorter prompts are padded on the right; the padding's slots are overwritten later.

    Returns:
        Logits [B, V] after each prompt's last token, and the head's features [B, L, F] (None without `needs`).
    """
    with target.static_passes(False):
        return _prefill_chunks(target, prompts, cache, needs)


def _prefill_chunks(
    target: TargetAdapter, prompts: Sequence[Sequence[int]], cache: SlotCache, needs: Needs | None
) -> tuple[Tensor, Tensor | None]:
    longest = max(len(p) for p in prompts)
    chunk = max(1, _PREFILL_TOKENS // longest)
    if chunk >= len(prompts):
        return _prefill_rows(target, prompts, longest, cache, needs)
    logits, features = [], []
    for start in range(0, len(prompts), chunk):
        rows = prompts[start : start + chunk]
        part = target.new_cache(longest, len(rows))
        part_logits, part_features = _prefill_rows(target, rows, longest, part, needs)
        logits.append(part_logits)
        if part_features is not None:
            features.append(part_features)
        cache.write_rows(start, part)
    return torch.cat(logits), torch.cat(features) if features else None


def _prefill_rows(
    target: TargetAdapter, prompts: Sequence[Sequence[int]], longest: int, cache: SlotCache, needs: Needs | None
) -> tuple[Tensor, Tensor | None]:
    device, lengths = target.device, [len(p) for p in prompts]
    ids_BL = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)
    position_L = torch.arange(longest, device=device)
    causal_LL = position_L <= position_L[:, None]
    length_B = torch.tensor(lengths, device=device)
    # A padded query sees the prompt and the padding up to itself: no row is empty, and nothing real sees padding.
    visible_BLL = causal_LL.expand(len(prompts), longest, longest)
    position_BL = position_L.expand(len(prompts), longest)
    mask = target.masks.build(visible_BLL, position_BL, position_BL, target.dtype)
    last = sorted({length - 1 for length in lengths})
    out = target.forward(ids_BL, position_BL, mask, cache, keep=last)
    cache.set_lengths(lengths)
    which_B = torch.searchsorted(torch.tensor(last, device=device), length_B - 1).to(out.logits_BNV.device)
    logits_BV = out.logits_BNV[torch.arange(len(prompts), device=which_B.device), which_B]
    return logits_BV, None if needs is None else head_features(needs, out)


class TreeMasks:
    """Attention masks of verification passes, [B, 1, N, S], in memory allocated once.

    Only the columns of the tree and of what the last commit may have kept are rewritten per round. Targets with
    windows get theirs by position, one mask per kind of layer, anew each round.
    """

    def __init__(self, target: TargetAdapter, nodes: int, lengths: Sequence[int], slots: int) -> None:
        self._target, self._nodes = target, nodes
        self._hidden = torch.finfo(target.dtype).min
        shape = (len(lengths), 1, nodes, slots)
        self._memory = torch.full(shape, self._hidden, dtype=target.dtype, device=target.device)
        for row, length in enumerate(lengths):
            self._memory[row, :, :, :length] = 0
        self._column_K = torch.arange(-nodes, nodes, device=target.device)

    def keep_rows(self, rows: Tensor) -> None:
        self._memory = self._memory[rows.to(self._memory.device)]

    def tree(self, ancestors_BNN: Tensor, depth_BN: Tensor, length_B: Tensor, end: int) -> Tensor | dict[str, Tensor]:
        """Every node sees its row's `length_B` committed slots, its ancestors and itself; S = `end` slots.

        Valid until the next call. Trees may have fewer nodes than the memory was made for.
        """
        device = self._memory.device  # of the target's inputs; trees live where the head does
        ancestors_BNN, depth_BN, length_B = ancestors_BNN.to(device), depth_BN.to(device), length_B.to(device)
        nodes = ancestors_BNN.shape[1]
        assert nodes <= self._nodes, f"tree of {nodes} nodes, masks for {self._nodes}"
        shape = (len(ancestors_BNN), self._nodes, 2 * self._nodes)
        block = torch.full(shape, self._hidden, dtype=self._memory.dtype, device=device)
        block[:, :, : self._nodes] = 0  # slots before the tree: committed
        block[:, :nodes, self._nodes : self._nodes + nodes].masked_fill_(ancestors_BNN, 0)
        # Column 0 may be named several times (short rows): it is a committed slot each time.
        column_BK = (length_B[:, None] + self._column_K).clamp_min(0)
        index = column_BK[:, None].expand(-1, self._nodes, -1)
        self._memory[:, 0].scatter_(2, index, block)
        mask = self._memory[:, :, :nodes, :end]
        if self._target.masks.plain:
            return mask
        position_BN = length_B[:, None] + depth_BN
        key_BS = torch.arange(end, device=length_B.device).repeat(len(length_B), 1)
        key_BS.scatter_(1, length_B[:, None] + torch.arange(nodes, device=length_B.device), position_BN)
        return self._target.masks.build(mask[:, 0] == 0, position_BN, key_BS, self._target.dtype)


class Clock:
    """Wall clock that books the time since the last lap to a phase of `stats.seconds`.

    On an accelerator work is queued, so a lap shows where the host waited; `exact` synchronises at every lap.
    """

    def __init__(self, stats: DecodeStats, device: torch.device, exact: bool = False) -> None:
        self._seconds = stats.seconds
        self._device = device if exact and device.type == "cuda" else None
        self._last = self._now()

    def _now(self) -> float:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self, phase: str) -> None:
        now = self._now()
        self._seconds[phase] += now - self._last
        self._last = now

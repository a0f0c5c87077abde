"""Plain batched decoding of many prompts: what writes training answers.

Rows are left-padded so that every row's next token falls into the same cache slot; positions and masks are explicit.
Finished rows are dropped from the batch and the cache, so that the matrix products shrink with it. Sampling looks
only at each row's best k logits (found by a two-stage selection) and draws with the Gumbel-max trick, so nothing of
vocabulary size is sorted, exponentiated or normalised.

Shapes: B rows in the batch, L padded prompt length, S cache slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from heads.cache import SlotCache
from heads.target import TargetAdapter
from heads.topk import argmax_of, top_k_of

_PREFILL_TOKENS = 2048  # padded prompt tokens per prefill pass: activations stay near the core's cache


def sample_rows(logits_BV: Tensor, temperature_B: Tensor, top_k: int, generator: torch.Generator) -> Tensor:
    """One token per row, [B] int64: argmax where the temperature is 0, else Gumbel-max over the row's top k."""
    values, indices = top_k_of(logits_BV, min(top_k, logits_BV.shape[-1]))
    uniform = torch.rand(values.shape, generator=generator).clamp_min_(1e-20).to(values.device)
    gumbel = -torch.log(-torch.log(uniform))
    greedy = temperature_B == 0
    scores = values.float() / temperature_B.masked_fill(greedy, 1.0)[:, None] + gumbel
    drawn = indices.gather(1, scores.argmax(-1)[:, None])[:, 0]
    return torch.where(greedy, argmax_of(logits_BV), drawn) if bool(greedy.any()) else drawn


@torch.inference_mode()
def decode_batch(
    target: TargetAdapter,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    top_k: int,
    max_new_tokens: int,
    generator: torch.Generator,
    stop_ids: frozenset[int] | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Decodes every prompt until a stop id (kept as the last token) or `max_new_tokens`.

    Args:
        temperatures: one per prompt; 0 is greedy.
        stop_ids: default: the target's end-of-sequence ids.
        on_tokens: called with the number of tokens made since the last call, for progress.

    Returns:
        New tokens per prompt, in the order of `prompts`.
    """
    stops = torch.tensor(sorted(target.eos_ids if stop_ids is None else stop_ids), device=target.device)
    outputs: list[list[int]] = [[] for _ in prompts]
    width = max(len(p) for p in prompts)
    cache = target.new_cache(width + max_new_tokens, len(prompts))
    visible, positions, logits = _prefill(target, prompts, width, cache)
    lengths = torch.tensor([len(p) for p in prompts], device=target.device)
    temperature = torch.tensor(list(temperatures), dtype=torch.float32, device=target.device)
    rows = torch.arange(len(prompts))  # which prompt each batch row belongs to
    done = torch.zeros(len(prompts), dtype=torch.bool, device=target.device)
    for step in range(max_new_tokens):
        token = sample_rows(logits, temperature, top_k, generator)
        made = 0
        for row, value, over in zip(rows.tolist(), token.tolist(), done.tolist(), strict=True):
            if not over:
                outputs[row].append(value)
                made += 1
        if on_tokens is not None:
            on_tokens(made)
        done |= torch.isin(token, stops)
        count = int(done.sum())
        if count == len(rows) or step + 1 == max_new_tokens:
            break
        # Dropping rows copies the cache, so wait until an eighth of the batch is done.
        if count >= max(1, len(rows) // 8):
            keep = (~done).nonzero()[:, 0]
            cache.keep_rows(keep)
            token, visible, lengths, temperature = token[keep], visible[keep], lengths[keep], temperature[keep]
            rows, done, positions = rows[keep.cpu()], done[keep], positions[keep]
        visible[:, cache.length], positions[:, cache.length] = True, lengths
        end = cache.length + 1
        mask = target.masks.build(visible[:, None, :end], lengths[:, None], positions[:, :end], target.dtype)
        logits = target.forward(token[:, None], lengths[:, None], mask, cache).logits_BNV[:, 0]
        lengths = lengths + 1
    return outputs


def _prefill(
    target: TargetAdapter, prompts: Sequence[Sequence[int]], width: int, cache: SlotCache
) -> tuple[Tensor, Tensor, Tensor]:
    """Left-pads and prefills the prompts. Returns visible slots and positions [B, capacity] and logits [B, V]."""
    batch = len(prompts)
    visible = torch.zeros(batch, cache.capacity, dtype=torch.bool, device=target.device)
    ids = torch.zeros(batch, width, dtype=torch.long, device=target.device)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt), device=target.device)
        visible[row, width - len(prompt) : width] = True
    positions = (visible.cumsum(-1) - 1).clamp_min(0)
    causal = torch.ones(width, width, dtype=torch.bool, device=target.device).tril()
    eye = torch.eye(width, dtype=torch.bool, device=target.device)  # a padded query sees itself, so no row is empty
    logits = []
    chunk = max(1, _PREFILL_TOKENS // width)
    for start in range(0, batch, chunk):
        rows = slice(start, start + chunk)
        part = target.new_cache(width, len(ids[rows]))
        place = positions[rows, :width]
        mask = target.masks.build((causal & visible[rows, None, :width]) | eye, place, place, target.dtype)
        out = target.forward(ids[rows], place, mask, part, keep=[width - 1])
        logits.append(out.logits_BNV[:, 0])
        cache.write_rows(start, part)
    return visible, positions, torch.cat(logits)

"""Plain decoding, one token per target pass: the speculative loop's oracle, and what a speed-up compares to.

It goes through the same adapter, cache, argmax and stop rule as `infer.engine`, so that a comparison of the
two measures drafting and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heads.target import TargetAdapter
from heads.topk import argmax_of
from infer.metrics import DecodeStats
from infer.prefill import Clock, OnBlock, TreeMasks, check_memory, check_request, prefill
from infer.stopping import RowStop, StopRule


@torch.inference_mode()
def decode_plain(
    target: TargetAdapter,
    prompt_ids: Sequence[int],
    stop: StopRule,
    on_block: OnBlock | None = None,
) -> tuple[list[int], DecodeStats]:
    """Greedy decoding of one prompt.

    Args:
        on_block: called with each emitted id, in a list, and 0 (accepted drafts).

    Returns:
        The new ids (EOS included) and the counts; one target pass per token after the first.

    Raises:
        ValueError: see `check_request`.
    """
    check_request(target, prompt_ids, stop)
    stats = DecodeStats(prompt_tokens=len(prompt_ids))
    clock = Clock(stats, target.device)
    slots = len(prompt_ids) + stop.max_new_tokens
    check_memory(target, 1, slots, 1, len(prompt_ids))
    cache = target.new_cache(slots)
    masks = TreeMasks(target, 1, [len(prompt_ids)], slots + 1)
    alone_111 = torch.ones(1, 1, 1, dtype=torch.bool, device=target.device)
    zero_11 = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    logits_1V, _ = prefill(target, [prompt_ids], cache)
    row = RowStop(stop, prompt_ids, target.head_device)
    token = int(argmax_of(logits_1V)[0])
    clock.lap("prefill")
    while True:
        emitted, reason = row.push([token])
        if on_block is not None:
            on_block(emitted, 0)
        if reason is not None:
            break
        length_1 = torch.tensor([cache.length], device=target.device)
        mask = masks.tree(alone_111, zero_11, length_1, cache.length + 1)
        clock.lap("rest")
        out = target.forward(torch.tensor([[token]], device=target.device), length_1[:, None], mask, cache)
        clock.lap("target")
        token = int(argmax_of(out.logits_BNV[:, 0])[0])
        clock.lap("verify")
        stats.target_passes += 1
    stats.new_tokens = len(row.new_ids)
    clock.lap("rest")
    return row.new_ids, stats

"""Plain decoding, one token per target pass: the speculative loop's oracle, and what a speed-up compares to.

It goes through the same adapter, cache, argmax and stop rule as `infer.engine`, so that a comparison of the
two measures drafting and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from heads.target import TargetAdapter
from heads.topk import argmax_of
from infer.metrics import DecodeStats
from infer.prefill import Clock, check_request, prefill
from infer.stopping import StopRule

OnTokens = Callable[[list[int]], None]


@torch.inference_mode()
def decode_plain(
    target: TargetAdapter,
    prompt_ids: Sequence[int],
    stop: StopRule,
    on_tokens: OnTokens | None = None,
) -> tuple[list[int], DecodeStats]:
    """Greedy decoding of one prompt.

    Args:
        on_tokens: called with each block of emitted ids (here always one).

    Returns:
        The new ids (EOS included) and the counts; one target pass per token after the first.

    Raises:
        ValueError: see `check_request`.
    """
    check_request(target, prompt_ids, stop)
    stats = DecodeStats(prompt_tokens=len(prompt_ids))
    clock = Clock(stats, target.device)
    slots = len(prompt_ids) + stop.max_new_tokens
    cache = target.new_cache(slots)
    all_visible = torch.zeros(1, 1, 1, slots, dtype=target.dtype, device=target.device)
    logits_1NV = prefill(target, prompt_ids, cache).logits_BNV
    new_ids: list[int] = []
    token = int(argmax_of(logits_1NV[:, -1])[0])
    clock.lap("prefill")
    while True:
        emitted, reason = stop.cut([token], len(new_ids))
        new_ids += emitted
        if on_tokens is not None:
            on_tokens(emitted)
        if reason is not None:
            break
        position = len(prompt_ids) + len(new_ids) - 1
        ids_11 = torch.tensor([[token]], device=target.device)
        position_11 = torch.tensor([[position]], device=target.device)
        clock.lap("rest")
        out = target.forward(ids_11, position_11, all_visible[..., : position + 1], cache)
        clock.lap("target")
        token = int(argmax_of(out.logits_BNV[:, -1])[0])
        stats.target_passes += 1
    stats.new_tokens = len(new_ids)
    clock.lap("rest")
    return new_ids, stats

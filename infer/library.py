"""Plain decoding by the library's own `generate`, for targets whose cache or attention ours cannot drive.

Models with recurrent state or ALiBi cannot verify trees; they can still be decoded, a row and a token at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from heads.target import TargetAdapter
from infer.engine import RowRequest, RowResult
from infer.metrics import DecodeStats
from infer.stopping import RowStop


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
    return [_decode_row(target, row, do_sample) for row in rows]


def _decode_row(target: TargetAdapter, request: RowRequest, do_sample: bool) -> RowResult:
    follow = _Follow(request, target.device)
    # Nothing of the model's own settings: those asked for are in the processors and the stop rule.
    config = GenerationConfig(max_new_tokens=request.stop.max_new_tokens, do_sample=do_sample, top_k=0, pad_token_id=0)
    started = time.perf_counter()
    with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(request.seed)
        target.model.generate(
            torch.tensor([list(request.prompt_ids)], device=target.device),
            generation_config=config,
            logits_processor=request.processors or LogitsProcessorList(),
            stopping_criteria=StoppingCriteriaList([follow]),
        )
    ended = time.perf_counter()
    count = len(follow.row.new_ids)
    stats = DecodeStats(len(request.prompt_ids), count, count - 1)
    stats.seconds |= {"prefill": follow.first_at - started, "rest": ended - follow.first_at}
    assert follow.row.reason is not None, "generate ended before the stop rule"
    return RowResult(follow.row.new_ids, follow.row.reason, stats)

"""The last check of a run: what training simulated must be what decoding accepts.

The head is loaded from disk and decodes a few held-out prompts, greedily, with a chain of drafts; then the same chain
is simulated on the texts that came out, as evaluation does it. Both count the same rounds, so in exact arithmetic they
are equal; a wrong shift, mask, vocabulary map or file makes decoding far worse, and no loss shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from heads.base import DraftHead, LossSpec, TreePolicy
from heads.checkpoint import load_head
from heads.target import TargetAdapter
from infer.engine import DecodeOptions, RowRequest, decode
from infer.stopping import StopRule
from train.batching import make_batch
from train.conversations import TokenRow

_TOKENS = 64  # new ones per prompt
_LEAST = 0.9  # real over simulated


@dataclass(frozen=True)
class Served:
    """Accept lengths of a chain over the same texts, in tokens per verification pass."""

    real: float
    simulated: float
    rounds: int

    def __str__(self) -> str:
        share = self.real / self.simulated
        return f"decoding {self.real:.3f}, simulated on the same texts {self.simulated:.3f} ({share:.0%})"


@torch.inference_mode()
def measure_served(target: TargetAdapter, head: DraftHead, rows: Sequence[TokenRow], depth: int) -> Served | None:
    """Decodes the rows' first prompts; None where every answer ended with its first token."""
    depth = min(depth, head.max_depth or depth)
    policy, stop = TreePolicy(width=1, depth=depth, total=depth + 1), StopRule(target.eos_ids, _TOKENS)
    requests = [RowRequest(row.input_ids[: row.spans[0][0]], stop) for row in rows]
    answers = [decode(target, head, [request], DecodeOptions(policy))[0] for request in requests]
    passes = sum(answer.stats.target_passes for answer in answers)
    emitted = sum(answer.stats.round_tokens for answer in answers)
    rounds = simulated = 0.0
    for request, answer in zip(requests, answers, strict=True):
        start, ids = len(request.prompt_ids), (*request.prompt_ids, *answer.ids)
        if len(answer.ids) < 2:
            continue
        row = TokenRow("served", ids, ((start, len(ids)),), "served")
        device = target.device
        valid = torch.ones(1, len(ids), dtype=torch.bool, device=device)
        features = target.features(torch.tensor([ids], device=device), valid, head.needs.taps)
        batch = make_batch([row], [features[0].cpu()], depth, head.needs, device=target.head_device)
        counts = head(batch, LossSpec(1.0, 1.0, 1.0), measure=True).counts
        rounds, simulated = rounds + float(counts["rounds"]), simulated + float(counts["emitted"])
    if not passes or not rounds:
        return None
    return Served(emitted / passes, simulated / rounds, passes)


def check_served(target: TargetAdapter, folder: Path, rows: Sequence[TokenRow], depth: int) -> Served | None:
    """`measure_served` of the head in this folder.

    Raises:
        ValueError: the decoder accepts less than 0.9 of what was simulated.
    """
    head = load_head(folder, target.dtype, target.head_device)
    head.bind(target)
    found = measure_served(target, head, rows, depth)
    if found is not None and found.real < _LEAST * found.simulated:
        raise ValueError(
            f"the head in {folder} is not what training measured: {found} in {found.rounds} rounds, expected "
            f"{_LEAST:.0%} or more; do not use it. This is an error in Draftsmith or in how the target is run: please "
            "report it with run.yaml"
        )
    return found

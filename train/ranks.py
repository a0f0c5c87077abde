"""Which rank the head's drafts give to the target's own next token, teacher-forced on held-out rows.

Step k of root p (see `train.batching`) drafts token p+2+k, reading true tokens up to t_{p+1+k}. Decoding drafts there
only if those tokens are the target's own choice, so step k counts only where t_{p+2} .. t_{p+1+k} are the argmaxes that
the steps before were checked against.

Shapes: B rows, T positions, R counted places, K steps, H hidden, V draft vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.base import DraftHead, head_dtype
from heads.losses import best_token, chunk_rows
from infer.fitting import MISS, UNKNOWN
from train.batching import make_batch, plan_batches
from train.conversations import TokenRow
from train.features import Features

_BATCH_TOKENS = 1024  # padded tokens per batch
_PROGRESS_SECONDS = 15.0


@dataclass(frozen=True)
class Ranks:
    """rank_RK[r, k]: rank (0: likeliest) of the target's token in step k's draft from place r, `MISS` or `UNKNOWN`.

    row_R: index of the row that each place is in.
    """

    rank_RK: Tensor
    row_R: Tensor


@torch.inference_mode()
def measure_ranks(
    head: DraftHead,
    rows: Sequence[TokenRow],
    features: Features,
    steps: int,
    ranks: int,
    log: Callable[[str], None] = print,
) -> Ranks:
    """Places in the order of the rows; ranks from `ranks` on are misses. The head is bound to its target."""
    device = head.target.head_device
    found: dict[int, Tensor] = {}
    started = shown = time.perf_counter()
    for indices in plan_batches([len(row.input_ids) for row in rows], _BATCH_TOKENS, 0, 0):
        some = [rows[index] for index in indices]
        batch = make_batch(
            some, [features[i] for i in indices], steps, head.needs, dtype=head_dtype(head), device=device
        )
        rank_BTK = torch.full((*batch.valid_BT.shape, steps), UNKNOWN, device=device)
        counted_BT, best_BT = batch.weight_KBT[0], batch.token_KBT[0]
        for step, output_BTH in enumerate(head.unroll(batch)):
            if step:
                counted_BT = counted_BT & batch.weight_KBT[step] & (batch.token_KBT[step] == best_BT)
            best_R = best_token(batch.teacher[step][counted_BT], head.target.logits)
            best_BT = torch.full_like(best_BT, -1)
            best_BT[counted_BT] = best_R
            rank_BTK[:, :, step][counted_BT] = rank_of(head, step, output_BTH[counted_BT], best_R, ranks)
        for index, rank_TK, root_T in zip(indices, rank_BTK, batch.weight_KBT[0], strict=True):
            found[index] = rank_TK[root_T].cpu()
        now = time.perf_counter()
        if now - shown > _PROGRESS_SECONDS:
            shown = now
            left = (now - started) / len(found) * (len(rows) - len(found))
            log(f"ranks: {len(found)}/{len(rows)} rows, {left:.0f} s left")
    row_R = [torch.full((len(found[index]),), index) for index in range(len(rows))]
    return Ranks(torch.cat([found[index] for index in range(len(rows))]), torch.cat(row_R))


def rank_of(head: DraftHead, step: int, output_RH: Tensor, token_R: Tensor, ranks: int) -> Tensor:
    """Rank of each token in the draft's distribution, [R]; among equal logits the lower index comes first."""
    index_R = head.draft_index(token_R)
    column_R = index_R.clamp_min(0)
    parts = [torch.zeros(0, dtype=torch.long, device=output_RH.device)]
    ids = head.draft_ids
    size = chunk_rows(head.target.vocab_size if ids is None else len(ids), output_RH.device)
    for output, column_r in zip(output_RH.split(size), column_R.split(size), strict=True):
        logits_rV = head.step_logits(step, output).float()
        mine_r1 = logits_rV.gather(1, column_r[:, None])
        before_V = torch.arange(logits_rV.shape[1], device=output.device) < column_r[:, None]
        parts.append(((logits_rV > mine_r1) | ((logits_rV == mine_r1) & before_V)).sum(1))
    rank_R = torch.cat(parts)
    return rank_R.where((rank_R < ranks) & (index_R >= 0), MISS)

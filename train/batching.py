"""Batches for head training: the one place that shifts.

A row of tokens t_0 .. t_{L-1} with features f_0 .. f_{L-1}. Root p (p = 0 .. L-2) and unroll step k:

    index p         :  0    1    2    3   ...
    feature read    : f_0  f_1  f_2  f_3        step 0; later steps read the head's own output
    token read, k=0 : t_1  t_2  t_3  t_4        t_{p+1+k}
    feature target  : f_1  f_2  f_3  f_4        f_{p+1+k}
    token predicted : t_2  t_3  t_4  t_5        t_{p+2+k}, through LMHead(f_{p+1+k})

Step k of root p is supervised if and only if the token it predicts was produced by the assistant and the tokens
t_{p+1} .. t_{p+2+k} are of one turn: exactly the drafts that decoding makes, since it starts drafting below the first
token of an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from heads.base import HeadBatch, Needs
from train.conversations import TokenRow


def supervised_mask(row: TokenRow, steps: int) -> Tensor:
    """[steps, L] bool: whether step k of root p is supervised (see the module's rule)."""
    length = len(row.input_ids)
    turn = torch.zeros(length + steps + 2, dtype=torch.long)
    for number, (start, end) in enumerate(row.spans, 1):
        turn[start:end] = number
    first = turn[1 : length + 1]  # the turn of t_{p+1}
    return torch.stack([(first > 0) & (first == turn[2 + k : 2 + k + length]) for k in range(steps)])


def padded_width(length: int, multiple: int = 32) -> int:
    """Rows are padded to a few widths only: a CPU's matrix kernels are built anew for every new shape."""
    return -(-length // multiple) * multiple


def make_batch(
    rows: Sequence[TokenRow],
    features: Sequence[Tensor],
    steps: int,
    needs: Needs,
    *,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> HeadBatch:
    """Pads rows on the right and applies the shifts.

    Args:
        features: [L, H * (1 + taps)] per row: the target's feature, then the tapped layers, as cached.
        needs: which of those columns the head reads.
        noise: half-width of the uniform noise added to the input features (EAGLE, section 4.1: U(-0.1, 0.1)).
        dtype: of the features in the batch; default: as stored.
    """
    width = padded_width(max(len(row.input_ids) for row in rows))
    batch, columns = len(rows), features[0].shape[-1]
    hidden = columns // (1 + len(needs.taps))
    # `steps` spare positions behind the end, so that every shifted view has the same length
    ids = torch.zeros(batch, width + steps + 1, dtype=torch.long)
    feature = torch.zeros(batch, width + steps + 1, columns, dtype=dtype or features[0].dtype)
    valid = torch.zeros(batch, width, dtype=torch.bool)
    weight = torch.zeros(steps, batch, width, dtype=torch.bool)
    for i, (row, f) in enumerate(zip(rows, features, strict=True)):
        length = len(row.input_ids)
        ids[i, :length] = torch.tensor(row.input_ids)
        feature[i, :length] = f
        valid[i, :length] = True
        weight[:, i, :length] = supervised_mask(row, steps)
    feature = feature.to(device)
    read = feature[:, :width] if needs.features else feature[:, :width, hidden:]
    noise_BTH = None
    if noise:
        uniform = torch.rand(read.shape, generator=generator)
        noise_BTH = ((uniform * 2 - 1) * noise).to(device, feature.dtype)
    return HeadBatch(
        feature_BTH=read,
        token_KBT=torch.stack([ids[:, 1 + k : 1 + k + width] for k in range(steps + 1)]).to(device),
        teacher=tuple(feature[:, 1 + k : 1 + k + width, :hidden] for k in range(steps)),
        weight_KBT=weight.to(device),
        valid_BT=valid.to(device),
        noise_BTH=noise_BTH,
    )


def plan_batches(lengths: Sequence[int], tokens_per_batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Row indices per batch for one epoch: shuffled, then grouped by similar length so that little is padding.

    A batch holds at most `tokens_per_batch` padded tokens, or one row that is longer than that.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    mean = max(1.0, sum(lengths) / len(lengths))
    pool = max(1, round(16 * tokens_per_batch / mean))  # rows sorted together: 16 batches
    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        current: list[int] = []
        for index in sorted(order[start : start + pool], key=lambda i: lengths[i]):
            if current and (len(current) + 1) * padded_width(lengths[index]) > tokens_per_batch:
                batches.append(current)
                current = []
            current.append(index)
        batches.append(current)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def batch_stream(
    lengths: Sequence[int], tokens_per_batch: int, seed: int, skip: int = 0
) -> Iterator[tuple[float, list[int]]]:
    """Endless (epochs finished after this batch, row indices); `skip` batches are left out at the start."""
    epoch = 0
    while True:
        batches = plan_batches(lengths, tokens_per_batch, seed, epoch)
        for number, batch in enumerate(batches, 1):
            if skip:
                skip -= 1
                continue
            yield epoch + number / len(batches), batch
        epoch += 1

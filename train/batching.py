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
from itertools import accumulate

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
    packed: int | None = None,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> HeadBatch:
    """Pads rows on the right, or packs them into one, and applies the shifts.

    Args:
        features: [L, H * (1 + taps)] per row: the target's feature, then the tapped layers, as cached.
        needs: which of those columns the head reads.
        packed: one behind the other in a single row of at least so many positions; None: a row each. Shifted views then
            cross from one text into the next, but only where nothing is supervised and no other root looks.
        noise: half-width of the uniform noise added to the input features (EAGLE, section 4.1: U(-0.1, 0.1)).
        dtype: of the features in the batch; default: as stored.
    """
    lengths = [len(row.input_ids) for row in rows]
    if packed is None:
        batch, width = len(rows), padded_width(max(lengths))
        documents = [(i, 0, length) for i, length in enumerate(lengths)]
    else:
        batch, width = 1, padded_width(max(packed, sum(lengths)))
        ends = list(accumulate(lengths))
        documents = [(0, end - length, end) for end, length in zip(ends, lengths, strict=True)]
    columns = features[0].shape[-1]
    hidden = columns // (1 + len(needs.taps))
    # `steps` spare positions behind the end, so that every shifted view has the same length
    ids = torch.zeros(batch, width + steps + 1, dtype=torch.long)
    shape = (batch, width + steps + 1, columns)
    feature = torch.zeros(shape, dtype=dtype or features[0].dtype, device=features[0].device)
    valid = torch.zeros(batch, width, dtype=torch.bool)
    weight = torch.zeros(steps, batch, width, dtype=torch.bool)
    for row, f, (i, start, end) in zip(rows, features, documents, strict=True):
        ids[i, start:end] = torch.tensor(row.input_ids)
        feature[i, start:end] = f
        valid[i, start:end] = True
        weight[:, i, start:end] = supervised_mask(row, steps)
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
        documents=tuple(documents),
        noise_BTH=noise_BTH,
    )


def plan_batches(
    lengths: Sequence[int], tokens_per_batch: int, seed: int, epoch: int, packed: bool = False
) -> list[list[int]]:
    """Row indices per batch for one epoch: shuffled, then put together, some hundred at a time, to waste little.

    A batch holds at most `tokens_per_batch` tokens, or one row that is longer than that. Rows that are padded are
    grouped by length; rows that are packed are fitted into the batches longest first (first-fit decreasing).
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    mean = max(1.0, sum(lengths) / len(lengths))
    pool = max(1, round(16 * tokens_per_batch / mean))  # rows put together: 16 batches
    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        some = sorted(order[start : start + pool], key=lambda i: lengths[i])
        if packed:
            batches += _fit(some[::-1], lengths, tokens_per_batch)
        else:
            batches += _similar(some, lengths, tokens_per_batch)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def _similar(indices: Sequence[int], lengths: Sequence[int], room: int) -> list[list[int]]:
    """Consecutive rows, as many as fit when padded to the longest of them."""
    batches: list[list[int]] = [[]]
    for index in indices:
        if batches[-1] and (len(batches[-1]) + 1) * padded_width(lengths[index]) > room:
            batches.append([])
        batches[-1].append(index)
    return batches


def _fit(indices: Sequence[int], lengths: Sequence[int], room: int) -> list[list[int]]:
    """Each row into the first batch that has room for it."""
    batches: list[list[int]] = []
    left: list[int] = []
    for index in indices:
        place = next((i for i, free in enumerate(left) if free >= lengths[index]), len(batches))
        if place == len(batches):
            batches.append([])
            left.append(room)
        batches[place].append(index)
        left[place] -= lengths[index]
    return batches


def dealt(stream: Iterator[tuple[float, list[int]]], rank: int, world: int) -> Iterator[tuple[float, list[int]]]:
    """Of every `world` batches that of one rank, with the epochs finished after all of them."""
    while True:
        some = [next(stream) for _ in range(world)]
        yield some[-1][0], some[rank][1]


def batch_stream(
    lengths: Sequence[int], tokens_per_batch: int, seed: int, skip: int = 0, packed: bool = False
) -> Iterator[tuple[float, list[int]]]:
    """Endless (epochs finished after this batch, row indices); `skip` batches are left out at the start."""
    epoch = 0
    while True:
        batches = plan_batches(lengths, tokens_per_batch, seed, epoch, packed)
        for number, batch in enumerate(batches, 1):
            if skip:
                skip -= 1
                continue
            yield epoch + number / len(batches), batch
        epoch += 1

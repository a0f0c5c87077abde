"""Shifts, masks and batch plans, against sets written out by hand."""

from __future__ import annotations

import pytest
import torch

from heads.base import Needs
from train.batching import batch_stream, make_batch, padded_width, plan_batches, supervised_mask
from train.conversations import TokenRow


def _roots(row: TokenRow, steps: int) -> list[set[int]]:
    return [set(line.nonzero()[:, 0].tolist()) for line in supervised_mask(row, steps)]


def test_ten_tokens_by_hand() -> None:
    """Prompt 0-4, answer 5-9 (9 ends the turn). Root 4 reads t_5, the answer's first token, and predicts t_6."""
    row = TokenRow("r", tuple(range(10)), ((5, 10),), "test")
    assert _roots(row, 5) == [{4, 5, 6, 7}, {4, 5, 6}, {4, 5}, {4}, set()]


def test_turns_do_not_reach_into_each_other() -> None:
    row = TokenRow("r", tuple(range(12)), ((2, 5), (8, 12)), "test")
    assert _roots(row, 3) == [{1, 2, 7, 8, 9}, {1, 7, 8}, {7}]


def test_adjacent_turns_are_two_turns() -> None:
    row = TokenRow("r", tuple(range(6)), ((1, 3), (3, 6)), "test")
    assert _roots(row, 2) == [{0, 2, 3}, {2}]


@pytest.mark.parametrize("steps", [1, 3])
def test_every_index_of_a_batch(steps: int) -> None:
    """Integer-coded features: feature p of row i is the number 100 i + p, token p is 100 i + p."""
    rows = [TokenRow(f"{i}", tuple(100 * i + p for p in range(n)), ((2, n),), "t") for i, n in ((0, 7), (1, 5))]
    features = [torch.tensor(row.input_ids, dtype=torch.float32)[:, None].repeat(1, 3) for row in rows]
    batch = make_batch(rows, features, steps, Needs())
    assert batch.steps == steps
    for i, row in enumerate(rows):
        length = len(row.input_ids)
        assert batch.valid_BT[i].tolist() == [p < length for p in range(32)]
        for k in range(steps):
            for p in range(32):
                supervised = bool(batch.weight_KBT[k, i, p])
                assert supervised == (p >= 1 and p + 2 + k < length)
                if supervised:
                    assert batch.feature_BTH[i, p, 0] == 100 * i + p
                    assert batch.token_KBT[k, i, p] == 100 * i + p + 1 + k
                    assert batch.teacher[k][i, p, 2] == 100 * i + p + 1 + k


@pytest.mark.parametrize("steps", [1, 3])
def test_packed_rows_are_the_rows(steps: int) -> None:
    """Every supervised root has what it has in a row of its own, and documents say where the rows lie."""
    rows = [
        TokenRow("a", tuple(range(7)), ((2, 7),), "t"),
        TokenRow("b", tuple(range(100, 105)), ((1, 3), (3, 5)), "t"),
        TokenRow("c", tuple(range(200, 212)), ((5, 12),), "t"),
    ]
    features = [torch.tensor(row.input_ids, dtype=torch.float32)[:, None].repeat(1, 3) for row in rows]
    apart = make_batch(rows, features, steps, Needs())
    packed = make_batch(rows, features, steps, Needs(), packed=40)
    assert packed.valid_BT.shape == (1, 64) and packed.valid_BT.sum() == 24
    assert packed.documents == ((0, 0, 7), (0, 7, 12), (0, 12, 24))
    assert packed.position_BT[0, :24].tolist() == [*range(7), *range(5), *range(12)]
    for (_, start, end), row in zip(packed.documents, range(3), strict=True):
        size = end - start
        assert torch.equal(packed.weight_KBT[:, 0, start:end], apart.weight_KBT[:, row, :size])
        for k in range(steps):
            seen = apart.weight_KBT[k, row, :size]
            assert torch.equal(packed.token_KBT[k, 0, start:end][seen], apart.token_KBT[k, row, :size][seen])
            assert torch.equal(packed.token_KBT[k + 1, 0, start:end][seen], apart.token_KBT[k + 1, row, :size][seen])
            assert torch.equal(packed.teacher[k][0, start:end][seen], apart.teacher[k][row, :size][seen])


def test_packed_plan_holds_every_row_once_and_wastes_little() -> None:
    lengths = torch.randint(20, 300, (500,), generator=torch.Generator().manual_seed(1)).tolist()
    batches = plan_batches(lengths, 1024, seed=3, epoch=1, packed=True)
    assert sorted(index for batch in batches for index in batch) == list(range(500))
    sizes = [sum(lengths[i] for i in batch) for batch in batches]
    assert max(sizes) <= 1024 and sum(sizes) > 0.95 * 1024 * len(batches)
    assert batches != plan_batches(lengths, 1024, seed=3, epoch=2, packed=True)
    assert sorted(map(sorted, plan_batches([10, 500, 10], 64, 0, 0, packed=True))) == [[0, 2], [1]]


def test_noise_is_uniform_and_seeded() -> None:
    row = TokenRow("r", tuple(range(200)), ((1, 200),), "t")
    feature = [torch.zeros(200, 50)]

    def noise(seed: int) -> torch.Tensor:
        batch = make_batch([row], feature, 1, Needs(), noise=0.1, generator=torch.Generator().manual_seed(seed))
        assert batch.noise_BTH is not None
        return batch.noise_BTH

    assert torch.equal(noise(1), noise(1)) and not torch.equal(noise(1), noise(2))
    values = noise(1).flatten()
    assert values.abs().max() <= 0.1 and values.abs().max() > 0.099
    # the mean of 10,000 uniforms has standard deviation 0.00058: six of them, false failure below 1e-8
    assert values.mean().abs() < 0.0035
    assert make_batch([row], feature, 1, Needs()).noise_BTH is None


def test_plan_covers_every_row_once_within_the_limit() -> None:
    lengths = [5 + (7 * i) % 90 for i in range(200)]
    batches = plan_batches(lengths, 256, seed=3, epoch=1)
    assert sorted(i for batch in batches for i in batch) == list(range(200))
    assert all(len(b) * padded_width(max(lengths[i] for i in b)) <= 256 or len(b) == 1 for b in batches)
    assert batches == plan_batches(lengths, 256, seed=3, epoch=1)
    assert batches != plan_batches(lengths, 256, seed=3, epoch=2)
    padded = sum(len(b) * max(lengths[i] for i in b) for b in batches)
    assert padded < 1.15 * sum(lengths)  # grouped by length


def test_a_row_longer_than_a_batch_stands_alone() -> None:
    assert sorted(map(sorted, plan_batches([10, 500, 10], 64, 0, 0))) == [[0, 2], [1]]


def test_stream_can_be_entered_anywhere() -> None:
    lengths = [32] * 37

    def take(skip: int, count: int) -> list[tuple[float, list[int]]]:
        stream = batch_stream(lengths, 320, seed=0, skip=skip)
        return [next(stream) for _ in range(count)]

    whole = take(0, 12)
    assert take(5, 7) == whole[5:]
    assert [round(epochs, 2) for epochs, _ in whole[:5]] == [0.25, 0.5, 0.75, 1.0, 1.25]


@pytest.mark.parametrize("needs", [Needs(True, (0, 2)), Needs(False, (0, 2))])
def test_taps_are_read_and_the_feature_is_the_teacher(needs: Needs) -> None:
    row = TokenRow("r", tuple(range(6)), ((1, 6),), "t")
    columns = torch.arange(6.0)[:, None] + torch.tensor([0.0, 100.0, 200.0])  # feature, tap 0, tap 2; H = 1
    batch = make_batch([row], [columns], 2, needs)
    assert batch.feature_BTH[0, 3].tolist() == ([3.0] if needs.features else []) + [103.0, 203.0]
    assert [t[0, 2].tolist() for t in batch.teacher] == [[3.0], [4.0]]

"""How features are put into shards: layout, and int8."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train.shards import Form, Layout


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120))
def test_layout(lengths: list[int], room: int) -> None:
    """Against tokens put down one by one."""
    layout = Layout(lengths, room)
    found = [
        (row, token) for shard in range(len(layout)) for row in layout.rows(shard) for token in range(lengths[row])
    ]
    assert found == [(row, token) for row, length in enumerate(lengths) for token in range(length)]
    for shard in range(len(layout)):
        at = 0
        for row in layout.rows(shard):
            assert layout.place(row) == (shard, at, at + lengths[row])
            at += lengths[row]
        assert layout.tokens(shard) == at and (at <= room or len(layout.rows(shard)) == 1)
        if shard:  # the row did not fit into the shard before
            assert layout.tokens(shard - 1) + lengths[layout.rows(shard)[0]] > room
    assert layout.count == len(lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_within_half_a_step(dtype: torch.dtype) -> None:
    """Of each token's and each column's own scale, whatever the other columns hold."""
    form = Form((7, 9), dtype, int8=True)
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 50)[:, None]
    x[:, 7:] *= 1000
    x[3] = 0
    x[4, 7:] = 0
    x = x.to(dtype)
    again = form.decode(form.encode(x))
    assert again.dtype == dtype
    for part, got in zip(x.split((7, 9), -1), again.split((7, 9), -1), strict=True):
        step = part.float().abs().amax(-1, keepdim=True) / 127
        rounding = torch.finfo(dtype).eps * part.float().abs()  # of what is read
        assert ((part.float() - got.float()).abs() <= step * 0.5001 + rounding).all()
    assert torch.equal(again[3], torch.zeros(16, dtype=dtype))
    assert (form.bytes_per_token, replace(form, int8=False).bytes_per_token) == (16 + 8, 16 * dtype.itemsize)

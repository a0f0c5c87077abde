"""Committing a path, dropping rows and writing rows leave a cache as if only that had ever been put in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from heads.cache import SlotCache, visible_slots
from heads.target import TargetAdapter
from heads.tree import additive_mask, ancestor_mask, paths, tree_positions
from infer.prefill import prefill
from tests.tiny import CONFIGS, prompt_ids, tiny_target

PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5)
PREFIX = prompt_ids(6, seed=1)
NODES = prompt_ids(len(PARENTS), seed=2)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():  # as in every decoding loop
        yield


def score_tree(target: TargetAdapter, cache: SlotCache) -> None:
    ancestors = ancestor_mask(torch.tensor([PARENTS]))
    positions = tree_positions(ancestors.sum(-1) - 1, torch.tensor([cache.length]))
    visible = torch.cat([ancestors.new_ones(1, len(PARENTS), cache.length), ancestors], -1)
    target.forward(torch.tensor([NODES]), positions, additive_mask(visible, torch.float32), cache)


def one_more(target: TargetAdapter, cache: SlotCache, token: int, position: int, rows: int = 1) -> Tensor:
    mask = torch.zeros(rows, 1, 1, cache.length + 1)
    ids = torch.full((rows, 1), token)
    return target.forward(ids, torch.full((rows, 1), position), mask, cache).logits_BNV[:, -1]


def fresh(target: TargetAdapter, ids: list[int]) -> Tensor:
    return target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1]


@pytest.mark.parametrize("name", CONFIGS)
def test_commit_of_any_path(name: str) -> None:
    target = tiny_target(name)
    for path in paths(PARENTS):
        cache = target.new_cache(len(PREFIX) + len(PARENTS) + 1)
        prefill(target, [PREFIX], cache)
        score_tree(target, cache)
        cache.commit([len(PREFIX)], [path])
        assert cache.length == len(PREFIX) + len(path)
        kept = [*PREFIX, *(NODES[node] for node in path)]
        got = one_more(target, cache, 77, len(kept))
        torch.testing.assert_close(got, fresh(target, [*kept, 77]), atol=1e-4, rtol=1e-4)


def test_commit_over_several_rounds() -> None:
    target = tiny_target("llama")
    kept = list(PREFIX)
    cache = target.new_cache(40)
    prefill(target, [kept], cache)
    for path in ([0, 2, 5, 7], [0], [0, 1, 4], [0, 1, 3, 6]):
        bases = list(cache.lengths)
        score_tree(target, cache)
        cache.commit(bases, [path])
        kept += [NODES[node] for node in path]
    got = one_more(target, cache, 3, len(kept))
    torch.testing.assert_close(got, fresh(target, [*kept, 3]), atol=1e-4, rtol=1e-4)


def test_overflow_is_told() -> None:
    target = tiny_target("llama")
    cache = target.new_cache(len(PREFIX) + 2)
    prefill(target, [PREFIX], cache)
    with pytest.raises(AssertionError, match="slots"):
        score_tree(target, cache)


ROWS = [prompt_ids(6, seed=s) for s in (10, 11, 12, 13)]


def filled(target: TargetAdapter) -> SlotCache:
    """A cache of four rows, written in two parts of one and three rows."""
    cache = target.new_cache(9, rows=4)
    causal = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    for start, rows in ((0, ROWS[:1]), (1, ROWS[1:])):
        part = target.new_cache(6, len(rows))
        ids, positions = torch.tensor(rows), torch.arange(6).expand(len(rows), 6)
        mask = additive_mask(causal.expand(len(rows), 6, 6), torch.float32)
        target.forward(ids, positions, mask, part)
        cache.write_rows(start, part)
    return cache


def test_write_rows() -> None:
    target = tiny_target("llama")
    cache = filled(target)
    assert cache.length == 6
    got = one_more(target, cache, 5, 6, rows=4)
    want = torch.cat([fresh(target, [*row, 5]) for row in ROWS])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("keep", [[0, 2], [3], [2, 0, 3], [0, 1, 2, 3]])
def test_keep_rows(keep: list[int]) -> None:
    target = tiny_target("llama")
    cache = filled(target)
    cache.keep_rows(torch.tensor(keep))
    one_more(target, cache, 5, 6, rows=len(keep))
    got = one_more(target, cache, 8, 7, rows=len(keep))
    want = torch.cat([fresh(target, [*ROWS[row], 5, 8]) for row in keep])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def one_each(target: TargetAdapter, cache: SlotCache, tokens: list[int]) -> Tensor:
    """One more token per row, behind what each row has."""
    lengths = torch.tensor(cache.lengths)
    visible = visible_slots(torch.ones(len(tokens), 1, 1, dtype=torch.bool), lengths, cache.length + 1)
    mask = additive_mask(visible, torch.float32)
    return target.forward(torch.tensor(tokens)[:, None], lengths[:, None], mask, cache).logits_BNV[:, -1]


def test_ragged_rows() -> None:
    """Prompts of different lengths, different paths over several rounds, rows dropped: each row is as if alone."""
    target = tiny_target("llama")
    kept = [prompt_ids(length, seed=length) for length in (6, 3, 9)]
    cache = target.new_cache(48, rows=3)
    prefill(target, kept, cache)
    assert cache.lengths == [6, 3, 9]
    rounds = [[[0, 2, 5, 7], [0], [0, 1]], [[0], [0, 1, 4], [0, 2, 5]], [[0, 1, 3, 6], [0, 2], [0]]]
    for number, found in enumerate(rounds):
        bases = list(cache.lengths)
        ancestors = ancestor_mask(torch.tensor([PARENTS]).expand(len(found), -1))
        positions = tree_positions(ancestors.sum(-1) - 1, torch.tensor(bases))
        visible = visible_slots(ancestors, torch.tensor(bases), cache.length + len(PARENTS))
        ids = torch.tensor([NODES]).expand(len(found), -1)
        target.forward(ids, positions, additive_mask(visible, torch.float32), cache)
        cache.commit(bases, found)
        kept = [[*row, *(NODES[node] for node in path)] for row, path in zip(kept, found, strict=True)]
        if number == 1:
            cache.keep_rows(torch.tensor([2, 0, 1]))
            kept = [kept[2], kept[0], kept[1]]
    assert cache.lengths == [len(row) for row in kept]
    got = one_each(target, cache, [7, 8, 9])
    want = torch.cat([fresh(target, [*row, token]) for row, token in zip(kept, [7, 8, 9], strict=True)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_visible_slots_by_hand() -> None:
    block = torch.tensor([[[True, False], [True, True]], [[True, False], [False, True]]])
    got = visible_slots(block, torch.tensor([1, 3]), 5).int().tolist()
    assert got[0] == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert got[1] == [[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]

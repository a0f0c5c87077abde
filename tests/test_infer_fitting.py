"""The tree that is fitted is the best one there is, and what is expected of it is what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from heads.base import TreePolicy
from heads.static import StaticTree
from infer.costs import CalibrationRequest, Costs, measure_tree_costs
from infer.fitting import MISS, UNKNOWN, Accuracy, Fit, best_nodes, best_tree, fit, priced, replay
from tests.tiny import tiny_head, tiny_target

Path = tuple[int, ...]


def random_accuracy(seed: int, depth: int, ranks: int) -> Accuracy:
    share = torch.rand(depth, ranks, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    share /= 1.3 * share.sum(1, keepdim=True)
    return Accuracy(tuple(tuple(row) for row in share.tolist()), (1,) * depth)


def value_of(accuracy: Accuracy, path: Path) -> float:
    value = 1.0
    for depth, rank in enumerate(path):
        value *= accuracy.share[depth][rank]
    return value


def all_trees(nodes: int, depth: int, ranks: int) -> set[frozenset[Path]]:
    """Every set of paths that holds their prefixes, root included, by adding node after node."""
    trees: set[frozenset[Path]] = {frozenset({()})}
    for _ in range(nodes - 1):
        trees = {
            tree | {(*path, rank)}
            for tree in trees
            for path in tree
            if len(path) < depth
            for rank in range(ranks)
            if (*path, rank) not in tree
        }
    return trees


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("nodes", range(2, 7))
def test_no_tree_of_that_size_is_better(nodes: int, seed: int) -> None:
    accuracy = random_accuracy(seed, depth=3, ranks=3)
    tree, expected = best_tree(accuracy, nodes)
    assert tree.nodes == nodes
    values = [sum(value_of(accuracy, path) for path in one) for one in all_trees(nodes, 3, 3)]
    assert len(values) >= 3 and expected == pytest.approx(max(values), abs=1e-12)
    assert expected == pytest.approx(1 + sum(value_of(accuracy, path) for path in tree.paths), abs=1e-12)


def test_smaller_trees_are_parts_of_larger_ones() -> None:
    accuracy = random_accuracy(7, depth=4, ranks=5)
    best = best_nodes(accuracy, 40)
    values = [value for _, value in best]
    assert len(best) == 40 and values == sorted(values, reverse=True)
    for count in (1, 5, 39):
        assert best_nodes(accuracy, count) == best[:count]
        StaticTree(tuple(path for path, _ in best[:count]))  # every prefix is there


def test_ties_and_nodes_without_value() -> None:
    even = Accuracy(((0.5, 0.5), (0.5, 0.5)), (4, 4))
    assert [path for path, _ in best_nodes(even, 3)] == [(0,), (1,), (0, 0)]
    few = Accuracy(((0.5, 0.0), (0.0, 0.0)), (4, 0))
    assert best_tree(few, 64) == (StaticTree(((0,),)), 1.5)
    with pytest.raises(ValueError, match="none of 4 drafts is right"):
        best_tree(Accuracy(((0.0, 0.0),), (4,)), 8)
    with pytest.raises(ValueError, match=r"nodes is 1, expected 2 or more .*--nodes"):
        best_tree(even, 1)


def planted(places: int, share: list[list[float]], known: float = 1.0, seed: int = 0) -> Tensor:
    """Ranks drawn independently by depth; what is left of a depth's shares is a miss."""
    generator = torch.Generator().manual_seed(seed)
    columns = []
    alive_R = torch.ones(places, dtype=torch.bool)
    for row in share:
        p = torch.tensor([*row, 1 - sum(row)])
        rank_R = torch.multinomial(p, places, replacement=True, generator=generator)
        rank_R[rank_R == len(row)] = MISS
        alive_R = alive_R & (torch.rand(places, generator=generator) < known)
        columns.append(rank_R.where(alive_R, UNKNOWN))
    return torch.stack(columns, 1)


SHARE = [[0.5, 0.2, 0.1], [0.4, 0.1, 0.2], [0.3, 0.2, 0.0]]


def test_shares_are_among_places_that_got_there() -> None:
    rank_RK = torch.tensor([[0, 1, 0], [0, MISS, 2], [1, 1, UNKNOWN], [MISS, 0, 0], [0, UNKNOWN, UNKNOWN]])
    accuracy = Accuracy.of(rank_RK, 3)
    assert accuracy.tried == (5, 3, 1)
    assert accuracy.share == ((3 / 5, 1 / 5, 0.0), (0.0, 2 / 3, 0.0), (1.0, 0.0, 0.0))
    found = Accuracy.of(planted(40_000, SHARE, known=0.8), 3)
    for got, want in zip(found.share, SHARE, strict=True):
        assert got == pytest.approx(want, abs=0.02)  # above 4 standard errors of the depth seen least


def test_replay_is_the_mean_over_places_where_all_is_known() -> None:
    rank_RK = planted(500, SHARE)
    tree = best_tree(Accuracy.of(rank_RK, 3), 7)[0]
    paths = set(tree.paths)
    lengths = [max([d for d in (1, 2, 3) if tuple(ranks[:d]) in paths], default=0) for ranks in rank_RK.tolist()]
    # (every prefix of a path in the tree is in it, so the longest one is the accepted one)
    assert replay(rank_RK, tree) == pytest.approx(1 + sum(lengths) / 500)


def test_places_of_which_not_all_is_known_do_not_pull_it_down() -> None:
    """What is unknown does not depend on the ranks here, so both ways to the same figure must agree."""
    tree, expected = best_tree(Accuracy.of(planted(40_000, SHARE), 3), 7)
    assert replay(planted(40_000, SHARE, known=0.6, seed=1), tree) == pytest.approx(expected, abs=0.03)
    assert replay(torch.full((4, 3), MISS), tree) == 1.0
    assert replay(torch.full((4, 3), UNKNOWN), tree) == 1.0
    assert replay(torch.zeros(4, 2, dtype=torch.long), StaticTree(((0,), (0, 0), (0, 0, 0)))) == 3.0


def test_halves_and_sizes() -> None:
    rank_RK = planted(3000, SHARE)
    row_R = torch.arange(3000) // 100
    fits = fit(rank_RK, row_R, 3, (2, 4, 8, 1000, 2000))
    assert [one.tree.nodes for one in fits] == [2, 4, 8, 1 + 3 + 9 + 18]  # a rank of depth 3 was never seen
    whole = Accuracy.of(rank_RK, 3)
    even_R = row_R % 2 == 0
    for one in fits:
        assert (one.tree, one.expected) == best_tree(whole, one.tree.nodes)
        half = best_tree(Accuracy.of(rank_RK[even_R], 3), one.tree.nodes)[0]
        assert one.replayed == pytest.approx(replay(rank_RK[~even_R], half))
        assert one.replayed == pytest.approx(one.expected, abs=0.15)
    (alone,) = fit(rank_RK[:100], row_R[:100], 3, [4])
    assert alone.replayed is None


# ---- costs -------------------------------------------------------------------------------------------------


def test_drafts_of_static_trees_are_timed() -> None:
    target = tiny_target("llama")
    head = tiny_head(target)
    request = CalibrationRequest("head", context=12, tokens=40, repeats=1, sizes=(1, 2, 4, 8, 16))
    wide = StaticTree(tuple((a,) for a in range(6)) + tuple((a, b) for a in range(6) for b in range(2)))
    costs, draft_ms = measure_tree_costs(target, head, request, [StaticTree(((0,),)), wide], lambda text: None)
    assert len(draft_ms) == 2 and 0 < draft_ms[0] < draft_ms[1]  # the second expands six nodes
    with pytest.raises(AssertionError, match="timed one by one"):
        costs.round_ms(TreePolicy.of(wide))


def test_tokens_per_second() -> None:
    costs = Costs(
        target_ms={1: 10.0, 4: 12.0, 8: 16.0},
        commit_ms=1.0,
        first_ms={},
        level_ms={},
        overhead_ms=2.0,
        plain_overhead_ms=0.5,
        rows=2,
        context=256,
        dtype="float32",
        device="a machine",
        threads=1,
        target="t",
        head="h",
        versions={},
    )
    small, large = (StaticTree(tuple((rank,) for rank in range(count))) for count in (3, 5))
    one, two = priced([Fit(small, 1.8, 1.7), Fit(large, 2.2)], costs, [3.0, 5.0])
    assert one == Fit(small, 1.8, 1.7, 12 + 1 + 3 + 2, 1000 * 2 * 1.8 / 18)
    assert two.round_ms == 14 + 1 + 5 + 2  # a pass of 6 tokens, between those of 4 and 8
    assert replace(two, tokens_per_second=None).tokens_per_second is None

"""DraftTree and its pure functions against brute force."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heads.cache import visible_slots
from heads.tree import (
    DraftTree,
    additive_mask,
    ancestor_mask,
    chain,
    paths,
    rerank,
    tree_positions,
)


@st.composite
def parent_lists(draw: st.DrawFn, max_nodes: int = 24) -> list[int]:
    nodes = draw(st.integers(1, max_nodes))
    return [-1] + [draw(st.integers(0, n - 1)) for n in range(1, nodes)]


@st.composite
def candidate_sets(draw: st.DrawFn, max_nodes: int = 24) -> tuple[list[int], list[int], list[float]]:
    """(parents, depths, cumulative scores); steps are multiples of 1/2, 0 included: ties are frequent."""
    parents = draw(parent_lists(max_nodes))
    depths, scores = [0], [0.0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
        scores.append(scores[parent] - 0.5 * draw(st.integers(0, 4)))
    return parents, depths, scores


def as_rows(*columns: list[Any]) -> list[Tensor]:
    return [torch.tensor([column]) for column in columns]


def rerank_lists(parents: list[int], depths: list[int], scores: list[float], keep: int) -> DraftTree:
    """Rerank with each candidate's own index as its token, so that nodes can be recognised afterwards."""
    token_BC, parent_BC, depth_BC, score_BC = as_rows(list(range(len(parents))), parents, depths, scores)
    return rerank(token_BC, parent_BC, depth_BC, score_BC, keep)


# ---------------------------------------------------------------- masks, positions, paths


@given(st.lists(parent_lists(), min_size=1, max_size=3))
def test_ancestor_mask_equals_paths(trees: list[list[int]]) -> None:
    nodes = min(len(tree) for tree in trees)
    trees = [tree[:nodes] for tree in trees]  # a prefix of a topological order is a tree
    mask_BNN = ancestor_mask(torch.tensor(trees))
    assert mask_BNN.shape == (len(trees), nodes, nodes) and mask_BNN.dtype == torch.bool
    for b, tree in enumerate(trees):
        for n, path in enumerate(paths(tree)):
            assert mask_BNN[b, n].nonzero().flatten().tolist() == sorted(path)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 9, 64, 65])
def test_ancestor_mask_of_the_deepest_tree(nodes: int) -> None:
    mask_BNN = ancestor_mask(torch.arange(-1, nodes - 1)[None])
    assert torch.equal(mask_BNN[0], torch.ones(nodes, nodes, dtype=torch.bool).tril())
    mask_BNN[:, 0, 0] = False  # owns its memory: writing is allowed and stays in place
    assert mask_BNN.sum() == nodes * (nodes + 1) // 2 - 1


@given(parent_lists(), st.integers(0, 1000))
def test_positions_count_tokens_on_the_path(parents: list[int], length: int) -> None:
    depths = [len(path) - 1 for path in paths(parents)]
    positions_BN = tree_positions(torch.tensor([depths, depths]), torch.tensor([length, length + 7]))
    assert positions_BN[0].tolist() == [length + len(path) - 1 for path in paths(parents)]
    assert torch.equal(positions_BN[1], positions_BN[0] + 7)


@given(parent_lists(12), st.integers(0, 6), st.integers(0, 3))
def test_visibility_is_the_rows_prefix_then_ancestors(parents: list[int], length: int, more: int) -> None:
    lengths = [length, length + more]
    ancestors_BNN = ancestor_mask(torch.tensor([parents, parents]))
    visible_BNS = visible_slots(ancestors_BNN, torch.tensor(lengths), max(lengths) + len(parents))
    for row, filled in enumerate(lengths):
        for n, path in enumerate(paths(parents)):
            want = [*range(filled), *(filled + m for m in path)]
            assert visible_BNS[row, n].nonzero().flatten().tolist() == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_additive_mask(dtype: torch.dtype) -> None:
    visible_BNS = torch.tensor([[[True, False, True], [False, False, False]]])
    mask = additive_mask(visible_BNS, dtype)
    low = torch.finfo(dtype).min
    assert mask.shape == (1, 1, 2, 3) and mask.dtype == dtype
    assert mask[0, 0].tolist() == [[0, low, 0], [low, low, low]]
    assert torch.isfinite(mask.float().softmax(-1)).all()  # a row that sees nothing stays finite
    with pytest.raises(AssertionError, match="must be bool"):
        additive_mask(visible_BNS.float(), dtype)


def test_paths_by_hand() -> None:
    assert paths(torch.tensor([-1, 0, 0, 1, 3])) == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]]
    with pytest.raises(AssertionError, match="topological"):
        paths([-1, 2, 0])


# ---------------------------------------------------------------- DraftTree, chain


def test_validate_names_each_broken_invariant() -> None:
    tree = chain(torch.tensor([[5, 6]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([4])).validate()
    broken: list[tuple[dict[str, Any], str]] = [
        ({"parent_BN": torch.tensor([[0, 0, 1]])}, "root's parent"),
        ({"parent_BN": torch.tensor([[-1, 2, 0]])}, "topological"),
        ({"parent_BN": torch.tensor([[-1, -1, 0]])}, "topological"),
        ({"depth_BN": torch.tensor([[1, 2, 3]])}, "root's depth"),
        ({"depth_BN": torch.tensor([[0, 1, 1]])}, "depth must be its parent's"),
        ({"score_BN": torch.tensor([[-1.0, -1.0, -2.0]])}, "root's score"),
        ({"score_BN": torch.tensor([[0.0, -2.0, -1.0]])}, "must not exceed"),
        ({"score_BN": torch.tensor([[0.0, float("nan"), -1.0]])}, "must not exceed"),
        ({"score_BN": tree.score_BN.double()}, "float32"),
        ({"token_BN": tree.token_BN.int()}, "int64"),
        ({"token_BN": tree.token_BN[0]}, "shape|must be"),
        ({"proposal": "greedy"}, "unknown proposal"),
    ]
    for change, message in broken:
        with pytest.raises(AssertionError, match=message):
            replace(tree, **change).validate()


def test_chain() -> None:
    scores_BD = torch.tensor([[-1.0, -1.5], [-0.25, -3.0]], dtype=torch.bfloat16)
    tree = chain(torch.tensor([[5, 6], [7, 0]]), scores_BD, torch.tensor([4, 9])).validate()
    assert tree.token_BN.tolist() == [[4, 5, 6], [9, 7, 0]]
    assert tree.parent_BN.tolist() == [[-1, 0, 1]] * 2
    assert tree.depth_BN.tolist() == [[0, 1, 2]] * 2
    assert tree.score_BN.tolist() == [[0.0, -1.0, -1.5], [0.0, -0.25, -3.0]]
    assert (tree.rows, tree.nodes, tree.proposal) == (2, 3, "top_k")


def test_chain_without_drafts_is_the_root() -> None:
    tree = chain(torch.empty(1, 0, dtype=torch.int64), torch.empty(1, 0), torch.tensor([3])).validate()
    assert tree.token_BN.tolist() == [[3]] and tree.parent_BN.tolist() == [[-1]]


# ---------------------------------------------------------------- rerank


def preorder(parents: list[int], rank: dict[int, int]) -> list[int]:
    """Depth-first order of the nodes in `rank`, siblings by rank: the plain recursive way."""

    def visit(node: int) -> list[int]:
        children = sorted((c for c in rank if parents[c] == node), key=rank.__getitem__)
        return [node, *itertools.chain.from_iterable(visit(child) for child in children)]

    return visit(0)


@given(candidate_sets(), st.integers(1, 30))
def test_rerank_equals_brute_force(sets: tuple[list[int], list[int], list[float]], keep: int) -> None:
    parents, depths, scores = sets
    tree = rerank_lists(parents, depths, scores, keep).validate()
    best = sorted(range(len(parents)), key=lambda c: (-scores[c], depths[c], c))[:keep]
    kept = tree.token_BN[0].tolist()
    assert kept == preorder(parents, {c: i for i, c in enumerate(best)})
    assert set(kept) == set(best) and tree.nodes == min(keep, len(parents))
    # Each node kept its own parent, depth and score.
    assert [kept[p] if p >= 0 else -1 for p in tree.parent_BN[0].tolist()] == [parents[c] for c in kept]
    assert tree.depth_BN[0].tolist() == [depths[c] for c in kept]
    assert tree.score_BN[0].tolist() == [scores[c] for c in kept]


@settings(max_examples=50)
@given(candidate_sets(max_nodes=9), st.integers(1, 9))
def test_rerank_is_optimal(sets: tuple[list[int], list[int], list[float]], keep: int) -> None:
    """No connected set of the same size has a larger sum of scores, nor of path probabilities."""
    parents, depths, scores = sets
    tree = rerank_lists(parents, depths, scores, keep)
    connected = [
        chosen
        for chosen in itertools.combinations(range(1, len(parents)), tree.nodes - 1)
        if all(parents[c] == 0 or parents[c] in chosen for c in chosen)
    ]
    score = torch.tensor(scores, dtype=torch.float64)
    for value in (score, score.exp()):
        best = max(float(value[list(chosen)].sum()) for chosen in connected)
        assert float(value[tree.token_BN[0, 1:]].sum()) == pytest.approx(best)  # kept is the root + chosen


@given(candidate_sets(12), candidate_sets(12), st.integers(1, 12))
def test_rerank_treats_rows_alone(
    first: tuple[list[int], list[int], list[float]],
    second: tuple[list[int], list[int], list[float]],
    keep: int,
) -> None:
    size = min(len(first[0]), len(second[0]))
    rows = [tuple(column[:size] for column in one) for one in (first, second)]
    tokens_BC = torch.arange(size).expand(2, size)
    parent_BC, depth_BC, score_BC = (torch.tensor(list(columns)) for columns in zip(*rows, strict=True))
    both = rerank(tokens_BC, parent_BC, depth_BC, score_BC, keep).validate()
    for b, (parents, depths, scores) in enumerate(rows):
        alone = rerank_lists(parents, depths, scores, keep)  # type: ignore[arg-type]
        for name in ("token_BN", "parent_BN", "depth_BN", "score_BN"):
            assert torch.equal(getattr(both, name)[b], getattr(alone, name)[0]), name


def test_rerank_puts_the_likely_path_first() -> None:
    #      0 -> 1 (-1.0) -> 3 (-1.1) -> 5 (-1.2);  0 -> 2 (-0.9) -> 4 (-5.0)
    parents, depths = [-1, 0, 0, 1, 2, 3], [0, 1, 1, 2, 2, 3]
    tree = rerank_lists(parents, depths, [0.0, -1.0, -0.9, -1.1, -5.0, -1.2], keep=5)
    assert tree.token_BN[0].tolist() == [0, 2, 1, 3, 5]
    assert tree.parent_BN[0].tolist() == [-1, 0, 0, 2, 3]
    full = rerank_lists(parents, depths, [0.0, -1.0, -0.9, -1.1, -5.0, -1.2], keep=99)
    assert full.token_BN[0].tolist() == [0, 2, 4, 1, 3, 5]


def test_rerank_of_a_full_eagle2_candidate_set() -> None:
    """10 + 6 x 100 candidates, 60 kept: the real size, random scores."""
    generator = torch.Generator().manual_seed(0)
    parents, depths, scores, frontier = [-1], [0], [0.0], [0]
    for depth in range(1, 8):
        born = []
        for node in frontier:
            for step in torch.rand(10, generator=generator).log().sort(descending=True).values.tolist():
                born.append(len(parents))
                parents.append(node)
                depths.append(depth)
                scores.append(torch.tensor(scores[node]).add(step).item())  # fp32 sum
        frontier = sorted(born, key=lambda c: -scores[c])[:10]
    tree = rerank_lists(parents, depths, scores, keep=60).validate()
    best = sorted(range(len(parents)), key=lambda c: (-scores[c], depths[c], c))[:60]
    assert len(parents) == 611 and set(tree.token_BN[0].tolist()) == set(best)


def test_rerank_refuses() -> None:
    with pytest.raises(ValueError, match="tree size is 0"):
        rerank_lists([-1], [0], [0.0], keep=0)
    with pytest.raises(AssertionError, match="not connected"):
        rerank_lists([-1, 0, 1], [0, 1, 2], [0.0, -2.0, -1.0], keep=2)
    with pytest.raises(AssertionError, match="not connected"):
        rerank_lists([-1, 0, 1], [0, 1, 2], [0.0, float("nan"), -1.0], keep=3)

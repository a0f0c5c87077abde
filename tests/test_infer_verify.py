"""Greedy verification against a plain walk: what is emitted is what the target alone would have emitted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heads.tree import DraftTree, ancestor_mask, chain, paths
from infer.verify import Verdict, verify_greedy

VOCAB = 3  # few tokens: matches, duplicate siblings and token id 0 are all frequent


def target(path: tuple[int, ...], salt: int) -> int:
    """A deterministic target: its next token depends on the whole path."""
    state = salt
    for token in path:
        state = (state * 31 + token + 1) % 1009
    return state % VOCAB


def tree_of(parents: list[list[int]], tokens: list[list[int]]) -> DraftTree:
    depth_BN = torch.tensor([[len(path) - 1 for path in paths(row)] for row in parents])
    return DraftTree(torch.tensor(tokens), torch.tensor(parents), depth_BN, -depth_BN.float()).validate()


@st.composite
def trees(draw: st.DrawFn, unique_siblings: bool = False) -> tuple[list[int], list[int]]:
    nodes = draw(st.integers(1, 16))
    parents, tokens, taken = [-1], [draw(st.integers(0, VOCAB - 1))], set()
    for _ in range(1, nodes):
        parent, token = draw(st.integers(0, len(parents) - 1)), draw(st.integers(0, VOCAB - 1))
        if unique_siblings and (parent, token) in taken:
            continue
        taken.add((parent, token))
        parents.append(parent)
        tokens.append(token)
    return parents, tokens


def target_tokens(parents: list[int], tokens: list[int], salt: int) -> list[int]:
    return [target(tuple(tokens[m] for m in path), salt) for path in paths(parents)]


def emitted(verdict: Verdict, tokens: list[int], row: int = 0) -> list[int]:
    path, bonus = verdict.host_rows()[row]
    return [tokens[n] for n in path[1:]] + [bonus]


def check_row(verdict: Verdict, row: int, parents: list[int], tokens: list[int], salt: int) -> None:
    # Lossless: the emitted tokens are the target's own continuation of the root.
    out = emitted(verdict, tokens, row)
    want: list[int] = []
    path: tuple[int, ...] = (tokens[0],)
    for _ in out:
        want.append(target(path, salt))
        path = (*path, want[-1])
    assert out == want
    # Maximal, and the lowest-index one: brute force over every node's path.
    targets = target_tokens(parents, tokens, salt)
    alive = [p for p in paths(parents) if all(tokens[m] == targets[parents[m]] for m in p[1:])]
    best = max(alive, key=lambda p: (len(p), -p[-1]))
    nodes = len(parents)
    assert verdict.path_BA[row].tolist() == best + [-1] * (verdict.path_BA.shape[1] - len(best))
    assert verdict.path_BA.shape[1] == nodes
    assert verdict.accepted_B[row] == len(best) - 1 and verdict.bonus_B[row] == targets[best[-1]]


@given(trees(), st.integers(0, 1000))
def test_any_tree_is_lossless_and_maximal(tree: tuple[list[int], list[int]], salt: int) -> None:
    parents, tokens = tree
    verdict = verify_greedy(tree_of([parents], [tokens]), torch.tensor([target_tokens(parents, tokens, salt)]))
    check_row(verdict, 0, parents, tokens, salt)


@given(trees(unique_siblings=True), st.integers(0, 1000))
def test_without_duplicates_equals_the_plain_walk(tree: tuple[list[int], list[int]], salt: int) -> None:
    parents, tokens = tree
    targets = target_tokens(parents, tokens, salt)
    node, walked = 0, [0]
    while children := [n for n in range(len(parents)) if parents[n] == node and tokens[n] == targets[node]]:
        (node,) = children
        walked.append(node)
    verdict = verify_greedy(tree_of([parents], [tokens]), torch.tensor([targets]))
    assert verdict.host_rows() == [(walked, targets[node])]


@given(trees(), trees(), st.integers(0, 1000))
def test_rows_are_judged_alone(
    first: tuple[list[int], list[int]], second: tuple[list[int], list[int]], salt: int
) -> None:
    size = min(len(first[0]), len(second[0]))
    rows = [(parents[:size], tokens[:size]) for parents, tokens in (first, second)]
    tree = tree_of([parents for parents, _ in rows], [tokens for _, tokens in rows])
    targets = torch.tensor([target_tokens(parents, tokens, salt) for parents, tokens in rows])
    verdict = verify_greedy(tree, targets, ancestor_mask(tree.parent_BN))
    for row, (parents, tokens) in enumerate(rows):
        check_row(verdict, row, parents, tokens, salt)


@pytest.mark.parametrize("agree", range(6))
def test_chain_accepts_up_to_the_first_mismatch(agree: int) -> None:
    drafted = [10, 11, 12, 13, 14]
    truth = [*drafted[:agree], 99, 98, 97, 96, 95, 94][:6]
    tree = chain(torch.tensor([drafted]), -torch.arange(1, 6)[None].float(), torch.tensor([9]))
    verdict = verify_greedy(tree, torch.tensor([truth]))
    assert verdict.host_rows() == [(list(range(agree + 1)), 99)]


def test_one_node_tree_emits_the_bonus_only() -> None:
    verdict = verify_greedy(tree_of([[-1]], [[7]]), torch.tensor([[0]]))
    assert verdict.path_BA.tolist() == [[0]] and verdict.accepted_B.tolist() == [0]
    assert verdict.host_rows() == [([0], 0)]


def test_padding_is_never_taken_for_token_zero() -> None:
    """After a leaf the target says token 0: a pad value of 0 would be "accepted" there."""
    tree = tree_of([[-1, 0, 0, 2]], [[4, 5, 6, 0]])
    verdict = verify_greedy(tree, torch.tensor([[5, 0, 0, 0]]))
    assert verdict.path_BA.tolist() == [[0, 1, -1, -1]] and verdict.bonus_B.tolist() == [0]
    verdict = verify_greedy(tree, torch.tensor([[6, 0, 0, 0]]))  # and a drafted 0 is a token like any other
    assert verdict.path_BA.tolist() == [[0, 2, 3, -1]]


def test_duplicate_siblings_take_the_deeper_then_the_lower_index() -> None:
    # 1 and 2 hold the same token; only 2 has the right child.
    verdict = verify_greedy(tree_of([[-1, 0, 0, 2]], [[1, 5, 5, 6]]), torch.tensor([[5, 6, 6, 8]]))
    assert verdict.host_rows() == [([0, 2, 3], 8)]
    verdict = verify_greedy(tree_of([[-1, 0, 0]], [[1, 5, 5]]), torch.tensor([[5, 6, 6]]))
    assert verdict.host_rows() == [([0, 1], 6)]


def test_root_token_need_not_match_anything() -> None:
    """The root is decided: its own target token says nothing about it, though the gather points there."""
    verdict = verify_greedy(tree_of([[-1, 0]], [[1, 2]]), torch.tensor([[2, 3]]))
    assert verdict.host_rows() == [([0, 1], 3)]


def test_sampled_trees_are_refused() -> None:
    tree = chain(torch.tensor([[1]]), torch.tensor([[-1.0]]), torch.tensor([0]), proposal="sampled")
    with pytest.raises(ValueError, match="'sampled', expected 'top_k'"):
        verify_greedy(tree, torch.tensor([[1, 1]]))

"""Greedy verification against a plain walk: what is emitted is what the target alone would have emitted.

And the walk's edges: which rule takes which tree, missing and repeated children, residuals without mass, laws that are
no laws, host syncs. That the rules emit the target's law is tests/test_infer_law.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import infer.verify
from heads.tree import DraftTree, ancestor_mask, chain, paths
from infer.verify import RULES, Law, Sampled, TopK, TypicalLossy, Verdict, verify_greedy, walk

# Limits of wall-clock time fail on a busy machine.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


@patient
@given(trees(), st.integers(0, 1000))
def test_any_tree_is_lossless_and_maximal(tree: tuple[list[int], list[int]], salt: int) -> None:
    parents, tokens = tree
    verdict = verify_greedy(tree_of([parents], [tokens]), torch.tensor([target_tokens(parents, tokens, salt)]))
    check_row(verdict, 0, parents, tokens, salt)


@patient
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


@patient
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


# ---------------------------------------------------------------- the walk


def law_of(*rows: list[float]) -> Law:
    """The same law at every node: row b's tokens have these probabilities."""
    return lambda node_B, path_BD: torch.tensor(rows).log()


def uniforms(rows: int, value: float | list[float], levels: int = 3, slots: int = 4) -> Tensor:
    """u for all, or [bonus, child 0, child 1, ..] at every level."""
    columns = [value] * slots if isinstance(value, float) else value + [0.5] * (slots - len(value))
    return torch.tensor(columns, dtype=torch.float64).expand(rows, levels, slots)


def sampled_tree(parents: list[int], tokens: list[int], q: list[float]) -> DraftTree:
    """One row; all nodes share one q."""
    tree = tree_of([parents], [tokens])
    row_1N = torch.tensor([[0 if n in parents else -1 for n in range(len(parents))]])
    return replace(tree, proposal="sampled", q_BMV=torch.tensor([[q]]), q_row_BN=row_1N).validate()


@patient
@given(trees(unique_siblings=True), trees(unique_siblings=True), st.integers(0, 1000))
def test_the_greedy_walk_equals_greedy_verification(
    first: tuple[list[int], list[int]], second: tuple[list[int], list[int]], salt: int
) -> None:
    size = min(len(first[0]), len(second[0]))
    rows = [(parents[:size], tokens[:size]) for parents, tokens in (first, second)]
    tree = tree_of([parents for parents, _ in rows], [tokens for _, tokens in rows])
    target_BN = torch.tensor([target_tokens(parents, tokens, salt) for parents, tokens in rows])

    def law(node_B: Tensor, path_BD: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(target_BN.gather(1, node_B[:, None])[:, 0], VOCAB).float()

    levels = int(tree.depth_BN.max())
    walked = walk(tree, RULES["greedy"], law, uniforms(2, 0.5, size + 1, size + 1), depth=levels)
    judged = verify_greedy(tree, target_BN)
    for field in ("path_BA", "accepted_B", "bonus_B"):
        assert torch.equal(getattr(walked, field), getattr(judged, field)), field


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("proposal", ["top_k", "sampled"])
def test_only_the_right_pairings_are_taken(rule: str, proposal: str) -> None:
    tree = sampled_tree([-1, 0], [0, 1], [0.5, 0.5])
    if proposal == "top_k":
        tree = replace(tree, proposal="top_k", q_BMV=None, q_row_BN=None)
    right = {"match": {"top_k", "sampled"}, "sampled": {"sampled"}}.get(rule, {"top_k"})
    if proposal in right:
        assert walk(tree, RULES[rule], law_of([0.5, 0.5]), uniforms(1, 0.4), depth=1).host_rows()
        return
    with pytest.raises(ValueError, match=f"rule '{rule}' got a tree with proposal '{proposal}', expected '"):
        walk(tree, RULES[rule], law_of([0.5, 0.5]), uniforms(1, 0.4), depth=1)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "sampled"])
def test_a_lone_root_emits_a_draw_from_the_law(rule: str) -> None:
    tree = tree_of([[-1], [-1]], [[7], [8]])
    for depth, width in ((0, None), (3, 2)):
        verdict = walk(tree, RULES[rule], law_of([0, 1, 0], [0.2, 0, 0.8]), uniforms(2, 0.6), depth=depth, width=width)
        assert verdict.host_rows() == [([0], 1), ([0], 2)] and verdict.path_BA.tolist() == [[0], [0]]
        assert verdict.host_blocks(tree) == [([0], [1]), ([0], [2])]


def test_a_lone_root_of_a_sampled_tree() -> None:
    tree = sampled_tree([-1], [7], [0.5, 0.5])
    tree = replace(tree, q_BMV=torch.empty(1, 0, 2)).validate()  # nothing was expanded
    for rule in ("sampled", "match"):
        assert walk(tree, RULES[rule], law_of([0, 1]), uniforms(1, 0.5), depth=2).host_rows() == [([0], 1)]


def test_rows_end_at_different_depths() -> None:
    """Ended rows keep their verdict while others go on, and the law is asked with paths of full length."""
    tree = tree_of([[-1, 0, 1, 2]] * 3, [[0, 1, 1, 1]] * 3)
    asked: list[tuple[list[int], list[list[int]]]] = []

    def law(node_B: Tensor, path_BD: Tensor) -> Tensor:
        asked.append((node_B.tolist(), path_BD.tolist()))
        ends = torch.tensor([0, 1, 3])
        token_B = torch.where(node_B >= ends, 2, 1)
        return torch.nn.functional.one_hot(token_B, 3).float().log()

    verdict = walk(tree, RULES["top_k"], law, uniforms(3, 0.5, 4), depth=3)
    assert verdict.host_rows() == [([0], 2), ([0, 1], 2), ([0, 1, 2, 3], 2)]
    assert verdict.accepted_B.tolist() == [0, 1, 3] and verdict.path_BA[0].tolist() == [0, -1, -1, -1]
    assert verdict.host_blocks(tree) == [([0], [2]), ([0, 1], [1, 2]), ([0, 1, 2, 3], [1, 1, 1, 2])]
    assert asked == [
        ([0, 0, 0], [[], [], []]),
        ([0, 1, 1], [[0], [1], [1]]),
        ([0, 1, 2], [[0, 0], [1, 1], [1, 1]]),
        ([0, 1, 3], [[0, 0, 0], [1, 1, 1], [1, 1, 1]]),
    ]


def test_the_walk_stops_with_the_last_row_on_a_cpu() -> None:
    calls = []

    def law(node_B: Tensor, path_BD: Tensor) -> Tensor:
        calls.append(path_BD.shape[1])
        return torch.tensor([[0.0, 0.0, 5.0]])

    walk(tree_of([[-1, 0, 1, 2]], [[0, 1, 1, 1]]), RULES["greedy"], law, uniforms(1, 0.5, 4), depth=3)
    assert calls == [0]


def test_bounds_cut_children_off() -> None:
    tree = tree_of([[-1, 0, 0, 2]], [[0, 1, 2, 2]])
    law = law_of([0, 0, 1.0])
    for depth, width, path in ((2, 2, [0, 2, 3]), (1, 2, [0, 2]), (0, 2, [0]), (2, 1, [0]), (9, 9, [0, 2, 3])):
        verdict = walk(tree, RULES["top_k"], law, uniforms(1, 0.5, 4), depth=depth, width=width)
        assert verdict.host_rows() == [(path, 2)]
    with pytest.raises(AssertionError, match="uniforms"):
        walk(tree, RULES["top_k"], law, uniforms(1, 0.5, levels=2), depth=2)


def test_a_second_sibling_with_the_same_token_is_never_accepted() -> None:
    """0.9 rejects the first; the second has no mass left, and the bonus cannot be that token either."""
    law = law_of([0.5, 0.5])
    verdict = walk(tree_of([[-1, 0, 0]], [[0, 1, 1]]), TopK(), law, uniforms(1, [0.99, 0.9, 1e-9]), depth=1)
    assert verdict.host_rows() == [([0], 0)]
    tree = sampled_tree([-1, 0, 0], [0, 1, 1], [0.0, 1.0])
    verdict = walk(tree, Sampled(), law, uniforms(1, [0.99, 0.9, 1e-9]), depth=1)
    assert verdict.host_rows() == [([0], 0)]
    for rule in ("greedy", "match"):  # and of two that match the first is followed
        verdict = walk(tree_of([[-1, 0, 0]], [[0, 1, 1]]), RULES[rule], law_of([0, 1.0]), uniforms(1, 0.5), depth=1)
        assert verdict.host_rows() == [([0, 1], 1)]


def test_children_hold_all_the_mass() -> None:
    """Nothing is left for the bonus: the last child with mass is taken, whatever the uniform."""
    almost_one, law = 1 - 2.0**-40, law_of([0, 0.3, 0.7])
    verdict = walk(tree_of([[-1, 0, 0]], [[0, 1, 2]]), TopK(), law, uniforms(1, almost_one), depth=1)
    assert verdict.path_BA.tolist() == [[0, 2, -1]]
    p = law(torch.tensor([0]), torch.empty(1, 0)).softmax(1)[0].tolist()
    verdict = walk(sampled_tree([-1, 0, 0], [0, 1, 2], p), Sampled(), law, uniforms(1, almost_one), depth=1)
    assert verdict.path_BA.tolist() == [[0, 1, -1]]  # q = p: the first is always right


def test_a_residual_without_mass_falls_back_to_possible_tokens() -> None:
    """Uniforms of 1 do not occur; they stand for what rounding might do. The bonus still has p > 0."""
    for u in (1.0, 1 - 2.0**-53):
        p = [0.0, 0.3, 0.7, 0.0]
        verdict = walk(tree_of([[-1, 0, 0]], [[0, 1, 2]]), TopK(), law_of(p), uniforms(1, u), depth=1)
        assert verdict.host_blocks(tree_of([[-1, 0, 0]], [[0, 1, 2]]))[0][1][0] in (1, 2)
        tree = sampled_tree([-1, 0], [0, 1], p)
        verdict = walk(tree, Sampled(), law_of(p), uniforms(1, [u, u]), depth=1)
        assert verdict.host_blocks(tree)[0][1][0] in (1, 2)


def test_tiny_mass_outside_the_children_is_not_lost() -> None:
    """p(first) = 1 to rounding; given that it is rejected, the second of the rest has its share, not 0 or 1."""
    scores = torch.tensor([[40.0, 0.0, 0.0]])  # the others have 4e-18 each
    tree = tree_of([[-1, 0, 0]], [[0, 0, 1]])
    for u, row in ((0.49, ([0, 2], 2)), (0.51, ([0], 2))):
        verdict = walk(tree, TopK(), lambda node, path: scores, uniforms(1, [0.5, 1.0, u]), depth=1)
        assert verdict.path_BA[0, : len(row[0])].tolist() == row[0] and verdict.accepted_B == len(row[0]) - 1


def test_surplus_children_are_skipped() -> None:
    """One token has q > 0 and there are three children: the surplus ones cannot be accepted, whatever p says."""
    tree = sampled_tree([-1, 0, 0, 0], [0, 1, 0, 2], [0.0, 1.0, 0.0])
    verdict = walk(tree, Sampled(), law_of([0.4, 0.2, 0.4]), uniforms(1, [0.99, 0.3, 1e-9, 1e-9]), depth=1)
    assert verdict.host_rows() == [([0], 2)]
    nothing = replace(tree, q_BMV=torch.zeros(1, 1, 3)).validate()
    verdict = walk(nothing, Sampled(), law_of([0.4, 0.2, 0.4]), uniforms(1, [0.5, *[1e-9] * 3]), depth=1)
    assert verdict.host_rows() == [([0], 1)]  # a plain draw from p
    broken = replace(tree, q_BMV=torch.full((1, 1, 3), torch.nan))
    without = replace(tree, q_row_BN=torch.full((1, 4), -1))
    for tree in (broken, without):
        verdict = walk(tree, Sampled(), law_of([0.4, 0.2, 0.4]), uniforms(1, [0.5, *[1e-9] * 3]), depth=1)
        assert verdict.host_rows() == [([0], 1)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("score", [-torch.inf, torch.nan])
def test_a_law_without_tokens_is_an_error_of_that_row(rule: str, score: float) -> None:
    tree = tree_of([[-1, 0]] * 2, [[0, 1], [0, 0]])
    if rule == "sampled":
        tree = replace(tree, proposal="sampled", q_BMV=torch.full((2, 1, 2), 0.5), q_row_BN=torch.tensor([[0, -1]] * 2))

    def law(node_B: Tensor, path_BD: Tensor) -> Tensor:
        return torch.tensor([[0.0, 9.0], [score, score]])

    verdict = walk(tree, RULES[rule], law, uniforms(2, 0.5), depth=1)
    assert verdict.bonus_B.tolist() == [1, -1] and verdict.accepted_B.tolist() == [1, 0]
    for read in (verdict.host_rows, lambda: verdict.host_blocks(tree)):
        with pytest.raises(ValueError, match=r"row 1 of the batch has no next token: .* all -inf or NaN"):
            read()


def test_typical_acceptance_takes_the_likeliest_child_above_its_floor() -> None:
    tree = tree_of([[-1, 0, 0, 0]], [[0, 1, 2, 3]])
    p = [0.5, 0.05, 0.2, 0.25]  # entropy 1.19 nats: 0.3 exp(-H) = 0.091, so epsilon 0.09 is the floor
    verdict = walk(tree, RULES["typical_lossy"], law_of(p), uniforms(1, 0.1), depth=1)
    assert verdict.host_rows() == [([0, 3], 0)]
    verdict = walk(tree, TypicalLossy(epsilon=0.3, delta=1.0), law_of(p), uniforms(1, 0.9), depth=1)
    assert verdict.host_rows() == [([0], 3)]
    verdict = walk(tree, TypicalLossy(epsilon=0.3, delta=0.8), law_of(p), uniforms(1, 0.9), depth=1)
    assert verdict.accepted_B == 1  # 0.8 exp(-H) = 0.243
    assert [name for name, rule in RULES.items() if not rule.lossless] == ["typical_lossy"]
    with pytest.raises(ValueError, match=r"typical delta is 0.0, expected above 0, at most 1: change delta"):
        TypicalLossy(delta=0.0)


class NoSync(TorchDispatchMode):
    """Refuses what would read a value back to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "item", "masked_select", "unique_dim"), name
        dtypes = [x.dtype for x in args[1] if x is not None] if name == "index" else []
        assert torch.bool not in dtypes, "indexed by a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", RULES)
def test_the_walk_reads_nothing_back(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = sampled_tree([-1, 0, 0, 1], [0, 1, 2, 1], [0.2, 0.5, 0.3])
    if rule != "sampled":
        tree = replace(tree, proposal="top_k", q_BMV=None, q_row_BN=None)
    law, drawn = law_of([0.2, 0.5, 0.3]), uniforms(1, 0.4)
    want = walk(tree, RULES[rule], law, drawn, depth=2).host_rows()
    monkeypatch.setattr(infer.verify, "_may_be_any", lambda mask: True)  # as on an accelerator
    with NoSync():
        verdict = walk(tree, RULES[rule], law, drawn, depth=2)
    assert verdict.host_rows() == want
    with NoSync(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        verdict.host_rows() if bool(verdict.accepted_B[0]) else None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_BMV": None}, "needs q_BMV and q_row_BN"),
        ({"q_row_BN": None}, "needs q_BMV and q_row_BN"),
        ({"proposal": "top_k"}, "a top_k tree has no q"),
        ({"q_BMV": torch.full((2, 1, 2), 0.5)}, "q_BMV is"),
        ({"q_BMV": torch.full((1, 1, 2), 0.5).double()}, "must be float32"),
        ({"q_BMV": torch.tensor([[[0.5, 0.6]]])}, "sum to 1"),
        ({"q_BMV": torch.tensor([[[-0.5, 1.5]]])}, "non-negative"),
        ({"q_BMV": torch.tensor([[[torch.nan, 1.0]]])}, "non-negative"),
        ({"q_row_BN": torch.tensor([[0]])}, "q_row_BN is"),
        ({"q_row_BN": torch.tensor([[0, -1]], dtype=torch.int32)}, "must be int64"),
        ({"q_row_BN": torch.tensor([[1, -1]])}, "must be -1 .. 0"),
        ({"q_row_BN": torch.tensor([[-1, 0]])}, "must have a row"),
    ],
)
def test_validation_of_q(change: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        replace(sampled_tree([-1, 0], [0, 1], [0.5, 0.5]), **change).validate()

"""Static trees: their rules, and their growth against slow ways to the same numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.base import TreePolicy, candidates
from heads.growing import grow
from heads.static import StaticTree, plan_of
from heads.tree import DraftTree, paths
from tests.tiny import prompt_ids, tiny_head, tiny_target

UNEVEN = ((0,), (1,), (3,), (0, 0), (0, 2), (1, 1), (0, 0, 0), (0, 0, 1), (0, 2, 1), (1, 1, 0), (0, 0, 1, 2))
TREES = {
    "uneven": StaticTree(UNEVEN),
    "chain": StaticTree(((0,), (0, 0), (0, 0, 0))),
    "one": StaticTree(((0,),)),
    "second only": StaticTree(((1,), (1, 1))),
    "star": StaticTree(((0,), (1,), (2,), (3,), (4,))),
}
each_tree = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)


def full(width: int, depth: int) -> StaticTree:
    levels = [itertools.product(range(width), repeat=length) for length in range(1, depth + 1)]
    return StaticTree(tuple(path for level in levels for path in level))


# ---- the tree ----------------------------------------------------------------------------------------------


def test_kept_depth_first_whatever_the_order() -> None:
    tree = StaticTree(UNEVEN)
    assert tree == StaticTree(UNEVEN[::-1]) and hash(tree) == hash(StaticTree(UNEVEN[::-1]))
    assert tree.paths[:6] == ((0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 0, 1, 2), (0, 2))
    assert (tree.nodes, tree.depth, tree.width) == (12, 4, 4)
    assert tree.parents == (-1, 0, 1, 2, 2, 4, 1, 6, 0, 8, 9, 0)
    assert tree.expanded == 6  # (0), (0 0), (0 0 1), (0 2), (1), (1 1)
    assert tree.cut(2).paths == ((0,), (0, 0), (0, 2), (1,), (1, 1), (3,)) and tree.cut(9) is tree
    from_json: Any = [[0], [1], [0, 0]]
    assert StaticTree(from_json).paths == ((0,), (0, 0), (1,))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([], "paths is []"),
        (None, "paths is None"),
        ("00", "paths is '00'"),
        ([[0], [0]], r"path \[0\] is there twice"),
        ([[0], [1, 0]], r"path \[1, 0\] has no parent: add \[1\]"),
        ([[0], [0, 0, 0]], r"path \[0, 0, 0\] has no parent: add \[0, 0\]"),
        ([[0], []], r"path is \[\]"),
        ([[0], [-1]], r"path is \[-1\]"),
        ([[0], [1.0]], r"path is \[1.0\]"),
        ([[0], [True]], r"path is \[True\]"),
        ([[0], ["1"]], r"path is \['1'\]"),
        ([[0], "1"], "path is '1'"),
        ([0], "path is 0"),
    ],
    ids=str,
)
def test_what_is_no_tree_is_refused(wrong: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told.replace("paths is []", r"paths is \[\]")):
        StaticTree(wrong)


def test_a_policy_takes_its_numbers_from_the_tree() -> None:
    policy = TreePolicy.of(TREES["uneven"])
    assert (policy.width, policy.depth, policy.total, policy.drafted_slots) == (4, 4, 12, 6)
    assert policy.proposals == ("top_k",) and TreePolicy().proposals == ("top_k", "sampled")
    assert policy == TreePolicy.of(TREES["uneven"]) != TreePolicy(4, 4, 12)
    for cut in (replace(policy, depth=2), policy.limited(2)):
        assert cut.static == TREES["uneven"].cut(2)
        assert (cut.width, cut.depth, cut.total, cut.drafted_slots) == (4, 2, 7, 2)
    assert replace(policy, depth=4) == policy == policy.limited(None) == policy.limited(7)
    assert full(3, 3).expanded == 12 > 3 * 3  # more than width times depth
    assert TreePolicy(10, 6, 60).limited(1) == TreePolicy(10, 1, 11)
    assert TreePolicy(1, 6, 7).limited(3) == TreePolicy(1, 3, 4)
    assert TreePolicy(6, 4, 16).limited(3) == TreePolicy(6, 3, 16)


# ---- growth, by a table ------------------------------------------------------------------------------------


class Table:
    """A drafter whose logits are noise that depends on the whole path; it checks what `grow` passes."""

    vocab = 40

    def __init__(self, rows: int, by_path: bool = True) -> None:
        self.rows, self.by_path = rows, by_path
        self.calls: list[tuple[int, int]] = []  # (nodes, slots)

    def logits(self, row: int, path: Sequence[int]) -> Tensor:
        known = path if self.by_path else [len(path)]
        seed = int(torch.tensor([row, len(path), *known]).dot(3 ** torch.arange(2 + len(known))))
        return 2.0 * torch.randn(self.vocab, generator=torch.Generator().manual_seed(seed))

    def draft(self, policy: TreePolicy, ids: Tensor | None = None, one: bool = False, sampler: Any = None) -> DraftTree:
        """one: answer with one node, as heads that do not look at the path may."""
        root_B = torch.arange(self.rows)
        paths_by_slot: list[list[list[int]]] = [[] for _ in range(self.rows)]

        def expand(output_BFV: Tensor, path_BFD: Tensor, seen_BFS: Tensor) -> Tensor:
            rows, nodes, slots = seen_BFS.shape
            assert path_BFD.shape[:2] == output_BFV.shape[:2] == (rows, nodes) and path_BFD.dtype == torch.long
            self.calls.append((nodes, slots))
            drafted = [[back(token) for token in path] for path in path_BFD.flatten(0, 1).tolist()]
            for row, node in itertools.product(range(rows), range(nodes)):
                path = drafted[row * nodes + node]
                if not one:  # the output of the parent
                    assert torch.equal(output_BFV[row, node], self.logits(row, path[:-1]))
                paths_by_slot[row].append(path)
            for row, node in itertools.product(range(rows), range(nodes)):
                path = drafted[row * nodes + node]
                want = [path[: len(other)] == other for other in paths_by_slot[row]]
                assert seen_BFS[row, node].tolist() == want  # its ancestors and itself
            out = torch.stack([self.logits(i // nodes, path) for i, path in enumerate(drafted)])
            out_BFV = out.view(rows, nodes, -1)
            return out_BFV[:, :1] if one else out_BFV

        def back(token: int) -> int:
            return token if ids is None else int((ids == token).nonzero())

        first_B1V = torch.stack([self.logits(row, []) for row in range(self.rows)])[:, None]
        return grow(root_B, first_B1V, policy, expand, lambda x: x, ids, sampler).validate()


@each_tree
@pytest.mark.parametrize("ids", [None, 3 * torch.arange(Table.vocab) + 7], ids=["all tokens", "draft vocabulary"])
def test_nodes_have_the_tokens_of_their_ranks(tree: StaticTree, ids: Tensor | None) -> None:
    table = Table(rows=2)
    drafted = table.draft(TreePolicy.of(tree), ids)
    assert drafted.parent_BN.tolist() == [list(tree.parents)] * 2
    assert drafted.depth_BN.tolist() == [[0, *(len(path) for path in tree.paths)]] * 2
    for row in range(2):
        columns: dict[tuple[int, ...], list[int]] = {(): []}
        scores: dict[tuple[int, ...], float] = {(): 0.0}
        for path in tree.paths:
            log_q = table.logits(row, columns[path[:-1]]).double().log_softmax(-1)
            best = int(log_q.argsort(descending=True)[path[-1]])
            columns[path] = [*columns[path[:-1]], best]
            scores[path] = scores[path[:-1]] + float(log_q[best])
        tokens = [columns[path][-1] if ids is None else int(ids[columns[path][-1]]) for path in tree.paths]
        assert drafted.token_BN[row].tolist() == [row, *tokens]
        assert drafted.score_BN[row, 1:].tolist() == pytest.approx([scores[path] for path in tree.paths], abs=1e-4)
    # nothing is expanded that has no children, and all of that once
    assert [nodes for nodes, _ in table.calls] == [
        len({path[:-1] for path in tree.paths if len(path) == depth + 1}) for depth in range(1, tree.depth)
    ]
    assert sum(nodes for nodes, _ in table.calls) == tree.expanded


def test_the_dynamic_and_the_sampled_growth_pass_whole_paths() -> None:
    """`Table` asserts it, and `validate` the rest."""

    def likeliest(logits: Tensor, path: Tensor, children: int) -> tuple[Tensor, Tensor]:
        assert path.shape[:2] == logits.shape[:2]
        q = logits.softmax(-1)
        return q.topk(children).indices, q

    for policy in (TreePolicy(3, 4, 20), TreePolicy(1, 4, 5), TreePolicy(5, 1, 4)):
        assert Table(2).draft(policy).nodes == policy.total
        assert Table(2).draft(policy, sampler=likeliest).depth_BN.max() == policy.depth


@pytest.mark.parametrize("policy", [TreePolicy(3, 4, 20), TreePolicy(1, 3, 4), *map(TreePolicy.of, TREES.values())])
def test_an_output_for_all_nodes_stands_for_each(policy: TreePolicy) -> None:
    """Heads that do not look at the path answer once per level."""
    many, one = (Table(2, by_path=False).draft(policy, one=one) for one in (False, True))
    for name in ("token_BN", "parent_BN", "depth_BN", "score_BN"):
        assert torch.equal(getattr(many, name), getattr(one, name))


def test_wider_than_the_draft_vocabulary() -> None:
    few = 3 * torch.arange(Table.vocab)[:3]
    with pytest.raises(ValueError, match="tree width is 4, the draft vocabulary 3: give another tree"):
        Table(1).draft(TreePolicy.of(TREES["uneven"]), few)
    with pytest.raises(ValueError, match="tree width is 4, the draft vocabulary 3: lower --tree-width"):
        Table(1).draft(TreePolicy(4, 2, 8), few)


def test_the_plan_is_made_once() -> None:
    cpu = torch.device("cpu")
    assert plan_of(StaticTree(UNEVEN), cpu) is plan_of(StaticTree(UNEVEN[::-1]), cpu)


# ---- growth, by EAGLE --------------------------------------------------------------------------------------

COUNTS = [14, 9, 12]


def states(head: Any) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Three rows of different lengths: state, features, tokens, roots."""
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(0, 512, (3, 15), generator=generator)
    features = torch.randn(3, 15, 64, generator=generator)
    state = head.start(14 + TREES["uneven"].expanded, rows=3)  # no slot to spare
    head.commit(state, features[:, :14], tokens[:, 1:15], COUNTS)
    return state, features, tokens, torch.stack([tokens[row, count] for row, count in enumerate(COUNTS)])


def drafted_alone(
    head: Any, features: Tensor, tokens: Tensor, row: int, tree: StaticTree
) -> dict[tuple[int, ...], Any]:
    """Token and log q by path; the head is run anew over the whole text and path for every node."""
    count = COUNTS[row]
    found: dict[tuple[int, ...], Any] = {(): (None, 0.0)}
    for path in tree.paths:
        state = head.start(64)
        inputs, read = features[row : row + 1, :count], tokens[row, 1 : count + 1].tolist()
        head.commit(state, inputs, torch.tensor([read]))
        for depth in range(1, len(path)):
            inputs = torch.cat([inputs, state.last_B1H], 1)
            read = [*read, found[path[:depth]][0]]
            state = head.start(64)
            head.commit(state, inputs, torch.tensor([read]))
        log_q = head.draft_logits(state.last_B1H)[0, 0].double().log_softmax(-1)
        token = int(log_q.argsort(descending=True)[path[-1]])
        found[path] = (token, found[path[:-1]][1] + float(log_q[token]))
    return found


@pytest.mark.parametrize("name", ["uneven", "chain", "second only"])
def test_eagle_against_its_paths_drafted_alone(name: str) -> None:
    head, tree = tiny_head(tiny_target("llama")), TREES[name]
    state, features, tokens, root_B = states(head)
    drafted = head.draft(state, root_B, TreePolicy.of(tree)).validate()
    for row in range(3):
        want = drafted_alone(head, features, tokens, row, tree)
        assert drafted.token_BN[row, 1:].tolist() == [want[path][0] for path in tree.paths]
        scores = [want[path][1] for path in tree.paths]
        assert drafted.score_BN[row, 1:].tolist() == pytest.approx(scores, abs=1e-3)


def test_a_full_tree_has_the_candidates_of_the_dynamic_one() -> None:
    head = tiny_head(tiny_target("llama"))
    state = head.start(64)
    generator = torch.Generator().manual_seed(3)
    head.commit(state, torch.randn(1, 7, 64, generator=generator), torch.tensor([prompt_ids(7)]))

    def nodes(policy: TreePolicy) -> dict[tuple[int, ...], float]:
        tree = head.draft(state, torch.tensor([5]), policy).validate()
        tokens, scores = tree.token_BN[0].tolist(), tree.score_BN[0].tolist()
        found = {tuple(tokens[n] for n in path[1:]): scores[path[-1]] for path in paths(tree.parent_BN[0])}
        assert len(found) == tree.nodes
        return found

    for width, depth in ((3, 2), (2, 3), (1, 4), (5, 1)):
        static = nodes(TreePolicy.of(full(width, depth)))
        dynamic = nodes(TreePolicy(width, depth, candidates(width, depth)))
        assert set(dynamic) <= set(static)
        assert (set(dynamic) == set(static)) == (width == 1 or depth <= 2)  # deeper, it leaves the worst unexpanded
        for path, score in dynamic.items():
            assert static[path] == pytest.approx(score, abs=1e-4) and math.isfinite(score)

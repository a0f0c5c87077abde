"""EAGLE's decoding state and tree against slow ways to the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads.base import TreePolicy
from heads.growing import _best_children, sampled_levels
from heads.tree import paths
from tests.tiny import prompt_ids, tiny_head, tiny_target

TOKENS = prompt_ids(15, seed=4)


def committed(head: Any, features: torch.Tensor, sizes: list[int], policy: TreePolicy | None = None) -> Any:
    """A state that got the text in blocks of these sizes; with a policy, drafts after each."""
    state = head.start(64)
    done = 0
    for size in sizes:
        after = torch.tensor([TOKENS[done + 1 : done + size + 1]])
        head.commit(state, features[:, done : done + size], after)
        done += size
        if policy is not None:
            head.draft(state, torch.tensor([TOKENS[done]]), policy)
    return state


@pytest.fixture(name="head", params=["eagle", "eagle3", "eagle3 with norms"])
def make_head(request: pytest.FixtureRequest) -> Any:
    """EAGLE-3 reads two layers here: 128 columns, of which `alike` makes the features that these tests hand on."""
    kind, _, norms = request.param.partition(" ")
    options: dict[str, Any] = {"taps": (0, 2)} if kind == "eagle3" else {}
    return tiny_head(tiny_target("llama"), kind=kind, **options | ({"norm_output": True} if norms else {}))


@pytest.fixture(name="features")
def make_features(head: Any) -> torch.Tensor:
    return random_features(head, len(TOKENS), 5)


def random_features(head: Any, length: int, seed: int, rows: int = 1) -> torch.Tensor:
    width = 64 * max(1, len(head.needs.taps))
    return torch.randn(rows, length, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sizes", [[14], [5, 1, 4, 2, 2], [1] * 14])
def test_state_does_not_depend_on_the_blocks_nor_on_drafts(head: Any, features: torch.Tensor, sizes: list[int]) -> None:
    want = committed(head, features, [14])
    got = committed(head, features, sizes, TreePolicy(width=3, depth=3, total=8))
    assert got.lengths == want.lengths == [14]
    for name in ("keys", "values"):
        left, right = getattr(got, name)[:, :, :14], getattr(want, name)[:, :, :14]
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.last_B1H, want.last_B1H, atol=1e-5, rtol=1e-5)
    # The stride of a longer row, kept by a slice, makes a CPU's bf16 LM head 25 times slower.
    assert got.last_B1H.stride() == (64, 64, 1)


def recomputed(head: Any, features: torch.Tensor, path: list[int]) -> torch.Tensor:
    """Log-probabilities [1, 1, V] after a path, drafted alone: the head runs over the whole text at each step.

    path: drafted tokens, the root excluded. The head at index p reads feature p and token p + 1; behind the text what
    it handed on takes the place of what it read.
    """
    with torch.no_grad():
        hidden, tokens = head.read(features[:, :14]), TOKENS[1:15]
    head.read = lambda x: x  # it was read already
    try:
        for token in [*path, None]:
            state = head.start(64)
            head.commit(state, hidden, torch.tensor([tokens]))
            if token is None:
                return head.step_logits(0, state.last_B1H).log_softmax(-1)
            with torch.no_grad():
                hidden, tokens = torch.cat([hidden, head.hand_on(state.last_B1H)], 1), [*tokens, token]
    finally:
        del head.read
    raise AssertionError("unreachable")


def chain_log_prob(head: Any, features: torch.Tensor, path: list[int]) -> float:
    return sum(recomputed(head, features, path[:i])[0, 0, token].item() for i, token in enumerate(path))


@pytest.mark.parametrize(
    "policy", [TreePolicy(3, 4, 14), TreePolicy(4, 2, 30), TreePolicy(1, 5, 6), TreePolicy(2, 1, 2)], ids=str
)
def test_tree_scores_are_those_of_its_paths_drafted_alone(
    head: Any, features: torch.Tensor, policy: TreePolicy
) -> None:
    state = committed(head, features, [9, 5])
    tree = head.draft(state, torch.tensor([TOKENS[14]]), policy).validate()
    assert tree.token_BN[0, 0] == TOKENS[14]
    assert tree.depth_BN.max() <= policy.depth
    tokens = tree.token_BN[0].tolist()
    for path in paths(tree.parent_BN[0])[1:]:
        want = chain_log_prob(head, features, [tokens[node] for node in path[1:]])
        assert tree.score_BN[0, path[-1]].item() == pytest.approx(want, abs=1e-3)


def expanded(head: Any, features: torch.Tensor, policy: TreePolicy) -> set[tuple[int, ...]]:
    """EAGLE-2 by brute force: candidates scored alone, the best kept. Paths are tuples of drafted tokens."""
    frontier: list[tuple[int, ...]] = [()]
    candidates: dict[tuple[int, ...], float] = {}
    for _ in range(policy.depth):
        level: dict[tuple[int, ...], float] = {}
        for path in frontier:
            scores = [(chain_log_prob(head, features, [*path, t]), t) for t in children(head, features, path)]
            best = sorted(scores, reverse=True)[: policy.width]
            level |= {(*path, token): score for score, token in best}
        candidates |= level
        frontier = sorted(level, key=level.__getitem__, reverse=True)[: policy.width]
    return set(sorted(candidates, key=candidates.__getitem__, reverse=True)[: policy.total - 1])


def children(head: Any, features: torch.Tensor, path: tuple[int, ...]) -> list[int]:
    """A few more tokens than the policy keeps, by the head's logits after the path."""
    return recomputed(head, features, list(path))[0, 0].topk(5).indices.tolist()


@pytest.mark.parametrize("policy", [TreePolicy(3, 3, 9), TreePolicy(2, 3, 30)], ids=str)
def test_tree_has_the_best_nodes(head: Any, features: torch.Tensor, policy: TreePolicy) -> None:
    state = committed(head, features, [14])
    tree = head.draft(state, torch.tensor([TOKENS[14]]), policy)
    tokens = tree.token_BN[0].tolist()
    got = {tuple(tokens[node] for node in path[1:]) for path in paths(tree.parent_BN[0])[1:]}
    assert got == expanded(head, features, policy)


def test_scores_of_extreme_logits() -> None:
    """Far below the best, exp is cut to spare denormal numbers; log_softmax results all the same."""
    logits = torch.randn(6, 512, generator=torch.Generator().manual_seed(6))
    logits = logits * torch.tensor([[0.0], [0.1], [1.0], [30.0], [300.0], [3e4]])
    score, token = _best_children(logits[None], 4, None)
    want = logits[None].double().log_softmax(-1).gather(2, token).float()
    torch.testing.assert_close(score, want, atol=1e-5, rtol=1e-6)


def test_drafting_needs_a_commit_and_room(head: Any, features: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="commit comes before draft"):
        head.draft(head.start(8), torch.tensor([1]), TreePolicy())
    state = head.start(14)
    head.commit(state, features[:, :14], torch.tensor([TOKENS[1:15]]))
    with pytest.raises(AssertionError, match="slots"):
        head.draft(state, torch.tensor([TOKENS[14]]), TreePolicy())


def test_binding_to_another_width_is_refused() -> None:
    head = tiny_head(tiny_target("llama"))
    other = tiny_target(type(head.target.config)(**{**head.target.config.to_dict(), "vocab_size": 256}))
    with pytest.raises(ValueError, match="vocab_size"):
        head.bind(other)


COUNTS = [14, 9, 12]


def rows_of(head: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A ragged state of three rows with their own texts and features, committed in two blocks."""
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(0, 512, (3, 15), generator=generator)
    features = random_features(head, 15, 9, rows=3)
    state = head.start(64, rows=3)
    head.commit(state, features[:, :6], tokens[:, 1:7])
    after = [count - 6 for count in COUNTS]
    head.commit(state, features[:, 6:14], tokens[:, 7:15], after)
    return state, features, tokens


def alone(head: Any, features: torch.Tensor, tokens: torch.Tensor, row: int) -> Any:
    state = head.start(64)
    head.commit(state, features[row : row + 1, : COUNTS[row]], tokens[row : row + 1, 1 : COUNTS[row] + 1])
    return state


def test_rows_do_not_depend_on_each_other(head: Any) -> None:
    state, features, tokens = rows_of(head)
    policy = TreePolicy(3, 4, 14)
    roots = torch.stack([tokens[row, count] for row, count in enumerate(COUNTS)])
    trees = head.draft(state, roots, policy).validate()
    head.keep_rows(state, torch.tensor([2, 0]))
    kept = head.draft(state, roots[[2, 0]], policy)
    for row in range(3):
        single = alone(head, features, tokens, row)
        torch.testing.assert_close(rows_of(head)[0].last_B1H[row], single.last_B1H[0], atol=1e-5, rtol=1e-5)
        tree = head.draft(single, roots[row : row + 1], policy)
        for name in ("token_BN", "parent_BN", "depth_BN"):
            assert torch.equal(getattr(trees, name)[row], getattr(tree, name)[0])
            if row in (2, 0):
                assert torch.equal(getattr(kept, name)[(2, 0).index(row)], getattr(tree, name)[0])


def likeliest(logits: torch.Tensor, path: torch.Tensor, children: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A `ChildSampler` without chance, so that its trees can be checked path by path."""
    q = logits.softmax(-1)
    return q.topk(children).indices, q


@pytest.mark.parametrize("policy", [TreePolicy(4, 3, 14), TreePolicy(1, 4, 5), TreePolicy(6, 4, 16)], ids=str)
def test_sampled_trees_carry_their_distributions(head: Any, features: torch.Tensor, policy: TreePolicy) -> None:
    """q of every expanded node is the head's own distribution after that node's path, computed alone."""
    state = committed(head, features, [9, 5])
    tree = head.draft(state, torch.tensor([TOKENS[14]]), policy, likeliest).validate()
    assert tree.proposal == "sampled" and tree.nodes <= policy.total and tree.depth_BN.max() == policy.depth
    tokens = tree.token_BN[0].tolist()
    has_children = set(tree.parent_BN[0].tolist())
    for path in paths(tree.parent_BN[0]):
        row = int(tree.q_row_BN[0, path[-1]])
        assert (row >= 0) == (path[-1] in has_children)
        if row < 0:
            continue
        drafted = [tokens[node] for node in path[1:]]
        for token in (3, 77, 400):
            whole = chain_log_prob(head, features, [*drafted, token])
            above = chain_log_prob(head, features, drafted) if drafted else 0.0
            assert tree.q_BMV[0, row, token].log().item() == pytest.approx(whole - above, abs=2e-3)


@pytest.mark.parametrize("total", range(2, 40))
def test_sampled_levels_fit(total: int) -> None:
    for width in (1, 3, 8):
        for depth in (1, 2, 4, 6):
            plan = sampled_levels(TreePolicy(width, depth, total))
            assert sum(f * k for f, k in plan) <= total - 1
            assert len(plan) == min(depth, total - 1) and plan[0][0] == 1
            assert all(f <= a * b for (f, _), (a, b) in zip(plan[1:], plan[:-1], strict=True))

"""EAGLE's decoding state and tree against slow ways to the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads.base import TreePolicy
from heads.growing import _best_children
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
            head.draft(state, TOKENS[done], policy)
    return state


@pytest.fixture(name="head")
def make_head() -> Any:
    return tiny_head(tiny_target("llama"))


@pytest.fixture(name="features")
def make_features() -> torch.Tensor:
    return torch.randn(1, len(TOKENS), 64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("sizes", [[14], [5, 1, 4, 2, 2], [1] * 14])
def test_state_does_not_depend_on_the_blocks_nor_on_drafts(head: Any, features: torch.Tensor, sizes: list[int]) -> None:
    want = committed(head, features, [14])
    got = committed(head, features, sizes, TreePolicy(width=3, depth=3, total=8))
    assert got.length == want.length == 14
    for name in ("keys", "values"):
        left, right = getattr(got, name)[:, :, :14], getattr(want, name)[:, :, :14]
        torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.last_11H, want.last_11H, atol=1e-5, rtol=1e-5)
    # The stride of a longer row, kept by a slice, makes a CPU's bf16 LM head 25 times slower.
    assert got.last_11H.stride() == (64, 64, 1)


def chain_log_prob(head: Any, features: torch.Tensor, path: list[int]) -> float:
    """log q of a path, drafted alone: every step recomputes the head over the whole text and the path so far.

    path: drafted tokens, the root excluded. The head at index p reads feature p and token p + 1.
    """
    count = 14
    inputs, tokens = features[:, :count], TOKENS[1 : count + 1]
    total = 0.0
    for index, token in enumerate(path):
        state = head.start(64)
        head.commit(state, inputs, torch.tensor([tokens]))
        total += head.target.logits(state.last_11H)[0, 0].log_softmax(-1)[token].item()
        if index + 1 < len(path):  # the drafted feature takes the place of the true one
            inputs = torch.cat([inputs, state.last_11H], 1)
            tokens = [*tokens, token]
    return total


@pytest.mark.parametrize(
    "policy", [TreePolicy(3, 4, 14), TreePolicy(4, 2, 30), TreePolicy(1, 5, 6), TreePolicy(2, 1, 2)], ids=str
)
def test_tree_scores_are_those_of_its_paths_drafted_alone(
    head: Any, features: torch.Tensor, policy: TreePolicy
) -> None:
    state = committed(head, features, [9, 5])
    tree = head.draft(state, TOKENS[14], policy).validate()
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
    inputs, tokens = features[:, :14], TOKENS[1:15]
    state = head.start(64)
    head.commit(state, inputs, torch.tensor([tokens]))
    for token in path:
        inputs, tokens = torch.cat([inputs, state.last_11H], 1), [*tokens, token]
        state = head.start(64)
        head.commit(state, inputs, torch.tensor([tokens]))
    return head.target.logits(state.last_11H)[0, 0].topk(5).indices.tolist()


@pytest.mark.parametrize("policy", [TreePolicy(3, 3, 9), TreePolicy(2, 3, 30)], ids=str)
def test_tree_has_the_best_nodes(head: Any, features: torch.Tensor, policy: TreePolicy) -> None:
    state = committed(head, features, [14])
    tree = head.draft(state, TOKENS[14], policy)
    tokens = tree.token_BN[0].tolist()
    got = {tuple(tokens[node] for node in path[1:]) for path in paths(tree.parent_BN[0])[1:]}
    assert got == expanded(head, features, policy)


def test_scores_of_extreme_logits() -> None:
    """Far below the best, exp is cut to spare denormal numbers; log_softmax results all the same."""
    logits = torch.randn(6, 512, generator=torch.Generator().manual_seed(6))
    logits = logits * torch.tensor([[0.0], [0.1], [1.0], [30.0], [300.0], [3e4]])
    score, token = _best_children(logits, 4, None)
    want = logits.double().log_softmax(-1).gather(1, token).float()
    torch.testing.assert_close(score, want, atol=1e-5, rtol=1e-6)


def test_drafting_needs_a_commit_and_room(head: Any, features: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="commit comes before draft"):
        head.draft(head.start(8), 1, TreePolicy())
    state = head.start(14)
    head.commit(state, features[:, :14], torch.tensor([TOKENS[1:15]]))
    with pytest.raises(AssertionError, match="slots"):
        head.draft(state, TOKENS[14], TreePolicy())


def test_binding_to_another_width_is_refused() -> None:
    head = tiny_head(tiny_target("llama"))
    other = tiny_target(type(head.target.config)(**{**head.target.config.to_dict(), "vocab_size": 256}))
    with pytest.raises(ValueError, match="vocab_size"):
        head.bind(other)

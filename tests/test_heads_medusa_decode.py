"""Decoding with Medusa and Hydra heads: the same tokens as the target's, the same drafts as training's forward."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from heads.base import HeadBatch, TreePolicy
from heads.static import StaticTree
from heads.tree import paths
from infer.engine import DecodeOptions, RowRequest, decode
from infer.stopping import StopRule
from tests.tiny import library_greedy, prompt_ids, tiny_head, tiny_model, tiny_target

KINDS = ["medusa", "hydra"]
TOKENS = prompt_ids(15, seed=4)
PROMPTS = [prompt_ids(length, seed=length) for length in (7, 1, 12, 4, 9)]
LIMITS = [20, 24, 9, 1, 16]
STATIC = TreePolicy.of(StaticTree(((0,), (0, 0), (0, 0, 0), (0, 0, 1), (0, 2), (1,), (1, 0), (3,))))
POLICIES = [TreePolicy(3, 3, 9), TreePolicy(1, 4, 5), TreePolicy(4, 2, 21), STATIC]


@functools.cache
def library_texts(name: str) -> list[list[int]]:
    model = tiny_model(name)
    return [library_greedy(model, prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]


@pytest.mark.parametrize("policy", POLICIES, ids=["tree", "chain", "wide", "static"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_greedy_text_is_the_librarys_alone_and_in_a_ragged_batch(name: str, kind: str, policy: TreePolicy) -> None:
    target = tiny_target(name)
    head = tiny_head(target, kind=kind, projection="own" if name == "gpt2" else "shared")
    rows = [RowRequest(p, StopRule(frozenset(), limit)) for p, limit in zip(PROMPTS, LIMITS, strict=True)]
    options = DecodeOptions(policy=policy)
    assert [result.ids for result in decode(target, head, rows, options)] == library_texts(name)
    assert decode(target, head, rows[:1], options)[0].ids == library_texts(name)[0]


def committed(head: Any, features_1TH: torch.Tensor, sizes: list[int]) -> Any:
    """A state that got the text in blocks of these sizes."""
    state, done = head.start(64), 0
    for size in sizes:
        after = torch.tensor([TOKENS[done + 1 : done + size + 1]])
        head.commit(state, features_1TH[:, done : done + size], after)
        done += size
    return state


@pytest.mark.parametrize("policy", [TreePolicy(3, 4, 14), TreePolicy(1, 4, 5), STATIC], ids=["tree", "chain", "static"])
@pytest.mark.parametrize("projection", ["shared", "own"])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_training(kind: str, projection: str, policy: TreePolicy) -> None:
    """Every node's score is the sum of log q along its path, by the training forward on that very path."""
    target = tiny_target("llama")
    head = tiny_head(target, kind=kind, projection=projection)
    features = torch.randn(1, len(TOKENS), target.hidden_size, generator=torch.Generator().manual_seed(5))
    root = TOKENS[14]
    tree = head.draft(committed(head, features, [9, 5]), torch.tensor([root]), policy).validate()
    tokens = tree.token_BN[0].tolist()
    for path in paths(tree.parent_BN[0])[1:]:
        drafted = [root, *(tokens[node] for node in path[1:])]
        given = torch.tensor(drafted)[:, None, None]
        weight = torch.ones(len(drafted) - 1, 1, 1, dtype=torch.bool)
        feature = features[:, 13:14]
        batch = HeadBatch(feature, given, (feature,) * (len(drafted) - 1), weight, weight[0], ())
        want = 0.0
        for k, output in enumerate(head.unroll(batch)):
            want += head.step_logits(k, output)[0, 0].log_softmax(-1)[drafted[k + 1]].item()
        assert tree.score_BN[0, path[-1]].item() == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_the_last_feature_of_each_row(kind: str) -> None:
    target = tiny_target("llama")
    head: Any = tiny_head(target, kind=kind)
    features = torch.randn(3, 5, target.hidden_size, generator=torch.Generator().manual_seed(5))
    state = head.start(64, rows=3)
    head.commit(state, features, torch.zeros(3, 5, dtype=torch.long), [5, 1, 3])
    assert torch.equal(state.feature_B1H[:, 0], torch.stack([features[0, 4], features[1, 0], features[2, 2]]))
    head.keep_rows(state, torch.tensor([2, 0]))
    assert torch.equal(state.feature_B1H[:, 0], torch.stack([features[2, 2], features[0, 4]]))


def test_sampled_proposals_are_for_heads_that_know_the_path() -> None:
    """Independent marginals are refused before anything is decoded; Hydra's are drawn, and keep to the vocabulary."""
    target = tiny_target("llama")
    row = RowRequest(PROMPTS[0], StopRule(frozenset(), 8), seed=3)
    options = DecodeOptions(TreePolicy(2, 2, 6), rule="sampled", proposal="sampled")
    with pytest.raises(ValueError, match="medusa"):
        decode(target, tiny_head(target, kind="medusa"), [row], options)
    assert len(decode(target, tiny_head(target, kind="hydra"), [row], options)[0].ids) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_match_rule_gives_the_text_of_plain_sampling(kind: str) -> None:
    target = tiny_target("llama")
    rows = [RowRequest(p, StopRule(frozenset(), 12), seed=i) for i, p in enumerate(PROMPTS)]
    want = [result.ids for result in decode(target, None, rows, DecodeOptions(rule="match"))]
    head = tiny_head(target, kind=kind)
    got = decode(target, head, rows, DecodeOptions(TreePolicy(3, 3, 9), rule="match"))
    assert [result.ids for result in got] == want


@pytest.mark.parametrize("kind", KINDS)
def test_more_levels_than_heads_are_refused(kind: str) -> None:
    target = tiny_target("llama")
    head = tiny_head(target, kind=kind, heads=2)
    row = RowRequest(PROMPTS[0], StopRule(frozenset(), 8))
    with pytest.raises(ValueError, match="--tree-depth"):
        decode(target, head, [row], DecodeOptions(TreePolicy(2, 3, 6)))
    assert decode(target, head, [row], DecodeOptions(TreePolicy(2, 2, 6)))[0].ids == library_texts("llama")[0][:8]

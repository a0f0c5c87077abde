"""The reduced draft vocabulary: choice, proposals limited to it, matches counted with it."""

from __future__ import annotations

import pytest
import torch

from heads.base import DraftHead, TreePolicy
from heads.config import HeadConfig
from heads.registry import build_head
from heads.target import TargetAdapter
from heads.vocab import coverage, frequent_tokens, token_counts
from infer.baseline import decode_plain
from infer.engine import decode_speculative
from infer.stopping import StopRule
from tests.tiny import VOCAB, prompt_ids, tiny_head, tiny_target


def test_choice_by_hand() -> None:
    counts = token_counts([[5, 5, 5, 2], [2, 7, 0]], 9)
    assert counts.tolist() == [1, 0, 2, 0, 0, 3, 0, 1, 0]
    assert frequent_tokens(counts, 2).tolist() == [2, 5]
    assert frequent_tokens(counts, 3).tolist() == [0, 2, 5]  # 0 and 7 tie: the lower id
    assert frequent_tokens(counts, 6).tolist() == [0, 1, 2, 3, 5, 7]  # unused ids fill up, lowest first
    assert coverage(counts, torch.tensor([2, 5])) == pytest.approx(5 / 7)
    for size in (0, 10):
        with pytest.raises(ValueError, match=r"head.draft_vocab"):
            frequent_tokens(counts, size)


def _reduced(target: TargetAdapter, ids: torch.Tensor) -> DraftHead:
    """`tiny_head` with the same weights, limited to `ids`."""
    whole = tiny_head(target)
    config = HeadConfig.derive("eagle", target.config, target.vocab_size, target.name, draft_vocab_size=len(ids))
    head = build_head(config).eval()
    head.load_state_dict({**whole.state_dict(), "draft_token_ids": ids})
    head.bind(target)
    return head


def test_all_tokens_change_nothing_and_few_limit_the_tree() -> None:
    target = tiny_target("llama")
    whole = tiny_head(target)
    everything = _reduced(target, torch.arange(VOCAB))
    few_ids = torch.arange(3, VOCAB, 7)
    few = _reduced(target, few_ids)
    trees = []
    for head in (whole, everything, few):
        generator = torch.Generator().manual_seed(0)
        state = head.start(64)
        head.commit(state, torch.randn(1, 6, target.hidden_size, generator=generator), torch.arange(6)[None])
        trees.append(head.draft(state, torch.tensor([5]), TreePolicy(4, 3, 12)))
    assert torch.equal(trees[0].token_BN, trees[1].token_BN)
    torch.testing.assert_close(trees[0].score_BN, trees[1].score_BN)
    drafted = set(trees[2].token_BN[0, 1:].tolist())
    assert drafted and drafted <= set(few_ids.tolist())
    assert not drafted >= set(trees[0].token_BN[0, 1:].tolist())


def test_output_stays_exact() -> None:
    target = tiny_target("llama")
    head = _reduced(target, torch.arange(3, VOCAB, 7))
    prompt, stop = prompt_ids(9), StopRule(frozenset(), 30)
    assert (
        decode_speculative(target, head, prompt, TreePolicy(4, 3, 12), stop)[0] == decode_plain(target, prompt, stop)[0]
    )


def test_a_target_token_outside_is_never_a_match() -> None:
    target = tiny_target("llama")
    generator = torch.Generator().manual_seed(1)
    feature = torch.randn(50, target.hidden_size, generator=generator)
    best = target.logits(feature).argmax(-1)
    inside = best[:25].unique()
    head = _reduced(target, inside)
    mine = head.best_draft(feature)  # the same feature: agrees wherever the token can be drafted
    assert torch.equal(mine == best, torch.isin(best, inside))
    assert 0 < int((mine == best).sum()) < 50


def test_tree_wider_than_the_draft_vocabulary_is_refused() -> None:
    target = tiny_target("llama")
    head = _reduced(target, torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="draft vocabulary 3"):
        decode_speculative(target, head, prompt_ids(5), TreePolicy(4, 2, 8), StopRule(frozenset(), 8))

"""What a tree yields: the accept length of any width, depth and size, from drafts made once.

tau is what decoding the calibration prompts greedily with that tree yields, replayed from drafts made at every place
of the target's own text. Sampled text is accepted less, so there it is an upper estimate.

Shapes: L tokens of prompt and answer, N tree nodes, F head features.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from heads.base import DraftHead, TreePolicy, candidates
from heads.target import TargetAdapter
from heads.tree import DraftTree
from infer.costs import CalibrationRequest, Say
from infer.engine import RowRequest, decode
from infer.prefill import prefill
from infer.stopping import StopRule


@dataclass(frozen=True)
class Acceptance:
    """Which drafts the target accepts, at every place of the texts that it wrote itself.

    ranks[w][prompt][place][k - 1][d - k]: of the tree of width w drafted at that place, the k-th node on the path of
    the text that follows, k = 1 .. as far as the draft is right: its rank by score among the nodes of depth <= d
    (the root's is 0; equal scores: shallower first). A tree of n nodes and depth d keeps the nodes of depth <= d
    whose rank is below n (`heads.tree.rerank`), so its rounds can be replayed one by one.
    """

    depth: int
    ranks: dict[int, list[list[list[list[int]]]]]

    def replay(self, policy: TreePolicy) -> list[list[int]]:
        """Accepted drafts of each round in which a tree of this shape decodes the texts, per prompt.

        It ends where the text is no longer known as deep as the trees may be.
        """
        prompts = []
        for places in self.ranks[policy.width]:
            rounds, place = list[int](), 0
            while place < len(places):
                path = places[place][: policy.depth]
                rounds.append(sum(ranks[policy.depth - k] < policy.total for k, ranks in enumerate(path, 1)))
                place += 1 + rounds[-1]
            prompts.append(rounds)
        return prompts

    def tau(self, policy: TreePolicy) -> float:
        """Tokens per round, bonus included: the micro average of the replayed rounds."""
        rounds = [accepted for prompt in self.replay(policy) for accepted in prompt]
        return 1 + statistics.mean(rounds)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Acceptance:
        """From JSON, where keys are text."""
        return cls(data["depth"], {int(width): prompts for width, prompts in data["ranks"].items()})


@torch.inference_mode()
def measure_acceptance(
    target: TargetAdapter, head: DraftHead, prompts: Sequence[Sequence[int]], request: CalibrationRequest, say: Say
) -> Acceptance:
    """Decodes the prompts plainly, then drafts whole trees of every width at every place of the texts.

    Raises:
        ValueError: prompts that cannot be decoded, or whose answers all end within `depth` tokens.
    """
    request = request.limited(head)
    stop = StopRule(target.eos_ids, request.tokens)
    ranks: dict[int, list[list[list[list[int]]]]] = {width: [] for width in request.widths}
    started = time.perf_counter()
    for done, prompt in enumerate(prompts, 1):
        text = decode(target, None, [RowRequest(prompt, stop)])[0].ids
        for width, places in _draft_everywhere(target, head, prompt, text, request).items():
            ranks[width].append(places)
        left = (time.perf_counter() - started) / done * (len(prompts) - done)
        say(f"acceptance: {done} of {len(prompts)} prompts, {left:.0f} s left")
    if not any(places for found in ranks.values() for places in found):
        raise ValueError(f"the answers end within {request.depth} tokens: give other prompts, or raise --tokens")
    return Acceptance(request.depth, ranks)


def _draft_everywhere(
    target: TargetAdapter, head: DraftHead, prompt: Sequence[int], text: Sequence[int], request: CalibrationRequest
) -> dict[int, list[list[list[int]]]]:
    """`Acceptance.ranks` of one text: {width: places}."""
    ids = [*prompt, *text]
    _, feature_1LF = prefill(target, [ids], target.new_cache(len(ids)), head.needs)
    assert feature_1LF is not None, "prefill with `needs` returns features"
    next_1L = torch.tensor([ids[1:]], device=target.head_device)
    whole = {w: TreePolicy(w, request.depth, candidates(w, request.depth)) for w in request.widths}
    state = head.start(len(ids) + max(policy.drafted_slots for policy in whole.values()), 1)
    head.commit(state, feature_1LF[:, : len(prompt)], next_1L[:, : len(prompt)])
    found: dict[int, list[list[list[int]]]] = {width: [] for width in request.widths}
    for place in range(len(text) - request.depth):
        at = len(prompt) + place  # of the root
        if place:
            head.commit(state, feature_1LF[:, at - 1 : at], next_1L[:, at - 1 : at])
        root_1 = torch.tensor([ids[at]], device=target.device)
        for width, places in found.items():
            places.append(path_ranks(head.draft(state, root_1, whole[width]), ids[at + 1 :], request.depth))
    return found


def path_ranks(tree: DraftTree, follows: Sequence[int], depth: int) -> list[list[int]]:
    """Ranks [k - 1][d - k] of the nodes on the path of the text that `follows` the root; see `Acceptance`."""
    token_N, parent_N, depth_N, score_N = (
        column[0].cpu() for column in (tree.token_BN, tree.parent_BN, tree.depth_BN, tree.score_BN)
    )
    index_N = torch.arange(len(token_N))
    found: list[list[int]] = []
    node = 0
    for level, token in enumerate(follows[:depth], 1):
        right = ((parent_N == node) & (token_N == token)).nonzero()
        if not len(right):
            break
        node = int(right[0, 0])
        first_N = (depth_N < level) | ((depth_N == level) & (index_N < node))  # among equal scores
        better_N: Tensor = (score_N > score_N[node]) | ((score_N == score_N[node]) & first_N)
        found.append([int((better_N & (depth_N <= limit)).sum()) for limit in range(level, depth + 1)])
    return found

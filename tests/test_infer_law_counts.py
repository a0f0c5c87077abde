"""G-tests of what the verification rules emit: right rules pass, rules that only look right are refused.

"Law" is that of the next LENGTH tokens: what a round emits, and then plain draws from p.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.tree import DraftTree, chain
from infer.sampling import (
    Processing,
    build_processors,
    draw,
    draw_in_turn,
    draw_without_replacement,
)
from infer.verify import RULES, Rule, Verdict, walk
from tests.test_infer_law import Table

# ---------------------------------------------------------------- G-tests of the tensors

ROWS = 100_000
VOCAB, DEPTH = 4, 2
LENGTH = DEPTH + 1
# A right rule fails with chance 1e-4 per G-test. There are 18, so about one re-seeding of this file in 550 would show
# a false failure; the seeds are fixed. A wrong rule must be refused at the same level; all of these have p < 1e-300.
LEVEL = 1e-4


def fit(tokens_BL: Tensor, table: Table) -> float:
    """p-value of the G-test of the rows' sequences against the table's law."""
    size = table.vocab ** tokens_BL.shape[1]
    every = torch.tensor(list(itertools.product(range(table.vocab), repeat=tokens_BL.shape[1])))
    expected = torch.ones(size, dtype=torch.float64)
    cell_B = torch.zeros(len(tokens_BL), dtype=torch.long)
    for place in range(tokens_BL.shape[1]):
        p = table.p(every[:, :place]).double()
        expected *= (p / p.sum(1, keepdim=True)).gather(1, every[:, place : place + 1])[:, 0]
        cell_B = cell_B * table.vocab + tokens_BL[:, place]
    count = torch.bincount(cell_B, minlength=size).double()
    expected *= len(tokens_BL)
    assert not count[expected == 0].any(), "a token of probability 0 was emitted"
    rare = expected < 5  # the chi-square approximation needs more: pooled
    count = torch.cat([count[~rare], count[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    count, expected = count[expected > 0], expected[expected > 0]
    g = 2 * torch.special.xlogy(count, count / expected).sum()
    half = torch.tensor((len(count) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, g / 2))


def complete(verdict: Verdict, tree: DraftTree, table: Table, generator: torch.Generator) -> Tensor:
    """The emitted tokens of every row, then plain draws up to LENGTH: [B, LENGTH]."""
    rows = tree.rows
    tokens_BL = torch.empty(rows, 0, dtype=torch.long)
    for place in range(LENGTH):
        u = torch.rand(rows, generator=generator, dtype=torch.float64)
        token_B = draw(table.p(tokens_BL), u)
        token_B = torch.where(verdict.accepted_B == place, verdict.bonus_B, token_B)
        if place + 1 < tree.nodes:
            node_B = verdict.path_BA[:, place + 1]
            drafted_B = tree.token_BN.gather(1, node_B.clamp(min=0)[:, None])[:, 0]
            token_B = torch.where(node_B >= 0, drafted_B, token_B)
        tokens_BL = torch.cat([tokens_BL, token_B[:, None]], 1)
    return tokens_BL


@dataclass
class Scene:
    """Random p and q; `widths` children per node of each level, all expanded."""

    seed: int
    widths: tuple[int, ...] = (2, 2)
    rows: int = ROWS

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.p, self.q = (Table.random(VOCAB, LENGTH, self.generator) for _ in range(2))

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(self.rows, *shape, generator=self.generator, dtype=torch.float64)

    def tree(self, children: Callable[[Tensor, int], Tensor], proposal: Any = "sampled") -> DraftTree:
        """children(q_RV, k) -> tokens [R, k]; the tree carries `self.q`, whatever children were drawn from."""
        tokens, parents = [torch.zeros(self.rows, 1, dtype=torch.long)], [-1]
        paths: list[Tensor] = [torch.empty(self.rows, 0, dtype=torch.long)]
        laws: list[Tensor] = []
        q_row, depths, level = [-1], [0], [0]
        for depth, width in enumerate(self.widths, 1):
            below = []
            for node in level:
                q_RV = self.q.p(paths[node])
                token_RK = children(q_RV, width)
                q_row[node] = len(laws)
                laws.append(q_RV)
                for j in range(width):
                    below.append(len(parents))
                    paths.append(torch.cat([paths[node], token_RK[:, j : j + 1]], 1))
                    parents.append(node)
                    depths.append(depth)
                    q_row.append(-1)
                tokens.append(token_RK)
            level = below
        rows = [torch.tensor(column).expand(self.rows, -1).contiguous() for column in (parents, depths, q_row)]
        tree = DraftTree(torch.cat(tokens, 1), rows[0], rows[1], -rows[1].float(), proposal)
        return replace(tree, q_BMV=torch.stack(laws, 1), q_row_BN=rows[2]) if proposal == "sampled" else tree

    def race(self, q_RV: Tensor, k: int) -> Tensor:
        return draw_without_replacement(q_RV, k, torch.rand(q_RV.shape, generator=self.generator))

    def in_turn(self, q_RV: Tensor, k: int) -> Tensor:
        return draw_in_turn(q_RV, torch.rand(len(q_RV), k, generator=self.generator, dtype=torch.float64))

    def replaced(self, q_RV: Tensor, k: int) -> Tensor:
        return torch.multinomial(q_RV, k, replacement=True, generator=self.generator)

    def anything(self, q_RV: Tensor, k: int) -> Tensor:
        return torch.randint(VOCAB, (len(q_RV), k), generator=self.generator)

    def best(self, q_RV: Tensor, k: int) -> Tensor:
        return q_RV.topk(k).indices

    def verdict(
        self, tree: DraftTree, rule: str | Rule, law: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> Verdict:
        chosen = RULES[rule] if isinstance(rule, str) else rule
        width = max(self.widths)
        uniform = self.uniform(len(self.widths) + 1, width + 1)
        return walk(tree, chosen, law or self.p.law, uniform, depth=len(self.widths), width=width)

    def fit(self, tree: DraftTree, verdict: Verdict) -> float:
        return fit(complete(verdict, tree, self.p, self.generator), self.p)


@pytest.mark.parametrize("widths", [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize(
    ("rule", "proposal", "children"),
    [
        ("sampled", "sampled", "race"),
        ("sampled", "sampled", "in_turn"),
        ("top_k", "top_k", "best"),
        ("match", "sampled", "race"),
    ],
)
def test_the_tensors_law_is_p(rule: str, proposal: str, children: str, widths: tuple[int, int]) -> None:
    scene = Scene(len(rule) + sum(widths), widths)
    tree = scene.tree(getattr(scene, children), proposal)
    assert scene.fit(tree, scene.verdict(tree, rule)) > LEVEL


@pytest.mark.parametrize(
    ("rule", "proposal", "children"),
    [
        ("top_k", "top_k", "anything"),  # repeated siblings in a third of the rows
        ("match", "top_k", "anything"),
        ("sampled", "sampled", "replaced"),  # drawn with replacement: repetitions are skipped
    ],
)
def test_repeated_siblings_keep_the_law(rule: str, proposal: str, children: str) -> None:
    scene = Scene(5, (3, 2))
    tree = scene.tree(getattr(scene, children), proposal)
    assert scene.fit(tree, scene.verdict(tree, rule)) > LEVEL


def test_law_of_processed_scores() -> None:
    """p and q both from `Processing`, which rules tokens out: fewer possible tokens than children, too."""
    scene = Scene(6, (3, 2))
    processors = build_processors(do_sample=True, temperature=0.7, top_k=2)
    processing = Processing([processors] * ROWS, [[0]] * ROWS)
    logits = [scene.p, scene.q]
    rows = range(ROWS)
    for table in logits:
        table.scores = Processing([processors], [[0]]).scores(table.scores, [0] * len(table.scores))
    tree = scene.tree(scene.race)
    unprocessed = Table.random(VOCAB, LENGTH, torch.Generator().manual_seed(6))  # the first drawn in `Scene`: p's
    verdict = scene.verdict(
        tree, "sampled", lambda node, path: processing.scores(unprocessed.law(node, path), rows, path)
    )
    assert (scene.p.scores == -torch.inf).sum(1).eq(VOCAB - 2).all()
    assert scene.fit(tree, verdict) > LEVEL


def test_sampled_accepts_as_often_as_theory_says() -> None:
    """One child: 1 - TV(p, q) for `sampled`, sum p q for `match`. Within 5 standard errors: 6e-7 each."""
    scene = Scene(7, (1,))
    tree = scene.tree(scene.race)
    nothing = torch.empty(1, 0, dtype=torch.long)
    p, q = scene.p.p(nothing)[0], scene.q.p(nothing)[0]
    for rule, rate in (("sampled", torch.minimum(p, q).sum()), ("match", (p * q).sum())):
        share = scene.verdict(tree, rule).accepted_B.double().mean()
        assert abs(share - rate) < 5 * (rate * (1 - rate) / ROWS) ** 0.5


# ---------------------------------------------------------------- rules that look right: the test must refuse them


def test_refuses_argmax_draft_with_softmax_q() -> None:
    scene = Scene(11)
    tree = scene.tree(scene.best)
    assert scene.fit(tree, scene.verdict(tree, "sampled")) < LEVEL


def test_refuses_filtered_draft_with_raw_q() -> None:
    scene = Scene(12)
    tree = scene.tree(lambda q_RV, k: scene.race(q_RV.where(q_RV >= q_RV.topk(2).values[:, 1:], 0.0), k))
    assert scene.fit(tree, scene.verdict(tree, "sampled")) < LEVEL


def test_refuses_bonus_without_the_temperature() -> None:
    scene = Scene(13)
    raw = Table(scene.p.scores.clone(), VOCAB)
    scene.p.scores /= 0.5
    tree = scene.tree(scene.race)
    verdict = scene.verdict(tree, "sampled")
    path_BD = complete(verdict, tree, scene.p, scene.generator)[:, :DEPTH]
    bonus_B = torch.where(verdict.accepted_B == DEPTH, draw(raw.p(path_BD), scene.uniform()), verdict.bonus_B)
    assert scene.fit(tree, replace(verdict, bonus_B=bonus_B)) < LEVEL


def test_refuses_pruning_by_the_drawn_token() -> None:
    """A child is dropped where its own q is low: then what is emitted there is a plain draw from p."""
    scene = Scene(14, (1, 1))
    tree = scene.tree(scene.race)
    assert tree.q_BMV is not None and tree.q_row_BN is not None
    own_q_BN = tree.q_BMV.gather(2, tree.token_BN[:, 1:, None])[..., 0]
    q_row_BN = tree.q_row_BN.clone()
    q_row_BN[:, :-1].masked_fill_(own_q_BN < 0.3, -1)  # no q: the children are not offered
    tree = replace(tree, q_row_BN=q_row_BN)
    assert scene.fit(tree, scene.verdict(tree, "sampled")) < LEVEL
    assert scene.fit(tree, scene.verdict(tree, "match")) > LEVEL  # but this rule does not mind


def test_refuses_siblings_reordered_by_their_q() -> None:
    scene = Scene(15)
    tree = scene.tree(lambda q, k: (t := scene.race(q, k)).gather(1, q.gather(1, t).argsort(1, descending=True)))
    assert scene.fit(tree, scene.verdict(tree, "sampled")) < LEVEL
    assert scene.fit(tree, scene.verdict(tree, "match")) > LEVEL


def test_refuses_independent_draws_per_path() -> None:
    """Each path judged with uniforms of its own, the longest taken, the next token drawn from p (Medusa's nucleus)."""
    scene = Scene(16, (1, 1))
    tree_of = [scene.tree(scene.race, "top_k") for _ in range(2)]
    verdicts = [scene.verdict(tree, "match") for tree in tree_of]
    second_B = verdicts[1].accepted_B > verdicts[0].accepted_B
    token_BN = torch.where(second_B[:, None], tree_of[1].token_BN, tree_of[0].token_BN)
    accepted_B = torch.where(second_B, verdicts[1].accepted_B, verdicts[0].accepted_B)
    slots_N = torch.arange(LENGTH)
    path_BA = slots_N.where(slots_N <= accepted_B[:, None], -1)
    bonus_B = torch.full_like(accepted_B, -1)
    for accepted in range(LENGTH):
        here_B = accepted_B == accepted
        bonus_B[here_B] = draw(scene.p.p(token_BN[here_B, 1 : accepted + 1]), scene.uniform()[here_B])
    tree = replace(tree_of[0], token_BN=token_BN)
    assert scene.fit(tree, Verdict(path_BA, accepted_B, bonus_B)) < LEVEL


def test_refuses_typical_acceptance() -> None:
    scene = Scene(17)
    tree = scene.tree(scene.best, "top_k")
    assert not RULES["typical_lossy"].lossless
    assert scene.fit(tree, scene.verdict(tree, "typical_lossy")) < LEVEL


def test_a_wider_or_deeper_bound_changes_nothing() -> None:
    """Uniforms are addressed by level and slot, so more of them leave the decisions as they are."""
    scene = Scene(18, rows=2000)
    tree = scene.tree(scene.race)
    uniform = scene.uniform(6, 7)
    verdicts = [
        walk(tree, RULES["sampled"], scene.p.law, uniform[:, : d + 1, : w + 1], depth=d, width=w)
        for d, w in ((2, 2), (5, 6))
    ]
    assert verdicts[0].host_rows() == verdicts[1].host_rows()
    alone = chain(tree.token_BN[:, 1:2], -torch.ones(2000, 1), tree.token_BN[:, 0])
    narrow = walk(alone, RULES["top_k"], scene.p.law, uniform[:, :2, :2], depth=1)
    wide = walk(replace(tree, proposal="top_k"), RULES["top_k"], scene.p.law, uniform[:, :2, :2], depth=1, width=1)
    assert narrow.host_rows() == [(path[:2], bonus) for path, bonus in wide.host_rows()]

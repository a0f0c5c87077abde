"""What the verification rules emit has the target's law.

Two layers. The rules in plain Python, with fractions: over all drafts and outcomes the emitted law *equals* p. And the
tensor code against that Python, decision by decision, for many uniforms. `test_infer_law_counts` is the third: G-tests.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.tree import DraftTree
from infer.sampling import (
    draw_in_turn,
    softmax_of,
)
from infer.verify import RULES, walk

# ---------------------------------------------------------------- the rules in plain Python


def chances(rule: str, p: Sequence[Any], q: Sequence[Any], tokens: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """The chance to accept each child once its elders were rejected; the bonus's law once all were."""
    r, q, accept = list(p), list(q), []
    for x in tokens:
        if rule == "top_k":
            chance, left = r[x], [0 if t == x else value for t, value in enumerate(r)]
        elif q[x] == 0:
            accept.append(0)
            continue
        else:
            share = [value / sum(q) for value in q]
            chance, left = min(1, r[x] / share[x]), [max(a - b, 0) for a, b in zip(r, share, strict=True)]
            q[x] = 0
        accept.append(chance)
        if sum(left) > 0:  # else the chance is 1
            r = [value / sum(left) for value in left]
    return accept, r


def outcomes(rule: str, p: Sequence[Any], q: Sequence[Any], tokens: list[int]) -> Iterator[tuple[Any, int, int]]:
    """(chance, accepted slot or -1, bonus) of one step."""
    if rule in ("greedy", "match"):
        law = p if rule == "match" else [t == p.index(max(p)) for t in range(len(p))]
        yield from ((law[y], tokens.index(y) if y in tokens else -1, y) for y in range(len(p)))
        return
    accept, rest = chances(rule, p, q, tokens)
    reached: Any = 1
    for slot, chance in enumerate(accept):
        yield reached * chance, slot, -1
        reached *= 1 - chance
    yield from ((reached * rest[y], -1, y) for y in range(len(p)))


def decide(rule: str, p: Sequence[float], q: Sequence[float], tokens: list[int], u: Sequence[float]) -> tuple[int, int]:
    """(accepted slot or -1, bonus) for given uniforms: u[0] is the bonus's, u[1 + j] that of child j."""
    if rule in ("greedy", "match"):
        y = p.index(max(p)) if rule == "greedy" else inverse(p, u[0])
        return (tokens.index(y) if y in tokens else -1), y
    accept, rest = chances(rule, p, q, tokens)
    slot = next((j for j, chance in enumerate(accept) if u[1 + j] < chance), -1)
    return slot, inverse(rest, u[0])


def inverse(p: Sequence[float], u: float) -> int:
    running = list(itertools.accumulate(p))
    return next(t for t, reached in enumerate(running) if p[t] > 0 and reached > u * running[-1])


# ---------------------------------------------------------------- exact: enumeration

# prefix -> all (chance, children) of a node, each child a token and the draft below it
Draft = Callable[[tuple[int, ...]], Iterator[tuple[Any, list[tuple[int, Any]]]]]


class World:
    """Random p and q over `vocab` tokens for every prefix, as fractions; zeros are frequent."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self._generator = vocab, torch.Generator().manual_seed(seed)
        self.p: dict[tuple[int, ...], list[Fraction]] = defaultdict(self._law)
        self.q: dict[tuple[int, ...], list[Fraction]] = defaultdict(self._law)

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self._generator))

    def _law(self) -> list[Fraction]:
        weights = [max(0, self.integer(-2, 7)) for _ in range(self.vocab)]
        weights[self.integer(0, self.vocab - 1)] += 1
        return [Fraction(weight, sum(weights)) for weight in weights]

    def fixed(self, depth: int, width: int) -> Draft:
        """One random tree; siblings may hold the same token."""
        below = [self.fixed(depth - 1, width) for _ in range(self.integer(0, width))] if depth else []
        children = [(self.integer(0, self.vocab - 1), draft) for draft in below]
        return lambda prefix: iter([(Fraction(1), children)])

    def sampled(self, depth: int, width: int) -> Draft:
        """A random shape, its children drawn from q without replacement; surplus ones are token 0."""
        below = [self.sampled(depth - 1, width) for _ in range(self.integer(0, width))] if depth else []

        def draws(prefix: tuple[int, ...]) -> Iterator[tuple[Fraction, list[tuple[int, Draft]]]]:
            q = self.q[prefix]
            count = min(len(below), sum(value > 0 for value in q))
            for tokens in itertools.permutations([t for t, value in enumerate(q) if value], count):
                chance, left = Fraction(1), Fraction(1)
                for token in tokens:
                    chance, left = chance * q[token] / left, left - q[token]
                surplus = [0] * (len(below) - count)
                yield chance, list(zip([*tokens, *surplus], below, strict=True))

        return draws

    def emitted(self, rule: str, draft: Draft, prefix: tuple[int, ...] = ()) -> dict[tuple[int, ...], Fraction]:
        law: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
        for drawn, children in draft(prefix):
            for chance, slot, bonus in outcomes(rule, self.p[prefix], self.q[prefix], [t for t, _ in children]):
                if slot < 0:
                    law[(bonus,)] += drawn * chance
                elif chance:
                    token, below = children[slot]
                    for rest, weight in self.emitted(rule, below, (*prefix, token)).items():
                        law[(token, *rest)] += drawn * chance * weight
        return law

    def completed(self, law: dict[tuple[int, ...], Fraction], length: int) -> dict[tuple[int, ...], Fraction]:
        full: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
        todo = list(law.items())
        while todo:
            tokens, chance = todo.pop()
            if len(tokens) == length:
                full[tokens] += chance
            elif chance:
                todo += [((*tokens, t), chance * weight) for t, weight in enumerate(self.p[tokens])]
        return {tokens: chance for tokens, chance in full.items() if chance}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("rule", "proposal"), [("top_k", "fixed"), ("match", "fixed"), ("sampled", "sampled"), ("match", "sampled")]
)
def test_the_enumerated_law_is_p(rule: str, proposal: str, seed: int) -> None:
    vocab, depth = 3 + seed % 3, 1 + seed % 3
    world = World(vocab, seed)
    draft = getattr(world, proposal)(depth, 3 if vocab * depth < 15 else 2)
    law = world.completed(world.emitted(rule, draft), depth + 1)
    assert law == world.completed({(): Fraction(1)}, depth + 1)  # as fractions: no tolerance


def test_the_enumerated_greedy_output_is_the_argmax() -> None:
    for seed in range(12):
        world = World(4, seed)
        law = world.emitted("greedy", world.fixed(3, 3))
        ((tokens, chance),) = [(tokens, chance) for tokens, chance in law.items() if chance]
        assert chance == 1
        for place, token in enumerate(tokens):
            p = world.p[tokens[:place]]
            assert token == p.index(max(p))


def test_enumeration_refuses_a_wrong_pairing() -> None:
    """Fixed children judged as if they had been drawn from q. (The other way round is exact, only less often accepted:
    `top_k` holds for any tree that was made before its uniforms.)
    """
    wrong = 0
    for seed in range(12):
        world = World(4, seed)
        p = world.completed({(): Fraction(1)}, 2)
        wrong += world.completed(world.emitted("sampled", world.fixed(1, 3)), 2) != p
        assert world.completed(world.emitted("top_k", world.sampled(1, 3)), 2) == p
    assert wrong >= 6  # not all: a tree without children is always right


# ---------------------------------------------------------------- tensors: the same decisions


@dataclass
class Table:
    """Scores of the next token for every prefix of fewer than `length` tokens over `vocab` ones."""

    scores: Tensor
    vocab: int

    @classmethod
    def random(cls, vocab: int, length: int, generator: torch.Generator, scale: float = 1.5) -> Table:
        prefixes = sum(vocab**size for size in range(length))
        return cls(scale * torch.randn(prefixes, vocab, generator=generator), vocab)

    def index(self, path_BD: Tensor) -> Tensor:
        """Place of each prefix: after all shorter ones, in the order of its tokens."""
        index_B = torch.zeros(len(path_BD), dtype=torch.long)
        for token_B in path_BD.unbind(1):
            index_B = index_B * self.vocab + token_B + 1
        return index_B

    def law(self, node_B: Tensor, path_BD: Tensor) -> Tensor:
        return self.scores[self.index(path_BD)]

    def p(self, path_BD: Tensor) -> Tensor:
        return softmax_of(self.law(path_BD, path_BD))


def random_tree(rows: int, nodes: int, width: int, q: Table, proposal: Any, generator: torch.Generator) -> DraftTree:
    """Every row its own tree of at most 3 levels; siblings lie anywhere behind their parent."""
    parent_BN, depth_BN = torch.full((rows, nodes), -1), torch.zeros(rows, nodes, dtype=torch.long)
    token_BN = torch.randint(q.vocab, (rows, nodes), generator=generator)
    q_BNV = torch.zeros(rows, nodes, q.vocab)
    for row in range(rows):
        children: list[list[int]] = [[] for _ in range(nodes)]
        for node in range(1, nodes):
            above = [n for n in range(node) if len(children[n]) < width and depth_BN[row, n] < 3]
            parent = above[int(torch.randint(len(above), (), generator=generator))]
            parent_BN[row, node], depth_BN[row, node] = parent, depth_BN[row, parent] + 1
            children[parent].append(node)
        paths: list[list[int]] = [[]]
        for node in range(nodes):
            if node:
                paths.append([*paths[parent_BN[row, node]], int(token_BN[row, node])])
            q_BNV[row, node] = q.p(torch.tensor([paths[node]], dtype=torch.long))[0]
            if proposal == "sampled" and children[node]:
                u_1K = torch.rand(1, len(children[node]), generator=generator, dtype=torch.float64)
                token_BN[row, children[node]] = draw_in_turn(q_BNV[row, node][None], u_1K)[0]
    tree = DraftTree(token_BN, parent_BN, depth_BN, -depth_BN.float(), proposal)
    if proposal == "sampled":
        tree = replace(tree, q_BMV=q_BNV, q_row_BN=torch.arange(nodes).expand(rows, nodes).contiguous())
    return tree.validate()


def python_walk(tree: DraftTree, row: int, rule: str, p: Table, q: Table, u: Tensor, depth: int) -> tuple[Any, int]:
    token, parent = tree.token_BN[row].tolist(), tree.parent_BN[row].tolist()
    path = [0]
    while True:
        prefix = torch.tensor([[token[n] for n in path[1:]]], dtype=torch.long)
        children = [n for n in range(len(token)) if parent[n] == path[-1]] if len(path) <= depth else []
        laws = [table.p(prefix)[0].double() for table in (p, q)]
        p_here, q_here = [(law / law.sum()).tolist() for law in laws]
        slot, bonus = decide(rule, p_here, q_here, [token[n] for n in children], u[row, len(path) - 1].tolist())
        if slot < 0:
            return path, bonus
        path.append(children[slot])


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("rule", "proposal"),
    [("greedy", "top_k"), ("top_k", "top_k"), ("match", "top_k"), ("sampled", "sampled"), ("match", "sampled")],
)
def test_tensors_decide_as_the_python_rule(rule: str, proposal: str, depth: int) -> None:
    generator = torch.Generator().manual_seed(depth)
    p, q = (Table.random(4, 4, generator) for _ in range(2))
    for table in (p, q):  # tokens that were ruled out
        table.scores.masked_fill_(torch.rand(table.scores.shape, generator=generator) < 0.2, -torch.inf)
        table.scores[:, 0].clamp_(min=-3.0)
    tree = random_tree(40, 9, 3, q, proposal, generator)
    for _ in range(5):
        u = torch.rand(40, 4, 4, generator=generator, dtype=torch.float64)
        verdict = walk(tree, RULES[rule], p.law, u, depth=depth, width=3)
        want = [python_walk(tree, row, rule, p, q, u, depth) for row in range(40)]
        assert verdict.host_rows() == want
        blocks = verdict.host_blocks(tree)
        tokens = tree.token_BN.tolist()
        assert blocks == [(path, [*(tokens[b][n] for n in path[1:]), y]) for b, (path, y) in enumerate(want)]

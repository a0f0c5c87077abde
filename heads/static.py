"""Draft trees of fixed shape: which ranks are drafted below which, decided beforehand (Medusa's "choices").

Source: Cai et al., "Medusa" (arXiv 2401.10774), sections 2.1.2 and 2.3.3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class StaticTree:
    """The drafted nodes, each by its path from the root: at every level the rank (0: likeliest) of the child taken.

    Every prefix of a path is a path too. Kept depth-first, lower rank first, whatever the order given: the order of
    the nodes of a drafted tree, behind its root.

    Raises ValueError: no path, a path twice, one without its parent, or a rank that is not an integer from 0 on.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.paths, Sequence) or isinstance(self.paths, str) or not self.paths:
            raise ValueError(f"paths is {self.paths!r}, expected a list with at least one path, such as [[0], [0, 0]]")
        known: set[tuple[int, ...]] = set()
        for given in self.paths:
            path = _ranks(given)
            if path in known:
                raise ValueError(f"path {list(path)} is there twice: remove one from paths")
            known.add(path)
        for path in known:
            if path[1:] and path[:-1] not in known:
                raise ValueError(f"path {list(path)} has no parent: add {list(path[:-1])} to paths, or remove it")
        object.__setattr__(self, "paths", tuple(sorted(known)))

    @property
    def nodes(self) -> int:
        """All nodes, root included."""
        return len(self.paths) + 1

    @functools.cached_property
    def depth(self) -> int:
        return max(len(path) for path in self.paths)

    @functools.cached_property
    def width(self) -> int:
        """The largest rank plus one: how many of the likeliest children are looked at."""
        return 1 + max(path[-1] for path in self.paths)

    @functools.cached_property
    def parents(self) -> tuple[int, ...]:
        """Index of each node's parent, the root (node 0, parent -1) included."""
        index = {path: node for node, path in enumerate(((), *self.paths))}
        return (-1, *(index[path[:-1]] for path in self.paths))

    @functools.cached_property
    def expanded(self) -> int:
        """Drafted nodes that have children: of these the head needs outputs."""
        return len(set(self.parents) - {-1, 0})

    def cut(self, depth: int) -> StaticTree:
        """The tree's first `depth` levels."""
        assert depth >= 1, f"cut to depth {depth}"
        return self if depth >= self.depth else StaticTree(tuple(path for path in self.paths if len(path) <= depth))


def _ranks(path: Any) -> tuple[int, ...]:
    fine = isinstance(path, Sequence) and not isinstance(path, str) and len(path) > 0
    if not fine or not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in path):
        raise ValueError(f"path is {path!r}, expected a list of ranks, integers from 0 on, such as [0, 2]")
    return tuple(path)


@dataclass(frozen=True)
class Level:
    """How one level of a static tree is grown, on a device. F: nodes of the level above that have children.

    parent_F: place of each one's parent among those of the level before. token_F: its own place among the level's
    nodes. seen_FS: which drafted slots (nodes with children, level by level) it sees: its ancestors and itself.
    ranks: so many of the likeliest children are looked at, of each. child_C: which of these F * ranks are drafted.
    """

    parent_F: Tensor
    token_F: Tensor
    seen_FS: Tensor
    ranks: int
    child_C: Tensor


@dataclass(frozen=True)
class StaticPlan:
    """The levels of a static tree, and order_N: from its nodes level by level to its nodes depth-first."""

    levels: tuple[Level, ...]
    order_N: Tensor
    parent_N: Tensor
    depth_N: Tensor


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def plan_of(tree: StaticTree, device: torch.device) -> StaticPlan:
    """Made once per tree and device, so that a draft sends nothing to the device."""
    by_level = [[path for path in tree.paths if len(path) == depth] for depth in range(1, tree.depth + 1)]
    inner = {path[:-1] for path in tree.paths}
    levels, slots = list[Level](), list[tuple[int, ...]]()
    before: list[tuple[int, ...]] = []  # expanded nodes of the level before
    nodes: list[tuple[int, ...]] = [()]  # of the level above the children
    for children in by_level:
        frontier = [path for path in nodes if path in inner]
        slots += frontier if frontier != [()] else []
        ranks = 1 + max(path[-1] for path in children)
        seen = [[slot == path[: len(slot)] for slot in slots] for path in frontier]
        levels.append(
            Level(
                parent_F=_index([before.index(path[:-1]) if before else 0 for path in frontier], device),
                token_F=_index([nodes.index(path) for path in frontier], device),
                seen_FS=torch.tensor(seen, dtype=torch.bool, device=device).view(len(frontier), len(slots)),
                ranks=ranks,
                child_C=_index([frontier.index(path[:-1]) * ranks + path[-1] for path in children], device),
            )
        )
        before, nodes = frontier, children
    place = {path: index for index, path in enumerate([(), *(path for level in by_level for path in level)])}
    return StaticPlan(
        levels=tuple(levels),
        order_N=_index([place[path] for path in ((), *tree.paths)], device),
        parent_N=_index(tree.parents, device),
        depth_N=_index([len(path) for path in ((), *tree.paths)], device),
    )


def _index(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=device)

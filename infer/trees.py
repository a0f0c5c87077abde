"""Which tree is drafted: tree files, as `scripts/fit_tree.py` writes them, and what is taken where none is named."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heads.base import DraftHead, TreePolicy
from heads.static import StaticTree
from heads.tree import Proposal
from infer.marked import MarkedFile

TREE_FILE = MarkedFile("draftsmith_tree", 1, "tree")
TREE_NAME = "tree.json"  # in a head's directory: the tree that is right for it

# A shape, a tree, or the file of one. None: the tree beside the head, else the default shape.
TreeChoice = TreePolicy | StaticTree | str | os.PathLike[str] | None


def read_tree(path: str | os.PathLike[str]) -> StaticTree:
    """The tree of a file {"draftsmith_tree": 1, "paths": [[0], [0, 0], [1], ..], ..}.

    Raises:
        ValueError: no such file, not one of ours, or no valid tree.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file} is not a file; expected a tree written by scripts/fit_tree.py")
    data = TREE_FILE.read(file)
    if data is None or data[TREE_FILE.mark] != TREE_FILE.schema:
        raise ValueError(
            f'{file} is not a tree; expected JSON with "{TREE_FILE.mark}": {TREE_FILE.schema}, as scripts/fit_tree.py '
            "writes it"
        )
    try:
        return StaticTree(data.get("paths"))  # type: ignore[arg-type]  # checked by the class
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def write_tree(path: Path, tree: StaticTree, source: Mapping[str, Any]) -> None:
    """`source`: where the tree comes from. Raises ValueError if `path` holds something that is no tree of ours."""
    TREE_FILE.write(path, {"paths": [list(one) for one in tree.paths], "source": source})


def tree_beside(head_dir: str | os.PathLike[str]) -> Path | None:
    """The file of the tree that was fitted for a head, if there is one."""
    path = Path(head_dir) / TREE_NAME
    return path if path.is_file() else None


def policy_of(
    tree: TreeChoice, head: DraftHead, head_dir: str | os.PathLike[str] | None, proposal: Proposal
) -> TreePolicy:
    """The choice as a policy. Raises ValueError: see `read_tree`."""
    if isinstance(tree, TreePolicy):
        return tree
    if isinstance(tree, StaticTree):
        return TreePolicy.of(tree)
    if tree is None and head_dir is not None and proposal == "top_k":
        tree = tree_beside(head_dir)
    return TreePolicy().limited(head.max_depth) if tree is None else TreePolicy.of(read_tree(tree))

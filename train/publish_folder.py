"""The folder that is published: layouts, the head itself, its adapter, how it was made, its evaluations, its card."""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from heads.adapter import CONFIG as ADAPTER_CONFIG
from heads.adapter import WEIGHTS as ADAPTER_WEIGHTS
from heads.checkpoint import ADAPTER, CONFIG, WEIGHTS, recover, replace_folder
from heads.formats.layout import FACTS
from heads.formats.opening import NATIVE
from infer.trees import TREE_FILE, TREE_NAME
from train.publish_card import MARK, Listed, card_text
from train.publish_facts import Facts
from train.publish_serve import Place
from train.resume import RUN_YAML
from train.scrub import local_paths, scrub_tree

CARD = "README.md"
# In the raw EAGLE-3 format, which vLLM and SGLang both read.
_ABSENT_IS_FALSE = ("norm_before_residual", "norm_output", "fc_norm")
PROVENANCE = "provenance.json"  # in every repository of ours, though it may be empty
_EVALUATION, _LICENCE = "evaluation", "LICENSE"

# Writes a head of ours in the layout of that name into a directory that it makes: (layout, head, directory). False: it
# was left out.
Export = Callable[[str, Path, Path], bool]


@dataclass(frozen=True)
class PublishFile:
    """A file to be published. name: in the repository. git_oid: as git names a blob of that content."""

    name: str
    path: Path
    size: int
    sha256: str
    git_oid: str


def build_folder(facts: Facts, layouts: Sequence[str], export: Export, out: Path) -> None:
    """Writes the folder, whole or not at all; an earlier one of ours is replaced.

    The first layout lies at the root, where engines look, and others in directories; one whose files are those of an
    earlier one is not written twice. Without any, the head lies there as it is.

    Raises:
        ValueError: `out` holds something else, a layout cannot hold this head, or the card cannot be made.
    """
    check_folder(out)
    recover(out)
    tmp = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    tmp.mkdir(parents=True)
    try:
        _write_native(facts, tmp / NATIVE)
        layouts_there = _write_layouts(layouts, export, tmp / NATIVE, tmp)
        for path in list((tmp / NATIVE).iterdir()):
            if not (tmp / path.name).exists():
                path.rename(tmp / path.name)
        shutil.rmtree(tmp / NATIVE)
        places = (*layouts_there, Place(NATIVE, ""))  # ours is read from what is at the root
        for name, report in zip(_names([r.name for r in facts.reports]), facts.reports, strict=True):
            (tmp / _EVALUATION).mkdir(exist_ok=True)
            _write_json(tmp / _EVALUATION / name, scrub_tree(report.data))
        if facts.licence.text is not None:
            shutil.copyfile(facts.licence.text, tmp / _LICENCE)
        _check_texts(tmp)
        listed = [Listed(file.name, file.size) for file in publish_files(tmp)]
        (tmp / CARD).write_text(card_text(facts, places, listed), encoding="utf-8")
        replace_folder(tmp, out)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)  # gone already if it was moved


def check_folder(out: Path) -> None:
    """Raises ValueError if `out` exists and is not a folder that this module wrote."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    card = out / CARD
    if not card.is_file() or MARK not in card.read_text(encoding="utf-8", errors="replace").splitlines():
        raise ValueError(f"--out: {out} exists and is not a folder that publish.py wrote; choose another")


def publish_files(folder: Path) -> list[PublishFile]:
    """Every file in the folder, by name."""
    return [_file(folder, path) for path in sorted(folder.rglob("*")) if path.is_file()]


def _file(folder: Path, path: Path) -> PublishFile:
    size = path.stat().st_size
    sha256, blob = hashlib.sha256(), hashlib.sha1(f"blob {size}\0".encode())
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
            blob.update(block)
    return PublishFile(path.relative_to(folder).as_posix(), path, size, sha256.hexdigest(), blob.hexdigest())


# ---- parts -------------------------------------------------------------------------------------------------


def _write_layouts(layouts: Sequence[str], export: Export, head: Path, tmp: Path) -> list[Place]:
    places: list[Place] = []
    for layout in layouts:
        written = tmp / layout
        if not export(layout, head, written):
            continue
        same = next((place for place in places if _equal(written, tmp / place.folder)), None)
        if same is None and places:
            places.append(Place(layout, layout))
            continue
        if same is None:  # the first
            for file in list(written.iterdir()):
                file.rename(tmp / file.name)
        shutil.rmtree(written)
        places.append(Place(layout, same.folder if same else ""))
    return places


def _equal(left: Path, right: Path) -> bool:
    """Whether an engine finds the same files in two layouts; at the root, directories are other layouts."""
    names = [{p.name for p in folder.iterdir() if p.is_file() and p.name != FACTS} for folder in (left, right)]
    different = filecmp.cmpfiles(left, right, names[0], shallow=False)[1]
    return names[0] == names[1] and set(different) <= {CONFIG} and _meaning(left) == _meaning(right)


def _meaning(folder: Path) -> dict[str, Any]:
    """A layout's config without flags that mean the same where they are absent."""
    fields: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return {name: value for name, value in fields.items() if value or name not in _ABSENT_IS_FALSE}


def _write_native(facts: Facts, folder: Path) -> None:
    """The head as training wrote it, named after its target on the hub, and nothing that it does not need."""
    folder.mkdir()
    config = replace(
        facts.config,
        target=facts.base_model,
        target_revision=facts.revision,
        target_adapter=None if facts.adapter is None else ADAPTER,
    )
    _write_json(folder / CONFIG, config.to_dict())
    shutil.copyfile(facts.folder / WEIGHTS, folder / WEIGHTS)
    if facts.adapter is not None:
        (folder / ADAPTER).mkdir()
        shutil.copyfile(facts.adapter / ADAPTER_WEIGHTS, folder / ADAPTER / ADAPTER_WEIGHTS)
        shown = json.loads((facts.adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        shown |= {"base_model_name_or_path": facts.base_model, "revision": facts.revision}
        _write_json(folder / ADAPTER / ADAPTER_CONFIG, scrub_tree(shown))
    _write_json(folder / PROVENANCE, scrub_tree(facts.provenance))
    if facts.run:
        text = yaml.safe_dump(scrub_tree(facts.run), sort_keys=False, allow_unicode=True)
        (folder / RUN_YAML).write_text(text, encoding="utf-8")
    tree = TREE_FILE.read(facts.folder / TREE_NAME)
    if tree is not None:
        _write_json(folder / TREE_NAME, scrub_tree(facts.renamed(tree)))


def _check_texts(folder: Path) -> None:
    """Raises ValueError if a text file still holds a path of this machine."""
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".yaml", ".md") and (found := local_paths(path.read_text(encoding="utf-8"))):
            raise ValueError(
                f"{path.relative_to(folder)} would hold a path of this machine, {found[0]}: please report it"
            )


def _names(names: Sequence[str]) -> list[str]:
    """The same, different from each other."""
    return [name if names.index(name) == i else f"{i}-{name}" for i, name in enumerate(names)]


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

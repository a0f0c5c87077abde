"""Says what a head's files are, which engines load them, and what is wrong; mends what follows from the rest.

A mended head is read once its tensors are put right, and written anew in its layout, which puts the config right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.checkpoint import load_head
from heads.config import HeadConfig
from heads.formats.contract import problems
from heads.formats.draft_vocab import Problem, is_absolute
from heads.formats.export import write_checked
from heads.formats.files import head_folder, read_folder
from heads.formats.layout import Files, Form, Layout, Target
from heads.formats.llama import read_rope, rename_layer
from heads.formats.opening import NATIVE, is_native, named_target, own_facts, recognise, target_config
from heads.formats.registry import LAYOUTS

_IGNORED = ("embed_tokens.weight", "t2d")  # engines share the one, and skip the other


@dataclass
class Findings:
    """What a folder holds. wrong: with whether it can be mended. engines: by name, why not ("": it loads)."""

    folder: Path
    layout: str
    kind: str
    config: HeadConfig | None = None
    mended: Files | None = None
    wrong: list[tuple[Problem, bool]] = field(default_factory=list)
    engines: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people."""
        shown = [f"{self.folder}: head of kind {self.kind}, layout {self.layout}"]
        for problem, mendable in self.wrong:
            shown.append(f"wrong: {problem}" + (" (--fix mends it)" if mendable else ""))
        shown += [f"note: {note}" for note in self.notes]
        for engine, why in self.engines.items():
            shown.append(f"{engine}: " + (f"no, {why}" if why else "loads it"))
        return shown

    def to_dict(self) -> dict[str, Any]:
        wrong = [{"where": p.where, "found": p.found, "expected": p.expected, "mendable": m} for p, m in self.wrong]
        about = {"folder": str(self.folder), "layout": self.layout, "kind": self.kind, "wrong": wrong}
        return about | {"engines": {name: why or "loads" for name, why in self.engines.items()}, "notes": self.notes}


def examine(name: str, target: Target | None = None) -> Findings:
    """Everything that shows without decoding.

    Args:
        target: compares with it, and fills in what a head takes from it.

    Raises:
        ValueError: there is no head to be read.
    """
    folder = head_folder(name)
    if is_native(folder):
        head = load_head(folder)
        found = Findings(folder, NATIVE, head.config.kind, head.config)
        for layout in LAYOUTS.values():
            found.engines[layout.engine] = _after_export(layout, head.config, head.state_dict(), target)
        return found
    files = read_folder(folder)
    layout, kind = recognise(files)
    found = Findings(folder, layout.name, kind)
    known = target or _named(folder, files, found)
    mended = _mend_tensors(files, layout.kinds[kind], kind, target, known, found)
    try:
        found.config, _ = layout.kinds[kind].read(mended, known)
    except ValueError as error:
        found.wrong.append((Problem("head", str(error), "a head that can be read"), False))
        return found
    found.mended = mended
    named = _renamed(mended, layout)
    for problem in problems(named, layout.kinds[kind], found.config, target):
        if problem.where not in _IGNORED:
            found.wrong.append((problem, target is not None))
    original = _renamed(files, layout)
    for other in LAYOUTS.values():
        found.engines[other.engine] = _loads(other, kind, original, found.config, target)
    _compare(found, target)
    return found


def write_mended(found: Findings, target: Target, out: Path) -> Path:
    """The head put right in a new directory: tensors as mended, the config written anew in the same layout.

    Raises:
        ValueError: the directory is there, or something cannot be mended.
    """
    if out.exists():
        raise ValueError(f"--fix: {out} is there already; choose a new directory")
    stuck = [str(problem) for problem, mendable in found.wrong if not mendable]
    if found.mended is None or stuck:
        raise ValueError(f"--fix: {found.folder} cannot be mended: {'; '.join(stuck) or 'it is as training wrote it'}")
    layout = LAYOUTS[found.layout]
    form = layout.kinds[found.kind]
    config, state = form.read(found.mended, target)
    longest = getattr(target.config, "max_position_embeddings", None) or config.max_position_embeddings
    config = replace(config, max_position_embeddings=longest, target=target.name)
    return write_checked(form.write(state, config, target), layout, config, target, found.folder, out)


def _named(folder: Path, files: Files, found: Findings) -> Target | None:
    """The config of the target that the head names, if it can be had: some layouts cannot be read without."""
    name = own_facts(folder).get("target") or named_target(files.config)
    if name is None:
        return None
    try:
        return target_config(str(name), None, False, None)
    except ValueError:
        found.notes.append(f"its target {name!r} is not here: give --target")
        return None


# ---- tensors -----------------------------------------------------------------------------------------------


def _mend_tensors(
    files: Files, form: Form, kind: str, target: Target | None, known: Target | None, found: Findings
) -> Files:
    """target: gives what is missing. known: what the head is read with."""
    tensors = dict(files.tensors)

    def wrong(where: str, what: str, expected: str, mendable: bool = True) -> None:
        found.wrong.append((Problem(where, what, expected), mendable))

    if any(name.startswith("model.") for name in tensors):
        wrong("names", "beginning with model.", "no prefix: vLLM puts its own before them")
        tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    dtypes = sorted({str(value.dtype) for value in tensors.values() if value.is_floating_point()})
    if len(dtypes) > 1:
        wrong("dtype", " and ".join(dtypes), "one for all")
        largest = max(tensors.values(), key=lambda value: value.numel() if value.is_floating_point() else 0)
        tensors = {n: v.to(largest.dtype) if v.is_floating_point() else v for n, v in tensors.items()}
    if kind == "eagle3":
        _mend_vocabulary(tensors, form.flat(files.config), wrong)
        _mend_lm_head(tensors, target, wrong)
    mended = replace(files, tensors=tensors)
    try:
        config, _ = form.read(mended, known)
        table = form.tensors(config, files.config)
    except (ValueError, KeyError):
        return mended  # said by the caller
    names = {_midlayer(name): name for name in tensors}
    for name in sorted(names.keys() - {_midlayer(known) for known in table} - set(_IGNORED)):
        if name == "fc.bias":
            continue  # a matter of engines, not of the head
        wrong(name, "there", "no tensor of that name: vLLM stops at it")
        del tensors[names[name]]
    return mended


def _mend_vocabulary(tensors: dict[str, Tensor], fields: Mapping[str, Any], wrong: Any) -> None:
    """d2t to ascending int64 offsets, the LM head's rows with it; t2d follows from it."""
    if "d2t" not in tensors:
        return
    d2t, vocab = tensors["d2t"], int(fields.get("vocab_size", 0))
    if d2t.dtype != torch.int64:
        wrong("d2t", str(d2t.dtype), "torch.int64")
        d2t = d2t.long()
    ids = d2t + torch.arange(len(d2t))
    if is_absolute(d2t, tensors.get("t2d"), vocab):
        wrong("d2t", "absolute target ids", "offsets: target id = draft id + d2t[draft id]")
        ids = d2t
    elif len(d2t) and (int(ids.max()) >= vocab or int(ids.min()) < 0 or not bool((ids.sort().values.diff() > 0).all())):
        wrong("d2t", "neither offsets nor target ids", "offsets", False)
        return
    order = ids.argsort()
    if not torch.equal(order, torch.arange(len(ids))):
        wrong("d2t", "unsorted", "draft ids in the order of their target ids")
        ids = ids[order]
        if "lm_head.weight" in tensors and len(tensors["lm_head.weight"]) == len(ids):
            tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = ids - torch.arange(len(ids))
    t2d = tensors.pop("t2d", None)
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], ids):
        wrong("t2d", "another set of tokens than d2t", "the target ids of d2t")
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)


def _mend_lm_head(tensors: dict[str, Tensor], target: Target | None, wrong: Any) -> None:
    rows = len(tensors["d2t"]) if "d2t" in tensors else None
    if "lm_head.weight" in tensors:
        if rows is not None and len(tensors["lm_head.weight"]) != rows:
            wrong("lm_head.weight", f"of {len(tensors['lm_head.weight'])} rows", f"{rows}, as d2t", False)
        return
    wrong("lm_head.weight", "missing", "there: SGLang would draft with a random one", target is not None)
    if target is not None:
        ids = None if rows is None else tensors["d2t"] + torch.arange(rows)
        tensors["lm_head.weight"] = target.lm_head(ids).to(tensors["fc.weight"].dtype)


# ---- engines -----------------------------------------------------------------------------------------------


def _midlayer(name: str) -> str:
    """EAGLE-3's layer under one of its two names; EAGLE-1 has no `midlayer`, so nothing is lost."""
    return rename_layer(name, "layers.0", "midlayer")


def _renamed(files: Files, layout: Layout) -> Files:
    """EAGLE-3's layer under the name of this layout's table: its engine reads both."""
    both = any(name.endswith("hidden_norm.weight") for name in files.tensors)
    if not both:
        return files
    wanted = "layers.0" if layout.name in ("speculators", "trtllm") else "midlayer"
    other = "midlayer" if wanted == "layers.0" else "layers.0"
    return replace(files, tensors={rename_layer(name, other, wanted): v for name, v in files.tensors.items()})


def _loads(layout: Layout, kind: str, files: Files, config: HeadConfig, target: Target | None) -> str:
    """Why this layout's engine does not draft rightly with the files as they are; "" if it does."""
    if kind not in layout.kinds:
        return layout.missing.get(kind, f"it has no {kind}")
    if layout.name == "speculators" and "speculators_model_type" not in files.config:
        return "the config is not of that library"
    if layout.name != "speculators" and "speculators_model_type" in files.config:
        return "the config is that of speculators"
    try:
        found = list(problems(_renamed(files, layout), layout.kinds[kind], config, target))
    except (ValueError, KeyError) as error:
        return f"the config lacks {error}" if isinstance(error, KeyError) else str(error)
    return "; ".join(str(problem) for problem in found if problem.where not in _IGNORED)


def _after_export(layout: Layout, config: HeadConfig, state: Mapping[str, Tensor], target: Target | None) -> str:
    """Why a native head cannot be exported; "" if it can. Needs the target's config for an answer."""
    if config.kind not in layout.kinds:
        return layout.missing.get(config.kind, f"it has no {config.kind}")
    if target is None:
        return f"not as it is: scripts/export.py --to {layout.name} writes it (and says if it cannot)"
    try:
        layout.kinds[config.kind].write(state, config, target)
    except ValueError as error:
        return str(error)
    return f"not as it is: scripts/export.py --to {layout.name} writes it"


def _compare(found: Findings, target: Target | None) -> None:
    """What may be meant, or may be a mistake."""
    config = found.config
    if config is None:
        return
    if config.kind == "eagle" and config.fc_bias:
        found.notes.append("fc has a bias, which vLLM's loader has no place for")
    if config.kind == "eagle3" and config.taps:
        found.notes.append(f"reads the outputs of layers {list(config.taps)} (0-based)")
    if target is None:
        return
    if config.kind in ("eagle", "eagle3"):
        theirs = HeadConfig.derive(config.kind, target.config, config.vocab_size, "").rope_parameters
        if read_rope({"rope_parameters": theirs}) != config.rope_parameters:
            found.notes.append(
                f"rotary settings {json.dumps(config.rope_parameters)}, the target's are {json.dumps(theirs)}"
            )
    vocab = int(getattr(target.config, "vocab_size", config.vocab_size))
    for name, own, other in (
        ("hidden_size", config.hidden_size, int(target.config.hidden_size)),
        ("vocab_size", config.vocab_size, vocab),
    ):
        if own != other:
            found.wrong.append((Problem(name, str(own), f"{other}, the target's: it is another one"), False))

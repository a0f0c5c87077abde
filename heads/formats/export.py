"""A trained head written in an engine's layout, and checked there."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.adapter import adapter_in
from heads.config import HeadConfig
from heads.embedded import resolve_target
from heads.formats.contract import problems
from heads.formats.files import read_folder
from heads.formats.layout import CONFIG, FACTS, Files, Layout, State, Target
from heads.formats.opening import OpenedHead, open_head, say, target_config
from heads.formats.registry import layout_of
from heads.target import TargetAdapter

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ExportRequest:
    """The options of `scripts/export.py`."""

    head: str
    to: str
    out: str
    target: str | None = None
    dtype: str | None = None
    whole_vocabulary: bool = False
    cache_dir: str | None = None
    trust_remote_code: bool = False


def run_export(request: ExportRequest) -> Path:
    """Opens, exports and checks a head, and says so.

    Raises:
        ValueError: see `export_head`.
    """
    layout = layout_of(request.to)
    where: dict[str, Any] = {"trust_remote_code": request.trust_remote_code, "cache_dir": request.cache_dir}
    opened = open_head(request.head, request.target, **where)
    layout.form(opened.config.kind)
    config, name = opened.config, request.target or opened.config.target
    if not name:
        raise ValueError(f"--head: {opened.folder} does not say which target it is for: give --target")
    revision = config.target_revision if name == config.target else None
    target = target_of(name, revision, adapter_in(str(opened.folder), config.target_adapter), **where)
    dtype = None if request.dtype is None else getattr(torch, request.dtype)
    out = export_head(opened, layout, target, request.out, whole_vocabulary=request.whole_vocabulary, dtype=dtype)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 2**20
    say(f"{out}: head of kind {opened.config.kind} for {layout.engine}, {size:.1f} MiB, checked")
    if config.target_adapter is not None:
        inside = " (copied)" if (out / config.target_adapter).is_dir() else ""
        trained = "trained together with it" if config.trained_with_target else "trained for it"
        say(f"the head was {trained}: serve the target with the adapter {config.target_adapter!r}{inside}")
    return out


def target_of(name: str, revision: str | None = None, adapter: str | None = None, **where: Any) -> Target:
    """A target by its config; its weights are loaded where a layout stores some of them.

    Raises:
        ValueError: it is not there.
    """
    found = target_config(name, revision, **where)

    def lm_head(ids: Tensor | None) -> Tensor:
        dtype = getattr(found.config, "dtype", None) or "auto"
        target = TargetAdapter.load(name, dtype=dtype, revision=revision, adapter=adapter, **where)
        rows = target.lm_head_rows(ids)
        if rows is None or rows[1] is not None:
            raise ValueError(f"--target: the LM head of {name!r} is quantised or has a bias; layouts store plain rows")
        return rows[0]

    return Target(found.config, lm_head, resolve_target(name, where.get("cache_dir")))


def export_head(
    opened: OpenedHead,
    layout: Layout,
    target: Target,
    out: str | os.PathLike[str],
    *,
    whole_vocabulary: bool = False,
    dtype: torch.dtype | None = None,
) -> Path:
    """Writes the head in a layout, whole or not at all, after a strict check of what was written.

    Beside it go draftsmith.json (the head's own config), provenance.json, and the adapter that the head came with.

    Raises:
        ValueError: the layout cannot express the head, naming field and value; `out` is there and not ours; or the
            check fails.
    """
    config: HeadConfig = opened.config
    check_replaceable(Path(out))
    form = layout.form(config.kind)
    state: State = opened.build(dtype).state_dict()
    if whole_vocabulary:
        config, state = without_draft_vocab(config, state)
    return write_checked(form.write(state, config, target), layout, config, target, opened.folder, Path(out))


def write_checked(files: Files, layout: Layout, config: HeadConfig, target: Target, source: Path, out: Path) -> Path:
    """The files in `out`, with what came with the head in `source`, if they pass the layout's check.

    Raises:
        ValueError: they do not, naming every problem.
    """
    form = layout.form(config.kind)
    tmp = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        write_files(files, tmp)
        (tmp / FACTS).write_text(json.dumps({"layout": layout.name, "head": config.to_dict()}, indent=2) + "\n")
        if (source / "provenance.json").is_file():
            shutil.copy(source / "provenance.json", tmp)
        inside = adapter_in(str(source), config.target_adapter)
        if config.target_adapter is not None and inside != config.target_adapter:
            shutil.copytree(source / config.target_adapter, tmp / config.target_adapter)
        found = [str(problem) for problem in problems(read_folder(tmp), form, config, target)]
        if found:
            raise ValueError(f"--to {layout.name}: the written files break the layout: {'; '.join(found)}")
        if out.exists():
            shutil.rmtree(out)
        tmp.rename(out)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return out


def without_draft_vocab(config: HeadConfig, state: State) -> tuple[HeadConfig, State]:
    """The head drafting from the whole vocabulary, through the target's LM head.

    Raises:
        ValueError: it has an LM head of its own, which has only the rows of its draft vocabulary.
    """
    if config.draft_vocab_size is not None and config.own_projection:
        raise ValueError(
            f"--whole-vocabulary: the head's LM head has rows for {config.draft_vocab_size} of {config.vocab_size} "
            "tokens only; leave the option out"
        )
    left = {name: value for name, value in state.items() if name not in ("draft_token_ids", "d2t", "t2d")}
    return replace(config, draft_vocab_size=None), left


def check_replaceable(out: Path) -> None:
    """Raises ValueError if `out` exists and is not an export of ours."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / FACTS).is_file())):
        raise ValueError(f"--out: {out} exists and is not an export of Draftsmith; choose another directory")


def write_files(files: Files, folder: Path) -> None:
    """config.json, the tensors, and the extra files, into a folder that is there."""
    (folder / CONFIG).write_text(json.dumps(files.config, indent=2) + "\n")
    tensors = {name: value.detach().cpu().contiguous() for name, value in files.tensors.items()}
    if files.weights.endswith(".safetensors"):
        alone = _without_sharing(tensors)
        save_file(alone, folder / files.weights, metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / files.weights)
    for name, value in files.extra.items():
        if isinstance(value, str):
            (folder / name).write_text(value)
        else:
            torch.save(value, folder / name)


def _without_sharing(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors stores no memory twice: what is the same tensor under two names becomes two."""
    seen: set[int] = set()
    alone = {}
    for name, value in tensors.items():
        alone[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return alone

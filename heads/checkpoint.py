"""Native head checkpoints: config.json + model.safetensors, only what was trained."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.base import DraftHead
from heads.config import HeadConfig
from heads.registry import build_head

CONFIG, WEIGHTS = "config.json", "model.safetensors"
ADAPTER = "adapter"  # directory in a head's own, if it was trained together with a LoRA in the target


def save_head(
    head: DraftHead,
    folder: str | os.PathLike[str],
    files: dict[str, str] | None = None,
    dtype: torch.dtype | None = None,
    write: Callable[[Path], None] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes the head to `folder`, whole or not at all (temporary name, then rename), replacing a head there.

    Args:
        files: further text files by name (run.yaml, provenance.json, ...).
        dtype: of the stored weights; default: as they are.
        write: adds what else belongs in the folder.
        weights: the head's state, where it does not have it whole itself.

    Raises:
        ValueError: `folder` exists and is not a head of ours.
    """
    out = Path(folder)
    check_replaceable(out)
    recover(out)
    tmp = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    tmp.mkdir(parents=True)
    tensors = {
        name: t.detach().to("cpu", dtype if dtype and t.is_floating_point() else t.dtype).contiguous()
        for name, t in (head.state_dict() if weights is None else weights).items()
    }
    save_file(tensors, tmp / WEIGHTS, metadata={"format": "pt"})
    (tmp / CONFIG).write_text(json.dumps(head.config.to_dict(), indent=2) + "\n")
    for name, text in (files or {}).items():
        (tmp / name).write_text(text)
    if write is not None:
        write(tmp)
    replace_folder(tmp, out)
    return out


def replace_folder(tmp: Path, out: Path) -> None:
    """Moves `tmp` to `out`, in place of what is there; `recover` clears what a kill leaves of it."""
    old = out.with_name(f"{out.name}.old-{os.getpid()}")
    if out.exists():
        out.rename(old)
    tmp.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def recover(out: Path) -> None:
    """Clears what a kill during `save_head` left: half-written copies, and the old head if it was just set aside."""
    for old in out.parent.glob(f"{out.name}.old-*"):
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(out)
    for tmp in out.parent.glob(f"{out.name}.tmp-*"):
        shutil.rmtree(tmp, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Raises ValueError if `out` exists and does not look like a head that Draftsmith wrote."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / WEIGHTS).is_file())):
        raise ValueError(f"train.output_dir: {out} exists and is not a Draftsmith head; choose another directory")


def read_config(folder: str | os.PathLike[str]) -> HeadConfig:
    """The head's config alone.

    Raises:
        ValueError: no head there, or its config is not valid.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ValueError(f"--head: {folder} holds no {CONFIG}; expected a directory written by training")
    try:
        data: Any = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--head: {path} is not JSON: {error}") from error
    return HeadConfig.from_dict(data)


def load_head(
    folder: str | os.PathLike[str], dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> DraftHead:
    """Builds the head from config.json and loads its weights strictly.

    Raises:
        ValueError: missing, damaged or mismatching files, naming what is wrong.
    """
    head = build_head(read_config(folder))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(float("nan"))  # a weight that was never loaded shows at once
    path = Path(folder) / WEIGHTS
    try:
        tensors = load_file(path)
        head.load_state_dict(tensors, strict=True)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--head: {path} cannot be read: {error}") from error
    except RuntimeError as error:
        raise ValueError(f"--head: {path} does not fit its {CONFIG}: {error}") from error
    stored = next(t.dtype for t in tensors.values() if t.is_floating_point())
    return head.to(device=device, dtype=dtype or stored).eval()

"""A head's files, by anybody: found, read without running anything, and recognised."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from heads.formats import for_hydra, for_medusa, for_sglang
from heads.formats.layout import CONFIG, WEIGHTS, Files

INDEX = "model.safetensors.index.json"
_SAFE = (WEIGHTS, for_medusa.WEIGHTS)
_PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt", for_hydra.WEIGHTS)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def head_folder(name: str, revision: str | None = None) -> Path:
    """The directory of a head: as it is, or downloaded from the hub (configs and safetensors; a pickle only without).

    Raises:
        ValueError: no such directory, and no such head on the hub, or the hub cannot be reached.
    """
    if Path(name).is_dir():
        return Path(name)
    if not _HUB_ID.fullmatch(name) or ".." in name or Path(name).exists():
        raise ValueError(f"--head: {name} is not a directory; expected one with a head in it, or a hub id")
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
        if not any(folder.rglob("*.safetensors")):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", *_PICKLED]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"--head: {name} is no directory here, and no head that the hub gives: {reason}") from error
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The files with a head's tensors: one, or several shards.

    Raises:
        ValueError: there is none, more than one would do, or one lies outside of the folder.
    """
    if (folder / INDEX).is_file():
        names = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
    else:
        there = [name for name in (*_SAFE, *_PICKLED) if (folder / name).exists()]
        others = sorted(path.name for path in folder.glob("*.safetensors")) if not there else []
        names = there[:1] or others
        if len(others) > 1:
            raise ValueError(f"--head: {folder} holds {', '.join(others)}; expected one, or {INDEX}")
    if not names:
        raise ValueError(f"--head: {folder} holds no {WEIGHTS}, nor {', '.join((*_SAFE[1:], *_PICKLED))}")
    return [_inside(folder, str(name)) for name in names]


def _inside(folder: Path, name: str) -> Path:
    """A file of the folder (of its repository, in the hub's cache, where files are links).

    Raises:
        ValueError: it is elsewhere, or not a file.
    """
    path = folder / name
    root = folder.resolve()
    if root.parent.name == "snapshots":
        root = root.parent.parent
    if ".." in Path(name).parts or Path(name).is_absolute() or not path.resolve().is_relative_to(root):
        raise ValueError(f"--head: {folder} names a file outside of itself: {name}")
    if not path.is_file():
        raise ValueError(f"--head: {folder} lacks {name}, which its index names")
    return path


def head_digest(folder: Path) -> str:
    """SHA-256 of a head's weights on disk."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError for what is not a JSON object."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--head: {path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"--head: {path} holds a {type(data).__name__}, expected a JSON object")
    return data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Of safetensors, or of a pickle that holds tensors and nothing else (`weights_only`: nothing in it is run).

    Raises:
        ValueError: the file is damaged, cut off, or holds something else.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"--head: {path} cannot be read: {error}") from error
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"--head: {path} is no file of tensors, or holds more than tensors, which is not loaded: it could run code"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError, UnicodeError) as error:
        raise ValueError(f"--head: {path} is damaged: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items()):
        raise ValueError(f"--head: {path} does not hold tensors by name")
    return found


def read_folder(folder: Path) -> Files:
    """config.json and all tensors of a folder in whatever layout.

    Raises:
        ValueError: something is missing or damaged, or two files have a tensor of one name.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"--head: {folder} holds no {CONFIG}; expected a head's directory")
    config = read_json(_inside(folder, CONFIG))
    files = weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for path in files:
        part = read_tensors(path)
        if twice := tensors.keys() & part.keys():
            raise ValueError(f"--head: {path} holds {sorted(twice)[0]} a second time")
        tensors |= part
    extra: dict[str, str | Tensor] = {}
    if (folder / for_sglang.TOKEN_MAP).is_file():
        extra[for_sglang.TOKEN_MAP] = read_token_map(_inside(folder, for_sglang.TOKEN_MAP))
    return Files(config, tensors, files[0].name if len(files) == 1 else WEIGHTS, extra)


def read_token_map(path: Path) -> Tensor:
    """SGLang's file of frequent tokens: a tensor of ids. Raises ValueError for anything else."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"--head: {path} cannot be read: {error}") from error
    if not isinstance(found, Tensor) or found.is_floating_point() or found.dim() != 1:
        raise ValueError(f"--head: {path} does not hold a list of token ids")
    return found

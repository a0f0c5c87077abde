"""Opens a head in any layout, ours or another's, from a directory or the hub."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from heads.base import DraftHead
from heads.checkpoint import load_head, read_config
from heads.config import HeadConfig
from heads.embedded import resolve_target
from heads.fingerprint import differences, fingerprint
from heads.formats.files import head_folder, read_folder, read_json
from heads.formats.layout import CONFIG, FACTS, Files, Layout, Target
from heads.formats.registry import LAYOUTS
from heads.registry import build_head
from heads.target import TargetAdapter

NATIVE = "native"
_EMBEDDING = "embed_tokens.weight"
Say = Callable[[str], None]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class OpenedHead:
    """A head's config, and how to build it. layout: "native", or the name of another one.

    state: our tensors, None for a native head, which is read from its folder. embedding: the copy of the target's
    embedding that came with it.
    """

    folder: Path
    layout: str
    config: HeadConfig
    state: dict[str, Tensor] | None = None
    embedding: Tensor | None = None

    def build(self, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> DraftHead:
        """The head with its weights, in `dtype` (None: as stored), for `bind`.

        Raises:
            ValueError: tensors are missing, of another shape, or have no place in a head of this kind.
        """
        if self.state is None:
            return load_head(self.folder, dtype, device)
        head = build_head(self.config)
        wanted = head.state_dict()
        problems = [f"lacks {name}" for name in sorted(wanted.keys() - self.state.keys())]
        problems += [f"has {name}, for which there is no place" for name in sorted(self.state.keys() - wanted.keys())]
        problems += [
            f"{name} is {list(self.state[name].shape)}, expected {list(wanted[name].shape)}"
            for name in sorted(wanted.keys() & self.state.keys())
            if wanted[name].shape != self.state[name].shape
        ]
        if problems:
            raise ValueError(f"--head: {self.folder} is no {self.config.kind} head as we know it: {problems[0]}")
        head.load_state_dict(self.state, strict=True)
        stored = next(t.dtype for t in self.state.values() if t.is_floating_point())
        return head.to(device=device, dtype=dtype or stored).eval()

    def for_target(self, target: TargetAdapter) -> DraftHead:
        """The head bound to its target, in its precision, where its outputs are; warns if it was made for another.

        Raises:
            ValueError: the target has another width or vocabulary, or the head embeddings of its own.
        """
        head = self.build(target.dtype, target.head_device)
        head.bind(target)
        target.tap(head.needs.taps)
        if self.embedding is not None:
            _check_embedding(self.embedding, target)
        if self.config.lm_head_sha256 is not None:
            for difference in differences(self.config, fingerprint(target), target.name):
                say(f"warning: {difference}")
        return head


def _check_embedding(embedding: Tensor, target: TargetAdapter) -> None:
    """Raises ValueError unless a head's copy of the embedding is the target's, up to rounding."""
    own: Any = target.embedding.weight.detach().cpu()
    if own.shape != embedding.shape or not torch.allclose(own.float(), embedding.float(), rtol=0.02, atol=1e-4):
        raise ValueError(
            f"--head: its {_EMBEDDING} {list(embedding.shape)} is not the embedding of {target.name!r} "
            f"{list(own.shape)}: another target, or embeddings of the head's own, which are not supported"
        )


def open_head(
    name: str,
    target: str | Target | None = None,
    *,
    trust_remote_code: bool = False,
    cache_dir: str | None = None,
    announce: Say = say,
) -> OpenedHead:
    """Reads a head's config, and its tensors if it is not ours.

    Args:
        name: directory or hub id. target: the one asked for, or its config (`known_target`); else what the head names.

    Raises:
        ValueError: nothing that can be read, a layout that is not known, or the target is needed and not known.
    """
    folder = head_folder(name)
    if is_native(folder):
        return OpenedHead(folder, NATIVE, read_config(folder))
    files = read_folder(folder)
    layout, kind = recognise(files)
    facts = own_facts(folder)
    found: Target | None
    if isinstance(target, Target):
        path, found = target.name, target
    else:
        path = target or facts.get("target") or named_target(files.config) or ""
        revision = facts.get("target_revision") if path == facts.get("target") else None
        found = target_config(path, revision, trust_remote_code, cache_dir) if path else None
    try:
        config, state = layout.kinds[kind].read(files, found)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"--head: {folder} is no {kind} head in the layout of {layout.engine}: {error!r}") from error
    config = replace(config, **{key: facts[key] for key in _KEPT if key in facts}, target=facts.get("target") or path)
    announce(f"head: {name} is a head of kind {kind} in the layout of {layout.engine}")
    embedding = files.tensors.get(_EMBEDDING, files.tensors.get(f"model.{_EMBEDDING}"))
    return OpenedHead(folder, layout.name, config, state, embedding)


_KEPT = (
    "target_revision",
    "target_adapter",
    "trained_with_target",
    "embedding_sha256",
    "lm_head_sha256",
    "tokenizer_sha256",
    "trained_length",
)


def own_facts(folder: Path) -> dict[str, Any]:
    """What an export of ours says beside the layout; nothing in another's folder."""
    head = read_json(folder / FACTS).get("head") if (folder / FACTS).is_file() else {}
    if not isinstance(head, dict):
        raise ValueError(f"--head: {folder / FACTS} holds no head")
    return {name: value for name, value in head.items() if value is not None}


def is_native(folder: Path) -> bool:
    """Whether training wrote it. Raises ValueError for a directory without a config."""
    path = folder / CONFIG
    if not path.is_file():
        raise ValueError(f"--head: {folder} holds no {CONFIG}; expected a head's directory")
    data = read_json(path)
    return "format_version" in data or ("kind" in data and "target" in data)


def target_config(path: str, revision: str | None, trust_remote_code: bool, cache_dir: str | None) -> Target:
    """What layouts need to know of a target to be read, by its config alone.

    Raises:
        ValueError: no config there.
    """
    try:
        found = AutoConfig.from_pretrained(
            resolve_target(path, cache_dir), revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"--target: {path!r} has no config that can be read; give --target ({error})") from error
    return known_target(found, path)


def known_target(config: Any, name: str) -> Target:
    """Of a transformers config."""

    def no_rows(ids: Tensor | None) -> Tensor:
        raise AssertionError("reading a head needs no LM head of the target")

    return Target(config.get_text_config(), no_rows, name)


def named_target(fields: dict[str, Any]) -> str | None:
    """The target that a config names, if it does."""
    verifier = (fields.get("speculators_config") or {}).get("verifier") or {}
    return verifier.get("name_or_path") or fields.get("base_model_name_or_path")


_MEDUSA = re.compile(r"(medusa_heads\.)?\d+\.\d+\.linear\.weight")


def recognise(files: Files) -> tuple[Layout, str]:
    """The layout and the kind of head, by tensor names and config.

    Raises:
        ValueError: none that is known.
    """
    fields, names = files.config, files.tensors.keys()

    def any_of(*starts: str) -> bool:
        return any(name.removeprefix("model.").startswith(starts) for name in names)

    architecture = str((fields.get("architectures") or [""])[0])
    if "speculators_model_type" in fields:
        return LAYOUTS["speculators"], "eagle3"
    if any_of("hydra_mlp."):
        return LAYOUTS["hydra"], "hydra"
    if any_of("blocks."):
        return LAYOUTS["vllm"], "medusa"
    if any(".medusa_layers." in name for name in names):
        return LAYOUTS["trtllm"], "medusa"
    if any(_MEDUSA.fullmatch(name) for name in names):
        return LAYOUTS["medusa"], "medusa"
    if any_of("midlayer.", "layers.0.hidden_norm."):
        if any_of("layers.0."):
            return LAYOUTS["trtllm"], "eagle3"
        if any(fields.get(name) for name in ("norm_before_residual", "norm_output", "fc_norm")):
            return LAYOUTS["vllm"], "eagle3"
        return LAYOUTS["sglang" if architecture == "LlamaForCausalLMEagle3" else "eagle"], "eagle3"
    if any_of("fc.") and any_of("layers.0."):
        return LAYOUTS["sglang" if architecture == "LlamaForCausalLMEagle" else "eagle"], "eagle"
    shown = ", ".join(sorted(names)[:3]) or "no tensors"
    raise ValueError(f"--head: the tensors ({shown}, ..) are those of no draft head in a layout that is known")

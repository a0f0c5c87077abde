"""What a layout is: how one kind of head is named, shaped and described in the files of one engine.

Letters: H width of the draft head, V target vocabulary, Vd draft vocabulary, n layers of the target.

Layers: our `taps` are 0-based outputs, k; engines also count hidden states, where output k is k + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from heads.config import HeadConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FACTS = "draftsmith.json"  # what a layout has no place for; also the mark that we wrote the folder
State = Mapping[str, Tensor]
Table = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Files:
    """A head on disk in an outside layout: config.json, and one file of tensors.

    extra: further files by name, text or a tensor to be pickled by torch (engines read some that way).
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights: str = WEIGHTS
    extra: dict[str, str | Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """What the layouts need of the target. config: transformers' (text) config. name: hub id or directory.

    lm_head: its LM head's rows [n, H] of these token ids (None: all); called only where a layout stores them.
    """

    config: Any
    lm_head: Callable[[Tensor | None], Tensor]
    name: str = ""

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def scales_embeddings(self) -> bool:
        """Whether its embedding module multiplies what it looks up (Gemma), which engines do outside of it."""
        return str(getattr(self.config, "model_type", "")).startswith("gemma")


@dataclass(frozen=True)
class Form:
    """One kind of head in one layout. All of it is pure: files are read and written elsewhere.

    write: raises ValueError for a head that the layout cannot express. read: the head's config and our tensors, of
    files in this layout; Target is None where it is not known, then a ValueError says what is missing.
    tensors: names and shapes in the layout of a head that it can express, given also the fields of config.json.
    hidden_ids: which hidden states of a target with so many layers the engine reads, by its own rules.
    flat: config.json as the engine's config object has it.
    """

    write: Callable[[State, HeadConfig, Target], Files]
    read: Callable[[Files, Target | None], tuple[HeadConfig, dict[str, Tensor]]]
    tensors: Callable[[HeadConfig, Mapping[str, Any]], Table]
    hidden_ids: Callable[[Mapping[str, Any], int], tuple[int, ...]] | None = None
    flat: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict


@dataclass(frozen=True)
class Layout:
    """name: of --to. kinds: what it can hold, by kind of head; missing: why it cannot hold the others."""

    name: str
    engine: str
    kinds: Mapping[str, Form]
    missing: Mapping[str, str] = field(default_factory=dict)

    def form(self, kind: str) -> Form:
        """Raises ValueError for a kind that the layout does not have, with the reason."""
        if kind not in self.kinds:
            why = self.missing.get(kind, "it has none")
            raise ValueError(f"--to {self.name}: {self.engine} cannot serve a head of kind {kind!r}: {why}")
        return self.kinds[kind]


def refuse(layout: str, config: HeadConfig, name: str, allowed: Any, why: str) -> None:
    """Raises ValueError unless the config's field has the allowed value."""
    value = getattr(config, name)
    if value != allowed:
        raise ValueError(f"--to {layout}: the head's {name} is {value!r}, expected {allowed!r}: {why}")


def dtype_name(state: State) -> str:
    """Of the floating tensors, as configs spell it.

    Raises:
        ValueError: they are not all of one dtype.
    """
    names = {str(t.dtype).removeprefix("torch.") for t in state.values() if t.is_floating_point()}
    if len(names) != 1:
        raise ValueError(f"the head's weights are of {', '.join(sorted(names)) or 'no floating dtype'}, expected one")
    return names.pop()

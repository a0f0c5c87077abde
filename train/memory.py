"""How much memory a training step takes: an estimate before the run, and a meter of what operations really allocate."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads.base import DraftHead, trainable_parameters
from heads.losses import chunk_rows
from heads.target import TargetAdapter


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes in one process. target: its weights. weights: the head's, in fp32. gradients, moments (AdamW's two).

    activations: what the draft steps keep for the backward pass, and the weights' copies that autocast makes. batch:
    features of one micro-batch. loss: logits that exist at a time, and the gradient of an LM head of the head's own.
    """

    target: int
    weights: int
    gradients: int
    moments: int
    activations: int
    batch: int
    loss: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in asdict(self).items())
        return f"about {self.total / 2**20:.0f} MiB ({parts})"


def estimate_memory(
    head: DraftHead,
    tokens: int,
    steps: int,
    dtype: torch.dtype,
    checkpointing: bool = False,
    device: torch.device | None = None,
) -> MemoryEstimate:
    """Of a step on `tokens` positions, all of them supervised, with the head bound; from sizes alone.

    Within a factor of two of what operations allocate (tested by `PeakBytes`); a target that is trained, too
    (`joint`), and whatever the libraries keep for themselves are not in it.

    Args:
        steps: draft steps. dtype: what is computed in. checkpointing: `train.gradient_checkpointing`.
        device: where the step is to run; None: where the head's target is.
    """
    config, size, trained = head.config, dtype.itemsize, trainable_parameters(head)
    vocab = config.draft_vocab_size or config.vocab_size
    rows = min(chunk_rows(vocab, device or head.target.head_device), tokens)
    heads = (head.max_depth or 1) if config.own_projection else 0  # LM heads that are trained
    own = 4 * vocab * config.hidden_size * heads  # their gradients, kept until the backward pass
    together = 1 if heads > 1 else steps  # steps that share an LM head go through it together
    return MemoryEstimate(
        target=sum(p.numel() * p.element_size() for p in head.target.model.parameters()),
        weights=4 * trained,
        gradients=4 * trained,
        moments=8 * trained,
        activations=tokens * _per_token(head, steps, size, checkpointing) + (0 if size == 4 else size * trained),
        batch=2 * tokens * config.hidden_size * (1 + len(head.needs.taps)) * size,  # as read, and as noise
        loss=rows * vocab * (8 + 2 * size * together) + own,  # teacher, and its making; logits and slopes
    )


def _per_token(head: DraftHead, steps: int, size: int, checkpointing: bool) -> int:
    """Bytes kept for the backward pass per position; `size`: bytes of a number."""
    config, width = head.config, head.config.hidden_size
    loss = width * (4 + 2 * size)  # the output where it is checked, its gradient, and the teacher
    if head.max_depth is not None:  # blocks: Hydra's first one of head k reads k + 2 parts
        blocks = config.num_blocks or 1
        parts = sum(k + 2 for k in range(steps)) if config.kind == "hydra" else steps
        return steps * (3 * blocks * width * size + loss) + parts * width * size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    norms = 4 if config.taps else 1
    norm = width * (4 + 2 * size + (4 if size < 4 else 0))  # computed in fp32, copied to and fro
    step = size * (7 * width + 4 * queries + 4 * keys + 4 * config.intermediate_size) + norms * norm
    crossing = size * (2 * width + 2 * keys)
    if checkpointing:
        return step + steps * (crossing + loss)
    return steps * (step + loss)


def target_pass_bytes(target: TargetAdapter, rows: int, length: int, columns: int) -> int:
    """Bytes at the peak of a pass of the target without gradients: rows of `length` tokens, without cache and logits.

    Within a factor of two of what operations allocate (tested by `PeakBytes`), but for models that run every expert.

    Args:
        columns: numbers per token that are kept: features and taps.
    """
    config, size = target.config, target.dtype.itemsize
    width, heads = config.hidden_size, config.num_attention_heads
    queries = heads * (getattr(config, "head_dim", None) or width // heads)
    inner = getattr(config, "intermediate_size", None) or 4 * width
    layer = size * max(3 * inner + width, 7 * queries) + 2 * size * width  # MLP, or attention; residual and its norm
    masks = 2 + (size + 1) * len(target.masks.sizes)  # bools, and what is added to scores
    if config._attn_implementation == "eager":
        masks += heads * (2 * size + 4)  # the scores, and their softmax in fp32
    return rows * length * (layer + 2 * size * columns + masks * length)


class PeakBytes(TorchDispatchMode):
    """Within it: bytes of tensors that operations make and that still live, `live`, and the most there were, `peak`.

    Storages count once, however many views they have, and until nothing refers to them. Those that were there before
    do not. Approximate: what an operation allocates and frees inside itself (a kernel's workspace) is not seen, nor is
    what a custom kernel keeps; and compiled code runs without it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()  # addresses of all storages known to live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            self._watch(storage, made=False)
        out = func(*args, **kwargs)
        for storage in _storages(out):
            self._watch(storage, made=True)
        return out

    def _watch(self, storage: torch.UntypedStorage, made: bool) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if not key or key in self._seen:
            return
        self._seen.add(key)
        size = size if made else 0
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size).atexit = False

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """Of a divided tensor, the share that is here."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield (leaf.to_local() if isinstance(leaf, DTensor) else leaf).untyped_storage()

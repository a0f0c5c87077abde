"""A frozen target whose decoder layers are divided over processes, for targets that no single device holds.

Every process keeps a share of each layer and gathers a layer when it computes (torch's `fully_shard`). Embedding, final
norm and LM head stay whole: drafts read their rows at every step, training and evaluation alike.

A layer is gathered by all processes together, whatever each of them computes. So whenever one makes a pass, the others
must make one, too: before each pass they tell each other that there is one, and who has none left calls `settle`, which
makes passes over nothing until nobody has any.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from heads.target import TargetAdapter


def divide(target: TargetAdapter, mesh: DeviceMesh, weights_sha256: str | None = None) -> None:
    """Divides the target's layers over the mesh, one after the other, and moves the rest to its device; in place.

    Afterwards the target runs in inference mode only. Every process calls this with the same weights.

    Args:
        weights_sha256: of them, for who has to tell them apart later.

    Raises:
        ValueError: the target is quantised, has an adapter alive, or is placed on devices already.
    """
    odd = [n for n, p in target.model.named_parameters() if not p.is_floating_point() or p.is_meta or p.itemsize < 2]
    if odd or getattr(target.model, "is_quantized", False) or getattr(target.model, "peft_config", None):
        raise ValueError(
            f"target.divide: {target.name!r} is quantised, offloaded or has a live adapter, so that its layers cannot "
            "be divided; set target.divide: false, or launch with configs/accelerate/ddp.yaml"
        )
    for layer in target.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    inside = {id(p) for layer in target.layers for p in layer.parameters()}
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    rest = {p for p in target.model.parameters() if id(p) not in inside}
    for parameter in rest:
        parameter.data = parameter.data.to(device)
    for module in target.model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    # The root holds nothing; it lets a layer be gathered while the one before it computes.
    fully_shard(target.decoder, mesh=mesh, ignored_params=rest)
    target.peers = Peers(target, device, weights_sha256)


class Peers:
    """The processes that a target is divided over."""

    def __init__(self, target: TargetAdapter, device: torch.device, weights_sha256: str | None) -> None:
        self.weights_sha256 = weights_sha256
        self._target, self._device, self._idle = target, device, False
        target.decoder.register_forward_pre_hook(self._announce)

    def _announce(self, module: nn.Module, args: Any) -> None:
        if not self._idle:
            self._meet(True)

    def _meet(self, working: bool) -> torch.Tensor:
        """Whether any process makes a pass now."""
        flag = torch.full((1,), int(working), dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag

    def settle(self) -> None:
        one = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        while bool(self._meet(False)):
            self._idle = True
            self._target.hidden_states(one, torch.ones_like(one, dtype=torch.bool))
            self._idle = False


def settle(target: TargetAdapter) -> None:
    """What every process calls after passes of which others may make more; nothing unless the target is divided."""
    if target.peers is not None:
        target.peers.settle()


@contextmanager
def gathered(layer: nn.Module) -> Iterator[None]:
    """Within it, a layer of the target is whole, and may be read; every process enters it."""
    if not isinstance(layer, FSDPModule):
        yield
        return
    with torch.inference_mode():  # as in passes: the memory that is gathered into is one and the same
        layer.unshard()
    try:
        yield
    finally:
        with torch.inference_mode():
            layer.reshard()

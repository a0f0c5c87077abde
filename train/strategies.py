"""How several processes train one head: replicated (DDP), divided by torch (FSDP2), or divided by DeepSpeed (ZeRO).

Whatever the strategy, weights and moments are gathered for a checkpoint and cut again when it is read, so checkpoints
are the same files, and a run may go on with another strategy or number of processes. Gradients are averaged over the
processes by every strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from heads.base import DraftHead, HeadBatch, LossSpec
from train.config import RunConfig
from train.launch import Launch
from train.optim import build_optimizer

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Learner(nn.Module):
    """A head's loss as a module whose output is a tensor: what strategies put their hooks around."""

    def __init__(self, head: DraftHead, dtype: torch.dtype) -> None:
        super().__init__()
        self.head, self._dtype = head, dtype

    def forward(self, batch: HeadBatch, loss: LossSpec) -> Tensor:
        with computing_in(self._dtype, batch.feature_BTH.device):
            # Not by calling the head: ZeRO-3 would hang what it gathers for the head on outputs that are no tensors.
            return self.head.forward(batch, loss).loss_sum


def computing_in(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """Autocast, where that is needed: weights are always fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


class Strategy(ABC):
    """Of a run. `head` is the head itself; its weights may be read and used inside of `whole` only.

    optimizer: of which the loop sets the learning rates. trained: what it trains, by name. also: trained beside the
    head (a LoRA in the target), on every process.
    """

    name: str
    module: Any  # the learner, as the strategy wrapped it
    optimizer: Any

    def __init__(self, head: DraftHead, also: nn.Module | None = None) -> None:
        self.head, self.also = head, also

    # ---- a step ------------------------------------------------------------------------------------------------

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch. last: of the step."""
        return nullcontext()

    def backward(self, objective: Tensor) -> None:
        objective.backward()

    @abstractmethod
    def clip(self, most: float) -> float:
        """The gradient's norm, which is scaled down to `most`."""

    def update(self, finite: bool) -> None:
        """The optimizer's step, left out unless the gradient is finite; then the gradient is dropped."""
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    # ---- weights and moments: every process calls these --------------------------------------------------------

    @contextmanager
    def whole(self) -> Iterator[DraftHead]:
        """The head with all of its weights, which then computes without the other processes; without gradients."""
        yield self.head

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        found = dict(self.head.named_parameters())
        if self.also is not None:
            found |= {f"target/{name}": parameter for name, parameter in self.also.named_parameters()}
        return found

    def weights(self) -> dict[str, Tensor]:
        """Of the head, whole, on the CPU of the main process; elsewhere nothing."""
        return _kept((name, _gathered(tensor)) for name, tensor in self.head.state_dict().items())

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state as PARAMETER/KEY, as `weights` are."""
        state = self.optimizer.state
        return _kept(
            (f"{name}/{key}", _gathered(state[p][key])) for name, p in self.trained.items() for key in state.get(p, {})
        )

    def load_moments(self, found: Mapping[str, Tensor]) -> None:
        """found: as `moments` gave them. Parameters without any were never updated."""
        for name, parameter in self.trained.items():
            if f"{name}/step" in found:
                values = {key: found[f"{name}/{key}"] for key in _MOMENTS}
                self.optimizer.state[parameter] = {
                    key: value if key == "step" else _like(value, parameter) for key, value in values.items()
                }

    @abstractmethod
    def check(self) -> None:
        """Raises ValueError unless this strategy really runs."""


def _kept(pairs: Any) -> dict[str, Tensor]:
    """On the main process; the others only take part in the gathering."""
    main = not dist.is_initialized() or dist.get_rank() == 0
    found = {}
    for name, tensor in pairs:
        if main:
            found[name] = tensor.detach().cpu().contiguous()
    return found


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor as this process has it of the parameter."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


class Replicated(Strategy):
    """One process, or DDP: every process has all."""

    def __init__(self, head: DraftHead, config: RunConfig, accelerator: Accelerator, learner: Learner) -> None:
        super().__init__(head)
        self.name = "one process" if accelerator.num_processes == 1 else "ddp"
        self._accelerator = accelerator
        self.optimizer = build_optimizer(head.parameters(), config.optim)
        self.module = learner if accelerator.num_processes == 1 else accelerator.prepare(learner)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._accelerator.no_sync(self.module)

    def clip(self, most: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.head.parameters(), most))

    def check(self) -> None:
        several = isinstance(self.module, nn.parallel.DistributedDataParallel)
        _require(several == (self._accelerator.num_processes > 1), "ddp", type(self.module).__name__)


class Divided(Strategy):
    """FSDP2: weights, gradients and moments are divided; a step gathers the weights once, and averages gradients by
    reduce-scatter after every micro-batch, so that none is ever kept whole."""

    def __init__(self, head: DraftHead, config: RunConfig, accelerator: Accelerator, learner: Learner) -> None:
        super().__init__(head)
        self.name = "fsdp2"
        self._world = accelerator.num_processes
        self.module = fully_shard(learner, mesh=init_device_mesh(accelerator.device.type, (self._world,)))
        self.optimizer = build_optimizer(head.parameters(), config.optim)  # of the divided parameters

    def clip(self, most: float) -> float:
        parameters = list(self.head.parameters())
        norm = _gathered(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return float(norm)

    @contextmanager
    def whole(self) -> Iterator[DraftHead]:
        self.module.unshard()  # hooks are on the learner alone: calls of the head gather nothing
        try:
            yield self.head
        finally:
            self.module.reshard()

    def check(self) -> None:
        kept = sum(p.to_local().numel() for p in self.head.parameters() if isinstance(p, DTensor))
        total = sum(p.numel() for p in self.head.parameters())
        divided = isinstance(self.module, FSDPModule) and kept < total
        _require(divided, "fsdp2", f"{kept} of {total} parameters in every process")


def build_strategy(
    launch: Launch, head: DraftHead, config: RunConfig, accelerator: Accelerator, dtype: torch.dtype
) -> Strategy:
    """dtype: what is computed in.

    Raises:
        ValueError: settings that the strategy does not know, or it does not run.
    """
    learner = Learner(head, dtype)
    if launch.strategy != "ddp" and config.joint.start is not None:
        raise ValueError(
            f"joint.start is {config.joint.start}, but target and heads are trained together by ddp only, not by "
            f"{launch.strategy}: launch with configs/accelerate/ddp.yaml"
        )
    strategy: Strategy
    if launch.strategy == "ddp":
        strategy = Replicated(head, config, accelerator, learner)
    elif launch.strategy == "fsdp2":
        strategy = Divided(head, config, accelerator, learner)
    else:
        from train.zero import Zero

        strategy = Zero(head, config, accelerator, learner, launch)
    strategy.check()
    return strategy


def _require(ok: bool, asked: str, found: str) -> None:
    if not ok:
        raise ValueError(f"the launcher was asked for {asked}, but that is not what runs ({found})")

"""DeepSpeed's ZeRO, stages 2 and 3, for a head. Imported only where it is asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from heads.base import DraftHead, trainable_parameters
from heads.registry import build_head
from train.config import RunConfig
from train.launch import Launch
from train.optim import build_optimizer
from train.strategies import _MOMENTS, Learner, Strategy, _kept, _require

BUCKET = 50_000_000  # numbers that are reduced or gathered together, at most


class Zero(Strategy):
    """Stage 2 divides gradients and moments (and a copy of the weights that is updated), stage 3 the weights, too.

    DeepSpeed is used directly, not through accelerate, which knows less of it than is needed here.
    """

    def __init__(
        self, head: DraftHead, config: RunConfig, accelerator: Accelerator, learner: Learner, launch: Launch
    ) -> None:
        super().__init__(head)
        self.name, self._stage = launch.strategy, int(launch.strategy[-1])
        if accelerator.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        deepspeed = _deepspeed()
        self._gather = deepspeed.zero.GatheredParameters
        self._names = {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}
        self.module, self.optimizer, _, _ = deepspeed.initialize(
            model=learner,
            optimizer=build_optimizer(head.parameters(), config.optim),
            config=_settings(launch, config, trainable_parameters(head)),
        )

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        self.module.set_gradient_accumulation_boundary(last)
        return super().accumulating(last)

    def backward(self, objective: Tensor) -> None:
        self.module.backward(objective, scale_wrt_gas=False)

    def clip(self, most: float) -> float:
        """Also updates: DeepSpeed does both at once, and neither where the norm is not finite."""
        self.module.step()
        norm = self.module.get_global_grad_norm()
        assert norm is not None and math.isfinite(norm) != self.optimizer.overflow, "DeepSpeed skips these steps alone"
        return float(norm)

    def update(self, finite: bool) -> None:
        assert finite != self.optimizer.overflow, "a loss that is not finite has such a gradient"

    @contextmanager
    def whole(self) -> Iterator[DraftHead]:
        if self._stage == 2:
            yield self.head
            return
        # A copy: the head's own modules would drop their weights when they have run, and gather them again.
        copy = build_head(self.head.config).to(self.module.device)
        with self._gathered():
            copy.load_state_dict(self.head.state_dict())
        copy.bind(self.head.target)
        yield copy

    def weights(self) -> dict[str, Tensor]:
        with self._gathered():
            return super().weights()

    def _gathered(self) -> AbstractContextManager[Any]:
        return self._gather(list(self.head.parameters()), enabled=self._stage == 3)

    def moments(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = {float(state["step"]) for state in self._base.state.values()}
        if not steps:
            return {}
        assert len(steps) == 1, f"parts of the optimizer are at steps {steps}"
        self._link()
        found = _kept(
            (f"{name}/{key}", safe_get_full_optimizer_state(parameter, key))
            for name, parameter in self._names.items()
            for key in _MOMENTS[1:]
        )
        return found | _kept((f"{name}/step", torch.tensor(next(iter(steps)))) for name in self._names)

    def load_moments(self, found: Mapping[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        steps = {float(found[f"{name}/step"]) for name in self._names if f"{name}/step" in found}
        if not steps:
            return
        for flat in self._flat:
            zeros = {key: torch.zeros_like(flat, requires_grad=False) for key in _MOMENTS[1:]}
            self._base.state[flat] = {"step": torch.tensor(max(steps)), **zeros}
        self._link()
        for name, parameter in self._names.items():
            for key in _MOMENTS[1:]:
                value = found[f"{name}/{key}"].to(self.module.device)
                if self._stage == 2:
                    safe_set_full_optimizer_state(parameter, value, key)
                else:
                    safe_set_local_optimizer_state(parameter, _share(value, parameter), key)

    def _link(self) -> None:
        """Stage 2 links parameters to their moments once, after the first group's first step, when others have none."""
        if self._stage == 2:
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()

    @property
    def _base(self) -> torch.optim.Optimizer:
        return self.optimizer.optimizer

    @property
    def _flat(self) -> list[Tensor]:
        """What the optimizer really updates: this process's share of the weights, group by group."""
        one = self.optimizer
        return one.single_partition_of_fp32_groups if self._stage == 2 else one.fp32_partitioned_groups_flat

    def check(self) -> None:
        found = self.module.zero_optimization_stage()
        world = self.module.dp_world_size
        _require(
            int(found) == self._stage and world == torch.distributed.get_world_size(),
            self.name,
            f"stage {found} in {world} processes",
        )


def _deepspeed() -> Any:
    try:
        import deepspeed
    except ImportError as error:
        raise ValueError(
            'the launcher was asked for DeepSpeed, which is not installed: pip install "deepspeed>=0.19"'
        ) from error
    # A C++ extension that only its inference uses, and that would be compiled now, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _settings(launch: Launch, config: RunConfig, size: int) -> dict[str, Any]:
    """The launcher's settings, and ours where it has none, or where the config of the run decides."""
    bucket = min(BUCKET, size)
    zero = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket, "stage3_prefetch_bucket_size": bucket}
    return {
        "steps_per_print": 1 << 62,
        **launch.deepspeed,
        "zero_optimization": {**zero, **launch.deepspeed["zero_optimization"]},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": config.train.grad_accumulation,
        "gradient_clipping": config.optim.clip_norm,
        "zero_allow_untested_optimizer": True,
    }


def _share(value: Tensor, parameter: Any) -> Tensor:
    """This process's part of a whole tensor, padded at the end as DeepSpeed pads it."""
    size = parameter.ds_tensor.numel()
    first = torch.distributed.get_rank() * size
    part = value.flatten()[first : first + size]
    return torch.nn.functional.pad(part, (0, size - len(part)))

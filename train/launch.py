"""What the launcher was asked for, held against what really runs: a wish must not be dropped silently."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.typed_yaml import parse_yaml

_CONFIGS = "configs/accelerate"
_PRECISION = "train.mixed_precision"


@dataclass(frozen=True)
class Launch:
    """What was asked for. strategy: ddp (also of one process), fsdp2, zero2 or zero3. deepspeed: its own settings."""

    strategy: str = "ddp"
    deepspeed: dict[str, Any] = field(default_factory=dict)

    @property
    def divides(self) -> bool:
        """Whether a frozen target is divided, too, if the config does not say."""
        return self.strategy in ("fsdp2", "zero3")


def take_launch(world: int) -> Launch:
    """Called before anything is prepared. Takes the strategy out of the environment.

    From then on accelerate sees plain processes, and the strategy is applied by `train.strategies`: on CPUs accelerate
    drops FSDP without a word, and counts one process under DeepSpeed.

    Raises:
        ValueError: another number of processes was asked for than runs (`accelerate launch --cpu --num_processes 2`
            starts one), or a strategy or setting that would have no effect.
    """
    used = [name for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM") if _is_true(f"ACCELERATE_USE_{name}")]
    if "MEGATRON_LM" in used:
        raise ValueError(f"the launcher was asked for Megatron-LM, expected one of the configs in {_CONFIGS}")
    _check_processes(world)
    if not used:
        return Launch()
    if world == 1:
        raise ValueError(
            f"the launcher was asked for {used[0]} with one process, which has nothing to divide: launch without "
            "--config_file, or with num_processes: 2 or more"
        )
    launch = Launch("fsdp2") if used == ["FSDP"] else _zero()
    if launch.strategy == "fsdp2":
        _check_fsdp()
    for name in used:
        del os.environ[f"ACCELERATE_USE_{name}"]
    return launch


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")


def _check_fsdp() -> None:
    """Raises ValueError for settings of accelerate's FSDP that `fully_shard` here would not follow."""
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise ValueError(f"fsdp_version is {version}, expected 2: see {_CONFIGS}/fsdp2.yaml")
    for name, instead in (
        ("OFFLOAD_PARAMS", "use more processes"),
        ("ACTIVATION_CHECKPOINTING", "set train.gradient_checkpointing"),
    ):
        if _is_true(f"FSDP_{name}"):
            raise ValueError(f"fsdp_{name.lower()} is true, which is not supported here; set it to false and {instead}")


def _zero() -> Launch:
    """DeepSpeed's settings, as the launcher leaves them in the environment or in a file."""
    prefix = "ACCELERATE_DEEPSPEED_"
    file = os.environ.get(f"{prefix}CONFIG_FILE", "none")
    settings: dict[str, Any] = {}
    if file != "none":
        try:
            settings = json.loads(Path(file).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"deepspeed_config_file: {file} cannot be read as JSON: {error}") from error
    zero = settings.setdefault("zero_optimization", {})
    stage = zero.setdefault("stage", int(os.environ.get(f"{prefix}ZERO_STAGE", "2")))
    if stage not in (2, 3):
        raise ValueError(f"zero_stage is {stage}, expected 2 or 3: see {_CONFIGS}/deepspeed_zero2.yaml")
    for what in ("optimizer", "param"):
        given = os.environ.get(f"{prefix}OFFLOAD_{what.upper()}_DEVICE", "none")
        device = zero.get(f"offload_{what}", {}).get("device") or given
        if device != "none":
            raise ValueError(f"offload_{what}_device is {device!r}, which is not supported here; set it to none")
    for name, ours in (("optimizer", "optim"), ("scheduler", "optim"), *((n, _PRECISION) for n in ("fp16", "bf16"))):
        if settings.get(name, {}).get("enabled", name in settings):
            raise ValueError(f"deepspeed_config_file: {file} sets {name}, which {ours} decides; take it out")
    for name, ours, same in (
        ("gradient_accumulation_steps", "train.grad_accumulation", "1"),
        ("gradient_clipping", "optim.clip_norm", "none"),
    ):
        value = os.environ.get(f"ACCELERATE_{name.upper()}", "auto")
        if value.lower() not in ("auto", "none", same):
            raise ValueError(f"{name} is {value} in the launcher's config, but {ours} decides; take it out")
    return Launch(f"zero{stage}", settings)


def _check_processes(world: int) -> None:
    asked = asked_processes(_parent_command())
    if asked is not None and asked != world:
        raise ValueError(
            f"the launcher was asked for {asked} processes, but {world} was started: on CPUs launch with "
            "--config_file configs/accelerate/cpu2.yaml, or bash scripts/launch_cpu.sh N"
        )


def asked_processes(command: Sequence[str]) -> int | None:
    """What `accelerate launch` was told on its command line or by its --config_file; None: nothing, or no such command.

    Options behind the script are the script's own.
    """
    if not _launches(command[:4]):
        return None
    config: str | None = None
    for i, part in enumerate(command):
        name, equals, value = part.partition("=")
        value = value if equals else (command[i + 1] if i + 1 < len(command) else "")
        if name in ("--num_processes", "--num-processes"):
            return int(value) if value.isdecimal() else None
        if name in ("--config_file", "--config-file"):
            config = value
        if part.endswith(".py") and "/accelerate/" not in part:
            break
    if config is None or not Path(config).is_file():
        return None
    try:
        found = parse_yaml(Path(config).read_text())
    except ValueError:
        return None
    number = found.get("num_processes") if isinstance(found, dict) else None
    return number if isinstance(number, int) else None


def _launches(words: Sequence[str]) -> bool:
    names = ("accelerate-launch", "accelerate.commands.launch")
    pairs = itertools.pairwise(words)
    return any(word.endswith(names) for word in words) or any(
        Path(a).name == "accelerate" and b == "launch" for a, b in pairs
    )


def _parent_command() -> list[str]:
    """Of the process that started this one, where the system tells."""
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="replace").split("\0")[:-1]

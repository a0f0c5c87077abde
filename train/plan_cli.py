"""Options of `--plan`. Imports nothing heavy: `--help` of the training entries uses it."""

from __future__ import annotations

import argparse
from typing import Any

STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")


def add_plan_options(group: Any) -> None:
    """group: of an `argparse` parser. Everything defaults to None, to see what was given."""
    add = group.add_argument
    add("--devices", metavar="N,..", help="numbers of devices, separated by commas; default: 1")
    add("--strategy", metavar="NAME", help=f"{', '.join(STRATEGIES)}; default: ddp")
    add("--device-memory", type=float, metavar="GIB", help="of a device; default: 80")
    add("--tflops", type=float, metavar="X", help="peak of a device in the dtype computed in; default: 312")
    add("--bandwidth", type=float, metavar="GB/s", help="peak of a device's memory; default: 2000")
    add("--link", type=float, metavar="GB/s", help="peak from a device to the others; default: 50")
    add("--share", type=float, metavar="X", help="of those peaks that is reached; default: 0.4")
    add("--tokens", type=int, metavar="N", help="tokens of all rows; default: what the config says")
    add("--target-config", metavar="FILE", help="config.json of the target to plan for, instead of target.path's")


_NAMES = ("devices", "strategy", "device_memory", "tflops", "bandwidth", "link", "share", "tokens", "target_config")


def check_plan_options(args: argparse.Namespace) -> None:
    """Raises ValueError for values that make no sense, or without --plan; sets `args.devices` to a tuple of numbers."""
    given = [name for name in _NAMES if getattr(args, name) is not None]
    if given and not args.plan:
        raise ValueError(f"--{given[0].replace('_', '-')} is an option of --plan; add --plan or remove it")
    if args.strategy not in (None, *STRATEGIES):
        raise ValueError(f"--strategy is {args.strategy!r}, expected one of {', '.join(STRATEGIES)}")
    for name in ("device_memory", "tflops", "bandwidth", "link", "share", "tokens"):
        value, most = getattr(args, name), 1 if name == "share" else float("inf")
        if value is not None and not 0 < value <= most:
            wanted = "above 0, at most 1" if name == "share" else "a positive number"
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected {wanted}")
    args.devices = _counts(args.devices or "1")


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= 1_000_000 for part in parts):
        raise ValueError(f"--devices is {text!r}, expected numbers from 1 on, separated by commas")
    return tuple(dict.fromkeys(int(part) for part in parts))

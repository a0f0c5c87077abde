"""What `--plan` prints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch

from infer.report import aligned
from train.config import RunConfig
from train.plan import GIB, MOST_DEVICES, USABLE, Case, Hardware, Plan

_PHASES = ("answers", "features", "training")


def plan_from_args(config: RunConfig, args: argparse.Namespace) -> str:
    """The report; `args` as `train.plan_cli` leaves them."""
    units = {"device_memory": ("memory", GIB), "tflops": ("flops", 1e12), "bandwidth": ("bandwidth", 1e9)}
    units |= {"link": ("link", 1e9), "share": ("share", 1.0)}
    given = {field: getattr(args, name) * unit for name, (field, unit) in units.items() if getattr(args, name)}
    plan = Plan(config, replace(Hardware(), **given), args.target_config, args.tokens)
    return report(plan, args.devices, args.strategy or "ddp")


def report(plan: Plan, devices: Sequence[int], strategy: str) -> str:
    """Everything as text."""
    cases = [Case(plan.config, count, strategy) for count in devices]
    lines = [*_head_lines(plan), *_assumptions(plan), "", f"strategy {strategy}:", *_table(plan, cases)]
    for case in cases:
        lines += ["", *_details(plan, case)]
    return "\n".join(lines)


def _head_lines(plan: Plan) -> list[str]:
    target, head = plan.target, plan.head.config
    count = sum(p.numel() for p in target.model.parameters())
    steps = plan.steps(Case(plan.config, 1, "ddp"))
    vocab = head.draft_vocab_size or head.vocab_size
    return [
        f"target: {target.name}, {type(target.model).__name__}, {count:,} parameters, {_gib(plan.target_bytes)} GiB in "
        f"{_name(target.dtype)}{' (its checkpoint is quantised: counted in full)' if plan.quantised else ''}",
        f"head: {head.kind}, {plan.trained:,} trained parameters, {steps} draft steps, draft vocabulary of {vocab:,}, "
        f"computed in {_name(plan.dtype)}",
        f"disk: features {_gib(plan.cache_bytes)} GiB, checkpoints {_gib(plan.checkpoint_bytes)} GiB",
    ]


def _assumptions(plan: Plan) -> list[str]:
    hardware, data = plan.hardware, plan.config.data
    known = "" if plan.tokens_known else " (how many are in data.path is not known: give --tokens)"
    peaks = f"{hardware.flops / 1e12:g} TFLOP/s, {hardware.bandwidth / 1e9:g} GB/s"
    return [
        f"assumed: devices of {hardware.memory / GIB:g} GiB, {USABLE:.0%} of it usable; {peaks}, "
        f"{hardware.link / 1e9:g} GB/s between them; {hardware.share:.0%} of each is reached, exchange hides nothing",
        f"assumed: {plan.tokens:,} tokens in rows of {data.max_length}{known}, all supervised; evaluation, loading and "
        "reading files take no time; one process makes the answers, its rows all busy",
        "estimates of activations are within a factor of two (tested on a CPU); measure a short run before a long one",
    ]


def _table(plan: Plan, cases: list[Case]) -> list[str]:
    sizes = [f"{name} GiB" for name in _PHASES]
    rows = [["devices", *sizes, "fits", *_PHASES, "steps", "tokens trained on", "device-hours"]]
    for case in cases:
        memory, times = plan.memory(case), plan.times(case)
        sizes = [_gib(sum(memory[name].values())) if name in memory else "-" for name in _PHASES]
        answering = case.devices if case.divides_target else 1
        spent = (answering * times.answers + case.devices * (times.features + times.training)) / 3600
        cells = [_duration(x) if x else "-" for x in (times.answers, times.features, times.training)]
        cells += [f"{times.steps:,}", f"{times.tokens:,}", f"{spent:.1f}"]
        rows.append([str(case.devices), *sizes, "yes" if plan.fits(case) else "NO", *cells])
    return aligned(rows)


def _details(plan: Plan, case: Case) -> list[str]:
    """Parts of every phase, and what would fit if this does not."""
    lines = [f"{_devices(case.devices)}, GiB on each:"]
    for phase, parts in plan.memory(case).items():
        lines.append(f"  {phase}: " + ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size))
    if plan.fits(case):
        return lines
    lines.append(f"  does not fit: {_gib(plan.needed(case))} GiB needed, {_gib(plan.usable)} GiB usable")
    other = plan.smallest_change(case)
    if other is None:
        return [
            *lines,
            f"  nothing on up to {MOST_DEVICES} devices makes it fit: a smaller target, or data.max_length",
        ]
    return [*lines, f"  smallest change that fits ({_gib(plan.needed(other))} GiB): {_change(case, other)}"]


def _change(case: Case, other: Case) -> str:
    found = [f"--devices {other.devices}"] if other.devices != case.devices else []
    found += [f"--strategy {other.strategy}"] if other.strategy != case.strategy else []
    for section, names in (
        ("train", ("gradient_checkpointing", "tokens_per_batch", "grad_accumulation")),
        ("data", ("batch_size",)),
    ):
        for name in names:
            before, after = (getattr(getattr(one.config, section), name) for one in (case, other))
            if before != after:
                found.append(f"--set {section}.{name}={str(after).lower()}")
    return " ".join(found)


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size < 10 * GIB else f"{size / GIB:.1f}"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

"""What several processes gain: training steps per second of one process and of N, one CPU core (or GPU) each.

Every process trains on as many tokens as the single one, so with twice the processes a perfect step takes as long. A
figure is the median over the repeats; the two sides take turns, each repeat in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from heads.kinds import kind_of
from heads.target import TargetAdapter, fast_dtype
from infer.machine import commit_id, library_versions, machine_name, wait
from infer.report import aligned
from train.benchmark import KINDS, make_head, own_loss, random_batch
from train.config import RunConfig
from train.plan_cli import STRATEGIES
from train.session import start
from train.strategies import build_strategy
from train.typed_yaml import from_dict

_FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
_LAUNCHED = {"ddp": {}, "fsdp2": _FSDP} | {
    f"zero{stage}": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)}
    for stage in (2, 3)
}  # what accelerate's launcher tells its processes


def add_scale_options(parser: argparse.ArgumentParser) -> None:
    """Options of `scripts/benchmark.py scale`."""
    add = parser.add_argument
    add("--target", default="embedded", help='hub id, directory, or "embedded" (default); for embedding and LM head')
    add("--cache-dir", metavar="DIR", help="where the embedded target is kept")
    add("--device", default="cpu", help="cpu (default): a core each; auto: a GPU each, if there are any")
    add("--processes", type=int, default=2, metavar="N", help="against one; default: 2")
    add("--strategy", default="ddp", choices=STRATEGIES, help="of the N; default: ddp")
    add("--kind", default="eagle3", choices=KINDS, help="of head; default: eagle3")
    add("--tokens", type=int, default=1024, metavar="N", help="of a batch, per process; default: 1024")
    add("--draft-steps", type=int, default=3, metavar="N", help="trained (loss.unroll_steps); default: 3")
    add("--draft-vocab", type=int, default=8192, metavar="N", help="default: 8192")
    add("--steps", type=int, default=5, metavar="N", help="of training, timed in every repeat; default: 5")
    add("--repeats", type=int, default=5, metavar="N", help="each figure is a median of N; default: 5")
    add("--worker", action="store_true", help="one of the processes (this program starts them itself)")


def run_scale(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measures, prints a table, and a last line of JSON.

    Raises:
        ValueError: bad values, or processes that fail.
    """
    for name, least in (("processes", 2), ("tokens", 32), ("draft_steps", 1), ("steps", 1), ("repeats", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected {least} or more")
    if args.worker:
        _work(args)
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if args.device == "cpu" and cores < args.processes:
        raise ValueError(f"--processes is {args.processes}, expected at most {cores}: a core for each")
    seconds: dict[int, list[float]] = {1: [], args.processes: []}
    for number in range(args.repeats):
        for world, found in seconds.items():
            found.append(_launch(args, argv, world))
            print(f"repeat {number + 1}: {world} process(es), {found[-1]:.3f} s per step", flush=True)
    rates = {world: world * args.tokens / statistics.median(found) for world, found in seconds.items()}
    efficiency = rates[args.processes] / (args.processes * rates[1])
    table = [["processes", "s per step", "tokens/s", "efficiency"]]
    for world, rate in rates.items():
        shown = f"{efficiency:.2f}" if world > 1 else ""
        table.append([str(world), f"{statistics.median(seconds[world]):.3f}", f"{rate:.0f}", shown])
    print("\n".join(aligned(table)))
    device = torch.device("cpu" if args.device == "cpu" or not torch.cuda.is_available() else "cuda")
    result = {
        "hardware": machine_name(device),
        "dtype": str(fast_dtype(device)).removeprefix("torch."),
        "versions": library_versions(),
        "strategy": args.strategy,
        "kind": args.kind,
        "tokens_per_process": args.tokens,
        "draft_steps": args.draft_steps,
        "draft_vocab": args.draft_vocab,
        "seconds_per_step": {str(world): [round(x, 5) for x in found] for world, found in seconds.items()},
        "tokens_per_second": {str(world): round(rate, 1) for world, rate in rates.items()},
        "efficiency": round(efficiency, 4),
        "commit": commit_id(),
        "command": shlex.join(["scripts/benchmark.py", *argv]),
    }
    print(json.dumps(result), flush=True)


def _launch(args: argparse.Namespace, argv: Sequence[str], world: int) -> float:
    """Median seconds of a step in so many processes."""
    script = str(Path(__file__).resolve().parents[1] / "scripts/benchmark.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world), script]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | (_LAUNCHED[args.strategy] if world > 1 else {})
    done = subprocess.run([*command, *argv, "--worker"], env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{world} process(es) of the benchmark failed with exit code {done.returncode}, see above")
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def _work(args: argparse.Namespace) -> None:
    """Takes the steps; the first process prints the seconds of each as the median."""
    rank = int(os.environ["LOCAL_RANK"])
    if args.device == "cpu" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    head_options = {"kind": args.kind, "draft_vocab": args.draft_vocab}
    train = {"max_steps": 1, "threads": 1}
    config = from_dict(RunConfig, {"target": {"device": args.device}, "head": head_options, "train": train})
    accelerator, launch = start(config)
    target = TargetAdapter.load(args.target, device=accelerator.device, cache_dir=args.cache_dir)
    head, dtype = make_head(args.kind, target, args.draft_vocab), fast_dtype(accelerator.device)
    strategy = build_strategy(launch, head, config, accelerator, dtype)
    noise = kind_of(args.kind).loss["noise"]
    batch, spec = random_batch(head, args.tokens, args.draft_steps, noise, dtype), own_loss(args.kind, False)
    scale, seconds = 1 / max(1, int(batch.weight_KBT[0].sum())), []
    for group in strategy.optimizer.param_groups:
        group["lr"] = 1e-5
    for _ in range(2 + args.steps):
        wait(accelerator.device)
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        with strategy.accumulating(last=True):
            strategy.backward(scale * strategy.module(batch, spec))
        strategy.update(math.isfinite(strategy.clip(config.optim.clip_norm)))
        wait(accelerator.device)
        seconds.append(time.perf_counter() - began)
    if accelerator.is_main_process:
        print(json.dumps({"seconds": statistics.median(seconds[2:])}), flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()

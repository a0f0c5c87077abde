"""A program for `torch.distributed.run`: what training steps of a head keep, need at their peak, and send, by strategy.

The last line on stdout of the first process is JSON: bytes by strategy.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heads.base import LossSpec
from heads.registry import build_head
from tests.plans import middle_model, plan_on_cpu, random_batch
from tests.strategy_program import ASKED, ask
from tests.tiny import tiny_target
from train.memory import PeakBytes
from train.session import start
from train.strategies import build_strategy

TOKENS = 128


class Sent(TorchDispatchMode):
    """Bytes of the tensors that collectives get, inputs and outputs together."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.bytes[func.name().split("::")[1].strip("_")] += sum(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


def measure(name: str, out: Path) -> dict[str, Any]:
    ask(name, out)
    plan = plan_on_cpu(out / "target", middle_model(), train={"tokens_per_batch": TOKENS})
    accelerator, launch = start(plan.config)
    target, sent = tiny_target(middle_model()), Sent()
    with PeakBytes() as meter:
        head = build_head(plan.head.config)
        head.bind(target)
        strategy = build_strategy(launch, head, plan.config, accelerator, torch.float32)
        batch = random_batch(head, TOKENS, 3)
        for number in range(3):
            with sent if number == 2 else nullcontext():
                with strategy.accumulating(last=True):
                    strategy.backward(1e-3 * strategy.module(batch, LossSpec(0.5, 1.0, 0.8)))
                strategy.clip(0.5)
                strategy.update(True)
    return {"live": meter.live, "peak": meter.peak, "sent": sent.bytes}


def main() -> None:
    out = Path(sys.argv[1]) / os.environ["RANK"]
    out.mkdir(exist_ok=True)
    found = {name: measure(name, out) for name in sys.argv[2:] if name in ASKED}
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

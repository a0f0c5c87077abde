"""A program for `torch.distributed.run`: divided targets, then steps of the training loop under several strategies.

What it writes: of targets whether they compute the same when they are divided; of every strategy the sums and norms of
the steps, and weights and moments as a checkpoint has them.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from heads.divided import divide, gathered, settle
from infer.probe import require_tree
from tests.tiny import prompt_ids, tiny_target
from train import loop
from train.config import RunConfig
from train.evaluate import evaluate
from train.features import Dealt
from train.resume import Progress, load_rest, newest_checkpoint, save_state
from train.session import Session, build_accelerator, prepare, start
from train.stage import Rows
from train.typed_yaml import from_dict

ASKED = {
    "ddp": {},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "zero3.json"},
}
# Else weights of less than 100,000 numbers would stay whole.
ZERO3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
STEPS, SPOILT, SAVED, LR = 5, 3, 2, 3e-3  # step 3 has an infinite feature
ROWS = 16
TARGETS = ("llama_tied", "qwen2", "gpt2")


@dataclass(frozen=True)
class Found:
    """steps: (loss, roots, norm). roots of each step's micro-batches differ; some have none."""

    strategy: str
    steps: list[tuple[float, float, float]]
    accept_length: float
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]


def ask(name: str, out: Path) -> None:
    """As a launcher that was asked for this strategy leaves the environment."""
    os.environ.update(ASKED[name])
    os.chdir(out)
    mine = Path(f"zero3-{os.getpid()}.json")  # another rank may be reading
    mine.write_text(json.dumps(ZERO3))
    os.replace(mine, "zero3.json")


def batches_of(step: int, count: int) -> list[list[int]]:
    """`count` micro-batches of one to three rows. In steps 1 and 4 the last two supervise nothing (`session_for`)."""
    found, at = [], 3 * step
    for i in range(count):
        size = 1 + (step + i) % 3
        silent = step in (1, 4) and i >= count - 2
        found.append([ROWS + i % 2] if silent else [(at + k) % ROWS for k in range(size)])
        at += size
    return found


def session_for(config: RunConfig, out: Path, name: str | None, checkpoint: Path | None = None) -> Session:
    if name is not None:
        ask(name, out)
    accelerator, launch = start(config)
    session = prepare(config, accelerator, lambda text: None, launch, checkpoint)
    rows = list(session.rows.train)[:ROWS]
    rows += [replace(row, spans=()) for row in rows[:2]]
    return replace(session, rows=Rows(rows, session.rows.held_out, {}))


def run(config: RunConfig, out: Path, name: str | None = None) -> Found:
    """All steps; a checkpoint after SAVED of them, from which a second session goes on."""
    session = session_for(config, out, name)
    steps = [take(session, step) for step in range(SAVED)]
    folder = out / "checkpoints"
    problem = save_state(session.accelerator, session.strategy, folder, Progress(step=SAVED), 2)
    assert problem is None, problem
    checkpoint = newest_checkpoint(session.accelerator, folder, print)
    assert checkpoint is not None
    session = session_for(config, out, name, checkpoint)
    assert load_rest(checkpoint, session.accelerator, session.strategy).step == SAVED
    steps += [take(session, step) for step in range(SAVED, STEPS)]
    with session.strategy.whole() as head:
        held = session.rows.held_out
        result = evaluate(
            head, held, session.held_features, head.max_depth or 3, 64, session.accelerator, session.dtype
        )
    strategy = session.strategy
    return Found(strategy.name, steps, result.accept_length, strategy.weights(), strategy.moments())


def take(session: Session, step: int) -> tuple[float, float, float]:
    world, rank = session.accelerator.num_processes, session.accelerator.process_index
    mine = batches_of(step, world * session.config.train.grad_accumulation)[rank::world]
    micro = [Dealt(0.0, some, session.train_features.read([i % ROWS for i in some])) for some in mine]
    settle(session.target)
    if step == SPOILT and rank == world - 1:
        micro[-1].features[0][3] = float("inf")
    loss, weight, _, norm = loop._step(session, micro, step, LR, 2)
    return loss, weight, norm


def same_divided(name: str) -> dict[str, bool]:
    """A target against itself with its layers divided. The processes make different numbers of passes."""
    whole, other = tiny_target(name, taps=(0, 2)), tiny_target(name, taps=(0, 2))
    divide(other, init_device_mesh("cpu", (dist.get_world_size(),)))
    require_tree(other)
    ids = torch.tensor([prompt_ids(12, row) for row in range(2 + dist.get_rank())])
    passes = [
        [t.features(ids[i : i + 1], ids[i : i + 1] >= 0, (0, 2)) for i in range(len(ids))] for t in (whole, other)
    ]
    settle(other)
    divided = all(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in other.last_layer.parameters())
    with gathered(other.last_layer):
        pairs = zip(whole.last_layer.parameters(), other.last_layer.parameters(), strict=True)
        read = all(torch.equal(*pair) for pair in pairs)
    rest = isinstance(other.embedding.weight, DTensor) or isinstance(other.lm_head.weight, DTensor)
    same = all(torch.equal(*pair) for pair in zip(*passes, strict=True))
    return {"features": same, "layers divided": divided, "readable": read, "rest whole": not rest}


def main() -> None:
    out, config = Path(sys.argv[1]), from_dict(RunConfig, json.loads(Path(sys.argv[2]).read_text()))
    # The only group of the program: a second one would meet in the same store, and find the addresses of the first.
    build_accelerator(config)
    targets = {name: same_divided(name) for name in TARGETS}
    (out / f"targets_{dist.get_rank()}.json").write_text(json.dumps(targets))
    for name in sys.argv[3:]:
        folder = out / name
        folder.mkdir(exist_ok=True)
        found = run(config, folder, name)
        if os.environ["RANK"] == "0":
            save_file(found.weights, folder / "weights.safetensors")
            save_file(found.moments, folder / "moments.safetensors")
            facts = {"strategy": found.strategy, "steps": found.steps, "accept_length": found.accept_length}
            (folder / "found.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()

"""The training step's benchmark: ours against the dense one (`train/dense.py`), interleaved, on packed random texts.

A step is what `train/loop.py` does: forward under autocast, backward, clipping, AdamW. A figure is the median over the
repeats. Beside the times stand numbers that no machine changes: the bytes a step allocates at its peak (a further step,
untimed: `train/memory.py`), and the FLOPs of the matrix products that it needs. From those and from the rates that this
machine reaches in products of the same shapes follows how long the products alone would take, and the step's share.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from heads.aligned import ROWS, Aligned
from heads.base import HeadBatch, LossSpec
from heads.config import HeadConfig
from heads.drafter import HiddenStateDrafter
from heads.kinds import kind_of
from heads.registry import build_head
from heads.target import TargetAdapter, fast_dtype, pick_device
from infer.machine import commit_id, library_versions, machine_name, wait
from infer.report import aligned
from train.batching import make_batch
from train.config import OptimConfig
from train.conversations import TokenRow
from train.dense import dense_loss
from train.flops import Product, StepSize, draft_attention_flops, step_products
from train.memory import PeakBytes
from train.optim import build_optimizer

KINDS = ("eagle", "eagle3")
_SHORTEST, _LONGEST = 200, 600  # tokens of a text
_OPTIM = OptimConfig()


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """Options of `scripts/benchmark.py train`."""
    add = parser.add_argument
    add("--target", default="embedded", help='hub id, directory, or "embedded" (default); for embedding and LM head')
    add("--cache-dir", metavar="DIR", help="where the embedded target is kept")
    add("--device", default="auto", help="auto (default): cuda if there is one, else cpu")
    add("--lengths", default="512,2048,4096", metavar="LIST", help="tokens of a batch; default: 512,2048,4096")
    add("--kinds", default=",".join(KINDS), metavar="LIST", help="kinds of heads; default: eagle,eagle3")
    add("--steps", type=int, default=3, metavar="N", help="draft steps trained (loss.unroll_steps); default: 3")
    add("--draft-vocab", type=int, default=8192, metavar="N", help="default: 8192")
    add("--dense-limit", type=int, default=2048, metavar="N", help="longest batch of the dense step; default: 2048")
    add("--repeats", type=int, default=5, metavar="N", help="each figure is a median of N; default: 5")
    add("--threads", type=int, metavar="N", help="CPU threads; default: torch's choice")
    add("--compile", action="store_true", help="our loss compiled (train.compile)")


def run_train(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measures, prints tables, and a last line of JSON.

    Raises:
        ValueError: bad values, or a target that cannot be loaded.
    """
    lengths, kinds = _lengths(args.lengths), args.kinds.split(",")
    if set(kinds) - set(KINDS):
        raise ValueError(f"--kinds is {args.kinds!r}, expected some of {', '.join(KINDS)}, separated by commas")
    for name in ("steps", "draft_vocab", "repeats", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, expected 1 or more")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = torch.device(pick_device(args.device))
    if device.type == "cpu":
        torch.set_flush_denormal(True)  # as in training
    target = TargetAdapter.load(args.target, device=device, cache_dir=args.cache_dir)
    if args.draft_vocab > target.vocab_size:
        raise ValueError(f"--draft-vocab is {args.draft_vocab}, expected 1 .. {target.vocab_size} (the target's)")
    dtype = fast_dtype(device)
    machine = Machine(device, dtype, args.repeats)
    runs = []
    for kind in kinds:
        spec = own_loss(kind, args.compile)
        ours, dense = (_side(name, kind, target, args.draft_vocab, spec) for name in ("ours", "dense"))
        for length in lengths:
            sides = [ours, dense] if length <= args.dense_limit else [ours]
            batch = random_batch(ours.head, length, args.steps, kind_of(kind).loss["noise"], dtype)
            found = _measure(sides, batch, dtype, args.repeats, machine, f"{kind}, {length} tokens")
            content = {"documents": len(batch.documents), "supervised": int(batch.weight_KBT[0].sum())}
            runs.append({"kind": kind, "length": length, **content, **found})
            print(f"\n{kind}, {length} tokens, {args.steps} draft steps:")
            print("\n".join(_table(found)), flush=True)
    result = {
        "hardware": machine_name(device),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "versions": library_versions(),
        "target": target.name,
        "steps": args.steps,
        "draft_vocab": args.draft_vocab,
        "repeats": args.repeats,
        "compiled": args.compile,
        "machine_gflops_per_second": machine.to_dict(),
        "runs": runs,
        "commit": commit_id(),
        "command": shlex.join(["scripts/benchmark.py", *argv]),
    }
    print(json.dumps(result), flush=True)


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--lengths is {text!r}, expected numbers of tokens separated by commas") from error
    if min(lengths) < 32 or any(length % 32 for length in lengths):
        raise ValueError(f"--lengths is {text!r}, expected multiples of 32 (a batch is padded to those)")
    return lengths


@dataclass
class Side:
    """One way to take a step, with a head of its own. unrolled: seconds that `head.unroll` took in all."""

    name: str
    head: HiddenStateDrafter
    optimizer: torch.optim.Optimizer
    loss: Callable[[HeadBatch], Tensor]
    unrolled: float = 0.0
    seconds: list[dict[str, float]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.head.target.head_device

    def step(self, batch: HeadBatch, dtype: torch.dtype) -> dict[str, float]:
        """One training step; seconds of its parts."""
        clock = _Clock(self.device)
        self.unrolled = 0.0
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            total = self.loss(batch)
        forward = clock.lap()
        (total / batch.weight_KBT[0].sum().clamp_min(1)).backward()
        backward = clock.lap()
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), _OPTIM.clip_norm)
        assert bool(torch.isfinite(norm)), "random features gave a gradient that is not finite"
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        rest = {"backward": backward, "optimizer": clock.lap()}
        if not self.unrolled:
            return {"forward": forward, **rest}
        return {"unroll": self.unrolled, "loss": forward - self.unrolled, **rest}

    def watch_unroll(self) -> None:
        """From now on the time spent in `head.unroll`, a generator, is added up; the rest of a forward is the loss."""
        plain = self.head.unroll

        def unroll(batch: HeadBatch) -> Iterator[Tensor]:
            outputs = plain(batch)
            while True:
                clock = _Clock(self.device)
                output = next(outputs, None)
                self.unrolled += clock.lap()
                if output is None:
                    return
                yield output

        self.head.unroll = unroll  # type: ignore[method-assign]


class _Clock:
    """Seconds since it was made, or since the last lap; all that the device was asked for is done by then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        wait(device)
        self._since = time.perf_counter()

    def lap(self) -> float:
        wait(self._device)
        before, self._since = self._since, time.perf_counter()
        return self._since - before


def make_head(kind: str, target: TargetAdapter, draft_vocab: int) -> HiddenStateDrafter:
    """A new head in fp32 as training starts it, its draft vocabulary drawn by chance; always the same."""
    options = kind_of(kind).options
    config = HeadConfig.derive(kind, target.config, target.vocab_size, target.name, None, draft_vocab, options=options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = cast(HiddenStateDrafter, build_head(config).to(target.head_device))
        ids = torch.randperm(target.vocab_size)[:draft_vocab].sort().values
    head.set_draft_vocab(ids.to(target.head_device))
    head.bind(target)
    head.init_from_target()
    return head.train()


def _side(name: str, kind: str, target: TargetAdapter, draft_vocab: int, spec: LossSpec) -> Side:
    head = make_head(kind, target, draft_vocab)

    def loss(batch: HeadBatch) -> Tensor:
        return dense_loss(head, batch, spec) if name == "dense" else head(batch, spec).loss_sum

    side = Side(name, head, build_optimizer(head.parameters(), _OPTIM), loss)
    if name == "ours":
        side.watch_unroll()
    return side


def own_loss(kind: str, compiled: bool) -> LossSpec:
    """The kind's own loss."""
    loss = kind_of(kind).loss
    return LossSpec(loss.get("feature_weight", 0.0), loss["token_weight"], loss["step_decay"], compiled=compiled)


def random_batch(head: HiddenStateDrafter, length: int, steps: int, noise: float, dtype: torch.dtype) -> HeadBatch:
    """One packed row of `length` tokens of the draft vocabulary, in texts of 200 to 600 (the last one is cut).

    The first quarter of a text is its prompt, the rest is supervised; features are normal random numbers.
    """
    generator = torch.Generator().manual_seed(length)
    ids = head.draft_ids
    vocabulary = torch.arange(head.config.vocab_size) if ids is None else ids.cpu()
    columns = head.config.hidden_size * (1 + len(head.needs.taps))
    rows: list[TokenRow] = []
    features: list[Tensor] = []
    left = length
    while left:
        size = min(left, int(torch.randint(_SHORTEST, _LONGEST + 1, (), generator=generator)))
        token = vocabulary[torch.randint(len(vocabulary), (size,), generator=generator)].tolist()
        spans = ((size // 4, size),) if size > 3 else ()
        rows.append(TokenRow(str(len(rows)), tuple(token), spans, "random"))
        features.append(torch.randn(size, columns, generator=generator))
        left -= size
    device = head.target.head_device
    return make_batch(
        rows, features, steps, head.needs, packed=length, noise=noise, generator=generator, dtype=dtype, device=device
    )


def _measure(
    sides: Sequence[Side], batch: HeadBatch, dtype: torch.dtype, repeats: int, machine: Machine, what: str
) -> dict[str, Any]:
    """Figures of every side by its name, and of ours over the dense one's."""
    peaks = {}
    for side in sides:
        side.seconds = []
        side.step(batch, dtype)  # warms up, and makes AdamW's moments
        with PeakBytes() as meter:
            side.step(batch, dtype)
        peaks[side.name] = meter.peak
    for repeat in range(repeats):
        started = time.perf_counter()
        for side in sides if repeat % 2 else sides[::-1]:
            side.seconds.append(side.step(batch, dtype))
        left = (time.perf_counter() - started) * (repeats - 1 - repeat)
        print(f"{what}: {repeat + 1}/{repeats} repeats, {left:.0f} s left", file=sys.stderr, flush=True)
    found: dict[str, Any] = {}
    for side in sides:
        needed = products(side.head, batch, side.name == "dense")
        found[side.name] = _figures(side, int(batch.valid_BT.sum()), needed, machine)
        found[side.name] |= {"peak_bytes": peaks[side.name], "attention_flops": attention_flops(side, batch)}
    if len(sides) == 2:
        ours, dense = found["ours"], found["dense"]
        found["speedup"] = ours["tokens_per_second"] / dense["tokens_per_second"]
        found["memory_ratio"] = dense["peak_bytes"] / ours["peak_bytes"]
    return found


def _figures(side: Side, tokens: int, needed: Sequence[Product], machine: Machine) -> dict[str, Any]:
    """Medians over the repeats; share: time that the products alone would take over the whole step's."""
    whole = statistics.median(sum(parts.values()) for parts in side.seconds)
    ms = {name: 1000 * statistics.median(parts[name] for parts in side.seconds) for name in side.seconds[0]}
    flops = sum(product.flops for product in needed)
    return {
        "tokens_per_second": tokens / whole,
        "step_ms": 1000 * whole,
        "ms": ms,
        "flops": flops,
        "flops_per_second": flops / whole,
        "share": machine.seconds(needed) / whole,
    }


def _table(found: dict[str, Any]) -> list[str]:
    parts = ("unroll", "loss", "forward", "backward", "optimizer")
    rows = [["", "tokens/s", "ms per step", *parts, "peak MiB", "GFLOP", "GFLOP/s", "share of the machine"]]
    for name in ("ours", "dense"):
        if name in found:
            one = found[name]
            cells = [f"{one['tokens_per_second']:.0f}", f"{one['step_ms']:.0f}"]
            cells += [f"{one['ms'][part]:.0f}" if part in one["ms"] else "-" for part in parts]
            cells += [f"{one['peak_bytes'] / 2**20:.0f}", f"{one['flops'] / 1e9:.1f}"]
            rows.append([name, *cells, f"{one['flops_per_second'] / 1e9:.0f}", f"{100 * one['share']:.0f} %"])
    table = aligned(rows)
    if "speedup" in found:
        table.append(f"ours over dense: {found['speedup']:.2f}x tokens/s, {found['memory_ratio']:.2f}x less memory")
    return table


def products(head: HiddenStateDrafter, batch: HeadBatch, dense: bool) -> list[Product]:
    """The matrix products of a step on this batch; the dense one runs all positions."""
    positions = batch.valid_BT.numel()
    roots = positions if dense else -(-int(batch.weight_KBT[0].sum()) // ROWS) * ROWS
    checked = positions if dense else Aligned(batch).teacher_RH.shape[0]
    return step_products(head, StepSize(batch.steps, positions, roots, checked), dense)


def attention_flops(side: Side, batch: HeadBatch) -> int:
    """Of scores and mixtures: causal blocks per text (backward 2.5 times the forward), or the whole [T, S] matrix."""
    if side.name == "dense":
        config = side.head.config
        per_pair = 4 * config.num_attention_heads * config.head_dim
        rows, length = batch.valid_BT.shape
        return 3 * per_pair * rows * length * sum((k + 1) * length for k in range(batch.steps))
    pairs = sum((end - start) * (end - start + 1) // 2 for _, start, end in batch.documents)
    return round(draft_attention_flops(side.head, batch.steps, pairs))


class Machine:
    """Rates at which this machine multiplies matrices in `dtype`, measured when first asked for."""

    def __init__(self, device: torch.device, dtype: torch.dtype, repeats: int) -> None:
        self._device, self._dtype, self._repeats = device, dtype, repeats
        self._rates: dict[tuple[int, int, int], float] = {}

    def rate(self, rows: int, inner: int, outer: int) -> float:
        """FLOP/s of [rows, inner] x [inner, outer], a median; at most 1024 rows at a time."""
        key = (min(rows, 1024), inner, outer)
        if key not in self._rates:
            x = torch.randn(key[0], inner, device=self._device).to(self._dtype)
            weight = torch.randn(outer, inner, device=self._device).to(self._dtype)
            seconds = []
            with torch.no_grad():
                for _ in range(self._repeats + 1):
                    clock = _Clock(self._device)
                    F.linear(x, weight)
                    seconds.append(clock.lap())
            self._rates[key] = 2 * key[0] * inner * outer / statistics.median(seconds[1:])
        return self._rates[key]

    def seconds(self, needed: Sequence[Product]) -> float:
        """That the products would take at those rates."""
        return sum(one.flops / self.rate(one.rows, one.inner, one.outer) for one in needed)

    def to_dict(self) -> dict[str, float]:
        """GFLOP/s by shape, "rows x inner x outer"."""
        return {" x ".join(map(str, key)): round(rate / 1e9, 1) for key, rate in self._rates.items()}

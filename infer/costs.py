"""What the parts of a round cost on this machine.

A round with a tree of width w, depth d and n nodes, in ms:

    round(w, d, n) = target(n) + commit + first(w) + (d - 1) level(w) + overhead
    plain round    = target(1) + plain overhead

For a static tree the time of its own drafts takes the place of first and level.

Shapes: B rows, L context tokens, N tree nodes, F head features.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from heads.base import DraftHead, TreePolicy, candidates
from heads.compiled import SIZES as COMPILED_SIZES
from heads.static import StaticTree
from heads.target import TargetAdapter
from heads.tree import ancestor_mask, tree_positions
from infer.engine import DecodeOptions, RowRequest, decode
from infer.machine import library_versions, machine_name, wait
from infer.prefill import TreeMasks, check_length, check_memory, prefill
from infer.stopping import StopRule

Say = Callable[[str], None]  # takes progress, a line at a time

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # tokens of the measured target passes
WIDTHS = (1, 4, 8)
DEPTH = 6
_DECODED = 13  # tokens of the short runs that show the overhead
_COMMITTED = 2  # tokens of a timed commit
_BUSY = 0.15  # typical distance of the median from the fastest run at which the user is warned


@dataclass(frozen=True)
class CalibrationRequest:
    """What is measured.

    rows: batch size. context: tokens in the cache of timed passes. tokens: decoded per prompt for the acceptance.
    repeats: every cost is the median of that many, taken in turn with all the others. compiled: passes and drafts are
    (`heads.compiled`); passes then only have the sizes that are compiled.
    """

    head_dir: str
    rows: int = 1
    context: int = 256
    tokens: int = 64
    repeats: int = 5
    sizes: tuple[int, ...] = SIZES
    widths: tuple[int, ...] = WIDTHS
    depth: int = DEPTH
    compiled: bool = False

    def __post_init__(self) -> None:
        least = {"rows": 1, "context": _COMMITTED, "tokens": self.depth + 1, "repeats": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {bound} or more: change --{name}")
        assert self.sizes[0] == 1 and list(self.sizes) == sorted(self.sizes), f"sizes {self.sizes}"

    def limited(self, head: DraftHead) -> CalibrationRequest:
        """No deeper than the head drafts, and with the sizes that passes have."""
        depth = self.depth if head.max_depth is None else min(self.depth, head.max_depth)
        sizes = tuple(n for n in COMPILED_SIZES if n <= self.sizes[-1]) if self.compiled else self.sizes
        return replace(self, depth=depth, sizes=sizes)


@dataclass(frozen=True)
class Costs:
    """Median ms on one machine for one batch size.

    target_ms: by tokens per row, a pass with `context` tokens in the cache. commit_ms: the head's commit of two tokens.
    first_ms, level_ms: by width, the first draft level (which needs no pass of the head) and each further one.
    overhead_ms, plain_overhead_ms: the other parts of a round of `decode` (masks, verification, the target's commit,
    stopping), with and without drafts.
    """

    target_ms: dict[int, float]
    commit_ms: float
    first_ms: dict[int, float]
    level_ms: dict[int, float]
    overhead_ms: float
    plain_overhead_ms: float
    rows: int
    context: int
    dtype: str
    device: str
    threads: int
    target: str
    head: str
    versions: dict[str, str]
    compiled: bool = False

    @property
    def plain_ms(self) -> float:
        """A round of plain decoding."""
        return self.target_ms[1] + self.plain_overhead_ms

    def target_at(self, nodes: int) -> float:
        """As measured; between measured sizes linear, on the nearest non-decreasing curve.

        A compiled pass has the next of the measured sizes.
        """
        sizes = sorted(self.target_ms)
        if self.compiled and nodes <= sizes[-1]:
            nodes = sizes[bisect.bisect_left(sizes, nodes)]
        if nodes in self.target_ms:
            return self.target_ms[nodes]
        assert sizes[0] < nodes < sizes[-1], f"pass of {nodes} tokens, measured {sizes[0]} .. {sizes[-1]}"
        smooth = non_decreasing([self.target_ms[size] for size in sizes])
        right = bisect.bisect(sizes, nodes)
        share = (nodes - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return smooth[right - 1] + share * (smooth[right] - smooth[right - 1])

    def round_ms(self, policy: TreePolicy, draft_ms: float | None = None) -> float:
        """A round with trees of this shape. draft_ms: of a static tree, as measured (`measure_tree_costs`)."""
        assert (policy.static is None) == (draft_ms is None), "drafts of a static tree are timed one by one"
        nodes = policy.total
        if draft_ms is None:
            draft_ms = self.first_ms[policy.width] + (policy.depth - 1) * self.level_ms[policy.width]
            nodes = min(nodes, candidates(policy.width, policy.depth))
        return self.target_at(nodes) + self.commit_ms + draft_ms + self.overhead_ms

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Costs:
        """From JSON, where keys are text."""
        numbered = {name: {int(k): v for k, v in data[name].items()} for name in ("target_ms", "first_ms", "level_ms")}
        return cls(**{field.name: data[field.name] for field in fields(cls)} | numbered)


def non_decreasing(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence of least squared distance (pooling of adjacent violators)."""
    blocks: list[tuple[float, int]] = []  # (sum, count) of pooled neighbours
    for value in values:
        total, count = value, 1
        while blocks and blocks[-1][0] * count > total * blocks[-1][1]:
            before = blocks.pop()
            total, count = total + before[0], count + before[1]
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]


def measure_costs(target: TargetAdapter, head: DraftHead, request: CalibrationRequest, say: Say) -> Costs:
    """Times everything in turn, `repeats` times after an untimed round; what else runs then slows all of it.

    Raises:
        ValueError: a context that the target has no room for, in positions or in memory.
    """
    return measure_tree_costs(target, head, request, (), say)[0]


@torch.inference_mode()
def measure_tree_costs(
    target: TargetAdapter, head: DraftHead, request: CalibrationRequest, trees: Sequence[StaticTree], say: Say
) -> tuple[Costs, list[float]]:
    """Like `measure_costs`, and in turn with the rest the ms of a draft of each of these trees."""
    request = request.limited(head)
    with target.static_passes(request.compiled), head.compiled_drafts(request.compiled):
        bench = _Bench(target, head, request, trees)
        ms = _in_turn(bench.tasks(), request.repeats, say)
    deep = bench.depth
    levels = {w: max(0.0, ms["draft", w, deep] - ms["draft", w, 1]) / max(1, deep - 1) for w in request.widths}
    costs = Costs(
        target_ms={n: ms["target", n] for n in request.sizes},
        commit_ms=ms["commit",],
        first_ms={w: ms["draft", w, 1] for w in request.widths},
        level_ms=levels,
        overhead_ms=ms["drafting",],
        plain_overhead_ms=ms["plain",],
        rows=request.rows,
        context=request.context,
        dtype=str(target.dtype).removeprefix("torch."),
        device=machine_name(target.device),
        threads=torch.get_num_threads(),
        target=target.name,
        head=request.head_dir,
        versions=library_versions(),
        compiled=request.compiled,
    )
    return costs, [ms["static", index] for index in range(len(trees))]


_Name = tuple[str | int, ...]


def _in_turn(tasks: Mapping[_Name, Callable[[], float]], repeats: int, say: Say) -> dict[_Name, float]:
    """Median of what each task returns."""
    found: dict[_Name, list[float]] = {name: [] for name in tasks}
    started = time.perf_counter()
    for done in range(repeats + 1):
        for name, task in tasks.items():
            found[name].append(task())
        seconds = time.perf_counter() - started
        if done:
            say(f"costs: {done} of {repeats} rounds, {seconds / done * (repeats - done):.0f} s left")
        else:  # which may have compiled much
            say(f"costs: 0 of {repeats} rounds (warm-up done), at most {seconds * repeats:.0f} s left")
            started = time.perf_counter()
    middle = {name: statistics.median(values[1:]) for name, values in found.items()}
    above = statistics.median(middle[name] / min(values[1:]) for name, values in found.items()) - 1
    if above > _BUSY:
        say(f"costs: the medians lie {100 * above:.0f} % above the fastest runs: the machine is busy, trust them less")
    return middle


class _Bench:
    """Random prompts in the caches of target and head, and one task for each cost; a task returns ms."""

    def __init__(
        self, target: TargetAdapter, head: DraftHead, request: CalibrationRequest, trees: Sequence[StaticTree]
    ) -> None:
        self.target, self.head, self.request = target, head, request
        rows, context, largest = request.rows, request.context, request.sizes[-1]
        check_length(target, context + _DECODED, f"--context {context} + {_DECODED} decoded")
        check_memory(target, rows, context + largest, largest, context)
        self.depth = min(4, request.depth)  # of the deeper of two timed drafts
        self.policy = TreePolicy(request.widths[len(request.widths) // 2], self.depth, min(16, largest))
        self.drafts: dict[_Name, TreePolicy] = {
            ("draft", width, depth): TreePolicy(width, depth, self.policy.total)
            for width in request.widths
            for depth in (1, self.depth)
        }
        self.drafts |= {("static", index): TreePolicy.of(tree) for index, tree in enumerate(trees)}
        generator = torch.Generator().manual_seed(0)
        ids_BL = torch.randint(target.vocab_size, (rows, context + 1), generator=generator)
        self.prompts: list[list[int]] = ids_BL[:, :context].tolist()
        self.next_BL = ids_BL[:, 1:].to(target.head_device)
        self.cache = target.new_cache(context + largest, rows)
        _, features = prefill(target, self.prompts, self.cache, head.needs)
        assert features is not None, "prefill with `needs` returns features"
        timed = _COMMITTED * (request.repeats + 1)
        drafted = max(policy.drafted_slots for policy in self.drafts.values())
        self.state = head.start(max(context + timed + drafted, self.cache.capacity), rows)
        head.commit(self.state, features, self.next_BL)
        self.feature_B2F = features[:, -_COMMITTED:]

    def tasks(self) -> dict[_Name, Callable[[], float]]:
        next_B2 = self.next_BL[:, -_COMMITTED:]
        tasks: dict[_Name, Callable[[], float]] = {("target", n): self._pass(n) for n in self.request.sizes}
        tasks["commit",] = self._timed(lambda: self.head.commit(self.state, self.feature_B2F, next_B2), after_pass=True)
        tasks |= {name: self._draft(policy) for name, policy in self.drafts.items()}
        tasks["plain",] = lambda: self._decode(None)
        tasks["drafting",] = lambda: self._decode(self.head)
        return tasks

    def _timed(self, work: Callable[[], object], after_pass: bool = False) -> Callable[[], float]:
        """after_pass: as in a round, after the target's weights have pushed the head's out of the CPU's caches."""
        run_pass = self._pass(1) if after_pass else None

        def task() -> float:
            if run_pass is not None:
                run_pass()
            wait(self.target.device)
            started = time.perf_counter()
            work()
            wait(self.target.device)
            return 1000 * (time.perf_counter() - started)

        return task

    def _pass(self, nodes: int) -> Callable[[], float]:
        """A star: one root, the others its children."""
        target, context, rows = self.target, self.request.context, self.request.rows
        parent_BN = torch.zeros(rows, nodes, dtype=torch.int64, device=target.device)
        parent_BN[:, 0] = -1
        depth_BN, ancestors_BNN = parent_BN + 1, ancestor_mask(parent_BN)
        depth_BN[:, 1:] = 1
        length_B = torch.full((rows,), context, device=target.device)
        ids_BN = torch.randint(target.vocab_size, (rows, nodes), generator=torch.Generator().manual_seed(nodes))
        ids_BN = ids_BN.to(target.device)
        end = target.mask_width(nodes, self.cache)
        mask = TreeMasks(target, nodes, [context] * rows, end).tree(ancestors_BNN, depth_BN, length_B, end)
        position_BN = tree_positions(depth_BN, length_B)

        def work() -> None:
            target.forward(ids_BN, position_BN, mask, self.cache)
            self.cache.set_lengths([context] * rows)

        return self._timed(work)

    def _draft(self, policy: TreePolicy) -> Callable[[], float]:
        root_B = self.next_BL[:, -1].to(self.target.device)
        return self._timed(lambda: self.head.draft(self.state, root_B, policy), after_pass=True)

    def _decode(self, head: DraftHead | None) -> float:
        """ms per round beside drafting and the pass, of the row that ends first: until then the batch is whole."""
        stop = StopRule(frozenset(), _DECODED)
        options = DecodeOptions(policy=self.policy, exact_clock=True, compiled=self.request.compiled)
        results = decode(self.target, head, [RowRequest(ids, stop) for ids in self.prompts], options)
        stats = min((result.stats for result in results), key=lambda one: one.target_passes)
        return 1000 * (stats.seconds["verify"] + stats.seconds["rest"]) / stats.target_passes

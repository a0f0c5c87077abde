"""From measured costs and acceptance the tree with the most tokens per second, and the file that keeps both.

On B rows, for a tree of width w, depth d and n nodes, with round in ms (`infer.costs`) and tau (`infer.acceptance`):

    tokens per second = 1000 B tau(w, d, n) / round(w, d, n)         plain: 1000 B / (target(1) + plain overhead)

the objective of Sequoia (Chen et al., arXiv 2402.12374) for measured costs. A tree pays above the accept length

    break-even tau = round(w, d, n) / (target(1) + plain overhead)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from heads.base import DraftHead, TreePolicy, candidates
from heads.embedded import cache_root
from heads.formats.files import head_digest
from heads.target import TargetAdapter
from infer.acceptance import Acceptance, measure_acceptance
from infer.costs import CalibrationRequest, Costs, Say, measure_costs
from infer.machine import library_versions, machine_name
from infer.marked import MarkedFile

NODES = (4, 8, 12, 16, 24, 32, 48, 64)  # trees to choose from
CALIBRATION = MarkedFile("draftsmith_calibration", 2, "calibration")

# ---- choice ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """A tree with its expected accept length, ms per round, tokens per second, and the accept length it pays from."""

    policy: TreePolicy
    tau: float
    round_ms: float
    tokens_per_second: float
    break_even_tau: float


@dataclass(frozen=True)
class Choice:
    """The tree to draft, or None: decode plainly.

    tokens_per_second: expected of what is chosen, all rows together. break_even_tau: of the best tree, chosen or not.
    reason: a sentence. table: every tree, best first.
    """

    policy: TreePolicy | None
    tokens_per_second: float
    plain_tokens_per_second: float
    break_even_tau: float
    reason: str
    table: tuple[Offer, ...]

    def to_dict(self, best: int = 5) -> dict[str, Any]:
        """JSON-able copy with the first `best` rows of the table."""
        return asdict(replace(self, table=self.table[:best]))


def choose(costs: Costs, acceptance: Acceptance, nodes: Sequence[int] = NODES) -> Choice:
    """The tree of most expected tokens per second; none where the best is not above plain decoding."""
    plain = 1000 * costs.rows / costs.plain_ms
    table = []
    for policy in _shapes(acceptance, nodes):
        tau, ms = acceptance.tau(policy), costs.round_ms(policy)
        table.append(Offer(policy, tau, ms, 1000 * costs.rows * tau / ms, ms / costs.plain_ms))
    table.sort(key=lambda offer: (-offer.tokens_per_second, offer.policy.total, offer.policy.depth))
    best = table[0]
    shape = describe(best.policy)
    if best.tokens_per_second <= plain:
        reason = (
            f"plain decoding, {plain:.1f} tokens/s: the best tree ({shape}) has an accept length of {best.tau:.2f} "
            f"and pays only above {best.break_even_tau:.2f}"
        )
        return Choice(None, plain, plain, best.break_even_tau, reason, tuple(table))
    reason = (
        f"{shape}: accept length {best.tau:.2f} (pays above {best.break_even_tau:.2f}), "
        f"{best.tokens_per_second:.1f} tokens/s, {best.tokens_per_second / plain:.2f}x plain decoding's {plain:.1f}"
    )
    return Choice(best.policy, best.tokens_per_second, plain, best.break_even_tau, reason, tuple(table))


def describe(policy: TreePolicy) -> str:
    """For example "chain of 3", "width 4, depth 3, 12 nodes" or "static, depth 3, 12 nodes"."""
    if policy.static is not None:
        return f"static, depth {policy.depth}, {policy.total} nodes"
    if policy.width == 1:
        return f"chain of {policy.depth}"
    return f"width {policy.width}, depth {policy.depth}, {policy.total} nodes"


def _shapes(acceptance: Acceptance, nodes: Sequence[int]) -> list[TreePolicy]:
    """Chains of every length, and trees that fill their nodes and can use their depth."""
    shapes = []
    for width in acceptance.ranks:
        for depth in range(1, acceptance.depth + 1):
            totals = [depth + 1] if width == 1 else [n for n in nodes if depth < n <= candidates(width, depth)]
            shapes += [TreePolicy(width, depth, total) for total in totals]
    return shapes


# ---- storage -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """What was measured, and under which key."""

    key: dict[str, Any]
    costs: Costs
    acceptance: Acceptance

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def calibrate(
    target: TargetAdapter,
    head: DraftHead,
    request: CalibrationRequest,
    prompts: Sequence[Sequence[int]] | None,
    say: Say,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Calibration:
    """The stored calibration of this machine, target, head and batch size; measured where there is none.

    prompts: token ids; None takes what is stored, whatever it was measured with, and measures nothing.

    Raises:
        ValueError: see `measure_costs`, `measure_acceptance`, `load_or_measure`; nothing is stored and there are no
            prompts.
    """
    key = calibration_key(target, request)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    if prompts is not None:
        text = json.dumps([list(ids) for ids in prompts])
        key["prompts_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        key |= {field: getattr(request, field) for field in ("context", "tokens", "repeats", "depth")}
        key |= {"sizes": list(request.sizes), "widths": list(request.widths)}

    def measure() -> Calibration:
        if prompts is None:
            how = f"--rows {request.rows}{' --compile' if request.compiled else ''}"
            raise ValueError(
                f"no calibration of {request.head_dir} with {how} is stored for this machine; "
                f"run: python infer/calibrate.py --head {request.head_dir} {how} --prompts FILE"
            )
        costs = measure_costs(target, head, request, say)
        return Calibration(key, costs, measure_acceptance(target, head, prompts, request, say))

    return load_or_measure(cache_root(cache_dir) / "calibration" / f"{name}.json", key, measure, say)


def calibration_key(target: TargetAdapter, request: CalibrationRequest) -> dict[str, Any]:
    """Everything that decides the costs of a batch size on this machine, JSON-able."""
    return {
        "machine": machine_name(target.device),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "rows": request.rows,
        "compiled": request.compiled,
        "target": target.name,
        "target_revision": target.revision,
        "attention": target.config._attn_implementation,
        "head_sha256": head_digest(Path(request.head_dir)),
        "versions": library_versions(),
    }


def load_or_measure(path: Path, key: Mapping[str, Any], measure: Callable[[], Calibration], say: Say) -> Calibration:
    """What `path` holds if every entry of `key` is the same there; else measures and replaces it.

    Raises:
        ValueError: `path` is not a calibration of ours.
    """
    stored = read_calibration(path) if path.exists() else None
    if stored is None and path.exists():
        say(f"{path} was written by another version: measuring anew")
    elif stored is not None:
        differ = [name for name, value in key.items() if stored.key.get(name) != value]
        if not differ:
            say(f"calibration: {path}")
            return stored
        say(f"{path} was measured with other settings ({', '.join(differ)}): measuring anew")
    found = measure()
    CALIBRATION.write(path, found.to_dict())
    say(f"wrote {path}")
    return found


def read_calibration(path: Path) -> Calibration | None:
    """None if it has another schema.

    Raises:
        ValueError: not a calibration of ours.
    """
    CALIBRATION.check_writable(path)
    data = CALIBRATION.read(path)
    if data is None or data[CALIBRATION.mark] != CALIBRATION.schema:
        return None
    return Calibration(data["key"], Costs.from_dict(data["costs"]), Acceptance.from_dict(data["acceptance"]))

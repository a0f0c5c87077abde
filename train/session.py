"""What a run works with, prepared once: accelerator, data, target, head, features, optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from heads.base import DraftHead, trainable_parameters
from heads.checkpoint import load_head
from heads.config import HeadConfig
from heads.drafter import HiddenStateDrafter
from heads.registry import build_head
from heads.target import TargetAdapter
from heads.vocab import coverage, frequent_tokens, token_counts
from infer.prefill import check_length
from infer.probe import require_tree
from train.config import RunConfig
from train.conversations import TokenRow
from train.feature_cache import Features, JoinedFeatures, build_feature_cache
from train.memory import estimate_memory
from train.optim import add_group, build_optimizer
from train.regenerate import load_target, usable_cores
from train.stage import Rows, prepare_rows, read_further, read_stage
from train.together import Together


@dataclass(frozen=True)
class Session:
    """Everything a run works with, prepared once."""

    config: RunConfig
    accelerator: Accelerator
    target: TargetAdapter
    head: torch.nn.Module  # as accelerate wrapped it
    optimizer: Any
    rows: Rows
    train_features: Features
    held_features: Features
    dtype: torch.dtype
    log: Callable[[str], None]
    joint: Together | None = None

    @property
    def active_joint(self) -> Together | None:
        """The trainable target, while it is being trained."""
        return self.joint if self.joint is not None and self.joint.active else None

    @property
    def bare_head(self) -> DraftHead:
        return self.accelerator.unwrap_model(self.head)


def build_accelerator(config: RunConfig) -> Accelerator:
    """The accelerator that was really asked for, or an error: a launcher's wish must not be dropped silently."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    cpu = config.target.device == "cpu" or not torch.cuda.is_available()
    # The timeout covers the stages that rank 0 does alone.
    handler = InitProcessGroupKwargs(backend="gloo" if cpu else "nccl", timeout=timedelta(hours=12))
    accelerator = Accelerator(
        cpu=cpu, mixed_precision=_precision(config, cpu), kwargs_handlers=[handler] if world > 1 else []
    )
    if accelerator.num_processes != world or (world > 1 and not accelerator.use_distributed):
        raise ValueError(
            f"{world} processes were launched, but accelerate runs {accelerator.num_processes} "
            f"({accelerator.distributed_type}); launch with torchrun, or with one process"
        )
    if cpu:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # The launcher limits OpenMP to one thread per process on a CPU; a process may have its share of the cores.
        torch.set_num_threads(config.train.threads or max(1, usable_cores() // local))
        torch.set_flush_denormal(True)  # softmax tails would be computed some 50x slower than they are worth
    torch.manual_seed(config.train.seed)  # the head's initial weights
    return accelerator


def _precision(config: RunConfig, cpu: bool) -> str:
    if config.train.mixed_precision != "auto":
        return config.train.mixed_precision
    return "bf16" if fast_dtype(torch.device("cpu" if cpu else "cuda")) == torch.bfloat16 else "no"


def fast_dtype(device: torch.device) -> torch.dtype:
    """What `train.mixed_precision: auto` computes in on that device."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported()
    else:
        fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def prepare(config: RunConfig, accelerator: Accelerator, log: Callable[[str], None]) -> Session:
    device = str(accelerator.device) if config.target.device == "auto" else config.target.device
    if torch.device(device).type != accelerator.device.type:
        raise ValueError(f"target.device is {device!r}, but training runs on {accelerator.device}; use auto")
    if accelerator.num_processes > 1 and read_stage(config) is None:
        raise ValueError("data.work_dir: not prepared; with several processes run scripts/make_conversations.py first")
    sources = [prepare_rows(config, device, log), *read_further(config)]
    share = -(-config.eval.max_rows // len(sources))
    sources = [replace(source, held_out=source.held_out[:share]) for source in sources]
    rows = _joined(sources)
    if config.data.also:
        log(f"data: {len(rows.train)} training and {len(rows.held_out)} held-out rows with those of data.also")
    target, _ = load_target(config.target, device)
    check_length(target, config.data.max_length, "data.max_length")
    target.check_head_path()
    require_tree(target)
    head = _build_head(config, target, rows.train, log)
    target.tap(head.needs.taps)
    if isinstance(head, HiddenStateDrafter):
        head.checkpointing = config.train.gradient_checkpointing
    train_features, held_features = _features(config, accelerator, target, sources, head.needs.taps, log)
    log(
        f"head: {config.head.kind}, {trainable_parameters(head):,} trainable parameters; "
        f"{accelerator.num_processes} process(es), {accelerator.device}, {torch.get_num_threads()} threads, "
        f"mixed precision {accelerator.mixed_precision}"
    )
    optimizer = build_optimizer(head.parameters(), config.optim)
    joint = None
    if config.joint.start is not None:
        joint = Together.build(config.joint, target, config.train.seed)
        add_group(optimizer, joint.lora.parameters(), config.joint.lr / config.optim.lr)
        accelerator.register_for_checkpointing(joint.lora)
        size = trainable_parameters(joint.lora)
        log(f"joint: LoRA of rank {config.joint.rank} ({size:,} parameters), from {config.joint.start:.0%} of the run")
    wrapped, optimizer = accelerator.prepare(head, optimizer)
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    steps, tokens = head.max_depth or config.loss.unroll_steps or 1, config.train.tokens_per_batch
    estimate = estimate_memory(head, tokens, steps, dtype, config.train.gradient_checkpointing)
    log(f"memory: {estimate} per process")
    everywhere = tokens * config.train.grad_accumulation * accelerator.num_processes
    log(f"tokens: at most {everywhere} per step, {steps} draft steps each; {_tokens(rows.train)} in an epoch")
    return Session(
        config, accelerator, target, wrapped, optimizer, rows, train_features, held_features, dtype, log, joint
    )


def _build_head(
    config: RunConfig, target: TargetAdapter, rows: Sequence[TokenRow], log: Callable[[str], None]
) -> DraftHead:
    """A new head bound to the target, or the one to start from; its draft vocabulary is never chosen anew."""
    options, size = config.head, config.head.draft_vocab
    start = None if options.init_from is None else load_head(options.init_from, torch.float32, target.head_device)
    scale = _embedding_scale(target, rows) if start is None else start.config.embedding_scale
    wanted = HeadConfig.derive(
        options.kind,
        target.config,
        target.vocab_size,
        config.target.path,
        config.target.revision,
        size,
        scale,
        options.options(),
    )
    wanted = replace(wanted, target_adapter=config.target.adapter)
    if start is not None:
        found = start.config.to_dict() | {"target_adapter": wanted.target_adapter}  # a head of the base will do
        other = {k: (v, found[k]) for k, v in wanted.to_dict().items() if found[k] != v}
        if other:
            shown = ", ".join(f"{name} {mine!r} here, {theirs!r} there" for name, (mine, theirs) in other.items())
            raise ValueError(f"head.init_from: {options.init_from} is of another form ({shown}); change head or target")
        log(f"head: starts from {options.init_from}")
        start.config = wanted
        start.bind(target)
        return start
    head = build_head(wanted).to(target.head_device)
    if size is not None:
        counts = token_counts([row.input_ids[a:b] for row in rows for a, b in row.spans], target.vocab_size)
        ids = frequent_tokens(counts, size)
        head.set_draft_vocab(ids.to(target.head_device))
        share = coverage(counts, ids)
        log(f"head: draft vocabulary of {size} tokens, {share:.2%} of the training answers' tokens")
    head.bind(target)
    if taken := head.init_from_target():
        log(f"head: {taken}")
    return head


def _features(
    config: RunConfig,
    accelerator: Accelerator,
    target: TargetAdapter,
    sources: Sequence[Rows],
    taps: Sequence[int],
    log: Callable[[str], None],
) -> tuple[Features, Features]:
    """Rank 0 writes the caches of every source, of both sides, then every rank opens them."""
    kind = "".join(f"_{k}" for k in ("taps", *taps)) if taps else ""  # heads that read other layers have their own
    places = []
    for source, folder in zip(sources, (config.data.work_dir, *config.data.also), strict=True):
        places.append((source.train, Path(folder) / f"features_train{kind}"))
        places.append((source.held_out, Path(folder) / f"features_held_out_{len(source.held_out)}{kind}"))
    if accelerator.is_main_process:
        for some, place in places:
            build_feature_cache(target, some, place, taps, log)
    accelerator.wait_for_everyone()
    parts = [build_feature_cache(target, some, place, taps, log) for some, place in places]
    if len(sources) == 1:
        return parts[0], parts[1]
    return JoinedFeatures(parts[::2]), JoinedFeatures(parts[1::2])


def _tokens(rows: Sequence[TokenRow]) -> int:
    return sum(len(row.input_ids) for row in rows)


def _joined(sources: Sequence[Rows]) -> Rows:
    if len(sources) == 1:
        return sources[0]
    return Rows(
        [row for source in sources for row in source.train],
        [row for source in sources for row in source.held_out],
        {"sources": [source.record for source in sources]},
    )


def _embedding_scale(target: TargetAdapter, rows: Sequence[TokenRow]) -> float:
    """Brings the embeddings to the features' root mean square (two digits), measured on a few rows.

    A target with tied embeddings can have them 10 times smaller than its features; the head's first layer would
    then learn which token was sampled that much slower than all the rest.
    """
    squares = []
    for row in rows[:4]:
        ids = torch.tensor([row.input_ids], device=target.device)
        squares.append(target.hidden_states(ids, torch.ones_like(ids, dtype=torch.bool)).float().square().mean())
    ratio = torch.stack(squares).mean() / target.embedding.weight.float().square().mean()
    return float(f"{float(ratio.sqrt()):.2g}")

"""What a run works with, prepared once: accelerator, data, target, head, features, optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from heads.base import DraftHead, trainable_parameters
from heads.checkpoint import read_config
from heads.config import CIRCUMSTANCES, HeadConfig
from heads.divided import divide
from heads.drafter import HiddenStateDrafter
from heads.embedded import resolve_target
from heads.fingerprint import fingerprint, tokenizer_digest
from heads.formats.opening import is_native, open_head
from heads.registry import build_head
from heads.target import TargetAdapter, fast_dtype
from heads.vocab import coverage, frequent_tokens, token_counts
from infer.prefill import check_length
from infer.probe import require_tree
from train.config import RunConfig
from train.conversations import TokenRow, TokenRows
from train.digests import weights_digest
from train.feature_stage import open_features
from train.features import Features, FeatureSource
from train.launch import Launch, take_launch
from train.memory import estimate_memory
from train.optim import add_group
from train.regenerate import load_target, usable_cores
from train.resume import load_weights
from train.stage import Rows, prepare_rows, read_further, read_stage
from train.strategies import Strategy, build_strategy
from train.together import Together
from train.tracking import available_trackers


@dataclass(frozen=True)
class Session:
    """Everything a run works with, prepared once."""

    config: RunConfig
    accelerator: Accelerator
    target: TargetAdapter
    strategy: Strategy
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
        return self.strategy.head


def start(config: RunConfig) -> tuple[Accelerator, Launch]:
    """The processes that were really asked for, and with what strategy, or an error."""
    launch = take_launch(_world())
    return build_accelerator(config), launch


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def build_accelerator(config: RunConfig) -> Accelerator:
    """Processes of which accelerate knows nothing else: strategy and precision are applied by `train.strategies`."""
    world = _world()
    cpu = config.target.device == "cpu" or not torch.cuda.is_available()
    timeout = timedelta(minutes=config.train.timeout_minutes)
    backend = "gloo" if cpu else "nccl"
    handler = InitProcessGroupKwargs(backend=backend, timeout=timeout)
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision="no",
        kwargs_handlers=[handler] if world > 1 else [],
        log_with=available_trackers(config.train.trackers) or None,  # of an empty list it warns
        project_dir=config.train.output_dir,
    )
    if accelerator.num_processes != world or (world > 1 and not accelerator.use_distributed):
        raise ValueError(
            f"{world} processes were launched, but accelerate runs {accelerator.num_processes} "
            f"({accelerator.distributed_type}); launch with torchrun, or with one process"
        )
    if world > 1 and dist.get_backend() != backend:
        raise ValueError(f"{world} processes talk by {dist.get_backend()}, expected {backend}")
    if cpu:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # The launcher limits OpenMP to one thread per process on a CPU; a process may have its share of the cores.
        torch.set_num_threads(config.train.threads or max(1, usable_cores() // local))
        torch.set_flush_denormal(True)  # softmax tails would be computed some 50x slower than they are worth
    torch.manual_seed(config.train.seed)  # the head's initial weights
    return accelerator


def _dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """What is computed in; weights of the head are fp32."""
    known = {"bf16": torch.bfloat16, "no": torch.float32}
    return known.get(config.train.mixed_precision) or fast_dtype(device)


def load_sources(
    config: RunConfig, accelerator: Accelerator, log: Callable[[str], None], launch: Launch
) -> tuple[list[Rows], TargetAdapter, PreTrainedTokenizerBase]:
    """The rows of data.work_dir and data.also (no more held-out rows than are evaluated), target and tokenizer."""
    device = str(accelerator.device) if config.target.device == "auto" else config.target.device
    if torch.device(device).type != accelerator.device.type:
        raise ValueError(f"target.device is {device!r}, but training runs on {accelerator.device}; use auto")
    if accelerator.num_processes > 1 and read_stage(config) is None:
        raise ValueError("data.work_dir: not prepared; with several processes run scripts/make_conversations.py first")
    _check_start(config)
    sources = [prepare_rows(config, device, log), *read_further(config)]
    share = -(-config.eval.max_rows // len(sources))
    sources = [replace(source, held_out=source.held_out[:share]) for source in sources]
    divides = accelerator.num_processes > 1 and (launch.divides if (own := config.target.divide) is None else own)
    if config.target.device_map is not None and accelerator.num_processes > 1:
        raise ValueError(
            f"target.device_map is {config.target.device_map!r}, which one process spreads over all devices, but "
            f"{accelerator.num_processes} run here; set it to null, and target.divide to true if it fits no device"
        )
    target, tokenizer = load_target(config.target, device, divides)
    check_length(target, config.data.max_length, "data.max_length")
    if divides:
        _divide(target, accelerator, log)
    target.check_head_path()
    return sources, target, tokenizer


def _check_start(config: RunConfig) -> None:
    """Raises ValueError, before any weights are loaded, for a head to start from that is for another width or kind."""
    if config.head.init_from is None or not is_native(Path(config.head.init_from)):
        return  # another layout says less of itself: it is compared when it is opened
    head, path = read_config(config.head.init_from), resolve_target(config.target.path, config.target.cache_dir)
    options = {"revision": config.target.revision, "trust_remote_code": config.target.trust_remote_code}
    try:
        target = AutoConfig.from_pretrained(path, **options).get_text_config()
    except OSError:
        return  # loading says what is wrong
    width = getattr(target, "word_embed_proj_dim", None) or target.hidden_size
    for name, found, wanted in (
        ("kind", head.kind, config.head.kind),
        ("hidden_size", head.hidden_size, width),
        ("vocab_size", head.vocab_size, target.vocab_size),
    ):
        if found != wanted:
            raise ValueError(
                f"head.init_from: {config.head.init_from} has {name} {found!r}, expected {wanted!r} for "
                f"{config.target.path!r}; it was trained for {head.target!r}"
            )


def _divide(target: TargetAdapter, accelerator: Accelerator, log: Callable[[str], None]) -> None:
    """Among the processes; the first one takes the weights' digest while they are whole."""
    digest = [weights_digest(target.model) if accelerator.is_main_process else None]
    broadcast_object_list(digest)
    before = sum(p.numel() * p.element_size() for p in target.model.parameters())
    divide(target, init_device_mesh(accelerator.device.type, (accelerator.num_processes,)), digest[0])
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in target.model.parameters()]
    after = sum(p.numel() * p.element_size() for p in parts)
    log(f"target: layers divided among {accelerator.num_processes} processes, {after / before:.0%} of it in each")


def prepare(
    config: RunConfig,
    accelerator: Accelerator,
    log: Callable[[str], None],
    launch: Launch | None = None,
    checkpoint: Path | None = None,
) -> Session:
    """checkpoint: whose weights the head goes on from; its moments are loaded by `train.resume.load_rest`."""
    launch = launch or Launch()
    sources, target, tokenizer = load_sources(config, accelerator, log, launch)
    rows = _joined(sources)
    if config.data.also:
        log(f"data: {len(rows.train)} training and {len(rows.held_out)} held-out rows with those of data.also")
    require_tree(target)
    head = _build_head(config, target, rows.train, log)
    head.config = replace(
        head.config,
        trained_length=config.data.max_length,
        tokenizer_sha256=tokenizer_digest(tokenizer),
        **fingerprint(target),
    )
    target.tap(head.needs.taps)
    if isinstance(head, HiddenStateDrafter):
        head.checkpointing = config.train.gradient_checkpointing
    source = FeatureSource(target, head.needs.taps, tokenizer)
    train_features, held_features = open_features(config, source, sources, log)
    joint = None
    if config.joint.start is not None:
        if target.peers is not None:
            raise ValueError("joint.start: a divided target cannot be trained; set target.divide: false")
        joint = Together.build(config.joint, target, config.train.seed)
        size = trainable_parameters(joint.lora)
        log(f"joint: LoRA of rank {config.joint.rank} ({size:,} parameters), from {config.joint.start:.0%} of the run")
    if checkpoint is not None:
        load_weights(checkpoint, head, None if joint is None else joint.lora)
    dtype, trained = _dtype(config, target.head_device), trainable_parameters(head)
    strategy = build_strategy(launch, head, config, accelerator, dtype)
    if joint is not None:
        add_group(strategy.optimizer, joint.lora.parameters(), config.joint.lr / config.optim.lr)
        strategy.also = joint.lora
    log(
        f"head: {config.head.kind}, {trained:,} trainable parameters; "
        f"{accelerator.num_processes} process(es){_how(accelerator, strategy)}, {target.head_device}, "
        f"{torch.get_num_threads()} threads, computed in {str(dtype).removeprefix('torch.')}"
    )
    steps, tokens = head.max_depth or config.loss.unroll_steps or 1, config.train.tokens_per_batch
    estimate = estimate_memory(head, tokens, steps, dtype, config.train.gradient_checkpointing)
    log(f"memory: {estimate} per process")
    everywhere = tokens * config.train.grad_accumulation * accelerator.num_processes
    log(f"tokens: at most {everywhere} per step, {steps} draft steps each; {_tokens(rows.train)} in an epoch")
    return Session(config, accelerator, target, strategy, rows, train_features, held_features, dtype, log, joint)


def head_config(config: RunConfig, target: TargetAdapter, embedding_scale: float) -> HeadConfig:
    """Of a new head for this target."""
    options = config.head
    derived = HeadConfig.derive(
        options.kind,
        target.config,
        target.vocab_size,
        config.target.path,
        config.target.revision,
        options.draft_vocab,
        embedding_scale,
        options.options(),
    )
    return replace(derived, target_adapter=config.target.adapter)


def _how(accelerator: Accelerator, strategy: Strategy) -> str:
    """Strategy and backend of several processes."""
    return "" if accelerator.num_processes == 1 else f" ({strategy.name}, {dist.get_backend()})"


def _build_head(
    config: RunConfig, target: TargetAdapter, rows: Sequence[TokenRow], log: Callable[[str], None]
) -> DraftHead:
    """A new head bound to the target, or the one to start from; its draft vocabulary is never chosen anew."""
    options, size = config.head, config.head.draft_vocab
    start = None
    if options.init_from is not None:
        start = open_head(options.init_from, config.target.path).build(torch.float32, target.head_device)
    scale = _embedding_scale(target, rows) if start is None else start.config.embedding_scale
    wanted = head_config(config, target, scale)
    if start is not None:
        found = start.config.to_dict() | {"target_adapter": wanted.target_adapter}  # a head of the base will do
        found |= dict.fromkeys(CIRCUMSTANCES)
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
        counts = token_counts((row.input_ids[a:b] for row in rows for a, b in row.spans), target.vocab_size)
        ids = frequent_tokens(counts, size)
        head.set_draft_vocab(ids.to(target.head_device))
        share = coverage(counts, ids)
        log(f"head: draft vocabulary of {size} tokens, {share:.2%} of the training answers' tokens")
    head.bind(target)
    if taken := head.init_from_target():
        log(f"head: {taken}")
    return head


def _tokens(rows: Sequence[TokenRow]) -> int:
    return sum(len(row.input_ids) for row in rows)


def _joined(sources: Sequence[Rows]) -> Rows:
    if len(sources) == 1:
        return sources[0]
    return Rows(
        TokenRows(row for source in sources for row in source.train),
        TokenRows(row for source in sources for row in source.held_out),
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

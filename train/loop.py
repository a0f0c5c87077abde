"""The training loop, on accelerate. Reads from top to bottom: prepare, then step until the limit, then report."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list

from heads.base import DraftHead, LossSpec, trainable_parameters
from heads.checkpoint import recover, save_head
from heads.config import HeadConfig
from heads.registry import build_head, head_class
from heads.target import TargetAdapter
from heads.vocab import coverage, frequent_tokens, token_counts
from infer.prefill import check_length
from infer.probe import require_tree
from train.batching import batch_stream, make_batch
from train.config import RunConfig, dump_yaml
from train.conversations import TokenRow
from train.evaluate import Evaluation, evaluate
from train.feature_cache import FeatureCache, build_feature_cache
from train.files import write_text
from train.optim import build_optimizer, learning_rate, progress_of
from train.provenance import provenance
from train.regenerate import load_target, usable_cores
from train.resume import RUN_YAML, Progress, check_output, load_state, read_progress, save_state
from train.stage import Rows, prepare_rows, read_stage
from train.tracking import MetricsFile

_BEST, _CHECKPOINTS = "best", "checkpoints"


@dataclass(frozen=True)
class Session:
    """Everything a run works with, prepared once."""

    config: RunConfig
    accelerator: Accelerator
    target: TargetAdapter
    head: torch.nn.Module  # as accelerate wrapped it
    optimizer: Any
    rows: Rows
    train_features: FeatureCache
    held_features: FeatureCache
    dtype: torch.dtype
    log: Callable[[str], None]

    @property
    def bare_head(self) -> DraftHead:
        return self.accelerator.unwrap_model(self.head)


def train(config: RunConfig) -> Path:
    """Trains a head and returns the directory of the best one.

    Raises:
        ValueError: settings, data or directories that cannot work, before the first step.
    """
    head_class(config.head.kind)
    check_output(config)
    accelerator = _accelerator(config)
    log: Callable[[str], None] = accelerator.print
    out = Path(config.train.output_dir)
    before = read_progress(out / _CHECKPOINTS)
    if before is not None and before.finished and _limit_reached(config, before):
        log(f"train: {out} is finished (step {before.step}); the best head is in {out / _BEST}")
        return out / _BEST
    if accelerator.is_main_process and out.is_dir():
        recover(out / _BEST)
    session = _prepare(config, accelerator, log)
    progress = load_state(accelerator, out / _CHECKPOINTS) or Progress()
    if progress.step:
        log(f"train: going on at step {progress.step} ({progress.seconds / 60:.1f} min done)")
    _run(session, progress, out)
    log(f"train: best simulated accept length {progress.best_accept_length:.3f} at step {progress.best_step}")
    log(f"train: the best head is in {out / _BEST}, metrics in {out / 'metrics.jsonl'}")
    accelerator.end_training()
    return out / _BEST


def _limit_reached(config: RunConfig, done: Progress) -> bool:
    return progress_of(config.train, done.step, done.epochs, done.seconds) >= 1.0


def _accelerator(config: RunConfig) -> Accelerator:
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
    if not cpu:
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bf16" if fast else "no"


def _prepare(config: RunConfig, accelerator: Accelerator, log: Callable[[str], None]) -> Session:
    device = str(accelerator.device) if config.target.device == "auto" else config.target.device
    if torch.device(device).type != accelerator.device.type:
        raise ValueError(f"target.device is {device!r}, but training runs on {accelerator.device}; use auto")
    if accelerator.num_processes > 1 and read_stage(config) is None:
        raise ValueError("data.work_dir: not prepared; with several processes run scripts/make_conversations.py first")
    rows = prepare_rows(config, device, log)
    held_out = rows.held_out[: config.eval.max_rows]
    rows = Rows(rows.train, held_out, rows.record)
    target, _ = load_target(config.target, device)
    check_length(target, config.data.max_length, "data.max_length")
    target.check_head_path()
    require_tree(target)
    head_config = HeadConfig.derive(
        config.head.kind,
        target.config,
        target.vocab_size,
        config.target.path,
        config.target.revision,
        config.head.draft_vocab,
        _embedding_scale(target, rows.train),
    )
    head = build_head(head_config).to(device)
    target.tap(head.needs.taps)
    if config.head.draft_vocab is not None:
        counts = token_counts([row.input_ids[a:b] for row in rows.train for a, b in row.spans], target.vocab_size)
        head.draft_token_ids.copy_(frequent_tokens(counts, config.head.draft_vocab))
        share = coverage(counts, head.draft_token_ids.cpu())
        log(f"head: draft vocabulary of {config.head.draft_vocab} tokens, {share:.2%} of the training answers' tokens")
    head.bind(target)
    train_features, held_features = _features(config, accelerator, target, rows, head.needs.taps, log)
    log(
        f"head: {config.head.kind}, {trainable_parameters(head):,} trainable parameters; "
        f"{accelerator.num_processes} process(es), {accelerator.device}, {torch.get_num_threads()} threads, "
        f"mixed precision {accelerator.mixed_precision}"
    )
    optimizer = build_optimizer(head.parameters(), config.optim)
    wrapped, optimizer = accelerator.prepare(head, optimizer)
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    return Session(config, accelerator, target, wrapped, optimizer, rows, train_features, held_features, dtype, log)


def _features(
    config: RunConfig,
    accelerator: Accelerator,
    target: TargetAdapter,
    rows: Rows,
    taps: Sequence[int],
    log: Callable[[str], None],
) -> tuple[FeatureCache, FeatureCache]:
    """Rank 0 writes both caches, then every rank opens them."""
    folder = Path(config.data.work_dir)
    places = (
        (rows.train, folder / "features_train"),
        (rows.held_out, folder / f"features_held_out_{len(rows.held_out)}"),
    )
    if accelerator.is_main_process:
        for some, place in places:
            build_feature_cache(target, some, place, taps, log)
    accelerator.wait_for_everyone()
    train, held = (build_feature_cache(target, some, place, taps, log) for some, place in places)
    return train, held


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


def _run(session: Session, progress: Progress, out: Path) -> None:
    config, accelerator = session.config, session.accelerator
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / RUN_YAML, dump_yaml(config))
    metrics = MetricsFile(out / "metrics.jsonl", progress.step, accelerator.is_main_process)
    lengths = [len(row.input_ids) for row in session.rows.train]
    world, rank = accelerator.num_processes, accelerator.process_index
    stream = batch_stream(lengths, config.train.tokens_per_batch, config.train.seed, progress.batches)
    started, earlier = time.perf_counter(), progress.seconds
    window = _Window()
    session.head.train()
    while True:
        progress.seconds = earlier + time.perf_counter() - started
        share = _agree(accelerator, progress_of(config.train, progress.step, progress.epochs, progress.seconds))
        if share >= 1.0:
            break
        # One optimizer step: every rank takes its micro-batches of the same global list.
        micro = []
        for _ in range(config.train.grad_accumulation):
            dealt = [next(stream) for _ in range(world)]
            progress.epochs, indices = dealt[-1][0], dealt[rank][1]
            progress.batches += world
            micro.append(indices)
        lr = learning_rate(share, config.optim)
        steps = config.loss.unroll_steps if share >= config.loss.unroll_from else 1
        loss, weight, tokens, norm = _step(session, micro, progress.step, lr, steps)
        progress.step += 1
        progress.supervised += int(weight)
        window.add(loss, weight, tokens)
        if progress.step % config.train.log_every == 0:
            line = window.take() | {"lr": lr, "grad_norm": norm, "epochs": round(progress.epochs, 3)}
            metrics.write(progress, line)
            session.log(_line(progress, line, share))
        if progress.step % config.train.eval_every == 0:
            _evaluate(session, progress, metrics, out)
            window.restart()
        if progress.step % config.train.save_every == 0:
            progress.seconds = earlier + time.perf_counter() - started
            save_state(accelerator, out / _CHECKPOINTS, progress, config.train.keep_checkpoints)
            window.restart()
    if progress.step % config.train.eval_every:
        _evaluate(session, progress, metrics, out)
    progress.finished = True
    save_state(accelerator, out / _CHECKPOINTS, progress, config.train.keep_checkpoints)


def _agree(accelerator: Accelerator, share: float) -> float:
    """Rank 0's clock decides, so that all ranks stop and schedule alike."""
    if accelerator.num_processes == 1:
        return share
    return float(broadcast_object_list([share])[0])


def _step(
    session: Session, micro: list[list[int]], step: int, lr: float, unroll: int
) -> tuple[float, float, int, float]:
    """One optimizer step. Returns (loss sum, supervised roots, tokens, gradient norm), the first three global."""
    config, accelerator = session.config, session.accelerator
    spec = LossSpec(config.loss.feature_weight, config.loss.token_weight, config.loss.step_decay)
    for group in session.optimizer.param_groups:
        group["lr"] = lr
    batches = []
    for number, indices in enumerate(micro):
        # one stream of noise per global micro-batch, whichever rank has it
        index = (step * len(micro) + number) * accelerator.num_processes + accelerator.process_index
        generator = torch.Generator().manual_seed(config.train.seed * 1_000_000_007 + index)
        batches.append(
            make_batch(
                [session.rows.train[i] for i in indices],
                [session.train_features[i] for i in indices],
                unroll,
                session.bare_head.needs,
                noise=config.loss.noise,
                generator=generator,
                dtype=session.dtype,
                device=accelerator.device,
            )
        )
    sums = torch.tensor(
        [float(sum(b.weight_KBT[0].sum() for b in batches)), float(sum(b.valid_BT.sum() for b in batches))],
        dtype=torch.float64,
        device=accelerator.device,
    )
    weight, tokens = accelerator.reduce(sums, "sum").tolist()
    total = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(batches, 1):
        last = number == len(batches)
        with accelerator.no_sync(session.head) if not last else nullcontext():
            out = session.head(batch, spec)
            # DDP averages gradients over ranks; the loss is divided by the global count, so undo that average.
            accelerator.backward(out.loss_sum * (accelerator.num_processes / max(weight, 1.0)))
        total += out.loss_sum.detach()
    norm = accelerator.clip_grad_norm_(session.head.parameters(), config.optim.clip_norm)
    if not bool(torch.isfinite(torch.as_tensor(norm))):
        rows = [session.rows.train[i].id for indices in micro for i in indices]
        raise ValueError(f"the gradient is not finite at step {step}; rows {rows[:8]}...: lower optim.lr or check them")
    session.optimizer.step()
    session.optimizer.zero_grad(set_to_none=True)
    return float(accelerator.reduce(total, "sum")), weight, int(tokens), float(norm or 0.0)


def _evaluate(session: Session, progress: Progress, metrics: MetricsFile, out: Path) -> Evaluation:
    config = session.config
    result = evaluate(
        session.head,
        session.rows.held_out,
        session.held_features,
        config.eval.depth,
        config.train.tokens_per_batch,
        session.accelerator,
        session.dtype,
    )
    better = result.accept_length > progress.best_accept_length
    if better:
        progress.best_accept_length, progress.best_step = result.accept_length, progress.step
        if session.accelerator.is_main_process:
            _save_best(session, progress, result, out)
    metrics.write(progress, {f"eval/{name}": value for name, value in result.to_dict().items()})
    accuracy = " ".join(f"{a:.3f}" for a in result.accuracy)
    session.log(
        f"eval: step {progress.step}, simulated accept length (chain of {config.eval.depth}) "
        f"{result.accept_length:.3f}{' (best)' if better else ''}, accuracy per depth {accuracy}"
    )
    return result


def _save_best(session: Session, progress: Progress, result: Evaluation, out: Path) -> None:
    record = provenance(
        data=session.rows.record,
        step=progress.step,
        epochs=progress.epochs,
        seconds=round(progress.seconds, 1),
        supervised_tokens_seen=progress.supervised,
        evaluation=result.to_dict(),
        target_dtype=str(session.target.dtype),
    )
    files = {RUN_YAML: dump_yaml(session.config), "provenance.json": json.dumps(record, indent=2) + "\n"}
    save_head(session.bare_head, out / _BEST, files, dtype=session.dtype)


class _Window:
    """Sums since the last log line."""

    def __init__(self) -> None:
        self.loss = self.weight = 0.0
        self.tokens = 0
        self.since = time.perf_counter()

    def add(self, loss: float, weight: float, tokens: int) -> None:
        self.loss += loss
        self.weight += weight
        self.tokens += tokens

    def take(self) -> dict[str, float]:
        seconds = max(time.perf_counter() - self.since, 1e-9)
        line = {
            "loss": round(self.loss / max(self.weight, 1.0), 5),
            "tokens_per_second": round(self.tokens / seconds, 1),
            "supervised_per_second": round(self.weight / seconds, 1),
        }
        self.restart()
        return line

    def restart(self) -> None:
        self.loss = self.weight = 0.0
        self.tokens = 0
        self.since = time.perf_counter()


def _line(progress: Progress, line: dict[str, Any], share: float) -> str:
    left = progress.seconds / share * (1 - share) / 60 if share > 0 else float("nan")
    return (
        f"train: step {progress.step} ({share:.0%}), loss {line['loss']:.4f}, lr {line['lr']:.2e}, "
        f"grad {line['grad_norm']:.2f}, {line['tokens_per_second']:.0f} tokens/s, epoch {line['epochs']:.2f}, "
        f"left {left:.1f} min"
    )

"""The training loop, on accelerate. Reads from top to bottom: prepare, then step until the limit, then report."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from heads.base import HeadBatch, LossSpec
from heads.checkpoint import ADAPTER, recover, save_head
from heads.divided import settle
from train.batching import batch_stream, dealt, make_batch
from train.config import RunConfig
from train.conversations import TokenRow
from train.evaluate import Evaluation, evaluate
from train.features import Dealt, read_ahead
from train.files import write_text
from train.guards import Heartbeat, StopRequest, explained_memory, record_skipped
from train.optim import learning_rate, progress_of
from train.provenance import provenance
from train.report import HTML as REPORT
from train.report import write_report
from train.resume import (
    RUN_YAML,
    Progress,
    check_output,
    everywhere,
    flat,
    load_rest,
    newest_checkpoint,
    read_progress,
    save_state,
)
from train.served import check_served
from train.session import Session, prepare, start
from train.tracking import Metrics, peak_mib
from train.typed_yaml import dump_yaml, to_dict

_BEST, _CHECKPOINTS, _METRICS, _SKIPPED = "best", "checkpoints", "metrics.jsonl", "skipped_steps.jsonl"


def train(config: RunConfig) -> Path:
    """Trains a head and returns the directory of the best one.

    Raises:
        ValueError: settings, data or directories that cannot work, before the first step; later, what `train.guards`
            explains, or a checkpoint that is needed and cannot be written.
        SystemExit: with 128 + its number after a signal, when everything is saved.
    """
    check_output(config)
    accelerator, launch = start(config)
    log: Callable[[str], None] = accelerator.print
    out = Path(config.train.output_dir)
    before = read_progress(out / _CHECKPOINTS)
    if before is not None and before.finished and (_limit_reached(config, before) or _patience_lost(config, before)):
        log(f"train: {out} is finished (step {before.step}); the best head is in {out / _BEST}")
        return out / _BEST
    if accelerator.is_main_process and out.is_dir():
        recover(out / _BEST)
    checkpoint = newest_checkpoint(accelerator, out / _CHECKPOINTS, log)
    session = prepare(config, accelerator, log, launch, checkpoint)
    progress = Progress() if checkpoint is None else load_rest(checkpoint, accelerator, session.strategy)
    if progress.step:
        log(f"train: going on at step {progress.step} ({progress.seconds / 60:.1f} min done)")
    heartbeat = Heartbeat(progress)
    with heartbeat.watch(), StopRequest() as stop:
        stopped = _run(session, progress, out, stop, heartbeat)
    if stopped:
        log(f"train: stopped by {signal.Signals(stopped).name} after step {progress.step}, which is saved in")
        log(f"train: {out / _CHECKPOINTS}; the same command goes on from there")
    else:
        log(f"train: best simulated accept length {progress.best_accept_length:.3f} at step {progress.best_step}")
        log(f"train: the best head is in {out / _BEST}, the report in {out / REPORT}, metrics in {out / _METRICS}")
    # DDP's reducer must not hold the last reference to the process group: it would destroy it under the interpreter's
    # lock, which a thread of gloo may be waiting for to let go of the last barrier (seen as a hang after the end).
    del session
    accelerator.free_memory()
    accelerator.end_training()
    if stopped:
        raise SystemExit(128 + stopped)
    return out / _BEST


def _patience_lost(config: RunConfig, progress: Progress) -> bool:
    waited, patience = progress.step - progress.best_step, config.train.patience
    return patience is not None and progress.best_step >= 0 and waited >= patience * config.train.eval_every


def _limit_reached(config: RunConfig, done: Progress) -> bool:
    return progress_of(config.train, done.step, done.epochs, done.seconds) >= 1.0


def _run(session: Session, progress: Progress, out: Path, stop: StopRequest, heartbeat: Heartbeat) -> int:
    """Steps until the limit, or until a signal asks to stop, whose number is returned (else 0)."""
    config, accelerator = session.config, session.accelerator
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / RUN_YAML, dump_yaml(config))
    if config.train.trackers:
        settings = flat(to_dict(config))  # trackers take plain values alone
        plain = {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in settings.items()}
        accelerator.init_trackers(out.name, plain)
    metrics = Metrics(out / _METRICS, progress.step, accelerator)
    lengths = [len(row.input_ids) for row in session.rows.train]
    world = accelerator.num_processes
    batches = batch_stream(lengths, config.train.tokens_per_batch, config.train.seed, progress.batches, _packed(config))
    mine = dealt(batches, accelerator.process_index, world)
    stream = read_ahead(mine, session.train_features, config.cache.prefetch)
    started, earlier = time.perf_counter(), progress.seconds
    window = _Window()
    session.bare_head.train()
    while True:
        progress.seconds = earlier + time.perf_counter() - started
        heartbeat.beat()
        share = progress_of(config.train, progress.step, progress.epochs, progress.seconds)
        share, stopped = _agree(accelerator, share, stop.signal)
        if stopped:
            _save(session, progress, out, needed=True)
            return stopped
        if share >= 1.0:
            break
        # One optimizer step: every rank takes its micro-batches of the same global list.
        micro = [next(stream) for _ in range(config.train.grad_accumulation)]
        settle(session.target)
        progress.epochs = micro[-1].epochs
        progress.batches += len(micro) * world
        lr = learning_rate(share, config.optim)
        if session.joint is not None and session.joint.due(share):
            _join(session, progress)
        with explained_memory(progress.step, config.train):
            loss, weight, tokens, norm = _step(session, micro, progress.step, lr, _steps(session, share))
        if _finite(loss, norm):
            progress.skipped = 0
            progress.supervised += int(weight)
            window.add(loss, weight, tokens)
        else:
            _skip(session, progress, micro, loss, norm, out)
        progress.step += 1
        if progress.step % config.train.log_every == 0:
            line = window.take() | {"lr": lr, "grad_norm": norm, "epochs": round(progress.epochs, 3)}
            line["peak_mib"] = round(peak_mib(accelerator.device), 1)
            line |= {} if session.joint is None else session.joint.take()
            metrics.write(progress, line)
            session.log(_line(progress, line, share))
        if progress.step % config.train.eval_every == 0:
            _evaluate(session, progress, metrics, out)
            window.restart()
            if _patience_lost(config, progress):
                session.log(f"train: stops early, the best accept length was at step {progress.best_step}")
                metrics.write(progress, {"early_stop": True})
                break
        if progress.step % config.train.save_every == 0:
            progress.seconds = earlier + time.perf_counter() - started
            _save(session, progress, out)
            window.restart()
    if progress.step % config.train.eval_every:
        _evaluate(session, progress, metrics, out)
    progress.finished = True
    _save(session, progress, out, needed=True)
    _check_best(session, progress, metrics, out)
    return 0


def _save(session: Session, progress: Progress, out: Path, needed: bool = False) -> None:
    """A checkpoint; one that is not needed may fail, since the next one is not far."""
    folder = out / _CHECKPOINTS
    keep = session.config.train.keep_checkpoints
    problem = save_state(session.accelerator, session.strategy, folder, progress, keep)
    if problem and needed:
        raise ValueError(
            f"train.output_dir: step {progress.step} could not be saved in {folder} ({problem}); what was saved before "
            "is whole: make room and run the same command again"
        )
    if problem:
        session.log(f"warning: step {progress.step} could not be saved in {folder} ({problem}); training goes on")


def _finite(loss: float, norm: float) -> bool:
    return math.isfinite(loss) and math.isfinite(norm)


def _skip(session: Session, progress: Progress, micro: list[Dealt], loss: float, norm: float, out: Path) -> None:
    """Records a step that changed nothing because its gradient was not finite; raises ValueError after too many."""
    path, most = out / _SKIPPED, session.config.train.max_skipped
    rows = [session.rows.train[i] for one in micro for i in one.indices]
    record_skipped(path, progress.step, loss, norm, rows, session.accelerator.is_main_process)
    progress.skipped += 1
    session.log(f"warning: step {progress.step} skipped (loss {loss}, gradient norm {norm}), its rows are in {path}")
    if progress.skipped > most:
        raise ValueError(
            f"no finite gradient in {progress.skipped} steps in a row, the last at step {progress.step} "
            f"(train.max_skipped is {most}); lower optim.lr, or look at the rows in {path}"
        )


def _check_best(session: Session, progress: Progress, metrics: Metrics, out: Path) -> None:
    """The real accept length of the best head, on rank 0; raises ValueError where it is not what was simulated."""
    rows = session.rows.held_out[: session.config.eval.check_prompts]
    if rows and session.accelerator.is_main_process:
        found = check_served(session.target, out / _BEST, rows, session.config.eval.depth)
        if found is not None:
            session.log(f"check: accept length of the best head, {len(rows)} held-out prompts: {found}")
            metrics.write(progress, {"served/real": found.real, "served/simulated": found.simulated})
            write_report(out)
    settle(session.target)
    session.accelerator.wait_for_everyone()


def _packed(config: RunConfig) -> bool:
    """Whether rows are packed; a target that is trained, too, runs on padded ones."""
    return config.joint.start is None


def _steps(session: Session, share: float) -> int:
    """Draft steps to train on at that share of the run."""
    loss = session.config.loss
    if session.bare_head.max_depth is not None:  # heads side by side, all of them trained
        return session.bare_head.max_depth
    assert loss.unroll_steps is not None and loss.unroll_from is not None, "a head without a depth of its own unrolls"
    return loss.unroll_steps if share >= loss.unroll_from else 1


def _join(session: Session, progress: Progress) -> None:
    """From now on target and heads are trained together."""
    assert session.joint is not None
    session.joint.active = True
    session.joint.lora.train()
    head = session.bare_head
    head.config = replace(head.config, target_adapter=ADAPTER, trained_with_target=True)
    if not progress.joint:  # heads of the original target were the start only
        progress.joint, progress.best_accept_length = True, 0.0
        session.log(f"joint: target and heads are trained together from step {progress.step} on")


def _agree(accelerator: Accelerator, share: float, stop: int) -> tuple[float, int]:
    """Rank 0's clock, and a signal at any rank, decide for all."""
    if accelerator.num_processes == 1:
        return share, stop
    mine = torch.tensor([[share, float(stop)]], dtype=torch.float64, device=accelerator.device)
    everyone = accelerator.gather(mine)
    return float(everyone[0, 0]), int(everyone[:, 1].max())


def _step(session: Session, micro: list[Dealt], step: int, lr: float, unroll: int) -> tuple[float, float, int, float]:
    """One optimizer step, which changes nothing if its gradient is not finite.

    Returns (loss sum, supervised roots, tokens, gradient norm), the first three global.
    """
    config, accelerator = session.config, session.accelerator
    loss = config.loss
    assert loss.step_decay is not None, "every kind has a default"
    spec = LossSpec(
        loss.feature_weight or 0.0,
        loss.token_weight or 0.0,
        loss.step_decay,
        loss.hard_weight or 0.0,
        loss.divergence or "soft_ce",
        config.train.compile,
    )
    strategy = session.strategy
    for group in strategy.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    joint = session.active_joint
    picked = [[session.rows.train[i] for i in one.indices] for one in micro]
    batches = _batches(session, picked, micro, step, unroll)
    sums = torch.tensor(
        [
            float(sum(b.weight_KBT[0].sum() for b in batches)),
            float(sum(b.valid_BT.sum() for b in batches)),
            float(sum(joint.positions(rows) for rows in picked)) if joint else 0.0,
        ],
        dtype=torch.float64,
        device=accelerator.device,
    )
    weight, tokens, positions = accelerator.reduce(sums, "sum").tolist()
    total = torch.zeros(2, device=accelerator.device)  # of the heads, and the target's KL
    for number, batch in enumerate(batches, 1):
        with strategy.accumulating(last=number == len(batches)):
            hidden = None
            if joint:
                batch, hidden = joint.live(picked[number - 1], batch)
            loss_sum = strategy.module(batch, spec)
            # Gradients are averaged over ranks; the loss is divided by the global count, so undo that average. And
            # where a loss is not finite, its gradient must not be either (0 * infinity): then nothing is updated.
            scale = accelerator.num_processes / max(weight, 1.0) + 0 * loss_sum.detach()
            objective = loss_sum * scale
            total[0] += loss_sum.detach()
            if joint and hidden is not None:
                kl = joint.target_loss(picked[number - 1], micro[number - 1].features, hidden)
                kl_scale = accelerator.num_processes / max(positions, 1.0)
                objective = joint.config.head_weight * objective + kl_scale * kl
                total[1] += kl.detach()
            strategy.backward(objective)
    norm = strategy.clip(config.optim.clip_norm)
    if joint:
        joint.share_gradients(accelerator)
        norm += float(torch.nn.utils.clip_grad_norm_(joint.lora.parameters(), config.optim.clip_norm))
    head_sum, kl_sum = accelerator.reduce(total, "sum").tolist()
    strategy.update(_finite(head_sum + kl_sum, norm))
    if joint:
        joint.log(kl_sum, positions)
    return head_sum, weight, int(tokens), norm


def _batches(
    session: Session, picked: list[list[TokenRow]], micro: list[Dealt], step: int, unroll: int
) -> list[HeadBatch]:
    """This rank's micro-batches of a step; `picked`: the rows of `micro`."""
    config, accelerator = session.config, session.accelerator
    batches = []
    for number, (rows, one) in enumerate(zip(picked, micro, strict=True)):
        # one stream of noise per global micro-batch, whichever rank has it
        index = (step * len(micro) + number) * accelerator.num_processes + accelerator.process_index
        generator = torch.Generator().manual_seed(config.train.seed * 1_000_000_007 + index)
        batches.append(
            make_batch(
                rows,
                one.features,
                unroll,
                session.bare_head.needs,
                packed=config.train.tokens_per_batch if _packed(config) else None,
                noise=config.loss.noise or 0.0,
                generator=generator,
                dtype=session.dtype,
                device=session.target.head_device,
            )
        )
    return batches


def _evaluate(session: Session, progress: Progress, metrics: Metrics, out: Path) -> Evaluation:
    config = session.config
    joint = session.active_joint
    held = session.rows.held_out
    features = session.held_features if joint is None else joint.measure(held, session.held_features)
    depth = min(config.eval.depth, session.bare_head.max_depth or config.eval.depth)
    with session.strategy.whole() as head:
        result = evaluate(
            head, held, features, depth, config.train.tokens_per_batch, session.accelerator, session.dtype
        )
    better = result.accept_length > progress.best_accept_length
    if better:
        weights = session.strategy.weights()
        problem = everywhere(session.accelerator, lambda: _save_best(session, weights, progress, result, out))
        if problem:
            session.log(f"warning: the best head could not be saved in {out / _BEST} ({problem}); training goes on")
            better = False
        else:
            progress.best_accept_length, progress.best_step = result.accept_length, progress.step
    metrics.write(progress, {f"eval/{name}": value for name, value in result.to_dict().items()})
    if joint is not None and joint.drift is not None:
        metrics.write(progress, {f"drift/{name}": value for name, value in joint.drift.to_dict().items()})
        session.log(f"joint: {joint.drift}")
    if session.accelerator.is_main_process:
        write_report(out)
    accuracy = " ".join(f"{a:.3f}" for a in result.accuracy)
    session.log(
        f"eval: step {progress.step}, simulated accept length (chain of {len(result.accuracy)}) "
        f"{result.accept_length:.3f}{' (best)' if better else ''}, accuracy per depth {accuracy}"
    )
    return result


def _save_best(
    session: Session, weights: dict[str, torch.Tensor], progress: Progress, result: Evaluation, out: Path
) -> None:
    """On rank 0."""
    if not session.accelerator.is_main_process:
        return
    joint = session.active_joint
    record = provenance(
        data=session.rows.record,
        step=progress.step,
        epochs=progress.epochs,
        seconds=round(progress.seconds, 1),
        supervised_tokens_seen=progress.supervised,
        evaluation=result.to_dict(),
        target_dtype=str(session.target.dtype),
        target_drift=None if joint is None or joint.drift is None else joint.drift.to_dict(),
        target_adapter=session.target.adapter,
        target_adapter_sha256=session.target.adapter_sha256,
    )
    files = {RUN_YAML: dump_yaml(session.config), "provenance.json": json.dumps(record, indent=2) + "\n"}

    def write_adapter(folder: Path) -> None:
        if joint is not None:
            (folder / ADAPTER).mkdir()
            joint.lora.write(folder / ADAPTER)

    save_head(session.bare_head, out / _BEST, files, session.dtype, write_adapter, weights)


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

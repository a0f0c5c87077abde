"""The training loop, on accelerate. Reads from top to bottom: prepare, then step until the limit, then report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from heads.base import HeadBatch, LossSpec
from heads.checkpoint import ADAPTER, recover, save_head
from train.batching import batch_stream, make_batch
from train.config import RunConfig
from train.conversations import TokenRow
from train.evaluate import Evaluation, evaluate
from train.files import write_text
from train.optim import learning_rate, progress_of
from train.provenance import provenance
from train.report import HTML as REPORT
from train.report import write_report
from train.resume import RUN_YAML, Progress, check_output, load_state, read_progress, save_state
from train.served import check_served
from train.session import Session, build_accelerator, prepare
from train.tracking import MetricsFile
from train.typed_yaml import dump_yaml

_BEST, _CHECKPOINTS = "best", "checkpoints"


def train(config: RunConfig) -> Path:
    """Trains a head and returns the directory of the best one.

    Raises:
        ValueError: settings, data or directories that cannot work, before the first step.
    """
    check_output(config)
    accelerator = build_accelerator(config)
    log: Callable[[str], None] = accelerator.print
    out = Path(config.train.output_dir)
    before = read_progress(out / _CHECKPOINTS)
    if before is not None and before.finished and (_limit_reached(config, before) or _patience_lost(config, before)):
        log(f"train: {out} is finished (step {before.step}); the best head is in {out / _BEST}")
        return out / _BEST
    if accelerator.is_main_process and out.is_dir():
        recover(out / _BEST)
    session = prepare(config, accelerator, log)
    progress = load_state(accelerator, out / _CHECKPOINTS) or Progress()
    if progress.step:
        log(f"train: going on at step {progress.step} ({progress.seconds / 60:.1f} min done)")
    _run(session, progress, out)
    log(f"train: best simulated accept length {progress.best_accept_length:.3f} at step {progress.best_step}")
    log(f"train: the best head is in {out / _BEST}, the report in {out / REPORT}, metrics in {out / 'metrics.jsonl'}")
    # DDP's reducer must not hold the last reference to the process group: it would destroy it under the interpreter's
    # lock, which a thread of gloo may be waiting for to let go of the last barrier (seen as a hang after the end).
    del session
    accelerator.free_memory()
    accelerator.end_training()
    return out / _BEST


def _patience_lost(config: RunConfig, progress: Progress) -> bool:
    waited, patience = progress.step - progress.best_step, config.train.patience
    return patience is not None and progress.best_step >= 0 and waited >= patience * config.train.eval_every


def _limit_reached(config: RunConfig, done: Progress) -> bool:
    return progress_of(config.train, done.step, done.epochs, done.seconds) >= 1.0


def _run(session: Session, progress: Progress, out: Path) -> None:
    config, accelerator = session.config, session.accelerator
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / RUN_YAML, dump_yaml(config))
    metrics = MetricsFile(out / "metrics.jsonl", progress.step, accelerator.is_main_process)
    lengths = [len(row.input_ids) for row in session.rows.train]
    world, rank = accelerator.num_processes, accelerator.process_index
    stream = batch_stream(lengths, config.train.tokens_per_batch, config.train.seed, progress.batches, _packed(config))
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
        if session.joint is not None and session.joint.due(share):
            _join(session, progress)
        loss, weight, tokens, norm = _step(session, micro, progress.step, lr, _steps(session, share))
        progress.step += 1
        progress.supervised += int(weight)
        window.add(loss, weight, tokens)
        if progress.step % config.train.log_every == 0:
            line = window.take() | {"lr": lr, "grad_norm": norm, "epochs": round(progress.epochs, 3)}
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
            save_state(accelerator, out / _CHECKPOINTS, progress, config.train.keep_checkpoints)
            window.restart()
    if progress.step % config.train.eval_every:
        _evaluate(session, progress, metrics, out)
    progress.finished = True
    save_state(accelerator, out / _CHECKPOINTS, progress, config.train.keep_checkpoints)
    _check_best(session, progress, metrics, out)


def _check_best(session: Session, progress: Progress, metrics: MetricsFile, out: Path) -> None:
    """The real accept length of the best head, on rank 0; raises ValueError where it is not what was simulated."""
    rows = session.rows.held_out[: session.config.eval.check_prompts]
    if rows and session.accelerator.is_main_process:
        found = check_served(session.target, out / _BEST, rows, session.config.eval.depth)
        if found is not None:
            session.log(f"check: accept length of the best head, {len(rows)} held-out prompts: {found}")
            metrics.write(progress, {"served/real": found.real, "served/simulated": found.simulated})
            write_report(out)
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
    for group in session.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    joint = session.active_joint
    picked = [[session.rows.train[i] for i in indices] for indices in micro]
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
        last = number == len(batches)
        with accelerator.no_sync(session.head) if not last else nullcontext():
            hidden = None
            if joint:
                batch, hidden = joint.live(picked[number - 1], batch)
            out = session.head(batch, spec)
            # DDP averages gradients over ranks; the loss is divided by the global count, so undo that average.
            objective = out.loss_sum * (accelerator.num_processes / max(weight, 1.0))
            total[0] += out.loss_sum.detach()
            if joint and hidden is not None:
                features = [session.train_features[i] for i in micro[number - 1]]
                kl = joint.target_loss(picked[number - 1], features, hidden)
                kl_scale = accelerator.num_processes / max(positions, 1.0)
                objective = joint.config.head_weight * objective + kl_scale * kl
                total[1] += kl.detach()
            accelerator.backward(objective)
    norm = accelerator.clip_grad_norm_(session.head.parameters(), config.optim.clip_norm)
    if joint:
        joint.share_gradients(accelerator)
        norm = norm + torch.nn.utils.clip_grad_norm_(joint.lora.parameters(), config.optim.clip_norm)
    if not bool(torch.isfinite(torch.as_tensor(norm))):
        names = [row.id for rows in picked for row in rows]
        raise ValueError(
            f"the gradient is not finite at step {step}; rows {names[:8]}...: lower optim.lr or check them"
        )
    session.optimizer.step()
    session.optimizer.zero_grad(set_to_none=True)
    head_sum, kl_sum = accelerator.reduce(total, "sum").tolist()
    if joint:
        joint.log(kl_sum, positions)
    return head_sum, weight, int(tokens), float(norm or 0.0)


def _batches(
    session: Session, picked: list[list[TokenRow]], micro: list[list[int]], step: int, unroll: int
) -> list[HeadBatch]:
    """This rank's micro-batches of a step; `picked`: the rows of `micro`."""
    config, accelerator = session.config, session.accelerator
    batches = []
    for number, (rows, indices) in enumerate(zip(picked, micro, strict=True)):
        # one stream of noise per global micro-batch, whichever rank has it
        index = (step * len(micro) + number) * accelerator.num_processes + accelerator.process_index
        generator = torch.Generator().manual_seed(config.train.seed * 1_000_000_007 + index)
        batches.append(
            make_batch(
                rows,
                [session.train_features[i] for i in indices],
                unroll,
                session.bare_head.needs,
                packed=config.train.tokens_per_batch if _packed(config) else None,
                noise=config.loss.noise or 0.0,
                generator=generator,
                dtype=session.dtype,
                device=accelerator.device,
            )
        )
    return batches


def _evaluate(session: Session, progress: Progress, metrics: MetricsFile, out: Path) -> Evaluation:
    config = session.config
    joint = session.active_joint
    held = session.rows.held_out
    result = evaluate(
        session.head,
        held,
        session.held_features if joint is None else joint.measure(held, session.held_features),
        min(config.eval.depth, session.bare_head.max_depth or config.eval.depth),
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


def _save_best(session: Session, progress: Progress, result: Evaluation, out: Path) -> None:
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

    save_head(session.bare_head, out / _BEST, files, session.dtype, write_adapter)


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

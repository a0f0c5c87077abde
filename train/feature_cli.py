"""The commands of `scripts/feature_cache.py`: build and verify the caches of a run, and what int8 features cost."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from heads.base import head_dtype
from heads.registry import build_head
from heads.target import TargetAdapter
from infer.loading import add_model_options, load_models
from infer.report import aligned
from train.cli import add_config_options
from train.config import RunConfig, load_config
from train.evaluate import evaluate
from train.feature_cache import form_of
from train.feature_check import verify_feature_cache
from train.feature_stage import open_features, places
from train.features import FeatureSource, OnlineFeatures
from train.joint import target_drift
from train.resume import RUN_YAML
from train.session import build_accelerator, head_config, load_sources, start
from train.stage import Rows, read_held_out


def add_build_options(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)


def add_verify_options(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser)
    parser.add_argument("--rows", type=int, default=16, metavar="N", help="rows to compute again; default: 16")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws these rows; default: 0")


def add_int8_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    add = parser.add_argument
    add("--data", metavar="DIR", help="data.work_dir with the held-out rows; default: that of the head's training run")
    add("--limit", type=int, metavar="N", help="only N held-out rows; default: eval.max_rows of the training run")


def run_build(args: argparse.Namespace) -> None:
    """Makes the caches that training with this config reads. Under a launcher, its processes share the work.

    Raises:
        ValueError: as training does.
    """
    config = _disk_config(args)
    sources, source, accelerator = _sources(config)
    open_features(config, source, sources, accelerator.print)
    for place in places(config, source.taps, sources):
        accelerator.print(f"features: {len(place.rows)} rows are in {place.folder}")
    accelerator.end_training()


def run_verify(args: argparse.Namespace) -> None:
    """Checks the caches of this config; prints a line for each, and JSON as the last one.

    Raises:
        ValueError: see `verify_feature_cache`; nothing there is changed.
    """
    if args.rows < 0:
        raise ValueError(f"--rows is {args.rows}, expected 0 or more")
    config = _disk_config(args)
    sources, source, _ = _sources(config)
    summary: dict[str, Any] = {}
    for place in places(config, source.taps, sources):
        found = verify_feature_cache(
            source, place.rows, place.folder, stored=place.stored, sample=args.rows, seed=args.seed
        )
        print(f"features: {place.folder}: {found}")
        summary[str(place.folder)] = vars(found)
    print(json.dumps(summary), flush=True)


def run_int8(args: argparse.Namespace) -> None:
    """Evaluates a head on held-out rows with features as they are and from int8; the last line is JSON.

    Raises:
        ValueError: files that are not there or do not fit.
    """
    run_yaml = Path(args.head) / RUN_YAML
    if not run_yaml.is_file():
        raise ValueError(f"--head: {args.head} holds no {RUN_YAML} of a training run")
    config = load_config(run_yaml)
    target_config, train = replace(config.target, device=args.device), replace(config.train, threads=args.threads or 0)
    config = replace(config, target=target_config, train=train)
    accelerator = build_accelerator(config)
    loaded = load_models(args)
    head, target = loaded.head, loaded.target
    assert head is not None, "load_models leaves the head out only if asked to"
    limit = config.eval.max_rows if args.limit is None else args.limit
    if limit < 1:
        raise ValueError(f"--limit is {limit}, expected 1 or more")
    rows = read_held_out(args.data or config.data.work_dir, config.target.path)[:limit]
    source = FeatureSource(target, head.needs.taps)
    exact = [features.cpu() for features in OnlineFeatures(source, rows).read(range(len(rows)))]
    form = form_of(source, "int8")
    coarse = [form.decode(form.encode(features)) for features in exact]
    depth = min(config.eval.depth, head.max_depth or config.eval.depth)
    found = {
        name: evaluate(head, rows, features, depth, config.train.tokens_per_batch, accelerator, head_dtype(head))
        for name, features in (("as computed", exact), ("int8", coarse))
    }
    drift = target_drift(target, rows, exact, [features[:, : target.hidden_size] for features in coarse])
    sizes = {"as computed": form_of(source, "auto").bytes_per_token, "int8": form.bytes_per_token}
    table = [["features", "bytes per token", "accept length", *(f"depth {k + 1}" for k in range(depth))]]
    for name, result in found.items():
        shares = (f"{100 * share:.1f} %" for share in result.accuracy)
        table.append([name, str(sizes[name]), f"{result.accept_length:.3f}", *shares])
    print("\n".join([f"{len(rows)} held-out rows, {found['int8'].roots} places; accuracy by depth:", *aligned(table)]))
    print(f"teacher from int8: KL {drift.kl:.2e} nats per token, another argmax at {drift.argmax_changed:.2%}")
    lengths = {name: result.accept_length for name, result in found.items()}
    lost = 1 - lengths["int8"] / lengths["as computed"]
    summary = {"head": args.head, "rows": len(rows), "accept_length": lengths, "lost": lost, "bytes_per_token": sizes}
    print(json.dumps({**summary, "teacher": drift.to_dict()}), flush=True)


def _disk_config(args: argparse.Namespace) -> RunConfig:
    config = load_config(args.config, args.set)
    if config.cache.mode != "disk":
        raise ValueError(f"cache.mode is {config.cache.mode!r}, so there is no cache; expected disk")
    return config


def _sources(config: RunConfig) -> tuple[Sequence[Rows], FeatureSource, Accelerator]:
    """The rows, what computes their features as the config's head needs them, and the processes that do it."""
    accelerator, launch = start(config)
    sources, target, tokenizer = load_sources(config, accelerator, accelerator.print, launch)
    taps = _taps(config, target)
    target.tap(taps)
    return sources, FeatureSource(target, taps, tokenizer), accelerator


def _taps(config: RunConfig, target: TargetAdapter) -> tuple[int, ...]:
    with torch.device("meta"):  # the head's needs, without its weights
        return build_head(head_config(config, target, 1.0)).needs.taps

"""Loading a target with its head and tokenizer, for every command that decodes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from heads.adapter import adapter_in
from heads.base import DraftHead
from heads.config import HeadConfig
from heads.embedded import resolve_target
from heads.fingerprint import differences, tokenizer_digest
from heads.formats.opening import open_head
from heads.target import TargetAdapter, pick_device
from infer.probe import require_tree

_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Loaded:
    """A target, the head bound to it (None: decode plainly), the target's tokenizer, and whether it passed the probe.

    A target that did not is decoded by the library. changed: that the target is not the original one any more, since
    it was trained together with the head.
    """

    target: TargetAdapter
    head: DraftHead | None
    tokenizer: Any
    fit: bool = True
    changed: str | None = None


def add_model_options(parser: argparse.ArgumentParser, head: str = "--head") -> None:
    """The options that `load_models` reads; `head` is an option, or ("head") a positional argument."""
    add = parser.add_argument_group("model").add_argument
    needed: dict[str, Any] = {"required": True} if head.startswith("-") else {}
    add(
        head,
        metavar="DIR",
        **needed,
        help="a head: directory written by training, or directory or hub id of a published one in the layout of vLLM, "
        "SGLang, TensorRT-LLM, speculators, or the EAGLE, Medusa or Hydra repositories",
    )
    add(
        "--adapter",
        metavar="DIR",
        help='directory or hub id of a peft adapter that the target carries, or "none"; default: the one the head was '
        "trained for",
    )
    add("--target", help='hub id, directory or "embedded"; default: the one the head was trained for')
    add("--cache-dir", metavar="DIR", help="where the embedded target is kept")
    dtypes = "auto: as stored, or float32 on a CPU that lacks it; default: %(default)s"
    add("--dtype", choices=_DTYPES, default="auto", help=dtypes)
    add("--device", default="auto", help="auto (default): cuda if there is one, else cpu")
    add("--device-map", metavar="MAP", help='spread the target over devices, as transformers\' device_map ("auto")')
    add("--threads", type=int, metavar="N", help="CPU threads; default: torch's choice")
    add("--trust-remote-code", action="store_true", help="run model code from the hub")


def load_models(args: argparse.Namespace, plain: bool = False) -> Loaded:
    """Loads what `add_model_options` asked for; the target must pass the probe, unless no head is to be used.

    Raises:
        ValueError: anything that cannot be loaded or does not fit, naming the option to change.
    """
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads is {args.threads}, expected 1 or more")
        torch.set_num_threads(args.threads)
    opened = open_head(args.head, args.target, trust_remote_code=args.trust_remote_code, cache_dir=args.cache_dir)
    args.head = str(opened.folder)  # a hub id is a directory from here on
    config = opened.config
    path = args.target or config.target
    if not path:
        raise ValueError(f"--head: {args.head} does not say which target it is for: give --target")
    revision = config.target_revision if path == config.target else None
    adapter = _adapter(args.adapter, config, args.head)
    changed = None
    if config.trained_with_target and adapter is not None:
        changed = _changed_target(args.head)
        print(changed, file=sys.stderr, flush=True)
    target = TargetAdapter.load(
        path,
        dtype=args.dtype,
        device=_device(args.device),
        device_map=args.device_map,
        revision=revision,
        trust_remote_code=args.trust_remote_code,
        cache_dir=args.cache_dir,
        adapter=adapter,
    )
    fit, head = True, None
    if not plain:
        head = opened.for_target(target)
        require_tree(target)
    else:
        try:
            require_tree(target)
        except ValueError:
            fit = False
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            resolve_target(path, args.cache_dir), revision=revision, trust_remote_code=args.trust_remote_code
        )
    except OSError as error:
        raise ValueError(f"--target: {path!r} has no tokenizer: {error}") from error
    ours = {"tokenizer_sha256": tokenizer_digest(tokenizer)} if config.tokenizer_sha256 is not None else {}
    for difference in differences(config, ours, path):
        print(f"warning: {difference}", file=sys.stderr, flush=True)
    return Loaded(target, head, tokenizer, fit, changed)


def _adapter(asked: str | None, config: HeadConfig, folder: str) -> str | None:
    """The target's adapter: as asked, or the one that the head was trained for, which its own directory may hold."""
    trained = adapter_in(folder, config.target_adapter)
    if asked is None:
        return trained
    chosen = None if asked == "none" else asked
    if chosen != trained:
        print(
            f"warning: the head was trained for a target with adapter {trained or 'none'}, and is used with adapter "
            f"{asked}: output stays that of the target, but fewer drafts may be accepted",
            file=sys.stderr,
            flush=True,
        )
    return chosen


def _changed_target(folder: str) -> str:
    """What joint training did to the target, as it measured it (`train/joint.py`)."""
    told = "target and head were trained together: exact towards the adapted target, not lossless towards the original"
    try:
        drift = json.loads((Path(folder) / "provenance.json").read_text())["target_drift"]
        perplexities = f"{drift['base_perplexity']:.3f} -> {drift['perplexity']:.3f}"
        return (
            f"{told} target (held out: KL {drift['kl']:.4f} nats per token, perplexity {perplexities}, another argmax "
            f"at {drift['argmax_changed']:.1%} of the positions)"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return f"{told} target (how far it moved is not recorded)"


def _device(wanted: str) -> torch.device:
    try:
        device = torch.device(pick_device(wanted))
    except RuntimeError as error:
        raise ValueError(f"--device: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device is {device}, but torch sees no CUDA device; use --device cpu")
    return device

"""Memory and time of a run before anything is rented or loaded, from the config alone.

Target and head are built on the meta device, so that their sizes are those of the real modules; everything else follows
from sizes. What is assumed is printed with the result.

Strategies (`train.strategies`) on N devices; P trained parameters take 4 P bytes of weights, 4 P of gradients, 8 P of
moments on one. What is said here of N is measured in two processes (`tests/test_train_plan_strategies.py`):

    ddp     all of it on every device, and the buckets in which gradients are averaged
    zero2   gradients, moments and a second copy of the weights are divided; gradients pass through two buckets
    fsdp2   everything is divided; whole for a step are weights and, at its end, gradients and what is sent of them
    zero3   everything is divided, the weights twice; whole for a step are weights; two buckets

fsdp2 and zero3 divide the layers of the target, too, of which one computes while the next is gathered.
Answers are made by one process; the target is then placed layer by layer over the devices, which work in turn.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from heads.base import DraftHead, trainable_parameters
from heads.config import HeadConfig
from heads.embedded import EMBEDDED, prepared
from heads.registry import build_head
from heads.target import TargetAdapter, fast_dtype, quick_on_cpu
from infer.passes import MOST_NEW
from infer.prefill import check_length
from train.batching import padded_width
from train.config import RunConfig, TargetConfig
from train.features import PASS_TOKENS
from train.flops import StepSize, draft_attention_flops, step_products, target_attention_flops, target_flops_per_token
from train.memory import estimate_memory, target_pass_bytes
from train.zero import BUCKET

_DIVIDES_TARGET = ("fsdp2", "zero3")
USABLE = 0.9  # of a device's memory: the rest is the libraries' own, and what falls between blocks
_LEAST_TOKENS = 256
MOST_DEVICES = 4096
_UNKNOWN_TOKENS = 1_000_000
GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One device, at its peak: bytes, FLOP/s, bytes/s of its memory and to other devices; share: what is reached."""

    memory: float = 80 * GIB
    flops: float = 312e12
    bandwidth: float = 2000e9
    link: float = 50e9
    share: float = 0.4


@dataclass(frozen=True)
class Case:
    """One way to run: the config as it is, or changed to fit."""

    config: RunConfig
    devices: int
    strategy: str

    @property
    def divides_target(self) -> bool:
        return self.devices > 1 and self.strategy in _DIVIDES_TARGET

    @property
    def makes_answers(self) -> bool:
        data = self.config.data
        return data.path is None or data.answers == "regenerate"

    @property
    def batch_tokens(self) -> int:
        """Positions of a micro-batch; a row that is longer is one of its own."""
        return padded_width(max(self.config.train.tokens_per_batch, self.config.data.max_length))


@dataclass(frozen=True)
class Times:
    """Seconds. steps: of training, `tokens` positions in all."""

    answers: float
    features: float
    training: float
    steps: int
    tokens: int


class Plan:
    """What a config asks of devices.

    Args:
        target_file: a config.json to plan for, in place of that of target.path.
        tokens: of all rows, prompts included; None: as the config says, if it does.

    Raises:
        ValueError: a config that cannot be planned, with the reason.
    """

    def __init__(
        self, config: RunConfig, hardware: Hardware, target_file: str | None = None, tokens: int | None = None
    ) -> None:
        if config.joint.start is not None:
            raise ValueError(
                f"joint.start is {config.joint.start}, but only frozen targets are planned for; set it to null"
            )
        self.config, self.hardware = config, hardware
        cpu = config.target.device == "cpu"
        self.device = torch.device("cpu" if cpu else "cuda")
        precision, fast = config.train.mixed_precision, fast_dtype(self.device) if cpu else torch.bfloat16
        self.dtype = {"bf16": torch.bfloat16, "no": torch.float32, "auto": fast}[precision]
        self.target, self.quantised = meta_target(config.target, target_file, cpu)
        check_length(self.target, config.data.max_length, "data.max_length")
        self.head = meta_head(config, self.target)
        self.tokens, self.tokens_known = _row_tokens(config, tokens)

    # ---- sizes of the models ---------------------------------------------------------------------------------

    @cached_property
    def target_bytes(self) -> int:
        return _bytes(self.target.model)

    @cached_property
    def layer_bytes(self) -> int:
        """Of the target's largest layer."""
        return max(_bytes(layer) for layer in self.target.layers)

    @cached_property
    def root_bytes(self) -> int:
        """Of what is in no layer: embedding, LM head, final norm."""
        return self.target_bytes - sum(_bytes(layer) for layer in self.target.layers)

    @cached_property
    def slot_bytes(self) -> int:
        """Keys and values of one token."""
        try:
            return self.target.cache_bytes_per_slot
        except Exception as error:  # of the model's own code, whatever it raises
            name = type(self.target.model).__name__
            raise ValueError(f"target.path: {name} does not run with explicit masks and our cache: {error}") from error

    @cached_property
    def trained(self) -> int:
        return trainable_parameters(self.head)

    @cached_property
    def columns(self) -> int:
        """Numbers per token in the feature cache."""
        return self.target.hidden_size + len(self.head.needs.taps) * self.target.config.hidden_size

    def steps(self, case: Case) -> int:
        return self.head.max_depth or case.config.loss.unroll_steps or 1

    # ---- memory ----------------------------------------------------------------------------------------------

    def memory(self, case: Case) -> dict[str, dict[str, int]]:
        """Bytes on each device by phase and part."""
        found = {"answers": self._answers(case)} if case.makes_answers else {}
        return {**found, "features": self._features(case), "training": self._training(case)}

    def _answers(self, case: Case) -> dict[str, int]:
        data, size, layers = case.config.data, self.target.dtype.itemsize, self.target.num_layers
        here = -(-layers // case.devices) if case.divides_target else layers
        target = self.target_bytes - (layers - here) * self.target_bytes_per_layer
        slot = self.slot_bytes * here // layers
        cache = (data.batch_size + 2) * data.max_length * slot  # a row for the common prefix, and one for padding
        tokens = data.batch_size + 1 + MOST_NEW
        # Sizes of passes are tried out with logits after every token.
        logits = 2 * size * tokens * self.target.vocab_size
        work = target_pass_bytes(self.target, 1, tokens, self.target.hidden_size) + logits
        return {"target": target, "cache": cache, "activations": work}

    @property
    def target_bytes_per_layer(self) -> int:
        """The mean one."""
        return (self.target_bytes - self.root_bytes) // self.target.num_layers

    def _features(self, case: Case) -> dict[str, int]:
        length = padded_width(case.config.data.max_length)
        work = target_pass_bytes(self.target, max(1, PASS_TOKENS // length), length, self.columns)
        # A layer is gathered while the one before it computes.
        gathered = {"gathered": 2 * self.layer_bytes} if case.divides_target else {}
        return {"target": self._held_target(case), **gathered, "activations": work}

    def _held_target(self, case: Case) -> int:
        """Its layers may be divided."""
        if not case.divides_target:
            return self.target_bytes
        return self.root_bytes + -(-(self.target_bytes - self.root_bytes) // case.devices)

    def _training(self, case: Case) -> dict[str, int]:
        checkpointing = case.config.train.gradient_checkpointing
        steps, tokens = self.steps(case), case.batch_tokens
        estimate = estimate_memory(self.head, tokens, steps, self.dtype, checkpointing, self.device)
        found = asdict(estimate) | {"target": self._held_target(case)} | self._states(case)
        if (vocab := self.head.config.draft_vocab_size) is not None:
            found["teacher"] = vocab * self.target.hidden_size * self.target.dtype.itemsize  # its rows, copied
        return found

    def _states(self, case: Case) -> dict[str, int]:
        """Weights, gradients, moments of the head, all in fp32; copies for bf16 are in the activations."""
        whole, share = 4 * self.trained, -(-4 * self.trained // case.devices)
        if case.devices == 1:
            return {"weights": whole, "gradients": whole, "moments": 2 * whole}
        if case.strategy == "ddp":
            return {"weights": whole, "gradients": 2 * whole, "moments": 2 * whole}
        if case.strategy == "fsdp2":
            return {"weights": share, "gradients": share, "moments": 2 * share, "gathered": 3 * whole}
        buckets = 2 * 4 * min(self.trained, BUCKET)
        parts = {"weights": whole + share, "gradients": share + buckets, "moments": 2 * share}
        return parts if case.strategy == "zero2" else parts | {"weights": 2 * share, "gathered": whole}

    def needed(self, case: Case) -> int:
        return max(sum(parts.values()) for parts in self.memory(case).values())

    @property
    def usable(self) -> float:
        return USABLE * self.hardware.memory

    def fits(self, case: Case) -> bool:
        return self.needed(case) <= self.usable

    def smallest_change(self, case: Case) -> Case | None:
        """The first that fits: settings, then another strategy, then more devices; None: nothing does."""
        devices = case.devices
        while devices <= MOST_DEVICES:
            for strategy in dict.fromkeys((case.strategy, *_DIVIDES_TARGET) if devices > 1 else (case.strategy,)):
                fitted = self._fewer_rows(Case(case.config, devices, strategy))
                other = self._smaller_batch(fitted)
                if self.fits(other):
                    return other
            devices *= 2
        return None

    def _fewer_rows(self, case: Case) -> Case:
        """With as many rows answered side by side as there is room for, or with 1."""
        while case.makes_answers and case.config.data.batch_size > 1:
            if sum(self._answers(case).values()) <= self.usable:
                break
            data = replace(case.config.data, batch_size=case.config.data.batch_size // 2)
            case = replace(case, config=replace(case.config, data=data))
        return case

    def _smaller_batch(self, case: Case) -> Case:
        """With smaller micro-batches, more of them, and if that is not enough recomputing, too."""
        least = max(_LEAST_TOKENS, case.config.data.max_length)
        unrolls = self.head.max_depth is None
        other = case
        for checkpointing in sorted({case.config.train.gradient_checkpointing, unrolls}):
            train = replace(case.config.train, gradient_checkpointing=checkpointing)
            while True:
                other = replace(case, config=replace(case.config, train=train))
                tokens = train.tokens_per_batch
                if sum(self._training(other).values()) <= self.usable:
                    return other
                if tokens % 2 or tokens // 2 < least:
                    break
                train = replace(train, tokens_per_batch=tokens // 2, grad_accumulation=2 * train.grad_accumulation)
        return other

    # ---- time ------------------------------------------------------------------------------------------------

    def times(self, case: Case) -> Times:
        steps, tokens, training = self._training_time(case)
        return Times(self._answer_time(case), self._feature_time(case), training, steps, tokens)

    def _answer_time(self, case: Case) -> float:
        """Every pass reads all weights and the cache; half of a row is there on average."""
        if not case.makes_answers:
            return 0.0
        data, hardware = case.config.data, self.hardware
        made = self.tokens if data.path is None else self.tokens * answer_share(case.config)
        matrices = target_flops_per_token(self.target) + 2 * self.target.hidden_size * self.target.vocab_size
        per_token = matrices + target_attention_flops(self.target, data.max_length / 2)
        rows = data.batch_size
        traffic = self.target_bytes + rows * data.max_length * self.slot_bytes / 2
        step = max(rows * per_token / hardware.flops, traffic / hardware.bandwidth)
        read = self.tokens * target_flops_per_token(self.target) / hardware.flops
        return (step * made / rows + read) / hardware.share

    def _feature_time(self, case: Case) -> float:
        length, devices = padded_width(case.config.data.max_length), case.devices
        rows = max(1, PASS_TOKENS // length)
        matrices = rows * length * target_flops_per_token(self.target)
        flops = matrices + target_attention_flops(self.target, rows * length * length)
        one = flops / self.hardware.flops
        if case.divides_target:
            one += (self.target_bytes - self.root_bytes) * (devices - 1) / devices / self.hardware.link
        return one * self.tokens / (rows * length) / devices / self.hardware.share

    def _training_time(self, case: Case) -> tuple[int, int, float]:
        """(steps, tokens, seconds)."""
        train, loss = case.config.train, case.config.loss
        late = self.steps(case)
        early = loss.unroll_from or 0.0  # share of the run with one draft step
        flops = (1 - early) * self.micro_flops(case, late) + (early * self.micro_flops(case, 1) if early else 0)
        one = self._exchange(case) + train.grad_accumulation * flops / self.hardware.flops
        states = 28 * self.trained / (case.devices if case.strategy != "ddp" else 1)  # 16 bytes read, 12 written
        one = (one + states / self.hardware.bandwidth) / self.hardware.share
        batch = case.batch_tokens * train.grad_accumulation * case.devices
        limits = [] if train.max_steps is None else [float(train.max_steps)]
        limits += [] if train.epochs is None else [train.epochs * self.tokens / batch]
        limits += [] if train.max_minutes is None else [60 * train.max_minutes / one]
        steps = max(1, round(min(limits)))
        return steps, steps * batch, steps * one

    def micro_flops(self, case: Case, steps: int) -> float:
        """Of a micro-batch, all of it supervised, in rows of data.max_length."""
        tokens, length = case.batch_tokens, case.config.data.max_length
        products = step_products(self.head, StepSize(steps, tokens, tokens, tokens))
        attention = draft_attention_flops(self.head, steps, tokens * (length + 1) / 2)
        return sum(product.flops for product in products) + attention

    def _exchange(self, case: Case) -> float:
        """Seconds at the peak that a step's exchange takes, nothing of it hidden behind arithmetic."""
        if case.devices == 1:
            return 0.0
        accumulation, whole = case.config.train.grad_accumulation, 4 * self.trained
        # ddp averages once; the others after every micro-batch. Averaging sends every gradient twice (so does zero2's);
        # or each goes to the process that keeps it, and weights come from there: with every micro-batch, in zero2 once.
        size = {"ddp": 2 * whole, "zero2": (2 * accumulation + 1) * whole}.get(case.strategy, 2 * accumulation * whole)
        return size * (case.devices - 1) / case.devices / self.hardware.link

    # ---- disk ------------------------------------------------------------------------------------------------

    @property
    def cache_bytes(self) -> int:
        return self.tokens * self.columns * self.target.dtype.itemsize

    @property
    def checkpoint_bytes(self) -> int:
        """Those kept, one being written, and the best head."""
        return (self.config.train.keep_checkpoints + 1) * 12 * self.trained + self.dtype.itemsize * self.trained


# ---- what is built -------------------------------------------------------------------------------------------


def meta_target(target: TargetConfig, file: str | None, cpu: bool) -> tuple[TargetAdapter, bool]:
    """The target without weights, and whether its checkpoint is quantised (which is not counted)."""
    source: dict[str, Any] = {"revision": target.revision, "trust_remote_code": target.trust_remote_code}
    path: str = target.path if file is None else file
    named = "target.path" if file is None else "--target-config"
    if file is not None and not Path(file).is_file():
        raise ValueError(f"--target-config is {file!r}, expected a config.json")
    if path == EMBEDDED:
        done = prepared(target.cache_dir)
        if done is None:
            raise ValueError(
                "target.path: the embedded target is not there; run scripts/prepare_target.py, or give --target-config"
            )
        path = str(done)
    try:
        config = AutoConfig.from_pretrained(path, **source)
        dtype = getattr(torch, target.dtype) if target.dtype != "auto" else config.get_text_config().dtype
        if target.dtype == "auto" and cpu:
            dtype = quick_on_cpu(dtype) or dtype
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype or torch.float32, trust_remote_code=target.trust_remote_code
            )
    except (OSError, ImportError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{named}: cannot read the config of a causal LM from {path!r}: {reason}") from error
    return TargetAdapter(model, name=path), getattr(config, "quantization_config", None) is not None


def meta_head(config: RunConfig, target: TargetAdapter) -> DraftHead:
    """The head without weights, bound to it."""
    options = config.head
    if options.draft_vocab is not None and options.draft_vocab > target.vocab_size:
        raise ValueError(f"head.draft_vocab is {options.draft_vocab}, expected at most {target.vocab_size}")
    derived = HeadConfig.derive(
        options.kind,
        target.config,
        target.vocab_size,
        config.target.path,
        draft_vocab_size=options.draft_vocab,
        options=options.options(),
    )
    with torch.device("meta"):
        head = build_head(derived)
    head.bind(target)
    return head


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def answer_share(config: RunConfig) -> float:
    """Of a row's tokens."""
    return config.data.answer_tokens / (config.data.answer_tokens + config.data.prompt_tokens)


def _row_tokens(config: RunConfig, given: int | None) -> tuple[int, bool]:
    """Tokens of all rows, and whether they are known."""
    data = config.data
    if given is not None:
        return given, True
    if data.path is None:
        return round(data.tokens / answer_share(config)), True
    if data.max_rows is not None:
        return data.max_rows * data.max_length, True
    return _UNKNOWN_TOKENS, False

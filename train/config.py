"""Training configuration: YAML over frozen, typed dataclasses.

A file holds only what differs from the defaults. Unknown keys, wrong types and values out of range are errors
that name the dotted field. `dump_yaml` and `load_config` are exact inverses, so a written `run.yaml` can be
trained again.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
import types
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    """Raise ValueError for the user unless `ok`; `name` is the dotted field to change."""
    if not ok:
        raise ValueError(f"{name} is {value!r}, expected {expected}; change {name}")


@dataclass(frozen=True)
class TargetConfig:
    """The frozen language model that the head is trained for."""

    path: str = "embedded"  # "embedded", a hub id, or a local directory
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    cache_dir: str | None = None  # where the embedded target lives; null: $DRAFTSMITH_CACHE or ~/.cache/draftsmith

    def __post_init__(self) -> None:
        _require(bool(self.path.strip()), "target.path", self.path, '"embedded", a hub id or a directory')
        _require(bool(self.device.strip()), "target.device", self.device, '"auto" or a torch device')


@dataclass(frozen=True)
class HeadOptions:
    """Which draft head, and which tokens it may propose."""

    kind: str = "eagle"
    draft_vocab: int | None = None  # propose only that many frequent tokens; null: the whole vocabulary

    def __post_init__(self) -> None:
        _require(bool(self.kind.strip()), "head.kind", self.kind, "the name of a registered head")
        _require(
            self.draft_vocab is None or self.draft_vocab > 0, "head.draft_vocab", self.draft_vocab, "positive, or null"
        )


@dataclass(frozen=True)
class DataConfig:
    """Conversations: read from a file, or invented and answered by the target."""

    path: str | None = None  # JSONL; null: self-synthesis
    answers: Literal["keep", "regenerate"] = "keep"  # only with path
    work_dir: str = "runs/data"
    max_length: int = 768  # tokens per row; longer rows are cut
    prompt_tokens: int = 160  # longest invented prompt
    answer_tokens: int = 384  # longest new answer
    tokens: int = 400_000  # answer tokens to make; self-synthesis stops there
    max_rows: int | None = None
    held_out: float = 0.05  # fraction of rows kept for evaluation
    seed: int = 0
    prompt_temperature: float = 1.0  # of invented prompts
    answer_temperature: float = 0.7  # of the answers that are not greedy
    greedy_fraction: float = 0.7  # fraction of answers decoded greedily
    top_k: int = 100
    batch_size: int = 128  # rows generated side by side, per process
    processes: int = 0  # 0: one single-threaded process per core

    def __post_init__(self) -> None:
        for name in ("max_length", "prompt_tokens", "answer_tokens", "tokens", "top_k", "batch_size"):
            value = getattr(self, name)
            _require(value > 0, f"data.{name}", value, "a positive number")
        _require(self.path is None or bool(self.path.strip()), "data.path", self.path, "a file, or null")
        _require(
            self.path is not None or self.answers == "keep",
            "data.answers",
            self.answers,
            '"keep" when data.path is not set (there are no given answers to replace)',
        )
        _require(bool(self.work_dir.strip()), "data.work_dir", self.work_dir, "a directory")
        _require(
            self.prompt_tokens < self.max_length,
            "data.prompt_tokens",
            self.prompt_tokens,
            f"less than data.max_length ({self.max_length}), or no answer fits in a row",
        )
        _require(self.max_rows is None or self.max_rows > 0, "data.max_rows", self.max_rows, "positive, or null")
        _require(0 < self.held_out < 1, "data.held_out", self.held_out, "a fraction between 0 and 1")
        _require(self.seed >= 0, "data.seed", self.seed, "0 or more")
        for name in ("prompt_temperature", "answer_temperature"):
            _require(getattr(self, name) > 0, f"data.{name}", getattr(self, name), "a positive number")
        _require(0 <= self.greedy_fraction <= 1, "data.greedy_fraction", self.greedy_fraction, "0 to 1")
        _require(self.processes >= 0, "data.processes", self.processes, "0 (one per core) or more")


@dataclass(frozen=True)
class LossConfig:
    """Weights and shape of the training loss."""

    feature_weight: float = 1.0  # smooth L1 on hidden states
    token_weight: float = 0.1  # soft cross-entropy on logits
    noise: float = 0.1  # half-width of the uniform noise on input features
    unroll_steps: int = 1  # draft steps trained on the head's own output
    unroll_from: float = 0.0  # share of the run after which they are; before it, one step (3x faster for 3 steps)
    step_decay: float = 0.8  # weight of step k is step_decay ** k

    def __post_init__(self) -> None:
        for name in ("feature_weight", "token_weight", "noise"):
            value = getattr(self, name)
            _require(value >= 0, f"loss.{name}", value, "0 or more")
        _require(
            self.feature_weight + self.token_weight > 0,
            "loss.token_weight",
            self.token_weight,
            "above 0 when loss.feature_weight is 0 (else there is no loss)",
        )
        _require(self.unroll_steps >= 1, "loss.unroll_steps", self.unroll_steps, "1 or more")
        _require(0 <= self.unroll_from < 1, "loss.unroll_from", self.unroll_from, "0 or more, below 1")
        _require(0 < self.step_decay <= 1, "loss.step_decay", self.step_decay, "above 0, at most 1")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule: linear warm-up, then cosine down to `min_lr_ratio * lr`."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_ratio: float = 0.03  # fraction of the whole run
    min_lr_ratio: float = 0.05
    clip_norm: float = 0.5

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optim.lr", self.lr, "a positive number")
        _require(all(0 <= beta < 1 for beta in self.betas), "optim.betas", self.betas, "two numbers in [0, 1)")
        _require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more")
        _require(0 <= self.warmup_ratio < 1, "optim.warmup_ratio", self.warmup_ratio, "a fraction in [0, 1)")
        _require(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", self.min_lr_ratio, "0 to 1")
        _require(self.clip_norm > 0, "optim.clip_norm", self.clip_norm, "a positive number")


@dataclass(frozen=True)
class TrainConfig:
    """The loop: its limit (at least one of three), batches, precision, checkpoints."""

    output_dir: str = "runs/eagle"
    max_steps: int | None = None
    epochs: float | None = None
    max_minutes: float | None = None  # wall clock; the schedule follows whichever limit is used
    tokens_per_batch: int = 4096
    grad_accumulation: int = 1
    mixed_precision: Literal["auto", "no", "bf16"] = "auto"
    log_every: int = 10  # steps
    eval_every: int = 200  # steps
    save_every: int = 200  # steps
    keep_checkpoints: int = 2
    seed: int = 0
    resume: Literal["auto", "never", "must"] = "auto"
    threads: int = 0  # CPU threads per process; 0: the cores shared among the machine's processes

    def __post_init__(self) -> None:
        limits = ("max_steps", "epochs", "max_minutes")
        if all(getattr(self, name) is None for name in limits):
            raise ValueError(
                "no training limit: train.max_steps, train.epochs and train.max_minutes are all null; "
                "expected at least one positive number, for example --set train.max_minutes=10"
            )
        for name in limits:
            value = getattr(self, name)
            _require(value is None or value > 0, f"train.{name}", value, "a positive number, or null")
        for name in (
            "tokens_per_batch",
            "grad_accumulation",
            "log_every",
            "eval_every",
            "save_every",
            "keep_checkpoints",
        ):
            value = getattr(self, name)
            _require(value >= 1, f"train.{name}", value, "1 or more")
        _require(bool(self.output_dir.strip()), "train.output_dir", self.output_dir, "a directory")
        _require(self.seed >= 0, "train.seed", self.seed, "0 or more")
        _require(self.threads >= 0, "train.threads", self.threads, "0 (all cores) or more")


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out rows during training."""

    depth: int = 5  # draft steps measured
    max_rows: int = 64

    def __post_init__(self) -> None:
        _require(self.depth >= 1, "eval.depth", self.depth, "1 or more")
        _require(self.max_rows >= 1, "eval.max_rows", self.max_rows, "1 or more")


@dataclass(frozen=True)
class RunConfig:
    """One training run. `train` has no default limit, so it must set one."""

    target: TargetConfig = field(default_factory=TargetConfig)
    head: HeadOptions = field(default_factory=HeadOptions)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


# --- dictionaries -------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")


def _type_name(hint: Any) -> str:
    """A type as a user would write it: `int or null`, `one of "auto", "no"`, `a list of 2: float, float`."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is type(None):
        return "null"
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(repr(arg) for arg in args)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return f"a list of {_type_name(args[0])}"
        return f"a list of {len(args)}: " + ", ".join(_type_name(arg) for arg in args)
    if dataclasses.is_dataclass(hint):
        return "a section (key: value pairs)"
    return {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}.get(hint, str(hint))


def _mismatch(path: str, value: object, hint: Any) -> ValueError:
    extra = ""
    if str in (hint, *get_args(hint)) and isinstance(value, (int, float)):
        extra = ' (put it in quotes to make it a string, in --set inside the value: a.b="1")'
    return ValueError(
        f"{path} is {value!r} ({type(value).__name__}), expected {_type_name(hint)}{extra}; change {path}"
    )


def _coerce(value: Any, hint: Any, path: str) -> Any:
    """`value` as the type `hint`, without guessing: only int to float, "1e-4" to float, and list to tuple."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        assert len(inner) == 1, f"{path}: only Optional unions are supported, not {hint}"
        if value is None:
            if len(inner) < len(args):
                return None
            raise _mismatch(path, value, hint)
        try:
            return _coerce(value, inner[0], path)
        except ValueError:
            if get_origin(inner[0]) is None and not dataclasses.is_dataclass(inner[0]):
                raise _mismatch(path, value, hint) from None  # so that the message says "or null"
            raise
    if origin is Literal:
        if any(value == arg and type(value) is type(arg) for arg in args):
            return value
        raise _mismatch(path, value, hint)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _mismatch(path, value, hint)
        item_hints = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(item_hints) != len(value):
            raise _mismatch(path, value, hint)
        pairs = zip(value, item_hints, strict=True)
        return tuple(_coerce(item, item_hint, f"{path}[{i}]") for i, (item, item_hint) in enumerate(pairs))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if value is None:  # "optim:" with every line under it commented out
            value = {}
        if not isinstance(value, Mapping):
            raise _mismatch(path, value, hint)
        return from_dict(hint, value, path)
    if hint is float:
        return _coerce_float(value, path)
    if hint in (int, str, bool):
        if type(value) is hint:  # exact: True is not an int here
            return value
        raise _mismatch(path, value, hint)
    raise AssertionError(f"{path}: the field type {hint} is not supported")


def _coerce_float(value: Any, path: str) -> float:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value.replace("_", ""))  # PyYAML reads 1e-4 (no dot) as a string
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _mismatch(path, value, float)
    if not abs(value) <= sys.float_info.max:  # nan, inf, or a whole number beyond both
        raise _mismatch(path, value, float)
    return float(value)


def _leaf_paths(cls: Any, prefix: str = "") -> list[str]:
    """Every dotted key under a config class, sections included."""
    found = []
    for name, hint in get_type_hints(cls).items():
        found.append(f"{prefix}{name}")
        if dataclasses.is_dataclass(hint):
            found += _leaf_paths(hint, f"{prefix}{name}.")
    return found


def _unknown_key(key: object, cls: Any, path: str) -> ValueError:
    """Error for a key that `cls` lacks, with the nearest key there, or the same key in another section."""
    prefix = f"{path}." if path else ""
    names = [f.name for f in dataclasses.fields(cls)]
    near = [prefix + name for name in difflib.get_close_matches(str(key), names, n=1, cutoff=0.6)]
    if not near:
        elsewhere = [dotted for dotted in _leaf_paths(RunConfig) if dotted.split(".")[-1] == key]
        deeper = [dotted for dotted in _leaf_paths(cls, prefix) if dotted.split(".")[-1] == key]
        near = deeper or elsewhere
    hint = f"did you mean {' or '.join(near)}?" if near else f"known here: {', '.join(names)}"
    return ValueError(f"unknown key {prefix}{key}; {hint}")


def from_dict(cls: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """Build the dataclass `cls` from nested mappings, strictly.

    `path` is the dotted prefix used in messages. Raises ValueError for an unknown key (with the nearest
    match), a wrong type, a missing required field, or a value that the dataclass itself refuses.
    """
    assert dataclasses.is_dataclass(cls), f"{cls} is not a dataclass"
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in fields:
            raise _unknown_key(key, cls, path)
        values[key] = _coerce(value, hints[key], f"{path}.{key}" if path else key)
    for name, spec in fields.items():
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ValueError(f"{path + '.' if path else ''}{name} is missing, expected {_type_name(hints[name])}")
    return cls(**values)


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain dicts, lists and scalars: what JSON and YAML can hold. Inverse of `from_dict`."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value

    result = plain(config)
    assert isinstance(result, dict), f"{config!r} is not a dataclass instance"
    return result


# --- YAML ---------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2: `no` is a string, `1e-4` a number, `010` and `1:30` strings.

    PyYAML follows YAML 1.1, where `mixed_precision: no` is false and `lr: 1e-4` a string. Repeated keys are
    errors.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise ValueError(f"line {key_node.start_mark.line + 1}: the key {key_node.value!r} is there twice")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly what `_Loader` would not read back as a string."""


_Loader.yaml_implicit_resolvers, _Dumper.yaml_implicit_resolvers = {}, {}  # drop those of YAML 1.1
for _tag, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", rf"(?=.*[.eE]){_NUMBER.pattern}", list("-+.0123456789")),
):
    for _cls in (_Loader, _Dumper):
        # \Z, not $: a value ending in a newline is not a number
        _cls.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


def parse_yaml(text: str) -> Any:
    """One YAML document as plain Python values. Raises ValueError for malformed YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from error


def dump_yaml(config: Any) -> str:
    """The whole config, defaults included, as YAML that `load_config` reads back to an equal object."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with each `dotted.key=value` set; the value is read as YAML, later ones win.

    Raises ValueError where an item has no `=`, or runs through a key that is not a section.
    """
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()}
    for item in overrides:
        dotted, equals, text = item.partition("=")
        parts = dotted.strip().split(".")
        if not equals or not all(parts):
            raise ValueError(f"override {item!r}, expected section.field=value, for example optim.lr=1e-4")
        node = result
        for i, part in enumerate(parts[:-1]):
            if node.get(part) is None:
                node[part] = {}
            if not isinstance(node[part], dict):
                raise ValueError(f"override {item!r}: {'.'.join(parts[: i + 1])} is a value, not a section")
            node = node[part]
        node[parts[-1]] = parse_yaml(text)
    return result


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `--set` overrides (`optim.lr=1e-4`), and return the checked config.

    Raises ValueError, naming the file and the dotted field, for anything that does not fit.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"config {str(path)!r} cannot be read: {error.strerror}; give a YAML file") from error
    where = f"{path} with --set {' '.join(overrides)}" if overrides else str(path)
    try:
        data = parse_yaml(text)
        data = {} if data is None else data
        if not isinstance(data, Mapping):
            raise ValueError(f"the file holds {type(data).__name__}, expected sections: {', '.join(_sections())}")
        return from_dict(RunConfig, apply_overrides(data, overrides))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _sections() -> list[str]:
    return [f.name for f in dataclasses.fields(RunConfig)]

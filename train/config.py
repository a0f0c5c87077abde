"""Training configuration: YAML over frozen, typed dataclasses.

A file holds only what differs from the defaults. Unknown keys, wrong types and values out of range are errors
that name the dotted field. `dump_yaml` and `load_config` are exact inverses, so a written `run.yaml` can be
trained again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from heads.kinds import DIVERGENCES, kind_of
from train.layouts import Layout
from train.typed_yaml import apply_overrides, from_dict, parse_yaml

T = TypeVar("T")


# What rendering a conversation sets itself: parameters of the library's `apply_chat_template`, and ours.
_NOT_FOR_TEMPLATES = frozenset(
    """conversation messages chat_template add_generation_prompt continue_final_message tokenize sanitize_control_tokens
    padding truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs
    tokenizer eos_ids eos_token_id supervise data_name counts""".split()  # noqa: SIM905
)


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    """Raise ValueError for the user unless `ok`; `name` is the dotted field to change."""
    if not ok:
        raise ValueError(f"{name} is {value!r}, expected {expected}; change {name}")


@dataclass(frozen=True)
class TargetConfig:
    """The frozen language model that the head is trained for."""

    path: str = "embedded"  # "embedded", a hub id, or a local directory
    revision: str | None = None
    adapter: str | None = None  # hub id or directory of a peft adapter (LoRA ...), merged into the weights
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # as stored, or float32 on a CPU that lacks it
    device: str = "auto"
    device_map: str | None = None  # transformers' map of a target over the devices of one process, such as "auto"
    divide: bool | None = None  # its layers among the processes (`heads.divided`); null: under fsdp2 and zero3
    trust_remote_code: bool = False
    cache_dir: str | None = None  # where the embedded target lives; null: $DRAFTSMITH_CACHE or ~/.cache/draftsmith

    def __post_init__(self) -> None:
        _require(bool(self.path.strip()), "target.path", self.path, '"embedded", a hub id or a directory')
        _require(
            self.adapter is None or bool(self.adapter.strip()), "target.adapter", self.adapter, "an adapter, or null"
        )
        _require(bool(self.device.strip()), "target.device", self.device, '"auto" or a torch device')
        _require(self.device_map is None or not self.divide, "target.device_map", self.device_map, "null with divide")


@dataclass(frozen=True)
class HeadOptions:
    """Which draft head, and which tokens it may propose. null: the kind's own default, where it has such an option."""

    kind: str = "eagle"
    draft_vocab: int | None = None  # propose only that many frequent tokens; null: the whole vocabulary
    heads: int | None = None  # Medusa, Hydra: tokens drafted side by side
    blocks: int | None = None  # Medusa, Hydra: residual blocks of each head
    projection: Literal["shared", "own"] | None = None  # the target's LM head, or own ones started from its rows
    taps: tuple[int, ...] | None = None  # EAGLE-3: target layers whose outputs are read; null: 1, n / 2 - 1, n - 4
    fc_norm: bool | None = None  # EAGLE-3: norm each of them first
    norm_output: bool | None = None  # EAGLE-3: the next draft starts from the normed output
    norm_before_residual: bool | None = None  # EAGLE-3: the residual is the normed hidden state
    init_from: str | None = None  # a trained head of the same form to start from

    def __post_init__(self) -> None:
        for name in ("draft_vocab", "heads", "blocks"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"head.{name}", value, "positive, or null")
        _require(
            self.init_from is None or bool(self.init_from.strip()), "head.init_from", self.init_from, "a directory"
        )

    def options(self) -> dict[str, Any]:
        """Those of the kind, by name."""
        return {name: getattr(self, name) for name in kind_of(self.kind).options}


@dataclass(frozen=True)
class SourceConfig:
    """One set of conversations or prompts."""

    path: str  # JSON lines, JSON, text, parquet, CSV; a directory; or a hub id
    layout: Layout = "auto"  # of its rows: see train/layouts.py
    weight: float | None = None  # its share of the mixture, relative to the others'; null for all: every row is used
    split: str = "train"  # of a directory or hub id
    subset: str | None = None  # hub id: the configuration
    revision: str | None = None  # hub id

    def __post_init__(self) -> None:
        name = "data.sources: path"
        _require(bool(self.path.strip()), name, self.path, "a file, a directory or a hub id")
        _require(self.weight is None or self.weight > 0, "data.sources: weight", self.weight, "positive, or null")
        _require(bool(self.split.strip()), "data.sources: split", self.split, "the name of a split")


@dataclass(frozen=True)
class DataConfig:
    """Conversations: read from files or the hub, or invented and answered by the target."""

    path: str | None = None  # a file, a directory or a hub id; null: data.sources, or self-synthesis
    layout: Layout = "auto"  # of path's rows: see train/layouts.py
    split: str = "train"  # of path, where it is a directory or hub id
    subset: str | None = None  # of path, where it is a hub id
    sources: tuple[SourceConfig, ...] = ()  # several sets, mixed; instead of path
    duplicates: Literal["drop", "keep"] = "drop"  # equal conversations (equal prompts, where answers are regenerated)
    exclude: tuple[str, ...] = ()  # evaluation files: what overlaps with them is not trained on, see train/overlap.py
    answers: Literal["keep", "regenerate"] = "keep"  # only with path or sources
    work_dir: str = "runs/data"
    also: tuple[str, ...] = ()  # further finished work_dirs of the same target: their rows are mixed in
    max_length: int = 768  # tokens per row; longer rows are cut
    supervise: Literal["all", "last"] = "all"  # which assistant turns of a conversation are trained on
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # for the chat template: {enable_thinking: false}
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
    endpoint: str | None = None  # URL of an OpenAI-compatible server that answers (.../v1); null: this process
    endpoint_model: str | None = None  # its name there; null: the only one that the server lists
    endpoint_concurrency: int = 32  # requests at a time
    endpoint_timeout: float = 300.0  # seconds without a byte of the answer
    endpoint_retries: int = 6  # of a request, with growing pauses
    endpoint_key_variable: str = "OPENAI_API_KEY"  # environment variable with the key, if one is needed

    def __post_init__(self) -> None:
        for name in ("max_length", "prompt_tokens", "answer_tokens", "tokens", "top_k", "batch_size"):
            value = getattr(self, name)
            _require(value > 0, f"data.{name}", value, "a positive number")
        _require(self.path is None or bool(self.path.strip()), "data.path", self.path, "a file, or null")
        _require(self.path is None or not self.sources, "data.path", self.path, "null beside data.sources")
        for name, unset in (("layout", "auto"), ("split", "train"), ("subset", None)):
            value = getattr(self, name)
            _require(
                self.path is not None or value == unset, f"data.{name}", value, f"{unset!r} when data.path is not set"
            )
        weighted = sum(source.weight is not None for source in self.sources)
        _require(
            weighted in (0, len(self.sources)),
            "data.sources",
            [source.weight for source in self.sources],
            "a weight for every source, or for none",
        )
        _require(all(path.strip() for path in self.exclude), "data.exclude", self.exclude, "files, or hub ids")
        _require(
            bool(self.inputs) or not self.exclude, "data.exclude", self.exclude, "nothing when there is no data.path"
        )
        _require(
            bool(self.inputs) or self.answers == "keep",
            "data.answers",
            self.answers,
            '"keep" when neither data.path nor data.sources is set (there are no given answers to replace)',
        )
        _require(bool(self.work_dir.strip()), "data.work_dir", self.work_dir, "a directory")
        folders = [Path(folder) for folder in (self.work_dir, *self.also)]
        _require(len(set(folders)) == len(folders), "data.also", self.also, "other directories than data.work_dir")
        _require(
            self.prompt_tokens < self.max_length,
            "data.prompt_tokens",
            self.prompt_tokens,
            f"less than data.max_length ({self.max_length}), or no answer fits in a row",
        )
        _require(self.max_rows is None or self.max_rows > 0, "data.max_rows", self.max_rows, "positive, or null")
        taken = sorted(_NOT_FOR_TEMPLATES & set(self.template_kwargs))
        _require(not taken, "data.template_kwargs", self.template_kwargs, f"other names than {', '.join(taken)}")
        _require(0 < self.held_out < 1, "data.held_out", self.held_out, "a fraction between 0 and 1")
        _require(self.seed >= 0, "data.seed", self.seed, "0 or more")
        for name in ("prompt_temperature", "answer_temperature"):
            _require(getattr(self, name) > 0, f"data.{name}", getattr(self, name), "a positive number")
        _require(0 <= self.greedy_fraction <= 1, "data.greedy_fraction", self.greedy_fraction, "0 to 1")
        _require(self.processes >= 0, "data.processes", self.processes, "0 (one per core) or more")
        if self.endpoint is not None:
            _require(_is_server(self.endpoint), "data.endpoint", _without_user(self.endpoint), _SERVER)
            regenerated = not self.inputs or self.answers == "regenerate"
            _require(regenerated, "data.answers", self.answers, '"regenerate" when data.endpoint is set')
        _require(self.endpoint_concurrency > 0, "data.endpoint_concurrency", self.endpoint_concurrency, "1 or more")
        _require(self.endpoint_timeout > 0, "data.endpoint_timeout", self.endpoint_timeout, "a positive number")
        _require(self.endpoint_retries >= 0, "data.endpoint_retries", self.endpoint_retries, "0 or more")

    @property
    def inputs(self) -> tuple[SourceConfig, ...]:
        """What is read; nothing for self-synthesis."""
        if self.path is None:
            return self.sources
        return (SourceConfig(self.path, self.layout, None, self.split, self.subset),)


_SERVER = "http(s)://HOST[:PORT]/v1, without user, query or key (a key goes into data.endpoint_key_variable)"


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises for what is no port
    except ValueError:
        return False
    plain = "@" not in parts.netloc and not parts.query and not parts.fragment
    return parts.scheme in ("http", "https") and bool(parts.hostname) and plain


def _without_user(url: str) -> str:
    """For messages: what may be a password or a key is left out."""
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://***@{tail}".partition("?")[0] if at else url.partition("?")[0]


@dataclass(frozen=True)
class LossConfig:
    """Weights and shape of the training loss. null: the kind's own default, where it has such a setting."""

    feature_weight: float | None = None  # smooth L1 on hidden states
    token_weight: float | None = None  # the divergence between target and draft
    divergence: str | None = None  # which one: see heads/divergences.py
    hard_weight: float | None = None  # share of the text's own token in what is learnt; the rest is the target's law
    noise: float | None = None  # half-width of the uniform noise on input features
    unroll_steps: int | None = None  # draft steps trained on the head's own output
    unroll_from: float | None = None  # share of the run after which they are; before it, one step (3x faster for 3)
    step_decay: float | None = None  # weight of step k is step_decay ** k

    def __post_init__(self) -> None:
        def check(name: str, ok: Callable[[Any], bool], expected: str) -> None:
            value = getattr(self, name)
            _require(value is None or ok(value), f"loss.{name}", value, expected)

        check("divergence", lambda value: value in DIVERGENCES, f"one of {', '.join(DIVERGENCES)}")
        for name in ("feature_weight", "token_weight", "noise"):
            check(name, lambda value: value >= 0, "0 or more")
        check("hard_weight", lambda value: 0 <= value <= 1, "0 to 1")
        check("unroll_steps", lambda value: value >= 1, "1 or more")
        check("unroll_from", lambda value: 0 <= value < 1, "0 or more, below 1")
        check("step_decay", lambda value: 0 < value <= 1, "above 0, at most 1")


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
    max_skipped: int = 3  # steps in a row that may be skipped because their gradient is not finite
    timeout_minutes: float = 30.0  # how long the processes wait for one of them
    trackers: tuple[str, ...] = ()  # tensorboard, wandb, mlflow, trackio ...: what accelerate logs to, besides the file
    patience: int | None = None  # stop after so many evaluations without a longer accept length
    compile: bool = False  # compile the loss (a minute at the start; needs a C++ compiler on a CPU)
    gradient_checkpointing: bool = False  # EAGLE: less memory, a third more arithmetic
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
        _require(self.patience is None or self.patience >= 1, "train.patience", self.patience, "1 or more, or null")
        _require(bool(self.output_dir.strip()), "train.output_dir", self.output_dir, "a directory")
        _require(self.max_skipped >= 0, "train.max_skipped", self.max_skipped, "0 or more")
        _require(self.timeout_minutes > 0, "train.timeout_minutes", self.timeout_minutes, "a positive number")
        _require(self.seed >= 0, "train.seed", self.seed, "0 or more")
        _require(self.threads >= 0, "train.threads", self.threads, "0 (all cores) or more")


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out rows during training."""

    depth: int = 5  # draft steps measured
    max_rows: int = 64
    check_prompts: int = 4  # decoded at the end: the real accept length must be near the simulated one; 0: no check

    def __post_init__(self) -> None:
        _require(self.depth >= 1, "eval.depth", self.depth, "1 or more")
        _require(self.max_rows >= 1, "eval.max_rows", self.max_rows, "1 or more")
        _require(self.check_prompts >= 0, "eval.check_prompts", self.check_prompts, "0 or more")


@dataclass(frozen=True)
class JointConfig:
    """Medusa-2: a LoRA in the target, trained together with the heads. Output is then not the original target's."""

    start: float | None = None  # share of the run after which both are trained; null: the target stays frozen
    lr: float = 1e-4  # of the LoRA; the heads keep optim.lr. Both follow the same schedule
    head_weight: float = 0.2  # of the heads' loss; that of the target, which keeps it near itself, counts 1
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    modules: str = "all-linear"  # or a regular expression of module names

    def __post_init__(self) -> None:
        for name in ("lr", "head_weight", "rank", "alpha"):
            value = getattr(self, name)
            _require(value > 0, f"joint.{name}", value, "a positive number")
        _require(self.start is None or 0 <= self.start < 1, "joint.start", self.start, "0 or more, below 1, or null")
        _require(0 <= self.dropout < 1, "joint.dropout", self.dropout, "0 or more, below 1")
        _require(bool(self.modules.strip()), "joint.modules", self.modules, '"all-linear" or a regular expression')


@dataclass(frozen=True)
class CacheConfig:
    """The target's features of the rows, which heads are trained on."""

    mode: Literal["disk", "online"] = "disk"  # computed once and kept in data.work_dir, or in every step
    dtype: Literal["auto", "int8"] = "auto"  # on disk, of training rows: the target's, or int8 with a scale per token
    checksums: bool = True  # read all shards found at the start and compare their SHA-256; false: sizes and headers
    prefetch: int = 2  # batches that a thread reads ahead; 0: none

    def __post_init__(self) -> None:
        _require(self.prefetch >= 0, "cache.prefetch", self.prefetch, "0 or more")
        _require(
            self.mode == "disk" or self.dtype == "auto", "cache.dtype", self.dtype, '"auto" with cache.mode: online'
        )


@dataclass(frozen=True)
class RunConfig:
    """One training run. `train` has no default limit, so it must set one."""

    target: TargetConfig = field(default_factory=TargetConfig)
    head: HeadOptions = field(default_factory=HeadOptions)
    data: DataConfig = field(default_factory=DataConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    joint: JointConfig = field(default_factory=JointConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        kind = kind_of(self.head.kind)
        fixed = ("kind", "draft_vocab", "init_from")  # every head has these
        object.__setattr__(self, "head", _with_defaults(self.head, "head", kind.options, self.head.kind, fixed))
        object.__setattr__(self, "loss", _with_defaults(self.loss, "loss", kind.loss, self.head.kind))
        _require(
            bool(self.loss.feature_weight or self.loss.token_weight),
            "loss.token_weight",
            self.loss.token_weight,
            "above 0 when no other loss is on",
        )
        _require(
            "unroll_steps" in kind.loss or not self.train.gradient_checkpointing,
            "train.gradient_checkpointing",
            self.train.gradient_checkpointing,
            f"false: heads of kind {self.head.kind!r} are not unrolled",
        )
        _require(
            self.joint.start is None or kind.joint,
            "joint.start",
            self.joint.start,
            f"null: heads of kind {self.head.kind!r} are not trained together with the target",
        )
        _require(
            self.joint.start is None or self.cache.mode == "disk",
            "cache.mode",
            self.cache.mode,
            '"disk" with joint.start: the features of the target as it was are still needed when it has changed',
        )
        _require(
            self.joint.start is None or self.target.adapter is None,
            "joint.start",
            self.joint.start,
            f"null for a target with an adapter ({self.target.adapter!r}); give the merged model as target.path",
        )


def _with_defaults(section: T, name: str, defaults: Mapping[str, Any], kind: str, fixed: Sequence[str] = ()) -> T:
    """The section with the kind's defaults; raises ValueError for a value that the kind has no use for."""
    assert dataclasses.is_dataclass(section) and not isinstance(section, type)
    given = {f.name: getattr(section, f.name) for f in dataclasses.fields(section) if f.name not in fixed}
    for key, value in given.items():
        if value is not None and key not in defaults:
            known = ", ".join(sorted(defaults)) or "none"
            raise ValueError(
                f"{name}.{key} is {value!r}, but head.kind {kind!r} has no such setting (it has: {known}); remove it"
            )
    chosen = {key: default for key, default in defaults.items() if given[key] is None}
    return dataclasses.replace(section, **chosen)


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

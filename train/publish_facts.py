"""What is known about a head that is to be published: read from disk, checked, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # in its reference, not in __all__

from heads.adapter import CONFIG as ADAPTER_CONFIG
from heads.adapter import WEIGHTS as ADAPTER_WEIGHTS
from heads.adapter import find_adapter
from heads.checkpoint import ADAPTER, CONFIG, WEIGHTS, load_head
from heads.config import HeadConfig
from heads.embedded import EMBEDDED, HUB_ID
from heads.formats.files import head_digest
from heads.formats.opening import is_native
from infer.report import MARK, SCHEMA
from train.licence import Licence, asked, of_target
from train.resume import RUN_YAML

_DATA_FILE = re.compile(r"\.(jsonl?|parquet|csv|tsv|txt|gz|zst|arrow)$", re.IGNORECASE)


@dataclass(frozen=True)
class Report:
    """An evaluation of this very head, as `infer/generate.py --eval --json` wrote it. name: of its file."""

    name: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """A head and what is told about it.

    folder: of the native head. repo: where it goes, "namespace/name". base_model: the target's hub id.
    adapter: directory with the peft adapter that the target carries; None: it carries none.
    provenance, run: of its training; empty where the head has none. parameters: trained numbers.
    """

    folder: Path
    config: HeadConfig
    repo: str
    base_model: str
    licence: Licence
    parameters: int
    dtype: str
    provenance: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    reports: tuple[Report, ...] = ()
    adapter: Path | None = None

    @property
    def name(self) -> str:
        """Of the repository, without its namespace."""
        return self.repo.partition("/")[2]

    @property
    def revision(self) -> str | None:
        """Of the base model, where the head was trained on it under that very id."""
        return self.config.target_revision if self.config.target == self.base_model else None

    def renamed(self, value: Any) -> Any:
        """JSON-like data with the target and its adapter called as in the repository, not as on this machine."""
        target, adapter = self.config.target, self.config.target_adapter
        if isinstance(value, dict):
            return {key: self.renamed(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.renamed(inner) for inner in value]
        if not isinstance(value, str):
            return value
        if value == adapter:
            return ADAPTER
        if "/" not in target:  # "embedded" is a word, too
            return self.base_model if value == target else value
        whole = rf"(?<![\w./\\-]){re.escape(target)}(?![\w./\\-])"  # not a part of another path
        return re.sub(whole, lambda _: self.base_model, value)

    @property
    def drafts(self) -> int:
        """How many tokens an engine should draft in a chain: as many as there are heads, or were unrolled; 3 to 5."""
        unrolled = (self.run.get("loss") or {}).get("unroll_steps") or 3
        return self.config.num_draft_heads or min(max(int(unrolled), 3), 5)


@dataclass(frozen=True)
class Asked:
    """What the user gave. reports: further evaluations than those beside the head."""

    head: str
    repo: str
    base_model: str | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    reports: Sequence[str] = ()


def read_facts(asked_for: Asked) -> Facts:
    """Reads and checks everything that a card needs.

    Raises:
        ValueError: what is missing, damaged or does not belong to this head, and the option to give.
    """
    check_repo(asked_for.repo)
    folder = _head_folder(asked_for.head)
    head = load_head(folder)  # strict: names, shapes, a truncated file
    state = head.state_dict()
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"--head: {folder / WEIGHTS} holds values in {name} that are not finite")
    config = head.config
    base_model = _base_model(asked_for.base_model, config)
    if asked_for.license is not None:
        licence: Licence | None = asked(asked_for.license, asked_for.license_name, asked_for.license_link)
    elif asked_for.license_name or asked_for.license_link:
        raise ValueError("--license-name and --license-link need --license other")
    else:
        licence = of_target(config.target, base_model, config.target_revision)
    if licence is None:
        raise ValueError(
            f"the licence of {base_model} is not known here: give --license ID, or put its card where it is looked for "
            f"(hf download {base_model} README.md)"
        )
    provenance = _object(folder / "provenance.json")
    facts = Facts(
        folder=folder,
        config=config,
        repo=asked_for.repo,
        base_model=base_model,
        licence=licence,
        parameters=sum(p.numel() for p in head.parameters()),
        dtype=str(next(p.dtype for p in head.parameters())).removeprefix("torch."),
        adapter=_adapter(folder, config, provenance),
    )
    return replace(
        facts,
        provenance=facts.renamed(provenance),
        run=facts.renamed(_run(folder / RUN_YAML)),
        reports=tuple(Report(r.name, facts.renamed(r.data)) for r in _reports(folder, asked_for.reports)),
    )


def check_repo(repo: str) -> None:
    """Raises ValueError unless it is "namespace/name" as the hub takes it."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ValueError(f"--repo is {repo!r}: {error}") from error
    if repo.count("/") != 1:
        raise ValueError(f"--repo is {repo!r}, expected namespace/name: your account or organisation, and a name")


def naming_advice(repo: str, kind: str) -> str | None:
    """What engines would take the head for by its name alone; None: they are right, or do not guess.

    vLLM looks for "eagle-", then "eagle3", then others in the path of a draft model, and guesses the method from them.
    """
    name = repo.lower()
    guess = next((g for part, g in (("eagle-", "eagle"), ("eagle3", "eagle3")) if part in name), None)
    guess = guess or next((part for part in ("dflash", "dspark") if part in name), None)
    wanted = kind if kind in ("eagle", "eagle3") else None
    if guess == wanted:
        return None
    if guess is not None:
        return f"--repo {repo}: vLLM takes a draft model of that name for {guess}; this head is {kind}: choose another"
    part = {"eagle": "eagle-", "eagle3": "eagle3"}[kind]
    return f'--repo {repo}: with "{part}" in its name, vLLM would know the method without being told'


def _head_folder(given: str) -> Path:
    """The head, or the best one of a training run's directory."""
    for folder in (Path(given), Path(given) / "best"):
        if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file():
            if not is_native(folder):
                raise ValueError(f"--head: {folder} is not in the layout that training writes, which publish.py takes")
            return folder
    raise ValueError(f"--head: {given} holds no head ({CONFIG} and {WEIGHTS}), nor does its best/")


def is_hub_id(name: str) -> bool:
    """Whether it can only be meant as a repository of the hub: namespace/name, and no such file or directory here."""
    if name.count("/") != 1 or _DATA_FILE.search(name) or Path(name).expanduser().exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _base_model(given: str | None, config: HeadConfig) -> str:
    if given is not None:
        if given.count("/") != 1 or not is_hub_id(given):
            raise ValueError(f"--base-model is {given!r}, expected the target's id on the hub: namespace/name")
        return given
    if config.target == EMBEDDED:
        return HUB_ID
    if is_hub_id(config.target):
        return config.target
    raise ValueError(
        f"the head was trained for {config.target!r}, which is no id of the hub: give --base-model namespace/name, so "
        "that others find the target"
    )


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}, expected a JSON object")
    return found


def _run(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    return found if isinstance(found, dict) else {}


def _reports(folder: Path, given: Sequence[str]) -> Iterator[Report]:
    """The evaluations of this head: those given, and what lies beside it, its run and its run's directory.

    Raises:
        ValueError: one that was given is no report, or of other weights.
    """
    mine = head_digest(folder)
    seen = set()
    for name in given:
        data = _object(Path(name)) if Path(name).is_file() else {}
        if data.get(MARK) != SCHEMA:
            raise ValueError(
                f"--report: {name} is no report that infer/generate.py --eval --json of this version wrote"
            )
        made_with = data["meta"].get("head_sha256")
        if made_with != mine:
            raise ValueError(f"--report: {name} is of another head (sha256 {made_with}), {folder} has {mine}")
        seen.add(Path(name).resolve())
        yield Report(Path(name).name, data)
    absolute = folder.resolve()
    places = [absolute, absolute.parent, *([absolute.parent.parent] if absolute.name == "best" else [])]
    for path in sorted({file for place in places for file in place.glob("*.json")} - seen):
        data = _found(path)
        if data.get(MARK) == SCHEMA and data["meta"].get("head_sha256") == mine:
            yield Report(path.name, data)


def _found(path: Path) -> dict[str, Any]:
    """Of a file that nobody named: what cannot be read is not ours."""
    try:
        return _object(path)
    except (ValueError, OSError):
        return {}


def _adapter(folder: Path, config: HeadConfig, provenance: dict[str, Any]) -> Path | None:
    """The directory of the target's adapter, which must be the one that the head was trained for."""
    name = config.target_adapter
    if name is None:
        return None
    place = next((path for path in (folder / name, Path(name)) if (path / ADAPTER_CONFIG).is_file()), None)
    if place is None:
        cached = try_to_load_from_cache(name, ADAPTER_CONFIG) if is_hub_id(name) else None
        place = Path(cached).parent if isinstance(cached, str) else None
    if place is None or not (place / ADAPTER_WEIGHTS).is_file():
        raise ValueError(
            f"the head was trained for a target with the adapter {name!r}, which must be published with it but is not "
            f"here ({ADAPTER_CONFIG}, {ADAPTER_WEIGHTS}); put it in that directory, or into the hub's cache: "
            f"hf download {name}"
        )
    # Trained together, it is no adapter that was there before.
    known = None if config.trained_with_target else provenance.get("target_adapter_sha256")
    digest = find_adapter(str(place)).sha256
    if known is not None and known != digest:
        raise ValueError(
            f"the adapter in {place} is not the one that the head was trained for: sha256 {digest}, expected {known}"
        )
    return place

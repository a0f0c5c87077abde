"""Config: strict reading, messages that name the field, exact round trip."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from train.config import (
    DataConfig,
    OptimConfig,
    RunConfig,
    SourceConfig,
    TargetConfig,
    TrainConfig,
    load_config,
)
from train.typed_yaml import dump_yaml, from_dict, parse_yaml, to_dict


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_and_sections(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "train:\n  max_steps: 5\noptim:\n"))
    assert config == RunConfig(train=TrainConfig(max_steps=5))
    assert config.data.tokens == 400_000 and config.optim.betas == (0.9, 0.95)


def test_numbers_and_words_that_pyyaml_misreads(tmp_path: Path) -> None:
    text = "optim: {lr: 1e-4, clip_norm: 1}\ntrain: {max_steps: 1_000, mixed_precision: no}\n"
    config = load_config(write(tmp_path, text))
    assert config.optim.lr == 1e-4
    assert type(config.optim.clip_norm) is float
    assert config.train.max_steps == 1000
    assert config.train.mixed_precision == "no"
    # from_dict alone also takes what plain PyYAML gives for 1e-4
    assert from_dict(OptimConfig, yaml.safe_load("lr: 1e-4")).lr == 1e-4


def test_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {max_steps: 5}\ndata: {max_rows: 3}\n")
    overrides = [
        "optim.lr=1e-4",
        "optim.betas=[0.8, 0.9]",
        "data.max_rows=null",
        "target.path=a/b=c",
        "optim.lr=2e-4",
    ]
    config = load_config(path, overrides)
    assert config.optim.lr == 2e-4
    assert config.optim.betas == (0.8, 0.9)
    assert config.data.max_rows is None
    assert config.target.path == "a/b=c"
    assert load_config(path, ['target.revision="123"']).target.revision == "123"


def test_free_form_sections(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {max_steps: 5}\ndata:\n  template_kwargs:\n    a: [1, {b: null}]\n    c: 1.5\n")
    config = load_config(path, ["data.template_kwargs.enable_thinking=false"])
    expected = {"a": [1, {"b": None}], "c": 1.5, "enable_thinking": False}
    assert config.data.template_kwargs == expected
    assert load_config(write(tmp_path, dump_yaml(config))) == config
    assert load_config(path, ["data.template_kwargs={d: no}"]).data.template_kwargs == {"d": "no"}
    assert load_config(path, ["data.template_kwargs=null"]).data.template_kwargs == {}


def test_what_rendering_sets_itself_is_not_for_the_template() -> None:
    parameters = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    for name in parameters - {"self", "kwargs", "tools", "documents"}:
        with pytest.raises(ValueError, match=rf"data\.template_kwargs is .* expected other names than {name}"):
            DataConfig(template_kwargs={name: 1})
    assert DataConfig(template_kwargs={"tools": [], "enable_thinking": False})


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optim.lrr=1", ["unknown key optim.lrr", "did you mean optim.lr?"]),
        ("optimm.lr=1", ["unknown key optimm", "did you mean optim?"]),
        ("lr=1", ["unknown key lr", "did you mean joint.lr or optim.lr?"]),
        ("max_length=1", ["unknown key max_length", "did you mean data.max_length?"]),
        ("data.zzz=1", ["unknown key data.zzz", "known here: path"]),
        ("optim.lr=fast", ["optim.lr is 'fast' (str)", "expected a number", "change optim.lr"]),
        ("optim.lr=true", ["optim.lr is True (bool)", "expected a number"]),
        ("optim.lr=.inf", ["optim.lr is '.inf'", "expected a number"]),
        ("optim.lr=0", ["optim.lr is 0.0", "positive"]),
        ("optim=3", ["optim is 3", "expected a section"]),
        ("optim.lr.x=3", ["optim.lr is a value, not a section"]),
        ("optim.lr", ["'optim.lr'", "expected section.field=value"]),
        ("optim.betas=[0.9]", ["optim.betas is [0.9]", "a list of 2"]),
        ("optim.betas=[0.9, x]", ["optim.betas[1] is 'x'"]),
        ("optim.betas=[0.9, 1.0]", ["optim.betas is (0.9, 1.0)", "[0, 1)"]),
        ("train.max_steps=1.5", ["train.max_steps is 1.5", "a whole number or null"]),
        ("train.max_steps=true", ["train.max_steps is True"]),
        ("train.max_steps=0", ["train.max_steps is 0", "positive number, or null"]),
        ("train.mixed_precision=fp16", ["train.mixed_precision is 'fp16'", "'auto', 'no', 'bf16'"]),
        ("target.trust_remote_code=yes", ["target.trust_remote_code is 'yes'", "true or false"]),
        ("target.adapter=' '", ["target.adapter is ' '", "an adapter, or null"]),
        ("target.revision=1234567", ["target.revision is 1234567", "a string or null", "quotes"]),
        ("data.held_out=1", ["data.held_out is 1.0", "fraction"]),
        ("data.prompt_tokens=768", ["data.prompt_tokens is 768", "data.max_length (768)"]),
        ("data.supervise=first", ["data.supervise is 'first'", "'all', 'last'"]),
        ("data.template_kwargs=3", ["data.template_kwargs is 3", "expected a section"]),
        ("data.template_kwargs={1: 2}", ["data.template_kwargs has the key 1", "strings"]),
        ("data.template_kwargs={padding: true}", ["other names than padding"]),
        ("data.answers=regenerate", ["data.answers is 'regenerate'", "data.path"]),
        ("data={path: x, layout: chat}", ["data.layout is 'chat'", "'sharegpt'"]),
        ("data.layout=turns", ["data.layout is 'turns'", "'auto' when data.path is not set"]),
        ("data={path: x, sources: [{path: a}]}", ["data.path is 'x'", "null beside data.sources"]),
        ("data.sources=[{pth: a}]", ["unknown key data.sources[0].pth", "did you mean data.sources[0].path?"]),
        ("data.sources=[{path: a, weight: 0}]", ["data.sources: weight is 0.0", "positive, or null"]),
        (
            "data.sources=[{path: a, weight: 1}, {path: b}]",
            ["data.sources is [1.0, None]", "a weight for every source"],
        ),
        ("data.exclude=[x]", ["data.exclude is ('x',)", "no data.path"]),
        ("loss={feature_weight: 0, token_weight: 0}", ["loss.token_weight is 0.0", "no other loss"]),
        ("loss.hard_weight=0.5", ["loss.hard_weight is 0.5", "'eagle' has no such setting", "token_weight"]),
        ("head.blocks=2", ["head.blocks is 2", "'eagle' has no such setting"]),
        ("head.kind=eagel", ["head.kind is 'eagel'", "eagle, eagle3, hydra, medusa"]),
        ("joint.start=0.5", ["joint.start is 0.5", "'eagle' are not trained together"]),
        ("joint.rank=0", ["joint.rank is 0", "positive"]),
        ("optim.lr={", ["not valid YAML"]),
    ],
)
def test_errors_name_the_field(tmp_path: Path, override: str, parts: list[str]) -> None:
    path = write(tmp_path, "train: {max_steps: 5}\noptim: {lr: 0.1}\n")
    with pytest.raises(ValueError) as caught:
        load_config(path, [override])
    for part in [*parts, "c.yaml"]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "train.max_steps, train.epochs and train.max_minutes"),
        ("- 1\n", "holds list"),
        ("optim: {lr: 1, lr: 2}\n", "twice"),
        ("optim:\n  lr: 1\n lr: [", "not valid YAML"),
        ("3: 4\n", "unknown key 3"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        load_config(write(tmp_path, text))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.yaml' cannot be read"):
        load_config(tmp_path / "none.yaml")


@dataclasses.dataclass(frozen=True)
class Inner:
    need: int
    layers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner | None = None


def test_from_dict_on_other_dataclasses() -> None:
    assert from_dict(Outer, {"inner": {"need": 1, "layers": [1, 2, 3]}}) == Outer(Inner(1, (1, 2, 3)))
    assert from_dict(Outer, {"inner": None}) == Outer()
    with pytest.raises(ValueError, match=r"inner\.need is missing, expected a whole number"):
        from_dict(Outer, {"inner": {}})
    with pytest.raises(ValueError, match=r"unknown key inner\.layer; did you mean inner\.layers\?"):
        from_dict(Outer, {"inner": {"need": 1, "layer": []}})


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OptimConfig().lr = 1.0  # type: ignore[misc]


words = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: bool(text.strip())),
    st.sampled_from(
        ["1e-4", "no", "null", "~", "010", "1:30", "true", "12", ".5", "2020-01-01", "<<", "=", "a: b", "1\n"]
    ),
)


@settings(deadline=None)  # a busy machine is no error
@example(path="k\x85~\u2028 x\u2029", lr=1.0, beta=0.0, minutes=None, seed=0)
@given(
    path=words,
    lr=st.floats(min_value=1e-300, max_value=1e300),
    beta=st.floats(min_value=0, max_value=0.99),
    minutes=st.none() | st.floats(min_value=1e-9, max_value=1e9),
    seed=st.integers(min_value=0),
)
def test_round_trip_is_exact(path: str, lr: float, beta: float, minutes: float | None, seed: int) -> None:
    config = RunConfig(
        target=TargetConfig(path=path),
        data=DataConfig(
            sources=(SourceConfig(path, weight=lr),),
            answers="regenerate",
            seed=seed,
            template_kwargs={path: [lr, {path: minutes}]},
        ),
        optim=OptimConfig(lr=lr, betas=(beta, 0.5)),
        train=TrainConfig(max_steps=3, max_minutes=minutes, mixed_precision="no"),
    )
    data: dict[str, Any] = parse_yaml(dump_yaml(config))
    assert data == to_dict(config)
    assert from_dict(RunConfig, data) == config
    assert dump_yaml(from_dict(RunConfig, data)) == dump_yaml(config)

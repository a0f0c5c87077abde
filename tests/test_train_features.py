"""Features on their way into training: read ahead, from disk, in int8 or computed in every step; the commands."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.feature_cache import main as feature_cache
from tests.tiny_run import make_place, metrics_of, run_config, run_entry, same_weights
from train.config import RunConfig
from train.eagle import main
from train.features import Features, read_ahead
from train.typed_yaml import from_dict

# ---- reading ahead -------------------------------------------------------------------------------------------


class _Counted(Features):
    """Row i is a tensor of i; reading row 9 fails."""

    def __init__(self) -> None:
        self.reads: list[list[int]] = []

    def read(self, indices: Sequence[int]) -> list[Tensor]:
        self.reads.append(list(indices))
        if 9 in indices:
            raise ValueError("row 9")
        return [torch.tensor(float(i)) for i in indices]

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_read_ahead(depth: int) -> None:
    features = _Counted()
    taken: list[int] = []

    def batches() -> Iterator[tuple[float, list[int]]]:
        for i in range(8):
            taken.append(i)
            yield i / 8, [i, 7 - i]

    stream = read_ahead(batches(), features, depth)
    for i, one in enumerate(stream):
        assert (one.epochs, one.indices, [float(f) for f in one.features]) == (i / 8, [i, 7 - i], [i, 7 - i])
        assert len(taken) <= min(8, i + 1 + depth)
    assert i == 7 and features.reads == [[i, 7 - i] for i in range(8)]


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_in_reading_ahead_is_raised_where_the_batch_is_used(depth: int) -> None:
    stream = read_ahead(((0.0, [i]) for i in range(10)), _Counted(), depth)
    assert [next(stream).indices[0] for _ in range(9)] == list(range(9))
    with pytest.raises(ValueError, match="row 9"):
        next(stream)


def test_the_thread_ends_with_the_loop() -> None:
    stream = read_ahead(((0.0, [1]) for _ in iter(int, 1)), _Counted(), 2)
    next(stream)
    assert any(thread.name.startswith("features") for thread in threading.enumerate())
    stream.close()  # type: ignore[attr-defined]
    assert not any(thread.name.startswith("features") for thread in threading.enumerate())


# ---- from disk, in int8, online ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("tiny"))


def config_of(place: Path, out: Path, data: Path | None = None, **cache: Any) -> dict[str, Any]:
    """Of an EAGLE-3 head, which reads other layers than the last."""
    config = run_config(place, out, max_steps=6, eval_every=3)
    config["data"]["work_dir"] = str((data or out) / "data")
    return config | {"head": {"kind": "eagle3"}, "loss": {"unroll_steps": 2}, "cache": cache}


@pytest.fixture(scope="module", name="trained")
def make_trained(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from a cache on disk."""
    out = tmp_path_factory.mktemp("disk")
    assert run_entry(main, config_of(place, out), out) == 0
    return out


def caches(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "data").glob("features*"))


def test_online_gives_the_loss_of_the_cache(place: Path, trained: Path, tmp_path: Path) -> None:
    """Of every step and evaluation; only rounding differs, since other rows share the passes. Nothing is written."""
    assert len(caches(trained)) == 2
    assert run_entry(main, config_of(place, tmp_path, mode="online"), tmp_path) == 0
    assert caches(tmp_path) == []
    assert same_weights(trained, tmp_path, 6, tolerance=2e-3)  # Adam amplifies rounding where a gradient is tiny
    disk, online = metrics_of(trained), metrics_of(tmp_path)
    for name in ("loss", "eval/accept_length", "eval/token_loss"):
        values = [[line[name] for line in lines if name in line] for lines in (disk, online)]
        assert len(values[0]) >= 2 and values[0] == pytest.approx(values[1], rel=1e-4)


def test_reading_ahead_changes_nothing(place: Path, trained: Path, tmp_path: Path) -> None:
    assert run_entry(main, config_of(place, tmp_path, trained, prefetch=0), tmp_path) == 0
    assert same_weights(trained, tmp_path, 6)


def test_int8_is_for_training_rows(place: Path, trained: Path, tmp_path: Path) -> None:
    """Nearly the same loss; held-out rows stay as they are, in the cache that is there."""
    before = caches(trained)
    assert run_entry(main, config_of(place, tmp_path, trained, dtype="int8"), tmp_path) == 0
    [new] = set(caches(trained)) - set(before)
    assert new.startswith("features_train") and new.endswith("_int8")
    sizes = [sum(p.stat().st_size for p in (trained / "data" / name).glob("shard*")) for name in (new, new[:-5])]
    assert sizes[0] < 0.3 * sizes[1]
    losses = [[line["loss"] for line in metrics_of(out) if "loss" in line] for out in (trained, tmp_path)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0] != losses[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cache": {"mode": "online", "dtype": "int8"}}, r"cache\.dtype is 'int8', expected \"auto\""),
        ({"cache": {"prefetch": -1}}, r"cache\.prefetch is -1"),
        (
            {"cache": {"mode": "online"}, "joint": {"start": 0.5}, "head": {"kind": "medusa"}},
            r"cache\.mode is 'online'",
        ),
        ({"cache": {"dtype": "int4"}}, r"cache\.dtype is 'int4'"),
    ],
)
def test_settings_that_do_not_fit(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_dict(RunConfig, {"train": {"max_steps": 1}, **change})


# ---- the commands --------------------------------------------------------------------------------------------


def command(config: dict[str, Any], out: Path, name: str, *extra: str) -> int:
    return run_entry(lambda argv: feature_cache([name, *argv]), config, out, *extra)


def test_build_verify_and_train(place: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Built by the command as training builds it; damage is found by verify, and mended by either."""
    config = config_of(place, tmp_path)
    assert command(config, tmp_path, "verify") == 1
    assert "is not the manifest of a feature cache" in capsys.readouterr().err
    assert command(config, tmp_path, "build") == 0
    for name in caches(trained):
        if not name.endswith("_int8"):
            for path in (trained / "data" / name).iterdir():
                assert (tmp_path / "data" / name / path.name).read_bytes() == path.read_bytes()
    capsys.readouterr()
    assert command(config, tmp_path, "verify", "--rows", "3") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [found["rows"] for found in summary.values()] == [3, 3] and len(summary) == len(caches(tmp_path))
    folder = next(folder for folder in (tmp_path / "data").glob("features_train*"))
    shard = folder / "shard-00000.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    assert command(config, tmp_path, "verify") == 1
    assert "1 of 1 shards" in (said := capsys.readouterr().err) and "shard-00000.safetensors (SHA-256" in said
    assert run_entry(main, config, tmp_path) == 0
    assert f"{shard} is damaged" in capsys.readouterr().out and shard.read_bytes() == whole
    assert same_weights(trained, tmp_path, 6)


def test_another_template_is_told(
    place: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows were made by one template; features of rows of another are not for this head."""
    for path in (place / "target").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    (place / "target/chat_template.jinja").rename(tmp_path / "kept")
    template.rename(place / "target/chat_template.jinja")
    try:
        assert command(config_of(place, tmp_path, trained), tmp_path, "build") == 1
    finally:
        (tmp_path / "kept").rename(place / "target/chat_template.jinja")
    assert "data.work_dir" in (said := capsys.readouterr().err) and "template" in said


def test_what_int8_costs(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert feature_cache(["int8", "--head", str(trained / "run/best"), "--limit", "4"]) == 0
    said = capsys.readouterr().out.splitlines()
    found = json.loads(said[-1])
    assert said[0].startswith("4 held-out rows") and set(found["accept_length"]) == {"as computed", "int8"}
    assert found["bytes_per_token"] == {"as computed": 4 * 64 * 4, "int8": 4 * 64 + 4 * 4}
    assert abs(found["lost"]) < 0.2 and 0 < found["teacher"]["kl"] < 0.1
    assert feature_cache(["int8", "--head", str(trained / "nowhere")]) == 1
    assert "holds no run.yaml" in capsys.readouterr().err

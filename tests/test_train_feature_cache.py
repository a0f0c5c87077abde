"""The feature cache: what is in it, killed writers, damaged files, wrong manifests, disk and memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.target import TargetAdapter
from tests.cache_writer import WIDE_ROWS, make_rows
from tests.tiny import tiny_model, tiny_target, tiny_tokenizer
from train import feature_cache, shards
from train.conversations import TokenRow
from train.feature_cache import FeatureCache, build_feature_cache, feature_batches
from train.feature_check import verify_feature_cache
from train.features import FeatureSource, OnlineFeatures
from train.files import remove_leftovers, temporary
from train.shards import Form

ROWS = make_rows(40)
TAPS = (0, 1)


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "_SHARD_TOKENS", 300)


@pytest.fixture(scope="module", name="source")
def make_source() -> FeatureSource:
    target = tiny_target("llama")
    target.tap(TAPS)
    return FeatureSource(target, TAPS, tiny_tokenizer())


def build(source: FeatureSource, folder: Path, said: list[str] | None = None, **options: Any) -> FeatureCache:
    log = (lambda text: None) if said is None else said.append
    return build_feature_cache(source, options.pop("rows", ROWS), folder, log=log, **options)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


# ---- what is in it -------------------------------------------------------------------------------------------


def test_rows_are_what_the_library_computes(source: FeatureSource, tmp_path: Path) -> None:
    """Exactly the columns asked for, row by row, over several shards, and after opening it again."""
    said: list[str] = []
    cache = build(source, tmp_path, said)
    shards_there = sorted(path.name for path in tmp_path.glob("shard-*"))
    assert len(shards_there) >= 4 and len(cache) == len(ROWS)
    model = tiny_model("llama")
    for cached in (cache, build(source, tmp_path)):
        for i, row in enumerate(ROWS):
            hidden = model(torch.tensor([row.input_ids]), output_hidden_states=True).hidden_states
            want = torch.cat([hidden[-1][0], *(hidden[k + 1][0] for k in TAPS)], -1)
            torch.testing.assert_close(cached[i], want, atol=2e-4, rtol=1e-4)
    tokens = sum(len(row.input_ids) for row in ROWS)
    assert f"{len(shards_there)} of {len(shards_there)} shards to write to {tmp_path}: {tokens} tokens" in said[0]
    assert "tokens/s, left" in said[1]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [entry["file"] for entry in manifest["shards"]] == shards_there
    assert all(entry["sha256"] == digests(tmp_path)[entry["file"]] for entry in manifest["shards"])
    assert sum(entry["tokens"] for entry in manifest["shards"]) == tokens
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", *shards_there]


def test_random_access_and_the_same_online(source: FeatureSource, tmp_path: Path) -> None:
    cache, online = build(source, tmp_path), OnlineFeatures(source, ROWS)
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(1)).tolist()
    for stored, computed, index in zip(cache.read(order), online.read(order), order, strict=True):
        assert stored.shape == (len(ROWS[index].input_ids), 3 * 64)
        torch.testing.assert_close(stored, computed, atol=2e-4, rtol=1e-4)  # other rows share the pass
    assert len(online) == len(cache)


def test_rows_share_passes_as_told(source: FeatureSource, tmp_path: Path) -> None:
    """`feature_batches` names the company in which a row's features come out the same to the bit."""
    cache = build(source, tmp_path)
    batches = feature_batches(ROWS)
    assert sorted(i for batch in batches for i in batch) == list(range(len(ROWS)))
    for batch in batches:
        for index, fresh in zip(batch, source.compute([ROWS[i] for i in batch]), strict=True):
            assert torch.equal(cache[index], fresh)


def test_an_int8_cache_reads_what_was_rounded(source: FeatureSource, tmp_path: Path) -> None:
    exact, coarse = build(source, tmp_path / "exact"), build(source, tmp_path / "coarse", stored="int8")
    form = Form(source.widths, torch.float32, int8=True)
    for i in range(len(ROWS)):
        assert torch.equal(coarse[i], form.decode(form.encode(exact[i]))) and not torch.equal(coarse[i], exact[i])
    sizes = [sum(p.stat().st_size for p in (tmp_path / name).glob("shard-*")) for name in ("exact", "coarse")]
    assert sizes[1] < 0.3 * sizes[0]
    with pytest.raises(ValueError, match="stored: there 'int8, a float32 scale per token and column'"):
        build(source, tmp_path / "coarse")


# ---- killed writers ------------------------------------------------------------------------------------------


class Killed(BaseException):
    """As a kill: nothing of ours catches it."""


@pytest.fixture(scope="module", name="whole")
def make_whole(source: FeatureSource, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of an undisturbed cache."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feature_cache, "_SHARD_TOKENS", 300)
        build(source, folder)
    return digests(folder)


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_every_rename(
    source: FeatureSource, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    real, renames = os.replace, 2 * (len(whole) - 1) + 2  # record and shard; manifest at first and at last
    for place in range(renames + 1):
        calls = iter(range(renames + 1))

        def dies(source: Any, target: Any, place: int = place, calls: Iterator[int] = calls) -> None:
            last = next(calls) == place
            if last and not after:
                raise Killed
            real(source, target)
            if last:
                raise Killed

        folder = tmp_path / str(place)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dies)
            if place == renames:
                build(source, folder)  # no rename but these
            else:
                with pytest.raises(Killed):
                    build(source, folder)
        build(source, folder)
        assert digests(folder) == whole


def test_killed_in_the_middle_of_a_file(
    source: FeatureSource, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(parts: dict[str, Tensor], path: Path) -> None:
        save_file(parts, path)
        os.truncate(path, path.stat().st_size // 2)
        raise Killed

    build(source, tmp_path, rows=ROWS)
    (tmp_path / "shard-00002.safetensors").unlink()
    monkeypatch.setattr(shards, "save_file", dies)
    with pytest.raises(Killed):
        build(source, tmp_path)
    assert len(list(tmp_path.glob("*.tmp-*"))) == 1
    monkeypatch.setattr(shards, "save_file", save_file)
    said: list[str] = []
    build(source, tmp_path, said)
    assert "1 of" in said[0] and digests(tmp_path) == whole


@pytest.fixture(scope="module", name="writer")
def make_writer() -> Iterator[Callable[..., tuple[list[int], Callable[[], list[int]]]]]:
    """Gives commands to the process of `tests/cache_writer.py`; returns process ids, and what waits for exit codes."""
    path = Path(__file__).with_name("cache_writer.py")
    process = subprocess.Popen([sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    to, back = process.stdin, process.stdout

    def ask(*words: object) -> list[int]:
        print(*words, file=to, flush=True)
        return [int(word) for word in back.readline().split()]

    def command(*words: object) -> tuple[list[int], Callable[[], list[int]]]:
        return ask(*words), lambda: ask("wait")

    yield command
    to.close()
    assert process.wait(60) == 0


def test_kill_9(writer: Any, tmp_path: Path) -> None:
    """Real processes, killed at random moments of writing, then left alone; and several that share the work."""
    whole, cut, shared = (tmp_path / name for name in ("whole", "cut", "shared"))
    _, wait = writer("build", whole)
    started = time.perf_counter()
    assert wait() == [0]
    seconds = time.perf_counter() - started
    assert len(list(whole.glob("shard-*"))) >= 5
    generator = torch.Generator().manual_seed(int(time.time()))
    kills = 0
    for round_of_kills in range(12):
        if round_of_kills >= 3 and kills:
            break
        folder = cut / str(round_of_kills)
        folder.mkdir(parents=True)
        killed = 0
        while killed < 4:
            [child], wait = writer("build", folder)
            time.sleep(seconds * float(torch.rand((), generator=generator)) * 0.5)
            os.kill(child, signal.SIGKILL)
            if wait() == [0]:
                seconds *= 0.7  # a rerun has less and less to do, and the first one may have been timed too long
                break
            killed += 1
        _, wait = writer("build", folder)
        assert wait() == [0]
        assert digests(folder) == digests(whole)
        kills += killed
    assert kills
    children, wait = writer("build", shared, 3)
    assert len(children) == 3 and wait() == [0, 0, 0]
    assert digests(shared) == digests(whole)


def test_memory_does_not_grow_with_the_set(writer: Any, tmp_path: Path) -> None:
    """Of 160 MiB, written and read in random order."""
    _, wait = writer("memory", tmp_path)
    assert wait() == [0]
    assert sum(path.stat().st_size for path in (tmp_path / str(WIDE_ROWS)).iterdir()) > WIDE_ROWS << 20
    assert float((tmp_path / "grown").read_text()) < 24  # a few shards of 4 MiB


def test_leftovers_of_the_living_stay(tmp_path: Path) -> None:
    mine = temporary(tmp_path / "x")
    host = mine.name.rpartition("-")[0]
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone, living, elsewhere, old = f"{host}-{dead.pid}", f"{host}-{os.getppid()}", "x.tmp-far-away-1", "x.tmp-away-2"
    for name in (mine.name, gone, living, elsewhere, old, "x"):
        (tmp_path / name).write_text("")
    os.utime(tmp_path / old, (0, 0))
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(["x", living, elsewhere])


# ---- damaged files -------------------------------------------------------------------------------------------

DAMAGES = {
    "a byte of the values": lambda data: data[:-50] + bytes([data[-50] ^ 1]) + data[-49:],
    "a byte of the header": lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
    "a byte of its length": lambda data: data[:1] + bytes([data[1] ^ 64]) + data[2:],
    "the length": lambda data: bytes([255] * 8) + data[8:],
    "cut": lambda data: data[:-1024],
    "nearly all cut": lambda data: data[:5],
    "longer": lambda data: data + b"x",
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shards_are_named_and_made_anew(
    source: FeatureSource, whole: dict[str, str], tmp_path: Path, damage: str
) -> None:
    build(source, tmp_path)
    for number in (1, 3):
        path = tmp_path / f"shard-{number:05d}.safetensors"
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(ValueError, match=r"2 of \d+ shards .* shard-00001\.safetensors .*shard-00003\.safetensors"):
        verify_feature_cache(source, ROWS, tmp_path, log=lambda text: None)
    said: list[str] = []
    build(source, tmp_path, said)
    named = [line for line in said if "is damaged" in line]
    assert [re.findall(r"shard-\d+", line) for line in named] == [["shard-00001"], ["shard-00003"]]
    assert digests(tmp_path) == whole
    said.clear()
    build(source, tmp_path, said)
    assert said == []


def test_without_checksums_sizes_and_headers_are_looked_at(
    source: FeatureSource, whole: dict[str, str], tmp_path: Path
) -> None:
    build(source, tmp_path)
    path = tmp_path / "shard-00001.safetensors"
    path.write_bytes(DAMAGES["a byte of the values"](path.read_bytes()))
    said: list[str] = []
    build(source, tmp_path, said, checksums=False)
    assert said == []
    path.write_bytes(DAMAGES["cut"](path.read_bytes()))
    build(source, tmp_path, said, checksums=False)
    assert "shard-00001.safetensors is damaged" in said[0] and digests(tmp_path) == whole


def test_a_shard_that_is_cut_while_it_is_read(source: FeatureSource, tmp_path: Path) -> None:
    cache = build(source, tmp_path)
    last = len(ROWS) - 1
    assert torch.equal(cache[last], cache[last])
    path = sorted(tmp_path.glob("shard-*"))[-1]
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(ValueError, match=rf"{path.name} is damaged \(it ends too early\); run again"):
        cache[last]


# ---- another cache -------------------------------------------------------------------------------------------


def _changed(source: FeatureSource, what: str) -> tuple[FeatureSource, Sequence[TokenRow]]:
    if what == "target":
        return replace(source, target=tiny_target("llama", seed=1)), ROWS
    if what == "rows":
        row = ROWS[5]
        return source, [*ROWS[:5], replace(row, input_ids=(*row.input_ids[:-1], row.input_ids[-1] ^ 1)), *ROWS[6:]]
    if what == "border":  # the same ids, another row has the last one
        first, second = ROWS[0].input_ids, ROWS[1].input_ids
        rows = [TokenRow("0", first[:-1], (), "t"), TokenRow("1", (first[-1], *second), (), "t")]
        return source, [*rows, *ROWS[2:]]
    if what == "taps":
        return replace(source, taps=(0,)), ROWS
    if what == "dtype":
        target = TargetAdapter(tiny_model("llama").to(torch.bfloat16), TAPS)
        return replace(source, target=target), ROWS
    tokenizer = tiny_tokenizer()
    if what == "template":
        tokenizer.chat_template = "{{ messages }}"
    else:
        tokenizer.add_tokens(["<|new|>"])
    return replace(source, tokenizer=tokenizer), ROWS


@pytest.mark.parametrize(
    ("what", "field"),
    [
        ("target", "weights_sha256"),
        ("rows", "rows_sha256"),
        ("border", "rows_sha256"),
        ("taps", "columns"),
        ("dtype", "dtype"),
        ("template", "template_sha256"),
        ("tokenizer", "tokenizer_sha256"),
    ],
)
def test_a_cache_of_something_else_is_refused(
    source: FeatureSource, whole: dict[str, str], tmp_path: Path, what: str, field: str
) -> None:
    """One error, which names what differs, with both values; nothing is changed."""
    build(source, tmp_path)
    other, rows = _changed(source, what)
    with pytest.raises(ValueError, match=rf"data\.work_dir: .* other settings \(.*{field}: there .*, asked ") as caught:
        build(other, tmp_path, rows=rows)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=field):
        verify_feature_cache(other, rows, tmp_path, log=lambda text: None)
    assert digests(tmp_path) == whole


def test_padding_of_a_caller_is_no_other_tokenizer(source: FeatureSource, tmp_path: Path) -> None:
    build(source, tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    build(replace(source, tokenizer=tokenizer), tmp_path)


def test_old_and_broken_manifests(source: FeatureSource, tmp_path: Path) -> None:
    build(source, tmp_path)
    path = tmp_path / "manifest.json"
    whole = path.read_text()
    for text, words in (
        (json.dumps({"schema": 1, "rows": 3}), r"another version \(schema 1, expected 2\)"),
        (whole[: len(whole) // 2], "is not the manifest of a feature cache"),
        ("[]", "is not the manifest of a feature cache"),
        ("", "is not the manifest of a feature cache"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            build(source, tmp_path)
        assert path.read_text() == text
    path.unlink()
    with pytest.raises(ValueError, match=r"shards without a manifest\.json"):
        build(source, tmp_path)
    said: list[str] = []
    damaged = json.loads(whole)
    damaged["shards"][2] = {"file": "shard-00002.safetensors"}
    path.write_text(json.dumps(damaged))
    build(source, tmp_path, said)
    assert "1 of" in said[0] and path.read_text() == whole


# ---- verify --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", ["auto", "int8"])
def test_verify(source: FeatureSource, tmp_path: Path, stored: Any) -> None:
    """All is well; then files that are whole, but hold the features of another row."""
    cache = build(source, tmp_path, stored=stored)
    before = digests(tmp_path)
    found = verify_feature_cache(source, ROWS, tmp_path, stored=stored, sample=100, log=lambda text: None)
    assert (found.rows, found.tokens) == (len(ROWS), sum(len(row.input_ids) for row in ROWS))
    assert 0 <= found.largest < (1e-4 if stored == "auto" else 0.05) and digests(tmp_path) == before
    path = tmp_path / "shard-00001.safetensors"
    parts = load_file(path)
    index = next(i for i in range(len(ROWS)) if cache._layout.place(i)[0] == 1)
    end = len(ROWS[index].input_ids)
    parts["features"][:end] = parts["features"][:end].roll(1, 0)
    shards.write_shard(tmp_path, 1, parts)
    with pytest.raises(ValueError, match=rf"1 of {len(ROWS)} rows in .* are not what .* computes .*: '{index}' \("):
        verify_feature_cache(source, ROWS, tmp_path, stored=stored, sample=100, log=lambda text: None)


def test_verify_wants_all_of_it(source: FeatureSource, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not the manifest of a feature cache"):
        verify_feature_cache(source, ROWS, tmp_path)
    build(source, tmp_path)
    (tmp_path / "shard-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard-00002\.safetensors \(missing\); run scripts/feature_cache\.py build"):
        verify_feature_cache(source, ROWS, tmp_path, log=lambda text: None)


# ---- disk ----------------------------------------------------------------------------------------------------


def test_a_full_disk_is_refused_before_the_first_write(
    source: FeatureSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1 << 30, 0, 1 << 19))
    tokens = sum(len(row.input_ids) for row in ROWS)
    size = tokens * 3 * 64 * 4 / 2**20
    assert size > 0.5
    with pytest.raises(ValueError, match=rf"needs {size:.0f} MiB in .*, where 0 MiB are free"):
        build(source, tmp_path)
    assert os.listdir(tmp_path) == ["manifest.json"]


def test_a_disk_that_fills_up(source: FeatureSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(parts: dict[str, Tensor], path: Path) -> None:
        path.write_bytes(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "save_file", fails)
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors cannot be written .*No space left on device"):
        build(source, tmp_path)
    assert os.listdir(tmp_path) == ["manifest.json"]

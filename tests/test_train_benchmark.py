"""The training step's benchmark on a tiny target: what it reports, its counts of FLOPs, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from heads.target import fast_dtype
from scripts.benchmark import main
from tests.tiny import tiny_target
from tests.tiny_run import make_place
from train.benchmark import (
    Machine,
    Side,
    _side,
    attention_flops,
    make_head,
    own_loss,
    products,
    random_batch,
)
from train.flops import Product

COMMAND = ["train", "--lengths", "64,128", "--repeats", "1", "--draft-vocab", "256", "--dense-limit", "64"]
CPU = torch.device("cpu")
LARGE = LlamaConfig(
    vocab_size=8192,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=None,
    eos_token_id=None,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("benchmark"))


@pytest.fixture(autouse=True)
def _threads_and_denormals():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


# --- the report -----------------------------------------------------------------------------------------------


def test_the_report_has_all_figures(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*COMMAND, "--target", str(place / "target"), "--threads", "1"]
    assert main(argv) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert (result["threads"], result["steps"], result["draft_vocab"], result["repeats"]) == (1, 3, 256, 1)
    assert {"hardware", "dtype", "versions", "target", "commit"} <= result.keys()
    assert result["command"] == shlex.join(["scripts/benchmark.py", *argv])
    assert result["machine_gflops_per_second"] and min(result["machine_gflops_per_second"].values()) >= 0
    runs = {(run["kind"], run["length"]): run for run in result["runs"]}
    assert list(runs) == [(kind, length) for kind in ("eagle", "eagle3") for length in (64, 128)]
    for (_, length), run in runs.items():
        assert run["documents"] == 1 and 0.6 * length < run["supervised"] < 0.76 * length
        assert ("dense" in run) is (length == 64)
        _check_side(run["ours"], length, {"unroll", "loss", "backward", "optimizer"})
        if "dense" in run:
            _check_side(run["dense"], length, {"forward", "backward", "optimizer"})
            assert run["speedup"] == pytest.approx(run["ours"]["tokens_per_second"] / run["dense"]["tokens_per_second"])
            assert run["memory_ratio"] == pytest.approx(run["dense"]["peak_bytes"] / run["ours"]["peak_bytes"])
    assert "eagle3, 128 tokens, 3 draft steps:" in printed.out and "share of the machine" in printed.out
    assert "1/1 repeats" in printed.err


def _check_side(side: dict[str, Any], length: int, parts: set[str]) -> None:
    assert side["ms"].keys() == parts and min(side["ms"].values()) > 0
    assert sum(side["ms"].values()) == pytest.approx(side["step_ms"], rel=0.01)  # one repeat: its own parts
    assert side["tokens_per_second"] == pytest.approx(1000 * length / side["step_ms"])
    assert side["flops_per_second"] == pytest.approx(1000 * side["flops"] / side["step_ms"])
    assert side["peak_bytes"] > 0 and side["attention_flops"] > 0
    assert 0 < side["share"] < 1.5


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--lengths", "64,x", "--lengths is '64,x', expected numbers of tokens separated by commas"),
        ("--lengths", "0", "--lengths is '0', expected multiples of 32 (a batch is padded to those)"),
        ("--lengths", "100", "--lengths is '100', expected multiples of 32 (a batch is padded to those)"),
        ("--kinds", "eagle,medusa", "--kinds is 'eagle,medusa', expected some of eagle, eagle3, separated by commas"),
        ("--steps", "0", "--steps is 0, expected 1 or more"),
        ("--repeats", "0", "--repeats is 0, expected 1 or more"),
        ("--threads", "-1", "--threads is -1, expected 1 or more"),
        ("--draft-vocab", "0", "--draft-vocab is 0, expected 1 or more"),
        ("--draft-vocab", "100000", "--draft-vocab is 100000, expected 1 .. 512 (the target's)"),
        ("--target", "no/such/place", "target.path: cannot load 'no/such/place' as a causal LM"),
    ],
)
def test_bad_values_are_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    assert main(["train", "--target", str(place / "target"), option, value]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if "Loading weights" not in line and line]
    assert len(lines) == 1 and lines[0].startswith(f"error: {message}")


@pytest.mark.parametrize("argv", [[], ["encode"], ["train", "--length", "x", "--nothing"]])
def test_unknown_commands_and_options_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_help_shows_the_options_of_both_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for option in ("--prompts", "--rows", "--head", "--dense-limit", "--draft-vocab", "--lengths"):
        assert option in text


def test_decode_still_takes_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", "--head", "no/such", "--prompts", "no/such.jsonl", "--rows", "0"]) == 1
    assert capsys.readouterr().err == "error: --rows is '0', expected 1 or more each\n"


# --- what is measured -----------------------------------------------------------------------------------------


def test_the_batch_is_texts_of_the_draft_vocabulary_cut_to_fill() -> None:
    head = make_head("eagle3", tiny_target("llama"), 100)
    batch = random_batch(head, 2048, 3, 0.0, torch.float32)
    assert batch.valid_BT.shape == (1, 2048) and bool(batch.valid_BT.all())
    lengths = [end - start for _, start, end in batch.documents]
    assert sum(lengths) == 2048 and all(200 <= length <= 600 for length in lengths[:-1])
    ids = head.draft_ids
    assert ids is not None and bool(torch.isin(batch.token_KBT[0, 0, :-1], ids).all())
    for _, start, end in batch.documents:  # a quarter is prompt; drafting starts below the answer's first token
        supervised = batch.weight_KBT[0, 0, start:end].nonzero()[:, 0]
        assert int(supervised[0]) == (end - start) // 4 - 1 and len(supervised) == end - start - (end - start) // 4 - 1


def _sides(kind: str, large: bool = False) -> list[Side]:
    """large: a vocabulary with which the loss goes through a batch in chunks, as it does with real ones.

    The last chunk is padded to a multiple of a quarter: with a small vocabulary to many times the batch.
    """
    target = tiny_target(LARGE if large else "llama")
    vocab = 8192 if large else 256
    return [_side(name, kind, target, vocab, own_loss(kind, False)) for name in ("ours", "dense")]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_both_sides_take_the_same_steps(kind: str) -> None:
    """A benchmark of two different computations would say nothing."""
    ours, dense = _sides(kind)
    batch = random_batch(ours.head, 128, 3, 0.1, torch.float32)
    for _ in range(3):
        torch.testing.assert_close(ours.loss(batch), dense.loss(batch), rtol=1e-5, atol=0)
        for side in (ours, dense):
            side.step(batch, torch.float32)
    for one, other in zip(ours.head.parameters(), dense.head.parameters(), strict=True):
        assert one.grad is None and other.grad is None
        # AdamW's first steps are signs: where a gradient is nearly 0, rounding decides
        difference = (one - other).detach().abs().mean()
        assert float(difference) < 1e-4 * float(one.detach().abs().mean()) + 1e-6


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("index", [0, 1], ids=["ours", "dense"])
def test_flops_match_a_count_of_the_operations(kind: str, steps: int, index: int) -> None:
    side = _sides(kind, large=True)[index]
    batch = random_batch(side.head, 512, steps, 0.0, torch.float32)
    with FlopCounterMode(display=False) as counter:
        side.step(batch, torch.float32)
    counted = counter.get_flop_counts()["Global"]
    # ours does attention in a kernel, which is not counted; the dense one in batched products, and so its teacher
    assert {str(op) for op in counted} <= {"aten.mm", "aten.bmm", "aten.addmm"}
    linear = sum(counted.values()) - (attention_flops(side, batch) if side.name == "dense" else 0)
    needed = products(side.head, batch, side.name == "dense")
    assert sum(one.flops for one in needed) == pytest.approx(linear, rel=0.03)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_ours_needs_fewer_flops(kind: str) -> None:
    ours, dense = _sides(kind)
    batch = random_batch(ours.head, 512, 3, 0.0, torch.float32)
    needed = [sum(one.flops for one in products(side.head, batch, side.name == "dense")) for side in (ours, dense)]
    assert needed[0] < 0.9 * needed[1]
    assert attention_flops(ours, batch) < 0.5 * attention_flops(dense, batch)


def test_rates_are_measured_once_per_shape() -> None:
    machine = Machine(CPU, torch.float32, 2)
    assert machine.rate(64, 32, 16) == machine.rate(64, 32, 16) > 0
    assert machine.rate(5000, 32, 16) == machine.rate(1024, 32, 16)
    assert list(machine.to_dict()) == ["64 x 32 x 16", "1024 x 32 x 16"]
    needed = [Product(64, 32, 16, 3), Product(5000, 32, 16, 2)]
    assert needed[0].flops == 2 * 64 * 32 * 16 * 3
    expected = needed[0].flops / machine.rate(64, 32, 16) + needed[1].flops / machine.rate(5000, 32, 16)
    assert machine.seconds(needed) == pytest.approx(expected)


def test_the_dtype_is_one_that_training_would_take() -> None:
    assert fast_dtype(CPU) in (torch.float32, torch.bfloat16)


# --- generation -----------------------------------------------------------------------------------------------


def test_generation_in_processes_gives_the_librarys_texts(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i} {'abcde' * (i % 3)}"}) + "\n" for i in range(7)))
    command = ["generate", "--target", str(place / "target"), "--prompts", str(prompts), "--count", "7", "--rows", "2"]
    command += ["--tokens", "9", "--repeats", "1", "--dtype", "float32", "--threads", "2", "--processes", "2"]
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (run,) = result["runs"]
    assert result["processes"] == {"ours": 2, "library": 1} and run["same_texts"] == 7 and run["ours"]["exact"]
    assert run["ours"]["tokens"] == run["library"]["tokens"] and 7 < run["ours"]["tokens"][0] <= 63
    assert main([*command, "--processes", "8"]) == 1
    assert "--count is 7, expected a prompt for every process" in capsys.readouterr().err
    command[2] = str(tmp_path / "nowhere")
    assert main(command) == 1
    assert "target.path" in capsys.readouterr().err

"""A head in a serving engine: the comparison against engines that recite, the driver, the engine's environment."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
import tempfile
import types
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from heads.base import DraftHead, LossSpec
from heads.checkpoint import save_head
from heads.config import HeadConfig
from heads.kinds import kind_of
from heads.registry import build_head
from heads.target import TargetAdapter
from heads.vocab import frequent_tokens, token_counts
from infer import served_driver, served_engine
from infer.prompts import Prompt, encode_prompt
from infer.served import rounds_before
from infer.served_engine import PINS, ensure_environment
from scripts.check_served import main
from tests.fake_engine import make_fake_engine, requests
from tests.tiny import _GATED, VOCAB, library_greedy, tiny_head, tiny_model, tiny_tokenizer
from train.batching import make_batch
from train.conversations import TokenRow

K, TOKENS, EOS = 3, 24, 345
TEXTS = ("abc", "what is it", "xyz")
# Its greedy text repeats tokens now and then: what an untrained Medusa head drafts, which is the root again and again.
STUTTERING = LlamaConfig(**{**_GATED, "initializer_range": 0.12, "eos_token_id": EOS}, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a Medusa head for it, prompts, and what an engine must answer."""
    folder = tmp_path_factory.mktemp("served")
    model = tiny_model(STUTTERING, 1)
    model.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    target = TargetAdapter(model, (), name=str(folder / "target"))
    config = HeadConfig.derive(
        "medusa", target.config, target.vocab_size, target.name, options=dict(kind_of("medusa").options)
    )
    save_head(build_head(config), folder / "head")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    answers = []
    for text in TEXTS:
        prompt = encode_prompt(tiny_tokenizer(), Prompt("p", "all", text), False, {})
        answers.append(right_answer(library_greedy(model, prompt, TOKENS + K)))
    (folder / "answers.json").write_text(json.dumps(answers))
    return folder


def right_answer(endless: list[int]) -> dict[str, Any]:
    """An engine's answer: the text up to its end, and rounds by the definition, drafting the root K times."""
    end = min(endless.index(EOS) + 1 if EOS in endless else TOKENS, TOKENS)
    rounds, accepted, at = 0, [0] * K, 0
    while at + 1 < end:
        right = 0
        while right < K and endless[at + 1 + right] == endless[at]:
            right += 1
        rounds += 1
        accepted = [count + (right > i) for i, count in enumerate(accepted)]
        at += right + 1
    return {"ids": endless[:end], "rounds": rounds, "accepted_per_position": accepted, "seconds": 0.5}


def plain_of(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**answer, "rounds": 0, "accepted_per_position": []} for answer in answers]


def check(place: Path, env: Path, *more: str) -> int:
    options = ["--prompts", str(place / "prompts.jsonl"), "--k", str(K), "--max-new-tokens", str(TOKENS)]
    return main(["--head", str(place / "head"), "--env", str(env), "--device", "cpu", *options, *more])


def test_an_engine_that_counts_the_same_passes(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)  # relative paths
    answers = json.loads((place / "answers.json").read_text())
    ends = [answer["ids"][-1] == EOS for answer in answers]
    assert any(ends) and not all(ends), "some answers end early, others are cut"
    env = make_fake_engine(tmp_path, plain=plain_of(answers), drafted=answers)
    assert check(place, Path(os.path.relpath(env)), "--target", "target", "--threads", "1") == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out.splitlines()[-1])
    assert found["same_text"] == found["same_text_as_ours"] == found["prompts"] == len(TEXTS)
    rounds = sum(answer["rounds"] for answer in answers)
    accepted = [sum(answer["accepted_per_position"][i] for answer in answers) / rounds for i in range(K)]
    for side in ("engine", "ours"):
        assert found["sides"][side]["rounds"] == rounds
        assert found["sides"][side]["accepted_per_position"] == accepted
        assert found["sides"][side]["accept_length"] == pytest.approx(1 + sum(accepted))
    assert found["difference"] == 0 and 1.5 < 1 + sum(accepted) < 3
    assert "fake 1.0" in shown.out and "our chain" in shown.out and f"{1 + sum(accepted):.3f}" in shown.out
    assert "with the head: 3 prompts" in shown.err
    plain, drafted = requests(env)
    assert plain["speculative"] is None
    exported = drafted["speculative"].pop("model")
    assert drafted["speculative"] == {"method": "medusa", "num_speculative_tokens": K}
    assert not Path(exported).exists(), "the exported copy is temporary"
    for request in (plain, drafted):
        assert request["prompts"] == [
            encode_prompt(tiny_tokenizer(), Prompt("p", "a", text), False, {}) for text in TEXTS
        ]
        assert (request["target"], request["dtype"]) == (str(place / "target"), "float32")
        assert (request["max_new_tokens"], request["stop_ids"]) == (TOKENS, [EOS])
        assert request["max_model_len"] >= max(map(len, request["prompts"])) + TOKENS + K
        assert request["python_options"][0] == "-I"


def test_another_text_fails(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = json.loads((place / "answers.json").read_text())
    wrong = [*answers[:-1], {**answers[-1], "ids": [*answers[-1]["ids"][:-1], 5]}]
    assert check(place, make_fake_engine(tmp_path, plain=plain_of(answers), drafted=wrong)) == 1
    shown = capsys.readouterr()
    assert "another than its plain text on 1 of 3 prompts" in shown.err
    assert json.loads(shown.out.splitlines()[-1])["same_text"] == 2


@pytest.mark.parametrize(("change", "code"), [(0.8, 1), (0.96, 0), (1.2, 1)])
def test_the_accept_length_may_be_off_by_5_percent(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: float, code: int
) -> None:
    answers = json.loads((place / "answers.json").read_text())
    rounds = sum(answer["rounds"] for answer in answers)
    accepted = sum(sum(answer["accepted_per_position"]) for answer in answers)
    more = change * (1 + accepted / rounds) * rounds - rounds - accepted  # so that the accept length changes as asked
    first = answers[0]["accepted_per_position"]
    wrong = [{**answers[0], "accepted_per_position": [first[0] + more, *first[1:]]}, *answers[1:]]
    assert check(place, make_fake_engine(tmp_path, plain=plain_of(answers), drafted=wrong)) == code
    shown = capsys.readouterr()
    assert json.loads(shown.out.splitlines()[-1])["difference"] == pytest.approx(change - 1)
    if code:
        ours = 1 + accepted / rounds
        assert f"accept length {change * ours:.3f} in fake 1.0, {ours:.3f} here" in shown.err


@pytest.mark.parametrize(
    ("dies", "told"),
    [
        ("sys.exit(3)", "ended with code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "used an instruction that this CPU does not have"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"),
        ("sys.stdout.flush(); import os; os._exit(0)", "wrote no result"),
    ],
)
def test_an_engine_that_fails_is_quoted(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    dies: str,
    told: str,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its log stays
    answers = json.loads((place / "answers.json").read_text())
    assert check(place, make_fake_engine(tmp_path, plain=plain_of(answers), drafted=answers, dies=dies)) == 1
    error = capsys.readouterr().err
    assert f"with the head: the engine {told}" in error and "NUMA node is on fire" in error
    log = Path(error.rpartition("the end of ")[2].partition(":\n")[0])
    assert "NUMA node is on fire" in log.read_text()


def test_an_engine_that_ignores_the_head_fails(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = plain_of(json.loads((place / "answers.json").read_text()))
    assert check(place, make_fake_engine(tmp_path, plain=plain, drafted=plain)) == 1
    assert "verified no drafts at all" in capsys.readouterr().err


def test_bad_values_are_told_before_the_engine_starts(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = make_fake_engine(tmp_path / "env")
    for options, told in (
        (("--k", "0"), "--k is 0, expected 1 or more"),
        (("--k", "5"), "--k is 5, but the head drafts 4 tokens at most"),
        (("--max-new-tokens", "1"), "--max-new-tokens is 1, expected 2 or more"),
        (("--max-new-tokens", "300"), "lower --max-new-tokens"),
        (("--prompts", str(place / "no")), "--prompts: cannot read"),
    ):
        assert check(place, env, *options) == 1
        assert told in capsys.readouterr().err
    assert not (env / "requests.jsonl").exists()
    head = tiny_head(TargetAdapter(tiny_model(STUTTERING), (), name=str(place / "target")))
    head.config = replace(head.config, target_adapter="some/lora")
    save_head(head, tmp_path / "adapted")
    assert check(place, env, "--head", str(tmp_path / "adapted")) == 1
    assert "merge it into a target of its own" in capsys.readouterr().err


@given(st.lists(st.integers(0, K), max_size=12), st.integers(1, 20))
def test_rounds_that_count(accepted: list[int], length: int) -> None:
    """Each counted round begins before the end, and the next one would not."""
    counted = rounds_before(accepted, length)
    starts = [1 + sum(n + 1 for n in accepted[:i]) for i in range(len(accepted))]
    assert counted == [n for n, start in zip(accepted, starts, strict=True) if start < length]


# ---- the driver --------------------------------------------------------------------------------------------


def test_the_driver_imports_only_the_engine() -> None:
    """It runs where this package and its dependencies are not."""
    tree = ast.parse(Path(served_driver.__file__).read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"vllm"}


class FakeLLM:
    """vLLM's interface as the driver uses it: counters that only ever grow, of all requests together."""

    def __init__(self, **options: Any) -> None:
        self.options, self.rounds, self.accepted = options, 0, [0, 0]
        type(self).made = self

    made: FakeLLM

    def generate(self, prompt: dict[str, list[int]], sampling: dict[str, Any], use_tqdm: bool) -> Any:
        count = len(prompt["prompt_token_ids"])
        if self.options["speculative_config"]:
            self.rounds += count
            self.accepted = [self.accepted[0] + count - 1, self.accepted[1] + count - 2]
        ids = range(count, count + sampling["max_tokens"])
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=ids)])]

    def get_metrics(self) -> list[Any]:
        found = [types.SimpleNamespace(name="vllm:prompt_tokens", value=9)]
        if self.options["speculative_config"]:
            values = {"drafts": self.rounds, "draft_tokens": 2 * self.rounds, "accepted_tokens": sum(self.accepted)}
            found += [types.SimpleNamespace(name=f"vllm:spec_decode_num_{k}", value=v) for k, v in values.items()]
            per = types.SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[*self.accepted])
            found.append(per)
        return found


@pytest.mark.parametrize("speculative", [None, {"method": "eagle3", "model": "m", "num_speculative_tokens": 2}])
def test_the_driver_counts_each_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculative: dict[str, Any] | None
) -> None:
    vllm: Any = types.ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = FakeLLM, dict
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    request = {
        "target": "t",
        "revision": None,
        "dtype": "float32",
        "trust_remote_code": False,
        "max_model_len": 64,
        "prompts": [[1, 2, 3], [4, 5, 6, 7, 8]],
        "max_new_tokens": 2,
        "stop_ids": [9],
        "speculative": speculative,
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    served_driver.main(str(tmp_path / "request.json"), str(tmp_path / "result.json"))
    answers = json.loads((tmp_path / "result.json").read_text())["answers"]
    assert [answer["ids"] for answer in answers] == [[3, 4], [5, 6]]
    assert [answer["rounds"] for answer in answers] == ([3, 5] if speculative else [0, 0])
    assert [answer["accepted_per_position"] for answer in answers] == ([[2, 1], [4, 3]] if speculative else [[], []])
    assert FakeLLM.made.options["speculative_config"] == speculative
    assert (FakeLLM.made.options["model"], FakeLLM.made.options["dtype"]) == ("t", "float32")


# ---- the environment ---------------------------------------------------------------------------------------

PIP = """#!{python} -S
import pathlib, sys
with (pathlib.Path(__file__).parent.parent / "calls").open("a") as file:
    file.write(" ".join(sys.argv[5:]) + chr(10))
print("Collecting something")
print("no matching distribution" if "{fails}" in sys.argv else "pkg==1")
sys.exit("{fails}" in sys.argv)
"""


def fake_venv(monkeypatch: pytest.MonkeyPatch, fails: str = "nothing") -> None:
    def create(folder: Path, with_pip: bool) -> None:
        assert with_pip
        python = folder / "bin" / "python"
        python.parent.mkdir(exist_ok=True)
        python.write_text(PIP.replace("{python}", sys.executable).replace("{fails}", fails))
        python.chmod(0o755)

    monkeypatch.setattr(venv, "create", create)


def test_the_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    fake_venv(monkeypatch, "uninstall")
    with pytest.raises(ValueError, match=r"(?s)uninstall.*failed.*no matching distribution"):
        ensure_environment(None, str(tmp_path), said.append)  # half-made: the next call goes on
    fake_venv(monkeypatch)
    python = ensure_environment(None, str(tmp_path), said.append)
    place = tmp_path / "engines" / PINS[0].replace("==", "-")
    assert python == place / "bin" / "python" and any(str(place) in text for text in said)
    calls = (place / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["install", "uninstall", "install", "uninstall", "freeze"]
    assert calls[0].split()[-len(PINS) :] == list(PINS)
    monkeypatch.setattr(served_engine, "_install", None)  # would fail
    assert ensure_environment(None, str(tmp_path), said.append) == python
    assert json.loads((place / "draftsmith_engine.json").read_text())["versions"] == ["Collecting something", "pkg==1"]


def test_a_folder_of_another_kind_and_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="mine exists and is no environment with vLLM"):
        ensure_environment(str(tmp_path / "mine"), None, print)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=2**30))
    with pytest.raises(ValueError, match=r"1\.0 GiB are free at .*, and the engine needs 6 GiB"):
        ensure_environment(str(tmp_path / "new" / "env"), None, print)
    assert not (tmp_path / "new").exists()


# ---- the real engine ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("DRAFTSMITH_ENGINE_ENV"), reason="DRAFTSMITH_ENGINE_ENV names no environment")
@pytest.mark.parametrize(
    ("kind", "draft_vocab"), [("medusa", None), ("eagle", None), ("eagle3", None), ("eagle3", 256)], ids=str
)
def test_the_real_engine(
    kind: str, draft_vocab: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DRAFTSMITH_ENGINE_ENV: an environment with vLLM, for example the one that `scripts/check_served.py` made.

    In fp32 the engine counts exactly what we count. The head has learnt the very texts that it is asked for.
    """
    sizes = {"hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}  # layers enough for its own taps
    model = tiny_model(LlamaConfig(**{**_GATED, **sizes, "initializer_range": 0.2}, tie_word_embeddings=False))
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    target = TargetAdapter(model, (), name=str(tmp_path / "target"))
    save_head(overfitted(target, kind, draft_vocab), tmp_path / "head")
    env = os.environ["DRAFTSMITH_ENGINE_ENV"]
    assert check(tmp_path, Path(env), "--threads", "1") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["same_text"] == found["same_text_as_ours"] == len(TEXTS)
    engine, ours = (found["sides"][side] for side in ("engine", "ours"))
    assert engine["accept_length"] > 1.3
    for figure in ("rounds", "accepted_per_position"):
        assert engine[figure] == ours[figure]


def overfitted(target: TargetAdapter, kind: str, draft_vocab: int | None) -> DraftHead:
    config = HeadConfig.derive(
        kind,
        target.config,
        target.vocab_size,
        target.name,
        draft_vocab_size=draft_vocab,
        embedding_scale=3.0 if kind == "eagle" else 1.0,
        options=dict(kind_of(kind).options),
    )
    head = build_head(config)
    rows = []
    for text in TEXTS:
        prompt = encode_prompt(tiny_tokenizer(), Prompt("p", "all", text), False, {})
        ids = (*prompt, *library_greedy(target.model, prompt, TOKENS + K))
        rows.append(TokenRow(text, ids, ((len(prompt), len(ids)),), "t"))
    if draft_vocab is not None:
        head.set_draft_vocab(frequent_tokens(token_counts([row.input_ids for row in rows], VOCAB), draft_vocab))
    head.bind(target)
    head.init_from_target()
    target.tap(head.needs.taps)
    columns = []
    for row in rows:
        ids_1L = torch.tensor([row.input_ids])
        columns.append(target.features(ids_1L, torch.ones_like(ids_1L, dtype=torch.bool), head.needs.taps)[0].clone())
    batch = make_batch(rows, columns, K, head.needs)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        out = head(batch, LossSpec(1.0, 1.0, 1.0))
        (out.loss_sum / out.weight_sum).backward()
        optimizer.step()
    return head.eval()

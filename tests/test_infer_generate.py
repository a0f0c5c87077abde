"""The decoding command: streams, evaluates, goes on after a kill, and tells errors in a line."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.checkpoint import load_head, save_head
from heads.config import HeadConfig
from heads.target import TargetAdapter
from infer.generate import main
from infer.prompts import Prompt, encode_messages, encode_prompt, read_prompts, spread
from tests.adapters import adapted, change_config, save_adapter
from tests.tiny import CONFIGS, library_greedy, tiny_head, tiny_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]
ROWS = [
    {"question_id": 11, "category": "writing", "turns": ["Tell me a story.", "Again."]},
    {"question_id": 12, "category": "math", "turns": ["1+1?"]},
    {"question_id": 13, "category": "writing", "turns": ["Name a colour."]},
    {"id": "x", "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]},
]


def small_model(vocab: int) -> Any:
    config = CONFIGS["llama"].to_dict() | {"vocab_size": vocab}
    return tiny_model(type(CONFIGS["llama"])(**config))


@pytest.fixture(scope="module", name="place")
def make_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a head for it and a prompt set."""
    place = tmp_path_factory.mktemp("generate")
    tokenizer = tiny_tokenizer()
    model = small_model(len(tokenizer))
    model.save_pretrained(place / "target")
    tokenizer.save_pretrained(place / "target")
    target = TargetAdapter(model, name=str(place / "target"))
    save_head(tiny_head(target), place / "head")
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return place


def options(place: Path, *more: str, new: int = 12) -> list[str]:
    return ["--head", str(place / "head"), "--max-new-tokens", str(new), "--tree-width", "3", *more]


def test_prompt_streams_the_librarys_text(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer()
    ids = encode_prompt(tokenizer, Prompt("", "", "Hello", None), raw=False, template_kwargs={})
    assert tokenizer.decode(ids) == "<|user|>Hello<|end|><|assistant|>"
    text = tokenizer.decode(library_greedy(small_model(len(tokenizer)), ids, 12), skip_special_tokens=True)
    assert main(options(place, "--prompt", "Hello")) == 0
    out = capsys.readouterr().out
    assert out.startswith(text + "\n[accept length ")
    assert "12 tokens" in out.splitlines()[-1] and out.rstrip().endswith("tokens/s]")
    assert main(options(place, "--prompt", "Hello", "--raw", new=1)) == 0
    assert "accept length -" in capsys.readouterr().out  # no round at all
    assert main(options(place, "--prompt", "Hello", "--system", "Be brief.")) == 0
    assert not capsys.readouterr().out.startswith(text)


def evaluate(place: Path, out: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, Any, str]:
    files = ("--eval", str(place / "prompts.jsonl"), "--json", str(out))
    code = main(options(place, *files, *more))
    shown = capsys.readouterr()
    return code, json.loads(shown.out.splitlines()[-1]), shown.err


def test_eval(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "report.json"
    code, summary, err = evaluate(place, out, capsys, "--limit", "3")
    assert code == 0
    report = json.loads(out.read_text())
    assert summary == report["overall"]
    assert summary["prompts"] == 3 and summary["identical_share"] == 1.0 and summary["tau"] >= 1.0
    assert set(report["categories"]) == {"writing", "math", "all"}
    assert "writing 1, math 1, all 1" in err and "left" in err
    meta = report["meta"]
    for key in ("hardware", "batch", "sampling", "threads", "torch", "transformers", "commit", "command"):
        assert key in meta
    assert meta["dtype"] == "float32" and meta["tree"] == {"width": 3, "depth": 4, "total": 16, "static": None}
    assert meta["target"] == str(place / "target") and "--limit 3" in meta["command"]
    assert report["divergence"]["prompts"] == 0
    assert sorted(path.name for path in out.parent.iterdir()) == ["report.json"]


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["--prompt", "a", "--eval", "b"],
        ["--prompt", "a", "--limit", "3"],
        ["--prompt", "a", "--json", "x.json"],
        ["--prompt", "a", "--raw", "--system", "b"],
        ["--prompt", "a", "--chain", "2", "--tree-depth", "2"],
        ["--prompt", "a", "--chain", "0"],
        ["--prompt", "a", "--rows", "2"],
        ["--prompt", "a", "--draws", "2"],
        ["--prompt", "a", "--rule", "match"],
        ["--prompt", "a", "--lossy-typical"],
        ["--prompt", "a", "--temperature", "1", "--lossy-typical", "--rule", "match"],
        ["--prompt", "a", "--temperature", "1", "--rule", "greedy"],
        ["--prompt", "a", "--tree", "auto", "--tree-width", "2"],
        ["--eval", "f", "--plain"],
        ["--chat", "--raw"],
        ["--prompt", "a", "--template-kwargs", "x"],
        ["--prompt", "a", "--template-kwargs", "[1]"],
        ["--ids", "1", "--system", "b"],
    ],
    ids=" ".join,
)
def test_wrong_options_end_with_2(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--head", "nowhere", *wrong])
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--head", "nowhere", "--prompt", "a"], "nowhere is not a directory"),
        (["--target", "./nowhere", "--prompt", "a"], "./nowhere"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens"),
        (["--prompt", "a", "--max-new-tokens", "999"], "256 positions"),
        (["--prompt", "a", "--threads", "0"], "--threads"),
        (["--prompt", "a", "--device", "cuda:77x"], "--device"),
        (["--prompt", "a", "--tree-nodes", "1"], "--tree-nodes"),
        (["--prompt", "", "--raw"], "0 tokens"),
        (["--prompt", "a", "--temperature", "-1"], "temperature"),
        (["--prompt", "a", "--temperature", "1", "--top-p", "2"], "top_p"),
        (["--prompt", "a", "--proposal", "sampled"], "proposal"),
        (["--prompt", "a", "--stop", ""], "stop_strings"),
        (["--ids", "1,x"], "--ids"),
        (["--ids", "1,99999"], "token ids"),
        (["--eval", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--eval", "{place}/prompts.jsonl", "--limit", "0"], "--limit"),
        (["--eval", "{place}/prompts.jsonl", "--json", "{place}/prompts.jsonl"], "not a Draftsmith report"),
        (["--eval", "{place}/prompts.jsonl", "--json", "{place}/prompts.jsonl/x"], "--json"),
        (["--eval", "{place}/prompts.jsonl", "--max-new-tokens", "250"], "prompt 11:"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_are_one_line_and_1(
    place: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], told: str
) -> None:
    assert main(options(place, *(part.format(place=place) for part in wrong))) == 1
    shown = capsys.readouterr()
    last = shown.err.strip().splitlines()[-1]
    assert last.startswith("error: ") and told in shown.err and "Traceback" not in shown.err
    assert shown.out == ""


def answer(place: Path, capsys: pytest.CaptureFixture[str], *more: str, new: int = 12) -> str:
    assert main(options(place, *more, new=new)) == 0
    return capsys.readouterr().out


def test_ids_go_on_from_any_tokens(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny_tokenizer()
    model = small_model(len(tokenizer))
    text = tokenizer.decode(library_greedy(model, [5, 9, 77], 12), skip_special_tokens=True)
    assert answer(place, capsys, "--ids", "5, 9,77").startswith(text + "\n[accept length")
    plain = answer(place, capsys, "--ids", "5,9,77", "--plain")
    assert plain.startswith(text + "\n[plain decoding") and "accept" not in plain


def test_sampling_by_seed_and_rule(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rule "match" gives plain sampling's own text; the others at least depend on the seed alone."""
    sampled = ["--prompt", "Hello", "--temperature", "0.4", "--top-p", "0.9"]

    def text(*more: str) -> str:
        return answer(place, capsys, *sampled, *more).rpartition("\n[")[0]

    plain = text("--plain")
    assert text() == text("--rule", "match", "--proposal", "sampled") == plain
    assert text("--seed", "1") == text("--seed", "1", "--plain") != plain
    for more in (["--rule", "top_k"], ["--proposal", "sampled"]):
        assert text(*more) == text(*more) != text(*more, "--seed", "1")


def test_a_lossy_rule_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lossy = ["--temperature", "1", "--lossy-typical"]
    assert main(options(place, "--prompt", "Hello", *lossy)) == 0
    assert "LOSSY" in capsys.readouterr().err
    lines = answer(place, capsys, "--answer", str(place / "prompts.jsonl"), *lossy).splitlines()
    assert len(lines) == 4 and all("LOSSY" in json.loads(line)["lossy"] for line in lines)


def test_stop_text_is_left_out(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = answer(place, capsys, "--prompt", "Hello").rpartition("\n[")[0]
    stop = whole[4:6]
    assert answer(place, capsys, "--prompt", "Hello", "--stop", stop).rpartition("\n[")[0] == whole[: whole.index(stop)]


def test_colours_change_nothing_else(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = answer(place, capsys, "--prompt", "Hello").rpartition("\n[")[0]
    coloured = answer(place, capsys, "--prompt", "Hello", "--colour", "always").rpartition("\n[")[0]
    assert "\033[" in coloured and "\033[" not in bare
    assert re.sub(r"\033\[[0-9;]*m", "", coloured) == bare


def test_answers_do_not_depend_on_the_rows(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(place / "prompts.jsonl")
    single = [json.loads(line) for line in answer(place, capsys, "--answer", file).splitlines()]
    together = [json.loads(line) for line in answer(place, capsys, "--answer", file, "--rows", "3").splitlines()]
    assert single == together and [row["id"] for row in single] == ["11", "12", "13", "x"]
    tokenizer = tiny_tokenizer()
    prompt = read_prompts(file)[1]
    ids = library_greedy(
        small_model(len(tokenizer)), encode_prompt(tokenizer, prompt, raw=False, template_kwargs={}), 12
    )
    assert single[1]["ids"] == ids and single[1]["text"] == tokenizer.decode(ids, skip_special_tokens=True)


def test_tree_auto_asks_for_a_calibration(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--prompt", "a", "--tree", "auto", "--cache-dir", str(place / "none")]
    assert main(["--head", str(place / "head"), *more]) == 1
    assert "run: python infer/calibrate.py --head" in capsys.readouterr().err


def test_a_target_without_trees_is_decoded_plainly(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(place, capsys, "--prompt", "Hello")

    def refuse(target: TargetAdapter) -> float:
        raise ValueError("no trees")

    monkeypatch.setattr("infer.loading.require_tree", refuse)
    assert main(options(place, "--prompt", "Hello")) == 1
    assert "no trees" in capsys.readouterr().err
    plain = answer(place, capsys, "--prompt", "Hello", "--plain")
    assert plain.rpartition("\n[")[0] == expected.rpartition("\n[")[0] and "[plain decoding" in plain


def test_chat_keeps_the_conversation(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\nAnd then?\n"))
    out = answer(place, capsys, "--chat")
    tokenizer = tiny_tokenizer()
    messages: list[dict[str, str]] = []
    expected = []
    for turn in ("Hi", "And then?"):
        messages.append({"role": "user", "content": turn})
        ids = encode_messages(tokenizer, messages, "", {})
        text = tokenizer.decode(library_greedy(small_model(len(tokenizer)), ids, 12), skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
        expected.append(text)
    assert [part.partition("]\n")[2] for part in ("]\n" + out).split("\n[accept")][:2] == expected


def test_audit(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = answer(place, capsys, "--audit", str(place / "prompts.jsonl"), "--limit", "2", "--draws", "300")
    assert json.loads(out.splitlines()[-1])["passed"] is True


def test_a_head_of_another_target_is_told(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = TargetAdapter(small_model(300), name="another/target")
    config = HeadConfig.derive("eagle", target.config, 300, "another/target")
    assert config.vocab_size == 300
    save_head(tiny_head(target), tmp_path / "head")
    code = main(["--head", str(tmp_path / "head"), "--target", str(place / "target"), "--prompt", "a"])
    assert code == 1 and "another/target" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_the_adapter_that_the_head_was_trained_for(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """It is merged without being asked for, from the head's own directory too; another one, or none, is told."""
    vocab = len(tiny_tokenizer())
    folder = save_head(load_head(place / "head"), tmp_path / "head") / "adapter"
    folder = folder if where == "inside" else tmp_path / "lora"
    save_adapter(folder, small_model(vocab))
    change_config(folder, base_model_name_or_path=str(place / "target"))
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    config["target_adapter"] = "adapter" if where == "inside" else str(folder)
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    ids = encode_prompt(tiny_tokenizer(), Prompt("", "", "Hello"), raw=False, template_kwargs={})
    base = library_greedy(small_model(vocab), ids, 12)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wrapped = adapted(small_model(vocab))
    carried = wrapped.generate(input_ids=torch.tensor([ids]), **settings)[0, len(ids) :].tolist()
    assert base != carried
    for adapter, want, told in (
        ([], carried, False),
        (["--adapter", str(folder)], carried, False),
        (["--adapter", "none"], base, True),
        (["--adapter", "none", "--plain"], base, True),
    ):
        more = ["--head", str(tmp_path / "head"), "--max-new-tokens", "12", "--prompt", "Hello", *adapter]
        assert main(more) == 0
        shown = capsys.readouterr()
        assert shown.out.startswith(tiny_tokenizer().decode(want, skip_special_tokens=True) + "\n[")
        lines = [line for line in shown.err.splitlines() if line.startswith("warning:")]
        assert len(lines) == told and all(f"adapter {folder}, and is used with adapter none" in one for one in lines)


def test_an_adapter_for_a_head_of_the_base(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_adapter(tmp_path / "lora", small_model(len(tiny_tokenizer())))
    assert main(options(place, "--prompt", "Hello", "--adapter", str(tmp_path / "lora"))) == 0
    shown = capsys.readouterr()
    assert f"adapter none, and is used with adapter {tmp_path / 'lora'}" in shown.err
    assert main(options(place, "--prompt", "Hello", "--adapter", "none")) == 0
    again = capsys.readouterr()
    assert "warning:" not in again.err and again.out.rpartition("\n[")[0] != shown.out.rpartition("\n[")[0]
    assert main(options(place, "--prompt", "Hello", "--adapter", str(tmp_path / "nowhere"))) == 1
    assert "error: target.adapter: " in capsys.readouterr().err


def test_a_tokenizer_without_chat_template_needs_raw() -> None:
    tokenizer = tiny_tokenizer(chat=False)
    with pytest.raises(ValueError, match="--raw"):
        encode_prompt(tokenizer, Prompt("", "", "Hello"), raw=False, template_kwargs={})
    assert tokenizer.decode(encode_prompt(tokenizer, Prompt("", "", "Hello"), raw=True, template_kwargs={})) == "Hello"


def test_arguments_of_the_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% if thinking %}hm;{% endif %}" + tokenizer.chat_template
    prompt = Prompt("", "", "Hello")
    ids = encode_prompt(tokenizer, prompt, raw=False, template_kwargs={"thinking": True})
    assert tokenizer.decode(ids) == "hm;<|user|>Hello<|end|><|assistant|>"
    with pytest.raises(ValueError, match="--raw leaves out"):
        encode_prompt(tokenizer, prompt, raw=True, template_kwargs={"thinking": True})
    with pytest.raises(ValueError, match="the chat template refuses it"):
        encode_prompt(tokenizer, prompt, raw=False, template_kwargs={"tokenize": True})


def test_rows_of_every_form(tmp_path: Path) -> None:
    rows = [
        {"turns": ["a", "b"], "question_id": 5, "category": "c"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "id": "m"},
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}]},
        {"prompt": "a"},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n\n".join(map(json.dumps, rows)))
    assert read_prompts(path) == [
        Prompt("5", "c", "a"),
        Prompt("m", "all", "a"),
        Prompt("5", "all", "a", "s"),
        Prompt("7", "all", "a"),
    ]
    for bad in (
        "[1]",
        "{",
        '{"text": "a"}',
        '{"turns": []}',
        '{"messages": [{"role": "assistant"}]}',
        '{"prompt": ""}',
    ):
        path.write_text('{"prompt": "a"}\n' + bad)
        with pytest.raises(ValueError, match="line 2"):
            read_prompts(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="no prompt"):
        read_prompts(path)


def test_spread_is_even_and_keeps_the_order() -> None:
    prompts = [Prompt(f"{name}{i}", name, "") for name, count in (("a", 10), ("b", 2), ("c", 30)) for i in range(count)]
    for limit, counts in ((1, (1, 0, 0)), (3, (1, 1, 1)), (8, (3, 2, 3)), (20, (9, 2, 9)), (99, (10, 2, 30))):
        chosen = spread(prompts, limit)
        assert tuple(sum(p.category == name for p in chosen) for name in "abc") == counts
        assert [prompts.index(p) for p in chosen] == sorted(prompts.index(p) for p in chosen)
    assert [p.id for p in spread(prompts, 8)] == ["a0", "a3", "a6", "b0", "b1", "c0", "c10", "c20"]
    assert spread(prompts, None) == prompts


def test_run_by_path_from_another_folder(place: Path, tmp_path: Path) -> None:
    script = str(ROOT / "infer" / "generate.py")
    command = [sys.executable, script, *options(place, "--prompt", "Hello", "--threads", "1", new=4)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "4 tokens" in done.stdout


def test_partial_of_something_else_is_not_overwritten(place: Path, tmp_path: Path) -> None:
    (tmp_path / "r.json.partial.jsonl").write_text('{"mine": 1}\n')
    files = ["--eval", str(place / "prompts.jsonl"), "--json", str(tmp_path / "r.json")]
    assert main(options(place, *files)) == 1
    assert (tmp_path / "r.json.partial.jsonl").read_text() == '{"mine": 1}\n'
    (tmp_path / "r.json.partial.jsonl").unlink()
    assert main(options(place, *files, "--target", "./nowhere")) == 1
    assert list(tmp_path.iterdir()) == []  # a failed start leaves nothing

"""Answers and invented prompts: ids, spans, waves, and what a kill leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from heads.adapter import find_adapter
from infer.baseline import decode_plain
from infer.stopping import StopRule
from tests.adapters import adapted, save_adapter
from tests.tiny import VOCAB, library_greedy, tiny_model, tiny_target, tiny_tokenizer
from train.answering import Answerer, Wave, is_degenerate, template_parts
from train.config import DataConfig, TargetConfig
from train.conversations import Conversation
from train.regenerate import make_rows, wave_key


def _prompt(name: str, *texts: str) -> Conversation:
    return Conversation(name, "t", tuple({"role": "user", "content": text} for text in texts))


def test_template_parts() -> None:
    parts = template_parts(tiny_tokenizer())
    assert parts.before_user == "<|user|>"
    assert parts.after_user == "<|end|><|assistant|>"
    assert parts.between == "<|end|><|user|>"
    with pytest.raises(ValueError, match="chat template"):
        template_parts(tiny_tokenizer(chat=False))


def test_greedy_answers_are_the_targets_own() -> None:
    target, tokenizer = tiny_target("llama"), tiny_tokenizer()
    data = DataConfig(greedy_fraction=1.0, answer_tokens=30, max_length=200, prompt_tokens=20)
    prompts = (_prompt("a", "hello there"), _prompt("b", "hi"), _prompt("c", "something much longer than that"))
    result = Answerer(target, tokenizer, data).run(Wave(0, 3, prompts))
    rows = {row["id"]: row for row in result["rows"]}
    assert result["counts"]["rows_in"] == 3 and len(rows) + sum(result["counts"]["reasons"].values()) == 3
    for prompt in prompts:
        text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected = library_greedy(tiny_model("llama"), ids, 30, eos=tokenizer.eos_token_id)
        if prompt.id in rows:
            row = rows[prompt.id]
            assert row["input_ids"] == (*ids, *expected) or list(row["input_ids"]) == ids + expected
            assert [list(span) for span in row["spans"]] == [[len(ids), len(ids) + len(expected)]]
            assert row["truncated"] == (expected[-1] != tokenizer.eos_token_id)
    assert rows, "every answer was dropped: the test shows nothing"


def test_turns_are_answered_in_order() -> None:
    """A token that the greedy answer holds is declared the end of turn, so that there is a second turn."""
    target, tokenizer = tiny_target("llama"), tiny_tokenizer()
    first = tokenizer("<|user|>one<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
    answer, _ = decode_plain(target, first, StopRule(frozenset(), 12))
    answerer = Answerer(target, tokenizer, DataConfig(greedy_fraction=1.0, answer_tokens=12))
    end = answer[5]
    answerer.stops = frozenset({end})
    result = answerer.run(Wave(0, 1, (_prompt("a", "one", "two"),)))
    (row,) = result["rows"]
    ids, spans = list(row["input_ids"]), [tuple(s) for s in row["spans"]]
    length = answer.index(end) + 1
    assert spans[0] == (len(first), len(first) + length) and ids[slice(*spans[0])] == answer[:length]
    glue = tokenizer("<|end|><|user|>two<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
    assert ids[spans[0][1] : spans[1][0]] == glue
    again, _ = decode_plain(target, ids[: spans[1][0]], StopRule(frozenset({end}), 12))
    assert ids[slice(*spans[1])] == again and spans[1][1] == len(ids)


def test_rows_stay_within_max_length() -> None:
    target, tokenizer = tiny_target("llama"), tiny_tokenizer()
    data = DataConfig(answer_tokens=50, max_length=40, prompt_tokens=20, greedy_fraction=1.0)
    prompts = (_prompt("short", "abc"), _prompt("long", "x" * 60))
    result = Answerer(target, tokenizer, data).run(Wave(0, 2, prompts))
    assert result["counts"]["reasons"].get("prompt longer than data.max_length") == 1
    assert all(len(row["input_ids"]) <= 40 for row in result["rows"])


def test_degenerate_text() -> None:
    generator = torch.Generator().manual_seed(0)
    varied = torch.randint(0, VOCAB, (200,), generator=generator).tolist()
    assert not is_degenerate(varied)
    assert is_degenerate(varied[:10] * 20)
    assert not is_degenerate([1] * 20)  # too short to say


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_waves_do_not_depend_on_processes_nor_on_a_kill(target_dir: str, tmp_path: Path) -> None:
    target = TargetConfig(path=target_dir)
    prompts = [_prompt(str(i), f"question {i}") for i in range(6)]

    def make(name: str, processes: int) -> list[object]:
        data = DataConfig(
            path="x", answers="regenerate", work_dir=str(tmp_path / name), batch_size=2, answer_tokens=16,
            max_length=200,
            processes=processes, greedy_fraction=0.5,
        )  # fmt: skip
        return list(make_rows(target, data, prompts, log=lambda text: None)[0])

    one = make("one", 1)
    assert one == make("two", 2) and len(one) > 3
    waves = sorted((tmp_path / "one/waves").glob("*.json"))
    assert len(waves) == 3
    waves[1].unlink()  # what a kill leaves: whole waves or none
    (tmp_path / "one/waves/000001.json.tmp-1").write_text("{")
    assert make("one", 1) == one
    key = json.loads((tmp_path / "one/waves.json").read_text())
    assert key["data.top_k"] == 100
    data = DataConfig(
        path="x", answers="regenerate", work_dir=str(tmp_path / "one"), batch_size=2, top_k=5, max_length=200
    )
    with pytest.raises(ValueError, match="top_k"):
        make_rows(target, data, prompts, log=lambda text: None)


def test_the_targets_adapter_answers_too(target_dir: str, tmp_path: Path) -> None:
    """In the worker processes; and its name and contents are part of what the answers depend on."""
    adapter = str(save_adapter(tmp_path / "lora"))
    prompts = [_prompt(str(i), f"question {i}") for i in range(2)]
    data = DataConfig(
        path="x", answers="regenerate", work_dir=str(tmp_path / "data"), batch_size=2, answer_tokens=16,
        max_length=200, processes=1, greedy_fraction=1.0,
    )  # fmt: skip
    target = TargetConfig(path=target_dir, adapter=adapter)
    rows, _ = make_rows(target, data, prompts, log=lambda text: None)
    tokenizer, wrapped = tiny_tokenizer(), adapted(tiny_model("llama"))
    assert rows
    for row in rows:
        start, end = row.spans[0]
        ids = torch.tensor([row.input_ids[:start]])
        found = wrapped.generate(
            input_ids=ids, max_new_tokens=16, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0
        )
        answer = found[0, start:].tolist()
        assert list(row.input_ids[start:end]) == answer
        assert library_greedy(tiny_model("llama"), list(row.input_ids[:start]), end - start) != answer
    key = wave_key(target, data, prompts)
    assert key["adapter"] == adapter and key["adapter_sha256"] == find_adapter(adapter).sha256
    with pytest.raises(ValueError, match=r"adapter: there .*lora', asked None"):
        make_rows(TargetConfig(path=target_dir), data, prompts, log=lambda text: None)
    save_adapter(tmp_path / "lora", seed=4)  # the same place, another adapter
    with pytest.raises(ValueError, match="adapter_sha256: there"):
        make_rows(target, data, prompts, log=lambda text: None)


def test_self_synthesis_refuses_a_target_that_writes_nothing_usable(target_dir: str, tmp_path: Path) -> None:
    """The tiny target never ends a turn, so every invented prompt is dropped, and the stage must end and say so."""
    data = DataConfig(work_dir=str(tmp_path), batch_size=4, prompt_tokens=8, processes=1, max_length=200)
    with pytest.raises(ValueError, match="not finished"):
        make_rows(TargetConfig(path=target_dir), data, None, log=lambda text: None)

"""Answers and invented prompts: ids, spans, and rows that do not depend on processes, kills, or each other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import train.regenerate
from heads.adapter import find_adapter
from infer.baseline import decode_plain
from infer.batched import BatchedDecoder, Program
from infer.stopping import StopRule
from tests.adapters import adapted, save_adapter
from tests.tiny import VOCAB, library_greedy, tiny_model, tiny_target, tiny_tokenizer
from train.answer_store import AnswerWriter
from train.answering import OTHER_ROLES, TOO_LONG, Answer, Answerer, is_degenerate, row_keys, template_parts
from train.config import DataConfig, TargetConfig
from train.conversations import Conversation, DropCounts, TokenRow, write_rows
from train.regenerate import answers_key, answers_record
from train.work import Work, invented_key

ROOT = Path(__file__).resolve().parents[1]
EOS = tiny_tokenizer().eos_token_id


def _prompt(name: str, *texts: str) -> Conversation:
    return Conversation(name, "t", tuple({"role": "user", "content": text} for text in texts))


def _quiet(text: str) -> None:
    pass


def make_rows(*args: Any, **kwargs: Any) -> tuple[list[TokenRow], DropCounts]:
    rows, counts = train.regenerate.make_rows(*args, **kwargs)
    return list(rows), counts


# --- one row --------------------------------------------------------------------------------------------------


def run_programs(
    data: DataConfig, make: Callable[[Answerer], Sequence[Program[Answer]]], stops: set[int] | None = None
) -> list[Answer]:
    answerer = Answerer(tiny_tokenizer(), {EOS} if stops is None else stops, data)
    found: list[Answer] = []
    decoder = BatchedDecoder(tiny_target("llama"), 3, data.max_length, data.top_k, answerer.stops)
    decoder.run(make(answerer), found.append)
    return found


def answers(data: DataConfig, *prompts: Conversation, stops: set[int] | None = None) -> dict[str, Answer]:
    found = run_programs(data, lambda a: [a.answer(p.id, p.messages) for p in prompts], stops)
    assert sorted(answer.key for answer in found) == sorted(prompt.id for prompt in prompts)
    return {answer.key: answer for answer in found}


def test_template_parts() -> None:
    parts = template_parts(tiny_tokenizer())
    assert parts.before_user == "<|user|>"
    assert parts.after_user == "<|end|><|assistant|>"
    with pytest.raises(ValueError, match="chat template"):
        template_parts(tiny_tokenizer(chat=False))


def test_greedy_answers_are_the_targets_own() -> None:
    tokenizer = tiny_tokenizer()
    data = DataConfig(greedy_fraction=1.0, answer_tokens=30, max_length=200, prompt_tokens=20)
    prompts = (_prompt("a", "hello there"), _prompt("b", "hi"), _prompt("c", "something much longer than that"))
    found = answers(data, *prompts)
    for prompt in prompts:
        text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected = library_greedy(tiny_model("llama"), ids, 30, eos=EOS)
        row = found[prompt.id]
        assert row.reason is None
        assert list(row.input_ids) == ids + expected
        assert row.spans == ((len(ids), len(ids) + len(expected)),) and row.tokens == len(expected)
        assert row.truncated == (expected[-1] != EOS)


def test_turns_are_answered_in_order() -> None:
    """A token that the greedy answer holds is declared the end of turn, so that there is a second turn.

    Answers that were there are left out, and a system prompt is kept.
    """
    target, tokenizer = tiny_target("llama"), tiny_tokenizer()
    first = tokenizer("<|system|>be brief<|end|><|user|>one<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
    answer, _ = decode_plain(target, first, StopRule(frozenset(), 12))
    end = answer[5]
    roles = [("system", "be brief"), ("user", "one"), ("assistant", "old"), ("user", "two")]
    prompt = Conversation("a", "t", tuple({"role": role, "content": text} for role, text in roles))
    row = answers(DataConfig(greedy_fraction=1.0, answer_tokens=12), prompt, stops={end})["a"]
    ids, spans = list(row.input_ids), row.spans
    length = answer.index(end) + 1
    assert spans[0] == (len(first), len(first) + length) and ids[slice(*spans[0])] == answer[:length]
    glue = tokenizer("<|end|><|user|>two<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
    assert ids[spans[0][1] : spans[1][0]] == glue
    again, _ = decode_plain(target, ids[: spans[1][0]], StopRule(frozenset({end}), 12))
    assert ids[slice(*spans[1])] == again and spans[1][1] == len(ids)


def test_an_end_of_turn_is_not_there_twice() -> None:
    """The template writes <|end|> after an answer; an answer that ended so brought its own."""
    target, tokenizer = tiny_target("llama"), tiny_tokenizer()
    first = tokenizer("<|user|>one<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
    answer, _ = decode_plain(target, first, StopRule(frozenset(), 12))
    row = answers(
        DataConfig(greedy_fraction=1.0, answer_tokens=12), _prompt("a", "one", "two"), stops={answer[5], EOS}
    )["a"]
    glue = tokenizer("<|user|>two<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
    assert list(row.input_ids[row.spans[0][1] : row.spans[1][0]]) == glue


def test_templates_that_drop_earlier_answers_are_refused_for_several_turns() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("m in messages", "m in messages if m['role'] == 'user'")
    program = Answerer(tokenizer, {EOS}, DataConfig()).answer("k", _prompt("a", "one", "two").messages)
    next(program)
    with pytest.raises(ValueError, match="alters or drops earlier answers"):
        program.send([1, 2, EOS])


def test_offered_tools_are_in_the_prompt() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.name }};{% endfor %}" + tokenizer.chat_template
    asked = Conversation("a", "t", _prompt("a", "one", "two").messages, ({"name": "add"},))
    program = Answerer(tokenizer, {EOS}, DataConfig()).program("k", asked)
    first = next(program).ids
    assert tokenizer.decode(first) == "add;<|user|>one<|end|><|assistant|>"
    second = program.send([7, EOS]).ids
    assert tokenizer.decode(second[len(first) + 2 :]) == "<|user|>two<|end|><|assistant|>"


def test_rows_stay_within_max_length() -> None:
    data = DataConfig(answer_tokens=50, max_length=40, prompt_tokens=20, greedy_fraction=1.0)
    found = answers(data, _prompt("short", "abc"), _prompt("long", "x" * 60))
    assert found["long"] == Answer("long", TOO_LONG)
    assert found["short"].truncated and len(found["short"].input_ids) == 40


def test_other_roles_are_dropped_with_a_reason() -> None:
    roles = ("user", "assistant", "tool", "user")
    prompt = Conversation("a", "t", tuple({"role": role, "content": "x"} for role in roles))
    assert answers(DataConfig(), prompt) == {"a": Answer("a", OTHER_ROLES)}


def test_the_mix_of_temperatures_and_the_draws_follow_key_and_seed() -> None:
    keys = [str(i) for i in range(600)]
    answerer = Answerer(tiny_tokenizer(), {EOS}, DataConfig(greedy_fraction=0.7, answer_temperature=0.9))
    greedy = [answerer.temperature(key) == 0.0 for key in keys]
    assert {answerer.temperature(key) for key in keys} == {0.0, 0.9}
    assert abs(sum(greedy) / len(keys) - 0.7) < 0.1  # 5 standard deviations
    other = Answerer(tiny_tokenizer(), {EOS}, DataConfig(seed=1, greedy_fraction=0.7))
    assert greedy != [other.temperature(key) == 0.0 for key in keys]
    seeds = {next(a.answer(key, _prompt(key, "x").messages)).seed for a in (answerer, other) for key in keys}
    assert len(seeds) == 2 * len(keys)


def test_equal_conversations_have_keys_of_their_own() -> None:
    same, other = _prompt("a", "x"), _prompt("b", "y")
    keys = list(row_keys([same, other, same, same]))
    assert len(set(keys)) == 4 and keys[:2] == list(row_keys([same, other]))
    assert sorted(keys) == sorted(row_keys([same, same, other, same]))


def test_an_invented_prompt_becomes_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Driven by hand: what the user turn is rendered to, and what each fault of it is called."""
    tokenizer = tiny_tokenizer()
    answerer = Answerer(tokenizer, {EOS}, DataConfig(prompt_temperature=1.3, prompt_tokens=50))
    words = tokenizer("what is it", add_special_tokens=False)["input_ids"]

    def outcome(new: list[int]) -> Any:
        program = answerer.invent("self-3")
        request = next(program)
        assert list(request.ids) == answerer.prefix() == tokenizer("<|user|>")["input_ids"]
        assert (request.max_new_tokens, request.temperature) == (50, 1.3)
        try:
            return program.send(new)
        except StopIteration as stop:
            return stop.value.reason

    asked = outcome([*words, EOS])
    expected = tokenizer("<|user|>what is it<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
    assert list(asked.ids) == expected
    assert outcome(words) == outcome([]) == "invented prompt not finished"
    assert outcome([words[0], EOS]) == "invented prompt too short"
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    assert outcome([*words, user, *words, EOS]) == "invented prompt holds special tokens"
    assert outcome([*(words[:5] * 20), EOS]) == "invented prompt repeats itself"


def test_degenerate_text() -> None:
    generator = torch.Generator().manual_seed(0)
    varied = torch.randint(0, VOCAB, (200,), generator=generator).tolist()
    assert not is_degenerate(varied)
    assert is_degenerate(varied[:10] * 20)
    assert not is_degenerate([1] * 20)  # too short to say


# --- all rows -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


class Inline:
    """A team of one, in this process: what `_Processes` runs, without the start of a process."""

    runs = 0

    def __init__(self, target: TargetConfig, data: DataConfig, work: Work, folder: Path, device: str) -> None:
        train.regenerate._work = work
        Inline.runs += 1
        threads = torch.get_num_threads()
        train.regenerate._run_process(target, data, folder, device, data.batch_size, os.getppid())
        torch.set_num_threads(threads)

    def wait(self, seconds: float) -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.regenerate._Processes", Inline)
    Inline.runs = 0


PROMPTS = [_prompt(str(i), f"question {i}" + "!" * (i % 5)) for i in range(11)]


def _data(folder: Path, **changes: Any) -> DataConfig:
    settings: dict[str, Any] = {"batch_size": 4, "answer_tokens": 16, "max_length": 200, "greedy_fraction": 0.5}
    return DataConfig(**{"path": "x", "answers": "regenerate", "work_dir": str(folder), **settings, **changes})


def test_rows_do_not_depend_on_processes(target_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetConfig(path=target_dir)
    monkeypatch.setattr("train.regenerate._Processes", Inline)
    one, counts = make_rows(target, _data(tmp_path / "one"), PROMPTS, log=_quiet)
    assert (counts.rows_in, counts.rows_out) == (11, len(one)) and len(one) > 8
    assert [row.id for row in one] == [prompt.id for prompt in PROMPTS if prompt.id in {row.id for row in one}]
    assert answers_record(tmp_path / "one") == {
        "by": "this program", "exact": True, "rows": len(one), "reencoded_rows": 0
    }  # fmt: skip
    lines: list[str] = []
    monkeypatch.undo()
    two, _ = make_rows(target, _data(tmp_path / "two", processes=2), PROMPTS, log=lines.append)
    assert two == one
    assert "100% answered" in lines[-1] and "tokens/s decoded" in lines[-1]


def test_shuffled_and_further_prompts_reuse_what_is_there(target_dir: str, tmp_path: Path, inline: None) -> None:
    """Answers go by content: no row is lost, none made twice, and ids and sources are those of the new file."""
    target, data = TargetConfig(path=target_dir), _data(tmp_path)
    first = {row.id: row for row in make_rows(target, data, PROMPTS[:7], log=_quiet)[0]}
    renamed = [Conversation(f"new {p.id}", "u", p.messages) for p in reversed(PROMPTS)]
    second, _ = make_rows(target, data, renamed, log=_quiet)
    keys = [json.loads(line)["key"] for path in sorted((tmp_path / "answers").iterdir()) for line in path.open()]
    assert len(keys) == len(set(keys)) == len(PROMPTS)
    assert all(row.id.startswith("new ") and row.source == "u" for row in second)
    again = {row.id.removeprefix("new "): row for row in second}
    assert first.keys() <= again.keys()
    assert all(again[name].input_ids == row.input_ids for name, row in first.items())
    assert make_rows(target, data, PROMPTS[:7], log=_quiet)[0] == list(first.values())
    assert Inline.runs == 2  # the last call had nothing to do


def test_whatever_a_kill_leaves_the_rows_become_the_same(target_dir: str, tmp_path: Path, inline: None) -> None:
    """A killed writer leaves a prefix of the bytes that it would have written. At many lengths of it, and from there
    on once more; batches are then made of other rows, and the files of rows must be the same to the byte."""
    target = TargetConfig(path=target_dir)

    def rows_file(folder: Path) -> bytes:
        write_rows(folder / "rows.jsonl", make_rows(target, _data(folder), PROMPTS, log=_quiet)[0])
        return (folder / "rows.jsonl").read_bytes()

    whole = rows_file(tmp_path / "whole")
    (part,) = (tmp_path / "whole/answers").glob("part-*.jsonl")
    written = part.read_bytes()
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randint(1, len(written), (6, 2), generator=generator).tolist()
    for number, (first, second) in enumerate([*cuts, [0, 1], [len(written) - 1, 5]]):
        folder = tmp_path / str(number)
        (folder / "answers").mkdir(parents=True)
        (folder / "answers" / part.name).write_bytes(written[:first])
        assert rows_file(folder) == whole
        for rest in (folder / "answers").iterdir():  # the second run is killed, too
            if rest.name != part.name:
                rest.write_bytes(rest.read_bytes()[:second])
        assert rows_file(folder) == whole
        lines = [line for rest in (folder / "answers").iterdir() for line in rest.read_bytes().split(b"\n")]
        keys = [json.loads(line)["key"] for line in lines if line.endswith(b"}")]
        assert len(set(keys)) == len(PROMPTS)


def test_answers_of_other_settings_are_refused(target_dir: str, tmp_path: Path, inline: None) -> None:
    target = TargetConfig(path=target_dir)
    make_rows(target, _data(tmp_path), PROMPTS[:2], log=_quiet)
    for change in ({"top_k": 5}, {"seed": 3}, {"answer_tokens": 9}, {"max_length": 180}, {"batch_size": 5}):
        (name, value), *_ = change.items()
        with pytest.raises(ValueError, match=rf"data.work_dir: .* \(data.{name}: there .*, asked {value}\)"):
            make_rows(target, _data(tmp_path, **change), PROMPTS[:2], log=_quiet)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += " "
    tokenizer.save_pretrained(tmp_path / "other")
    tiny_model("llama").save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"target: there .*template: there"):
        make_rows(TargetConfig(path=str(tmp_path / "other")), _data(tmp_path), PROMPTS[:2], log=_quiet)


def test_the_targets_adapter_answers_too(target_dir: str, tmp_path: Path, inline: None) -> None:
    """And its name and contents are part of what the answers depend on."""
    adapter = str(save_adapter(tmp_path / "lora"))
    data = _data(tmp_path / "data", greedy_fraction=1.0)
    target = TargetConfig(path=target_dir, adapter=adapter)
    rows, _ = make_rows(target, data, PROMPTS[:2], log=_quiet)
    wrapped = adapted(tiny_model("llama"))
    assert rows
    for row in rows:
        start, end = row.spans[0]
        ids = torch.tensor([row.input_ids[:start]])
        seen = torch.ones_like(ids)  # else it is guessed from where id 0 is
        settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": EOS, "pad_token_id": 0}
        found = wrapped.generate(input_ids=ids, attention_mask=seen, **settings)
        answer = found[0, start:].tolist()
        assert list(row.input_ids[start:end]) == answer
        assert library_greedy(tiny_model("llama"), list(row.input_ids[:start]), end - start) != answer
    key = answers_key(target, data, PROMPTS)
    assert key["adapter"] == adapter and key["adapter_sha256"] == find_adapter(adapter).sha256
    with pytest.raises(ValueError, match=r"adapter: there .*lora', asked None"):
        make_rows(TargetConfig(path=target_dir), data, PROMPTS[:2], log=_quiet)
    save_adapter(tmp_path / "lora", seed=4)  # the same place, another adapter
    with pytest.raises(ValueError, match="adapter_sha256: there"):
        make_rows(target, data, PROMPTS[:2], log=_quiet)


# --- self-synthesis -------------------------------------------------------------------------------------------


def test_self_synthesis_refuses_a_target_that_writes_nothing_usable(target_dir: str, tmp_path: Path) -> None:
    """The tiny target never ends a turn, so every invented prompt is dropped, and the stage must end and say so."""
    data = DataConfig(work_dir=str(tmp_path), batch_size=4, prompt_tokens=8, max_length=200, tokens=500, processes=1)
    with pytest.raises(ValueError, match=r"no usable row \(0 of \d+ rows kept, \d+ dropped \(invented prompt not"):
        make_rows(TargetConfig(path=target_dir), data, None, log=_quiet)


class Inventing:
    """A team that finishes invented rows in an order of its own, with a number of tokens that only the key decides."""

    def __init__(self, target: TargetConfig, data: DataConfig, work: Work, folder: Path, device: str) -> None:
        self._rows, self._held = iter(work), list[str]()
        self._writer = AnswerWriter(folder)
        self.taken = 0
        Inventing.last = self

    last: Inventing

    def wait(self, seconds: float) -> bool:
        while len(self._held) < 7 and (task := next(self._rows, None)) is not None:
            self.taken += 1
            self._held.append(task.key)
        if self._held:
            key = self._held.pop(-1 if len(self._held) % 3 else 0)
            number = int(key.partition("-")[2])
            reason = "invented prompt too short" if number % 3 == 0 else None
            ids = tuple(range(number, number + 12 + number % 5))
            self._writer.write(Answer(key, reason) if reason else Answer(key, None, ids, ((4, len(ids)),)))
        return False

    def close(self) -> None:
        pass


def test_invented_rows_are_the_first_that_reach_the_budget(
    target_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever order they end in, after a kill and from another start, and without many in vain."""
    monkeypatch.setattr("train.regenerate._Processes", Inventing)

    def make(name: str) -> list[TokenRow]:
        data = DataConfig(work_dir=str(tmp_path / name), batch_size=8, tokens=300, answer_tokens=16, max_length=200)
        rows, counts = make_rows(TargetConfig(path=target_dir), data, None, log=_quiet)
        assert counts.rows_in == int(rows[-1].id.partition("-")[2]) + 1
        return rows

    rows = make("a")
    assert sum(row.supervised for row in rows) >= 300 > sum(row.supervised for row in rows[:-1])
    wanted = [number for number in range(1000) if number % 3][: len(rows)]
    assert [row.id for row in rows] == [invented_key(number) for number in wanted]
    assert Inventing.last.taken < 1.3 * wanted[-1] + 16
    (part,) = (tmp_path / "a/answers").iterdir()
    (tmp_path / "b/answers").mkdir(parents=True)
    (tmp_path / "b/answers" / part.name).write_bytes(part.read_bytes()[:700])
    assert make("b") == rows


# --- kill -9 --------------------------------------------------------------------------------------------------


@pytest.mark.slow  # five times a main process and two others
def test_kill_9_of_main_process_worker_and_all(target_dir: str, tmp_path: Path) -> None:
    prompts = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(100)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))

    def command(name: str) -> list[str]:
        config = {
            "target": {"path": target_dir, "device": "cpu"},
            "data": {
                "path": str(tmp_path / "prompts.jsonl"), "answers": "regenerate", "work_dir": str(tmp_path / name),
                "batch_size": 4, "answer_tokens": 150, "max_length": 250, "greedy_fraction": 0.5, "processes": 2,
            },
            "train": {"max_steps": 1},
        }  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(json.dumps(config))
        return [sys.executable, str(ROOT / "scripts/make_conversations.py"), "--config", str(tmp_path / f"{name}.yaml")]

    folder = tmp_path / "killed"

    def finished() -> int:
        return sum(path.read_bytes().count(b"\n") for path in (folder / "answers").glob("part-*.jsonl"))

    def runs(process: int) -> bool:
        try:
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def kill(victim: str) -> None:
        before = finished()
        process = subprocess.Popen(
            command("killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        while finished() <= before + 2:
            if process.poll() is not None:
                assert process.returncode == 0
                return
            time.sleep(0.01)
        children = [
            int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ]
        if victim == "worker":
            os.kill(children[-1], signal.SIGKILL)
            late = finished() > len(prompts) // 2
            assert process.wait() == 1 or late  # it says so and keeps what is finished
            assert finished() < len(prompts) - 10 or late, "it waited for the other one"
        elif victim == "main":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while any(map(runs, children)):  # without their main process they end by themselves
            time.sleep(0.01)

    whole = subprocess.run(command("whole"), check=True, capture_output=True, text=True)
    assert "leaked" not in whole.stderr
    folder.mkdir()
    for victim in ("main", "worker", "group"):
        for _ in range(5):  # on a busy machine a kill can come when all is done: once more, from where it began
            shutil.copytree(folder, tmp_path / "start", dirs_exist_ok=True)
            kill(victim)
            if finished() < len(prompts):
                break
            shutil.rmtree(folder)
            (tmp_path / "start").rename(folder)
        shutil.rmtree(tmp_path / "start")
        assert finished() < len(prompts), "every kill came too late"
    subprocess.run(command("killed"), check=True, capture_output=True)
    for name in ("rows_train.jsonl", "rows_held_out.jsonl", "held_out_prompts.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()

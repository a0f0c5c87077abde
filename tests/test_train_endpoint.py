"""Answers by a server: a real HTTP server on this machine that speaks the protocol, and its faults."""

from __future__ import annotations

import email.utils
import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import train.endpoint
from scripts.make_conversations import main
from tests.endpoint_server import EOS, TOKENIZER, Answer, Fake, encode
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from train.answering import OTHER_ROLES, REFUSED
from train.config import DataConfig, TargetConfig, load_config
from train.conversations import Conversation
from train.endpoint import Server
from train.regenerate import answers_record, make_rows


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.endpoint, "_FIRST_DELAY", 0.002)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer and a config; no weights, which a server's answers do not need."""
    folder = tmp_path_factory.mktemp("target")
    tiny_model("llama").config.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def _prompt(name: str, *texts: str) -> Conversation:
    return Conversation(name, "t", tuple({"role": "user", "content": text} for text in texts))


PROMPTS = [_prompt(str(i), f"question {i}", *(["and then?"] if i % 3 == 0 else [])) for i in range(12)]


def _data(fake: Fake, folder: Path, **changes: Any) -> DataConfig:
    settings: dict[str, Any] = {
        "answer_tokens": 20,
        "max_length": 200,
        "endpoint_concurrency": 4,
        "endpoint_retries": 4,
    }
    settings |= {"path": "x", "answers": "regenerate", "work_dir": str(folder), "endpoint": fake.url, **changes}
    return DataConfig(**settings)


def _make(fake: Fake, target_dir: str, folder: Path, *prompts: Conversation, **changes: Any) -> tuple[Any, list[str]]:
    lines: list[str] = []
    rows, counts = make_rows(
        TargetConfig(path=target_dir), _data(fake, folder, **changes), prompts or PROMPTS, log=lines.append
    )
    return (list(rows), counts), lines


def _expected(prompt: Conversation, most: int = 20) -> tuple[list[int], list[list[int]]]:
    """Ids and spans: the rendered prompt, the server's ids, the template's glue, and so on."""
    ids, spans = encode("<|user|>"), []
    for number, message in enumerate(prompt.messages):
        ids += encode(("<|user|>" if number else "") + message["content"] + "<|end|><|assistant|>")
        new, finish = Fake.words(ids, most)
        spans.append([len(ids), len(ids) + len(new)])
        ids += new
        if finish == "length":
            break
    return ids, spans


# --- answers --------------------------------------------------------------------------------------------------


def test_ids_are_the_servers_own(fake: Fake, target_dir: str, tmp_path: Path) -> None:
    (rows, counts), _ = _make(fake, target_dir, tmp_path)
    assert [row.id for row in rows] == [prompt.id for prompt in PROMPTS] and counts.rows_in == 12
    for row, prompt in zip(rows, PROMPTS, strict=True):
        ids, spans = _expected(prompt)
        assert list(row.input_ids) == ids and [list(span) for span in row.spans] == spans and not row.truncated
    record = {"by": fake.url, "model": "tiny", "rows": 12, "reencoded_rows": 0}
    assert answers_record(tmp_path) == record
    asked = [payload for path, payload, _ in fake.requests if path == "/v1/completions" and payload["max_tokens"] > 1]
    assert len(asked) == 16 and all(payload["return_token_ids"] and payload["model"] == "tiny" for payload in asked)
    assert all(payload["stop_token_ids"] == [EOS] and payload["top_p"] == 1 for payload in asked)
    greedy = [payload for payload in asked if payload["temperature"] == 0]
    assert 0 < len(greedy) < 16 and all("top_k" not in payload for payload in greedy)
    assert all(p["top_k"] == 100 and p["temperature"] == 0.7 for p in asked if p not in greedy)
    assert len({payload["seed"] for payload in asked}) == 16


@pytest.mark.parametrize("extras", [True, False])
def test_text_is_encoded_by_the_template_and_that_is_said(target_dir: str, tmp_path: Path, extras: bool) -> None:
    fake, kwargs = Fake(ids=False, extras=extras), {"not_in_this_template": True}
    (rows, _), lines = _make(fake, target_dir, tmp_path, template_kwargs=kwargs)
    fake.close()
    assert len(rows) == 12
    for row, prompt in zip(rows, PROMPTS, strict=True):
        ids, spans = _expected(prompt)  # this text and tokenizer give the same ids
        assert list(row.input_ids) == ids and [list(span) for span in row.spans] == spans and not row.truncated
    assert answers_record(tmp_path) == {"by": fake.url, "model": "tiny", "rows": 12, "reencoded_rows": 12}
    assert any("12 of 12 rows came as text and were encoded anew" in line for line in lines)
    assert any("does not take top_k" in line for line in lines) is not extras
    last = fake.requests[-1][1]
    assert ("min_p" in last) is extras and last["chat_template_kwargs"] == kwargs


def test_cut_answers_are_marked_and_have_no_end_of_turn(target_dir: str, tmp_path: Path) -> None:
    for ids in (True, False):
        fake = Fake(ids=ids)
        (rows, _), _ = _make(fake, target_dir, tmp_path / str(ids), answer_tokens=5)
        fake.close()
        cut = [row for row in rows if row.truncated]
        assert 0 < len(cut) < len(rows)
        for row in rows:
            prompt = PROMPTS[int(row.id)]
            expected, spans = _expected(prompt, 5)
            assert list(row.input_ids) == expected and [list(span) for span in row.spans] == spans
            assert row.truncated == (row.input_ids[row.spans[-1][1] - 1] != EOS)


def test_what_a_server_adds_is_cut_off(fake: Fake, target_dir: str, tmp_path: Path) -> None:
    """One that does not stop at our end of turn, and one that gives more than was asked for."""
    whole = fake.completion

    def longer(payload: Any) -> Any:
        answer = whole(payload)
        answer["choices"][0]["token_ids"] += [1, 2, 3] * 10
        return answer

    fake.completion = longer  # type: ignore[method-assign]
    (rows, _), _ = _make(fake, target_dir, tmp_path)
    assert [list(row.input_ids) for row in rows] == [_expected(prompt)[0] for prompt in PROMPTS]


def test_reasoning_stays_with_the_answer(tmp_path: Path) -> None:
    """A server that splits thoughts off: the template gets them back."""
    tokenizer = tiny_tokenizer()
    thoughts = "{% if m['reasoning_content'] is defined %}({{ m['reasoning_content'] }}){% endif %}{{ m['content'] }}"
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ m['content'] }}", thoughts)
    tiny_model("llama").config.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    fake = Fake(ids=False)
    message = {"role": "assistant", "content": "so", "reasoning_content": "why"}
    fake.chat = lambda payload: {"choices": [{"message": message, "finish_reason": "stop"}]}  # type: ignore[method-assign]
    (rows, _), _ = _make(fake, str(tmp_path / "target"), tmp_path / "data", _prompt("a", "x"))
    fake.close()
    (start, stop) = rows[0].spans[0]
    assert TOKENIZER.decode(list(rows[0].input_ids[start:stop])) == "(why)so<|end|>"


@pytest.mark.parametrize(("arguments", "text"), [('{"x": 2}', 'add{"x": 2}<|end|>'), ("{x", None)])
def test_tools_are_offered_and_a_call_ends_the_row(tmp_path: Path, arguments: str, text: str | None) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.name }};{% endfor %}" + CHAT_TEMPLATE.replace(
        "{{ m['content'] }}",
        "{{ m['content'] }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "{% endfor %}",
    )
    tiny_model("llama").config.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    fake = Fake(ids=False)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    fake.chat = lambda payload: {"choices": [{"message": said, "finish_reason": "tool_calls"}]}  # type: ignore[method-assign]
    asked = Conversation("a", "t", _prompt("a", "x", "and?").messages, ({"name": "add"},))
    try:
        if text is None:  # what cannot be told is no answer
            with pytest.raises(ValueError, match="empty answer"):
                _make(fake, str(tmp_path / "target"), tmp_path / "data", asked)
            return
        (rows, _), _ = _make(fake, str(tmp_path / "target"), tmp_path / "data", asked)
    finally:
        fake.close()
    offered = [p["tools"] for _, p, _ in fake.requests if p and p.get("messages", [{}])[0].get("content") == "x"]
    assert offered == [[{"name": "add"}]]
    ((start, stop),) = rows[0].spans
    assert TOKENIZER.decode(list(rows[0].input_ids[start:stop])) == text
    assert TOKENIZER.decode(list(rows[0].input_ids[:start])) == "add;<|user|>x<|end|><|assistant|>"


def test_empty_answers_and_other_roles_are_dropped(target_dir: str, tmp_path: Path) -> None:
    roles = ("user", "assistant", "tool", "user")
    tools = Conversation("tools", "t", tuple({"role": role, "content": "x"} for role in roles))
    for ids in (True, False):
        fake = Fake(ids=ids)

        def words(prompt: list[int], most: int) -> tuple[list[int], str]:
            empty = encode("<|user|>say nothing<|end|><|assistant|>")
            return ([EOS], "stop") if prompt == empty else Fake.words(prompt, most)

        fake.words = words  # type: ignore[method-assign]
        (rows, counts), _ = _make(
            fake, target_dir, tmp_path / str(ids), _prompt("a", "x"), _prompt("b", "say nothing", "and?"), tools,
            endpoint_concurrency=1,
        )  # fmt: skip
        fake.close()
        assert rows[0].id == "a" and counts.reasons[OTHER_ROLES] == 1
        # by ids the conversation goes on behind the bare end of turn; by text it ends there
        assert counts.reasons.get("empty answer", 0) == (0 if ids else 1)


def test_prompts_are_invented_by_ids_only(fake: Fake, target_dir: str, tmp_path: Path) -> None:
    invented = {"path": None, "answers": "keep", "tokens": 60, "batch_size": 4, "prompt_temperature": 1.0}
    seeds = iter(range(10_000))

    def words(prompt: list[int], most: int) -> tuple[list[int], str]:  # as many prompts as there are seeds
        return Fake.words([*prompt, next(seeds)] if prompt == encode("<|user|>") else prompt, most)

    fake.words = words  # type: ignore[method-assign]
    data = _data(fake, tmp_path / "a", **invented)
    made, counts = make_rows(TargetConfig(path=target_dir), data, None, log=lambda text: None)
    rows = list(made)
    assert sum(row.supervised for row in rows) >= 45 and rows[0].id == "self-0"  # less what duplicates had
    assert counts.rows_in == len(rows) + counts.dropped
    fake.ids = False
    with pytest.raises(ValueError, match="takes and gives no token ids, which inventing prompts needs"):
        make_rows(TargetConfig(path=target_dir), _data(fake, tmp_path / "b", **invented), None, log=lambda text: None)


# --- faults ---------------------------------------------------------------------------------------------------


def _fault(kind: str) -> Answer | str:
    date = email.utils.formatdate(time.time() - 5, usegmt=True)
    faults: dict[str, Answer | str] = {
        "500": (500, {"error": "x"}, {}),
        "503": (503, b"busy", {"Retry-After": date}),
        "429": (429, {"error": "slow down"}, {"Retry-After": "0"}),
        "no json": (200, b"{'a'", {}),
        "no choices": (200, {"choices": []}, {}),
        "null": (200, None, {}),
        "ids that are none": (200, {"choices": [{"token_ids": ["a"]}]}, {}),
        "cut": "cut",
        "close": "close",
    }
    return faults[kind]


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        *itertools.product(["500", "503", "429", "no json", "no choices", "null", "cut", "close"], [True, False]),
        ("ids that are none", True),  # text has no ids
    ],
)
def test_passing_faults_change_nothing(target_dir: str, tmp_path: Path, kind: str, ids: bool) -> None:
    """Every request fails once, some three times; the rows are those without faults, none lost, none twice."""
    fake = Fake(ids=ids)

    def faults(path: str, payload: Any, number: int) -> Answer | str | None:
        chosen = path == ("/v1/completions" if ids else "/v1/chat/completions")
        return _fault(kind) if chosen and number < (3 if payload["seed"] % 2 else 1) else None

    fake.faults = faults
    (rows, counts), lines = _make(fake, target_dir, tmp_path)
    fake.close()
    assert [list(row.input_ids) for row in rows] == [_expected(prompt)[0] for prompt in PROMPTS]
    assert counts.reasons == {} and sum("trying again" in line for line in lines) == 1
    keys = [json.loads(line)["key"] for path in (tmp_path / "answers").iterdir() for line in path.open()]
    assert len(keys) == len(set(keys)) == 12


def test_time_outs_are_tried_again(fake: Fake, target_dir: str, tmp_path: Path) -> None:
    def faults(path: str, payload: Any, number: int) -> Answer | None:
        if path == "/v1/completions" and payload["max_tokens"] > 1 and number == 0 and payload["seed"] % 4 == 0:
            time.sleep(0.6)
        return None

    fake.faults = faults
    (rows, _), lines = _make(fake, target_dir, tmp_path, endpoint_timeout=0.2)
    assert [list(row.input_ids) for row in rows] == [_expected(prompt)[0] for prompt in PROMPTS]
    assert any("imed out" in line for line in lines)


def test_a_server_that_stays_down_ends_the_run_and_keeps_what_is_finished(
    fake: Fake, target_dir: str, tmp_path: Path
) -> None:
    served = threading.Semaphore(6)

    def faults(path: str, payload: Any, number: int) -> Answer | None:
        fine = path == "/v1/models" or payload["max_tokens"] == 1 or served.acquire(blocking=False)
        return None if fine else (502, b"", {})

    fake.faults = faults
    with pytest.raises(ValueError, match=r"data.endpoint: http://127.* failed 5 times, .*502.*finished rows are kept"):
        _make(fake, target_dir, tmp_path)
    kept = sum(path.read_text().count("\n") for path in (tmp_path / "answers").iterdir())
    assert 0 < kept < 12
    fake.faults = lambda path, payload, number: None
    before = len(fake.requests)
    (rows, _), _ = _make(fake, target_dir, tmp_path)
    assert [list(row.input_ids) for row in rows] == [_expected(prompt)[0] for prompt in PROMPTS]
    keys = [json.loads(line)["key"] for path in (tmp_path / "answers").iterdir() for line in path.open()]
    assert len(keys) == len(set(keys)) == 12
    again = [p for p, payload, _ in fake.requests[before:] if p == "/v1/completions" and payload["max_tokens"] > 1]
    assert len(again) <= 16 - kept


def test_nothing_there(target_dir: str, tmp_path: Path) -> None:
    fake = Fake()
    fake.close()
    with pytest.raises(ValueError, match=r"failed 2 times, at last with URLError: .*refused"):
        _make(fake, target_dir, tmp_path, endpoint_retries=1)


@pytest.mark.parametrize("ids", [True, False])
def test_a_refused_row_is_dropped_and_counted(target_dir: str, tmp_path: Path, ids: bool) -> None:
    """Too long for the server, for example."""
    fake = Fake(ids=ids)

    def faults(path: str, payload: Any, number: int) -> Answer | None:
        bad = payload and (payload.get("prompt") == encode("<|user|>question 4<|end|><|assistant|>"))
        bad = bad or (payload and payload.get("messages", [{}])[-1].get("content") == "question 4")
        return (400, {"error": "too long"}, {}) if bad else None

    fake.faults = faults
    (rows, counts), _ = _make(fake, target_dir, tmp_path)
    fake.close()
    assert [row.id for row in rows] == [prompt.id for prompt in PROMPTS if prompt.id != "4"]
    assert counts.reasons == {REFUSED: 1}
    assert len([1 for path, payload, _ in fake.requests if "question 4" in json.dumps(payload)]) <= 1  # not asked again


@pytest.mark.parametrize("status", [401, 403, 302, 404])
def test_what_does_not_pass_is_said_at_once(fake: Fake, target_dir: str, tmp_path: Path, status: int) -> None:
    headers = {"Location": "http://127.0.0.1:1/elsewhere"} if status == 302 else {}
    fake.faults = lambda path, payload, number: (status, {"error": "no"}, headers)
    with pytest.raises(ValueError, match=rf"data.endpoint: .* answered /models with {status} .*no"):
        _make(fake, target_dir, tmp_path)
    assert len(fake.requests) == 1


def test_another_model_is_noticed(fake: Fake, target_dir: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"answered /chat/completions with 404 .*no model other"):
        _make(fake, target_dir, tmp_path / "a", endpoint_model="other")
    fake.models = ["one", "two"]
    with pytest.raises(ValueError, match=r"models \['one', 'two'\], expected one: name it in data.endpoint_model"):
        _make(fake, target_dir, tmp_path / "b", endpoint_retries=0)
    (rows, _), _ = _make(fake, target_dir, tmp_path / "c", endpoint_model="two")
    assert len(rows) == 12
    fake.words = lambda prompt, most: ([999, EOS], "stop")  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"gave token id 999, but the tokenizer of target.path has \d+ ids"):
        _make(fake, target_dir, tmp_path / "d", endpoint_model="two")


def test_a_server_that_changes_the_prompt_is_asked_for_text(fake: Fake, target_dir: str, tmp_path: Path) -> None:
    """It puts a token in front, so its answers would be to another prompt than the one trained on."""
    whole = fake.completion

    def prefixed(payload: Any) -> Any:
        answer = whole(payload)
        answer["choices"][0]["prompt_token_ids"] = [1, *payload["prompt"]]
        return answer

    fake.completion = prefixed  # type: ignore[method-assign]
    _, lines = _make(fake, target_dir, tmp_path)
    assert any("12 of 12 rows came as text" in line for line in lines)


def test_pauses_grow_and_follow_the_servers_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.endpoint, "_FIRST_DELAY", 0.5)
    server = Server(DataConfig(path="x", answers="regenerate", endpoint="http://h/v1"), print)
    delays = [server._delay({"a": 1}, attempt) for attempt in range(12)]
    for attempt, delay in enumerate(delays):
        assert 0.5 <= delay / min(60.0, 0.5 * 2**attempt) <= 1.5
    assert len({server._delay({"a": i}, 0) for i in range(50)}) == 50  # clients do not come back together
    seconds = train.endpoint._seconds_of
    assert seconds(None) == seconds("soon") == seconds("-3") == 0 and seconds("7") == 7 and seconds("1e9") == 600
    assert 50 < seconds(email.utils.formatdate(time.time() + 60, usegmt=True)) <= 60


def test_the_key_comes_from_the_environment_and_is_not_told(
    fake: Fake, target_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    _, lines = _make(fake, target_dir, tmp_path / "a", endpoint_key_variable="MY_KEY")
    assert all(headers["Authorization"] == "Bearer sk-very-secret" for _, _, headers in fake.requests)
    fake.faults = lambda path, payload, number: (500, {"error": "key sk-very-secret is over its limit"}, {})
    with pytest.raises(ValueError, match=r"over its limit") as caught:
        _make(fake, target_dir, tmp_path / "b", endpoint_key_variable="MY_KEY")
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any("secret" in text for text in [str(caught.value), *lines, *written])
    monkeypatch.delenv("MY_KEY")
    fake.faults = lambda path, payload, number: None
    fake.requests.clear()
    _make(fake, target_dir, tmp_path / "c", endpoint_key_variable="MY_KEY")
    assert all("Authorization" not in headers for _, _, headers in fake.requests)


# --- settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://h/v1", "http://", "http://me:pass@h/v1", "http://h/v1?key=pass", "http://h:x/v1"]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"data.endpoint is .*expected http") as caught:
        DataConfig(path="x", answers="regenerate", endpoint=url)
    assert "pass" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": "keep"}, "data.answers is 'keep', expected \"regenerate\" when data.endpoint is set"),
        ({"endpoint_concurrency": 0}, "data.endpoint_concurrency is 0"),
        ({"endpoint_timeout": 0.0}, "data.endpoint_timeout is 0"),
        ({"endpoint_retries": -1}, "data.endpoint_retries is -1"),
    ],
)
def test_settings_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**{"path": "x", "answers": "regenerate", "endpoint": "http://h/v1", **change})


def test_the_command_takes_the_endpoint(fake: Fake, target_dir: str, tmp_path: Path) -> None:
    """scripts/make_conversations.py --endpoint URL, from prompts to the stage's files and record."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"turns": [f"q {i}"]}) + "\n" for i in range(9)))
    data = {"path": str(tmp_path / "prompts.jsonl"), "answers": "regenerate", "work_dir": str(tmp_path / "data")}
    config = {"target": {"path": target_dir}, "data": data, "train": {"max_steps": 1}}
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    assert load_config(tmp_path / "c.yaml", [f"data.endpoint={fake.url}"]).data.endpoint == fake.url
    assert main(["--config", str(tmp_path / "c.yaml"), "--endpoint", fake.url]) == 0
    record = json.loads((tmp_path / "data/stage.json").read_text())
    assert record["answers"] == {"by": fake.url, "model": "tiny", "rows": 9, "reencoded_rows": 0}
    assert record["key"]["data.endpoint"] == fake.url and record["train_rows"] + record["held_out_rows"] == 9

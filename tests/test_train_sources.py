"""Reading files, directories and hub ids; mixtures, duplicates, overlap; memory."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.apart import needs_proc, run_apart
from tests.fake_hub import fake_hub
from train import raw_rows as raw_rows_module
from train.config import DataConfig, SourceConfig
from train.conversations import Conversation
from train.overlap import SAME, SHARED, Overlap
from train.raw_rows import fingerprint, raw_rows
from train.sources import Conversations

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
OTHER = {"type": "function", "function": {"name": "say", "arguments": {"text": "x"}}}
PAIRS = [
    [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i} \u2028 🙂"}]
    for i in range(5)
]
PAIRS[3] += [{"role": "user", "content": "more"}, {"role": "assistant", "content": "again"}]


def quiet(text: str) -> None:
    pass


def lines(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(*args: Any, **data: Any) -> list[Conversation]:
    return list(Conversations(DataConfig(**data), *(args or (quiet,))))


def turns(conversations: list[Conversation]) -> list[list[tuple[str, str]]]:
    return [[(m["role"], m["content"]) for m in c.messages] for c in conversations]


EXPECTED = [[(m["role"], m["content"]) for m in pair] for pair in PAIRS]


def sharegpt(pair: list[dict[str, str]]) -> dict[str, Any]:
    names = {"user": "human", "assistant": "gpt"}
    return {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in pair]}


def transcript(pair: list[dict[str, str]]) -> str:
    return "\n\n".join(f"{m['role'].capitalize()}: {m['content']}" for m in pair)


def alpaca(pair: list[dict[str, str]]) -> dict[str, Any]:
    texts = [m["content"] for m in pair]
    history = [list(two) for two in zip(texts[:-2:2], texts[1:-2:2], strict=True)]
    return {"instruction": texts[-2], "input": "", "output": texts[-1], "history": history}


def write_all(folder: Path) -> list[Path]:
    """The same conversations in every layout and file format that can hold whole ones."""
    import datasets

    rows: dict[str, list[Any]] = {
        "messages": [{"messages": pair} for pair in PAIRS],
        "sharegpt": [sharegpt(pair) for pair in PAIRS],
        "alpaca": [alpaca(pair) for pair in PAIRS],
        "pc": [{"prompt": pair[:-1], "completion": pair[-1:]} for pair in PAIRS],
        "text": [{"text": transcript(pair)} for pair in PAIRS],
    }
    for name, some in rows.items():
        lines(folder / f"{name}.jsonl", some)
        (folder / f"{name}.json").write_text(json.dumps(some, indent=1), encoding="utf-8")
        datasets.Dataset.from_list(some).to_parquet(folder / f"{name}.parquet")
    divided = f"\n\n{'-' * 8}\n\n".join(transcript(pair) for pair in PAIRS)
    (folder / "plain.txt").write_text(divided, encoding="utf-8")
    return sorted(folder.iterdir())


def test_every_layout_in_every_format(tmp_path: Path) -> None:
    files = write_all(tmp_path)
    assert len(files) == 16
    for path in files:
        assert turns(read(path=str(path))) == EXPECTED, path.name
        shares = [share for _, share in raw_rows(SourceConfig(str(path)))]
        assert len(shares) == len(PAIRS)
        assert path.suffix == ".parquet" or shares[-1] == 1.0


def test_lists_of_prompts(tmp_path: Path) -> None:
    texts = ["one", "two\u2028still two", "three"]
    expected = [[("user", text)] for text in texts]
    (tmp_path / "a.json").write_text(json.dumps(texts), encoding="utf-8")
    (tmp_path / "a.txt").write_text("\n".join(texts) + "\n\n", encoding="utf-8")
    lines(tmp_path / "a.jsonl", texts)
    lines(tmp_path / "b.jsonl", [{"prompt": text} for text in texts])
    for path in ("a.json", "a.txt", "a.jsonl", "b.jsonl"):
        assert turns(read(path=str(tmp_path / path))) == expected
    (tmp_path / "b.txt").write_text("a\nb\n----------\n\n-- c\n", encoding="utf-8")
    assert turns(read(path=str(tmp_path / "b.txt"))) == [[("user", "a\nb")], [("user", "-- c")]]
    (tmp_path / "c.txt").write_text("User: a\n\nAssistant: b\n", encoding="utf-8")
    assert turns(read(path=str(tmp_path / "c.txt"))) == [[("user", "a"), ("assistant", "b")]]


def test_directories_compressed_files_and_saved_sets(tmp_path: Path) -> None:
    import datasets

    rows = [{"messages": pair} for pair in PAIRS]
    lines(tmp_path / "set/train-0.jsonl", rows[:2])
    lines(tmp_path / "set/train-1.jsonl", rows[2:])
    lines(tmp_path / "set/test.jsonl", rows[:1])
    assert turns(read(path=str(tmp_path / "set"))) == EXPECTED
    assert turns(read(path=str(tmp_path / "set"), split="test")) == EXPECTED[:1]
    with pytest.raises(ValueError, match=r"data\.path: .*nosplit.*split or its subset"):
        read(path=str(tmp_path / "set"), split="nosplit")
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(rows), "few": datasets.Dataset.from_list(rows[:1])}
    )
    both.save_to_disk(tmp_path / "saved")
    assert turns(read(path=str(tmp_path / "saved"))) == EXPECTED
    assert turns(read(path=str(tmp_path / "saved"), split="few")) == EXPECTED[:1]
    with pytest.raises(ValueError, match="split 'none' is not there, only train, few"):
        read(path=str(tmp_path / "saved"), split="none")
    both["few"].to_csv(tmp_path / "bad.csv")  # a column of lists as text
    with pytest.raises(ValueError, match=r"1 dropped \(messages is not a list of turns\)"):
        read(path=str(tmp_path / "bad.csv"))
    (tmp_path / "good.tsv").write_text("prompt\tcompletion\nhi\thello\n")
    assert turns(read(path=str(tmp_path / "good.tsv"))) == [[("user", "hi"), ("assistant", "hello")]]
    both["train"].to_json(tmp_path / "set.jsonl.gz", compression="gzip")
    assert turns(read(path=str(tmp_path / "set.jsonl.gz"))) == EXPECTED


def test_arrow_adds_no_arguments(tmp_path: Path) -> None:
    """Parquet gives both calls both arguments, one of them null; the template must not see that."""
    import datasets

    rows = [
        {"messages": [*PAIRS[i][:1], {"role": "assistant", "content": None, "tool_calls": [call]}]}
        for i, call in enumerate((CALL, OTHER))
    ]
    features = datasets.Features(
        messages=[
            {
                "role": datasets.Value("string"),
                "content": datasets.Value("string"),
                "tool_calls": [
                    {
                        "type": datasets.Value("string"),
                        "function": {
                            "name": datasets.Value("string"),
                            "arguments": {"a": datasets.Value("int64"), "text": datasets.Value("string")},
                        },
                    }
                ],
            }
        ]
    )
    path = tmp_path / "calls.parquet"
    padded = json.loads(json.dumps(rows))
    padded[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["text"] = None
    padded[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]["a"] = None
    padded[0]["messages"][0]["tool_calls"] = padded[1]["messages"][0]["tool_calls"] = None
    datasets.Dataset.from_list(padded, features=features).to_parquet(path)
    found = read(path=str(path))
    assert [c.messages[1]["tool_calls"] for c in found] == [[CALL], [OTHER]]
    assert [c.messages for c in found] == [c.messages for c in read(path=lines(tmp_path / "calls.jsonl", rows))]


HUB_PROGRAM = """
import json, sys
from train.config import DataConfig, SourceConfig
from train.sources import Conversations

source = SourceConfig("org/some-set", split="train_sft", subset="small", revision="main")
found = list(Conversations(DataConfig(sources=(source,)), lambda text: None))
try:
    list(Conversations(DataConfig(path="org/gone"), lambda text: None))
except ValueError as error:
    print(json.dumps([[c.messages for c in found], [c.source for c in found], str(error)]))
"""


def test_hub_ids(tmp_path: Path) -> None:
    """From a server on this machine that speaks the hub's protocol."""
    card = "configs:\n- {config_name: %s, data_files: [{split: %s, path: %s}]}\n- {config_name: %s, data_files: %s}\n"
    rows = "".join(json.dumps({"messages": pair}) + "\n" for pair in PAIRS)
    files = {
        "README.md": f"---\n{card % ('small', 'train_sft', 'data/a.jsonl', 'large', 'data/b.jsonl')}---\n".encode(),
        "data/a.jsonl": rows.encode(),
        "data/b.jsonl": b'{"prompt": "x"}\n',
    }
    with fake_hub("org/some-set", files) as url:
        out = run_apart(HUB_PROGRAM, HF_ENDPOINT=url, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0")
    messages, sources, error = json.loads(out.splitlines()[-1])
    assert messages == PAIRS and set(sources) == {"org/some-set"}
    assert error.startswith(
        "data.path: 'org/gone' is neither a file nor a directory here, and as a hub data set cannot"
    )
    assert fingerprint(SourceConfig("org/some-set")) is None


@pytest.mark.parametrize("path", ["none.jsonl", "org/none.parquet", "a/b/c", "./none", "none.txt"])
def test_missing_files_are_not_asked_of_the_hub(path: str) -> None:
    with pytest.raises(ValueError, match=r"data\.path: .* cannot be read: neither a file nor a directory"):
        read(path=path)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"turns": ["a"]}\n\n{oops\n', r"set\.x, line 3: not valid JSON"),
        ('{"turns": ["a"]}\n\n[]\n', r"set\.x, line 3: list, expected a JSON object"),
        ('{"turns": ["a"]}\n\n3', r"set\.x, line 3: int, expected"),
        ('[{"turns": ["a"]}, 3]', r"set\.x, element 1: int, expected"),
        ('[{"turns": ["a"]}, {"turns"', r"set\.x, element 1: not valid JSON"),
        ('[{"turns": ["a"]}', r"set\.x, element 1: not valid JSON"),
        ('[{"turns": ["a"]}] x', r"set\.x: text after the array"),
        ("", r"no usable conversation: 0 of 0 rows kept.*data\.path"),
        ('[{"a": 1}]', r"0 of 1 rows kept, 1 dropped \(no known layout\).*data\.layout"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "set.x").write_text(text)
    with pytest.raises(ValueError, match=part):
        read(path=str(tmp_path / "set.x"))


def test_other_encodings(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes('{"turns": ["ä"]}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"data\.path: .*cannot be read as UTF-8"):
        read(path=str(path))
    for name, text in (("set.jsonl", '{"turns": ["ä"]}'), ("set.json", '["ä"]'), ("set.txt", "ä")):
        (tmp_path / name).write_bytes(text.encode("utf-8-sig"))
        assert turns(read(path=str(tmp_path / name))) == [[("user", "ä")]]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"data\.path: .*bad\.parquet"):
        read(path=str(tmp_path / "bad.parquet"))


elements = st.text(max_size=9) | st.dictionaries(st.text(max_size=2), st.integers() | st.text(max_size=30), max_size=3)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(elements, max_size=8), indent=st.sampled_from([None, 1]), chunk=st.integers(1, 40))
def test_arrays_are_read_through_any_window(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], indent: int | None, chunk: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "array.json"
    path.write_text(json.dumps(rows, indent=indent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw_rows_module, "_CHUNK", chunk)
        assert [row for row, _ in raw_rows(SourceConfig(str(path)))] == rows


def test_ids_and_sources(tmp_path: Path) -> None:
    rows = [{"question_id": 81, "turns": ["a"]}, {"id": 0, "turns": ["b"], "source": "s"}, {"turns": ["c"]}]
    found = read(path=lines(tmp_path / "set.jsonl", rows))
    assert [(c.id, c.source) for c in found[:2]] == [("81", "set"), ("0", "s")]
    assert found[2].id == found[2].content_key[:16]


# --- counts, duplicates, overlap ----------------------------------------------------------------------------


def test_rows_in_are_rows_out_and_dropped(tmp_path: Path) -> None:
    rows = [{"messages": PAIRS[0]}, {"messages": []}, {"turns": ["a"]}, {"id": "x", "messages": PAIRS[0]}, {"y": 1}]
    said: list[str] = []
    reader = Conversations(DataConfig(path=lines(tmp_path / "set.jsonl", rows)), said.append)
    assert len(list(reader)) == reader.counts.rows_out == 2 and reader.counts.rows_in == 5
    assert reader.counts.reasons == {"empty": 1, "duplicate": 1, "no known layout": 1}
    assert reader.record == [
        {
            "path": str(tmp_path / "set.jsonl"),
            "layouts": {"messages": 2, "turns": 1},
            "rows_in": 5,
            "rows_out": 2,
            "dropped": reader.counts.reasons,
            "read_whole": True,
        }
    ]
    assert len(said) == 2 and said[0].endswith("set.jsonl: layout messages, by its first usable row")
    assert "layout messages 2, turns 1 (detected row by row); 2 of 5 rows kept, 1 dropped (dup" in said[1]
    assert len(read(path=str(tmp_path / "set.jsonl"), duplicates="keep")) == 3
    said.clear()
    assert len(read(said.append, path=str(tmp_path / "set.jsonl"), layout="turns")) == 1
    assert "layout turns 1 (as configured); 1 of 5" in said[0]


def test_duplicates_across_sources_and_after_preparing(tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", [{"messages": pair} for pair in PAIRS[:3]])
    two = lines(tmp_path / "two.jsonl", [sharegpt(pair) for pair in PAIRS[2:]])
    reader = Conversations(DataConfig(sources=(SourceConfig(one), SourceConfig(two))), quiet)
    assert sorted(turns(list(reader))) == EXPECTED and reader.counts.reasons == {"duplicate": 1}
    again = lines(tmp_path / "again.jsonl", [{"prompt": "q", "completion": c} for c in "ab"])
    assert len(read(path=again)) == 2

    def first(conversation: Conversation) -> Conversation:
        return Conversation("", "", conversation.messages[:1])

    assert turns(list(Conversations(DataConfig(path=again), quiet, first))) == [[("user", "q")]]


def test_overlap_with_evaluation_files(tmp_path: Path) -> None:
    nine = "one two three four five six seven eight nine"
    exclude = lines(tmp_path / "eval.jsonl", [{"turns": ["What is  a HAIKU?", nine]}, {"bad": 1}])
    prompts = {
        "what is a haiku": SAME,
        "What, is a 'haiku'?!": SAME,
        "what is a haiku then": None,
        "Tell: two three four (five) six seven eight NINE, please": SHARED,
        "two three four five six seven eight and nine": None,
        nine: SHARED,  # a second turn there
    }
    said: list[str] = []
    overlap = Overlap([exclude], said.append)
    for text, reason in prompts.items():
        assert overlap.reason(Conversation("", "", ({"role": "user", "content": text},))) == reason, text
    assert "1 rows to be left out of training, 1 unusable" in said[0]
    late = ({"role": "user", "content": "x"}, {"role": "assistant", "content": nine}, {"role": "user", "content": nine})
    assert overlap.reason(Conversation("", "", late[:2])) is None  # an answer may say what it likes
    assert overlap.reason(Conversation("", "", late)) == SHARED
    path = lines(tmp_path / "set.jsonl", [{"prompt": text} for text in prompts])
    reader = Conversations(DataConfig(path=path, exclude=(exclude,)), quiet)
    assert len(list(reader)) == 2 and reader.counts.reasons == {SAME: 2, SHARED: 2}
    with pytest.raises(ValueError, match=r"data\.exclude\[0\]: .*no usable row of 1"):
        read(path=path, exclude=(lines(tmp_path / "no.jsonl", [{"bad": 1}]),))
    with pytest.raises(ValueError, match=r"data\.exclude\[0\]: .*neither a file"):
        read(path=path, exclude=("gone.jsonl",))


words = st.lists(st.sampled_from("abc"), max_size=14)


@given(text=words, other=words)
def test_overlap_is_eight_words_in_a_row(text: list[str], other: list[str]) -> None:
    if not text or not other:
        return
    overlap = Overlap([], quiet)
    overlap._learn([other])
    runs = {tuple(other[i : i + 8]) for i in range(len(other) - 7)}
    shared = any(tuple(text[i : i + 8]) in runs for i in range(len(text) - 7))
    found = overlap.reason(Conversation("", "", ({"role": "user", "content": ", ".join(text).upper()},)))
    assert found == (SAME if text == other else SHARED if shared else None)


def test_characters_that_need_no_spaces_are_words() -> None:
    overlap = Overlap([], quiet)
    overlap._learn([list("今天天气怎么样呢请")])
    said = Conversation("", "", ({"role": "user", "content": "告诉我,今天天气怎么样呢?"},))
    assert overlap.reason(said) == SHARED


# --- mixtures -----------------------------------------------------------------------------------------------


def prompts(path: Path, name: str, count: int) -> SourceConfig:
    return SourceConfig(lines(path / f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(count)]))


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=3),
    sizes=st.lists(st.integers(1, 40), min_size=3, max_size=3),
)
def test_weights_are_shares(tmp_path_factory: pytest.TempPathFactory, weights: list[float], sizes: list[int]) -> None:
    folder = tmp_path_factory.getbasetemp()
    parts = [prompts(folder, "abc"[i], sizes[i]) for i in range(len(weights))]
    config = DataConfig(sources=tuple(SourceConfig(p.path, weight=w) for p, w in zip(parts, weights, strict=True)))
    said: list[str] = []
    found = [c.messages[0]["content"] for c in Conversations(config, said.append)]
    for end in range(1, len(found) + 1):  # every beginning has the shares, to within a row of each
        seen = Counter(text[0] for text in found[:end])
        for i, weight in enumerate(weights):
            assert abs(seen["abc"[i]] - end * weight / sum(weights)) < len(weights)
    for i in range(len(weights)):  # in order, none twice
        own = [text for text in found if text[0] == "abc"[i]]
        assert own == [f"{'abc'[i]}{k}" for k in range(len(own))]
    whole = [Counter(text[0] for text in found)["abc"[i]] == sizes[i] for i in range(len(weights))]
    assert any(whole) and sum("not read to its end" in text for text in said) == len(weights) - 1


def test_without_weights_all_rows_are_used_in_turn(tmp_path: Path) -> None:
    config = DataConfig(sources=(prompts(tmp_path, "a", 2), prompts(tmp_path, "b", 4)))
    reader = Conversations(config, quiet)
    assert [c.messages[0]["content"] for c in reader] == ["a0", "b0", "a1", "b1", "b2", "b3"]
    assert all(source["read_whole"] for source in reader.record)
    reader = Conversations(DataConfig(sources=config.sources, max_rows=3), quiet)
    assert [c.messages[0]["content"] for c in reader] == ["a0", "b0", "a1"]
    assert reader.counts.rows_in == 3 and not any(source["read_whole"] for source in reader.record)
    missing = (config.sources[0], SourceConfig("gone.jsonl"))
    with pytest.raises(ValueError, match=r"data\.sources\[1\]\.path: 'gone\.jsonl'"):
        read(sources=missing)


def test_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.sources._PROGRESS_SECONDS", -1.0)
    said: list[str] = []
    read(said.append, sources=(prompts(tmp_path, "a", 3), prompts(tmp_path, "b", 3)))
    assert len(said) == 2 + 6 + 2 and sum("a second, left about 0.0 min" in text for text in said) == 5


def test_fingerprints(tmp_path: Path) -> None:
    one = fingerprint(prompts(tmp_path / "d", "a", 3))
    assert one == fingerprint(prompts(tmp_path / "e", "a", 3)) != fingerprint(prompts(tmp_path / "d", "a", 4))
    folder = SourceConfig(str(tmp_path / "d"))
    before = fingerprint(folder)
    prompts(tmp_path / "d", "b", 1)
    after = fingerprint(folder)
    (tmp_path / "d/b.jsonl").rename(tmp_path / "d/c.jsonl")
    assert len({before, after, fingerprint(folder)}) == 3


# --- memory -------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
from tests.apart import peak
from train.config import DataConfig
from train.sources import Conversations

def read(path):
    return sum(len(c.messages[0]["content"]) for c in Conversations(DataConfig(path=path), lambda text: None))

read(sys.argv[1])
before = peak()
total = read(sys.argv[2])
print(total, round(before), round(peak() - before))
"""


@needs_proc
@pytest.mark.parametrize("kind", ["jsonl", "json", pytest.param("parquet", marks=pytest.mark.slow)])
def test_many_rows_need_little_memory(tmp_path: Path, kind: str) -> None:
    """50,000 conversations, 45 MiB as text and some 80 as objects: the growth over reading 500 of them."""
    filler = "".join(f"{i} " for i in range(110))  # 330 characters

    def write(count: int) -> str:
        path = tmp_path / f"{count}.{kind}"
        rows = (
            {"messages": [{"role": r, "content": f"{i} {filler}"} for r in ("user", "assistant")]} for i in range(count)
        )
        if kind == "parquet":
            import datasets

            datasets.Dataset.from_list(list(rows)).to_parquet(path, batch_size=1000)
        else:
            with path.open("w") as file:
                file.write("[" if kind == "json" else "")
                for i, row in enumerate(rows):
                    file.write(("," if kind == "json" and i else "") + json.dumps(row) + "\n")
                file.write("]" if kind == "json" else "")
        return str(path)

    few, many = write(500), write(50_000)
    total, before, growth = map(int, run_apart(PROGRAM, few, many).split())
    print(f"{kind}: peak {before + growth} MiB, {growth} MiB more for 50,000 rows than for 500")
    assert total == sum(len(f"{i} {filler}") for i in range(50_000))
    assert growth < 30

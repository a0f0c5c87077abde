"""What is published holds no path, host, user or token of the machine that it was made on."""

from __future__ import annotations

import pytest

from train import scrub as module
from train.scrub import local_paths, scrub, scrub_command, scrub_tree


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_private_names", lambda: frozenset({"alice", "trainer07"}))


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("/srv/alice/my models/base", "base"),
        ("/srv/alice", "local"),
        ("~/models/base/", "base"),
        ("../alice/runs", "runs"),
        ("C:\\Users\\alice\\model", "model"),
        ("\\\\server\\share\\model", "model"),
        ("read /data/x y/rows.jsonl, then wrote /tmp/a/b", "read rows.jsonl, then wrote b"),
        ("[/data/a/one.jsonl,/data/b/two.jsonl]", "[one.jsonl,two.jsonl]"),
        ("target.path=/srv/alice/base", "target.path=base"),
        ("data/alice/rows.jsonl", "rows.jsonl"),
        ("alice/my-dataset", "alice/my-dataset"),  # an id of the hub
        ("http://trainer07:8000/v1", "http://SERVER"),
        ("https://me:pass@huggingface.co/x", "http://SERVER"),
        ("https://huggingface.co/org/model/blob/main/LICENSE", "https://huggingface.co/org/model/blob/main/LICENSE"),
        ("https://huggingface.co.evil.org/x", "http://SERVER"),
        ("file:///srv/alice/rows.jsonl", "rows.jsonl"),
        ("token hf_abcdefghijklmnopqrstuv here", "token TOKEN here"),
        ("org/model", "org/model"),
        ("runs/eagle3/best", "runs/eagle3/best"),
        ("12.5 tokens/s and/or 3/4", "12.5 tokens/s and/or 3/4"),
        ("Llama-3.1 at 26 Jul 2024: 1/2", "Llama-3.1 at 26 Jul 2024: 1/2"),
    ],
)
def test_texts(text: str, clean: str) -> None:
    assert scrub(text) == clean
    assert scrub(clean) == clean


def test_commands_by_word() -> None:
    found = scrub_command(
        "eagle.py --set 'target.path=/srv/alice/my models/base' --set data.also=[/d/x,/d/y] --out a/b"
    )
    assert found == "eagle.py --set target.path=base --set 'data.also=[x,y]' --out a/b"
    assert scrub_command("it's /srv/alice/x") == "it's x"  # not a command line of a shell


def test_trees() -> None:
    tree = {"a": [1, None, "/x/y/z"], "/k/key": {"command": "run '/srv/alice/a b'"}}
    assert scrub_tree(tree) == {"a": [1, None, "z"], "key": {"command": "run 'a b'"}}


@pytest.mark.parametrize("text", ["see /srv/alice/x", "'/opt/x'", "~/a/b", "C:\\Users\\alice", "path: /a/b"])
def test_what_is_left_is_seen(text: str) -> None:
    assert local_paths(text)


@pytest.mark.parametrize("text", ["5 tokens/s", "org/name", "https://a.b/c/d", "configs/x.yaml", "a / b", "/v1"])
def test_what_is_not_a_path_of_this_machine(text: str) -> None:
    assert local_paths(text) == []

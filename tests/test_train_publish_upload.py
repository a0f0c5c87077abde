"""Uploads against a hub on this machine, by the real client: one commit or none, nothing twice, whatever breaks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.utils._http as client
import pytest
from huggingface_hub import constants

from scripts.publish import main
from tests.hub_server import GITATTRIBUTES, TOKEN, Fault, Hub, hub_server
from tests.published import BASE, make_head
from tests.test_repo_structure import ROOT
from train.publish_folder import publish_files

REPO = "me/my-eagle3-head"
COMMIT, PUT, PREUPLOAD, BATCH = "/commit/", "^/store/", "/preupload/", "objects/batch$"


class _Clock:
    """`time` for the client, which waits between its retries; the seconds are kept."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.waited: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock(time)
    monkeypatch.setattr(client, "time", made)
    return made


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: _Clock) -> Iterator[Hub]:
    with hub_server() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)  # read from HF_ENDPOINT when the library is imported
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
        assert hub.wrong == []


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_head(tmp_path / "run")


def publish(run: Path, *extra: str, repo: str = REPO) -> int:
    return main(["--head", str(run), "--repo", repo, "--license", "mit", "--base-model", BASE, *extra])


def is_published(hub: Hub, run: Path, repo: str = REPO) -> bool:
    """Whether the newest commit holds the folder, and nothing else."""
    mine = {file.name: file.path.read_bytes() for file in publish_files(run / "best_hub")}
    return {name: entry.content for name, entry in hub.repos[repo].files.items()} == mine | {
        ".gitattributes": GITATTRIBUTES
    }


def test_a_dry_run_asks_the_network_nothing(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_head(tmp_path / "run", target=BASE)  # an id of the hub, whose config is not here
    assert publish(run, "--private") == 0
    assert "left out: layout vllm: --target: 'org/Base-1B' has no config" in capsys.readouterr().err
    assert hub.requests == [] and hub.repos == {}


def test_one_commit(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert publish(run, "--upload") == 0
    assert is_published(hub, run)
    made = hub.repos[REPO]
    assert len(made.commits) == 2 and made.messages[-1] == "eagle3 draft head for org/Base-1B"
    assert not made.private and made.files["model.safetensors"].lfs and not made.files["README.md"].lfs
    assert hub.puts == [made.files["model.safetensors"].sha256]
    assert "POST /api/validate-yaml" in hub.requests
    assert f"published: {hub.url}/{REPO}" in capsys.readouterr().err


def test_a_private_repository(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert publish(run, "--upload", "--private") == 0
    assert hub.repos[REPO].private and is_published(hub, run)
    hub.repos[REPO].private = False
    count = len(hub.repos[REPO].commits)
    assert publish(run, "--upload", "--private") == 1
    assert "exists and is public" in capsys.readouterr().err
    assert len(hub.repos[REPO].commits) == count


def test_again_without_changes(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert publish(run, "--upload") == 0
    hub.requests.clear()
    assert publish(run, "--upload") == 0
    assert "nothing to do" in capsys.readouterr().err
    assert hub.requests and all(request.startswith("GET ") for request in hub.requests)
    assert len(hub.repos[REPO].commits) == 2


def test_only_what_changed_is_sent(hub: Hub, run: Path, tmp_path: Path) -> None:
    assert publish(run, "--upload") == 0
    text = (run / "best/run.yaml").read_text()
    (run / "best/run.yaml").write_text(text.replace("seed: 7", "seed: 8"))
    hub.requests.clear()
    assert publish(run, "--upload") == 0
    assert is_published(hub, run) and len(hub.repos[REPO].commits) == 3 and len(hub.puts) == 1
    assert not any("objects/batch" in request for request in hub.requests)


def test_a_head_of_which_nothing_is_recorded(hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run.yaml", "provenance.json"):
        (run / "best" / name).unlink()
    monkeypatch.chdir(run / "best")
    assert publish(Path("."), "--upload") == 0
    assert publish(Path("."), "--upload", "--license", "apache-2.0") == 0  # ours, also without a record
    assert is_published(hub, run) and len(hub.repos[REPO].commits) == 3
    assert b"How the head was trained is not recorded." in hub.repos[REPO].files["README.md"].content


def test_files_that_are_gone(hub: Hub, run: Path) -> None:
    assert publish(run, "--upload") == 0
    (run / "best/run.yaml").unlink()
    assert publish(run, "--upload") == 0
    assert "run.yaml" in hub.repos[REPO].files and not is_published(hub, run)
    assert publish(run, "--upload", "--prune") == 0
    assert is_published(hub, run)


def test_what_others_published_is_not_overwritten(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = {"config.json": b"{}", "model.safetensors": b"weights", ".gitattributes": GITATTRIBUTES}
    hub.add(REPO, theirs)
    assert publish(run, "--upload") == 1
    assert f"{REPO} holds config.json, and nothing says that Draftsmith published it" in capsys.readouterr().err
    assert {name: entry.content for name, entry in hub.repos[REPO].files.items()} == theirs
    hub.add("me/empty", {"README.md": b"---\nlicense: mit\n---\n", ".gitattributes": GITATTRIBUTES})
    assert publish(run, "--upload", repo="me/empty") == 0
    assert is_published(hub, run, "me/empty")


# ---- faults ------------------------------------------------------------------------------------------------

AGAIN = "run the same command again: what is stored already is not sent again"
FAULTS = [
    (Fault("POST", "create$", 403), "403, the token must not write there"),
    (Fault("POST", PREUPLOAD, 403), "403, the token must not write there"),
    (Fault("POST", PREUPLOAD, 500), f"500, the hub has trouble (made for the test); later {AGAIN}"),
    (
        Fault("POST", BATCH, 401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
        "401, the hub does",
    ),
    (Fault("POST", BATCH, 429, {"Retry-After": "7"}), "429, too many requests (made for the test); wait 7 s, then"),
    (Fault("PUT", PUT, 403), "403, the token must not write there"),
    (Fault("PUT", PUT, 500), "500, the hub has trouble"),
    (Fault("PUT", PUT, 0), "the connection broke"),
    (Fault("POST", COMMIT, 403), "403, the token must not write there"),
    (
        Fault("POST", COMMIT, 429, {"RateLimit": '"api";r=0;t=31'}),
        "429, too many requests (made for the test); wait 31 s, then",
    ),
    (Fault("POST", COMMIT, 500), f"500, the hub has trouble (made for the test); later {AGAIN}"),
    (Fault("POST", COMMIT, 0), "the connection broke"),
]


@pytest.mark.parametrize(
    ("fault", "told"), FAULTS, ids=lambda f: f"{f.pattern}{f.status}" if isinstance(f, Fault) else ""
)
def test_a_fault_leaves_no_half(
    hub: Hub, run: Path, fault: Fault, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults = [fault]
    assert publish(run, "--upload") == 1
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]  # not behind a progress bar
    assert told in last and last.startswith(f"error: {REPO}: ")
    assert TOKEN not in out + err
    made = hub.repos.get(REPO)
    assert made is None or len(made.commits) == 1  # the hub's own first one
    stored = list(hub.puts)
    hub.faults = []
    assert publish(run, "--upload") == 0
    assert is_published(hub, run) and len(hub.repos[REPO].commits) == 2
    assert len(hub.puts) == 1 and hub.puts[: len(stored)] == stored  # nothing twice


@pytest.mark.parametrize(
    "fault",
    [
        Fault("PUT", PUT, 500, times=2),
        Fault("PUT", PUT, 0, times=2),
        Fault("PUT", PUT, -1, times=1),
        Fault("POST", PREUPLOAD, 429, {"RateLimit": '"api";r=0;t=9'}, times=1),
    ],
    ids=["500", "cut", "answer lost", "429"],
)
def test_the_client_tries_again_by_itself(hub: Hub, run: Path, fault: Fault, clock: _Clock) -> None:
    hub.faults = [fault]
    assert publish(run, "--upload") == 0
    assert is_published(hub, run) and len(hub.repos[REPO].commits) == 2
    assert clock.waited == [10.0] if fault.status == 429 else clock.waited


def test_a_lost_answer_to_the_commit_is_looked_up(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.faults = [Fault("POST", COMMIT, -1, times=1)]
    assert publish(run, "--upload") == 0
    assert is_published(hub, run) and len(hub.repos[REPO].commits) == 2
    assert "published: " in capsys.readouterr().err


def test_a_commit_of_somebody_else_meanwhile(
    hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(run, "--upload") == 0
    (run / "best/run.yaml").write_text("train: {seed: 9}\n")
    repo, real = hub.repos[REPO], hub.commit

    def late(mine: Any, lines: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        repo.commits.append(dict(repo.files))
        repo.messages.append("theirs")
        return real(mine, lines)

    monkeypatch.setattr(hub, "commit", late)
    assert publish(run, "--upload") == 1
    assert "412, the repository has changed meanwhile" in capsys.readouterr().err
    assert repo.messages[-1] == "theirs"
    monkeypatch.undo()


def test_tokens(hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrongwrong")
    assert publish(run, "--upload") == 1
    out, err = capsys.readouterr()
    assert "401, the hub does not accept the token" in err and "hf_wrong" not in out + err
    monkeypatch.delenv("HF_TOKEN")
    hub.requests.clear()
    assert publish(run, "--upload") == 1
    assert "--upload needs a token of the hub" in capsys.readouterr().err and hub.requests == []
    Path(constants.HF_TOKEN_PATH).write_text(TOKEN)  # what `hf auth login` writes
    assert publish(run, "--upload") == 0
    assert is_published(hub, run)


def test_by_path_with_nothing_but_the_environment(run: Path, tmp_path: Path) -> None:
    with hub_server() as hub:
        env = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": TOKEN,
            "HF_DEBUG": "1",  # logs every request
        }
        options = ["--head", str(run), "--repo", REPO, "--license", "mit", "--base-model", BASE]
        command = [sys.executable, str(ROOT / "scripts/publish.py"), *options]
        done = subprocess.run(
            [*command, "--upload"], env=env, capture_output=True, text=True, cwd=tmp_path, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert is_published(hub, run) and hub.wrong == []
        assert TOKEN not in done.stdout + done.stderr
        assert TOKEN.encode() not in b"".join(file.path.read_bytes() for file in publish_files(run))

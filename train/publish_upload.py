"""A folder onto the hub, in one commit: what is there already is not sent, and a broken upload can be run again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

# HTTPError is that of httpx or httpx2, whichever this version of the library is built on.
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError  # type: ignore[attr-defined]
from huggingface_hub.hf_api import RepoFile

from train.publish_folder import CARD, PROVENANCE, PublishFile

_THEIRS = (".gitattributes", CARD)  # what the hub makes itself
_FAILURES = (HTTPError, RuntimeError, OSError)  # of the HTTP library, also the hub's own; of transfers of large files
_AGAIN = "run the same command again: what is stored already is not sent again"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Remote:
    """A repository's state. sha: of its newest commit; None: there is no repository."""

    sha: str | None = None
    private: bool = False
    files: dict[str, RepoFile] = field(default_factory=dict)

    def holds(self, file: PublishFile) -> bool:
        there = self.files.get(file.name)
        if there is None or there.size != file.size:
            return False
        return there.lfs.sha256 == file.sha256 if there.lfs is not None else there.blob_id == file.git_oid


@dataclass(frozen=True)
class Upload:
    """private: of a repository that is made. prune: remove files that the folder does not have."""

    repo: str
    files: Sequence[PublishFile]
    message: str
    private: bool = False
    prune: bool = False


def upload(asked: Upload, say: Say) -> None:
    """Makes the repository if need be, and commits what differs.

    Raises:
        ValueError: no token, no permission, a repository that is not ours, a broken connection: in one sentence, with
            what to do. The repository then has its old commit.
    """
    token = get_token()
    if token is None:
        raise ValueError("--upload needs a token of the hub: hf auth login, or HF_TOKEN in the environment")
    api = HfApi(token=token)
    remote = _read(api, asked.repo)
    if remote.sha is None:
        with _explained(asked.repo, "making the repository"):
            api.create_repo(asked.repo, private=asked.private or None, exist_ok=True)
        say(f"made {asked.repo}{' (private)' if asked.private else ''}")
        remote = _read(api, asked.repo)
    _check(asked, remote)
    send, drop = _difference(asked, remote)
    if not send and not drop:
        say(f"nothing to do: {asked.repo} has these {len(asked.files)} files")
        return
    size = sum(file.size for file in send)
    say(f"{len(send)} of {len(asked.files)} files differ ({size:,} bytes), {len(drop)} to remove")
    _commit(api, asked, remote, send, drop, say)
    say(f"published: {api.endpoint}/{asked.repo}")


def _check(asked: Upload, remote: Remote) -> None:
    """Before anything is sent."""
    if asked.private and not remote.private:
        raise ValueError(f"--private: {asked.repo} exists and is public; make it private in its settings first")
    others = [name for name in remote.files if name not in _THEIRS]
    clash = [f.name for f in asked.files if f.name in others and not remote.holds(f)]
    if clash and PROVENANCE not in others:
        raise ValueError(
            f"--repo: {asked.repo} holds {clash[0]}, and nothing says that Draftsmith published it, so it is not "
            "overwritten; choose another name"
        )


def _difference(asked: Upload, remote: Remote) -> tuple[list[PublishFile], list[str]]:
    """What to send, and what to remove."""
    mine = {file.name for file in asked.files}
    stale = [name for name in remote.files if name not in mine and name != ".gitattributes"]
    return [file for file in asked.files if not remote.holds(file)], stale if asked.prune else []


def _commit(
    api: HfApi, asked: Upload, remote: Remote, send: Sequence[PublishFile], drop: Sequence[str], say: Say
) -> None:
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *(CommitOperationAdd(file.name, file.path) for file in send),
        *(CommitOperationDelete(name) for name in drop),
    ]
    try:
        with _explained(asked.repo, "sending it"):
            api.create_commit(asked.repo, operations, commit_message=asked.message, parent_commit=remote.sha)
    except ValueError as error:
        say("")  # behind the client's progress bar
        # An answer may be lost after the commit was made.
        now = _read(api, asked.repo)
        if now.sha == remote.sha:
            raise ValueError(f"{error}; {asked.repo} is as it was before") from error
        if any(_difference(asked, now)):
            raise ValueError(f"{error}; somebody else has changed {asked.repo} meanwhile") from error


def _read(api: HfApi, repo: str) -> Remote:
    with _explained(repo, "looking at it"):
        try:
            info = api.model_info(repo)
        except RepositoryNotFoundError:  # also what a wrong token gets: making it will tell
            return Remote()
        found = api.list_repo_tree(repo, recursive=True, revision=info.sha)
        files = {file.path: file for file in found if isinstance(file, RepoFile)}
    return Remote(info.sha, bool(info.private), files)


# ---- errors ------------------------------------------------------------------------------------------------


@contextmanager
def _explained(repo: str, doing: str) -> Iterator[None]:
    """Errors of the hub and of the network as a ValueError."""
    try:
        yield
    except _FAILURES as error:
        raise ValueError(f"{repo}: {doing} failed: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    if cause is None:
        inner = error.__cause__ or error
        return f"the connection broke ({type(inner).__name__}: {inner}); {_AGAIN}"
    status = cause.response.status_code
    said = (cause.server_message or "").strip().replace("\n", " ")
    said = f" ({said})" if said else ""
    if status == 401:
        return f"401, the hub does not accept the token{said}; log in anew: hf auth login, or HF_TOKEN"
    if status == 403:
        return f"403, the token must not write there{said}; it needs the permission to write to this namespace"
    if status in (409, 412):
        return f"{status}, the repository has changed meanwhile{said}; run the same command again"
    if status == 429:
        headers = cause.response.headers
        limit = re.search(r"\bt=(\d+)", headers.get("RateLimit", ""))  # what the hub itself sends
        wait = headers.get("Retry-After") or (limit and limit[1])
        return f"429, too many requests{said}; wait {f'{wait} s' if wait else 'a while'}, then {_AGAIN}"
    if status >= 500:
        return f"{status}, the hub has trouble{said}; later {_AGAIN}"
    return f"{status}{said}"

"""Text of this machine made fit for strangers: no local paths, no names of machines or users, no tokens."""

from __future__ import annotations

import getpass
import platform
import re
import shlex
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_PUBLIC_HOSTS = ("huggingface.co", "github.com", "arxiv.org", "pypi.org")
_WORD = r"[^\s'\",:;=\[\](){}<>|`]"
_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\",\])}>]+")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
# Absolute, in a home directory, above this directory, or of Windows. Blanks belong to it where a slash follows.
_START = r"(?:~[\w.-]*[/\\]|\.\.[/\\]|/|\\\\|[A-Za-z]:[/\\])"
_LOCAL = re.compile(rf"(?<![\w./\\~:$}}*-]){_START}(?:{_WORD}| (?={_WORD}*[/\\]))*")
_RELATIVE = re.compile(rf"(?<![\w./\\~:-])(?:{_WORD}+/)+{_WORD}+")
_HUB_ID = re.compile(r"[\w.-]+/[\w-]+(?:\.[\d]+[\w-]*)*")  # a dot only before a digit: rows.jsonl is a file
_KEPT = "local"  # instead of a path's last part, if that is a private name itself


def scrub(text: str) -> str:
    """Paths are cut to their last part, servers to SERVER, tokens to TOKEN; hub ids and relative paths stay.

    A text that is a path as a whole may hold anything, blanks too.
    """
    if re.match(_START, text) and "\n" not in text and not text.startswith("//"):
        return _last(text)
    text = _TOKEN.sub("TOKEN", _URL.sub(_server, text))
    text = _LOCAL.sub(lambda found: _last(found[0]), text)
    return _RELATIVE.sub(_without_names, text)


def scrub_command(command: str) -> str:
    """The same for a command line, word by word; in `--set key=value` the value counts."""
    try:
        words = shlex.split(command)
    except ValueError:  # an odd quote
        return scrub(command)
    return shlex.join(
        "=".join(scrub(part) for part in word.split("=")) if "=" in word else scrub(word) for word in words
    )


def scrub_tree(value: Any) -> Any:
    """The same for every string of JSON-like data; keys called "command" hold command lines."""
    if isinstance(value, dict):
        return {
            (scrub(key) if isinstance(key, str) else key): (
                scrub_command(inner) if key == "command" and isinstance(inner, str) else scrub_tree(inner)
            )
            for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [scrub_tree(inner) for inner in value]
    return scrub(value) if isinstance(value, str) else value


def local_paths(text: str) -> list[str]:
    """What still looks like a path of one machine: absolute with two parts or more, or in a home directory."""
    found = [match[0] for match in _LOCAL.finditer(_URL.sub("", text))]
    return [path for path in found if len(re.split(r"[/\\]+", path.strip("/\\"))) > 1]


def _last(path: str) -> str:
    name = re.split(r"[/\\]+", path.rstrip("/\\ "))[-1]
    return _KEPT if name in _private_names() | {"", "~", "..", "."} or name.startswith("~") else name


def _without_names(found: re.Match[str]) -> str:
    path = found[0]
    if _HUB_ID.fullmatch(path) or not _private_names() & set(path.split("/")):
        return path
    return _last(path)


def _server(found: re.Match[str]) -> str:
    try:
        url = urlsplit(found[0])
        public = url.hostname in _PUBLIC_HOSTS and not (url.query or url.username or url.password)
    except ValueError:  # not a valid address
        public = False
        url = None
    if public:
        return found[0]
    return _last(found[0]) if url is not None and url.scheme == "file" else "http://SERVER"


@cache
def _private_names() -> frozenset[str]:
    names = {platform.node(), platform.node().partition(".")[0], Path.home().name}
    with suppress(OSError, KeyError):  # a user without a name, as in some containers
        names.add(getpass.getuser())
    return frozenset(names - {""})

"""A model hub on this machine that can be published to: the part of its API that the real client uses, with faults.

Large files go the LFS way (batch, PUT to a signed address, verification), others inside the commit. A repository is a
list of commits; one is added whole or not at all. The server checks what the hub would: tokens, sizes, hashes, parents.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

TOKEN = "hf_canaryCANARYcanaryCANARYcanary00"
GITATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


@dataclass(frozen=True)
class Entry:
    """A file in a commit. lfs: whether it is one of the store."""

    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """Of git: of the pointer where the file is large."""
        content = self.content
        if self.lfs:
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(content)}\n"
            content = pointer.encode()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def listed(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "file", "path": path, "size": len(self.content), "oid": self.oid}
        if self.lfs:
            found["lfs"] = {"oid": self.sha256, "size": len(self.content), "pointerSize": 134}
        return found


@dataclass
class Repo:
    private: bool
    commits: list[dict[str, Entry]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def sha(self, index: int = -1) -> str:
        return hashlib.sha1(
            repr((self.messages[: index % len(self.commits) + 1], len(self.commits))).encode()
        ).hexdigest()

    @property
    def files(self) -> dict[str, Entry]:
        return self.commits[-1]


@dataclass
class Fault:
    """What goes wrong with requests of that method whose path the pattern finds, so many times.

    status: the answer; 0: the connection is cut in the middle of the body; -1: it is cut after the work was done.
    """

    method: str
    pattern: str
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1000


@dataclass
class Hub:
    """State of the server. requests: "METHOD path" in order. puts: sha256 of every large file that was sent whole."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    store: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    puts: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # what the real hub or its store would have refused

    def add(self, repo: str, files: dict[str, bytes], private: bool = False) -> Repo:
        made = Repo(private, [{name: Entry(content, False) for name, content in files.items()}], ["theirs"])
        self.repos[repo] = made
        return made

    def fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and fault.method == method and re.search(fault.pattern, path):
                fault.times -= 1
                return fault
        return None

    def commit(self, repo: Repo, lines: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        """Adds it whole, or refuses it."""
        header, files = lines[0]["value"], dict(repo.files)
        if header.get("parentCommit") not in (None, repo.sha()):
            return 412, {"error": "A commit has happened since. Please refresh and try again."}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = Entry(base64.b64decode(value["content"]), False)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.store or len(self.store[value["oid"]]) != value["size"]:
                    return 400, {"error": f"LFS object {value['oid']} is not there"}
                files[value["path"]] = Entry(self.store[value["oid"]], True)
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                return 400, {"error": f"unknown operation {line['key']}"}
        repo.commits.append(files)
        repo.messages.append(header["summary"])
        return 200, {"commitUrl": f"{self.url}/commit/{repo.sha()}", "commitOid": repo.sha(), "success": True}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def handle_any(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.requests.append(f"{self.command} {path}")
        fault = hub.fault(self.command, path)
        length = int(self.headers.get("Content-Length") or 0)
        if fault is not None and fault.status == 0:
            self.rfile.read(length // 2)
            self.cut()
            return
        body = self.read_body(length)
        if fault is not None and fault.status > 0:
            self.reply(fault.status, {"error": "made for the test"}, fault.headers)
            return
        status, answer, headers = self.answer(path, body)
        if fault is not None:
            self.cut()
            return
        self.reply(status, answer, headers)

    do_GET = do_POST = do_PUT = do_HEAD = handle_any

    def read_body(self, length: int) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(length)
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def cut(self) -> None:
        """A reset, not an end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def reply(self, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer(self, path: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        hub = self.hub
        if path.startswith("/store/"):
            return self.put(path.removeprefix("/store/"), body)
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if path == "/api/validate-yaml":
            content = json.loads(body)["content"]
            bad = [] if re.match(r"---\n.*\blicense: \S+.*\n---\n", content, re.S) else [{"message": "no license"}]
            return 400 if bad else 200, {"errors": bad, "warnings": []}, {}
        if path == "/api/repos/create":
            return self.create(json.loads(body)) if known else self.unknown_token()
        found = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/.]+(?:\.\d[^/.]*)?)(/.*|\.git/info/lfs/objects/\w+)?", path)
        assert found, path
        name, rest = found[1], unquote(found[2] or "")
        repo = hub.repos.get(name)
        if repo is None or (repo.private and not known):
            return 404 if known else 401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        if self.command == "GET" and (rest == "" or rest.startswith("/revision/")):
            return 200, {"_id": "1", "id": name, "sha": repo.sha(), "private": repo.private, "tags": []}, {}
        if self.command == "GET" and rest.startswith("/tree/"):
            return 200, [entry.listed(file) for file, entry in repo.files.items()], {}
        if not known:
            return self.unknown_token()
        if rest.startswith("/preupload/"):
            return 200, {"files": [self.mode(repo, file) for file in json.loads(body)["files"]]}, {}
        if rest.endswith("objects/batch"):
            return 200, {"transfer": "basic", "objects": list(map(self.action, json.loads(body)["objects"]))}, {}
        if rest.endswith("objects/verify"):
            asked = json.loads(body)
            there = len(hub.store.get(asked["oid"], b"")) == asked["size"]
            return 200 if there else 404, {}, {}
        if rest.startswith("/commit/"):
            status, answer = hub.commit(repo, [json.loads(line) for line in body.splitlines()])
            return status, answer, {}
        raise AssertionError(f"{self.command} {path}: not in this hub")

    def create(self, asked: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        name = f"{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{name}", "name": name, "id": name}
        if name in self.hub.repos:
            return 409, {"error": "You already created this model repo", **url}, {}
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        first = {".gitattributes": Entry(GITATTRIBUTES, False)}
        self.hub.repos[name] = Repo(private, [first], ["initial commit"])
        return 200, url, {}

    def mode(self, repo: Repo, file: dict[str, Any]) -> dict[str, Any]:
        lfs = file["path"].endswith(".safetensors")
        there = repo.files.get(file["path"])
        oid = None if there is None else there.sha256 if there.lfs else there.oid
        return {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}

    def action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.hub.store:
            return wanted
        repo = self.path.removesuffix("/batch")
        upload = {"href": f"{self.hub.url}/store/{wanted['oid']}?signature=secret"}
        return wanted | {"actions": {"upload": upload, "verify": {"href": f"{self.hub.url}{repo}/verify"}}}

    def put(self, oid: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        if self.headers.get("Authorization"):
            self.hub.wrong.append("a token was sent to the store")
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "wrong hash"}, {}
        self.hub.store[oid] = body
        self.hub.puts.append(oid)
        return 200, {}, {}

    def unknown_token(self) -> tuple[int, Any, dict[str, str]]:
        text = "Invalid credentials in Authorization header"
        return 401, {"error": text}, {"X-Error-Message": text}


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()

"""A model hub on this machine, with one data set: enough of its protocol for `datasets` to stream that."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_COMMIT = "a" * 40


def _entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@contextmanager
def fake_hub(name: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Serves the data set `name` and gives the hub's URL; everything else is not found."""
    api = f"/api/datasets/{name}"

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def reply(self, body: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"{api}/tree/"):
                folder = path.removeprefix(f"{api}/tree/").partition("/")[2]
                inside = [_entry(file, content) for file, content in files.items() if file.startswith(folder)]
                self.reply(json.dumps(inside).encode(), Content_Type="application/json")
            elif path == api or path.startswith(f"{api}/revision/"):
                info = {"id": name, "sha": _COMMIT, "tags": [], "siblings": [{"rfilename": file} for file in files]}
                self.reply(json.dumps(info).encode(), Content_Type="application/json")
            elif path.startswith(f"/datasets/{name}/resolve/"):
                self.file(path.removeprefix(f"/datasets/{name}/resolve/").partition("/")[2])
            else:
                self.reply(b"", 404, X_Error_Code="RepoNotFound")

        do_HEAD = do_GET

        def file(self, name: str) -> None:
            if name not in files:
                self.reply(b"", 404, X_Error_Code="EntryNotFound")
                return
            content = files[name]
            about = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X_Repo_Commit": _COMMIT}
            if asked := self.headers.get("Range"):
                first, last = asked.removeprefix("bytes=").split("-")
                content = content[int(first) : int(last) + 1]
                about["Content_Range"] = f"bytes {first}-{last}/{len(files[name])}"
            self.reply(content, 206 if asked else 200, **about)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()

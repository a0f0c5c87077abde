"""A server of the OpenAI-compatible protocol on this machine, for tests, with faults on request."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
Answer = tuple[int, Any, dict[str, str]]  # status, JSON body (or raw bytes), headers


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


class Fake:
    """A server. What it says depends on the request alone: ids of a hash of the prompt, then the end of turn.

    faults: called with (path, payload, number of this request among equal ones) before each answer; what it returns is
    answered instead. The list `requests` holds (path, payload, headers).
    """

    def __init__(self, *, ids: bool = True, extras: bool = True) -> None:
        self.ids, self.extras = ids, extras
        self.requests: list[tuple[str, Any, dict[str, str]]] = []
        self.faults: Callable[[str, Any, int], Answer | str | None] = lambda path, payload, number: None
        self.models = ["tiny"]
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(None)

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def reply(self, payload: Any) -> None:
                answer = fake.answer(self.path, payload, dict(self.headers))
                if answer == "cut":  # promises more than it sends
                    self.send_response(200)
                    self.send_header("Content-Length", "1000")
                    self.end_headers()
                    self.wfile.write(b'{"choices": [')
                    return
                if answer == "close":
                    return
                assert not isinstance(answer, str)
                status, body, headers = answer
                raw = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, payload: Any, headers: dict[str, str]) -> Answer | str:
        key = path + json.dumps(payload)
        with self._lock:
            self.requests.append((path, payload, headers))
            number = self._seen[key]
            self._seen[key] += 1
        fault = self.faults(path, payload, number)
        if fault is not None:
            return fault
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in self.models]}, {}
        if payload["model"] not in self.models:
            return 404, {"error": {"message": f"no model {payload['model']}"}}, {}
        if not self.extras and {"top_k", "min_p", "repetition_penalty"} & payload.keys():
            return 400, {"error": {"message": "Unrecognized request argument"}}, {}
        if path == "/v1/completions" and self.ids:
            return 200, self.completion(payload), {}
        if path == "/v1/chat/completions":
            return 200, self.chat(payload), {}
        return 404, {"detail": "Not Found"}, {}

    def completion(self, payload: Any) -> Any:
        new, finish = self.words(payload["prompt"], payload["max_tokens"])
        choice = {
            "text": "not looked at",
            "token_ids": new,
            "prompt_token_ids": payload["prompt"],
            "finish_reason": finish,
        }
        return {"choices": [choice]}

    def chat(self, payload: Any) -> Any:
        prompt = TOKENIZER.apply_chat_template(payload["messages"], tokenize=False, add_generation_prompt=True)
        new, finish = self.words(encode(prompt), payload["max_tokens"])
        text = TOKENIZER.decode(new, skip_special_tokens=True)
        return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}

    @staticmethod
    def words(prompt: list[int], most: int) -> tuple[list[int], str]:
        """4 to 12 letters that the prompt decides, and the end of turn."""
        start = sum(i * token for i, token in enumerate(prompt, 1))
        letters = encode("".join(chr(97 + (start + 7 * i) % 26) for i in range(4 + start % 9)))
        whole = [*letters, EOS]
        return whole[:most], "length" if len(whole) > most else "stop"

"""An OpenAI-compatible server as the answerer: vLLM, SGLang, llama.cpp, or a hosted one.

Two ways, of which the better one that the server knows is taken:
- ids: `/completions` with the prompt as token ids and `return_token_ids` (vLLM, SGLang). The ids trained on are those
  that the server generated.
- text: `/chat/completions`, a turn at a time. The finished conversation is encoded by the chat template; that is not
  always what was generated, so such rows are counted and reported as re-encoded.

The standard library speaks the protocol: `urllib` takes timeouts, proxies and certificates, and no dependency is added.
"""

from __future__ import annotations

import email.utils
import hashlib
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from infer.batched import Request
from train.answer_store import AnswerWriter
from train.answering import REFUSED, Answer, Answerer, Reply, Tools, drive
from train.config import DataConfig
from train.conversations import Message
from train.layouts import Unusable, read_calls
from train.work import Task, Work

T = TypeVar("T")

_FIRST_DELAY, _LONGEST_DELAY, _LONGEST_ORDERED = 0.5, 60.0, 600.0  # seconds; the last: that a server may ask for
_REFUSALS = (400, 413, 422)  # of this request alone
_PASSING = (408, 409, 425, 429)  # and all of 5xx: worth another try


class _Stopped(Exception):
    """The run is over for another reason."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key along to another host."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Server:
    """Requests to one server, each tried again until it is answered or refused.

    Attributes:
        gives_ids: whether it takes and gives token ids; known after `connect`.
    """

    def __init__(self, data: DataConfig, log: Callable[[str], None], stop: threading.Event | None = None) -> None:
        assert data.endpoint is not None
        self.url, self.model = data.endpoint.rstrip("/"), data.endpoint_model
        self.gives_ids = False
        self._data, self._log, self._stop = data, log, stop or threading.Event()
        self._key = os.environ.get(data.endpoint_key_variable, "")
        self._extras: dict[str, Any] = {"repetition_penalty": 1.0, "min_p": 0.0}  # not of the standard
        self._top_k: dict[str, Any] = {"top_k": data.top_k}
        self._open = urllib.request.build_opener(_NoRedirect()).open
        self._logged = float("-inf")
        self._refusal = ""

    # ---- what is asked for ---------------------------------------------------------------------------------------

    def connect(self, ids: Sequence[int]) -> None:
        """Finds the model and the way to ask, with requests for one token. ids: some prompt.

        Raises:
            ValueError: no such server, model or permission, or none of the two ways works.
        """
        if self.model is None:
            self.model = self._request("/models", None, _only_model)
            if self.model is None:
                raise self._error(f"lists no model ({self._refusal}); name it in data.endpoint_model")
        payload = self._completion(Request(ids, 1)) | {"prompt": list(ids)}
        found = self._request("/completions", payload, _token_ids, refused=(400, 404, 405, 413, 422, 501))
        self.gives_ids = found is not None and found[1] in (None, list(ids))
        if self.gives_ids:
            return
        hello: list[Message] = [{"role": "user", "content": "Hello"}]
        if self.chat(hello, (), 1, 1.0, 0) is None:
            self._extras, self._top_k = {}, {}
            if self.chat(hello, (), 1, 1.0, 0) is None:
                raise self._error(f"refuses a plain request: {self._refusal}")
            self._log(f"data: {self.url} does not take top_k: data.top_k is not applied to its answers")

    def complete(self, request: Request, stops: Sequence[int]) -> list[int] | None:
        """New ids until one that ends the turn, which is kept. None: it refuses this request."""
        payload = self._completion(request) | {"prompt": list(request.ids), "stop_token_ids": list(stops)}
        found = self._request("/completions", payload, _token_ids)
        if found is None:
            return None
        ids = found[0][: request.max_new_tokens]
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
        return ids[:end]

    def chat(self, messages: Sequence[Message], tools: Tools, most: int, temperature: float, seed: int) -> Reply | None:
        """The next turn as text, or as calls of the offered `tools`. None: it refuses this request."""
        payload = self._settings(most, temperature, seed) | {"messages": list(messages)}
        if tools:
            payload["tools"] = list(tools)
        if self._data.template_kwargs:  # the server renders these messages, by the names that vLLM and SGLang use
            payload["chat_template_kwargs"] = self._data.template_kwargs
        return self._request("/chat/completions", payload, _reply)

    def _completion(self, request: Request) -> dict[str, Any]:
        settings = self._settings(request.max_new_tokens, request.temperature, request.seed)
        return settings | {"return_token_ids": True, "skip_special_tokens": False}

    def _settings(self, most: int, temperature: float, seed: int) -> dict[str, Any]:
        """All of the law is stated, so that no default of the server's own shapes it. seed: 31 bits of it are sent."""
        law = {"temperature": temperature, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        law |= self._extras | (self._top_k if temperature > 0 else {})
        return {"model": self.model, "max_tokens": most, "seed": seed % 2**31, "n": 1, "stream": False, **law}

    # ---- how -----------------------------------------------------------------------------------------------------

    def _request(
        self,
        path: str,
        payload: dict[str, Any] | None,
        parse: Callable[[Any], T],
        refused: Sequence[int] = _REFUSALS,
    ) -> T | None:
        """The parsed answer; None for a status in `refused`. Anything that may pass is tried again, with back-off.

        Raises:
            ValueError: a status that does not pass (no permission, no such model), or too many failures.
        """
        tries = self._data.endpoint_retries + 1
        for attempt in range(tries):
            if self._stop.is_set():
                raise _Stopped
            ordered = 0.0
            try:
                return parse(json.loads(self._send(path, payload)))
            except urllib.error.HTTPError as error:
                with error:
                    failure = f"{error.code} {error.reason}: {self._excerpt(error)}"
                    ordered = _seconds_of(error.headers.get("Retry-After"))
                if error.code in refused:
                    self._refusal = failure
                    return None
                if error.code not in _PASSING and error.code < 500:
                    raise self._error(f"answered {path} with {failure}") from None
            except (OSError, http.client.HTTPException) as error:
                failure = f"{type(error).__name__}: {error}"
            except (ValueError, LookupError, TypeError) as error:
                failure = f"no valid answer ({type(error).__name__}: {error})"
            if attempt + 1 < tries:
                self._pause(f"{path}: {failure}", max(self._delay(payload, attempt), ordered))
        raise self._error(
            f"failed {tries} times, at last with {failure}; finished rows are kept: run again when it is up"
        )

    def _send(self, path: str, payload: dict[str, Any] | None) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        body = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(self.url + path, data=body, headers=headers)
        with self._open(request, timeout=self._data.endpoint_timeout) as response:
            content: bytes = response.read()
        return content

    def _excerpt(self, error: urllib.error.HTTPError) -> str:
        try:
            text = error.read(400).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            text = ""
        return self._hide(" ".join(text.split()))

    def _hide(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def _error(self, what: str) -> ValueError:
        return ValueError(f"data.endpoint: {self.url} {self._hide(what)}")

    def _delay(self, payload: dict[str, Any] | None, attempt: int) -> float:
        """0.5, 1, 2, .. seconds, times 0.5 to 1.5 by a hash: many clients do not come back at the same moment."""
        digest = hashlib.sha256(f"{attempt}{json.dumps(payload)}".encode()).digest()
        return min(_LONGEST_DELAY, _FIRST_DELAY * 2.0**attempt) * (0.5 + int.from_bytes(digest[:4], "big") / 2**32)

    def _pause(self, failure: str, seconds: float) -> None:
        if time.monotonic() - self._logged > 15:  # one line for all clients
            self._logged = time.monotonic()
            self._log(f"data: {self.url}{self._hide(failure)}; trying again in {seconds:.1f} s")
        self._stop.wait(seconds)


def _seconds_of(retry_after: str | None) -> float:
    """Of a Retry-After header: seconds, or a date."""
    if retry_after is None:
        return 0.0
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(max(seconds, 0.0), _LONGEST_ORDERED)


# ---- what is in an answer: each raises ValueError, LookupError or TypeError where it is not there ----------------


def _only_model(answer: Any) -> str:
    names = [str(model["id"]) for model in answer["data"]]
    if len(names) != 1:
        raise ValueError(f"models {names}, expected one: name it in data.endpoint_model")
    return names[0]


def _token_ids(answer: Any) -> tuple[list[int], list[int] | None] | None:
    """New ids, and the prompt's as the server saw them (None: it does not say); None where it gives no ids."""
    choice = answer["choices"][0]
    if "token_ids" not in choice or choice["token_ids"] is None:
        return None
    ids, prompt = choice["token_ids"], choice.get("prompt_token_ids")
    for some in (ids, prompt or []):
        if not isinstance(some, list) or not all(type(token) is int and token >= 0 for token in some):
            raise ValueError("token_ids is not a list of ids")
    return ids, prompt


def _reply(answer: Any) -> Reply:
    choice = answer["choices"][0]
    message, finish = choice["message"], choice["finish_reason"]
    text = message.get("content") or ""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(text, str) or not isinstance(thoughts, str | None):
        raise ValueError("content is not text")
    found: Message = {"role": "assistant", "content": text}
    if thoughts:
        found["reasoning_content"] = thoughts
    if message.get("tool_calls"):
        try:
            found["tool_calls"] = read_calls(message["tool_calls"])
        except Unusable:  # what the target wrote cannot be told: as if it had written nothing
            found["content"] = ""
    return Reply(found, finish == "length")


# ---- many at a time ----------------------------------------------------------------------------------------------


class Clients:
    """Threads that take work, let a server answer it, and write the answers."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[int],
        work: Work,
        folder: Path,
        log: Callable[[str], None],
    ) -> None:
        self._answerer, self._stops, self._work = Answerer(tokenizer, stops, data), stops, work
        self._vocab = len(tokenizer)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.server = Server(data, log, self._stop)
        self.server.connect(self._answerer.ids("Hello"))
        if not self.server.gives_ids and work.invents:
            raise ValueError(
                f"data.endpoint: {self.server.url} takes and gives no token ids, which inventing prompts needs; "
                "give prompts in data.path"
            )
        self._writer = AnswerWriter(folder)
        count = min(data.endpoint_concurrency, work.missing)
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> bool:
        """Waits for at most so long; whether all work is done. Raises what a thread raised."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if self._error is not None:
            raise self._error
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Ends the threads at their next request; answers to running ones are left alone."""
        self._stop.set()

    def _run(self) -> None:
        try:
            for task in self._work:
                if self._stop.is_set():
                    return
                if task is None:
                    self._stop.wait(0.2)
                    continue
                answer = self._answer(task)
                with self._lock:
                    self._writer.write(answer)
        except _Stopped:
            pass
        except BaseException as error:
            self._error = self._error or error
            self._stop.set()

    def _answer(self, task: Task) -> Answer:
        if not self.server.gives_ids:
            assert task.conversation is not None, "prompts are invented by ids"
            answer = self._answerer.answer_by_text(task.key, task.conversation, self.server.chat)
            self._work.count(answer.tokens)
            return answer
        return drive(self._answerer.program(task.key, task.conversation), self._complete) or Answer(task.key, REFUSED)

    def _complete(self, request: Request) -> list[int] | None:
        new = self.server.complete(request, self._stops)
        if new is not None:
            self._work.count(len(new))
            if new and max(new) >= self._vocab:
                raise ValueError(
                    f"data.endpoint: {self.server.url} gave token id {max(new)}, but the tokenizer of target.path has "
                    f"{self._vocab} ids; expected a server of the same model"
                )
        return new

"""HTTP to a model server, with its errors sorted by what to do about them."""

import asyncio
import json
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import httpx2 as httpx

from multigpu_worker.engines.common.failures import Failure
from multigpu_worker.repository.model import ModelFolderError, ModelSpec

CONNECT_S = 5.0
# How often a call looks whether its task was cancelled.
POLL_S = 0.1
TEXT_CHARS_MAX = 500
# The server has no room now, or its proxy no server: it took nothing on.
BUSY = frozenset({429, 502, 503, 504})
DENIED = frozenset({401, 403})
Cancelled = Callable[[], bool]


class TaskCancelledError(Exception):
    """The task of the request was cancelled."""


class UnavailableError(Exception):
    """The server does not answer, or has no room. The request is to be sent again, after `wait_s` if that is given."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class RequestFailedError(Exception):
    """The request has failed as `failure` says."""

    def __init__(self, error_type: str, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.failure = Failure(error_type=error_type, message=message, retryable=retryable)


def wrong_answer(message: str) -> RequestFailedError:
    return RequestFailedError("RemoteError", f"the server's answer makes no sense: {message}", retryable=True)


class Server:
    """Calls may be made from several threads. They raise UnavailableError, RequestFailedError, or, while `cancelled`
    returns True, TaskCancelledError: a request that nobody waits for any more is ended.
    """

    def __init__(self, spec: ModelSpec, calls_max: int) -> None:
        """ModelFolderError: the token's file can't be read."""
        remote, headers = spec.remote, {}
        if remote.token_file:
            try:
                token = Path(remote.token_file).expanduser().read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ModelFolderError(f"remote.token_file {remote.token_file} can't be read: {error}") from error
            headers["authorization"] = f"Bearer {token}"
        # All requests run on one thread with an event loop: a blocking request could not be ended.
        self._loop = asyncio.new_event_loop()
        self._client = httpx.AsyncClient(
            base_url=remote.url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=httpx.Timeout(remote.timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=calls_max),
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote-requests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def get(self, path: str, cancelled: Cancelled = lambda: False) -> Any:
        return self._json("GET", path, None, cancelled)

    def post(self, path: str, body: dict[str, Any], cancelled: Cancelled) -> Any:
        return self._json("POST", path, body, cancelled)

    def _json(self, method: str, path: str, body: dict[str, Any] | None, cancelled: Cancelled) -> Any:
        running = asyncio.run_coroutine_threadsafe(self._client.request(method, path, json=body), self._loop)
        try:
            while not wait((running,), POLL_S).done:
                if cancelled():
                    raise TaskCancelledError
            answer = running.result()
            _check(answer)
            return answer.json()
        except httpx.TransportError as error:
            raise _explained(error) from error
        except ValueError as error:
            raise wrong_answer(f"{method} {path} gave no JSON ({error})") from error
        finally:
            running.cancel()

    def events(self, path: str, body: dict[str, Any], cancelled: Cancelled) -> Iterator[dict[str, Any]]:
        """The server-sent events that answer a request. UnavailableError, if they end before their end mark."""
        lines: queue.Queue[str | Exception] = queue.Queue()
        running = asyncio.run_coroutine_threadsafe(self._read_lines(path, body, lines), self._loop)
        try:
            while True:
                if cancelled():
                    raise TaskCancelledError
                try:
                    line = lines.get(timeout=POLL_S)
                except queue.Empty:
                    continue
                if isinstance(line, Exception):
                    raise line
                if line == "[DONE]":
                    return
                event = json.loads(line)
                if "error" in event:
                    raise RequestFailedError("RemoteError", str(event["error"])[:TEXT_CHARS_MAX], retryable=True)
                yield event
        except httpx.TransportError as error:
            raise _explained(error) from error
        except ValueError as error:
            raise wrong_answer(f"an event is no JSON ({error})") from error
        finally:
            running.cancel()

    async def _read_lines(self, path: str, body: dict[str, Any], lines: "queue.Queue[str | Exception]") -> None:
        """Runs on the event loop's thread. The last entry is an exception or the end mark."""
        try:
            async with self._client.stream("POST", path, json=body) as answer:
                if answer.status_code != httpx.codes.OK:
                    await answer.aread()
                    _check(answer)
                async for line in answer.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if line.startswith("data:") and data:
                        lines.put(data)
            lines.put(UnavailableError("the answer broke off"))
        except Exception as error:  # noqa: BLE001  it is raised in the thread that waits
            lines.put(error)


def _check(answer: httpx.Response) -> None:
    status, text = answer.status_code, " ".join(answer.text.split())[:TEXT_CHARS_MAX]
    if status in BUSY:
        wait = answer.headers.get("retry-after", "")
        raise UnavailableError(f"{status} {text}", float(wait) if wait.isdecimal() else None)
    if status in DENIED:
        message = f"the server denies access ({status} {text}): correct remote.token_file in model.toml"
        raise RequestFailedError("RemoteDenied", message, retryable=False)
    if status >= 500:
        raise RequestFailedError("RemoteError", f"the server failed: {status} {text}", retryable=True)
    if status >= 400:
        raise RequestFailedError("BadInput", f"the server rejects the task: {status} {text}", retryable=False)


def _explained(error: httpx.TransportError) -> Exception:
    if isinstance(error, httpx.ReadTimeout):
        message = "the server did not answer within remote.timeout_s"
        return RequestFailedError("RemoteTimeout", message, retryable=True)
    return UnavailableError(f"{type(error).__name__}: {error}")

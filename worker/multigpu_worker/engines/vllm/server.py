"""vLLM's own server as a child of the engine process, on a socket that only this user can open.

It runs in an environment of its own (`vllm_python`), since it pins other versions of torch and transformers. Its
processes end with the engine's (keeper.py). If it ends by itself, the engine ends too: the agent then knows which tasks
ran, starts both again, and runs these tasks again.
"""

import collections
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx2 as httpx
import structlog

from multigpu_worker.engines.vllm import keeper
from multigpu_worker.repository.model import ModelFolderError

log = structlog.get_logger(__name__)

LINES_KEPT = 40
REASON_CHARS_MAX = 500
READY_POLL_S = 0.2
END_TIMEOUT_S = 10.0
# How long vLLM's server takes to end after its engine.
GONE_TIMEOUT_S = 30.0
# The same, after it has answered a request with an error.
ANSWERED_TIMEOUT_S = 1.0
NO_MEMORY = ("out of memory", "No available memory for the cache blocks", "is less than desired GPU memory utilization")
# An error of vLLM's engine or of one of its ranks. Its server prints a long traceback of its own after that.
CAUSE = re.compile(r"\((?:EngineCore|VllmWorker|Worker)[^)]*\) ERROR [^\]]*\] [\w.]*(?:Error|Exception)\b")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}  # fmt: skip


class VllmServer:
    """Make it on a thread that lives as long as the engine process: for the kernel, that thread is the keeper's parent.

    `environment`: further variables. `died`: called by another thread with the last lines of output, if vLLM ends
    before `close`.
    """

    def __init__(
        self, python: str, arguments: list[str], environment: Mapping[str, str], died: Callable[[str], None]
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="mgpu-vllm-")  # the keeper deletes it
        self.socket = str(Path(self._folder) / "socket")
        self._died = died
        self._lines: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)
        self._cause = ""  # the first line that CAUSE matches
        self._no_memory = False  # a line had one of NO_MEMORY
        self._closing = False
        module = ("-m", "vllm.entrypoints.openai.api_server")
        command = [python, *module, "--uds", self.socket, "--disable-uvicorn-access-log", *arguments]
        log.info("vLLM is being started", command=shlex.join(command))
        ours = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        ours |= ENVIRONMENT | dict(environment)
        kept = [sys.executable, "-I", keeper.__file__, str(os.getpid()), self._folder, *command]
        try:
            self._process = subprocess.Popen(
                kept, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ours,
            )  # fmt: skip
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._reader = threading.Thread(target=self._read, name="vllm-output", daemon=True)
        self._reader.start()

    def wait_ready(self) -> dict[str, str]:
        """Returns when it answers, with its version and the model's context. Raises ModelFolderError, MemoryError: it
        has ended, with the reason.
        """
        with httpx.Client(transport=httpx.HTTPTransport(uds=self.socket), base_url="http://vllm") as client:
            while self._process.poll() is None:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/health").status_code == httpx.codes.OK:
                        threading.Thread(target=self._watch, name="vllm-watch", daemon=True).start()
                        model = client.get("/v1/models").json()["data"][0]
                        return {
                            "vllm": str(client.get("/version").json()["version"]),
                            "context": str(model["max_model_len"]),
                        }
                time.sleep(READY_POLL_S)
        self._reader.join(END_TIMEOUT_S)
        output = "\n".join(self._lines)
        log.error("vLLM has ended while it loaded the model", output=output)
        what = f"vLLM has ended while it loaded the model: {_reason(self._cause, list(self._lines))}"
        if self._no_memory:
            raise MemoryError(what)
        raise ModelFolderError(f"{what}; its output is in the worker's log")

    def wait_gone(self, cancelled: Callable[[], bool], timeout_s: float) -> None:
        """Returns if it goes on after a call to it has failed, or the call's task is cancelled: else the engine process
        ends meanwhile.
        """
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s and not cancelled():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(READY_POLL_S)
                time.sleep(END_TIMEOUT_S)  # `died` ends this process
                return

    def close(self) -> None:
        self._closing = True
        self._process.send_signal(signal.SIGTERM)  # the keeper kills all; nothing of theirs is worth waiting for
        self._process.wait(END_TIMEOUT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode("utf-8", "replace").rstrip()
            self._lines.append(text)
            self._no_memory = self._no_memory or any(words in text for words in NO_MEMORY)
            if not self._cause and CAUSE.match(text):
                self._cause = text
            if "ERROR" in text:
                log.error("vLLM reports an error", line=text)

    def _watch(self) -> None:
        self._process.wait()
        if not self._closing:
            self._reader.join(END_TIMEOUT_S)
            self._died("\n".join(self._lines))


def _reason(cause: str, lines: list[str]) -> str:
    """The cause, if there is one, the last error in the output and what follows it, or the last line; of a long text,
    its beginning and its end.
    """
    errors = [at for at, line in enumerate(lines) if "Error" in line or "error:" in line]
    last = lines[errors[-1] if errors else -1 :]
    text = " ".join(line.strip() for line in ([cause, *last] if cause and cause not in last else last))
    half = REASON_CHARS_MAX // 2
    return text if len(text) <= REASON_CHARS_MAX else f"{text[:half]} … {text[-half:]}"

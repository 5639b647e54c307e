"""The fleet that `mgpuctl bench` measures: a running one, or one that it starts with `mgpuctl up`."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from multigpu.cli.failures import Failure
from multigpu.cli.local.supervisor import die_with
from multigpu.cli.presence import not_served
from multigpu.v1 import admin_service_pb2 as admin

STOP_TIMEOUT_S = 30.0
# Lines of its log that are shown if it does not start.
LOG_LINES_SHOWN = 5


@contextlib.contextmanager
def started_fleet(workers: int, models: Sequence[str], handlers: Sequence[str]) -> Iterator[str]:
    """Runs a fleet for the length of the block, and yields its address. Raises Failure."""
    with tempfile.TemporaryDirectory(prefix="multigpu-bench-") as folder:
        log_file = Path(folder, "log")
        argv = [sys.executable, "-m", "multigpu.cli", "up", "--listen", "127.0.0.1:0", "--workers", str(workers)]
        argv += ["--data-dir", str(Path(folder, "data"))]
        argv += [word for model in models for word in ("--model", model)]
        argv += [word for module in handlers for word in ("--handlers", module)]
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,  # a terminal's Ctrl-C must not reach it: a second signal ends it at once
                preexec_fn=die_with(os.getpid()),  # noqa: PLW1509  gRPC has no thread yet
            )
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            if not ready.startswith("ready: master "):
                log_text = log_file.read_text("utf-8", "replace")
                raise Failure(f"the fleet did not come up: {_last_lines(log_text)}")
            yield ready.split()[2].rstrip(",")
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _last_lines(log: str) -> str:
    """The last lines that are not JSON: messages for people; if there are none, the last lines."""
    lines = [line for line in log.splitlines() if line.strip()]
    return "\n".join(([line for line in lines if not line.startswith("{")] or lines)[-LOG_LINES_SHOWN:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The workers that serve a kind."""

    worker_ids: frozenset[str]
    # The default first.
    models: tuple[str, ...]
    hosts: frozenset[str]
    # Of the first worker: "cpu", "cuda:0".
    device: str
    pid: int
    products: tuple[str, ...]


def serving(connected: Sequence[admin.Worker], kind: str) -> Serving:
    """Raises Failure if none of the connected workers serves the kind."""
    if (failure := not_served(connected, kind)) is not None:
        raise failure
    offers = [(worker, found) for worker in connected for found in worker.capabilities if found.kind == kind]
    return Serving(
        worker_ids=frozenset(worker.worker_id for worker, _ in offers),
        models=tuple(dict.fromkeys(name for _, found in offers for name in found.models)),
        hosts=frozenset(worker.host for worker, _ in offers),
        device=offers[0][0].device.name,
        pid=offers[0][0].pid,
        products=tuple(dict.fromkeys(worker.device.product for worker, _ in offers)),
    )

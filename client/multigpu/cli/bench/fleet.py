"""The fleet that `mgpuctl bench` measures: one that runs, or one that `mgpuctl up` runs for as long as it takes."""

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
from multigpu.v1 import admin_service_pb2 as admin

STOP_TIMEOUT_S = 30.0
# Of its log, when it does not come up.
LOG_LINES_SHOWN = 5


@contextlib.contextmanager
def own_fleet(workers: int, models: Sequence[str], handlers: Sequence[str]) -> Iterator[str]:
    """The address of a fleet that is there for the time of the `with`. Raises Failure."""
    with tempfile.TemporaryDirectory(prefix="multigpu-bench-") as folder:
        log_file = Path(folder, "log")
        argv = [sys.executable, "-m", "multigpu.cli", "up", "--listen", "127.0.0.1:0", "--workers", str(workers)]
        argv += ["--data-dir", str(Path(folder, "data"))]
        argv += [word for model in models for word in ("--model", model)]
        argv += [word for module in handlers for word in ("--handlers", module)]
        with log_file.open("wb") as log:
            # A group of its own: Ctrl-C in a terminal is for us, and a second signal would have it end at once.
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,
                preexec_fn=die_with(os.getpid()),  # noqa: PLW1509  gRPC has no thread yet
            )
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if not said.startswith("ready: master "):
                raise Failure(f"the fleet did not come up: {last_words(log_file.read_text('utf-8', 'replace'))}")
            yield said.split()[2].rstrip(",")
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def last_words(log: str) -> str:
    """The end of what processes said in plain words before they gave up; where none did, the end of their log."""
    lines = [line for line in log.splitlines() if line.strip()]
    return "\n".join(([line for line in lines if not line.startswith("{")] or lines)[-LOG_LINES_SHOWN:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The workers that serve a kind."""

    worker_ids: frozenset[str]
    # Names of their models, the default first.
    models: tuple[str, ...]
    hosts: frozenset[str]
    # Of the first: "cpu", "cuda:0".
    device: str
    # Of its process.
    pid: int
    # As people call them, each once.
    products: tuple[str, ...]

    @classmethod
    def of(cls, connected: Sequence[admin.Worker], kind: str) -> "Crew":
        """Those of the connected ones. Raises Failure if there are none."""
        offers = [(worker, found) for worker in connected for found in worker.capabilities if found.kind == kind]
        if not offers:
            served = ", ".join(sorted({found.kind for worker in connected for found in worker.capabilities}))
            raise Failure(
                f"no connected worker serves {kind}; "
                + (f"they serve: {served}" if connected else "no worker is connected: `mgpuctl workers` lists them")
            )
        return cls(
            worker_ids=frozenset(worker.worker_id for worker, _ in offers),
            models=tuple(dict.fromkeys(name for _, found in offers for name in found.models)),
            hosts=frozenset(worker.host for worker, _ in offers),
            device=offers[0][0].device.name,
            pid=offers[0][0].pid,
            products=tuple(dict.fromkeys(worker.device.product for worker, _ in offers)),
        )

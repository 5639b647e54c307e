"""pytest's fixture `multigpu_fleet`: a real master and workers on this host, for one test.

    @pytest.mark.multigpu_fleet(handlers=["my_handlers"], workers=2)
    def test_areas(multigpu_fleet):
        with multigpu_fleet.client() as client:
            assert client.run("area", [2, 3]) == 6

The ini option `multigpu_handlers` names the modules of tests without a marker. pytest imports this module in every run.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from multigpu import Client

_READY_S = 90.0
# `mgpuctl up` stops its processes within 15 s.
_STOP_S = 20.0
_LOG_CHARS_MAX = 4000
# Becomes `mgpuctl up`, which the kernel asks to stop (PR_SET_PDEATHSIG, SIGTERM) if pytest is killed.
_START = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, "-m", "multigpu.cli", "up", *sys.argv[2:]])
"""
# The fleet has neither; the configuration of this user may name those of another fleet.
_OPEN = {"token": "", "tls_ca": "", "tls_cert": "", "tls_key": ""}
_OLD_VARIABLES = ("WORKER_COUNT", "LOAD_BALANCING_STRATEGY")


class Fleet:
    """A running master with workers on the CPU."""

    def __init__(self, address: str, log_path: Path) -> None:
        # HOST:PORT of the master.
        self.address = address
        self._log_path = log_path
        self._clients = contextlib.ExitStack()

    def client(self, **options: Any) -> Client:
        """A client of the fleet, closed with it. `options`: of multigpu.Client."""
        from multigpu import Client  # noqa: PLC0415  it imports gRPC

        return self._clients.enter_context(Client(self.address, **_OPEN | options))

    @property
    def log(self) -> str:
        """What the master, the workers and their handlers have logged and printed."""
        return self._log_path.read_text("utf-8", "replace")

    def close_clients(self) -> None:
        self._clients.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("multigpu_handlers", "modules whose handlers the fixture multigpu_fleet serves", type="args")


def pytest_configure(config: pytest.Config) -> None:
    text = "multigpu_fleet(handlers=[…], workers=1): modules and number of workers of the fixture multigpu_fleet"
    config.addinivalue_line("markers", text)


@pytest.fixture
def multigpu_fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A master and workers of this test, on ports that the kernel picks, with a journal that is removed with them."""
    marker = request.node.get_closest_marker("multigpu_fleet")
    given = marker.kwargs if marker is not None else {}
    if unknown := given.keys() - {"handlers", "workers"}:
        raise TypeError(f"@pytest.mark.multigpu_fleet has no option {unknown.pop()!r}; it has handlers and workers")
    handlers, workers = _options(request.config, **given)
    folder = tmp_path_factory.mktemp("multigpu_fleet")
    process = _launch(folder, handlers, workers, request.config.rootpath)
    try:
        fleet = Fleet(_await_address(process, folder), folder / "log")
        try:
            yield fleet
        finally:
            fleet.close_clients()
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its children end with it
            process.wait()
        # pytest shows it if the test failed.
        sys.stderr.write((folder / "log").read_text("utf-8", "replace")[-_LOG_CHARS_MAX:])


def _options(config: pytest.Config, *, handlers: Any = None, workers: int = 1) -> tuple[list[str], int]:
    """Those of the marker."""
    modules = config.getini("multigpu_handlers") if handlers is None else handlers
    if isinstance(modules, str) or not all(isinstance(module, str) for module in modules):
        raise TypeError(f'handlers={modules!r}: give a list of names of modules: handlers=["my_handlers"]')
    return list(modules), workers


def _launch(folder: Path, handlers: list[str], workers: int, cwd: Path) -> subprocess.Popen[bytes]:
    (folder / "config.toml").touch()
    env = {k: v for k, v in os.environ.items() if not k.startswith("MGPU_") and k not in _OLD_VARIABLES}
    # The workers import what this process can import.
    env |= {"MGPU_CONFIG": str(folder / "config.toml"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    flags = ["--listen", "127.0.0.1:0", "--data-dir", folder / "data", "--ready-file", folder / "ready"]
    flags += ["--no-gateway", "--device", "cpu", "--workers", str(workers), "--stop-timeout", "10"]
    flags += [part for module in handlers for part in ("--handlers", module)]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _START, str(os.getpid()), *map(str, flags)],
            cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip


def _await_address(process: subprocess.Popen[bytes], folder: Path) -> str:
    """The address in the ready file: "ready: master HOST:PORT, …"."""
    give_up = time.monotonic() + _READY_S
    while not (folder / "ready").exists():
        ended = process.poll() is not None
        if ended or time.monotonic() > give_up:
            why = "ended before it was ready" if ended else f"was not ready within {_READY_S:g} s"
            log = (folder / "log").read_text("utf-8", "replace")[-_LOG_CHARS_MAX:]
            raise RuntimeError(f"the fleet {why}; its log ends with:\n{log}")
        time.sleep(0.05)
    return (folder / "ready").read_text("utf-8").split()[2].rstrip(",")

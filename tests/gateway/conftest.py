"""A gateway as a process before a real fleet."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, Self

import pytest

from tests.fleet import Daemon, Fleet, until


class GatewayProcess:
    """mgpu-gateway on a port that the kernel picks. Leaving its block fails if its log has a traceback."""

    def __init__(self, folder: Path, master: str, *flags: str, env: dict[str, str] | None = None) -> None:
        self._flags = ["--master", master, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", *flags]
        self._log, self._env = folder / "gateway.log", env or {}
        self.start()

    def start(self) -> None:
        self.daemon = Daemon("multigpu_gateway.main", self._flags, self._log, self._env)
        until(lambda: self.daemon.events("serving") or not self.daemon.alive, 60)
        assert self.daemon.alive, self.daemon.log()
        self.address: str = self.daemon.events("serving")[-1]["http"]
        self.url = f"http://{self.address}"
        self.grpc: str = self.daemon.events("serving")[-1]["grpc"]

    def restart(self) -> None:
        """On the same port, after it was killed."""
        self._flags[self._flags.index("--http") + 1] = self.address
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.daemon.alive:
            assert self.daemon.stop() == 0
        assert "Traceback" not in self.daemon.log()

    def connect(self) -> HTTPConnection:
        return HTTPConnection(self.address, timeout=60)

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[HTTPResponse, Any]:
        """The response, and its body: a JSON value, or text."""
        connection = self.connect()
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            text = response.read()
            is_json = response.getheader("content-type") == "application/json" and text
            return response, json.loads(text) if is_json else text.decode()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A master and workers, for all tests of a module. FLEET in the module: keyword arguments for it."""
    options = getattr(request.module, "FLEET", {})
    with Fleet(tmp_path_factory.mktemp("fleet"), **options) as running:
        yield running
        assert not running.faults()


@pytest.fixture(scope="module")
def gateway(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), fleet.address) as running:
        yield running

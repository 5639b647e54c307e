"""The network proxy of the chaos runs delays, half-closes and resets connections."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.chaos.network import HERE, Network, NotAllowedError, Way

ECHO = """
import socket
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("ready", flush=True)
    while True:
        peer, _ = server.accept()
        try:
            while data := peer.recv(100):
                peer.sendall(data)
        except ConnectionError as error:
            print(type(error).__name__, flush=True)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network(["there"], seed=1)
    except NotAllowedError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def echo(network: Network) -> Iterator[subprocess.Popen[str]]:
    argv = [*network.prefix("there"), sys.executable, "-c", ECHO]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_packets_are_delayed_lost_and_reset(network: Network, echo: subprocess.Popen[str]) -> None:
    with socket.create_connection((network.address("there"), 7000), timeout=10) as connection:
        connection.sendall(b"plain")
        assert connection.recv(100) == b"plain"
        network.shape(HERE, "there", Way(delay_s=0.2))
        began_s = time.monotonic()
        connection.sendall(b"late")
        assert connection.recv(100) == b"late"
        assert time.monotonic() - began_s >= 0.2
        network.shape("there", HERE, Way(loss=1.0))  # one way only: it arrives, and the answer does not
        connection.settimeout(0.7)
        connection.sendall(b"cut")
        with pytest.raises(TimeoutError):
            connection.recv(100)
        network.heal()
        connection.settimeout(10)
        assert connection.recv(100) == b"cut"  # TCP sends it again
        network.reset(HERE, "there")
        connection.sendall(b"reset")
        with pytest.raises(ConnectionResetError):
            connection.recv(100)
        assert echo.stdout is not None
        assert echo.stdout.readline() == "ConnectionResetError\n"
    assert all(network.seen[what] for what in ("carried", "delayed", "lost", "reset"))

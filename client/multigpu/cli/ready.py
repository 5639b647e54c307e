"""Waits until a master answers, the named workers are connected and the gateway serves, then exits 0.

A separate process (`python -m multigpu.cli.ready MASTER GATEWAY [WORKER_ID …]`, both HOST:PORT; GATEWAY may be empty),
because the supervisor forks, and gRPC's threads don't survive forks.
"""

import socket
import sys
import time
from typing import Any

import grpc

from multigpu import AdminClient, CallTimeoutError, UnavailableError
from multigpu._transport.credentials import Credentials
from multigpu.cli.admin import active
from multigpu.cli.failures import Failure
from multigpu.cli.sdk_errors import failures
from multigpu.config.config import MasterConfig, load, load_client_config
from multigpu.config.values import split_address

POLL_INTERVAL_S = 0.05
RECONNECT = (("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 100))
# A local master without TLS and tokens: the client's own may be for another master.
OPEN_MASTER = {"token": "", "tls_ca": "", "tls_cert": "", "tls_key": ""}


def wait_until_ready(address: str, gateway: str, worker_ids: frozenset[str]) -> None:
    """Returns when all of `worker_ids` are connected, and the gateway, unless it is empty, accepts connections."""
    master = load(MasterConfig).config
    settings: dict[str, Any] = {} if master.tls_cert or master.require_tokens else OPEN_MASTER
    credentials = Credentials() if settings else Credentials.of_client(load_client_config())
    with credentials.channel(address, RECONNECT) as channel:  # a master writes its first token before it listens
        grpc.channel_ready_future(channel).result()
    with AdminClient(address, connect_timeout_s=0, **settings) as admin:
        while (found := connected(admin)) is None or not worker_ids <= found:
            time.sleep(POLL_INTERVAL_S)
    while gateway and not accepts(gateway):
        time.sleep(POLL_INTERVAL_S)


def accepts(address: str) -> bool:
    try:
        socket.create_connection(split_address(address), timeout=1).close()
    except OSError:
        return False
    return True


def connected(admin: AdminClient) -> set[str] | None:
    """The ids of the connected workers; None while no master answers."""
    try:
        return {worker.worker_id for worker in active(admin.list_workers())}
    except (UnavailableError, CallTimeoutError):
        return None


def main() -> None:
    try:
        with failures():
            wait_until_ready(sys.argv[1], sys.argv[2], frozenset(sys.argv[3:]))
    except Failure as failure:
        failure.show()
        sys.exit(failure.exit_code)


if __name__ == "__main__":
    main()

"""Waits until a master answers and the named workers are connected, then exits 0.

A separate process (`python -m multigpu.cli.ready HOST:PORT [WORKER_ID …]`), because the supervisor forks, and gRPC's
threads don't survive forks.
"""

import sys
import time

from multigpu._transport.credentials import Credentials
from multigpu.cli.failures import Failure, Unreachable
from multigpu.cli.rpc import Master, wait_until_connected
from multigpu.config.config import MasterConfig, load, load_client_config

POLL_INTERVAL_S = 0.05


def wait_until_ready(address: str, worker_ids: frozenset[str]) -> None:
    """Returns when all of `worker_ids` are connected."""
    credentials = _credentials()
    wait_until_connected(address, credentials)  # a master writes its first token before it listens
    with Master(address, credentials) as master:
        while (found := connected(master)) is None or not worker_ids <= found:
            time.sleep(POLL_INTERVAL_S)


def _credentials() -> Credentials:
    """The client's, unless the local master takes none: they may be for another master."""
    master = load(MasterConfig).config
    return Credentials.of_client(load_client_config()) if master.tls_cert or master.require_tokens else Credentials()


def connected(master: Master) -> set[str] | None:
    """The ids of the connected workers; None while no master answers."""
    try:
        return {worker.worker_id for worker in master.connected_workers()}
    except Unreachable:
        return None


def main() -> None:
    try:
        wait_until_ready(sys.argv[1], frozenset(sys.argv[2:]))
    except Failure as failure:
        failure.show()
        sys.exit(failure.exit_code)


if __name__ == "__main__":
    main()

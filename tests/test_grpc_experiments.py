"""The daemons turn off gRPC's own threads for sockets. gRPC ignores a name that it does not know."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os
import {module}.main
import grpc
print(os.environ["GRPC_EXPERIMENTS"])
grpc.insecure_channel("127.0.0.1:1").close()
"""


@pytest.mark.parametrize("module", ["multigpu_master", "multigpu_worker", "multigpu_gateway"])
def test_grpc_knows_what_the_daemons_turn_off(module: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)],
        env=environment | {"GRPC_VERBOSITY": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "event_engine" in run.stdout
    assert "Unknown experiment" not in run.stderr

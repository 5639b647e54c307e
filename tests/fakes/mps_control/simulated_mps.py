"""Replaces CUDA in an engine under test: a client of the simulated MPS daemon, which connects when it is created."""

import json
import os
import socket
from typing import Any


class SimulatedCudaError(RuntimeError):
    """Like torch's error for a failed CUDA call, whose message begins with "CUDA error"."""


class Client:
    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control")
        self._ask({"connect": os.getpid(), "device": os.environ.get("CUDA_VISIBLE_DEVICES", "")})

    def work(self) -> None:
        """Run a kernel and wait for it. SimulatedCudaError: the context was terminated or had a fault."""
        self._ask({"work": 1})

    def fault(self) -> None:
        """Run a kernel with an illegal memory access. Always raises SimulatedCudaError."""
        self._ask({"fault": 1})

    def excuse(self) -> None:
        """Announce that this process will end by itself, so that the daemon does not record a violation."""
        self._ask({"excuse": 1})

    def _ask(self, message: dict[str, Any]) -> None:
        answer = b""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            while not answer.endswith(b"\n"):
                data = self._socket.recv(65536)
                if not data:
                    raise ConnectionResetError
                answer += data
        except ConnectionError:
            text = "CUDA error: MPS client failed to connect to the MPS control daemon"
            raise SimulatedCudaError(text) from None
        if text := json.loads(answer):
            raise SimulatedCudaError(text)

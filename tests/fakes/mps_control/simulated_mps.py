"""What stands for CUDA in a test's engine: a client of the simulated MPS. It connects when it is made."""

import json
import os
import socket
from typing import Any


class SimulatedCudaError(RuntimeError):
    """What torch says when a CUDA call fails: its message begins with "CUDA error"."""


class Client:
    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control")
        self._ask({"connect": os.getpid(), "device": os.environ.get("CUDA_VISIBLE_DEVICES", "")})

    def work(self) -> None:
        """A kernel, waited for. SimulatedCudaError: the context is no more."""
        self._ask({"work": 1})

    def fault(self) -> None:
        """A kernel that reads where it must not. SimulatedCudaError, always."""
        self._ask({"fault": 1})

    def excuse(self) -> None:
        """Announce that this process will end by its own doing, which is nobody's violation."""
        self._ask({"excuse": 1})

    def _ask(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            data = self._socket.recv(65536)
            if not data:
                raise SimulatedCudaError("CUDA error: MPS client failed to connect to the MPS control daemon")
            answer += data
        if text := json.loads(answer):
            raise SimulatedCudaError(text)

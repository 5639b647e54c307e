"""The base class of a client's calls. mypyc does not compile this module, because classes of Python inherit from it."""

from typing import Any

from multigpu._transport.payloads import Reference
from multigpu.errors import MultigpuError
from multigpu.outcome import Outcome
from multigpu.v1 import task_pb2

# Approximate bytes of a task in a frame, beside its payload.
OVERHEAD_BYTES = 32

Answer = Outcome | MultigpuError


class Call:
    """One task that a caller waits for. A subclass handles the answer."""

    # True: the task was submitted before, by whomever, and goes on when the caller leaves.
    follows = False
    # True, of a call that follows: it needs the partial outputs from the first on, also if another call has them.
    streams = False

    __slots__ = (
        "deferred", "done", "nbytes", "own", "partials_received", "payload", "place", "request_id", "sent", "spec"
    )  # fmt: skip

    def __init__(self, spec: task_pb2.TaskSpec, payload: bytes, request_id: str, own: dict[str, Any] | None) -> None:
        self.spec = spec
        self.payload = payload
        # Where a large payload lies for the master to read; None: not written yet.
        self.place: Reference | None = None
        self.request_id = request_id
        # Further fields of TaskInput.
        self.own = own
        self.nbytes = len(payload) + OVERHEAD_BYTES
        self.partials_received = 0
        # True once a frame of any stream took it: the master may know it.
        self.sent = False
        # True during the delay that a rejection asked for.
        self.deferred = False
        # True once settled or withdrawn: it must not be sent.
        self.done = False

    def settle(self, answer: Answer) -> None:
        """Called once, on the event loop."""
        raise NotImplementedError

    def receive_partial(self, data: bytes, content_type: str) -> None:
        """The next output of a running task. Ignored by default: the outcome has all of them."""

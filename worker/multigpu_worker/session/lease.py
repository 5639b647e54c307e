"""The leases that a worker holds, and what their tasks have in common.

mypyc does not compile this module, because most attributes of a lease stay with its class.
"""

from collections.abc import Sized
from dataclasses import dataclass, field

# No limit.
TOGETHER_MAX = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What the tasks of a batch have in common."""

    kind: str
    model: str = ""
    parameters: tuple[tuple[str, str], ...] = ()
    content_type: str = ""
    # 0: no limit.
    run_timeout_s: float = 0.0
    durable: bool = True
    # From 1, which goes first, to 5.
    priority: int = 3


@dataclass(eq=False)
class Lease:
    """One attempt. No slots: attributes that most leases don't use stay with the class, which makes leases cheap."""

    lease_id: int
    task_id: int
    attempt: int
    spec: Spec
    # Bytes, or a reference to them of the same length.
    payload: bytes | Sized
    units: int = 1
    # Shows a later master that the lease was granted to us. 0: the master sends none.
    proof: int = 0
    # From the attempt before.
    checkpoint: bytes = b""
    partials_received: int = 0
    # These outputs, if they are small.
    partials_before: tuple[bytes, ...] = ()
    traceparent: str = ""
    # A rank of a task that several workers run: no model but its own stays in memory.
    exclusive: bool = False
    # False: its partials are too large to keep, so the attempt ends with its stream.
    resumable: bool = True
    running: bool = field(default=False, init=False)
    # Not wanted any more.
    dropped: bool = field(default=False, init=False)
    # In the batcher, once it has gone to an engine.
    rank: int = field(default=0, init=False)
    # The master wants it back, unless it has begun.
    recalled: bool = field(default=False, init=False)
    # The largest batch that it may join. Lowered after an engine ended with it; 1: it is a suspect.
    together_max: int = field(default=TOGETHER_MAX, init=False)
    # Uncharged deaths of an engine with it inside.
    deaths: int = field(default=0, init=False)
    fraction: float = field(default=0.0, init=False)
    steps: int = field(default=0, init=False)
    note: str = field(default="", init=False)
    # The last lines of this attempt.
    log: str = field(default="", init=False)
    log_unsent: bool = field(default=False, init=False)
    # The checkpoint of this attempt.
    saved: bytes | None = field(default=None, init=False)
    saved_unsent: bool = field(default=False, init=False)
    # Partial outputs of this attempt, kept to be sent again; how many were made, and their bytes.
    partials: list[tuple[bytes, str]] | None = field(default=None, init=False)
    partials_made: int = field(default=0, init=False)
    partial_bytes: int = field(default=0, init=False)

    @property
    def suspect(self) -> bool:
        """It may have ended an engine: it runs alone."""
        return self.together_max == 1

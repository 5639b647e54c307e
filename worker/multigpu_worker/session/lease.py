"""The leases that a worker holds, and what their tasks have in common.

This module is not compiled with mypyc: in a compiled class each instance would have all attributes (see Lease).
"""

from collections.abc import Sized
from dataclasses import dataclass, field

# A `batch_size_max` without effect.
BATCH_SIZE_MAX = 1 << 30


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
    # The payload's bytes, or a Reference, whose len() is the payload's size.
    payload: bytes | Sized
    units: int = 1
    # Proves to a later master process that the lease was granted to this worker. 0: the master sends no proofs.
    proof: int = 0
    # The last checkpoint of the attempts before.
    checkpoint: bytes = b""
    # The number of partial outputs that the master has from the attempts before; and these outputs, if they are small.
    partials_received: int = 0
    partials_before: tuple[bytes, ...] = ()
    traceparent: str = ""
    # A rank of a gang: while it runs, no model but the one that it uses is in memory.
    exclusive: bool = False
    # False: the worker doesn't keep all partial outputs of the task, so the attempt ends when the stream breaks.
    resumable: bool = True
    running: bool = field(default=False, init=False)
    # Revoked, returned or failed: it need not be run.
    dropped: bool = field(default=False, init=False)
    # The rank in the batcher; set when the batcher cuts a batch with this lease.
    rank: int = field(default=0, init=False)
    # The master wants the lease back, unless an engine has begun it.
    recalled: bool = field(default=False, init=False)
    # The largest batch that it may join. Lowered after an engine died with this lease inside; 1: it is a suspect.
    batch_size_max: int = field(default=BATCH_SIZE_MAX, init=False)
    # The number of engine deaths with this lease inside that were not charged to it.
    deaths: int = field(default=0, init=False)
    fraction: float = field(default=0.0, init=False)
    steps: int = field(default=0, init=False)
    note: str = field(default="", init=False)
    # The last lines that this attempt logged.
    log: str = field(default="", init=False)
    log_unsent: bool = field(default=False, init=False)
    # The checkpoint of this attempt.
    checkpoint_saved: bytes | None = field(default=None, init=False)
    checkpoint_unsent: bool = field(default=False, init=False)
    # Partial outputs of this attempt, kept to be sent again; how many were made, and the bytes of those kept.
    partials: list[tuple[bytes, str]] | None = field(default=None, init=False)
    partials_made: int = field(default=0, init=False)
    partial_bytes: int = field(default=0, init=False)

    def release_inputs(self) -> None:
        """Free what only a run needs: the lease itself may stay in queues for long."""
        self.payload = b""
        self.checkpoint = b""
        self.partials_before = ()

    @property
    def suspect(self) -> bool:
        """Whether it may have ended an engine. Then it runs alone."""
        return self.batch_size_max == 1

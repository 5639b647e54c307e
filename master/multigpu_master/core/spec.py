"""The scheduler's data type Spec. It has a module of its own because compiled classes have no weak references."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Spec:
    """A validated multigpu.v1.TaskSpec. Tasks with equal specs share one object."""

    kind: str
    model: str = ""
    queue: str = "default"
    priority: int = 3
    labels: tuple[tuple[str, str], ...] = ()
    memory_bytes: int = 0
    deadline_s: float | None = None  # since the epoch
    queue_timeout_s: float | None = None
    run_timeout_s: float | None = None
    attempts_max: int = 3
    backoff_initial_s: float = 0.1
    backoff_max_s: float = 30.0
    durable: bool = True
    result_ttl_s: float = 86_400.0
    wait_for_worker: bool = False
    retry_failed: bool = False
    world_size: int = 1  # the workers that run the task at the same time, at most
    world_size_min: int = 0  # and at least; 0: as many
    spread_ranks: bool = False  # these are on as many hosts as possible, not on as few
    submitter: str = ""  # name of the token; "": the master runs without tokens
    identity: int = 0  # 31 bits of a CRC of kind, model, content type and parameters; see identity.py
    wire: bytes = b""  # the serialized TaskSpec, for the journal and the workers

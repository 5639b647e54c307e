"""The scheduler's data type Spec. mypyc does not compile this module: compiled classes can't be weakly referenced."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Spec:
    """A validated multigpu.v1.TaskSpec. Tasks with equal specs share one object."""

    kind: str
    model: str = ""
    queue: str = "default"
    priority: int = 3
    labels: tuple[tuple[str, str], ...] = ()
    memory_bytes: int = 0  # free device memory that the task requires
    deadline_s: float | None = None  # in seconds since 1970
    queue_timeout_s: float | None = None
    run_timeout_s: float | None = None
    attempts_max: int = 3
    backoff_initial_s: float = 0.1
    backoff_max_s: float = 30.0
    durable: bool = True
    result_ttl_s: float = 86_400.0
    wait_for_worker: bool = False  # accept the task even if no known worker could ever run it
    retry_failed: bool = False  # run it even if its request_id is that of a task that did not succeed
    world_size: int = 1  # most workers that run the task together
    world_size_min: int = 0  # fewest workers; 0: world_size
    spread_ranks: bool = False  # the ranks are on as many hosts as possible; False: on as few
    submitter: str = ""  # name of the token; "": the master runs without tokens
    identity: int = 0  # 31 bits of a CRC of kind, model, content type and parameters; see identity.py
    wire: bytes = b""  # the serialized TaskSpec, for the journal and the workers

"""The interface of engines: code that runs batches of tasks of one kind, inside the engine process.

An engine sees nothing of gRPC, leases or the agent. It gets a batch, reports the result of each item, and returns. The
runtime around it (engine/runtime.py) sends the reports to the agent, attributes exceptions to items and applies limits.

Threads: a separate thread calls `prepare`, one batch at a time, while `run` may be working on the previous batch. One
thread per slot calls `run`, concurrently for engines with `one_by_one`, else one batch at a time. Any thread may use
the reporter.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from multigpu.repository.model import ModelSpec


@dataclass(slots=True)
class Item:
    """One attempt of one task."""

    lease_id: int
    task_id: int
    # From 1.
    attempt: int
    payload: bytes
    # The amount of work, in the kind's unit. At least 1.
    units: int
    # From the previous attempt. Empty: none.
    checkpoint: bytes
    # How many partial outputs of earlier attempts the master has. This attempt continues after them.
    partials_received: int
    # Those outputs, if they are at most 1 MiB together.
    partials: tuple[bytes, ...] = ()


@dataclass(slots=True)
class Batch:
    """At least one item. All items share everything except their input."""

    kind: str
    # Empty: the worker's default for the kind.
    model: str
    parameters: dict[str, str]
    # The form of the payloads: empty for bytes, "application/json" for a JSON value.
    content_type: str
    items: list[Item]


class Reporter(Protocol):
    """Reports progress and results. Any thread may call it. Reports about settled or cancelled items are dropped."""

    def begin(self, item: Item) -> None:
        """Start the item's run timeout, and blame it if the process dies.

        Engines with `one_by_one` call it for each item, before any user code. In other engines all items have begun
        when `run` is called.
        """

    def succeed(self, item: Item, result: bytes, content_type: str = "") -> None:
        """Settle the item with a result and its form."""

    def fail(self, item: Item, error_type: str, message: str, *, retryable: bool, traceback: str = "") -> None:
        """Settle the item with the class of the error, and one paragraph for people, with a remedy if there is one."""

    def partial(self, item: Item, data: bytes, content_type: str = "") -> None:
        """Send the next partial output and its form."""

    def progress(self, item: Item, fraction: float, note: str = "") -> None:
        """Report the completed fraction, 0 to 1. Counts as a beat."""

    def checkpoint(self, item: Item, data: bytes) -> None:
        """Save data for the next attempt, at most 1 MiB, else ValueError. Counts as a beat."""

    def cancelled(self, item: Item) -> bool:
        """Whether the item was cancelled. It may be skipped then, and need not be settled."""

    def beat(self) -> None:
        """Restart the progress timeout. Cheap: call it between steps."""


class Engine(Protocol):
    """Runs batches of one kind."""

    # True: items run one after the other, each with its own `begin`, and batches are small.
    # False: the batch runs together, and batches are as large as the token budget allows.
    one_by_one: ClassVar[bool]

    def prepare(self, batch: Batch) -> object:
        """Do the CPU work of a batch ahead (parse, tokenise). The result is passed to `run`.

        An exception fails every item of the batch, so errors of single items belong into `run`.
        """

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        """Run the batch and settle every item that is not cancelled. An exception fails all unsettled items."""


class ModelEngine(Engine, Protocol):
    """An engine of a kind that needs a model: EngineSettings.models has one entry.

    A user's engine is such a class, named in model.toml as "module:Class".
    """

    def __init__(self, settings: "EngineSettings") -> None:
        """Must be cheap: nothing is loaded yet."""

    def load(self) -> dict[str, str]:
        """Load the model, and run it once if its spec says warm_up. Called once, by the thread that calls `prepare`.

        Returns facts for people ("engine", "precision", "accuracy" …), shown by `mgpuctl models show`. The dict is read
        again after each batch, so it may change. Raises ModelFolderError if the model is at fault, MemoryError.
        """

    def close(self) -> None:
        """Write what is not written yet: the process ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCacheSettings:
    """Limits of the embedding cache, which hold for memory and for the file separately."""

    # 0: no cache.
    entries: int = 0
    bytes_max: int = 256 << 20
    # 0: vectors do not expire.
    ttl_s: float = 0.0
    # Survives the process, shared by the workers of a host. Empty: memory only.
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCacheCounts:
    """Texts since the engine started, and the contents of memory."""

    # Known; computed for another text or batch; computed.
    hits: int
    joined: int
    misses: int
    entries: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The agent's settings for the engine process. Must survive `marshal` as a tuple of plain values."""

    # "cpu" or "cuda:N".
    device: str
    # Batches of one-by-one kinds that run concurrently.
    slots: int
    # Threads of numeric libraries. 0: their default.
    threads: int
    # Modules with the user's handlers.
    handlers: tuple[str, ...] = ()
    # By id. An engine process for a model has only that one.
    models: dict[str, ModelSpec] = field(default_factory=dict)
    # The worker's default where the model says "auto". "auto": the engine decides.
    engine: str = "auto"
    precision: str = "auto"
    # Folder and limit of the artifact cache.
    artifacts: str = ""
    artifacts_bytes_max: int = 10 << 30
    embedding_cache: EmbeddingCacheSettings = EmbeddingCacheSettings()

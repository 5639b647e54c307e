"""What an engine is: code that runs batches of tasks of one kind, inside the engine process.

An engine sees nothing of gRPC, leases' lives or the agent. It gets a batch, says through a reporter what became of
each item, and returns. The runtime around it (engine/runtime.py) moves the words to the agent, charges exceptions to
the right item and keeps the clock.

Threads: `prepare` is called by a thread of its own, one batch at a time, while `run` may be working on the batch
before it. `run` is called by one thread for each slot, the main thread being the first: at the same time for an engine
whose class says `one_by_one`, one batch at a time for the others. The reporter may be used from any thread.
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
    # How much work this is, in the kind's own unit. At least 1.
    units: int
    # What the attempt before left for this one; empty if nothing.
    checkpoint: bytes
    # How many partial outputs of earlier attempts the master has: this attempt's go on from there.
    partials_received: int
    # These outputs, where they take at most 1 MiB together; else none.
    partials: tuple[bytes, ...] = ()


@dataclass(slots=True)
class Batch:
    """Items that share everything but their input. Never empty."""

    kind: str
    # Empty: the worker's default for the kind.
    model: str
    parameters: dict[str, str]
    # How payloads are to be read: empty for raw bytes, "application/json" for a JSON value.
    content_type: str
    items: list[Item]


class Reporter(Protocol):
    """The engine's voice. Any thread may use it; words about an item that was settled or cancelled are dropped."""

    def begin(self, item: Item) -> None:
        """Begin one item: from here on its run timeout counts, and it is to blame if the process dies.

        Engines that run one by one call it for each item, before any user code. In engines that run a batch together
        every item has begun when `run` is called, and there is no need to say so.
        """

    def succeed(self, item: Item, result: bytes, content_type: str = "") -> None:
        """Settle: the result, and how it is to be read."""

    def fail(self, item: Item, error_type: str, message: str, *, retryable: bool, traceback: str = "") -> None:
        """Settle: the class of the error, and one paragraph for a person, with the remedy where there is one."""

    def partial(self, item: Item, data: bytes, content_type: str = "") -> None:
        """Hand over the next partial output, and how it is to be read."""

    def progress(self, item: Item, fraction: float, note: str = "") -> None:
        """Say how far the item is, 0 to 1. Counts as a beat."""

    def checkpoint(self, item: Item, data: bytes) -> None:
        """Keep this for the next attempt, should this one die. At most 1 MiB, ValueError past it. Counts as a beat."""

    def cancelled(self, item: Item) -> bool:
        """True once nobody wants the item any more: it may be skipped, and need not be settled."""

    def beat(self) -> None:
        """Say that work moves, so that the progress timeout starts anew. Cheap; call it between steps."""


class Engine(Protocol):
    """Runs batches of one kind."""

    # True: items run one after the other, each with a beginning of its own, and batches are kept small in time.
    # False: the batch runs together, and batches are as large as the budget of tokens allows.
    one_by_one: ClassVar[bool]

    def prepare(self, batch: Batch) -> object:
        """Do the CPU side of a batch ahead (parse, tokenise). The answer is handed to `run`.

        An exception here fails every item of the batch, so errors of one item are better kept for `run`.
        """

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        """Run the batch and settle every item that is not cancelled. An exception fails all items that are left."""


class ModelEngine(Engine, Protocol):
    """An engine of a kind that needs a model. It is made with EngineSettings whose `models` has one entry.

    A user's own engine is such a class, named in model.toml as "module:Class".
    """

    def __init__(self, settings: "EngineSettings") -> None:
        """Cheap: nothing is loaded yet."""

    def load(self) -> dict[str, str]:
        """Load the model and run it once if its spec says warm_up. Called once, by the thread that will call `prepare`.

        The answer is for people: what was chosen ("engine", "precision", "accuracy" …), shown by `mgpuctl models show`.
        The dict is kept, and looked at again after each batch: where something else has come to serve, it may say so.
        Raises ModelFolderError where the model is at fault, MemoryError where there is no room.
        """

    def close(self) -> None:
        """Write what has yet to be written: the process ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCacheSettings:
    """How many vectors are remembered, and where. In memory and in the file each limit holds by itself."""

    # 0: off.
    entries: int = 0
    bytes_max: int = 256 << 20
    # Seconds after which a vector is computed anew; 0: never.
    ttl_s: float = 0.0
    # What outlives the process, shared by the workers of a host. Empty: nothing does.
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingCacheCounts:
    """What the cache has done since its engine began, in texts, and what it holds in memory."""

    # Known; answered by the computing of the same text, which was under way for this batch or another; computed.
    hits: int
    joined: int
    misses: int
    entries: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What the agent tells the engine process about itself. Must survive `marshal` as a tuple of plain values."""

    # "cpu" or "cuda:N".
    device: str
    # Batches of one-by-one kinds that run at the same time.
    slots: int
    # Threads of numeric libraries; 0: their own choice.
    threads: int
    # Modules with the user's handlers, imported here and nowhere else.
    handlers: tuple[str, ...] = ()
    # By id. An engine process that serves a model has that one alone.
    models: dict[str, ModelSpec] = field(default_factory=dict)
    # What a model's "auto" means on this worker; "auto" again: the engine chooses.
    engine: str = "auto"
    precision: str = "auto"
    # Where plans, exports and figures that were expensive to make are kept, and how many bytes of them.
    artifacts: str = ""
    artifacts_bytes_max: int = 10 << 30
    embedding_cache: EmbeddingCacheSettings = EmbeddingCacheSettings()

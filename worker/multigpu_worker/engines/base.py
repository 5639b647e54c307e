"""The interface of engines: code that runs batches of tasks of one kind, inside the engine process.

An engine sees nothing of gRPC, leases or the agent. It gets a batch, reports the result of each item, and returns. The
runtime around it (engine/runtime.py) sends the reports to the agent, attributes exceptions to items and applies limits.

Threads: a separate thread calls `prepare`, one batch at a time, while `run` may be working on the previous batch. One
thread per slot calls `run`, concurrently for engines with `one_by_one`, else one batch at a time. Any thread may use
the reporter.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from multigpu._handling.attempts import Batch as Batch  # noqa: PLC0414  engines import it from here
from multigpu._handling.attempts import Item as Item  # noqa: PLC0414  engines import it from here
from multigpu._handling.attempts import Reporter as Reporter  # noqa: PLC0414  engines import it from here

from multigpu_worker.repository.model import ModelSpec
from multigpu_worker.repository.signature import Signature


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
        again every second, so it may change. Raises ModelFolderError if the model is at fault, MemoryError.
        """

    def close(self) -> None:
        """Write what is not written yet: the process ends."""


@runtime_checkable
class HasSignature(Protocol):
    """A ModelEngine whose model declares its inputs and outputs."""

    def signature(self) -> Signature:
        """Called once, after `load`."""


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
    # The Python of vLLM's environment. Empty: there is no engine vllm.
    vllm_python: str = ""
    # Folder of training scripts and jobs. Empty: no such tasks.
    train_dir: str = ""
    # The model repository, where fine-tuned models go. Empty: none.
    repository: str = ""
    # Of one task's result. The reporter fails a task above it; an engine may stop before its result is whole.
    result_bytes_max: int = 63 << 20
    allow_pickle: bool = False
    # By id. An engine process for a model has only that one.
    models: dict[str, ModelSpec] = field(default_factory=dict)
    # The worker's default where the model says "auto". "auto": the engine decides.
    engine: str = "auto"
    precision: str = "auto"
    # Folder and limit of the artifact cache.
    artifacts: str = ""
    artifacts_bytes_max: int = 10 << 30
    embedding_cache: EmbeddingCacheSettings = EmbeddingCacheSettings()

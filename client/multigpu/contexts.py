"""`context()`: the running attempt, for its handler."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

Keep = Callable[[str, str], None]


class Context(Protocol):
    """The running attempt, for its handler. Safe to use from any thread."""

    @property
    def device(self) -> str:
        """The worker's device, as torch names it: "cuda:0", "cpu"."""

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """Its lines appear in the worker's log, with the task_id and the attempt, and the last ones with the task:
        `mgpuctl tasks get`, `Outcome.log`, the dashboard. Batch handlers run many tasks at once: the worker's log only.
        """

    @property
    def task_id(self) -> int: ...

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""

    @property
    def parameters(self) -> Mapping[str, str]:
        """The parameters the task was submitted with."""

    @property
    def rank(self) -> int:
        """Of a task with `world_size`: which of the workers that run it this one is, from 0. Else 0."""

    @property
    def world_size(self) -> int:
        """How many workers run the task at the same time."""

    def init_process_group(self, backend: str = "") -> None:
        """Makes torch.distributed's default process group of all ranks of the task, and waits until they have come. It
        ends with the attempt. `backend`: default "nccl" on a GPU, else "gloo". ImportError: torch is not installed;
        torch.distributed.DistError: a rank has not come within torch's time limit.
        """

    @property
    def checkpoint(self) -> bytes:
        """The last checkpoint of earlier attempts; empty if there is none. Of several ranks, that of rank 0."""

    @property
    def partials_received(self) -> int:
        """How many partial outputs of earlier attempts have arrived; this attempt's first ones are skipped."""

    @property
    def cancelled(self) -> bool:
        """True once the task is cancelled: return soon; the result is dropped."""

    def save_checkpoint(self, data: bytes) -> None:
        """Saves data for the next attempt, in case this one dies. ValueError: more than 1 MiB."""

    def progress(self, fraction: float, note: str = "") -> None:
        """Reports progress from 0 to 1, with a short note. Resets a progress timeout."""


class LocalContext:
    """The Context where no task runs: while a class is instantiated, in a batch, and outside workers."""

    task_id, attempt, partials_received, cancelled = 0, 1, 0, False
    rank, world_size = 0, 1
    parameters: Mapping[str, str] = {}
    checkpoint = b""

    def __init__(self, device: str = "") -> None:
        """`device`: default, the first GPU that torch finds, else the CPU."""
        self._device = device
        self.log = task_log("")

    @property
    def device(self) -> str:
        if not self._device:
            torch = importlib.import_module("torch") if importlib.util.find_spec("torch") is not None else None
            self._device = "cuda:0" if torch is not None and torch.cuda.is_available() else "cpu"
        return self._device

    def init_process_group(self, backend: str = "") -> None:
        """A process group of this process alone. It stays until torch.distributed.destroy_process_group."""
        from multigpu._ranks import ALONE, init_process_group  # noqa: PLC0415  few need it

        init_process_group(ALONE, backend or ("nccl" if self.device.startswith("cuda") else "gloo"))

    def save_checkpoint(self, data: bytes) -> None:
        """Nothing: there is no task."""

    def progress(self, fraction: float, note: str = "") -> None:
        """Nothing: there is no task."""


class _TaskLog(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        assert self.extra is not None
        kwargs["extra"] = self.extra
        return f"{self.extra['prefix']}{msg}", kwargs


class _ToTask(logging.Handler):
    """Passes lines to the task that wrote them."""

    def emit(self, record: logging.LogRecord) -> None:
        keep: Keep | None = getattr(record, "keep", None)
        if keep is not None:
            keep(record.levelname, self.format(record).removeprefix(getattr(record, "prefix", "")))


_logger = logging.getLogger("multigpu.handlers")
_logger.addHandler(_ToTask())


def task_log(prefix: str, keep: Keep | None = None) -> logging.LoggerAdapter[logging.Logger]:
    """A logger that begins its lines with the prefix, and passes them to `keep`: level and text, without the prefix."""
    return _TaskLog(_logger, {"prefix": prefix, "keep": keep})


current_context: ContextVar[Context] = ContextVar("multigpu context")
_local = LocalContext()


def context() -> Context:
    """The Context of the running handler. Outside workers, where handlers run as plain functions: a LocalContext."""
    return current_context.get(_local)

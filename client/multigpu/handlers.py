"""Handlers: your functions and classes as kinds of task.

    import multigpu

    @multigpu.handler
    def thumbnail(image: bytes) -> bytes: ...

    @multigpu.handler
    class Embedder:
        def __init__(self, name: str = "all-MiniLM-L6-v2") -> None:
            self.model = SentenceTransformer(name, device=multigpu.context().device)

        @multigpu.batch(max_size=64, max_wait_ms=5)
        def __call__(self, texts: list[str]) -> list[list[float]]:
            return self.model.encode(texts).tolist()

A worker started with `--handlers my_module` imports the module in its engine process and serves every kind that the
module registers: "my_module.thumbnail", "my_module.Embedder". A class is instantiated once for each engine process,
before the worker takes tasks. The function, or the instance, is called with the task's value, and with a `Context` if
it has a second parameter. The value is what the client gave: bytes, a JSON value, or one with bytes and NumPy arrays in
it. If the parameter is annotated as bool, dict, float, int, list or str, bytes fail the task.

It may be a function, an async function, a generator or an async generator. Values that a generator yields are the
task's partial outputs, delivered at once; the value that it returns is the result. A result or a yielded value is such
a value too; None is sent as no bytes. A later attempt skips the outputs delivered before, so a generator must yield the
same values again: they may depend on the task's value, not on chance, the clock or its checkpoint.

An exception fails the task. It is tried again only if the handler says so: `retries=3` for any exception, `retry_on`
for some. Attempts that were lost with a worker, a device or an engine are always repeated.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, get_origin, overload

KIND_BYTES_MAX = 128
# Kinds that multigpu's own engines serve.
RESERVED_KINDS = frozenset({"classify", "echo", "embed", "fail", "generate", "infer", "sleep"})
BATCH_SIZE_MAX, BATCH_WAIT_MS_MAX = 10_000, 10_000
_JSON_TYPES = frozenset({"bool", "dict", "float", "int", "list", "str"})
_BATCHING = "__multigpu_batching__"

T = TypeVar("T", bound=Callable[..., Any])
Exceptions = type[BaseException] | tuple[type[BaseException], ...]


class Context(Protocol):
    """The running attempt, for its handler. Safe to use from any thread."""

    @property
    def device(self) -> str:
        """The worker's device, as torch names it: "cuda:0", "cpu"."""

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """Its lines appear in the worker's log, with the task_id and the attempt."""

    @property
    def task_id(self) -> int: ...

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""

    @property
    def parameters(self) -> Mapping[str, str]:
        """The parameters the task was submitted with."""

    @property
    def checkpoint(self) -> bytes:
        """The last checkpoint of earlier attempts; empty if there is none."""

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

    def save_checkpoint(self, data: bytes) -> None:
        """Nothing: there is no task."""

    def progress(self, fraction: float, note: str = "") -> None:
        """Nothing: there is no task."""


class _TaskLog(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        assert self.extra is not None
        return f"{self.extra['prefix']}{msg}", kwargs


def task_log(prefix: str) -> logging.LoggerAdapter[logging.Logger]:
    """A logger that begins its lines with the prefix."""
    return _TaskLog(logging.getLogger("multigpu.handlers"), {"prefix": prefix})


current_context: ContextVar[Context] = ContextVar("multigpu context")
_local = LocalContext()


def context() -> Context:
    """The Context of the running handler. Outside workers, where handlers run as plain functions: a LocalContext."""
    return current_context.get(_local)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How tasks of a kind are batched."""

    max_size: int
    max_wait_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A registered function or class."""

    kind: str
    # The function; of a class, its __call__.
    function: Callable[..., Any]
    # None: a function.
    cls: type | None
    takes_context: bool
    # The annotation of the task's value, if it is a type of JSON values; else "".
    json_type: str
    # How often an exception leads to another attempt; None: until the task's attempts_max. Of which classes.
    retries: int | None
    retry_on: tuple[type[BaseException], ...]
    # How many calls may run at a time in a worker; 0: one in each of its slots.
    concurrency: int
    batching: Batching | None


_handlers: dict[str, Handler] = {}


@overload
def handler(target: T, /) -> T: ...
@overload
def handler(
    kind: str = "", /, *, retries: int | None = None, retry_on: Exceptions = (), concurrency: int = 0
) -> Callable[[T], T]: ...
def handler(
    kind: Any = "", /, *, retries: int | None = None, retry_on: Exceptions = (), concurrency: int = 0
) -> Any:  # fmt: skip
    """Registers a function or a class for a kind of task; it stays as it is. Use it with or without arguments.

    `kind`: default, the module and the qualified name. `retries`: after how many exceptions the task is tried again;
    default: 0, or with `retry_on` until its attempts_max, which bounds every number of attempts (default 3).
    `retry_on`: only after these exceptions. `concurrency`: how many calls may run at a time in a worker; default: one
    in each of its slots.

    ValueError: the kind is empty, longer than 128 bytes, reserved, or already registered by another function.
    """
    if callable(kind):
        return handler()(kind)
    if not isinstance(kind, str):
        raise TypeError('a handler is registered for a kind of task: @multigpu.handler or @multigpu.handler("my.kind")')
    classes = retry_on if isinstance(retry_on, tuple) else (retry_on,)
    if not all(isinstance(each, type) and issubclass(each, BaseException) for each in classes):
        raise TypeError(f"retry_on takes classes of exceptions, not {retry_on!r}")
    if retries is None and not classes:
        retries = 0
    _check_count("retries", retries or 0)
    _check_count("concurrency", concurrency)
    _check_kind(kind)

    def register(target: T) -> T:
        cls = target if isinstance(target, type) else None
        function = _call_of(cls) if cls is not None else target
        batching = getattr(function, _BATCHING, None)
        if batching is not None and concurrency > 1:
            raise ValueError("a batched handler runs one batch at a time: leave concurrency out")
        name = kind or f"{target.__module__}.{target.__qualname__}"
        _check_kind(name)
        _check_free(name, target)
        takes_context, json_type = _parameters(function, of_class=cls is not None, batched=batching is not None)
        _handlers[name] = Handler(
            kind=name, function=function, cls=cls, takes_context=takes_context, json_type=json_type, retries=retries,
            retry_on=classes or (Exception,), concurrency=concurrency, batching=batching,
        )  # fmt: skip
        return target

    return register


def batch(*, max_size: int = 64, max_wait_ms: float = 5.0) -> Callable[[T], T]:
    """Marks a handler function, or the __call__ of a handler class, that takes the values of several tasks at a time.

    It receives a list and returns a list of the same length; where that has an exception, this task alone fails. A
    batch has at most `max_size` tasks, and waits at most `max_wait_ms` for more of them while the worker is idle. If
    the call raises, its tasks are run one by one, so that a value that no batch can hold fails alone.
    """
    if not (isinstance(max_size, int) and 1 <= max_size <= BATCH_SIZE_MAX):
        raise ValueError(f"max_size={max_size!r}: give 1 to {BATCH_SIZE_MAX:,}")
    if not 0 <= max_wait_ms <= BATCH_WAIT_MS_MAX:
        raise ValueError(f"max_wait_ms={max_wait_ms!r}: give 0 to {BATCH_WAIT_MS_MAX:,}")

    def mark(function: T) -> T:
        if isinstance(function, type):
            raise TypeError("batch belongs to the __call__ of a handler class, below the class's own decorator")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError("a batched handler returns a list: it can't be a generator")
        setattr(function, _BATCHING, Batching(max_size=max_size, max_wait_ms=max_wait_ms))
        return function

    return mark


def registered_handlers() -> dict[str, Handler]:
    """Every handler registered in this process, by kind."""
    return dict(_handlers)


def _check_count(name: str, count: Any) -> None:
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"{name}={count!r}: give a whole number, 0 or more")


def _check_kind(kind: str) -> None:
    if len(kind.encode()) > KIND_BYTES_MAX:
        raise ValueError(f"a kind has 1 to {KIND_BYTES_MAX} bytes, not {len(kind.encode())}: {kind[:200]!r}")
    if kind in RESERVED_KINDS:
        raise ValueError(f"the kind {kind!r} is multigpu's own; give the handler another, such as 'my.{kind}'")


def _check_free(kind: str, target: Any) -> None:
    earlier = _handlers.get(kind)
    if earlier is None:
        return
    known = earlier.cls or earlier.function
    if (known.__module__, known.__qualname__) != (target.__module__, target.__qualname__):
        where = f"{known.__module__}.{known.__qualname__}"
        raise ValueError(f"the kind {kind!r} is already handled by {where}; give one of the two another kind")


def _call_of(cls: type) -> Callable[..., Any]:
    """The __call__ of a handler class. ValueError: it has none, or can't be instantiated without arguments."""
    if "__call__" not in dir(cls) or not inspect.isfunction(getattr(cls, "__call__", None)):  # noqa: B004  the method itself
        raise ValueError(f"the handler class {cls.__qualname__} needs a method __call__(self, value)")
    parameters = list(inspect.signature(cls).parameters.values())
    variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    if wanted := [p.name for p in parameters if p.default is p.empty and p.kind not in variable]:
        raise ValueError(
            f"workers instantiate the handler class {cls.__qualname__} without arguments: give "
            f"{', '.join(wanted)} of its __init__ defaults"
        )
    function: Callable[..., Any] = cls.__call__
    return function


def _parameters(function: Callable[..., Any], *, of_class: bool, batched: bool) -> tuple[bool, str]:
    """Whether a function takes a context, and the json_type of its value."""
    positional = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
    ][int(of_class) :]
    required = [parameter for parameter in positional if parameter.default is parameter.empty]
    if not positional or len(required) > 2 - batched:
        name = f"{function.__module__}.{function.__qualname__}"
        if batched:
            raise ValueError(f"the batched handler {name} must take one list: f(values)")
        raise ValueError(
            f"the handler {name} must take the task's value, and may take a context: f(value) or f(value, ctx)"
        )
    if batched:
        return False, ""
    takes_context = len(positional) >= 2 and (len(required) == 2 or positional[1].name in {"ctx", "context"})
    annotation = positional[0].annotation
    # As text if its module postpones the evaluation of annotations.
    named = annotation if isinstance(annotation, str) else getattr(get_origin(annotation) or annotation, "__name__", "")
    name = named.partition("[")[0]
    return takes_context, name if name in _JSON_TYPES else ""

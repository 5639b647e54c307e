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
before the worker takes tasks. The function, or the instance, is called with the task's value, or with the arguments of
`submit`, `run` and `map`. They are checked against its parameters and type hints before it runs.

    thumbnail(image)                              # here, as a plain function
    handle = thumbnail.submit(client, image)      # on a worker
    images = thumbnail.map(client, many)

It may be a function, an async function, a generator or an async generator. Values that a generator yields are the
task's partial outputs, delivered at once; the value that it returns is the result. Arguments and results are bytes,
JSON values, NumPy arrays, and what is made of these. A later attempt skips the outputs delivered before, so a generator
must yield the same values again: they may depend on the task's value, not on chance, the clock or its checkpoint.

An exception fails the task. It is tried again only if the handler says so: `retries=3` for any exception, `retry_on`
for some. Attempts that were lost with a worker, a device or an engine are always repeated.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

from multigpu._encoding import Arguments
from multigpu._targets import call_of, check_parameters, module_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Generator

    from multigpu._async.client import AsyncClient
    from multigpu._async.handles import AsyncTaskHandle
    from multigpu._async.streams import AsyncStream
    from multigpu._sync.client import Client
    from multigpu._sync.handles import TaskHandle
    from multigpu._sync.streams import Stream
    from multigpu.options import SpecMapOptions

KIND_BYTES_MAX = 128
# Kinds that multigpu's own engines serve.
RESERVED_KINDS = frozenset({"classify", "echo", "embed", "fail", "generate", "infer", "rerank", "sleep", "train"})
BATCH_SIZE_MAX, BATCH_WAIT_MS_MAX = 10_000, 10_000
ATTEMPTS_DEFAULT, ATTEMPTS_MAX = 3, 100
ASYNC_CONCURRENCY = 16
_BATCHING = "__multigpu_batching__"

P = ParamSpec("P")
# What a call returns here, and as the result of a task: of `async def f() -> int`, a coroutine and an int.
C = TypeVar("C")
R = TypeVar("R")
A = TypeVar("A")
B_co = TypeVar("B_co", covariant=True)
T = TypeVar("T", bound=Callable[..., Any])
Exceptions = type[BaseException] | tuple[type[BaseException], ...]


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
    # How often an exception leads to another attempt; None: until the task's attempts_max. Of which classes.
    retries: int | None
    retry_on: tuple[type[BaseException], ...]
    # How many calls may run at a time in a worker; 0: one in each of its slots, or ASYNC_CONCURRENCY.
    concurrency: int
    batching: Batching | None

    @property
    def concurrency_of_async(self) -> int:
        """How many calls of an asynchronous handler a slot runs together; 0: it is not asynchronous."""
        if not (inspect.iscoroutinefunction(self.function) or inspect.isasyncgenfunction(self.function)):
            return 0
        return self.concurrency or ASYNC_CONCURRENCY


_handlers: dict[str, Handler] = {}


class BatchedFunction(Protocol[A, B_co]):
    """A function that `batch` has marked. A task has one of the values and one of the results."""

    __name__: str

    def __call__(self, values: list[A], /) -> Sequence[B_co]: ...


class HandlerFunction(Generic[P, C, R]):
    """A function or a class that is a handler. Calling it runs it here; of a class, that makes an instance."""

    __qualname__: str

    def __init__(self, target: Callable[..., C], registered: Handler) -> None:
        self.__wrapped__ = target
        self.kind = registered.kind
        # More attempts than the default, if the handler wants more retries.
        attempts = min((registered.retries or 0) + 1, ATTEMPTS_MAX)
        self._options: SpecMapOptions = {"attempts_max": attempts} if attempts > ATTEMPTS_DEFAULT else {}
        functools.update_wrapper(self, target, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> C:
        return self.__wrapped__(*args, **kwargs)

    def __reduce__(self) -> str:
        return self.__qualname__  # pickled by name, as functions are

    def __repr__(self) -> str:
        return f"<handler {self.kind}>"

    def options(self, **options: Unpack[SpecMapOptions]) -> Self:
        """The same handler with options for `submit`, `run` and `map`: queue, priority, timeout …

        TypeError: there is no such option.
        """
        _check_options(options)
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._options = {**self._options, **options}  # noqa: SLF001  its own
        return other

    @overload
    def submit(self, client: Client, /, *args: P.args, **kwargs: P.kwargs) -> TaskHandle[R]: ...
    @overload
    def submit(
        self, client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, AsyncTaskHandle[R]]: ...
    def submit(self, client: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Submits a task that calls the handler with these arguments, and returns its handle."""
        _check_client(client, self, "submit")
        return client.submit(self.kind, _value_of(self, args, kwargs), **self._options)

    @overload
    def run(self, client: Client, /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def run(self, client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]: ...
    def run(self, client: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a task that calls the handler with these arguments, and returns its result."""
        _check_client(client, self, "run")
        return client.run(self.kind, _value_of(self, args, kwargs), **self._options)

    @overload
    def stream(self, client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Stream[Any]: ...
    @overload
    def stream(self, client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncStream[Any]: ...
    def stream(self, client: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a task that calls the handler, a generator, and yields what it yields, as `client.stream` does."""
        _check_client(client, self, "stream")
        return client.stream(self.kind, _value_of(self, args, kwargs), **self._options)

    @overload
    def map(
        self, client: Client, /, *iterables: Iterable[Any], **options: Unpack[SpecMapOptions]
    ) -> Generator[R, None, None]: ...
    @overload
    def map(
        self, client: AsyncClient, /, *iterables: Iterable[Any], **options: Unpack[SpecMapOptions]
    ) -> AsyncGenerator[R, None]: ...
    def map(self, client: Any, /, *iterables: Iterable[Any], **options: Unpack[SpecMapOptions]) -> Any:
        """Runs a task for each item, and yields the results as `client.map` does, with its options. With several
        iterables, which give the arguments as those of the built-in `map` do, it ends with the shortest.
        """
        _check_client(client, self, "map")
        if not iterables:
            raise TypeError("map takes one iterable for each argument of the handler")
        items = iterables[0] if len(iterables) == 1 else (Arguments(*each) for each in zip(*iterables, strict=False))
        return client.map(self.kind, items, **{**self._options, **options})


def _check_client(client: Any, handler_function: HandlerFunction[..., Any, Any], method: str) -> None:
    if not callable(getattr(client, "run" if method == "map" else method, None)):
        name = handler_function.__wrapped__.__name__
        raise TypeError(
            f"the first argument is the client: {name}.{method}(client, …), and this is of type "
            f"{type(client).__name__}; to call the handler here, write {name}(…)"
        )


def _check_options(options: Mapping[str, Any]) -> None:
    from multigpu.options import SpecMapOptions, TaskOptions, unknown_option  # noqa: PLC0415  workers don't need it

    known = dict.fromkeys(TaskOptions.__annotations__ | SpecMapOptions.__annotations__, "")
    for name in options:
        if name not in known:
            raise unknown_option(name, known)


def _value_of(handler_function: HandlerFunction[..., Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One positional argument is the task's value, as clients in other languages send it. TypeError: a keyword is an
    option of the task.
    """
    if kwargs:
        from multigpu.options import SpecOptions  # noqa: PLC0415  workers don't need it

        for name in kwargs.keys() & SpecOptions.__annotations__.keys():
            target = handler_function.__wrapped__
            parameters = inspect.signature(call_of(target) if isinstance(target, type) else target).parameters
            if name not in parameters and all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
                hint = f"{target.__name__}.options({name}={kwargs[name]!r}).run(client, …)"
                raise TypeError(f"{name!r} is an option of the task, and no parameter of the handler: write {hint}")
    return args[0] if len(args) == 1 and not kwargs else Arguments(*args, **kwargs)


class _Decorator(Protocol):
    @overload
    def __call__(self, target: type[C], /) -> HandlerFunction[..., C, Any]: ...  # type: ignore[overload-overlap]  # a class first
    @overload
    def __call__(self, target: BatchedFunction[A, B_co], /) -> HandlerFunction[[A], Sequence[B_co], B_co]: ...
    @overload
    def __call__(
        self, target: Callable[P, Coroutine[Any, Any, R]], /
    ) -> HandlerFunction[P, Coroutine[Any, Any, R], R]: ...
    @overload
    def __call__(
        self, target: Callable[P, Generator[Any, Any, R]], /
    ) -> HandlerFunction[P, Generator[Any, Any, R], R]: ...
    @overload
    def __call__(self, target: Callable[P, Iterator[C]], /) -> HandlerFunction[P, Iterator[C], Any]: ...
    @overload
    def __call__(self, target: Callable[P, R], /) -> HandlerFunction[P, R, R]: ...


@overload
def handler(target: type[C], /) -> HandlerFunction[..., C, Any]: ...  # type: ignore[overload-overlap]  # a class first
@overload
def handler(target: BatchedFunction[A, B_co], /) -> HandlerFunction[[A], Sequence[B_co], B_co]: ...
@overload
def handler(target: Callable[P, Coroutine[Any, Any, R]], /) -> HandlerFunction[P, Coroutine[Any, Any, R], R]: ...
@overload
def handler(target: Callable[P, Generator[Any, Any, R]], /) -> HandlerFunction[P, Generator[Any, Any, R], R]: ...
@overload
def handler(target: Callable[P, Iterator[C]], /) -> HandlerFunction[P, Iterator[C], Any]: ...
@overload
def handler(target: Callable[P, R], /) -> HandlerFunction[P, R, R]: ...
@overload
def handler(
    kind: str = "", /, *, retries: int | None = None, retry_on: Exceptions = (), concurrency: int = 0
) -> _Decorator: ...
def handler(
    kind: Any = "", /, *, retries: int | None = None, retry_on: Exceptions = (), concurrency: int = 0
) -> Any:  # fmt: skip
    """Registers a function or a class for a kind of task. Use it with or without arguments.

    `kind`: default, the module and the qualified name; the module of `python my_models.py` is "my_models". `retries`:
    after how many exceptions the task is tried again; default: 0, or with `retry_on` until its attempts_max, which
    bounds every number of attempts (default 3). `retry_on`: only after these exceptions. `concurrency`: how many calls
    may run at a time in a worker; default: one in each of its slots, and of an async function 16.

    ValueError: the kind is longer than 128 bytes, reserved, or already registered by another function.
    """
    if callable(kind):
        return handler()(kind)
    if not isinstance(kind, str):
        raise TypeError('a handler is registered for a kind of task: @multigpu.handler or @multigpu.handler("my.kind")')
    classes = retry_on if isinstance(retry_on, tuple) else (retry_on,)
    if not all(isinstance(each, type) and issubclass(each, BaseException) for each in classes):
        raise TypeError(f"retry_on takes a class of exceptions, or a tuple of them, not {retry_on!r}")
    if retries is None and not classes:
        retries = 0
    _check_count("retries", retries or 0)
    _check_count("concurrency", concurrency)
    _check_kind(kind)

    def register(target: Any) -> HandlerFunction[..., Any, Any]:
        cls = target if isinstance(target, type) else None
        function = call_of(cls) if cls is not None else target
        batching = getattr(function, _BATCHING, None)
        if batching is not None and concurrency > 1:
            raise ValueError("a batched handler runs one batch at a time: leave concurrency out")
        name = kind or f"{module_of(target)}.{target.__qualname__}"
        _check_kind(name)
        _check_free(name, target)
        check_parameters(function, of_class=cls is not None, batched=batching is not None)
        registered = _handlers[name] = Handler(
            kind=name, function=function, cls=cls, retries=retries, retry_on=classes or (Exception,),
            concurrency=concurrency, batching=batching,
        )  # fmt: skip
        return HandlerFunction(target, registered)

    return register


class _BatchDecorator(Protocol):
    @overload
    def __call__(self, function: Callable[[list[A]], Sequence[B_co]], /) -> BatchedFunction[A, B_co]: ...
    @overload
    def __call__(self, function: T, /) -> T: ...


@overload
def batch(function: Callable[[list[A]], Sequence[B_co]], /) -> BatchedFunction[A, B_co]: ...
@overload
def batch(function: T, /) -> T: ...
@overload
def batch(*, max_size: int = 64, max_wait_ms: float = 5.0) -> _BatchDecorator: ...
def batch(function: Any = None, /, *, max_size: int = 64, max_wait_ms: float = 5.0) -> Any:
    """Marks a handler function, or the __call__ of a handler class, that takes the values of several tasks at a time.
    Use it with or without arguments.

    It receives a list and returns a list of the same length; where that has an exception, this task alone fails. A
    batch has at most `max_size` tasks, and waits at most `max_wait_ms` for more of them while the worker is idle. If
    the call raises, its tasks are run one by one, so that a value that no batch can hold fails alone.
    """
    if callable(function):
        return batch()(function)
    if function is not None:
        raise TypeError(f"batch takes keyword arguments: @multigpu.batch(max_size={function!r})")
    if not (isinstance(max_size, int) and 1 <= max_size <= BATCH_SIZE_MAX):
        raise ValueError(f"max_size={max_size!r}: give 1 to {BATCH_SIZE_MAX:,}")
    if not 0 <= max_wait_ms <= BATCH_WAIT_MS_MAX:
        raise ValueError(f"max_wait_ms={max_wait_ms!r}: give 0 to {BATCH_WAIT_MS_MAX:,}")

    def mark(function: T) -> T:
        if isinstance(function, HandlerFunction):
            raise TypeError("write @multigpu.handler above @multigpu.batch")
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

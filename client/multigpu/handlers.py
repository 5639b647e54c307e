"""Handlers: your functions as kinds of task.

    import multigpu

    @multigpu.handler("thumbnail")
    def thumbnail(image: bytes) -> bytes: ...

A worker started with `--handlers my_module` imports the module in its engine process and serves every kind that the
module registers. The function takes the task's value, and a `Context` if it has a second parameter. The value is bytes,
or the parsed JSON if the task's content type is "application/json". If the parameter is annotated as bool, dict, float,
int, list or str, bytes fail the task.

It may be a function, an async function, a generator or an async generator. Values that a generator yields are the
task's partial outputs, delivered at once; the value that it returns is the result. A result or a yielded value is
bytes, None (no bytes), or any JSON value. A later attempt skips the outputs delivered before, so a generator must yield
the same values again: they may depend on the task's value, not on chance, the clock or its checkpoint.

An exception fails the attempt, and the task is tried again, unless the exception is a `PermanentError`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, get_origin

KIND_BYTES_MAX = 128
# Kinds that multigpu's own engines serve.
RESERVED_KINDS = frozenset({"classify", "echo", "embed", "fail", "generate", "infer", "sleep"})
_JSON_TYPES = frozenset({"bool", "dict", "float", "int", "list", "str"})

F = TypeVar("F", bound=Callable[..., Any])


class PermanentError(Exception):
    """Raise this (or a subclass) in a handler if another attempt would not help: the task ends FAILED at once."""


class Context(Protocol):
    """The running attempt, for its handler. Safe to use from any thread."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A registered function."""

    kind: str
    function: Callable[..., Any]
    takes_context: bool
    # The annotation of the task's value, if it is a type of JSON values; else "".
    json_type: str


_handlers: dict[str, Handler] = {}


def handler(kind: str) -> Callable[[F], F]:
    """Register a function for a kind of task. The function itself stays as it is.

    ValueError: the kind is empty, longer than 128 bytes, reserved, or already registered by another function.
    """
    if not isinstance(kind, str):
        raise TypeError('a handler is registered for a kind of task: @multigpu.handler("my.kind")')
    if not kind or len(kind.encode()) > KIND_BYTES_MAX:
        raise ValueError(f"a kind has 1 to {KIND_BYTES_MAX} bytes, not {len(kind.encode())}: {kind[:200]!r}")
    if kind in RESERVED_KINDS:
        raise ValueError(f"the kind {kind!r} is multigpu's own; give the handler another, such as 'my.{kind}'")

    def register(function: F) -> F:
        earlier = _handlers.get(kind)
        if earlier is not None and (earlier.function.__module__, earlier.function.__qualname__) != (
            function.__module__,
            function.__qualname__,
        ):
            where = f"{earlier.function.__module__}.{earlier.function.__qualname__}"
            raise ValueError(f"the kind {kind!r} is already handled by {where}; give one of the two another kind")
        takes_context, json_type = _parameters(function)
        _handlers[kind] = Handler(kind=kind, function=function, takes_context=takes_context, json_type=json_type)
        return function

    return register


def registered_handlers() -> dict[str, Handler]:
    """Every handler registered in this process, by kind."""
    return dict(_handlers)


def _parameters(function: Callable[..., Any]) -> tuple[bool, str]:
    """Whether a function takes a context, and the json_type of its value."""
    positional = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
    ]
    required = [parameter for parameter in positional if parameter.default is parameter.empty]
    if not positional or len(required) > 2:
        name = f"{function.__module__}.{function.__qualname__}"
        raise ValueError(
            f"the handler {name} must take the task's value, and may take a context: f(value) or f(value, ctx)"
        )
    takes_context = len(positional) >= 2 and (len(required) == 2 or positional[1].name in {"ctx", "context"})
    annotation = positional[0].annotation
    # As text if its module postpones the evaluation of annotations.
    named = annotation if isinstance(annotation, str) else getattr(get_origin(annotation) or annotation, "__name__", "")
    name = named.partition("[")[0]
    return takes_context, name if name in _JSON_TYPES else ""

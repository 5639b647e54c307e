"""The arguments of a handler's call, checked against its parameters and type hints."""

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from multigpu._encoding import CALL, JSON, MSGPACK, PICKLE, RAW, Arguments, decode
from multigpu._targets import hints_of

_NOT_JSON = f": send a JSON value, with content type {JSON} (`mgpuctl submit --parse-json`)"


class ArgumentsError(ValueError):
    """The handler can't be called with the task's payload. The message says what to change."""


class Parameters:
    """Those of a handler's function; of a batched one, of the call for one of its values."""

    def __init__(self, function: Callable[..., Any], *, of_class: bool, batched: bool) -> None:
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[int(of_class) :]
        hints = hints_of(function)
        if batched:
            parameters = parameters[:1]
            name = parameters[0].name
            hints = {name: (typing.get_args(hints.get(name)) or (Any,))[0]}
        self._signature = signature.replace(parameters=parameters)
        self._hints = {p.name: hints[p.name] for p in parameters if hints.get(p.name, Any) is not Any}
        # With one parameter and one value there is nothing to bind.
        only = parameters[0] if len(parameters) == 1 else None
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._single = only.name if only is not None and only.kind in kinds else ""

    def of(self, payload: bytes, content_type: str) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments in a task's payload. Raises ArgumentsError."""
        value: Any = payload
        if content_type in (JSON, MSGPACK, CALL, PICKLE):
            try:
                value = decode(payload, content_type)
            except ValueError as error:
                raise ArgumentsError(f"the payload can't be read as {content_type}: {error}") from error
        try:
            return self._bound(value)
        except ArgumentsError as error:
            if content_type == RAW:
                raise ArgumentsError(f"{error}{_NOT_JSON}") from None
            raise

    def _bound(self, value: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        if self._single and type(value) is not Arguments:
            return (self._checked(self._single, value),), {}
        if not self._signature.parameters and (value is None or (type(value) is bytes and not value)):
            return (), {}  # nothing was given
        given = value if type(value) is Arguments else Arguments(value)
        try:
            bound = self._signature.bind(*given.args, **given.kwargs)
        except TypeError as error:
            raise ArgumentsError(f"the handler takes {self._signature}: {error}") from None
        for name, argument in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(self._checked(name, each) for each in argument)
            elif kind is inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {key: self._checked(name, each) for key, each in argument.items()}
            else:
                bound.arguments[name] = self._checked(name, argument)
        return bound.args, bound.kwargs

    def _checked(self, name: str, value: Any) -> Any:
        """The argument; a list, which is what arrives for a tuple, as the tuple that its hint asks for."""
        hint = self._hints.get(name)
        if hint is None or type(value) is hint:
            return value
        if type(value) is list and (typing.get_origin(hint) or hint) is tuple:
            value = tuple(value)
        typeguard = _typeguard()

        try:
            typeguard.check_type(value, hint, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS)
        except typeguard.TypeCheckError as error:
            wanted = getattr(hint, "__name__", str(hint)) if typing.get_origin(hint) is None else str(hint)
            raise ArgumentsError(f"the argument {name!r} must be {wanted}: {error}") from None
        return value


def _typeguard() -> Any:
    """Imported late: few handlers need it."""
    try:
        import typeguard  # noqa: PLC0415
    except ImportError:
        what = "the type hints of handlers are checked with typeguard, which is not installed"
        raise ImportError(f"{what}; run `pip install 'multigpu[testing]'`") from None
    return typeguard

"""Functions and classes that are to become handlers."""

import inspect
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def module_of(target: Any) -> str:
    """The module by which a worker imports the target: of a program, the name of its file or of `python -m`."""
    name: str = target.__module__
    if name == "__main__":
        main = sys.modules["__main__"]
        if getattr(main, "__spec__", None) is not None:
            name = main.__spec__.name  # type: ignore[union-attr]  # it is not None
        elif getattr(main, "__file__", None):
            name = Path(str(main.__file__)).stem
    return name


def call_of(cls: type) -> Callable[..., Any]:
    """The __call__ of a handler class. ValueError: it has none, or can't be instantiated without arguments."""
    if "__call__" not in dir(cls) or not inspect.isfunction(getattr(cls, "__call__", None)):  # noqa: B004  the method itself
        raise ValueError(f"the handler class {cls.__qualname__} needs a method __call__(self, value)")
    parameters = list(inspect.signature(cls).parameters.values())
    if wanted := [p.name for p in parameters if p.default is p.empty and p.kind not in _VARIABLE]:
        raise ValueError(
            f"workers instantiate the handler class {cls.__qualname__} without arguments: give "
            f"{', '.join(wanted)} of its __init__ defaults"
        )
    function: Callable[..., Any] = cls.__call__
    return function


def check_parameters(function: Callable[..., Any], *, of_class: bool, batched: bool) -> None:
    parameters = list(inspect.signature(function).parameters.values())[int(of_class) :]
    required = [p for p in parameters if p.default is p.empty and p.kind not in _VARIABLE]
    name = f"{function.__module__}.{function.__qualname__}"
    if not of_class and parameters and parameters[0].name == "self":
        raise TypeError(f"{name} is a method: decorate its class, with this as its __call__, or a function")
    if batched and (not parameters or len(required) > 1):
        raise ValueError(f"the batched handler {name} must take one list: f(values)")
    if batched:
        hint = hints_of(function).get(parameters[0].name, Any)
        kind = typing.get_origin(hint) or hint
        if isinstance(kind, type) and not issubclass(list, kind):
            raise TypeError(
                f"the batched handler {name} gets a list: write list[…] for {getattr(hint, '__name__', hint)}"
            )


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The type hints; none if a name in them exists for type checkers only."""
    try:
        return typing.get_type_hints(function)
    except Exception:  # noqa: BLE001  whatever evaluating a hint raises
        return {}

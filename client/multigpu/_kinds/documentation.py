"""help() of the clients' methods: their options, which are the keys of TypedDicts, as parameters that are explained."""

import inspect
import re
from typing import Any, TypeVar

from multigpu import options
from multigpu._kinds.finetuning import FinetuneOptions
from multigpu._kinds.generation import GenerateOptions

_OF_KINDS = {"GenerateOptions": GenerateOptions, "FinetuneOptions": FinetuneOptions}
C = TypeVar("C", bound=type)
# An option in the docstring of a TypedDict, and its text.
_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*(?:\n {5,}\S.*)*)", re.MULTILINE)


class _Default:
    def __repr__(self) -> str:
        return "..."


def document_options(cls: C) -> C:
    """Expands `**options: Unpack[X]` in the signatures of the methods, and adds the options to their docstrings."""
    for method in vars(cls).values():
        found = re.fullmatch(r"Unpack\[(\w+)\]", str(getattr(method, "__annotations__", {}).get("options", "")))
        if found is not None:
            typed: Any = (vars(options) | _OF_KINDS)[found[1]]
            signature = inspect.signature(method)
            own = {name: p for name, p in signature.parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
            shown = own | {name: _parameter(name, typed) for name in typed.__annotations__ if name not in own}
            method.__signature__ = signature.replace(parameters=list(shown.values()))
            text = inspect.cleandoc(method.__doc__ or "")
            texts = _TEXTS | texts_of(typed)
            rest = [name for name in shown if name in texts and f"`{name}`" not in text]
            method.__doc__ = "\n".join([text, "", "Options:", *(f"    {name}: {texts[name]}" for name in rest), ""])
    return cls


def _parameter(name: str, typed: Any) -> inspect.Parameter:
    annotation = typed.__annotations__[name]
    annotation = getattr(annotation, "__forward_arg__", annotation)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_Default(), annotation=annotation)


def texts_of(*classes: Any) -> dict[str, str]:
    """The text of every option of these TypedDicts."""
    return {name: text for cls in classes for name, text in _ATTRIBUTE.findall(inspect.cleandoc(cls.__doc__ or ""))}


_TEXTS = texts_of(
    options.EmbedOptions,
    options.SpecOptions,
    options.CallOptions,
    options.TaskOptions,
    options.MapOptions,
    GenerateOptions,
)

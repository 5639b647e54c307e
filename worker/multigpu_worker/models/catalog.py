"""What a worker offers: its models, and the names that tasks may call them by.

Pure. A model has an id, its name or "name:version". A task says an id, a name alone, which means the version that is
current, or nothing, which means the first model that serves the task's kind.
"""

import difflib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from multigpu.repository.model import ModelSpec

# What engines need, one of each; and the remedy.
_LIBRARIES = {
    "torch": (("torch",), "install multigpu[worker]"),
    "onnx": (("onnxruntime",), "install multigpu[onnx]"),
    "tensorrt": (("tensorrt", "tensorrt_rtx"), "install multigpu[gpu] or multigpu[rtx]"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    # By id, the default of each kind before the others.
    specs: Mapping[str, ModelSpec] = field(default_factory=dict)
    # Why models can't be served, by id.
    errors: Mapping[str, str] = field(default_factory=dict)
    # The id that each name alone means.
    current: Mapping[str, str] = field(default_factory=dict)

    def routes(self) -> dict[tuple[str, str], str]:
        """The id that each kind and name means."""
        found: dict[tuple[str, str], str] = {}
        for model, spec in self.specs.items():
            found[spec.kind, model] = model
            if self.current.get(spec.name, model) == model:
                found.setdefault((spec.kind, ""), model)
                found[spec.kind, spec.name] = model
        for model, spec in self.specs.items():  # a kind of which no version is current still has a default
            found.setdefault((spec.kind, ""), model)
        return found

    def names(self, kind: str) -> list[str]:
        """All that tasks of a kind may say, the default first."""
        routes = self.routes()
        default = routes.get((kind, ""))
        names = [name for of_kind, name in routes if of_kind == kind and name]
        return sorted(names, key=lambda name: routes[kind, name] != default)

    def kinds(self) -> list[str]:
        return list(dict.fromkeys(spec.kind for spec in self.specs.values()))


def split(specs: Mapping[str, ModelSpec], engine: str) -> tuple[dict[str, ModelSpec], dict[str, str]]:
    """Those that can be served with what is installed, and why the others can't. `engine`: the worker's choice."""
    served: dict[str, ModelSpec] = {}
    errors: dict[str, str] = {}
    for model, spec in specs.items():
        runs_on = engine_of(spec, engine)
        modules, remedy = _LIBRARIES.get(runs_on, ((), ""))
        if modules and not any(importlib.util.find_spec(module) for module in modules):
            errors[model] = f"the engine {runs_on} needs {' or '.join(modules)}, which is not installed: {remedy}"
        else:
            served[model] = spec
    return served, errors


def engine_of(spec: ModelSpec, engine: str) -> str:
    """What will run a model, as far as that can be said before it is loaded: a key of _LIBRARIES, or a class."""
    if ":" in spec.engine:
        return spec.engine
    if spec.source == "tensorrt-plan":
        return "tensorrt"
    chosen = spec.engine if spec.engine != "auto" else engine
    if spec.source == "onnx":
        return chosen if chosen == "tensorrt" else "onnx"
    return "torch" if chosen == "auto" or spec.kind in ("generate", "classify") else chosen


def imports_of(spec: ModelSpec, engine: str) -> tuple[str, ...]:
    """What a process may import before it is told to load the model: what takes long there."""
    runs_on = engine_of(spec, engine)
    if ":" in runs_on or spec.source == "tensorrt-plan":
        return ()
    if runs_on == "onnx" or spec.source == "onnx":  # which serves while a plan is built, too
        return ("numpy", "onnxruntime")
    if spec.source == "torch-export":
        return ("torch",)
    return ("torch", "transformers", "transformers.modeling_utils", "transformers.models.auto")


def other_versions(name: str, names: Iterable[str]) -> list[str]:
    """Of a name with a version: the ids of those that there are."""
    base, _, version = name.partition(":")
    return [other for other in names if version and other.startswith(f"{base}:")]


def unknown(kind: str, name: str, names: Iterable[str]) -> str:
    """What to tell who asks for a model that isn't there."""
    there = list(names)
    versions = other_versions(name, there)
    near = difflib.get_close_matches(name, there, n=1)
    if versions:
        hint = f"; the versions of {name.partition(':')[0]!r} that are served are {', '.join(versions)}."
    else:
        hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"this worker has no model {name!r} for {kind!r}{hint} It has: {', '.join(there)}"

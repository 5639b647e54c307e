"""Which models a worker can serve, which engine runs them, and the names that tasks may use for them.

A model's id is its name or "name:version". A task names an id, a name alone for the current version, or nothing for the
first model of its kind.
"""

import dataclasses
import difflib
import importlib.util
from collections.abc import Iterable

from multigpu_worker.repository.model import EXPORTED_SOURCES, MEASURED, REMOTE, VLLM, ModelSpec, Scan

# By engine: modules of which it needs at least one, and how to install them.
_LIBRARIES = {
    "torch": (("torch",), "install multigpu[worker]"),
    "onnx": (("onnxruntime",), "install multigpu[onnx]"),
    "tensorrt": (("tensorrt", "tensorrt_rtx"), "install multigpu[gpu] or multigpu[rtx]"),
    REMOTE: (("httpx2",), "install multigpu[remote]"),
    VLLM: (("httpx2",), "install multigpu[remote]"),
}


NO_VLLM = (
    "the engine vllm needs vllm_python, and the worker has none: install vLLM into an environment of its own, and name "
    "its Python there (docs/generate.md)"
)


def routes_of(catalog: Scan) -> dict[tuple[str, str], str]:
    """The model id for each kind and name."""
    found: dict[tuple[str, str], str] = {}
    for model, spec in catalog.models.items():
        found[spec.kind, model] = model
        if catalog.current.get(spec.name, model) == model:
            found.setdefault((spec.kind, ""), model)
            found[spec.kind, spec.name] = model
    for model, spec in catalog.models.items():  # the default of kinds that have no current version
        found.setdefault((spec.kind, ""), model)
    return found


def installed(found: Scan, engine: str, *, vllm: bool, on_gpu: bool, gpus: int) -> Scan:
    """The scan with an error for each model whose library is not installed, or that needs more GPUs than there are.

    `engine`: the worker's setting. If it is "auto", a model with the engine "auto" gets VLLM where the worker has
    `vllm` and is `on_gpu`, and MEASURED on a CPU, if these can run it. `gpus`: 0 on a CPU, where all ranks of a model
    share the processor.
    """
    models: dict[str, ModelSpec] = {}
    errors = dict(found.errors)
    for model, spec in found.models.items():
        if (spec.engine, engine) == ("auto", "auto"):
            if vllm and on_gpu and _runs_on_vllm(spec):
                spec = dataclasses.replace(spec, engine=VLLM)  # noqa: PLW2901
            elif not on_gpu and _may_be_measured(spec):
                spec = dataclasses.replace(spec, engine=MEASURED)  # noqa: PLW2901
        if spec.engine == VLLM and not vllm:
            errors[model] = NO_VLLM
            continue
        if 0 < gpus < spec.ranks or max(1, gpus) < spec.devices:
            wanted = max(spec.ranks, spec.devices)
            names = ",".join(f"cuda:{index}" for index in range(wanted))
            errors[model] = f"it needs {wanted} GPUs, and this worker has {gpus}: start it with --device {names}"
            continue
        runs_on = engine_of(spec, engine)
        modules, remedy = _LIBRARIES.get(runs_on, ((), ""))
        if modules and not any(importlib.util.find_spec(module) for module in modules):
            errors[model] = f"the engine {runs_on} needs {' or '.join(modules)}, which is not installed: {remedy}"
        else:
            models[model] = spec
    return dataclasses.replace(found, models=models, errors=errors)


def _runs_on_vllm(spec: ModelSpec) -> bool:
    known = spec.precision in ("auto", "fp32", "bf16", "fp16") and set(spec.parameters) <= {"cache_bytes", "context"}
    return (spec.source, spec.kind) == ("huggingface", "generate") and known


def _may_be_measured(spec: ModelSpec) -> bool:
    """Whether both engines can run the model here."""
    exportable = spec.source in EXPORTED_SOURCES and spec.precision in ("auto", "fp32") and not spec.device_map
    libraries = ("torch", "onnxruntime", "onnxscript")
    return spec.kind == "embed" and exportable and all(importlib.util.find_spec(name) for name in libraries)


def engine_of(spec: ModelSpec, engine: str) -> str:
    """The engine of a model as far as it is known before loading: a key of _LIBRARIES, MEASURED, or "module:class"."""
    if ":" in spec.engine or spec.engine in (REMOTE, VLLM, MEASURED):
        return spec.engine
    if spec.source == "tensorrt-plan":
        return "tensorrt"
    chosen = spec.engine if spec.engine != "auto" else engine
    if spec.source == "onnx":
        return chosen if chosen == "tensorrt" else "onnx"
    return "torch" if chosen == "auto" or spec.kind in ("generate", "classify", "rerank") else chosen


def imports_of(spec: ModelSpec, engine: str) -> tuple[str, ...]:
    """The slow imports for a model. A spare process does them before it is given a model."""
    runs_on = engine_of(spec, engine)
    if ":" in runs_on or spec.source == "tensorrt-plan":
        return ()
    if runs_on == REMOTE:
        return ("httpx2", "numpy")
    if runs_on in ("onnx", MEASURED) or spec.source == "onnx":  # ONNX Runtime serves while a plan is built
        return ("numpy", "onnxruntime")
    if spec.source == "torch-export":
        return ("torch",)
    return ("torch", "transformers", "transformers.modeling_utils", "transformers.models.auto")


def other_versions(name: str, names: Iterable[str]) -> list[str]:
    """If `name` is "name:version", the ids among `names` that are versions of the same model; else none."""
    base, _, version = name.partition(":")
    return [other for other in names if version and other.startswith(f"{base}:")]


def unknown(kind: str, name: str, names: Iterable[str]) -> str:
    """The error message for tasks whose model this worker does not have."""
    there = list(names)
    versions = other_versions(name, there)
    near = difflib.get_close_matches(name, there, n=1)
    if versions:
        hint = f"; the versions of {name.partition(':')[0]!r} that are served are {', '.join(versions)}."
    else:
        hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"this worker has no model {name!r} for {kind!r}{hint} It has: {', '.join(there)}"

"""Which engine runs which kind.

An engine's module is imported when its first batch comes, so that a worker that only echoes never imports torch.
"""

import contextlib
import importlib
from dataclasses import dataclass
from typing import cast

from multigpu.handlers import registered_handlers
from multigpu.repository import ModelSpec

from multigpu_worker.engines.base import Engine, EngineSettings, ModelEngine

# The engines of kinds that need a model, as module:class. A model may name another of the same form.
MODEL_ENGINES = {
    "embed": "multigpu_worker.engines.embed:EmbedEngine",
    "infer": "multigpu_worker.engines.infer:InferEngine",
    "generate": "multigpu_worker.engines.generate:GenerateEngine",
    "classify": "multigpu_worker.engines.classify:ClassifyEngine",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KindInfo:
    """What the agent has to know about a kind."""

    kind: str
    # True: as many tasks at a time as there are slots, each with a beginning of its own.
    one_by_one: bool


def import_handlers(modules: tuple[str, ...]) -> None:
    """Import the user's modules, which register their handlers. ImportError and whatever else they raise."""
    for module in modules:
        kinds = set(registered_handlers())
        importlib.import_module(module)
        if set(registered_handlers()) == kinds:
            raise ImportError(f"the module {module!r} registers no handler: mark one with @multigpu.handler('my.kind')")


def import_ahead(modules: tuple[str, ...]) -> None:
    """Import what the models of a process are likely to need. What can't be had is missed when one is loaded."""
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def offered_kinds() -> list[KindInfo]:
    """What runs without a model. The handlers' modules must have been imported."""
    kinds = [
        KindInfo(kind="echo", one_by_one=False),
        KindInfo(kind="sleep", one_by_one=True),
        KindInfo(kind="fail", one_by_one=True),
    ]
    kinds += [KindInfo(kind=kind, one_by_one=True) for kind in sorted(registered_handlers())]
    return kinds


def build(kind: str) -> Engine:
    """Make the engine of a kind that needs no model."""
    if kind in {"echo", "sleep", "fail"}:
        module = importlib.import_module("multigpu_worker.engines.diagnostic")
        return cast(Engine, module.ENGINES[kind]())
    module = importlib.import_module("multigpu_worker.engines.handler")
    return cast(Engine, module.HandlerEngine())


def build_model_engine(spec: ModelSpec, settings: EngineSettings) -> ModelEngine:
    """Make the engine of a model; nothing is loaded yet. ImportError or AttributeError: it can't be had."""
    path = spec.engine if ":" in spec.engine else MODEL_ENGINES[spec.kind]
    module, _, name = path.partition(":")
    return cast(ModelEngine, getattr(importlib.import_module(module), name)(settings))

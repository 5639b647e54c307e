"""Which engine runs which kind.

An engine's module is imported when its first batch comes, so that a worker that only echoes never imports torch.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import cast

from multigpu.handlers import registered_handlers

from multigpu_worker.engines.base import Engine, EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class KindInfo:
    """What the agent has to know about a kind."""

    kind: str
    one_by_one: bool
    # Empty: the kind needs no model.
    models: tuple[str, ...] = ()


def import_handlers(modules: tuple[str, ...]) -> None:
    """Import the user's modules, which register their handlers. ImportError and whatever else they raise."""
    for module in modules:
        kinds = set(registered_handlers())
        importlib.import_module(module)
        if set(registered_handlers()) == kinds:
            raise ImportError(f"the module {module!r} registers no handler: mark one with @multigpu.handler('my.kind')")


def offered_kinds(settings: EngineSettings) -> list[KindInfo]:
    """What this engine process can run. The handlers' modules must have been imported."""
    kinds = [
        KindInfo(kind="echo", one_by_one=False),
        KindInfo(kind="sleep", one_by_one=True),
        KindInfo(kind="fail", one_by_one=True),
    ]
    if settings.models and importlib.util.find_spec("torch") is not None:
        kinds.append(KindInfo(kind="embed", one_by_one=False, models=tuple(settings.models)))
    kinds += [KindInfo(kind=kind, one_by_one=True) for kind in sorted(registered_handlers())]
    return kinds


def build(kind: str, settings: EngineSettings) -> Engine:
    """Make the engine of a kind. ImportError: what it needs is not installed."""
    if kind == "embed":
        module = importlib.import_module("multigpu_worker.engines.embed")
        engine = module.EmbedEngine(settings.device, settings.models, settings.threads, settings.embedding_cache)
        return cast(Engine, engine)
    if kind in {"echo", "sleep", "fail"}:
        module = importlib.import_module("multigpu_worker.engines.diagnostic")
        return cast(Engine, module.ENGINES[kind]())
    module = importlib.import_module("multigpu_worker.engines.handler")
    return cast(Engine, module.HandlerEngine())

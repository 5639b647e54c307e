"""Which engine runs which kind.

The module of a model's engine is imported when the model is loaded, and that of other kinds for their first batch. So a
worker that only echoes never imports torch.
"""

import contextlib
import importlib
import importlib.util
import linecache
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from multigpu._kinds.training import KIND as TRAIN
from multigpu.handlers import registered_handlers

from multigpu_worker.engines.base import Engine, EngineSettings, ModelEngine
from multigpu_worker.engines.handlers.sources import SourceFinder, Sources
from multigpu_worker.repository.model import REMOTE, VLLM, ModelFolderError, ModelSpec

# Engines of kinds that need a model, as module:class. model.toml may name another one.
MODEL_ENGINES = {
    "embed": "multigpu_worker.engines.embed.engine:EmbedEngine",
    "infer": "multigpu_worker.engines.infer.engine:InferEngine",
    "generate": "multigpu_worker.engines.generate.engine:GenerateEngine",
    "classify": "multigpu_worker.engines.classify.engine:ClassifyEngine",
    "rerank": "multigpu_worker.engines.rerank.engine:RerankEngine",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KindInfo:
    """What the agent needs to know about a kind."""

    kind: str
    # See Engine.one_by_one.
    one_by_one: bool
    # Of a handler that takes batches, or is asynchronous: tasks that run together, and how long a batch may wait to
    # grow, in seconds. 0: as other kinds.
    tasks_max: int = 0
    delay_s: float = 0.0


def import_handlers(
    modules: tuple[str, ...], sources: Sources | None = None, tell: Callable[[str], None] = lambda _: None
) -> Sources:
    """Import the user's modules, which register their handlers. Raises ImportError, and whatever they raise.

    `sources`, `tell`: see SourceFinder. Returns the imported sources.
    """
    finder = SourceFinder(modules, sources or {}, tell)
    sys.meta_path.insert(0, finder)
    try:
        for module in modules:
            if module.endswith(".py") or "/" in module:
                raise ImportError(f"{module!r} is a file; give the module's name: {Path(module).stem}")
            kinds = set(registered_handlers())
            importlib.import_module(module)
            if set(registered_handlers()) == kinds:
                remedy = "mark one with @multigpu.handler('my.kind')"
                raise ImportError(f"the module {module!r} registers no handler: {remedy}")
    finally:
        sys.meta_path.remove(finder)
    for file, source in finder.sources.values():
        # Tracebacks show the lines that run, also after an edit. Without a time, linecache does not look at the file.
        lines = importlib.util.decode_source(source).splitlines(keepends=True)
        linecache.cache[file] = len(source), None, lines, file
    return finder.sources


def import_ahead(modules: tuple[str, ...]) -> None:
    """Import modules that models are likely to need. Missing ones are an error when a model is loaded."""
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def offered_kinds(settings: EngineSettings) -> list[KindInfo]:
    """Kinds that need no model. The handlers' modules must have been imported."""
    kinds = [
        KindInfo(kind="echo", one_by_one=False),
        KindInfo(kind="sleep", one_by_one=True),
        KindInfo(kind="fail", one_by_one=True),
    ]
    if settings.train_dir:
        kinds.append(KindInfo(kind=TRAIN, one_by_one=True))
    for kind, handler in sorted(registered_handlers().items()):
        if handler.batching is None:
            together = handler.concurrency_of_async
            kinds.append(KindInfo(kind=kind, one_by_one=not together, tasks_max=together))
        else:
            size, delay_s = handler.batching.max_size, handler.batching.max_wait_ms / 1000
            kinds.append(KindInfo(kind=kind, one_by_one=False, tasks_max=size, delay_s=delay_s))
    return kinds


def build(kind: str, settings: EngineSettings) -> Engine:
    """Create the engine of a kind that needs no model."""
    if kind == TRAIN:
        train = importlib.import_module("multigpu_worker.engines.train.engine")
        return cast(Engine, train.TrainEngine(settings))
    if kind in {"echo", "sleep", "fail"}:
        module = importlib.import_module("multigpu_worker.engines.diagnostic")
        return cast(Engine, module.ENGINES[kind]())
    module = importlib.import_module("multigpu_worker.engines.handlers.engine")
    return cast(Engine, module.engine_of(kind))


def build_model_engine(spec: ModelSpec, settings: EngineSettings) -> ModelEngine:
    """Create the engine of a model, without loading it. ModelFolderError: a user's engine cannot be imported."""
    if spec.engine == REMOTE:
        remote = importlib.import_module("multigpu_worker.engines.remote.engine")
        return cast(ModelEngine, remote.RemoteEngine(settings))
    if spec.engine == VLLM:
        vllm = importlib.import_module("multigpu_worker.engines.vllm.engine")
        return cast(ModelEngine, vllm.VllmEngine(settings))
    if ":" not in spec.engine:
        module, _, name = MODEL_ENGINES[spec.kind].partition(":")
        return cast(ModelEngine, getattr(importlib.import_module(module), name)(settings))
    module, _, name = spec.engine.partition(":")
    try:
        engine = getattr(importlib.import_module(module), name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module
        remedy = f"; put {module}.py into {spec.folder}, or install it" if missing else _place(error)
        raise ModelFolderError(f"the engine {spec.engine!r} fails: {type(error).__name__}: {error}{remedy}") from error
    return cast(ModelEngine, engine(settings))


def _place(error: Exception) -> str:
    """Where in the user's code an error was raised, if known."""
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if not f.filename.startswith("<frozen ")]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""

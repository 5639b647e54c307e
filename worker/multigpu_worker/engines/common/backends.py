"""Back ends by engine name: modules with a function `load(spec, settings, precision)`.

`load` returns the loaded model and facts for people. It raises ModelFolderError if the model is at fault,
PrecisionError if the back end does not have that precision, ImportError if a package is missing, and MemoryError.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.precision import Variant
from multigpu_worker.repository.model import ModelSpec


def load_variant(
    modules: Mapping[str, str], spec: ModelSpec, settings: EngineSettings, variant: Variant
) -> tuple[Any, dict[str, str]]:
    """Import the variant's back end, load the model, and add engine and precision to the facts.

    The facts may change later, so the back end's own dict is returned.
    """
    backend, facts = importlib.import_module(modules[variant.engine]).load(spec, settings, variant.precision)
    facts.setdefault("engine", variant.engine)
    facts.setdefault("precision", variant.precision)
    return backend, facts

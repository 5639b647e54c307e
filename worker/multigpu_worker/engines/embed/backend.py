"""What computes vectors for the embed engine: one back end for each engine, behind one small protocol.

A back end's module has a function `load(spec, settings, precision)`. It raises ModelFolderError where the model is at
fault, PrecisionError where it has no such precision, ImportError where a package is missing, MemoryError where there is
no room. It is imported when it is first asked for: no engine's libraries are loaded for the sake of another.
"""

import hashlib
import importlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
from multigpu.repository.model import ModelSpec

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.precision import Variant
from multigpu_worker.engines.embed.text import Inputs, TextInput

BACKENDS = {
    "torch": "multigpu_worker.engines.embed.model",
    "onnx": "multigpu_worker.engines.embed.onnx_backend",
    "tensorrt": "multigpu_worker.engines.embed.tensorrt_backend",
}


Vectors = npt.NDArray[np.float32]


class EmbedBackend(Protocol):
    """A model that is loaded. `text` may be used in one thread while `embed` runs in another."""

    @property
    def text(self) -> TextInput: ...

    @property
    def dimension(self) -> int:
        """Components of a vector."""

    @property
    def identity(self) -> str:
        """Everything but the model's files and the text that can change a vector: engine, precision, versions, code.

        It may change while the back end lives: what was computed in between is not remembered.
        """

    @property
    def pads(self) -> bool:
        """The padding of a micro-batch is computed like its tokens, and counts as such."""

    # Tokens that go through the model at once. The engine lowers it when memory runs out.
    tokens_max: int

    def embed(self, inputs: Inputs) -> Vectors:
        """Vectors [rows, dimension] of padded inputs, int64 [rows, width]. Raises MemoryError, on any device."""


@runtime_checkable
class AheadBackend(EmbedBackend, Protocol):
    """A back end whose device works by itself: it is handed the next micro-batch before the last one is done."""

    def begin(self, inputs: Inputs) -> Callable[[], Vectors]:
        """Start on padded inputs; the answer waits for their vectors. Both may raise MemoryError."""


class _Module(Protocol):
    def load(
        self, spec: ModelSpec, settings: EngineSettings, precision: str
    ) -> tuple[EmbedBackend, dict[str, str]]: ...


def load_backend(spec: ModelSpec, settings: EngineSettings, variant: Variant) -> tuple[EmbedBackend, dict[str, str]]:
    """Load a model, and facts for people, which may change later. What it may raise stands above."""
    module = cast(_Module, importlib.import_module(BACKENDS[variant.engine]))
    backend, facts = module.load(spec, settings, variant.precision)
    facts.setdefault("engine", variant.engine)
    facts.setdefault("precision", variant.precision)
    facts.setdefault("text", f"cut after {backend.text.tokens_per_text_max} tokens")
    return backend, facts


def identity_of(*parts: str, packages: tuple[str, ...], sources: tuple[str, ...]) -> str:
    """A back end's identity: any words, the versions of packages, the content of source files in engines/."""
    here = Path(__file__).parents[1]
    lines = [*parts, *(f"{name} {metadata.version(name)}" for name in ("multigpu", "tokenizers", *packages))]
    files = ("embed/engine.py", "embed/backend.py", "embed/text.py", *sources)
    lines += [hashlib.sha256((here / name).read_bytes()).hexdigest() for name in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

"""What computes for the infer engine: any model that takes tensors and gives tensors, behind one small protocol.

A back end's module has a function `load(spec, settings, precision)` that raises what engines/embed/backend.py says, and
is imported when it is first asked for.
"""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy.typing as npt
from multigpu.repository.model import ModelSpec

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.precision import Variant

BACKENDS = {
    "torch": "multigpu_worker.engines.infer.torch_backend",
    "onnx": "multigpu_worker.engines.infer.onnx_backend",
    "tensorrt": "multigpu_worker.engines.infer.tensorrt_backend",
}
# Examples that go through the model at once, until memory says otherwise: model.toml's parameter examples_max.
CPU_EXAMPLES, CUDA_EXAMPLES = 32, 256

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a model says of one of its inputs or outputs."""

    name: str
    # NumPy's name of the type; empty: it doesn't say.
    dtype: str = ""
    # None for a dimension: of any size. None in all: it doesn't say.
    shape: tuple[int | None, ...] | None = None
    # False: it can be left out.
    required: bool = True

    def __str__(self) -> str:
        sizes = "" if self.shape is None else ", ".join("any" if size is None else str(size) for size in self.shape)
        told = f"{self.name}: {self.dtype or 'any type'}" + ("" if self.shape is None else f" [{sizes}]")
        return told if self.required else f"{told}, optional"


class Forward(Protocol):
    """A model that is loaded."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Empty: known once it has run."""

    @property
    def per_example(self) -> bool | None:
        """Whether the model declares that every output has a row for each example; None: it doesn't say."""

    # Examples that go through it at once. The engine lowers it when memory runs out.
    examples_max: int

    def __call__(self, inputs: Arrays) -> Arrays:
        """All outputs for these inputs. Raises MemoryError, on any device, if memory runs out."""


def is_per_example(first_dimensions: Iterable[int | str | None]) -> bool | None:
    """`per_example`, by the first dimensions of all inputs and outputs.

    Each is a size, the name of an open dimension, or None: open without a name. What has no dimension counts as of size
    0. An open dimension of another name isn't the examples', though it may have their size for some inputs.
    """
    found = set(first_dimensions)
    if any(isinstance(each, int) for each in found) or len(found - {None}) > 1:
        return False
    return None if None in found else True


class _Module(Protocol):
    def load(self, spec: ModelSpec, settings: EngineSettings, precision: str) -> tuple[Forward, dict[str, str]]: ...


def load_backend(spec: ModelSpec, settings: EngineSettings, variant: Variant) -> tuple[Forward, dict[str, str]]:
    """Load a model, and facts for people, which may change later."""
    module = cast(_Module, importlib.import_module(BACKENDS[variant.engine]))
    forward, facts = module.load(spec, settings, variant.precision)
    facts.setdefault("engine", variant.engine)
    facts.setdefault("precision", variant.precision)
    facts.setdefault("inputs", "; ".join(map(str, forward.inputs)))
    return forward, facts


def examples_max(spec: ModelSpec, device: str) -> int:
    """What `examples_max` begins with. Raises ValueError."""
    told = spec.parameters.get("examples_max")
    if told is None:
        return CPU_EXAMPLES if device == "cpu" else CUDA_EXAMPLES
    if not told.isdecimal() or int(told) == 0:
        raise ValueError(f"the parameter examples_max of {spec.id} is {told!r}: make it a whole number from 1")
    return int(told)

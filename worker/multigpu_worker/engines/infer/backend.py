"""The protocol of the infer engine's back ends, and how they are loaded."""

from collections.abc import Iterable
from typing import Protocol

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.backends import load_variant
from multigpu_worker.engines.common.precision import Variant
from multigpu_worker.engines.common.tensors import Arrays, TensorSpec
from multigpu_worker.repository.model import ModelFolderError, ModelSpec

BACKENDS = {
    "torch": "multigpu_worker.engines.infer.torch_backend",
    "onnx": "multigpu_worker.engines.infer.onnx_backend",
    "tensorrt": "multigpu_worker.engines.infer.tensorrt_backend",
}
# Examples in one forward pass, unless model.toml's parameter examples_max says otherwise.
CPU_EXAMPLES, CUDA_EXAMPLES = 32, 256


class Forward(Protocol):
    """A loaded model."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Empty if they are unknown until the model has run."""

    @property
    def per_example(self) -> bool | None:
        """Whether the model declares that every output has a row for each example. None: not declared."""

    # Examples in one forward pass. The engine lowers it when memory runs out.
    examples_max: int

    def __call__(self, inputs: Arrays) -> Arrays:
        """Return all outputs. Raises MemoryError, on any device."""


def is_per_example(first_dimensions: Iterable[int | str | None]) -> bool | None:
    """Derive `per_example` from the first dimensions of all inputs and outputs.

    Each is a fixed size (0 for a scalar), the name of a dynamic dimension, or None for a dynamic one without a name. If
    two names differ, one of them does not count examples, even if both have the same size for some inputs.
    """
    found = set(first_dimensions)
    if any(isinstance(each, int) for each in found) or len(found - {None}) > 1:
        return False
    return None if None in found else True


def load_backend(spec: ModelSpec, settings: EngineSettings, variant: Variant) -> tuple[Forward, dict[str, str]]:
    """Load a model. For the facts and errors see common/backends.py."""
    forward: Forward
    forward, facts = load_variant(BACKENDS, spec, settings, variant)
    facts.setdefault("inputs", "; ".join(map(str, forward.inputs)))
    return forward, facts


def number_of(spec: ModelSpec, name: str, default: int) -> int:
    """A whole number from model.toml's parameters. Raises ModelFolderError."""
    text = spec.parameters.get(name, str(default))
    if not text.isdecimal() or int(text) == 0:
        raise ModelFolderError(
            f"the parameter {name} of {spec.id} is {text!r}: make it a whole number from 1 in model.toml"
        )
    return int(text)


def examples_max(spec: ModelSpec, device: str) -> int:
    """The initial value of `examples_max`. Raises ModelFolderError."""
    return number_of(spec, "examples_max", CPU_EXAMPLES if device == "cpu" else CUDA_EXAMPLES)

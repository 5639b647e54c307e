"""Names, types and shapes of a model's inputs and outputs, as plain values: engine processes send them to the agent."""

from dataclasses import dataclass
from typing import Any, Self

from multigpu.v1 import model_pb2

# Limits of what a damaged file or engine may bring into a worker's messages.
TENSORS_MAX = 1000
SIZE_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """One input or output. See TensorSpec in model.proto for the fields."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    optional: bool = False

    def message(self) -> model_pb2.TensorSpec:
        return model_pb2.TensorSpec(name=self.name, dtype=self.dtype, shape=self.shape, optional=self.optional)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """All inputs and outputs."""

    inputs: tuple[NamedTensor, ...] = ()
    outputs: tuple[NamedTensor, ...] = ()

    def plain(self) -> list[list[list[Any]]]:
        """As lists, for a message to the agent or a file."""
        return [[[t.name, t.dtype, list(t.shape), t.optional] for t in side] for side in (self.inputs, self.outputs)]

    @classmethod
    def of(cls, plain: Any) -> Self:
        """The inverse of `plain`. Raises ValueError or TypeError if the lists have another form."""
        inputs, outputs = (tuple(map(_tensor, side)) for side in plain)
        if max(len(inputs), len(outputs)) > TENSORS_MAX:
            raise ValueError(f"a model has more than {TENSORS_MAX} inputs or outputs")
        return cls(inputs=inputs, outputs=outputs)


UNKNOWN = Signature()


def _tensor(plain: Any) -> NamedTensor:
    name, dtype, shape, optional = plain
    sizes = tuple(map(int, shape))
    if any(not -1 <= size <= SIZE_MAX for size in sizes):
        raise ValueError(f"{list(sizes)} is no shape")
    return NamedTensor(name=str(name), dtype=str(dtype), shape=sizes, optional=bool(optional))

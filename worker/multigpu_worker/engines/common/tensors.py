"""Named arrays, and what a model declares about them."""

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from multigpu_worker.repository.signature import NamedTensor

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What a model declares about one of its inputs or outputs."""

    name: str
    # NumPy's name of the type. Empty: not declared.
    dtype: str = ""
    # None for a dimension: any size. None for the shape: not declared.
    shape: tuple[int | None, ...] | None = None
    # False: may be left out.
    required: bool = True

    def __str__(self) -> str:
        sizes = "" if self.shape is None else ", ".join("any" if size is None else str(size) for size in self.shape)
        text = f"{self.name}: {self.dtype or 'any type'}" + ("" if self.shape is None else f" [{sizes}]")
        return text if self.required else f"{text}, optional"

    def named(self) -> NamedTensor:
        """As the agent reports it."""
        shape = tuple(-1 if size is None else size for size in self.shape or ())
        return NamedTensor(name=self.name, dtype=self.dtype, shape=shape, optional=not self.required)

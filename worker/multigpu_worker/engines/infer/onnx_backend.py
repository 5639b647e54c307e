"""The infer engine's back end on ONNX Runtime: any model.onnx, with its own names, types and shapes.

The graph is run as it is: "auto" and fp32 mean the types that it was exported with. On a GPU tf32 lets products of
float32 round their inputs. On a CPU int8 is a graph that was calibrated (quantize.py) and has passed its gate. Other
precisions are another file's.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multigpu.repository.model import ModelSpec

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.accuracy_gate import GATED
from multigpu_worker.engines.common.precision import PrecisionError
from multigpu_worker.engines.infer.backend import Arrays, TensorSpec, examples_max, is_per_example
from multigpu_worker.engines.onnx.artifacts import quantised
from multigpu_worker.engines.onnx.export import MODEL_FILE
from multigpu_worker.engines.onnx.session import Session, check_precision
from multigpu_worker.models.folders import ModelFolderError

# NumPy's names of types that ONNX calls otherwise; and of those that tensors can have here.
TYPES = {"tensor(float)": "float32", "tensor(double)": "float64"}
DTYPES = {"float16", "float32", "float64", "bool", *(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64))}


@dataclass(slots=True, kw_only=True)
class OnnxForward:
    """A model that is loaded."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    examples_max: int
    per_example: bool | None
    session: Session = field(repr=False)

    def __call__(self, inputs: Arrays) -> Arrays:
        """All outputs for these inputs. Raises MemoryError, on any device, if memory runs out."""
        return self.session.run(inputs)


def load(spec: ModelSpec, settings: EngineSettings, precision: str) -> tuple[OnnxForward, dict[str, str]]:
    """Load a model as backend.py says."""
    if spec.source != "onnx":
        raise ModelFolderError(
            f"{spec.id} is of source {spec.source}: for engine onnx make a model.onnx of it, or take torch"
        )
    if precision in GATED:
        check_precision(precision, settings.device)
    elif precision not in {"fp32", "tf32"}:
        raise PrecisionError(
            f"{spec.id} is run at the precision that its ONNX file has: leave {precision} out, or convert the file"
        )
    kept = quantised(spec, settings, precision, "onnx") if precision in GATED else None
    path = spec.folder / spec.file if kept is None else kept.folder / MODEL_FILE
    session = Session(path, settings.device, settings.threads, tf32=precision == "tf32")
    forward = OnnxForward(
        inputs=tuple(tensor_spec(path, each) for each in session.inputs),
        outputs=tuple(tensor_spec(path, each) for each in session.outputs),
        examples_max=examples_max(spec, settings.device),
        per_example=is_per_example(
            [*(next(iter(each.shape), 0) for each in session.inputs), *map(_first_of_output, session.outputs)]
        ),
        session=session,
    )
    if kept is None:
        return forward, {"precision": "as its file" if precision == "fp32" else precision}
    # What it held is in memory now.
    kept.close()
    return forward, {"precision": precision} | {name: kept.facts[name] for name in ("recipe", "accuracy")}


def tensor_spec(path: Path, node: Any) -> TensorSpec:
    """Of one input or output, as ONNX Runtime describes it: a type such as tensor(float16), sizes by number or name."""
    dtype = TYPES.get(node.type, node.type.removeprefix("tensor(").removesuffix(")"))
    if dtype not in DTYPES:
        raise ModelFolderError(f"{path} has {node.name} of type {node.type}: export it with tensors of numbers alone")
    sizes = tuple(size if isinstance(size, int) else None for size in node.shape)
    return TensorSpec(name=node.name, dtype=dtype, shape=sizes)


def _first_of_output(node: Any) -> int | str | None:
    # No sizes: a scalar, or a shape that ONNX Runtime could not infer. Running it tells.
    return next(iter(node.shape), None)

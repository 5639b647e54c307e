"""The infer engine's back end on ONNX Runtime: any model.onnx, with its own names, types and shapes.

"auto" and fp32 run the graph as it is. tf32 on a GPU lets float32 products round their inputs. int8 on a CPU is a
calibrated graph (onnx/quantize.py) that has passed its accuracy gate. Other precisions need another file.
"""

from dataclasses import dataclass, field
from typing import Any

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.accuracy_gate import GATED
from multigpu_worker.engines.common.precision import PrecisionError
from multigpu_worker.engines.common.tensors import Arrays, TensorSpec
from multigpu_worker.engines.infer.backend import examples_max, is_per_example
from multigpu_worker.engines.onnx.artifacts import quantised
from multigpu_worker.engines.onnx.export import MODEL_FILE
from multigpu_worker.engines.onnx.session import Session, check_precision, tensor_spec
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import ModelSpec


@dataclass(slots=True, kw_only=True)
class OnnxForward:
    """A Forward on ONNX Runtime."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    examples_max: int
    per_example: bool | None
    session: Session = field(repr=False)

    def __call__(self, inputs: Arrays) -> Arrays:
        """Return all outputs. Raises MemoryError, on any device."""
        return self.session.run(inputs)


def load(spec: ModelSpec, settings: EngineSettings, precision: str) -> tuple[OnnxForward, dict[str, str]]:
    """Load a model. See common/backends.py."""
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
    return forward, {"precision": precision} | {name: kept.facts[name] for name in ("recipe", "accuracy")}


def _first_of_output(node: Any) -> int | str | None:
    # An empty shape is a scalar, or one that ONNX Runtime could not infer: running the model tells.
    return next(iter(node.shape), None)

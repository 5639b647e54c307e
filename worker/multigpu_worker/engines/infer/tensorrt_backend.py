"""The infer engine's back end on TensorRT, for ONNX models and for plans that were built elsewhere.

An ONNX model is built into a plan while ONNX Runtime serves, if that is installed. The plan takes over after it has
given the same numbers for a trial input. At int8 and fp8 the accuracy gate judges first the graph, and then the plan as
this GPU computes it. The first open dimension counts the examples; the parameter `width_max` limits the others.

A plan file runs with the precision and shapes that it was built with. Other sources have no graph to build from.
"""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common import accuracy_gate as gate
from multigpu_worker.engines.common.artifacts import Artifact
from multigpu_worker.engines.common.precision import PrecisionError, Variant
from multigpu_worker.engines.common.switching import Switch
from multigpu_worker.engines.common.tensors import Arrays, TensorSpec
from multigpu_worker.engines.infer.backend import Forward, examples_max, is_per_example, load_backend, number_of
from multigpu_worker.engines.onnx.artifacts import quantised
from multigpu_worker.engines.onnx.cast import TYPES as CAST_TYPES
from multigpu_worker.engines.onnx.cast import cast_graph
from multigpu_worker.engines.onnx.export import MODEL_FILE
from multigpu_worker.engines.tensorrt.build import artifacts_of, hash_folder
from multigpu_worker.engines.tensorrt.plans import SETTLE_S, PlanSite
from multigpu_worker.engines.tensorrt.profiles import Limits
from multigpu_worker.engines.tensorrt.run import PlanRunner
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import ModelSpec

# Default of `width_max`.
WIDTH_MAX = 512
# Largest difference between a plan's numbers and ONNX Runtime's, relative to the largest number.
DIFFERENCE_MAX = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 2e-2, "bf16": 1e-1}
# Sizes of the trial input's open dimensions, unless the plan takes less.
TRIAL_ROWS, TRIAL_WIDTH = 2, 8


class PlanForward:
    """A Forward on a plan."""

    def __init__(self, runner: PlanRunner, examples: int) -> None:
        self.inputs, self.outputs = runner.inputs, runner.outputs
        self.examples_max = examples
        # A plan has no names for its open dimensions.
        self.per_example = is_per_example(next(iter(each.shape or ()), 0) for each in (*self.inputs, *self.outputs))
        self._runner = runner

    def __call__(self, inputs: Arrays) -> Arrays:
        return self._runner(inputs)


class SwitchingForward:
    """A Forward on ONNX Runtime until the plan is ready."""

    def __init__(self, first: Forward, model: str, make: Callable[[Forward], tuple[Forward, dict[str, str]]]) -> None:
        self.inputs, self.outputs = first.inputs, first.outputs
        self.examples_max = first.examples_max
        self.per_example = first.per_example
        self.switch: Switch[Forward] = Switch(first, model, functools.partial(make, first), "a tensorrt plan")

    def __call__(self, inputs: Arrays) -> Arrays:
        return self.switch.current(inputs)


def load(spec: ModelSpec, settings: EngineSettings, precision: str) -> tuple[Forward, dict[str, str]]:
    """Load a model. See common/backends.py. EngineUnavailableError: this worker cannot run plans."""
    if spec.source not in {"onnx", "tensorrt-plan"}:
        raise ModelFolderError(
            f"{spec.id} has no graph for TensorRT: export it to ONNX (torch.onnx.export), or use engine torch"
        )
    if spec.source == "tensorrt-plan" and precision in gate.GATED:
        raise PrecisionError(f"{spec.id} is a prebuilt plan, whose precision can't be changed: remove {precision}")
    limits = limits_of(spec, settings.device)
    site = PlanSite(settings)
    if spec.source == "tensorrt-plan":
        runner = PlanRunner(spec.folder / spec.file, site.library.module, site.memory)
        facts = {"plan": "prebuilt file", "precision": "unknown, set at its build", "library": site.library.module}
        return PlanForward(runner, limits.rows_max), facts
    if precision in gate.GATED:
        # If the gate rejects it, loading fails: no other precision takes its place.
        quantised(spec, settings, precision, "tensorrt")
    if importlib.util.find_spec("onnxruntime") is None:
        return make_plan(spec, settings, precision, site, limits, None)
    first, _ = load_backend(spec, settings, Variant(engine="onnx", precision="fp32"))
    forward = SwitchingForward(first, spec.id, functools.partial(make_plan, spec, settings, precision, site, limits))
    forward.switch.settle(SETTLE_S)
    facts = forward.switch.facts()
    facts["until the plan serves"] = "onnx fp32"
    return forward, facts


def limits_of(spec: ModelSpec, device: str) -> Limits:
    """The largest shapes of a model's batches. Raises ModelFolderError."""
    rows, width = examples_max(spec, device), number_of(spec, "width_max", WIDTH_MAX)
    return Limits(rows_max=rows, width_max=width, tokens_max=rows * width)


def make_plan(
    spec: ModelSpec,
    settings: EngineSettings,
    precision: str,
    site: PlanSite,
    limits: Limits,
    serving: Forward | None,
) -> tuple[Forward, dict[str, str]]:
    """Build a plan and try it against the back end that serves. Raises whatever fails."""
    made = graph_of(spec, settings, precision)
    graph = spec.folder / spec.file if made is None else made.folder / MODEL_FILE
    runner, facts = site.load(
        site.order(graph, precision, limits, "" if made is None else made.facts.get("accuracy", ""))
    )
    forward = PlanForward(runner, limits.rows_max)
    if serving is None:
        return forward, facts
    if precision not in gate.GATED:
        return forward, facts | try_out(forward, serving, precision, limits)
    rows = forward.inputs[0].shape[0] if forward.inputs[0].shape else None
    types = {each.name: each.dtype for each in serving.inputs}
    held_out = gate.read_arrays(spec.folder / spec.gate.held_out, types, rows)
    examples = rows or min(forward.examples_max, gate.EXAMPLES_MAX)
    figures = gate.measure_arrays(spec, held_out, serving, forward, examples)
    return forward, facts | {"accuracy on this GPU": gate.judge(spec, precision, figures)}


def graph_of(spec: ModelSpec, settings: EngineSettings, precision: str) -> Artifact | None:
    """An ONNX model at a precision, as MODEL_FILE. None: as it is in the model's folder."""
    if precision in gate.GATED:
        return quantised(spec, settings, precision, "tensorrt")
    if precision not in CAST_TYPES:
        return None
    own = spec.folder / spec.file

    def cast(folder: Path) -> dict[str, str]:
        cast_graph(own, folder / MODEL_FILE, precision, settings.threads)
        return {}

    return artifacts_of(settings).get("onnx-cast", {"of": hash_folder(own), "precision": precision}, cast)


def try_out(forward: Forward, serving: Forward, precision: str, limits: Limits) -> dict[str, str]:
    """Compare the plan's numbers with those of ONNX Runtime. Raises ModelFolderError if they differ too much."""
    inputs = trial_inputs(forward.inputs, limits)
    ours, theirs = forward(inputs), serving(inputs)
    worst = 0.0
    for name, wanted in theirs.items():
        largest = float(np.abs(wanted).max(initial=0.0)) or 1.0
        difference = float(np.abs(ours[name].astype(np.float64) - wanted).max(initial=0.0)) / largest
        if not difference <= DIFFERENCE_MAX[precision]:  # also true for NaN
            raise ModelFolderError(
                f"the plan's {name} differs from ONNX Runtime's by {difference:.1e} of the largest number at "
                f"{precision}, and {DIFFERENCE_MAX[precision]:.0e} is the most: use a wider precision, or engine onnx"
            )
        worst = max(worst, difference)
    return {"difference to onnx": f"{worst:.1e}"}


def trial_inputs(specs: tuple[TensorSpec, ...], limits: Limits) -> Arrays:
    """Normally distributed numbers, or zeros and ones for integers, which may be indices."""
    rng = np.random.default_rng(0)
    rows, width = min(TRIAL_ROWS, limits.rows_max), min(TRIAL_WIDTH, limits.width_max)
    inputs: Arrays = {}
    for spec in specs:
        open_sizes = (rows, *(width for _ in (spec.shape or ())[1:]))
        shape = tuple(open_sizes[i] if size is None else size for i, size in enumerate(spec.shape or ()))
        if np.issubdtype(np.dtype(spec.dtype), np.floating):
            inputs[spec.name] = rng.standard_normal(shape).astype(spec.dtype)
        else:
            inputs[spec.name] = rng.integers(0, 2, shape).astype(spec.dtype)
    return inputs

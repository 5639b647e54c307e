"""The infer engine's back end on TensorRT: for ONNX models, and for plans that somebody built elsewhere.

An ONNX model is built into a plan while ONNX Runtime serves (where that is installed); the plan then has to give the
same numbers for a trial input before it takes over. At int8 and fp8 the accuracy gate has judged the graph, and judges
the plan again, as it computes on this GPU. Its first open dimension counts the examples; what other open
dimensions may be at most is model.toml's parameter `width_max`.

A plan that comes as a file is loaded as it is: it has the precision and the shapes that it was built with. Other models
have no graph to build from: export them to ONNX.
"""

import functools
import importlib.util
from pathlib import Path

import numpy as np
from multigpu.repository.model import ModelSpec

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common import accuracy_gate as gate
from multigpu_worker.engines.common.artifacts import Artifact
from multigpu_worker.engines.common.device_memory import DeviceMemory, open_memory
from multigpu_worker.engines.common.precision import PrecisionError, Variant
from multigpu_worker.engines.common.switching import Switch
from multigpu_worker.engines.infer.backend import (
    Arrays,
    Forward,
    TensorSpec,
    examples_max,
    is_per_example,
    load_backend,
)
from multigpu_worker.engines.onnx.artifacts import quantised
from multigpu_worker.engines.onnx.cast import TYPES as CAST_TYPES
from multigpu_worker.engines.onnx.cast import cast_graph
from multigpu_worker.engines.onnx.export import MODEL_FILE
from multigpu_worker.engines.tensorrt.build import PLAN_FILE, PlanOrder, artifacts_of, get_plan, hash_folder
from multigpu_worker.engines.tensorrt.module import Gpu, TensorRT, require
from multigpu_worker.engines.tensorrt.profiles import Limits, Profile, Watch
from multigpu_worker.engines.tensorrt.run import PlanRunner
from multigpu_worker.models.folders import ModelFolderError

# What open dimensions but the first may be at most, where model.toml has no `width_max`.
WIDTH_MAX = 512
# Largest difference between a plan's numbers and ONNX Runtime's, as a share of the largest number.
DIFFERENCE_MAX = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 2e-2, "bf16": 1e-1}
# The shape of the trial, where the model leaves it open.
TRIAL_ROWS, TRIAL_WIDTH = 2, 8
# What is in the cache is loaded in so long, and then the facts of loading can tell of it.
SETTLE_S = 2.0


class PlanForward:
    """A Forward on a plan."""

    def __init__(self, runner: PlanRunner, examples: int, kept: Artifact | None = None) -> None:
        self.inputs, self.outputs = runner.inputs, runner.outputs
        self.examples_max = examples
        # A plan has no names for its open dimensions.
        self.per_example = is_per_example(next(iter(each.shape or ()), 0) for each in (*self.inputs, *self.outputs))
        self._runner = runner
        # Its lock keeps the plan's files from being evicted.
        self._kept = kept

    def __call__(self, inputs: Arrays) -> Arrays:
        return self._runner(inputs)


class SwitchingForward:
    """A Forward that is ONNX Runtime's until the plan is ready."""

    def __init__(self, first: Forward, maker: "PlanMaker") -> None:
        self.inputs, self.outputs = first.inputs, first.outputs
        self.examples_max = first.examples_max
        self.per_example = first.per_example
        self._maker = maker
        self._watch = Watch.begin(maker.limits)
        self.switch: Switch[Forward] = Switch(first, maker.name)
        self._begin(self._watch.profiles)

    def __call__(self, inputs: Arrays) -> Arrays:
        outputs = self.switch.current(inputs)
        if (profiles := self._watch.add(*shape_of(inputs, self.inputs))) is not None:
            self._begin(profiles)
        return outputs

    def _begin(self, profiles: tuple[Profile, ...]) -> None:
        self.switch.begin(functools.partial(self._maker.make, profiles, self.switch.current), "a tensorrt plan")


def load(spec: ModelSpec, settings: EngineSettings, precision: str) -> tuple[Forward, dict[str, str]]:
    """Load a model as backend.py says. EngineUnavailableError: this worker can't have plans."""
    if spec.source not in {"onnx", "tensorrt-plan"}:
        raise ModelFolderError(
            f"{spec.id} has no graph for TensorRT: export it to ONNX (torch.onnx.export), or use engine torch"
        )
    if spec.source == "tensorrt-plan" and precision in gate.GATED:
        raise PrecisionError(f"{spec.id} is a plan, which is as it was built: leave {precision} out")
    try:
        limits = limits_of(spec, settings.device)
    except ValueError as error:
        raise ModelFolderError(f"{error} (model.toml, [parameters])") from error
    library, gpu = require(settings.device)
    memory = open_memory()
    if spec.source == "tensorrt-plan":
        runner = PlanRunner(spec.folder / spec.file, library.module, memory)
        facts = {"plan": "as it came", "precision": "as it was built", "library": library.module}
        return PlanForward(runner, limits.rows_max), facts
    maker = PlanMaker(spec, settings, precision, library, gpu, memory, limits)
    if precision in gate.GATED:
        # A model that its gate rejects at this precision isn't served at another instead.
        quantised(spec, settings, precision, "tensorrt").close()
    if importlib.util.find_spec("onnxruntime") is None:
        return maker.make(Watch.begin(limits).profiles, None)
    first, _ = load_backend(spec, settings, Variant(engine="onnx", precision="fp32"))
    forward = SwitchingForward(first, maker)
    forward.switch.settle(SETTLE_S)
    facts = forward.switch.facts()
    facts["until the plan serves"] = "onnx fp32"
    return forward, facts


def limits_of(spec: ModelSpec, device: str) -> Limits:
    """The shapes that may come. Raises ValueError."""
    rows = examples_max(spec, device)
    told = spec.parameters.get("width_max", str(WIDTH_MAX))
    if not told.isdecimal() or int(told) == 0:
        raise ValueError(f"the parameter width_max of {spec.id} is {told!r}: make it a whole number from 1")
    return Limits(rows_max=rows, width_max=int(told), tokens_max=rows * int(told))


def shape_of(inputs: Arrays, specs: tuple[TensorSpec, ...]) -> tuple[int, int]:
    """The number of examples, and the largest of the other open dimensions; 1 where there is none."""
    rows, width = 1, 1
    for spec in specs:
        for axis, size in enumerate(inputs[spec.name].shape):
            if spec.shape is not None and spec.shape[axis] is not None:
                continue
            rows, width = (max(rows, size), width) if axis == 0 else (rows, max(width, size))
    return rows, width


class PlanMaker:
    """Makes plans of one ONNX model for one GPU."""

    def __init__(
        self,
        spec: ModelSpec,
        settings: EngineSettings,
        precision: str,
        library: TensorRT,
        gpu: Gpu,
        memory: DeviceMemory,
        limits: Limits,
    ) -> None:
        self.name, self.limits = spec.id, limits
        self._spec, self._settings, self._precision = spec, settings, precision
        self._artifacts = artifacts_of(settings)
        self._library, self._gpu, self._memory = library, gpu, memory

    def make(self, profiles: tuple[Profile, ...], serving: Forward | None) -> tuple[Forward, dict[str, str]]:
        """The plan, after its trial against what serves. Whatever fails, raises."""
        made = graph_of(self._spec, self._settings, self._precision)
        order = PlanOrder(
            graph=self._spec.folder / self._spec.file if made is None else made.folder / MODEL_FILE,
            precision=self._precision,
            profiles=profiles,
            library=self._library,
            gpu=self._gpu,
            accuracy="" if made is None else made.facts.get("accuracy", ""),
        )
        plan = get_plan(order, self._artifacts)
        runner = PlanRunner(plan.folder / PLAN_FILE, self._library.module, self._memory)
        forward = PlanForward(runner, self.limits.rows_max, plan)
        if serving is None:
            return forward, plan.facts
        if self._precision in gate.GATED:
            return forward, plan.facts | self._judge(forward, serving)
        return forward, plan.facts | try_out(forward, serving, self._precision)

    def _judge(self, forward: Forward, serving: Forward) -> dict[str, str]:
        """The gate's figure for the plan itself, as it computes on this GPU. Raises AccuracyGateError."""
        rows = forward.inputs[0].shape[0] if forward.inputs[0].shape else None
        types = {each.name: each.dtype for each in serving.inputs}
        held_out = gate.read_arrays(self._spec.folder / self._spec.gate.held_out, types, rows)
        examples = rows or min(forward.examples_max, gate.EXAMPLES_MAX)
        figures = gate.measure_arrays(self._spec, held_out, serving, forward, examples)
        return {"accuracy on this GPU": gate.judge(self._spec, self._precision, figures)}


def graph_of(spec: ModelSpec, settings: EngineSettings, precision: str) -> Artifact | None:
    """An ONNX model at a precision, as MODEL_FILE; None: as it is in its own folder."""
    if precision in gate.GATED:
        return quantised(spec, settings, precision, "tensorrt")
    if precision not in CAST_TYPES:
        return None
    own = spec.folder / spec.file

    def cast(folder: Path) -> dict[str, str]:
        cast_graph(own, folder / MODEL_FILE, precision, settings.threads)
        return {}

    return artifacts_of(settings).get("onnx-cast", {"of": hash_folder(own), "precision": precision}, cast)


def try_out(forward: Forward, serving: Forward, precision: str) -> dict[str, str]:
    """Compare a plan's numbers with those of what serves. Raises ModelFolderError: they are others."""
    inputs = trial_inputs(forward.inputs)
    ours, theirs = forward(inputs), serving(inputs)
    worst = 0.0
    for name, wanted in theirs.items():
        largest = float(np.abs(wanted).max(initial=0.0)) or 1.0
        difference = float(np.abs(ours[name].astype(np.float64) - wanted).max(initial=0.0)) / largest
        if not difference <= DIFFERENCE_MAX[precision]:  # which a NaN isn't either
            raise ModelFolderError(
                f"the plan's {name} differs from ONNX Runtime's by {difference:.1e} of the largest number at "
                f"{precision}, and {DIFFERENCE_MAX[precision]:.0e} is the most: use a wider precision, or engine onnx"
            )
        worst = max(worst, difference)
    return {"difference to onnx": f"{worst:.1e}"}


def trial_inputs(specs: tuple[TensorSpec, ...]) -> Arrays:
    """Some input: normally distributed numbers, or zeros and ones for what may be an index."""
    rng = np.random.default_rng(0)
    inputs: Arrays = {}
    for spec in specs:
        open_sizes = (TRIAL_ROWS, *(TRIAL_WIDTH for _ in (spec.shape or ())[1:]))
        shape = tuple(open_sizes[i] if size is None else size for i, size in enumerate(spec.shape or ()))
        if np.issubdtype(np.dtype(spec.dtype), np.floating):
            inputs[spec.name] = rng.standard_normal(shape).astype(spec.dtype)
        else:
            inputs[spec.name] = rng.integers(0, 2, shape).astype(spec.dtype)
    return inputs

"""The embed engine's back end on TensorRT: torch serves while the plan is built, then the plan does.

The model is exported to ONNX at the precision (engines/onnx/artifacts.py) and built into a plan; both are kept in the
artifact cache. The plan is tried on sentences against torch before it serves. At int8 and fp8 the accuracy gate judges
first the graph, and then the plan as this GPU computes it.

Without torch nothing can serve meanwhile, so loading includes the build.
"""

import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common import accuracy_gate as gate
from multigpu_worker.engines.common.accuracy_gate import GATED
from multigpu_worker.engines.common.artifacts import Artifact
from multigpu_worker.engines.common.precision import Variant, auto_precision
from multigpu_worker.engines.common.switching import Switch
from multigpu_worker.engines.embed.backend import AheadBackend, EmbedBackend, Vectors, identity_of, load_backend
from multigpu_worker.engines.embed.text import Inputs, TextInput
from multigpu_worker.engines.onnx.artifacts import exported
from multigpu_worker.engines.onnx.cast import cast_graph
from multigpu_worker.engines.onnx.export import MODEL_FILE, OUTPUT, TRIAL_TEXTS
from multigpu_worker.engines.tensorrt.build import PlanOrder, artifacts_of, plan_key
from multigpu_worker.engines.tensorrt.plans import SETTLE_S, PlanSite
from multigpu_worker.engines.tensorrt.profiles import Limits
from multigpu_worker.engines.tensorrt.run import PlanRunner
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import ModelSpec

# Texts in one forward pass, and their padded tokens.
ROWS_MAX = 256
TOKENS_MAX = 16_384
# The lowest cosine between a trial sentence's vectors by the plan and by torch. int8 and fp8 have the gate.
COSINE_MIN = {"fp32": 0.9999, "tf32": 0.999, "bf16": 0.99, "fp16": 0.999}


class PlanBackend:
    """An EmbedBackend on a plan."""

    pads = True

    def __init__(self, runner: PlanRunner, order: PlanOrder, text: TextInput, limits: Limits) -> None:
        self.text = text
        self.tokens_max = limits.tokens_max
        self._limits = limits
        self._runner = runner
        (vectors,) = (spec for spec in runner.outputs if spec.name == OUTPUT)
        if vectors.shape is None or vectors.shape[-1] is None:
            raise ModelFolderError("the plan doesn't say how many components its vectors have: use engine torch")
        self.dimension = int(vectors.shape[-1])
        self.identity = identity_of(
            json.dumps(plan_key(order), sort_keys=True),
            packages=(),
            sources=("embed/tensorrt_backend.py", "tensorrt/build.py", "tensorrt/run.py", "onnx/export.py"),
        )

    def embed(self, inputs: Inputs) -> Vectors:
        """Vectors [rows, dimension] of padded inputs."""
        return self.begin(inputs)()

    def begin(self, inputs: Inputs) -> Callable[[], Vectors]:
        """Start on padded inputs, in parts if they are more than the plan takes."""
        rows, width = inputs["input_ids"].shape
        step = self._limits.rows_at(width)
        parts = [
            self._runner.begin({name: array[start : start + step] for name, array in inputs.items()})
            for start in range(0, rows, step)
        ]
        return lambda: np.concatenate([finish()[OUTPUT] for finish in parts]).astype(np.float32, copy=False)


class SwitchingBackend:
    """An EmbedBackend on torch until the plan is ready."""

    pads = True

    def __init__(
        self,
        first: EmbedBackend,
        model: str,
        make: Callable[[EmbedBackend], tuple[EmbedBackend, dict[str, str]]],
        trim: Callable[[], None],
    ) -> None:
        """`trim`: free the memory that torch keeps, after the switch."""
        self.text = first.text
        self.dimension = first.dimension
        self.tokens_max = first.tokens_max
        self._trim = trim
        self._served = first.identity
        self.switch: Switch[EmbedBackend] = Switch(first, model, functools.partial(make, first), "a tensorrt plan")

    @property
    def identity(self) -> str:
        return self.switch.current.identity

    def embed(self, inputs: Inputs) -> Vectors:
        """Vectors [rows, dimension] of padded inputs."""
        return self.begin(inputs)()

    def begin(self, inputs: Inputs) -> Callable[[], Vectors]:
        """Start on padded inputs, or compute them if the current back end cannot start ahead."""
        serving = self.switch.current
        if serving.identity != self._served:
            self._served = serving.identity
            self._trim()
        if isinstance(serving, AheadBackend):
            return serving.begin(inputs)
        vectors = serving.embed(inputs)
        return lambda: vectors


def load(spec: ModelSpec, settings: EngineSettings, precision: str) -> tuple[EmbedBackend, dict[str, str]]:
    """Load a model. See common/backends.py. EngineUnavailableError: this worker cannot run plans."""
    site = PlanSite(settings)
    if importlib.util.find_spec("torch") is None:
        return make_plan(spec, settings, precision, site, None)
    if precision in GATED:
        # A model that its gate rejects is not served at another precision.
        graph_of(spec, settings, precision)
    first_precision = auto_precision(site.gpu.capability) if precision in GATED else precision
    first, _ = load_backend(spec, settings, Variant(engine="torch", precision=first_precision))
    make = functools.partial(make_plan, spec, settings, precision, site)
    backend = SwitchingBackend(first, spec.id, make, site.memory.trim)
    backend.switch.settle(SETTLE_S)
    facts = backend.switch.facts()
    facts["until the plan serves"] = f"torch {first_precision}"
    return backend, facts


def limits_of(spec: ModelSpec, text: TextInput) -> Limits:
    """The largest shapes of a model's batches."""
    return Limits(
        rows_max=spec.batch.tasks_max or ROWS_MAX,
        width_max=text.tokens_per_text_max,
        tokens_max=max(spec.batch.tokens_max or TOKENS_MAX, text.tokens_per_text_max),
    )


def make_plan(
    spec: ModelSpec, settings: EngineSettings, precision: str, site: PlanSite, serving: EmbedBackend | None
) -> tuple[EmbedBackend, dict[str, str]]:
    """Build a plan and try it against the back end that serves. Raises whatever fails."""
    graph = graph_of(spec, settings, precision)
    text = TextInput.read(graph.folder)
    limits = limits_of(spec, text)
    order = site.order(graph.folder / MODEL_FILE, precision, limits, graph.facts.get("accuracy", ""))
    runner, facts = site.load(order)
    backend = PlanBackend(runner, order, text, limits)
    facts |= try_out(backend, serving, precision)
    if precision in GATED and serving is not None:
        exact, _ = load_backend(spec, settings, Variant(engine="torch", precision="fp32"))
        reference, candidate = (functools.partial(embed_texts, each) for each in (exact, backend))
        figures = gate.measure(spec, reference, candidate)
        facts["accuracy on this GPU"] = gate.judge(spec, precision, figures)
    return backend, facts


def graph_of(spec: ModelSpec, settings: EngineSettings, precision: str) -> Artifact:
    """The ONNX graph at a precision, with the tokenizer. tf32 uses the fp32 graph, bf16 casts it."""
    if precision != "bf16":
        return exported(spec, settings, "fp32" if precision == "tf32" else precision, engine="tensorrt")
    base = exported(spec, settings, "fp32", engine="tensorrt")

    def cast(folder: Path) -> dict[str, str]:
        cast_graph(base.folder / MODEL_FILE, folder / MODEL_FILE, precision, settings.threads)
        TextInput.read(base.folder).save(folder)
        return dict(base.facts)

    return artifacts_of(settings).get("onnx-cast", {"of": base.folder.name, "precision": precision}, cast)


def try_out(backend: EmbedBackend, first: EmbedBackend | None, precision: str) -> dict[str, str]:
    """Compare the plan's vectors with those of the first back end. Raises ModelFolderError if they differ too much."""
    vectors = embed_texts(backend, TRIAL_TEXTS)
    if not np.isfinite(vectors).all():
        raise ModelFolderError(f"the plan gives vectors that are no numbers at {precision}: use a wider precision")
    if first is None or precision in GATED:
        return {}
    least = float(gate.cosines(vectors, embed_texts(first, TRIAL_TEXTS)).min())
    if least < COSINE_MIN[precision]:
        raise ModelFolderError(
            f"the plan's vectors have a cosine of only {least:.5f} to torch's at {precision}, "
            f"and {COSINE_MIN[precision]} is the least: use a wider precision"
        )
    return {"cosine to torch": f"{least:.5f}"}


def embed_texts(backend: EmbedBackend, texts: Sequence[str]) -> Vectors:
    """Vectors of texts, a few at a time."""
    tokens = backend.text.tokenise(texts)
    places = [range(start, min(start + 16, len(texts))) for start in range(0, len(texts), 16)]
    return np.concatenate([backend.embed(backend.text.pad(tokens, rows)) for rows in places])

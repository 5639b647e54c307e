"""The embed engine's back end on TensorRT: torch serves while the plan is built, then the plan does.

The model is exported to ONNX at the precision that is asked for (engines/onnx/artifacts.py), built into a plan (both
are kept in the cache of artifacts, so that only the first start on a host waits), and tried on sentences against what
serves: vectors that point elsewhere never reach anybody. At int8 and fp8 the accuracy gate has judged the graph, and
judges the plan again, as it computes on this GPU.

Where torch is not installed nothing can serve meanwhile, and loading takes as long as building does.
"""

import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from multigpu.repository.model import ModelSpec

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common import accuracy_gate as gate
from multigpu_worker.engines.common.accuracy_gate import GATED
from multigpu_worker.engines.common.artifacts import Artifact
from multigpu_worker.engines.common.device_memory import DeviceMemory, open_memory
from multigpu_worker.engines.common.precision import Variant, auto_precision
from multigpu_worker.engines.common.switching import Switch
from multigpu_worker.engines.embed.backend import AheadBackend, EmbedBackend, Vectors, identity_of, load_backend
from multigpu_worker.engines.embed.text import Inputs, TextInput
from multigpu_worker.engines.onnx.artifacts import exported
from multigpu_worker.engines.onnx.cast import cast_graph
from multigpu_worker.engines.onnx.export import MODEL_FILE, OUTPUT, TRIAL_TEXTS
from multigpu_worker.engines.tensorrt.build import PLAN_FILE, PlanOrder, artifacts_of, get_plan, plan_key
from multigpu_worker.engines.tensorrt.module import Gpu, TensorRT, require
from multigpu_worker.engines.tensorrt.profiles import Limits, Profile, Watch
from multigpu_worker.engines.tensorrt.run import PlanRunner
from multigpu_worker.models.folders import ModelFolderError

# Texts in one pass, and their padded tokens.
ROWS_MAX = 256
TOKENS_MAX = 16_384
# The least cosine between a trial sentence's vector by the plan and by what serves meanwhile, of 16 bits or more.
COSINE_MIN = {"fp32": 0.9999, "tf32": 0.999, "bf16": 0.99, "fp16": 0.999}
Made = tuple[EmbedBackend, dict[str, str]]
# What is in the cache is loaded in so long, and then the facts of loading can tell of it.
SETTLE_S = 2.0


class PlanBackend:
    """An EmbedBackend on a plan."""

    pads = True

    def __init__(
        self, *, plan: Artifact, order: PlanOrder, text: TextInput, limits: Limits, memory: DeviceMemory
    ) -> None:
        self.text = text
        self.tokens_max = limits.tokens_max
        self._limits = limits
        # Its lock keeps the files from being evicted.
        self._plan = plan
        self._runner = PlanRunner(plan.folder / PLAN_FILE, order.library.module, memory)
        (vectors,) = (spec for spec in self._runner.outputs if spec.name == OUTPUT)
        if vectors.shape is None or vectors.shape[-1] is None:
            raise ModelFolderError("the plan doesn't say how many components its vectors have: use engine torch")
        self.dimension = int(vectors.shape[-1])
        self.identity = identity_of(
            json.dumps(plan_key(order), sort_keys=True),
            packages=(),
            sources=("embed/tensorrt_backend.py", "tensorrt/build.py", "tensorrt/run.py", "onnx/export.py"),
        )

    def embed(self, inputs: Inputs) -> Vectors:
        """Vectors [rows, dimension]."""
        return self.begin(inputs)()

    def begin(self, inputs: Inputs) -> Callable[[], Vectors]:
        """Start on padded inputs. What is more than the plan takes goes through in parts."""
        rows, width = inputs["input_ids"].shape
        step = self._limits.rows_at(width)
        parts = [
            self._runner.begin({name: array[start : start + step] for name, array in inputs.items()})
            for start in range(0, rows, step)
        ]
        return lambda: np.concatenate([finish()[OUTPUT] for finish in parts]).astype(np.float32, copy=False)


class SwitchingBackend:
    """An EmbedBackend that is torch's until the plan is ready, and has a new plan made when the texts have changed."""

    pads = True

    def __init__(self, first: EmbedBackend, maker: "Maker", limits: Limits) -> None:
        self.text = first.text
        self.dimension = first.dimension
        self.tokens_max = first.tokens_max
        self._maker = maker
        self._watch = Watch.begin(limits)
        self._served = first.identity
        self.switch: Switch[EmbedBackend] = Switch(first, maker.name)
        self._begin(self._watch.profiles)

    @property
    def identity(self) -> str:
        return self.switch.current.identity

    def embed(self, inputs: Inputs) -> Vectors:
        """Vectors [rows, dimension]."""
        return self.begin(inputs)()

    def begin(self, inputs: Inputs) -> Callable[[], Vectors]:
        """Start on padded inputs, as far as what serves now can."""
        serving = self.switch.current
        if serving.identity != self._served:
            self._served = serving.identity
            self._maker.trim()
        rows, width = inputs["input_ids"].shape
        if (profiles := self._watch.add(rows, width)) is not None:
            self._begin(profiles)
        if isinstance(serving, AheadBackend):
            return serving.begin(inputs)
        vectors = serving.embed(inputs)
        return lambda: vectors

    def _begin(self, profiles: tuple[Profile, ...]) -> None:
        self.switch.begin(functools.partial(self._maker.make, profiles, self.switch.current), "a tensorrt plan")


class Maker(Protocol):
    """What a SwitchingBackend asks for plans."""

    # Of the model, for the log.
    name: str

    def make(self, profiles: tuple[Profile, ...], serving: EmbedBackend | None) -> Made:
        """A plan for these profiles, after its trial against what serves. Whatever fails, raises."""

    def trim(self) -> None:
        """Give back what a back end that no longer serves has left."""


def load(spec: ModelSpec, settings: EngineSettings, precision: str) -> tuple[EmbedBackend, dict[str, str]]:
    """Load a model as backend.py says. EngineUnavailableError: this worker can't have plans."""
    library, gpu = require(settings.device)
    maker = PlanMaker(spec, settings, precision, library, gpu, open_memory())
    if importlib.util.find_spec("torch") is None:
        text = TextInput.read(graph_of(spec, settings, precision).folder)
        return maker.make(Watch.begin(limits_of(spec, text)).profiles, None)
    if precision in GATED:
        # A model that the gate rejects at this precision isn't served at another instead.
        graph_of(spec, settings, precision).close()
    meanwhile = auto_precision(gpu.capability) if precision in GATED else precision
    first, _ = load_backend(spec, settings, Variant(engine="torch", precision=meanwhile))
    backend = SwitchingBackend(first, maker, limits_of(spec, first.text))
    backend.switch.settle(SETTLE_S)
    facts = backend.switch.facts()
    facts["until the plan serves"] = f"torch {meanwhile}"
    return backend, facts


def limits_of(spec: ModelSpec, text: TextInput) -> Limits:
    """The shapes that may come."""
    return Limits(
        rows_max=spec.batch.tasks_max or ROWS_MAX,
        width_max=text.tokens_per_text_max,
        tokens_max=max(spec.batch.tokens_max or TOKENS_MAX, text.tokens_per_text_max),
    )


class PlanMaker:
    """Makes plans of one model for one GPU."""

    def __init__(
        self,
        spec: ModelSpec,
        settings: EngineSettings,
        precision: str,
        library: TensorRT,
        gpu: Gpu,
        memory: DeviceMemory,
    ) -> None:
        self.name = spec.id
        self._spec, self._settings, self._precision = spec, settings, precision
        self._library, self._gpu, self._memory = library, gpu, memory

    def make(self, profiles: tuple[Profile, ...], serving: EmbedBackend | None) -> Made:
        """The plan, after its trial."""
        graph = graph_of(self._spec, self._settings, self._precision)
        text = TextInput.read(graph.folder)
        order = PlanOrder(
            graph=graph.folder / MODEL_FILE,
            precision=self._precision,
            profiles=profiles,
            library=self._library,
            gpu=self._gpu,
            accuracy=graph.facts.get("accuracy", ""),
        )
        plan = get_plan(order, artifacts_of(self._settings))
        backend = PlanBackend(
            plan=plan, order=order, text=text, limits=limits_of(self._spec, text), memory=self._memory
        )
        facts = plan.facts | try_out(backend, serving, self._precision)
        if self._precision in GATED and serving is not None:
            facts |= self._judge(backend)
        return backend, facts

    def trim(self) -> None:
        """Give back what torch keeps of the memory of a model that is gone."""
        self._memory.trim()

    def _judge(self, backend: EmbedBackend) -> dict[str, str]:
        """The gate's figure for the plan itself, as it computes on this GPU. Raises AccuracyGateError."""
        exact, _ = load_backend(self._spec, self._settings, Variant(engine="torch", precision="fp32"))
        reference, candidate = (functools.partial(embed_texts, each) for each in (exact, backend))
        figures = gate.measure(self._spec, reference, candidate)
        return {"accuracy on this GPU": gate.judge(self._spec, self._precision, figures)}


def graph_of(spec: ModelSpec, settings: EngineSettings, precision: str) -> Artifact:
    """The ONNX graph at a precision, and the tokenizer beside it. TF32 and BF16 begin with the one of float32."""
    if precision != "bf16":
        return exported(spec, settings, "fp32" if precision == "tf32" else precision, engine="tensorrt")
    base = exported(spec, settings, "fp32", engine="tensorrt")

    def cast(folder: Path) -> dict[str, str]:
        cast_graph(base.folder / MODEL_FILE, folder / MODEL_FILE, precision, settings.threads)
        TextInput.read(base.folder).save(folder)
        return dict(base.facts)

    return artifacts_of(settings).get("onnx-cast", {"of": base.folder.name, "precision": precision}, cast)


def try_out(backend: EmbedBackend, first: EmbedBackend | None, precision: str) -> dict[str, str]:
    """Compare a plan's vectors with those of what serves. Raises ModelFolderError: they point elsewhere."""
    vectors = embed_texts(backend, TRIAL_TEXTS)
    if not np.isfinite(vectors).all():
        raise ModelFolderError(f"the plan gives vectors that are no numbers at {precision}: use a wider precision")
    if first is None or precision in GATED:
        return {}
    least = float(cosines(vectors, embed_texts(first, TRIAL_TEXTS)).min())
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


def cosines(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Of each row with the same row of the other."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    found: npt.NDArray[np.float64] = (a * b).sum(axis=1) / np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    return found

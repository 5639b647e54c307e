"""Loads the baseline loop for a model.

For embed, the torch baseline runs the layers of transformers unchanged, the ONNX Runtime baseline runs the engine's
graph with default options and the configured number of threads, and the TensorRT baseline runs the engine's plan. For
other kinds the baseline calls the engine itself.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from multigpu_worker.baselines.loops import EngineLoop, Loop, Rows, TextLoop, TextModel
from multigpu_worker.engines import registry
from multigpu_worker.engines.base import Batch, EngineSettings
from multigpu_worker.engines.common.precision import choose
from multigpu_worker.engines.embed.text import Inputs, TextInput
from multigpu_worker.repository.model import ENGINES, ModelSpec

PLAN_TIMEOUT_S = 1800.0


def load_model(kind: str, spec: ModelSpec, settings: EngineSettings) -> Loop:
    """The loop for a model. Raises ValueError if there is none."""
    if spec.kind != kind:
        raise ValueError(f"{spec.id} here is a model for {spec.kind}, not for {kind}")
    if kind == "embed" and spec.engine in ENGINES:
        variant = choose(spec, settings)
        return TextLoop(TEXT_MODELS[variant.engine](spec, settings, variant.precision), settings.device)
    if str(spec.folder) not in sys.path:  # as in an engine process
        sys.path.insert(0, str(spec.folder))
    engine = registry.build_model_engine(spec, dataclasses.replace(settings, models={spec.id: spec}))
    engine.load()
    return EngineLoop(engine, functools.partial(Batch, kind, spec.id, {}, ""))


def _torch_texts(spec: ModelSpec, settings: EngineSettings, precision: str) -> TextModel:
    from multigpu_worker.engines.embed.model import load_model  # noqa: PLC0415  (takes seconds: torch)

    model = load_model(spec.folder, settings.device, precision, threads=settings.threads, pack=False)
    return model.text, model.embed


def _onnx_texts(spec: ModelSpec, settings: EngineSettings, precision: str) -> TextModel:
    """The engine's graph; exports it if the artifact cache does not have it."""
    from multigpu_worker.engines.onnx.artifacts import exported  # noqa: PLC0415  (extra packages)
    from multigpu_worker.engines.onnx.export import MODEL_FILE  # noqa: PLC0415  (as above)

    artifact = exported(spec, settings, "fp32" if precision == "tf32" else precision)
    return TextInput.read(artifact.folder), _onnx_forward(artifact.folder / MODEL_FILE, settings, precision)


def _plan_texts(spec: ModelSpec, settings: EngineSettings, precision: str) -> TextModel:
    """The engine's plan; builds it if the artifact cache does not have it. LookupError: it cannot be built."""
    from multigpu_worker.engines.embed import tensorrt_backend  # noqa: PLC0415  (extra packages)

    backend: Any = tensorrt_backend.load(spec, settings, precision)[0]
    switch = getattr(backend, "switch", None)
    if switch is None:
        return backend.text, backend.embed
    if not switch.settle(PLAN_TIMEOUT_S):
        raise LookupError(f"its plan was not built in {PLAN_TIMEOUT_S:.0f} s")
    if isinstance(switch.current, tensorrt_backend.PlanBackend):
        return switch.current.text, switch.current.embed
    raise LookupError(switch.facts().get("plan", "there is no plan"))


TEXT_MODELS: Mapping[str, Callable[[ModelSpec, EngineSettings, str], TextModel]] = {
    "torch": _torch_texts,
    "onnx": _onnx_texts,
    "tensorrt": _plan_texts,
}


def _onnx_forward(path: Path, settings: EngineSettings, precision: str) -> Callable[[Inputs], Rows]:
    import onnxruntime  # noqa: PLC0415  (an extra package)

    from multigpu_worker.engines.onnx.export import OUTPUT  # noqa: PLC0415  (extra packages)

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = settings.threads
    provider, more = "CPUExecutionProvider", {}
    if settings.device != "cpu":
        provider = "CUDAExecutionProvider"
        # By default the provider computes float32 products in tf32.
        more = {"device_id": settings.device.partition(":")[2] or "0", "use_tf32": str(int(precision == "tf32"))}
    session = onnxruntime.InferenceSession(str(path), options, providers=[(provider, more)])
    if provider not in session.get_providers():  # ONNX Runtime drops it without an error
        raise LookupError(f"ONNX Runtime could not open {settings.device}: its CUDA provider lacks a library")
    wanted = {found.name for found in session.get_inputs()}

    def forward(inputs: Inputs) -> Rows:
        (rows,) = session.run([OUTPUT], {name: array for name, array in inputs.items() if name in wanted})
        return np.asarray(rows, np.float32)

    return forward

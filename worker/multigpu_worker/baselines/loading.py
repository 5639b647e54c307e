"""Loads the baseline loop for a model.

torch runs transformers' layers as they are; ONNX Runtime runs the engine's graph with default options and the
configured number of threads; TensorRT runs the engine's plan.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from multigpu.repository.model import ModelSpec
from multigpu.v1 import embed_pb2

from multigpu_worker.baselines.loops import ArrayLoop, Loop, PictureLoop, Rows, TextLoop, TextModel
from multigpu_worker.engines import registry
from multigpu_worker.engines.base import Engine, EngineSettings
from multigpu_worker.engines.classify import payload as classify_input
from multigpu_worker.engines.common.precision import Variant
from multigpu_worker.engines.embed.text import Inputs, TextInput
from multigpu_worker.engines.infer import backend as infer_backend

PLAN_TIMEOUT_S = 1800.0

Forward = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def load_handlers(kind: str, settings: EngineSettings) -> Engine:
    """The engine of a kind that needs no model. Raises ValueError if this worker does not have it."""
    if kind not in {info.kind for info in registry.offered_kinds()}:
        registry.import_handlers(settings.handlers)
    known = [info.kind for info in registry.offered_kinds()]
    if kind not in known:
        raise ValueError(f"there is no handler for {kind} here, only for {', '.join(known)}: say --handlers MODULE")
    return registry.build(kind)


def load_engine(spec: ModelSpec, settings: EngineSettings) -> Engine:
    """A user's engine, with its model."""
    if str(spec.folder) not in sys.path:  # as in an engine process
        sys.path.insert(0, str(spec.folder))
    engine = registry.build_model_engine(spec, settings)
    engine.load()
    return engine


def load_loop(kind: str, spec: ModelSpec, settings: EngineSettings, variant: Variant) -> Loop:
    """The loop for a model of a built-in engine. Raises ValueError if there is none."""
    if spec.kind != kind:
        raise ValueError(f"{spec.id} here is a model for {spec.kind}, not for {kind}")
    if kind == "embed":
        model = TEXT_MODELS[variant.engine](spec, settings, variant.precision)
        return TextLoop(model, lambda data: embed_pb2.EmbedPayload.FromString(data).texts, settings.device)
    if kind == "infer":
        return ArrayLoop(_arrays(spec, settings, variant))
    if kind == "classify":
        return _classifier(spec, settings, variant)
    raise ValueError(f"there is no baseline for {kind}")


def _classifier(spec: ModelSpec, settings: EngineSettings, variant: Variant) -> Loop:
    if variant.engine != "torch":
        raise ValueError(f"classify runs on torch alone, not on {variant.engine}")
    import torch  # noqa: PLC0415  (takes seconds)

    from multigpu_worker.engines.classify import model as classify_model  # noqa: PLC0415  (as above)
    from multigpu_worker.engines.common import torch_runtime  # noqa: PLC0415  (as above)

    found = classify_model.load(spec, settings, variant.precision)
    if not isinstance(found.front, classify_model.Texts):
        return PictureLoop(found)

    @torch.inference_mode()
    def forward(inputs: Inputs) -> Rows:
        torch_runtime.bind(settings.threads, tf32=variant.precision == "tf32")
        tensors = {name: torch.from_numpy(array).to(found.device) for name, array in inputs.items()}
        logits = found.model(**tensors).logits.float()
        scores: Rows = (logits.sigmoid() if found.sigmoid else logits.softmax(-1)).cpu().numpy()
        return scores

    def texts_of(payload: bytes) -> list[str]:
        return [classify_input.text(classify_input.parse(payload, ""))]

    return TextLoop((found.front.input, forward), texts_of, settings.device)


def _torch_texts(spec: ModelSpec, settings: EngineSettings, precision: str) -> TextModel:
    from multigpu_worker.engines.embed.model import load_model  # noqa: PLC0415  (takes seconds: torch)

    model = load_model(spec.folder, settings.device, precision, threads=settings.threads, pack=False)
    return model.text, model.embed


def _onnx_texts(spec: ModelSpec, settings: EngineSettings, precision: str) -> TextModel:
    """On the engine's graph, exported now if it never was."""
    from multigpu_worker.engines.onnx.artifacts import exported  # noqa: PLC0415  (extra packages)
    from multigpu_worker.engines.onnx.export import MODEL_FILE, OUTPUT  # noqa: PLC0415  (as above)

    with contextlib.closing(exported(spec, settings, "fp32" if precision == "tf32" else precision)) as artifact:
        forward = _onnx_forward(artifact.folder / MODEL_FILE, settings, precision)
        text = TextInput.read(artifact.folder)
    return text, lambda inputs: np.asarray(forward(inputs)[OUTPUT], np.float32)


def _plan_texts(spec: ModelSpec, settings: EngineSettings, precision: str) -> TextModel:
    """On the engine's plan, built now if it never was."""
    from multigpu_worker.engines.embed import tensorrt_backend  # noqa: PLC0415  (extra packages)

    backend = _plan_of(tensorrt_backend.load(spec, settings, precision)[0], tensorrt_backend.PlanBackend)
    return backend.text, backend.embed


TEXT_MODELS: Mapping[str, Callable[[ModelSpec, EngineSettings, str], TextModel]] = {
    "torch": _torch_texts,
    "onnx": _onnx_texts,
    "tensorrt": _plan_texts,
}


def _arrays(spec: ModelSpec, settings: EngineSettings, variant: Variant) -> Callable[[Any], Mapping[str, Any]]:
    if variant.engine == "onnx":
        return _onnx_arrays(spec, settings, variant.precision)
    backend, _ = infer_backend.load_backend(spec, settings, variant)
    if variant.engine != "tensorrt":
        return backend
    from multigpu_worker.engines.infer.tensorrt_backend import PlanForward  # noqa: PLC0415  (extra packages)

    forward: Callable[[Any], Mapping[str, Any]] = _plan_of(backend, PlanForward)
    return forward


def _onnx_arrays(spec: ModelSpec, settings: EngineSettings, precision: str) -> Forward:
    """On the file as it is, or at int8 on the engine's graph."""
    if precision in ("fp32", "tf32"):
        return _onnx_forward(spec.folder / spec.file, settings, precision)
    from multigpu_worker.engines.onnx.artifacts import quantised  # noqa: PLC0415  (extra packages)
    from multigpu_worker.engines.onnx.export import MODEL_FILE  # noqa: PLC0415  (as above)

    with contextlib.closing(quantised(spec, settings, precision, "onnx")) as artifact:
        return _onnx_forward(artifact.folder / MODEL_FILE, settings, precision)


def _plan_of(backend: Any, kind: type) -> Any:
    """The back end on the plan, of class `kind`, once it is built. Raises LookupError if it cannot be built."""
    switch = getattr(backend, "switch", None)
    if switch is None:
        return backend
    if not switch.settle(PLAN_TIMEOUT_S):
        raise LookupError(f"its plan was not built in {PLAN_TIMEOUT_S:.0f} s")
    if isinstance(switch.current, kind):
        return switch.current
    raise LookupError(switch.facts().get("plan", "there is no plan"))


def _onnx_forward(path: Path, settings: EngineSettings, precision: str) -> Forward:
    import onnxruntime  # noqa: PLC0415  (an extra package)

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = settings.threads
    provider, more = "CPUExecutionProvider", {}
    if settings.device != "cpu":
        provider = "CUDAExecutionProvider"
        # The provider's default for float32 products is tf32.
        more = {"device_id": settings.device.partition(":")[2] or "0", "use_tf32": str(int(precision == "tf32"))}
    session = onnxruntime.InferenceSession(str(path), options, providers=[(provider, more)])
    if provider not in session.get_providers():  # left out without an error
        raise LookupError(f"ONNX Runtime could not open {settings.device}: its CUDA provider lacks a library")
    names = [output.name for output in session.get_outputs()]
    wanted = {found.name for found in session.get_inputs()}

    def forward(inputs: Mapping[str, Any]) -> dict[str, Any]:
        fed = {name: array for name, array in inputs.items() if name in wanted}
        return dict(zip(names, session.run(names, fed), strict=True))

    return forward

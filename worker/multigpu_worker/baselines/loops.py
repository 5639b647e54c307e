"""Plain loops: what one process does with a model and nothing around it, for main.py.

A loop gets the payloads of the fleet's own tasks. Reading them is not timed.

- Texts are tokenised together, sorted by length and cut into batches of one size, the best of three: no library's loop
  has more to work with. torch runs transformers' own layers as they are; ONNX Runtime runs the exported graph with its
  own defaults and the threads that were asked for; TensorRT runs the plan.
- Arrays go through in batches as large as the fleet's tasks, pictures unpacked and then in batches of the best size.
- An engine or a handler of the user's own is called as it is, with as many tasks at a time as suit it best.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from multigpu._kinds.inference import array_of
from multigpu.repository.model import ModelSpec
from multigpu.v1 import embed_pb2, infer_pb2

from multigpu_worker.engines import registry
from multigpu_worker.engines.base import Batch, Engine, EngineSettings, Item
from multigpu_worker.engines.classify import payload as classify_input
from multigpu_worker.engines.common.precision import Variant
from multigpu_worker.engines.embed.text import Inputs, TextInput
from multigpu_worker.engines.infer import backend as infer_backend
from multigpu_worker.engines.infer import payload as infer_input

TEXT_BATCHES = {"cpu": (16, 32, 64), "cuda": (64, 128, 256)}
# Of pictures, and of the tasks of an engine of the user's own.
BATCHES = (1, 8, 32)
# As long as a plan may take to be built.
PLAN_TIMEOUT_S = 1800.0

Rows = npt.NDArray[np.float32]
# From texts to a model's inputs, and from these to vectors.
TextModel = tuple[TextInput, Callable[[Inputs], Rows]]


class Loop(Protocol):
    """A model in a plain loop."""

    def read(self, payloads: Sequence[bytes]) -> Any:
        """What `run` takes."""

    def warm_up(self, examples: Any) -> int:
        """Run until it is warm. Returns the batch size that was chosen."""

    def run(self, examples: Any) -> tuple[Any, int | None]:
        """What came of the examples, and how many tokens they had, if it counts in them."""

    def answers(self, given: Any) -> Rows | list[bytes]:
        """From what `run` gave: a row for each example, or the result of each task."""


class TextLoop:
    def __init__(self, model: TextModel, texts_of: Callable[[bytes], Sequence[str]], device: str) -> None:
        self._text, self._forward = model
        self._texts_of = texts_of
        self._batches = TEXT_BATCHES[device.partition(":")[0]]
        self._batch = self._batches[0]

    def read(self, payloads: Sequence[bytes]) -> list[str]:
        return [text for payload in payloads for text in self._texts_of(payload)]

    def warm_up(self, examples: list[str]) -> int:
        self._batch = best_batch(self._batches, functools.partial(self._run, examples))
        return self._batch

    def run(self, examples: list[str]) -> tuple[Rows, int]:
        return self._run(examples, self._batch)

    def answers(self, given: Rows) -> Rows:
        return given

    def _run(self, examples: list[str], batch: int) -> tuple[Rows, int]:
        tokens = self._text.tokenise(examples)
        lengths = tokens.lengths()
        order = np.argsort(-lengths, kind="stable")
        rows: Rows | None = None
        for start in range(0, len(order), batch):
            places = order[start : start + batch]
            vectors = self._forward(self._text.pad(tokens, places.tolist()))
            if rows is None:
                rows = np.empty((len(examples), vectors.shape[1]), np.float32)
            rows[places] = vectors
        assert rows is not None
        return rows, int(lengths.sum())


class ArrayLoop:
    def __init__(self, forward: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        self._forward = forward

    def read(self, payloads: Sequence[bytes]) -> list[dict[str, Any]]:
        # The tasks of a round are one and the same: it is read once.
        read = {payload: infer_pb2.InferPayload.FromString(payload).inputs for payload in set(payloads)}
        arrays = {payload: {each.name: np.array(array_of(each)) for each in read[payload]} for payload in read}
        return [arrays[payload] for payload in payloads]

    def warm_up(self, examples: list[dict[str, Any]]) -> int:
        for _ in range(2):
            self.run(examples)
        return len(next(iter(examples[0].values())))

    def run(self, examples: list[dict[str, Any]]) -> tuple[Mapping[str, Any], None]:
        """What the last of them gave: all of them together might not fit into memory."""
        for inputs in examples:
            outputs = self._forward(inputs)
        return outputs, None

    def answers(self, given: Mapping[str, Any]) -> list[bytes]:
        return [infer_input.result(dict(given), (), "")]


class PictureLoop:
    """`classifier`: classify_model.Classifier, of pictures."""

    def __init__(self, classifier: Any) -> None:
        self._classifier = classifier
        self._batch = BATCHES[0]

    def read(self, payloads: Sequence[bytes]) -> list[Any]:
        return [classify_input.parse(payload, "") for payload in payloads]

    def warm_up(self, examples: list[Any]) -> int:
        self._batch = best_batch(BATCHES, functools.partial(self._run, examples))
        return self._batch

    def run(self, examples: list[Any]) -> tuple[Rows, None]:
        return self._run(examples, self._batch), None

    def answers(self, given: Rows) -> Rows:
        return given

    def _run(self, examples: list[Any], batch: int) -> Rows:
        parts = []
        for start in range(0, len(examples), batch):
            features = [self._classifier.front.features(payload) for payload in examples[start : start + batch]]
            parts.append(self._classifier.probabilities(features))
        return np.concatenate(parts)


class EngineLoop:
    """An engine by itself: prepare, run, and the next batch."""

    def __init__(self, engine: Engine, batch: Callable[[list[Item]], Batch]) -> None:
        self._engine = engine
        self._batch_of = batch
        self._batch = BATCHES[0]

    def read(self, payloads: Sequence[bytes]) -> list[Item]:
        return [
            Item(lease_id=n, task_id=n, attempt=1, payload=payload, units=1, checkpoint=b"", partials_received=0)
            for n, payload in enumerate(payloads, 1)
        ]

    def warm_up(self, examples: list[Item]) -> int:
        if self._engine.one_by_one:
            self._run(examples, self._batch)
        else:
            self._batch = best_batch(BATCHES, functools.partial(self._run, examples))
        return self._batch

    def run(self, examples: list[Item]) -> tuple[list[bytes], None]:
        return self._run(examples, self._batch), None

    def answers(self, given: list[bytes]) -> list[bytes]:
        return given

    def _run(self, examples: list[Item], batch: int) -> list[bytes]:
        reporter = Results()
        for start in range(0, len(examples), batch):
            together = self._batch_of(examples[start : start + batch])
            self._engine.run(together, self._engine.prepare(together), reporter)
        if missing := [item for item in examples if item.lease_id not in reporter.results]:
            raise RuntimeError(reporter.errors.get(missing[0].lease_id, "the engine said nothing of a task"))
        return [reporter.results[item.lease_id] for item in examples]


class Results:
    """A Reporter that keeps results and errors."""

    def __init__(self) -> None:
        self.results: dict[int, bytes] = {}
        self.errors: dict[int, str] = {}

    def succeed(self, item: Item, result: bytes, content_type: str = "") -> None:
        del content_type
        self.results[item.lease_id] = result

    def fail(self, item: Item, error_type: str, message: str, *, retryable: bool, traceback: str = "") -> None:
        del retryable, traceback
        self.errors[item.lease_id] = f"{error_type}: {message}"

    def begin(self, item: Item) -> None: ...

    def partial(self, item: Item, data: bytes, content_type: str = "") -> None: ...

    def progress(self, item: Item, fraction: float, note: str = "") -> None: ...

    def checkpoint(self, item: Item, data: bytes) -> None: ...

    def cancelled(self, item: Item) -> bool:
        del item
        return False

    def beat(self) -> None: ...


def best_batch(sizes: Sequence[int], run: Callable[[int], Any]) -> int:
    """The size with which `run` takes the least time."""
    seconds = {}
    for size in (*sizes, *sizes):  # the second time counts
        began = time.perf_counter()
        run(size)
        seconds[size] = time.perf_counter() - began
    return min(seconds, key=lambda size: seconds[size])


def load_handlers(kind: str, settings: EngineSettings) -> Engine:
    """What runs a kind that needs no model. Raises ValueError if this worker has none such."""
    if kind not in {info.kind for info in registry.offered_kinds()}:
        registry.import_handlers(settings.handlers)
    known = [info.kind for info in registry.offered_kinds()]
    if kind not in known:
        raise ValueError(f"there is no handler for {kind} here, only for {', '.join(known)}: say --handlers MODULE")
    return registry.build(kind)


def load_engine(spec: ModelSpec, settings: EngineSettings) -> Engine:
    """A user's own engine, with its model."""
    if str(spec.folder) not in sys.path:  # as in an engine process
        sys.path.insert(0, str(spec.folder))
    engine = registry.build_model_engine(spec, settings)
    engine.load()
    return engine


def load_loop(kind: str, spec: ModelSpec, settings: EngineSettings, variant: Variant) -> Loop:
    """The loop for a model of an engine of ours. Raises ValueError if there is none."""
    if spec.kind != kind:
        raise ValueError(f"{spec.id} here is a model for {spec.kind}, not for {kind}")
    if kind == "embed":
        model = TEXT_MODELS[variant.engine](spec, settings, variant.precision)
        return TextLoop(model, lambda data: embed_pb2.EmbedPayload.FromString(data).texts, settings.device)
    if kind == "infer":
        return ArrayLoop(load_arrays(spec, settings, variant))
    if kind == "classify":
        return load_classifier(spec, settings, variant)
    raise ValueError(f"there is no plain loop for {kind}")


def load_arrays(spec: ModelSpec, settings: EngineSettings, variant: Variant) -> Callable[[Any], Mapping[str, Any]]:
    if variant.engine == "onnx":
        return onnx_arrays(spec, settings, variant.precision)
    backend, _ = infer_backend.load_backend(spec, settings, variant)
    if variant.engine != "tensorrt":
        return backend
    from multigpu_worker.engines.infer.tensorrt_backend import PlanForward  # noqa: PLC0415  (not all have what it needs)

    forward: Callable[[Any], Mapping[str, Any]] = plan_of(backend, PlanForward)
    return forward


def load_classifier(spec: ModelSpec, settings: EngineSettings, variant: Variant) -> Loop:
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


def torch_texts(spec: ModelSpec, settings: EngineSettings, precision: str) -> TextModel:
    from multigpu_worker.engines.embed.model import load_model  # noqa: PLC0415  (takes seconds: torch)

    model = load_model(spec.folder, settings.device, precision, threads=settings.threads, pack=False)
    return model.text, model.embed


def onnx_arrays(spec: ModelSpec, settings: EngineSettings, precision: str) -> Callable[[Any], Mapping[str, Any]]:
    """On the file as it is, or at int8 on the graph that the engine has."""
    if precision in ("fp32", "tf32"):
        return onnx_forward(spec.folder / spec.file, settings, precision)
    from multigpu_worker.engines.onnx.artifacts import quantised  # noqa: PLC0415  (not all have what it needs)
    from multigpu_worker.engines.onnx.export import MODEL_FILE  # noqa: PLC0415  (as above)

    with contextlib.closing(quantised(spec, settings, precision, "onnx")) as artifact:
        return onnx_forward(artifact.folder / MODEL_FILE, settings, precision)


def onnx_texts(spec: ModelSpec, settings: EngineSettings, precision: str) -> TextModel:
    """On the same graph as the engine's, made now if it never was."""
    from multigpu_worker.engines.onnx.artifacts import exported  # noqa: PLC0415  (not all have what it needs)
    from multigpu_worker.engines.onnx.export import MODEL_FILE, OUTPUT  # noqa: PLC0415  (as above)

    with contextlib.closing(exported(spec, settings, "fp32" if precision == "tf32" else precision)) as artifact:
        forward = onnx_forward(artifact.folder / MODEL_FILE, settings, precision)
        text = TextInput.read(artifact.folder)
    return text, lambda inputs: np.asarray(forward(inputs)[OUTPUT], np.float32)


def plan_texts(spec: ModelSpec, settings: EngineSettings, precision: str) -> TextModel:
    """On the plan that the engine has too, built now if it never was."""
    from multigpu_worker.engines.embed import tensorrt_backend as embed_tensorrt  # noqa: PLC0415  (not all have what it needs)

    backend = plan_of(embed_tensorrt.load(spec, settings, precision)[0], embed_tensorrt.PlanBackend)
    return backend.text, backend.embed


TEXT_MODELS: Mapping[str, Callable[[ModelSpec, EngineSettings, str], TextModel]] = {
    "torch": torch_texts,
    "onnx": onnx_texts,
    "tensorrt": plan_texts,
}


def plan_of(backend: Any, kind: type) -> Any:
    """What runs the plan, of class `kind`, without what serves until it is built. LookupError: none could be built."""
    switch = getattr(backend, "switch", None)
    if switch is None:
        return backend
    if not switch.settle(PLAN_TIMEOUT_S):
        raise LookupError(f"its plan was not built in {PLAN_TIMEOUT_S:.0f} s")
    served = isinstance(switch.current, kind)
    if not served:
        raise LookupError(switch.facts().get("plan", "there is no plan"))
    return switch.current


def onnx_forward(path: Path, settings: EngineSettings, precision: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    import onnxruntime  # noqa: PLC0415  (not all have it)

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = settings.threads
    provider, more = "CPUExecutionProvider", {}
    if settings.device != "cpu":
        provider = "CUDAExecutionProvider"
        # Its own choice for products of float32 is tf32.
        more = {"device_id": settings.device.partition(":")[2] or "0", "use_tf32": str(int(precision == "tf32"))}
    session = onnxruntime.InferenceSession(str(path), options, providers=[(provider, more)])
    if provider not in session.get_providers():  # left out without a word
        raise LookupError(f"ONNX Runtime could not open {settings.device}: its CUDA provider lacks a library")
    names = [output.name for output in session.get_outputs()]
    wanted = {found.name for found in session.get_inputs()}

    def forward(inputs: Mapping[str, Any]) -> dict[str, Any]:
        fed = {name: array for name, array in inputs.items() if name in wanted}
        return dict(zip(names, session.run(names, fed), strict=True))

    return forward

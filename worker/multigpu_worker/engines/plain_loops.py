"""Plain loops: what one process does with a model and nothing around it, for plain.py.

Texts are tokenised together, sorted by length and cut into batches of one size, the best of three: no library's loop
has more to work with. torch runs transformers' own layers as they are; ONNX Runtime runs the exported graph with its
own defaults and the threads that were asked for. Arrays go through in batches as large as the fleet's tasks.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from multigpu.repository import ModelSpec

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.embed_text import Inputs, TextInput
from multigpu_worker.engines.precision import Variant

BATCHES = {"cpu": (16, 32, 64), "cuda": (64, 128, 256)}

Rows = npt.NDArray[np.float32]
# From texts to a model's inputs, and from these to vectors.
TextModel = tuple[TextInput, Callable[[Inputs], Rows]]


class Loop(Protocol):
    """A model in a plain loop."""

    def warm_up(self, examples: Any) -> int:
        """Run until it is warm. Returns the batch size that was chosen."""

    def run(self, examples: Any) -> tuple[Rows, int | None]:
        """A row for each example, and how many tokens they had, if it counts in them."""


class TextLoop:
    def __init__(self, text: TextInput, forward: Callable[[Inputs], Rows], batches: tuple[int, ...]) -> None:
        self._text = text
        self._forward = forward
        self._batches = batches
        self._batch = batches[0]

    def warm_up(self, examples: list[str]) -> int:
        seconds = {}
        for batch in (*self._batches, *self._batches):  # the second time counts
            self._batch = batch
            began = time.perf_counter()
            self.run(examples)
            seconds[batch] = time.perf_counter() - began
        self._batch = min(seconds, key=lambda batch: seconds[batch])
        return self._batch

    def run(self, examples: list[str]) -> tuple[Rows, int]:
        tokens = self._text.tokenise(examples)
        lengths = tokens.lengths()
        order = np.argsort(-lengths, kind="stable")
        rows: Rows | None = None
        for start in range(0, len(order), self._batch):
            places = order[start : start + self._batch]
            vectors = self._forward(self._text.pad(tokens, places.tolist()))
            if rows is None:
                rows = np.empty((len(examples), vectors.shape[1]), np.float32)
            rows[places] = vectors
        assert rows is not None
        return rows, int(lengths.sum())


class ArrayLoop:
    def __init__(self, forward: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
        self._forward = forward

    def warm_up(self, examples: str) -> int:
        for _ in range(2):
            rows, _ = self.run(examples)
        return len(rows)

    def run(self, examples: str) -> tuple[Rows, None]:
        with np.load(examples, allow_pickle=False) as file:
            inputs = dict(file)
        outputs = self._forward(inputs)
        flat = [np.asarray(outputs[name], np.float32) for name in sorted(outputs)]
        return np.concatenate([array.reshape(len(array), -1) for array in flat], axis=1), None


def load_loop(kind: str, spec: ModelSpec, settings: EngineSettings, variant: Variant) -> Loop:
    """The loop for a model. Raises ValueError if there is none."""
    if ":" in spec.engine:
        raise ValueError(f"{spec.id} runs on {spec.engine}, an engine of its own, which nothing plain compares with")
    if (spec.kind, kind) == ("embed", "embed"):
        if variant.engine == "torch":
            text, forward = torch_texts(spec, settings, variant.precision)
            return TextLoop(text, forward, BATCHES[settings.device.partition(":")[0]])
        if variant.engine == "onnx":
            text, forward = onnx_texts(spec, settings, variant.precision)
            return TextLoop(text, forward, BATCHES[settings.device.partition(":")[0]])
    elif (spec.kind, kind) == ("infer", "infer"):
        if variant.engine == "onnx":
            return ArrayLoop(onnx_forward(spec.folder / spec.file, settings))
        if variant.engine == "torch":
            from multigpu_worker.engines import infer_torch  # noqa: PLC0415  (takes seconds: torch)

            return ArrayLoop(infer_torch.load(spec, settings, variant.precision)[0])
    raise ValueError(f"there is no plain loop for {kind} with {spec.kind} model {spec.name!r} on {variant.engine}")


def torch_texts(spec: ModelSpec, settings: EngineSettings, precision: str) -> TextModel:
    from multigpu_worker.engines.embed_model import load_model  # noqa: PLC0415  (as above)

    model = load_model(spec.folder, settings.device, precision, threads=settings.threads, pack=False)
    return model.text, model.embed


def onnx_texts(spec: ModelSpec, settings: EngineSettings, precision: str) -> TextModel:
    """On the same graph as the engine's, made now if it never was."""
    from multigpu_worker.engines.onnx_artifacts import exported  # noqa: PLC0415  (not all have what it needs)
    from multigpu_worker.engines.onnx_export import MODEL_FILE, OUTPUT  # noqa: PLC0415  (as above)

    with contextlib.closing(exported(spec, settings, precision)) as artifact:
        forward = onnx_forward(artifact.folder / MODEL_FILE, settings)
        text = TextInput.read(artifact.folder)
    return text, lambda inputs: np.asarray(forward(inputs)[OUTPUT], np.float32)


def onnx_forward(path: Path, settings: EngineSettings) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    import onnxruntime  # noqa: PLC0415  (not all have it)

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = settings.threads
    providers = ["CPUExecutionProvider" if settings.device == "cpu" else "CUDAExecutionProvider"]
    session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    names = [output.name for output in session.get_outputs()]
    wanted = {found.name for found in session.get_inputs()}

    def forward(inputs: Mapping[str, Any]) -> dict[str, Any]:
        fed = {name: array for name, array in inputs.items() if name in wanted}
        return dict(zip(names, session.run(names, fed), strict=True))

    return forward

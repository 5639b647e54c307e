"""Quantises ONNX graphs to int8 or fp8 by one of a few recipes, and measures what they lose. docs/precision.md.

Exported embedding models:

- "dynamic": see dynamic.py.
- "selective": weights by output channel, activations calibrated by entropy (nvidia-modelopt), without the products
  inside attention and the layers that narrow (the second of each feed-forward block): one scale cannot hold the
  outliers of their inputs. Explicit Q/DQ, which TensorRT takes.
- "default": nvidia-modelopt's defaults, which lose four points of STS-B with MiniLM: the accuracy gate rejects it.

ONNX models of kind infer:

- "static": weights by output channel, activations by the range that calibration saw. ONNX Runtime writes it for a CPU,
  with the unsigned activations that its kernels prefer; nvidia-modelopt for TensorRT, symmetric, and the rest at fp16.
- "dynamic": as above. Layers that aren't products with constant matrices (convolutions) stay as they are.

fp8 (E4M3) has one recipe, for TensorRT only: products, convolutions and attention, by the largest number that
calibration saw (nvidia-modelopt); the rest is fp16. Its exponent holds outliers, so no layer is left out. ONNX Runtime
computes such a graph on a CPU, slowly and with the same roundings.

Everything except `recipe_of`, `quantise_embed` and `quantise_infer` runs in a subprocess.
"""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multigpu_worker.engines.common import accuracy_gate as gate
from multigpu_worker.engines.common.subprocess_call import subprocess_call
from multigpu_worker.engines.common.tensors import Arrays
from multigpu_worker.engines.embed.text import TextInput
from multigpu_worker.engines.onnx.export import MODEL_FILE, OUTPUT
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import ModelSpec

# int8 recipes by kind and engine, the default first (model.toml: int8_recipe under [parameters]).
RECIPES = {
    ("embed", "onnx"): ("dynamic", "selective", "default"),
    ("embed", "tensorrt"): ("selective", "default"),
    ("infer", "onnx"): ("static", "dynamic"),
    ("infer", "tensorrt"): ("static",),
}
FP8_RECIPE = "max"
# More examples take longer to calibrate with and change little.
CALIBRATION_MAX = 128
# Operations that only quantised graphs have.
ROUNDING = ("QuantizeLinear", "DequantizeLinear")
# Padded tokens in one forward pass of the measurement.
TOKENS_MAX = 512


def recipe_of(spec: ModelSpec, precision: str, engine: str) -> str:
    """The model's recipe, or the engine's default. Raises ModelFolderError if the engine does not have it."""
    if precision == "fp8":
        return FP8_RECIPE
    known = RECIPES[spec.kind, engine]
    recipe = spec.parameters.get("int8_recipe", known[0])
    if recipe not in known:
        raise ModelFolderError(
            f"{spec.id} has int8_recipe {recipe!r} in model.toml, which engine {engine} can't run for {spec.kind}: "
            f"known are {', '.join(known)}"
        )
    return recipe


def quantise_embed(spec: ModelSpec, source: Path, folder: Path, recipe: str, threads: int = 0) -> dict[str, str]:
    """Quantise the export in `source` into the empty `folder`, and return the gate's figures.

    Raises ModelFolderError, MemoryError, OSError.
    """
    arguments = {"spec": spec.plain(), "source": str(source), "folder": str(folder), "recipe": recipe}
    figures: dict[str, str] = subprocess_call(
        f"{__name__}:quantise_export", arguments | {"threads": threads}, threads=threads
    )
    return figures


def quantise_infer(spec: ModelSpec, folder: Path, recipe: str, engine: str, threads: int = 0) -> dict[str, str]:
    """As `quantise_embed`, for an ONNX model of kind infer and an engine."""
    arguments = {"spec": spec.plain(), "folder": str(folder), "recipe": recipe, "engine": engine, "threads": threads}
    figures: dict[str, str] = subprocess_call(f"{__name__}:quantise_model", arguments, threads=threads)
    return figures


def quantise_export(*, spec: dict[str, Any], source: str, folder: str, recipe: str, threads: int) -> dict[str, str]:
    """`quantise_embed`, in the subprocess."""
    model, old, new = ModelSpec.from_plain(spec), Path(source) / MODEL_FILE, Path(folder) / MODEL_FILE
    text = TextInput.read(Path(source))
    text.save(Path(folder))
    if recipe == "dynamic":
        _quantise_dynamic(old, new)
    else:
        texts = gate.read_texts(model.folder / model.gate.calibration)[:CALIBRATION_MAX]
        calibration = text.pad(text.tokenise(texts), range(len(texts)))
        if recipe == FP8_RECIPE:
            _quantise_modelopt(old, new, calibration, "fp8", "max")
        else:
            options = _selective(old) if recipe == "selective" else {}
            _quantise_modelopt(old, new, calibration, "int8", "entropy", high_precision_dtype="fp32", **options)
    _require_rounded(model, new)
    rounded = _embedder(new, text, threads, fused=recipe != FP8_RECIPE)
    return gate.measure(model, _embedder(old, text, threads), rounded)


def quantise_model(*, spec: dict[str, Any], folder: str, recipe: str, engine: str, threads: int) -> dict[str, str]:
    """`quantise_infer`, in the subprocess."""
    from multigpu_worker.engines.onnx.session import Session, tensor_spec  # noqa: PLC0415  (the extra `onnx`)

    model, new = ModelSpec.from_plain(spec), Path(folder) / MODEL_FILE
    old = model.folder / model.file
    exact = Session(old, "cpu", threads)
    _reject_rounded(model, old)
    inputs = [tensor_spec(old, each) for each in exact.inputs]
    rows = inputs[0].shape[0] if inputs[0].shape else None
    calibration, held_out = (
        gate.read_arrays(model.folder / name, {each.name: each.dtype for each in inputs}, rows)
        for name in (model.gate.calibration, model.gate.held_out)
    )
    most = max(rows or 1, CALIBRATION_MAX // (rows or 1) * (rows or 1))
    calibration = {name: array[:most] for name, array in calibration.items()}
    if recipe == FP8_RECIPE:
        _quantise_modelopt(old, new, calibration, "fp8", "max")
    elif recipe == "dynamic":
        _quantise_dynamic(old, new)
    elif engine == "tensorrt":
        _quantise_modelopt(old, new, calibration, "int8", "max")
    else:
        _quantise_static(old, new, calibration, rows or 1)
    _require_rounded(model, new)
    # ONNX Runtime's fusions compute wrong numbers where the rest is fp16, as it is for TensorRT.
    rounded = Session(new, "cpu", threads, fused=engine == "onnx")
    return gate.measure_arrays(model, held_out, exact.run, rounded.run, rows or gate.EXAMPLES_MAX)


def _reject_rounded(model: ModelSpec, path: Path) -> None:
    """Raises ModelFolderError if the graph is quantised already, or has no float32 weights."""
    import onnx  # noqa: PLC0415  (only in the subprocess)

    graph = onnx.load(path, load_external_data=False).graph
    if any(node.op_type in ROUNDING for node in graph.node):
        raise ModelFolderError(f"{model.id} is quantised already: leave its precision out, and it is run as it is")
    if not any(each.data_type == onnx.TensorProto.FLOAT for each in graph.initializer):
        raise ModelFolderError(f"{model.id} has no weights of float32: int8 and fp8 begin with a graph of float32")


def _require_rounded(model: ModelSpec, path: Path) -> None:
    """Raises ModelFolderError if the recipe quantised nothing: the graph would be of another precision."""
    import onnx  # noqa: PLC0415  (only in the subprocess)

    if not any(node.op_type in ROUNDING for node in onnx.load(path, load_external_data=False).graph.node):
        raise ModelFolderError(f"{model.id} has no layers that this recipe quantises: use a higher precision")


def _embedder(path: Path, text: TextInput, threads: int, *, fused: bool = True) -> gate.Embed:
    """A function from texts to the graph's vectors, computed on the CPU."""
    from multigpu_worker.engines.onnx.session import Session  # noqa: PLC0415  (the extra `onnx`)

    session = Session(path, "cpu", threads, fused=fused)

    def embed(texts: Sequence[str]) -> gate.Vectors:
        tokens = text.tokenise(texts)
        lengths = tokens.lengths()
        order = np.argsort(-lengths, kind="stable")
        vectors: list[gate.Vectors] = []
        while (start := sum(map(len, vectors))) < len(order):
            rows = order[start : start + max(1, TOKENS_MAX // int(lengths[order[start]]))].tolist()
            vectors.append(session.run(text.pad(tokens, rows))[OUTPUT])
        return np.concatenate(vectors)[np.argsort(order)]

    return embed


def _quantise_dynamic(old: Path, new: Path) -> None:
    from multigpu_worker.engines.onnx.dynamic import quantise_dynamic  # noqa: PLC0415  (imports onnx)

    quantise_dynamic(old, new)


def _selective(path: Path) -> dict[str, Any]:
    """Options of modelopt to quantise only products with weights in layers that don't narrow."""
    import onnx  # noqa: PLC0415  (only in the subprocess)

    graph = onnx.load(path).graph
    shapes = {each.name: tuple(each.dims) for each in graph.initializer}

    def narrows(node: Any) -> bool:
        shape = shapes.get(node.input[1])
        return shape is None or len(shape) != 2 or shape[0] > shape[1]

    kept = [node.name for node in graph.node if node.op_type == "MatMul" and narrows(node)]
    return {"op_types_to_quantize": ["MatMul"], "nodes_to_exclude": kept}


def _quantise_modelopt(old: Path, new: Path, calibration: Arrays, mode: str, method: str, **options: Any) -> None:
    """Explicit Q/DQ for TensorRT. Other operations become fp16, unless options say otherwise."""
    from modelopt.onnx.quantization import quantize  # noqa: PLC0415  (only in the subprocess)

    with tempfile.TemporaryDirectory(dir=new.parent) as folder:
        # modelopt rewrites its input, and weights may be in a second file.
        for file in old.parent.glob(f"{old.name}*"):
            shutil.copyfile(file, Path(folder) / file.name)
        quantize(
            str(Path(folder) / old.name),
            quantize_mode=mode,
            calibration_data=calibration,
            calibration_method=method,
            calibration_eps=["cpu"],
            output_path=str(new),
            log_level="ERROR",
            **options,
        )


def _quantise_static(old: Path, new: Path, calibration: Arrays, rows: int) -> None:
    """Q/DQ for ONNX Runtime on a CPU."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static  # noqa: PLC0415  (as above)
    from onnxruntime.quantization.calibrate import CalibrationDataReader  # noqa: PLC0415  (as above)

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # it has no types
        def __init__(self) -> None:
            self._batches = iter(gate.batches(calibration, rows))

        def get_next(self) -> Arrays | None:
            return next(self._batches, None)

    quantize_static(
        str(old),
        str(new),
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )

"""ONNX graphs with weights and products of 8 bits, by one of a few recipes, and what they lost by that.

Exported embedding models:


- "dynamic": weights by output channel; activations by token, when they come. For ONNX Runtime on a CPU. A token's
  scale is its own, so a text's vector doesn't depend on the texts that it is computed with, and a large value in one
  token costs the others nothing.
- "selective": weights by output channel; activations by scales that were calibrated (nvidia-modelopt, entropy), but for
  the products inside attention and the layers that narrow (the second of each feed-forward block), whose inputs have
  outliers that one scale can't hold. Explicit Q/DQ, which TensorRT takes.
- "default": whatever nvidia-modelopt does by itself. It is here because people ask for it; with MiniLM it loses four
  points of STS-B, and the accuracy gate is there to reject it.

ONNX models of any sort (kind infer):

- "static": weights by output channel, activations by the least and the largest number that calibration saw. For a CPU
  it is written by ONNX Runtime, with unsigned activations that have a zero of their own, which its kernels are made
  for. For TensorRT it is written by nvidia-modelopt, symmetric, where TensorRT's kernels take it; the rest is fp16.
- "dynamic": as above. Layers that aren't products with constant matrices (convolutions) stay as they are.

fp8 (E4M3) has one recipe, for all of them and for TensorRT alone: products, convolutions and what attention multiplies,
by the largest number that calibration saw (nvidia-modelopt); the rest is fp16. A type with an exponent holds outliers,
so no layer is left out. ONNX Runtime computes such a graph on a CPU, slowly and with the same roundings.

Everything here runs in a process of its own (engines/common/subprocess_call.py) but for `quantize_embed` and
`quantize_infer`.
"""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from multigpu.repository.model import ModelSpec

from multigpu_worker.engines.common import accuracy_gate as gate
from multigpu_worker.engines.common.subprocess_call import run_apart
from multigpu_worker.engines.embed.text import TextInput
from multigpu_worker.engines.onnx.export import MODEL_FILE, OUTPUT, SINGLE_FILE_BYTES_MAX
from multigpu_worker.models.folders import ModelFolderError

# Recipes of int8 by kind and engine. The first is what a model gets that asks for none in [parameters] int8_recipe.
RECIPES = {
    ("embed", "onnx"): ("dynamic", "selective", "default"),
    ("embed", "tensorrt"): ("selective", "default"),
    ("infer", "onnx"): ("static", "dynamic"),
    ("infer", "tensorrt"): ("static",),
}
# That of fp8.
FP8_RECIPE = "max"
# More to calibrate with takes longer and changes little.
CALIBRATION_MAX = 128
# What a quantised graph has, and no other.
ROUNDING = ("QuantizeLinear", "DequantizeLinear")
# Padded tokens that go through a model at once while it is judged.
TOKENS_MAX = 512


def recipe_of(spec: ModelSpec, precision: str, engine: str) -> str:
    """The recipe that a model asks for, or the engine's own. Raises ModelFolderError for one that it can't run."""
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


def quantize_embed(spec: ModelSpec, source: Path, folder: Path, recipe: str, threads: int = 0) -> dict[str, str]:
    """Quantise what export_embed wrote into `source`, into the empty `folder`, in a process of its own.

    The answer are the gate's figures, not yet judged. Raises ModelFolderError; MemoryError, OSError.
    """
    arguments = {"spec": spec.plain(), "source": str(source), "folder": str(folder), "recipe": recipe}
    facts: dict[str, str] = run_apart(f"{__name__}:quantise", arguments | {"threads": threads}, threads=threads)
    return facts


def quantize_infer(spec: ModelSpec, folder: Path, recipe: str, engine: str, threads: int = 0) -> dict[str, str]:
    """Quantise an ONNX model of kind infer for an engine. As `quantize_embed` in all else."""
    arguments = {"spec": spec.plain(), "folder": str(folder), "recipe": recipe, "engine": engine, "threads": threads}
    facts: dict[str, str] = run_apart(f"{__name__}:quantise_infer", arguments, threads=threads)
    return facts


def quantise(*, spec: dict[str, Any], source: str, folder: str, recipe: str, threads: int) -> dict[str, str]:
    """`quantize_embed`, in the process that is for it."""
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
    fused = recipe != FP8_RECIPE
    _require_rounded(model, new)
    return gate.measure(model, _embedder(old, text, threads), _embedder(new, text, threads, fused=fused))


def quantise_infer(*, spec: dict[str, Any], folder: str, recipe: str, engine: str, threads: int) -> dict[str, str]:
    """`quantize_infer`, in the process that is for it."""
    from multigpu_worker.engines.infer.onnx_backend import tensor_spec  # noqa: PLC0415  (the extra `onnx`)
    from multigpu_worker.engines.onnx.session import Session  # noqa: PLC0415  (as above)

    model, new = ModelSpec.from_plain(spec), Path(folder) / MODEL_FILE
    old = model.folder / model.file
    exact = Session(old, "cpu", threads)
    _reject_rounded(model, old)
    taken = [tensor_spec(old, each) for each in exact.inputs]
    rows = taken[0].shape[0] if taken[0].shape else None
    calibration, held_out = (
        gate.read_arrays(model.folder / name, {each.name: each.dtype for each in taken}, rows)
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
    # ONNX Runtime's fusions give wrong numbers where the rest is fp16, as it is for TensorRT.
    rounded = Session(new, "cpu", threads, fused=engine == "onnx")
    return gate.measure_arrays(model, held_out, exact.run, rounded.run, rows or gate.EXAMPLES_MAX)


def _reject_rounded(model: ModelSpec, path: Path) -> None:
    """Raises ModelFolderError if there is nothing to round, or it is rounded already."""
    import onnx  # noqa: PLC0415  (only in that process)

    graph = onnx.load(path, load_external_data=False).graph
    if any(node.op_type in ROUNDING for node in graph.node):
        raise ModelFolderError(f"{model.id} is quantised already: leave its precision out, and it is run as it is")
    if not any(each.data_type == onnx.TensorProto.FLOAT for each in graph.initializer):
        raise ModelFolderError(f"{model.id} has no weights of float32: int8 and fp8 begin with a graph of float32")


def _require_rounded(model: ModelSpec, path: Path) -> None:
    """Raises ModelFolderError if the recipe found nothing to round: it would be another precision under this name."""
    import onnx  # noqa: PLC0415  (only in that process)

    if not any(node.op_type in ROUNDING for node in onnx.load(path, load_external_data=False).graph.node):
        raise ModelFolderError(f"{model.id} has no layers that this recipe quantises: use a higher precision")


def _embedder(path: Path, text: TextInput, threads: int, *, fused: bool = True) -> gate.Embed:
    """Vectors of texts by a graph, on the CPU."""
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


def _selective(path: Path) -> dict[str, Any]:
    """Options of modelopt for products with weights in layers that don't narrow, and nothing else."""
    import onnx  # noqa: PLC0415  (only in that process)

    graph = onnx.load(path).graph
    shapes = {each.name: tuple(each.dims) for each in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    kept = [node.name for node in products if not _widens(shapes.get(node.input[1]))]
    return {"op_types_to_quantize": ["MatMul"], "nodes_to_exclude": kept}


def _quantise_modelopt(old: Path, new: Path, calibration: gate.Arrays, mode: str, method: str, **options: Any) -> None:
    """Explicit Q/DQ for TensorRT. What isn't quantised becomes fp16, unless options say otherwise."""
    from modelopt.onnx.quantization import quantize  # noqa: PLC0415  (only in that process)

    with tempfile.TemporaryDirectory(dir=new.parent) as room:
        # modelopt rewrites what it reads. Weights may be a file beside the graph's.
        for file in old.parent.glob(f"{old.name}*"):
            shutil.copyfile(file, Path(room) / file.name)
        quantize(
            str(Path(room) / old.name),
            quantize_mode=mode,
            calibration_data=calibration,
            calibration_method=method,
            calibration_eps=["cpu"],
            output_path=str(new),
            log_level="ERROR",
            **options,
        )


def _quantise_static(old: Path, new: Path, calibration: gate.Arrays, rows: int) -> None:
    """Q/DQ for ONNX Runtime on a CPU."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static  # noqa: PLC0415  (as above)
    from onnxruntime.quantization.calibrate import CalibrationDataReader  # noqa: PLC0415  (as above)

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # it has no types
        def __init__(self) -> None:
            self._batches = iter(gate.batches(calibration, rows))

        def get_next(self) -> gate.Arrays | None:
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


def _widens(shape: tuple[int, ...] | None) -> bool:
    """Whether these are weights [inputs, outputs] of a layer that doesn't narrow."""
    return shape is not None and len(shape) == 2 and shape[0] <= shape[1]


def _quantise_dynamic(old: Path, new: Path) -> None:
    """Exchange each product with constant weights for one of 8 bits, with scales of each row and each column."""
    import onnx  # noqa: PLC0415  (only in that process)

    model = onnx.load(old)
    writer = _Writer(model.graph)
    for node in list(model.graph.node):
        weights = writer.weights_of(node)
        if weights is None:
            writer.nodes.append(node)
        else:
            writer.exchange(node, weights)
    if not writer.spent:
        raise ModelFolderError(f"{old} has no layers with constant weights: there is nothing to quantise")
    del model.graph.node[:]
    model.graph.node.extend(writer.nodes)
    read = {name for node in model.graph.node for name in node.input}
    for spent in [each for each in model.graph.initializer if each.name in writer.spent - read]:
        model.graph.initializer.remove(spent)
    large = sum(len(each.raw_data) for each in model.graph.initializer) > SINGLE_FILE_BYTES_MAX
    onnx.save(model, new, save_as_external_data=large, location=f"{MODEL_FILE}.data")


class _Writer:
    """Puts the nodes of the quantised graph together, in order."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._weights = {each.name: each for each in graph.initializer if len(each.dims) == 2 and each.data_type == 1}
        self.nodes: list[Any] = []
        # Names of weights that were exchanged.
        self.spent: set[str] = set()
        # Activations that are quantised already: several layers may have one input.
        self._quantised: set[str] = set()
        self._add("int8.axis", np.array([1], np.int64))
        self._add("int8.step", np.array(1 / 127, np.float32))
        self._add("int8.least", np.array(1e-12, np.float32))
        # ONNX Runtime's fastest products on a CPU are of unsigned activations and signed weights.
        self._add("int8.middle", np.array(128, np.uint8))
        self._add("int8.zero", np.array(0, np.int8))

    def weights_of(self, node: Any) -> npt.NDArray[np.float32] | None:
        """The constant weights [inputs, outputs] of a product; None for another node."""
        from onnx import numpy_helper  # noqa: PLC0415  (only in that process)

        if node.op_type != "MatMul" or node.input[1] not in self._weights:
            return None
        weights: npt.NDArray[np.float32] = numpy_helper.to_array(self._weights[node.input[1]])
        return weights

    def exchange(self, node: Any, weights: npt.NDArray[np.float32]) -> None:
        """Write x @ weights as (q(x) @ q(weights)) * scales of columns * scales of rows."""
        x, y = node.input[0], node.output[0]
        if x not in self._quantised:
            self._quantise(x, weights.shape[0])
        steps = np.maximum(np.abs(weights).max(axis=0) / 127, np.float32(1e-12))
        self._add(f"{y}.weights", np.rint(weights / steps).astype(np.int8))
        self._add(f"{y}.steps", steps)
        self._add(f"{y}.width", np.array([weights.shape[1]], np.int64))
        self._node("MatMulInteger", [f"{x}.int8", f"{y}.weights", "int8.middle", "int8.zero"], f"{y}.int32")
        self._node("Cast", [f"{y}.int32"], f"{y}.float", to=1)
        self._node("Mul", [f"{y}.float", f"{y}.steps"], f"{y}.columns")
        self._node("Mul", [f"{y}.columns", f"{x}.steps"], f"{y}.rows")
        self._node("Concat", [f"{x}.outer", f"{y}.width"], f"{y}.shape", axis=0)
        self._node("Reshape", [f"{y}.rows", f"{y}.shape"], y)
        self.spent.add(node.input[1])

    def _quantise(self, x: str, width: int) -> None:
        """Write the rows of x as 8 bits, 128 being zero, with a step for each."""
        self._add(f"{x}.two", np.array([-1, width], np.int64))
        self._node("Shape", [x], f"{x}.outer", start=0, end=-1)
        self._node("Reshape", [x, f"{x}.two"], f"{x}.flat")
        self._node("Abs", [f"{x}.flat"], f"{x}.abs")
        self._node("ReduceMax", [f"{x}.abs", "int8.axis"], f"{x}.max", keepdims=0)
        self._node("Mul", [f"{x}.max", "int8.step"], f"{x}.step")
        self._node("Max", [f"{x}.step", "int8.least"], f"{x}.scale")
        self._node("Shape", [f"{x}.scale"], f"{x}.count")
        self._node("Expand", ["int8.middle", f"{x}.count"], f"{x}.middle")
        self._node("QuantizeLinear", [f"{x}.flat", f"{x}.scale", f"{x}.middle"], f"{x}.int8", axis=0)
        self._node("Unsqueeze", [f"{x}.scale", "int8.axis"], f"{x}.steps")
        self._quantised.add(x)

    def _add(self, name: str, array: npt.NDArray[Any]) -> None:
        from onnx import numpy_helper  # noqa: PLC0415  (only in that process)

        self._graph.initializer.append(numpy_helper.from_array(array, name))

    def _node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> None:
        from onnx import helper  # noqa: PLC0415  (only in that process)

        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))

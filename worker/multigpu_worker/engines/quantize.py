"""An exported embedding model with weights and products of 8 bits, by one of a few recipes, and what it lost by that.

- "dynamic": weights by output channel; activations by token, when they come. For ONNX Runtime on a CPU. A token's
  scale is its own, so a text's vector doesn't depend on the texts that it is computed with, and a large value in one
  token costs the others nothing.
- "selective": weights by output channel; activations by scales that were calibrated (nvidia-modelopt, entropy), but for
  the products inside attention and the layers that narrow (the second of each feed-forward block), whose inputs have
  outliers that one scale can't hold. Explicit Q/DQ, which TensorRT takes.
- "default": whatever nvidia-modelopt does by itself. It is here because people ask for it; with MiniLM it loses four
  points of STS-B, and the accuracy gate is there to refuse it.

Everything here runs in a process of its own (apart.py) but for `quantize_embed`.
"""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from multigpu.repository import ModelSpec

from multigpu_worker.engines import gate
from multigpu_worker.engines.apart import run_apart
from multigpu_worker.engines.embed_text import TextInput
from multigpu_worker.engines.models import ModelFolderError
from multigpu_worker.engines.onnx_export import MODEL_FILE, OUTPUT, SINGLE_FILE_BYTES_MAX

RECIPES = ("dynamic", "selective", "default")
# What a model gets that asks for none in [parameters] int8_recipe.
RECIPE_BY_ENGINE = {"onnx": "dynamic", "tensorrt": "selective"}
# More texts to calibrate with take longer and change little.
CALIBRATION_TEXTS_MAX = 128
# Padded tokens that go through a model at once while it is judged.
TOKENS_MAX = 512


def recipe_of(spec: ModelSpec, engine: str) -> str:
    """The recipe that a model asks for, or the engine's own. Raises ModelFolderError for one that it can't run."""
    recipe = spec.parameters.get("int8_recipe", RECIPE_BY_ENGINE[engine])
    if recipe not in RECIPES:
        raise ModelFolderError(f"{spec.id} has int8_recipe {recipe!r} in model.toml: known are {', '.join(RECIPES)}")
    if engine == "tensorrt" and recipe == "dynamic":
        raise ModelFolderError(f'{spec.id} has int8_recipe "dynamic", which TensorRT can\'t run: take "selective"')
    return recipe


def quantize_embed(spec: ModelSpec, source: Path, folder: Path, recipe: str, threads: int = 0) -> dict[str, str]:
    """Quantise what export_embed wrote into `source`, into the empty `folder`, in a process of its own.

    The answer are the gate's figures, not yet judged. Raises ModelFolderError; MemoryError, OSError.
    """
    arguments = {"spec": spec.plain(), "source": str(source), "folder": str(folder), "recipe": recipe}
    facts: dict[str, str] = run_apart(f"{__name__}:quantise", arguments | {"threads": threads}, threads=threads)
    return facts


def quantise(*, spec: dict[str, Any], source: str, folder: str, recipe: str, threads: int) -> dict[str, str]:
    """`quantize_embed`, in the process that is for it."""
    model, old, new = ModelSpec.from_plain(spec), Path(source) / MODEL_FILE, Path(folder) / MODEL_FILE
    text = TextInput.read(Path(source))
    text.save(Path(folder))
    if recipe == "dynamic":
        _quantise_dynamic(old, new)
    else:
        texts = gate.read_texts(model.folder / model.gate.calibration)[:CALIBRATION_TEXTS_MAX]
        _quantise_static(old, new, text.pad(text.tokenise(texts), range(len(texts))), selective=recipe == "selective")
    return gate.measure(model, _embedder(old, text, threads), _embedder(new, text, threads))


def _embedder(path: Path, text: TextInput, threads: int) -> gate.Embed:
    """Vectors of texts by a graph, on the CPU."""
    from multigpu_worker.engines.onnx_session import Session  # noqa: PLC0415  (the extra `onnx`)

    session = Session(path, "cpu", threads)

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


def _quantise_static(old: Path, new: Path, calibration: dict[str, Any], *, selective: bool) -> None:
    import onnx  # noqa: PLC0415  (only in that process)
    from modelopt.onnx.quantization import quantize  # noqa: PLC0415  (as above)

    options: dict[str, Any] = {}
    if selective:
        graph = onnx.load(old).graph
        shapes = {each.name: tuple(each.dims) for each in graph.initializer}
        products = [node for node in graph.node if node.op_type == "MatMul"]
        kept = [node.name for node in products if not _widens(shapes.get(node.input[1]))]
        options = {"op_types_to_quantize": ["MatMul"], "nodes_to_exclude": kept}
    with tempfile.TemporaryDirectory(dir=new.parent) as room:
        # modelopt rewrites what it reads. Weights may be a file beside the graph's.
        for file in old.parent.glob(f"{MODEL_FILE}*"):
            shutil.copyfile(file, Path(room) / file.name)
        quantize(
            str(Path(room) / MODEL_FILE),
            quantize_mode="int8",
            calibration_data=calibration,
            calibration_method="entropy",
            calibration_eps=["cpu"],
            high_precision_dtype="fp32",
            output_path=str(new),
            log_level="ERROR",
            **options,
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

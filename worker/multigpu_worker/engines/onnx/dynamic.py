"""The int8 recipe "dynamic": weights quantised by output channel, activations by row at run time.

For ONNX Runtime on a CPU. Each token has its own scale, so a text's vector does not depend on the texts in its batch,
and a large value in one token costs the others no accuracy.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from multigpu_worker.engines.onnx.export import MODEL_FILE, SINGLE_FILE_BYTES_MAX
from multigpu_worker.repository.folders import ModelFolderError


def quantise_dynamic(old: Path, new: Path) -> None:
    """Replace each product with constant float32 weights by one of 8 bits. Raises ModelFolderError: there is none."""
    model = onnx.load(old)
    writer = _Writer(model.graph)
    for node in list(model.graph.node):
        weights = writer.weights_of(node)
        if weights is None:
            writer.nodes.append(node)
        else:
            writer.replace(node, weights)
    if not writer.replaced:
        raise ModelFolderError(f"{old} has no layers with constant weights: there is nothing to quantise")
    del model.graph.node[:]
    model.graph.node.extend(writer.nodes)
    read = {name for node in model.graph.node for name in node.input}
    for unused in [each for each in model.graph.initializer if each.name in writer.replaced - read]:
        model.graph.initializer.remove(unused)
    large = sum(len(each.raw_data) for each in model.graph.initializer) > SINGLE_FILE_BYTES_MAX
    onnx.save(model, new, save_as_external_data=large, location=f"{MODEL_FILE}.data")


class _Writer:
    """Collects the nodes of the quantised graph, in order."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._weights = {each.name: each for each in graph.initializer if len(each.dims) == 2 and each.data_type == 1}
        self.nodes: list[Any] = []
        # Names of weights that were replaced.
        self.replaced: set[str] = set()
        # Activations that are quantised already: several layers may share an input.
        self._quantised: set[str] = set()
        self._add("int8.axis", np.array([1], np.int64))
        self._add("int8.step", np.array(1 / 127, np.float32))
        self._add("int8.least", np.array(1e-12, np.float32))
        # ONNX Runtime's fastest CPU kernels multiply unsigned activations and signed weights.
        self._add("int8.middle", np.array(128, np.uint8))
        self._add("int8.zero", np.array(0, np.int8))

    def weights_of(self, node: Any) -> npt.NDArray[np.float32] | None:
        """The constant weights [inputs, outputs] of a product; None for another node."""
        if node.op_type != "MatMul" or node.input[1] not in self._weights:
            return None
        weights: npt.NDArray[np.float32] = numpy_helper.to_array(self._weights[node.input[1]])
        return weights

    def replace(self, node: Any, weights: npt.NDArray[np.float32]) -> None:
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
        self.replaced.add(node.input[1])

    def _quantise(self, x: str, width: int) -> None:
        """Write the rows of x in 8 bits, with 128 as zero and a scale for each row."""
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
        self._graph.initializer.append(numpy_helper.from_array(array, name))

    def _node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> None:
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))

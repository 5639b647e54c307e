"""Small ONNX graphs, made by hand: any number of rows, and where they are asked to be, of any width."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FEATURES = 8


def weights(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((FEATURES, FEATURES)).astype(np.float32)


def save_graph(graph: onnx.GraphProto, path: Path) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


def save(
    folder: Path, *, precision: str = "fp32", seed: int = 0, dims: tuple[int | str, ...] = ("rows", "width")
) -> Path:
    """y = relu(x @ w) over the last dimension, of FEATURES: in float32 outside, and inside at the precision."""
    nodes, tensors = [], [numpy_helper.from_array(weights(seed), "w")]
    x, w = "x", "w"
    if precision == "fp16":
        nodes += [helper.make_node("Cast", [name], [f"{name}16"], to=TensorProto.FLOAT16) for name in ("x", "w")]
        x, w = "x16", "w16"
    elif precision == "int8":
        for name, scale in (("x", 0.02), ("w", 0.03)):
            tensors += [
                numpy_helper.from_array(np.array(scale, np.float32), f"{name}_scale"),
                numpy_helper.from_array(np.array(0, np.int8), f"{name}_zero"),
            ]
            rule = [f"{name}_scale", f"{name}_zero"]
            nodes += [
                helper.make_node("QuantizeLinear", [name, *rule], [f"{name}_q"]),
                helper.make_node("DequantizeLinear", [f"{name}_q", *rule], [f"{name}_dq"]),
            ]
        x, w = "x_dq", "w_dq"
    nodes += [
        helper.make_node("MatMul", [x, w], ["product"]),
        helper.make_node("Cast", ["product"], ["sum"], to=TensorProto.FLOAT),
        helper.make_node("Relu", ["sum"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [*dims, FEATURES]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "small", values[:1], values[1:], tensors)
    return save_graph(graph, folder / "model.onnx")


def save_double(folder: Path) -> Path:
    """y = 2 * x, float32 [rows, width]."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", "width"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "double", values[:1], values[1:])
    return save_graph(graph, folder / "double.onnx")


def save_classifier(folder: Path, *, rows: int | str = "rows") -> Path:
    """y = scores of 5 classes for pictures x, float32 [rows, 3, 8, 8]: two convolutions, their means, and a product."""
    random = np.random.default_rng(0)
    shapes = {"w1": (32, 3, 3, 3), "w2": (32, 32, 3, 3), "w3": (32, 5)}
    tensors = [
        numpy_helper.from_array(random.standard_normal(shape).astype(np.float32) / 4, name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="first_relu"),
        helper.make_node("Conv", ["b", "w2"], ["c"], name="second", strides=[2, 2]),
        helper.make_node("Relu", ["c"], ["d"], name="second_relu"),
        helper.make_node("GlobalAveragePool", ["d"], ["e"], name="mean"),
        helper.make_node("Flatten", ["e"], ["f"], name="flat"),
        helper.make_node("MatMul", ["f", "w3"], ["y"], name="product"),
    ]
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, 3, 8, 8]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, 5]),
    ]
    graph = helper.make_graph(nodes, "classifier", values[:1], values[1:], tensors)
    return save_graph(graph, folder / "model.onnx")

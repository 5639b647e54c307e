"""Builds a TensorRT plan from an ONNX graph, in a subprocess, and keeps it in the artifact cache.

Networks are strongly typed: each operation computes in the types of the graph. So the precision is the graph's (cast to
16 bits, or with quantise and dequantise operations), and a graph without it is rejected. Only TF32 is a builder flag.

A plan depends on its profiles, the GPU, and the library's version: all are in its key. The builder may take minutes and
much memory, or crash, so it runs at low priority in a subprocess.
"""

import hashlib
import importlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.artifacts import Artifact, Artifacts
from multigpu_worker.engines.common.subprocess_call import subprocess_call
from multigpu_worker.engines.tensorrt.module import Gpu, TensorRT, family_of, is_out_of_memory, make_logger
from multigpu_worker.engines.tensorrt.profiles import Profile
from multigpu_worker.repository.files import file_hash
from multigpu_worker.repository.folders import ModelFolderError

KIND = "tensorrt-plan"
PLAN_FILE = "model.plan"
# Raise it when this module builds other plans than before.
RECIPE = 2
NICENESS = 10
# Scratch memory of a kernel. Without a limit the builder tries kernels that need all of the GPU's memory, which the
# engine that serves meanwhile uses.
WORKSPACE_BYTES = 2 << 30
# By precision, a type that at least one tensor of the graph must have.
TYPES_OF_PRECISION = {"fp16": "HALF", "bf16": "BF16", "int8": "INT8", "fp8": "FP8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrder:
    """What a plan is made from, and for."""

    # The ONNX file. Other files of its folder may belong to it (external weights), and are in the key too.
    graph: Path
    precision: str
    profiles: list[Profile]
    library: TensorRT
    # None: any GPU that the library knows; only TensorRT for RTX can build that.
    gpu: Gpu | None
    # The accuracy gate's description of the graph. Empty: no gate.
    accuracy: str = ""


def plan_key(order: PlanOrder) -> dict[str, str]:
    """The key of a plan in the cache: everything that it depends on."""
    gpu = "any" if order.gpu is None else f"{order.gpu.name} {order.gpu.capability[0]}.{order.gpu.capability[1]}"
    return {
        "graph": hash_folder(order.graph),
        "library": f"{order.library.module} {order.library.version}",
        "gpu": gpu,
        "precision": order.precision,
        "profiles": json.dumps(order.profiles, sort_keys=True),
        "accuracy": order.accuracy,
        "recipe": str(RECIPE),
    }


def get_plan(order: PlanOrder, artifacts: Artifacts) -> Artifact:
    """Return the plan from the cache, or build it. Raises ModelFolderError, MemoryError, OSError."""
    if order.gpu is None and order.library.needs_gpu_to_build:
        raise ModelFolderError(
            f"{order.library.module} builds plans on a GPU only: build where there is one, or install multigpu[rtx]"
        )
    return artifacts.get(KIND, plan_key(order), lambda folder: _build(order, folder))


def artifacts_of(settings: EngineSettings) -> Artifacts:
    """The cache that the worker is configured to use. Raises ModelFolderError if there is none."""
    if not settings.artifacts:
        raise ModelFolderError("plans need a folder to be kept in: set artifacts_dir")
    return Artifacts(Path(settings.artifacts), settings.artifacts_bytes_max)


def hash_folder(graph: Path) -> str:
    """SHA-256 of a graph's name and of the names and contents of all files in its folder."""
    files = sorted(path for path in graph.parent.rglob("*") if path.is_file())
    lines = [graph.name, *(f"{path.relative_to(graph.parent).as_posix()} {file_hash(path)}" for path in files)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _build(order: PlanOrder, folder: Path) -> Mapping[str, str]:
    arguments = {
        "graph": str(order.graph),
        "plan": str(folder / PLAN_FILE),
        "precision": order.precision,
        "profiles": order.profiles,
        "module": order.library.module,
        "capability": None if order.gpu is None else list(order.gpu.capability),
    }
    facts: dict[str, str] = subprocess_call(
        f"{__name__}:build", arguments, niceness=NICENESS, gpu=order.gpu is not None
    )
    return facts | ({"accuracy": order.accuracy} if order.accuracy else {})


def build(
    *, graph: str, plan: str, precision: str, profiles: list[Profile], module: str, capability: list[int] | None
) -> dict[str, str]:
    """Build a plan, in the subprocess, and write it. Returns facts. Raises ModelFolderError, MemoryError."""
    began_s = time.monotonic()
    trt = importlib.import_module(module)
    logger = make_logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(graph):
        problems = [parser.get_error(i).desc() for i in range(parser.num_errors)] or [logger.take()]
        raise ModelFolderError(f"{module} can't read {graph}: {'; '.join(problems[:5])}")
    _check_types(trt, network, precision, graph)
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
    set_tf32: Callable[[Any], None] = config.set_flag if precision == "tf32" else config.clear_flag
    set_tf32(trt.BuilderFlag.TF32)
    # TensorRT builds for the GPU that it runs on, TensorRT for RTX for families of GPUs.
    if trt.__name__ == "tensorrt_rtx" and capability is not None:
        config.num_compute_capabilities = 1
        if not config.set_compute_capability(family_of(trt, (capability[0], capability[1])), 0):
            raise ModelFolderError(f"{trt.__name__} cannot build for compute capability {capability}")
    profiles_added = _add_profiles(builder, config, network, profiles)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        message = logger.take()
        if is_out_of_memory(message):
            raise MemoryError(
                f"{module} has no memory to build a plan for {graph}: {message}. A kernel may have "
                f"{WORKSPACE_BYTES >> 30} GiB of scratch: lower examples_max under [parameters], or for texts "
                "tasks_max and tokens_max under [batch]"
            )
        raise ModelFolderError(f"{module} can't build a plan for {graph}: {message}")
    Path(plan).write_bytes(serialized)
    return {
        "library": f"{module} {trt.__version__}",
        "plan bytes": str(serialized.nbytes),
        "build seconds": f"{time.monotonic() - began_s:.1f}",
        "profiles": str(profiles_added),
        "layers": str(network.num_layers),
    }


def _check_types(trt: Any, network: Any, precision: str, graph: str) -> None:
    wanted = TYPES_OF_PRECISION.get(precision)
    if wanted is None:
        return
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        for j in range(layer.num_outputs):
            if layer.get_output(j).dtype == getattr(trt.DataType, wanted):
                return
    raise ModelFolderError(
        f"{graph} computes nothing in {precision}, so a plan of it would be another precision: convert the graph first"
    )


def _add_profiles(builder: Any, config: Any, network: Any, profiles: list[Profile]) -> int:
    """Give each input with open dimensions its ranges: the first dimension is the rows, all others the width.

    Returns the number of profiles. Profiles that are equal for all inputs are added once.
    """
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    if not any(-1 in tuple(tensor.shape) for tensor in inputs):
        return 0
    added = []
    for ranges in profiles:
        shapes = {tensor.name: _shapes(tuple(tensor.shape), ranges) for tensor in inputs}
        if shapes in added:
            continue
        profile = builder.create_optimization_profile()
        for name, (least, best, most) in shapes.items():
            profile.set_shape(name, least, best, most)
        if config.add_optimization_profile(profile) < 0:
            raise ModelFolderError(f"the library rejected the profile {ranges}")
        added.append(shapes)
    return len(added)


def _shapes(shape: tuple[int, ...], ranges: Profile) -> list[tuple[int, ...]]:
    """The least, the tuned and the largest shape of an input."""
    return [
        tuple(
            size if size != -1 else ranges["rows" if axis == 0 else "width"][which] for axis, size in enumerate(shape)
        )
        for which in range(3)
    ]

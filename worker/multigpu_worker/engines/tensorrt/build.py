"""From an ONNX graph to a TensorRT plan, in a process of its own, kept in the cache of artifacts.

Networks are strongly typed: each operation computes in the types that the graph says. So a precision is a matter of the
graph (cast to 16 bits, or with explicit quantise and dequantise operations), and a graph that doesn't have it is
rejected, instead of being built at another. TF32 alone is the builder's choice.

A plan is tuned for shapes (profiles.py), for a GPU, and made by one version of one library: all that is in its key. The
builder runs at low priority, and may take minutes, memory without end, or itself down: its process is not the engine.
"""

import hashlib
import importlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.artifacts import Artifact, Artifacts
from multigpu_worker.engines.common.subprocess_call import run_apart
from multigpu_worker.engines.tensorrt.module import Gpu, TensorRT, family_of, make_logger
from multigpu_worker.engines.tensorrt.profiles import Profile
from multigpu_worker.models.folders import ModelFolderError

KIND = "tensorrt-plan"
PLAN_FILE = "model.plan"
# Raised when this file builds otherwise than before: plans made by another recipe are not taken for ours.
RECIPE = 2
NICENESS = 10
# What a kernel may use as scratch. Without a limit the builder tries some that need all of the GPU's memory, which
# belongs to the engine that serves meanwhile.
WORKSPACE_BYTES = 2 << 30
# The types of which at least one tensor must be, by precision: else the graph is not of that precision.
TYPES_OF_PRECISION = {"fp16": "HALF", "bf16": "BF16", "int8": "INT8", "fp8": "FP8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrder:
    """What a plan is made from, and for."""

    # The ONNX file. What else lies in its folder may belong to it (weights in files of their own), and is hashed too.
    graph: Path
    precision: str
    profiles: tuple[Profile, ...]
    library: TensorRT
    # None: any GPU of the families that the library knows, which only TensorRT for RTX can build for.
    gpu: Gpu | None
    # What the accuracy gate measured on this graph. Empty: there is no gate.
    accuracy: str = ""


def plan_key(order: PlanOrder) -> dict[str, str]:
    """The key of a plan in the cache: nothing that can make a difference is missing."""
    gpu = "any" if order.gpu is None else f"{order.gpu.name} {order.gpu.capability[0]}.{order.gpu.capability[1]}"
    return {
        "graph": hash_folder(order.graph),
        "library": f"{order.library.module} {order.library.version}",
        "gpu": gpu,
        "precision": order.precision,
        "profiles": json.dumps([profile.plain() for profile in order.profiles], sort_keys=True),
        "accuracy": order.accuracy,
        "recipe": str(RECIPE),
    }


def get_plan(order: PlanOrder, artifacts: Artifacts) -> Artifact:
    """The plan, from the cache or newly built. Raises ModelFolderError, MemoryError, OSError."""
    if order.gpu is None and order.library.needs_gpu_to_build:
        raise ModelFolderError(
            f"{order.library.module} builds plans on a GPU only: build where there is one, or install multigpu[rtx]"
        )
    key = plan_key(order)
    return artifacts.get(KIND, key, lambda folder: _build_apart(order, folder))


def artifacts_of(settings: EngineSettings) -> Artifacts:
    """The cache that this worker is set to use. Raises ModelFolderError: none."""
    if not settings.artifacts:
        raise ModelFolderError("plans need a folder to be kept in: set artifacts_dir")
    return Artifacts(Path(settings.artifacts), settings.artifacts_bytes_max)


def hash_folder(graph: Path) -> str:
    """SHA-256 of a graph's name and of all files in its folder, by their names."""
    lines = [graph.name]
    for path in sorted(path for path in graph.parent.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{path.relative_to(graph.parent).as_posix()} {digest}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _build_apart(order: PlanOrder, folder: Path) -> Mapping[str, str]:
    arguments = {
        "graph": str(order.graph),
        "plan": str(folder / PLAN_FILE),
        "precision": order.precision,
        "profiles": [profile.plain() for profile in order.profiles],
        "module": order.library.module,
        "capability": None if order.gpu is None else list(order.gpu.capability),
    }
    facts: dict[str, str] = run_apart(f"{__name__}:build", arguments, niceness=NICENESS, gpu=order.gpu is not None)
    return facts | ({"accuracy": order.accuracy} if order.accuracy else {})


# In the process of its own.


def build(
    *,
    graph: str,
    plan: str,
    precision: str,
    profiles: list[dict[str, list[int]]],
    module: str,
    capability: list[int] | None,
) -> dict[str, str]:
    """Build a plan and write it. Facts for people. Raises ModelFolderError."""
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
    if precision == "tf32":
        config.set_flag(trt.BuilderFlag.TF32)
    else:
        config.clear_flag(trt.BuilderFlag.TF32)
    _aim(trt, config, capability)
    profiles_added = _add_profiles(builder, config, network, profiles)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        words = logger.take()
        if "out of memory" in words.lower() or "OutOfMemory" in words:
            raise MemoryError(
                f"{module} has no memory to build a plan for {graph}: {words}. A kernel may have "
                f"{WORKSPACE_BYTES >> 30} GiB of scratch: lower examples_max under [parameters], or for texts "
                "tasks_max and tokens_max under [batch]"
            )
        raise ModelFolderError(f"{module} can't build a plan for {graph}: {words}")
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


def _aim(trt: Any, config: Any, capability: list[int] | None) -> None:
    """Say which GPUs the plan is for. TensorRT builds for the one that it runs on, TensorRT for RTX for families."""
    if trt.__name__ != "tensorrt_rtx" or capability is None:
        return
    config.num_compute_capabilities = 1
    if not config.set_compute_capability(family_of(trt, (capability[0], capability[1])), 0):
        raise ModelFolderError(f"{trt.__name__} cannot build for compute capability {capability}")


def _add_profiles(builder: Any, config: Any, network: Any, profiles: list[dict[str, list[int]]]) -> int:
    """Give each input with open dimensions its ranges: the first is the rows, all others the width.

    The answer is how many profiles there are: profiles that differ in what no input has are one.
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


def _shapes(shape: tuple[int, ...], ranges: dict[str, list[int]]) -> list[tuple[int, ...]]:
    """The least, the best and the largest shape of an input."""
    return [
        tuple(
            size if size != -1 else ranges["rows" if axis == 0 else "width"][which] for axis, size in enumerate(shape)
        )
        for which in range(3)
    ]

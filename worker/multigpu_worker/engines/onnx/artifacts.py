"""Exported and quantised graphs, from the artifact cache or made for it, for the engines onnx and tensorrt.

A key holds everything that the graph depends on: the content of the model's folder, precision and recipe, and the code
and the libraries that make it. The accuracy gate's figures are facts of the artifact, judged here at each load.
"""

from importlib import metadata
from pathlib import Path

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common import accuracy_gate as gate
from multigpu_worker.engines.common.artifacts import Artifact, Artifacts
from multigpu_worker.engines.common.precision import PrecisionError
from multigpu_worker.engines.common.versions import version_of
from multigpu_worker.engines.onnx.export import export_embed
from multigpu_worker.engines.onnx.quantize import quantise_embed, quantise_infer, recipe_of
from multigpu_worker.repository.content import ModelContent
from multigpu_worker.repository.files import file_hash, loaded_files
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import EXPORTED_SOURCES, ModelSpec
from multigpu_worker.repository.model_toml import FILE_NAME

PRECISIONS = ("fp32", "fp16", *gate.GATED)
EXPORT = "export"  # the kind of artifact
EXPORT_PACKAGES = ("multigpu", "torch", "transformers", "onnx", "onnxruntime", "onnxscript")
EXPORT_CODE = ("onnx/export.py", "embed/model.py", "embed/steps.py", "embed/text.py")
# Packages that write the graph, by recipe and engine. All other recipes: nvidia-modelopt.
QUANTISE_PACKAGES: dict[tuple[str, str], tuple[str, ...]] = {
    ("dynamic", "onnx"): ("onnx",),
    ("static", "onnx"): ("onnx", "onnxruntime"),
}
QUANTISE_CODE = ("onnx/quantize.py", "onnx/dynamic.py", "common/accuracy_gate.py", "onnx/session.py")


def exported(spec: ModelSpec, settings: EngineSettings, precision: str, engine: str = "onnx") -> Artifact:
    """An embedding model as MODEL_FILE and the files for TextInput.read, for "onnx" (with TOKENS) or "tensorrt".

    Facts: "dimension", "difference" (to torch); at int8 and fp8 also "recipe" and "accuracy". Raises ModelFolderError,
    AccuracyGateError among them; MemoryError, OSError; ImportError if a package is missing.
    """
    if precision not in PRECISIONS:
        raise PrecisionError(f"models are exported at {', '.join(PRECISIONS)}, not at {precision}")
    if spec.source not in EXPORTED_SOURCES:
        raise ModelFolderError(f"{spec.id} is of source {spec.source}, which has no export: run it with engine torch")
    artifacts = cache_of(settings, "exported models")
    key, content = export_key(spec, engine, "fp16" if precision == "fp16" else "fp32")

    def export(folder: Path) -> dict[str, str]:
        facts = export_embed(spec, folder, key["precision"], settings.threads, tokens=engine == "onnx")
        content.check()
        return facts

    if precision not in gate.GATED:
        return artifacts.get(EXPORT, key, export)
    gate.require(spec, precision)
    recipe = recipe_of(spec, precision, engine)
    gate_key = _gate_key(spec, precision, recipe, engine)
    source = artifacts.get(EXPORT, key, export)

    def quantise(folder: Path) -> dict[str, str]:
        figures = quantise_embed(spec, source.folder, folder, recipe, settings.threads)
        content.check()
        return source.facts | figures | {"recipe": recipe}

    artifact = artifacts.get(precision, key | gate_key, quantise)
    artifact.facts["accuracy"] = gate.judge(spec, precision, artifact.facts)
    return artifact


def quantised(spec: ModelSpec, settings: EngineSettings, precision: str, engine: str) -> Artifact:
    """An ONNX model of kind infer as MODEL_FILE at int8 or fp8. Facts and errors: as `exported`."""
    gate.require(spec, precision)
    recipe = recipe_of(spec, precision, engine)
    artifacts = cache_of(settings, "quantised models")
    # model.toml is left out: a new threshold needs no new graph. The data is in the gate's part of the key.
    others = {FILE_NAME, spec.gate.calibration, spec.gate.held_out}
    key = {f"file {name}": file_hash(spec.folder / name) for name in loaded_files(spec) if name not in others}

    def quantise(folder: Path) -> dict[str, str]:
        return quantise_infer(spec, folder, recipe, engine, settings.threads) | {"recipe": recipe}

    key |= {"file": spec.file, "engine": engine} | _gate_key(spec, precision, recipe, engine)
    artifact = artifacts.get(precision, key, quantise)
    artifact.facts["accuracy"] = gate.judge(spec, precision, artifact.facts)
    return artifact


def export_key(spec: ModelSpec, engine: str, precision: str) -> tuple[dict[str, str], ModelContent]:
    """What an export depends on, and the model's content. Raises ModelFolderError."""
    content = ModelContent.read(spec.folder)
    key = {"model": content.digest.hex(), "engine": engine, "precision": precision}
    return key | _versions(EXPORT_PACKAGES, EXPORT_CODE), content


def cache_of(settings: EngineSettings, what: str) -> Artifacts:
    """The artifact cache. Raises ModelFolderError if the worker has none for `what`."""
    if not settings.artifacts:
        raise ModelFolderError(f"{what} need a folder to be kept in: set artifacts_dir")
    return Artifacts(Path(settings.artifacts), settings.artifacts_bytes_max)


def _gate_key(spec: ModelSpec, precision: str, recipe: str, engine: str) -> dict[str, str]:
    """What a quantised graph and its figures depend on in addition to the fp32 graph."""
    packages = QUANTISE_PACKAGES.get((recipe, engine), ("nvidia-modelopt",))
    try:
        versions = _versions(packages, QUANTISE_CODE)
    except metadata.PackageNotFoundError as error:
        raise ModelFolderError(
            f"{spec.id} at {precision} by recipe {recipe} needs {error.name}: install multigpu[int8]"
        ) from error
    key = {"precision": precision, "recipe": recipe, **versions}
    key |= {name: getattr(spec.gate, name) for name in ("calibration", "held_out", "metric")}
    return key | {f"{name} content": file_hash(spec.folder / key[name]) for name in ("calibration", "held_out")}


def _versions(packages: tuple[str, ...], code: tuple[str, ...]) -> dict[str, str]:
    here = Path(__file__).parents[1]
    return {name: version_of(name) for name in packages} | {name: file_hash(here / name) for name in code}

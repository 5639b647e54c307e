"""Exported embedding models, from the cache of artifacts or made for it: what the engines onnx and tensorrt load.

An artifact's key holds everything that its graph depends on: the content of the model's folder, precision and recipe,
the code that exports, and the versions of the libraries that do. The gate's figures are among an artifact's facts, and
judged here whenever it is asked for.
"""

import hashlib
from importlib import metadata
from pathlib import Path

from multigpu.repository import ModelSpec

from multigpu_worker.engines import gate
from multigpu_worker.engines.artifacts import Artifact, Artifacts
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.embed_cache import ModelContent
from multigpu_worker.engines.models import ModelFolderError
from multigpu_worker.engines.onnx_export import export_embed
from multigpu_worker.engines.precision import PrecisionError
from multigpu_worker.engines.quantize import quantize_embed, recipe_of

PRECISIONS = ("fp32", "fp16", "int8")
# Of models that can be exported.
SOURCES = ("sentence-transformers", "huggingface")
EXPORT_PACKAGES = ("multigpu", "torch", "transformers", "onnx", "onnxruntime", "onnxscript")
EXPORT_CODE = ("onnx_export.py", "embed_model.py", "embed_steps.py", "embed_text.py")
QUANTISE_CODE = ("quantize.py", "gate.py", "onnx_session.py")


def exported(spec: ModelSpec, settings: EngineSettings, precision: str, engine: str = "onnx") -> Artifact:
    """The model as MODEL_FILE, and what TextInput.read needs, at one of PRECISIONS, for "onnx" or "tensorrt".

    Facts: "dimension", "difference" (to torch); at int8 also "recipe" and "accuracy". Raises ModelFolderError,
    GateRefusedError among them; MemoryError, OSError; ImportError: a package is missing.
    """
    if precision not in PRECISIONS:
        raise PrecisionError(f"models are exported at {', '.join(PRECISIONS)}, not at {precision}")
    if spec.source not in SOURCES:
        raise ModelFolderError(f"{spec.id} is of source {spec.source}, which has no export: run it with engine torch")
    if not settings.artifacts:
        raise ModelFolderError("exported models need a folder to be kept in: set artifacts_dir")
    artifacts = Artifacts(Path(settings.artifacts), settings.artifacts_bytes_max)
    content = ModelContent.read(spec.folder)
    key = {"model": content.digest.hex(), **_versions(EXPORT_PACKAGES, EXPORT_CODE)}

    def export(folder: Path) -> dict[str, str]:
        facts = export_embed(spec, folder, "fp16" if precision == "fp16" else "fp32", settings.threads)
        content.check()
        return facts

    if precision != "int8":
        return artifacts.get("export", key | {"precision": precision}, export)
    gate.require(spec, precision)
    recipe = recipe_of(spec, engine)
    source = artifacts.get("export", key | {"precision": "fp32"}, export)

    def quantise(folder: Path) -> dict[str, str]:
        figures = quantize_embed(spec, source.folder, folder, recipe, settings.threads)
        content.check()
        return source.facts | figures | {"recipe": recipe}

    key |= {"precision": precision, "recipe": recipe, **_versions(_quantise_packages(recipe), QUANTISE_CODE)}
    key |= {name: getattr(spec.gate, name) for name in ("calibration", "held_out", "metric")}
    key |= {f"{name} content": _hash_of(spec.folder / key[name]) for name in ("calibration", "held_out")}
    artifact = artifacts.get("int8", key, quantise)
    source.close()
    artifact.facts["accuracy"] = gate.judge(spec, precision, artifact.facts)
    return artifact


def _quantise_packages(recipe: str) -> tuple[str, ...]:
    return () if recipe == "dynamic" else ("nvidia-modelopt",)


def _versions(packages: tuple[str, ...], code: tuple[str, ...]) -> dict[str, str]:
    here = Path(__file__).parent
    return {name: metadata.version(name) for name in packages} | {name: _hash_of(here / name) for name in code}


def _hash_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ModelFolderError(f"{path} can't be read ({error}): {gate.REMEDY}") from error

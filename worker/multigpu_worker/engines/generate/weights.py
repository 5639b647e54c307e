"""Reads the weights and the tokenizer of a language model.

transformers dequantises GGUF files. That takes long, so the result is kept in the artifact cache.
"""

import importlib.metadata
from pathlib import Path
from typing import Any

import structlog
import torch

from multigpu_worker.engines.common.artifacts import Artifact, Artifacts
from multigpu_worker.engines.common.pretrained import LOCAL, load_weights, loading, transformers
from multigpu_worker.repository.files import digest
from multigpu_worker.repository.folders import check_model_folder
from multigpu_worker.repository.model import ModelSpec

log = structlog.get_logger(__name__)


def read_weights(
    spec: ModelSpec, artifacts: str, artifacts_bytes_max: int, dtype: torch.dtype, **placed: Any
) -> tuple[Any, Any, Artifact | None]:
    """The model on the CPU, its tokenizer, and the files of a dequantised model. `artifacts`: folder of the artifact
    cache; empty: none. `placed`: where its parts are, if it is divided. Raises ModelFolderError, MemoryError;
    ArtifactError while dequantising.
    """
    artifact = dequantised(spec, artifacts, artifacts_bytes_max, dtype)
    with loading(spec.folder, "AutoModelForCausalLM"):
        if artifact is not None:
            return *_from_folder(artifact.folder, dtype, **placed), artifact
        if spec.source == "gguf":
            return *_from_gguf(spec, dtype, **placed), None
        check_model_folder(spec.folder)
        return *_from_folder(spec.folder, dtype, **placed), None


def _from_folder(folder: Path, dtype: torch.dtype, **placed: Any) -> tuple[Any, Any]:
    kind = transformers.AutoModelForCausalLM
    model = load_weights(kind, folder, dtype=dtype, attn_implementation="sdpa", **placed)
    return model, transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)


def _from_gguf(spec: ModelSpec, dtype: torch.dtype, **placed: Any) -> tuple[Any, Any]:
    model = load_weights(
        transformers.AutoModelForCausalLM,
        spec.folder,
        pickled=True,  # the file is no safetensors file
        dtype=dtype,
        attn_implementation="sdpa",
        gguf_file=spec.file,
        **placed,
    )
    return model, transformers.AutoTokenizer.from_pretrained(spec.folder, gguf_file=spec.file, **LOCAL)


def dequantised(spec: ModelSpec, artifacts: str, artifacts_bytes_max: int, dtype: torch.dtype) -> Artifact | None:
    """The content of a GGUF file as a model folder of transformers, from the artifact cache. None: there is no such
    file, or no cache.
    """
    if spec.source != "gguf" or not artifacts:
        return None
    path = spec.folder / spec.file
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "gguf")}
    key = {"sha256": digest(spec), "dtype": str(dtype), **versions}

    def build(folder: Path) -> dict[str, str]:
        log.info("dequantising a GGUF file, which is done once", file=str(path))
        with loading(spec.folder, "AutoModelForCausalLM"):
            model, tokenizer = _from_gguf(spec, dtype)
        # transformers refuses to save a model that is marked as quantised.
        model.is_quantized = False
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {"file": spec.file}

    return Artifacts(Path(artifacts), artifacts_bytes_max).get("dequantised", key, build)

"""The model repository: what a model is, as its folder and its `model.toml` say.

A model is a folder of files, and a name that tasks ask for. The modules `repository_*` read such folders without any
library of models, so that the worker's agent and mgpuctl can use them; what loads models is the worker's engines.

The id of a model is its name, or "name:version" where the folder has versions.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("embed", "infer", "generate", "classify")
ENGINES = ("auto", "torch", "onnx", "tensorrt")
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16", "int8", "fp8")
# What a folder can hold.
SOURCES = (
    "sentence-transformers",
    "huggingface",
    "safetensors",
    "torch-export",
    "onnx",
    "tensorrt-plan",
    "gguf",
    "python",
)


class ModelFolderError(Exception):
    """A model's folder is missing, broken or of an unsupported form. The message says which, and the remedy."""

    # Another worker may have a sound copy.
    retryable = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """How tasks for a model are put together. 0 and (): as the worker's configuration says."""

    tasks_max: int = 0
    tokens_max: int = 0
    # How long a batch may wait to grow, in seconds; negative: as the worker's configuration says.
    delay_s: float = -1.0
    # Numbers of tasks that the model is fastest with: a batch that waits goes as soon as it has one of them.
    preferred: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What a model at a precision that rounds hard (int8, fp8) must prove before it may serve."""

    # A file to calibrate with, in the folder. For texts JSON lines {"text": …}; for kind infer arrays of examples by
    # the names of its inputs, as numpy.savez writes them. Empty: no such precision is served.
    calibration: str = ""
    # Held-out data to judge by: as above, or JSON lines {"a": …, "b": …, "score": …} for "spearman".
    held_out: str = ""
    # "cosine": the mean cosine to the answers of fp32; "spearman": of scores, in points of 100, against fp32's;
    # "agreement": the share of examples whose likeliest class is that of fp32.
    metric: str = "cosine"
    # The lowest mean cosine or share, or for "spearman" the most points that may be lost.
    threshold: float = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One version of one model: everything that the worker has to know before it loads it."""

    name: str
    # Absolute. Holds the files of this version.
    folder: Path
    # Empty: the folder has no versions.
    version: str = ""
    # The kind of task that it serves: one of KINDS.
    kind: str = "embed"
    # One of ENGINES, or "module:Class" for one of the user's own.
    engine: str = "auto"
    # One of SOURCES.
    source: str = "sentence-transformers"
    # The file that holds the model, in the folder, where the source is a single file (model.onnx, model.gguf …).
    file: str = ""
    precision: str = "auto"
    batch: BatchRules = BatchRules()
    # Run through the model once before it is called ready.
    warm_up: bool = True
    # Loaded copies on a worker.
    instances: int = 1
    # Tasks that one copy works on at the same time, for kinds that join running ones (generate). 0: its own choice.
    concurrency: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    # The engine's own settings.
    parameters: dict[str, str] = field(default_factory=dict)
    gate: Gate = Gate()
    # SHA-256 of files, in hex, by their path in the folder: what is loaded must have them.
    hashes: dict[str, str] = field(default_factory=dict)
    # Weight files in pickle's format, by path in the folder, that may be loaded though they can run any code.
    allow_pickle: tuple[str, ...] = ()
    # Bytes of the files that are loaded.
    files_bytes: int = 0
    # When the newest of them was changed, in nanoseconds since 1970: one that differs may hold another model.
    changed_ns: int = 0

    @property
    def id(self) -> str:
        """What it is called where versions matter."""
        return f"{self.name}:{self.version}" if self.version else self.name

    def plain(self) -> dict[str, Any]:
        """As plain values, such as marshal takes."""
        return dataclasses.asdict(self) | {"folder": str(self.folder)}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "ModelSpec":
        """What `plain` was made from."""
        rules, gate = BatchRules(**values["batch"]), Gate(**values["gate"])
        return cls(**values | {"folder": Path(values["folder"]), "batch": rules, "gate": gate})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What was found of models. One that is broken is an error here, and doesn't end the scan."""

    # By id. The versions of a model come oldest first. The name of the first model is the default.
    models: dict[str, ModelSpec] = field(default_factory=dict)
    # Why a model can't be served, by id, or by the name of its folder.
    errors: dict[str, str] = field(default_factory=dict)
    # The id that a name alone means.
    current: dict[str, str] = field(default_factory=dict)

"""The specification of a model, from its folder and its `model.toml`.

A model is a folder of files, and a name that tasks ask for. This package reads such folders without any model library,
for the worker's agent and mgpuctl; the worker's engines load the models.

The id of a model is its name, or "name:version" where the folder has versions.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multigpu.config.fields import setting
from multigpu.config.values import from_text

KINDS = ("embed", "infer", "generate", "classify", "rerank")
ENGINES = ("auto", "torch", "onnx", "tensorrt")
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16", "int8", "fp8")
# Formats of models.
SOURCES = (
    "sentence-transformers",
    "huggingface",
    "safetensors",
    "torch-export",
    "onnx",
    "tensorrt-plan",
    "gguf",
    "python",
    "remote",
)
# Of embedding models that can be exported as a graph.
EXPORTED_SOURCES = ("sentence-transformers", "huggingface")
# Which models may be larger than a device, and the strategies that divide them (docs/large-models.md).
DIVIDED_SOURCES = ("huggingface", "sentence-transformers", "gguf")
DIVIDED_KINDS = ("generate", "embed", "classify", "rerank")
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
# Where parts of a model may be beside its devices.
HOST_PLACES = ("cpu", "disk")
REMOTE = "remote"
VLLM = "vllm"
# Either of the two: the faster one, which a trial at load decides (engines/embed/fastest.py).
MEASURED = "torch or onnx"
BATCH_TASKS_MAX = 65_536


class ModelFolderError(Exception):
    """A model's folder is missing, broken or of an unsupported form. The message says which, and the remedy."""

    # Another worker may have an intact copy.
    retryable = True


def check_inside(name: str) -> str:
    """Returns `name`. Raises ValueError if it is not the relative path of a file in the model's folder."""
    parts = name.replace("\\", "/").split("/")
    if not name or "\0" in name or name.startswith(("/", "\\")) or ".." in parts or "" in parts or ":" in parts[0]:
        raise ValueError(f"{name!r} is no path of a file in the model's folder")
    return name


def _check_all_inside(names: Iterable[str]) -> None:
    for name in names:
        check_inside(name)


def _check_engine(value: str) -> None:
    module, colon, name = value.partition(":")
    own = colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))
    if value not in (*ENGINES, REMOTE, VLLM) and not own:
        raise ValueError(f'none of {", ".join((*ENGINES, REMOTE, VLLM))}, nor a class of your own: "module:Class"')


def _check_device_map(value: str) -> None:
    if not value or value in STRATEGIES:
        return
    if not value.endswith(".json"):
        raise ValueError(f"{value!r} is none of {', '.join(STRATEGIES)}, nor the name of a JSON file")
    check_inside(value)


def _check_limits(limits: dict[str, str]) -> None:
    for place, size in limits.items():
        if not (place.isdecimal() or place in HOST_PLACES):
            raise ValueError(f"{place!r} is neither the index of a device nor {' or '.join(HOST_PLACES)}")
        from_text(size, int, "size_bytes")


def _check_sizes(sizes: Iterable[int]) -> None:
    if not all(1 <= size <= BATCH_TASKS_MAX for size in sizes):
        raise ValueError(f"a number of tasks is from 1 to {BATCH_TASKS_MAX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """How tasks for a model are batched. 0 and a negative delay mean the value in the worker's configuration."""

    tasks_max: int = setting(0, minimum=1, maximum=BATCH_TASKS_MAX)
    tokens_max: int = setting(0, minimum=1, maximum=1 << 40)
    # How long a batch may wait to grow, in seconds.
    delay_s: float = setting(-1.0, minimum=0, maximum=10)
    # The most efficient numbers of tasks: a waiting batch is dispatched as soon as it has one of them.
    preferred: tuple[int, ...] = setting((), check=_check_sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The accuracy test that a model must pass to be served at a low precision (int8, fp8)."""

    # A file of calibration data, in the folder. For texts JSON lines {"text": …}; for kind infer arrays of examples by
    # the names of its inputs, as numpy.savez writes them. Empty: no such precision is served.
    calibration: str = setting("", check=check_inside)
    # Held-out test data: as above, or JSON lines {"a": …, "b": …, "score": …} for "spearman".
    held_out: str = setting("", check=check_inside)
    # "cosine": the mean cosine to the answers of fp32; "spearman": the rank correlation with the scores, in points of
    # 100, compared with fp32's; "agreement": the share of examples whose most likely class is the same as with fp32.
    metric: str = setting("cosine", choices=("cosine", "spearman", "agreement"))
    # The lowest mean cosine or share, or for "spearman" the most points that may be lost.
    threshold: float = setting(0.99, minimum=0, maximum=100)


def _check_url(value: str) -> None:
    if value and not value.startswith(("http://", "https://")):
        raise ValueError("not a URL: write http://HOST:PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """The server that runs a model of the engine `remote`."""

    url: str = setting("", check=_check_url)
    api: str = setting("openai", choices=("openai", "tei", "kserve"))
    # The model's name on the server. Empty: the same as here.
    model: str = setting("")
    # A file with the token that the server asks for.
    token_file: str = setting("")
    # How long the server may be silent, in seconds.
    timeout_s: float = setting(300.0, minimum=0.1, maximum=86_400)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One version of one model: everything that the worker has to know before it loads it.

    The fields made by `setting` are the keys of a model.toml, which also has `versions`.
    """

    name: str
    # Absolute. Holds the files of this version.
    folder: Path
    # Empty: the folder has no versions.
    version: str = ""
    # The kind of task that the model serves.
    kind: str = setting("embed", choices=KINDS)
    source: str = setting("sentence-transformers", choices=SOURCES)
    # The file that holds the model, in the folder, where the source is a single file (model.onnx, model.gguf …).
    file: str = setting("", check=check_inside)
    # One of ENGINES, REMOTE, VLLM, or "module:Class" for an engine of the user. MEASURED is what "auto" may become.
    engine: str = setting("auto", check=_check_engine)
    precision: str = setting("auto", choices=PRECISIONS)
    # Run the model once before it counts as ready.
    warm_up: bool = setting(True)
    # The number of loaded copies on a worker.
    instances: int = setting(1, minimum=1, maximum=64)
    # The number of tasks that one copy runs at the same time, for kinds whose tasks can join a running batch (generate)
    # and for the engine `remote`. 0: the worker's default for the engine.
    concurrency: int = setting(0, minimum=0, maximum=1024)
    # For kind generate: the number of processes that share each layer, and of stages of consecutive layers. Each
    # process has a device of the worker, or all share the processor.
    tensor_parallel: int = setting(1, minimum=1, maximum=64)
    pipeline: int = setting(1, minimum=1, maximum=64)
    # One of STRATEGIES, or a JSON file in the folder with a device map: the model is divided among the worker's
    # devices, and parts that do not fit there are on the host or its disk. Empty: one device has all of the model.
    device_map: str = setting("", check=_check_device_map)
    # How many of the worker's devices a device_map uses. 0: all.
    devices: int = setting(0, minimum=0, maximum=64)
    # Limits of devices, by index, and of "cpu" and "disk", as "20GiB".
    max_memory: dict[str, str] = setting(dict, check=_check_limits)
    labels: dict[str, str] = setting(dict)
    # The engine's own settings.
    parameters: dict[str, str] = setting(dict)
    # LoRA adapters that tasks may name, for the engine `vllm`: a name, and the folder in the model's folder.
    adapters: dict[str, str] = setting(dict, check=lambda folders: _check_all_inside(folders.values()))
    # Weight files in pickle's format, by path in the folder, that may be loaded though they can run any code.
    allow_pickle: tuple[str, ...] = setting((), check=_check_all_inside)
    batch: BatchRules = setting(BatchRules())
    gate: Gate = setting(Gate())
    remote: Remote = setting(Remote())
    # Bytes of the files that are loaded.
    files_bytes: int = 0
    # When the newest of them was changed, in nanoseconds since 1970. Another time may mean another model.
    changed_ns: int = 0

    @property
    def id(self) -> str:
        """The name, with the version if there are versions."""
        return f"{self.name}:{self.version}" if self.version else self.name

    @property
    def ranks(self) -> int:
        """The number of processes that share the model."""
        return self.tensor_parallel * self.pipeline

    def plain(self) -> dict[str, Any]:
        """As plain values, such as marshal takes."""
        return dataclasses.asdict(self) | {"folder": str(self.folder)}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "ModelSpec":
        """The inverse of `plain`."""
        parts = {"batch": BatchRules, "gate": Gate, "remote": Remote}
        read = {name: part(**values[name]) for name, part in parts.items()}
        return cls(**values | {"folder": Path(values["folder"])} | read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The models of a repository. A broken model is an entry of `errors`, and doesn't end the scan."""

    # By id. The versions of a model come oldest first. The name of the first model is the default.
    models: dict[str, ModelSpec] = field(default_factory=dict)
    # Why a model can't be served, by id, or by the name of its folder.
    errors: dict[str, str] = field(default_factory=dict)
    # By name: the id of the version that the name alone stands for.
    current: dict[str, str] = field(default_factory=dict)
    # Names of folders that can't be read. Each may be a namespace whose models are still there.
    unreadable: frozenset[str] = frozenset()

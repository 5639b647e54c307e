"""The variables by which embedding services on several GPUs were configured before: a worker takes them as settings.

They are weaker than everything that multigpu calls its own: a value of the file, of an MGPU_ variable or of a flag
wins. What has no place here is said in a remark, for the log, and never dropped in silence; what contradicts itself is
an error. The table of docs/configuration.md is made from WORKER_NAMES.

The variables that the deploy script reads (GPU_COUNT …) are not among these: they choose services, not settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

# What the cache held when nobody said how much.
CACHE_ENTRIES = 10_000

# The variable, its meaning there, and what it becomes here: settings of [worker], or words.
WORKER_NAMES = (
    ("EMBEDDING_MODEL", "Name or folder of the model.", "worker.default_model", "a folder is served as well"),
    ("EMBEDDING_BATCH_SIZE", "Texts in a batch.", "worker.batch_tasks_max"),
    (
        "EMBEDDING_CACHE_ENABLED",
        "Whether vectors are remembered.",
        "worker.embedding_cache_entries",
        "`true`: EMBEDDING_CACHE_SIZE, or 10000; `false`: 0",
    ),
    ("EMBEDDING_CACHE_SIZE", "How many.", "worker.embedding_cache_entries"),
    ("EMBEDDING_CACHE_TTL", "For how many seconds.", "worker.embedding_cache_ttl_s"),
    ("EMBEDDING_CACHE_PERSISTENCE", "File that keeps them.", "worker.embedding_cache_file"),
    ("USE_TENSORRT", "Whether TensorRT runs the model.", "worker.engine", "`true`: tensorrt, `false`: auto"),
    (
        "TENSORRT_PRECISION",
        "auto, fp32, fp16 or int8, of TensorRT.",
        "worker.precision",
        "only with USE_TENSORRT=true, as before",
    ),
    ("TENSORRT_CACHE_DIR", "Folder of engines that were built.", "worker.artifacts_dir"),
    (
        "TENSORRT_INT8_CALIBRATION",
        "Whether int8 is calibrated.",
        "a remark in the log: int8 is always calibrated, with the data that a model's `[gate]` names (models.md)",
    ),
    (
        "TENSORRT_INT8_CALIBRATION_CACHE",
        "File of calibrations.",
        "a remark in the log: they are kept in `artifacts_dir`",
    ),
    (
        "ENABLE_TENSOR_CORES",
        "Whether to use Tensor Cores.",
        "worker.precision",
        "`false`: fp32; `true`: auto, which uses them where there are any",
    ),
    (
        "ENABLE_DYNAMIC_BATCHING",
        "Whether batches adjust themselves to the memory.",
        "nothing for `true`: they always do; for `false` a remark in the log",
    ),
)
_TRUTHS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class OldNameError(ValueError):
    """A variable has no meaning, or two contradict each other. The message names them."""


@dataclass(slots=True)
class OldValues:
    """What the variables say: (text, variable) by the field of WorkerConfig, and remarks for the log."""

    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def worker_values(env: Mapping[str, str]) -> OldValues:
    """What a worker takes from the environment. Empty variables count as not set. Raises OldNameError."""
    old = OldValues()
    for variable, name in (
        ("EMBEDDING_MODEL", "default_model"),
        ("EMBEDDING_BATCH_SIZE", "batch_tasks_max"),
        ("EMBEDDING_CACHE_TTL", "embedding_cache_ttl_s"),
        ("EMBEDDING_CACHE_PERSISTENCE", "embedding_cache_file"),
        ("TENSORRT_CACHE_DIR", "artifacts_dir"),
    ):
        if env.get(variable):
            old.values[name] = env[variable], variable
    _model(env, old)
    _cache(env, old)
    _engine(env, old)
    if env.get("TENSORRT_INT8_CALIBRATION"):
        _truth(env, "TENSORRT_INT8_CALIBRATION")
        old.remarks.append(
            "TENSORRT_INT8_CALIBRATION has no effect: int8 is always calibrated, with the data that [gate] in the "
            "model's model.toml names"
        )
    if env.get("TENSORRT_INT8_CALIBRATION_CACHE"):
        old.remarks.append("TENSORRT_INT8_CALIBRATION_CACHE has no effect: calibrations are kept in artifacts_dir")
    if _truth(env, "ENABLE_DYNAMIC_BATCHING") is False:
        old.remarks.append(
            "ENABLE_DYNAMIC_BATCHING=false has no effect: batches are always made of what waits, up to "
            "batch_tasks_max; for batches of one task set batch_tasks_max to 1"
        )
    return old


def _model(env: Mapping[str, str], old: OldValues) -> None:
    model = env.get("EMBEDDING_MODEL", "").rstrip("/")
    if model.startswith(("/", "./", "../", "~")):
        name = model.rpartition("/")[2]
        old.values["models"] = f"{name}={model}", "EMBEDDING_MODEL"
        old.values["default_model"] = name, "EMBEDDING_MODEL"


def _cache(env: Mapping[str, str], old: OldValues) -> None:
    enabled = _truth(env, "EMBEDDING_CACHE_ENABLED")
    size = env.get("EMBEDDING_CACHE_SIZE", "")
    if enabled is False:
        old.values["embedding_cache_entries"] = "0", "EMBEDDING_CACHE_ENABLED"
    elif size:
        old.values["embedding_cache_entries"] = size, "EMBEDDING_CACHE_SIZE"
    elif enabled or env.get("EMBEDDING_CACHE_TTL") or env.get("EMBEDDING_CACHE_PERSISTENCE"):
        # There the cache was on unless somebody said no.
        variable = "EMBEDDING_CACHE_ENABLED" if enabled else "EMBEDDING_CACHE_TTL"
        if variable not in env:
            variable = "EMBEDDING_CACHE_PERSISTENCE"
        old.values["embedding_cache_entries"] = str(CACHE_ENTRIES), variable


def _engine(env: Mapping[str, str], old: OldValues) -> None:
    tensorrt, cores = _truth(env, "USE_TENSORRT"), _truth(env, "ENABLE_TENSOR_CORES")
    precision = env.get("TENSORRT_PRECISION", "").lower()
    if tensorrt is not None:
        old.values["engine"] = "tensorrt" if tensorrt else "auto", "USE_TENSORRT"
    if precision and tensorrt:
        old.values["precision"] = precision, "TENSORRT_PRECISION"
    elif precision:
        old.remarks.append("TENSORRT_PRECISION has no effect without USE_TENSORRT=true")
    if cores is False:
        if tensorrt and precision not in ("", "auto", "fp32"):
            raise OldNameError(
                f"ENABLE_TENSOR_CORES=false and TENSORRT_PRECISION={precision} contradict each other: "
                f"{precision} runs on Tensor Cores; set one of them, or MGPU_WORKER_PRECISION"
            )
        old.values["precision"] = "fp32", "ENABLE_TENSOR_CORES"


def _truth(env: Mapping[str, str], variable: str) -> bool | None:
    """None: not set."""
    text = env.get(variable, "").strip().lower()
    if not text:
        return None
    if text not in _TRUTHS:
        raise OldNameError(f"{variable}: {env[variable]!r} is not a yes or no: write true or false")
    return _TRUTHS[text]

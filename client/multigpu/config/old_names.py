"""Environment variables of earlier embedding services for several GPUs, which a worker accepts as settings.

They have the lowest precedence: a value of the file, of an MGPU_ variable or of a flag wins. A variable that has no
effect yields a remark for the log; two that contradict each other are an error. The table of docs/configuration.md is
generated from WORKER_NAMES. The deploy script's variables (GPU_COUNT …) choose services, not settings: they are not
here.
"""

from collections.abc import Iterator, Mapping

from multigpu.config.values import boolean
from multigpu.errors import ConfigError

# The size of an enabled cache without EMBEDDING_CACHE_SIZE.
CACHE_ENTRIES = 10_000
ENTRIES = "worker.embedding_cache_entries"

# For each variable: its name, its meaning in those services, the equivalent setting of [worker] (or a sentence if there
# is none), and how its text is converted. Without a conversion, the setting takes the text unchanged.
WORKER_NAMES = (
    ("EMBEDDING_MODEL", "Name or folder of the model.", "worker.default_model", "a folder is served as well"),
    ("EMBEDDING_BATCH_SIZE", "Texts in a batch.", "worker.batch_tasks_max"),
    (
        "EMBEDDING_CACHE_ENABLED",
        "Whether vectors are cached.",
        ENTRIES,
        "`true`: EMBEDDING_CACHE_SIZE, or 10000; `false`: 0",
    ),
    ("EMBEDDING_CACHE_SIZE", "How many.", ENTRIES),
    ("EMBEDDING_CACHE_TTL", "For how many seconds.", "worker.embedding_cache_ttl_s"),
    ("EMBEDDING_CACHE_PERSISTENCE", "File that keeps them.", "worker.embedding_cache_file"),
    ("USE_TENSORRT", "Whether TensorRT runs the model.", "worker.engine", "`true`: tensorrt, `false`: auto"),
    ("TENSORRT_PRECISION", "auto, fp32, fp16 or int8.", "worker.precision", "only with USE_TENSORRT=true"),
    ("TENSORRT_CACHE_DIR", "Folder of engines that were built.", "worker.artifacts_dir"),
    ("TENSORRT_INT8_CALIBRATION", "Whether int8 is calibrated.", "nothing: it always is, with data of `[gate]`"),
    ("TENSORRT_INT8_CALIBRATION_CACHE", "File of calibrations.", "nothing: they are kept in `artifacts_dir`"),
    ("ENABLE_TENSOR_CORES", "Whether to use Tensor Cores.", "worker.precision", "`false`: fp32; `true`: auto"),
    ("ENABLE_DYNAMIC_BATCHING", "Whether batches adapt to the memory.", "nothing: they always do"),
)


def worker_values(env: Mapping[str, str]) -> tuple[dict[str, tuple[str, str]], tuple[str, ...]]:
    """A worker's settings from these variables: (text, variable) by setting, and remarks for the log. Empty variables
    count as not set. Raises ConfigError.
    """
    values = {
        target.removeprefix("worker."): (env[variable], variable)
        for variable, _, target, *special in WORKER_NAMES
        if target.startswith("worker.") and not special and env.get(variable)
    }
    values |= _model(env)
    if _truth(env, "EMBEDDING_CACHE_ENABLED") is False:
        values["embedding_cache_entries"] = "0", "EMBEDDING_CACHE_ENABLED"
    for variable in ("EMBEDDING_CACHE_ENABLED", "EMBEDDING_CACHE_TTL", "EMBEDDING_CACHE_PERSISTENCE"):
        if env.get(variable):  # each of these enables the cache unless it is disabled
            values.setdefault("embedding_cache_entries", (str(CACHE_ENTRIES), variable))
    values |= _engine(env)
    return values, tuple(_remarks(env))


def _model(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    variable = "EMBEDDING_MODEL"
    model = env.get(variable, "").rstrip("/")
    if not model.startswith(("/", "./", "../", "~")):
        return {"default_model": (env[variable], variable)} if model else {}
    name = model.rpartition("/")[2]
    return {"default_model": (name, variable), "models": (f"{name}={model}", variable)}


def _engine(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    values = {}
    tensorrt, precision = _truth(env, "USE_TENSORRT"), env.get("TENSORRT_PRECISION", "").lower()
    if tensorrt is not None:
        values["engine"] = "tensorrt" if tensorrt else "auto", "USE_TENSORRT"
    if precision and tensorrt:
        values["precision"] = precision, "TENSORRT_PRECISION"
    if _truth(env, "ENABLE_TENSOR_CORES") is False:
        if tensorrt and precision not in ("", "auto", "fp32"):
            raise ConfigError(
                f"ENABLE_TENSOR_CORES=false and TENSORRT_PRECISION={precision} contradict each other: "
                f"{precision} runs on Tensor Cores; set one of them, or MGPU_WORKER_PRECISION"
            )
        values["precision"] = "fp32", "ENABLE_TENSOR_CORES"
    return values


def _remarks(env: Mapping[str, str]) -> Iterator[str]:
    if env.get("TENSORRT_PRECISION") and not _truth(env, "USE_TENSORRT"):
        yield "TENSORRT_PRECISION has no effect without USE_TENSORRT=true"
    if _truth(env, "TENSORRT_INT8_CALIBRATION") is not None:
        yield "TENSORRT_INT8_CALIBRATION has no effect: int8 is always calibrated, with data of [gate] in a model.toml"
    if env.get("TENSORRT_INT8_CALIBRATION_CACHE"):
        yield "TENSORRT_INT8_CALIBRATION_CACHE has no effect: calibrations are kept in artifacts_dir"
    if _truth(env, "ENABLE_DYNAMIC_BATCHING") is False:
        yield "ENABLE_DYNAMIC_BATCHING=false has no effect: for batches of one task set batch_tasks_max to 1"


def _truth(env: Mapping[str, str], variable: str) -> bool | None:
    """None: not set."""
    text = env.get(variable, "").strip()
    try:
        return boolean(text) if text else None
    except ValueError as error:
        raise ConfigError(f"{variable}: {error}") from error

"""Finds TensorRT, and checks that it works on the device.

TensorRT and TensorRT for RTX are two Python modules with one API. TensorRT builds plans for the GPU that is there;
TensorRT for RTX also builds them without one, for a family of GPUs. Both run plans only with NVIDIA's driver, and may
crash without it. So the driver is asked first, and the runtime is then tried in a subprocess.
"""

import ctypes
import importlib
import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from multigpu_worker.engines.common.precision import compute_capability
from multigpu_worker.repository.folders import ModelFolderError

# In order of preference: the first supports every data centre GPU.
MODULES = ("tensorrt", "tensorrt_rtx")
# The first versions with strongly typed networks, and device memory that is passed with its size.
VERSION_MIN = {"tensorrt": (10, 1), "tensorrt_rtx": (1, 4)}
PROBE_TIMEOUT_S = 120.0
DEVICE_NAME_BYTES = 256

log = structlog.get_logger(__name__)


class EngineUnavailableError(ModelFolderError):
    """The engine cannot work on this worker. The message says why, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRT:
    """An installed module."""

    module: str
    version: str

    @property
    def needs_gpu_to_build(self) -> bool:
        return self.module == "tensorrt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The properties of a GPU that plans depend on."""

    name: str
    capability: tuple[int, int]


def installed() -> TensorRT:
    """The module to use. Raises EngineUnavailableError."""
    problems = []
    for name in MODULES:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            version = str(importlib.import_module(name).__version__)
        except (ImportError, OSError, AttributeError) as error:
            problems.append(f"{name} is installed, and can't be imported: {error}")
            continue
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) >= VERSION_MIN[name]:
            return TensorRT(module=name, version=version)
        problems.append(f"{name} {version} is too old: at least {'.'.join(map(str, VERSION_MIN[name]))}")
    raise EngineUnavailableError(
        "the engine tensorrt needs a module that isn't there: install multigpu[gpu] for TensorRT, or multigpu[rtx] for "
        "TensorRT for RTX; or use engine torch or onnx" + "".join(f"; {problem}" for problem in problems)
    )


def require(device: str) -> tuple[TensorRT, Gpu]:
    """The module and the GPU, after a subprocess has created a runtime. Raises EngineUnavailableError."""
    if device == "cpu":
        raise EngineUnavailableError(
            "the engine tensorrt runs on a GPU, and this worker's device is the CPU: use engine torch or onnx here"
        )
    module = installed()
    command = [sys.executable, "-m", __name__, module.module, device]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        answer = {"error": f"it said nothing for {PROBE_TIMEOUT_S:.0f} s"}
    except (ValueError, IndexError):
        end = done.stderr.strip()[-500:]
        answer = {"error": f"the process that tried it died with exit status {done.returncode}: {end}"}
    if "error" in answer:
        raise EngineUnavailableError(
            f"{module.module} {module.version} can't work on {device}: {answer['error']}. Install a driver that it "
            "supports (CUDA 13 needs 580 or later; see mgpuctl doctor), or use engine torch or onnx"
        )
    gpu = Gpu(name=answer["name"], capability=tuple(answer["capability"]))
    log.info("tensorrt can be used", module=module.module, version=module.version, gpu=gpu.name)
    return module, gpu


def family_of(module: Any, capability: tuple[int, int]) -> Any:
    """TensorRT for RTX's constant for a compute capability. Raises EngineUnavailableError if it has none."""
    family = getattr(module.ComputeCapability, f"SM{capability[0]}{capability[1]}", None)
    if family is None:
        known = ", ".join(name for name in dir(module.ComputeCapability) if name.startswith("SM"))
        raise EngineUnavailableError(
            f"{module.__name__} {module.__version__} makes no plans for GPUs of compute capability "
            f"{capability[0]}.{capability[1]} (it knows {known}): install multigpu[gpu], or use engine torch"
        )
    return family


def is_out_of_memory(message: str) -> bool:
    """Whether a message of the library says that memory ran out."""
    return "out of memory" in message.lower() or "OutOfMemory" in message


def make_logger(module: Any) -> Any:
    """A logger for the library that also keeps its errors: a failed call only returns False or None."""

    class Logger(module.ILogger):  # type: ignore[misc]  # a class of whichever module is there
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.problems: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            if severity in {module.ILogger.Severity.ERROR, module.ILogger.Severity.INTERNAL_ERROR}:
                self.problems.append(msg)
                log.error("tensorrt", message=msg)
            elif severity == module.ILogger.Severity.WARNING:
                log.warning("tensorrt", message=msg)

        def take(self) -> str:
            """The errors since the last call, as one text."""
            text, self.problems = "; ".join(self.problems[-5:]), []
            return text or "the library didn't say why"

    return Logger()


def probe(name: str, device: str) -> dict[str, Any]:
    """Create a runtime, in the subprocess, and return the GPU's properties."""
    capability = compute_capability(device)  # raises without a driver, before the library can crash
    driver = ctypes.CDLL("libcuda.so.1")
    handle, text = ctypes.c_int(), ctypes.create_string_buffer(DEVICE_NAME_BYTES)
    driver.cuDeviceGet(ctypes.byref(handle), int(device.partition(":")[2] or 0))
    driver.cuDeviceGetName(text, DEVICE_NAME_BYTES, handle)
    module = importlib.import_module(name)
    if name == "tensorrt_rtx":
        family_of(module, capability)
    logger = make_logger(module)
    if module.Runtime(logger) is None:
        raise ModelFolderError(logger.take())
    return asdict(Gpu(name=text.value.decode(errors="replace"), capability=capability))


def main() -> None:
    """Print the result of `probe` as one line of JSON."""
    try:
        answer = probe(*sys.argv[1:])
    except Exception as error:  # noqa: BLE001  (any library's)
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)  # noqa: T201  (its output)


if __name__ == "__main__":
    main()

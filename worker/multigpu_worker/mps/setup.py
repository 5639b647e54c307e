"""Decides whether a worker uses MPS, from its settings and its GPU."""

import os
import shutil
import tempfile
from pathlib import Path

import structlog
from multigpu.config.config import WorkerConfig

from multigpu_worker.device.interface import Device, DeviceInfo
from multigpu_worker.mps.control import PROGRAM, MpsControl, MpsError, MpsState, MpsStatus
from multigpu_worker.mps.engines import Mps, MpsLimits

log = structlog.get_logger()

# NVIDIA's limits on client contexts of one GPU.
CLIENTS_MAX = 48
CLIENTS_MAX_SINCE_CUDA_13_1 = 60
# Volta's. On earlier GPUs MPS has neither limits for clients nor fault containment.
_COMPUTE_CAPABILITY_MIN = (7, 0)
# The limit of a UNIX socket's path, without the name that the daemon appends.
_PIPE_DIR_BYTES_MAX = 107 - len("/control_privileged")


def default_base_dir() -> Path:
    """The default of mps_pipe_dir: shared by all workers of this user."""
    if os.geteuid() == 0:
        return Path("/run/multigpu/mps")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "multigpu/mps") if runtime else Path(tempfile.gettempdir(), f"multigpu-mps-{os.getuid()}")


def pipe_dir(config: WorkerConfig, device_id: str) -> Path:
    """The pipe directory of a GPU. Raises MpsError if its path is too long for a socket."""
    path = (Path(config.mps_pipe_dir) if config.mps_pipe_dir else default_base_dir()) / device_id
    if len(os.fsencode(path)) > _PIPE_DIR_BYTES_MAX:
        raise MpsError(f"the pipe directory {path} has too long a path for a socket: set mps_pipe_dir to a shorter one")
    return path


def clients_max(cuda_version: str) -> int:
    """The limit on client contexts. `cuda_version`: the driver's, such as "13.1"."""
    try:
        version = tuple(int(part) for part in cuda_version.split(".")[:2])
    except ValueError:
        version = ()
    return CLIENTS_MAX_SINCE_CUDA_13_1 if version >= (13, 1) else CLIENTS_MAX


async def open_mps(config: WorkerConfig, device: Device) -> tuple[Mps | None, MpsStatus | None]:
    """MPS, or the reason why it is off; (None, None) for a CPU. Raises MpsError if `mps` is "on" but unusable."""
    info = device.info
    if info.device_id == "cpu":
        if config.mps == "on":
            raise MpsError("MPS is for NVIDIA GPUs, and this worker's device is a CPU: set mps to auto or off")
        return None, None
    if config.mps == "off":
        return None, MpsStatus(state=MpsState.OFF, message="mps is off")
    limits = MpsLimits(
        active_thread_percentage=config.mps_active_thread_percentage,
        pinned_bytes=config.mps_pinned_device_mem_limit_bytes,
        terminate_timeout_s=config.mps_terminate_timeout_s,
        clients_max=clients_max(info.cuda_version),
    )
    try:
        _check(info, prohibited=device.compute_prohibited)
        control = MpsControl(info.device_id, pipe_dir(config, info.device_id))
        _check_pipe_dir(control.pipe_dir)
        mps = Mps(control, limits)
        await mps.wait_until_ready()
    except MpsError as error:
        if config.mps == "on":
            raise
        log.warning("running without MPS", reason=str(error))
        return None, MpsStatus(state=MpsState.OFF, message=str(error))
    return mps, None


def _check(info: DeviceInfo, *, prohibited: bool) -> None:
    """Raises MpsError if this GPU or host does not support MPS."""
    if shutil.which(PROGRAM) is None:
        raise MpsError(f"{PROGRAM} is not in PATH: install the driver's compute utilities, or set mps to off")
    if info.mig_enabled:
        raise MpsError("MIG is on, and a GPU is shared by MIG or by MPS: set mps to off, or turn MIG off")
    if info.members:
        raise MpsError("the worker has several GPUs, and MPS is managed for each alone: set mps to off")
    major, _, minor = info.compute_capability.partition(".")
    if major.isdigit() and (int(major), int(minor or 0)) < _COMPUTE_CAPABILITY_MIN:
        raise MpsError(f"the GPU's compute capability is {info.compute_capability}, and MPS needs 7.0: set mps to off")
    if prohibited:
        raise MpsError("its compute mode is PROHIBITED: set another one with nvidia-smi -c")


def _check_pipe_dir(folder: Path) -> None:
    """Raises MpsError if another user owns the pipe directory or can write to it.

    A missing directory is no error here: the control program reports it.
    """
    try:
        status = folder.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise MpsError(f"the pipe directory can't be used: {error}") from error
    if status.st_uid not in (0, os.geteuid()):
        raise MpsError(f"the pipe directory {folder} belongs to the user {status.st_uid}: set mps_pipe_dir to another")
    if status.st_mode & 0o022:
        raise MpsError(f"the pipe directory {folder} can be written to by others: run chmod go-w")

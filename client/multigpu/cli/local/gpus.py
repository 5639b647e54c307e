"""The GPUs that this process may use, asked for in other processes: no library stays loaded, and none can hang this."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

from multigpu.cli.driver_calls import ask_driver

QUERY_TIMEOUT_S = 10.0


def usable_gpus() -> dict[str, str]:
    """Name ("cuda:0", in the driver's order) -> UUID of each NVIDIA GPU that CUDA_VISIBLE_DEVICES allows, after the MIG
    instances that it lists; without an NVIDIA GPU, amd_gpus(). Raises RuntimeError as gpu_uuids and amd_gpus.
    """
    gpus = {f"cuda:{index}": uuid for index, uuid in enumerate(gpu_uuids())}
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not gpus and allowed not in ("", "-1"):
        return amd_gpus()
    if allowed is None:
        return gpus
    entries = [entry.strip() for entry in allowed.split(",") if entry.strip()]
    return {entry: entry for entry in entries if entry.startswith("MIG-")} | {
        name: uuid
        for name, uuid in gpus.items()
        if any(name == f"cuda:{entry}" or (entry.startswith("GPU-") and uuid.startswith(entry)) for entry in entries)
    }


def gpu_uuids() -> list[str]:
    """The UUIDs of the GPUs, in the driver's order; empty if there is no GPU or no driver.

    Raises RuntimeError if there is a driver that does not answer: a fleet on the CPU would hide that.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        answer = ask_driver([tool, "--query-gpu=uuid", "--format=csv,noheader"], QUERY_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"nvidia-smi did not answer within {QUERY_TIMEOUT_S:g} s") from error
    if answer.returncode != 0:
        output = (answer.stdout + answer.stderr).strip()
        # 6: no device found. 9: the driver is not loaded.
        if answer.returncode in (6, 9) or "No devices were found" in output:
            return []
        raise RuntimeError(f"nvidia-smi failed ({answer.returncode}): {output}")
    return [line.strip() for line in answer.stdout.splitlines() if line.strip().startswith("GPU-")]


def amd_gpus() -> dict[str, str]:
    """Name ("rocm:0") -> UUID of each AMD GPU that ROCR_VISIBLE_DEVICES allows; empty without the package amdsmi.

    Raises RuntimeError if there is a driver that does not answer.
    """
    if any(importlib.util.find_spec(package) is None for package in ("amdsmi", "multigpu_worker")):
        return {}
    argv = [sys.executable, "-m", "multigpu_worker.device.amd"]
    try:
        done = ask_driver(argv, QUERY_TIMEOUT_S)
        done.check_returncode()
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the AMD driver did not answer within {QUERY_TIMEOUT_S:g} s") from error
    except (subprocess.CalledProcessError, ValueError) as error:
        raise RuntimeError(f"the AMD driver can't be asked: {error}") from error
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return {str(name): str(uuid) for name, uuid in answer["devices"].items()}

"""Checks of the GPUs of this host: driver, CUDA, device files, MPS, NVLink, MIG; AMD's."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
from pathlib import Path

from multigpu.cli.doctor.base import Finding, Host, SkipCheck, fail, ok, skip, warn
from multigpu.cli.local.gpus import amd_gpus

NO_GPU = "no NVIDIA GPU here"
NO_DRIVER = "no NVIDIA GPU answers"
# NVML_COMPUTEMODE_*
COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def check_driver(host: Host) -> Finding:
    """If there is a GPU, its driver answers."""
    nvml = host.nvml
    if "error" not in nvml:
        if not nvml["devices"]:
            raise SkipCheck(NO_GPU)
        note = " (simulated)" if host.simulated and "simulated" not in nvml["driver"].lower() else ""
        return ok("driver", f"{nvml['driver']}{note}, for CUDA {nvml['cuda']}, {len(nvml['devices'])} GPUs")
    if nvml.get("hung"):
        remedy = "look for NVRM lines in `dmesg`; reset the GPUs or reboot the host"
        return fail("driver", nvml["error"], remedy)
    if host.nvidia_devices == 0:
        raise SkipCheck(NO_GPU)
    found = f"{host.nvidia_devices} NVIDIA GPUs on the PCI bus, but {nvml['error']}"
    if nvml.get("missing"):
        return fail("driver", found, "pip install 'multigpu[worker]'")
    if loaded := _loaded_driver(host.root):
        remedy = f"the kernel has driver {loaded} loaded: install the same version of its libraries, or reboot"
        return fail("driver", found, remedy)
    return fail(
        "driver", found, "install NVIDIA's driver and load it (`modprobe nvidia`); `dmesg | grep NVRM` says more"
    )


def _loaded_driver(root: Path) -> str:
    """The version of the kernel module; empty if there is none."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match.group(1) if match else ""


def check_gpus(host: Host) -> Finding:
    """Every GPU answers."""
    if not host.gpus:
        return skip("gpus", NO_DRIVER)
    lost = [gpu for gpu in host.gpus if "error" in gpu]
    if lost:
        which = ", ".join(f"GPU {gpu['index']}: {gpu['error']}" for gpu in lost)
        return fail("gpus", which, "`dmesg | grep Xid` says what happened; reset the GPU, or reboot the host")
    names = sorted({gpu["name"] for gpu in host.gpus})
    return ok("gpus", f"{len(host.gpus)} answer: {', '.join(names)}")


def check_cuda(host: Host) -> list[Finding]:
    """The installed torch can use the driver."""
    torch_cuda = installed_torch_cuda()
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        if not host.gpus:
            raise SkipCheck("torch is not installed here: no worker runs models here") from None
        remedy = "pip install 'multigpu[worker]', unless no worker runs here"
        return [warn("cuda", "torch is not installed", remedy)]
    findings = [judge_cuda(torch, torch_cuda, str(host.nvml.get("cuda", "")) if host.gpus else "")]
    onnx_cuda = _version_in("cuda", "onnxruntime", "capi/build_and_package_info.py")
    if torch_cuda and onnx_cuda and torch_cuda.partition(".")[0] != onnx_cuda.partition(".")[0]:
        found = f"onnxruntime-gpu needs libraries of CUDA {onnx_cuda}, and torch has brought those of CUDA {torch_cuda}"
        findings.append(warn("cuda", found, "install both for the same major version of CUDA, or use no engine onnx"))
    return findings


def judge_cuda(torch: str, torch_cuda: str, driver_cuda: str) -> Finding:
    """`torch_cuda`: empty for a build without CUDA. `driver_cuda`: empty without a GPU."""
    if not driver_cuda:
        built = f"built for CUDA {torch_cuda}" if torch_cuda else "built for the CPU"
        return skip("cuda", f"torch {torch}, {built}; {NO_DRIVER}")
    if not torch_cuda:
        remedy = "install a torch that is built for CUDA: pip install --force-reinstall torch"
        return fail("cuda", f"torch {torch} is built for the CPU; no engine can use the GPUs", remedy)
    found = f"torch {torch} is built for CUDA {torch_cuda}, the driver serves up to {driver_cuda}"
    wanted, served = ([int(part) for part in version.split(".")[:2]] for version in (torch_cuda, driver_cuda))
    if wanted[0] > served[0]:
        return fail("cuda", found, "install a newer driver, or a torch for an older CUDA")
    if wanted > served:
        # CUDA's minor version compatibility covers all but code that is compiled at run time.
        return warn("cuda", found, "a newer driver is safer: code that torch compiles at run time may fail")
    return ok("cuda", found)


def installed_torch_cuda() -> str:
    """The CUDA version that torch was built for, without importing it, which takes seconds. Empty: none."""
    return _version_in("cuda", "torch", "version.py")


def _version_in(library: str, package: str, file: str) -> str:
    """The version of "cuda" or "hip" that a package was built for. Empty: none."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).parent.joinpath(file).read_text("utf-8")
    except OSError:
        return ""
    match = re.search(rf"^{library}(?:_version)?\b[^=]*=\s*['\"]([\d.]+)[^'\"]*['\"]", text, re.MULTILINE)
    return match.group(1) if match else ""


def check_permissions(host: Host) -> Finding:
    """The user can open the device files."""
    if host.simulated:
        raise SkipCheck("a simulated driver has no device files")
    if not host.gpus and host.nvidia_devices == 0:
        raise SkipCheck(NO_GPU)
    minors = [gpu["minor"] for gpu in host.gpus if "minor" in gpu]
    return judge_device_files(host.root / "dev", [f"nvidia{minor}" for minor in minors])


def judge_device_files(folder: Path, gpu_files: list[str]) -> Finding:
    wanted = ["nvidiactl", "nvidia-uvm", *gpu_files]
    missing = [name for name in wanted if not (folder / name).exists()]
    if missing:
        remedy = "`nvidia-modprobe -u -c 0` makes them, as root; so does nvidia-persistenced at boot"
        return fail("permissions", f"no {', '.join(f'/dev/{name}' for name in missing)}", remedy)
    denied = [name for name in wanted if not os.access(folder / name, os.R_OK | os.W_OK, effective_ids=True)]
    if denied:
        remedy = "add this user to the group that owns them (`ls -l /dev/nvidia*`), or the unit's DeviceAllow"
        return fail(
            "permissions", f"user {os.geteuid()} can't open {', '.join(f'/dev/{name}' for name in denied)}", remedy
        )
    return ok("permissions", f"user {os.geteuid()} can open {', '.join(f'/dev/{name}' for name in wanted)}")


def check_mps(host: Host) -> Finding:
    """If MPS is switched on, it can run."""
    wanted = host.worker_config.mps
    if wanted == "off":
        raise SkipCheck("switched off: worker.mps")
    if not host.gpus:
        raise SkipCheck(NO_DRIVER)
    verdict = fail if wanted == "on" else warn
    remedy = " or set worker.mps to off"
    missing = [name for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server") if shutil.which(name) is None]
    if missing:
        return verdict("mps", f"no {', '.join(missing)} on PATH", f"install the driver's MPS programs,{remedy}")
    if mig_gpus := [str(gpu["index"]) for gpu in host.gpus if gpu.get("mig")]:
        return verdict(
            "mps", f"MIG is on for GPU {', '.join(mig_gpus)}: engines there run without MPS", f"turn MIG off,{remedy}"
        )
    prohibited = [gpu for gpu in host.gpus if gpu.get("compute_mode", 0) == 2]
    if prohibited:
        which = ", ".join(str(gpu["index"]) for gpu in prohibited)
        return fail(
            "mps", f"GPU {which} is in compute mode prohibited", f"nvidia-smi -i {prohibited[0]['index']} -c DEFAULT"
        )
    modes = sorted({COMPUTE_MODES.get(gpu.get("compute_mode", 0), "?") for gpu in host.gpus})
    return ok("mps", f"possible: the programs are there, compute mode {', '.join(modes)}")


def check_nvlink(host: Host) -> Finding:
    """No GPU has fewer links up than others of its model. Unconnected links are down as well, so the number of links
    down says nothing.
    """
    linked = [gpu for gpu in host.gpus if gpu.get("nvlinks_up")]
    if not linked:
        raise SkipCheck("no GPU here has an NVLink that is up" if host.gpus else NO_DRIVER)
    most: dict[str, int] = {}
    for gpu in linked:
        most[gpu["name"]] = max(most.get(gpu["name"], 0), gpu["nvlinks_up"])
    fewer = [
        f"GPU {gpu['index']}: {gpu['nvlinks_up']} of {most[gpu['name']]}"
        for gpu in linked
        if gpu["nvlinks_up"] < most[gpu["name"]]
    ]
    if fewer:
        remedy = "look at `nvidia-smi nvlink -s`, the bridge, and on a switched host at nvidia-fabricmanager"
        return warn("nvlink", f"fewer links are up than on others of this host: {', '.join(fewer)}", remedy)
    counts = ", ".join(f"{count} on each {name}" for name, count in most.items())
    return ok("nvlink", f"{len(linked)} GPUs have links that are up: {counts}")


def check_mig(host: Host) -> Finding:
    """Each worker has a whole GPU, or a MIG instance by its UUID."""
    able = [gpu for gpu in host.gpus if "mig" in gpu]
    if not able:
        raise SkipCheck("no GPU here has MIG" if host.gpus else NO_DRIVER)
    mig_gpus = [str(gpu["index"]) for gpu in able if gpu["mig"]]
    if mig_gpus:
        remedy = "give each worker its instance, --device MIG-… (`nvidia-smi -L`), or `nvidia-smi -mig 0` as root"
        return warn("mig", f"GPU {', '.join(mig_gpus)} is cut into instances", remedy)
    return ok("mig", "off: each worker has a whole GPU")


def check_amd(host: Host) -> Finding:
    """If there is an AMD GPU, AMD SMI finds it, and torch can use it."""
    there = (host.root / "dev/kfd").exists()
    if there and importlib.util.find_spec("amdsmi") is None:
        remedy = "pip install 'multigpu[worker,rocm]', with the amdsmi of the installed ROCm"
        return fail("amd", "an AMD GPU is here, and the package amdsmi is not installed", remedy)
    try:
        gpus = amd_gpus()
    except RuntimeError as error:
        return fail("amd", str(error), "look into it with `amd-smi`; `dmesg | grep amdgpu` says more")
    if not gpus and there:
        remedy = "install the amdsmi of the same version as ROCm; add this user to the groups render and video"
        return fail("amd", "an AMD GPU is here, and AMD SMI finds none", remedy)
    if not gpus:
        raise SkipCheck("no AMD GPU here")
    found = f"{', '.join(gpus)} answer"
    if not _version_in("hip", "torch", "version.py"):
        return fail("amd", f"{found}; torch is not built for ROCm", "install torch from PyTorch's index for ROCm")
    return ok("amd", found)


CHECKS = (check_driver, check_gpus, check_cuda, check_permissions, check_mps, check_nvlink, check_mig, check_amd)

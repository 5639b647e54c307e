"""Checks of the GPUs of this host: driver, CUDA, device files, MPS, NVLink, MIG."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
from pathlib import Path

from multigpu.cli.doctor.base import Finding, Place, fail, ok, skip, warn

NO_GPU = "no NVIDIA GPU here: workers run on the CPU"
NO_DRIVER = "there is no NVIDIA GPU that answers"
# NVML_COMPUTEMODE_*
COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def driver(place: Place) -> list[Finding]:
    """A GPU on the bus needs a driver that answers."""
    told = place.nvml
    if "error" not in told:
        if not told["devices"]:
            return skip("driver", NO_GPU)
        note = " (simulated)" if place.simulated and "simulated" not in told["driver"].lower() else ""
        return ok("driver", f"{told['driver']}{note}, for CUDA {told['cuda']}, {len(told['devices'])} GPUs")
    if told.get("hung"):
        remedy = "look for NVRM lines in `dmesg`; reset the GPUs or reboot the host"
        return fail("driver", told["error"], remedy)
    if place.nvidia_devices == 0:
        return skip("driver", NO_GPU)
    found = f"{place.nvidia_devices} NVIDIA GPUs on the PCI bus, but {told['error']}"
    if told.get("missing"):
        return fail("driver", found, "pip install 'multigpu[worker]'")
    if loaded := _loaded_driver(place.root):
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


def devices(place: Place) -> list[Finding]:
    """Every GPU answers."""
    if not place.gpus:
        return skip("gpus", NO_DRIVER)
    lost = [gpu for gpu in place.gpus if "error" in gpu]
    if lost:
        which = ", ".join(f"GPU {gpu['index']}: {gpu['error']}" for gpu in lost)
        return fail("gpus", which, "`dmesg | grep Xid` says what happened; reset the GPU, or reboot the host")
    names = sorted({gpu["name"] for gpu in place.gpus})
    return ok("gpus", f"{len(place.gpus)} answer: {', '.join(names)}")


def cuda(place: Place) -> list[Finding]:
    """The torch that is installed can use the driver."""
    torch_cuda = installed_torch_cuda()
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        if not place.gpus:
            return skip("cuda", "torch is not installed here: no worker runs models here")
        remedy = "pip install 'multigpu[worker]', unless no worker is to run here"
        return warn("cuda", "torch is not installed", remedy)
    return judge_cuda(torch, torch_cuda, str(place.nvml.get("cuda", "")) if place.gpus else "")


def judge_cuda(torch: str, torch_cuda: str, driver_cuda: str) -> list[Finding]:
    """`torch_cuda`: what torch was built for, empty for a build without CUDA; `driver_cuda`: empty without a GPU."""
    if not driver_cuda:
        built = f"built for CUDA {torch_cuda}" if torch_cuda else "built for the CPU"
        return skip("cuda", f"torch {torch}, {built}; {NO_DRIVER}")
    if not torch_cuda:
        remedy = "install a torch that is built for CUDA: pip install --force-reinstall torch"
        return fail("cuda", f"torch {torch} is built for the CPU; no engine can use the GPUs", remedy)
    told = f"torch {torch} is built for CUDA {torch_cuda}, the driver serves up to {driver_cuda}"
    wanted, served = ([int(part) for part in version.split(".")[:2]] for version in (torch_cuda, driver_cuda))
    if wanted[0] > served[0]:
        return fail("cuda", told, "install a newer driver, or a torch for an older CUDA")
    if wanted > served:
        # CUDA's minor version compatibility: it runs, but code that is compiled on the fly may not.
        return warn("cuda", told, "a newer driver is safer: what torch compiles on the fly may not run")
    return ok("cuda", told)


def installed_torch_cuda() -> str:
    """The CUDA that torch was built for, read from its files: importing it takes seconds. Empty: none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text("utf-8")
    except OSError:
        return ""
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else ""


def permissions(place: Place) -> list[Finding]:
    """Whoever runs this may open the device files. Run it as the user that the workers run as."""
    if place.simulated:
        return skip("permissions", "a simulated driver has no device files")
    if not place.gpus and place.nvidia_devices == 0:
        return skip("permissions", NO_GPU)
    minors = [gpu["minor"] for gpu in place.gpus if "minor" in gpu]
    return judge_device_files(place.root / "dev", [f"nvidia{minor}" for minor in minors])


def judge_device_files(folder: Path, gpu_files: list[str]) -> list[Finding]:
    wanted = ["nvidiactl", "nvidia-uvm", *gpu_files]
    missing = [name for name in wanted if not (folder / name).exists()]
    if missing:
        remedy = "`nvidia-modprobe -u -c 0` makes them, as root; so does nvidia-persistenced at boot"
        return fail("permissions", f"no {', '.join(f'/dev/{name}' for name in missing)}", remedy)
    shut = [name for name in wanted if not os.access(folder / name, os.R_OK | os.W_OK, effective_ids=True)]
    if shut:
        remedy = "add this user to the group that owns them (`ls -l /dev/nvidia*`), or the unit's DeviceAllow"
        return fail(
            "permissions", f"user {os.geteuid()} can't open {', '.join(f'/dev/{name}' for name in shut)}", remedy
        )
    return ok("permissions", f"user {os.geteuid()} can open {', '.join(f'/dev/{name}' for name in wanted)}")


def mps(place: Place) -> list[Finding]:
    """MPS, if the settings want it, is possible."""
    wanted = place.worker_config.mps
    if wanted == "off":
        return skip("mps", "switched off: worker.mps")
    if not place.gpus:
        return skip("mps", NO_DRIVER)
    verdict = fail if wanted == "on" else warn
    remedy = " or set worker.mps to off"
    missing = [name for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server") if shutil.which(name) is None]
    if missing:
        return verdict("mps", f"no {', '.join(missing)} on PATH", f"install the driver's MPS programs,{remedy}")
    if cut := [str(gpu["index"]) for gpu in place.gpus if gpu.get("mig")]:
        return verdict(
            "mps", f"MIG is on for GPU {', '.join(cut)}: engines there run without MPS", f"turn MIG off,{remedy}"
        )
    barred = [gpu for gpu in place.gpus if gpu.get("compute_mode", 0) == 2]
    if barred:
        which = ", ".join(str(gpu["index"]) for gpu in barred)
        return fail(
            "mps", f"GPU {which} is in compute mode prohibited", f"nvidia-smi -i {barred[0]['index']} -c DEFAULT"
        )
    modes = sorted({COMPUTE_MODES.get(gpu.get("compute_mode", 0), "?") for gpu in place.gpus})
    return ok("mps", f"possible: the programs are there, compute mode {', '.join(modes)}")


def nvlink(place: Place) -> list[Finding]:
    """No GPU has fewer links up than its likes. Links that lead nowhere are down as well: how many there are says
    nothing, and a GPU without any may just have no bridge.
    """
    linked = [gpu for gpu in place.gpus if gpu.get("nvlinks_up")]
    if not linked:
        return skip("nvlink", "no GPU here has an NVLink that is up" if place.gpus else NO_DRIVER)
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


def mig(place: Place) -> list[Finding]:
    """A worker owns a whole GPU, or one instance of it by its UUID."""
    able = [gpu for gpu in place.gpus if "mig" in gpu]
    if not able:
        return skip("mig", "no GPU here has MIG" if place.gpus else NO_DRIVER)
    cut = [str(gpu["index"]) for gpu in able if gpu["mig"]]
    if cut:
        remedy = "give each worker its instance, --device MIG-… (`nvidia-smi -L`), or `nvidia-smi -mig 0` as root"
        return warn("mig", f"GPU {', '.join(cut)} is cut into instances", remedy)
    return ok("mig", "off: each worker has a whole GPU")


CHECKS = (driver, devices, cuda, permissions, mps, nvlink, mig)

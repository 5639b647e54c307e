"""Checks of GPUs. The real pynvml reads a simulated driver (tests/fakes)."""

import importlib.metadata
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from multigpu.cli.doctor import doctor
from multigpu.cli.doctor import gpu as doctor_gpu
from multigpu.cli.doctor.base import Host, Verdict

from tests.client.cli.doctor.checks import checked, host_of, verdicts
from tests.fakes.amd import SimulatedAmdGpus
from tests.fakes.gpus import SimulatedGpus

NOBODY = "65534"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change users or mount")


@pytest.fixture
def gpus(tmp_path: Path) -> SimulatedGpus:
    return SimulatedGpus(tmp_path / "gpus", n=4)


@pytest.fixture
def on_host(gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Host]:
    """A place whose driver is the simulated one: it is asked in a process of its own."""
    for name, value in gpus.env().items():
        monkeypatch.setenv(name, value)
    return host_of


def test_healthy_gpus(on_host: Callable[..., Host]) -> None:
    here = on_host()
    driver = checked(doctor_gpu.check_driver, here)
    assert driver.verdict is Verdict.OK
    assert "simulated" in driver.message
    assert "4 GPUs" in driver.message
    found = verdicts([doctor_gpu.check_gpus(here), doctor_gpu.check_nvlink(here), doctor_gpu.check_mig(here)])
    assert found == {"gpus": "ok", "nvlink": "ok", "mig": "ok"}
    assert verdicts(doctor.run_check(doctor_gpu.check_permissions, here)) == {"permissions": "skip"}


def test_amd_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = host_of(root=tmp_path)
    assert verdicts(doctor.run_check(doctor_gpu.check_amd, host)) == {"amd": "skip"}
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert "AMD SMI finds none" in checked(doctor_gpu.check_amd, host).message
    amd = SimulatedAmdGpus(tmp_path / "amd", 2)
    for name, value in amd.env().items():
        monkeypatch.setenv(name, value)
    assert checked(doctor_gpu.check_amd, host).message == "rocm:0, rocm:1 answer; torch is not built for ROCm"
    monkeypatch.setattr(doctor_gpu, "_version_in", lambda *words: "7.0.1")
    assert verdicts([checked(doctor_gpu.check_amd, host)]) == {"amd": "ok"}
    amd.gpu(0).lost = 1
    assert checked(doctor_gpu.check_amd, host).message == "rocm:1 answer"


def test_unhealthy_gpus(gpus: SimulatedGpus, on_host: Callable[..., Host]) -> None:
    gpus.lose(3)
    gpus.mig(2, 2)
    gpus.nvlink(0, 1, up=False)
    here = on_host()
    lost = checked(doctor_gpu.check_gpus, here)
    assert lost.verdict is Verdict.FAIL
    assert "GPU 3" in lost.message
    link = checked(doctor_gpu.check_nvlink, here)
    assert link.verdict is Verdict.WARN
    assert "GPU 0: 5 of 6" in link.message
    sliced = checked(doctor_gpu.check_mig, here)
    assert sliced.verdict is Verdict.WARN
    assert "GPU 2" in sliced.message


def test_a_driver_that_does_not_answer(
    gpus: SimulatedGpus, on_host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multigpu.cli.doctor.base.NVML_TIMEOUT_S", 2.0)
    gpus.hang(1)
    hung = checked(doctor_gpu.check_driver, on_host())
    assert hung.verdict is Verdict.FAIL
    assert "did not answer" in hung.message


def test_no_gpu_and_a_gpu_without_a_driver(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    assert checked(doctor_gpu.check_driver, host_of(root=tmp_path)).verdict is Verdict.SKIP
    device = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    device.mkdir()
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    found = checked(doctor_gpu.check_driver, host_of(root=tmp_path))
    assert found.verdict is Verdict.FAIL
    assert "install NVIDIA's driver" in found.remedy
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel  580.159.03  Mon\n")
    assert "580.159.03" in checked(doctor_gpu.check_driver, host_of(root=tmp_path)).remedy


@pytest.mark.parametrize(
    ("torch", "driver", "verdict"),
    [
        ("12.6", "12.8", "ok"),
        ("12.8", "12.8", "ok"),
        ("12.6", "13.0", "ok"),
        ("12.8", "12.4", "warn"),
        ("13.0", "12.8", "fail"),
        ("", "12.8", "fail"),
        ("12.8", "", "skip"),
        ("", "", "skip"),
    ],
)
def test_cuda(torch: str, driver: str, verdict: str) -> None:
    assert verdicts([doctor_gpu.judge_cuda("2.13.0", torch, driver)]) == {"cuda": verdict}


@pytest.mark.parametrize(
    ("torch", "onnxruntime", "verdicts"),
    [
        ("13.0", "12.8", ["ok", "warn"]),
        ("12.6", "12.8", ["ok"]),
        ("12.6", "", ["ok"]),
        ("12.6", "none", ["ok"]),
    ],
)
def test_an_onnxruntime_for_another_cuda_than_torchs_is_a_warning(
    tmp_path: Path, monkeypatch: Any, torch: str, onnxruntime: str, verdicts: list[str]
) -> None:
    files = {"torch/version.py": f"cuda: Optional[str] = '{torch}'\n"}
    if onnxruntime != "none":
        cuda = f"cuda_version = '{onnxruntime}'\n" if onnxruntime else ""
        files["onnxruntime/capi/build_and_package_info.py"] = f"package_name = 'onnxruntime-gpu'\n{cuda}"
        files["onnxruntime/__init__.py"] = "raise AssertionError('doctor imports no engine')\n"
    for name, text in {
        **files,
        "torch/__init__.py": "",
        "torch-2.13.0.dist-info/METADATA": "Name: torch\nVersion: 2.13.0\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for module in [name for name in sys.modules if name.partition(".")[0] in ("torch", "onnxruntime")]:
        monkeypatch.delitem(sys.modules, module)
    host = SimpleNamespace(gpus=[{"index": 0}], nvml={"cuda": "13.0"})
    findings = doctor_gpu.check_cuda(host)  # type: ignore[arg-type]
    assert [finding.verdict.value for finding in findings] == verdicts
    if "warn" in verdicts:
        assert "CUDA 12.8" in findings[1].message and "CUDA 13.0" in findings[1].message


def test_the_cuda_of_the_installed_torch_is_what_torch_says() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("no torch here")
    # The version file, without importing torch, which takes seconds.
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    assert doctor_gpu.installed_torch_cuda() == (version["cuda"] or "")


def test_mps(gpus: SimulatedGpus, on_host: Callable[..., Host], tmp_path: Path, monkeypatch: Any) -> None:
    found = checked(doctor_gpu.check_mps, on_host())
    assert found.verdict is Verdict.WARN
    assert "nvidia-cuda-mps-control" in found.message
    assert checked(doctor_gpu.check_mps, on_host(worker={"mps": "on"})).verdict is Verdict.FAIL
    assert checked(doctor_gpu.check_mps, on_host(worker={"mps": "off"})).verdict is Verdict.SKIP
    # Only that they are on PATH counts: these do nothing.
    for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert checked(doctor_gpu.check_mps, on_host()).verdict is Verdict.OK
    gpus.mig(1, 2)
    assert "MIG is on for GPU 1" in checked(doctor_gpu.check_mps, on_host()).message


def test_device_files(tmp_path: Path) -> None:
    found = doctor_gpu.judge_device_files(tmp_path, ["nvidia0"])
    assert found.verdict is Verdict.FAIL
    assert "no /dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0" in found.message
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0"):
        (tmp_path / name).touch(mode=0o666)
    assert doctor_gpu.judge_device_files(tmp_path, ["nvidia0"]).verdict is Verdict.OK


@ROOT
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv to become somebody else with")
def test_device_files_of_another_user() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for name in ("nvidiactl", "nvidia-uvm", "nvidia0"):
            (Path(folder) / name).touch()
            (Path(folder) / name).chmod(0o600 if name == "nvidia0" else 0o666)
        code = (
            "import os, sys; from pathlib import Path; from multigpu.cli.doctor import gpu as doctor_gpu\n"
            f"os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})\n"
            "found = doctor_gpu.judge_device_files(Path(sys.argv[1]), ['nvidia0'])\n"
            "print(found.verdict.value, found.message)"
        )
        done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert done.stdout == f"fail user {NOBODY} can't open /dev/nvidia0\n"

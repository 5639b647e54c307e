"""AMD GPUs by what AMD SMI says: the real package amdsmi on a simulated libamd_smi."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from multigpu_worker.device.amd import capability_of

from tests.fakes.amd import MI300X, Process, SimulatedAmdGpus
from tests.worker.asking import until
from tests.worker.conftest import HANDLERS, Start
from tests.worker.device.reports import DEGRADED, HEALTHY, RETURNED, SICK, codes, health, is_
from tests.worker.device.test_device import ASK
from tests.worker.scripted_master import SUCCEEDED


@pytest.fixture
def amd(tmp_path: Path) -> SimulatedAmdGpus:
    return SimulatedAmdGpus(tmp_path / "amd", 8)


def run(amd: SimulatedAmdGpus, code: str, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, **amd.env(), **env},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def ask(amd: SimulatedAmdGpus, name: str, **env: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Identity and telemetry of a device, as a worker reports them."""
    done = run(amd, ASK, name, **env)
    assert done.returncode == 0, done.stderr
    info, telemetry = json.loads(done.stdout)
    return info, telemetry


def rejection(amd: SimulatedAmdGpus, name: str, **env: str) -> str:
    done = run(amd, ASK, name, **env)
    assert done.returncode == 1, done.stdout
    return done.stderr.strip().splitlines()[-1]


def test_identity_and_telemetry(amd: SimulatedAmdGpus) -> None:
    gpu = amd.gpu(1)
    gpu.memory_used, gpu.gfx, gpu.umc, gpu.temperature, gpu.power_w = 9 << 30, 80, 25, 71, 600
    gpu.corrected, gpu.uncorrected = 3, 1
    gpu.throttled[:] = [0, 1, 1, 0, 0]
    gpu.processes[0] = Process(pid=77, bytes=5 << 30)
    info, telemetry = ask(amd, "rocm:1")
    peers = {peer["device_id"]: peer.get("nvlinks", 0) for peer in info.pop("peers")}
    assert peers == {amd.uuid(i): int(i < 4) for i in range(8) if i != 1}
    assert info == {
        "device_id": amd.uuid(1), "name": "rocm:1", "product": f"{MI300X} (gfx942)", "compute_capability": "9.4",
        "memory_total_bytes": str(192 << 30), "pci_bus_id": "0000:11:00.0", "driver_version": "6.14.14 (simulated)",
        "simulated": True,
    }  # fmt: skip
    assert telemetry.pop("energy_joules") > 0
    assert telemetry.pop("processes") == [{"pid": 77, "memory_used_bytes": str(5 << 30)}]
    telemetry.pop("sample_time")
    assert telemetry == {
        "memory_total_bytes": str(192 << 30), "memory_used_bytes": str(9 << 30), "utilization": 0.8,
        "memory_utilization": 0.25, "temperature_celsius": 71.0, "power_watts": 600.0, "power_limit_watts": 750.0,
        "sm_clock_hertz": 2.1e9, "memory_clock_hertz": 9e8, "ecc_corrected": "3", "ecc_uncorrected": "1",
        "throttle_reasons": ["sw_power_cap", "hw_thermal_slowdown"], "pcie_generation": 5, "pcie_width": 16,
    }  # fmt: skip


ENERGY = """
import time
from multigpu_worker.device.open import open_device
device = open_device("rocm:0")
before, start_s = device.energy_joules(), time.monotonic()
time.sleep(0.5)
print((device.energy_joules() - before) / (time.monotonic() - start_s))
"""


def test_the_energy_counter_is_in_joules(amd: SimulatedAmdGpus) -> None:
    amd.gpu(0).power_w = 400
    assert float(run(amd, ENERGY).stdout) == pytest.approx(400, rel=0.1)


def test_the_device_that_a_name_means(amd: SimulatedAmdGpus) -> None:
    """HIP counts the simulated GPUs from the last one."""
    assert ask(amd, amd.uuid(5))[0]["name"] == "rocm:5"
    assert ask(amd, "auto")[0]["name"] == "rocm:0"
    assert ask(amd, "auto", ROCR_VISIBLE_DEVICES="0")[0]["name"] == "rocm:7"
    assert ask(amd, "auto", ROCR_VISIBLE_DEVICES=amd.uuid(2))[0]["name"] == "rocm:2"
    assert ask(amd, "auto", CUDA_VISIBLE_DEVICES="")[0]["name"] == "cpu"
    assert ask(amd, "auto", ROCR_VISIBLE_DEVICES="")[0]["name"] == "cpu"
    assert "there is no rocm:8 here (there are 8 AMD devices, counted from rocm:0)" in rejection(amd, "rocm:8")
    assert "there is no GPU-1 here" in rejection(amd, "GPU-1")


def test_a_host_without_a_driver_or_library(amd: SimulatedAmdGpus) -> None:
    assert "no AMD device: there is no libamd_smi" in rejection(amd, "rocm:0", LD_LIBRARY_PATH="")
    amd.state.loaded = 0
    assert ask(amd, "auto")[0]["name"] == "cpu"
    assert "no AMD device: AMDSMI_STATUS_DRIVER_NOT_LOADED" in rejection(amd, "rocm:0")
    amd.state.loaded = 1
    amd.gpu(3).lost = 1
    assert "rocm:3 is there, but can't be used (AMDSMI_STATUS_NOT_FOUND" in rejection(amd, "rocm:3")


ENVIRONMENT = """
import json, sys
from multigpu_worker.device.interface import visible_environment
from multigpu_worker.device.open import open_device
print(json.dumps(visible_environment([open_device(name) for name in sys.argv[1:]])))
"""


def test_an_engine_sees_its_devices_only(amd: SimulatedAmdGpus) -> None:
    assert json.loads(run(amd, ENVIRONMENT, "rocm:6", "rocm:1").stdout) == {
        "ROCR_VISIBLE_DEVICES": f"{amd.uuid(6)},{amd.uuid(1)}", "HIP_VISIBLE_DEVICES": "0,1",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("target", "capability"), [("gfx942", "9.4"), ("gfx90a", "9.0"), ("gfx1100", "11.0"), ("gfx0", ""), ("", "")]
)
def test_the_capability_of_a_target(target: str, capability: str) -> None:
    assert capability_of(target) == capability


@pytest.mark.slow
async def test_the_health_of_an_amd_gpu_follows_its_sensors(amd: SimulatedAmdGpus, start: Start) -> None:
    flags = ("--device", "rocm:2", "--handlers", "handlers_for_health")
    worker, stream = await start(*flags, pythonpath=HANDLERS, env=amd.env())
    await stream.until(lambda: is_(stream, HEALTHY))
    assert stream.hello.device.name == "rocm:2"
    assert (await stream.run(1, b"0", kind="health.work")).state == SUCCEEDED

    amd.gpu(2).throttled[2] = 1  # read every ten seconds
    await stream.until(lambda: codes(stream) == ["thermal_throttle"])
    assert is_(stream, DEGRADED)
    amd.gpu(2).throttled[2] = 0
    await stream.until(lambda: is_(stream, HEALTHY))

    # The driver resets the device by itself: a check decides whether it is fit again.
    amd.gpu(2).uncorrected = 2
    await stream.until(lambda: any("ecc_uncorrected" in [r.code for r in b.health.reasons] for b in stream.heartbeats))
    await stream.until(lambda: is_(stream, HEALTHY))

    stream.lease([(2, b"30")], kind="health.work")
    await stream.running(2)
    amd.gpu(2).lost = 1
    assert [word.state for word in await stream.reported(2)] == [RETURNED]
    assert (is_(stream, SICK), health(stream).unusable, codes(stream)) == (True, True, ["gpu_is_lost"])
    await until(lambda: not worker.engine_pids(), "the engine to let go of the device")
    amd.gpu(2).lost = 0
    await stream.until(lambda: is_(stream, HEALTHY))
    assert (await stream.run(3, b"0", kind="health.work")).state == SUCCEEDED

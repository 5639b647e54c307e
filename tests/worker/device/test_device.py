"""Devices by what they say: a processor with a counter in a folder, GPUs of the simulated driver, and a device that
doesn't answer. The stats file, too.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from multigpu.v1 import device_pb2
from multigpu_worker import stats_file
from multigpu_worker.device.cpu import CpuDevice, memory_limits
from multigpu_worker.device.energy import EnergyMeter, EnergyMethod
from multigpu_worker.device.interface import DeviceError, DeviceGoneError, DeviceInfo, DeviceProcess, Telemetry
from multigpu_worker.device.open import open_device
from multigpu_worker.device.sampler import Sample, Sampler
from multigpu_worker.session.wire import Identity, device_message, telemetry_message

from tests.fakes.gpus import SimulatedGpus

ASK = """
import json, sys
from google.protobuf.json_format import MessageToDict
from multigpu_worker.device.open import open_device
from multigpu_worker.session import wire

opened = open_device(sys.argv[1])
def plain(message):
    return MessageToDict(message, preserving_proto_field_name=True)
print(json.dumps([plain(wire.device_message(opened.info)), plain(wire.telemetry_message(opened.sample(), 1))]))
"""


def ask(gpus: SimulatedGpus, name: str, **env: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Identity and telemetry of a device, as a worker reports them."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, name], env={**os.environ, **gpus.env(), **env}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    info, telemetry = json.loads(done.stdout)
    return info, telemetry


def test_the_topology_of_a_host_and_links_to_a_switch_reach_every_peer(gpus: SimulatedGpus) -> None:
    gpus.nvlink(2, 0, up=False)
    info, telemetry = ask(gpus, gpus.uuid(2))
    assert info.items() >= {"name": "cuda:2", "driver_version": "580.159.03 (simulated)"}.items()
    assert (info["simulated"], info["cuda_version"], info["compute_capability"]) == (True, "13.0", "9.0")
    assert telemetry["nvlinks_active"] == 5
    peers = {peer["device_id"]: peer for peer in info["peers"]}
    assert set(peers) == set(gpus.uuids) - {gpus.uuid(2)}
    assert sum(peer.get("nvlinks", 0) for peer in peers.values()) == 5
    assert peers[gpus.uuid(3)]["common_ancestor"] == "single switch"
    assert peers[gpus.uuid(7)] == {"device_id": gpus.uuid(7), "common_ancestor": "system"}
    for link in range(6):
        gpus.nvlink(0, link, up=True, remote=None)
    info, _ = ask(gpus, "cuda:0")
    over_nvlink = {peer["device_id"] for peer in info["peers"] if peer.get("nvlinks") == 6}
    assert over_nvlink == set(gpus.uuids[1:])


@pytest.mark.parametrize("by_cuda", [False, True])
def test_a_mig_instance_is_a_device_with_its_own_memory(gpus: SimulatedGpus, by_cuda: bool) -> None:
    gpus.mig(1, 3)
    gpus.heat(1, 71)
    gpus.process(1, os.getpid(), 1 << 30, instance=1)
    gpus.process(1, os.getppid(), 1 << 30, instance=2)
    device_id = gpus.mig_uuids(1)[1]
    info, telemetry = ask(gpus, "auto", CUDA_VISIBLE_DEVICES=device_id) if by_cuda else ask(gpus, device_id)
    assert (info["device_id"], info["mig_enabled"], info["name"]) == (device_id, True, "cuda:1")
    assert (info["mig_device_ids"], info["product"]) == (gpus.mig_uuids(1), "Simulated H200 MIG 1g.18gb")
    assert int(info["memory_total_bytes"]) == gpus.gpu(1).memory_total // 3 == int(telemetry["memory_total_bytes"])
    assert int(telemetry["memory_used_bytes"]) == (2 << 30) // 3
    assert [process["pid"] for process in telemetry["processes"]] == [os.getpid()]
    assert "peers" not in info
    # Values of its GPU.
    assert telemetry["temperature_celsius"] == 71.0
    assert info["pci_bus_id"] == bytes(gpus.gpu(1).bus_id).decode()
    # NVML has no utilization of instances.
    assert "utilization" not in telemetry


def test_a_gpu_in_mig_mode_is_rejected_with_its_instances_uuids(gpus: SimulatedGpus) -> None:
    gpus.mig(0, 2)
    for name in ("cuda:0", gpus.uuid(0), "auto"):
        with pytest.raises(
            AssertionError, match=r"DeviceError: .*choose --device from MIG-.*, MIG-.*nvidia-smi -i 0 -mig 0"
        ):
            ask(gpus, name)
    gpus.mig(0, 0)
    with pytest.raises(AssertionError, match=r"DeviceError: .*create one with nvidia-smi mig -i 0 -cgi"):
        ask(gpus, "cuda:0")
    with pytest.raises(AssertionError, match=r"DeviceError: there is no MIG-1 here"):
        ask(gpus, "MIG-1")


def test_auto_is_the_first_visible_device(gpus: SimulatedGpus) -> None:
    assert ask(gpus, "auto", CUDA_VISIBLE_DEVICES="3,1")[0]["device_id"] == gpus.uuid(3)
    assert ask(gpus, "auto", CUDA_VISIBLE_DEVICES=f" {gpus.uuid(5)},0")[0]["device_id"] == gpus.uuid(5)
    assert ask(gpus, "cuda:2", CUDA_VISIBLE_DEVICES="3")[0]["device_id"] == gpus.uuid(2)
    for nothing in ("", "-1"):  # CUDA's way to hide all
        assert ask(gpus, "auto", CUDA_VISIBLE_DEVICES=nothing)[0]["device_id"] == "cpu"
    for wrong in ("9", "GPU-0", "MIG-GPU-0/1/2"):
        with pytest.raises(AssertionError, match=r"DeviceError: CUDA_VISIBLE_DEVICES names .* there is no"):
            ask(gpus, "auto", CUDA_VISIBLE_DEVICES=wrong)


def test_a_driver_that_cannot_be_used_is_an_error_and_not_a_cpu(gpus: SimulatedGpus) -> None:
    gpus.fail("nvmlInitWithFlags", code=18)
    with pytest.raises(AssertionError, match=r"DeviceError: .*version mismatch.*restart the host.*--device cpu"):
        ask(gpus, "auto")
    assert ask(gpus, "cpu")[0]["device_id"] == "cpu"
    gpus.mend()
    gpus.fail("nvmlInitWithFlags", code=4)
    with pytest.raises(AssertionError, match=r"DeviceError: .*Insufficient Permissions.*nvidia-smi.*--device cpu"):
        ask(gpus, "auto")
    gpus.mend()
    gpus.fail("nvmlInitWithFlags", code=9)  # the driver is not loaded: there are no GPUs
    assert ask(gpus, "auto")[0]["device_id"] == "cpu"


def test_values_that_a_device_does_not_report_are_absent(gpus: SimulatedGpus) -> None:
    for function in (
        "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetPcieThroughput",
        "nvmlDeviceGetNvLinkState", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2",
    ):  # fmt: skip
        gpus.fail(function)
    _, telemetry = ask(gpus, "cuda:0")
    assert telemetry == {"sample_time": "1970-01-01T00:00:00.000000001Z"}


PCIE = """
from multigpu_worker.device.open import open_device

opened = open_device("cuda:0")
counted, ask = [], opened._ask
opened._ask = lambda function, *more: (counted.append(function), ask(function, *more))[1]
rates = [opened.sample().pcie_sent_bytes for _ in range(5)]
often = counted.count("nvmlDeviceGetPcieThroughput")
opened._pcie_due_s = 0.0
opened.sample()
print(often, counted.count("nvmlDeviceGetPcieThroughput"), *set(rates))
"""


def test_slow_pcie_counters_are_read_less_often(gpus: SimulatedGpus) -> None:
    gpus.pcie(0, sent_kib=3)
    done = subprocess.run(
        [sys.executable, "-c", PCIE], env={**os.environ, **gpus.env()}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["2", "4", "3072.0"], "one reading of each direction, then another when it is due"


def test_functions_of_older_drivers_are_used_and_a_lost_device_cannot_be_opened(gpus: SimulatedGpus) -> None:
    gpus.heat(0, 71)
    gpus.use_memory(0, 3 << 30)
    gpus.fail("nvmlDeviceGetTemperatureV")
    gpus.fail("nvmlDeviceGetMemoryInfo_v2")
    _, telemetry = ask(gpus, "cuda:0")
    assert telemetry["temperature_celsius"] == 71.0
    assert int(telemetry["memory_used_bytes"]) >= 3 << 30
    gpus.lose(1)
    with pytest.raises(AssertionError, match=r"DeviceError: .*lost.*nvidia-smi"):
        ask(gpus, "cuda:1")


def test_a_cpu_reports_the_same_messages() -> None:
    device = open_device("cpu")
    telemetry = telemetry_message(device.sample(), 1)
    assert 0 < telemetry.memory_used_bytes <= telemetry.memory_total_bytes == device.info.memory_total_bytes
    assert 0.0 <= telemetry.utilization <= 1.0
    assert device_message(device.info).device_id == "cpu"
    assert not telemetry.HasField("temperature_celsius")
    with pytest.raises(DeviceError, match="choose another device"):
        open_device("cuda:63")


def test_processor_energy_over_a_counter_overflow(tmp_path: Path) -> None:
    # The package's energy includes the core's.
    for number, name in (("0", "package-0"), ("1", "package-1"), ("0:0", "core")):
        folder = tmp_path / f"intel-rapl:{number}"
        folder.mkdir()
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text("1000000000\n")
        (folder / "energy_uj").write_text("999000000\n")
    device = CpuDevice(powercap=tmp_path)
    assert device.energy_joules() == 0.0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("4000000\n")  # 5 J more, past the overflow
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("999500000\n")
    assert device.energy_joules() == pytest.approx(5.5)
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    telemetry = device.sample()
    assert (telemetry.energy_joules, telemetry.power_watts) == (None, None)
    assert CpuDevice(powercap=tmp_path / "none").energy_joules() is None


class BlockingDevice:
    """Answers once `answers` is set."""

    visible_variable, reports_events = "CUDA_VISIBLE_DEVICES", True

    def __init__(self) -> None:
        self.info = DeviceInfo(device_id="GPU-1", name="cuda:0", product="", memory_total_bytes=0)
        self.visible_devices = self.engine_name = ""
        self.compute_prohibited = False
        self.answers = threading.Event()
        self.gone = False
        self.joules = 0.0

    def sample(self) -> Telemetry:
        self.answers.wait()
        if self.gone:
            raise DeviceGoneError("gpu_is_lost", "it is gone")
        return Telemetry(temperature_celsius=50.0)

    def release(self) -> None:
        self.answers.wait()

    def energy_joules(self) -> float | None:
        self.joules += 10.0
        return self.joules

    def power_watts(self) -> float | None:
        return None


async def test_a_driver_that_hangs_does_not_block_the_event_loop() -> None:
    device = BlockingDevice()
    sampler = Sampler(device)
    sampler.start()
    try:
        async with asyncio.timeout(120):
            assert await sampler.sample(0.05) is None
            assert sampler.hung_s() > 0.01  # the thread may have started late
            assert await sampler.sample(0.01) is None  # returns at once
            device.answers.set()
            while (sample := await sampler.sample(5.0)) is None:
                pass
        assert sample.telemetry.temperature_celsius == 50.0
        assert sampler.hung_s() == 0.0
        device.gone = True
        gone = await sampler.sample(5.0)
        assert gone is not None
        assert (gone.gone_code, gone.gone, gone.telemetry) == ("gpu_is_lost", "it is gone", Telemetry())
    finally:
        device.answers.set()
        sampler.stop()


@pytest.mark.parametrize(
    ("idle", "own", "sharers"),
    [
        ((), {1, 2, 3}, 1),  # all are ours
        ((), {1, 2}, 2),
        ((3,), {1, 2}, 1),
        ((1, 2), {1, 2}, 2),
        ((1, 2), set(), 1),  # in a container: the host's pids match none of ours
        ((), set(), 3),
    ],
)
def test_the_number_of_processes_that_share_the_energy(idle: tuple[int, ...], own: set[int], sharers: int) -> None:
    sampler = Sampler(BlockingDevice())
    sampler.meter = EnergyMeter(EnergyMethod.COUNTER)
    processes = tuple(DeviceProcess(pid=pid, idle=pid in idle, mps_client=True) for pid in (1, 2, 3))
    server = DeviceProcess(pid=4)
    sampler.latest = Sample(telemetry=Telemetry(processes=(*processes, server)), time_ns=1)
    sampler.count_sharers(own.__contains__)
    assert sampler.meter.sharers == sharers


async def test_energy_is_read_only_while_the_device_works() -> None:
    device = BlockingDevice()
    device.answers.set()
    sampler = Sampler(device)
    sampler.start()
    try:
        await sampler.sample(5.0)
        assert sampler.meter is not None
        assert sampler.meter.method is EnergyMethod.COUNTER
        before = device.joules
        for _ in range(3):
            await sampler.sample(5.0)
        assert device.joules == before
        sampler.begin_work()
        async with asyncio.timeout(120):
            while device.joules < before + 50.0:
                await asyncio.sleep(0.02)
        sampler.end_work()
        assert sampler.measure(0, 1, 1) is None
    finally:
        sampler.stop()


@pytest.mark.parametrize("error", [DeviceGoneError("gpu_is_lost", "it is gone"), RuntimeError("timeout")])
async def test_energy_that_cannot_be_read_at_the_start_is_read_later(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A device that was gone at the start and came back never had the energy of its tasks."""

    class Late(BlockingDevice):
        def energy_joules(self) -> float | None:
            if super().energy_joules() == 10.0:
                raise error
            return self.joules

    monkeypatch.setattr("multigpu_worker.device.sampler.METER_INTERVAL_S", 3600.0)
    device = Late()
    device.answers.set()
    sampler = Sampler(device)
    sampler.start()
    try:
        for _ in range(3):
            await sampler.sample(5.0)
        assert (sampler.meter, device.joules) == (None, 10.0), "not at each sample"
        sampler.device_released = True
        monkeypatch.setattr("multigpu_worker.device.sampler.METER_INTERVAL_S", 0.0)
        for _ in range(3):
            await sampler.sample(5.0)
        assert sampler.meter is None, "a driver that is open would keep the device"
        sampler.device_released = False
        async with asyncio.timeout(120):
            while sampler.meter is None:
                await sampler.sample(5.0)
    finally:
        sampler.stop()


async def test_an_error_while_energy_is_read_does_not_end_the_samples() -> None:
    class Unreadable(BlockingDevice):
        def energy_joules(self) -> float | None:
            if super().energy_joules() == 10.0:  # when the sampler looks for a method
                return 10.0
            raise TypeError("N/A")

    device = Unreadable()
    device.answers.set()
    sampler = Sampler(device)
    sampler.start()
    try:
        await sampler.sample(5.0)
        sampler.begin_work()
        async with asyncio.timeout(120):
            while device.joules < 50.0:
                await asyncio.sleep(0.02)
            before = sampler.latest
            while await sampler.sample(5.0) is before:
                pass
        assert sampler.measure(0, time.time_ns(), 1) is None
    finally:
        sampler.stop()


def test_energy_that_is_read_while_the_work_ends_is_forgotten() -> None:
    """The next task got the energy of the idle device, up to its begin."""

    class Ends(BlockingDevice):
        def energy_joules(self) -> float | None:
            if self.joules >= 20.0:
                sampler.end_work()
            return super().energy_joules()

    sampler = Sampler(Ends())
    sampler.meter = EnergyMeter(EnergyMethod.COUNTER)
    sampler.running = 1
    for _ in range(3):
        sampler._read_energy()
    assert sampler.meter._readings[0] == []


def test_a_stats_file_has_whole_lines_and_a_limited_size(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "stats.jsonl"

    def write(n: int) -> None:
        for _ in range(100):
            stats_file.append(path, f'{{"n": {n}}}\n'.encode(), 500)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    old = path.with_name("stats.jsonl.1")
    assert path.stat().st_size <= 500
    assert 400 < old.stat().st_size <= 500
    lines = [json.loads(line) for line in (old.read_text() + path.read_text()).splitlines()]
    assert {line["n"] for line in lines} <= set(range(4))


def test_the_stats_thread_survives_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    identity = Identity(
        worker_id="w", host="h", version="0", pid=1, process="p", device=CpuDevice().info, labels={}, slots=1,
        window_tasks=1, window_bytes=1,
    )  # fmt: skip
    assert stats_file.record(identity, None, 0) is None
    path = tmp_path / "file" / "stats"
    stats = stats_file.StatsFile(path, 0.01, lambda: {"a": 1})
    stats.start()
    try:
        (tmp_path / "file").unlink()
        for _ in range(500):
            if path.exists():
                break
            threading.Event().wait(0.01)
        assert json.loads(path.read_text().splitlines()[0]) == {"a": 1}
    finally:
        stats.stop()


def test_the_dataclasses_have_every_field_of_the_contract() -> None:
    assert {f.name for f in fields(DeviceInfo)} == set(device_pb2.Device.DESCRIPTOR.fields_by_name)
    reported = set(device_pb2.DeviceTelemetry.DESCRIPTOR.fields_by_name) - {"sample_time"}
    assert {f.name for f in fields(Telemetry)} == reported


def test_memory_is_limited_by_every_control_group_above_the_process(tmp_path: Path) -> None:
    """A worker under systemd did not see MemoryMax= of its unit, and gave its engines more than that."""
    unit = tmp_path / "system.slice/mgpu-worker.service"
    unit.mkdir(parents=True)
    (unit / "memory.max").write_text("9000\n")
    (unit.parent / "memory.max").write_text("max\n")
    membership = tmp_path / "membership"
    membership.write_text("1:name=systemd:/x\n0::/system.slice/mgpu-worker.service\n")
    assert memory_limits(membership, tmp_path) == [9000]
    (tmp_path / "memory.max").write_text("8000\n")  # of a container, whose groups begin there
    assert memory_limits(membership, tmp_path) == [9000, 8000]
    membership.write_text("0::/\n")
    assert memory_limits(membership, tmp_path) == [8000]
    assert memory_limits(tmp_path / "none", tmp_path) == []

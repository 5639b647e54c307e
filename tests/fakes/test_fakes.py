"""Real pynvml and the simulated nvidia-smi on the simulated driver: each function that is used, and what goes wrong."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import layout
from tests.fakes.driver_user import DriverUser
from tests.fakes.gpus import SimulatedGpus

GIB = 1 << 30
# What telemetry, health and MPS are made of: C names, without their "nvml".
SYMBOLS = """
InitWithFlags Shutdown ErrorString SystemGetDriverVersion SystemGetNVMLVersion SystemGetCudaDriverVersion
SystemGetCudaDriverVersion_v2 DeviceGetCount_v2 DeviceGetHandleByIndex_v2 DeviceGetHandleByUUID
DeviceGetHandleByPciBusId_v2 DeviceGetName DeviceGetUUID DeviceGetMinorNumber DeviceGetPciInfo_v3
DeviceGetMemoryInfo DeviceGetMemoryInfo_v2 DeviceGetUtilizationRates DeviceGetTemperature DeviceGetTemperatureV
DeviceGetPowerUsage DeviceGetEnforcedPowerLimit DeviceGetTotalEnergyConsumption DeviceGetEccMode
DeviceGetTotalEccErrors DeviceGetMemoryErrorCounter DeviceGetRemappedRows EventSetCreate
DeviceGetSupportedEventTypes DeviceRegisterEvents EventSetWait_v2 EventSetFree DeviceGetMigMode
DeviceGetMaxMigDeviceCount DeviceGetMigDeviceHandleByIndex DeviceGetComputeMode DeviceSetComputeMode
DeviceGetNvLinkState DeviceGetNvLinkRemotePciInfo_v2 DeviceGetTopologyCommonAncestor DeviceGetP2PStatus
DeviceGetComputeRunningProcesses_v3 DeviceGetMPSComputeRunningProcesses_v3 DeviceGetGraphicsRunningProcesses_v3
DeviceGetProcessUtilization DeviceGetCurrentClocksEventReasons DeviceGetCurrentClocksThrottleReasons
DeviceGetClockInfo DeviceGetCudaComputeCapability DeviceGetCpuAffinity DeviceGetFieldValues
DeviceGetGpuFabricInfoV DeviceGetCurrPcieLinkGeneration DeviceGetCurrPcieLinkWidth DeviceGetPcieThroughput
DeviceGetNvLinkRemoteDeviceType
"""


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> SimulatedGpus:
    """For tests that leave no trace on the GPUs of others: each has one of its own."""
    return SimulatedGpus(tmp_path_factory.mktemp("gpus") / "state", n=8)


@pytest.fixture(scope="module")
def user(gpus: SimulatedGpus) -> Iterator[DriverUser]:
    with DriverUser(gpus) as user:
        yield user


def test_the_layouts_are_one_and_every_symbol_is_there(user: DriverUser) -> None:
    assert user.ask("nvmlLib.fake_nvml_state_size()") == len(bytes(layout.State()))
    assert user.ask(f"[name for name in {SYMBOLS!r}.split() if not hasattr(nvmlLib, 'nvml' + name)]") == []


def test_what_a_gpu_is(gpus: SimulatedGpus, user: DriverUser) -> None:
    assert user.ask("nvmlDeviceGetCount()") == 8
    assert "simulated" in user.ask("nvmlSystemGetDriverVersion()")
    assert "simulated" in user.ask("nvmlSystemGetNVMLVersion()")
    assert user.ask("nvmlSystemGetCudaDriverVersion()") == user.ask("nvmlSystemGetCudaDriverVersion_v2()") == 13000
    assert user.ask("nvmlDeviceGetName(gpu[1])") == "Simulated H200"
    assert user.ask("[nvmlDeviceGetUUID(g) for g in gpu]") == gpus.uuids
    assert len(set(gpus.uuids)) == 8
    assert user.ask(f"nvmlDeviceGetMinorNumber(nvmlDeviceGetHandleByUUID({gpus.uuid(5)!r}))") == 5
    pci = user.ask("nvmlDeviceGetPciInfo(gpu[1])")
    assert (pci["busId"], pci["busIdLegacy"], pci["bus"]) == ("00000000:11:00.0", "0000:11:00.0", 0x11)
    assert user.ask("nvmlDeviceGetUUID(nvmlDeviceGetHandleByPciBusId('00000000:11:00.0'))") == gpus.uuid(1)
    assert user.ask("nvmlDeviceGetCudaComputeCapability(gpu[0])") == [9, 0]
    assert sum(user.ask("nvmlDeviceGetCpuAffinity(gpu[0], 4)")) > 0
    assert user.error("nvmlDeviceGetHandleByIndex(8)") == "InvalidArgument"
    assert user.error("nvmlDeviceGetHandleByUUID('GPU-none')") == "NotFound"


def test_sensors_return_the_configured_values(gpus: SimulatedGpus, user: DriverUser) -> None:
    gpus.heat(0, 91)
    gpus.use(0, 0.75, 0.25)
    gpus.power(0, 321.5, 650)
    gpus.clocks(0, 1200, 2600)
    gpus.throttle(0, 0x44)
    gpus.pcie(0, generation=4, width=8, sent_kib=10, received_kib=20)
    assert user.ask("nvmlDeviceGetTemperature(gpu[0], NVML_TEMPERATURE_GPU)") == 91
    assert user.ask("nvmlDeviceGetTemperatureV(gpu[0], NVML_TEMPERATURE_GPU)") == 91
    assert user.ask("nvmlDeviceGetUtilizationRates(gpu[0])") == {"gpu": 75, "memory": 25}
    assert user.ask("nvmlDeviceGetPowerUsage(gpu[0])") == 321500
    assert user.ask("nvmlDeviceGetEnforcedPowerLimit(gpu[0])") == 650000
    assert user.ask("nvmlDeviceGetClockInfo(gpu[0], NVML_CLOCK_SM)") == 1200
    assert user.ask("nvmlDeviceGetClockInfo(gpu[0], NVML_CLOCK_MEM)") == 2600
    assert user.ask("nvmlDeviceGetCurrentClocksEventReasons(gpu[0])") == 0x44
    assert user.ask("nvmlDeviceGetCurrentClocksThrottleReasons(gpu[0])") == 0x44
    assert user.ask("nvmlDeviceGetCurrPcieLinkGeneration(gpu[0])") == 4
    assert user.ask("nvmlDeviceGetCurrPcieLinkWidth(gpu[0])") == 8
    assert user.ask("nvmlDeviceGetPcieThroughput(gpu[0], NVML_PCIE_UTIL_TX_BYTES)") == 10
    assert user.ask("nvmlDeviceGetPcieThroughput(gpu[0], NVML_PCIE_UTIL_RX_BYTES)") == 20
    assert user.ask("nvmlDeviceGetTemperature(gpu[1], NVML_TEMPERATURE_GPU)") == 30, "the others are as they were"


def test_the_energy_counter_integrates_power_or_stands_where_it_was_set(gpus: SimulatedGpus, user: DriverUser) -> None:
    gpus.power(1, 200)
    gpus.run_energy(1, joules=5.0, period_s=0.001)
    before_s, first = time.monotonic(), user.ask("nvmlDeviceGetTotalEnergyConsumption(gpu[1])")
    time.sleep(0.3)
    second, after_s = user.ask("nvmlDeviceGetTotalEnergyConsumption(gpu[1])"), time.monotonic()
    assert first >= 5000
    assert 0.25 * 200_000 <= second - first <= (after_s - before_s) * 200_000
    gpus.set_energy(1, 77.5)
    assert user.ask("nvmlDeviceGetTotalEnergyConsumption(gpu[1])") == 77500
    assert user.ask("nvmlDeviceGetFieldValues(gpu[1], [NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION])[0].value.ullVal") == 77500


def test_memory_is_free_again_when_its_process_has_ended(gpus: SimulatedGpus, user: DriverUser) -> None:
    gpus.use_memory(2, 2 * GIB)
    child = subprocess.Popen(["sleep", "60"])
    gpus.process(2, child.pid, 3 * GIB, sm_utilization=40)
    gpus.process(2, os.getpid(), GIB, mps=True)
    memory = user.ask("nvmlDeviceGetMemoryInfo(gpu[2], version=nvmlMemory_v2)")
    assert memory["used"] == 6 * GIB
    assert memory["total"] == memory["used"] + memory["free"] + memory["reserved"]
    first = user.ask("nvmlDeviceGetMemoryInfo(gpu[2])")
    assert first["used"] == memory["used"] + memory["reserved"], "as the real one's first version counts"
    assert [p["pid"] for p in user.ask("nvmlDeviceGetComputeRunningProcesses(gpu[2])")] == [child.pid]
    assert user.ask("nvmlDeviceGetMPSComputeRunningProcesses(gpu[2])")[0]["usedGpuMemory"] == GIB
    assert user.ask("nvmlDeviceGetGraphicsRunningProcesses(gpu[2])") == []
    assert {s["pid"]: s["smUtil"] for s in user.ask("nvmlDeviceGetProcessUtilization(gpu[2], 0)")}[child.pid] == 40
    child.kill()
    child.wait()
    assert user.ask("nvmlDeviceGetMemoryInfo(gpu[2], version=nvmlMemory_v2)")["used"] == 3 * GIB
    assert user.ask("nvmlDeviceGetComputeRunningProcesses(gpu[2])") == []
    gpus.no_process(2, os.getpid())
    assert user.ask("nvmlDeviceGetMemoryInfo(gpu[2], version=nvmlMemory_v2)")["used"] == 2 * GIB


def test_errors_of_memory(gpus: SimulatedGpus, user: DriverUser) -> None:
    gpus.ecc(3, corrected=7, uncorrected=2)
    gpus.remap(3, correctable=1, uncorrectable=2, pending=True, failed=False)
    gpus.recovery_action(3, 1)
    volatile = "NVML_VOLATILE_ECC"
    assert user.ask("nvmlDeviceGetEccMode(gpu[3])") == [1, 1]
    assert user.ask(f"nvmlDeviceGetTotalEccErrors(gpu[3], NVML_MEMORY_ERROR_TYPE_CORRECTED, {volatile})") == 7
    assert user.ask(f"nvmlDeviceGetTotalEccErrors(gpu[3], NVML_MEMORY_ERROR_TYPE_UNCORRECTED, {volatile})") == 2
    where = f"NVML_MEMORY_ERROR_TYPE_UNCORRECTED, {volatile}, NVML_MEMORY_LOCATION_DEVICE_MEMORY"
    assert user.ask(f"nvmlDeviceGetMemoryErrorCounter(gpu[3], {where})") == 2
    assert user.ask("nvmlDeviceGetRemappedRows(gpu[3])") == [1, 2, 1, 0]
    fields = "[NVML_FI_DEV_ECC_DBE_VOL_TOTAL, NVML_FI_DEV_REMAPPED_UNC, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]"
    assert user.ask(f"[v.value.ullVal for v in nvmlDeviceGetFieldValues(gpu[3], {fields})]") == [2, 2, 1]
    gpus.gpu(3).ecc_enabled = 0
    assert user.error(f"nvmlDeviceGetTotalEccErrors(gpu[3], 0, {volatile})") == "NotSupported"


def test_ways_between_gpus(gpus: SimulatedGpus, user: DriverUser) -> None:
    assert user.ask("sum(nvmlDeviceGetNvLinkState(gpu[5], link) for link in range(18))") == 6
    assert user.ask("nvmlDeviceGetNvLinkRemotePciInfo(gpu[5], 0)")["busId"] == "00000000:14:00.0"
    assert user.ask("nvmlDeviceGetNvLinkRemoteDeviceType(gpu[5], 0)") == 0
    levels = user.ask("[nvmlDeviceGetTopologyCommonAncestor(gpu[5], gpu[i]) for i in (5, 4, 6, 0)]")
    assert levels == [0, 10, 30, 50]
    assert user.ask("nvmlDeviceGetP2PStatus(gpu[5], gpu[6], NVML_P2P_CAPS_INDEX_NVLINK)") == 0
    assert user.ask("nvmlDeviceGetP2PStatus(gpu[5], gpu[0], NVML_P2P_CAPS_INDEX_NVLINK)") != 0
    gpus.nvlink(5, 0, up=False)
    gpus.nvlink(5, 1, up=True)
    assert user.ask("nvmlDeviceGetNvLinkState(gpu[5], 0)") == 0
    assert user.ask("nvmlDeviceGetNvLinkRemoteDeviceType(gpu[5], 1)") == 2, "a switch"
    assert user.error("nvmlDeviceGetNvLinkState(gpu[5], 18)") == "InvalidArgument"
    info = "(f := c_nvmlGpuFabricInfoV_t()) and nvmlDeviceGetGpuFabricInfoV(gpu[5], byref(f))"
    assert user.ask(f"{info} or f.state") == 0


def test_mig(gpus: SimulatedGpus, user: DriverUser) -> None:
    assert user.ask("nvmlDeviceGetMigMode(gpu[6])") == [0, 0]
    gpus.mig(6, 3)
    assert user.ask("nvmlDeviceGetMigMode(gpu[6])") == [1, 1]
    assert user.ask("nvmlDeviceGetMaxMigDeviceCount(gpu[6])") == 7
    found = user.ask("[nvmlDeviceGetUUID(nvmlDeviceGetMigDeviceHandleByIndex(gpu[6], i)) for i in range(3)]")
    assert len({name for name in found if name.startswith("MIG-")}) == 3
    assert user.error("nvmlDeviceGetMigDeviceHandleByIndex(gpu[6], 3)") == "NotFound"
    part = f"nvmlDeviceGetHandleByUUID({found[1]!r})"
    assert user.ask(f"nvmlDeviceGetMemoryInfo({part})")["total"] == gpus.gpu(6).memory_total // 3
    assert user.error(f"nvmlDeviceGetUtilizationRates({part})") == "NotSupported"
    assert user.ask(f"nvmlDeviceGetUUID(nvmlDeviceGetDeviceHandleFromMigDeviceHandle({part}))") == gpus.uuid(6)


def test_what_is_not_supported_and_drivers_that_are_old_or_do_not_answer(gpus: SimulatedGpus, user: DriverUser) -> None:
    gpus.fail("nvmlDeviceGetPowerUsage", 4)
    gpus.fail("field 230", 4)
    assert user.error("nvmlDeviceGetPowerUsage(gpu[4])") == "NotSupported"
    values = user.ask("[v.nvmlReturn for v in nvmlDeviceGetFieldValues(gpu[4], [230, 186, 9999])]")
    assert values == [3, 0, 3]
    assert user.ask("nvmlDeviceGetPowerUsage(gpu[7])") > 0
    assert user.error("nvmlDeviceGetFanSpeed(gpu[4])") == "FunctionNotFound"
    gpus.fail("nvmlDeviceGetCount_v2", code=999)
    assert user.error("nvmlDeviceGetCount()") == "Unknown"
    gpus.mend()
    assert user.ask("nvmlDeviceGetPowerUsage(gpu[4])") > 0
    user.ask("nvmlDeviceSetComputeMode(gpu[4], NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)")
    assert user.ask("nvmlDeviceGetComputeMode(gpu[4])") == 3
    gpus.slow(4, 0.3)
    begin_s = time.monotonic()
    user.ask("nvmlDeviceGetPowerUsage(gpu[4])")
    assert time.monotonic() - begin_s >= 0.3
    gpus.answer_(4)
    gpus.hang(4)
    user.begin("nvmlDeviceGetPowerUsage(gpu[4])")
    time.sleep(0.2)
    gpus.power(4, 99)  # it is still inside, and reads this afterwards
    gpus.answer_(4)
    assert user.end() == 99000


def test_each_event_set_sees_each_event_once(gpus: SimulatedGpus, user: DriverUser) -> None:
    gpus.xid(0, 31)  # before there is a set: nobody hears of it
    types = "nvmlEventTypeXidCriticalError | nvmlEventTypeDoubleBitEccError | nvmlEventTypeGpuRecoveryAction"
    assert user.ask(f"nvmlDeviceGetSupportedEventTypes(gpu[0]) & ({types})") == 0x8 | 0x2 | 0x8000
    for name in "st":
        user.ask(f"({name} := nvmlEventSetCreate()) and nvmlDeviceRegisterEvents(gpu[0], {types}, {name})")
    user.ask("nvmlDeviceRegisterEvents(gpu[7], nvmlEventTypeXidCriticalError, s)")
    assert user.error("nvmlEventSetWait_v2(s, 20)") == "Timeout"
    user.begin("[(e.eventType, e.eventData, nvmlDeviceGetUUID(e.device)) for e in [nvmlEventSetWait_v2(s, 20000)]]")
    gpus.xid(0, 13)  # while it waits
    assert user.end() == [[8, 13, gpus.uuid(0)]]
    gpus.xid(1, 62)  # not registered
    gpus.ecc(0, uncorrected=1)
    gpus.xid(7, 45)
    seen = "[(e.eventType, e.eventData) for e in [nvmlEventSetWait_v2({0}, 1000), nvmlEventSetWait_v2({0}, 1000)]]"
    assert user.ask(seen.format("s")) == [[2, 0], [8, 45]]
    assert user.ask(seen.format("t")) == [[8, 13], [2, 0]]
    assert user.error("nvmlEventSetWait_v2(s, 20)") == user.error("nvmlEventSetWait_v2(t, 20)") == "Timeout"
    SimulatedGpus.attached(gpus.path).xid(0, 94)  # as a handler in an engine process does
    assert user.ask("nvmlEventSetWait_v2(s, 1000).eventData") == 94, "raised by another process"
    user.ask("[nvmlEventSetFree(each) for each in (s, t)]")


def test_a_lost_gpu_and_its_return(tmp_path: Path) -> None:
    gpus = SimulatedGpus(tmp_path / "state", n=2)
    with DriverUser(gpus) as user:
        user.ask("(s := nvmlEventSetCreate()) and [nvmlDeviceRegisterEvents(g, 8, s) for g in gpu]")
        user.begin("nvmlEventSetWait_v2(s, 20000).eventData")
        gpus.lose(1)
        assert user.end() == 79
        for call in ("nvmlDeviceGetUUID(gpu[1])", "nvmlDeviceGetHandleByIndex(1)", "nvmlEventSetWait_v2(s, 1000)"):
            assert user.error(call) == "GpuIsLost"
        assert user.ask("nvmlDeviceGetCount()") == 2
        assert user.ask("nvmlDeviceGetUUID(gpu[0])") == gpus.uuid(0), "the other one is as before"
        gpus.return_(1)
        assert user.ask("nvmlDeviceGetUUID(gpu[1])") == gpus.uuid(1)

        gpus.lose(1)
        gpus.return_(1, reset=True)
        assert user.error("nvmlDeviceGetHandleByIndex(1)") == "GpuIsLost"
        user.ask("nvmlShutdown()")
        user.ask("nvmlInit()")
        assert user.ask("nvmlDeviceGetUUID(nvmlDeviceGetHandleByIndex(1))") == gpus.uuid(1)
        user.ask("nvmlShutdown()")
        assert user.error("nvmlDeviceGetCount()") == "Uninitialized"


def test_no_driver(tmp_path: Path) -> None:
    gpus = SimulatedGpus(tmp_path / "state", n=1)
    env = {**os.environ, **gpus.env()}
    gpus.path.unlink()
    assert subprocess.run(["nvidia-smi"], env=env, capture_output=True, timeout=400, check=False).returncode == 9
    code = "import pynvml\ntry: pynvml.nvmlInit()\nexcept pynvml.NVMLError_DriverNotLoaded: print('not loaded')"
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True, timeout=400) == "not loaded\n"


def nvidia_smi(gpus: SimulatedGpus, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **gpus.env()}
    return subprocess.run(["nvidia-smi", *arguments], env=env, capture_output=True, text=True, timeout=400, check=False)


def test_nvidia_smi(tmp_path: Path) -> None:
    gpus = SimulatedGpus(tmp_path / "state", n=2)
    gpus.heat(1, 88)
    gpus.mig(1, 2)
    gpus.process(0, os.getpid(), 3 * GIB)
    assert nvidia_smi(gpus, "--query-gpu=uuid", "--format=csv,noheader").stdout.split() == gpus.uuids
    rows = nvidia_smi(gpus, "--query-gpu=index,memory.used,temperature.gpu,mig.mode.current", "--format=csv").stdout
    assert rows.splitlines() == [
        "index, memory.used [MiB], temperature.gpu, mig.mode.current",
        "0, 3072 MiB, 30, Disabled",
        "1, 0 MiB, 88, Enabled",
    ]
    bare = nvidia_smi(gpus, "-i", "0", "--query-gpu=memory.used,compute_cap", "--format=csv,noheader,nounits").stdout
    assert bare == "3072, 9.0\n"
    listed = nvidia_smi(gpus, "-L").stdout
    found = re.findall(r"^GPU (\d): Simulated H200 \(UUID: (\S+)\)$", listed, re.MULTILINE)
    assert (found, listed.count("MIG ")) == ([("0", gpus.uuid(0)), ("1", gpus.uuid(1))], 2)
    for arguments in ([], ["-q"], ["topo", "-m"]):
        answer = nvidia_smi(gpus, *arguments)
        assert (answer.returncode, "imulated" in answer.stdout) == (0, True)
    assert "NV2" in nvidia_smi(gpus, "topo", "-m").stdout
    assert nvidia_smi(gpus, "--query-gpu=nonsense", "--format=csv").returncode == 2
    assert nvidia_smi(gpus, "--frobnicate").returncode == 2
    gpus.lose(1)
    answer = nvidia_smi(gpus, "-L")
    assert (answer.returncode, "GPU is lost" in answer.stdout) == (15, True)
    answer = nvidia_smi(SimulatedGpus(tmp_path / "none", n=0), "-L")
    assert (answer.returncode, answer.stdout.strip()) == (6, "No devices were found")

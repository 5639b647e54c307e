"""A GPU, as NVIDIA's driver tells of it through NVML, without torch and without CUDA."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from multigpu_worker.device.interface import (
    DeviceError,
    DeviceGoneError,
    DeviceInfo,
    DevicePeer,
    DeviceProcess,
    RemappedRows,
    Telemetry,
)

try:
    import pynvml
except ImportError:  # the worker's extra is not installed: a CPU worker does without
    pynvml = None

# By NVML's values of nvmlGpuTopologyLevel_t.
ANCESTORS = {
    0: "internal",
    10: "single switch",
    20: "multiple switches",
    30: "host bridge",
    40: "NUMA node",
    50: "system",
}
# By NVML's bits nvmlClocksEventReason…; that the device is idle holds nothing down.
THROTTLE_REASONS = {
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
# By NVML's values of nvmlReturn_t.
GONE = {9: "driver_not_loaded", 15: "gpu_is_lost", 16: "reset_required"}
NOT_FOUND = 6
# What a MIG instance tells of itself; all else is its GPU's.
OF_INSTANCE = frozenset(
    (
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetName",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    )
)
PROCESSES_MAX = 256
# The driver takes 20 ms to count what crosses PCIe, in each direction.
PCIE_INTERVAL_S = 10.0
# A process that has not computed for this long is idle. The driver samples utilization every 1/6 to 1 s.
IDLE_S = 2.0
# After a reset a device may be found only by a process that opens the driver anew. Tried every so many seconds while it
# is gone: by then the thread of events.py has let go of it.
ANEW_S = 2.0


def count() -> tuple[int, str]:
    """How many NVIDIA devices there are, and why there are none. To be called first: it opens NVML."""
    if pynvml is None:
        return 0, "nvidia-ml-py is not installed, it comes with multigpu[worker]"
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount(), "none is visible to the driver"
    except pynvml.NVMLError as error:
        return 0, str(error)


def index_of(device_id: str) -> int | None:
    """The number of the GPU with that UUID, or with that MIG instance; None if there is none."""
    try:
        return int(pynvml.nvmlDeviceGetIndex(handles(device_id)[1]))
    except pynvml.NVMLError:
        return None


def handles(device_id: str) -> tuple[Any, Any]:
    """Of a device, and of its GPU: they differ for a MIG instance. NVMLError: it isn't there."""
    device = pynvml.nvmlDeviceGetHandleByUUID(device_id)
    if device_id.startswith("MIG-"):
        return device, pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
    return device, device


def open_at(index: int, instance: str = "") -> "NvmlDevice":
    """The GPU of that number, or its MIG instance with that UUID. DeviceError: it can't be used."""
    try:
        device = NvmlDevice(index, instance)
    except (pynvml.NVMLError, DeviceGoneError) as error:
        raise DeviceError(
            f"cuda:{index} is there, but can't be used ({error}); look into it with nvidia-smi, reset it or restart "
            "the host, or choose another --device"
        ) from error
    if device.info.mig_enabled and not instance:
        found = ", ".join(device.info.mig_device_ids)
        remedy = f"choose --device from {found}" if found else f"create one with nvidia-smi mig -i {index} -cgi"
        raise DeviceError(
            f"cuda:{index} is in MIG mode, where a worker owns one instance: {remedy}, or end MIG mode with "
            f"nvidia-smi -i {index} -mig 0"
        )
    return device


class NvmlDevice:
    """One GPU, or one MIG instance. NVMLError, DeviceGoneError: the driver doesn't tell even what it is."""

    def __init__(self, index: int, instance: str = "") -> None:
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.device_id: str = instance or pynvml.nvmlDeviceGetUUID(self._handle)
        self._own = handles(instance)[0] if instance else self._handle
        self.info = self._identity(index)
        self.visible_devices = self.device_id
        # A simulated driver comes without CUDA: its workers' engines compute on the processor.
        self.engine_name = "cpu" if self.info.simulated else "cuda:0"
        self.compute_prohibited = self._ask("nvmlDeviceGetComputeMode") == pynvml.NVML_COMPUTEMODE_PROHIBITED
        # The driver said so at the last sample.
        self._gone = False
        # When the driver was opened, or the device last answered, by the monotonic clock.
        self._opened_s = 0.0
        # Functions that this device has said it will never answer.
        self._unsupported: set[str] = set()
        self._pcie_read: tuple[float | None, float | None] = (None, None)
        self._pcie_due_s = 0.0

    def sample(self) -> Telemetry:
        if self._gone:
            self._reopen()
        try:
            telemetry = self._telemetry()
        except DeviceGoneError:
            self._gone = True
            raise
        self._gone = False
        self._opened_s = time.monotonic()
        return telemetry

    def energy_joules(self) -> float | None:
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000

    def power_watts(self) -> float | None:
        milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1000

    # --- how it is ---------------------------------------------------------------------------------------------------

    def _telemetry(self) -> Telemetry:
        memory = self._memory()
        rates = self._ask("nvmlDeviceGetUtilizationRates")
        limit_milliwatts = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        sent_bytes, received_bytes = self._pcie_rates()
        return Telemetry(
            memory_total_bytes=None if memory is None else memory.total,
            memory_used_bytes=None if memory is None else memory.used,
            utilization=None if rates is None else rates.gpu / 100,
            memory_utilization=None if rates is None else rates.memory / 100,
            temperature_celsius=self._temperature(),
            power_watts=self.power_watts(),
            power_limit_watts=None if limit_milliwatts is None else limit_milliwatts / 1000,
            sm_clock_hertz=self._clock(pynvml.NVML_CLOCK_SM),
            memory_clock_hertz=self._clock(pynvml.NVML_CLOCK_MEM),
            throttle_reasons=self._throttle_reasons(),
            energy_joules=self.energy_joules(),
            ecc_corrected=self._ecc(pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._ecc(pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            remapped_rows=self._remapped_rows(),
            pcie_generation=self._ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            pcie_width=self._ask("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_sent_bytes=sent_bytes,
            pcie_received_bytes=received_bytes,
            nvlinks_active=self._nvlinks_active(),
            processes=self._processes(),
        )

    def _memory(self) -> Any:
        """Version 2 leaves what the driver keeps for itself out of `used`."""
        memory = self._ask("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2)
        return self._ask_now("nvmlDeviceGetMemoryInfo") if memory is None else memory

    def _temperature(self) -> float | None:
        celsius = self._ask("nvmlDeviceGetTemperatureV", pynvml.NVML_TEMPERATURE_GPU)
        if celsius is None:  # drivers before R560
            celsius = self._ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
        return None if celsius is None else float(celsius)

    def _clock(self, which: int) -> float | None:
        megahertz = self._ask("nvmlDeviceGetClockInfo", which)
        return None if megahertz is None else megahertz * 1e6

    def _throttle_reasons(self) -> tuple[str, ...]:
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # drivers before R535
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return tuple(name for bit, name in THROTTLE_REASONS.items() if (bits or 0) & bit)

    def _ecc(self, kind: int) -> int | None:
        errors: int | None = self._ask("nvmlDeviceGetTotalEccErrors", kind, pynvml.NVML_VOLATILE_ECC)
        return errors

    def _remapped_rows(self) -> RemappedRows | None:
        rows = self._ask("nvmlDeviceGetRemappedRows")
        if rows is None:
            return None
        correctable, uncorrectable, pending, failed = rows
        return RemappedRows(
            correctable=correctable, uncorrectable=uncorrectable, pending=bool(pending), failed=bool(failed)
        )

    def _pcie_rates(self) -> tuple[float | None, float | None]:
        """What goes to the device and comes from it, per second; at most PCIE_INTERVAL_S old."""
        now_s = time.monotonic()
        if now_s >= self._pcie_due_s:
            sent, received = pynvml.NVML_PCIE_UTIL_TX_BYTES, pynvml.NVML_PCIE_UTIL_RX_BYTES
            self._pcie_read, self._pcie_due_s = (self._pcie(sent), self._pcie(received)), now_s + PCIE_INTERVAL_S
        return self._pcie_read

    def _pcie(self, counter: int) -> float | None:
        kib = self._ask("nvmlDeviceGetPcieThroughput", counter)
        return None if kib is None else kib * 1024.0

    def _links(self) -> list[int] | None:
        """The NVLinks that are up; None if it has none at all."""
        states = []
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            state = self._ask("nvmlDeviceGetNvLinkState", link)
            if state is None:  # there are no more
                break
            states.append(state)
        return [link for link, up in enumerate(states) if up] if states else None

    def _nvlinks_active(self) -> int | None:
        links = self._links()
        return None if links is None else len(links)

    def _processes(self) -> tuple[DeviceProcess, ...]:
        found: dict[int, DeviceProcess] = {}
        since_us = int((time.time() - IDLE_S) * 1e6)
        samples = self._ask_now("nvmlDeviceGetProcessUtilization", since_us) or ()
        working = {sample.pid for sample in samples if sample.smUtil}
        for function, mps in (
            ("nvmlDeviceGetComputeRunningProcesses_v3", False),
            ("nvmlDeviceGetMPSComputeRunningProcesses_v3", True),
        ):
            listed = (self._ask(function) or ())[:PROCESSES_MAX]
            # A driver that names none of them doesn't tell of such processes.
            told = not working.isdisjoint(process.pid for process in listed)
            for process in listed:
                found[process.pid] = DeviceProcess(
                    pid=process.pid,
                    memory_used_bytes=process.usedGpuMemory,
                    mps_client=mps,
                    idle=told and process.pid not in working,
                )
        return tuple(found.values())

    # --- what it is --------------------------------------------------------------------------------------------------

    def _identity(self, index: int) -> DeviceInfo:
        self._unsupported = set()
        memory = self._memory()
        capability = self._ask("nvmlDeviceGetCudaComputeCapability")
        driver = _ask_system("nvmlSystemGetDriverVersion") or ""
        cuda = _ask_system("nvmlSystemGetCudaDriverVersion_v2")
        mig = self._ask("nvmlDeviceGetMigMode")
        return DeviceInfo(
            device_id=self.device_id,
            name=f"cuda:{index}",
            product=self._ask("nvmlDeviceGetName") or "",
            memory_total_bytes=0 if memory is None else memory.total,
            compute_capability="" if capability is None else "{}.{}".format(*capability),
            pci_bus_id=_bus_id(self._ask("nvmlDeviceGetPciInfo")),
            driver_version=driver,
            cuda_version="" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            mig_enabled=bool(mig and mig[0]),
            mig_device_ids=tuple(self._mig_device_ids()) if mig and mig[0] else (),
            # Instances have no ways to other devices.
            peers=tuple(self._peers(index)) if self._own is self._handle else (),
            simulated="simulated" in driver.lower(),
        )

    def _mig_device_ids(self) -> Iterator[str]:
        for index in range(self._ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
            instance = self._ask_now("nvmlDeviceGetMigDeviceHandleByIndex", index)
            if instance is not None:  # they may be numbered with gaps
                yield pynvml.nvmlDeviceGetUUID(instance)

    def _peers(self, index: int) -> Iterator[DevicePeer]:
        links = self._links() or []
        ends = [_bus_id(self._ask_now("nvmlDeviceGetNvLinkRemotePciInfo", link)) for link in links]
        switched = sum(
            self._ask_now("nvmlDeviceGetNvLinkRemoteDeviceType", link) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
            for link in links
        )
        for other in range(pynvml.nvmlDeviceGetCount()):
            if other == index:
                continue
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(other)
            except pynvml.NVMLError:  # it is lost, or not ours to see
                continue
            bus_id = _bus_id(_tell("nvmlDeviceGetPciInfo", handle))
            nvlinks = ends.count(bus_id) if bus_id else 0
            over_nvlink = self._ask_now("nvmlDeviceGetP2PStatus", handle, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if not nvlinks and switched and over_nvlink == pynvml.NVML_P2P_STATUS_OK:
                nvlinks = switched  # all of them lead to the switch, and from there to every peer
            ancestor = self._ask_now("nvmlDeviceGetTopologyCommonAncestor", handle)
            yield DevicePeer(
                device_id=_tell("nvmlDeviceGetUUID", handle) or bus_id,
                nvlinks=nvlinks,
                common_ancestor=ANCESTORS.get(ancestor, ""),
            )

    # --- the driver --------------------------------------------------------------------------------------------------

    def _reopen(self) -> None:
        """The device may have come back since. DeviceGoneError: it has not."""
        try:
            if time.monotonic() - self._opened_s > ANEW_S:
                self._opened_s = time.monotonic()
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlShutdown()
                pynvml.nvmlInit()
            self._own, self._handle = handles(self.device_id)
        except pynvml.NVMLError as error:
            code = "gpu_is_lost" if error.value == NOT_FOUND else GONE.get(error.value, "gpu_is_lost")
            raise DeviceGoneError(code, f"the driver doesn't find {self.device_id}: {error}") from error
        self._unsupported.clear()  # its driver may be another one now

    def _ask(self, function: str, *arguments: Any) -> Any:
        """None: this device doesn't tell. What it says it will never tell isn't asked again."""
        key = f"{function}{arguments}"
        if key in self._unsupported:
            return None
        try:
            return self._call(function, *arguments)
        except pynvml.NVMLError as error:
            self._reject_gone(error)
            if error.value in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                self._unsupported.add(key)
            return None

    def _ask_now(self, function: str, *arguments: Any) -> Any:
        """As _ask, but of what may be told later."""
        try:
            return self._call(function, *arguments)
        except pynvml.NVMLError as error:
            self._reject_gone(error)
            return None

    def _call(self, function: str, *arguments: Any) -> Any:
        return getattr(pynvml, function)(self._own if function in OF_INSTANCE else self._handle, *arguments)

    def _reject_gone(self, error: Any) -> None:
        code = GONE.get(error.value)
        if code is not None:
            raise DeviceGoneError(code, f"the driver says of {self.device_id}: {error}") from error


def _tell(function: str, handle: Any) -> Any:
    """What the driver says of another device; None if it doesn't."""
    try:
        return getattr(pynvml, function)(handle)
    except pynvml.NVMLError:
        return None


def _ask_system(function: str) -> Any:
    try:
        return getattr(pynvml, function)()
    except pynvml.NVMLError:
        return None


def _bus_id(pci: Any) -> str:
    if pci is None:
        return ""
    bus_id = pci.busId
    return (bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else str(bus_id)).upper()

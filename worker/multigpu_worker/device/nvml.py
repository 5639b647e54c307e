"""The device of a GPU worker, through NVML. Needs neither torch nor CUDA."""

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
except ImportError:  # a CPU worker needs none
    pynvml = None

# nvmlGpuTopologyLevel_t.
ANCESTORS = {
    0: "internal",
    10: "single switch",
    20: "multiple switches",
    30: "host bridge",
    40: "NUMA node",
    50: "system",
}
# Bits nvmlClocksEventReason…, without the one for an idle GPU.
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
# nvmlReturn_t.
GONE = {9: "driver_not_loaded", 15: "gpu_is_lost", 16: "reset_required"}
NOT_FOUND = 6
# Driver not loaded, library not found: a host without GPUs.
NO_DRIVER = (9, 12)
# The driver was updated, and its new kernel modules are not loaded.
MISMATCH = 18
# Functions that take a MIG instance's handle; all others take its GPU's.
INSTANCE_FUNCTIONS = frozenset(
    (
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetName",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    )
)
PROCESSES_MAX = 256
# The driver needs 20 ms to count PCIe traffic, in each direction.
PCIE_INTERVAL_S = 10.0
# Time without computing after which a process is idle. The driver samples utilization every 1/6 to 1 s.
IDLE_S = 2.0


def count() -> tuple[int, str]:
    """The number of NVIDIA devices, and the reason if it is 0. Opens NVML, so it must be called first.

    Raises DeviceError if there is a driver that cannot be used.
    """
    if pynvml is None:
        return 0, "nvidia-ml-py is not installed, it comes with multigpu[worker]"
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount(), "none is visible to the driver"
    except pynvml.NVMLError as error:
        if error.value in NO_DRIVER:
            return 0, str(error)
        remedy = "restart the host, which loads it" if error.value == MISMATCH else "look into it with nvidia-smi"
        raise DeviceError(f"the NVIDIA driver can't be used ({error}): {remedy}, or choose --device cpu") from error


def index_of(device_id: str) -> int | None:
    """The index of the GPU with this UUID or with this MIG instance; None if there is none."""
    try:
        device = pynvml.nvmlDeviceGetHandleByUUID(device_id)
        if device_id.startswith("MIG-"):
            device = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
        return int(pynvml.nvmlDeviceGetIndex(device))
    except pynvml.NVMLError:
        return None


def handles(info: DeviceInfo) -> tuple[Any, Any]:
    """The handles of a device and of its GPU; they differ for a MIG instance. Raises NVMLError.

    Finds them by PCI address, because a search by UUID opens other GPUs, which then cannot be reset.
    """
    gpu = pynvml.nvmlDeviceGetHandleByPciBusId(info.pci_bus_id)
    if not info.device_id.startswith("MIG-"):
        return gpu, gpu
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        with contextlib.suppress(pynvml.NVMLError):  # indexes may have gaps
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
            if pynvml.nvmlDeviceGetUUID(instance) == info.device_id:
                return instance, gpu
    raise pynvml.NVMLError(NOT_FOUND)


def open_at(index: int, instance: str = "") -> "NvmlDevice":
    """Open a GPU, or the MIG instance on it with this UUID. Raises DeviceError."""
    try:
        device = NvmlDevice(index, instance)
    except (pynvml.NVMLError, DeviceGoneError) as error:
        raise DeviceError(
            f"cuda:{index} is there, but can't be used ({error}); look into it with nvidia-smi, reset it or restart "
            "the host, or choose another device"
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
    """One GPU or MIG instance. The constructor raises NVMLError or DeviceGoneError."""

    visible_variable = "CUDA_VISIBLE_DEVICES"
    reports_events = True

    def __init__(self, index: int, instance: str = "") -> None:
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.device_id: str = instance or pynvml.nvmlDeviceGetUUID(self._handle)
        self._own = pynvml.nvmlDeviceGetHandleByUUID(instance) if instance else self._handle
        self.info = self._identity(index)
        self.visible_devices = self.device_id
        # A simulated driver has no CUDA: engines compute on the CPU.
        self.engine_name = "cpu" if self.info.simulated else "cuda:0"
        self.compute_prohibited = self._ask("nvmlDeviceGetComputeMode") == pynvml.NVML_COMPUTEMODE_PROHIBITED
        self._pcie_read: tuple[float | None, float | None] = (None, None)
        self._pcie_due_s = 0.0
        # Close the other GPUs, which the search for peers has opened.
        self._released = False
        self.release()
        self._reopen()

    def sample(self) -> Telemetry:
        try:
            if self._released:
                self._reopen()
            return self._telemetry()
        except DeviceGoneError:  # after a reset, NVML may find the device only when NVML has been opened again
            self.release()
            raise

    def release(self) -> None:
        if not self._released:
            self._released = True
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def energy_joules(self) -> float | None:
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000

    def power_watts(self) -> float | None:
        milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1000

    # --- telemetry ---------------------------------------------------------------------------------------------------

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
        """In version 2 of the struct, `used` excludes the driver's reserved memory. Older drivers have version 1."""
        memory = self._ask("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2)
        return self._ask("nvmlDeviceGetMemoryInfo") if memory is None else memory

    def _temperature(self) -> float | None:
        celsius = self._ask("nvmlDeviceGetTemperatureV", pynvml.NVML_TEMPERATURE_GPU)
        if celsius is None:  # drivers before R560
            celsius = self._ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU)
        return None if celsius is None else float(celsius)

    def _clock(self, which: int) -> float | None:
        megahertz = self._ask("nvmlDeviceGetClockInfo", which)
        return None if megahertz is None else megahertz * 1e6

    def _throttle_reasons(self) -> tuple[str, ...]:
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons") or 0
        return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)

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
        """Bytes per second to and from the device, at most PCIE_INTERVAL_S old."""
        now_s = time.monotonic()
        if now_s >= self._pcie_due_s:
            sent, received = pynvml.NVML_PCIE_UTIL_TX_BYTES, pynvml.NVML_PCIE_UTIL_RX_BYTES
            self._pcie_read, self._pcie_due_s = (self._pcie(sent), self._pcie(received)), now_s + PCIE_INTERVAL_S
        return self._pcie_read

    def _pcie(self, counter: int) -> float | None:
        kib = self._ask("nvmlDeviceGetPcieThroughput", counter)
        return None if kib is None else kib * 1024.0

    def _links(self) -> list[int] | None:
        """Indexes of the NVLinks that are up; None if the device has no NVLinks."""
        states = []
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            state = self._ask("nvmlDeviceGetNvLinkState", link)
            if state is None:  # past the last link
                break
            states.append(state)
        return [link for link, up in enumerate(states) if up] if states else None

    def _nvlinks_active(self) -> int | None:
        links = self._links()
        return None if links is None else len(links)

    def _processes(self) -> tuple[DeviceProcess, ...]:
        found: dict[int, DeviceProcess] = {}
        since_us = int((time.time() - IDLE_S) * 1e6)
        samples = self._ask("nvmlDeviceGetProcessUtilization", since_us) or ()
        working = {sample.pid for sample in samples if sample.smUtil}
        for function, mps in (
            ("nvmlDeviceGetComputeRunningProcesses_v3", False),
            ("nvmlDeviceGetMPSComputeRunningProcesses_v3", True),
        ):
            listed = (self._ask(function) or ())[:PROCESSES_MAX]
            # If no process has a sample, the driver may not report utilization: then none counts as idle.
            sampled = not working.isdisjoint(process.pid for process in listed)
            for process in listed:
                found[process.pid] = DeviceProcess(
                    pid=process.pid,
                    memory_used_bytes=process.usedGpuMemory,
                    mps_client=mps,
                    idle=sampled and process.pid not in working,
                )
        return tuple(found.values())

    # --- identity ----------------------------------------------------------------------------------------------------

    def _identity(self, index: int) -> DeviceInfo:
        memory = self._memory()
        capability = self._ask("nvmlDeviceGetCudaComputeCapability")
        driver = _ask("nvmlSystemGetDriverVersion") or ""
        cuda = _ask("nvmlSystemGetCudaDriverVersion_v2")
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
            # NVML has no topology for MIG instances.
            peers=tuple(self._peers(index)) if self._own is self._handle else (),
            simulated="simulated" in driver.lower(),
        )

    def _mig_device_ids(self) -> Iterator[str]:
        for index in range(self._ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
            instance = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", index)
            if instance is not None:  # indexes may have gaps
                yield pynvml.nvmlDeviceGetUUID(instance)

    def _peers(self, index: int) -> Iterator[DevicePeer]:
        links = self._links() or []
        ends = [_bus_id(self._ask("nvmlDeviceGetNvLinkRemotePciInfo", link)) for link in links]
        switched = sum(
            self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", link) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
            for link in links
        )
        for other in range(pynvml.nvmlDeviceGetCount()):
            if other == index:
                continue
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(other)
            except pynvml.NVMLError:  # lost, or not visible to this process
                continue
            bus_id = _bus_id(_ask("nvmlDeviceGetPciInfo", handle))
            nvlinks = ends.count(bus_id) if bus_id else 0
            over_nvlink = self._ask("nvmlDeviceGetP2PStatus", handle, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
            if not nvlinks and switched and over_nvlink == pynvml.NVML_P2P_STATUS_OK:
                nvlinks = switched  # all links lead to an NVSwitch, which reaches every peer
            ancestor = self._ask("nvmlDeviceGetTopologyCommonAncestor", handle)
            yield DevicePeer(
                device_id=_ask("nvmlDeviceGetUUID", handle) or bus_id,
                nvlinks=nvlinks,
                common_ancestor=ANCESTORS.get(ancestor, ""),
            )

    # --- the driver --------------------------------------------------------------------------------------------------

    def _reopen(self) -> None:
        """Raises DeviceGoneError."""
        try:
            pynvml.nvmlInit()
            self._released = False
            self._own, self._handle = handles(self.info)
        except pynvml.NVMLError as error:
            code = "gpu_is_lost" if error.value == NOT_FOUND else GONE.get(error.value, "driver_not_loaded")
            raise DeviceGoneError(code, f"the driver doesn't find {self.device_id}: {error}") from error

    def _ask(self, function: str, *arguments: Any) -> Any:
        """The result of an NVML call; None if it fails, or this device does not support it. Raises DeviceGoneError."""
        try:
            return getattr(pynvml, function)(self._own if function in INSTANCE_FUNCTIONS else self._handle, *arguments)
        except pynvml.NVMLError as error:
            code = GONE.get(error.value)
            if code is not None:
                raise DeviceGoneError(code, f"the driver says of {self.device_id}: {error}") from error
            return None


def _ask(function: str, *arguments: Any) -> Any:
    """The result of an NVML call that is not about this device; None if it fails."""
    try:
        return getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError:
        return None


def _bus_id(pci: Any) -> str:
    if pci is None:
        return ""
    bus_id = pci.busId
    return (bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else str(bus_id)).upper()

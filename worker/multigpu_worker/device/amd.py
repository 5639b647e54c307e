"""The device of a worker on an AMD GPU, through AMD SMI. Needs neither torch nor HIP.

The package amdsmi binds the host's libamd_smi, so its version has to be that of the installed ROCm. "rocm:0" is the
first GPU of `amd-smi list`. HIP may count differently: the engine gets its GPU by the identifier that HIP uses.

`python -m multigpu_worker.device.amd` prints the GPUs as a JSON object, for callers that a broken driver must not hang.
"""

import contextlib
import functools
import importlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from multigpu_worker.device.interface import (
    DeviceError,
    DeviceGoneError,
    DeviceInfo,
    DevicePeer,
    DeviceProcess,
    Telemetry,
)

# amdsmi_status_t: the device is not found, the driver is not loaded, or it could not restart the device.
GONE = {31: "gpu_is_lost", 34: "driver_not_loaded", 51: "driver_not_loaded", 54: "reset_required"}
# What AMD SMI returns for a value that the device does not have: the largest number of 16, 32 or 64 bits, or "N/A".
UNKNOWN = {0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF, "N/A"}
# PCIe generation by megatransfers a second.
PCIE_GENERATIONS = {2500: 1, 5000: 2, 8000: 3, 16000: 4, 32000: 5, 64000: 6}
THROTTLE_REASONS = {
    "sw_power_cap": ("active_ppt_pwr",),
    "hw_slowdown": ("active_prochot_thrm",),
    "hw_thermal_slowdown": ("active_socket_thrm", "active_vr_thrm", "active_hbm_thrm"),
}
PROCESSES_MAX = 256
# AMD SMI compares two readings to see what slows a device down, and waits in between.
THROTTLE_INTERVAL_S = 10.0


@functools.cache
def _smi() -> Any:
    """The package amdsmi. Raises ImportError if it is not installed; OSError, KeyError or AttributeError if there is no
    libamd_smi of the same version.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # amdsmi prints that it finds no library
        return importlib.import_module("amdsmi")


def count() -> tuple[int, str]:
    """The number of AMD GPUs, and the reason if it is 0. Opens AMD SMI, so it must be called first.

    Raises DeviceError if there is a driver that cannot be used.
    """
    try:
        _smi()
    except ImportError:
        return 0, "amdsmi is not installed, it comes with multigpu[rocm]"
    except (OSError, KeyError, AttributeError) as error:
        return 0, f"there is no libamd_smi of the same version as amdsmi ({error!r})"
    try:
        _smi().amdsmi_init()
        return len(_smi().amdsmi_get_processor_handles()), "none is visible to the driver"
    except _smi().AmdSmiException as error:
        if GONE.get(_code(error)) == "driver_not_loaded":
            return 0, _text(error)
        raise DeviceError(
            f"the AMD driver can't be used ({_text(error)}): look into it with amd-smi, or choose --device cpu"
        ) from error


def index_of(device_id: str) -> int | None:
    """The index of the GPU with this identifier; None if there is none."""
    return next((index for index, _, identifier in _listed() if identifier == device_id), None)


def visible() -> dict[str, str]:
    """Name ("rocm:0") -> identifier of each GPU that ROCR_VISIBLE_DEVICES allows; empty if there is none.

    Raises DeviceError if there is a driver that cannot be used.
    """
    if not count()[0]:
        return {}
    gpus = {f"rocm:{index}": (str(hip_index), identifier) for index, hip_index, identifier in _listed()}
    allowed = os.environ.get("ROCR_VISIBLE_DEVICES")
    entries = None if allowed is None else {entry.strip() for entry in allowed.split(",")}
    return {name: names[1] for name, names in gpus.items() if entries is None or entries & {*names}}


def _listed() -> Iterator[tuple[int, int, str]]:
    """AMD SMI's index, HIP's index and HIP's identifier of each GPU that answers."""
    for index, handle in enumerate(_smi().amdsmi_get_processor_handles()):
        with contextlib.suppress(_smi().AmdSmiException):
            identity = _smi().amdsmi_get_gpu_enumeration_info(handle)
            yield index, identity["hip_id"], identity["hip_uuid"]


def open_at(index: int) -> "AmdDevice":
    """Open a GPU. Raises DeviceError."""
    try:
        return AmdDevice(index)
    except (_smi().AmdSmiException, DeviceGoneError) as error:
        raise DeviceError(
            f"rocm:{index} is there, but can't be used ({_text(error)}); look into it with amd-smi, reset it with "
            f"amd-smi reset -G -g {index} or restart the host, or choose another device"
        ) from error


class AmdDevice:
    """One AMD GPU, or one of its partitions. The constructor raises AmdSmiException or DeviceGoneError."""

    visible_variable = "ROCR_VISIBLE_DEVICES"
    compute_prohibited = False
    # AMD SMI reports resets and page faults to root only.
    reports_events = False

    def __init__(self, index: int) -> None:
        self._handle = _smi().amdsmi_get_processor_handles()[index]
        self._bus_id: str = _smi().amdsmi_get_gpu_device_bdf(self._handle)
        self.info = self._identity(index)
        self.visible_devices = self.info.device_id
        # A simulated driver has no HIP: engines compute on the CPU.
        self.engine_name = "cpu" if self.info.simulated else "cuda:0"  # as torch calls it in its build for ROCm
        self._throttled: tuple[str, ...] = ()
        self._throttle_due_s = 0.0
        self._released = False

    def sample(self) -> Telemetry:
        try:
            if self._released:
                self._reopen()
            return self._telemetry()
        except DeviceGoneError:
            self.release()
            raise

    def release(self) -> None:
        if not self._released:
            self._released = True
            with contextlib.suppress(_smi().AmdSmiException):
                _smi().amdsmi_shut_down()

    def energy_joules(self) -> float | None:
        counter = self._ask("amdsmi_get_energy_count")
        if counter is None or counter["energy_accumulator"] in UNKNOWN:
            return None
        return float(counter["energy_accumulator"] * counter["counter_resolution"]) / 1e6  # in microjoules

    def power_watts(self) -> float | None:
        power = self._ask("amdsmi_get_power_info") or {}
        # MI300 and later report the current power, earlier devices the average.
        for name in ("current_socket_power", "average_socket_power"):
            watts = _known(power, name)
            if watts is not None:
                return float(watts)
        return None

    # --- telemetry ---------------------------------------------------------------------------------------------------

    def _telemetry(self) -> Telemetry:
        vram = _smi().AmdSmiMemoryType.VRAM
        total_bytes = self._ask("amdsmi_get_gpu_memory_total", vram)
        activity = self._ask("amdsmi_get_gpu_activity") or {}
        power_watts = self.power_watts()
        if total_bytes is None and not activity and power_watts is None:
            raise DeviceGoneError("gpu_is_lost", f"the driver has no value of {self.info.device_id}")
        limit = self._ask("amdsmi_get_power_cap_info")
        ecc = self._ask("amdsmi_get_gpu_total_ecc_count") or {}
        link = (self._ask("amdsmi_get_pcie_info") or {}).get("pcie_metric", {})
        return Telemetry(
            memory_total_bytes=total_bytes,
            memory_used_bytes=self._ask("amdsmi_get_gpu_memory_usage", vram),
            utilization=_share(activity, "gfx_activity"),
            memory_utilization=_share(activity, "umc_activity"),
            temperature_celsius=self._temperature(),
            power_watts=power_watts,
            power_limit_watts=None if limit is None else limit["power_cap"] / 1e6,
            sm_clock_hertz=self._clock(_smi().AmdSmiClkType.GFX),
            memory_clock_hertz=self._clock(_smi().AmdSmiClkType.MEM),
            throttle_reasons=self._throttle_reasons(),
            energy_joules=self.energy_joules(),
            ecc_corrected=ecc.get("correctable_count"),
            ecc_uncorrected=ecc.get("uncorrectable_count"),
            pcie_generation=PCIE_GENERATIONS.get(link.get("pcie_speed", 0)),
            pcie_width=_known(link, "pcie_width"),
            processes=tuple(self._processes()),
        )

    def _temperature(self) -> float | None:
        current = _smi().AmdSmiTemperatureMetric.CURRENT
        for sensor in (_smi().AmdSmiTemperatureType.HOTSPOT, _smi().AmdSmiTemperatureType.EDGE):
            celsius = self._ask("amdsmi_get_temp_metric", sensor, current)
            if celsius is not None:
                return float(celsius)
        return None

    def _clock(self, which: Any) -> float | None:
        megahertz = _known(self._ask("amdsmi_get_clock_info", which) or {}, "clk")
        return None if megahertz is None else megahertz * 1e6

    def _throttle_reasons(self) -> tuple[str, ...]:
        """The throttle reasons, by NVML's names, at most THROTTLE_INTERVAL_S old. Only MI300 and later report them."""
        now_s = time.monotonic()
        if now_s >= self._throttle_due_s:
            self._throttle_due_s = now_s + THROTTLE_INTERVAL_S
            active = self._ask("amdsmi_get_violation_status") or {}
            self._throttled = tuple(
                name for name, fields in THROTTLE_REASONS.items() if any(active.get(field) is True for field in fields)
            )
        return self._throttled

    def _processes(self) -> Iterator[DeviceProcess]:
        for process in (self._ask("amdsmi_get_gpu_process_list") or ())[:PROCESSES_MAX]:
            yield DeviceProcess(pid=process["pid"], memory_used_bytes=process["memory_usage"]["vram_mem"])

    # --- identity ----------------------------------------------------------------------------------------------------

    def _identity(self, index: int) -> DeviceInfo:
        asic = self._ask("amdsmi_get_gpu_asic_info") or {}
        driver = (self._ask("amdsmi_get_gpu_driver_info") or {}).get("driver_version", "")
        target = asic.get("target_graphics_version", "")
        return DeviceInfo(
            device_id=_smi().amdsmi_get_gpu_enumeration_info(self._handle)["hip_uuid"],
            name=f"rocm:{index}",
            product=f"{asic.get('market_name', 'AMD GPU')} ({target})" if target else "AMD GPU",
            memory_total_bytes=self._ask("amdsmi_get_gpu_memory_total", _smi().AmdSmiMemoryType.VRAM) or 0,
            compute_capability=capability_of(target),
            pci_bus_id=self._bus_id.upper(),
            driver_version=driver,
            peers=tuple(self._peers()),
            simulated="simulated" in driver.lower(),
        )

    def _peers(self) -> Iterator[DevicePeer]:
        for other in _smi().amdsmi_get_processor_handles():
            if other.value == self._handle.value:
                continue
            link = self._ask("amdsmi_topo_get_link_type", other)
            identity = _call(_smi().amdsmi_get_gpu_enumeration_info, other)
            if link is not None and identity is not None:
                direct = link["type"] == _smi().AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI and link["hops"] == 1
                yield DevicePeer(device_id=identity["hip_uuid"], nvlinks=int(direct))

    # --- the driver --------------------------------------------------------------------------------------------------

    def _reopen(self) -> None:
        """Raises DeviceGoneError."""
        try:
            _smi().amdsmi_init()
            self._released = False
            self._handle = _smi().amdsmi_get_processor_handle_from_bdf(self._bus_id)
        except _smi().AmdSmiException as error:
            code = GONE.get(_code(error), "gpu_is_lost")
            raise DeviceGoneError(code, f"the driver doesn't find {self.info.device_id}: {_text(error)}") from error

    def _ask(self, function: str, *arguments: Any) -> Any:
        """The result of a call; None if it fails, or this device does not support it. Raises DeviceGoneError."""
        try:
            return getattr(_smi(), function)(self._handle, *arguments)
        except _smi().AmdSmiException as error:
            code = GONE.get(_code(error))
            if code is not None:
                raise DeviceGoneError(code, f"the driver says of {self._bus_id}: {_text(error)}") from error
            return None


def capability_of(target: str) -> str:
    """The compute capability that HIP gives for a target: 9.4 for gfx942, 11.0 for gfx1100. Empty: none is known."""
    match = re.fullmatch(r"gfx(\d+)([0-9a-f])[0-9a-f]", target)
    return f"{match[1]}.{int(match[2], 16)}" if match else ""


def _known(values: dict[str, Any], name: str) -> Any:
    value = values.get(name)
    return None if value in UNKNOWN else value


def _share(values: dict[str, Any], name: str) -> float | None:
    percent = _known(values, name)
    return None if percent is None else percent / 100


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except _smi().AmdSmiException:
        return None


def _code(error: Exception) -> int:
    return int(getattr(error, "err_code", None) or 0)


def _text(error: Exception) -> str:
    return " ".join(str(getattr(error, "err_info", None) or error).split())


def main() -> None:
    try:
        answer: dict[str, Any] = {"devices": visible()}
    except DeviceError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))  # noqa: T201  for the parent process


if __name__ == "__main__":
    main()

"""Several devices of one host, which one worker owns: for models that do not fit on one of them.

To the rest of the worker they are one device. Its description and its samples contain those of each member, and sums.
If one member is lost, all are closed: engines that use several of them can't go on.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from multigpu_worker.device.interface import (
    Device,
    DeviceError,
    DeviceGoneError,
    DeviceInfo,
    DeviceProcess,
    Telemetry,
)

T = TypeVar("T")
N = TypeVar("N", int, float)


class DeviceGroup:
    def __init__(self, devices: Sequence[Device]) -> None:
        """Raises DeviceError if the devices can't be used together."""
        infos = [device.info for device in devices]
        for info in infos:
            if info.device_id == "cpu":
                raise DeviceError("cpu is a device of its own: name GPUs only, or cpu alone")
            if info.mig_enabled:
                raise DeviceError(f"{info.name} is a MIG instance, of which CUDA lets a process use one: name it alone")
        if len({device.visible_variable for device in devices}) > 1:
            raise DeviceError("the devices are of different vendors: name those of one")
        ids = Counter(info.device_id for info in infos)
        if twice := [device_id for device_id, count in ids.items() if count > 1]:
            raise DeviceError(f"{twice[0]} is named twice")
        self._devices = devices
        self.visible_variable = devices[0].visible_variable
        self.visible_devices = ",".join(device.visible_devices for device in devices)
        self.engine_name = devices[0].engine_name
        self.compute_prohibited = any(device.compute_prohibited for device in devices)
        self.reports_events = devices[0].reports_events
        first = infos[0]
        self.info = DeviceInfo(
            device_id=f"{first.device_id}+{len(infos) - 1}",
            name=",".join(info.name for info in infos),
            product=" + ".join(f"{count} x {product}" for product, count in Counter(i.product for i in infos).items()),
            memory_total_bytes=sum(info.memory_total_bytes for info in infos),
            compute_capability=min((info.compute_capability for info in infos), key=_version),
            driver_version=first.driver_version,
            cuda_version=first.cuda_version,
            simulated=first.simulated,
            members=tuple(infos),
        )

    def sample(self) -> Telemetry:
        """Raises DeviceGoneError if one of the devices can't be used."""
        return combined_telemetry(self._each(lambda device: device.sample()))

    def release(self) -> None:
        for device in self._devices:
            device.release()

    def energy_joules(self) -> float | None:
        return _sum(self._each(lambda device: device.energy_joules()))

    def power_watts(self) -> float | None:
        return _sum(self._each(lambda device: device.power_watts()))

    def _each(self, read: Callable[[Device], T]) -> list[T]:
        """The results of `read` for each device. Raises DeviceGoneError with the name of the device in its message."""
        found = []
        for device in self._devices:
            try:
                found.append(read(device))
            except DeviceGoneError as error:
                raise DeviceGoneError(error.code, f"{device.info.name}: {error}") from error
        return found


def combined_telemetry(members: Sequence[Telemetry]) -> Telemetry:
    """The sample of a group. Values that can't be combined are only in its `members`."""
    rates = [member.utilization for member in members if member.utilization is not None]
    return Telemetry(
        memory_total_bytes=_sum(member.memory_total_bytes for member in members),
        memory_used_bytes=_sum(member.memory_used_bytes for member in members),
        memory_free_bytes=_least_free(members),
        utilization=sum(rates) / len(rates) if len(rates) == len(members) else None,
        temperature_celsius=max(
            (m.temperature_celsius for m in members if m.temperature_celsius is not None), default=None
        ),
        power_watts=_sum(member.power_watts for member in members),
        power_limit_watts=_sum(member.power_limit_watts for member in members),
        throttle_reasons=tuple(sorted({reason for member in members for reason in member.throttle_reasons})),
        energy_joules=_sum(member.energy_joules for member in members),
        ecc_corrected=_sum(member.ecc_corrected for member in members),
        ecc_uncorrected=_sum(member.ecc_uncorrected for member in members),
        processes=_processes(members),
        members=tuple(members),
    )


def _sum(values: Iterable[N | None]) -> N | None:
    """The sum; None if there are no values, or if one is None."""
    total = None
    for value in values:
        if value is None:
            return None
        total = value if total is None else total + value
    return total


def _least_free(members: Sequence[Telemetry]) -> int | None:
    free = []
    for member in members:
        if member.memory_total_bytes is None or member.memory_used_bytes is None:
            return None
        free.append(max(0, member.memory_total_bytes - member.memory_used_bytes))
    return min(free)


def _processes(members: Sequence[Telemetry]) -> tuple[DeviceProcess, ...]:
    """Each process once, with its memory on all members."""
    by_pid: dict[int, list[DeviceProcess]] = {}
    for member in members:
        for process in member.processes:
            by_pid.setdefault(process.pid, []).append(process)
    return tuple(
        DeviceProcess(
            pid=pid,
            memory_used_bytes=_sum(each.memory_used_bytes for each in found),
            mps_client=any(each.mps_client for each in found),
            idle=all(each.idle for each in found),
        )
        for pid, found in by_pid.items()
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())

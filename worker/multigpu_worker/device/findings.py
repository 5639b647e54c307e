"""Finds what is wrong with a worker's device now, by its sensors and driver, as reasons for health.py."""

from collections.abc import Callable, Iterator, Sequence

from multigpu_worker.device.health import Reason, Severity
from multigpu_worker.device.interface import DeviceInfo, Telemetry
from multigpu_worker.device.sampler import Sample

# NVML's nvmlDeviceGpuRecoveryAction_t.
_RECOVERY_ACTIONS = {
    1: ("reset_required", "the driver requires a GPU reset: run nvidia-smi --gpu-reset", Severity.UNUSABLE),
    2: ("reboot_required", "the driver requires a restart of the host", Severity.UNUSABLE),
    3: ("drain_p2p", "the driver requires peer-to-peer traffic to stop, and then a GPU reset", Severity.SICK),
    4: (
        "reset_required",
        "the driver requires the GPU drained and reset: run nvidia-smi --gpu-reset",
        Severity.UNUSABLE,
    ),
    5: ("recover_imex", "the driver requires a recovery of its IMEX domain", Severity.SICK),
    6: ("reset_required", "the driver requires a reset of the GPU's PCIe bus", Severity.UNUSABLE),
    7: ("reboot_required", "the driver requires a restart of the system", Severity.UNUSABLE),
}
_THERMAL = {"hw_thermal_slowdown", "sw_thermal_slowdown"}
_POWER = {"hw_power_brake_slowdown", "board_limit"}


# Code and message of a condition, and a function that says whether a sample shows the condition.
_SENSORS: tuple[tuple[str, str, Callable[[Telemetry], bool]], ...] = (
    (
        "thermal_throttle",
        "too hot, so it runs slower: check its cooling",
        lambda telemetry: bool(_THERMAL.intersection(telemetry.throttle_reasons)),
    ),
    (
        "power_throttle",
        "short of power, so it runs slower: check its power supply",
        lambda telemetry: bool(_POWER.intersection(telemetry.throttle_reasons)),
    ),
    (
        "row_remap_failed",
        "a memory row could not be replaced, no spare row is left: have the GPU replaced",
        lambda telemetry: telemetry.remapped_rows is not None and telemetry.remapped_rows.failed,
    ),
    (
        "row_remap_pending",
        "a memory row will be replaced by a spare one: reset the GPU at the next opportunity",
        lambda telemetry: telemetry.remapped_rows is not None and telemetry.remapped_rows.pending,
    ),
)


def findings(info: DeviceInfo, sample: Sample, recovery_actions: Sequence[int | None]) -> Iterator[Reason]:
    """`recovery_actions`: NVML's for each device; 0 or None: none. In a group, a message names the devices affected."""
    if sample.gone:
        yield Reason(sample.gone_code, sample.gone, Severity.UNUSABLE)
    names = [member.name for member in info.members]
    for action in sorted({action for action in recovery_actions if action}):
        unknown = ("recovery_required", f"the driver requires recovery action {action}", Severity.SICK)
        code, message, severity = _RECOVERY_ACTIONS.get(action, unknown)
        yield Reason(code, _of(names, [each == action for each in recovery_actions]) + message, severity)
    for code, message, says in _SENSORS:
        if any(found := [says(each) for each in sample.telemetry.each]):
            yield Reason(code, _of(names, found) + message, Severity.DEGRADED)


def _of(names: Sequence[str], found: Sequence[bool]) -> str:
    """The devices for which something was found, as the beginning of a message; empty if `names` is."""
    which = [name for name, yes in zip(names, found, strict=False) if yes]
    return f"{', '.join(which)}: " if which else ""

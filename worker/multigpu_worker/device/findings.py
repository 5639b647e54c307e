"""What a device's sensors and driver say is wrong with it now, as reasons for health.py."""

from collections.abc import Iterator

from multigpu_worker.device.health import Gravity, Reason
from multigpu_worker.device.sampler import Sample

# NVML's nvmlDeviceGpuRecoveryAction_t.
_RECOVERY_ACTIONS = {
    1: ("reset_required", "the driver requires a GPU reset: run nvidia-smi --gpu-reset", Gravity.UNUSABLE),
    2: ("reboot_required", "the driver requires a restart of the host", Gravity.UNUSABLE),
    3: ("drain_p2p", "the driver requires peer-to-peer traffic to stop, and then a GPU reset", Gravity.SICK),
    4: (
        "reset_required",
        "the driver requires the GPU drained and reset: run nvidia-smi --gpu-reset",
        Gravity.UNUSABLE,
    ),
    5: ("recover_imex", "the driver requires a recovery of its IMEX domain", Gravity.SICK),
    6: ("reset_required", "the driver requires a reset of the GPU's PCIe bus", Gravity.UNUSABLE),
    7: ("reboot_required", "the driver requires a restart of the system", Gravity.UNUSABLE),
}
_THERMAL = {"hw_thermal_slowdown", "sw_thermal_slowdown"}
_POWER = {"hw_power_brake_slowdown", "board_limit"}


def findings(sample: Sample, recovery_action: int | None) -> Iterator[Reason]:
    """`recovery_action`: NVML's, 0 or None for none."""
    if sample.gone:
        yield Reason(sample.gone_code, sample.gone, Gravity.UNUSABLE)
    if recovery_action:
        unknown = ("recovery_required", f"the driver requires recovery action {recovery_action}", Gravity.SICK)
        yield Reason(*_RECOVERY_ACTIONS.get(recovery_action, unknown))
    throttle = set(sample.telemetry.throttle_reasons)
    if throttle & _THERMAL:
        yield Reason("thermal_throttle", "too hot, so it runs slower: check its cooling", Gravity.DEGRADED)
    if throttle & _POWER:
        message = "short of power, so it runs slower: check its power supply"
        yield Reason("power_throttle", message, Gravity.DEGRADED)
    rows = sample.telemetry.remapped_rows
    if rows is not None and rows.failed:
        message = "a memory row could not be replaced, no spare row is left: have the GPU replaced"
        yield Reason("row_remap_failed", message, Gravity.DEGRADED)
    if rows is not None and rows.pending:
        message = "a memory row will be replaced by a spare one: reset the GPU at the next opportunity"
        yield Reason("row_remap_pending", message, Gravity.DEGRADED)

"""Devices: description, telemetry and health as workers report them and operators see them.

The core reads a few fields. It also keeps the serialized message, without non-finite numbers and unknown fields, for
operators.
"""

import dataclasses
import math
from typing import Any

from google.protobuf.message import DecodeError
from multigpu.v1 import device_pb2, worker_service_pb2

from multigpu_master.core.model import Energy
from multigpu_master.core.workers.info import Health, HealthReason, HealthState, Telemetry, WorkerInfo
from multigpu_master.wire.times import seconds_of, set_time

# Of larger telemetry, the master keeps only the fields that the core reads; of a larger description, name and product.
BYTES_MAX = 64 << 10
REASONS_MAX, TEXT_CHARS_MAX = 16, 1 << 10
_CORE_FIELDS = tuple(f.name for f in dataclasses.fields(Telemetry) if f.name not in ("sample_s", "wire"))


def telemetry_of(message: device_pb2.DeviceTelemetry) -> Telemetry:
    """Converts a device's telemetry sample. Changes the message."""
    sample_s = seconds_of(message.sample_time)
    values = _clean(message)
    core_values = {name: values[name] for name in _CORE_FIELDS if name in values}
    message.ClearField("sample_time")
    wire = message.SerializeToString()
    if len(wire) > BYTES_MAX:
        wire = device_pb2.DeviceTelemetry(**core_values).SerializeToString()
    return Telemetry(sample_s=sample_s, wire=wire, **core_values)


def device_wire(message: device_pb2.Device) -> bytes:
    """Serializes a device's description. Changes the message."""
    _clean(message)
    wire = message.SerializeToString()
    if len(wire) > BYTES_MAX:
        wire = device_pb2.Device(name=message.name, product=message.product).SerializeToString()
    return wire


def serialize_cut(message: device_pb2.MpsStatus | worker_service_pb2.Handlers, *fields: str) -> bytes:
    """Serializes the message, with its text `fields` cut to TEXT_CHARS_MAX. Changes the message."""
    message.DiscardUnknownFields()
    for field in fields:
        setattr(message, field, getattr(message, field)[:TEXT_CHARS_MAX])
    return message.SerializeToString()


def _clean(message: device_pb2.Device | device_pb2.DeviceTelemetry) -> dict[str, Any]:
    """Removes non-finite numbers and unknown fields. Returns the fields that are left."""
    message.DiscardUnknownFields()
    for member in message.members:
        _clean(member)
    values = {field.name: value for field, value in message.ListFields()}
    if not math.isfinite(sum(value for value in values.values() if type(value) is float)):
        for name in [name for name, value in values.items() if type(value) is float and not math.isfinite(value)]:
            message.ClearField(name)
            del values[name]
    return values


def device_message(info: WorkerInfo) -> device_pb2.Device:
    """A device's description. Raises ValueError if the stored message is damaged."""
    try:
        message = device_pb2.Device.FromString(info.device_wire)
    except DecodeError as error:
        raise ValueError(f"the device's description is damaged: {error}") from error
    message.device_id = info.device_id
    if not message.members:
        message.memory_total_bytes = info.memory_total_bytes
    message.name = message.name or "cpu"
    return message


def telemetry_message(sample: Telemetry) -> device_pb2.DeviceTelemetry:
    """A device's telemetry sample, without the sample's time."""
    message = device_pb2.DeviceTelemetry.FromString(sample.wire)
    for name in _CORE_FIELDS:
        value = getattr(sample, name)
        if value is not None:
            setattr(message, name, value)
    return message


def energies(joules: list[float], method: int, uncertainty: float) -> list[Energy]:
    """Returns the energy of each task, or [] if any number is negative or not finite."""
    if not all(math.isfinite(x) and x >= 0.0 for x in (*joules, uncertainty)):
        return []
    return [Energy(x, method, uncertainty) for x in joules]


def health_of(m: device_pb2.DeviceHealth) -> Health:
    """A device's health. A state that this master does not know counts as SICK."""
    reasons = tuple(
        HealthReason(r.code[:TEXT_CHARS_MAX], r.message[:TEXT_CHARS_MAX], seconds_of(r.since_time))
        for r in m.reasons[:REASONS_MAX]
    )
    known = HealthState.HEALTHY <= m.state <= HealthState.RECOVERING
    return Health(
        state=HealthState(m.state) if known else HealthState.SICK,
        since_s=seconds_of(m.since_time),
        reasons=reasons,
        unusable=m.unusable,
        checks_passed=m.checks_passed,
        next_check_s=seconds_of(m.next_check_time) if m.HasField("next_check_time") else 0.0,
    )


def fill_health(message: device_pb2.DeviceHealth, health: Health) -> None:
    """Fills a DeviceHealth message."""
    message.state = int(health.state)  # type: ignore[assignment]  # enums are ints on the wire
    message.unusable, message.checks_passed = health.unusable, health.checks_passed
    if health.since_s:
        set_time(message.since_time, health.since_s)
    if health.next_check_s:
        set_time(message.next_check_time, health.next_check_s)
    for reason in health.reasons:
        each = message.reasons.add(code=reason.code, message=reason.message)
        set_time(each.since_time, reason.since_s)

"""What workers say of their devices: what the core reads of it, and all of it for those who ask.

The core carries the rest as the serialized message, which it never reads. Here it is freed of what makes no sense.
"""

import dataclasses
import math
from typing import TypeVar

from google.protobuf.message import DecodeError
from multigpu.v1 import device_pb2

from multigpu_master.core.model import Energy, Telemetry, WorkerInfo

# A worker that says more of its device has only what the core reads kept.
BYTES_MAX = 64 << 10
_READ = tuple(f.name for f in dataclasses.fields(Telemetry) if f.name not in ("sample_s", "wire"))
_M = TypeVar("_M", device_pb2.Device, device_pb2.DeviceTelemetry)


def telemetry(message: device_pb2.DeviceTelemetry, sample_s: float) -> Telemetry:
    """What a device says of how it is doing."""
    clean = _clean(message)
    clean.ClearField("sample_time")
    read = {name: getattr(clean, name) for name in _READ if clean.HasField(name)}
    if clean.ByteSize() > BYTES_MAX:
        clean = device_pb2.DeviceTelemetry(**read)
    return Telemetry(sample_s=sample_s, wire=clean.SerializeToString(), **read)


def device_wire(message: device_pb2.Device) -> bytes:
    """What a device is, serialized."""
    clean = _clean(message)
    return clean.SerializeToString() if clean.ByteSize() <= BYTES_MAX else b""


def _clean(message: _M) -> _M:
    """Without numbers that are none, and fields that this version doesn't know."""
    clean = type(message)()
    clean.CopyFrom(message)
    clean.DiscardUnknownFields()
    for field, value in clean.ListFields():
        if isinstance(value, float) and not math.isfinite(value):
            clean.ClearField(field.name)
    return clean


def device_message(info: WorkerInfo) -> device_pb2.Device:
    """What a device is. ValueError: what was kept of it is damaged."""
    try:
        message = device_pb2.Device.FromString(info.device_wire)
    except DecodeError as error:
        raise ValueError(f"the device's description is damaged: {error}") from error
    message.device_id, message.name, message.product = info.device_id, info.device_name, info.device_product
    message.memory_total_bytes = info.memory_total_bytes
    return message


def telemetry_message(told: Telemetry) -> device_pb2.DeviceTelemetry:
    """How a device is doing; without the sample's time."""
    message = device_pb2.DeviceTelemetry.FromString(told.wire)
    for name in _READ:
        value = getattr(told, name)
        if value is not None:
            setattr(message, name, value)
    return message


def energies(joules: list[float], method: int, uncertainty: float) -> list[Energy]:
    """What each task took; none if one of the figures makes no sense."""
    if not all(math.isfinite(x) and x >= 0.0 for x in (*joules, uncertainty)):
        return []
    return [Energy(x, method, uncertainty) for x in joules]

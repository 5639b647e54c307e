"""What workers say of their devices: what the core reads of it, and all of it for those who ask.

The core carries the rest as the serialized message, which it never reads. Here it is freed of what makes no sense.
"""

import dataclasses
import math
from typing import Any

from google.protobuf.message import DecodeError
from multigpu.v1 import device_pb2, worker_service_pb2

from multigpu_master.core.model import Energy
from multigpu_master.core.workers.info import Telemetry, WorkerInfo

# A worker that says more of its device has only what the core reads kept.
BYTES_MAX = 64 << 10
MPS_MESSAGE_CHARS_MAX = 1 << 10
HANDLERS_ERROR_CHARS_MAX = 1 << 10
_READ = tuple(f.name for f in dataclasses.fields(Telemetry) if f.name not in ("sample_s", "wire"))


def telemetry(message: device_pb2.DeviceTelemetry, sample_s: float) -> Telemetry:
    """What a device says of how it is doing. Takes the message for itself."""
    told = _clean(message)
    read = {name: told[name] for name in _READ if name in told}
    message.ClearField("sample_time")
    wire = message.SerializeToString()
    if len(wire) > BYTES_MAX:
        wire = device_pb2.DeviceTelemetry(**read).SerializeToString()
    return Telemetry(sample_s=sample_s, wire=wire, **read)


def device_wire(message: device_pb2.Device) -> bytes:
    """What a device is, serialized. Takes the message for itself."""
    _clean(message)
    wire = message.SerializeToString()
    return wire if len(wire) <= BYTES_MAX else b""


def mps(message: device_pb2.MpsStatus) -> bytes:
    """What a worker says of its GPU's MPS, serialized. Takes the message for itself."""
    message.DiscardUnknownFields()
    message.message = message.message[:MPS_MESSAGE_CHARS_MAX]
    return message.SerializeToString()


def handlers(message: worker_service_pb2.Handlers) -> bytes:
    """What a worker says of its handlers, serialized. Takes the message for itself."""
    message.DiscardUnknownFields()
    message.version, message.error = message.version[:64], message.error[:HANDLERS_ERROR_CHARS_MAX]
    return message.SerializeToString()


def _clean(message: device_pb2.Device | device_pb2.DeviceTelemetry) -> dict[str, Any]:
    """Frees it of numbers that are none, and of fields that this version doesn't know. Returns what it holds."""
    message.DiscardUnknownFields()
    told = {field.name: value for field, value in message.ListFields()}
    if not math.isfinite(sum(value for value in told.values() if type(value) is float)):
        for name in [name for name, value in told.items() if type(value) is float and not math.isfinite(value)]:
            message.ClearField(name)
            del told[name]
    return told


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

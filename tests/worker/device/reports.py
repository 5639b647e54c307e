"""What a scripted master has received from a worker about its device."""

from multigpu.v1 import device_pb2 as device
from multigpu.v1 import worker_service_pb2 as pb

from tests.worker.scripted_master import Stream

HEALTHY, DEGRADED = device.HEALTH_STATE_HEALTHY, device.HEALTH_STATE_DEGRADED
SICK, RECOVERING = device.HEALTH_STATE_SICK, device.HEALTH_STATE_RECOVERING
FAILED, RETURNED = pb.REPORT_STATE_FAILED, pb.REPORT_STATE_RETURNED


def health(stream: Stream) -> device.DeviceHealth:
    return stream.heartbeats[-1].health


def is_(stream: Stream, state: int) -> bool:
    return bool(stream.heartbeats) and health(stream).state == state


def codes(stream: Stream) -> list[str]:
    return [reason.code for reason in health(stream).reasons]


def broke(stream: Stream, lease_id: int) -> bool:
    return any(r.broke_engine for batch in stream.batches for r in batch.reports if r.lease_id == lease_id)

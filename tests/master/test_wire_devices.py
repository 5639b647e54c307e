"""Devices on the wire: valid and invalid descriptions, samples and energy."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from multigpu._transport.names import HELLO_BYTES_MAX
from multigpu.daemon.metrics import Sample
from multigpu.v1 import device_pb2, worker_service_pb2
from multigpu_master import settings
from multigpu_master.core import events as ev
from multigpu_master.core.model import Energy, Worker
from multigpu_master.core.workers.info import Health, HealthState, WorkerInfo
from multigpu_master.errors import InvalidMessageError
from multigpu_master.journal.payload_files import Payloads
from multigpu_master.metrics.devices import device_metrics, snapshots
from multigpu_master.wire import devices as wire_devices
from multigpu_master.wire import leases as wire_leases
from multigpu_master.wire import workers as wire_workers
from multigpu_master.wire.payloads import Peer


def test_fields_that_the_core_does_not_read_are_kept() -> None:
    message = device_pb2.DeviceTelemetry(
        memory_total_bytes=100, memory_used_bytes=0, energy_joules=12.5, throttle_reasons=["hw_slowdown"]
    )
    message.remapped_rows.SetInParent()
    message.processes.add(pid=7, mps_client=True)
    message.sample_time.FromSeconds(1000)
    parsed = wire_devices.telemetry_of(device_pb2.DeviceTelemetry.FromString(message.SerializeToString()))
    assert (parsed.sample_s, parsed.memory_total_bytes) == (1000.0, 100)
    assert (parsed.memory_used_bytes, parsed.utilization) == (0, None)
    worker = Worker(WorkerInfo(worker_id="w"), session=1, telemetry=parsed)
    assert wire_workers.worker_message(worker).telemetry == message


@pytest.mark.parametrize("device_id", ["GPU-1", "cpu"])
@pytest.mark.parametrize("state", HealthState)
def test_a_lost_workers_device_has_no_metrics(state: HealthState, device_id: str) -> None:
    """A lost worker's device has the state `lost` only: no other metric, and no field of the message."""
    message = device_pb2.DeviceTelemetry(throttle_reasons=["hw_slowdown"], power_watts=300.0, energy_joules=1.0)
    for field in ("memory_used_bytes", "memory_total_bytes", "temperature_celsius", "utilization", "ecc_corrected"):
        setattr(message, field, 1)
    message.remapped_rows.correctable = 1
    info = WorkerInfo(worker_id="w", device_id=device_id)
    worker = Worker(info, session=1, telemetry=wire_devices.telemetry_of(message), health=Health(state=state))

    def samples() -> list[Sample]:
        every = device_metrics(snapshots([worker]))
        return [sample for metric in every for sample in metric.samples]

    assert len(samples()) > 10
    assert wire_workers.worker_message(worker).telemetry.power_watts == 300.0
    worker.session = 0
    assert samples() == [Sample(1.0, {"worker_id": "w", "device_id": device_id, "state": "lost"})]
    sent = wire_workers.worker_message(worker)
    assert not sent.HasField("telemetry") and not sent.HasField("health")


def test_a_non_finite_number_is_absent() -> None:
    message = device_pb2.DeviceTelemetry(power_watts=math.nan, energy_joules=math.inf, sm_clock_hertz=1e9)
    parsed = wire_devices.telemetry_of(message)
    assert parsed.power_watts is None
    assert wire_devices.telemetry_message(parsed) == device_pb2.DeviceTelemetry(sm_clock_hertz=1e9)


def test_a_large_message_keeps_only_the_fields_of_the_core() -> None:
    processes = [device_pb2.DeviceProcess(pid=1 << 31, memory_used_bytes=1 << 40)] * 10_000
    parsed = wire_devices.telemetry_of(
        device_pb2.DeviceTelemetry(utilization=0.5, energy_joules=1.0, processes=processes)
    )
    assert wire_devices.telemetry_message(parsed) == device_pb2.DeviceTelemetry(utilization=0.5)
    oversized = device_pb2.Device(device_id="GPU-1", name="cuda:0", mig_device_ids=["MIG-" + "x" * 36] * 2000)
    hello = worker_service_pb2.Hello(worker_id="w", slots=1, device=oversized)
    hello.capabilities.add(kind="k")
    info = wire_workers.worker_info(hello)
    assert wire_devices.device_message(info) == device_pb2.Device(device_id="GPU-1", name="cuda:0")


def test_every_worker_that_may_join_is_restored_from_its_setting() -> None:
    """What is saved has default fields and the newest catalog: it was larger than a hello may be."""
    hello = worker_service_pb2.Hello(worker_id="w", slots=1, device=device_pb2.Device(device_id="cpu", name="cpu"))
    capability = hello.capabilities.add(kind="run")
    while hello.ByteSize() < HELLO_BYTES_MAX - 100:
        capability.models.append("m" * 90)
    capability.models.append("m" * (HELLO_BYTES_MAX - hello.ByteSize() - 3))
    wire_workers.check_hello_size(hello)
    info = wire_workers.worker_info(hello)
    saved = wire_workers.hello_message(info)
    assert saved.ByteSize() > HELLO_BYTES_MAX
    restored: list[ev.Event] = []
    setting = {key: value for key, value in settings.worker_setting(Worker(info)).items() if value}
    settings.restore(restored.append, (), setting)
    (event,) = restored
    assert isinstance(event, ev.RegisterWorker)
    assert event.info == info


def test_the_device_survives_a_restart() -> None:
    device = device_pb2.Device(device_id="GPU-1", name="cuda:0", driver_version="580", mig_device_ids=["MIG-1"])
    device.peers.add(device_id="GPU-2", nvlinks=4)
    hello = worker_service_pb2.Hello(worker_id="w", slots=1, device=device)
    hello.capabilities.add(kind="k")
    worker = Worker(wire_workers.worker_info(hello))
    (kept,) = settings.worker_setting(worker).values()
    assert kept is not None
    restored = settings._registration(json.loads(kept)).info
    assert wire_workers.worker_message(Worker(restored)).device == device


def hello_of_several(*members: device_pb2.Device) -> worker_service_pb2.Hello:
    device = device_pb2.Device(device_id="GPU-1+1", name="cuda:0,cuda:1", memory_total_bytes=24, members=members)
    hello = worker_service_pb2.Hello(worker_id="w", slots=1, device=device)
    hello.capabilities.add(kind="k")
    return hello


def test_several_devices_count_as_the_smallest_and_are_shown_as_they_are() -> None:
    members = (
        device_pb2.Device(device_id="GPU-1", memory_total_bytes=16),
        device_pb2.Device(device_id="GPU-2", memory_total_bytes=8),
    )
    hello = hello_of_several(*members)
    worker = Worker(wire_workers.worker_info(hello))
    assert worker.info.memory_total_bytes == 8
    assert wire_workers.worker_message(worker).device == hello.device
    sample = device_pb2.DeviceTelemetry(memory_total_bytes=24, memory_used_bytes=10, memory_free_bytes=3)
    sample.members.add(power_watts=math.nan, memory_used_bytes=5)
    worker.telemetry = wire_devices.telemetry_of(sample)
    assert worker.memory_free_bytes() == 3
    (member,) = wire_devices.telemetry_message(worker.telemetry).members
    assert member == device_pb2.DeviceTelemetry(memory_used_bytes=5)


@pytest.mark.parametrize(("ids", "error"), [(("GPU-1", "GPU-1"), "twice"), (("GPU-1", "GPU\n2"), "device_id")])
def test_devices_of_a_worker_that_cannot_be_told_apart_are_rejected(ids: tuple[str, ...], error: str) -> None:
    with pytest.raises(InvalidMessageError, match=error):
        wire_workers.worker_info(hello_of_several(*(device_pb2.Device(device_id=each) for each in ids)))


def report(**fields: Any) -> Any:
    batch = worker_service_pb2.ReportBatch(succeeded_lease_ids=[1, 2], results=[b"a", b"b"], **fields)
    peer = Peer(Payloads(Path("none"), lambda _name: False))  # no result is in a file
    return wire_leases.reports_of(batch, 1, 0.0, 0.0, peer)


def test_energy_is_read_from_its_column() -> None:
    parsed = report(energy_joules=[1.5, 3.0], energy_method=1, energy_uncertainty=0.25)
    assert parsed.energy == [Energy(1.5, 1, 0.25), Energy(3.0, 1, 0.25)]


@pytest.mark.parametrize(
    "fields",
    [{"energy_joules": joules} for joules in ([], [1.0], [1.0, math.nan], [1.0, -2.0])]
    + [{"energy_joules": [1.0, 2.0], "energy_uncertainty": math.inf}],
)
def test_invalid_energy_is_ignored(fields: dict[str, Any]) -> None:
    assert report(**fields).energy == []


def test_a_worker_without_slots_is_rejected() -> None:
    hello = worker_service_pb2.Hello(worker_id="w")
    hello.capabilities.add(kind="k")
    with pytest.raises(InvalidMessageError, match="slots is 0"):
        wire_workers.worker_info(hello)

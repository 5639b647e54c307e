"""Devices on the wire: valid and invalid descriptions, samples and energy."""

import math
from typing import Any

import pytest
from multigpu.daemon.metrics import Histogram, Sample
from multigpu.v1 import device_pb2, task_pb2, worker_service_pb2
from multigpu_master import settings
from multigpu_master.core.model import Energy, Outcome, OutcomeState, Spec, Task, Worker
from multigpu_master.core.workers.info import Health, HealthState, WorkerInfo
from multigpu_master.journal.protocol import LargeBody
from multigpu_master.telemetry.device_metrics import device_metrics, snapshots
from multigpu_master.telemetry.latencies import Latencies
from multigpu_master.wire import devices as wire_devices
from multigpu_master.wire import leases as wire_leases
from multigpu_master.wire import outcomes as wire_outcomes
from multigpu_master.wire import workers as wire_workers
from multigpu_master.wire.validation import InvalidMessageError


def test_fields_that_the_core_does_not_read_are_kept() -> None:
    message = device_pb2.DeviceTelemetry(
        memory_total_bytes=100,
        memory_used_bytes=0,
        energy_joules=12.5,
        throttle_reasons=["hw_slowdown"],
        remapped_rows=device_pb2.RemappedRows(),
        processes=[device_pb2.DeviceProcess(pid=7, mps_client=True)],
    )
    message.sample_time.FromSeconds(1000)
    told = wire_devices.telemetry(device_pb2.DeviceTelemetry.FromString(message.SerializeToString()))
    assert (told.sample_s, told.memory_total_bytes, told.memory_used_bytes, told.utilization) == (1000.0, 100, 0, None)
    worker = Worker(WorkerInfo(worker_id="w"), session=1, telemetry=told)
    assert wire_workers.worker_message(worker).telemetry == message


@pytest.mark.parametrize("device_id", ["GPU-1", "cpu"])
@pytest.mark.parametrize("state", HealthState)
def test_a_lost_workers_device_has_no_metrics(state: HealthState, device_id: str) -> None:
    """Holds for every metric and every field of the message."""
    message = device_pb2.DeviceTelemetry(throttle_reasons=["hw_slowdown"], power_watts=300.0, energy_joules=1.0)
    for field in ("memory_used_bytes", "memory_total_bytes", "temperature_celsius", "utilization", "ecc_corrected"):
        setattr(message, field, 1)
    message.remapped_rows.correctable = 1
    info = WorkerInfo(worker_id="w", device_id=device_id)
    worker = Worker(info, session=1, telemetry=wire_devices.telemetry(message), health=Health(state=state))

    def samples() -> list[Sample]:
        every = device_metrics(snapshots([worker]), hardware=True)
        return [sample for metric in every for sample in metric.samples]

    assert len(samples()) > 10
    assert wire_workers.worker_message(worker).telemetry.power_watts == 300.0
    worker.session = 0
    assert samples() == [Sample(1.0, {"worker_id": "w", "device_id": device_id, "state": "lost"})]
    told = wire_workers.worker_message(worker)
    assert not told.HasField("telemetry")
    assert not told.HasField("health")


def test_a_non_finite_number_is_absent() -> None:
    message = device_pb2.DeviceTelemetry(power_watts=math.nan, energy_joules=math.inf, sm_clock_hertz=1e9)
    told = wire_devices.telemetry(message)
    assert told.power_watts is None
    assert wire_devices.telemetry_message(told) == device_pb2.DeviceTelemetry(sm_clock_hertz=1e9)


def test_of_a_large_message_the_cores_fields_are_kept() -> None:
    processes = [device_pb2.DeviceProcess(pid=1 << 31, memory_used_bytes=1 << 40)] * 10_000
    told = wire_devices.telemetry(device_pb2.DeviceTelemetry(utilization=0.5, energy_joules=1.0, processes=processes))
    assert wire_devices.telemetry_message(told) == device_pb2.DeviceTelemetry(utilization=0.5)
    much = device_pb2.Device(device_id="GPU-1", name="cuda:0", mig_device_ids=["MIG-" + "x" * 36] * 2000)
    hello = worker_service_pb2.Hello(worker_id="w", slots=1, device=much)
    hello.capabilities.add(kind="k")
    info = wire_workers.worker_info(hello)
    assert wire_devices.device_message(info) == device_pb2.Device(device_id="GPU-1", name="cuda:0")


def test_the_device_survives_a_restart() -> None:
    device = device_pb2.Device(device_id="GPU-1", name="cuda:0", driver_version="580", mig_device_ids=["MIG-1"])
    device.peers.add(device_id="GPU-2", nvlinks=4)
    hello = worker_service_pb2.Hello(worker_id="w", slots=1, device=device)
    hello.capabilities.add(kind="k")
    worker = Worker(wire_workers.worker_info(hello))
    (kept,) = settings.worker_setting(worker).values()
    assert kept is not None
    import json

    restored = settings._info(json.loads(kept)["info"])
    assert wire_workers.worker_message(Worker(restored)).device == device


def report(**fields: Any) -> Any:
    batch = worker_service_pb2.ReportBatch(succeeded_lease_ids=[1, 2], results=[b"a", b"b"], **fields)
    return wire_leases.reports_of(batch, 1, 0.0, 0.0, None)  # type: ignore[arg-type]  # no result lies elsewhere


def test_energy_is_read_from_its_column() -> None:
    told = report(energy_joules=[1.5, 3.0], energy_method=1, energy_uncertainty=0.25)
    assert told.energy == [Energy(1.5, 1, 0.25), Energy(3.0, 1, 0.25)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"energy_joules": [1.0]},
        {"energy_joules": [1.0, math.nan]},
        {"energy_joules": [1.0, -2.0]},
        {"energy_joules": [1.0, 2.0], "energy_uncertainty": math.inf},
    ],
)
def test_invalid_energy_is_ignored(fields: dict[str, Any]) -> None:
    assert report(**fields).energy == []


def test_energy_is_in_the_outcome_of_its_task_only() -> None:
    writer = wire_outcomes.OutcomeWriter()
    bodies = []
    for energy in (Energy(1.5, 1, 0.25), None, Energy(2.5, 2, 0.5)):
        task = Task(Spec(kind="k"), "", b"", task_id=1, attempts=1)
        task.outcome = Outcome(OutcomeState.SUCCEEDED, 1.0, b"r", energy=energy)
        body = writer.write(task)
        assert not isinstance(body, LargeBody)
        bodies.append(task_pb2.Outcome.FromString(body))
    assert [b.HasField("energy") for b in bodies] == [True, False, True]
    assert (bodies[0].energy.joules, bodies[0].energy.method, bodies[0].energy.uncertainty) == (1.5, 1, 0.25)
    assert bodies[2].energy.joules == 2.5


def test_a_result_keeps_its_content_type_after_an_outcome_without_a_result() -> None:
    writer = wire_outcomes.OutcomeWriter()
    types = []
    for result in (b"", b"{}", b""):
        task = Task(Spec(kind="k"), "", b"", task_id=1, attempts=1)
        task.outcome = Outcome(OutcomeState.SUCCEEDED, 1.0, result, content_type="application/json")
        body = writer.write(task)
        assert not isinstance(body, LargeBody)
        types.append(task_pb2.Outcome.FromString(body).content_type)
    assert types == ["", "application/json", ""]


def test_a_worker_without_slots_is_rejected() -> None:
    hello = worker_service_pb2.Hello(worker_id="w")
    hello.capabilities.add(kind="k")
    with pytest.raises(InvalidMessageError, match="slots is 0"):
        wire_workers.worker_info(hello)


def test_run_times_across_a_restart_of_the_master_are_not_counted() -> None:
    """Their task may have ended without a master; its finish_s is then the return of its worker."""
    latencies = Latencies(begin_s=100.0)
    for start_s in (0.0, 50.0, 100.0, 101.0):
        task = Task(Spec(kind="k"), "", b"", submit_s=40.0)
        task.outcome = Outcome(OutcomeState.SUCCEEDED, 103.0, dispatch_s=start_s, start_s=start_s)
        latencies.observe([task])
    counted = {each.name: each.samples[0].value for each in latencies.metrics()}
    run, duration = counted["mgpu_task_run_seconds"], counted["mgpu_task_duration_seconds"]
    assert isinstance(run, Histogram)
    assert isinstance(duration, Histogram)
    assert (sum(run.counts), run.total) == (2, 5.0)
    assert sum(duration.counts) == 4

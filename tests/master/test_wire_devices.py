"""What a worker says of its device, sense or nonsense, on its way through the master."""

import math
from typing import Any

import pytest
from multigpu.daemon.metrics import HistogramSample, Sample
from multigpu.v1 import device_pb2, task_pb2, worker_service_pb2
from multigpu_master import settings
from multigpu_master.core.model import Energy, Outcome, OutcomeState, Spec, Task, Worker
from multigpu_master.core.workers.info import Health, HealthState, WorkerInfo
from multigpu_master.journal.protocol import LargeBody
from multigpu_master.telemetry import device_metrics as metrics_devices
from multigpu_master.wire import devices as wire_devices
from multigpu_master.wire import messages as wire


def test_what_the_core_doesnt_read_comes_out_as_it_went_in() -> None:
    message = device_pb2.DeviceTelemetry(
        memory_total_bytes=100,
        memory_used_bytes=0,
        energy_joules=12.5,
        throttle_reasons=["hw_slowdown"],
        remapped_rows=device_pb2.RemappedRows(),
        processes=[device_pb2.DeviceProcess(pid=7, mps_client=True)],
    )
    message.sample_time.FromSeconds(1000)
    told = wire.telemetry(device_pb2.DeviceTelemetry.FromString(message.SerializeToString()))
    assert (told.sample_s, told.memory_total_bytes, told.memory_used_bytes, told.utilization) == (1000.0, 100, 0, None)
    worker = Worker(WorkerInfo(worker_id="w"), session=1, telemetry=told)
    assert settings.worker_message(worker).telemetry == message


@pytest.mark.parametrize("device_id", ["GPU-1", "cpu"])
@pytest.mark.parametrize("state", HealthState)
def test_whatever_a_lost_worker_said_last_nobody_is_told_of_its_device(state: HealthState, device_id: str) -> None:
    """A rule of every metric there is and of every field of the message, not of those of one defect."""
    message = device_pb2.DeviceTelemetry(throttle_reasons=["hw_slowdown"], power_watts=300.0, energy_joules=1.0)
    for field in ("memory_used_bytes", "memory_total_bytes", "temperature_celsius", "utilization", "ecc_corrected"):
        setattr(message, field, 1)
    message.remapped_rows.correctable = 1
    info = WorkerInfo(worker_id="w", device_id=device_id)
    worker = Worker(info, session=1, telemetry=wire.telemetry(message), health=Health(state=state))

    def samples() -> list[Sample | HistogramSample]:
        devices = metrics_devices.told(metrics_devices.words([worker]))
        every = (*metrics_devices.metrics(devices), *metrics_devices.hardware_metrics(devices))
        return [sample for metric in every for sample in metric.samples]

    assert len(samples()) > 10
    assert settings.worker_message(worker).telemetry.power_watts == 300.0
    worker.session = 0
    assert samples() == [Sample(1.0, {"worker_id": "w", "device_id": device_id, "state": "lost"})]
    told = settings.worker_message(worker)
    assert not told.HasField("telemetry")
    assert not told.HasField("health")


def test_a_number_that_is_none_is_absent() -> None:
    message = device_pb2.DeviceTelemetry(power_watts=math.nan, energy_joules=math.inf, sm_clock_hertz=1e9)
    told = wire.telemetry(message)
    assert told.power_watts is None
    assert wire_devices.telemetry_message(told) == device_pb2.DeviceTelemetry(sm_clock_hertz=1e9)


def test_who_says_too_much_has_what_strategies_read_kept() -> None:
    processes = [device_pb2.DeviceProcess(pid=1 << 31, memory_used_bytes=1 << 40)] * 10_000
    told = wire.telemetry(device_pb2.DeviceTelemetry(utilization=0.5, energy_joules=1.0, processes=processes))
    assert wire_devices.telemetry_message(told) == device_pb2.DeviceTelemetry(utilization=0.5)
    much = device_pb2.Device(device_id="GPU-1", name="cuda:0", mig_device_ids=["MIG-" + "x" * 36] * 2000)
    info = wire.worker_info(
        worker_service_pb2.Hello(worker_id="w", device=much, capabilities=[worker_service_pb2.Capability(kind="k")])
    )
    assert wire_devices.device_message(info) == device_pb2.Device(device_id="GPU-1", name="cuda:0")


def test_what_a_device_is_outlives_the_master() -> None:
    device = device_pb2.Device(device_id="GPU-1", name="cuda:0", driver_version="580", mig_device_ids=["MIG-1"])
    device.peers.add(device_id="GPU-2", nvlinks=4)
    hello = worker_service_pb2.Hello(worker_id="w", device=device)
    hello.capabilities.add(kind="k")
    worker = Worker(wire.worker_info(hello))
    (kept,) = settings.worker_setting(worker).values()
    assert kept is not None
    import json

    restored = settings._info(json.loads(kept)["info"])
    assert settings.worker_message(Worker(restored)).device == device


def report(**fields: Any) -> Any:
    batch = worker_service_pb2.ReportBatch(succeeded_lease_ids=[1, 2], results=[b"a", b"b"], **fields)
    return wire.reports_of(batch, 1, 0.0, 0.0, None)  # type: ignore[arg-type]  # no result lies elsewhere


def test_energy_comes_in_a_column() -> None:
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
def test_energy_that_makes_no_sense_was_not_measured(fields: dict[str, Any]) -> None:
    assert report(**fields).energy == []


def test_energy_is_in_the_outcome_of_its_task_and_no_other() -> None:
    writer = wire.OutcomeWriter()
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

"""Workers that own several simulated GPUs: what they report, and how they fall sick."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from multigpu_worker.device.group import DeviceGroup, combined_telemetry
from multigpu_worker.device.interface import DeviceInfo, DeviceProcess, Telemetry, visible_environment

from tests.fakes.gpus import SimulatedGpus
from tests.worker.asking import until
from tests.worker.conftest import HANDLERS, Start, StartWorker
from tests.worker.device.reports import DEGRADED, HEALTHY, RETURNED, SICK, codes, health, is_
from tests.worker.device.test_device import ask
from tests.worker.scripted_master import SUCCEEDED, ScriptedMaster

GROUP = ("--device", "cuda:1,cuda:2", "--handlers", "handlers_for_health")


def test_a_group_reports_each_device_and_sums(gpus: SimulatedGpus) -> None:
    gpus.heat(2, 71)
    gpus.process(1, os.getpid(), 1 << 30)
    gpus.process(2, os.getpid(), 3 << 30)
    info, telemetry = ask(gpus, f"cuda:1,{gpus.uuid(2)}")
    assert info.items() >= {"name": "cuda:1,cuda:2", "product": "2 x Simulated H200"}.items()
    assert info["device_id"] == f"{gpus.uuid(1)}+1"
    assert [member["device_id"] for member in info["members"]] == [gpus.uuid(1), gpus.uuid(2)]
    assert int(info["memory_total_bytes"]) == sum(int(member["memory_total_bytes"]) for member in info["members"])
    first, second = telemetry["members"]
    assert (second["temperature_celsius"], telemetry["temperature_celsius"]) == (71.0, 71.0)
    assert telemetry["power_watts"] == pytest.approx(first["power_watts"] + second["power_watts"])
    assert telemetry["energy_joules"] == pytest.approx(first["energy_joules"] + second["energy_joules"])
    free = [int(each["memory_total_bytes"]) - int(each["memory_used_bytes"]) for each in (first, second)]
    assert int(telemetry["memory_free_bytes"]) == min(free) == free[1]
    (process,) = telemetry["processes"]
    assert (process["pid"], int(process["memory_used_bytes"])) == (os.getpid(), 4 << 30)


def test_what_one_device_does_not_report_is_not_reported_of_the_group() -> None:
    one = Telemetry(memory_total_bytes=8, memory_used_bytes=2, utilization=0.5, energy_joules=1.0)
    both = combined_telemetry([one, Telemetry(memory_total_bytes=8, processes=(DeviceProcess(pid=1),))])
    assert (both.memory_total_bytes, both.memory_used_bytes, both.memory_free_bytes) == (16, None, None)
    assert (both.utilization, both.energy_joules, both.temperature_celsius) == (None, None, None)
    assert combined_telemetry([one, one]).utilization == 0.5


@pytest.mark.parametrize(("variable", "counted"), [("CUDA_VISIBLE_DEVICES", "a,b"), ("ROCR_VISIBLE_DEVICES", "0,1")])
def test_an_engine_sees_all_devices_of_a_group(variable: str, counted: str) -> None:
    """HIP counts what ROCR_VISIBLE_DEVICES has left."""
    devices: list[Any] = [
        SimpleNamespace(
            info=DeviceInfo(device_id=name, name=name, product="a GPU", memory_total_bytes=1),
            visible_variable=variable,
            visible_devices=name,
            engine_name="cuda:0",
            compute_prohibited=False,
            reports_events=False,
        )
        for name in ("a", "b")
    ]
    environment = visible_environment([DeviceGroup(devices)])
    assert environment[variable] == "a,b"
    assert environment["CUDA_VISIBLE_DEVICES"] == counted


@pytest.mark.parametrize(
    ("device", "error"),
    [
        ("cuda:0,cpu", "not a device"),
        ("cuda:0,", "not a device"),
        ("cuda:0,cuda:0", "is named twice"),
        ("cuda:0,cuda:9", "there is no cuda:9 here"),
    ],
)
async def test_a_wrong_group_is_rejected(
    gpus: SimulatedGpus, master: ScriptedMaster, start_worker: StartWorker, device: str, error: str
) -> None:
    worker = await start_worker(master.address, "--device", device, env=gpus.env())
    assert await worker.wait() in (2, 3)
    assert error in worker.log


async def test_the_worst_health_decides_and_its_message_names_the_device(gpus: SimulatedGpus, start: Start) -> None:
    _, stream = await start(*GROUP, pythonpath=HANDLERS, env=gpus.env())
    await stream.until(lambda: is_(stream, HEALTHY))
    gpus.throttle(2, 0x40)
    await stream.until(lambda: is_(stream, DEGRADED))
    assert codes(stream) == ["thermal_throttle"]
    assert health(stream).reasons[0].message.startswith("cuda:2: too hot")
    gpus.xid(1, 119)
    await stream.until(lambda: is_(stream, SICK))
    await stream.until(lambda: "xid_119" in codes(stream))
    message = next(reason.message for reason in health(stream).reasons if reason.code == "xid_119")
    assert message.startswith("cuda:1: XID 119")


@pytest.mark.slow
async def test_a_lost_device_releases_the_group_until_it_is_back(gpus: SimulatedGpus, start: Start) -> None:
    worker, stream = await start(*GROUP, pythonpath=HANDLERS, env=gpus.env())
    await stream.until(lambda: is_(stream, HEALTHY))
    stream.lease([(1, b"30")], kind="health.work")
    await stream.running(1)
    gpus.lose(2)
    assert (await stream.reported(1))[0].state == RETURNED
    await stream.until(lambda: "gpu_is_lost" in codes(stream))
    assert health(stream).reasons[0].message.startswith("cuda:2: ")
    await until(lambda: not worker.engine_pids(), "the end of the engine")
    gpus.return_(2, reset=True)
    await stream.until(lambda: is_(stream, HEALTHY), 30)
    assert (await stream.run(2, b"0", kind="health.work")).state == SUCCEEDED

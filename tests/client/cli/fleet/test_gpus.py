"""mgpuctl gpus: what it shows at any width and gives to programs, and the figures that a simulated driver was told."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from multigpu.cli import cli
from multigpu.cli.fleet import device_columns, gpus
from multigpu.fleet import Worker
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import device_pb2

from tests.client.cli.fleet.fleet_samples import SICK, cpu_worker, gpu_worker, large_fleet
from tests.client.cli.fleet_up import MGPUCTL
from tests.client.cli.unary_master import UnaryMaster, unary_master
from tests.fakes.gpus import SimulatedGpus
from tests.fleet import Fleet, until


@pytest.fixture
def script() -> Iterator[UnaryMaster]:
    with unary_master() as scripted:
        yield scripted


def table(workers: list[admin.Worker], width: int | None) -> list[str]:
    return gpus.lines(list(map(Worker.of, workers)), width)[: len(workers) + 1]


@pytest.mark.parametrize("count", [1, 8, 64])
@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 200])
def test_the_table_fits(count: int, width: int) -> None:
    lines = table(large_fleet(count), width)
    assert max(map(len, lines)) <= width
    assert len(lines) == count + 1
    assert {"WORKER", "BUSY", "HEALTH"} <= set(lines[0].split())
    # Ids are whole, or the beginning of one device only.
    short = [line.split()[0 if lines[0].startswith("WORKER") else 1] for line in lines[1:]]
    ids = [worker.worker_id for worker in large_fleet(count)]
    assert all(sum(worker_id.startswith(name) for worker_id in ids) == 1 for name in short)


def test_wider_is_more() -> None:
    columns = [len(table(large_fleet(8), width)[0].split()) for width in (60, 80, 120, 160, 250)]
    assert columns == sorted(columns)
    assert columns[-1] == len(device_columns.columns([]))


def test_unknown_values_are_not_zero() -> None:
    bare = gpu_worker(1, telemetry=device_pb2.DeviceTelemetry(), mps=None)
    heading, row = table([bare], None)
    cells = dict(
        zip(heading.split(), row.replace("NVIDIA H200", "H200").replace("141 GiB", "141GiB").split(), strict=True)
    )
    for name in ("BUSY", "TEMP", "POWER", "THROTTLED", "MPS"):
        assert cells[name] == "-", name
    # A fleet of CPUs has no column of temperatures at all.
    assert "TEMP" not in table([cpu_worker()], 80)[0]
    zero = gpu_worker(1, telemetry=device_pb2.DeviceTelemetry(utilization=0, power_watts=0))
    assert " 0% " in table([zero], None)[1]
    assert " 0 W " in table([zero], None)[1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "healthy"),
        ({"health": SICK, "quarantined": True}, "sick: xid_79, gpu_is_lost"),
        ({"quarantined": True}, "quarantined"),
        ({"cordoned": True}, "cordoned"),
        ({"state": admin.WORKER_STATE_DRAINING, "cordoned": True}, "draining"),
        ({"health": SICK, "cordoned": True}, "sick: xid_79, gpu_is_lost, cordoned"),
        ({"health": SICK, "state": admin.WORKER_STATE_LOST}, "lost"),
    ],
)
def test_health_texts(fields: dict[str, Any], words: str) -> None:
    assert device_columns.health(Worker.of(gpu_worker(1, **fields))) == words


def test_reasons_are_reported_below() -> None:
    lines = gpus.lines(list(map(Worker.of, large_fleet(16))), 80)
    text = " ".join(lines)
    assert "xid_79: the GPU has fallen off the bus; reboot the host" in text
    assert "cordoned: fan replaced at noon" in text
    assert "16 devices on 2 hosts: 13 healthy, 1 degraded, 1 sick, 1 lost; " in text


def test_the_command(script: UnaryMaster) -> None:
    script.answers["ListWorkers"] = admin.ListWorkersResponse(workers=large_fleet(8))
    result = CliRunner().invoke(cli, ["gpus"], env={"MGPU_MASTER": script.address})
    assert result.exit_code == 0
    # Into a pipe nothing is left out.
    assert result.output.splitlines()[0].split() == [column.name for column in device_columns.columns([])]
    script.answers["ListWorkers"] = admin.ListWorkersResponse()
    result = CliRunner().invoke(cli, ["gpus"], env={"MGPU_MASTER": script.address})
    assert "no worker has connected yet" in result.stderr


def test_json_has_every_field(script: UnaryMaster) -> None:
    whole = gpu_worker(3, health=SICK, quarantined=True, cordon_reason="why")
    fill(whole.device)
    fill(whole.telemetry)
    script.answers["ListWorkers"] = admin.ListWorkersResponse(workers=[whole])
    result = CliRunner().invoke(cli, ["gpus", "--json"], env={"MGPU_MASTER": script.address})
    (shown,) = json.loads(result.output)
    for name, message in (("device", whole.device), ("telemetry", whole.telemetry), ("health", whole.health)):
        assert set(shown[name]) >= {field.name for field, _ in message.ListFields()}, name
    assert set(shown["telemetry"]) == {field.name for field in device_pb2.DeviceTelemetry.DESCRIPTOR.fields}
    assert shown["health"]["state"] == "SICK"
    assert shown["mps"]["state"] == "RUNNING"
    assert shown["quarantined"] is True


def fill(message: Any) -> None:
    """Gives every field that has none a value."""
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated:
            if not getattr(message, field.name):
                values = getattr(message, field.name)
                values.add() if field.message_type is not None else values.append("x")
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
        elif not getattr(message, field.name):
            setattr(message, field.name, "x" if field.cpp_type == field.CPPTYPE_STRING else 1)


def test_values_of_a_simulated_driver_are_shown(tmp_path: Path) -> None:
    """A real worker on a simulated GPU, whose driver the real pynvml reads."""
    simulated = SimulatedGpus(tmp_path / "gpus", n=2)
    simulated.heat(1, 71)
    simulated.power(1, 345.0)
    env = {**os.environ, **simulated.env()}
    with Fleet(tmp_path / "fleet", workers=0, handlers=["trial_handlers"], env=simulated.env()) as fleet:
        fleet.start_worker("w1", "--device", "cuda:1")
        fleet.wait_for_workers("w1")

        def device_with_power() -> dict[str, Any] | None:
            argv = [*MGPUCTL, "--master", fleet.address, "gpus", "--json"]
            output = subprocess.run(argv, capture_output=True, text=True, check=True, env=env).stdout
            (device,) = json.loads(output)
            ready = "power_watts" in device.get("telemetry", {})
            return device if ready else None

        device = until(device_with_power)
    assert device["device"]["name"] == "cuda:1"
    assert "imulated" in device["device"]["product"]
    assert device["telemetry"]["temperature_celsius"] == 71
    assert device["telemetry"]["power_watts"] == 345

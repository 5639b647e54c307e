"""Workers as a master tells of them, made up: GPU hosts of any size, with something wrong here and there."""

import io
import time
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from multigpu import Task
from multigpu.cli.fleet.top import View, frame, sickest_first
from multigpu.fleet import Queue, Stats, Worker
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import device_pb2 as pb
from multigpu.v1 import task_pb2
from rich.console import Console


def ago(seconds: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(time.time_ns() - int(seconds * 1e9))
    return stamp


def reason(code: str, message: str) -> pb.HealthReason:
    return pb.HealthReason(code=code, message=message, since_time=ago(130))


SICK = pb.DeviceHealth(
    state=pb.HEALTH_STATE_SICK,
    since_time=ago(130),
    reasons=[reason("xid_79", "the GPU has fallen off the bus; reboot the host"), reason("gpu_is_lost", "no answer")],
)
DEGRADED = pb.DeviceHealth(
    state=pb.HEALTH_STATE_DEGRADED, since_time=ago(40), reasons=[reason("thermal_throttle", "too hot; see to its air")]
)


def gpu_worker(index: int, host: str = "rack7-box12", **fields: Any) -> admin.Worker:
    uuid = f"GPU-{index:08x}-7a0f-4a39-9d6f-0d6b1c2a3e4f"
    share = (index * 37 % 101) / 100
    defaults: dict[str, Any] = {
        "worker_id": f"{host}-{uuid}",
        "host": host,
        "version": "0.1.0",
        "state": admin.WORKER_STATE_ACTIVE,
        "device": pb.Device(
            device_id=uuid, name=f"cuda:{index % 8}", product="NVIDIA H200", memory_total_bytes=141 << 30
        ),
        "telemetry": pb.DeviceTelemetry(
            sample_time=ago(0.2),
            memory_total_bytes=141 << 30,
            memory_used_bytes=int(share * (141 << 30)),
            utilization=share,
            temperature_celsius=40 + 40 * share,
            power_watts=90 + 600 * share,
            power_limit_watts=700,
            sm_clock_hertz=1.98e9,
            memory_clock_hertz=3.2e9,
            energy_joules=1.5e9 + index,
            processes=[pb.DeviceProcess(pid=4711, memory_used_bytes=1 << 30, mps_client=True)],
        ),
        "mps": pb.MpsStatus(state=pb.MPS_STATE_RUNNING, clients=2, clients_max=48),
        "leases": index % 5 * 64,
        "succeeded": 1_234_567,
        "last_heartbeat_time": ago(0.4),
    }
    return admin.Worker(**defaults | fields)


def cpu_worker(name: str = "box-cpu-0", **fields: Any) -> admin.Worker:
    defaults: dict[str, Any] = {
        "worker_id": name,
        "host": "box",
        "version": "0.1.0",
        "state": admin.WORKER_STATE_ACTIVE,
        "device": pb.Device(device_id="cpu", name="cpu", product="AMD EPYC", memory_total_bytes=64 << 30),
        "telemetry": pb.DeviceTelemetry(sample_time=ago(0.2), memory_used_bytes=12 << 30, utilization=0.5),
        "last_heartbeat_time": ago(0.4),
    }
    return admin.Worker(**defaults | fields)


def large_fleet(count: int = 64) -> list[admin.Worker]:
    """Hosts of eight; number 3 is sick, 5 hot, 9 cordoned, 12 lost, 17 draining."""
    workers = [gpu_worker(i, host=f"rack7-box{i // 8:02d}") for i in range(count)]
    changes: dict[int, dict[str, Any]] = {
        3: {"health": SICK, "quarantined": True},
        5: {"health": DEGRADED},
        9: {"cordoned": True, "cordon_reason": "fan replaced at noon"},
        12: {"state": admin.WORKER_STATE_LOST, "telemetry": None},
        17: {"state": admin.WORKER_STATE_DRAINING, "cordoned": True},
    }
    for index, fields in changes.items():
        if index < count:
            workers[index] = gpu_worker(index, host=f"rack7-box{index // 8:02d}", **fields)
    if count > 5:
        workers[5].telemetry.throttle_reasons.extend(["hw_thermal_slowdown", "sw_power_cap"])
    return workers


def view_of(count: int, tasks: int = 30) -> View:
    workers = large_fleet(count) if count else [cpu_worker(), cpu_worker("box-cpu-1")]
    queues = [
        admin.Queue(queue="default", queued=12_345, queued_bytes=3 << 20, leased=64, oldest_age=Duration(seconds=75)),
        admin.Queue(queue="night", paused=True, queued=1_000_000, queued_bytes=9 << 30, strategy="least_loaded"),
        admin.Queue(queue="interactive", leased=3),
    ]
    running = [
        task_pb2.Task(
            task_id=9_000_000 + i,
            spec=task_pb2.TaskSpec(kind="embed", queue="default"),
            submit_time=ago(i * 3),
            attempts=1 + i % 3 // 2,
            worker_id=workers[i % len(workers)].worker_id,
        )
        for i in range(tasks)
    ]
    stats = admin.GetStatsResponse(
        version="0.1.0", start_time=ago(7810), queued=12_345, leased=67, succeeded=4_567_890, failed=12,
        dead_lettered=3, strategy="auto", journal_writable=True,
    )  # fmt: skip
    return View(
        address="10.0.0.7:7433",
        workers=sorted(map(Worker.of, workers), key=sickest_first),
        queues=list(map(Queue.of, queues)),
        tasks=list(map(Task, running)),
        stats=Stats.of(stats),
        rate=1234.0,
    )


def drawn(view: View, width: int, height: int, problem: str = "") -> Console:
    """A console that has the frame recorded."""
    console = Console(
        file=io.StringIO(), record=True, width=width, height=height, force_terminal=True, color_system="truecolor"
    )
    console.print(frame(view, width, height, problem), end="")
    return console

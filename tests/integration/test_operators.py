"""AdminService, health and reflection."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2

from tests.fleet import Fleet, rejected, until

FLEET = {"handlers": ["trial_handlers"], "worker_flags": ["--slots", "4"]}

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(autouse=True)
def _as_it_was(fleet: Fleet) -> Iterator[None]:
    """Every test begins and ends with two free workers."""
    yield
    for worker in fleet.list_workers():
        uncordon(fleet, worker.worker_id)
    until(lambda: all(w.leases == 0 for w in fleet.list_workers()))


def cordon(fleet: Fleet, name: str) -> Any:
    return fleet.admin.CordonWorker(admin_pb.CordonWorkerRequest(worker_id=name), timeout=30).worker


def uncordon(fleet: Fleet, name: str) -> None:
    fleet.admin.UncordonWorker(admin_pb.UncordonWorkerRequest(worker_id=name), timeout=30)


def drain(fleet: Fleet, name: str, timeout_s: float) -> Any:
    request = admin_pb.DrainWorkerRequest(worker_id=name, timeout=Duration(nanos=int(timeout_s * 1e9)))
    return fleet.admin.DrainWorker(request, timeout=30).worker


def gated(fleet: Fleet, gate: Path, name: str) -> int:
    """A task that runs on that worker until the gate file exists."""
    (other,) = {"w0", "w1"} - {name}
    cordon(fleet, other)
    (task_id,) = fleet.submit("trial.gate", str(gate).encode())
    until(lambda: fleet.get(task_id).worker_id == name)
    uncordon(fleet, other)
    return task_id


def test_workers_are_listed(fleet: Fleet, tmp_path: Path) -> None:
    task_id = gated(fleet, tmp_path / "gate", "w0")
    until(lambda: fleet.worker("w0").telemetry.HasField("memory_used_bytes"))
    worker = fleet.worker("w0")
    assert (worker.state, worker.pid) == (admin_pb.WORKER_STATE_ACTIVE, fleet.workers["w0"].pid)
    assert (worker.leases, worker.slots) == (1, 4)
    assert worker.device.device_id == "cpu"
    assert 0 < worker.telemetry.memory_used_bytes < worker.device.memory_total_bytes
    assert "trial.gate" in {c.kind for c in worker.capabilities}
    assert time.time() - worker.last_heartbeat_time.seconds < 60
    (tmp_path / "gate").touch()
    fleet.outcome(task_id)
    until(lambda: fleet.worker("w0").succeeded >= 1)


def test_a_page_of_workers(fleet: Fleet) -> None:
    first = fleet.admin.ListWorkers(admin_pb.ListWorkersRequest(page_size=1), timeout=30)
    request = admin_pb.ListWorkersRequest(page_size=1, page_token=first.next_page_token)
    second = fleet.admin.ListWorkers(request, timeout=5)
    assert [w.worker_id for w in (*first.workers, *second.workers)] == ["w0", "w1"]
    assert not second.next_page_token


def test_a_cordoned_worker_gets_no_lease_and_finishes_its_own(fleet: Fleet, tmp_path: Path) -> None:
    task_id = gated(fleet, tmp_path / "gate", "w0")
    assert cordon(fleet, "w0").cordoned and cordon(fleet, "w0").cordoned
    ids = fleet.submit("echo", *(b"x" for _ in range(50)))
    assert {fleet.outcome(i).worker_id for i in ids} == {"w1"}
    assert fleet.worker("w0").leases == 1
    (tmp_path / "gate").touch()
    outcome = fleet.outcome(task_id)
    assert (outcome.worker_id, outcome.attempts) == ("w0", 1)


def test_a_drain_never_interrupts_before_its_deadline(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    task_id = gated(fleet, gate, "w0")
    lease_id = fleet.get(task_id).lease_id
    began = time.monotonic()
    worker = drain(fleet, "w0", 1.5)
    assert worker.state == admin_pb.WORKER_STATE_DRAINING
    assert worker.HasField("drain_deadline")
    while time.monotonic() - began < 1.0:
        assert fleet.get(task_id).lease_id == lease_id
        time.sleep(0.05)
    # At the deadline the lease is revoked, uncharged, and goes to another worker.
    until(lambda: fleet.get(task_id).worker_id == "w1")
    assert time.monotonic() - began > 1.4
    gate.touch()
    outcome = fleet.outcome(task_id)
    assert (outcome.worker_id, outcome.attempts) == ("w1", 1)


def test_a_drain_can_be_cancelled(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    task_id = gated(fleet, gate, "w0")
    drain(fleet, "w0", 0.4)
    uncordon(fleet, "w0")
    assert fleet.get(task_id, 0.8).worker_id == "w0"
    assert fleet.worker("w0").state == admin_pb.WORKER_STATE_ACTIVE
    gate.touch()
    assert fleet.outcome(task_id).attempts == 1


def test_a_connected_or_unknown_worker_cannot_be_forgotten(fleet: Fleet) -> None:
    with rejected(grpc.StatusCode.FAILED_PRECONDITION, "connected", "stop its daemon"):
        fleet.admin.ForgetWorker(admin_pb.ForgetWorkerRequest(worker_id="w0"), timeout=30)
    for call in ("ForgetWorker", "CordonWorker", "UncordonWorker", "DrainWorker"):
        with rejected(grpc.StatusCode.NOT_FOUND, "no worker 'w9'; known: w0, w1"):
            getattr(fleet.admin, call)(getattr(admin_pb, f"{call}Request")(worker_id="w9"), timeout=30)


def test_watch_workers(fleet: Fleet) -> None:
    watch = fleet.admin.WatchWorkers(admin_pb.WatchWorkersRequest(), timeout=30)
    assert {w.worker_id for w in next(watch).workers} == {"w0", "w1"}
    seen: list[tuple[str, int, bool]] = []
    removed: list[str] = []

    def read() -> None:
        for frame in watch:
            seen.extend((w.worker_id, w.state, w.cordoned) for w in frame.workers)
            removed.extend(frame.removed_worker_ids)
            if removed:
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    fleet.start_worker("guest")
    fleet.wait_for_workers("guest")
    until(lambda: ("guest", admin_pb.WORKER_STATE_ACTIVE, False) in seen)
    cordon(fleet, "w1")
    until(lambda: ("w1", admin_pb.WORKER_STATE_ACTIVE, True) in seen)
    fleet.workers.pop("guest").kill()
    until(lambda: ("guest", admin_pb.WORKER_STATE_LOST, False) in seen)
    fleet.admin.ForgetWorker(admin_pb.ForgetWorkerRequest(worker_id="guest"), timeout=30)
    until(lambda: removed == ["guest"])
    reader.join(5)
    watch.cancel()


def test_set_strategy_by_name_or_alias(fleet: Fleet) -> None:
    def get(queue: str = "") -> Any:
        return fleet.admin.GetStrategy(admin_pb.GetStrategyRequest(queue=queue), timeout=30)

    def put(strategy: str, queue: str = "") -> Any:
        request = admin_pb.SetStrategyRequest(strategy=strategy, queue=queue)
        return fleet.admin.SetStrategy(request, timeout=30).strategy

    names = {s.name for s in get().available}
    assert names >= {
        "auto", "compute_load", "least_loaded", "memory_usage", "round_robin", "static_partition", "task_type",
    }  # fmt: skip
    assert all(s.summary for s in get().available)
    try:
        for name in sorted(names):
            assert put(name) == name
            ids = fleet.submit("echo", *(b"x" for _ in range(10)))
            assert all(fleet.outcome(i).result == b"x" for i in ids)
        assert put("memory") == "memory_usage"
        assert get("special").inherited
        assert put("utilization", "special") == "compute_load"
        assert (get("special").strategy, get("special").inherited) == ("compute_load", False)
        assert put("", "special") == "memory_usage"
        assert get("special").inherited
        with rejected(grpc.StatusCode.INVALID_ARGUMENT, "no strategy 'best'", "round_robin"):
            put("best")
        with rejected(grpc.StatusCode.INVALID_ARGUMENT):
            put("")
    finally:
        put("auto")


def queue_of(fleet: Fleet, name: str) -> Any:
    queues = fleet.admin.ListQueues(admin_pb.ListQueuesRequest(page_size=1000), timeout=30).queues
    return next(q for q in queues if q.queue == name)


def test_a_paused_queue_accepts_and_keeps_tasks(fleet: Fleet) -> None:
    assert fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="paused"), timeout=30).queue.paused
    ids = fleet.submit("echo", b"abc", b"de", queue="paused")
    (other,) = fleet.submit("echo", b"x", queue="not paused")
    assert fleet.outcome(other).state == task_pb2.OUTCOME_STATE_SUCCEEDED
    queue = queue_of(fleet, "paused")
    assert (queue.queued, queue.queued_bytes, queue.leased) == (2, 5, 0)
    assert queue.HasField("oldest_age")
    explanation = fleet.admin.Explain(admin_pb.ExplainRequest(task_id=ids[0]), timeout=30)
    assert "paused" in explanation.summary
    assert "mgpuctl queues resume paused" in explanation.summary
    assert not fleet.admin.ResumeQueue(admin_pb.ResumeQueueRequest(queue="paused"), timeout=30).queue.paused
    assert [fleet.outcome(i).result for i in ids] == [b"abc", b"de"]
    with rejected(grpc.StatusCode.INVALID_ARGUMENT, "queue is missing"):
        fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(), timeout=30)


@pytest.mark.parametrize(
    ("limits", "payload"),
    [(admin_pb.QueueLimits(tasks_max=3), b"x"), (admin_pb.QueueLimits(bytes_max=3000), bytes(1000))],
)
def test_a_full_queue_rejects_with_a_retry_delay(fleet: Fleet, limits: admin_pb.QueueLimits, payload: bytes) -> None:
    name = f"limited to {limits.tasks_max or limits.bytes_max}"
    fleet.admin.SetQueueLimits(admin_pb.SetQueueLimitsRequest(queue=name, limits=limits), timeout=30)
    fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue=name), timeout=30)
    results = fleet.submit_raw("echo", *(payload for _ in range(5)), queue=name).results
    assert [r.WhichOneof("answer") for r in results] == ["task_id"] * 3 + ["rejection"] * 2
    rejection = results[3].rejection
    assert rejection.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert rejection.retry_delay.ToNanoseconds() > 0
    fleet.admin.ResumeQueue(admin_pb.ResumeQueueRequest(queue=name), timeout=30)
    for result in results[:3]:
        fleet.outcome(result.task_id)
    fleet.submit("echo", payload, queue=name)


def test_explain(fleet: Fleet, tmp_path: Path) -> None:
    def explain(task_id: int) -> Any:
        return fleet.admin.Explain(admin_pb.ExplainRequest(task_id=task_id), timeout=30)

    running = gated(fleet, tmp_path / "gate", "w0")
    explanation = explain(running)
    assert "on w0" in explanation.summary
    assert (explanation.strategy, explanation.task.task_id) == ("auto", running)
    for name in ("w0", "w1"):
        cordon(fleet, name)
    first, second = fleet.submit("echo", b"1", b"2")
    explanation = explain(second)
    assert explanation.ahead == 1
    assert "every worker that could take it is busy or excluded" in explanation.summary
    assert {c.worker_id: [*c.excluded_by] for c in explanation.candidates} == {"w0": ["cordoned"], "w1": ["cordoned"]}
    for name in ("w0", "w1"):
        uncordon(fleet, name)
    fleet.outcome(first)
    assert "SUCCEEDED on w" in explain(first).summary
    (tmp_path / "gate").touch()
    fleet.outcome(running)
    with rejected(grpc.StatusCode.NOT_FOUND, "never submitted"):
        explain(3)


def test_stats_add_up(fleet: Fleet) -> None:
    before = fleet.stats()
    ids = fleet.submit("echo", *(b"x" for _ in range(30)))
    (failed,) = fleet.submit("trial.wrong_type", b"")
    for task_id in (*ids, failed):
        fleet.outcome(task_id)
    after = fleet.stats()
    assert after.submitted - before.submitted == 31
    assert after.succeeded - before.succeeded == 30
    assert after.failed - before.failed == 1
    assert (after.queued, after.leased, after.workers_active) == (0, 0, 2)
    assert after.journal_writable
    assert after.journal_bytes > 0
    assert after.memory_bytes > 10 << 20
    assert time.time() - after.start_time.seconds < 300
    until(lambda: fleet.stats().outcomes_retained >= before.outcomes_retained + 31)


def test_a_worker_that_stops_is_not_serving_while_its_last_task_runs(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Fleet(tmp_path / "fleet", workers=1, worker_flags=["--handlers", "trial_handlers"]) as fleet:
        assert fleet.check_health("worker/w0") == SERVING
        (task_id,) = fleet.submit("trial.gate", str(gate).encode())
        until(lambda: fleet.get(task_id).stages.HasField("start_time"))
        fleet.workers["w0"].signal(signal.SIGTERM)
        until(lambda: fleet.check_health("worker/w0") == NOT_SERVING)
        assert fleet.get(task_id).state == task_pb2.TASK_STATE_LEASED
        gate.touch()
        assert fleet.outcome(task_id).state == task_pb2.OUTCOME_STATE_SUCCEEDED


def test_health_has_a_name_for_the_master_and_one_for_each_worker(fleet: Fleet) -> None:
    for name in ("", "master", "multigpu.v1.TaskService", "worker/w0", "worker/w1"):
        assert fleet.check_health(name) == SERVING, name
    with rejected(grpc.StatusCode.NOT_FOUND):
        fleet.check_health("worker/w9")
    states: list[int] = []
    watch = fleet.health.Watch(health_pb2.HealthCheckRequest(service="worker/w1"), timeout=20)

    def read() -> None:
        with contextlib.suppress(grpc.RpcError):  # it ends when this test cancels it
            for answer in watch:
                states.append(answer.status)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    until(lambda: states == [SERVING])
    cordon(fleet, "w1")
    until(lambda: states == [SERVING, NOT_SERVING])
    uncordon(fleet, "w1")
    until(lambda: states == [SERVING, NOT_SERVING, SERVING])
    fleet.workers["w1"].kill()
    until(lambda: states[-1] == NOT_SERVING)
    assert fleet.check_health("worker/w1") == NOT_SERVING
    fleet.start_worker("w1")
    until(lambda: states[-1] == SERVING)
    watch.cancel()
    reader.join(5)

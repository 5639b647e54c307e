"""Submits, names and requirements without end."""

import time

from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2
from multigpu.v1 import worker_service_pb2 as worker_pb
from multigpu_master.rpc.worker_service import PROTOCOL_VERSION

from tests.fleet import Fleet, until
from tests.hostile.abuses.base import MIB, RESOURCE_EXHAUSTED, cancel_queue, channel_to, ended, frame, run_stub, unique
from tests.integration.streams import Feed


def endless_submits(fleet: Fleet, size: int) -> str:
    """A client that submits to a paused queue without end, until it is rejected. `size` in MiB."""
    fleet.admin.PauseQueue(admin_pb.PauseQueueRequest(queue="endless"), timeout=20)
    rejected = taken = 0
    spec = task_pb2.TaskSpec(kind="echo", queue="endless", priority=5, durability=task_pb2.DURABILITY_EPHEMERAL)
    batch = task_pb2.TaskBatch(spec=spec, inputs=[task_pb2.TaskInput(payload=bytes(MIB))] * 16)
    request = task_service_pb2.SubmitRequest(batches=[batch])
    for _ in range(0, size, 16):
        answer = fleet.tasks.Submit(request, timeout=60)
        rejected += sum(r.rejection.code == RESOURCE_EXHAUSTED.value[0] for r in answer.results)
        taken += sum(r.HasField("task_id") for r in answer.results)
    assert rejected, "nothing was rejected"
    cancel_queue(fleet, "endless")
    return f"{taken} taken, {rejected} RESOURCE_EXHAUSTED"


def slow_reader(fleet: Fleet, size: int) -> str:
    """Clients that submit on Run streams and never read an outcome. `size` in MiB of outcomes, 8 MiB a stream."""
    name = unique()
    with channel_to(fleet) as channel:
        calls = []
        for n in range(size // 8):
            data = frame(128, prefix=f"{name}-{n}-", payload=bytes(64 << 10), durability=task_pb2.DURABILITY_EPHEMERAL)
            calls.append(run_stub(channel)(Feed(data), timeout=120))
        time.sleep(2 + size / 100)
        for call in calls:
            call.cancel()
    return "cancelled"


def distinct_names(fleet: Fleet, size: int) -> str:
    """A new kind, model, queue and label for each task: some are rejected, and no name is kept."""
    for at in range(0, size, 500):
        request = task_service_pb2.SubmitRequest()
        for n in range(at, at + 500):
            ephemeral = task_pb2.DURABILITY_EPHEMERAL
            kind, queue = ("echo", f"q{n}") if n % 2 else (f"k{n}", "")
            spec = task_pb2.TaskSpec(kind=kind, queue=queue, model=f"m{n}", durability=ephemeral, priority=5)
            spec.result_ttl.FromSeconds(1)
            request.batches.add(spec=spec).inputs.add(payload=b"x", partition_key=f"p{n}")
        fleet.tasks.Submit(request, timeout=120)
    until(lambda: fleet.stats().queued == 0, 120)
    return "done"


def own_requirements(fleet: Fleet, size: int) -> str:
    """Tasks that each require a different amount of device memory, more than is free, with large parameters."""
    worker = next(w for w in fleet.list_workers() if w.session_id)
    queue, codes = unique(), set[int]()
    for at in range(0, size, 100):
        request = task_service_pb2.SubmitRequest()
        for n in range(at, at + 100):
            parameters = {"n": str(n), "pad": "x" * (60 << 10)}
            spec = task_pb2.TaskSpec(kind="echo", queue=queue, parameters=parameters, wait_for_worker=True)
            spec.required_device_memory_bytes = worker.device.memory_total_bytes - n
            request.batches.add(spec=spec).inputs.add(payload=b"x")
        codes |= {result.rejection.code for result in fleet.tasks.Submit(request, timeout=120).results}
    cancel_queue(fleet, queue)
    return " ".join(map(str, sorted(codes)))


def settled_again(fleet: Fleet, size: int) -> str:
    """Clients that repeat request_ids of settled tasks with large results, and read nothing."""
    name, count = unique(), 32
    with channel_to(fleet) as channel:
        request = task_service_pb2.SubmitRequest()
        batch = request.batches.add(spec=task_pb2.TaskSpec(kind="echo", queue=name))
        for n in range(count):
            batch.inputs.add(payload=bytes(MIB), request_id=f"{name}-{n}")
        fleet.tasks.Submit(request, timeout=120)
        counted = task_service_pb2.CountRequest(filter=task_service_pb2.TaskFilter(queue=name))
        until(lambda: fleet.tasks.Count(counted, timeout=20).succeeded == count, 120)
        again = task_service_pb2.RunRequest(batches=request.batches).SerializeToString()
        calls = [run_stub(channel)(Feed(again), timeout=120) for _ in range(size)]
        time.sleep(2.0)
        for call in calls:
            call.cancel()
    return "cancelled"


def distinct_workers(fleet: Fleet, size: int) -> str:
    """A worker that joins with a new id each time."""
    name = unique()
    with channel_to(fleet) as channel:
        session = channel.stream_stream("/multigpu.v1.WorkerService/Session")
        for n in range(size):
            hello = worker_pb.Hello(protocol_version=PROTOCOL_VERSION, worker_id=f"{name}-{n}", slots=1)
            hello.capabilities.add(kind=f"kind-{n}")
            call = session(iter([worker_pb.SessionRequest(hello=hello).SerializeToString()]), timeout=20)
            next(call)
            call.cancel()
    return "come and gone"


def distinct_admin_queues(fleet: Fleet, size: int) -> str:
    """A script that configures a new queue each time it runs."""
    codes = set()
    for n in range(size):
        request = admin_pb.PauseQueueRequest(queue=f"made-up-{n}")
        codes.add(ended(lambda request=request: fleet.admin.PauseQueue(request, timeout=20)))  # type: ignore[misc]
    for n in range(size):
        again = admin_pb.ResumeQueueRequest(queue=f"made-up-{n}")
        codes.add(ended(lambda again=again: fleet.admin.ResumeQueue(again, timeout=20)))  # type: ignore[misc]
    return " ".join(sorted(codes))

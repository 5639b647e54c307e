"""Large messages, and messages with many parts."""

import grpc
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2
from multigpu.v1 import worker_service_pb2 as worker_pb
from multigpu_master.rpc.worker_service import PROTOCOL_VERSION

from tests.fleet import Fleet
from tests.hostile.abuses.base import INVALID_ARGUMENT, MIB, cancel_queue, channel_to, ended, frame, run_stub
from tests.integration.streams import Feed


def large_metadata(fleet: Fleet, size: int) -> str:
    """Metadata beyond the limit of a header."""
    with channel_to(fleet) as channel:
        stats = channel.unary_unary("/multigpu.v1.AdminService/GetStats")
        codes = {ended(lambda: stats(b"", metadata=[("x-much", "x" * 60_000)], timeout=20)) for _ in range(size)}
    assert codes <= {"RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL"}, codes
    return " ".join(sorted(codes))


def large_messages(fleet: Fleet, size: int) -> str:
    """Messages beyond the size limit, and names of a megabyte."""
    codes = set()
    long_name = task_service_pb2.GetRequest(request_id="x" * MIB)
    long_worker = admin_pb.CordonWorkerRequest(worker_id="\0" * MIB)
    for _ in range(size):
        with grpc.insecure_channel(fleet.address, options=[("grpc.max_send_message_length", -1)]) as other:
            big = other.unary_unary("/multigpu.v1.TaskService/Submit")
            codes.add("larger: " + ended(lambda big=big: big(bytes(65 * MIB), timeout=60)))  # type: ignore[misc]
        codes.add("1 MiB of request_id: " + ended(lambda: fleet.tasks.Get(long_name, timeout=20)))
        codes.add("1 MiB of worker_id: " + ended(lambda: fleet.admin.CordonWorker(long_worker, timeout=20)))
        (result,) = fleet.submit_raw("echo", b"", request_ids=["x" * MIB]).results
        assert result.rejection.code == INVALID_ARGUMENT.value[0]
    assert codes == {
        "larger: RESOURCE_EXHAUSTED", "1 MiB of request_id: NOT_FOUND", "1 MiB of worker_id: NOT_FOUND",
    }, codes  # fmt: skip
    return "rejected"


def many_in_one_frame(fleet: Fleet, size: int) -> str:
    """As many invalid tasks as fit into one frame of a Run stream."""
    data = frame(size, prefix="", payload=b"", priority=5, queue="many")
    with channel_to(fleet) as channel:
        call = run_stub(channel)(Feed(data), timeout=120)
        code = ended(lambda: next(call))
        call.cancel()
    cancel_queue(fleet, "many")
    return code


def empty_batches(fleet: Fleet, size: int) -> str:
    """Many empty Submit calls."""
    data = b"\x0a\x00" * size
    with channel_to(fleet) as channel:
        return ended(lambda: channel.unary_unary("/multigpu.v1.TaskService/Submit")(data, timeout=120))


def small_fields(fleet: Fleet, size: int) -> str:
    """Messages of `size` MiB in fields of two bytes: a frame of a Run stream and one of a worker's session."""
    frame_of_run = frame(1, prefix="", payload=b"") + b"\x0a\x00" * (size * MIB // 2)
    with channel_to(fleet) as channel:
        call = run_stub(channel)(Feed(frame_of_run), timeout=120)
        codes = [ended(lambda: next(call))]
        call.cancel()
        hello = worker_pb.Hello(protocol_version=PROTOCOL_VERSION, worker_id="small", slots=1, window_tasks=5)
        hello.capabilities.add(kind="small")
        first = worker_pb.SessionRequest(hello=hello).SerializeToString()
        for reports in (b"\x1a\x00" * (size * MIB // 2), b"\x1a\x00" * (MIB // 2)):
            session = channel.stream_stream("/multigpu.v1.WorkerService/Session")(iter([first, reports]), timeout=120)
            codes.append(ended(lambda session=session: list(session)))  # type: ignore[misc]
    assert codes == ["INVALID_ARGUMENT"] * 3, codes
    return "rejected"


def own_specs(fleet: Fleet, size: int) -> str:
    """Concurrent Submit calls, each with thousands of batches with different specs and no task."""
    request = task_service_pb2.SubmitRequest()
    for n in range(10_000):
        request.batches.add(spec=task_pb2.TaskSpec(kind="echo", parameters={"n": str(n)}))
    with channel_to(fleet) as channel:
        submit = channel.unary_unary("/multigpu.v1.TaskService/Submit")
        calls = [submit.future(request.SerializeToString(), timeout=120) for _ in range(size)]
        return " ".join(sorted({ended(call.result) for call in calls}))


def unknown_cancels(fleet: Fleet, size: int) -> str:
    """Cancels of unknown tasks, by id, by request_id and on a Run stream."""
    with channel_to(fleet) as channel:
        cancel = channel.unary_unary("/multigpu.v1.TaskService/Cancel")
        ids = task_service_pb2.CancelRequest(task_ids=range(1 << 40, (1 << 40) + size)).SerializeToString()
        names = task_service_pb2.CancelRequest(request_ids=["n"] * size).SerializeToString()
        codes = [ended(lambda: cancel(ids, timeout=120)), ended(lambda: cancel(names, timeout=120))]
        run = task_service_pb2.RunRequest(cancel_request_ids=["n"] * size).SerializeToString()
        call = run_stub(channel)(Feed(run), timeout=120)
        codes.append(ended(lambda: next(call)))
        call.cancel()
    return " ".join(codes)


def huge_pages(fleet: Fleet, size: int) -> str:
    """Pages beyond the limit."""
    codes = set()
    for n in range(size):
        for page in (2**31 - 1, -(2**31), 1001 + n):
            request = task_service_pb2.ListRequest(page_size=page)
            codes.add(ended(lambda request=request: fleet.tasks.List(request, timeout=20)))  # type: ignore[misc]
    assert codes == {"INVALID_ARGUMENT"}, codes
    return "INVALID_ARGUMENT"

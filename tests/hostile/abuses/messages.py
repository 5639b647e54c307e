"""Large messages, and messages with many parts."""

import grpc
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import task_pb2, task_service_pb2
from multigpu.v1 import worker_service_pb2 as worker_pb
from multigpu_master.rpc.worker_service import PROTOCOL_VERSION

from tests.fleet import Fleet
from tests.hostile.abuses.base import INVALID_ARGUMENT, MIB, cancel_queue, channel_to, ended, frame, run_stub
from tests.integration.streams import Feed


def large_messages(fleet: Fleet, size: int) -> str:
    """Messages beyond the size limit, and names of a megabyte."""
    codes = set()
    with channel_to(fleet) as channel:
        submit = channel.unary_unary("/multigpu.v1.TaskService/Submit")
        get = channel.unary_unary("/multigpu.v1.TaskService/Get")
        cordon = channel.unary_unary("/multigpu.v1.AdminService/CordonWorker")
        long_name = task_service_pb2.GetRequest(request_id="x" * MIB).SerializeToString()
        long_worker = admin_pb.CordonWorkerRequest(worker_id="\0" * MIB).SerializeToString()
        for _ in range(size):
            with grpc.insecure_channel(fleet.address, options=[("grpc.max_send_message_length", -1)]) as other:
                big = other.unary_unary("/multigpu.v1.TaskService/Submit")
                codes.add("larger: " + ended(lambda big=big: big(bytes(65 * MIB), timeout=60)))  # type: ignore[misc]
            codes.add("1 MiB of request_id: " + ended(lambda: get(long_name, timeout=20)))
            codes.add("1 MiB of worker_id: " + ended(lambda: cordon(long_worker, timeout=20)))
            request = task_service_pb2.SubmitRequest()
            request.batches.add(spec=task_pb2.TaskSpec(kind="echo")).inputs.add(request_id="x" * MIB)
            answer = task_service_pb2.SubmitResponse.FromString(submit(request.SerializeToString(), timeout=20))
            assert answer.results[0].rejection.code == INVALID_ARGUMENT.value[0]
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

"""Many calls made at once on one connection: each is answered, or ends with a status that says to try again."""

from collections import Counter
from collections.abc import Iterator

import grpc
import pytest
from multigpu.v1 import task_pb2, task_service_pb2

from tests.fleet import Fleet

SUBMIT = "/multigpu.v1.TaskService/Submit"
# An attempt at a burst is cut down by what it has answered: far fewer are needed.
ATTEMPTS_MAX = 50


@pytest.fixture
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), workers=0) as running:
        yield running
        assert not running.faults()


def _request(name: str) -> task_service_pb2.SubmitRequest:
    batch = task_pb2.TaskBatch(spec=task_pb2.TaskSpec(kind="echo"), inputs=[task_pb2.TaskInput(request_id=name)])
    return task_service_pb2.SubmitRequest(batches=[batch])


async def _burst(channel: grpc.aio.Channel, names: set[str]) -> dict[str, grpc.StatusCode]:
    """The statuses of Submits made at the same time, by request_id."""
    method = channel.unary_unary(
        SUBMIT,
        request_serializer=task_service_pb2.SubmitRequest.SerializeToString,
        response_deserializer=task_service_pb2.SubmitResponse.FromString,
    )
    calls = {name: method(_request(name), timeout=60) for name in names}
    return {name: await call.code() for name, call in calls.items()}


@pytest.mark.parametrize("count", [300, 600, 2000])
async def test_parallel_submits_on_one_connection_are_not_cancelled(fleet: Fleet, count: int) -> None:
    left = {f"task-{number}" for number in range(count)}
    statuses: Counter[grpc.StatusCode] = Counter()
    # Without the option, channels of one process share a connection.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(fleet.address, options=options) as channel:
        await channel.channel_ready()
        for _ in range(ATTEMPTS_MAX):
            ended = await _burst(channel, left)
            statuses.update(ended.values())
            left = {name for name, code in ended.items() if code is not grpc.StatusCode.OK}
            if not left or statuses.keys() - {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}:
                break
    assert set(statuses) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}, statuses
    assert not left
    assert fleet.stats().queued == count

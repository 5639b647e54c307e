"""Lists of tasks do not read large results, and end a page early if its tasks take much memory; dead letters that
can't be requeued now.
"""

import errno
import itertools
from pathlib import Path

import grpc
import pytest
from multigpu._transport.payloads import Reference, Writer
from multigpu.v1 import admin_service_pb2, task_pb2, task_service_pb2
from multigpu_master.core import events as ev
from multigpu_master.core.model import TaskError
from multigpu_master.core.workers.info import Capability, WorkerInfo
from multigpu_master.errors import CallError, JournalError
from multigpu_master.journal.protocol import Entry, OutcomeFilter
from multigpu_master.journal.sqlite import reads
from multigpu_master.journal.sqlite.segments import LARGE_BYTES
from multigpu_master.rpc.admin.dead_letters import DeadLetterCalls
from multigpu_master.rpc.admin.service import AdminService
from multigpu_master.rpc.queries import Filter
from multigpu_master.wire.payloads import outcome_body

from tests.core.stage import Stage as FleetStage
from tests.core.test_gangs import PAIR, host, ranks
from tests.master.journal.journals import commit, opened, settle
from tests.master.stage import Stage, leases_of

MIB = 1 << 20


def test_a_list_leaves_large_results_on_the_disk(tmp_path: Path) -> None:
    own = task_pb2.Outcome(request_id="r", attempts=3, worker_id="w")
    partials = task_pb2.Outcome(attempts=3, partials=[b"p" * 100_000] * 2, result=b"r").SerializeToString()
    with opened(tmp_path) as (journal, commits):
        written = Writer(journal.payloads.path).put(bytes(MIB))
        shared = journal.payloads.resolve(written.pin.name, written.offset, written.size_bytes)
        assert isinstance(shared, Reference)
        bodies = [outcome_body(own.SerializeToString(), b"", result) for result in (bytes(MIB), shared)]
        last = own.SerializeToString() + partials  # the result does not begin in the first bytes
        commit(journal, commits, Entry(settles=[settle(i, b, 1e12) for i, b in enumerate([*bodies, last], 1)]))
        listed = journal.list_outcomes(OutcomeFilter(), 0, 9, oldest_first=True)
        assert [outcome.body for outcome in listed] == [own.SerializeToString(), own.SerializeToString(), last]
        found = [journal.get_outcome(i) for i in (1, 2, 3)]
        assert [o.body for o in found if o is not None] == [
            *[own.SerializeToString() + b"\x22\x80\x80\x40" + bytes(MIB)] * 2,
            last,
        ]


@pytest.mark.parametrize("oldest_first", [False, True])
async def test_a_page_of_tasks_with_much_content_ends_early(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, *, oldest_first: bool
) -> None:
    monkeypatch.setattr(reads, "LIST_BYTES", 1000)
    tasks = stage.submit(*"abcdefgh")
    stage.driver.handle(ev.Reports(1, [x.lease_id for x in leases_of(tasks[1:])], [bytes(400)] * 7))
    await stage.durable()
    tasks += stage.submit("i")
    wanted = [task.task_id for task in tasks]
    request = task_service_pb2.ListRequest(oldest_first=oldest_first, page_size=6)
    pages: list[list[int]] = []
    while not pages or request.page_token:
        response = await stage.service.List(request, None)
        pages.append([task.task_id for task in response.tasks])
        request.page_token = response.next_page_token
    assert list(itertools.chain(*pages)) == (wanted if oldest_first else wanted[::-1])
    assert max(map(len, pages)) == 4, "three outcomes, and a task that the core has"


def test_a_list_of_a_workers_tasks_has_the_gangs_of_which_it_runs_a_rank() -> None:
    fleet = FleetStage()
    host(fleet, "a", "b", "c")
    (gang,) = fleet.submit(spec=PAIR)
    found = {name for name in "abc" if Filter(task_service_pb2.TaskFilter(worker_id=name)).matches(gang)}
    assert found == {lease.worker.worker_id for lease in ranks(gang)}
    assert len(found) == 2


async def test_a_list_of_workers_goes_on_behind_the_last_one_though_an_earlier_one_was_forgotten(stage: Stage) -> None:
    for name in "abc":
        stage.driver.handle(ev.Hello(ord(name), WorkerInfo(worker_id=name, capabilities=(Capability(kind="run"),)), []))
    service, request = AdminService(stage.driver, "", None), admin_service_pb2.ListWorkersRequest(page_size=1)
    listed = list[str]()
    while not listed or request.page_token:
        response = await service.ListWorkers(request, None)
        listed += [worker.worker_id for worker in response.workers]
        request.page_token = response.next_page_token
        if listed == ["a"]:
            stage.driver.handle(ev.SessionClosed(ord("a")))
            stage.driver.handle(ev.Forget("a"))
    assert listed == ["a", "b", "c", "w"]


async def test_dead_letters_with_much_content_are_listed_in_short_pages(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "LIST_BYTES", 1000)
    stage.spec = stage.driver.specs.read(task_pb2.TaskSpec(kind="echo", attempts_max=1))
    tasks = stage.submit(*"abcde")
    error = TaskError("Poison", "E" * 500)
    stage.driver.handle(ev.Reports(1, failures=[ev.Failure(x.lease_id, error) for x in leases_of(tasks)]))
    await stage.durable()
    calls = DeadLetterCalls()
    calls._driver, calls._busy_dead_letters = stage.driver, set()
    request = admin_service_pb2.ListDeadLettersRequest()
    pages: list[list[int]] = []
    while not pages or request.page_token:
        response = await calls.ListDeadLetters(request, None)
        pages.append([task.task_id for task in response.tasks])
        request.page_token = response.next_page_token
    assert list(itertools.chain(*pages)) == [task.task_id for task in tasks[::-1]]
    assert max(map(len, pages)) == 2
    ids, _ = await calls._requested_ids(admin_service_pb2.DeleteDeadLettersRequest(queue=tasks[0].spec.queue))
    assert ids == list(itertools.chain(*pages))


async def test_a_dead_letter_whose_payload_can_not_be_read_now_is_not_lost(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Get answered as if it was, and a requeue said that it never could be requeued."""
    stage.spec = stage.driver.specs.read(task_pb2.TaskSpec(kind="echo", attempts_max=1))
    (task,) = stage.submit("kept")
    task.payload = bytes(LARGE_BYTES)
    failure = ev.Failure(leases_of([task])[0].lease_id, TaskError("ValueError", "no"))
    stage.driver.handle(ev.Reports(1, failures=[failure]))
    await stage.durable()

    def fail(_reference: str) -> bytes:
        raise OSError(errno.EIO, "the disk failed")

    monkeypatch.setattr(stage.journal._large, "read", fail)
    calls = DeadLetterCalls()
    calls._driver, calls._busy_dead_letters = stage.driver, set()
    request = admin_service_pb2.RequeueDeadLettersRequest(task_ids=[task.task_id])
    for call in (stage.service.Get(task_service_pb2.GetRequest(task_id=task.task_id), None),
                 calls.RequeueDeadLetters(request, None)):  # fmt: skip
        with pytest.raises(JournalError, match="the disk failed"):
            await call
    monkeypatch.undo()
    assert list((await calls.RequeueDeadLetters(request, None)).task_ids) == [task.task_id]


async def test_a_requeue_for_which_there_is_no_room_may_be_tried_again(stage: Stage) -> None:
    stage.spec = stage.driver.specs.read(task_pb2.TaskSpec(kind="echo", attempts_max=1))
    (task,) = stage.submit("x")
    failure = ev.Failure(leases_of([task])[0].lease_id, TaskError("ValueError", "no"))
    stage.driver.handle(ev.Reports(1, failures=[failure]))
    await stage.durable()
    stage.driver.handle(ev.ConfigureQueue("default", tasks_max=1))
    stage.submit("y")
    calls = DeadLetterCalls()
    calls._driver, calls._busy_dead_letters = stage.driver, set()
    request = admin_service_pb2.RequeueDeadLettersRequest(task_ids=[task.task_id])
    with pytest.raises(CallError, match="try again later") as caught:
        await calls.RequeueDeadLetters(request, None)
    assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED

"""A cancelled Submit does not affect the acknowledgement of other Submits in the same commit."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from multigpu.v1 import task_pb2, task_service_pb2
from multigpu_master.errors import JournalError
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.write_buffer import WriteBuffer, set_result_of

from tests.fleet import Fleet


async def test_a_submit_is_acknowledged_after_another_in_its_transaction_was_cancelled(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    fatal: list[str] = []
    journal = SqliteJournal(tmp_path, size_max_bytes=1 << 30)
    write_buffer = WriteBuffer(
        journal, handle=lambda _: None, on_outcomes_committed=lambda: None, on_fatal=fatal.append
    )
    journal.open(lambda *commit: loop.call_soon_threadsafe(write_buffer.handle_commit, *commit))
    gone: asyncio.Future[JournalError | None] = loop.create_future()
    waiting: asyncio.Future[JournalError | None] = loop.create_future()
    for future in (gone, waiting):  # not urgent: they go to the disk together
        write_buffer.append_submits([], set_result_of(future), (), False)
    gone.cancel()
    assert await asyncio.wait_for(waiting, 120) is None
    await asyncio.wait_for(write_buffer.flush_and_wait(), 120)
    assert not fatal
    await asyncio.to_thread(journal.close, 10)


def test_submits_that_are_broken_off_leave_no_trace(tmp_path: Path) -> None:
    with Fleet(tmp_path, workers=0) as fleet:

        def request(name: str) -> task_service_pb2.SubmitRequest:
            spec = task_pb2.TaskSpec(kind="echo", wait_for_worker=True)
            inputs = [task_pb2.TaskInput(payload=b"x", request_id=name)]
            return task_service_pb2.SubmitRequest(batches=[task_pb2.TaskBatch(spec=spec, inputs=inputs)])

        def break_off(number: int) -> None:
            for i in range(50):
                call = fleet.tasks.Submit.future(request(f"gone-{number}-{i}"), timeout=20)
                time.sleep(0.0002 * (i % 10))
                call.cancel()

        with ThreadPoolExecutor() as pool:
            pool.map(break_off, range(4))
            for i in range(50):  # while they do
                answer = fleet.tasks.Submit(request(f"stays-{i}"), timeout=20)
                assert answer.results[0].task_id
        assert fleet.stats().queued >= 50
        assert fleet.master.stop() == 0, "it ends only when all is on the disk"
        assert not fleet.faults()
        assert "InvalidStateError" not in fleet.master.log()

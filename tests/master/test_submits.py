"""Submit: its answers if the journal can't write all tasks of a batch."""

import asyncio
from pathlib import Path

import pytest
from multigpu.v1 import task_pb2, task_service_pb2
from multigpu_master.errors import JournalFullError
from multigpu_master.journal.protocol import Entry

from tests.master.stage import Stage


def request(*names: str) -> task_service_pb2.SubmitRequest:
    batch = task_pb2.TaskBatch(spec=task_pb2.TaskSpec(kind="echo", wait_for_worker=True))
    for name in names:
        batch.inputs.add(request_id=name, payload=b"x")
    return task_service_pb2.SubmitRequest(batches=[batch])


async def test_a_task_that_a_batch_joins_goes_on_if_a_new_one_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was answered with a rejection, and ran."""
    stage = Stage(tmp_path)
    (first,) = (await stage.service.Submit(request("known"), None)).results
    append, loop, buffer = stage.journal.append, asyncio.get_running_loop(), stage.driver.write_buffer

    def full(*entries: Entry) -> None:
        for entry in entries:
            if entry.submits:
                loop.call_soon(buffer.handle_commit, [entry], 0, JournalFullError("full"))
            else:
                append(entry)

    monkeypatch.setattr(stage.journal, "append", full)
    known, new = (await stage.service.Submit(request("known", "new"), None)).results
    assert known.task_id == first.task_id
    assert new.rejection.code == 8
    stage.journal.close(20)

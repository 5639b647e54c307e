"""Payloads that the master can't read when it sends a lease."""

import errno
from pathlib import Path

import pytest
from multigpu._transport.payloads import Reference
from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease, Task
from multigpu_master.journal.payload_files import Payloads
from multigpu_master.wire.payloads import Peer, read_payloads

from tests.core.stage import SPEC, Stage, lease_of


class Unreadable:
    """A pinned segment on a host that has no memory left, or whose file is gone."""

    name = "segment"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def read(self, _offset: int, _size_bytes: int) -> bytes:
        raise self.error


def lease_with(error: Exception) -> tuple[Stage, Lease]:
    stage = Stage()
    stage.worker()
    task = Task(SPEC, "", Reference(Unreadable(error), 0, 1 << 20))
    stage.submitted([task])
    return stage, lease_of(task)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "no memory")])
def test_a_payload_that_can_not_be_read_now_costs_its_task_neither_an_attempt_nor_a_loss(
    tmp_path: Path, error: Exception
) -> None:
    stage, lease = lease_with(error)
    kept, _, failures = read_payloads([lease], Peer(Payloads(tmp_path, lambda _name: False)))
    assert not kept
    stage.handle(ev.Reports(lease.worker.session, failures=failures))
    task = lease.task
    assert (task.attempts, task.outcome, task.ensure_extra().losses) == (0, None, 0)
    stage.handle(ev.Tick(), 0.2)
    assert lease_of(task) is not lease


def test_a_payload_whose_file_is_gone_costs_an_attempt(tmp_path: Path) -> None:
    stage, lease = lease_with(FileNotFoundError(errno.ENOENT, "gone"))
    _, _, failures = read_payloads([lease], Peer(Payloads(tmp_path, lambda _name: False)))
    stage.handle(ev.Reports(lease.worker.session, failures=failures))
    error = lease.task.ensure_extra().last_error
    assert error is not None
    assert (lease.task.attempts, error.type) == (1, "PayloadLost")

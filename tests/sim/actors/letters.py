"""What operators do with dead letters: see rpc/admin/dead_letters.py."""

from multigpu_master.core.model import Task
from multigpu_master.errors import JournalError
from multigpu_master.journal.protocol import Entry

from tests.sim.actors.master import Master


def requeue(master: Master, task_id: int) -> None:
    """The letter goes and its task comes in one transaction; until then no other call finds it."""
    core = master.core
    assert core is not None, "the master is up"
    letter = master.journal.dead.get(task_id)
    if letter is None or task_id in master.requeueing or task_id in core.ledger.tasks:
        return  # in core.ledger.tasks: the core is still to learn that the outcome is written
    assert isinstance(letter.payload, bytes), "simulated payloads are small"
    known = core.ledger.requests.get(letter.request_id) or master.journal.by_request[letter.request_id]
    if known.task_id != task_id:
        master.world.coverage["letter: another task has its request_id"] += 1
        return
    master.requeueing[task_id] = None
    spec = master.specs[letter.spec]
    task = Task(spec, letter.request_id, letter.payload, letter.partition_key, letter.units)
    task.task_id = task_id

    def done(error: JournalError | None) -> None:
        del master.requeueing[task_id]
        if error is None and taken is task:
            master.world.coverage["letter: requeued"] += 1
            master.requeued[task_id] += 1

    (taken,) = master.submit_tasks(spec, [task], 0, done, {task.request_id: task_id})


def discard(master: Master, task_id: int) -> None:
    if task_id in master.journal.dead:
        master.world.coverage["letter: discarded"] += 1
        master.discarded[task_id] = None
        master.write_buffer.append(Entry(deleted_dead_letters=(task_id,)))

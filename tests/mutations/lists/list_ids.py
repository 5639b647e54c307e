"""Mutations of what keeps ids from being given out twice, and from being taken for others: ids.py and its users."""

from functools import partial

from tests.mutations.mutation import Mutation

ids = partial(Mutation, module="multigpu_master.ids", seeds=3000)
core = partial(Mutation, module="multigpu_master.core.scheduler", seeds=1000)

IDS = (
    ids(
        name="an epoch is not above the last",
        old="max(last + 1, ",
        new="max(1, ",
        seeds=1000,
    ),
    ids(
        name="an epoch is not the clock's",
        old="max(last + 1, int(now_s) - FIRST_EPOCH_S)",
        new="last + 1",
        checker="stories",
    ),
    ids(
        name="ids of unknown incarnations count",
        old="self._ends.get(name, (0, 0))[0]",
        new="self._ends.get(name, (EPOCHS_END * EPOCH_IDS, 0))[0]",
        breaks="P2: a task gets the result of another",
    ),
    ids(
        name="ids of an older incarnation have no end",
        old="{one.name: (after.first_id, ",
        new="{one.name: (EPOCHS_END * EPOCH_IDS, ",
        breaks="P2: on a restored copy a task gets the result of another",
        seeds=20000,
    ),
    ids(
        name="cursors of unknown incarnations count",
        old="self._ends.get(name, (0, 0))[1]",
        new="self._ends.get(name, (0, CURSORS_END))[1]",
        breaks="P9: a watch skips outcomes after the data directory was lost",
    ),
    ids(
        name="cursors of an older incarnation have no end",
        old="(after.first_id, after.first_cursor) for",
        new="(after.first_id, CURSORS_END) for",
        breaks="P9: a watch skips outcomes after an older copy was restored",
    ),
    Mutation(
        name="leases of another journal are adopted",
        module="multigpu_master.core.workers.sessions",
        old=" and max(h.lease_id, h.task_id) < event.ids_end]",
        new="]",
        breaks="P2: a task gets the result of another",
        seeds=3000,
    ),
    Mutation(
        name="leases that were never granted are adopted",
        module="multigpu_master.core.workers.sessions",
        old="h.proven and ",
        new="",
        breaks="P2: a worker takes any task whose id it guesses, and its result counts",
    ),
    ids(
        name="a lease's proof does not name the worker",
        old="blake2b(worker_id.encode(), ",
        new='blake2b(b"", ',
        breaks="P2: a worker takes the leases of another worker",
        seeds=6000,
    ),
    core(
        name="ids are not renewed",
        module="multigpu_master.core.restart",
        old="self.renew_at = (first_id + self.end) // 2",
        new="self.renew_at = self.end + 1",
        breaks="P7: after 16 million ids nothing is taken any more",
    ),
    core(
        name="ids are renewed again and again",
        module="multigpu_master.core.restart",
        old="        self.renew_at = self.end + 1\n",
        new="",
        checker="stories",
    ),
    Mutation(
        name="leases go on past the last id",
        module="multigpu_master.core.placement.dispatch",
        old=" and ids.next_id < ids.end:",
        new=":",
    ),
    Mutation(
        name="tasks go on past the last id",
        module="multigpu_master.core.admission",
        old="    if ids.next_id >= ids.end:\n",
        new="    if False:\n",
    ),
    Mutation(
        name="new ids before they are on the disk",
        module="multigpu_master.journal.write_buffer",
        old="self._append(_Pending(Entry(epoch=epoch), 0, done=done), urgent=True)",
        new="self._append(_Pending(Entry(epoch=epoch), 0), urgent=True)\n        done(None)",
        seeds=20000,
    ),
    Mutation(
        name="a worker forgets who granted its leases",
        module="multigpu_worker.session.session",
        old="        self.incarnation = incarnation\n",
        new="",
        checker="stories",
    ),
    ids(
        name="ids begin where the epoch does",
        old=" + int(now_s % 1.0 * (EPOCH_IDS // 2))",
        new="",
        checker="stories",
    ),
    Mutation(
        module="multigpu_master.core.restart",
        name="lease_ids are given twice",
        old="        self.next_id += 1\n        return self.next_id - 1\n",
        new="        return self.next_id\n",
        breaks="P2: the fencing token fences nothing",
    ),
)

"""Mutations of ids (IDS), and of payloads, expiry, backups, clock, driver and telemetry (STORE).

An incarnation is one start of a master; an epoch is the upper part of the ids that it gives out.
"""

from functools import partial

from tests.mutations.mutation import Mutation

ids = partial(Mutation, module="multigpu_master.ids", seeds=3000)
core = partial(Mutation, module="multigpu_master.core.scheduler", seeds=1000)

IDS = (
    ids(
        name="an epoch ignores the last epoch",
        old="max(last + 1, ",
        new="max(1, ",
        seeds=1000,
    ),
    ids(
        name="an epoch ignores the wall clock",
        old="max(last + 1, int(now_s) - FIRST_EPOCH_S)",
        new="last + 1",
        checker="pytest",
    ),
    ids(
        name="ids from an unknown incarnation are accepted",
        old="self._ends.get(name, (0, 0))[0]",
        new="self._ends.get(name, (EPOCHS_END * EPOCH_IDS, 0))[0]",
        breaks="P2: a task gets the result of another",
    ),
    ids(
        name="ids of an older incarnation have no upper bound",
        old="{one.name: (after.first_id, ",
        new="{one.name: (EPOCHS_END * EPOCH_IDS, ",
        breaks="P2: on a restored copy a task gets the result of another",
        seeds=20000,
    ),
    ids(
        name="cursors from an unknown incarnation are accepted",
        old="self._ends.get(name, (0, 0))[1]",
        new="self._ends.get(name, (0, CURSORS_END))[1]",
        breaks="P9: a watch skips outcomes after the data directory was lost",
    ),
    ids(
        name="cursors of an older incarnation have no upper bound",
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
        name="the id range is not renewed",
        module="multigpu_master.core.restart",
        old="self.renew_at = (first_id + self.end) // 2",
        new="self.renew_at = self.end + 1",
        breaks="P7: after 16 million ids nothing is taken any more",
    ),
    core(
        name="the id range is renewed repeatedly",
        module="multigpu_master.core.restart",
        old="        self.renew_at = self.end + 1\n",
        checker="pytest",
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
        name="new ids are used before their epoch is synced",
        module="multigpu_master.journal.write_buffer",
        old="self._append(_Pending(Entry(epoch=epoch), 0, done=done), urgent=True)",
        new="self._append(_Pending(Entry(epoch=epoch), 0), urgent=True)\n        done(None)",
        seeds=20000,
    ),
    Mutation(
        name="a worker forgets who granted its leases",
        module="multigpu_worker.session.session",
        old="        self.incarnation = incarnation\n",
        checker="pytest",
    ),
    ids(
        name="first ids ignore the fraction of a second",
        old=" + int(now_s % 1.0 * (EPOCH_IDS // 2))",
        checker="pytest",
    ),
    Mutation(
        module="multigpu_master.core.restart",
        name="lease_ids are given twice",
        old="        self.next_id += 1\n        return self.next_id - 1\n",
        new="        return self.next_id\n",
        breaks="P2: the fencing token fences nothing",
    ),
)

store = partial(Mutation, checker="store", seeds=1)
payloads = partial(store, module="multigpu_master.payloads.shared_files")
driver = partial(store, module="multigpu_master.driver")
clock = partial(store, module="multigpu_master.clock")
segments = partial(store, module="multigpu_master.journal.sqlite.segments")

STORE = (
    payloads(
        name="a payload file is not synced",
        old="                os.fdatasync(fd)\n",
        new="                pass\n",
        breaks="P1: a large payload is acknowledged before it is on the disk",
    ),
    payloads(
        name="the name of a payload file is not synced",
        old="            os.fsync(self._dir_fd)\n",
        new="            pass\n",
        breaks="P1: an acknowledged task's payload file is gone after a loss of power",
    ),
    payloads(
        name="a payload file that its writer has locked is deleted",
        old="            except BlockingIOError:\n                return False\n",
        new="            except BlockingIOError:\n                pass\n",
        breaks="a client's payload is deleted before it is submitted",
    ),
    payloads(
        name="a payload file that a row refers to is deleted",
        old="            if name in self._journaled and self._in_use(name):\n                return True\n",
        new="",
        breaks="P1: the journal keeps an outcome whose result is gone",
    ),
    payloads(
        name="every key opens the payload directory",
        old="        return hmac.compare_digest(key, self._key)\n",
        new="        return True\n",
        breaks="a peer that cannot read the directory gets references instead of bytes",
    ),
    store(
        module="multigpu_master.payloads.messages",
        name="a result that cannot be read has no error",
        old="    return body.head[:-result_head_bytes] + lost.SerializeToString()\n",
        new="    return body.head[:-result_head_bytes]\n",
        breaks="a lost result is delivered as an empty value",
    ),
    segments(
        name="the checksum of a large payload is not compared",
        old="        if zlib.crc32(data) != crc:",
        new="        if False:",
        breaks="a damaged result is delivered as a value",
    ),
    segments(
        name="segments are deleted while rows refer to them",
        old="        if used:\n            return False\n        (self",
        new="        (self",
        breaks="P1: payloads of queued tasks are lost",
    ),
    store(
        module="multigpu_master.journal.sqlite.sweep",
        name="the row of the newest outcome expires",
        old="cursor < ?5 AND expire_time_s <= ?3 AND settle",
        new="?5 > 0 AND expire_time_s <= ?3 AND settle",
        breaks="P9: a cursor is given out twice",
    ),
    store(
        module="multigpu_master.journal.sqlite.reads",
        name="expired results are returned until they are deleted",
        old="            expire_time_s <= self._retention.now(outcome.cursor)\n",
        new="            not self._retention.now(outcome.cursor)\n",
        breaks="whether a result is expired depends on when it is swept",
    ),
    store(
        module="multigpu_master.journal.sqlite.directory",
        name="an interrupted backup is started from",
        old="    if path.with_name(PART_NAME).exists():\n",
        new="    if False:\n",
        breaks="a master begins with an empty journal in place of a backup",
    ),
    driver(
        name="a cancellation is sent before it is durable",
        old="                if not writable or is_cancelled(task):\n",
        new="                if not writable:\n",
        breaks="a cancelled task runs after a restart",
    ),
    driver(
        name="an outcome without space on the disk is sent",
        old="                if not writable or is_cancelled(task):\n",
        new="                if is_cancelled(task):\n",
        breaks="P9: a client has an outcome that the next master does not know",
    ),
    driver(
        name="a stream that is not read is not ended",
        old="        outbox.abort(ExhaustedError(",
        new="        _ = (ExhaustedError(",
        breaks="P10: outcomes for a slow client fill the memory",
    ),
    driver(
        name="ids are used before their epoch is durable",
        old="        self.journaling.begin_epoch(epoch, begun)\n",
        new="        begun(None)\n",
        breaks="P2: two tasks have one id after a restart",
    ),
    clock(
        name="the clock jumps with the host's",
        old="max(-SLEW, min(SLEW, error_s / READ_EVERY_S))",
        new="error_s / READ_EVERY_S",
        breaks="sessions and results expire when the host's clock is set",
    ),
    clock(
        name="the next master's clock begins before the last one's",
        old="        return max(begin_s, self.time_s)\n",
        new="        return begin_s\n",
        breaks="what was stamped by the last master is in the future",
    ),
    store(
        module="multigpu_master.telemetry.device_metrics",
        name="devices of lost workers keep their values",
        old="w.health if w.session else None)",
        new="w.health)",
        breaks="a device that is gone looks healthy",
    ),
)

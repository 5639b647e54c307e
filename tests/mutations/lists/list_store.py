"""Mutations of ids (IDS), and of payloads, expiry, backups, clock, driver and telemetry (STORE).

An incarnation is one start of a master; an epoch is the upper part of the ids that it gives out.
"""

from functools import partial

from tests.mutations.mutation import Mutation

INCARNATIONS = "master/journal/test_incarnations.py::test_"
ids = partial(Mutation, module="multigpu_master.ids", seeds=3000)
core = partial(Mutation, module="multigpu_master.core.scheduler", seeds=1000)

IDS = (
    ids("an epoch ignores the last epoch", "max(last + 1, ", "max(1, ", seeds=1000),
    ids("an epoch ignores the wall clock", "max(last + 1, int(now_s) - FIRST_EPOCH_S)", "last + 1", checker="pytest"),
    ids(
        "P2: ids from an unknown incarnation are accepted",
        "self._ends.get(name, (0, 0))[0]",
        "self._ends.get(name, (EPOCHS_END * EPOCH_IDS, 0))[0]",
    ),
    ids(
        "P2: on a restored copy a task gets the result of another",
        "{one.name: (after.first_id, ",
        "{one.name: (EPOCHS_END * EPOCH_IDS, ",
        checker=f"{INCARNATIONS}a_restored_copy_knows_an_incarnation_as_far_as_it_has_it",
    ),
    ids(
        "P9: a watch skips outcomes after the data directory was lost",
        "self._ends.get(name, (0, 0))[1]",
        "self._ends.get(name, (0, CURSORS_END))[1]",
    ),
    ids("P9: a watch skips outcomes after an older copy was restored", "after.first_cursor", "CURSORS_END"),
    Mutation(
        "P2: leases of another journal are adopted",
        " and max(h.lease_id, h.task_id) < event.ids_end]",
        "]",
        module="multigpu_master.core.workers.sessions",
        seeds=3000,
    ),
    Mutation(
        "P2: a worker takes any task whose id it guesses, and its result counts",
        "h.granted_by_this_journal and ",
        "",
        module="multigpu_master.core.workers.sessions",
    ),
    ids("P2: a worker takes the leases of another worker", "blake2b(worker_id.encode(), ", 'blake2b(b"", ', seeds=6000),
    core(
        "P7: after 16 million ids nothing is taken any more",
        "self.renew_at = (first_id + self.end) // 2",
        "self.renew_at = self.end + 1",
        module="multigpu_master.core.restart",
    ),
    core(
        "the id range is renewed repeatedly",
        "self.renew_at = self.end + 1",
        module="multigpu_master.core.restart",
        checker="pytest",
    ),
    Mutation(
        "leases go on past the last id",
        "            if ids.next_id >= ids.end:\n                break\n",
        "",
        module="multigpu_master.core.placement.dispatch",
    ),
    Mutation("tasks go on past the last id", "if ids.next_id >= ids.end:", module="multigpu_master.core.admission"),
    Mutation(
        "new ids are used before their epoch is synced",
        "self._append(_Pending(entry, 0, done=done), urgent=urgent)",
        "self._append(_Pending(entry, 0, done=None if entry.epoch else done), urgent=urgent)\n"
        "        _ = entry.epoch and done and done(None)",
        module="multigpu_master.write_buffer",
        seeds=20000,
    ),
    Mutation(
        "a worker forgets who granted its leases",
        "self.incarnation = incarnation",
        module="multigpu_worker.session.session",
        checker="pytest",
    ),
    ids(
        "first ids ignore the fraction of a second",
        " + int(now_s % 1.0 * (EPOCH_IDS // 2))",
        "",
        checker=f"{INCARNATIONS}a_journal_that_is_lost_and_replaced_within_a_second_repeats_no_id",
    ),
    Mutation(
        "P2: lease_ids are given twice",
        "        self.next_id += 1\n        return self.next_id - 1\n",
        "        return self.next_id\n",
        module="multigpu_master.core.restart",
    ),
)

store = partial(Mutation, checker="store")
payloads = partial(store, module="multigpu_master.journal.payload_files")
driver = partial(store, module="multigpu_master.driver")
clock = partial(store, module="multigpu_master.clock")
segments = partial(store, module="multigpu_master.journal.sqlite.segments")

STORE = (
    payloads("P1: a large payload is acknowledged before it is on the disk", "os.fdatasync(fd)"),
    payloads(
        "P1: an acknowledged task's payload file is gone after a loss of power",
        "            os.fsync(self._dir_fd)\n",
        "",
    ),
    payloads(
        "P1: the name of a payload file that precedes the master is not synced",
        "os.fsync(self._dir_fd)  # makes",
        "pass  # after",
    ),
    payloads("a client's payload is deleted before it is submitted", "return False"),
    payloads(
        "P1: the journal keeps an outcome whose result is gone",
        "            if name in self._journaled and self._in_use(name):\n                return True\n",
    ),
    payloads(
        "a peer that cannot read the directory gets references instead of bytes",
        "        return hmac.compare_digest(key, self._key)\n",
        "        return True\n",
    ),
    store(
        "a lost result is delivered as an empty value",
        "    return body.without_result() + lost.SerializeToString()\n",
        "    return body.without_result()\n",
        module="multigpu_master.wire.payloads",
    ),
    segments("a damaged result is delivered as a value", "if zlib.crc32(data) != crc:"),
    segments("P1: payloads of queued tasks are lost", "if not used:", "if True:"),
    store("P9: a cursor is given out twice", "cursor < ?5", "?5 > 0", module="multigpu_master.journal.sqlite.sweep"),
    store(
        "whether a result is expired depends on when it is swept",
        "            expire_time_s <= self._downtimes.now_without_downtime_s(outcome.cursor)\n",
        "            not self._downtimes.now_without_downtime_s(outcome.cursor)\n",
        module="multigpu_master.journal.sqlite.reads",
    ),
    store(
        "salvage keeps an outcome with which no master starts",
        "if not _is_time(settle_time_s):",
        module="multigpu_master.journal.sqlite.reads",
        checker="master/journal/test_backup.py::test_rows_that_make_no_sense_are_salvaged_away_and_named",
    ),
    store(
        "a master begins with an empty journal in place of a backup",
        "if path.with_name(PART_NAME).exists():",
        module="multigpu_master.journal.sqlite.directory",
    ),
    driver("a cancelled task runs after a restart", "if not writable or is_cancelled(task):\n", "if not writable:\n"),
    driver("P9: a client has an outcome that the next master does not know", "if not writable or", "if"),
    driver("P10: outcomes for a slow client fill the memory", "outbox.abort(ExhaustedError(", "_ = (ExhaustedError("),
    driver(
        "P2: two tasks have one id after a restart",
        "self.write_buffer.append(Entry(epoch=epoch), epoch_written)\n",
        "begun(None)\n",
    ),
    clock(
        "sessions and results expire when the host's clock is set",
        "return self._offset_s + self._monotonic()",
        "return self._wall()",
    ),
    clock(
        "the next master's clock begins before the last one's",
        "max(self._offset_s, newest_s - self._monotonic())",
        "self._offset_s",
    ),
    store(
        "a device that is gone looks healthy",
        "w.health if w.session else None)",
        "w.health)",
        module="multigpu_master.metrics.devices",
    ),
)

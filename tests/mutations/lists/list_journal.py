"""Mutations of the journal's rules: write_buffer.py (what is on its way, who is told),
journal/sqlite/journal.py (what is written), journal/request_filter.py.
"""

from functools import partial

from tests.mutations.mutation import Mutation

write_buffer = partial(Mutation, module="multigpu_master.write_buffer")
sqlite = partial(Mutation, module="multigpu_master.journal.sqlite.journal", checker="journal", seeds=100)
room = partial(Mutation, module="multigpu_master.journal.sqlite.room", checker="journal", seeds=100)
log = partial(Mutation, module="multigpu_master.journal.sqlite.wal")
driver = partial(Mutation, module="multigpu_master.driver")
statements = partial(Mutation, module="multigpu_master.journal.sqlite.statements", checker="journal", seeds=100)
known = partial(Mutation, module="multigpu_master.journal.request_filter")
wire = partial(Mutation, module="multigpu_master.wire.tasks")
identity = partial(Mutation, module="multigpu_master.core.identity")
failures = partial(Mutation, module="multigpu_master.journal.sqlite.failures", checker="pytest")
reads = partial(Mutation, module="multigpu_master.journal.sqlite.reads", checker="results", seeds=50)
intake = partial(Mutation, module="multigpu_master.rpc.intake", checker="results", seeds=50)

DRIVER, LOG = "master/test_driver.py::test_", "disk/test_log_damage.py::test_"

JOURNAL = (
    write_buffer(
        "P1: acceptance before fsync",
        "replaced=replaced, done=done)\n        self._append(pending, urgent=urgent)\n",
        "replaced=replaced)\n        self._append(pending, urgent=urgent)\n        done(None)\n",
    ),
    write_buffer(
        "P5: the core forgets a task that the journal does not answer for yet",
        "        self._append(pending, urgent=done is not None)\n",
        "        self._append(pending, urgent=False)\n        self._handle(ev.SettlesDone(tasks))\n",
    ),
    write_buffer(
        "a cancellation that was answered is undone by a kill",
        ", settled=tasks, done=done)\n",
        ", settled=tasks)\n        if done is not None:\n            done(None)\n",
    ),
    write_buffer("P10: the core is not notified of committed outcomes", "self._handle(ev.SettlesDone(settled))"),
    write_buffer(
        "P1: a task is run that the journal rejected", "self._handle(ev.SubmitFailed(pending.submitted))", seeds=1000
    ),
    write_buffer(
        "clients wait for ever to be told that their tasks are safe",
        "            if pending.done is not None:\n                pending.done(error)\n",
    ),
    write_buffer(
        "outcomes wait for somebody else's entry to reach the disk",
        "self._linger_timer = self._loop.call_later(LINGER_S, self._hand_over)",
    ),
    failures(
        "idle connections of anybody end the master",
        'if no_descriptor or getattr(error, "errno", None) in NO_DESCRIPTOR:',
    ),
    write_buffer(
        "P1: tasks that run for long are never written",
        "self._deferral_timer = self._loop.call_later(DEFER_S / 2, self._write_older)",
        checker="pytest",
    ),
    write_buffer(
        "an entry of deferred tasks is not counted as pending",
        "        self._deferred_bytes -= pending.size\n        self._pending[id(pending.entry)] = pending\n",
        "        self._deferred_bytes -= pending.size\n",
    ),
    write_buffer(
        "a settled task is still deferred", "deferred.pop(task.task_id, None)", "deferred.get(task.task_id)", seeds=1000
    ),
    write_buffer(
        "a settled task counts as never written",
        "submit_may_be_stored=task.task_id not in unwritten",
        "submit_may_be_stored=False",
        seeds=1000,
    ),
    statements("a settled task is not deleted", "for record in settles if", "for record in settles[1:] if"),
    write_buffer(
        "P1: something that was acknowledged rests on a task that is lost",
        "            self._end_deferrals()  # when",
        "            pass  # when",
        checker="pytest",
    ),
    write_buffer(
        "P5: a repeated request_id makes a second task once the first has settled",
        "self._request_filter.add([task.request_id for task in tasks if task.request_id])",
        checker="known",
        seeds=50,
    ),
    driver(
        "after an exception the master acts on a state that is half changed",
        "self._broken = True",
        checker=DRIVER + "after_an_event_that_failed_half_way_the_master_handles_nothing_more",
    ),
    driver(
        "P1: outcomes are told before they go to the journal",
        "self._loop.call_soon(self.write_buffer.append_settles, durable, self.now(), done)",
        checker=DRIVER + "a_result_that_can_not_be_read_is_lost_alone",
    ),
    known(
        "P5: request_ids settled during the load are not in the filter",
        "        return self._load(journal, len(self._filters) - 1)\n",
        "        return self._load(journal, len(self._filters))\n",
        checker="known",
        seeds=50,
    ),
    known(
        "P5: requests are known by half",
        " if request_id in found] if found",
        " if request_id in found and hash(request_id) & 1] if found",
        checker="known",
        seeds=50,
    ),
    known(
        "P5: a full filter is not asked any more", "self._filters:", "self._filters[-1:]:", checker="known", seeds=50
    ),
    known(
        "P5: a new master does not ask its journal",
        "        if not self._loaded_capacity:\n            return list(request_ids)\n",
        checker="known",
        seeds=50,
    ),
    sqlite(
        "P1: a commit is acknowledged before it is made",
        "        self._commit(batch, bytes_total)\n        self._on_commit(batch, first_cursor, None)\n",
        "        self._on_commit(batch, first_cursor, None)\n        self._commit(batch, bytes_total)\n",
    ),
    sqlite("P1: entries that failed on a full disk are dropped", "self._pending.extendleft(reversed(batch))"),
    sqlite(
        "cursors are not in order of settling",
        "self._pending.extendleft(reversed(batch))",
        "self._pending.extendleft(batch)",
    ),
    sqlite("P9: the last cursor is not advanced", "self._last_cursor += outcomes"),
    statements(
        "P4: a dead letter can't be tried again",
        "letters |= {record.task_id: record.dead for record in entry.settles if record.dead is not None}",
    ),
    write_buffer(
        "a dead letter goes before the outcome that replaces it",
        "settles.get(task_id, pending.entry)",
        "pending.entry",
        checker="master/journal/test_write_buffer.py::"
        "test_a_dead_letter_goes_with_the_outcome_that_replaces_it_or_not_at_all",
    ),
    statements("a dead letter can be tried again twice", "for task_id in stored]\n", "for task_id in ()]\n"),
    statements(
        "a task that was retried at once leaves its dead letter",
        "if letters.pop(task_id, None) is None]",
        "if task_id not in letters]",
        checker="sim/test_journal_model.py::test_the_simulated_journal_is_a_model_of_the_real_one",
    ),
    statements(
        "a cordon does not survive a restart",
        "statements += [setting(key, value) for key, value in entry.settings.items()]",
    ),
    sqlite("P1: a full disk rejects outcomes", "            if entry.submits:\n", "            if True:\n"),
    sqlite(
        "a task that was never submitted has an outcome",
        "if any(record.task_id in self._rejected for record in entry.settles):",
    ),
    sqlite(
        "clients wait for ever to hear of tasks that were rejected",
        "        if rejected:\n            self._on_commit(rejected, 0, self._full)\n",
    ),
    sqlite("the first transaction after a full disk fails", 'self._writer.execute("ROLLBACK")'),
    sqlite("submits are rejected for ever", "self._full = self._room.prepare_for_submits()"),
    sqlite(
        "deletions wait for space",
        '"outcomes" if not is_small_or_frees(entry) else "settings" if entry.settings or entry.epoch else ""',
        '"outcomes"',
    ),
    sqlite(
        "outcomes wait for ever, though the disk has room",
        "not self._stuck and self._write_batch()",
        "self._full is None and self._write_batch()",
        checker="master/journal/test_journal_full.py::test_over_its_limit_it_rejects_submits_and_writes_all_else",
    ),
    log(
        "after a loss of power a master does not start",
        " and self._is_whole(number):\n",
        ":\n",
        LOG + "a_bit_of_a_torn_transaction_that_says_it_has_ended_is_no_damage",
    ),
    log(
        "P1: a flipped bit drops acknowledged tasks without a word",
        "    commits = list(_Log(data, page_bytes).commits_after(frames_read))\n",
        "    commits = list[int]()\n",
        LOG + "a_flipped_bit_in_the_log_is_noticed",
    ),
    room("the reserve is never released", "        self._reserve.release()\n", checker="full"),
    sqlite(
        "P1: entries after the close marker are lost",
        "            received = [entry for entry in received if entry is not _CLOSE]\n",
        "            received = received[: received.index(_CLOSE)][:-1]\n",
    ),
    statements(
        "P1: a statement's last row is cut off", "chunk += [None]", "chunk[-fields:] = []\n        chunk += [None]"
    ),
    intake(
        "a result that is not there is delivered as a value",
        "    message.state = task_pb2.OUTCOME_STATE_RESULT_MISSING if missing else stored.state",
        "    message.state = stored.state",
    ),
    intake("one damaged outcome hides all others", "message.Clear()\n            lost", "raise\n            lost"),
    intake("P5: another task is answered with what ended", "answers.append(clash or stored)", "answers.append(stored)"),
    wire("P5: no fingerprint is kept", " else None, identity.fingerprint(task),\n", " else None, None,\n"),
    identity(
        "P5: payloads are all alike",
        'return "another payload" if crc >= 0 and crc != known_fingerprint >> SPEC_BITS else',
        "return",
    ),
    identity("P5: parameters are all alike", "if known_fingerprint & (1 << SPEC_BITS) - 1 != spec.identity:"),
    identity(
        "P1: a task that was acknowledged as durable is lost with its master",
        "if resubmit.spec.durable and not durable:",
        checker="pytest",
    ),
    Mutation(
        "P5: another task is given the one that waits",
        "        if rejected is not None:\n            return rejected\n",
        module="multigpu_master.core.scheduler",
    ),
    Mutation(
        "P5: an ephemeral task's payload is forgotten",
        "payload_crc(task)",
        module="multigpu_master.core.ledger",
        checker="pytest",
    ),
    reads("a deleted file is taken for a time to live that is over", "outcome.lost = f", "_ = f"),
    reads("one truncated file ends the whole Watch", "            if is_transient(error):\n", "            if True:\n"),
    Mutation(
        "P1: acknowledged tasks are lost silently with a log that was deleted",
        "    return bool(flagged)\n",
        "    return False\n",
        module="multigpu_master.journal.sqlite.schema",
        checker="pytest",
    ),
    Mutation(
        "a task that settles during the call is counted twice",
        "task_filter.for_journal(cursor_max))",
        "task_filter.for_journal())",
        module="multigpu_master.rpc.queries",
        checker="pytest",
    ),
    write_buffer(
        "a task is cancelled for its client and runs after a restart", "if self.writable:", "if True:", checker="pytest"
    ),
    Mutation(
        "P2: tasks whose outcomes were delivered during a stop run again",
        "self.driver.write_buffer.flush()",
        module="multigpu_master.server",
        checker="master/test_server_end.py::test_outcomes_that_are_delivered_during_a_stop_are_in_the_journal",
    ),
)

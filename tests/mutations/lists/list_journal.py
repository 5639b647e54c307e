"""Mutations of the journal's rules: journal/write_buffer.py (what is on its way, who is told),
journal/sqlite/journal.py (what is written), journal/request_filter.py.
"""

from functools import partial

from tests.mutations.mutation import Mutation

journaling = partial(Mutation, module="multigpu_master.journal.write_buffer")
sqlite = partial(Mutation, module="multigpu_master.journal.sqlite.journal", checker="journal", seeds=100)
room = partial(Mutation, module="multigpu_master.journal.sqlite.room", checker="journal", seeds=100)
log = partial(Mutation, module="multigpu_master.journal.sqlite.wal", checker="log", seeds=20)
driver = partial(Mutation, module="multigpu_master.driver", checker="driver", seeds=1)
statements = partial(Mutation, module="multigpu_master.journal.sqlite.statements", checker="journal", seeds=100)
known = partial(Mutation, module="multigpu_master.journal.request_filter")
wire = partial(Mutation, module="multigpu_master.wire.tasks")
identity = partial(Mutation, module="multigpu_master.core.identity")
failures = partial(Mutation, module="multigpu_master.journal.sqlite.failures", checker="pytest", seeds=1)
reads = partial(Mutation, module="multigpu_master.journal.sqlite.reads", checker="results", seeds=50)
intake = partial(Mutation, module="multigpu_master.rpc.intake", checker="results", seeds=50)

JOURNAL = (
    journaling(
        name="acceptance before fsync",
        old=", submitted=fresh, done=done), urgent=urgent)\n",
        new=", submitted=fresh), urgent=urgent)\n        done(None)\n",
        breaks="P1: a task is acknowledged before it is on the disk",
    ),
    journaling(
        name="forgotten before fsync",
        old="        self._append(pending, urgent=done is not None)\n",
        new="        self._append(pending, urgent=False)\n        self._handle(ev.SettlesCommitted(tasks))\n",
        breaks="P5: the core forgets a task that the journal does not answer for yet",
    ),
    journaling(
        name="a cancellation is told before fsync",
        old=", settled=tasks, done=done)\n",
        new=", settled=tasks)\n        if done is not None:\n            done(None)\n",
        breaks="a cancellation that was answered is undone by a kill",
    ),
    journaling(
        name="the core is not notified of committed outcomes",
        old="            self._handle(ev.SettlesCommitted(settled))\n",
        new="            pass\n",
        breaks="P10: settled tasks stay in memory",
    ),
    journaling(
        name="rejected submits live on",
        old="                self._handle(ev.SubmitFailed(pending.submitted))\n",
        new="                pass\n",
        breaks="P1: a task is run that the journal rejected",
        seeds=1000,
    ),
    journaling(
        name="commits are not acknowledged",
        old="            if pending.done is not None:\n                pending.done(error)\n",
        new="",
        breaks="clients wait for ever to be told that their tasks are safe",
    ),
    journaling(
        name="deferred outcomes are never written",
        old="            self._linger_timer = self._loop.call_later(LINGER_S, self._hand_over)\n",
        new="            pass\n",
        breaks="outcomes wait for somebody else's entry to reach the disk",
    ),
    failures(
        name="no file descriptor is the end of the journal",
        old='    if getattr(error, "errno", None) in NO_DESCRIPTOR:\n',
        new="    if False:\n",
        breaks="idle connections of anybody end the master",
    ),
    journaling(
        name="deferred tasks are never written",
        old="            self._deferral_timer = self._loop.call_later(DEFER_S, self._write_due)\n",
        new="            pass\n",
        breaks="P1: tasks that run for long are never written",
        checker="pytest",
        seeds=1,
    ),
    journaling(
        name="an entry of deferred tasks is not counted as pending",
        old="{id(pending.entry): pending for pending in (first, last)}",
        new="{id(last.entry): last}",
        breaks="an entry comes back from the disk that nobody knows",
    ),
    journaling(
        name="a settled task is still deferred",
        old="                if deferred.pop(task.task_id, None) is not None:\n",
        new="                if deferred.get(task.task_id) is not None:\n",
        breaks="the journal keeps a task that has ended",
        seeds=1000,
    ),
    journaling(
        name="a settled task counts as never written",
        old="submitted=task.task_id not in unwritten",
        new="submitted=False",
        breaks="the journal keeps a task that has ended, and the next master runs it again",
        seeds=1000,
    ),
    statements(
        name="a settled task is not deleted",
        old="    if ended := [record.task_id for record in settles if record.submitted]:\n",
        new="    if ended := [record.task_id for record in settles[1:] if record.submitted]:\n",
        breaks="the journal keeps a task that has ended, and the next master runs it again",
    ),
    journaling(
        name="deferred tasks come after what is reported",
        old="            self._end_deferrals(math.inf)  # clients",
        new="            pass  # clients",
        breaks="P1: something that was acknowledged rests on a task that is lost",
        checker="pytest",
        seeds=1,
    ),
    journaling(
        name="request_ids of settled tasks are not in the filter",
        old="        self._request_filter.add([task.request_id for task in tasks if task.request_id])\n",
        new="",
        breaks="P5: a repeated request_id makes a second task once the first has settled",
        checker="known",
        seeds=50,
    ),
    driver(
        name="the driver continues after a failed event",
        old="                self._broken = True\n",
        new="",
        breaks="after an exception the master acts on a state that is half changed",
    ),
    driver(
        name="outcomes are told before they go to the journal",
        old="            self._loop.call_soon(self.journaling.settles, durable, done)  # as in submit\n",
        new="            pass\n",
        breaks="P1: what ended is never journaled when a peer can't be told of it",
    ),
    known(
        name="request_ids settled during the load are not in the filter",
        old="        return self._load(journal, len(self._filters) - 1)\n",
        new="        return self._load(journal, len(self._filters))\n",
        breaks="P5: a repeated request_id makes a second task",
        checker="known",
        seeds=50,
    ),
    known(
        name="requests are known by half",
        old=" if request_id in found] if found",
        new=" if request_id in found and hash(request_id) & 1] if found",
        breaks="P5: the journal is not asked for what it knows",
        checker="known",
        seeds=50,
    ),
    known(
        name="a full filter is not asked any more",
        old="        for each in self._filters:\n            found",
        new="        for each in self._filters[-1:]:\n            found",
        breaks="P5: a repeated request_id makes a second task",
        checker="known",
        seeds=50,
    ),
    known(
        name="requests are known before the journal was read",
        old="        if not self._loaded_capacity:\n            return list(request_ids)\n",
        new="",
        breaks="P5: a new master does not ask its journal",
        checker="known",
        seeds=50,
    ),
    sqlite(
        name="a commit is acknowledged before it is made",
        old="        try:\n            commit(batch, bytes_total)\n",
        new="        if batch:\n            self._on_commit(batch, first_cursor, None)\n"
        "        try:\n            commit(batch, bytes_total)\n            return len(batch)\n",
        breaks="P1: a task is acknowledged before it is on the disk",
    ),
    sqlite(
        name="entries that failed on a full disk are dropped",
        old="            waiting.extendleft(reversed(batch))\n",
        new="",
        breaks="P1: outcomes are lost on a full disk",
    ),
    sqlite(
        name="entries that failed are retried in the wrong order",
        old="            waiting.extendleft(reversed(batch))\n",
        new="            waiting.extendleft(batch)\n",
        breaks="cursors are not in order of settling",
    ),
    sqlite(
        name="the last cursor is not advanced",
        old="        self._last_cursor += outcomes\n",
        new="",
        breaks="P9: two outcomes have one cursor",
    ),
    statements(
        name="dead letters are not kept",
        old="        letters |= {record.task_id: record.dead for record in entry.settles if record.dead is not None}\n",
        breaks="P4: a dead letter can't be tried again",
    ),
    statements(
        name="deleted dead letters stay",
        old="(task_id,)) for task_id in written]\n",
        new="(task_id,)) for task_id in ()]\n",
        breaks="a dead letter can be tried again twice",
    ),
    statements(
        name="a dead letter that is deleted before it is written stays",
        old="if letters.pop(task_id, None) is None]",
        new="if task_id not in letters]",
        checker="sim/test_journal_model.py::test_the_simulated_journal_is_a_model_of_the_real_one",
        breaks="a task that was retried at once leaves its dead letter",
    ),
    statements(
        name="settings are not written",
        old="        statements += [setting(key, value) for key, value in entry.settings.items()]\n",
        new="",
        breaks="a cordon does not survive a restart",
    ),
    sqlite(
        name="a full disk rejects outcomes",
        old="            if entry.submits:\n                rejected.append(entry)\n",
        new="            if True:\n                rejected.append(entry)\n",
        breaks="P1: outcomes are lost on a full disk",
    ),
    sqlite(
        name="rejected tasks are settled",
        old="            if any(record.task_id in self._rejected for record in entry.settles):\n",
        new="            if False:\n",
        breaks="a task that was never submitted has an outcome",
    ),
    sqlite(
        name="rejections by a full disk are not reported",
        old="        if rejected:\n            self._on_commit(rejected, 0, self._full)\n",
        new="",
        breaks="clients wait for ever to hear of tasks that were rejected",
    ),
    sqlite(
        name="a failed transaction is left open",
        old='            self._writer.execute("ROLLBACK")\n',
        new="            pass\n",
        breaks="the first transaction after a full disk fails",
    ),
    sqlite(
        name="a disk with room again is full",
        old="            self._full = None\n            self._rejected.clear()\n",
        new="            self._rejected.clear()\n",
        breaks="submits are rejected for ever",
    ),
    sqlite(
        name="deletions wait for space",
        old="            (self._freeing if frees(entry) and not self._over else self._pending).append(entry)\n",
        new="            self._pending.append(entry)\n",
        breaks="a full disk can't be emptied",
    ),
    room(
        name="the journal's limit is for outcomes, too",
        old="self.size_max_bytes if self.limited else UNLIMITED_BYTES",
        new="self.size_max_bytes",
        breaks="outcomes wait for ever, and nothing expires, though the disk has room",
        checker="full",
        seeds=1,
    ),
    log(
        name="a frame that says it ends a transaction is believed",
        old="            if follows and self._is_whole(number):\n",
        new="            if follows:\n",
        breaks="after a loss of power a master does not start",
    ),
    log(
        name="the log is believed to the end that SQLite sees",
        old="    commits = list(whole.commits_after(frames_read))\n",
        new="    commits = list[int]()\n",
        breaks="P1: a flipped bit drops acknowledged tasks without a word",
    ),
    room(
        name="the reserve is never given up",
        old="        self.reserve.give_up()\n        self.limit()\n",
        new="        pass\n",
        breaks="a full disk can't be emptied",
        checker="full",
        seeds=1,
    ),
    sqlite(
        name="entries after the close marker are lost",
        old="            taken = [entry for entry in taken if entry is not _CLOSE]\n",
        new="            taken = taken[: taken.index(_CLOSE)][:-1]\n",
        breaks="P1: what was handed over before a stop is lost",
    ),
    statements(
        name="a statement's last row is cut off",
        old="        chunk += [None] * (size * fields - len(chunk))\n",
        new="        chunk[-fields:] = []\n        chunk += [None] * (size * fields - len(chunk))\n",
        breaks="P1: a row of a transaction is missing",
    ),
    intake(
        name="a missing result is a success without bytes",
        old="    message.state = task_pb2.OUTCOME_STATE_RESULT_MISSING if missing else stored.state",
        new="    message.state = stored.state",
        breaks="a result that is not there is delivered as a value",
    ),
    intake(
        name="a damaged outcome ends the call",
        old="            message.Clear()\n            lost",
        new="            raise\n            lost",
        breaks="one damaged outcome hides all others",
    ),
    intake(
        name="another task is answered with what ended",
        old="                answers.append(other or stored)\n",
        new="                answers.append(stored)\n",
        breaks="P5: a request_id that is used again gives another task's result",
    ),
    wire(
        name="no fingerprint is kept",
        old=" else None, identity.fingerprint(task),\n",
        new=" else None, None,\n",
        breaks="P5: a request_id that is used again gives another task's result",
    ),
    identity(
        name="payloads are all alike",
        old='    return "another payload" if 0 <= crc != known >> SPEC_BITS else ""\n',
        new='    return ""\n',
        breaks="P5: a request_id that is used again gives another task's result",
    ),
    identity(
        name="parameters are all alike",
        old="    if known & (1 << SPEC_BITS) - 1 != spec.identity:\n",
        new="    if False:\n",
        breaks="P5: a request_id that is used again gives another task's result",
    ),
    identity(
        name="a durable task is one with an ephemeral one",
        old="    if again.spec.durable and not durable:\n",
        new="    if False:\n",
        breaks="P1: a task that was acknowledged as durable is lost with its master",
        checker="pytest",
        seeds=1,
    ),
    Mutation(
        module="multigpu_master.core.scheduler",
        name="another task is given the one that waits",
        old="        if other is not None:\n            return other\n",
        new="",
        breaks="P5: a request_id that is used again gives another task's result",
    ),
    Mutation(
        module="multigpu_master.core.ephemeral",
        name="an ephemeral task's payload is forgotten",
        old="                payload_crc(task)\n",
        new="                pass\n",
        breaks="P5: the same request_id is rejected, as if it were another's",
        checker="pytest",
        seeds=1,
    ),
    reads(
        name="a lost result is called expired",
        old="                outcome.lost = f",
        new="                _ = f",
        breaks="a deleted file is taken for a time to live that is over",
    ),
    reads(
        name="a lost result ends the call",
        old="            if is_transient(error):\n",
        new="            if True:\n",
        breaks="one truncated file ends the whole Watch",
    ),
    Mutation(
        module="multigpu_master.journal.sqlite.schema",
        name="a missing log is not noticed",
        old="    return bool(flagged)\n",
        new="    return False\n",
        breaks="P1: acknowledged tasks are lost silently with a log that was deleted",
        checker="pytest",
        seeds=1,
    ),
    Mutation(
        module="multigpu_master.rpc.queries",
        name="Count reads all that the journal has",
        old="wanted.for_journal(cursor_max))",
        new="wanted.for_journal())",
        breaks="a task that settles during the call is counted twice",
        checker="pytest",
        seeds=1,
    ),
    journaling(
        name="cancellations don't need room",
        old="        if self.writable:\n            return sys.maxsize\n",
        new="        if True:\n            return sys.maxsize\n",
        breaks="a task is cancelled for its client and runs after a restart",
        checker="pytest",
        seeds=1,
    ),
)

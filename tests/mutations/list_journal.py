"""Mutations of the journal's rules: journaling.py (what is on its way, who is told), journal_sqlite.py (what is
written), known_requests.py.
"""

from functools import partial

from tests.mutations.mutation import Mutation

journaling = partial(Mutation, module="multigpu_master.journaling")
sqlite = partial(Mutation, module="multigpu_master.journal_sqlite", checker="journal", seeds=100)
known = partial(Mutation, module="multigpu_master.known_requests")

JOURNAL = (
    journaling(
        name="acceptance before fsync",
        old=", submitted=fresh, done=done), urgent=urgent)\n",
        new=", submitted=fresh), urgent=urgent)\n        done(None)\n",
        breaks="P1: a task is acknowledged before it is on the disk",
    ),
    journaling(
        name="forgotten before fsync",
        old=", settled=tasks), urgent=False)\n",
        new=", settled=tasks), urgent=False)\n        self._handle(ev.SettlesCommitted(tasks))\n",
        breaks="P5: the core forgets a task that the journal does not answer for yet",
    ),
    journaling(
        name="commits of outcomes are not told",
        old="            self._handle(ev.SettlesCommitted(settled))\n",
        new="            pass\n",
        breaks="P10: settled tasks stay in memory",
    ),
    journaling(
        name="refused submits live on",
        old="                self._handle(ev.SubmitFailed(pending.submitted))\n",
        new="                pass\n",
        breaks="P1: a task is run that the journal refused",
        seeds=1000,
    ),
    journaling(
        name="nobody is told of a commit",
        old="            if pending.done is not None:\n                pending.done(error)\n",
        new="",
        breaks="clients wait for ever to be told that their tasks are safe",
    ),
    journaling(
        name="what lingers is never written",
        old="            self._linger = self._loop.call_later(LINGER_S, self._flush)\n",
        new="            pass\n",
        breaks="outcomes wait for somebody else's entry to reach the disk",
    ),
    journaling(
        name="what waits patiently is never written",
        old="            self._patience = self._loop.call_later(PATIENCE_S / 2, self._grow_old)\n",
        new="            pass\n",
        breaks="P1: tasks that run for long are never written",
        checker="stories",
        seeds=1,
    ),
    journaling(
        name="what lost patience is out of the books",
        old="        self._pending_bytes += size\n        return [pending]\n",
        new="        del self._pending[id(pending.entry)]\n        return [pending]\n",
        breaks="an entry comes back from the disk that nobody knows",
    ),
    journaling(
        name="what has settled still waits patiently",
        old="            task = old.pop(task_id, None) or young.pop(task_id, None)\n",
        new="            task = young.pop(task_id, None)\n",
        breaks="the journal keeps a task that has ended",
        seeds=1000,
    ),
    journaling(
        name="what waits patiently comes after what is told",
        old="                self._lingering[:0] = self._lose_patience(self._old, self._young)\n            lingering",
        new="                pass\n            lingering",
        breaks="P1: something that was acknowledged rests on a task that is lost",
        seeds=40000,
    ),
    journaling(
        name="settled requests are not known",
        old="        self._known_requests.add([task.request_id for task in tasks if task.request_id])\n",
        new="",
        breaks="P5: a repeated request_id makes a second task once the first has settled",
        checker="known",
        seeds=50,
    ),
    known(
        name="what settles while the journal is read is not known",
        old="        self._since = list(pending)\n        return self._load(journal, self._since)\n",
        new="        return self._load(journal, list(pending))\n",
        breaks="P5: a repeated request_id makes a second task",
        checker="known",
        seeds=50,
    ),
    known(
        name="requests are known by half",
        old=" if slots[hash(request_id) & mask]]\n",
        new=" if slots[hash(request_id) & mask] and hash(request_id) & 1]\n",
        breaks="P5: the journal is not asked for what it knows",
        checker="known",
        seeds=50,
    ),
    known(
        name="requests are known before the journal was read",
        old="        if not self._loaded:\n            return list(request_ids)\n",
        new="",
        breaks="P5: a new master does not ask its journal",
        checker="known",
        seeds=50,
    ),
    sqlite(
        name="a commit is told before it is made",
        old="        try:\n            if batch:\n                self._commit(batch, bytes_total)\n",
        new="        try:\n            if batch:\n                self._on_commit(batch, first_cursor, None)\n"
        "                self._commit(batch, bytes_total)\n                return True\n",
        breaks="P1: a task is acknowledged before it is on the disk",
    ),
    sqlite(
        name="what failed for want of room is dropped",
        old="            self._pending.extendleft(reversed(batch))\n",
        new="",
        breaks="P1: outcomes are lost on a full disk",
    ),
    sqlite(
        name="what failed goes back in the wrong order",
        old="            self._pending.extendleft(reversed(batch))\n",
        new="            self._pending.extendleft(batch)\n",
        breaks="cursors are not in order of settling",
    ),
    sqlite(
        name="cursors are not counted on",
        old="        self._last_cursor += outcomes\n",
        new="",
        breaks="P9: two outcomes have one cursor",
    ),
    sqlite(
        name="dead letters are not kept",
        old="        letters = [record.dead for record in settles if record.dead is not None]\n",
        new="        letters = list[SubmitRecord]()\n",
        breaks="P4: a dead letter can't be tried again",
    ),
    sqlite(
        name="deleted dead letters stay",
        old="(i,)) for i in entry.deleted_dead_letters]\n",
        new="(i,)) for i in ()]\n",
        breaks="a dead letter can be tried again twice",
    ),
    sqlite(
        name="settings are not written",
        old="            statements += [_setting(key, value) for key, value in entry.settings.items()]\n",
        new="",
        breaks="a cordon does not survive a restart",
    ),
    sqlite(
        name="a full disk refuses outcomes",
        old="            if entry.submits:\n                refused.append(entry)\n",
        new="            if True:\n                refused.append(entry)\n",
        breaks="P1: outcomes are lost on a full disk",
    ),
    sqlite(
        name="refused tasks are settled",
        old="            elif any(record.task_id in self._refused for record in entry.settles):\n",
        new="            elif False:\n",
        breaks="a task that was never submitted has an outcome",
    ),
    sqlite(
        name="refused tasks are not told",
        old="        if refused:\n            self._on_commit(refused, 0, self._full)\n",
        new="",
        breaks="clients wait for ever to hear of tasks that were refused",
    ),
    sqlite(
        name="a failed transaction is left open",
        old='            self._writer.execute("ROLLBACK")\n',
        new="            pass\n",
        breaks="the first transaction after a full disk fails",
    ),
    sqlite(
        name="a disk with room again is full",
        old="        if room_again:\n            self._full = None\n",
        new="        if room_again:\n            pass\n",
        breaks="submits are refused for ever",
    ),
    sqlite(
        name="what comes behind the end is lost",
        old="            taken = [entry for entry in taken if entry is not _CLOSE]\n",
        new="            taken = taken[: taken.index(_CLOSE)][:-1]\n",
        breaks="P1: what was handed over before a stop is lost",
    ),
    sqlite(
        name="a statement's last row is cut off",
        old="        chunk += [None] * (size * fields - len(chunk))\n",
        new="        chunk[-fields:] = []\n        chunk += [None] * (size * fields - len(chunk))\n",
        breaks="P1: a row of a transaction is missing",
    ),
)

"""The contents that a journal must have after a loss of power, from what its process had acknowledged.

Everything acknowledged, and of what was handed over since some part without a gap: entries are written in order, each
whole or not at all. So there must be a number of unacknowledged entries with which the contents are exactly the ones
found. An outcome keeps its cursor, and payloads and bodies are compared to the byte.
"""

import functools
import itertools
import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multigpu_master.journal.sqlite import schema as journal_schema
from multigpu_master.journal.sqlite.journal import SqliteJournal

from tests.disk.journal_process import DEAD_LETTERED, FOREVER_S, SIZE_MAX_BYTES, data_of

data_of_cached = functools.lru_cache(maxsize=20_000)(data_of)


class LostError(AssertionError):
    """A promise was broken; the message says which."""


@dataclass(slots=True)
class Contents:
    """What a journal holds, by numbers."""

    tasks: set[int] = field(default_factory=set)
    outcomes: dict[int, tuple[int, int, int, bool]] = field(default_factory=dict)  # cursor -> task, state, body, kept
    letters: set[int] = field(default_factory=set)
    settings: dict[str, str] = field(default_factory=dict)

    last_cursor: int = 0

    def copy(self) -> "Contents":
        return Contents(set(self.tasks), dict(self.outcomes), set(self.letters), dict(self.settings), self.last_cursor)

    def apply(self, entry: dict[str, Any], rejected: set[int]) -> None:
        self.tasks.update(entry.get("submits", ()))
        for task_id, body, state, expire_time_s in entry.get("settles", ()):
            if task_id in rejected:
                continue
            self.tasks.discard(task_id)
            self.last_cursor += 1
            self.outcomes[self.last_cursor] = (task_id, state, body, expire_time_s == FOREVER_S)
            if state == DEAD_LETTERED:
                self.letters.add(task_id)
        for key, value in entry.get("settings", {}).items():
            if value is None:
                self.settings.pop(key, None)
            else:
                self.settings[key] = value
        self.letters.difference_update(entry.get("deleted", ()))

    def key(self) -> tuple[list[int], int, list[int], dict[str, str]]:
        return sorted(self.tasks), self.last_cursor, sorted(self.letters), self.settings


def _sort(entry: dict[str, Any]) -> str:
    """Entries of one sort are written in order."""
    return next((sort for sort in ("settings", "deleted") if sort in entry), "rest")


class Truth:
    """The entries that a process appended, and those that its journal acknowledged."""

    def __init__(self, certain: Contents) -> None:
        self.certain = certain
        self._waiting: dict[int, dict[str, Any]] = {}  # handed over, and not acknowledged
        self._rejected: set[int] = set()  # tasks
        self.acknowledged = 0  # entries

    def copy(self) -> "Truth":
        other = Truth(self.certain.copy())
        other._waiting, other._rejected = dict(self._waiting), set(self._rejected)
        return other

    def observe(self, line: bytes) -> None:
        event = json.loads(line)
        if "append" in event:
            self._waiting[event["append"]] = event
        elif "committed" in event:
            assert event["first_cursor"] == self.certain.last_cursor + 1 or not event["committed"], event
            for number, settled in zip(event["committed"], event["settled"], strict=True):
                entry = self._waiting[number]
                first = next(n for n, each in self._waiting.items() if _sort(each) == _sort(entry))
                touches = settled or "submits" in entry or "settings" in entry
                if number != first and touches:
                    raise LostError(f"entry {number} was acknowledged before entry {first}")
                del self._waiting[number]
                left_out = {settle[0] for settle in entry.get("settles", ())} - set(settled)
                if not left_out <= self._rejected:
                    raise LostError(f"settles of {sorted(left_out - self._rejected)} were left out, and not rejected")
                self.certain.apply(entry, left_out)
                self.acknowledged += 1
        elif "rejected" in event:
            for number in event["rejected"]:
                self._rejected.update(self._waiting.pop(number).get("submits", ()))
        elif "opened" in event:
            # A process that was killed, or met an error, has a successor: what that one finds it may tell to clients.
            self.settle_on((event["tasks"], event["last_cursor"], event["letters"], event["settings"]))

    def settle_on(self, found: tuple[list[int], int, list[int], dict[str, str]]) -> None:
        """Takes the recovered contents as certain. LostError: they are not a possible result."""
        # The settle of a task that was rejected is left out while there is no room. One that comes when there is room
        # again is written, and does no harm: whoever submits the task again by its request_id is given its outcome.
        # On a full disk settings, in order, and deletions, in any, go ahead of the rest; they touch nothing of it.
        waiting = self._waiting.values()
        ahead, rest = ([entry for entry in waiting if _sort(entry) == sort] for sort in ("settings", "rest"))
        deleted = [entry for entry in waiting if "deleted" in entry and not set(entry["deleted"]) & set(found[2])]
        for count, left_out in itertools.product(range(len(ahead) + 1), (self._rejected, set[int]())):
            contents = self.certain.copy()
            for early in (*ahead[:count], *deleted):
                contents.apply(early, left_out)
            for entry in (*rest, None):
                if contents.key() == found:
                    self.certain, self._waiting, self._rejected = contents, {}, set()
                    return
                if entry is not None:
                    contents.apply(entry, left_out)
        tasks, cursor, letters, settings = self.certain.key()
        raise LostError(
            f"tasks acknowledged and gone: {sorted(set(tasks) - set(found[0]))[:5]}; found besides: "
            f"{sorted(set(found[0]) - set(tasks))[:5]}; newest outcome {found[1]}, acknowledged {cursor}; dead letters "
            f"{len(found[2])}, acknowledged {len(letters)}; settings {found[3]}, acknowledged {settings}; "
            f"{len(self._waiting)} entries were on their way"
        )

    def check(self, data_dir: Path) -> None:
        """Opens the real journal, as a new master would, and compares all of it. LostError: it is not as promised."""
        journal = SqliteJournal(data_dir, size_max_bytes=SIZE_MAX_BYTES)
        recovered = journal.open(lambda *_: None)
        try:
            tasks = list(recovered.tasks)
            outcomes = {o.cursor: o for o in journal.read_outcomes(0, 1 << 30, 1 << 40)}
            letter_ids = [o.task_id for o in journal.list_dead_letters(queue="", before_task_id=0, limit=1 << 30)]
            letters = journal.get_dead_letters(letter_ids)
        finally:
            journal.close(20)
        settings = {key: value.decode() for key, value in recovered.settings.items()}
        self.settle_on(
            ([t.task_id for t in tasks], recovered.last_cursor, sorted(x.task_id for x in letters), settings)
        )
        for record in (*tasks, *letters):
            if record.payload != data_of_cached(record.task_id):
                raise LostError(f"task {record.task_id} has another payload than it was submitted with")
        for cursor, (task_id, state, body, kept) in self.certain.outcomes.items():
            found = outcomes.pop(cursor, None)
            if found is None or (found.task_id, found.state) != (task_id, state):
                raise LostError(f"cursor {cursor} was the outcome of task {task_id}, and is now {found}")
            if (found.body is not None or kept) and found.body != data_of_cached(body):
                raise LostError(f"cursor {cursor}: the outcome of task {task_id} has another body than was written")
        if outcomes:
            raise LostError(f"outcomes that nobody wrote: {sorted(outcomes)}")
        with closing(sqlite3.connect(data_dir / journal_schema.DATABASE_NAME)) as database:
            if (verdict := database.execute("PRAGMA integrity_check").fetchone()[0]) != "ok":
                raise LostError(f"the database is damaged: {verdict}")

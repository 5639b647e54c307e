"""Reading the SQLite journal, from any thread.

Every query is one statement on an idle connection or on a new one. So queries wait neither for each other nor for the
writer, and leave no transaction open: an open transaction would keep SQLite from emptying the log.
"""

# ruff: noqa: S608  # statements are put together from this package's constants; values are always bound

import itertools
import json
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from multigpu._transport.payloads import Reference, is_transient
from multigpu.v1 import task_pb2

from multigpu_master.core.identity import REQUEST_ID_FREE
from multigpu_master.core.usage import UsageSums
from multigpu_master.errors import (
    JournalClosedError,
    JournalDamagedError,
    JournalError,
    JournalFullError,
    PayloadLostError,
)
from multigpu_master.ids import TIME_END_S
from multigpu_master.journal.downtimes import Downtimes
from multigpu_master.journal.payload_files import Payloads
from multigpu_master.journal.protocol import Checks, OutcomeFilter, SettledTask, StoredOutcome, SubmitRecord, UsageKey
from multigpu_master.journal.sqlite import connections, failures, schema, usage
from multigpu_master.journal.sqlite import specs as journal_specs
from multigpu_master.journal.sqlite.segments import IN_USE, LargeObjects, bounds

# In the order of SettledTask's fields.
_SETTLED_COLUMNS = (
    "o.cursor, o.task_id, o.request_id, o.state, o.queue, o.kind, o.model, o.submit_time_s, o.fingerprint"
)
_OUTCOME_COLUMNS = f"{_SETTLED_COLUMNS}, o.expire_time_s, o.body"
_TIMED_OUTCOME_COLUMNS = f"{_OUTCOME_COLUMNS}, o.settle_time_s"
_LOST_PAGE_ROWS = 64  # in one page of `lost_rows`; few, because their payloads and results are read as well
_TASKS_ROWS = 4096
LIST_BYTES = 16 << 20  # a list of outcomes ends once their bodies, without large results, have this size
# A dead letter that was requeued has one outcome for each time that its task settled. The newest counts.
_NEWEST = "NOT EXISTS (SELECT 1 FROM outcome newer WHERE newer.task_id = o.task_id AND newer.cursor > o.cursor)"
# Dead letters that were requeued or deleted are neither listed nor counted; get_outcome still finds them.
_NO_FORMER_LETTER = (
    f"(o.state <> {task_pb2.OUTCOME_STATE_DEAD_LETTERED} "
    f"OR EXISTS (SELECT 1 FROM dead_letter d WHERE d.task_id = o.task_id) AND {_NEWEST})"
)
# The request_id of a requeued or deleted dead letter is free for another task.
_REQUEST_COLUMNS = _SETTLED_COLUMNS.replace(
    "o.fingerprint", f"CASE WHEN {_NO_FORMER_LETTER} THEN o.fingerprint ELSE {REQUEST_ID_FREE} END"
)
# The parameters: a queue or "", a task_id or 0, a limit, and a list of queues or NULL.
_LETTERS = (
    "SELECT {} FROM dead_letter d CROSS JOIN outcome o ON o.task_id = d.task_id "
    f"WHERE {_NEWEST} AND (?1 = '' OR o.queue = ?1) AND (?2 = 0 OR d.task_id < ?2) "
    "AND (?4 IS NULL OR o.queue IN (SELECT value FROM json_each(?4))) ORDER BY d.task_id DESC LIMIT ?3"
)
# The types of a row's columns. SQLite does not check them, and keeps no checksums.
_TASK_TYPES = (int, str, (bytes, str), (bytes, str), str, int, float, int)
_SETTLED_TYPES = (int, int, str, int, str, str, str, float, (int, type(None)))
_STATES = range(1, 6)
_INTEGER_MAX = 2**63 - 1  # of SQLite; ids are smaller


class JournalReads:
    """The reading half of the journal. Public methods raise JournalError if a file can't be read or is damaged."""

    def __init__(
        self, data_dir: Path, now: Callable[[], float] = time.time, database: str = schema.DATABASE_NAME
    ) -> None:
        self._now = now
        self._downtimes = Downtimes(now)
        self._data_dir = data_dir
        self._path = data_dir / database
        self.payloads = Payloads(data_dir, self._refers_to)
        self._large = LargeObjects(data_dir, self.payloads)
        self._idle: list[sqlite3.Connection] = []
        self._lock = threading.Lock()  # protects _idle and _closed
        self._closed = False

    def close_readers(self) -> None:
        with self._lock:
            self._closed = True
        self._close_idle_readers()

    def _close_idle_readers(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._closed:
                raise JournalClosedError("The journal is closed.")
            connection = self._idle.pop() if self._idle else None
        try:
            if connection is None:
                connection = connections.connect_reader(self._path)
            yield connection
        except sqlite3.Error as error:
            if connection is not None:
                connection.close()
            raise failures.explain(error, self._path) from error
        except BaseException:
            if connection is not None:
                connection.close()  # a statement may be half read
            raise
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _rows(self, sql: str, parameters: Sequence[Any]) -> list[Any]:
        with self._connection() as connection:
            return connection.execute(sql, parameters).fetchall()

    def _settled(self, row: Sequence[Any]) -> SettledTask:
        """Returns the task of a row that begins with _SETTLED_COLUMNS."""
        task = SettledTask(*row[: len(_SETTLED_TYPES)])
        valid = _are(row, _SETTLED_TYPES) and _is_time(task.submit_time_s)
        if not (valid and task.state in _STATES and task.cursor > 0 and task.task_id > 0):
            raise self._damaged(f"the outcome at cursor {row[0]!r} makes no sense")
        return task

    def _outcome(self, row: Sequence[Any], *, whole: bool = True) -> StoredOutcome:
        """Returns the outcome of a row of _OUTCOME_COLUMNS. `whole`: False leaves out a large result."""
        self._settled(row)
        *settled, expire_time_s, body = row
        if not isinstance(expire_time_s, float):
            raise self._damaged(f"the outcome at cursor {row[0]!r} makes no sense")
        outcome = StoredOutcome(*[*settled, None])
        if (
            expire_time_s <= self._downtimes.now_without_downtime_s(outcome.cursor)
            and outcome.state != task_pb2.OUTCOME_STATE_DEAD_LETTERED
        ):
            return outcome  # the sweeper will delete the body
        if body is None or isinstance(body, bytes):
            outcome.body = body
            return outcome
        try:
            if not isinstance(body, str):
                raise ValueError("a body is bytes, or refers to them")  # noqa: TRY301, TRY004  it is damaged, see `read`
            outcome.body = self._large.read(body) if whole else self._large.read_without_result(body)
        except (OSError, ValueError) as error:
            if is_transient(error):
                raise failures.explain(error, self._path) from error
            # Not lost if the sweeper has deleted the body since the row was read.
            if self._rows("SELECT 1 FROM outcome WHERE cursor = ? AND body = ?", (outcome.cursor, body)):
                outcome.lost = f"{str(body)[:33]!r} of {self._data_dir}: {getattr(error, 'strerror', None) or error}"
        return outcome

    def _task(self, row: Sequence[Any], specs: dict[bytes | str, bytes], *, refer: bool = False) -> SubmitRecord:
        """`specs`: specs read before, by column value. `refer`: return a payload in a shared file as a Reference."""
        task = SubmitRecord(*row)
        if not (
            _are(row, _TASK_TYPES)
            and _is_time(task.submit_time_s)
            and 0 < task.task_id < 1 << 53
            and 0 <= task.first_lease_id < 1 << 53
            and 0 < task.units < 1 << 32
        ):
            raise self._damaged(f"task {row[0]!r} makes no sense")
        if task.spec not in specs:
            specs[task.spec] = self._read_spec(task.spec)
        task.spec = specs[task.spec]
        if isinstance(task.payload, str):
            payload = self._payload(task.payload, refer=refer)
            if payload is None:
                raise PayloadLostError(
                    f"The payload of task {task.task_id} is missing: its segment of {self._data_dir} is gone or too "
                    "short. Restore the whole directory from a backup, or run `mgpu-master --data-dir "
                    f"{self._data_dir} salvage`, which removes such tasks and says which."
                )
            task.payload = payload
        return task

    def _read_spec(self, column_value: bytes | str) -> bytes:
        if isinstance(column_value, bytes):
            return column_value
        rows = self._rows(journal_specs.SELECT, (column_value,))
        if not rows or not isinstance(rows[0][0], bytes):
            raise self._damaged(f"the spec {column_value[:100]!r} of a task is missing")
        return rows[0][0]

    def _damaged(self, what: str) -> JournalDamagedError:
        return JournalDamagedError(
            f"The journal {self._path} is damaged: {what}. Restore its directory from a backup, or run `mgpu-master "
            f"--data-dir {self._data_dir} salvage`, which keeps what can be read and says what is gone."
        )

    def _refers_to(self, name: str) -> bool:
        """Whether any row refers to the segment `name`."""
        return bool(self._rows(IN_USE, bounds(name))[0][0])

    def _payload(self, reference: str, *, refer: bool) -> bytes | Reference | None:
        """Returns the payload, or None if its file is gone or too short."""
        try:
            return self._large.restore(reference) if refer else self._large.read(reference)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise self._damaged(f"{reference[:100]!r}: {error}") from error
        except OSError as error:
            raise failures.explain(error, self._path) from error

    def size_bytes(self) -> int:
        files = itertools.chain(self._data_dir.glob(f"{self._path.name}*"), self._large.directory.glob("*"))
        return sum(_size_bytes(file) for file in files) + self.payloads.size_bytes

    def lost_rows(self, checks: Checks) -> Iterator[tuple[str, int, bool, str]]:
        """Reads everything. For each row that can't be read as a whole, yields its table, its key, whether salvage
        keeps the row because only the result of an outcome is lost, and a description.
        """
        for table, name in (("task", "task"), ("dead_letter", "dead letter"), ("outcome", "the outcome of task")):
            is_outcome = table == "outcome"
            key, columns = ("cursor", _TIMED_OUTCOME_COLUMNS) if is_outcome else ("task_id", schema.TASK_COLUMNS)
            sql = f"SELECT {columns} FROM {table} o WHERE {key} > ? ORDER BY {key} LIMIT {_LOST_PAGE_ROWS}"
            last = 0
            while rows := self._rows(sql, (last,)):
                last = rows[-1][0]
                for row in rows:
                    why, stays = self._why_lost(row, checks, is_outcome=is_outcome)
                    if why:
                        task_id, request_id = row[is_outcome : is_outcome + 2]
                        yield table, row[0], stays, f"{name} {task_id} (request_id {request_id!r}): {why}"

    def _why_lost(self, row: Sequence[Any], checks: Checks, *, is_outcome: bool) -> tuple[str, bool]:
        """Why a row can't be read as a whole ("" if it can), and whether salvage keeps the row."""
        try:
            if not is_outcome:
                return checks.spec(self._task(row, {}).spec), False
            *columns, settle_time_s = row
            if not _is_time(settle_time_s):
                raise self._damaged(f"the row's time is {settle_time_s!r} s")
            outcome = self._outcome(columns)
            return outcome.lost if outcome.body is None else checks.body(outcome.body), True
        except JournalError as error:
            cause = error.__cause__
            if isinstance(error, JournalFullError) or (cause is not None and not _is_lost(cause)):
                raise  # the row isn't lost: it can't be read now, or not by this user
            return str(error).partition(". ")[0], is_outcome and not isinstance(error, JournalDamagedError)

    def recover_tasks(self) -> Iterator[SubmitRecord]:
        """All unsettled tasks, in task_id order. Equal specs are one object."""
        specs = dict[bytes | str, bytes]()
        last_task_id = 0
        while True:
            rows = self._rows(
                f"SELECT {schema.TASK_COLUMNS} FROM task WHERE task_id > ? ORDER BY task_id LIMIT ?",
                (last_task_id, _TASKS_ROWS),
            )
            if not rows:
                return
            last_task_id = rows[-1][0]
            for row in rows:
                yield self._task(row, specs, refer=True)

    def usage(
        self, begin_s: float, end_s: float, group_by: Sequence[str] = (), queues: Collection[str] | None = None
    ) -> list[tuple[UsageKey, UsageSums]]:
        """Returns what tasks have used in the intervals that overlap the period, summed by the `group_by` fields of
        UsageKey (the other fields are ""), the largest device time first. `queues`: None for all.
        """
        return [
            usage.parse_row(row) for row in self._rows(*usage.select(begin_s, end_s, group_by, _json_or_null(queues)))
        ]

    def find_requests(self, request_ids: Sequence[str]) -> dict[str, SettledTask]:
        """Returns the settled tasks with these request_ids, by request_id. json_each cuts a request_id at a NUL. No
        task has such a request_id, but the answer may then have the task whose request_id is the part before it.
        """
        # In the order of cursors: if several tasks had a request_id, one after the other, the newest counts.
        sql = (
            f"SELECT {_REQUEST_COLUMNS} FROM outcome o WHERE o.request_id IN (SELECT value FROM json_each(?)) "
            "AND o.request_id <> '' ORDER BY o.cursor"
        )
        return {row[2]: self._settled(row) for row in self._rows(sql, (json.dumps(list(request_ids)),))}

    def read_outcomes_of(self, tasks: Sequence[SettledTask], bytes_max: int) -> list[StoredOutcome]:
        """Returns the outcomes of the tasks, in order, until all bodies together have `bytes_max` or more."""
        outcomes: list[StoredOutcome] = []
        bytes_read = 0
        for task in tasks:
            if outcomes and bytes_read >= bytes_max:
                break
            rows = self._rows(f"SELECT {_OUTCOME_COLUMNS} FROM outcome o WHERE o.cursor = ?", (task.cursor,))
            outcome = StoredOutcome(**asdict(task), body=None)
            try:
                outcome = self._outcome(rows[0]) if rows else outcome  # else the sweeper has deleted the row since
            except JournalDamagedError as error:  # the other outcomes can be read
                outcome.lost = str(error)
            outcomes.append(outcome)
            bytes_read += len(outcome.body or b"")
        return outcomes

    def request_ids(self) -> Iterator[list[str]]:
        """The request_ids of all settled tasks, a page at a time."""
        cursor = 0
        while True:
            rows = self._rows(
                "SELECT cursor, request_id FROM outcome WHERE cursor > ? ORDER BY cursor LIMIT ?", (cursor, _TASKS_ROWS)
            )
            if not rows:
                return
            cursor = rows[-1][0]
            yield [request_id for _, request_id in rows if request_id]

    def find_tasks(self, task_ids: Collection[int]) -> dict[int, SettledTask]:
        """The settled tasks with these task_ids."""
        sql = (
            f"SELECT {_SETTLED_COLUMNS} FROM outcome o WHERE o.task_id IN (SELECT value FROM json_each(?)) "
            "ORDER BY o.cursor"
        )
        return {row[1]: self._settled(row) for row in self._rows(sql, (json.dumps(list(task_ids)),))}

    def get_outcome(self, task_id: int, *, whole: bool = True) -> StoredOutcome | None:
        """Returns the newest outcome of a task. `whole`: False leaves out a large result."""
        if task_id > _INTEGER_MAX:
            return None
        rows = self._rows(
            f"SELECT {_OUTCOME_COLUMNS} FROM outcome o WHERE o.task_id = ? ORDER BY o.cursor DESC LIMIT 1", (task_id,)
        )
        return self._outcome(rows[0], whole=whole) if rows else None

    def read_outcomes(self, after_cursor: int, limit: int, bytes_max: int) -> list[StoredOutcome]:
        """Returns the outcomes after a cursor, oldest first: at most `limit`, whose bodies together have at most
        `bytes_max` bytes, but at least one.
        """
        sql = f"SELECT {_OUTCOME_COLUMNS} FROM outcome o WHERE o.cursor > ? ORDER BY o.cursor LIMIT ?"
        outcomes = self._outcomes(sql, (after_cursor, limit), bytes_max, whole=True)
        if len(outcomes) > 1 and sum([len(outcome.body or b"") for outcome in outcomes]) > bytes_max:
            outcomes.pop()  # the last body may alone be almost as large as a message can be
        return outcomes

    def _outcomes(self, sql: str, parameters: Sequence[Any], bytes_max: int, *, whole: bool) -> list[StoredOutcome]:
        """Returns outcomes until their bodies together have `bytes_max` or more."""
        outcomes: list[StoredOutcome] = []
        bytes_read = 0
        with self._connection() as connection:
            rows = connection.execute(sql, parameters)
            for row in rows:
                outcome = self._outcome(row, whole=whole)
                outcomes.append(outcome)
                bytes_read += len(outcome.body or b"")
                if bytes_read >= bytes_max:
                    break
            rows.close()
        return outcomes

    def newest_cursor(self) -> int:
        ((cursor,),) = self._rows("SELECT max(cursor) FROM outcome", ())
        return int(cursor or 0)

    def newest_time_s(self) -> float:
        """Returns the submit time of the unsettled task with the highest task_id, or the settle time of the newest
        outcome, whichever is later; 0.0 if there is neither. Raises JournalDamagedError if such a time is out of range.
        """
        task = "SELECT submit_time_s FROM task ORDER BY task_id DESC LIMIT 1"
        outcome = "SELECT settle_time_s FROM outcome ORDER BY cursor DESC LIMIT 1"
        times_s: list[float] = [0.0, *[time_s for sql in (task, outcome) for (time_s,) in self._rows(sql, ())]]
        if strange := [each for each in times_s if not _is_time(each)]:
            raise self._damaged(f"its newest time is {strange[0]!r} s")
        return max(times_s)

    def settings(self) -> dict[str, bytes]:
        with self._connection() as connection:
            return schema.read_settings(connection)

    def list_outcomes(
        self, wanted: OutcomeFilter, edge: int, limit: int, *, oldest_first: bool = False
    ) -> list[StoredOutcome]:
        """Returns settled tasks with task_ids below `edge`, newest first, or above it, oldest first. `edge` 0: all.
        Large results are left out. The list ends early once the bodies have LIST_BYTES.
        """
        where, parameters = _conditions(wanted)
        if edge:
            where += f" AND o.task_id {'>' if oldest_first else '<'} ?"
            parameters.append(edge)
        order = "ASC" if oldest_first else "DESC"
        sql = f"SELECT {_OUTCOME_COLUMNS} FROM outcome o WHERE {where} ORDER BY o.task_id {order} LIMIT ?"
        return self._outcomes(sql, (*parameters, limit), LIST_BYTES, whole=False)

    def count_outcomes(self, wanted: OutcomeFilter) -> dict[int, int]:
        where, parameters = _conditions(wanted)
        counts = dict(self._rows(f"SELECT o.state, count(*) FROM outcome o WHERE {where} GROUP BY o.state", parameters))
        if strange := [state for state in counts if state not in _STATES]:
            raise self._damaged(f"there are outcomes of state {strange[0]!r}")
        return counts

    def existing_dead_letters(self, task_ids: Collection[int]) -> set[int]:
        """Returns the task_ids that are dead letters, also those whose payloads are lost."""
        sql = "SELECT task_id FROM dead_letter WHERE task_id IN (SELECT value FROM json_each(?))"
        return {task_id for (task_id,) in self._rows(sql, (json.dumps(list(task_ids)),))}

    def get_dead_letters(self, task_ids: Sequence[int]) -> list[SubmitRecord]:
        """Returns the dead letters with these task_ids, with payloads. Leaves out task_ids that are no dead letters."""
        sql = f"SELECT {schema.TASK_COLUMNS} FROM dead_letter WHERE task_id IN (SELECT value FROM json_each(?))"
        specs = dict[bytes | str, bytes]()
        found = dict[int, SubmitRecord]()
        for row in self._rows(sql, (json.dumps(list(task_ids)),)):
            try:
                found[row[0]] = self._task(row, specs)
            except JournalError:
                # No error if the dead letter was deleted, with its spec or payload, after its row was read.
                if self.existing_dead_letters([row[0]]):
                    raise
        return [found[task_id] for task_id in dict.fromkeys(task_ids) if task_id in found]

    def dead_letter_queues(self) -> list[str]:
        sql = "SELECT DISTINCT o.queue FROM dead_letter d CROSS JOIN outcome o ON o.task_id = d.task_id"
        return [str(queue) for (queue,) in self._rows(sql, ())]

    def list_dead_letters(
        self, *, queue: str, before_task_id: int, limit: int, queues: Collection[str] | None = None
    ) -> list[StoredOutcome]:
        """Dead letters with task_ids below `before_task_id` (0: all), newest first. `queues`: None for all. The list
        ends early once the bodies have LIST_BYTES.
        """
        parameters = queue, before_task_id, limit, _json_or_null(queues)
        return self._outcomes(_LETTERS.format(_OUTCOME_COLUMNS), parameters, LIST_BYTES, whole=False)

    def list_dead_letter_ids(self, *, queue: str, before_task_id: int, limit: int) -> list[int]:
        """The task_ids of a queue's dead letters below `before_task_id` (0: all), newest first."""
        rows = self._rows(_LETTERS.format("d.task_id"), (queue, before_task_id, limit, None))
        return [task_id for (task_id,) in rows]


def _json_or_null(names: Collection[str] | None) -> str | None:
    """Returns the names as a parameter for json_each."""
    return None if names is None else json.dumps(list(names))


def _are(row: Sequence[Any], types: Sequence[Any]) -> bool:
    """Whether a row's values are of these types."""
    return all(map(isinstance, row, types))


def _is_lost(cause: BaseException) -> bool:
    """Whether a row is lost if reading it raised `cause`; else it can't be read now, or not by this user."""
    return not (is_transient(cause) or isinstance(cause, PermissionError))


def _is_time(value: object) -> bool:
    """Whether a column's value is a time that a master's clock can show."""
    return isinstance(value, float) and 0 <= value < TIME_END_S


def _size_bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # deleted just now
        return 0


def _conditions(wanted: OutcomeFilter) -> tuple[str, list[Any]]:
    """The WHERE clause of a filter, and its parameters."""
    terms, parameters = [_NO_FORMER_LETTER], list[Any]()
    for column, values in (("state", wanted.states or None), ("queue", wanted.queues)):
        if values is not None:
            terms.append(f"o.{column} IN (SELECT value FROM json_each(?))")
            parameters.append(json.dumps(list(values)))
    for condition, value in (
        ("o.queue = ?", wanted.queue),
        ("o.kind = ?", wanted.kind),
        ("o.model = ?", wanted.model),
        ("o.worker_id = ?", wanted.worker_id),
        ("o.submit_time_s >= ?", wanted.submitted_after_s),
        ("o.cursor <= ?", wanted.cursor_max),
    ):
        if value:
            terms.append(condition)
            parameters.append(value)
    if wanted.submitted_before_s < math.inf:
        terms.append("o.submit_time_s < ?")
        parameters.append(wanted.submitted_before_s)
    return " AND ".join(terms), parameters

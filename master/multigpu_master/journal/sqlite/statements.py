"""The statements of a transaction: as few as possible. One statement inserts up to 512 tasks, outcomes or dead letters.
Its number of rows is one of _ROWS; unused rows at its end are NULL, and its WHERE skips them.
"""

# ruff: noqa: S608  # statements are put together from this package's constants; values are always bound

import bisect
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence, Sized
from functools import cache
from typing import Any

from multigpu_master.journal.protocol import Entry, LargeBody, SettleRecord, SubmitRecord
from multigpu_master.journal.sqlite import specs as journal_specs
from multigpu_master.journal.sqlite import usage
from multigpu_master.journal.sqlite.schema import SETTING_EPOCH
from multigpu_master.journal.sqlite.segments import LARGE_BYTES, Segments

TASK_FIELDS, OUTCOME_FIELDS = 8, 13
# The numbers of rows that an insert may have.
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Limit of the values of one statement: SQLite keeps in memory the values that were last bound to each prepared
# statement.
_STATEMENT_BYTES = 1 << 20

Statement = tuple[str, Sequence[Any]]


@cache
def _insert_sql(table: str, fields: int, rows: int) -> str:
    row = f"({','.join('?' * fields)})"
    # A failed statement rolls back the whole transaction, so SQLite needs no data to undo this statement alone.
    return f"INSERT OR ROLLBACK INTO {table} SELECT * FROM (VALUES {','.join([row] * rows)}) WHERE column1 IS NOT NULL"


def inserts(table: str, fields: int, values: list[Any], bytes_total: int) -> Iterator[Statement]:
    """Yields statements that insert rows. `values`: of all rows, flat. `bytes_total`: about how many
    bytes they have, without ids and repeated specs.
    """
    rows = len(values) // fields
    rows_max = _ROWS[-1]
    if bytes_total > _STATEMENT_BYTES:
        rows_max = min(max(rows * _STATEMENT_BYTES // bytes_total, 1), rows_max)
    for at in range(0, rows, rows_max):
        chunk = values[at * fields : (at + rows_max) * fields]
        size = _ROWS[bisect.bisect_left(_ROWS, len(chunk) // fields)]
        chunk += [None] * (size * fields - len(chunk))
        yield _insert_sql(table, fields, size), chunk


def task_values(records: Iterable[SubmitRecord], segments: Segments, specs: dict[str, bytes]) -> list[Any]:
    """Values of rows of `task` or `dead_letter`, flat. Adds large specs to `specs`, large payloads to `segments`."""
    values: list[Any] = []
    for r in records:
        payload: bytes | Sized | str = r.payload
        if len(payload) >= LARGE_BYTES:
            payload = segments.put_payload(r.payload)
        spec = journal_specs.stored_value(r.spec, specs)
        values += (r.task_id, r.request_id, r.partition_key, r.units, r.submit_time_s, r.first_lease_id, spec, payload)
    return values


def outcome_values(records: Sequence[SettleRecord], first_cursor: int, segments: Segments) -> list[Any]:
    values: list[Any] = []
    for cursor, r in enumerate(records, first_cursor):
        body: bytes | LargeBody | str = r.body
        if len(body) >= LARGE_BYTES:
            body = segments.put_body(r.body)
        values += (
            cursor, r.task_id, r.request_id, r.state, r.queue, r.kind, r.model, r.worker_id,
            r.submit_time_s, r.settle_time_s, r.expire_time_s, body, r.fingerprint,
        )  # fmt: skip
    return values


def setting(key: str, value: bytes | None) -> Statement:
    if value is None:
        return "DELETE FROM setting WHERE key = ?", (key,)
    return "INSERT OR REPLACE INTO setting VALUES (?, ?)", (key, value)


def transaction(
    batch: Sequence[Entry], first_cursor: int, bytes_total: int, segments: Segments
) -> tuple[list[Statement], int]:
    """Returns the statements that write these entries, and the number of their outcomes."""
    submits: Iterable[SubmitRecord] = itertools.chain.from_iterable([entry.submits for entry in batch])
    settles = list(itertools.chain.from_iterable([entry.settles for entry in batch]))
    if settles:  # of a task submitted and settled in this transaction, only the outcome is written
        settled = {record.task_id for record in settles}
        submits = [record for record in submits if record.task_id not in settled]
    specs = dict[str, bytes]()
    letters: dict[int, SubmitRecord] = {}  # to insert; the batch may insert one, delete it, and insert it again
    statements: list[Statement] = []
    for entry in batch:
        stored = [task_id for task_id in entry.deleted_dead_letters if letters.pop(task_id, None) is None]
        statements += [("DELETE FROM dead_letter WHERE task_id = ?", (task_id,)) for task_id in stored]
        letters |= {record.task_id: record.dead for record in entry.settles if record.dead is not None}
    statements += inserts("task", TASK_FIELDS, task_values(submits, segments, specs), bytes_total)
    outcomes = outcome_values(settles, first_cursor, segments)
    statements += inserts("outcome", OUTCOME_FIELDS, outcomes, bytes_total)
    if ended := [record.task_id for record in settles if record.submit_may_be_stored]:
        statements.append(("DELETE FROM task WHERE task_id IN (SELECT value FROM json_each(?))", (json.dumps(ended),)))
    if letters:
        size = sum([len(letter.payload) for letter in letters.values()])
        statements += inserts("dead_letter", TASK_FIELDS, task_values(letters.values(), segments, specs), size)
    statements += [(journal_specs.INSERT, each) for each in specs.items()]
    for entry in batch:
        statements += [setting(key, value) for key, value in entry.settings.items()]
        statements += [usage.add_statement(record) for record in entry.usage]
        if entry.epoch:
            statements.append(setting(SETTING_EPOCH, b"%d" % entry.epoch))
    return statements, len(settles)

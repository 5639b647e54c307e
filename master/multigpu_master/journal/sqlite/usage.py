"""The table of usage: a row for each interval and key, to which later sums of the same interval are added."""

# ruff: noqa: S608  # statements are put together from this module's constants; values are always bound

import sqlite3
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from multigpu_master.core.usage import UsageSums
from multigpu_master.journal.protocol import USAGE_INTERVAL_S, UsageKey, UsageRecord

KEPT_S = 400 * 86_400
ROWS_MAX = 10_000  # in one answer
_SWEEP_ROWS = 1000
_SUMS = ("succeeded", "failed", "device_s", "measured_s", "joules", "uncertainty_joules")
SCHEMA = f"""
CREATE TABLE usage (
  begin_s INTEGER NOT NULL, queue TEXT NOT NULL, submitter TEXT NOT NULL, kind TEXT NOT NULL, model TEXT NOT NULL,
  {", ".join(f"{name} REAL NOT NULL" for name in _SUMS)}, PRIMARY KEY (begin_s, queue, submitter, kind, model)
) WITHOUT ROWID"""
_ADD = (
    f"INSERT INTO usage VALUES ({','.join('?' * (5 + len(_SUMS)))}) "
    "ON CONFLICT (begin_s, queue, submitter, kind, model) DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in _SUMS)
)
_DELETE = f"""
DELETE FROM usage WHERE (begin_s, queue, submitter, kind, model) IN (
  SELECT begin_s, queue, submitter, kind, model FROM usage WHERE begin_s < ? LIMIT {_SWEEP_ROWS})"""


def add_statement(record: UsageRecord) -> tuple[str, Sequence[Any]]:
    return _ADD, (record.begin_s, *record.key, *astuple(record.used))


def delete_old(writer: sqlite3.Connection, now_s: float) -> bool:
    """Deletes rows that are older than KEPT_S. Returns whether there may be more."""
    return writer.execute(_DELETE, (int(now_s - KEPT_S),)).rowcount == _SWEEP_ROWS


def select(begin_s: float, end_s: float, group_by: Sequence[str], queues: str | None) -> tuple[str, Sequence[Any]]:
    """Returns the statement for the sums of all intervals that overlap the time from begin_s to end_s. `group_by`:
    fields of UsageKey. `queues`: the queues that the caller may see, as a JSON list; None: all.
    """
    columns = [name if name in group_by else "''" for name in UsageKey._fields]
    sums = ", ".join(f"sum({name})" for name in _SUMS)
    sql = (
        f"SELECT {', '.join(columns)}, {sums} FROM usage WHERE begin_s > ?1 - {USAGE_INTERVAL_S} AND begin_s < ?2 "
        "AND (?3 IS NULL OR queue IN (SELECT value FROM json_each(?3))) "
        f"GROUP BY 1, 2, 3, 4 ORDER BY sum(device_s) DESC LIMIT {ROWS_MAX}"  # 1 to 4: `columns`
    )
    return sql, (begin_s, end_s, queues)


def parse_row(row: Sequence[Any]) -> tuple[UsageKey, UsageSums]:
    succeeded, failed, *others = row[4:]
    return UsageKey(*row[:4]), UsageSums(int(succeeded), int(failed), *others)

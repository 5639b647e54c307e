"""The journal's schema, and the settings that the journal keeps for itself."""

# ruff: noqa: S608  # statements are put together from this package's constants; values are always bound

import secrets
import sqlite3
import time
from collections.abc import Iterator

from multigpu_master import ids
from multigpu_master.core.model import EPOCH_IDS
from multigpu_master.journal.downtimes import Downtimes
from multigpu_master.journal.sqlite import segments as journal_segments
from multigpu_master.journal.sqlite import specs as journal_specs
from multigpu_master.journal.sqlite import usage

DATABASE_NAME = "journal.sqlite3"
PART_NAME = f"{DATABASE_NAME}.part"  # of a backup that is being made, or was interrupted
APPLICATION_ID = int.from_bytes(b"mgpu", "big")
SCHEMA_VERSION = 4
PAGE_BYTES = 8192
BUSY_TIMEOUT_S = 30.0  # another program, such as sqlite3, may lock the file for a moment

SETTING_EPOCH = "journal.epoch"  # the newest epoch of ids
SETTING_LEASE_KEY = "journal.lease_key"  # of ids.LeaseProofs
# The name of the incarnation that opened the journal and has not closed it. While it is set, the log must exist.
SETTING_OPEN = "journal.open"
SETTING_REMOVED = "journal.removed"  # the newest cursor whose outcome the sweeper has deleted
SETTING_TIME = "journal.time"  # the time last saved, and the downtimes: see downtimes.py
_PRIVATE = "journal."  # the prefix of these keys
# Queries for the values that salvage sets in place of values that can't be used.
_REPAIRS = {
    # The newest epoch of the ids in the tables. If it is too low, ids.next_epoch begins with the host's time.
    SETTING_EPOCH: (
        f"SELECT ifnull(max(id), 0) / {EPOCH_IDS} FROM (SELECT max(first_id) AS id FROM incarnation "
        "UNION ALL SELECT max(task_id) FROM task UNION ALL SELECT max(task_id) FROM outcome)"
    ),
    SETTING_REMOVED: "SELECT ifnull(max(cursor), 0) FROM outcome",  # the value must not be too low
}
_LEFT_OPEN = f"""
SELECT EXISTS (SELECT 1 FROM setting WHERE key = '{SETTING_OPEN}'
  AND value = (SELECT name FROM incarnation ORDER BY first_id DESC LIMIT 1))"""

TASK_COLUMNS = "task_id, request_id, spec, payload, partition_key, units, submit_time_s, first_lease_id"
_TASK_TABLE = """(
  task_id INTEGER PRIMARY KEY, request_id TEXT NOT NULL, partition_key TEXT NOT NULL, units INTEGER NOT NULL,
  submit_time_s REAL NOT NULL, first_lease_id INTEGER NOT NULL, spec BLOB NOT NULL, payload BLOB NOT NULL)"""
SCHEMA = f"""
CREATE TABLE setting (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE task {_TASK_TABLE};
CREATE TABLE dead_letter {_TASK_TABLE};
CREATE TABLE outcome (
  cursor INTEGER PRIMARY KEY, task_id INTEGER NOT NULL, request_id TEXT NOT NULL, state INTEGER NOT NULL,
  queue TEXT NOT NULL, kind TEXT NOT NULL, model TEXT NOT NULL, worker_id TEXT NOT NULL,
  submit_time_s REAL NOT NULL, settle_time_s REAL NOT NULL, expire_time_s REAL NOT NULL, body BLOB, \
fingerprint INTEGER);
CREATE INDEX outcome_task ON outcome (task_id);
CREATE INDEX outcome_request ON outcome (request_id) WHERE request_id <> '';
{";".join(journal_specs.SCHEMA)};
CREATE TABLE incarnation (first_id INTEGER PRIMARY KEY, name TEXT NOT NULL, first_cursor INTEGER NOT NULL);
{journal_segments.INDEXES}
{usage.SCHEMA};
INSERT INTO setting VALUES ('{SETTING_EPOCH}', 0);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""


def begin_incarnation(
    writer: sqlite3.Connection, now_s: float, last_cursor: int
) -> tuple[int, list[ids.Incarnation], bytes]:
    """Durably begins an incarnation. Returns its epoch, all incarnations that are kept (the new one is the last), and
    the key of ids.LeaseProofs.
    """
    ((last,),) = writer.execute("SELECT value FROM setting WHERE key = ?", (SETTING_EPOCH,)).fetchall()
    epoch = ids.next_epoch(int(last), now_s)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("UPDATE setting SET value = ? WHERE key = ?", (epoch, SETTING_EPOCH))
    begun = ids.Incarnation(ids.new_incarnation_name(), ids.first_id(epoch, now_s), last_cursor + 1)
    writer.execute("INSERT INTO incarnation VALUES (?, ?, ?)", (begun.first_id, begun.name, begun.first_cursor))
    kept = "SELECT first_id FROM incarnation ORDER BY first_id DESC LIMIT ?"
    writer.execute(f"DELETE FROM incarnation WHERE first_id NOT IN ({kept})", (ids.INCARNATIONS_MAX,))
    rows = writer.execute("SELECT name, first_id, first_cursor FROM incarnation ORDER BY first_id").fetchall()
    key = secrets.token_bytes(ids.LEASE_KEY_BYTES)
    writer.execute("INSERT OR IGNORE INTO setting VALUES (?, ?)", (SETTING_LEASE_KEY, key))
    writer.execute("INSERT OR REPLACE INTO setting VALUES (?, ?)", (SETTING_OPEN, begun.name))
    ((key,),) = writer.execute("SELECT value FROM setting WHERE key = ?", (SETTING_LEASE_KEY,)).fetchall()
    check_lease_key(key)
    writer.execute("COMMIT")
    return epoch, [ids.Incarnation(*row) for row in rows], key


def left_open(connection: sqlite3.Connection) -> bool:
    """Whether the last master has not closed the journal."""
    ((flagged,),) = connection.execute(_LEFT_OPEN).fetchall()
    return bool(flagged)


def check_value(key: str, value: bytes, kind: str) -> None:
    """Raises one of PARSE_ERRORS if the journal can't use the setting's value. `kind`: SQLite's type of the value."""
    if not key.startswith(_PRIVATE) and kind != "blob":
        raise ValueError(f"it is a value of type {kind}")
    if key == SETTING_EPOCH:
        if not 0 <= int(value) < ids.EPOCHS_END:
            raise ValueError(f"{int(value)} is no epoch")
    elif key == SETTING_REMOVED:
        int(value)
    elif key == SETTING_LEASE_KEY:
        check_lease_key(value)
    elif key == SETTING_TIME:
        Downtimes(time.time).load(value)


def repair(writer: sqlite3.Connection, key: bytes) -> None:
    """Replaces the value of a setting that can't be used, or deletes the setting: a master starts without it."""
    writer.execute("DELETE FROM setting WHERE CAST(key AS BLOB) = ?", (key,))
    if value := _REPAIRS.get(key.decode(errors="replace")):
        writer.execute(f"INSERT INTO setting VALUES (?, ({value}))", (key.decode(),))


def check_lease_key(key: bytes) -> None:
    if len(key) != ids.LEASE_KEY_BYTES:
        raise ValueError(f"the setting {SETTING_LEASE_KEY} has {len(key)} bytes")


def clear_open_flag(writer: sqlite3.Connection) -> None:
    """Notes that the journal is closed: the next start does not need its log."""
    writer.execute("DELETE FROM setting WHERE key = ?", (SETTING_OPEN,))


def read_private(connection: sqlite3.Connection, key: str) -> bytes | None:
    row = connection.execute("SELECT value FROM setting WHERE key = ?", (key,)).fetchone()
    return None if row is None else row[0]


def read_settings(connection: sqlite3.Connection) -> dict[str, bytes]:
    rows: Iterator[tuple[str, bytes]] = connection.execute("SELECT key, value FROM setting")
    return {key: value for key, value in rows if not key.startswith(_PRIVATE)}

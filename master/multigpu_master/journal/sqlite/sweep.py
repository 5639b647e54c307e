"""The sweeper deletes the bodies of outcomes once they expire, and their rows after the dedupe window.

Outcomes are swept in zones of consecutive cursors. A heap holds the time at which each zone is examined next, so that
the work is proportional to what there is to delete, without an index on expiry. A step is bounded in rows and bytes and
runs between two commits. SQLite reuses empty pages; when they are a large share of the file, the file is truncated.

The row of the newest outcome stays, whatever its age, so that no cursor is issued twice. The outcome of a dead letter
stays as long as the dead letter. So rows are not always deleted in order: `removed_cursor` is the highest deleted one.
Time during which no master ran does not age an outcome (downtimes.py).
"""

# ruff: noqa: S608  # statements are composed of this package's constants; values are always bound

import heapq
import sqlite3
from collections.abc import Sequence

from multigpu_master.journal.downtimes import Downtimes
from multigpu_master.journal.sqlite import specs as journal_specs
from multigpu_master.journal.sqlite import usage
from multigpu_master.journal.sqlite.schema import SETTING_REMOVED, SETTING_TIME, read_private
from multigpu_master.journal.sqlite.segments import Segments
from multigpu_master.journal.sqlite.statements import setting

_ZONE_CURSORS = 1024
_PERIOD_S = 30.0  # between two examinations of a zone, unless there is more to delete
_STEP_BYTES = 16 << 20  # of bodies deleted in one step
# Pages that one step returns to the file system: fewer on a full disk, because the log grows first.
_CUT_PAGES, _CUT_PAGES_FULL = 256, 16
_CUT_SHARE = 0.25  # of the pages must be empty before the file is truncated
_CUT_PAGES_MIN = 1024
_USAGE_PERIOD_S = 3600.0  # between two sweeps of usage

_KEPT = "EXISTS (SELECT 1 FROM dead_letter d WHERE d.task_id = outcome.task_id)"
_DUE_S = f"""
SELECT min(CASE WHEN body IS NULL THEN max(expire_time_s, settle_time_s + ?1) ELSE expire_time_s END)
FROM outcome WHERE cursor BETWEEN ?2 AND ?3 AND cursor < ?4 + (body IS NOT NULL) AND NOT {_KEPT}"""
_EXPIRED_BODIES = f"""
SELECT cursor, length(body) FROM outcome
WHERE cursor BETWEEN ?1 AND ?2 AND expire_time_s <= ?3 AND body IS NOT NULL AND NOT {_KEPT} ORDER BY cursor"""
_DROP_BODIES = f"""
UPDATE outcome SET body = NULL
WHERE cursor BETWEEN ?1 AND ?2 AND expire_time_s <= ?3 AND body IS NOT NULL AND NOT {_KEPT}"""
_DUE_ROWS = f"""
outcome WHERE cursor BETWEEN ?1 AND ?2 AND cursor < ?5 AND expire_time_s <= ?3 AND settle_time_s <= ?3 - ?4
AND NOT {_KEPT}"""


class Sweeper:
    """Deletes what has expired, through the writer's connection and on its thread."""

    def __init__(
        self, writer: sqlite3.Connection, segments: Segments, downtimes: Downtimes, dedupe_window_s: float
    ) -> None:
        self._writer = writer
        self._segments = segments
        self._downtimes = downtimes
        self._now = downtimes.clock
        # Increased before the deletion is committed: a reader to which a row is missing sees the new value.
        self.removed_cursor = int(read_private(writer, SETTING_REMOVED) or 0)
        self._dedupe_window_s = dedupe_window_s
        self._last_spec_digest = ""  # the last spec examined; "": begin with the first
        self._usage_at_s = 0.0  # when usage is swept next
        ((oldest, newest),) = writer.execute("SELECT min(cursor), max(cursor) FROM outcome").fetchall()
        self._last_cursor: int = newest or 0
        self._newest_zone = self._last_cursor // _ZONE_CURSORS
        # A heap of (due_s, zone). An entry is stale unless _entries has it.
        self._zones: list[tuple[float, int]] = []
        self._entries: dict[int, tuple[float, int]] = {}
        cursor: int | None = oldest or 0
        while cursor is not None:  # zones without rows are skipped: an old dead letter may precede a million of them
            zone = cursor // _ZONE_CURSORS
            self._schedule(zone, 0.0)
            next_row = "SELECT min(cursor) FROM outcome WHERE cursor >= ?"
            ((cursor,),) = writer.execute(next_row, ((zone + 1) * _ZONE_CURSORS,)).fetchall()

    def note_commit(self, last_cursor: int, deleted_letters: Sequence[int]) -> None:
        """Records the newest cursor. The outcomes of deleted dead letters may now expire: their zones are due."""
        self._last_cursor = last_cursor
        while self._newest_zone < last_cursor // _ZONE_CURSORS:
            self._newest_zone += 1
            self._schedule(self._newest_zone, self._now() + _PERIOD_S)
        for task_id in deleted_letters:
            for (cursor,) in self._writer.execute(
                "SELECT cursor FROM outcome WHERE task_id = ?", (task_id,)
            ).fetchall():
                self._schedule(cursor // _ZONE_CURSORS, 0.0)

    def _schedule(self, zone: int, due_s: float) -> None:
        """Sets when a zone is examined next."""
        entry = self._entries[zone] = due_s, zone
        heapq.heappush(self._zones, entry)

    def step(self, *, disk_full: bool = False) -> bool:
        """Does one part of the due work. Returns False if there was none. `disk_full`: even small amounts of unused
        space in the files are returned to the disk.
        """
        if self._downtimes.save_due():
            self.save_time()
        return (
            self._sweep_zone()
            or self._sweep_specs()
            or self._sweep_usage()
            or self._segments.delete_unused(self._writer)
            or self._cut_file(disk_full)
        )

    def save_time(self) -> None:
        ((oldest,),) = self._writer.execute("SELECT min(cursor) FROM outcome").fetchall()
        self._downtimes.save(oldest or 0, lambda value: self._writer.execute(*setting(SETTING_TIME, value)))

    def _sweep_zone(self) -> bool:
        now = self._now()
        if not self._zones or self._zones[0][0] > now:
            return False
        entry = heapq.heappop(self._zones)
        zone = entry[1]
        if self._entries.get(zone) is not entry:
            return True
        del self._entries[zone]
        low, high = zone * _ZONE_CURSORS, (zone + 1) * _ZONE_CURSORS - 1
        try:
            due_s = self._due_s(low, high)
            if due_s is not None and due_s <= now:
                self._delete_due(low, high, self._downtimes.now_without_downtime_s(low))
                due_s = self._due_s(low, high)
        except sqlite3.Error:
            self._schedule(zone, now + _PERIOD_S)
            raise
        if due_s is not None and due_s <= now:  # _STEP_BYTES was reached
            self._schedule(zone, now)
        elif high >= self._last_cursor:  # the newest row stays for now; later rows of the zone may expire sooner
            self._schedule(zone, now + _PERIOD_S)
        elif due_s is not None:
            self._schedule(zone, max(due_s, now + _PERIOD_S))
        return True

    def _due_s(self, low: int, high: int) -> float | None:
        """Returns when the first body or row of these outcomes is due to be deleted; None if none can be deleted."""
        parameters = (self._dedupe_window_s, low, high, self._last_cursor)
        ((due_s,),) = self._writer.execute(_DUE_S, parameters).fetchall()
        return None if due_s is None else float(due_s) + self._downtimes.downtime_s(low)

    def _delete_due(self, low: int, high: int, now: float) -> None:
        bytes_dropped = 0
        for cursor, body_bytes in self._writer.execute(_EXPIRED_BODIES, (low, high, now)).fetchall():
            bytes_dropped += body_bytes
            if bytes_dropped >= _STEP_BYTES:
                high = cursor
                break
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            due = (low, high, now, self._dedupe_window_s, self._last_cursor)
            ((newest,),) = self._writer.execute(f"SELECT max(cursor) FROM {_DUE_ROWS}", due).fetchall()
            if newest is not None:
                self._writer.execute(f"DELETE FROM {_DUE_ROWS}", due)
                self.removed_cursor = max(self.removed_cursor, newest)
                self._writer.execute(*setting(SETTING_REMOVED, b"%d" % self.removed_cursor))
            self._writer.execute(_DROP_BODIES, (low, high, now))
            self._writer.execute("COMMIT")
        except sqlite3.Error:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise

    def _sweep_specs(self) -> bool:
        deleted, self._last_spec_digest = journal_specs.delete_unused(self._writer, self._last_spec_digest)
        return deleted

    def _sweep_usage(self) -> bool:
        now = self._now()
        if now < self._usage_at_s:
            return False
        more = usage.delete_old(self._writer, now)
        self._usage_at_s = now if more else now + _USAGE_PERIOD_S
        return more

    def _cut_file(self, disk_full: bool) -> bool:
        ((empty_pages,),) = self._writer.execute("PRAGMA freelist_count").fetchall()
        ((pages,),) = self._writer.execute("PRAGMA page_count").fetchall()
        if empty_pages < (1 if disk_full else max(_CUT_PAGES_MIN, pages * _CUT_SHARE)):
            return False
        pages = _CUT_PAGES_FULL if disk_full else _CUT_PAGES
        self._writer.execute(f"PRAGMA incremental_vacuum({pages})").fetchall()
        return True

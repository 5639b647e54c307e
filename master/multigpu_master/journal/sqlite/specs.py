"""Large specs, stored once each. A row of `task` or `dead_letter` has a small spec itself (a BLOB), or the digest of a
large one (a TEXT).

Ten thousand tasks of one request share their spec, and its parameters may have 64 KiB. A transaction inserts the large
specs that its rows refer to, unless they are stored already. The sweeper deletes specs that no row refers to any more.
"""

import hashlib
import sqlite3

INLINE_BYTES_MAX = 512
SWEEP_ROWS = 64

SCHEMA = (
    "CREATE TABLE spec (digest TEXT PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE INDEX task_spec ON task (spec) WHERE typeof(spec) = 'text'",
    "CREATE INDEX dead_letter_spec ON dead_letter (spec) WHERE typeof(spec) = 'text'",
)
INSERT = "INSERT OR IGNORE INTO spec VALUES (?, ?)"
SELECT = "SELECT body FROM spec WHERE digest = ?"
_DELETE_UNUSED = """
DELETE FROM spec WHERE digest > ?1 AND digest <= ?2
  AND NOT EXISTS (SELECT 1 FROM task t WHERE typeof(t.spec) = 'text' AND t.spec = digest)
  AND NOT EXISTS (SELECT 1 FROM dead_letter d WHERE typeof(d.spec) = 'text' AND d.spec = digest)"""


def stored_value(spec: bytes, large: dict[str, bytes]) -> bytes | str:
    """The value of a row's spec column. Adds a large spec to `large`, by its digest."""
    if len(spec) <= INLINE_BYTES_MAX:
        return spec
    digest = hashlib.blake2b(spec, digest_size=16).hexdigest()
    large[digest] = spec
    return digest


def delete_unused(writer: sqlite3.Connection, after: str) -> tuple[bool, str]:
    """Deletes unused specs among the next SWEEP_ROWS after this digest. Returns whether any was deleted, and the last
    digest examined; "" after the last spec.
    """
    sql = "SELECT digest FROM spec WHERE digest > ? ORDER BY digest LIMIT ?"
    digests = [digest for (digest,) in writer.execute(sql, (after, SWEEP_ROWS)).fetchall()]
    if not digests:
        return False, ""
    return writer.execute(_DELETE_UNUSED, (after, digests[-1])).rowcount > 0, digests[-1]

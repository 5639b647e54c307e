"""How the journal's database gets from each released schema to the next.

`schema` holds the current schema. Version 1 is that of commit 2c701ac; its databases open in every later
multigpu. After a migration `sqlite_master` equals that of a new database: what SQLite cannot alter in place is made
anew and copied.
"""

from multigpu_master.journal.sqlite import specs as journal_specs

OLDEST_VERSION = 1

# Version n: the statements that bring a database of version n to version n + 1.
_MIGRATIONS: dict[int, tuple[str, ...]] = {
    1: (
        *journal_specs.SCHEMA,
        "ALTER TABLE outcome ADD COLUMN fingerprint INTEGER",
        "DROP TRIGGER settle",
        "CREATE TABLE incarnation (first_id INTEGER PRIMARY KEY, name TEXT NOT NULL, first_cursor INTEGER NOT NULL)",
        # Masters of schema 1 sent no incarnation, and gave out ids from their epoch << 33: 512 epochs of ours each.
        # One more is left out, as nothing kept the last of those masters from counting on into the next epoch.
        "INSERT INTO incarnation VALUES (0, '', 0)",
        "UPDATE setting SET value = (value + 2) * 512 - 1 WHERE key = 'journal.epoch'",
    ),
}


def statements(version: int, wanted: int) -> list[str]:
    """The statements that bring a database of one version to a later one, in order; none if it is there already."""
    return [statement for at in range(version, wanted) for statement in _MIGRATIONS[at]]

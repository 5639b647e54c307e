"""The write-ahead log: damage to acknowledged data is detected, and a torn end after a loss of power is not damage."""

import random
import shutil
import tempfile
from pathlib import Path

from multigpu_master.journal.protocol import JournalDamagedError
from multigpu_master.journal.sqlite.schema import DATABASE_NAME

from tests.disk.test_log_damage import FRAME_BYTES, TASKS, commits_of, tasks_of, write


def check(seed: int) -> None:
    """AssertionError: a rule is broken."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        data_dir = Path(place) / "data"
        write(data_dir, TASKS)
        log = data_dir / f"{DATABASE_NAME}-wal"
        whole = log.read_bytes()
        before = commits_of(log)[-2]
        data = bytearray(whole)
        data[before + FRAME_BYTES + 7] ^= 32  # a frame of the newest transaction says that it ends one
        log.write_bytes(data)
        copy = Path(place) / "copy"
        shutil.copytree(data_dir, copy)
        try:
            assert tasks_of(copy) == list(range(1, TASKS)), "acknowledged tasks are gone"
        except JournalDamagedError as error:
            raise AssertionError("a torn transaction is taken for damage") from error
        data = bytearray(whole)
        data[dice.randrange(before)] ^= 1 << dice.randrange(8)
        log.write_bytes(data)
        try:
            tasks_of(data_dir)
        except JournalDamagedError:
            return
        raise AssertionError("damage of the log is not noticed")
